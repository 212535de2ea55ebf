"""Files that are never half written, locks that one process owns, and checks of paths.

New files and folders get the permissions of the user's umask. Nothing is written
through a link that another user has put in its place.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from fcljax.errors import InputError


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file beside `path` to write to.

    It replaces `path` if the block ends without an error; otherwise it is removed.
    Readers see the old content or the new one, never a part of it. Folders of `path` that
    are missing are made, and stay only if the file does.
    """
    path = Path(path)
    # beside it, because a rename is atomic only within one file system; with its suffix,
    # because numpy and matplotlib choose the format by it, or append another
    temporary = beside(path, path.suffix)
    try:
        with folder_for(path.parent):
            try:
                # O_EXCL follows no link that another user has put there
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                yield temporary
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    # the error of a failed write names no file, and that of a rename the temporary one
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def hugging_face_home() -> Path:
    """Return the cache of Hugging Face's libraries."""
    return Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())


def hugging_face_hub() -> Path:
    """Return the cache of huggingface_hub, which timm and transformers use too."""
    return Path(os.environ.get("HF_HUB_CACHE") or hugging_face_home() / "hub")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Make the folder `path` and those above it; remove the new ones that are empty if
    the block ends with an error."""
    # innermost first, the order in which they can be removed
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    # BaseException: Ctrl-C leaves no empty folders either
    except BaseException:
        for folder in missing:
            # rmdir refuses folders with files, which are worth keeping
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` to write to, which is removed at the end unless it
    has been moved. Folders of `target` that are missing are made, and stay unless the
    block ends with an error."""
    folder = beside(target)
    with folder_for(target.parent):
        try:
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def beside(path: Path, suffix: str = "") -> Path:
    """Return a new hidden name beside `path`."""
    return path.with_name(f"{_hidden(path)}{secrets.token_hex(8)}{suffix}")


def leftovers(target: Path) -> list[Path]:
    """Return the temporary folders beside `target` that killed processes have left."""
    return [path for path in target.parent.iterdir() if path.name.startswith(_hidden(target))]


def _hidden(path: Path) -> str:
    # file systems allow 255 bytes for a name, of up to 4 bytes a character
    return f".{path.name[:80]}.tmp-"


@contextlib.contextmanager
def owned(
    path: Path, wait: Callable[[], None] | None = None, remove_on_error: bool = False
) -> Iterator[bool]:
    """Lock the file `path`, which is created and stays, until the block ends.

    The system releases the lock when the process ends.

    Args:
      path: the lock file.
      wait: called before waiting for another process that has the lock; None: do not wait.
      remove_on_error: remove the file if the block ends with an error.

    Yields:
      False if the file system has no locks, so that every process continues.

    Raises:
      BlockingIOError: another process has the lock, and there is no `wait`.
      OSError: the file cannot be created.
    """
    handle, locked = _lock_file(path, wait)
    try:
        yield locked
    except BaseException:
        if remove_on_error:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _lock_file(path: Path, wait: Callable[[], None] | None) -> tuple[int, bool]:
    """Open and lock a file; return its handle, and whether it is locked."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            locked = _lock(handle, wait)
        except BaseException:
            os.close(handle)
            raise
        # Between open and lock the last owner may have removed the file. Other
        # processes would then lock a new file of this name, and this lock would keep
        # none of them out.
        if _is_file_at(handle, path):
            return handle, locked
        os.close(handle)


def _is_file_at(handle: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _lock(handle: int, wait: Callable[[], None] | None) -> bool:
    """Lock an open file; return False if the file system has no locks."""
    try:
        # first without waiting, so that `wait` can say what it is waiting for
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise
            wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
    except BlockingIOError:
        raise
    # ENOLCK or ENOTSUP, as of some network file systems
    except OSError:
        return False
    return True


@contextlib.contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading in binary; a pipe or a device might never end.

    Raises:
      OSError: it cannot be opened, or is not a regular file.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer. The open handle is
        # checked, not the path, which another process could exchange in between.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield stream


def read_text(path: str | Path, most: int) -> str:
    """Read a regular file in UTF-8, without the byte-order mark that Windows programs
    put before the text.

    Raises:
      OSError: it cannot be read, is not a regular file, or has more than `most` bytes.
      UnicodeDecodeError: it is not text.
    """
    # a byte beyond the limit tells a file that is too large; its size may change
    # meanwhile
    with open_regular(path) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content.decode("utf-8-sig")


def read_user_text(field: str, path: str | Path, most: int) -> str:
    """Read the text of a file that a setting names, as `read_text` does.

    Raises:
      InputError: naming the field, the file and why it cannot be read.
    """
    try:
        return read_text(path, most)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{field}: cannot read {str(path)!r}: byte {error.start} ({byte:#x}) is not UTF-8; save it as "
            "UTF-8"
        ) from None
    except OSError as error:
        raise InputError(f"{field}: cannot read {str(path)!r}: {error.strerror or error}") from None


def machine_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_folder(folder: str | Path, field: str = "out") -> None:
    """Check that a folder can be made, and written to, before anything slow starts.
    Nothing of the trial stays.

    Raises:
      InputError: naming `field`, the folder and what the system says.
    """
    folder = Path(folder)
    new_folders = []
    # only a trial tells: permissions, quotas and read-only mounts have no common flag
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir()
            new_folders.append(path)
        with temporary_folder(folder / "trial"):
            pass
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InputError(f"{field}: cannot write to {str(folder)!r}: {cause}") from None
    finally:
        for path in reversed(new_folders):
            with contextlib.suppress(OSError):
                path.rmdir()


def check_file(path: str | Path, field: str = "out") -> None:
    """Check that a file can be written, or replaced, before anything slow starts.

    Raises:
      InputError: naming `field`, for a folder of that name, or as `check_folder`.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{field}: {str(path)!r} is a folder; give the name of a file")
    check_folder(path.parent, field)


def in_home(path: str | Path, field: str) -> Path:
    """Return a path with the home folder in place of ~.

    Raises:
      InputError: naming `field`, if there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{field}: {str(path)!r}: no such home folder; give a path without ~") from None
