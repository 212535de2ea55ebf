"""The compiled loop over the clients of a round: lanes that run clients step by step, and what they send.

Everything here runs inside jit; `engine.py` compiles it and feeds it. Lanes run side by side, and each runs
its clients one after the other, as a table says that was made on the host. A client's upload depends on
(seed, task, round, client id) and its own examples only: every draw is keyed that way, never by lane, device,
slot or other participants.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from fcljax.federated import claims
from fcljax.federated.communication import num_bytes
from fcljax.federated.keys import ClientKey, RoundKey, StepKey
from fcljax.federated.schedule import Capacity, Chunk
from fcljax.federated.sums import add_stacked, broadcast_left, finite_guard, is_finite, sum_zeros
from fcljax.mesh import AXIS, WHOLE, AnyMesh, add_over_devices, rows_on, split, take_rows, write_rows
from fcljax.types import (
    Batch,
    Broadcast,
    ChooseReplay,
    ClientContext,
    ClientInfo,
    Metrics,
    Phase,
    Program,
    PyTree,
    Task,
    Upload,
    View,
    Weighted,
)


@runtime_checkable
class Fetch(Protocol):
    """Reads examples of the data, whatever form that has."""

    def __call__(
        self, data: PyTree, index: Int[Array, " B"], keys: Key[Array, " B"], augment: bool, /
    ) -> tuple[Array, Array, Array | None]:
        """Image [B, ...], label [B], and query [B, D] or None."""
        ...


class Lanes(NamedTuple):
    """How many clients run at a time, and how."""

    count: int = 1
    """Number of lanes."""
    mode: str = "loop"
    """`loop` (one after the other), `vmap` (batched) or `unroll` (a copy of the code each)."""


class Shapes(NamedTuple):
    """Shapes and types of what a program makes, as `jax.ShapeDtypeStruct`."""

    local: PyTree  # of a client at work
    upload: Upload  # of one client
    metrics: tuple[Metrics, ...]  # of each phase
    state: PyTree  # of a client between rounds
    kept: tuple[frozenset[int], ...]  # numbers of the leaves of `local` kept after each phase but the last


def slot_bytes(shapes: Shapes) -> int:
    """Bytes that a chunk needs for each of its clients: the gathered part of its upload, its state, and what
    it keeps of its local state between phases."""
    return num_bytes((shapes.upload.gather, shapes.state, _between_phases(shapes)))


def _between_phases(shapes: Shapes) -> list:
    """Of the leaves of the local state, those that a client ever keeps between phases, and None for the
    others."""
    kept = _kept_before(shapes, len(shapes.kept))
    return [leaf if i in kept else None for i, leaf in enumerate(jax.tree.leaves(shapes.local))]


def _kept_before(shapes: Shapes, phase: int) -> frozenset[int]:
    """Which leaves of its local state a client has kept when a phase begins. For the others it may take those
    of its start again: nobody has changed them, or nobody reads them."""
    return frozenset().union(*shapes.kept[:phase])


class Accumulator(NamedTuple):
    """What has been received so far in a round of P participants, or of one chunk. In a chunk, what belongs
    to clients has an entry for each slot instead.

    Sums are in float32 at least. On a mesh every device has a part of the entries of clients, of which there
    are as many as a multiple of the devices, and all of the sums.
    """

    mean: PyTree  # sum of weight * leaf
    sum: PyTree  # sum of the leaves
    gather: PyTree  # leaves [P, ...]
    weight: Float[Array, " P"]  # of each client
    id: Int[Array, " P"]  # of each client; K where nobody is
    valid: Bool[Array, " P"]  # whether the upload has arrived and was accepted
    rejected: Int[Array, ""]  # uploads that were not finite, or with an impossible claim
    impossible: Int[Array, " claims"]  # of these, for each claim, those that cannot be true
    metrics: tuple[Metrics, ...]  # sums of each phase's metrics


_BY_CLIENT = ("gather", "weight", "id", "valid")  # fields of an accumulator with an entry for each client


class Carry(NamedTuple):
    """What goes from tick to tick."""

    local: PyTree  # the lanes' clients at work, leaves [L, ...]
    accumulator: Accumulator  # what was received
    states: PyTree  # states of the chunk's clients, leaves [S, ...]
    written: Bool[Array, " S"]  # which of them are new
    waiting: list  # what clients keep between phases: leaves [S, ...] of local states, or None


# How the devices of a mesh have them: what belongs to clients in equal parts, the rest as a whole.
# pyrefly: ignore[bad-argument-type]  # a tree of specifications
ON_DEVICES = Accumulator(WHOLE, WHOLE, split(), split(), split(), split(), WHOLE, WHOLE, WHOLE)
# pyrefly: ignore[bad-argument-type]
OF_DEVICES = Chunk(*[split()] * 7, tables=split(1), ticks=WHOLE, round=WHOLE, task=split())


class Call(NamedTuple):
    """What all ticks of a chunk read."""

    frozen: PyTree  # what is never trained
    broadcast: Broadcast  # what was sent to clients
    chunk: Chunk  # who takes part
    task: Task  # the round's task
    key: PRNGKeyArray  # of the round
    guarded: Bool[Array | np.bool_, ""]  # whether every upload is checked as it arrives


class ReplayData(NamedTuple):
    """The replay buffers of a chunk's clients. Without `Program.replay_buffer` both arrays are empty."""

    data: PyTree  # data that hold the examples
    index: Int[Array | np.ndarray, "S M"]  # their indices in the training set, -1 for none
    place: Int[Array | np.ndarray, "S M"]  # their indices in `data`


