"""Partitions of the training examples among clients: a dataclass and a function for each.

`dirichlet` and `iid` split bit for bit as FPPL's release (arXiv 2411.01904), except for
the examples of a class that clients cannot share equally (`iid`). They divide the whole
training set at once, in the order of the original labels, and continue the numpy stream
that has just drawn the class order (`tasks.class_order`). `quantity`, `shards` and
`dirichlet` also split the examples of one task (PILoRA, Guo et al., ECCV 2024). All parts
are indices into the given `labels`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, Int64
from numpy.random import RandomState

# public here: the client of one round
from fcljax.data.sampled import sample_client as sample_client
from fcljax.errors import InputError
from fcljax.options import flag, option

# With more clients `quantity` draws for all at once, which gives another partition: a
# draw for each of a million clients takes seconds.
MOST_DRAWN_APART = 100_000
_PASSES = 1000  # draws of a partition before an error
# at this size the partition is IID in all but name; far above it, gamma variates overflow
_LARGEST_ALPHA = 1e6

Parts = list[Int64[np.ndarray, " _"]]  # the indices of each client


@runtime_checkable
class Partition(Protocol):
    """Divides training examples among clients.

    A partition with the class attribute `all_tasks = True` divides the examples of all
    tasks at once; others divide task after task.
    """

    def __call__(self, labels: Int[np.ndarray, " N"], clients: int, rng: RandomState, /) -> Parts:
        """Return the indices, into the labels, of each client's examples."""
        ...


@dataclasses.dataclass(frozen=True)
class Dirichlet:
    """Each class is divided by a Dirichlet draw, once for all tasks (FPPL)."""

    alpha: float = option(0.5, positive=True)
    """Dirichlet concentration; smaller is less even."""
    min_examples: int = option(10, least=0)
    """Minimum number of examples per client; a partition below it is redrawn."""
    all_tasks: ClassVar[bool] = True

    def __call__(self, labels: np.ndarray, clients: int, rng: RandomState) -> Parts:
        return dirichlet(labels, clients, self.alpha, rng, self.min_examples)


@dataclasses.dataclass(frozen=True)
class TaskDirichlet(Dirichlet):
    """Each class of a task is divided by a Dirichlet draw (PILoRA)."""

    all_tasks: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class IID:
    """Each class is divided evenly, once for all tasks."""

    min_examples: int = option(10, least=0)
    """Minimum number of examples per client; a partition below it is redrawn."""
    all_tasks: ClassVar[bool] = True

    def __call__(self, labels: np.ndarray, clients: int, rng: RandomState) -> Parts:
        return iid(labels, clients, rng, self.min_examples)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Each client owns some classes of each task; owners share a class's examples (PILoRA)."""

    classes_per_client: int = 2
    """Classes per client and task."""
    min_examples: int = option(0, least=0)
    """Minimum number of examples per client; a partition below it is redrawn."""

    def __call__(self, labels: np.ndarray, clients: int, rng: RandomState) -> Parts:
        return quantity(labels, clients, self.classes_per_client, rng, self.min_examples)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Each client draws some shards of each task's examples, which are sorted by class."""

    classes_per_client: int = 2
    """Shards of 1/100 of a task's examples per client."""
    min_examples: int = option(0, least=0)
    """Minimum number of examples per client; a partition below it is redrawn."""

    def __call__(self, labels: np.ndarray, clients: int, rng: RandomState) -> Parts:
        return shards(labels, clients, self.classes_per_client, rng, min_size=self.min_examples)


@dataclasses.dataclass(frozen=True)
class WholeClasses:
    """Each client draws some classes of each task and has all their examples (GLFC)."""

    classes_per_client: int = 2
    """Classes per client and task."""
    min_examples: int = option(0, least=0)
    """Minimum number of examples per client; a partition below it is redrawn."""

    def __call__(self, labels: np.ndarray, clients: int, rng: RandomState) -> Parts:
        return whole_classes(labels, clients, self.classes_per_client, rng, self.min_examples)


