"""What is promised of runs: nothing that a user, another process or a machine does loses one or falsifies its
numbers. docs/trust.md names these tests."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import small_runs
import yaml
from PIL import Image
from rich.console import Console
from small_runs import COMMON, assert_same_run

from fcljax import cli
from fcljax.commands import arguments, running
from fcljax.data.files import download, npz_files, prepared, sources
from fcljax.errors import InputError, one_line
from fcljax.files import atomic, owned, write_text
from fcljax.results import figures
from fcljax.runs import build, checkpoint, loop, memory, signals
from fcljax.runs.folder import LOCK, created
from fcljax.runs.resume import check_settings, plain_settings
from fcljax.types import ReplayBuffer

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
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def refused(capsys, out, *options):
    """The one line with which the run in `out` is not gone on with; nothing in it has changed."""
    before = content(out)
    assert resume(out, *options) == 2
    assert content(out) == before
    err = capsys.readouterr().err
    assert err.startswith("fcljax: ") and err.count("\n") == 1
    return err


# ---- a finished run is never lost --------------------------------------------------------------------------


@pytest.mark.long
def test_a_figure_that_cannot_be_drawn_costs_a_warning_and_is_drawn_when_it_can_be(
    cut, linear, monkeypatch, capsys
):
    def broken(*args):
        raise RuntimeError("no [/ink] left")

    with monkeypatch.context() as patch:
        patch.setattr(figures, "accuracy_curve", broken)
        assert resume(cut) == 0
    assert "accuracy.png could not be drawn: RuntimeError: no [/ink] left" in capsys.readouterr().err
    assert_same_run(cut, linear, but=("traces",))  # this process has played no round
    assert {path.name for path in (cut / "figures").iterdir()} == {
        "matrix.png",
        "reliability.png",
        "classes.png",
    }
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
    path = figures.save(
        tmp_path / "a.png", figures.accuracy_curve({name: [0.5, 0.25], f"{name} 2": [0.5, 0.5]})
    )
    figures.save(tmp_path / "b.png", figures.contact_sheet([np.zeros((1, 2, 2, 3), np.uint8)], [name]))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", small_runs.some(["o[/x]", "a$x_$b", "\udcff"], ["\udcff"]))
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
    assert "resume: the images differ from those of the run" in refused(capsys, cut)


def test_other_weights_of_the_same_shape_are_refused(cut, monkeypatch, capsys):
    load = build.load_inputs
    other = lambda *given: (lambda found: found._replace(backbone=found.backbone._replace(digest="0")))(
        load(*given)
    )
    monkeypatch.setattr(build, "load_inputs", other)
    assert "resume: the weights differ from those of the run" in refused(capsys, cut)


@pytest.mark.parametrize(
    ("had", "now", "method", "found"),
    [
        (3, 5, "linear", 2),
        (3, 2, "linear", 1),
        (9, 3, "linear", 2),
        (3, 5, "./mine.py", None),
        (2, 9, "linear", 1),
    ],
)
def test_the_number_of_rounds_may_change_before_the_first_task_is_over(had, now, method, found, tmp_path):
    """Of checkpoints after 1 to 6 rounds: those that both numbers have in common. It is not known how a
    method of one's own depends on the number."""

    def settings(rounds):
        found = running.settings("linear", {"rounds": rounds}, running.Paths())
        own = type("Settings", (type(found),), {"source": method})
        return dataclasses.replace(own(**vars(found)), method=method)

    before = {"settings": plain_settings(settings(had)), "digests": {}}
    check = lambda steps: check_settings(before, settings(now), steps, tmp_path)
    if found:
        assert check([6, 5, 4, 3, 2, 1]) == found
    with pytest.raises(InputError, match="^rounds: "):
        check([6, 5, 4, 3, 2, 1] if found is None else [9])


@pytest.mark.long
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
    with owned(cut / LOCK):
        assert "another process works" in refused(capsys, cut)


