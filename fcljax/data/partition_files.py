"""Read files that assign training examples to clients, in the usual forms.

A table (CSV) with the columns `client`, `example` or `file`, and perhaps `task`; JSON
with the examples of each client, {"ann": [0, 2], "bob": [1]} or [[0, 2], [1]], or with
the client of each example; a .npy array with the client of each example; a .npz archive
with an array of examples for each client. The content of a file decides its form, not
its suffix.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.archives import read_npz
from fcljax.data.files.dataset import Dataset, row_numbers, training_image_rows
from fcljax.data.files.json_files import parse_json
from fcljax.data.files.text_tables import read_header, read_table
from fcljax.errors import InputError, reason
from fcljax.files import open_regular, read_user_text
from fcljax.options import whole_number

MOST_BYTES = 1 << 28  # most bytes of a file
MOST_NAME = 200  # characters of a client's name: each example has one in memory
COLUMNS = ("example", "file", "client", "task")
NOBODY = ""  # the client of an example that the file leaves out

# the first bytes of files, which decide their form
NPY = b"\x93NUMPY"
NPZ = b"PK\x03\x04"
PICKLE = b"\x80"


class Assigned(NamedTuple):
    """The client and the task of each training example [N], as text; NOBODY: no
    client."""

    client: np.ndarray
    task: np.ndarray | None = None


def read_partition(path: str, dataset: Dataset) -> Assigned:
    """Read client and task of each training example that is not held out.

    Raises:
      InputError: naming the file, the position in it and the fault.
    """
    # a file numbers the examples before some were held out or skipped
    rows, count = row_numbers(dataset)
    examples = _Examples(path, dataset.name, count)
    kind = _kind(path)
    if kind == "table":
        assigned = _from_table(_text(path), examples, dataset)
    elif kind == "npz":
        assigned = Assigned(_from_clients(_npz(path), examples))
    elif kind == "npy":
        assigned = Assigned(_from_content(_npy(path), examples))
    else:
        content = parse_json(_where(path), _text(path), "client")
        assigned = Assigned(_from_content(content, examples))
    task = assigned.task
    if task is not None:
        task = task[rows]
    return Assigned(assigned.client[rows], task)


def has_tasks(path: str) -> bool:
    """Check whether a file has a column `task`.

    Raises:
      InputError: for a file that cannot be read.
    """
    return _kind(path) == "table" and "task" in read_header(_where(path), _text(path))


class _Examples(NamedTuple):
    """The training examples that a file may name, and the file."""

    path: str
    dataset: str
    count: int

    def number(self, where: str, value: object) -> int:
        """Return the number of an example, from an integer or its digits.

        Raises:
          InputError: for anything else.
        """
        number = None
        if isinstance(value, str):
            number = whole_number(value)
        # True is an int in Python, and would be example 1
        if isinstance(value, int) and not isinstance(value, bool):
            number = int(value)
        if number is None or not 0 <= number < self.count:
            raise InputError(
                f"{where}: example {value!r}; {self.dataset} has training examples 0 to {self.count - 1}"
            )
        return number


def _where(path: str) -> str:
    return f"partition: {path!r}"


def _kind(path: str) -> str:
    """Recognise the form of a file by its first bytes: table, json, npy or npz.

    Raises:
      InputError: for a file that cannot be read, or a pickle.
    """
    try:
        with open_regular(path) as stream:
            start = stream.read(1 << 10)
    except OSError as error:
        raise InputError(f"partition: cannot read {path!r}: {error.strerror or error}") from None
    # numpy would load it, and loading a pickle runs it
    if start.startswith(PICKLE):
        raise InputError(
            f"{_where(path)} is a pickle, which is a program and is never loaded; write it as JSON: "
            '{"client": [0, 2, 5]}'
        )
    for magic, kind in ((NPY, "npy"), (NPZ, "npz")):
        if start.startswith(magic):
            return kind
    # spreadsheets write a byte-order mark before the text
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        return "json"
    return "table"


def _text(path: str) -> str:
    return read_user_text("partition", path, MOST_BYTES)


# ---- tables ----------------------------------------------------------------------------


def _from_table(text: str, examples: _Examples, dataset: Dataset) -> Assigned:
    """Read the clients and tasks of a table."""
    where = _where(examples.path)
    header = read_header(where, text)
    keys = [name for name in ("example", "file") if name in header]
    if not keys or "client" not in header:
        raise InputError(
            f"{where}: its first line is {','.join(header)!r}; expected 'example,client' or 'file,client', "
            "and perhaps ',task'"
        )
    if len(keys) == 2:
        raise InputError(f"{where} has the columns 'example' and 'file'; leave out one of them")
    table = read_table(where, text, COLUMNS)
    find = examples.number
    if keys[0] != "example":
        find = _find_by_name(examples, dataset)
    columns = [name for name in ("client", "task") if name in header]
    # objects, so that names of any length need no width beforehand
    values_of = {name: np.full(examples.count, NOBODY, object) for name in columns}
    for row, line in enumerate(table.lines):
        position = f"{where}, line {line}"
        value = table.columns[keys[0]][row]
        example = find(position, value)
        if values_of["client"][example] != NOBODY:
            raise InputError(f"{position}: {keys[0]} {value!r} has an owner already")
        for name in columns:
            values_of[name][example] = _checked_name(position, name, table.columns[name][row])
    return Assigned(**{name: values.astype(str) for name, values in values_of.items()})


def _checked_name(where: str, kind: str, name: str) -> str:
    """Check the name of a client or a task.

    Raises:
      InputError: if it is empty or very long.
    """
    if not name:
        raise InputError(f"{where}: no {kind}; leave out examples without a client")
    if len(name) > MOST_NAME:
        raise InputError(f"{where}: a {kind} of {len(name):,} characters; at most {MOST_NAME}")
    return name


def _find_by_name(examples: _Examples, dataset: Dataset) -> Callable[[str, str], int]:
    """Return find(where, name) -> the number of the training image in that file.

    Raises:
      InputError: for a data set without files.
    """
    number = training_image_rows(dataset)
    if not number:
        raise InputError(
            f"{_where(examples.path)}: {dataset.name} has no file names; nearest: a column 'example' with "
            f"numbers from 0 to {examples.count - 1}"
        )
    # without folders too, if no two images have one name in different folders
    by_file_name = {Path(name).name: row for name, row in number.items()}
    unique = len(by_file_name) == len(number)
    nearest = repr(next(iter(number)))

    def find(where: str, value: str) -> int:
        if value in number:
            return number[value]
        if unique and value in by_file_name:
            return by_file_name[value]
        hint = f"nearest: {nearest}"
        if not unique:
            hint = f"give the whole name, such as {nearest}"
        raise InputError(f"{where}: no training image {value!r}; {hint}")

    return find


# ---- JSON and arrays -------------------------------------------------------------------


def _from_content(content: Any, examples: _Examples) -> np.ndarray:
    """Read the client of each example [N] from JSON or an array."""
    if isinstance(content, Mapping):
        return _from_clients(content, examples)
    # [[0, 2], [1]]: clients are numbered
    if isinstance(content, list) and content and all(isinstance(indices, list) for indices in content):
        return _from_clients({str(client): indices for client, indices in enumerate(content)}, examples)
    return _from_examples(content, examples)


def _from_clients(clients: Mapping[str, Any], examples: _Examples) -> np.ndarray:
    """Return the client of each example [N], from the examples of each client."""
    owner = np.full(examples.count, NOBODY, object)
    for client, indices in clients.items():
        where = f"{_where(examples.path)}, client {client!r}"
        name = _checked_name(where, "client", client.strip())
        # arrays are read like lists, so that both have the same errors
        if isinstance(indices, np.ndarray) and indices.ndim == 1:
            indices = indices.tolist()
        if not isinstance(indices, list):
            raise InputError(f"{where}: expected a list of the numbers of its training examples")
        for index in indices:
            example = examples.number(where, index)
            if owner[example] != NOBODY:
                raise InputError(f"{where}: example {example} has an owner already")
            owner[example] = name
    return owner.astype(str)


def _from_examples(owners: Any, examples: _Examples) -> np.ndarray:
    """Return the client of each example [N], from a list or an array of them."""
    where = _where(examples.path)
    count = examples.count
    if isinstance(owners, np.ndarray):
        is_valid = owners.shape == (count,) and owners.dtype.kind in "iuU"
        description = f"{owners.dtype} of shape {list(owners.shape)}"
        owners = owners.tolist()
    else:
        is_valid = len(owners) == count
        description = f"{len(owners)} values"
    if not is_valid:
        raise InputError(
            f"{where} has {description}; expected the client of each of the {count} training examples, "
            'integers or text, or the examples of each client: {"client": [0, 2, 5]}'
        )
    names = []
    for example, owner in enumerate(owners):
        if isinstance(owner, bool) or not isinstance(owner, int | str):
            raise InputError(f"{where}: example {example} has client {owner!r}; expected a number or text")
        # many programs write -1 where nobody has an example
        if isinstance(owner, int) and owner < 0:
            raise InputError(
                f"{where}: example {example} has client {owner}; expected a number from 0, or text; to leave "
                'out examples, list those of each client: {"client": [0, 2, 5]}'
            )
        names.append(_checked_name(f"{where}, example {example}", "client", str(owner).strip()))
    return np.array(names, str)


def _npy(path: str) -> np.ndarray:
    """Map the array of a .npy file, so that a wrong header allocates nothing."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    # a header is a Python literal, whose parser raises errors of many kinds
    except Exception as error:
        raise InputError(f"{_where(path)} is not an array of numbers or text: {reason(error)}") from None


def _npz(path: str) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file."""
    try:
        return read_npz(Path(path), MOST_BYTES)
    # anything: a damaged file meets the parsers of zip and npy
    except Exception as error:
        raise InputError(f"{_where(path)} cannot be read: {reason(error)}") from None
