"""The round engine: plans a round on the host (`schedule.py`), plays its clients in a compiled loop
(`sweep.py`), closes it on the server.

Every function is traced once for a whole run. Uploads are running sums and gathered buffers, so memory does
not grow with the clients that only send means and sums.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.data.streaming import Host, over_windows
from fcljax.errors import InputError
from fcljax.federated.schedule import Capacity, Chunk, Roster, Table, plan_round
from fcljax.federated.sweep import (
    Accumulator,
    Carry,
    Fetch,
    Lanes,
    Reduce,
    close_chunk,
    empty_accumulator,
    in_window,
    open_chunk,
    part_of_chunk,
    play_on_mesh,
    rows_of_ticks,
    select,
    sweep,
)
from fcljax.types import Aggregate, Broadcast, Extra, Method, Metrics, Phase, Program, PyTree, Task, Weighted


def default_lanes(backend: str, clients: int) -> Lanes:
    """The lanes to use when none are asked for. On CPU one lane in a loop: on a ViT-Ti it is as fast as 4
    vmapped lanes and holds one client at a time, though small networks gain from 4 lanes
    (`experiments/bench_engine.py lanes`). Accelerators batch up to 8 clients, which has not been measured
    yet."""
    return Lanes(1, "loop") if backend == "cpu" else Lanes(min(8, clients), "vmap")


class RoundReport(NamedTuple):
    """Host-side summary of one round. `metrics` are means over rows; `rows` counts the rows read in all
    phases."""

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


class Player(NamedTuple):
    """A program's compiled functions. `empty` makes an accumulator. `rows` says what every tick of a chunk
    reads, `open` and `close` frame the ticks, and `sweeps[phase]` plays those whose rows are in a window of
    the data, which is all of it where it is resident: so data on the host go through the same functions and
      get the same bits. On a mesh, `whole` plays a chunk of clients at once."""

    empty: Callable[..., Accumulator]
    rows: Callable[..., tuple[Array, ...]]
    open: Callable[..., Carry]
    sweeps: tuple[Callable[..., Carry], ...]
    close: Callable[..., tuple[Accumulator, PyTree]]
    whole: Callable[..., tuple[Accumulator, PyTree]] | None


class Engine(NamedTuple):
    """The compiled functions of one run. `traces` counts how often each was traced; it is 1 each after any
    number of rounds.

    `place` puts arrays where the engine works, a copy on every device of its mesh; it does nothing to arrays
    that are there already.
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
      fetch: reads rows of the data pytree: (data, rows[B], keys[B], augment) -> (image, label, query or
        None).
      lanes: how clients share the machine; with a mesh, `lanes.count` is the total over devices and must be a
        multiple of them.
      capacity: the run's static shapes (`schedule.capacity`).
      reduce: a rule for the `mean` channel that needs all uploads at once, such as the coordinate median;
        None streams the sample-weighted mean in O(lanes) memory.
      refresh_capacity: shapes for `method.refresh`, if the method has one.
      mesh: devices under the axis name `clients`; None uses one device.
    """
    traces: dict[str, int] = {}

    def server(frozen, state, accumulator, task, key):
        return _serve(method, reduce, frozen, state, accumulator, task, key)

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    # Where an argument lies is part of its type, and outputs are the next call's arguments: to be traced once
    # they lie everywhere.
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
        return empty_accumulator(
            program, capacity, reduce, frozen, broadcast, first, data, chunk, task, key, fetch
        )

    def rows(chunk, key):
        return tuple(rows_of_ticks(phase, i, lanes, chunk, key) for i, phase in enumerate(program.phases))

    def open_(broadcast, accumulator, states, chunk, task):
        return open_chunk(
            program, lanes, broadcast, *part_of_chunk(accumulator, states, chunk, capacity), chunk, task
        )

    def window_sweep(index, frozen, broadcast, carry, window, rows, places, chunk, task, key, first, ticks):
        locate = functools.partial(in_window, rows, places, first)
        return sweep(
            program,
            index,
            frozen,
            broadcast,
            carry,
            window,
            locate,
            chunk,
            task,
            key,
            (first, first + ticks),
            **static,
        )

    def close(accumulator, states, carry, chunk):
        return close_chunk(
            accumulator, states, carry.accumulator, carry.states, carry.written, chunk, capacity
        )

    def whole(*args):
        return play_on_mesh(program, *args, capacity=capacity, mesh=mesh, **static)

    sweeps = [
        jit(f"{name} {i}", functools.partial(window_sweep, i), donate_argnums=2)
        for i in range(len(program.phases))
    ]
    return Player(
        empty=jit(f"{name} empty", empty), rows=jit(f"{name} rows", rows), open=jit(f"{name} open", open_), sweeps=tuple(sweeps),
        close=jit(f"{name} close", close, donate_argnums=(0, 1)), whole=mesh and jit(name, whole, donate_argnums=(2, 3)),
    )  # fmt: skip


def extra_method(method: Method, extra: Extra) -> Method:
    """The method whose rounds are an extra round of `method`: for an engine of its own."""
    return method._replace(client=extra.client, server=extra.server, refresh=None)


def init_clients(method: Method, server: PyTree, clients: int, key: PRNGKeyArray) -> PyTree:
    """States of all clients, stacked [K, ...] in the order of their ids; client i is keyed by fold_in(key,
    i)."""
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
    """One federated round: broadcast, the participants' programs, aggregation, the server phase and, if there
    is one, the refresh.

    Args:
      engine: from `make_engine`.
      frozen: backbone parameters. On a mesh, `frozen` and `data` are best given as `engine.place` returns
        them: otherwise they are copied to its devices in every round.
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
        raise InputError(
            f"devices: {engine.devices} devices need all images on each of them; nearest: 1, or a larger data_budget"
        )
    key = jax.random.fold_in(jax.random.fold_in(key, task.index), round_)
    chunks, steps = plan_round(engine.method.client, roster, ids, round_, engine.lanes.count, engine.capacity)
    if not chunks:
        return server, states, RoundReport({}, 0, 0, 0, 0, 0, 0)
    with section("client"):
        frozen, server, states, task, key = engine.place((frozen, server, states, task, key))
        data = data if isinstance(data, Host) else engine.place(data)
        broadcast = engine.broadcast(server, task)
        accumulator, states = play_chunks(
            engine.clients,
            engine.method.client,
            engine.lanes,
            chunks,
            frozen,
            broadcast,
            states,
            data,
            task,
            key,
        )
        jax.block_until_ready(accumulator)
    with section("server"):
        server, metrics = jax.block_until_ready(engine.server(frozen, server, accumulator, task, key))
    if engine.refresh is not None:
        with section("client"):
            states = jax.block_until_ready(
                _refresh(engine, frozen, server, states, data, roster, task, round_, key)
            )
    return server, states, _report(engine, accumulator, metrics, roster, ids, steps)


