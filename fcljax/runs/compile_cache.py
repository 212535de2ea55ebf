"""jax's persistent compilation cache, as the command `fcljax` configures it.

The library alone does not change jax's settings. jax's cache key contains the program,
the version of jaxlib, XLA's flags and the accelerator, but not the type of the CPU.
Code for another CPU may crash a process (jax issue 38445), so each type of CPU has its
own folder. Cached programs are executed as they are: only a folder that belongs to the
user, and that no other user may write to, is used.

Processes that need the same program at the same time compile it once: the others wait
for its file.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import platform
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fcljax.files import atomic, in_home, owned

VARIABLE = "FCLJAX_COMPILED"
OFF = "off"
# most bytes of all compiled programs; a run of a small network leaves about 1 MB
MOST = 4 * 2**30
# a program that compiles faster is not cached: reading it would take as long
LEAST_SECONDS = 0.05
# lines of /proc/cpuinfo that distinguish types of CPU, for x86 and Arm
CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
DIGEST = 32  # bytes of a sha256
UNWRITTEN = "Error writing persistent compilation cache entry"


class CachedProgram(NamedTuple):
    """A file of a compiled program."""

    path: Path
    """Its file."""
    size: int
    """Its bytes."""
    used: float
    """When it was last used, in seconds since 1970."""


def keep(option: str | None, say: Callable[[str], None]) -> None:
    """Configure jax to cache compiled programs and to read those of other processes.

    Args:
      option: a folder, or "off". None: jax's setting (JAX_COMPILATION_CACHE_DIR), else
        the environment's FCLJAX_COMPILED, a folder or "off", else the first usable one of
        `usual_folders`.
      say: is called with a line if nothing is cached; runs work without the cache.
    """
    # pyrefly: ignore[missing-attribute]  # attributes of jax.config are made while jax is imported
    if option is None and jax.config.jax_compilation_cache_dir:
        return
    folders = asked_folders(option)
    if not folders:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    problem = None
    for folder in folders:
        problem = why_not(folder) or why_not(folder / machine())
        if problem is None:
            _set_up(folder / machine(), say)
            forget(oldest_beyond(entries(folder), MOST))
            return
    say(f"compiled programs are not kept: {problem}; choose a folder with --compile-cache, or off")


def asked_folders(option: str | None = None) -> list[Path]:
    """Return the folders that the option or the environment names, of which the first
    usable one is taken.

    It is empty if nothing is to be cached.
    """
    setting = option or os.environ.get(VARIABLE)
    if setting == OFF:
        return []
    if setting:
        return [in_home(setting, "compile_cache")]
    return usual_folders()


def usual_folders() -> list[Path]:
    """Return the default folders: beside the data, then in the user's cache.

    The second is for data that are shared or read-only.
    """
    data = os.environ.get("FCLJAX_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = [Path(cache) / "fcljax"]
    if data:
        folders.insert(0, Path(data))
    return [in_home(folder / "compiled", "compile_cache") for folder in folders]


def why_not(folder: Path) -> str | None:
    """Create a folder if needed, and return why it cannot be used; None if it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, ValueError) as error:
        return f"cannot write to {str(folder)!r}: {getattr(error, 'strerror', None) or error}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot write to {str(folder)!r}"
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        return f"other users may write to {str(folder)!r}"
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        # Who may write to a folder above can exchange the one below it. In a folder
        # with the sticky bit, such as /tmp, only the owner of an entry can.
        if mode & 0o022 and not mode & stat.S_ISVTX:
            return f"other users may write to {str(parent)!r}, above {str(folder)!r}"
    return None


def machine() -> str:
    """Return the name of the folder for this version of jax and this type of CPU.

    Programs without checksums, which jax or an earlier version of this package wrote,
    have other folders.
    """
    return f"jax-{jax.__version__}-{platform.machine()}-{cpu_type()}-checked"


