"""The examples of each client in every round: static clients keep theirs, redrawn populations get new
ones."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest
import small_runs

from fcljax import cli
from fcljax.choices import with_options
from fcljax.config import PartitionConfig, partitioned
from fcljax.data.files.sources import load_dataset
from fcljax.data.partition import dirichlet
from fcljax.data.sampled import sample_client
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.scenario import assign, make_scenario

CLASSES, TASKS = 10, 5
BY_TASK = ["quantity", "shards", "task_dirichlet"]
PARTITIONS = ["dirichlet", "iid", *BY_TASK]
OPTIONS = [
    "--tasks",
    "2",
    "--rounds",
    "2",
    "--clients",
    "2",
    "--epochs",
    "1",
    "--image-size",
    "8",
    "--batch-size",
    "256",
]


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def settings(**values):
    usual = with_options(PartitionConfig(), values)
    return partitioned(dataclasses.replace(usual, clients=3), usual)


def owned(assigned, task, round_=0):
    """The indices of each client's examples."""
    return [part.tolist() for part in assigned.indices(task, round_).by_client()]


# ---- static clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "sizes", "first", "digest"),
    [
        (
            "dirichlet",
            [31, 157, 93],
            [163, 1293, 624, 93],
            "23722a062e747a6807cb3bc8c067d80d832ae6d5cea880cb0123522e5993761c",
        ),
        (
            "iid",
            [95, 93, 93],
            [355, 830, 93, 1339],
            "01a45077752592c9c982abb69490da31128ef9a377e0b106ff89cb3aa861feea",
        ),
    ],
)
def test_static_partitions_of_the_whole_training_set_are_what_they_always_were(
    digits, partition, sizes, first, digest
):
    assigned = assign(digits, settings(partition=partition))
    assert np.diff(assigned.indices(0, 0).offset).tolist() == sizes
    assert assigned.indices(0, 0).indices[:4].tolist() == first
    parts = [
        array
        for task in range(TASKS)
        for array in (assigned.indices(task, 0).indices.astype("<i4"), assigned.indices(task, 0).offset)
    ]
    content = b"".join(array.tobytes() for array in (*parts, assigned.train_label, assigned.test_label))
    assert hashlib.sha256(content).hexdigest() == digest


@pytest.mark.parametrize("partition", PARTITIONS)
def test_static_clients_have_the_same_examples_in_every_round(digits, partition):
    assigned = assign(digits, settings(partition=partition))
    assert owned(assigned, 1, 0) == owned(assigned, 1, 7)


def test_an_independent_client_has_its_part_of_a_partition_of_its_own(digits):
    """As in PILoRA's release: clients share examples, and some examples belong to no client."""
    assigned = assign(digits, settings(partition="task_dirichlet", population="independent", seed=5))
    mine = np.flatnonzero(assigned.train_label < 2)  # two classes a task
    for round_ in (0, 1):
        found = owned(assigned, 0, round_)
        for client in range(3):
            rng = np.random.RandomState([5, 0, round_, client])
            assert found[client] == mine[dirichlet(digits.y_train[mine], 3, 0.5, rng)[client]].tolist()
    assert owned(assigned, 0, 0) != owned(assigned, 0, 1)
    assert len(set(sum(found, []))) < len(sum(found, []))
    together = assign(digits, settings(partition="task_dirichlet", population="redrawn", seed=5))
    assert len(set(sum(owned(together, 0), []))) == len(sum(owned(together, 0), [])) == len(mine)


@pytest.mark.parametrize("population", ["static", "redrawn"])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_clients_have_examples_of_the_tasks_classes_only_and_share_none_except_in_shards(
    digits, partition, population
):
    assigned = assign(digits, settings(partition=partition, population=population))
    for task, described in enumerate(make_tasks(CLASSES, TASKS)):
        rows = np.concatenate(owned(assigned, task)).astype(int)
        assert described.current[assigned.train_label[rows]].all()
        assert partition == "shards" or len(set(rows)) == len(rows)
        if partition not in ("quantity", "shards"):
            assert set(rows) == set(np.flatnonzero(described.current[assigned.train_label]))


def test_partitions_by_task_go_on_with_the_stream_of_the_class_order_task_by_task(digits):
    assigned = assign(digits, settings(partition="task_dirichlet", seed=5))
    stream = np.random.RandomState(5)
    stream.permutation(CLASSES)
    for task, described in enumerate(make_tasks(CLASSES, TASKS)):
        mine = np.flatnonzero(described.current[assigned.train_label])
        parts = dirichlet(digits.y_train[mine], 3, 0.5, stream)
        assert owned(assigned, task) == [mine[part].tolist() for part in parts]


