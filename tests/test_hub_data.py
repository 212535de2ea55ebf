"""`--dataset hf:NAME`: image data sets of the Hugging Face hub, in parquet and arrow files."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fcljax import cli
from fcljax.data.files import arrow_files, sources
from fcljax.data.files.sources import DataOptions, load_dataset
from fcljax.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CLASSES = ["cat", "dog", "emu"]
RNG = np.random.default_rng(0)


def encoded(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def table(count, labels=None, features=True, **columns):
    """Images as the hub's library stores them, their labels and other columns."""
    pixels = RNG.integers(0, 256, (count, 8, 8, 3), np.uint8)
    labels = [i % 3 for i in range(count)] if labels is None else labels
    images = [{"bytes": encoded(x), "path": f"{i}.png"} for i, x in enumerate(pixels)]
    made = pa.table({"image": images, "label": labels, **columns})
    if features:
        said = {"image": {"_type": "Image"}, "label": {"names": CLASSES, "_type": "ClassLabel"}}
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": said}})})
    return made, pixels


def load(name, folder):
    return load_dataset(f"hf:{name}", DataOptions(data_dir=folder / "data"))


def arrow(made, path):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_images_labels_names_and_columns_are_those_of_the_files(tmp_path, kind):
    root = tmp_path / "own"
    root.mkdir()
    parts = [table(7, site=[f"s{i % 2}" for i in range(7)]), table(5, site=["s2"] * 5)]
    test, test_pixels = table(4, labels=[2, 1, 0, 0], site=["s0"] * 4)
    for i, (made, _) in enumerate(parts):
        if kind == "parquet":
            pq.write_table(made, root / f"train-0000{i}-of-00002.parquet", row_group_size=3)
        else:
            arrow(made, root / f"own-train-0000{i}-of-00002.arrow")
    name = "test-00000-of-00001.parquet" if kind == "parquet" else "own-test.arrow"
    pq.write_table(test, root / name) if kind == "parquet" else arrow(test, root / name)
    found = load(root, tmp_path)
    np.testing.assert_array_equal(found.x_train, np.concatenate([pixels for _, pixels in parts]))
    np.testing.assert_array_equal(found.x_test, test_pixels)
    assert found.y_train.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 0, 1] and found.y_test.tolist() == [
        2,
        1,
        0,
        0,
    ]
    assert found.class_names == tuple(CLASSES)
    assert found.columns["site"].tolist() == [*(f"s{i % 2}" for i in range(7)), *["s2"] * 5]
    assert found.columns_test["site"].tolist() == ["s0"] * 4
    # the second time the prepared arrays are mapped, with their columns
    again = load(root, tmp_path)
    assert again.digest == found.digest and again.columns["site"].tolist() == found.columns["site"].tolist()


def test_without_a_test_split_validation_or_a_fifth_is_tested_on(tmp_path):
    root = tmp_path / "own"
    root.mkdir()
    pq.write_table(table(60)[0], root / "train.parquet")
    found = load(root, tmp_path)
    assert (len(found.y_train), len(found.y_test)) == (48, 12)
    both = {x.tobytes() for x in found.x_train} & {x.tobytes() for x in found.x_test}
    assert not both
    pq.write_table(table(9)[0], root / "validation.parquet")
    assert len(load(root, tmp_path).y_test) == 9
    pq.write_table(table(9, labels=[-1] * 9)[0], root / "test.parquet")  # a competition's
    assert len(load(root, tmp_path).y_test) == 9 and load(root, tmp_path).y_test.max() == 2


def test_text_labels_are_classes_and_the_cache_of_the_hub_serves(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "cache" / "datasets--someone--birds" / "snapshots" / "c0ffee" / "data"
    root.mkdir(parents=True)
    words = ["wren", "crow", "wren", "owl", "owl", "crow"]
    for split in ("train", "test"):
        made, _ = table(6, labels=words, features=False)
        pq.write_table(made, root / f"{split}-00000.parquet")
    found = load("someone/birds", tmp_path)
    assert found.class_names == ("crow", "owl", "wren") and found.y_train.tolist() == [2, 0, 2, 1, 1, 0]
    assert found.name == "hf:someone/birds"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "has no table of training examples; expected train"),
        (lambda root: (root / "train.parquet").write_bytes(b"PAR1 no"), "cannot be read"),
        (
            lambda root: pq.write_table(pa.table({"x": [1]}), root / "train.parquet"),
            r"has no column of images \('image'\); it has: x",
        ),
        (
            lambda root: pq.write_table(table(6)[0].drop(["label"]), root / "train.parquet"),
            "has no column of labels .* it has: image",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path, make, says):
    root = tmp_path / "own"
    root.mkdir()
    make(root)
    with pytest.raises(InputError, match=says) as error:
        load(root, tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_named_with_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="nor in a cache; get it with: hf download a/b --repo-type dataset"):
        load("a/b", tmp_path)
    monkeypatch.setattr(sources, "table_files", sources.table_files)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "own").mkdir()
    with pytest.raises(InputError, match=r"needs pyarrow; install it with: pip install -e '.\[tables\]'"):
        load(tmp_path / "own", tmp_path)


