"""The compiled loop over the clients of a round, and their uploads.

Everything here runs inside jit; `engine.py` compiles and calls it. Lanes run side by
side, and each trains its clients one after the other, by a table of the host
(`schedule.py`). Read `run_ticks` first: clients start, every lane takes a step, clients
finish.

A client's upload depends on (seed, task, round, client id) and its examples only: every
draw is keyed that way, never by lane, device, slot or other participants.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from fcljax.federated.claims import claims_hold
from fcljax.federated.communication import num_bytes
from fcljax.federated.health import GRADIENT_NORM, SHARE
from fcljax.federated.keys import ClientKey, RoundKey, StepKey, fold
from fcljax.federated.schedule import Capacity, Chunk
from fcljax.federated.sums import add_stacked, broadcast_left, finite_guard, is_finite, sum_zeros
from fcljax.mesh import AXIS, WHOLE, AnyMesh, add_over_devices, rows_on, split, take_rows, write_rows
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


@runtime_checkable
class Fetch(Protocol):
    """Reads examples of the data, whatever form that has."""

    def __call__(
        self, data: PyTree, index: Int[Array, " B"], keys: Key[Array, " B"], augment: bool, /
    ) -> tuple[PyTree, Array, Array | None]:
        """Return the input, leaves [B, ...], label [B], and query [B, D] or None."""
        ...


class Lanes(NamedTuple):
    """The clients that run at the same time, and how they are computed."""

    count: int = 1
    """Number of lanes."""
    mode: str = "loop"
    """`loop` (one after the other), `vmap` (batched) or `unroll` (a copy of the code
    each)."""


class Shapes(NamedTuple):
    """Shapes and types of the arrays of a program, as `jax.ShapeDtypeStruct`."""

    local: PyTree  # a client's local state
    upload: Upload  # one client's upload
    metrics: tuple[Metrics, ...]  # of each phase
    state: PyTree  # a client's state between rounds
    # leaves of `local` that are stored after each phase but the last
    stored_leaves: tuple[frozenset[int], ...]


def slot_bytes(shapes: Shapes) -> int:
    """Return the bytes that a chunk needs per client.

    They are those of its gathered upload, its state, and its leaves stored between phases.
    """
    return num_bytes((shapes.upload.gather, shapes.state, _leaves_between_phases(shapes)))


def _leaves_between_phases(shapes: Shapes) -> list:
    """Return the leaves of the local state, with None for those not stored between phases."""
    stored = _stored_before(shapes, len(shapes.stored_leaves))
    return [leaf if i in stored else None for i, leaf in enumerate(jax.tree.leaves(shapes.local))]


def _stored_before(shapes: Shapes, phase_index: int) -> frozenset[int]:
    """Return the leaves that must be stored before a phase.

    `Program.start` recomputes the others, which no phase has changed or none reads.
    """
    return frozenset().union(*shapes.stored_leaves[:phase_index])


class Accumulator(NamedTuple):
    """The uploads received so far, of a round with P participants or of one chunk.

    A chunk's accumulator has an entry per slot instead of one per participant. Sums are
    in float32 at least. On a mesh every device has all sums, and an equal part of the
    clients' entries, whose number is a multiple of the devices.
    """

    mean: PyTree  # sum of weight * leaf
    sum: PyTree  # sum of the leaves
    gather: PyTree  # leaves [P, ...]
    weight: Float[Array, " P"]  # of each client
    id: Int[Array, " P"]  # of each client; K in an empty entry
    valid: Bool[Array, " P"]  # whether the upload has arrived and was accepted
    rejected: Int[Array, ""]  # uploads that were not finite, or had an impossible claim
    impossible: Int[Array, " claims"]  # uploads in which each claim was impossible
    metrics: tuple[Metrics, ...]  # sums of each phase's metrics


# fields of an accumulator with an entry for each client
_CLIENT_FIELDS = ("gather", "weight", "id", "valid")


class Carry(NamedTuple):
    """The state between two ticks."""

    local: PyTree  # local states of the clients in the lanes, leaves [L, ...]
    accumulator: Accumulator  # uploads of the chunk's clients
    states: PyTree  # states of the chunk's clients, leaves [S, ...]
    written: Bool[Array, " S"]  # which states are new
    # leaves [S, ...] of local states that are stored between phases, or None
    stored: list


class Call(NamedTuple):
    """The inputs of all ticks of a chunk."""

    frozen: PyTree  # arrays that never train
    broadcast: Broadcast
    chunk: Chunk  # the clients that take part
    task: Task  # the round's task
    key: PRNGKeyArray  # of the round
    # whether every upload is checked as it arrives. False is the fast path, where
    # `is_sound` checks the sums once per chunk
    guarded: Bool[Array | np.bool_, ""]


# How the devices of a mesh share these arrays: each has an equal part of the clients'
# entries, and a copy of everything else.
ACCUMULATOR_SPECS = Accumulator(
    # pyrefly: ignore[bad-argument-type]  # a tree of specifications
    *[split() if name in _CLIENT_FIELDS else WHOLE for name in Accumulator._fields]
)
# pyrefly: ignore[bad-argument-type]
CHUNK_SPECS = Chunk(*[split()] * 7, tables=split(1), ticks=WHOLE, round=WHOLE, task=split())
# pyrefly: ignore[bad-argument-type]
CALL_SPECS = Call(frozen=WHOLE, broadcast=WHOLE, chunk=CHUNK_SPECS, task=WHOLE, key=WHOLE, guarded=WHOLE)


class ReplayData(NamedTuple):
    """The replay buffers of a chunk's clients.

    Without `Program.replay_buffer` both arrays are empty."""

    data: PyTree  # data that hold the examples
    # their indices in the training set, -1 for none
    index: Int[Array | np.ndarray, "S M"]
    place: Int[Array | np.ndarray, "S M"]  # their indices in `data`


class Merging(NamedTuple):
    """The progress of merging a round's chunks, on the device so that the host need not wait."""

    # number of merged chunks, from the first
    chunks: Int[Array | np.ndarray | np.int32, ""]
    current: Int[Array | np.ndarray | np.int32, ""]  # index of the chunk that ends now
    # whether its uploads were checked as they arrived
    guarded: Bool[Array | np.bool_, ""]


