"""FedProto by hand: the distances, and global prototypes that are those of all examples together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FORMULA,
    KEY,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    client_round,
    compiled,
    main_of,
    method_of,
    round_context_of,
    rows_of,
    server_round,
    train,
)

from fcljax.methods.fedproto import NAME
from fcljax.types import Aggregate

BATCHES = {0: rows_of([0, 1, 0, 0], 1), 2: rows_of([1, 1], 2), 3: rows_of([0, 1, 0], 3)}
TASK = TASKS[0]


def made(**options):
    values = {"lora_blocks": 1, "lr": 0.1, "lora_lr": 0.1} | options
    return method_of("fedproto", network=FORMULA, **values)


def features_of(batch):
    """Of the first network, whose updates are 0: the images themselves."""
    keep = np.asarray(batch.mask)
    return np.asarray(batch.input, np.float64)[keep], np.asarray(batch.label)[keep]


def after_a_round(method):
    """The server after clients reported what they had before any training."""
    server = compiled(method.init)(KEY, SCALE)
    uploads = {i: client_round(method, server, TASK, [batch], id_=i)[0] for i, batch in BATCHES.items()}
    total = jax.tree.map(lambda *x: sum(x), *[each.sum for each in uploads.values()])
    weight = jnp.asarray([float(each.weight) for each in uploads.values()])
    mean = uploads[0].mean
    everybody = Aggregate(mean, total, {}, weight, jnp.asarray([*BATCHES]), jnp.ones(len(BATCHES), bool))
    return server_round(method, server, TASK, everybody)[0], total


@pytest.mark.long
@pytest.mark.parametrize("kind", ["examples", "clients"])
def test_global_prototypes_are_means_over_examples_or_over_clients(kind):
    method = made(proto_mean=kind, lora_lr=1e-30)  # features stay those of the first network
    server, total = after_a_round(method)
    known = server.rules[0]
    for label in (0, 1):
        own = [features_of(batch) for batch in BATCHES.values()]
        by_client = [x[y == label] for x, y in own if np.any(y == label)]
        pooled = np.concatenate(by_client).mean(0)
        equally = np.mean([x.mean(0) for x in by_client], axis=0)
        assert not np.allclose(pooled, equally, atol=0.05)
        expected = pooled if kind == "examples" else equally
        np.testing.assert_allclose(known.vector[label], expected, atol=1e-5)
    assert np.asarray(known.present).tolist() == [True, True, False, False, False]
    assert total["class_sums"].feature.shape == (SIZES.task_classes, WIDTH)


def reference(kind, x, y, prototypes):
    """L_R in float64."""
    if kind == "examples":
        return np.mean([(each - prototypes[label]) ** 2 for each, label in zip(x, y, strict=True)])
    return sum(np.linalg.norm(x[y == label].mean(0) - prototypes[label]) for label in np.unique(y))


@pytest.mark.parametrize("kind", ["examples", "means"])
def test_the_loss_is_the_distance_to_prototypes_and_0_before_there_are_any(kind):
    method = made(proto_distance=kind, proto_weight=0.5)
    server = compiled(method.init)(KEY, SCALE)
    prototypes = np.random.default_rng(7).normal(size=(SIZES.classes, WIDTH))
    known = server.rules[0]._replace(
        vector=jnp.asarray(prototypes, jnp.float32), present=jnp.arange(SIZES.classes) < 2
    )
    batch = BATCHES[0]

    def loss_of(server):
        """What a step reports as its loss."""
        program = main_of(method).program
        context, _ = train(method, server, TASK, [batch])
        local = compiled(program.start)(context, method.init_client(KEY, server), KEY)
        _, metrics = compiled(program.phases[0].step)(context, local, batch, KEY)
        return float(metrics["loss"].total / metrics["loss"].weight)

    x, y = features_of(batch)
    difference = loss_of(server._replace(rules=(known,))) - loss_of(server)
    assert difference == pytest.approx(0.5 * reference(kind, x, y, prototypes), rel=1e-5)


@pytest.mark.long
def test_training_pulls_features_to_their_prototypes():
    far = []
    for weight in (0.0, 30.0):
        method = made(proto_weight=weight)
        server = compiled(method.init)(KEY, SCALE)
        target = jnp.full((SIZES.classes, WIDTH), 2.0)
        known = server.rules[0]._replace(vector=target, present=jnp.ones(SIZES.classes, bool))
        server = server._replace(rules=(known,))
        context, local = train(method, server, TASK, [BATCHES[0]] * 4)
        learned = local.trainable.adapter
        x = np.asarray(BATCHES[0].input)
        moved = x + x @ learned.a_q[0].T @ learned.b_q[0].T + 2 * x @ learned.a_v[0].T @ learned.b_v[0].T
        far.append(float(np.mean((moved - 2.0) ** 2)))
        assert set(context.payload.sent) == {NAME}
    assert far[1] < far[0] - 0.1


@pytest.mark.long
def test_the_nearest_prototype_predicts():
    method = made(proto_predict="nearest", lora_lr=1e-30)
    server, _ = after_a_round(method)
    logits = np.asarray(method.predict(round_context_of(TASK, frozen=SCALE), server, BATCHES[0]))
    vectors = np.asarray(server.rules[0].vector, np.float64)[:2]
    x, _ = features_of(BATCHES[0])
    far = ((x[:, None] - vectors) ** 2).sum(-1)
    np.testing.assert_allclose(logits[:4, :2], -far, rtol=1e-5)
    assert np.all(logits[:, 2:] < -1e30)  # of the task's third class nobody had examples
