"""Class order, tasks and partitions: the numbers of FPPL's and PILoRA's releases, and what holds for any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcljax.data import partition
from fcljax.data.partition import (
    Quantity,
    Shards,
    WholeClasses,
    count_matrix,
    dirichlet,
    first_share,
    iid,
    quantity,
    shards,
    split_at,
)
from fcljax.data.tasks import class_order, make_tasks, relabel, task_sizes
from fcljax.errors import InputError

CIFAR = np.repeat(np.arange(100), 500)
CIFAR_TASK = np.repeat(np.arange(10), 400)  # the first 80 % of ten classes, in the order of their labels


def seeded(seed, num_classes):
    """The stream of a run, right after the class order."""
    rng = np.random.RandomState(seed)
    return class_order(num_classes, rng), rng


@pytest.mark.parametrize(
    "seed, num_classes, first",
    [
        (2023, 200, [13, 188, 96, 122, 85, 2, 61, 173, 38, 8]),
        (2024, 200, [178, 21, 193, 147, 98, 68, 101, 81, 192, 30]),
        (2025, 200, [30, 0, 32, 34, 5, 49, 56, 154, 143, 82]),
        (2023, 100, [56, 12, 68, 0, 82, 66, 91, 44, 46, 20]),
        (2024, 100, [35, 19, 26, 17, 77, 24, 70, 58, 95, 14]),
        (2025, 100, [49, 77, 61, 69, 6, 95, 68, 19, 2, 5]),
    ],
)
def test_the_class_order_is_that_of_the_release(seed, num_classes, first):
    order, _ = seeded(seed, num_classes)
    assert order[:10].tolist() == first
    assert sorted(order) == list(range(num_classes))


def test_a_small_dirichlet_partition_is_that_of_the_release():
    labels = np.repeat(np.arange(4), 25)
    order, rng = seeded(2023, 4)
    parts = dirichlet(labels, 3, 0.5, rng)
    assert order.tolist() == [2, 0, 1, 3]
    assert [len(part) for part in parts] == [27, 35, 38]
    assert count_matrix(labels, parts, 4).tolist() == [[17, 2, 4, 4], [6, 17, 2, 10], [2, 6, 19, 11]]
    assert [part[:5].tolist() for part in parts] == [
        [39, 77, 16, 12, 9],
        [17, 76, 44, 91, 30],
        [55, 85, 26, 64, 32],
    ]


def test_an_iid_partition_whose_classes_divide_evenly_is_that_of_the_release():
    labels = np.repeat(np.arange(4), 24)
    _, rng = seeded(2023, 4)
    parts = iid(labels, 3, rng)
    assert count_matrix(labels, parts, 4).tolist() == [[8] * 4] * 3
    assert [part[:5].tolist() for part in parts] == [
        [27, 26, 63, 71, 11],
        [94, 51, 74, 22, 19],
        [95, 0, 75, 56, 50],
    ]


def test_what_an_iid_partition_cannot_share_equally_goes_round():
    """Two examples of each of seven classes among five clients: in the release the last three get none."""
    labels = np.repeat(np.arange(7), 2)
    firsts = set()
    for seed in range(20):
        counts = count_matrix(labels, iid(labels, 5, np.random.RandomState(seed), min_size=2), 7)
        assert counts.max() == 1 and sorted(counts.sum(1)) == [2, 3, 3, 3, 3]
        (short,) = np.flatnonzero(counts.sum(1) == 2)
        firsts.add(int(short))
        np.testing.assert_array_equal(counts[:, 0], np.roll([0, 1, 1, 0, 0], short))  # from the next one on
    assert firsts == set(range(5))


@pytest.mark.parametrize(
    "seed, passes, counts",
    [
        (2023, 1, [[0, 0, 13], [13, 0, 1], [1, 14, 0]]),
        (2025, 2, [[13, 0, 0], [0, 13, 2], [1, 1, 12]]),
    ],
)
def test_a_partition_is_drawn_again_until_every_client_has_enough(seed, passes, counts):
    labels = np.repeat(np.arange(3), 14)

    class Counting(np.random.RandomState):
        draws = 0

        def dirichlet(self, concentration):
            self.draws += 1
            return super().dirichlet(concentration)

    rng = Counting(seed)
    class_order(3, rng)
    parts = dirichlet(labels, 3, 0.1, rng)
    assert count_matrix(labels, parts, 3).tolist() == counts
    assert rng.draws == 3 * passes


@pytest.mark.parametrize(
    "seed, sizes",
    [
        (2023, [5207, 5357, 5036, 4528, 5102, 5001, 5015, 5062, 4467, 5225]),
        (2024, [5062, 4983, 4964, 4989, 5055, 5057, 5132, 5150, 4446, 5162]),
        (2025, [5056, 4755, 4754, 5180, 5000, 5061, 5406, 5008, 5155, 4625]),
    ],
)
def test_cifar_100_client_sizes_are_those_of_the_release(seed, sizes):
    _, rng = seeded(seed, 100)
    assert [len(part) for part in dirichlet(CIFAR, 10, 0.5, rng)] == sizes


def test_cifar_100_first_task_client_sizes_are_those_of_the_release():
    order, rng = seeded(2023, 100)
    first = make_tasks(100, 10)[0].current
    counts = count_matrix(relabel(CIFAR, order), dirichlet(CIFAR, 10, 0.5, rng), 100)
    assert counts[:, first].sum(1).tolist() == [438, 618, 531, 365, 477, 628, 442, 224, 338, 939]


@settings(max_examples=30)
@given(st.integers(1, 8), st.floats(0.01, 100), st.integers(0, 2**32 - 1), st.booleans())
def test_a_partition_gives_every_row_to_exactly_one_client(clients, alpha, seed, skewed):
    labels = np.random.RandomState(seed).permutation(np.arange(300) % 7)
    rng = np.random.RandomState(seed)
    parts = dirichlet(labels, clients, alpha, rng, min_size=0) if skewed else iid(labels, clients, rng)
    assert sorted(np.concatenate(parts)) == list(range(300))
    np.testing.assert_array_equal(count_matrix(labels, parts, 7).sum(0), np.bincount(labels))


def test_an_iid_partition_is_even_per_class():
    counts = count_matrix(CIFAR, iid(CIFAR, 7, np.random.RandomState(0)), 100)
    assert set(np.unique(counts)) == {500 // 7, 500 // 7 + 1}


@pytest.mark.parametrize("alpha", [1e-4, 1e-12])
def test_a_beta_so_small_that_shares_underflow_gives_each_class_to_one_client(alpha):
    labels = np.repeat(np.arange(50), 20)
    parts = dirichlet(labels, 5, alpha, np.random.RandomState(0), min_size=1)
    counts = count_matrix(labels, parts, 50)
    assert ((counts > 0).sum(0) == 1).all()
    assert (counts.sum(1) > 0).all()


def test_smaller_beta_is_more_skewed():
    def largest_share(alpha):
        counts = count_matrix(CIFAR, dirichlet(CIFAR, 10, alpha, np.random.RandomState(1)), 100)
        return (counts.max(0) / counts.sum(0)).mean()

    assert largest_share(0.05) > largest_share(0.5) > largest_share(50.0)


@pytest.mark.parametrize("alpha", [0.0, -0.5, float("nan"), float("inf"), -float("inf"), 1e9])
def test_a_beta_that_is_no_concentration_is_refused(alpha):
    with pytest.raises(InputError, match=r"^alpha: .* choose 0 < alpha"):
        dirichlet(CIFAR, 10, alpha, np.random.RandomState(0))


def test_impossible_numbers_of_clients_are_refused():
    labels = np.repeat(np.arange(4), 10)
    rng = np.random.RandomState(0)
    for split in (lambda k: dirichlet(labels, k, 0.5, rng), lambda k: iid(labels, k, rng)):
        with pytest.raises(InputError, match="clients: 0 is not"):
            split(0)
        with pytest.raises(InputError, match="choose 4 clients or fewer"):
            split(5)
    with pytest.raises(InputError, match="alpha 0.001 do not all reach 10 of 200 examples"):
        dirichlet(np.repeat(np.arange(2), 100), 4, 0.001, rng)


@pytest.mark.parametrize("kind", [Quantity, WholeClasses, Shards])
def test_partitions_by_labels_are_redrawn_until_every_client_has_its_minimum(kind):
    labels = np.repeat(np.arange(6), [2, 4, 60, 80, 120, 34])
    split = lambda **least: kind(1, **least)(labels, 3, np.random.RandomState(0))
    smallest = min(map(len, split()))
    assert smallest == (3 if kind is Shards else 4)
    for client, client_without in zip(split(min_examples=smallest), split(), strict=True):
        np.testing.assert_array_equal(client, client_without)
    if kind is not Shards:  # whose clients all have three examples
        assert min(map(len, split(min_examples=20))) >= 20
    hopeless = 121 if kind is WholeClasses else 99
    with pytest.raises(InputError, match=f"classes_per_client 1 do not all reach {hopeless} of 300 examples"):
        split(min_examples=hopeless)


# ---- the rows of one task ----------------------------------------------------------------------------------


class Scripted(np.random.RandomState):
    """A stream whose Dirichlet draws are given."""

    def __init__(self, *shares):
        super().__init__(0)
        self.given = list(shares)

    def dirichlet(self, concentration):
        return np.array(self.given.pop(0))


def test_dirichlet_shares_are_cut_at_the_floor_of_their_sums():
    assert [
        len(part) for part in dirichlet(np.zeros(10, int), 3, 0.5, Scripted([0.2, 0.5, 0.3]), min_size=0)
    ] == [2, 5, 3]


def test_a_client_with_its_fair_share_gets_nothing_more_and_the_others_shares_are_scaled():
    labels = np.repeat(np.arange(2), [6, 8])
    parts = dirichlet(labels, 3, 0.5, Scripted([0.84, 0.16, 0.0], [0.2, 0.5, 0.3]), min_size=0)
    assert count_matrix(labels, parts, 2).T.tolist() == [[5, 1, 0], [0, 5, 3]]


def test_a_small_dirichlet_partition_of_a_task_is_that_of_piloras_release():
    labels = np.repeat(np.arange(3), 20)
    counts = count_matrix(labels, dirichlet(labels, 4, 0.5, np.random.RandomState(0), min_size=5), 3)
    assert counts.tolist() == [[14, 15, 0], [5, 1, 3], [0, 0, 9], [1, 4, 8]]


def test_dirichlet_client_sizes_of_a_cifar_100_task_are_those_of_piloras_release():
    parts = dirichlet(CIFAR_TASK, 10, 0.5, np.random.RandomState(0))
    assert [len(part) for part in parts] == [429, 147, 185, 419, 403, 434, 466, 382, 580, 555]


def test_the_shards_of_a_cifar_100_task_are_those_of_piloras_release():
    parts = shards(CIFAR_TASK, 2, 6, np.random.RandomState(0))
    assert [sorted(set(part // 40)) for part in parts] == [[2, 26, 55, 75, 86, 93], [18, 29, 64, 72, 87, 92]]
    assert [sorted(set(CIFAR_TASK[part])) for part in parts] == [[0, 2, 5, 7, 8, 9], [1, 2, 6, 7, 8, 9]]


def test_clients_hold_whole_shards_of_their_own_and_may_share_them():
    label = np.random.RandomState(1).permutation(CIFAR_TASK)
    parts = shards(label, 10, 6, np.random.RandomState(0))
    whole = np.argsort(label, kind="stable").reshape(100, 40)
    times = np.zeros(100, int)
    for part in parts:
        held = np.isin(whole, part)
        assert (held.all(1) == held.any(1)).all()
        assert held.all(1).sum() == 6
        assert len(set(part)) == len(part) == 240
        times += held.all(1)
    assert times.max() > 1
    assert times.min() == 0


def test_where_rows_do_not_fill_the_shards_the_first_have_one_more_and_may_hold_two_labels():
    labels = np.repeat([0, 1], [5, 6])
    # of 3, 3, 3 and 2 rows; the second reaches into label 1
    (part,) = shards(labels, 1, 4, np.random.RandomState(0), count=4)
    assert sorted(part) == list(range(11))
    sizes = {
        tuple(sorted(shards(labels, 1, 1, np.random.RandomState(seed), count=4)[0])) for seed in range(40)
    }
    assert sizes == {(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10)}


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**32 - 1), st.data())
def test_clients_own_alpha_labels_whose_rows_are_split_equally(clients, classes, seed, data):
    alpha = data.draw(st.integers(1, classes))
    # not 0..C-1, and of two sizes
    labels = np.random.RandomState(seed).permutation(np.arange(classes * 17 + 5) % classes) * 3 + 2
    parts = quantity(labels, clients, alpha, np.random.RandomState(seed))
    rows = np.concatenate(parts)
    assert len(set(rows)) == len(rows)
    counts = count_matrix((labels - 2) // 3, parts, classes)
    assert ((counts > 0).sum(1) == alpha).all()
    owned = (counts > 0).any(0)
    assert owned.sum() >= min(classes, clients * alpha)
    np.testing.assert_array_equal(counts.sum(0), np.where(owned, np.bincount((labels - 2) // 3), 0))
    for column in counts.T[owned]:
        assert np.ptp(column[column > 0]) <= 1


def test_which_labels_a_client_owns_is_left_to_chance():
    partitions = [quantity(CIFAR_TASK, 3, 2, np.random.RandomState(seed)) for seed in range(60)]
    owned = np.stack([count_matrix(CIFAR_TASK, parts, 10) > 0 for parts in partitions])
    assert owned.any(0).all()
    assert (owned.any(1).sum(1) == 6).all()  # 3 clients with 2 labels each: 4 of 10 stay unused


def test_which_rows_of_its_label_an_owner_holds_is_left_to_chance():
    partitions = [quantity(np.zeros(20, int), 2, 1, np.random.RandomState(seed)) for seed in range(20)]
    assert set.union(*(set(first) for first, _ in partitions)) == set(range(20))


def test_alphas_that_cannot_be_are_refused_with_the_nearest_that_can():
    rng = np.random.RandomState(0)
    for per, nearest in ((11, 10), (0, 1), (-3, 1)):
        with pytest.raises(
            InputError,
            match=f"^classes_per_client: {per} label ids per client, of 10; nearest valid value: {nearest}$",
        ):
            quantity(CIFAR_TASK, 5, per, rng)
    for alpha, nearest in ((101, 100), (0, 1)):
        with pytest.raises(
            InputError,
            match=f"^classes_per_client: {alpha} shards per client, of 100; nearest valid value: {nearest}$",
        ):
            shards(CIFAR_TASK, 5, alpha, rng)
    with pytest.raises(
        InputError, match="^partition: .* 100 shards, and a task has only 99; nearest: quantity$"
    ):
        shards(CIFAR_TASK[:99], 5, 2, rng)
    for split in (quantity, shards):
        with pytest.raises(InputError, match="^clients: 0 is not"):
            split(CIFAR_TASK, 0, 2, rng)


def test_the_first_share_takes_the_first_rows_of_every_class():
    assert first_share(CIFAR, 0.8).tolist() == [row for row in range(50_000) if row % 500 < 400]
    # 1.5 rows count as 2, 0.5 as 1
    assert first_share(np.array([1, 0, 1, 1, 0, 0, 1, 7]), 0.5).tolist() == [0, 1, 2, 4, 7]
    assert len(first_share(np.zeros(100, int), 0.07)) == 7
    np.testing.assert_array_equal(first_share(CIFAR[::-1], 1.0), np.arange(50_000))
    for share in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="^train_share: .* choose more than 0 and at most 1"):
            first_share(CIFAR, share)


# ---- tasks -------------------------------------------------------------------------------------------------


def test_task_sizes_differ_by_at_most_one_and_the_first_are_larger():
    assert task_sizes(200, 20) == (10,) * 20
    assert task_sizes(10, 3) == (4, 3, 3)
    assert task_sizes(5, 5) == (1,) * 5


@pytest.mark.parametrize("tasks", [0, -1, 11])
def test_more_tasks_than_classes_are_refused(tasks):
    with pytest.raises(InputError, match=f"^tasks: {tasks} tasks cannot share 10 classes"):
        task_sizes(10, tasks)


@given(st.integers(1, 60), st.data())
def test_tasks_tile_the_classes(num_classes, data):
    tasks = make_tasks(num_classes, data.draw(st.integers(1, num_classes)))
    current = np.stack([task.current for task in tasks])
    assert (current.sum(0) == 1).all()
    for index, task in enumerate(tasks):
        assert task.index == index
        np.testing.assert_array_equal(task.seen, current[: index + 1].any(0))
        np.testing.assert_array_equal(task.classes[task.classes >= 0], np.flatnonzero(task.current))
        assert task.classes.shape == tasks[0].classes.shape


def test_uneven_tasks_are_padded_with_minus_one():
    assert [task.classes.tolist() for task in make_tasks(5, 2)] == [[0, 1, 2], [3, 4, -1]]


def test_relabelling_numbers_classes_by_position_in_the_order():
    order = np.array([2, 0, 1])
    assert relabel(np.array([0, 1, 2, 2]), order).tolist() == [1, 2, 0, 0]
    np.testing.assert_array_equal(relabel(order, order), np.arange(3))


def one_by_one(labels, clients, per_client, rng):
    """Who owns which label, client after client: labels in turn, then others at random."""
    order, owns = rng.permutation(labels), np.zeros((clients, labels), bool)
    for client, mine in enumerate(owns):
        mine[order[np.arange(client, max(clients, labels), clients) % labels][:per_client]] = True
        mine[rng.choice(np.flatnonzero(~mine), per_client - mine.sum(), replace=False)] = True
    return owns


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.integers(1, 12), st.data(), st.integers(0, 2**31))
def test_labels_have_the_owners_that_a_draw_client_by_client_gives_them(clients, labels, data, seed):
    per_client = data.draw(st.integers(1, labels))
    y = np.repeat(np.arange(labels), clients)  # an example of each label for each client
    rng, other = np.random.RandomState(seed), np.random.RandomState(seed)
    parts = quantity(y, clients, per_client, rng)
    owns = one_by_one(labels, clients, per_client, other)
    assert np.array_equal(count_matrix(y, parts, labels) > 0, owns)


@pytest.mark.parametrize(
    ("clients", "labels", "per_client"), [(6000, 5, 2), (6000, 5, 4), (6000, 3, 3), (3, 8, 4)]
)
def test_very_many_clients_draw_their_other_labels_at_once(clients, labels, per_client, monkeypatch):
    """Each has the label of its turn and others, no label twice; every other label is as likely."""
    monkeypatch.setattr(partition, "MOST_DRAWN_APART", 0)
    y = np.repeat(np.arange(labels), clients)
    parts = quantity(y, clients, per_client, np.random.RandomState(3))
    owns = count_matrix(y, parts, labels) > 0
    assert (owns.sum(axis=1) == per_client).all()
    order = np.random.RandomState(3).permutation(labels)
    turn = order[np.arange(clients) % labels]
    assert owns[np.arange(clients), turn].all()
    if 1 < per_client < labels < clients:
        for label in range(labels):
            others = owns[turn == label][:, np.arange(labels) != label].mean(axis=0)
            np.testing.assert_allclose(others, (per_client - 1) / (labels - 1), atol=0.06)


def test_values_are_split_into_parts_of_these_sizes():
    parts = split_at(np.arange(5), np.array([0, 2, 0, 3, 0]))
    assert [part.tolist() for part in parts] == [[], [0, 1], [], [2, 3, 4], []]


@pytest.mark.parametrize("index", [-1, 3])
def test_an_example_that_there_is_not_is_named(index):
    with pytest.raises(InputError, match=f"partition: client 1 has example {index}; there are 3, from 0"):
        partition.check_parts([np.array([2]), np.array([0, index])], 2, 3)
