"""A convolution that is fast inside loops on a CPU, forwards and backwards.

XLA's CPU backend has a fast convolution for one layout only: images [batch, height, width, channels] and
kernels [height, width, in, out]. The gradients that jax derives are convolutions in other layouts, which XLA
rewrites to the fast one where they stand alone, but not inside a loop, and the engine plays its steps in a
loop: there the kernel's gradient takes 40 times as long (jax issue 12868). Here both gradients are written as
convolutions of the fast layout.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

Pair = tuple[int, int]

_LAYOUT = ("NHWC", "HWIO", "NHWC")


class Window(NamedTuple):
    """How a kernel moves over an image; every pair is of height and width.

    stride: between places of the kernel. pads: rows (columns) of zeros before and after. dilation: between
    the kernel's own numbers. groups: of channels, each of which reads its own inputs.
    """

    stride: Pair = (1, 1)
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def conv(
    window: Window,
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "rows columns inputs_of_group outputs"],
) -> Float[Array, "batch height_out width_out outputs"]:
    """The convolution of `jax.lax.conv_general_dilated`, with gradients of its own.

    Args:
      window: static.
      x: images.
      kernel: those of all groups, side by side along the outputs.
    """
    return lax.conv_general_dilated(
        x,
        kernel,
        window.stride,
        window.pads,
        rhs_dilation=window.dilation,
        dimension_numbers=_LAYOUT,
        feature_group_count=window.groups,
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
    """The gradient of the images: the outputs' gradient, `stride` apart, under the kernel turned round."""
    rows, columns, inputs, outputs = kernel.shape
    groups = window.groups
    turned = kernel[::-1, ::-1].reshape(rows, columns, inputs, groups, outputs // groups)
    turned = turned.transpose(0, 1, 4, 3, 2).reshape(rows, columns, outputs // groups, groups * inputs)
    pads = []
    for axis in range(2):
        reach = window.dilation[axis] * (kernel.shape[axis] - 1)  # from a kernel's first number to its last
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        before = reach - window.pads[axis][0]
        pads.append((before, size[axis] + reach - before - spread))
    return lax.conv_general_dilated(
        gradient,
        turned,
        (1, 1),
        pads,
        lhs_dilation=window.stride,
        rhs_dilation=window.dilation,
        dimension_numbers=_LAYOUT,
        feature_group_count=groups,
    )


def kernel_gradient(
    window: Window, x: Array, kernel: Array, gradient: Array
) -> Float[Array, "rows columns inputs_of_group outputs"]:
    """The gradient of the kernel: the images under the outputs' gradient, with the batch as the channels that
    are summed over."""
    pads = []
    for axis in range(2):
        spread = window.stride[axis] * (gradient.shape[1 + axis] - 1) + 1
        places = window.dilation[axis] * (kernel.shape[axis] - 1) + 1
        before = window.pads[axis][0]
        pads.append((before, places + spread - 1 - x.shape[1 + axis] - before))
    out = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        gradient.transpose(1, 2, 0, 3),
        window.dilation,
        pads,
        rhs_dilation=window.stride,
        dimension_numbers=_LAYOUT,
        batch_group_count=window.groups,
    )
    return out.transpose(1, 2, 0, 3)


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[Pair],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
) -> Array:
    """`conv` with the arguments of jax's function, for `flax.linen.Conv(conv_general_dilated=...)`.

    What `conv` is not for (other than two spatial axes, dilated images, a precision) jax's function does.
    """
    stretched = any(d != 1 for d in lhs_dilation or ())
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    usual = lhs.ndim == 4 and numbers == lax.conv_dimension_numbers(lhs.shape, rhs.shape, _LAYOUT)
    if stretched or precision is not None or not usual:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            precision=precision,
        )
    down, across = rhs_dilation or (1, 1)
    if isinstance(padding, str):
        reach = (down * (rhs.shape[0] - 1) + 1, across * (rhs.shape[1] - 1) + 1)
        padding = lax.padtype_to_pads(lhs.shape[1:3], reach, tuple(window_strides), padding)
    (above, below), (left, right) = padding
    stride, pads = (window_strides[0], window_strides[1]), ((above, below), (left, right))
    window = Window(stride, pads, (down, across), feature_group_count)
    return conv(window, lhs, rhs)
