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


def full(options: FullOptions, sizes: Sizes, network: Network) -> Adapter:
    """All weights of the network, in float32: a step of 1e-5 would be lost in bfloat16."""
    del sizes

    def init(key: PRNGKeyArray, frozen: Frozen) -> PyTree:
        del key
        weights = network.split(frozen.network)[0] if network.split else frozen.network
        return jax.tree.map(lambda x: x.astype(jnp.float32), weights)

    def network_of(trainable: PyTree) -> PyTree:
        return trainable

    return Adapter(init, network=network_of, rate=options.full_lr)
