"""FedRAN: accurate and resource-efficient federated continual learning (arXiv 2606.11480).

    once per task   each client projects its features f at random,  h = relu(f^T P),  and sends of its Gram
                    matrix  G_k = sum h h^T  the r largest directions,  F_k = U_k S_k^(1/2),  and the sums
                    Q_k = sum h y^T:  M r + M C parameters in place of M^2 + M C
                    the server merges  F_t <- [F_1, F_2, ...]  over clients, then  F <- [F, F_t]  over tasks,
                    each to its largest directions:
                        [...] = Z R  (QR),   R = U S V^T  (SVD),   F <- Z U S
                    and solves  W = (F F^T + lambda I)^-1 Q
    few labels      clients send the class sums of their labelled examples first, the server sends the means
                    back, and each example without a label takes the class of the nearest mean
    prediction      the largest entry of relu(f^T P)^T W

`[A, B] [A, B]^T = A A^T + B B^T`, so that what is merged approximates the sum of all Gram matrices. With r as
large as the number of a client's examples, and as many directions at the server as all of them span, nothing
is lost: the classifier is FedRanPAC's with a fixed ridge.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.federated.claims import possible_counts
from fcljax.models.heads import cosine
from fcljax.models.products import exact_matmul
from fcljax.models.prototypes import class_means
from fcljax.options import option
from fcljax.parts.classifiers import Sums, add_batch, add_classes, empty_sums
from fcljax.parts.client import ClientEnd, ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Params, learner
from fcljax.parts.random_features import Projected, chosen_by_index, on_projection, project
from fcljax.parts.reports import possible_sums
from fcljax.parts.ridge import Moments, add_examples, no_moments, solve_ridge
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.types import ClientContext, Method, Task, Weighted

# Keys of what is drawn once: whose labels are known, and where iterations start
LABELS = 1
SKETCH = 2
# Of the subspace iteration, and its directions beyond those that are wanted
ITERATIONS = 4
MORE = 10


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
    """What is known of the Gram matrix of some examples, and their class sums."""

    factor: Float[Array, "M r"]
    """F, with F F^T near the Gram matrix."""
    products: Float[Array, "M C"]
    """Sum of h y^T."""
    examples: Float[Array, ""]
    """How many."""
    trace: Float[Array, ""]
    """Of the whole Gram matrix: the sum of |h|^2."""


def fedran(options: FedRANOptions, run: Run) -> Method:
    """FedRAN as a method; nothing trains."""
    width = run.network.width
    classes = run.sizes.classes
    rules = (low_rank_ridge(options, run),)
    if options.labelled == 1 or not options.pseudo_labels:
        head = on_projection(width, options.projection, classes)
    else:
        rules = (labelled_means(options, run), *rules)
        sums = empty_sums(classes, width)
        head = on_projection(width, options.projection, classes, statistics=sums)
        head = head._replace(trainable=prototypes_of_task)
    return federate(run, learner(run.network, run.adapter, head), server_rules=rules)


# ---- the client --------------------------------------------------------------------------------------------


def gram_report(options: FedRANOptions, run: Run) -> Report:
    """A client's `Summary`: from its projected features where no client has more examples than M, else from
    its Gram matrix."""
    width = options.projection
    classes = run.sizes.classes
    examples = run.sizes.examples
    few = 0 < examples <= width

    def init(_context: ClientContext) -> Moments | Examples:
        return no_examples(examples, width, classes) if few else no_moments(width, classes)

    def add(step: ClientStep, total: Moments | Examples) -> Moments | Examples:
        batch = step.batch
        prototypes = step.context.payload.trainable.classifier
        h = project(step.output.feature, step.context.cached.classifier.projection)
        known = has_label(batch.index, options.labelled)
        label = batch.label
        mask = batch.mask & known
        if prototypes:
            guess, any_class = pseudo_label(step.output.feature, prototypes, step.context.task)
            label = jnp.where(known, batch.label, guess)
            mask = batch.mask & (known | any_class)
        if isinstance(total, Examples):
            return keep_examples(total, h, label, mask)
        return add_examples(total, h, label, mask)

    def finalize(_end: ClientEnd, total: Moments | Examples) -> Summary:
        if isinstance(total, Examples):
            return summary_of_examples(total, options.rank)
        return summary_of(total, options.rank)

    return Report("summary", init, add, finalize, merge="gather", possible=possible_summary)


class Examples(NamedTuple):
    """The examples of a client with fewer of them than features: n M numbers in place of M^2."""

    h: Float[Array, "n M"]
    """Projected features, in the order in which they came; zeros after the last one."""
    products: Float[Array, "M C"]
    """Sum of h y^T."""
    count: Int[Array, ""]
    """How many there are."""


def no_examples(count: int, width: int, classes: int) -> Examples:
    """Room for so many examples."""
    return Examples(jnp.zeros((count, width)), jnp.zeros((width, classes)), jnp.int32(0))


def keep_examples(
    total: Examples, h: Float[Array, "batch M"], label: Int[Array, " batch"], mask: Bool[Array, " batch"]
) -> Examples:
    """The examples with those of a batch that the mask counts."""
    nowhere = len(total.h)
    place = jnp.where(mask, total.count + jnp.cumsum(mask) - 1, nowhere)
    y = jax.nn.one_hot(label, total.products.shape[1]) * mask[:, None]
    products = total.products + exact_matmul(jnp.where(mask[:, None], h, 0.0).T, y)
    return Examples(total.h.at[place].set(h, mode="drop"), products, total.count + jnp.sum(mask))


def summary_of_examples(total: Examples, rank: int) -> Summary:
    """The largest directions of H^T H = V S V^T by the thin decomposition  H H^T = U S U^T,  since
    V S^(1/2) = H^T U,  and the sums as they are."""
    _, vectors = jnp.linalg.eigh(exact_matmul(total.h, total.h.T))
    largest = vectors[:, ::-1][:, :rank]  # eigenvalues rise
    factor = exact_matmul(total.h.T, largest)
    factor = jnp.pad(factor, ((0, 0), (0, rank - factor.shape[1])))
    # `Sizes.examples` promises room for all of them; an upload with less is not finite, so it is left out
    factor = jnp.where(total.count <= len(total.h), factor, jnp.nan)
    return Summary(factor, total.products, total.count.astype(jnp.float32), jnp.sum(total.h**2))


def has_label(index: Int[Array, " batch"], share: float) -> Bool[Array, " batch"]:
    """Whose label is known; it does not depend on the partition."""
    return chosen_by_index(index, share, jax.random.key(LABELS)) if share < 1 else index == index


def summary_of(moments: Moments, rank: int) -> Summary:
    """The largest directions of a Gram matrix, and the sums as they are."""
    factor = largest_directions(moments.gram, rank)
    return Summary(factor, moments.products, moments.examples, jnp.trace(moments.gram))


def largest_directions(gram: Float[Array, "M M"], rank: int) -> Float[Array, "M r"]:
    """U S^(1/2) of the largest eigenvalues S, by subspace iteration: exact where the matrix has no more
    directions, else up to directions whose eigenvalues are nearly equal."""
    width = len(gram)
    start = jax.random.normal(jax.random.key(SKETCH), (width, min(rank + MORE, width)))

    def iterate(_: Array, basis: Array) -> Array:
        return jnp.linalg.qr(exact_matmul(gram, basis))[0]

    basis = jax.lax.fori_loop(0, ITERATIONS, iterate, jnp.linalg.qr(start)[0])
    values, vectors = jnp.linalg.eigh(exact_matmul(basis.T, exact_matmul(gram, basis)))
    factor = exact_matmul(basis, vectors) * jnp.sqrt(jnp.maximum(values, 0))
    factor = factor[:, ::-1][:, :rank]  # eigenvalues rise
    return jnp.pad(factor, ((0, 0), (0, rank - factor.shape[1])))


def possible_summary(context: ClientContext, sent: Summary) -> Bool[Array, ""]:
    """Whether these can be the sums of a client with so many examples: no direction has more than the trace,
    and by Cauchy and Schwarz no sum over a class more than its examples allow."""
    most = sent.trace * (1 + 1e-3)  # up to rounding
    known = jnp.sum(sent.factor**2) <= most
    bound = jnp.sum(sent.products**2) <= most * jnp.maximum(sent.examples, 0)
    return known & bound & possible_counts(sent.examples[None], context.client.examples)


# ---- the server --------------------------------------------------------------------------------------------


def low_rank_ridge(options: FedRANOptions, run: Run) -> ServerRule:
    """The server's summary of all tasks, and the classifier from it."""
    width = options.projection
    rank = min(options.server_rank, options.projection)

    def init(params: Params, trainable: Params) -> Summary:
        del params, trainable
        return Summary(
            jnp.zeros((width, rank)), jnp.zeros((width, run.sizes.classes)), jnp.zeros(()), jnp.zeros(())
        )

    def update(round: ServerRound, params: Params, total: Summary) -> ServerUpdate:
        of_task = over_clients(round.reports["summary"], round.valid, rank)
        total = add_task(total, of_task)
        head: Projected = params.classifier
        ridge = options.ridge * total.trace / width
        weights = solve_low_rank(total.factor, total.products, ridge)
        kept = jnp.sum(total.factor**2) / jnp.maximum(total.trace, jnp.finfo(jnp.float32).tiny)
        metrics = {"explained": Weighted(kept, jnp.float32(1))}
        return ServerUpdate(params._replace(classifier=head._replace(weights=weights)), total, metrics)

    return ServerRule("fedran", update, init, reports=(gram_report(options, run),), when="task_start")


