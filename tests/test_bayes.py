"""Gaussians over parameters: samples, log-densities and VFCL's mixture prior (specification, O2 to O4)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax.methods.vfcl.posterior import (
    Posterior,
    init_posterior,
    log_density,
    log_mixture,
    of_gaussian,
    sample,
    sum_all,
)

LOG_HALF_TAU = 0.5 * math.log(2 * math.pi)


def gaussian(mean, sigma):
    return of_gaussian(jnp.float32(mean), jnp.float32(sigma))


def test_the_mixture_of_the_specification():
    """O2: components N(0, 1) and N(1, 1), half each, at 0."""
    found = log_mixture(jnp.float32(0), gaussian(0, 1), gaussian(1, 1), 0.5)
    np.testing.assert_allclose(found, -1.138008, atol=1e-5)


@pytest.mark.parametrize("weight, alone", [(1.0, 0), (0.0, 1)])
def test_with_all_weight_on_one_component_it_is_that_gaussian_and_the_other_gets_no_gradient(weight, alone):
    """O3; also where the density of the other is 0 in float32."""
    parts = (gaussian(0.3, 0.7), gaussian(-80.0, 0.5))
    own = parts[alone]
    where = own.mean + 0.2
    found, slopes = jax.value_and_grad(lambda pair: log_mixture(where, pair[0], pair[1], weight))(parts)
    np.testing.assert_allclose(found, log_density(where, own), rtol=1e-6)
    assert all(np.isfinite(x) for x in jax.tree.leaves(slopes))
    assert all(x == 0 for x in jax.tree.leaves(slopes[1 - alone]))
    assert slopes[alone].mean != 0


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_where_posterior_and_prior_are_one_their_difference_is_0_for_every_sample(weight):
    """O3: log q - log p = 0."""
    params = {"a": jnp.array([0.5, -1.0]), "b": jnp.ones((2, 3))}
    own, other = init_posterior(params, 0.3), init_posterior(jax.tree.map(lambda x: x + 5, params), 0.1)
    pair = (own, other) if weight == 1 else (other, own)
    for seed in range(3):
        draw = sample(jax.random.key(seed), own)
        difference = sum_all(log_density(draw, own)) - sum_all(log_mixture(draw, *pair, weight))
        np.testing.assert_allclose(difference, 0, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_far_out_values_and_gradients_are_finite(weight):
    """O4: 40 deviations from both components the densities are 0 in float32, their logarithms are not."""
    prior = (gaussian(0, 0.1), gaussian(1, 0.1))
    value, slope = jax.value_and_grad(lambda x: log_mixture(x, *prior, weight))(jnp.float32(5.0))
    near = 1.0 if weight < 1 else 0.0
    expected = -0.5 * ((5 - near) / 0.1) ** 2 - math.log(0.1) - LOG_HALF_TAU
    expected += math.log(0.5) if weight == 0.5 else 0
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, -(5 - near) / 0.01, rtol=1e-4)


def test_samples_have_the_mean_and_deviation_and_gradients_reach_both():
    posterior = Posterior({"w": jnp.full(20000, 2.0)}, {"w": jnp.full(20000, -1.0)})
    draw = sample(jax.random.key(0), posterior)["w"]
    sigma = math.log1p(math.exp(-1))
    assert abs(float(draw.mean()) - 2) < 4 * sigma / math.sqrt(20000)
    assert abs(float(draw.std()) / sigma - 1) < 0.03
    slope = jax.grad(lambda p: sample(jax.random.key(0), p)["w"].sum())(posterior)
    np.testing.assert_array_equal(slope.mean["w"], 1)
    eps = (draw - 2) / sigma
    np.testing.assert_allclose(slope.rho["w"], eps * jax.nn.sigmoid(-1.0), rtol=1e-3, atol=1e-4)


def test_leaves_draw_apart_and_so_do_keys():
    posterior = init_posterior({"a": jnp.zeros(3), "b": jnp.zeros(3)}, 1.0)
    one, other = (sample(jax.random.key(seed), posterior) for seed in (0, 1))
    assert (one["a"] != one["b"]).all() and (one["a"] != other["a"]).all()


def test_a_new_posterior_is_as_narrow_as_asked_and_a_narrow_one_draws_its_mean():
    params = {"w": jnp.array([1.0, -2.0])}
    np.testing.assert_allclose(init_posterior(params, 0.02).sigma["w"], 0.02, rtol=1e-5)
    draw = sample(jax.random.key(0), init_posterior(params, 1e-9))
    np.testing.assert_allclose(draw["w"], params["w"], atol=1e-7)


def test_log_density_is_the_sum_over_all_numbers_of_the_formula():
    rng = np.random.default_rng(0)
    x, mean, sigma = (rng.normal(size=(2, 3)), rng.normal(size=(2, 3)), rng.uniform(0.1, 2, (2, 3)))
    expected = np.sum(-0.5 * ((x - mean) / sigma) ** 2 - np.log(sigma * np.sqrt(2 * np.pi)))
    tree = lambda value: {"trainable": [jnp.asarray(value[0]), jnp.asarray(value[1])]}
    found = sum_all(log_density(tree(x), of_gaussian(tree(mean), tree(sigma))))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
