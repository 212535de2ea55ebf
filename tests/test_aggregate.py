"""`fcljax.aggregate`: the rules as a researcher imports them."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from small_runs import some

import fcljax
from fcljax import aggregate
from fcljax.aggregate import Gaussian, Moments, ObservedPrototypes, Prototypes
from fcljax.errors import InputError

K = 5
RULES = {
    "weighted_mean": {},
    "uniform_mean": {},
    "coordinate_median": {},
    "trimmed_mean": {"trim": 0.2},
    "geometric_median": {},
    "krum": {"malicious": 1},
    "multi_krum": {"malicious": 1},
    "centred_clipping": {"centre": {"w": np.zeros((2, 3), "f"), "b": np.zeros(3, "f")}, "radius": 1.0},
}


@pytest.mark.long
def test_examples_of_docstrings_print_what_they_say():
    names = {**vars(aggregate), "jnp": jnp}
    for test in doctest.DocTestFinder().find(aggregate, globs=names):
        result = doctest.DocTestRunner().run(test)
        assert result.failed == 0, test.name


def clients(seed=0):
    """Uploads whose values are 0.1 apart, so that small steps change no order."""
    values = np.random.default_rng(seed).permutation(9 * K).astype("f") / 10
    return [{"w": row[:6].reshape(2, 3), "b": row[6:]} for row in values.reshape(K, 9)]


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@pytest.mark.parametrize("name", some(RULES, ("trimmed_mean",)))
def test_a_list_and_stacked_leaves_agree_and_a_missing_client_has_no_influence(name):
    rule, options = getattr(fcljax.aggregate, name), RULES[name]
    trees, weight = clients(), [1.0, 2.0, 3.0, 4.0, 5.0]
    result = rule(trees, weight, **options)
    for a, b in zip(
        jax.tree.leaves(result), jax.tree.leaves(rule(stacked(trees), weight, **options)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    absent = [*trees, jax.tree.map(lambda x: np.full_like(x, np.nan), trees[0])]
    with_absent = rule(absent, [*weight, 9.0], valid=np.arange(K + 1) < K, **options)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(with_absent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", some(RULES, ("centred_clipping",)))
def test_jit_vmap_and_grad(name):
    rule, options = getattr(aggregate, name), RULES[name]

    def flat(uploads):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rule(uploads, **options)))

    trees = [stacked(clients(seed)) for seed in range(2)]
    values = jax.vmap(jax.jit(flat))(stacked(trees))
    np.testing.assert_allclose(values, [flat(tree) for tree in trees], rtol=1e-4)
    check_grads(flat, (trees[0],), order=1, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2, eps=1e-3)


@pytest.mark.long
def test_gradients_where_uploads_are_equal():
    uploads = jnp.ones((3, 2))
    for name in ("coordinate_median", "geometric_median", "trimmed_mean", "uniform_mean"):
        gradient = jax.grad(lambda x, name=name: jnp.sum(getattr(aggregate, name)(x)))(uploads)
        np.testing.assert_allclose(jnp.sum(gradient, axis=0), 1, atol=1e-5, err_msg=name)


def test_conflation_of_gaussians_equals_the_product_of_densities():
    x = np.linspace(-8, 8, 40_001)
    means, sigmas = np.array([-1.0, 0.5, 2.0]), np.array([1.0, 0.5, 2.0])
    density = np.exp(-((x[:, None] - means) ** 2 / (2 * sigmas**2)).sum(1))
    density /= density.sum()
    mean = (x * density).sum()
    product = aggregate.gaussian_conflation([Gaussian(m, s) for m, s in zip(means, sigmas, strict=True)])
    assert product.mean == pytest.approx(mean, abs=1e-4)
    assert product.sigma == pytest.approx(np.sqrt(((x - mean) ** 2 * density).sum()), abs=1e-4)
    twice = aggregate.gaussian_conflation(
        [Gaussian(m, s) for m, s in zip(means, sigmas, strict=True)], [2, 1, 1]
    )
    repeated = [Gaussian(means[i], sigmas[i]) for i in (0, 0, 1, 2)]
    assert twice.mean == pytest.approx(float(aggregate.gaussian_conflation(repeated).mean), rel=1e-5)


def test_prototypes_are_means_over_holders_and_reweighting_prefers_the_near():
    vector = jnp.array([[[1.0], [5.0]], [[3.0], [7.0]]])
    mean = aggregate.prototype_mean(Prototypes(vector, jnp.array([[True, False], [True, False]])))
    assert mean.vector[0, 0] == 2 and mean.present.tolist() == [True, False]
    near = ObservedPrototypes(jnp.array([[[0.0]], [[9.0]]]), jnp.zeros((2, 1, 1)), jnp.ones((2, 1), bool))
    assert aggregate.prototype_reweight(near)[0, 0] < 0.1


def test_ridge_regression_is_that_of_all_examples_however_they_are_divided():
    rng = np.random.default_rng(0)
    h, y = rng.normal(size=(12, 3)), np.eye(2)[rng.integers(0, 2, 12)]
    parts = [(h[:2], y[:2]), (h[2:9], y[2:9]), (h[9:], y[9:])]
    sent = [Moments(jnp.array(a.T @ a, "f"), jnp.array(a.T @ b, "f"), jnp.float32(len(a))) for a, b in parts]
    expected = np.linalg.solve(h.T @ h + 0.5 * np.eye(3), h.T @ y)
    np.testing.assert_allclose(aggregate.ridge_regression(sent, ridge=0.5), expected, atol=1e-5)
    assert aggregate.ridge_sums(sent).examples == 12


@pytest.mark.parametrize(
    "uploads, options, line",
    [
        ([], {}, "uploads: an empty list"),
        ({}, {}, "uploads: dict without arrays"),
        ([{"w": np.ones(2)}, {"v": np.ones(2)}], {}, r"uploads\[1\]: .*where uploads\[0\] is"),
        ([{"w": np.ones(2)}, {"w": np.ones(3)}], {}, r"uploads\[1\]\['w'\]: shape \(3,\)"),
        ({"w": np.ones((2, 1)), "b": np.ones((3, 1))}, {}, r"uploads\['w'\]: 2 clients|first leaf has"),
        ({"w": np.float32(1)}, {}, r"uploads\['w'\]: a scalar"),
        (np.ones((0, 2)), {}, "uploads: 0 clients"),
        (np.ones((2, 2)), {"weight": [1.0]}, r"weight: shape \(1,\); needed: \(2,\)"),
        (np.ones((2, 2)), {"weight": [1.0, -1.0]}, r"weight\[1\]: -1"),
        (np.ones((2, 2)), {"weight": [np.nan, 1.0]}, r"weight\[0\]: nan"),
        (np.ones((2, 2)), {"valid": [1, 0]}, "valid: int32"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(uploads, options, line):
    with pytest.raises(InputError, match=line):
        aggregate.weighted_mean(uploads, **options)


def test_options_and_kinds_of_uploads_are_named():
    uploads = np.ones((3, 2), "f")
    with pytest.raises(InputError, match=r"needed: fcljax.aggregate.Gaussian\(mean, sigma\)"):
        aggregate.gaussian_conflation(uploads)
    with pytest.raises(InputError, match=r"centre: shape \(3,\)"):
        aggregate.centred_clipping(uploads, centre=np.zeros(3, "f"), radius=1.0)
    with pytest.raises(InputError, match="trim: 0.5"):
        aggregate.trimmed_mean(uploads, trim=0.5)
