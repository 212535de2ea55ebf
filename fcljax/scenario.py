"""Who holds what, and when: the tasks of a run, and the training rows of every client in every round."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from fcljax.config import DealConfig
from fcljax.data.files.sources import Dataset
from fcljax.data.partition import count_matrix, dirichlet, first_share, iid, quantity, shards
from fcljax.data.store import ClientRows, client_rows, merge
from fcljax.data.tasks import class_order, make_tasks, relabel
from fcljax.federated.schedule import Roster
from fcljax.options import resolved
from fcljax.types import Task


class Scenario(NamedTuple):
    """A run's tasks and who holds what. Labels are positions in the class order."""

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    tasks: tuple[Task, ...]
    rosters: list[list[Roster]]  # [task][round]
    holdings: Int[np.ndarray, "K C"]  # training rows per client and class; redrawn: of all rounds together


def make_scenario(dataset: Dataset, cfg: DealConfig, rounds: int, joint: bool) -> Scenario:
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
    train_label, test_label, held = deal(dataset, cfg)
    tasks = make_tasks(classes, cfg.tasks)
    if joint:
        tasks, by_task = make_tasks(classes, 1), held
        held = lambda _, r: merge([by_task(t, r) for t in range(cfg.tasks)])
    deals = 1 if cfg.population == "static" else rounds
    dealt = [[_roster(held(t, r), train_label, classes) for r in range(deals)] for t in range(len(tasks))]
    holdings = functools.reduce(np.add, (roster.class_rows for of_task in dealt for roster in of_task))
    # a static population has one roster for all rounds of a task
    return Scenario(
        train_label, test_label, tasks, [of_task * (rounds // deals) for of_task in dealt], holdings
    )


def _roster(held: ClientRows, label: np.ndarray, classes: int) -> Roster:
    counts = count_matrix(label, np.split(held.rows, held.offset[1:-1]), classes)
    return Roster(*held, counts.astype(np.int32))


class Deal(NamedTuple):
    """Who holds what. Labels are positions in the class order."""

    train_label: Int64[np.ndarray, " N"]
    test_label: Int64[np.ndarray, " M"]
    # (task, round) -> the task's training rows that each client holds in that round
    rows: Callable[[int, int], ClientRows]


def deal(dataset: Dataset, cfg: DealConfig) -> Deal:
    """Deal the training rows to clients and tasks.

    The class order and a static population's partition come from one legacy numpy stream, in this order, as
    in FPPL's release (specification section 6); a partition by task is drawn for the tasks in turn, and the
    natural class order draws nothing. A static population has the same rows in every round of a task. A
    redrawn one has the rows of a partition of its own in each, which depends on (seed, task, round) only and
    is drawn when `Deal.rows` is called. In an independent one a partition is drawn for every client too, who
    takes its part of it: clients share rows then, and others belong to nobody. So does PILoRA's release.
    `dirichlet` and `iid` split the whole training set each time, of which the task's rows count.

    Raises:
      InputError: for settings that the data set cannot meet. Of a redrawn population, `Deal.rows` raises what
        its partition does.
    """
    stream = np.random.RandomState(cfg.seed)
    classes = len(dataset.class_names)
    order = class_order(classes, stream) if cfg.class_order == "shuffled" else np.arange(classes)
    label, tasks = relabel(dataset.y_train, order), make_tasks(classes, cfg.tasks)
    used = first_share(dataset.y_train, resolved(cfg.train_share))
    whole = cfg.partition in ("dirichlet", "iid")

    def parts(task: int, rng: np.random.RandomState) -> list[np.ndarray]:
        mine = used if whole else used[tasks[task].current[label[used]]]
        return [mine[part] for part in _split(dataset.y_train[mine], cfg, rng)]

    if cfg.population == "redrawn":
        dealt = lambda task, round_: parts(task, np.random.RandomState([cfg.seed, task, round_]))
    elif cfg.population == "independent":
        alone = lambda *place: parts(place[0], np.random.RandomState([cfg.seed, *place]))[place[-1]]
        dealt = lambda task, round_: [alone(task, round_, client) for client in range(cfg.clients)]
    else:
        fixed = (
            [parts(0, stream)] * len(tasks) if whole else [parts(task, stream) for task in range(len(tasks))]
        )
        dealt = lambda task, round_: fixed[task]
    rows = lambda task, round_: client_rows(dealt(task, round_), label, tasks[task])
    return Deal(label, relabel(dataset.y_test, order), rows)


def _split(labels: np.ndarray, cfg: DealConfig, rng: np.random.RandomState) -> list[np.ndarray]:
    match cfg.partition:
        case "iid":
            return iid(labels, cfg.clients, rng, cfg.min_rows)
        case "quantity":
            return quantity(labels, cfg.clients, cfg.alpha, rng)
        case "shards":
            return shards(labels, cfg.clients, cfg.alpha, rng)
        case _:
            return dirichlet(labels, cfg.clients, cfg.beta, rng, cfg.min_rows)
