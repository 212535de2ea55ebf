"""CLIP's zero-shot classifier (Radford et al. 2021): nothing trains and nothing is sent.

logit_c(x) = s cos(W_i f(x), t_c)        t_c: text feature of the prompt of class c
"""

import dataclasses

from fcljax.options import ClassPromptOptions
from fcljax.parts.class_names import named_learner, text_rows, text_side
from fcljax.parts.federate import Run, federate
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class ZeroShotOptions(ClassPromptOptions):
    """Options of the zero-shot classifier."""


def zero_shot(_options: ZeroShotOptions, run: Run) -> Method:
    """Compose the classifier; there are no rounds to play."""
    # refuses a network without a text side
    text_side(run, "zero-shot")
    return federate(run, named_learner(run, text_rows()))
