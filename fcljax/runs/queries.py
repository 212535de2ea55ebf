"""Query features of frozen images, computed when the first task needs them, so that the first round does not
wait for images of later tasks."""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fcljax.config import RunConfig
from fcljax.data.store import Split
from fcljax.data.streaming import Host, whole
from fcljax.runs.build import Experiment
from fcljax.runs.inputs import frozen_features, saved_features
from fcljax.scenario import Scenario
from fcljax.types import PyTree

Part = Literal["test", "train"]
PARTS: tuple[Part, ...] = ("test", "train")
TIMED_AS = {"train": "client", "test": "eval"}  # the part of a run's time in which the features are used

# fill(exp, tasks, section) -> the experiment with the features that these tasks need
Fill = Callable[[Experiment, Iterable[int], Callable], Experiment]


def make_queries(exp: Experiment, cfg: RunConfig, parts: tuple[Part, ...] = PARTS) -> Fill:
    """fill(exp, tasks, section): the experiment with query features cached for what clients and evaluations
    read in these tasks, wherever the input is deterministic.

    That is the test split always, and the training split if some phase reads it without augmentation. Tasks
    are filled in their order, each once; images of tasks to come have NaN. Features that `fcljax embed` left
    are taken as they are, all at once. `section` is entered as "eval" and "client", to time them.

    Args:
      exp: the experiment.
      cfg: its settings.
      parts: the splits that somebody reads.
    """
    read = ("test", "train") if _reads_clean(exp) else ("test",)
    wanted: list[Part] = [part for part in parts if part in read] if exp.method.queries else []
    saved = {part: saved_features(cfg, exp.inputs, part) for part in wanted}
    compute = frozen_features(exp.inputs, cfg.eval_batch_size, mesh=exp.engine.mesh)

    def features(exp: Experiment, part: Part, t: int) -> Array | np.ndarray:
        split, known = getattr(exp, part), whole(getattr(exp, part)).query
        rows = (rows_held if part == "train" else rows_evaluated)(exp.scenario, t)
        if not len(rows) and known is not None:
            return known
        rows = rows if len(rows) else np.zeros(1, int)
        # without those that are known: the compiled loop takes splits of one kind
        found = np.asarray(compute(exp.frozen, _with_query(split, None), rows))
        shape = (len(whole(split).label), *found.shape[1:])
        known = np.full(shape, np.nan, found.dtype) if known is None else np.array(known)
        known[rows] = found
        return known

    def filled(exp: Experiment, part: Part, t: int) -> Experiment:
        split = getattr(exp, part)
        if saved[part] is not None and whole(split).query is not None:
            return exp
        mine = features(exp, part, t) if saved[part] is None else saved[part]
        mine = mine if isinstance(split, Host) else exp.engine.place(jnp.asarray(mine))
        new = _with_query(split, mine)
        return exp._replace(train=new) if part == "train" else exp._replace(test=new)

    def fill(exp: Experiment, tasks: Iterable[int], section: Callable = contextlib.nullcontext) -> Experiment:
        for t, part in itertools.product(tasks, wanted):
            with section(TIMED_AS[part]):
                exp = filled(exp, part, t)
        return exp

    return fill


def with_queries(exp: Experiment, cfg: RunConfig, parts: tuple[Part, ...] = PARTS) -> Experiment:
    """The experiment with the query features of all tasks."""
    return make_queries(exp, cfg, parts)(exp, range(len(exp.scenario.tasks)), contextlib.nullcontext)


def rows_held(scenario: Scenario, t: int) -> Int[np.ndarray, " n"]:
    """The training rows that some client holds in task t, and none did before."""
    of = [
        np.concatenate([partition.indices for partition in partitions])
        for partitions in scenario.partitions[: t + 1]
    ]
    return np.setdiff1d(of[-1], np.concatenate([of[-1][:0], *of[:-1]]))


def rows_evaluated(scenario: Scenario, t: int) -> Int[np.ndarray, " n"]:
    """The test rows of the classes that evaluations after task t read, and those before did not."""
    read = [np.asarray(scenario.tasks[i].seen) | scenario.learned(i).any(axis=0) for i in range(t + 1)]
    new = read[-1] & ~np.any([np.zeros_like(read[-1]), *read[:-1]], axis=0)
    return np.flatnonzero(new[scenario.test_label])


def _reads_clean(exp: Experiment) -> bool:
    """Does some phase read training images without augmentation?"""
    phases = [phase for each in exp.method.rounds for phase in each.program.phases]
    return any(not (phase.view.augment and exp.inputs.augments) or phase.replay for phase in phases)


def _with_query(split: Split | Host, query: PyTree) -> Split | Host:
    if isinstance(split, Host):
        return split._replace(tree=split.tree._replace(query=query))
    return split._replace(query=query)
