"""The named data sets: which image is in which split under which label, for every layout and for TFDS."""

import gzip
import io
import itertools
import os
import pickle
import random
import re
import shutil
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fcljax.data.augment import Geometry
from fcljax.data.files import download, raw
from fcljax.data.files.array_files import read_idx
from fcljax.data.files.download import OFFICIAL
from fcljax.data.files.listings import NAMED
from fcljax.data.files.sources import (
    DATASETS,
    DataOptions,
    data_folder,
    known_datasets,
    load_dataset,
    prepare,
)
from fcljax.data.files.tfds import from_all_splits
from fcljax.errors import InputError

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
BIRDS = ("001.Auk", "002.Owl")
WNIDS = ("n01443537", "n01484850", "n02096585")


def load(name, folder, verify=False, **options):
    return load_dataset(
        name,
        DataOptions(
            geometry=Geometry(12, 8), data_dir=folder, console=Console(file=io.StringIO()), **options
        ),
        verify,
    )


def refusal(name, folder, call=load, **options):
    with pytest.raises(InputError) as error:
        call(name, folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def prepare_in(name, folder, force=False, **options):
    return prepare(
        name,
        DataOptions(
            geometry=Geometry(12, 8), data_dir=folder, console=Console(file=io.StringIO()), **options
        ),
        force,
    )


def picture(path, number, size=(6, 6)):
    """An image that tells its number by its color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (number // 256, number % 256, 7)).save(path, "PNG")


def numbers(images):
    """What `picture` has drawn."""
    return (images[:, 0, 0, 0].astype(int) * 256 + images[:, 0, 0, 1]).tolist()


def tree(root, classes, count, start=0, suffix="png"):
    """`count` numbered pictures in each class folder."""
    for number, (label, index) in enumerate(itertools.product(classes, range(count)), start):
        picture(root / label / f"{index:03d}.{suffix}", number)


def shuffled(count):
    """The rule of HePCo's release."""
    rows = list(range(count))
    random.Random(0).shuffle(rows)
    return rows[: int(0.8 * count)], rows[int(0.8 * count) :]


def assert_random_split(data, per_class):
    train, test = shuffled(per_class * len(data.class_names))
    assert numbers(data.x_train) == train and numbers(data.x_test) == test
    assert data.y_train.tolist() == [row // per_class for row in train]
    assert data.y_test.tolist() == [row // per_class for row in test]


# Folders of image files


@pytest.mark.parametrize("name, root", [("imagenet_r", "imagenet-r"), ("cub200", "cub")])
def test_the_split_of_pilot_is_taken_where_it_is_there(tmp_path, name, root):
    tree(tmp_path / root / "train", ("n2", "n1"), 3, suffix="JPG")
    tree(tmp_path / root / "test", ("n2", "n1"), 2, start=50)
    data = load(name, tmp_path)
    assert data.class_names == ("n1", "n2") and data.augment
    assert numbers(data.x_train) == [3, 4, 5, 0, 1, 2] and data.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert numbers(data.x_test) == [52, 53, 50, 51] and data.y_test.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "name, root",
    [("imagenet_r", "imagenet-r"), ("imagenet_r_hepco", "imagenet-r"), ("cub200", "CUB_200_2011/images")],
)
def test_without_a_split_80_percent_are_drawn_for_training_as_hepco_does(tmp_path, name, root):
    tree(tmp_path / root, ("n1", "n2", "n3"), 10)
    (tmp_path / root / "README.txt").write_text("no class")
    data = load(name, tmp_path)
    assert data.class_names == ("n1", "n2", "n3")
    assert_random_split(data, 10)


def test_hepco_pools_the_split_of_pilot(tmp_path):
    for number, (label, index) in enumerate(itertools.product(("n1", "n2"), range(10))):
        picture(
            tmp_path / "imagenet-r" / ("test" if index % 3 == 1 else "train") / label / f"{index}.jpg", number
        )
    assert_random_split(load("imagenet_r_hepco", tmp_path), 10)


def test_cub_has_9430_training_images():
    train, test = raw.random_split(raw.LabelledItems(list(range(11_788)), [0] * 11_788))
    assert (len(train.items), len(test.items)) == (9430, 2358)


def test_half_a_split_is_refused(tmp_path):
    tree(tmp_path / "cub" / "train", ("a",), 2)
    assert f"no such folder: {str(tmp_path / 'cub' / 'test')!r}" in refusal("cub200", tmp_path)


def test_domains_are_pooled_and_classes_sorted_over_all_of_them(tmp_path):
    number = itertools.count()
    for label in ("Eiffel", "ant", "zoo"):
        for domain in DOMAINS:
            for index in range(3):
                if (label, domain) != ("zoo", "real"):
                    picture(tmp_path / "domainnet" / domain / label / f"{domain}_{index}.jpg", next(number))
    data = load("domainnet", tmp_path)
    assert data.class_names == ("Eiffel", "ant", "zoo")
    train, test = shuffled(51)
    assert numbers(data.x_train) == train and numbers(data.x_test) == test
    assert data.y_train.tolist() == [row // 18 for row in train]


def test_a_missing_domain_is_named(tmp_path):
    for domain in DOMAINS[:-1]:
        tree(tmp_path / "domainnet" / domain, ("ant",), 2)
    assert "domain 'sketch' is missing" in refusal("domainnet", tmp_path)


def test_office_home_and_eurosat_are_pooled(tmp_path):
    for number, domain in enumerate(("Art", "Clipart", "Product", "Real World")):
        tree(tmp_path / "OfficeHomeDataset_10072016" / domain, ("Bed", "Fan"), 5, start=number * 10)
    data = load("office_home", tmp_path)
    assert data.class_names == ("Bed", "Fan") and len(data.y_train) == 32
    domain = np.array(["Art", "Clipart", "Product", "Real World"])
    for split, columns in (("train", data.columns), ("test", data.columns_test)):
        images = getattr(data, f"x_{split}")
        np.testing.assert_array_equal(columns["domain"], domain[np.array(numbers(images)) // 10])
    tree(tmp_path / "2750", ("Forest", "River"), 10)
    assert_random_split(load("eurosat", tmp_path), 10)


def test_cars_have_their_split_and_imagenet_a_is_pooled_without_one(tmp_path):
    for split, start in (("train", 0), ("test", 40)):
        tree(tmp_path / "stanford_cars" / split, ("Audi A5", "Fiat 500"), 5, start=start)
    data = load("cars196", tmp_path)
    assert data.class_names == ("Audi A5", "Fiat 500")
    assert min(numbers(data.x_test)) >= 40 > max(numbers(data.x_train))
    tree(tmp_path / "imagenet-a", WNIDS[:2], 10)
    assert_random_split(load("imagenet_a", tmp_path), 10)


def test_three_sessions_of_core50_are_for_testing(tmp_path):
    sessions = [f"s{i}" for i in range(1, 12)]
    for i, session in enumerate(sessions):
        tree(tmp_path / "core50_128x128" / session, ("o1", "o2", "o10"), 2, start=i * 6)
    data = load("core50", tmp_path)
    assert data.class_names == ("o1", "o2", "o10")
    assert set(data.columns_test["session"]) == {"s3", "s7", "s10"}
    np.testing.assert_array_equal(
        data.columns["session"], np.array(sessions)[np.array(numbers(data.x_train)) // 6]
    )
    shutil.rmtree(tmp_path / "core50_128x128" / "s7")
    assert "expected s1 to s11" in refusal("core50", tmp_path)


def test_folders_may_have_sites(tmp_path):
    for number, (split, site) in enumerate(itertools.product(("train", "test"), ("lyon", "rome"))):
        tree(tmp_path / "own" / split / site, ("cat", "dog"), 3, start=number * 6)
    data = load(f"folder:{tmp_path / 'own'}", tmp_path / "data")
    assert data.class_names == ("cat", "dog") and numbers(data.x_train) == [
        0,
        1,
        2,
        6,
        7,
        8,
        3,
        4,
        5,
        9,
        10,
        11,
    ]
    assert data.columns["site"].tolist() == [*["lyon"] * 3, *["rome"] * 3] * 2
    again = load(f"folder:{tmp_path / 'own'}", tmp_path / "data")
    assert again.columns_test["site"].tolist() == data.columns_test["site"].tolist()


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for number, (wnid, index) in enumerate(itertools.product(("n2", "n1"), range(2))):
        picture(root / "train" / wnid / "images" / f"{wnid}_{index}.JPEG", number)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        picture(root / "val" / "images" / f"val_{number}.JPEG", 10 + number)
    lines = [f"val_{number}.JPEG\t{wnid}\t0\t1\t2\t3" for number, wnid in enumerate(["n1", "n2", "n2", "n1"])]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def test_tiny_imagenet_is_tested_on_its_validation_split(tiny):
    data = load("tiny_imagenet", tiny.parent)
    assert data.class_names == ("n1", "n2")
    assert numbers(data.x_train) == [2, 3, 0, 1] and data.y_train.tolist() == [0, 0, 1, 1]
    assert numbers(data.x_test) == [10, 13, 11, 12] and data.y_test.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "words, names",
    [
        ("n0\tentity\nn1\tgoldfish, Carassius auratus\nn2\tcrane\n", ("goldfish", "crane")),
        ("n1\tcrane, bird\nn2\tcrane, lift\n", ("crane (n1)", "crane (n2)")),
        ("n1\tgoldfish\n", ("goldfish", "n2")),
    ],
)
def test_tiny_imagenet_has_the_names_of_words_txt(tiny, words, names):
    (tiny / "words.txt").write_text(words)
    assert load("tiny_imagenet", tiny.parent).class_names == names


def test_tiny_imagenet_with_something_missing_is_refused(tiny):
    picture(tiny / "val" / "images" / "val_9.JPEG", 1)
    assert "val_9.JPEG' has no line in val_annotations.txt" in refusal("tiny_imagenet", tiny.parent)
    with (tiny / "val" / "val_annotations.txt").open("a") as file:
        file.write("val_9.JPEG\tn7\t0\t0\t0\t0\n")
    assert "val_9.JPEG' is of unknown class 'n7'" in refusal("tiny_imagenet", tiny.parent)
    (tiny / "val" / "val_annotations.txt").unlink()
    assert "val_annotations.txt' is missing" in refusal("tiny_imagenet", tiny.parent)
    (tiny / "val" / "val_annotations.txt").write_text("")
    shutil.rmtree(tiny / "train" / "n1" / "images")
    assert "train/n1/images' cannot be read (No such file" in refusal("tiny_imagenet", tiny.parent)


@pytest.fixture
def imagenet(tmp_path):
    """1,000 class folders, images only in those that are asked for."""

    def make(wnids):
        for split, index in itertools.product(("train", "val"), range(1000)):
            (tmp_path / "imagenet" / split / f"n{index:04d}").mkdir(parents=True)
        for number, wnid in enumerate(wnids):
            picture(tmp_path / "imagenet" / "train" / wnid / "a.JPEG", number)
            picture(tmp_path / "imagenet" / "val" / wnid / "b.JPEG", 500 + number)
        return tmp_path

    return make


@pytest.mark.parametrize("count", [100, 200])
def test_imagenet_subsets_are_the_first_classes_of_the_usual_permutation(imagenet, count):
    chosen = [f"n{index:04d}" for index in np.random.RandomState(1993).permutation(1000)[:count]]
    data = load(f"imagenet{count}", imagenet(chosen))
    assert data.class_names == tuple(chosen)
    assert numbers(data.x_train) == data.y_train.tolist() == list(range(count))
    assert numbers(data.x_test) == list(range(500, 500 + count)) and data.y_test.tolist() == list(
        range(count)
    )


def test_the_usual_subset_starts_with_these_classes():
    assert np.random.RandomState(1993).permutation(1000)[:5].tolist() == [54, 7, 894, 512, 126]


def test_a_class_list_says_which_classes_and_in_which_order(imagenet, tmp_path):
    chosen = [f"n{index:04d}" for index in range(300, 200, -1)]
    (tmp_path / "list.txt").write_text("\n".join(f"{wnid} some words" for wnid in chosen) + "\n\n")
    data = load("imagenet100", imagenet(chosen), class_list=str(tmp_path / "list.txt"))
    assert data.class_names == tuple(chosen) and numbers(data.x_train) == list(range(100))


def test_a_wrong_class_list_is_refused(imagenet, tmp_path):
    folder = imagenet([])
    (tmp_path / "list.txt").write_text("\n".join(f"n{index:04d}" for index in range(950, 1050)))

    def refused(name="imagenet100", path=tmp_path / "list.txt"):
        return refusal(name, folder, class_list=str(path))

    assert f"class_list: class 'n1000' is not in {str(tmp_path / 'imagenet' / 'train')!r}" in refused()
    assert "class_list: 100 classes are listed; imagenet200 needs 200" in refused("imagenet200")
    assert "is for imagenet100 and imagenet200; 'digits' takes none" in refused("digits")
    assert "cannot be read (FileNotFoundError" in refused(path=tmp_path / "none.txt")
    for content, words in (
        (b"n1\nn2\nn1 again\n", "names 'n1' twice"),
        (b"\n \n", "names no class"),
        (b"\xff\xfe", "cannot be read"),
    ):
        (tmp_path / "list.txt").write_bytes(content)
        assert words in refused()


def test_a_part_of_imagenet_needs_a_class_list(tmp_path):
    tree(tmp_path / "imagenet" / "train", ("n1", "n2"), 1)
    assert "no such folder" in refusal("imagenet100", tmp_path)
    tree(tmp_path / "imagenet" / "val", ("n1", "n2"), 1)
    assert "has 2 class folders, not 1000; name yours with --class-list" in refusal("imagenet100", tmp_path)


def test_the_last_five_drawings_of_each_character_are_for_testing(tmp_path):
    tree(tmp_path / "images_evaluation" / "Atlantean", ("character01", "character02"), 8)
    tree(tmp_path / "images_background" / "Zulu", ("character01",), 8, start=16)
    data = load("omniglot", tmp_path)
    assert data.class_names == ("Atlantean/character01", "Atlantean/character02", "Zulu/character01")
    assert numbers(data.x_train) == [0, 1, 2, 8, 9, 10, 16, 17, 18]
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert numbers(data.x_test) == [*range(3, 8), *range(11, 16), *range(19, 24)]
    assert not data.augment


def test_half_of_omniglot_is_refused(tmp_path):
    tree(tmp_path / "omniglot" / "images_background" / "Zulu", ("character01",), 8)
    assert "has images_background only" in refusal("omniglot", tmp_path)


# Array files


def cifar_batch(path, labels, start=0):
    """Records of two-colored images; image n has green n."""
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = [
        bytes([9] * 1024 + [start + number] * 1024 + list(range(256)) * 4) for number in range(len(labels))
    ]
    path.write_bytes(
        b"".join(
            bytes(np.atleast_1d(label).tolist()) + plane for label, plane in zip(labels, planes, strict=True)
        )
    )


@pytest.fixture
def cifar10(tmp_path):
    root = tmp_path / "cifar-10-batches-bin"
    for batch in range(5):
        cifar_batch(root / f"data_batch_{batch + 1}.bin", [batch % 2, 1], 2 * batch)
    cifar_batch(root / "test_batch.bin", [1, 0, 0], 100)
    (root / "batches.meta.txt").write_text("airplane\ntruck\n\n")
    return root


def test_cifar10_is_read_from_its_binary_files(cifar10):
    data = load_dataset("cifar10", DataOptions(data_dir=cifar10.parent))
    assert data.class_names == ("airplane", "truck") and data.augment
    assert data.x_train.shape == (10, 32, 32, 3) and data.size_train is None
    assert data.x_train[:, 3, 4, 1].tolist() == list(range(10)) and data.y_train.tolist() == [
        0,
        1,
        1,
        1,
    ] * 2 + [0, 1]
    assert data.x_test[:, 0, 0, 1].tolist() == [100, 101, 102] and data.y_test.tolist() == [1, 0, 0]
    np.testing.assert_array_equal(data.x_train[0, ..., 2], np.tile(np.arange(256), 4).reshape(32, 32))
    assert (data.x_train[..., 0] == 9).all()


def test_cifar100_has_its_fine_labels(tmp_path):
    root = tmp_path / "cifar-100-binary"
    cifar_batch(root / "train.bin", [(19, 2), (18, 0), (17, 1)])
    cifar_batch(root / "test.bin", [(1, 0), (1, 1), (1, 2)], 50)
    (root / "fine_label_names.txt").write_text("apple\nbee\ncat\n")
    data = load_dataset("cifar100", DataOptions(data_dir=tmp_path))
    assert data.y_train.tolist() == [2, 0, 1] and data.y_test.tolist() == [0, 1, 2]
    assert data.class_names == ("apple", "bee", "cat")


def test_damaged_cifar_files_are_named(cifar10):
    bad = cifar10 / "data_batch_3.bin"
    whole = bad.read_bytes()
    for content, words in (
        (whole[:-1], "it is truncated"),
        (b"", "0 bytes"),
        (b"\2" + whole[1:], "holds label 2, but there are names for 2"),
    ):
        bad.write_bytes(content)
        message = refusal("cifar10", cifar10.parent)
        assert words in message and str(bad) in message
    bad.unlink()
    assert f"{str(bad)!r} is missing" in refusal("cifar10", cifar10.parent)


@pytest.mark.parametrize(
    "name, pickled, binary",
    [("cifar10", "cifar-10-batches-py", "-bin/"), ("cifar100", "cifar-100-python", "-binary/")],
)
def test_the_pickled_version_of_cifar_is_never_read(tmp_path, name, pickled, binary):
    (tmp_path / pickled).mkdir()
    for file in ("data_batch_1", "test_batch", "train", "test", "meta"):
        (tmp_path / pickled / file).write_bytes(pickle.dumps({}))
    message = refusal(name, tmp_path)
    assert "holds pickles, which are never loaded" in message and binary in message


def idx(path, array, magic=None, shape=None, pack=False):
    header = struct.pack(f">{1 + array.ndim}I", magic or 0x800 + array.ndim, *(shape or array.shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((gzip.compress if pack else bytes)(header + array.tobytes()))


@pytest.fixture(params=[False, True], ids=["plain", "gz"])
def fashion(tmp_path, request):
    end = ".gz" if request.param else ""
    root = tmp_path / "fashion_mnist"
    for split, count in (("train", 20), ("t10k", 10)):
        images = np.arange(count, dtype=np.uint8)[:, None, None] + np.arange(28, dtype=np.uint8)
        idx(
            root / f"{split}-images-idx3-ubyte{end}",
            np.broadcast_to(images, (count, 28, 28)).copy(),
            pack=request.param,
        )
        idx(
            root / f"{split}-labels-idx1-ubyte{end}",
            np.arange(count, dtype=np.uint8) % 10,
            pack=request.param,
        )
    return root


def test_fashion_mnist_is_read_from_its_idx_files(fashion):
    data = load_dataset("fashion_mnist", DataOptions(data_dir=fashion.parent))
    assert data.x_train.shape == (20, 28, 28, 3) and data.x_test.shape == (10, 28, 28, 3)
    assert data.x_train[:, 5, 3].tolist() == [[number + 3] * 3 for number in range(20)]
    assert data.y_train.tolist() == list(range(10)) * 2
    assert data.class_names[:2] == ("T-shirt/top", "Trouser") and not data.augment


def test_array_images_larger_than_the_test_side_are_resized(fashion):
    data = load("fashion_mnist", fashion.parent)
    assert data.x_train.shape[1:3] == (12, 12) and data.x_test.shape[1:3] == (8, 8)
    assert data.size_train.tolist() == [[28, 28]] * 20


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"magic": 0x801}, "no idx header of 3 dimensions"),
        ({"magic": 0xD03}, "no idx header of 3 dimensions"),
        ({"shape": (21, 28, 28)}, "less content than"),
        ({"shape": (19, 28, 28)}, "more content than"),
        ({"shape": (2**32 - 1,) * 3}, "its header promises"),
    ],
)
def test_an_idx_file_that_breaks_its_promise_is_named(tmp_path, changes, words):
    idx(tmp_path / "x.gz", np.zeros((20, 28, 28), np.uint8), **changes, pack=True)
    with pytest.raises(InputError, match=words) as error:
        read_idx(tmp_path / "x.gz", 3)
    assert str(tmp_path / "x.gz") in str(error.value)


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
@pytest.mark.parametrize("pack", [False, True])
def test_a_truncated_idx_file_is_named(tmp_path, pack, cut):
    path = tmp_path / ("x.gz" if pack else "x")
    idx(path, np.random.RandomState(0).randint(0, 256, (5, 6, 7), np.uint8), pack=pack)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match="is damaged or no idx file"):
        read_idx(path, 3)


def test_fashion_mnist_with_a_file_missing_or_wrong_is_refused(fashion):
    labels = next(fashion.glob("t10k-labels*"))
    idx(labels, np.arange(9, dtype=np.uint8), pack=labels.suffix == ".gz")
    assert "has 10 images, but" in refusal("fashion_mnist", fashion.parent)
    idx(labels, np.arange(1, 11, dtype=np.uint8), pack=labels.suffix == ".gz")
    assert "does not hold labels from 0 to 9" in refusal("fashion_mnist", fashion.parent)
    labels.unlink()
    assert "t10k-labels-idx1-ubyte' is missing" in refusal("fashion_mnist", fashion.parent)


# tensorflow-datasets


@pytest.fixture(scope="module")
def tfds():
    # Its dependencies may deprecate this and that while being imported; afterwards it is held to no warnings.
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow_datasets
    return tensorflow_datasets


def encoded(number, size=(6, 6)):
    stream = io.BytesIO()
    Image.new("RGB", size, (number // 256, number % 256, 7)).save(stream, "PNG")
    return stream.getvalue()


def generate(tfds, folder, name, features, splits, version="1.0.0", config=None):
    """A data set as tensorflow-datasets writes it: features by name, lists of examples by split."""

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def generators(self, manager):
        return {split: enumerate(map(opened, examples)) for split, examples in splits.items()}

    def opened(example):
        return {
            key: io.BytesIO(value) if isinstance(value, bytes) else value for key, value in example.items()
        }

    body = {
        "name": name,
        "VERSION": tfds.core.Version(version),
        "_info": info,
        "_split_generators": generators,
    }
    body |= {
        "_generate_examples": None,
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
    }
    kind = types.new_class(
        "Made",
        (tfds.core.GeneratorBasedBuilder,),
        {"skip_registration": True},
        lambda space: space.update(body),
    )
    kind(data_dir=folder / "tensorflow_datasets", file_format="array_record").download_and_prepare()


def labelled(tfds, names, **more):
    return {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(names=list(names)), **more}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_of_tfds_comes_in_its_official_order(tfds, tmp_path, name):
    features = labelled(tfds, ["bee", "ant"], id=tfds.features.Text()) | {
        "image": tfds.features.Image(shape=(6, 6, 3))
    }
    splits = {
        split: [{"image": encoded(base + n), "label": n % 2, "id": f"{split}_{n:05d}"} for n in range(20)]
        for split, base in (("train", 0), ("test", 100))
    }
    generate(tfds, tmp_path, name, features, splits)
    data = load(name, tmp_path)
    assert numbers(data.x_train) == list(range(20)) and numbers(data.x_test) == list(range(100, 120))
    assert data.y_train.tolist() == [0, 1] * 10 and data.class_names == ("bee", "ant")


def test_any_data_set_of_tfds_has_a_name(tfds, tmp_path):
    examples = [{"image": encoded(n), "label": n % 2} for n in range(10)]
    generate(
        tfds, tmp_path, "own", labelled(tfds, ["bee", "ant"]), {"train": examples, "validation": examples}
    )
    data = load("tfds:own", tmp_path)
    assert data.class_names == ("bee", "ant") and (len(data.y_train), len(data.y_test)) == (10, 10)
    assert [n % 2 for n in numbers(data.x_train)] == data.y_train.tolist()
    generate(tfds, tmp_path, "whole", labelled(tfds, ["bee", "ant"]), {"train": examples})
    assert len(load("tfds:whole", tmp_path).y_test) == 2
    assert "prepare 'other' there with tensorflow-datasets" in refusal("tfds:other", tmp_path)


def test_builders_of_tfds_have_names_of_their_own(tfds, tmp_path):
    for base, names in ((0, ["zoo", "ant"]), (100, ["ant", "zoo"])):
        examples = [
            {"image": encoded(base + n), "label": names.index("ant") if n % 2 else names.index("zoo")}
            for n in range(10)
        ]
        generate(tfds, tmp_path, f"made{base}", labelled(tfds, names), {"train": examples})
    versions = sorted((tmp_path / "tensorflow_datasets").glob("made*/1.0.0"))
    listing = from_all_splits(versions, splits=("train",))
    for split in (listing.train, listing.test):
        levels = [
            Image.open(io.BytesIO(image)).getpixel((0, 0))[1]
            for image in split.fetch(range(len(split.labels)))
        ]
        assert [listing.class_names[label] for label in split.labels] == [
            ("zoo", "ant")[n % 2] for n in levels
        ]


def test_labels_of_tfds_may_be_text_and_what_has_none_is_named(tfds, tmp_path):
    features = {"image": tfds.features.Image(), "label": tfds.features.Text()}
    train = [{"image": encoded(n), "label": ["emu", "ant"][n % 2]} for n in range(4)]
    splits = {"train": [*train, {"image": encoded(9), "label": ""}], "test": train, "extra": train}
    generate(tfds, tmp_path, "worded", features, splits)
    assert re.search(r"train, record \d' has no label; .* 1 of 5 images", refusal("tfds:worded", tmp_path))
    console = Console(file=io.StringIO(), width=300)
    data = load_dataset("tfds:worded", DataOptions(data_dir=tmp_path, skip_corrupt=True, console=console))
    assert [("emu", "ant")[n % 2] for n in numbers(data.x_train)] == [
        data.class_names[y] for y in data.y_train
    ]
    assert "not read: the splits extra" in console.file.getvalue()


def test_imagenet_r_of_tfds_equals_its_official_files(tfds, tmp_path):
    tree(tmp_path / "files" / "imagenet-r", WNIDS, 10)
    features = labelled(tfds, ["n00000000", *WNIDS], file_name=tfds.features.Text())
    examples = [
        {"image": encoded(number), "label": wnid, "file_name": f"{wnid}/{index:03d}.png"}
        for number, (wnid, index) in enumerate(itertools.product(WNIDS, range(10)))
    ]
    generate(tfds, tmp_path, "imagenet_r", features, {"test": examples})
    for name in ("imagenet_r", "imagenet_r_hepco"):
        ours, theirs = load(name, tmp_path), load(name, tmp_path / "files")
        assert ours.class_names == theirs.class_names == WNIDS and ours.digest == theirs.digest
        assert_random_split(ours, 10)


def test_cub_of_tfds_equals_its_official_files(tfds, tmp_path):
    tree(tmp_path / "files" / "CUB_200_2011" / "images", BIRDS, 10)
    mask = tfds.features.Image(shape=(None, None, 1))
    features = labelled(
        tfds, BIRDS, segmentation_mask=mask, bbox=tfds.features.BBoxFeature(), label_name=tfds.features.Text()
    )
    features["image/filename"] = tfds.features.Text()
    examples = [
        {
            "image": encoded(number),
            "label": bird,
            "label_name": bird,
            "image/filename": f"CUB_200_2011/images/{bird}/{index:03d}.png",
            "bbox": tfds.features.BBox(0.0, 0.0, 1.0, 1.0),
            "segmentation_mask": encoded(0),
        }
        for number, (bird, index) in enumerate(itertools.product(BIRDS, range(10)))
    ]
    generate(tfds, tmp_path, "caltech_birds2011", features, {"train": examples[::2], "test": examples[1::2]})
    ours, theirs = load("cub200", tmp_path), load("cub200", tmp_path / "files")
    assert ours.class_names == BIRDS and ours.digest == theirs.digest


def test_domainnet_of_tfds_is_pooled_and_its_classes_sorted(tfds, tmp_path):
    for base, domain in enumerate(DOMAINS):
        splits = {
            split: [
                {"image": encoded(100 * base + 10 * part + n, (6, 6 + n % 2)), "label": n % 2}
                for n in range(6)
            ]
            for part, split in enumerate(("train", "test"))
        }
        generate(tfds, tmp_path, "domainnet", labelled(tfds, ["zoo", "ant"]), splits, config=domain)
    data = load("domainnet", tmp_path)
    everything = [100 * base + 10 * part + n for base in range(6) for part in range(2) for n in range(6)]
    assert data.class_names == ("ant", "zoo") and len(data.y_train) == int(0.8 * 72)
    assert sorted(numbers(data.x_train) + numbers(data.x_test)) == everything
    assert all(
        label == 1 - number % 2
        for number, label in zip(numbers(data.x_train), data.y_train.tolist(), strict=True)
    )


def test_one_domain_of_tfds_is_not_enough(tfds, tmp_path):
    examples = {"train": [{"image": encoded(1), "label": 0}], "test": [{"image": encoded(1), "label": 0}]}
    generate(tfds, tmp_path, "domainnet", labelled(tfds, ["ant"]), examples, config="real")
    assert "'domainnet' is not here" in refusal("domainnet", tmp_path)


def test_omniglot_of_tfds_keeps_five_drawings_of_each_character_for_testing(tfds, tmp_path):
    features = labelled(
        tfds, [f"name{n}" for n in range(3)], alphabet=tfds.features.ClassLabel(names=["Zulu", "Atlantean"])
    )
    features |= {"alphabet_char_id": np.int64}
    characters = [("Zulu", 0), ("Zulu", 1), ("Atlantean", 0)]
    examples = [
        {"image": encoded(100 * n + index), "label": n, "alphabet": alphabet, "alphabet_char_id": character}
        for n, (alphabet, character) in enumerate(characters)
        for index in range(8)
    ]
    generate(
        tfds,
        tmp_path,
        "omniglot",
        features,
        {"train": examples[:16], "test": examples[16:], "small1": examples[:3]},
    )
    data, again = (load("omniglot", tmp_path) for _ in range(2))
    assert data.class_names == ("Atlantean/character01", "Zulu/character01", "Zulu/character02")
    assert (
        data.y_train.tolist() == [0] * 3 + [1] * 3 + [2] * 3
        and data.y_test.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    )
    assert [number // 100 for number in numbers(data.x_train)] == [2] * 3 + [0] * 3 + [1] * 3
    assert len(set(numbers(data.x_train) + numbers(data.x_test))) == 24
    assert data.digest == again.digest


def test_fashion_mnist_of_tfds_is_gray_made_rgb(tfds, tmp_path):
    def gray(level):
        stream = io.BytesIO()
        Image.new("L", (28, 28), level).save(stream, "PNG")
        return stream.getvalue()

    names = [
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ]
    features = {
        "image": tfds.features.Image(shape=(28, 28, 1)),
        "label": tfds.features.ClassLabel(names=names),
    }
    splits = {
        split: [{"image": gray(n), "label": n % 10} for n in range(count)]
        for split, count in (("train", 30), ("test", 10))
    }
    generate(tfds, tmp_path, "fashion_mnist", features, splits)
    data = load_dataset("fashion_mnist", DataOptions(data_dir=tmp_path))
    assert data.class_names == tuple(names) and data.x_train.shape == (30, 28, 28, 3) and not data.augment
    assert (data.x_train == data.x_train[:, :1, :1, :1]).all()
    assert data.y_train.tolist() == [level % 10 for level in data.x_train[:, 0, 0, 0].tolist()]


@pytest.fixture
def made(tfds, tmp_path):
    features = labelled(tfds, WNIDS, file_name=tfds.features.Text())
    examples = [
        {"image": encoded(n), "label": n % 3, "file_name": f"{WNIDS[n % 3]}/{n:02d}.png"} for n in range(30)
    ]
    for version in ("0.9.0", "0.10.0"):
        generate(
            tfds,
            tmp_path,
            "imagenet_r",
            features,
            {"test": examples[: -3 if version == "0.9.0" else None]},
            version,
        )
    return tmp_path / "tensorflow_datasets" / "imagenet_r"


def test_the_newest_version_of_tfds_data_is_taken(made):
    data = load("imagenet_r", made.parents[1])
    assert len(data.y_train) + len(data.y_test) == 30


def test_official_files_come_before_tfds_data(made):
    tree(made.parents[1] / "imagenet-r", ("a", "b"), 10)
    assert load("imagenet_r", made.parents[1]).class_names == ("a", "b")


def test_damaged_tfds_data_are_named(made):
    (records,) = (made / "0.10.0").glob("*.array_record*")
    content = records.read_bytes()
    for damaged in (content[: len(content) // 2], b"no records", b""):
        records.write_bytes(damaged)
        message = refusal("imagenet_r", made.parents[1])
        assert str(made / "0.10.0") in message and "cannot be read" in message
    (made / "0.10.0" / "features.json").write_text("{")
    assert str(made / "0.10.0") in refusal("imagenet_r", made.parents[1])


def test_tfds_data_in_another_format_are_refused(made):
    info = made / "0.10.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    assert "is not in array_record files" in refusal("imagenet_r", made.parents[1])


def test_an_unreadable_image_in_tfds_data_is_named_or_skipped(tfds, tmp_path):
    features = labelled(tfds, WNIDS, file_name=tfds.features.Text())
    examples = [
        {"image": encoded(n), "label": n % 3, "file_name": f"{WNIDS[n % 3]}/{n:02d}.png"} for n in range(30)
    ]
    examples[7]["image"] = b"no image"
    generate(tfds, tmp_path, "imagenet_r", features, {"test": examples})
    message = refusal("imagenet_r", tmp_path)
    assert f"{tmp_path / 'tensorflow_datasets' / 'imagenet_r' / '1.0.0'}, test, record" in message
    data = load("imagenet_r", tmp_path, skip_corrupt=True)
    assert sorted(numbers(data.x_train) + numbers(data.x_test)) == [n for n in range(30) if n != 7]


def test_reading_tfds_data_needs_no_tensorflow(made):
    load("imagenet_r", made.parents[1])
    assert "tensorflow" not in sys.modules


def test_missing_packages_are_named(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    line = refusal("imagenet_r", made.parents[1])
    assert "needs the packages tensorflow-datasets and array_record" in line and "'.[tfds]'" in line


# What is here and what is not


def test_every_named_data_set_that_is_missing_says_what_to_put_where(tmp_path):
    for name, named in NAMED.items():
        message = refusal(name, tmp_path)
        assert f"fcljax data prepare {name}" in message
        assert named.put in message and str(tmp_path) in message


def test_only_what_can_be_downloaded_is_said_to_be(tmp_path):
    for name in NAMED:
        assert ("or have it downloaded (" in refusal(name, tmp_path)) == (name in OFFICIAL)


def test_a_run_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "fetch", lambda *args, **options: pytest.fail("a run started a download"))
    for name in NAMED:
        refusal(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_prepare_downloads_only_what_is_not_here(tmp_path, made, cifar10, monkeypatch):
    monkeypatch.setattr(download, "fetch", lambda *args, **options: pytest.fail("started a download"))
    assert prepare_in("imagenet_r", tmp_path).counts == (24, 6)
    assert prepare_in("cifar10", tmp_path).counts == (10, 3)
    cifar10.rename(tmp_path / "away")
    assert prepare_in("cifar10", tmp_path).counts == (10, 3)


def test_prepare_says_what_to_put_where_nothing_can_be_downloaded(tmp_path):
    for name in NAMED.keys() - OFFICIAL.keys():
        message = refusal(name, tmp_path, prepare_in)
        assert (
            "is not here and cannot be downloaded" in message
            and NAMED[name].put in message
            and str(tmp_path) in message
        )


def test_states_of_data_sets(tmp_path, made, cifar10):
    tree(tmp_path / "domainnet" / "real", ("ant",), 1)
    load("cifar10", tmp_path)
    tree(tmp_path / "cub" / "train", ("ant",), 1)
    tree(tmp_path / "cub" / "test", ("ant",), 1)
    states = {name: state for name, what, state in known_datasets(tmp_path)}
    assert list(states) == list(DATASETS)
    assert states["digits"] == states["glyphs"] == "built in"
    assert states["cifar10"] == "prepared"
    assert states["cub200"] == "raw files found"
    assert states["imagenet_r"] == states["imagenet_r_hepco"] == "via tensorflow-datasets"
    assert states["cifar100"].startswith("not here: put cifar-100-binary/")
    assert states["domainnet"].startswith("not here: domain 'clipart' is missing")
    assert all("\n" not in state for state in states.values())


def test_prepared_data_do_without_their_raw_files(cifar10, tmp_path):
    before = load("cifar10", tmp_path)
    cifar10.rename(tmp_path / "away")
    assert load("cifar10", tmp_path).digest == before.digest == prepare_in("cifar10", tmp_path).digest
    with pytest.raises(InputError, match="'cifar10' is not here"):
        load_dataset("cifar10", DataOptions(geometry=Geometry(40, 40), data_dir=tmp_path))


def test_two_prepared_versions_without_raw_files_are_not_guessed_between(cifar10, tmp_path):
    load("cifar10", tmp_path)
    os.utime(cifar10 / "test_batch.bin", ns=(0, 0))
    load("cifar10", tmp_path)
    cifar10.rename(tmp_path / "away")
    assert "is prepared more than once, and its raw files are gone; remove one of" in refusal(
        "cifar10", tmp_path
    )


def test_a_release_that_is_not_whole_is_noted(cifar10):
    console = Console(file=io.StringIO(), width=300)
    load_dataset("cifar10", DataOptions(data_dir=cifar10.parent, console=console))
    assert (
        "note: cifar10 has 60,000 images" in console.file.getvalue() and "holds 13" in console.file.getvalue()
    )


def test_a_class_that_a_split_lacks_is_named(tmp_path):
    tree(tmp_path / "imagenet-r", ("a", "b"), 1)
    assert "class 'b' has no training images" in refusal("imagenet_r", tmp_path)


def test_the_data_folder_is_the_argument_or_the_variable_or_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FCLJAX_DATA", raising=False)
    assert data_folder() == tmp_path / ".cache" / "fcljax"
    monkeypatch.setenv("FCLJAX_DATA", "~/elsewhere")
    assert data_folder() == tmp_path / "elsewhere"
    assert data_folder("here") == Path("here")
