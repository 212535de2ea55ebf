"""A run that was killed with SIGKILL and resumed equals the run that was not, bit for bit."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import small_runs
import yaml
from small_runs import OPTIONS, assert_same_run, last_checkpoint

from fcljax import cli, config
from fcljax.errors import InputError
from fcljax.runs import checkpoint
from fcljax.runs import resume as resuming


def resume(method, out, *options):
    return cli.main(["run", method, "--resume", str(out), *options])


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
        pytest.param("pmae", 1, marks=pytest.mark.long),
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
@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_can_be_resumed(reference, tmp_path, capsys):
    out = tmp_path / "killed"
    half = out / "checkpoints" / "1.orbax-checkpoint-tmp" / "state"
    half.mkdir(parents=True)
    (out / "figures").mkdir()
    (half / "manifest.ocdbt").write_bytes(b"\0" * 10)
    shutil.copy(reference / "config.yaml", out)
    (out / "metrics.jsonl").write_text('{"task": 0, "rou')
    assert resume("linear", out) == 0
    assert_same_run(out, reference)
    assert "scale: mini, because the network is a micro one" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("reference", ["pmae"], indirect=True)
def test_a_run_goes_on_with_what_the_server_has_kept_of_finished_tasks(reference, tmp_path, capsys):
    """From the round before the last one, which restores the images of both tasks; without the file of the
    first one it is refused."""
    out = tmp_path / "cut"
    shutil.copytree(reference, out)
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoints" / "4")
    whole = (out / "kept" / "task-000.npz").read_bytes()
    (out / "kept" / "task-000.npz").unlink()
    assert resume("pmae", out) == 2
    assert "task-000.npz" in capsys.readouterr().err and not (out / "summary.json").exists()
    (out / "kept" / "task-000.npz").write_bytes(whole)
    assert resume("pmae", out) == 0
    assert_same_run(out, reference)


@pytest.mark.long
@pytest.mark.parametrize("reference", ["pmae"], indirect=True)
def test_a_run_says_what_its_server_keeps_and_what_rebuilt_images_give_away(reference):
    """By hand: 2 clients, 2 tasks of 5 classes, at most 4 images of each; 4 patches of 8 pixels, one of them
    visible; tokens of width 96 in float32."""
    summary = json.loads((reference / "summary.json").read_text())
    replay, restored = summary["server_replay"], summary["restored"]
    assert replay["capacity"] == 2 * 2 * 5 * 4 and replay["example_bytes"] == 4 * (2 * 96 + 4)
    assert 0 < replay["examples"] <= replay["capacity"]
    assert replay["bytes"] == replay["examples"] * replay["example_bytes"]
    assert replay["image_bytes"] == 3 * 16**2 and replay["uploaded"] >= replay["examples"]
    assert {path.name for path in (reference / "kept").iterdir()} == {"task-000.npz", "task-001.npz"}
    for found in (restored, restored["test"]):
        assert found["images"] > 20 and 0 < found["mse_restored"] < 1 and 5 < found["psnr"] < 40
    assert (reference / "figures" / "restored.png").stat().st_size > 1000


@pytest.mark.parametrize("reference", small_runs.some(["linear", "fppl"], ["linear"]), indirect=True)
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
    assert line.startswith("fcljax: resume: checkpoint 15 in ") and line.endswith("none of the 1 before it")
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"14", "15"}
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize("reference", ["linear"], indirect=True)
def test_a_checkpoint_of_another_shape_is_refused(reference, tmp_path):
    template = {"server": jax.numpy.zeros((3, 4))}
    out = shutil.copytree(reference, tmp_path / "copy")
    refused = pytest.raises(InputError, match="resume: checkpoint 15 in .* cannot be read")
    with checkpoint.open_checkpoints(out / "checkpoints", 2) as manager, refused:
        checkpoint.latest(manager, template)


def test_a_large_checkpoint_is_on_disk_before_the_next_round_needs_its_memory(tmp_path, monkeypatch):
    """The names of finished steps; a step that is being written has another one."""
    monkeypatch.setattr(checkpoint, "BESIDE", 2**25 - 1)
    state = checkpoint.State(np.zeros(2**23, np.float32), (), np.uint32([0, 1]))
    with checkpoint.open_checkpoints(tmp_path, 2) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, state, {}))
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("every", "last", "now", "due"),
    [
        (None, None, 0.0, True),  # the first round's
        (None, checkpoint.Write(checkpoint.BESIDE, 9.0, 100.0), 100.1, True),  # written beside the next round
        (None, checkpoint.Write(checkpoint.BESIDE + 1, 3.0, 100.0), 199.9, False),
        (None, checkpoint.Write(checkpoint.BESIDE + 1, 3.0, 100.0), 200.1, True),  # 3 s in 100
        (2, checkpoint.Write(checkpoint.BESIDE + 1, 3.0, 100.0), 100.1, True),  # as asked for
        (4, None, 0.0, False),
    ],
)
def test_large_checkpoints_take_at_most_three_per_cent_of_the_time(every, last, now, due):
    assert checkpoint.is_due(every, 6, last, now) == due


def test_what_a_run_chose_for_its_device_stays_when_it_is_resumed(tmp_path):
    """Settings that are left to the run do not differ from what it chose; those that are given may."""
    before = {"lanes": 4, "microbatch": 8, "dtype": "bfloat16", "seed": 1}
    free = {"lanes": 0, "microbatch": 0, "dtype": "auto", "seed": 1}
    assert resuming.differing(before, free) == {}
    assert set(resuming.differing(before, free | {"dtype": "float32", "seed": 2})) == {"dtype", "seed"}
    settings = config.resolve(config.from_mapping("linear", {"lanes": 2}, "test"))
    assert resuming.chosen_before(tmp_path, settings) == {}
    chosen = dataclasses.replace(settings, lanes=4, microbatch=8, dtype="bfloat16")
    (tmp_path / "config.yaml").write_text(config.to_yaml(chosen))
    assert resuming.chosen_before(tmp_path, settings) == {"microbatch": 8, "dtype": "bfloat16"}


@pytest.mark.long
@pytest.mark.parametrize("reference", ["linear"], indirect=True)
def test_a_run_goes_on_on_other_devices_with_the_same_numbers_up_to_rounding(reference, tmp_path, capsys):
    """The last round on two devices in place of one. What changed is said once, and stays in config.yaml,
    checkpoints and summary.json; a device that is not there is refused before anything is written."""
    out = shutil.copytree(reference, tmp_path / "moved")
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoints" / "15")
    before = (out / "config.yaml").read_bytes()
    assert resume("linear", out, "--devices", "99") == 2
    assert capsys.readouterr().err == "fcljax: devices: 99 requested; nearest valid value: 8\n"
    assert (out / "config.yaml").read_bytes() == before
    assert resume("linear", out, "--devices", "2") == 0
    what = "devices (2, not 1), lanes (2, not 1)"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("resume: ")]
    assert line == (
        f"resume: {what}: from here on results equal those of the run without this change up to rounding, "
        "not bit for bit"
    )
    (step, state, records), (step_, state_, _) = last_checkpoint(out), last_checkpoint(reference)
    assert step == step_ == 15 and records["hardware_changes"] == [[14, what]]
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(state_), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert yaml.safe_load((out / "config.yaml").read_text())["devices"] == 2
    summary, other = (json.loads((each / "summary.json").read_text()) for each in (out, reference))
    assert summary["hardware_changes"] == [[14, what]] and other["hardware_changes"] == []
    assert summary["config"] == other["config"] | {"devices": 2}
    assert summary["A_avg"] == pytest.approx(other["A_avg"], abs=0.01)
    assert resume("linear", out) == 0  # on both devices: nothing changes again
    assert "resume: " not in capsys.readouterr().err


@pytest.mark.parametrize("reference", ["linear"], indirect=True)
def test_a_finished_run_stays_as_it_is_on_other_devices(reference):
    summary = (reference / "summary.json").read_bytes()
    assert resume("linear", reference, "--devices", "2") == 0
    assert (reference / "summary.json").read_bytes() == summary
    assert yaml.safe_load((reference / "config.yaml").read_text())["devices"] == 1


def test_on_other_devices_a_run_chooses_anew_what_is_not_given():
    """Lanes of four devices do not fit three; the number format stays, which decides about more than
    rounding."""
    stored = {"devices": 4, "lanes": 8, "microbatch": 16, "dtype": "bfloat16", "remat": True}
    assert resuming.stored_settings(stored) == resuming.stored_settings(stored, 4) == stored
    left = {"devices": 4, "dtype": "bfloat16", "remat": True}
    assert resuming.stored_settings(stored, 3) == left


def test_what_changed_of_the_hardware_is_named():
    then = {"devices": 2, "kind": "TPU v5e", "lanes": 2}
    assert resuming.changed("hardware", {"hardware": then}, then | {"processes": 1}) == ""
    now = then | {"kind": "NVIDIA H100", "devices": 1}
    found = resuming.changed("hardware", {"hardware": then}, now)
    assert found == "devices (1, not 2), kind ('NVIDIA H100', not 'TPU v5e')"
    assert resuming.changed("hardware", {}, now) == ""  # a checkpoint that does not say
    assert resuming.changed("software", {"hardware": then}, now) == ""
