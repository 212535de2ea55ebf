"""Fed-CPrompt (Bagwe et al. 2023) as HePCo compares with it.

    client    trains prompts on
                  L_ce + max(near ||z - z_newest||^2 - far ||z - z_start||^2 + margin, 0)
              which keeps its logits z near those of the newest global model and away from
              those of the model that the task began with
    server    averages, and sends that model too                  (parts/task_start.py)

No code of the paper is public. This is the contrastive loss of HePCo's release, on logits
and not on prompts, with its margin and weights; HePCo's text only says that there is one.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fcljax.methods.prompted import CLIENT
from fcljax.models.heads import masked_sum
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.task_start import send_start_of_task, teacher
from fcljax.settings import with_mini
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class CPromptOptions:
    """Options of Fed-CPrompt; the values are those of HePCo's release."""

    contrast_near: float = 1e3
    """Weight of the distance to the latest global model."""
    contrast_far: float = 10.0
    """Weight of the distance to the model at the start of the task."""
    contrast_margin: float = 1.0
    """Margin by which the distance to the model at the start of the task must be larger."""


# mini: at the release's weights, a million times these, clients learn nothing of a new task
PRESETS = with_mini(
    {name: preset._replace(options=CPromptOptions()) for name, preset in CLIENT.items()},
    lr=1e-2,
    contrast_near=1e-3,
    contrast_far=1e-5,
)


def fed_cprompt(options: CPromptOptions, run: Run) -> Method:
    """Compose Fed-CPrompt."""
    rule = contrast(options.contrast_near, options.contrast_far, options.contrast_margin)
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(),
        client_rules=(rule,),
        server_rules=(send_start_of_task(),),
    )


def contrast(near: float, far: float, margin: float) -> ClientRule:
    """Add the contrastive loss from the second task on, when there is an earlier model."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        context = step.context
        logits = step.output.logits
        # the two models are constants: they are not functions of what trains
        newest = step.forward(context.payload.trainable).logits
        start = step.forward(teacher(context)).logits
        value = contrastive_loss(logits, newest, start, step.batch.mask, near, far, margin)
        return jnp.where(jnp.any(context.task.old), value, 0.0)

    return ClientRule("contrast", loss)


def contrastive_loss(
    logits: Float[Array, "batch C"],
    newest: Float[Array, "batch C"],
    start: Float[Array, "batch C"],
    mask: Bool[Array, " batch"],
    near: float,
    far: float,
    margin: float,
) -> Float[Array, ""]:
    """Return max(sum_i near ||z - z_newest||^2 - far ||z - z_start||^2 + margin, 0).

    The sum runs over the examples i in the mask; z are the logits of all classes.
    """

    def distance(global_logits: Float[Array, "batch C"]) -> Float[Array, " batch"]:
        return jnp.sum((logits - global_logits) ** 2, axis=-1)

    # the maximum of the sum, not the sum of maxima, as in HePCo's release
    difference = near * distance(newest) - far * distance(start)
    return jnp.maximum(masked_sum(difference, mask) + margin, 0.0)
