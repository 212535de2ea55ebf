"""Fewer examples at a time: the update is the same, and what is chosen fits the memory."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import NETWORK, PARTITIONS, SIZES, STREAM, TINY, begin, engine_of, method_of, receive
from test_adapters import VARIANTS
from test_conformance import OPTIONS

from fcljax import config
from fcljax.errors import InputError
from fcljax.federated.engine import Engine, Lanes
from fcljax.mesh import mesh_of
from fcljax.models.microbatch import in_pieces
from fcljax.models.shapes import CONVNETS
from fcljax.models.vit import vit_network
from fcljax.models.weights.pretrained import load_backbone
from fcljax.runs import fit, rounds
from fcljax.runs import machine as machine_
from fcljax.runs.build import Experiment, build, make_method
from fcljax.runs.features import with_queries
from fcljax.runs.programs import programs_of
from fcljax.runs.records import Clock, Records
from fcljax.types import Sizes

REMAT = vit_network(TINY, autoencoder=NETWORK.autoencoder, remat=True)
# Adam would make differences of rounding in gradients near zero as large as the gradients
ONE = Lanes(1, "loop")
STEADY = dict(optimiser="sgd", lr=0.1, batch_size=8, epochs=2)
PAPERS = ("fppl", "pilora", "hepco", "pmae", "vfcl", "ewc", "lwf")


def steady(name, **values):
    """A method of a size that fits the network of the tests."""
    return method_of(name, **OPTIONS[name] | STEADY | values)


def uploads(method, lanes=ONE, mesh=None):
    """What clients with 9, 4 and 7 examples send after a round, and their losses."""
    engine, (server, states) = engine_of(method, lanes, mesh=mesh), begin(method)
    got, _ = receive(engine, 0, server, states, PARTITIONS[0], np.array([0, 2, 3]), STREAM[0])
    return got.mean, got.sum, got.gather, got.metrics


def alike(one, other):
    """1e-4 of the largest value of each array: sums in another order."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1e-2, np.abs(a).max(initial=0)))


def test_pieces_are_never_larger_than_asked_and_give_values_and_gradients_of_the_whole():
    seen = []

    def function(x):
        seen.append(len(x))
        return jnp.sin(x) * scale

    x, scale = jnp.arange(14.0).reshape(7, 2), jnp.float32(3.0)
    np.testing.assert_allclose(in_pieces(function, x, 3), jnp.sin(x) * 3, rtol=1e-6)
    assert set(seen) == {3}  # 3 + 3 + 1 and two zeros
    slope = jax.grad(lambda x: jnp.sum(in_pieces(lambda y: jnp.sin(y) * scale, x, 3)))(x)
    np.testing.assert_allclose(slope, 3 * jnp.cos(x), rtol=1e-6)