def test_of_two_that_make_the_same_folder_one_does(tmp_path, capsys):
    settings = running.settings("linear", {}, running.Paths())
    with created(tmp_path / "out", settings):
        before = content(tmp_path)
        loop_check = pytest.raises(InputError, match="another process works")
        with loop_check, created(tmp_path / "out", settings):
            pytest.fail("created twice")
        assert content(tmp_path) == before and (tmp_path / "out" / "figures").is_dir()


def test_default_names_are_unique_whatever_the_clock_says(monkeypatch):
    monkeypatch.setattr(arguments.time, "strftime", lambda form: "20260101-000000")
    assert len({arguments.new_folder("linear") for _ in range(100)}) == 100


def test_nothing_reads_the_clock_but_the_default_name_of_a_run():
    """Whose hands may be set back while a run lasts."""
    clock = r"\btime\.(time|time_ns|localtime|gmtime|ctime|strftime)\(|\.(now|today|utcnow)\("
    package = small_runs.ROOT / "fcljax"
    found = {
        (str(path.relative_to(package)), match[0])
        for path in package.rglob("*.py")
        for match in re.finditer(clock, path.read_text())
    }
    assert found == {("commands/arguments.py", "time.strftime(")}
    imported = r"from (time|datetime) import"
    assert not [path for path in package.rglob("*.py") if re.search(imported, path.read_text())]


def test_where_files_cannot_be_locked_nobody_cleans_up_after_others(tmp_path, monkeypatch):
    target, other = tmp_path / "digits", tmp_path / ".digits.tmp-of-another-process"
    other.mkdir()

    def unsupported(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", unsupported)
        with prepared.one_process(target, Console()):
            assert other.exists()
    with prepared.one_process(target, Console()):
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


def test_what_happens_to_arrays_while_a_checkpoint_is_written_is_not_in_it(tmp_path):
    count = 4_000_000  # so many that the write goes on after `save`
    state = checkpoint.State({"w": np.arange(count, dtype=np.float32)}, (), np.zeros(2, np.uint32))
    template = jax.tree.map(np.zeros_like, state)
    with checkpoint.open_checkpoints(tmp_path, 1) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, state, {}, {}))
        state.server["w"][:] = -1
        checkpoint.finish(manager)
        found = checkpoint.latest(manager, template)
    np.testing.assert_array_equal(found.state.server["w"], np.arange(count, dtype=np.float32))


def test_what_waits_to_be_written_is_a_small_part_of_a_large_checkpoint(tmp_path):
    # 40 MB that cannot be compressed
    noise = np.random.default_rng(0).integers(0, 256, (10, 4_000_000), np.uint8)
    state = checkpoint.State({str(i): row for i, row in enumerate(noise)}, (), np.zeros(2, np.uint32))
    with checkpoint.open_checkpoints(tmp_path, 1) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, state, {}, {}))
        checkpoint.finish(manager)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) > noise.nbytes and max(sizes) < checkpoint.FILE + 2 * noise[0].nbytes


@pytest.mark.long
def test_a_round_overwrites_the_states_that_a_checkpoint_was_made_of(tmp_path, monkeypatch):
    make, given_up = loop.make_play_round, []

    def watched(*arguments):
        play = make(*arguments)

        def played(exp, state, past, step):
            result = play(exp, state, past, step)
            servers = [x.is_deleted() for x in jax.tree.leaves(state.server)]
            given_up.append((servers, [x.is_deleted() for x in jax.tree.leaves(state.clients)]))
            return result

        return played

    monkeypatch.setattr(loop, "make_play_round", watched)
    options = [*COMMON, "--tasks", "2", "--rounds", "2", "--clients", "2", "--checkpoint-every", "1"]
    assert cli.main(["run", "scaffold", *options, "--out", str(tmp_path / "run")]) == 0
    servers, clients = zip(*given_up, strict=True)
    # a task's first round overwrites the server's state too
    assert [all(each) for each in servers] == [True, False, True, False]
    assert len(clients) == 4 and all(clients) and all(map(all, clients))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone gives memory back on demand")
