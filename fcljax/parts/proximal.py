"""Client rules that keep clients near the model that the server broadcast. A run can add
them to any method."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.learner import Params
from fcljax.types import ClientContext

# rule -> the option of a run that adds it
OPTION_OF_RULE = {"prox": "prox_weight", "norm_bound": "norm_bound"}


def prox(weight: float) -> ClientRule:
    """Add mu / 2 ||w - w_t||^2, w_t the broadcast (FedProx, Li et al. 2020, eq. 2).

    Args:
      weight: mu.
    """

    def loss(step: ClientStep, _memory: tuple) -> Array:
        # `squared` avoids the root, whose gradient at 0 is NaN: w = w_t at the first step
        change = _change(step.context, step.trainable)
        return weight / 2 * optax.tree.norm(change, squared=True)

    return ClientRule("prox", loss)


def norm_bound(radius: float) -> ClientRule:
    """Project the client's parameters after every step onto a ball around the broadcast.

    The L2 norm is that of all parameters together (projected gradient descent; Sun et
    al. 2019, section 4).

    Args:
      radius: of the ball.
    """

    def project(context: ClientContext, trainable: Params) -> Params:
        change = _change(context, trainable)
        # without a change the norm is 0: a denominator of at least radius / 2 avoids the
        # division by 0, and still gives scale 1 inside of the ball
        scale = jnp.minimum(1.0, radius / jnp.maximum(optax.tree.norm(change), radius / 2))
        start = _sent(context, context.payload.trainable)
        bounded = jax.tree.map(lambda start, change: start + scale * change, start, change)
        # a personal classifier has no broadcast value to stay near
        if not _sends_classifier(context):
            bounded = bounded._replace(classifier=trainable.classifier)
        # running statistics follow the data, not a gradient, and are not bounded
        return bounded._replace(stats=trainable.stats)

    return ClientRule("norm_bound", project=project)


def _change(context: ClientContext, trainable: Params) -> Params:
    """Return the change of the trainable parameters from the broadcast."""
    broadcast = _sent(context, context.payload.trainable)
    return jax.tree.map(jnp.subtract, _sent(context, trainable), broadcast)


def _sent(context: ClientContext, params: Params) -> Params:
    """Return the trainable parameters that the server broadcasts, without running
    statistics; () stands for a personal classifier."""
    params = params._replace(stats=())
    if _sends_classifier(context):
        return params
    return params._replace(classifier=())


def _sends_classifier(context: ClientContext) -> bool:
    # the payload has () in place of personal parameters
    return bool(jax.tree.leaves(context.payload.trainable.classifier))
