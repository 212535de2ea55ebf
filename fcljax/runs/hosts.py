"""Processes, on one host or on several, that play one run together: how they find each other, say the same,
and end together.

Each is started by the same command with its own number. All compute the same values; process 0 alone writes
files and prints. The work is done in a child of each process: where another one is lost, jax's coordination
service aborts the process that it runs in, and the parent is left to say so in one line.
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
from typing import Any, BinaryIO, TextIO, TypeVar

import jax
import numpy as np

from fcljax.errors import InputError, one_line
from fcljax.options import check_ranges, option

Value = TypeVar("Value")

LOST = 75  # exit code where another process has ended: the run can be gone on with (EX_TEMPFAIL)
# what the errors of jax's collectives and of its coordination service have in them where a process is lost
_SIGNS = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination", "Connection")
_JOINED, _OUT = "fcljax-joined", "fcljax-out "  # lines of the child's log
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Processes that share a run, on one host or several; each gets the same options and its own number."""

    # HOST:PORT of process 0; the run uses the devices of all processes; auto: as Slurm, Open MPI, Kubernetes
    # or a TPU's runtime says
    coordinator: str | None = None
    processes: int | None = None  # how many there are
    process: int | None = option(None, least=0)  # this one's number, from 0
    # seconds to wait for the others: to come, and for a sign of life; default: 100
    host_timeout: int | None = option(None, least=5, most=3600)

    @property
    def seconds(self) -> int:
        """Of `host_timeout`."""
        return 100 if self.host_timeout is None else self.host_timeout


def check(hosts: HostOptions) -> None:
    """Check that the options say who plays.

    Raises:
      InputError: naming the first that does not.
    """
    check_ranges(hosts)
    given = [name for name in ("processes", "process") if getattr(hosts, name) is not None]
    if hosts.coordinator is None:
        if given or hosts.host_timeout is not None:
            name = (given or ["host_timeout"])[0]
            raise InputError(f"{name}: it needs a coordinator; give --coordinator HOST:PORT, or leave it out")
        return
    if hosts.coordinator == "auto":
        if given:
            raise InputError(f"{given[0]}: with coordinator 'auto' it is found out; leave out --{given[0]}")
        return
    host, _, port = hosts.coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise InputError(
            f"coordinator: {hosts.coordinator!r} is no HOST:PORT; nearest: '{host or port}:12345', or auto"
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


# ---- in the run --------------------------------------------------------------------------------------------


def leads() -> bool:
    """Is this the process that writes and prints?"""
    return jax.process_index() == 0


def gathered(text: str) -> list[str]:
    """What each process says, in the order of their numbers; all must call it together."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils  # a run of one process need not load it

    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(mine)))).reshape(-1)
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: len(mine)] = mine
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


class Refused(InputError):
    """Bad input that all processes know of: none of them waits for another."""


def agreed(function: Callable[[], Value]) -> Value:
    """What `function` gives here, once it has ended everywhere.

    Raises:
      Refused: with the line of the first process where it raised an InputError, everywhere.
    """
    if jax.process_count() == 1:
        return function()
    found, error = None, ""
    try:
        found = function()
    except InputError as raised:
        error = str(raised)
    for process, line in enumerate(gathered(error)):
        if line:
            raise Refused(line if process == 0 or error == line else f"{line} (in process {process})")
    return found  # pyrefly: ignore[bad-return]  # it raised where there is nothing


def told(function: Callable[[], Value]) -> Value:
    """What `function` gives in process 0, a JSON value, in every process.

    Raises:
      Refused: what it raises there, everywhere.
    """
    if jax.process_count() == 1:
        return function()
    return json.loads(gathered(agreed(lambda: json.dumps(function()) if leads() else ""))[0])


def spread(tree: Any) -> Any:
    """Arrays of process 0 in every process, bit for bit; those of the others give the shapes."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    def one(x: Any) -> jax.Array:
        host = np.asarray(x)
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(host.tobytes(), np.uint8))
        return jax.numpy.asarray(np.frombuffer(np.asarray(sent).tobytes(), host.dtype).reshape(host.shape))

    return jax.tree.map(one, tree)


