"""Checks of the arguments of `local_sgd`, `fedavg` and `simulate`: each mistake is one
line."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from fcljax.choices import CHOICES, options_of, with_options
from fcljax.data.files.arrays import is_masked, is_mixed
from fcljax.errors import InputError, nearest, reason
from fcljax.options import check_read
from fcljax.settings import MOST_ROUNDS, AggregationOptions

# most entries of the matrix of class counts [clients, classes]: 256 MiB of int32. Larger
# integers in y are not class numbers, but other targets
MOST_COUNTED = 1 << 26


class OwnedExamples(NamedTuple):
    """The examples of a simulation."""

    x: Any
    """A pytree of arrays [N, ...]."""
    y: np.ndarray
    """Labels or targets [N, ...]."""
    names: np.ndarray
    """Names of the clients [K], sorted."""
    client: Int[np.ndarray, " N"]
    """The client of each example, an index into `names`."""
    classes: int
    """One more than the largest label; 1 where y are other targets than class numbers."""


def check_whole(field: str, value: object, least: int, most: int = MOST_ROUNDS) -> int:
    """Return `value` if it is a whole number in a range.

    Raises:
      InputError: naming the field, the value and the nearest valid one.
    """
    # True is an int in Python
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{field}: {_shown(value)} is not a whole number; such as {least}")
    if not least <= value <= most:
        raise InputError(f"{field}: {_shown(value)}; nearest valid value: {least if value < least else most}")
    return int(value)


def check_participation(value: object, clients: int) -> float:
    """Return a fraction of the clients, or a number of them.

    Raises:
      InputError: for anything else.
    """
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    # NaN, infinity and integers too large for a float become 0, which is refused below
    share = float(value) if number and abs(value) < 1e9 else 0.0  # pyrefly: ignore[bad-argument-type]
    # above 1 it is a number of clients, which has no fraction
    if not 0 < share <= max(1, clients) or (share > 1 and share % 1):
        raise InputError(
            f"participation: {_shown(value)}; expected a fraction of the clients in (0, 1], or a number "
            f"of clients up to {clients}"
        )
    return share


def check_optimiser(optimiser: object) -> None:
    """Check that an optimiser is one of optax.

    Raises:
      InputError: naming what it is.
    """
    # by its methods and not its class: users write their own transformations
    if not (callable(getattr(optimiser, "init", None)) and callable(getattr(optimiser, "update", None))):
        raise InputError(f"optimiser: {_shown(optimiser)} is not an optax optimiser; nearest: optax.sgd(0.1)")


def merging_options(chosen_options: Mapping[str, Any]) -> AggregationOptions:
    """Return the options by which the server merges uploads.

    Raises:
      InputError: for an unknown one, a value of the wrong type or out of range, or one that nothing reads.
    """
    # options of the chosen rules, such as `trim`, beside those that all rules share
    shared = {field.name: field.type for field in dataclasses.fields(AggregationOptions)}
    kinds = options_of(*(name for name in shared if name in CHOICES)) | shared
    for name, value in chosen_options.items():
        if name not in kinds:
            raise InputError(f"fedavg: unknown option {name!r}; {nearest(name, kinds)}")
        if name not in CHOICES:
            _check_number(name, kinds[name], value)
    options = with_options(AggregationOptions(), chosen_options, chosen_options)
    check_read(options, options, chosen_options)
    return options


def _check_number(name: str, kind: Any, value: object) -> None:
    """Check that a value is a number of the type of its field."""
    # a whole number is a valid float, but True is none
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole and (kind is int or not isinstance(value, float)):
        raise InputError(f"{name}: {_shown(value)} is not a {'whole number' if kind is int else 'number'}")


def check_rules(field: str, rules: Any, kind: type) -> None:
    """Check that rules are a tuple or list of one kind.

    Raises:
      InputError: naming the first that is not.
    """
    # a rule without a tuple around it is an easy mistake
    if not isinstance(rules, list | tuple):
        raise InputError(f"{field}: {_shown(rules)}; expected a tuple of {kind.__name__}")
    for rule in rules:
        if not isinstance(rule, kind):
            raise InputError(f"{field}: {_shown(rule)} is not a {kind.__name__}")


def check_model(params: Any) -> Any:
    """Return the parameters of a model, if clients can train them.

    Raises:
      InputError: if there are none, or they are no arrays of real numbers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if is_masked(leaf):
            raise InputError(f"model: parameter {_place(path)} is a masked array, whose mask nothing reads")
        try:
            array = np.asarray(leaf)
        except Exception as error:  # a user's object may raise anything
            raise InputError(f"model: parameter {_place(path)} is not an array: {reason(error)}") from None
        if array.dtype.kind not in "biuf" and not jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
            raise InputError(f"model: parameter {_place(path)} is {array.dtype}; expected real numbers")
    # integers and booleans may be among the parameters, but have no gradient
    if not any(jax.numpy.issubdtype(np.asarray(leaf).dtype, jax.numpy.floating) for _, leaf in leaves):
        raise InputError("model: it has no floating-point parameters, so that nothing can train")
    return params