class Merging(NamedTuple):
    """How far the chunks of a round are merged, on the device, so that the host need not wait for it."""

    chunks: Int[Array | np.ndarray | np.int32, ""]  # the first so many are; a later one is ignored
    current: Int[Array | np.ndarray | np.int32, ""]  # number of the chunk that is merged next
    guarded: Bool[Array | np.bool_, ""]  # whether its uploads were checked as they arrived


class TickWindow(NamedTuple):
    """Consecutive ticks of a phase, and where their examples lie in the data on the device."""

    data: PyTree  # what `Fetch` reads
    index: Int[Array, "ticks L B"]  # indices in the training set, -1 for padding
    place: Int[Array, "ticks L B"]  # indices in `data`
    first: Int[Array | np.ndarray | np.int32, ""]  # the first tick
    ticks: Int[Array | np.ndarray | np.int32, ""]  # how many ticks to run


class LoopSettings(NamedTuple):
    """What is static in the loop of one phase."""

    fetch: Fetch  # reads examples
    lanes: Lanes  # of one device
    widths: tuple[int, ...]  # batch sizes that a step is compiled for, ascending
    waits: bool  # whether a lane may be idle while others work; its client must then be kept as it is
    participants: int  # P
    shapes: Shapes  # of what the program makes


def batches_alone(lanes: Lanes) -> bool:
    """Whether each lane can compute a batch of its own size; batched lanes would compute every size."""
    return lanes.count == 1 or lanes.mode != "vmap"


def over_lanes(function: Callable, lanes: Lanes) -> Callable:
    """`function` of one lane as a function of arguments stacked over lanes. All modes give the same numbers
    up to rounding."""
    if lanes.count == 1:
        return lambda *args: expand(function(*squeeze(args)))
    if lanes.mode == "vmap":
        return jax.vmap(function)
    if lanes.mode == "unroll":
        return lambda *args: _stack([function(*_at(args, i)) for i in range(lanes.count)])
    return lambda *args: jax.lax.map(lambda one: function(*one), args)


def _countable(metric: Weighted, active: Array) -> Weighted:
    """The metric, or zeros where the lane is idle or the value is not finite: one diverging client does not
    hide the others' loss."""
    counts = active & jnp.isfinite(metric.total) & jnp.isfinite(metric.weight)
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), metric)


# ---- what a round receives ---------------------------------------------------------------------------------


def empty_accumulator(
    shapes: Shapes, capacity: Capacity, claimed: int, mesh: AnyMesh | None = None
) -> Accumulator:
    """An empty accumulator for uploads of these shapes, with so many claims."""
    p = rows_on(mesh, capacity.participants)
    return Accumulator(
        mean=sum_zeros(shapes.upload.mean, floating=True),
        sum=sum_zeros(shapes.upload.sum),
        gather=_zeros(shapes.upload.gather, (p,)),
        weight=jnp.zeros(p),
        id=jnp.full(p, capacity.clients, jnp.int32),
        valid=jnp.zeros(p, bool),
        rejected=jnp.zeros((), jnp.int32),
        impossible=jnp.zeros(claimed, jnp.int32),
        metrics=sum_zeros(shapes.metrics, floating=True),
    )


