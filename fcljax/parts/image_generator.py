"""A generator of images from noise (TARGET, specification C6; also of MFCL and LANDER).

    linear to a map of a quarter of the image's sides, batch normalisation
    twice: double the sides, 3x3 convolution, batch normalisation, leaky ReLU
    3x3 convolution, sigmoid: pixels in [0, 1]

Batch normalisation uses the statistics of the batch in evaluation too: a generator only
sees batches as it trains on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.models.convolution import Window, conv
from fcljax.models.initialisers import uniform_by_inputs

SLOPE = 0.2  # of the leaky ReLU


class ImageGeneratorConfig(NamedTuple):
    """Static shape of a generator."""

    height: int
    width: int
    noise: int = 256
    """Width of the noise."""
    channels: int = 64
    """Channels of the last hidden map; the first has twice as many."""


def conv_of_doubled(
    x: Float[Array, "batch h w c"], kernel: Float[Array, "3 3 c d"]
) -> Float[Array, "batch 2*h 2*w d"]:
    """Compute the 3x3 convolution, zero-padded, of images with doubled sides.

    The doubled images are never made. An output pixel of them reads 3x3 doubled pixels,
    which are 2x2 pixels of the images: sums of the kernel's rows and columns give the
    same result with 4/9 of the products. Even and odd rows and columns each have a
    convolution; one for all is slower (docs/results/speed.md).
    """
    # padding (before, after): even outputs read the previous pixel, odd ones the next
    sides = ((1, 0), (0, 1))
    rows = []
    for above, half in zip(sides, _halves(kernel, 0), strict=True):
        columns = []
        for left, quarter in zip(sides, _halves(half, 1), strict=True):
            columns.append(conv(Window(pads=(above, left)), x, quarter))
        rows.append(jnp.stack(columns, 3))
    # the new axes interleave even and odd rows and columns
    batch, h, w, _ = x.shape
    return jnp.stack(rows, 2).reshape(batch, 2 * h, 2 * w, -1)


def _halves(kernel: Array, axis: int) -> tuple[Array, Array]:
    """Return the kernels of even and of odd outputs: two rows (columns) each, of three.

    Two neighbours in the doubled image are one pixel, so their rows are added.
    """
    previous, centre, following = jnp.split(kernel, 3, axis)
    even = (previous, centre + following)
    odd = (previous + centre, following)
    return jnp.concatenate(even, axis), jnp.concatenate(odd, axis)


class _Conv(nn.Module):
    """A 3x3 convolution with bias, of images with doubled sides if `doubled`."""

    features: int
    doubled: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch H W d"]:
        init = uniform_by_inputs(9 * x.shape[-1])
        kernel = self.param("kernel", init, (3, 3, x.shape[-1], self.features))
        bias = self.param("bias", init, (self.features,))
        plain = Window(pads=((1, 1), (1, 1)))
        if self.doubled:
            return conv_of_doubled(x, kernel) + bias
        return conv(plain, x, kernel) + bias


class _ImageGenerator(nn.Module):
    config: ImageGeneratorConfig

    @nn.compact
    def __call__(self, noise: Float[Array, "batch noise"]) -> Float[Array, "batch h w 3"]:
        c = self.config
        # rounded up; sides that 4 does not divide are cropped after the last layer
        h = -(-c.height // 4)
        w = -(-c.width // 4)
        wide = 2 * c.channels

        # the batch's statistics also in evaluation (module docstring)
        def norm(x: Array) -> Array:
            return nn.BatchNorm(use_running_average=False, epsilon=1e-5)(x)

        init = uniform_by_inputs(c.noise)
        x = nn.Dense(wide * h * w, kernel_init=init, bias_init=init)(noise)
        x = norm(x.reshape(-1, h, w, wide))
        for channels in (wide, c.channels):
            x = nn.leaky_relu(norm(_Conv(channels, doubled=True)(x)), SLOPE)
        return jax.nn.sigmoid(_Conv(3)(x))[:, : c.height, : c.width]


def init_image_generator(config: ImageGeneratorConfig, key: PRNGKeyArray) -> PyTree:
    """Return the parameters of a new generator."""
    # "params" alone: nothing reads running statistics
    return _ImageGenerator(config).init(key, jnp.zeros((2, config.noise)))["params"]


def generate_images(
    config: ImageGeneratorConfig, params: PyTree, noise: Float[Array, "batch noise"]
) -> Float[Array, "batch height width 3"]:
    """Return images of pixels in [0, 1]."""
    # flax writes running statistics in training mode and fails if they are not mutable
    image, _ = _ImageGenerator(config).apply({"params": params}, noise, mutable=["batch_stats"])
    return image
