"""Files that say which client has which training example, in the forms that people have.

A table (CSV) with the columns `client`, `example` or `file`, and perhaps `task`; JSON with the examples of
each client, {"ann": [0, 2], "bob": [1]} or [[0, 2], [1]], or with the client of each example; a .npy array
with the client of each example; a .npz archive with an array of examples for each client. What a file holds
decides, not its suffix.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.archives import read_npz
from fcljax.data.files.dataset import Dataset, image_names
from fcljax.data.files.json_files import parse_json
from fcljax.data.files.text_tables import read_header, read_table
from fcljax.errors import InputError, reason
from fcljax.files import open_regular, read_user_text
from fcljax.options import whole_number

MOST_BYTES = 1 << 28  # of a file
MOST_NAME = 200  # characters of a client's name: each example has one in memory
COLUMNS = ("example", "file", "client", "task")
NOBODY = ""

NPY = b"\x93NUMPY"
NPZ = b"PK\x03\x04"
PICKLE = b"\x80"


class Assigned(NamedTuple):
    """The client and the task of each training example [N], as text; NOBODY: none."""

    client: np.ndarray
    task: np.ndarray | None = None


def read_partition(path: str, dataset: Dataset) -> Assigned:
    """What a file says of each training example that is not held out.

    Raises:
      InputError: naming the file, the place in it and what does not fit.
    """
    count = len(dataset.y_train) if dataset.kept is None else dataset.whole
    examples = _Examples(path, dataset.name, count)
    kind = _kind(path)
    if kind == "table":
        assigned = _of_table(_text(path), examples, dataset)
    elif kind == "npz":
        assigned = Assigned(_of_clients(_npz(path), examples))
    else:
        content = _npy(path) if kind == "npy" else parse_json(_where(path), _text(path), "client")
        assigned = Assigned(_of_content(content, examples))
    if dataset.kept is None:
        return assigned
    task = None if assigned.task is None else assigned.task[dataset.kept]
    return Assigned(assigned.client[dataset.kept], task)


def has_tasks(path: str) -> bool:
    """Whether a file has a column `task`.

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
        """The number of an example, from an integer or its digits.

        Raises:
          InputError: for anything else.
        """
        number = whole_number(value) if isinstance(value, str) else None
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
    """What a file holds, by its first bytes.

    Raises:
      InputError: for a file that cannot be read, or a pickle.
    """
    try:
        with open_regular(path) as stream:
            start = stream.read(1 << 10)
    except OSError as error:
        raise InputError(f"partition: cannot read {path!r}: {error.strerror or error}") from None
    if start.startswith(PICKLE):
        raise InputError(
            f"{_where(path)} is a pickle, which is a program and is never loaded; write it as JSON: "
            '{"client": [0, 2, 5]}'
        )
    for magic, kind in ((NPY, "npy"), (NPZ, "npz")):
        if start.startswith(magic):
            return kind
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    return "json" if text[:1] in (b"{", b"[") else "table"


def _text(path: str) -> str:
    return read_user_text("partition", path, MOST_BYTES)


# ---- tables ------------------------------------------------------------------------------------------------


def _of_table(text: str, examples: _Examples, dataset: Dataset) -> Assigned:
    """The clients and tasks of a table."""
    where = _where(examples.path)
    header = read_header(where, text)
    by = [name for name in ("example", "file") if name in header]
    if not by or "client" not in header:
        raise InputError(
            f"{where}: its first line is {','.join(header)!r}; expected 'example,client' or 'file,client', "
            "and perhaps ',task'"
        )
    if len(by) == 2:
        raise InputError(f"{where} has the columns 'example' and 'file'; leave out one of them")
    table = read_table(where, text, COLUMNS)
    find = examples.number if by[0] == "example" else _names(examples, dataset)
    wanted = [name for name in ("client", "task") if name in header]
    found = {name: np.full(examples.count, NOBODY, object) for name in wanted}
    for row, line in enumerate(table.lines):
        place = f"{where}, line {line}"
        value = table.columns[by[0]][row]
        example = find(place, value)
        if found["client"][example] != NOBODY:
            raise InputError(f"{place}: {by[0]} {value!r} has an owner already")
        for name in wanted:
            found[name][example] = _name(place, name, table.columns[name][row])
    return Assigned(**{name: values.astype(str) for name, values in found.items()})


