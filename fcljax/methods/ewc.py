"""EWC+FL: elastic weight consolidation (Kirkpatrick et al. 2017), after TARGET's release (ICCV 2023).

When a task is over every client measures, on its own rows and under the global model, how much each number of
what it trains mattered; later it pulls them there, the harder the more they did. The release evaluates this
penalty on the global network object and not on the weights that train, so that it has no gradient; here it is
on the latter.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.methods.fedavg import averaging
from fcljax.models.heads import cross_entropy
from fcljax.options import option
from fcljax.parts.federate import Run, Seen, Term
from fcljax.parts.learner import Learner, Model
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, View


@dataclasses.dataclass(frozen=True)
class EWCOptions:
    """Options of EWC; the values are those of TARGET's release."""

    ewc_weight: float = 1000.0
    """Weight lambda of the elastic penalty, half of which weighs the squares."""
    fisher_limit: float = option(1e-4, positive=True)
    """Largest entry of a task's Fisher information."""


# how TARGET's release trains this baseline (specification C0), with one LoRA pair for all tasks
PRESETS = {
    "intended": Preset(
        EWCOptions(),
        RunConfig(optimiser="sgd", lr=0.01, momentum=0.9),
        (LoraOptions(lora_pairs="one", lora_lr=0.01),),
    )
}


class Anchor(NamedTuple):
    """What a client knows of the tasks that it had rows of: the model after the last of them, and how much
    each number of it matters, 0 before the first is over."""

    part: Model
    fisher: Model
    known: Bool[Array, ""]  # is any of them over?


class Memory(NamedTuple):
    """A client at work: its anchor, and the sums of a new Fisher information."""

    anchor: Anchor
    squares: Model
    batches: Float[Array, ""]


def ewc(options: EWCOptions, run: Run) -> Method:
    """EWC+FL as a method."""
    return averaging(run, terms=(elastic(options.ewc_weight, options.fisher_limit, run.train.batch_size),))


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
        context, batch = seen.context, seen.batch

        def loss_of(part: Model) -> Float[Array, ""]:
            output = learner.forward(context.frozen, context.cached, part, batch, context.task, True)
            return cross_entropy(output.logits, batch.label, context.task.current, batch.mask)

        gradient = jax.grad(loss_of)(seen.part)
        squares = jax.tree.map(lambda total, g: total + g**2, memory.squares, gradient)
        return memory._replace(squares=squares, batches=memory.batches + 1)

    def keep(context: ClientContext, memory: Memory, part: Model, state: Anchor) -> Anchor:
        del state
        mean = lambda s: jnp.minimum(s / jnp.maximum(memory.batches, 1), limit)
        return consolidate(context, memory.anchor, part, jax.tree.map(mean, memory.squares))

    view = View(1, batch_size, shuffle=False, augment=False)
    return Term("ewc", loss, _new, _begin, look, keep, view=view, at_end=True)


def consolidate(context: ClientContext, anchor: Anchor, part: Model, fisher: Model) -> Anchor:
    """When a task is over: w* <- w, and F <- a F + (1 - a) F_new with a the share of classes that were old in
    it. A client whose first task it is has nothing old to keep, so a is 0 then."""
    share = jnp.where(anchor.known, jnp.sum(context.task.old) / jnp.sum(context.task.seen), 0.0)
    merge = lambda old, new: share * old + (1 - share) * new
    return Anchor(part, jax.tree.map(merge, anchor.fisher, fisher), jnp.bool_(True))


def _begin(context: ClientContext, state: Anchor, key: PRNGKeyArray) -> Memory:
    del context, key
    return Memory(state, jax.tree.map(jnp.zeros_like, state.fisher), jnp.zeros(()))


def _new(key: PRNGKeyArray, part: Model) -> Anchor:
    del key
    return Anchor(part, jax.tree.map(jnp.zeros_like, part), jnp.bool_(False))