def dirichlet(
    labels: Int[np.ndarray, " N"],
    clients: int,
    alpha: float,
    rng: RandomState,
    min_size: int = 10,
) -> Parts:
    """Divide every class by a draw from Dirichlet(alpha, ..., alpha): label skew.

    Clients that already own their fair share N / clients get nothing more, and the whole
    partition is redrawn until every client has `min_size` examples. Each client's
    examples are shuffled. FPPL's release splits the whole training set like this,
    PILoRA's the examples of one task ("distribution-based").

    Args:
      labels: original labels.
      clients: number of clients K.
      alpha: concentration; small is skewed.
      rng: the stream that has just drawn the class order.
      min_size: minimum number of examples of a client over all classes in `labels`.

    Raises:
      InputError: for alpha not in (0, 1e6], no client, or a `min_size` that cannot be met.
    """
    if not 0 < alpha <= _LARGEST_ALPHA:  # also refuses NaN
        raise InputError(
            f"alpha: {alpha} is not a Dirichlet concentration; choose 0 < alpha <= 1e6, or partition iid"
        )
    check_clients(len(labels), clients, min_size)

    def draw() -> Parts:
        return _dirichlet_draw(labels, clients, alpha, rng)

    parts = _redrawn(draw, min_size, len(labels), clients, f"alpha {alpha}")
    # a part is sorted by class, and without shuffling batches would be of one class
    return _shuffled(parts, rng)


def iid(
    labels: Int[np.ndarray, " N"],
    clients: int,
    rng: RandomState,
    min_size: int = 10,
) -> Parts:
    """Shuffle every class and divide it evenly.

    Examples of a class that are left over go to clients in turn, each class continuing
    where the class before it ended, from a random first client: all clients' sizes differ
    by at most one. In FPPL's release they go to the first clients, class after class. If
    all classes divide evenly, nothing is drawn and the partition is the release's.

    Raises:
      InputError: for no client, or a `min_size` that is not met.
    """
    check_clients(len(labels), clients, min_size)
    shuffled = [rng.permutation(members) for members in _classes(labels)]
    left_over = np.array([len(members) % clients for members in shuffled])
    # where all classes divide evenly nothing is drawn, and the stream is the release's
    first_client = 0
    if left_over.any():
        first_client = rng.randint(clients)
    starts = first_client + np.cumsum(left_over) - left_over
    owned = []
    for members, start in zip(shuffled, starts, strict=True):
        owners = np.roll(np.arange(clients), -start)
        owned.append(_evenly(members, owners))
    return _shuffled(_by_owner(owned, clients), rng)


def quantity(
    labels: Int[np.ndarray, " N"],
    clients: int,
    per_client: int,
    rng: RandomState,
    min_size: int = 0,
) -> Parts:
    """Give every client `per_client` labels, and divide each label evenly among its owners.

    This is "#C = alpha" of NIID-Bench (Li et al., ICDE 2022), the quantity-based
    partition of PILoRA's paper. First the labels are assigned in turn, in a random order:
    client k gets label k modulo the number of labels and, if there are more labels than
    clients, every `clients`-th label after it, up to `per_client`. Then it draws others
    at random. So every label has an owner if clients * per_client >= labels; otherwise
    all owned labels differ, and the examples of the others are unused. NIID-Bench does
    not shuffle the labels, and gives each client only one of them before the draw. If a
    label does not divide evenly, its first owners get one example more.

    Args:
      labels: labels of the examples to split.
      clients: number of clients K.
      per_client: labels per client.
      rng: draws the order of the labels, then client by client the others (at once for
        more than `MOST_DRAWN_APART` clients), then label by label each owner's examples.
      min_size: minimum number of examples of a client; below it the partition is redrawn.

    Raises:
      InputError: for no client, a `per_client` that is not between 1 and the number of
        labels, or a `min_size` that is not met.
    """
    check_clients(len(labels), clients, min_size)
    members = _classes(labels)
    _check_per_client(per_client, len(members), "label ids")

    def draw() -> Parts:
        owns = _label_owners(len(members), clients, per_client, rng)
        owners_by_label = []
        for label, examples in enumerate(members):
            owners = np.flatnonzero(owns[:, label])
            # the examples of a label without an owner are unused
            if len(owners):
                owners_by_label.append(_evenly(rng.permutation(examples), owners))
        return _by_owner(owners_by_label, clients)

    return _redrawn(draw, min_size, len(labels), clients, f"classes_per_client {per_client}")