def _receive(
    acc: Accumulator, upload: Upload, held: Array, id_: Array, position: Array, end: Array, guarded: Array
) -> tuple[Accumulator, Array]:
    """Add the uploads [L, ...] of the clients that have just finished, where `end` is True. Each goes to its
    position among the gathered ones. Those of which a claim [L, claims] is not `held` are left out.

    If guarded, non-finite uploads, and ones of negative weight, get weight 0 and are counted. Otherwise they
    are added too, and `is_sound` finds out.
    """
    sent = jnp.broadcast_to(jnp.asarray(upload.weight, jnp.float32), end.shape)
    lies = end[:, None] & ~held
    end = end & jnp.all(held, axis=1)
    weight, valid, rejected = jax.lax.cond(
        guarded,
        lambda: finite_guard(upload._replace(weight=sent), sent, end),
        lambda: (jnp.where(end, sent, 0), end, jnp.zeros((), jnp.int32)),
    )
    write = functools.partial(_write, jnp.where(valid, position, acc.valid.shape[0]))
    return acc._replace(
        mean=add_stacked(acc.mean, upload.mean, valid, weight),
        sum=add_stacked(acc.sum, upload.sum, valid),
        gather=write(acc.gather, upload.gather),
        weight=write(acc.weight, weight),
        id=write(acc.id, id_),
        valid=write(acc.valid, valid),
        rejected=acc.rejected + rejected + jnp.sum(jnp.any(lies, axis=1), dtype=jnp.int32),
        impossible=acc.impossible + jnp.sum(lies, axis=0, dtype=jnp.int32),
    ), valid


def is_sound(accumulator: Accumulator) -> Bool[Array, ""]:
    """Whether all that was received is finite and of a weight that is not negative.

    One upload that is not makes its sums so, or stands among the gathered ones. Sums of finite uploads may
    overflow: no client is at fault then, and running the clients again under the guard gives the same.
    """
    received = accumulator.mean, accumulator.sum, accumulator.gather, accumulator.weight
    return is_finite(received) & jnp.all(accumulator.weight >= 0)


def receive_sent(
    program: Program, acc: Accumulator, context: ClientContext, upload: Upload, position: Array
) -> tuple[Accumulator, Array]:
    """Add one upload that was made elsewhere, as those of lanes are added.

    Args:
      program: whose upload it is; its `receive` acts on it first.
      acc: what was received so far.
      context: what the client could read, with its id.
      upload: as the client sent it.
      position: of the client among the round's participants in the order of their ids.

    Returns:
      What has been received now, and whether the upload is valid.
    """
    held = claims.held(program, context, upload)
    upload = program.receive(context, upload) if program.receive else upload
    one = jnp.ones(1, bool)
    acc, valid = _receive(
        acc, expand(upload), held[None], context.client.id[None], position[None], one, one[0]
    )
    return acc, valid[0]


# ---- chunks ------------------------------------------------------------------------------------------------


def chunk_accumulator(accumulator: Accumulator, chunk: Chunk) -> Accumulator:
    """An empty accumulator for what the chunk's clients send.

    It has an entry per slot, not per participant: the loop carries it, and what it carries is cleared and
    copied for every chunk.
    """
    empty = jax.tree.map(jnp.zeros_like, accumulator)

    def by_slot(name: str) -> PyTree:
        part = getattr(accumulator, name)
        return jax.tree.map(lambda x: jnp.zeros((len(chunk.id), *x.shape[1:]), x.dtype), part)

    return empty._replace(**{name: by_slot(name) for name in _BY_CLIENT})


def states_of_chunk(states: PyTree, chunk: Chunk, capacity: Capacity, mesh: AnyMesh | None = None) -> PyTree:
    """The states [S, ...] of the chunk's clients; padding slots get some client's. On a mesh, those of a
    device's clients from all devices."""
    return take_rows(states, jnp.minimum(chunk.id, capacity.clients - 1), mesh)


