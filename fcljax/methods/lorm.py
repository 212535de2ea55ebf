"""LoRM: closed-form merging of LoRA (Salami et al., ICLR 2025, arXiv 2410.17961).

    round      all clients train one factor of the task's LoRA pair and share the other (B in
               the first round of a task, then A, B, ... in turn), and the classifier W
    client i   sends its factor times the Gram matrix G_i = X_i X_i^T of the pair's inputs
    server     merges in least squares, so that the pair responds like the clients' pairs:
                   A shared    B = (sum_i B_i A G_i A^T) (A (sum_i G_i) A^T)^+
                   B shared    A = (sum_i A_i G_i) (sum_i G_i)^+
               and the classifier likewise, with the Gram matrix of features (RegMean)
    task end   the same between tasks, with G_t over all clients:
                   dW = (sum_t B_t A_t G_t) (sum_t G_t)^+

With both factors free there are infinitely many solutions, so one trains at a time.
Clients train a pair alone on the pre-trained network, never with those of earlier tasks.
Of the Gram matrices of the pairs' inputs only the diagonals are used, as in the release:
D parameters travel for each block and not D^2.

Clients send their change times G_i, and the server adds these up. The solution is the
same, but directions in which no client has inputs stay as they were, where the
pseudo-inverse makes them 0. The merged update is a sum of pairs with the factors A_t G_t
(sum_s G_s)^+: the adapter's sum of products, without a dense matrix.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from fcljax.adapters.lora import LoraOptions, pair_of
from fcljax.errors import InputError
from fcljax.federated.claims import SUMS, is_gram, norm_by_gram, possible_trace
from fcljax.federated.schedule import phase_steps
from fcljax.models.heads import Head
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.reports import inputs_of_pairs, longest_feature, longest_inputs
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig, with_headtune, with_mini
from fcljax.types import ClientContext, LearningRate, Method, RoundContext, Task, View

Gram = Float[Array, "*gram"]  # [D], its diagonal, or [D, D]
# no training step moves a parameter by more than so many times the learning rate
STEP = 10.0


@dataclasses.dataclass(frozen=True)
class LoRMOptions:
    """Options of LoRM."""

    pair_gram: Literal["diagonal", "full"] = "diagonal"
    """Part of a LoRA pair's input Gram matrix that clients send."""
    head_gram: float = option(0.5, least=0.0, most=1.0)
    """Factor of the off-diagonal entries of the features' Gram matrix when the classifier
    is merged."""


_LORA = LoraOptions(lora_rank=16, lora_lr=3e-4, local_lora="current", global_lora="products")
PRESETS = with_headtune(
    with_mini(
        {"intended": Preset(LoRMOptions(), RunConfig(lr=3e-4, batch_size=16, rounds=5), (_LORA,))},
        lr=1e-2,
        lora_lr=3e-3,
    )
)


class Grams(NamedTuple):
    """Sums over examples."""

    pairs: Float[Array, "blocks *gram"]
    """Of x x^T over all tokens x that a block's pairs read; or its diagonal."""
    head: Float[Array, "D D"]
    """Of f f^T over features f."""


class WeightedChange(NamedTuple):
    """A client's change of what trains, times the Gram matrix of the inputs on which it
    acts."""

    grams: Grams
    query: Float[Array, "blocks rank D"]
    """(A_i - A) G_i, or the transpose of (B_i - B) A G_i A^T."""
    value: Float[Array, "blocks rank D"]
    kernel: Float[Array, "D C"]
    """G_i (W_i - W)."""


class Merged(NamedTuple):
    """The server's state of all tasks so far."""

    query: Float[Array, "tasks blocks rank D"]
    """A_t G_t; 0 for later tasks."""
    value: Float[Array, "tasks blocks rank D"]
    gram: Float[Array, "blocks *gram"]
    """sum_t G_t."""


def lorm(options: LoRMOptions, run: Run) -> Method:
    """Compose LoRM."""
    method = federate(
        run,
        # the two server rules merge all parameters except the classifier's bias
        merged_by_responses(linear_learner(run)),
        loss=cross_entropy_loss(),
        client_rules=(ClientRule("one_factor", project=freeze_other_factor),),
        server_rules=(match_responses(options, run), match_over_tasks(options, run)),
    )
    return method._replace(handover=handover)


def handover(round_context: RoundContext, server: ServerState) -> Lora:
    """Return the clients' download after a task, for counting.

    It is A of all tasks, which the end of a task merges anew, and B of the task itself.
    """
    task_pair = pair_of(server.params.adapter, round_context.task.index)
    return server.params.adapter._replace(b_q=task_pair.b_q, b_v=task_pair.b_v)