def test_the_natural_class_order_is_that_of_the_labels_and_draws_nothing(digits):
    assigned = assign(digits, settings(partition="task_dirichlet", class_order="natural"))
    np.testing.assert_array_equal(assigned.train_label, digits.y_train)
    np.testing.assert_array_equal(assigned.test_label, digits.y_test)
    mine = np.flatnonzero(digits.y_train < CLASSES // TASKS)
    parts = dirichlet(digits.y_train[mine], 3, 0.5, np.random.RandomState(2023))
    assert owned(assigned, 0) == [mine[part].tolist() for part in parts]


@pytest.mark.parametrize("population", ["static", "redrawn"])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_examples_beyond_the_training_share_belong_to_no_client(digits, partition, population):
    assigned = assign(digits, settings(partition=partition, population=population, train_share=0.8))
    rows = np.concatenate([part for task in range(TASKS) for part in owned(assigned, task)]).astype(int)
    for label in range(CLASSES):
        members = np.flatnonzero(digits.y_train == label)
        mine = rows[digits.y_train[rows] == label]
        assert mine.max() <= members[int(np.ceil(0.8 * len(members))) - 1]
        if partition in ("dirichlet", "iid", "task_dirichlet"):
            assert len(mine) == np.ceil(0.8 * len(members))


# ---- redrawn populations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_round_of_a_redrawn_population_has_other_examples(digits, partition):
    assigned = assign(digits, settings(partition=partition, population="redrawn"))
    rounds = [owned(assigned, 0, round_) for round_ in range(4)]
    for other in range(1, 4):
        assert [sorted(part) for part in rounds[0]] != [sorted(part) for part in rounds[other]]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_redrawn_partition_depends_on_seed_task_and_round_only(digits, partition):
    assigned = assign(digits, settings(partition=partition, population="redrawn"))
    forward = [owned(assigned, task, round_) for task in range(3) for round_ in range(2)]
    again = assign(digits, settings(partition=partition, population="redrawn"))
    backward = [owned(again, task, round_) for task in reversed(range(3)) for round_ in reversed(range(2))]
    assert forward == backward[::-1]


def test_a_redrawn_partition_of_another_seed_is_another(digits):
    natural = settings(partition="task_dirichlet", population="redrawn", class_order="natural")
    assert owned(assign(digits, natural), 0) != owned(
        assign(digits, dataclasses.replace(natural, seed=2024)), 0
    )


def test_an_impossible_alpha_is_refused_whether_clients_are_static_or_not(digits):
    refused = pytest.raises(
        InputError, match="^classes_per_client: 3 label ids per client, of 2; nearest valid value: 2$"
    )
    with refused:
        assign(digits, settings(partition="quantity", classes_per_client=3))
    with refused:
        assign(digits, settings(partition="quantity", classes_per_client=3, population="redrawn")).indices(
            0, 0
        )


# ---- runs --------------------------------------------------------------------------------------------------


def finished(options, factory):
    """The run directory of `linear` under these options."""
    out = factory.getbasetemp() / "-".join(["run", *options]).replace("--", "")
    if not out.exists():
        assert (
            cli.main(["run", "linear", *OPTIONS, *options, "--keep-checkpoints", "4", "--out", str(out)]) == 0
        )
    return out


@pytest.mark.parametrize(
    ("partition", "population"),
    small_runs.some(
        [
            *((partition, "redrawn") for partition in PARTITIONS),
            *((partition, "static") for partition in BY_TASK),
        ],
        [],
    ),
)
def test_a_run_finishes_under_every_partition_and_population(partition, population, tmp_path_factory):
    out = finished(["--partition", partition, "--population", population], tmp_path_factory)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["traces"] == 1
    assert all(0 <= value <= 1 for value in summary["client_accuracy"])
    assert (out / "figures" / "classes.png").stat().st_size


@pytest.mark.long
def test_a_resumed_run_of_a_redrawn_population_equals_the_uninterrupted_one(tmp_path, tmp_path_factory):
    reference = finished(["--partition", "shards", "--population", "redrawn"], tmp_path_factory)
    out = shutil.copytree(reference, tmp_path / "resumed")
    (out / "summary.json").unlink()
    for step in ("2", "3", "4"):
        shutil.rmtree(out / "checkpoints" / step)
    assert cli.main(["run", "linear", "--resume", str(out)]) == 0
    small_runs.assert_same_run(out, reference)


@pytest.mark.long
def test_the_examples_of_a_redrawn_round_are_those_that_were_assigned(digits, tmp_path_factory):
    out = finished(["--partition", "task_dirichlet", "--population", "redrawn"], tmp_path_factory)
    cfg = PartitionConfig(tasks=2, clients=2, partition="task_dirichlet", population="redrawn")
    assigned = assign(digits, cfg)
    rows = sum(len(assigned.indices(task, round_).indices) for task in range(2) for round_ in range(2))
    *_, records = small_runs.last_checkpoint(out)
    assert records["counts"]["client_images"] == rows


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            ["--partition", "quantity", "--classes-per-client", "6"],
            ["classes_per_client: 6", "nearest valid value: 5"],
        ),
        (
            ["--partition", "quantity", "--classes-per-client", "0"],
            ["classes_per_client: 0", "nearest valid value: 1"],
        ),
        (["--train-share", "1.5"], ["train_share: 1.5", "nearest valid value: 1.0"]),
        (["--train-share", "0"], ["train_share: 0.0", "positive"]),
        (["--partition", "shard"], ["partition", "'shard'", "did you mean 'shards'?"]),
        (["--population", "drawn"], ["population", "'drawn'", "did you mean 'redrawn'?"]),
        (["--class-order", "sorted"], ["class_order", "'sorted'", "natural"]),
    ],
)
def test_settings_of_an_impossible_partition_are_one_line(options, parts, tmp_path, capsys):
    assert cli.main(["run", "linear", *OPTIONS, *options, "--out", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fcljax: ")]
    assert all(part in line for part in parts)


@pytest.mark.parametrize("partition", BY_TASK)
@pytest.mark.long
def test_the_chart_of_a_redrawn_population_shows_the_first_round_of_each_task(
    digits, partition, tmp_path, capsys
):
    options = ["--clients", "3", "--partition", partition, "--population", "redrawn"]
    assert cli.main(["data", "show", "digits", *options, "--out", str(tmp_path)]) == 0
    assigned = assign(digits, settings(partition=partition, population="redrawn"))
    sizes = np.sum([np.diff(assigned.indices(task, 0).offset) for task in range(TASKS)], axis=0)
    shown = capsys.readouterr().out
    assert f"{sizes.min()} to {sizes.max()}" in shown
    assert f"{partition}, again in every round" in shown
    assert (tmp_path / "classes.png").read_bytes().startswith(b"\x89PNG")


# ---- sampled clients ---------------------------------------------------------------------------------------


def test_sampled_clients_depend_on_seed_task_round_and_client(digits):
    """The seeds of HePCo's release: client + 1 + K round + K R task + 2000 seed."""
    cfg = settings(partition="sampled", split_ratio=0.2, category_ratio=0.5, seed=9, class_order="natural")
    assigned = assign(digits, cfg, rounds=4)
    for task, round_ in ((0, 0), (0, 3), (2, 1)):
        rows = np.flatnonzero(make_tasks(CLASSES, TASKS)[task].current[digits.y_train])
        for client, mine in enumerate(owned(assigned, task, round_)):
            seed = client + 1 + 3 * round_ + 12 * task + 18000
            sample = sample_client(digits.y_train[rows], seed, 0.2, 0.5, 1.0)
            assert mine == rows[sample.indices].tolist() and len(sample.reported) == 1 and mine
    assert owned(assigned, 0, 0) == owned(assign(digits, cfg, rounds=4), 0, 0) != owned(assigned, 0, 1)


def test_sampled_clients_share_examples(digits):
    """Clients draw independently, so that two may have the same examples."""
    assigned = assign(digits, settings(partition="sampled", split_ratio=1.0, category_ratio=1.0))
    first, second, _ = owned(assigned, 1)
    assert len(set(first)) == len(first) == len(second) and len({*first} & {*second}) > 200


def test_long_tails_that_are_only_reported_do_not_change_the_examples(digits):
    """The method gets what clients report, the chart what they have."""
    sampled = {"partition": "sampled", "split_ratio": 0.5, "category_ratio": 1.0, "imbalance": 0.1}
    reporting, real = (
        make_scenario(digits, settings(**sampled, long_tail=kind), 2, False)
        for kind in ("reported", "applied")
    )
    said, done = reporting.partitions[0][1], real.partitions[0][1]
    np.testing.assert_array_equal(said.class_examples, done.class_examples)
    assert (done.class_examples.sum(1) == np.diff(done.offset)).all()
    assert (np.diff(said.offset) > 1.5 * said.class_examples.sum(1)).all()
    assert reporting.holdings.sum() == sum(
        len(each.indices) for of_task in reporting.partitions for each in of_task
    )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--split-ratio", "0.5"], ["split_ratio: only sampled reads it", "'dirichlet'"]),
        (["--long-tail", "reported"], ["long_tail: only sampled reads it"]),
        (["--partition", "sampled", "--population", "independent"], ["population: sampled", "'redrawn'"]),
        (["--partition", "sampled", "--category-ratio", "1.5"], ["category_ratio: 1.5", "1.0"]),
    ],
)
def test_settings_of_sampled_clients_come_with_them(options, parts, tmp_path, capsys):
    assert cli.main(["run", "linear", *OPTIONS, *options, "--out", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fcljax: ")]
    assert all(part in line for part in parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["scaffold", "local", "c2prompt"])
def test_sampled_clients_keep_no_state(method, tmp_path, capsys):
    """A client would get the control variate, network or prompts of the one before it in its place."""
    options = [*OPTIONS, "--partition", "sampled", "--out", str(tmp_path / "run")]
    assert cli.main(["run", method, *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fcljax: ")]
    assert line == (
        f"fcljax: partition: 'sampled' clients are new in every round, and {method} keeps a state for each "
        "client; nearest: 'task_dirichlet'"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_chart_of_sampled_clients_is_refused_settings_that_are_not_theirs(tmp_path, capsys):
    options = ["digits", "--imbalance", "0.1", "--out", str(tmp_path / "charts")]
    assert cli.main(["data", "show", *options]) == 2
    assert "imbalance: only sampled reads it" in capsys.readouterr().err
    assert cli.main(["data", "show", *options, "--partition", "sampled"]) == 0
    assert (tmp_path / "charts" / "classes.png").is_file()
