"""Rows of past tasks that clients remember, and two ways to choose them: uniformly (`replay`), and by herding
(`herded`; Rebuffi et al. 2017, algorithm 4).

What is kept are row numbers; the engine reads the images. Rows are chosen when their task is over, so that
they take no places while they are still trained on, and join batches of later tasks.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.heads import unit
from fcljax.parts.federate import Seen, Term
from fcljax.parts.learner import Learner, Model
from fcljax.types import Batch, ClientContext, Sizes, Task, View


class Exemplars(NamedTuple):
    """Training rows that a client remembers (-1: an empty place), with their labels and priorities: who has
    the lowest is the first to go."""

    label: Int[Array, " M"]
    row: Int[Array, " M"]
    priority: Float[Array, " M"]


def no_exemplars(size: int) -> Exemplars:
    """So many empty places."""
    return Exemplars(jnp.zeros(size, jnp.int32), jnp.full(size, -1, jnp.int32), jnp.full(size, -1.0))


def draw(exemplars: Exemplars, old: Bool[Array, " C"], count: int, key: PRNGKeyArray) -> Int[Array, " count"]:
    """Places of `count` exemplars of old classes, uniformly and with repetition; all -1 if there are none."""
    usable = _usable(exemplars, old)
    place = jax.random.categorical(key, jnp.where(usable, 0.0, -jnp.inf), shape=(count,))
    return jnp.where(jnp.any(usable), place, -1)


def _usable(exemplars: Exemplars, old: Bool[Array, " C"]) -> Bool[Array, " M"]:
    return (exemplars.row >= 0) & old[exemplars.label]


# ---- uniformly ---------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """A client's exemplars, and the key of its priorities."""

    exemplars: Exemplars
    key: Array


def replay(size: int, batch_size: int) -> Term:
    """Rows of earlier tasks join every batch, as many as the batch has itself.

    Args:
      size: rows that a client remembers.
      batch_size: of training, and of the pass that offers rows to the memory.
    """

    def init(key: PRNGKeyArray, part: Model) -> Memory:
        del part
        return Memory(no_exemplars(size), jax.random.key_data(key))

    def look(learner: Learner, seen: Seen, memory: Memory) -> Memory:
        del learner
        return memory._replace(exemplars=keep_highest(memory.exemplars, seen.batch, memory.key))

    def recall(context: ClientContext, memory: Memory, key: PRNGKeyArray) -> Int[Array, " recalls"]:
        return draw(memory.exemplars, context.task.old, batch_size, key)

    return Term(
        "replay",
        init=init,
        open=lambda context, state, key: state,
        look=look,
        keep=lambda context, memory, part, state: memory,
        recall=recall,
        rows=lambda state: state.exemplars.row,
        recalls=batch_size,
        view=View(1, batch_size, shuffle=False, augment=False),
        at_end=True,
    )


def keep_highest(exemplars: Exemplars, batch: Batch, key_data: Array) -> Exemplars:
    """The exemplars after a batch was offered: of all rows ever offered those with the highest priorities,
    each at most once. A row's priority is a uniform number that depends on the client and the row alone, so
    this is a uniform sample, whatever the order."""
    key = jax.random.wrap_key_data(key_data)
    uniform = lambda row: jax.random.uniform(jax.random.fold_in(key, row))
    priority = jax.vmap(uniform)(jnp.maximum(batch.index, 0))
    known = jnp.any(batch.index[:, None] == exemplars.row, axis=1)
    offered = Exemplars(batch.label, batch.index, jnp.where(batch.mask & ~known, priority, -2.0))
    both = _beside(exemplars, offered)
    best = jnp.argsort(-both.priority, stable=True)[: exemplars.row.shape[0]]
    return jax.tree.map(lambda leaf: leaf[best], both)


def _beside(mine: Exemplars, new: Exemplars) -> Exemplars:
    return jax.tree.map(lambda own, more: jnp.concatenate([own, more.astype(own.dtype)]), mine, new)


# ---- by herding --------------------------------------------------------------------------------------------


class Gathered(NamedTuple):
    """Features of a client's rows, with their labels and numbers, in the order in which they came (row -1: an
    empty place); and how many came."""

    feature: Float[Array, "R D"]
    label: Int[Array, " R"]
    row: Int[Array, " R"]
    count: Int[Array, ""]


