"""Damaged files for experiments/torture.py: of every kind that the program reads back, each damaged in a
random way and read in this process, by the function or command that reads it.

It must be named, refused or made again; what is read as intact must be what was written.
"""

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from torture_common import Outcome, called, one_line

from fcljax.errors import InputError

ROOT = Path(__file__).parent.parent


# ---- ways to damage a file ---------------------------------------------------------------------------------


def flip(rng: random.Random, file: Path) -> None:
    """Other bits, mostly one."""
    data = bytearray(file.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(rng: random.Random, file: Path) -> None:
    """Without its end."""
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def digit(rng: random.Random, file: Path) -> None:
    """Another digit, where there is one."""
    data = bytearray(file.read_bytes())
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if places:
        at = rng.choice(places)
        data[at] = ord("0") + (data[at] - ord("0") + rng.randrange(1, 10)) % 10
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[random.Random, Path], object]] = {
    "bits of": flip,
    "digits of": digit,
    "the end of": cut,
    "no": lambda rng, file: file.unlink(),
    "zeros for": lambda rng, file: file.write_bytes(bytes(file.stat().st_size)),
    "noise for": lambda rng, file: file.write_bytes(rng.randbytes(file.stat().st_size)),
    "more after": lambda rng, file: file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 99))),
}


def damaged(rng: random.Random, file: Path) -> tuple[str, bytes | None]:
    """Damage a file. Returns how, and its content, None if it is gone."""
    name = rng.choice(list(DAMAGES))
    DAMAGES[name](rng, file)
    return f"{name} {file.name}", file.read_bytes() if file.exists() else None


# ---- files of each kind ------------------------------------------------------------------------------------


def results(rng: random.Random, folder: Path, reference: Path) -> Outcome:
    """summary.json, metrics.jsonl, config.yaml or the digests of a finished run, as `compare` and `report`
    read them: they refuse it, or say that it has changed since the run."""
    folder.mkdir()
    names = ("summary.json", "metrics.jsonl", "config.yaml", "digests.json")
    for name in names:
        shutil.copy(reference / name, folder / name)
    file = folder / rng.choice(names)
    before = file.read_bytes()
    what, after = damaged(rng, file)
    command = rng.choice(("compare", "report"))
    code, out, err = called(command, str(folder))
    said = "changed since the run" in out + err or "cannot be read" in out + err
    what = f"{command}: {what}"
    # what is gone is no changed number
    if code == 0 and (said or after == before or after is None) or code == 2 and one_line(err):
        return Outcome("survived", what)
    return Outcome("different" if code == 0 else "other", f"{what}: exit code {code}: {err[-600:]}")


def checkpoints(rng: random.Random, folder: Path, _: Path) -> Outcome:
    """Any file of the last of two checkpoints: the one before it is used, or the last one is intact."""
    import fcljax.runs.checkpoint as runs

    draw = np.random.default_rng(0)
    snapshots = []
    for i in range(2):
        server, clients = draw.normal(size=(2, 50, 7)).astype(np.float32)
        state = runs.State({"w": server, "n": np.int32(i)}, clients, cast(Any, np.zeros(2, np.uint32)))
        snapshots.append(runs.Snapshot(8 + i, state, {"accuracy": [i / 7]}))
    with runs.open_checkpoints(folder / "checkpoints", 2) as manager:
        for each in snapshots:
            runs.save(manager, each)
        runs.finish(manager)
    last = folder / "checkpoints" / "9"
    file = rng.choice(sorted(path for path in last.rglob("*") if path.is_file()))
    what = damaged(rng, file)[0]
    said: list[str] = []
    with runs.open_checkpoints(folder / "checkpoints", 2) as manager:
        found = runs.latest(manager, snapshots[0].state, said.append)
    assert found is not None
    written = next(each for each in snapshots if each.step == found.step)
    same = (
        runs.digest_of_tree(found.state) == runs.digest_of_tree(written.state)
        and found.records == written.records
    )
    named = bool(said) == (found.step == 8)
    return Outcome("survived" if same and named else "different", f"{what}: {found.step}: {said}")


