"""Aggregation rules against closed forms, under jit and vmap."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import some
from toys import same

from fcljax.choices import with_options
from fcljax.errors import InputError
from fcljax.federated import aggregation as agg
from fcljax.federated import rules, sums
from fcljax.methods import fppl, pilora
from fcljax.methods.vfcl import conflation

K = 5
AGGREGATORS = {
    "mean": rules.weighted_mean,
    "uniform": rules.uniform_mean,
    "median": rules.coordinate_median,
    "trimmed_mean": rules.trimmed_mean,
    "geometric_median": rules.geometric_median,
}
RULES = {name: jax.jit(rule) for name, rule in AGGREGATORS.items()}
REWEIGHT = jax.jit(pilora.prototype_reweight, static_argnames=("distance", "temperature_mode"))
WEIGHTS = jax.jit(pilora.prototype_weights, static_argnames=("distance", "temperature_mode"))
RELEASED = {"distance": "l2", "temperature_mode": "divide"}
PAPER = {"distance": "l2sq", "temperature_mode": "multiply"}
ALL = jnp.ones(K, bool)


def stacked(seed: int = 0, k: int = K) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "a": jnp.asarray(rng.normal(size=(k, 3)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(k, 2, 2)), jnp.float32),
    }


def rows(tree, index):
    return jax.tree.map(lambda leaf: leaf[np.asarray(index)], tree)


def close(left, right, atol=1e-6):
    chex.assert_trees_all_close(left, right, atol=atol, rtol=1e-5)


def per_class(values, dim: int) -> jax.Array:
    """Client values [K][D] as [K, 1, D]."""
    return jnp.asarray(values, jnp.float32).reshape(len(values), 1, dim)


# FedAvg and the robust rules
# ---------------------------------------------------------------------------------------------------


def test_weighted_mean_of_30_and_10_rows_is_2():  # FPPL section 9, item 11
    weight, valid = jnp.array([30.0, 10.0, 0.0]), jnp.array([True, True, True])
    assert float(RULES["mean"](jnp.array([1.0, 5.0, 99.0]), weight, valid)) == pytest.approx(2.0)


def test_an_excluded_client_leaves_weights_that_add_up_to_one():
    weight, valid = jnp.array([30.0, 10.0, 60.0]), jnp.array([True, True, False])
    assert float(RULES["mean"](jnp.array([1.0, 5.0, 99.0]), weight, valid)) == pytest.approx(2.0)


def test_lora_factors_of_240_and_160_rows_average_to_3():  # PILoRA O13
    assert float(
        RULES["mean"](jnp.array([1.0, 6.0]), jnp.array([240, 160]), jnp.ones(2, bool))
    ) == pytest.approx(3.0)


def test_uniform_mean_ignores_weights():
    assert float(
        RULES["uniform"](jnp.array([1.0, 2.0, 6.0]), jnp.array([1.0, 0.0, 50.0]), jnp.ones(3, bool))
    ) == pytest.approx(3.0)


@pytest.mark.parametrize("count", range(1, 6))
def test_median_is_numpys_median_of_the_valid_rows(count):
    tree, valid = stacked(), jnp.arange(K) < count
    close(
        RULES["median"](tree, jnp.ones(K), valid),
        jax.tree.map(lambda leaf: np.median(leaf[:count], axis=0), tree),
    )


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16", "float16"], ["float32"]))
def test_the_value_of_a_rank_is_that_of_a_sort(dtype):
    """Of all kinds of floats, both zeros, the smallest ones and infinities among them."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1001, 7)) * 10.0 ** rng.integers(-60, 60, (1001, 7))
    values[:100] = rng.choice([0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 1.0], (100, 7))
    with np.errstate(over="ignore"):
        values = jnp.asarray(values, dtype)
    expected = np.sort(np.asarray(values, np.float32), axis=0)
    found = jax.jit(jax.vmap(rules.value_of_rank, (None, 0)))(values, jnp.arange(1001))
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_many_clients_are_not_sorted(name):
    """A sort over 40,000 clients takes 10 seconds, and one over 100,000 does not end."""
    arguments = jnp.zeros((40, 3)), jnp.ones(40), jnp.ones(40, bool)
    assert "sort" not in str(jax.make_jaxpr(RULES[name])(*arguments))
    assert "sort" in str(jax.make_jaxpr(lambda x: jnp.median(x, axis=0))(arguments[0]))


def test_trimmed_mean_drops_a_tenth_at_either_end():
    values = jnp.array([100.0, 1, 2, 3, 4, 5, 6, 7, 8, -50])
    assert float(RULES["trimmed_mean"](values, jnp.ones(10), jnp.ones(10, bool))) == pytest.approx(4.5)


def test_trimming_counts_valid_rows_only():
    # 9 of 10 valid: floor(0.9) = 0 rows are cut, so the outlier stays
    values, valid = jnp.array([100.0, 1, 2, 3, 4, 5, 6, 7, 8, jnp.nan]), jnp.arange(10) < 9
    assert float(RULES["trimmed_mean"](values, jnp.ones(10), valid)) == pytest.approx(136 / 9, rel=1e-6)


def test_a_tenth_of_thirty_rows_is_three():
    values = jnp.arange(30.0).at[29].set(1e6).at[28].set(1e6).at[27].set(1e6)
    assert float(RULES["trimmed_mean"](values, jnp.ones(30), jnp.ones(30, bool))) == pytest.approx(
        np.arange(3, 27).mean()
    )


@pytest.mark.parametrize("trim", [-0.1, 0.5, float("nan")])
def test_trimming_half_or_more_is_refused(trim):
    with pytest.raises(InputError, match="trim"):
        rules.trimmed_mean(jnp.ones(3), jnp.ones(3), jnp.ones(3, bool), trim=trim)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_robust_rules_resist_one_huge_outlier_and_the_mean_does_not(rule):
    tree = stacked(k=10)
    poisoned = jax.tree.map(lambda leaf: leaf.at[3].set(1e30), tree)
    bound = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))
    worst = lambda out: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(out))
    assert worst(RULES[rule](poisoned, jnp.ones(10), jnp.ones(10, bool))) <= bound
    assert worst(RULES["mean"](poisoned, jnp.ones(10), jnp.ones(10, bool))) > 1e28


@pytest.mark.long
@settings(max_examples=15)
@given(
    order=st.permutations(range(K)),
    drop=st.sets(st.integers(0, K - 1), max_size=K - 1),
    seed=st.integers(0, 99),
)
def test_permuting_clients_does_not_change_any_aggregate(order, drop, seed):
    tree, weight = stacked(seed), jnp.arange(1.0, K + 1)
    valid = jnp.array([k not in drop for k in range(K)])
    order = np.array(order)
    for rule in RULES.values():
        close(rule(tree, weight, valid), rule(rows(tree, order), weight[order], valid[order]))


