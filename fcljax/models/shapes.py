"""The shapes of the networks that have names; without JAX."""

import dataclasses
import math
from typing import Literal, NamedTuple

from fcljax.settings import Stem

# "cudnn" is NVIDIA's library in place of the package's kernel for GPUs
ChipKind = Literal["none", "tpu", "gpu", "cudnn"]
# The activation of MLPs. A checkpoint must run with its own: quick_gelu, x
# sigmoid(1.702 x), is CLIP's, and gelu_tanh, the approximation by tanh, is
# big_vision's.
Activation = Literal["gelu", "quick_gelu", "gelu_tanh"]
# The feature of a text: a learned class token before the text (learned), the text's
# first token (first: BERT), the mean over tokens (mean: sentence-transformers), or its
# end token (end: CLIP).
Pooling = Literal["learned", "first", "mean", "end"]
# fields that say how a run computes a network; they are no part of its shape or name
OF_A_RUN = ("dtype", "kernel", "fewer_operations")
Dtype = Literal["float32", "tf32", "bfloat16"]


class NumberFormat(NamedTuple):
    """What a network's products round (`models/products.py`)."""

    dtype: Dtype = "float32"
    """What products round their factors to, as of `--dtype`."""
    rounds_results: bool = False
    """Whether products return bfloat16 too, before a bias or the residual stream is
    added."""

    @property
    def array(self) -> str:
        """Return the type of arrays in memory."""
        return array_type(self.dtype)


def array_type(dtype: str) -> str:
    """Return the type of arrays of a format; tf32 is a format of factors alone."""
    if dtype == "tf32":
        return "float32"
    return dtype


class AttentionKernel(NamedTuple):
    """Which programs compute attention of bfloat16 in one kernel."""

    chip: ChipKind = "none"
    """The chip that the kernel is written for."""
    single_device: bool = False
    """Use it only in programs that one device runs by itself (`mesh.on_each`): XLA
    cannot divide it over several devices."""


NO_KERNEL = AttentionKernel()


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Static shape of a ViT.

    `dtype` is the format of the factors of matrix products, a `Dtype`; all else is
    float32. Without `final_norm` the features are the last block's output, and the
    parameters have no `norm`.
    """

    image_size: int = 224
    patch: int = 16
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp: int = 3072
    dtype: Dtype = "float32"
    epsilon: float = 1e-6  # of the LayerNorms
    final_norm: bool = True
    # attention and MLP are scaled by channel before they are added (DINOv2)
    layer_scale: bool = False
    # learned tokens beside the class token; their outputs are unused (DINOv2)
    registers: int = 0
    qk_norm: bool = False  # LayerNorms of the queries and keys of each head
    pre_norm: bool = False  # a LayerNorm before the first block (CLIP, BERT)
    post_norm: bool = False  # a block's LayerNorms stand behind its residual sums (BERT)
    activation: Activation = "gelu"
    # base of the patches' rotary positions (DINOv3: 100); 0: none
    rotary_base: float = 0.0
    kernel: AttentionKernel = NO_KERNEL
    # between products: GELU by a polynomial, and norms as XLA for GPUs makes one kernel
    # of. Not yet timed on a chip, so no run takes it
    fewer_operations: bool = False

    @property
    def number_format(self) -> NumberFormat:
        """Return what the network's products round on the chip of its attention kernel.

        A GPU's library of products adds bias and residual stream itself, in float32,
        where all three are bfloat16; and a float32 result takes twice the bytes. XLA
        for TPUs rounds inside a product anyway.
        """
        rounds_results = self.dtype == "bfloat16" and self.kernel.chip in ("gpu", "cudnn")
        return NumberFormat(self.dtype, rounds_results)

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch


VITS: dict[str, ViTConfig] = {
    "vit_micro": ViTConfig(image_size=32, patch=8, width=96, depth=6, heads=4, mlp=384),
    "vit_ti16": ViTConfig(width=192, heads=3, mlp=768),
    "vit_s16": ViTConfig(width=384, heads=6, mlp=1536),
    "vit_b16": ViTConfig(),
}


def reduction(stem: Stem, stages: int) -> int:
    """Return how many pixels of a side become one position of the last stage."""
    # 7 x 7 with stride 2 and a maximum with stride 2; every stage but the first halves
    # again
    stem_stride = 1
    if stem == "imagenet":
        stem_stride = 4
    return stem_stride * 2 ** (stages - 1)


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Static shape of a ResNet. Each stage after the first doubles the channels and
    halves the side.

    `dtype` is the type of the factors of convolutions.
    """

    image_size: int = 224
    stages: tuple[int, ...] = (2, 2, 2, 2)  # blocks of each
    # channels of the first stage; outputs of bottlenecks have four times as many
    channels: int = 64
    stem: Stem = "imagenet"
    dtype: Dtype = "float32"
    bottleneck: bool = False

    @property
    def reduction(self) -> int:
        """Pixels of a side that become one position of the last stage."""
        return reduction(self.stem, len(self.stages))

    @property
    def width(self) -> int:
        """Channels of the last stage, which are the features."""
        expansion = 1
        if self.bottleneck:
            expansion = 4
        return self.channels * 2 ** (len(self.stages) - 1) * expansion


