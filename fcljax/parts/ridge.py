"""Ridge regression from sums over examples: what closed-form methods report, and how a
server solves it.

The sums of all clients are those of all examples together, whoever holds them: the
classifier does not depend on the partition. A client's sums have width^2 parameters,
however few examples it has.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.federated.claims import possible_counts
from fcljax.models.products import exact_matmul
from fcljax.parts.client import ClientStep, Report
from fcljax.types import ClientContext


class Moments(NamedTuple):
    """Sums over examples with features h and one-hot labels y."""

    gram: Float[Array, "M M"]
    """Sum of h h^T."""
    products: Float[Array, "M C"]
    """Sum of h y^T: the sum of features of each class."""
    examples: Float[Array, ""]
    """Number of examples, which is the sum of |y|^2."""


def no_moments(width: int, classes: int) -> Moments:
    """Return sums over no examples yet."""
    return Moments(jnp.zeros((width, width)), jnp.zeros((width, classes)), jnp.zeros(()))


def add_examples(
    total: Moments,
    h: Float[Array, "batch M"],
    label: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
) -> Moments:
    """Return the sums with the examples of a batch that the mask counts."""
    # padding may hold NaN, and 0 times NaN would stay NaN in the sums
    h = jnp.where(mask[:, None], h, 0.0)
    y = jax.nn.one_hot(label, total.products.shape[1])
    # exact_matmul: bfloat16 products, the default of accelerators, can make the Gram
    # matrix indefinite
    of_batch = Moments(exact_matmul(h.T, h), exact_matmul(h.T, y), jnp.sum(mask).astype(jnp.float32))
    return jax.tree.map(jnp.add, total, of_batch)


def moments_report(
    width: int, classes: int, features: Callable[[ClientStep], Float[Array, "batch M"]]
) -> Report:
    """Report the moments of a client's examples; all classes of the stream have a
    column, whatever its task.

    Args:
      width: M.
      classes: C.
      features: features(step) -> h of the batch.
    """

    def init(_context: ClientContext) -> Moments:
        return no_moments(width, classes)

    def add(step: ClientStep, total: Moments) -> Moments:
        return add_examples(total, features(step), step.batch.label, step.batch.mask)

    return Report("moments", init, add, merge="sum", possible=possible_moments)


def possible_moments(context: ClientContext, reported: Moments) -> Bool[Array, ""]:
    """Return whether these can be the sums of a client with so many examples.

    By Cauchy and Schwarz no entry of the Gram matrix is larger than its diagonal
    allows, and no sum over a class than its examples do.
    """
    square = jnp.diagonal(reported.gram)
    # |g_ij| <= sqrt(g_ii g_jj), up to rounding, which grows with the sums
    root = jnp.sqrt(jnp.maximum(square, 0)) * (1 + 1e-3)
    gram_fits = jnp.all(square >= 0) & jnp.all(jnp.abs(reported.gram) <= root[:, None] * root)
    most = root * jnp.sqrt(jnp.maximum(reported.examples, 0))
    products_fit = jnp.all(jnp.abs(reported.products) <= most[:, None])
    return gram_fits & products_fit & possible_counts(reported.examples[None], context.client.examples)


def solve_ridge(
    gram: Float[Array, "M M"], products: Float[Array, "M C"], ridge: Float[Array, ""] | float
) -> Float[Array, "M C"]:
    """Return (gram + ridge I)^-1 products. It is not finite where rounding makes the
    matrix singular."""
    regularised = gram + ridge * jnp.eye(gram.shape[0])
    # "pos": Cholesky, half of the work of LU and symmetric in its rounding
    return jax.scipy.linalg.solve(regularised, products, assume_a="pos")
