"""Planning of a round on the host, in numpy: the participants, and the client that each
lane trains at each tick.

A lane runs its clients one after the other, so lanes are never padded to the longest
client. The longest clients are assigned first, each to the least loaded lane (LPT). The
tables have one shape for a whole run, so that every round of every task uses one
compiled program.
"""

import heapq
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from fcljax.errors import InputError
from fcljax.types import Method, Program, Task, View

Ints = Int[np.ndarray, "..."]
# counts of one client or of many, on the host or inside jit
Counts = Int[Array | np.ndarray | np.integer, "*clients"]

# A step is compiled for at most MOST_WIDTHS batch sizes, chosen from TRIED_WIDTHS
# candidates. A further size must save WORTH_SHARE of a run's examples, and at least
# WORTH_EXAMPLES: a CPU core trains so many in the time in which it compiles a ViT-Ti's step.
MOST_WIDTHS = 3
TRIED_WIDTHS = 256
WORTH_SHARE = 1 / 32
WORTH_EXAMPLES = 1000.0

# A device has at most MOST_LANES lanes, and no more than clients keep busy for a share
# of LEAST_USEFUL of their steps in TRIED_ROUNDS rounds.
MOST_LANES = 16
LEAST_USEFUL = 0.85
TRIED_ROUNDS = 16

# With more clients, participants are drawn without shuffling all ids: to shuffle a
# million takes longer than a round of 200 of them.
MOST_SHUFFLED = 100_000
# A device has slots for twice its even share of the clients, since lanes of equal work
# may have many small clients.
SLOT_FACTOR = 2

# Smaller batches are compiled as they are, however few examples clients have.
LARGE_BATCH = 1024