RESNETS: dict[str, ResNetConfig] = {
    "resnet_micro": ResNetConfig(16, (1, 1, 1), 16, "cifar"),
    "resnet18": ResNetConfig(),
    "resnet34": ResNetConfig(stages=(3, 4, 6, 3)),
    "resnet50": ResNetConfig(stages=(3, 4, 6, 3), bottleneck=True),
}


@dataclasses.dataclass(frozen=True)
class DenseNetConfig:
    """Static shape of a DenseNet.

    Layers add `growth` channels; between blocks channels and side halve."""

    image_size: int = 224
    blocks: tuple[int, ...] = (6, 12, 24, 16)  # layers of each
    growth: int = 32
    channels: int = 64  # of the stem
    stem: Stem = "imagenet"
    dtype: Dtype = "float32"

    @property
    def reduction(self) -> int:
        """Pixels of a side that become one position of the last block."""
        return reduction(self.stem, len(self.blocks))

    @property
    def width(self) -> int:
        """Channels of the last block, which are the features."""
        width = self.channels
        for i, layers in enumerate(self.blocks):
            if i:
                width //= 2
            width += layers * self.growth
        return width


DENSENETS: dict[str, DenseNetConfig] = {
    "densenet121": DenseNetConfig(),
    "densenet169": DenseNetConfig(blocks=(6, 12, 32, 32)),
}


@dataclasses.dataclass(frozen=True)
class ConvNeXtConfig:
    """Static shape of a ConvNeXt. Each stage after the first halves the side."""

    image_size: int = 224
    depths: tuple[int, ...] = (3, 3, 9, 3)  # blocks of each stage
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels of each stage
    patch: int = 4  # pixels of a side that become one position of the first stage
    dtype: Dtype = "float32"

    @property
    def reduction(self) -> int:
        """Pixels of a side that become one position of the last stage."""
        return self.patch * 2 ** (len(self.depths) - 1)

    @property
    def width(self) -> int:
        """Channels of the last stage, which are the features."""
        return self.widths[-1]


CONVNEXTS: dict[str, ConvNeXtConfig] = {
    "convnext_tiny": ConvNeXtConfig(),
    "convnext_small": ConvNeXtConfig(depths=(3, 3, 27, 3)),
}
CONVNETS: dict[str, ResNetConfig | DenseNetConfig | ConvNeXtConfig] = {**RESNETS, **DENSENETS, **CONVNEXTS}


# ---- networks of data that are no images -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class ArrayNetConfig:
    """Static shape of a network of `ARRAY_NETS`."""

    name: str
    shape: tuple[int, ...]  # of an example
    hidden: tuple[int, ...] = ()  # widths of the layers
    dtype: Dtype = "float32"
    kernel: int = 5  # steps of a window of conv1d
    image_size: int = 0  # it reads no images

    @property
    def width(self) -> int:
        """Width of the features: the last layer's, or all numbers of an example."""
        return self.hidden[-1] if self.hidden else math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Static shape of a text encoder: embeddings of tokens, and a ViT's blocks."""

    vocabulary: int = 4096
    length: int = 64  # most tokens of a text
    # shape of the network, without its image and patches
    blocks: ViTConfig = ViTConfig(width=64, depth=6, heads=4, mlp=256)
    image_size: int = 0  # it reads no images
    pooling: Pooling = "learned"
    end: int | None = None  # id of the end token; None: the highest id of a text
    causal: bool = False  # a token reads only itself and those before it (CLIP)
    types: int = 0  # kinds of tokens, such as the two sentences of a pair (BERT)

    @property
    def width(self) -> int:
        """Width of the features."""
        return self.blocks.width

    @property
    def dtype(self) -> Dtype:
        """Type of the factors of matrix products."""
        return self.blocks.dtype


TEXT_ENCODERS = {"text_micro": TextConfig()}
# text towers of packaged networks of images
TEXT_TOWERS = {
    "vit_micro": TextConfig(
        2048, 40, ViTConfig(width=64, depth=2, heads=4, mlp=128), pooling="end", causal=True
    )
}
PACKAGED = {"vit_micro": "vit_micro.safetensors", "text_micro": "text_micro.safetensors"}
