"""Files as users write them, right and wrong, for experiments/torture.py.

Partitions and class orders (CSV, JSON, npy, npz), tables of the hub with odd types and metadata, odd folders
and lists, and run folders of other programs. What is right must be read as it was meant; what is wrong must
raise `InputError` with one line and leave nothing behind. Where both are sound, a file may be refused, but
never misread.
"""

import contextlib
import csv
import io
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torture_common import Call, Outcome, called, judged, one_line
from torture_data import CLASSES, picture_file
from torture_inputs import whole_summary

TEXTS = (
    "ann",
    "bob",
    "client 3",
    "7",
    "007",
    "1.0",
    "nan",
    "NULL",
    "Ünal",
    "O'Neil",
    "a,b",
    "x;y",
    'say "hi"',
)
LEVELS = tuple(range(20, 140, 5))  # of 24 images, one for each example


def user_file(rng: random.Random, folder: Path, *_: object) -> Outcome:
    """What became of a generated file."""
    folder.mkdir()
    return judged(rng.choice(GENERATORS)(rng, folder))


def _pick(rng: random.Random, table: dict[str, Any]) -> tuple[str, Any]:
    name = rng.choice(list(table))
    return name, table[name]


# ---- partitions --------------------------------------------------------------------------------------------


class _Truth(NamedTuple):
    """The client and the task of each training example; None: no client."""

    client: list[str | None]
    task: list[str] | None
    files: list[str]
    """Names of the images."""


CSV_FAULTS: dict[str, Callable[[list[list[str]]], object]] = {
    "an example twice": lambda rows: rows.append(list(rows[1])),
    "no such example": lambda rows: rows[1].__setitem__(0, "9999"),
    "a negative example": lambda rows: rows[1].__setitem__(0, "-1"),
    "half an example": lambda rows: rows[1].__setitem__(0, "0.5"),
    "an example in hexadecimal": lambda rows: rows[1].__setitem__(0, "0x0"),
    "an exponent": lambda rows: rows[1].__setitem__(0, "1²"),
    "an unknown column": lambda rows: [row.append("x") for row in rows],
    "a column twice": lambda rows: [row.append(row[0]) for row in rows],
    "no header": lambda rows: rows.pop(0),
    "names of rows": lambda rows: [row.insert(0, "" if i == 0 else str(i)) for i, row in enumerate(rows)],
    "a cell more": lambda rows: rows[-1].append("x"),
    "a cell less": lambda rows: rows[-1].pop(),
    "no client": lambda rows: rows[1].__setitem__(1, ""),
    "a long client": lambda rows: rows[1].__setitem__(1, "x" * 300),
    "a client of two lines": lambda rows: rows[1].__setitem__(1, "a\nb"),
    "nothing": lambda rows: rows.clear(),
    "a header alone": lambda rows: rows.__delitem__(slice(1, None)),
}
TEXT_FAULTS: dict[str, Callable[[str], bytes]] = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "Latin-1": lambda text: text.encode("ascii", "ignore") + b"\xe9",
    "NUL": lambda text: text.encode() + b"\0",
    "an open quotation mark": lambda text: text.encode() + b'"',
    "half a sign": lambda text: text.encode() + b"\xe2\x82",
}
JSON_FAULTS: dict[str, Callable[[Any], Any]] = {
    "a number": lambda value: 3,
    "text": lambda value: "ann",
    "null": lambda value: None,
    "nothing": lambda value: type(value)(),
    "true": lambda value: True,
    "a list inside": lambda value: [*value, [[0]]] if isinstance(value, list) else {"a": [[0]]},
    "half an example": lambda value: {"a": [0.5]},
    "an example as true": lambda value: {"a": [True]},
    "an example too many": lambda value: {"a": [10**9]},
    "an example twice": lambda value: {"a": [1, 1]},
    "two owners": lambda value: {"a": [1], "b": [1]},
    "one less": lambda value: ["ann"],
    "a record": lambda value: {"client": {"examples": [0]}},
    "no name": lambda value: {"": [0]},
}
JSON_TEXT_FAULTS: dict[str, Callable[[str], str]] = {
    "a comma more": lambda text: text[:-1] + "," + text[-1],
    "cut off": lambda text: text[:-1],
    "a comment": lambda text: text + " // mine",
    "two values": lambda text: text + text,
    "deep": lambda text: "[" * 100_000,
    "a client twice": lambda text: '{"a": [0], "a": [1]}',
    "infinity": lambda text: '{"a": [Infinity]}',
    "a long number": lambda text: '{"a": [' + "9" * 5000 + "]}",
}
NPY_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floats": lambda x: np.arange(len(x)) / 1,
    "booleans": lambda x: np.arange(len(x)) > 1,
    "a column": lambda x: x[:, None],
    "one less": lambda x: x[1:],
    "one number": lambda x: np.array(3),
    "objects": lambda x: np.array([None] * len(x)),
    "complex": lambda x: np.zeros(len(x), complex),
    "records": lambda x: np.zeros(len(x), [("a", int)]),
    "dates": lambda x: np.zeros(len(x), "datetime64[s]"),
    "no names": lambda x: np.array([""] * len(x)),
    "indices of a client": lambda x: np.arange(len(x) + 2),
}


