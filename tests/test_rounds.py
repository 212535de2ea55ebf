"""What is played when and by whom, and what the server makes of what arrives: numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from small_runs import some
from toys import CLIENTS, FROZEN, KEY, same, tasks

from fcljax.federated.engine import Lanes, RoundInputs, init_clients, run_round
from fcljax.types import Phase, Program, Round, Upload, View, Weighted

ONCE = View(1, 4, augment=False)
LANES = {
    "one": Lanes(1, "loop"),
    "loop": Lanes(2, "loop"),
    "vmap": Lanes(2, "vmap"),
    "unroll": Lanes(2, "unroll"),
}


@pytest.fixture(scope="module")
def data():
    return toys.examples()


def idle(context, local, batch, key):
    """A step that learns nothing."""
    return local, {}


def play(engine, server, states, data, partition, ids=None, **others):
    """A round of the first task."""
    ids = np.arange(len(partition.count)) if ids is None else np.array(ids)
    return run_round(
        engine, server, states, RoundInputs(FROZEN, data, partition, ids, tasks()[0], 0, KEY, **others)
    )


# ---- opening, round, closing, refresh ----------------------------------------------------------------------

WHO_WHEN = [
    ("sampled", "round"),
    ("everyone", "task_start"),
    ("sampled", "task_end"),
    ("everyone", "after_round"),
    ("everyone", "round"),
    ("sampled", "after_round"),
]


def staged():
    """A method of these six rounds, the last one without a server. Clients send a number that they draw, and
    count how often they are called. The server notes who sent what, a draw of its own, and the order."""

    def start(context, state, key):
        return jax.random.normal(key)

    def finish(context, local, state):
        return Upload(gather=local, weight=context.client.examples), state + 1

    def server_of(i):
        def server(round_context, server, aggregate, key):
            row = jnp.where(aggregate.valid, aggregate.id, CLIENTS)
            return {
                "sent": server["sent"].at[i, row].set(aggregate.gather, mode="drop"),
                "own": server["own"].at[i].set(jax.random.normal(key)),
                "order": 10 * server["order"] + i + 1,
            }, {}

        return server

    program = Program(start, (Phase(ONCE, idle),), finish)
    rounds = [Round(program, server_of(i), *each) for i, each in enumerate(WHO_WHEN)]
    rounds[-1] = rounds[-1]._replace(server=None)
    nothing = {"sent": jnp.zeros((6, CLIENTS)), "own": jnp.zeros(6), "order": jnp.zeros((), jnp.int32)}
    method = toys.toy(
        init=lambda key, frozen: jax.tree.map(jnp.copy, nothing),
        predict=lambda round_context, server, batch: toys.logits(jnp.ones(3), batch),
        init_client=lambda key, server: jnp.zeros((), jnp.int32),
    )
    return method._replace(rounds=tuple(rounds))


@pytest.fixture(scope="module")
def whole_task(data):
    """(engine, server at the end, by `when` how often each client was called and the report, what plain loops
    give at the end and in reports) of a task's opening, one round and closing. Clients 0 and 6 are sampled,
    of six with rows."""
    partition, method = toys.partitions(data)[0], staged()
    engine = toys.build(method, [partition], Lanes(3, "vmap"), 2)
    (server, plain_states), fetch = toys.begin_run(method), jax.jit(toys.fetch, static_argnums=3)
    plain, states = server, init_clients(method, server, CLIENTS, KEY)
    calls, reports, plain_reports = {}, {}, {}
    for when in ("task_start", "round", "task_end"):
        before = np.asarray(states)
        server, states, reports[when] = play(engine, server, states, data, partition, [0, 6], when=when)
        calls[when] = (np.asarray(states) - before).tolist()
        inputs = RoundInputs(FROZEN, data, partition, np.array([0, 6]), tasks()[0], 0, KEY, when)
        plain, plain_states, plain_reports[when] = toys.plain_round(
            method, fetch, plain, plain_states, inputs
        )
    same(states, toys.stack(plain_states))
    return engine, server, calls, reports, plain, plain_reports


@pytest.mark.long
def test_every_kind_of_round_equals_plain_loops(whole_task):
    engine, server, _, reports, plain, plain_reports = whole_task
    toys.close(server, plain, atol=1e-6)
    for when, report in reports.items():
        expected = plain_reports[when]
        assert (report.participants, report.uploads) == (expected.participants, expected.uploads)
    assert set(engine.traces.values()) == {1}


def test_rounds_are_played_in_their_order_and_those_of_refresh_last(whole_task):
    """Numbered from 1: 2 opens; 1, 5 and then 4 are the round; 3 closes."""
    assert int(whole_task[1]["order"]) == 21543


def test_uploads_of_every_kind_of_round_are_counted(whole_task):
    assert {when: report.uploads for when, report in whole_task[3].items()} == {
        "task_start": (0, 6, 0, 0, 0, 0),
        "round": (2, 0, 0, 6, 6, 2),
        "task_end": (0, 0, 2, 0, 0, 0),
    }


def test_the_sampled_take_part_or_everyone_with_rows(whole_task):
    _, server, calls, _, _, _ = whole_task
    clients = {"sampled": [0, 6], "everyone": [0, 1, 3, 4, 5, 6]}
    heard = [np.flatnonzero(row).tolist() for row in server["sent"]]
    assert heard == [clients[who] for who, _ in WHO_WHEN[:-1]] + [[]]  # the last one has no server
    assert calls == {
        "task_start": [1, 1, 0, 1, 1, 1, 1],
        "round": [4, 2, 0, 2, 2, 2, 4],  # two rounds, and two of refresh
        "task_end": [1, 0, 0, 0, 0, 0, 1],
    }


def test_clients_and_server_draw_anew_in_every_kind_of_round(whole_task):
    server = whole_task[1]
    assert len(np.unique(server["sent"][:5, 0])) == len(np.unique(server["own"][:5])) == 5


def test_a_round_that_nobody_is_sampled_for_still_calls_everyone_else(whole_task, data):
    """Client 2 has no rows."""
    engine, partition = whole_task[0], toys.partitions(data)[0]
    states = jnp.zeros(CLIENTS, jnp.int32)
    _, states, report = play(engine, toys.begin_run(engine.method)[0], states, data, partition, [2])
    assert (report.participants, report.uploads) == (0, (0, 0, 0, 6, 6, 0))
    assert states.tolist() == [2, 2, 0, 2, 2, 2, 2]


# ---- what arrives ------------------------------------------------------------------------------------------


def declaring():
    """A method whose clients say what the server has told them to, with the weights that it has told them.
    `spoil` is added to what it learns; `limit` is infinite as a matter of course."""

    def finish(context, local, state):
        return Upload(
            mean=context.payload["says"][context.client.id],
            weight=context.payload["weight"][context.client.id],
        ), state + 1

    def server(round_context, server, aggregate, key):
        heard = Weighted(aggregate.mean, jnp.ones(()))
        return {**server, "learnt": aggregate.mean + server["spoil"]}, {"heard": heard}

    def init(key, frozen):
        numbers = {"says": jnp.ones(2), "weight": jnp.ones(2), "learnt": jnp.float32(7)}
        return {**numbers, "spoil": jnp.float32(0), "limit": jnp.float32(jnp.inf)}

    return toys.toy(
        lambda context, state, key: (),
        (Phase(ONCE, idle),),
        finish,
        server=server,
        init=init,
        predict=lambda round_context, server, batch: toys.logits(jnp.ones(3), batch),
        init_client=lambda key, server: jnp.zeros((), jnp.int32),
    )


@pytest.fixture(scope="module")
def declare(data):
    """Two rounds of one engine, (server, states, report) of both: of what is given, and then of clients that
    say 4 and 1 with weights 2 and 1."""
    partition = toys.make_partition([np.array([1, 3]), np.array([2])], np.asarray(data.label))
    engine = toys.build(declaring(), [partition], Lanes(2, "vmap"))
    start = toys.begin_run(engine.method)[0]

    def rounds(**told):
        told = {name: jnp.asarray(value, jnp.float32) for name, value in told.items()}
        first = play(engine, start | told, jnp.zeros(2, jnp.int32), data, partition)
        again = first[0] | {
            "says": jnp.array([4.0, 1]),
            "weight": jnp.array([2.0, 1]),
            "spoil": start["spoil"],
        }
        result = first[0], first[1].tolist(), first[2]
        return *result, *play(engine, again, first[1], data, partition)

    return rounds


def test_a_mean_by_hand(declare):
    """(2 * 4 + 1 * 1) / (2 + 1), though one of the server's numbers is infinite."""
    server, states, report, *_ = declare(says=[4, 1], weight=[2, 1])
    assert (float(server["learnt"]), states) == (3, [1, 1])
    assert (report.refused, report.rejected, report.metrics) == (0, 0, {"heard": 3})


