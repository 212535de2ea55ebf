"""FedRAN: accurate and resource-efficient federated continual learning (arXiv
2606.11480).

    once per task   each client projects its features f at random,  h = relu(f^T P)
                    sends the r largest directions  F_k = U_k S_k^(1/2)  of its Gram matrix
                    G_k = sum h h^T,  and  Q_k = sum h y^T:
                    M r + M C parameters in place of M^2 + M C
                    the server merges  F_t <- [F_1, F_2, ...]  over clients, then
                    F <- [F, F_t]  over tasks, each to its largest directions:
                        [...] = Z R  (QR),   R = U S V^T  (SVD),   F <- Z U S
                    and solves  W = (F F^T + lambda I)^-1 Q
    few labels      clients first send the class sums of their labelled examples, the server
                    sends the means back, and each example without a label takes the class
                    of the nearest mean
    prediction      the largest entry of relu(f^T P)^T W

`[A, B] [A, B]^T = A A^T + B B^T`, so the merged factor approximates the sum of all
Gram matrices. Nothing is lost if r is at least each client's number of examples and the
server keeps all directions: the classifier is then FedRanPAC's with a fixed ridge.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax import matrices
from fcljax.federated.claims import (
    ROUNDING,
    SUMS,
    norm_by_gram,
    possible_counts,
    possible_trace,
)
from fcljax.models.heads import cosine
from fcljax.models.products import exact_matmul
from fcljax.models.prototypes import class_means
from fcljax.options import option
from fcljax.parts.classifiers import Sums, add_batch, add_classes, empty_sums
from fcljax.parts.client import ClientEnd, ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Params, learner
from fcljax.parts.random_features import (
    Projected,
    chosen_by_index,
    longest_random_feature,
    on_projection,
    random_features,
)
from fcljax.parts.reports import Longest, longest_feature, possible_sums, unbounded
from fcljax.parts.ridge import Moments, add_examples, no_moments, solve_ridge
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.types import ClientContext, Method, Task, Weighted

# Keys that do not depend on the run's seed. LABELS: which examples have labels is part of
# the data. SKETCH: the first basis of the subspace iteration is the same for all clients.
LABELS = 1
SKETCH = 2
ITERATIONS = 4  # of the subspace iteration
OVERSAMPLING = 10  # directions beyond the requested rank, so that the last ones converge too
EXACT = 512  # rows of a matrix whose eigenvectors are computed without iterations


@dataclasses.dataclass(frozen=True)
class FedRANOptions:
    """Options of FedRAN."""

    projection: int = 2000
    """Width M of the random projection."""
    rank: int = 64
    """Number r of directions of its Gram matrix that a client sends, each of M
    parameters."""
    server_rank: int = 1000
    """Number of directions that the server keeps of the Gram matrices of all clients and
    tasks."""
    ridge: float = option(0.1, positive=True)
    """Weight lambda of the classifier's squared norm, relative to the mean eigenvalue of
    the Gram matrix."""
    labelled: float = option(1.0, positive=True, most=1.0)
    """Fraction of examples whose labels clients know; the others count by their
    pseudo-labels."""
    pseudo_labels: bool = True
    """Give examples without a label the class of the nearest prototype; otherwise leave
    them out."""


class Summary(NamedTuple):
    """A low-rank factor of the Gram matrix of some examples, and their class sums."""

    factor: Float[Array, "M r"]
    """F, with F F^T near the Gram matrix."""
    products: Float[Array, "M C"]
    """Sum of h y^T."""
    examples: Float[Array, ""]
    """Their number."""
    trace: Float[Array, ""]
    """Of the whole Gram matrix: the sum of |h|^2."""


def fedran(options: FedRANOptions, run: Run) -> Method:
    """Compose FedRAN; nothing trains."""
    width = run.network.width
    classes = run.sizes.classes
    server_rules = (low_rank_ridge(options, run),)
    # only pseudo-labels need class means at clients
    if options.labelled == 1 or not options.pseudo_labels:
        classifier = on_projection(width, options.projection, classes)
    else:
        # class sums stand in for trainable parameters, so that the server broadcasts them
        sums = empty_sums(classes, width)
        classifier = on_projection(width, options.projection, classes, statistics=sums)
        classifier = classifier._replace(trainable=prototypes_of_task)
        server_rules = (labelled_means(options, run), *server_rules)
    model = learner(run.network, run.adapter, classifier)
    return federate(run, model, server_rules=server_rules)


# ---- the client ------------------------------------------------------------------------


def gram_report(options: FedRANOptions, run: Run) -> Report:
    """Report a client's `Summary`.

    It is made from the client's projected features where no client has more examples than
    M, else from its Gram matrix.
    """
    width = options.projection
    classes = run.sizes.classes
    most_examples = run.sizes.examples

    def init(_context: ClientContext) -> Moments | Examples:
        # for n <= M examples the features [n, M] are smaller than H^T H [M, M]
        if 0 < most_examples <= width:
            return no_examples(most_examples, width, classes)
        return no_moments(width, classes)

    def add(step: ClientStep, total: Moments | Examples) -> Moments | Examples:
        batch = step.batch
        # () where the method sends no means
        prototypes = step.context.payload.trainable.classifier
        h = random_features(step)
        labelled = has_label(batch.index, options.labelled)
        label = batch.label
        mask = batch.mask & labelled
        if prototypes:
            nearest, any_class = pseudo_label(step.output.feature, prototypes, step.context.task)
            label = jnp.where(labelled, batch.label, nearest)
            mask = batch.mask & (labelled | any_class)
        if isinstance(total, Examples):
            return keep_examples(total, h, label, mask)
        return add_examples(total, h, label, mask)

    def finalize(_end: ClientEnd, total: Moments | Examples) -> Summary:
        if isinstance(total, Examples):
            return summary_of_examples(total, options.rank)
        return summary_of(total, options.rank)

    longest = functools.partial(longest_random_feature, run)
    possible = functools.partial(possible_summary, longest=longest)
    return Report("summary", init, add, finalize, merge="gather", possible=possible)


class Examples(NamedTuple):
    """A client's projected features: n M scalars, where their Gram matrix has M^2."""

    h: Float[Array, "n M"]
    """Projected features in the order of the batches; zeros after the last one."""
    products: Float[Array, "M C"]
    """Sum of h y^T."""
    count: Int[Array, ""]
    """Number of examples so far."""


