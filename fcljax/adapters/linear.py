"""No adapter: the network stays frozen and only the classifier on its features trains (linear probing)."""

import dataclasses

from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """The adapter `linear` has no options."""


def linear(options: LinearOptions, sizes: Sizes, network: Network) -> Adapter:
    """Nothing trains inside the network; its features are cached wherever images are deterministic."""
    del options, sizes, network
    return Adapter(init=lambda key, frozen: ())
