"""The compiled loop of a round: lanes that play clients tick by tick, and what is received of them.

Everything here runs inside jit; `engine.py` compiles it and feeds it. Lanes run side by side and each plays
its clients back to back from a host-built table. A client's upload depends on (seed, task, round, client id)
and its own rows only: every draw is keyed that way, never by lane, device, slot or co-participants.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.federated.aggregation import finite_guard
from fcljax.federated.schedule import Capacity, Chunk
from fcljax.types import Batch, ClientInfo, Metrics, Phase, Program, PyTree, Upload, Weighted

# fetch(data, rows[B], keys[B], augment) -> (image [B, ...], label [B], query [B, D] or None)
Fetch = Callable[[PyTree, Array, Array, bool], tuple[Array, Array, Array | None]]
# reduce(stacked [K, ...], weight[K], valid[K]) -> tree, for the `mean` channel
Reduce = Callable[[PyTree, Array, Array], PyTree]


class Lanes(NamedTuple):
    """How many clients run at a time, and how: `loop` (one after the other), `vmap` (batched) or `unroll` (a
    copy of the code each)."""

    count: int = 1
    mode: str = "loop"


class Accumulator(NamedTuple):
    """What a round has received so far. P participants; `mean` holds sums of weight * leaf, or [P, ...] if a
    reduce rule gathers it."""

    mean: PyTree
    sum: PyTree
    gather: PyTree
    weight: Float[Array, " P"]
    id: Int[Array, " P"]
    valid: Bool[Array, " P"]
    rejected: Int[Array, ""]
    metrics: tuple[Metrics, ...]


class Carry(NamedTuple):
    """What goes from tick to tick: the lanes' clients at work [L, ...], what was received, the states of the
    chunk's clients [S, ...] and which of them are new, and the clients [S, ...] that wait between phases."""

    local: PyTree
    accumulator: Accumulator
    states: PyTree
    written: Bool[Array, " S"]
    waiting: PyTree


def over_lanes(function: Callable, lanes: int, mode: str) -> Callable:
    """`function` of one lane as a function of arguments stacked over `lanes`. All modes give the same numbers
    up to rounding."""
    if lanes == 1:
        return lambda *args: _expand(function(*_squeeze(args)))
    if mode == "vmap":
        return jax.vmap(function)
    if mode == "unroll":
        return lambda *args: _stack(
            [function(*jax.tree.map(lambda x, i=i: x[i], args)) for i in range(lanes)]
        )
    return lambda *args: jax.lax.map(lambda one: function(*one), args)


def _countable(metric: Weighted, active: Array) -> Weighted:
    """The metric, or nothing where the lane is idle or the value is not finite: one diverging client does not
    hide the others' loss."""
    counts = active & jnp.isfinite(metric.total) & jnp.isfinite(metric.weight)
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), metric)


# ---- what a round receives ---------------------------------------------------------------------------------


def empty_accumulator(
    program, capacity, reduce, frozen, broadcast, state, data, chunk, task, key, fetch
) -> Accumulator:
    """An empty accumulator, with the shapes that the program's functions give."""
    info = ClientInfo(chunk.id[0], chunk.count[0], chunk.class_rows[0], chunk.round)
    local = jax.eval_shape(program.start, broadcast, state, task, info, key)
    upload, _ = jax.eval_shape(program.finish, broadcast, local, state, task, info)
    metrics = tuple(
        _metric_shapes(phase, fetch, frozen, broadcast, local, data, task, key) for phase in program.phases
    )
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


def _receive(
    acc: Accumulator, upload: Upload, chunk: Chunk, slot: Array, end: Array, reduce
) -> tuple[Accumulator, Array]:
    """Add the uploads [L, ...] of the lanes whose client has just finished. Non-finite uploads, and ones of
    negative weight, get weight 0 and are counted."""
    weight, valid, rejected = finite_guard(upload, upload.weight, end)
    nowhere = acc.valid.shape[0]
    position = jnp.where(valid, chunk.position[slot], nowhere)
    write = functools.partial(jax.tree.map, lambda buffer, x: buffer.at[position].set(x, mode="drop"))
    mean = (
        upload.mean
        if reduce
        else jax.tree.map(lambda x: x.astype(jnp.float32) * _align(weight, x), upload.mean)
    )
    return acc._replace(
        mean=write(acc.mean, mean) if reduce else _add_valid(acc.mean, mean, valid),
        sum=_add_valid(acc.sum, upload.sum, valid),
        gather=write(acc.gather, upload.gather),
        weight=acc.weight.at[position].set(weight, mode="drop"),
        id=acc.id.at[position].set(chunk.id[slot], mode="drop"),
        valid=acc.valid.at[position].set(valid, mode="drop"),
        rejected=acc.rejected + rejected,
    ), valid


