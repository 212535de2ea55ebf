"""Robust aggregation with hostile clients on the digits: accuracy of every rule under every attack.

    python experiments/robust.py --out runs/robust --methods fedavg --seeds 2023 2024 2025
    python experiments/robust.py --out runs/robust --methods fppl --seeds 2023

10 clients with the same class mix (iid), 2 of them hostile; 2 tasks, 3 rounds of 2 epochs. FedAvg averages a
classifier on frozen features, FPPL has prompts in two blocks. Every run is an ordinary `fcljax run`; runs
that are there already are not made again. Prints A_last in % as a Markdown table: without hostile clients,
and under each attack, mean over the seeds.
"""

import argparse
import json
from pathlib import Path

import jax

from fcljax import cli
from fcljax.federated.faults import ATTACKS

COMMON = ["--tasks", "2", "--clients", "10", "--partition", "iid", "--rounds", "3", "--epochs", "2"]
METHODS = {
    "fedavg": ["--adapter", "linear", "--lr", "1e-2"],
    "fppl": ["--prompt-blocks", "2", "--prompt-length", "5"],
}
RULES = {
    "mean": [],
    "median": ["--aggregator", "median"],
    "trimmed_mean, trim 0.2": ["--aggregator", "trimmed_mean", "--trim", "0.2"],
    "geometric_median": ["--aggregator", "geometric_median"],
    "krum, 2 assumed": ["--aggregator", "krum", "--hostile-bound", "2"],
    "multi_krum, 2 assumed": ["--aggregator", "multi_krum", "--hostile-bound", "2"],
    "centred_clipping, radius 1": ["--aggregator", "centred_clipping", "--clip-radius", "1.0"],
    "mean of changes clipped to 1": ["--clip-norm", "1.0"],
}


def main() -> None:
    """Make the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[2023])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    # rules differ on the server alone, so most programs are compiled once
    jax.config.update("jax_compilation_cache_dir", str(options.out / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    for method in options.methods:
        print(table(method, options.seeds, options.out), flush=True)


def table(method: str, seeds: list[int], out: Path) -> str:
    """The rows of one method: a line per rule."""
    lines = [f"| {method} | none | {' | '.join(ATTACKS)} |", "|---|" + "---|" * (1 + len(ATTACKS))]
    for rule, options in RULES.items():
        cells = [accuracy(method, rule, options, attack, seeds, out) for attack in (None, *ATTACKS)]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def accuracy(
    method: str, rule: str, options: list[str], attack: str | None, seeds: list[int], out: Path
) -> str:
    """A_last in %, mean over the seeds; how many of a run's rounds had a result that was not kept, if any."""
    summaries = [load(method, rule, options, attack, seed, out) for seed in seeds]
    mean = 100 * sum(summary["A_last"] for summary in summaries) / len(seeds)
    refused = sum(summary["refused_results"] for summary in summaries)
    return f"{mean:.1f}" + (f" ({refused} rounds refused)" if refused else "")


def load(method: str, rule: str, options: list[str], attack: str | None, seed: int, out: Path) -> dict:
    """The summary of one run, which is made if it is not there."""
    name = f"{method}-{rule.split(',')[0].replace(' ', '-')}-{attack or 'none'}-{seed}"
    folder = out / name
    if not (folder / "summary.json").exists():
        hostile = ["--hostile", "2", "--attack", attack] if attack else []
        arguments = ["run", method, *COMMON, *METHODS[method], *options, *hostile]
        arguments += ["--seed", str(seed), "--out", str(folder)]
        if cli.main(arguments) != 0:
            raise SystemExit(f"{name} failed")
        jax.clear_caches()
    return json.loads((folder / "summary.json").read_text())


if __name__ == "__main__":
    main()
