"""The engine gives the numbers of plain loops over clients, epochs and batches: for every channel of the
protocol, however it is run."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import toys
from toys import (
    CLIENTS,
    FROZEN,
    KEY,
    PARTICIPATION,
    TOYS,
    begin_run,
    close,
    engine_of,
    receive,
    same,
    stack,
    tasks,
)

from fcljax.federated.engine import Lanes, RoundInputs, init_clients, run_round
from fcljax.federated.reference import epoch_order
from fcljax.federated.rules import coordinate_median
from fcljax.types import Batch, Phase, RoundContext, Upload, View, Weighted

# They have every channel of the protocol but sums, which methods' own tests have, and clipping on arrival.
QUICK = ("gathering", "remembering", "personal", "replaying")


@pytest.fixture(scope="module")
def data():
    return toys.examples()


@pytest.fixture(scope="module")
def partitions(data):
    return toys.partitions(data)


@pytest.fixture(scope="module")
def plain(data, partitions):
    """What plain loops give for a toy: (server, states, reports)."""
    return functools.cache(
        lambda name: toys.drive_plain(TOYS[name](), data, partitions, PARTICIPATION.get(name, 1.0))
    )


def assert_as_plain(result, expected):
    (server, states, reports), (plain_server, plain_states, plain_reports) = result, expected
    close(server, plain_server)
    close(states, plain_states)
    for report, plain_report in zip(reports, plain_reports, strict=True):
        assert report.metrics == pytest.approx(plain_report.metrics, rel=1e-5)
        for what in ("participants", "rejected", "uploads"):
            assert getattr(report, what) == getattr(plain_report, what)
        assert report.refused == 0


# ---- conformance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way"),
    small_runs.some(
        [*itertools.product(TOYS, toys.WAYS)],
        [(name, "unroll2" if name == "personal" else "vmap3") for name in QUICK],
    ),
)
def test_two_tasks_of_two_rounds_equal_plain_loops(name, way, data, partitions, plain):
    engine = engine_of(name, way)
    assert_as_plain(toys.drive_engine(engine, data, partitions, PARTICIPATION.get(name, 1.0)), plain(name))
    assert set(engine.traces.values()) == {1}
    assert ("after_round 1 phase 0" in engine.traces) == (name == "personal")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "way"),
    [*itertools.product(TOYS, ("loop1", "loop3", "unroll2"))],
)
def test_batches_as_short_as_their_rows_change_no_number(name, way, data, partitions, plain):
    participation = PARTICIPATION.get(name, 1.0)
    engine = toys.build(TOYS[name](), partitions, *toys.WAYS[way], participation, short=True)
    assert_as_plain(toys.drive_engine(engine, data, partitions, participation), plain(name))
    assert set(engine.traces.values()) == {1}


@pytest.mark.parametrize(
    ("short", "lanes", "keeps", "computed"),
    [
        (False, Lanes(1, "loop"), False, [4, 4, 4, 4, 4]),
        (True, Lanes(1, "loop"), False, [4, 1, 4, 4, 3]),
        (True, Lanes(2, "unroll"), False, [4, 1, 4, 4, 3]),
        (True, Lanes(2, "vmap"), False, [4, 4, 4, 4, 4]),
        (True, Lanes(1, "loop"), True, [4, 4, 4, 4, 4]),
    ],
)
def test_the_last_batch_of_an_epoch_is_computed_for_the_rows_that_it_has(short, lanes, keeps, computed, data):
    """Two clients with 5 and 11 rows in batches of 4. Lanes that are batched share one program, and a client
    who keeps its last batch needs room for all of it."""

    def width(context, local, batch, key):
        rows = Weighted(jnp.float32(len(batch.mask)), jnp.float32(1))
        return {**local, "kept": batch.index if keeps else local["kept"]}, {"rows": rows}

    begin = lambda context, state, key: {"weight": context.payload, "kept": jnp.zeros(4, jnp.int32)}
    send = lambda context, local, state: (Upload(mean=local["weight"], weight=context.client.examples), state)
    method = toys.toy(begin, (Phase(View(1, 4, augment=False), width),), send)
    mine = np.flatnonzero(tasks()[0].current[np.asarray(data.label)])
    partition = toys.make_partition([mine[:5], mine[5:16]], np.asarray(data.label))
    engine = toys.build(method, [partition], lanes, short=short)
    *_, report = run_round(
        engine, jnp.zeros(3), (), RoundInputs(FROZEN, data, partition, np.arange(2), tasks()[0], 0, KEY)
    )
    assert report.metrics["rows"] * len(computed) == pytest.approx(sum(computed))


@pytest.mark.parametrize("way", small_runs.some(toys.WAYS, ("loop3",)))
def test_clients_with_a_task_of_their_own_equal_plain_loops(way, data):
    """Half of them are at one task while the others are at the other."""
    method, partitions = toys.own_task(), toys.streams(data)
    engine = toys.build(method, partitions, *toys.WAYS[way])
    result = toys.drive_engine(engine, data, partitions)
    assert_as_plain(result, toys.drive_plain(method, data, partitions))
    assert set(engine.traces.values()) == {1}


@pytest.mark.parametrize("lanes", [Lanes(1, "loop"), Lanes(2, "vmap"), Lanes(2, "unroll")])
@pytest.mark.long
def test_clients_train_on_the_classes_of_their_own_task(lanes):
    """Both hold the same two rows, of classes 1 and 3, and take one step from w = 0 at rate 0.1. Client 0, at
    task 0, sees the first only: w = 0.1 * 1 * (1, 0, 0). Client 1, at task 1, sees the other only, and task 1
    adds 0.1: w = 0.1 * 3 * (0, 1, 0) + 0.1."""
    image = np.zeros((3, 1, 1, 3), np.float32)
    image[1, 0, 0, 0] = image[2, 0, 0, 1] = 1
    data = toys.Examples(jnp.asarray(image), jnp.asarray([0, 1, 3], jnp.int32))
    partition = toys.make_partition([np.array([1, 2])] * 2, np.asarray(data.label))
    partition = partition._replace(task=jax.tree.map(lambda *leaves: np.stack(leaves), *tasks()))
    engine = toys.build(toys.own_task(View(1, 4, augment=False)), [partition], lanes)
    server, _, report = run_round(
        engine, jnp.zeros(3), (), RoundInputs(FROZEN, data, partition, np.arange(2), tasks()[0], 0, KEY)
    )
    np.testing.assert_allclose(server, [(0.1 + 0.1) / 2, (0 + 0.4) / 2, (0 + 0.1) / 2], rtol=1e-6)
    assert report.metrics == {"loss": pytest.approx((1**2 / 2 + 3**2 / 2) / 2)}


@pytest.mark.long
def test_one_client_per_chunk_gives_the_same_numbers(data, partitions, plain):
    """The other engines here have chunks of 2, 4 and all clients."""
    engine = toys.build(TOYS["gathering"](), partitions, Lanes(3, "vmap"), slots=1)
    assert_as_plain(toys.drive_engine(engine, data, partitions), plain("gathering"))


@pytest.mark.parametrize("name", small_runs.some(TOYS, QUICK))
def test_the_toys_learn_and_their_clients_differ(name, plain):
    """Equality with plain loops would say little if nothing moved."""
    server, states, reports = plain(name)
    assert reports[1].metrics["loss"] < reports[0].metrics["loss"]
    leaves = jax.tree.leaves((server, states))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    if name in ("remembering", "personal", "replaying"):
        assert len(np.unique(np.asarray(jax.tree.leaves(states)[0])[:, -1])) == CLIENTS


# ---- numbers by hand ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hand():
    """Two clients and one step each from w = 0 at rate 0.1: client 0 has one row, client 1 two. `shares`
    scale their weights."""
    image = np.zeros((4, 1, 1, 3), np.float32)
    image[1, 0, 0], image[2, 0, 0], image[3, 0, 0] = (1, 0, 0), (0, 2, 0), (0, 0, 1)
    data = toys.Examples(jnp.asarray(image), jnp.asarray([0, 1, 2, 1], jnp.int32))
    partition = toys.make_partition([np.array([1]), np.array([2, 3])], np.asarray(data.label))
    engine = toys.build(toys.sharing(View(1, 4, augment=False)), [partition], Lanes(2, "vmap"))

    def play(shares=(1.0, 1.0), data=data, rate=0.1, ids=(0, 1)):
        server = {"weight": jnp.zeros(3), "share": jnp.asarray(shares)}
        frozen, states = {"rate": jnp.float32(rate)}, jnp.zeros(2, jnp.int32)
        return run_round(
            engine, server, states, RoundInputs(frozen, data, partition, np.array(ids), tasks()[0], 0, KEY)
        )

    return play


def test_one_step_of_two_clients_by_hand(hand):
    """Client 0: w = 0.1 * 1 * (1, 0, 0). Client 1: w = 0.1 / 2 * (2 * (0, 2, 0) + 1 * (0, 0, 1)). Weights 1
    and 2 of 3."""
    server, states, _ = hand()
    np.testing.assert_allclose(server["weight"], [0.1 / 3, 0.2 * 2 / 3, 0.05 * 2 / 3], rtol=1e-6)
    assert states.tolist() == [1, 1]


def test_metrics_are_means_over_rows(hand):
    """At w = 0 the losses of the three rows are 1/2, 4/2 and 1/2: 1 on average, where the mean over clients
    would be 0.875."""
    assert hand()[2].metrics == {"loss": pytest.approx(1.0)}


def test_the_report_counts_rows_and_steps(hand):
    _, _, report = hand()
    assert (
        report.participants,
        report.examples,
        report.training_examples,
        report.useful_steps,
        report.paid_steps,
    ) == (2, 3, 3, 2, 2)
    assert report.slot_efficiency == 1.0


def test_a_client_of_weight_0_changes_nothing_but_its_own_state(hand):
    server, states, report = hand(shares=(0.0, 1.0))
    np.testing.assert_allclose(server["weight"], [0, 0.2, 0.05], rtol=1e-6)
    assert states.tolist() == [1, 1] and report.rejected == 0


def test_a_negative_weight_is_refused(hand):
    server, states, report = hand(shares=(-1.0, 1.0))
    np.testing.assert_allclose(server["weight"], [0, 0.2, 0.05], rtol=1e-6)
    assert states.tolist() == [0, 1] and report.rejected == 1


def test_if_all_weights_are_0_the_server_stays(hand):
    assert hand(shares=(0.0, 0.0))[0]["weight"].tolist() == [0, 0, 0]


# ---- absent and broken clients -----------------------------------------------------------------------------


def poisoned(data: toys.Examples, partition, clients, value) -> toys.Examples:
    """The data with one number of one row of each of these clients replaced."""
    image = np.array(data.input)
    for client in clients:
        image[partition.indices[partition.offset[client]], 0, 0, 1] = value
    return data._replace(input=jnp.asarray(image))


def play_once(engine, data, partition, ids):
    server, states = begin_run(engine.method)
    ids, states = np.array(ids), stack(states)
    return (
        run_round(
            engine,
            server,
            jax.tree.map(jnp.copy, states),
            RoundInputs(FROZEN, data, partition, ids, tasks()[0], 0, KEY),
        ),
        server,
        states,
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name", small_runs.some(["conflating", "gathering", "remembering"], ["gathering", "remembering"])
)
def test_a_non_finite_upload_counts_as_not_taking_part(name, value, data, partitions):
    engine = engine_of(name, "vmap3")
    (server, states, report), _, before = play_once(
        engine, poisoned(data, partitions[0], [3], value), partitions[0], [0, 1, 3, 6]
    )
    (without, others, _), _, _ = play_once(engine, data, partitions[0], [0, 1, 6])
    close(server, without, atol=1e-6)
    close(states, others, atol=1e-6)
    same(jax.tree.map(lambda x: x[3], states), jax.tree.map(lambda x: x[3], before))
    assert (report.participants, report.rejected) == (4, 1)


def counting(engine, opened: list):
    """The engine, which notes every chunk that it begins to play."""
    (player,) = engine.players

    def open_(accumulator, states, chunk):
        opened.append(chunk.id.tolist())
        return player.open(accumulator, states, chunk)

    return engine._replace(players=(player._replace(open=open_),))


@pytest.mark.parametrize(("bad", "plays"), [([], 0), ([3], 2), ([1], 1), ([0, 1, 3, 6], 2)])
@pytest.mark.parametrize("name", small_runs.some(["conflating", "gathering", "remembering"], ["remembering"]))
def test_chunks_are_played_again_from_the_first_with_a_bad_upload_on(name, bad, plays, data, partitions):
    """Guarded or not, the bits are the same; chunks of two clients."""
    found, begun, engine = [], [], engine_of(name, "unroll2")
    for guarded in (True, False):
        server, states = begin_run(engine.method)
        opened: list = []
        found.append(
            run_round(
                counting(engine, opened),
                server,
                stack(states),
                RoundInputs(
                    FROZEN,
                    poisoned(data, partitions[0], bad, np.nan),
                    partitions[0],
                    np.array([0, 1, 3, 6]),
                    tasks()[0],
                    0,
                    KEY,
                ),
                guarded=guarded,
            )
        )
        begun.append(opened)
    same(found[0][:2], found[1][:2])
    assert found[0][2] == found[1][2] and found[0][2].rejected == len(bad)
    assert len(begun[0]) == 2 and len(begun[1]) == 2 + plays
    assert len({tuple(each) for each in begun[1]}) == 2
    assert set(engine.traces.values()) == {1}


class Waited:
    """A number of chunks that are merged, which notes that the host waits for it."""

    def __init__(self, number, notes: list):
        self.number, self.notes = number, notes

    def __int__(self):
        self.notes.append("host waits")
        return int(self.number)


def noting(engine, notes: list):
    """The engine, which notes when the server's step begins and when the host waits for clients."""
    (player,) = engine.players

    def server(*arguments):
        notes.append("server")
        return player.server(*arguments)

    def close(accumulator, states, carry, chunk, merged):
        if isinstance(merged.chunks, Waited):
            merged = merged._replace(chunks=merged.chunks.number)
        *both, done = player.close(accumulator, states, carry, chunk, merged)
        return *both, Waited(done, notes)

    return engine._replace(players=(player._replace(server=server, close=close),))


