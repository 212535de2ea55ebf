"""`--dataset hf:NAME`: image data sets of the Hugging Face hub, in parquet and arrow files."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from fcljax.data.files import sources
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
    with pytest.raises(InputError, match="in no cache; get it with: hf download a/b --repo-type dataset"):
        load("a/b", tmp_path)
    monkeypatch.setattr(sources, "table_files", sources.table_files)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "own").mkdir()
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'fcljax\[tables\]'"):
        load(tmp_path / "own", tmp_path)
