"""Checkpoints of a whole run with Orbax: written in the background, committed atomically, the last n kept.

Each holds a checksum over all that is in it. A damaged one is never read as if it were whole: it is set
aside, and the one before it is used.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from fcljax.errors import InputError
from fcljax.types import PyTree

ASIDE = "set-aside"  # folder beside the checkpoints for those that are damaged or out of date


class State(NamedTuple):
    """Everything that changes: what a checkpoint holds beside the host records."""

    server: PyTree
    clients: PyTree
    key: Array  # key data of the run's key, so that a checkpoint says what drew its numbers


class Snapshot(NamedTuple):
    """What a run is made of after `step` rounds: arrays (server, clients, key), plain host records, and what
    the run is: its settings and the digests of what it reads."""

    step: int
    state: PyTree
    records: dict[str, Any]
    origin: dict[str, Any] = {}


def open_checkpoints(folder: str | Path, keep: int) -> ocp.CheckpointManager:
    """A manager of the checkpoints in `folder`, which is made: a context manager that waits for the last
    write when left. Of several processes only one may have it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        create=False,
        multiprocessing_options=_alone(),
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
    """Start to write a snapshot; the arrays are copied first, so the caller may donate them at once.

    Raises:
      InputError: if this write or the one before it failed, which means that the folder is full or read-only.
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


def latest(
    manager: ocp.CheckpointManager, template: PyTree, tell: Callable[[str], None] = lambda line: None
) -> Snapshot | None:
    """The newest whole snapshot, or None if there is none at all. Damaged ones after it are set aside.

    Args:
      manager: of the checkpoints.
      template: gives the structure, shapes and types of the state.
      tell: is given a line for each damaged one.

    Raises:
      InputError: if there are some and none can be read, or they hold other shapes than this run; they stay
        where they are then.
    """
    folder, damaged = Path(manager.directory), {}
    for step in steps(folder):
        try:
            snapshot = _restore(folder, step, template)
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
        tell(f"resume: checkpoint {step} is damaged ({why}); it is now {place}, and {snapshot.step} is used")
    if damaged:
        manager.reload()
    return snapshot


def steps(folder: str | Path) -> list[int]:
    """The rounds of which there are checkpoints, the newest first. Folders of other names do not count."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)


def origin_of(folder: str | Path) -> dict[str, Any] | None:
    """What the newest checkpoint that says so says the run is; None if there is no such checkpoint. Writes
    nothing."""
    for step in steps(folder):
        try:
            return _read(Path(folder), step, records=ocp.args.JsonRestore())["records"]["origin"]
        except Exception:  # a damaged one, which `latest` will name
            continue
    return None


def set_aside(folder: str | Path, step: int) -> Path:
    """Move a checkpoint out of the way, into the folder set-aside beside the others' folder; where it is."""
    aside = Path(folder).parent / ASIDE
    aside.mkdir(exist_ok=True)
    places = (aside / f"checkpoint-{step}{f'-{i}' if i else ''}" for i in range(10**6))
    place = next(place for place in places if not place.exists())
    os.rename(Path(folder) / str(step), place)
    return place


def digest(tree: PyTree) -> str:
    """sha256 over the arrays of a tree, their names, types and shapes."""
    sums = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        sums.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}\n".encode())
        sums.update(np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()


def _restore(folder: Path, step: int, template: PyTree) -> Snapshot:
    """The snapshot of a step, checked.

    Raises:
      Exception: of any kind, if it is not whole.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template)
    items = {"state": ocp.args.StandardRestore(shapes), "records": ocp.args.JsonRestore()}
    restored = _read(folder, step, **items)
    host = restored["records"]
    found = Snapshot(step, restored["state"], host["records"], host["origin"])
    if _seal(found) != host["sha256"]:
        raise ValueError("what it holds does not have its checksum")
    return found._replace(state=jax.tree.map(jax.numpy.asarray, found.state))


def _alone() -> ocp.options.MultiprocessingOptions:
    """That Orbax waits for no other process."""
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )


def _read(folder: Path, step: int, **items: Any) -> Any:
    path = folder.absolute() / str(step)
    if not (path / "_CHECKPOINT_METADATA").is_file():
        raise ValueError("it is no checkpoint")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=_alone()) as reader:
        return reader.restore(path, args=ocp.args.Composite(**items))


def _seal(snapshot: Snapshot) -> str:
    """The checksum of all that a snapshot holds: the same one on the way to the disk and back."""
    host = json.dumps([snapshot.step, snapshot.records, snapshot.origin], sort_keys=True)
    return hashlib.sha256(f"{digest(snapshot.state)} {host}".encode()).hexdigest()


def _unwritable(manager: ocp.CheckpointManager, error: Exception) -> InputError:
    return InputError(f"out: cannot write a checkpoint to {str(manager.directory)!r}: {_line(error)}")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"  # the reason stands at the end
