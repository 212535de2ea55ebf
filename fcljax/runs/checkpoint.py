"""Checkpoints, from which a run is resumed.

Orbax writes them in the background, commits them atomically and keeps the last n. On a CPU, where the copy
takes memory beside the run's arrays, a large one is written before the next round begins. Each checkpoint has
a checksum of its content. A damaged one is set aside, and the one before it is used.

Large states of clients have files beside the checkpoint. So have those of a run that several processes
share, of which each writes its clients' states. A checkpoint writes only the states that changed since the
one before it, and names the files that have the others, with their checksums. It is committed after all of
its files are written. A file is removed with the last checkpoint that names it.

The examples that a server replays of a finished task never change, so each task has its own file.
"""

import functools
import hashlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, Int

from fcljax.errors import InputError, reason
from fcljax.files import atomic
from fcljax.runs.hosts import ALONE, Hosts
from fcljax.types import PyTree, ReplayBuffer

CLIENTS = "clients"  # folder beside the checkpoints for the states of clients that each process writes
ASIDE = "set-aside"  # folder beside the checkpoints for those that are damaged or out of date
# Bytes of a file of arrays, 8 MiB. Orbax holds what a file will contain in memory until
# it is full, so larger files would cost more.
FILE = 2**23
# Bytes of the largest state that is written while the next round runs, 64 MiB: on a CPU
# the copy that is being written takes memory beside the run's arrays.
BESIDE = 2**26
# Rounds at which a checkpoint's files of client states may have been written. A resumed
# run opens all of them, so after so many rounds all states are written into new files.
MOST_STEPS = 64
# Old files also hold states that newer files replace. Once all files together hold
# twice as many states as there are clients, all are written again.
MOST_COPIES = 2
# Largest share of a run's time for checkpoints above `BESIDE`, without
# --checkpoint-every.
SHARE = 0.03


class State(NamedTuple):
    """The arrays that a run changes."""

    server: PyTree
    """State of the server."""
    clients: PyTree
    """States of clients, stacked [K, ...]."""
    key: Array
    """Key data of the run's key: the source of its random numbers."""


class Snapshot(NamedTuple):
    """A run after `step` rounds."""

    step: int
    """Number of finished rounds."""
    state: PyTree
    """`State`."""
    records: dict[str, Any]
    """Plain host values."""
    origin: dict[str, Any] = {}
    """The run's settings, and digests of the files that it reads."""
    shards: Sequence[dict[str, Any]] = ()
    """Results of `save_shard`, the older first; of a client in several of them the last one counts. Empty if
    `state` has the clients' states."""


class Write(NamedTuple):
    """The last checkpoint that a run wrote."""

    size: int
    """Bytes of the arrays that it wrote."""
    seconds: float
    """How long the run waited for it."""
    end: float
    """When the run went on, by `time.monotonic`."""


def is_due(every: int | None, step: int, last: Write | None, now: float) -> bool:
    """Return whether a run writes a checkpoint after `step` rounds.

    Args:
      every: rounds between checkpoints; None: each round, but so that large ones take at most `SHARE` of the
        time.
      step: number of finished rounds.
      last: the checkpoint before; None: there is none yet.
      now: by `time.monotonic`.
    """
    if every is not None:
        return step % every == 0
    if last is None or last.size <= BESIDE:
        return True
    # a write of 3 s is followed by at least 100 s of training
    return now - last.end >= last.seconds / SHARE


