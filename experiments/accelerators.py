"""Compiles every program of a round of the five papers' methods for accelerators that are not here.

    python experiments/accelerators.py                 # all cases, into docs/results/accelerators.jsonl
    python experiments/accelerators.py --methods fppl --chips v5e --only phase --set lanes=8 lane_mode=vmap
    python experiments/accelerators.py --methods all --chips v5e h100 --small --out FILE

The last line shows whether the compilers take what every method is made of. Each case has its own process: a
compiler for a ViT-B takes minutes of CPU time and gigabytes of memory.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import yaml

from fcljax import config
from fcljax.checks import chips
from fcljax.checks.plan import Stand, experiment
from fcljax.commands.planning import figures
from fcljax.errors import InputError
from fcljax.methods import METHODS as ALL
from fcljax.runs.software import CHECKOUT, commit_of
from fcljax.studies import papers

METHODS = ("fppl", "pilora", "hepco", "pmae", "vfcl")
TABLE_CHIPS = ("v5e", "v5e-16", "h100", "h200")
STAND = Stand(images=50_000, classes=100, side=32)  # as CIFAR-100


def settings_of(method: str, more: dict[str, Any]) -> config.RunConfig:
    """The paper's settings, on images as CIFAR-100's."""
    values = _base(method) | {"dataset": "digits", "checkpoint": None, "tasks": 10, "scale": "paper"} | more
    return _resolved(method, {key: value for key, value in values.items() if value is not None})


def _base(method: str) -> dict[str, Any]:
    """Return the options of the method's paper; for a method without a file HePCo's but its learning rate."""
    file = papers.FOLDER / f"{method}.yaml"
    if not file.exists():
        return {key: value for key, value in _base("hepco").items() if key != "lr"}
    return yaml.safe_load(file.read_text())["base"]


def _resolved(method: str, given: dict[str, Any]) -> config.RunConfig:
    return config.resolve(config.from_mapping(method, given, "accelerators"))


def play(method: str, chip: str, only: str, small: bool, more: dict[str, Any]) -> None:
    """One case: a line of JSON for each program."""
    machine, placement = chips.machine(chip)
    settings, stand = (_resolved(method, more), None) if small else (settings_of(method, more), STAND)
    exp = experiment(settings, machine, chips.CHIPS[chip], stand)
    case = {"code": commit_of(CHECKOUT), "method": method, "chip": chip, "set": more}
    case |= {"lanes": exp.engine.lanes.count}
    case |= {"dtype": exp.settings.dtype, "devices": chips.CHIPS[chip].devices}
    for each in chips.reports(exp, placement, chips.CHIPS[chip].kind, only):
        line = case | figures(each, chips.CHIPS[chip])
        line |= {"of_memory": each.memory / chips.CHIPS[chip].memory, "kernels": each.kernels}
        print(json.dumps(line), flush=True)


def main() -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=METHODS, help="or all")
    parser.add_argument("--chips", nargs="*", default=TABLE_CHIPS)
    parser.add_argument("--only", default="", help="regular expression of programs")
    parser.add_argument("--set", nargs="*", default=[], help="other settings, NAME=VALUE")
    parser.add_argument("--small", action="store_true", help="the embedded digits and network at mini scale")
    parser.add_argument("--out", default="docs/results/accelerators.jsonl")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    more = {key: yaml.safe_load(value) for key, value in (each.split("=", 1) for each in options.set)}
    if options.case:
        method, chip = options.case
        return play(method, chip, options.only, options.small, more)
    methods = [*ALL] if options.methods == ["all"] else options.methods
    with open(options.out, "a") as out:
        for method in methods:
            for chip in options.chips:
                again = [sys.executable, __file__, "--case", method, chip, "--only", options.only]
                again += ["--small"] if options.small else []
                began = time.time()
                done = subprocess.run([*again, "--set", *options.set], stdout=subprocess.PIPE, text=True)
                out.write(done.stdout)
                out.flush()
                said = "" if done.returncode == 0 else f", exit code {done.returncode}"
                print(f"{method} {chip}: {time.time() - began:.0f} s{said}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"accelerators: {error}")
