"""Libraries in environments of their own: FedJAX and pfl-research need versions that fcljax cannot use.

`prepare` makes the environments. What is measured there is a process that plays a round when it is asked
(`served.py`), on the core of this one.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers.contest import Way, Work
from peers.dense import Dense, game_of, jax_steps, weights_of
from peers.game import Game, rows_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Library(NamedTuple):
    """What an environment holds, and the file of this folder that runs in it; without one, the bench does."""

    requirements: tuple[str, ...]
    program: str = ""


LIBRARIES = {
    "torch": Library(("--requirement", str(ROOT / "requirements.txt"), "torch")),
    # the last versions with which FedJAX 0.0.17 can be imported
    "FedJAX": Library(
        (
            "fedjax==0.0.17",
            "jax==0.4.30",
            "jaxlib==0.4.30",
            "dm-haiku==0.0.13",
            "optax==0.2.2",
            "chex==0.1.86",
            "flax==0.8.5",
            "numpy<2",
            "scipy<1.14",
        ),
        "fedjax_way.py",
    ),
    "pfl-research": Library(("pfl==0.6.0", "torch"), "pfl_way.py"),
}


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of an environment."""
    return folder / name / "bin" / "python"


def prepare(folder: Path) -> None:
    """Make the environments that are missing. A file at the end says that one is complete."""
    for name, library in LIBRARIES.items():
        ready = folder / name / "ready"
        if ready.exists():
            continue
        print(f"{name}: an environment in {folder / name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        install = [str(python_of(folder, name)), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *library.requirements], check=True)
        ready.touch()


def enter(folder: Path) -> None:
    """Go on in the environment of torch, in place of this process, unless it is there already."""
    python = python_of(folder, "torch")
    if Path(sys.prefix).resolve() != python.parent.parent.resolve():
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(python, [str(python), *sys.argv])


class Outside:
    """A library's process on one workload."""

    def __init__(self, folder: Path, name: str, work: Dense, game: Game):
        self.folder = tempfile.TemporaryDirectory(prefix="fcljax-peer-")
        self.place = Path(self.folder.name)
        export(self.place, work, game)
        command = [str(python_of(folder, name)), str(HERE / LIBRARIES[name].program), str(self.place)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.spent = 0.0

    def ask(self, what: str) -> None:
        """Send a line and wait for its answer."""
        assert self.process.stdin and self.process.stdout
        print(what, file=self.process.stdin, flush=True)
        for answer in self.process.stdout:
            if answer.startswith('{"cpu"'):  # libraries print too
                self.spent = json.loads(answer)["cpu"]
                return
        raise RuntimeError(f"{self.process.args} ended")

    def play(self) -> None:
        """One round."""
        self.ask("round")

    def cpu(self) -> float:
        """Its CPU seconds, up to the last answer."""
        return self.spent

    def weights(self) -> dict[str, np.ndarray]:
        """Those after the last round."""
        self.ask("weights")
        with np.load(self.place / "after.npz") as arrays:
            return dict(arrays)

    def close(self) -> None:
        """End it: its input ends."""
        self.process.communicate()
        self.folder.cleanup()


def export(folder: Path, work: Dense, game: Game) -> None:
    """Write a workload for a process that knows nothing of fcljax."""
    rows = np.concatenate([rows_of(game.partition, client) for client in range(len(work.rows))])
    image, label = (np.asarray(each)[rows] for each in game.data)
    weights: dict[str, Any] = {name: np.asarray(x) for name, x in weights_of(game).items()}
    offset = np.concatenate([[0], np.cumsum(work.rows)])
    np.savez(folder / "work.npz", _image=image, _label=label, _offset=offset, **weights)
    training = {"batch": work.batch, "epochs": work.epochs, "rate": work.rate}
    (folder / "work.json").write_text(json.dumps(training))


def same_work(folder: Path, name: str) -> None:
    """Check that a library does the same as a plain loop. Every client has one batch, or a half or a quarter
    of one, so that neither the order of rows nor a batch that is filled up with the same rows matters.

    Raises:
      RuntimeError: if weights differ by more than 1e-4 after a round.
    """
    small = {"classes": 3, "rows": (4, 2, 4, 1), "batch": 4, "rate": 0.3, "hidden": (5,)}
    for work in (
        Dense((6,), (), **small),
        Dense((4, 4, 1), (2, 3), **small),
        Dense((8, 8, 1), (), valid=(2, 3), **small),
    ):
        game = game_of(work)
        way = Outside(folder, name, work, game)
        way.play()
        found = way.weights()
        expected = jax_steps(work, game)()
        way.close()
        worst = max(float(np.abs(found[key] - np.asarray(x)).max()) for key, x in expected.items())
        if not worst <= 1e-4:
            raise RuntimeError(f"{name} does other work than a plain loop: weights differ by {worst}")


def served() -> list[str]:
    """The libraries that run as processes."""
    return [name for name, library in LIBRARIES.items() if library.program]


def ways(folder: Path, work: Dense, game: Game) -> list[Way]:
    """The libraries on a workload of dense networks."""

    def start(name: str) -> Work:
        way = Outside(folder, name, work, game)
        return Work(way.play, way.cpu)

    return [Way(name, partial(start, name)) for name in served()]