def open_checkpoints(folder: str | Path, keep: int) -> ocp.CheckpointManager:
    """Create a folder and return the manager of its checkpoints, which only one process may have.

    As a context manager it waits for the last write at the end.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        create=False,
        multiprocessing_options=_this_process(),
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(manager: ocp.CheckpointManager, snapshot: Snapshot, start: float | None = None) -> Write:
    """Start to write a snapshot; on a CPU, finish to write a large one. Return what it took.

    The caller may change or donate the arrays afterwards.

    Args:
      manager: of the checkpoints.
      snapshot: what to write.
      start: when the run began to write its shards, by `time.monotonic`; None: now.

    Raises:
      InputError: if this write or the one before it failed, because the disk is full or read-only.
    """
    if start is None:
        start = time.monotonic()
    # As numpy arrays, which Orbax copies before it returns. Arrays of jax it reads
    # later, when the next round may have overwritten their memory.
    state = jax.tree.map(np.asarray, jax.device_get(snapshot.state))
    seal = _seal(snapshot._replace(state=state))
    host: dict[str, Any] = {"records": snapshot.records, "origin": snapshot.origin, "sha256": seal}
    if snapshot.shards:
        host["shards"] = snapshot.shards
    arguments = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state, ocdbt_target_data_file_size=FILE), records=ocp.args.JsonSave(host)
    )
    # it waits for the write before it, and raises that one's error
    try:
        manager.save(snapshot.step, args=arguments)
    except Exception as error:
        raise _unwritable(manager, error) from error
    _forget_shards(Path(manager.directory), snapshot)
    size = tree_bytes(state)
    if jax.default_backend() == "cpu" and size > BESIDE:
        finish(manager)
    end = time.monotonic()
    size += sum(shard["bytes"] for shard in snapshot.shards if shard["step"] == snapshot.step)
    return Write(size, end - start, end)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of a tree's arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def finish(manager: ocp.CheckpointManager) -> None:
    """Wait until the last snapshot is on disk.

    Raises:
      InputError: if it could not be written.
    """
    try:
        manager.wait_until_finished()
    except Exception as error:
        raise _unwritable(manager, error) from error
    _forget_shards(Path(manager.directory))


def _no_files(snapshot: Snapshot) -> None:
    """Accept a snapshot that needs no files beside it."""


def latest(
    manager: ocp.CheckpointManager,
    template: PyTree,
    say: Callable[[str], None] = lambda line: None,
    check: Callable[[Snapshot], None] = _no_files,
) -> Snapshot | None:
    """Return the `newest` snapshot of a manager that one process has."""
    snapshot = newest(Path(manager.directory), template, say, check)
    manager.reload()
    return snapshot


def newest(
    folder: Path,
    template: PyTree,
    say: Callable[[str], None],
    check: Callable[[Snapshot], None] = _no_files,
    hosts: Hosts = ALONE,
    index: np.ndarray | None = None,
) -> Snapshot | None:
    """Return the newest intact snapshot, or None if there is no checkpoint. Set damaged ones after it aside.

    All processes call this together. The first one reads and checks the checkpoint. Each reads the states of
    its clients, if they are in files beside it.

    Args:
      folder: of the checkpoints.
      template: the structure, shapes and types of the state.
      say: is called with a line for each damaged checkpoint.
      check: raises an exception if a file beside the snapshot is damaged.
      hosts: the processes.
      index: ids of the clients whose states this process needs; None: all.

    Returns:
      The snapshot; processes other than the first one get zeros for arrays. If it has shards, every process
      gets the states of its clients `index`.

    Raises:
      InputError: if no checkpoint can be read, or if they have other shapes than this run. They are not moved
        then.
    """
    damaged: dict[int, str] = {}
    for step in hosts.from_first(lambda: steps(folder)):
        snapshot, why = _read_together(folder, step, template, check, hosts, index)
        if not why:
            break
        damaged[step] = why
    # none is intact: they stay where they are, since all of them damaged is more likely a
    # wrong version or a wrong option than a broken disk
    else:
        if not damaged:
            return None
        step, why = next(iter(damaged.items()))
        others = f"; and none of the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise InputError(f"resume: checkpoint {step} in {str(folder)!r} cannot be read: {why}{others}")
    if hosts.first:
        for step, why in damaged.items():
            path = set_aside(folder, step)
            say(
                f"resume: checkpoint {step} is damaged ({why}); it is now {path}, and {snapshot.step} is used"
            )
    return snapshot


def _read_together(
    folder: Path,
    step: int,
    template: PyTree,
    check: Callable[[Snapshot], None],
    hosts: Hosts,
    index: np.ndarray | None,
) -> tuple[Snapshot, str]:
    """Return the snapshot of a step as `newest` does, and why it is not intact; "" if it is."""
    zeros = () if hosts.first else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template)
    snapshot = Snapshot(step, zeros, {})
    why = ""
    try:
        if hosts.first:
            snapshot = _restore(folder, step, template)
            check(snapshot)
    # anything: a damaged file meets the parsers of Orbax, TensorStore and JSON
    except Exception as error:
        why = _line(error)
    host: Any = hosts.from_first(lambda: [snapshot.records, snapshot.origin, [] if why else snapshot.shards])
    snapshot = Snapshot(step, snapshot.state, *host)
    try:
        if snapshot.shards:
            clients = np.arange(snapshot.shards[-1]["of"]) if index is None else index
            states = _read_shards(folder, snapshot, template.clients, clients)
            snapshot = snapshot._replace(state=snapshot.state._replace(clients=states))
    # not raised here: the other processes wait in `gather`
    except Exception as error:
        why = _line(error)
    return snapshot, next(filter(None, hosts.gather(why)), "")


def steps(folder: str | Path) -> list[int]:
    """Return the steps that have a checkpoint, the newest first."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)


