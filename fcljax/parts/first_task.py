"""An adapter that trains only in the first task, for methods that keep sums of features.

Training in later tasks would make earlier sums those of another network. Later tasks
still play their rounds, which change nothing except by the rounding of means.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fcljax.parts.client import ClientRule, StepLoss
from fcljax.parts.learner import Params
from fcljax.types import ClientContext


def first_task_only(name: str, loss: StepLoss | None = None) -> ClientRule:
    """Freeze adapter and running statistics after the first task.

    A projection after every step, because weight decay would change them too.

    Args:
      name: of the rule.
      loss: of the rule, if it has one.
    """
    return ClientRule(name, loss, project=_freeze)


def _freeze(context: ClientContext, trainable: Params) -> Params:
    is_first_task = context.task.index == 0
    broadcast = context.payload.trainable

    def select(new: Array, old: Array) -> Array:
        return jnp.where(is_first_task, new, old)

    adapter = jax.tree.map(select, trainable.adapter, broadcast.adapter)
    stats = jax.tree.map(select, trainable.stats, broadcast.stats)
    return trainable._replace(adapter=adapter, stats=stats)