@pytest.mark.parametrize(
    "told",
    [{"says": [3e38, 1], "weight": [2, 1]}, {"spoil": np.nan}, {"spoil": np.inf}],
    ids=["one upload of 3e38", "nan", "inf"],
)
def test_a_result_that_is_not_finite_is_refused_and_the_next_round_works(told, declare):
    """3e38 is finite and twice that is not."""
    server, states, report, after, states_after, next_report = declare(**told)
    assert float(server["learnt"]) == 7
    assert (report.refused, report.rejected, report.participants, report.uploads) == (1, 0, 2, (2,))
    assert states == [1, 1]  # the clients have worked
    assert (float(after["learnt"]), next_report.refused) == (3, 0)
    assert states_after.tolist() == [2, 2]


@pytest.mark.parametrize("lanes", some(LANES, ("vmap",)))
def test_every_upload_is_changed_as_it_arrives_and_before_it_is_merged(lanes, data):
    """Clients of one and two rows send (3, 4, 0) and (0.3, 0, 0.4), of lengths 5 and 0.5, where (0, 0, 0) was
    sent. Clipped to length 1 and halved in weight, the first becomes (0.6, 0.8, 0) with weight 1/2 of 1."""

    def finish(context, local, state):
        value = jnp.array([[3.0, 4, 0], [0.3, 0, 0.4]])[context.client.id]
        return Upload(mean=value, gather=value, weight=context.client.examples), state

    method = toys.clipping(1.0)
    client = method.rounds[0].program._replace(finish=finish)
    method = method._replace(rounds=(method.rounds[0]._replace(program=client),))
    partition = toys.make_partition([np.array([1]), np.array([2, 3])], np.asarray(data.label))
    engine = toys.build(method, [partition], LANES[lanes])
    received, _ = toys.receive(engine, FROZEN, jnp.zeros(3), (), data, partition, [0, 1], tasks()[0])
    np.testing.assert_allclose(received.gather, [[0.6, 0.8, 0], [0.3, 0, 0.4]], rtol=1e-6)
    assert received.weight.tolist() == [0.5, 2]
    server, _, _ = play(engine, jnp.zeros(3), (), data, partition)
    expected = (0.5 * np.array([0.6, 0.8, 0]) + 2 * np.array([0.3, 0, 0.4])) / 2.5
    np.testing.assert_allclose(server, expected, rtol=1e-6)