def test_a_client_listed_twice_with_half_its_weight_counts_once():
    tree, weight = stacked(), jnp.array([3.0, 1.0, 4.0, 1.0, 5.0])
    twice = rows(tree, [0, 1, 2, 2, 3, 4])
    halves = jnp.array([3.0, 1.0, 2.0, 2.0, 1.0, 5.0])
    close(RULES["mean"](tree, weight, ALL), RULES["mean"](twice, halves, jnp.ones(6, bool)))


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_invalid_clients_are_inert(rule):
    tree, weight, valid = stacked(), jnp.arange(1.0, K + 1), jnp.array([True, False, True, True, False])
    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        dirty = jax.tree.map(lambda leaf, poison=poison: leaf.at[1].set(poison).at[4].set(poison), tree)
        assert_same(RULES[rule](dirty, weight.at[1].set(poison), valid), RULES[rule](tree, weight, valid))
    close(
        RULES[rule](tree, weight, valid),
        RULES[rule](rows(tree, [0, 2, 3]), weight[np.array([0, 2, 3])], jnp.ones(3, bool)),
    )


def assert_same(left, right):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), left, right)


@pytest.mark.parametrize("rule", RULES)
def test_one_client_is_returned_as_it_is(rule):
    tree = stacked()
    assert_same(
        RULES[rule](tree, jnp.full(K, 7.0), jnp.arange(K) == 2), jax.tree.map(lambda leaf: leaf[2], tree)
    )


@pytest.mark.parametrize("rule", RULES)
def test_nobody_valid_gives_zeros(rule):
    dirty = jax.tree.map(lambda leaf: leaf * jnp.nan, stacked())
    assert_same(
        RULES[rule](dirty, jnp.ones(K), ~ALL), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), dirty)
    )


@pytest.mark.parametrize("rule", RULES)
def test_leaves_keep_their_dtype(rule):
    tree = {
        "h": jnp.ones((K, 2), jnp.bfloat16),
        "n": jnp.array([1, 2, 2, 2, 2]),
        "m": jnp.arange(K)[:, None] != 3,
    }
    out = RULES[rule](tree, jnp.ones(K), ALL)
    assert [out["h"].dtype, out["n"].dtype, out["m"].dtype] == [jnp.bfloat16, jnp.int32, jnp.bool_]
    assert (int(out["n"]), bool(out["m"][0])) == (2, True)