# ---- tables as people have them ----------------------------------------------------------------------------


def write(path, columns, features=None):
    """A parquet file of these columns, with what the hub's library says of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pa.table(columns)
    if features is not None:
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(made, path)


def levels(*values):
    """Images of one level each, as files."""
    return [{"bytes": encoded(np.full((8, 8, 3), x, np.uint8)), "path": None} for x in values]


def class_label(*names):
    return {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(names)}}


def said(folder, tmp_path, **options):
    """The data set, and what was said of it."""
    console = Console(file=io.StringIO(), width=500)
    data = load_dataset(f"hf:{folder}", DataOptions(data_dir=tmp_path / "data", console=console, **options))
    return data, console.file.getvalue()


def by_level(x, y, data):
    """The level of each image -> the name of its class."""
    return {int(image[0, 0, 0]): data.class_names[label] for image, label in zip(x, y, strict=True)}


def refused(folder, tmp_path, capsys, *options):
    """The one line of the program, which leaves nothing behind."""
    data = tmp_path / "data"
    assert cli.main(["data", "prepare", f"hf:{folder}", "--data-dir", str(data), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith(("preparing ", f"hf:{folder}: "))]
    assert len(lines) == 1 and lines[0].startswith("fcljax: "), lines
    assert not data.exists()
    return lines[0]


def test_of_two_columns_of_labels_the_first_usual_name_is_taken_and_said(tmp_path):
    features = {"category": {}} | class_label("x", "y")
    for split, names in (("train", ["p", "q"]), ("test", ["q", "p"])):
        features["category"] = {"_type": "ClassLabel", "names": names}
        columns = {"category": [1, 0], "image": levels(1, 2), "label": [0, 1]}
        write(tmp_path / "own" / f"{split}.parquet", columns, features)
    data, line = said(tmp_path / "own", tmp_path)
    assert data.class_names == ("x", "y") and "the labels are the column 'label', not category" in line
    # the other one by the names of each table
    assert data.columns["category"].tolist() == ["q", "p"] and data.columns_test["category"].tolist() == [
        "p",
        "q",
    ]


@pytest.mark.parametrize("order", [["dog", "emu", "cat"], ["emu", "cat", "dog", "yak"]])
def test_labels_are_read_by_the_names_of_each_table(tmp_path, order):
    true = {40: "cat", 120: "dog", 200: "emu"}
    for path, names in (("train-0", ["cat", "dog", "emu"]), ("train-1", order), ("test", order[::-1])):
        labels = [names.index(true[level]) for level in true]
        write(
            tmp_path / "own" / f"{path}.parquet",
            {"image": levels(*true), "label": labels},
            class_label(*names),
        )
    data, line = said(tmp_path / "own", tmp_path)
    assert by_level(data.x_train, data.y_train, data) == by_level(data.x_test, data.y_test, data) == true
    assert data.class_names == ("cat", "dog", "emu") and len(data.y_train) == 6
    assert ("left out: 1 classes without examples (yak)" in line) == ("yak" in order)


def test_a_table_without_names_is_read_by_those_of_the_training_table(tmp_path):
    write(tmp_path / "own" / "test.parquet", {"image": levels(1, 2), "label": [1, 0]})
    write(tmp_path / "own" / "train.parquet", {"image": levels(1, 2), "label": [1, 0]}, class_label("a", "b"))
    data, line = said(tmp_path / "own", tmp_path)
    assert by_level(data.x_test, data.y_test, data) == {1: "b", 2: "a"}
    assert "'test.parquet' has no names of classes: its numbers are read by the others'" in line


MISSING = {
    "null": pa.array([0, 1, None, 0, 1], pa.int64()),
    "negative": pa.array([0, 1, -1, 0, 1]),
    "ignored": pa.array([0, 1, -100, 0, 1]),
    "NaN": pa.array([0.0, 1.0, float("nan"), 0.0, 1.0]),
    "empty": pa.array(["a", "b", " ", "a", "b"]),
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize("named", [True, False])
def test_examples_without_a_label_are_one_line_or_left_out(tmp_path, split, kind, named, capsys):
    root, features = tmp_path / "own", class_label("a", "b") if named else None
    for each in ("train", "test"):
        label = MISSING[kind]
        if each != split:
            label = pa.array([x for row, x in enumerate(label.to_pylist()) if row != 2])
        write(root / f"{each}.parquet", {"image": levels(*range(len(label))), "label": label}, features)
    line = refused(root, tmp_path, capsys)
    assert f"'{split}.parquet:2' has the label" in line and "1 of 5 images have no label" in line
    data, _ = said(root, tmp_path, skip_corrupt=True)
    assert (len(data.y_train), len(data.y_test)) == (4, 4)
    x, y = (data.x_train, data.y_train) if split == "train" else (data.x_test, data.y_test)
    assert list(by_level(x, y, data)) == [0, 1, 3, 4] and len(data.class_names) == 2


def test_a_test_split_without_labels_is_not_tested_on_and_one_beside_it_is_named(tmp_path):
    root = tmp_path / "own"
    write(root / "train.parquet", {"image": levels(*range(10)), "label": [0, 1] * 5})
    write(root / "test.parquet", {"image": levels(1, 2), "label": pa.array([None, None], pa.int64())})
    data, line = said(root, tmp_path)
    assert len(data.y_test) == 2 and "the test split has no labels; a random fifth" in line
    write(root / "test.parquet", {"image": levels(1, 2), "label": [0, 1]})
    write(root / "valid.parquet", {"image": levels(1, 2, 3), "label": [0, 1, 1]})
    write(root / "extra.parquet", {"image": levels(1), "label": [0]})
    data, line = said(root, tmp_path)
    assert "not read: the validation split (3 examples)" in line
    assert "not read: 1 tables of no split, such as 'extra.parquet'" in line


def test_tables_of_no_split_are_split_at_random(tmp_path):
    write(
        tmp_path / "own" / "data-0.parquet",
        {"image": levels(*range(20)), "label": [i % 2 for i in range(20)]},
    )
    data, line = said(tmp_path / "own", tmp_path)
    assert (len(data.y_train), len(data.y_test)) == (16, 4) and "a random fifth" in line
    both = by_level(data.x_train, data.y_train, data) | by_level(data.x_test, data.y_test, data)
    assert both == {i: str(i % 2) for i in range(20)}


LABELS_READ = {
    "text": pa.array(["a", "b", "a", "b"]),
    "dictionary": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
    "bytes": pa.array([b"a", b"b", b"a", b"b"]),
    "lists of one": pa.array([[0], [1], [0], [1]]),
    "one-hot": pa.array([[1, 0], [0, 1], [1, 0], [0, 1]]),
    "whole floats": pa.array([0.0, 1.0, 0.0, 1.0]),
    "booleans": pa.array([False, True, False, True]),
    "bytes of numbers": pa.array([0, 1, 0, 1], pa.uint8()),
}


@pytest.mark.parametrize("kind", LABELS_READ)
def test_labels_of_every_plain_kind_are_read(tmp_path, kind):
    for split in ("train", "test"):
        write(
            tmp_path / "own" / f"{split}.parquet", {"image": levels(1, 2, 3, 4), "label": LABELS_READ[kind]}
        )
    data, _ = said(tmp_path / "own", tmp_path)
    assert data.y_train.tolist() == [0, 1, 0, 1]
    assert data.class_names[0] in ("a", "0", "False")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (pa.array([0.5, 1.0, 0.0, 1.0]), "is float64 of shape (4,); expected integers or text"),
        (pa.array([[1, 1], [0, 1], [1, 0], [0, 1]]), "example 0 has several labels"),
        (pa.array([[1], [0, 1], [1, 0], [0, 1]]), "has lists of several lengths"),
        (pa.array([{"a": 1}] * 4), "expected integers or text"),
        (pa.array([0, 1, 7, 1]), "label 7 of 2 classes"),
        (pa.array([b"a", b"\xff", b"a", b"b"]), "text that is not UTF-8"),
    ],
)
def test_labels_of_other_kinds_are_refused(tmp_path, labels, says, capsys):
    for split in ("train", "test"):
        columns = {"image": levels(1, 2, 3, 4), "label": labels}
        write(tmp_path / "own" / f"{split}.parquet", columns, class_label("a", "b"))
    assert says in refused(tmp_path / "own", tmp_path, capsys)


def pixels_of(level, shape, dtype):
    return np.full(shape, level, dtype).tolist()


PIXELS_READ = {
    "grey": lambda x: pixels_of(x, (8, 9), int),
    "colour": lambda x: pixels_of(x, (8, 9, 3), int),
    "channels first": lambda x: pixels_of(x, (3, 8, 9), int),
    "one channel": lambda x: pixels_of(x, (8, 9, 1), int),
    "floats": lambda x: pixels_of(x / 255, (8, 9), float),
    "floats, channels first": lambda x: pixels_of(x / 255, (1, 8, 9), float),
}


@pytest.mark.parametrize("kind", PIXELS_READ)
def test_images_that_are_lists_are_grey_levels(tmp_path, kind):
    for split in ("train", "test"):
        images = pa.array([PIXELS_READ[kind](x) for x in (30, 90, 200)])
        write(tmp_path / "own" / f"{split}.parquet", {"img": images, "label": [0, 1, 0]})
    data, _ = said(tmp_path / "own", tmp_path)
    assert data.x_train.shape == (3, 8, 9, 3) and data.x_train[:, 3, 4].tolist() == [
        [x] * 3 for x in (30, 90, 200)
    ]


@pytest.mark.parametrize(
    ("usual", "image", "says"),
    [
        (pixels_of(90, (8, 8, 3), int), pixels_of(9, (8, 8, 4), int), "row 1: the image has shape (8, 8, 4)"),
        (pixels_of(90, (8, 8), int), pixels_of(9000, (8, 8), int), "nearest: x / 16383, if 16383 is white"),
        (pixels_of(90, (8, 8), int), pixels_of(-1, (8, 8), int), "nearest: (x - x.min())"),
        (pixels_of(0.5, (8, 8), float), pixels_of(7.5, (8, 8), float), "has values from 7.5 to 7.5"),
        (pixels_of(0.5, (8, 8), float), pixels_of(float("nan"), (8, 8), float), "NaN or infinite"),
        (pixels_of(90, (2, 2), int), [[1, 2], [3]], "row 1: the image is not an array"),
        (pixels_of(90, (2, 2), int), [[1, None], [3, 4]], "nearest: an array of numbers"),
        (pixels_of(90, (2, 2), int), [], "has shape (0,)"),
        (pixels_of(90, (2, 2), int), None, "row 1: the image is missing"),
        ({"bytes": encoded(np.zeros((8, 8, 3), np.uint8))}, {"bytes": None}, "row 1: the image is missing"),
        ({"bytes": encoded(np.zeros((8, 8, 3), np.uint8))}, {"bytes": b"GIF89a"}, "is not a readable image"),
    ],
)
def test_one_image_that_is_no_image_is_named_or_left_out(tmp_path, usual, image, says, capsys):
    images = pa.array([usual, image, usual, usual])
    for split in ("train", "test"):
        write(tmp_path / "own" / f"{split}.parquet", {"image": images, "label": [0, 1, 1, 0]})
    assert says in refused(tmp_path / "own", tmp_path, capsys)
    data, line = said(tmp_path / "own", tmp_path, skip_corrupt=True)
    assert len(data.y_train) == 3 and "skipped 2 unreadable images" in line


@pytest.mark.parametrize("shape", [(64,), (1, 1, 8, 8)])
def test_images_of_another_shape_are_refused(tmp_path, shape, capsys):
    images = pa.array([pixels_of(x, shape, int) for x in (30, 90)])
    for split in ("train", "test"):
        write(tmp_path / "own" / f"{split}.parquet", {"image": images, "label": [0, 1]})
    assert f"row 0: the image has shape {shape}; expected [H, W, 3]" in refused(
        tmp_path / "own", tmp_path, capsys
    )


@pytest.mark.parametrize("text", ["a/b.png", "https://x.org/a.png"])
def test_images_that_are_only_named_are_refused(tmp_path, text, capsys):
    for split in ("train", "test"):
        write(tmp_path / "own" / f"{split}.parquet", {"image": [text, text], "label": [0, 1]})
    line = refused(tmp_path / "own", tmp_path, capsys)
    assert "row 0: the table contains only the name of an image, not the image" in line


def test_images_in_levels_of_another_range_are_refused_and_not_made_dark(tmp_path, capsys):
    for split in ("train", "test"):
        images = pa.array([pixels_of(x, (8, 8), int) for x in (0, 16)])
        write(tmp_path / "own" / f"{split}.parquet", {"image": images, "label": [0, 1]})
    line = refused(tmp_path / "own", tmp_path, capsys)
    assert "have the levels 0 to 16" in line and "nearest: x / 16" in line


def test_what_is_not_kept_of_other_columns_is_said(tmp_path):
    root = tmp_path / "own"
    more = {"site": ["n", None], "caption": ["x" * 300, "y"], "box": [[1, 2], [3, 4]], "here": [1, 2]}
    write(root / "train.parquet", {"image": levels(1, 2), "label": [0, 1], **more})
    del more["here"]
    write(root / "test.parquet", {"image": levels(1, 2), "label": [0, 1], **more})
    data, line = said(root, tmp_path)
    assert data.columns["site"].tolist() == ["n", ""] and set(data.columns) == {"site"}
    assert "left out: 3 columns (caption, box, here)" in line and "2 examples have no site" in line


def test_tables_that_cannot_be_read_are_one_line_and_leave_nothing(tmp_path, capsys):
    root = tmp_path / "own"
    good = {"image": levels(1, 2), "label": [0, 1]}
    write(root / "train-0.parquet", good)
    write(root / "test.parquet", {"image": pa.array(levels(1))[:0], "label": pa.array([0])[:0]})
    assert "its test split has no rows" in refused(root, tmp_path, capsys)
    write(root / "test.parquet", good)
    write(root / "train-1.parquet", {"image": levels(1, 2), "kind": [0, 1]})
    assert "train-1.parquet' has no column 'label', and 'train-0.parquet' has" in refused(
        root, tmp_path, capsys
    )
    twice = pa.table(
        [pa.array(levels(1, 2)), pa.array([0, 1]), pa.array([1, 0])], names=["image", "label", "label"]
    )
    arrow(twice, root / "train-1.arrow")
    (root / "train-1.parquet").unlink()
    assert "has the column 'label' twice" in refused(root, tmp_path, capsys)
    parts = [None, pa.py_buffer(np.array([0, 1, 2], np.int32).tobytes()), pa.py_buffer(b"a\xff")]
    text = pa.Array.from_buffers(pa.string(), 2, parts)
    arrow(pa.table({"image": levels(1, 2), "label": text}), root / "train-1.arrow")
    assert "train-1.arrow' cannot be read" in refused(root, tmp_path, capsys)
    write(
        root / "train-1.parquet",
        good,
        {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "a"]}},
    )
    (root / "train-1.arrow").unlink()
    assert "two classes of the column 'label' are called 'a'" in refused(root, tmp_path, capsys)


def test_a_stream_that_ends_between_two_batches_is_cut_off_and_not_shorter(tmp_path, capsys):
    root = tmp_path / "own"
    write(root / "test.parquet", {"image": levels(1, 2), "label": [0, 1]})
    made = pa.table({"image": levels(1, 2, 3, 4), "label": [0, 1, 0, 1]})
    with pa.OSFile(str(root / "train.arrow"), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made, max_chunksize=2)
        whole = sink.tell()
    content = (root / "train.arrow").read_bytes()
    (root / "train.arrow").write_bytes(content[:whole])
    assert len(content) - whole == 8
    assert "train.arrow' is cut off" in refused(root, tmp_path, capsys)


def test_a_small_file_that_declares_many_rows_is_refused_before_it_is_read(tmp_path, capsys):
    root = tmp_path / "own"
    write(root / "test.parquet", {"image": levels(1, 2), "label": [0, 1]})
    same = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(3_000_000, np.int32)), pa.array([levels(1)[0]["bytes"]])
    )
    made = pa.table({"image": same, "label": np.zeros(3_000_000, np.int8)})
    pq.write_table(made, root / "train.parquet", compression="zstd")
    assert (root / "train.parquet").stat().st_size < 100_000
    assert "declares 3,000,000 rows in" in refused(root, tmp_path, capsys)


def test_a_row_group_larger_than_memory_is_refused_and_read_in_batches(tmp_path, capsys, monkeypatch):
    root = tmp_path / "own"
    made, pixels = table(300)
    root.mkdir()
    for split in ("train", "test"):
        pq.write_table(made, root / f"{split}.parquet")
    data, _ = said(root, tmp_path)
    np.testing.assert_array_equal(data.x_train, pixels)
    (tmp_path / "data").rename(tmp_path / "before")
    # enough for what is kept of the rows, not for the column of images
    monkeypatch.setattr(arrow_files, "machine_memory", lambda: 2 * 300 * 256)
    assert "values in the column 'image', which need" in refused(root, tmp_path, capsys)
