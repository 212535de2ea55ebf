"""`folder:PATH` and `list:FILE`: folders as people have them; what was read and what was not is said."""

import io
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fcljax import cli
from fcljax.data.files.images import _FORMATS, SUFFIXES
from fcljax.data.files.sources import DataOptions, load_dataset
from fcljax.errors import InputError


def picture(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".webp": "WEBP", ".bmp": "BMP", ".gif": "GIF", ".tif": "TIFF"}.get(path.suffix.lower(), "PNG")
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(
        path, kind, **({"lossless": True} if kind == "WEBP" else {})
    )


def pictures(root, names):
    """An image for each name, whose level is its number."""
    for number, name in enumerate(names):
        picture(root / name, number)


def load(name, tmp_path, **options):
    """The data set, and what was said of it."""
    console = Console(file=io.StringIO(), width=500)
    data = load_dataset(name, DataOptions(data_dir=tmp_path / "data", console=console, **options))
    return data, console.file.getvalue()


def classes(data, split="train"):
    """The level of each image -> the name of its class."""
    x, y = (data.x_train, data.y_train) if split == "train" else (data.x_test, data.y_test)
    return {int(image[0, 0, 0]): data.class_names[label] for image, label in zip(x, y, strict=True)}


def refused(name, tmp_path, capsys):
    """The one line of the program, which leaves nothing behind."""
    assert cli.main(["data", "prepare", name, "--data-dir", str(tmp_path / "data")]) == 2
    lines = capsys.readouterr().err.splitlines()
    # before it there may be what was read
    lines = [line for line in lines if not line.startswith(("preparing ", f"{name}: "))]
    assert len(lines) == 1 and lines[0].startswith("fcljax: "), lines
    assert not (tmp_path / "data").exists()
    return lines[0]


# ---- archives ----------------------------------------------------------------------------------------------


def test_archives_of_webdataset_are_refused_and_read_once_they_are_converted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split, levels in (("train", range(4)), ("test", range(4, 6))):
        with tarfile.open(f"{split}-0.tar", "w") as archive:
            for level in levels:
                picture(Path(f"{level}.jpg"), level)
                Path(f"{level}.cls").write_text(f"{level % 2}\n")
                for name in (f"{level}.jpg", f"{level}.cls"):
                    archive.add(name)
                    Path(name).unlink()
    for name in ("folder:.", "hf:.", "list:train-0.tar", "npz:train-0.tar", "train-0.tar"):
        assert "-0.tar' is a file; unpack it" in refused(name, tmp_path, capsys)
    documentation = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    commands = documentation.split("list:train.txt,test.txt` reads them:")[1].split("\n\n")[1]
    subprocess.run(["bash", "-euc", commands], check=True)
    data, _ = load("list:train.txt,test.txt", tmp_path)
    assert classes(data) == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert classes(data, "test") == {4: "0", 5: "1"}


def test_a_path_without_its_form_is_refused_with_the_form(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "photos", ["train/a/0.png"])
    assert "did you mean 'folder:photos'?" in refused("photos", tmp_path, capsys)


# ---- files of every kind -----------------------------------------------------------------------------------


def test_suffixes_are_those_of_the_formats_that_the_decoder_reads():
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in _FORMATS}
    assert known == SUFFIXES


def test_images_of_every_kind_and_depth_are_read_and_the_rest_is_counted(tmp_path):
    root = tmp_path / "own"
    pictures(
        root,
        ["train/a/0.PNG", "train/a/1.webp", "train/b/2.bmp", "train/b/more/deep/3.gif", "train/b/4.jfif"],
    )
    pictures(root, ["test/a/0.png", "test/b/1.png", "train/a/5.tif", "train/b/6.tif", "val/a/7.png"])
    (root / "train" / "a" / "notes.txt").write_text("x")
    picture(root / "train" / "loose.png", 8)
    (root / "train" / "@eaDir" / "thumb.png").mkdir(parents=True)
    picture(root / "train" / "a" / "@eaDir" / "thumb.png", 9)
    data, said = load(f"folder:{root}", tmp_path)
    assert classes(data) == {0: "a", 1: "a", 2: "b", 3: "b", 4: "b"}
    assert "5 training and 2 test images of 2 classes" in said
    assert "left out: 3 files of 2 other kinds (2 .tif, 1 .txt), such as 'train/a/5.tif'" in said
    assert "images in folders below a class are of that class (more)" in said
    assert "not read: val (1 images)" in said
    assert "left out: 1 images in no class folder, such as 'train/loose.png'" in said


