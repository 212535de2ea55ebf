"""The gate for the user's images and labels: what is plainly meant is read, everything else is one line."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fcljax import cli
from fcljax.data.files.arrays import (
    checked_dataset,
    checked_image,
    checked_images,
    checked_labels,
    dataset_of_arrays,
)
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.sources import DATASETS, FORMS, DataOptions, load_dataset
from fcljax.errors import InputError

GREY = np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6) * 2
LABELS = np.array([3, 0, 3, 1])
TWELVE, PARITY = (
    np.arange(12, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8),
    np.arange(12) % 2,
)


def images(array):
    return checked_images("data", "x", np.asarray(array))


def labels(array):
    return checked_labels("data", "y", np.asarray(array))


def refusal(call, *args):
    with pytest.raises(InputError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        LABELS,
        LABELS[:, None],
        LABELS.astype(np.uint8),
        LABELS.astype(np.uint64)[:, None],
        np.eye(4)[LABELS],
        np.eye(4, dtype=bool)[LABELS],
        np.array([3, 0, 3, 1], object),
    ],
    ids=["integers", "a column", "bytes", "a column of uint64", "one-hot", "one-hot bool", "objects"],
)
def test_labels_are_integers_however_they_are_written(written):
    found = labels(written)
    assert found.tolist() == [3, 0, 3, 1] and found.dtype == np.int64


@pytest.mark.parametrize(
    "written",
    [np.array(["b", "a"]), np.array([["b"], ["a"]]), np.array([b"b", b"a"]), np.array(["b", "a"], object)],
)
def test_labels_may_be_text(written):
    assert labels(written).tolist() == ["b", "a"]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ([0, 1, -1, -1], "holds label -1 (example 2 and 1 more); labels are integers from 0 or text"),
        ([0, 1, -100], "holds label -100 (example 2)"),
        ([-1, 1, 1], "nearest: (y > 0).astype(int)"),
        (["a", "", "b"], "holds label  (example 1)"),
        ([0.0, 1.0], "y is float64 of shape (2,); expected integers or text"),
        ([0.0, 1.0], "nearest: y.astype(int)"),
        ([False, True], "nearest: y.astype(int)"),
        ([0.0, np.nan], "expected integers"),
        ([True, False], "y is bool"),
        ([[0, 1, 1], [1, 0, 0]], "example 0 has several labels, and one is needed"),
        ([[0.2, 0.8], [0.5, 0.5]], "nearest: y.argmax(-1)"),
        ([[0, 1, 1]], "nearest: y[0]"),
        ([[0, 0], [1, 0]], "expected integers"),
        (np.array(["a", None], object), "holds label None (example 1); leave out examples without a label"),
        (np.array(["a", float("nan")], object), "holds label nan (example 1)"),
        (np.array([np.ones(2), np.ones(3)], object), "y is object of shape (2,)"),
        (np.array([b"\xff"]), "holds text that is not UTF-8"),
        (np.array(3), "y is int64 of shape ()"),
        (np.zeros((2, 2, 2), int), "y is int64 of shape (2, 2, 2)"),
    ],
)
def test_other_labels_are_refused_with_a_hint_that_ruins_nothing(written, says):
    assert says in refusal(labels, written)


def test_splits_that_write_labels_in_different_ways_are_refused():
    x = GREY
    for y, y_test in (
        (np.eye(4)[LABELS], LABELS),
        (LABELS.astype(str), LABELS),
        (np.eye(4)[LABELS], np.eye(5)[LABELS]),
    ):
        assert "write the labels of both in one way" in refusal(dataset_of_arrays, (x, y, x, y_test))


# ---- images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        GREY,
        GREY[:, None],
        GREY[..., None],
        np.repeat(GREY[..., None], 3, -1),
        np.repeat(GREY[:, None], 3, 1),
        GREY / 255,
        (GREY / np.float32(255))[:, None],
    ],
)
def test_images_are_grey_levels_with_channels_last(written):
    found = images(written)
    assert found.dtype == np.uint8 and found.shape == (4, 5, 6, 3)
    np.testing.assert_array_equal(found[..., 1], GREY)


def test_two_levels_are_black_and_white_and_jax_s_short_floats_are_read():
    import jax.numpy as jnp

    assert images(GREY > 100).max() == 255
    np.testing.assert_array_equal(images(np.asarray(jnp.ones((1, 2, 2), jnp.bfloat16))), 255)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            GREY.astype(np.uint16) * 257,
            "x is uint16; expected uint8, grey levels 0..255, or float in [0, 1]; nearest: x / 65535",
        ),
        (GREY.astype(int) // 16, "nearest: x / 15, if 15 is white"),
        (np.full((1, 2, 2), 16.0), "nearest: x / 16, if 16 is white"),
        (GREY.astype(float), "nearest: x / 255, if 255 is white"),
        (GREY.astype(int), "nearest: x.astype('uint8')"),
        (GREY.astype(int) - 1, "nearest: (x - x.min()) / (x.max() - x.min())"),
        (np.full((1, 2, 2), 70000), "nearest: (x - x.min()) / (x.max() - x.min())"),
        (np.full((1, 2, 2), np.nan), "x has 4 values that are NaN or infinite"),
        (np.stack([GREY] * 4, -1), "transparency is not read, nearest: x[..., :3]"),
        (np.stack([GREY] * 4, 1), "nearest: x[:, :3]"),
        (np.zeros((2, 784), np.uint8), "nearest: x.reshape(-1, 28, 28)"),
        (np.zeros((2, 3072), np.uint8), "nearest: x.reshape(-1, 3, 32, 32), if channels come first"),
        (np.zeros((0, 8, 8), np.uint8), "x is empty"),
        (np.array([["a"]]), "x has shape (1, 1)"),
        (np.full((1, 2, 2), "a"), "nearest: an array of numbers"),
    ],
)
def test_other_images_are_refused_with_a_hint_that_ruins_nothing(written, says):
    assert says in refusal(images, written)


def test_one_image_has_its_own_shapes():
    for written in (GREY[0], GREY[0][None], np.stack([GREY[0]] * 3, -1), np.stack([GREY[0]] * 3)):
        np.testing.assert_array_equal(checked_image("row 3", "the image", written)[..., 0], GREY[0])
    flat = refusal(checked_image, "row 3", "the image", GREY[0].ravel())
    assert flat.startswith("row 3: the image has shape (30,); expected [H, W, 3]")


def test_arrays_that_numpy_would_change_silently_are_refused():
    masked = np.ma.masked_array(GREY, GREY > 9)
    assert "x is a masked array" in refusal(dataset_of_arrays, (masked, LABELS, GREY, LABELS))
    ragged = [np.zeros((2, 2)), np.zeros((2, 3))]
    assert "its values have several shapes" in refusal(dataset_of_arrays, (ragged, [0, 1], GREY, LABELS))

    class OnAnotherDevice:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("copy it to the host first")

    far = (OnAnotherDevice(), LABELS, GREY, LABELS)
    assert "x is not an array that numpy reads (RuntimeError: copy it to the host" in refusal(
        dataset_of_arrays, far
    )
    mixed = (GREY, [0, 1, 0, "dog"], GREY, LABELS)
    assert "y mixes text with other values" in refusal(dataset_of_arrays, mixed)
    assert "data: dict; expected (x, y) or (x, y, x_test, y_test)" in refusal(dataset_of_arrays, {"x": GREY})


# ---- npz files ---------------------------------------------------------------------------------------------


def npz(folder, **arrays):
    np.savez(folder / "own.npz", **arrays)
    return f"npz:{folder / 'own.npz'}"


def test_the_arrays_of_medmnist_and_scikit_learn_are_known(tmp_path):
    said = Console(file=io.StringIO(), width=300)
    arrays = {f"{split}_images": GREY for split in ("train", "val", "test")}
    arrays |= {f"{split}_labels": LABELS[:, None] for split in ("train", "val", "test")}
    data = load_dataset(npz(tmp_path, **arrays), DataOptions(console=said))
    assert data.y_train.tolist() == [2, 0, 2, 1] and data.class_names == ("0", "1", "3")
    assert said.file.getvalue().endswith("left out: 2 arrays (val_images, val_labels)\n")
    data = load_dataset(npz(tmp_path, X_train=GREY, y_train=LABELS, X_test=GREY, y_test=LABELS))
    assert data.y_test.tolist() == [2, 0, 2, 1]
    arrays = {key: value for key, value in arrays.items() if "test" not in key}
    load_dataset(npz(tmp_path, **arrays), DataOptions(console=said))
    assert "tested on val_images, because there are no test images" in said.file.getvalue()


def test_labels_that_are_text_are_classes_in_the_order_of_class_names(tmp_path):
    y = np.array(["emu", "ant", "emu", "bee"])
    both = {"x_train": GREY, "y_train": y, "x_test": GREY, "y_test": y[::-1]}
    data = load_dataset(npz(tmp_path, **both))
    assert data.class_names == ("ant", "bee", "emu") and data.y_test.tolist() == [1, 2, 0, 2]
    data = load_dataset(npz(tmp_path, **both, class_names=np.array(["emu", "bee", "ant"])))
    assert data.class_names == ("emu", "bee", "ant") and data.y_train.tolist() == [0, 2, 0, 1]
    wrong = npz(tmp_path, **both, class_names=np.array(["emu", "bee", "cat"]))
    assert "are not the labels, which are text" in refusal(load_dataset, wrong)


def test_examples_without_a_label_are_left_out_where_that_is_asked_for(tmp_path):
    y = np.array([1, -1, 0, -100])
    name = npz(tmp_path, x_train=GREY, y_train=y, x_test=GREY, y_test=LABELS % 2, site_train=np.arange(4))
    line = (
        "y_train: example 1 (-1) has no label; 2 of 4 examples have none: leave them out with --skip-corrupt"
    )
    assert line in refusal(load_dataset, name)
    data = load_dataset(name, DataOptions(skip_corrupt=True))
    assert data.y_train.tolist() == [1, 0] and data.columns["site"].tolist() == [0, 2]
    np.testing.assert_array_equal(data.x_train[..., 0], GREY[[0, 2]])


@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_of_classes_that_are_1_and_less_than_0_none_is_left_out(skip_corrupt, tmp_path):
    name = npz(tmp_path, x=TWELVE, y=2 * PARITY - 1)
    line = refusal(load_dataset, name, DataOptions(skip_corrupt=skip_corrupt))
    assert "y: example 0 (-1) has the label -1; write the classes -1 and 1 as 0 and 1" in line


@pytest.mark.parametrize("keys", [("x", "y"), ("images", "labels"), ("X_train", "y_train")])
def test_of_a_file_without_test_arrays_a_fifth_of_each_class_is_for_testing(keys, tmp_path):
    """As of the same arrays in memory, and the examples for testing are not among the others."""
    said = Console(file=io.StringIO(), width=300)
    data = load_dataset(
        npz(tmp_path, **dict(zip(keys, (TWELVE, PARITY), strict=True))), DataOptions(console=said)
    )
    assert said.file.getvalue().endswith("2 of 12 examples, a fifth of each class, are for testing\n")
    assert sorted(data.y_test.tolist()) == [0, 1] and np.bincount(data.y_train).tolist() == [5, 5]
    pixels = np.concatenate([data.x_train, data.x_test])[:, 0, 0, 0]
    assert sorted(pixels.tolist()) == TWELVE[:, 0, 0].tolist()
    in_memory = dataset_of_arrays((TWELVE, PARITY)).dataset
    np.testing.assert_array_equal(in_memory.x_test, data.x_test)
    np.testing.assert_array_equal(in_memory.x_train[..., 0], TWELVE[in_memory.train_rows])
    assert in_memory.num_rows == 12


def test_half_a_test_split_is_named_and_no_class_of_two_is_split(tmp_path):
    half = npz(tmp_path, x_train=TWELVE, y_train=PARITY, x_test=TWELVE)
    assert "has no array 'y_test'; it needs x_test and y_test" in refusal(load_dataset, half)
    small = npz(tmp_path, x=GREY, y=LABELS)
    assert "no class has three examples, of which one could test" in refusal(load_dataset, small)


def test_an_npz_file_without_the_arrays_is_refused_on_the_command_line(tmp_path, capsys):
    name = npz(tmp_path, pixels=GREY, targets=LABELS)
    assert cli.main(["data", "prepare", name, "--data-dir", str(tmp_path / "data")]) == 2
    line = capsys.readouterr().err.strip()
    assert line.count("\n") == 0 and "has no array 'x_train'" in line and "it has: pixels, targets" in line
    assert not (tmp_path / "data").exists()


def test_every_form_has_a_row_in_the_documentation():
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for form in FORMS:
        assert any(f"`{form}:" in row for row in rows), form
        assert any(name.startswith(f"{form}:") for name in DATASETS), form


IMAGES = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), np.uint8)
GOOD = Dataset("mine", IMAGES, np.arange(8) % 2, IMAGES[:4], np.arange(4) % 2, ("cat", "dog"))


def test_a_data_set_in_memory_passes_the_gate_of_all_others():
    given = GOOD._replace(x_train=IMAGES / 255, y_train=GOOD.y_train[:, None].tolist())
    checked = checked_dataset(given)
    np.testing.assert_array_equal(checked.x_train, IMAGES)
    np.testing.assert_array_equal(checked.y_train, GOOD.y_train)
    assert checked.digest == checked_dataset(GOOD).digest
    assert checked.digest != checked_dataset(GOOD._replace(x_test=IMAGES[4:])).digest


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"x_train": np.ma.masked_array(IMAGES)}, "data: x_train is a masked array"),
        ({"x_test": [np.ma.masked_array(image) for image in IMAGES[:4]]}, "data: x_test is a masked array"),
        ({"y_train": GOOD.y_train[:-1]}, "x_train has 8 examples but y_train has 7"),
        ({"y_train": GOOD.y_train + 1}, "y_train has the label 2, but class_names has 2 names"),
        ({"y_train": np.zeros(8, int)}, "y_train has no example of class 'dog' .label 1."),
        ({"y_train": ["a"] * 8, "y_test": ["a"] * 4}, "y_train is text; a Dataset has integers"),
        ({"class_names": "ab"}, "class_names: 'ab'; expected a tuple of text"),
        ({"columns": {"site": np.arange(3)}}, r"columns\['site'\] is int64 of shape .3,.; expected"),
        ({"size_train": np.zeros((8, 2), int)}, "size_train .* expected height and width"),
    ],
)
def test_fields_of_a_data_set_that_do_not_fit_are_refused_by_name(fields, says):
    with pytest.raises(InputError, match=says):
        checked_dataset(GOOD._replace(**fields))
