"""EWC+FL: elastic weight consolidation (Kirkpatrick et al. 2017), after TARGET's release (ICCV 2023).

    client    trains on   L_ce + lambda / 2 sum_i F_i (w_i - w*_i)^2                             (eq. 3)
    task end  each client measures F, the Fisher information, on its own examples under the global model,
              averages it with that of earlier tasks, and keeps the model as w*
    server    averages

The release measures F and takes w* after every local training, under the client's own model
(`fisher_measured` = round). It evaluates the penalty on the global network and not on the weights that train,
so that it has no gradient; here it acts on the latter.
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
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, View


@dataclasses.dataclass(frozen=True)
class EWCOptions:
    """Options of EWC; the values are those of TARGET's release."""

    ewc_weight: float = 1000.0
    """Weight lambda of the elastic penalty, half of which weighs the squares."""
    fisher_limit: float = option(1e-4, positive=True)
    """Largest entry of a task's Fisher information."""
    fisher_measured: Literal["task", "round"] = "task"
    """When clients measure the Fisher information and take the anchor: at a task's end, under the global
    model and over the task's classes, or after every local training, under their own and over all seen."""


# how TARGET's release trains this baseline (specification C0), with one LoRA pair for all tasks
_RUN = RunConfig(optimiser="sgd", lr=0.01, momentum=0.9), (LoraOptions(lora_pairs="one", lora_lr=0.01),)
PRESETS = {
    "intended": Preset(EWCOptions(), *_RUN),
    "released": Preset(EWCOptions(fisher_measured="round"), *_RUN),
}


class Anchor(NamedTuple):
    """What a client knows of the tasks that it had examples of."""

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


def ewc(options: EWCOptions, run: Run) -> Method:
    """EWC+FL as a method."""
    rule = elastic(
        options.ewc_weight,
        options.fisher_limit,
        run.training.batch_size,
        every_round=options.fisher_measured == "round",
    )
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), client_rules=(rule,))


def elastic(weight: float, limit: float, batch_size: int, every_round: bool = False) -> ClientRule:
    """lambda / 2 sum F (w - w*)^2 (Kirkpatrick et al. 2017, eq. 3), from the second task on.

    Args:
      weight: lambda.
      limit: largest entry of a task's Fisher information.
      batch_size: of the pass that measures it.
      every_round: as in TARGET's release: measured after every local training, under the client's own model,
        on the training view and over all classes seen.
    """

    def penalty(step: ClientStep, anchor: Anchor) -> Float[Array, ""]:
        def pull(fisher: Array, now: Array, then: Array) -> Array:
            return jnp.sum(fisher * (now - then) ** 2)

        pulls = jax.tree.map(pull, anchor.fisher, step.trainable, anchor.trainable)
        later = jnp.any(step.context.task.old)
        return jnp.where(later, weight / 2 * sum(jax.tree.leaves(pulls)), 0.0)

    def penalty_in_round(step: ClientStep, measuring: Measuring) -> Float[Array, ""]:
        return penalty(step, measuring.anchor)

    def keep(context: ClientContext, found: Measuring, trainable: Params, anchor: Anchor) -> Anchor:
        def mean(squares: Array) -> Array:
            return jnp.minimum(squares / jnp.maximum(found.batches, 1), limit)

        return consolidate(context, anchor, trainable, jax.tree.map(mean, found.squares))

    if every_round:
        measure = ClientPass("after_training", View(1, batch_size), add_squared_gradient_of_seen)
        return ClientRule("ewc", penalty_in_round, no_anchor, nothing_measured, (measure,), keep)
    view = View(1, batch_size, shuffle=False, augment=False)
    measure = ClientPass("task_end", view, add_squared_gradient, nothing_measured, keep)
    return ClientRule("ewc", penalty, no_anchor, passes=(measure,))


def no_anchor(key: PRNGKeyArray, trainable: Params) -> Anchor:
    """Before the first task."""
    del key
    return Anchor(trainable, jax.tree.map(jnp.zeros_like, trainable), jnp.bool_(False))


def nothing_measured(context: ClientContext, anchor: Anchor, key: PRNGKeyArray) -> Measuring:
    """Before the first batch."""
    del context, key
    return Measuring(anchor, jax.tree.map(jnp.zeros_like, anchor.fisher), jnp.zeros(()))


def add_squared_gradient(step: ClientStep, found: Measuring) -> Measuring:
    """Adds the squared gradient of a batch over the task's classes."""
    return _measured(step, found, step.context.task.current)


def add_squared_gradient_of_seen(step: ClientStep, found: Measuring) -> Measuring:
    """Adds the squared gradient of a batch over all classes seen."""
    return _measured(step, found, step.context.task.seen)


def _measured(step: ClientStep, found: Measuring, classes: Bool[Array, " C"]) -> Measuring:
    def loss(trainable: Params) -> Float[Array, ""]:
        return cross_entropy(step.forward(trainable).logits, step.batch.label, classes, step.batch.mask)

    gradient = jax.grad(loss)(step.trainable)
    squares = jax.tree.map(lambda total, g: total + g**2, found.squares, gradient)
    return Measuring(found.anchor, squares, found.batches + 1)


def consolidate(context: ClientContext, anchor: Anchor, trainable: Params, fisher: Params) -> Anchor:
    """The anchor after a measurement: w* <- w and F <- a F + (1 - a) F_new, a the share of old classes in the
    task.

    A client whose first task it is has nothing old to keep; for it a = 0.
    """
    old, seen = jnp.sum(context.task.old), jnp.sum(context.task.seen)
    share = jnp.where(anchor.known, old / seen, 0.0)
    merged = jax.tree.map(lambda f, new: share * f + (1 - share) * new, anchor.fisher, fisher)
    return Anchor(trainable, merged, jnp.bool_(True))
