"""LoRM: closed-form merging of LoRA (Salami et al., ICLR 2025, arXiv 2410.17961).

    round      all clients train one factor of the task's LoRA pair and share the other: B in the first round
               of a task, then A, B, ... in turn; and the classifier W
    client i   sends its factor times the Gram matrix G_i = X_i X_i^T of what the pair reads
    server     merges so that the pair's responses are those of the clients' pairs, in least squares:
                   A shared    B = (sum_i B_i A G_i A^T) (A (sum_i G_i) A^T)^+
                   B shared    A = (sum_i A_i G_i) (sum_i G_i)^+
               and the classifier in the same way with the Gram matrix of features (RegMean)
    task end   the same between tasks, G_t over all clients:   dW = (sum_t B_t A_t G_t) (sum_t G_t)^+

With both factors free there are infinitely many solutions, so one trains at a time. Clients train a pair
alone on the pre-trained network, and never with those of earlier tasks. Of the Gram matrices of the pairs'
inputs only the diagonals are used, as in the release: D parameters travel for each block and not D^2.

Clients send how far they moved times G_i, and the server adds it up: the same solution, but what no client
has an input for stays what was shared, where the pseudo-inverse makes it 0. The merged update is a sum of
pairs with other factors A_t G_t (sum_s G_s)^+: the adapter's sum of products, without a dense matrix.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from fcljax.adapters.lora import LoraOptions, pair_of
from fcljax.errors import InputError
from fcljax.models.heads import Head
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.reports import inputs_of_pairs
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, RoundContext, Task, View

Gram = Float[Array, "*gram"]  # [D], its diagonal, or [D, D]


@dataclasses.dataclass(frozen=True)
class LoRMOptions:
    """Options of LoRM."""

    pair_gram: Literal["diagonal", "full"] = "diagonal"
    """Part of a LoRA pair's input Gram matrix that clients send."""
    head_gram: float = option(0.5, least=0.0, most=1.0)
    """Factor of the off-diagonal entries of the features' Gram matrix when the classifier
    is merged."""


_LORA = LoraOptions(lora_rank=16, lora_lr=3e-4, local_lora="current", global_lora="products")
PRESETS = {"intended": Preset(LoRMOptions(), RunConfig(lr=3e-4, batch_size=16, rounds=5), (_LORA,))}


class Grams(NamedTuple):
    """Sums over examples."""

    pairs: Float[Array, "blocks *gram"]
    """Of x x^T over all tokens, x what a block's pairs read; or its diagonal."""
    head: Float[Array, "D D"]
    """Of f f^T over features f."""


class Moved(NamedTuple):
    """What a client sends: how far it moved what trains, times the Gram matrix of what this acts on."""

    grams: Grams
    query: Float[Array, "blocks rank D"]
    """(A_i - A) G_i, or the transpose of (B_i - B) A G_i A^T."""
    value: Float[Array, "blocks rank D"]
    kernel: Float[Array, "D C"]
    """G_i (W_i - W)."""


class Merged(NamedTuple):
    """What the server keeps of all tasks."""

    query: Float[Array, "tasks blocks rank D"]
    """A_t G_t; 0 for tasks to come."""
    value: Float[Array, "tasks blocks rank D"]
    gram: Float[Array, "blocks *gram"]
    """sum_t G_t."""


def lorm(options: LoRMOptions, run: Run) -> Method:
    """LoRM as a method."""
    method = federate(
        run,
        merged_by_responses(linear_learner(run)),
        loss=cross_entropy_loss(),
        client_rules=(ClientRule("one_factor", project=freeze_other_factor),),
        server_rules=(match_responses(options, run), match_over_tasks(options, run)),
    )
    return method._replace(handover=handover)


def handover(round_context: RoundContext, server: ServerState) -> Lora:
    """What clients cache once a task is over, for counting: A of all tasks, which the end of a task merges
    anew, and B of the task itself."""
    of_task = pair_of(server.params.adapter, round_context.task.index)
    return server.params.adapter._replace(b_q=of_task.b_q, b_v=of_task.b_v)


def merged_by_responses(model: Learner) -> Learner:
    """The learner whose pair and classifier a server rule merges: only the classifier's bias is averaged."""

    def sends(trainable: Params, task: Task) -> Params:
        del task
        return trainable._replace(adapter=(), classifier=trainable.classifier._replace(kernel=()))

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        own = model.trainable(params, task)
        head = trainable.classifier._replace(kernel=own.classifier.kernel)
        return model.merge(params, task, trainable._replace(adapter=own.adapter, classifier=head))

    return model._replace(sends=sends, merge=merge)


