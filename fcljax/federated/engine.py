"""The round engine: plans a round on the host (`schedule.py`), plays its clients in a compiled loop
(`sweep.py`), closes it on the server.

Every function is traced once for a whole run. Uploads are running sums and gathered buffers, so memory does
not grow with the clients that only send means and sums.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.data.streaming import Host, over_windows, ready
from fcljax.federated.check import Example, check_method
from fcljax.federated.client_loop import (
    Accumulator,
    Call,
    Carry,
    Fetch,
    Lanes,
    Past,
    Shapes,
    close_chunk,
    empty_accumulator,
    expand,
    in_window,
    is_sound,
    memories,
    open_chunk,
    over_devices,
    part_of_chunk,
    receive_sent,
    rows_of_ticks,
    select,
    squeeze,
    states_of_chunk,
    sweep,
)
from fcljax.federated.schedule import Capacity, Chunk, ClientPartition, Table, plan_round
from fcljax.federated.server_replay import (
    Replayed,
    Replayer,
    current_buffer,
    make_replayer,
    rehearse,
    spoiled,
)
from fcljax.federated.sums import sum_value
from fcljax.mesh import WHOLE, add_over_devices, by_device, on_each, put, size, split
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
    Task,
    Upload,
    Weighted,
    When,
)


def default_lanes(backend: str, clients: int) -> Lanes:
    """The lanes to use when none are asked for. On CPU one lane in a loop: on a ViT-Ti it is as fast as 4
    vmapped lanes and holds one client at a time, though small networks gain from 4 lanes
    (`experiments/bench_engine.py lanes`). Accelerators batch up to 8 clients, which has not been measured
    yet."""
    return Lanes(1, "loop") if backend == "cpu" else Lanes(min(8, clients), "vmap")


class RoundReport(NamedTuple):
    """Host-side summary of one round. `metrics` are means over rows; `rows` counts the rows read in all
    phases, `training_rows` those of the longest."""

    metrics: dict[str, float]
    participants: int  # of the first exchange
    rejected: int  # uploads that were left out: not finite, or of negative weight
    refused: int  # exchanges whose result was not finite, so that the server kept its state
    rows: int
    training_rows: int
    useful_steps: int
    paid_steps: int  # lanes times ticks: what the useful steps would have been without waiting
    uploads: tuple[int, ...]  # clients that took part in each of the method's rounds

    @property
    def slot_efficiency(self) -> float:
        """Useful steps over paid steps."""
        return self.useful_steps / max(self.paid_steps, 1)


class Player(NamedTuple):
    """The compiled functions of one of the method's rounds. `empty` makes an accumulator. `rows` says what
    every tick of a chunk reads and `memory` what its clients may recall; `open` and `close` frame the ticks,
    and `sweeps[phase]` plays those whose rows are in a window of the data, which is all of it where it is
    resident: so data on the host go through the same functions and get the same bits. On a mesh every device
    plays its lanes, on a carry [devices, ...], and `close` puts together what they received; `sound` says
    whether that is finite. `receive` takes an upload that was made elsewhere."""

    round: Round
    capacity: Capacity
    empty: Callable[[], Accumulator]
    rows: Callable[..., tuple[Array, ...]]
    memory: Callable[..., Array] | None
    open: Callable[..., Carry]
    sweeps: tuple[Callable[..., Carry], ...]
    sound: Callable[[Carry], Array]
    close: Callable[..., tuple[Accumulator, PyTree]]
    receive: Callable[..., tuple[Accumulator, Array]]
    server: Callable[..., tuple[PyTree, Metrics, Array]] | None
    mesh: Mesh | None


class Played(NamedTuple):
    """The clients' part of an exchange: what was received of them, the new client states, which clients took
    part, and the steps that the lanes took: useful ones, and those that they are busy or wait for."""

    accumulator: Accumulator
    states: PyTree
    ids: Int[np.ndarray, " n"]
    steps: tuple[int, int]


# (index of the method's round, turn, broadcast, states, roster, ids, the exchange's key) -> Played
Clients = Callable[
    [int, RoundContext, Broadcast, PyTree, ClientPartition, Int[np.ndarray, " n"], PRNGKeyArray], Played
]


class Engine(NamedTuple):
    """The compiled functions of one run. `traces` counts how often each was traced; it is 1 each after any
    number of rounds.

    `place` puts arrays where the engine works, a copy on every device of its mesh; it does nothing to arrays
    that are there already.
    """

    method: Method
    lanes: Lanes
    broadcast: Callable[..., Broadcast]
    players: tuple[Player, ...]  # in the order of method.rounds
    place: Callable[[PyTree], PyTree]
    traces: dict[str, int]
    mesh: Mesh | None
    replayer: Replayer | None = None


def make_engine(
    method: Method,
    fetch: Fetch,
    lanes: Lanes,
    capacities: tuple[Capacity, ...],
    example: Example,
    *,
    mesh: Mesh | None = None,
    shapes: tuple[Shapes, ...] | None = None,
) -> Engine:
    """Compile-once functions for all rounds of all tasks.

    Args:
      method: the method.
      fetch: reads rows of the data pytree: (data, rows[B], keys[B], augment) -> (image, label, query or
        None).
      lanes: how clients share the machine; with a mesh, `lanes.count` is the total over devices and must be a
        multiple of them.
      capacities: the run's static shapes (`schedule.capacities`), one for each of the method's rounds.
      example: parameters, data and a task, of which shapes and types count. Data may be a `Host`.
      mesh: devices under the axis name `clients`; None uses one device.
      shapes: what `check_method` says of these arguments, where it was asked already.

    Raises:
      InputError: naming a function of the method that does not keep to the protocol.
    """
    traces: dict[str, int] = {}
    shapes = shapes or check_method(method, fetch, example)

    def jit(name, function, spec=WHOLE, **options):
        return jit_on(_counted(traces, name, function), mesh, spec, **options)

    def player(index: int) -> Player:
        return _player(method, index, shapes[index], capacities[index], fetch, lanes, mesh, jit)

    return Engine(
        method,
        lanes,
        broadcast=jit("broadcast", method.broadcast),
        players=tuple(player(index) for index in range(len(method.rounds))),
        place=lambda tree: put(tree, mesh) if mesh else tree,
        traces=traces,
        mesh=mesh,
        replayer=make_replayer(method.server_replay, jit) if method.server_replay else None,
    )


def _player(
    method: Method,
    index: int,
    shapes: Shapes,
    capacity: Capacity,
    fetch: Fetch,
    lanes: Lanes,
    mesh: Mesh | None,
    jit: Callable,
) -> Player:
    each = method.rounds[index]
    program, name = each.program, f"{each.when} {index}"

    def empty():
        return empty_accumulator(shapes, capacity)

    def rows(chunk, key):
        return tuple(rows_of_ticks(phase, i, chunk, key) for i, phase in enumerate(program.phases))

    def memory(states, chunk):
        return memories(program, states_of_chunk(states, chunk, capacity), chunk)

    def open_(accumulator, states, chunk):
        part = part_of_chunk(accumulator, states, chunk, capacity)
        return ending(open_chunk(program, shapes, mine, *part, chunk))

    def play(i, call, carry, window, past, rows, places, first, ticks):
        locate, ticks = functools.partial(in_window, rows, places, first), (first, first + ticks)
        how = {"fetch": fetch, "lanes": mine, "widths": capacity.widths[i], "waits": lanes.count > 1}
        return ending(sweep(program, i, call, begun(carry), window, past, locate, ticks, **how))

    def window_sweep(i, *args):
        *args, parted = args
        images = split() if parted else WHOLE
        specs = (_by_lane(args[0]), split(), images, WHOLE, split(1), split(1), WHOLE, WHOLE)
        return on_each(functools.partial(play, i), mesh, specs, split())(*args)

    def sound(carry):
        mine = is_sound(begun(carry).accumulator)
        return ~add_over_devices(~mine, mesh) if mesh else mine

    def close(accumulator, states, carry, chunk):
        carry = over_devices(begun(carry), mesh) if mesh else carry
        return close_chunk(accumulator, states, carry, chunk, capacity)

    # a device's part of the carry has an axis of its own
    mine = lanes._replace(count=lanes.count // size(mesh))
    begun, ending = (squeeze, expand) if mesh else (lambda carry: carry,) * 2
    open_ = on_each(open_, mesh, (WHOLE, WHOLE, WHOLE), split())
    sound = on_each(sound, mesh, (split(),), WHOLE)
    close = on_each(close, mesh, (WHOLE, WHOLE, split(), WHOLE), WHOLE)
    serve = functools.partial(_serve, each.server, shapes) if each.server else None
    sweeps = [
        jit(f"{name} {i}", functools.partial(window_sweep, i), split(), donate_argnums=1, static_argnums=8)
        for i in range(len(program.phases))
    ]
    return Player(
        each,
        capacity,
        empty=jit(f"{name} empty", empty),
        rows=jit(f"{name} rows", rows),
        memory=jit(f"{name} memory", memory) if program.memory else None,
        open=jit(f"{name} open", open_, split()),
        sweeps=tuple(sweeps),
        sound=jit(f"{name} sound", sound),
        close=jit(f"{name} close", close, donate_argnums=(0, 1)),
        receive=jit(f"{name} receive", functools.partial(receive_sent, program)),
        server=jit(f"{name} server", serve) if serve else None,
        mesh=mesh,
    )


def _by_lane(call: Call) -> PyTree:
    """How the devices get a `Call`: as a whole, but for the tables, of which each has its lanes' columns."""
    whole, by_lane = jax.tree.map(lambda _: WHOLE, call), jax.tree.map(lambda _: split(1), call.chunk.tables)
    return whole._replace(chunk=whole.chunk._replace(tables=by_lane))