def no_examples(count: int, width: int, classes: int) -> Examples:
    """Return empty buffers for `count` examples."""
    return Examples(jnp.zeros((count, width)), jnp.zeros((width, classes)), jnp.int32(0))


def keep_examples(
    total: Examples,
    h: Float[Array, "batch M"],
    label: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
) -> Examples:
    """Append the examples of a batch that are in the mask."""
    # consecutive places from the first free one; JAX drops writes beyond the buffer
    position = jnp.where(mask, total.count + jnp.cumsum(mask) - 1, len(total.h))
    # padding and examples without a label count in no class
    y = jax.nn.one_hot(label, total.products.shape[1]) * mask[:, None]
    products = total.products + exact_matmul(jnp.where(mask[:, None], h, 0.0).T, y)
    buffer = total.h.at[position].set(h, mode="drop")
    return Examples(buffer, products, total.count + jnp.sum(mask))


def summary_of_examples(total: Examples, rank: int) -> Summary:
    """Return the largest directions of H^T H, and the class sums as they are.

    They come from the small matrix H H^T = U S U^T [n, n]: if H^T H = V S V^T, then
    V S^(1/2) = H^T U.
    """
    largest = largest_of_examples(total.h, rank)
    factor = exact_matmul(total.h.T, largest)
    # all clients send `rank` columns; with fewer examples the rest are zeros
    factor = jnp.pad(factor, ((0, 0), (0, rank - factor.shape[1])))
    # `Sizes.examples` promises that the buffer holds all examples. If it does not, NaN
    # makes the server reject the upload: a factor of some examples would be wrong
    factor = jnp.where(total.count <= len(total.h), factor, jnp.nan)
    trace = jnp.sum(total.h**2)
    return Summary(factor, total.products, total.count.astype(jnp.float32), trace)


def largest_of_examples(h: Float[Array, "n M"], rank: int) -> Float[Array, "n r"]:
    """Return the eigenvectors of H H^T with the largest eigenvalues, exactly for few rows."""
    if len(h) <= EXACT:
        _, vectors = matrices.eigh(exact_matmul(h, h.T))
        return vectors[:, ::-1][:, :rank]  # eigenvalues ascend

    def times(vectors: Array) -> Array:
        return exact_matmul(h, exact_matmul(h.T, vectors))

    return largest_eigenvectors(times, len(h), rank)[1]


def has_label(index: Int[Array, " batch"], share: float) -> Bool[Array, " batch"]:
    """Choose the examples whose label is known, independently of the partition."""
    if share == 1:
        return jnp.ones_like(index, bool)
    return chosen_by_index(index, share, jax.random.key(LABELS))


def summary_of(moments: Moments, rank: int) -> Summary:
    """Return the largest directions of a Gram matrix, and the class sums as they are."""
    factor = largest_directions(moments.gram, rank)
    return Summary(factor, moments.products, moments.examples, jnp.trace(moments.gram))


