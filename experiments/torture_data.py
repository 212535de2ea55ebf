"""Data sets as people have them, right and wrong, for experiments/torture.py.

Tables of the hub, folders, lists and .npz files from generators. Each image has one grey level, which tells
its true class. What must be read is read with the right classes, or the trial failed; what must be refused
ends with exit code 2 and one line, with nothing left behind. Images that are not read must be counted in what
the program says.
"""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MOST = 40  # images of a data set
STEP = 5  # between the levels of images: JPEG moves them by less
CLASSES = ("ant", "bee", "cat", "dog")


class Data(NamedTuple):
    """A data set, and how it should be taken."""

    kind: str
    """What is odd about it."""
    name: str
    """As `--dataset` has it, in the folder of the files."""
    files: dict[str, bytes]
    truth: dict[int, str] | None
    """Level of each image -> its class; None: it must be refused."""
    options: tuple[str, ...] = ()


class _Image(NamedTuple):
    """What an example is."""

    level: int
    label: int


def _examples(rng: random.Random, count: int, first: int, classes: int) -> list[_Image]:
    """Examples of all classes, with levels from the number `first` on."""
    assert first + count <= MOST, first
    labels = [*range(classes), *(rng.randrange(classes) for _ in range(count - classes))]
    rng.shuffle(labels)
    return [_Image(STEP * (first + i) + 18, label) for i, label in enumerate(labels)]


def picture_file(level: int, kind: str = "PNG") -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(stream, kind, **options)
    return stream.getvalue()


# ---- tables of the hub -------------------------------------------------------------------------------------

READ_IMAGES: dict[str, Callable[[int], object]] = {
    "files": lambda x: {"bytes": picture_file(x), "path": "a.png"},
    "bytes": picture_file,
    "grey lists": lambda x: np.full((8, 9), x).tolist(),
    "colour lists": lambda x: np.full((8, 9, 3), x).tolist(),
    "channels first": lambda x: np.full((3, 8, 9), x).tolist(),
    "floats": lambda x: np.full((8, 9), x / 255).tolist(),
}
WRONG_IMAGES: dict[str, Callable[[int], object]] = {
    "transparency": lambda x: np.full((8, 9, 4), x).tolist(),
    "16 bits": lambda x: np.full((8, 9), 257 * x).tolist(),
    "flat": lambda x: np.full(64, x).tolist(),
    "levels to 16": lambda x: np.full((8, 9), x % 17).tolist(),
    "negative": lambda x: np.full((8, 9), -x).tolist(),
    "floats to 255": lambda x: np.full((8, 9), float(x)).tolist(),
    "standardised": lambda x: np.full((8, 9), x / 255 - 0.5).tolist(),
    "NaN": lambda x: np.full((8, 9), np.nan).tolist(),
    "ragged": lambda x: [[x, x], [x]],
    "holes": lambda x: [[x, None], [x, x]],
    "videos": lambda x: np.full((2, 8, 9, 3), x).tolist(),
    "no images": lambda x: [],
    "paths": lambda x: "images/a.png",
    "paths in structs": lambda x: {"bytes": None, "path": "a.png"},
    "noise": lambda x: bytes([x]) * 50,
    "cut off": lambda x: picture_file(x)[:40],
    "numbers": lambda x: x,
}
READ_LABELS: dict[str, Callable[[int, list[str]], object]] = {
    "numbers": lambda y, names: y,
    "text": lambda y, names: names[y],
    "bytes": lambda y, names: names[y].encode(),
    "floats": lambda y, names: float(y),
    "lists": lambda y, names: [y],
    "one-hot": lambda y, names: [int(k == y) for k in range(len(names))],
}
WRONG_LABELS: dict[str, Callable[[int, list[str]], object]] = {
    "halves": lambda y, names: y + 0.5,
    "several": lambda y, names: [1 for _ in names],
    "structs": lambda y, names: {"name": names[y]},
    "nothing": lambda y, names: None,
    "negative": lambda y, names: -1 - y,
    "no UTF-8": lambda y, names: b"\xff" + names[y].encode(),
    "lists of several lengths": lambda y, names: [0] * (y + 1),
}
MISSING = (None, -1, -100)


class _Shard(NamedTuple):
    """A table before it is written."""

    split: str
    examples: list[_Image]
    names: list[str]
    """Of the classes, in this table's order."""


