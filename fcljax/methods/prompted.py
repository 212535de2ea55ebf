"""What HePCo (Halbe et al. 2024, section 4.1) and its baselines share.

Clients exist for one round, their learning rate falls over its epochs, and their runs
have the same presets.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fcljax.adapters.full import FullOptions
from fcljax.data.sampled import Sampled
from fcljax.parts.client import LearningRateFactor
from fcljax.parts.federate import Run
from fcljax.settings import Preset, RunConfig, with_changes

Schedule = Literal["cosine", "cosine_lag", "constant"]


@dataclasses.dataclass(frozen=True)
class PromptedOptions:
    """Options that HePCo's clients share with those of its baselines."""

    epoch_schedule: Schedule = "cosine"
    """Learning-rate schedule over the epochs of a round; cosine_lag runs one epoch late."""


# clients that exist for one round, and are averaged whatever they have
_RUN = RunConfig(partition="sampled", aggregator="uniform")
_RELEASED = dataclasses.replace(
    _RUN, preprocess="hepco", class_order="python", partition=Sampled(long_tail="reported")
)
CLIENT = {
    "intended": Preset(PromptedOptions(), _RUN),
    "paper": Preset(PromptedOptions("cosine_lag"), _RUN),
    "released": Preset(PromptedOptions("cosine_lag"), _RELEASED),
}
# baselines that train the whole network (section 5)
WHOLE = with_changes(CLIENT, adapters=(FullOptions(full_lr=5e-5),), lr=5e-5)


def epoch_schedule(options: PromptedOptions, run: Run) -> LearningRateFactor:
    """Return a learning-rate factor that falls over the epochs of every round."""

    def factor(_round: Array, _rounds: int, epoch: Array) -> Float[Array, ""]:
        return epoch_factor(options.epoch_schedule, epoch, run.training.epochs)

    return factor


def epoch_factor(schedule: Schedule, epoch: ArrayLike, epochs: int) -> Float[Array, ""]:
    """Return the factor on the learning rate in epoch e of E.

    constant: 1; cosine: cos(99 pi e / (200 (E - 1))), which falls from 1 to 0.0157;
    cosine_lag: as in epoch e - 1, and 1 in the first (release).
    """
    if schedule == "constant":
        return jnp.ones(())
    if schedule == "cosine_lag":
        epoch = jnp.maximum(epoch - 1, 0)
    steps = max(epochs - 1, 1)  # a single epoch has the factor 1
    return jnp.asarray(jnp.cos(99 * jnp.pi * epoch / (200 * steps)), jnp.float32)