def _partition(rng: random.Random, folder: Path) -> Call:
    """A partition file of a small data set, right or with one fault."""
    from fcljax.data.files.dataset import Dataset, names_file
    from fcljax.data.owners import find_owners, read_tasks

    count = rng.randrange(4, 30)
    names = rng.sample(TEXTS, rng.randrange(1, 4))
    form = rng.choice(("csv", "csv", "csv", "clients", "lists", "examples", "npy", "npz"))
    sparse = form not in ("examples", "npy")
    client = [rng.choice([*names, None] if sparse else names) for _ in range(count)]
    if form == "lists":
        client = [None if name is None else str(names.index(name)) for name in client]
    client[0] = next((name for name in client if name), names[0] if form != "lists" else "0")
    with_tasks = form == "csv" and rng.random() < 0.5
    files = [f"{CLASSES[i % 3]}/{i}.png" for i in range(count)]
    truth = _Truth(client, [rng.choice("012") for _ in client] if with_tasks else None, files)
    path = folder / f"who{rng.choice(('.csv', '.json', '.npy', '', '.txt', '.npz'))}"
    fault = rng.random() < 0.6
    what = WRITERS[form](rng, path, truth, fault)
    names_file(folder, "train").write_text(json.dumps(files))
    x = np.zeros((count, 2, 2, 3), np.uint8)
    y = np.arange(count) % 3
    dataset = Dataset("mine", x, y, x, y, CLASSES[:3], folder=folder)
    partition = f"file:{path}"

    def call() -> str:
        owners = find_owners(dataset, partition)
        read = [None if k < 0 else owners.names[k] for k in owners.client.tolist()]
        if read != client:
            return f"clients {read}, not {client}"
        if truth.task is None:
            return ""
        numbers = read_tasks(partition, dataset).tolist()
        used = sorted({task for name, task in zip(client, truth.task, strict=True) if name})
        expected = [used.index(task) if name else -1 for name, task in zip(client, truth.task, strict=True)]
        return "" if numbers == expected else f"tasks {numbers}, not {expected}"

    return Call(f"partition, {form}: {what}", call, right=not fault)


def _write_csv(rng: random.Random, path: Path, truth: _Truth, fault: bool) -> str:
    key = rng.choice(("example", "file"))
    rows = [[key, "client", *(["task"] if truth.task else [])]]
    for i, name in enumerate(truth.client):
        if name is not None:
            value = str(i) if key == "example" else truth.files[i]
            rows.append([value, name, *([truth.task[i]] if truth.task else [])])
    what = f"as it is, {key}"
    text_fault = None
    if fault and rng.random() < 0.7:
        what, change = _pick(rng, CSV_FAULTS)
        change(rows)
    elif fault:
        what, text_fault = _pick(rng, TEXT_FAULTS)
    elif rng.random() < 0.5:  # another order of the columns
        order = rng.sample(range(len(rows[0])), len(rows[0]))
        rows = [[row[i] for i in order] for row in rows]
        rows[0] = [rng.choice((name, name.upper(), name.title())) for name in rows[0]]
    stream = io.StringIO()
    style: Any = rng.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL))
    end = rng.choice(("\n", "\r\n", "\r"))
    separator = rng.choice(",;\t")
    csv.writer(stream, delimiter=separator, quoting=style, lineterminator=end).writerows(rows)
    text = (
        rng.choice(("", "\ufeff"))
        + rng.choice(("", end))
        + stream.getvalue()
        + rng.choice(("", end, end * 3))
    )
    path.write_bytes(text_fault(text) if text_fault else text.encode())
    return f"{what}, {separator!r}"


def _write_json(rng: random.Random, path: Path, value: Any, fault: bool) -> str:
    what = "as it is"
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 2)))
    if fault and rng.random() < 0.6:
        what, change = _pick(rng, JSON_FAULTS)
        text = json.dumps(change(value))
    elif fault:
        what, change_text = _pick(rng, JSON_TEXT_FAULTS)
        text = change_text(text)
    path.write_text(rng.choice(("", "\ufeff", "\n ")) + text, encoding="utf-8")
    return what


def _by_client(truth: _Truth) -> dict[str, list[int]]:
    clients = sorted({name for name in truth.client if name})
    return {name: [i for i, owner in enumerate(truth.client) if owner == name] for name in clients}


def _write_clients(rng: random.Random, path: Path, truth: _Truth, fault: bool) -> str:
    return _write_json(rng, path, _by_client(truth), fault)


def _write_lists(rng: random.Random, path: Path, truth: _Truth, fault: bool) -> str:
    by_client = _by_client(truth)
    most = max(map(int, by_client))
    return _write_json(rng, path, [by_client.get(str(k), []) for k in range(most + 1)], fault)


def _write_examples(rng: random.Random, path: Path, truth: _Truth, fault: bool) -> str:
    return _write_json(rng, path, truth.client, fault)


def _write_npy(rng: random.Random, path: Path, truth: _Truth, fault: bool) -> str:
    array = np.array(truth.client)
    what = "as it is"
    if fault:
        what, change = _pick(rng, NPY_FAULTS)
        array = change(array)
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    content = stream.getvalue()
    if fault and rng.random() < 0.2:
        what = "cut off"
        content = content[: rng.randrange(7, len(content))]
    path.write_bytes(content)
    return what


