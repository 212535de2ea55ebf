"""LwF+FL: learning without forgetting (Li and Hoiem 2016), as in TARGET's release (ICCV
2023).

    client    trains on  L_ce + weight * L_distil  on its examples of the current task;
              L_distil keeps the logits of old classes near those of the model that the
              task began with                                     (parts/task_start.py)
    server    averages, and sends that model too

The release stores the model of the previous task at every client. A client that was not
sampled then does not have it, so here the server sends it in every round.
"""

import dataclasses

from fcljax.adapters.lora import LoraOptions
from fcljax.options import option
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.optimisers import SGD
from fcljax.parts.task_start import distil_task_start, send_start_of_task
from fcljax.settings import Preset, RunConfig, with_headtune
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class LwFOptions:
    """Options of LwF; the values are those of TARGET's release."""

    distill_weight: float = 3.0
    """Weight of the distillation."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the distillation."""


# how TARGET's release trains this baseline and iCaRL (specification C0), with one LoRA
# pair for all tasks
RELEASED_RUN = (
    RunConfig(optimiser=SGD(momentum=0.9, weight_decay=5e-4), lr=0.01),
    (LoraOptions(lora_pairs="one", lora_lr=0.01),),
)
PRESETS = with_headtune({"intended": Preset(LwFOptions(), *RELEASED_RUN)})


def lwf(options: LwFOptions, run: Run) -> Method:
    """Compose LwF+FL."""
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(),
        client_rules=(distil_task_start(options.distill_weight, options.distill_temperature),),
        server_rules=(send_start_of_task(),),
    )