@pytest.mark.parametrize(("bad", "times"), [([], 1), ([3], 2)])
def test_the_device_has_the_servers_step_before_the_host_waits_for_clients(bad, times, data, partitions):
    engine, notes = engine_of("remembering", "unroll2"), []
    play_once(noting(engine, notes), poisoned(data, partitions[0], bad, np.nan), partitions[0], [0, 1, 3, 6])
    assert notes == ["server", "host waits"] * times


def test_sums_of_finite_uploads_may_overflow():
    """They are no reason to leave anybody out: the upload is looked at, found finite, and added."""
    begin = lambda context, state, key: jnp.full(3, 3e38)
    step = lambda context, local, batch, key: (local, {})
    send = lambda context, local, state: (Upload(mean=local, weight=context.client.examples), state + 1)
    first = lambda key, server: jnp.zeros((), jnp.int32)
    method = toys.toy(begin, (Phase(View(1, 4, augment=False), step),), send, init_client=first)
    rows = toys.examples()
    engine, partition = toys.build(method, toys.partitions(rows), Lanes(1, "loop")), toys.partitions(rows)[0]
    (server, states, report), before, _ = play_once(engine, rows, partition, [0, 3])
    same(server, before)
    assert (report.rejected, report.refused, states[:4].tolist()) == (0, 1, [1, 0, 0, 1])


