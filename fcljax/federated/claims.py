"""Claims: the parts of an upload that the server can check.

The server knows how many examples each client has. A weight, a number of examples or a
precision that no such client can have is a lie or a mistake: the upload is rejected, and
counted under the claim's name. Every other finite upload is accepted. Sums over examples
are compared with the largest values that the client's number of examples allows.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

from fcljax.matrices import one_by_one
from fcljax.types import Claim, ClientContext, Program, Upload

# float32 rounding of a Gram matrix's eigenvalues, relative to its trace
ROUNDING = 1e-5
# share by which sums may exceed a bound that holds without rounding
SUMS = 1e-2
# widths up to which a Gram matrix is factorised; wider ones are sketched
EXACT = 1024
DIRECTIONS = 64  # of a sketch


def possible_weight(context: ClientContext, upload: Upload) -> Bool[Array, ""]:
    """Return whether the client can have this weight: between 0 and its number of
    examples, and at most 1 for a client without examples."""
    # a client that lies about its number of examples would dominate the mean
    weight = jnp.asarray(upload.weight, jnp.float32)
    return (weight >= 0) & (weight <= jnp.maximum(context.client.examples, 1))


WEIGHT = Claim("weight", possible_weight)


def claims_of(program: Program) -> tuple[Claim, ...]:
    """Return all claims of a program's uploads."""
    return (WEIGHT, *program.claims)


def claims_hold(
    program: Program,
    context: ClientContext,
    upload: Upload,
) -> Bool[Array, " claims"]:
    """Return which claims of an upload are possible, before the server clips it."""
    return jnp.stack([claim.holds(context, upload) for claim in claims_of(program)])


def possible_counts(counts: Num[Array, " n"], examples: Int[Array, ""]) -> Bool[Array, ""]:
    """Return whether a client can have these numbers of examples, such as one per class:
    each in [0, examples], and their sum too."""
    # clipped before they are added: sums of large integers would wrap around
    in_range = jnp.all((counts >= 0) & (counts <= examples))
    total = jnp.sum(jnp.clip(counts, 0, examples).astype(jnp.float32))
    return in_range & (total <= examples)


def within(
    values: Num[Array, "..."],
    least: ArrayLike,
    most: ArrayLike,
) -> Bool[Array, ""]:
    """Return whether all values [...] lie in [least, most]; NaN does not."""
    return jnp.all((values >= least) & (values <= most))


def possible_class_sums(
    sums: Float[Array, "classes width"],
    counts: Num[Array, " classes"],
    longest: ArrayLike = jnp.inf,
) -> Bool[Array, ""]:
    """Return whether `counts` vectors of at most this Euclidean norm can add up to these
    sums (triangle inequality)."""
    count = counts.astype(jnp.float32)
    # a class without examples has a sum of 0; inf times a count of 0 would be NaN
    most = jnp.where(count > 0, count * longest * (1 + SUMS), 0.0)
    return jnp.all(jnp.linalg.norm(sums, axis=1) <= most)


def possible_trace(
    trace: Float[Array, "*sums"], count: Num[Array, "*sums"], longest: ArrayLike = jnp.inf
) -> Bool[Array, ""]:
    """Return whether these can be the sums of |x|^2 over `count` vectors x of at most
    this norm."""
    count = count.astype(jnp.float32)
    most = jnp.where(count > 0, count * jnp.square(longest) * (1 + SUMS), 0.0)
    return jnp.all((trace >= 0) & (trace <= most))


def norm_by_gram(gram: Float[Array, "M M"], x: Float[Array, "M n"]) -> Float[Array, ""]:
    """Return tr(X^T G^+ X); NaN if G is no Gram matrix: not symmetric, or with a negative
    eigenvalue.

    Instead of G it uses G + ROUNDING tr(G) I, which is positive definite for every Gram
    matrix in spite of rounding. One Cholesky factor then gives the norm and tells whether
    G is a Gram matrix. The result is never larger than with G itself, and a column of X
    outside of the range of G makes it large. With X = H^T Y and G = H^T H it is at most
    |Y|^2.

    A matrix wider than `EXACT` is judged by its `sketch`: its factor would cost more than a
    client's round.
    """
    # |G_ij| <= sqrt(G_ii G_jj) in every Gram matrix: rounding is relative to that
    root = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0))
    symmetric = jnp.all(jnp.abs(gram - gram.T) <= 10 * ROUNDING * root[:, None] * root)
    if len(gram) > EXACT:
        gram, x = sketch(gram, x)
    slack = jnp.maximum(ROUNDING * jnp.trace(gram), jnp.finfo(jnp.float32).tiny)
    # G = R^T R: tr(X^T G^-1 X) = |R^-T X|^2
    diagonal, transformed = _inverse_root(gram + slack * jnp.eye(len(gram)), x)
    # a negative eigenvalue makes the factor NaN
    definite = jnp.all(jnp.isfinite(diagonal))
    return jnp.where(symmetric & definite, jnp.sum(transformed**2), jnp.nan)


@one_by_one
def _inverse_root(gram: Float[Array, "M M"], x: Float[Array, "M n"]) -> tuple[Array, Array]:
    """Return the diagonal [M] of R, where G = R^T R, and R^-T X [M, n]."""
    # the same triangle as in `parts.ridge.solve_ridge`, which factorises the sum of these
    factor, is_lower = jax.scipy.linalg.cho_factor(gram)
    return jnp.diagonal(factor), jax.scipy.linalg.solve_triangular(factor, x, trans=1, lower=is_lower)


def sketch(
    gram: Float[Array, "M M"], x: Float[Array, "M n"]
) -> tuple[Float[Array, "d d"], Float[Array, "d n"]]:
    """Return S^T G S and S^T X for random directions S [M, DIRECTIONS].

    With G = H^T H and X = H^T Y these are sums over the features H S. A negative
    eigenvalue of G shows if it is larger than about 1 / DIRECTIONS of the trace; with
    fewer examples than directions, any does.
    """
    # the seed depends on the matrix, so a client cannot hide a negative eigenvalue from
    # directions that it knows beforehand
    seed = jax.lax.bitcast_convert_type(jnp.sum(gram), jnp.uint32)
    directions = jax.random.normal(jax.random.key(seed), (len(gram), DIRECTIONS))
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    sketched = exact(directions.T, exact(gram, directions))
    # symmetric but for rounding, which is large beside the small entries of few examples
    return (sketched + sketched.T) / 2, exact(directions.T, x)


def is_gram(gram: Float[Array, "*sums M M"]) -> Bool[Array, ""]:
    """Return whether all matrices are symmetric and positive semidefinite, up to rounding."""
    matrices = gram.reshape(-1, *gram.shape[-2:])
    # X without columns: the norm is 0, or NaN if the matrix is no Gram matrix
    return jnp.all(jax.vmap(norm_by_gram)(matrices, matrices[..., :0]) == 0)
