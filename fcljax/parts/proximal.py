"""Client rules that keep clients near the model that they were sent; any method may carry
them."""

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
        # the gradient of ||.||^2 is finite at 0, where that of
        # ||.|| is not: w = w_t at the first step
        return weight / 2 * optax.tree.norm(_change(step.context, step.trainable), squared=True)

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
        # the denominator is at least radius / 2, so that no change is no division by 0;
        # inside of the ball the scale is 1
        scale = jnp.minimum(1.0, radius / jnp.maximum(optax.tree.norm(change), radius / 2))
        start = _sent(context, context.payload.trainable)
        bounded = jax.tree.map(lambda start, change: start + scale * change, start, change)
        # a classifier that clients keep for themselves
        # has no broadcast value to stay near
        if not _sends_classifier(context):
            bounded = bounded._replace(classifier=trainable.classifier)
        # running statistics move by the forward pass and have no ball
        return bounded._replace(stats=trainable.stats)

    return ClientRule("norm_bound", project=project)


def _change(context: ClientContext, trainable: Params) -> Params:
    """Return the change of the trainable parameters from the broadcast."""
    return jax.tree.map(jnp.subtract, _sent(context, trainable), _sent(context, context.payload.trainable))


def _sent(context: ClientContext, params: Params) -> Params:
    """Return what trains and was broadcast: no running statistics, nothing that clients
    never send."""
    params = params._replace(stats=())
    if _sends_classifier(context):
        return params
    return params._replace(classifier=())


def _sends_classifier(context: ClientContext) -> bool:
    return bool(jax.tree.leaves(context.payload.trainable.classifier))
