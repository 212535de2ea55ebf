"""Data sets load as promised, and whatever is wrong with a user's data is one line that names it."""

import io
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import fcljax
from fcljax.data.augment import Geometry
from fcljax.data.files import listings, names, prepared, sources
from fcljax.data.files.sources import DATASETS, DataOptions, hold_out, load_dataset, prepare
from fcljax.errors import InputError

ROOT = Path(fcljax.__file__).parents[1]
ARRAYS = {
    "x_train": np.arange(6 * 4 * 5 * 3, dtype=np.uint8).reshape(6, 4, 5, 3),
    "y_train": np.array([7, 7, 2, 2, 30, 30]),
    "x_test": np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3),
    "y_test": np.array([30, 2, 7]),
}


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch):
    """Nothing is prepared outside of the test's own folder."""
    monkeypatch.setenv("FCLJAX_DATA", str(tmp_path / "data-folder"))


def npz(folder, **changes):
    """A .npz file with some arrays replaced, or left out where None."""
    arrays = {key: value for key, value in (ARRAYS | changes).items() if value is not None}
    np.savez(folder / "data.npz", **arrays)
    return f"npz:{folder / 'data.npz'}"


def picture(path, size=(8, 8), color=(10, 200, 30), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).convert(mode).save(path, **options)


def pictures(folder, classes=("cat", "dog")):
    for split in ("train", "test"):
        for index, label in enumerate(classes):
            picture(folder / split / label / "a.png", color=(index * 100, 50, 50))
    return f"folder:{folder}"