def origin_of(folder: str | Path) -> dict[str, Any] | None:
    """Return the origin in the newest checkpoint that can be read; None if there is none. Write nothing."""
    for step in steps(folder):
        try:
            return _read(Path(folder), step, records=ocp.args.JsonRestore())["records"]["origin"]
        except Exception:  # damaged: `latest` will say so
            continue
    return None


def set_aside(folder: str | Path, step: int) -> Path:
    """Move a checkpoint into the folder set-aside, beside that of the checkpoints. Return its new path."""
    # a run can be resumed from the same round more than once, so the name may be taken
    aside = Path(folder).parent / ASIDE
    aside.mkdir(exist_ok=True)
    paths = (aside / f"checkpoint-{step}{f'-{i}' if i else ''}" for i in range(10**6))
    free_path = next(path for path in paths if not path.exists())
    os.rename(Path(folder) / str(step), free_path)
    shards = _shards(Path(folder), step)
    if shards.is_dir():
        os.rename(shards, free_path / CLIENTS)
    return free_path


def digest_of_tree(tree: PyTree) -> str:
    """Return the sha256 of a tree: of the names, types, shapes and values of its arrays."""
    sums = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        # equal bytes under another shape or type are another tree
        sums.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}\n".encode())
        # as bytes, because bfloat16 has no buffer that hashlib takes; a view, not a copy
        sums.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sums.hexdigest()


def _restore(folder: Path, step: int, template: PyTree) -> Snapshot:
    """Read the snapshot of a step and check it, apart from the files of its shards.

    Raises:
      Exception: of any kind, if it is not intact.
    """
    host = _read(folder, step, records=ocp.args.JsonRestore())["records"]
    # states of clients are in the checkpoint, or in files beside it
    shards = host.get("shards", [])
    whole = template._replace(clients=()) if shards else template
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole)
    state = _read(folder, step, state=ocp.args.StandardRestore(shapes))["state"]
    snapshot = Snapshot(step, state, host["records"], host["origin"], shards)
    if _seal(snapshot) != host["sha256"]:
        raise ValueError("its content does not match its checksum")
    return snapshot._replace(state=jax.tree.map(jax.numpy.asarray, snapshot.state))


def _this_process() -> ocp.options.MultiprocessingOptions:
    """Return options with which Orbax takes this process for the only one.

    Only the first process writes checkpoints, and a barrier would wait for the others.
    """
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )


def _read(folder: Path, step: int, **items: Any) -> Any:
    """Read items of a checkpoint with Orbax."""
    path = folder.absolute() / str(step)
    if not (path / "_CHECKPOINT_METADATA").is_file():
        raise ValueError("it is not a checkpoint")
    with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(), multiprocessing_options=_this_process()
    ) as reader:
        return reader.restore(path, args=ocp.args.Composite(**items))


def _seal(snapshot: Snapshot) -> str:
    """Return the checksum of a snapshot: the same before it is written and after it is read."""
    shards = [snapshot.shards] if snapshot.shards else []
    host = json.dumps([snapshot.step, snapshot.records, snapshot.origin, *shards], sort_keys=True)
    return hashlib.sha256(f"{digest_of_tree(snapshot.state)} {host}".encode()).hexdigest()


def _unwritable(manager: ocp.CheckpointManager, error: Exception) -> InputError:
    """Return the error of a checkpoint that cannot be written."""
    return InputError(f"out: cannot write a checkpoint to {str(manager.directory)!r}: {_line(error)}")


