"""LwF+FL: learning without forgetting (Li and Hoiem 2016), as in TARGET's release (ICCV 2023).

    client    trains on   L_ce + weight * L_distil,   which keeps the logits of old classes, on its own images
              of the current task, near those of the model that it first got in the task (its teacher)
    server    averages

A client keeps its teacher, since later rounds send the newest model only.
"""

import dataclasses

from fcljax.options import option
from fcljax.parts.distil import distil_first_model
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class LwFOptions:
    """Options of LwF; the values are those of TARGET's release."""

    distill_weight: float = 3.0  # weight of the distillation
    distill_temperature: float = option(2.0, positive=True)  # temperature of student and teacher


def lwf(options: LwFOptions, run: Run) -> Method:
    """LwF+FL as a method."""
    rule = distil_first_model(options.distill_weight, options.distill_temperature)
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), client_rules=(rule,))