class TickWindow(NamedTuple):
    """Consecutive ticks of a phase, with their examples in the data on the device."""

    data: PyTree  # what `Fetch` reads
    index: Int[Array, "ticks L B"]  # indices in the training set, -1 for padding
    place: Int[Array, "ticks L B"]  # indices in `data`
    first: Int[Array | np.ndarray | np.int32, ""]  # number of the first tick
    ticks: Int[Array | np.ndarray | np.int32, ""]  # number of ticks to run


class PhaseLoop(NamedTuple):
    """The static part of the loop over one phase."""

    program: Program
    phase_index: int
    fetch: Fetch  # reads examples
    lanes: Lanes  # of one device
    widths: tuple[int, ...]  # batch sizes that a step is compiled for, ascending
    # whether a lane may be idle while others work; its client must then stay as it is
    waits: bool
    shapes: Shapes  # of the program's arrays

    @property
    def phase(self) -> Phase:
        """Return the phase of the program."""
        return self.program.phases[self.phase_index]


def batches_alone(lanes: Lanes) -> bool:
    """Return whether lanes can compute batches of different sizes."""
    # under vmap a switch between sizes computes all of them and selects one
    return lanes.count == 1 or lanes.mode != "vmap"


def over_lanes(function: Callable, lanes: Lanes) -> Callable:
    """Return `function` of one lane as a function of arguments stacked over lanes.

    All modes give the same numbers up to rounding.
    """

    def only_lane(*args: PyTree) -> PyTree:
        # without vmap: a batched convolution or matmul of one lane is slower on a CPU
        return expand(function(*squeeze(args)))

    def unrolled_lanes(*args: PyTree) -> PyTree:
        return _stack([function(*_at(args, lane)) for lane in range(lanes.count)])

    def looped_lanes(*args: PyTree) -> PyTree:
        return jax.lax.map(lambda args_of_lane: function(*args_of_lane), args)

    if lanes.count == 1:
        return only_lane
    if lanes.mode == "vmap":
        return jax.vmap(function)
    if lanes.mode == "unroll":
        return unrolled_lanes
    return looped_lanes


# ---- uploads that a round receives -----------------------------------------------------


