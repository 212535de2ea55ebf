"""`fcljax predict`: labels of images with the model of a finished run."""

import csv

import pytest
import small_runs
from PIL import Image

import fcljax
from fcljax import cli
from fcljax.data.files.sources import load_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a run on digits, some of its test images and a file that is no image; and the images."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "run").symlink_to(small_runs.finished("linear"))
    images = load_dataset("digits").x_test[:30]
    (folder / "images" / "deep").mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / "images" / ("deep" if i > 25 else "") / f"{i:02}.png")
    (folder / "images" / "notes.txt").write_text("no image")
    (folder / "taken.csv").mkdir()
    return folder, images


@pytest.mark.long
def test_the_table_and_the_csv_file_have_the_models_predictions(run, capsys):
    folder, images = run
    capsys.readouterr()
    out = folder / "labels.csv"
    assert cli.main(["predict", str(folder / "run"), str(folder / "images"), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "and 10 more images" in shown.out
    assert "30 images; left out: 1 file of 1 other kind (1 .txt)" in shown.err
    rows = list(csv.DictReader(out.read_text().splitlines()))
    result = fcljax.Result.of(folder / "run")
    names = result.metrics["class_names"]
    expected = {f"{i:02}.png": names[c] for i, c in enumerate(result.model.scores(images).argmax(-1))}
    assert {row["file"].rsplit("/", 1)[1]: row["label"] for row in rows} == expected
    assert all(1 / len(names) < float(row["probability"]) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "images: none given; usage: fcljax predict RUN_DIR IMAGE..."),
        (["nothing.png"], "images: there is no file or folder 'nothing.png'"),
        (["{folder}/images/notes.txt"], "images: '{folder}/images/notes.txt' is not a readable image"),
        (
            ["{folder}/images/notes.txt", "--skip-corrupt"],
            "images: none of 1 can be decoded, the first error: '",
        ),
        (["{folder}/images", "--out", "labels.txt"], "out: 'labels.txt' is not a CSV file's name"),
        (["{folder}/images", "--out", "{folder}/taken.csv"], "out: '{folder}/taken.csv' is a folder; give"),
        (["{folder}/images", "--out", "/proc/new/labels.csv"], "out: cannot write to '/proc/new'"),
        (
            ["{folder}/images", "--client", "0"],
            "client: 0, and linear has no personal models; leave --client out",
        ),
    ],
)
def test_what_cannot_be_predicted_is_one_line(run, capsys, words, line):
    folder, _ = run
    capsys.readouterr()
    words = [word.format(folder=folder) for word in words]
    assert cli.main(["predict", str(folder / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fcljax: {line.format(folder=folder)}") and error.count("\n") == 1


def test_a_broken_image_ends_the_command_or_is_counted(run, tmp_path, capsys):
    folder, images = run
    for i in range(3):
        Image.fromarray(images[i]).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    out = tmp_path / "new" / "labels.csv"
    words = ["predict", str(folder / "run"), str(tmp_path), "--out", str(out)]
    capsys.readouterr()
    assert cli.main(words) == 2
    assert f"'{tmp_path}/1.png' is not a readable image" in capsys.readouterr().err
    assert not out.parent.exists()
    assert cli.main([*words, "--skip-corrupt"]) == 0
    assert f"skipped 1 of 3 images, the first: '{tmp_path}/1.png' is not" in capsys.readouterr().err
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["file"] for row in rows] == [str(tmp_path / "0.png"), str(tmp_path / "2.png")]
    # a file that is named twice has two rows
    assert cli.main(["predict", str(folder / "run"), *[str(tmp_path / "0.png")] * 2, "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 3
