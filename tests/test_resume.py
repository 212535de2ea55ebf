"""A run that was killed with SIGKILL and resumed equals the run that was not, bit for bit."""

import shutil

import jax
import numpy as np
import pytest
import small_runs
from small_runs import OPTIONS, assert_same_run

from fcljax import cli
from fcljax.errors import InputError
from fcljax.runs import checkpoint


def resume(method, out):
    return cli.main(["run", method, "--resume", str(out)])


@pytest.fixture
def reference(request):
    return small_runs.finished(request.param)


@pytest.mark.parametrize(
    ("reference", "kills"),
    [
        pytest.param("linear", 1, marks=pytest.mark.long),
        pytest.param("linear", 2, marks=pytest.mark.long),
        pytest.param("fppl", 1, marks=pytest.mark.long),
        pytest.param("icarl", 1, marks=pytest.mark.long),
    ],
    indirect=["reference"],
)
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(reference, kills, tmp_path):
    method = reference.name.removeprefix("finished-")
    out = tmp_path / "killed"
    rounds = len((reference / "metrics.jsonl").read_text().splitlines())
    moments = np.sort(
        np.random.default_rng(len(method)).choice(np.arange(1, rounds // 2 + 1), kills, replace=False)
    )
    arguments = ["run", method, *OPTIONS[method], "--out", str(out)]
    for number, moment in enumerate(moments):
        environment = small_runs.environment(tmp_path / str(number))
        small_runs.kill_when_logged(arguments, out / "metrics.jsonl", int(moment), environment)
        assert not (out / "summary.json").exists()
        arguments = ["run", method, "--resume", str(out)]
    assert resume(method, out) == 0
    assert_same_run(out, reference)


@pytest.mark.parametrize("reference", ["linear"], indirect=True)
def test_a_run_killed_before_its_first_checkpoint_can_be_resumed(reference, tmp_path):
    out = tmp_path / "killed"
    half = out / "checkpoints" / "1.orbax-checkpoint-tmp" / "state"
    half.mkdir(parents=True)
    (out / "figures").mkdir()
    (half / "manifest.ocdbt").write_bytes(b"\0" * 10)
    shutil.copy(reference / "config.yaml", out)
    (out / "metrics.jsonl").write_text('{"task": 0, "rou')
    assert resume("linear", out) == 0
    assert_same_run(out, reference)


@pytest.mark.parametrize("reference", ["linear", "fppl"], indirect=True)
def test_resuming_a_finished_run_changes_nothing(reference, capsys):
    content = lambda: {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in reference.rglob("*") if path.is_file()
    }
    before = content()
    assert resume(reference.name.removeprefix("finished-"), reference) == 0
    assert content() == before
    assert str(reference) in capsys.readouterr().out


@pytest.mark.parametrize("reference", ["linear"], indirect=True)
def test_a_damaged_checkpoint_is_one_line_that_names_it(reference, tmp_path, capsys):
    out = shutil.copytree(reference, tmp_path / "damaged")
    (out / "summary.json").unlink()
    for path in (out / "checkpoints").rglob("_METADATA"):
        path.write_bytes(path.read_bytes()[:20])
    assert resume("linear", out) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fcljax: ")]
    assert line.startswith("fcljax: resume: checkpoint 15 in ")
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize("reference", ["linear"], indirect=True)
def test_a_checkpoint_of_another_shape_is_refused(reference, tmp_path):
    template = {"server": jax.numpy.zeros((3, 4))}
    out = shutil.copytree(reference, tmp_path / "copy")
    refused = pytest.raises(InputError, match="resume: checkpoint 15 in .* cannot be read")
    with checkpoint.open_checkpoints(out / "checkpoints", 2) as manager, refused:
        checkpoint.latest(manager, template)
