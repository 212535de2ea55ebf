"""Checkpoints of a whole run with Orbax: written in the background, committed atomically, the last n kept."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from fcljax.errors import InputError
from fcljax.types import PyTree


class State(NamedTuple):
    """Everything that changes: what a checkpoint holds beside the host records."""

    server: PyTree
    clients: PyTree
    key: Array  # key data of the run's key, so that a checkpoint says what drew its numbers


class Snapshot(NamedTuple):
    """What a run is made of after `step` rounds: arrays (server, clients, key) and plain host records."""

    step: int
    state: PyTree
    records: dict[str, Any]


def open_checkpoints(folder: str | Path, keep: int) -> ocp.CheckpointManager:
    """A manager of the checkpoints in `folder`: a context manager that waits for the last write when left."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
    """Start to write a snapshot; the arrays are copied first, so the caller may donate them at once.

    Raises:
      InputError: if this write or the one before it failed, which means that the folder is full or read-only.
    """
    # A copy: on CPU the background writer shares the device's arrays, which the next round donates.
    state = jax.tree.map(lambda x: np.array(x), jax.device_get(snapshot.state))
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(state), records=ocp.args.JsonSave(snapshot.records)
    )
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


def latest(manager: ocp.CheckpointManager, template: PyTree) -> Snapshot | None:
    """The newest complete snapshot, or None. `template` gives the structure, shapes and types of the state.

    Raises:
      InputError: if it cannot be read, or holds other shapes than this run.
    """
    step = manager.latest_step()
    if step is None:
        return None
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template)
    arguments = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), records=ocp.args.JsonRestore())
    try:
        restored = manager.restore(step, args=arguments)
    except Exception as error:
        raise InputError(
            f"resume: checkpoint {step} in {str(manager.directory)!r} cannot be read: {_line(error)}"
        ) from error
    return Snapshot(step, jax.tree.map(jax.numpy.asarray, restored["state"]), restored["records"])


def _unwritable(manager: ocp.CheckpointManager, error: Exception) -> InputError:
    return InputError(f"out: cannot write a checkpoint to {str(manager.directory)!r}: {_line(error)}")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"  # the reason stands at the end
