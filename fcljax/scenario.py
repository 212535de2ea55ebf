"""Client partitions and the task schedule: each client's training examples in every round."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int64

from fcljax.choices import chosen
from fcljax.data.attendance import AWAY, attendance, changes
from fcljax.data.files.dataset import Dataset, natural_order
from fcljax.data.order_files import read_order
from fcljax.data.owners import find_column, find_owners, read_tasks, says_tasks
from fcljax.data.partition import Partition, check_parts, first_share
from fcljax.data.sampled import Sample, Sampled, reported_counts
from fcljax.data.store import ClientIndices, client_indices, merge
from fcljax.data.streams import Private, SameTasks, own_streams, shared_streams
from fcljax.data.task_schedule import (
    PURPOSE,
    ByClass,
    ByColumn,
    TaskSchedule,
    blurred,
    by_class,
    by_domain,
    tasks_of_examples,
)
from fcljax.data.tasks import (
    class_order,
    listed_order,
    make_tasks,
    python_order,
    relabel,
    tasks_of,
)
from fcljax.errors import InputError, Value
from fcljax.federated.schedule import ClientPartition
from fcljax.options import fields_of, replaced
from fcljax.settings import PartitionConfig, is_owned
from fcljax.types import Task

ORDER_BYTES = 1 << 22  # most bytes of a file that lists classes
# In seeds, the purpose of a draw: online streams draw from (seed, 35, task, client),
# which no other draw of the run does.
ONLINE = 35


class Scenario(NamedTuple):
    """The task schedule and the client partitions of a run.

    Labels are positions in the class order.
    """

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]
    """Of the run; where clients have their own tasks, with the classes of all clients."""
    partitions: list[list[ClientPartition]]
    """Indexed by `[task][round]`."""
    holdings: Int[np.ndarray, "K C"]
    """Training examples per client and class, over all rounds if they are redrawn."""
    test_task: Int[np.ndarray, " M"] | None = None
    """The task of each test example; None: a task tests its classes, which other tasks
    may test too (private streams)."""
    whole: tuple[ClientPartition, ...] = ()
    """[task]: the clients' examples of all rounds, for an online population."""

    def current(self, task: int, client: int | None = None) -> Bool[np.ndarray, " C"]:
        """Return the classes of a task, or those of the client's own task."""
        client_task = None
        if client is not None:
            client_task = self.partitions[task][0].task
        if client_task is None:
            return np.asarray(self.tasks[task].current)
        return np.asarray(client_task.current[client])

    def tests(self, task: int, client: int | None = None) -> Bool[np.ndarray, " M"]:
        """Return which test examples belong to a task, or to the client's own task."""
        if self.test_task is None:
            return self.current(task, client)[self.test_label]
        return self.test_task == task

    def tests_seen(self, task: int, client: int | None = None) -> Bool[np.ndarray, " M"]:
        """Return which test examples belong to a task or an earlier one."""
        return np.any([self.tests(t, client) for t in range(task + 1)], axis=0)

    def labels(self, dataset: Dataset) -> Int[np.ndarray, " C"]:
        """Return the label that each class has in the data set, in the class order of the run."""
        labels = np.zeros(len(dataset.class_names), int)
        # from both splits, since a class may be missing in one of them
        labels[self.test_label] = dataset.y_test
        labels[self.train_label] = dataset.y_train
        return labels

    def learned(self, task: int) -> Bool[np.ndarray, "K C"]:
        """Return the classes of which each client has had examples by the end of a task."""
        partitions = [partition for of_task in self.partitions[: task + 1] for partition in of_task]
        return np.any([partition.class_examples > 0 for partition in partitions], axis=0)


