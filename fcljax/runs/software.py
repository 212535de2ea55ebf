"""Name the software that makes a run: versions of this package and of those that compute,
and the commit of a checkout."""

import functools
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import fcljax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
CHECKOUT = Path(fcljax.__file__).parents[1]
# seconds after which git's answer is not waited for
PATIENCE = 10


@functools.cache
def software() -> dict[str, str | None]:
    """Return the versions of this process, by name, and `commit`, as `commit_of` has it.

    They are read once: a checkout may change while a run is under way.
    """
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "fcljax": fcljax.__version__,
        "commit": commit_of(CHECKOUT) or _installed_commit(),
        "python": platform.python_version(),
        **versions,
    }


def _version(package: str) -> str | None:
    """Return the version of a package; None if it was not installed as one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, with "-dirty" if its files differ from it; None for
    a folder that is no checkout, or without git."""
    # git would look in the folders above, which may be a checkout of something else
    if not (checkout / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # neither starts the checkout's monitor of files nor writes into it
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(checkout), *describe]
    # in a hook of git these name the repository of the hook
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PATIENCE, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _installed_commit() -> str | None:
    """Return the commit that pip installed from a repository (PEP 610)."""
    try:
        text = metadata.distribution("fcljax").read_text("direct_url.json")
        return json.loads(text or "{}")["vcs_info"]["commit_id"]
    # installed from a folder, an index or by hand
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None
