"""EWC+FL: elastic weight consolidation (Kirkpatrick et al. 2017), after TARGET's
release (ICCV 2023).

    client    trains on  L_ce + lambda / 2 sum_i F_i (w_i - w*_i)^2                  (eq. 3)
    task end  each client measures F, the diagonal of the Fisher information, on its N
              examples under the global model:
                  F_i = 1/N sum_n (d log p(y_n | x_n, w) / d w_i)^2
              averages it with that of earlier tasks, and keeps the model as w*
    server    averages

The penalty acts on parameters that all tasks share. Parameters that belong to one task,
such as CODA-Prompt's components, are frozen when the task is over and need none.

The release measures F and takes w* after every local training, under the client's model
(`fisher_measured` = round). It squares the gradient of a batch's mean loss
(`fisher_gradients` = batches), so F depends on the batch size. It evaluates the penalty
on the global network and not on the weights that train, so the penalty has no gradient;
here it acts on the weights that train.
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
from fcljax.settings import Preset, RunConfig, with_headtune, with_mini
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


# how TARGET's release trains this baseline (specification C0), with one LoRA pair for
# all tasks
_RUN = RunConfig(optimiser=SGD(momentum=0.9), lr=0.01)
_LORA = LoraOptions(lora_pairs="one", lora_lr=0.01)
_RELEASED = EWCOptions(fisher_measured="round", fisher_gradients="batches")
PRESETS = with_headtune(
    with_mini(
        {
            "intended": Preset(EWCOptions(), _RUN, (_LORA,)),
            "released": Preset(_RELEASED, _RUN, (_LORA,)),
        },
        ewc_weight=3e4,
    )
)


class Anchor(NamedTuple):
    """A client's state of earlier tasks: parameters of `Learner.lasting` only."""

    trainable: Params
    """w*: the parameters after the client's latest task, or after its latest round."""
    fisher: Params
    """F: how much each parameter matters; 0 before it is measured."""
    measured: Bool[Array, ""]
    """Whether F was measured."""


class Measuring(NamedTuple):
    """A client's sums while it measures a new Fisher information."""

    anchor: Anchor
    """That of earlier tasks."""
    squares: Params
    """Sums of squared gradients."""
    batches: Float[Array, ""]
    """Number of squared gradients: of batches of one example, or of whole batches as in
    the release."""


def ewc(options: EWCOptions, run: Run) -> Method:
    """Compose EWC+FL."""
    model = linear_learner(run)
    rule = elastic(options, model, run.training.batch_size)
    return federate(run, model, loss=cross_entropy_loss(), client_rules=(rule,))


