"""What a run needs to be resumed, on disk.

Checkpoints of the whole run, with Orbax: written in the background, committed atomically, the last n kept. On
a CPU, where the copy lies beside the run's own arrays, a large one is written before the next round. Each has
a checksum over its content. A damaged one is never read as if it were intact: it is set aside, and the one
before it is used.

Where several processes share a run, each writes the states of its own clients, to files beside the checkpoint
whose checksums it has. It is committed after all of them are written.

The examples that a server keeps of a finished task do not change any more, so they are not in checkpoints but
in a file of their own.
"""

import functools
import hashlib
import json
import os
import shutil
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
from fcljax.runs.hosts import ALONE, Hosts
from fcljax.types import PyTree, ReplayBuffer

CLIENTS = "clients"  # folder beside the checkpoints for the states of clients that each process writes
ASIDE = "set-aside"  # folder beside the checkpoints for those that are damaged or out of date
FILE = 2**23  # bytes of a file of arrays: until it is full, its content is in memory a second time
BESIDE = 2**26  # bytes of a state that is written while the next round runs on the same memory


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
    shards: Sequence[dict[str, Any]] = ()  # of `save_shard`; none: `state` has the clients' states


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
    """Start to write a snapshot; a large one on a CPU is written. The caller may change or donate the arrays.

    Raises:
      InputError: if this write or the one before it failed, because the disk is full or read-only.
    """
    # Orbax copies NumPy arrays before it returns; of others it may write what the next round makes of them.
    state = jax.tree.map(np.asarray, jax.device_get(snapshot.state))
    seal = _seal(snapshot._replace(state=state))
    host = {"records": snapshot.records, "origin": snapshot.origin, "sha256": seal}
    host |= {"shards": snapshot.shards} if snapshot.shards else {}
    arguments = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state, ocdbt_target_data_file_size=FILE), records=ocp.args.JsonSave(host)
    )
    try:
        manager.save(snapshot.step, args=arguments)  # waits for the write before it
    except Exception as error:
        raise _unwritable(manager, error) from error
    _forget_shards(Path(manager.directory), snapshot.step)
    if jax.default_backend() == "cpu" and sum(leaf.nbytes for leaf in jax.tree.leaves(state)) > BESIDE:
        finish(manager)


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
    """A snapshot that needs no files beside it."""


def latest(
    manager: ocp.CheckpointManager,
    template: PyTree,
    say: Callable[[str], None] = lambda line: None,
    check: Callable[[Snapshot], None] = _no_files,
) -> Snapshot | None:
    """`newest` of the checkpoints of a manager, for one process."""
    found = newest(Path(manager.directory), template, say, check)
    manager.reload()
    return found


def newest(
    folder: Path,
    template: PyTree,
    say: Callable[[str], None],
    check: Callable[[Snapshot], None] = _no_files,
    hosts: Hosts = ALONE,
    index: np.ndarray | None = None,
) -> Snapshot | None:
    """The newest intact snapshot, or None if there is none at all. Damaged ones after it are set aside.

    All processes call this together. The first one reads and checks the checkpoint, and each the states of
    its own clients where they are in files of their own.

    Args:
      folder: of the checkpoints.
      template: the structure, shapes and types of the state.
      say: called with a line for each damaged one.
      check: raises an exception for a snapshot that cannot be resumed, because a file beside it is damaged.
      hosts: the processes.
      index: of the clients of whom this process needs the states; None: all.

    Returns:
      In the first process all of the snapshot; in others zeros for arrays. If it has shards, the states of
      clients are those of `index`, in every process.

    Raises:
      InputError: if there are some and none can be read, or they have other shapes than this run; they stay
        where they are then.
    """
    damaged: dict[int, str] = {}
    for step in hosts.from_first(lambda: steps(folder)):
        snapshot, why = _read_together(folder, step, template, check, hosts, index)
        if not why:
            break
        damaged[step] = why
    else:
        if not damaged:
            return None
        step, why = next(iter(damaged.items()))
        others = f"; and none of the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise InputError(f"resume: checkpoint {step} in {str(folder)!r} cannot be read: {why}{others}")
    for step, why in damaged.items() if hosts.first else ():
        place = set_aside(folder, step)
        say(f"resume: checkpoint {step} is damaged ({why}); it is now {place}, and {snapshot.step} is used")
    return snapshot


def _read_together(
    folder: Path,
    step: int,
    template: PyTree,
    check: Callable[[Snapshot], None],
    hosts: Hosts,
    index: np.ndarray | None,
) -> tuple[Snapshot, str]:
    """The snapshot of a step, as `newest` returns it, and why it is not intact; "" if it is."""
    zeros = () if hosts.first else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template)
    found = Snapshot(step, zeros, {})
    why = ""
    try:
        if hosts.first:
            found = _restore(folder, step, template)
            check(found)
    except Exception as error:  # of Orbax, TensorStore and JSON: a damaged file may raise anything
        why = _line(error)
    host: Any = hosts.from_first(lambda: [found.records, found.origin, [] if why else found.shards])
    found = Snapshot(step, found.state, *host)
    try:
        if found.shards:
            own = np.arange(found.shards[-1]["of"]) if index is None else index
            clients = _read_shards(folder, found, template.clients, own)
            found = found._replace(state=found.state._replace(clients=clients))
    except Exception as error:
        why = _line(error)
    return found, next(filter(None, hosts.gather(why)), "")


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
    if (shards := _shards(Path(folder), step)).is_dir():
        os.rename(shards, place / CLIENTS)
    return place


