"""Query features are computed when the first task needs them, and are those that all at once would give."""

import dataclasses

import jax
import numpy as np
import pytest

from fcljax import config
from fcljax.data.streaming import Host
from fcljax.federated.engine import init_clients
from fcljax.runs import build, features, loop, predict, rounds
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import evaluated_images, make_evaluate
from fcljax.runs.features import (
    frozen_features,
    make_fill,
    newly_assigned,
    newly_evaluated,
    with_queries,
)
from fcljax.runs.programs import evaluations_of, programs_of
from fcljax.runs.records import Records

SETTINGS = {
    "tasks": 5,
    "epochs": 1,
    "rounds": 2,
    "clients": 2,
    "image_size": 8,
    "batch_size": 64,
    "prompt_blocks": 1,
    "prompt_length": 2,
    "server_epochs": 1,
    "participation": 0.5,
}
CFG = config.resolve(config.from_mapping("fppl", SETTINGS, "test"))


@pytest.fixture(scope="module")
def exp():
    return build.build(CFG)


def tasks_of(exp, rows, label):
    """Which tasks' classes these rows belong to."""
    tasks = exp.scenario.tasks
    return {t for t, task in enumerate(tasks) if np.asarray(task.current)[label[rows]].any()}


@pytest.mark.long
def test_a_task_needs_the_images_of_its_own_classes(exp):
    for t in range(5):
        assert tasks_of(exp, newly_assigned(exp.scenario, t), exp.scenario.train_label) == {t}
        assert tasks_of(exp, newly_evaluated(exp.scenario, t), exp.scenario.test_label) == {t}
    for rows_of, label in (
        (newly_assigned, exp.scenario.train_label),
        (newly_evaluated, exp.scenario.test_label),
    ):
        everything = np.concatenate([rows_of(exp.scenario, t) for t in range(5)])
        assert np.array_equal(np.sort(everything), np.arange(len(label)))


@pytest.mark.long
@pytest.mark.parametrize("host", [False, True])
def test_features_task_by_task_have_the_bits_of_all_at_once(host, exp):
    if host:
        split = Host(jax.tree.map(np.asarray, exp.train), 100)
        exp = exp._replace(train=split)
    expected = np.asarray(frozen_features(exp.inputs, CFG.eval_batch_size)(exp.frozen, exp.train))
    fill = make_fill(exp)
    found = fill(fill(exp, (0,)), (1, 2))
    query = lambda exp: np.asarray(exp.train.tree.query if host else exp.train.query)
    known = np.concatenate([newly_assigned(exp.scenario, t) for t in range(3)])
    np.testing.assert_array_equal(query(found)[known], expected[known])
    later = np.setdiff1d(np.arange(len(expected)), known)
    assert len(later) and np.isnan(query(found)[later]).all()
    np.testing.assert_array_equal(query(fill(found, (3, 4))), expected)
    np.testing.assert_array_equal(query(with_queries(exp)), expected)


@pytest.mark.long
def test_the_first_round_waits_for_the_images_of_its_task_only(exp, tmp_path, monkeypatch):
    events = []
    compute, play = features.frozen_features, rounds.run_round

    def told(*args, **options):
        inner = compute(*args, **options)
        return lambda frozen, split, rows: (events.append(len(rows)), inner(frozen, split, rows))[1]

    def round_(*args, **options):
        events.append("round")
        return play(*args, **options)

    monkeypatch.setattr(features, "frozen_features", told)
    monkeypatch.setattr(rounds, "run_round", round_)
    loop.run(CFG, tmp_path / "run")
    numbers = [[len(of(exp.scenario, t)) for of in (newly_evaluated, newly_assigned)] for t in range(5)]
    shown = [event for i, event in enumerate(events) if event != "round" or events[i - 1] != "round"]
    assert shown == [event for pair in numbers for event in (*pair, "round")]


@pytest.mark.long
@pytest.mark.parametrize("augment", [False, True])
def test_planned_programs_are_those_of_a_round(augment, exp):
    """Whoever compiles them before a run, to see whether they fit, compiles what the run does: with the query
    features of clean images, and without them where images are augmented."""
    exp = build.build(dataclasses.replace(CFG, augment=augment)) if augment else exp
    filled = with_queries(exp).train
    assert (filled.query is None) == augment
    planned = [program for program in programs_of(exp) if program.steps]
    for program in planned:
        _, _, window, past, _ = program.arguments
        assert shapes_of(window.data) == shapes_of(past.data) == shapes_of(filled), program.name
    assert len(planned) == 2


@pytest.mark.long
def test_planned_evaluations_are_those_of_a_run(exp, monkeypatch):
    """With the query features of test images. The last evaluation has all images, in one call."""
    seen, make = [], predict._Loops.of

    def told(*given):
        loops = make(*given)

        def resident(*arguments):
            seen.append(shapes_of(arguments))
            return loops.resident(*arguments)

        return loops._replace(resident=resident)

    monkeypatch.setattr(predict._Loops, "of", told)
    (planned,) = evaluations_of(exp)
    server = exp.method.init(exp.key, exp.frozen)
    state = State(server, init_clients(exp.method, server, 2, exp.key), exp.key)
    make_evaluate(exp)(with_queries(exp).test, state, 4, Records())
    assert seen == [shapes_of(planned.arguments)]
    assert planned.steps == -(-len(exp.scenario.test_label) // CFG.eval_batch_size)
    assert evaluated_images(exp) == sum(exp.scenario.tests_seen(t).sum() for t in range(5))


def shapes_of(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.long
def test_a_split_that_nobody_reads_has_none(exp):
    assert with_queries(exp, ("test",)).train.query is None
    lora = config.resolve(config.from_mapping("fedavg", {"adapter": "lora"}, "test"))
    plain = build.build(lora)
    assert make_fill(plain)(plain, range(5)).test.query is None
