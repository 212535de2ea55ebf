"""Table of docs/results/fit.md: new classes that start at their mean features, on held-out training images.

    python experiments/headtune.py RESULTS.jsonl [METHOD,...]

Each method with and without `--headtune` at its rates of the scale mini, with three seeds: 100 rendered
letters in 10 tasks, the packaged network, and a quarter of the training images in place of the test images.
The table decides which methods' preset `improved` has `headtune`. Each run is a line of the file; runs that
it already has are not made again.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import fcljax
from fcljax.errors import InputError

METHODS = (
    "linear scaffold feddyn ewc lwf lorm l2p dualprompt coda-prompt dolfin fedproto fedavg fedprox "
    "fedavg-prompt ffa-lora fed-talora"
)
SEEDS = (2023, 2024, 2025)
BUDGET: dict[str, Any] = dict(
    glyph_train=20, holdout=0.25, tasks=10, clients=5, rounds=2, epochs=3, batch_size=16
)
# the same clients for all methods; class means are sums over examples
SHARED: dict[str, Any] = dict(
    partition="dirichlet", alpha=0.5, aggregator="mean", scale="mini", progress=False
)


def main(results: str, methods: str = METHODS.replace(" ", ",")) -> None:
    """Make the runs that are missing, and print the table."""
    path = Path(results)
    path.touch()
    done = {tuple(json.loads(line)["run"]) for line in path.read_text().splitlines()}
    for method, headtune, seed in itertools.product(methods.split(","), (False, True), SEEDS):
        if (method, headtune, seed) in done:
            continue
        try:
            result = fcljax.run(method, "glyphs", seed=seed, headtune=headtune, **BUDGET, **SHARED)
        except InputError as error:
            print(method, error)
            continue
        line = {"run": [method, headtune, seed], "A_last": result.metrics["A_last"]}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print(table(path))


def table(path: Path) -> str:
    """Return the rows of the page: A_last in %, the mean over seeds and each seed."""
    accuracies: dict[tuple[str, bool], list[float]] = {}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        method, headtune, _ = run["run"]
        accuracies.setdefault((method, headtune), []).append(100 * run["A_last"])
    rows = ["| method | intended | with --headtune |", "|---|---|---|"]
    for method in dict.fromkeys(method for method, _ in accuracies):
        cells = []
        for headtune in (False, True):
            values = accuracies.get((method, headtune), [])
            seeds = ", ".join(f"{value:.1f}" for value in values)
            cells.append(f"{np.mean(values):.1f} ({seeds})" if values else "-")
        rows.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
