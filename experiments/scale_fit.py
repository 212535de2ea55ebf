"""The tables of docs/results/fit.md: methods at the learning rates of `--scale fit`, `mini` and `paper`, on
some images of mini-CIFAR with a ViT-Ti at 64 pixels, and on digits and letters with the packaged network.

    python experiments/scale_fit.py DATA_FOLDER RESULTS.jsonl [SEED,...] [METHOD,...] [SCALE,...] [STREAM]

A stream has `few` or `many` classes in a task (`STREAMS`); `held-out` is `many` with other training images
in place of the test images, for questions that may lead to changes. `digits` and `glyphs` have the data and
the budget of docs/results/embedded.md. Each finished run is a line of RESULTS.jsonl; runs that it already
has are not made again. Rates are data in all of them, so that a method is compiled once for each seed and
fidelity: `paper` and `mini` have their learning rates, the fidelity `intended`, and the server training that
`fit` takes. A_last is the mean over tasks, each counted once.
"""

import contextlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax import config
from fcljax.data.files.arrays import dataset_of_arrays
from fcljax.errors import InputError
from fcljax.options import replaced
from fcljax.runs import loop, rate_search
from fcljax.runs.build import Experiment, Supplied, build, placed
from fcljax.runs.features import make_fill
from fcljax.runs.inputs import load_network
from fcljax.runs.records import Clock, Records
from fcljax.runs.rounds import first_state, make_play_round

METHODS = (
    "fedncm scaffold lorm ewc l2p pilora hepco linear fedprox coda-prompt fedproto dualprompt feddyn lwf "
    "dolfin fedavg fppl"
)


class Images(NamedTuple):
    """Which images of mini-CIFAR a stream has."""

    classes: int
    """Number of classes, the first ones of the data set."""
    train: int
    """Number of training images of each class."""
    test: int
    """Number of test images of each class."""
    held_out: bool = False
    """Whether the test images are other training images."""


class Stream(NamedTuple):
    """Images, and the options of all runs on them."""

    images: Images | None
    """Of mini-CIFAR, with a ViT-Ti; or None: the options name an embedded data set."""
    options: dict[str, Any]
    """Options besides method, scale, fidelity and seed."""


BUDGET = dict(rounds=2, epochs=3, partition="dirichlet", image_size=64)
FEW = BUDGET | dict(tasks=6, clients=4, batch_size=16, alpha=1.0, min_examples=5)
# a client has one or two steps in an epoch
MANY = BUDGET | dict(tasks=10, clients=5, batch_size=32, alpha=0.5)
EMBEDDED = dict(tasks=5, clients=5, alpha=0.5, rounds=2, epochs=3, batch_size=16, partition="dirichlet")
STREAMS = {
    "few": Stream(Images(12, 20, 15), FEW),
    "many": Stream(Images(50, 20, 10), MANY),
    "held-out": Stream(Images(50, 20, 10, held_out=True), MANY),
    "digits": Stream(None, EMBEDDED | dict(dataset="digits")),
    "glyphs": Stream(None, EMBEDDED | dict(dataset="glyphs", glyph_train=25)),
}
SCALES = ("fit", "mini", "paper")


def table(path: Path) -> str:
    """The rows of the page: A_last in % of every seed and its mean, and what each search chose."""
    runs: dict[str, dict[str, dict[int, dict]]] = {}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        if "A_last" in run:
            runs.setdefault(run["method"], {}).setdefault(run["scale"], {})[run["seed"]] = run
    rows = ["| method | " + " | ".join(SCALES) + " | chosen | seconds |", "|---" * 6 + "|"]
    for method, of_scale in runs.items():
        cells = [_accuracies(of_scale.get(scale, {})) for scale in SCALES]
        searches = [run["search"] for _, run in sorted(of_scale.get("fit", {}).items())]
        chosen = [re.split(", (?:chosen|because)", search["line"])[0].split(": ")[-1] for search in searches]
        seconds = [f"{search['seconds']:.0f}" for search in searches]
        rows.append(f"| {method} | {' | '.join(cells)} | {'; '.join(chosen)} | {', '.join(seconds)} |")
    return "\n".join(rows)


def _accuracies(of_seed: dict[int, dict]) -> str:
    percent = [100 * run["A_last"] for _, run in sorted(of_seed.items())]
    if not percent:
        return "-"
    return f"{np.mean(percent):.1f} ({', '.join(f'{value:.1f}' for value in percent)})"