def test_sums_of_half_precision_leaves_are_taken_in_float32():
    many = jnp.ones((4096, 1), jnp.bfloat16)  # a bfloat16 sum of ones stops at 256
    assert float(RULES["mean"](many, jnp.ones(4096), jnp.ones(4096, bool))[0]) == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_rules_batch_under_vmap(rule):
    trees = [stacked(seed) for seed in range(3)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    valid = jnp.array([[True] * 5, [True, False, True, True, False], [False] * 4 + [True]])
    out = jax.jit(jax.vmap(AGGREGATORS[rule], in_axes=(0, None, 0)))(batch, jnp.arange(1.0, 6.0), valid)
    for i, tree in enumerate(trees):
        close(rows(out, i), RULES[rule](tree, jnp.arange(1.0, 6.0), valid[i]))


# rules about whole uploads
# ------------------------------------------------------------------------------------------------------------

FAR = 3e38
GEOMETRIC = RULES["geometric_median"]
KRUM = jax.jit(rules.krum, static_argnames="malicious")
MULTI_KRUM = jax.jit(rules.multi_krum, static_argnames=("malicious", "chosen"))
CENTRED = jax.jit(rules.centred_clipping, static_argnames=("radius", "steps"))
KITE = [[0.0, 0.0], [2.0, 3.0], [10.0, 0.0], [3.0, -6.0]]  # its diagonals cross at (7/3, 0)
LINE = jnp.array([0.0, 1.0, 3.0, 7.0, 100.0])


def in_two_leaves(points) -> dict:
    """Points [K][2] as a tree of two leaves: a rule about whole uploads must not see the difference."""
    return {"x": jnp.asarray(points)[:, :1], "y": jnp.asarray(points)[:, 1]}


def test_the_geometric_median_of_a_kite_is_where_its_diagonals_cross():
    out = GEOMETRIC(in_two_leaves(KITE), jnp.ones(4), jnp.ones(4, bool))
    close(out, {"x": np.array([7 / 3]), "y": np.array(0.0)}, atol=1e-4)


def test_a_step_of_the_geometric_median_is_weiszfeld_s_from_the_coordinate_median():
    """The kite's median is (5/2, 0); w_k counts 1 / ||v - w_k||."""
    centre, points = np.array([2.5, 0.0]), np.array(KITE)
    near = 1 / np.linalg.norm(points - centre, axis=1)
    expected = near @ points / near.sum()
    step = jax.jit(functools.partial(rules.geometric_median, steps=1))
    out = step(in_two_leaves(KITE), jnp.ones(4), jnp.ones(4, bool))
    close(out, {"x": expected[:1], "y": expected[1]}, atol=1e-5)


def test_a_client_with_more_weight_than_the_rest_is_the_geometric_median():
    out = GEOMETRIC(in_two_leaves(KITE), jnp.array([1.0, 4.0, 1.0, 1.0]), jnp.ones(4, bool))
    close(out, {"x": np.array([2.0]), "y": np.array(3.0)}, atol=1e-4)


def test_a_client_at_infinity_pulls_the_geometric_median_as_a_unit_vector():
    # (0, 1), (0, -1) and (inf, 0): 2 x / sqrt(x^2 + 1) = 1 at x = 1 / sqrt(3)
    points = in_two_leaves([[0.0, 1.0], [0.0, -1.0], [FAR, 0.0]])
    out = GEOMETRIC(points, jnp.ones(3), jnp.ones(3, bool))
    close(out, {"x": np.array([3**-0.5]), "y": np.array(0.0)}, atol=1e-5)


@pytest.mark.parametrize("malicious, best", [(0, 3.0), (1, 1.0)])  # 3 neighbours, or 2
def test_krum_takes_the_upload_with_the_nearest_neighbours(malicious, best):
    assert float(KRUM(LINE, jnp.ones(5), ALL, malicious=malicious)) == best


def test_krum_measures_all_leaves_together():
    # on either axis by itself, the row (0, 0) is one of the most central
    points = [[0.0, 0.0], [5.0, 0.1], [5.1, 0.0], [5.0, 0.0], [0.0, 5.0]]
    out = KRUM(in_two_leaves(points), jnp.ones(5), ALL, malicious=1)
    assert (out["x"].tolist(), float(out["y"])) == ([5.0], 0.0)


@pytest.mark.parametrize("chosen, mean", [(1, 1.0), (2, 0.5), (3, 4 / 3), (4, 2.75), (5, 22.2)])
def test_the_two_nearest_squared_distances_rank_five_uploads_with_one_malicious(chosen, mean):
    # 0: 1 + 9, 1: 1 + 4, 3: 4 + 9, 7: 16 + 36, 100: 93^2 + 97^2
    out = MULTI_KRUM(LINE, jnp.ones(5), ALL, malicious=1, chosen=chosen)
    assert float(out) == pytest.approx(mean)


def test_multi_krum_averages_all_but_the_malicious_and_ignores_weights():
    assert float(MULTI_KRUM(LINE, jnp.ones(5), ALL, malicious=1)) == pytest.approx(2.75)
    assert float(MULTI_KRUM(LINE, jnp.arange(5.0), ALL, malicious=0)) == pytest.approx(22.2)


def test_krum_counts_valid_rows_only():
    values = jnp.concatenate([LINE, jnp.array([jnp.nan, jnp.inf])])
    valid = jnp.arange(7) < 5
    assert float(KRUM(values, jnp.ones(7), valid, malicious=1)) == 1.0
    assert float(MULTI_KRUM(values, jnp.ones(7), valid, malicious=1)) == pytest.approx(2.75)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_krum_of_too_few_rows_is_their_first_and_of_nobody_zero(count):
    assert float(KRUM(LINE + 1, jnp.ones(5), jnp.arange(5) < count, malicious=1)) == min(count, 1)


@pytest.mark.parametrize("steps, expected", [(0, 0.0), (1, 0.75), (2, 1.125), (3, 1.3125)])
def test_centred_clipping_moves_by_the_mean_of_clipped_changes(steps, expected):
    args = (jnp.array([0.5, 4.0]), jnp.ones(2), jnp.ones(2, bool), jnp.array(0.0), 1.0)
    assert float(CENTRED(*args, steps=steps)) == pytest.approx(expected)


def test_centred_clipping_clips_all_leaves_together_and_ignores_weights_and_invalid_rows():
    points, centre = in_two_leaves([[3.0, 4.0], [jnp.nan, 1.0]]), {"x": jnp.zeros(1), "y": jnp.array(0.0)}
    out = CENTRED(points, jnp.array([0.0, 9.0]), jnp.array([True, False]), centre, 1.0, steps=1)
    close(out, {"x": np.array([0.6]), "y": np.array(0.8)})


def test_centred_clipping_of_nobody_is_its_centre():
    assert CENTRED(jnp.full((2, 1), jnp.nan), jnp.ones(2), jnp.zeros(2, bool), jnp.array([7.0]), 1.0) == 7.0


ROBUST = {
    "median": rules.coordinate_median,
    "trimmed_mean": functools.partial(rules.trimmed_mean, trim=0.25),
    "geometric_median": rules.geometric_median,
    "krum": functools.partial(rules.krum, malicious=2),
    "multi_krum": functools.partial(rules.multi_krum, malicious=2),
    "centred_clipping": lambda x, w, v: rules.centred_clipping(
        x, w, v, jax.tree.map(lambda a: 0 * a[0], x), 1.0
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.long
def test_two_finite_uploads_of_either_huge_sign_leave_a_robust_rule_near_the_others(rule, dtype):
    near = jax.tree.map(lambda leaf: leaf.astype(dtype), stacked(k=8))
    poisoned = jax.tree.map(lambda leaf: leaf.at[3].set(FAR).at[5].set(-FAR), near)
    out = jax.jit(ROBUST[rule])(poisoned, jnp.ones(8), jnp.ones(8, bool))
    bound = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(near))
    worst = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(out))
    assert 0 < worst <= bound  # NaN fails this, too


OF_UNITS = {
    "geometric_median": lambda x, unit: rules.geometric_median(
        x, jnp.ones(4), jnp.ones(4, bool), smoothing=1e-6 * unit
    ),
    "krum": lambda x, unit: rules.krum(x, jnp.ones(4), jnp.ones(4, bool), malicious=0),
    "multi_krum": lambda x, unit: rules.multi_krum(x, jnp.ones(4), jnp.ones(4, bool), malicious=1),
    "centred_clipping": lambda x, unit: rules.centred_clipping(
        x, jnp.ones(4), jnp.ones(4, bool), 0 * x[0], unit
    ),
}


@pytest.mark.parametrize("rule", OF_UNITS)
@pytest.mark.parametrize("unit", [1e-25, 1e30])
def test_the_unit_of_uploads_does_not_matter(rule, unit):
    # squares of these distances are not representable
    plain, scaled = (
        jax.jit(OF_UNITS[rule], static_argnums=1)((1 + jnp.array(KITE)) * u, u) for u in (1.0, unit)
    )
    assert plain.any()
    np.testing.assert_allclose(scaled / unit, plain, rtol=1e-5, atol=1e-6)


# running sums
# ------------------------------------------------------------------------------------------------------------


def streamed(upload: dict, clients: int, weight: float | None, lanes: int = 8) -> dict:
    """What the engine does: the same upload from so many clients, some lanes at a time."""
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), upload)

    def receive(i, total):
        valid = i * lanes + jnp.arange(lanes) < clients
        dirty = jax.tree.map(lambda x: jnp.where(sums.broadcast_left(valid, x), x, x * jnp.nan), rows)
        return sums.add_stacked(total, dirty, valid, None if weight is None else jnp.full(lanes, weight))

    ticks = -(-clients // lanes)
    start = sums.sum_zeros(upload, floating=weight is not None)
    return jax.jit(lambda: jax.lax.fori_loop(0, ticks, receive, start))()


def test_the_streamed_mean_of_3001_bfloat16_uploads_is_the_upload():
    # in bfloat16 the running total stops growing: [0.157, 0.629]
    upload = {"x": jnp.array([1.0, 3.0], jnp.bfloat16)}
    total = streamed(upload, 3001, weight=30.0)
    mean = sums.sum_value(jax.tree.map(lambda x: x / (30.0 * 3001), total), upload)
    assert mean["x"].dtype == jnp.bfloat16 and mean["x"].tolist() == [1.0, 3.0]


def test_a_streamed_sum_becomes_bfloat16_only_at_its_end():
    upload = jnp.ones((), jnp.bfloat16)
    total = streamed({"x": upload}, 3000, weight=None)["x"]
    assert total.dtype == jnp.float32 and float(total) == 3000
    assert float(sums.sum_value(total, upload)) == 3008  # the bfloat16 nearest to 3000


def test_sums_of_integers_are_exact_and_of_booleans_mean_any():
    total = {"n": jnp.array(2**24, jnp.int32), "b": jnp.array([False, False, True])}
    rows = {"n": jnp.array([1, 1, 9]), "b": jnp.array([[True, False, False]] * 2 + [[True, True, True]])}
    out = jax.jit(sums.add_stacked)(total, rows, jnp.array([True, False, False]))
    assert (int(out["n"]), out["b"].tolist()) == (2**24 + 1, [True, False, True])
    zeros = sums.sum_zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), total))
    assert (zeros["n"].dtype, zeros["b"].dtype) == (jnp.int32, jnp.bool_)


