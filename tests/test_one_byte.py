"""One byte of one file is changed, for every file that a run reads or has written: at its head, in its
middle, at its end and at a drawn place. The change is refused, or said, or the result is the same."""

import os
import random
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import small_runs
from PIL import Image

from fcljax import cli
from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.vit import ViTConfig, parameter_shapes
from fcljax.models.weights.pretrained import save_native
from fcljax.runs import loop
from fcljax.runs.folder import LOCK
from fcljax.runs.model import Model

pytestmark = pytest.mark.long
COMMON = shlex.split("--tasks 2 --rounds 2 --epochs 1 --batch-size 8 --image-size 16")
CLIENTS = ["--clients", "2", "--min-examples", "1"]
SIZE = 16
METHOD = """
import fcljax
from fcljax.methods.fedavg import plain

METHOD = fcljax.MethodEntry("fine", None, plain, "linear")
"""
CHANGED = "changed since the run"
# of a finished run: these are for people, and no command reads them
UNREAD = ("figures", "report.html", LOCK)


class Run(NamedTuple):
    """A finished run, and what it read."""

    method: str
    out: Path
    inputs: list[Path]
    decisive: list[Path]
    """Inputs of which at least one of the changes must be noticed: the run would have been another."""


# ---- runs --------------------------------------------------------------------------------------------------


