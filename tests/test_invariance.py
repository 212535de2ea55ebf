"""What must not matter: lanes, devices, chunks, the order of clients, who else takes part, what lies in rows
that are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import toys
from jax.sharding import AxisType
from toys import CLIENTS, FROZEN, KEY, WAYS, begin_run, close, engine_of, receive, same, stack, tasks

from fcljax.federated.engine import Lanes, RoundInputs, make_engine, run_round
from fcljax.federated.schedule import ClientPartition
from fcljax.types import View

EACH = small_runs.some(WAYS, ("vmap3",))
PRESENT = [0, 1, 3, 6]  # clients with rows in the first task


def one(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@pytest.fixture(scope="module")
def data():
    return toys.examples()


@pytest.fixture(scope="module")
def partitions(data):
    return toys.partitions(data)


def uploads(engine, data, partition, ids):
    """(weights [P, 3] that the participants of a round uploaded, in order of id; all clients' states) of a
    toy with random starts, random steps and state."""
    server, states = begin_run(engine.method)
    received, states = receive(engine, FROZEN, server, stack(states), data, partition, ids, tasks()[0])
    assert received.valid.tolist() == [True] * len(ids) + [False] * (len(received.valid) - len(ids))
    return np.asarray(received.gather), states


# ---- lanes, chunks, devices, co-participants ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("way", EACH)
def test_a_clients_upload_does_not_depend_on_lanes(way, data, partitions):
    expected = uploads(engine_of("remembering", "loop1"), data, partitions[0], PRESENT)
    close(uploads(engine_of("remembering", way), data, partitions[0], PRESENT), expected, atol=1e-6)


@pytest.mark.parametrize("way", EACH)
def test_a_clients_upload_does_not_depend_on_who_else_takes_part(way, data, partitions):
    engine = engine_of("remembering", way)
    together, states = uploads(engine, data, partitions[0], PRESENT)
    for rank, client in enumerate(PRESENT):
        alone, its_states = uploads(engine, data, partitions[0], [client])
        same(alone[0], together[rank])
        same(one(its_states, client), one(states, client))


@pytest.mark.parametrize("way", EACH)
def test_a_clients_upload_does_not_depend_on_the_rows_of_the_others(way, data, partitions):
    """Client 3 keeps its rows; two others swap theirs, 9 and 8 of them."""
    engine, partition = engine_of("remembering", way), partitions[0]
    owned = owned_rows(partition)
    owned[0], owned[6] = owned[6], owned[0]
    other = toys.make_partition(owned, np.asarray(data.label))
    before, _ = uploads(engine, data, partition, PRESENT)
    after, _ = uploads(engine, data, other, PRESENT)
    same(before[2], after[2])
    assert not np.array_equal(before[0], after[0])


def test_a_clients_upload_does_not_depend_on_how_clients_are_chunked(data, partitions):
    method, lanes = toys.remembering(), Lanes(3, "vmap")
    expected = uploads(engine_of("remembering", "vmap3"), data, partitions[0], PRESENT)
    chunked = toys.build(method, partitions, lanes, 2, toys.PARTICIPATION["remembering"])
    same(uploads(chunked, data, partitions[0], PRESENT), expected)


@pytest.mark.long
def test_spare_room_in_the_tables_is_inert(data, partitions):
    """Twice the ticks, more rows, more slots and more participants than any round fills."""
    method, tight = toys.remembering(), engine_of("remembering", "vmap3").players[0].capacity
    roomy = tight._replace(
        ticks=tuple(2 * t for t in tight.ticks),
        examples=tight.examples + 37,
        slots=tight.slots + 3,
        participants=tight.participants + 4,
    )
    engine = make_engine(method, toys.fetch, Lanes(3, "vmap"), (roomy,), toys.EXAMPLE)
    weights, states = uploads(engine, data, partitions[0], PRESENT)
    expected, its_states = uploads(engine_of("remembering", "vmap3"), data, partitions[0], PRESENT)
    same((weights[: len(expected)], states), (expected, its_states))
    assert not weights[len(expected) :].any()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("clients",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    "name",
    ["two_pass", "remembering", "personal", "clipping", "replaying"],
)
@pytest.mark.long
def test_eight_devices_give_the_numbers_of_one(name, data, partitions, mesh):
    """Two tasks of two rounds with a lane per device, against one lane on one device; nothing is traced
    again."""
    participation = toys.PARTICIPATION.get(name, 1.0)
    spread = toys.build(toys.TOYS[name](), partitions, Lanes(8, "vmap"), 3, participation, mesh=mesh)
    server, states, reports = toys.drive_engine(spread, data, partitions, participation)
    expected, its_states, its_reports = toys.drive_engine(
        engine_of(name, "loop1"), data, partitions, participation
    )
    close((server, states), (expected, its_states), atol=1e-6)
    for report, its_report in zip(reports, its_reports, strict=True):
        assert report.metrics == pytest.approx(its_report.metrics, rel=1e-5)
    if name == "remembering":
        # a lane beside others is another program than one lane, in which XLA may contract a * b + c
        # differently: equal bits are only those of one program
        together = uploads(spread, data, partitions[0], PRESENT)
        close(together, uploads(engine_of(name, "loop1"), data, partitions[0], PRESENT), atol=1e-6)
        for rank, client in enumerate(PRESENT):
            same(uploads(spread, data, partitions[0], [client])[0][0], together[0][rank])
    assert set(spread.traces.values()) == {1}


@pytest.mark.long
def test_eight_devices_give_the_numbers_of_one_to_clients_with_tasks_of_their_own(data, mesh):
    method, partitions = toys.own_task(), toys.streams(data)
    spread = toys.build(method, partitions, Lanes(8, "vmap"), 3, mesh=mesh)
    single = toys.build(method, partitions, Lanes(1, "loop"))
    close(
        toys.drive_engine(spread, data, partitions)[:2],
        toys.drive_engine(single, data, partitions)[:2],
        atol=1e-6,
    )
    assert set(spread.traces.values()) == {1}


# ---- masked rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EACH)
def test_rows_that_no_participant_holds_may_be_nan(way, data, partitions):
    """Padding reads row 0 of the store, which nobody holds; batches of 4 are partial for clients of 9, 13 and
    1 rows."""
    engine, held = engine_of("remembering", way), np.zeros(len(data.label), bool)
    assert not np.isin([0], np.concatenate([partition.indices for partition in partitions])).any()
    for client in PRESENT:
        held[partitions[0].indices[partitions[0].offset[client] : partitions[0].offset[client + 1]]] = True
    image = jnp.where(held[:, None, None, None], data.input, jnp.nan)
    poisoned = toys.Examples(image, jnp.where(held, data.label, 10**6))
    same(uploads(engine, poisoned, partitions[0], PRESENT), uploads(engine, data, partitions[0], PRESENT))


# ---- the order and the number of clients -------------------------------------------------------------------


def owned_rows(partition: ClientPartition) -> list[np.ndarray]:
    return np.split(partition.indices, partition.offset[1:-1])


@pytest.fixture(scope="module")
def twice(data, partitions):
    """The first task's partition where client 2, who holds no rows in it, holds those of client 3."""
    owned = owned_rows(partitions[0])
    owned[2] = owned[3]
    return toys.make_partition(owned, np.asarray(data.label))


@pytest.fixture(scope="module")
def shared(twice, partitions):
    """An engine without randomness but the order of rows, and a round of it: (partition, shares, ids) ->
    (server, states, report)."""
    engine = toys.build(toys.sharing(View(2, 4, augment=False)), [partitions[0], twice], Lanes(3, "vmap"))

    def play(data, partition, shares, ids=range(CLIENTS)):
        server, states = (
            {"weight": jnp.ones(3), "share": jnp.asarray(shares, jnp.float32)},
            jnp.zeros(CLIENTS, jnp.int32),
        )
        return run_round(
            engine, server, states, RoundInputs(FROZEN, data, partition, np.array(ids), tasks()[0], 0, KEY)
        )

    return play


@pytest.mark.parametrize("seed", range(5))
def test_permuting_clients_does_not_change_the_aggregate(seed, shared, data, partitions):
    order = np.random.default_rng(seed).permutation(CLIENTS)
    shares = np.arange(1.0, 1 + CLIENTS)
    owned = owned_rows(partitions[0])
    renamed = toys.make_partition([owned[i] for i in order], np.asarray(data.label))
    (server, states, _), (expected, its_states, _) = (
        shared(data, renamed, shares[order]),
        shared(data, partitions[0], shares),
    )
    close(server["weight"], expected["weight"], atol=1e-6)
    assert states.tolist() == its_states[order].tolist()


def test_a_client_listed_twice_with_half_its_weight_equals_that_client_once(shared, twice, data, partitions):
    (once, _, _), (both, states, _) = (
        shared(data, partitions[0], np.ones(7)),
        shared(data, twice, [1, 1, 0.5, 0.5, 1, 1, 1]),
    )
    close(both["weight"], once["weight"], atol=1e-6)
    assert states.tolist() == [1] * CLIENTS
    unequal, _, _ = shared(data, twice, np.ones(7))
    assert not np.allclose(unequal["weight"], once["weight"], atol=1e-4)
