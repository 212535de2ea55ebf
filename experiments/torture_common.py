"""What the parts of experiments/torture.py share: outcomes, and the program in this process."""

import contextlib
import io
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
