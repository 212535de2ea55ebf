"""Make a `Network` from its static shape, and name that shape."""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fcljax.errors import InputError
from fcljax.models.convnet import Colour
from fcljax.models.convnext import ConvNeXtConfig, convnext_network
from fcljax.models.dense import array_network
from fcljax.models.densenet import DenseNetConfig, densenet_network
from fcljax.models.own import OwnConfig, own_network
from fcljax.models.resnet import ResNetConfig, resnet_network
from fcljax.models.shapes import CONVNETS, OF_A_RUN, TEXT_ENCODERS, VITS, ArrayNetConfig, TextConfig
from fcljax.models.text import example_of_text, text_network
from fcljax.models.vit import ViTConfig, vit_network
from fcljax.types import Autoencoder, Network

ConvNetConfig: TypeAlias = ResNetConfig | DenseNetConfig | ConvNeXtConfig
NetworkConfig: TypeAlias = ViTConfig | ConvNetConfig | ArrayNetConfig | TextConfig | OwnConfig


def make_network(
    config: NetworkConfig,
    mean: Colour,
    std: Colour,
    autoencoder: Autoencoder | None = None,
    remat: bool = False,
) -> Network:
    """Make the network of a static shape.

    Args:
      config: the static shape.
      mean, std: constants by which its images were normalised.
      autoencoder: around the same network, if there is a decoder.
      remat: for gradients, store each block's input and recompute the rest.

    Raises:
      InputError: for `remat` in a network without attention blocks.
    """
    if remat and not isinstance(config, ViTConfig | TextConfig):
        raise InputError("remat: only attention blocks are recomputed; leave out --remat")
    if isinstance(config, OwnConfig):
        return own_network(config, mean, std)
    if isinstance(config, ArrayNetConfig):
        return array_network(config)
    if isinstance(config, TextConfig):
        return text_network(config, remat)
    if isinstance(config, ResNetConfig):
        return resnet_network(config, mean, std)
    if isinstance(config, DenseNetConfig):
        return densenet_network(config, mean, std)
    if isinstance(config, ConvNeXtConfig):
        return convnext_network(config, mean, std)
    return vit_network(config, mean, std, autoencoder, remat)


def example_of(config: NetworkConfig) -> PyTree:
    """Return the shapes and types of one example, as a network of this shape reads it."""
    if isinstance(config, OwnConfig):
        return config.example
    if isinstance(config, ArrayNetConfig):
        return jax.ShapeDtypeStruct(config.shape, jnp.float32)
    if isinstance(config, TextConfig):
        return example_of_text(config)
    return jax.ShapeDtypeStruct((config.image_size, config.image_size, 3), jnp.float32)


def reads_images(config: NetworkConfig) -> bool:
    """Check whether networks of this shape read images."""
    return config.image_size > 0


def network_name(config: NetworkConfig) -> str:
    """Return a shape's name, for example vit_b16, or else describe the shape.

    Image size and compute type are no part of it.
    """
    if isinstance(config, OwnConfig | ArrayNetConfig):
        return config.name
    if isinstance(config, TextConfig):
        blocks = {name: getattr(ViTConfig(), name) for name in OF_A_RUN}
        shape = dataclasses.replace(config, blocks=dataclasses.replace(config.blocks, **blocks))
        names = [name for name, known in TEXT_ENCODERS.items() if known == shape]
        return (*names, f"text encoder of width {config.width}, depth {config.blocks.depth}")[0]
    named: Mapping[str, NetworkConfig] = {**VITS, **CONVNETS}
    for name, named_config in named.items():
        if _body(named_config) == _body(config):
            return name
    return _description(config)


def _body(config: NetworkConfig) -> dict[str, object]:
    """Return the fields that a name stands for."""
    # a ViT-B/16 is one at any image size, and with another epsilon
    free = ("image_size", "stem", "epsilon", "final_norm", *OF_A_RUN)
    fields = {key: value for key, value in dataclasses.asdict(config).items() if key not in free}
    return fields | {"type": type(config)}


def _description(config: ViTConfig | ConvNetConfig) -> str:
    if isinstance(config, ViTConfig):
        return (
            f"vit of width {config.width}, depth {config.depth}, {config.heads} heads, patch {config.patch}"
        )
    if isinstance(config, ResNetConfig):
        blocks = "blocks"
        if config.bottleneck:
            blocks = "bottlenecks"
        return f"resnet of {_dashed(config.stages)} {blocks}, {config.channels} channels"
    if isinstance(config, ConvNeXtConfig):
        return f"convnext of {_dashed(config.depths)} blocks, {_dashed(config.widths)} channels"
    return f"densenet of {_dashed(config.blocks)} layers, {config.channels} channels, growth {config.growth}"


def _dashed(numbers: tuple[int, ...]) -> str:
    return "-".join(map(str, numbers))
