"""FedLwF.MC (a baseline of HePCo): learning without forgetting as binary problems
(Rebuffi et al. 2017), for clients without a state.

    client    trains the whole network on one sigmoid per seen class. Targets are labels for
              the task's classes, and for old classes the probabilities of the model that
              the task began with
    server    averages, and sends that model too                  (parts/task_start.py)
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fcljax.methods.prompted import WHOLE
from fcljax.models.heads import reduce_rows
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import replaced_loss
from fcljax.parts.task_start import send_start_of_task, teacher
from fcljax.settings import NoOptions, with_mini
from fcljax.types import Method

# mini: the loss is a mean over all seen classes, of which one is the example's, so the
# classifier needs a larger learning rate
PRESETS = with_mini(WHOLE, lr=0.1, full_lr=1e-4)


def fedlwf_mc(_options: NoOptions, run: Run) -> Method:
    """Compose FedLwF.MC."""
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss("seen"),
        client_rules=(binary_problems(),),
        server_rules=(send_start_of_task(),),
    )


def binary_problems() -> ClientRule:
    """Add the whole loss, `distilled_binary_loss`, with the model that the task began with."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        batch = step.batch
        task = step.context.task
        logits = step.output.logits
        teacher_logits = step.forward(teacher(step.context)).logits
        return distilled_binary_loss(logits, teacher_logits, batch.label, task.old, task.seen, batch.mask)

    return ClientRule("lwf_mc", loss)


def distilled_binary_loss(
    logits: Float[Array, "batch C"],
    teacher: Float[Array, "batch C"],
    label: Int[Array, " batch"],
    old: Bool[Array, " C"],
    seen: Bool[Array, " C"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """Return the mean binary cross-entropy over the examples in the mask and the seen classes.

    Args:
      logits: of the client's model.
      teacher: logits of the model that the task began with; they get no gradient.
      label: targets of classes that are not old.
      old: classes whose targets are the teacher's sigmoids.
      seen: classes that count.
      mask: examples that count.
    """
    one_hot = jax.nn.one_hot(label, logits.shape[-1])
    # current examples are of no old class, so old columns of the one-hot labels are 0
    target = jnp.where(old, jax.nn.sigmoid(jax.lax.stop_gradient(teacher)), one_hot)
    loss = jnp.where(seen, optax.sigmoid_binary_cross_entropy(logits, target), 0.0)
    return reduce_rows(jnp.sum(loss, -1), mask, jnp.sum(mask) * jnp.sum(seen), "mean")
