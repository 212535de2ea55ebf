"""Rates for mini scale, chosen on held-out training images.

    python experiments/mini_rates.py SYSTEM TABLE RUN OPTION=VALUE,VALUE... --out NEW_FOLDER

makes one run of `fcljax reproduce SYSTEM TABLE` (its name as `--dry-run` lists it) with each combination of
the values, and the seed of that run. A quarter of each class's training images is kept from training, and
accuracies are those of these images: no test image is seen. Options are fields of a run, `lora_lr=1e-4,1e-3`.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fcljax.errors import choose
from fcljax.studies import papers, reproduce, sweeps
from fcljax.studies.grid import Planned, plan_of
from fcljax.studies.paper_tables import value_of
from fcljax.terminal import add_row

HOLDOUT = 0.25


def main(arguments: list[str]) -> None:
    """Make the runs and show their accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("system")
    parser.add_argument("table")
    parser.add_argument("run", help="name of a run of that table")
    parser.add_argument("grid", nargs="+", help="OPTION=VALUE,VALUE...")
    parser.add_argument("--out", required=True, help="folder of the runs; goes on with one that is there")
    given = parser.parse_args(arguments)
    made = reproduce.plan(papers.find_columns(papers.FOLDER, given.system, given.table), "mini", None)
    choices = {run.name: run for run in made.runs}
    base = choices[choose("run", given.run, choices)]
    runs = combinations(base, dict(map(values_of, given.grid)))
    outcomes = sweeps.sweep(runs, Path(given.out), Path(given.out).exists(), sweeps.Ways([None]), Console())
    show(runs, outcomes)


def values_of(text: str) -> tuple[str, list[str]]:
    """A field's name and its values, as they are typed."""
    name, _, values = text.partition("=")
    return name, values.split(",")


def combinations(base: Planned, grid: dict[str, list[str]]) -> list[Planned]:
    """The run with each combination of values, on held-out images."""
    whole = dataclasses.asdict(base.cfg) | {"holdout": HOLDOUT}
    method = whole.pop("method")
    rest = {name: value for name, value in whole.items() if name not in grid}
    return plan_of({"method": method, "base": rest, "grid": grid}, "mini_rates")


def show(runs: list[Planned], outcomes: dict[str, sweeps.Outcome]) -> None:
    """Accuracies on the held-out images, in %."""
    table = Table("run", "A_avg", "A_last", "seconds")
    for run in runs:
        summary = outcomes[run.name].summary
        if summary is None:
            add_row(table, run.name, "-", "-", outcomes[run.name].why)
            continue
        accuracies = [f"{value_of(summary, metric):.1f}" for metric in ("A_avg", "A_last")]
        add_row(table, run.name, *accuracies, f"{sum(summary['time'].values()):.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
