"""The numbers that are folded into random keys, one for each purpose.

Keys form a tree: a run's key gives the keys of its rounds, a round's key those of its
clients, and so on. Each class below lists the keys that are derived from one kind of
key. The numbers decide the bits of every result, so they never change.
"""

from enum import IntEnum

import jax
from jaxtyping import ArrayLike, PRNGKeyArray


class RunKey(IntEnum):
    """Keys derived from the key of a run."""

    INIT = 0  # the server's first state
    CLIENTS = 1  # the clients' first states
    ROUND = 2  # the rounds of a task
    BEGIN_TASK = 3  # `Method.begin_task`; 4 is free
    TASK_START = 5  # rounds before a task's first
    TASK_END = 6  # rounds after a task's last
    RECONSTRUCTION = 8  # images that a server reconstructs, for figures


# the key of all rounds of one time of a task (`RoundInputs.when`); task and round are
# folded into it next
STAGE_KEYS = {"task_start": RunKey.TASK_START, "round": RunKey.ROUND, "task_end": RunKey.TASK_END}


class RoundKey(IntEnum):
    """Keys derived from the key of a round, which is itself from (run, task, round)."""

    SERVER = 0  # the server's step
    AFTER_ROUND = 1  # the first of the method's rounds of this kind
    EXAMPLE_ORDER = 2  # the order of examples, by (phase, epoch, example)
    CLIENT = 3  # a client's work, by its id
    TASK_START = 4  # the first of the method's rounds of this kind
    TASK_END = 5  # the first of the method's rounds of this kind
    SERVER_REPLAY = 6  # the server's training on its replay buffer
    # draws that belong to examples, by (phase, step, example): `Batch.keys`
    EXAMPLE_DRAWS = 7
    # the second of the method's rounds of a kind; the third has 11, and so on
    FURTHER_ROUNDS = 10


class ClientKey(IntEnum):
    """Keys derived from the key of a client in a round."""

    START = 0  # `Program.start`
    PHASES = 1  # the steps of its first phase; the second phase has 2, and so on


class StepKey(IntEnum):
    """Keys derived from the key of one step of a client."""

    IMAGES = 0  # augmentation
    UPDATE = 1  # `Phase.step` and `Phase.replay`
    DRAWN_PARAMS = 1002  # a Bayesian learner's parameters


class InitKey(IntEnum):
    """Keys derived from the key of `Method.init`, which itself is the learner's."""

    PROJECTION = 900  # a random projection of features
    # parameters that the first client rule trains; the second has 1001, and so on
    CLIENT_RULE = 1000


class ServerKey(IntEnum):
    """Keys derived from the key of the server's step; 0 and above are its rules, in order."""

    REDUCE = 1000  # the rule that merges uploads
    POST = 1001  # noise on what was merged


def fold(key: PRNGKeyArray, *numbers: ArrayLike) -> PRNGKeyArray:
    """Return the key at the end of a path: fold(key, a, b) is fold(fold(key, a), b)."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
