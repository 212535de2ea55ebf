"""Private streams: what each client learns in each task where clients do not share
their examples.

All clients may have the same tasks, of which each gets its part (VFCL, appendix A.1),
or each draws tasks from a pool in an order of its own (FedWeIT's benchmarks
Overlapped-CIFAR100 and NonIID-50). Labels are positions in the class order; indices are
positions in the `labels` that were given.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from fcljax.data.partition import check_clients, even
from fcljax.errors import InputError
from fcljax.options import option

PoolKind = Literal["order", "superclasses", "sources"]
Pool = list[Int64[np.ndarray, " _"]]  # the classes of each task


@dataclasses.dataclass(frozen=True)
class Private:
    """A stream of tasks for each client, of examples that no other client has (VFCL)."""

    task_pool: str | object = "same"
    """Tasks that private streams draw from: the same for all; neighbours in the class
    order (order); CIFAR-100's superclasses; or neighbours within one data set of a
    mixture (sources)."""
    population: ClassVar[str] = "static"


@dataclasses.dataclass(frozen=True)
class SameTasks:
    """All clients have the same tasks, each with a share of the classes (VFCL, A.1)."""

    category_ratio: float = option(0.5, positive=True, most=1.0)
    """Fraction kappa of a task's classes that a client has."""


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """A task is made of neighbours in the class order."""

    task_pool_classes: int = 5
    """Classes per task in the pool of private streams."""

    def pool(self, names: Sequence[str], sources: Int[np.ndarray, " C"]) -> Pool:
        """Return the classes of each task, of classes with these names from these data
        sets."""
        return split_pool("order", names, sources, self.task_pool_classes, 0)


@dataclasses.dataclass(frozen=True)
class Superclasses:
    """A task is one of CIFAR-100's superclasses (Overlapped-CIFAR100)."""

    def pool(self, names: Sequence[str], sources: Int[np.ndarray, " C"]) -> Pool:
        """Return the classes of each task, of classes with these names from these data
        sets."""
        return split_pool("superclasses", names, sources, 5, 0)


@dataclasses.dataclass(frozen=True)
class WithinSources:
    """A task is made of neighbours within one data set of a mixture (NonIID-50)."""

    task_pool_classes: int = 5
    """Classes per task in the pool of private streams."""
    task_pool_limit: int = option(0, least=0, unset="all that fit")
    """Maximum number of tasks per source in the pool of private streams."""

    def pool(self, names: Sequence[str], sources: Int[np.ndarray, " C"]) -> Pool:
        """Return the classes of each task, of classes with these names from these data
        sets."""
        return split_pool("sources", names, sources, self.task_pool_classes, self.task_pool_limit)


# CIFAR-100's twenty superclasses, in the order of their names, by the names of their
# classes
SUPERCLASSES = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles 2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}


def split_pool(
    kind: PoolKind,
    names: Sequence[str],
    sources: Int[np.ndarray, " C"],
    size: int,
    most: int,
) -> Pool:
    """Return the classes of each task of a pool.

    Args:
      kind: order, neighbours in the class order; superclasses, CIFAR-100's; sources,
        neighbours that belong to the same data set of a mixture.
      names: of the classes, in the class order.
      sources: the data set of each class.
      size: classes of a task; leftover classes are unused. Superclasses have five.
      most: most tasks of one data set; 0: all.

    Raises:
      InputError: if no task can be made.
    """
    if kind == "superclasses":
        position = {name: i for i, name in enumerate(names)}
        problem = "no class has a name of CIFAR-100's"
        groups = [
            [position[name] for name in members if name in position] for members in SUPERCLASSES.values()
        ]
        pool = [np.sort(group) for group in groups if group]
    else:
        # one group unless tasks must stay within a data set
        source = 0 * sources
        if kind == "sources":
            source = sources
        problem = f"there are fewer than {size} classes"
        pool = []
        for number in np.unique(source):
            classes = np.flatnonzero(source == number)
            # a task of fewer classes than the others would be padded, so the rest is
            # left out
            ends = range(size, len(classes) + 1, size)[: most or None]
            pool += [classes[end - size : end] for end in ends]
    if not pool:
        raise InputError(
            f"task_pool: {kind!r} gives no task, because {problem}; nearest: --task-pool order with fewer "
            "--task-pool-classes"
        )
    return [task.astype(np.int64) for task in pool]


class Stream(NamedTuple):
    """The classes and examples of one client, task by task.

    The client skips tasks without classes."""

    classes: tuple[Int64[np.ndarray, " _"], ...]  # of each task
    # the client's examples of each task
    indices: tuple[Int64[np.ndarray, " _"], ...]