def refusal(name):
    """The one line with which the data set is refused."""
    with pytest.raises(InputError) as error:
        load_dataset(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_digits_are_split_by_class_once_and_for_all():
    first, second = load_dataset("digits", DataOptions(seed=1)), load_dataset("digits", DataOptions(seed=2))
    assert len(first.x_train) + len(first.x_test) == 1797
    assert abs(len(first.x_test) / 1797 - 0.2) < 0.005
    share = np.bincount(first.y_test) / (np.bincount(first.y_test) + np.bincount(first.y_train))
    np.testing.assert_allclose(share, 0.2, atol=0.005)
    np.testing.assert_array_equal(first.x_test, second.x_test)
    assert first.class_names == tuple("0123456789")
    assert not first.augment


def test_digits_are_read_from_scikit_learns_file_and_are_those_of_its_loader():
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    data = load_dataset("digits")
    images = np.concatenate([data.x_train, data.x_test])
    labels = np.concatenate([data.y_train, data.y_test])
    grey = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    assert fingerprints(images, labels) == fingerprints(sources._enlarge(grey), target)


def fingerprints(images, labels):
    """Images with their labels, whatever their order."""
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def test_digits_are_the_scans_enlarged_to_gray_32_pixels():
    data = load_dataset("digits")
    assert data.x_train.shape[1:] == (32, 32, 3)
    assert data.x_train.dtype == np.uint8
    assert (data.x_train == data.x_train[..., :1]).all()
    assert data.x_train.max() == 255 and data.x_train.min() == 0


def test_no_test_digit_is_a_training_digit():
    data = load_dataset("digits")
    train, test = ({image.tobytes() for image in images} for images in (data.x_train, data.x_test))
    assert not train & test


@pytest.mark.long
def test_glyphs_come_in_the_numbers_asked_for():
    data = load_dataset("glyphs", DataOptions(glyph_train=2, glyph_test=1, seed=3))
    assert data.x_train.shape == (200, 32, 32, 3)
    assert (np.bincount(data.y_train) == 2).all() and (np.bincount(data.y_test) == 1).all()
    assert len(data.class_names) == len(set(data.class_names)) == 100
    assert not data.augment
    again = load_dataset("glyphs", DataOptions(glyph_train=2, glyph_test=1, seed=3))
    np.testing.assert_array_equal(data.x_train, again.x_train)


def test_glyphs_without_images_are_refused():
    with pytest.raises(InputError, match="glyph_test: 0 images per class"):
        load_dataset("glyphs", DataOptions(glyph_train=1, glyph_test=0))


@pytest.mark.parametrize(
    "name, hint",
    [
        ("digit", "did you mean 'digits'?"),
        ("npy:data.npz", "did you mean 'npz:PATH'?"),
        ("cifar-10", "did you mean 'cifar10'?"),
        ("ImageNet-R", "did you mean 'imagenet_r'?"),
        ("tinyimagenet", "did you mean 'tiny_imagenet'?"),
        ("qqq", "choose from: breast_cancer, cars196, cifar10, cifar100, core50, csv:FILE, cub200, digits,"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, hint):
    assert hint in refusal(name)


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_a_path_is_asked_for(kind):
    assert f"{kind}:PATH" in refusal(kind)
    assert f"{kind}:PATH" in refusal(f"{kind}:")


def test_a_data_set_with_a_name_says_what_it_is_and_where_it_lies():
    assert list(names.NAMED) == list(listings.NAMED)


def test_every_data_set_has_one_line():
    assert all(line and "\n" not in line for line in DATASETS.values())


def test_an_npz_file_is_read_and_its_labels_numbered_in_sorted_order(tmp_path):
    data = load_dataset(npz(tmp_path))
    np.testing.assert_array_equal(data.x_train, ARRAYS["x_train"])
    assert data.y_train.tolist() == [1, 1, 0, 0, 2, 2]
    assert data.y_test.tolist() == [2, 0, 1]
    assert data.class_names == ("2", "7", "30")
    assert data.y_train.dtype == np.int64
    assert data.augment


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1)])
def test_gray_images_get_three_equal_channels(tmp_path, shape):
    gray = {
        key: np.arange(count * 20, dtype=np.uint8).reshape(count, *shape)
        for key, count in (("x_train", 6), ("x_test", 3))
    }
    data = load_dataset(npz(tmp_path, **gray))
    for channel in range(3):
        np.testing.assert_array_equal(data.x_train[..., channel], gray["x_train"].reshape(6, 4, 5))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"y_test": None}, "no array 'y_test'"),
        ({"x_train": ARRAYS["x_train"] / 100}, "expected uint8, grey levels 0..255, or float in [0, 1]"),
        ({"x_train": ARRAYS["x_train"].astype(np.int64)}, "x_train is int64; expected uint8"),
        ({"x_train": ARRAYS["x_train"][..., :2]}, "x_train has shape (6, 4, 5, 2)"),
        ({"x_train": ARRAYS["x_train"].transpose(3, 0, 1, 2)}, "x_train has shape (3, 6, 4, 5)"),
        ({"x_test": ARRAYS["x_test"][0, 0]}, "x_test has shape (5, 3)"),
        ({"x_train": ARRAYS["x_train"][:5]}, "x_train has 5 examples but y_train has 6"),
        ({"x_test": ARRAYS["x_test"][:0], "y_test": ARRAYS["y_test"][:0]}, "x_test is empty"),
        ({"x_test": ARRAYS["x_test"][:, :, :4]}, "images of x_train are 4x5 but of x_test 4x4"),
        ({"y_train": ARRAYS["y_train"].astype(float)}, "y_train is float64 of shape (6,); expected integers"),
        ({"y_train": np.eye(6, dtype=int)}, "y_train is int64 of shape (6, 6)"),
        ({"y_train": ARRAYS["y_train"] > 7}, "y_train is bool"),
        ({"y_train": ARRAYS["y_train"].astype(str)}, "y_train is <U"),
        ({"y_train": ARRAYS["y_train"] - 3}, "(-1) has no label"),
        (
            {"y_train": ARRAYS["y_train"].astype(np.uint64) + np.uint64(2**63)},
            "y_train: example 0 (9223372036854775815) has no label",
        ),
        ({"y_test": np.array([30, 2, 8])}, "class 8 is in test but not in train"),
        ({"y_test": np.array([30, 7, 7])}, "class 2 is in train but not in test"),
    ],
)
def test_an_npz_file_with_a_wrong_array_is_refused(tmp_path, changes, words):
    message = refusal(npz(tmp_path, **changes))
    assert words in message
    assert "data.npz" in message


class Trap:
    """Would leave a trace if it were ever unpickled."""

    def __reduce__(self):
        return (warnings.warn, ("unpickled",))


@pytest.mark.parametrize("key", ["x_train", "y_train"])
def test_pickled_arrays_are_refused_and_not_unpickled(tmp_path, key):
    assert "pickled objects, which are never loaded" in refusal(
        npz(tmp_path, **{key: np.array([Trap()] * 6)})
    )


def test_a_pickle_named_npz_is_refused_and_not_unpickled(tmp_path):
    (tmp_path / "data.npz").write_bytes(pickle.dumps(Trap()))
    assert "damaged or not a .npz file" in refusal(f"npz:{tmp_path / 'data.npz'}")


def test_a_missing_npz_file_is_named(tmp_path):
    assert "no such file" in refusal(f"npz:{tmp_path / 'none.npz'}")
    assert "no such file" in refusal(f"npz:{tmp_path}")