def empty_accumulator(
    shapes: Shapes, capacity: Capacity, claims: int, mesh: AnyMesh | None = None
) -> Accumulator:
    """Return an accumulator without uploads.

    Args:
      shapes: of uploads and metrics.
      capacity: of the round.
      claims: number of claims per upload.
      mesh: of the devices.
    """
    entries = rows_on(mesh, capacity.participants)
    return Accumulator(
        # float32 at least: a large bfloat16 sum would not change by a small addend
        mean=sum_zeros(shapes.upload.mean, floating=True),
        sum=sum_zeros(shapes.upload.sum),
        gather=_zeros(shapes.upload.gather, (entries,)),
        weight=jnp.zeros(entries),
        # K marks an empty entry: no client has this number
        id=jnp.full(entries, capacity.clients, jnp.int32),
        valid=jnp.zeros(entries, bool),
        rejected=jnp.zeros((), jnp.int32),
        impossible=jnp.zeros(claims, jnp.int32),
        metrics=sum_zeros(shapes.metrics, floating=True),
    )


def _add_uploads(
    accumulator: Accumulator,
    upload: Upload,
    possible: Bool[Array, "L claims"],
    client_id: Int[Array, " L"],
    position: Int[Array, " L"],
    ends: Bool[Array, " L"],
    guarded: Bool[Array, ""],
) -> tuple[Accumulator, Bool[Array, " L"]]:
    """Add the uploads of the clients that have just finished; also return which are valid.

    If guarded, non-finite uploads and uploads of negative weight get weight 0 and are
    counted. Otherwise they are added too, and `is_sound` finds them at the end of the
    chunk.

    Args:
      accumulator: uploads received so far.
      upload: of the client in each lane, leaves [L, ...].
      possible: whether each claim is possible; an upload with an impossible one is left out.
      client_id: of the client in each lane.
      position: of each client among the gathered uploads.
      ends: whether each client has just finished.
      guarded: whether each upload is checked.
    """
    # the weight may be a Python number; finite_guard compares arrays
    weight = jnp.broadcast_to(jnp.asarray(upload.weight, jnp.float32), ends.shape)
    impossible = ends[:, None] & ~possible
    ends = ends & jnp.all(possible, axis=1)
    weight, valid, rejected = jax.lax.cond(
        guarded,
        # the sums at the end of a chunk do not show which client's upload was bad
        lambda: finite_guard(upload._replace(weight=weight), weight, ends),
        lambda: (jnp.where(ends, weight, 0), ends, jnp.zeros((), jnp.int32)),
    )
    # clients without a valid upload write beyond the end, which `_write` drops: a `cond`
    # around the writes would copy the whole accumulator
    write = functools.partial(_write, jnp.where(valid, position, accumulator.valid.shape[0]))
    accumulator = accumulator._replace(
        mean=add_stacked(accumulator.mean, upload.mean, valid, weight),
        sum=add_stacked(accumulator.sum, upload.sum, valid),
        gather=write(accumulator.gather, upload.gather),
        weight=write(accumulator.weight, weight),
        id=write(accumulator.id, client_id),
        valid=write(accumulator.valid, valid),
        rejected=accumulator.rejected + rejected + jnp.sum(jnp.any(impossible, axis=1), dtype=jnp.int32),
        impossible=accumulator.impossible + jnp.sum(impossible, axis=0, dtype=jnp.int32),
    )
    return accumulator, valid


def is_sound(accumulator: Accumulator) -> Bool[Array, ""]:
    """Return whether all uploads are finite, with weights that are not negative.

    A single non-finite upload makes a sum or an entry non-finite. Sums of finite uploads
    may also overflow: then no client is at fault, and the guarded rerun gives the same
    sums.
    """
    received = (accumulator.mean, accumulator.sum, accumulator.gather, accumulator.weight)
    return is_finite(received) & jnp.all(accumulator.weight >= 0)


def receive_sent(
    program: Program,
    accumulator: Accumulator,
    context: ClientContext,
    upload: Upload,
    position: Array,
) -> tuple[Accumulator, Array]:
    """Add one upload from another machine, as the uploads of lanes are added.

    Args:
      program: of the upload; its `receive` acts on it first.
      accumulator: uploads received so far.
      context: of the client, with its id.
      upload: as the client sent it.
      position: of the client among the round's participants in the order of their ids.

    Returns:
      The accumulator with the upload, and whether the upload is valid.
    """
    possible = claims_hold(program, context, upload)
    if program.receive is not None:
        upload = program.receive(context, upload)
    # one upload is a round of one lane, so that both ways share all checks
    ends = jnp.ones(1, bool)
    accumulator, valid = _add_uploads(
        accumulator,
        expand(upload),
        possible[None],
        client_id=context.client.id[None],
        position=position[None],
        ends=ends,
        guarded=ends[0],
    )
    return accumulator, valid[0]


