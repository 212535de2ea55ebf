"""iCaRL+FL: rehearsal (Rebuffi et al. 2017) in the form of TARGET's release (ICCV 2023).

A client remembers a uniform sample of the rows that it had in earlier tasks, trains on the current task and
on as many rows of this memory at a time, over all classes seen so far, and distils the old logits from the
global model as it was when the task began. Rows are offered to the memory when their task is over, so that
they take no places while they are still trained on. The release has neither herding nor the nearest-mean
classifier of the original, and draws its memory anew every round from all old data, which a client that may
only keep the memory cannot do: here every row has a random priority of its own, and the memory holds the rows
of the highest. What is kept are row numbers; the engine reads the images.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.federate import Kit, Seen, Term
from fcljax.learner import Learner, Model, Objective
from fcljax.methods.fedavg import averaging
from fcljax.methods.lwf import distil
from fcljax.options import option
from fcljax.types import Batch, Ctx, Method, View


@dataclasses.dataclass(frozen=True)
class ICaRLOptions:
    """Options of iCaRL; weight and temperature are those of TARGET's release, which keeps 2,000 images."""

    memory_size: int = 200  # rows that a client remembers
    distill_weight: float = 1.0  # weight of the distillation
    distill_temperature: float = option(2.0, positive=True)  # temperature of student and teacher


class Exemplars(NamedTuple):
    """Training rows that a client remembers (-1: an empty place), with their labels and priorities."""

    label: Int[Array, " M"]
    row: Int[Array, " M"]
    priority: Float[Array, " M"]


class Memory(NamedTuple):
    """A client's exemplars, and the key of its priorities."""

    exemplars: Exemplars
    key: Array


def icarl(options: ICaRLOptions, kit: Kit) -> Method:
    """iCaRL+FL as a method."""
    terms = (
        replay(options.memory_size, kit.train.batch_size),
        distil(options.distill_weight, options.distill_temperature),
    )
    return averaging(kit, Objective("seen"), terms=terms)


def replay(size: int, batch_size: int) -> Term:
    """Rows of earlier tasks join every batch, as many as the batch has itself.

    Args:
      size: rows that a client remembers.
      batch_size: of training, and of the pass that offers rows to the memory.
    """

    def init(key: PRNGKeyArray, part: Model) -> Memory:
        del part
        nothing = Exemplars(jnp.zeros(size, jnp.int32), jnp.full(size, -1, jnp.int32), jnp.full(size, -1.0))
        return Memory(nothing, jax.random.key_data(key))

    def look(learner: Learner, seen: Seen, memory: Memory) -> Memory:
        del learner
        return memory._replace(exemplars=keep_highest(memory.exemplars, seen.batch, memory.key))

    def recall(ctx: Ctx, memory: Memory, key: PRNGKeyArray) -> Int[Array, " recalls"]:
        return draw(memory.exemplars, ctx.task.old, batch_size, key)

    return Term(
        "replay", init=init, open=lambda ctx, state, key: state, look=look,
        keep=lambda ctx, memory, part, state: memory, recall=recall,
        rows=lambda state: state.exemplars.row, recalls=batch_size,
        view=View(1, batch_size, shuffle=False, augment=False), at_end=True,
    )  # fmt: skip


def draw(exemplars: Exemplars, old: Bool[Array, " C"], count: int, key: PRNGKeyArray) -> Int[Array, " count"]:
    """Places of `count` exemplars of old classes, uniformly and with repetition; all -1 if there are none."""
    usable = (exemplars.row >= 0) & old[exemplars.label]
    place = jax.random.categorical(key, jnp.where(usable, 0.0, -jnp.inf), shape=(count,))
    return jnp.where(jnp.any(usable), place, -1)


def keep_highest(exemplars: Exemplars, batch: Batch, key_data: Array) -> Exemplars:
    """The exemplars after a batch was offered: of all rows ever offered those with the highest priorities,
    each at most once. A row's priority is a uniform number that depends on the client and the row alone, so
    this is a uniform sample, whatever the order."""
    key = jax.random.wrap_key_data(key_data)
    uniform = lambda row: jax.random.uniform(jax.random.fold_in(key, row))
    priority = jax.vmap(uniform)(jnp.maximum(batch.row, 0))
    known = jnp.any(batch.row[:, None] == exemplars.row, axis=1)
    offered = Exemplars(batch.label, batch.row, jnp.where(batch.mask & ~known, priority, -2.0))
    both = jax.tree.map(lambda mine, new: jnp.concatenate([mine, new.astype(mine.dtype)]), exemplars, offered)
    best = jnp.argsort(-both.priority, stable=True)[: exemplars.row.shape[0]]
    return jax.tree.map(lambda leaf: leaf[best], both)
