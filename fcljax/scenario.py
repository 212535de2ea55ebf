"""Client partitions and the task schedule of a run: the training examples of each client in every round."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int64

from fcljax.config import PartitionConfig
from fcljax.data.files.dataset import Dataset
from fcljax.data.owners import find_owners
from fcljax.data.partition import (
    Sample,
    count_matrix,
    dirichlet,
    first_share,
    iid,
    quantity,
    sample_client,
    shards,
)
from fcljax.data.store import ClientIndices, client_indices, merge
from fcljax.data.streams import own_streams, pool_of, shared_streams
from fcljax.data.tasks import (
    chosen_sizes,
    class_order,
    listed_order,
    make_tasks,
    python_order,
    relabel,
    tasks_of,
    tasks_of_sizes,
)
from fcljax.errors import InputError, Value
from fcljax.federated.schedule import ClientPartition
from fcljax.files import read_text
from fcljax.options import replaced
from fcljax.settings import is_owned
from fcljax.types import Task

ORDER_BYTES = 1 << 22  # of a file of classes


class Scenario(NamedTuple):
    """The task schedule and the client partitions of a run. Labels are positions in the class order."""

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]  # where clients have streams of their own, with the classes of all clients
    partitions: list[list[ClientPartition]]  # [task][round]
    holdings: Int[np.ndarray, "K C"]  # training examples per client and class, over all rounds if redrawn

    def current(self, task: int, client: int) -> Bool[np.ndarray, " C"]:
        """The classes of a task, or of the client's own task if it has a stream of its own."""
        own = self.partitions[task][0].task
        return np.asarray(own.current[client] if own else self.tasks[task].current)

    def learned(self, task: int) -> Bool[np.ndarray, "K C"]:
        """The classes of which each client has had examples by the end of a task."""
        partitions = [partition for of_task in self.partitions[: task + 1] for partition in of_task]
        return np.any([partition.class_examples > 0 for partition in partitions], axis=0)


