"""Gram matrices of the inputs of linear layers, by which servers merge layers.

A client's layer W_i responds with W_i x to its inputs x, and G_i = sum x x^T. Least squares
over the inputs of all clients needs nothing else of them: with G_i and W_i G_i the merged
layer is (sum_i W_i G_i) (sum_i G_i)^+. Inputs of LoRA pairs are those of their block.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fcljax import matrices
from fcljax.federated.claims import SUMS, is_gram, norm_by_gram, possible_trace
from fcljax.federated.schedule import phase_steps
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run
from fcljax.parts.learner import Learner, Params
from fcljax.parts.reports import inputs_of_pairs, longest_feature, longest_inputs
from fcljax.types import ClientContext, Task, View

Gram = Float[Array, "*gram"]  # [D], its diagonal, or [D, D]
GramPart = Literal["diagonal", "full"]
# bound on how far a training step moves a parameter, in units of the learning rate;
# `largest_changes` says why
STEP = 10.0


# ---- the sums of a client --------------------------------------------------------------


def no_pair_grams(context: ClientContext, part: GramPart = "full") -> Float[Array, "blocks *gram"]:
    """Return Gram matrices of the pairs' inputs over no examples yet."""
    blocks, _, width = context.payload.trainable.adapter.a_q.shape
    return jnp.zeros((blocks, *gram_shape(width, part)))


def gram_shape(width: int, part: GramPart) -> tuple[int, ...]:
    """Return the shape of a Gram matrix of inputs, or of its diagonal."""
    # LoRM's release sends the diagonal, D scalars per block in place of D^2
    if part == "diagonal":
        return (width,)
    return (width, width)


def pair_grams(
    step: ClientStep,
    blocks: int,
    part: GramPart = "full",
) -> Float[Array, "blocks *gram"]:
    """Return the sums of x x^T, or of its diagonal, over the tokens x of a batch."""
    x = inputs_of_pairs(step, blocks)
    # exact: the server inverts these sums, and errors of bfloat16 would look like inputs
    # in directions that have none
    if part == "diagonal":
        return exact_einsum("mnd,mnd->md", x, x)
    return exact_einsum("mnd,mne->mde", x, x)


def feature_gram(step: ClientStep) -> Float[Array, "D D"]:
    """Return the sum of f f^T over the features f of a batch."""
    # padding images have features too, which must not count
    feature = jnp.where(step.batch.mask[:, None], step.output.feature, 0.0)
    return exact_matmul(feature.T, feature)


def scale_off_diagonal(gram: Float[Array, "*m D D"], factor: float) -> Float[Array, "*m D D"]:
    """Return a Gram matrix with a factor off its diagonal (RegMean)."""
    return factor * gram + (1 - factor) * gram * jnp.eye(gram.shape[-1])


# ---- what a client can have ------------------------------------------------------------


class Largest(NamedTuple):
    """The largest changes of a parameter in a client's training."""

    pair: Float[Array, ""]
    """Of a LoRA pair."""
    classifier: Float[Array, ""]


def largest_changes(run: Run, context: ClientContext) -> Largest:
    """Return the largest changes of parameters in a client's training.

    Adam's steps are at most 3.2 learning rates long (Kingma and Ba 2015, section 2.1);
    SGD's are as long as the gradient, whose entries are below 1 unless training diverges.
    """
    view = View(run.training.epochs, run.training.batch_size)
    steps = phase_steps(context.client.examples, view)
    rate = run.training.lr
    pair_rate = rate if run.adapter.rate is None else run.adapter.rate
    return Largest(jnp.asarray(STEP * pair_rate * steps), jnp.asarray(STEP * rate * steps))


def can_move(
    gram: Float[Array, "*m n n"], weighted: Float[Array, "*m n k"], largest: Float[Array, ""]
) -> Bool[Array, ""]:
    """Check that G dW is in the range of G, for some dW whose entries are at most `largest`.

    With X = G dW:  tr(X^T G^+ X) = tr(dW^T G dW) <= tr(G) |dW|^2.
    """
    norm = jnp.vectorize(norm_by_gram, signature="(n,n),(n,k)->()")(gram, weighted)
    # |dW|^2 is at most the number of entries times the largest one squared
    entries = weighted.shape[-2] * weighted.shape[-1]
    most = jnp.trace(gram, axis1=-2, axis2=-1) * largest**2 * entries
    return jnp.all(norm <= (1 + SUMS) * most)


def possible_features(run: Run, context: ClientContext, gram: Float[Array, "D D"]) -> Bool[Array, ""]:
    """Check that this is the Gram matrix of the client's features, up to factors off the
    diagonal."""
    longest = longest_feature(run, context)
    return possible_trace(jnp.trace(gram), context.client.examples, longest) & is_gram(gram)


