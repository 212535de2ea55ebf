"""Which client holds which training row.

`dirichlet` and `iid` split bit for bit as FPPL's release (arXiv 2411.01904) does: they continue the numpy
stream that drew the class order (`tasks.class_order`), work in original label order, let nothing else draw in
between, and cover the whole training set at once; what a client has of one task follows from it. `quantity`,
`shards` and `dirichlet` also split the rows of one task (PILoRA, Guo et al., ECCV 2024). Parts are positions
in the `labels` that were given.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int64

from fcljax.errors import InputError

_PASSES = 1000  # of the retry rule, before we call a setting hopeless
# far above it the draw is IID in all but name, and further up the gamma variates overflow
_LARGEST_ALPHA = 1e6


def dirichlet(
    labels: Int[np.ndarray, " N"], clients: int, alpha: float, rng: np.random.RandomState, min_size: int = 10
) -> list[Int64[np.ndarray, " _"]]:
    """Label-skewed partition: every class is spread over clients by a draw from Dirichlet(alpha, ..., alpha).

    Clients that already hold their fair share N / clients get nothing more, and the whole partition is drawn
    again until every client has `min_size` rows. Each client's rows come shuffled. FPPL's release splits the
    whole training set like this, PILoRA's the rows of one task ("distribution-based").

    Args:
      labels: original labels.
      clients: number of clients K.
      alpha: concentration; small is skewed. Above 0: an IID partition is `iid`.
      rng: the stream that has just drawn the class order.
      min_size: least number of rows of a client over all classes in `labels`.

    Raises:
      InputError: for alpha not in (0, 1e6], less than one client, or a `min_size` that cannot be met.
    """
    if not 0 < alpha <= _LARGEST_ALPHA:  # also refuses NaN
        raise InputError(
            f"alpha: {alpha} is not a Dirichlet concentration; choose 0 < alpha <= 1e6, or partition iid"
        )
    check_clients(len(labels), clients, min_size)
    for _ in range(_PASSES):
        parts = _one_pass(labels, clients, alpha, rng)
        if min(map(len, parts)) >= min_size:
            return _shuffled(parts, rng)
    raise InputError(
        f"clients: {clients} clients with alpha {alpha} do not all reach {min_size} rows of {len(labels)} "
        f"in {_PASSES} draws; choose fewer clients, a larger --alpha or a smaller --min-rows"
    )


def iid(
    labels: Int[np.ndarray, " N"], clients: int, rng: np.random.RandomState, min_size: int = 10
) -> list[Int64[np.ndarray, " _"]]:
    """Every class is shuffled and cut into parts that are equal, or one row larger for the first clients.

    Raises:
      InputError: for less than one client, or a `min_size` that is not met (sizes do not depend on chance, so
        there is no retry).
    """
    check_clients(len(labels), clients, min_size)
    owners, rows = [], []
    for members in _classes(labels):
        rng.shuffle(members)
        owners.append(np.repeat(np.arange(clients), even(len(members), clients)))
        rows.append(members)
    parts = _by_owner(rows, owners, clients)
    smallest = min(map(len, parts))
    if smallest < min_size:
        raise InputError(
            f"clients: an IID split over {clients} clients leaves one with {smallest} rows, under {min_size}"
        )
    return _shuffled(parts, rng)


def quantity(
    labels: Int[np.ndarray, " N"], clients: int, per_client: int, rng: np.random.RandomState
) -> list[Int64[np.ndarray, " _"]]:
    """Every client owns `per_client` labels, and the rows of a label are split equally among its owners.

    "#C = alpha" of NIID-Bench (Li et al., ICDE 2022), the quantity-based partition of PILoRA's paper. First
    the labels go round: client k gets label k modulo the number of labels and, where labels outnumber
    clients, every `clients`-th label after it, up to `per_client`; then it draws others at random. So every
    label has an owner if clients * per_client >= labels; otherwise all owned labels differ and the examples
    of the others are unused. NIID-Bench counts the labels in their own order and gives only one of them
    to each client before the draw; here their order is drawn, so that chance decides which labels stay
    unused. Where the
    rows of a label do not come out even its first owners get one row more.

    Args:
      labels: labels of the rows to split.
      clients: number of clients K.
      per_client: labels per client.
      rng: draws the order of the labels, then client by client the others, then label by label which rows go
        to whom.

    Raises:
      InputError: for less than one client, or a `per_client` that is not between 1 and the number of labels.
    """
    check_clients(len(labels), clients, 0)
    members = _classes(labels)
    _check_per_client(per_client, len(members), "label ids")
    owns = _label_owners(len(members), clients, per_client, rng)
    owners, rows = [], []
    for label, mine in enumerate(members):
        holders = np.flatnonzero(owns[:, label])
        if len(holders):
            rng.shuffle(mine)
            owners.append(np.repeat(holders, even(len(mine), len(holders))))
            rows.append(mine)
    return _by_owner(rows, owners, clients)


def shards(
    labels: Int[np.ndarray, " N"], clients: int, per_client: int, rng: np.random.RandomState, count: int = 100
) -> list[Int64[np.ndarray, " _"]]:
    """Rows in the order of their labels are cut into `count` shards; each client draws `per_client` of them.

    The quantity-based partition of PILoRA's release. The shards of one client differ, but clients draw
    without regard to each other: some shards belong to several, some to nobody. The first N modulo `count`
    shards have one row more than the others. Where the rows of every label fill whole shards a client holds
    at most `per_client` labels; elsewhere a shard may reach from one label into the next.

    Args:
      labels: labels of the rows to split.
      clients: number of clients K.
      per_client: shards per client.
      rng: draws the shards of one client after the other.
      count: shards.

    Raises:
      InputError: for less than one client, a `per_client` not between 1 and `count`, or fewer rows than
        shards.
    """
    check_clients(len(labels), clients, 0)
    _check_per_client(per_client, count, "shards")
    if len(labels) < count:
        raise InputError(
            f"partition: shards cuts rows into {count} shards, and a task has only {len(labels)}; "
            "nearest: quantity"
        )
    cut = np.array_split(np.argsort(labels, kind="stable"), count)
    return [
        np.concatenate([cut[shard] for shard in rng.choice(count, per_client, replace=False)])
        for _ in range(clients)
    ]


class Sample(NamedTuple):
    """The rows of a client that is drawn for one round, and how many of each class it says that it has."""

    rows: Int64[np.ndarray, " n"]
    told: dict[int, int]


def sample_client(
    labels: Int[np.ndarray, " N"],
    seed: int,
    split: float,
    category: float,
    imbalance: float,
    applied: bool = True,
) -> Sample:
    """The rows of one client of HePCo, which exists for one round: some classes of the task, and of each a
    part of its rows that gets smaller from class to class.

    Of n classes n - floor((1 - category) n) are drawn. The i-th of them has floor(split floor(N / n *
    imbalance^(i / (classes - 1)))) rows.

    Args:
      labels: of the task's rows.
      seed: of numpy's legacy generator, which shuffles the classes and then the rows of each.
      split: gamma.
      category: kappa, the share of the task's classes that a client has.
      imbalance: beta, the size of the last class over that of the first; 1: all alike.
      applied: False, as in most of the release's data sets: the client has floor(split * rows) rows of each
        of its classes, whatever the imbalance, and yet says the numbers above.

    Returns:
      Positions in `labels`, and the numbers that the client says.
    """
    rng = np.random.RandomState(seed)
    order = np.unique(labels)
    count = len(order)
    active = count - math.floor((1 - category) * count + 1e-9)
    rng.shuffle(order)
    sizes = [
        int(split * int(len(labels) / count * imbalance ** (i / max(active - 1, 1)))) for i in range(active)
    ]
    rows = []
    for name, size in zip(order, sizes, strict=False):
        members = np.flatnonzero(labels == name)
        rng.shuffle(members)
        rows.append(members[: size if applied else int(split * len(members))])
    told = {int(name): size for name, size in zip(order, sizes, strict=False)}
    return Sample(np.concatenate([np.empty(0, np.int64), *rows]), told)


def first_share(labels: Int[np.ndarray, " N"], share: float) -> Int64[np.ndarray, " n"]:
    """The first `share` of the rows of each class, rounded up, in ascending order.

    PILoRA's release trains on the first 80 %.

    Raises:
      InputError: for a share that is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise InputError(f"train_share: {share} is not a share of the rows; choose more than 0 and at most 1")
    # without the slack 0.07 of 100 rows would be 8, since 0.07 * 100 > 7 in floating point
    return np.sort(
        np.concatenate([members[: math.ceil(share * len(members) - 1e-9)] for members in _classes(labels)])
    )


