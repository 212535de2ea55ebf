"""A sweep on a real Ray or Slurm: started, stopped, resumed, and compared with the same one on this machine.

    python experiments/clusters.py ray --out runs/clusters
    python experiments/clusters.py slurm --signal INT --out runs/clusters

Needs `pip install ray`, or submitit and a Slurm whose nodes see FOLDER and this interpreter. The sweep is
stopped when one of its runs has played a round and none has ended. Nothing of it may be left then, a sweep
that is resumed must end with exit code 0, and each run with the log and the summary of the run that this
machine played undisturbed. Prints a line for each of these, and exits with 1 if one does not hold.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from torture_kills import numbers

SWEEP = """\
base: {tasks: 2, clients: 3, rounds: 40, epochs: 1, image_size: 8, batch_size: 16}
runs:
  - {name: a, method: linear}
  - {name: b, method: ewc, lora_blocks: 2}
seeds: [2023, 2024]
slurm: {time: 10, cpus: 1}
ray: {cpus: 1}
"""
PATIENCE = 900  # seconds
CODES = {"TERM": 143, "INT": 130}


def main() -> None:
    """Play the sweep three times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("ray", "slurm", "slurm-local"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--signal", choices=CODES, default="TERM")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "sweep.yaml"
    file.write_text(SWEEP)
    reference = out / "reference"
    if not reference.exists():
        assert wait(sweep(file, "--out", str(reference))) == 0, "the sweep does not end on this machine"
    folder = out / f"{options.engine}-{options.signal.lower()}"
    shutil.rmtree(folder, ignore_errors=True)
    process = sweep(file, "--out", str(folder), "--engine", options.engine)
    until(lambda: any(map(rounds_of, folder.glob("*/metrics.jsonl"))), process)
    ended = len(list(folder.glob("*/summary.json")))
    process.send_signal(getattr(signal, f"SIG{options.signal}"))
    code = wait(process)
    time.sleep(2)  # for Slurm to learn that its jobs have ended
    holds = [
        report(f"no run had ended when the sweep was stopped: {ended}", ended == 0),
        report(f"exit code {code}", code == CODES[options.signal]),
        report(f"leftover processes: {leftovers(folder)}", not leftovers(folder)),
    ]
    code = wait(sweep(file, "--resume", str(folder), "--engine", options.engine))
    holds.append(report(f"exit code {code} of the resumed sweep", code == 0))
    for run in sorted(reference.glob("*/summary.json")):
        name = run.parent.name
        holds.append(report(f"{name}: the same numbers", numbers(run.parent) == numbers(folder / name)))
    sys.exit(not all(holds))


def sweep(file: Path, *arguments: str) -> subprocess.Popen:
    """Begin a sweep, in a group of processes of its own."""
    command = [sys.executable, "-m", "fcljax", "sweep", str(file), *arguments]
    return subprocess.Popen(command, start_new_session=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def wait(process: subprocess.Popen) -> int:
    """Return a process's exit code."""
    return process.wait(PATIENCE)


def until(holds: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait until something holds, while the process lives."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the sweep ended before it could be stopped")
        time.sleep(0.2)


def rounds_of(log: Path) -> int:
    """Return the number of lines of a run's log."""
    return len(log.read_text().splitlines())


def leftovers(folder: Path) -> list[str]:
    """Return the processes that name the sweep's folder, and Slurm's jobs."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    processes = [line for line in listed.splitlines() if f"{folder}/" in line]
    if shutil.which("squeue"):
        processes += subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.splitlines()
    return processes


def report(what: str, holds: bool) -> bool:
    """Print whether something holds, and return it."""
    print(f"{'ok' if holds else 'WRONG'}: {what}", flush=True)
    return holds


if __name__ == "__main__":
    main()
