"""The host-side planner: longest-first packing, the tables that lanes play, and who takes part."""

import itertools
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fcljax.data.partition import count_matrix, dirichlet
from fcljax.errors import InputError
from fcljax.federated.schedule import (
    MOST_SHUFFLED,
    ClientPartition,
    LaneTable,
    capacities,
    capacity,
    pack,
    pack_chunks,
    participants,
    paying_lanes,
    paying_mesh,
    phase_steps,
    plan_round,
    round_steps,
    step_widths,
    tabulate,
    with_probe,
)
from fcljax.types import Method, Phase, Program, Round, Task, View

UNTIMED = settings(suppress_health_check=[HealthCheck.too_slow])  # machines differ, results must not
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
LANES = st.integers(1, 9)
VIEWS = st.lists(
    st.builds(View, epochs=st.integers(1, 3), batch_size=st.sampled_from([1, 3, 16, 999])),
    min_size=1,
    max_size=3,
)


def program(*views: View) -> Program:
    """A program of which only the views matter."""
    return Program(None, tuple(Phase(view, None) for view in views), None)


def partition(counts) -> ClientPartition:
    offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ClientPartition(
        np.arange(offset[-1], dtype=np.int32), offset, np.asarray(counts, np.int32)[:, None]
    )


def stays(table, ticks):
    """Every stay of a client on a lane, as (slot, lane, steps, starts, ends)."""
    for lane in range(table.slot.shape[1]):
        busy = [tick for tick in range(ticks) if table.active[tick, lane]]
        assert busy == list(range(len(busy)))  # a lane never pauses between clients
        for slot, stay in itertools.groupby(busy, key=lambda tick: table.slot[tick, lane]):
            stay = list(stay)
            yield slot, lane, *(list(column[stay, lane]) for column in (table.step, table.start, table.end))


@UNTIMED
@given(LENGTHS, LANES)
def test_every_step_of_every_client_is_played_once_and_in_order_on_one_lane(lengths, lanes):
    lengths = np.array(lengths)
    total = int(lengths.sum())
    table, ticks = tabulate(pack(lengths, lanes), lengths, total)
    found = {slot: (step, start, end) for slot, _, step, start, end in stays(table, ticks)}
    assert len(list(stays(table, ticks))) == len(found) == len(lengths)
    for slot, length in enumerate(lengths):
        step, start, end = found[slot]
        assert step == list(range(length))
        assert start == [True] + [False] * (length - 1)
        assert end == [False] * (length - 1) + [True]
    assert table.active.sum() == total and not table.active[ticks:].any()


@UNTIMED
@given(LENGTHS, LANES)
def test_no_lane_works_longer_than_the_mean_load_plus_the_longest_client(lengths, lanes):
    lengths = np.array(lengths)
    _, ticks = tabulate(pack(lengths, lanes), lengths, int(lengths.sum()))
    assert ticks <= lengths.sum() / lanes + lengths.max()


@pytest.mark.parametrize(("slot", "step"), [(0, 2), (2, 0), (3, 1)])
def test_ticks_that_measure_terms_stand_before_their_step_and_move_no_other(slot, step):
    lengths = np.array([5, 4, 1, 3])
    queues = pack(lengths, 2)
    plain, _ = tabulate(queues, lengths, 12)
    before = [column.copy() for column in plain]
    table = with_probe(plain, slot, step, 3)
    measuring = np.any(table.term >= 0, axis=1)
    lane = next(i for i, queue in enumerate(queues) if slot in queue)
    ticks = np.flatnonzero(measuring)
    first = int(ticks[0])
    assert ticks.tolist() == [first, first + 1, first + 2] and table.term[ticks, lane].tolist() == [0, 1, 2]
    assert (table.slot[first + 3, lane], table.step[first + 3, lane]) == (slot, step)
    # the other lane waits
    assert table.active[ticks].sum() == 3 and table.active[ticks, lane].all() and not table.end[ticks].any()
    # a client that has taken no step yet starts before the first of them
    assert table.start[ticks].sum() == (step == 0) and table.start[first + 3, lane] == 0
    without = LaneTable(*(column[~measuring] for column in table))
    without.start[first] |= table.start[first]
    for ours, theirs in zip(without, before, strict=True):
        np.testing.assert_array_equal(ours, theirs[: len(ours)])