class Herded(NamedTuple):
    """What a client remembers, and the classes that it has chosen from so far. The first exemplar of a class
    has priority 0, the next -1, and so on."""

    exemplars: Exemplars
    learned: Bool[Array, " C"]


class Budget(NamedTuple):
    """How much a client remembers.

    rows: of every class, or in all, of which every learned class gets the same number (the whole part)
    per: "class" or "client"
    repeats: may a row be chosen again, as in GLFC's release?
    """

    rows: int
    per: Literal["class", "client"] = "class"
    repeats: bool = False

    def size(self, sizes: Sizes) -> int:
        """Places of a memory."""
        return self.rows * (sizes.classes if self.per == "class" else 1)

    def most(self, sizes: Sizes) -> int:
        """Rows of one class at the most."""
        return self.rows if self.repeats else min(self.rows, sizes.examples)

    def share(self, learned: Bool[Array, " C"]) -> Int[Array, ""]:
        """Rows of each learned class."""
        return jnp.int32(self.rows) // (jnp.maximum(jnp.sum(learned), 1) if self.per == "client" else 1)


def herded(budget: Budget, sizes: Sizes, width: int, batch_size: int) -> Term:
    """Rows of earlier tasks, chosen by herding under the model that their task ended with, join batches as
    often as if they and the client's rows were one data set, and at most as many as a batch has itself.

    Args:
      budget: how much a client remembers.
      setting: sizes of the run; `rows` must be known.
      width: D, of the features that the classifier reads.
      batch_size: of training, and of the pass that gathers features.

    Raises:
      InputError: for a setting without `rows`.
    """

    def keep(context: ClientContext, gathered: Gathered, part: Model, state: Herded) -> Herded:
        del part
        return renew(state, gathered, context.task, budget, sizes)

    def recall(context: ClientContext, memory: Herded, key: PRNGKeyArray) -> Int[Array, " recalls"]:
        return draw_union(memory.exemplars, context.task.old, batch_size, context.client.examples, key)

    init = lambda key, part: no_memory(budget, sizes)
    view = View(1, batch_size, shuffle=False, augment=False)
    choosing = Term("herded", open=gathering(sizes, width), look=gather, keep=keep, view=view, at_end=True)
    return Term(
        "herded",
        init=init,
        open=lambda context, state, key: state,
        recall=recall,
        rows=lambda state: state.exemplars.row,
        recalls=batch_size,
        closing=choosing,
    )


def no_memory(budget: Budget, sizes: Sizes) -> Herded:
    """Of a client before its first task."""
    return Herded(no_exemplars(budget.size(sizes)), jnp.zeros(sizes.classes, bool))


def gathering(sizes: Sizes, width: int) -> Callable[..., Gathered]:
    """(ctx, state, key) -> an empty place for every row that a client can hold.

    Raises:
      InputError: for a setting without `rows`.
    """
    if sizes.examples < 1:
        raise InputError("rows: 0, where herding needs the most rows that a client holds (Setting.rows)")
    size = sizes.examples

    def open_(context: ClientContext, state: PyTree, key: PRNGKeyArray) -> Gathered:
        del context, state, key
        nothing = jnp.full(size, -1, jnp.int32)
        return Gathered(jnp.zeros((size, width)), jnp.zeros(size, jnp.int32), nothing, jnp.int32(0))

    return open_


def gather(learner: Learner, seen: Seen, gathered: Gathered) -> Gathered:
    """With the rows of a batch and their features as in evaluation: running statistics of a batch would make
    them depend on each other."""
    context, batch = seen.context, seen.batch
    feature = learner.forward(context.frozen, context.cached, seen.part, batch, context.task, False).feature
    place = gathered.count + jnp.cumsum(batch.mask) - 1
    place = jnp.where(batch.mask, place, gathered.row.shape[0])
    write = lambda buffer, new: buffer.at[place].set(new.astype(buffer.dtype), mode="drop")
    return Gathered(
        write(gathered.feature, feature),
        write(gathered.label, batch.label),
        write(gathered.row, batch.index),
        gathered.count + jnp.sum(batch.mask),
    )


