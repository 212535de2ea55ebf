"""iCaRL+FL: replay (Rebuffi et al. 2017) in the form of TARGET's release (ICCV 2023).

    client    trains on its examples of the task and on as many exemplars of earlier tasks:
              L_ce over all seen classes + weight * L_distil, which distils from the
              model that the task began with                      (parts/task_start.py)
    task end  each client offers its examples to its replay buffer, which holds a uniform
              sample of all examples so far                       (parts/replay.py)
    server    averages, and sends that model too

The release has neither herding nor the nearest-mean classifier of the original. It draws
its buffer anew in every round from all old data, which a client that stores only the
buffer cannot do. Here each example has a random priority, and the buffer holds those of
the highest.
"""

import dataclasses

from fcljax.methods.lwf import RELEASED_RUN
from fcljax.options import option
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.replay import replay
from fcljax.parts.task_start import distil_task_start, send_start_of_task
from fcljax.settings import Preset
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class ICaRLOptions:
    """Options of iCaRL; weight and temperature are those of TARGET's release, which keeps
    2,000 images."""

    memory_size: int = 200
    """Number of examples in a client's memory."""
    distill_weight: float = 1.0
    """Weight of the distillation."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the distillation."""


# as TARGET's release trains it (specification C0 and C4), with LwF's settings
PRESETS = {"intended": Preset(ICaRLOptions(), *RELEASED_RUN)}


def icarl(options: ICaRLOptions, run: Run) -> Method:
    """Compose iCaRL+FL."""
    client_rules = (
        replay(options.memory_size, run.training.batch_size),
        distil_task_start(options.distill_weight, options.distill_temperature),
    )
    return federate(
        run,
        linear_learner(run),
        # replayed examples are of old classes, so all seen classes compete
        loss=cross_entropy_loss("seen"),
        client_rules=client_rules,
        server_rules=(send_start_of_task(),),
    )