def close_chunk(
    accumulator: Accumulator,
    states: PyTree,
    carry: Carry,
    chunk: Chunk,
    merged: Merging,
    capacity: Capacity,
    mesh: AnyMesh | None = None,
) -> tuple[Accumulator, PyTree, Int[Array, ""]]:
    """What the chunk's clients sent and their new states, merged with everybody's if all is sound and the
    chunk is the next one; and how many chunks are merged now.

    On a mesh, what each device received goes to the devices that have the entries of its clients.
    """
    fine = jax.lax.cond(merged.guarded, lambda: jnp.asarray(True), lambda: is_sound(carry.accumulator))
    fine = fine if mesh is None else ~add_over_devices(~fine, mesh)
    fine &= merged.chunks == merged.current
    received = carry.accumulator if mesh is None else over_devices(carry.accumulator, mesh)
    nowhere = jnp.iinfo(jnp.int32).max
    client = jnp.where(carry.written & fine, chunk.id, nowhere)
    states = write_rows(states, client, carry.states, mesh)
    position = jnp.where(received.valid & fine, chunk.position, nowhere)

    def add(a: Array, b: Array) -> Array:
        return jnp.where(fine, a | b if a.dtype == bool else a + b, a)

    def parts(of: Accumulator, by_client: bool) -> dict[str, PyTree]:
        names = [name for name in Accumulator._fields if (name in _BY_CLIENT) == by_client]
        return {name: getattr(of, name) for name in names}

    entries = write_rows(parts(accumulator, True), position, parts(received, True), mesh)
    sums = jax.tree.map(add, parts(accumulator, False), parts(received, False))
    return Accumulator(**entries, **sums), states, jnp.asarray(merged.chunks + fine)


def replay_indices(program: Program, states: PyTree, chunk: Chunk) -> Int[Array, "S M"]:
    """The examples that the chunk's clients, with these states [S, ...], may replay; none in padding slots,
    whose states are another client's."""
    if program.replay_buffer is None:
        return jnp.zeros((chunk.id.shape[0], 0), jnp.int32)
    return jnp.where(chunk.count[:, None] > 0, jax.vmap(program.replay_buffer)(states), -1)


def over_devices(received: Accumulator, mesh: AnyMesh) -> Accumulator:
    """What a device has received of its clients, with the sums of all devices, which are added in the order
    of the devices."""
    ordered = functools.partial(jax.tree.map, functools.partial(add_over_devices, mesh=mesh))
    sums = {name: ordered(getattr(received, name)) for name in ("mean", "sum", "metrics")}
    counts = {name: jax.lax.psum(getattr(received, name), AXIS) for name in ("rejected", "impossible")}
    return received._replace(**sums, **counts)


def open_chunk(shapes: Shapes, lanes: Lanes, accumulator: Accumulator, states: PyTree, chunk: Chunk) -> Carry:
    """Before the first tick of a chunk."""
    slots = chunk.id.shape[0]
    waiting = _zeros(_between_phases(shapes), (slots,))
    return Carry(_zeros(shapes.local, (lanes.count,)), accumulator, states, jnp.zeros(slots, bool), waiting)


# ---- the loop ----------------------------------------------------------------------------------------------


