"""Processes, on one host or several, that share one run.

The same command starts each process, with its number, and all compute the same values.
Process 0 alone prints and writes files, except for client states in checkpoints, which
each process writes for its clients. A child of each process does the work: when another
process is lost, jax's coordination service aborts the process that it runs in, and the
parent remains to report it in one line.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import jax
import numpy as np

from fcljax.errors import InputError, one_line
from fcljax.options import check_ranges
from fcljax.settings import HostOptions

Value = TypeVar("Value")

# exit code when another process has ended: the run can be resumed (EX_TEMPFAIL)
LOST = 75
# words in the errors of jax's collectives and of its coordination service when a
# process is lost
_SIGNS = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination", "Connection")
# beginnings of lines in the child's log
_JOINED = "fcljax-joined"
_OUT = "fcljax-out "
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def check_hosts(hosts: HostOptions) -> None:
    """Check that the options name this process and the others.

    Raises:
      InputError: naming the first option that is wrong or missing.
    """
    check_ranges(hosts)
    # options of several processes are refused without a coordinator, not ignored
    named = [name for name in ("processes", "process") if getattr(hosts, name) is not None]
    if hosts.coordinator is None:
        if named or hosts.host_timeout is not None:
            name = (named or ["host_timeout"])[0]
            raise InputError(f"{name}: it needs a coordinator; give --coordinator HOST:PORT, or leave it out")
        return
    if hosts.coordinator == "auto":
        # a launcher such as Slurm knows the number of processes
        if named:
            raise InputError(f"{named[0]}: coordinator 'auto' finds it; leave out --{named[0]}")
        return
    host, _, port = hosts.coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise InputError(
            f"coordinator: {hosts.coordinator!r} is not HOST:PORT; nearest: '{host or port}:12345', or auto"
        )
    for name in ("processes", "process"):
        if getattr(hosts, name) is None:
            raise InputError(f"{name}: none given; a coordinator needs --processes N and --process I")
    assert hosts.processes is not None and hosts.process is not None
    if hosts.process >= hosts.processes:
        raise InputError(
            f"process: {hosts.process}, but {hosts.processes} processes have the numbers 0 to "
            f"{hosts.processes - 1}; nearest valid value: {hosts.processes - 1}"
        )


# ---- in the run ------------------------------------------------------------------------


class Refused(InputError):
    """Bad input that is known to all processes, so that none waits for another."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes that share this run.

    All processes must call a method that communicates together. With one process, each
    method returns at once.
    """

    index: int = 0
    """Number of this process."""
    count: int = 1
    """Number of processes."""

    @classmethod
    def connected(cls) -> "Hosts":
        """Return the processes that jax has connected."""
        return cls(jax.process_index(), jax.process_count())

    @property
    def first(self) -> bool:
        """Return whether this is the process that writes and prints."""
        return self.index == 0

    def gather(self, text: str) -> list[str]:
        """Return the texts of all processes, in the order of their numbers."""
        if self.count == 1:
            return [text]
        # a run of one process need not load it
        from jax.experimental import multihost_utils

        # collectives need equal shapes: first the sizes, then all texts padded to the
        # longest
        encoded = np.frombuffer(text.encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(encoded)))).reshape(-1)
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: len(encoded)] = encoded
        texts = np.asarray(multihost_utils.process_allgather(padded))
        return [row[:size].tobytes().decode() for row, size in zip(texts, sizes, strict=True)]

    def agree(self, function: Callable[[], Value]) -> Value:
        """Return this process's result of `function` once it has succeeded in all processes.

        Raises:
          Refused: in every process, with the line of the first one where it raised an InputError.
        """
        if self.count == 1:
            return function()
        result = None
        error = ""
        try:
            result = function()
        # the others wait in `gather`: an exception here would leave them there
        except InputError as raised:
            error = str(raised)
        for process, line in enumerate(self.gather(error)):
            if line:
                # every process prints this line, and says whose it is if not its own
                if process > 0 and error != line:
                    line = f"{line} (in process {process})"
                raise Refused(line)
        return result  # pyrefly: ignore[bad-return]  # it raised where there is nothing

    def from_first(self, function: Callable[[], Value]) -> Value:
        """Return the JSON value of `function`, which the first process alone calls.

        Raises:
          Refused: in every process, if it raised an InputError.
        """
        if self.count == 1:
            return function()
        result = self.agree(lambda: json.dumps(function()) if self.first else "")
        # only the first process has a text; the others take it from the gathered list
        return json.loads(self.gather(result)[0])

    def broadcast(self, tree: Any) -> Any:
        """Return the first process's arrays in every process; the tree gives the shapes."""
        if self.count == 1:
            return tree
        from jax.experimental import multihost_utils

        def broadcast_leaf(x: Any) -> jax.Array:
            array = np.asarray(x)
            # as bytes: collectives would change the type of int64 and of keys
            gathered = multihost_utils.broadcast_one_to_all(np.frombuffer(array.tobytes(), np.uint8))
            received = np.frombuffer(np.asarray(gathered).tobytes(), array.dtype)
            return jax.numpy.asarray(received.reshape(array.shape))

        return jax.tree.map(broadcast_leaf, tree)

    def check_same(self, facts: dict[str, Any]) -> None:
        """Check that all processes have the same settings and read the same files.

        Args:
          facts: group -> name -> JSON value.

        Raises:
          Refused: naming the first fact in which a process differs from process 0.
        """
        # compared as JSON, which all processes write alike
        reference, *other_processes = map(json.loads, self.gather(json.dumps(facts)))
        names = [(group, name) for group, values in reference.items() for name in values]
        for process, facts_of_process in enumerate(other_processes, start=1):
            for group, name in names:
                expected = repr(reference[group].get(name))[:60]
                value = repr(facts_of_process[group].get(name))[:60]
                if value != expected:
                    raise Refused(
                        f"{name}: process {process} has {value}, process 0 has {expected}; they must be the "
                        f"same"
                    )

    def devices(self, requested: int | None) -> int:
        """Return the number of devices of all processes together.

        Raises:
          InputError: if another number was asked for, or the processes do not have equally many.
        """
        # devices get equal parts of the clients, and processes equal parts of the devices
        counts = np.bincount([device.process_index for device in jax.devices()], minlength=self.count)
        if len(set(counts.tolist())) > 1:
            raise InputError(
                f"processes: all must have the same number of devices, but they have {counts.tolist()}"
            )
        total = jax.device_count()
        if requested is not None and requested != total:
            raise InputError(
                f"devices: {requested} requested, but the {self.count} processes have {total} together; "
                f"nearest valid value: {total}"
            )
        return total

    def share(self, folder: Path) -> bool:
        """Return whether several processes see the first one's folder and can write there."""
        if self.count == 1:
            return False

        # only a file tells: the same path may be another disk on another machine
        def create_marker() -> str:
            number, path = tempfile.mkstemp(prefix=".seen-", dir=folder)
            os.close(number)
            return os.path.basename(path)

        path = folder / self.from_first(create_marker)
        seen = self.gather(str(path.exists() and os.access(folder, os.W_OK)))
        # the marker must not stay in a run's folder
        if self.first:
            path.unlink()
        return set(seen) == {"True"}

    def leave(self) -> None:
        """Disconnect, so that no process waits for another any more."""
        if self.count > 1:
            jax.distributed.shutdown()


