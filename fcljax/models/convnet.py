"""Layers, stems and the `Network` of ResNets and DenseNets.

Names and shapes of layers are torchvision's. Running statistics are 0.9 of the old ones
plus 0.1 of a batch's. A batch's variance is divided by the number of values (torch
divides by one less), and padding does not influence it.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.convolution import Window, conv_general_dilated, max_pool
from fcljax.models.products import TF32
from fcljax.models.shapes import Dtype, array_type
from fcljax.settings import Stem
from fcljax.types import Features, Network

Colour = tuple[float, float, float]


def layer(
    features: int,
    size: int,
    stride: int = 1,
    *,
    dtype: Dtype,
    name: str,
) -> nn.Conv:
    """Make a square convolution without bias, padded so that stride 1 keeps the size."""
    precision = None
    if dtype == "tf32":
        precision = TF32
    return nn.Conv(
        features,
        (size, size),
        stride,
        size // 2,
        use_bias=False,
        dtype=jnp.dtype(array_type(dtype)),
        precision=precision,
        conv_general_dilated=conv_general_dilated,
        name=name,
    )


class Norm(nn.Module):
    """Batch normalisation in float32 over the mask's examples, then ReLU if `relu`."""

    train: bool
    relu: bool = True

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        norm = nn.BatchNorm(not self.train, momentum=0.9, epsilon=1e-5, dtype=jnp.float32, name="norm")
        if mask is not None:
            mask = mask[:, None, None, None]
        x = norm(x, mask=mask)
        if self.relu:
            return nn.relu(x)
        return x


class StemLayers(nn.Module):
    """The layers before the first stage.

    cifar: a convolution of 3 x 3. imagenet: one of 7 x 7 with stride 2, then the
    maximum of 3 x 3 with stride 2.
    """

    kind: Stem
    features: int
    dtype: Dtype
    train: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        if self.kind == "cifar":
            x = layer(self.features, 3, dtype=self.dtype, name="conv")(x)
            return Norm(self.train, name="norm")(x, mask)
        x = layer(self.features, 7, 2, dtype=self.dtype, name="conv")(x)
        x = Norm(self.train, name="norm")(x, mask)
        return max_pool((3, 3), Window((2, 2), ((1, 1), (1, 1))), x)


class Variables(NamedTuple):
    """Parameters of a convolutional network: weights and running statistics."""

    weights: PyTree
    stats: PyTree  # running means and variances


def convnet_shapes(module: nn.Module, image_size: int) -> PyTree:
    """Return the shapes of all variables as jax.ShapeDtypeStruct."""
    image = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
    return jax.eval_shape(lambda image: module.init(jax.random.key(0), image, None), image)


def init_convnet(key: PRNGKeyArray, module: nn.Module, image_size: int) -> Variables:
    """Draw parameters, float32; running statistics begin with mean 0, variance 1.

    Kernels are normal with variance 2 / fan-out (He et al. 2015).
    """
    named, tree = jax.tree.flatten_with_path(convnet_shapes(module, image_size))
    ends = list(accumulate(math.prod(shape.shape) for _, shape in named))
    # one draw for all leaves, cut into pieces: a draw for each kernel would take longer
    # to compile than the network itself
    noise = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    leaves = [
        _initial_value(path[-1].key, x.reshape(like.shape))
        for (path, like), x in zip(named, noise, strict=True)
    ]
    variables = jax.tree.unflatten(tree, leaves)
    return Variables(variables["params"], variables["batch_stats"])


def _initial_value(name: str, noise: Array) -> Array:
    """Return the initial value of a layer's parameter from standard normal noise."""
    if name == "kernel":
        # by the outputs of a layer, so that gradients keep their size from layer to layer
        fan_out = noise[..., 0, :].size
        return noise * math.sqrt(2 / fan_out)
    if name in ("scale", "var"):
        return jnp.ones_like(noise)
    return jnp.zeros_like(noise)


def convnet_network(
    module: Callable[..., nn.Module],
    config: Any,
    mean: Colour = (0.0,) * 3,
    std: Colour = (1.0,) * 3,
) -> Network:
    """Make the `Network` of a convolutional module.

    Args:
      module: (config, train) -> the module, which returns features and taps.
      config: its static shape.
      mean, std: constants by which its images were normalised.
    """

    def apply(
        params: Variables,
        image: Float[Array, "batch height width_px 3"],
        injection: PyTree,
        train: bool,
        mask: Bool[Array, " batch"] | None = None,
    ) -> tuple[Features, Variables]:
        if injection is not None:
            raise InputError("injection: a convolutional network has no attention")
        variables = {"params": params.weights, "batch_stats": params.stats}
        # flax returns only what is mutable: in training the running statistics, which are
        # parameters of the client's model too
        mutable = []
        if train:
            mutable = ["batch_stats"]
        (feature, taps), updated = module(config, train).apply(variables, image, mask, mutable=mutable)
        if train:
            params = params._replace(stats=updated["batch_stats"])
        return Features(feature, None, taps), params

    def init(key: PRNGKeyArray) -> Variables:
        return init_convnet(key, module(config, False), size)

    def split(params: Variables) -> tuple[PyTree, PyTree]:
        return params.weights, params.stats

    size = config.image_size
    return Network(init, apply, config.width, 0, (size, size, 3), mean, std, split=split, join=Variables)


def pooled(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch channels"]:
    """Return the mean over all positions, float32."""
    return jnp.mean(x.astype(jnp.float32), axis=(1, 2))
