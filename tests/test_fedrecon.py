"""FedRecon: prototypes merged over clients and tasks, an embedding that trains in the first task alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import (
    DATA,
    FORMULA,
    IMAGE,
    KEY,
    LABEL,
    PARTITIONS,
    SCALE,
    SIZES,
    STREAM,
    TASKS,
    WIDTH,
    begin,
    client_round,
    compiled,
    context_of,
    engine_of,
    info_of,
    play,
    round_context_of,
    rows_of,
)

from fcljax.adapters.full import FullOptions, full
from fcljax.adapters.linear import LinearOptions, linear
from fcljax.methods.fedncm import FedNCMOptions, fedncm
from fcljax.methods.fedrecon import FedReconOptions, episode_loss, episodes, fedrecon
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run, Training
from fcljax.parts.learner import Output
from fcljax.types import Aggregate, Batch, ClientContext, Frozen, Network, RoundContext

RATE = 0.05


def run_of(trains, network=FORMULA, optimiser=None):
    adapter = full(FullOptions(RATE), SIZES, network) if trains else linear(LinearOptions(), SIZES, network)
    return Run(SIZES, network, adapter, Training(1, 4, RATE, optimiser or optax.identity()))


def pixels(params, image, injection, train, mask=None):
    """Features are four numbers of the image, scaled."""
    features, params = FORMULA.apply(params, image.reshape(len(image), -1)[:, :WIDTH], None, train, mask)
    return features, params


PIXELS = Network(FORMULA.init, pixels, WIDTH, 2, (8, 8, 3))


@functools.cache
def played(trains):
    """Server states after every round of both tasks on the micro federation."""
    method = fedrecon(FedReconOptions(), run_of(trains, PIXELS))
    server, states = begin(method, SCALE)
    return method, [step[0] for step in play(engine_of(method, frozen=SCALE), server, states, frozen=SCALE)]


def embedded(rows, scale=1.0):
    return IMAGE.reshape(len(IMAGE), -1)[rows, :WIDTH] * np.asarray(scale)


def means_of(task, scale=1.0):
    """The prototypes of a task's classes in plain numpy: of all rows that anybody holds."""
    rows = PARTITIONS[task].indices
    own = np.flatnonzero(STREAM[task].current)
    return own, np.stack([embedded(rows[LABEL[rows] == c], scale).mean(0) for c in own])


def batch_of(rows):
    ids = jnp.asarray(rows)
    return Batch(DATA.input[ids], jnp.zeros(len(rows), jnp.int32), ids >= 0, ids)


# ---- prototypes --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_nearest_of_the_merged_prototypes_wins_as_in_plain_numpy():
    method, history = played(False)
    assert [(each.when, each.who) for each in method.rounds] == [("task_start", "everyone")]
    rows = np.arange(20)
    logits = method.predict(round_context_of(TASKS[1], frozen=SCALE), history[-1], batch_of(rows))
    prototypes = np.concatenate([means_of(task)[1] for task in (0, 1)])
    squared = ((embedded(rows)[:, None] - prototypes) ** 2).sum(-1)
    np.testing.assert_allclose(logits, -squared, rtol=1e-4)
    assert len(set(np.argmin(squared, axis=1).tolist())) > 2


def test_a_class_that_is_met_again_is_refined_by_the_mean_of_all_its_rows():
    """The same two classes in a task of other clients: a running mean, by numbers of rows."""
    method = fedrecon(FedReconOptions(), run_of(False))
    (report_round,) = method.rounds
    server = compiled(method.init)(KEY, SCALE)
    met = [[rows_of([0, 1, 0], seed=1), rows_of([1], seed=2)], [rows_of([0, 0], seed=3)]]
    mean, count = np.zeros((2, WIDTH)), np.zeros(2)
    for batches in met:
        found = sums_of(report_round.program, method, server, batches)
        server, _ = report_round.server(RoundContext.on_host(SCALE, TASKS[0], 0, False), server, found, KEY)
        for batch in batches:
            for image, label in zip(batch.input[batch.mask], batch.label[batch.mask], strict=True):
                count[label] += 1
                mean[label] += (image - mean[label]) / count[label]
    sums = server.params.classifier.sums
    np.testing.assert_allclose(sums.feature[:2] / sums.examples[:2, None], mean, rtol=1e-5)
    assert sums.examples.tolist() == [4, 2, 0, 0, 0]


def sums_of(program, method, server, batches):
    """What the server sees of one client that is asked."""
    context = context_of(method, server, TASKS[0], info_of(SIZES.classes, 3), SCALE)
    state = method.init_client(KEY, server)
    local = program.start(context, state, KEY)
    for batch in batches:
        local, _ = program.phases[0].step(context, local, batch, KEY)
    upload, _ = program.finish(context, local, state)
    return Aggregate((), upload.sum, {}, jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))


