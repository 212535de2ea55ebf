"""Conflation of Gaussian posteriors: the server's side of VFCL (equations 10 and 11).

The product of the clients' Gaussians is a Gaussian whose precision is the sum of theirs. Clients with smaller
posterior variance receive more weight. Sums of precisions do not depend on the order of the clients, so
uploads stream.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fcljax.federated.sums import widen
from fcljax.types import PyTree

# keeps the precisions of repeatedly conflated posteriors, and their sums, far from float32's limit
SIGMA_MIN = 1e-6


def precision_terms(mean: PyTree, sigma: PyTree) -> tuple[PyTree, PyTree]:
    """A Gaussian as the two numbers that add up under conflation: (1/sigma^2, mean/sigma^2), in float32, same
    shapes.

    `sigma` is clamped to [1e-6, inf). Adding these over clients in any order or grouping, then
    `conflate_sums`, is VFCL eq. 11.
    """
    precision = jax.tree.map(lambda s: 1 / jnp.square(jnp.maximum(widen(s), SIGMA_MIN)), sigma)
    return precision, jax.tree.map(lambda p, m: p * widen(m), precision, mean)


def conflate_sums(precision: PyTree, precision_mean: PyTree) -> tuple[PyTree, PyTree]:
    """(mean, sigma) of the product of Gaussians from the sums over clients of `precision_terms` (VFCL eq.
    11).

    Precision 0 (no client) gives mean 0 and sigma inf, the neutral element of conflation. sigma is clamped to
    [1e-6, inf).
    """
    mean = jax.tree.map(
        lambda p, pm: jnp.where(p > 0, pm / jnp.where(p > 0, p, 1), 0), precision, precision_mean
    )
    return mean, jax.tree.map(lambda p: jnp.maximum(jax.lax.rsqrt(p), SIGMA_MIN), precision)


def softplus_inverse(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x with log(1 + e^x) = value, for value > 0; right to a float32 rounding for x in [-15, 15] (VFCL
    section 3)."""
    value = jnp.maximum(value, jnp.finfo(value.dtype).tiny)
    # log(e^v - 1) = v + log(1 - e^-v): e^v would overflow, and each branch keeps the digits the other one
    # loses
    near = jnp.log(-jnp.expm1(-jnp.minimum(value, 1.0)))
    far = jnp.log1p(-jnp.exp(-jnp.maximum(value, 0.5)))
    return value + jnp.where(value < 0.7, near, far)
