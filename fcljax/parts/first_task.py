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

    The rule projects after every step. A loss without gradient would not be enough, as
    weight decay would still move them.

    Args:
      name: of the rule.
      loss: of the rule, if it has one.
    """
    return ClientRule(name, loss, project=_freeze)


def _freeze(context: ClientContext, trainable: Params) -> Params:
    is_first_task = context.task.index == 0
    broadcast = context.payload.trainable

    # `where`, not `if`: the task is data, and one program serves all tasks
    def select(new: Array, old: Array) -> Array:
        return jnp.where(is_first_task, new, old)

    adapter = jax.tree.map(select, trainable.adapter, broadcast.adapter)
    stats = jax.tree.map(select, trainable.stats, broadcast.stats)
    return trainable._replace(adapter=adapter, stats=stats)
