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
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from fcljax.files import atomic, in_home

VARIABLE = "FCLJAX_COMPILED"
OFF = "off"
MOST = 4 * 2**30  # bytes of all compiled programs; a run of a small network leaves about 1 MB
LEAST_SECONDS = 0.05  # compile time of a cached program; faster ones are compiled as quickly as they are read
# lines of /proc/cpuinfo that distinguish types of CPU, for x86 and Arm
CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
DIGEST = 32  # bytes of a sha256
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
        whys.append(why_not(folder) or why_not(folder / machine()))
        if whys[-1] is None:
            _set_up(folder / machine(), say)
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
    data = os.environ.get("FCLJAX_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
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
    """The folder of programs for this version of jax and this type of CPU. Programs that jax or an earlier
    version of this package wrote, without checksums, lie elsewhere."""
    return f"jax-{jax.__version__}-{platform.machine()}-{cpu_type()}-checked"


def cpu_type() -> str:
    """12 digits that are the same on CPUs of one type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        about = [line for line in lines if line.partition(":")[0].strip() in CPU]
    except OSError:  # not Linux
        about = [platform.processor(), platform.mac_ver()[0]]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]


def _set_up(folder: Path, say: Callable[[str], None]) -> None:
    """Change jax's settings, except for those that the user has set."""
    if not _checked_by(
        lambda key: say(f"compiled program {key} is damaged; it is removed and compiled again")
    ):
        jax.config.update("jax_enable_compilation_cache", False)
        say(f"compiled programs are not kept: jax {jax.__version__} has no place for their checksums")
        return
    settings = {
        "jax_persistent_cache_min_compile_time_secs": LEAST_SECONDS,
        "jax_persistent_cache_enable_xla_caches": "none",  # they put the folder's name into the keys
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    warnings.filterwarnings("ignore", message=UNWRITTEN)  # a full disk needs none for every program


class CheckedCache:
    """jax's cache of compiled programs, by key, as files that begin with the sha256 of the rest.

    jax's own has a checksum only where it compresses with zlib, and writes files that a kill leaves half
    written, which then cost all later processes a warning and the time to compile.
    """

    def __init__(self, path: str, damaged: Callable[[str], None]):
        self._path = Path(path)
        self._damaged = damaged

    def get(self, key: str) -> bytes | None:
        """The program; None: there is none. One that is not intact is removed."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        digest = content[:DIGEST]
        program = content[DIGEST:]
        if hashlib.sha256(program).digest() == digest:
            return program
        path.unlink(missing_ok=True)
        self._damaged(key)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""
        path = self._file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_bytes(hashlib.sha256(value).digest() + value)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-cache"


def _checked_by(damaged: Callable[[str], None]) -> bool:
    """Let jax keep programs in a `CheckedCache`. jax has no public place for another cache, so a version may
    lack this one: returns whether it is there."""
    try:
        from jax._src import compilation_cache
    except ImportError:
        return False

    def checked(path: str) -> tuple[CheckedCache, str]:
        return CheckedCache(path, damaged), path

    if not hasattr(compilation_cache, "get_file_cache"):
        return False
    # pyrefly: ignore[bad-assignment]  # it has what jax uses of a cache
    compilation_cache.get_file_cache = checked
    return True


def entries(folder: Path) -> list[CachedProgram]:
    """All compiled programs in a folder, of all versions and types of CPU."""
    found = []
    for path in folder.glob("*/*"):
        if not path.name.endswith("-cache") and ".tmp-" not in path.name:
            continue  # but what killed processes have left half written is counted
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
    kept = 0
    gone = []
    for entry in sorted(entries, key=lambda entry: entry.used, reverse=True):
        kept += entry.size
        if kept > most:
            gone.append(entry)
    return gone


def forget(entries: Sequence[CachedProgram]) -> None:
    """Remove compiled programs; another process may have done so already."""
    for entry in entries:
        entry.path.unlink(missing_ok=True)