def _line(error: Exception) -> str:
    """Return an error's text in one line, of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= 200:
        return text
    # TensorStore begins with the operation and ends with the reason
    return f"{text[:100]} ... {text[-95:]}"


# ---- states of clients in files beside the checkpoint ------------------------------------------------------


def clients_to_write(shards: Sequence[dict[str, Any]], changed: Bool[np.ndarray, " K"]) -> np.ndarray:
    """Return a mask [K] of the clients whose states the next checkpoint writes.

    They are those that changed; or all, if there are no files yet or too many of them.

    Args:
      shards: files of the last checkpoint.
      changed: the clients whose states may have changed since.
    """
    steps_of_files = {shard["step"] for shard in shards}
    copies = sum(len(_clients_of(shard)) for shard in shards) + changed.sum()
    if not shards or len(steps_of_files) >= MOST_STEPS or copies > MOST_COPIES * len(changed):
        return np.ones_like(changed)
    return changed


def newest_files(shards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the files that have the newest state of any client, in their order."""
    file_of_client = _file_of_client(shards)
    return [shard for number, shard in enumerate(shards) if (file_of_client == number).any()]


def save_shard(
    folder: Path, step: int, process: int, index: np.ndarray, clients: PyTree, of: int
) -> dict[str, Any]:
    """Write the states of some clients for the checkpoint of a step, atomically.

    Args:
      folder: of the checkpoints.
      step: of the checkpoint, which is saved after all processes have written.
      process: that writes.
      index: the clients' ids [n], in their order.
      clients: their states, leaves [n, ...].
      of: the number of all clients.

    Returns:
      The checkpoint's entry about the file: plain JSON values.

    Raises:
      InputError: if it cannot be written.
    """
    path = _shards(folder, step) / f"process-{process}.npz"
    try:
        with atomic(path) as temporary:
            np.savez(temporary, **dict(_named(clients)))
            sha256 = _sha256(temporary)
    except OSError as error:
        raise InputError(f"out: cannot write a checkpoint to {str(path)!r}: {_line(error)}") from None
    # ids as ranges: a million clients in a row are two numbers in the checkpoint
    runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1) if len(index) else []
    ranges = [[int(run[0]), int(run[-1]) + 1] for run in runs]
    file = {"step": step, "file": path.name, "sha256": sha256, "bytes": tree_bytes(clients)}
    return file | {"clients": ranges, "of": of}


def _read_shards(folder: Path, snapshot: Snapshot, template: PyTree, index: np.ndarray) -> PyTree:
    """Return the states of the clients `index`, leaves [n, ...], from the files that have them.

    Raises:
      ValueError: if a file has another checksum, or a client or a leaf is in none.
    """
    named = _named(template)
    leaves = [
        np.empty((len(index), *template_leaf.shape[1:]), template_leaf.dtype) for _, template_leaf in named
    ]
    file_numbers = _file_of_client(snapshot.shards)[index]
    missing = file_numbers < 0
    if missing.any():
        raise ValueError(f"it has no state of client {index[missing][0]}")
    for number in np.unique(file_numbers):
        shard = snapshot.shards[number]
        clients = _clients_of(shard)
        positions = np.flatnonzero(file_numbers == number)
        # from the ids that are asked for to rows of this file
        entry_of_client = np.zeros(shard["of"], int)
        entry_of_client[clients] = np.arange(len(clients))
        entries = entry_of_client[index[positions]]
        # earlier versions wrote all files of a checkpoint at its own step
        path = _shards(folder, shard.get("step", snapshot.step)) / shard["file"]
        _check_sha256(path, shard["sha256"])
        with np.load(path, allow_pickle=False) as file:
            for (name, template_leaf), leaf in zip(named, leaves, strict=True):
                states = file[name]
                # numpy's files know no bfloat16, and return its bytes as type void
                if states.dtype.kind == "V":
                    states = states.view(template_leaf.dtype)
                shape = (len(clients), *template_leaf.shape[1:])
                if states.dtype != template_leaf.dtype or states.shape != shape:
                    raise ValueError(f"{str(path)!r} has no {name} of this run's shape")
                leaf[positions] = states[entries]
    return jax.tree.structure(template).unflatten(leaves)


