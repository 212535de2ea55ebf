"""Read the examples of clients from JSON, for `fcljax.simulate`.

LEAF (Caldas et al. 2018) writes {"users": [...], "num_samples": [...], "user_data":
{USER: {"x": [...], "y": [...]}}}, often in several files of a folder. Others, such as
FederatedScope, have the parts of each client: {CLIENT: {"train": {"x": [...], "y":
[...]}, "test": ...}}.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.data.files.dataset import TextExamples, natural_order
from fcljax.data.files.json_files import parse_json
from fcljax.errors import InputError, nearest
from fcljax.files import in_home, machine_memory, read_user_text

# Python's lists of numbers take about so many bytes of memory for a byte of JSON
_MEMORY_FACTOR = 16
_SHOWN = 6  # names in a message
_TWEET = 4  # field of the text in an example of LEAF's Sentiment140


class ClientArrays(NamedTuple):
    """Examples and their clients: `simulate(method, *data[:3], rounds=10)`."""

    x: np.ndarray
    """Inputs [N, ...]: float32 or int32; text becomes the index [N, T] of each character
    in `characters`."""
    y: np.ndarray
    """Labels or targets [N, ...]; integers are int32."""
    owner: np.ndarray
    """Client of each example [N], as text."""
    characters: str
    """The characters of the indices 0, 1, ...; empty without text in x."""
    classes: tuple[str, ...]
    """The names of the labels 0, 1, ..., if y is text and x is not."""
    left_out: tuple[str, ...]
    """Content that was not read."""


class _JsonClient(NamedTuple):
    """The examples of one client."""

    name: str
    x: list[Any]
    y: list[Any]
    left_out: list[str]
    """Names of its other content."""


def read_clients(path: str | Path, split: str = "", characters: str = "") -> ClientArrays:
    """Read the examples of the clients in a JSON file, or in all JSON files of a folder.

    Args:
      path: of the file or folder.
      split: "train", "test" or "val", for a file that has these parts of each client.
      characters: those of the training split, to give the test split's characters the
        same indices; "" takes the characters of the file, sorted.

    Raises:
      InputError: naming the file, the client and what is wrong.
    """
    clients, left_out = _read_files(path, split)
    where = f"clients: {str(path)!r}"
    x = _values(where, "x", clients)
    y = _values(where, "y", clients)
    coded, characters, y, classes = _encode(where, x, y, characters)
    return ClientArrays(coded, y, _owners(clients), characters, classes, left_out)


def read_client_texts(path: str | Path) -> tuple[TextExamples, str]:
    """Read the texts of the clients in a JSON file, or in all JSON files of a folder.

    An example is a text, or the fields of a tweet, of which LEAF's Sentiment140 has the
    text in the fifth. Its client is the column `client`.

    Returns:
      The examples, and a note on what was not read.

    Raises:
      InputError: as `read_clients`, and naming the client of an example without a text.
    """
    clients, left_out = _read_files(path, "")
    where = f"clients: {str(path)!r}"
    texts: list[str] = []
    for client in clients:
        for example in client.x:
            text = example
            if isinstance(example, list) and len(example) > _TWEET:
                text = example[_TWEET]
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{where}, client {client.name!r}: x holds {example!r:.60}; expected texts")
            texts.append(text)
    labels = _values(where, "y", clients)
    note = f"not read: {', '.join(left_out)}" if left_out else ""
    return TextExamples(texts, labels, {"client": _owners(clients)}), note


def _owners(clients: list[_JsonClient]) -> np.ndarray:
    """Return the client of each example, by name."""
    return np.repeat([client.name for client in clients], [len(client.x) for client in clients])


def _read_files(path: str | Path, split: str) -> tuple[list[_JsonClient], tuple[str, ...]]:
    """Return the clients with examples of all files, and the names of what was not read."""
    clients: list[_JsonClient] = []
    left_out: list[str] = []
    for file in _files(in_home(path, "clients")):
        where = f"clients: {str(file)!r}"
        content = parse_json(
            where, read_user_text("clients", file, machine_memory() // _MEMORY_FACTOR), "client"
        )
        file_clients, other_content = _clients(where, content, split)
        clients += file_clients
        left_out += other_content + [name for client in file_clients for name in client.left_out]
    names = [client.name for client in clients]
    where = f"clients: {str(path)!r}"
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where}: the client {duplicate!r} is in two files")
    empty = [client.name for client in clients if not client.x]
    if empty:
        left_out.append(f"{len(empty)} clients without examples ({', '.join(empty[:_SHOWN])})")
    clients = [client for client in clients if client.x]
    if not clients:
        raise InputError(f"{where} has no examples")
    return clients, tuple(dict.fromkeys(left_out))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix == ".json")
    if not files:
        raise InputError(f"clients: {str(path)!r} has no files named *.json")
    return files


# ---- clients ---------------------------------------------------------------------------


def _clients(where: str, content: Any, split: str) -> tuple[list[_JsonClient], list[str]]:
    """Return the clients of one file, and the names of other content."""
    if not isinstance(content, Mapping):
        raise InputError(
            f"{where} holds a {type(content).__name__}; expected an object with the x and y of each client"
        )
    other_content: list[str] = []
    # LEAF's form; otherwise every key of the object is a client
    data = content
    if "user_data" in content:
        other_content = [name for name in content if name not in ("users", "num_samples", "user_data")]
        data = content["user_data"]
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: its user_data is a {type(data).__name__}; expected an object")
        _check_counts(where, content, data)
    clients = [
        _client(f"{where}, client {name!r}", name, client_data, split) for name, client_data in data.items()
    ]
    return clients, other_content


def _check_counts(where: str, content: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Check that LEAF's users and numbers of examples match the data."""
    users = content.get("users", list(data))
    if not isinstance(users, list) or sorted(map(str, users)) != sorted(data):
        raise InputError(f"{where}: its users are not those of its user_data; the file is damaged")
    counts = content.get("num_samples")
    if counts is None:
        return
    # not strict: a list of another length is reported after the loop
    for user, count in zip(users, counts if isinstance(counts, list) else [], strict=False):
        y = data[str(user)].get("y") if isinstance(data[str(user)], Mapping) else None
        if isinstance(y, list) and len(y) != count:
            raise InputError(f"{where}: user {user!r} has {len(y)} examples, and num_samples says {count}")
    if not isinstance(counts, list) or len(counts) != len(users):
        raise InputError(f"{where}: its num_samples does not have a number for each user")