def test_a_weighted_mean_of_integers_is_rounded_once_at_the_end():
    rows, weight = {"n": jnp.array([1, 2, 2])}, jnp.array([0.2, 0.3, 0.5])
    zeros = sums.sum_zeros({"n": jax.ShapeDtypeStruct((), jnp.int32)}, floating=True)
    total = jax.jit(sums.add_stacked)(zeros, rows, jnp.ones(3, bool), weight)
    assert float(total["n"]) == pytest.approx(1.8) and int(sums.sum_value(total, rows)["n"]) == 2


# one Aggregation: clipping, merging, noise, server optimiser
# ------------------------------------------------------------------------------------------------------------


def made(**options) -> agg.Aggregation:
    return agg.make_aggregation(with_options(agg.AggregationOptions(), options, options))


def one_round(aggregation: agg.Aggregation, uploads, reference, weight, seed: int = 0, state=None):
    """One round as the engine plays it: (mean, state)."""

    def play(uploads, reference, weight, state, key):
        if aggregation.pre:
            uploads, weight = jax.vmap(aggregation.pre, in_axes=(0, None, 0))(uploads, reference, weight)
        weight, valid, _ = sums.finite_guard(uploads, weight, jnp.ones(weight.shape, bool))
        if aggregation.reduce:
            mean = aggregation.reduce(uploads, reference, weight, valid, key)
        else:
            mean = rules.weighted_mean(uploads, weight, valid)
        if aggregation.post:
            mean, state = aggregation.post(mean, reference, state, jnp.sum(valid), key)
        return mean, state

    state = aggregation.init(reference) if state is None else state
    return jax.jit(play)(uploads, reference, weight, state, jax.random.key(seed))


def test_no_options_are_the_streamed_weighted_mean_and_nothing_else():
    plain = made()
    assert plain.name == "mean" and plain.init({"x": jnp.ones(2)}) == ()
    assert (plain.pre, plain.reduce, plain.post, plain.noise) == (None, None, None, False)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, 2.8),
        ({"aggregator": "uniform"}, 22.2),
        ({"aggregator": "median"}, 3.0),
        ({"aggregator": "trimmed_mean"}, 22.2),
        ({"aggregator": "trimmed_mean", "trim": 0.2}, 11 / 3),
        ({"aggregator": "geometric_median"}, 3.0),
        ({"aggregator": "krum"}, 1.0),
        ({"aggregator": "krum", "malicious_bound": 0}, 3.0),
        ({"aggregator": "multi_krum"}, 2.75),
        ({"aggregator": "multi_krum", "malicious_bound": 0}, 22.2),
        ({"aggregator": "centred_clipping"}, 5.208),
        ({"aggregator": "centred_clipping", "clip_radius": 0.5}, 0.976),
    ],
)
def test_a_rule_and_its_options_merge_0_1_3_7_and_100(options, expected):
    weight = jnp.array([1.0, 1.0, 2.0, 1.0, 0.0])
    assert float(one_round(made(**options), LINE, jnp.array(0.0), weight)[0]) == pytest.approx(
        expected, rel=1e-4
    )


def test_both_means_stream_and_other_rules_gather():
    streams = {name: made(aggregator=name).reduce is None for name in (*ROBUST, "mean", "uniform")}
    assert [name for name, alone in streams.items() if alone] == ["mean", "uniform"]


def test_a_weight_that_is_no_number_is_still_rejected_where_all_count_the_same():
    weight = jnp.array([jnp.nan, -1.0, jnp.inf, 0.0, 5.0])
    assert float(one_round(made(aggregator="uniform"), LINE, jnp.array(0.0), weight)[0]) == pytest.approx(
        53.5
    )


def test_a_change_of_norm_5_is_clipped_to_norm_1_over_all_leaves():
    reference = {"x": jnp.array([10.0]), "y": jnp.array(-10.0), "n": jnp.array(1)}
    upload = {"x": jnp.array([13.0]), "y": jnp.array(-6.0), "n": jnp.array(7)}
    pre = jax.jit(made(clip_norm=1.0).pre)
    out, weight = pre(upload, reference, jnp.array(30.0))
    close(out, {"x": np.array([10.6]), "y": np.array(-9.2), "n": np.array(7)})
    assert float(weight) == 30
    assert_same(jax.jit(made(clip_norm=5.01).pre)(upload, reference, jnp.array(30.0))[0], upload)


@pytest.mark.parametrize("upload", [[FAR, -FAR], [-FAR, FAR]])
def test_a_huge_change_is_clipped_and_one_that_is_not_finite_stays_for_the_guard(upload):
    out, _ = made(clip_norm=1.0).pre(jnp.array(upload), jnp.array([-FAR, FAR]) * 0.1, jnp.array(1.0))
    assert jnp.isfinite(out).all()
    out, _ = jax.jit(made(clip_norm=1.0).pre)(jnp.array(upload), jnp.zeros(2), jnp.array(1.0))
    np.testing.assert_allclose(out, np.sign(upload) * 2**-0.5, rtol=1e-6)
    for bad in (jnp.nan, jnp.inf):
        assert not sums.is_finite(
            made(clip_norm=1.0).pre(jnp.array([bad, 0]), jnp.zeros(2), jnp.array(1.0))[0]
        )


def test_a_clipped_mean_forgets_a_huge_client():
    uploads, weight = jnp.array([[FAR, 0.0], [0.0, 0.0], [0.0, 0.0]]), jnp.ones(3)
    out, _ = one_round(made(clip_norm=3.0), uploads, jnp.zeros(2), weight)
    np.testing.assert_allclose(out, [1.0, 0.0], rtol=1e-6)


MANY = {"x": jnp.full(20_000, 5.0), "y": jnp.full((100, 200), 5.0), "n": jnp.array(3)}


def noise_of(aggregation: agg.Aggregation, count: int, seed: int = 0) -> dict:
    post = jax.jit(aggregation.post)
    noisy, state = post(MANY, MANY, aggregation.init(MANY), jnp.array(count), jax.random.key(seed))
    assert state == ()
    return jax.tree.map(jnp.subtract, noisy, MANY)


def test_the_noise_has_deviation_multiplier_times_norm_over_count():
    noise = noise_of(made(clip_norm=3.0, noise_multiplier=2.0), count=4)
    for name in ("x", "y"):
        assert float(jnp.std(noise[name])) == pytest.approx(2 * 3 / 4, rel=0.03)
        assert abs(float(jnp.mean(noise[name]))) < 0.05
    assert int(noise["n"]) == 0


