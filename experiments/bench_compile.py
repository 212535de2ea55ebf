"""What the programs of a run cost to trace and to compile, in CPU seconds of this process.

    python experiments/bench_compile.py glfc vfcl hepco fedweit pmae fppl

Each method with its defaults on the digits. Nothing is trained, and nothing is read from jax's cache. Prints
a row per program and one per method, with the memory of the program's temporaries.
"""

import argparse
import time
from typing import Any

import jax
from peers.machine import processor

from fcljax import config
from fcljax.runs.build import build
from fcljax.runs.programs import Placement, programs_of


def main() -> None:
    """Compile what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="+")
    jax.config.update("jax_enable_compilation_cache", False)
    print(processor())
    print("| program | traced, s | compiled, s | temporaries, MB |\n|---|---|---|---|")
    for method in parser.parse_args().methods:
        compiled(method)


def compiled(method: str) -> None:
    """Compile every program of a method's round."""
    experiment = build(config.from_mapping(method, {}, "options"))
    total = [0.0, 0.0]
    for program in programs_of(experiment, Placement()):
        start = time.process_time()
        lowered = program.lower()
        traced = time.process_time()
        analysis: Any = lowered.compile().memory_analysis()
        memory = analysis.temp_size_in_bytes
        found = traced - start, time.process_time() - traced
        total = [before + new for before, new in zip(total, found, strict=True)]
        shown = " | ".join(f"{each:.2f}" for each in found)
        print(f"| {method}: {program.name} | {shown} | {memory / 1e6:.0f} |", flush=True)
    print(f"| {method} | {total[0]:.1f} | {total[1]:.1f} | |", flush=True)


if __name__ == "__main__":
    main()
