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
        except (TypeError, ValueError):
            # builtins have no signature to check
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
    available: Mapping[str, Any],
    missing: str,
) -> Iterator[None]:
    """Run a function that reads from a dict by name.

    Args:
      part: the owner of the function, for the message.
      function: the function that runs.
      available: the dict.
      missing: what is wrong with any other name, such as "which no server rule sends".

    Raises:
      InputError: naming the part, the function and the name that the dict does not have.
    """
    try:
        yield
    except KeyError as error:
        name = None
        if error.args:
            name = error.args[0]
        # a KeyError of the user's own dict stays what it is
        if not isinstance(name, str) or name in available:
            raise
        raise InputError(f"{part}: {describe(function)} reads {name!r}, {missing}") from error


def check_scalar(part: str, function: Callable, value: Any) -> Array | float:
    """Return `value` if it is one number.

    Raises:
      InputError: naming the part, the function and the shape that it returned.
    """
    shape = np.shape(value) if isinstance(value, int | float) else getattr(value, "shape", None)
    if shape != ():
        returned = f"shape {shape}" if shape is not None else type(value).__name__
        raise InputError(f"{part}: {describe(function)} returned {returned}; expected a scalar")
    return value


def check_like(part: str, function: Callable, value: PyTree, like: PyTree) -> PyTree:
    """Return `value` if it has the structure and shapes of `like`.

    Raises:
      InputError: naming the part, the function, what it returned and what is needed.
    """
    returned = jax.tree.structure(value)
    expected = jax.tree.structure(like)
    shapes = (
        [np.shape(leaf) for leaf in jax.tree.leaves(value)],
        [np.shape(leaf) for leaf in jax.tree.leaves(like)],
    )
    if returned != expected or shapes[0] != shapes[1]:
        raise InputError(
            f"{part}: {describe(function)} returned {_described(value)}; expected {_described(like)}"
        )
    return value


def _described(tree: PyTree) -> str:
    def type_of(leaf: Any) -> str:
        # Python numbers have no dtype until numpy gives them one
        dtype = np.asarray(leaf).dtype if np.isscalar(leaf) else leaf.dtype
        return f"{dtype}{list(np.shape(leaf))}"

    return str(jax.tree.map(type_of, tree)).replace("'", "")