def run_ticks(
    program: Program,
    index: int,
    settings: LoopSettings,
    call: Call,
    carry: Carry,
    window: TickWindow,
    past: ReplayData,
) -> Carry:
    """The ticks of a window in phase `index`: at each, every lane takes one step of the client that its table
    names, with as many examples as the smallest of the widths that holds its batch."""
    phase = program.phases[index]
    chunk = call.chunk
    lanes = settings.lanes
    table = jax.tree.map(jnp.asarray, chunk.tables[index])
    each = functools.partial(over_lanes, lanes=lanes)
    begin = functools.partial(_begin, program, _kept_before(settings.shapes, index), call, each)
    finish = functools.partial(_finish, program, settings.shapes.kept[index:], call, each)
    widths = settings.widths if batches_alone(lanes) else settings.widths[-1:]

    def at(tick, lane, slot, step, local):
        """The client's context, the key of its step, its examples' mask, and its batch at a width."""
        key = jax.random.fold_in(_client_key(call.key, chunk, slot, ClientKey.PHASES + index), step)
        image_key = jax.random.fold_in(key, StepKey.IMAGES)
        step_key = jax.random.fold_in(key, StepKey.UPDATE)
        draws_key = jax.random.fold_in(jax.random.fold_in(call.key, RoundKey.EXAMPLE_DRAWS), index)
        draws_key = jax.random.fold_in(draws_key, step)
        examples = window.index[tick - window.first, lane]
        place = window.place[tick - window.first, lane]
        mask = examples >= 0
        context = context_of(call, slot)
        read = functools.partial(_read, settings.fetch, phase.view.augment, window.data)

        def batch_of(width):
            batch = read(examples[:width], place[:width], mask[:width], image_key, draws_key)
            if phase.replay:
                keys = step_key, draws_key
                batch = join_batches(
                    batch, _replayed(settings.fetch, phase.replay, context, past, slot, local, keys)
                )
            return batch

        return context, step_key, mask, batch_of

    def work(tick, lane, slot, step, active, local):
        context, key, mask, batch_of = at(tick, lane, slot, step, local)
        measured = active & _is_measured(phase.view, settings.participants, call, slot, step)

        def stepped(width):
            batch = batch_of(width)._replace(measured=measured if phase.measures else None)
            return phase.step(context, local, batch, key)

        new, metrics = _at_width(stepped, widths, mask)
        kept = select(active, new, local) if settings.waits else new
        return kept, {k: _countable(value, active) for k, value in metrics.items()}

    def tick(i, carry: Carry):
        slot, step, start, end, active = (column[i] for column in table)
        start = start > 0
        end = end > 0
        active = active > 0
        # Scalar predicates outside the lanes' vmap: a batched cond would become a select and run both
        # branches at every tick.
        local = jax.lax.cond(jnp.any(start), lambda: begin(slot, start, carry), lambda: carry.local)
        numbers = (jnp.full_like(slot, i), jnp.arange(lanes.count))
        local, metrics = each(work)(*numbers, slot, step, active, local)
        accumulator = _add_metrics(carry.accumulator, index, metrics)
        carry = carry._replace(local=local, accumulator=accumulator)
        return jax.lax.cond(jnp.any(end), lambda: finish(slot, end, carry), lambda: carry)

    # the trip count is data, so one trace serves rounds of any length
    return jax.lax.fori_loop(window.first, window.first + window.ticks, tick, carry)


def _at_width(function: Callable[[int], PyTree], widths: tuple[int, ...], mask: Bool[Array, " B"]) -> PyTree:
    """function(width) for the smallest of the ascending widths that holds the real examples, which come
    first. Draws that belong to examples are the same for every width.

    A step whose result depends on the batch size is computed in full.
    """

    def result(width: int) -> PyTree:
        return jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(lambda: function(width)))

    if len(widths) == 1 or any(result(width) != result(widths[-1]) for width in widths[:-1]):
        return function(widths[-1])
    index = jnp.searchsorted(jnp.asarray(widths), jnp.sum(mask))
    return jax.lax.switch(index, [functools.partial(function, width) for width in widths])


def _begin(
    program: Program, kept: frozenset[int], call: Call, each: Callable, slot, start, carry: Carry
) -> PyTree:
    """The lanes' clients at work, with those that begin a phase now in place. What they have not kept of
    their local states is as `Program.start` makes it."""

    def started(s):
        key = _client_key(call.key, call.chunk, s, ClientKey.START)
        leaves = jax.tree.leaves(program.start(context_of(call, s), _at(carry.states, s), key))
        return [None if i in kept else leaf for i, leaf in enumerate(leaves)]

    leaves = zip(each(started)(slot), carry.waiting, strict=True)
    new = [waiting[slot] if leaf is None else leaf for leaf, waiting in leaves]
    local = jax.tree.unflatten(jax.tree.structure(carry.local), new)
    return local if start.shape[0] == 1 else select(start, local, carry.local)


