"""Host-side planning of a round: who takes part, and which lane runs which client's step at which tick. Numpy
only.

A lane plays its clients back to back, so lanes are never padded to the longest client; clients go longest
first onto the least loaded lane (LPT). The tables have one shape for a whole run, so that every round of
every task reuses one compiled program.
"""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.errors import InputError
from fcljax.types import Method, Program, Task, View

Ints = Int[np.ndarray, "..."]

MOST_WIDTHS = 3  # of a step's program: each is compiled once more
TRIED_WIDTHS = 256
WORTH_SHARE = 1 / 32  # of what is computed in a run, that a further width must save
WORTH_ROWS = 1000.0  # the same in rows: as long as compiling takes, of a ViT-Ti's step on one core of a CPU


class ClientPartition(NamedTuple):
    """The clients that could work in a round and their rows, as CSR: client i owns rows[offset[i]:offset[i +
    1]]."""

    rows: Int[np.ndarray, " rows"]  # indices into the training store
    offset: Int[np.ndarray, " K+1"]
    class_rows: Int[np.ndarray, "K C"]  # how many rows of each class a client holds
    task: Task | None = None  # each client's own task, leaves [K, ...]; None: all have the round's

    @property
    # pyrefly: ignore[bad-override]  # of what a tuple counts nothing is meant here
    def count(self) -> Int[np.ndarray, " K"]:
        """Rows per client."""
        return np.diff(self.offset)


class Capacity(NamedTuple):
    """Static shapes of a run: the largest round decides."""

    clients: int  # K: rows of the client-state buffers
    participants: int  # rows of the gathered uploads
    slots: int  # clients per chunk
    rows: int  # training rows per chunk
    ticks: tuple[int, ...]  # per phase
    widths: tuple[tuple[int, ...], ...]  # per phase: rows that a step may be computed for, see `step_widths`


class Table(NamedTuple):
    """What each lane does at each tick of one phase."""

    slot: Int[np.ndarray, "ticks lanes"]
    step: Int[np.ndarray, "ticks lanes"]
    start: Int[np.ndarray, "ticks lanes"]
    end: Int[np.ndarray, "ticks lanes"]
    active: Int[np.ndarray, "ticks lanes"]


class Chunk(NamedTuple):
    """A group of participants that one call of the compiled program trains. Padding slots have id K and
    position P, which no write hits."""

    id: Int[np.ndarray, " slots"]
    position: Int[
        np.ndarray, " slots"
    ]  # row in the gathered uploads: rank of the id among the round's participants
    count: Int[np.ndarray, " slots"]
    offset: Int[np.ndarray, " slots"]
    class_rows: Int[np.ndarray, "slots C"]
    rows: Int[np.ndarray, " rows"]
    slot_of_row: Int[np.ndarray, " rows"]  # padding rows belong to slot S, which sorts last
    tables: tuple[Table, ...]
    ticks: tuple[Ints, ...]
    round: Ints
    task: Task | None  # of each slot, leaves [slots, ...]; None: all have the round's


def participants(
    seed: int, task: int, round_: int, eligible: Int[np.ndarray, " n"], participation: float
) -> Int[np.ndarray, " m"]:
    """Sorted ids of the clients that take part: a uniform draw without replacement of ceil(participation * n)
    of the eligible ones, which depends on (seed, task, round) only."""
    if participation >= 1.0:
        return np.sort(eligible)
    draw = np.random.default_rng([seed, task, round_]).permutation(len(eligible))[
        : _wanted(participation, len(eligible))
    ]
    return np.sort(eligible[draw])


def _wanted(participation: float, eligible: int) -> int:
    """ceil(participation * eligible); without the slack 0.07 of 100 clients would be 8, since 0.07 * 100 > 7
    in floating point."""
    return int(np.ceil(participation * eligible - 1e-9))