def digest_of_tree(tree: PyTree) -> str:
    """sha256 of a tree: the names, types, shapes and values of its arrays."""
    sums = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        sums.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}\n".encode())
        sums.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # no copy
    return sums.hexdigest()


def _restore(folder: Path, step: int, template: PyTree) -> Snapshot:
    """The snapshot of a step, checked but for the files of its shards.

    Raises:
      Exception: of any kind, if it is not intact.
    """
    host = _read(folder, step, records=ocp.args.JsonRestore())["records"]
    shards = host.get("shards", [])
    whole = template._replace(clients=()) if shards else template
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole)
    state = _read(folder, step, state=ocp.args.StandardRestore(shapes))["state"]
    found = Snapshot(step, state, host["records"], host["origin"], shards)
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
    shards = [snapshot.shards] if snapshot.shards else []
    host = json.dumps([snapshot.step, snapshot.records, snapshot.origin, *shards], sort_keys=True)
    return hashlib.sha256(f"{digest_of_tree(snapshot.state)} {host}".encode()).hexdigest()


def _unwritable(manager: ocp.CheckpointManager, error: Exception) -> InputError:
    return InputError(f"out: cannot write a checkpoint to {str(manager.directory)!r}: {_line(error)}")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"  # the reason stands at the end


# ---- states of clients that each process writes ------------------------------------------------------------


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
      What the checkpoint says about the file: plain JSON values.

    Raises:
      InputError: if it cannot be written.
    """
    path = _shards(folder, step) / f"process-{process}.npz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            np.savez(temporary, **dict(_named(clients)))
            sha256 = _sha256(temporary)
    except OSError as error:
        raise InputError(f"out: cannot write a checkpoint to {str(path)!r}: {_line(error)}") from None
    runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1) if len(index) else []
    ranges = [[int(each[0]), int(each[-1]) + 1] for each in runs]
    return {"file": path.name, "sha256": sha256, "clients": ranges, "of": of}


def _read_shards(folder: Path, found: Snapshot, template: PyTree, index: np.ndarray) -> PyTree:
    """The states of these clients, leaves [n, ...]. Reads only the files that have some of them.

    Raises:
      ValueError: if a file has another checksum, or a client or a leaf is in none.
    """
    named = _named(template)
    missing = np.ones(len(index), bool)
    leaves = [np.empty((len(index), *like.shape[1:]), like.dtype) for _, like in named]
    for shard in found.shards:
        own = np.concatenate([np.arange(0), *(np.arange(*each) for each in shard["clients"])])
        _, to, at = np.intersect1d(index, own, return_indices=True)
        if not len(to):
            continue
        path = _shards(folder, found.step) / shard["file"]
        missing[to] = False
        _check_sha256(path, shard["sha256"])
        with np.load(path, allow_pickle=False) as file:
            for (name, like), leaf in zip(named, leaves, strict=True):
                rows = file[name]  # numpy has no bfloat16, and reads bytes
                rows = rows.view(like.dtype) if rows.dtype.kind == "V" else rows
                if rows.dtype != like.dtype or rows.shape != (len(own), *like.shape[1:]):
                    raise ValueError(f"{str(path)!r} has no {name} of this run's shape")
                leaf[to] = rows[at]
    if missing.any():
        raise ValueError(f"it has no state of client {index[missing][0]}")
    return jax.tree.structure(template).unflatten(leaves)


def _forget_shards(folder: Path, *written: int) -> None:
    """Remove the files of clients' states that belong to no checkpoint, neither to a complete one nor to one
    that is being written."""
    beside = folder.parent / CLIENTS
    needed = {str(step) for step in (*steps(folder), *written)}
    for path in beside.iterdir() if beside.is_dir() else ():
        if path.name not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _named(clients: PyTree) -> list[tuple[str, Any]]:
    """Leaves of the states of clients, with their names in a file."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return [(f"clients/{name(key)}", leaf) for key, leaf in jax.tree.leaves_with_path(clients)]


def _shards(folder: Path, step: int) -> Path:
    return folder.parent / CLIENTS / str(step)


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
        _check_sha256(_file(folder, task), each)


def _check_sha256(path: Path, sha256: str) -> None:
    if not path.is_file() or _sha256(path) != sha256:
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
    count = len(found.get(".label", ()))
    leaves = []
    for key, like in paths:
        name = jax.tree_util.keystr(key)
        leaf = found.get(name)
        leaves.append(leaf)
        if leaf is None or leaf.dtype != like.dtype or leaf.shape != (count, *like.shape[1:]):
            raise InputError(f"resume: {str(path)!r} has no {name} of this run's shape")
    return structure.unflatten(leaves)


def _file(folder: str | Path, task: int) -> Path:
    return Path(folder) / f"task-{task:03d}.npz"