def possible_inputs(context: ClientContext, grams: Float[Array, "blocks *gram"]) -> Bool[Array, ""]:
    """Check that these are Gram matrices, of inputs no longer than the blocks' norms allow."""
    squares = squares_of(grams)
    examples = jnp.full(len(grams), context.client.examples)
    longest = longest_inputs(context, len(grams))
    return possible_trace(jnp.sum(squares, axis=1), examples, longest) & are_grams(grams)


def possible_inner(
    inner: Float[Array, "m r r"],
    gram: Float[Array, "m D D"],
    a: Float[Array, "m r D"],
    largest: Array,
) -> Bool[Array, ""]:
    """Check the size of A_i G_i A_i^T, whose trace is at most |A_i|^2 tr(G_i).

    Args:
      inner: A_i G_i A_i^T.
      gram: G_i.
      a: the broadcast A, from which no entry of A_i is further than `largest`.
      largest: of all changes.
    """
    # |A_i| <= |A| + |A_i - A|, with every entry of the difference at most `largest`
    length = jnp.linalg.norm(a, axis=(1, 2)) + largest * a[0].size ** 0.5
    most = length**2 * jnp.trace(gram, axis1=1, axis2=2)
    return jnp.all(jnp.trace(inner, axis1=1, axis2=2) <= (1 + SUMS) * most)


def squares_of(grams: Float[Array, "blocks *gram"]) -> Float[Array, "blocks D"]:
    """Return the diagonals of Gram matrices, which may be given as diagonals already."""
    if grams.ndim == 2:
        return grams
    return jnp.diagonal(grams, 0, 1, 2)


def are_grams(grams: Float[Array, "blocks *gram"]) -> Bool[Array, ""]:
    """Check that these are Gram matrices, or their diagonals."""
    if grams.ndim == 3:
        return is_gram(grams)
    return jnp.all(grams >= 0)


# ---- the server ------------------------------------------------------------------------


def merged_by_responses(model: Learner) -> Learner:
    """Return the learner whose clients upload only the classifier's bias for the mean.

    A server rule merges the LoRA pair and the classifier's kernel from reports.
    """

    def sends(trainable: Params, _task: Task) -> Params:
        bias = trainable.classifier._replace(kernel=())
        return trainable._replace(adapter=(), classifier=bias)

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        current = model.trainable(params, task)
        head = trainable.classifier._replace(kernel=current.classifier.kernel)
        trainable = trainable._replace(adapter=current.adapter, classifier=head)
        return model.merge(params, task, trainable)

    return model._replace(sends=sends, merge=merge)


def apply_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank D"]:
    """Return A G, with G [*m, D] (its diagonal) or [*m, D, D]."""
    if gram.ndim < a.ndim:
        return a * gram[..., None, :]
    return exact_matmul(a, gram)


def inner_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank rank"]:
    """Return A G A^T, the Gram matrix of A x."""
    return exact_matmul(apply_gram(a, gram), a.mT)


def inverse_of(gram: Float[Array, "*m n n"]) -> Float[Array, "*m n n"]:
    """Return the pseudo-inverse of a symmetric matrix; eigenvalues near 0 count as 0."""
    # directions without inputs have eigenvalue 0 up to rounding, about 1e-7 of the
    # largest one in float32; inverting them would blow up the result
    return jnp.vectorize(matrices.pinv, signature="(n,n)->(n,n)")(gram)


def divide_by_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank D"]:
    """Return A G^+, with G [*m, D] (its diagonal) or [*m, D, D]."""
    if gram.ndim == a.ndim:
        return exact_matmul(a, inverse_of(gram))
    positive = gram > 0
    # a channel without inputs has pseudo-inverse 0; the inner `where` avoids 1 / 0
    inverse = jnp.where(positive, 1 / jnp.where(positive, gram, 1.0), 0.0)
    return a * inverse[..., None, :]


def least_squares(
    weights: Float[Array, "*m D k"], gram: Float[Array, "*m D D"], change: Float[Array, "*m D k"]
) -> Float[Array, "*m D k"]:
    """Return the merged weights W + (sum_i G_i)^+ (sum_i G_i (W_i - W)) of layers x -> x W
    (RegMean).

    Args:
      weights: W that all clients received.
      gram: the sum of G_i.
      change: the sum of the clients' changes times their Gram matrices.
    """
    # with changes instead of W_i, directions without inputs keep W: the pseudo-inverse
    # would set them to 0
    return weights + exact_matmul(inverse_of(gram), change)
