"""Clients and tasks that the user says: a file or column of owners, sizes of tasks, an order of classes."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import fcljax
from fcljax import cli, config
from fcljax.commands import running
from fcljax.data.files.mixtures import mixed
from fcljax.data.files.sources import DataOptions, hold_out, load_dataset
from fcljax.data.kinds import TextData
from fcljax.data.owners import find_owners, owners_csv, with_owners
from fcljax.data.tasks import chosen_sizes, listed_order
from fcljax.errors import InputError
from fcljax.scenario import fit_partition, make_scenario

DIGITS = load_dataset("digits")
COUNT = len(DIGITS.y_train)
WRITER = np.arange(COUNT) % 3 * 5  # 0, 5, 10


def csv_file(folder, lines, head="example,client"):
    path = folder / "who.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return f"file:{path}"


def scenario_of(dataset, **given):
    settings = config.from_mapping("linear", given, "test")
    settings = config.resolve(fit_partition(settings, dataset))
    return settings, make_scenario(dataset, settings, 2, False)


def owned(scenario, client):
    """All examples of a client, over the tasks."""
    each = [partition.of_client(client) for of_task in scenario.partitions for partition in of_task[:1]]
    return sorted(np.concatenate(each).tolist())


def test_a_file_gives_each_example_to_its_client(tmp_path):
    lines = [f"{i}, {name}" for i, name in enumerate(np.array(["ann", "bob", "cy"])[WRITER // 5]) if i % 10]
    settings, scenario = scenario_of(DIGITS, partition=csv_file(tmp_path, lines))
    assert settings.clients == 3 and settings.population == "static"
    for client in range(3):
        assert owned(scenario, client) == [i for i in range(COUNT) if i % 3 == client and i % 10]
    # every example is in the task of its class
    for task, of_task in zip(scenario.tasks, scenario.partitions, strict=True):
        assert np.asarray(task.current)[scenario.train_label[of_task[0].indices]].all()


def test_a_column_or_an_array_has_a_client_for_each_value_in_the_order_of_numbers():
    dataset = with_owners(DIGITS, WRITER)
    assert find_owners(dataset, "column:owner").names == ("0", "5", "10")
    _, scenario = scenario_of(dataset, partition="column:owner")
    assert owned(scenario, 2) == np.flatnonzero(WRITER == 10).tolist()


def test_a_negative_owner_is_refused():
    with pytest.raises(InputError, match="the owner of example 1 is -5; expected numbers from 0, or text"):
        with_owners(DIGITS, 5 - WRITER * 2)


def test_held_out_examples_belong_to_nobody_and_the_others_keep_their_owners(tmp_path):
    kept = hold_out(DIGITS, 0.2)
    of_file = csv_file(tmp_path, [f"{i},{WRITER[i]}" for i in range(COUNT)])
    for dataset, partition in ((kept, of_file), (with_owners(kept, WRITER), "column:owner")):
        owners = find_owners(dataset, partition)
        names = np.array(owners.names)[owners.client]
        np.testing.assert_array_equal(names, WRITER[kept.train_rows].astype(str))
    # what a run keeps is a file that gives the same
    again = tmp_path / "again.csv"
    again.write_text(owners_csv(kept, of_file))
    np.testing.assert_array_equal(
        find_owners(kept, f"file:{again}").client, find_owners(kept, of_file).client
    )


def write_rows(form, folder, unlabelled=()):
    """Write twenty examples of two classes as a file without test examples.

    The first number of each is its row. Those of the rows `unlabelled` have no label.

    Returns:
      The name of the data set.
    """
    rows = np.arange(20)
    labels = [None if row in unlabelled else row % 2 for row in range(20)]
    numbers = np.array([-1 if label is None else label for label in labels])
    written = ["" if label is None else label for label in labels]
    words = [f"text {row}" for row in rows]
    if form == "csv":
        lines = [f"{row},{label}" for row, label in zip(rows, written, strict=True)]
        (folder / "all.csv").write_text("\n".join(["row,label", *lines]) + "\n")
        return f"csv:{folder / 'all.csv'}"
    if form == "npz":
        images = np.broadcast_to(rows[:, None, None], (20, 4, 4)).astype(np.uint8)
        np.savez(folder / "all.npz", x=images, y=numbers)
        return f"npz:{folder / 'all.npz'}"
    if form == "list":
        pictures = write_pictures(folder, rows)
        lines = [f"{picture.name},{label}" for picture, label in zip(pictures, written, strict=True)]
        (folder / "all.txt").write_text("\n".join(lines) + "\n")
        return f"list:{folder / 'all.txt'}"
    if form == "json":
        clients = {"ann": {"x": words, "y": numbers.tolist()}}
        (folder / "all.json").write_text(json.dumps(clients))
        return f"texts:{folder / 'all.json'}"
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    if form == "hf":
        images = [{"bytes": picture.read_bytes()} for picture in write_pictures(folder, rows)]
        pq.write_table(pa.table({"image": images, "label": labels}), folder / "train.parquet")
        return f"hf:{folder}"
    pq.write_table(pa.table({"text": words, "label": labels}), folder / "train.parquet")
    return f"texts:{folder}"


def write_pictures(folder, rows):
    """Write an image for each row, with its number as its grey level."""
    paths = [folder / f"{row}.png" for row in rows]
    for row, path in zip(rows, paths, strict=True):
        Image.fromarray(np.full((8, 8, 3), row, np.uint8)).save(path)
    return paths


FORMS = ["csv", "npz", "list", "hf", "json", "parquet"]


def check_numbers(dataset, form):
    """Check that examples are those of their rows."""
    assert dataset.num_rows == 20
    if form in ("json", "parquet"):
        expected = TextData().encode([f"text {row}" for row in dataset.train_rows])
        np.testing.assert_array_equal(dataset.x_train["ids"], expected["ids"])
    else:
        count = len(dataset.y_train)
        np.testing.assert_array_equal(dataset.x_train.reshape(count, -1)[:, 0], dataset.train_rows)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_owners_numbers_all_examples_of_a_file_without_test_examples(form, tmp_path):
    """A user cannot know which fifth is for testing, and numbers the rows of the file."""
    dataset = load_dataset(write_rows(form, tmp_path), DataOptions(data_dir=tmp_path / "data"))
    assert 15 <= len(dataset.y_train) < 20
    check_numbers(dataset, form)
    owners = find_owners(dataset, csv_file(tmp_path, [f"{row},{row % 3}" for row in range(20)]))
    np.testing.assert_array_equal(owners.client, dataset.train_rows % 3)


@pytest.mark.parametrize("form", FORMS)
def test_examples_without_a_label_are_skipped_where_that_is_asked_for_and_keep_their_numbers(form, tmp_path):
    name = write_rows(form, tmp_path, unlabelled=(3, 6))
    options = DataOptions(data_dir=tmp_path / "data", console=Console(file=io.StringIO(), width=300))
    with pytest.raises(InputError, match=r"has (no label|the label).*2 of \d\d .* have no"):
        load_dataset(name, options)
    dataset = load_dataset(name, options._replace(skip_corrupt=True))
    assert not {3, 6} & set(dataset.train_rows)
    assert len(dataset.y_train) + len(dataset.y_test) == 18
    check_numbers(dataset, form)
    assert re.search(r"skipped 2 (of \d+|without)", options.console.file.getvalue())


@pytest.mark.parametrize("test_lines", [0, 4])
def test_skipped_images_of_a_list_do_not_move_the_numbers_of_those_after_them(test_lines, tmp_path):
    name = write_rows("list", tmp_path, unlabelled=[3])
    (tmp_path / "6.png").write_bytes(b"no image")
    if test_lines:
        lines = (tmp_path / "all.txt").read_text().splitlines()
        (tmp_path / "test.txt").write_text("\n".join(lines[-test_lines:]) + "\n")
        name = f"{name},{tmp_path / 'test.txt'}"
    options = DataOptions(data_dir=tmp_path / "data", skip_corrupt=True)
    # as it was prepared, and as it is read from the disk
    for _ in range(2):
        dataset = load_dataset(name, options)
        assert not {3, 6} & set(dataset.train_rows)
        check_numbers(dataset, "list")
    part = hold_out(dataset, 0.3)
    check_numbers(part, "list")
    by_number = find_owners(part, csv_file(tmp_path, [f"{row},{row % 3}" for row in range(20)]))
    np.testing.assert_array_equal(by_number.client, part.train_rows % 3)
    # names are of images that could be read
    lines = [f"{row}.png,{row % 3}" for row in dataset.train_rows]
    by_name = find_owners(part, csv_file(tmp_path, lines, "file,client"))
    np.testing.assert_array_equal(by_name.client, by_number.client)


@pytest.mark.parametrize("form", ["csv", "npz", "json"])
def test_skipped_examples_keep_their_numbers_beside_test_examples(form, tmp_path):
    name = write_rows(form, tmp_path, unlabelled=(3, 6))
    if form == "npz":
        arrays = np.load(tmp_path / "all.npz")
        x, y = arrays["x"], arrays["y"]
        np.savez(tmp_path / "all.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    else:
        name = f"{name},{tmp_path / f'all.{form}'}"
    dataset = load_dataset(name, DataOptions(skip_corrupt=True))
    assert dataset.train_rows.tolist() == [row for row in range(20) if row not in (3, 6)]
    check_numbers(dataset, form)


@pytest.mark.parametrize("form", ["csv", "json"])
def test_no_class_of_two_examples_is_split(form, tmp_path):
    name = write_rows(form, tmp_path)
    if form == "csv":
        (tmp_path / "all.csv").write_text("row,label\n1,a\n2,a\n3,b\n4,b\n")
    else:
        (tmp_path / "all.json").write_text(json.dumps({"ann": {"x": ["r", "s"], "y": [0, 1]}}))
    with pytest.raises(InputError, match="no class has three examples, of which one could test; give test"):
        load_dataset(name)


def test_images_are_named_by_their_files(tmp_path):
    rng, lines = np.random.default_rng(0), []
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "own" / split / label
            folder.mkdir(parents=True)
            for i in range(3):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{label}{i}.png")
                lines += [f"{label}{i}.png,site{i % 2}"] if split == "train" else []
    dataset = load_dataset(f"folder:{tmp_path / 'own'}", DataOptions(data_dir=tmp_path / "data"))
    owners = find_owners(dataset, csv_file(tmp_path, lines, "file,client"))
    assert owners.names == ("site0", "site1") and owners.client.tolist() == [0, 1, 0, 0, 1, 0]
    with pytest.raises(
        InputError, match=r"line 2: no training image 'cow.png'; nearest: 'train/cat/cat0.png'"
    ):
        find_owners(dataset, csv_file(tmp_path, ["cow.png,a"], "file,client"))


def test_columns_come_with_npz_files_and_mixtures(tmp_path):
    x, y = DIGITS.x_train[:40], DIGITS.y_train[:40]
    y[:10] = np.arange(10)
    site = np.array(["north", "south"])[np.arange(40) % 2]
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, site_train=site)
    assert find_owners(load_dataset(f"npz:{tmp_path / 'own.npz'}"), "column:site").names == ("north", "south")
    both = mixed("mix", [DIGITS, DIGITS._replace(name="other")])
    owners = find_owners(both, "column:source")
    assert owners.names == ("digits", "other") and owners.client.sum() == COUNT
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, site_train=site[:5])
    with pytest.raises(
        InputError, match=r"site_train is <U5 of shape \(5,\); expected integers or text of shape"
    ):
        load_dataset(f"npz:{tmp_path / 'own.npz'}")


@pytest.mark.parametrize(
    ("head", "lines", "says"),
    [
        ("image,who", [], "its first line is 'image,who'; expected 'example,client' or 'file,client'"),
        ("example,client", ["1438,a"], "line 2: example '1438'; digits has training examples 0 to 1437"),
        ("example,client", ["0,a", "x,b"], "line 3: example 'x'"),
        ("example,client", ["0,a", "0,b"], "line 3: example '0' has an owner already"),
        ("example,client", ["0"], "line 2: 1 values for 2 columns"),
        ("example,client,task", ["0,a,"], "line 2: no task; leave out examples without a client"),
        ("example,client", ["0,"], "line 2: no client; leave out examples without a client"),
        ("example,client", [], "gives no example to any client"),
        ("file,client", ["a.png,x"], "digits has no file names; nearest: a column 'example'"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_line(tmp_path, head, lines, says):
    with pytest.raises(InputError) as error:
        find_owners(DIGITS, csv_file(tmp_path, lines, head))
    assert str(error.value).startswith("partition: ") and says in str(error.value)


def given(**values):
    settings = config.from_mapping("linear", values, "options")
    config.check_given(settings, values)
    return fit_partition(settings, DIGITS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"partition": "file:/nope.csv"}, "partition: cannot read '/nope.csv'"),
        ({"partition": "column:site"}, "no column 'site' of the training examples; 'digits' has none"),
        ({"partition": "colum:site"}, "partition: unknown value 'colum:site'"),
        ({"partition": "file:a", "clients": 3}, "decides their number; leave out --clients"),
        (
            {"partition": "file:a", "alpha": 2.0},
            "alpha: only dirichlet and task_dirichlet read it",
        ),
        ({"partition": "column:a", "population": "redrawn"}, "population: column:a clients are static"),
        ({"classes_per_task": 3, "tasks": 2}, "tasks: classes_per_task decides their number"),
        ({"task_sizes": "5,5", "base_classes": 5}, "base_classes: --task-sizes '5,5' has all sizes"),
        ({"task_sizes": "5,4"}, "are 9 classes in 2 tasks; expected whole numbers from 1 that add up to 10"),
        ({"classes_per_task": 4}, "does not divide the 6 classes after the first task; nearest: 3"),
    ],
)
def test_options_that_do_not_go_together_are_refused(values, says):
    with pytest.raises(InputError) as error:
        given(**values)
    assert says in str(error.value)


def test_sizes_of_tasks():
    assert chosen_sizes(100, 6, base=50) == (50, 10, 10, 10, 10, 10)
    assert chosen_sizes(100, 5, base=50, each=25) == (50, 25, 25)
    assert chosen_sizes(100, 5, each=20) == (20,) * 5
    assert chosen_sizes(10, 5, listed="7, 1,2") == (7, 1, 2)
    settings, scenario = scenario_of(DIGITS, base_classes=4, classes_per_task=3)
    assert settings.tasks == 3 and [int(task.current.sum()) for task in scenario.tasks] == [4, 3, 3]
    with pytest.raises(InputError, match="base_classes: 10 of 10 classes; nearest: 9"):
        chosen_sizes(10, 2, base=10)


def test_the_order_of_classes_is_a_list_or_a_file(tmp_path):
    names = ["cat", "dog", "7"]
    assert listed_order(names, ["7", "dog", "0"]).tolist() == [2, 1, 0]
    # of a part of the classes, numbers are those of the whole data set
    assert listed_order(["dog", "eel"], ["4", "dog"], (1, 4)).tolist() == [1, 0]
    order = "3,1,0,2,4,5,6,7,9,8"
    (tmp_path / "order.txt").write_text(order.replace(",", "\n"))
    for kind in (order, f"file:{tmp_path / 'order.txt'}"):
        _, scenario = scenario_of(DIGITS, class_order=kind, tasks=5)
        np.testing.assert_array_equal(
            np.array([3, 1, 0, 2, 4, 5, 6, 7, 9, 8])[scenario.test_label], DIGITS.y_test
        )
    for listed, says in (
        (["cat", "cow"], "class_order: no class 'cow'"),
        (["cat", "cat"], "class_order: class 'cat' appears twice"),
        (["7", "cat"], "class_order: 2 of 3 classes; class 'dog' is missing"),
    ):
        with pytest.raises(InputError, match=says):
            listed_order(names, listed)


@pytest.mark.long
def test_a_run_keeps_its_owners_and_is_resumed_only_with_them(tmp_path, capsys):
    kind = csv_file(tmp_path, [f"{i},{WRITER[i]}" for i in range(COUNT)])
    out = tmp_path / "run"
    short = ["--image-size", "8", "--rounds", "1", "--epochs", "1", "--base-classes", "4"]
    short += ["--classes-per-task", "3", "--partition", kind, "--out", str(out)]
    assert cli.main(["run", "linear", *short]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["config"]["clients"], summary["config"]["tasks"]) == (3, 3)
    assert (out / "partition.csv").read_text() == owners_csv(DIGITS, kind)
    assert running.run(["linear", "--resume", str(out)]) == 0
    csv_file(tmp_path, [f"{i},{WRITER[i]}" for i in range(1, COUNT)])
    (out / "summary.json").unlink()
    assert cli.main(["run", "linear", "--resume", str(out)]) == 2
    assert "the owners of the examples differ from those of the run" in capsys.readouterr().err
    short = {**{name: 1 for name in ("rounds", "epochs")}, "image_size": 8, "progress": False}
    array = fcljax.run("linear", partition=WRITER, base_classes=4, classes_per_task=3, **short)
    assert array.metrics["accuracy"] == summary["accuracy"]
