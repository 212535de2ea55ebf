"""A text encoder whose blocks are the ViT's, so that adapters act inside its attention
as in a ViT's.

A token is an embedding of its id plus that of its position; the class token, before all
others, is the feature. Padding is read by nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.shapes import TextConfig
from fcljax.models.vit import Injection, Joins, for_each_image, run_blocks
from fcljax.types import Features, Network


class TextEncoder(nn.Module):
    """The whole network; see `apply_text`."""

    config: TextConfig
    remat: bool = False

    @nn.compact
    def __call__(self, text, injection=None, full=False):
        c = self.config.blocks
        if injection is None:
            injection = Injection()
        ids = text["ids"]
        batch, length = ids.shape
        normal = nn.initializers.normal(0.02)
        cls = self.param("cls", normal, (c.width,))
        position = self.param("pos", normal, (1 + self.config.length, c.width))
        embedding = self.param("embed", normal, (self.config.vocabulary, c.width))
        x = embedding[ids] + position[1 : 1 + length]

        # order of tokens, as in a ViT: class token, injected tokens, words
        lead = [for_each_image((cls + position[0])[None], batch)]
        if injection.tokens is not None:
            lead.append(for_each_image(injection.tokens + position[0], batch))
        outputs = sum(tokens.shape[1] for tokens in lead)
        x = jnp.concatenate([*lead, x], axis=1).astype(c.number_format.array)
        mask = jnp.pad(text["mask"], [(0, 0), (outputs, 0)], constant_values=True)
        return run_blocks(self, c, x, injection, outputs, Joins(mask=mask), full, self.remat)


def example_of_text(config: TextConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and types of one text: its ids, and a mask that is False for
    padding."""
    return {
        "ids": jax.ShapeDtypeStruct((config.length,), jnp.int32),
        "mask": jax.ShapeDtypeStruct((config.length,), jnp.bool_),
    }


def init_text(key: PRNGKeyArray, config: TextConfig) -> PyTree:
    """Draw the parameters, float32: {embed, cls, pos, block_00.., norm}."""
    one = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), example_of_text(config))
    return jax.jit(lambda key: TextEncoder(config).init(key, one, full=True)["params"])(key)


def apply_text(
    config: TextConfig,
    params: PyTree,
    text: PyTree,
    injection: Injection | None = None,
    full: bool = False,
    remat: bool = False,
) -> Features:
    """Compute the features of texts.

    Args:
      config: the static shape.
      params: as from `init_text`.
      text: {"ids": int [batch, tokens], "mask": bool [batch, tokens]}.
      injection, full, remat: as of `vit.apply_vit`.
    """
    # pyrefly: ignore[bad-return]  # a pair only where variables may change
    return TextEncoder(config, remat).apply({"params": params}, text, injection, full)


def text_network(config: TextConfig, remat: bool = False) -> Network:
    """Make the `Network` of a text encoder."""

    def init(key: PRNGKeyArray) -> PyTree:
        return init_text(key, config)

    # no layer depends on training or on other examples
    def apply(params, text, injection, _train, _mask=None):
        return apply_text(config, params, text, injection, remat=remat), params

    return Network(init, apply, config.width, config.blocks.depth)


def check_text(where: str, examples: Any, config: TextConfig) -> None:
    """Check that examples are texts that an encoder can read.

    Raises:
      InputError: for another structure or shape, and for ids beyond the vocabulary.
    """
    if not isinstance(examples, dict) or set(examples) != {"ids", "mask"}:
        raise InputError(
            f"{where}: a text encoder reads a list of texts, or a dict of ids [N, L] and mask [N, L]"
        )
    ids, mask = examples["ids"], examples["mask"]
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.shape[1] > config.length:
        raise InputError(
            f"{where}: ids are {ids.dtype} of shape {ids.shape}; expected integers [N, L] with L up to "
            f"{config.length}"
        )
    if mask.shape != ids.shape or mask.dtype != np.bool_:
        raise InputError(
            f"{where}: mask is {mask.dtype} of shape {mask.shape}; expected bool {list(ids.shape)}, of ids"
        )
    if ids.min() < 0 or ids.max() >= config.vocabulary:
        worst = ids.max() if ids.max() >= config.vocabulary else ids.min()
        raise InputError(f"{where}: id {worst} is not below the vocabulary of {config.vocabulary}")