def test_what_a_compiler_has_freed_goes_back_to_the_system_while_a_run_lasts():
    def compiled(seconds):
        jax.monitoring.record_event_duration_secs(memory.COMPILED, seconds)

    def given_back():
        """MB that the process has less after a long compilation which leaves 100 MB of small free blocks."""
        blocks = [bytes(8_000) for _ in range(100 * 125)]
        last = bytes(8_000)  # above the others, so that the heap does not shrink by itself
        del blocks
        before = resident()
        compiled(2.0)
        after = resident()
        del last
        return before - after

    with memory.trim_after_compilation():
        compiled(2.0)
        assert given_back() > 50
    assert given_back() < 30


def resident():
    """MB of this process in memory."""
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def test_what_a_server_has_kept_is_compared_with_the_checksum_that_the_run_has_noted(tmp_path):
    kept = lambda number: ReplayBuffer(np.full((2, 3), number, np.float32), np.arange(2), np.ones(2, bool))
    noted = [checkpoint.save_task(tmp_path / "kept", task, kept(task)) for task in range(2)]
    found = checkpoint.load_tasks(tmp_path / "kept", noted, kept(0))
    assert [each.examples[0, 0] for each in found] == [0, 1]
    shutil.copy(tmp_path / "kept" / "task-000.npz", tmp_path / "kept" / "task-001.npz")
    with pytest.raises(InputError, match="task-001.npz' cannot be read: it does not have the checksum"):
        checkpoint.load_tasks(tmp_path / "kept", noted, kept(0))


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["a bit", "no file"])
def test_what_a_server_has_kept_and_is_damaged_is_made_again_from_the_checkpoint_before_it(damage, tmp_path):
    kept = ReplayBuffer(np.ones((2, 3), np.float32), np.arange(2), np.ones(2, bool))
    noted = [checkpoint.save_task(tmp_path / loop.KEPT, task, kept) for task in range(2)]
    state, told = checkpoint.State({}, (), np.zeros(2, np.uint32)), []
    with checkpoint.open_checkpoints(tmp_path / "checkpoints", 2) as manager:
        for step, tasks in ((7, 1), (8, 2)):
            checkpoint.save(manager, checkpoint.Snapshot(step, state, {"kept": noted[:tasks]}, {}))
        checkpoint.finish(manager)
        check = loop.intact_files(tmp_path / loop.KEPT)
        assert checkpoint.latest(manager, state, told.append, check).step == 8 and told == []
        damage(tmp_path / loop.KEPT / "task-001.npz")
        assert checkpoint.latest(manager, state, told.append, check).step == 7
        assert "checkpoint 8 is damaged (" in told[0] and "task-001.npz' does not have" in told[0]
        damage(tmp_path / loop.KEPT / "task-000.npz")
        with pytest.raises(InputError, match="resume: checkpoint 7 .* cannot be read: .*task-000.npz'"):
            checkpoint.latest(manager, state, told.append, check)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
def test_a_run_goes_on_before_a_damaged_checkpoint_and_past_strange_folders(cut, linear, capsys):
    flip_arrays(cut / "checkpoints" / "15")
    (cut / "checkpoints" / "99").mkdir()
    (cut / "checkpoints" / "15 (copy)").mkdir()
    assert resume(cut) == 0
    err = capsys.readouterr().err
    assert "checkpoint 99 is damaged (it is not a checkpoint)" in err and "checkpoint 15 is damaged" in err
    assert_same_run(cut, linear)
    assert (cut / "checkpoints" / "15 (copy)").is_dir() and (
        cut / checkpoint.ASIDE / "checkpoint-99"
    ).is_dir()


