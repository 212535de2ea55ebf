"""ConvNeXts (Liu et al. 2022, arXiv 2201.03545) as in timm and torchvision.

A block is a depthwise 7 x 7 convolution and an MLP, with LayerNorms and scaled layers.
No layer depends on other examples.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.convnet import Colour, pooled
from fcljax.models.products import dense
from fcljax.models.shapes import ConvNeXtConfig, Dtype, NumberFormat
from fcljax.models.vit import longest_normed
from fcljax.types import Features, Network

KERNEL = 7
EPSILON = 1e-6


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=EPSILON, dtype=jnp.float32, name=name)


class Depthwise(nn.Module):
    """A 7 x 7 convolution of each channel by itself."""

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Array:
        shape = (KERNEL, KERNEL, x.shape[-1])
        kernel = self.param("kernel", nn.initializers.normal(1 / KERNEL), shape)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        height = x.shape[1]
        width = x.shape[2]
        reach = KERNEL // 2
        # A sum of shifted images, not a grouped convolution: vmapped over clients with
        # kernels of their own, that would have clients times channels groups.
        padded = jnp.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
        result = bias + jnp.zeros_like(x)
        for i, j in itertools.product(range(KERNEL), repeat=2):
            result += padded[:, i : i + height, j : j + width] * kernel[i, j]
        return result


class ConvNeXtBlock(nn.Module):
    """One block, plus its input."""

    dtype: Dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width = x.shape[-1]
        number_format = NumberFormat(self.dtype)
        y = _norm("norm")(Depthwise(name="depthwise")(x))
        # flax's default is the approximation by tanh; timm has the exact GELU
        y = nn.gelu(dense(4 * width, number_format, "fc1")(y), approximate=False)
        y = dense(width, number_format, "fc2")(y)
        return x + y * self.param("scale", nn.initializers.constant(1e-6), (width,))


def squares(x: Float[Array, "batch height width channels"], side: int) -> Array:
    """Turn squares of pixels into channels, in order row, column, channel.

    Rows and columns that fill no square are dropped, as by a convolution of that stride.
    """
    height, width = (side * (size // side) for size in x.shape[1:3])
    return rearrange(x[:, :height, :width], "b (h p) (w q) c -> b h w (p q c)", p=side, q=side)


class ConvNeXt(nn.Module):
    """The whole network; it returns features (the normed mean of the last stage) and all
    stages by name."""

    config: ConvNeXtConfig

    @nn.compact
    def __call__(self, image: Array) -> tuple[Array, dict[str, Array]]:
        c = self.config
        # A convolution whose stride is its size is a product of squares of pixels. It is
        # written so because convolutions inside loops fall off XLA's fast path.
        number_format = NumberFormat(c.dtype)
        x = _norm("stem_norm")(dense(c.widths[0], number_format, "stem")(squares(image, c.patch)))
        taps = {}
        for stage, (depth, width) in enumerate(zip(c.depths, c.widths, strict=True)):
            if stage:
                x = _norm(f"down_{stage}_norm")(x)
                x = dense(width, number_format, f"down_{stage}")(squares(x, 2))
            for i in range(depth):
                x = ConvNeXtBlock(c.dtype, name=f"stage_{stage}_block_{i}")(x)
            taps[f"stage_{stage}"] = x
        # the mean first, then the norm, as in timm's head
        return _norm("norm")(pooled(x)), taps


def init_convnext(key: PRNGKeyArray, config: ConvNeXtConfig) -> PyTree:
    """Draw the parameters, float32."""
    image = jnp.zeros((1, config.image_size, config.image_size, 3))
    return jax.jit(lambda key, image: ConvNeXt(config).init(key, image)["params"])(key, image)


def convnext_network(
    config: ConvNeXtConfig,
    mean: Colour = (0.0,) * 3,
    std: Colour = (1.0,) * 3,
) -> Network:
    """Make the `Network` of a ConvNeXt."""

    def init(key: PRNGKeyArray) -> PyTree:
        return init_convnext(key, config)

    # no layer depends on training or on other examples
    def apply(params, image, injection, _train, _mask=None):
        if injection is not None:
            raise InputError("injection: a convolutional network has no attention")
        output: Any = ConvNeXt(config).apply({"params": params}, image)
        feature, taps = output
        return Features(feature, None, taps), params

    def longest(params: PyTree) -> Float[Array, ""]:
        return longest_normed(params["norm"])

    size = config.image_size
    return Network(init, apply, config.width, 0, (size, size, 3), mean, std, longest=longest)
