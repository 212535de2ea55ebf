"""Conflation of Gaussian posteriors: the server's side of VFCL (eq. 10, 11).

The product of the clients' Gaussians is a Gaussian whose precision is the sum of theirs.
Clients with smaller posterior variance receive more weight. Sums of precisions do not
depend on the order of the clients, so uploads stream.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fcljax.federated.sums import widen
from fcljax.types import PyTree

# conflation makes posteriors more certain in every round: this keeps precisions, at most
# 1e12, and their sums far from float32's limit
SIGMA_MIN = 1e-6


def precision_terms(mean: PyTree, sigma: PyTree) -> tuple[PyTree, PyTree]:
    """Return the terms that add up over Gaussians: (1/sigma^2, mean/sigma^2), float32.

    `sigma` is clamped to [1e-6, inf). The sum of these over clients, in any order or
    grouping, then `conflate_sums`, is VFCL eq. 11.
    """

    def precision_of(sigma: Array) -> Array:
        return 1 / jnp.square(jnp.maximum(widen(sigma), SIGMA_MIN))

    precision = jax.tree.map(precision_of, sigma)
    return precision, jax.tree.map(lambda p, m: p * widen(m), precision, mean)


def conflate_sums(precision: PyTree, precision_mean: PyTree) -> tuple[PyTree, PyTree]:
    """Return (mean, sigma) of the product of Gaussians (VFCL eq. 11).

    Arguments are the sums over clients of `precision_terms`. Precision 0 (no client)
    gives mean 0 and sigma inf, the neutral element of conflation. sigma is clamped
    to [1e-6, inf).
    """

    def mean_of(precision: Array, precision_mean: Array) -> Array:
        # the inner `where` avoids 0 / 0, whose gradient is NaN
        positive = precision > 0
        return jnp.where(positive, precision_mean / jnp.where(positive, precision, 1), 0)

    def sigma_of(precision: Array) -> Array:
        return jnp.maximum(jax.lax.rsqrt(precision), SIGMA_MIN)

    mean = jax.tree.map(mean_of, precision, precision_mean)
    return mean, jax.tree.map(sigma_of, precision)


def softplus_inverse(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x with log(1 + e^x) = value, for value > 0.

    It is exact to a float32 rounding for x in [-15, 15].
    """
    value = jnp.maximum(value, jnp.finfo(value.dtype).tiny)
    # log(e^v - 1) = v + log(1 - e^-v), where no e^v overflows. expm1 keeps the digits for
    # small v, log1p for large v
    small = jnp.log(-jnp.expm1(-jnp.minimum(value, 1.0)))
    large = jnp.log1p(-jnp.exp(-jnp.maximum(value, 0.5)))
    return value + jnp.where(value < 0.7, small, large)
