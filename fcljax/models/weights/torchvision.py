"""ResNets and DenseNets under torchvision's names, which timm's share: what is in a file of weights."""

import re
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError
from fcljax.models.convnet import Variables, convnet_shapes
from fcljax.models.densenet import DenseNet, DenseNetConfig
from fcljax.models.networks import network_name
from fcljax.models.resnet import ResNet, ResNetConfig
from fcljax.models.weights import finding
from fcljax.models.weights.tensors import Tensors, check_tensors, float32, reverse
from fcljax.settings import Stem
from fcljax.types import PyTree

_STEMS: dict[int, Stem] = {7: "imagenet", 3: "cifar"}  # by the size of the first kernel
# our names of modules and leaves -> theirs
_OUTSIDE = {
    ResNetConfig: {"stem.conv": "conv1", "stem.norm.norm": "bn1"},
    DenseNetConfig: {
        "stem.conv": "features.conv0",
        "stem.norm.norm": "features.norm0",
        "norm.norm": "features.norm5",
    },
}
_IN_BLOCK = {
    "norm1.norm": "bn1",
    "norm2.norm": "bn2",
    "norm3.norm": "bn3",
    "down": "downsample.0",
    "down_norm.norm": "downsample.1",
}
_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


class FoundConvNet(NamedTuple):
    """A network of a file."""

    config: ResNetConfig | DenseNetConfig
    params: Variables
    head: PyTree | None  # {"kernel", "bias"} of its classifier, if there is one
    beside: tuple[str, ...]  # names of what is left out


# other names of modules -> torchvision's: those of its own first files of DenseNets, and of ResNets as most
# code for small images has them
_SPELLINGS = (
    (r"(denselayer\d+\.(?:norm|conv))\.", r"\1"),
    (r"^(layer\d+\.\d+\.)shortcut\.", r"\1downsample."),
)
_HEADS = ("fc", "classifier", "linear", "head")  # modules that may be the classifier


def interpret(tensors: Tensors, name: str | None) -> FoundConvNet:
    """The network in `tensors`, checked tensor by tensor, under our names and layouts.

    Args:
      tensors: by name, as `finding.find` gives them.
      name: one of CONVNETS, which the tensors must fit; None takes the architecture from the tensors.

    Raises:
      InputError: for tensors that are missing, unexpected, misshaped or not finite.
    """
    tensors = _renamed(tensors)
    config = _architecture(tensors)
    if name is not None and network_name(config) != name:
        raise InputError(f"checkpoint: does not fit {name}: it is {network_name(config)}")
    classifier, named = _head(tensors, config.width)
    tensors = {key: x for key, x in tensors.items() if key not in named}
    body, beside = finding.split_content(tensors, lambda key: False)
    module = ResNet(config) if isinstance(config, ResNetConfig) else DenseNet(config)
    shapes: dict[Any, Any] = flatten_dict(convnet_shapes(module, config.image_size))
    theirs = {path: _their_name(config, path) for path in shapes}
    check_tensors(
        body, {theirs[path]: _their_shape(x.shape) for path, x in shapes.items()}, network_name(config)
    )
    flat = {path: reverse(float32(key, body[key])) for path, key in theirs.items()}
    variables = unflatten_dict(flat)
    params = Variables(variables["params"], variables["batch_stats"])
    return FoundConvNet(config, params, classifier, beside)


def _their_name(config: ResNetConfig | DenseNetConfig, path: tuple[str, ...]) -> str:
    """Of a variable by its path: its collection, its modules and its leaf."""
    module = ".".join(path[1:-1])
    theirs = _OUTSIDE[type(config)].get(module)
    if match := re.match(r"stage_(\d+)_block_(\d+)\.(.+)", module):
        theirs = f"layer{int(match[1]) + 1}.{match[2]}.{_IN_BLOCK.get(match[3], match[3])}"
    elif match := re.match(r"block_(\d+)_layer_(\d+)\.(\w+)", module):
        theirs = f"features.denseblock{int(match[1]) + 1}.denselayer{int(match[2]) + 1}.{match[3]}"
    elif match := re.match(r"transition_(\d+)\.(\w+)", module):
        theirs = f"features.transition{int(match[1]) + 1}.{match[2]}"
    return f"{theirs}.{_LEAVES[path[-1]]}"


def _their_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[3], shape[2], shape[0], shape[1]) if len(shape) == 4 else shape


def _renamed(tensors: Tensors) -> Tensors:
    """Under the names that torchvision has today."""
    found: Tensors = {}
    for name, x in tensors.items():
        for pattern, theirs in _SPELLINGS:
            name = re.sub(pattern, theirs, name)
        found[name] = x
    return found


def _architecture(tensors: Tensors) -> ResNetConfig | DenseNetConfig:
    """The shape that the names and the first kernels tell, at the image size of its kind."""
    dense = any(name.startswith("features.") for name in tensors)
    first = tensors.get("features.conv0.weight" if dense else "conv1.weight")
    if first is None or first.ndim != 4 or first.shape[2] not in _STEMS:
        raise InputError("checkpoint: its first convolution is missing, or neither 7 x 7 nor 3 x 3")
    stem = _STEMS[first.shape[2]]
    channels = first.shape[0]
    size = 224 if stem == "imagenet" else 32
    if not dense:
        bottleneck = "layer1.0.conv3.weight" in tensors
        stages = _counted(tensors, r"layer(\d+)\.(\d+)\.")
        return ResNetConfig(size, stages, channels, stem, bottleneck=bottleneck)
    layers = _counted(tensors, r"features\.denseblock(\d+)\.denselayer(\d+)\.")
    narrow = tensors.get("features.denseblock1.denselayer1.conv2.weight")
    growth = 32 if narrow is None else narrow.shape[0]
    return DenseNetConfig(size, layers, growth, channels, stem)


def _counted(tensors: Tensors, pattern: str) -> tuple[int, ...]:
    """How many different second numbers there are under each first one."""
    found = {match.groups() for name in tensors if (match := re.match(pattern, name))}
    stages = max(int(stage) for stage, _ in found)
    return tuple(sum(int(stage) == i for stage, _ in found) for i in range(1, stages + 1))


def _head(tensors: Tensors, width: int) -> tuple[PyTree | None, tuple[str, ...]]:
    """The classifier whose weight and bias are there and fit, and the names of both."""
    for module in _HEADS:
        names = (f"{module}.weight", f"{module}.bias")
        if all(name in tensors for name in names):
            weight, bias = (tensors[name].astype(np.float32) for name in names)
            if weight.shape == (bias.size, width):
                return {"kernel": weight.T, "bias": bias}, names
    return None, ()