def test_an_npy_file_is_not_an_npz_file(tmp_path):
    np.save(tmp_path / "data.npy", ARRAYS["x_train"])
    assert "damaged or not a .npz file" in refusal(f"npz:{tmp_path / 'data.npy'}")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_npz_file_loads_or_is_refused_in_one_line(tmp_path, data):
    buffer = io.BytesIO()
    data.draw(st.sampled_from([np.savez, np.savez_compressed]))(buffer, **ARRAYS)
    content = bytearray(buffer.getvalue())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "damaged.npz").write_bytes(content)
    try:
        load_dataset(f"npz:{tmp_path / 'damaged.npz'}")
    except InputError as error:
        assert "\n" not in str(error)
        assert "damaged.npz" in str(error)


def test_a_folder_is_read_class_by_class_in_sorted_order(tmp_path):
    data = load_dataset(pictures(tmp_path, ("dog", "cat", "ant")))
    assert data.class_names == ("ant", "cat", "dog")
    assert data.y_train.tolist() == [0, 1, 2]
    assert data.x_train[:, 0, 0, 0].tolist() == [200, 100, 0]
    assert data.augment


def test_images_of_one_small_size_keep_it(tmp_path):
    assert load_dataset(pictures(tmp_path)).x_train.shape == (2, 8, 8, 3)


def test_images_of_different_sizes_are_brought_to_those_of_the_geometry(tmp_path):
    name = pictures(tmp_path)
    picture(tmp_path / "test" / "cat" / "b.jpg", size=(90, 40))
    assert load_dataset(name).x_train.shape == (2, 256, 256, 3)
    data = load_dataset(name, DataOptions(geometry=Geometry(64, 73)))
    assert data.x_train.shape == (2, 64, 64, 3) and data.x_test.shape == (3, 73, 73, 3)
    assert data.size_train.tolist() == [[8, 8], [8, 8]] and data.size_test is None


@pytest.mark.parametrize(
    "mode, file, options",
    [
        ("L", "b.png", {}),
        ("P", "b.PNG", {"transparency": bytes([0, 9])}),
        ("RGBA", "b.png", {}),
        ("1", "b.png", {}),
        ("CMYK", "b.jpeg", {}),
    ],
)
def test_images_of_all_8_bit_modes_become_rgb(tmp_path, mode, file, options):
    name = pictures(tmp_path)
    picture(tmp_path / "train" / "cat" / file, color=(255, 255, 255), mode=mode, **options)
    data = load_dataset(name)
    assert (data.x_train[1] == 255).all() and data.x_train.shape == (3, 8, 8, 3)


def test_what_is_not_an_image_of_a_class_is_ignored(tmp_path):
    name = pictures(tmp_path)
    (tmp_path / "train" / "README.png").write_text("no class folder")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "cat" / "._a.png").write_text("left by a file manager")
    (tmp_path / "train" / ".cache").mkdir()
    assert load_dataset(name).y_train.tolist() == [0, 1]


def test_a_folder_without_train_or_test_is_refused(tmp_path):
    assert "no such folder" in refusal(f"folder:{tmp_path / 'none'}")
    picture(tmp_path / "train" / "cat" / "a.png")
    assert f"no such folder: {str(tmp_path / 'test')!r}" in refusal(f"folder:{tmp_path}")


def test_a_folder_whose_classes_differ_is_refused(tmp_path):
    name = pictures(tmp_path)
    picture(tmp_path / "test" / "eel" / "a.png")
    assert "class 'eel' is in test but not in train" in refusal(name)
    picture(tmp_path / "train" / "eel" / "a.png")
    picture(tmp_path / "train" / "fox" / "a.png")
    assert "class 'fox' is in train but not in test" in refusal(name)


def test_an_empty_folder_is_refused(tmp_path):
    name = pictures(tmp_path)
    (tmp_path / "train" / "cat" / "a.png").unlink()
    assert f"{str(tmp_path / 'train' / 'cat')!r} has no images" in refusal(name)
    for split in ("train", "test"):
        (tmp_path / "empty" / split).mkdir(parents=True)
    assert "has no class folders" in refusal(f"folder:{tmp_path / 'empty'}")


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"])
def test_a_file_that_is_no_image_is_named(tmp_path, content):
    name = pictures(tmp_path)
    bad = tmp_path / "test" / "dog" / "bad.png"
    bad.write_bytes(content)
    assert f"{str(bad)!r} is not a readable image" in refusal(name)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["png", "jpg"]), st.data())