def init_clients(method: Method, server: PyTree, clients: int, key: PRNGKeyArray) -> PyTree:
    """States of all clients, stacked [K, ...] in the order of their ids; client i is keyed by fold_in(key,
    i)."""
    return client_states(method, server, jnp.arange(clients), key)


def client_states(method: Method, server: PyTree, ids: Int[Array, " n"], key: PRNGKeyArray) -> PyTree:
    """The first states of these clients, stacked [n, ...], of `init_clients`."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
    return _strong(jax.jit(jax.vmap(lambda k: method.init_client(k, server)))(keys))


def _strong(tree: PyTree) -> PyTree:
    """The same arrays without jax's mark that a Python number made them: arrays that lose it on their way
    through a round would have every function traced twice."""
    return jax.tree.map(lambda x: x.astype(x.dtype) if getattr(x, "weak_type", False) else x, tree)


def run_round(
    engine: Engine,
    frozen: PyTree,
    server: PyTree,
    states: PyTree,
    data: PyTree,
    partition: ClientPartition,
    ids: Int[np.ndarray, " n"],
    task: Task,
    round_: int,
    key: PRNGKeyArray,
    section: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    *,
    when: When = "round",
    last: bool = False,
    past: Sequence[ReplayBuffer] = (),
    clients: Clients | None = None,
    guarded: bool = False,
) -> tuple[PyTree, PyTree, RoundReport]:
    """One federated round: broadcast, the participants' programs, aggregation, the server's part, and its
    training on rows that it keeps; then what the method plays as "refresh".

    Args:
      engine: from `make_engine`.
      frozen: backbone parameters. On a mesh, `frozen` and `data` are best given as `engine.place` returns
        them: otherwise they are copied to its devices in every round.
      server: the server's state.
      states: all clients' states, stacked [K, ...]; donated.
      data: what `fetch` reads, on the device, or a `Host`; both give the same bits.
      roster: the rows that every client holds in this task.
      ids: sorted ids of the sampled participants; those without rows are absent and their state stays as it
        is.
      task: the current task.
      round_: the round within the task.
      key: of this run; the round's key is derived from (key, task, round).
      section: a context manager that is entered around the parts "client" and "server", to time them.
      when: which of the method's rounds to play: those of every round, or those before or after a task's.
      last: is this the last round of the task?
      past: rows that the server keeps of the tasks before, in their order, as `keep_task` gave them; for a
        method with a rehearsal.
      clients: who plays the clients' part, where that is not this engine: clients on other machines.
      guarded: look through every upload as it arrives. Otherwise what a chunk of clients has sent is looked
        at as a whole, and the chunk is played again, guarded, if it is not finite: the same bits, sooner,
        unless uploads are known to be bad.

    Returns:
      The new server state (the old one if no upload was finite, or if what came out is not), the new client
      states, and a report.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, task.index), round_)
    server, states = _strong((server, states))
    round_context = RoundContext.on_host(frozen, task, round_, last)
    clients = clients or functools.partial(_play_here, engine, data, guarded)
    reports, replayed = {}, None
    for stage in ("round", "refresh") if when == "round" else (when,):
        for index, own_key in _plays(engine.method, stage, key):
            wanted = ids if engine.players[index].round.who == "sampled" else np.flatnonzero(partition.count)
            server, states, reports[index] = _exchange(
                engine, index, round_context, server, states, partition, wanted, own_key, section, clients
            )
        if stage == "round" and engine.replayer:
            with section("server"):
                own_key = jax.random.fold_in(key, _REHEARSAL)
                round_context, server, own_key = engine.place((round_context, server, own_key))
                replayed = rehearse(engine.replayer, round_context, server, past, own_key, engine.place)
                server = replayed.server
    return server, states, _together(engine.method, reports, replayed)