@pytest.mark.parametrize("name", ["gathering", "remembering"])
def test_if_all_uploads_are_non_finite_server_and_clients_stay(name, data, partitions):
    engine = engine_of(name, "vmap3")
    (server, states, report), server_before, before = play_once(
        engine, poisoned(data, partitions[0], [0, 1, 6], np.nan), partitions[0], [0, 1, 6]
    )
    same((server, states), (server_before, before))
    assert (report.participants, report.rejected) == (3, 3)


def test_the_aggregate_shows_a_broken_client_as_absent(data, partitions):
    engine = engine_of("remembering", "vmap3")
    server, states = begin_run(engine.method)
    bad = poisoned(data, partitions[0], [3], np.nan)
    received, _ = receive(engine, FROZEN, server, stack(states), bad, partitions[0], [0, 3, 6], tasks()[0])
    assert received.id.tolist() == [0, CLIENTS, 6, CLIENTS]
    assert received.valid.tolist() == [True, False, True, False]
    assert received.weight.tolist() == [9, 0, 8, 0]
    assert not received.gather[1].any()


def test_a_client_without_rows_is_absent_and_keeps_its_state(data, partitions):
    assert partitions[0].count[2] == 0
    engine = engine_of("remembering", "vmap3")
    (server, states, report), _, before = play_once(engine, data, partitions[0], [0, 2, 6])
    (without, others, _), _, _ = play_once(engine, data, partitions[0], [0, 6])
    same((server, states), (without, others))
    same(jax.tree.map(lambda x: x[2], states), jax.tree.map(lambda x: x[2], before))
    assert report.participants == 2 and states["times"].tolist() == [1, 0, 0, 0, 0, 0, 1]