def test_a_damaged_image_loads_or_is_named(tmp_path, suffix, data):
    name, bad = pictures(tmp_path), tmp_path / "train" / "cat" / f"z.{suffix}"
    for other in bad.parent.glob("z.*"):
        other.unlink()
    picture(bad)
    content = bytearray(bad.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    bad.write_bytes(content)
    try:
        load_dataset(name)
    except InputError as error:
        assert "\n" not in str(error)
        assert str(bad) in str(error)


def test_an_option_of_other_data_sets_is_refused():
    with pytest.raises(
        InputError, match="class_list: 'list.txt' is for imagenet100 and imagenet200; 'glyphs' takes none"
    ):
        load_dataset("glyphs", DataOptions(class_list="list.txt"))


def test_images_of_16_bits_are_refused(tmp_path):
    name = pictures(tmp_path)
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "train" / "cat" / "deep.png")
    message = refusal(name)
    assert "deep.png" in message and "8 bits" in message


@pytest.mark.parametrize(
    "member", ["/etc/x_train.npy", "../x_train.npy", "a/../../b.npy", "..\\b.npy", "C:\\b.npy"]
)
def test_an_npz_file_that_leads_out_of_itself_is_refused(tmp_path, member):
    name = npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "data.npz", "a") as archive:
        archive.writestr(member, b"")
    assert "which points outside of it" in refusal(name)


def test_what_is_held_out_leaves_training_and_stands_for_the_test_images():
    whole = load_dataset("digits")
    part = hold_out(whole, 0.25)
    assert len(part.y_train) + len(part.y_test) == len(whole.y_train)
    for label in range(10):
        mine = whole.x_train[whole.y_train == label]
        kept = len(mine) - len(mine) // 4  # rounded up
        np.testing.assert_array_equal(part.x_train[part.y_train == label], mine[:kept])
        np.testing.assert_array_equal(part.x_test[part.y_test == label], mine[kept:])
    assert part.digest not in (whole.digest, hold_out(whole, 0.5).digest)


def test_a_share_that_holds_nothing_of_a_class_out_is_refused():
    with pytest.raises(InputError, match="^holdout: 0.001 .* nearest"):
        hold_out(load_dataset("digits"), 0.001)


@pytest.mark.long
def test_data_in_memory_have_digests_of_their_content(tmp_path):
    digits, glyphs = load_dataset("digits"), load_dataset("glyphs", DataOptions(glyph_train=1, glyph_test=1))
    file = load_dataset(npz(tmp_path))
    assert len({data.digest for data in (digits, glyphs, file)}) == 3
    for data in (digits, glyphs, file):
        arrays = {key: getattr(data, key) for key in ("x_train", "y_train", "x_test", "y_test")}
        assert (
            data.digest
            == prepared.digest_of_arrays(arrays)
            != prepared.digest_of_arrays(arrays | {"x_train": 255 - data.x_train})
        )
    assert load_dataset("glyphs", DataOptions(glyph_train=1, glyph_test=1, seed=1)).digest != glyphs.digest


def test_preparing_data_that_stay_in_memory_only_reports_them(tmp_path):
    result = prepare("digits")
    assert result.folder is None and result.counts == (1438, 359) and result.skipped == ()
    assert result.digest == load_dataset("digits").digest
    assert prepare(npz(tmp_path)).counts == (6, 3)
    assert not (tmp_path / "data-folder").exists()


def test_the_same_pixels_have_the_same_digest_wherever_they_come_from(tmp_path):
    for split, rows in (("train", ARRAYS["x_train"]), ("test", ARRAYS["x_test"])):
        for number, (label, image) in enumerate(zip(sorted([0, 1, 2] * (len(rows) // 3)), rows, strict=True)):
            (tmp_path / split / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / split / str(label) / f"{number}.png")
    labels = {"y_train": np.array([0, 0, 1, 1, 2, 2]), "y_test": np.array([0, 1, 2])}
    assert load_dataset(f"folder:{tmp_path}").digest == load_dataset(npz(tmp_path, **labels)).digest


@pytest.mark.long
def test_importing_and_built_in_data_do_not_import_tensorflow_datasets():
    code = "import sys, fcljax.cli; from fcljax.data.files.sources import *; "
    code += "load_dataset('digits'); known_datasets()"
    check = "assert not {'tensorflow_datasets', 'tensorflow', 'array_record'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}; {check}"], check=True, capture_output=True, cwd=ROOT
    )