def checked_examples(x: Any, y: Any, owner: Any) -> OwnedExamples:
    """Return the examples, as arrays.

    Raises:
      InputError: naming the argument that is no array, or that does not have one value for each example.
    """
    shapes = [_shape(argument) for argument in (x, y, owner)]
    # before all other checks: arrays of different lengths are the usual mistake
    if None not in shapes and len({shape[:1] for shape in shapes if shape is not None}) > 1:
        raise InputError("simulate: x, y and owner have the shapes {}, {} and {}".format(*shapes))
    y = checked_array("y", y)
    owner = checked_array("owner", owner, "biuU")
    # a list of numbers is a pytree of numbers for JAX, but one array for the user
    is_one_array = isinstance(x, list) or not jax.tree.leaves(x)
    paths = [((), x)]
    if not is_one_array:
        paths = jax.tree_util.tree_leaves_with_path(x, is_leaf=_is_array_like)
    names_of_leaves = [f"x{_place(path)}" for path, _ in paths]
    leaves = [checked_array(name, leaf) for name, (_, leaf) in zip(names_of_leaves, paths, strict=True)]
    named = [*zip(names_of_leaves, leaves, strict=True), ("y", y)]
    if owner.ndim != 1 or not len(owner):
        raise InputError(f"owner: shape {list(owner.shape)}; expected the client of each example, [N]")
    # many programs write -1 for examples without an owner
    if owner.dtype.kind == "i" and owner.min() < 0:
        raise InputError(
            f"owner: {owner.min()}; expected numbers from 0, or text; leave out examples of nobody"
        )
    for name, array in named:
        if not array.ndim or len(array) != len(owner):
            raise InputError(
                f"{name}: shape {list(array.shape)}; owner has {len(owner)} values, so the first axis must "
                f"have {len(owner)}"
            )
    if not is_one_array:
        structure = jax.tree.structure(x, is_leaf=_is_array_like)
        x = jax.tree.unflatten(structure, leaves)
    else:
        x = leaves[0]
    names, client = np.unique(owner, return_inverse=True)
    return OwnedExamples(x, y, names, client, _classes(y, len(names)))


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array, or the length of a list; None for anything else."""
    if isinstance(value, list):
        return (len(value),)
    return getattr(value, "shape", None)


def _is_array_like(value: object) -> bool:
    """Return whether a value is one array, as a list of numbers is."""
    return isinstance(value, list)


def checked_array(name: str, value: Any, kinds: str = "biuf") -> np.ndarray:
    """Return one argument as an array of numbers that fit into 32 bits.

    Raises:
      InputError: for anything else.
    """
    if is_masked(value):
        raise InputError(f"{name}: a masked array, whose mask nothing reads; leave out what is masked")
    try:
        array = np.asarray(value)
    except Exception as error:  # ragged lists, or anything that a user's object raises
        raise InputError(f"{name}: it is not an array: {reason(error)}") from None
    if is_mixed(value, array):
        raise InputError(f"{name}: mixes text with other values; use one type")
    # bfloat16 has the kind "V" in numpy
    extended = "f" in kinds and jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
    if array.dtype.kind not in kinds and not extended:
        expected = "numbers"
        if "U" in kinds:
            expected = "integers or text"
        raise InputError(f"{name}: {array.dtype} of shape {list(array.shape)}; expected {expected}")
    # JAX would wrap 64-bit integers around silently. Values that name clients or tasks
    # (kinds with text) stay on the host, and have no limit
    if array.dtype.kind in "iu" and array.dtype.itemsize > 4 and array.size:
        low = int(array.min())
        high = int(array.max())
        if (low < -(2**31) or high >= 2**31) and "U" not in kinds:
            outlier = high
            if low < -(2**31):
                outlier = low
            raise InputError(f"{name}: {outlier} needs more than the 32 bits that devices compute with")
        if array.dtype.kind == "u" and "U" not in kinds:
            array = array.astype(np.int32)
    return array


def _classes(y: np.ndarray, clients: int) -> int:
    """Return the number of classes that labels name. Negative integers, and numbers so
    large that the classes of all clients could not be counted, are other targets."""
    if y.ndim != 1 or y.dtype.kind not in "iu" or y.min() < 0:
        return 1
    classes = int(y.max()) + 1
    return classes if classes * clients <= MOST_COUNTED else 1


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a user's object
        text = f"a {type(value).__name__}"
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."
