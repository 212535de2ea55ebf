"""FedLwF.MC (HePCo's baseline, specification A4): learning without forgetting as binary problems (Rebuffi et
al. 2017), for clients that keep nothing.

    client    trains the whole network on one sigmoid per seen class: the targets of the task's classes are
              the labels, those of old classes what the model says that the task began with
    server    averages, and sends that model too    (parts/task_start.py)
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fcljax.methods.prompted import PromptedOptions, epoch_schedule
from fcljax.models.heads import reduce_rows
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import replaced_loss
from fcljax.parts.task_start import send_start_of_task, teacher
from fcljax.types import Method


def fedlwf_mc(options: PromptedOptions, run: Run) -> Method:
    """FedLwF.MC as a method."""
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss("seen"),
        client_rules=(binary_problems(),),
        server_rules=(send_start_of_task(),),
        learning_rate=epoch_schedule(options, run),
    )


def binary_problems() -> ClientRule:
    """The whole loss: binary cross-entropy, old classes against the sigmoid of the teacher's logits."""

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        batch = step.batch
        task = step.context.task
        old = step.forward(teacher(step.context)).logits
        return distilled_binary_loss(step.output.logits, old, batch.label, task.old, task.seen, batch.mask)

    return ClientRule("lwf_mc", loss)


def distilled_binary_loss(
    logits: Float[Array, "batch C"],
    teacher: Float[Array, "batch C"],
    label: Int[Array, " batch"],
    old: Bool[Array, " C"],
    seen: Bool[Array, " C"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """The mean over the examples in the mask and the seen classes."""
    known = jax.nn.one_hot(label, logits.shape[-1])
    target = jnp.where(old, jax.nn.sigmoid(jax.lax.stop_gradient(teacher)), known)
    each = jnp.where(seen, optax.sigmoid_binary_cross_entropy(logits, target), 0.0)
    return reduce_rows(jnp.sum(each, -1), mask, jnp.sum(mask) * jnp.sum(seen), "mean")
