"""Sampled clients, which exist for one round, as in HePCo's release (specification 6.3)."""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from fcljax.options import option


class Sample(NamedTuple):
    """A client of one round."""

    indices: Int64[np.ndarray, " n"]  # of its examples
    reported: dict[int, int]  # class -> number of examples that it reports


def sample_client(
    labels: Int[np.ndarray, " N"],
    seed: int,
    split: float,
    category: float,
    imbalance: float,
    applied: bool = True,
) -> Sample:
    """Draw a client of HePCo, with some classes of the task and a long tail of sizes.

    Of n classes n - floor((1 - category) n) are drawn. The i-th of them has floor(split
    floor(N / n * imbalance^(i / (classes - 1)))) examples.

    Args:
      labels: of the task's examples.
      seed: of numpy's legacy generator, which shuffles the classes and then the examples of each.
      split: gamma.
      category: kappa, the share of the task's classes that a client has.
      imbalance: beta, the size of the last class over that of the first; 1: all alike.
      applied: False, as in most of the release's data sets: the client has floor(split *
        n) of the n examples of each of its classes, whatever the imbalance, and yet
        reports the numbers above.
    """
    # the release's legacy generator
    rng = np.random.RandomState(seed)
    order = rng.permutation(np.unique(labels))
    count = len(order)
    # n - floor((1 - category) n), not ceil(category n): they differ by rounding
    active = count - math.floor((1 - category) * count + 1e-9)
    sizes = [
        int(split * int(len(labels) / count * imbalance ** (i / max(active - 1, 1)))) for i in range(active)
    ]
    reported = dict(zip(order[:active].tolist(), sizes, strict=True))
    indices = [np.empty(0, np.int64)]
    for label, size in reported.items():
        members = rng.permutation(np.flatnonzero(labels == label))
        # "reported": the client trains on a fixed share, whatever it reports
        count_of_class = int(split * len(members))
        if applied:
            count_of_class = size
        indices.append(members[:count_of_class])
    return Sample(np.concatenate(indices), reported)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Clients that are drawn for one round, each with some classes of the task
    (HePCo)."""

    split_ratio: float = option(0.1, positive=True, most=1.0)
    """Fraction gamma of a class's examples that a client draws."""
    category_ratio: float = option(0.6, positive=True, most=1.0)
    """Fraction kappa of a task's classes that a client has."""
    imbalance: float = option(1.0, positive=True, most=1.0)
    """Ratio of a sampled client's examples of its last class to those of its first."""
    long_tail: Literal["applied", "reported"] = "applied"
    """Class sizes of sampled clients. applied: those of --imbalance; reported: clients
    only report these sizes, as in HePCo's release."""
    population: ClassVar[str] = "redrawn"

    def clients_of(
        self,
        labels: Int[np.ndarray, " N"],
        rows: Int[np.ndarray, " n"],
        clients: int,
        seed: int,
        time: tuple[int, int, int],
    ) -> list[Sample]:
        """Return the clients of one round, with the seeds of HePCo's release.

        Args:
          labels: of all training examples.
          rows: the task's examples.
          clients: number of clients K.
          seed: of the run.
          time: task, round, and rounds of a task.
        """
        task, round_, rounds = time
        # consecutive seeds over the rounds of all tasks, as in the release
        first_seed = 1 + clients * (round_ + rounds * task) + 2000 * seed
        applied = self.long_tail == "applied"
        samples = []
        for client in range(clients):
            # RandomState takes 32 bits
            client_seed = (first_seed + client) % 2**32
            sample = sample_client(
                labels[rows], client_seed, self.split_ratio, self.category_ratio, self.imbalance, applied
            )
            samples.append(sample._replace(indices=rows[sample.indices]))
        return samples


def reported_counts(samples: list[Sample], position: Int[np.ndarray, " C"]) -> Int[np.ndarray, "K C"]:
    """Return the numbers of examples [K, C] that sampled clients report, in class order."""
    counts = np.zeros((len(samples), len(position)), np.int32)
    for client, sample in enumerate(samples):
        for label, count in sample.reported.items():
            counts[client, position[label]] = count
    return counts
