"""Who holds what, and when: the tasks of a run, and the training rows of every client in every round."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64

from fcljax.config import PartitionConfig
from fcljax.data.files.dataset import Dataset
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
from fcljax.data.tasks import class_order, make_tasks, python_order, relabel, tasks_of
from fcljax.errors import InputError
from fcljax.federated.schedule import ClientPartition
from fcljax.options import resolved
from fcljax.types import Task


class Scenario(NamedTuple):
    """A run's tasks and who holds what. Labels are positions in the class order. Where clients have streams
    of their own a task's classes are those of all clients, and the rosters know everybody's."""

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]
    partitions: list[list[ClientPartition]]  # [task][round]
    holdings: Int[np.ndarray, "K C"]  # training rows per client and class; redrawn: of all rounds together

    def current(self, task: int, client: int) -> Bool[np.ndarray, " C"]:
        """The classes of a task, of a client's own where it has one."""
        own = self.partitions[task][0].task
        return np.asarray(own.current[client] if own else self.tasks[task].current)

    def learned(self, task: int) -> Bool[np.ndarray, "K C"]:
        """Of which classes each client has held rows, up to a task's end."""
        return np.any(
            [r.class_examples > 0 for of_task in self.partitions[: task + 1] for r in of_task], axis=0
        )


def make_scenario(dataset: Dataset, cfg: PartitionConfig, rounds: int, joint: bool) -> Scenario:
    """The tasks and rosters of a run.

    Args:
      dataset: whose training rows are dealt.
      cfg: how.
      rounds: of every task.
      joint: do all tasks' classes come at once, as one task?

    Raises:
      InputError: for settings that the data set cannot meet.
    """
    classes = len(dataset.class_names)
    dealt = deal(dataset, cfg, rounds)
    tasks, held, told = dealt.tasks, dealt.rows, dealt.told
    if joint:
        if dealt.own:
            raise InputError("partition: 'private' deals by task, and a joint run has one; nearest: 'iid'")
        tasks, everything = make_tasks(classes, 1), range(cfg.tasks)
        held = lambda _, r: merge([dealt.rows(t, r) for t in everything])
        told = dealt.told and (lambda _, r: np.sum([dealt.told(t, r) for t in everything], axis=0))
    # a static population has one roster for all rounds of a task
    deals = 1 if cfg.population == "static" else rounds
    rows = [[held(t, r) for r in range(deals)] for t in range(len(tasks))]
    counts = [[_counts(each, dealt.train_label, classes) for each in of_task] for of_task in rows]
    said = [[told(t, r) for r in range(deals)] for t in range(len(tasks))] if told else counts
    owns = dealt.own or (None,) * len(tasks)
    partitions = [
        [ClientPartition(*each, numbers, own) for each, numbers in zip(of_task, counted, strict=True)]
        * (rounds // deals)
        for of_task, counted, own in zip(rows, said, owns, strict=True)
    ]
    holdings = functools.reduce(np.add, (each for of_task in counts for each in of_task))
    return Scenario(dealt.train_label, dealt.test_label, tasks, partitions, holdings)


def scenario_of_counts(
    dataset: Dataset, cfg: PartitionConfig, rounds: int, joint: bool, rows: Int[np.ndarray, "T K"]
) -> Scenario:
    """What a server knows that holds no training rows: the tasks, and how many rows clients say that they
    have in each. Its rosters name no rows and no classes."""
    order, tasks = _tasks(dataset, cfg, joint)
    nobody = np.zeros((cfg.clients, len(order)), np.int32)

    def partition(count: Int[np.ndarray, " K"]) -> ClientPartition:
        return ClientPartition(
            np.zeros(int(count.sum()), np.int32), np.concatenate([[0], np.cumsum(count)]), nobody
        )

    partitions = [[partition(count)] * rounds for count in rows]
    train_label, test_label = relabel(dataset.y_train, order), relabel(dataset.y_test, order)
    return Scenario(train_label, test_label, tasks, partitions, nobody)


def scenario_of_one(
    dataset: Dataset, cfg: PartitionConfig, rounds: int, joint: bool, client: int
) -> Scenario:
    """What a client knows that holds data of its own: all training rows of the data set are its, each in the
    task of its class."""
    order, tasks = _tasks(dataset, cfg, joint)
    label, test_label = relabel(dataset.y_train, order), relabel(dataset.y_test, order)
    owned = [np.empty(0, np.int32)] * cfg.clients
    owned[client] = np.arange(len(label), dtype=np.int32)
    held = [client_indices(owned, label, task) for task in tasks]
    counts = [_counts(each, label, len(order)) for each in held]
    partitions = [
        [ClientPartition(*each, number)] * rounds for each, number in zip(held, counts, strict=True)
    ]
    return Scenario(label, test_label, tasks, partitions, functools.reduce(np.add, counts))


def _tasks(dataset: Dataset, cfg: PartitionConfig, joint: bool) -> tuple[np.ndarray, tuple[Task, ...]]:
    """The class order and the tasks that all clients go through."""
    classes = len(dataset.class_names)
    order = _order(classes, cfg, np.random.RandomState(cfg.seed))
    return order, make_tasks(classes, 1 if joint else cfg.tasks)


def _counts(held: ClientIndices, label: np.ndarray, classes: int) -> np.ndarray:
    return count_matrix(label, held.by_client(), classes).astype(np.int32)


class Deal(NamedTuple):
    """Who holds what. Labels are positions in the class order."""

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]
    # (task, round) -> the task's training rows that each client holds in that round
    rows: Callable[[int, int], ClientIndices]
    # (task, round) -> rows of each class [K, C] that clients say they hold, where that is not what they do
    told: Callable[[int, int], np.ndarray] | None = None
    # each client's own tasks, leaves [K, ...], where they are not those of the run
    own: tuple[Task, ...] = ()