def test_noise_differs_between_leaves_coordinates_and_keys_and_halves_with_twice_the_clients():
    aggregation = made(clip_norm=3.0, noise_multiplier=2.0)
    one, other, half = noise_of(aggregation, 4), noise_of(aggregation, 4, seed=1), noise_of(aggregation, 8)
    flat = jnp.stack([one["x"], one["y"].ravel(), other["x"]])
    np.testing.assert_allclose(jnp.corrcoef(flat), np.eye(3), atol=0.05)
    assert len(np.unique(one["x"])) > 10_000
    np.testing.assert_allclose(half["x"], one["x"] / 2, atol=1e-5)


@pytest.mark.parametrize("rule", ["mean", "uniform"])
def test_with_noise_every_upload_counts_the_same(rule):
    aggregation = made(aggregator=rule, clip_norm=1000.0, noise_multiplier=1e-9)
    out, _ = one_round(aggregation, LINE, jnp.array(0.0), jnp.array([1.0, 1.0, 2.0, 1.0, 0.0]))
    assert float(out) == pytest.approx(22.2, rel=1e-4)


def server_steps(count: int, **options) -> list[float]:
    """The server's value after each of some rounds in which clients come back 1 above where they started."""
    aggregation, value, state, values = made(**options), jnp.array(2.0), None, []
    for _ in range(count):
        value, state = one_round(aggregation, jnp.full(3, value + 1), value, jnp.ones(3), state=state)
        values.append(float(value))
    return values


def test_server_momentum_adds_up_the_clients_changes():  # FedAvgM: m = 1, then 0.9 * 1 + 1
    assert server_steps(2, server_optimiser="momentum") == pytest.approx([3.0, 4.9])
    half = server_steps(2, server_optimiser="momentum", server_step=0.5, server_momentum=0.5)
    assert half == pytest.approx([2.5, 3.25])


def test_server_momentum_of_0_and_step_1_is_the_mean():
    assert server_steps(2, server_optimiser="momentum", server_momentum=0.0) == pytest.approx([3.0, 4.0])


def test_fedadam_takes_the_steps_of_the_paper():  # no bias correction, v = tau^2 before the first round
    first = 0.1 / (np.sqrt(0.99 * 0.25 + 0.01) + 0.5)
    second = 0.19 / (np.sqrt(0.99**2 * 0.25 + 0.99 * 0.01 + 0.01) + 0.5)
    out = server_steps(2, server_optimiser="adam", server_step=3.0, server_adaptivity=0.5)
    assert out == pytest.approx([2 + 3 * first, 2 + 3 * (first + second)])
    assert server_steps(1, server_optimiser="adam") == pytest.approx(
        [2 + 0.1 * 0.1 / (np.sqrt(0.99e-6 + 0.01) + 1e-3)]
    )


@pytest.mark.parametrize("tau, second_moment", [(0.5, 0.25 + 0.01), (2.0, 4.0 - 0.01)])
def test_fedyogi_moves_its_second_moment_by_the_sign(tau, second_moment):
    out = server_steps(
        1, server_optimiser="yogi", server_adaptivity=tau, server_momentum=0.5, server_step=1.0
    )
    assert out == pytest.approx([2 + 0.5 / (np.sqrt(second_moment) + tau)])


@pytest.mark.parametrize("kind", ["momentum", "adam", "yogi"])
def test_server_optimisers_keep_integers_and_half_precision(kind):
    reference = {"h": jnp.zeros(2, jnp.bfloat16), "n": jnp.array(1), "b": jnp.array(False)}
    uploads = {"h": jnp.ones((3, 2), jnp.bfloat16), "n": jnp.full(3, 5), "b": jnp.ones(3, bool)}
    out, state = one_round(made(server_optimiser=kind), uploads, reference, jnp.ones(3))
    assert (out["h"].dtype, int(out["n"]), bool(out["b"])) == (jnp.bfloat16, 5, True)
    assert out["h"].any() and {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}


def test_noise_comes_before_the_server_optimiser():
    noisy = noise_of(made(clip_norm=3.0, noise_multiplier=2.0), count=4)
    both = made(clip_norm=3.0, noise_multiplier=2.0, server_optimiser="momentum", server_step=0.5)
    out, _ = jax.jit(both.post)(MANY, MANY, both.init(MANY), jnp.array(4), jax.random.key(0))
    np.testing.assert_allclose(out["x"] - 5, 0.5 * noisy["x"], atol=1e-5)