def count_matrix(
    labels: Int[np.ndarray, " N"], parts: list[Int[np.ndarray, " _"]], num_classes: int
) -> Int64[np.ndarray, "K C"]:
    """How many rows of each class each client holds."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cells = np.bincount(
        owner * num_classes + labels[np.concatenate(parts)], minlength=len(parts) * num_classes
    )
    return cells.reshape(len(parts), num_classes)


def check_clients(rows: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise InputError(f"clients: {clients} is not a number of clients; choose 1 or more")
    if rows < clients * min_size:
        most = rows // min_size
        raise InputError(
            f"clients: {rows} rows cannot give {clients} clients {min_size} each; "
            f"choose {most} clients or fewer"
        )


def _check_per_client(per_client: int, most: int, what: str) -> None:
    if not 1 <= per_client <= most:
        raise InputError(
            f"classes_per_client: {per_client} {what} per client, of {most}; "
            f"nearest valid value: {min(max(per_client, 1), most)}"
        )


def _label_owners(
    labels: int, clients: int, per_client: int, rng: np.random.RandomState
) -> Bool[np.ndarray, "K L"]:
    order = rng.permutation(labels)
    owns = np.zeros((clients, labels), bool)
    for client, mine in enumerate(owns):
        mine[order[np.arange(client, max(clients, labels), clients) % labels][:per_client]] = True
        mine[rng.choice(np.flatnonzero(~mine), per_client - mine.sum(), replace=False)] = True
    return owns


def even(rows: int, parts: int) -> Int64[np.ndarray, " parts"]:
    """Sizes of equal parts; the first ones are larger by one where they do not come out even."""
    return rows // parts + (np.arange(parts) < rows % parts)


def _classes(labels: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _one_pass(labels: np.ndarray, clients: int, alpha: float, rng: np.random.RandomState) -> list[np.ndarray]:
    held = np.zeros(clients, np.int64)
    owners, rows = [], []
    for members in _classes(labels):
        rng.shuffle(members)
        shares = _shares(held < len(labels) / clients, alpha, rng)
        cuts = (np.cumsum(shares) * len(members)).astype(np.int64)[:-1]
        sizes = np.diff(cuts, prepend=0, append=len(members))
        held += sizes
        owners.append(np.repeat(np.arange(clients), sizes))
        rows.append(members)
    return _by_owner(rows, owners, clients)


def _shares(below: np.ndarray, alpha: float, rng: np.random.RandomState) -> Float[np.ndarray, " K"]:
    """Dirichlet shares among the clients `below` their fair share (at least one: fewer than N are placed)."""
    shares = np.where(below, rng.dirichlet(np.repeat(alpha, len(below))), 0.0)
    total = shares.sum()
    if math.isfinite(total) and total > 0:
        return shares / total
    # A tiny alpha underflows to all zeros; there the release divides by zero. The limit is one random client.
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
