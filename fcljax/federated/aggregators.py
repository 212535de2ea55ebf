"""The aggregation rules that a run can choose: options of the rules in `rules.py`."""

import dataclasses

from jaxtyping import Array

from fcljax.federated.rules import (
    centred_clipping,
    coordinate_median,
    geometric_median,
    krum,
    multi_krum,
    trimmed_mean,
)
from fcljax.options import option
from fcljax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean weighted by the uploads' weights: a running sum, one upload at a time."""


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The mean in which all clients have the same weight."""


@dataclasses.dataclass(frozen=True)
class Median:
    """The median of each coordinate."""

    def __call__(
        self, stacked: PyTree, _reference: PyTree, weight: Array, valid: Array, _key: Array
    ) -> PyTree:
        return coordinate_median(stacked, weight, valid)


@dataclasses.dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its extremes."""

    trim: float = option(0.1, below=0.5)
    """Fraction of the values to drop at each end."""

    def __call__(
        self, stacked: PyTree, _reference: PyTree, weight: Array, valid: Array, _key: Array
    ) -> PyTree:
        return trimmed_mean(stacked, weight, valid, self.trim)


@dataclasses.dataclass(frozen=True)
class GeometricMedian:
    """The point with the least weighted sum of distances to the uploads."""

    def __call__(
        self, stacked: PyTree, _reference: PyTree, weight: Array, valid: Array, _key: Array
    ) -> PyTree:
        return geometric_median(stacked, weight, valid)


@dataclasses.dataclass(frozen=True)
class Krum:
    """The upload that is nearest to its neighbours."""

    malicious_bound: int = option(1, least=0)
    """Number of malicious clients that the rule assumes."""

    def __call__(
        self, stacked: PyTree, _reference: PyTree, weight: Array, valid: Array, _key: Array
    ) -> PyTree:
        return krum(stacked, weight, valid, self.malicious_bound)


@dataclasses.dataclass(frozen=True)
class MultiKrum:
    """The mean of the uploads that `krum` ranks first."""

    malicious_bound: int = option(1, least=0)
    """Number of malicious clients that the rule assumes."""

    def __call__(
        self, stacked: PyTree, _reference: PyTree, weight: Array, valid: Array, _key: Array
    ) -> PyTree:
        return multi_krum(stacked, weight, valid, self.malicious_bound)


@dataclasses.dataclass(frozen=True)
class CentredClipping:
    """The broadcast value plus the mean of the clients' clipped changes."""

    clip_radius: float = option(10.0, positive=True)
    """L2 norm to which the rule clips each client's update."""

    def __call__(
        self, stacked: PyTree, reference: PyTree, weight: Array, valid: Array, _key: Array
    ) -> PyTree:
        return centred_clipping(stacked, weight, valid, reference, self.clip_radius)
