"""Convolutions and max-pooling that are fast inside loops on a CPU, forwards and
backwards.

XLA's CPU backend has a fast convolution for one layout: images [batch, height, width,
channels] and kernels [height, width, in, out]. The gradients that jax derives are
convolutions in other layouts. XLA rewrites them to the fast layout, but not inside a
loop, and the engine runs its steps in a loop: there the kernel's gradient takes 40
times as long (jax issue 12868). Here both gradients are convolutions of the fast
layout.
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
    """How a kernel moves over an image; pairs are (height, width)."""

    stride: Pair = (1, 1)  # pixels between positions of the kernel
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0))  # zeros (above, below), (left, right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def conv(
    window: Window,
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "rows columns inputs outputs"],
    precision: lax.PrecisionLike = None,
) -> Float[Array, "batch height_out width_out outputs"]:
    """Convolve as `conv_general_dilated`, with gradients that are fast in loops.

    Args:
      window: static.
      x: images.
      kernel: of all outputs.
      precision: of the products, static; None: float32 factors keep all bits.
    """
    return _convolve(x, kernel, window.stride, window.pads, precision)


def _convolve(
    x: Array,
    kernel: Array,
    stride: Pair,
    pads: Sequence[Pair],
    precision: lax.PrecisionLike,
    **dilation: Any,
) -> Array:
    if precision is None and x.dtype == jnp.float32:
        # accelerators would round float32 factors to bfloat16 or tf32
        precision = lax.Precision.HIGHEST
    return lax.conv_general_dilated(
        x, kernel, stride, pads, dimension_numbers=_LAYOUT, precision=precision, **dilation
    )


def _forward(
    window: Window, x: Array, kernel: Array, precision: lax.PrecisionLike
) -> tuple[Array, tuple[Array, Array]]:
    return conv(window, x, kernel, precision), (x, kernel)


def _backward(
    window: Window, precision: lax.PrecisionLike, factors: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = factors
    grad_x = image_gradient(window, (x.shape[1], x.shape[2]), kernel, gradient, precision)
    return grad_x, kernel_gradient(window, x, kernel, gradient, precision)


conv.defvjp(_forward, _backward)


def image_gradient(
    window: Window,
    size: Pair,
    kernel: Array,
    gradient: Array,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "batch height width inputs"]:
    """Convolve the outputs' gradient, spread by the stride, with the reversed kernel."""
    # Each output's gradient goes back to the pixels that it was computed from: with the
    # outputs spread by the stride, a convolution with the kernel turned around. The
    # pads make its result as large as the image, also where the stride left pixels
    # over.
    pads = []
    for axis in range(2):
        reach = kernel.shape[axis] - 1
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        pad_start = reach - window.pads[axis][0]
        pads.append((pad_start, size[axis] + reach - pad_start - spread))
    reversed_kernel = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    return _convolve(gradient, reversed_kernel, (1, 1), pads, precision, lhs_dilation=window.stride)


def kernel_gradient(
    window: Window,
    x: Array,
    kernel: Array,
    gradient: Array,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "rows columns inputs outputs"]:
    """Convolve the images with the outputs' gradient, and sum over the batch."""
    if window.stride == (1, 1) and kernel.shape[2] <= FEW_INPUTS:
        return _kernel_gradient_by_patches(window, x, kernel, gradient)
    pads = []
    for axis in range(2):
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        pad_start = window.pads[axis][0]
        pads.append((pad_start, kernel.shape[axis] + spread - 1 - x.shape[1 + axis] - pad_start))
    # a convolution sums over channels: with batch and channels swapped it sums over the
    # batch
    channels_first = x.transpose(3, 1, 2, 0)
    as_kernel = gradient.transpose(1, 2, 0, 3)
    out = _convolve(channels_first, as_kernel, (1, 1), pads, precision, rhs_dilation=window.stride)
    return out.transpose(1, 2, 0, 3)


def _kernel_gradient_by_patches(
    window: Window,
    x: Array,
    kernel: Array,
    gradient: Array,
) -> Array:
    """Compute `kernel_gradient` with stride 1 as one matrix product.

    The pixels of few input channels are copied faster than the gradient is transposed.
    """
    padded = jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), *window.pads))
    height, width = gradient.shape[1:3]
    # for each weight of the kernel, the pixels that it is multiplied with
    pixels = [
        padded[:, :, row : row + height, column : column + width]
        for row, column in np.ndindex(kernel.shape[:2])
    ]
    by_weight = jnp.stack(pixels).reshape(kernel[..., 0].size, -1)
    return exact_matmul(by_weight, gradient.reshape(-1, kernel.shape[3])).reshape(kernel.shape)


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[Pair],
    **options: Any,
) -> Array:
    """Call `conv` with the arguments that `flax.linen.Conv` passes.

    jax's function computes the cases that `conv` lacks: other than two spatial axes,
    dilations, groups.
    """
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, options.get("dimension_numbers"))
    usual = lhs.ndim == 4 and numbers == lax.conv_dimension_numbers(lhs.shape, rhs.shape, _LAYOUT)
    dilated = any(d != 1 for side in ("lhs", "rhs") for d in options.get(f"{side}_dilation") or ())
    special = dilated or options.get("feature_group_count", 1) != 1
    if special or not usual:
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **options)
    if isinstance(padding, str):
        size = lhs.shape[1:3]
        reach = rhs.shape[:2]
        padding = lax.padtype_to_pads(size, reach, tuple(window_strides), padding)
    (above, below), (left, right) = padding
    stride = window_strides[0], window_strides[1]
    window = Window(stride, ((above, below), (left, right)))
    return conv(window, lhs, rhs, options.get("precision"))


