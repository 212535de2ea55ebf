"""An adapter that trains in the first task and is frozen then, for methods that keep
sums of features.

Sums of earlier tasks would be those of another network if it trained on. Later tasks
still play their rounds, in which nothing changes but by the rounding of means.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fcljax.parts.client import ClientRule, StepLoss
from fcljax.parts.learner import Params
from fcljax.types import ClientContext


def first_task_only(name: str, loss: StepLoss | None = None) -> ClientRule:
    """Put adapter and running statistics back after every step of later tasks, also
    against weight decay.

    Args:
      name: of the rule.
      loss: of the rule, if it has one.
    """
    return ClientRule(name, loss, project=_freeze)


def _freeze(context: ClientContext, trainable: Params) -> Params:
    first = context.task.index == 0
    sent = context.payload.trainable

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(first, new, old)

    adapter = jax.tree.map(pick, trainable.adapter, sent.adapter)
    return trainable._replace(adapter=adapter, stats=jax.tree.map(pick, trainable.stats, sent.stats))
