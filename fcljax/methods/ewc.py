"""EWC+FL: elastic weight consolidation (Kirkpatrick et al. 2017), after TARGET's release (ICCV 2023).

    client    trains on   L_ce + lambda / 2 sum_i F_i (w_i - w*_i)^2                             (eq. 3)
    task end  each client measures F, the diagonal of the Fisher information, on its own N examples under the
              global model:   F_i = 1/N sum_n (d log p(y_n | x_n, w) / d w_i)^2
              averages it with that of earlier tasks, and keeps the model as w*
    server    averages

The penalty acts on parameters that train in every task. Those of which each task has its own, such as
CODA-Prompt's components, are frozen when the task is over and cannot be lost: a new task's are free.

The release measures F and takes w* after every local training, under the client's own model
(`fisher_measured` = round). It squares the gradient of a batch's mean loss (`fisher_gradients` = batches), so
that the batch size decides how large F is. It evaluates the penalty on the global network and not on the
weights that train, so that it has no gradient; here it acts on the latter.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.models.heads import cross_entropy
from fcljax.options import option
from fcljax.parts.client import ClientPass, ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Learner, Params, cross_entropy_loss, matching
from fcljax.parts.optimisers import SGD
from fcljax.settings import Preset, RunConfig
from fcljax.types import Batch, ClientContext, Method, View


@dataclasses.dataclass(frozen=True)
class EWCOptions:
    """Options of EWC; the values are those of TARGET's release."""

    ewc_weight: float = 1000.0
    """Weight lambda of the elastic penalty; lambda / 2 multiplies the squares."""
    fisher_limit: float = option(1e-4, positive=True)
    """Upper bound on the entries of a task's Fisher information."""
    fisher_measured: Literal["task", "round"] = "task"
    """When clients measure the Fisher information and set the anchor. task: at a task's
    end, with the global model and the task's classes; round: after every local training,
    with their own model and all seen classes."""
    fisher_gradients: Literal["examples", "batches"] = "examples"
    """Gradients that the Fisher information squares: those of each example, or of a
    batch's mean loss."""


# how TARGET's release trains this baseline (specification C0), with one LoRA pair for all tasks
_RUN = RunConfig(optimiser=SGD(momentum=0.9), lr=0.01), (LoraOptions(lora_pairs="one", lora_lr=0.01),)
PRESETS = {
    "intended": Preset(EWCOptions(), *_RUN),
    "released": Preset(EWCOptions(fisher_measured="round", fisher_gradients="batches"), *_RUN),
}


class Anchor(NamedTuple):
    """What a client knows of the tasks that it had examples of, without what `Learner.lasting` leaves out."""

    trainable: Params
    """w*: the parameters after the last of them, or after the client's last round."""
    fisher: Params
    """F: how much each parameter matters; 0 before it is measured."""
    known: Bool[Array, ""]
    """Whether it was measured."""


class Measuring(NamedTuple):
    """A client that measures a new Fisher information."""

    anchor: Anchor
    """The one so far."""
    squares: Params
    """Sums of squared gradients."""
    batches: Float[Array, ""]
    """Number of squared gradients: of batches of one example, or of whole batches as in the release."""


def ewc(options: EWCOptions, run: Run) -> Method:
    """EWC+FL as a method."""
    model = linear_learner(run)
    rule = elastic(options, model, run.training.batch_size)
    return federate(run, model, loss=cross_entropy_loss(), client_rules=(rule,))


def elastic(options: EWCOptions, learner: Learner, batch_size: int) -> ClientRule:
    """lambda / 2 sum F (w - w*)^2 (Kirkpatrick et al. 2017, eq. 3), from the second task on.

    Args:
      options: lambda, the limit of F, and how F is measured.
      learner: says which parameters train in every task.
      batch_size: of the pass that measures F; it does not matter unless `fisher_gradients` is batches.
    """
    every_round = options.fisher_measured == "round"
    square = (
        add_squared_gradients if options.fisher_gradients == "examples" else add_squared_gradient_of_batch
    )

    def penalty(step: ClientStep, anchor: Anchor) -> Float[Array, ""]:
        def pull(fisher: Array, now: Array, then: Array) -> Array:
            return jnp.sum(fisher * (now - then) ** 2)

        now = matching(step.trainable, anchor.fisher)
        pulls = jax.tree.leaves(jax.tree.map(pull, anchor.fisher, now, anchor.trainable))
        later = jnp.any(step.context.task.old)
        return jnp.where(later, options.ewc_weight / 2 * sum(pulls, jnp.zeros(())), 0.0)

    def penalty_in_round(step: ClientStep, measuring: Measuring) -> Float[Array, ""]:
        return penalty(step, measuring.anchor)

    def no_anchor(key: PRNGKeyArray, trainable: Params) -> Anchor:
        del key
        lasting = learner.lasting(trainable)
        return Anchor(lasting, jax.tree.map(jnp.zeros_like, lasting), jnp.bool_(False))

    def measure(step: ClientStep, found: Measuring) -> Measuring:
        task = step.context.task
        return square(step, found, task.seen if every_round else task.current)

    def keep(context: ClientContext, found: Measuring, trainable: Params, anchor: Anchor) -> Anchor:
        def mean(squares: Array) -> Array:
            return jnp.minimum(squares / jnp.maximum(found.batches, 1), options.fisher_limit)

        fisher = jax.tree.map(mean, found.squares)
        return consolidate(context, anchor, trainable, fisher, new_rows_whole=every_round)

    if every_round:
        after = ClientPass("after_training", View(1, batch_size), measure)
        return ClientRule("ewc", penalty_in_round, no_anchor, nothing_measured, (after,), keep)
    view = View(1, batch_size, shuffle=False, augment=False)
    at_end = ClientPass("task_end", view, measure, nothing_measured, keep)
    return ClientRule("ewc", penalty, no_anchor, passes=(at_end,))