def deal(dataset: Dataset, cfg: PartitionConfig, rounds: int = 1) -> Deal:
    """Deal the training rows to clients and tasks, for so many rounds a task, which the seeds of sampled
    clients depend on.

    The class order and a static population's partition come from one legacy numpy stream, in this order, as
    in FPPL's release (specification section 6); a partition by task is drawn for the tasks in turn, and the
    natural class order draws nothing. A static population has the same rows in every round of a task. A
    redrawn one has the rows of a partition of its own in each, which depends on (seed, task, round) only and
    is drawn when `Deal.rows` is called. In an independent one a partition is drawn for every client too, who
    takes its part of it: clients share rows then, and others belong to nobody. So does PILoRA's release.
    Sampled clients depend on (seed, task, round, client), as HePCo's release draws them. Private streams
    (`streams.py`) go on with the legacy stream.
    `dirichlet` and `iid` split the whole training set each time, of which the task's rows count.

    Raises:
      InputError: for settings that the data set cannot meet. Of a redrawn population, `Deal.rows` raises what
        its partition does.
    """
    stream = np.random.RandomState(cfg.seed)
    classes = len(dataset.class_names)
    order = _order(classes, cfg, stream)
    label, tasks = relabel(dataset.y_train, order), make_tasks(classes, cfg.tasks)
    used = first_share(dataset.y_train, resolved(cfg.train_share))
    test_label = relabel(dataset.y_test, order)
    if cfg.partition == "private":
        return _private(dataset, cfg, order, label, test_label, used, stream)
    whole = cfg.partition in ("dirichlet", "iid")
    of_task = lambda task: used if whole else used[tasks[task].current[label[used]]]
    told = None

    def parts(task: int, rng: np.random.RandomState) -> list[np.ndarray]:
        mine = of_task(task)
        return [mine[part] for part in _split(dataset.y_train[mine], cfg, rng)]

    if cfg.partition == "sampled":
        position = relabel(np.arange(classes), order)
        drawn = lambda task, round_: _sampled(dataset.y_train, of_task(task), cfg, task, round_, rounds)
        dealt = lambda task, round_: [each.indices for each in drawn(task, round_)]
        if cfg.long_tail == "told":
            told = lambda task, round_: _told(drawn(task, round_), position)
    elif cfg.population == "redrawn":
        dealt = lambda task, round_: parts(task, np.random.RandomState([cfg.seed, task, round_]))
    elif cfg.population == "independent":
        alone = lambda *place: parts(place[0], np.random.RandomState([cfg.seed, *place]))[place[-1]]
        dealt = lambda task, round_: [alone(task, round_, client) for client in range(cfg.clients)]
    else:
        fixed = (
            [parts(0, stream)] * len(tasks) if whole else [parts(task, stream) for task in range(len(tasks))]
        )
        dealt = lambda task, round_: fixed[task]
    rows = lambda task, round_: client_indices(dealt(task, round_), label, tasks[task])
    return Deal(label, test_label, tasks, rows, told)