class ClientPartition(NamedTuple):
    """The clients that could take part in a round, and their training examples, in CSR
    form: client i has indices[offset[i]:offset[i + 1]]."""

    indices: Int[np.ndarray, " examples"]
    """Into the training set."""
    offset: Int[np.ndarray, " K+1"]
    """Where each client's indices begin and end."""
    class_examples: Int[np.ndarray, "K C"]
    """Each client's number of examples of each class."""
    task: Task | None = None
    """Each client's own task, leaves [K, ...]; None: all have the round's."""

    @property
    # pyrefly: ignore[bad-override]  # tuple.count is not used
    def count(self) -> Int[np.ndarray, " K"]:
        """Return each client's number of examples."""
        return np.diff(self.offset)

    def count_of(self, ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the number of examples of some clients, without computing those of
        all."""
        return self.offset[ids + 1] - self.offset[ids]

    def of_client(self, client: int | np.integer) -> Int[np.ndarray, " n"]:
        """Return the indices of one client's examples."""
        return self.indices[self.offset[client] : self.offset[client + 1]]


class Capacity(NamedTuple):
    """Static shapes of a run: the largest round decides."""

    clients: int
    """K, the entries of the client-state buffers."""
    participants: int
    """P, the entries of the gathered uploads."""
    slots: int
    """S, clients per chunk and device."""
    examples: int
    """Training examples per chunk and device."""
    ticks: tuple[int, ...]
    """Ticks of each phase's table."""
    widths: tuple[tuple[int, ...], ...]
    """For each phase, the batch sizes that a step is compiled for, see `step_widths`."""
    devices: int = 1
    """Devices that share the lanes; each has the slots of the clients that it trains."""


class LaneTable(NamedTuple):
    """The work of each lane at each tick of one phase."""

    # the client's slot, among those of the lane's device
    slot: Int[np.ndarray, "ticks lanes"]
    step: Int[np.ndarray, "ticks lanes"]  # number of the step, from 0
    start: Int[np.ndarray, "ticks lanes"]  # 1 at a client's first step
    end: Int[np.ndarray, "ticks lanes"]  # 1 at a client's last step
    active: Int[np.ndarray, "ticks lanes"]  # 0 where the lane is idle
    # term of the loss that the step measures, without an update; -1: a training step
    term: Int[np.ndarray, "ticks lanes"]


class Chunk(NamedTuple):
    """A group of participants that one call of the compiled program trains.

    Slots and examples of one device stand together, in the order of the devices, and
    what names a slot or an index of an example counts from the device's first. Padding
    slots have id K and position P, which no write reaches.
    """

    id: Int[np.ndarray, " slots"]  # client ids
    # index in the gathered uploads: the rank of the id among the round's participants
    position: Int[np.ndarray, " slots"]
    count: Int[np.ndarray, " slots"]  # examples of each client
    offset: Int[np.ndarray, " slots"]  # where each client's indices begin
    class_examples: Int[np.ndarray, "slots C"]  # examples of each client and class
    # training examples, client after client
    indices: Int[np.ndarray, " examples"]
    # slot of each example; padding has slot S, which sorts last
    slot_of_example: Int[np.ndarray, " examples"]
    tables: tuple[LaneTable, ...]  # one for each phase
    ticks: tuple[Ints, ...]  # ticks of each phase that are in use
    round: Ints  # number of the round within the task
    task: Task | None  # of each slot, leaves [slots, ...]; None: all have the round's


class Probe(NamedTuple):
    """The client that measures the terms of its loss in a round."""

    participant: int  # the largest participant has 0
    terms: tuple[int, ...]  # of the loss of each phase, if they are measured; else 0


def participants(
    seed: int,
    task: int,
    round_: int,
    eligible: Int[np.ndarray, " n"],
    participation: float,
) -> Int[np.ndarray, " m"]:
    """Return the sorted ids of uniformly sampled participants, without replacement.

    The sample depends on (seed, task, round) only.

    Args:
      seed, task, round_: of the sample.
      eligible: ids of the clients that could take part.
      participation: share of them that takes part, or their number if it is above 1.
    """
    count = _num_participants(participation, len(eligible))
    if count == len(eligible):
        return np.sort(eligible)
    # not from the JAX key: the plan is made on the host, without waiting for the device
    rng = np.random.default_rng([seed, task, round_])
    if len(eligible) > MOST_SHUFFLED:
        chosen = rng.choice(len(eligible), count, replace=False, shuffle=False)
    else:
        chosen = rng.permutation(len(eligible))[:count]
    return np.sort(eligible[chosen])


def _num_participants(participation: float, eligible: int) -> int:
    """Return how many clients take part: ceil(participation * eligible), or a number
    above 1 itself, at most all of them."""
    if participation > 1:
        return min(int(participation), eligible)
    # 0.07 * 100 is above 7 in floating point, and would be rounded up to 8 clients
    return int(np.ceil(participation * eligible - 1e-9))


def largest_batch(batch_size: int, examples: int) -> int:
    """Return the compiled batch size, at most the examples of the largest client.

    A step takes the same examples, without the padding.

    Args:
      batch_size: the user's.
      examples: the most that a client has; 0: not known.
    """
    if batch_size <= LARGE_BATCH or not examples:
        return batch_size
    return min(batch_size, examples)


def phase_steps(count: Counts, view: View) -> Counts:
    """Return the steps that a client with `count` examples takes in a phase.

    The last batch of an epoch may be partial; no example is dropped.
    """
    return view.epochs * -(-count // view.batch_size)


def phase_examples(count: Counts, view: View) -> Counts:
    """Return the most examples that a client with `count` of them reads in a phase."""
    return view.epochs * count + phase_steps(count, view) * view.replay


def step_widths(
    view: View,
    counts: Ints,
    worth: float = WORTH_EXAMPLES,
) -> tuple[int, ...]:
    """Choose the ascending batch sizes that a step is compiled for, up to the view's.

    The last batch of an epoch has the rest of a client's examples, and is padded to the
    next of these sizes. The size that saves most is added, then the next one, as long as
    one is worth its compilation.

    Args:
      view: batches and epochs of a phase.
      counts: examples of each client, in all rounds of the run together.
      worth: examples that a size must save in the run; their training takes as long as
        its compilation.
    """
    counts = counts[counts > 0]
    batch_size = view.batch_size
    # examples of each client's last batch, from 1 to the batch size
    last_batch, clients = np.unique((counts - 1) % batch_size + 1, return_counts=True)
    least_saving = max(worth, WORTH_SHARE * batch_size * int(phase_steps(counts, view).sum()))
    # only sizes of last batches can save anything; of many, an even selection is tried
    candidates = last_batch
    if len(last_batch):
        candidates = last_batch[np.unique(np.linspace(0, len(last_batch) - 1, TRIED_WIDTHS).astype(int))]

    def padded_examples(widths: tuple[int, ...]) -> int:
        """Return the examples of all last batches, padding included."""
        width_of_batch = np.asarray(widths)[np.searchsorted(widths, last_batch)]
        return view.epochs * int(np.sum(clients * width_of_batch))

    widths: tuple[int, ...] = (batch_size,)
    while len(widths) < MOST_WIDTHS and len(candidates):
        with_candidate = [tuple(sorted({*widths, int(width)})) for width in candidates]
        best = min(with_candidate, key=padded_examples)
        if padded_examples(widths) - padded_examples(best) < least_saving:
            break
        widths = best
    return widths


def pack(length: Ints, lanes: int) -> list[list[int]]:
    """Assign items to lanes, longest first, each to the least loaded lane.

    Ties go to the lower index, so the result is unique.
    """
    return pack_chunks(length, lanes)[0]


def pack_chunks(
    length: Ints, lanes: int, devices: int = 1, slots: int | None = None
) -> list[list[list[int]]]:
    """Assign items that only fit in several chunks, as `pack` does: for each chunk,
    each lane's items.

    A chunk ends where the least loaded lane belongs to a device whose slots are all
    taken; all lanes are about equally loaded then. Of equally loaded lanes the first
    one of each device comes first.

    Args:
      length: of each item.
      lanes: a multiple of `devices`, which have them in their order.
      devices: that share the lanes.
      slots: items that one device may have in a chunk; None: any number.
    """
    lanes_per_device = lanes // devices
    if slots is None:
        slots = len(length)

    def open_chunk() -> tuple[list[list[int]], list[tuple[int, int, int]], list[int]]:
        """Return each lane's items, a heap of (load, rank on its device, lane), and
        each device's used slots."""
        heap = sorted((0, lane % lanes_per_device, lane) for lane in range(lanes))
        return [[] for _ in range(lanes)], heap, [0] * devices

    queues, heap, used_slots = open_chunk()
    chunks = [queues]
    # longest first; a stable sort, so that the plan is the same on every machine
    for item in np.argsort(-length, kind="stable"):
        least_loaded_device = heap[0][2] // lanes_per_device
        if used_slots[least_loaded_device] == slots:
            queues, heap, used_slots = open_chunk()
            chunks.append(queues)
        load, rank, lane = heap[0]
        heapq.heapreplace(heap, (load + int(length[item]), rank, lane))
        queues[lane].append(int(item))
        used_slots[lane // lanes_per_device] += 1
    return chunks


def paying_lanes(
    program: Program,
    partitions: list[ClientPartition],
    devices: int,
    filled: float,
    participation: float = 1.0,
) -> int:
    """Return the number of lanes with which rounds are shortest.

    Arguments are those of `paying_mesh`.
    """
    return paying_mesh(program, partitions, devices, filled, participation, sharing=(1,))[0]


def paying_mesh(
    program: Program,
    partitions: list[ClientPartition],
    devices: int,
    filled: float,
    participation: float = 1.0,
    sharing: Iterable[int] = (1,),
) -> tuple[int, int]:
    """Return the number of lanes, and of devices that share a client's batch, with
    which rounds are shortest.

    Clients side by side cost no time until a device is full, and from then on as much
    as one after the other. Lanes that are idle for more than a few steps are left out,
    though never the last one of a device. Among equals, the fewest devices share a
    batch.

    Args:
      program: what clients do.
      partitions: one for each round of the run.
      devices: that share the lanes.
      filled: share of a device that one client's step fills; above 1 it is busy for as much longer.
      participation: share of the clients that take part in a round, or their number.
      sharing: devices that may share a batch, which must divide the devices.
    """
    tried = np.unique(np.linspace(0, len(partitions) - 1, TRIED_ROUNDS).astype(int)).tolist()
    counts = [_participants_examples(partitions[number], participation, number) for number in tried]

    # exact fractions, so that equal times compare as equal: with rounded ones more lanes
    # than needed could win by 1e-16
    exact_filled = Fraction(filled)

    def cost(shared: int, lanes_per_group: int) -> tuple[float | Fraction, int, int]:
        lanes = lanes_per_group * (devices // shared)
        steps = [round_steps(program, count, lanes) for count in counts]
        useful, ticks = np.sum(steps, axis=0)
        # lanes that are often idle; one lane per group is always allowed
        if lanes_per_group > 1 and useful < LEAST_USEFUL * lanes * ticks:
            return np.inf, shared, lanes_per_group
        # a tick costs the same until its clients fill the device
        time_of_tick = max(Fraction(1), lanes_per_group * exact_filled / shared)
        return int(ticks) * time_of_tick, shared, lanes_per_group

    _, shared, lanes_per_group = min(
        cost(shared, lanes_per_group) for shared in sharing for lanes_per_group in range(1, MOST_LANES + 1)
    )
    return lanes_per_group * (devices // shared), shared


def _participants_examples(
    partition: ClientPartition,
    participation: float,
    round_: int,
) -> Ints:
    """Return the examples of clients that could be a round's participants."""
    eligible = np.flatnonzero(partition.count)
    return partition.count_of(participants(0, 0, round_, eligible, participation))


def round_steps(program: Program, count: Ints, lanes: int) -> tuple[int, int]:
    """Return the steps that clients with `count` examples take in a round, and the
    ticks that the lanes need for them when all clients are in one chunk."""
    steps = np.array([phase_steps(count, phase.view) for phase in program.phases])
    queues = pack(steps.sum(axis=0), lanes)
    ticks = np.max([steps[:, queue].sum(axis=1) for queue in queues], axis=0)
    return int(steps.sum()), int(ticks.sum())


def tabulate(
    queues: list[list[int]],
    steps: Ints,
    capacity: int,
) -> tuple[LaneTable, int]:
    """Return the table of one phase, padded to `capacity` ticks, and its used ticks.

    Args:
      queues: the clients of each lane, as indices into `steps`.
      steps: of each client in the phase.
      capacity: length of the table.
    """
    table = _idle(capacity, len(queues))
    longest = 0
    for lane, queue in enumerate(queues):
        if not queue:
            continue
        queue_steps = steps[queue]
        ticks = int(queue_steps.sum())
        longest = max(longest, ticks)
        # one row per tick: the client, and the tick at which it starts
        slot = np.repeat(queue, queue_steps)
        first_tick = np.repeat(np.cumsum(queue_steps) - queue_steps, queue_steps)
        step = np.arange(ticks) - first_tick
        table.slot[:ticks, lane] = slot
        table.step[:ticks, lane] = step
        table.start[:ticks, lane] = step == 0
        table.end[:ticks, lane] = step == steps[slot] - 1
        table.active[:ticks, lane] = 1
    return table, longest


def _idle(ticks: int, lanes: int) -> LaneTable:
    """Return a table in which all lanes are idle."""
    table = LaneTable(*(np.zeros((ticks, lanes), np.int32) for _ in LaneTable._fields))
    # 0 is the first term of a loss, -1 a training step
    table.term[:] = -1
    return table


def with_probe(table: LaneTable, slot: int, step: int, terms: int) -> LaneTable:
    """Return a table with ticks before one step of one client, at which the gradients
    of its loss's terms are measured.

    All other lanes wait at these ticks, so that clients finish in the same order, and
    their uploads are added up in the same order, as without them.

    Args:
      table: of a phase, with at least `terms` ticks that are not in use.
      slot: of the client.
      step: the step, which is then taken.
      terms: of the loss.
    """
    ((tick, lane),) = np.argwhere((table.slot == slot) & (table.step == step) & (table.active > 0))
    probe = _idle(terms, table.slot.shape[1])
    probe.slot[:, lane] = slot
    probe.step[:, lane] = step
    probe.active[:, lane] = 1
    probe.term[:, lane] = np.arange(terms)
    # at the client's first step, its local state must exist before the first probe
    probe.start[0, lane] = table.start[tick, lane]
    table.start[tick, lane] = 0
    # inserted rows push unused ticks beyond the end of the table, where they are cut off
    ticks = len(table.slot)
    columns = zip(table, probe, strict=True)
    return LaneTable(*(np.insert(column, tick, rows, axis=0)[:ticks] for column, rows in columns))


def capacity(
    program: Program,
    partitions: list[ClientPartition],
    lanes: int,
    slots: int,
    participation: float = 1.0,
    worth: float = WORTH_EXAMPLES,
    devices: int = 1,
) -> Capacity:
    """Return shapes that hold every round of a run, for any subset of its clients.

    Args:
      program: what clients do.
      partitions: one for each round of the run.
      lanes: clients that run at a time.
      slots: the most clients per chunk and device, which bounds the memory between phases.
      participation: share of the clients that take part in a round, or their number.
      worth: as in `step_widths`.
      devices: that share the lanes evenly.
    """
    # descending: the first n clients are the worst case of a chunk of n clients
    counts = [np.sort(partition.count)[::-1] for partition in partitions]
    most = max(_num_participants(participation, int((count > 0).sum())) for count in counts)
    slots = max(1, min(slots, most, _slots_of_device(most, lanes, devices)))
    ticks = zip(*(_most_ticks(program, count[: devices * slots], lanes) for count in counts), strict=True)
    all_counts = np.concatenate(counts)
    return Capacity(
        clients=len(partitions[0].count),
        participants=max(1, most),
        slots=slots,
        examples=max(1, max(int(count[:slots].sum()) for count in counts)),
        ticks=tuple(map(max, ticks)),
        widths=tuple(step_widths(phase.view, all_counts, worth) for phase in program.phases),
        devices=devices,
    )


def _slots_of_device(clients: int, lanes: int, devices: int) -> int:
    """Return the most clients of a chunk that one device needs slots for: its lanes or,
    where there are more clients than lanes, `SLOT_FACTOR` times its share of them."""
    lanes_per_device = lanes // devices
    if clients <= lanes:
        return lanes_per_device
    return max(lanes_per_device, SLOT_FACTOR * -(-clients // devices))


def capacities(
    method: Method,
    partitions: list[ClientPartition],
    lanes: int,
    slots: int,
    participation: float = 1.0,
    worth: float = WORTH_EXAMPLES,
    devices: int = 1,
) -> tuple[Capacity, ...]:
    """Return the capacity of each of the method's rounds; arguments as in `capacity`."""
    participation_of = {"sampled": participation, "everyone": 1.0}
    return tuple(
        capacity(
            this_round.program,
            partitions,
            lanes,
            slots,
            participation_of[this_round.who],
            worth,
            devices,
        )
        for this_round in method.rounds
    )


def _most_ticks(program: Program, count: Ints, lanes: int) -> list[int]:
    """Return the most ticks per phase of any subset of clients with `count` examples.

    LPT never ends later than the mean load plus the longest job. But it balances whole
    programs, so the ticks of a single phase are only bounded by those of all phases
    together, and by the steps of the phase.
    """
    steps_by_phase = [phase_steps(count, phase.view) for phase in program.phases]
    steps = np.sum(steps_by_phase, axis=0)
    longest_lane = int(-(-steps.sum() // lanes) + steps.max(initial=0))
    most_ticks = []
    for phase, steps_of_phase in zip(program.phases, steps_by_phase, strict=True):
        # one more tick for each term of the loss that is measured
        most_ticks.append(min(longest_lane, int(steps_of_phase.sum())) + len(phase.terms))
    return most_ticks


def plan_round(
    program: Program,
    partition: ClientPartition,
    ids: Int[np.ndarray, " n"],
    round_: int,
    lanes: int,
    capacity: Capacity,
    measured: int = 0,
) -> tuple[list[Chunk], tuple[int, int]]:
    """Plan the chunks of one round.

    Chunks have clients of similar size, so that no lane waits long for another.

    Args:
      program: what clients do.
      partition: the clients' examples.
      ids: sorted ids of the clients that take part; those without examples are absent.
      round_: number of the round within the task.
      lanes: of all devices.
      capacity: the static shapes.
      measured: number of the participant that measures the terms of its loss, modulo
        their number.

    Returns:
      The chunks, and the round's steps: those of clients, and lanes times ticks, idle
        ones included. Their ratio is the slot efficiency.

    Raises:
      InputError: more participants than the capacity was made for, which has no entry for
        their uploads.
    """
    ids = ids[partition.count_of(ids) > 0]
    if len(ids) > capacity.participants:
        raise InputError(
            f"ids: {len(ids)} clients take part, but the capacity is {capacity.participants}; raise its "
            f"participation"
        )
    if not len(ids):
        return [], (0, 0)
    count = partition.count_of(ids)
    by_size = np.argsort(-count, kind="stable")
    steps = np.array([phase_steps(count[by_size], phase.view) for phase in program.phases])
    packed = pack_chunks(steps.sum(axis=0), lanes, capacity.devices, capacity.slots)
    terms = tuple(len(phase.terms) for phase in program.phases)
    probe = Probe(int(np.flatnonzero(by_size == measured % len(ids))[0]), terms)
    chunks = [
        _plan_chunk(partition, ids[by_size], by_size, steps, queues, round_, capacity, probe)
        for queues in packed
    ]
    paid_steps = lanes * sum(int(ticks) for chunk in chunks for ticks in chunk.ticks)
    # ticks that only measure a term of the loss are no training
    return chunks, (int(steps.sum()), paid_steps - lanes * sum(terms))


def _plan_chunk(
    partition: ClientPartition,
    ids: Ints,
    rank: Ints,
    steps: Ints,
    queues: list[list[int]],
    round_: int,
    capacity: Capacity,
    probe: Probe,
) -> Chunk:
    """Plan the chunk of some of a round's participants.

    Their indices stand one after the other, and in the table of each phase a client
    keeps its lane.

    Args:
      partition: the clients' examples.
      ids: of all participants of the round.
      rank: of each among the round's participants in the order of their ids.
      steps: of each in every phase.
      queues: for each lane the participants that it trains, as indices into `ids`.
      round_: number of the round within the task.
      capacity: the static shapes.
      probe: who measures the terms of its loss.
    """
    member = _slots_of(queues, capacity)
    used = member >= 0
    flat = member.reshape(-1)
    # an empty slot has -1, which indexes the last participant; `used` masks it below
    clients = ids[flat]
    count = np.where(used, partition.count_of(clients).reshape(used.shape), 0)
    class_examples = np.where(used.reshape(-1, 1), partition.class_examples[clients], 0)
    examples = [_examples_of(partition, ids[row[row >= 0]], capacity) for row in member]
    indices, slot_of_example = zip(*examples, strict=True)
    slot_of_member = {int(item): slot for slot, item in enumerate(flat) if item >= 0}
    slot_queues = [[slot_of_member[item] for item in queue] for queue in queues]
    tables = []
    ticks = []
    for steps_of_phase, most_ticks, terms in zip(steps, capacity.ticks, probe.terms, strict=True):
        table, used_ticks = tabulate(slot_queues, steps_of_phase[flat], most_ticks)
        if terms and probe.participant in slot_of_member:
            # in the middle of training: at its start, terms of the loss may still be 0
            middle_step = int(steps_of_phase[probe.participant]) // 2
            table = with_probe(table, slot_of_member[probe.participant], middle_step, terms)
            used_ticks += terms
        tables.append(table)
        ticks.append(used_ticks)
    return Chunk(
        id=_ints(np.where(used, ids[member], capacity.clients)),
        position=_ints(np.where(used, rank[member], capacity.participants)),
        count=_ints(count),
        # within the device's indices, where clients stand one after the other
        offset=_ints(np.where(used, np.cumsum(count, axis=1) - count, 0)),
        class_examples=class_examples.astype(np.int32),
        indices=_ints(np.concatenate(indices)),
        slot_of_example=_ints(np.concatenate(slot_of_example)),
        # a device numbers its slots from 0
        tables=tuple(table._replace(slot=table.slot % capacity.slots) for table in tables),
        ticks=tuple(np.asarray(tick, np.int32) for tick in ticks),
        round=np.asarray(round_, np.int32),
        task=_tasks_of(partition, np.where(used.reshape(-1), clients, clients[0])),
    )


def _slots_of(
    queues: list[list[int]],
    capacity: Capacity,
) -> Int[np.ndarray, "devices slots"]:
    """Return the item in each slot of each device, which has those of its lanes in their
    order; -1: none."""
    member = np.full((capacity.devices, capacity.slots), -1)
    lanes_per_device = len(queues) // capacity.devices
    for device, row in enumerate(member):
        queues_of_device = queues[device * lanes_per_device : (device + 1) * lanes_per_device]
        items = sorted(item for queue in queues_of_device for item in queue)
        row[: len(items)] = items
    return member


def _examples_of(
    partition: ClientPartition,
    ids: Ints,
    capacity: Capacity,
) -> tuple[Ints, Ints]:
    """Return the indices of the examples of one device's clients, and the slot of each,
    padded."""
    no_examples = np.zeros(0, np.int32)
    indices = np.concatenate([no_examples, *(partition.of_client(client) for client in ids)])
    slot = np.repeat(np.arange(len(ids)), partition.count_of(ids))
    padding = (0, capacity.examples - len(indices))
    return np.pad(indices, padding), np.pad(slot, padding, constant_values=capacity.slots)


def _ints(values: Ints) -> Int[np.ndarray, " n"]:
    return values.reshape(-1).astype(np.int32)


def _tasks_of(partition: ClientPartition, clients: Ints) -> Task | None:
    """Return the tasks of the clients in the slots; None: all have the round's."""
    if partition.task is None:
        return None
    return Task.of_numpy(*(np.asarray(leaf)[clients] for leaf in partition.task))
