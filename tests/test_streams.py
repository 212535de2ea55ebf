"""Private streams: which tasks, classes and rows each client gets, and what follows for a run."""

import json

import numpy as np
import pytest
from small_runs import COMMON

from fcljax import cli
from fcljax.choices import with_options
from fcljax.config import PartitionConfig
from fcljax.data.files.sources import load_dataset
from fcljax.data.streams import SUPERCLASSES, Private, WithinSources, own_streams, shared_streams, split_pool
from fcljax.data.tasks import make_tasks, tasks_of
from fcljax.errors import InputError
from fcljax.scenario import make_scenario

LABELS = np.repeat(np.arange(20), 12)
TASKS = np.split(np.arange(20), 4)


def rng(seed=0):
    return np.random.RandomState(seed)


def owners(streams):
    """[client, class]: rows that each has."""
    rows = [np.concatenate(stream.indices) for stream in streams]
    return np.array([np.bincount(LABELS[mine], minlength=20) for mine in rows])


def test_a_task_goes_to_some_clients_each_with_some_of_its_classes_and_rows_of_its_own():
    streams = shared_streams(LABELS, TASKS, 6, 0.5, rng())
    everything = np.concatenate([np.concatenate(stream.indices) for stream in streams])
    assert len(np.unique(everything)) == len(everything)
    taking = np.array([[len(classes) for classes in stream.classes] for stream in streams])
    assert set(np.unique(taking)) == {0, 2}  # half of five, or no part in the task
    assert len({(column > 0).sum() for column in taking.T}) > 1
    for stream in streams:
        for task, classes, rows in zip(TASKS, stream.classes, stream.indices, strict=True):
            assert np.isin(classes, task).all()
            assert set(LABELS[rows]) == set(classes)


def test_owners_of_a_class_have_equal_shares_of_all_its_rows():
    held = owners(shared_streams(LABELS, TASKS, 6, 0.5, rng(1)))
    for column in held.T:
        mine = column[column > 0]
        assert mine.sum() in (0, 12) and (not mine.size or np.ptp(mine) <= 1)


def test_a_class_with_fewer_rows_than_owners_is_refused():
    with pytest.raises(InputError, match="clients: .* own a class with 1 examples"):
        shared_streams(np.arange(20), TASKS, 40, 1.0, rng())


def test_clients_draw_tasks_of_a_pool_in_an_order_of_their_own():
    """Where there are enough tasks, none goes to two; where not, owners share the rows."""
    pool = np.split(np.arange(20), 10)
    alone = own_streams(LABELS, pool, 5, 2, rng())
    assert ((owners(alone) > 0).sum(axis=0) == 1).all() and owners(alone).sum() == len(LABELS)
    several = own_streams(LABELS, pool, 5, 6, rng())
    held = owners(several)
    assert ((held > 0).sum(axis=1) == 12).all() and (held > 0).sum(axis=0).max() > 1
    orders = [tuple(int(classes[0]) for classes in stream.classes) for stream in several]
    assert len(set(orders)) == 5
    with pytest.raises(
        InputError, match="tasks: a client cannot draw 11 tasks from a pool of 10; nearest: 10"
    ):
        own_streams(LABELS, pool, 5, 11, rng())


def test_pools_are_of_neighbours_of_superclasses_or_of_one_source_each():
    names = [name for group in SUPERCLASSES.values() for name in group]
    assert len(names) == len(set(names)) == 100 and len(SUPERCLASSES) == 20
    nothing = np.zeros(100, int)
    pool = split_pool("superclasses", names[::-1], nothing, 5, 0)
    assert len(pool) == 20 and all(np.ptp(task) == 4 for task in pool)
    whales = {names[::-1][i] for i in pool[0]}
    assert whales == set(SUPERCLASSES["aquatic mammals"])
    assert [list(task) for task in split_pool("order", ["x"] * 5, nothing[:5], 2, 0)] == [[0, 1], [2, 3]]
    sources = np.array([0, 1, 0, 1, 0, 0])
    pool = split_pool("sources", ["x"] * 6, sources, 2, 0)
    assert [list(task) for task in pool] == [[0, 2], [4, 5], [1, 3]]
    assert len(split_pool("sources", ["x"] * 6, sources, 2, 1)) == 2
    with pytest.raises(InputError, match="task_pool: 'superclasses' gives no task"):
        split_pool("superclasses", ["0", "1"], nothing[:2], 5, 0)


def test_tasks_of_any_classes_say_what_was_seen_before():
    first, second, third = tasks_of([np.array([3, 1]), np.array([], int), np.array([0, 1, 2])], 5)
    assert list(first.classes) == [3, 1, -1] and not second.current.any()
    assert list(second.seen) == list(first.seen) == [False, True, False, True, False]
    assert list(third.seen & ~third.current) == [False, False, False, True, False]
    for task, other in zip(make_tasks(5, 2), tasks_of([np.arange(3), np.arange(3, 5)], 5), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(task, other, strict=True))


