"""The round engine: it plans a round on the host (`schedule.py`), runs the clients in a compiled loop
(`client_loop.py`), and finishes the round at the server.

Every function is traced once for a whole run. Uploads are running sums and gathered buffers, so memory does
not grow with the number of clients where they only send means and sums.
"""

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.data.streaming import Host, over_windows, ready
from fcljax.errors import InputError
from fcljax.federated.check import Example, check_method
from fcljax.federated.claims import claims_of
from fcljax.federated.client_loop import (
    OF_DEVICES,
    ON_DEVICES,
    Accumulator,
    Call,
    Carry,
    Fetch,
    Lanes,
    LoopSettings,
    Merging,
    ReplayData,
    Shapes,
    TickWindow,
    chunk_accumulator,
    close_chunk,
    empty_accumulator,
    expand,
    indices_of_ticks,
    open_chunk,
    receive_sent,
    replay_indices,
    run_ticks,
    squeeze,
    states_of_chunk,
)
from fcljax.federated.communication import count_scalars
from fcljax.federated.keys import RoundKey
from fcljax.federated.schedule import Capacity, Chunk, ClientPartition, LaneTable, plan_round
from fcljax.federated.server_replay import (
    Replayed,
    Replayer,
    current_buffer,
    make_replayer,
    replay_on_server,
)
from fcljax.federated.sums import became_non_finite, one_of, sum_value
from fcljax.mesh import (
    WHOLE,
    AnyMesh,
    by_device,
    device_count,
    in_order,
    keeps_order,
    on_each,
    put,
    put_server,
    put_shared,
    server_specs,
    split,
)
from fcljax.mesh import jit as jit_on
from fcljax.types import (
    Aggregate,
    Broadcast,
    ClientContext,
    Method,
    Metrics,
    Phase,
    PyTree,
    ReplayBuffer,
    Round,
    RoundContext,
    Server,
    Task,
    Upload,
    Weighted,
    When,
)

# A smaller network's programs take longer to compile than to run, and are compiled lean.
LEAN_PARAMETERS = 2_000_000
AHEAD = 2  # chunks that the host has given to the device at most, for the memory of their slots


class RoundReport(NamedTuple):
    """Host-side summary of one round."""

    metrics: dict[str, float]
    """Means over examples."""
    participants: int = 0
    """Of the method's first round that was run."""
    rejected: int = 0
    """Uploads that were left out: not finite, or with an impossible claim."""
    impossible: dict[str, int] = {}
    """Claim -> uploads that were left out because it cannot be true; only those that there were."""
    refused: int = 0
    """Rounds whose result was not finite, so that the server kept its state."""
    examples: int = 0
    """Examples read in all phases."""
    training_examples: int = 0
    """Examples read in the longest phase of the method's first round that was run."""
    useful_steps: int = 0
    """Steps of clients."""
    paid_steps: int = 0
    """Lanes times ticks: the useful steps if no lane waited."""
    uploads: tuple[int, ...] = ()
    """Clients that took part in each of the method's rounds."""

    @property
    def slot_efficiency(self) -> float:
        """Useful steps over paid steps."""
        return self.useful_steps / max(self.paid_steps, 1)


class Served(NamedTuple):
    """The server's part of an exchange."""

    server: PyTree  # its new state
    metrics: Metrics  # of its step
    refused: Array | bool  # whether the result was not finite, so that the server keeps its state


Serve = Callable[[Accumulator], Served]
"""The server's step on what was received. It returns at once, while the device still computes."""


def no_server(_: Accumulator) -> Served:
    """`Serve` where nobody asks what the server makes of uploads."""
    return Served((), {}, False)


