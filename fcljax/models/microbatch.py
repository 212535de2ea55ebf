"""A network that computes a batch in pieces: one after the other, for devices whose memory does not hold all
of it at once, or on several devices at the same time.

The loss still sees the whole batch: only the network's own work is divided. So every loss, every rule of a
client and every draw of a step is what it is without pieces, and the gradient is the same up to rounding. Of
pieces one after the other, the backward pass computes each again, which costs one more forward pass.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fcljax.errors import InputError
from fcljax.mesh import BATCH, sharing_batch
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
        own, rest, join = per_image(injection)

        def piece(each: tuple[Array, PyTree]) -> Features:
            found, _ = network.apply(params, each[0], join(each[1], rest), train, None)
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


# ---- several devices ---------------------------------------------------------------------------------------


def on_batch_devices(network: Network) -> Network:
    """The network, whose images are shared out evenly among the devices that share a client's batch.

    Every device gets the features of all images and the gradients of all parameters, and does the rest of a
    step by itself. A network that trains on the statistics of its batch computes all of it on each.
    """

    def apply(
        params: PyTree, image: Array, injection: PyTree, train: bool, mask: Array | None = None
    ) -> tuple[Features, PyTree]:
        if len(image) < sharing_batch() or sharing_batch() == 1 or (network.split and train):
            return network.apply(params, image, injection, train, mask)
        own, rest, join = per_image(injection)

        def part(shared: PyTree, each: PyTree) -> Features:
            found, _ = network.apply(shared[0], each[0], join(each[1], shared[1]), train, None)
            return found._replace(taps={})  # else the blocks of all images would be exchanged

        return _shared_out(part, (params, rest), (image, own)), params

    pair = network.autoencoder
    return network._replace(apply=apply, autoencoder=pair and _on_batch_devices(pair))


def _on_batch_devices(pair: Autoencoder) -> Autoencoder:
    def encode(params: PyTree, image: Array, keep: Array) -> Array:
        if sharing_batch() == 1:
            return pair.encode(params, image, keep)
        return _shared_out(lambda params, each: pair.encode(params, *each), params, (image, keep))

    def decode(decoder: PyTree, latent: Array, restore: Array, prompt: Array | None = None) -> Array:
        if sharing_batch() == 1:
            return pair.decode(decoder, latent, restore, prompt)
        if prompt is not None and prompt.ndim == 3:
            return _shared_out(
                lambda decoder, each: pair.decode(decoder, *each), decoder, (latent, restore, prompt)
            )
        return _shared_out(
            lambda shared, each: pair.decode(shared[0], *each, shared[1]),
            (decoder, prompt),
            (latent, restore),
        )

    return pair._replace(encode=encode, decode=decode)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared_out(function: Callable[[PyTree, PyTree], PyTree], shared: PyTree, batch: PyTree) -> PyTree:
    """function(shared, batch) of leaves [n, ...], of which each device computes its part."""
    return _gathered(function(shared, _mine(batch)), len(jax.tree.leaves(batch)[0]))


def _share_out(function: Callable, shared: PyTree, batch: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    found, back = jax.vjp(function, shared, _mine(batch))
    return _gathered(found, len(jax.tree.leaves(batch)[0])), (back, batch)


def _put_together(function: Callable, kept: tuple, gradient: PyTree) -> tuple[PyTree, PyTree]:
    """Every device has the gradient of all results: its part of it gives its part of the sum."""
    del function
    back, batch = kept
    of_shared, of_mine = back(_mine(gradient))

    def of_all(found: Array, x: Array) -> Array | np.ndarray:
        whole = found.dtype == jax.dtypes.float0  # of whole numbers there is no gradient
        return np.zeros(x.shape, found.dtype) if whole else _gathered(found, len(x))

    def total(found: Array) -> Array:
        return found if found.dtype == jax.dtypes.float0 else jax.lax.psum(found, BATCH)

    return jax.tree.map(total, of_shared), jax.tree.map(of_all, of_mine, batch)


_shared_out.defvjp(_share_out, _put_together)


def _mine(batch: PyTree) -> PyTree:
    """This device's part of leaves [n, ...]; the last is filled up with zeros."""
    devices = sharing_batch()

    def part(x: Array) -> Array:
        each = -(-len(x) // devices)
        filled = jnp.pad(x, [(0, devices * each - len(x))] + [(0, 0)] * (x.ndim - 1))
        return jax.lax.dynamic_slice_in_dim(filled, jax.lax.axis_index(BATCH) * each, each)

    return jax.tree.map(part, batch)


def _gathered(parts: PyTree, count: int) -> PyTree:
    """The parts of all devices as leaves [count, ...]."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, BATCH, tiled=True)[:count], parts)
