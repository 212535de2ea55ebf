"""Several devices share the work of a run, and give the numbers of one: clients, evaluations and features."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
import toys
from small_runs import OPTIONS, timeless
from test_conformance import OPTIONS as OPTIONS_OF
from toys import FROZEN, KEY, TOYS, same

from fcljax import cli
from fcljax import mesh as meshes
from fcljax.data.store import Split
from fcljax.data.streaming import Host, ready
from fcljax.federated import engine as engines
from fcljax.federated.client_loop import Merging
from fcljax.federated.engine import (
    Exchange,
    Lanes,
    RoundInputs,
    begin_clients,
    init_clients,
    run_chunks,
    run_round,
)
from fcljax.federated.schedule import phase_steps, plan_round
from fcljax.mesh import add_over_devices, mesh_of, on_each
from fcljax.runs.predict import make_features, make_predict
from fcljax.types import RoundContext, Task

ROWS, WIDTH, CLASSES, BATCH = 150, 12, 5, 4


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


# ---- clients -----------------------------------------------------------------------------------------------


def test_the_devices_share_the_client_work_of_a_round(mesh):
    """80 clients of 1 to 60 rows on 8 devices of 2 lanes. What each device has received says which clients it
    has played: every client once, and all devices together do at least 0.9 of what 8 could in the time of the
    busiest."""
    data, rng, clients, devices = toys.examples(count=400), np.random.default_rng(0), 80, mesh.size
    counts = np.clip(rng.gamma(1.0, 12.0, clients), 1, 60).astype(int)
    owned = [rng.choice(np.arange(1, 400), count, replace=False) for count in counts]
    partition = toys.make_partition(owned, np.asarray(data.label))
    engine = toys.build(TOYS["two_pass"](), [partition], Lanes(2 * devices, "vmap"), mesh=mesh)
    player, task = engine.players[0], toys.tasks()[0]
    program = player.round.program
    chunks, (useful, paid) = plan_round(
        program, partition, np.arange(clients), 0, 2 * devices, player.capacity
    )
    server = jax.jit(engine.method.init)(KEY, FROZEN)
    states = init_clients(engine.method, server, clients, KEY)
    round_context = RoundContext.on_host(FROZEN, task, 0, False)
    played, most = np.zeros((devices, clients), bool), 0
    for chunk in chunks:
        carry = received_by_devices(engine, player, chunk, round_context, server, states, data)
        found, ids = np.asarray(carry.accumulator.valid), chunk.id.reshape(devices, -1)  # [devices, slots]
        assert (found == (ids < clients)).all()
        for device in range(devices):
            assert not played[:, ids[device][found[device]]].any()
            played[device, ids[device][found[device]]] = True
        most += int(sum(chunk.ticks))
    assert (played.sum(axis=0) == 1).all()
    steps = sum(phase_steps(counts, phase.view) for phase in program.phases)
    of_device = played @ steps  # lanes' ticks that each device has used
    assert of_device.sum() == useful and paid == 2 * devices * most
    assert of_device.sum() / (devices * of_device.max()) > 0.9
    assert of_device.sum() / (devices * 2 * most) > 0.9  # and of the ticks for which the devices wait


@pytest.mark.long
def test_a_bad_upload_on_one_device_is_left_out_of_all(mesh):
    """The devices find it together, though one of them has it."""
    data, partitions = toys.examples(), toys.partitions(toys.examples())
    bad = np.array(data.input)
    bad[partitions[0].indices[partitions[0].offset[1]], 0, 0, 1] = np.nan  # client 3, of the first device
    poisoned, found = data._replace(input=jnp.asarray(bad)), []
    for own in (None, mesh):
        lanes = Lanes(1 if own is None else own.size, "loop")
        engine = toys.build(TOYS["gathering"](), partitions, lanes, mesh=own)
        server, states = toys.begin_run(engine.method)
        ids, first = np.array([0, 1, 3, 6]), toys.stack(states)
        inputs = RoundInputs(FROZEN, poisoned, partitions[0], ids, toys.tasks()[0], 0, KEY)
        found.append(run_round(engine, server, first, inputs))
    (server, states, report), (shared, others, told) = found
    toys.close(shared, server)
    toys.close(others, states)
    assert (report.rejected, told.rejected) == (1, 1) and report.participants == told.participants == 4


def test_sums_over_eight_devices_are_added_in_their_order_bit_for_bit(mesh):
    """As a loop on the host adds them; in another order the bits are others. Of flags it is whether any is
    set."""
    x = np.random.default_rng(0).normal(size=(mesh.size, 1000)).astype(np.float32)

    def summed(x):
        return add_over_devices(x[0], mesh), add_over_devices(x[0] > 2.5, mesh)

    found, some = jax.jit(on_each(summed, mesh, (meshes.split(),), meshes.WHOLE))(x)
    in_order = functools.reduce(np.add, x)
    same(np.asarray(found), in_order)
    assert (functools.reduce(np.add, x[::-1]) != in_order).any()
    assert (np.asarray(some) == (x > 2.5).any(axis=0)).all() and some.any()


def test_rows_that_devices_share_are_read_and_written_as_on_one(mesh):
    """Each device asks for three of 16 rows; of those that are written, some do not exist."""
    rng = np.random.default_rng(0)
    whole = {
        "a": rng.normal(size=(16, 3)).astype(np.float32),
        "b": (np.arange(16) % 3 == 0, np.zeros((16, 0), np.float32)),
    }
    asked = rng.integers(0, 16, 3 * mesh.size).astype(np.int32)
    target = rng.permutation(40)[: 3 * mesh.size].astype(np.int32)
    new = jax.tree.map(lambda x: rng.permuted(x.repeat(3, axis=0), axis=0)[: 3 * mesh.size], whole)
    parts = meshes.split()
    take = on_each(functools.partial(meshes.take_rows, mesh=mesh), mesh, (parts, parts), parts)
    write = on_each(functools.partial(meshes.write_rows, mesh=mesh), mesh, (parts,) * 3, parts)
    same(jax.jit(take)(whole, asked), jax.tree.map(lambda x: x[asked], whole))
    expected = jax.tree.map(np.copy, whole)
    for place, row in zip(target, range(len(target)), strict=True):
        if place < 16:
            jax.tree.map(lambda old, x, p=place, r=row: old.__setitem__(p, x[r]), expected, new)
    same(jax.jit(write)(whole, target, new), expected)
    assert (target >= 16).any() and len(set(target)) == len(target)


@pytest.mark.parametrize("room", [1, 2**20])
def test_what_the_devices_share_comes_back_to_the_host_in_pieces(room, mesh, monkeypatch):
    """20 rows become 24, three on each device; collected one row of each device at a time, or all at once."""
    monkeypatch.setattr(meshes, "COLLECTED", room)
    rows = {"a": np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32), "b": np.arange(20) > 7}
    shared = meshes.put_shared(rows, mesh)
    assert all(len(shard.data) == 3 for x in shared.values() for shard in x.addressable_shards)
    same(jax.tree.map(lambda x: meshes.collect(x)[:20], shared), rows)
    same(jax.tree.map(lambda x: x[:20], meshes.on_host(shared)), rows)


@pytest.mark.long
def test_what_belongs_to_clients_lies_in_parts_and_no_device_is_sent_all_of_it(mesh):
    """Of 24 participants a device has the entries of three, and slots for twice as many. What is merged goes
    from device to device; nothing with an axis for all participants or all slots is gathered or added."""
    owned = np.array_split(np.arange(1, 97), 24)
    partition = toys.make_partition(list(owned), np.asarray(toys.examples().label))
    engine = toys.build(toys.remembering(), [partition], Lanes(mesh.size, "loop"), mesh=mesh)
    (player,) = engine.players
    assert player.capacity.slots == 6
    (chunk,), _ = plan_round(player.round.program, partition, np.arange(24), 0, mesh.size, player.capacity)
    states = meshes.put_shared(init_clients(engine.method, jnp.zeros(3), 24, KEY), mesh)
    accumulator = player.empty()
    carry = player.open(accumulator, states, chunk)
    parts = {"states": (states, 3), "entries": ((accumulator.gather, accumulator.valid), 3)}
    for tree, rows in (*parts.values(), ((carry.states, carry.accumulator.gather), 1)):
        assert {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(tree)} == {rows}
    assert carry.accumulator.gather.shape == (mesh.size, 6, 3)
    merged = Merging(jnp.int32(0), jnp.int32(0), np.bool_(False))
    text = player.close.lower(accumulator, states, carry, chunk, merged).compile().as_text()
    assert "collective-permute" in text and "all-gather" not in text and "all-to-all" not in text
    added = re.findall(r"= \(?(\S+?)\S* all-reduce\(", text)
    assert added and not any(re.search(r"\[(24|48|6|3),", shape) for shape in added), added


@pytest.mark.long
def test_the_host_waits_once_for_all_chunks_of_a_round():
    """Five chunks of one client: how often it reads how far they are merged."""
    data, reads = toys.examples(), []
    partitions = toys.partitions(data)
    engine = toys.build(TOYS["gathering"](), partitions, Lanes(1, "loop"), slots=1)
    (player,) = engine.players

    class Progress:
        """Chunks that are merged, on the device."""

        def __init__(self, value):
            self.value = value

        def __int__(self):
            reads.append(int(self.value))
            return reads[-1]

    def close(accumulator, states, carry, chunk, merged):
        if isinstance(merged.chunks, Progress):
            merged = merged._replace(chunks=merged.chunks.value)
        *both, done = player.close(accumulator, states, carry, chunk, merged)
        return *both, Progress(done)

    watched = engine._replace(players=(player._replace(close=close),))
    found = []
    for each in (engine, watched):
        server, states = toys.begin_run(engine.method)
        inputs = RoundInputs(FROZEN, data, partitions[0], np.array([0, 1, 3, 5, 6]), toys.tasks()[0], 0, KEY)
        found.append(run_round(each, server, toys.stack(states), inputs))
    assert reads == [5]
    same(found[0][:2], found[1][:2])


@pytest.mark.long
def test_a_server_that_accelerators_share_gives_the_numbers_of_one_on_every_device(monkeypatch):
    """FPPL's server, whose prototypes of four clients lie on two devices, and the stack of uploads that it
    reads. XLA divides its work as it would on accelerators."""
    method, pair, found = (
        micro.method_of("fppl", batch_size=4, **OPTIONS_OF["fppl"]),
        mesh_of(jax.devices()[:2]),
        [],
    )
    for shared in (False, True):
        with monkeypatch.context() as patch:
            if shared:
                patch.setattr(meshes, "SHARED", 1)
                for module in (meshes, engines):
                    patch.setattr(module, "keeps_order", lambda mesh: False)
            engine = micro.engine_of(method, mesh=pair)
            (server, states), reports = micro.begin(method), []
            for round_ in range(2):
                ids = np.flatnonzero(micro.PARTITIONS[0].count)
                inputs = RoundInputs(
                    micro.FROZEN, micro.DATA, micro.PARTITIONS[0], ids, micro.STREAM[0], round_, KEY
                )
                server, states, report = run_round(engine, server, states, inputs)
                reports.append(report.metrics)
            parts = [x for x in jax.tree.leaves(server) if x.sharding.shard_shape(x.shape) != x.shape]
            assert bool(parts) == shared
            found.append((meshes.on_host(server), reports))
    (whole, metrics), (parted, its_metrics) = found
    toys.close(parted, whole, atol=1e-4)
    for ours, expected in zip(its_metrics, metrics, strict=True):
        assert ours == pytest.approx(expected, rel=1e-3)


@pytest.mark.long
def test_a_run_goes_on_on_another_number_of_devices(mesh):
    """Two rounds, the second on two devices, or on one, with what the first left on the host: the numbers of
    two rounds on eight, up to rounding. Seven clients are eight entries on eight and on two devices."""
    data = toys.examples()
    partitions, ids = toys.partitions(data), np.array([0, 1, 3, 5, 6])

    def engine(devices):
        own = mesh_of(jax.devices()[:devices]) if devices > 1 else None
        return toys.build(TOYS["remembering"](), partitions, Lanes(devices, "loop"), mesh=own)

    def play(engine, server, states, round_):
        inputs = RoundInputs(FROZEN, data, partitions[0], ids, toys.tasks()[0], round_, KEY)
        server, states, _ = run_round(engine, server, meshes.put_shared(states, engine.mesh), inputs)
        return meshes.on_host(server), jax.tree.map(lambda x: x[: toys.CLIENTS], meshes.on_host(states))

    eight = engine(8)
    server, _ = toys.begin_run(eight.method)
    states = begin_clients(eight, server, toys.CLIENTS, toys.fold(KEY, 1))
    assert jax.tree.leaves(states)[0].shape[0] == 8
    first = play(eight, server, states, 0)
    expected = play(eight, *first, 1)
    for devices in (2, 1):
        toys.close(play(engine(devices), *first, 1), expected, atol=1e-6)


def received_by_devices(engine, player, chunk, round_context, server, states, data):
    """The carry [devices, ...] of a chunk of clients, before what the devices received is put together."""
    kept = []
    close = lambda accumulator, states, carry, chunk, merged: (
        kept.append(carry),
        (accumulator, states, merged.chunks + 1),
    )[1]
    round_context, server, data, key = engine.place((round_context, server, data, KEY))
    states = meshes.put_shared(states, engine.mesh)
    broadcast = engine.broadcast(round_context, server)
    engine = engine._replace(players=(player._replace(close=close),))
    exchange = Exchange(0, round_context, broadcast, None, None, key)
    run_chunks(engine, [chunk], exchange, states, data)
    return kept[0]


# ---- predictions and features ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split():
    """Images of noise, and the task of all classes."""
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (ROWS, 2, 2, 3)).astype(np.uint8)
    return Split(image, rng.integers(0, CLASSES, ROWS).astype(np.int32))


MODEL = jnp.asarray(np.random.default_rng(2).normal(size=(WIDTH, CLASSES)), jnp.float32)


def read(split, rows):
    return split.input[rows].reshape(-1, WIDTH) / jnp.float32(255)


def logits(round_context, model, batch):
    return jnp.tanh(batch.input @ model) * round_context.frozen


TURN = RoundContext.on_host(
    jnp.float32(2), Task(np.int32(0), np.arange(2), *[np.ones(CLASSES, bool)] * 2), 0, True
)


@pytest.mark.parametrize("rows", [[*range(ROWS)], [3, 149, 7], [*range(0, 100, 3)]])
def test_predictions_of_eight_devices_are_those_of_one_bit_for_bit(rows, split, mesh):
    """Of more rows than the devices take at a time, of fewer than there are devices, and of some."""
    task_of = np.array([0, 0, 1, 1, 1])
    one, eight = (make_predict(logits, read, BATCH, ROWS, each) for each in (None, mesh))
    rows = np.array(rows)
    expected = one(TURN, (MODEL,), ready(split, None), rows, task_of)
    assert len(np.unique(expected.confidence)) > 1 and expected.label.shape == rows.shape
    same(eight(TURN, (MODEL,), ready(split, mesh), rows, task_of), expected)
    same(eight(TURN, (MODEL,), Host(split, 3 * BATCH), rows, task_of), expected)


def test_images_that_fill_up_a_batch_are_padding(split, mesh):
    """37 images in batches of 4: the last has 1, and its mask says so, wherever images are."""

    def count(round_context, model, batch):
        return jax.nn.one_hot(jnp.full(len(batch.mask), jnp.sum(batch.mask)), 5) + 0 * model[0, 0]

    one, eight = (make_predict(count, read, BATCH, ROWS, each) for each in (None, mesh))
    rows, expected = np.arange(37), [4] * 36 + [1]
    for predict, data in (
        (one, ready(split, None)),
        (one, Host(split, 3 * BATCH)),
        (eight, ready(split, mesh)),
    ):
        assert predict(TURN, (MODEL,), data, rows, np.zeros(5, int)).label.tolist() == expected


def test_each_device_predicts_a_part_of_the_rows(split, mesh):
    """Which device has seen which row, as the predicted class of a model that tells the device's number."""

    def tell(round_context, model, batch):
        return jax.nn.one_hot(jnp.full(len(batch.index), jax.lax.axis_index("clients")), 8) + 0 * model[0, 0]

    predict = make_predict(tell, read, BATCH, ROWS, mesh)
    found = predict(TURN, (MODEL,), ready(split, mesh), np.arange(ROWS), np.zeros(8, int)).label
    assert found.tolist() == (np.arange(ROWS) // BATCH % 8).tolist()


def test_a_row_whose_logits_are_not_finite_has_no_predicted_class(split):
    """And no confidence: NaN is not the first class. A class that may not be predicted has -inf."""
    rule_out = jnp.array([-jnp.inf, 0, 0, 0, 0])
    odd = jnp.array([jnp.nan, jnp.inf, 1.0, -jnp.inf])

    def tell(round_context, model, batch):
        return jnp.zeros((len(batch.index), CLASSES)).at[:, 3].set(odd[batch.index % 4]) + rule_out

    predict = make_predict(tell, read, BATCH, ROWS)
    found = predict(TURN, (MODEL,), ready(split, None), np.arange(4), np.zeros(CLASSES, int))
    assert found.label.tolist() == found.label_in_task.tolist() == [-1, -1, 3, 1]
    assert np.isnan(found.confidence).tolist() == [True, True, False, False]


@pytest.mark.parametrize("host", [False, True])
def test_features_of_eight_devices_are_those_of_one_bit_for_bit(host, split, mesh):
    told = []
    features = lambda model, image: image @ model
    one = make_features(features, read, BATCH)(MODEL, ready(split, None))
    eight = make_features(features, read, BATCH, told.append, mesh)
    found = eight(MODEL, Host(split, 2 * BATCH) if host else ready(split, mesh))
    assert sum(told) == ROWS
    same(np.asarray(found), np.asarray(one))


def test_features_of_splits_of_all_sizes_come_from_one_compiled_loop(split):
    """Training and test images, some or all of them."""
    traced = []

    def features(model, image):
        traced.append(image.shape)
        return image @ model

    compute, whole = make_features(features, read, BATCH), ready(split, None)
    half = jax.tree.map(lambda x: x[: ROWS // 2], whole)
    found = [compute(MODEL, whole), compute(MODEL, half), compute(MODEL, whole, np.array([7, 3]))]
    assert len(traced) == 1
    same(found[1], found[0][: ROWS // 2])
    same(found[2], found[0][np.array([7, 3])])


# ---- commands ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_on_two_devices_gives_the_numbers_of_one(tmp_path):
    """Images on the devices and images that stream give the same bits; one device gives others by rounding.
    Counts, and what comes of the same predictions, are exact."""
    common = ["run", "linear", *OPTIONS["linear"], "--tasks", "2", "--rounds", "2", "--lanes", "2"]
    ways = {"one": [], "two": ["--devices", "2"], "streamed": ["--devices", "2", "--data-budget", "2"]}
    for name, way in ways.items():
        assert cli.main([*common, *way, "--out", str(tmp_path / name)]) == 0
    one, two, streamed = (timeless(tmp_path / name, but=("config", "given")) for name in ways)
    assert two == streamed
    assert two["traces"] == one["traces"] == 1
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ways]
    for ours, expected in zip(map(json.loads, logs[1]), map(json.loads, logs[0]), strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert ours["participants"] == expected["participants"]
    assert two["A_avg"] == pytest.approx(one["A_avg"], abs=0.01)
    for exact in ("client_state", "trainable_params", "rejected_uploads", "rounds_without_upload"):
        assert two[exact] == one[exact]


def test_embed_refuses_devices_that_are_not_there_in_one_line(tmp_path, capsys):
    assert cli.main(["embed", "--devices", "99", "--out", str(tmp_path / "out.npz")]) == 2
    assert capsys.readouterr().err == "fcljax: devices: 99 requested; nearest valid value: 8\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("backend", "flags", "options"),
    [
        (None, "", {"xla_backend_optimization_level": 1}),
        (None, "--xla_backend_optimization_level=3", {}),
        ("gpu", "", {"xla_allow_excess_precision": False}),
        ("tpu", "--xla_allow_excess_precision=true", {}),
    ],
)
def test_an_option_of_the_compiler_that_the_user_names_is_kept(backend, flags, options, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert meshes.compiler_options(backend) == options


@pytest.mark.parametrize(
    ("version", "flags", "added"),
    [
        ("0.10.2", "", {"xla_cpu_use_fusion_emitters": False}),
        ("0.10.2", "--xla_cpu_use_fusion_emitters=true", {}),
        ("0.11.0", "", {}),
    ],
)
def test_the_tested_jaxlib_compiles_lean_programs_in_less_memory(version, flags, added, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(meshes.jaxlib, "__version__", version)
    assert meshes.compiler_options(lean=True) == meshes.compiler_options() | added
    assert meshes.compiler_options("tpu", lean=True) == meshes.compiler_options("tpu")
    searched = meshes.compiler_options("gpu")
    assert meshes.compiler_options("gpu", lean=True) == searched | {"xla_gpu_autotune_level": 0}


@pytest.mark.parametrize(("least", "lean"), [(engines.LEAN_PARAMETERS, True), (1, False)])
def test_the_programs_of_an_engine_are_lean_where_its_network_is_small(least, lean, monkeypatch):
    asked = []
    monkeypatch.setattr(engines, "LEAN_PARAMETERS", least)
    monkeypatch.setattr(meshes, "compiler_options", lambda backend=None, lean=False: asked.append(lean) or {})
    micro.engine_of(micro.method_of("linear"))
    assert set(asked) == {lean}
