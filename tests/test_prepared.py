"""Images are decoded once; the cache is whole, holds what was decoded, and its damage is found and named."""

import contextlib
import errno
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import fcljax
from fcljax import files
from fcljax.data.augment import Geometry
from fcljax.data.files import prepared
from fcljax.data.files.sources import DataOptions, load_dataset, prepare
from fcljax.errors import InputError

ROOT = Path(fcljax.__file__).parents[1]
GEOMETRY = Geometry(train=10, test=8)
SIZES = {"a.png": (20, 12), "b.jpg": (9, 31), "c.png": (16, 16)}


@pytest.fixture
def raw(tmp_path):
    """A folder of two classes with images of several sizes."""
    rng = np.random.RandomState(0)
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            for file, (width, height) in SIZES.items():
                path = tmp_path / "raw" / split / label / file
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.randint(0, 256, (height, width, 3), np.uint8)).save(path)
    return tmp_path / "raw"


@pytest.fixture
def load(raw, tmp_path):
    return lambda geometry=GEOMETRY, verify=False, **options: load_dataset(
        f"folder:{raw}",
        DataOptions(
            geometry=geometry, data_dir=tmp_path / "data", console=Console(file=io.StringIO()), **options
        ),
        verify,
    )


@pytest.fixture
def make(raw, tmp_path):
    return lambda geometry=GEOMETRY, console=None, force=False, **options: prepare(
        f"folder:{raw}",
        DataOptions(
            geometry=geometry,
            data_dir=tmp_path / "data",
            console=console or Console(file=io.StringIO()),
            **options,
        ),
        force,
    )