def _name(where: str, what: str, name: str) -> str:
    """The name of a client or a task.

    Raises:
      InputError: if there is none, or a very long one.
    """
    if not name:
        raise InputError(f"{where}: no {what}; leave out examples of nobody")
    if len(name) > MOST_NAME:
        raise InputError(f"{where}: a {what} of {len(name):,} characters; at most {MOST_NAME}")
    return name


def _names(examples: _Examples, dataset: Dataset) -> Callable[[str, str], int]:
    """find(where, name) -> the number of the training image in that file.

    Raises:
      InputError: for a data set that is no files.
    """
    names = image_names(dataset, "train")
    if names is None:
        raise InputError(
            f"{_where(examples.path)}: {dataset.name} has no file names; nearest: a column 'example' with "
            f"numbers from 0 to {examples.count - 1}"
        )
    number = {name: i for i, name in enumerate(names)}
    # the last one of a name, if it is not unique
    short = {Path(name).name: i for i, name in enumerate(names)}
    unique = len(short) == len(names)

    def find(where: str, value: str) -> int:
        if value in number:
            return number[value]
        if unique and value in short:
            return short[value]
        hint = f"nearest: {names[0]!r}" if unique else f"give the whole name, such as {names[0]!r}"
        raise InputError(f"{where}: no training image {value!r}; {hint}")

    return find


# ---- JSON and arrays ---------------------------------------------------------------------------------------


def _of_content(content: Any, examples: _Examples) -> np.ndarray:
    """The clients of JSON, or of an array."""
    if isinstance(content, Mapping):
        return _of_clients(content, examples)
    if isinstance(content, list) and content and all(isinstance(each, list) for each in content):
        return _of_clients({str(client): each for client, each in enumerate(content)}, examples)
    return _of_examples(content, examples)


def _of_clients(clients: Mapping[str, Any], examples: _Examples) -> np.ndarray:
    """The client of each example [N], from the examples of each client."""
    owner = np.full(examples.count, NOBODY, object)
    for client, indices in clients.items():
        where = f"{_where(examples.path)}, client {client!r}"
        name = _name(where, "client", client.strip())
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


def _of_examples(owners: Any, examples: _Examples) -> np.ndarray:
    """The client of each example [N], from a list or an array that says so."""
    where = _where(examples.path)
    count = examples.count
    shape = list(np.shape(owners)) if isinstance(owners, np.ndarray) else [len(owners)]
    if shape != [count] or (isinstance(owners, np.ndarray) and owners.dtype.kind not in "iuU"):
        what = f"{owners.dtype} of shape {shape}" if isinstance(owners, np.ndarray) else f"{shape[0]} values"
        raise InputError(
            f"{where} has {what}; expected the client of each of the {count} training examples, integers or "
            'text, or the examples of each client: {"client": [0, 2, 5]}'
        )
    names = []
    for example, owner in enumerate(owners.tolist() if isinstance(owners, np.ndarray) else owners):
        if isinstance(owner, bool) or not isinstance(owner, int | str):
            raise InputError(f"{where}: example {example} has client {owner!r}; expected a number or text")
        names.append(_name(f"{where}, example {example}", "client", str(owner).strip()))
    return np.array(names, str)


def _npy(path: str) -> np.ndarray:
    """The array of a .npy file. It is mapped, so that a header which claims too much allocates nothing."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's parser of headers raises what Python's does
        raise InputError(f"{_where(path)} is no array of numbers or text: {reason(error)}") from None


def _npz(path: str) -> dict[str, np.ndarray]:
    """The arrays of a .npz file."""
    try:
        return read_npz(Path(path), MOST_BYTES)
    except Exception as error:  # the parsers of zip and npy raise what Python's do
        raise InputError(f"{_where(path)} cannot be read: {reason(error)}") from None