# ---- chunks ----------------------------------------------------------------------------


def chunk_accumulator(accumulator: Accumulator, chunk: Chunk) -> Accumulator:
    """Return an empty accumulator for the uploads of the chunk's clients.

    It has an entry per slot, not per participant, because it is part of the loop's carry,
    which is cleared and copied for every chunk.
    """
    empty = jax.tree.map(jnp.zeros_like, accumulator)
    slots = len(chunk.id)

    def by_slot(name: str) -> PyTree:
        entries = getattr(accumulator, name)
        return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype), entries)

    return empty._replace(**{name: by_slot(name) for name in _CLIENT_FIELDS})


def states_of_chunk(states: PyTree, chunk: Chunk, capacity: Capacity, mesh: AnyMesh | None = None) -> PyTree:
    """Return the states [S, ...] of the chunk's clients.

    On a mesh, a device gets the states of its clients from all devices.
    """
    # a padding slot reads the last client's state, and its result is never written
    return take_rows(states, jnp.minimum(chunk.id, capacity.clients - 1), mesh)


def open_chunk(shapes: Shapes, lanes: Lanes, accumulator: Accumulator, states: PyTree, chunk: Chunk) -> Carry:
    """Return the carry before the first tick of a chunk."""
    slots = chunk.id.shape[0]
    stored = _zeros(_leaves_between_phases(shapes), (slots,))
    local = _zeros(shapes.local, (lanes.count,))
    return Carry(local, accumulator, states, written=jnp.zeros(slots, bool), stored=stored)


def close_chunk(
    accumulator: Accumulator,
    states: PyTree,
    carry: Carry,
    chunk: Chunk,
    merging: Merging,
    capacity: Capacity,
    mesh: AnyMesh | None = None,
) -> tuple[Accumulator, PyTree, Int[Array, ""]]:
    """Merge the uploads and new states of a chunk, if all uploads are sound and it is next.

    On a mesh, the devices exchange the entries of the clients.

    Returns:
      The accumulator of the round, all clients' states, and the number of merged chunks.
    """
    received = carry.accumulator
    # guarded chunks have left out their bad uploads already
    merges = jax.lax.cond(merging.guarded, lambda: jnp.asarray(True), lambda: is_sound(carry.accumulator))
    if mesh is not None:
        # a bad upload on one device prevents merging on all of them
        merges = ~add_over_devices(~merges, mesh)
    # only after all earlier chunks: the order of additions decides the bits
    merges &= merging.chunks == merging.current
    if mesh is not None:
        received = over_devices(received, mesh)
    # entries that must not be written get an index beyond the end of every array
    beyond_end = jnp.iinfo(jnp.int32).max
    client = jnp.where(carry.written & merges, chunk.id, beyond_end)
    states = write_rows(states, client, carry.states, mesh)
    position = jnp.where(received.valid & merges, chunk.position, beyond_end)

    def add(total: Array, of_chunk: Array) -> Array:
        # booleans mean "in any chunk"
        if total.dtype == bool:
            return jnp.where(merges, total | of_chunk, total)
        return jnp.where(merges, total + of_chunk, total)

    entries = write_rows(_entries(accumulator), position, _entries(received), mesh)
    sums = jax.tree.map(add, _sums(accumulator), _sums(received))
    return Accumulator(**entries, **sums), states, jnp.asarray(merging.chunks + merges)


def _entries(accumulator: Accumulator) -> dict[str, PyTree]:
    """Return the fields with an entry for each client."""
    return {name: getattr(accumulator, name) for name in _CLIENT_FIELDS}


def _sums(accumulator: Accumulator) -> dict[str, PyTree]:
    """Return the fields that are sums over clients."""
    return {name: value for name, value in accumulator._asdict().items() if name not in _CLIENT_FIELDS}


def replay_indices(program: Program, states: PyTree, chunk: Chunk) -> Int[Array, "S M"]:
    """Return the examples that the chunk's clients, with these states [S, ...], may replay.

    Padding slots, which have another client's state, replay none.
    """
    if program.replay_buffer is None:
        return jnp.zeros((chunk.id.shape[0], 0), jnp.int32)
    return jnp.where(chunk.count[:, None] > 0, jax.vmap(program.replay_buffer)(states), -1)


