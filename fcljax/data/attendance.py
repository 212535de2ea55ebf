"""Draw when clients join, move on to the next task, stay behind or leave.

In GLFC's protocol (Dong et al., CVPR 2022) ten new clients join with every task and 90
% of the others move on.
"""

import math

import numpy as np
from jaxtyping import Int

from fcljax.errors import InputError
from fcljax.settings import PartitionConfig

AWAY = -1  # a client that has not joined yet, or has left
# In seeds, the purpose of a draw: no other draw of the run uses (seed, 33, task).
PURPOSE = 33


def changes(options: PartitionConfig) -> bool:
    """Check whether clients join, leave or stay behind."""
    return bool(options.new_clients) or options.move_on < 1


def attendance(options: PartitionConfig, tasks: int) -> Int[np.ndarray, "T K"]:
    """Return the task from which each client has its examples, while each task is
    trained; -1: away.

    Clients join in the order of their ids. With each task after the first, a share of
    the present clients, rounded down as in GLFC's release, is drawn to move on, and new
    clients join. The draw depends on (seed, task).

    Raises:
      InputError: for new clients that leave none for the first task.
    """
    later_tasks = tasks - 1
    first_clients = options.clients - options.new_clients * later_tasks
    if first_clients < 1:
        raise InputError(
            f"new_clients: {options.new_clients} with each of {later_tasks} tasks leave none of "
            f"{options.clients} clients for the first task; nearest: {(options.clients - 1) // later_tasks}"
        )
    # the lowest ids begin; the others join in order
    by_task = [np.where(np.arange(options.clients) < first_clients, 0, AWAY)]
    for task in range(1, tasks):
        # a stream for each task: one more task leaves the draws of the others as they are
        rng = np.random.RandomState([options.seed, PURPOSE, task])
        joined = first_clients + options.new_clients * task
        task_of_client = by_task[-1].copy()
        present = np.flatnonzero(task_of_client != AWAY)
        # rounded down with a slack, since 0.9 * 10 is below 9 in floating point
        moving_on = rng.permutation(present)[: math.floor(options.move_on * len(present) + 1e-9)]
        # all leave, and those that move on come back in the line after the next one
        if options.stay_behind == "leave":
            task_of_client[present] = AWAY
        # new clients have the highest ids so far
        task_of_client[moving_on] = task_of_client[joined - options.new_clients : joined] = task
        if not np.any(task_of_client == task):
            raise InputError(
                f"move_on: {options.move_on} of {len(present)} clients is none, and no new client has task "
                f"{task + 1}; nearest: {1 / max(1, len(present)):.3g}"
            )
        by_task.append(task_of_client)
    return np.stack(by_task)
