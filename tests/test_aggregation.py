"""Aggregation rules against closed forms, under jit and vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcljax.errors import InputError
from fcljax.federated import aggregation as agg

K = 5
RULES = {name: jax.jit(rule) for name, rule in agg.AGGREGATORS.items()}
CONFLATE = jax.jit(agg.conflate)
REWEIGHT = jax.jit(agg.prototype_reweight, static_argnames=("distance", "temperature_mode"))
WEIGHTS = jax.jit(agg.prototype_weights, static_argnames=("distance", "temperature_mode"))
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
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=1e-5),
        left,
        right,
    )


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
        agg.trimmed_mean(jnp.ones(3), jnp.ones(3), jnp.ones(3, bool), trim=trim)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_robust_rules_resist_one_huge_outlier_and_the_mean_does_not(rule):
    tree = stacked(k=10)
    poisoned = jax.tree.map(lambda leaf: leaf.at[3].set(1e30), tree)
    bound = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))
    worst = lambda out: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(out))
    assert worst(RULES[rule](poisoned, jnp.ones(10), jnp.ones(10, bool))) <= bound
    assert worst(RULES["mean"](poisoned, jnp.ones(10), jnp.ones(10, bool))) > 1e28


@settings(max_examples=15, deadline=None)
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
    out = jax.jit(jax.vmap(agg.AGGREGATORS[rule], in_axes=(0, None, 0)))(batch, jnp.arange(1.0, 6.0), valid)
    for i, tree in enumerate(trees):
        close(rows(out, i), RULES[rule](tree, jnp.arange(1.0, 6.0), valid[i]))


# the finite guard
# ------------------------------------------------------------------------------------------------------------


def test_a_tree_with_one_nan_is_not_finite_and_integers_do_not_matter():
    assert bool(jax.jit(agg.is_finite)({"x": jnp.ones(3), "n": jnp.array([2**31 - 1])}))
    assert not bool(jax.jit(agg.is_finite)({"x": jnp.ones(3), "y": jnp.array([[0.0, jnp.nan]])}))
    assert not bool(agg.is_finite((jnp.ones(2, jnp.bfloat16) * jnp.inf, jnp.arange(3))))
    assert bool(agg.is_finite({"n": jnp.arange(3), "m": jnp.ones(2, bool)})) and bool(agg.is_finite(()))


def test_one_non_finite_leaf_rejects_the_client():
    tree = stacked()
    tree["b"] = tree["b"].at[3, 1, 1].set(jnp.inf)
    weight, valid, rejected = jax.jit(agg.finite_guard)(tree, jnp.arange(1.0, 6.0), ALL)
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
    weight, valid, rejected = agg.finite_guard(stacked(), jnp.ones(K).at[0].set(bad), ALL)
    assert weight.tolist() == [0, 1, 1, 1, 1] and not bool(valid[0]) and int(rejected) == 1


def test_all_rejected_counts_everybody_and_absent_clients_are_not_counted():
    dirty = jax.tree.map(lambda leaf: leaf * jnp.nan, stacked())
    assert int(agg.finite_guard(dirty, jnp.ones(K), ALL)[2]) == K
    weight, valid, rejected = agg.finite_guard(dirty, jnp.ones(K), ALL.at[0].set(False))
    assert int(rejected) == K - 1 and not valid.any() and not weight.any()


# conflation (VFCL eq. 11 and section 8, O1 and O5)
# ------------------------------------------------------------------------------


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
    out = CONFLATE(
        jnp.array(mean, jnp.float32), jnp.sqrt(jnp.array(variance, jnp.float32)), jnp.ones(len(mean), bool)
    )
    assert (float(out[0]), float(out[1]) ** 2) == pytest.approx(expected, rel=1e-6)


def posterior(seed: int = 1):
    return stacked(seed), jax.tree.map(lambda leaf: jnp.exp(leaf), stacked(seed + 1))


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(K)), seed=st.integers(0, 99))
def test_permuting_clients_does_not_change_the_conflation(order, seed):
    mean, sigma = posterior(seed)
    order = list(order)
    close(CONFLATE(mean, sigma, ALL), CONFLATE(rows(mean, order), rows(sigma, order), ALL))


def test_conflation_is_associative():
    mean, sigma = posterior()
    ab = CONFLATE(rows(mean, [0, 1]), rows(sigma, [0, 1]), jnp.ones(2, bool))
    abc = jax.tree.map(lambda first, leaf: jnp.stack([first, leaf[2]]), ab, (mean, sigma))
    close(CONFLATE(*abc, jnp.ones(2, bool)), CONFLATE(mean, sigma, jnp.arange(K) < 3))


def test_added_precision_terms_equal_the_conflation():
    mean, sigma = posterior()
    terms = [agg.precision_terms(rows(mean, k), rows(sigma, k)) for k in (4, 0, 2, 1, 3)]
    total = functools.reduce(lambda x, y: jax.tree.map(jnp.add, x, y), terms)
    close(jax.jit(agg.conflate_sums)(*total), CONFLATE(mean, sigma, ALL))


def test_conflation_ignores_invalid_clients_whatever_they_hold():
    mean, sigma = posterior()
    for bad in (jnp.nan, jnp.inf, 0.0):
        dirty = jax.tree.map(lambda leaf, bad=bad: leaf.at[1].set(bad), (mean, sigma))
        assert_same(CONFLATE(*dirty, ALL.at[1].set(False)), CONFLATE(mean, sigma, ALL.at[1].set(False)))


def test_conflating_nobody_is_the_flat_gaussian():
    assert [float(x) for x in CONFLATE(jnp.full(3, jnp.nan), jnp.full(3, jnp.nan), jnp.zeros(3, bool))] == [
        0.0,
        float("inf"),
    ]


def test_conflation_stays_finite_for_tiny_and_huge_sigma():
    mean = jnp.array([[1.0, 1.0], [3.0, 3.0]])
    out, sigma = CONFLATE(mean, jnp.array([[0.0, 1e15], [1e-30, 1e15]]), jnp.ones(2, bool))
    np.testing.assert_allclose(out, [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(sigma, [1e-6, 1e15 / np.sqrt(2)], rtol=1e-6)


def test_conflation_keeps_half_precision_leaves():
    mean, sigma = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), posterior())
    assert {leaf.dtype for leaf in jax.tree.leaves(CONFLATE(mean, sigma, ALL))} == {jnp.dtype(jnp.bfloat16)}


def test_softplus_inverse_undoes_softplus():
    x = jnp.linspace(-15, 15, 20001)
    assert float(jnp.abs(jax.jit(agg.softplus_inverse)(jax.nn.softplus(x)) - x).max()) <= 1e-6


def test_softplus_inverse_is_finite_with_a_finite_gradient_over_all_positive_floats():
    x = jnp.array([0.0, 1e-30, 1e-6, 0.02, 0.7, 1.0, 80.0, 1e30])
    value, slope = jax.vmap(jax.value_and_grad(agg.softplus_inverse))(x)
    assert jnp.isfinite(value).all() and jnp.isfinite(slope[1:]).all()
    np.testing.assert_allclose(jax.nn.softplus(agg.softplus_inverse(jnp.array(0.02))), 0.02, rtol=1e-6)


# prototypes (FPPL eq. 5; PILoRA eq. 11-13 and section 10, O1-O4)
# ----------------------------------------------------------------


def test_the_global_prototype_is_the_unweighted_mean_over_holders():  # FPPL section 9, item 12
    prototype = jnp.array([[[2.0, 0.0]], [[0.0, 6.0]], [[jnp.nan, jnp.nan]]])
    present = jnp.array([[True], [True], [False]])
    mean, held = jax.jit(agg.prototype_mean)(prototype, present, jnp.ones(3, bool))
    assert mean.tolist() == [[1.0, 3.0]] and held.tolist() == [True]


def test_classes_that_no_valid_client_holds_have_no_prototype():
    prototype = jnp.array([[[1.0], [jnp.nan]], [[jnp.nan], [5.0]]])
    mean, held = agg.prototype_mean(
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
        jax.jit(jax.vmap(agg.prototype_reweight))(*batch)[:, 0, 0], [1.053614] * 2, atol=2e-6
    )


@pytest.mark.parametrize(
    "wrong, match", [({"distance": "l3"}, "distance"), ({"temperature_mode": "times"}, "temperature_mode")]
)
def test_unknown_forms_are_refused(wrong, match):
    with pytest.raises(InputError, match=match):
        agg.prototype_reweight(*ONE_DIMENSION, jnp.ones(3, bool), **wrong)


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(InputError, match="temperature"):
        agg.prototype_reweight(*ONE_DIMENSION, jnp.ones(3, bool), temperature=0.0)
