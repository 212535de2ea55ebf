"""Clients that join over time, move on from task to task, stay behind or leave (Dong et al., CVPR 2022:
GLFC's protocol, in which ten new clients come with every task and 90 % of the old ones move on)."""

import math

import numpy as np
from jaxtyping import Int

from fcljax.errors import InputError
from fcljax.settings import PartitionConfig

AWAY = -1  # a client that has not joined yet, or has left
PURPOSE = 33  # of the draw, among those of the seed


def changes(options: PartitionConfig) -> bool:
    """Whether clients join, leave or stay behind at all."""
    return bool(options.new_clients) or options.move_on < 1


def attendance(options: PartitionConfig, tasks: int) -> Int[np.ndarray, "T K"]:
    """The task of whose examples each client has its own while a task is trained; -1: none.

    Clients join in the order of their ids. With each task after the first a share of those who are there
    already, rounded down as in GLFC's release, is drawn to move on, and the new clients come. The draw
    depends on (seed, task).

    Raises:
      InputError: for new clients that leave none for the first task.
    """
    later = tasks - 1
    first = options.clients - options.new_clients * later
    if first < 1:
        raise InputError(
            f"new_clients: {options.new_clients} with each of {later} tasks leave none of {options.clients} "
            f"clients for the first task; nearest: {(options.clients - 1) // later}"
        )
    of_tasks = [np.where(np.arange(options.clients) < first, 0, AWAY)]
    for task in range(1, tasks):
        rng = np.random.RandomState([options.seed, PURPOSE, task])
        joined = first + options.new_clients * task
        now = of_tasks[-1].copy()
        here = np.flatnonzero(now != AWAY)
        moving = rng.permutation(here)[: math.floor(options.move_on * len(here) + 1e-9)]
        if options.stay_behind == "leave":
            now[here] = AWAY
        now[moving] = now[joined - options.new_clients : joined] = task
        if not np.any(now == task):
            raise InputError(
                f"move_on: {options.move_on} of {len(here)} clients is none, and no new client has task "
                f"{task + 1}; nearest: {1 / max(1, len(here)):.3g}"
            )
        of_tasks.append(now)
    return np.stack(of_tasks)
