"""FedLwF.MC (HePCo's baseline, specification A4): learning without forgetting as many binary problems
(Rebuffi et al. 2017), for clients that keep nothing.

The whole network trains, with a sigmoid for each class seen so far. The targets of old classes are what the
model says that the task began with; those of the task's classes are the labels.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fcljax.methods.fedavg import averaging
from fcljax.methods.hepco.hepco import PromptedOptions, scheduled
from fcljax.models.heads import reduce_rows
from fcljax.parts.federate import Run, Seen, Term
from fcljax.parts.learner import Learner, Objective
from fcljax.parts.task_start import start_of_task, teacher
from fcljax.types import Method


def fedlwf_mc(options: PromptedOptions, run: Run) -> Method:
    """FedLwF.MC as a method."""
    objective, steps = Objective("seen", weight=0.0), (start_of_task(),)
    return averaging(scheduled(run, options), objective, terms=(binary(),), steps=steps)


def binary() -> Term:
    """The whole loss: binary cross-entropy, old classes against the sigmoid of the teacher's logits."""

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del memory
        context, batch, task = seen.context, seen.batch, seen.context.task
        old = learner.forward(context.frozen, context.cached, teacher(context), batch, task, True).logits
        return binary_loss(seen.output.logits, old, batch.label, task.old, task.seen, batch.mask)

    return Term("lwf_mc", loss, reads=("start",))


def binary_loss(
    logits: Float[Array, "batch C"],
    teacher: Float[Array, "batch C"],
    label: Int[Array, " batch"],
    old: Bool[Array, " C"],
    seen: Bool[Array, " C"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """The mean over the rows in the mask and the seen classes."""
    known = jax.nn.one_hot(label, logits.shape[-1])
    target = jnp.where(old, jax.nn.sigmoid(jax.lax.stop_gradient(teacher)), known)
    each = jnp.where(seen, optax.sigmoid_binary_cross_entropy(logits, target), 0.0)
    return reduce_rows(jnp.sum(each, -1), mask, jnp.sum(mask) * jnp.sum(seen), "mean")
