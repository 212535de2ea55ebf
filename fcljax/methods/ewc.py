"""EWC+FL: elastic weight consolidation (Kirkpatrick et al. 2017), after TARGET's release (ICCV 2023).

Every client pulls what it trains to where that was after the client's last task, the harder the more its own
old data cared for it. The release evaluates this penalty on the global network object and not on the weights
that train, so that it has no gradient; here it is on the latter.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.federate import Kit, Seen, Term
from fcljax.learner import Learner, Model
from fcljax.methods.fedavg import averaging
from fcljax.models.heads import cross_entropy
from fcljax.options import option
from fcljax.types import Ctx, Method, View


@dataclasses.dataclass(frozen=True)
class EWCOptions:
    """Options of EWC; the values are those of TARGET's release."""

    ewc_weight: float = 1000.0  # lambda; half of it weighs the penalty
    fisher_limit: float = option(1e-4, positive=True)  # largest entry of a task's Fisher information


class Anchor(NamedTuple):
    """What a client knows of its earlier tasks: its part, and how much each number of it matters. Fisher is 0
    before the first task is over.

    `next_part`, `next_fisher`: the same for the task that it last took part in, which counts once a later one
    begins.
    """

    part: Model
    fisher: Model
    next_part: Model
    next_fisher: Model
    share: Float[Array, ""]  # of the classes seen that were old in that task
    task: Int[Array, ""]  # which it is; -1: none yet


class Memory(NamedTuple):
    """A client at work: its anchor, and the sums of a new Fisher information."""

    anchor: Anchor
    squares: Model
    batches: Float[Array, ""]


def ewc(options: EWCOptions, kit: Kit) -> Method:
    """EWC+FL as a method."""
    return averaging(kit, terms=(elastic(options.ewc_weight, options.fisher_limit, kit.train.batch_size),))


def elastic(weight: float, limit: float, batch_size: int) -> Term:
    """lambda / 2 sum F (w - w*)^2 (Kirkpatrick et al. 2017, eq. 3).

    Args:
      weight: lambda.
      limit: largest entry of a task's Fisher information.
      batch_size: of the pass that measures it.
    """

    def loss(learner: Learner, seen: Seen, memory: Memory) -> Float[Array, ""] | float:
        del learner
        anchor = memory.anchor
        pull = jax.tree.map(
            lambda f, w, old: jnp.sum(f * (w - old) ** 2), anchor.fisher, seen.part, anchor.part
        )
        return weight / 2 * sum(jax.tree.leaves(pull))

    def look(learner: Learner, seen: Seen, memory: Memory) -> Memory:
        """Add the squared gradient of a batch, at the weights that were trained."""
        ctx, batch = seen.ctx, seen.batch

        def loss_of(part: Model) -> Float[Array, ""]:
            output = learner.forward(ctx.frozen, ctx.held, part, batch, ctx.task, True)
            return cross_entropy(output.logits, batch.label, ctx.task.current, batch.mask)

        gradient = jax.grad(loss_of)(seen.part)
        squares = jax.tree.map(lambda total, g: total + g**2, memory.squares, gradient)
        return memory._replace(squares=squares, batches=memory.batches + 1)

    def keep(ctx: Ctx, memory: Memory, part: Model, state: Anchor) -> Anchor:
        del state
        mean = lambda s: jnp.minimum(s / jnp.maximum(memory.batches, 1), limit)
        share = (jnp.sum(ctx.task.old) / jnp.sum(ctx.task.seen)).astype(jnp.float32)
        fisher = jax.tree.map(mean, memory.squares)
        return memory.anchor._replace(next_part=part, next_fisher=fisher, share=share, task=ctx.task.index)

    view = View(1, batch_size, shuffle=False, augment=False)
    return Term("ewc", loss, _new, consolidate, look, keep, view=view)


def consolidate(ctx: Ctx, state: Anchor, key: PRNGKeyArray) -> Memory:
    """When a later task begins, what was learned in the last one becomes part of the anchor: F <- a F + (1 -
    a) F_new with a the share of classes that were old then, and w* <- w_new."""
    del key
    new = (state.task >= 0) & (state.task != ctx.task.index)
    merged = jax.tree.map(
        lambda f, g: state.share * f + (1 - state.share) * g, state.fisher, state.next_fisher
    )
    select = lambda a, b: jax.tree.map(lambda x, y: jnp.where(new, x, y), a, b)
    anchor = state._replace(part=select(state.next_part, state.part), fisher=select(merged, state.fisher))
    return Memory(anchor, jax.tree.map(jnp.zeros_like, state.fisher), jnp.zeros(()))


def _new(key: PRNGKeyArray, part: Model) -> Anchor:
    del key
    zeros = jax.tree.map(jnp.zeros_like, part)
    return Anchor(part, zeros, part, zeros, jnp.zeros(()), jnp.int32(-1))
