"""EWC+FL: elastic weight consolidation (Kirkpatrick et al. 2017) on LoRA and a linear classifier, after
TARGET's release (ICCV 2023).

Every client pulls its weights to where they were after its last task, the harder the more its own old data
cared for them. The release evaluates this penalty on the global network object and not on the weights that
train, so that it has no gradient; here it is on the latter.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.methods.finetune import FinetuneConfig, Local, Recipe, Tuned, logits_of, make_client, make_method
from fcljax.models.heads import cross_entropy
from fcljax.types import Backbone, Method, Phase, Setting, View


@dataclasses.dataclass(frozen=True)
class EWCConfig(FinetuneConfig):
    """Options of EWC; the values are those of TARGET's release."""

    ewc_weight: float = 1000.0  # lambda; half of it weighs the penalty
    fisher_limit: float = 1e-4  # largest entry of a task's Fisher information


class Anchor(NamedTuple):
    """What a client knows of its earlier tasks: weights, and how much each matters. Fisher is 0 before the
    first task is over.

    `next_tuned`, `next_fisher`: the same for the task that it last took part in, which counts once a later
    one begins.
    """

    tuned: Tuned
    fisher: Tuned
    next_tuned: Tuned
    next_fisher: Tuned
    share: Float[Array, ""]  # of the classes seen that were old in that task
    task: Int[Array, ""]  # which it is; -1: none yet


class Memory(NamedTuple):
    """A client at work: its anchor, and the sums of a new Fisher information."""

    anchor: Anchor
    squares: Tuned
    batches: Float[Array, ""]


def ewc(
    config: EWCConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """EWC+FL as a method."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def penalty(frozen, tuned, memory: Memory, batch, task, key, logits):
        """lambda / 2 sum F (w - w*)^2"""
        del frozen, batch, task, key, logits
        pull = jax.tree.map(
            lambda f, w, old: jnp.sum(f * (w - old) ** 2), memory.anchor.fisher, tuned, memory.anchor.tuned
        )
        return config.ewc_weight / 2 * sum(jax.tree.leaves(pull))

    def look(frozen, broadcast, local: Local, batch, task, key):
        """Add the squared gradient of a batch, at the weights that were trained."""
        del broadcast, key
        loss_of = lambda tuned: cross_entropy(
            logits_of(recipe, frozen, tuned, batch.image), batch.label, task.current, batch.mask
        )
        gradient = jax.grad(loss_of)(local.tuned)
        squares = jax.tree.map(lambda total, g: total + g**2, local.memory.squares, gradient)
        return local._replace(
            memory=local.memory._replace(squares=squares, batches=local.memory.batches + 1)
        ), {}

    def keep(local: Local, state, task) -> Anchor:
        del state
        memory: Memory = local.memory
        fisher = jax.tree.map(
            lambda s: jnp.minimum(s / jnp.maximum(memory.batches, 1), config.fisher_limit), memory.squares
        )
        old = jnp.sum(task.seen & ~task.current) / jnp.sum(task.seen)
        return memory.anchor._replace(
            next_tuned=local.tuned, next_fisher=fisher, share=old.astype(jnp.float32), task=task.index
        )

    fisher_pass = Phase(View(1, batch_size, shuffle=False, augment=False), look)
    client = make_client(recipe, open_memory=consolidate, term=penalty, later=(fisher_pass,), keep=keep)
    return make_method(recipe, client, init_client=_new)


def consolidate(broadcast, state: Anchor, task, info, key) -> Memory:
    """When a later task begins, what was learned in the last one becomes part of the anchor: F <- a F + (1 -
    a) F_new with a the share of classes that were old then, and w* <- w_new."""
    del broadcast, info, key
    new = (state.task >= 0) & (state.task != task.index)
    merged = jax.tree.map(
        lambda f, g: state.share * f + (1 - state.share) * g, state.fisher, state.next_fisher
    )
    select = lambda a, b: jax.tree.map(lambda x, y: jnp.where(new, x, y), a, b)
    anchor = state._replace(tuned=select(state.next_tuned, state.tuned), fisher=select(merged, state.fisher))
    return Memory(anchor, jax.tree.map(jnp.zeros_like, state.fisher), jnp.zeros(()))


def _new(key, server: Tuned) -> Anchor:
    del key
    zeros = jax.tree.map(jnp.zeros_like, server)
    return Anchor(server, zeros, server, zeros, jnp.zeros(()), jnp.int32(-1))
