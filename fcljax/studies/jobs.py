"""A run as a process of its own: `python -m fcljax run`, on this machine or on one that an engine chooses."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fcljax.runs.signals import number_of, pause

# variables of the environment that runs on other machines get too
CARRIED = ("FCLJAX_", "JAX_", "XLA_", "PYTHONPATH", "PYTHONWARNINGS")


class Job(NamedTuple):
    """What a process needs to make or resume a run. Paths are absolute: it may start in another folder."""

    name: str
    method: str
    out: str
    """The run directory."""
    settings: str
    """config.yaml of the run."""
    log: str
    """The file that the process's output is added to."""
    options: tuple[str, ...]
    """Further options of `fcljax run`."""
    folder: str
    """Where relative paths of the settings start."""
    environment: Mapping[str, str]
    """Variables that are added to the environment."""


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that influence what runs do."""
    return {name: value for name, value in environment.items() if name.startswith(CARRIED)}


def command(job: Job) -> list[str]:
    """The command line that starts or resumes a run."""
    begun = (Path(job.out) / "config.yaml").exists()
    where = ["--resume", job.out] if begun else ["--config", job.settings, "--out", job.out]
    return [sys.executable, "-m", "fcljax", "run", job.method, *where, *job.options]


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own: it gets signals from the caller, not from the terminal."""
    with open(job.log, "ab") as log:
        return subprocess.Popen(
            command(job),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=job.folder,
            env=os.environ | dict(job.environment),
            start_new_session=True,
        )


def run_job(job: Job) -> int:
    """Make a run, from start to end, and return its exit code. Whatever ends this process also ends the run,
    and so does a signal whose number is in the file of `stop_file`."""
    stop = stop_file(job)
    if stop.exists():
        return 128 + signal.SIGTERM
    process = start(job)
    try:
        while process.poll() is None:
            pause(0.2)
            if stop.exists():
                process.send_signal(int(stop.read_text()))
                process.wait()
    except BaseException as end:
        process.send_signal(number_of(end) if isinstance(end, KeyboardInterrupt) else signal.SIGTERM)
        process.wait()
        raise
    return process.returncode


def stop_file(job: Job) -> Path:
    """Where an engine that cannot pass signals on writes the number of one."""
    return Path(f"{job.log}.stop")


class Again:
    """`work` as submitit wants it: a job that timed out or was preempted is queued again and resumes."""

    def __call__(self, job: Job) -> int:
        """Make a run."""
        return run_job(job)

    def checkpoint(self, job: Job) -> object:
        """The job that is queued again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)
