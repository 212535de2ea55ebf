"""What the parts of experiments/torture.py share: outcomes, and the program in this process."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PATIENCE = 1800  # seconds for one command, on a machine that may be busy
DECODER = Path(__file__).parent.parent / "fcljax" / "assets" / "vit_micro_decoder.safetensors"


class Outcome(NamedTuple):
    """What became of one trial: "survived", "different" or "other", what it was, and how many it counts."""

    result: str
    what: str
    times: int = 1


class Bad(NamedTuple):
    """A bad input: a command, and the files that it needs, by name."""

    kind: str
    arguments: list[str]
    files: dict[str, bytes] = {}
    may_pass: bool = False  # whether the program may also take it, and end well


class Call(NamedTuple):
    """A call of Python with one wrong thing, or with right ones."""

    kind: str
    """What is odd about it."""
    call: Callable[[], object]
    """Returns "" if what is right was read rightly, otherwise what is wrong."""
    right: bool = False
    """Whether it must be taken."""
    either: bool = False
    """Whether it may be refused, and may be taken if it is read rightly."""


def judged(made: Call) -> Outcome:
    """What became of a call."""
    from fcljax.errors import InputError

    try:
        found = made.call()
    except InputError as error:
        line = str(error)
        if made.right:
            return Outcome("other", f"{made.kind}: refused, and it is right: {line}")
        good = "\n" not in line and len(line) < 2000
        return Outcome("survived" if good else "other", f"{made.kind}: {line[:300]}")
    except Exception as error:
        return Outcome("other", f"{made.kind}: {type(error).__name__}: {str(error)[:300]}")
    if not (made.right or made.either):
        return Outcome("different", f"{made.kind}: was taken")
    return Outcome("different" if found else "survived", f"{made.kind}: {found or 'read'}")


def one_line(err: str) -> bool:
    """Does the program end with its one line, and with nothing that looks like a failure of Python?"""
    lines = [line for line in err.splitlines() if line.startswith("fcljax: ")]
    return len(lines) == 1 and "Traceback" not in err


def called(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process, which saves seconds of imports."""
    from fcljax import cli

    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            err.write(f"Traceback: {type(error).__name__}: {error}")
            code = 1
    return code, out.getvalue(), err.getvalue()
