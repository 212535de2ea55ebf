"""A run as a process of its own: `python -m fcljax run`, on this machine or on one that an engine chooses."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fcljax.runs.signals import number_of

# of the environment, what runs elsewhere get too
CARRIED = ("FCLJAX_", "JAX_", "XLA_", "PYTHONPATH", "PYTHONWARNINGS")


class Job(NamedTuple):
    """What a process needs to make a run, or to go on with one. Paths are absolute: the process may begin in
    another folder."""

    name: str
    method: str
    out: str  # run directory
    settings: str  # config.yaml of the run
    log: str  # file that the process's output is added to
    options: tuple[str, ...]  # further ones of `fcljax run`
    folder: str  # that relative paths of the settings begin in
    environment: Mapping[str, str]  # what it has more than the process that starts it


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that decides what runs do."""
    return {name: value for name, value in environment.items() if name.startswith(CARRIED)}


def command(job: Job) -> list[str]:
    """The command line of a run: a new one, or one that was begun and goes on."""
    begun = (Path(job.out) / "config.yaml").exists()
    where = ["--resume", job.out] if begun else ["--config", job.settings, "--out", job.out]
    return [sys.executable, "-m", "fcljax", "run", job.method, *where, *job.options]


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start a run, away from the terminal's signals: who has started it passes them on."""
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


def work(job: Job) -> int:
    """Make a run, from start to end, and return its exit code. What ends this process is passed on, and so is
    a signal whose number stands in the file of `stop_file`."""
    told = stop_file(job)
    if told.exists():
        return 128 + signal.SIGTERM
    process = start(job)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if told.exists():
                process.send_signal(int(told.read_text()))
                process.wait()
    except BaseException as stop:
        process.send_signal(number_of(stop) if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
        process.wait()
        raise
    return process.returncode


def stop_file(job: Job) -> Path:
    """Where an engine that passes no signals on says that a run shall end."""
    return Path(f"{job.log}.stop")


class Again:
    """`work` as submitit wants it: a job whose time is over, or that makes room, is queued again and does the
    same, which is to go on."""

    def __call__(self, job: Job) -> int:
        """Make a run."""
        return work(job)

    def checkpoint(self, job: Job) -> object:
        """What is queued again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)