# ---- what is prepared --------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path):
    """A folder of images, and load(**options) -> its data set, from what is prepared once it is."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "raw" / split / label
            folder.mkdir(parents=True)
            for i in range(3):
                Image.fromarray(draw.integers(0, 256, (8, 8, 3)).astype(np.uint8)).save(folder / f"{i}.png")
    name = f"folder:{tmp_path / 'raw'}"
    return lambda verify=False, **options: sources.load_dataset(
        name, sources.DataOptions(data_dir=tmp_path / "data", **options), verify
    )


def images_file(tmp_path):
    (file,) = (tmp_path / "data" / "prepared").glob("*/x_train.npy")
    return file


def test_images_that_were_touched_are_compared_with_their_checksum(shelf, tmp_path):
    whole, file = shelf(), images_file(tmp_path)
    content = file.read_bytes()
    flip(file)
    with pytest.raises(InputError, match="x_train.npy does not match its checksum.*prepare folder:.*--force"):
        shelf()
    file.write_bytes(content)
    assert (shelf().x_train == whole.x_train).all()
    manifest = json.loads((file.parent / "manifest.json").read_text())
    assert manifest["arrays"]["x_train"]["time"] == file.stat().st_mtime_ns  # and not compared again


def test_rot_that_leaves_size_and_time_is_found_by_verify(shelf, tmp_path, capsys):
    options = ["--tasks", "2", "--clients", "1", "--min-examples", "0", "--data-dir", str(tmp_path / "data")]
    show = lambda *more: cli.main(["data", "show", f"folder:{tmp_path / 'raw'}", *options, *more])
    assert show("--out", str(tmp_path / "first")) == 0
    file = images_file(tmp_path)
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert show("--out", str(tmp_path / "second")) == 0  # nobody has looked
    assert show("--out", str(tmp_path / "third"), "--verify") == 2
    assert "x_train.npy does not match its checksum" in capsys.readouterr().err


def test_labels_are_compared_with_their_checksum_always(shelf, tmp_path):
    shelf()
    file = images_file(tmp_path).with_name("y_train.npy")
    before, content = file.stat(), np.load(file)
    np.save(file, content[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match="y_train.npy does not match its checksum"):
        shelf()


# ---- every input -------------------------------------------------------------------------------------------

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (ALIASES, "aliases are not supported"),
        ("tasks: &n 3\nclients: *n\n", "aliases are not supported"),
        ("[" * 50_000, "nested more than 20 deep"),
        ("{a: " * 50_000, "nested more than 20 deep"),
        ("lr: 1\n" * 200_000, "more than 1,048,576 bytes"),
        ("tasks: 0x_\n", "not valid YAML"),
        ("dataset: 2001-99-99\n", "is a date in YAML; write text in quotes"),
        ("tasks: !!int foo\n", "not valid YAML"),
        ("tasks: !!python/object:os.system x\n", "not valid YAML"),
        ("? [1]\n: 2\n", "not valid YAML"),
        (f"tasks: {'9' * 5000}\n", "not valid YAML"),
        (f"tasks: {'9' * 400}\n", "tasks: a number of 1329 bits is too large"),
        (f"lr: {'9' * 400}\n", "lr: 999"),
        ("lr: 1.0e+300\n", "lr: 1e+300 is too large; nearest valid value: 3.4e+38"),
        ('dataset: "npz:a\\0b"\n', "dataset: 'npz:a\\x00b' contains a NUL character"),
        ("dataset: npz:~nosuchuser/x\n", "dataset: '~nosuchuser/x': no such home folder"),
        ("data_dir: ~nosuchuser/x\n", "data_dir: '~nosuchuser/x': no such home folder"),
    ],
    ids=range(17),
)
def test_a_file_of_settings_is_refused_in_one_line_and_little_memory(text, word, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(text)
    out = str(tmp_path / "run")
    tracemalloc.start()
    try:
        assert cli.main(["run", "linear", "--config", str(tmp_path / "a.yaml"), "--out", out]) == 2
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    err = capsys.readouterr().err
    assert word in err and err.count("\n") == 1 and len(err) < 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--image-size", "100000000"], "image_size: 100000000 is too large; nearest valid value: 6324"),
        (["--rounds", "2000000000"], "rounds: 2000000000 is too large; nearest valid value: 100000"),
        (["--clients", "2000000000"], "clients: 2000000000 is too large; nearest valid value: 1000000"),
        (["--lanes", "9" * 30], f"lanes: {'9' * 30} is too large; nearest valid value: 2147483647"),
        pytest.param(["--image-size", "6000"], "an evaluation step; the device has ", marks=pytest.mark.long),
        (["--lanes", "2000000000"], "a training step; the device has "),
        pytest.param(
            ["--adapter", "lora", "--lora-rank", "1000000000"],
            "the server's state; the device has ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_no_device_can_hold_is_refused_before_anything_is_compiled(options, words, tmp_path, capsys):
    assert cli.main(["run", "linear", *options, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "the device has" not in err or "needs at least" in err


def test_pretrain_checks_its_options_as_run_does(tmp_path, capsys):
    for option, value in (("--steps", "9" * 30), ("--seed", "9" * 30), ("--lr", "1e400")):
        assert cli.main(["pretrain", option, value, "--out", str(tmp_path / "a.safetensors")]) == 2
        assert capsys.readouterr().err.startswith(f"fcljax: {option[2:]}: ")


def test_a_pipe_among_images_and_as_a_file_of_settings_is_refused(shelf, tmp_path, capsys):
    pipe = tmp_path / "raw" / "train" / "a" / "9.png"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="9.png' cannot be read .not a regular file"):
        shelf(skip_corrupt=True)
    assert cli.main(["run", "linear", "--config", str(pipe)]) == 2
    assert cli.main(["run", "linear", "--config", "/dev/zero"]) == 2
    assert capsys.readouterr().err.count("not a regular file") == 2


def test_without_a_home_folder_one_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("FCLJAX_DATA")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(InputError, match="^data_dir: .*no such home folder"):
        sources.data_folder()
    assert sources.data_folder(tmp_path) == tmp_path


WRITERS = {
    "run": ["run", "linear", "--dataset", "npz:absent.npz", "--out"],
    "run --seeds": ["run", "linear", "--dataset", "npz:absent.npz", "--seeds", "2", "--out"],
    "compare": ["compare", "absent", "--out"],
    "data show": ["data", "show", "cifar100", "--out"],
    "data prepare": ["data", "prepare", "cifar100", "--data-dir"],
    "embed": ["embed", "--dataset", "npz:absent.npz", "--out"],
    "convert": ["convert", "absent.safetensors"],
    "pretrain": ["pretrain", "--out"],
    "pretrain-decoder": ["pretrain-decoder", "--dataset", "npz:absent.npz", "--out"],
}
FILES = {"compare": "a.png", "embed": "a.npz"} | dict.fromkeys(
    ("convert", "pretrain", "pretrain-decoder"), "a.safetensors"
)


@pytest.mark.parametrize("command", WRITERS)
def test_where_nothing_can_be_written_is_found_before_the_work(command, tmp_path, monkeypatch, capsys):
    """The inputs are not there either, and it is not they that are named."""
    target = Path("/proc") / FILES.get(command, "new")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*WRITERS[command], str(target)]) == 2
    err = capsys.readouterr().err
    assert "cannot write to '/proc" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- signals -----------------------------------------------------------------------------------------------


class Signalled(NamedTuple):
    code: int
    err: str
    out: Path
    lines: int


def signalled(tmp_path, number, *options, moment=1):
    """What a run of the program did that got a signal when it had logged some rounds."""
    out = tmp_path / "run [/x]"
    arguments = ["run", "linear", *small_runs.OPTIONS["linear"], *options, "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fcljax", *arguments],
        env=small_runs.environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log, end = out / "metrics.jsonl", time.monotonic() + 200
    while process.poll() is None and time.monotonic() < end:
        if small_runs.logged(log) >= moment:
            process.send_signal(number)
            break
        time.sleep(0.005)
    err = process.communicate(timeout=200)[1]
    return Signalled(process.returncode, err, out, log.read_bytes().count(b"\n"))


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [
        pytest.param(signal.SIGTERM, 143, [], marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 130, [], marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 138, ["--stop-signal", "USR1"], marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 143, ["--stop-signal", "TERM"], marks=pytest.mark.long),
    ],
)
def test_a_signal_leaves_a_whole_checkpoint_and_says_how_to_go_on(number, code, options, linear, tmp_path):
    found = signalled(tmp_path, number, *options, "--checkpoint-every", "2" if options else "1", moment=3)
    assert found.code == code and "Traceback" not in found.err
    last = found.err.splitlines()[-1]
    name = signal.Signals(number).name
    assert last == f"fcljax: stopped by {name}; resume with: fcljax run linear --resume '{found.out}'"
    assert not (found.out / "summary.json").exists() and found.lines < 15
    steps = checkpoint.steps(found.out / "checkpoints")
    assert steps[0] == found.lines if options else steps[0] >= found.lines - 1
    assert resume(found.out, "--checkpoint-every", "1") == 0
    assert_same_run(found.out, linear, but=("config", "given"))


@pytest.mark.long
def test_a_warning_is_asked_for_after_every_round_and_ends_it_with_a_checkpoint(cut):
    """Of a run that has no checkpoint yet."""
    shutil.rmtree(cut / "checkpoints")
    settings = running.settings("linear", {"checkpoint_every": 2}, running.Paths(resume=str(cut)))
    with pytest.raises(signals.Stopped) as caught:
        loop.run(settings, cut, True, loop.Observer(stop=lambda: 10))
    assert caught.value.number == 10 and checkpoint.steps(cut / "checkpoints") == [1]
    assert (cut / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.long
def test_a_signal_while_a_checkpoint_is_written_lets_it_be_finished(cut, monkeypatch, capsys):
    shutil.rmtree(cut / "checkpoints" / "15")
    save = checkpoint.save

    def signalled_save(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save", signalled_save)
    assert resume(cut) == 143
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"fcljax: stopped by SIGTERM; resume with: fcljax run linear --resume {cut}"
    assert checkpoint.steps(cut / "checkpoints")[0] == 15 and not (cut / "summary.json").exists()


def test_a_signal_is_noted_and_nothing_is_broken_off():
    done = []
    with pytest.raises(signals.Stopped) as caught, signals.terminable():
        with signals.unbroken():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("written")
        done.append("the loop's last lines")
        signals.check()
        done.append("never")
    assert done == ["written", "the loop's last lines"] and caught.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signals.asked() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_in_a_destructor_or_an_extension_is_not_lost(number):
    class Closing:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # the signal is taken here, where Python lets no exception out

    with pytest.raises(signals.Stopped) as caught, signals.terminable():
        Closing()
        signals.pause(10)
    assert caught.value.number == number


# Signals itself at drawn moments, in destructors, loops and compiled code, and must end in good order.
SIGNALLED = """
import gc, os, random, signal, sys, threading, time, zlib
from fcljax.runs import signals
sys.unraisablehook = lambda error: os._exit(99)
class Closing:
    def __init__(self): self.me = self
    def __del__(self):
        for _ in range(50): pass
