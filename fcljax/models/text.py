"""Text encoders whose blocks are the ViT's, so that adapters act inside their attention
as in a ViT's.

A token is an embedding of its id plus that of its position. One shape (`TextConfig`) is the packaged
encoder, BERT (Devlin et al. 2019), RoBERTa, DistilBERT, sentence-transformers, and CLIP's text tower
(Radford et al. 2021). Padding follows the text, and is read by nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.shapes import TextConfig
from fcljax.models.vit import Injection, Joins, embedding_norm, for_each_image, longest_output, run_blocks
from fcljax.types import Features, Network


class TextEncoder(nn.Module):
    """The whole network; see `apply_text`."""

    config: TextConfig
    remat: bool = False

    @nn.compact
    def __call__(self, text, injection=None, full=False):
        c = self.config
        blocks = c.blocks
        if injection is None:
            injection = Injection()
        text = jax.tree.map(jnp.asarray, text)
        # before the embedding: the tokens behind the context get later positions
        if injection.context is not None:
            text = _with_room(text, len(injection.context))
        cls = None
        if c.pooling == "learned":
            cls = self.param("cls", nn.initializers.normal(0.02), (c.width,))
        x, position = self._embedded(text, injection.context)
        mask = text["mask"]
        if cls is not None:
            x = jnp.concatenate([for_each_image((cls + position[0])[None], len(x)), x], axis=1)
            mask = jnp.pad(mask, [(0, 0), (1, 0)], constant_values=True)
        outputs = 1
        # as in a ViT, injected tokens follow the first one and get its position
        if injection.tokens is not None:
            tokens = for_each_image(injection.tokens + position[0], len(x))
            outputs += tokens.shape[1]
            x = jnp.concatenate([x[:, :1], tokens, x[:, 1:]], axis=1)
            read = jnp.ones(tokens.shape[:2], bool)
            mask = jnp.concatenate([mask[:, :1], read, mask[:, 1:]], axis=1)
        if blocks.pre_norm:
            x = embedding_norm(blocks)(x)
        x = x.astype(blocks.number_format.array)
        is_read = mask
        # for every query the same keys; causal, also only those before it
        mask = mask[:, None]
        if c.causal:
            mask = mask & jnp.tri(x.shape[1], dtype=bool)

        # a feature that is not the first token's needs the last block's other tokens
        whole = full or c.pooling in ("mean", "end")
        features = run_blocks(self, blocks, x, injection, outputs, Joins(mask=mask), whole, self.remat)
        # sums over tokens (`vit.attention_inputs`) leave out padding
        features = features._replace(taps=features.taps | {"is_read": is_read})
        if c.pooling in ("learned", "first"):
            return features
        assert features.tokens is not None  # `whole` asks for them
        tokens = jnp.concatenate([features.tokens[:, :1], features.tokens[:, outputs:]], axis=1)
        return features._replace(cls=pooled(c, tokens, text["ids"], text["mask"]))

    def _embedded(self, text, context):
        """Return the tokens [batch, length, width], and the embeddings of all positions.

        `context` stands in place of the tokens behind the first one."""
        c = self.config
        normal = nn.initializers.normal(0.02)
        positions = c.length
        if c.pooling == "learned":
            positions += 1
        position = self.param("pos", normal, (positions, c.width))
        embedding = self.param("embed", normal, (c.vocabulary, c.width))
        # the learned class token has position 0, and the text the ones behind it
        words = position[positions - c.length :]
        x = embedding[text["ids"]]
        if context is not None:
            x = x.at[:, 1 : 1 + len(context)].set(context)
        x = x + words[: x.shape[1]]
        if c.types:
            types = self.param("types", normal, (c.types, c.width))
            x = x + types[text.get("types", 0)]
        return x, position


def _with_room(text: PyTree, length: int) -> PyTree:
    """Return texts with so many tokens of id 0 behind the first one, which are read."""

    def widened(name: str, array: Array) -> Array:
        room = jnp.full((len(array), length), name == "mask", array.dtype)
        return jnp.concatenate([array[:, :1], room, array[:, 1:]], axis=1)

    return {name: widened(name, array) for name, array in text.items()}


def pooled(
    config: TextConfig,
    tokens: Float[Array, "batch length width"],
    ids: Int[Array, "batch length"],
    mask: Bool[Array, "batch length"],
) -> Float[Array, "batch width"]:
    """Return the mean over the tokens in the mask, or the end token's output."""
    if config.pooling == "mean":
        total = jnp.sum(jnp.where(mask[..., None], tokens, 0.0), axis=1)
        return total / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    # argmax takes the first of several, because CLIP pads texts with its end token
    score = jnp.where(mask, ids, -1) if config.end is None else ids == config.end
    end = jnp.argmax(score, axis=1)
    return jnp.take_along_axis(tokens, end[:, None, None], axis=1)[:, 0]


def example_of_text(config: TextConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and types of one text: its ids, and a mask that is False for
    padding."""
    return {
        "ids": jax.ShapeDtypeStruct((config.length,), jnp.int32),
        "mask": jax.ShapeDtypeStruct((config.length,), jnp.bool_),
    }


def init_text(key: PRNGKeyArray, config: TextConfig) -> PyTree:
    """Draw the parameters, float32: {embed, pos, block_00.., norm}, and cls, types and norm_pre of
    encoders that have them."""
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
      text: {"ids": int [batch, tokens], "mask": bool [batch, tokens]}; also "types", of the ids' shape,
        where the encoder has types of tokens. Without it all are of type 0.
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

    longest = longest_output(config.blocks)
    return Network(init, apply, config.width, config.blocks.depth, longest=longest)


def check_text(where: str, examples: Any, config: TextConfig) -> None:
    """Check that examples are texts that an encoder can read.

    Raises:
      InputError: for another structure or shape, and for ids beyond the vocabulary.
    """
    arrays = {"ids", "mask"} | ({"types"} if config.types else set())
    if not isinstance(examples, dict) or not {"ids", "mask"} <= set(examples) <= arrays:
        raise InputError(
            f"{where}: a text encoder reads a list of texts, or a dict of ids [N, L] and mask [N, L]"
        )
    ids = examples["ids"]
    mask = examples["mask"]
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.shape[1] > config.length:
        raise InputError(
            f"{where}: ids are {ids.dtype} of shape {ids.shape}; expected integers [N, L] with L up to "
            f"{config.length}"
        )
    if mask.shape != ids.shape or mask.dtype != np.bool_:
        raise InputError(
            f"{where}: mask is {mask.dtype} of shape {mask.shape}; expected bool {list(ids.shape)}, of ids"
        )
    _check_below(where, "id", ids, config.vocabulary, "the vocabulary")
    types = examples.get("types")
    if types is None:
        return
    if types.shape != ids.shape or types.dtype.kind not in "iu":
        raise InputError(
            f"{where}: types are {types.dtype} of shape {types.shape}; expected integers {list(ids.shape)}"
        )
    _check_below(where, "type", types, config.types, "the number")


def _check_below(where: str, noun: str, values: np.ndarray, limit: int, of: str) -> None:
    """Check that integers are in [0, limit).

    Raises:
      InputError: naming the one farthest outside.
    """
    if values.min() < 0 or values.max() >= limit:
        worst = values.max() if values.max() >= limit else values.min()
        raise InputError(f"{where}: {noun} {worst} is not below {of} of {limit}")
