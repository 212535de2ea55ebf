"""What a run needs to be resumed, on disk.

Checkpoints of the whole run, with Orbax: written in the background, committed atomically, the last n kept.
Each has a checksum over its content. A damaged one is never read as if it were intact: it is set aside, and
the one before it is used.

The examples that a server keeps of a finished task do not change any more, so they are not in checkpoints but
in a file of their own.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from fcljax.errors import InputError
from fcljax.files import atomic
from fcljax.types import PyTree, ReplayBuffer

ASIDE = "set-aside"  # folder beside the checkpoints for those that are damaged or out of date


class State(NamedTuple):
    """The arrays that a run changes."""

    server: PyTree
    clients: PyTree  # stacked [K, ...]
    key: Array  # key data of the run's key, so that a checkpoint says what its random numbers came from


class Snapshot(NamedTuple):
    """A run after `step` rounds."""

    step: int
    state: PyTree
    records: dict[str, Any]  # plain host values
    origin: dict[str, Any] = {}  # the run's settings, and digests of the files that it reads


def open_checkpoints(folder: str | Path, keep: int) -> ocp.CheckpointManager:
    """A manager of the checkpoints in `folder`, which it makes. As a context manager it waits at the end for
    the last write. Only one process may have it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        create=False,
        multiprocessing_options=_this_process(),
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
    """Start to write a snapshot. The arrays are copied first, so the caller may donate them at once.

    Raises:
      InputError: if this write or the one before it failed, because the disk is full or read-only.
    """
    # A copy: on CPU the background writer shares the device's arrays, which the next round donates.
    state = jax.tree.map(lambda x: np.array(x), jax.device_get(snapshot.state))
    seal = _seal(snapshot._replace(state=state))
    host = {"records": snapshot.records, "origin": snapshot.origin, "sha256": seal}
    arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), records=ocp.args.JsonSave(host))
    try:
        manager.save(snapshot.step, args=arguments)
    except Exception as error:
        raise _unwritable(manager, error) from error


def finish(manager: ocp.CheckpointManager) -> None:
    """Wait until the last snapshot is on disk.

    Raises:
      InputError: if it could not be written.
    """
    try:
        manager.wait_until_finished()
    except Exception as error:
        raise _unwritable(manager, error) from error


def _no_files(snapshot: Snapshot) -> None:
    """A snapshot that needs no files beside it."""


def latest(
    manager: ocp.CheckpointManager,
    template: PyTree,
    say: Callable[[str], None] = lambda line: None,
    check: Callable[[Snapshot], None] = _no_files,
) -> Snapshot | None:
    """The newest intact snapshot, or None if there is none at all. Damaged ones after it are set aside.

    Args:
      manager: of the checkpoints.
      template: the structure, shapes and types of the state.
      say: called with a line for each damaged one.
      check: raises an exception for a snapshot that cannot be resumed, because a file beside it is damaged.

    Raises:
      InputError: if there are some and none can be read, or they have other shapes than this run; they stay
        where they are then.
    """
    folder, damaged = Path(manager.directory), {}
    for step in steps(folder):
        try:
            snapshot = _restore(folder, step, template)
            check(snapshot)
            break
        except Exception as error:  # of Orbax, TensorStore and JSON: a damaged file may raise anything
            damaged[step] = _line(error)
    else:
        if not damaged:
            return None
        step, why = next(iter(damaged.items()))
        others = f"; and none of the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise InputError(f"resume: checkpoint {step} in {str(folder)!r} cannot be read: {why}{others}")
    for step, why in damaged.items():
        place = set_aside(folder, step)
        say(f"resume: checkpoint {step} is damaged ({why}); it is now {place}, and {snapshot.step} is used")
    if damaged:
        manager.reload()
    return snapshot


def steps(folder: str | Path) -> list[int]:
    """The numbers of rounds at which there are checkpoints, the newest first."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)


def origin_of(folder: str | Path) -> dict[str, Any] | None:
    """The origin in the newest checkpoint that can be read; None if there is no such checkpoint. Writes
    nothing."""
    for step in steps(folder):
        try:
            return _read(Path(folder), step, records=ocp.args.JsonRestore())["records"]["origin"]
        except Exception:  # a damaged one, which `latest` will name
            continue
    return None


def set_aside(folder: str | Path, step: int) -> Path:
    """Move a checkpoint into the folder set-aside, beside the checkpoints' folder. Returns its new path."""
    aside = Path(folder).parent / ASIDE
    aside.mkdir(exist_ok=True)
    places = (aside / f"checkpoint-{step}{f'-{i}' if i else ''}" for i in range(10**6))
    place = next(place for place in places if not place.exists())
    os.rename(Path(folder) / str(step), place)
    return place


