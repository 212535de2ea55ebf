"""The small network by whose gradients GLFC's clients send images (Dong et al., CVPR 2022; specification B9).

Three 5x5 convolutions of 12 channels with sigmoids, of strides 2, 2 and 1, and a linear classifier; all
values uniform in [-0.5, 0.5]. It is random, never trained and the same for everybody.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

CHANNELS = 12
SIDE = 5
STRIDES = (2, 2, 1)
BOUND = 0.5


class Conv(NamedTuple):
    """A convolution's kernel, as a matrix of its patches, and its bias."""

    kernel: Float[Array, "*lead patch channels"]
    bias: Float[Array, "*lead channels"]


class LeNet(NamedTuple):
    """Parameters, or gradients of them; a classifier's first axis is that of the flattened map."""

    convs: tuple[Conv, Conv, Conv]
    kernel: Float[Array, "*lead width classes"]
    bias: Float[Array, "*lead classes"]


def init_lenet(key: PRNGKeyArray, height: int, width: int, classes: int) -> LeNet:
    """A network for images of height x width x 3."""
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
    leaves, form = jax.tree.flatten(template)

    most = max(leaf.size for leaf in leaves)

    def draw(key: PRNGKeyArray) -> Array:
        return jax.random.uniform(key, (most,), minval=-BOUND, maxval=BOUND)

    # as many for each leaf as the largest needs: a draw of another size takes another second to compile
    drawn = jax.vmap(draw)(jax.random.split(key, len(leaves)))
    values = [own[: leaf.size].reshape(leaf.shape) for own, leaf in zip(drawn, leaves, strict=True)]
    return jax.tree.unflatten(form, values)


def apply_lenet(params: LeNet, image: Float[Array, "h w 3"]) -> Float[Array, " classes"]:
    """Logits of one image of pixels in [0, 1]."""
    x = image
    for conv, stride in zip(params.convs, STRIDES, strict=True):
        x = jax.nn.sigmoid(_patches(x, stride) @ conv.kernel + conv.bias)
    return x.reshape(-1) @ params.kernel + params.bias


def _patches(x: Float[Array, "h w c"], stride: int) -> Float[Array, "h2 w2 patch"]:
    """The 5x5 surroundings of every stride-th pixel, zeros outside: products of matrices have fast second
    derivatives everywhere, which convolutions in a loop have not."""
    (h, w, _) = x.shape
    edge = SIDE // 2
    padded = jnp.pad(x, ((edge, edge), (edge, edge), (0, 0)))
    rows = jnp.concatenate([padded[i : i + h : stride] for i in range(SIDE)], axis=-1)
    return jnp.concatenate([rows[:, j : j + w : stride] for j in range(SIDE)], axis=-1)


def gradient_of(params: LeNet, image: Float[Array, "h w 3"], target: Float[Array, " classes"]) -> LeNet:
    """The gradient of an image's cross-entropy: what a client sends of it."""

    def loss(params: LeNet) -> Float[Array, ""]:
        return -jnp.sum(target * jax.nn.log_softmax(apply_lenet(params, image)))

    return jax.grad(loss)(params)


def label_of(gradient: LeNet) -> Int[Array, "*lead"]:
    """The class of the image that a gradient was made of: the classifier's inputs are positive, so that its
    column alone has a negative sum (Zhao et al. 2020; specification B10)."""
    return jnp.argmin(jnp.sum(gradient.kernel, axis=-2), axis=-1)