def test_an_upload_that_is_spoilt_as_it_arrives_is_left_out(data):
    """The server's own part on arrival is guarded as well: 0 / 0 for client 0."""
    method = toys.toy(
        program={
            "receive": lambda context, up: up._replace(mean=up.mean * context.client.id / context.client.id)
        }
    )
    partition = toys.make_partition([np.array([1]), np.array([2])], np.asarray(data.label))
    engine = toys.build(method, [partition], Lanes(2, "vmap"))
    received, _ = toys.receive(engine, FROZEN, jnp.zeros(3), (), data, partition, [0, 1], tasks()[0])
    assert received.valid.tolist() == [False, True] and int(received.rejected) == 1


@pytest.mark.parametrize("slots", some([128, 3000], [128]), ids=["in chunks", "at once"])
def test_narrow_uploads_of_3000_clients_are_summed_in_full(slots, data):
    """A bfloat16 sum of ones stops at 256. Means are exact, sums are rounded to bfloat16 once, at the end."""
    value = jnp.array([1, 3], jnp.bfloat16)

    def step(context, local, batch, key):
        return local, {"one": Weighted(jnp.bfloat16(1), jnp.float32(1))}

    partition = toys.make_partition([np.array([1])] * 3000, np.asarray(data.label))
    method = toys.toy(
        lambda context, state, key: (),
        (Phase(ONCE, step),),
        lambda context, local, state: (Upload(mean=value, sum=value, weight=1.0), state),
        server=lambda round_context, server, aggregate, key: ((aggregate.mean, aggregate.sum), {}),
        init=lambda key, frozen: (0 * value, 0 * value),
        predict=lambda round_context, server, batch: toys.logits(jnp.ones(3), batch),
    )
    engine = toys.build(method, [partition], Lanes(8, "vmap"), slots)
    (mean, total), _, report = play(engine, (0 * value, 0 * value), (), data, partition)
    assert mean.dtype == total.dtype == jnp.bfloat16
    same(mean, value)
    same(total, jnp.array([3000, 9000], jnp.bfloat16))
    assert np.allclose(total.astype(jnp.float32), [3000, 9000], rtol=2**-8)
    assert report.metrics == {"one": 1.0}


