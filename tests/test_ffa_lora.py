"""FFA-LoRA: A never trains or travels, so the mean of B gives the mean of the clients' updates (numpy)."""

import jax
import numpy as np
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
    rows_of,
    server_round,
)

BATCHES = {0: rows_of([0, 1, 2, 0], 1), 2: rows_of([1, 1, 2], 2), 3: rows_of([0, 2], 3)}
SHARE = np.array([4, 3, 2]) / 9


def update_of(pair):
    """B A of queries and values, [2, blocks, D, D]."""
    pair = jax.tree.map(lambda x: np.asarray(x, np.float64), pair)
    return np.stack([pair.b_q @ pair.a_q, pair.b_v @ pair.a_v])


def test_the_network_gets_the_mean_of_the_clients_updates_and_a_stays():
    options = {"lora_blocks": 2, "lora_rank": 2, "lora_lr": 0.1, "lr": 0.05}
    method = method_of("ffa-lora", network=FORMULA, **options)
    server = compiled(method.init)(KEY, SCALE)
    first = jax.tree.map(lambda leaf: leaf[0], server.params.adapter)
    for round_ in range(2):
        uploads = [
            client_round(method, server, TASKS[0], [BATCHES[i]] * 3, id_=i, round_=round_)[0] for i in BATCHES
        ]
        merged = aggregate_of(uploads, [*BATCHES], (True, True, True), SIZES.clients)
        server, _ = server_round(method, server, TASKS[0], merged, round_)
        factors = [upload.mean.adapter for upload in uploads]
        assert all(len(jax.tree.leaves(factor)) == 2 for factor in factors)
        pair = jax.tree.map(lambda leaf: leaf[0], server.params.adapter)
        clients = [first._replace(b_q=factor.query, b_v=factor.value) for factor in factors]
        mean = sum(p * update_of(client) for p, client in zip(SHARE, clients, strict=True))
        np.testing.assert_allclose(update_of(pair), mean, atol=1e-6)
        assert np.abs(mean).max() > 1e-3
        np.testing.assert_array_equal(pair.a_q, first.a_q)
        np.testing.assert_array_equal(pair.a_v, first.a_v)