def _private(
    dataset: Dataset,
    cfg: PartitionConfig,
    order: np.ndarray,
    label: np.ndarray,
    test_label: np.ndarray,
    used: np.ndarray,
    rng: np.random.RandomState,
) -> Deal:
    """Private streams: of the run's tasks, or of a pool that every client draws its own from."""
    classes = len(order)
    if cfg.pool is None:
        tasks = make_tasks(classes, cfg.tasks)
        shared = [np.flatnonzero(task.current) for task in tasks]
        streams = shared_streams(label[used], shared, cfg.clients, resolved(cfg.category_ratio), rng)
    else:
        names, sources = [dataset.class_names[i] for i in order], np.asarray(dataset.sources or 0 * order)
        pool = pool_of(cfg.pool, names, sources[order], resolved(cfg.pool_classes), cfg.pool_most)
        streams = own_streams(label[used], pool, cfg.clients, cfg.tasks, rng)
        union = [np.unique(np.concatenate(each)) for each in zip(*(s.classes for s in streams), strict=True)]
        tasks = tasks_of(union, classes)
    mine = [tasks_of(stream.classes, classes) for stream in streams]
    own = tuple(map(_stacked, tasks, zip(*mine, strict=True)))
    dealt = lambda task, round_: [used[stream.indices[task]] for stream in streams]
    rows = lambda task, round_: client_indices(dealt(task, round_), label, tasks[task])
    return Deal(label, test_label, tasks, rows, own=own)


def _stacked(shared: Task, mine: tuple[Task, ...]) -> Task:
    """A task of every client, leaves [K, ...]. The places of its classes are the run's, so that what clients
    report of them can be added up; `current` and `seen` say which of them are the client's."""
    current, seen = (np.stack([getattr(task, name) for task in mine]) for name in ("current", "seen"))
    everybody = lambda leaf: np.broadcast_to(leaf, (len(mine), *np.shape(leaf)))
    return Task.of_numpy(everybody(np.asarray(shared.index)), everybody(shared.classes), current, seen)


def _order(classes: int, cfg: PartitionConfig, stream: np.random.RandomState) -> np.ndarray:
    """The class order; only numpy's shuffle draws from the stream."""
    match cfg.class_order:
        case "natural":
            return np.arange(classes)
        case "python":
            return python_order(classes, cfg.seed)
        case _:
            return class_order(classes, stream)


def _sampled(
    labels: np.ndarray, mine: np.ndarray, cfg: PartitionConfig, task: int, round_: int, rounds: int
) -> list[Sample]:
    """The clients of one round, with the seeds of HePCo's release (specification 6.3); rows of the store."""
    first = 1 + cfg.clients * round_ + cfg.clients * rounds * task + 2000 * cfg.seed
    draw = functools.partial(
        sample_client,
        labels[mine],
        split=resolved(cfg.split_ratio),
        category=resolved(cfg.category_ratio),
        imbalance=resolved(cfg.imbalance),
        applied=cfg.long_tail == "applied",
    )
    drawn = [draw(seed=(first + client) % 2**32) for client in range(cfg.clients)]
    return [each._replace(indices=mine[each.indices]) for each in drawn]


def _told(drawn: list[Sample], position: np.ndarray) -> np.ndarray:
    """What sampled clients say that they hold, by position in the class order."""
    told = np.zeros((len(drawn), len(position)), np.int32)
    for client, sample in enumerate(drawn):
        for name, count in sample.reported.items():
            told[client, position[name]] = count
    return told


def _split(labels: np.ndarray, cfg: PartitionConfig, rng: np.random.RandomState) -> list[np.ndarray]:
    match cfg.partition:
        case "iid":
            return iid(labels, cfg.clients, rng, cfg.min_rows)
        case "quantity":
            return quantity(labels, cfg.clients, cfg.classes_per_client, rng)
        case "shards":
            return shards(labels, cfg.clients, cfg.classes_per_client, rng)
        case _:
            return dirichlet(labels, cfg.clients, cfg.alpha, rng, cfg.min_rows)
