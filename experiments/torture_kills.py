"""Runs that are killed many times, for experiments/torture.py: small ones of every method whose server has
files or sums, or whose clients have a state; of streams; and of `fcljax.run` from Python."""

import contextlib
import functools
import json
import random
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torture_common import PATIENCE, Outcome
from torture_programs import Forked, Programs

# Twenty checkpoints
TASKS = 2
ROUNDS = 10
COMMON = f"--tasks {TASKS} --rounds {ROUNDS} --clients 2 --epochs 1 --batch-size 16"
VIT = f"{COMMON} --image-size 16 --heads 2"
NETWORK = f"{COMMON} --image-size 8 --backbone resnet_micro"
SYNTHESIS = (
    "--synthesis-rounds 1 --synthesis-batch 8 --synthesis-warmup 1 --generator-steps 2 --synthetic-batch 8"
)
RUNS = {
    "linear": VIT,
    # what the server keeps of finished tasks is in files
    "pmae": f"{VIT} --vpt-length 1 --vpt-blocks 1 --tune-epochs 1 --tune-batch 16",
    # a proxy; clients' exemplars
    "glfc": f"{NETWORK} --match-steps 2 --prototype-steps 1 --monitor-images 2 --gradient-side 8",
    "pilora": f"{VIT} --lora-blocks 1 --lora-rank 1",  # prototypes
    "vfcl": NETWORK,  # clients' classifiers and exemplars
    "fedweit": NETWORK,  # clients' masks, a knowledge base
    # generators
    "hepco": f"{VIT} --pool-blocks 1 --pool-size 4 --pool-length 2 --generator-steps 2 --distill-steps 2 "
    "--generator-growth 1",
    # the server's images and generators
    "target": f"{NETWORK} {SYNTHESIS}",
    "lander": f"{NETWORK} {SYNTHESIS}",
    "mfcl": f"{NETWORK} --generator-steps 2 --generator-batch 8 --synthetic-batch 8",
    # clients' own models, classifiers and control variates
    "ditto": f"{VIT} --lora-blocks 1 --lora-rank 1",
    "fedper": f"{VIT} --lora-blocks 1 --lora-rank 1",
    "scaffold": f"{VIT} --lora-blocks 1 --lora-rank 1",
    # the server's sums of features, and what it has learned from them
    "afcl": VIT,
    "fedranpac": f"{VIT} --projection 20",
    "dolfin": f"{VIT} --lora-blocks 1 --lora-rank 1",
    "ditto, 1000 clients": f"{VIT} --clients 1000 --partition iid --min-examples 1 --participation 10 "
    "--lora-blocks 1 --lora-rank 1",
    "linear, online": f"{VIT} --population online",
    "linear, blurry": f"{VIT} --blurry 0.3",
    "ditto, from Python": f"{VIT} --lora-blocks 1 --lora-rank 1",
}
KILLS = 30  # of a run, at most
CLOCK = {"time", "client_images_per_s", "trained_images_per_s", "eval_images_per_s", "traces"}
STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class References(NamedTuple):
    """Runs that were left alone, each made when it is first needed."""

    folder: Path
    programs: Programs
    methods: tuple[str, ...]
    """Those of which runs are killed and damaged."""

    def of(self, method: str) -> Path:
        """The run of a method."""
        out = self.folder / method
        if not (out / "summary.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            code, err = self.start(method, out).ended(PATIENCE)
            assert not code, err
        return out

    def start(self, name: str, out: Path) -> Forked:
        """Begin the run of this name, or go on with it."""
        begun = (out / "config.yaml").exists()
        method = name.partition(",")[0]
        command = "python" if name.endswith("Python") else "run"
        options = shlex.split(RUNS[name])
        data, weights = _inputs(self.folder, 64 if "1000" not in name else 4000)
        options += ["--dataset", f"npz:{data}"]
        if VIT in RUNS[name]:
            options += ["--checkpoint", str(weights)]
        if command == "run" and begun:
            options = []  # the run directory has them
        options += ["--resume" if begun else "--out", str(out)]
        return self.programs.start(command, method, *options, name=name)


@contextlib.contextmanager
def references(folder: Path, methods: tuple[str, ...] = tuple(RUNS)) -> Iterator[References]:
    """Runs of these methods, as processes that are forked from one."""
    programs = Programs()
    try:
        yield References(folder, programs, methods)
    finally:
        programs.close()


@functools.cache
def _inputs(folder: Path, images: int) -> tuple[Path, Path]:
    """Images of four classes, and a masked autoencoder of one block, whose programs are traced in no time."""
    from fcljax.models.mae import DecoderConfig, decoder_shapes
    from fcljax.models.vit import ViTConfig, parameter_shapes
    from fcljax.models.weights.pretrained import save_native

    draw = np.random.default_rng(0)
    data = folder / f"images-{images}.npz"
    weights = folder / "network.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    label = {"y_train": np.arange(images) % 4, "y_test": np.arange(16) % 4}
    image: dict[str, Any] = {
        f"x{name[1:]}": draw.integers(0, 256, (len(y), 16, 16, 3), np.uint8) for name, y in label.items()
    }
    np.savez(data, **image, **label)
    shapes = parameter_shapes(ViTConfig(image_size=16, patch=8, width=16, depth=1, heads=2, mlp=32))
    shapes["decoder"] = decoder_shapes(DecoderConfig(16, 8, encoder_width=16, width=16, depth=1, mlp=32))
    import jax

    # a generator of their own: all runs have the same weights, however many images are drawn
    draw = np.random.default_rng(1)
    save_native(weights, jax.tree.map(lambda x: 0.1 * draw.normal(size=x.shape), shapes), {})
    return data, weights


def numbers(out: Path) -> tuple[bytes, dict]:
    """What a run has found: its log, and its summary without times."""
    summary = json.loads((out / "summary.json").read_text())
    kept = {name: value for name, value in summary.items() if name not in CLOCK}
    if kept.get("rate_search"):
        # its line and its seconds are the clock's too
        kept["rate_search"] = kept["rate_search"]["trials"]
    return (out / "metrics.jsonl").read_bytes(), kept


def kill(rng: random.Random, out: Path, references: References, number: int) -> Outcome:
    """A run that is ended, again and again, and resumed; `number`: of the trial, whose method comes next."""
    method = references.methods[number % len(references.methods)]
    reference = references.of(method)
    ends = [method]
    times = 0
    while times < KILLS:
        before = newest_checkpoint(out)
        process = references.start(method, out)
        stop = rng.choice(STOPS)
        where = _wait(rng, process, out)
        finished = process.poll() is not None
        if not finished:
            process.send_signal(stop)
        code, err = process.ended(PATIENCE)
        finished = finished or not code  # the signal came after all that is written
        ends.append(f"{'after ' if finished else ''}{stop.name} {where}")
        # a program that uses the library sees Ctrl-C as Python shows it
        is_python_interrupt = method.endswith("Python") and err.rstrip().endswith("KeyboardInterrupt")
        is_traceback = "Traceback" in err and not is_python_interrupt
        if code not in ((0,) if finished else (-stop, 128 + stop)) or is_traceback:
            return Outcome("other", f"{ends}: exit code {code}: {err[-600:]}", times + 1)
        if newest_checkpoint(out) < before:
            return Outcome("different", f"{ends}: checkpoint {before} is lost", times + 1)
        if finished:
            break
        times += 1
    else:
        code, err = references.start(method, out).ended(PATIENCE)
        if code:
            return Outcome("other", f"{ends}, then resumed: exit code {code}: {err[-600:]}", times)
    same = numbers(out) == numbers(reference)
    return Outcome("survived" if same else "different", str(ends), times)


def newest_checkpoint(out: Path) -> int:
    """The last round of which there is a complete checkpoint; 0: there is none."""
    return max((int(path.name) for path in (out / "checkpoints").glob("*") if path.name.isdigit()), default=0)


def _wait(rng: random.Random, process: Forked, out: Path) -> str:
    """Wait for a random moment: while it starts, in a round, in a checkpoint, or while figures are drawn."""
    begun = time.time()
    end = time.monotonic() + PATIENCE
    more = newest_checkpoint(out) + rng.randrange(2)
    log = out / "metrics.jsonl"
    folder = out / "checkpoints"
    places: dict[str, Callable[[], bool]] = {
        "at the start": lambda: True,
        "in a round": lambda: _is_new(log, begun) and log.read_bytes().count(b"\n") >= more,
        "in a checkpoint": lambda: any(
            "tmp" in path.name and int(path.name.split(".")[0]) > more and _is_new(path, begun)
            for path in folder.glob("*")
        ),
        "at the end": lambda: (out / "summary.json").exists(),
    }
    # an earlier wait for the end would waste most of the moments at which this run can be killed
    last = newest_checkpoint(out) >= TASKS * ROUNDS - 1
    place = rng.choices(list(places), (2, 0, 0, 9) if last else (2, 5, 5, 0))[0]
    while process.poll(0.002) is None and time.monotonic() < end and not places[place]():
        pass
    most = {"at the start": 5.0, "in a checkpoint": 0.03}.get(place, 0.3)
    process.poll(rng.uniform(0, most))
    return place


def _is_new(path: Path, begun: float) -> bool:
    """Whether something was written since."""
    try:
        return path.stat().st_mtime > begun
    except FileNotFoundError:
        return False
