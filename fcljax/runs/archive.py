"""What a server keeps of finished tasks, in the run's folder: a file per task, written once, when it is over.

Checkpoints do not hold it, since it does not change any more.
"""

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from fcljax.errors import InputError
from fcljax.files import atomic
from fcljax.types import ReplayBuffer


def save_task(folder: str | Path, task: int, kept: ReplayBuffer) -> str:
    """Write what is kept of a task, atomically; numpy arrays. Returns the file's sha256, for checkpoints."""
    path = _file(folder, task)
    path.parent.mkdir(exist_ok=True)
    named = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree.leaves_with_path(kept)}
    with atomic(path) as temporary:
        np.savez(temporary, **named)
        return _sha256(temporary)


def load_tasks(folder: str | Path, sha256: Sequence[str], template: ReplayBuffer) -> tuple[ReplayBuffer, ...]:
    """What is kept of the first tasks, in their order. `sha256`: of their files; `template` gives structure,
    types and the shapes of a row.

    Raises:
      InputError: if a file is not there, or holds something else.
    """
    return tuple(_load(_file(folder, task), each, template) for task, each in enumerate(sha256))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(path: Path, sha256: str, template: ReplayBuffer) -> ReplayBuffer:
    try:
        if _sha256(path) != sha256:
            raise ValueError("it does not have the checksum that the run has noted")
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"resume: {str(path)!r} cannot be read: {error}") from None
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    rows, leaves = len(found.get(".label", ())), []
    for key, like in paths:
        name = jax.tree_util.keystr(key)
        leaf = found.get(name)
        leaves.append(leaf)
        if leaf is None or leaf.dtype != like.dtype or leaf.shape != (rows, *like.shape[1:]):
            raise InputError(f"resume: {str(path)!r} holds no {name} of this run's shape")
    return structure.unflatten(leaves)


def _file(folder: str | Path, task: int) -> Path:
    return Path(folder) / f"task-{task:03d}.npz"