def test_the_name_says_what_is_on():
    assert made(aggregator="median").name == "median"
    assert made(clip_norm=1.0, noise_multiplier=1.0).name == "mean, clip_norm, noise_multiplier"
    assert made(clip_norm=1.0, noise_multiplier=1.0).noise and not made(clip_norm=1.0).noise
    assert made(aggregator="krum", server_optimiser="adam").name == "krum, server adam"


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"trim": 0.2},
            "trim: only trimmed_mean reads it, and aggregator is 'mean'; nearest: --aggregator trimmed_mean",
        ),
        (
            {"malicious_bound": 2, "aggregator": "median"},
            "malicious_bound: only krum and multi_krum read it, and aggregator is 'median'; "
            "nearest: --aggregator krum",
        ),
        (
            {"clip_radius": 1.0, "aggregator": "krum"},
            "clip_radius: only centred_clipping reads it, and aggregator is 'krum'; "
            "nearest: --aggregator centred_clipping",
        ),
        (
            {"server_step": 1.0},
            "server_step: only momentum, adam and yogi read it, and server_optimiser is 'none'; "
            "nearest: --server-optimiser momentum",
        ),
        (
            {"server_momentum": 0.5},
            "server_momentum: only momentum, adam and yogi read it, and server_optimiser is 'none'; "
            "nearest: --server-optimiser momentum",
        ),
        (
            {"server_adaptivity": 0.1, "server_optimiser": "momentum"},
            "server_adaptivity: only adam and yogi read it, and server_optimiser is 'momentum'; "
            "nearest: --server-optimiser adam",
        ),
        (
            {"noise_multiplier": 1.0},
            "noise_multiplier: 1.0 is noise in units of --clip-norm; also give --clip-norm",
        ),
        (
            {"noise_multiplier": 1.0, "clip_norm": 1.0, "aggregator": "median"},
            "noise_multiplier: 1.0 is noise on a mean; use --aggregator mean, not 'median'",
        ),
        ({"clip_norm": -1.0}, "clip_norm: -1.0 must be finite and 0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(options, message):
    with pytest.raises(InputError) as error:
        made(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "field, wrong, nearest", [("aggregator", "medain", "median"), ("server_optimiser", "adm", "adam")]
)
def test_an_unknown_name_is_refused_with_the_nearest(field, wrong, nearest):
    options = agg.AggregationOptions()
    object.__setattr__(options, field, wrong)  # tests check the types of fields; users' programs do not
    with pytest.raises(InputError) as error:
        agg.make_aggregation(options)
    assert str(error.value) == f"{field}: unknown value {wrong!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    "field, bad",
    [
        ("trim", (-0.1, 0.5, float("nan"))),
        ("malicious_bound", (-1,)),
        ("clip_radius", (0.0, -1.0, float("inf"), float("nan"))),
        ("clip_norm", (-1.0, float("inf"), float("nan"))),
        ("noise_multiplier", (-1.0, float("nan"))),
        ("server_step", (0.0, float("nan"))),
        ("server_momentum", (-0.1, 1.0, float("nan"))),
        ("server_adaptivity", (0.0, float("nan"))),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, bad):
    reads = {"trim": "trimmed_mean", "malicious_bound": "krum", "clip_radius": "centred_clipping"}
    base = {"aggregator": reads.get(field, "mean"), "clip_norm": 1.0}
    base |= {"server_optimiser": "adam"} if field.startswith("server") else {}
    for value in bad:
        with pytest.raises(InputError, match=f"^{field}: {value} .*(must be|nearest)"):
            made(**base | {field: value})


# rules on class prototypes
# ------------------------------------------------------------------------------------------------------------


def prototypes(columns) -> jax.Array:
    """Values [C][K] as prototypes [K, C, 1]."""
    return jnp.asarray(columns, jnp.float32).T[..., None]


def test_prototypes_are_merged_class_by_class_over_their_holders():
    vectors = prototypes([[0, 1, 3, 7, 100], [4, 6, np.nan, 8, np.nan], [np.nan] * 5])
    present = ~jnp.isnan(vectors[..., 0])
    merge = jax.jit(fppl.per_class(made(aggregator="median")))
    mean, held = merge(vectors, present, jnp.ones(5), ALL, jax.random.key(0))
    assert mean[:, 0].tolist() == [3.0, 6.0, 0.0] and held.tolist() == [True, True, False]
    mean, _ = merge(vectors, present, jnp.ones(5), ALL.at[4].set(False), jax.random.key(0))
    assert mean[:, 0].tolist() == [2.0, 6.0, 0.0]


def test_prototypes_are_averaged_without_weights_where_the_rule_is_a_mean():
    vectors, present = prototypes([[2, 6, 100]]), jnp.array([[True], [True], [False]])
    for rule in ("mean", "uniform"):
        merge = jax.jit(fppl.per_class(made(aggregator=rule)))
        mean, held = merge(vectors, present, jnp.array([9.0, 1.0, 1.0]), jnp.ones(3, bool), jax.random.key(0))
        assert mean.tolist() == [[4.0]] and held.tolist() == [True]


SCREEN = jax.jit(fppl.screen_prototypes)


def test_a_prototype_further_than_three_median_distances_is_dropped():
    # distances to 10 are 1, 2, 3, 6 and 7; the median is 3 for all five
    vectors = prototypes([[9, 12, 13, 4, 3], [9, 12, 13, 4, 20], [9, 12, 13, FAR, -FAR]])
    kept = SCREEN(vectors, jnp.ones((5, 3), bool), jnp.full((3, 1), 10.0), ALL)
    assert kept.T.tolist() == [[True] * 5, [True] * 4 + [False], [True] * 3 + [False] * 2]
    assert fppl.screen_prototypes(vectors, jnp.ones((5, 3), bool), jnp.full((3, 1), 10.0), ALL, 4.0)[
        :, 1
    ].all()


def test_screening_counts_the_valid_holders_and_keeps_two():
    vectors, present = prototypes([[9, 1000, 11, np.nan]]), jnp.array([[True], [True], [True], [False]])
    merged = jnp.array([[10.0]])
    assert SCREEN(vectors, present, merged, jnp.ones(4, bool))[:, 0].tolist() == [True, False, True, False]
    valid = jnp.array([True, True, False, True])
    for factor in (1.0, 3.0):
        kept = fppl.screen_prototypes(vectors, present, merged, valid, factor)
        assert kept[:, 0].tolist() == [True, True, False, False]


def test_screening_forgives_rounding_where_most_prototypes_are_the_merged_one():
    vectors = prototypes([[10, 10, 10, 10 * (1 + 2e-7), 10.1]])
    kept = SCREEN(vectors, jnp.ones((5, 1), bool), jnp.array([[10.0]]), ALL)
    assert kept[:, 0].tolist() == [True, True, True, True, False]


def test_a_screen_below_the_median_distance_is_refused():
    with pytest.raises(InputError, match="factor: 0.5 is too small; nearest valid value: 1"):
        fppl.screen_prototypes(
            jnp.ones((3, 1, 2)), jnp.ones((3, 1), bool), jnp.ones((1, 2)), jnp.ones(3, bool), 0.5
        )


# the finite guard
# ------------------------------------------------------------------------------------------------------------


def test_a_tree_with_one_nan_is_not_finite_and_integers_do_not_matter():
    assert bool(jax.jit(sums.is_finite)({"x": jnp.ones(3), "n": jnp.array([2**31 - 1])}))
    assert not bool(jax.jit(sums.is_finite)({"x": jnp.ones(3), "y": jnp.array([[0.0, jnp.nan]])}))
    assert not bool(sums.is_finite((jnp.ones(2, jnp.bfloat16) * jnp.inf, jnp.arange(3))))
    assert bool(sums.is_finite({"n": jnp.arange(3), "m": jnp.ones(2, bool)})) and bool(sums.is_finite(()))


@pytest.mark.parametrize("size", [3, sums.SMALL, sums.SMALL + 1])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_bad_number_is_found_in_leaves_of_any_size_unless_it_was_bad_before(size, bad):
    fine = {"a": jnp.ones(2), "n": jnp.arange(3), "x": jnp.ones(size), "y": jnp.zeros((2, 2), jnp.bfloat16)}
    dirty = fine | {"x": fine["x"].at[size - 1].set(bad)}
    assert bool(sums.is_finite(fine)) and not bool(sums.is_finite(dirty))
    became = jax.jit(sums.became_non_finite)
    assert bool(became(dirty, fine)) and not bool(became(fine, dirty)) and not bool(became(dirty, dirty))


def test_leaves_that_are_not_large_are_checked_as_one():
    leaves = [jnp.ones(2), jnp.arange(3), jnp.ones((2, 3)), jnp.ones(sums.SMALL + 1)]
    assert sorted(each.shape for each in sums.joined(leaves)) == [(8,), (sums.SMALL + 1,)]


def test_leaves_that_were_joined_are_parted_into_their_shapes_and_types():
    shapes = (2,), (sums.SMALL + 1,), (2, 3), (), (1, sums.SMALL + 1), (0, 3)
    draw = np.random.default_rng(0).normal
    leaves = [jnp.asarray(draw(size=shape), jnp.float32) for shape in shapes]
    leaves[2] = leaves[2].astype(jnp.bfloat16)
    for few in (leaves, leaves[1::3], leaves[:1], []):
        same(sums.parted(sums.joined(few), few), few)


@pytest.mark.parametrize("holds", [True, False])
def test_one_of_two_trees_is_taken_with_all_its_leaves_and_only_large_ones_are_chosen_by_number(holds):
    def filled(x):
        return {"a": jnp.full(3, x), "b": (jnp.full(sums.SMALL + 1, x), jnp.full((), bool(x)))}

    new, old = filled(1.0), filled(0.0)
    choose = jax.jit(sums.one_of)
    same(choose(jnp.bool_(holds), new, old), new if holds else old)
    assert str(jax.make_jaxpr(sums.one_of)(jnp.bool_(holds), new, old)).count("= select_n") == 1


def test_one_non_finite_leaf_rejects_the_client():
    tree = stacked()
    tree["b"] = tree["b"].at[3, 1, 1].set(jnp.inf)
    weight, valid, rejected = jax.jit(sums.finite_guard)(tree, jnp.arange(1.0, 6.0), ALL)
    assert (
        weight.tolist() == [1, 2, 3, 0, 5]
        and valid.tolist() == [True, True, True, False, True]
        and int(rejected) == 1
    )
    close(
        RULES["mean"](tree, weight, valid),
        RULES["mean"](rows(tree, [0, 1, 2, 4]), jnp.array([1.0, 2, 3, 5]), jnp.ones(4, bool)),
    )


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -1.0])
def test_a_bad_weight_rejects_the_client(bad):
    weight, valid, rejected = sums.finite_guard(stacked(), jnp.ones(K).at[0].set(bad), ALL)
    assert weight.tolist() == [0, 1, 1, 1, 1] and not bool(valid[0]) and int(rejected) == 1