def test_a_round_without_any_rows_changes_nothing(data, partitions):
    (server, states, report), server_before, before = play_once(
        engine_of("remembering", "vmap3"), data, partitions[0], [2]
    )
    same((server, states), (server_before, before))
    assert report.participants == 0


@pytest.mark.long
def test_every_client_with_rows_refreshes_its_state_whoever_took_part(data, partitions):
    (_, states, _), _, before = play_once(engine_of("personal", "vmap3"), data, partitions[0], [0, 6])
    changed = np.any(np.asarray(states) != np.asarray(before), axis=-1)
    assert changed.tolist() == (partitions[0].count > 0).tolist()


# ---- rules, predictions, keys ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def robust(partitions):
    chex.clear_trace_counter()
    twice = chex.assert_max_traces(n=2)  # for its shapes, and to compile it

    def server(round_context, server, aggregate, key):
        return coordinate_median(aggregate.gather, aggregate.weight, aggregate.valid), {}

    method = toys.remembering(server=twice(server))
    return toys.build(method._replace(broadcast=twice(method.broadcast)), partitions, Lanes(3, "vmap"), 3)


@pytest.mark.long
def test_a_robust_rule_sees_all_uploads(robust, data, partitions):
    """Over chunks of three clients the server gets the median of all seven."""

    def server(round_context, server, aggregate, key):
        return jnp.nanmedian(jnp.where(aggregate.valid[:, None], aggregate.gather, jnp.nan), axis=0), {}

    method = toys.remembering(server=server)
    expected = toys.drive_plain(method, data, partitions)
    assert_as_plain(toys.drive_engine(robust, data, partitions), expected)


