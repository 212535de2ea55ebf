"""Mean-field Gaussians over a pytree of parameters: posteriors, samples, and VFCL's
mixture prior.

Each parameter has a mean and a standard deviation softplus(rho), so that any network,
adapter or classifier becomes Bayesian without a change to its code: draw parameters, and
use them. Log-densities are float32; those of mixtures are taken by logsumexp, so that
they and their gradients stay finite 40 standard deviations from the mean, where the
densities are 0.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.methods.vfcl.conflation import softplus_inverse

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_BLOCK = 2**14  # parameters of a block in `in_blocks`


@functools.partial(jax.tree_util.register_dataclass, data_fields=("vector",), meta_fields=("tree", "shapes"))
@dataclass(frozen=True)
class Flat:
    """A pytree as one vector.

    An elementwise function of a network of a hundred leaves is then compiled once, not
    a hundred times.
    """

    vector: Any
    """All leaves concatenated: an array [N], its `ShapeDtypeStruct`, or stacked over clients."""
    tree: Any
    """The structure of the pytree."""
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    """Of its leaves."""

    @classmethod
    def of(cls, params: PyTree) -> "Flat":
        """Flatten a pytree of arrays."""
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(ravel_pytree(params)[0], tree, shapes)

    @property
    def params(self) -> PyTree:
        """Return the pytree."""
        if not self.shapes:
            return jax.tree.unflatten(self.tree, [])
        # the end of each leaf in the vector
        ends = list(itertools.accumulate(math.prod(shape.shape) for shape in self.shapes))
        parts = jnp.split(self.vector, ends[:-1])
        leaves = [part.reshape(shape.shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.tree, leaves)


class Posterior(NamedTuple):
    """A Gaussian for each parameter: leaves of `mean` and `rho` have the same shapes."""

    mean: PyTree
    rho: PyTree

    @property
    def sigma(self) -> PyTree:
        """Return standard deviations, softplus(rho)."""
        return jax.tree.map(jax.nn.softplus, self.rho)


def init_posterior(params: PyTree, sigma: float = 0.02) -> Posterior:
    """Return a posterior around these parameters, with one standard deviation for all.

    Args:
      params: floating-point leaves.
      sigma: sigma_0, positive; the paper does not state it.
    """
    # the same rho for all parameters: none is more certain at first
    rho = softplus_inverse(jnp.float32(sigma))
    return Posterior(params, jax.tree.map(lambda leaf: jnp.full(leaf.shape, rho), params))


def of_gaussian(mean: PyTree, sigma: PyTree) -> Posterior:
    """Return the posterior with these means and standard deviations."""
    return Posterior(mean, jax.tree.map(softplus_inverse, sigma))


def flat(posterior: Posterior) -> Posterior:
    """Return the posterior with all leaves as one vector."""
    return Posterior(ravel_pytree(posterior.mean)[0], ravel_pytree(posterior.rho)[0])


def sample(key: PRNGKeyArray, posterior: Posterior) -> PyTree:
    """Draw mean + sigma * eps, eps ~ N(0, 1); gradients reach mean and rho."""
    # one draw for all leaves: separate draws for a hundred leaves take minutes to compile
    mean, unflatten = ravel_pytree(posterior.mean)
    rho, _ = ravel_pytree(posterior.rho)
    noise = jax.random.normal(key, mean.shape, mean.dtype)

    def reparametrise(_shared: tuple[()], mean: Array, rho: Array, noise: Array) -> Array:
        return mean + jax.nn.softplus(rho) * noise

    return unflatten(in_blocks(reparametrise, (), mean, rho, noise))


def in_blocks(
    function: Callable[..., Array], shared: PyTree, *vectors: Float[Array, " N"]
) -> Float[Array, " N"]:
    """Return an elementwise function of vectors, computed block by block.

    Without blocks XLA would fuse the computation of the vector into each leaf that is cut
    from it, or from its gradient, which takes minutes to compile. Derivatives are computed
    with the values, in one pass: intermediate values that a loop stores for its gradient
    cost more to write and read than the arithmetic.

    Args:
      function: of `shared` and a block of each vector. It must not close over traced
        arrays: the custom gradient below would not see them.
      shared: arrays that all elements read; they get no gradient.
      vectors: of one length.
    """
    # an adapter may have no parameters, and blocks of 0 elements do not exist
    if not vectors[0].size:
        return vectors[0]
    return _elementwise(function, shared, *vectors)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _elementwise(
    function: Callable[..., Array],
    shared: PyTree,
    *vectors: Array,
) -> Array:
    return _blocks(lambda blocks: function(shared, *blocks), vectors)


def _value_and_derivatives(
    function: Callable[..., Array], shared: PyTree, *vectors: Array
) -> tuple[Array, tuple[Array, ...]]:
    def of_blocks(blocks: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        value, vjp = jax.vjp(functools.partial(function, shared), *blocks)
        return value, vjp(jnp.ones_like(value))

    return _blocks(of_blocks, vectors)


def _multiply(
    _function: Callable[..., Array], derivatives: tuple[Array, ...], cotangent: Array
) -> tuple[Any, ...]:
    return None, *(cotangent * derivative for derivative in derivatives)


_elementwise.defvjp(_value_and_derivatives, _multiply)


def _blocks(function: Callable, vectors: tuple[Array, ...]) -> PyTree:
    """Apply a function to vectors [N] in blocks, and return vectors [N]."""
    count = vectors[0].size
    size = min(_BLOCK, count)
    blocks = -(-count // size)

    def divide(vector: Array) -> Array:
        # padded with zeros, for which softplus and logarithms are finite
        return jnp.pad(vector, (0, blocks * size - count)).reshape(blocks, size)

    results = jax.lax.map(function, tuple(divide(vector) for vector in vectors))
    return jax.tree.map(lambda result: result.reshape(-1)[:count], results)


def log_density(params: PyTree, posterior: Posterior) -> PyTree:
    """Return log N(params; mean, sigma^2) of each parameter."""
    return jax.tree.map(_log_normal, params, posterior.mean, posterior.sigma)


def log_mixture(
    params: PyTree, first: Posterior, second: Posterior, weight: float | Float[Array, ""]
) -> PyTree:
    """Return log(weight * N(first) + (1 - weight) * N(second)) of each parameter (eq. 6).

    Args:
      params: where it is evaluated.
      first: in VFCL the global posterior.
      second: in VFCL the client's posterior of the previous task.
      weight: lambda_k in [0, 1]; at 0 or 1 the other component has no influence and no gradient.
    """
    log_mixed = functools.partial(_log_mixed, jnp.asarray(weight, jnp.float32))
    return jax.tree.map(log_mixed, params, first.mean, first.sigma, second.mean, second.sigma)


def sum_all(tree: PyTree) -> Float[Array, ""]:
    """Return the sum over all elements of all leaves."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def _log_normal(x: Array, mean: Array, sigma: Array) -> Array:
    # (x - mean) / sigma before the square: sigma^2 of small deviations underflows
    return -0.5 * jnp.square((x - mean) / sigma) - jnp.log(sigma) - _HALF_LOG_TAU


def _log_mixed(weight: Array, x: Array, *components: Array) -> Array:
    mean_1, sigma_1, mean_2, sigma_2 = components
    log_normals = jnp.stack([_log_normal(x, mean_1, sigma_1), _log_normal(x, mean_2, sigma_2)])
    # as factors of logsumexp and not as log(weight), whose gradient at 0 is NaN
    weights = jnp.stack([weight, 1 - weight]).reshape(2, *[1] * x.ndim)
    return jax.scipy.special.logsumexp(log_normals, axis=0, b=weights)