def merged_by_responses(model: Learner) -> Learner:
    """Return the learner of which only the classifier's bias is averaged.

    A server rule merges its pair and the classifier's kernel.
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


# ---- the client ------------------------------------------------------------------------


def trains_b(round_: Array) -> Bool[Array, ""]:
    """Return whether B trains: in the rounds 0, 2, ... of a task; A in the others."""
    return round_ % 2 == 0


def freeze_other_factor(context: ClientContext, trainable: Params) -> Params:
    """Put the factor that does not train back after every step."""
    shared: Lora = context.payload.trainable.adapter
    pair: Lora = trainable.adapter
    b_trains = trains_b(context.client.round)

    # the other factor is the same at all clients, so that least squares has one solution
    def projected(trains: Array, trained: Array, shared: Array) -> Array:
        return jnp.where(trains, trained, shared)

    pair = Lora(
        a_q=projected(~b_trains, pair.a_q, shared.a_q),
        b_q=projected(b_trains, pair.b_q, shared.b_q),
        a_v=projected(~b_trains, pair.a_v, shared.a_v),
        b_v=projected(b_trains, pair.b_v, shared.b_v),
    )
    return trainable._replace(adapter=pair)


def no_pair_grams(
    options: LoRMOptions,
    context: ClientContext,
) -> Float[Array, "blocks *gram"]:
    """Return Gram matrices of the pairs' inputs over no examples yet."""
    blocks, _, width = context.payload.trainable.adapter.a_q.shape
    return jnp.zeros((blocks, *_gram_shape(options, width)))


def _gram_shape(options: LoRMOptions, width: int) -> tuple[int, ...]:
    """Return the shape of what is kept of a Gram matrix of inputs."""
    # the diagonal alone is D scalars per block, as in the release
    if options.pair_gram == "diagonal":
        return (width,)
    return (width, width)


def pair_grams(
    options: LoRMOptions,
    step: ClientStep,
    blocks: int,
) -> Float[Array, "blocks *gram"]:
    """Return the sums of x x^T, or of its diagonal, over the tokens x of a batch."""
    x = inputs_of_pairs(step, blocks)
    # exact: the server inverts these sums
    if options.pair_gram == "diagonal":
        return exact_einsum("mnd,mnd->md", x, x)
    return exact_einsum("mnd,mne->mde", x, x)


def responses(options: LoRMOptions, run: Run) -> Report:
    """Report `weighted_change`, weighted by Gram matrices after training."""
    width = run.network.width

    def init(context: ClientContext) -> Grams:
        return Grams(no_pair_grams(options, context), jnp.zeros((width, width)))

    def add(step: ClientStep, total: Grams) -> Grams:
        # padding would enter the Gram matrix
        feature = jnp.where(step.batch.mask[:, None], step.output.feature, 0.0)
        pairs = pair_grams(options, step, len(total.pairs))
        head = off_diagonal(feature, options.head_gram)
        return Grams(total.pairs + pairs, total.head + head)

    view = View(1, run.training.batch_size, shuffle=False)
    possible = functools.partial(possible_change, run)
    return Report("responses", init, add, weighted_change, view, "sum", possible=possible)


def task_grams(options: LoRMOptions, run: Run) -> Report:
    """Report the Gram matrices of the pairs' inputs under the merged pair, at a task's
    end."""

    def init(context: ClientContext) -> Array:
        return no_pair_grams(options, context)

    def add(step: ClientStep, total: Array) -> Array:
        return total + pair_grams(options, step, len(total))

    view = View(1, run.training.batch_size, shuffle=False)
    return Report("task_grams", init, add, view=view, merge="sum", possible=possible_inputs)


def off_diagonal(feature: Float[Array, "batch D"], factor: float) -> Float[Array, "D D"]:
    """Return F^T F with a factor off its diagonal (RegMean)."""
    gram = exact_matmul(feature.T, feature)
    return factor * gram + (1 - factor) * jnp.diag(jnp.diag(gram))


def weighted_change(end: ClientEnd, grams: Grams) -> WeightedChange:
    """Return the client's change after training times its Gram matrices."""
    received: Params = end.context.payload.trainable
    trained = end.trainable
    b_trains = trains_b(end.context.client.round)

    def times_gram(
        a: Array,
        a_i: Array,
        b: Array,
        b_i: Array,
    ) -> Float[Array, "blocks rank D"]:
        # (B_i - B) A G_i A^T, transposed so that both factors have one shape
        change_of_b = exact_matmul(inner_gram(a, grams.pairs), (b_i - b).mT)
        # (A_i - A) G_i
        change_of_a = apply_gram(a_i - a, grams.pairs)
        return jnp.where(b_trains, change_of_b, change_of_a)

    old: Lora = received.adapter
    new: Lora = trained.adapter
    query = times_gram(old.a_q, new.a_q, old.b_q, new.b_q)
    value = times_gram(old.a_v, new.a_v, old.b_v, new.b_v)
    kernel_change = trained.classifier.kernel - received.classifier.kernel
    return WeightedChange(grams, query, value, exact_matmul(grams.head, kernel_change))


