"""Read files that list all classes in the order in which tasks take them.

A class in each line; one line with commas; JSON, ["dog", "cat"] or [1, 0]; or a .npy
array. Classes are names or numbers from 0. The content of a file decides its form, not
its suffix.
"""

import csv
import json

import numpy as np

from fcljax.errors import InputError, reason
from fcljax.files import open_regular, read_user_text

# the first bytes of files: numpy's; and pickles', which torch.save packs into a zip
# archive
NPY = b"\x93NUMPY"
PICKLES = (b"\x80", b"PK\x03\x04")


def read_order(path: str, most: int) -> list[str]:
    """Read the classes in a file of at most `most` bytes, as it writes them.

    Raises:
      InputError: naming the file and its fault.
    """
    where = f"class_order: {path!r}"
    try:
        with open_regular(path) as stream:
            start = stream.read(8)
    except OSError as error:
        raise InputError(f"class_order: cannot read {path!r}: {error.strerror or error}") from None
    if start.startswith(NPY):
        return _read_array(where, path)
    if start.startswith(PICKLES):
        raise InputError(f"{where} is a pickle or an archive; expected text, JSON or a .npy array")
    text = read_user_text("class_order", path, most)
    if text.lstrip().startswith("["):
        return _read_json(where, text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and "," in lines[0]:
        return _split_line(where, lines[0])
    return lines


def _split_line(where: str, line: str) -> list[str]:
    """Split one line at its commas; a name with a comma has quotation marks."""
    try:
        return [name.strip() for name in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        raise InputError(f"{where}: {error}") from None


def _read_json(where: str, text: str) -> list[str]:
    try:
        classes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {reason(error)}") from None
    for label in classes:
        # true is an int in Python, and would be class 1
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise InputError(f"{where}: {label!r} is not a class; expected names, or numbers from 0")
    return [str(label).strip() for label in classes]


def _read_array(where: str, path: str) -> list[str]:
    """Read the classes of an array."""
    # mapped, so that a header that claims too much allocates nothing
    try:
        classes = np.load(path, mmap_mode="r", allow_pickle=False)
    # a header is a Python literal, whose parser raises errors of many kinds
    except Exception as error:
        raise InputError(f"{where} is not an array of numbers or text: {reason(error)}") from None
    if classes.ndim != 1 or classes.dtype.kind not in "iuU":
        raise InputError(
            f"{where} is {classes.dtype} of shape {list(classes.shape)}; expected the classes, integers or "
            "text of shape [C]"
        )
    return [str(label).strip() for label in classes.tolist()]
