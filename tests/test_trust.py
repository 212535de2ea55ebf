"""What is promised of runs: nothing that a user, another process or a machine does loses one or falsifies its
numbers. docs/trust.md names these tests."""

import errno
import fcntl
import json
import shutil

import numpy as np
import pytest
import small_runs
import yaml
from rich.console import Console
from small_runs import COMMON, assert_same_run

from fcljax import cli
from fcljax.data.files import prepared, sources
from fcljax.errors import InputError, one_line
from fcljax.files import owned
from fcljax.runs import build, checkpoint, loop, report

ONE_TASK = [*COMMON, "--tasks", "1", "--clients", "2", "--optimiser", "sgd"]


@pytest.fixture
def linear():
    return small_runs.finished("linear")


@pytest.fixture
def cut(linear, tmp_path):
    """A copy of a finished run whose summary and figures were not written yet."""
    out = shutil.copytree(linear, tmp_path / "cut")
    (out / "summary.json").unlink()
    shutil.rmtree(out / "figures")
    return out


def resume(out, *options, method="linear"):
    return cli.main(["run", method, "--resume", str(out), *options])


def content(folder):
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != loop.LOCK
    }


def refused(capsys, out, *options):
    """The one line with which the run in `out` is not gone on with; nothing in it has changed."""
    before = content(out)
    assert resume(out, *options) == 2
    assert content(out) == before
    err = capsys.readouterr().err
    assert err.startswith("fcljax: ") and err.count("\n") == 1
    return err


# ---- a finished run is never lost --------------------------------------------------------------------------


def test_a_figure_that_cannot_be_drawn_costs_a_warning_and_is_drawn_when_it_can_be(
    cut, linear, monkeypatch, capsys
):
    def broken(*args):
        raise RuntimeError("no [/ink] left")

    with monkeypatch.context() as patch:
        patch.setattr(report, "accuracy_curve", broken)
        assert resume(cut) == 0
    assert "accuracy.png could not be drawn: RuntimeError: no [/ink] left" in capsys.readouterr().err
    assert_same_run(cut, linear, but=("traces",))  # this process has played no round
    assert {path.name for path in (cut / "figures").iterdir()} == {
        "matrix.png", "reliability.png", "classes.png"
    }  # fmt: skip
    before = (cut / "summary.json").read_bytes()
    assert resume(cut) == 0
    assert (cut / "figures" / "accuracy.png").exists() and (cut / "summary.json").read_bytes() == before


NAMES = [
    "a$x_$b",
    "$\\frac{",
    "o[/x]",
    "[bold]",
    "_hidden",
    "\udcff\udc80",
    "\u6f22\u5b57",
    "a\nb\x00c",
    "x" * 10**5,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_figures_take_any_name(name, tmp_path):
    path = report.accuracy_curve(tmp_path / "a.png", {name: [0.5, 0.25], f"{name} 2": [0.5, 0.5]})
    report.contact_sheet(tmp_path / "b.png", [np.zeros((1, 2, 2, 3), np.uint8)], [name])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["o[/x]", "a$x_$b", "\udcff"])
