"""The networks by name, and from a static shape to a `Network`."""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from fcljax.errors import InputError
from fcljax.models.convnet import Colour
from fcljax.models.convnext import ConvNeXtConfig, convnext_network
from fcljax.models.densenet import DenseNetConfig, densenet_network
from fcljax.models.own import OwnConfig, own_network
from fcljax.models.resnet import ResNetConfig, resnet_network
from fcljax.models.shapes import CONVNETS, OF_A_RUN, VITS
from fcljax.models.vit import ViTConfig, vit_network
from fcljax.types import Autoencoder, Network

ConvNetConfig: TypeAlias = ResNetConfig | DenseNetConfig | ConvNeXtConfig
NetworkConfig: TypeAlias = ViTConfig | ConvNetConfig | OwnConfig


def make_network(
    config: NetworkConfig,
    mean: Colour,
    std: Colour,
    autoencoder: Autoencoder | None = None,
    remat: bool = False,
) -> Network:
    """A network as methods see it.

    Args:
      config: its static shape.
      mean, std: pixel constants of the images that it is given.
      autoencoder: around the same one, where there is a decoder.
      remat: for gradients, keep what enters each block and compute the rest again.

    Raises:
      InputError: for `remat` in a network without attention blocks.
    """
    if remat and not isinstance(config, ViTConfig):
        raise InputError("remat: only the blocks of a ViT are computed again; leave out --remat")
    if isinstance(config, OwnConfig):
        return own_network(config, mean, std)
    if isinstance(config, ResNetConfig):
        return resnet_network(config, mean, std)
    if isinstance(config, DenseNetConfig):
        return densenet_network(config, mean, std)
    if isinstance(config, ConvNeXtConfig):
        return convnext_network(config, mean, std)
    return vit_network(config, mean, std, autoencoder, remat)


def network_name(config: NetworkConfig) -> str:
    """The name of a network of this shape, whatever its images and its compute type; its shape in words if it
    has none."""
    if isinstance(config, OwnConfig):
        return config.name
    tables: tuple[Mapping[str, NetworkConfig], ...] = (VITS, CONVNETS)
    known = (name for table in tables for name, each in table.items() if _body(each) == _body(config))
    return next(known, _in_words(config))


def _body(config: NetworkConfig) -> dict[str, object]:
    """The shape that a name stands for."""
    free = ("image_size", "stem", "epsilon", "final_norm", *OF_A_RUN)
    fields = {key: value for key, value in dataclasses.asdict(config).items() if key not in free}
    return fields | {"kind": type(config)}


def _in_words(config: ViTConfig | ConvNetConfig) -> str:
    if isinstance(config, ViTConfig):
        return (
            f"vit of width {config.width}, depth {config.depth}, {config.heads} heads, patch {config.patch}"
        )
    if isinstance(config, ResNetConfig):
        kind = "bottlenecks" if config.bottleneck else "blocks"
        return f"resnet of {_listed(config.stages)} {kind}, {config.channels} channels"
    if isinstance(config, ConvNeXtConfig):
        return f"convnext of {_listed(config.depths)} blocks, {_listed(config.widths)} channels"
    return f"densenet of {_listed(config.blocks)} layers, {config.channels} channels, growth {config.growth}"


def _listed(numbers: tuple[int, ...]) -> str:
    return "-".join(map(str, numbers))