def possible_change(run: Run, context: ClientContext, change: WeightedChange) -> Bool[Array, ""]:
    """Check that a client's examples and training can give these Gram matrices and changes."""
    grams = change.grams
    longest = longest_feature(run, context)
    head_fits = possible_trace(jnp.trace(grams.head), context.client.examples, longest)
    grams_fit = head_fits & is_gram(grams.head) & possible_inputs(context, grams.pairs)
    kernel_fits = can_move(grams.head, change.kernel, largest_change(run, context, run.training.lr))

    rate = run.training.lr
    if run.adapter.rate is not None:
        rate = run.adapter.rate
    largest = largest_change(run, context, rate)
    received: Lora = context.payload.trainable.adapter

    def factor_fits(a: Array, weighted: Array) -> Bool[Array, ""]:
        b_fits = can_move(inner_gram(a, grams.pairs), weighted, largest)
        if grams.pairs.ndim == 2:
            a_fits = jnp.all(jnp.abs(weighted) <= (1 + SUMS) * largest * grams.pairs[:, None])
        else:
            a_fits = can_move(grams.pairs, weighted.mT, largest)
        return jnp.where(trains_b(context.client.round), b_fits, a_fits)

    pairs_fit = factor_fits(received.a_q, change.query) & factor_fits(received.a_v, change.value)
    return grams_fit & kernel_fits & pairs_fit


def largest_change(run: Run, context: ClientContext, rate: LearningRate) -> Float[Array, ""]:
    """Return the largest change of a parameter in a client's training.

    Adam's steps are at most 3.2 learning rates long (Kingma and Ba 2015, section 2.1);
    SGD's are as long as the gradient, whose entries are below 1 unless training diverges.
    """
    view = View(run.training.epochs, run.training.batch_size)
    return jnp.asarray(STEP * rate * phase_steps(context.client.examples, view))


def can_move(
    gram: Float[Array, "*m n n"], weighted: Float[Array, "*m n k"], largest: Float[Array, ""]
) -> Bool[Array, ""]:
    """Check that G dW is in the range of G, for some dW whose entries are at most `largest`.

    With X = G dW:  tr(X^T G^+ X) = tr(dW^T G dW) <= tr(G) |dW|^2.
    """
    norm = jnp.vectorize(norm_by_gram, signature="(n,n),(n,k)->()")(gram, weighted)
    entries = weighted.shape[-2] * weighted.shape[-1]
    most = jnp.trace(gram, axis1=-2, axis2=-1) * largest**2 * entries
    return jnp.all(norm <= (1 + SUMS) * most)


def possible_inputs(context: ClientContext, grams: Float[Array, "blocks *gram"]) -> Bool[Array, ""]:
    """Check that these are Gram matrices, of inputs no longer than the blocks' norms allow."""
    squares = squares_of(grams)
    examples = jnp.full(len(grams), context.client.examples)
    longest = longest_inputs(context, len(grams))
    return possible_trace(jnp.sum(squares, axis=1), examples, longest) & are_grams(grams)


def squares_of(grams: Float[Array, "blocks *gram"]) -> Float[Array, "blocks D"]:
    """Return the diagonals of Gram matrices that may be given by them alone."""
    if grams.ndim == 2:
        return grams
    return jnp.diagonal(grams, 0, 1, 2)


def are_grams(grams: Float[Array, "blocks *gram"]) -> Bool[Array, ""]:
    """Check that these are Gram matrices, or their diagonals."""
    if grams.ndim == 3:
        return is_gram(grams)
    return jnp.all(grams >= 0)


# ---- the server ------------------------------------------------------------------------


def apply_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank D"]:
    """Return A G, with G [*m, D] (its diagonal) or [*m, D, D]."""
    if gram.ndim < a.ndim:
        return a * gram[..., None, :]
    return exact_matmul(a, gram)


def inner_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank rank"]:
    """Return A G A^T."""
    return exact_matmul(apply_gram(a, gram), a.mT)


