"""The small network whose gradients encode the images that GLFC's clients send (Dong et
al., CVPR 2022).

Three 5x5 convolutions of 12 channels with sigmoids, of strides 2, 2 and 1, and a linear
classifier; all values are uniform in [-0.5, 0.5]. It is random, never trained, and the
same for all clients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

CHANNELS = 12
SIDE = 5  # of a kernel
STRIDES = (2, 2, 1)
BOUND = 0.5  # of the uniform draw


class Conv(NamedTuple):
    """A convolution's kernel, as a matrix of its patches, and its bias."""

    kernel: Float[Array, "*lead patch channels"]
    bias: Float[Array, "*lead channels"]


class LeNet(NamedTuple):
    """Parameters, or gradients of them; a classifier's first axis is that of the
    flattened map."""

    convs: tuple[Conv, Conv, Conv]
    kernel: Float[Array, "*lead width classes"]
    bias: Float[Array, "*lead classes"]


def init_lenet(key: PRNGKeyArray, height: int, width: int, classes: int) -> LeNet:
    """Return a network for images of height x width x 3."""
    # the size of the last map, which the classifier reads
    for stride in STRIDES:
        height = -(-height // stride)
        width = -(-width // stride)

    def conv(channels: int) -> Conv:
        return Conv(jnp.zeros((SIDE * SIDE * channels, CHANNELS)), jnp.zeros(CHANNELS))

    template = LeNet(
        (conv(3), conv(CHANNELS), conv(CHANNELS)),
        jnp.zeros((height * width * CHANNELS, classes)),
        jnp.zeros(classes),
    )
    leaves, structure = jax.tree.flatten(template)
    largest = max(leaf.size for leaf in leaves)

    def draw(key: PRNGKeyArray) -> Array:
        return jax.random.uniform(key, (largest,), minval=-BOUND, maxval=BOUND)

    # draws of one size for all leaves: every further size takes a second to compile
    draws = jax.vmap(draw)(jax.random.split(key, len(leaves)))
    values = [values[: leaf.size].reshape(leaf.shape) for values, leaf in zip(draws, leaves, strict=True)]
    return jax.tree.unflatten(structure, values)


def apply_lenet(params: LeNet, image: Float[Array, "h w 3"]) -> Float[Array, " classes"]:
    """Return the logits of one image of pixels in [0, 1]."""
    x = image
    for conv, stride in zip(params.convs, STRIDES, strict=True):
        x = jax.nn.sigmoid(_patches(x, stride) @ conv.kernel + conv.bias)
    return x.reshape(-1) @ params.kernel + params.bias


def _patches(x: Float[Array, "h w c"], stride: int) -> Float[Array, "h2 w2 patch"]:
    """Return the 5x5 patches around every stride-th pixel, with zeros outside.

    With them a convolution is a matrix product. Matching gradients needs second
    derivatives, which are slow for convolutions in a loop.
    """
    h, w, _ = x.shape
    edge = SIDE // 2
    padded = jnp.pad(x, ((edge, edge), (edge, edge), (0, 0)))
    rows = jnp.concatenate([padded[i : i + h : stride] for i in range(SIDE)], axis=-1)
    return jnp.concatenate([rows[:, j : j + w : stride] for j in range(SIDE)], axis=-1)


def gradient_of(params: LeNet, image: Float[Array, "h w 3"], target: Float[Array, " classes"]) -> LeNet:
    """Return the gradient of an image's cross-entropy, which a client sends."""

    def loss(params: LeNet) -> Float[Array, ""]:
        return -jnp.sum(target * jax.nn.log_softmax(apply_lenet(params, image)))

    return jax.grad(loss)(params)


def label_of(gradient: LeNet) -> Int[Array, "*lead"]:
    """Return the class of the image that a gradient was computed from (Zhao et al. 2020).

    A column of the classifier's gradient is its inputs times (probability - target). The
    inputs are sigmoids, which are positive, so only the column of this class has a
    negative sum.
    """
    return jnp.argmin(jnp.sum(gradient.kernel, axis=-2), axis=-1)