def test_a_run_directory_may_have_any_name(name, linear, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(linear, name)
    assert resume(name) == 0
    assert f"run directory: {one_line(name)}" in capsys.readouterr().out
    assert cli.main(["compare", name, "--out", f"{name}.png"]) == 0


@pytest.mark.parametrize("field", ["--dataset", "--config", "--resume", "--checkpoint", "--adapter", "--lr"])
def test_a_message_cuts_long_values(field, capsys):
    assert cli.main(["run", "linear", field, "[/x]" * 25_000]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 4200 and "[/x]" in err and " ... " in err


# ---- resume is the same run, or it is refused --------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("lr", 0.5), ("seed", 7), ("rounds", 4), ("clients", 4)])
@pytest.mark.parametrize("finished", [False, True])
def test_an_edited_config_is_refused_by_name(field, value, finished, linear, cut, tmp_path, capsys):
    out = shutil.copytree(linear, tmp_path / "whole") if finished else cut
    settings = yaml.safe_load((out / "config.yaml").read_text())
    (out / "config.yaml").write_text(yaml.safe_dump(settings | {field: value}))
    line = refused(capsys, out)
    assert field in line and str(value) in line and str(settings[field]) in line


def test_another_data_set_of_the_same_shape_is_refused(cut, monkeypatch, capsys):
    digits = sources._digits()
    image = digits.x_train.copy()
    image[0, 0, 0] ^= 1
    monkeypatch.setattr(sources, "_digits", lambda: digits._replace(x_train=image))
    assert "resume: the images are not what the run" in refused(capsys, cut)


def test_other_weights_of_the_same_shape_are_refused(cut, monkeypatch, capsys):
    load = build.load_inputs
    other = lambda cfg: (lambda found: found._replace(backbone=found.backbone._replace(digest="0")))(
        load(cfg)
    )
    monkeypatch.setattr(build, "load_inputs", other)
    assert "resume: the weights are not what the run" in refused(capsys, cut)


def test_a_run_of_one_task_may_get_more_rounds_and_then_equals_one_that_had_them(tmp_path, capsys):
    longer, out = tmp_path / "longer", tmp_path / "out"
    for rounds, folder in ((3, longer), (2, out)):
        assert cli.main(["run", "linear", *ONE_TASK, "--rounds", str(rounds), "--out", str(folder)]) == 0
    assert resume(out, "--rounds", "3") == 0
    assert_same_run(out, longer)
    assert yaml.safe_load((out / "config.yaml").read_text())["rounds"] == 3
    kept = {path.name.partition("-")[0] for path in (out / checkpoint.ASIDE).iterdir()}
    assert kept == {"checkpoint", "summary"}  # nothing is lost
    before = content(out)
    assert resume(out) == 0 and content(out) == before


@pytest.mark.parametrize("rounds", ["2", "5"])
def test_a_run_whose_first_task_is_over_gets_no_other_number_of_rounds(rounds, linear, cut, tmp_path, capsys):
    for out in (cut, shutil.copytree(linear, tmp_path / "whole")):
        line = refused(capsys, out, "--rounds", rounds)
        assert line.startswith("fcljax: rounds: ") and line.endswith("nearest: 3\n")


def test_other_tasks_are_another_run(linear, tmp_path, capsys):
    out = shutil.copytree(linear, tmp_path / "whole")
    assert "tasks (10, not 5)" in refused(capsys, out, "--tasks", "10")


# ---- one owner ---------------------------------------------------------------------------------------------


def test_a_second_process_gets_one_line_and_changes_nothing(cut, capsys):
    with owned(cut / loop.LOCK):
        assert "another process is at work" in refused(capsys, cut)


def test_of_two_that_make_the_same_folder_one_does(tmp_path, capsys):
    settings = cli.settings("linear", {}, cli.Paths())
    with loop.claimed(tmp_path / "out", "linear", settings):
        before = content(tmp_path)
        loop_check = pytest.raises(InputError, match="another process is at work")
        with loop_check, loop.claimed(tmp_path / "out", "linear", settings):
            pytest.fail("claimed twice")
        assert content(tmp_path) == before and (tmp_path / "out" / "figures").is_dir()


def test_where_files_cannot_be_locked_nobody_cleans_up_after_others(tmp_path, monkeypatch):
    target, other = tmp_path / "digits", tmp_path / ".digits.tmp-of-another-process"
    other.mkdir()

    def unsupported(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", unsupported)
        with prepared.alone(target, Console()):
            assert other.exists()
    with prepared.alone(target, Console()):
        assert not other.exists()


# ---- checkpoints that cannot lie ---------------------------------------------------------------------------


def flip(path):
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_arrays(folder):
    flip(max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size))


def change_records(folder):
    file = folder / "records" / "metadata"
    host = json.loads(file.read_text())
    host["records"]["accuracy"][0][0] += 0.25
    file.write_text(json.dumps(host))


def take_state_of_before(folder):
    shutil.rmtree(folder / "state")
    shutil.copytree(folder.parent / "14" / "state", folder / "state")


def rename_the_one_before(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "14", folder)


def half(folder):
    (folder / "_CHECKPOINT_METADATA").unlink()


DAMAGES = [flip_arrays, change_records, take_state_of_before, rename_the_one_before, half]


# TensorStore's threads may say of a damaged file what the exception has said
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damage, tmp_path):
    folder, told = tmp_path / "checkpoints", []
    state = lambda number: checkpoint.State(
        {"w": np.full(5000, number, np.float32)}, (), np.zeros(2, np.uint32)
    )
    records = lambda number: {"accuracy": [[number / 100]], "counts": {}}
    with checkpoint.open_checkpoints(folder, 2) as manager:
        for step in (14, 15):
            checkpoint.save(manager, checkpoint.Snapshot(step, state(step), records(step), {"settings": {}}))
        checkpoint.finish(manager)
    damage(folder / "15")
    with checkpoint.open_checkpoints(folder, 2) as manager:
        found = checkpoint.latest(manager, state(0), told.append)
    assert found.step == 14 and found.records == records(14)
    np.testing.assert_array_equal(found.state.server["w"], state(14).server["w"])
    (line,) = told
    assert line.startswith("resume: checkpoint 15 is damaged (") and line.endswith(" and 14 is used")
    assert (tmp_path / checkpoint.ASIDE / "checkpoint-15").is_dir()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_before_a_damaged_checkpoint_and_past_strange_folders(cut, linear, capsys):
    flip_arrays(cut / "checkpoints" / "15")
    (cut / "checkpoints" / "99").mkdir()
    (cut / "checkpoints" / "15 (copy)").mkdir()
    assert resume(cut) == 0
    err = capsys.readouterr().err
    assert "checkpoint 99 is damaged (it is no checkpoint)" in err and "checkpoint 15 is damaged" in err
    assert_same_run(cut, linear)
    assert (cut / "checkpoints" / "15 (copy)").is_dir() and (
        cut / checkpoint.ASIDE / "checkpoint-99"
    ).is_dir()
