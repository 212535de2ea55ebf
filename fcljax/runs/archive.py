"""What a server keeps of finished tasks, in the run's folder: a file per task, written once, when it is over.

Checkpoints do not hold it, since it does not change any more.
"""

import zipfile
from pathlib import Path

import jax
import numpy as np

from fcljax.errors import InputError
from fcljax.files import atomic
from fcljax.types import Kept


def save_task(folder: str | Path, task: int, kept: Kept) -> None:
    """Write what is kept of a task, atomically; numpy arrays."""
    path = _file(folder, task)
    path.parent.mkdir(exist_ok=True)
    named = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree.leaves_with_path(kept)}
    with atomic(path) as temporary:
        np.savez(temporary, **named)


def load_tasks(folder: str | Path, tasks: int, template: Kept) -> tuple[Kept, ...]:
    """What is kept of the first tasks, in their order. `template` gives structure, types and the shapes of a
    row.

    Raises:
      InputError: if a file is not there, or holds something else.
    """
    return tuple(_load(_file(folder, task), template) for task in range(tasks))


def _load(path: Path, template: Kept) -> Kept:
    try:
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