def _refresh(engine, frozen, server, states, data, roster, task, round_, key):
    """Every client with rows runs the refresh program on the new broadcast."""
    everyone = np.arange(len(roster.count))
    chunks, _ = plan_round(
        engine.method.refresh, roster, everyone, round_, engine.lanes.count, engine.refresh_capacity
    )
    broadcast, again = engine.broadcast(server, task), jax.random.fold_in(key, 1)
    program = engine.method.refresh
    return play_chunks(
        engine.refresh, program, engine.lanes, chunks, frozen, broadcast, states, data, task, again
    )[1]


def play_chunks(
    player: Player,
    program: Program,
    lanes: Lanes,
    chunks: list[Chunk],
    frozen,
    broadcast: Broadcast,
    states,
    data,
    task: Task,
    key,
) -> tuple[Accumulator, PyTree]:
    """The clients' part of a round: what was received, and the new client states. The arguments are as in
    `run_round`, placed, with the round's key; `states` are donated."""
    sample = data.take(np.zeros(1, np.int32)) if isinstance(data, Host) else data
    accumulator = player.empty(frozen, broadcast, states, sample, chunks[0], task, key)
    for chunk in chunks:
        if player.whole:
            accumulator, states = player.whole(frozen, broadcast, accumulator, states, data, chunk, task, key)
            continue
        carry, rows = player.open(broadcast, accumulator, states, chunk, task), player.rows(chunk, key)
        if isinstance(data, Host):
            carry = _over_host(
                player, program, lanes, frozen, broadcast, carry, data, jax.device_get(rows), chunk, task, key
            )
        else:
            for play, mine, ticks in zip(player.sweeps, rows, chunk.ticks, strict=True):
                carry = play(frozen, broadcast, carry, data, mine, mine, chunk, task, key, np.int32(0), ticks)
        accumulator, states = player.close(accumulator, states, carry, chunk)
    return accumulator, states


def _over_host(
    player: Player,
    program: Program,
    lanes: Lanes,
    frozen,
    broadcast,
    carry,
    data: Host,
    rows,
    chunk,
    task,
    key,
) -> Carry:
    """The ticks of one chunk over windows of host data, in the order of resident data."""
    sizes = [
        _window_ticks(data, phase, lanes, table)
        for phase, table in zip(program.phases, chunk.tables, strict=True)
    ]
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
        return player.sweeps[index](
            frozen, broadcast, carry, *loaded, chunk, task, key, np.int32(first), ticks
        )

    return over_windows(step, carry, windows, load, data.overlap)


def _window_ticks(data: Host, phase: Phase, lanes: Lanes, table: Table) -> int:
    """Ticks whose rows fit into a window: at least one, at most all that the table has room for."""
    return int(np.clip(data.rows // (lanes.count * phase.view.batch_size), 1, len(table.slot)))


def _report(engine, accumulator, server_metrics, roster, ids, steps) -> RoundReport:
    rejected, client_metrics, metrics = jax.device_get(
        (accumulator.rejected, accumulator.metrics, server_metrics)
    )
    rows = int(roster.count[ids].sum())
    epochs = [phase.view.epochs for phase in engine.method.client.phases]
    named = {
        name: _mean_value(value) for group in (*client_metrics, metrics) for name, value in group.items()
    }
    return RoundReport(
        named, int((roster.count[ids] > 0).sum()), int(rejected), rows * sum(epochs), rows * epochs[0], *steps
    )


def _mean_value(value: Weighted) -> float:
    return float(value.total) / float(value.weight) if float(value.weight) else float("nan")


def _counted(traces: dict[str, int], name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def traced(*args):
        traces[name] = traces.get(name, 0) + 1
        return function(*args)

    return traced


def _serve(method: Method, reduce, frozen, server, acc: Accumulator, task, key) -> tuple[PyTree, Metrics]:
    """Close the round: the aggregate, then the method's server phase. With no valid upload the server state
    stays."""
    if reduce:
        mean = reduce(acc.mean, acc.weight, acc.valid)
    else:
        total = jnp.sum(acc.weight)
        mean = jax.tree.map(lambda x: x / jnp.where(total > 0, total, 1.0), acc.mean)
    aggregate = Aggregate(mean, acc.sum, acc.gather, acc.weight, acc.id, acc.valid)
    new, metrics = method.server(frozen, server, aggregate, task, jax.random.fold_in(key, 0))
    return select(jnp.any(acc.valid & (acc.weight > 0)), new, server), metrics