def _finish(
    program: Program, kept: tuple[frozenset[int], ...], call: Call, each: Callable, slot, end, carry: Carry
) -> Carry:
    """Clients at the end of a phase keep what later ones need, `kept[0]`; at the end of the last they
    send."""
    slots = call.chunk.id.shape[0]
    if kept:
        write = functools.partial(_write, jnp.where(end, slot, slots))
        leaves = enumerate(zip(carry.waiting, jax.tree.leaves(carry.local), strict=True))
        return carry._replace(waiting=[write(old, new) if i in kept[0] else old for i, (old, new) in leaves])

    def one(s, local):
        context = context_of(call, s)
        upload, new = program.finish(context, local, _at(carry.states, s))
        held = claims.held(program, context, upload)
        return program.receive(context, upload) if program.receive else upload, held, new

    upload, held, new = each(one)(slot, carry.local)
    id_ = call.chunk.id[slot]
    accumulator, valid = _receive(carry.accumulator, upload, held, id_, slot, end, jnp.asarray(call.guarded))
    there = jnp.where(valid, slot, slots)
    written = carry.written.at[there].set(True, mode="drop")
    return carry._replace(accumulator=accumulator, states=_write(there, carry.states, new), written=written)


def _is_measured(
    view: View, participants: int, call: Call, slot: Int[Array, ""], step: Int[Array, ""]
) -> Bool[Array, ""]:
    """Whether a step measures itself: in the middle of the phase, at one participant. It is another one in
    every round, and the same however clients are divided into chunks."""
    chunk = call.chunk
    steps = view.epochs * -(-chunk.count[slot] // view.batch_size)
    chosen = (call.task.index + chunk.round) % participants
    return (step == steps // 2) & (chunk.position[slot] == chosen)


def _add_metrics(accumulator: Accumulator, index: int, metrics: Metrics) -> Accumulator:
    """Add the phase's metrics [L] of the lanes."""
    before = accumulator.metrics
    total = jax.tree.map(lambda a, m: a + jnp.sum(m, axis=0, dtype=a.dtype), before[index], metrics)
    return accumulator._replace(metrics=(*before[:index], total, *before[index + 1 :]))


# ---- examples ----------------------------------------------------------------------------------------------


def indices_of_ticks(
    phase: Phase, index: int, chunk: Chunk, key: PRNGKeyArray
) -> Int[Array, "ticks lanes B"]:
    """The training examples that every lane reads at every tick of phase `index`; -1 for padding."""
    table = chunk.tables[index]
    order = _example_order(phase, index, chunk, key)

    def cell(slot, step, active):
        examples, mask = _batch_indices(phase, chunk, order, slot, step)
        return jnp.where(mask & (active > 0), examples, -1)

    return jax.vmap(jax.vmap(cell))(*map(jnp.asarray, (table.slot, table.step, table.active)))


def _example_order(
    phase: Phase, index: int, chunk: Chunk, key: PRNGKeyArray
) -> Int[Array, "epochs examples"]:
    """For every epoch, the positions in chunk.indices sorted by client and, within a client, by a uniform
    draw per training example.

    The draw belongs to (seed, task, round, phase, epoch, example), so a client's order does not depend on the
    other participants.
    """
    position = jnp.arange(chunk.indices.shape[0], dtype=jnp.int32)
    phase_key = jax.random.fold_in(jax.random.fold_in(key, RoundKey.EXAMPLE_ORDER), index)

    def shuffled(epoch):
        epoch_key = jax.random.fold_in(phase_key, epoch)
        draw = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(epoch_key, i)))(chunk.indices)
        return jax.lax.sort((jnp.asarray(chunk.slot_of_example), draw, position), num_keys=2)[2]

    if not phase.view.shuffle:
        return jnp.broadcast_to(position, (phase.view.epochs, position.shape[0]))
    return jax.lax.map(shuffled, jnp.arange(phase.view.epochs))


