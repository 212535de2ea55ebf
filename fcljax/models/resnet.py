"""ResNets (He et al. 2016, arXiv 1512.03385) as in torchvision.

ResNet-18 and -34 have basic blocks, ResNet-50 has bottlenecks.
"""

import functools

from flax import linen as nn
from jaxtyping import Array

from fcljax.models.convnet import Norm, StemLayers, convnet_network, layer, pooled
from fcljax.models.shapes import Dtype, ResNetConfig


class BasicBlock(nn.Module):
    """Two convolutions, plus the block's input."""

    features: int
    stride: int
    dtype: Dtype
    train: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None) -> Array:
        y = layer(self.features, 3, self.stride, dtype=self.dtype, name="conv1")(x)
        y = Norm(self.train, name="norm1")(y, mask)
        y = layer(self.features, 3, dtype=self.dtype, name="conv2")(y)
        # without ReLU, which follows the sum below
        y = Norm(self.train, False, name="norm2")(y, mask)
        # the shortcut needs a projection where the shape changes
        if self.stride != 1 or x.shape[-1] != self.features:
            x = layer(self.features, 1, self.stride, dtype=self.dtype, name="down")(x)
            x = Norm(self.train, False, name="down_norm")(x, mask)
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, plus the block's input.

    The stride is that of the 3 x 3 convolution, as in torchvision.
    """

    features: int
    stride: int
    dtype: Dtype
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
    """The whole network; it returns features (the mean of the last stage) and all stages
    by name."""

    config: ResNetConfig
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
        block = BasicBlock
        if c.bottleneck:
            block = Bottleneck
        for stage, blocks in enumerate(c.stages):
            channels = c.channels * 2**stage
            for i in range(blocks):
                # the first block of every stage but the first halves the side
                stride = 1
                if stage and i == 0:
                    stride = 2
                x = block(channels, stride, c.dtype, self.train, name=f"stage_{stage}_block_{i}")(x, mask)
            taps[f"stage_{stage}"] = x
        return pooled(x), taps


resnet_network = functools.partial(convnet_network, ResNet)
