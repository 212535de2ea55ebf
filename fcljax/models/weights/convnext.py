"""Read ConvNeXts from tensors under the names of timm, torchvision or their authors."""

import re
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError
from fcljax.models.convnext import init_convnext
from fcljax.models.networks import network_name
from fcljax.models.shapes import ConvNeXtConfig
from fcljax.models.weights import finding
from fcljax.models.weights.tensors import InterpretedConvNet, Tensors, check_tensors, float32, reverse

# names of modules -> timm's
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
    weight = tensors.pop("head.fc.weight", None)
    bias = tensors.pop("head.fc.bias", None)
    head = None
    if weight is not None and bias is not None:
        head = {"kernel": weight.astype(np.float32).T, "bias": bias.astype(np.float32)}
    tensors, left_out = finding.split_content(tensors, lambda name: name.startswith("head.norm."))
    shapes: dict[Any, Any] = flatten_dict(jax.eval_shape(lambda: init_convnext(jax.random.key(0), config)))
    names = {path: _timm_name(path) for path in shapes}
    file_shapes = {names[path]: _timm_shape(path, x.shape) for path, x in shapes.items()}
    check_tensors(tensors, file_shapes, network_name(config))
    flat = {
        path: _to_our_layout(path, float32(key, tensors[key]), shapes[path].shape)
        for path, key in names.items()
    }
    return InterpretedConvNet(config, unflatten_dict(flat), head, left_out)


def _rename(tensors: Tensors) -> Tensors:
    """Bring the names of torchvision or the authors to timm's."""
    spellings: tuple[tuple[str, str], ...] = ()
    if "features.1.0.block.0.weight" in tensors:
        spellings = _TORCHVISION
    elif "stages.0.0.dwconv.weight" in tensors:
        spellings = _AUTHORS
    renamed = {}
    for name, x in tensors.items():
        if spellings is _TORCHVISION and (match := re.match(r"features\.([1-9])\.(\d+)\.", name)):
            # torchvision's `features`: 1, 3, 5, 7 are stages, 2, 4, 6 the downsampling
            # between
            number = int(match[1])
            module = "downsample"
            if number % 2:
                module = "blocks"
            name = f"stages.{number // 2}.{module}.{match[2]}.{name[match.end() :]}"
        for pattern, replacement in spellings:
            name = re.sub(pattern, replacement, name)
        # torchvision's scales are [C, 1, 1]
        renamed[name] = x.reshape(-1) if name.endswith("gamma") else x
    return renamed


def _architecture(tensors: Tensors) -> ConvNeXtConfig:
    """Return the shape that names and kernels show."""
    pattern = re.compile(r"stages\.(\d)\.blocks\.\d+\.norm\.bias$")
    stage_of = [int(match[1]) for name in tensors if (match := pattern.match(name))]
    stages = 1 + max(stage_of, default=0)
    depths = tuple(stage_of.count(stage) for stage in range(stages))
    # the norm of a stage's first block has as many values as the stage has channels
    norms = [tensors.get(f"stages.{stage}.blocks.0.norm.bias") for stage in range(stages)]
    stem = tensors.get("stem.0.weight")
    if stem is None or stem.ndim != 4 or any(norm is None for norm in norms):
        raise InputError("checkpoint: the stem or a first block of this ConvNeXt is missing")
    widths = tuple(len(norm) for norm in norms if norm is not None)
    return ConvNeXtConfig(224, depths, widths, stem.shape[2])


def _timm_name(path: tuple[str, ...]) -> str:
    """Return timm's name of a parameter from its path: modules, leaf."""
    *modules, leaf = path
    module = ".".join(modules)
    outside = {"stem": "stem.0", "stem_norm": "stem.1", "norm": "head.norm"}
    if match := re.fullmatch(r"down_(\d)(_norm)?", module):
        number = 1
        if match[2]:
            number = 0
        name = f"stages.{match[1]}.downsample.{number}"
    elif match := re.fullmatch(r"stage_(\d)_block_(\d+)", module):
        return f"stages.{match[1]}.blocks.{match[2]}.gamma"
    elif match := re.fullmatch(r"stage_(\d)_block_(\d+)\.(\w+)", module):
        name = f"stages.{match[1]}.blocks.{match[2]}.{_IN_BLOCK[match[3]]}"
    else:
        name = outside[module]
    return f"{name}.{'bias' if leaf == 'bias' else 'weight'}"


def _timm_shape(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    if path[-1] != "kernel":
        return shape
    if len(shape) == 3:  # depthwise
        return shape[2], 1, shape[0], shape[1]
    # timm has convolutions of side x side where we have products of squares of pixels
    side = 0
    if path[0] == "stem":
        side = round((shape[0] / 3) ** 0.5)
    elif path[0].startswith("down_"):
        side = 2
    if side:
        return shape[1], shape[0] // side**2, side, side
    return shape[::-1]


def _to_our_layout(path: tuple[str, ...], x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if path[-1] != "kernel":
        return x
    if len(shape) == 3:  # depthwise
        return x[:, 0].transpose(1, 2, 0)
    return reverse(x).reshape(shape)
