"""How many examples the clients that took part in a task have, for rules that keep
something per client.

The weighted mean of what all clients keep needs everybody's weight, also of those that
rest in a round; a server knows the weights of those that took part so far. Such a mean
changes its denominator as more clients take part: a rule keeps the weighted sum, and
divides it by `num_examples` when it is used.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.parts.server import ServerRound


class Seen(NamedTuple):
    """Numbers of examples of clients in a task."""

    examples: Float[Array, " K"]
    """Number of examples of each client; 0: it has not taken part yet."""
    task: Int[Array, ""]


def nobody(clients: int) -> Seen:
    """Return the numbers before the first task."""
    return Seen(jnp.zeros(clients), jnp.int32(-1))


def with_participants(seen: Seen, round: ServerRound) -> Seen:
    """Return those seen in this task, with the valid participants of a round; a new
    task begins without any."""
    place = jnp.where(round.valid, round.ids, len(seen.examples))
    before = jnp.where(seen.task == round.task.index, seen.examples, 0.0)
    return Seen(before.at[place].set(round.weights, mode="drop"), round.task.index)


def num_examples(seen: Seen) -> Float[Array, ""]:
    """Return the number of examples of all clients seen so far in the task; above 0, so
    that it divides."""
    return jnp.maximum(jnp.sum(seen.examples), 1e-12)