def over_clients(sent: Summary, valid: Bool[Array, " P"], rank: int) -> Summary:
    """The summary of a task's examples from those of clients [P, ...]."""

    def counted(leaf: Array) -> Array:
        return jnp.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0.0)

    sent = jax.tree.map(counted, sent)
    side_by_side = sent.factor.transpose(1, 0, 2).reshape(sent.factor.shape[1], -1)
    return Summary(merge_directions(side_by_side, rank), *(jnp.sum(leaf, axis=0) for leaf in sent[1:]))


def add_task(total: Summary, task: Summary) -> Summary:
    """The summary of all tasks so far."""
    both = jnp.concatenate([total.factor, task.factor], axis=1)
    factor = merge_directions(both, total.factor.shape[1])
    return Summary(factor, *(old + new for old, new in zip(total[1:], task[1:], strict=True)))


def merge_directions(columns: Float[Array, "M n"], rank: int) -> Float[Array, "M least"]:
    """F of the largest directions of [F_1, F_2, ...], by a QR decomposition and the SVD of its R."""
    basis, triangle = jnp.linalg.qr(columns)
    left, values, _ = jnp.linalg.svd(triangle, full_matrices=False)
    return exact_matmul(basis, left[:, :rank]) * values[:rank]


def solve_low_rank(
    factor: Float[Array, "M r"], products: Float[Array, "M C"], ridge: Float[Array, ""]
) -> Float[Array, "M C"]:
    """(F F^T + ridge I)^-1 Q, by a matrix of r x r (Woodbury); 0 before any example."""
    ridge = jnp.maximum(ridge, jnp.finfo(jnp.float32).tiny)
    inner = solve_ridge(exact_matmul(factor.T, factor), exact_matmul(factor.T, products), ridge)
    return (products - exact_matmul(factor, inner)) / ridge