def over_devices(received: Accumulator, mesh: AnyMesh) -> Accumulator:
    """Return a device's accumulator with the sums of all devices.

    Floating-point sums are added in the order of the devices, so that bits are reproducible.
    """

    def add_in_order(tree: PyTree) -> PyTree:
        return jax.tree.map(functools.partial(add_over_devices, mesh=mesh), tree)

    return received._replace(
        mean=add_in_order(received.mean),
        sum=add_in_order(received.sum),
        metrics=add_in_order(received.metrics),
        rejected=jax.lax.psum(received.rejected, AXIS),
        impossible=jax.lax.psum(received.impossible, AXIS),
    )


# ---- the loop --------------------------------------------------------------------------


def run_ticks(
    loop: PhaseLoop, call: Call, carry: Carry, window: TickWindow, replay_data: ReplayData
) -> Carry:
    """Run the ticks of a window in one phase.

    At each tick every lane takes one step of the client that its table names, with the
    smallest compiled batch size that holds the step's examples.
    """
    phase = loop.phase
    table = jax.tree.map(jnp.asarray, call.chunk.tables[loop.phase_index])
    widths = loop.widths
    if not batches_alone(loop.lanes):
        widths = loop.widths[-1:]

    def step_of_lane(tick, lane, slot, step, active, term, local):
        keys = _step_keys(call, loop.phase_index, slot, step)
        index = window.index[tick - window.first, lane]
        place = window.place[tick - window.first, lane]
        mask = index >= 0
        context = context_of(call, slot)

        def step_at_width(width: int) -> tuple[PyTree, Metrics]:
            read = functools.partial(_read, loop.fetch, phase.view.augment, window.data)
            batch = read(index[:width], place[:width], mask[:width], keys.images, keys.examples)
            if phase.replay is not None:
                replayed = _read_replayed(loop.fetch, phase, context, replay_data, slot, local, keys)
                batch = join_batches(batch, replayed)
            batch = batch._replace(term_weights=term_weights(phase, term))
            return phase.step(context, local, batch, keys.update)

        new_local, metrics = _at_width(step_at_width, widths, mask)
        if loop.waits or phase.terms:
            # an idle lane takes a step on padding, and a step that measures a term is
            # not taken: both leave the client as it is
            new_local = select(active & (term < 0), new_local, local)
        return new_local, recorded(phase, metrics, active, term)

    step_lanes = over_lanes(step_of_lane, loop.lanes)

    def run_tick(tick: Array, carry: Carry) -> Carry:
        row = _at(table, tick)
        starts = row.start > 0
        ends = row.end > 0
        active = row.active > 0
        # Clients start and finish at few ticks. The `cond` is outside of the lanes' vmap,
        # which would turn it into a `select` that runs both branches at every tick.
        local = jax.lax.cond(
            jnp.any(starts), lambda: _start_clients(loop, call, row.slot, starts, carry), lambda: carry.local
        )
        ticks = jnp.full_like(row.slot, tick)
        lane = jnp.arange(loop.lanes.count)
        local, metrics = step_lanes(ticks, lane, row.slot, row.step, active, row.term, local)
        accumulator = _add_metrics(carry.accumulator, loop.phase_index, metrics)
        carry = carry._replace(local=local, accumulator=accumulator)
        return jax.lax.cond(
            jnp.any(ends), lambda: _finish_clients(loop, call, row.slot, ends, carry), lambda: carry
        )

    # the trip count is data, so one trace serves rounds of any length
    return jax.lax.fori_loop(window.first, window.first + window.ticks, run_tick, carry)


def _start_clients(
    loop: PhaseLoop,
    call: Call,
    slot: Int[Array, " L"],
    starts: Bool[Array, " L"],
    carry: Carry,
) -> PyTree:
    """Return the lanes' local states, with those of the clients that start the phase.

    Leaves that no earlier phase stored are recomputed by `Program.start`.
    """
    stored = _stored_before(loop.shapes, loop.phase_index)

    def start(slot: Int[Array, ""]) -> list:
        key = fold(_client_key(call, slot), ClientKey.START)
        local = loop.program.start(context_of(call, slot), _at(carry.states, slot), key)
        return [None if i in stored else leaf for i, leaf in enumerate(jax.tree.leaves(local))]

    # XLA removes the computation of leaves that are replaced by stored ones
    leaves = []
    for recomputed, stored_leaf in zip(over_lanes(start, loop.lanes)(slot), carry.stored, strict=True):
        leaves.append(stored_leaf[slot] if recomputed is None else recomputed)
    local = jax.tree.unflatten(jax.tree.structure(carry.local), leaves)
    if loop.lanes.count == 1:
        # the caller has checked that a lane starts, and there is only one
        return local
    return select(starts, local, carry.local)


