"""A network that computes a batch in pieces, for devices whose memory does not hold all of it at once.

The loss still sees the whole batch: only the network's own work is divided. So every loss, every rule of a
client and every draw of a step is what it is without pieces, and the gradient is the same up to rounding. The
backward pass computes each piece again, which costs one more forward pass.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fcljax.errors import InputError
from fcljax.models.vit import per_image
from fcljax.types import Autoencoder, Features, Network, PyTree


def in_microbatches(network: Network, size: int) -> Network:
    """The network, computing at most `size` images at a time."""

    def apply(
        params: PyTree, image: Array, injection: PyTree, train: bool, mask: Array | None = None
    ) -> tuple[Features, PyTree]:
        if network.split and train:
            raise InputError(
                f"microbatch: {size} is not honoured by a network that trains on the statistics of its whole "
                "batch; leave it out"
            )
        if len(image) <= size:
            return network.apply(params, image, injection, train, mask)
        own, join = per_image(injection)

        def piece(each: tuple[Array, PyTree]) -> Features:
            found, _ = network.apply(params, each[0], join(each[1]), train, None)
            return found._replace(taps={})  # else the blocks of all pieces would be kept

        return in_pieces(piece, (image, own), size), params

    pair = network.autoencoder
    return network._replace(apply=apply, autoencoder=pair and _autoencoder(pair, size))


def _autoencoder(pair: Autoencoder, size: int) -> Autoencoder:
    def encode(params: PyTree, image: Array, keep: Array) -> Array:
        return in_pieces(lambda each: pair.encode(params, *each), (image, keep), size)

    def decode(decoder: PyTree, latent: Array, restore: Array, prompt: Array | None = None) -> Array:
        if prompt is not None and prompt.ndim == 3:
            return in_pieces(lambda each: pair.decode(decoder, *each), (latent, restore, prompt), size)
        return in_pieces(lambda each: pair.decode(decoder, *each, prompt), (latent, restore), size)

    return pair._replace(encode=encode, decode=decode)


def in_pieces(function: Callable[[PyTree], PyTree], batch: PyTree, size: int) -> PyTree:
    """function(batch), computed for at most `size` examples at a time, and once more for its gradient.

    Args:
      function: of leaves [n, ...], each of whose results [n, ...] depends on its own example alone.
      batch: leaves [batch, ...].
      size: the most examples of a piece. Pieces are of one size; the last is filled up with zeros.
    """
    count = len(jax.tree.leaves(batch)[0])
    pieces = -(-count // size)
    each = -(-count // pieces)
    if pieces == 1:
        return function(batch)

    def divided(x: Array) -> Array:
        filled = jnp.pad(x, [(0, pieces * each - count)] + [(0, 0)] * (x.ndim - 1))
        return filled.reshape(pieces, each, *x.shape[1:])

    found = jax.lax.map(jax.checkpoint(function), jax.tree.map(divided, batch))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], found)