# ---- pooling ---------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def max_pool(
    size: Pair, window: Window, x: Float[Array, "batch height width channels"]
) -> Float[Array, "batch height_out width_out channels"]:
    """Return the largest value of each channel in windows; padding never is the largest.

    The gradient goes to the first of a window's largest values, as in
    `flax.linen.max_pool`, for which XLA takes up to 13 times as long on a CPU.

    Args:
      size: (rows, columns) of a window; static.
      window: how it moves; static.
      x: images.
    """
    return _largest(size, window, x)


def _largest(size: Pair, window: Window, x: Array) -> Array:
    strides = (1, *window.stride, 1)
    pads = ((0, 0), *window.pads, (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *size, 1), strides, pads)


def _pool_forward(
    size: Pair,
    window: Window,
    x: Array,
) -> tuple[Array, tuple[Array, Array]]:
    largest = _largest(size, window, x)
    return largest, (x, largest)


def _pool_backward(
    size: Pair, window: Window, saved: tuple[Array, Array], gradient: Array
) -> tuple[Float[Array, "batch height width channels"]]:
    # XLA's own gradient, which scatters, is slow on a CPU alone; a TPU moves a third
    # fewer bytes with it
    on_cpu = functools.partial(_pool_gradient_by_pixels, size, window)
    elsewhere = functools.partial(_pool_gradient_of_xla, size, window)
    return (lax.platform_dependent(*saved, gradient, cpu=on_cpu, default=elsewhere),)


max_pool.defvjp(_pool_forward, _pool_backward)


def _pool_gradient_of_xla(size: Pair, window: Window, x: Array, _maxima: Array, gradient: Array) -> Array:
    _, pullback = jax.vjp(functools.partial(_largest, size, window), x)
    return pullback(gradient)[0]


def _pool_gradient_by_pixels(
    size: Pair,
    window: Window,
    x: Array,
    largest: Array,
    gradient: Array,
) -> Array:
    """Add, for each pixel, the gradients of windows whose first maximum it is."""
    argmax = _first_maximum(size, window, x, largest)
    total = jnp.zeros_like(x)
    # Along an axis a pixel stands in at most ceil(size / stride) windows: in the last
    # one that begins at the pixel or before it, in the one before that, and so on.
    windows_per_pixel = (-(-length // stride) for length, stride in zip(size, window.stride, strict=True))
    for steps_back in np.ndindex(*windows_per_pixel):
        (window_row, row), (window_column, column) = map(
            _windows_of_pixels, size, *window, x.shape[1:3], gradient.shape[1:3], steps_back
        )
        windows = (window_row[:, None], window_column)
        inside = (row[:, None] >= 0) & (column >= 0)
        position = np.where(inside, row[:, None] * size[1] + column, -1)
        is_largest = argmax[:, *windows] == position[..., None]
        total += jnp.where(is_largest, gradient[:, *windows], 0)
    return total


def _first_maximum(size: Pair, window: Window, x: Array, largest: Array) -> Array:
    """Return the first largest value's position in its window, row by row."""
    padded = jnp.pad(x, ((0, 0), *window.pads, (0, 0)), constant_values=-jnp.inf)
    argmax = jnp.zeros(largest.shape, jnp.int32)
    # from the last position to the first: where values tie, the first one is written last
    for position, offset in reversed(list(enumerate(np.ndindex(size)))):
        rows, columns = (
            slice(start, start + stride * (windows - 1) + 1, stride)
            for start, stride, windows in zip(offset, window.stride, largest.shape[1:3], strict=True)
        )
        argmax = jnp.where(padded[:, rows, columns] == largest, position, argmax)
    return argmax


def _windows_of_pixels(
    size: int, stride: int, pads: Pair, pixels: int, windows: int, steps_back: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return, along one axis, a window of each pixel and its position there.

    The window is `steps_back` before the last one that begins at the pixel or before
    it. Where there is none, or it ends before the pixel, the window is 0 and the
    position -1.
    """
    offset = np.arange(pixels) + pads[0]
    window = offset // stride - steps_back
    position = offset - stride * window
    inside = (window >= 0) & (window < windows) & (position < size)
    return np.where(inside, window, 0), np.where(inside, position, -1)