def phase_steps(count: Ints, view: View) -> Ints:
    """Steps that a client with `count` rows takes in a phase: the last batch of an epoch may be partial, none
    is dropped."""
    return view.epochs * -(-count // view.batch_size)


def step_widths(view: View, counts: Ints, worth: float = WORTH_ROWS) -> tuple[int, ...]:
    """Numbers of rows, ascending, that a step's program is compiled for; the last one is the batch size.

    The last batch of an epoch has what is left of a client's rows, and is padded to the next of these. Those
    that save most are chosen one after the other, as long as one is worth its compilation.

    Args:
      view: batches and epochs of a phase.
      counts: rows of each client, in all rounds of the run together.
      worth: rows that a width must save in them; one is compiled in that time.
    """
    counts, size = counts[counts > 0], view.batch_size
    left, clients = np.unique((counts - 1) % size + 1, return_counts=True)
    least = max(worth, WORTH_SHARE * size * int(phase_steps(counts, view).sum()))
    some = left[np.unique(np.linspace(0, len(left) - 1, TRIED_WIDTHS).astype(int))] if len(left) else left

    def computed(widths: tuple[int, ...]) -> int:
        return view.epochs * int(np.sum(clients * np.asarray(widths)[np.searchsorted(widths, left)]))

    widths: tuple[int, ...] = (size,)
    while len(widths) < MOST_WIDTHS and len(some):
        better = min((tuple(sorted({*widths, int(width)})) for width in some), key=computed)
        if computed(widths) - computed(better) < least:
            break
        widths = better
    return widths


def pack(length: Ints, lanes: int) -> list[list[int]]:
    """Longest-processing-time-first: the items of each lane in playing order. Ties go to the lower index, so
    the result is unique."""
    heap = [(0, lane) for lane in range(lanes)]
    plays: list[list[int]] = [[] for _ in range(lanes)]
    for item in np.argsort(-length, kind="stable"):
        load, lane = heapq.heappop(heap)
        plays[lane].append(int(item))
        heapq.heappush(heap, (load + int(length[item]), lane))
    return plays


def tabulate(plays: list[list[int]], steps: Ints, capacity: int) -> tuple[Table, int]:
    """The table of one phase, padded to `capacity` ticks, and the number of ticks that are in use."""
    table = Table(*(np.zeros((capacity, len(plays)), np.int32) for _ in Table._fields))
    longest = 0
    for lane, items in enumerate(plays):
        if not items:
            continue
        n = steps[items]
        total = int(n.sum())
        longest = max(longest, total)
        slot = np.repeat(items, n)
        step = np.arange(total) - np.repeat(np.cumsum(n) - n, n)
        table.slot[:total, lane] = slot
        table.step[:total, lane] = step
        table.start[:total, lane] = step == 0
        table.end[:total, lane] = step == steps[slot] - 1
        table.active[:total, lane] = 1
    return table, longest


def capacity(
    program: Program,
    partitions: list[ClientPartition],
    lanes: int,
    slots: int,
    participation: float = 1.0,
    worth: float = WORTH_ROWS,
) -> Capacity:
    """Shapes that hold every round of a run: a roster for each, any subset of clients. `slots` bounds the
    clients per chunk and with them the memory between phases; `worth` is that of `step_widths`."""
    counts = [np.sort(partition.count)[::-1] for partition in partitions]
    most = max(_wanted(participation, int((count > 0).sum())) for count in counts)
    slots = max(1, min(slots, most))
    head = [count[:slots] for count in counts]
    ticks = tuple(
        max(column) for column in zip(*(_most_ticks(program, count, lanes) for count in head), strict=True)
    )
    everybody = np.concatenate(counts)
    widths = tuple(step_widths(phase.view, everybody, worth) for phase in program.phases)
    rows = max(1, max(int(c.sum()) for c in head))
    return Capacity(len(partitions[0].count), max(1, most), slots, rows, ticks, widths)


def capacities(
    method: Method,
    partitions: list[ClientPartition],
    lanes: int,
    slots: int,
    participation: float = 1.0,
    worth: float = WORTH_ROWS,
) -> tuple[Capacity, ...]:
    """The capacity of each of the method's rounds; arguments as in `capacity`."""
    share = {"sampled": participation, "everyone": 1.0}
    fit = lambda each: capacity(each.program, partitions, lanes, slots, share[each.who], worth)
    return tuple(map(fit, method.rounds))


def _most_ticks(program: Program, count: Ints, lanes: int) -> list[int]:
    """Ticks per phase that any subset of clients with `count` rows stays within. LPT never ends later than
    the mean load plus the longest job, but it balances whole programs: one phase alone may be as uneven as
      their sum allows."""
    steps = [phase_steps(count, phase.view) for phase in program.phases]
    whole = np.sum(steps, axis=0)
    longest = int(-(-whole.sum() // lanes) + whole.max(initial=0))
    return [min(longest, int(s.sum())) for s in steps]


def plan_round(
    program: Program,
    partition: ClientPartition,
    ids: Int[np.ndarray, " n"],
    round_: int,
    lanes: int,
    capacity: Capacity,
) -> tuple[list[Chunk], tuple[int, int]]:
    """Chunks of one round, and its steps: useful ones, and those that the lanes are busy or wait for. Their
    ratio is the slot efficiency.

    `ids` are sorted client ids; those without rows are absent. Chunks hold clients of similar size, so that
    none waits for another's.

    Raises:
      InputError: more participants than the capacity was made for; their uploads would have no row to go to.
    """
    held = partition.count
    ids = ids[held[ids] > 0]
    if len(ids) > capacity.participants:
        raise InputError(
            f"ids: {len(ids)} clients take part where the capacity holds {capacity.participants}; raise its "
            f"participation"
        )
    by_size = np.argsort(-held[ids], kind="stable")
    groups = [by_size[i : i + capacity.slots] for i in range(0, len(ids), capacity.slots)]
    planned = [
        _plan_chunk(program, partition, held, ids[group], group, round_, lanes, capacity) for group in groups
    ]
    useful = sum(int(phase_steps(held[ids], phase.view).sum()) for phase in program.phases)
    paid = lanes * sum(int(tick) for chunk in planned for tick in chunk.ticks)
    return planned, (useful, paid)


def _plan_chunk(program, partition, held, chosen, group, round_, lanes, capacity) -> Chunk:
    """One chunk: its clients' rows laid end to end, and a table per phase in which a client keeps its lane.
    `held` are the rows of all clients, `group` the places of `chosen` among the participants."""
    n, count = len(group), held[chosen]
    pad = capacity.slots - n
    steps = [phase_steps(count, phase.view) for phase in program.phases]
    plays = pack(np.sum(steps, axis=0), lanes)
    tables, ticks = zip(
        *(tabulate(plays, s, cap) for s, cap in zip(steps, capacity.ticks, strict=True)), strict=True
    )
    rows = np.concatenate([partition.rows[partition.offset[i] : partition.offset[i + 1]] for i in chosen])
    spare = capacity.rows - len(rows)
    return Chunk(
        id=_pad(chosen, pad, capacity.clients),
        position=_pad(group, pad, capacity.participants),
        count=_pad(count, pad, 0),
        offset=_pad(np.cumsum(count) - count, pad, 0),
        class_rows=np.concatenate(
            [partition.class_rows[chosen], np.zeros((pad, partition.class_rows.shape[1]))]
        ).astype(np.int32),
        rows=_pad(rows, spare, 0),
        slot_of_row=_pad(np.repeat(np.arange(n), count), spare, capacity.slots),
        tables=tables,
        ticks=tuple(np.asarray(tick, np.int32) for tick in ticks),
        round=np.asarray(round_, np.int32),
        task=_tasks_of(partition, chosen, pad),
    )


def _pad(values: Ints, amount: int, fill: int) -> Int[np.ndarray, " n"]:
    return np.pad(values, (0, amount), constant_values=fill).astype(np.int32)


def _tasks_of(partition: ClientPartition, chosen: Ints, pad: int) -> Task | None:
    """The tasks of these clients, and of `pad` slots that nobody plays the first one's."""
    if partition.task is None:
        return None
    slots = np.concatenate([chosen, np.repeat(chosen[:1], pad)])
    return Task.of_numpy(*(np.asarray(leaf)[slots] for leaf in partition.task))
