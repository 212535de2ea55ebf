"""Signals that end a program: SIGINT and SIGTERM set a flag, which its loops read.

A loop that reads the flag stops in order. If none does within `GRACE` seconds (a round
may take hours), or if a second signal arrives, a thread ends the process. That is safe at
any time: files are written whole or not at all.
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
    """Return the number of the signal that stopped the program."""
    if isinstance(stop, Stopped):
        return stop.number
    return int(signal.SIGINT)


def last_line(number: int, advice: str) -> str:
    """Return the last line that a program prints after a signal."""
    name = signal.Signals(number).name
    return f"fcljax: {one_line(f'stopped by {name}; {advice or NOTHING_LEFT}')}"


class _Flag:
    """The handler of SIGINT and SIGTERM, and at the same time the flag.

    Readers get it by asking for the signals' handler, so that no global variable is needed.
    """

    def __init__(self):
        self.number: int | None = None  # the first signal
        self.is_set = threading.Event()
        # what the user can do; the last is printed
        self.advice: list[Callable[[], str]] = []
        self.unbroken = 0  # number of open `unbroken` blocks

    def __call__(self, number: int, frame: object) -> None:
        # A handler runs between any two steps of the main thread. `is_set.set()` here
        # could wait for ever for a lock that the interrupted line holds, so `watch`
        # calls it.
        self.number = self.number or number

    def watch(self, pipe: int) -> None:
        """Read the signals from a pipe, in a thread: the main one may be in compiled code."""
        is_first = True
        deadline = float("inf")
        while True:
            # before the first signal there is no deadline, and `select` takes no infinity
            timeout = None
            if not is_first:
                timeout = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], timeout)[0]:
                if not self.unbroken:
                    return self.end(self.number)
                # a checkpoint is being written, which gets another grace period
                deadline = time.monotonic() + GRACE
                continue
            numbers = os.read(pipe, 64)
            # end of file: `terminable` has closed the other end
            if not numbers:
                return os.close(pipe)
            for number in numbers:
                # the pipe gets every signal, also those that have another handler:
                # USR1, say
                if signal.getsignal(number) is not self:
                    continue
                if not is_first:
                    return self.end(number)
                self.number = self.number or number
                self.is_set.set()
                is_first = False
                deadline = time.monotonic() + GRACE

    def end(self, number: int | None) -> None:
        """End the process, whatever it does."""
        number = number or int(signal.SIGTERM)
        # with os.write and os._exit: other threads, or the interrupted one, may hold
        # the locks of sys.stderr and of an ordinary exit
        try:
            advice = ""
            if self.advice:
                advice = self.advice[-1]()
            line = last_line(number, advice)
            if sys.stderr.isatty():
                # shows the cursor, which a progress bar hides
                line = f"\x1b[?25h{line}"
            os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="replace"))
        finally:
            os._exit(128 + number)


def _flag() -> _Flag | None:
    # either handler: a background job of a shell ignores SIGINT and has the flag at
    # SIGTERM
    return next((h for h in map(signal.getsignal, ENDING) if isinstance(h, _Flag)), None)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGINT and SIGTERM set the flag inside the block; see `check`, `pause`, `asked`.

    Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    flag = _Flag()
    # Python's C handler writes each signal's number into this pipe at once, also while
    # the main thread is in compiled code, where no Python handler runs. It must not
    # block there.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=flag.watch, args=(reading,), daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with contextlib.ExitStack() as stack:
            for number in ENDING:
                # an ignored signal stays ignored, as SIGINT is for background jobs of a
                # shell
                if signal.getsignal(number) is not signal.SIG_IGN:
                    stack.enter_context(_handled(number, flag))
            yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        os.close(writing)
        thread.join()


def asked() -> int | None:
    """Return the number of the signal that asked the program to end; None: there was none."""
    flag = _flag()
    if not flag:
        return None
    return flag.number


def check() -> None:
    """Stop the program if a signal has asked for it.

    Raises:
      Stopped: if so.
    """
    pause(0)


def pause(seconds: float | int) -> None:
    """Wait until the time is over or a signal arrives.

    Raises:
      Stopped: as `check`.
    """
    flag = _flag()
    if flag is None:
        time.sleep(seconds)
    # a signal does not end `time.sleep`, but the event's wait
    elif flag.number or flag.is_set.wait(seconds):
        raise Stopped(flag.number or signal.SIGTERM)


@contextlib.contextmanager
def advised(advice: Callable[[], str]) -> Iterator[None]:
    """Print this advice in the last line if a signal ends the program inside the block."""
    flag = _flag()
    if flag:
        flag.advice.append(advice)
    try:
        yield
    except KeyboardInterrupt as stop:
        # the advice of an inner block is more specific
        raise Stopped(number_of(stop), getattr(stop, "advice", "") or advice()) from None
    finally:
        if flag:
            flag.advice.remove(advice)


@contextlib.contextmanager
def warned_by(name: str | None) -> Iterator[Callable[[], int | None]]:
    """Note a signal, such as USR1, inside the block.

    Args:
      name: of the signal, without SIG; None: none is noted.

    Yields:
      A function that returns the signal's number once it has arrived, and None before.
    """
    if name is None:
        yield lambda: None
        return
    numbers: list[int] = []
    with _handled(signal.Signals[f"SIG{name}"], lambda number, frame: numbers.append(number)):
        yield lambda: next(iter(numbers), None)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Let the block end after a first signal, however long it takes (writing a checkpoint)."""
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
    # Python lets only the main thread set handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        # None: the handler was not set from Python, which cannot set it again
        if previous is None:
            previous = signal.SIG_DFL
        signal.signal(number, previous)