def _finish_clients(
    loop: PhaseLoop,
    call: Call,
    slot: Int[Array, " L"],
    ends: Bool[Array, " L"],
    carry: Carry,
) -> Carry:
    """Store the leaves that later phases need; after the last phase, upload."""
    slots = call.chunk.id.shape[0]
    if loop.phase_index < len(loop.program.phases) - 1:
        # lanes in the middle of a client write beyond the last slot, which is dropped
        ending_slot = jnp.where(ends, slot, slots)
        stored = list(carry.stored)
        for i, leaf in enumerate(jax.tree.leaves(carry.local)):
            if i in loop.shapes.stored_leaves[loop.phase_index]:
                stored[i] = _write(ending_slot, stored[i], leaf)
        return carry._replace(stored=stored)

    def finish(slot: Int[Array, ""], local: PyTree) -> tuple[Upload, Array, PyTree]:
        context = context_of(call, slot)
        upload, state = loop.program.finish(context, local, _at(carry.states, slot))
        # claims are those of the client, before the server's `receive` changes the upload
        possible = claims_hold(loop.program, context, upload)
        if loop.program.receive is not None:
            upload = loop.program.receive(context, upload)
        return upload, possible, state

    upload, possible, states = over_lanes(finish, loop.lanes)(slot, carry.local)
    client_id = call.chunk.id[slot]
    guarded = jnp.asarray(call.guarded)
    accumulator, valid = _add_uploads(carry.accumulator, upload, possible, client_id, slot, ends, guarded)
    # a client whose upload is rejected keeps its old state
    valid_slot = jnp.where(valid, slot, slots)
    written = carry.written.at[valid_slot].set(True, mode="drop")
    states = _write(valid_slot, carry.states, states)
    return carry._replace(accumulator=accumulator, states=states, written=written)


def _at_width(
    function: Callable[[int], PyTree],
    widths: tuple[int, ...],
    mask: Bool[Array, " B"],
) -> PyTree:
    """Return function(width) for the smallest of the ascending widths that holds the examples.

    Real examples come before padding, and draws per example are the same for every width.
    A step whose result's shape depends on the batch size is computed at the full width.
    """

    def result_shapes(width: int) -> PyTree:
        return jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(lambda: function(width)))

    full = widths[-1]
    if len(widths) == 1 or any(result_shapes(width) != result_shapes(full) for width in widths[:-1]):
        return function(full)
    # the first width that is at least the number of examples
    index = jnp.searchsorted(jnp.asarray(widths), jnp.sum(mask))
    return jax.lax.switch(index, [functools.partial(function, width) for width in widths])


def term_weights(phase: Phase, term: Int[Array, ""]) -> Float[Array, " terms"] | None:
    """Return the factors of the loss's terms: 1 for `term`, 0 for others; -1: 1 for all."""
    if not phase.terms:
        return None
    measured = jnp.arange(len(phase.terms)) == term
    return jnp.where((term < 0) | measured, 1.0, 0.0)


def recorded(
    phase: Phase,
    metrics: Metrics,
    active: Bool[Array, ""],
    term: Int[Array, ""],
) -> Metrics:
    """Return what a tick adds to its phase's metrics.

    A training step adds its metrics. A step that measures a term of the loss adds the
    norm of the term's gradient to the total of that term's share, and to the weight of
    every term's share.
    """
    of_training = {name: _countable(metric, active & (term < 0)) for name, metric in metrics.items()}
    if not phase.terms:
        return of_training
    # the gradient's norm is there to compare terms, and is no metric of training
    norm = metrics[GRADIENT_NORM].total
    del of_training[GRADIENT_NORM]
    # `tiny`, so that a loss without any gradient has shares of 0, not NaN
    weight = norm + jnp.finfo(norm.dtype).tiny
    shares = {
        SHARE + name: _countable(Weighted(jnp.where(term == i, norm, 0), weight), active & (term >= 0))
        for i, name in enumerate(phase.terms)
    }
    return of_training | shares


