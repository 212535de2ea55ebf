"""The whole network trains, from the frozen one's values (full fine-tuning)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from fcljax.options import option
from fcljax.parts.learner import Adapter
from fcljax.types import Frozen, LearningRate, Network, Sizes


@dataclasses.dataclass(frozen=True)
class FullOptions:
    """Options of the adapter `full`."""

    full_lr: LearningRate = option(1e-5, positive=True, learning_rate=True)
    """Learning rate of the network."""


def full(options: FullOptions, _sizes: Sizes, network: Network) -> Adapter:
    """Return the adapter that trains all weights of the network."""

    def init(_key: PRNGKeyArray, frozen: Frozen) -> PyTree:
        weights = frozen.network
        # running statistics are `Params.stats`: no gradient moves them
        if network.split:
            weights, _ = network.split(frozen.network)
        # steps of 1e-5 would be lost in weights of bfloat16
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)

    def network_of(trainable: PyTree) -> PyTree:
        return trainable

    return Adapter(init, network=network_of, rate=options.full_lr)
