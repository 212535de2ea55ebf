"""Check and convert the named arrays of a file, for all families of networks."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from fcljax.errors import InputError
from fcljax.models.shapes import ConvNeXtConfig, DenseNetConfig, ResNetConfig
from fcljax.types import PyTree

Tensors = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


class InterpretedConvNet(NamedTuple):
    """A convolutional network of a file, under our names and in our layouts."""

    config: ResNetConfig | DenseNetConfig | ConvNeXtConfig
    params: PyTree
    head: PyTree | None
    """{"kernel", "bias"} of its classifier, if there is one."""
    left_out: tuple[str, ...]
    """Names of the file's other tensors."""


def check_tensors(tensors: Tensors, shapes: Shapes, network: str) -> None:
    """Check that a file has exactly these tensors.

    Raises:
      InputError: naming the first tensors that are misshaped, missing or unexpected.
    """
    problems = {
        "misshaped": [
            f"{key} has shape {tuple(tensors[key].shape)}, needs {shape}"
            for key, shape in shapes.items()
            if key in tensors and tuple(tensors[key].shape) != shape
        ],
        "missing": [key for key in shapes if key not in tensors],
        "unexpected": [key for key in tensors if key not in shapes],
    }
    lines = [f"{problem}: {listed(keys)}" for problem, keys in problems.items() if keys]
    if lines:
        raise InputError(f"checkpoint: does not fit {network}: {'; '.join(lines)}")


def listed(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    more = ""
    if len(names) > 3:
        more = f" and {len(names) - 3} more"
    return ", ".join(names[:3]) + more


def float32(name: str, x: np.ndarray) -> np.ndarray:
    """Return a tensor as float32.

    Raises:
      InputError: if it has another type than floating-point, or values that are not finite.
    """
    if not (np.issubdtype(x.dtype, np.floating) or x.dtype == ml_dtypes.bfloat16):
        raise InputError(f"checkpoint: {name} holds {x.dtype}, and weights are floating-point numbers")
    # a float64 beyond float32 becomes infinite, which is reported below
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        raise InputError(f"checkpoint: {name} has values that are not finite")
    return x


def reverse(x: np.ndarray) -> np.ndarray:
    """Turn torch's layout [out, in] or [out, in, row, column] into [in, out] or [row,
    column, in, out]."""
    if x.ndim == 4:
        return x.transpose(2, 3, 1, 0)
    return x.T


def unreverse(x: np.ndarray) -> np.ndarray:
    """Undo `reverse`: turn [in, out] or [row, column, in, out] into torch's layout."""
    if x.ndim == 4:
        return x.transpose(3, 2, 0, 1)
    return x.T
