"""The whole network trains, from the frozen one's values (full fine-tuning)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from fcljax.learner import Adapter
from fcljax.options import option
from fcljax.types import Frozen, Network, Setting


@dataclasses.dataclass(frozen=True)
class FullOptions:
    """Options of the adapter `full`."""

    full_lr: float = option(1e-5, positive=True)  # learning rate of the network


def full(options: FullOptions, setting: Setting, network: Network) -> Adapter:
    """All parameters of the network, in float32: a step of 1e-5 would be lost in bfloat16. Running statistics
    are averaged like weights; a client's follow its own batches."""
    del setting

    def init(key: PRNGKeyArray, frozen: Frozen) -> PyTree:
        del key
        return jax.tree.map(lambda x: x.astype(jnp.float32), frozen.network)

    return Adapter(init, network=lambda part: part, moved=network.moved, rate=options.full_lr)
