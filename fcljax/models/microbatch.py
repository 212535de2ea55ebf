"""Networks that compute a batch in pieces: in turn, to save memory, or on several
devices at once.

The loss still sees the whole batch: only the network's work is divided. So losses,
client rules and random draws of a step are those of the undivided batch, and the
gradient is the same up to rounding. If pieces are computed in turn, the backward pass
recomputes each: one more forward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fcljax.errors import InputError
from fcljax.mesh import BATCH, sharing_batch
from fcljax.models.vit import merge_injection, split_injection
from fcljax.types import Autoencoder, Features, Network, PyTree

# divide(function, shared, batch) -> function(shared, batch) of leaves [n, ...],
# computed in pieces of n
Divide = Callable[[Callable[[PyTree, PyTree], PyTree], PyTree, PyTree], Any]


def in_microbatches(network: Network, size: int) -> Network:
    """Return the network, computing at most `size` images at a time."""

    def is_whole(inputs: PyTree, train: bool) -> bool:
        if network.split and train:
            raise InputError(
                f"microbatch: {size} cannot work in a network that trains on the statistics of the whole "
                "batch; leave it out"
            )
        return _batch_size(inputs) <= size

    def divide(
        function: Callable[[PyTree, PyTree], PyTree],
        shared: PyTree,
        batch: PyTree,
    ) -> PyTree:
        return in_pieces(lambda piece: function(shared, piece), batch, size)

    return _divided_network(network, divide, is_whole)


def on_batch_devices(network: Network) -> Network:
    """Return the network, dividing images among the devices of a client's batch.

    Every device gets the features of all images and the gradients of all parameters,
    and does the rest of a step by itself. A network that trains on the statistics of
    its batch computes all of it on each.
    """

    def is_whole(inputs: PyTree, train: bool) -> bool:
        devices = sharing_batch()
        return _batch_size(inputs) < devices or devices == 1 or bool(network.split and train)

    def divide(
        function: Callable[[PyTree, PyTree], PyTree],
        shared: PyTree,
        batch: PyTree,
    ) -> PyTree:
        if sharing_batch() == 1:
            return function(shared, batch)
        return _on_devices(function, shared, batch)

    return _divided_network(network, divide, is_whole)


def _divided_network(
    network: Network,
    divide: Divide,
    is_whole: Callable[[PyTree, bool], bool],
) -> Network:
    """Return the network, whose inputs are divided unless is_whole(inputs, train)."""

    def apply(
        params: PyTree,
        inputs: PyTree,
        injection: PyTree,
        train: bool,
        mask: Array | None = None,
    ) -> tuple[Features, PyTree]:
        if is_whole(inputs, train):
            return network.apply(params, inputs, injection, train, mask)
        of_images, shared_injection = split_injection(injection)

        def part(shared: PyTree, batch: PyTree) -> Features:
            params, injection = shared
            part_inputs, part_injection = batch
            injection = merge_injection(part_injection, injection)
            features, _ = network.apply(params, part_inputs, injection, train, None)
            # taps are the outputs of every block, which would be in memory for all images
            return features._replace(taps={})

        return divide(part, (params, shared_injection), (inputs, of_images)), params

    pair = network.autoencoder
    return network._replace(apply=apply, autoencoder=pair and _divided_autoencoder(pair, divide))


def _divided_autoencoder(pair: Autoencoder, divide: Divide) -> Autoencoder:
    def encode(params: PyTree, image: Array, keep: Array) -> Array:
        return divide(lambda params, batch: pair.encode(params, *batch), params, (image, keep))

    def decode(
        decoder: PyTree,
        latent: Array,
        restore: Array,
        prompt: Array | None = None,
    ) -> Array:
        if prompt is not None and prompt.ndim == 3:  # a prompt for each image
            batch = (latent, restore, prompt)
            return divide(lambda decoder, batch: pair.decode(decoder, *batch), decoder, batch)

        def part(shared: PyTree, batch: PyTree) -> Array:
            decoder, prompt = shared
            return pair.decode(decoder, *batch, prompt)

        return divide(part, (decoder, prompt), (latent, restore))

    return pair._replace(encode=encode, decode=decode)


# ---- in turn ---------------------------------------------------------------------------


def in_pieces(function: Callable[[PyTree], PyTree], batch: PyTree, size: int) -> PyTree:
    """Compute function(batch) for at most `size` examples at a time.

    Args:
      function: of leaves [n, ...]; each of its results [n, ...] depends on one example alone.
      batch: leaves [batch, ...].
      size: the most examples of a piece. Pieces are of one size; zeros fill up the last one.
    """
    count = len(jax.tree.leaves(batch)[0])
    pieces = -(-count // size)
    if pieces == 1:
        return function(batch)
    # pieces of equal size: 100 examples in pieces of at most 64 are 50 and 50, not 64
    # and 36 with 28 of padding
    piece_size = -(-count // pieces)

    def divide(x: Array) -> Array:
        return _pad_first_axis(x, pieces * piece_size).reshape(pieces, piece_size, *x.shape[1:])

    # without the checkpoint, the backward pass would find the activations of all pieces
    # in memory, and nothing would be saved
    results = jax.lax.map(jax.checkpoint(function), jax.tree.map(divide, batch))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], results)


def _pad_first_axis(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))


# ---- several devices -------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_devices(
    function: Callable[[PyTree, PyTree], PyTree],
    shared: PyTree,
    batch: PyTree,
) -> PyTree:
    """Compute function(shared, batch), each device on its part of the batch."""
    return _gather(function(shared, _part_of_device(batch)), _batch_size(batch))


def _on_devices_forward(
    function: Callable, shared: PyTree, batch: PyTree
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    results, pullback = jax.vjp(function, shared, _part_of_device(batch))
    return _gather(results, _batch_size(batch)), (pullback, batch)


def _on_devices_backward(
    _function: Callable,
    saved: tuple,
    gradient: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return the gradients of shared and batch.

    Every device has the gradient of all results; its part of it gives its part of both
    gradients.
    """
    pullback, batch = saved
    grad_shared, grad_part = pullback(_part_of_device(gradient))

    def gather_gradient(part: Array, x: Array) -> Array | np.ndarray:
        # jax's type for the gradient of integers, which have none
        if part.dtype == jax.dtypes.float0:
            return np.zeros(x.shape, part.dtype)
        return _gather(part, len(x))

    def sum_over_devices(part: Array) -> Array:
        if part.dtype == jax.dtypes.float0:
            return part
        return jax.lax.psum(part, BATCH)

    return jax.tree.map(sum_over_devices, grad_shared), jax.tree.map(gather_gradient, grad_part, batch)


_on_devices.defvjp(_on_devices_forward, _on_devices_backward)


def _batch_size(batch: PyTree) -> int:
    return len(jax.tree.leaves(batch)[0])


def _part_of_device(batch: PyTree) -> PyTree:
    """Return this device's part of leaves [n, ...]; zeros fill up the last part."""
    devices = sharing_batch()

    def part(x: Array) -> Array:
        length = -(-len(x) // devices)
        start = jax.lax.axis_index(BATCH) * length
        return jax.lax.dynamic_slice_in_dim(_pad_first_axis(x, devices * length), start, length)

    return jax.tree.map(part, batch)


def _gather(parts: PyTree, count: int) -> PyTree:
    """Return the parts of all devices as leaves [count, ...]."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, BATCH, tiled=True)[:count], parts)
