"""States of clients that several processes write for one checkpoint, and any number of processes reads."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from toys import same

from fcljax import mesh as meshes
from fcljax.errors import InputError
from fcljax.runs import checkpoint
from fcljax.runs.checkpoint import CLIENTS, State
from fcljax.runs.hosts import Hosts

COUNT = 21


def state(step):
    rng = np.random.default_rng(step)
    clients = {
        "mean": rng.normal(size=(COUNT, 3, 2)).astype(np.float32),
        "both": (rng.normal(size=COUNT).astype(ml_dtypes.bfloat16), np.arange(COUNT) % step == 1),
    }
    return State(np.float32([step, 2]), clients, np.uint32([0, 1]))


def save(manager, step, processes, committed=True):
    """As so many processes save it, which have every third client, or every fifth."""
    folder, whole = checkpoint.Path(manager.directory), state(step)
    shards = []
    for process in range(processes):
        index = np.arange(process, COUNT, processes)
        own = jax.tree.map(lambda x, index=index: x[index], whole.clients)
        shards.append(checkpoint.save_shard(folder, step, process, index, own, COUNT))
    if committed:
        snapshot = checkpoint.Snapshot(step, whole._replace(clients=()), {"kept": []}, {}, shards)
        checkpoint.save(manager, snapshot)


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 7 and 8, and of step 9 what was written by processes that were then killed."""
    with checkpoint.open_checkpoints(tmp_path / "checkpoints", 2) as manager:
        for step, processes in ((6, 2), (7, 3), (8, 5)):
            save(manager, step, processes)
        checkpoint.finish(manager)
        save(manager, 9, 2, committed=False)
    return tmp_path / "checkpoints"


def newest(folder, index=None, said=None):
    say = [].append if said is None else said.append
    return checkpoint.newest(folder, state(7), say, index=index)


def test_one_process_reads_what_several_have_written_bit_for_bit(folder):
    found = newest(folder)
    assert found.step == 8
    same(found.state, state(8))


def test_a_process_reads_the_files_of_its_own_clients_alone(folder):
    """Of five files with every fifth client those of clients 1 and 3."""
    for process in (0, 2, 4):
        (folder.parent / CLIENTS / "8" / f"process-{process}.npz").unlink()
    index = np.array([1, 3, 6, 18])
    found = newest(folder, index)
    assert found.step == 8
    same(found.state, state(8)._replace(clients=jax.tree.map(lambda x: x[index], state(8).clients)))


@pytest.mark.parametrize("damage", ["bits", "no file", "another step's"])
def test_a_damaged_shard_sets_its_checkpoint_aside_and_the_one_before_it_is_used(folder, damage):
    files, said = folder.parent / CLIENTS, []
    file = files / "8" / "process-4.npz"
    if damage == "bits":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "no file":
        file.unlink()
    else:
        shutil.copy(files / "9" / "process-1.npz", file)
    found = newest(folder, said=said)
    assert found.step == 7
    same(found.state, state(7))
    (line,) = said
    assert line.startswith("resume: checkpoint 8 is damaged (") and "process-4.npz' does not have the" in line
    aside = folder.parent / checkpoint.ASIDE / "checkpoint-8"
    assert (aside / CLIENTS / "process-0.npz").is_file() and not (files / "8").exists()


def test_a_client_that_is_in_no_file_is_missed(folder):
    """The list of files is under the checkpoint's checksum."""
    (file,) = (folder / "8" / "records").glob("metadata")
    host = json.loads(file.read_text())
    assert [each["of"] for each in host["shards"]] == [COUNT] * 5
    host["shards"].pop()
    file.write_text(json.dumps(host))
    assert newest(folder).step == 7


def test_files_of_clients_go_with_their_checkpoints_and_half_written_ones_with_the_next(folder):
    files = folder.parent / CLIENTS
    assert {path.name for path in files.iterdir()} == {"7", "8", "9"}
    with checkpoint.open_checkpoints(folder, 2) as manager:
        save(manager, 10, 2)
        checkpoint.finish(manager)
    assert {path.name for path in folder.iterdir()} == {"8", "10"}
    assert {path.name for path in files.iterdir()} == {"8", "10"}
    same(newest(folder).state, state(10))


def test_a_shard_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / CLIENTS).write_text("in the way")
    with pytest.raises(InputError, match="^out: cannot write a checkpoint to .*process-1.npz'"):
        checkpoint.save_shard(tmp_path / "checkpoints", 1, 1, np.arange(2), np.zeros(2), 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_process_saves_and_reads_is_what_its_devices_have(batch):
    """21 rows on eight devices, or on four pairs: here one process has all of them, each once."""
    mesh, whole = meshes.mesh_of(jax.devices(), batch), state(7).clients
    shared = meshes.put_shared(whole, mesh)
    index, part = meshes.process_part(shared, COUNT)
    same((index, part), (np.arange(COUNT), whole))
    index = meshes.process_rows(mesh, COUNT)
    same(index, np.arange(COUNT))
    again = meshes.put_process_rows(part, index, COUNT, mesh)
    same(jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, shared))
    assert all(x.sharding == y.sharding for x, y in zip(*map(jax.tree.leaves, (again, shared)), strict=True))


def test_processes_share_a_folder_if_all_of_them_see_it(tmp_path, monkeypatch):
    assert not Hosts().share(tmp_path)  # one process writes everything anyway
    monkeypatch.setattr(Hosts, "from_first", lambda self, function: function())
    for other in (True, False):
        monkeypatch.setattr(Hosts, "gather", lambda self, text, other=other: [text, str(other)])
        assert Hosts(0, 2).share(tmp_path) == other
    assert list(tmp_path.iterdir()) == []