def test_with_a_frozen_embedding_it_is_fedncm_with_the_nearest_mean():
    """Which is what the papers say; FedNCM's default, mean features of length 1, is another classifier."""
    server, batch, round_context = (
        played(False)[1][-1],
        batch_of(np.arange(20)),
        round_context_of(TASKS[1], frozen=SCALE),
    )
    logits = lambda kind: fedncm(FedNCMOptions(kind), run_of(False, PIXELS)).predict(
        round_context, server, batch
    )
    ours = played(False)[0].predict(round_context, server, batch)
    np.testing.assert_array_equal(ours, logits("nearest"))
    assert np.any(np.argmax(ours, 1) != np.argmax(logits("linear"), 1))


def test_clients_can_be_tested_each_on_the_classes_that_it_has_learned():
    server, run = played(False)[1][-1], run_of(False, PIXELS)
    asked, usual = (fedrecon(FedReconOptions(who), run) for who in ("clients", "server"))
    assert asked.personal and not usual.personal and usual.predict_client is None
    learned = jnp.array([True, False, False, True, False])
    round_context = round_context_of(TASKS[1]._replace(seen=learned), frozen=SCALE)
    found = np.argmax(asked.predict_client(round_context, server, (), batch_of(np.arange(20))), axis=1)
    assert set(found.tolist()) == {0, 3}


# ---- the embedding -----------------------------------------------------------------------------------------


def test_the_loss_of_an_episode_by_hand():
    """Rows 0 and 2 support class 3 and row 4 class 4; row 1 and row 3 are queries, row 5 of class 2 has no
    support, and row 7 is padding."""
    feature = jnp.array([[0.0], [1.0], [2.0], [3.0], [5.0], [9.0], [np.nan], [np.nan]])
    label, mask = jnp.array([3, 3, 3, 4, 4, 2, 3, 3]), jnp.arange(8) < 6
    found = episode_loss(feature, label, jnp.array([3, 4, 2]), mask)
    to = lambda x: np.array([-((x - 1.0) ** 2), -((x - 5.0) ** 2)])  # prototypes 1 and 5
    own = lambda x, place: np.log(np.exp(to(x)).sum()) - to(x)[place]
    assert float(found) == pytest.approx((own(1.0, 0) + own(3.0, 1)) / 2, rel=1e-5)
    assert float(episode_loss(feature, label, jnp.array([3, 4, 2]), mask & (label == 2))) == 0.0


def test_an_episode_s_loss_is_that_of_the_first_task_and_later_nothing():
    batch, rule = rows_of([0, 0, 1, 1]), episodes()
    own = episode_loss(batch.input, batch.label, TASKS[0].classes, batch.mask)
    assert float(own) > 0
    for task, expected in zip(TASKS, (own, 0.0), strict=True):
        context = ClientContext(SCALE, None, None, task, info_of(SIZES.classes))
        step = ClientStep(None, context, None, Output(None, batch.input), batch, KEY, None)
        assert float(rule.loss(step, ())) == float(expected)


def test_the_embedding_trains_by_episodes_in_the_first_task_and_never_again():
    method = fedrecon(FedReconOptions(), run_of(True, optimiser=optax.add_decayed_weights(0.1)))
    server = compiled(method.init)(KEY, SCALE)
    batch = rows_of([0, 0, 1, 1])
    upload, _ = client_round(method, server, TASKS[0], [batch])
    own = lambda scale: episode_loss(batch.input * scale, batch.label, TASKS[0].classes, batch.mask)
    one = jnp.ones(WIDTH)
    expected = one - RATE * (jax.grad(own)(one) + 0.1 * one)
    np.testing.assert_allclose(upload.mean.adapter["scale"], expected, rtol=1e-5)
    assert np.abs(expected - 1).max() > 0.01
    upload, _ = client_round(method, server, TASKS[1], [rows_of([3, 3, 4, 4])])
    np.testing.assert_array_equal(upload.mean.adapter["scale"], one)


@pytest.mark.long
def test_prototypes_are_those_of_the_embedding_that_the_first_task_ends_with():
    method, history = played(True)
    assert [each.when for each in method.rounds] == ["round", "task_end"]
    scales = [np.asarray(server.params.adapter["scale"]) for server in history]
    assert np.abs(scales[1] - 1).max() > 1e-3
    for later in scales[2:]:  # a mean of what is equal, up to its rounding
        np.testing.assert_allclose(later, scales[1], rtol=1e-6)
    sums = history[-1].params.classifier.sums
    for task in (0, 1):
        own, means = means_of(task, scales[1])
        np.testing.assert_allclose(sums.feature[own] / sums.examples[own, None], means, atol=1e-5)


def test_prototypes_are_embedded_as_in_evaluation():
    """A network whose training features are others, as batch normalisation's are."""

    def apply(params, image, injection, train, mask=None):
        features, params = FORMULA.apply(params, image, None, train, mask)
        return features._replace(cls=features.cls + 100.0 * train), params

    network = FORMULA._replace(apply=apply)
    method = fedrecon(FedReconOptions(), run_of(True, network))
    (report_round,) = [each for each in method.rounds if each.when == "task_end"]
    server = compiled(method.init)(KEY, Frozen(SCALE.network))
    found = sums_of(report_round.program, method, server, [rows_of([0, 1, 0])])
    image = rows_of([0, 1, 0]).input
    np.testing.assert_allclose(found.sum["embeddings"].feature[0], image[0] + image[2], rtol=1e-5)