def test_all_rejected_counts_everybody_and_absent_clients_are_not_counted():
    dirty = jax.tree.map(lambda leaf: leaf * jnp.nan, stacked())
    assert int(sums.finite_guard(dirty, jnp.ones(K), ALL)[2]) == K
    weight, valid, rejected = sums.finite_guard(dirty, jnp.ones(K), ALL.at[0].set(False))
    assert int(rejected) == K - 1 and not valid.any() and not weight.any()


# conflation (VFCL eq. 11 and section 8, O1 and O5)
# ------------------------------------------------------------------------------


@jax.jit
def conflate(mean, sigma):
    """As in a run: what the clients send adds up. Leaves [K, ...]."""
    terms = conflation.precision_terms(mean, sigma)
    return conflation.conflate_sums(*jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), terms))


@pytest.mark.parametrize(
    "mean, variance, expected",
    [
        ([0, 2], [1, 1], (1, 0.5)),
        ([0, 3], [1, 0.25], (2.4, 0.2)),
        ([3, 3, 3, 3], [2, 2, 2, 2], (3, 0.5)),
        ([-4], [0.3], (-4, 0.3)),
    ],
)
def test_conflation_is_the_product_of_gaussians(mean, variance, expected):
    out = conflate(jnp.array(mean, jnp.float32), jnp.sqrt(jnp.array(variance, jnp.float32)))
    assert (float(out[0]), float(out[1]) ** 2) == pytest.approx(expected, rel=1e-6)


def posterior(seed: int = 1):
    return stacked(seed), jax.tree.map(lambda leaf: jnp.exp(leaf), stacked(seed + 1))


@settings(max_examples=10)
@given(order=st.permutations(range(K)), seed=st.integers(0, 99))
def test_permuting_clients_does_not_change_the_conflation(order, seed):
    mean, sigma = posterior(seed)
    order = list(order)
    close(conflate(mean, sigma), conflate(rows(mean, order), rows(sigma, order)))


def test_conflation_is_associative():
    mean, sigma = posterior()
    ab = conflate(rows(mean, [0, 1]), rows(sigma, [0, 1]))
    abc = jax.tree.map(lambda first, leaf: jnp.stack([first, leaf[2]]), ab, (mean, sigma))
    close(conflate(*abc), conflate(rows(mean, [0, 1, 2]), rows(sigma, [0, 1, 2])))


def test_conflating_nobody_is_the_flat_gaussian():
    assert [float(x) for x in conflation.conflate_sums(jnp.zeros(()), jnp.zeros(()))] == [0.0, float("inf")]