def refusal(call, *args, **options):
    with pytest.raises(InputError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def folders(tmp_path):
    return sorted(
        path for path in (tmp_path / "data" / "prepared").glob("*") if not path.name.endswith(".lock")
    )


def entry_of(tmp_path):
    (folder,) = folders(tmp_path)
    return folder


def decoding_is_over(monkeypatch):
    def never(*args):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(prepared, "decode", never)


def test_images_of_several_sizes_are_squeezed_for_training_and_cropped_for_testing(raw, load):
    data = load()
    assert data.x_train.shape == (6, 10, 10, 3) and data.x_test.shape == (6, 8, 8, 3)
    with Image.open(raw / "train" / "cat" / "a.png") as image:
        np.testing.assert_array_equal(
            data.x_train[0], np.asarray(image.resize((10, 10), Image.Resampling.BICUBIC))
        )
    with Image.open(raw / "test" / "dog" / "a.png") as image:
        wide = image.resize((13, 8), Image.Resampling.BICUBIC)  # int(8 * 20 / 12)
        np.testing.assert_array_equal(data.x_test[3], np.asarray(wide.crop((2, 0, 10, 8))))  # round(2.5) is 2


def test_sizes_before_squeezing_are_kept(load):
    height_and_width = [(height, width) for width, height in SIZES.values()] * 2
    data = load()
    assert data.size_train.tolist() == list(map(list, height_and_width)) and data.size_train.dtype == np.int32
    assert data.size_test is None
    assert load(GEOMETRY._replace(squash=True)).size_test.tolist() == list(map(list, height_and_width))


@pytest.mark.parametrize("test, stored", [(16, (16, 24)), (15, None)])
def test_images_of_one_size_stay_as_they_are_unless_their_short_side_is_larger_than_the_test_side(
    raw, load, test, stored
):
    for index, file in enumerate(sorted(raw.rglob("*.*"))):
        Image.new("RGB", (24, 16), (index, 0, 0)).save(file.with_suffix(".png"))
        if file.suffix == ".jpg":
            file.unlink()
    data = load(Geometry(train=12, test=test))
    assert data.x_train.shape[1:3] == (stored or (12, 12)) and data.x_test.shape[1:3] == (stored or (15, 15))
    assert (data.size_train is None) == (stored is not None)


def test_later_runs_map_what_the_first_has_decoded(load, monkeypatch):
    first = load()
    decoding_is_over(monkeypatch)
    second = load()
    assert isinstance(second.x_train, np.memmap) and isinstance(second.x_test, np.memmap)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_digest_names_the_content_and_nothing_else(raw, load, tmp_path):
    data = load()
    arrays = {key: getattr(data, key) for key in ("x_train", "y_train", "x_test", "y_test", "size_train")}
    assert data.digest == prepared.digest_of_arrays({key: np.array(array) for key, array in arrays.items()})
    assert (
        data.digest
        == load_dataset(f"folder:{raw}", DataOptions(geometry=GEOMETRY, data_dir=tmp_path / "other")).digest
    )
    assert data.digest != load(GEOMETRY._replace(kernel="bilinear")).digest


@pytest.mark.parametrize("change", [{"train": 11}, {"test": 9}, {"squash": True}, {"kernel": "bilinear"}])
def test_every_geometry_has_its_own_place(load, tmp_path, change):
    load()
    load(GEOMETRY._replace(**change))
    assert len(folders(tmp_path)) == 2


def test_a_changed_file_is_decoded_anew(raw, load, tmp_path):
    before = load()
    file = raw / "train" / "cat" / "c.png"
    time = file.stat().st_mtime_ns
    Image.new("RGB", (16, 16)).save(file)
    os.utime(file, ns=(time + 1, time + 1))
    after = load()
    assert not after.x_train[2].any() and before.x_train[2].any()
    assert len(folders(tmp_path)) == 2


def test_added_and_renamed_files_are_decoded_anew(raw, load):
    assert len(load().x_train) == 6
    Image.new("RGB", (5, 5)).save(raw / "train" / "cat" / "d.PNG")
    assert len(load().x_train) == 7
    (raw / "train" / "cat" / "d.PNG").rename(raw / "train" / "dog" / "d.PNG")
    assert load().y_train.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_a_link_that_leaves_the_folder_is_followed(raw, load, tmp_path):
    Image.new("RGB", (6, 6), (255, 0, 0)).save(tmp_path / "elsewhere.png")
    (raw / "train" / "cat" / "d.png").symlink_to(tmp_path / "elsewhere.png")
    assert (load().x_train[3] == (255, 0, 0)).all()


def test_a_link_that_leads_nowhere_is_named(raw, load):
    (raw / "train" / "cat" / "d.png").symlink_to(raw / "nowhere.png")
    assert f"{str(raw / 'train' / 'cat' / 'd.png')!r} cannot be read (No such file" in refusal(
        load, skip_corrupt=True
    )


BAD = {"truncated.png": None, "text.png": b"no image", "tiny.png": (1, 7), "empty.jpg": b""}


@pytest.fixture
def with_bad(raw):
    """The folder with unreadable images between the others."""
    stream = io.BytesIO()
    Image.fromarray(np.random.RandomState(1).randint(0, 256, (30, 30, 3), np.uint8)).save(stream, "PNG")
    for name, bad in BAD.items():
        file = raw / "train" / "cat" / f"b_{name}"
        if isinstance(bad, tuple):
            Image.new("RGB", bad).save(file)
        else:
            file.write_bytes(stream.getvalue()[:-900] if bad is None else bad)
    return raw


@pytest.mark.parametrize("name", BAD)
def test_an_unreadable_image_is_named_and_nothing_is_left_behind(with_bad, load, tmp_path, name):
    for other in set(BAD) - {name}:
        (with_bad / "train" / "cat" / f"b_{other}").unlink()
    assert f"{str(with_bad / 'train' / 'cat' / f'b_{name}')!r} is " in refusal(load)
    assert folders(tmp_path) == []


def test_unreadable_images_are_skipped_counted_and_listed_where_that_is_asked_for(
    with_bad, make, load, tmp_path
):
    console = Console(file=io.StringIO(), width=80)
    result = make(skip_corrupt=True, console=console)
    assert result.counts == (6, 6) and len(result.skipped) == 4
    assert "skipped 4 unreadable images" in console.file.getvalue()
    listed = json.loads((entry_of(tmp_path) / "manifest.json").read_text())["skipped"]
    assert {Path(entry["file"]).name for entry in listed} == {f"b_{name}" for name in BAD}
    data = load(skip_corrupt=True)
    for name in BAD:
        (with_bad / "train" / "cat" / f"b_{name}").unlink()
    clean = load()
    np.testing.assert_array_equal(data.x_train, clean.x_train)
    np.testing.assert_array_equal(data.size_train, clean.size_train)
    assert data.digest == clean.digest and len(data.y_train) == 6


def test_data_prepared_with_gaps_are_not_used_silently(with_bad, load):
    load(skip_corrupt=True)
    message = refusal(load)
    assert "was prepared without 4 unreadable images (first: " in message and "give --skip-corrupt" in message


def test_a_class_left_without_images_is_an_error(raw, load):
    for file in (raw / "test" / "dog").iterdir():
        file.write_bytes(b"")
    assert "class 'dog' has no readable test images" in refusal(load, skip_corrupt=True)


def test_a_whole_block_of_unreadable_images_can_be_skipped(with_bad, load, monkeypatch):
    monkeypatch.setattr(prepared, "_BLOCK", 2)
    assert load(skip_corrupt=True).y_train.tolist() == [0, 0, 0, 1, 1, 1]


def test_blocks_do_not_change_the_result(load, make, monkeypatch):
    digest = load().digest
    monkeypatch.setattr(prepared, "_BLOCK", 4)
    monkeypatch.setattr(prepared, "_BYTES", 700)
    assert make(force=True).digest == digest
    assert make().digest == digest


def test_prepare_reports_what_there_is(make, tmp_path):
    result = make()
    assert result.folder == entry_of(tmp_path) and result.counts == (6, 6) and result.skipped == ()
    assert result.bytes == sum(file.stat().st_size for file in result.folder.glob("*.npy"))
    manifest = json.loads((result.folder / "manifest.json").read_text())
    assert manifest["digest"] == result.digest
    assert manifest["counts"] == {"train": 6, "test": 6} and manifest["geometry"] == GEOMETRY._asdict()


def damage(folder, file, change):
    path = folder / file
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def cut(content):
    del content[-1]


def flip(content):
    content[-1] ^= 1


@pytest.mark.parametrize(
    "file, change, words",
    [
        ("x_train.npy", cut, "x_train.npy has"),
        ("y_test.npy", cut, "y_test.npy has"),
        ("manifest.json", cut, "damaged ("),
        ("manifest.json", lambda content: content.clear(), "damaged ("),
        ("manifest.json", lambda content: content.__setitem__(slice(None), b"[]"), "not of this version"),
        ("manifest.json", lambda content: content.__setitem__(slice(None), b'{"format": 1}'), "damaged ("),
        ("x_test.npy", lambda content: content.__setitem__(slice(0, 80), bytes(80)), "damaged ("),
        (
            "y_train.npy",
            lambda content: content.__setitem__(-1, 1),
            "y_train.npy does not match its checksum",
        ),
    ],
)
def test_damage_is_named_with_the_way_to_rebuild(raw, load, make, tmp_path, file, change, words):
    data = load()
    damage(entry_of(tmp_path), file, change)
    message = refusal(load)
    assert words in message and str(entry_of(tmp_path)) in message
    assert f"fcljax data prepare folder:{raw} --force" in message
    assert make(force=True).digest == data.digest == load().digest


def test_a_missing_array_is_damage(load, tmp_path):
    load()
    (entry_of(tmp_path) / "x_test.npy").unlink()
    assert "is damaged" in refusal(load)


@pytest.mark.parametrize("file", ["x_train.npy", "x_test.npy", "size_train.npy"])
def test_one_wrong_bit_is_found_by_preparing_again(make, tmp_path, file):
    make()
    make()
    damage(entry_of(tmp_path), file, flip)
    assert f"{file} does not match its checksum" in refusal(make)


def test_pickled_arrays_in_the_cache_are_not_loaded(load, tmp_path):
    load()
    folder = entry_of(tmp_path)
    np.save(folder / "y_test.npy", np.array([print] * 6), allow_pickle=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["arrays"]["y_test"]["bytes"] = (folder / "y_test.npy").stat().st_size
    prepared.write_manifest(folder, manifest)
    message = refusal(load)
    assert "is damaged" in message and "checksum" not in message


def test_a_forced_rebuild_leaves_mapped_arrays_alone(raw, load, make):
    before = load()
    copy = before.x_train.copy()
    make(force=True)
    np.testing.assert_array_equal(before.x_train, copy)


@pytest.mark.long
def test_two_processes_that_prepare_at_once_both_end_well(raw, load, tmp_path):
    code = (
        "import sys\n"
        "from fcljax.data.augment import Geometry\n"
        "from fcljax.data.files.sources import DataOptions, load_dataset\n"
        "print(load_dataset(sys.argv[1], DataOptions(Geometry(10, 8), sys.argv[2])).digest)"
    )
    command = [sys.executable, "-c", code, f"folder:{raw}", str(tmp_path / "data")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [load().digest] * 2
    entry_of(tmp_path)


@pytest.mark.parametrize("locks", [True, False])
def test_many_threads_that_prepare_at_once_all_end_well(load, tmp_path, monkeypatch, locks):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "no locks")

    if not locks:
        monkeypatch.setattr(files, "fcntl", types.SimpleNamespace(flock=unsupported, LOCK_EX=0, LOCK_NB=0))
    with ThreadPoolExecutor(4) as pool:
        digests = {data.digest for data in pool.map(lambda _: load(), range(4))}
    assert len(digests) == 1
    entry_of(tmp_path)


def test_what_a_killed_process_left_is_removed(load, tmp_path):
    load()
    folder = entry_of(tmp_path)
    left = folder.with_name(f".{folder.name}.tmp-abc")
    folder.rename(left)
    load()
    assert folders(tmp_path) == [folder]


def test_a_data_folder_that_cannot_be_written_is_named(raw, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(load_dataset, f"folder:{raw}", DataOptions(data_dir=tmp_path / "file"))
    assert message.startswith("data_dir: cannot write prepared data to") and "FCLJAX_DATA" in message


def test_a_full_disk_is_named_before_anything_is_decoded(load, tmp_path, monkeypatch):
    decoding_is_over(monkeypatch)
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    assert "has 0.0 GB left, the prepared images need" in refusal(load)
    assert folders(tmp_path) == []


def test_a_disk_that_fills_up_is_an_error_and_no_crash(load, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepared.os, "posix_fallocate", full)
    assert "No space left on device" in refusal(load)
    assert folders(tmp_path) == []


def test_long_work_shows_its_progress_and_short_work_does_not(make, monkeypatch):
    def shown():
        console = Console(file=io.StringIO(), force_terminal=True, width=100)
        make(console=console, force=True)
        return console.file.getvalue()

    assert "decoding images" not in shown()
    monkeypatch.setattr(prepared, "_LONG", 1)
    assert "decoding images" in shown() and "12/12" in shown()


# ---- what decides clients, tasks and names -----------------------------------------------------------------


@pytest.fixture
def sites(tmp_path):
    """The arguments of a data set with a column of sites, prepared in `tmp_path`."""
    rng = np.random.RandomState(0)
    for site, split, label in itertools.product("ab", ("train", "test"), ("cat", "dog")):
        path = tmp_path / "raw" / split / site / label / "1.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(rng.randint(0, 256, (8, 8, 3), np.uint8)).save(path)
    options = DataOptions(geometry=GEOMETRY, data_dir=tmp_path / "data", console=Console(file=io.StringIO()))
    load_dataset(f"folder:{tmp_path / 'raw'}", options)
    return f"folder:{tmp_path / 'raw'}", options


def turned(path, *keys):
    """Turn a list in a JSON file round."""
    content = json.loads(path.read_text())
    inside = content
    for key in keys[:-1]:
        inside = inside[key]
    if keys:
        inside[keys[-1]] = inside[keys[-1]][::-1]
    else:
        content = content[::-1]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("columns_train.json", ["site"]),
        ("columns_test.json", ["site"]),
        ("names_train.json", []),
        ("manifest.json", ["class_names"]),
        ("manifest.json", ["arrays", "y_train", "sha256"]),
    ],
)
def test_changed_columns_names_and_manifests_are_damage(sites, tmp_path, file, keys):
    turned(entry_of(tmp_path) / file, *keys)
    message = refusal(load_dataset, *sites)
    assert f"{file} does not match its checksum" in message and "--force" in message


def test_a_column_that_was_not_prepared_is_damage(sites, tmp_path):
    folder = entry_of(tmp_path)
    (folder / "columns_train.json").rename(folder / "columns_other.json")
    assert "columns_train.json" in refusal(load_dataset, *sites)
    (folder / "columns_other.json").rename(folder / "columns_train.json")
    (folder / "columns_more.json").write_text("{}")
    assert "columns_more.json does not belong to the prepared data set" in refusal(load_dataset, *sites)


def test_data_that_an_earlier_version_prepared_are_read_and_checked_as_far_as_that_goes(sites, tmp_path):
    folder, before = entry_of(tmp_path), load_dataset(*sites)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in (prepared.SUM, "texts"):
        del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    after = load_dataset(*sites)
    assert after.columns["site"].tolist() == before.columns["site"].tolist() == ["a", "b", "a", "b"]
    for wrong in ('{"site": ["a"]}', '{"site": 1}', "[]", "[" * 9999):
        (folder / "columns_train.json").write_text(wrong)
        message = refusal(load_dataset, *sites)
        assert "columns_train.json' is damaged" in message and "--force" in message


def test_of_those_that_wait_for_a_lock_whose_file_is_removed_one_works(tmp_path):
    path, inside, leave = tmp_path / "lock", threading.Event(), threading.Event()
    waiting = threading.Event()

    def second():
        with files.owned(path, waiting.set):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=second)
    with contextlib.suppress(ValueError), files.owned(path, remove_on_error=True):
        thread.start()
        assert waiting.wait(20)
        raise ValueError("refused")
    assert inside.wait(20)
    with pytest.raises(BlockingIOError), files.owned(path):
        pass
    leave.set()
    thread.join()
    with files.owned(path):
        assert path.exists()
