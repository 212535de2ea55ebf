"""ResNets and DenseNets under torchvision's names, which timm's share: what is in a file of weights."""

import re
from typing import Literal, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from fcljax.errors import InputError
from fcljax.models.convnet import Variables
from fcljax.models.densenet import DenseNetConfig
from fcljax.models.networks import ConvNetConfig, network_name
from fcljax.models.resnet import ResNetConfig
from fcljax.settings import Stem
from fcljax.types import PyTree

Tensors = dict[str, np.ndarray]
Part = Literal["weights", "stats"]

_STEMS: dict[int, Stem] = {7: "imagenet", 3: "cifar"}
# leaves of a batch normalisation: theirs, ours
_LEAVES: dict[str, tuple[Part, str]] = {
    "weight": ("weights", "scale"),
    "bias": ("weights", "bias"),
    "running_mean": ("stats", "mean"),
    "running_var": ("stats", "var"),
}


class Found(NamedTuple):
    """A network of a file. head: {"kernel", "bias"} of its classifier, if there is one."""

    config: ConvNetConfig
    params: Variables
    head: PyTree | None


class _Place(NamedTuple):
    """Where a tensor goes, and what shape it must have."""

    part: Part
    path: tuple[str, ...]
    shape: tuple[int, ...]


# what stands before torchvision's own names where a whole model was saved
_FIRST = re.compile(r"((?:.*\.)?)(?:layer1\.0\.conv1|features\.denseblock1\.denselayer1\.conv\.?1)\.weight$")


def is_convnet(tensors: Tensors) -> bool:
    """Whether they are a ResNet's or a DenseNet's, by the names of the first stage."""
    return any(_FIRST.match(name) for name in tensors)


def interpret(tensors: Tensors, name: str | None) -> Found:
    """The network in `tensors`, checked tensor by tensor, under our names and layouts.

    Args:
      tensors: by name, as `checkpoints.read` gives them; `is_convnet` holds.
      name: one of CONVNETS, which the tensors must fit; None takes the architecture from the tensors.

    Raises:
      InputError: for bottleneck blocks, and for tensors that are missing, unexpected, misshaped or not
        finite.
    """
    if not is_convnet(tensors):
        raise InputError(f"checkpoint: does not fit {name}: no ResNet or DenseNet is in it")
    tensors = _renamed(tensors)
    config = _architecture(tensors)
    if name is not None and network_name(config) != name:
        raise InputError(f"checkpoint: does not fit {name}: it is {network_name(config)}")
    places = _resnet(config) if isinstance(config, ResNetConfig) else _densenet(config)
    head = {key: x for key, x in tensors.items() if re.match(r"(fc|classifier)\.(weight|bias)$", key)}
    counters = {key for key in tensors if key.endswith("num_batches_tracked")}
    _check(tensors, places, set(head) | counters, network_name(config))
    parts: dict[Part, dict[tuple[str, ...], np.ndarray]] = {"weights": {}, "stats": {}}
    for key, place in places.items():
        x = tensors[key].astype(np.float32)
        parts[place.part][place.path] = x.transpose(2, 3, 1, 0) if x.ndim == 4 else x
    params = Variables(*(unflatten_dict(parts[part]) for part in ("weights", "stats")))
    return Found(config, params, _head(head, config.width))


def _renamed(tensors: Tensors) -> Tensors:
    """Without what stands before all names. torchvision's own files of DenseNets have the names of an early
    version, norm.1 for norm1."""
    prefix = next(match[1] for name in tensors if (match := _FIRST.match(name)))
    own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.", r"\1", name): x for name, x in own.items()}


def _architecture(tensors: Tensors) -> ConvNetConfig:
    """The shape that the names and the first kernels tell, at the image size of its kind."""
    dense = any(name.startswith("features.") for name in tensors)
    first = tensors.get("features.conv0.weight" if dense else "conv1.weight")
    if first is None or first.ndim != 4 or first.shape[2] not in _STEMS:
        raise InputError("checkpoint: its first convolution is missing, or neither 7 x 7 nor 3 x 3")
    stem, channels = _STEMS[first.shape[2]], first.shape[0]
    size = 224 if stem == "imagenet" else 32
    if not dense:
        if "layer1.0.conv3.weight" in tensors:
            raise InputError("checkpoint: its blocks are bottlenecks; of ResNets 18 and 34 are known here")
        return ResNetConfig(size, _counted(tensors, r"layer(\d+)\.(\d+)\."), channels, stem)
    layers = _counted(tensors, r"features\.denseblock(\d+)\.denselayer(\d+)\.")
    narrow = tensors.get("features.denseblock1.denselayer1.conv2.weight")
    growth = 32 if narrow is None else narrow.shape[0]
    return DenseNetConfig(size, layers, growth, channels, stem)