NPZ_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floats": lambda x: x + 0.5,
    "a column": lambda x: x[:, None],
    "twice": lambda x: np.concatenate([x, x]),
    "too many": lambda x: x + 10**6,
    "negative": lambda x: x - 10**6,
    "objects": lambda x: np.array([None]),
    "text": lambda x: np.array(["a"]),
    "booleans": lambda x: x > 1,
}


def _write_npz(rng: random.Random, path: Path, truth: _Truth, fault: bool) -> str:
    arrays: dict[str, Any] = {name: np.array(indices) for name, indices in _by_client(truth).items()}
    what = "as it is"
    if fault:
        what, change = _pick(rng, NPZ_FAULTS)
        name = rng.choice(list(arrays))
        arrays[name] = change(arrays[name])
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    content = stream.getvalue()
    if fault and rng.random() < 0.3:
        what = "cut off"
        content = content[: rng.randrange(5, len(content) - 1)]
    path.write_bytes(content)
    return what


WRITERS: dict[str, Callable[[random.Random, Path, _Truth, bool], str]] = {
    "csv": _write_csv,
    "clients": _write_clients,
    "lists": _write_lists,
    "examples": _write_examples,
    "npy": _write_npy,
    "npz": _write_npz,
}


# ---- class orders ------------------------------------------------------------------------------------------

ORDER_FAULTS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "an unknown class": lambda order: ["no such class", *order[1:]],
    "a class twice": lambda order: [order[0], *order[:-1]],
    "a class less": lambda order: order[:-1],
    "a class more": lambda order: [*order, order[0]],
    "no class": lambda order: [],
    "a number beyond": lambda order: [str(10**6), *order[1:]],
}
JSON_ORDERS: dict[str, Callable[[list[str]], str]] = {
    "null": lambda order: json.dumps([None, *order[1:]]),
    "true": lambda order: json.dumps([True, *order[1:]]),
    "half": lambda order: json.dumps([0.5, *order[1:]]),
    "lists": lambda order: json.dumps([[name] for name in order]),
    "cut off": lambda order: json.dumps(order)[:-1],
    "records": lambda order: json.dumps({"order": order}),
    "deep": lambda order: "[" * 100_000,
    "a long number": lambda order: "[" + "9" * 5000 + "]",
}


def _order(rng: random.Random, folder: Path) -> Call:
    """A file of a class order, right or with one fault."""
    from fcljax.data.order_files import read_order
    from fcljax.data.tasks import listed_order

    names = rng.sample(TEXTS, rng.randrange(2, 8))
    numeric = rng.random() < 0.3
    if numeric:
        names = [name for name in names if not name[0].isdecimal()] + ["cat", "dog"]
    truth = rng.sample(range(len(names)), len(names))
    order: list[Any] = [str(i) if numeric else names[i] for i in truth]
    fault = rng.random() < 0.5
    form = rng.choice(("lines", "commas", "json", "npy"))
    what = "as it is"
    text = ""
    if fault:
        what, change = _pick(rng, ORDER_FAULTS)
        order = change(order)
    if form == "lines":
        text = rng.choice(("\n", "\r\n", "\r", "\n\n", " \n")).join(order)
    elif form == "commas":
        stream = io.StringIO()
        csv.writer(stream, lineterminator=rng.choice(("\n", ""))).writerow(order)
        text = stream.getvalue()
    elif form == "json":
        text = json.dumps([int(name) for name in order] if numeric and not fault else order)
        if fault and rng.random() < 0.6:
            what, write = _pick(rng, JSON_ORDERS)
            text = write(order or ["a"])
    path = folder / rng.choice(("order", "order.txt", "order.npy", "order.json"))
    content = (rng.choice(("", "\ufeff")) + text).encode()
    if form == "npy":
        array = np.array([int(name) for name in order] if numeric and not fault else order)
        if fault and rng.random() < 0.6:
            faults = (array[:, None], np.arange(len(names)) / 2, np.array([None]), np.array("a"), array[:0])
            array = rng.choice(faults)
            what = f"{array.dtype} {array.shape}"
        stream_bytes = io.BytesIO()
        np.save(stream_bytes, array, allow_pickle=True)
        content = stream_bytes.getvalue()
    elif fault and rng.random() < 0.2:
        what, damage = _pick(rng, TEXT_FAULTS)
        content = damage(text)
    path.write_bytes(content)

    def call() -> str:
        read = listed_order(names, read_order(str(path), 1 << 20)).tolist()
        return "" if read == truth else f"{read}, not {truth}"

    # one class with a comma on a line of its own cannot be told from a list with commas
    return Call(f"class order, {form}: {what}", call, right=not fault)


# ---- data sets ---------------------------------------------------------------------------------------------


