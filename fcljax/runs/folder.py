"""Run directories: making a new one, and keeping it to one process at a time.

A run directory holds config.yaml, metrics.jsonl (a line per round), summary.json,
checkpoints/, figures/ and report.html, and kept/ for methods whose server keeps
examples of finished tasks.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fcljax import config
from fcljax.config import RunConfig
from fcljax.errors import InputError
from fcljax.files import check_folder, owned, write_text

LOCK = ".lock"  # file that the process that works in a run directory owns


def check_new(out: Path) -> None:
    """Check that a new run directory can be made at `out`.

    Raises:
      InputError: if something other than an empty folder is there, nothing can be
        written, or its name is not UTF-8, which the library that writes checkpoints
        needs.
    """
    try:
        os.fsencode(out.absolute()).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"out: {str(out)!r} is not UTF-8, so no checkpoint can be written there") from None
    _check_empty(out)
    check_folder(out)


def _check_empty(out: Path) -> None:
    # a lock alone is what a process leaves that was killed before it wrote anything
    if out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
        raise InputError(f"out: {str(out)!r} exists already; give a new folder, or resume it: --resume {out}")


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from working in the run directory inside the block.

    Raises:
      InputError: if another process does, or the directory cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(owned(out / LOCK))
        except BlockingIOError:
            raise InputError(
                f"out: another process works in {str(out)!r}; wait until it ends, or give another folder"
            ) from None
        except OSError as error:
            raise _unwritable(out, error) from None
        yield


@contextlib.contextmanager
def created(out: Path, settings: RunConfig) -> Iterator[None]:
    """Make the run directory, with config.yaml, and lock it for the block. If that
    fails, no part of it stays.

    Raises:
      InputError: if it cannot be written, or another process has made it in the meantime.
    """
    new = not out.exists()
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            # checked again under the lock: between `check_new` and here, data were
            # loaded, and another process may have begun a run in this folder
            stack.enter_context(locked(out))
            _check_empty(out)
        except OSError as error:
            raise _unwritable(out, error) from None
        subfolders = [out / "checkpoints", out / "figures"]
        try:
            for folder in subfolders:
                folder.mkdir()
            write_text(out / "config.yaml", config.to_yaml(settings))
        except OSError as error:
            # rmdir removes empty folders only, so nothing of the user's can be lost
            with contextlib.suppress(OSError):
                (out / LOCK).unlink()
                for folder in [*subfolders, *([out] if new else [])]:
                    folder.rmdir()
            raise _unwritable(out, error) from None
        yield


def _unwritable(out: Path, error: OSError) -> InputError:
    return InputError(f"out: cannot write to {str(out)!r}: {error.strerror or error}")
