"""Terms that any method may add to its clients' work: keeping them near the model that they were sent."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from fcljax.parts.federate import Seen, Term
from fcljax.parts.learner import Learner, Model
from fcljax.types import ClientContext


def prox(weight: float) -> Term:
    """FedProx: mu / 2 ||w - w_t||^2, with w_t what was broadcast (Li et al. 2020, eq. 2).

    Args:
      weight: mu.
    """

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Array:
        del learner, memory
        change = _change(seen.context, seen.part)
        return weight / 2 * optax.tree.norm(change, squared=True)

    return Term("prox", loss)


def norm_bound(radius: float) -> Term:
    """After every step the client's parameters are projected onto the ball of this L2 radius around what was
    broadcast, all of them together (projected gradient descent; Sun et al. 2019, section 4)."""

    def limit(context: ClientContext, part: Model) -> Model:
        change = _change(context, part)
        scale = jnp.minimum(1.0, radius / jnp.maximum(optax.tree.norm(change), radius / 2))
        bounded = jax.tree.map(
            lambda start, by: start + scale * by, _moves(context, context.payload.part), change
        )
        head = bounded.classifier if _sends_classifier(context) else part.classifier
        return bounded._replace(classifier=head, stats=part.stats)

    return Term("norm_bound", limit=limit)


def _change(context: ClientContext, part: Model) -> Model:
    """How far what trains has moved from what was broadcast."""
    return jax.tree.map(jnp.subtract, _moves(context, part), _moves(context, context.payload.part))


def _moves(context: ClientContext, model: Model) -> Model:
    """What trains and was broadcast: no running statistics, nothing that clients keep to themselves."""
    return model._replace(stats=(), classifier=model.classifier if _sends_classifier(context) else ())


def _sends_classifier(context: ClientContext) -> bool:
    """Not where clients keep it to themselves."""
    return bool(jax.tree.leaves(context.payload.part.classifier))
