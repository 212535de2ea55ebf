"""Subspaces of inputs that a server extends from task to task, as projections P
(gradient projection memory: Saha et al., ICLR 2021, eq. 8 and 9).

X stands for the inputs in its columns, or for a matrix with their left singular vectors:
a Gram matrix, a random sketch.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fcljax import matrices
from fcljax.models.products import exact_matmul

# singular values below this share of the matrix's norm are rounding
ROUNDING = 1e-6


def outside(
    memory: Float[Array, "D D"],
    columns: Float[Array, "D n"],
) -> tuple[Array, Array]:
    """Return the left singular vectors [D, D] and singular values [D] of (I - P) X, n >= D."""
    remainder = columns - exact_matmul(memory, columns)
    vectors, values, _ = matrices.svd(remainder)
    return vectors, values


def extend_directions(
    memory: Float[Array, "D D"], columns: Float[Array, "D n"], epsilon: Float[Array, ""]
) -> Float[Array, "D D"]:
    """Return P with the fewest directions of (I - P) X that explain the share epsilon of
    |X|^2."""
    vectors, values = outside(memory, columns)
    # inputs of 0 have no energy to divide by
    total = jnp.maximum(jnp.sum(columns**2), jnp.finfo(columns.dtype).tiny)
    energy = values**2 / total
    # the share that P and the directions before this one explain; 1 - sum(energy) is that
    # of P alone
    explained = 1 - jnp.sum(energy) + jnp.cumsum(energy) - energy
    # a mask instead of a slice: the number of directions depends on the data
    is_added = (explained < epsilon) & (values > ROUNDING * jnp.sqrt(total))
    extended = memory + exact_matmul(jnp.where(is_added, vectors, 0.0), vectors.T)
    # a projection has the eigenvalues 0 and 1. Rounding moves them, and would grow from
    # task to task, so they are set to the nearer one
    values, vectors = matrices.eigh((extended + extended.T) / 2)
    return exact_matmul(jnp.where(values > 0.5, vectors, 0.0), vectors.T)
