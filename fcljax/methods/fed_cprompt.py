"""Fed-CPrompt (Bagwe et al. 2023) as HePCo compares with it (specification A7): prompts of clients that are
kept near the server's newest model and away from that of the last task.

No code of the paper is public. This is the contrastive loss of HePCo's release, on logits and not on prompts,
with its margin and weights; HePCo's text says no more than that there is one.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fcljax.methods.fedavg import averaging
from fcljax.methods.hepco.hepco import CLIENT, PromptedOptions, scheduled
from fcljax.models.heads import masked_sum
from fcljax.parts.federate import Run, Seen, Term
from fcljax.parts.learner import Learner
from fcljax.parts.task_start import start_of_task, teacher
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class CPromptOptions(PromptedOptions):
    """Options of Fed-CPrompt; the values are those of HePCo's release."""

    contrast_near: float = 1e3
    """Weight of the distance to the newest global model."""
    contrast_far: float = 10.0
    """Weight of the distance to the model at the start of the task."""
    contrast_margin: float = 1.0
    """Margin by which the distance to the model at the start of the task is to be larger."""


PRESETS = {
    name: preset._replace(options=CPromptOptions(epoch_schedule=preset.options.epoch_schedule))
    for name, preset in CLIENT.items()
}


def fed_cprompt(options: CPromptOptions, run: Run) -> Method:
    """Fed-CPrompt as a method."""
    terms = (contrast(options.contrast_near, options.contrast_far, options.contrast_margin),)
    return averaging(scheduled(run, options), terms=terms, steps=(start_of_task(),))


def contrast(near: float, far: float, margin: float) -> Term:
    """Added to the cross-entropy from the second task on, when there is a model of an earlier one."""

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del memory
        context, batch = seen.context, seen.batch
        of = lambda part: (
            learner.forward(context.frozen, context.cached, part, batch, context.task, True).logits
        )
        own, newest, last = seen.output.logits, of(context.payload.part), of(teacher(context))
        value = contrastive_loss(own, newest, last, batch.mask, near, far, margin)
        return jnp.where(jnp.any(context.task.old), value, 0.0)

    return Term("contrast", loss, reads=("start",))


def contrastive_loss(
    logits: Float[Array, "batch C"],
    newest: Float[Array, "batch C"],
    last: Float[Array, "batch C"],
    mask: Bool[Array, " batch"],
    near: float,
    far: float,
    margin: float,
) -> Float[Array, ""]:
    """max(sum over the rows of near ||z - z_newest||^2 - far ||z - z_last||^2, plus the margin, 0), over the
    logits of all classes."""
    distance = lambda other: jnp.sum((logits - other) ** 2, axis=-1)
    return jnp.maximum(masked_sum(near * distance(newest) - far * distance(last), mask) + margin, 0.0)