# ---- the compiled loop -------------------------------------------------------------------------------------


def part_of_chunk(accumulator, states, chunk: Chunk, capacity: Capacity) -> tuple[Accumulator, PyTree]:
    """An empty accumulator for what the chunk's clients send, and their states."""
    empty = jax.tree.map(jnp.zeros_like, accumulator)._replace(id=jnp.zeros_like(accumulator.id))
    return empty, jax.tree.map(lambda x: x[jnp.minimum(chunk.id, capacity.clients - 1)], states)


def close_chunk(
    accumulator, states, received, mine, written, chunk: Chunk, capacity: Capacity
) -> tuple[Accumulator, PyTree]:
    """What the chunk's clients sent and their new states, merged with everybody's."""
    there = jnp.where(written, chunk.id, capacity.clients)
    states = jax.tree.map(lambda all_, new: all_.at[there].set(new, mode="drop"), states, mine)
    merged = jax.tree.map(lambda a, b: a | b if a.dtype == bool else a + b, accumulator, received)
    return merged._replace(id=jnp.where(received.valid, received.id, accumulator.id)), states


def play_on_mesh(
    program,
    frozen,
    broadcast,
    accumulator,
    states,
    data,
    chunk,
    task,
    key,
    *,
    fetch,
    lanes,
    capacity,
    reduce,
    mesh,
):
    """One chunk of clients with the lanes split over the mesh axis `clients`. Slots are played by exactly one
    device, so sums over devices only add zeros to what that device wrote."""
    share = lanes._replace(count=lanes.count // mesh.shape["clients"])

    def on_device(frozen, broadcast, empty, states, data, chunk, task, key):
        carry = _play_phases(
            program,
            frozen,
            broadcast,
            empty,
            states,
            data,
            chunk,
            task,
            key,
            fetch=fetch,
            lanes=share,
            reduce=reduce,
        )
        new = jax.tree.map(lambda x: jnp.where(_align(carry.written, x), x, jnp.zeros_like(x)), carry.states)
        return jax.tree.map(_sum_devices, (carry.accumulator, new, carry.written))

    everywhere, by_lane = PartitionSpec(), PartitionSpec(None, "clients")
    empty, mine = part_of_chunk(accumulator, states, chunk, capacity)
    args = (frozen, broadcast, empty, mine, data, chunk, task, key)
    specs = jax.tree.map(lambda _: everywhere, args)
    tables = jax.tree.map(lambda _: by_lane, chunk.tables)
    specs = (*specs[:5], specs[5]._replace(tables=tables), *specs[6:])
    spread = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
    return close_chunk(accumulator, states, *spread(*args), chunk, capacity)


def _sum_devices(x: Array) -> Array:
    return jax.lax.psum(x.astype(jnp.int32), "clients") > 0 if x.dtype == bool else jax.lax.psum(x, "clients")


def _play_phases(
    program, frozen, broadcast, accumulator, states, data, chunk, task, key, *, fetch, lanes: Lanes, reduce
):
    """Phases as successive sweeps over the chunk's clients and over resident data."""
    carry = open_chunk(program, lanes, broadcast, accumulator, states, chunk, task)
    for index, phase in enumerate(program.phases):
        locate = functools.partial(_in_store, phase, chunk, _row_order(phase, index, chunk, key))
        ticks = (0, chunk.ticks[index])
        carry = sweep(
            program,
            index,
            frozen,
            broadcast,
            carry,
            data,
            locate,
            chunk,
            task,
            key,
            ticks,
            fetch=fetch,
            lanes=lanes,
            reduce=reduce,
        )
    return carry


def open_chunk(program: Program, lanes: Lanes, broadcast, accumulator, states, chunk: Chunk, task) -> Carry:
    """Before the first tick of a chunk. Between phases a client's local state waits in a buffer [S, ...]."""
    slots = chunk.id.shape[0]
    one = jax.tree.map(lambda x: x[0], states)
    local = jax.eval_shape(program.start, broadcast, one, task, _info(chunk, 0), jax.random.key(0))
    waiting = _zeros(local, (slots,)) if len(program.phases) > 1 else ()
    return Carry(_zeros(local, (lanes.count,)), accumulator, states, jnp.zeros(slots, bool), waiting)


def sweep(program: Program, index, frozen, broadcast, carry: Carry, data, locate, chunk, task, key, ticks, *,
           fetch, lanes, reduce) -> Carry:  # fmt: skip
    """Ticks [first, last) of one phase: at every tick each lane takes one step of the client that its table
    names.

    locate(tick, lane, slot, step) -> (row ids, mask, where `data` has these rows)
    """
    phase, table = program.phases[index], jax.tree.map(jnp.asarray, chunk.tables[index])
    is_first, is_last = index == 0, index == len(program.phases) - 1
    each = functools.partial(over_lanes, lanes=lanes.count, mode=lanes.mode)

    def begin(slot, start, locals_, states, waiting):
        if is_first:
            new = each(
                lambda s: program.start(
                    broadcast, _at(states, s), task, _info(chunk, s), _client_key(key, chunk, s, 0)
                )
            )(slot)
        else:
            new = jax.tree.map(lambda x: x[slot], waiting)
        return select(start, new, locals_)

    def work(tick, lane, slot, step, active, local):
        key_ = jax.random.fold_in(_client_key(key, chunk, slot, 1 + index), step)
        rows, mask, place = locate(tick, lane, slot, step)
        batch = _read(fetch, phase, data, rows, place, mask, jax.random.fold_in(key_, 0))
        new, metrics = phase.step(frozen, broadcast, local, batch, task, jax.random.fold_in(key_, 1))
        return select(active, new, local), {
            name: _countable(value, active) for name, value in metrics.items()
        }

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
        # Scalar predicates outside the lanes' vmap: a batched cond would become a select and run both
        # branches at every tick.
        locals_ = jax.lax.cond(
            jnp.any(start), lambda: begin(slot, start, locals_, states, waiting), lambda: locals_
        )
        locals_, metrics = each(work)(
            jnp.full_like(slot, i), jnp.arange(lanes.count), slot, step, active, locals_
        )
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


def in_window(rows, places, first, tick, lane, slot, step):
    """The rows of a step in a window: their ids, -1 for padding, and their places, both [ticks, L, B] from
    tick `first`."""
    del slot, step
    mine = rows[tick - first, lane]
    return mine, mine >= 0, places[tick - first, lane]


def rows_of_ticks(phase: Phase, index: int, lanes: Lanes, chunk: Chunk, key) -> Int[Array, "ticks lanes B"]:
    """The row ids that every lane reads at every tick of a phase; -1 for padding."""
    table, order = chunk.tables[index], _row_order(phase, index, chunk, key)

    def cell(slot, step, active):
        rows, mask = _batch_rows(phase, chunk, order, slot, step)
        return jnp.where(mask & (active > 0), rows, -1)

    return jax.vmap(jax.vmap(cell))(*map(jnp.asarray, (table.slot, table.step, table.active)))


def _row_order(phase: Phase, index: int, chunk: Chunk, key) -> Int[Array, "epochs rows"]:
    """For every epoch, the positions in chunk.rows sorted by client and, within a client, by a uniform draw
    per training row.

    The draw belongs to the row (seed, task, round, phase, epoch, row), so a client's order does not depend on
    who else takes part.
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
    """Training rows of a client's step, and which of them are real: the last batch of an epoch may be
    partial."""
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
    return Batch(
        clear(image), clear(label), mask, jnp.where(mask, rows, -1), None if query is None else clear(query)
    )


def _client_key(key, chunk: Chunk, slot, purpose: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 3), chunk.id[slot]), purpose)


def _info(chunk: Chunk, slot) -> ClientInfo:
    return ClientInfo(chunk.id[slot], chunk.count[slot], chunk.class_rows[slot], chunk.round)


# ---- pytrees -----------------------------------------------------------------------------------------------


def _at(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _zeros(shapes: PyTree, lead: tuple[int, ...] = ()) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), shapes)


def _align(mask: Array, x: Array) -> Array:
    """`mask` with trailing axes of size 1 so that it broadcasts against x from the left."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def select(mask: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(_align(mask, a), a, b), new, old)


def _add_valid(total: PyTree, new: PyTree, valid: Array) -> PyTree:
    """Sum over lanes of the valid rows: selected, not multiplied, since 0 * nan is nan."""
    return jax.tree.map(
        lambda t, x: t + jnp.sum(jnp.where(_align(valid, x), x, 0), axis=0, dtype=t.dtype), total, new
    )


def _squeeze(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _expand(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
