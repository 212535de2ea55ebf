"""Checks of functions that a user writes: each mistake is one line that names the part,
the function and its place in the user's file."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from fcljax.errors import InputError
from fcljax.federated.check import describe


def check_arguments(part: str, **functions: tuple[Callable | None, int]) -> None:
    """Check that functions can be called with as many arguments as they will get.

    Args:
      part: what they belong to, for the message.
      functions: field -> (function or None, number of arguments).

    Raises:
      InputError: naming the part, the field, the function and what it takes.
    """
    for field, (function, count) in functions.items():
        if function is None:
            continue
        if not callable(function):
            raise InputError(f"{field}: {part} has {function!r}; expected a function")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of builtins nothing is known
            continue
        try:
            signature.bind(*[None] * count)
        except TypeError:
            raise InputError(
                f"{field}: {part} gets {count} arguments, and {describe(function)} takes {signature}"
            ) from None


@contextlib.contextmanager
def reading(
    part: str,
    function: Callable,
    there: Mapping[str, Any],
    missing: str,
) -> Iterator[None]:
    """Run a function that reads from a dict by name.

    Args:
      part: what the function belongs to, for the message.
      function: what runs.
      there: what it may read.
      missing: what is wrong with any other name, such as "which no server rule sends".

    Raises:
      InputError: naming the part, the function and the name that is not there.
    """
    try:
        yield
    except KeyError as error:
        name = None
        if error.args:
            name = error.args[0]
        if not isinstance(name, str) or name in there:
            raise
        raise InputError(f"{part}: {describe(function)} reads {name!r}, {missing}") from error


def check_scalar(part: str, function: Callable, value: Any) -> Array | float:
    """`value` if it is one number.

    Raises:
      InputError: naming the part, the function and the shape that it returned.
    """
    shape = np.shape(value) if isinstance(value, int | float) else getattr(value, "shape", None)
    if shape != ():
        said = f"shape {shape}" if shape is not None else type(value).__name__
        raise InputError(f"{part}: {describe(function)} returned {said}; expected a scalar")
    return value


def check_like(part: str, function: Callable, value: PyTree, like: PyTree) -> PyTree:
    """`value` if it has the structure and shapes of `like`.

    Raises:
      InputError: naming the part, the function, what it returned and what is needed.
    """
    got = jax.tree.structure(value)
    wanted = jax.tree.structure(like)
    shapes = (
        [np.shape(leaf) for leaf in jax.tree.leaves(value)],
        [np.shape(leaf) for leaf in jax.tree.leaves(like)],
    )
    if got != wanted or shapes[0] != shapes[1]:
        raise InputError(
            f"{part}: {describe(function)} returned {_described(value)}; expected {_described(like)}"
        )
    return value


def _described(tree: PyTree) -> str:
    shapes = jax.tree.map(
        lambda leaf: f"{np.asarray(leaf).dtype if np.isscalar(leaf) else leaf.dtype}{list(np.shape(leaf))}",
        tree,
    )
    return str(shapes).replace("'", "")
