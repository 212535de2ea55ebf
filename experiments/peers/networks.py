"""The dense and convolutional networks of the benches, in JAX and torch: functions of their weights by name.

Imports nothing of fcljax, so that the other libraries' environments can compute the same networks.
"""

from collections.abc import Callable, Mapping
from typing import Any


def layers(weights: Mapping[str, Any], kind: str) -> range:
    """The numbers of the layers `conv0`, `conv1`, ..., of `valid0`, ... or of `dense0`, ..."""
    return range(sum(name.removeprefix(kind).isdigit() for name in weights))


def hidden(convolve: Callable, halve: Callable, weights: Mapping[str, Any], image: Any) -> Any:
    """What the classifier reads, in JAX: `image` [B, H, W, C] with convolutions, else [B, D].

    `convolve` takes pixels, a kernel and the width of the padding; `halve` takes the largest of 2 x 2 pixels.
    Convolutions `valid` have no padding, and one pooling after the last of them.
    """
    import jax

    x = image
    valid = layers(weights, "valid")
    for i in valid:
        x = jax.nn.relu(convolve(x, weights[f"valid{i}"], 0) + weights[f"valid{i}_bias"])
    if valid:
        x = halve(x)
    for i in layers(weights, "conv"):
        x = halve(jax.nn.relu(convolve(x, weights[f"conv{i}"], 1) + weights[f"conv{i}_bias"]))
    x = x.reshape(x.shape[0], -1)
    for i in layers(weights, "dense"):
        x = jax.nn.relu(x @ weights[f"dense{i}"] + weights[f"dense{i}_bias"])
    return x


def lax_conv(x: Any, kernel: Any, padding: int) -> Any:
    """jax's own convolution."""
    import jax

    around = ((padding, padding),) * 2
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), around, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def largest_of_four(x: Any) -> Any:
    """Max-pooling of 2 x 2 pixels whose gradient jax derives well."""
    import jax.numpy as jnp

    b, h, w, c = x.shape
    return jnp.max(x.reshape(b, h // 2, 2, w // 2, 2, c), axis=(2, 4))


def mean_loss(weights: Mapping[str, Any], image: Any, label: Any, mask: Any) -> Any:
    """The mean cross-entropy of the rows in the mask, in JAX."""
    import jax.numpy as jnp
    import optax

    logits = hidden(lax_conv, largest_of_four, weights, image) @ weights["head"] + weights["head_bias"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return jnp.sum(each * mask) / jnp.sum(mask)


def torch_logits(weights: Mapping[str, Any], image: Any) -> Any:
    """In torch: images [B, C, H, W], kernels [out, in, rows, columns]."""
    from torch.nn import functional as F

    x = image
    valid = layers(weights, "valid")
    for i in valid:
        x = F.relu(F.conv2d(x, weights[f"valid{i}"], weights[f"valid{i}_bias"]))
    if valid:
        x = F.max_pool2d(x, 2)
    for i in layers(weights, "conv"):
        x = F.max_pool2d(F.relu(F.conv2d(x, weights[f"conv{i}"], weights[f"conv{i}_bias"], padding=1)), 2)
    x = (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)
    for i in layers(weights, "dense"):
        x = F.relu(x @ weights[f"dense{i}"] + weights[f"dense{i}_bias"])
    return x @ weights["head"] + weights["head_bias"]


def to_torch(x: Any) -> Any:
    """The same array."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(x))


def torch_kernel(x: Any) -> Any:
    """A weight in torch's layout."""
    x = to_torch(x)
    return x.permute(3, 2, 0, 1).contiguous() if x.ndim == 4 else x


def torch_images(x: Any) -> Any:
    """Images with their channels first."""
    x = to_torch(x)
    return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x


def from_torch(x: Any) -> Any:
    """A weight in our layout again."""
    return x.permute(2, 3, 1, 0) if x.ndim == 4 else x
