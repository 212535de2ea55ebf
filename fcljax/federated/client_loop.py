"""The compiled loop of a round: lanes that play clients tick by tick, and what is received of them.

Everything here runs inside jit; `engine.py` compiles it and feeds it. Lanes run side by side and each plays
its clients back to back from a host-built table. A client's upload depends on (seed, task, round, client id)
and its own rows only: every draw is keyed that way, never by lane, device, slot or co-participants.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.federated.communication import num_bytes
from fcljax.federated.schedule import Capacity, Chunk
from fcljax.federated.sums import add_stacked, align, finite_guard, is_finite, sum_zeros
from fcljax.mesh import AXIS, add_over_devices
from fcljax.types import (
    Batch,
    Broadcast,
    ClientContext,
    ClientInfo,
    Metrics,
    Phase,
    Program,
    PyTree,
    Task,
    Upload,
    Weighted,
)

_DRAWS = 7  # what the round's key is folded in with for draws that belong to rows

# fetch(data, rows[B], keys[B], augment) -> (image [B, ...], label [B], query [B, D] or None)
Fetch = Callable[[PyTree, Array, Array, bool], tuple[Array, Array, Array | None]]


class Lanes(NamedTuple):
    """How many clients run at a time, and how: `loop` (one after the other), `vmap` (batched) or `unroll` (a
    copy of the code each)."""

    count: int = 1
    mode: str = "loop"


class Shapes(NamedTuple):
    """Shapes and types of what a program makes, as `jax.ShapeDtypeStruct`."""

    local: PyTree
    upload: Upload
    metrics: tuple[Metrics, ...]  # per phase
    state: PyTree  # of a client, between rounds


def slot_bytes(program: Program, shapes: Shapes) -> int:
    """Bytes of what a chunk holds for each of its clients: what it sends to be gathered, its state, and
    between phases what it works on."""
    waiting = shapes.local if len(program.phases) > 1 else ()
    return num_bytes((shapes.upload.gather, shapes.state, waiting))


class Accumulator(NamedTuple):
    """What a round has received so far, of P participants; or what a chunk has, whose clients have a row for
    each of its slots. `mean` holds sums of weight * leaf; it, `sum` and `metrics` are in float32 at the
    least."""

    mean: PyTree
    sum: PyTree
    gather: PyTree
    weight: Float[Array, " P"]
    id: Int[Array, " P"]
    valid: Bool[Array, " P"]
    rejected: Int[Array, ""]
    metrics: tuple[Metrics, ...]


_GATHERED = ("gather", "weight", "id", "valid")  # fields of an accumulator with a row for every client


class Carry(NamedTuple):
    """What goes from tick to tick: the lanes' clients at work [L, ...], what was received, the states of the
    chunk's clients [S, ...] and which of them are new, and the clients [S, ...] that wait between phases."""

    local: PyTree
    accumulator: Accumulator
    states: PyTree
    written: Bool[Array, " S"]
    waiting: PyTree


class Call(NamedTuple):
    """What all ticks of a chunk read: the frozen network, what was broadcast, who plays, in which task, the
    round's key, and whether every upload is looked through as it arrives."""

    frozen: PyTree
    broadcast: Broadcast
    chunk: Chunk
    task: Task
    key: PRNGKeyArray
    guarded: Bool[Array | np.bool_, ""]


class Past(NamedTuple):
    """The rows that the chunk's clients may recall: data that holds them, their ids (-1: none) and where in
    `data` they are. Without `Program.memory` both are empty."""

    data: PyTree
    ids: Int[Array | np.ndarray, "S M"]
    places: Int[Array | np.ndarray, "S M"]


def batches_alone(lanes: Lanes) -> bool:
    """Can each lane compute a batch of its own size? Batched lanes would compute every size in turn."""
    return lanes.count == 1 or lanes.mode != "vmap"


def over_lanes(function: Callable, lanes: int, mode: str) -> Callable:
    """`function` of one lane as a function of arguments stacked over `lanes`. All modes give the same numbers
    up to rounding."""
    if lanes == 1:
        return lambda *args: expand(function(*squeeze(args)))
    if mode == "vmap":
        return jax.vmap(function)
    if mode == "unroll":
        return lambda *args: _stack([function(*_at(args, i)) for i in range(lanes)])
    return lambda *args: jax.lax.map(lambda one: function(*one), args)