def check_same(facts: dict[str, Any]) -> None:
    """Check that all processes have the same settings and read the same files.

    Args:
      facts: JSON values by name, in named groups: what must be the same.

    Raises:
      Refused: naming the first fact that a process has otherwise than process 0.
    """
    first, *others = map(json.loads, gathered(json.dumps(facts)))
    for process, found in enumerate(others, start=1):
        for kind, name in [(kind, name) for kind, own in first.items() for name in own]:
            ours, theirs = (repr(each[kind].get(name))[:60] for each in (first, found))
            if ours != theirs:
                raise Refused(
                    f"{name}: process {process} has {theirs}, process 0 {ours}; they must be the same"
                )


def devices_of(asked: int | None) -> int:
    """The devices of all processes.

    Raises:
      InputError: if other ones are asked for, or the processes have not equally many.
    """
    counts = np.bincount([device.process_index for device in jax.devices()], minlength=jax.process_count())
    if len(set(counts.tolist())) > 1:
        raise InputError(f"processes: they must have equally many devices, and have {counts.tolist()}")
    if asked is not None and asked != jax.device_count():
        raise InputError(
            f"devices: {asked} asked for, and the {jax.process_count()} processes have {jax.device_count()} "
            f"together; nearest valid value: {jax.device_count()}"
        )
    return jax.device_count()


def leave() -> None:
    """No process waits for another from here on; all must call it together."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()


@contextlib.contextmanager
def joined(hosts: HostOptions, log: TextIO) -> Iterator[None]:
    """Inside the block this process is one of those that play the run. At its end, or if all refuse, it waits
    for the others; whatever else ends it is left to `work`.

    Raises:
      InputError: where `auto` finds nothing.
    """
    where = None if hosts.coordinator == "auto" else hosts.coordinator
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
    print(_JOINED, file=log, flush=True)
    try:
        yield
    except Refused:
        jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


# ---- the child that works, and its parent ------------------------------------------------------------------


def tell_folder(out: str, log: TextIO) -> None:
    """Let the parent know where the run's files are, for its last line."""
    print(_OUT + json.dumps(out), file=log, flush=True)


def work(function: Callable[[TextIO], int], log_number: int) -> int:
    """`function(log)` in the child: its exit code, or `LOST`. The child ends when its parent does, and what
    libraries in C++ print goes to the log, since only our own lines are for the user."""
    log = os.fdopen(log_number, "w", buffering=1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.flush(), sys.stderr.flush()
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.dup2(log_number, 1), os.dup2(log_number, 2)
    try:
        return function(log)
    except Exception as error:
        if any(sign in str(error) for sign in _SIGNS):
            return LOST
        traceback.print_exc()
        return 1


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(LOST)


def supervised(command: list[str], hosts: HostOptions, go_on: Callable[[str | None], str]) -> int:
    """Run a command, which calls `work` with the number that stands in place of "LOG", as a child, and say in
    one line what ended it if it cannot say so itself.

    Args:
      command: of Python.
      hosts: where the others are.
      go_on: what a user can do then, from the run's folder, if that was known.

    Returns:
      Its exit code; `LOST` where another process has ended.

    Raises:
      InputError: if the processes did not come together.
    """
    with tempfile.TemporaryFile() as log:
        number = str(log.fileno())
        child = subprocess.Popen(
            [sys.executable, *(number if part == "LOG" else part for part in command)],
            stdin=subprocess.PIPE,
            pass_fds=[log.fileno()],
            start_new_session=True,
        )
        with _forwarding(child):
            code = child.wait()
        said = _said(log)
    if code >= 0 and code != LOST:
        return code
    lines = said.splitlines()
    if _JOINED not in lines and code != -signal.SIGKILL:
        where = "the others" if hosts.process == 0 else repr(hosts.coordinator)
        raise InputError(
            f"coordinator: process {hosts.process} has not met {where} in {hosts.seconds} s; are all "
            f"{hosts.processes} processes there, and is {hosts.coordinator!r} the address of process 0?"
        )
    out = next((json.loads(line[len(_OUT) :]) for line in lines if line.startswith(_OUT)), None)
    if code == LOST or any(sign in said for sign in _SIGNS[2:]):
        what, code = "another process of the run has ended", LOST
    else:
        what, code = f"stopped by {signal.Signals(-code).name}", 128 - code
    print(f"fcljax: {one_line(f'{what}; {go_on(out)}')}", file=sys.stderr)
    return code


def _said(log: BinaryIO) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen) -> Iterator[None]:
    """Signals that come to this process go to the child, which knows what to do. (In a session of its own it
    gets none from the terminal, and none twice.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda number, frame: child.send_signal(number)) for n in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