def keep_task(engine: Engine, frozen: PyTree, server: PyTree, task: Task, round_: int) -> ReplayBuffer | None:
    """What the server keeps of a task that is over, on the host; None if the method keeps nothing.

    It is given back in the rounds of later tasks, as `past` of `run_round`.
    """
    if engine.replayer is None:
        return None
    round_context = RoundContext.on_host(frozen, task, round_, True)
    return current_buffer(engine.replayer, *engine.place((round_context, _strong(server))))


# What a stage's key is folded in from the round's; the stage "round" has the round's key itself. Of that key
# 0 is the server's, 2 the order of rows, 3 the clients' and 10 onwards those of further rounds of a stage.
_STAGES = {"refresh": 1, "opening": 4, "closing": 5}
_REHEARSAL = 6


def _plays(method: Method, stage: When, key: PRNGKeyArray) -> list[tuple[int, PRNGKeyArray]]:
    """The method's rounds of a stage, by number, each with a key of its own."""
    first = jax.random.fold_in(key, _STAGES[stage]) if stage in _STAGES else key
    mine = [i for i, each in enumerate(method.rounds) if each.when == stage]
    return [(i, first if n == 0 else jax.random.fold_in(first, 9 + n)) for n, i in enumerate(mine)]


class _Exchange(NamedTuple):
    """What one exchange reports, from which a round's report is made."""

    metrics: dict[str, float]
    participants: int
    rejected: int
    refused: int
    rows: int
    training_rows: int
    useful_steps: int
    paid_steps: int


