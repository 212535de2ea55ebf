"""iCaRL+FL: rehearsal (Rebuffi et al. 2017) on LoRA and a linear classifier, in the form of TARGET's release
(ICCV 2023).

A client keeps a uniform sample of all images that it has ever trained on, trains on the current task and on
as many images of this memory at a time, over all classes seen so far, and distils the old logits from the
global model as it was when the task began. The release has neither herding nor the nearest-mean classifier of
the original, and draws its memory anew every round from all old data, which a client that may only keep the
  memory cannot do: here every row has a random priority of its own, and the memory holds the rows of the
    highest.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.methods.finetune import (
    FinetuneConfig,
    Local,
    Recipe,
    descend,
    logits_of,
    make_client,
    make_method,
    old_classes,
)
from fcljax.methods.lwf import Teacher, first_model_of_task
from fcljax.models.heads import correct, cross_entropy, distillation
from fcljax.types import Backbone, Batch, Method, Phase, Setting, View


@dataclasses.dataclass(frozen=True)
class ICaRLConfig(FinetuneConfig):
    """Options of iCaRL; weight and temperature are those of TARGET's release, which keeps 2,000 images."""

    memory_size: int = 200  # images that a client keeps
    distill_weight: float = 1.0  # weight of the distillation
    distill_temperature: float = 2.0  # temperature of student and teacher


class Exemplars(NamedTuple):
    """Images that a client keeps, with the number of their training row (-1: an empty place) and their
    priority."""

    image: Float[Array, "M H W 3"]
    label: Int[Array, " M"]
    row: Int[Array, " M"]
    priority: Float[Array, " M"]


class Memory(NamedTuple):
    """A client's teacher and exemplars, and the key of its priorities."""

    teacher: Teacher
    exemplars: Exemplars
    key: Array


def icarl(
    config: ICaRLConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """iCaRL+FL as a method."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def open_memory(broadcast, state: Memory, task, info, key) -> Memory:
        return state._replace(teacher=first_model_of_task(broadcast, state.teacher, task, info, key))

    def train(frozen, broadcast, local: Local, batch, task, key):
        del broadcast
        old = old_classes(task)
        both = join(batch, draw(local.memory.exemplars, old, batch.mask.shape[0], key))
        target = logits_of(recipe, frozen, local.memory.teacher.tuned, both.image)

        def loss_of(tuned):
            logits = logits_of(recipe, frozen, tuned, both.image)
            loss = cross_entropy(logits, both.label, task.seen, both.mask)
            kept = distillation(logits, target, old, both.mask, config.distill_temperature)
            return loss + config.distill_weight * kept, correct(logits, both.label, task.seen, both.mask)

        return descend(recipe, local, loss_of, jnp.sum(both.mask))

    def remember(frozen, broadcast, local: Local, batch, task, key):
        del frozen, broadcast, task, key
        exemplars = keep_highest(local.memory.exemplars, batch, local.memory.key)
        return local._replace(memory=local.memory._replace(exemplars=exemplars)), {}

    def new(key, server) -> Memory:
        size = config.memory_size
        empty = Exemplars(
            jnp.zeros((size, *backbone.image), jnp.float16),
            jnp.zeros(size, jnp.int32),
            jnp.full(size, -1, jnp.int32),
            jnp.full(size, -1.0),
        )
        return Memory(Teacher(server, jnp.int32(-1)), empty, jax.random.key_data(key))

    look = Phase(View(1, batch_size, shuffle=False, augment=False), remember)
    client = make_client(
        recipe, open_memory, later=(look,), keep=lambda local, state, task: local.memory, train=train
    )
    return make_method(recipe, client, init_client=new)


def draw(exemplars: Exemplars, old, count: int, key) -> Batch:
    """`count` exemplars of old classes, uniformly and with repetition; all masked if there are none."""
    usable = (exemplars.row >= 0) & old[exemplars.label]
    place = jax.random.categorical(key, jnp.where(usable, 0.0, -jnp.inf), shape=(count,))
    there = jnp.broadcast_to(jnp.any(usable), (count,))
    place = jnp.where(there, place, 0)
    image = jnp.where(
        there.reshape(-1, *[1] * (exemplars.image.ndim - 1)), exemplars.image[place].astype(jnp.float32), 0.0
    )
    return Batch(
        image, jnp.where(there, exemplars.label[place], 0), there, jnp.where(there, exemplars.row[place], -1)
    )


def join(batch: Batch, other: Batch) -> Batch:
    """Both batches as one, without cached features."""
    both = (jnp.concatenate([mine, theirs]) for mine, theirs in zip(batch[:4], other[:4], strict=True))
    return Batch(*both)


def keep_highest(exemplars: Exemplars, batch: Batch, key_data) -> Exemplars:
    """The exemplars after a batch was offered: of all rows ever offered those with the highest priorities,
    each at most once. A row's priority is a uniform number that depends on the client and the row alone, so
    this is a uniform sample, whatever the order."""
    key = jax.random.wrap_key_data(key_data)
    priority = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row)))(
        jnp.maximum(batch.row, 0)
    )
    known = jnp.any(batch.row[:, None] == exemplars.row, axis=1)
    offered = Exemplars(
        batch.image.astype(exemplars.image.dtype),
        batch.label,
        batch.row,
        jnp.where(batch.mask & ~known, priority, -2.0),
    )
    both = jax.tree.map(
        lambda mine, theirs: jnp.concatenate([mine, theirs.astype(mine.dtype)]), exemplars, offered
    )
    best = jnp.argsort(-both.priority, stable=True)[: exemplars.row.shape[0]]
    return jax.tree.map(lambda leaf: leaf[best], both)
