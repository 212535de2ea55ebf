"""LoRM: closed-form merging of LoRA (Salami et al., ICLR 2025, arXiv 2410.17961).

    round      all clients train one factor of the task's LoRA pair (B in the first round of
               a task, then A, B, ... in turn), with the other one frozen and the same for
               all, and the classifier W
    client i   sends its factor times the Gram matrix G_i = X_i X_i^T of the pair's inputs
    server     merges in least squares, so that the pair responds like the clients' pairs:
                   A shared    B = (sum_i B_i A G_i A^T) (A (sum_i G_i) A^T)^+
                   B shared    A = (sum_i A_i G_i) (sum_i G_i)^+
               and the classifier likewise, with the Gram matrix of features (RegMean)
    task end   the same between tasks, with G_t over all clients:
                   dW = (sum_t B_t A_t G_t) (sum_t G_t)^+

With both factors free there are infinitely many solutions, so one trains at a time.
Clients train the task's pair on the pre-trained network, without those of earlier tasks.
Of the Gram matrices of the pairs' inputs only the diagonals are used, as in the release:
D parameters per block in place of D^2.

Here clients send their change times G_i, and the server adds these up. The solution is
the same, except that directions in which no client has inputs stay as they were: in the
formulas above the pseudo-inverse makes them 0. The merged update is a sum of pairs whose
A is A_t G_t (sum_s G_s)^+, so no dense matrix is needed.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from fcljax.adapters.lora import LoraOptions, pair_of
from fcljax.errors import InputError
from fcljax.federated.claims import SUMS
from fcljax.models.heads import Head
from fcljax.models.products import exact_matmul
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.gram import (
    Gram,
    GramPart,
    apply_gram,
    can_move,
    divide_by_gram,
    feature_gram,
    gram_shape,
    inner_gram,
    inverse_of,
    largest_changes,
    least_squares,
    merged_by_responses,
    no_pair_grams,
    pair_grams,
    possible_features,
    possible_inputs,
    scale_off_diagonal,
)
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig, with_headtune, with_mini
from fcljax.types import ClientContext, Method, RoundContext, View


@dataclasses.dataclass(frozen=True)
class LoRMOptions:
    """Options of LoRM."""

    pair_gram: GramPart = "diagonal"
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


# ---- the client ------------------------------------------------------------------------


def trains_b(round_: Array) -> Bool[Array, ""]:
    """Return whether B trains: in the rounds 0, 2, ... of a task; A in the others."""
    return round_ % 2 == 0


def freeze_other_factor(context: ClientContext, trainable: Params) -> Params:
    """Put the factor that does not train back after every step."""
    shared: Lora = context.payload.trainable.adapter
    pair: Lora = trainable.adapter
    b_trains = trains_b(context.client.round)

    # which factor trains depends on the round, which is data: hence `where`
    def projected(trains: Array, trained: Array, shared: Array) -> Array:
        return jnp.where(trains, trained, shared)

    pair = Lora(
        a_q=projected(~b_trains, pair.a_q, shared.a_q),
        b_q=projected(b_trains, pair.b_q, shared.b_q),
        a_v=projected(~b_trains, pair.a_v, shared.a_v),
        b_v=projected(b_trains, pair.b_v, shared.b_v),
    )
    return trainable._replace(adapter=pair)


def responses(options: LoRMOptions, run: Run) -> Report:
    """Report `weighted_change`, weighted by Gram matrices after training."""
    width = run.network.width

    def init(context: ClientContext) -> Grams:
        return Grams(no_pair_grams(context, options.pair_gram), jnp.zeros((width, width)))

    def add(step: ClientStep, total: Grams) -> Grams:
        pairs = pair_grams(step, len(total.pairs), options.pair_gram)
        head = scale_off_diagonal(feature_gram(step), options.head_gram)
        return Grams(total.pairs + pairs, total.head + head)

    view = View(1, run.training.batch_size, shuffle=False)
    possible = functools.partial(possible_change, run)
    return Report("responses", init, add, weighted_change, view, "sum", possible=possible)


def task_grams(options: LoRMOptions, run: Run) -> Report:
    """Report the Gram matrices of the pairs' inputs under the merged pair, at a task's
    end."""

    def init(context: ClientContext) -> Array:
        return no_pair_grams(context, options.pair_gram)

    def add(step: ClientStep, total: Array) -> Array:
        return total + pair_grams(step, len(total), options.pair_gram)

    view = View(1, run.training.batch_size, shuffle=False)
    return Report("task_grams", init, add, view=view, merge="sum", possible=possible_inputs)


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
        # (B_i - B) A G_i A^T, transposed: both rounds then send the same shape
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
    grams_fit = possible_features(run, context, grams.head) & possible_inputs(context, grams.pairs)
    largest = largest_changes(run, context)
    kernel_fits = can_move(grams.head, change.kernel, largest.classifier)
    received: Lora = context.payload.trainable.adapter

    def factor_fits(a: Array, weighted: Array) -> Bool[Array, ""]:
        b_fits = can_move(inner_gram(a, grams.pairs), weighted, largest.pair)
        # with a diagonal G the entries of (A_i - A) G have bounds of their own
        if grams.pairs.ndim == 2:
            a_fits = jnp.all(jnp.abs(weighted) <= (1 + SUMS) * largest.pair * grams.pairs[:, None])
        else:
            a_fits = can_move(grams.pairs, weighted.mT, largest.pair)
        return jnp.where(trains_b(context.client.round), b_fits, a_fits)

    pairs_fit = factor_fits(received.a_q, change.query) & factor_fits(received.a_v, change.value)
    return grams_fit & kernel_fits & pairs_fit


# ---- the server ------------------------------------------------------------------------


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
    # B shared: A + (sum_i (A_i - A) G_i) (sum_i G_i)^+
    new_a = a + divide_by_gram(change, gram)
    # A shared: B + (sum_i (B_i - B) A G_i A^T) (A (sum_i G_i) A^T)^+
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
        head = head._replace(kernel=least_squares(head.kernel, grams.head, change.kernel))
        return ServerUpdate(params._replace(adapter=adapter, classifier=head), state)

    return ServerRule("match", update, reports=(responses(options, run),))


def match_over_tasks(options: LoRMOptions, run: Run) -> ServerRule:
    """Merge the pairs of all tasks so far to one update, at a task's end (section 3)."""

    def init(params: Params, _trainable: Params) -> Merged:
        tasks, blocks, _, width = params.adapter.a_q.shape
        # the end of a task merges the tasks' pairs, so each task needs its own
        if tasks != run.sizes.tasks:
            raise InputError("lora_pairs: 'one' leaves nothing to merge over tasks; nearest: 'task'")
        zeros = jnp.zeros_like(params.adapter.a_q)
        return Merged(zeros, zeros, jnp.zeros((blocks, *gram_shape(width, options.pair_gram))))

    def update(round: ServerRound, params: Params, state: Merged) -> ServerUpdate:
        task = round.task.index
        gram = round.reports["task_grams"]
        pairs: Lora = params.adapter
        pair: Lora = pair_of(pairs, task)
        # A_t as it was trained; the adapter's A_t are replaced below
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