def _table(rng: random.Random) -> Data:
    """Tables, of which at most one thing is wrong."""
    import pyarrow as pa

    classes = rng.randrange(2, 5)
    image = rng.choice(list(READ_IMAGES))
    label = rng.choice(list(READ_LABELS))
    named = label in ("numbers", "lists") and rng.random() < 0.6
    shards = _shards(rng, classes, shuffled=named)
    wrong = rng.choice(("", "", "image", "label", "missing", "column", "twice", "empty", "file", "number"))
    make_image = READ_IMAGES[image]
    make_label = READ_LABELS[label]
    kind = f"{image}, labels as {label}{' with names' if named else ''}"
    if wrong == "image":
        kind = f"images: {(image := rng.choice(list(WRONG_IMAGES)))}"
        make_image = WRONG_IMAGES[image]
    if wrong == "label":
        kind = f"labels: {(label := rng.choice(list(WRONG_LABELS)))}"
        make_label = WRONG_LABELS[label]
        named = False
    written = label == "text" or label == "bytes" or named
    files = {}
    truth = {}
    odd = rng.randrange(len(shards))
    for number, shard in enumerate(shards):
        labels = [make_label(shard.names.index(CLASSES[each.label]), shard.names) for each in shard.examples]
        images = [make_image(each.level) for each in shard.examples]
        if wrong == "missing" and number == odd and label in ("numbers", "text"):
            labels[rng.randrange(len(labels))] = rng.choice(MISSING if label == "numbers" else (None, ""))
        if wrong == "number" and number == odd and label == "numbers" and named:
            labels[rng.randrange(len(labels))] = classes + 3
        arrays = {"image": pa.array(images), "label": pa.array(labels)}
        if wrong == "column" and number == odd:
            arrays["kind"] = arrays.pop(rng.choice(("image", "label")))
        if wrong == "empty" and shard.split == "test":
            arrays = {name: values[:0] for name, values in arrays.items()}
        columns = [*arrays, *(["label"] if wrong == "twice" and number == odd else [])]
        table = pa.table([arrays[name] for name in columns], names=columns)
        content, end = _written(rng, table, shard.names if named else None, wrong == "twice")
        if wrong == "file" and number == odd:
            content = rng.choice(
                (content[: len(content) // 2], b"", rng.randbytes(90), b"PAR1" + content[4:90])
            )
        files[f"set/{shard.split}-{number}.{end}"] = content
        truth |= {each.level: CLASSES[each.label] if written else str(each.label) for each in shard.examples}
    applied = {
        "missing": label in ("numbers", "text"),
        "number": label == "numbers" and named,
        "empty": any(shard.split == "test" for shard in shards),
        "column": True,
    }
    broken = wrong in ("image", "label", "twice", "file") or applied.get(wrong, False)
    if wrong and broken:
        kind = f"{wrong}: {kind}"
    return Data(f"table: {kind}", "hf:set", files, None if broken else truth)


def _shards(rng: random.Random, classes: int, shuffled: bool) -> list[_Shard]:
    splits = rng.choice((["train", "test"], ["train", "train", "test"], ["train", "validation"], ["train"]))
    shards = []
    first = 0
    for split in splits:
        # a random fifth of a few examples might lack a class
        count = rng.randrange(classes, 13) if len(splits) > 1 else 36
        examples = _examples(rng, count, first, classes)
        first += count
        names = list(CLASSES[:classes])
        if shuffled:
            rng.shuffle(names)
        shards.append(_Shard(split, examples, names))
    return shards


def _written(rng: random.Random, table: Any, names: list[str] | None, twice: bool) -> tuple[bytes, str]:
    """A table as a file, and the end of its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if names:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    sink = io.BytesIO()
    kind = rng.choice(("stream", "file") if twice else ("parquet", "parquet", "stream", "file"))
    if kind == "parquet":
        pq.write_table(table, sink, row_group_size=rng.randrange(1, 40))
        return sink.getvalue(), "parquet"
    open_writer = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rng.randrange(1, 40))
    return sink.getvalue(), "arrow"


# ---- folders -----------------------------------------------------------------------------------------------

KINDS = {
    ".png": "PNG",
    ".PNG": "PNG",
    ".jpg": "JPEG",
    ".jfif": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".gif": "GIF",
}


def _folder(rng: random.Random) -> Data:
    """A tree of folders, of which at most one thing is wrong."""
    classes = rng.randrange(2, 5)
    splits = rng.choice(
        (["train", "test"], ["train", "val"], ["Train", "Valid"], ["train", "test", "val"], [""])
    )
    sites = rng.choice(([""], [""], ["lyon", "rome"]))
    below = rng.choice(("", "", "more", "more/deep"))
    wrong = rng.choice(("", "", "", "images", "empty", "class", "broken", "only", "stray"))
    files = {}
    truth = {}
    first = 0
    # images of each class that a random fifth hardly lacks
    count = MOST // len(splits) // len(sites)
    for split in splits:
        for site in sites:
            for place, each in enumerate(_examples(rng, count, first, classes)):
                first += 1
                suffix = rng.choice(list(KINDS))
                inside = below if place % 2 else ""
                inner = "images" if wrong == "images" else inside
                parts = [
                    split,
                    "" if wrong == "images" else site,
                    CLASSES[each.label],
                    inner,
                    f"{each.level}{suffix}",
                ]
                files["/".join(part for part in ("set", *parts) if part)] = picture_file(
                    each.level, KINDS[suffix]
                )
                if split != "val" or "test" not in splits:
                    truth[each.level] = CLASSES[each.label]
    for _ in range(rng.randrange(3)):
        name = rng.choice(list(files))
        files[
            f"{name.rsplit('/', 1)[0]}/{rng.choice(('notes.txt', 'a.tif', '.hidden.png', 'Thumbs.db'))}"
        ] = b"x"
    names = sorted(name for name in files if name.rsplit("/", 1)[1][0].isdigit())
    name = rng.choice([name for name in names if "/val/" not in name or "test" not in splits])
    site = name.split(f"/{_class(name)}/")[0]
    if wrong == "empty":
        empty = f"{site}/{_class(name)}/"
        files = {each: content for each, content in files.items() if not each.startswith(empty)}
        files[f"{empty}notes.txt"] = b""
    elif wrong == "class":
        files[f"{site}/eel/1.png"] = picture_file(250)
    elif wrong == "broken":
        files[name] = rng.choice((b"", b"text", files[name][:20]))
    elif wrong == "only":
        first_split = splits[0] or "train"
        files = {
            each.replace(f"set/{first_split}/", "set/other/"): content for each, content in files.items()
        }
    elif wrong == "stray" and len(sites) > 1:
        files[f"{site}/map.png"] = picture_file(250)
    fine = not wrong or (wrong == "stray" and len(sites) == 1) or (wrong == "only" and splits == [""])
    kind = f"folder: {wrong or 'as it is'}, splits {splits}, sites {sites}, below {below!r}"
    return Data(kind, "folder:set", files, truth if fine else None)


def _class(name: str) -> str:
    return next(part for part in name.split("/") if part in CLASSES)


# ---- lists -------------------------------------------------------------------------------------------------


def _list(rng: random.Random) -> Data:
    """A list of images, of which at most one thing is wrong."""
    classes = rng.randrange(2, 5)
    examples = _examples(rng, 36, 0, classes)
    text = rng.random() < 0.5
    files = {f"set/images/{each.level}.png": picture_file(each.level) for each in examples}
    separator = rng.choice((",", ", ", " ", "   ", "\t", ";"))
    header = rng.random() < 0.5
    names = ["path", "label", "client"] if rng.random() < 0.5 else ["path", "label"]
    rows = []
    for i, each in enumerate(examples):
        label = CLASSES[each.label] if text else str(each.label)
        rows.append([f"images/{each.level}.png", label, f"u{i % 3}"][: len(names)])
    wrong = rng.choice(
        ("", "", "", "short", "gone", "twice", "no label", "negative", "split", "quote", "bytes")
    )
    row = rng.randrange(1, len(rows))
    if wrong == "short":
        rows[row] = rows[row][:1]
    elif wrong == "gone":
        rows[row][0] = "images/none.png"
    elif wrong == "twice":
        rows[row][0] = rows[0][0]
    elif wrong in ("no label", "negative"):
        rows[row][1] = '""' if wrong == "no label" else "-1"
    elif wrong == "quote":
        rows[row][1] = '"' + rows[row][1]
    elif wrong == "split":
        names = [*names, "split"]
        header = True
        rows = [[*each, "train" if i else "other"] for i, each in enumerate(rows)]
    columns = list(range(len(names)))
    if header:
        rng.shuffle(columns)
    lines = [
        [each[i] if i < len(each) else "" for i in columns if i < len(each)]
        for each in ([names] if header else []) + rows
    ]
    if wrong == "short":
        lines[row + header] = rows[row]
    end = rng.choice(("\n", "\r\n", "\r"))
    content = (
        rng.choice(("", "\ufeff")) + end.join(separator.join(line) for line in lines) + rng.choice(("", end))
    )
    files["set/all.txt"] = content.encode() + (b"\xff" if wrong == "bytes" else b"")
    truth = {each.level: CLASSES[each.label] if text else str(each.label) for each in examples}
    kind = f"list: {wrong or 'as it is'}, {separator!r}, {names}, header {header}"
    return Data(kind, "list:set/all.txt", files, truth if not wrong else None)


# ---- arrays ------------------------------------------------------------------------------------------------

READ_ARRAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grey": lambda x: x,
    "one channel": lambda x: x[..., None],
    "colour": lambda x: np.repeat(x[..., None], 3, -1),
    "channels first": lambda x: np.repeat(x[:, None], 3, 1),
    "floats": lambda x: x / 255,
    "short floats": lambda x: (x / 255).astype(np.float16),
}
WRONG_ARRAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda x: x.reshape(len(x), -1),
    "transparency": lambda x: np.repeat(x[..., None], 4, -1),
    "16 bits": lambda x: x.astype(np.uint16) * 257,
    "whole numbers": lambda x: x.astype(int),
    "floats to 255": lambda x: x.astype(float),
    "standardised": lambda x: x / 255 - 0.5,
    "NaN": lambda x: np.where(x > 60, np.nan, x / 255),
    "text": lambda x: x.astype(str),
    "objects": lambda x: x.astype(object),
    "one image less": lambda x: x[1:],
    "none": lambda x: x[:0],
}
ARRAY_LABELS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "numbers": lambda y, classes: y,
    "a column": lambda y, classes: y[:, None],
    "bytes": lambda y, classes: y.astype(np.uint8),
    "text": lambda y, classes: np.array(CLASSES)[y],
    "one-hot": lambda y, classes: np.eye(classes)[y],
}
WRONG_ARRAY_LABELS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "floats": lambda y, classes: y + 0.0,
    "negative": lambda y, classes: y - 1,
    "several": lambda y, classes: np.ones((len(y), classes), int),
    "probabilities": lambda y, classes: np.full((len(y), classes), 1 / classes),
    "booleans": lambda y, classes: y > 0,
    "a row": lambda y, classes: y[None],
    "objects": lambda y, classes: y.astype(object),
    "one less": lambda y, classes: y[1:],
    "empty text": lambda y, classes: np.array(["", *CLASSES[1:]])[y],
}


def _npz(rng: random.Random) -> Data:
    """A .npz file, of which at most one array is wrong."""
    classes = rng.randrange(2, 5)
    keys = rng.choice((("x_{}", "y_{}"), ("X_{}", "y_{}"), ("{}_images", "{}_labels")))
    image = rng.choice(list(READ_ARRAYS))
    label = rng.choice(list(ARRAY_LABELS))
    wrong = rng.choice(("", "", "image", "label", "key", "ways", "file"))
    arrays: dict[str, Any] = {}
    truth = {}
    first = 0
    odd = rng.choice(("train", "test"))
    kind = f"{image}, labels as {label}, {keys[0]}"
    for split in ("train", rng.choice(("test", "val"))):
        examples = _examples(rng, 12, first, classes)
        first += 12
        x = np.stack([np.full((8, 9), each.level, np.uint8) for each in examples])
        y = np.array([each.label for each in examples])
        images = READ_ARRAYS[image](x)
        labels = ARRAY_LABELS[label](y, classes)
        hit = odd == split or (odd == "test" and split == "val")
        if hit and wrong == "image":
            kind = f"images: {(which := rng.choice(list(WRONG_ARRAYS)))}"
            images = WRONG_ARRAYS[which](x)
        if hit and wrong == "label":
            kind = f"labels: {(which := rng.choice(list(WRONG_ARRAY_LABELS)))}"
            labels = WRONG_ARRAY_LABELS[which](y, classes)
        if hit and wrong == "ways":
            labels = np.array(CLASSES)[y] if label != "text" else y
        arrays[keys[0].format(split)] = images
        if not (hit and wrong == "key"):
            arrays[keys[1].format(split)] = labels
        text = label == "text"
        truth |= {each.level: CLASSES[each.label] if text else str(each.label) for each in examples}
    stream = io.BytesIO()
    rng.choice((np.savez, np.savez_compressed))(stream, **arrays)
    content = stream.getvalue()
    if wrong == "file":
        content = rng.choice((content[: len(content) // 2], b"", rng.randbytes(90)))
    return Data(f"npz: {wrong} {kind}", "npz:set.npz", {"set.npz": content}, None if wrong else truth)


GENERATORS: tuple[Callable[[random.Random], Data], ...] = (_table, _table, _folder, _list, _npz)


# ---- what was read -----------------------------------------------------------------------------------------


def misread(data: Data, folder: Path, said: str) -> str:
    """What is wrong with the data set that was read in `folder`; "" if nothing is."""
    from rich.console import Console

    from fcljax.data.files.sources import DataOptions, load_dataset

    kind, _, path = data.name.partition(":")
    options = DataOptions(data_dir=folder / "cache", console=Console(file=io.StringIO()))
    found = load_dataset(f"{kind}:{folder / path}", options)
    read: dict[int, str] = {}
    for images, labels in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        levels = np.rint((np.asarray(images)[:, 4, 4, 0].astype(int) - 18) / STEP).astype(int) * STEP + 18
        read |= {int(x): found.class_names[label] for x, label in zip(levels, labels, strict=True)}
    truth = data.truth or {}
    wrong = {level: name for level, name in read.items() if truth.get(level) != name}
    if wrong:
        return f"{len(wrong)} of {len(read)} images have a wrong class: {wrong}, not {truth}"
    if len(read) < len(truth) and not any(word in said for word in ("left out", "not read", "skipped")):
        return f"{len(truth) - len(read)} of {len(truth)} images were left out in silence"
    return ""
