"""Learning-rate schedules of clients: the factor on all their learning rates, new in every task.

Round and epoch are data of the compiled program, so a schedule costs no further compilation.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from fcljax.errors import InputError
from fcljax.options import option
from fcljax.types import TrainingProgress


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same learning rate in all rounds, after the warm-up."""

    warmup_rounds: int = option(0, least=0, unset="no warm-up")
    """Number of rounds of each task in which the learning rate rises linearly."""

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        return warm_up(self.warmup_rounds, progress)


@dataclasses.dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine over the rounds of a task (PILoRA): (1 + cos(pi r / R)) / 2 in round
    r of R."""

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        # the cosine begins after the warm-up, and takes the rest of the task's rounds
        decay_round = jnp.maximum(progress.round - self.warmup_rounds, 0)
        decay_rounds = progress.rounds - self.warmup_rounds
        return warm_up(self.warmup_rounds, progress) * half_cosine(decay_round, decay_rounds)


@dataclasses.dataclass(frozen=True)
class CosineLag:
    """PILoRA's release: `Cosine` one round late, with the full rate in the first two rounds."""

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        # rounds 0 and 1 both have step 0 of the cosine
        return half_cosine(jnp.maximum(progress.round - 1, 0), progress.rounds)


@dataclasses.dataclass(frozen=True)
class EpochCosine:
    """A cosine over the epochs of each round (HePCo)."""

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        return epoch_cosine(progress.epoch, progress.epochs)


@dataclasses.dataclass(frozen=True)
class EpochCosineLag:
    """HePCo's release: `EpochCosine` one epoch late, with the full rate in the first two
    epochs."""

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        return epoch_cosine(jnp.maximum(progress.epoch - 1, 0), progress.epochs)


@dataclasses.dataclass(frozen=True)
class Step(Constant):
    """Steps downward at milestones of a task; those of GLFC's paper by default."""

    lr_divisor: float = option(5.0, least=1.0)
    """Divisor of the learning rate at each milestone."""
    lr_milestones: str = "0.5,0.75,0.9"
    """Milestones, as fractions of a task's epochs over all its rounds."""

    def __post_init__(self) -> None:
        # refuses bad milestones when the option is read, and not in the first round
        self.milestones(1)

    def milestones(self, epochs: int) -> Int[np.ndarray, " n"]:
        """Return the milestones as epochs of a task, of which it has this many.

        Raises:
          InputError: for milestones that are not fractions.
        """
        try:
            shares = [float(share) for share in self.lr_milestones.split(",")]
        except ValueError:
            # refused below, like an empty list
            shares = []
        if not shares or not all(0 < share <= 1 for share in shares):
            raise InputError(
                f"lr_milestones: {self.lr_milestones!r} are not fractions of a task; such as 0.5,0.75"
            )
        return np.array([round(share * epochs) for share in shares], np.int32)

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        is_passed = epochs_before(progress) >= self.milestones(progress.epochs * progress.rounds)
        # the divisor once for each milestone that is passed
        factor = self.lr_divisor ** -jnp.sum(is_passed).astype(jnp.float32)
        return warm_up(self.warmup_rounds, progress) * factor


@dataclasses.dataclass(frozen=True)
class StepInRound:
    """GLFC's release: `Step`, where the rate is lower only in the round of each milestone.

    The release makes a new optimiser at the full rate in every round, and lowers the rate
    only at the epoch of a milestone (baselines specification, B8).
    """

    def __call__(self, progress: TrainingProgress) -> Float[Array, ""]:
        milestones = Step().milestones(progress.epochs * progress.rounds)
        is_passed = epochs_before(progress) >= milestones
        in_round = is_passed & (milestones // progress.epochs == progress.round)
        # milestone i sets the rate to lr / divisor^(i + 1), whatever the round before had
        power = jnp.max(jnp.where(in_round, jnp.arange(1, len(milestones) + 1), 0))
        return Step().lr_divisor ** -power.astype(jnp.float32)


def warm_up(warmup_rounds: int, progress: TrainingProgress) -> Float[Array, ""]:
    """Return (r + 1) / (W + 1) in round r of W rounds of warm-up, and 1 afterwards."""
    # r + 1, because a first round at rate 0 would learn nothing
    return jnp.minimum((progress.round + 1) / (warmup_rounds + 1), 1.0)


def epochs_before(progress: TrainingProgress) -> Int[Array, ""]:
    """Return the number of epochs of the task that are over."""
    return progress.epochs * progress.round + progress.epoch


def half_cosine(round: ArrayLike, rounds: int) -> Float[Array, ""]:
    """Return (1 + cos(pi r / R)) / 2."""
    return jnp.asarray(0.5 * (1 + jnp.cos(jnp.pi * round / rounds)), jnp.float32)


def epoch_cosine(epoch: ArrayLike, epochs: int) -> Float[Array, ""]:
    """Return cos(99 pi e / (200 (E - 1))) in epoch e of E, which falls from 1 to 0.0157."""
    # a single epoch would divide by 0; its factor is 1
    steps = max(epochs - 1, 1)
    # 99 / 200 instead of 1 / 2, as in HePCo's release: the last epoch has a rate above 0
    return jnp.asarray(jnp.cos(99 * jnp.pi * epoch / (200 * steps)), jnp.float32)
