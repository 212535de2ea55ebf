"""Which client holds which training row, bit for bit as FPPL's release (arXiv 2411.01904) splits them.

Both functions continue the numpy stream that drew the class order (`tasks.class_order`), work in original label order, and let
nothing else draw in between. A partition covers the whole training set at once; what a client has of one task follows from it.
"""

import math

import numpy as np
from jaxtyping import Float, Int, Int64

from fcljax.errors import InputError

_PASSES = 1000  # of the retry rule, before we call a setting hopeless
_LARGEST_BETA = 1e6  # far above it the draw is IID in all but name, and further up the gamma variates overflow


def dirichlet(
    labels: Int[np.ndarray, " N"], clients: int, beta: float, rng: np.random.RandomState, min_size: int = 10
) -> list[Int64[np.ndarray, " _"]]:
    """Label-skewed partition: every class is spread over the clients by a draw from Dirichlet(beta, ..., beta).

    Clients that already hold their fair share N / clients get nothing more, and the whole partition is drawn again until every
    client has `min_size` rows. Each client's rows come shuffled.

    Args:
      labels: original labels.
      clients: number of clients K.
      beta: concentration; small is skewed. Above 0: an IID partition is `iid`.
      rng: the stream that has just drawn the class order.
      min_size: least number of rows of a client over all its classes.

    Raises:
      InputError: for beta not in (0, 1e6], less than one client, or a `min_size` that cannot be met.
    """
    if not 0 < beta <= _LARGEST_BETA:  # also refuses NaN
        raise InputError(f"beta: {beta} is not a Dirichlet concentration; choose 0 < beta <= 1e6, or partition iid")
    _check_clients(len(labels), clients, min_size)
    for _ in range(_PASSES):
        parts = _one_pass(labels, clients, beta, rng)
        if min(map(len, parts)) >= min_size:
            return _shuffled(parts, rng)
    raise InputError(
        f"clients: {clients} clients with beta {beta} do not all reach {min_size} rows of {len(labels)} in {_PASSES} draws; "
        "choose fewer clients, a larger beta or a smaller min_size"
    )


def iid(
    labels: Int[np.ndarray, " N"], clients: int, rng: np.random.RandomState, min_size: int = 10
) -> list[Int64[np.ndarray, " _"]]:
    """Every class is shuffled and cut into equal parts; where they do not come out even the first clients get one row more.

    Raises:
      InputError: for less than one client, or a `min_size` that is not met (sizes do not depend on chance, so there is no retry).
    """
    _check_clients(len(labels), clients, min_size)
    owners, rows = [], []
    for members in _classes(labels):
        rng.shuffle(members)
        size, rest = divmod(len(members), clients)
        owners.append(np.repeat(np.arange(clients), size + (np.arange(clients) < rest)))
        rows.append(members)
    parts = _by_owner(rows, owners, clients)
    smallest = min(map(len, parts))
    if smallest < min_size:
        raise InputError(f"clients: an IID split over {clients} clients leaves one with {smallest} rows, under {min_size}")
    return _shuffled(parts, rng)


def count_matrix(labels: Int[np.ndarray, " N"], parts: list[Int64[np.ndarray, " _"]], num_classes: int) -> Int64[np.ndarray, "K C"]:
    """How many rows of each class each client holds."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cells = np.bincount(owner * num_classes + labels[np.concatenate(parts)], minlength=len(parts) * num_classes)
    return cells.reshape(len(parts), num_classes)


def _check_clients(rows: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise InputError(f"clients: {clients} is not a number of clients; choose 1 or more")
    if rows < clients * min_size:
        most = rows // min_size
        raise InputError(f"clients: {rows} rows cannot give {clients} clients {min_size} each; choose {most} clients or fewer")


def _classes(labels: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _one_pass(labels: np.ndarray, clients: int, beta: float, rng: np.random.RandomState) -> list[np.ndarray]:
    held = np.zeros(clients, np.int64)
    owners, rows = [], []
    for members in _classes(labels):
        rng.shuffle(members)
        shares = _shares(held < len(labels) / clients, beta, rng)
        cuts = (np.cumsum(shares) * len(members)).astype(np.int64)[:-1]
        sizes = np.diff(cuts, prepend=0, append=len(members))
        held += sizes
        owners.append(np.repeat(np.arange(clients), sizes))
        rows.append(members)
    return _by_owner(rows, owners, clients)


def _shares(below: np.ndarray, beta: float, rng: np.random.RandomState) -> Float[np.ndarray, " K"]:
    """Dirichlet shares among the clients `below` their fair share. At least one is: those placed are fewer than N."""
    shares = np.where(below, rng.dirichlet(np.repeat(beta, len(below))), 0.0)
    total = shares.sum()
    if math.isfinite(total) and total > 0:
        return shares / total
    # A tiny beta underflows to all zeros, where the release divides by zero. Dirichlet(beta -> 0) is one random client.
    return np.eye(len(below))[rng.choice(np.flatnonzero(below))]


def _by_owner(rows: list[np.ndarray], owners: list[np.ndarray], clients: int) -> list[np.ndarray]:
    owner = np.concatenate(owners)
    ordered = np.concatenate(rows)[np.argsort(owner, kind="stable")]
    return np.split(ordered, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _shuffled(parts: list[np.ndarray], rng: np.random.RandomState) -> list[np.ndarray]:
    parts = [part.astype(np.int64) for part in parts]
    for part in parts:
        rng.shuffle(part)
    return parts