def _countable(metric: Weighted, active: Array) -> Weighted:
    """The metric, or nothing where the lane is idle or the value is not finite: one diverging client does not
    hide the others' loss."""
    counts = active & jnp.isfinite(metric.total) & jnp.isfinite(metric.weight)
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), metric)


# ---- what a round receives ---------------------------------------------------------------------------------


def empty_accumulator(shapes: Shapes, capacity: Capacity) -> Accumulator:
    """An empty accumulator for uploads of these shapes."""
    p = capacity.participants
    return Accumulator(
        mean=sum_zeros(shapes.upload.mean, floating=True),
        sum=sum_zeros(shapes.upload.sum),
        gather=_zeros(shapes.upload.gather, (p,)),
        weight=jnp.zeros(p),
        id=jnp.full(p, capacity.clients, jnp.int32),
        valid=jnp.zeros(p, bool),
        rejected=jnp.zeros((), jnp.int32),
        metrics=sum_zeros(shapes.metrics, floating=True),
    )


def _receive(
    acc: Accumulator, upload: Upload, id_: Array, position: Array, end: Array, guarded: Array
) -> tuple[Accumulator, Array]:
    """Add the uploads [L, ...] of clients who have just finished, those where `end` says so; each goes to its
    position among the gathered ones. If guarded, non-finite uploads, and ones of negative weight, get weight
    0 and are counted; otherwise they are added too, and `is_sound` sees it."""
    sent = jnp.broadcast_to(jnp.asarray(upload.weight, jnp.float32), end.shape)
    weight, valid, rejected = jax.lax.cond(
        guarded,
        lambda: finite_guard(upload._replace(weight=sent), sent, end),
        lambda: (jnp.where(end, sent, 0), end, jnp.zeros((), jnp.int32)),
    )
    position = jnp.where(valid, position, acc.valid.shape[0])
    write = functools.partial(jax.tree.map, lambda buffer, x: buffer.at[position].set(x, mode="drop"))
    return acc._replace(
        mean=add_stacked(acc.mean, upload.mean, valid, weight),
        sum=add_stacked(acc.sum, upload.sum, valid),
        gather=write(acc.gather, upload.gather),
        weight=write(acc.weight, weight),
        id=write(acc.id, id_),
        valid=write(acc.valid, valid),
        rejected=acc.rejected + rejected,
    ), valid


def is_sound(accumulator: Accumulator) -> Bool[Array, ""]:
    """Is all that was received finite and of a weight that is not negative? One upload that is not makes its
    sums so, or stands among the gathered ones. Sums of finite uploads may overflow: that is no client's
    fault, and playing the clients again under the guard then gives the same."""
    received = accumulator.mean, accumulator.sum, accumulator.gather, accumulator.weight
    return is_finite(received) & jnp.all(accumulator.weight >= 0)


def receive_sent(
    program: Program, acc: Accumulator, context: ClientContext, upload: Upload, position: Array
) -> tuple[Accumulator, Array]:
    """Add one upload that was made elsewhere, as those of lanes are added.

    Args:
      program: whose upload it is; its `receive` acts on it first.
      acc: what was received so far.
      ctx: what the client could read, with its id.
      upload: as the client sent it.
      position: of the client among the round's participants in the order of their ids.

    Returns:
      What has been received now, and whether the upload is valid.
    """
    upload = program.receive(context, upload) if program.receive else upload
    one = jnp.ones(1, bool)
    acc, valid = _receive(acc, expand(upload), context.client.id[None], position[None], one, one[0])
    return acc, valid[0]


# ---- chunks ------------------------------------------------------------------------------------------------


def part_of_chunk(
    accumulator: Accumulator, states: PyTree, chunk: Chunk, capacity: Capacity
) -> tuple[Accumulator, PyTree]:
    """An empty accumulator for what the chunk's clients send, and their states. It has a row per slot, not
    per participant: the loop carries it, and what it carries is cleared and copied for every chunk."""
    by_slot = lambda tree: jax.tree.map(lambda x: jnp.zeros((len(chunk.id), *x.shape[1:]), x.dtype), tree)
    empty = jax.tree.map(jnp.zeros_like, accumulator)._replace(
        gather=by_slot(accumulator.gather),
        weight=by_slot(accumulator.weight),
        id=by_slot(accumulator.id),
        valid=by_slot(accumulator.valid),
    )
    return empty, states_of_chunk(states, chunk, capacity)


def states_of_chunk(states: PyTree, chunk: Chunk, capacity: Capacity) -> PyTree:
    """The states [S, ...] of the chunk's clients; padding slots get some client's."""
    return _at(states, jnp.minimum(chunk.id, capacity.clients - 1))


