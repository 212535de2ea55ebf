"""Files that list all classes in the order in which tasks take them.

A class in each line; one line with commas; JSON, ["dog", "cat"] or [1, 0]; or a .npy array. Classes are names
or numbers from 0. What a file holds decides, not its suffix.
"""

import csv
import json

import numpy as np

from fcljax.errors import InputError, reason
from fcljax.files import open_regular, read_user_text

NPY = b"\x93NUMPY"
PICKLES = (b"\x80", b"PK\x03\x04")


def read_order(path: str, most: int) -> list[str]:
    """The classes that a file of at most so many bytes lists, as it writes them.

    Raises:
      InputError: naming the file and what is wrong with it.
    """
    where = f"class_order: {path!r}"
    try:
        with open_regular(path) as stream:
            start = stream.read(8)
    except OSError as error:
        raise InputError(f"class_order: cannot read {path!r}: {error.strerror or error}") from None
    if start.startswith(NPY):
        return _of_array(where, path)
    if start.startswith(PICKLES):
        raise InputError(f"{where} is a pickle or an archive; give text, JSON or a .npy array")
    text = read_user_text("class_order", path, most)
    if text.lstrip().startswith("["):
        return _of_json(where, text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and "," in lines[0]:
        return _of_commas(where, lines[0])
    return lines


def _of_commas(where: str, line: str) -> list[str]:
    """The classes of one line, in which a name with a comma has quotation marks."""
    try:
        return [name.strip() for name in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        raise InputError(f"{where}: {error}") from None


def _of_json(where: str, text: str) -> list[str]:
    try:
        classes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON: {reason(error)}") from None
    for each in classes:
        if isinstance(each, bool) or not isinstance(each, int | str):
            raise InputError(f"{where}: {each!r} is no class; expected names, or numbers from 0")
    return [str(each).strip() for each in classes]


def _of_array(where: str, path: str) -> list[str]:
    """The classes of an array, which is mapped: a header that claims too much allocates nothing."""
    try:
        classes = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's parser of headers raises what Python's does
        raise InputError(f"{where} is no array of numbers or text: {reason(error)}") from None
    if classes.ndim != 1 or classes.dtype.kind not in "iuU":
        raise InputError(
            f"{where} is {classes.dtype} of shape {list(classes.shape)}; expected the classes, integers or "
            "text of shape [C]"
        )
    return [str(each).strip() for each in classes.tolist()]