def whole_classes(
    labels: Int[np.ndarray, " N"],
    clients: int,
    per_client: int,
    rng: RandomState,
    min_size: int = 0,
) -> Parts:
    """Give every client all examples of `per_client` random labels; clients share examples.

    In GLFC's release `per_client` is 6 of a task's 10 classes.

    Args:
      labels: labels of the examples.
      clients: number of clients K.
      per_client: labels per client.
      rng: draws the labels of one client after the other.
      min_size: minimum number of examples of a client; below it the partition is redrawn.

    Raises:
      InputError: for no client, a `per_client` that is not between 1 and the number of
        labels, or a `min_size` that is not met.
    """
    # no minimum here: clients share examples, so their number is no limit
    check_clients(len(labels), clients, 0)
    label_ids = np.unique(labels)
    _check_per_client(per_client, len(label_ids), "label ids")

    def draw() -> Parts:
        drawn = (rng.choice(label_ids, per_client, replace=False) for _ in range(clients))
        return [np.flatnonzero(np.isin(labels, client_labels)) for client_labels in drawn]

    return _redrawn(draw, min_size, len(labels), clients, f"classes_per_client {per_client}")


def shards(
    labels: Int[np.ndarray, " N"],
    clients: int,
    per_client: int,
    rng: RandomState,
    count: int = 100,
    min_size: int = 0,
) -> Parts:
    """Cut the examples, sorted by label, into `count` shards; each client draws `per_client`.

    This is the quantity-based partition of PILoRA's release. The shards of a client
    differ, but clients draw independently: some shards belong to several clients, some to
    none. The first N modulo `count` shards have one example more. A client has at most
    `per_client` labels if every label fills whole shards; otherwise a shard may have two
    labels.

    Args:
      labels: labels of the examples to split.
      clients: number of clients K.
      per_client: shards per client.
      rng: draws the shards of one client after the other.
      count: number of shards.
      min_size: minimum number of examples of a client; below it the partition is redrawn.

    Raises:
      InputError: for no client, a `per_client` not between 1 and `count`, fewer examples
        than shards, or a `min_size` that is not met.
    """
    check_clients(len(labels), clients, 0)
    _check_per_client(per_client, count, "shards")
    if len(labels) < count:
        raise InputError(
            f"partition: shards needs {count} examples for {count} shards, and a task has only "
            f"{len(labels)}; nearest: quantity"
        )
    # stable, so that examples of a label keep the order of the data set
    cut = np.array_split(np.argsort(labels, kind="stable"), count)

    def draw() -> Parts:
        drawn = (rng.choice(count, per_client, replace=False) for _ in range(clients))
        return [np.concatenate([cut[shard] for shard in client_shards]) for client_shards in drawn]

    return _redrawn(draw, min_size, len(labels), clients, f"classes_per_client {per_client}")