def close_chunk(
    accumulator: Accumulator, states: PyTree, carry: Carry, chunk: Chunk, capacity: Capacity
) -> tuple[Accumulator, PyTree]:
    """What the chunk's clients sent and their new states, merged with everybody's."""
    received = carry.accumulator
    put = lambda where: lambda everybody, new: everybody.at[where].set(new, mode="drop")
    states = jax.tree.map(put(jnp.where(carry.written, chunk.id, capacity.clients)), states, carry.states)
    rows = put(jnp.where(received.valid, chunk.position, capacity.participants))
    parts = {name: (getattr(accumulator, name), getattr(received, name)) for name in Accumulator._fields}
    add = lambda a, b: a | b if a.dtype == bool else a + b
    merged = {name: jax.tree.map(rows if name in _GATHERED else add, *pair) for name, pair in parts.items()}
    return Accumulator(**merged), states


def memories(program: Program, states: PyTree, chunk: Chunk) -> Int[Array, "S M"]:
    """The ids of the rows that the chunk's clients, with these states [S, ...], may recall; none in padding
    slots, whose states are somebody else's."""
    if program.memory is None:
        return jnp.zeros((chunk.id.shape[0], 0), jnp.int32)
    return jnp.where(chunk.count[:, None] > 0, jax.vmap(program.memory)(states), -1)


def over_devices(carry: Carry, mesh: Mesh) -> Carry:
    """What all devices of a mesh have received and changed together. Each client was played by exactly one of
    them, so what belongs to clients adds up without rounding in any order; sums over clients are added in the
    order of the devices."""
    ordered = functools.partial(jax.tree.map, functools.partial(add_over_devices, mesh=mesh))
    new = jax.tree.map(lambda x: jnp.where(align(carry.written, x), x, jnp.zeros_like(x)), carry.states)
    got, written, new = jax.tree.map(_sum_devices, (carry.accumulator, carry.written, new))
    sums = {name: ordered(getattr(carry.accumulator, name)) for name in ("mean", "sum", "metrics")}
    return carry._replace(accumulator=got._replace(**sums), states=new, written=written)


def _sum_devices(x: Array) -> Array:
    return jax.lax.psum(x.astype(jnp.int32), AXIS) > 0 if x.dtype == bool else jax.lax.psum(x, AXIS)


def open_chunk(
    program: Program, shapes: Shapes, lanes: Lanes, accumulator: Accumulator, states: PyTree, chunk: Chunk
) -> Carry:
    """Before the first tick of a chunk. Between phases a client's local state waits in a buffer [S, ...]."""
    slots = chunk.id.shape[0]
    waiting = _zeros(shapes.local, (slots,)) if len(program.phases) > 1 else ()
    return Carry(_zeros(shapes.local, (lanes.count,)), accumulator, states, jnp.zeros(slots, bool), waiting)


# ---- the loop ----------------------------------------------------------------------------------------------


def sweep(
    program: Program,
    index: int,
    call: Call,
    carry: Carry,
    data: PyTree,
    past: Past,
    locate: Callable,
    ticks: tuple,
    *,
    fetch: Fetch,
    lanes: Lanes,
    widths: tuple[int, ...],
    waits: bool = True,
) -> Carry:
    """Ticks [first, last) of one phase: at every tick each lane takes one step of the client that its table
    names, with as many rows as the least of the widths that holds its batch. `waits`: may a lane be idle
    while others work? Its client must then be kept as it is.

    locate(tick, lane, slot, step) -> (row ids, mask, where `data` has these rows)
    """
    phase, chunk = program.phases[index], call.chunk
    table = jax.tree.map(jnp.asarray, chunk.tables[index])
    each = functools.partial(over_lanes, lanes=lanes.count, mode=lanes.mode)
    begin = functools.partial(_begin, program, index, call, each)
    finish = functools.partial(_finish, program, index, call, each)
    widths = widths if batches_alone(lanes) else widths[-1:]

    def work(tick, lane, slot, step, active, local):
        key = jax.random.fold_in(_client_key(call.key, chunk, slot, 1 + index), step)
        rows, mask, place = locate(tick, lane, slot, step)
        context, step_key = context_of(call, slot), jax.random.fold_in(key, 1)
        draw = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(call.key, _DRAWS), index), step)

        def step_of(width):
            mine = rows[:width], place[:width], mask[:width]
            batch = _read(fetch, phase.view.augment, data, *mine, jax.random.fold_in(key, 0), draw)
            if phase.recall:
                past_rows = _replayed(fetch, phase.recall, context, past, slot, local, step_key, draw)
                batch = join(batch, past_rows)
            return phase.step(context, local, batch, step_key)

        new, metrics = _at_width(step_of, widths, mask)
        kept = select(active, new, local) if waits else new
        return kept, {k: _countable(value, active) for k, value in metrics.items()}

    def tick(i, carry: Carry):
        slot, step, start, end, active = (column[i] for column in table)
        start, end, active = start > 0, end > 0, active > 0
        # Scalar predicates outside the lanes' vmap: a batched cond would become a select and run both
        # branches at every tick.
        local = jax.lax.cond(jnp.any(start), lambda: begin(slot, start, carry), lambda: carry.local)
        numbers = (jnp.full_like(slot, i), jnp.arange(lanes.count))
        local, metrics = each(work)(*numbers, slot, step, active, local)
        accumulator = _add_metrics(carry.accumulator, index, metrics)
        carry = carry._replace(local=local, accumulator=accumulator)
        return jax.lax.cond(jnp.any(end), lambda: finish(slot, end, carry), lambda: carry)

    first, last = ticks  # the trip count is data, so one trace serves rounds of any length
    return jax.lax.fori_loop(first, last, tick, carry)