def _counted(tensors: Tensors, pattern: str) -> tuple[int, ...]:
    """How many different second numbers there are under each first one."""
    found = {match.groups() for name in tensors if (match := re.match(pattern, name))}
    stages = max(int(stage) for stage, _ in found)
    return tuple(sum(int(stage) == i for stage, _ in found) for i in range(1, stages + 1))


def _conv(theirs: str, ours: tuple[str, ...], inputs: int, outputs: int, size: int) -> dict[str, _Place]:
    return {f"{theirs}.weight": _Place("weights", (*ours, "kernel"), (outputs, inputs, size, size))}


def _norm(theirs: str, ours: tuple[str, ...], channels: int) -> dict[str, _Place]:
    return {
        f"{theirs}.{leaf}": _Place(part, (*ours, "norm", mine), (channels,))
        for leaf, (part, mine) in _LEAVES.items()
    }


def _resnet(c: ResNetConfig) -> dict[str, _Place]:
    """Where every tensor of a ResNet goes."""
    places = _conv("conv1", ("stem", "conv"), 3, c.channels, 7 if c.stem == "imagenet" else 3)
    places |= _norm("bn1", ("stem", "norm"), c.channels)
    inputs = c.channels
    for stage, blocks in enumerate(c.stages):
        outputs = c.channels * 2**stage
        for i in range(blocks):
            theirs, ours = f"layer{stage + 1}.{i}", f"stage_{stage}_block_{i}"
            places |= _conv(f"{theirs}.conv1", (ours, "conv1"), inputs, outputs, 3)
            places |= _conv(f"{theirs}.conv2", (ours, "conv2"), outputs, outputs, 3)
            for norm in ("1", "2"):
                places |= _norm(f"{theirs}.bn{norm}", (ours, f"norm{norm}"), outputs)
            if inputs != outputs:
                places |= _conv(f"{theirs}.downsample.0", (ours, "down"), inputs, outputs, 1)
                places |= _norm(f"{theirs}.downsample.1", (ours, "down_norm"), outputs)
            inputs = outputs
    return places


def _densenet(c: DenseNetConfig) -> dict[str, _Place]:
    """Where every tensor of a DenseNet goes."""
    places = _conv("features.conv0", ("stem", "conv"), 3, c.channels, 7 if c.stem == "imagenet" else 3)
    places |= _norm("features.norm0", ("stem", "norm"), c.channels)
    width = c.channels
    for block, layers in enumerate(c.blocks):
        for i in range(layers):
            theirs = f"features.denseblock{block + 1}.denselayer{i + 1}"
            ours = f"block_{block}_layer_{i:02d}"
            places |= _norm(f"{theirs}.norm1", (ours, "norm1"), width)
            places |= _conv(f"{theirs}.conv1", (ours, "conv1"), width, 4 * c.growth, 1)
            places |= _norm(f"{theirs}.norm2", (ours, "norm2"), 4 * c.growth)
            places |= _conv(f"{theirs}.conv2", (ours, "conv2"), 4 * c.growth, c.growth, 3)
            width += c.growth
        if block < len(c.blocks) - 1:
            theirs, ours = f"features.transition{block + 1}", f"transition_{block}"
            places |= _norm(f"{theirs}.norm", (ours, "norm"), width)
            places |= _conv(f"{theirs}.conv", (ours, "conv"), width, width // 2, 1)
            width //= 2
    return places | _norm("features.norm5", ("norm",), width)


def _check(tensors: Tensors, places: dict[str, _Place], besides: set[str], name: str) -> None:
    missing, unexpected = sorted(places.keys() - tensors.keys()), tensors.keys() - places.keys() - besides
    if missing:
        raise InputError(f"checkpoint: does not fit {name}: {missing[0]} is missing ({len(missing)} in all)")
    if unexpected:
        raise InputError(f"checkpoint: does not fit {name}: it has no place for {min(unexpected)}")
    for key, place in places.items():
        if tensors[key].shape != place.shape:
            raise InputError(
                f"checkpoint: does not fit {name}: {key} is {tensors[key].shape}, needs {place.shape}"
            )
        if not (np.issubdtype(tensors[key].dtype, np.floating) and np.isfinite(tensors[key]).all()):
            raise InputError(f"checkpoint: {key} holds values that are no finite numbers")


def _head(tensors: Tensors, width: int) -> PyTree | None:
    """The classifier, if its weight and its bias are there and fit."""
    named = {key.rpartition(".")[2]: x.astype(np.float32) for key, x in tensors.items()}
    if set(named) != {"weight", "bias"} or named["weight"].shape != (named["bias"].size, width):
        return None
    return {"kernel": named["weight"].T, "bias": named["bias"]}