def _countable(metric: Weighted, active: Array) -> Weighted:
    """Return the metric, or zeros where the lane is idle or the value is not finite: a
    client that diverges must not hide the others' loss."""
    counts = active & jnp.isfinite(metric.total) & jnp.isfinite(metric.weight)
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), metric)


def _add_metrics(
    accumulator: Accumulator,
    phase_index: int,
    metrics: Metrics,
) -> Accumulator:
    """Add the phase's metrics [L] of the lanes."""

    def add(total: Array, of_lanes: Array) -> Array:
        return total + jnp.sum(of_lanes, axis=0, dtype=total.dtype)

    totals = list(accumulator.metrics)
    totals[phase_index] = jax.tree.map(add, totals[phase_index], metrics)
    return accumulator._replace(metrics=tuple(totals))


# ---- keys ------------------------------------------------------------------------------


class _StepKeys(NamedTuple):
    """The keys of one step of a client."""

    images: PRNGKeyArray  # augmentation
    update: PRNGKeyArray  # `Phase.step` and `Phase.replay`
    examples: PRNGKeyArray  # draws that belong to examples, the same for all clients


def _step_keys(call: Call, phase_index: int, slot: Int[Array, ""], step: Int[Array, ""]) -> _StepKeys:
    step_key = fold(_client_key(call, slot), ClientKey.PHASES + phase_index, step)
    return _StepKeys(
        images=fold(step_key, StepKey.IMAGES),
        update=fold(step_key, StepKey.UPDATE),
        examples=fold(call.key, RoundKey.EXAMPLE_DRAWS, phase_index, step),
    )


def _client_key(call: Call, slot: Int[Array, ""]) -> PRNGKeyArray:
    return fold(call.key, RoundKey.CLIENT, call.chunk.id[slot])


# ---- examples --------------------------------------------------------------------------


def indices_of_ticks(
    phase: Phase, phase_index: int, chunk: Chunk, key: PRNGKeyArray
) -> Int[Array, "ticks lanes B"]:
    """Return the training examples that each lane reads at each tick of a phase; -1: padding."""
    table = chunk.tables[phase_index]
    order = _example_order(phase, phase_index, chunk, key)

    def examples_of_lane(slot, step, active):
        examples, mask = _batch_indices(phase, chunk, order, slot, step)
        return jnp.where(mask & (active > 0), examples, -1)

    columns = map(jnp.asarray, (table.slot, table.step, table.active))
    return jax.vmap(jax.vmap(examples_of_lane))(*columns)


def _example_order(
    phase: Phase, phase_index: int, chunk: Chunk, key: PRNGKeyArray
) -> Int[Array, "epochs examples"]:
    """Return the order of the examples in every epoch, as positions in chunk.indices.

    They are sorted by client and, within a client, by a uniform draw per training
    example. The draw belongs to (seed, task, round, phase, epoch, example), so a
    client's order does not depend on the other participants.
    """
    position = jnp.arange(chunk.indices.shape[0], dtype=jnp.int32)
    phase_key = fold(key, RoundKey.EXAMPLE_ORDER, phase_index)

    def shuffled(epoch: Array) -> Array:
        epoch_key = jax.random.fold_in(phase_key, epoch)
        draw = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(epoch_key, i)))(chunk.indices)
        # by client, then by draw: one sort shuffles all clients' examples within them
        return jax.lax.sort((jnp.asarray(chunk.slot_of_example), draw, position), num_keys=2)[2]

    if not phase.view.shuffle:
        return jnp.broadcast_to(position, (phase.view.epochs, position.shape[0]))
    return jax.lax.map(shuffled, jnp.arange(phase.view.epochs))