def shared_streams(
    labels: Int[np.ndarray, " N"],
    tasks: Sequence[Int[np.ndarray, " _"]],
    clients: int,
    share: float,
    rng: np.random.RandomState,
) -> list[Stream]:
    """Draw private streams through the same tasks (VFCL, appendix A.1).

    Each task goes to a random number of random clients, each of which draws a share of
    its classes. The examples of a class are divided among its owners, so that no
    example belongs to two clients; those of classes that no client drew are unused.

    Args:
      labels: of all training examples.
      tasks: the classes of each task.
      clients: number of clients K.
      share: share of a task's classes that one client draws, at least one class.
      rng: draws task by task the number of clients, the clients and their classes; then
        the owner of each example.

    Raises:
      InputError: for less than one client, or a class with fewer examples than owners.
    """
    check_clients(len(labels), clients, 0)
    by_task = [_drawn_classes(classes, clients, share, rng) for classes in tasks]
    return _streams(list(zip(*by_task, strict=True)), labels, rng)


def own_streams(
    labels: Int[np.ndarray, " N"],
    pool: Sequence[Int[np.ndarray, " _"]],
    clients: int,
    tasks: int,
    rng: np.random.RandomState,
) -> list[Stream]:
    """Draw each client's tasks from a pool, in random order (FedWeIT; VFCL, F.1).

    If the pool has enough tasks, no task goes to two clients (NonIID-50). Else clients
    draw independently, and the examples of a class are divided among its owners
    (Overlapped-CIFAR100).

    Args:
      labels: of all training examples.
      pool: the classes of each task.
      clients: number of clients K.
      tasks: T, of each client.
      rng: draws the order of the pool, or client by client its tasks, and then the owner
        of each example.

    Raises:
      InputError: for less than one client, more tasks than the pool has, or a class with
        fewer examples than owners.
    """
    check_clients(len(labels), clients, 0)
    if not 1 <= tasks <= len(pool):
        raise InputError(
            f"tasks: a client cannot draw {tasks} tasks from a pool of {len(pool)}; nearest: {len(pool)}"
        )
    # enough for all: no task goes to two clients, so that they share nothing (NonIID-50)
    if clients * tasks <= len(pool):
        order = rng.permutation(len(pool))[: clients * tasks].reshape(clients, tasks)
    else:
        order = np.stack([rng.permutation(len(pool))[:tasks] for _ in range(clients)])
    return _streams([[pool[task] for task in client_tasks] for client_tasks in order], labels, rng)


def _drawn_classes(
    classes: np.ndarray, clients: int, share: float, rng: np.random.RandomState
) -> list[np.ndarray]:
    """Draw the classes of one task for each client; none for some clients."""
    # between one client and all of them
    participants = rng.permutation(clients)[: rng.randint(1, clients + 1)]
    count = max(1, round(share * len(classes)))
    drawn = [classes[:0]] * clients
    # in the order of ids: who draws when decides who gets which classes
    for client in np.sort(participants):
        drawn[client] = np.sort(rng.choice(classes, count, replace=False))
    return drawn


def _streams(
    owned: Sequence[Sequence[np.ndarray]], labels: np.ndarray, rng: np.random.RandomState
) -> list[Stream]:
    """Return the streams of clients that own these classes, `[client][task]`, each at
    most once."""
    all_classes = np.arange(labels.max() + 1)
    owns = np.array([np.isin(all_classes, np.concatenate(client_classes)) for client_classes in owned])
    parts = {}
    # a class of several tasks counts once: its examples are divided once
    for label in np.flatnonzero(owns.any(axis=0)):
        members = np.flatnonzero(labels == label)
        owners = np.flatnonzero(owns[:, label])
        # an owner without examples would be a client that never trains
        if len(members) < len(owners):
            raise InputError(
                f"clients: {len(owners)} clients own a class with {len(members)} examples; "
                "choose fewer clients"
            )
        shares = np.split(rng.permutation(members), np.cumsum(even(len(members), len(owners)))[:-1])
        parts |= {(owner, label): part for owner, part in zip(owners, shares, strict=True)}
    no_examples = np.empty(0, np.int64)
    return [
        Stream(
            tuple(client_classes),
            tuple(
                np.concatenate([no_examples, *(parts[client, label] for label in task)])
                for task in client_classes
            ),
        )
        for client, client_classes in enumerate(owned)
    ]