# ---- few labels --------------------------------------------------------------------------------------------


def labelled_means(options: FedRANOptions, run: Run) -> ServerRule:
    """The class sums of labelled examples, before anything is pseudo-labelled."""

    def init(context: ClientContext) -> Sums:
        del context
        return empty_sums(run.sizes.task_classes, run.network.width)

    def add(step: ClientStep, total: Sums) -> Sums:
        known = step.batch.mask & has_label(step.batch.index, options.labelled)
        return add_batch(total, step.output.feature, step.batch._replace(mask=known), step.context.task)

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        head: Projected = params.classifier
        sums = add_classes(head.statistics, round.reports["labelled_sums"], round.task)
        return ServerUpdate(params._replace(classifier=head._replace(statistics=sums)), state)

    report = Report("labelled_sums", init, add, merge="sum", possible=possible_sums)
    return ServerRule("prototypes", update, reports=(report,), when="task_start")


def prototypes_of_task(params: Projected, task: Task) -> Sums:
    """What the server sends: the sums of the task's classes [Ct], of all clients' labelled examples."""
    place = jnp.maximum(task.classes, 0)
    real = task.classes >= 0
    sums: Sums = params.statistics
    feature = jnp.where(real[:, None], sums.feature[place], 0.0)
    return Sums(feature, jnp.where(real, sums.examples[place], 0.0))


def pseudo_label(
    feature: Float[Array, "batch D"], sums: Sums, task: Task
) -> tuple[Int[Array, " batch"], Bool[Array, ""]]:
    """The task's class whose prototype, the mean of labelled examples, has the smallest angle.

    Returns:
      The labels, and whether any class has a prototype.
    """
    means, present = class_means(sums.feature, sums.examples)
    likeness = jnp.where(present, cosine(feature, means), -jnp.inf)
    return jnp.maximum(task.classes[jnp.argmax(likeness, axis=1)], 0), jnp.any(present)
