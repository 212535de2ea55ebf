"""Signals that end a program: SIGINT and SIGTERM set a flag that its loops read, and
nothing is raised inside a handler.

A loop that reads the flag ends in good order. If none does within `GRACE` seconds (a
round may take hours), or if a second signal comes, a thread ends the process. That is
safe at any moment: files are written whole or not at all.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fcljax.errors import one_line

ENDING = (signal.SIGINT, signal.SIGTERM)
GRACE = 5.0  # seconds in which a loop must have read the flag
NOTHING_LEFT = "unfinished files were removed"


class Stopped(KeyboardInterrupt):
    """A signal has stopped the program."""

    def __init__(self, number: int, advice: str = ""):
        super().__init__(number)
        self.number = number
        self.advice = advice


def number_of(stop: KeyboardInterrupt) -> int:
    """The signal that stopped the program."""
    if isinstance(stop, Stopped):
        return stop.number
    return int(signal.SIGINT)


def last_line(number: int, advice: str) -> str:
    """What a program says that a signal has ended."""
    name = signal.Signals(number).name
    return f"fcljax: {one_line(f'stopped by {name}; {advice or NOTHING_LEFT}')}"


class _Flag:
    """The handler of SIGINT and SIGTERM, which is itself the flag: who reads it asks
    the operating system for the handler, so that there is no second place that
    knows."""

    def __init__(self):
        self.number: int | None = None  # the first signal that came
        self.came = threading.Event()
        self.advice: list[Callable[[], str]] = []  # what a user can do then; the last counts
        self.unbroken = 0  # blocks whose end is waited for

    def __call__(
        self,
        number: int,
        frame: object,
    ) -> None:
        # `came.set()` would wait for ever for a lock that the interrupted line has:
        # that is left to `watch`
        # the first signal says how the program ends; a second one ends it at once
        self.number = self.number or number

    def watch(self, pipe: int) -> None:
        """Read the signals from a pipe, in a thread: the main one may be inside of
        compiled code for long."""
        is_first = True
        deadline = float("inf")
        while True:
            left = None
            # before the first signal there is no deadline
            if not is_first:
                left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                # a checkpoint is being written: it gets another grace period
                if not self.unbroken:
                    return self.end(self.number)
                deadline = time.monotonic() + GRACE
                continue
            numbers = os.read(pipe, 64)
            # the pipe is closed when the block ends
            if not numbers:
                return os.close(pipe)
            for number in numbers:
                # a handler of somebody else has taken the signal over
                if signal.getsignal(number) is not self:
                    continue  # another one's
                if not is_first:
                    return self.end(number)
                self.number = self.number or number
                self.came.set()
                is_first = False
                deadline = time.monotonic() + GRACE

    def end(self, number: int | None) -> None:
        """End the process, whatever it does."""
        number = number or int(signal.SIGTERM)
        # `_exit`: other threads may hold locks that an ordinary exit would wait for
        try:
            advice = ""
            if self.advice:
                advice = self.advice[-1]()
            line = last_line(number, advice)
            shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
            os.write(sys.stderr.fileno(), f"{shown}{line}\n".encode(errors="replace"))
        finally:
            os._exit(128 + number)


def _flag() -> _Flag | None:
    return next((h for h in map(signal.getsignal, ENDING) if isinstance(h, _Flag)), None)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM ask the program to end: see `check`, `pause`
    and `asked`. This works in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    flag = _Flag()
    reading, writing = os.pipe()
    # the handler's write must never block the main thread
    os.set_blocking(writing, False)
    thread = threading.Thread(target=flag.watch, args=(reading,), daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with contextlib.ExitStack() as stack:
            for number in ENDING:
                # such a process is not meant to be interrupted
                # ignored, as SIGINT is for what a shell starts with &
                if signal.getsignal(number) is not signal.SIG_IGN:
                    stack.enter_context(_handled(number, flag))
            yield
    finally:
        # whoever had the signals before gets them back
        signal.set_wakeup_fd(previous_fd)
        os.close(writing)
        thread.join()


def asked() -> int | None:
    """The signal that has asked the program to end; None: none has."""
    flag = _flag()
    if not flag:
        return None
    return flag.number


def check() -> None:
    """Called where a program can end in good order.

    Raises:
      Stopped: if a signal has asked for it.
    """
    pause(0)


def pause(seconds: float | int) -> None:
    """Wait. A signal ends it.

    Raises:
      Stopped: as `check`.
    """
    flag = _flag()
    if flag is None:
        time.sleep(seconds)
    # `came` wakes the wait at once, where `sleep` would go on
    elif flag.number or flag.came.wait(seconds):
        raise Stopped(flag.number or signal.SIGTERM)


@contextlib.contextmanager
def advised(advice: Callable[[], str]) -> Iterator[None]:
    """What a user can do if a signal ends the program inside the block, for its last
    line."""
    flag = _flag()
    if flag:
        flag.advice.append(advice)
    try:
        yield
    except KeyboardInterrupt as stop:
        # the inner block's advice is nearer to what the user did
        raise Stopped(number_of(stop), getattr(stop, "advice", "") or advice()) from None
    finally:
        if flag:
            flag.advice.remove(advice)


@contextlib.contextmanager
def warned_by(name: str | None) -> Iterator[Callable[[], int | None]]:
    """Inside the block a signal, such as USR1, is only noted: the function returns its
    number once it has come, and None before."""
    came: list[int] = []
    if name is None:
        yield lambda: None
        return
    with _handled(signal.Signals[f"SIG{name}"], lambda number, frame: came.append(number)):
        yield lambda: came[0] if came else None


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """A block whose end is waited for after a first signal, however long it takes: a
    checkpoint, or processes that end."""
    flag = _flag()
    if flag:
        flag.unbroken += 1
    try:
        yield
    finally:
        if flag:
            flag.unbroken -= 1


@contextlib.contextmanager
def _handled(number: int, handler: Callable[[int, object], object]) -> Iterator[None]:
    # only the main thread may set handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        if previous is None:
            previous = signal.SIG_DFL
        signal.signal(number, previous)
