"""A convolution that is fast inside loops on a CPU, forwards and backwards.

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
from jax import lax
from jaxtyping import Array, Float

Pair = tuple[int, int]

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
    pads = []
    for axis in range(2):
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        before = window.pads[axis][0]
        pads.append((before, kernel.shape[axis] + spread - 1 - x.shape[1 + axis] - before))
    out = _dilated(
        x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3), (1, 1), pads, rhs_dilation=window.stride
    )
    return out.transpose(1, 2, 0, 3)


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
        size, reach = lhs.shape[1:3], rhs.shape[:2]
        padding = lax.padtype_to_pads(size, reach, tuple(window_strides), padding)
    (above, below), (left, right) = padding
    stride = window_strides[0], window_strides[1]
    return conv(Window(stride, ((above, below), (left, right))), lhs, rhs)
