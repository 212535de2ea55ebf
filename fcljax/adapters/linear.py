"""No adapter: the network stays frozen and only the classifier on its features trains
(linear probing)."""

import dataclasses

from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """The adapter `linear` has no options."""


def linear(_options: LinearOptions, _sizes: Sizes, _network: Network) -> Adapter:
    """Return the adapter that trains nothing inside the network.

    Features of the frozen network are cached wherever images are deterministic.
    """
    return Adapter(init=lambda key, frozen: ())