def _exchange(
    engine: Engine,
    index: int,
    round_context: RoundContext,
    server: PyTree,
    states: PyTree,
    partition: ClientPartition,
    ids: Int[np.ndarray, " n"],
    key: PRNGKeyArray,
    section: Callable,
    clients: Clients,
) -> tuple[PyTree, PyTree, _Exchange]:
    """One of the method's rounds; `ids` take part."""
    player, ids = engine.players[index], ids[partition.count[ids] > 0]
    if not len(ids):
        return server, states, _Exchange({}, 0, 0, 0, 0, 0, 0, 0)
    with section("client"):
        round_context, server, states, key = engine.place((round_context, server, states, key))
        broadcast = engine.broadcast(round_context, server)
        played = clients(index, round_context, broadcast, states, partition, ids, key)
        jax.block_until_ready(played.accumulator)
    metrics, refused = {}, False
    if player.server:
        with section("server"):
            round_context, accumulator = round_context._replace(previous=broadcast), played.accumulator
            server, metrics, refused = jax.block_until_ready(
                player.server(round_context, server, accumulator, key)
            )
    return server, played.states, _reported(player.round, played, metrics, refused, partition)


def _play_here(
    engine: Engine,
    data: PyTree,
    guarded: bool,
    index: int,
    round_context: RoundContext,
    broadcast: Broadcast,
    states: PyTree,
    partition: ClientPartition,
    ids: Int[np.ndarray, " n"],
    key: PRNGKeyArray,
) -> Played:
    """Clients of one of the method's rounds that this engine plays; `data` and `guarded` as in
    `run_round`."""
    player, lanes = engine.players[index], engine.lanes
    chunks, steps = plan_round(
        player.round.program, partition, ids, int(round_context.round), lanes.count, player.capacity
    )
    data = ready(data, engine.mesh)
    accumulator, states = play_chunks(
        player, lanes, chunks, round_context.frozen, broadcast, states, data, round_context.task, key, guarded
    )
    return Played(accumulator, states, ids, steps)


