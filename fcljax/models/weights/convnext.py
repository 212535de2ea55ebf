"""ConvNeXts in files of weights, under the names of timm, torchvision or their authors."""

import re
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError
from fcljax.models.convnext import init_convnext
from fcljax.models.networks import network_name
from fcljax.models.shapes import ConvNeXtConfig
from fcljax.models.weights import finding
from fcljax.models.weights.tensors import Tensors, check_tensors, float32
from fcljax.types import PyTree

# names of modules -> timm's, of torchvision and of the authors
_TORCHVISION = (
    (r"features\.0\.0\.", "stem.0."),
    (r"features\.0\.1\.", "stem.1."),
    (r"classifier\.0\.", "head.norm."),
    (r"classifier\.2\.", "head.fc."),
    (r"block\.0\.", "conv_dw."),
    (r"block\.2\.", "norm."),
    (r"block\.3\.", "mlp.fc1."),
    (r"block\.5\.", "mlp.fc2."),
    (r"layer_scale$", "gamma"),
)
_AUTHORS = (
    (r"^downsample_layers\.0\.", "stem."),
    (r"^downsample_layers\.(\d)\.", r"stages.\1.downsample."),
    (r"^stages\.(\d)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"dwconv\.", "conv_dw."),
    (r"pwconv1\.", "mlp.fc1."),
    (r"pwconv2\.", "mlp.fc2."),
    (r"^norm\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)
_IN_BLOCK = {"depthwise": "conv_dw", "norm": "norm", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}


class FoundConvNeXt(NamedTuple):
    """A network of a file."""

    config: ConvNeXtConfig
    params: PyTree
    head: PyTree | None
    """{"kernel", "bias"} of its classifier, if there is one."""
    beside: tuple[str, ...]
    """Names of what is left out."""


def interpret(tensors: Tensors, name: str | None) -> FoundConvNeXt:
    """The network in `tensors`, checked tensor by tensor, under our names and layouts.

    Args:
      tensors: by name, as `finding.find` gives them.
      name: the network that they must be; None takes the architecture from the tensors.

    Raises:
      InputError: for tensors that are missing, unexpected, misshaped or not finite.
    """
    tensors = _renamed(tensors)
    config = _architecture(tensors)
    if name is not None and network_name(config) != name:
        raise InputError(f"checkpoint: does not fit {name}: it is {network_name(config)}")
    head = {key: tensors.pop(f"head.fc.{key}", None) for key in ("weight", "bias")}
    tensors, beside = finding.split_content(tensors, lambda name: name.startswith("head.norm."))
    shapes: dict[Any, Any] = flatten_dict(jax.eval_shape(lambda: init_convnext(jax.random.key(0), config)))
    theirs = {path: _their_name(path) for path in shapes}
    wanted = {theirs[path]: _their_shape(path, x.shape) for path, x in shapes.items()}
    check_tensors(tensors, wanted, network_name(config))
    flat = {path: _ours(path, float32(key, tensors[key]), shapes[path].shape) for path, key in theirs.items()}
    classifier = None
    if head["weight"] is not None and head["bias"] is not None:
        classifier = {"kernel": head["weight"].astype(np.float32).T, "bias": head["bias"].astype(np.float32)}
    return FoundConvNeXt(config, unflatten_dict(flat), classifier, beside)


def _renamed(tensors: Tensors) -> Tensors:
    """Under timm's names."""
    names: tuple[tuple[str, str], ...] = ()
    if "features.1.0.block.0.weight" in tensors:
        names = _TORCHVISION
    elif "stages.0.0.dwconv.weight" in tensors:
        names = _AUTHORS
    found = {}
    for own, x in tensors.items():
        if names is _TORCHVISION and (place := re.match(r"features\.([1-9])\.(\d+)\.", own)):
            number = int(place[1])  # blocks at odd places, what is between stages at even ones
            inside = f"blocks.{place[2]}" if number % 2 else f"downsample.{place[2]}"
            own = f"stages.{number // 2}.{inside}.{own[place.end() :]}"
        for pattern, ours in names:
            own = re.sub(pattern, ours, own)
        found[own] = x.reshape(-1) if own.endswith("gamma") else x  # torchvision's are [C, 1, 1]
    return found


def _architecture(tensors: Tensors) -> ConvNeXtConfig:
    """The shape that the names and kernels tell."""
    pattern = re.compile(r"stages\.(\d)\.blocks\.\d+\.norm\.bias$")
    stage_of = [int(match[1]) for name in tensors if (match := pattern.match(name))]
    stages = 1 + max(stage_of, default=0)
    depths = tuple(stage_of.count(stage) for stage in range(stages))
    norms = [tensors.get(f"stages.{stage}.blocks.0.norm.bias") for stage in range(stages)]
    stem = tensors.get("stem.0.weight")
    if stem is None or stem.ndim != 4 or any(norm is None for norm in norms):
        raise InputError("checkpoint: the stem or a first block of this ConvNeXt is missing")
    widths = tuple(len(norm) for norm in norms if norm is not None)
    return ConvNeXtConfig(224, depths, widths, stem.shape[2])


def _their_name(path: tuple[str, ...]) -> str:
    """timm's name of a parameter by its path: its modules and its leaf."""
    *modules, leaf = path
    module = ".".join(modules)
    outside = {"stem": "stem.0", "stem_norm": "stem.1", "norm": "head.norm"}
    if match := re.fullmatch(r"down_(\d)(_norm)?", module):
        theirs = f"stages.{match[1]}.downsample.{0 if match[2] else 1}"
    elif match := re.fullmatch(r"stage_(\d)_block_(\d+)", module):
        return f"stages.{match[1]}.blocks.{match[2]}.gamma"
    elif match := re.fullmatch(r"stage_(\d)_block_(\d+)\.(\w+)", module):
        theirs = f"stages.{match[1]}.blocks.{match[2]}.{_IN_BLOCK[match[3]]}"
    else:
        theirs = outside[module]
    return f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"


def _their_shape(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    if path[-1] != "kernel":
        return shape
    if len(shape) == 3:
        return shape[2], 1, shape[0], shape[1]
    side = _side(path, shape)
    return (shape[1], shape[0] // side**2, side, side) if side else shape[::-1]


def _side(path: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Of the convolutions that are products of squares of pixels; 0 for other matrices."""
    if path[0] == "stem":
        return round((shape[0] / 3) ** 0.5)
    return 2 if path[0].startswith("down_") else 0


def _ours(path: tuple[str, ...], x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if path[-1] != "kernel":
        return x
    if len(shape) == 3:
        return x[:, 0].transpose(1, 2, 0)
    return x.transpose(2, 3, 1, 0).reshape(shape) if x.ndim == 4 else x.T
