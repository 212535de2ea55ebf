"""ResNets (He et al. 2016, arXiv 1512.03385): ResNet-18 and -34 of basic blocks, ResNet-50 of bottlenecks, as
torchvision has them."""

import functools

from flax import linen as nn
from jaxtyping import Array

from fcljax.models.convnet import Norm, StemLayers, convnet_network, layer, pooled
from fcljax.models.shapes import ResNetConfig


class BasicBlock(nn.Module):
    """Two convolutions, and the block's input beside them."""

    features: int
    stride: int
    dtype: str
    train: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        y = layer(self.features, 3, self.stride, dtype=self.dtype, name="conv1")(x)
        y = Norm(self.train, name="norm1")(y, mask)
        y = layer(self.features, 3, dtype=self.dtype, name="conv2")(y)
        y = Norm(self.train, False, name="norm2")(y, mask)
        if self.stride != 1 or x.shape[-1] != self.features:
            x = layer(self.features, 1, self.stride, dtype=self.dtype, name="down")(x)
            x = Norm(self.train, False, name="down_norm")(x, mask)
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """A convolution between two of single pixels, and the block's input beside them. The stride is the middle
    one's, as in torchvision."""

    features: int
    stride: int
    dtype: str
    train: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        out = 4 * self.features
        y = layer(self.features, 1, dtype=self.dtype, name="conv1")(x)
        y = Norm(self.train, name="norm1")(y, mask)
        y = layer(self.features, 3, self.stride, dtype=self.dtype, name="conv2")(y)
        y = Norm(self.train, name="norm2")(y, mask)
        y = layer(out, 1, dtype=self.dtype, name="conv3")(y)
        y = Norm(self.train, False, name="norm3")(y, mask)
        if self.stride != 1 or x.shape[-1] != out:
            x = layer(out, 1, self.stride, dtype=self.dtype, name="down")(x)
            x = Norm(self.train, False, name="down_norm")(x, mask)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The whole network: features (the mean of the last stage) and every stage by its name."""

    config: ResNetConfig
    train: bool = False

    @nn.compact
    def __call__(self, image: Array, mask: Array | None = None) -> tuple[Array, dict[str, Array]]:
        c = self.config
        x = StemLayers(c.stem, c.channels, c.dtype, self.train, name="stem")(image, mask)
        taps = {}
        kind = Bottleneck if c.bottleneck else BasicBlock
        for stage, blocks in enumerate(c.stages):
            for i in range(blocks):
                stride = 2 if stage and i == 0 else 1
                block = kind(
                    c.channels * 2**stage, stride, c.dtype, self.train, name=f"stage_{stage}_block_{i}"
                )
                x = block(x, mask)
            taps[f"stage_{stage}"] = x
        return pooled(x), taps


resnet_network = functools.partial(convnet_network, ResNet)  # a ResNet as methods see it: of its config
