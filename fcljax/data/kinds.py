"""The kinds of data besides images: arrays of any shape, and text as tokens.

A kind is static: it says how stored examples become a network's input, inside jit, and
what a user may give in place of a stored example. Images have `augment.Preprocess` in its
place, since their views depend on the network.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import PyTree

PADDING = 0  # the id of padding; words have ids from 1
# a word, a number, or one other character, in text that is lower-case already
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")


@dataclasses.dataclass(frozen=True)
class ArrayData:
    """Examples that are arrays of any shape, or pytrees of arrays: tables, series, spectra."""

    word: ClassVar[str] = "arrays"

    mean: tuple[float, ...] = ()
    """Subtracted from the last axis [C] of the one array; (): nothing is, as for pytrees."""
    std: tuple[float, ...] = ()
    """Divisor after the subtraction."""

    def read(self, stored: PyTree) -> PyTree:
        """Return the network's input of a batch of stored examples."""
        if not self.mean:
            return stored
        mean = np.array(self.mean, np.float32)
        std = np.array(self.std, np.float32)
        return (stored.astype(np.float32) - mean) / std

    def standardised(self, x_train: np.ndarray) -> ArrayData:
        """Return the kind with the mean and standard deviation of training examples [N,
        ..., C]. A column that never changes has the divisor 1."""
        # in float64: sums over a large table in float32 lose their last digits
        x = np.asarray(x_train, np.float64).reshape(-1, x_train.shape[-1])
        deviation = x.std(0)
        std = np.where(deviation > 0, deviation, 1.0)
        return dataclasses.replace(self, mean=tuple(x.mean(0).tolist()), std=tuple(std.tolist()))


@dataclasses.dataclass(frozen=True)
class TextData:
    """Text as {"ids": int32 [L], "mask": bool [L]}, by a tokenizer without a file.

    A token is a word of lower-case letters, a number, or any other character that is no
    space. Its id is 1 + crc32(token) mod (vocabulary - 1): no list of words is needed,
    and some words share an id.
    """

    word: ClassVar[str] = "text"

    vocabulary: int = 4096
    """Number of ids, padding's 0 included."""
    length: int = 64
    """L, the tokens of an example; longer texts are cut off, and shorter ones padded."""

    def read(self, stored: PyTree) -> PyTree:
        """Return the network's input of a batch of stored examples."""
        return stored

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the ids and the mask of texts, [N, L] each."""
        ids = np.full((len(texts), self.length), PADDING, np.int32)
        for row, text in zip(ids, texts, strict=True):
            # crc32 and not `hash`, which differs from process to process
            tokens = _WORD.findall(text.lower())[: self.length]
            row[: len(tokens)] = [1 + zlib.crc32(token.encode()) % (self.vocabulary - 1) for token in tokens]
        return {"ids": ids, "mask": ids != PADDING}


Kind = ArrayData | TextData


def are_tokens(examples: PyTree) -> bool:
    """Check whether examples are texts as a text encoder reads them."""
    return isinstance(examples, dict) and "ids" in examples


def longest_text(tokens: Mapping[str, np.ndarray]) -> int:
    """Return the number of tokens of the longest text, at least 1; padding follows a text."""
    is_read = tokens["mask"].any(axis=0)
    return int(np.flatnonzero(is_read).max(initial=0)) + 1


def with_length(tokens: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Return texts [N, L] with padding removed or added, so that L is `length`, which is not
    below `longest_text`."""

    def changed(name: str, array: np.ndarray) -> np.ndarray:
        fill = PADDING if name == "ids" else 0
        missing = max(length - array.shape[1], 0)
        return np.pad(array[:, :length], [(0, 0), (0, missing)], constant_values=fill)

    return {name: changed(name, array) for name, array in tokens.items()}


def leaves(examples: PyTree) -> list[Any]:
    """Return the arrays of examples."""
    # imported in the functions that need it: whoever needs only the kinds does without JAX
    import jax

    return jax.tree.leaves(examples)


def named_leaves(examples: PyTree, name: str = "") -> dict[str, Any]:
    """Return the arrays of examples by name and place, such as x['ids']; lists are arrays too."""
    import jax

    flat, _ = jax.tree.flatten_with_path(examples, is_leaf=lambda value: isinstance(value, list))
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in flat}


def with_leaves(examples: PyTree, arrays: Sequence[Any]) -> PyTree:
    """Return these arrays in the structure of examples."""
    import jax

    return jax.tree.unflatten(
        jax.tree.structure(examples, is_leaf=lambda value: isinstance(value, list)), arrays
    )


def tree_bytes(examples: PyTree) -> int:
    """Return the bytes of all arrays."""
    return sum(leaf.nbytes for leaf in leaves(examples))


def tree_length(examples: PyTree) -> int:
    """Return the number of examples."""
    return len(leaves(examples)[0])


def take(examples: PyTree, index: Any) -> PyTree:
    """Return these examples."""
    import jax

    return jax.tree.map(lambda array: array[index], examples)


def described(examples: PyTree) -> str:
    """Return the shape and type of an example, in words."""
    return ", ".join(
        f"{place} {array.dtype} {list(array.shape[1:])}".strip()
        for place, array in named_leaves(examples).items()
    )
