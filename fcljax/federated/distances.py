"""L2 distances between uploads, over all leaves together, that neither overflow nor
become NaN.

Lengths are measured in units that are 2^24 times larger. In these units the length of
any finite upload, in trees of up to 2^40 parameters, and its reciprocal are normal
float32 numbers: one upload of 3e38 is far away and does no other harm. Divisors above
2^126 would be flushed to 1 / d = 0.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fcljax.types import PyTree

SHRINK = 2.0**-24
# relative difference below which distances differ by rounding only
EQUAL_DISTANCES = 1e-6


def difference(x: PyTree, y: PyTree) -> PyTree:
    """Return SHRINK * (x - y), which is finite where x - y may not be."""
    return jax.tree.map(lambda x, y: SHRINK * x - SHRINK * y, x, y)


def norm(tree: PyTree) -> Array:
    """Return the L2 norm over all leaves."""
    peak, ratio = _peak_and_ratio(tree)
    return peak * ratio


def clip(change: PyTree, radius: float) -> tuple[PyTree, Array]:
    """Clip a `difference` to L2 norm `radius`; return it in ordinary units, and whether
    it was longer."""
    peak, ratio = _peak_and_ratio(change)
    too_long = peak * ratio > SHRINK * radius
    # radius / norm = (1 / peak) * (radius / ratio), of which each factor is finite
    scale = radius / jnp.where(ratio > 0, ratio, 1)
    return jax.tree.map(lambda x: jnp.where(too_long, x / peak * scale, x / SHRINK), change), too_long


def _peak_and_ratio(tree: PyTree) -> tuple[Array, Array]:
    """Return the largest absolute value, and the L2 norm divided by it: the norm's square
    may be infinite."""
    leaves = jax.tree.leaves(tree)
    peaks = [jnp.max(jnp.abs(x), initial=0) for x in leaves]
    peak = functools.reduce(jnp.maximum, peaks, jnp.float32(0))
    # numbers below the smallest normal one may be flushed to 0, so they cannot be divisors
    peak = jnp.where(peak >= jnp.finfo(jnp.float32).tiny, peak, 1)
    squares = [jnp.sum(jnp.square(x / peak)) for x in leaves]
    square = functools.reduce(jnp.add, squares, jnp.float32(0))
    # the derivative of a root is infinite at 0, and NaN times the 0 of x
    positive = square > 0
    return peak, jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)