def play_chunks(
    player: Player,
    lanes: Lanes,
    chunks: list[Chunk],
    frozen: PyTree,
    broadcast: Broadcast,
    states: PyTree,
    data: PyTree,
    task: Task,
    key: PRNGKeyArray,
    guarded: bool = False,
) -> tuple[Accumulator, PyTree]:
    """The clients' part of a round: what was received, and the new client states. The arguments are as in
    `run_round`, placed, with the round's key; `states` are donated."""
    accumulator = player.empty()
    for chunk in chunks:
        call = Call(frozen, broadcast, chunk, task, key, np.bool_(guarded))
        carry = _play_chunk(player, lanes, call, accumulator, states, data)
        if not guarded and not player.sound(carry):
            guarded = True  # from here on: who sends one such upload sends more
            call = call._replace(guarded=np.bool_(guarded))
            carry = _play_chunk(player, lanes, call, accumulator, states, data)
        accumulator, states = player.close(accumulator, states, carry, chunk)
    return accumulator, states


def _play_chunk(
    player: Player, lanes: Lanes, call: Call, accumulator: Accumulator, states: PyTree, data: PyTree
) -> Carry:
    """All ticks of one chunk: what was received of its clients, and their states."""
    chunk = call.chunk
    nothing = np.zeros((len(chunk.id), 0), np.int32)
    ids = player.memory(states, chunk) if player.memory else nothing
    carry, rows = player.open(accumulator, states, chunk), player.rows(chunk, call.key)
    if isinstance(data, Host):
        return _over_host(player, lanes, call, carry, data, jax.device_get(rows), jax.device_get(ids))
    past = Past(data, ids, ids)
    for play, mine, ticks in zip(player.sweeps, rows, chunk.ticks, strict=True):
        carry = play(call, carry, data, past, mine, mine, np.int32(0), ticks, False)
    return carry


# ---- one client alone --------------------------------------------------------------------------------------


def sending(method: Method) -> Method:
    """The method as one client alone plays it: its uploads are kept as they are made, and nobody merges
    them."""

    def alone(each: Round) -> Round:
        def finish(context: ClientContext, local: PyTree, state: PyTree) -> tuple[Upload, PyTree]:
            upload, state = each.program.finish(context, local, state)
            return Upload(gather=(upload.mean, upload.sum, upload.gather), weight=upload.weight), state

        return each._replace(program=each.program._replace(finish=finish, receive=None), server=None)

    return method._replace(rounds=tuple(alone(each) for each in method.rounds))


