"""A generator of images from noise (TARGET, specification C6; also of MFCL and LANDER).

A linear layer to a map of a quarter of the image's sides, doubled twice, with 3x3 convolutions, batch
normalisation and leaky ReLU, to pixels in [0, 1]. It normalises by the batch at hand alone: it is never used
but on the batches that it trains on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.models.convolution import conv_general_dilated
from fcljax.models.initialisers import uniform_by_inputs

SLOPE = 0.2  # of the leaky ReLU


class ImageGeneratorConfig(NamedTuple):
    """Static shape of a generator: sides of its images, width of its noise, channels of its last hidden map
    (the first has twice as many)."""

    height: int
    width: int
    noise: int = 256
    channels: int = 64


def _conv(x: Float[Array, "batch h w c"], features: int) -> Float[Array, "batch h w d"]:
    """A 3x3 convolution with trained parameters."""
    init = uniform_by_inputs(9 * x.shape[-1])
    return nn.Conv(
        features, (3, 3), kernel_init=init, bias_init=init, conv_general_dilated=conv_general_dilated
    )(x)


class _ImageGenerator(nn.Module):
    config: ImageGeneratorConfig

    @nn.compact
    def __call__(self, noise: Float[Array, "batch noise"]) -> Float[Array, "batch h w 3"]:
        c = self.config
        h, w, wide = -(-c.height // 4), -(-c.width // 4), 2 * c.channels

        def norm(x: Array) -> Array:
            return nn.BatchNorm(use_running_average=False, epsilon=1e-5)(x)

        def double(x: Array) -> Array:
            return x.repeat(2, axis=1).repeat(2, axis=2)

        init = uniform_by_inputs(c.noise)
        x = nn.Dense(wide * h * w, kernel_init=init, bias_init=init)(noise)
        x = norm(x.reshape(-1, h, w, wide))
        for channels in (wide, c.channels):
            x = nn.leaky_relu(norm(_conv(double(x), channels)), SLOPE)
        return jax.nn.sigmoid(_conv(x, 3))[:, : c.height, : c.width]


def init_image_generator(config: ImageGeneratorConfig, key: PRNGKeyArray) -> PyTree:
    """Parameters of a new generator."""
    return _ImageGenerator(config).init(key, jnp.zeros((2, config.noise)))["params"]


def generate_images(
    config: ImageGeneratorConfig, params: PyTree, noise: Float[Array, "batch noise"]
) -> Float[Array, "batch height width 3"]:
    """Images of pixels in [0, 1]."""
    # running statistics are made anew and dropped: nothing reads them
    image, _ = _ImageGenerator(config).apply({"params": params}, noise, mutable=["batch_stats"])
    return image