def cpu_type() -> str:
    """Return 12 digits that are the same on CPUs of one type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        facts = [line for line in lines if line.partition(":")[0].strip() in CPU]
    except OSError:  # not Linux
        facts = [platform.processor(), platform.mac_ver()[0]]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _set_up(folder: Path, say: Callable[[str], None]) -> None:
    """Change jax's settings, except for those that the user has set."""
    if not _checked_by(
        lambda key: say(f"compiled program {key} is damaged; it was removed and is compiled again")
    ):
        jax.config.update("jax_enable_compilation_cache", False)
        say(f"compiled programs are not cached: jax {jax.__version__} cannot store their checksums")
        return
    settings = {
        "jax_persistent_cache_min_compile_time_secs": LEAST_SECONDS,
        # XLA's own caches would put the folder's name into the keys
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compile_once(folder)
    # jax warns for each program that it cannot write, so a full disk would bury a run's
    # lines
    warnings.filterwarnings("ignore", message=UNWRITTEN)


class CheckedCache:
    """A cache of compiled programs, whose files begin with the sha256 of the rest.

    jax's cache has a checksum only where it compresses with zlib. A kill leaves its
    files half written, and each then costs all later processes a warning and the time
    to compile.
    """

    def __init__(self, path: str, damaged: Callable[[str], None]):
        self._path = Path(path)
        self._damaged = damaged

    def get(self, key: str) -> bytes | None:
        """Return the program, or None if there is none. Remove one that is damaged."""
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
        """Write a program."""
        path = self._file(key)
        with atomic(path) as temporary:
            temporary.write_bytes(hashlib.sha256(value).digest() + value)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-cache"


def _checked_by(damaged: Callable[[str], None]) -> bool:
    """Use a `CheckedCache` in jax, and return whether this version of jax allows it.

    jax has no public interface for another cache.
    """
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


def compile_once(folder: Path) -> None:
    """Let jax compile a program that is not in the cache in one process at a time.

    The others wait, and read the program that the first one wrote. jax has no public
    interface for this; where its internal one differs, every process compiles by itself.

    Args:
      folder: for the lock of each program that is being compiled.
    """
    from jax._src import compilation_cache, compiler, distributed

    # unwrapped: if this is called twice, the second wrapper must not wait for the first
    # one's lock on the same program
    compile_program = inspect.unwrap(getattr(compiler, "_compile_and_write_cache", _unknown))
    parameters = inspect.signature(compile_program)
    if "cache_key" not in parameters.parameters:
        return

    def kept_program(program: Mapping[str, Any]) -> Any:
        names = ("cache_key", "compile_options", "backend", "executable_devices")
        try:
            return compilation_cache.get_executable_and_time(*(program[name] for name in names))[0]
        # jax, too, compiles a program that it cannot read, whatever the error
        except Exception:
            return None

    @functools.wraps(compile_program)
    def compile_or_wait(*args: Any, **options: Any) -> Any:
        program = parameters.bind(*args, **options).arguments
        # jax divides the work among the processes of one run itself
        if distributed.global_state.client is not None:
            return compile_program(*args, **options)
        with _others_excluded(folder / f"{program['cache_key']}-lock") as waited:
            # another process may have written it since jax looked for it
            executable = kept_program(program)
            if executable is None and not waited:
                executable = compile_program(*args, **options)
        # the process that had the lock left no program if compilation took less than
        # LEAST_SECONDS or failed
        if executable is None:
            executable = compile_program(*args, **options)
        return executable

    # pyrefly: ignore[missing-attribute]  # the attribute is internal
    compiler._compile_and_write_cache = compile_or_wait


def _unknown() -> None:
    """Stand for the function that this version of jax does not have."""


@contextlib.contextmanager
def _others_excluded(lock: Path) -> Iterator[bool]:
    """Lock a file, which is removed afterwards. Yield whether another process had it."""
    waited = False

    def wait() -> None:
        nonlocal waited
        waited = True

    with contextlib.ExitStack() as stack:
        # without a lock a program is compiled as often as processes need it
        with contextlib.suppress(OSError):
            stack.enter_context(owned(lock, wait))
        try:
            yield waited
        finally:
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)


def entries(folder: Path) -> list[CachedProgram]:
    """List all compiled programs in a folder, of all versions and types of CPU."""
    programs = []
    for path in folder.glob("*/*"):
        # what killed processes have left half written (.tmp-) counts too
        if not path.name.endswith("-cache") and ".tmp-" not in path.name:
            continue
        try:
            state = path.stat()
        except OSError:  # another process has removed it
            continue
        # many systems record only the first access of a day, and some none
        programs.append(CachedProgram(path, state.st_size, max(state.st_atime, state.st_mtime)))
    return programs


def oldest_beyond(entries: Sequence[CachedProgram], most: int) -> list[CachedProgram]:
    """Return the least recently used programs beyond `most` bytes.

    jax's limit would make every look-up of every process wait for one lock, and a
    process that is killed while it writes would break it for all later ones.
    """
    total = 0
    excess = []
    for entry in sorted(entries, key=lambda entry: entry.used, reverse=True):
        total += entry.size
        if total > most:
            excess.append(entry)
    return excess


def forget(entries: Sequence[CachedProgram]) -> None:
    """Remove compiled programs, which another process may have done already."""
    for entry in entries:
        entry.path.unlink(missing_ok=True)
