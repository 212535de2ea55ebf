"""Signals that end a run: SIGINT and SIGTERM at once, and one that the user names after the round in hand."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.05  # seconds until a signal that was lost is sent again


class Stopped(KeyboardInterrupt):
    """The program was told to stop by a signal."""

    def __init__(self, number: int, advice: str = ""):
        super().__init__(number)
        self.number, self.advice = number, advice


def number_of(stop: KeyboardInterrupt) -> int:
    """The signal that stopped the program."""
    return stop.number if isinstance(stop, Stopped) else int(signal.SIGINT)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM inside the block raises Stopped, as SIGINT raises KeyboardInterrupt; further ones are ignored,
    so that what is being written can be finished. Only in the main thread, which alone may do so."""

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    with _handled(signal.SIGTERM, stop), _sent_again(stop):
        yield


@contextlib.contextmanager
def _sent_again(stop: Callable[[int, object], None]) -> Iterator[None]:
    """A signal may come while a destructor or a callback of the garbage collector runs, which no exception
    leaves: Python prints it and goes on. Inside the block such a signal is sent again a moment later."""
    hook = sys.unraisablehook

    def lost(error: "sys.UnraisableHookArgs") -> None:
        if not isinstance(error.exc_value, KeyboardInterrupt):
            return hook(error)
        number = number_of(error.exc_value)
        if number == signal.SIGTERM:
            signal.signal(number, stop)  # it is ignored since it came
        threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = lost
    try:
        yield
    finally:
        sys.unraisablehook = hook


@contextlib.contextmanager
def warned_by(name: str | None) -> Iterator[Callable[[], int | None]]:
    """Inside the block a signal, such as USR1, only leaves a note: the function gives its number once it has
    come, else None."""
    came: list[int] = []
    if name is None:
        yield lambda: None
        return
    with _handled(signal.Signals[f"SIG{name}"], lambda number, frame: came.append(number)):
        yield lambda: came[0] if came else None


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside the block take effect after it."""
    came: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in ENDING:
            stack.enter_context(_handled(number, lambda number, frame: came.append(number)))
        yield
    for number in came[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(number: int, handler: Callable[[int, object], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)
