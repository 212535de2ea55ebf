"""Convolutions and max-pooling that are fast inside loops on a CPU, forwards and backwards.

XLA's CPU backend has a fast convolution for one layout only: images [batch, height, width, channels] and
kernels [height, width, in, out]. The gradients that jax derives are convolutions in other layouts, which XLA
rewrites to the fast one, but not inside a loop. The engine runs its steps in a loop, where the kernel's
gradient takes 40 times as long (jax issue 12868). Here both gradients are convolutions of the fast layout.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fcljax.models.products import exact_matmul

Pair = tuple[int, int]

FEW_INPUTS = 4  # channels of images, in a network's first layer
_LAYOUT = ("NHWC", "HWIO", "NHWC")


class Window(NamedTuple):
    """How a kernel moves over an image; every pair is of height and width."""

    stride: Pair = (1, 1)  # between positions of the kernel
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0))  # rows (columns) of zeros before and after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def conv(
    window: Window,
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "rows columns inputs outputs"],
) -> Float[Array, "batch height_out width_out outputs"]:
    """The convolution of `jax.lax.conv_general_dilated`, with gradients of its own.

    Args:
      window: static.
      x: images.
      kernel: of all outputs.
    """
    return _dilated(x, kernel, window.stride, window.pads)


def _dilated(x: Array, kernel: Array, stride: Pair, pads: Sequence[Pair], **dilation: Any) -> Array:
    """Of float32 with all bits of the factors, which accelerators would round."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.conv_general_dilated(
        x, kernel, stride, pads, dimension_numbers=_LAYOUT, precision=exact, **dilation
    )


def _forward(window: Window, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return conv(window, x, kernel), (x, kernel)


def _backward(window: Window, factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = factors
    of_x = image_gradient(window, (x.shape[1], x.shape[2]), kernel, gradient)
    return of_x, kernel_gradient(window, x, kernel, gradient)


conv.defvjp(_forward, _backward)


def image_gradient(
    window: Window, size: Pair, kernel: Array, gradient: Array
) -> Float[Array, "batch height width inputs"]:
    """The gradient of the images: the outputs' gradient, `stride` apart, with the reversed kernel."""
    pads = []
    for axis in range(2):
        reach = kernel.shape[axis] - 1
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        before = reach - window.pads[axis][0]
        pads.append((before, size[axis] + reach - before - spread))
    reversed_kernel = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    return _dilated(gradient, reversed_kernel, (1, 1), pads, lhs_dilation=window.stride)


def kernel_gradient(
    window: Window, x: Array, kernel: Array, gradient: Array
) -> Float[Array, "rows columns inputs outputs"]:
    """The gradient of the kernel: the images convolved with the outputs' gradient, summed over the batch."""
    if window.stride == (1, 1) and kernel.shape[2] <= FEW_INPUTS:
        return _gradient_of_patches(window, x, kernel, gradient)
    pads = []
    for axis in range(2):
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        before = window.pads[axis][0]
        pads.append((before, kernel.shape[axis] + spread - 1 - x.shape[1 + axis] - before))
    out = _dilated(
        x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3), (1, 1), pads, rhs_dilation=window.stride
    )
    return out.transpose(1, 2, 0, 3)


def _gradient_of_patches(window: Window, x: Array, kernel: Array, gradient: Array) -> Array:
    """The same with stride 1 as one product with what each value of the kernel sees: the pixels of few input
    channels are copied faster than the gradient is transposed."""
    padded = jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), *window.pads))
    height, width = gradient.shape[1:3]
    seen = [
        padded[:, :, row : row + height, column : column + width]
        for row, column in np.ndindex(kernel.shape[:2])
    ]
    by_value = jnp.stack(seen).reshape(kernel[..., 0].size, -1)
    return exact_matmul(by_value, gradient.reshape(-1, kernel.shape[3])).reshape(kernel.shape)