def _read_classes(name: str, cache: Path) -> tuple[dict[int, str], str]:
    """The class of each image that is read, by its level, and what the program says."""
    from rich.console import Console

    from fcljax.data.files.sources import DataOptions, load_dataset
    from fcljax.errors import InputError

    said = io.StringIO()
    try:
        found = load_dataset(name, DataOptions(data_dir=cache, console=Console(file=said, width=10_000)))
    except InputError as error:
        left = [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()]
        if left:
            raise RuntimeError(f"left behind: {left}") from error
        raise
    read: dict[int, str] = {}
    for images, labels in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        centre = np.asarray(images)[:, images.shape[1] // 2, images.shape[2] // 2, 0].astype(int)
        levels = np.rint(centre / 5).astype(int) * 5
        read |= {int(x): found.class_names[label] for x, label in zip(levels, labels, strict=True)}
    return read, said.getvalue()


def _data_call(kind: str, name: str, cache: Path, truth: dict[int, str] | None, either: bool = False) -> Call:
    """A data set whose images have these classes; None: it must be refused."""

    def call() -> str:
        read, said = _read_classes(name, cache)
        if truth is None:
            return "was taken"
        wrong = {level: label for level, label in read.items() if truth.get(level) != label}
        if wrong:
            return f"{len(wrong)} of {len(read)} images have a wrong class: {wrong}, not {truth}"
        silent = not any(word in said for word in ("left out", "not read", "skipped"))
        if len(read) < len(truth) and silent:
            return f"{len(truth) - len(read)} of {len(truth)} images were left out in silence"
        return ""

    return Call(kind, call, right=truth is not None and not either, either=either)


def _arrow_labels() -> dict[str, tuple[Callable[[list[int]], Any], Callable[[int], str] | None, bool]]:
    """Kind of labels -> (column, class of each number or None where it must be refused, may be refused)."""
    import datetime
    import decimal

    import pyarrow as pa

    number = str
    text = CLASSES.__getitem__
    day = datetime.date(2020, 1, 1)
    return {
        "int8": (lambda y: pa.array(y, pa.int8()), number, False),
        "uint64": (lambda y: pa.array(y, pa.uint64()), number, False),
        "large text": (lambda y: pa.array([text(k) for k in y], pa.large_string()), text, False),
        "text views": (lambda y: pa.array([text(k) for k in y], pa.string_view()), text, True),
        "a dictionary": (lambda y: pa.array([text(k) for k in y]).dictionary_encode(), text, False),
        "a dictionary of numbers": (lambda y: pa.array(y).dictionary_encode(), number, False),
        "lists of one": (lambda y: pa.array([[k] for k in y], pa.list_(pa.int64(), 1)), number, False),
        "large lists": (lambda y: pa.array([[k] for k in y], pa.large_list(pa.int64())), number, False),
        "booleans": (lambda y: pa.array([k % 2 == 1 for k in y]), lambda k: str(k % 2 == 1), True),
        "whole floats": (lambda y: pa.array([float(k) for k in y], pa.float32()), number, False),
        "decimals": (lambda y: pa.array([decimal.Decimal(k) for k in y]), number, True),
        "numbers far apart": (lambda y: pa.array([10**9 * k for k in y]), lambda k: str(10**9 * k), True),
        "text of numbers": (lambda y: pa.array([str(k) for k in y]), number, False),
        "structs": (lambda y: pa.array([{"id": k} for k in y]), None, False),
        "maps": (lambda y: pa.array([[(k, 1)] for k in y], pa.map_(pa.int64(), pa.int64())), None, False),
        "dates": (lambda y: pa.array([day + datetime.timedelta(k) for k in y]), None, False),
        "times": (lambda y: pa.array(y, pa.timestamp("s")), None, False),
        "durations": (lambda y: pa.array(y, pa.duration("s")), None, False),
        "no values": (lambda y: pa.nulls(len(y)), None, False),
        "halves": (lambda y: pa.array([k + 0.5 for k in y]), None, False),
        "infinity": (lambda y: pa.array([float("inf"), *map(float, y[1:])]), None, False),
        "beyond int64": (lambda y: pa.array([2**64 - 1 - k for k in y], pa.uint64()), None, True),
        "one null": (lambda y: pa.array([None, *y[1:]]), None, False),
        "several labels": (lambda y: pa.array([[k, k + 1] for k in y]), None, False),
        "empty lists": (lambda y: pa.array([[] for _ in y], pa.list_(pa.int64())), None, False),
    }


def _arrow_images() -> dict[str, tuple[Callable[[list[int]], Any], bool | None]]:
    """Kind of images -> (column, whether it must be read; None: it may be refused)."""
    import pyarrow as pa

    square = lambda x: np.full((8, 9), x)
    files = lambda x: [picture_file(k) for k in x]
    bytes_in = lambda x: [{"bytes": picture_file(k), "path": None, "size": 3} for k in x]
    fixed = lambda x: pa.array([square(k).tolist() for k in x], pa.list_(pa.list_(pa.uint8(), 9), 8))
    return {
        "lists": (lambda x: pa.array([square(k).tolist() for k in x]), True),
        "uint8 of fixed size": (fixed, True),
        "large lists": (
            lambda x: pa.array([square(k).tolist() for k in x], pa.large_list(pa.large_list(pa.int16()))),
            True,
        ),
        "half floats": (
            lambda x: pa.array([(square(k) / 255).tolist() for k in x], pa.list_(pa.list_(pa.float32()))),
            True,
        ),
        "large binary": (lambda x: pa.array(files(x), pa.large_binary()), True),
        "binary views": (lambda x: pa.array(files(x), pa.binary_view()), None),
        "a dictionary of files": (lambda x: pa.array(files(x)).dictionary_encode(), None),
        "structs with more": (lambda x: pa.array(bytes_in(x)), True),
        "one null": (lambda x: pa.array([None, *files(x)[1:]]), False),
        "one null list": (lambda x: pa.array([None, *(square(k).tolist() for k in x[1:])]), False),
        "one empty file": (lambda x: pa.array([b"", *files(x)[1:]]), False),
        "no values": (lambda x: pa.nulls(len(x)), False),
        "base64 text": (lambda x: pa.array(["iVBORw0KGgo=" for _ in x]), False),
        "lists of text": (lambda x: pa.array([[["a"]] for _ in x]), False),
        "lists of structs": (lambda x: pa.array([[{"bytes": b"a"}] for _ in x]), False),
        "empty lists": (lambda x: pa.array([[[]] for _ in x], pa.list_(pa.list_(pa.uint8()))), False),
        "16 bits": (lambda x: pa.array([(square(k) * 257).tolist() for k in x]), False),
        "dates": (lambda x: pa.array(x, pa.timestamp("s")), False),
    }


METADATA: dict[str, bytes] = {
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "null": b"null",
    "no features": b'{"info": null}',
    "features as a list": b'{"info": {"features": [1]}}',
    "features of text": b'{"info": {"features": {"label": "ClassLabel", "image": 3}}}',
    "names that are null": b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": null}}}}',
    "names that are text": b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": "ab"}}}}',
    "another column": b'{"info": {"features": {"kind": {"_type": "ClassLabel", "names": ["a"]}}}}',
    "deep": b'{"info": ' * 3000,
}


def _odd_table(rng: random.Random, folder: Path) -> Call:
    """Two tables of the hub of 12 examples each, with one odd column, or two that differ."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = [k % 3 for k in range(24)]
    label_kinds = _arrow_labels()
    image_kinds = _arrow_images()
    odd = rng.choice(("label", "label", "image", "image", "metadata", "columns", "differ", "file"))
    label_kind = rng.choice(list(label_kinds)) if odd == "label" else "int8"
    image_kind = rng.choice(list(image_kinds)) if odd == "image" else "lists"
    make_label, class_of, may_refuse = label_kinds[label_kind]
    make_image, must_read = image_kinds[image_kind]
    either = may_refuse or must_read is None
    refused = class_of is None or must_read is False
    kind = {"label": f"labels: {label_kind}", "image": f"images: {image_kind}"}.get(odd, odd)
    tables = []
    for part in (slice(0, 12), slice(12, 24)):
        columns = {"image": make_image(list(LEVELS[part])), "label": make_label(labels[part])}
        tables.append(pa.table(columns))
    if odd == "metadata":
        what, content = _pick(rng, METADATA)
        kind = f"metadata: {what}"
        either = True
        tables = [table.replace_schema_metadata({b"huggingface": content}) for table in tables]
    elif odd == "columns":
        extra: dict[str, Any] = {
            "client with nulls": ("client", pa.array([None, *("ab" * 6)[1:]])),
            "lists": ("boxes", pa.array([[1.0]] * 12)),
            "long text": ("caption", pa.array(["x" * 3000] * 12)),
            "an empty name": ("", pa.array(range(12))),
            "an index of pandas": ("__index_level_0__", pa.array(range(12))),
            "a name with blanks": ("my site", pa.array(range(12))),
            "dates": ("day", pa.array(range(12), pa.timestamp("s"))),
            "no values": ("none", pa.nulls(12)),
            "a name like an option": ("--help", pa.array(["\x1b[31m[/x]"] * 12)),
        }
        what, (name, column) = _pick(rng, extra)
        kind = f"columns: {what}"
        which = rng.choice((slice(0, 2), slice(0, 1), slice(1, 2)))
        for i in range(2)[which]:
            tables[i] = tables[i].append_column(name, column)
    elif odd == "differ":
        changes: dict[str, tuple[Callable[[Any], Any], bool]] = {
            "text in one": (
                lambda table: table.set_column(1, "label", pa.array([CLASSES[k] for k in labels[12:]])),
                False,
            ),
            "floats in one": (
                lambda table: table.set_column(1, "label", pa.array(map(float, labels[12:]))),
                True,
            ),
            "no label in one": (lambda table: table.drop_columns(["label"]), False),
            "capitals in one": (lambda table: table.rename_columns(["Image", "Label"]), False),
            "files in one": (
                lambda table: table.set_column(0, "image", pa.array([picture_file(k) for k in LEVELS[12:]])),
                True,
            ),
            "nothing in one": (lambda table: table.slice(0, 0), False),
            "one class less in one": (lambda table: table.slice(0, 2), True),
            "another class in one": (lambda table: table.set_column(1, "label", pa.array([7] * 12)), True),
        }
        what, (change, readable) = _pick(rng, changes)
        kind = f"two tables: {what}"
        either = readable
        refused = not readable
        tables[1] = change(tables[1])
        if what == "another class in one":
            labels[12:] = [7] * 12
        if what == "one class less in one":
            labels = labels[:14]
    compression = rng.choice(("snappy", "gzip", "zstd", "brotli", "none"))
    for table, name in zip(tables, ("train", "test"), strict=True):
        path = folder / "set" / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        if rng.random() < 0.6:
            pq.write_table(table, path, compression=compression, data_page_version=rng.choice(("1.0", "2.0")))
        else:
            with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as sink:
                options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, "lz4", "zstd")))
                with pa.ipc.new_file(sink, table.schema, options=options) as writer:
                    writer.write_table(table)
    if odd == "file":
        kind, refused = _damaged_table(rng, folder / "set")
    truth = None
    if not refused and class_of is not None:
        truth = {level: class_of(k) for level, k in zip(LEVELS, labels, strict=False)}
    return _data_call(f"table: {kind}", f"hf:{folder / 'set'}", folder / "cache", truth, either)


def _damaged_table(rng: random.Random, folder: Path) -> tuple[str, bool]:
    """Damage one of the tables; return how, and whether it must be refused."""
    path = rng.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    kinds: dict[str, bytes] = {
        "empty": b"",
        "cut off": content[: rng.randrange(1, len(content))],
        "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        "HTML": b"<html>404</html>",
        "CSV": b"image,label\na.png,1\n",
        "zeros": bytes(len(content)),
        "magic alone": b"PAR1" + bytes(80) + b"PAR1",
    }
    what, damage = _pick(rng, kinds)
    path.write_bytes(damage)
    return f"file: {what}", True


# ---- folders and lists -------------------------------------------------------------------------------------

ODD_NAMES = (
    "a b",
    "Ünal",
    "e\u0301",
    "[x]",
    "$x$",
    "-rf",
    "%s",
    "10",
    "9",
    "x" * 200,
    "a'b",
    "Cat",
    "cat",
    "\u6f22",
)


def _images(folder: Path, names: Sequence[str]) -> dict[int, str]:
    """Write folders of two splits and these classes; return the class of each level."""
    truth = {}
    for place, level in enumerate(LEVELS):
        split = "train" if place < 12 else "test"
        name = names[place % len(names)]
        path = folder / split / name / f"{level}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture_file(level))
        truth[level] = name
    return truth


def _odd_folder(rng: random.Random, folder: Path) -> Call:
    """A tree of folders with one oddity."""
    root = folder / "set"
    names = rng.sample(ODD_NAMES, 3)
    truth: dict[int, str] | None = _images(root, names)
    some = root / "train" / names[0]
    image = root / "train" / names[0] / f"{LEVELS[0]}.png"
    kinds: dict[str, tuple[Callable[[], object], bool | None]] = {
        "as it is": (lambda: None, True),
        "an empty folder in a class": (lambda: (some / "empty").mkdir(), True),
        "a hidden folder": (lambda: (root / "train" / ".git").mkdir(), True),
        "a hidden image": (lambda: (some / "._1.png").write_bytes(b"x"), True),
        "an empty class": (lambda: (root / "train" / "none").mkdir(), None),
        "what macOS adds": (lambda: _file_in(root / "__MACOSX" / "train" / "._1.png"), None),
        "what macOS adds among classes": (lambda: _file_in(root / "train" / "__MACOSX" / "._1.png"), None),
        "a folder by a link": (lambda: _moved(some, folder / "elsewhere"), True),
        "an image by a link": (lambda: _moved(image, folder / "1.png"), True),
        "a circle of links": (lambda: (some / "again").symlink_to(root / "train"), None),
        "a circle in itself": (lambda: (some / "again").symlink_to(some), None),
        "a link to nothing": (lambda: (some / "none.png").symlink_to(folder / "none"), None),
        "a pipe": (lambda: os.mkfifo(some / "pipe.png"), None),
        "a folder called like an image": (lambda: (some / "a.png").mkdir(), True),
        "an empty image": (lambda: image.write_bytes(b""), False),
        "text as an image": (lambda: image.write_text("no image"), False),
        "half an image": (lambda: image.write_bytes(picture_file(20)[:30]), False),
        "an SVG": (lambda: image.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>"), False),
        "16 bits": (lambda: image.write_bytes(_mode("I;16")), None),
        "transparency": (lambda: image.write_bytes(_mode("RGBA")), None),
        "a palette": (lambda: image.write_bytes(_mode("P")), True),
        "grey": (lambda: image.write_bytes(_mode("L")), True),
        "other sizes": (lambda: image.write_bytes(_mode("L", (31, 17))), True),
        "a class in one split": (lambda: _file_in(root / "test" / "eel" / "1.png", picture_file(250)), False),
        "no test": (lambda: (root / "test").rename(root / "other"), False),
        "two tests": (lambda: (root / "Test").mkdir(), None),
        "a file for a split": (lambda: _replaced(root / "test"), False),
        "stray images": (lambda: (root / "train" / "stray.png").write_bytes(picture_file(250)), True),
    }
    kind, (change, must_read) = _pick(rng, kinds)
    change()
    if must_read is False:
        truth = None
    return _data_call(
        f"folder: {kind}, {names}", f"folder:{root}", folder / "cache", truth, either=must_read is None
    )


def _file_in(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _moved(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def _replaced(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.write_text("no folder")


def _mode(mode: str, size: tuple[int, int] = (8, 8)) -> bytes:
    """The first image in another mode or size."""
    from PIL import Image

    stream = io.BytesIO()
    if mode == "I;16":
        image = Image.fromarray(np.full(size, LEVELS[0] * 257, np.uint16))
    else:
        image = Image.fromarray(np.full((*size, 3), LEVELS[0], np.uint8))
        image = image.quantize(4) if mode == "P" else image.convert(mode)
    image.save(stream, "PNG")
    return stream.getvalue()


def _odd_list(rng: random.Random, folder: Path) -> Call:
    """A list of images with one oddity."""
    root = folder / "set"
    truth: dict[int, str] | None = {}
    rows = []
    for place, level in enumerate(LEVELS):
        _file_in(root / "images" / f"{level}.png", picture_file(level))
        rows.append([f"images/{level}.png", CLASSES[place % 3], "train" if place < 12 else "test"])
        truth = (truth or {}) | {level: CLASSES[place % 3]}
    head = ["path", "label", "split"]
    first = rows[0]
    kinds: dict[str, tuple[Callable[[], object], bool | None]] = {
        "as it is": (lambda: None, True),
        "absolute paths": (lambda: first.__setitem__(0, str(root / first[0])), True),
        "a dot": (lambda: first.__setitem__(0, f"./{first[0]}"), True),
        "a way round": (lambda: first.__setitem__(0, f"images/../{first[0]}"), True),
        "twice in another spelling": (lambda: rows.append([f"./{first[0]}", *first[1:]]), False),
        "twice with another label": (lambda: rows.append([f"./{first[0]}", CLASSES[1], "test"]), False),
        "backslashes": (lambda: first.__setitem__(0, first[0].replace("/", "\\")), False),
        "other names of columns": (
            lambda: head.__setitem__(slice(None), ["Image_Path", "Class_Name", "Set"]),
            True,
        ),
        "another column": (lambda: [row.append("x") for row in [head, *rows]], None),
        "a column without a name": (lambda: [row.append("") for row in [head, *rows]], None),
        "other names of splits": (lambda: [row.__setitem__(2, "Training") for row in rows[:12]], True),
        "an unknown split": (lambda: first.__setitem__(2, "query"), False),
        "no split in one line": (lambda: first.__setitem__(2, ""), False),
        "a comment": (lambda: rows.insert(0, ["# mine"]), False),
        "a NUL": (lambda: first.__setitem__(0, "images/\0.png"), False),
        "a folder": (lambda: first.__setitem__(0, "images"), False),
        "a pipe": (lambda: (os.mkfifo(root / "pipe.png"), first.__setitem__(0, "pipe.png")), False),
        "a device": (lambda: first.__setitem__(0, "/dev/zero"), False),
        "an address": (lambda: first.__setitem__(0, "https://example.org/a.png"), False),
        "no label": (lambda: first.__setitem__(1, ""), False),
        "a negative label": (lambda: first.__setitem__(1, "-1"), False),
        "no path": (lambda: first.__setitem__(0, ""), False),
        "a class in one split": (lambda: rows[-1].__setitem__(1, "eel"), False),
        "no rows": (lambda: rows.clear(), False),
        "a long label": (lambda: first.__setitem__(1, "x" * 5000), False),
        "a label of two lines": (lambda: first.__setitem__(1, "a\nb"), False),
        "a column twice": (lambda: head.__setitem__(2, "class"), False),
    }
    kind, (change, must_read) = _pick(rng, kinds)
    change()
    separator = rng.choice((",", ";", "\t", " "))
    stream = io.StringIO()
    csv.writer(stream, delimiter=separator, lineterminator=rng.choice(("\n", "\r\n"))).writerows(
        [head, *rows]
    )
    (root / "all.txt").write_text(stream.getvalue(), encoding=rng.choice(("utf-8", "utf-8-sig")))
    if must_read is False:
        truth = None
    # empty values vanish between blanks
    either = must_read is None or (separator == " " and kind == "another column")
    return _data_call(
        f"list: {kind}, {separator!r}", f"list:{root / 'all.txt'}", folder / "cache", truth, either
    )


# ---- run folders of other programs -------------------------------------------------------------------------

_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
FOREIGN_YAML: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"- 1\n- 2\n",
    "a number": b"3\n",
    "Hydra": b"defaults:\n  - model: resnet\nhydra:\n  run:\n    dir: outputs\n",
    "Lightning": b"trainer:\n  max_epochs: 3\nmodel:\n  class_path: mine.Net\n",
    "a program": b"!!python/object/apply:os.system ['touch ran']\n",
    "two documents": b"method: linear\n---\nmethod: fppl\n",
    "a billion laughs": _LAUGHS.encode(),
    "a billion laughs as a value": (_LAUGHS + "method: *i\n").encode(),
    "an alias of itself": b"method: &a [*a]\n",
    "a date": b"method: linear\nrounds: 2023-01-01\n",
    "sixties": b"method: linear\nrounds: 1:30\n",
    "off": b"method: linear\nrounds: off\n",
    "a tab": b"method:\tlinear\n\trounds: 3\n",
    "a key twice": b"method: linear\nrounds: 2\nrounds: 3\n",
    "a key that is no text": b"? [1, 2]\n: 3\n",
    "null": b"method: null\n",
    "a method that is a list": b"method: [linear]\n",
    "a method that is a record": b"method: {name: linear}\n",
    "an unknown method": b"method: linera\n",
    "an unknown key": b"method: linear\nepocks: 2\n",
    "a large number": b"method: linear\nrounds: " + b"9" * 5000 + b"\n",
    "infinity": b"method: linear\nlr: .inf\n",
    "NaN": b"method: linear\nlr: .nan\n",
    "binary": b"method: !!binary aGVsbG8=\n",
    "UTF-16": "method: linear\n".encode("utf-16"),
    "a NUL": b"method: linear\0\n",
    "deep": b"method: " + b"[" * 3000,
}
FOREIGN_JSON: dict[str, bytes] = {
    "a trainer's state": b'{"best_metric": 0.9, "global_step": 3, "log_history": [{"loss": 1.0}]}',
    "W&B": b'{"_runtime": 3, "_step": 2, "accuracy": 0.8, "_wandb": {"runtime": 3}}',
    "LEAF": b'{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [0]}}}',
    "a list": b'[{"accuracy": 0.3}]',
    "text": b'"done"',
    "accuracy as text": b'{"method": "linear", "A": ["0.9"], "A_last": "0.9", "accuracy": [["0.9"]]}',
    "percent": b'{"method": "linear", "A": [90], "A_last": 90, "accuracy": [[90]]}',
    "a ragged matrix": b'{"method": "linear", "A": [0.9, 0.8], "accuracy": [[0.9], [0.8, 0.7, 0.6]]}',
    "null": b'{"method": null, "A": null, "A_last": null, "accuracy": null}',
    "NaN": b'{"method": "linear", "A": [NaN], "A_last": NaN, "accuracy": [[NaN]]}',
    "a key twice": b'{"method": "linear", "A_last": 0.1, "A_last": 0.9}',
    "deep": b"[" * 100_000,
    "UTF-16": '{"A_last": 0.5}'.encode("utf-16"),
}


# field of a summary -> values that no run writes
WRONG_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("A_last", "A_avg"), (True, "0.8", 95.0, -0.5, [0.8], {}, float("nan"))),
    **dict.fromkeys(("A", "class_accuracy"), (0.8, "a", [95.0], [-0.5], [True], [[0.8]], {"a": 0.8})),
    "accuracy": (None, [], [0.8], [[0.8], [0.7]], [[-0.1]], [[2.0]], [["0.5"]]),
    "forgetting": (None, 0.1, {}, {"paper": "0.1", "released": 0.1, "diagonal": 0.1}),
    "seed": (None, "1", 1.5, True, [1]),
    **dict.fromkeys(("method", "dataset", "backbone", "fidelity"), (None, 3, [], {})),
    "trainable_params": (None, "650", -1, True, float("inf")),
    "client_state": (3, {"bytes": -1}, {"bytes": "12"}, [12]),
    "communication_total": (3, {}, {"upload_bytes": -1, "download_bytes": 1}, {"upload_bytes": 1}),
    "time": (None, 3.6, {"client_s": "2"}, {"compile_s": -1.0}),
    "client_images_per_s": ("9.5", -1.0, True, [9.5]),
    "class_names": ("cat", [1, 2], {"a": "b"}),
    "config": (None, "lr", [1], {"lr": float("nan")}),
}


def _wrong_summary(rng: random.Random, folder: Path) -> Call:
    """`compare` or `report` on two runs, of which one has a field that no run writes."""
    name, values = _pick(rng, WRONG_FIELDS)
    value = rng.choice(values)
    wrong = whole_summary() | {"seed": 2, name: value}
    for number, summary in (("1", whole_summary()), ("2", wrong)):
        _file_in(folder / "r" / number / "summary.json", json.dumps(summary).encode())
    return _refused_command(f"summary: {name} is {value!r}", folder, [rng.choice(("compare", "report")), "r"])


def _foreign_run(rng: random.Random, folder: Path) -> Call:
    """`run --resume`, `compare` or `report` on a folder that another program wrote."""
    run = folder / "r"
    command = rng.choice(("run", "run", "compare", "report"))
    content: dict[str, bytes] = {}
    if command == "run":
        kind, content["config.yaml"] = _pick(rng, FOREIGN_YAML)
        arguments = ["run", "linear", "--resume", str(run)]
    else:
        kind, content["summary.json"] = _pick(rng, FOREIGN_JSON)
        arguments = [command, str(run)]
        content["metrics.jsonl"] = rng.choice((b"", b"{", b"[]\n", b'{"loss": "low"}\n', b"\xff\n", b"1\n"))
        if rng.random() < 0.5:
            content["config.yaml"] = rng.choice(list(FOREIGN_YAML.values()))
    for name, data in content.items():
        _file_in(run / name, data)
    return _refused_command(f"{command} in a run folder: {kind}", folder, arguments)


def _refused_command(kind: str, folder: Path, arguments: list[str]) -> Call:
    """A command in a folder, which must end with one line and leave nothing."""
    before = sorted(folder.rglob("*"))

    def call() -> str:
        with contextlib.chdir(folder):
            code, _, err = called(*arguments)
        left = [path.name for path in sorted(folder.rglob("*")) if path not in before]
        if code == 0:
            return "was taken"
        if code == 2 and one_line(err) and len(err) < 8000 and not left:
            return ""
        raise RuntimeError(f"exit code {code}, left {left}: {err[-400:]}")

    return Call(kind, call, right=True)


GENERATORS: tuple[Callable[[random.Random, Path], Call], ...] = (
    _partition,
    _partition,
    _partition,
    _order,
    _order,
    _odd_table,
    _odd_table,
    _odd_table,
    _odd_folder,
    _odd_folder,
    _odd_list,
    _odd_list,
    _foreign_run,
    _wrong_summary,
)