def _at_width(function: Callable[[int], PyTree], widths: tuple[int, ...], mask: Bool[Array, " B"]) -> PyTree:
    """function(width) for the least of the widths, in ascending order, that holds the real rows; they come
    first. Draws that belong to rows are the same for every width. A step that returns something of its batch
    is computed in full."""
    result = lambda width: jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(lambda: function(width)))
    if len(widths) == 1 or any(result(width) != result(widths[-1]) for width in widths[:-1]):
        return function(widths[-1])
    index = jnp.searchsorted(jnp.asarray(widths), jnp.sum(mask))
    return jax.lax.switch(index, [functools.partial(function, width) for width in widths])


def _begin(program: Program, index: int, call: Call, each: Callable, slot, start, carry: Carry) -> PyTree:
    """The lanes' clients at work, with those that start now in their places."""

    def one(s):
        return program.start(
            context_of(call, s), _at(carry.states, s), _client_key(call.key, call.chunk, s, 0)
        )

    new = each(one)(slot) if index == 0 else _at(carry.waiting, slot)
    return select(start, new, carry.local)


def _finish(program: Program, index: int, call: Call, each: Callable, slot, end, carry: Carry) -> Carry:
    """Clients at the end of a phase wait for the next one; at the end of the last they send."""
    slots = call.chunk.id.shape[0]
    put = lambda where: lambda buffer, x: buffer.at[where].set(x, mode="drop")
    if index < len(program.phases) - 1:
        waiting = jax.tree.map(put(jnp.where(end, slot, slots)), carry.waiting, carry.local)
        return carry._replace(waiting=waiting)

    def one(s, local):
        context = context_of(call, s)
        upload, new = program.finish(context, local, _at(carry.states, s))
        return program.receive(context, upload) if program.receive else upload, new

    upload, new = each(one)(slot, carry.local)
    id_ = call.chunk.id[slot]
    accumulator, valid = _receive(carry.accumulator, upload, id_, slot, end, jnp.asarray(call.guarded))
    there = jnp.where(valid, slot, slots)
    states = jax.tree.map(put(there), carry.states, new)
    written = carry.written.at[there].set(True, mode="drop")
    return carry._replace(accumulator=accumulator, states=states, written=written)


def _add_metrics(accumulator: Accumulator, index: int, metrics: Metrics) -> Accumulator:
    before = accumulator.metrics
    total = jax.tree.map(lambda a, m: a + jnp.sum(m, axis=0, dtype=a.dtype), before[index], metrics)
    return accumulator._replace(metrics=(*before[:index], total, *before[index + 1 :]))


# ---- rows --------------------------------------------------------------------------------------------------


def in_window(rows, places, first, tick, lane, slot, step):
    """The rows of a step in a window: their ids, -1 for padding, and their places, both [ticks, L, B] from
    tick `first`."""
    del slot, step
    mine = rows[tick - first, lane]
    return mine, mine >= 0, places[tick - first, lane]