# ---- the client --------------------------------------------------------------------------------------------


def trains_b(round_: Array) -> Bool[Array, ""]:
    """B trains in the rounds 0, 2, ... of a task, A in the others."""
    return round_ % 2 == 0


def freeze_other_factor(context: ClientContext, trainable: Params) -> Params:
    """The factor that does not train is put back after every step."""
    shared: Lora = context.payload.trainable.adapter
    b = trains_b(context.client.round)
    pairs = zip(("a_q", "b_q", "a_v", "b_v"), trainable.adapter, shared, strict=True)
    kept = [jnp.where(b == name.startswith("b"), new, old) for name, new, old in pairs]
    return trainable._replace(adapter=Lora(*kept))


def no_pair_grams(options: LoRMOptions, context: ClientContext) -> Float[Array, "blocks *gram"]:
    """Gram matrices of the pairs' inputs over no examples yet."""
    blocks, _, width = context.payload.trainable.adapter.a_q.shape
    return jnp.zeros((blocks, width) if options.pair_gram == "diagonal" else (blocks, width, width))


def pair_grams(options: LoRMOptions, step: ClientStep, blocks: int) -> Float[Array, "blocks *gram"]:
    """The same over a batch: of every token x, x x^T or its diagonal."""
    x = inputs_of_pairs(step, blocks)
    return exact_einsum("mnd,mnd->md" if options.pair_gram == "diagonal" else "mnd,mne->mde", x, x)


def responses(options: LoRMOptions, run: Run) -> Report:
    """The Gram matrices of the client's examples in a pass after training, and what `moved_by` makes of
    them."""
    width = run.network.width

    def init(context: ClientContext) -> Grams:
        return Grams(no_pair_grams(options, context), jnp.zeros((width, width)))

    def add(step: ClientStep, total: Grams) -> Grams:
        feature = jnp.where(step.batch.mask[:, None], step.output.feature, 0.0)
        head = off_diagonal(feature, options.head_gram)
        return Grams(total.pairs + pair_grams(options, step, len(total.pairs)), total.head + head)

    view = View(1, run.training.batch_size, shuffle=False)
    return Report("responses", init, add, moved_by, view, "sum", possible=possible_grams)


def task_grams(options: LoRMOptions, run: Run) -> Report:
    """The Gram matrices of the pairs' inputs under the merged pair, at a task's end."""

    def add(step: ClientStep, total: Array) -> Array:
        return total + pair_grams(options, step, len(total))

    def init(context: ClientContext) -> Array:
        return no_pair_grams(options, context)

    view = View(1, run.training.batch_size, shuffle=False)
    return Report("task_grams", init, add, view=view, merge="sum", possible=possible_squares)


def off_diagonal(feature: Float[Array, "batch D"], factor: float) -> Float[Array, "D D"]:
    """F^T F with a factor off its diagonal (RegMean)."""
    gram = exact_matmul(feature.T, feature)
    return factor * gram + (1 - factor) * jnp.diag(jnp.diag(gram))


def moved_by(end: ClientEnd, grams: Grams) -> Moved:
    """What the client sends after training."""
    sent: Params = end.context.payload.trainable
    b = trains_b(end.context.client.round)
    shared = sent.adapter
    own = end.trainable.adapter

    def times_gram(a: Array, a_i: Array, b_: Array, b_i: Array) -> Float[Array, "blocks rank D"]:
        of_b = exact_matmul(inner_gram(a, grams.pairs), (b_i - b_).mT)
        return jnp.where(b, of_b, apply_gram(a_i - a, grams.pairs))

    query = times_gram(shared.a_q, own.a_q, shared.b_q, own.b_q)
    value = times_gram(shared.a_v, own.a_v, shared.b_v, own.b_v)
    kernel = exact_matmul(grams.head, end.trainable.classifier.kernel - sent.classifier.kernel)
    return Moved(grams, query, value, kernel)


def possible_grams(context: ClientContext, sent: Moved) -> Bool[Array, ""]:
    """Sums of squares are not negative, and bound the products off the diagonal (Cauchy and Schwarz)."""
    root = jnp.sqrt(jnp.maximum(jnp.diagonal(sent.grams.head), 0)) * (1 + 1e-3)  # up to rounding
    bounded = jnp.all(jnp.abs(sent.grams.head) <= root[:, None] * root)
    return bounded & possible_squares(context, sent.grams.pairs)


def possible_squares(context: ClientContext, grams: Float[Array, "blocks *gram"]) -> Bool[Array, ""]:
    """Sums of squares are not negative."""
    del context
    return jnp.all((grams if grams.ndim == 2 else jnp.diagonal(grams, 0, 1, 2)) >= 0)