def _client(where: str, name: str, data: Any, split: str) -> _JsonClient:
    """Return one client, or its part for the split."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: a {type(data).__name__}; expected an object with x and y")
    parts = [part for part, value in data.items() if isinstance(value, Mapping)]
    if "x" in data and split:
        raise InputError(f"split: {split!r}, and {where.removeprefix('clients: ')} has no parts")
    left_out: list[str] = []
    if "x" not in data and parts:
        if split not in parts:
            raise InputError(
                f"split: {split!r} is not part of {where.removeprefix('clients: ')}; {nearest(split, parts)}"
            )
        left_out = [part for part in parts if part != split]
        data = data[split]
    for key in ("x", "y"):
        if not isinstance(data.get(key), list):
            raise InputError(
                f"{where}: {key} is not a list; it has: {', '.join(map(str, data)) or 'nothing'}"
            )
    if len(data["x"]) != len(data["y"]):
        raise InputError(
            f"{where}: {len(data['x'])} examples in x and {len(data['y'])} in y; they must match"
        )
    left_out += [key for key in data if key not in ("x", "y")]
    return _JsonClient(name, data["x"], data["y"], left_out)


# ---- values ----------------------------------------------------------------------------


def _values(where: str, key: str, clients: list[_JsonClient]) -> np.ndarray:
    """Concatenate x or y of all clients: numbers [N, ...] or text [N].

    Raises:
      InputError: naming the client whose values have another shape or type.
    """
    form = None
    arrays = []
    for client in clients:
        name = f"{where}, client {client.name!r}"
        try:
            array = np.array(getattr(client, key))
        except ValueError:
            raise InputError(f"{name}: the examples of {key} have several shapes; make them equal") from None
        if array.dtype.kind not in "biufU" or (array.dtype.kind == "U" and array.ndim > 1):
            raise InputError(
                f"{name}: {key} holds {array.dtype} of shape {array.shape}; expected numbers or text"
            )
        if array.dtype.kind == "U" and not all(isinstance(value, str) for value in getattr(client, key)):
            raise InputError(f"{name}: {key} mixes text with numbers")
        array_form = (array.dtype.kind == "U", array.shape[1:])
        if form is not None and array_form != form:
            raise InputError(
                f"{name}: the examples of {key} have another shape or type than those of "
                f"client {clients[0].name!r}; make them equal"
            )
        form = array_form
        arrays.append(array)
    return np.concatenate(arrays)


def _encode(
    where: str, x: np.ndarray, y: np.ndarray, characters: str
) -> tuple[np.ndarray, str, np.ndarray, tuple[str, ...]]:
    """Return x and y as numbers, with the characters or classes that they stand for."""
    if x.dtype.kind != "U":
        if characters:
            raise InputError(f"characters: {where.removeprefix('clients: ')} has no text in x")
        x = _numbers(where, "x", x)
        if y.dtype.kind != "U":
            return x, "", _numbers(where, "y", y, whole=True), ()
        classes = natural_order(y)
        number = {name: i for i, name in enumerate(classes)}
        return x, "", np.array([number[name] for name in y.tolist()], np.int32), tuple(classes)
    text = y.dtype.kind == "U"
    # characters of x and y share one alphabet: y is often the next character
    alphabet = characters or "".join(
        sorted({c for texts in (x, *([y] if text else [])) for word in texts.tolist() for c in word})
    )
    index_of = {character: i for i, character in enumerate(alphabet)}
    indices = _characters(where, "x", x, index_of)
    if not text:
        return indices, alphabet, _numbers(where, "y", y, whole=True), ()
    target = _characters(where, "y", y, index_of)
    return indices, alphabet, target[:, 0] if target.shape[1] == 1 else target, ()


def _characters(where: str, key: str, text: np.ndarray, index_of: Mapping[str, int]) -> np.ndarray:
    """Return the indices [N, T] of the characters of texts of one length T."""
    words = text.tolist()
    lengths = {len(word) for word in words}
    if len(lengths) > 1:
        raise InputError(
            f"{where}: the texts of {key} have {min(lengths)} to {max(lengths)} characters; make them equal"
        )
    unknown = next((c for word in words for c in word if c not in index_of), None)
    if unknown is not None:
        raise InputError(f"characters: {unknown!r} occurs in {key} but is not one of the characters")
    return np.array([[index_of[c] for c in word] for word in words], np.int32).reshape(len(words), -1)


def _numbers(where: str, key: str, values: np.ndarray, whole: bool = False) -> np.ndarray:
    """Return floats as float32, integers (with `whole`, whole floats too) as int32."""
    if not np.isfinite(values).all():
        raise InputError(f"{where}: {key} holds a number that is too large")
    if whole and values.dtype.kind == "f" and (values == np.rint(values)).all():
        values = values.astype(np.int64)
    if values.dtype.kind in "fb":
        return values.astype(np.float32 if values.dtype.kind == "f" else bool)
    if values.size and (values.max() > np.iinfo(np.int32).max or values.min() < np.iinfo(np.int32).min):
        raise InputError(f"{where}: {key} holds {values.max()}; integers have at most 32 bits")
    return values.astype(np.int32)
