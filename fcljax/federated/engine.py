"""The round engine: many clients' programs as one compiled loop, and their uploads as running sums and gathered buffers.

Lanes run side by side and each plays its clients back to back from a host-built table (`schedule.py`). A client's upload depends on
(seed, task, round, client id) and its own rows only: every draw is keyed that way, never by lane, device, slot or co-participants.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.aggregation import finite_guard
from fcljax.federated.schedule import Capacity, Chunk, Roster, Table, plan_round
from fcljax.streaming import Host, over_windows
from fcljax.types import Aggregate, Batch, Broadcast, ClientInfo, Method, Metrics, Phase, Program, PyTree, Task, Upload, Weighted

LANE_MODES = ("loop", "vmap", "unroll")

# fetch(data, rows[B], keys[B], augment) -> (image [B, ...], label [B], query [B, D] or None)
Fetch = Callable[[PyTree, Array, Array, bool], tuple[Array, Array, Array | None]]
# reduce(stacked [K, ...], weight[K], valid[K]) -> tree, for the `mean` channel
Reduce = Callable[[PyTree, Array, Array], PyTree]


class Lanes(NamedTuple):
    """How many clients run at a time, and how: `loop` (one after the other), `vmap` (batched) or `unroll` (a copy of the code each)."""

    count: int = 1
    mode: str = "loop"


def default_lanes(backend: str, clients: int) -> Lanes:
    """The lanes to use when none are asked for. On CPU one lane in a loop: on a ViT-Ti it is as fast as 4 vmapped lanes and holds
    one client at a time, though small networks gain from 4 lanes (`experiments/bench_engine.py lanes`). Accelerators batch up to 8
    clients, which has not been measured yet."""
    return Lanes(1, "loop") if backend == "cpu" else Lanes(min(8, clients), "vmap")


class Accumulator(NamedTuple):
    """What a round has received so far. P participants; `mean` holds sums of weight * leaf, or [P, ...] if a reduce rule gathers it."""

    mean: PyTree
    sum: PyTree
    gather: PyTree
    weight: Float[Array, " P"]
    id: Int[Array, " P"]
    valid: Bool[Array, " P"]
    rejected: Int[Array, ""]
    metrics: tuple[Metrics, ...]


class RoundReport(NamedTuple):
    """Host-side summary of one round. `metrics` are means over rows; `rows` counts the rows read in all phases."""

    metrics: dict[str, float]
    participants: int
    rejected: int
    rows: int
    first_phase_rows: int
    useful_steps: int
    paid_steps: int  # lanes times ticks: what the useful steps would have been without waiting

    @property
    def slot_efficiency(self) -> float:
        """Useful steps over paid steps."""
        return self.useful_steps / max(self.paid_steps, 1)


class Carry(NamedTuple):
    """What goes from tick to tick: the lanes' clients at work [L, ...], what was received, the states of the chunk's clients [S, ...]
    and which of them are new, and the clients [S, ...] that wait between phases."""

    local: PyTree
    accumulator: Accumulator
    states: PyTree
    written: Bool[Array, " S"]
    waiting: PyTree


class Player(NamedTuple):
    """A program's compiled functions. `empty` makes an accumulator. `rows` says what every tick of a chunk reads, `open` and `close` frame
    the ticks, and `sweeps[phase]` plays those whose rows are in a window of the data, which is all of it where it is resident: so data
    on the host go through the same functions and get the same bits. On a mesh, `whole` plays a chunk of clients at once."""

    empty: Callable[..., Accumulator]
    rows: Callable[..., tuple[Array, ...]]
    open: Callable[..., Carry]
    sweeps: tuple[Callable[..., Carry], ...]
    close: Callable[..., tuple[Accumulator, PyTree]]
    whole: Callable[..., tuple[Accumulator, PyTree]] | None


class Engine(NamedTuple):
    """The compiled functions of one run. `traces` counts how often each was traced; it is 1 each after any number of rounds.

    `place` puts arrays where the engine works, a copy on every device of its mesh; it does nothing to arrays that are there already.
    """

    method: Method
    lanes: Lanes
    capacity: Capacity
    refresh_capacity: Capacity | None
    broadcast: Callable[..., Broadcast]
    clients: Player
    refresh: Player | None
    server: Callable[..., tuple[PyTree, Metrics]]
    place: Callable[[PyTree], PyTree]
    traces: dict[str, int]
    devices: int


def over_lanes(function: Callable, lanes: int, mode: str) -> Callable:
    """`function` of one lane as a function of arguments stacked over `lanes`. All modes give the same numbers up to rounding."""
    if lanes == 1:
        return lambda *args: _expand(function(*_squeeze(args)))
    if mode == "vmap":
        return jax.vmap(function)
    if mode == "unroll":
        return lambda *args: _stack([function(*jax.tree.map(lambda x, i=i: x[i], args)) for i in range(lanes)])
    return lambda *args: jax.lax.map(lambda one: function(*one), args)


def make_engine(
    method: Method,
    fetch: Fetch,
    lanes: Lanes,
    capacity: Capacity,
    *,
    reduce: Reduce | None = None,
    refresh_capacity: Capacity | None = None,
    mesh: Mesh | None = None,
) -> Engine:
    """Compile-once functions for all rounds of all tasks.

    Args:
      method: the method.
      fetch: reads rows of the data pytree: (data, rows[B], keys[B], augment) -> (image, label, query or None).
      lanes: how clients share the machine; with a mesh, `lanes.count` is the total over devices and must be a multiple of them.
      capacity: the run's static shapes (`schedule.capacity`).
      reduce: a rule for the `mean` channel that needs all uploads at once, such as the coordinate median; None streams the
        sample-weighted mean in O(lanes) memory.
      refresh_capacity: shapes for `method.refresh`, if the method has one.
      mesh: devices under the axis name `clients`; None uses one device.
    """
    traces: dict[str, int] = {}

    def server(frozen, state, accumulator, task, key):
        return _serve(method, reduce, frozen, state, accumulator, task, key)

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    # Where an argument lies is part of its type, and outputs are the next call's arguments: to be traced once they lie everywhere.
    placed = functools.partial(jax.jit, out_shardings=everywhere) if everywhere else jax.jit

    def jit(name, function, **options):
        return placed(_counted(traces, name, function), **options)

    play = functools.partial(_player, fetch=fetch, lanes=lanes, mesh=mesh, jit=jit)
    return Engine(
        method, lanes, capacity, refresh_capacity,
        broadcast=jit("broadcast", method.broadcast),
        clients=play("clients", method.client, capacity=capacity, reduce=reduce),
        refresh=play("refresh", method.refresh, capacity=refresh_capacity, reduce=None) if method.refresh else None,
        server=jit("server", server),
        place=lambda tree: jax.device_put(tree, everywhere) if everywhere else tree,
        traces=traces,
        devices=1 if mesh is None else mesh.size,
    )  # fmt: skip


def _player(name: str, program: Program, *, fetch, lanes, capacity, reduce, mesh, jit) -> Player:
    static = dict(fetch=fetch, lanes=lanes, reduce=reduce)

    def empty(frozen, broadcast, states, data, chunk, task, key):
        first = jax.tree.map(lambda x: x[0], states)
        return _empty(program, capacity, reduce, frozen, broadcast, first, data, chunk, task, key, fetch)

    def rows(chunk, key):
        return tuple(_rows_of_ticks(phase, i, lanes, chunk, key) for i, phase in enumerate(program.phases))

    def open_(broadcast, accumulator, states, chunk, task):
        return _open(program, lanes, broadcast, *_part_of_chunk(accumulator, states, chunk, capacity), chunk, task)

    def sweep(index, frozen, broadcast, carry, window, rows, places, chunk, task, key, first, ticks):
        locate = functools.partial(_in_window, rows, places, first)
        return _sweep(program, index, frozen, broadcast, carry, window, locate, chunk, task, key, (first, first + ticks), **static)

    def close(accumulator, states, carry, chunk):
        return _close(accumulator, states, carry.accumulator, carry.states, carry.written, chunk, capacity)

    def whole(*args):
        return _play_on_mesh(program, *args, capacity=capacity, mesh=mesh, **static)

    sweeps = [jit(f"{name} {i}", functools.partial(sweep, i), donate_argnums=2) for i in range(len(program.phases))]
    return Player(
        empty=jit(f"{name} empty", empty), rows=jit(f"{name} rows", rows), open=jit(f"{name} open", open_), sweeps=tuple(sweeps),
        close=jit(f"{name} close", close, donate_argnums=(0, 1)), whole=mesh and jit(name, whole, donate_argnums=(2, 3)),
    )  # fmt: skip


def init_clients(method: Method, server: PyTree, clients: int, key: PRNGKeyArray) -> PyTree:
    """States of all clients, stacked [K, ...] in the order of their ids; client i is keyed by fold_in(key, i)."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(clients))
    return jax.jit(jax.vmap(lambda k: method.init_client(k, server)))(keys)