class Player(NamedTuple):
    """The compiled functions of one of the method's rounds.

    Data on the host go through the same functions as resident data, a window at a time, and get the same
    bits. On a mesh every device runs its lanes, on a carry [devices, ...] that has the slots of its own
    clients. States of clients and their entries in the accumulator lie in equal parts on the devices.
    """

    round: Round  # the round itself
    capacity: Capacity  # its static shapes
    empty: Callable[[], Accumulator]  # empty() -> an accumulator
    # indices(chunk, key) -> the examples of every tick, for each phase
    indices: Callable[..., tuple[Array, ...]]
    # replay_indices(carry, chunk) -> the examples that each of the chunk's clients may replay
    replay_indices: Callable[..., Array] | None
    open: Callable[..., Carry]  # open(accumulator, states, chunk) -> carry before the first tick
    # for each phase: run_ticks(call, carry, window, past, parted) -> carry; `parted`: each device has its own
    # part of the window's data
    run_ticks: tuple[Callable[..., Carry], ...]
    # close(accumulator, states, carry, chunk, merged) -> both with what the chunk's clients sent and changed,
    # if all of it is finite, and how many chunks are merged
    close: Callable[..., tuple[Accumulator, PyTree, Array]]
    # receive(accumulator, context, upload, position) adds an upload that was made elsewhere
    receive: Callable[..., tuple[Accumulator, Array]]
    # server(round_context, server, accumulator, key) -> its part of the exchange
    server: Callable[..., Served] | None
    mesh: AnyMesh | None  # the devices; None: one device


class Exchange(NamedTuple):
    """One of the method's rounds, as the clients' part of it is run."""

    index: int  # of the method's round
    context: RoundContext  # the round
    broadcast: Broadcast  # what was sent to clients
    partition: ClientPartition  # the clients' examples
    ids: Int[np.ndarray, " n"]  # the sorted ids of the clients that take part
    key: PRNGKeyArray  # of this exchange, the same for all of its clients


class Played(NamedTuple):
    """The clients' part of an exchange, and what the server made of it."""

    accumulator: Accumulator  # what was received of them
    states: PyTree  # the new client states
    served: Served  # what the server made of it
    ids: Int[np.ndarray, " n"]  # the clients that took part
    steps: tuple[int, int]  # useful steps, and steps that the lanes were busy or idle for


@runtime_checkable
class Clients(Protocol):
    """Runs the clients' part of an exchange: the engine itself, or clients on other machines."""

    def __call__(self, exchange: Exchange, states: PyTree, serve: Serve, /) -> Played:
        """What was received, `serve` of it, and the new client states; `states` may be donated."""
        ...


class Engine(NamedTuple):
    """The compiled functions of one run."""

    method: Method
    """The method that it runs."""
    lanes: Lanes
    """How clients share the machine."""
    broadcast: Callable[[RoundContext, Server], Broadcast]
    """`Method.broadcast`, compiled."""
    players: tuple[Player, ...]
    """In the order of method.rounds."""
    place: Callable[[PyTree], PyTree]
    """Puts arrays where the engine works, a copy on every device of its mesh; arrays that are there stay."""
    traces: dict[str, int]
    """How often each function was traced: once, after any number of rounds."""
    mesh: AnyMesh | None
    """The devices; None: one device."""
    replayer: Replayer | None = None
    """The server's training on its replay buffer, if it has one."""


def make_engine(
    method: Method,
    fetch: Fetch,
    lanes: Lanes,
    capacities: tuple[Capacity, ...],
    example: Example,
    *,
    mesh: AnyMesh | None = None,
    shapes: tuple[Shapes, ...] | None = None,
) -> Engine:
    """Functions that are compiled once for all rounds of all tasks.

    Args:
      method: the method.
      fetch: reads examples of the data.
      lanes: how clients share the machine; with a mesh, `lanes.count` is the total over devices and must be a
        multiple of them.
      capacities: the run's static shapes (`schedule.capacities`), one for each of the method's rounds.
      example: parameters, data and a task, of which shapes and types count. Data may be a `Host`.
      mesh: devices under the axis name `clients`; None uses one device.
      shapes: the result of `check_method` for these arguments, if it is known already.

    Raises:
      InputError: naming a function of the method that does not keep to the protocol.
    """
    traces: dict[str, int] = {}
    shapes = shapes or check_method(method, fetch, example)
    for each in capacities:
        if each.devices != device_count(mesh):
            raise InputError(
                f"capacities: made for {each.devices} devices; nearest valid value: {device_count(mesh)}"
            )

    specs = WHOLE  # how the devices have the server's state
    if mesh is not None and not keeps_order(mesh):
        specs = server_specs(jax.eval_shape(method.init, jax.random.key(0), example.frozen), mesh)

    lean = count_scalars(example.frozen) < LEAN_PARAMETERS

    def jit(name: str, function: Callable, spec=WHOLE, **options) -> Callable:
        return jit_on(_counted(traces, name, function), mesh, spec, lean=lean, **options)

    def player(index: int) -> Player:
        each = method.rounds[index]
        capacity = capacities[index]

        def named_jit(name: str, *args, **options) -> Callable:
            return jit(f"{each.when} {index} {name}", *args, **options)

        return _player(each, shapes[index], capacity, fetch, lanes, mesh, named_jit, specs)

    return Engine(
        method,
        lanes,
        broadcast=jit("broadcast", method.broadcast),
        players=tuple(player(index) for index in range(len(method.rounds))),
        place=lambda tree: put(tree, mesh) if mesh else tree,
        traces=traces,
        mesh=mesh,
        replayer=make_replayer(method.server_replay, jit, specs) if method.server_replay else None,
    )