def first_share(labels: Int[np.ndarray, " N"], share: float) -> Int64[np.ndarray, " n"]:
    """Return the first `share` of each class, rounded up, as ascending indices.

    PILoRA's release trains on the first 80 %.

    Raises:
      InputError: for a share that is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise InputError(
            f"train_share: {share} is not a share of the examples; choose more than 0 and at most 1"
        )
    parts = []
    for members in _classes(labels):
        # the slack, since 0.07 * 100 > 7 in floating point
        size = math.ceil(share * len(members) - 1e-9)
        parts.append(members[:size])
    return np.sort(np.concatenate(parts))


def count_matrix(
    labels: Int[np.ndarray, " N"], parts: list[Int[np.ndarray, " _"]], num_classes: int
) -> Int64[np.ndarray, "K C"]:
    """Return the number of examples of each client and class."""
    # starts with an empty array, because all parts may be empty
    indices = np.concatenate([np.empty(0, np.int64), *parts])
    return class_counts(labels[indices], np.array([len(part) for part in parts], int), num_classes)


def class_counts(
    labels: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " K"], num_classes: int
) -> Int64[np.ndarray, "K C"]:
    """Return the number of examples of each client and class.

    Args:
      labels: of the first client's examples, of the second's, and so on.
      sizes: number of examples of each client.
      num_classes: C.
    """
    owner = np.repeat(np.arange(len(sizes)), sizes)
    # pairs of client and class as one number, so that no loop runs over a million clients
    counts = np.bincount(owner * num_classes + labels, minlength=len(sizes) * num_classes)
    return counts.reshape(len(sizes), num_classes)


def check_parts(parts: Parts, clients: int, examples: int) -> None:
    """Check that a partition gives each client indices of examples.

    Raises:
      InputError: naming what is wrong.
    """
    if len(parts) != clients:
        raise InputError(f"partition: it returned {len(parts)} clients; needed: {clients}")
    for client, part in enumerate(parts):
        indices = np.asarray(part)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise InputError(f"partition: client {client} has no list of whole numbers")
        outside = indices[(indices < 0) | (indices >= examples)]
        if outside.size:
            raise InputError(
                f"partition: client {client} has example {outside[0]}; there are {examples}, from 0"
            )


def check_clients(examples: int, clients: int, min_size: int) -> None:
    """Check that a number of clients can own `min_size` examples each.

    Raises:
      InputError: if it cannot.
    """
    if clients < 1:
        raise InputError(f"clients: {clients} is not a number of clients; choose 1 or more")
    if examples < clients * min_size:
        raise InputError(
            f"clients: {examples} examples cannot give {clients} clients {min_size} each; "
            f"choose {examples // min_size} clients or fewer"
        )


def _redrawn(
    draw: Callable[[], Parts],
    min_size: int,
    examples: int,
    clients: int,
    setting: str,
) -> Parts:
    """Draw until every client has `min_size` of the examples.

    Raises:
      InputError: after `_PASSES` draws, naming the setting.
    """
    for _ in range(_PASSES):
        parts = draw()
        if min(map(len, parts)) >= min_size:
            return parts
    name, _, _ = setting.partition(" ")
    raise InputError(
        f"clients: {clients} clients with {setting} do not all reach {min_size} of {examples} examples in "
        f"{_PASSES} draws; choose fewer clients, a larger {flag(name)} or a smaller --min-examples"
    )


def _check_per_client(per_client: int, most: int, what: str) -> None:
    if not 1 <= per_client <= most:
        raise InputError(
            f"classes_per_client: {per_client} {what} per client, of {most}; "
            f"nearest valid value: {min(max(per_client, 1), most)}"
        )


def _label_owners(labels: int, clients: int, per_client: int, rng: RandomState) -> Bool[np.ndarray, "K L"]:
    # a random order, so that chance decides which labels have no owner
    order = rng.permutation(labels)
    position = np.arange(max(clients, labels))
    turn, client = np.divmod(position, clients)
    # the number `labels` marks an empty entry
    owned = np.full((clients, -(-len(position) // clients)), labels)
    owned[client, turn] = order[position % labels]
    owned = np.sort(owned[:, :per_client], axis=1)
    num_owned = (owned < labels).sum(axis=1)
    draw = _draw_together
    if clients <= MOST_DRAWN_APART:
        draw = _draw_apart
    drawn = draw(labels, labels - num_owned, per_client - num_owned, per_client, rng)
    # `drawn` counts only labels that the client does not own yet; in ascending order,
    # each owned label shifts the later ones by one
    for label in owned.T:
        drawn += drawn >= label[:, None]
    # the last column takes the empty entries
    owns = np.zeros((clients, labels + 1), bool)
    for labels_of_client in (owned, np.minimum(drawn, labels)):
        np.put_along_axis(owns, labels_of_client, True, axis=1)
    return owns[:, :labels]


def _draw_apart(
    labels: int,
    free: Int[np.ndarray, " K"],
    num_drawn: Int[np.ndarray, " K"],
    most: int,
    rng: RandomState,
) -> Int[np.ndarray, "K most"]:
    """Draw for each client `num_drawn` of its first `free` numbers, client after client.

    Empty entries have the number `labels`.
    """
    drawn = np.full((len(free), most), labels)
    for row, numbers, count in zip(drawn, free.tolist(), num_drawn.tolist(), strict=True):
        row[:count] = rng.permutation(numbers)[:count]
    return drawn


def _draw_together(
    labels: int,
    free: Int[np.ndarray, " K"],
    num_drawn: Int[np.ndarray, " K"],
    most: int,
    rng: RandomState,
) -> Int[np.ndarray, "K most"]:
    """Draw as `_draw_apart`, for all clients at once and so with other results.

    Each row takes the first steps of a shuffle (Fisher and Yates).
    """
    client = np.arange(len(free))
    deck = np.tile(np.arange(labels), (len(free), 1))
    for i in range(most):
        # at least 1: a row whose numbers have run out swaps an entry with itself
        remaining = np.maximum(free - i, 1)
        j = np.minimum(i + (rng.random_sample(len(free)) * remaining).astype(int), labels - 1)
        deck[client, i], deck[client, j] = deck[client, j], deck[client, i]
    return np.where(np.arange(most) < num_drawn[:, None], deck[:, :most], labels)


def split_at(values: np.ndarray, sizes: Int[np.ndarray, " n"]) -> list[np.ndarray]:
    """Split values into parts of these sizes; `np.split` would take microseconds per part."""
    ends = np.cumsum(sizes).tolist()
    return [values[start:end] for start, end in itertools.pairwise([0, *ends])]


def even(examples: int, parts: int) -> Int64[np.ndarray, " parts"]:
    """Return sizes of equal parts, the first ones larger by one if there is a remainder."""
    return examples // parts + (np.arange(parts) < examples % parts)


def _classes(labels: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each class."""
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


