"""Mean-field Gaussians over the parameters of anything: posteriors, samples, and the mixture prior of VFCL.

Every number of a pytree of parameters has a mean and a deviation softplus(rho), so that any network, adapter
or classifier becomes a Bayesian one without a change to its code: draw parameters, and use them.
Log-densities are float32; those of mixtures are taken by logsumexp, so that they and their gradients stay
finite 40 deviations out, where the densities themselves are 0.

Source: VFCL (specification sections 1 and 3). What the paper leaves open is marked so.
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
_BLOCK = 2**14  # numbers of `in_blocks`


@functools.partial(jax.tree_util.register_dataclass, data_fields=("vector",), meta_fields=("tree", "shapes"))
@dataclass(frozen=True)
class Flat:
    """A pytree as one vector. What is done with every number of a network of a hundred leaves is then
    compiled once, not a hundred times."""

    vector: Any
    """All leaves, one after the other: [N], or its shape, or stacked over clients."""
    tree: Any
    """The structure of the pytree."""
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    """Of its leaves."""

    @classmethod
    def of(cls, params: PyTree) -> "Flat":
        """From a pytree of arrays."""
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(ravel_pytree(params)[0], tree, shapes)

    @property
    def params(self) -> PyTree:
        """The pytree."""
        ends = list(itertools.accumulate(math.prod(shape.shape) for shape in self.shapes))
        parts = jnp.split(self.vector, ends[:-1]) if ends else []
        leaves = [x.reshape(like.shape) for x, like in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.tree, leaves)


class Posterior(NamedTuple):
    """A Gaussian per number: leaves of `mean` and `rho` have the same shapes."""

    mean: PyTree
    rho: PyTree

    @property
    def sigma(self) -> PyTree:
        """Standard deviations, softplus(rho) (section 1.1)."""
        return jax.tree.map(jax.nn.softplus, self.rho)


def init_posterior(params: PyTree, sigma: float = 0.02) -> Posterior:
    """Around parameters as they are, with one deviation for all (sigma0; the paper does not say it).

    Args:
      params: floating-point leaves.
      sigma: positive.
    """
    rho = softplus_inverse(jnp.float32(sigma))
    return Posterior(params, jax.tree.map(lambda x: jnp.full(x.shape, rho), params))


def of_gaussian(mean: PyTree, sigma: PyTree) -> Posterior:
    """The posterior with these means and deviations."""
    return Posterior(mean, jax.tree.map(softplus_inverse, sigma))


def flat(posterior: Posterior) -> Posterior:
    """The same with all leaves as one vector."""
    return Posterior(ravel_pytree(posterior.mean)[0], ravel_pytree(posterior.rho)[0])


def sample(key: PRNGKeyArray, posterior: Posterior) -> PyTree:
    """Parameters mean + sigma * eps with eps ~ N(0, 1) (section 1.1): gradients reach both mean and rho."""
    # of one draw for all leaves: a draw each takes minutes to compile for a network of a hundred
    mean, unflatten = ravel_pytree(posterior.mean)
    noise = jax.random.normal(key, mean.shape, mean.dtype)

    def drawn(_shared: tuple[()], mean: Array, rho: Array, noise: Array) -> Array:
        return mean + jax.nn.softplus(rho) * noise

    return unflatten(in_blocks(drawn, (), mean, ravel_pytree(posterior.rho)[0], noise))


def in_blocks(
    function: Callable[..., Array], shared: PyTree, *vectors: Float[Array, " N"]
) -> Float[Array, " N"]:
    """A function of numbers, one by one, of vectors. Done block by block: XLA would else compute what made a
    vector again for each leaf that is cut from it, or from its gradient, which takes minutes to compile.

    The slopes are computed with the value, in one pass: what a loop keeps for its gradient is read and
    written several times, which costs more than the arithmetic.

    Args:
      function: of `shared` and a block of each vector. It closes over no array: the gradient of a loop over
        draws would not know it.
      shared: arrays that are the same for all numbers; they get no gradient.
      vectors: of one length.
    """
    if not vectors[0].size:  # of an adapter without parameters
        return vectors[0]
    return _elementwise(function, shared, *vectors)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _elementwise(function: Callable[..., Array], shared: PyTree, *vectors: Array) -> Array:
    return _blocks(lambda each: function(shared, *each), vectors)


def _value_and_slopes(
    function: Callable[..., Array], shared: PyTree, *vectors: Array
) -> tuple[Array, tuple[Array, ...]]:
    def both(each: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        value, pull = jax.vjp(functools.partial(function, shared), *each)
        return value, pull(jnp.ones_like(value))

    return _blocks(both, vectors)


def _times(_function: Callable[..., Array], slopes: tuple[Array, ...], pulled: Array) -> tuple[Any, ...]:
    return None, *(pulled * slope for slope in slopes)


_elementwise.defvjp(_value_and_slopes, _times)


def _blocks(function: Callable, vectors: tuple[Array, ...]) -> PyTree:
    """`function` of blocks of vectors [N], and its results as vectors [N]."""
    count = vectors[0].size
    size = min(_BLOCK, count)
    blocks = -(-count // size)
    stacked = tuple(jnp.pad(x, (0, blocks * size - count)).reshape(blocks, size) for x in vectors)
    return jax.tree.map(lambda x: x.reshape(-1)[:count], jax.lax.map(function, stacked))


def log_density(params: PyTree, posterior: Posterior) -> PyTree:
    """log N(params; mean, sigma^2) of every number."""
    return jax.tree.map(_log_normal, params, posterior.mean, posterior.sigma)


def log_mixture(
    params: PyTree, first: Posterior, second: Posterior, weight: float | Float[Array, ""]
) -> PyTree:
    """log of weight * N(first) + (1 - weight) * N(second) of every number (equation 6).

    Args:
      params: where it is evaluated.
      first: the global posterior in VFCL.
      second: the client's own of the task before.
      weight: lambda_k in [0, 1]; at 0 or 1 the other component counts for nothing, and gets no gradient.
    """
    mixed = functools.partial(_log_mixed, jnp.asarray(weight, jnp.float32))
    return jax.tree.map(mixed, params, first.mean, first.sigma, second.mean, second.sigma)


def sum_all(tree: PyTree) -> Float[Array, ""]:
    """The sum over all numbers."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def _log_normal(x: Array, mean: Array, sigma: Array) -> Array:
    return -0.5 * jnp.square((x - mean) / sigma) - jnp.log(sigma) - _HALF_LOG_TAU


def _log_mixed(weight: Array, x: Array, *components: Array) -> Array:
    mean_1, sigma_1, mean_2, sigma_2 = components
    # as factors of logsumexp: it leaves out what has weight 0, where log(0) would have gradients of NaN
    return jax.scipy.special.logsumexp(
        jnp.stack([_log_normal(x, mean_1, sigma_1), _log_normal(x, mean_2, sigma_2)]),
        axis=0,
        b=jnp.stack([weight, 1 - weight]).reshape(2, *[1] * x.ndim),
    )