ALONE = Hosts()


@contextlib.contextmanager
def joined(hosts: HostOptions, log: TextIO) -> Iterator[None]:
    """Connect this process with the others inside the block.

    It waits for them when the block ends or all refuse; `run_child` handles every other
    end.

    Raises:
      InputError: if `auto` finds nothing.
    """
    # None lets jax look for a launcher
    where = hosts.coordinator
    if hosts.coordinator == "auto":
        where = None
    try:
        jax.distributed.initialize(
            where,
            hosts.processes,
            hosts.process,
            initialization_timeout=hosts.seconds,
            heartbeat_timeout_seconds=hosts.seconds,
            shutdown_timeout_seconds=hosts.seconds,
        )
    except (ValueError, RuntimeError) as error:
        if where is not None:
            raise
        raise InputError(
            f"coordinator: 'auto' finds no Slurm, Open MPI, Kubernetes or TPU here ({error}); give HOST:PORT"
        ) from None
    # the parent reads this line: without it the processes have not met
    print(_JOINED, file=log, flush=True)
    try:
        yield
    # a refusal is known to all processes, so none waits
    except Refused:
        jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


# ---- the child that works, and its parent ----------------------------------------------


def report_folder(out: str, log: TextIO) -> None:
    """Tell the parent where the run's files are, for its last line."""
    print(_OUT + json.dumps(out), file=log, flush=True)