def run_round(
    engine: Engine,
    frozen: PyTree,
    server: PyTree,
    states: PyTree,
    data: PyTree,
    roster: Roster,
    ids: Int[np.ndarray, " n"],
    task: Task,
    round_: int,
    key: PRNGKeyArray,
    section: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> tuple[PyTree, PyTree, RoundReport]:
    """One federated round: broadcast, the participants' programs, aggregation, the server phase and, if there is one, the refresh.

    Args:
      engine: from `make_engine`.
      frozen: backbone parameters. On a mesh, `frozen` and `data` are best given as `engine.place` returns them: otherwise they are
        copied to its devices in every round.
      server: the server's state.
      states: all clients' states, stacked [K, ...]; donated.
      data: what `fetch` reads, on the device, or a `Host`; both give the same bits.
      roster: the rows that every client holds in this task.
      ids: sorted ids of the participants; those without rows are absent and their state stays as it is.
      task: the current task.
      round_: the round within the task.
      key: of this run; the round's key is derived from (key, task, round).
      section: a context manager that is entered around the parts "client" and "server", to time them.

    Returns:
      The new server state (the old one if no upload was finite), the new client states, and a report.

    Raises:
      InputError: if a `Host` is to serve an engine on several devices.
    """
    if isinstance(data, Host) and engine.devices > 1:
        raise InputError(f"devices: {engine.devices} devices need all images on each of them; nearest: 1, or a larger data_budget")
    key = jax.random.fold_in(jax.random.fold_in(key, task.index), round_)
    chunks, steps = plan_round(engine.method.client, roster, ids, round_, engine.lanes.count, engine.capacity)
    if not chunks:
        return server, states, RoundReport({}, 0, 0, 0, 0, 0, 0)
    with section("client"):
        frozen, server, states, task, key = engine.place((frozen, server, states, task, key))
        data = data if isinstance(data, Host) else engine.place(data)
        broadcast = engine.broadcast(server, task)
        accumulator, states = play_chunks(
            engine.clients, engine.method.client, engine.lanes, chunks, frozen, broadcast, states, data, task, key
        )
        jax.block_until_ready(accumulator)
    with section("server"):
        server, metrics = jax.block_until_ready(engine.server(frozen, server, accumulator, task, key))
    if engine.refresh is not None:
        with section("client"):
            states = jax.block_until_ready(_refresh(engine, frozen, server, states, data, roster, task, round_, key))
    return server, states, _report(engine, accumulator, metrics, roster, ids, steps)


def _refresh(engine, frozen, server, states, data, roster, task, round_, key):
    """Every client with rows runs the refresh program on the new broadcast."""
    everyone = np.arange(len(roster.count))
    chunks, _ = plan_round(engine.method.refresh, roster, everyone, round_, engine.lanes.count, engine.refresh_capacity)
    broadcast, again = engine.broadcast(server, task), jax.random.fold_in(key, 1)
    program = engine.method.refresh
    return play_chunks(engine.refresh, program, engine.lanes, chunks, frozen, broadcast, states, data, task, again)[1]


def play_chunks(
    player: Player, program: Program, lanes: Lanes, chunks: list[Chunk], frozen, broadcast: Broadcast, states, data, task: Task, key
) -> tuple[Accumulator, PyTree]:
    """The clients' part of a round: what was received, and the new client states. The arguments are as in `run_round`, placed, with
    the round's key; `states` are donated."""
    sample = data.take(np.zeros(1, np.int32)) if isinstance(data, Host) else data
    accumulator = player.empty(frozen, broadcast, states, sample, chunks[0], task, key)
    for chunk in chunks:
        if player.whole:
            accumulator, states = player.whole(frozen, broadcast, accumulator, states, data, chunk, task, key)
            continue
        carry, rows = player.open(broadcast, accumulator, states, chunk, task), player.rows(chunk, key)
        if isinstance(data, Host):
            carry = _over_host(player, program, lanes, frozen, broadcast, carry, data, jax.device_get(rows), chunk, task, key)
        else:
            for sweep, mine, ticks in zip(player.sweeps, rows, chunk.ticks, strict=True):
                carry = sweep(frozen, broadcast, carry, data, mine, mine, chunk, task, key, np.int32(0), ticks)
        accumulator, states = player.close(accumulator, states, carry, chunk)
    return accumulator, states


def _over_host(player: Player, program: Program, lanes: Lanes, frozen, broadcast, carry, data: Host, rows, chunk, task, key) -> Carry:
    """The ticks of one chunk over windows of host data, in the order of resident data."""
    sizes = [_window_ticks(data, phase, lanes, table) for phase, table in zip(program.phases, chunk.tables, strict=True)]
    windows = [(i, first) for i, size in enumerate(sizes) for first in range(0, int(chunk.ticks[i]), size)]

    def load(window):
        index, first = window
        part = rows[index][first : first + sizes[index]]
        part = np.pad(part, [(0, sizes[index] - len(part)), (0, 0), (0, 0)], constant_values=-1)
        places = np.arange(part.size, dtype=np.int32).reshape(part.shape)
        return data.take(np.maximum(part, 0).reshape(-1)), jax.device_put(part), jax.device_put(places)

    def step(carry, window, loaded):
        index, first = window
        ticks = np.int32(min(sizes[index], int(chunk.ticks[index]) - first))
        return player.sweeps[index](frozen, broadcast, carry, *loaded, chunk, task, key, np.int32(first), ticks)

    return over_windows(step, carry, windows, load, data.overlap)


def _window_ticks(data: Host, phase: Phase, lanes: Lanes, table: Table) -> int:
    """Ticks whose rows fit into a window: at least one, at most all that the table has room for."""
    return int(np.clip(data.rows // (lanes.count * phase.view.batch_size), 1, len(table.slot)))


def _report(engine, accumulator, server_metrics, roster, ids, steps) -> RoundReport:
    rejected, client_metrics, metrics = jax.device_get((accumulator.rejected, accumulator.metrics, server_metrics))
    rows = int(roster.count[ids].sum())
    epochs = [phase.view.epochs for phase in engine.method.client.phases]
    named = {name: _mean_value(value) for group in (*client_metrics, metrics) for name, value in group.items()}
    return RoundReport(named, int((roster.count[ids] > 0).sum()), int(rejected), rows * sum(epochs), rows * epochs[0], *steps)


def _countable(metric: Weighted, active: Array) -> Weighted:
    """The metric, or nothing where the lane is idle or the value is not finite: one diverging client does not hide the others' loss."""
    counts = active & jnp.isfinite(metric.total) & jnp.isfinite(metric.weight)
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), metric)


def _mean_value(value: Weighted) -> float:
    return float(value.total) / float(value.weight) if float(value.weight) else float("nan")


def _counted(traces: dict[str, int], name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def traced(*args):
        traces[name] = traces.get(name, 0) + 1
        return function(*args)

    return traced


# ---- what a round receives ---------------------------------------------------------------------------------------------------------


def _empty(program, capacity, reduce, frozen, broadcast, state, data, chunk, task, key, fetch) -> Accumulator:
    """An empty accumulator, with the shapes that the program's functions give."""
    info = ClientInfo(chunk.id[0], chunk.count[0], chunk.class_rows[0], chunk.round)
    local = jax.eval_shape(program.start, broadcast, state, task, info, key)
    upload, _ = jax.eval_shape(program.finish, broadcast, local, state, task, info)
    metrics = tuple(_metric_shapes(phase, fetch, frozen, broadcast, local, data, task, key) for phase in program.phases)
    p = capacity.participants
    return Accumulator(
        mean=_zeros(upload.mean, (p,) if reduce else ()),
        sum=_zeros(upload.sum),
        gather=_zeros(upload.gather, (p,)),
        weight=jnp.zeros(p),
        id=jnp.full(p, capacity.clients, jnp.int32),
        valid=jnp.zeros(p, bool),
        rejected=jnp.zeros((), jnp.int32),
        metrics=tuple(_zeros(m) for m in metrics),
    )


def _metric_shapes(phase: Phase, fetch, frozen, broadcast, local, data, task, key) -> Metrics:
    def metrics_of(frozen, broadcast, local, data, task, key):
        rows = jnp.zeros(phase.view.batch_size, jnp.int32)
        batch = _read(fetch, phase, data, rows, rows, rows == 0, key)
        return phase.step(frozen, broadcast, local, batch, task, key)[1]

    return jax.eval_shape(metrics_of, frozen, broadcast, local, data, task, key)


def _receive(acc: Accumulator, upload: Upload, chunk: Chunk, slot: Array, end: Array, reduce) -> tuple[Accumulator, Array]:
    """Add the uploads [L, ...] of the lanes whose client has just finished. Non-finite uploads, and ones of
    negative weight, get weight 0 and are counted."""
    weight, valid, rejected = finite_guard(upload, upload.weight, end)
    nowhere = acc.valid.shape[0]
    position = jnp.where(valid, chunk.position[slot], nowhere)
    write = functools.partial(jax.tree.map, lambda buffer, x: buffer.at[position].set(x, mode="drop"))
    mean = upload.mean if reduce else jax.tree.map(lambda x: x.astype(jnp.float32) * _align(weight, x), upload.mean)
    return acc._replace(
        mean=write(acc.mean, mean) if reduce else _add_valid(acc.mean, mean, valid),
        sum=_add_valid(acc.sum, upload.sum, valid),
        gather=write(acc.gather, upload.gather),
        weight=acc.weight.at[position].set(weight, mode="drop"),
        id=acc.id.at[position].set(chunk.id[slot], mode="drop"),
        valid=acc.valid.at[position].set(valid, mode="drop"),
        rejected=acc.rejected + rejected,
    ), valid


def _serve(method: Method, reduce, frozen, server, acc: Accumulator, task, key) -> tuple[PyTree, Metrics]:
    """Close the round: the aggregate, then the method's server phase. With no valid upload the server state stays."""
    if reduce:
        mean = reduce(acc.mean, acc.weight, acc.valid)
    else:
        total = jnp.sum(acc.weight)
        mean = jax.tree.map(lambda x: x / jnp.where(total > 0, total, 1.0), acc.mean)
    aggregate = Aggregate(mean, acc.sum, acc.gather, acc.weight, acc.id, acc.valid)
    new, metrics = method.server(frozen, server, aggregate, task, jax.random.fold_in(key, 0))
    return _select(jnp.any(acc.valid & (acc.weight > 0)), new, server), metrics


# ---- the compiled loop ---------------------------------------------------------------------------------------------------------------


def _part_of_chunk(accumulator, states, chunk: Chunk, capacity: Capacity) -> tuple[Accumulator, PyTree]:
    """An empty accumulator for what the chunk's clients send, and their states."""
    empty = jax.tree.map(jnp.zeros_like, accumulator)._replace(id=jnp.zeros_like(accumulator.id))
    return empty, jax.tree.map(lambda x: x[jnp.minimum(chunk.id, capacity.clients - 1)], states)


def _close(accumulator, states, received, mine, written, chunk: Chunk, capacity: Capacity) -> tuple[Accumulator, PyTree]:
    """What the chunk's clients sent and their new states, merged with everybody's."""
    there = jnp.where(written, chunk.id, capacity.clients)
    states = jax.tree.map(lambda all_, new: all_.at[there].set(new, mode="drop"), states, mine)
    merged = jax.tree.map(lambda a, b: a | b if a.dtype == bool else a + b, accumulator, received)
    return merged._replace(id=jnp.where(received.valid, received.id, accumulator.id)), states


def _play_on_mesh(program, frozen, broadcast, accumulator, states, data, chunk, task, key, *, fetch, lanes, capacity, reduce, mesh):
    """One chunk of clients with the lanes split over the mesh axis `clients`. Slots are played by exactly one device, so sums over devices
    only add zeros to what that device wrote."""
    share = lanes._replace(count=lanes.count // mesh.shape["clients"])

    def on_device(frozen, broadcast, empty, states, data, chunk, task, key):
        carry = _play_phases(
            program, frozen, broadcast, empty, states, data, chunk, task, key, fetch=fetch, lanes=share, reduce=reduce
        )
        new = jax.tree.map(lambda x: jnp.where(_align(carry.written, x), x, jnp.zeros_like(x)), carry.states)
        return jax.tree.map(_sum_devices, (carry.accumulator, new, carry.written))

    everywhere, by_lane = PartitionSpec(), PartitionSpec(None, "clients")
    empty, mine = _part_of_chunk(accumulator, states, chunk, capacity)
    args = (frozen, broadcast, empty, mine, data, chunk, task, key)
    specs = jax.tree.map(lambda _: everywhere, args)
    tables = jax.tree.map(lambda _: by_lane, chunk.tables)
    specs = (*specs[:5], specs[5]._replace(tables=tables), *specs[6:])
    spread = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
    return _close(accumulator, states, *spread(*args), chunk, capacity)


def _sum_devices(x: Array) -> Array:
    return jax.lax.psum(x.astype(jnp.int32), "clients") > 0 if x.dtype == bool else jax.lax.psum(x, "clients")


def _play_phases(program, frozen, broadcast, accumulator, states, data, chunk, task, key, *, fetch, lanes: Lanes, reduce):
    """Phases as successive sweeps over the chunk's clients and over resident data."""
    carry = _open(program, lanes, broadcast, accumulator, states, chunk, task)
    for index, phase in enumerate(program.phases):
        locate = functools.partial(_in_store, phase, chunk, _row_order(phase, index, chunk, key))
        ticks = (0, chunk.ticks[index])
        carry = _sweep(
            program, index, frozen, broadcast, carry, data, locate, chunk, task, key, ticks, fetch=fetch, lanes=lanes, reduce=reduce
        )
    return carry


def _open(program: Program, lanes: Lanes, broadcast, accumulator, states, chunk: Chunk, task) -> Carry:
    """Before the first tick of a chunk. Between phases a client's local state waits in a buffer [S, ...]."""
    slots = chunk.id.shape[0]
    one = jax.tree.map(lambda x: x[0], states)
    local = jax.eval_shape(program.start, broadcast, one, task, _info(chunk, 0), jax.random.key(0))
    waiting = _zeros(local, (slots,)) if len(program.phases) > 1 else ()
    return Carry(_zeros(local, (lanes.count,)), accumulator, states, jnp.zeros(slots, bool), waiting)


def _sweep(program: Program, index, frozen, broadcast, carry: Carry, data, locate, chunk, task, key, ticks, *,
           fetch, lanes, reduce) -> Carry:  # fmt: skip
    """Ticks [first, last) of one phase: at every tick each lane takes one step of the client that its table names.

    locate(tick, lane, slot, step) -> (row ids, mask, where `data` has these rows)
    """
    phase, table = program.phases[index], jax.tree.map(jnp.asarray, chunk.tables[index])
    is_first, is_last = index == 0, index == len(program.phases) - 1
    each = functools.partial(over_lanes, lanes=lanes.count, mode=lanes.mode)

    def begin(slot, start, locals_, states, waiting):
        if is_first:
            new = each(lambda s: program.start(broadcast, _at(states, s), task, _info(chunk, s), _client_key(key, chunk, s, 0)))(
                slot
            )
        else:
            new = jax.tree.map(lambda x: x[slot], waiting)
        return _select(start, new, locals_)

    def work(tick, lane, slot, step, active, local):
        key_ = jax.random.fold_in(_client_key(key, chunk, slot, 1 + index), step)
        rows, mask, place = locate(tick, lane, slot, step)
        batch = _read(fetch, phase, data, rows, place, mask, jax.random.fold_in(key_, 0))
        new, metrics = phase.step(frozen, broadcast, local, batch, task, jax.random.fold_in(key_, 1))
        return _select(active, new, local), {name: _countable(value, active) for name, value in metrics.items()}

    def finish(slot, end, locals_, accumulator, states, written, waiting):
        if not is_last:
            there = jnp.where(end, slot, chunk.id.shape[0])
            put = lambda buffer, x: buffer.at[there].set(x, mode="drop")
            return accumulator, states, written, jax.tree.map(put, waiting, locals_)
        done = each(lambda s, one: program.finish(broadcast, one, _at(states, s), task, _info(chunk, s)))
        upload, new = done(slot, locals_)
        upload = upload._replace(weight=jnp.broadcast_to(jnp.asarray(upload.weight, jnp.float32), slot.shape))
        accumulator, valid = _receive(accumulator, upload, chunk, slot, end, reduce)
        there = jnp.where(valid, slot, chunk.id.shape[0])
        states = jax.tree.map(lambda buffer, x: buffer.at[there].set(x, mode="drop"), states, new)
        return accumulator, states, written.at[there].set(True, mode="drop"), waiting

    def tick(i, carry: Carry):
        locals_, accumulator, states, written, waiting = carry
        slot, step, start, end, active = (column[i] for column in table)
        start, end, active = start > 0, end > 0, active > 0
        # Scalar predicates outside the lanes' vmap: a batched cond would become a select and run both branches at every tick.
        locals_ = jax.lax.cond(jnp.any(start), lambda: begin(slot, start, locals_, states, waiting), lambda: locals_)
        locals_, metrics = each(work)(jnp.full_like(slot, i), jnp.arange(lanes.count), slot, step, active, locals_)
        total = jax.tree.map(lambda a, m: a + jnp.sum(m, axis=0), accumulator.metrics[index], metrics)
        metrics = (*accumulator.metrics[:index], total, *accumulator.metrics[index + 1 :])
        accumulator = accumulator._replace(metrics=metrics)
        rest = jax.lax.cond(
            jnp.any(end),
            lambda: finish(slot, end, locals_, accumulator, states, written, waiting),
            lambda: (accumulator, states, written, waiting),
        )
        return Carry(locals_, *rest)

    # The trip count is data, so one trace serves rounds of any length.
    return jax.lax.fori_loop(*ticks, tick, carry)


def _in_store(phase: Phase, chunk: Chunk, order, tick, lane, slot, step):
    """The rows of a step in resident data, which holds all of them."""
    del tick, lane
    rows, mask = _batch_rows(phase, chunk, order, slot, step)
    return rows, mask, rows


def _in_window(rows, places, first, tick, lane, slot, step):
    """The rows of a step in a window: their ids, -1 for padding, and their places, both [ticks, L, B] from tick `first`."""
    del slot, step
    mine = rows[tick - first, lane]
    return mine, mine >= 0, places[tick - first, lane]


def _rows_of_ticks(phase: Phase, index: int, lanes: Lanes, chunk: Chunk, key) -> Int[Array, "ticks lanes B"]:
    """The row ids that every lane reads at every tick of a phase; -1 for padding."""
    table, order = chunk.tables[index], _row_order(phase, index, chunk, key)

    def cell(slot, step, active):
        rows, mask = _batch_rows(phase, chunk, order, slot, step)
        return jnp.where(mask & (active > 0), rows, -1)

    return jax.vmap(jax.vmap(cell))(*map(jnp.asarray, (table.slot, table.step, table.active)))


def _row_order(phase: Phase, index: int, chunk: Chunk, key) -> Int[Array, "epochs rows"]:
    """For every epoch, the positions in chunk.rows sorted by client and, within a client, by a uniform draw per training row.

    The draw belongs to the row (seed, task, round, phase, epoch, row), so a client's order does not depend on who else takes part.
    """
    position = jnp.arange(chunk.rows.shape[0], dtype=jnp.int32)

    def shuffled(epoch):
        draw_key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 2), index), epoch)
        draw = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(draw_key, row)))(chunk.rows)
        return jax.lax.sort((chunk.slot_of_row, draw, position), num_keys=2)[2]

    if not phase.view.shuffle:
        return jnp.broadcast_to(position, (phase.view.epochs, position.shape[0]))
    return jax.lax.map(shuffled, jnp.arange(phase.view.epochs))