# indices of a class, and the owner of each
_Owned = tuple[np.ndarray, np.ndarray]


def _evenly(members: np.ndarray, owners: np.ndarray) -> _Owned:
    return members, np.repeat(owners, even(len(members), len(owners)))


def _dirichlet_draw(
    labels: np.ndarray,
    clients: int,
    alpha: float,
    rng: RandomState,
) -> Parts:
    """Draw a partition, in which clients may have fewer than the minimum of examples."""
    sizes = np.zeros(clients, np.int64)
    owned: list[_Owned] = []
    for members in _classes(labels):
        members = rng.permutation(members)
        # as in FPPL's release, clients that have their fair share get nothing more
        shares = _shares(sizes < len(labels) / clients, alpha, rng)
        # truncated like the release's; the last client gets the rest
        cuts = (np.cumsum(shares) * len(members)).astype(np.int64)[:-1]
        counts = np.diff(cuts, prepend=0, append=len(members))
        sizes += counts
        owned.append((members, np.repeat(np.arange(clients), counts)))
    return _by_owner(owned, clients)


def _shares(
    below: np.ndarray,
    alpha: float,
    rng: RandomState,
) -> Float[np.ndarray, " K"]:
    """Draw Dirichlet shares for the clients `below` their fair share, of which there is one."""
    # for all clients, also those that get nothing: the release draws so, and what
    # follows in the stream would otherwise change
    shares = np.where(below, rng.dirichlet(np.repeat(alpha, len(below))), 0.0)
    total = shares.sum()
    if math.isfinite(total) and total > 0:
        return shares / total
    # A tiny alpha underflows to all zeros; there the release divides by zero. The limit
    # is one random client.
    return np.eye(len(below))[rng.choice(np.flatnonzero(below))]


def _by_owner(owned: list[_Owned], clients: int) -> Parts:
    members, owners = (np.concatenate(part) for part in zip(*owned, strict=True))
    # stable, so that a client's examples keep their order
    ordered = members[np.argsort(owners, kind="stable")]
    return split_at(ordered, np.bincount(owners, minlength=clients))


def _shuffled(parts: Parts, rng: RandomState) -> Parts:
    return [rng.permutation(part.astype(np.int64)) for part in parts]