class Work(NamedTuple):
    """What a client made of a round. `valid`: is the upload finite and of a weight that is not negative? If
    not, it is all zeros, and the state is what it was."""

    upload: Upload
    state: PyTree
    metrics: tuple[Metrics, ...]  # per phase
    valid: Array


def work_alone(
    engine: Engine,
    index: int,
    round_context: RoundContext,
    broadcast: Broadcast,
    state: PyTree,
    data: PyTree,
    partition: ClientPartition,
    client: int,
    key: PRNGKeyArray,
) -> Work:
    """What one client does in one of the method's rounds, as it would be played among others.

    Args:
      engine: of `sending(method)`, with one lane and capacities of `alone`.
      index: of the method's round.
      turn: the task, the round and the frozen network.
      broadcast: what the server has sent.
      state: the client's own.
      data: as in `run_round`.
      roster: in which the client's rows are.
      client: its id.
      key: of the exchange, which all of its clients have.
    """
    player, ids = engine.players[index], np.array([client])
    (chunk,), _ = plan_round(
        player.round.program, partition, ids, int(round_context.round), 1, player.capacity
    )
    call = Call(round_context.frozen, broadcast, chunk, round_context.task, key, np.bool_(True))
    stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
    carry = _play_chunk(player, engine.lanes, call, player.empty(), stacked, data)
    received = carry.accumulator
    mean, sum_, gather = jax.tree.map(lambda x: x[0], received.gather)
    upload = Upload(mean, sum_, gather, received.weight[0])
    new = jax.tree.map(lambda x: x[0], carry.states)
    return Work(upload, new, received.metrics, received.valid[0])


def alone(capacity: Capacity) -> Capacity:
    """The capacity of an engine that plays one client at a time, and knows the state of no other; how many
    rows the others have it does not know either, so that all batches are padded to the full size."""
    full = tuple(widths[-1:] for widths in capacity.widths)
    return capacity._replace(clients=1, participants=1, widths=full)


def _over_host(player: Player, lanes: Lanes, call: Call, carry: Carry, data: Host, rows, ids) -> Carry:
    """The ticks of one chunk over windows of host data, in the order of resident data. What its clients may
    recall lies on the device as long as the chunk is played."""
    phases, chunk = player.round.program.phases, call.chunk
    past, mesh = _replayable(data, ids, player.mesh), player.mesh
    sizes = [
        _window_ticks(data, phase, lanes, table, size(mesh))
        for phase, table in zip(phases, chunk.tables, strict=True)
    ]
    windows = [(i, first) for i, size in enumerate(sizes) for first in range(0, int(chunk.ticks[i]), size)]

    def load(window):
        index, first = window
        part = rows[index][first : first + sizes[index]]
        part = np.pad(part, [(0, sizes[index] - len(part)), (0, 0), (0, 0)], constant_values=-1)
        each = part[0].size // size(mesh)  # rows of a tick for one device
        places = np.arange(len(part) * each, dtype=np.int32).reshape(-1, 1, each)
        places = np.repeat(places, size(mesh), axis=1).reshape(part.shape)
        mine = np.maximum(part, 0).reshape(-1)[by_device(len(part), size(mesh), each)]
        return data.take(mine, mesh, parted=True), put(part, mesh, split(1)), put(places, mesh, split(1))

    def step(carry, window, loaded):
        index, first = window
        ticks = np.int32(min(sizes[index], int(chunk.ticks[index]) - first))
        images, part, places = loaded
        return player.sweeps[index](call, carry, images, past, part, places, np.int32(first), ticks, True)

    return over_windows(step, carry, windows, load, data.overlap)


def _replayable(data: Host, ids: np.ndarray, mesh: Mesh | None) -> Past:
    """The rows that a chunk's clients may recall, on every device; one row where there are none, which keeps
    the arrays' shapes legal."""
    places = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
    wanted = np.maximum(ids, 0).reshape(-1) if ids.size else np.zeros(1, np.int32)
    return Past(data.take(wanted, mesh), put(ids, mesh), put(places, mesh))