# ---- the server --------------------------------------------------------------------------------------------


def apply_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank D"]:
    """A G, with G [*m, D] or [*m, D, D]."""
    return a * gram[..., None, :] if gram.ndim < a.ndim else exact_matmul(a, gram)


def inner_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank rank"]:
    """A G A^T."""
    return exact_matmul(apply_gram(a, gram), a.mT)


def inverse_of(gram: Float[Array, "*m n n"]) -> Float[Array, "*m n n"]:
    """The pseudo-inverse of a symmetric matrix; eigenvalues within rounding of 0 count as 0."""
    return jnp.linalg.pinv(gram, rtol=1e-6, hermitian=True)


def divide_by_gram(a: Float[Array, "*m rank D"], gram: Gram) -> Float[Array, "*m rank D"]:
    """A G^+."""
    if gram.ndim == a.ndim:
        return exact_matmul(a, inverse_of(gram))
    positive = gram > 0
    return a * jnp.where(positive, 1 / jnp.where(positive, gram, 1.0), 0.0)[..., None, :]


def merge_factor(
    a: Float[Array, "blocks rank D"], b: Float[Array, "blocks D rank"], moved: Array, gram: Gram, b_: Array
) -> tuple[Array, Array]:
    """(A, B) after a round.

    Args:
      a, b: what clients were sent.
      moved: the sum over clients of what they sent, [blocks, rank, D].
      gram: the sum of G_i.
      b_: whether B trained.
    """
    new_b = b + exact_matmul(inverse_of(inner_gram(a, gram)), moved).mT
    return jnp.where(b_, a, a + divide_by_gram(moved, gram)), jnp.where(b_, new_b, b)


def match_responses(options: LoRMOptions, run: Run) -> ServerRule:
    """The pair and the classifier after a round (section 3)."""

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sums: Moved = round.reports["responses"]
        pair = pair_of(params.adapter, round.task.index)
        b = trains_b(round.index)
        a_q, b_q = merge_factor(pair.a_q, pair.b_q, sums.query, sums.grams.pairs, b)
        a_v, b_v = merge_factor(pair.a_v, pair.b_v, sums.value, sums.grams.pairs, b)
        head: Head = params.classifier
        kernel = head.kernel + exact_matmul(inverse_of(sums.grams.head), sums.kernel)
        adapter = round.learner.adapter.merge(params.adapter, round.task, Lora(a_q, b_q, a_v, b_v))
        return ServerUpdate(params._replace(adapter=adapter, classifier=head._replace(kernel=kernel)), state)

    return ServerRule("match", update, reports=(responses(options, run),))


def match_over_tasks(options: LoRMOptions, run: Run) -> ServerRule:
    """The pairs of all tasks so far as one update of the network, at a task's end (section 3)."""

    def init(params: Params, trainable: Params) -> Merged:
        del trainable
        tasks, blocks, _, width = params.adapter.a_q.shape
        if tasks != run.sizes.tasks:
            raise InputError("lora_pairs: 'one' leaves nothing to merge over tasks; nearest: 'task'")
        size = (width,) if options.pair_gram == "diagonal" else (width, width)
        nothing = jnp.zeros_like(params.adapter.a_q)
        return Merged(nothing, nothing, jnp.zeros((blocks, *size)))

    def update(round: ServerRound, params: Params, state: Merged) -> ServerUpdate:
        number = round.task.index
        gram = round.reports["task_grams"]
        pair: Lora = pair_of(params.adapter, number)
        query = state.query.at[number].set(apply_gram(pair.a_q, gram))
        value = state.value.at[number].set(apply_gram(pair.a_v, gram))
        state = Merged(query, value, state.gram + gram)
        a_q, a_v = (over_tasks(weighted, state.gram) for weighted in (query, value))
        past = jnp.arange(run.sizes.tasks)[:, None, None, None] <= number
        new = params.adapter._replace(
            a_q=jnp.where(past, a_q, params.adapter.a_q), a_v=jnp.where(past, a_v, params.adapter.a_v)
        )
        return ServerUpdate(params._replace(adapter=new), state)

    report = task_grams(options, run)
    return ServerRule("match_tasks", update, init, reports=(report,), when="task_end")


def over_tasks(weighted: Float[Array, "tasks blocks rank D"], gram: PyTree) -> Array:
    """A_t G_t (sum_s G_s)^+ of every task t; B_t with these is the merged update."""
    return jax.vmap(lambda a: divide_by_gram(a, gram))(weighted)