def _batch_rows(phase: Phase, chunk: Chunk, order, slot, step) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Training rows of a client's step, and which of them are real: the last batch of an epoch may be partial."""
    size, count = phase.view.batch_size, chunk.count[slot]
    per_epoch = jnp.maximum(-(-count // size), 1)
    within = (step % per_epoch) * size + jnp.arange(size, dtype=jnp.int32)
    mask = within < count
    position = order[step // per_epoch, jnp.where(mask, chunk.offset[slot] + within, 0)]
    return chunk.rows[position], mask


def _read(fetch: Fetch, phase: Phase, data, rows, place, mask, key) -> Batch:
    """A batch whose padding rows are zeros whatever the data holds there."""
    keys = jax.random.split(key, rows.shape[0])
    image, label, query = fetch(data, jnp.where(mask, place, 0), keys, phase.view.augment)
    clear = lambda x: jnp.where(_align(mask, x), x, jnp.zeros_like(x))
    return Batch(clear(image), clear(label), mask, jnp.where(mask, rows, -1), None if query is None else clear(query))


def _client_key(key, chunk: Chunk, slot, purpose: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 3), chunk.id[slot]), purpose)


def _info(chunk: Chunk, slot) -> ClientInfo:
    return ClientInfo(chunk.id[slot], chunk.count[slot], chunk.class_rows[slot], chunk.round)


# ---- pytrees -----------------------------------------------------------------------------------------------------------------------


def _at(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _zeros(shapes: PyTree, lead: tuple[int, ...] = ()) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), shapes)


def _align(mask: Array, x: Array) -> Array:
    """`mask` with trailing axes of size 1 so that it broadcasts against x from the left."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def _select(mask: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(_align(mask, a), a, b), new, old)


def _add_valid(total: PyTree, new: PyTree, valid: Array) -> PyTree:
    """Sum over lanes of the valid rows: selected, not multiplied, since 0 * nan is nan."""
    return jax.tree.map(lambda t, x: t + jnp.sum(jnp.where(_align(valid, x), x, 0), axis=0, dtype=t.dtype), total, new)


def _squeeze(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _expand(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
