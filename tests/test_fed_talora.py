"""Fed-TaLoRA: after every round the network has the weighted mean of the clients' updates (numpy)."""

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
    aggregate_of,
    client_round,
    compiled,
    method_of,
    round_context_of,
    rows_of,
    server_round,
)

TASK = TASKS[0]
BATCHES = {0: rows_of([0, 1, 2, 0], 1), 2: rows_of([1, 1, 2], 2), 3: rows_of([0, 2], 3)}


def made(**options):
    values = {"lora_blocks": 2, "lora_rank": 2, "lora_lr": 0.1, "lr": 0.05} | options
    return method_of("fed-talora", network=FORMULA, **values)


def a_round(method, server, round_, valid=(True, True, True)):
    """(the server after a round, the clients' pairs)."""
    uploads = [client_round(method, server, TASK, [BATCHES[i]] * 3, id_=i, round_=round_)[0] for i in BATCHES]
    server, _ = server_round(
        method, server, TASK, aggregate_of(uploads, [*BATCHES], valid, SIZES.clients), round_
    )
    return server, [upload.gather["adapter"] for upload in uploads]


def update_of(adapter):
    """B A + R of queries and values, [2, blocks, D, D]."""
    pair = jax.tree.map(lambda x: np.asarray(x, np.float64)[0], adapter.pairs)
    residual = [np.asarray(x, np.float64) for x in adapter.residual]
    return np.stack([pair.b_q @ pair.a_q + residual[0], pair.b_v @ pair.a_v + residual[1]])


def product_of(pair):
    pair = jax.tree.map(lambda x: np.asarray(x, np.float64), pair)
    return np.stack([pair.b_q @ pair.a_q, pair.b_v @ pair.a_v])


@pytest.mark.long
def test_the_network_gets_the_mean_of_the_clients_updates_round_after_round():
    method = made()
    server = compiled(method.init)(KEY, SCALE)
    share = np.array([4, 3, 2]) / 9
    residual = np.zeros_like(update_of(server.params.adapter))
    for round_ in range(2):
        server, pairs = a_round(method, server, round_)
        mean = sum(p * product_of(pair) for p, pair in zip(share, pairs, strict=True))
        np.testing.assert_allclose(update_of(server.params.adapter), residual + mean, atol=1e-5)
        a = sum(p * np.asarray(pair.a_v) for p, pair in zip(share, pairs, strict=True))
        np.testing.assert_allclose(server.params.adapter.pairs.a_v[0], a, atol=1e-6)
        residual = np.stack([np.asarray(x) for x in server.params.adapter.residual])
        assert np.abs(residual).max() > 1e-3  # the product of means alone is another update


def test_who_is_not_valid_has_no_part_in_it():
    method = made()
    server = compiled(method.init)(KEY, SCALE)
    after, pairs = a_round(method, server, 0, (True, False, True))
    mean = (4 * product_of(pairs[0]) + 2 * product_of(pairs[2])) / 6
    np.testing.assert_allclose(update_of(after.params.adapter), mean, atol=1e-5)
    nobody, _ = a_round(method, server, 0, (False, False, False))
    np.testing.assert_allclose(update_of(nobody.params.adapter), update_of(server.params.adapter))


@pytest.mark.parametrize("residual", [0.0, 1.0])
def test_the_residual_acts_in_training_and_in_evaluation(residual):
    method = made()
    server = compiled(method.init)(KEY, SCALE)
    adapter = server.params.adapter
    moved = jax.tree.map(lambda x: x + residual * jnp.eye(x.shape[-1]), adapter.residual)
    server = server._replace(params=server.params._replace(adapter=adapter._replace(residual=moved)))
    head, x = server.params.classifier, np.asarray(BATCHES[0].input)
    feature = x + 2 * residual * (x + 2 * x)  # two blocks, of each the query once and the value twice
    logits = method.predict(round_context_of(TASK, frozen=SCALE), server, BATCHES[0])
    expected = feature @ np.asarray(head.kernel) + np.asarray(head.bias)
    np.testing.assert_allclose(np.asarray(logits)[:, :3], expected[:, :3], atol=1e-4)


def test_clients_send_the_pair_and_get_the_residual():
    method = made(weight_decay=0.1)
    server = compiled(method.init)(KEY, SCALE)
    server, _ = a_round(method, server, 0)
    before = server.params.adapter.residual
    upload, _ = client_round(method, server, TASK, [BATCHES[0]], id_=0, round_=1)
    size = sum(leaf.size for leaf in jax.tree.leaves((upload.mean, upload.gather)))
    assert size == 2 * 2 * 2 * 2 * 4 + 4 * 5 + 5  # A and B of queries and values of two blocks, classifier
    sent = method.broadcast(round_context_of(TASK, frozen=SCALE), server).payload.trainable.adapter.residual
    np.testing.assert_array_equal(sent.value, before.value)