def renew(memory: Herded, gathered: Gathered, task: Task, budget: Budget, sizes: Sizes) -> Herded:
    """The memory once a task is over: the task's classes are learned, old lists are cut to their share, and
    new ones are chosen (GLFC, section B5 of the specification)."""
    most = budget.most(sizes)
    chosen = herd(gathered.feature, group_of(gathered, task), len(task.classes), most, budget.repeats)
    row = jnp.where(chosen >= 0, gathered.row[chosen], -1)
    priority = jnp.broadcast_to(-jnp.arange(most, dtype=jnp.float32), chosen.shape)
    label = jnp.broadcast_to(jnp.maximum(task.classes, 0)[:, None], chosen.shape)
    new = Exemplars(*(leaf.reshape(-1) for leaf in (label, row, priority)))
    fresh = jnp.zeros_like(memory.learned).at[new.label].max(new.row >= 0)
    old = memory.exemplars
    old = old._replace(row=jnp.where(fresh[old.label], -1, old.row))  # a class that came again: only its new
    learned = memory.learned | fresh
    return Herded(_cut(_beside(old, new), budget.share(learned), budget.size(sizes)), learned)


def _cut(exemplars: Exemplars, share: Int[Array, ""], size: int) -> Exemplars:
    """The first so many of every class, in `size` places."""
    stays = (exemplars.row >= 0) & (-exemplars.priority < share)
    first = jnp.argsort(~stays, stable=True)
    kept = jax.tree.map(lambda leaf: leaf[first[:size]], exemplars)
    return jax.tree.map(functools.partial(jnp.where, stays[first[:size]]), kept, no_exemplars(size))


def group_of(gathered: Gathered, task: Task) -> Int[Array, " R"]:
    """Which of the task's classes each row is of; -1 where there is no row, or it is of none."""
    same = (gathered.label[:, None] == task.classes) & (gathered.row >= 0)[:, None]
    return jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), -1)


def herd(
    feature: Float[Array, "R D"], group: Int[Array, " R"], groups: int, most: int, repeats: bool = False
) -> Int[Array, "groups most"]:
    """Places of rows whose mean is near the mean of their group, all of them as vectors of length 1: each
    next row brings the mean of those chosen so far nearest to it (Rebuffi et al. 2017, algorithm 4). Of rows
    that are equally near, the first.

    Args:
      feature: of all rows.
      group: of each row, from 0 on; -1: of none.
      groups: how many there are.
      most: rows to choose of each.
      repeats: may a row be chosen again?

    Returns:
      For each group its rows in the order in which they were chosen; -1 where it has no more.
    """
    mine = group == jnp.arange(groups)[:, None]
    near = jnp.where((group >= 0)[:, None], unit(feature), 0.0)
    mean = mine.astype(jnp.float32) @ near / jnp.maximum(jnp.sum(mine, axis=1), 1)[:, None]
    own, half = jnp.maximum(group, 0), jnp.sum(near * near, axis=1) / 2

    def choose(carry: tuple, number: Array) -> tuple:
        total, free = carry
        # the least |mean - (total + x) / n| is the most x . (n mean - total) - |x|^2 / 2
        wanted = number * mean - total
        score = jnp.sum(near * wanted[own], axis=1) - half
        best = jnp.argmax(jnp.where(free, score, -jnp.inf), axis=1)
        there = jnp.any(free, axis=1)
        total = total + jnp.where(there[:, None], near[best], 0.0)
        taken = (jnp.arange(len(group)) == best[:, None]) & (not repeats)
        return (total, free & ~taken), jnp.where(there, best, -1)

    numbers = jnp.arange(1, most + 1, dtype=jnp.float32)
    _, chosen = jax.lax.scan(choose, (jnp.zeros_like(mean), mine), numbers)
    return chosen.T.astype(jnp.int32)


def draw_union(
    exemplars: Exemplars, old: Bool[Array, " C"], batch_size: int, rows: Int[Array, ""], key: PRNGKeyArray
) -> Int[Array, " batch_size"]:
    """Places of exemplars of old classes, drawn as by `draw`: in the mean as many as there are among so many
    rows beside a batch of the client's `rows`, and at most as many as the batch."""
    count = jnp.sum(_usable(exemplars, old))
    wanted = jnp.ceil(batch_size * count / jnp.maximum(rows, 1))
    place = draw(exemplars, old, batch_size, key)
    return jnp.where(jnp.arange(batch_size) < wanted, place, -1)
