"""Small real runs that several test modules look at: each is made once per session."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from filelock import FileLock

from fcljax import cli
from fcljax.runs import checkpoint

ROOT = Path(__file__).parent.parent
COMMON = [
    "--tasks",
    "5",
    "--epochs",
    "1",
    "--image-size",
    "8",
    "--batch-size",
    "64",
]  # 8 pixels are one patch
OPTIONS = {
    "linear": [*COMMON, "--rounds", "3", "--clients", "3", "--participation", "0.6", "--eval-every-round"],
    "fppl": [
        *COMMON,
        "--rounds",
        "2",
        "--clients",
        "2",
        "--prompt-blocks",
        "2",
        "--prompt-length",
        "2",
        "--server-epochs",
        "1",
    ],
    "icarl": [
        *COMMON,
        "--rounds",
        "2",
        "--clients",
        "3",
        "--participation",
        "0.5",
        "--memory-size",
        "9",
        "--lora-lr",
        "1e-3",
    ],
    "pmae": [
        *shlex.split("--tasks 2 --epochs 1 --rounds 2 --clients 2 --batch-size 64 --image-size 16 --lr 1e-2"),
        *shlex.split("--vpt-length 2 --vpt-blocks 2 --tune-epochs 1 --tune-batch 16 --decoder"),
        str(ROOT / "fcljax" / "assets" / "vit_micro_decoder.safetensors"),
    ],
}
CLOCK = {
    "time",
    "client_images_per_s",
    "trained_images_per_s",
    "eval_images_per_s",
}  # of summary.json: these may differ


def some(values, kept) -> list:
    """Parameters of which all but `kept` run in `make test-long` only."""
    return [x if x in kept else pytest.param(*_tuple(x), marks=pytest.mark.long) for x in values]


def _tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def finished(method: str) -> Path:
    """The run directory of `method` under OPTIONS, from start to end in the process that needs it first. Read
    it, or copy it; do not change it."""
    folder = Path(os.environ["FCLJAX_TESTS"])
    out = folder / f"finished-{method}"
    with FileLock(folder / f"{method}.lock"):
        if not out.exists():
            assert cli.main(["run", method, *OPTIONS[method], "--out", str(out)]) == 0
    assert (out / "summary.json").exists(), "the run did not finish"
    return out


def environment(scratch: Path) -> dict[str, str]:
    """Of a subprocess: this process's, the package, and a copy of the compilation cache in the folder
    `scratch`. JAX does not write its cache atomically, so a process that is killed, or that may not write,
    must have its own."""
    own = shutil.copytree(os.environ["JAX_COMPILATION_CACHE_DIR"], scratch / "compiled", dirs_exist_ok=True)
    return os.environ | program_environment() | {"JAX_COMPILATION_CACHE_DIR": str(own)}


def program_environment() -> dict[str, str]:
    """Of a subprocess: where the package is, and that a warning is an error."""
    warnings = "error,ignore:Error reading persistent compilation cache"
    return {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": warnings}


def logged(log: Path) -> int:
    """Lines of the log of a run that may just have begun."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


def kill_when_logged(arguments: list[str], log: Path, lines: int, environment: dict[str, str]) -> None:
    """Start `fcljax ARGUMENTS` and kill it with SIGKILL as soon as `log` has that many lines."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fcljax", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 300
    while logged(log) < lines and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.kill()
    message = process.communicate()[1].decode()
    assert process.returncode == -signal.SIGKILL, f"ended before it could be killed: {message}"


def last_checkpoint(out):
    """(number of rounds, arrays, host records without seconds) of the newest checkpoint."""
    with checkpoint.open_checkpoints(out / "checkpoints", 2) as manager:
        step = manager.latest_step()
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(), records=ocp.args.JsonRestore())
        restored = manager.restore(step, args=parts)
    state, host = restored.state, restored.records
    clients = dict(checkpoint._named(state.pop("clients")))
    # large states, and those of several processes, are in files, of which a later one replaces an earlier one
    for shard in host.get("shards", ()):
        file = np.load(out / checkpoint.CLIENTS / str(shard["step"]) / shard["file"])
        for name in file:
            states = file[name]
            if name not in clients:
                clients[name] = np.zeros((shard["of"], *states.shape[1:]), states.dtype)
            for row, client in enumerate(i for bounds in shard["clients"] for i in range(*bounds)):
                clients[name][client] = states[row]
    records = {name: value for name, value in host["records"].items() if name != "seconds"}
    return step, (state, clients), records


def timeless(out, but=()):
    """summary.json without times."""
    summary = json.loads((out / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name not in {*CLOCK, *but}}


def assert_same_run(out, reference, but=()):
    """Both runs left the same bits, but for times and the summary's entries `but`."""
    assert (out / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert timeless(out, but) == timeless(reference, but)
    (step, state, records), (step_, state_, records_) = last_checkpoint(out), last_checkpoint(reference)
    assert step == step_
    assert records == records_
    assert jax.tree.structure(state) == jax.tree.structure(state_)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(state_), strict=True):
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
