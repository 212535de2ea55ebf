"""Which examples belong to which task, and which clients are there: domains, blurry boundaries, online
streams, tasks of the user's own, clients that join, stay behind and leave."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from fcljax import config
from fcljax.data.attendance import attendance
from fcljax.data.files.sources import hold_out, load_dataset
from fcljax.data.owners import owners_csv
from fcljax.data.partition import whole_classes
from fcljax.data.shifts import SHIFTS
from fcljax.errors import InputError
from fcljax.federated.schedule import participants
from fcljax.methods import METHODS
from fcljax.runs import loop, resume, signals
from fcljax.runs.build import build
from fcljax.scenario import domains_of, fit_partition, make_scenario, scenario_of_one

DIGITS = load_dataset("digits")
SHIFTED = load_dataset("shifted_digits")
QUIET = loop.Observer(console=Console(quiet=True))
SHORT = {"image_size": 8, "rounds": 2, "epochs": 1, "clients": 4, "batch_size": 64}


def scenario_of(dataset=DIGITS, rounds=2, **given):
    settings = config.from_mapping("linear", given, "options")
    config.check_given(settings, given)
    settings = config.resolve(fit_partition(settings, dataset))
    return settings, make_scenario(dataset, settings, rounds, False)


def examples(scenario, task, round_=0):
    """The examples of each client in a round."""
    partition = scenario.partitions[task][round_]
    return [partition.of_client(client) for client in range(len(partition.count))]


def rows_of(scenario, task):
    """The examples of all clients in a task."""
    return np.concatenate([np.concatenate(examples(scenario, task, r)) for r in range(2)])


# ---- clients that come and go ------------------------------------------------------------------------------


def test_glfc_clients_join_with_each_task_and_nine_in_ten_old_ones_move_on():
    options = config.PartitionConfig(clients=120, new_clients=10, move_on=0.9)
    holds = attendance(options, 10)
    assert ((holds >= 0).sum(axis=1) == 30 + 10 * np.arange(10)).all()  # in the order of the ids
    for task in range(1, 10):
        before, now = holds[task - 1], holds[task]
        old = before >= 0
        assert (now[old] == task).sum() == int(0.9 * old.sum())
        stays = old & (now < task)
        np.testing.assert_array_equal(now[stays], before[stays])
        assert (now[~old & (now >= 0)] == task).all()
    # a client that stayed behind may move on later
    assert any((holds[2] == 1) & (holds[3] == 3))


def test_clients_leave_for_good():
    options = config.PartitionConfig(clients=20, move_on=0.5, stay_behind="leave")
    holds = attendance(options, 3)
    assert [(row >= 0).sum() for row in holds] == [20, 10, 5]
    assert not ((holds[1] < 0) & (holds[2] >= 0)).any() and set(holds[2]) == {-1, 2}


def test_a_client_of_glfc_has_all_examples_of_its_classes():
    labels = np.repeat(np.arange(10), 7)
    parts = whole_classes(labels, 30, 6, np.random.RandomState(0))
    for part in parts:
        assert len(np.unique(labels[part])) == 6 and len(part) == 42
    assert len({tuple(part) for part in parts}) > 20


def test_a_task_is_shared_by_the_clients_that_have_it_and_others_keep_their_last_one():
    given = dict(partition="quantity", classes_per_client=2, tasks=5, clients=10, new_clients=1, move_on=0.5)
    settings, scenario = scenario_of(**given)
    holds = attendance(settings, 5)
    assert (holds[1] == 0).any() and (holds == -1).any()
    for task in range(5):
        mine = examples(scenario, task)
        for client, held in enumerate(holds[task]):
            if held < task:
                np.testing.assert_array_equal(
                    mine[client], examples(scenario, held)[client] if held >= 0 else []
                )
            own = scenario.partitions[task][0].task
            current = np.asarray(scenario.tasks[max(held, 0) if held >= 0 else task].current)
            if held >= 0:
                np.testing.assert_array_equal(own.current[client], current)
                np.testing.assert_array_equal(own.seen[client], scenario.tasks[task].seen)
        # the movers share all examples of the task
        new = np.concatenate([mine[client] for client in np.flatnonzero(holds[task] == task)])
        np.testing.assert_array_equal(np.sort(new), np.flatnonzero(np.isin(scenario.train_label // 2, task)))
    assert scenario.holdings.sum() == len(DIGITS.y_train)  # examples that are kept count once


def test_a_partition_of_all_tasks_is_the_same_with_and_without_coming_and_going():
    _, plain = scenario_of(tasks=5, clients=8)
    settings, coming = scenario_of(tasks=5, clients=8, new_clients=1, move_on=0.6)
    holds = attendance(settings, 5)
    for task in range(5):
        for client, held in enumerate(holds[task]):
            expected = examples(plain, held)[client] if held >= 0 else []
            np.testing.assert_array_equal(examples(coming, task)[client], expected)


def test_so_many_clients_or_a_share_of_them_take_part():
    everyone = np.arange(30)
    assert len(participants(0, 0, 0, everyone, 10.0)) == 10 == len(participants(0, 0, 0, everyone, 1 / 3))
    np.testing.assert_array_equal(participants(0, 0, 0, everyone[:5], 10.0), everyone[:5])
    np.testing.assert_array_equal(participants(0, 0, 0, everyone, 1.0), everyone)


# ---- domains -----------------------------------------------------------------------------------------------


def test_domains_are_tasks_with_the_same_classes_and_test_images_of_their_own():
    settings, scenario = scenario_of(SHIFTED, tasks_by="column:domain", task_order=",".join(SHIFTS))
    assert settings.tasks == 5 == len(scenario.tasks)
    for task, name in enumerate(SHIFTS):
        assert np.asarray(scenario.tasks[task].current).all()
        assert set(SHIFTED.columns["domain"][rows_of(scenario, task)]) == {name}
        assert set(SHIFTED.columns_test["domain"][scenario.tests(task)]) == {name}
        assert scenario.tests_seen(task).sum() == (task + 1) * len(DIGITS.y_test)
    total = sum(len(np.concatenate(examples(scenario, task))) for task in range(5))
    assert total == len(SHIFTED.y_train)


def test_a_run_goes_on_with_the_same_domains_only():
    settings, _ = scenario_of(SHIFTED, tasks_by="column:domain")

    def digest(dataset):
        return resume.given_digests(settings, dataset)["domains of the examples"]

    moved = SHIFTED.columns["domain"].copy()
    moved[:2] = moved[1::-1]
    assert digest(SHIFTED) != digest(SHIFTED._replace(columns={"domain": moved}))
    assert (
        domains_of(SHIFTED, settings) == sorted(SHIFTS)
        and domains_of(DIGITS, config.PartitionConfig()) is None
    )


def test_packaged_shifts_change_images_but_no_labels():
    for i, name in enumerate(SHIFTS):
        np.testing.assert_array_equal(SHIFTED.y_train[i::5], DIGITS.y_train)
        assert (SHIFTED.x_train[i::5] == DIGITS.x_train).all() == (name == "plain")
    np.testing.assert_array_equal(SHIFTED.x_train[2], 255 - DIGITS.x_train[0])


def test_held_out_images_keep_their_domains():
    kept = hold_out(SHIFTED, 0.2)
    _, scenario = scenario_of(kept, tasks_by="column:domain")
    assert min(scenario.tests(task).sum() for task in range(5)) > 0
    np.testing.assert_array_equal(
        kept.columns_test["domain"][scenario.tests(0)], ["blurred"] * scenario.tests(0).sum()
    )


# ---- blurry, online, own -----------------------------------------------------------------------------------


def test_a_share_of_each_blurry_class_comes_in_other_tasks():
    _, scenario = scenario_of(tasks=5, blurry=0.2, disjoint=0.5, partition="iid")
    of_class = scenario.train_label // 2
    moved = np.zeros(10)
    for task in range(5):
        mine = rows_of(scenario, task)
        np.testing.assert_array_equal(
            np.unique(scenario.train_label[mine]), np.flatnonzero(scenario.tasks[task].current)
        )
        np.add.at(moved, scenario.train_label[np.unique(mine[of_class[mine] != task])], 1)
    count = np.bincount(scenario.train_label)
    blurry = moved > 0
    assert blurry.sum() == 5 and np.abs(moved - 0.2 * count)[blurry].max() <= 0.5
    # test images stay in the task of their class
    np.testing.assert_array_equal(scenario.test_task, scenario.test_label // 2)


def test_an_online_stream_shows_every_example_once():
    settings, scenario = scenario_of(tasks=5, population="online")
    assert settings.epochs == 1
    for task in range(5):
        first, second = (np.concatenate(examples(scenario, task, r)) for r in range(2))
        assert not np.intersect1d(first, second).size and len(first) and len(second)
        both = np.sort(np.concatenate([first, second]))
        np.testing.assert_array_equal(both, np.flatnonzero(scenario.train_label // 2 == task))
        np.testing.assert_array_equal(np.sort(scenario.whole[task].indices), both)
    assert scenario.holdings.sum() == len(DIGITS.y_train)


def test_a_file_may_say_the_task_of_each_example(tmp_path):
    who = tmp_path / "who.csv"
    task = np.where(DIGITS.y_train < 3, "early", np.where(DIGITS.y_train < 8, "late", "9"))
    lines = [f"{i},{i % 3},{name}" for i, name in enumerate(task) if i % 5]
    who.write_text("\n".join(["example,client,task", *lines]) + "\n")
    settings, scenario = scenario_of(partition=f"file:{who}")
    assert settings.tasks == 3
    kept = np.arange(len(task)) % 5 > 0
    for number, name in enumerate(["9", "early", "late"]):
        np.testing.assert_array_equal(
            np.unique(rows_of(scenario, number)), np.flatnonzero((task == name) & kept)
        )
    again = tmp_path / "again.csv"
    again.write_text(owners_csv(DIGITS, f"file:{who}"))
    _, same = scenario_of(partition=f"file:{again}")
    for number in range(3):
        np.testing.assert_array_equal(rows_of(same, number), rows_of(scenario, number))
    with pytest.raises(InputError, match="blurry: .* has a column 'task', which decides"):
        scenario_of(partition=f"file:{who}", blurry=0.1)
    with pytest.raises(InputError, match="tasks: .* has a column 'task', which decides"):
        scenario_of(partition=f"file:{who}", tasks=2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"tasks_by": "column:site"},
            "tasks_by: no column 'site' of the training examples; 'digits' has none",
        ),
        ({"tasks_by": "column:a", "tasks": 3}, "tasks: tasks_by decides their number"),
        (
            {"tasks_by": "column:a", "base_classes": 3},
            "base_classes: only class reads it, and tasks_by is",
        ),
        (
            {"task_order": "a,b"},
            "task_order: only column:NAME reads it, and tasks_by is 'class'",
        ),
        ({"disjoint": 0.5}, "disjoint: only --blurry reads it"),
        ({"blurry": 0.1, "partition": "private"}, "blurry: 0.1 has no effect on private streams"),
        ({"new_clients": 1, "partition": "sampled"}, "new_clients: 1 needs clients that persist"),
        ({"move_on": 0.5, "population": "redrawn"}, "move_on: 0.5 needs clients that persist"),
        ({"new_clients": 2}, "leave none of 5 clients for the first task; nearest: 1"),
        ({"stay_behind": "leave"}, "stay_behind: only --move-on reads it"),
        ({"move_on": 0.5, "population": "online"}, "stay_behind: clients of an online stream"),
        ({"population": "online", "epochs": 3}, "epochs: 3: an online stream is seen once"),
        ({"population": "online", "partition": "sampled"}, "population: 'online' needs clients that persist"),
        ({"participation": 1.5}, "participation: 1.5 is neither a fraction nor a number of clients"),
        ({"move_on": 0.0}, "move_on: 0.0 of 5 clients is none"),
    ],
)
def test_what_does_not_fit_is_one_line(given, says):
    with pytest.raises(InputError) as error:
        scenario_of(**given)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("plain,turned", "task_order: 'plain,turned': 'blurred' is missing"),
        ("plain,sketch", "task_order: no domain 'sketch'"),
        (",".join([*SHIFTS, "plain"]), "a domain appears twice"),
    ],
)
def test_an_order_of_domains_has_each_once(order, says):
    with pytest.raises(InputError) as error:
        scenario_of(SHIFTED, tasks_by="column:domain", task_order=order)
    assert says in str(error.value)


def test_clients_on_other_machines_refuse_what_needs_all_examples():
    settings = config.from_mapping("linear", {"blurry": 0.1}, "test")
    with pytest.raises(InputError, match=r"blurry: 0.1 needs the examples of all clients"):
        scenario_of_one(DIGITS, settings, 2, False, 0)


# ---- whole runs --------------------------------------------------------------------------------------------

SETTINGS = {
    "domains": {"dataset": "shifted_digits", "tasks_by": "column:domain"},
    "blurry": {"blurry": 0.2, "tasks": 2},
    "online": {"population": "online", "tasks": 2},
    "coming": {"tasks": 3, "new_clients": 1, "move_on": 0.7, "partition": "whole_classes"},
}


def built(method, kind):
    """Empty where the run can start, or the line that refuses it."""
    given = SHORT | SETTINGS[kind]
    if method.endswith("pmae"):
        given |= {"image_size": 32}  # the size of the packaged decoder
    if METHODS[method].one_client:
        given |= {"clients": 1}
    try:
        build(config.from_mapping(method, given, "test"))
    except InputError as error:
        return str(error)
    return ""


def test_a_method_that_reads_examples_again_refuses_an_online_stream():
    says = built("glfc", "online")
    assert says.startswith("population: an online stream is seen once, and glfc reads each example")


@pytest.mark.long
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_every_schedule_or_refuses_it_in_one_line(method, kind):
    says = built(method, kind)
    assert "\n" not in says and (not says or ":" in says)
    # of a single client none can come later
    none_can_come = kind == "coming" and METHODS[method].one_client
    assert not says or kind == "online" or METHODS[method].joint or none_can_come, says


@pytest.mark.long
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(kind, tmp_path):
    settings = config.from_mapping("linear", SHORT | SETTINGS[kind], "test")
    whole = loop.run(settings, tmp_path / "whole", observer=QUIET)
    rounds = iter([None, None, 15])
    with pytest.raises(signals.Stopped):
        loop.run(settings, tmp_path / "parts", observer=dataclasses.replace(QUIET, stop=lambda: next(rounds)))
    parts = loop.run(settings, tmp_path / "parts", resume=True, observer=QUIET)
    assert parts["accuracy"] == whole["accuracy"]
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    assert lines[0] == lines[1]
