"""PromptFL (Guo et al., IEEE TMC 2023, arXiv 2208.11625): CoOp (Zhou et al. 2022) in a
federation. CLIP stays frozen, and clients train context vectors that all classes share.

    prompt of class c    start, v_1 .. v_M, name of c, end
    client               trains v by cross-entropy over the task's classes of
                         s cos(W_i f(x), W_t text(prompt of c))
    server               averages v, weighted by numbers of examples

A task begins with the vectors of the one before it. Classes of later tasks are predicted
by their names behind the same vectors.
"""

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.models.clip import ClassTexts
from fcljax.options import ContextOptions
from fcljax.parts.class_names import InitClassifier, behind_context, named_learner, text_side
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.optimisers import SGD
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Method, TextTower

INIT_STD = 0.02  # standard deviation of the initial context vectors, as in CoOp


@dataclasses.dataclass(frozen=True)
class PromptFLOptions(ContextOptions):
    """Options of PromptFL; the values are those of its release."""

    context_length: int = 16
    """Number of context vectors M."""


PRESETS = with_mini(
    {"intended": Preset(PromptFLOptions(), RunConfig(optimiser=SGD(momentum=0.9), lr=1e-3))},
    context_length=4,
)


def promptfl(options: PromptFLOptions, run: Run) -> Method:
    """Compose PromptFL."""
    tower = text_side(run, "promptfl")
    learner = named_learner(run, behind_context(tower, contexts(options, tower), trained))
    return federate(run, learner, loss=cross_entropy_loss())


def contexts(options: PromptFLOptions, tower: TextTower) -> InitClassifier:
    """Return a function that draws the context vectors."""

    def init(key: PRNGKeyArray, _texts: ClassTexts) -> Float[Array, "M token_width"]:
        return INIT_STD * jax.random.normal(key, (options.context_length, tower.width))

    return init


def trained(
    vectors: Float[Array, "M token_width"], _texts: ClassTexts, _competing: Bool[Array, " C"]
) -> Float[Array, "M token_width"]:
    """Return the context vectors, which are the same ones for all classes."""
    return vectors
