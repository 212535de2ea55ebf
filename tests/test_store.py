"""Rows of clients in one task."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fcljax.data.store import client_indices


def test_a_client_keeps_the_rows_of_the_current_task_in_its_own_order():
    labels = np.array([0, 1, 2, 3, 0, 2])
    parts = [np.array([5, 4, 0]), np.array([3]), np.array([2, 1])]
    first, second = (client_indices(parts, labels // 2, task) for task in range(2))
    assert first.indices.tolist() == [4, 0, 1]
    assert first.offset.tolist() == [0, 2, 2, 3]
    assert second.indices.tolist() == [5, 3, 2]
    assert second.offset.tolist() == [0, 1, 2, 3]


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_over_all_tasks_every_client_gets_exactly_its_rows(clients, tasks, seed):
    rng = np.random.RandomState(seed)
    labels, owner = rng.randint(6, size=100), rng.randint(clients, size=100)
    parts = [rng.permutation(np.flatnonzero(owner == client)) for client in range(clients)]
    slices = [client_indices(parts, labels % tasks, task) for task in range(tasks)]
    for client, part in enumerate(parts):
        found = [csr.indices[csr.offset[client] : csr.offset[client + 1]] for csr in slices]
        assert sorted(np.concatenate(found)) == sorted(part)


def test_clients_without_rows_are_empty():
    csr = client_indices([np.empty(0, np.int64), np.array([0]), np.empty(0, np.int64)], np.array([1]), 0)
    assert csr.indices.size == 0
    assert csr.offset.tolist() == [0, 0, 0, 0]