def rows_of_ticks(phase: Phase, index: int, chunk: Chunk, key: PRNGKeyArray) -> Int[Array, "ticks lanes B"]:
    """The row ids that every lane reads at every tick of a phase; -1 for padding."""
    table, order = chunk.tables[index], _row_order(phase, index, chunk, key)

    def cell(slot, step, active):
        rows, mask = _batch_rows(phase, chunk, order, slot, step)
        return jnp.where(mask & (active > 0), rows, -1)

    return jax.vmap(jax.vmap(cell))(*map(jnp.asarray, (table.slot, table.step, table.active)))


def _row_order(phase: Phase, index: int, chunk: Chunk, key: PRNGKeyArray) -> Int[Array, "epochs rows"]:
    """For every epoch, the positions in chunk.rows sorted by client and, within a client, by a uniform draw
    per training row.

    The draw belongs to the row (seed, task, round, phase, epoch, row), so a client's order does not depend on
    who else takes part.
    """
    position = jnp.arange(chunk.rows.shape[0], dtype=jnp.int32)

    def shuffled(epoch):
        draw_key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 2), index), epoch)
        draw = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(draw_key, row)))(chunk.rows)
        return jax.lax.sort((jnp.asarray(chunk.slot_of_row), draw, position), num_keys=2)[2]

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


def _replayed(
    fetch: Fetch, recall: Callable, context: ClientContext, past: Past, slot, local, key, draw
) -> Batch:
    """The rows of its past that the client chooses for this step, under the clean view; places outside of
    its memory are padding."""
    choice, size = recall(context, local, key), past.ids.shape[1]
    ids, places = (rows[slot, jnp.clip(choice, 0, size - 1)] for rows in (past.ids, past.places))
    mask = (choice >= 0) & (choice < size) & (ids >= 0)
    return _read(fetch, False, past.data, ids, places, mask, key, draw)


def join(batch: Batch, other: Batch) -> Batch:
    """Both batches as one, with cached features and keys of draws if both have them."""
    both = lambda a, b: None if a is None or b is None else jnp.concatenate([a, b])
    rows = (jnp.concatenate([mine, theirs]) for mine, theirs in zip(batch[:4], other[:4], strict=True))
    return Batch(*rows, query=both(batch.query, other.query), keys=both(batch.keys, other.keys))


def _read(fetch: Fetch, augment: bool, data: PyTree, rows, place, mask, key, draw) -> Batch:
    """A batch whose padding rows are zeros whatever the data holds there."""
    keys = jax.random.split(key, rows.shape[0])
    image, label, query = fetch(data, jnp.where(mask, place, 0), keys, augment)
    clear = lambda x: jnp.where(align(mask, x), x, jnp.zeros_like(x))
    query = None if query is None else clear(query)
    draws = jax.vmap(jax.random.fold_in, (None, 0))(draw, jnp.where(mask, rows, 0))
    return Batch(clear(image), clear(label), mask, jnp.where(mask, rows, -1), query, draws)


def example_batch(fetch: Fetch, phase: Phase, data: PyTree) -> Batch:
    """A batch of padding as a phase would read it, for its shapes."""
    key, view = jax.random.key(0), phase.view
    none = lambda size: jnp.zeros(size, jnp.int32)
    empty = lambda size: (none(size), none(size), none(size) > 0, key, key)
    batch = _read(fetch, view.augment, data, *empty(view.batch_size))
    return join(batch, _read(fetch, False, data, *empty(view.recall))) if phase.recall else batch


def context_of(call: Call, slot) -> ClientContext:
    """What the client in a slot may read."""
    chunk = call.chunk
    task = call.task if chunk.task is None else _at(chunk.task, slot)
    info = ClientInfo(chunk.id[slot], chunk.count[slot], chunk.class_rows[slot], jnp.asarray(chunk.round))
    return ClientContext(call.frozen, call.broadcast.payload, call.broadcast.cached, task, info)


def _client_key(key: PRNGKeyArray, chunk: Chunk, slot, purpose: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 3), chunk.id[slot]), purpose)


# ---- pytrees -----------------------------------------------------------------------------------------------


def _at(tree: PyTree, index) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _zeros(shapes: PyTree, lead: tuple[int, ...] = ()) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), shapes)


def select(mask: Array, new: PyTree, old: PyTree) -> PyTree:
    """The leaves of `new` where the mask, which has their leading axes, is True, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(align(mask, b), a, b), new, old)


def squeeze(tree: PyTree) -> PyTree:
    """Arrays [1, ...] without their first axis."""
    return jax.tree.map(lambda x: x[0], tree)


def expand(tree: PyTree) -> PyTree:
    """Arrays with a first axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
