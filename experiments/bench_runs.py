"""What a run of each method takes on this machine: CPU seconds and the most memory, compilation included.

    python experiments/bench_runs.py                                  # every method with its defaults
    python experiments/bench_runs.py fppl vfcl -- --tasks 2 --rounds 1   # with options of `fcljax run`

Each run is a process of its own without a cache of compiled programs. Prints a row per method.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from peers.machine import processor

from fcljax.methods import METHODS


def main(arguments: list[str]) -> None:
    """Run what was asked for."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    methods = arguments[:cut] or sorted(METHODS)
    options = arguments[cut + 1 :]
    print(f"{processor()}\n| method | CPU s | peak, MiB |\n|---|---|---|")
    for method in methods:
        print(row(method, options), flush=True)


def row(method: str, options: list[str]) -> str:
    """One method's row."""
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", str(Path(folder) / "run"), "--compile-cache", "off"]
        command = [sys.executable, "-m", "fcljax", "run", method, *options, *out]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(run.pid, 0)
    if status:
        return f"| {method} | failed | |"
    return f"| {method} | {used.ru_utime + used.ru_stime:.0f} | {used.ru_maxrss / 1024:.0f} |"


if __name__ == "__main__":
    main(sys.argv[1:])