def largest_directions(gram: Float[Array, "M M"], rank: int) -> Float[Array, "M r"]:
    """Return U S^(1/2) of the largest eigenvalues S, by subspace iteration."""
    values, vectors = largest_eigenvectors(functools.partial(exact_matmul, gram), len(gram), rank)
    # rounding makes tiny eigenvalues negative, whose root would be NaN
    factor = vectors * jnp.sqrt(jnp.maximum(values, 0))
    return jnp.pad(factor, ((0, 0), (0, rank - factor.shape[1])))


def largest_eigenvectors(
    times: Callable[[Float[Array, "n k"]], Float[Array, "n k"]], size: int, rank: int
) -> tuple[Float[Array, " r"], Float[Array, "n r"]]:
    """Return the largest eigenvalues of a Gram matrix and their vectors, by subspace iteration.

    The result is exact where the matrix has no more directions, else up to directions
    whose eigenvalues are nearly equal.

    Args:
      times: the product of the matrix [n, n] and vectors.
      size: n.
      rank: number r of eigenvalues, at most n.
    """
    directions = min(rank + OVERSAMPLING, size)
    # a fixed start, so that the result depends on the Gram matrix alone
    start = jax.random.normal(jax.random.key(SKETCH), (size, directions))

    def iterate(_: Array, basis: Array) -> Array:
        # without QR all columns would turn to the largest direction
        return matrices.qr(times(basis))[0]

    basis = jax.lax.fori_loop(0, ITERATIONS, iterate, matrices.qr(start)[0])
    # Rayleigh-Ritz: eigenvectors of the matrix restricted to the subspace
    values, vectors = matrices.eigh(exact_matmul(basis.T, times(basis)))
    # eigenvalues ascend
    return values[::-1][:rank], exact_matmul(basis, vectors)[:, ::-1][:, :rank]


def possible_summary(
    context: ClientContext, reported: Summary, longest: Longest = unbounded
) -> Bool[Array, ""]:
    """Check whether a client with so many examples can have reported this.

    |F|^2 is at most the trace of the Gram matrix G, and tr(Q^T G^+ Q) at most the number
    of examples. The server does not know G, but a bound on it: the directions that F
    leaves out have eigenvalues of at most the least one of F F^T (twice that, as the
    subspace iteration is not exact), and of at most the trace that is left. With rho the
    smaller of both, G <= F F^T + rho I.
    """
    squares = jnp.sum(reported.factor**2, axis=0)
    left_out = jnp.maximum(reported.trace - jnp.sum(squares), 0)
    rho = jnp.minimum(left_out, 2 * jnp.min(squares)) + ROUNDING * reported.trace
    rho = jnp.maximum(rho, jnp.finfo(jnp.float32).tiny)
    # F F^T + rho I is R R^T + rho I in the range of Z, where F = Z R, and rho I outside
    z, r = matrices.qr(reported.factor)
    inside = exact_matmul(z.T, reported.products)
    outside = reported.products - exact_matmul(z, inside)
    gram = exact_matmul(r, r.T) + rho * jnp.eye(len(r))
    explained = norm_by_gram(gram, inside) + jnp.sum(outside**2) / rho
    factor_fits = jnp.sum(squares) <= reported.trace * (1 + SUMS)
    sums_fit = explained <= reported.examples * (1 + SUMS)
    examples_fit = possible_counts(reported.examples[None], context.client.examples)
    trace_fits = possible_trace(reported.trace, reported.examples, longest(context))
    return factor_fits & sums_fit & examples_fit & trace_fits


# ---- the server ------------------------------------------------------------------------


def low_rank_ridge(options: FedRANOptions, run: Run) -> ServerRule:
    """Keep the summary of all tasks, and solve the classifier from it."""
    width = options.projection
    rank = min(options.server_rank, options.projection)

    def init(_params: Params, _trainable: Params) -> Summary:
        factor = jnp.zeros((width, rank))
        products = jnp.zeros((width, run.sizes.classes))
        return Summary(factor, products, jnp.zeros(()), jnp.zeros(()))

    def update(round: ServerRound, params: Params, total: Summary) -> ServerUpdate:
        of_task = merge_clients(round.reports["summary"], round.valid, rank)
        total = add_task(total, of_task)
        # tr(G) / M is the mean eigenvalue, which grows with the examples; lambda does not
        ridge = options.ridge * total.trace / width
        weights = solve_low_rank(total.factor, total.products, ridge)
        classifier: Projected = params.classifier._replace(weights=weights)
        # the share of G that the kept directions explain; without examples the trace is 0
        trace = jnp.maximum(total.trace, jnp.finfo(jnp.float32).tiny)
        explained = jnp.sum(total.factor**2) / trace
        metrics = {"explained": Weighted(explained, jnp.float32(1))}
        return ServerUpdate(params._replace(classifier=classifier), total, metrics)

    report = gram_report(options, run)
    return ServerRule("fedran", update, init, reports=(report,), when="task_start")