def inverse_of(gram: Float[Array, "*m n n"]) -> Float[Array, "*m n n"]:
    """Return the pseudo-inverse of a symmetric matrix; eigenvalues near 0 count as 0."""
    # directions without inputs have eigenvalue 0 up to rounding
    return jnp.linalg.pinv(gram, rtol=1e-6, hermitian=True)


def divide_by_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank D"]:
    """Return A G^+, with G [*m, D] (its diagonal) or [*m, D, D]."""
    if gram.ndim == a.ndim:
        return exact_matmul(a, inverse_of(gram))
    positive = gram > 0
    # a channel without inputs at any client stays unchanged
    inverse = jnp.where(positive, 1 / jnp.where(positive, gram, 1.0), 0.0)
    return a * inverse[..., None, :]


def merge_factor(
    a: Float[Array, "blocks rank D"],
    b: Float[Array, "blocks D rank"],
    change: Float[Array, "blocks rank D"],
    gram: Gram,
    b_trains: Bool[Array, ""],
) -> tuple[Array, Array]:
    """Return (A, B) after a round.

    Args:
      a: A before the round.
      b: B before the round.
      change: the sum of the clients' changes times their Gram matrices.
      gram: the sum of G_i.
      b_trains: whether B trained, and not A.
    """
    # A + (sum_i (A_i - A) G_i) (sum_i G_i)^+
    new_a = a + divide_by_gram(change, gram)
    # B + (sum_i (B_i - B) A G_i A^T) (A (sum_i G_i) A^T)^+
    new_b = b + exact_matmul(inverse_of(inner_gram(a, gram)), change).mT
    return jnp.where(b_trains, a, new_a), jnp.where(b_trains, new_b, b)


def match_responses(options: LoRMOptions, run: Run) -> ServerRule:
    """Merge the pair and the classifier after a round (section 3)."""

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        change: WeightedChange = round.reports["responses"]
        grams = change.grams
        pair = pair_of(params.adapter, round.task.index)
        b_trains = trains_b(round.index)
        a_q, b_q = merge_factor(pair.a_q, pair.b_q, change.query, grams.pairs, b_trains)
        a_v, b_v = merge_factor(pair.a_v, pair.b_v, change.value, grams.pairs, b_trains)
        pair = Lora(a_q, b_q, a_v, b_v)
        adapter = round.learner.adapter.merge(params.adapter, round.task, pair)
        head: Head = params.classifier
        # RegMean for the classifier, with its own Gram matrix
        kernel = head.kernel + exact_matmul(inverse_of(grams.head), change.kernel)
        head = head._replace(kernel=kernel)
        return ServerUpdate(params._replace(adapter=adapter, classifier=head), state)

    return ServerRule("match", update, reports=(responses(options, run),))


def match_over_tasks(options: LoRMOptions, run: Run) -> ServerRule:
    """Merge the pairs of all tasks so far to one update, at a task's end (section 3)."""

    def init(params: Params, _trainable: Params) -> Merged:
        tasks, blocks, _, width = params.adapter.a_q.shape
        # one pair for all tasks has nothing to merge over tasks
        if tasks != run.sizes.tasks:
            raise InputError("lora_pairs: 'one' leaves nothing to merge over tasks; nearest: 'task'")
        zeros = jnp.zeros_like(params.adapter.a_q)
        return Merged(zeros, zeros, jnp.zeros((blocks, *_gram_shape(options, width))))

    def update(round: ServerRound, params: Params, state: Merged) -> ServerUpdate:
        task = round.task.index
        gram = round.reports["task_grams"]
        pairs: Lora = params.adapter
        pair: Lora = pair_of(pairs, task)
        # A_t G_t once, when the task is over
        query = state.query.at[task].set(apply_gram(pair.a_q, gram))
        value = state.value.at[task].set(apply_gram(pair.a_v, gram))
        state = Merged(query, value, state.gram + gram)
        # pairs of later tasks stay as they are
        has_ended = jnp.arange(run.sizes.tasks)[:, None, None, None] <= task
        pairs = pairs._replace(
            a_q=jnp.where(has_ended, over_tasks(query, state.gram), pairs.a_q),
            a_v=jnp.where(has_ended, over_tasks(value, state.gram), pairs.a_v),
        )
        return ServerUpdate(params._replace(adapter=pairs), state)

    report = task_grams(options, run)
    return ServerRule("match_tasks", update, init, reports=(report,), when="task_end")


def over_tasks(weighted: Float[Array, "tasks blocks rank D"], gram: PyTree) -> Array:
    """Return A_t G_t (sum_s G_s)^+ of each task t; B_t times it is the merged update."""
    return jax.vmap(lambda a: divide_by_gram(a, gram))(weighted)