def main(
    folder: str,
    results: str,
    seeds: str = "2023",
    methods: str = "",
    scales: str = "fit,mini,paper",
    stream: str = "few",
) -> None:
    """Make the runs that are missing."""
    path = Path(results)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {tuple(map(json.loads(line).get, ("method", "scale", "seed"))) for line in lines}
    for seed in map(int, seeds.split(",")):
        for method in (methods or METHODS.replace(" ", ",")).split(","):
            wanted = [scale for scale in scales.split(",") if (method, scale, seed) not in done]
            wanted = [scale for scale in wanted if method != "fedncm" or scale == "paper"]
            if wanted:
                _compare(method, wanted, seed, STREAMS[stream], Path(folder), path)
    print(table(path))


def _compare(method: str, scales: list[Any], seed: int, stream: Stream, folder: Path, path: Path) -> None:
    """Make the runs of a method with a seed, and add their lines."""
    players: dict[str, _Player] = {}
    for scale in scales:
        line: dict[str, Any] = {"method": method, "scale": scale, "seed": seed}
        began = time.time()
        try:
            fidelity = {} if scale == "fit" else {"fidelity": "intended"}
            settings = config.from_mapping(
                method, _given(folder, seed, stream) | fidelity | {"scale": "fit"}, "options"
            )
            if settings.fidelity not in players:
                players[settings.fidelity] = _Player(_built(settings, stream, folder))
            player = players[settings.fidelity]
            exp = player.exp
            if scale == "fit":
                choice = rate_search.search(exp, loop.QUIET, print)
                chosen = choice.settings
                line["search"] = choice.to_json()
            else:
                rates = rate_search.base_rates(settings, scale)
                chosen = replaced(settings, **rates, rate_factor=1.0)
            line |= {"fidelity": settings.fidelity, **player.run(chosen)}
        except InputError as error:
            line["error"] = str(error)
        line["seconds"] = time.time() - began
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _given(folder: Path, seed: int, stream: Stream) -> dict:
    given = stream.options | {"seed": seed}
    if stream.images is None:
        return given
    return given | {"checkpoint": str(folder / "vit_tiny_patch16_224_imagenet1k.npz")}


def _built(settings: config.RunConfig, stream: Stream, folder: Path) -> Experiment:
    if stream.images is None:
        return placed(build(settings))
    network = load_network(settings, settings.image_size)
    return placed(build(settings, Supplied(dataset_of_arrays(_data(stream.images, folder))[0], network)))


class _Player:
    """Plays runs of one experiment at different learning rates."""

    def __init__(self, exp: Experiment):
        self.exp = exp
        self.records = Records()
        self.fill = make_fill(exp)
        self.play = make_play_round(exp, self.records, Clock({}))
        self.results: dict[tuple, dict] = {}

    def run(self, settings: config.RunConfig) -> dict:
        """Return what a run with these learning rates ends with; two runs with the same rates are one."""
        rates = tuple(config.learning_rates(settings).values())
        if rates not in self.results:
            self.results[rates] = self._run(settings)
        return self.results[rates]

    def _run(self, settings: config.RunConfig) -> dict:
        """Return accuracies on test images and losses after each task."""
        exp = rate_search.with_choice(self.exp, settings)
        past = ()
        vars(self.records).update(vars(Records()))
        state = first_state(exp)
        for step in range(len(exp.scenario.tasks) * settings.rounds):
            if step % settings.rounds == 0:
                exp = self.fill(exp, [step // settings.rounds], contextlib.nullcontext)
            state, kept, *_ = self.play(exp, state, past, step)
            past += () if kept is None else (kept,)
        records = self.records
        mean = [float(np.mean(each)) for each in records.accuracy]
        # of the last round of each task
        losses = [line.get("loss") for line in records.rounds[settings.rounds - 1 :: settings.rounds]]
        return {
            "A_last": mean[-1],
            "A_avg": float(np.mean(mean)),
            "loss": losses[-1],
            "losses": losses,
            "accuracy": records.accuracy,
            "task_il": records.task_il,
        }


def _data(images: Images, folder: Path) -> tuple:
    """Return the first images of the first classes: training images, labels, test images, labels."""
    with np.load(folder / "cifar100_small.npz") as file:
        arrays = {name: file[name] for name in file.files}
    tests = ("test", 0)
    if images.held_out:
        tests = ("train", images.train)
    parts = []
    for (split, first), count in ((("train", 0), images.train), (tests, images.test)):
        label = arrays[f"y_{split}"]
        of_classes = [np.flatnonzero(label == class_id) for class_id in range(images.classes)]
        chosen = np.concatenate([indices[first : first + count] for indices in of_classes])
        parts += [arrays[f"x_{split}"][chosen], label[chosen]]
    return tuple(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