rng, number = random.Random(sys.argv[1]), signal.SIGTERM
for _ in range(int(sys.argv[2])):
    try:
        with signals.terminable():
            threading.Timer(rng.uniform(0, 0.004), os.kill, (os.getpid(), number)).start()
            end = time.monotonic() + 4
            while time.monotonic() < end:
                [Closing() for _ in range(20)], gc.collect(0), zlib.compress(b"x" * 20_000)
                signals.check()
            os._exit(98)
    except signals.Stopped as stop:
        assert stop.number == number
print("all")
"""


@pytest.mark.parametrize("tries", [20, pytest.param(500, marks=pytest.mark.long)])
def test_no_signal_is_lost_under_load(tries, tmp_path):
    """Beside twice as many busy processes as there are cores."""
    busy = [sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(busy) for _ in range(2 * (os.cpu_count() or 1) if tries > 20 else 1)]
    try:
        command = [sys.executable, "-c", SIGNALLED, "seed", str(tries)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    finally:
        for process in load:
            process.kill(), process.wait()
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr


# Ends although nothing reads the flag: after a moment, and at once when a second signal comes.
DEAF = """
import os, signal, sys, time
from fcljax.runs import signals
signals.GRACE = float(sys.argv[1])
with signals.terminable(), signals.advised(lambda: "go on"):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("grace", "times"), [(0.1, 1), (50, 2)])
def test_a_program_that_reads_no_flag_ends_soon_and_at_a_second_signal_at_once(grace, times):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", DEAF, str(grace)], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT)[:times]:
            process.send_signal(number)
        code, said = process.wait(timeout=40), process.stderr.read()
    name = {143: "SIGTERM", 130: "SIGINT"}[code]  # of two the kernel may give either first
    assert said == f"fcljax: stopped by {name}; go on\n" and (times == 2 or code == 143)