def elastic(options: EWCOptions, learner: Learner, batch_size: int) -> ClientRule:
    """Add lambda / 2 sum F (w - w*)^2 from the second task on (EWC, eq. 3).

    Args:
      options: lambda, the limit of F, and how F is measured.
      learner: says which parameters train in every task.
      batch_size: of the pass that measures F; it does not matter unless
        `fisher_gradients` is batches.
    """
    every_round = options.fisher_measured == "round"
    add_squares = add_squared_gradients
    if options.fisher_gradients == "batches":
        add_squares = add_squared_gradient_of_batch

    def penalty(step: ClientStep, anchor: Anchor) -> Float[Array, ""]:
        def of_leaf(fisher: Array, w: Array, w_star: Array) -> Array:
            return jnp.sum(fisher * (w - w_star) ** 2)

        lasting = matching(step.trainable, anchor.fisher)
        by_leaf = jax.tree.map(of_leaf, anchor.fisher, lasting, anchor.trainable)
        value = options.ewc_weight / 2 * sum(jax.tree.leaves(by_leaf), jnp.zeros(()))
        # in the first task there is nothing to protect yet
        has_old_classes = jnp.any(step.context.task.old)
        return jnp.where(has_old_classes, value, 0.0)

    def penalty_in_round(step: ClientStep, measuring: Measuring) -> Float[Array, ""]:
        return penalty(step, measuring.anchor)

    def no_anchor(_key: PRNGKeyArray, trainable: Params) -> Anchor:
        # parameters of one task are frozen afterwards and need no penalty
        lasting = learner.lasting(trainable)
        return Anchor(lasting, jax.tree.map(jnp.zeros_like, lasting), jnp.bool_(False))

    def measure(step: ClientStep, measuring: Measuring) -> Measuring:
        classes = step.context.task.current
        if every_round:
            classes = step.context.task.seen
        return add_squares(step, measuring, classes)

    def new_anchor(
        context: ClientContext,
        measuring: Measuring,
        trainable: Params,
        anchor: Anchor,
    ) -> Anchor:
        def mean(squares: Array) -> Array:
            # bounded, as in the release: a few examples with huge gradients would freeze
            # the model
            return jnp.minimum(squares / jnp.maximum(measuring.batches, 1), options.fisher_limit)

        fisher = jax.tree.map(mean, measuring.squares)
        return consolidate(context, anchor, trainable, fisher, new_rows_whole=every_round)

    if every_round:
        measuring_pass = ClientPass("after_training", View(1, batch_size), measure)
        return ClientRule("ewc", penalty_in_round, no_anchor, start_measuring, (measuring_pass,), new_anchor)
    view = View(1, batch_size, shuffle=False, augment=False)
    at_end = ClientPass("task_end", view, measure, start_measuring, new_anchor)
    return ClientRule("ewc", penalty, no_anchor, passes=(at_end,))


def start_measuring(
    _context: ClientContext,
    anchor: Anchor,
    _key: PRNGKeyArray,
) -> Measuring:
    """Return the sums before the first batch."""
    return Measuring(anchor, jax.tree.map(jnp.zeros_like, anchor.fisher), jnp.zeros(()))


# ---- squared gradients -----------------------------------------------------------------

GRADIENT_SCALARS = 2**24
"""Scalars of the gradients that are in memory at a time (64 MiB in float32); a single
gradient may have more."""


