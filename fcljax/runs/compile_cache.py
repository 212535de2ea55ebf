"""jax's persistent compilation cache, as the program `fcljax` sets it up. The library does not change jax's
settings.

jax's cache key contains the program, the version of jaxlib, XLA's flags and the accelerator, but not the type
of the CPU, and code for another CPU may crash a process (see jax issue 38445). So each type of CPU has a
folder of its own. Cached programs are executed unchecked: only a folder that belongs to the user, and that no
other user may write to, is used.
"""

import hashlib
import os
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from fcljax.files import in_home

VARIABLE = "FCLJAX_COMPILED"
OFF = "off"
MOST = 4 * 2**30  # bytes of all compiled programs; a run of a small network leaves about 1 MB
LEAST_SECONDS = 0.05  # compile time of a cached program; faster ones are compiled as quickly as they are read
# lines of /proc/cpuinfo that distinguish types of CPU, for x86 and Arm
CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
UNREAD = re.compile(r"Error reading persistent compilation cache entry for '([\w.<>-]+)'")
UNWRITTEN = "Error writing persistent compilation cache entry"


class CachedProgram(NamedTuple):
    """A compiled program's file, its bytes, and when it was last used, in seconds since 1970."""

    path: Path
    size: int
    used: float


def keep(option: str | None, say: Callable[[str], None]) -> None:
    """Let jax cache what this process compiles, and read what other processes have compiled.

    Args:
      option: a folder, or "off"; None: jax's own setting (JAX_COMPILATION_CACHE_DIR), else the environment's
        FCLJAX_COMPILED, which is a folder or "off", else the first of `usual_folders` that can be used.
      say: called with a line if nothing is cached; runs work all the same.
    """
    # pyrefly: ignore[missing-attribute]  # attributes of jax.config are made while jax is imported
    if option is None and jax.config.jax_compilation_cache_dir:
        return
    folders = asked_folders(option)
    if not folders:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    whys = []
    for folder in folders:
        whys.append(why_not(folder))
        if whys[-1] is None:
            _set_up(folder / machine())
            forget(oldest_beyond(entries(folder), MOST))
            return
    say(f"compiled programs are not kept: {whys[-1]}; choose a folder with --compile-cache, or off")


def asked_folders(option: str | None = None) -> list[Path]:
    """The folders for compiled programs, by this option or by the environment; the first usable one is taken.
    Empty if nothing is to be cached."""
    asked = option or os.environ.get(VARIABLE)
    if asked == OFF:
        return []
    return [in_home(asked, "compile_cache")] if asked else usual_folders()


def usual_folders() -> list[Path]:
    """The default folders: beside the data or, if that is shared or cannot be written, in the user's own
    cache."""
    data, cache = os.environ.get("FCLJAX_DATA"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = [*([Path(data)] if data else []), Path(cache) / "fcljax"]
    return [in_home(folder / "compiled", "compile_cache") for folder in folders]


def why_not(folder: Path) -> str | None:
    """Why a folder, which is created if it is missing, cannot be used; None: it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, ValueError) as error:
        return f"cannot write to {str(folder)!r}: {getattr(error, 'strerror', None) or error}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot write to {str(folder)!r}"
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        return f"other users may write to {str(folder)!r}"
    return None


def machine() -> str:
    """The folder of programs for this version of jax and this type of CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        about = [line for line in lines if line.partition(":")[0].strip() in CPU]
    except OSError:  # not Linux
        about = [platform.processor(), platform.mac_ver()[0]]
    kind = hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]
    return f"jax-{jax.__version__}-{platform.machine()}-{kind}"


def _set_up(folder: Path) -> None:
    """Change jax's settings, except for those that the user has set."""
    settings = {
        "jax_persistent_cache_min_compile_time_secs": LEAST_SECONDS,
        "jax_persistent_cache_enable_xla_caches": "none",  # they put the folder's name into the keys
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _forget_what_cannot_be_read(folder)


def _forget_what_cannot_be_read(folder: Path) -> None:
    """jax does not write its files atomically: a damaged file of a process that was killed, or whose disk was
    full, stays forever, and costs all later processes a warning and the time to compile. Here jax's warning
    removes the file, so that jax writes it again. A full disk needs no warning for every program."""
    show = warnings.showwarning

    def show_or_remove(message, category, filename, lineno, file=None, line=None) -> None:
        unread = UNREAD.match(str(message))
        if unread is None:
            show(message, category, filename, lineno, file, line)
            return
        for path in folder.glob(f"{unread[1]}-*-cache"):
            path.unlink(missing_ok=True)

    warnings.filterwarnings("always", message=UNREAD.pattern)
    warnings.filterwarnings("ignore", message=UNWRITTEN)
    warnings.showwarning = show_or_remove


def entries(folder: Path) -> list[CachedProgram]:
    """All compiled programs in a folder, of all versions and types of CPU."""
    found = []
    for path in folder.glob("*/*-cache"):
        try:
            state = path.stat()
        except OSError:  # another process has removed it
            continue
        # many systems record only the first access of a day, and some none
        found.append(CachedProgram(path, state.st_size, max(state.st_atime, state.st_mtime)))
    return found


def oldest_beyond(entries: Sequence[CachedProgram], most: int) -> list[CachedProgram]:
    """The least recently used programs, without which the others have at most `most` bytes. jax has a limit
    of its own, but with it every look-up of every process waits for one lock, and a process that is killed
    while it writes breaks the limit for all later ones."""
    kept, gone = 0, []
    for entry in sorted(entries, key=lambda entry: entry.used, reverse=True):
        kept += entry.size
        if kept > most:
            gone.append(entry)
    return gone


def forget(entries: Sequence[CachedProgram]) -> None:
    """Remove compiled programs; another process may have done so already."""
    for entry in entries:
        entry.path.unlink(missing_ok=True)