def test_conflation_stays_finite_for_tiny_and_huge_sigma():
    mean = jnp.array([[1.0, 1.0], [3.0, 3.0]])
    out, sigma = conflate(mean, jnp.array([[0.0, 1e15], [1e-30, 1e15]]))
    np.testing.assert_allclose(out, [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(sigma, [1e-6, 1e15 / np.sqrt(2)], rtol=1e-6)


def test_softplus_inverse_undoes_softplus():
    x = jnp.linspace(-15, 15, 20001)
    assert float(jnp.abs(jax.jit(conflation.softplus_inverse)(jax.nn.softplus(x)) - x).max()) <= 1e-6


def test_softplus_inverse_is_finite_with_a_finite_gradient_over_all_positive_floats():
    x = jnp.array([0.0, 1e-30, 1e-6, 0.02, 0.7, 1.0, 80.0, 1e30])
    value, slope = jax.vmap(jax.value_and_grad(conflation.softplus_inverse))(x)
    assert jnp.isfinite(value).all() and jnp.isfinite(slope[1:]).all()
    np.testing.assert_allclose(jax.nn.softplus(conflation.softplus_inverse(jnp.array(0.02))), 0.02, rtol=1e-6)


# prototypes (FPPL eq. 5; PILoRA eq. 11-13 and section 10, O1-O4)
# ----------------------------------------------------------------


def test_the_global_prototype_is_the_unweighted_mean_over_holders():  # FPPL section 9, item 12
    prototype = jnp.array([[[2.0, 0.0]], [[0.0, 6.0]], [[jnp.nan, jnp.nan]]])
    present = jnp.array([[True], [True], [False]])
    mean, held = jax.jit(fppl.prototype_mean)(prototype, present, jnp.ones(3, bool))
    assert mean.tolist() == [[1.0, 3.0]] and held.tolist() == [True]


def test_the_mean_of_a_large_pool_needs_no_copy_of_it():
    clients, classes, width = 500, 50, 64
    pool = jax.ShapeDtypeStruct((clients, classes, width), jnp.float32)
    present = jax.ShapeDtypeStruct((clients, classes), bool)
    valid = jax.ShapeDtypeStruct((clients,), bool)
    compiled = jax.jit(fppl.prototype_mean).lower(pool, present, valid).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * clients * classes * width / 20


def test_classes_that_no_valid_client_holds_have_no_prototype():
    prototype = jnp.array([[[1.0], [jnp.nan]], [[jnp.nan], [5.0]]])
    mean, held = fppl.prototype_mean(
        prototype, jnp.array([[True, False], [False, True]]), jnp.array([True, False])
    )
    assert mean.tolist() == [[1.0], [0.0]] and held.tolist() == [True, False]


ONE_DIMENSION = (
    per_class([[1], [2], [4]], 1),
    per_class([[0], [0], [np.nan]], 1),
    jnp.array([[True], [True], [False]]),
)
TWO_DIMENSIONS = (
    per_class([[0, 0], [3, 4], [6, 8]], 2),
    per_class([[0, 0], [3, 4], [np.nan, np.nan]], 2),
    jnp.array([[True], [True], [False]]),
)


@pytest.mark.parametrize(
    "inputs, form, weights, merged",
    [
        (ONE_DIMENSION, RELEASED, [0.959314, 0.034223, 0.006464], [1.053614]),
        (ONE_DIMENSION, PAPER, [0.374409, 0.319050, 0.306540], [2.238671]),
        (TWO_DIMENSIONS, RELEASED, [0.498321, 0.498321, 0.003358], [1.515109, 2.020146]),
        (TWO_DIMENSIONS, PAPER, [0.354770, 0.354770, 0.290461], [2.807074, 3.742765]),
    ],
)
def test_reweighting_matches_the_hand_computed_cases_of_both_forms(inputs, form, weights, merged):
    np.testing.assert_allclose(WEIGHTS(*inputs, jnp.ones(3, bool), **form)[:, 0], weights, atol=1e-6)
    np.testing.assert_allclose(REWEIGHT(*inputs, jnp.ones(3, bool), **form)[0], merged, atol=2e-6)


@pytest.mark.parametrize("form, best, rest", [(RELEASED, 0.9428, 0.0064), (PAPER, 0.1195, 0.0978)])
def test_ten_clients_of_which_one_is_nearest(form, best, rest):
    prototype, feature = per_class([[1]] + [[2]] * 9, 1), jnp.zeros((10, 1, 1))
    weight = WEIGHTS(prototype, feature, jnp.ones((10, 1), bool), jnp.ones(10, bool), **form)[:, 0]
    np.testing.assert_allclose(weight, [best] + [rest] * 9, atol=5e-5)


@pytest.mark.parametrize("form", [RELEASED, PAPER])
def test_equal_distances_and_single_clients_give_uniform_weights(form):
    prototype, feature = per_class([[1], [-1]], 1), jnp.zeros((2, 1, 1))
    everyone = jnp.ones((2, 1), bool)
    assert WEIGHTS(prototype, feature, everyone, jnp.ones(2, bool), **form)[:, 0].tolist() == [0.5, 0.5]
    assert WEIGHTS(prototype, feature, everyone, jnp.array([False, True]), **form)[:, 0].tolist() == [
        0.0,
        1.0,
    ]
    assert WEIGHTS(feature, feature, everyone, jnp.ones(2, bool), **form)[:, 0].tolist() == [
        0.5,
        0.5,
    ]  # all distances are 0


def test_distances_that_differ_by_rounding_only_count_as_equal():
    prototype = per_class([[1], [1 + 2e-7]], 1)
    weight = WEIGHTS(prototype, jnp.zeros((2, 1, 1)), jnp.ones((2, 1), bool), jnp.ones(2, bool))
    np.testing.assert_allclose(weight[:, 0], [0.5, 0.5])


def test_a_zero_distance_takes_the_limit_of_a_tiny_one():
    feature, present = per_class([[0], [0], [0]], 1), jnp.array([[True], [False], [False]])
    limit = WEIGHTS(per_class([[1e-9], [1], [2]], 1), feature, present, jnp.ones(3, bool))
    np.testing.assert_allclose(
        WEIGHTS(per_class([[0], [1], [2]], 1), feature, present, jnp.ones(3, bool)), limit, atol=1e-6
    )


@pytest.mark.parametrize("form", [RELEASED, PAPER])
def test_a_class_that_nobody_holds_takes_the_plain_mean_of_the_valid_clients(form):
    prototype = per_class([[1], [2], [np.nan], [6]], 1)
    feature = jnp.full((4, 1, 1), jnp.nan)
    out = REWEIGHT(prototype, feature, jnp.zeros((4, 1), bool), jnp.array([True, True, False, True]), **form)
    np.testing.assert_allclose(out, [[3.0]], rtol=1e-6)


def test_reweighting_treats_every_class_by_itself_and_ignores_invalid_clients():
    rng = np.random.default_rng(0)
    prototype, feature = (jnp.asarray(rng.normal(size=(4, 6, 8)), jnp.float32) for _ in range(2))
    present = jnp.asarray(rng.random((4, 6)) < 0.6)
    valid = jnp.array([True, True, False, True])
    out = REWEIGHT(prototype, feature, present, valid)
    dirty = jnp.where(present[..., None], feature, jnp.inf).at[2].set(jnp.nan)
    assert_same(REWEIGHT(prototype.at[2].set(jnp.nan), dirty, present, valid), out)
    keep = np.array([3, 0, 1])
    for c in range(6):
        one = REWEIGHT(
            prototype[keep, c : c + 1], feature[keep, c : c + 1], present[keep, c : c + 1], jnp.ones(3, bool)
        )
        np.testing.assert_allclose(one[0], out[c], rtol=1e-5, atol=1e-6)


def test_reweighting_nobody_gives_zeros_not_nan():
    bad = jnp.full((2, 3, 4), jnp.nan)
    assert not REWEIGHT(bad, bad, jnp.ones((2, 3), bool), jnp.zeros(2, bool)).any()


def test_reweighting_batches_under_vmap():
    batch = [jnp.stack([x, x]) for x in (*ONE_DIMENSION, jnp.ones(3, bool))]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(pilora.prototype_reweight))(*batch)[:, 0, 0], [1.053614] * 2, atol=2e-6
    )


@pytest.mark.parametrize(
    "wrong, match", [({"distance": "l3"}, "distance"), ({"temperature_mode": "times"}, "temperature_mode")]
)
def test_unknown_forms_are_refused(wrong, match):
    with pytest.raises(InputError, match=match):
        pilora.prototype_reweight(*ONE_DIMENSION, jnp.ones(3, bool), **wrong)


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(InputError, match="temperature"):
        pilora.prototype_reweight(*ONE_DIMENSION, jnp.ones(3, bool), temperature=0.0)