def digest_of_tree(tree: PyTree) -> str:
    """sha256 of a tree: the names, types, shapes and values of its arrays."""
    sums = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        sums.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}\n".encode())
        sums.update(np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()


def _restore(folder: Path, step: int, template: PyTree) -> Snapshot:
    """The snapshot of a step, checked.

    Raises:
      Exception: of any kind, if it is not intact.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template)
    items = {"state": ocp.args.StandardRestore(shapes), "records": ocp.args.JsonRestore()}
    restored = _read(folder, step, **items)
    host = restored["records"]
    found = Snapshot(step, restored["state"], host["records"], host["origin"])
    if _seal(found) != host["sha256"]:
        raise ValueError("its content does not match its checksum")
    return found._replace(state=jax.tree.map(jax.numpy.asarray, found.state))


def _this_process() -> ocp.options.MultiprocessingOptions:
    """Options by which Orbax does not wait for other processes."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )


def _read(folder: Path, step: int, **items: Any) -> Any:
    path = folder.absolute() / str(step)
    if not (path / "_CHECKPOINT_METADATA").is_file():
        raise ValueError("it is not a checkpoint")
    with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(), multiprocessing_options=_this_process()
    ) as reader:
        return reader.restore(path, args=ocp.args.Composite(**items))


def _seal(snapshot: Snapshot) -> str:
    """The checksum of a snapshot, the same before it is written and after it is read."""
    host = json.dumps([snapshot.step, snapshot.records, snapshot.origin], sort_keys=True)
    return hashlib.sha256(f"{digest_of_tree(snapshot.state)} {host}".encode()).hexdigest()


def _unwritable(manager: ocp.CheckpointManager, error: Exception) -> InputError:
    return InputError(f"out: cannot write a checkpoint to {str(manager.directory)!r}: {_line(error)}")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"  # the reason stands at the end


# ---- examples that a server keeps ------------------------------------------------------------------------


def save_task(folder: str | Path, task: int, kept: ReplayBuffer) -> str:
    """Write the examples that a server keeps of a task, atomically. Returns the file's sha256, for
    checkpoints."""
    path = _file(folder, task)
    path.parent.mkdir(exist_ok=True)
    named = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree.leaves_with_path(kept)}
    with atomic(path) as temporary:
        np.savez(temporary, **named)
        return _sha256(temporary)


def load_tasks(folder: str | Path, sha256: Sequence[str], template: ReplayBuffer) -> tuple[ReplayBuffer, ...]:
    """The examples kept of the first tasks, in their order.

    Args:
      folder: of the files.
      sha256: their checksums.
      template: gives structure, types and the shapes of one example.

    Raises:
      InputError: if a file is missing or has other content.
    """
    return tuple(_load_task(_file(folder, task), each, template) for task, each in enumerate(sha256))


def check_tasks(folder: str | Path, sha256: Sequence[str]) -> None:
    """Check that the examples kept of the first tasks have these checksums.

    Raises:
      ValueError: if a file is missing or has other content.
    """
    for task, each in enumerate(sha256):
        path = _file(folder, task)
        if not path.is_file() or _sha256(path) != each:
            raise ValueError(f"{str(path)!r} does not have the checksum in the checkpoint")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_task(path: Path, sha256: str, template: ReplayBuffer) -> ReplayBuffer:
    try:
        if _sha256(path) != sha256:
            raise ValueError("it does not have the checksum in the checkpoint")
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"resume: {str(path)!r} cannot be read: {error}") from None
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    count, leaves = len(found.get(".label", ())), []
    for key, like in paths:
        name = jax.tree_util.keystr(key)
        leaf = found.get(name)
        leaves.append(leaf)
        if leaf is None or leaf.dtype != like.dtype or leaf.shape != (count, *like.shape[1:]):
            raise InputError(f"resume: {str(path)!r} has no {name} of this run's shape")
    return structure.unflatten(leaves)


def _file(folder: str | Path, task: int) -> Path:
    return Path(folder) / f"task-{task:03d}.npz"