def make_scenario(dataset: Dataset, options: PartitionConfig, rounds: int, joint: bool) -> Scenario:
    """The scenario of a simulation, in which all training examples are assigned to clients.

    Args:
      dataset: the examples.
      options: how to assign them.
      rounds: of every task.
      joint: whether all tasks' classes come at once, as one task.

    Raises:
      InputError: for options that the data set cannot meet.
    """
    assigned = assign(dataset, options, rounds)
    if joint:
        assigned = _joint(assigned, len(dataset.class_names))
    label, tasks, classes = assigned.train_label, assigned.tasks, len(dataset.class_names)
    # a static population has one partition for all rounds of a task
    drawn = 1 if options.population == "static" else rounds
    partitions, holdings = [], np.zeros((options.clients, classes), np.int32)
    for t, own in enumerate(assigned.own or (None,) * len(tasks)):
        of_task = []
        for r in range(drawn):
            owned = assigned.indices(t, r)
            counts = _counts(owned, label, classes)
            reported = assigned.reported(t, r) if assigned.reported else counts
            of_task.append(ClientPartition(*owned, reported, own))
            holdings = holdings + counts
        partitions.append(of_task * (rounds // drawn))
    return Scenario(label, assigned.test_label, tasks, partitions, holdings)


def scenario_of_counts(
    dataset: Dataset, options: PartitionConfig, rounds: int, joint: bool, counts: Int[np.ndarray, "T K"]
) -> Scenario:
    """The scenario of a server without training examples, which knows how many examples clients report for
    each task, but neither their indices nor their classes."""
    order, tasks = _schedule(dataset, options, joint)
    none = np.zeros((options.clients, len(order)), np.int32)

    def partition(count: Int[np.ndarray, " K"]) -> ClientPartition:
        return ClientPartition(np.zeros(int(count.sum()), np.int32), np.cumsum([0, *count]), none)

    partitions = [[partition(count)] * rounds for count in counts]
    train_label, test_label = relabel(dataset.y_train, order), relabel(dataset.y_test, order)
    return Scenario(train_label, test_label, tasks, partitions, none)


def scenario_of_one(
    dataset: Dataset, options: PartitionConfig, rounds: int, joint: bool, client: int
) -> Scenario:
    """The scenario of a client with data of its own: it has all training examples, each in the task of its
    class."""
    order, tasks = _schedule(dataset, options, joint)
    label, test_label = relabel(dataset.y_train, order), relabel(dataset.y_test, order)
    parts = [np.empty(0, np.int32)] * options.clients
    parts[client] = np.arange(len(label), dtype=np.int32)
    owned = [client_indices(parts, label, task) for task in tasks]
    counts = [_counts(each, label, len(order)) for each in owned]
    partitions = [[ClientPartition(*each, count)] * rounds for each, count in zip(owned, counts, strict=True)]
    return Scenario(label, test_label, tasks, partitions, functools.reduce(np.add, counts))


def _schedule(dataset: Dataset, options: PartitionConfig, joint: bool) -> tuple[np.ndarray, tuple[Task, ...]]:
    """The class order, and the tasks that all clients share."""
    order = _class_order(dataset, options, np.random.RandomState(options.seed))
    return order, make_tasks(len(order), 1) if joint else _tasks(len(order), options)


def _tasks(classes: int, options: PartitionConfig) -> tuple[Task, ...]:
    return tasks_of_sizes(_sizes(classes, options))


def _sizes(classes: int, options: PartitionConfig) -> tuple[int, ...]:
    numbers = options.base_classes or None, options.classes_per_task or None
    return chosen_sizes(classes, options.tasks, *numbers, options.task_sizes or None)


def fitted(options: Value, dataset: Dataset) -> Value:
    """Options with the numbers of clients and tasks that a partition of the user's own and the sizes of tasks
    decide.

    Raises:
      InputError: for a partition or sizes that do not fit the data set.
    """
    assert isinstance(options, PartitionConfig)
    clients, tasks = options.clients, options.tasks
    if is_owned(options.partition):
        clients = len(find_owners(dataset, options.partition).names)
    if options.classes_per_task or options.task_sizes:
        tasks = len(_sizes(len(dataset.class_names), options))
    return replaced(options, clients=clients, tasks=tasks)


def _counts(owned: ClientIndices, label: np.ndarray, classes: int) -> np.ndarray:
    return count_matrix(label, owned.by_client(), classes).astype(np.int32)


# ---- assigning examples to clients -------------------------------------------------------------------------


class Assignment(NamedTuple):
    """The training examples of each client in every round. Labels are positions in the class order."""

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]
    # (task, round) -> the task's training examples of each client in that round
    indices: Callable[[int, int], ClientIndices]
    # (task, round) -> examples of each class [K, C] that clients report, if they differ from those they have
    reported: Callable[[int, int], np.ndarray] | None = None
    # each client's own tasks, leaves [K, ...], if clients do not share the tasks
    own: tuple[Task, ...] = ()


def assign(dataset: Dataset, options: PartitionConfig, rounds: int = 1) -> Assignment:
    """Assign the training examples to clients and tasks.

    The class order and the partition of a static population come from one legacy numpy stream, in this order,
    as in FPPL's release (specification section 6). A partition by task is drawn task after task; the natural
    class order draws nothing. `dirichlet` and `iid` split the whole training set, and a task uses its own
    examples.

    A static population has the same examples in every round of a task. A redrawn one has a new partition in
    each round, which depends on (seed, task, round) alone and is drawn when `Assignment.indices` is called.
    In an independent one a partition is drawn for each client, who takes its part of it, as in PILoRA's
    release: clients may share examples, and some examples belong to no client. Sampled clients depend on
    (seed, task, round, client), as HePCo's release draws them. Private streams (`streams.py`) continue the
    legacy stream.

    Args:
      dataset: the examples.
      options: how to assign them.
      rounds: of every task; the seeds of sampled clients depend on it.

    Raises:
      InputError: for options that the data set cannot meet. For a redrawn population, `Assignment.indices`
        raises what its partition does.
    """
    stream = np.random.RandomState(options.seed)
    classes = len(dataset.class_names)
    order = _class_order(dataset, options, stream)
    used = first_share(dataset.y_train, options.train_share)
    if options.partition == "private":
        return _private(dataset, options, order, used, stream)
    label, test_label = relabel(dataset.y_train, order), relabel(dataset.y_test, order)
    tasks, reported = _tasks(classes, options), None
    available = [used if _is_whole(options) else used[task.current[label[used]]] for task in tasks]
    if options.partition == "sampled":
        sampled = _sampled_clients(dataset, options, available, rounds)
        drawn = _indices_of(sampled)
        if options.long_tail == "reported":
            reported = _reported_classes(sampled, relabel(np.arange(classes), order))
    elif options.population == "redrawn":
        drawn = _redrawn(dataset, options, available)
    elif options.population == "independent":
        drawn = _independent(dataset, options, available)
    else:
        drawn = _static(dataset, options, available, stream)

    def indices(task: int, round_: int) -> ClientIndices:
        return client_indices(drawn(task, round_), label, tasks[task])

    return Assignment(label, test_label, tasks, indices, reported)


Drawn = Callable[[int, int], list[np.ndarray]]
"""(task, round) -> the indices of each client's examples."""


def _is_whole(options: PartitionConfig) -> bool:
    """Whether the partition splits the whole training set at once, and not task by task."""
    return options.partition in ("dirichlet", "iid")


def _parts(
    dataset: Dataset, options: PartitionConfig, mine: np.ndarray, rng: np.random.RandomState
) -> list[np.ndarray]:
    """Each client's share of the examples `mine`."""
    return [mine[part] for part in _split(dataset.y_train[mine], options, rng)]


def _sampled_clients(
    dataset: Dataset, options: PartitionConfig, available: list[np.ndarray], rounds: int
) -> Callable[[int, int], list[Sample]]:
    """HePCo's clients of a round."""

    def sampled(task: int, round_: int) -> list[Sample]:
        return _sampled(dataset.y_train, available[task], options, (task, round_, rounds))

    return sampled


def _indices_of(sampled: Callable[[int, int], list[Sample]]) -> Drawn:
    def drawn(task: int, round_: int) -> list[np.ndarray]:
        return [sample.indices for sample in sampled(task, round_)]

    return drawn


def _reported_classes(
    sampled: Callable[[int, int], list[Sample]], position: np.ndarray
) -> Callable[[int, int], np.ndarray]:
    """The class counts that sampled clients report, by position in the class order."""

    def reported(task: int, round_: int) -> np.ndarray:
        return _reported(sampled(task, round_), position)

    return reported


def _redrawn(dataset: Dataset, options: PartitionConfig, available: list[np.ndarray]) -> Drawn:
    """A new partition in each round."""

    def drawn(task: int, round_: int) -> list[np.ndarray]:
        rng = np.random.RandomState([options.seed, task, round_])
        return _parts(dataset, options, available[task], rng)

    return drawn


def _independent(dataset: Dataset, options: PartitionConfig, available: list[np.ndarray]) -> Drawn:
    """A partition for each client, who takes its own part of it."""

    def drawn(task: int, round_: int) -> list[np.ndarray]:
        rngs = (
            np.random.RandomState([options.seed, task, round_, client]) for client in range(options.clients)
        )
        return [_parts(dataset, options, available[task], rng)[client] for client, rng in enumerate(rngs)]

    return drawn


def _static(
    dataset: Dataset, options: PartitionConfig, available: list[np.ndarray], stream: np.random.RandomState
) -> Drawn:
    """The same examples in every round of a task.

    Raises:
      InputError: where a file or column of owners has another number of clients.
    """
    if is_owned(options.partition):
        owned = find_owners(dataset, options.partition).parts()
        if len(owned) != options.clients:
            raise InputError(
                f"clients: {options.partition!r} has {len(owned)} clients, not {options.clients}"
            )
        used = first_share(dataset.y_train, options.train_share)
        static = [[np.intersect1d(part, used) for part in owned]] * len(available)
    elif _is_whole(options):
        static = [_parts(dataset, options, available[0], stream)] * len(available)
    else:
        static = [_parts(dataset, options, mine, stream) for mine in available]

    def drawn(task: int, round_: int) -> list[np.ndarray]:
        del round_
        return static[task]

    return drawn


def _joint(assigned: Assignment, classes: int) -> Assignment:
    """The same examples, with all tasks as one.

    Raises:
      InputError: for private streams.
    """
    if assigned.own:
        raise InputError(
            "partition: 'private' assigns examples by task, and a joint run has one task; nearest: 'iid'"
        )
    every, reported = range(len(assigned.tasks)), assigned.reported

    def indices(_: int, round_: int) -> ClientIndices:
        return merge([assigned.indices(task, round_) for task in every])

    def all_reported(_: int, round_: int) -> np.ndarray:
        assert reported is not None
        return np.sum([reported(task, round_) for task in every], axis=0)

    return assigned._replace(
        tasks=make_tasks(classes, 1), indices=indices, reported=all_reported if reported else None
    )


def _private(
    dataset: Dataset,
    options: PartitionConfig,
    order: np.ndarray,
    used: np.ndarray,
    rng: np.random.RandomState,
) -> Assignment:
    """Private streams: of shared tasks, or of tasks that each client draws from a pool."""
    label, test_label, classes = relabel(dataset.y_train, order), relabel(dataset.y_test, order), len(order)
    if options.task_pool == "same":
        tasks = _tasks(classes, options)
        shared = [np.flatnonzero(task.current) for task in tasks]
        share = options.category_ratio or 0.5
        streams = shared_streams(label[used], shared, options.clients, share, rng)
    else:
        names, sources = [dataset.class_names[i] for i in order], np.asarray(dataset.sources or 0 * order)
        size = options.task_pool_classes
        pool = pool_of(options.task_pool, names, sources[order], size, options.task_pool_limit)
        streams = own_streams(label[used], pool, options.clients, options.tasks, rng)
        of_tasks = zip(*(stream.classes for stream in streams), strict=True)
        tasks = tasks_of([np.unique(np.concatenate(each)) for each in of_tasks], classes)
    own = [tasks_of(stream.classes, classes) for stream in streams]

    def indices(task: int, round_: int) -> ClientIndices:
        del round_
        return client_indices([used[stream.indices[task]] for stream in streams], label, tasks[task])

    stacked = tuple(map(_stacked, tasks, zip(*own, strict=True)))
    return Assignment(label, test_label, tasks, indices, own=stacked)


def _stacked(shared: Task, own: tuple[Task, ...]) -> Task:
    """A task of every client, leaves [K, ...]. All clients have the run's class positions, so that their
    reports can be added up; `current` and `seen` say which classes are the client's."""

    def repeated(leaf: Array | np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.asarray(leaf), (len(own), *np.shape(leaf)))

    current, seen = (np.stack([getattr(task, name) for task in own]) for name in ("current", "seen"))
    return Task.of_numpy(repeated(shared.index), repeated(shared.classes), current, seen)


def _class_order(dataset: Dataset, options: PartitionConfig, stream: np.random.RandomState) -> np.ndarray:
    """The class order. Only the shuffled one draws from the stream."""
    classes, kind = len(dataset.class_names), options.class_order
    if kind.startswith("file:"):
        return listed_order(dataset.class_names, _lines(kind.removeprefix("file:")))
    if "," in kind:
        return listed_order(dataset.class_names, [name.strip() for name in kind.split(",")])
    match kind:
        case "natural":
            return np.arange(classes)
        case "python":
            return python_order(classes, options.seed)
        case _:
            return class_order(classes, stream)


def _lines(path: str) -> list[str]:
    """The lines of a file of classes."""
    try:
        text = read_text(path, ORDER_BYTES)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"class_order: cannot read {path!r}: {why}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _sampled(
    labels: np.ndarray, mine: np.ndarray, options: PartitionConfig, when: tuple[int, int, int]
) -> list[Sample]:
    """The clients of one round, with the seeds of HePCo's release (specification 6.3).

    Args:
      labels: of all training examples.
      mine: indices of the task's examples.
      options: how clients are drawn.
      when: task, round, and rounds of a task.
    """
    task, round_, rounds = when
    first = 1 + options.clients * (round_ + rounds * task) + 2000 * options.seed
    draw = functools.partial(
        sample_client,
        labels[mine],
        split=options.split_ratio,
        category=options.category_ratio or 0.6,
        imbalance=options.imbalance,
        applied=options.long_tail == "applied",
    )
    drawn = [draw(seed=(first + client) % 2**32) for client in range(options.clients)]
    return [sample._replace(indices=mine[sample.indices]) for sample in drawn]


def _reported(drawn: list[Sample], position: np.ndarray) -> np.ndarray:
    """How many examples of each class sampled clients report, by position in the class order."""
    counts = np.zeros((len(drawn), len(position)), np.int32)
    for client, sample in enumerate(drawn):
        for label, count in sample.reported.items():
            counts[client, position[label]] = count
    return counts


def _split(labels: np.ndarray, options: PartitionConfig, rng: np.random.RandomState) -> list[np.ndarray]:
    match options.partition:
        case "iid":
            return iid(labels, options.clients, rng, options.min_examples)
        case "quantity":
            return quantity(labels, options.clients, options.classes_per_client, rng)
        case "shards":
            return shards(labels, options.clients, options.classes_per_client, rng)
        case _:
            return dirichlet(labels, options.clients, options.alpha, rng, options.min_examples)
