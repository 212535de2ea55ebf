"""Make a run as a separate process, `python -m fcljax run`, on this machine or where an
engine chooses."""

import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fcljax.runs.signals import number_of, pause

# variables of the environment that runs on other machines get too
CARRIED = ("FCLJAX_", "JAX_", "XLA_", "PYTHONPATH", "PYTHONWARNINGS")

WAIT = 0.2  # seconds between two checks of a process


class Job(NamedTuple):
    """The inputs of a process that makes or resumes a run. Paths are absolute: it may
    start in another folder."""

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
    """The folder of relative paths in the settings."""
    environment: Mapping[str, str]
    """Variables that are added to the environment."""


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that influence what runs do."""
    return {name: value for name, value in environment.items() if name.startswith(CARRIED)}


def command(job: Job) -> list[str]:
    """Return the command line that starts or resumes a run."""
    # a run that has begun is resumed
    if (Path(job.out) / "config.yaml").exists():
        files = ["--resume", job.out]
    else:
        files = ["--config", job.settings, "--out", job.out]
    return [sys.executable, "-m", "fcljax", "run", job.method, *files, *job.options]


class Adopted:
    """The process of a run that a killed sweep has left behind, known by the lock that
    it has. It has what is used of `subprocess.Popen`."""

    def __init__(self, job: Job):
        self._job = job
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return 0 if the run is finished, 1 if it ended otherwise, None while it runs."""
        if self._code is None:
            # the lock is free when the process has ended, also where it was killed
            handle = _lock(self._job)
            if handle is not None:
                os.close(handle)
                # without a summary it did not finish
                self._code = 1
                if (Path(self._job.out) / "summary.json").exists():
                    self._code = 0
        return self._code

    def send_signal(self, number: int, /) -> None:
        """Ask it to end. Nothing is sent if it has ended, or if the lock file does not
        name a process of this machine that has the file open."""
        path = _lock_file(self._job)
        with contextlib.suppress(OSError, ValueError):
            if self.poll() is None:
                text = path.read_text()
                pid = int(text.partition(" ")[0])
                # a file of others may have any number: 0 and -1 mean whole groups
                if pid > 0 and text == _identity(pid) and _has_open(pid, path):
                    os.kill(pid, number)

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(WAIT)
        return code


def start(job: Job) -> subprocess.Popen[bytes] | Adopted:
    """Start a run in a session of its own: it gets signals from the caller, not from
    the terminal. If a sweep that was killed has left a process that is still at work on
    the run, it is that one."""
    # a second process on the same run would destroy its files
    handle = _lock(job)
    if handle is None:
        return Adopted(job)
    try:
        with open(job.log, "ab") as log:
            process = subprocess.Popen(
                command(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=job.folder,
                env=os.environ | dict(job.environment),
                # Ctrl-C goes to the sweep, which passes it on
                start_new_session=True,
                # the lock lasts as long as the child, also without this process
                pass_fds=[handle],
            )
        # the number of the process, for a later sweep that adopts it
        os.ftruncate(handle, 0)
        os.write(handle, _identity(process.pid).encode())
    finally:
        os.close(handle)
    return process


def _identity(pid: int) -> str:
    """Return a process's number, the name of this machine, and when the process started:
    a number that is used again has another start.

    Raises:
      OSError, ValueError: if there is no such process.
    """
    if sys.platform == "linux":
        # the name, in brackets, may have spaces; field 22 is the start in ticks after
        # boot
        stat = Path(f"/proc/{pid}/stat").read_text()
        start = stat.rpartition(")")[2].split()[19]
    else:
        asked = ["ps", "-o", "lstart=", "-p", str(pid)]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        start = answer.stdout.strip()
        if not start:
            raise ValueError(f"there is no process {pid}")
    return f"{pid} {platform.node()} {start}"


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open; True where the system does not say."""
    if sys.platform != "linux":
        return True
    file = path.stat()
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            if os.path.samestat(name.stat(), file):
                return True
    return False


def _lock(job: Job) -> int | None:
    """Lock and return the open lock file of a run; None: another process has it."""
    handle = os.open(_lock_file(job), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a file system without locks
        pass
    return handle


def _lock_file(job: Job) -> Path:
    """Return the file that the process of a run locks; it contains its `_identity`."""
    return Path(f"{job.log}.lock")


def run_job(job: Job) -> int:
    """Make a run, from start to end, and return its exit code. Whatever ends this
    process also ends the run, and so does a signal whose number is in the file of
    `stop_file`."""
    # a stop that came before the run has started
    stop = stop_file(job)
    if stop.exists():
        return 128 + signal.SIGTERM
    process = start(job)
    try:
        while process.poll() is None:
            pause(WAIT)
            if stop.exists():
                process.send_signal(int(stop.read_text()))
                process.wait()
    # whatever ends this process: no run may go on alone
    except BaseException as end:
        number = int(signal.SIGTERM)
        if isinstance(end, KeyboardInterrupt):
            number = number_of(end)
        process.send_signal(number)
        process.wait()
        raise
    return process.wait()


def stop_file(job: Job) -> Path:
    """Return the file in which an engine without signals writes the number of one."""
    return Path(f"{job.log}.stop")


class Again:
    """Call `run_job` as submitit wants it: a job that timed out or was preempted is
    queued again."""

    def __call__(self, job: Job) -> int:
        """Make a run."""
        return run_job(job)

    def checkpoint(self, job: Job) -> object:
        """Return the job that is queued again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)