def kept(rng: random.Random, folder: Path, _: Path) -> Outcome:
    """What a server keeps of a finished task."""
    import fcljax.runs.checkpoint as runs
    from fcljax.types import ReplayBuffer

    arrays: Any = (np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(2), np.ones(2, bool))
    written = ReplayBuffer(*arrays)
    folder.mkdir()
    digest = runs.save_task(folder, 0, written)
    (file,) = folder.iterdir()
    before = file.read_bytes()
    what, after = damaged(rng, file)
    try:
        runs.check_tasks(folder, [digest])
    except ValueError:
        return Outcome("survived", what)
    return Outcome("survived" if after == before else "different", what)


def compiled(rng: random.Random, folder: Path, _: Path) -> Outcome:
    """A compiled program."""
    from fcljax.runs.compile_cache import CheckedCache

    said: list[str] = []
    cache = CheckedCache(str(folder), said.append)
    program = rng.randbytes(999)
    cache.put("jit_step-1", program)
    (file,) = folder.iterdir()
    what = damaged(rng, file)[0]
    found = cache.get("jit_step-1")
    gone = found is None and not file.exists()
    return Outcome("survived" if gone or found == program else "different", f"{what}: {said}")


def weights(rng: random.Random, folder: Path, _: Path) -> Outcome:
    """Weights in each of the formats: tensors of the same names, shapes and finite size are read, or it is
    refused in one line. Only zip files have checksums, so other bits of a number are not found elsewhere."""
    from safetensors.numpy import save_file

    from fcljax.models.weights.checkpoints import read_tensors

    sys.path.append(str(ROOT / "tests"))
    from torch_files import save_zip

    arrays: dict[str, Any] = {
        "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
        "b": np.ones(5, np.float32),
    }
    folder.mkdir()
    suffix = rng.choice((".pth", ".pth", ".npz", ".safetensors"))
    file = folder / f"w{suffix}"
    if suffix == ".pth":
        save_zip(file, arrays)
    elif suffix == ".npz":
        np.savez(file, **arrays)
    else:
        save_file(arrays, str(file), {"note": "1"})
    what = damaged(rng, file)[0]
    if not file.exists():
        return Outcome("survived", what)
    try:
        found = read_tensors(file)[0]
    except InputError as error:
        return Outcome("survived" if "\n" not in str(error) else "other", f"{what}: {error}")
    size = sum(each.nbytes for each in found.values())
    same = suffix == ".safetensors" or all(
        n in found and np.array_equal(found[n], a) for n, a in arrays.items()
    )
    return Outcome("survived" if same and size <= 10_000 else "different", f"{what}: {list(found)}")


def node_states(rng: random.Random, folder: Path, _: Path) -> Outcome:
    """The state that a Flower node keeps."""
    try:
        from fcljax.bridges.records import load_records, save_records, to_arrays
    except InputError:  # Flower is not installed
        return kept(rng, folder, _)
    file = folder / "state.npz"
    arrays = {"w": np.arange(9, dtype=np.float32)}
    save_records(file, {"state": to_arrays(arrays)})
    what = damaged(rng, file)[0]
    try:
        found = load_records(file)
    except InputError as error:
        return Outcome("survived" if "state-dir" in str(error) else "other", f"{what}: {error}")
    data = [each.data for each in found.get("state", {}).values()]
    same = not file.exists() or data == [each.data for each in to_arrays(arrays).values()]
    return Outcome("survived" if same else "different", what)


FILES = (results, results, checkpoints, checkpoints, kept, compiled, weights, weights, node_states)


def damaged_file(rng: random.Random, folder: Path, reference: Path) -> Outcome:
    """One of them, in an empty folder."""
    make = rng.choice(FILES)
    try:
        outcome = make(rng, folder, reference)
    except Exception as error:
        outcome = Outcome("other", f"Traceback: {type(error).__name__}: {error}")
    return outcome._replace(what=f"{make.__name__}: {outcome.what}")