def test_a_class_with_files_of_other_kinds_alone_is_refused(tmp_path, capsys):
    pictures(tmp_path / "own", ["train/a/0.png", "train/b/1.tif", "test/a/0.png", "test/b/1.png"])
    line = refused(f"folder:{tmp_path / 'own'}", tmp_path, capsys)
    assert "train/b' has no images; it has 1 file of 1 other kind (1 .tif)" in line


def test_links_in_a_circle_are_refused(tmp_path, capsys):
    pictures(tmp_path / "own", ["train/a/0.png", "train/b/1.png", "test/a/0.png", "test/b/1.png"])
    (tmp_path / "own" / "train" / "a" / "up").symlink_to(tmp_path / "own" / "train")
    assert "links to a folder above it" in refused(f"folder:{tmp_path / 'own'}", tmp_path, capsys)


# ---- splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["val", "valid", "Validation", "testing"])
def test_a_folder_for_validation_stands_for_the_missing_test_folder(tmp_path, split):
    pictures(tmp_path / "own", ["Train/b/0.png", "Train/a/1.png", f"{split}/a/2.png", f"{split}/b/3.png"])
    data, said = load(f"folder:{tmp_path / 'own'}", tmp_path)
    assert classes(data) == {0: "b", 1: "a"} and classes(data, "test") == {2: "a", 3: "b"}
    assert (f"tested on the folder {split!r}" in said) == (split != "testing")


def test_without_folders_of_splits_a_random_fifth_is_tested_on(tmp_path):
    pictures(tmp_path / "own", [f"{name}/{i}.png" for i in range(15) for name in ("cat", "dog")])
    (tmp_path / "own" / "README.md").write_text("x")
    data, said = load(f"folder:{tmp_path / 'own'}", tmp_path)
    assert (len(data.y_train), len(data.y_test)) == (24, 6)
    both = classes(data) | classes(data, "test")
    assert both == {i: ("cat", "dog")[i % 2] for i in range(30)}
    assert "a random fifth of the images is for testing" in said and "left out: 1 file" in said


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train/a/0.png", "train/b/0.png"], "no such folder"),
        (["valid/a/0.png", "invalid/b/0.png"], "no such folder"),
        (["train/a/0.png", "training/a/0.png", "test/a/0.png"], "has the folders train and training"),
        (["train/0.png", "test/1.png"], "has no class folders"),
        (["a/0.png", "b/notes.txt"], "has no images"),
    ],
)
def test_other_folders_are_refused(tmp_path, names, says, capsys):
    for name in names:
        picture(tmp_path / "own" / name, 0) if name.endswith("png") else (
            (tmp_path / "own" / name).parent.mkdir(parents=True),
            (tmp_path / "own" / name).write_text(""),
        )
    assert says in refused(f"folder:{tmp_path / 'own'}", tmp_path, capsys)
    (tmp_path / "own.tar").write_bytes(b"")
    assert "is a file; unpack it" in refused(f"folder:{tmp_path / 'own.tar'}", tmp_path, capsys)


# ---- sites -------------------------------------------------------------------------------------------------


def test_sites_are_said_and_classes_are_numbered_by_name_whatever_the_first_site_has(tmp_path):
    names = ["s1/d", "s1/b", "s2/c", "s2/a", "s2/b", "s2/d"]
    pictures(
        tmp_path / "own", [f"{split}/{name}/{split}.png" for split in ("train", "test") for name in names]
    )
    (tmp_path / "own" / "train" / "s1" / "notes.txt").write_text("x")
    data, said = load(f"folder:{tmp_path / 'own'}", tmp_path)
    assert data.class_names == ("a", "b", "c", "d")
    assert "2 sites (s1, s2) with the classes a, b, c, d" in said and "left out: 1 file" in said
    assert sorted(data.columns["site"].tolist()) == ["s1"] * 2 + ["s2"] * 4