def make_scenario(
    dataset: Dataset,
    options: PartitionConfig,
    rounds: int,
    joint: bool,
) -> Scenario:
    """Assign all training examples to the clients of a simulation.

    Args:
      dataset: the examples.
      options: how to assign them.
      rounds: of every task.
      joint: whether all classes form one task.

    Raises:
      InputError: for options that the data set cannot meet.
    """
    assigned = assign(dataset, options, rounds)
    if joint:
        assigned = _joint(assigned, len(dataset.class_names))
    label = assigned.train_label
    tasks = assigned.tasks
    classes = len(dataset.class_names)
    online = options.population == "online"
    # a static population has one partition for all rounds of a task
    drawn_rounds = rounds
    if options.population == "static":
        drawn_rounds = 1
    partitions = []
    all_rounds = []
    holdings = np.zeros((options.clients, classes), np.int32)

    for t, client_tasks in enumerate(assigned.own or (None,) * len(tasks)):
        of_task = []
        for r in range(drawn_rounds):
            owned = assigned.indices(t, r)
            counts = _counts(owned, label, classes)
            # HePCo's release aggregates by numbers of examples that clients do not have
            reported = counts
            if assigned.reported:
                reported = assigned.reported(t, r)
            of_task.append(ClientPartition(*owned, reported, client_tasks))
            # redrawn rounds add up; a client that stays in an earlier task was counted
            # then
            holdings = holdings + assigned.newly(t)[:, None] * counts
        # the same object in all rounds, so that its tables are computed once
        partitions.append(of_task * (rounds // drawn_rounds))
        # an online client's statistics (class means, say) are of the whole task, not of
        # the first round's share of it
        if online:
            owned = merge([assigned.indices(t, r) for r in range(rounds)])
            all_rounds.append(ClientPartition(*owned, _counts(owned, label, classes), client_tasks))
        # without this error such a task would leave the model as it is, and nothing say
        # so
        if not any(len(partition.indices) for partition in of_task):
            raise InputError(f"partition: no client has examples of task {t + 1} of {len(tasks)}")
    test_label = assigned.test_label
    test_task = assigned.test_task
    return Scenario(label, test_label, tasks, partitions, holdings, test_task, tuple(all_rounds))


def scenario_of_counts(
    dataset: Dataset,
    options: PartitionConfig,
    rounds: int,
    joint: bool,
    counts: Int[np.ndarray, "T K"],
) -> Scenario:
    """Return the scenario of a server that only knows the clients' numbers of examples.

    Args:
      dataset: of the test examples.
      options: of the partition.
      rounds: of every task.
      joint: whether all classes form one task.
      counts: number of examples of each client in each task.
    """
    label, test_label, schedule = _schedule_apart(dataset, options, joint)
    # zeros for "not known": reports are not checked against them
    no_classes = np.zeros((options.clients, len(dataset.class_names)), np.int32)

    def partition(count: Int[np.ndarray, " K"]) -> ClientPartition:
        # the examples are elsewhere; only the length of each client's part is read
        indices = np.zeros(int(count.sum()), np.int32)
        return ClientPartition(indices, np.cumsum([0, *count]), no_classes)

    partitions = [[partition(count)] * rounds for count in counts]
    return Scenario(label, test_label, schedule.tasks, partitions, no_classes, schedule.test)


def scenario_of_one(
    dataset: Dataset, options: PartitionConfig, rounds: int, joint: bool, client: int
) -> Scenario:
    """Return the scenario of a client that has all training examples of its own data set."""
    label, test_label, schedule = _schedule_apart(dataset, options, joint)
    # the other clients have no examples
    parts = [np.empty(0, np.int32)] * options.clients
    parts[client] = np.arange(len(label), dtype=np.int32)
    owned = [client_indices(parts, schedule.train, task) for task in range(len(schedule.tasks))]
    counts = [_counts(task_indices, label, len(dataset.class_names)) for task_indices in owned]
    partitions = [
        [ClientPartition(*task_indices, count)] * rounds
        for task_indices, count in zip(owned, counts, strict=True)
    ]
    holdings = functools.reduce(np.add, counts)
    return Scenario(label, test_label, schedule.tasks, partitions, holdings, schedule.test)


def _labels(dataset: Dataset, options: PartitionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels of both splits as positions in the class order."""
    order = order_of_classes(dataset, options, np.random.RandomState(options.seed))
    return relabel(dataset.y_train, order), relabel(dataset.y_test, order)


def _schedule_apart(
    dataset: Dataset, options: PartitionConfig, joint: bool
) -> tuple[np.ndarray, np.ndarray, TaskSchedule]:
    """Return labels and task schedule where no process has the examples of all clients.

    Raises:
      InputError: for a schedule that needs all examples.
    """
    source = chosen("tasks_by", options)
    needs_all_examples = [
        ("tasks_by", isinstance(source, ByColumn)),
        ("blurry", isinstance(source, ByClass) and source.blurry > 0),
        ("new_clients", bool(options.new_clients)),
        ("move_on", options.move_on < 1),
        ("population", options.population == "online"),
    ]
    for name, is_chosen in needs_all_examples:
        if is_chosen:
            raise InputError(
                f"{name}: {getattr(options, name)!r} needs the examples of all clients, but these "
                "are on separate machines; leave it out"
            )
    label, test_label = _labels(dataset, options)
    classes = len(dataset.class_names)
    sizes = source.sizes(classes, options.tasks)
    if joint:
        sizes = (classes,)
    return label, test_label, by_class(sizes, label, test_label)


def _schedule(
    dataset: Dataset, options: PartitionConfig, label: np.ndarray, test_label: np.ndarray
) -> TaskSchedule:
    """Return the tasks and the task of each example.

    Raises:
      InputError: for a schedule that does not fit the data set.
    """
    classes = len(dataset.class_names)
    source = chosen("tasks_by", options)
    # a file with tasks decides; `_check_listed` refuses options that say otherwise
    if says_tasks(options.partition):
        _check_listed(options)
        return tasks_of_examples(read_tasks(options.partition, dataset), label, test_label, classes)
    if isinstance(source, ByColumn):
        column = str(options.tasks_by).partition(":")[2]
        problem = f"tasks_by: no column {column!r} of the {{}} examples"
        domain = find_column(column, dataset.columns, problem.format("training"), dataset)
        test_domain = find_column(column, dataset.columns_test, problem.format("test"), dataset)
        return by_domain(domain, test_domain, domains_of(dataset, options) or [], label, classes)
    schedule = by_class(source.sizes(classes, options.tasks), label, test_label)
    if not source.blurry:
        return schedule
    # a stream of its own: with `blurry` set, the partition still draws what it drew
    # without
    rng = np.random.RandomState([options.seed, PURPOSE])
    return blurred(schedule, label, source.blurry, source.disjoint, rng)


def domains_of(dataset: Dataset, options: PartitionConfig) -> list[str] | None:
    """Return the domains that are the tasks, in their order; None if tasks are of classes."""
    source = chosen("tasks_by", options)
    if not isinstance(source, ByColumn):
        return None
    if source.task_order:
        return [name.strip() for name in source.task_order.split(",")]
    # natural order: domain 2 before domain 10
    return natural_order(dataset.columns[str(options.tasks_by).partition(":")[2]])


def fit_partition(options: Value, dataset: Dataset) -> Value:
    """Set the numbers of clients and tasks that a user's partition or the sizes of tasks decide.

    Raises:
      InputError: for a partition or sizes that do not fit the data set.
    """
    assert isinstance(options, PartitionConfig)
    clients = options.clients
    tasks = options.tasks
    if is_owned(options.partition):
        clients = len(find_owners(dataset, options.partition).names)
    source = chosen("tasks_by", options)
    # the schedule needs every label, so it is made only where it decides the number of
    # tasks
    decided = isinstance(source, ByColumn) or source.classes_per_task or source.task_sizes
    if decided or says_tasks(options.partition):
        tasks = len(_schedule(dataset, options, *_labels(dataset, options)).tasks)
    return replaced(options, clients=clients, tasks=tasks)


def _check_listed(options: PartitionConfig) -> None:
    """Check that no option sets the tasks, which a partition's file lists.

    Raises:
      InputError: naming the first one that does.
    """
    source = chosen("tasks_by", options)
    names = ["tasks_by"]
    if not isinstance(source, ByColumn):
        names = [field.name for field in fields_of(ByClass) if getattr(source, field.name)]
    for name in names:
        # `disjoint` has no effect without `blurry`, and its default is not 0
        if name != "disjoint":
            raise InputError(
                f"{name}: {options.partition!r} has a column 'task', which decides; leave it out"
            )


def _counts(owned: ClientIndices, label: np.ndarray, classes: int) -> np.ndarray:
    return owned.class_counts(label, classes).astype(np.int32)


# ---- assigning examples to clients -----------------------------------------------------


class Assignment(NamedTuple):
    """The training examples of each client in every round.

    Labels are positions in the class order.
    """

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]
    indices: Callable[[int, int], ClientIndices]
    """indices(task, round) -> training examples of each client."""
    reported: Callable[[int, int], np.ndarray] | None = None
    """reported(task, round) -> number of examples per class [K, C] that clients report;
    None: the true numbers."""
    own: tuple[Task, ...] = ()
    """Tasks of each client, leaves [K, ...]; (): clients share the tasks."""
    test_task: Int[np.ndarray, " M"] | None = None
    """As of `Scenario`."""
    holds: Int[np.ndarray, "T K"] | None = None
    """The task whose examples each client has in each task; None: the same task."""

    def newly(self, task: int) -> Bool[np.ndarray, " K"] | np.ndarray:
        """Return which clients have the examples of this task, not of an earlier one."""
        # of length 1, which broadcasts over the clients
        if self.holds is None:
            return np.ones(1, bool)
        return self.holds[task] == task


def assign(dataset: Dataset, options: PartitionConfig, rounds: int = 1) -> Assignment:
    """Assign the training examples to clients and tasks.

    The class order and a static partition come from one legacy numpy stream, in this
    order, as in FPPL's release (specification section 6). A partition by task is drawn
    task after task; the natural class order draws nothing. `dirichlet` and `iid` split
    the whole training set, and a task uses its own examples.

        population    examples of a client
        static        the same in every round of a task
        redrawn       of a new partition in each round, drawn from (seed, task, round) when
                      `Assignment.indices` is called
        independent   its part of a partition that is drawn for this client, as in PILoRA's
                      release: clients may share examples, and some examples have no client

    Sampled clients are drawn from (seed, task, round, client), as in HePCo's release.
    Private streams (`streams.py`) continue the legacy stream.

    Args:
      dataset: the examples.
      options: how to assign them.
      rounds: of every task; the seeds of sampled clients depend on it.

    Raises:
      InputError: for options that the data set cannot meet. For a redrawn population
        `Assignment.indices` raises the errors of its partition.
    """
    # RandomState, not a Generator: the releases draw from this legacy stream, and the
    # same calls in the same order give their partitions
    stream = np.random.RandomState(options.seed)
    order = order_of_classes(dataset, options, stream)
    # before the partition's draws, which divide this share alone
    used = first_share(dataset.y_train, options.train_share)
    partition = chosen("partition", options)
    # each client has its own tasks, so there is no schedule to share
    if isinstance(partition, Private):
        return _private(dataset, options, partition, order, used, stream)
    label = relabel(dataset.y_train, order)
    test_label = relabel(dataset.y_test, order)
    schedule = _schedule(dataset, options, label, test_label)
    data = _Data(dataset, options, partition, schedule, used, rounds)
    # sampled clients have their own seeds, and never read the stream
    if isinstance(partition, Sampled):
        indices_of = data.sampled
    elif options.population in ("redrawn", "independent"):
        indices_of = getattr(data, options.population)
    else:
        indices_of = data.static(stream)

    def indices(task: int, round_: int) -> ClientIndices:
        return client_indices(indices_of(task, round_), schedule.train, task)

    assigned = Assignment(label, test_label, schedule.tasks, indices, test_task=schedule.test)
    if isinstance(partition, Sampled) and partition.long_tail == "reported":
        position = relabel(np.arange(len(order)), order)

        def reported(task: int, round_: int) -> np.ndarray:
            return reported_counts(data.samples(task, round_), position)

        assigned = assigned._replace(reported=reported)
    # attendance decides which clients have a task, not how it is divided
    if changes(options):
        assigned = _attended(assigned, data.holds)
    if options.population == "online":
        return _online(assigned, options, rounds)
    return assigned


class _Data(NamedTuple):
    """The inputs of a partition."""

    dataset: Dataset
    options: PartitionConfig
    partition: Any
    """A `Partition`, or `Sampled`, or owners."""
    schedule: TaskSchedule
    used: Int[np.ndarray, " n"]
    """Indices of the training examples that are used."""
    rounds: int

    @property
    def holds(self) -> Int[np.ndarray, "T K"]:
        """Return the task whose examples each client has in each task."""
        return attendance(self.options, len(self.schedule.tasks))

    @property
    def all_tasks(self) -> bool:
        """Return whether one partition divides the examples of all tasks."""
        return getattr(self.partition, "all_tasks", False)

    def of_task(self, task: int) -> np.ndarray:
        """Return the indices of the examples that a partition of the task assigns."""
        if self.all_tasks:
            return self.used
        return self.used[self.schedule.train[self.used] == task]

    def parts(self, task: int, rng: np.random.RandomState) -> ClientIndices:
        """Draw a partition of a task, or of all tasks."""
        rows = self.of_task(task)
        clients = np.arange(self.options.clients)
        # With clients that come and go, a task is divided among those that have it. A
        # partition of all tasks is drawn once, for everybody who will ever join.
        if changes(self.options) and not self.all_tasks:
            clients = np.flatnonzero(self.holds[task] == task)
        divide: Partition = self.partition
        parts = divide(self.dataset.y_train[rows], len(clients), rng)
        # the partition may be a user's function
        check_parts(parts, len(clients), len(rows))
        owned = ClientIndices.of(parts)
        # from positions among the clients that have the task to ids: the others get none
        sizes = np.zeros(self.options.clients, np.int64)
        sizes[clients] = np.diff(owned.offset)
        offset = np.concatenate([[0], np.cumsum(sizes)])
        return ClientIndices(rows[owned.indices].astype(np.int32), offset)

    def samples(self, task: int, round_: int) -> list[Sample]:
        """Return HePCo's clients of a round."""
        # HePCo's release draws by (task, round) and the number of rounds
        time = task, round_, self.rounds
        rows = self.of_task(task)
        return self.partition.clients_of(
            self.dataset.y_train, rows, self.options.clients, self.options.seed, time
        )

    def sampled(self, task: int, round_: int) -> ClientIndices:
        """Return the examples of HePCo's clients of a round."""
        return ClientIndices.of([sample.indices for sample in self.samples(task, round_)])

    def redrawn(self, task: int, round_: int) -> ClientIndices:
        """Draw the partition of a round."""
        return self.parts(task, np.random.RandomState([self.options.seed, task, round_]))

    def independent(self, task: int, round_: int) -> ClientIndices:
        """Return each client's part of the partition drawn for that client; parts may overlap."""
        parts = []
        for client in range(self.options.clients):
            rng = np.random.RandomState([self.options.seed, task, round_, client])
            parts.append(self.parts(task, rng).by_client()[client])
        return ClientIndices.of(parts)

    def static(
        self,
        stream: np.random.RandomState,
    ) -> Callable[[int, int], ClientIndices]:
        """Return indices(task, round) of partitions that are the same in all rounds."""
        options = self.options
        count = len(self.schedule.tasks)
        if is_owned(options.partition):
            owned_parts = find_owners(self.dataset, options.partition).parts()
            if len(owned_parts) != options.clients:
                raise InputError(
                    f"clients: {options.partition!r} has {len(owned_parts)} clients, not {options.clients}"
                )
            of_tasks = [ClientIndices.of([np.intersect1d(part, self.used) for part in owned_parts])] * count
        elif self.all_tasks:
            of_tasks = [self.parts(0, stream)] * count
        else:
            of_tasks = [self.parts(task, stream) for task in range(count)]

        def indices(task: int, _round: int) -> ClientIndices:
            return of_tasks[task]

        return indices


def _attended(assigned: Assignment, holds: Int[np.ndarray, "T K"]) -> Assignment:
    """Return the assignment for clients that join, stay in an earlier task, or leave.

    A client that stays has the classes of its last task as the current ones, and has seen
    those of all tasks so far.
    """

    def indices(task: int, round_: int) -> ClientIndices:
        held_tasks = holds[task].tolist()
        # an earlier task is drawn again: its partition is the same in every call
        by_client_of = {
            held_task: assigned.indices(held_task, round_).by_client()
            for held_task in set(held_tasks) - {AWAY}
        }
        parts = [np.empty(0, np.int32)] * len(held_tasks)
        for client, held_task in enumerate(held_tasks):
            if held_task != AWAY:
                parts[client] = by_client_of[held_task][client]
        return ClientIndices.of(parts)

    client_tasks = ()
    tasks = assigned.tasks
    # where a client stays in an earlier task, clients no longer share the current classes
    if np.any((holds >= 0) & (holds < np.arange(len(holds))[:, None])):
        tasks_of_clients = [
            [tasks[held_task]._replace(seen=task.seen) for held_task in held_tasks]
            for task, held_tasks in zip(tasks, holds, strict=True)
        ]
        client_tasks = tuple(
            _stacked(task, tuple(stacked_tasks))
            for task, stacked_tasks in zip(tasks, tasks_of_clients, strict=True)
        )
    return assigned._replace(indices=indices, own=client_tasks, holds=holds)


def _online(assigned: Assignment, options: PartitionConfig, rounds: int) -> Assignment:
    """Divide each client's examples of a task over its rounds.

    The order is drawn from (seed, task, client).
    """

    def indices(task: int, round_: int) -> ClientIndices:
        # a seed per client, so that its order does not depend on the other clients
        seeds = [[options.seed, ONLINE, task, client] for client in range(options.clients)]
        draws = map(np.random.RandomState, seeds)
        of_clients = zip(draws, assigned.indices(task, 0).by_client(), strict=True)
        # every call draws the same order and takes another piece of it, so no example is
        # seen twice
        return ClientIndices.of(
            [np.array_split(rng.permutation(examples), rounds)[round_] for rng, examples in of_clients]
        )

    return assigned._replace(indices=indices)


def _joint(assigned: Assignment, classes: int) -> Assignment:
    """Return the same examples, as one task.

    Raises:
      InputError: for private streams.
    """
    # private streams have tasks of their own without attendance, clients that stay with
    # it
    if assigned.own and assigned.holds is None:
        raise InputError(
            "partition: 'private' assigns examples by task, and a joint run has one task; nearest: 'iid'"
        )
    if assigned.holds is not None:
        raise InputError("new_clients, move_on: a joint run has one task, with all clients; leave them out")
    all_tasks = range(len(assigned.tasks))
    reported = assigned.reported

    def indices(_: int, round_: int) -> ClientIndices:
        return merge([assigned.indices(task, round_) for task in all_tasks])

    def all_reported(_: int, round_: int) -> np.ndarray:
        assert reported is not None
        return np.sum([reported(task, round_) for task in all_tasks], axis=0)

    test_task = np.zeros(len(assigned.test_label), int)
    joint = assigned._replace(tasks=make_tasks(classes, 1), indices=indices, test_task=test_task)
    if reported is None:
        return joint
    return joint._replace(reported=all_reported)


def _private(
    dataset: Dataset,
    options: PartitionConfig,
    private: Private,
    order: np.ndarray,
    used: np.ndarray,
    rng: np.random.RandomState,
) -> Assignment:
    """Return the assignment of private streams.

    Clients share the tasks, or each client draws its own from a pool.
    """
    label = relabel(dataset.y_train, order)
    test_label = relabel(dataset.y_test, order)
    classes = len(order)
    test_task = None
    task_source = chosen("task_pool", private)
    if isinstance(task_source, SameTasks):
        sizes = chosen("tasks_by", options).sizes(classes, options.tasks)
        tasks, _, test_task = by_class(sizes, label, test_label)
        shared = [np.flatnonzero(task.current) for task in tasks]
        streams = shared_streams(label[used], shared, options.clients, task_source.category_ratio, rng)
    else:
        names = [dataset.class_names[i] for i in order]
        # a data set that is no mixture is one source
        sources = np.asarray(dataset.sources or 0 * order)
        pool = task_source.pool(names, sources[order])
        streams = own_streams(label[used], pool, options.clients, options.tasks, rng)
        of_tasks = zip(*(stream.classes for stream in streams), strict=True)
        tasks = tasks_of(
            [np.unique(np.concatenate(classes_of_clients)) for classes_of_clients in of_tasks], classes
        )
    client_tasks = [tasks_of(stream.classes, classes) for stream in streams]

    def indices(task: int, _round: int) -> ClientIndices:
        return ClientIndices.of([used[stream.indices[task]] for stream in streams])

    stacked = tuple(map(_stacked, tasks, zip(*client_tasks, strict=True)))
    return Assignment(label, test_label, tasks, indices, own=stacked, test_task=test_task)


def _stacked(shared: Task, client_tasks: tuple[Task, ...]) -> Task:
    """Stack the clients' tasks to leaves [K, ...].

    All have the run's class positions, so that reports add up; `current` and `seen` are
    the client's.
    """

    def repeated(leaf: Array | np.ndarray) -> np.ndarray:
        # a view of K equal rows, which takes the memory of one
        return np.broadcast_to(np.asarray(leaf), (len(client_tasks), *np.shape(leaf)))

    current, seen = (np.stack([getattr(task, name) for task in client_tasks]) for name in ("current", "seen"))
    return Task.of_numpy(repeated(shared.index), repeated(shared.classes), current, seen)


def order_of_classes(
    dataset: Dataset, options: PartitionConfig, stream: np.random.RandomState
) -> Int64[np.ndarray, " C"]:
    """Return the class order, as original labels.

    Only the shuffled order draws from the stream.
    """
    classes = len(dataset.class_names)
    kind = options.class_order
    if kind.startswith("file:"):
        return listed_order(dataset.class_names, _lines(kind.removeprefix("file:")), dataset.numbers)
    if "," in kind:
        names = [name.strip() for name in kind.split(",")]
        return listed_order(dataset.class_names, names, dataset.numbers)
    match kind:
        case "natural":
            return np.arange(classes)
        case "python":
            return python_order(classes, options.seed)
        case _:
            return class_order(classes, stream)


def _lines(path: str) -> list[str]:
    """Return the classes that a file lists, one in each line."""
    return read_order(path, ORDER_BYTES)
