"""Ridge regression from sums over examples: what closed-form methods report, and how a
server solves it.

The sums of all clients are those of all examples together, whoever holds them: the
classifier does not depend on the partition. A client's sums have width^2 parameters,
however few examples it has.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.federated.claims import SUMS, norm_by_gram, possible_counts, possible_trace
from fcljax.models.products import exact_matmul
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.reports import Longest, unbounded
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
    # padding has label 0, but its h is 0, so it adds nothing to the products
    y = jax.nn.one_hot(label, total.products.shape[1])
    # exact_matmul: products in bfloat16, the default of accelerators, can make the Gram
    # matrix indefinite
    gram = exact_matmul(h.T, h)
    products = exact_matmul(h.T, y)
    examples = jnp.sum(mask).astype(jnp.float32)
    return jax.tree.map(jnp.add, total, Moments(gram, products, examples))


def moments_report(
    width: int,
    classes: int,
    features: Callable[[ClientStep], Float[Array, "batch M"]],
    longest: Longest = unbounded,
) -> Report:
    """Report the moments of a client's examples. Every class of the stream has a column,
    whatever the task.

    Args:
      width: M.
      classes: C.
      features: features(step) -> h of the batch.
      longest: bounds the norm of h.
    """

    def init(_context: ClientContext) -> Moments:
        return no_moments(width, classes)

    def add(step: ClientStep, total: Moments) -> Moments:
        return add_examples(total, features(step), step.batch.label, step.batch.mask)

    possible = functools.partial(possible_moments, longest=longest)
    return Report("moments", init, add, merge="sum", possible=possible)


def possible_moments(
    context: ClientContext, reported: Moments, longest: Longest = unbounded
) -> Bool[Array, ""]:
    """Return whether these can be the sums of a client with so many examples.

    The matrix (G Q; Q^T N) of all sums, with the classes' numbers of examples in the
    diagonal matrix N, is positive semidefinite. So is G, and tr(Q^T G^+ Q) <= tr(N),
    which is the number of examples.
    """
    trace_fits = possible_trace(jnp.trace(reported.gram), reported.examples, longest(context))
    # NaN if G is no Gram matrix, and every comparison with NaN is False
    explained = norm_by_gram(reported.gram, reported.products)
    counts_fit = possible_counts(reported.examples[None], context.client.examples)
    return trace_fits & (explained <= reported.examples * (1 + SUMS)) & counts_fit


def solve_ridge(
    gram: Float[Array, "M M"], products: Float[Array, "M C"], ridge: Float[Array, ""] | float
) -> Float[Array, "M C"]:
    """Return (gram + ridge I)^-1 products. It is not finite where rounding makes the
    matrix singular."""
    regularised = gram + ridge * jnp.eye(gram.shape[0])
    # "pos": Cholesky, half of the work of LU and symmetric in its rounding
    return jax.scipy.linalg.solve(regularised, products, assume_a="pos")


def solve_definite(
    gram: Float[Array, "M M"], products: Float[Array, "M C"], ridge: Float[Array, ""] | float
) -> Float[Array, "M C"]:
    """Return `solve_ridge` for the first of ridge, s, 10 s, 100 s, ... whose result is finite.

    s is 1e-6 of the trace. Sums of honest clients need no larger ridge. But the server's
    checks accept negative eigenvalues of the size of rounding errors, and such an upload
    of one client must not end the learning of all. Matrices that are not finite have no
    result for any ridge.
    """
    smallest = jnp.maximum(1e-6 * jnp.abs(jnp.trace(gram)), jnp.finfo(jnp.float32).tiny)

    def fails(attempt: tuple[Array, Array]) -> Bool[Array, ""]:
        larger, weights = attempt
        # the last attempt has the whole trace, 1e6 s, as its ridge
        return ~jnp.all(jnp.isfinite(weights)) & (larger < 1e7 * smallest)

    def retry(attempt: tuple[Array, Array]) -> tuple[Array, Array]:
        larger, _ = attempt
        return 10 * larger, solve_ridge(gram, products, jnp.maximum(larger, ridge))

    attempt = (smallest, solve_ridge(gram, products, ridge))
    return jax.lax.while_loop(fails, retry, attempt)[1]