def test_a_folder_of_one_name_in_every_class_is_refused_with_both_readings(tmp_path, capsys):
    names = [f"{split}/{name}/images/0.png" for split in ("train", "test") for name in ("cat", "dog")]
    pictures(tmp_path / "own", names)
    line = refused(f"folder:{tmp_path / 'own'}", tmp_path, capsys)
    assert "the classes cat, dog, with a folder 'images' in each" in line
    assert "or the sites cat, dog with the one class 'images'" in line


def test_images_beside_the_class_folders_of_a_site_are_refused_with_both_readings(tmp_path, capsys):
    names = [f"{site}/{name}/0.png" for site in ("s1", "s2") for name in ("a", "b")]
    pictures(tmp_path / "own", [f"{split}/{name}" for split in ("train", "test") for name in names])
    picture(tmp_path / "own" / "train" / "s1" / "map.png", 0)
    line = refused(f"folder:{tmp_path / 'own'}", tmp_path, capsys)
    assert "may have the classes s1, s2, or the sites s1, s2 with the classes a, b" in line


def test_a_test_folder_without_sites_goes_with_training_sites(tmp_path):
    pictures(
        tmp_path / "own",
        ["train/s1/a/0.png", "train/s1/b/1.png", "train/s2/a/2.png", "test/a/3.png", "test/b/4.png"],
    )
    data, _ = load(f"folder:{tmp_path / 'own'}", tmp_path)
    assert classes(data) == {0: "a", 1: "b", 2: "a"} and classes(data, "test") == {3: "a", 4: "b"}
    assert data.columns["site"].tolist() == ["s1", "s2", "s1"] and not data.columns_test


# ---- lists -------------------------------------------------------------------------------------------------


def listed(tmp_path, text, count=10):
    """A list beside images 0.png to 9.png of an image folder."""
    pictures(tmp_path / "own", [f"images/{i}.png" for i in range(count)])
    (tmp_path / "own" / "all.txt").write_text(text)
    return f"list:{tmp_path / 'own' / 'all.txt'}"


@pytest.mark.parametrize("separator", [" ", "  ", "\t", ",", ", ", ";"])
def test_a_list_of_paths_and_labels_is_read_whatever_separates_them(tmp_path, separator):
    lines = [f"images/{i}.png{separator}{i % 2}" for i in range(10)]
    data, said = load(listed(tmp_path, "\n".join(lines) + " \r\n\n"), tmp_path)
    assert classes(data) | classes(data, "test") == {i: str(i % 2) for i in range(10)}
    assert len(data.y_test) == 2 and "a random fifth of the images is for testing" in said


def test_a_header_names_columns_in_any_order_and_others_are_kept(tmp_path):
    lines = ["label,split,client,camera,filename"]
    lines += [f"{'ab'[i % 2]},{'train' if i < 6 else 'test'},u{i % 3},c,images/{i}.png" for i in range(8)]
    lines += ["a,val,u0,c,images/8.png"]
    data, said = load(listed(tmp_path, "\ufeff" + "\n".join(lines)), tmp_path)
    assert classes(data) == {i: "ab"[i % 2] for i in range(6)}
    assert data.columns["client"].tolist() == [f"u{i % 3}" for i in range(6)]
    assert set(data.columns) == {"client", "camera"} and "not read: the validation split (1 images)" in said


