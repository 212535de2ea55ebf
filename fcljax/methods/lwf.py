"""LwF+FL: learning without forgetting (Li and Hoiem 2016), as in TARGET's release (ICCV 2023).

A client distils the logits of old classes, on its own images of the current task, from the global model as it
was when the client first took part in the task. It keeps this teacher, since at later rounds the server only
sends the newest model.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.methods.fedavg import averaging
from fcljax.models.heads import distillation
from fcljax.options import option
from fcljax.parts.federate import Run, Seen, Term
from fcljax.parts.learner import Learner, Model
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method


@dataclasses.dataclass(frozen=True)
class LwFOptions:
    """Options of LwF; the values are those of TARGET's release."""

    distill_weight: float = 3.0
    """Weight of the distillation."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the distillation."""


# how TARGET's release trains this baseline and iCaRL (specification C0), with one LoRA pair for all tasks
RELEASED_RUN = (
    RunConfig(optimiser="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4),
    (LoraOptions(lora_pairs="one", lora_lr=0.01),),
)
PRESETS = {"intended": Preset(LwFOptions(), *RELEASED_RUN)}


class Teacher(NamedTuple):
    """A client's teacher, and the task that it is for (-1: none yet)."""

    part: Model
    task: Int[Array, ""]


def lwf(options: LwFOptions, run: Run) -> Method:
    """LwF+FL as a method."""
    return averaging(run, terms=(distil(options.distill_weight, options.distill_temperature),))


def distil(weight: float, temperature: float) -> Term:
    """Distillation of old classes' logits from the model that the client first got in the task.

    Args:
      weight: of the loss.
      temperature: of student and teacher.
    """

    def loss(learner: Learner, seen: Seen, teacher: Teacher) -> Float[Array, ""]:
        context, batch = seen.context, seen.batch
        target = learner.forward(
            context.frozen, context.cached, teacher.part, batch, context.task, True
        ).logits
        return weight * distillation(seen.output.logits, target, context.task.old, batch.mask, temperature)

    return Term(
        "lwf",
        loss,
        init=lambda key, part: Teacher(part, jnp.int32(-1)),
        open=first_model_of_task,
        keep=lambda context, teacher, part, state: teacher,
    )


def first_model_of_task(context: ClientContext, state: Teacher, key: PRNGKeyArray) -> Teacher:
    """The teacher of the current task: a new one if the client's is of an earlier task."""
    del key
    stale = state.task != context.task.index
    pick = lambda new, old: jnp.where(stale, new, old)
    return Teacher(jax.tree.map(pick, context.payload.part, state.part), context.task.index)