def nothing_measured(context: ClientContext, anchor: Anchor, key: PRNGKeyArray) -> Measuring:
    """Before the first batch."""
    del context, key
    return Measuring(anchor, jax.tree.map(jnp.zeros_like, anchor.fisher), jnp.zeros(()))


# ---- squared gradients -------------------------------------------------------------------------------------

GRADIENTS = 2**24
"""Parameters of all gradients that a device holds at a time (64 MiB in float32), if one has not more."""


def add_squared_gradients(step: ClientStep, found: Measuring, classes: Bool[Array, " C"]) -> Measuring:
    """Adds the squared gradients of the examples of a batch, in microbatches that bound the memory.

    Args:
      step: a batch of a client.
      found: the sums so far.
      classes: those that compete.
    """
    start = nothing_measured(step.context, found.anchor, step.key)

    def of_one(batch: Batch) -> Measuring:
        return add_squared_gradient(step._replace(batch=batch), start, classes)

    def add_piece(total: Measuring, batches: Batch) -> tuple[Measuring, None]:
        each = jax.vmap(of_one)(batches)
        squares = jax.tree.map(lambda so_far, new: so_far + jnp.sum(new, axis=0), total.squares, each.squares)
        return Measuring(total.anchor, squares, total.batches + jnp.sum(each.batches)), None

    size = sum(x.size for x in jax.tree.leaves(step.trainable))
    return jax.lax.scan(add_piece, found, microbatches(step.batch, max(1, GRADIENTS // max(1, size))))[0]


def microbatches(batch: Batch, most: int) -> Batch:
    """A batch as batches of one example.

    Args:
      batch: leaves [B, ...].
      most: examples of a microbatch at most.

    Returns:
      Leaves [microbatches, M, 1, ...] with M <= most; the last microbatch is filled up with padding.
    """
    count = len(batch.mask)
    pieces = -(-count // most)
    each = -(-count // pieces)

    def divided(x: Array) -> Array:
        filled = jnp.pad(x, [(0, pieces * each - count)] + [(0, 0)] * (x.ndim - 1))
        return filled.reshape(pieces, each, 1, *x.shape[1:])

    return jax.tree.map(divided, batch._replace(keys=None))  # nothing is drawn in a pass


def add_squared_gradient(
    step: ClientStep, found: Measuring, classes: Bool[Array, " C"] | None = None
) -> Measuring:
    """Adds the squared gradient of each example of a batch: g_n^2, g_n = d log p(y_n | x_n, w) / d w.

    Each gradient costs a backward pass over the whole batch; `add_squared_gradients` passes batches of one.

    Args:
      step: a batch of a client.
      found: the sums so far.
      classes: those that compete; None: the task's.
    """
    batch = step.batch
    competing = step.context.task.current if classes is None else classes

    def loss(trainable: Params, chosen: Bool[Array, " B"]) -> Float[Array, ""]:
        return cross_entropy(step.forward(trainable).logits, batch.label, competing, chosen)

    one_by_one = jnp.diag(batch.mask)  # row n chooses example n; padding chooses none
    gradients = jax.vmap(jax.grad(loss), (None, 0))(step.trainable, one_by_one)

    def add(total: Array, gradient: Array) -> Array:
        return total + jnp.sum(gradient**2, axis=0)

    squares = jax.tree.map(add, found.squares, matching(gradients, found.squares))
    return Measuring(found.anchor, squares, found.batches + jnp.sum(batch.mask))


def add_squared_gradient_of_batch(
    step: ClientStep, found: Measuring, classes: Bool[Array, " C"]
) -> Measuring:
    """Adds the squared gradient of a batch's mean loss, as in training, which is what the release does."""

    def loss(trainable: Params) -> Float[Array, ""]:
        logits = step.forward(trainable, train=True).logits
        return cross_entropy(logits, step.batch.label, classes, step.batch.mask)

    gradient = matching(jax.grad(loss)(step.trainable), found.squares)
    squares = jax.tree.map(lambda total, g: total + g**2, found.squares, gradient)
    return Measuring(found.anchor, squares, found.batches + 1)


# ---- the anchor --------------------------------------------------------------------------------------------


def consolidate(
    context: ClientContext, anchor: Anchor, trainable: Params, fisher: Params, new_rows_whole: bool = False
) -> Anchor:
    """The anchor after a measurement: w* <- w and F <- a F + (1 - a) F_new, a the share of old classes in the
    task.

    A client whose first task it is has nothing old to keep; for it a = 0.

    Args:
      context: of the client.
      anchor: the one so far.
      trainable: w.
      fisher: F_new.
      new_rows_whole: as in TARGET's release, which mixes the rows of classes that F had before: rows of the
        classifier that were never measured take F_new as it is.
    """
    old = jnp.sum(context.task.old)
    seen = jnp.sum(context.task.seen)
    share = jnp.where(anchor.known, old / seen, 0.0)
    mixed = jax.tree.map(lambda f, new: share * f + (1 - share) * new, anchor.fisher, fisher)

    def new_classes_whole(before: Array, after: Array, new: Array) -> Array:
        """Leaves [..., C]."""
        measured = jnp.any(before > 0, axis=tuple(range(before.ndim - 1)))
        return jnp.where(measured, after, new)

    if new_rows_whole:
        parts = anchor.fisher.classifier, mixed.classifier, fisher.classifier
        mixed = mixed._replace(classifier=jax.tree.map(new_classes_whole, *parts))
    return Anchor(matching(trainable, mixed), mixed, jnp.bool_(True))
