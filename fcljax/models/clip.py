"""CLIP (Radford et al. 2021): a text tower beside the network of images, and one space for
the features of both.

    t_c = W_t text(prompt of class c)
    logit_c(x) = s cos(W_i image(x), t_c)

Learned context vectors (CoOp, Zhou et al. 2022) stand between a prompt's start token and
the rest of it.
"""

import re
import unicodedata
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from fcljax.models.heads import unit
from fcljax.models.products import exact_matmul
from fcljax.models.shapes import TextConfig
from fcljax.models.text import apply_text
from fcljax.models.vit import Injection
from fcljax.types import TextTower

# a word, a number, or one other character, in text that is lower-case already
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")
LEAST_NORM = 1e-12  # shorter features are not scaled up to length 1


class ClassTexts(NamedTuple):
    """The frozen text tower and the prompts of a run's classes (`Frozen.text`)."""

    tower: PyTree
    """Parameters of the text tower."""
    text_projection: Float[Array, "token_width E"]
    """W_t."""
    image_projection: Float[Array, "width E"]
    """W_i."""
    scale: Float[Array, ""]
    """s, the exponential of CLIP's logit_scale."""
    ids: Int[Array, "C L"]
    """Tokens of the classes' prompts, without context vectors."""
    mask: Bool[Array, "C L"]
    """False for padding."""
    features: Float[Array, "C E"]
    """t_c of these prompts."""

    @property
    def rows(self) -> Float[Array, "C E"]:
        """Return t_c, scaled to length 1."""
        return unit(self.features, LEAST_NORM)


def text_tower(config: TextConfig, joint: int) -> TextTower:
    """Make the text side of a network.

    Args:
      config: static shape of the tower.
      joint: E, the width of the space of both features.
    """

    def features(texts: ClassTexts, context: Float[Array, "M token_width"] | None) -> Float[Array, "C E"]:
        text = {"ids": texts.ids, "mask": texts.mask}
        feature = apply_text(config, texts.tower, text, Injection(context=context)).cls
        return exact_matmul(feature, texts.text_projection)

    return TextTower(features, config.width, joint)


def with_features(config: TextConfig, texts: ClassTexts) -> ClassTexts:
    """Return texts with the features t_c of their prompts."""
    features = text_tower(config, texts.text_projection.shape[1]).features
    return texts._replace(features=jax.jit(features)(texts, None))


def image_features(texts: ClassTexts, feature: Float[Array, "batch width"]) -> Float[Array, "batch E"]:
    """Return the image features in the space of both, of length 1."""
    return unit(exact_matmul(feature, texts.image_projection), LEAST_NORM)


# ---- the tokens of the packaged tower ------------------------------------------------------


def packaged_tokens(config: TextConfig, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of prompts as the packaged text tower reads them.

    A token is a word, a number or a sign, and its id a hash. A letter beyond ASCII is
    written by its Unicode name. The start token has the highest id but one, the end token
    the highest.
    """
    # the end token has the highest id, by which the tower finds it (`text.pooled`)
    start = config.vocabulary - 2
    end = config.vocabulary - 1

    def tokens(prompt: str) -> list[int]:
        words = _WORD.findall("".join(map(_spelled, prompt)).lower())
        return [start, *(1 + zlib.crc32(word.encode()) % (start - 1) for word in words), end]

    return list(map(tokens, prompts))


def _spelled(character: str) -> str:
    """Return a character, or the Unicode name of one beyond ASCII."""
    # letters of other scripts: "armenian capital letter gim" shares words with its
    # neighbours
    if character.isascii():
        return character
    return f" {unicodedata.name(character, character)} "


def padded(tokens: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the ids and the mask of token lists, [C, L] each, with the length of the longest."""
    ids = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
    mask = np.zeros(ids.shape, bool)
    for row, numbers in enumerate(tokens):
        ids[row, : len(numbers)] = numbers
        mask[row, : len(numbers)] = True
    return {"ids": ids, "mask": mask}
