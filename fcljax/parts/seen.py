"""How many examples the clients that took part in a task have, for rules that keep something per client.

A weighted mean over all clients, of which only some take part in a round, needs everybody's weight; what a
server knows are the weights of those that took part so far.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.parts.server import ServerRound


class Seen(NamedTuple):
    """Numbers of examples of clients in a task."""

    examples: Float[Array, " K"]
    """0: the client has not taken part yet."""
    task: Int[Array, ""]


def nobody(clients: int) -> Seen:
    """Before the first task."""
    return Seen(jnp.zeros(clients), jnp.int32(-1))


def with_participants(seen: Seen, round: ServerRound) -> Seen:
    """Those seen in this task, with the valid participants of a round; a new task begins with nobody."""
    place = jnp.where(round.valid, round.ids, len(seen.examples))
    before = jnp.where(seen.task == round.task.index, seen.examples, 0.0)
    return Seen(before.at[place].set(round.weights, mode="drop"), round.task.index)


def participating_share(seen: Seen, round: ServerRound) -> Float[Array, ""]:
    """The share of the participants of a round in the examples of all clients seen so far."""
    own = jnp.sum(jnp.where(round.valid, round.weights, 0.0))
    return own / jnp.maximum(jnp.sum(seen.examples), 1e-12)
