"""Random examples on which `fcljax check` tests a method, and the tiny networks that read
them: images by default; tables, series or texts where the settings name such data.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fcljax.config import RunConfig, has_attention
from fcljax.data.files.names import has_arrays
from fcljax.models.clip import ClassTexts, padded, text_tower, with_features
from fcljax.models.dense import array_network, init_array_net
from fcljax.models.mae import DecoderConfig, autoencoder, init_decoder
from fcljax.models.shapes import ArrayNetConfig, TextConfig
from fcljax.models.text import init_text, text_network
from fcljax.models.vit import ViTConfig, init_vit, vit_network
from fcljax.types import Frozen, Network

COUNT = 60  # examples
CLASSES = 5
TINY = ViTConfig(image_size=8, patch=4, width=16, depth=6, heads=2, mlp=32)
DECODER = DecoderConfig(image_size=8, patch=4, encoder_width=16, width=8, depth=2, heads=2, mlp=16)
TOWER = TextConfig(
    vocabulary=20,
    length=24,
    blocks=ViTConfig(width=8, depth=1, heads=2, mlp=16),
    pooling="end",
    causal=True,
)
JOINT = 6  # width of the space of texts and images
ENCODER = TextConfig(vocabulary=20, length=8, blocks=ViTConfig(width=16, depth=6, heads=2, mlp=32))
TABLE = ArrayNetConfig("mlp", (6,), (16, 16))
SERIES = ArrayNetConfig("conv1d", (8, 3), (16, 16))


class TinyData(NamedTuple):
    """Random examples, and the network that reads them."""

    examples: PyTree
    """Arrays [60, ...]."""
    network: Network
    frozen: Frozen
    """Its random parameters, and what methods ask for beside them."""


def tiny_data(settings: RunConfig) -> TinyData:
    """Return examples of the kind that the settings' data set and network have."""
    return DATA[kind_of(settings)]()


def kind_of(settings: RunConfig) -> str:
    """Return the kind of the data: a name in `DATA`."""
    if settings.backbone == "conv1d":
        return "series"
    if not has_arrays(settings.dataset, settings.backbone):
        return "images"
    if has_attention({"dataset": settings.dataset, "backbone": settings.backbone}):
        return "texts"
    return "tables"


def images(vit: ViTConfig = TINY) -> TinyData:
    """Return noise of 8 x 8 pixels, and images of another data set in `frozen.surrogate`."""
    rng = np.random.default_rng(0)
    image = jnp.asarray(rng.normal(size=(COUNT, 8, 8, 3)), jnp.float32)
    surrogate = jnp.asarray(rng.integers(0, 256, (12, 8, 8, 3)), jnp.uint8)
    return TinyData(image, network(vit), frozen_parameters(vit, surrogate))


def texts() -> TinyData:
    """Return texts of two to eight tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, ENCODER.length + 1, COUNT)
    mask = np.arange(ENCODER.length) < lengths[:, None]
    ids = np.where(mask, rng.integers(1, ENCODER.vocabulary, mask.shape), 0)
    examples = {"ids": jnp.asarray(ids, jnp.int32), "mask": jnp.asarray(mask)}
    params = init_text(jax.random.key(1), ENCODER)
    return TinyData(examples, text_network(ENCODER), Frozen(params))


def arrays(config: ArrayNetConfig) -> TinyData:
    """Return arrays of noise."""
    noise = np.random.default_rng(0).normal(size=(COUNT, *config.shape))
    params = init_array_net(jax.random.key(1), config)
    return TinyData(jnp.asarray(noise, jnp.float32), array_network(config), Frozen(params))


def tables() -> TinyData:
    """Return rows of six columns."""
    return arrays(TABLE)


def series() -> TinyData:
    """Return eight steps of three channels."""
    return arrays(SERIES)


DATA: dict[str, Callable[[], TinyData]] = {
    "images": images,
    "tables": tables,
    "series": series,
    "texts": texts,
}


# ---- images ----------------------------------------------------------------------------


def network(vit: ViTConfig) -> Network:
    """Return a ViT for images of 8 pixels, with an autoencoder of another pixel range and a
    text side."""
    # other pixel ranges, so that a method that forgets to convert between them fails
    pair = autoencoder(vit, dataclasses.replace(DECODER, encoder_width=vit.width), (0.5,) * 3, (0.25,) * 3)
    return vit_network(vit, autoencoder=pair)._replace(text=text_tower(TOWER, JOINT))


def frozen_parameters(vit: ViTConfig, surrogate: Array) -> Frozen:
    """Return random parameters of `network`, images of another data set, and texts."""
    decoder = init_decoder(jax.random.key(4), dataclasses.replace(DECODER, encoder_width=vit.width))
    return Frozen(init_vit(jax.random.key(1), vit), decoder, surrogate, text=class_texts(vit))


def class_texts(vit: ViTConfig) -> ClassTexts:
    """Return a random text side of `network`, with names of one to three tokens."""
    keys = jax.random.split(jax.random.key(5), 4)
    tokens = padded([[18, *range(3, 4 + i % 3), 4 + i, 19] for i in range(CLASSES)])
    text_projection = jax.random.normal(keys[0], (TOWER.width, JOINT))
    image_projection = jax.random.normal(keys[1], (vit.width, JOINT))
    texts = ClassTexts(
        # larger than the usual initial values, with which the features of all names are
        # nearly equal
        jax.tree.map(lambda x: 3 * x, init_text(keys[2], TOWER)),
        text_projection,
        image_projection,
        jnp.float32(10.0),
        jnp.asarray(tokens["ids"]),
        jnp.asarray(tokens["mask"]),
        jnp.zeros((CLASSES, JOINT)),
    )
    return with_features(TOWER, texts)