def run_child(function: Callable[[TextIO], int], log_number: int) -> int:
    """Call `function(log)` in the child, and return its exit code, or `LOST`.

    The child ends when its parent does. Output of C++ libraries goes to the log, since
    only lines of this package are for the user.
    """
    log = os.fdopen(log_number, "w", buffering=1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    # C++ libraries write to the file descriptors themselves
    os.dup2(log_number, 1)
    os.dup2(log_number, 2)
    try:
        return function(log)
    except Exception as error:
        # jax has no exception for a lost process, only words in its errors
        if any(sign in str(error) for sign in _SIGNS):
            return LOST
        traceback.print_exc()
        return 1


def _end_with_parent() -> None:
    """End this process when its standard input closes."""
    # standard input is a pipe from the parent; it closes when the parent ends, however
    # it does
    while os.read(0, 1):
        pass
    os._exit(LOST)


def supervised(
    command: list[str],
    hosts: HostOptions,
    advice: Callable[[str | None], str],
) -> int:
    """Run a command as a child, and report in one line how it ended.

    Args:
      command: arguments of Python; "LOG" stands for the log number of `run_child`.
      hosts: where the other processes are.
      advice: returns what a user can do, given the run's folder, or None if it is unknown.

    Returns:
      The child's exit code; `LOST` if another process has ended.

    Raises:
      InputError: if the processes did not meet.
    """
    with tempfile.TemporaryFile() as log:
        number = str(log.fileno())
        child = subprocess.Popen(
            [sys.executable, *(number if part == "LOG" else part for part in command)],
            # its own session: Ctrl-C reaches the parent alone, which passes it on
            stdin=subprocess.PIPE,
            pass_fds=[log.fileno()],
            start_new_session=True,
        )
        with _forwarding(child):
            code = child.wait()
        log_text = _content(log)
    if code >= 0 and code != LOST:
        return code
    lines = log_text.splitlines()
    # a child that somebody has killed before it joined has not failed to meet the others
    if _JOINED not in lines and code != -signal.SIGKILL:
        where = "the others"
        if hosts.process != 0:
            where = repr(hosts.coordinator)
        raise InputError(
            f"coordinator: process {hosts.process} has not met {where} in {hosts.seconds} s; have all "
            f"{hosts.processes} processes started, and is {hosts.coordinator!r} the address of process 0?"
        )
    out = next((json.loads(line[len(_OUT) :]) for line in lines if line.startswith(_OUT)), None)
    if code == LOST or any(sign in log_text for sign in _SIGNS[2:]):
        cause = "another process of the run has ended"
        code = LOST
    else:
        cause = f"stopped by {signal.Signals(-code).name}"
        code = 128 - code
    print(f"fcljax: {one_line(f'{cause}; {advice(out)}')}", file=sys.stderr)
    return code


def _content(log: BinaryIO) -> str:
    """Return the text of a log."""
    log.seek(0)
    return log.read().decode(errors="replace")


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen) -> Iterator[None]:
    """Pass signals of this process on to the child.

    The child has its own session, so the terminal sends it none and it gets none twice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: signal.signal(n, lambda number, frame: child.send_signal(number)) for n in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