def test_longest_first_packs_5_4_3_3_3_onto_two_lanes_as_by_hand():
    assert pack(np.array([3, 5, 3, 4, 3]), 2) == [[1, 2], [3, 0, 4]]  # loads 8 and 10


def test_a_client_of_10_rows_takes_three_steps_of_4_in_each_of_2_epochs():
    assert phase_steps(np.array([10, 8, 0]), View(epochs=2, batch_size=4)).tolist() == [6, 4, 0]


def padded(counts, size, widths):
    """Rows that are computed beyond those of the clients, over the latter."""
    batches = np.concatenate([np.diff(np.minimum(np.arange(0, n + size, size), n)) for n in counts])
    chosen = np.asarray(widths)[np.searchsorted(widths, batches[batches > 0])]
    return chosen.sum() / np.sum(counts) - 1


def test_widths_follow_from_the_rows_that_are_left_of_the_last_batches():
    """100, 70, 50 and 36 rows in batches of 32 leave 4, 6, 18 and 4."""
    counts = np.array([100, 70, 50, 36] * 40)
    assert step_widths(View(2, 32), counts) == (6, 18, 32)
    assert step_widths(View(1, 32), counts) == (6, 32)  # 18 would save 14 rows of 40 clients
    assert padded(counts, 32, (6, 18, 32)) == pytest.approx(4 / 256)
    assert padded(counts, 32, (32,)) == pytest.approx(96 / 256)


def test_a_width_that_saves_little_is_not_compiled():
    assert step_widths(View(10, 32), np.array([100, 70, 50, 36])) == (32,)  # 960 rows are padding
    assert step_widths(View(10, 32), np.array([64] * 100)) == (32,)  # none is
    assert step_widths(View(1, 32), np.array([3200 - 4] * 1000)) == (32,)  # 4,000, but one in 800
    assert step_widths(View(1, 32), np.array([], int)) == (32,)


@pytest.mark.long
@UNTIMED
@given(st.integers(1, 300), st.integers(1, 2000), st.integers(0, 2**32 - 1))
def test_few_widths_keep_the_padding_of_any_clients_small(size, most, seed):
    """Uniform sizes: two further widths leave a sixth of a batch or so; padding of less than a 32nd, or of
    few rows, is left alone."""
    counts = np.random.default_rng(seed).integers(0, most, 5000, endpoint=True)
    widths = step_widths(View(3, size), counts)
    assert sorted(set(widths)) == list(widths) and widths[-1] == size and len(widths) <= 3
    if counts.any():
        sixth = size / 6 * (counts > 0).sum() / counts.sum()
        few = 1000 / 3 / counts.sum()
        assert padded(counts[counts > 0], size, widths) <= 1.15 * sixth + 0.08 + few


