"""Exemplars by herding: the choice is the plain greedy one, the memory keeps to its budget, and what a client
replays are examples that it had in earlier tasks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FORMULA,
    KEY,
    NETWORK,
    PARTITIONS,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    begin,
    compiled,
    context_of,
    end_of_task,
    engine_of,
    info_of,
    main_of,
    play,
    rows_of,
)
from micro import LABEL as ROW_LABEL

from fcljax.adapters import find_adapter
from fcljax.adapters.linear import LinearOptions
from fcljax.errors import InputError
from fcljax.federated.engine import Lanes
from fcljax.parts.client import Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.replay import (
    Budget,
    Exemplars,
    Gathered,
    Herded,
    draw_union,
    gather_from,
    herd,
    herded,
    nothing_herded,
    renew,
)

choose = jax.jit(herd, static_argnums=(2, 3, 4))
FIRST, SECOND = TASKS


def by_numpy(feature, places, most, repeats=False):
    """Herding as its paper writes it: of the rows at these places, one after the other."""
    feature = np.asarray(feature, np.float64)
    feature = feature / np.linalg.norm(feature, axis=1, keepdims=True)
    mean, total, chosen = feature[places].mean(0), np.zeros(feature.shape[1]), []
    while len(chosen) < (most if repeats else min(most, len(places))):
        free = [i for i in places if repeats or i not in chosen]
        gaps = [np.linalg.norm(mean - (total + feature[i]) / (len(chosen) + 1)) for i in free]
        chosen.append(free[int(np.argmin(gaps))])
        total += feature[chosen[-1]]
    return chosen + [-1] * (most - len(chosen))


@pytest.mark.parametrize("repeats", [False, True])
def test_the_choice_is_the_greedy_one_for_every_class_at_once(repeats):
    """Classes of 17, 3 and no rows, five of no class, and places for more than the second one has."""
    rng = np.random.default_rng(3)
    group = rng.permutation([0] * 17 + [1] * 3 + [-1] * 5)
    feature = rng.normal(size=(25, 6)).astype(np.float32) * rng.uniform(0.1, 9, (25, 1)).astype(np.float32)
    found = choose(feature, jnp.asarray(group), 3, 8, repeats).tolist()
    expected = [by_numpy(feature, np.flatnonzero(group == i), 8, repeats) for i in range(2)]
    assert found == [*expected, [-1] * 8]
    in_order = np.flatnonzero(group == 0)[:8].tolist()
    assert found[0] != in_order and set(found[0]) != set(in_order)


def test_of_equal_rows_the_first_is_chosen_and_zeros_do_no_harm():
    same = jnp.ones((4, 3))
    assert choose(same, jnp.zeros(4, int), 1, 6).tolist() == [[0, 1, 2, 3, -1, -1]]
    assert choose(jnp.zeros((4, 3)), jnp.zeros(4, int), 1, 2).tolist() == [[0, 1]]


def test_rows_of_no_class_may_be_nan():
    feature = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    group = jnp.array([0, -1, 0, 0, -1, 0])
    poisoned = np.where(np.asarray(group)[:, None] < 0, np.nan, feature)
    assert choose(poisoned, group, 1, 3).tolist() == choose(feature, group, 1, 3).tolist()


# ---- the memory --------------------------------------------------------------------------------------------


def gathered_of(labels, first=0):
    """So many rows with these labels, numbered from `first`, in a buffer of nine."""
    feature = np.random.default_rng(first).normal(size=(9, WIDTH)).astype(np.float32)
    number = np.arange(9)
    there = number < len(labels)
    label = np.pad(np.asarray(labels, np.int32), (0, 9 - len(labels)))
    index = np.where(there, first + number, -1).astype(np.int32)
    count = jnp.int32(len(labels))
    return Gathered(*map(jnp.asarray, (feature, label, index, count)))


def kept(memory):
    """The rows that are remembered of each class, in the order of their choice."""
    found = jax.device_get(memory.exemplars)
    order = np.argsort(-found.priority, stable=True)
    alive = order[found.index[order] >= 0]
    return {
        int(label): [int(found.index[i]) for i in alive if found.label[i] == label]
        for label in found.label[alive]
    }


def after_both(budget):
    """The memory after the first task, with five rows of class 0, three of 1 and one of 2, and after the
    second, with three rows of 3 and six of 4."""
    again = compiled(functools.partial(renew, budget=budget, sizes=SIZES))
    one = again(nothing_herded(budget, SIZES), gathered_of([0, 1, 0, 0, 1, 2, 0, 1, 0]), FIRST)
    return one, again(one, gathered_of([4, 3, 4, 4, 3, 4, 3, 4, 4], 20), SECOND)


def expected_of(gathered, label, most):
    return [
        int(gathered.index[i])
        for i in by_numpy(
            gathered.feature,
            np.flatnonzero((np.asarray(gathered.label) == label) & (gathered.index >= 0)),
            most,
        )
        if i >= 0
    ]


def test_a_memory_of_so_many_rows_a_class_keeps_them_through_later_tasks():
    one, two = after_both(Budget(2))
    first, second = gathered_of([0, 1, 0, 0, 1, 2, 0, 1, 0]), gathered_of([4, 3, 4, 4, 3, 4, 3, 4, 4], 20)
    old = {label: expected_of(first, label, 2) for label in (0, 1, 2)}
    assert kept(one) == old and len(old[2]) == 1
    assert kept(two) == old | {label: expected_of(second, label, 2) for label in (3, 4)}
    assert len(two.exemplars.index) == 2 * SIZES.classes
    assert one.learned.tolist() == [True, True, True, False, False] and bool(two.learned.all())


def test_a_memory_of_so_many_rows_in_all_is_cut_to_equal_shares_as_classes_come():
    """Seven rows: two of each of three classes; then one of each of five."""
    one, two = after_both(Budget(7, "client"))
    first, second = gathered_of([0, 1, 0, 0, 1, 2, 0, 1, 0]), gathered_of([4, 3, 4, 4, 3, 4, 3, 4, 4], 20)
    assert kept(one) == {label: expected_of(first, label, 2) for label in (0, 1, 2)}
    fresh = {label: expected_of(second, label, 1) for label in (3, 4)}
    assert kept(two) == {label: rows[:1] for label, rows in kept(one).items()} | fresh
    for memory, empty in ((one, 2), (two, 2)):
        assert memory.exemplars.index.tolist().count(-1) == empty


def test_fewer_rows_in_all_than_classes_are_none_and_classes_stay_learned():
    _, two = after_both(Budget(4, "client"))
    assert kept(two) == {} and bool(two.learned.all())


def test_a_class_that_comes_again_is_chosen_anew():
    budget = Budget(2)
    again = compiled(functools.partial(renew, budget=budget, sizes=SIZES))
    one = again(nothing_herded(budget, SIZES), gathered_of([0, 0, 0, 1]), FIRST)
    two = again(one, gathered_of([0, 0, 0], 20), FIRST)
    assert kept(two) == {0: expected_of(gathered_of([0, 0, 0], 20), 0, 2), 1: [3]}


def test_a_setting_that_does_not_know_the_rows_is_refused():
    with pytest.raises(InputError, match="examples: 0"):
        gather_from(SIZES._replace(examples=0), WIDTH)


# ---- the rule ----------------------------------------------------------------------------------------------


def remembering(network=FORMULA, batch_size=4):
    adapter = find_adapter("linear").build(LinearOptions(), SIZES, network)
    rule = herded(Budget(2), SIZES, network.width, batch_size)
    run = Run(SIZES, network, adapter, Training(1, batch_size, 0.1), rules=(rule,))
    return federate(run, linear_learner(run), loss=cross_entropy_loss("seen"))


@functools.cache
def formula_method():
    return remembering()


def test_features_are_gathered_batch_by_batch_and_padding_is_not():
    """Rows 0 to 3 and then 0 to 1 of other batches: the first three and two of them count."""
    method = formula_method()
    server = compiled(method.init)(KEY, SCALE)
    batches = [rows_of([0, 0, 1], padding=np.nan), rows_of([0, 2], 2, padding=np.nan)]
    batches[1] = batches[1]._replace(index=jnp.where(batches[1].index >= 0, batches[1].index + 10, -1))
    (state,) = end_of_task(method, server, FIRST, batches, method.init_client(KEY, server))
    feature = np.concatenate([batches[0].input[:3], batches[1].input[:2]])
    row, label = np.array([0, 1, 2, 10, 11]), np.array([0, 0, 1, 0, 2])
    of = lambda c: [int(row[i]) for i in by_numpy(feature, np.flatnonzero(label == c), 2) if i >= 0]
    assert kept(state) == {c: of(c) for c in (0, 1, 2)}


def test_a_client_replays_examples_of_its_old_classes_and_no_others():
    memory = Exemplars(jnp.array([0, 3, 1, 4, 0]), jnp.array([7, 8, 9, 10, -1]), jnp.zeros(5))
    replay = main_of(formula_method()).program.phases[0].replay
    server = compiled(formula_method().init)(KEY, SCALE)
    program = main_of(formula_method()).program
    state = (Herded(memory, jnp.ones(5, bool)),)
    found = set()
    for round_ in range(8):
        context = context_of(formula_method(), server, SECOND, info_of(5, 2, 0, round_), SCALE)
        local = compiled(program.start)(context, state, KEY)
        found |= set(compiled(replay)(context, local, jax.random.fold_in(KEY, round_)).tolist())
    assert found == {0, 2}
    context = context_of(formula_method(), server, FIRST, info_of(5, 2), SCALE)
    assert compiled(replay)(context, local, KEY).tolist() == [-1] * 4


@pytest.mark.parametrize(("rows", "joined"), [(1, 8), (4, 8), (8, 4), (9, 4), (32, 1), (100, 1)])
def test_exemplars_join_as_often_as_they_would_in_one_data_set(rows, joined):
    """Four exemplars beside so many rows, in batches of eight."""
    memory = Exemplars(jnp.zeros(6, int), jnp.array([1, 2, -1, 3, 4, -1]), jnp.zeros(6))
    places = draw_union(memory, jnp.ones(5, bool), 8, jnp.int32(rows), KEY)
    assert int(jnp.sum(places >= 0)) == joined
    none = draw_union(memory, jnp.zeros(5, bool), 8, jnp.int32(rows), KEY)
    assert none.tolist() == [-1] * 8


@pytest.mark.long
def test_clients_of_a_run_remember_rows_that_they_held():
    """Through the engine, two lanes at a time, on a network of images."""
    method = remembering(NETWORK)
    engine = engine_of(method, Lanes(2, "vmap"))
    server, states = begin(method)
    history = play(engine, server, states, rounds=1)
    for place, (_, (memory,), _) in enumerate(history):
        for client in range(SIZES.clients):
            row = np.asarray(memory.exemplars.index[client])
            own = [
                np.split(partition.indices, partition.offset[1:-1])[client]
                for partition in PARTITIONS[: place + 1]
            ]
            own = np.concatenate(own)
            assert set(row[row >= 0].tolist()) <= set(own.tolist())
            count = np.minimum(np.bincount(ROW_LABEL[own], minlength=5), 2)
            np.testing.assert_array_equal(np.bincount(ROW_LABEL[row[row >= 0]], minlength=5), count)