def test_what_is_said_of_an_interrupted_command_is_true_for_it(tmp_path, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fcljax.runs.embed.embed", interrupted)
    monkeypatch.setattr("fcljax.runs.loop.run", interrupted)
    assert cli.main(["embed", "--out", str(tmp_path / "a.npz")]) == 130
    assert "--resume" not in capsys.readouterr().err
    assert cli.main(["run", "linear", "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == (
        "fcljax: stopped by SIGINT; the run had not started; nothing was written\n"
    )


# ---- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_files_and_folders_have_the_user_s_umask(umask, shelf, tmp_path):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a.txt", "a")
        shelf()
        with created(tmp_path / "run", running.settings("linear", {}, running.Paths())):
            pass
    finally:
        os.umask(before)
    mode = lambda path: stat.S_IMODE(path.stat().st_mode)
    folder = images_file(tmp_path).parent
    files = [tmp_path / "a.txt", tmp_path / "run" / "config.yaml", *folder.iterdir()]
    assert {mode(path) for path in files} == {0o666 & ~umask}
    assert {mode(path) for path in (folder, tmp_path / "run" / "checkpoints")} == {0o777 & ~umask}


def test_a_file_makes_its_folders_and_a_write_that_fails_leaves_none(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="No space left"), atomic(tmp_path / "new" / "deep" / "a.txt"):
        raise OSError(28, "No space left")
    with pytest.raises(OSError, match="folder'$"), atomic(tmp_path / "folder"):
        pass
    with pytest.raises(OSError, match="a.txt/b.txt'$"):
        write_text(tmp_path / "a.txt", "a")
        write_text(tmp_path / "a.txt" / "b.txt", "b")
    assert {path.name for path in tmp_path.rglob("*")} == {"folder", "a.txt"}
    write_text(tmp_path / "new" / "deep" / "a.txt", "a")
    assert (tmp_path / "new" / "deep" / "a.txt").read_text() == "a"


def test_a_partial_download_that_is_a_link_is_not_followed(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    archive = download.OFFICIAL["cifar10"][0]
    part = download._part(tmp_path, archive)
    part.symlink_to(mine)
    with pytest.raises(InputError, match="is a link, which is not followed"):
        download.fetch("cifar10", [archive], tmp_path, instead="no", console=Console(quiet=True))
    with pytest.raises(OSError), open(part, "wb", opener=download._no_link):
        pass
    assert mine.read_text() == "mine" and part.is_symlink()


def test_an_array_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    blank = np.zeros((2, 64, 64, 3), np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x_train=blank, y_train=[0, 1], x_test=blank, y_test=[0, 1])
    name = f"npz:{tmp_path / 'a.npz'}"
    assert len(sources.load_dataset(name).y_train) == 2
    monkeypatch.setattr(npz_files, "machine_memory", lambda: 2 * blank.nbytes)
    with pytest.raises(InputError, match="would unpack to .* GiB, and the limit is"):
        sources.load_dataset(name)


# ---- docs/trust.md -----------------------------------------------------------------------------------------


def test_every_test_that_the_promises_name_is_there():
    text = (small_runs.ROOT / "docs" / "trust.md").read_text()
    folder = small_runs.ROOT / "tests"
    rooms = ("trust", "guards", "trackers", "resume", "user_files", "api", "closed_claims", "flower")
    text_of_tests = "".join((folder / f"test_{room}.py").read_text() for room in rooms)
    ours = re.findall(r"^def (test_\w+)", text_of_tests, re.M)
    for bench, name in re.findall(r"`(experiments/)?(?:tests/)?(test_[\w.]+)`", text):
        if name.endswith(".py"):
            assert (small_runs.ROOT / bench / "tests" / name).is_file(), name
        else:
            start = name.removesuffix("...")
            assert [own for own in ours if own == name or (start != name and own.startswith(start))], name