def _player(
    each: Round,
    shapes: Shapes,
    capacity: Capacity,
    fetch: Fetch,
    lanes: Lanes,
    mesh: AnyMesh | None,
    jit: Callable,
    specs: PyTree,
) -> Player:
    program = each.program
    # a device's part of the carry has an axis of its own
    mine = lanes._replace(count=lanes.count // device_count(mesh))
    begun, ending = (squeeze, expand) if mesh else (lambda carry: carry,) * 2

    def empty():
        return empty_accumulator(shapes, capacity, len(claims_of(program)), mesh)

    def indices(chunk, key):
        return tuple(indices_of_ticks(phase, i, chunk, key) for i, phase in enumerate(program.phases))

    def may_replay(carry, chunk):
        return replay_indices(program, begun(carry).states, chunk)

    def open_(accumulator, states, chunk):
        states = states_of_chunk(states, chunk, capacity, mesh)
        return ending(open_chunk(shapes, mine, chunk_accumulator(accumulator, chunk), states, chunk))

    def ticks_of(i, call, carry, window, past):
        waits = lanes.count > 1
        settings = LoopSettings(fetch, mine, capacity.widths[i], waits, capacity.participants, shapes)
        return ending(run_ticks(program, i, settings, call, begun(carry), window, past))

    def ticks(i, call, carry, window, past, parted):
        images = split() if parted else WHOLE
        # pyrefly: ignore[bad-argument-type]  # a tree of specifications
        specs = TickWindow(images, split(1), split(1), WHOLE, WHOLE), ReplayData(images, split(), split())
        run = on_each(functools.partial(ticks_of, i), mesh, (_OF_CALL, split(), *specs), split())
        return run(call, carry, window, past)

    def close(accumulator, states, carry, chunk, merged):
        return close_chunk(accumulator, states, begun(carry), chunk, merged, capacity, mesh)

    closed = (ON_DEVICES, split(), WHOLE)
    indices = on_each(indices, mesh, (OF_DEVICES, WHOLE), split(1))
    may_replay = on_each(may_replay, mesh, (split(), OF_DEVICES), split())
    open_ = on_each(open_, mesh, (ON_DEVICES, split(), OF_DEVICES), split())
    close = on_each(close, mesh, (ON_DEVICES, split(), split(), OF_DEVICES, WHOLE), closed)
    phases = range(len(program.phases))
    loop = {"donate_argnums": 1, "static_argnums": 4}
    server = None
    if each.server:
        serve = functools.partial(_serve, each.server, shapes, capacity.participants, mesh)
        # pyrefly: ignore[bad-argument-type]  # a tree of specifications
        server = jit("server", serve, Served(specs, WHOLE, WHOLE))
    return Player(
        each,
        capacity,
        empty=jit("empty", empty, ON_DEVICES),
        indices=jit("indices", indices, split(1)),
        replay_indices=jit("replay indices", may_replay, split()) if program.replay_buffer else None,
        open=jit("open", open_, split()),
        run_ticks=tuple(jit(f"phase {i}", functools.partial(ticks, i), split(), **loop) for i in phases),
        close=jit("close", close, closed, donate_argnums=(0, 1)),
        receive=jit("receive", functools.partial(receive_sent, program), (ON_DEVICES, WHOLE)),
        server=server,
        mesh=mesh,
    )


# how the devices get a `Call`: as a whole, but for what belongs to clients, of which each has its own
# pyrefly: ignore[bad-argument-type]  # a tree of specifications
_OF_CALL = Call(WHOLE, WHOLE, OF_DEVICES, WHOLE, WHOLE, WHOLE)


def init_clients(method: Method, server: PyTree, clients: int, key: PRNGKeyArray) -> PyTree:
    """States of all clients, stacked [K, ...] in the order of their ids; client i has the key fold_in(key,
    i)."""
    return client_states(method, server, jnp.arange(clients), key)


def client_states(method: Method, server: PyTree, ids: Int[Array, " n"], key: PRNGKeyArray) -> PyTree:
    """The first states of these clients, stacked [n, ...], of `init_clients`."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
    return _strong(jax.jit(jax.vmap(lambda k: method.init_client(k, server)))(keys))


def begin_clients(engine: Engine, server: PyTree, clients: int, key: PRNGKeyArray) -> PyTree:
    """`init_clients`, shared by the devices as `mesh.put_shared` does, and never all of them on one."""
    if engine.mesh is None:
        return init_clients(engine.method, server, clients, key)

    def first(server: PyTree, ids: Array, key: PRNGKeyArray) -> PyTree:
        return client_states(engine.method, server, ids, key)

    ids = put_shared(np.arange(clients), engine.mesh)
    return jit_on(first, engine.mesh, split())(put_server(server, engine.mesh), ids, engine.place(key))


def _strong(tree: PyTree) -> PyTree:
    """The same arrays without jax's mark that a Python number made them: arrays that lose it on their way
    through a round would have every function traced twice."""
    return jax.tree.map(lambda x: x.astype(x.dtype) if getattr(x, "weak_type", False) else x, tree)


# ---- one round ---------------------------------------------------------------------------------------------


class RoundInputs(NamedTuple):
    """What one federated round needs, besides the states of server and clients."""

    frozen: PyTree
    """What is never trained. On a mesh, `frozen` and `data` are best given as `Engine.place` returns them:
    otherwise they are copied to its devices in every round."""
    data: PyTree
    """What `Fetch` reads, on the device, or a `Host`; both give the same bits."""
    partition: ClientPartition
    """Each client's examples in this task."""
    ids: Int[np.ndarray, " n"]
    """Sorted ids of the sampled participants; those without examples are absent and keep their state."""
    task: Task
    """The current task."""
    round: int
    """Number of the round within the task, from 0."""
    key: PRNGKeyArray
    """Of the run; the round's key is derived from (key, task, round)."""
    when: When = "round"
    """Which of the method's rounds to run: "round" runs those of "after_round" as well."""
    last: bool = False
    """Whether this is the last round of the task."""
    past: Sequence[ReplayBuffer] = ()
    """The server's examples of the earlier tasks, in the order of the tasks, as `keep_task` returned them, if
    it has a server replay."""


def run_round(
    engine: Engine,
    server: PyTree,
    states: PyTree,
    inputs: RoundInputs,
    *,
    section: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    clients: Clients | None = None,
    guarded: bool = False,
) -> tuple[PyTree, PyTree, RoundReport]:
    """One federated round: broadcast, the participants' programs, aggregation, the server's step, and its
    training on its replay buffer; then the method's rounds of "after_round".

    Args:
      engine: from `make_engine`.
      server: the server's state.
      states: all clients' states, stacked [K, ...]; donated. On a mesh they are best given as
        `mesh.put_shared` returns them, and as many are returned as are given.
      inputs: what else the round needs.
      section: a context manager that is entered around the parts "client" and "server", to time them.
      clients: runs the clients, where that is not this engine: clients on other machines.
      guarded: check every upload as it arrives. Otherwise what a chunk of clients has sent is checked as a
        whole, and from the first chunk on that is not finite all are run again, guarded: the same bits,
        sooner, unless bad uploads are to be expected.

    Returns:
      The new server state (the old one if no upload was finite, or if the result is not), the new client
      states, and a report.
    """
    key = jax.random.fold_in(jax.random.fold_in(inputs.key, inputs.task.index), inputs.round)
    server, states = _strong((server, states))
    context = RoundContext.on_host(inputs.frozen, inputs.task, inputs.round, inputs.last)
    clients = clients or functools.partial(_run_clients, engine, inputs.data, guarded)
    reports = {}
    replayed = None
    given = jax.tree.map(len, states)
    for stage in ("round", "after_round") if inputs.when == "round" else (inputs.when,):
        for index, own_key in stage_keys(engine.method, stage, key):
            sampled = engine.players[index].round.who == "sampled"
            ids = inputs.ids if sampled else np.flatnonzero(inputs.partition.count)
            ids = ids[inputs.partition.count_of(ids) > 0]
            # `Exchange.broadcast` is made where the exchange begins
            exchange = Exchange(index, context, Broadcast(()), inputs.partition, ids, own_key)
            server, states, reports[index] = _exchange(engine, server, states, exchange, section, clients)
        if stage == "round" and engine.replayer:
            with section("server"):
                own_key = jax.random.fold_in(key, RoundKey.SERVER_REPLAY)
                (context, own_key) = engine.place((context, own_key))
                server = put_server(server, engine.mesh)
                replayed = replay_on_server(
                    engine.replayer, context, server, inputs.past, own_key, engine.place
                )
                server = replayed.server
    states = jax.tree.map(lambda x, clients: x if len(x) == clients else x[:clients], states, given)
    return server, states, _together(engine.method, reports, replayed)


def keep_task(engine: Engine, frozen: PyTree, server: PyTree, task: Task, round_: int) -> ReplayBuffer | None:
    """The server's examples of a task that is over, on the host; None if the method keeps none.

    They are given back in the rounds of later tasks, as `RoundInputs.past`.
    """
    if engine.replayer is None:
        return None
    round_context = RoundContext.on_host(frozen, task, round_, True)
    server = put_server(_strong(server), engine.mesh)
    return current_buffer(engine.replayer, engine.place(round_context), server)


# what the key of a stage's first round is folded in with; the stage "round" has the round's key itself
_STAGES = {
    "task_start": RoundKey.TASK_START,
    "after_round": RoundKey.AFTER_ROUND,
    "task_end": RoundKey.TASK_END,
}


def stage_keys(method: Method, stage: When, key: PRNGKeyArray) -> list[tuple[int, PRNGKeyArray]]:
    """The method's rounds of a stage, by index, each with a key of its own."""
    first = jax.random.fold_in(key, _STAGES[stage]) if stage in _STAGES else key
    indices = [i for i, each in enumerate(method.rounds) if each.when == stage]
    further = [jax.random.fold_in(first, RoundKey.FURTHER_ROUNDS + n) for n in range(len(indices) - 1)]
    return list(zip(indices, [first, *further], strict=False))


def _exchange(
    engine: Engine, server: PyTree, states: PyTree, exchange: Exchange, section: Callable, clients: Clients
) -> tuple[PyTree, PyTree, RoundReport]:
    """One of the method's rounds: the broadcast, the clients, the server's step.

    The device has the server's step before the host waits for the clients, so that it goes from one to the
    other without the host.
    """
    player = engine.players[exchange.index]
    if not len(exchange.ids):
        return server, states, RoundReport({})
    with section("client"):
        context, key = engine.place((exchange.context, exchange.key))
        server = put_server(server, engine.mesh)
        states = put_shared(states, engine.mesh)
        broadcast = engine.broadcast(context, server)

        def serve(received: Accumulator) -> Served:
            if player.server is None:
                return Served(server, {}, False)
            return player.server(context._replace(previous=broadcast), server, received, key)

        played = clients(exchange._replace(context=context, broadcast=broadcast, key=key), states, serve)
        jax.block_until_ready(played.accumulator)  # to time the clients alone
    with section("server"):
        report = _reported(player.round, played, exchange.partition)
    return played.served.server, played.states, report


def _run_clients(
    engine: Engine, data: PyTree, guarded: bool, exchange: Exchange, states: PyTree, serve: Serve
) -> Played:
    """`Clients` that this engine runs itself; `data` and `guarded` as in `run_round`."""
    player = engine.players[exchange.index]
    context = exchange.context
    chunks, steps = plan_round(
        player.round.program,
        exchange.partition,
        exchange.ids,
        int(context.round),
        engine.lanes.count,
        player.capacity,
    )
    data = ready(data, engine.mesh)
    accumulator, states, served = run_chunks(engine, chunks, exchange, states, data, guarded, serve)
    return Played(accumulator, states, served, exchange.ids, steps)


def run_chunks(
    engine: Engine,
    chunks: list[Chunk],
    exchange: Exchange,
    states: PyTree,
    data: PyTree,
    guarded: bool = False,
    serve: Serve = no_server,
) -> tuple[Accumulator, PyTree, Served]:
    """What was received of the chunks' clients, the new client states, and `serve` of what was received;
    `states` are donated. All arrays are placed."""
    player = engine.players[exchange.index]
    context = exchange.context
    accumulator = player.empty()
    merged = 0
    while True:
        done = engine.place(np.int32(merged))
        earlier = deque()
        for i in range(merged, len(chunks)):
            if len(earlier) == AHEAD:
                jax.block_until_ready(earlier.popleft())
            call = Call(
                context.frozen, exchange.broadcast, chunks[i], context.task, exchange.key, np.bool_(guarded)
            )
            carry = _run_chunk(player, engine.lanes, call, accumulator, states, data)
            progress = Merging(done, np.int32(i), np.bool_(guarded))
            accumulator, states, done = player.close(accumulator, states, carry, chunks[i], progress)
            earlier.append(done)
        served = serve(accumulator)  # for nothing if a chunk turns out not to be merged
        # the first one that is not merged has a bad upload, which rarely comes alone
        merged = int(done)
        guarded = True
        if merged == len(chunks):
            return accumulator, states, served


def _run_chunk(
    player: Player, lanes: Lanes, call: Call, accumulator: Accumulator, states: PyTree, data: PyTree
) -> Carry:
    """All ticks of one chunk: what was received of its clients, and their states."""
    chunk = call.chunk
    nothing = np.zeros((len(chunk.id), 0), np.int32)
    carry = player.open(accumulator, states, chunk)
    indices = player.indices(chunk, call.key)
    may_replay = player.replay_indices(carry, chunk) if player.replay_indices else nothing
    if isinstance(data, Host):
        # each process reads those of all devices
        indices, may_replay = jax.device_get(put((indices, may_replay), player.mesh))
        return _over_host(player, lanes, call, carry, data, indices, may_replay)
    past = ReplayData(data, may_replay, may_replay)
    for run, mine, ticks in zip(player.run_ticks, indices, chunk.ticks, strict=True):
        carry = run(call, carry, TickWindow(data, mine, mine, np.int32(0), ticks), past, False)
    return carry


def _over_host(
    player: Player, lanes: Lanes, call: Call, carry: Carry, data: Host, indices: tuple, may_replay: np.ndarray
) -> Carry:
    """The ticks of one chunk over windows of host data, in the order of resident data. What its clients may
    replay is on the device as long as the chunk is run."""
    chunk = call.chunk
    mesh = player.mesh
    devices = device_count(player.mesh)
    past = _replayable(data, may_replay, mesh)
    sizes = [
        _window_ticks(data, phase, lanes, table, devices)
        for phase, table in zip(player.round.program.phases, chunk.tables, strict=True)
    ]
    windows = [(i, first) for i, step in enumerate(sizes) for first in range(0, int(chunk.ticks[i]), step)]

    def load(window):
        index, first = window
        part = indices[index][first : first + sizes[index]]
        part = np.pad(part, [(0, sizes[index] - len(part)), (0, 0), (0, 0)], constant_values=-1)
        each = part[0].size // devices  # examples of a tick for one device
        place = np.arange(len(part) * each, dtype=np.int32).reshape(-1, 1, each)
        place = np.repeat(place, devices, axis=1).reshape(part.shape)
        mine = np.maximum(part, 0).reshape(-1)[by_device(len(part), devices, each)]
        return data.take(mine, mesh, parted=True), put(part, mesh, split(1)), put(place, mesh, split(1))

    def step(carry, window, loaded):
        index, first = window
        ticks = np.int32(min(sizes[index], int(chunk.ticks[index]) - first))
        images, part, place = loaded
        window = TickWindow(images, part, place, np.int32(first), ticks)
        return player.run_ticks[index](call, carry, window, past, True)

    return over_windows(step, carry, windows, load, data.overlap)


def _replayable(data: Host, may_replay: np.ndarray, mesh: AnyMesh | None) -> ReplayData:
    """The examples that a chunk's clients may replay, on the device that runs them; one example where there
    are none, because arrays need one."""
    devices = device_count(mesh)
    each = np.arange(may_replay.size // devices, dtype=np.int32)  # examples on one device
    place = np.tile(each, devices).reshape(may_replay.shape)
    wanted = np.maximum(may_replay, 0).reshape(-1) if may_replay.size else np.zeros(devices, np.int32)
    index, place = (put(array, mesh, split()) for array in (may_replay, place))
    return ReplayData(data.take(wanted, mesh, parted=True), index, place)


def _window_ticks(data: Host, phase: Phase, lanes: Lanes, table: LaneTable, devices: int) -> int:
    """Ticks whose examples fit into the devices' windows: at least one, at most all that the table has."""
    return int(np.clip(devices * data.window // (lanes.count * phase.view.batch_size), 1, len(table.slot)))


# ---- one client alone --------------------------------------------------------------------------------------


def sending(method: Method) -> Method:
    """The method for a client alone: its uploads are kept as they are made, and never merged."""

    def alone(each: Round) -> Round:
        def finish(context: ClientContext, local: PyTree, state: PyTree) -> tuple[Upload, PyTree]:
            upload, state = each.program.finish(context, local, state)
            return Upload(gather=(upload.mean, upload.sum, upload.gather), weight=upload.weight), state

        return each._replace(
            program=each.program._replace(finish=finish, receive=None, claims=()), server=None
        )

    return method._replace(rounds=tuple(alone(each) for each in method.rounds))


class ClientResult(NamedTuple):
    """What a client made of a round."""

    upload: Upload  # what it sends; all zeros if that is not valid
    state: PyTree  # what it keeps; its old state if the upload is not valid
    metrics: tuple[Metrics, ...]  # of each phase
    valid: Array  # whether the upload is finite and of a weight that is not negative


def work_alone(engine: Engine, exchange: Exchange, state: PyTree, data: PyTree) -> ClientResult:
    """What one client does in one of the method's rounds, as it would be run among others.

    Args:
      engine: of `sending(method)`, with one lane and capacities of `alone`.
      exchange: the round, whose `ids` have this client alone.
      state: the client's own.
      data: as in `RoundInputs`.
    """
    player = engine.players[exchange.index]
    context = exchange.context
    program = player.round.program
    ids = exchange.ids
    (chunk,), _ = plan_round(program, exchange.partition, ids, int(context.round), 1, player.capacity)
    call = Call(context.frozen, exchange.broadcast, chunk, context.task, exchange.key, np.bool_(True))
    carry = _run_chunk(player, engine.lanes, call, player.empty(), expand(state), data)
    received = carry.accumulator
    mean, sum_, gather = squeeze(received.gather)
    upload = Upload(mean, sum_, gather, received.weight[0])
    return ClientResult(upload, squeeze(carry.states), received.metrics, received.valid[0])


def alone_capacity(capacity: Capacity) -> Capacity:
    """The capacity of an engine that runs one client at a time and knows no other: it cannot know how many
    examples the others have, so all batches are padded to the full size."""
    full = tuple(widths[-1:] for widths in capacity.widths)
    return capacity._replace(clients=1, participants=1, widths=full)


# ---- reports -----------------------------------------------------------------------------------------------


def _reported(each: Round, played: Played, partition: ClientPartition) -> RoundReport:
    """What an exchange's clients and server report, on the host, which waits for both."""
    received, _, (_, metrics, refused), ids, steps = played
    found = received.rejected, received.impossible, received.metrics, metrics, refused
    rejected, impossible, client_metrics, metrics, refused = jax.device_get(found)
    claims = zip(claims_of(each.program), impossible, strict=True)
    count = partition.count_of(ids)
    epochs = [phase.view.epochs for phase in each.program.phases]
    return RoundReport(
        metrics={name: _mean(value) for name, value in _added((*client_metrics, metrics)).items()},
        participants=int((count > 0).sum()),
        rejected=int(rejected),
        impossible={claim.name: int(times) for claim, times in claims if times},
        refused=int(refused),
        examples=int(count.sum()) * sum(epochs),
        training_examples=int(count.sum()) * max(epochs),
        useful_steps=steps[0],
        paid_steps=steps[1],
    )


def _together(method: Method, exchanges: dict[int, RoundReport], replayed: Replayed | None) -> RoundReport:
    """A round's report: participants and training examples are those of its first exchange, the rest is added
    up over all of them.

    A metric whose name an earlier exchange has taken gets a prefix, "after_round_1_loss"; those of the
    server's replay have "replay_".
    """
    found = list(exchanges.values()) or [RoundReport({})]
    metrics = {}
    for index, each in exchanges.items():
        own = f"{method.rounds[index].when}_{index}_"
        metrics |= {own + name if name in metrics else name: value for name, value in each.metrics.items()}
    if replayed:
        metrics |= {f"replay_{name}": _mean(value) for name, value in replayed.metrics.items()}
        metrics["replay_examples"] = float(replayed.examples)
    sent = (exchanges[i].participants if i in exchanges else 0 for i in range(len(method.rounds)))
    return RoundReport(
        metrics=metrics,
        participants=found[0].participants,
        rejected=sum(each.rejected for each in found),
        impossible=dict(sum((Counter(each.impossible) for each in found), Counter())),
        refused=sum(each.refused for each in found) + int(replayed is not None and replayed.refused),
        examples=sum(each.examples for each in found),
        training_examples=found[0].training_examples,
        useful_steps=sum(each.useful_steps for each in found),
        paid_steps=sum(each.paid_steps for each in found),
        uploads=tuple(sent),
    )


def _added(groups: tuple[Metrics, ...]) -> Metrics:
    """The metrics of phases and server, those of one name added up."""
    added = {}
    for name, value in (item for group in groups for item in group.items()):
        added[name] = jax.tree.map(np.add, added[name], value) if name in added else value
    return added


def _mean(value: Weighted) -> float:
    return float(value.total) / float(value.weight) if float(value.weight) else float("nan")


def _counted(traces: dict[str, int], name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def traced(*args):
        traces[name] = traces.get(name, 0) + 1
        return function(*args)

    return traced


def _serve(
    function: Callable,
    shapes: Shapes,
    participants: int,
    mesh: AnyMesh | None,
    round_context: RoundContext,
    server: PyTree,
    acc: Accumulator,
    key: PRNGKeyArray,
) -> Served:
    """The aggregate, then the method's server step. With no valid upload, or with a result that is not
    finite, the server keeps its state; the latter is reported as refused."""
    entries = in_order((acc.gather, acc.weight, acc.id, acc.valid), mesh)
    # on a mesh there are more, as many as a multiple of the devices
    gather, weight, ids, valid = jax.tree.map(lambda x: x[:participants], entries)
    total = jnp.sum(weight)
    mean = jax.tree.map(lambda x: x / jnp.where(total > 0, total, 1.0), acc.mean)
    mean = sum_value(mean, shapes.upload.mean)
    added = sum_value(acc.sum, shapes.upload.sum)
    aggregate = Aggregate(mean, added, gather, weight, ids, valid)
    new, metrics = function(round_context, server, aggregate, jax.random.fold_in(key, RoundKey.SERVER))
    new = jax.tree.map(jnp.asarray, new)
    anyone = jnp.any(valid & (weight > 0))
    refused = anyone & became_non_finite(new, server)
    return Served(one_of(anyone & ~refused, new, server), metrics, refused)
