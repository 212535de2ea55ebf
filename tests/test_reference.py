"""The engine computes what the reference round says in plain words."""

import jax
import numpy as np
import pytest
from test_conformance import KEY, STREAM, federation
from toys import stack

from fcljax.checks.federation import of_client, read_plain, relative_difference
from fcljax.federated.engine import RoundInputs, run_round
from fcljax.federated.reference import play_round


@pytest.mark.parametrize(
    "name",
    ["pilora", "fppl", "linear", "ewc", "icarl", "scaffold", "vfcl", "hepco"],
)
@pytest.mark.long
def test_a_round_of_two_of_three_clients_equals_the_reference_round(name):
    """Client 1 has no examples, and client 2 is not sampled."""
    made = federation(name)
    partition = made.partitions[0]
    server = jax.jit(made.method.init)(jax.random.key(2), made.frozen)
    states = jax.tree.map(lambda leaf: leaf.copy(), made.states)
    reference = server
    reference_states = [of_client(states, client) for client in range(4)]
    for when in ("task_start", "round"):
        inputs = RoundInputs(made.frozen, made.data, partition, np.array([0, 3]), STREAM[0], 0, KEY, when)
        server, states, _ = run_round(made.engine, server, states, inputs)
        reference, reference_states, _ = play_round(
            made.method, read_plain, reference, reference_states, inputs
        )
    assert relative_difference(server, reference) < 2e-4
    assert relative_difference(states, stack(reference_states)) < 2e-4
    assert relative_difference(server, made.server) > 1e-3  # the round changes something