# ---- what is reported --------------------------------------------------------------------------------------


@pytest.mark.long
def test_metrics_of_one_name_add_up_over_passes_and_are_told_apart_over_rounds(data):
    """Three rows at 10 and then, in the second pass, at 20: their mean is 15; the refresh has its own."""

    def say(value):
        def step(context, local, batch, key):
            rows = jnp.sum(batch.mask)
            return local, {"level": Weighted(value * rows, rows)}

        return Phase(ONCE, step)

    nothing = lambda context, state, key: ()
    refresh = Program(nothing, (say(5),), lambda context, local, state: (Upload(), state))
    method = toys.toy(
        nothing,
        (say(10), say(20)),
        lambda context, local, state: (Upload(mean=context.payload), state),
        rounds=(Round(refresh, None, "everyone", "after_round"),),
    )
    partition = toys.make_partition([np.array([1]), np.array([2, 3])], np.asarray(data.label))
    engine = toys.build(method, [partition], Lanes(2, "vmap"))
    _, _, report = play(engine, jnp.zeros(3), (), data, partition, [0, 1])
    assert report.metrics == {"level": 15, "after_round_1_level": 5}
    assert (report.participants, report.training_examples, report.examples) == (2, 3, 3 + 3 + 3)


@pytest.mark.long
def test_python_numbers_in_states_do_not_have_anything_traced_twice(data):
    """They are arrays of a special kind in jax, which they stop being on their way through a round."""

    def step(context, local, batch, key):
        return {**local, "steps": local["steps"] + jnp.float32(1), "kind": 2}, {}

    def finish(context, local, state):
        return Upload(mean={"weight": context.payload["weight"], "steps": local["steps"]}), local["steps"]

    def server(round_context, server, aggregate, key):
        return {"weight": 0.5, "rounds": server["rounds"] + aggregate.mean["steps"]}, {}

    method = toys.toy(
        lambda context, state, key: {"steps": state, "kind": 1},
        (Phase(ONCE, step),),
        finish,
        server=server,
        init=lambda key, frozen: {"weight": 1.5, "rounds": 0.0},
        init_client=lambda key, server: 0.0,
        predict=lambda round_context, server, batch: toys.logits(jnp.ones(3), batch),
    )
    partition = toys.make_partition([np.array([1]), np.array([2, 3])], np.asarray(data.label))
    for lanes in LANES.values():
        engine = toys.build(method, [partition], lanes)
        server = jax.jit(method.init)(KEY, FROZEN)
        states = init_clients(method, server, 2, KEY)
        for _ in range(3):
            server, states, _ = play(engine, server, states, data, partition)
        assert (float(server["weight"]), float(server["rounds"]), states.tolist()) == (0.5, 1 + 2 + 3, [3, 3])
        assert set(engine.traces.values()) == {1}
