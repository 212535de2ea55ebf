"""DenseNet-121 and -169 (Huang et al. 2017, arXiv 1608.06993) as in torchvision."""

import functools

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from fcljax.models.convnet import Norm, StemLayers, convnet_network, layer, pooled
from fcljax.models.shapes import DenseNetConfig, Dtype


class DenseLayer(nn.Module):
    """Append `growth` channels: a narrow 1 x 1 convolution, then 3 x 3."""

    growth: int
    dtype: Dtype
    train: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        y = Norm(self.train, name="norm1")(x, mask)
        # a bottleneck of 4 x growth channels: the 3 x 3 kernel does not read all channels
        y = layer(4 * self.growth, 1, dtype=self.dtype, name="conv1")(y)
        y = Norm(self.train, name="norm2")(y, mask)
        y = layer(self.growth, 3, dtype=self.dtype, name="conv2")(y)
        return jnp.concatenate([x, y], axis=-1)


class Transition(nn.Module):
    """Halve the channels and the side."""

    dtype: Dtype
    train: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        x = Norm(self.train, name="norm")(x, mask)
        x = layer(x.shape[-1] // 2, 1, dtype=self.dtype, name="conv")(x)
        return nn.avg_pool(x, (2, 2), (2, 2))


class DenseNet(nn.Module):
    """The whole network; it returns features (the mean over all positions) and all blocks
    by name."""

    config: DenseNetConfig
    train: bool = False

    @nn.compact
    def __call__(
        self,
        image: Array,
        mask: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        c = self.config
        x = StemLayers(c.stem, c.channels, c.dtype, self.train, name="stem")(image, mask)
        taps = {}
        for block, layers in enumerate(c.blocks):
            for i in range(layers):
                # every layer reads all features before it
                x = DenseLayer(c.growth, c.dtype, self.train, name=f"block_{block}_layer_{i:02d}")(x, mask)
            taps[f"block_{block}"] = x
            # the last block is followed by the norm instead
            if block < len(c.blocks) - 1:
                x = Transition(c.dtype, self.train, name=f"transition_{block}")(x, mask)
        x = Norm(self.train, name="norm")(x, mask)
        return pooled(x), taps


densenet_network = functools.partial(convnet_network, DenseNet)
