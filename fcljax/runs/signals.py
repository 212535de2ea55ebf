"""Signals that end a run: SIGINT and SIGTERM at once, and a signal that the user names after the current
round."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.05  # seconds until a signal that was lost is sent again


class Stopped(KeyboardInterrupt):
    """A signal has stopped the program."""

    def __init__(self, number: int, advice: str = ""):
        super().__init__(number)
        self.number, self.advice = number, advice


def number_of(stop: KeyboardInterrupt) -> int:
    """The signal that stopped the program."""
    return stop.number if isinstance(stop, Stopped) else int(signal.SIGINT)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGINT and SIGTERM inside the block raise Stopped. Further SIGTERMs are ignored, so that files can be
    finished. This works in the main thread only.

    A signal may come while an extension module is loaded, which turns the exception into an error of its own:
    any error that leaves the block after a signal becomes Stopped.
    """
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        came.append(number)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    with contextlib.ExitStack() as stack:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT is for what a shell starts with &
                stack.enter_context(_handled(number, stop))
        stack.enter_context(_sent_again(stop))
        try:
            yield
        except Exception as error:
            if came:
                raise Stopped(came[0]) from error
            raise


@contextlib.contextmanager
def _sent_again(stop: Callable[[int, object], None]) -> Iterator[None]:
    """Send lost signals again. A signal may come while a destructor or a callback of the garbage collector
    runs; Python prints the exception and continues. Inside the block such a signal is sent again a moment
    later."""
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
    """Inside the block a signal, such as USR1, is only noted: the function returns its number once it has
    come, and None before."""
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