def add_squared_gradients(
    step: ClientStep,
    measuring: Measuring,
    classes: Bool[Array, " C"],
) -> Measuring:
    """Add the squared gradients of a batch's examples, in microbatches.

    Args:
      step: a batch of a client.
      measuring: the sums so far.
      classes: those that compete.
    """
    # vmap gives each example sums of its own, which start at 0 and are added up below
    zero = start_measuring(step.context, measuring.anchor, step.key)

    def of_example(batch: Batch) -> Measuring:
        return add_squared_gradient(step._replace(batch=batch), zero, classes)

    def add_microbatch(total: Measuring, batches: Batch) -> tuple[Measuring, None]:
        by_example = jax.vmap(of_example)(batches)

        def add(total: Array, squares: Array) -> Array:
            return total + jnp.sum(squares, axis=0)

        squares = jax.tree.map(add, total.squares, by_example.squares)
        count = total.batches + jnp.sum(by_example.batches)
        return Measuring(total.anchor, squares, count), None

    # a microbatch of M examples needs M gradients at a time
    size = sum(leaf.size for leaf in jax.tree.leaves(step.trainable))
    batches = microbatches(step.batch, max(1, GRADIENT_SCALARS // max(1, size)))
    total, _ = jax.lax.scan(add_microbatch, measuring, batches)
    return total


def microbatches(batch: Batch, most: int) -> Batch:
    """Divide a batch into microbatches of batches of one example.

    Args:
      batch: leaves [B, ...].
      most: examples of a microbatch at most.

    Returns:
      Leaves [microbatches, M, 1, ...] with M <= most; the last microbatch is filled up
        with padding.
    """
    count = len(batch.mask)
    # equal microbatches have the least padding
    pieces = -(-count // most)
    size = -(-count // pieces)

    def divide(leaf: Array) -> Array:
        padding = [(0, pieces * size - count)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(pieces, size, 1, *leaf.shape[1:])

    # keys are for draws of the forward pass, of which evaluation has none
    return jax.tree.map(divide, batch._replace(keys=None))


def add_squared_gradient(
    step: ClientStep, measuring: Measuring, classes: Bool[Array, " C"] | None = None
) -> Measuring:
    """Add g_n^2 of each example of a batch, g_n = d log p(y_n | x_n, w) / d w.

    Each gradient costs a backward pass over the whole batch, so `add_squared_gradients`
    passes batches of one example.

    Args:
      step: a batch of a client.
      measuring: the sums so far.
      classes: those that compete; None: the task's.
    """
    batch = step.batch
    if classes is None:
        classes = step.context.task.current

    def loss(trainable: Params, mask: Bool[Array, " B"]) -> Float[Array, ""]:
        return cross_entropy(step.forward(trainable).logits, batch.label, classes, mask)

    # a gradient for each example, since the square of a mean is not the mean of squares.
    # Row n of the masks has only example n, or none if n is padding
    masks = jnp.diag(batch.mask)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(step.trainable, masks)

    def add(total: Array, gradient: Array) -> Array:
        return total + jnp.sum(gradient**2, axis=0)

    # without the parameters of one task, which have no sums
    lasting = matching(gradients, measuring.squares)
    squares = jax.tree.map(add, measuring.squares, lasting)
    return Measuring(measuring.anchor, squares, measuring.batches + jnp.sum(batch.mask))


def add_squared_gradient_of_batch(
    step: ClientStep, measuring: Measuring, classes: Bool[Array, " C"]
) -> Measuring:
    """Add the squared gradient of a batch's mean loss, as in training (release)."""

    def loss(trainable: Params) -> Float[Array, ""]:
        # in training mode, with the statistics of the batch, as the release's gradients
        logits = step.forward(trainable, train=True).logits
        return cross_entropy(logits, step.batch.label, classes, step.batch.mask)

    gradient = matching(jax.grad(loss)(step.trainable), measuring.squares)
    squares = jax.tree.map(lambda total, g: total + g**2, measuring.squares, gradient)
    return Measuring(measuring.anchor, squares, measuring.batches + 1)


# ---- the anchor ------------------------------------------------------------------------


def consolidate(
    context: ClientContext,
    anchor: Anchor,
    trainable: Params,
    fisher: Params,
    new_rows_whole: bool = False,
) -> Anchor:
    """Return the anchor after a measurement: w* <- w and F <- a F + (1 - a) F_new.

    a is the share of old classes among those seen; it is 0 in a client's first task.

    Args:
      context: of the client.
      anchor: the one of earlier tasks.
      trainable: w.
      fisher: F_new.
      new_rows_whole: whether rows of the classifier that were never measured take F_new
        as it is (TARGET's release).
    """
    # F_new is a mean over examples of the new classes, so F is weighted by classes
    old_share = jnp.sum(context.task.old) / jnp.sum(context.task.seen)
    a = jnp.where(anchor.measured, old_share, 0.0)
    mixed = jax.tree.map(lambda f, new: a * f + (1 - a) * new, anchor.fisher, fisher)

    def keep_new_classes(
        old: Float[Array, "*rows C"],
        mixed: Float[Array, "*rows C"],
        new: Float[Array, "*rows C"],
    ) -> Float[Array, "*rows C"]:
        # only classes that have trained have an F above 0
        was_measured = jnp.any(old > 0, axis=tuple(range(old.ndim - 1)))
        return jnp.where(was_measured, mixed, new)

    if new_rows_whole:
        classifier = jax.tree.map(
            keep_new_classes, anchor.fisher.classifier, mixed.classifier, fisher.classifier
        )
        mixed = mixed._replace(classifier=classifier)
    return Anchor(matching(trainable, mixed), mixed, jnp.bool_(True))
