"""Rows of a client's past join its batches by their ids: those that it chose, wherever the data are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from small_runs import some
from toys import (
    CLIENTS,
    FROZEN,
    KEY,
    MEMORY,
    REPLAYED,
    WAYS,
    begin_run,
    engine_of,
    fold,
    receive,
    same,
    stack,
)
from toys import tasks as two_tasks

from fcljax.data.streaming import Host
from fcljax.federated.engine import Lanes, RoundInputs, run_round
from fcljax.types import Phase, Upload, View

TASK = two_tasks()[1]


@pytest.fixture(scope="module")
def data():
    return toys.examples()


@pytest.fixture(scope="module")
def partitions(data):
    return toys.partitions(data)


@pytest.fixture(scope="module")
def start(data, partitions):
    """(server, states, ids) when the second task begins: after a round of the first, what clients remember
    are rows of it."""
    engine = engine_of("replaying", "loop1")
    server, states = begin_run(engine.method)
    ids = np.flatnonzero(partitions[0].count)
    server, states, _ = run_round(
        engine, server, stack(states), RoundInputs(FROZEN, data, partitions[0], ids, two_tasks()[0], 0, KEY)
    )
    return server, jax.device_get(states), np.flatnonzero(partitions[1].count)


def joined(way, data, partitions, start):
    """(image, label, mask, row) that joined every client's last batch [P, REPLAYED, ...]."""
    server, states, ids = start
    engine = engine_of("replaying", way)
    return jax.device_get(receive(engine, FROZEN, server, states, data, partitions[1], ids, TASK)[0].gather)


def steps(count: int) -> int:
    """Steps that a client with so many rows trains."""
    return toys.TRAIN.epochs * -(-count // toys.TRAIN.batch_size)


def chosen(client: int, memory: np.ndarray, step: int) -> list[int]:
    """The ids that a client asks for in a step of its round, by the keys of the protocol."""
    places = jax.random.randint(fold(KEY, TASK.index, 0, 3, client, 1, step, 1), (REPLAYED,), -1, MEMORY)
    return [-1 if place < 0 else int(memory[place]) for place in places.tolist()]


@pytest.mark.parametrize("way", some(WAYS, ("loop1",)))
def test_what_joins_a_batch_are_exactly_the_rows_that_the_client_chose(way, data, partitions, start):
    """Under the clean view, while its own rows come under the training view; the rest is padding."""
    _, states, ids = start
    image, label, mask, row = joined(way, data, partitions, start)
    assert [each.tolist() for each in row] == [
        chosen(i, states[i], steps(partitions[1].count[i]) - 1) for i in ids
    ]
    assert np.array_equal(mask, row >= 0)
    assert mask.any() and not mask.all()
    same(image[mask], data.input[row[mask]])
    same(label[mask], data.label[row[mask]])
    assert not image[~mask].any() and not label[~mask].any()
    assert set(label[mask].tolist()) <= {0, 1}  # classes of the first task


def test_clients_remember_the_highest_of_the_rows_that_they_held(partitions, start):
    _, states, _ = start
    for client in range(CLIENTS):
        held = partitions[0].indices[partitions[0].offset[client] : partitions[0].offset[client + 1]]
        expected = np.sort(np.concatenate([np.full(MEMORY, -1), held]))[-MEMORY:]
        assert states[client].tolist() == expected.tolist()


@pytest.mark.parametrize("where", ["resident", "host"])
def test_rows_that_nobody_replays_may_be_nan(where, data, partitions, start):
    """All rows but the clients' own and those that join a batch: some that they remember are among them."""
    _, states, ids = start
    asked = [chosen(i, states[i], step) for i in ids for step in range(steps(partitions[1].count[i]))]
    used = np.isin(np.arange(len(data.label)), np.concatenate([partitions[1].indices, *asked]))
    assert np.isin(np.setdiff1d(states[ids], [-1]), np.flatnonzero(~used)).any()
    image = jnp.where(used[:, None, None, None], data.input, jnp.nan)
    poisoned = toys.Examples(image, jnp.where(used, data.label, 10**6))
    on_host = lambda tree: Host(jax.tree.map(np.asarray, tree), 24)
    place = on_host if where == "host" else lambda tree: tree
    engine, (server, states, ids) = engine_of("replaying", "vmap3"), start
    play = lambda data: run_round(
        engine,
        server,
        jax.tree.map(jnp.array, states),
        RoundInputs(FROZEN, place(data), partitions[1], ids, TASK, 0, KEY),
    )[:2]
    clean = play(data)
    same(play(poisoned), clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))


