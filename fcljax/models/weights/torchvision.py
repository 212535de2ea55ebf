"""Read ResNets and DenseNets from tensors under torchvision's names, which are also
timm's."""

import re
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError
from fcljax.models.convnet import Variables, convnet_shapes
from fcljax.models.densenet import DenseNet, DenseNetConfig
from fcljax.models.networks import network_name
from fcljax.models.resnet import ResNet, ResNetConfig
from fcljax.models.weights import finding
from fcljax.models.weights.tensors import InterpretedConvNet, Tensors, check_tensors, float32, reverse
from fcljax.settings import Stem
from fcljax.types import PyTree

# stem by the size of the first kernel
_STEMS: dict[int, Stem] = {7: "imagenet", 3: "cifar"}
# our names of modules and leaves -> torchvision's
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


# other names of modules -> torchvision's
_SPELLINGS = (
    # in torchvision's first files of DenseNets
    (r"(denselayer\d+\.(?:norm|conv))\.", r"\1"),
    # in code of ResNets for small images
    (r"^(layer\d+\.\d+\.)shortcut\.", r"\1downsample."),
)
# modules that may be the classifier
_HEADS = ("fc", "classifier", "linear", "head")


def interpret(tensors: Tensors, name: str | None) -> InterpretedConvNet:
    """Check a network tensor by tensor, and bring it to our names and layouts.

    Args:
      tensors: by name, as from `finding.find`.
      name: one of CONVNETS, which the tensors must fit; None takes the architecture from
        the tensors.

    Raises:
      InputError: for tensors that are missing, unexpected, misshaped or not finite.
    """
    tensors = _rename(tensors)
    config = _architecture(tensors)
    if name is not None and network_name(config) != name:
        raise InputError(f"checkpoint: does not fit {name}: it is {network_name(config)}")
    head = _pop_head(tensors, config.width)
    tensors, left_out = finding.split_content(tensors, lambda _name: False)
    module = ResNet(config) if isinstance(config, ResNetConfig) else DenseNet(config)
    shapes: dict[Any, Any] = flatten_dict(convnet_shapes(module, config.image_size))
    names = {path: _torchvision_name(config, path) for path in shapes}
    file_shapes = {names[path]: _torchvision_shape(x.shape) for path, x in shapes.items()}
    check_tensors(tensors, file_shapes, network_name(config))
    variables = unflatten_dict({path: reverse(float32(key, tensors[key])) for path, key in names.items()})
    params = Variables(variables["params"], variables["batch_stats"])
    return InterpretedConvNet(config, params, head, left_out)


def _torchvision_name(
    config: ResNetConfig | DenseNetConfig,
    path: tuple[str, ...],
) -> str:
    """Return the name of a variable from its path: collection, modules, leaf."""
    _collection, *modules, leaf = path
    module = ".".join(modules)
    if match := re.match(r"stage_(\d+)_block_(\d+)\.(.+)", module):
        name = f"layer{int(match[1]) + 1}.{match[2]}.{_IN_BLOCK.get(match[3], match[3])}"
    elif match := re.match(r"block_(\d+)_layer_(\d+)\.(\w+)", module):
        name = f"features.denseblock{int(match[1]) + 1}.denselayer{int(match[2]) + 1}.{match[3]}"
    elif match := re.match(r"transition_(\d+)\.(\w+)", module):
        name = f"features.transition{int(match[1]) + 1}.{match[2]}"
    else:
        name = _OUTSIDE[type(config)][module]
    return f"{name}.{_LEAVES[leaf]}"


def _torchvision_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 4:
        return (shape[3], shape[2], shape[0], shape[1])
    return shape


def _rename(tensors: Tensors) -> Tensors:
    """Bring other spellings to the names that torchvision has today."""
    renamed: Tensors = {}
    for name, x in tensors.items():
        for pattern, replacement in _SPELLINGS:
            name = re.sub(pattern, replacement, name)
        renamed[name] = x
    return renamed


def _architecture(tensors: Tensors) -> ResNetConfig | DenseNetConfig:
    """Return the shape that names and kernels show, at the image size of its stem."""
    # of these two, only DenseNets have the prefix "features."
    dense = any(name.startswith("features.") for name in tensors)
    kernel = tensors.get("features.conv0.weight" if dense else "conv1.weight")
    if kernel is None or kernel.ndim != 4 or kernel.shape[2] not in _STEMS:
        raise InputError("checkpoint: its first convolution is missing, or neither 7 x 7 nor 3 x 3")
    stem = _STEMS[kernel.shape[2]]
    channels = kernel.shape[0]
    size = 32
    if stem == "imagenet":
        size = 224
    if not dense:
        bottleneck = "layer1.0.conv3.weight" in tensors
        stages = _count_blocks(tensors, r"layer(\d+)\.(\d+)\.")
        return ResNetConfig(size, stages, channels, stem, bottleneck=bottleneck)
    layers = _count_blocks(tensors, r"features\.denseblock(\d+)\.denselayer(\d+)\.")
    # a missing kernel is reported by the check of all shapes
    last_kernel = tensors.get("features.denseblock1.denselayer1.conv2.weight")
    growth = 32
    if last_kernel is not None:
        growth = last_kernel.shape[0]
    return DenseNetConfig(size, layers, growth, channels, stem)


def _count_blocks(tensors: Tensors, pattern: str) -> tuple[int, ...]:
    """Count the blocks of each stage; the pattern has the numbers of stage, from 1, and
    block."""
    blocks = {match.groups() for name in tensors if (match := re.match(pattern, name))}
    # a stage that is missing counts 0 blocks, and the check of all shapes reports it
    stages = max(int(stage) for stage, _ in blocks)
    return tuple(sum(int(stage) == i for stage, _ in blocks) for i in range(1, stages + 1))


def _pop_head(tensors: Tensors, width: int) -> PyTree | None:
    """Remove and return the classifier whose weight and bias are there and fit the
    width."""
    for module in _HEADS:
        names = (f"{module}.weight", f"{module}.bias")
        if all(name in tensors for name in names):
            weight, bias = (tensors[name].astype(np.float32) for name in names)
            if weight.shape == (bias.size, width):
                for name in names:
                    del tensors[name]
                return {"kernel": weight.T, "bias": bias}
    return None
