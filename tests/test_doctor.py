"""`fcljax doctor` tells what is there from what is not, and its exit code says whether a run could start."""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import small_runs
from packaging.requirements import Requirement

from fcljax import cli
from fcljax.checks import doctor
from fcljax.data.files.download import OFFICIAL
from fcljax.data.files.listings import NAMED
from fcljax.models.weights import pretrained

ASSETS = small_runs.ROOT / "fcljax" / "assets"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "SIDE", 8)
    monkeypatch.setattr(doctor, "SECONDS", 0.0)


def examined(*arguments, capsys):
    code = cli.main(["doctor", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] == (code == 0) == all(each["state"] != "failed" for each in found["findings"])
    return code, {(each["section"], each["name"]): each for each in found["findings"]}


def test_a_machine_that_can_run_is_healthy_and_every_look_is_there(quick, capsys):
    checkpoint = str(ASSETS / "vit_micro.safetensors")
    code, found = examined(checkpoint, "--data-dir", "shelf", capsys=capsys)
    assert code == 0 and not Path("shelf").exists()
    assert found["packages", "jax"]["value"] == metadata.version("jax")
    assert found["devices", "cpu:0"]["state"] == "ok" and "memory" in found["devices", "cpu:0"]["value"]
    assert "GFLOP/s" in found["self test", "product of 8 x 8"]["value"]
    assert "vit_micro" in found["checkpoints", checkpoint]["value"]
    assert "free" in found["folders", "data sets and their cache"]["value"]
    assert "free" in found["folders", "compiled programs"]["value"]
    for name in NAMED:
        advice = found["data sets", name]["advice"]
        assert f"fcljax data prepare {name}" in advice
        assert (advice == f"fcljax data prepare {name}") == (name in OFFICIAL)


def test_tables_say_the_same_and_end_with_a_verdict(quick, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(section in out for section in ("packages", "extras", "devices", "self test", "data sets"))
    assert out.splitlines()[-1] == "a run can start: fcljax run fppl"


def test_a_checkpoint_that_cannot_be_read_is_a_failure_with_its_reason(quick, capsys):
    Path("rot.safetensors").write_bytes((ASSETS / "vit_micro.safetensors").read_bytes()[:5000])
    code, found = examined("rot.safetensors", "absent.npz", capsys=capsys)
    assert code == 1
    assert found["checkpoints", "rot.safetensors"]["state"] == "failed"
    assert "absent.npz" in found["checkpoints", "absent.npz"]["value"]
    assert cli.main(["doctor", "absent.npz"]) == 1
    assert "a run cannot start: checkpoints: absent.npz" in capsys.readouterr().out


def test_prepared_data_and_their_size_are_seen():
    Path("shelf/cifar-100-binary").mkdir(parents=True)
    for name in ("train.bin", "test.bin"):
        Path("shelf/cifar-100-binary", name).write_bytes(bytes(3074 * 100))
    (half,) = (each for each in doctor.datasets("shelf") if each.name == "cifar100")
    assert half.state == "missing" and "fine_label_names.txt' is missing" in half.value
    Path("shelf/cifar-100-binary/fine_label_names.txt").write_text("a\n" * 100)
    found = {each.name: each for each in (*doctor.datasets("shelf"), *doctor.folders("shelf"))}
    assert found["cifar100"].state == "ok" and found["cifar10"].value == "not here"
    assert "615.0 kB used" in found["data sets and their cache"].value


def test_folders_that_cannot_be_written_are_named():
    Path("runs").write_text("a file")
    found = {each.name: each for each in doctor.folders("runs/data")}
    assert found["run directories (runs/)"].state == "failed"
    assert (
        found["data sets and their cache"].state == "warning"
        and "--data-dir" in found["data sets and their cache"].advice
    )


def test_weights_are_told_from_others_by_their_checksum(monkeypatch):
    assert {each.state for each in doctor.weights()} == {"ok"}
    assert set(pretrained.ASSET_DIGESTS) == {path.name for path in ASSETS.glob("*.safetensors")}
    other = pretrained.ASSET_DIGESTS | {"vit_micro.safetensors": "0" * 64, "gone.safetensors": "1" * 64}
    monkeypatch.setattr(doctor, "ASSET_DIGESTS", other)
    states = {each.name: each.state for each in doctor.weights()}
    assert states["vit_micro.safetensors"] == "warning" and states["gone.safetensors"] == "failed"


@pytest.mark.parametrize(
    ("stated", "state", "words"),
    [
        ("numpy>=2.0", "ok", ""),
        ("numpy>=99", "failed", ">=99 is needed"),
        ("no-such-package-at-all", "failed", "not installed"),
    ],
)
def test_a_package_is_there_in_a_version_that_will_do(stated, state, words):
    finding = doctor._package(Requirement(stated))
    assert finding.state == state and words in finding.value
    assert bool(finding.advice) == (state == "failed")


def test_an_extra_that_is_missing_keeps_no_run_from_starting(monkeypatch):
    def requires(name):
        return {
            "fcljax": ["numpy>=2", 'engine[fast]>=1; extra == "gpu"'],
            "engine": ['no-such-plugin; extra == "fast"', 'unrelated-package; extra == "slow"'],
        }.get(name, [])

    def version(name):
        if name not in ("engine", "numpy"):
            raise metadata.PackageNotFoundError(name)
        return "2.0"

    monkeypatch.setattr(metadata, "requires", requires)
    monkeypatch.setattr(metadata, "version", version)
    found = {each.name: each for each in doctor.packages()}
    assert found["gpu"] == (
        "extras",
        "gpu",
        "missing",
        "engine: no-such-plugin not installed",
        "pip install -e '.[gpu]' in a clone of fcljax",
    )
    assert found["numpy"].state == "ok" and doctor.healthy(found.values())


def test_a_device_that_computes_something_else_fails(quick, monkeypatch):
    monkeypatch.setattr(doctor.jnp, "matmul", lambda a, b: a)
    (finding,) = doctor.self_test()
    assert finding.state == "failed"


def test_a_backend_that_is_not_there_fails_in_one_line(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu':\nno such thing")

    monkeypatch.setattr(doctor.jax, "devices", devices)
    (finding,) = doctor.devices()
    assert finding.state == "failed" and "\n" not in finding.value and "JAX_PLATFORMS" in finding.advice


def test_the_self_test_measures_a_product_of_this_machine():
    right, compile_s, flops = doctor._product()
    assert right and compile_s > 0 and flops > 1e6
    assert np.isfinite(flops)


def test_where_compiled_programs_go_is_told(tmp_path, quick, monkeypatch):
    where = lambda: next(each.value for each in doctor.folders() if each.name == "compiled programs")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in (("HOME", tmp_path), ("XDG_CACHE_HOME", ""), ("FCLJAX_DATA", "")):
        monkeypatch.setenv(name, str(value))
    assert where().startswith(f"{tmp_path}/.cache/fcljax/compiled: ")
    monkeypatch.setenv("FCLJAX_COMPILED", str(tmp_path / "mine"))
    assert where().startswith(f"{tmp_path}/mine: ")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "theirs"))
    assert where().startswith(f"{tmp_path}/theirs: ")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("FCLJAX_COMPILED", "off")
    assert "off" in where()