def _batch_indices(
    phase: Phase, chunk: Chunk, order, slot, step
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Return the training examples of a client's step, and a mask of those that are real.

    The last batch of an epoch may be partial.
    """
    batch_size = phase.view.batch_size
    count = chunk.count[slot]
    steps_per_epoch = jnp.maximum(-(-count // batch_size), 1)
    number = (step % steps_per_epoch) * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    mask = number < count
    position = order[step // steps_per_epoch, jnp.where(mask, chunk.offset[slot] + number, 0)]
    return chunk.indices[position], mask


def _read_replayed(
    fetch: Fetch,
    phase: Phase,
    context: ClientContext,
    replay_data: ReplayData,
    slot,
    local,
    keys: _StepKeys,
) -> Batch:
    """Read the examples that the client chooses to replay in this step, not augmented.

    Choices outside its replay buffer are padding.
    """
    assert phase.replay is not None
    chosen = phase.replay(context, local, keys.update)
    size = replay_data.index.shape[1]
    inside = jnp.clip(chosen, 0, size - 1)
    index = replay_data.index[slot, inside]
    place = replay_data.place[slot, inside]
    mask = (chosen >= 0) & (chosen < size) & (index >= 0)
    return _read(fetch, False, replay_data.data, index, place, mask, keys.update, keys.examples)


def join_batches(batch: Batch, added: Batch) -> Batch:
    """Concatenate two batches. Cached features and keys are left out unless both have them."""

    def join(a: Array | None, b: Array | None) -> Array | None:
        if a is None or b is None:
            return None
        return jnp.concatenate([a, b])

    inputs, label, mask, index = jax.tree.map(join, batch[:4], added[:4])
    query = join(batch.query, added.query)
    return Batch(inputs, label, mask, index, query, keys=join(batch.keys, added.keys))


def _read(
    fetch: Fetch,
    augment: bool,
    data: PyTree,
    index: Int[Array, " B"],
    place: Int[Array, " B"],
    mask: Bool[Array, " B"],
    view_key: PRNGKeyArray,
    examples_key: PRNGKeyArray,
) -> Batch:
    """Read a batch. Its padding is zero, whatever the data contain there."""
    # one key per place in the batch, for augmentation
    view_keys = jax.random.split(view_key, index.shape[0])
    inputs, label, query = fetch(data, jnp.where(mask, place, 0), view_keys, augment)

    def clear_padding(array: Array) -> Array:
        return jnp.where(broadcast_left(mask, array), array, jnp.zeros_like(array))

    if query is not None:
        query = clear_padding(query)
    # one key per training example, whatever its place in the batch
    example_keys = jax.vmap(jax.random.fold_in, (None, 0))(examples_key, jnp.where(mask, index, 0))
    return Batch(
        input=jax.tree.map(clear_padding, inputs),
        label=clear_padding(label),
        mask=mask,
        index=jnp.where(mask, index, -1),
        query=query,
        keys=example_keys,
    )


def example_batch(fetch: Fetch, phase: Phase, data: PyTree) -> Batch:
    """Return a batch of padding as a phase would read it, for its shapes."""
    key = jax.random.key(0)

    def padding(augment: bool, size: int) -> Batch:
        index = jnp.zeros(size, jnp.int32)
        return _read(fetch, augment, data, index, index, index > 0, key, key)

    batch = padding(phase.view.augment, phase.view.batch_size)
    if phase.replay is not None:
        batch = join_batches(batch, padding(False, phase.view.replay))
    return batch._replace(term_weights=term_weights(phase, jnp.int32(-1)))


def context_of(call: Call, slot: Int[Array, ""]) -> ClientContext:
    """Return the context of the client in a slot."""
    chunk = call.chunk
    task = call.task
    if chunk.task is not None:
        task = _at(chunk.task, slot)
    client = ClientInfo(
        id=chunk.id[slot],
        examples=chunk.count[slot],
        class_examples=chunk.class_examples[slot],
        round=jnp.asarray(chunk.round),
    )
    return ClientContext(call.frozen, call.broadcast.payload, call.broadcast.cached, task, client)


# ---- pytrees ---------------------------------------------------------------------------


def _at(tree: PyTree, index) -> PyTree:
    """Return the entries of all leaves at an index."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _write(index: Array, buffer: PyTree, entries: PyTree) -> PyTree:
    """Replace the buffer's entries at these indices; indices beyond its end are dropped."""
    return jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), buffer, entries)


def _zeros(shapes: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), shapes)


def select(mask: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new` where the mask is True, else `old`.

    The mask has the leading axes of their leaves.
    """
    return jax.tree.map(lambda a, b: jnp.where(broadcast_left(mask, b), a, b), new, old)


def squeeze(tree: PyTree) -> PyTree:
    """Return arrays [1, ...] without their first axis."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def expand(tree: PyTree) -> PyTree:
    """Return arrays with a first axis of one."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
