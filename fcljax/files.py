"""Atomic writes: readers see the old content of a file or the new one, never a part of it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it takes the place of `path` if the block ends without an
    error, else it is removed."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:  # a failed write does not say to which file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
