"""Named arrays of a file: what all families of networks ask of them."""

import ml_dtypes
import numpy as np

from fcljax.errors import InputError

Tensors = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


def check_tensors(tensors: Tensors, wanted: Shapes, name: str) -> None:
    """Check that a file has exactly these tensors.

    Raises:
      InputError: naming the first tensors that are misshaped, missing or unexpected.
    """
    found = {
        "misshaped": [
            f"{key} has shape {tuple(tensors[key].shape)}, needs {shape}"
            for key, shape in wanted.items()
            if key in tensors and tuple(tensors[key].shape) != shape
        ],
        "missing": [key for key in wanted if key not in tensors],
        "unexpected": [key for key in tensors if key not in wanted],
    }
    problems = [f"{kind}: {listed(keys)}" for kind, keys in found.items() if keys]
    if problems:
        raise InputError(f"checkpoint: does not fit {name}: {'; '.join(problems)}")


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def float32(name: str, x: np.ndarray) -> np.ndarray:
    """A tensor as float32.

    Raises:
      InputError: if it holds no floating-point numbers, or some that are not finite.
    """
    if not (np.issubdtype(x.dtype, np.floating) or x.dtype == ml_dtypes.bfloat16):
        raise InputError(f"checkpoint: {name} holds {x.dtype}, and weights are floating-point numbers")
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        raise InputError(f"checkpoint: {name} has values that are not finite")
    return x


def reverse(x: np.ndarray) -> np.ndarray:
    """From torch's layout [out, in] or [out, in, row, column] to [in, out] or [row, column, in, out]."""
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T