def _clients_of(shard: dict[str, Any]) -> Int[np.ndarray, " n"]:
    """Return the ids of the clients in a file, in its order."""
    return np.concatenate([np.arange(0), *(np.arange(*bounds) for bounds in shard["clients"])])


def _file_of_client(shards: Sequence[dict[str, Any]]) -> Int[np.ndarray, " K"]:
    """Return the position in `shards` of the file with each client's newest state; -1: in none."""
    file_of_client = np.full(shards[-1]["of"] if shards else 0, -1)
    # the older files first, so that the newest state of a client remains
    for number, shard in enumerate(shards):
        file_of_client[_clients_of(shard)] = number
    return file_of_client


def _forget_shards(folder: Path, written: Snapshot | None = None) -> None:
    """Remove the client states that belong neither to a complete checkpoint nor to one being written."""
    beside = folder.parent / CLIENTS
    if not beside.is_dir():
        return
    needed = set()
    if written is not None:
        needed |= _steps_of_files(written.step, written.shards)
    try:
        for step in steps(folder):
            records = _read(folder, step, records=ocp.args.JsonRestore())["records"]
            needed |= _steps_of_files(step, records.get("shards", ()))
    # a damaged checkpoint cannot say which files it needs, so all of them stay
    except Exception:
        return
    for path in beside.iterdir():
        if path.name not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _steps_of_files(step: int, shards: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of the folders that have the files of a checkpoint."""
    return {str(step), *(str(shard.get("step", step)) for shard in shards)}


def _named(clients: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of client states with their names in a file."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return [(f"clients/{name(key)}", leaf) for key, leaf in jax.tree.leaves_with_path(clients)]


def _shards(folder: Path, step: int) -> Path:
    """Return the folder of the client states beside a checkpoint."""
    return folder.parent / CLIENTS / str(step)


# ---- examples that a server replays ------------------------------------------------------------------------


def save_task(folder: str | Path, task: int, kept: ReplayBuffer) -> str:
    """Write the examples that a server replays of a task, atomically. Return the file's sha256."""
    path = _file(folder, task)
    named = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree.leaves_with_path(kept)}
    with atomic(path) as temporary:
        np.savez(temporary, **named)
        return _sha256(temporary)


def load_tasks(folder: str | Path, sha256: Sequence[str], template: ReplayBuffer) -> tuple[ReplayBuffer, ...]:
    """Return the examples that a server replays of the first tasks, in their order.

    Args:
      folder: of the files.
      sha256: their checksums.
      template: gives structure, types and the shapes of one example.

    Raises:
      InputError: if a file is missing or has other content.
    """
    return tuple(_load_task(_file(folder, task), digest, template) for task, digest in enumerate(sha256))


def check_tasks(folder: str | Path, sha256: Sequence[str]) -> None:
    """Check that the files of the first tasks have these checksums.

    Raises:
      ValueError: if a file is missing or has other content.
    """
    for task, digest in enumerate(sha256):
        _check_sha256(_file(folder, task), digest)


def _check_sha256(path: Path, sha256: str) -> None:
    """Check a file's checksum.

    Raises:
      ValueError: if the file is missing or has another one.
    """
    if not path.is_file() or _sha256(path) != sha256:
        raise ValueError(f"{str(path)!r} does not have the checksum in the checkpoint")


def _sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_task(path: Path, sha256: str, template: ReplayBuffer) -> ReplayBuffer:
    """Read the examples of a task; arguments and errors as of `load_tasks`."""
    try:
        if _sha256(path) != sha256:
            raise ValueError("it does not have the checksum in the checkpoint")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"resume: {str(path)!r} cannot be read: {reason(error)}") from None
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    count = len(arrays.get(".label", ()))
    leaves = []
    for key, like in paths:
        name = jax.tree_util.keystr(key)
        leaf = arrays.get(name)
        leaves.append(leaf)
        if leaf is None or leaf.dtype != like.dtype or leaf.shape != (count, *like.shape[1:]):
            raise InputError(f"resume: {str(path)!r} has no {name} of this run's shape")
    return structure.unflatten(leaves)


def _file(folder: str | Path, task: int) -> Path:
    """Return the file of a task's examples."""
    return Path(folder) / f"task-{task:03d}.npz"
