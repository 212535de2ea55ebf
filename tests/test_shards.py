"""States of clients in files beside checkpoints, which several processes may write and any number reads."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import ml_dtypes
import numpy as np
import pytest
import small_runs
from toys import same

from fcljax import cli
from fcljax import mesh as meshes
from fcljax.errors import InputError
from fcljax.runs import checkpoint, loop
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import CLIENTS, State
from fcljax.runs.hosts import ALONE, Hosts
from fcljax.runs.records import Records

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


class Changing:
    """A run of one process in which some clients change in every step, with its checkpoints; `after[step]` is
    its state then."""

    def __init__(self, folder, seed=0):
        self.manager = checkpoint.open_checkpoints(folder, 2)
        self.draw = np.random.default_rng(seed)
        self.after = {0: state(1)}
        self.shards = []

    def play(self, step):
        """Change a third of the clients and the server, and save; as `runs.loop` does. Return which were
        written."""
        changed = self.draw.random(COUNT) < 0.3
        before, new = self.after[step - 1], state(step)

        def mixed(old, drawn):
            return np.where(changed.reshape(-1, *[1] * (old.ndim - 1)), drawn, old)

        self.after[step] = new._replace(clients=jax.tree.map(mixed, before.clients, new.clients))
        chosen = checkpoint.clients_to_write(self.shards, changed)
        index = np.flatnonzero(chosen)
        clients = jax.tree.map(lambda x: x[index], self.after[step].clients)
        folder = Path(self.manager.directory)
        shard = checkpoint.save_shard(folder, step, 0, index, clients, COUNT)
        self.shards = checkpoint.newest_files([*self.shards, shard])
        server = self.after[step]._replace(clients=())
        checkpoint.save(self.manager, checkpoint.Snapshot(step, server, {"kept": []}, {}, self.shards))
        return chosen, changed


@pytest.mark.parametrize("most_steps", [3, pytest.param(64, marks=pytest.mark.long)])
def test_a_checkpoint_writes_changed_clients_alone_and_has_the_states_of_all(
    tmp_path, monkeypatch, most_steps
):
    monkeypatch.setattr(checkpoint, "MOST_STEPS", most_steps)
    run = Changing(tmp_path / "checkpoints")
    sizes = []
    for step in range(1, 13):
        chosen, changed = run.play(step)
        assert (chosen == changed).all() or chosen.all()
        sizes.append(chosen.sum())
        assert len({shard["step"] for shard in run.shards}) <= most_steps
        checkpoint.finish(run.manager)
        for kept in checkpoint.steps(tmp_path / "checkpoints"):
            found = checkpoint._restore(tmp_path / "checkpoints", kept, state(7))
            every = np.arange(COUNT)
            clients = checkpoint._read_shards(tmp_path / "checkpoints", found, state(7).clients, every)
            same(found.state._replace(clients=clients), run.after[kept])
        # no file is left that no checkpoint names
        files = {path.name for path in (tmp_path / CLIENTS).iterdir()}
        assert {str(shard["step"]) for shard in run.shards} <= files and len(files) <= most_steps + 2
    whole = [step for step, size in enumerate(sizes, 1) if size == COUNT]
    assert whole[0] == 1 and 1 < len(whole) <= 5  # MOST_COPIES: after four steps of a third, or most_steps


def test_a_kill_at_any_instant_of_a_write_leaves_a_checkpoint_of_this_step_or_the_last(tmp_path, monkeypatch):
    """Copies of the folder stand for what a kill leaves: before a file is there, when it is, after the
    checkpoint, and before each removal."""
    run, instants = Changing(tmp_path / "run" / "checkpoints"), []

    def killed_before(module, name):
        function = getattr(module, name)

        def call(*arguments, **options):
            copy = tmp_path / f"killed-{len(instants)}"
            # a file that Orbax moves while it is copied is as a kill may leave it
            with contextlib.suppress(shutil.Error):
                shutil.copytree(tmp_path / "run", copy)
            instants.append((step, name, copy / "checkpoints"))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    run.play(1)
    checkpoint.finish(run.manager)
    killed_before(checkpoint, "_sha256")
    killed_before(checkpoint, "_seal")
    killed_before(checkpoint, "_forget_shards")
    killed_before(shutil, "rmtree")
    for step in range(2, 7):
        run.play(step)
        checkpoint.finish(run.manager)
    monkeypatch.undo()
    assert {name for _, name, _ in instants} == {"_sha256", "_seal", "_forget_shards", "rmtree"}
    for step, name, folder in instants:
        said = []
        found = newest(folder, said=said)
        assert said == [] and found.step in (step, step - 1), (step, name)
        same(found.state, run.after[found.step])


def test_a_run_resumes_from_files_of_changed_clients_and_goes_on_with_them(tmp_path, monkeypatch):
    """`runs.loop` saves five steps, of which each changes a client, and is resumed before the last one."""
    engine = SimpleNamespace(mesh=None, place=lambda x: x)
    exp = Mock(spec=Experiment, engine=engine, metrics={}, sizes=SimpleNamespace(clients=COUNT))
    monkeypatch.setattr(loop, "state_shapes", lambda exp: state(1))
    session = loop.Session(None, tmp_path, loop.Observer(), ALONE)
    folder = tmp_path / loop.CHECKPOINTS
    after, shards = {0: jax.tree.map(jax.numpy.asarray, state(1))}, ()

    def saved(manager, step, shards):
        """Save step: client `step` has changed, and the server."""
        new = state(step)
        clients = jax.tree.map(lambda x, y: x.at[step].set(y[step]), after[step - 1].clients, new.clients)
        after[step] = loop.State(jax.numpy.asarray(new.server), clients, after[0].key)
        progress = loop.Progress(after[step], Records(), step, shards)
        changed = np.arange(COUNT) == step
        write, shards = loop._save_checkpoint(
            session, exp, loop.Journal(manager, {}, None), progress, changed
        )
        checkpoint.finish(manager)
        return write.size, shards

    with checkpoint.open_checkpoints(folder, 2) as manager:
        sizes = []
        for step in range(1, 5):
            size, shards = saved(manager, step, shards)
            sizes.append(size)
    # the states of all, then of one client; 16 bytes of server and key
    per_client = 4 * 3 * 2 + 2 + 1
    assert [size - 16 for size in sizes] == [COUNT * per_client, *3 * [per_client]]
    for _ in range(2):
        with checkpoint.open_checkpoints(folder, 2) as manager:
            progress = loop._begin(session, exp, manager)
            same(progress.state, after[progress.step])
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(progress.state.clients))
            assert progress.shards == shards
            if progress.step == 4:
                size, shards = saved(manager, 5, progress.shards)
                assert size - 16 == per_client and len(shards) == 5


@pytest.mark.long
def test_a_run_with_files_of_changed_clients_equals_one_with_whole_checkpoints(tmp_path, monkeypatch):
    """In every round, resumed from its middle, and with the newest file of a client damaged."""
    reference = small_runs.finished("icarl")
    monkeypatch.setattr(checkpoint, "BESIDE", 0)
    every = ["--checkpoint-every", "1", "--keep-checkpoints", "4"]
    out = tmp_path / "files"
    assert cli.main(["run", "icarl", *small_runs.OPTIONS["icarl"], *every, "--out", str(out)]) == 0
    small_runs.assert_same_run(out, reference, but=["config", "given"])
    steps = checkpoint.steps(out / "checkpoints")
    assert len(steps) == 4
    # the checkpoint that the resumed run begins with names files of two steps
    records = checkpoint.ocp.args.JsonRestore()
    host = checkpoint._read(out / "checkpoints", steps[1], records=records)["records"]
    assert len({shard["step"] for shard in host["shards"]}) == 2
    for damaged in (False, True):
        cut = shutil.copytree(out, tmp_path / f"cut-{damaged}")
        (cut / "summary.json").unlink()
        shutil.rmtree(cut / "checkpoints" / str(steps[0]))
        if damaged:
            (cut / CLIENTS / str(steps[1]) / "process-0.npz").write_bytes(b"damaged")
        assert cli.main(["run", "icarl", "--resume", str(cut)]) == 0
        small_runs.assert_same_run(cut, reference, but=["config", "given"])


def test_a_shard_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / CLIENTS).write_text("in the way")
    with pytest.raises(InputError, match="^out: cannot write a checkpoint to .*process-1.npz'"):
        checkpoint.save_shard(tmp_path / "checkpoints", 1, 1, np.arange(2), np.zeros(2), 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_process_saves_and_reads_is_what_its_devices_have(batch):
    """21 rows on eight devices, or on four pairs: here one process has all of them, each once."""
    mesh, whole = meshes.mesh_of(jax.devices(), batch), state(7).clients
    shared = meshes.put_shared(whole, mesh)
    index, part = meshes.process_part(shared, np.ones(COUNT, bool))
    same((index, part), (np.arange(COUNT), whole))
    some = np.arange(COUNT) % 5 == 1
    same(meshes.process_part(shared, some), (np.flatnonzero(some), jax.tree.map(lambda x: x[some], whole)))
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