def test_the_median_is_that_of_the_finite_uploads(robust, data, partitions):
    bad = poisoned(data, partitions[0], [3, 4], np.nan)
    server, states = begin_run(robust.method)
    received, _ = receive(
        robust, FROZEN, server, stack(states), bad, partitions[0], range(CLIENTS), tasks()[0]
    )
    (new, _, _), _, _ = play_once(robust, bad, partitions[0], range(CLIENTS))
    assert int(received.valid.sum()) == 4
    close(new, np.median(np.asarray(received.gather)[np.asarray(received.valid)], axis=0))


def test_every_client_predicts_with_its_own_model(plain):
    server, states, _ = plain("personal")
    image, label = jax.random.normal(jax.random.key(0), (5, 1, 1, 3)), np.zeros(5, np.int32)
    batch, round_context = Batch(image, label, label == 0, label), RoundContext(FROZEN, tasks()[1], 0, False)
    predict_client = TOYS["personal"]().predict_client
    assert predict_client is not None
    predict = jax.vmap(predict_client, in_axes=(None, None, 0, None))
    line = np.asarray(states + server) @ np.asarray(image[:, 0, 0]).T
    close(predict(round_context, server, states, batch), -0.5 * (line[..., None] - np.arange(4)) ** 2)


def test_a_clients_first_state_does_not_depend_on_the_number_of_clients():
    method = toys.remembering()
    first = lambda clients: jax.tree.map(lambda x: x[:3], init_clients(method, jnp.ones(3), clients, KEY))
    same(first(3), first(CLIENTS))


def test_rows_of_an_epoch_are_shuffled_anew_and_stay_with_their_client(data, partitions):
    mine = partitions[0].indices[partitions[0].offset[3] : partitions[0].offset[4]]
    orders = [epoch_order(toys.fold(KEY, 0, 0), 0, epoch, mine).tolist() for epoch in range(3)]
    assert all(sorted(order) == sorted(mine.tolist()) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