def scenario_of(**values):
    cfg = with_options(PartitionConfig(), {"partition": "private", **values})
    return make_scenario(load_dataset("digits"), cfg, 2, False)


def test_a_scenario_gives_every_client_its_own_task_and_remembers_what_it_has_learned():
    made = scenario_of(tasks=3, clients=4, task_pool="order", task_pool_classes=2)
    for t, (task, of_task) in enumerate(zip(made.tasks, made.partitions, strict=True)):
        (partition, again) = of_task
        assert partition is again and partition.task.current.shape == (4, 10)
        assert (partition.task.current.any(axis=0) == task.current).all()
        # in the same places, so that sums are of one class
        assert (partition.task.classes == task.classes).all()
        assert ((partition.class_examples > 0) == partition.task.current).all()
        assert (made.learned(t) == partition.task.seen).all()
        assert (made.current(t, 2) == partition.task.current[2]).all()
    assert (made.learned(2).sum(axis=1) == 6).all() and ((made.holdings > 0) == made.learned(2)).all()


def test_streams_through_the_same_tasks_keep_their_order():
    made = scenario_of(tasks=5, clients=6)
    for t, task in enumerate(make_tasks(10, 5)):
        assert (made.tasks[t].current == task.current).all()
        own = made.partitions[t][0].task
        assert (own.current.sum(axis=1) <= 1).all() and not (own.current & ~task.current).any()


def small_npz(path, classes, side, **more):
    """Images that are as bright as their class."""
    label = np.repeat(np.arange(classes), 8)
    image = np.broadcast_to(label[:, None, None, None] * 10, (len(label), side, side, 3)).astype(np.uint8)
    np.savez(path, x_train=image, y_train=label, x_test=image, y_test=label, **more)
    return f"npz:{path}"


def test_a_mixture_has_all_classes_in_one_size_and_its_pool_keeps_sources_apart(tmp_path):
    """As in NonIID-50: enough tasks for everybody, so that no class has two owners."""
    first = small_npz(tmp_path / "a.npz", 4, 8, class_names=np.array(list("abcd")))
    second = small_npz(tmp_path / "b.npz", 6, 12)
    dataset = load_dataset(f"mix:{first}+{second}")
    assert dataset.class_names[:5] == (*(f"{first}/{name}" for name in "abcd"), f"{second}/0")
    assert dataset.x_train.shape == (80, 8, 8, 3) and dataset.sources == (0,) * 4 + (1,) * 6
    assert (dataset.x_train[dataset.y_train == 9] == 50).all()
    cfg = PartitionConfig(
        partition=Private(WithinSources(task_pool_classes=2)),
        tasks=1,
        clients=5,
        class_order="natural",
    )
    made = make_scenario(dataset, cfg, 1, False)
    owned = made.holdings > 0
    assert (owned.sum(axis=0) == 1).all() and (owned.sum(axis=1) == 2).all()
    assert all(len({dataset.sources[i] for i in np.flatnonzero(mine)}) == 1 for mine in owned)


@pytest.mark.parametrize(
    "names, why", [(np.array(["a"]), "shape \\[4\\] or longer"), (np.arange(4), "expected text")]
)
def test_names_that_do_not_fit_the_labels_are_refused(tmp_path, names, why):
    with pytest.raises(InputError, match=f"class_names is .*{why}"):
        load_dataset(small_npz(tmp_path / "a.npz", 4, 8, class_names=names))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--task-pool", "order"], "task_pool: only private reads it, and partition is 'iid'"),
        (
            ["--partition", "private", "--task-pool-classes", "2"],
            "task_pool_classes: only order and sources read it, and task_pool is 'same'",
        ),
        (
            ["--partition", "private", "--task-pool", "order", "--category-ratio", "0.5"],
            "category_ratio: only same reads it, and task_pool is 'order'",
        ),
        (
            ["--partition", "private", "--task-pool", "order", "--task-pool-limit", "2"],
            "task_pool_limit: only sources reads it, and task_pool is 'order'",
        ),
        (["--partition", "private", "--population", "redrawn"], "population: private clients are static"),
        (["--partition", "private", "--split-ratio", "0.5"], "split_ratio: only sampled reads it"),
        (
            ["--partition", "private", "--task-pool", "superclasses"],
            "task_pool: 'superclasses' gives no task",
        ),
    ],
)
def test_settings_of_private_streams_come_with_them(options, line, tmp_path, capsys):
    chosen = options if "--partition" in options else ["--partition", "iid", *options]
    assert cli.main(["run", "linear", *COMMON, *chosen, "--out", str(tmp_path / "run")]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.long
def test_a_run_on_streams_of_their_own_ends_in_a_table(tmp_path):
    """Of a method whose global model counts: it is evaluated on everybody's classes, and where the task is
    told it is right at least as often."""
    options = ["--partition", "private", "--task-pool", "order", "--task-pool-classes", "2", "--tasks", "2"]
    out = tmp_path / "run"
    assert cli.main(["run", "linear", *COMMON, *options, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["task_il"]["A_last"] >= summary["A_last"] > 0
    assert summary["personal"] is None
