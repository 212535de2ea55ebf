"""The program in processes that cost little, for experiments/torture.py: all are forked from one, which has
imported everything.

    python experiments/torture_programs.py

reads commands from stdin, one JSON object a line, and prints the id of the process that runs it, and then how
it ended. A forked process runs `fcljax.cli.main` in its main thread, and signals end it as they end others.
"""

import functools
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

IMPORTED = (
    "fcljax.cli",
    "fcljax.commands.running",
    "fcljax.results.page",
    "fcljax.runs.loop",
    "fcljax.studies.seeds",
    "matplotlib.pyplot",
    "orbax.checkpoint",
)


class Programs:
    """Makes processes, one after the other, until `close`. They have the environment of the first `start`."""

    @functools.cached_property
    def parent(self) -> subprocess.Popen:
        """The process that imports everything."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        return subprocess.Popen([sys.executable, __file__], **pipes)

    def start(self, *arguments: str, name: str = "") -> "Forked":
        """The program with these arguments; the one before must have ended. Runs of one name have the same
        method and settings."""
        return Forked(self, arguments, name)

    def close(self) -> None:
        """End the parent, if there is one."""
        if "parent" in self.__dict__:
            self.parent.communicate()

    def ask(self, request: dict[str, Any]) -> int:
        """What the parent answers."""
        assert self.parent.stdin is not None
        self.parent.stdin.write(json.dumps(request).encode() + b"\n")
        return self.answer()

    def answer(self) -> int:
        """The parent's next line."""
        assert self.parent.stdout is not None
        return int(self.parent.stdout.readline())


class Forked:
    """A process of `Programs`, with what is needed here of `subprocess.Popen`."""

    def __init__(self, programs: Programs, arguments: tuple[str, ...], run_name: str):
        self.programs = programs
        self.returncode = None
        number, name = tempfile.mkstemp(prefix="torture-", suffix=".err")
        os.close(number)
        self.errors = Path(name)
        self.pid = programs.ask({"arguments": arguments, "errors": name, "name": run_name})

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code, or minus the signal, as soon as it has ended; None: not within so many seconds."""
        output: Any = self.programs.parent.stdout  # a pipe
        if self.returncode is None and select.select([output], [], [], seconds)[0]:
            self.returncode = self.programs.answer()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def ended(self, seconds: float) -> tuple[int, str]:
        """Exit code and stderr of a process that ends by itself; it is killed if it does not in time."""
        late = self.poll(seconds) is None
        if late:
            self.send_signal(signal.SIGKILL)
            self.poll(60.0)
        err = self.errors.read_text(errors="replace")
        self.errors.unlink()
        return (-1, f"no end: {err}") if late else (int(self.returncode or 0), err)


def main() -> int:
    """Fork for every line of stdin."""
    for name in IMPORTED:
        importlib.import_module(name)
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            return _run(request, folder)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    shutil.rmtree(folder)
    return 0


def _run(request: dict[str, Any], folder: Path) -> int:
    """The command itself, in the forked process."""
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, os.devnull, os.O_WRONLY)):
        os.dup2(os.open(path, mode), number)
    os.dup2(os.open(request["errors"], os.O_WRONLY | os.O_TRUNC), 2)
    sys.argv = ["fcljax", *request["arguments"]]
    # what a shell starts with & ignores it, and so would this program
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from fcljax import cli
    from fcljax.runs import build

    build.check_method = _once(folder / (request["name"] or "other"), build.check_method)
    if request["arguments"][0] == "python":
        return _from_python(*request["arguments"][1:])
    return cli.main()


def _from_python(method: str, *options: str) -> int:
    """The run by `fcljax.run`, with images in memory and an owner of each."""
    import fcljax

    values = {
        name[2:].replace("-", "_"): value for name, value in zip(options[::2], options[1::2], strict=True)
    }
    with np.load(values.pop("dataset").removeprefix("npz:")) as file:
        arrays = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    owners = np.arange(len(arrays[1])) // 4 % int(values.pop("clients"))
    resume = "resume" in values
    out = values.pop("resume" if resume else "out")
    numbers = {name: yaml.safe_load(value) for name, value in values.items()}
    try:
        fcljax.run(method, tuple(arrays), partition=owners, out=out, resume=resume, progress=False, **numbers)
    except KeyboardInterrupt:
        return 130
    return 0


def _once(file: Path, work: Callable[..., Any]) -> Callable[..., Any]:
    """What a function returns, made once for all processes. All functions of a method are traced to learn the
    shapes that they make: more than half of what it costs to resume a run that is nearly done."""

    def known(*arguments: Any) -> Any:
        if not file.exists():
            part = file.with_suffix(".part")
            part.write_bytes(pickle.dumps(work(*arguments)))
            part.replace(file)
        return pickle.loads(file.read_bytes())

    return known


if __name__ == "__main__":
    sys.exit(main())