@pytest.mark.long
def test_what_is_not_an_images_own_is_not_divided():
    found = uploads(method_of("fedavg", adapter="vpt", vpt_length=2, vpt_blocks=2, microbatch=2, **STEADY))
    alike(uploads(method_of("fedavg", adapter="vpt", vpt_length=2, vpt_blocks=2, **STEADY)), found)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [ONE, Lanes(2, "vmap")], ids=["one", "vmap"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_in_microbatches_or_with_blocks_computed_again_send_the_same(variant, lanes):
    name = "fppl" if variant.startswith("prompts") else "fedavg"
    plain = uploads(method_of(name, **STEADY, **VARIANTS[variant]), lanes)
    alike(plain, uploads(method_of(name, microbatch=3, **STEADY, **VARIANTS[variant]), lanes))
    alike(plain, uploads(method_of(name, network=REMAT, **STEADY, **VARIANTS[variant]), lanes))


@pytest.mark.long
@pytest.mark.parametrize("name", PAPERS)
def test_every_papers_clients_send_the_same_in_microbatches(name):
    alike(uploads(steady(name)), uploads(steady(name, microbatch=3)))


def shared(method, batch):
    """`uploads` of eight devices, of which `batch` share the batches of a client."""
    return uploads(method, Lanes(8 // batch, "loop"), mesh_of(jax.devices(), batch))


@pytest.mark.long
def test_devices_that_share_a_batch_compute_a_part_each_and_send_the_same():
    """8 images a step, 2 on each of 4 devices; two groups of devices share three clients."""
    seen = set()

    def apply(params, image, injection, train, mask=None):
        seen.add(len(image))
        return NETWORK.apply(params, image, injection, train, mask)

    values = dict(adapter="vpt", vpt_length=2, vpt_blocks=2, **STEADY)
    found = shared(method_of("fedavg", network=NETWORK._replace(apply=apply), **values), 4)
    assert 2 in seen
    alike(uploads(method_of("fedavg", **values)), found)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_whose_batches_are_shared_send_the_same_with_every_adapter(variant):
    method = method_of("fppl" if variant.startswith("prompts") else "fedavg", **STEADY, **VARIANTS[variant])
    alike(uploads(method), shared(method, 2))


@pytest.mark.long
@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("name", PAPERS)
def test_every_papers_clients_send_the_same_on_a_mesh_of_clients_and_batches(name, batch):
    method = steady(name)
    alike(uploads(method, Lanes(8, "loop"), mesh_of(jax.devices())), shared(method, batch))


def test_devices_are_shared_out_as_asked_or_as_pays(monkeypatch):
    """Three clients on eight devices. A CPU shares no batch by itself."""
    monkeypatch.setattr(machine_, "forward_flops", lambda backbone: 1e12)

    def found(backend="cpu", **given):
        cfg = config.resolve(config.from_mapping("linear", given, "test"))
        machine = machine_.Machine(backend, mesh_of(jax.devices()))
        lanes, mesh = machine_.plan_lanes(
            cfg, method_of("linear"), PARTITIONS, load_backbone(None, None, None), machine
        )
        return lanes.count, tuple(mesh.shape.values())

    assert found() == (8, (8,))
    assert found(batch_devices=4) == (2, (2, 4))
    assert found("tpu") == (1, (1, 8))  # of 1, 1 and 1 steps: three steps of an eighth
    assert found("tpu", batch_devices=1) == (8, (8,))
    with pytest.raises(InputError, match="batch_devices: 3 do not divide 8 devices; nearest valid value: 2"):
        found(batch_devices=3)
    with pytest.raises(
        InputError, match="lanes: 3 lanes cannot be split over 2 devices; nearest valid value: 4"
    ):
        found(batch_devices=4, lanes=3)


def test_a_batch_whose_statistics_train_is_not_divided():
    cfg = config.resolve(config.from_mapping("fedavg", {"adapter": "full", "microbatch": 3}, "test"))
    resnet = NETWORK._replace(split=lambda params: (params, ()), join=lambda weights, stats: weights)
    with pytest.raises(InputError, match="microbatch: 3 cannot work in a network that trains on the"):
        make_method(cfg, SIZES, resnet)


# ---- what is chosen ----------------------------------------------------------------------------------------


def experiment(settings, network=TINY):
    """What the choice reads of an experiment, with 8 lanes where none are asked for."""
    engine = Engine(None, Lanes(settings.lanes or 8, "vmap"), None, (), None, {}, None)
    inputs = SimpleNamespace(backbone=SimpleNamespace(config=network))
    sizes = Sizes(classes=10, tasks=2, task_classes=5, clients=8)
    return Experiment(settings, None, engine, None, None, None, None, inputs, sizes, None)


def chosen(monkeypatch, room, network=TINY, **given):
    """(lanes, microbatch) that fit where a step needs 100 bytes and 10 more for each image of each lane."""

    def need(exp):
        images = exp.engine.lanes.count * (exp.settings.microbatch or exp.settings.batch_size)
        return fit.Need("round 0 phase 0", 100 + 10 * images, 10 * images)

    monkeypatch.setattr(fit, "largest_need", need)
    settings = config.resolve(config.from_mapping("fppl", {"batch_size": 32, **given}, "test"))
    exp, line = fit.fit_memory(experiment(settings, network), room, lambda new: experiment(new, network))
    changed = (exp.settings.lanes, exp.settings.microbatch) != (settings.lanes, settings.microbatch)
    assert (line is not None) == changed
    return exp.settings.lanes, exp.settings.microbatch


@pytest.mark.parametrize(
    ("room", "given", "expected"),
    [
        (10_000, {}, (0, 0)),  # fits as it is
        (1_500, {}, (4, 0)),  # fewer clients at a time cost nothing
        (300, {}, (1, 16)),
        (150, {}, (1, 4)),
        (300, {"lanes": 2}, (2, 8)),  # as many lanes as were asked for
    ],
)
def test_lanes_and_then_microbatches_shrink_until_a_step_fits(monkeypatch, room, given, expected):
    assert chosen(monkeypatch, room, **given) == expected


def test_settings_of_the_last_trial_are_taken_if_they_fit(monkeypatch):
    monkeypatch.setattr(fit, "TRIALS", 1)
    assert chosen(monkeypatch, 1_500) == (4, 0)


@pytest.mark.parametrize(
    ("given", "network", "nearest"),
    [
        ({"microbatch": 16}, TINY, "--microbatch 8"),  # what was asked for is not changed
        ({"adapter": "full", "lanes": 1}, CONVNETS["resnet_micro"], "--batch-size 16"),
        ({}, TINY, "a smaller --image-size or --backbone"),
    ],
)
def test_what_does_not_fit_is_told_with_the_nearest_settings(monkeypatch, given, network, nearest):
    with pytest.raises(InputError) as error:
        chosen(monkeypatch, 105 if not given else 150, network, **given)
    assert str(error.value).startswith("memory: a step needs ")
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    ("message", "need"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 29.50G of 15.75G hbm.", 29.5),
        ("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (29.50G) exceeds it", 29.5),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.", 2.0),
        ("RESOURCE_EXHAUSTED: no number", 0),
        ("INVALID_ARGUMENT: something else", None),
    ],
)
def test_messages_of_too_little_memory_are_read(message, need):
    assert fit.exhausted(RuntimeError(message)) == (need if need is None else need * 2**30)


def test_a_run_begins_while_other_programs_than_its_steps_compile(monkeypatch):
    begun = threading.Event()
    waited = []
    step = jax.jit(jnp.cumsum).lower(jnp.zeros(3))
    slow = SimpleNamespace(compile=lambda: waited.append(begun.wait(60)))
    programs = [
        SimpleNamespace(name="prototypes", steps=0, lower=lambda: slow),
        SimpleNamespace(name="step", steps=4, lower=lambda: step),
    ]
    monkeypatch.setattr(fit, "programs_of", lambda exp: programs)
    exp = experiment(config.resolve(config.from_mapping("fppl", {}, "test")), TINY)
    assert fit.largest_need(exp).program == "step"
    begun.set()
    join_compilers()
    assert waited == [True]


def join_compilers():
    """Wait for programs that compile in the background."""
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()


@pytest.mark.long
def test_a_run_finds_the_programs_of_its_rounds_compiled():
    """Those of a round, of which none is compiled again. With the memory of one, all were compiled."""
    given = {"tasks": 2, "epochs": 1, "rounds": 1, "clients": 2, "image_size": 8}
    cfg = config.resolve(config.from_mapping("linear", given, "test"))

    def compiled_by_a_round(prepare):
        exp = build(cfg)
        if prepare:
            assert fit.largest_need(exp).program == "round 0 phase 0"
            join_compilers()
        exp = with_queries(exp)
        state, records = rounds.first_state(exp, rounds.first_server(exp)), Records()
        with Clock(records.seconds) as clock:
            play = rounds.make_play_round(exp, records, clock)
            return len(compilations(lambda: play(exp, state, (), 0)))

    saved = compiled_by_a_round(False) - compiled_by_a_round(True)
    assert saved == len(list(programs_of(build(cfg)))) == 6


def compilations(call):
    """Seconds of each program that a call compiles, or reads compiled."""
    found = []

    def told(event, seconds, **_):
        if "backend_compile" in event:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(told)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(told)
    return found


@pytest.mark.long
def test_the_compiler_says_that_microbatches_need_less_and_remat_no_more():
    """On a CPU XLA computes once what remat would compute again; test_vit.py looks at the program."""
    given = {"image_size": 32, "batch_size": 64, "clients": 2, "rounds": 1, "epochs": 1}

    def need(**more):
        cfg = config.resolve(config.from_mapping("fedavg", {"adapter": "lora", **given, **more}, "test"))
        return fit.largest_need(build(cfg)).temporary

    whole = need()
    assert need(microbatch=8) < 0.4 * whole
    assert need(remat=True) <= whole
