"""Numbers of examples of the clients that have taken part in a task.

A weighted mean over all clients, such as SCAFFOLD's c, needs the weights of clients that
do not take part in the round. The server knows those of the participants so far, so the
denominator grows: a rule stores the weighted sum, and divides it by `num_examples` when
it is used.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.parts.server import ServerRound


class Seen(NamedTuple):
    """Numbers of examples of clients in a task."""

    examples: Float[Array, " K"]
    """Number of examples per client; 0 before its first participation."""
    task: Int[Array, ""]


def no_clients(clients: int) -> Seen:
    """Return the numbers before the first task."""
    return Seen(jnp.zeros(clients), jnp.int32(-1))


def with_participants(seen: Seen, round: ServerRound) -> Seen:
    """Add a round's valid participants; a new task starts with no clients."""
    # JAX drops writes beyond the last client: invalid participants change nothing
    index = jnp.where(round.valid, round.ids, len(seen.examples))
    examples = jnp.where(seen.task == round.task.index, seen.examples, 0.0)
    return Seen(examples.at[index].set(round.weights, mode="drop"), round.task.index)


def num_examples(seen: Seen) -> Float[Array, ""]:
    """Return the total number of examples, above 0 so that it is a divisor."""
    return jnp.maximum(jnp.sum(seen.examples), 1e-12)