def conv_general_dilated(
    lhs: Array, rhs: Array, window_strides: Sequence[int], padding: str | Sequence[Pair], **others: Any
) -> Array:
    """`conv` with the arguments of jax's function, for `flax.linen.Conv(conv_general_dilated=...)`.

    jax's function computes the cases that `conv` lacks: other than two spatial axes, dilations, groups, a
    precision.
    """
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, others.get("dimension_numbers"))
    usual = lhs.ndim == 4 and numbers == lax.conv_dimension_numbers(lhs.shape, rhs.shape, _LAYOUT)
    dilated = any(d != 1 for side in ("lhs", "rhs") for d in others.get(f"{side}_dilation") or ())
    special = dilated or others.get("feature_group_count", 1) != 1 or others.get("precision") is not None
    if special or not usual:
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **others)
    if isinstance(padding, str):
        size = lhs.shape[1:3]
        reach = rhs.shape[:2]
        padding = lax.padtype_to_pads(size, reach, tuple(window_strides), padding)
    (above, below), (left, right) = padding
    stride = window_strides[0], window_strides[1]
    return conv(Window(stride, ((above, below), (left, right))), lhs, rhs)


# ---- pooling -----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def max_pool(
    size: Pair, window: Window, x: Float[Array, "batch height width channels"]
) -> Float[Array, "batch height_out width_out channels"]:
    """The largest value of each channel in windows of rows and columns; padding never is the largest.

    Its gradient goes to the first of a window's largest values, as that of `flax.linen.max_pool`, for which
    XLA takes up to 13 times as long on a CPU.

    Args:
      size: rows and columns of a window; static.
      window: how it moves; static.
      x: images.
    """
    return _largest(size, window, x)


def _largest(size: Pair, window: Window, x: Array) -> Array:
    strides = (1, *window.stride, 1)
    pads = ((0, 0), *window.pads, (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *size, 1), strides, pads)


def _pool_forward(size: Pair, window: Window, x: Array) -> tuple[Array, tuple[Array, Array]]:
    largest = _largest(size, window, x)
    return largest, (x, largest)


def _pool_backward(
    size: Pair, window: Window, kept: tuple[Array, Array], gradient: Array
) -> tuple[Float[Array, "batch height width channels"]]:
    on_cpu = functools.partial(_gradient_by_pixels, size, window)
    elsewhere = functools.partial(_scattered_gradient, size, window)  # a TPU moves two thirds of the bytes so
    return (lax.platform_dependent(*kept, gradient, cpu=on_cpu, default=elsewhere),)


max_pool.defvjp(_pool_forward, _pool_backward)


def _scattered_gradient(size: Pair, window: Window, x: Array, largest: Array, gradient: Array) -> Array:
    """As XLA does it."""
    del largest
    return jax.vjp(functools.partial(_largest, size, window), x)[1](gradient)[0]


def _gradient_by_pixels(size: Pair, window: Window, x: Array, largest: Array, gradient: Array) -> Array:
    """Each pixel gets the gradients of those of its windows that have it as their largest: per axis of the
    last window that begins at the pixel or before, of the one before that, and so on."""
    place = _first_places(size, window, x, largest)
    total = jnp.zeros_like(x)
    most = (-(-places // stride) for places, stride in zip(size, window.stride, strict=True))
    for back in np.ndindex(*most):  # the windows that a pixel can stand in
        (rows, row), (columns, column) = map(
            _windows_of_pixels, size, *window, x.shape[1:3], gradient.shape[1:3], back
        )
        at = rows[:, None], columns
        mine = np.where((row[:, None] >= 0) & (column >= 0), row[:, None] * size[1] + column, -1)
        total += jnp.where(place[:, *at] == mine[..., None], gradient[:, *at], 0)
    return total


def _first_places(size: Pair, window: Window, x: Array, largest: Array) -> Array:
    """Where in its window, counted row by row, each largest value is first."""
    padded = jnp.pad(x, ((0, 0), *window.pads, (0, 0)), constant_values=-jnp.inf)
    place = jnp.zeros(largest.shape, jnp.int32)
    for number, start in reversed(list(enumerate(np.ndindex(size)))):
        rows, columns = (
            slice(first, first + stride * (windows - 1) + 1, stride)
            for first, stride, windows in zip(start, window.stride, largest.shape[1:3], strict=True)
        )
        place = jnp.where(padded[:, rows, columns] == largest, number, place)
    return place


def _windows_of_pixels(
    size: int, stride: int, pads: Pair, pixels: int, windows: int, back: int
) -> tuple[np.ndarray, np.ndarray]:
    """Along an axis, for each pixel: the number of a window, `back` before the last one that begins at the
    pixel or before, and the pixel's place in it; -1 where there is no such window or it ends before."""
    from_first = np.arange(pixels) + pads[0]
    number = from_first // stride - back
    place = from_first - stride * number
    within = (number >= 0) & (number < windows) & (place < size)
    return np.where(within, number, 0), np.where(within, place, -1)