@UNTIMED
@given(
    st.data(),
    st.lists(st.integers(0, 60), min_size=1, max_size=25).filter(any),
    VIEWS,
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_the_tables_of_any_subset_of_clients_fit_the_capacity(data, counts, views, each, devices, slots):
    """Each of several devices with `each` lanes has slots and examples of its own, and its lanes play clients
    of its own slots alone."""
    work, holds, lanes = program(*views), partition(counts), each * devices
    shapes = capacity(work, [holds], lanes, max(each, slots), devices=devices)
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, len(counts) - 1), min_size=1))))
    chunks, (useful, paid) = plan_round(work, holds, ids, 0, lanes, shapes)
    assert useful <= paid
    assert useful == sum(phase_steps(holds.count[ids], view).sum() for view in views)
    for chunk in chunks:
        assert chunk.id.shape == (devices * shapes.slots,)
        assert chunk.indices.shape == (devices * shapes.examples,)
        count = chunk.count.reshape(devices, -1)
        for table, ticks, most, view in zip(chunk.tables, chunk.ticks, shapes.ticks, views, strict=True):
            assert ticks <= most and table.slot.shape == (most, lanes)
            for lane in range(lanes):
                mine = table.slot[table.active[:, lane] > 0, lane]
                steps = phase_steps(count[lane // each], view)
                assert all((mine == slot).sum() == steps[slot] for slot in set(mine))
            assert table.active.sum() == phase_steps(chunk.count, view).sum()
    there = np.concatenate([chunk.id for chunk in chunks])
    assert sorted(there[there < len(counts)]) == [client for client in ids if counts[client]]


def test_a_chunk_ends_where_the_lane_that_is_free_has_a_device_without_slots():
    """Two devices of one lane and two slots. By hand: 9 goes to the first, 2 and 2 to the second, which is
    free first and has no slot for 1, though the first has one."""
    found = pack_chunks(np.array([9, 2, 2, 1]), 2, devices=2, slots=2)
    assert found == [[[0], [1, 2]], [[3], []]]


def test_clients_spread_over_the_devices_before_their_lanes():
    """Three clients on two devices with two lanes each."""
    assert pack_chunks(np.array([5, 5, 5]), 4, devices=2) == [[[0], [2], [1], []]]


def test_a_device_has_slots_for_its_lanes_or_twice_its_part_of_more_clients():
    slots = lambda clients, lanes, devices: (
        capacity(program(View(1, 4)), [partition([5] * clients)], lanes, 128, devices=devices).slots
    )
    assert (slots(10, 1, 1), slots(10, 16, 16), slots(10, 8, 8)) == (10, 1, 4)
    assert slots(8000, 8000, 1000) == 8 and slots(8000, 1000, 1000) == 16


@pytest.mark.parametrize("devices", [1, 3])
def test_each_device_has_the_examples_of_its_clients(devices):
    work, holds = program(View(1, 4)), partition([5, 0, 9, 1, 30, 2, 8])
    shapes = capacity(work, [holds], devices, 2, devices=devices)
    chunks, _ = plan_round(work, holds, np.arange(7), 0, devices, shapes)
    for chunk in chunks:
        rows = [array.reshape(devices, -1) for array in chunk[:4]]
        examples, slot_of = chunk.indices.reshape(devices, -1), chunk.slot_of_example.reshape(devices, -1)
        for device, (ids, _, counts, offsets) in enumerate(zip(*rows, strict=True)):
            for slot, (client, count, offset) in enumerate(zip(ids, counts, offsets, strict=True)):
                mine = examples[device, offset : offset + count]
                assert mine.tolist() == (holds.of_client(client).tolist() if count else [])
                assert (slot_of[device, offset : offset + count] == slot).all()


def test_a_pass_with_other_batches_than_training_fits_the_capacity():
    """Lanes are balanced over the whole program: one long client and many short ones are not balanced in each
    pass alone."""
    work, holds = program(View(1, 1), View(1, 1000)), partition([100] + [1] * 100)
    shapes = capacity(work, [holds], 2, 128)
    (chunk,), _ = plan_round(work, holds, np.arange(101), 0, 2, shapes)
    assert all(ticks <= most for ticks, most in zip(chunk.ticks, shapes.ticks, strict=True))
    assert chunk.ticks[1] > 101 / 2 + 1


def test_a_client_keeps_its_lane_through_all_passes():
    work, holds = program(View(2, 3), View(1, 7)), partition([9, 4, 30, 2, 2, 17])
    (chunk,), _ = plan_round(work, holds, np.arange(6), 0, 3, capacity(work, [holds], 3, 128))
    first, second = (
        {slot: lane for slot, lane, *_ in stays(table, chunk.ticks[i])}
        for i, table in enumerate(chunk.tables)
    )
    assert first == second and len(first) == 6


def test_chunks_hold_every_participant_with_rows_once_largest_first():
    work, holds = program(View(1, 4)), partition([5, 0, 9, 1, 30, 2, 8])
    ids = np.array([0, 1, 2, 4, 5, 6])
    chunks, _ = plan_round(work, holds, ids, 3, 2, capacity(work, [holds], 2, 2))
    assert [chunk.id.tolist() for chunk in chunks] == [[4, 2], [6, 0], [5, 7]]  # 7 = K fills the last chunk
    position = {
        i: p for chunk in chunks for i, p in zip(chunk.id.tolist(), chunk.position.tolist(), strict=True)
    }
    assert position == {
        0: 0,
        2: 1,
        4: 2,
        5: 3,
        6: 4,
        7: 6,
    }  # ranks among those with rows; padding is out of range
    for chunk in chunks:
        for slot, (client, count, offset) in enumerate(zip(chunk.id, chunk.count, chunk.offset, strict=True)):
            if count:
                mine = np.arange(holds.offset[client], holds.offset[client + 1])
                assert chunk.indices[offset : offset + count].tolist() == mine.tolist()
                assert set(np.flatnonzero(chunk.slot_of_example == slot)) == set(
                    range(offset, offset + count)
                )


def test_more_participants_than_the_capacity_was_made_for_are_refused():
    work, holds = program(View(1, 4)), partition([5, 3, 9, 1])
    shapes = capacity(work, [holds], 2, 128, participation=0.5)
    with pytest.raises(InputError, match="ids: 3 clients take part, but the capacity is 2"):
        plan_round(work, holds, np.array([0, 1, 2]), 0, 2, shapes)


def test_rounds_of_everyone_have_room_for_all_and_others_for_the_sampled():
    """Half of the four clients with rows, and all four."""
    work, holds = program(View(1, 4)), partition([5, 3, 0, 9, 1])
    rounds = (Round(work), Round(work, who="everyone", when="task_start"))
    sampled, everyone = capacities(Method(None, None, rounds, None), [holds], 2, 128, 0.5)
    assert (sampled.participants, everyone.participants) == (2, 4)
    assert (sampled.clients, everyone.clients) == (5, 5)
    assert sampled == capacity(work, [holds], 2, 128, 0.5)


def test_chunks_carry_the_tasks_of_their_clients():
    """Clients 4 and 2 have the most rows, client 0 is alone in the last chunk; its free slot has a task
    too."""
    work, holds = program(View(1, 4)), partition([5, 0, 9, 1, 30, 2, 8])
    index = 10 * np.arange(7, dtype=np.int32)
    own = Task(index, index[:, None], index[:, None] > 20, index[:, None] > 30)
    chunks, _ = plan_round(
        work, holds._replace(task=own), np.array([0, 2, 4]), 0, 2, capacity(work, [holds], 2, 2)
    )
    assert [chunk.id.tolist() for chunk in chunks] == [[4, 2], [0, 7]]
    assert [chunk.task.index.tolist() for chunk in chunks] == [[40, 20], [0, 0]]
    assert chunks[0].task.current.tolist() == [[True], [False]]
    (chunk,), _ = plan_round(work, holds, np.array([0]), 0, 2, capacity(work, [holds], 2, 2))
    assert chunk.task is None


def test_lanes_stay_busy_on_very_skewed_clients():
    """5,000 rows of 10 classes over 100 clients by Dirichlet 0.05, batches of 16, 8 lanes."""
    label = np.repeat(np.arange(10), 500)
    parts = dirichlet(label, 100, 0.05, np.random.RandomState(0), min_size=1)
    offset = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    holds = ClientPartition(
        np.concatenate(parts).astype(np.int32), offset, count_matrix(label, parts, 10).astype(np.int32)
    )
    work = program(View(epochs=5, batch_size=16), View(epochs=1, batch_size=16))
    _, (useful, paid) = plan_round(work, holds, np.arange(100), 0, 8, capacity(work, [holds], 8, 128))
    assert useful / paid >= 0.95


@UNTIMED
@example(0, 0, 0, 100, 7)  # 0.07 * 100 > 7 in floating point
@given(
    st.integers(0, 2**31), st.integers(0, 50), st.integers(0, 50), st.integers(1, 500), st.integers(1, 100)
)
def test_participants_are_sorted_distinct_eligible_and_as_many_as_asked(seed, task, round_, clients, percent):
    eligible = 3 * np.arange(clients) + 1
    chosen = participants(seed, task, round_, eligible, percent / 100)
    assert len(chosen) == ceil(Fraction(percent, 100) * len(eligible))
    assert np.array_equal(chosen, np.unique(chosen)) and np.isin(chosen, eligible).all()
    assert np.array_equal(chosen, participants(seed, task, round_, eligible, percent / 100))


def test_participants_of_more_clients_than_are_shuffled_are_sorted_distinct_and_spread_over_all():
    eligible = 3 * np.arange(2 * MOST_SHUFFLED) + 1
    chosen = participants(0, 1, 2, eligible, 0.05)
    assert len(chosen) == MOST_SHUFFLED // 10
    assert np.array_equal(chosen, np.unique(chosen)) and np.isin(chosen, eligible).all()
    assert abs(chosen.mean() / eligible.mean() - 1) < 0.03  # five standard deviations
    assert not np.array_equal(chosen, participants(0, 1, 3, eligible, 0.05))


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["seed", "task", "round"])
def test_another_seed_task_or_round_draws_other_participants(other):
    eligible = np.arange(40)
    seed, task, round_ = other
    drawn = participants(seed, task, round_, eligible, 0.5)
    assert not np.array_equal(participants(0, 0, 0, eligible, 0.5), drawn)


def test_the_global_random_state_has_no_say_in_who_takes_part():
    np.random.seed(1)
    first = participants(3, 1, 2, np.arange(40), 0.5)
    np.random.seed(2)
    assert np.array_equal(first, participants(3, 1, 2, np.arange(40), 0.5))


def test_over_many_rounds_every_client_takes_part_equally_often():
    times = np.bincount(
        np.concatenate([participants(0, 0, r, np.arange(20), 0.25) for r in range(800)]), minlength=20
    )
    assert times.sum() == 4000 and abs(times - 200).max() < 60  # five standard deviations of a binomial draw


# ---- how many lanes pay ------------------------------------------------------------------------------------

TRAIN = program(View(5, 32), View(1, 32))
DEVICES = pytest.mark.parametrize("devices", [1, 2])


def planned(counts, lanes, what=TRAIN):
    """Useful steps and ticks of a round, of the plan itself."""
    deal = partition(counts)
    room = capacity(what, [deal], lanes, len(counts))
    _, (useful, paid) = plan_round(what, deal, np.arange(len(counts)), 0, lanes, room)
    return useful, paid / lanes


@UNTIMED
@given(LENGTHS, LANES)
def test_the_steps_that_lanes_are_chosen_by_are_those_of_the_plan(counts, lanes):
    assert round_steps(TRAIN, np.array(counts), lanes) == planned(counts, lanes)


@DEVICES
def test_a_network_that_fills_its_device_gets_one_lane(devices):
    assert paying_lanes(TRAIN, [partition([500] * 10)], devices, 4.0) == devices


def test_a_small_network_gets_lanes_that_divide_equal_clients_evenly():
    deals = [partition([500] * 10)]
    found = {filled: paying_lanes(TRAIN, deals, 1, filled) for filled in (1e-3, 0.12, 0.2, 0.5)}
    assert found == {1e-3: 10, 0.12: 10, 0.2: 5, 0.5: 2}  # not 8 or 4, whose last round is half empty
    for filled, lanes in found.items():
        useful, ticks = planned([500] * 10, lanes)
        assert useful / (lanes * ticks) >= 0.95, filled


@pytest.mark.parametrize("seed", range(4))
def test_lanes_are_used_on_uneven_clients(seed):
    labels = np.repeat(np.arange(10), 500)
    counts = [len(part) for part in dirichlet(labels, 10, 0.5, np.random.RandomState(seed))]
    lanes = paying_lanes(TRAIN, [partition(counts)], 1, 1e-3)
    useful, ticks = planned(counts, lanes)
    assert lanes > 1
    assert useful / (lanes * ticks) >= 0.85


@pytest.mark.parametrize(
    ("clients", "devices", "filled", "expected"),
    [
        (10, 16, 13.0, (2, 8)),  # 5 times 2 clients on 8 devices each; with one device each, 6 would wait
        (1, 8, 13.0, (1, 8)),
        (16, 16, 13.0, (16, 1)),  # nobody waits
        (10, 16, 1e-3, (16, 1)),  # a small step is not faster on several devices
    ],
)
def test_devices_for_which_there_are_no_clients_share_batches(clients, devices, filled, expected):
    sharing = [1, 2, 4, 8, 16][: devices.bit_length()]
    assert paying_mesh(TRAIN, [partition([500] * clients)], devices, filled, sharing=sharing) == expected


def test_lanes_that_shorten_nothing_are_not_taken():
    """Whatever share of a device a step fills: 200 steps of one client cost as much as 40 of five, of which
    sums of floating-point numbers would make either the cheaper one."""
    for flops in (3.3e10, 3.3204277248e10, 3.3253892096e10, 3.3295040512e10, 3.51e10):
        for batch in (64, 128):
            filled = 3 * flops * batch / 1e12
            assert paying_lanes(TRAIN, [partition([500] * 10)], 1, filled) == 1, filled


def test_lanes_are_chosen_for_the_clients_that_take_part():
    deals = [partition([500] * 20)] * 3
    assert paying_lanes(TRAIN, deals, 1, 1e-3, participation=0.35) == 7