def images(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def weights(path: Path) -> Path:
    """A masked autoencoder of one block."""
    draw = np.random.default_rng(0)
    shapes = parameter_shapes(ViTConfig(image_size=16, patch=8, width=16, depth=1, heads=2, mlp=32))
    shapes["decoder"] = decoder_shapes(DecoderConfig(16, 8, encoder_width=16, width=16, depth=1, mlp=32))
    save_native(path, jax.tree.map(lambda x: 0.1 * draw.normal(size=x.shape), shapes), {})
    return path


def finished(folder: Path, method: str, options: list[str], inputs: list[Path], decisive: list[Path]) -> Run:
    out = folder / "run"
    assert cli.main(["run", method, *options, "--data-dir", str(folder / "data"), "--out", str(out)]) == 0
    prepared = sorted(path for path in (folder / "data").rglob("*") if path.is_file())
    prepared = [path for path in prepared if not path.name.endswith(".lock")]
    return Run(method, out, inputs + prepared, decisive)


def of_files(folder: Path) -> Run:
    """Arrays, weights, a method, a class order and owners from files."""
    data, order, owners, method = (folder / name for name in ("a.npz", "order.txt", "owners.csv", "mine.py"))
    label = {"y_train": np.arange(24) % 4, "y_test": np.arange(12) % 4}
    np.savez(data, x_train=images(0, 24), x_test=images(1, 12), **label)
    order.write_text("3\n1\n0\n2\n")
    owners.write_text("example,client\n" + "".join(f"{i},{i // 4 % 2}\n" for i in range(24)))
    method.write_text(METHOD)
    network = weights(folder / "network.safetensors")
    options = ["--dataset", f"npz:{data}", "--checkpoint", str(network), "--heads", "2"]
    options += ["--class-order", f"file:{order}", "--partition", f"file:{owners}"]
    inputs = [data, network, method, order, owners]
    return finished(folder, str(method), [*COMMON, *options], inputs, inputs)


def of_list(folder: Path) -> Run:
    """Images of a list with a column that names the clients."""
    lines = ["path,label,split,site"]
    pictures = []
    for i, image in enumerate(images(2, 32)):
        path = folder / f"{i}.png"
        Image.fromarray(image).save(path)
        pictures.append(path)
        lines.append(f"{i}.png,{'abcd'[i % 4]},{'test' if i >= 24 else 'train'},{'xy'[i // 4 % 2]}")
    listing = folder / "images.csv"
    listing.write_text("\n".join(lines) + "\n")
    options = ["--dataset", f"list:{listing}", "--partition", "column:site"]
    # all pictures are read alike
    return finished(folder, "linear", [*COMMON, *options], [listing, *pictures[::16]], [listing])


def of_table(folder: Path) -> Run:
    """A table."""
    draw = np.random.default_rng(3)
    table = folder / "table.csv"
    rows = [f"{a:.3f},{b:.3f},{'uvwx'[i % 4]}" for i, (a, b) in enumerate(draw.normal(size=(60, 2)))]
    table.write_text("width,height,label\n" + "\n".join(rows) + "\n")
    options = shlex.split("--tasks 2 --rounds 2 --epochs 1 --batch-size 8 --backbone mlp")
    return finished(folder, "linear", [*options, *CLIENTS, "--dataset", f"csv:{table}"], [table], [table])


def of_pmae(folder: Path) -> Run:
    """A server that keeps files of finished tasks, and a decoder."""
    network = weights(folder / "network.safetensors")
    data = folder / "a.npz"
    label = {"y_train": np.arange(24) % 4, "y_test": np.arange(12) % 4}
    np.savez(data, x_train=images(0, 24), x_test=images(1, 12), **label)
    options = ["--dataset", f"npz:{data}", "--checkpoint", str(network), "--heads", "2"]
    options += shlex.split("--vpt-length 1 --vpt-blocks 1 --tune-epochs 1 --tune-batch 16")
    return finished(folder, "pmae", [*COMMON, *CLIENTS, *options], [network], [network])


RUNS = {"files": of_files, "list": of_list, "table": of_table, "pmae": of_pmae}


@pytest.fixture
def no_figures(monkeypatch):
    """Resumed runs draw nothing: no number depends on it, and it takes most of their time."""
    monkeypatch.setattr(loop, "draw_figures", lambda *_: None)
    monkeypatch.setattr(loop.page, "try_report", lambda *_: None)


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    return RUNS[request.param](tmp_path_factory.mktemp(request.param))


# ---- changes -----------------------------------------------------------------------------------------------


def changes(path: Path):
    """The file's content with one byte changed, at each of the places."""
    content = path.read_bytes()
    draw = random.Random(path.name)
    size = len(content)
    for place in sorted({0, size // 2, size - 1, draw.randrange(size)} if size else ()):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        yield place, bytes(changed)


def unfinished(run: Run, trial: Path) -> Path:
    """A copy of the run that was killed in its last round, which it had logged."""
    shutil.rmtree(trial, ignore_errors=True)
    shutil.copytree(run.out, trial)
    for name in ("summary.json", "digests.json", "report.html"):
        (trial / name).unlink()
    shutil.rmtree(trial / "figures")
    steps = sorted((trial / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(steps[-1])
    return trial


def result(out: Path) -> tuple[str, dict]:
    """What the run has found."""
    summary = small_runs.timeless(out, but=("config", "given", "traces"))
    return (out / "metrics.jsonl").read_text(), summary


def is_refused(code: int, err: str) -> bool:
    lines = [line for line in err.splitlines() if line.startswith("fcljax: ")]
    return code == 2 and len(lines) == 1 and "Traceback" not in err


def resumed(run: Run, out: Path, capsys) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["run", run.method, "--resume", str(out)])
    return code, capsys.readouterr().err


def test_a_run_goes_on_with_what_it_read_or_refuses(run, no_figures, tmp_path, capsys):
    """A changed input: the run is that of the old one, or is refused."""
    silent = []
    noticed = set()
    for path in run.inputs:
        content = path.read_bytes()
        times = path.stat()
        for place, changed in changes(path):
            path.write_bytes(changed)
            code, err = resumed(run, unfinished(run, tmp_path / "trial"), capsys)
            path.write_bytes(content)
            # prepared data would be checked, or prepared, once more
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if is_refused(code, err):
                noticed.add(path)
            elif code or result(tmp_path / "trial") != result(run.out):
                silent.append((path.name, place, code, err[-400:]))
    assert not silent
    assert set(run.decisive) <= noticed


# TensorStore's threads may say of a damaged file what the exception has said
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_from_files_that_are_whole(run, no_figures, tmp_path, capsys):
    """A changed file of a run that was killed. Files of checkpoints, of which there are many, are changed at
    one of the places, each at the next."""
    silent = []
    whole = unfinished(run, tmp_path / "whole")
    for i, path in enumerate(sorted(each for each in whole.rglob("*") if each.is_file())):
        changed_files = list(changes(path))
        if "checkpoints" in path.parts and changed_files:
            changed_files = [changed_files[i % len(changed_files)]]
        for place, changed in changed_files:
            trial = unfinished(run, tmp_path / "trial")
            (trial / path.relative_to(whole)).write_bytes(changed)
            code, err = resumed(run, trial, capsys)
            if not is_refused(code, err) and (code or result(trial) != result(run.out)):
                silent.append((str(path.relative_to(whole)), place, code, err[-400:]))
    assert not silent


def test_changed_results_are_said_to_be(run, tmp_path, capsys):
    """A changed file of a finished run, whose accuracies are compared, and whose model predicts."""
    silent = []
    for path in sorted(each for each in run.out.rglob("*") if each.is_file()):
        name = path.relative_to(run.out)
        if name.parts[0] in UNREAD or name.parts[0] == "checkpoints":
            continue
        for place, changed in changes(path):
            shutil.rmtree(tmp_path / "trial", ignore_errors=True)
            trial = shutil.copytree(run.out, tmp_path / "trial")
            (trial / name).write_bytes(changed)
            capsys.readouterr()
            code = cli.main(["compare", str(trial)])
            shown = capsys.readouterr()
            code_of_run, err = resumed(run, trial, capsys)
            if is_refused(code, shown.err) or CHANGED in shown.out + shown.err or CHANGED in err:
                continue
            if is_refused(code_of_run, err) or result(trial) == result(run.out):
                continue
            silent.append((str(name), place, code, code_of_run, (shown.out + shown.err + err)[-400:]))
    assert not silent


def test_a_model_file_with_another_byte_is_refused(tmp_path):
    import fcljax

    data = (images(0, 24), np.arange(24) % 4, images(1, 12), np.arange(12) % 4)
    options = dict(tasks=2, rounds=1, clients=2, epochs=1, image_size=16, batch_size=8, min_examples=1)
    found = fcljax.run("linear", data, progress=False, **options)
    path = tmp_path / "model.fcljax"
    found.model.save(path)
    content = path.read_bytes()
    draw = random.Random(0)
    expected = np.asarray(Model.load(path).predict(data[2]))
    for place in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(10))}:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            label = Model.load(path).predict(data[2])
        except fcljax.InputError as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(label, expected), place