def test_two_lists_are_training_and_test(tmp_path):
    name = listed(tmp_path, "".join(f"images/{i}.png\t{i % 2}\tu{i}\tt{i % 2}\n" for i in range(4)))
    (tmp_path / "own" / "test.txt").write_text("images/5.png 1\nimages/4.png 0\n")
    data, said = load(f"{name},{tmp_path / 'own' / 'test.txt'}", tmp_path)
    assert classes(data, "test") == {4: "0", 5: "1"} and len(data.y_train) == 4
    assert "left out: columns that one list lacks (client, task)" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no lines"),
        ("images/0.png\n", "line 1: 1 values; expected path,label"),
        ("images/0.png a\nimages/1.png\n", "line 2: 1 values, and the first line has 2"),
        ("my images/0.png a\n", "no such file"),
        ("path,client\nimages/0.png,a\n", "has no column 'label'"),
        ("path,label,class\nimages/0.png,a,a\n", "has two columns for 'label'"),
        ("path,label\n", "only a line with the names of the columns"),
        ("images/0.png a\nimages/0.png b\n", "line 2: 'images/0.png' is in line 1 already"),
        ("images/0.png a\n./images/0.png a\n", "line 2: './images/0.png' is in line 1 already"),
        (
            "path,label,split\nimages/0.png,a,trian\n",
            "line 2: unknown split 'trian'; expected train, test or val",
        ),
        ("path,label,split\nimages/0.png,a,train\n", "its splits are train; expected train, and test or val"),
        (
            "images/99.png a\nimages/1.png a\nimages/2.png b\nimages/3.png b\nimages/4.png b\nimages/5.png a",
            "no such file",
        ),
        (
            "path,label,split\nimages/0.png,a,train\nimages/1.png,,train\nimages/2.png,a,test\n",
            "has the label ''",
        ),
        (
            "path,label,split\nimages/0.png,a,train\nimages/1.png,-1,train\nimages/2.png,a,test\n",
            "has the label '-1'",
        ),
        ("a" * 5000 + " 1\n", "a value of 5,000 characters"),
        ("images/\0.png a\nimages/1.png b", "quotation mark"),
    ],
)
def test_a_list_that_does_not_fit_is_one_line(tmp_path, text, says, capsys):
    assert says in refused(listed(tmp_path, text), tmp_path, capsys)


def test_what_a_list_names_and_is_not_there_is_left_out_where_that_is_asked_for(tmp_path):
    lines = "".join(
        f"images/{i}.png,{i % 2},{split}\n" for i in range(6) for split in ["train" if i < 4 else "test"]
    )
    name = listed(tmp_path, f"path,label,split\n{lines}images/99.png,1,train\nimages/7.png,-1,train\n")
    with pytest.raises(InputError, match="images/7.png' has the label '-1'.*; 1 of 6 images have no label"):
        load(name, tmp_path)
    data, said = load(name, tmp_path, skip_corrupt=True)
    assert classes(data) == {i: str(i % 2) for i in range(4)}
    assert "skipped 1 unreadable images and 1 without a label" in said
    with pytest.raises(InputError, match="without 1 unreadable images and 1 without a label"):
        load(name, tmp_path)


# ---- MNIST -------------------------------------------------------------------------------------------------


def idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = [0x800 + array.ndim, *array.shape]
    path.write_bytes(np.array(header, ">u4").tobytes() + array.tobytes())


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_is_read_from_its_idx_files_and_never_from_those_of_fashion_mnist(tmp_path, folder):
    pixels = np.arange(20, dtype=np.uint8)[:, None, None] + np.zeros((28, 28), np.uint8)
    for split in ("train", "t10k"):
        idx(tmp_path / folder / f"{split}-images.idx3-ubyte", pixels)
        idx(tmp_path / folder / f"{split}-labels-idx1-ubyte", np.arange(20, dtype=np.uint8) % 10)
    data = load_dataset("mnist", DataOptions(data_dir=tmp_path))
    assert classes(data) == {i: str(i % 10) for i in range(20)} and not data.augment
    for path in (tmp_path / folder).iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(InputError, match="'mnist' is not here"):
        load_dataset("mnist", DataOptions(data_dir=Path(tmp_path), geometry=data_geometry()))


def data_geometry():
    """Another one than that of the first test, so that what it has prepared is not found."""
    from fcljax.data.augment import Geometry

    return Geometry(30, 30)