def merge_clients(reported: Summary, valid: Bool[Array, " P"], rank: int) -> Summary:
    """Return the summary of a task's examples from those of its clients [P, ...]."""

    def zero_invalid(leaf: Array) -> Array:
        # zeros add no direction; a NaN would reach every entry of the QR factors
        return jnp.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0.0)

    reported = jax.tree.map(zero_invalid, reported)
    width = reported.factor.shape[1]
    side_by_side = reported.factor.transpose(1, 0, 2).reshape(width, -1)
    sums = (jnp.sum(leaf, axis=0) for leaf in reported[1:])
    return Summary(merge_directions(side_by_side, rank), *sums)


def add_task(total: Summary, task: Summary) -> Summary:
    """Return the summary of all tasks, this one included."""
    side_by_side = jnp.concatenate([total.factor, task.factor], axis=1)
    factor = merge_directions(side_by_side, total.factor.shape[1])
    sums = (old + new for old, new in zip(total[1:], task[1:], strict=True))
    return Summary(factor, *sums)


def merge_directions(columns: Float[Array, "M n"], rank: int) -> Float[Array, "M least"]:
    """Return F of the largest directions of [F_1, F_2, ...].

    [...] = Z R,  R = U S V^T,  F = Z U S
    """
    z, r = matrices.qr(columns)
    u, s, _ = matrices.svd(r)
    # [...] [...]^T = Z U S^2 U^T Z^T, so V is not needed
    return exact_matmul(z, u[:, :rank]) * s[:rank]


def solve_low_rank(
    factor: Float[Array, "M r"], products: Float[Array, "M C"], ridge: Float[Array, ""]
) -> Float[Array, "M C"]:
    """Return (F F^T + ridge I)^-1 Q by Woodbury's identity; 0 before any example.

    It solves a system of r x r in place of M x M:
    (F F^T + ridge I)^-1 = (I - F (F^T F + ridge I)^-1 F^T) / ridge.
    """
    # without examples ridge and Q are 0, and the classifier is 0 / tiny = 0
    ridge = jnp.maximum(ridge, jnp.finfo(jnp.float32).tiny)
    inner = solve_ridge(exact_matmul(factor.T, factor), exact_matmul(factor.T, products), ridge)
    return (products - exact_matmul(factor, inner)) / ridge


# ---- few labels ------------------------------------------------------------------------


def labelled_means(options: FedRANOptions, run: Run) -> ServerRule:
    """Merge class sums of labelled examples, before any example is pseudo-labelled."""

    def init(_context: ClientContext) -> Sums:
        return empty_sums(run.sizes.task_classes, run.network.width)

    def add(step: ClientStep, total: Sums) -> Sums:
        labelled = has_label(step.batch.index, options.labelled)
        batch = step.batch._replace(mask=step.batch.mask & labelled)
        return add_batch(total, step.output.feature, batch, step.context.task)

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        classifier: Projected = params.classifier
        reported = round.reports["labelled_sums"]
        sums = add_classes(classifier.statistics, reported, round.task)
        classifier = classifier._replace(statistics=sums)
        return ServerUpdate(params._replace(classifier=classifier), state)

    longest = functools.partial(longest_feature, run)
    possible = functools.partial(possible_sums, longest=longest)
    report = Report("labelled_sums", init, add, merge="sum", possible=possible)
    return ServerRule("prototypes", update, reports=(report,), when="task_start")


def prototypes_of_task(params: Projected, task: Task) -> Sums:
    """Return the broadcast: the labelled sums of the task's classes [Ct]."""
    sums: Sums = params.statistics
    # padding is -1, which would read the last class
    is_class = task.classes >= 0
    index = jnp.maximum(task.classes, 0)
    feature = jnp.where(is_class[:, None], sums.feature[index], 0.0)
    return Sums(feature, jnp.where(is_class, sums.examples[index], 0.0))


def pseudo_label(
    feature: Float[Array, "batch D"], sums: Sums, task: Task
) -> tuple[Int[Array, " batch"], Bool[Array, ""]]:
    """Assign each feature to the task's class whose mean has the smallest angle to it.

    Returns:
      The labels, and whether any class has a mean of labelled examples.
    """
    means, present = class_means(sums.feature, sums.examples)
    # classes without labelled examples never win
    similarity = jnp.where(present, cosine(feature, means), -jnp.inf)
    nearest = task.classes[jnp.argmax(similarity, axis=1)]
    return jnp.maximum(nearest, 0), jnp.any(present)
