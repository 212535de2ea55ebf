"""iCaRL+FL: rehearsal (Rebuffi et al. 2017) in the form of TARGET's release (ICCV 2023).

A client remembers a uniform sample of the rows that it had in earlier tasks, trains on the current task and
on as many rows of this memory at a time, over all classes seen so far, and distils the old logits from the
global model as it was when the task began. Rows are offered to the memory when their task is over, so that
they take no places while they are still trained on. The release has neither herding nor the nearest-mean
classifier of the original, and draws its memory anew every round from all old data, which a client that may
only keep the memory cannot do: here every row has a random priority of its own, and the memory holds the rows
of the highest. What is kept are row numbers; the engine reads the images.
"""

import dataclasses

from fcljax.methods.fedavg import averaging
from fcljax.methods.lwf import RELEASED_RUN, distil
from fcljax.options import option
from fcljax.parts.federate import Run
from fcljax.parts.learner import Objective
from fcljax.parts.replay import replay
from fcljax.settings import Preset
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class ICaRLOptions:
    """Options of iCaRL; weight and temperature are those of TARGET's release, which keeps 2,000 images."""

    memory_size: int = 200
    """Examples in the memory of a client."""
    distill_weight: float = 1.0
    """Weight of the distillation."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the distillation."""


PRESETS = {"intended": Preset(ICaRLOptions(), *RELEASED_RUN)}


def icarl(options: ICaRLOptions, run: Run) -> Method:
    """iCaRL+FL as a method."""
    terms = (
        replay(options.memory_size, run.train.batch_size),
        distil(options.distill_weight, options.distill_temperature),
    )
    return averaging(run, Objective("seen"), terms=terms)