def _window_ticks(data: Host, phase: Phase, lanes: Lanes, table: Table, devices: int) -> int:
    """Ticks whose rows fit into the devices' windows: at least one, at most all that the table has."""
    return int(np.clip(devices * data.window // (lanes.count * phase.view.batch_size), 1, len(table.slot)))


def _reported(each: Round, played: Played, server_metrics, refused, partition: ClientPartition) -> _Exchange:
    accumulator, _, ids, steps = played
    fetched = jax.device_get((accumulator.rejected, accumulator.metrics, server_metrics, refused))
    rejected, client_metrics, metrics, refused = fetched
    rows = int(partition.count[ids].sum())
    epochs = [phase.view.epochs for phase in each.program.phases]
    named = {name: _mean_value(value) for name, value in _added((*client_metrics, metrics)).items()}
    participants = int((partition.count[ids] > 0).sum())
    counts = (participants, int(rejected), int(refused), rows * sum(epochs), rows * max(epochs))
    return _Exchange(named, *counts, *steps)


def _together(method: Method, exchanges: dict[int, _Exchange], replayed: Replayed | None) -> RoundReport:
    """A round's report: participants and the rows of the longest phase are those of its first exchange, the
    rest is added up over all of them. Metrics are told apart: a name that an earlier exchange has taken gets
    its own in front, "refresh_1_loss"; those of the server's training have "rehearsal_" in front."""
    found = list(exchanges.values()) or [_Exchange({}, 0, 0, 0, 0, 0, 0, 0)]
    total, metrics = lambda field: sum(getattr(each, field) for each in found), {}
    for index, each in exchanges.items():
        own = f"{method.rounds[index].when}_{index}_"
        metrics |= {own + name if name in metrics else name: value for name, value in each.metrics.items()}
    if replayed:
        own = {name: _mean_value(value) for name, value in replayed.metrics.items()}
        metrics |= {f"rehearsal_{name}": value for name, value in own.items()}
        metrics["rehearsal_rows"] = float(replayed.rows)
    sent = (exchanges[i].participants if i in exchanges else 0 for i in range(len(method.rounds)))
    return RoundReport(
        metrics=metrics,
        participants=found[0].participants,
        rejected=total("rejected"),
        refused=total("refused") + int(replayed is not None and replayed.refused),
        rows=total("rows"),
        training_rows=found[0].training_rows,
        useful_steps=total("useful_steps"),
        paid_steps=total("paid_steps"),
        uploads=tuple(sent),
    )


def _added(groups: tuple[Metrics, ...]) -> Metrics:
    """Metrics that phases and the server report, those of one name added up."""
    added = {}
    for name, value in (item for group in groups for item in group.items()):
        added[name] = jax.tree.map(np.add, added[name], value) if name in added else value
    return added


def _mean_value(value: Weighted) -> float:
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
    round_context: RoundContext,
    server: PyTree,
    acc: Accumulator,
    key: PRNGKeyArray,
) -> tuple[PyTree, Metrics, Array]:
    """Close the round: the aggregate, then the method's server part. With no valid upload, or with a result
    that is not finite, the server's state stays; the latter is told."""
    total = jnp.sum(acc.weight)
    mean = jax.tree.map(lambda x: x / jnp.where(total > 0, total, 1.0), acc.mean)
    mean, added = sum_value(mean, shapes.upload.mean), sum_value(acc.sum, shapes.upload.sum)
    aggregate = Aggregate(mean, added, acc.gather, acc.weight, acc.id, acc.valid)
    new, metrics = function(round_context, server, aggregate, jax.random.fold_in(key, 0))
    new = jax.tree.map(jnp.asarray, new)
    anyone = jnp.any(acc.valid & (acc.weight > 0))
    refused = anyone & spoiled(new, server)
    return select(anyone & ~refused, new, server), metrics, refused