def _batch_indices(
    phase: Phase, chunk: Chunk, order, slot, step
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Training examples of a client's step, and which of them are real: the last batch of an epoch may be
    partial."""
    size = phase.view.batch_size
    count = chunk.count[slot]
    per_epoch = jnp.maximum(-(-count // size), 1)
    within = (step % per_epoch) * size + jnp.arange(size, dtype=jnp.int32)
    mask = within < count
    position = order[step // per_epoch, jnp.where(mask, chunk.offset[slot] + within, 0)]
    return chunk.indices[position], mask


def _replayed(
    fetch: Fetch, choose: ChooseReplay, context: ClientContext, past: ReplayData, slot, local, keys
) -> Batch:
    """The examples that the client chooses to replay in this step, under the clean view. Choices outside of
    its replay buffer are padding; `keys`: of the step, and of draws that belong to examples."""
    chosen = choose(context, local, keys[0])
    size = past.index.shape[1]
    index, place = (array[slot, jnp.clip(chosen, 0, size - 1)] for array in (past.index, past.place))
    mask = (chosen >= 0) & (chosen < size) & (index >= 0)
    return _read(fetch, False, past.data, index, place, mask, *keys)


def join_batches(batch: Batch, other: Batch) -> Batch:
    """Both batches as one, with cached features and keys of draws if both have them."""

    def both(a: Array | None, b: Array | None) -> Array | None:
        return None if a is None or b is None else jnp.concatenate([a, b])

    arrays = (jnp.concatenate([mine, theirs]) for mine, theirs in zip(batch[:4], other[:4], strict=True))
    return Batch(*arrays, query=both(batch.query, other.query), keys=both(batch.keys, other.keys))


def _read(fetch: Fetch, augment: bool, data: PyTree, index, place, mask, key, draws_key) -> Batch:
    """A batch whose padding is zero, whatever the data contain there."""
    keys = jax.random.split(key, index.shape[0])
    image, label, query = fetch(data, jnp.where(mask, place, 0), keys, augment)

    def clear(x: Array) -> Array:
        return jnp.where(broadcast_left(mask, x), x, jnp.zeros_like(x))

    query = None if query is None else clear(query)
    draws = jax.vmap(jax.random.fold_in, (None, 0))(draws_key, jnp.where(mask, index, 0))
    return Batch(jax.tree.map(clear, image), clear(label), mask, jnp.where(mask, index, -1), query, draws)


def example_batch(fetch: Fetch, phase: Phase, data: PyTree) -> Batch:
    """A batch of padding as a phase would read it, for its shapes."""
    key = jax.random.key(0)
    view = phase.view

    def padding(augment: bool, size: int) -> Batch:
        none = jnp.zeros(size, jnp.int32)
        return _read(fetch, augment, data, none, none, none > 0, key, key)

    batch = padding(view.augment, view.batch_size)
    batch = join_batches(batch, padding(False, view.replay)) if phase.replay else batch
    return batch._replace(measured=jnp.zeros((), bool)) if phase.measures else batch


def context_of(call: Call, slot) -> ClientContext:
    """What the client in a slot may read."""
    chunk = call.chunk
    task = call.task if chunk.task is None else _at(chunk.task, slot)
    info = ClientInfo(chunk.id[slot], chunk.count[slot], chunk.class_examples[slot], jnp.asarray(chunk.round))
    return ClientContext(call.frozen, call.broadcast.payload, call.broadcast.cached, task, info)


def _client_key(key: PRNGKeyArray, chunk: Chunk, slot, purpose: int) -> PRNGKeyArray:
    client_key = jax.random.fold_in(jax.random.fold_in(key, RoundKey.CLIENT), chunk.id[slot])
    return jax.random.fold_in(client_key, purpose)


# ---- pytrees -----------------------------------------------------------------------------------------------


def _at(tree: PyTree, index) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _write(index: Array, buffer: PyTree, new: PyTree) -> PyTree:
    """The buffer with the entries at these indices replaced; indices beyond its end are ignored."""
    return jax.tree.map(lambda old, x: old.at[index].set(x, mode="drop"), buffer, new)


def _zeros(shapes: PyTree, lead: tuple[int, ...] = ()) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), shapes)


def select(mask: Array, new: PyTree, old: PyTree) -> PyTree:
    """The leaves of `new` where the mask, which has their leading axes, is True, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(broadcast_left(mask, b), a, b), new, old)


def squeeze(tree: PyTree) -> PyTree:
    """Arrays [1, ...] without their first axis."""
    return jax.tree.map(lambda x: x[0], tree)


def expand(tree: PyTree) -> PyTree:
    """Arrays with a first axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