def test_a_client_is_read_what_it_remembers_and_no_more(data, partitions, start):
    """Of data on the host, one client's: its own rows of the task, its memory, and row 0 for padding."""
    read = []

    class Watched:
        """An array that notes which rows are asked of it."""

        def __init__(self, array):
            self.array = array

        def __getitem__(self, rows):
            read.extend(np.array(rows).tolist())
            return self.array[rows]

    (server, states, _), engine = start, engine_of("replaying", "loop1")
    host = Host(toys.Examples(Watched(np.asarray(data.input)), np.asarray(data.label)), window=24)
    run_round(
        engine,
        server,
        jnp.array(states),
        RoundInputs(FROZEN, host, partitions[1], np.array([3]), TASK, 0, KEY),
    )
    own = partitions[1].indices[partitions[1].offset[3] : partitions[1].offset[4]]
    assert set(read) == {0, *own.tolist(), *states[3].tolist()}


def test_places_outside_of_the_memory_are_padding(data, partitions):
    """-1, and numbers past the end: of six places only those of the memory's five rows join, of which one is
    the data's first."""

    def step(context, local, batch, key):
        return {**local, "row": batch.index[1:]}, {}

    phase = Phase(
        View(1, 1, replay=4), step, lambda context, local, key: jnp.array([-1, 0, MEMORY - 1, MEMORY])
    )
    engine = toys.build(
        toys.toy(
            lambda context, state, key: {"weight": context.payload, "row": jnp.zeros(4, jnp.int32)},
            (phase,),
            lambda context, local, state: (Upload(mean=context.payload, gather=local["row"]), state),
            program={"replay_buffer": lambda state: state},
            init_client=lambda key, server: 15 * jnp.arange(MEMORY),
        ),
        partitions,
        Lanes(2, "vmap"),
    )
    server, states = begin_run(engine.method)
    received, _ = receive(engine, FROZEN, server, stack(states), data, partitions[0], [0, 6], two_tasks()[0])
    assert received.gather[:2].tolist() == [[-1, 0, 15 * (MEMORY - 1), -1]] * 2


@pytest.mark.long
def test_cached_features_of_own_and_replayed_examples_come_together(partitions, data):
    """Where both views are deterministic; a batch with no features for its own rows has none at all."""
    both = {}

    def features(data, index, keys, augment):
        image, label, _ = toys.fetch(data, index, keys, augment)
        return image, label, None if augment else 2 * data.input[index, 0, 0]

    for augment in (False, True):

        def step(context, local, batch, key, augment=augment):
            both[augment] = None if batch.query is None else batch.query.shape
            query = jnp.zeros((7, 3)) if batch.query is None else batch.query
            return {**local, "off": local["off"] + jnp.sum(jnp.abs(query - 2 * batch.input[:, 0, 0]))}, {}

        replay = lambda context, local, key: jnp.arange(REPLAYED)
        method = toys.toy(
            lambda context, state, key: {"weight": context.payload, "off": jnp.zeros(())},
            (Phase(View(1, 4, augment=augment, replay=REPLAYED), step, replay),),
            lambda context, local, state: (Upload(mean=context.payload, gather=local["off"]), state),
            program={"replay_buffer": lambda state: state},
            init_client=lambda key, server: jnp.arange(MEMORY) + 70,
        )
        engine = toys.build(method, partitions, Lanes(1, "loop"), fetch=features)
        server, states = begin_run(engine.method)
        received, _ = receive(engine, FROZEN, server, stack(states), data, partitions[0], [0], two_tasks()[0])
        assert (float(received.gather[0]) == 0) == (not augment)
    assert both == {False: (4 + REPLAYED, 3), True: None}
