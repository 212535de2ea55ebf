"""FPPL: the numeric oracles of the paper and its release, the ablations, and every point on which the two
differ.

Most tests run the method on a network that is a formula: the feature of an image is the image plus the mean
prompt of every block.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import aggregate_of, begin, compiled, context_of, engine_of, info_of, method_of, resolved, rows_of
from micro import round_context_of as round_context

from fcljax.adapters.prompts import Gate, fuse, gate_weights, init_gate, init_prompts, prompt_injection
from fcljax.data.tasks import make_tasks
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.federated.aggregators import CentredClipping
from fcljax.federated.communication import count_scalars, extra_storage, traffic
from fcljax.federated.engine import Lanes, RoundInputs, run_round
from fcljax.federated.rules import weighted_mean
from fcljax.federated.schedule import ClientPartition
from fcljax.methods.fppl import (
    ServerTraining,
    debias,
    per_class,
    store_prototypes,
    unified_representation_loss,
)
from fcljax.models.heads import Head, apply_head, correct, cross_entropy, sum_by_class
from fcljax.models.shapes import VITS
from fcljax.models.vit import Block, ViTConfig, apply_vit, parameter_shapes, vit_network
from fcljax.parts.reports import Prototypes
from fcljax.runs.build import Experiment
from fcljax.runs.traffic import payload_shapes
from fcljax.scenario import Scenario
from fcljax.types import Batch, Features, Frozen, Network, Sizes, Upload

WIDTH, LOWEST = 4, np.finfo(np.float32).min
SIZES = Sizes(classes=6, tasks=3, task_classes=2, clients=3)
TASKS = jax.tree.map(jnp.asarray, make_tasks(6, 3))
UNEVEN = Sizes(classes=5, tasks=2, task_classes=3, clients=3)
UNEVEN_TASKS = jax.tree.map(jnp.asarray, make_tasks(5, 2))
TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)


NOTHING = Frozen(())


def encode(image, injection):
    prompts = injection.prompt.values() if injection else ()
    return image + sum(prompt.mean(-2) for prompt in prompts)


def apply(params, image, injection, train, mask=None):
    return Features(encode(image, injection), None, {}), params


FORMULA = Network(lambda key: (), apply, WIDTH, 2, (WIDTH,))
batch = partial(rows_of, width=WIDTH)
info = partial(info_of, SIZES.classes)


def make(fidelity="intended", name="fppl", sizes=SIZES, lr=1e-2, **fields):
    """A method on the formula, and a server whose pool is empty."""
    fixed = dict(fidelity=fidelity, epochs=1, batch_size=8, lr=lr, prompt_length=2, prompt_blocks=2)
    method = method_of(name, sizes, FORMULA, **fixed, **fields)
    return method, method.init(jax.random.key(0), NOTHING)


def pool_of(server):
    return server.rules[0]


def with_pool(server, pool):
    return server._replace(rules=(pool,))


def with_head(server, head):
    return server._replace(params=server.params._replace(classifier=head))


def adapter_of(server):
    """Prompts and gate."""
    return server.params.adapter


def prototypes_of(method, server, task):
    """The global prototypes that come down."""
    return broadcast_of(method, server, task).payload.sent["debias"]


def broadcast_of(method, server, task):
    return method.broadcast(round_context(task, frozen=NOTHING), server)


def start(method, server, task, rows=1, id_=0):
    """What a client may read, and the client before its first step."""
    context = context_of(method, server, task, info(rows, id_), NOTHING)
    return context, program_of(method).start(context, state_of(method, server), jax.random.key(0))


def state_of(method, server):
    """A client's state before it ever took part."""
    return method.init_client(jax.random.key(0), server)


def program_of(method):
    (main,) = method.rounds
    return main.program


def client_step(method, server, task, data):
    """The client before and after one step."""
    context, before = start(method, server, task)
    after, metrics = program_of(method).phases[0].step(context, before, data, jax.random.key(0))
    return before, after, metrics


def upload_of(method, server, task, data, id_=0):
    """One client's upload after a step on `data` and prototypes of the same rows."""
    context, local = start(method, server, task, jnp.sum(data.mask), id_)
    for phase in program_of(method).phases:
        local, _ = phase.step(context, local, data, jax.random.key(0))
    return program_of(method).finish(context, local, state_of(method, server))[0]


def receive(uploads, ids, valid):
    """What the server sees of some uploads, padded to all clients."""
    return aggregate_of(uploads, ids, valid, SIZES.clients)


def served(method, server, task, aggregate, key=0):
    """The server after it got these uploads, and its metrics."""
    (main,) = method.rounds
    now = round_context(task, frozen=NOTHING, previous=broadcast_of(method, server, task))
    return main.server(now, server, aggregate, jax.random.key(key))


def predict(method, server, task, image, query=None):
    nothing = jnp.zeros(len(image), jnp.int32)
    rows = Batch(image, nothing, nothing == 0, nothing, query)
    return method.predict(round_context(task, frozen=NOTHING), server, rows)


def sent(vectors):
    """Prototypes as a client sends them: None where it has no rows of the class."""
    present = [vector is not None for vector in vectors]
    return Prototypes(
        np.asarray([[0.0] * WIDTH if v is None else v for v in vectors], np.float32), np.asarray(present)
    )


def serve(method, server, task, prototypes, ids, valid=None):
    """The server after a round in which the clients `ids` sent these prototypes and left the trained parts as
    they were."""
    _, local = start(method, server, task)
    uploads = [Upload(gather={"prototypes": p}, weight=1.0) for p in prototypes]
    aggregate = receive(uploads, ids, [True] * len(ids) if valid is None else valid)
    return served(method, server, task, aggregate._replace(mean=local.trainable), key=2)


def changed(before, after):
    return np.asarray(jnp.abs(after - before) > 0)


# ---- counts ------------------------------------------------------------------------------------------------


VIT_B16 = parameter_shapes(VITS["vit_b16"])


@functools.cache
def counts(fidelity, classes, tasks):
    """Shapes of upload, broadcast, trained parts and server of FPPL on ViT-B/16; nothing is computed."""
    sizes, vit = Sizes(classes, tasks, classes // tasks, 10), VITS["vit_b16"]
    method = method_of("fppl", sizes, vit_network(vit), fidelity=fidelity, batch_size=128)
    empty = dict.fromkeys(Experiment._fields)
    scenario = Scenario(None, None, make_tasks(classes, tasks), None, None)
    exp = Experiment(
        **empty
        | dict(method=method, frozen=Frozen(VIT_B16), scenario=scenario, sizes=sizes, key=jax.random.key(0))
    )
    payloads = payload_shapes(exp)
    (upload,), broadcast, trainable = payloads.uploads, payloads.broadcast, payloads.trainable
    return upload, broadcast, trainable, jax.eval_shape(method.init, exp.key, exp.frozen)


@pytest.mark.parametrize(("classes", "tasks", "comm"), [(100, 10, 169_060), (200, 20, 253_640)])
def test_a_client_sends_and_receives_the_papers_comm_per_round(classes, tasks, comm):
    upload, broadcast, _, _ = counts("paper", classes, tasks)
    assert traffic(upload, broadcast)[::2] == (comm, comm)


@pytest.mark.parametrize(("classes", "tasks", "comm"), [(100, 10, 169_061), (200, 20, 253_641)])
def test_the_learned_scale_of_the_gate_is_one_number_more(classes, tasks, comm):
    upload, broadcast, _, _ = counts("intended", classes, tasks)
    assert traffic(upload, broadcast)[::2] == (comm, comm)


@pytest.mark.parametrize(("classes", "tasks", "model"), [(100, 10, 852_581), (200, 20, 1_705_161)])
def test_the_release_sends_all_prompts_both_ways(classes, tasks, model):
    upload, broadcast, _, _ = counts("released", classes, tasks)
    assert count_scalars(upload.mean) == count_scalars(broadcast.payload.trainable) == model
    assert count_scalars(upload.gather) == 768 * classes // tasks
    assert count_scalars(broadcast.payload.sent) == 768 * classes


@pytest.mark.parametrize(
    ("classes", "tasks", "parts"),
    [
        (100, 10, (76_900, 768_000, 7_680, 1)),
        (200, 20, (153_800, 1_536_000, 15_360, 1)),
    ],
)
def test_the_parts_of_the_model_have_the_releases_sizes(classes, tasks, parts):
    adapter, head, *_ = counts("released", classes, tasks)[0].mean
    assert tuple(map(count_scalars, (head, adapter.prompt, adapter.gate.psi, adapter.gate.sigma))) == parts


@pytest.mark.parametrize(
    ("classes", "tasks", "estg", "param", "pool"),
    [
        (100, 10, 768_000, 84_480, 768_000),
        (200, 20, 1_536_000, 92_160, 1_536_000),
    ],
)
def test_storage_trained_parameters_and_pool_are_the_papers(classes, tasks, estg, param, pool):
    for fidelity, scale in (("paper", 0), ("intended", 1)):
        _, broadcast, trainable, server = counts(fidelity, classes, tasks)
        assert extra_storage(broadcast) == {"scalars": estg, "bytes": 4 * estg}
        assert count_scalars(trainable["adapter"]) == param + scale
        assert count_scalars(trainable["classifier"]) == (768 + 1) * classes
        assert count_scalars(pool_of(server)) == 768 * 10 * classes == pool


def test_trained_parameters_without_head_are_a_thousandth_of_the_backbone():
    _, _, trainable, _ = counts("paper", 200, 20)
    backbone = count_scalars(VIT_B16)
    assert backbone == 590_592 + 768 + 151_296 + 12 * 7_087_872 + 1_536 == 85_798_656
    assert backbone + count_scalars(trainable["classifier"]) == 85_952_456
    assert 100 * count_scalars(trainable["adapter"]) / backbone == pytest.approx(0.1074, abs=5e-5)


# ---- gate and fusion ---------------------------------------------------------------------------------------

QUERY, PSI, SEEN = (
    jnp.array([[3.0, 4.0]]),
    jnp.array([[1.0, 0], [0, 2], [1, 1]]),
    jnp.array([True, True, False]),
)


@pytest.mark.parametrize(
    ("sigma", "soft", "weights"),
    [
        (1.0, True, (0.450166, 0.549834, 0)),
        (None, True, (0.450166, 0.549834, 0)),
        (2.0, True, (0.401312, 0.598688, 0)),
        (1.0, False, (0, 1, 0)),
    ],
)
def test_gate_weights_are_a_softmax_of_cosines_over_the_seen_tasks(sigma, soft, weights):
    gate = Gate(PSI, None if sigma is None else jnp.float32(sigma))
    np.testing.assert_allclose(gate_weights(gate, QUERY, SEEN, soft)[0], weights, atol=1e-6)


def test_weights_of_unseen_tasks_and_their_gradients_are_exactly_zero():
    weigh = lambda psi: gate_weights(Gate(psi, None), QUERY, SEEN)
    assert weigh(PSI)[0, 2] == 0
    gradient = jax.jit(jax.grad(lambda psi: weigh(psi)[0, 0]))(PSI)
    assert not gradient[2].any() and gradient[:2].any(axis=1).all()


@pytest.mark.parametrize(("tasks", "largest"), [(20, 0.280005), (10, 0.450853)])
def test_a_scale_of_one_bounds_the_largest_weight(tasks, largest):
    psi = jnp.where(jnp.arange(tasks)[:, None] == 3, 1.0, -1.0) * jnp.array([[0.6, 0.8]])
    weights = gate_weights(Gate(psi, jnp.ones(())), QUERY, jnp.ones(tasks, bool))
    assert float(weights[0, 3]) == pytest.approx(largest, abs=1e-6) == float(weights.max())


def test_prompts_fuse_with_their_weights():
    prompts = jnp.stack([jnp.ones((2, 3, 4)), jnp.full((2, 3, 4), 3.0)])
    fused = fuse(jnp.array([[0.25, 0.75]]), prompts, prompts[1], jnp.int32(1))
    np.testing.assert_allclose(fused, np.full((1, 2, 3, 4), 2.5))


def test_only_the_current_tasks_prompt_gets_a_gradient():
    prompts, weights = jnp.arange(48.0).reshape(2, 2, 3, 4), jnp.array([[0.25, 0.75]])
    loss = lambda prompts, current: jnp.sum(fuse(weights, prompts, current, jnp.int32(1)))
    frozen, current = jax.jit(jax.grad(loss, argnums=(0, 1)))(prompts, prompts[1])
    assert not frozen.any()
    np.testing.assert_allclose(current, np.full(current.shape, 0.75))


def test_prompts_and_gate_start_in_the_releases_ranges():
    prompts = init_prompts(jax.random.key(0), 3, 2, 20, 8)
    assert prompts.shape == (3, 2, 20, 8) and -1 <= prompts.min() < -0.95 and 0.95 < prompts.max() <= 1
    gate = init_gate(jax.random.key(0), 10, 768, learnable_scale=True)
    assert gate.sigma == 1 and 0.0355 < jnp.abs(gate.psi).max() <= 768**-0.5
    assert init_gate(jax.random.key(0), 10, 768, learnable_scale=False).sigma is None


def test_the_first_round_of_a_task_starts_from_the_previous_prompt_and_leaves_the_gate():
    method, server = make()
    begin_task = lambda task: method.begin_task(
        round_context(task, frozen=NOTHING), server, jax.random.key(0)
    )
    before, begun = adapter_of(server), adapter_of(begin_task(TASKS[2]))
    np.testing.assert_array_equal(begun.prompt, before.prompt.at[2].set(before.prompt[1]))
    np.testing.assert_array_equal(begun.gate.psi, before.gate.psi)
    np.testing.assert_array_equal(adapter_of(begin_task(TASKS[0])).prompt, before.prompt)


# ---- prompts in the transformer ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda x: jnp.asarray(draw(0, 0.3, x.shape), jnp.float32), parameter_shapes(TINY))
    image, prompts = draw(size=(3, 8, 8, 3)), draw(size=(3, 2, 5, TINY.width))
    return params, jnp.asarray(image, jnp.float32), jnp.asarray(prompts, jnp.float32)


@jax.jit
def prompted(params, image, prompts):
    return apply_vit(TINY, params, image, prompt_injection(prompts)).cls


def test_a_prompted_block_of_vit_b16_lets_out_as_many_tokens_as_came_in():
    vit = VITS["vit_b16"]

    def taps(params, image, prompts):
        return apply_vit(vit, params, image, prompt_injection(prompts), full=True).taps

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    tapped = jax.eval_shape(taps, VIT_B16, shape(2, 224, 224, 3), shape(2, 5, 20, 768))
    assert {name: tap.shape for name, tap in tapped.items()} == dict.fromkeys(tapped, (2, 197, 768)) and len(
        tapped
    ) == 13


@pytest.mark.long
def test_prompts_as_keys_and_values_equal_tokens_that_are_appended_and_dropped(network):
    params, image, prompts = network

    @jax.jit
    def appended(params, image, prompts):
        x = apply_vit(TINY, params, image).taps["embed"]
        for i in range(TINY.depth):
            longer = jnp.concatenate([x, prompts[:, i]], axis=1)
            x = Block(TINY).apply({"params": params[f"block_{i:02d}"]}, longer)[:, : x.shape[1]]
        centred = x[:, 0] - x[:, 0].mean(-1, keepdims=True)
        return (
            centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * params["norm"]["scale"]
            + params["norm"]["bias"]
        )

    expected = appended(params, image, prompts)
    np.testing.assert_allclose(prompted(params, image, prompts), expected, atol=1e-5)
    assert jnp.abs(expected - prompted(params, image, prompts[::-1])).max() > 1e-2


def test_permuting_the_prompts_leaves_the_class_token(network):
    params, image, prompts = network
    np.testing.assert_allclose(
        prompted(params, image, prompts), prompted(params, image, prompts[:, :, ::-1]), atol=2e-6
    )


# ---- losses ------------------------------------------------------------------------------------------------

FEATURE, CORNERS = (
    jnp.array([[3.0, 4.0]]),
    Prototypes(jnp.array([[1.0, 0], [0, 1], [1, 1]]), jnp.ones(3, bool)),
)


def unified(feature, label, prototypes=CORNERS, mask=None, classes=(0, 1, 2), **how):
    mask = jnp.ones(len(label), bool) if mask is None else jnp.asarray(mask)
    return unified_representation_loss(
        feature, jnp.asarray(label), mask, prototypes, jnp.asarray(classes), 0.2, **how
    )


@pytest.mark.parametrize(("label", "loss"), [(0, 2.374459), (1, 1.374459), (2, 0.424711)])
def test_unified_loss_contrasts_a_feature_with_the_global_prototypes(label, loss):
    assert float(unified(FEATURE, [label])) == pytest.approx(loss, abs=2e-6)


@pytest.mark.parametrize(
    ("how", "loss"),
    [
        (dict(), 2.374459),
        (dict(average="batch"), 2.374459 / 2),
        (dict(average="batch", reduction="sum"), 2.374459),
        (dict(average="holders", reduction="sum"), 2.374459),
    ],
)
def test_rows_without_a_prototype_stay_out_of_the_average(how, loss):
    assert float(unified(jnp.repeat(FEATURE, 2, 0), [0, 7], **how)) == pytest.approx(loss, abs=2e-6)


@pytest.mark.parametrize("present", [[False] * 3, [True, False, False]])
def test_unified_loss_is_zero_with_no_prototype_or_a_single_class(present):
    prototypes = CORNERS._replace(present=jnp.array(present))
    value, gradient = jax.jit(jax.value_and_grad(lambda feature: unified(feature, [0], prototypes)))(FEATURE)
    assert float(value) == 0 and not gradient.any()


def test_global_prototypes_are_constants_of_the_unified_loss():
    loss = lambda feature, vector: unified(feature, [0], CORNERS._replace(vector=vector))
    pulled, moved = jax.jit(jax.grad(loss, argnums=(0, 1)))(FEATURE, CORNERS.vector)
    assert pulled.any() and not moved.any()


def test_cross_entropy_masks_the_other_classes_and_gives_them_no_gradient():
    logits, allowed = jnp.array([[2.0, 1.0, 0.0, 5.0]]), jnp.array([True, True, False, False])
    loss = lambda logits: cross_entropy(logits, jnp.array([0]), allowed, jnp.array([True]))
    assert float(loss(logits)) == pytest.approx(0.313262, abs=1e-6)
    gradient = jax.jit(jax.grad(loss))(logits)[0]
    assert not gradient[2:].any() and gradient[:2].all()


def test_nan_in_masked_rows_reaches_no_loss_and_no_other_row():
    mask, label = jnp.array([True, False, True]), jnp.array([0, 0, 1])
    clean = jnp.array([[1.0, 2.0], [3.0, -1.0], [-2.0, 0.5]])
    poisoned = clean.at[1].set(jnp.nan)
    losses = (
        lambda x: cross_entropy(x, label, jnp.ones(2, bool), mask),
        lambda x: unified(x, label, mask=mask),
        lambda x: unified(x, label, mask=mask, average="batch"),
        lambda x: jnp.sum(sum_by_class(x, label, jnp.array([0, 1]), mask)[0] ** 2),
    )
    results = map(jax.jit(lambda x: [jax.value_and_grad(loss)(x) for loss in losses]), (clean, poisoned))
    for (value, gradient), (bad, bad_gradient) in zip(*results, strict=True):
        assert float(value) == float(bad) and np.isfinite(float(bad))
        np.testing.assert_array_equal(gradient[mask], bad_gradient[mask])
    hits = [float(correct(x, label, jnp.ones(2, bool), mask)) for x in (clean, poisoned)]
    assert hits == [1, 1]


# ---- the client --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_first_step_of_adam_moves_what_has_a_gradient_by_the_learning_rate_and_nothing_else():
    method, server = make(lr=1e-3)
    before, after, _ = client_step(method, server, TASKS[1], batch([2, 3, 3]))
    move = jax.tree.map(lambda a, b: np.abs(np.asarray(b - a)), before.trainable, after.trainable)
    adapter, head, current = move.adapter, move.classifier, np.asarray(TASKS[1].current)
    np.testing.assert_allclose(head.bias[current], 1e-3, rtol=1e-3)
    np.testing.assert_allclose(head.kernel[:, current], 1e-3, rtol=1e-3)
    np.testing.assert_allclose(adapter.prompt, 1e-3, rtol=1e-3)
    np.testing.assert_allclose(adapter.gate.psi[:2], 1e-3, rtol=1e-3)
    np.testing.assert_allclose(adapter.gate.sigma, 1e-3, rtol=1e-3)
    assert not head.bias[~current].any() and not head.kernel[:, ~current].any()
    assert not adapter.gate.psi[2].any()


@pytest.mark.long
def test_the_first_round_of_a_task_has_no_unified_loss():
    results = []
    for wo_unified in (False, True):
        method, server = make(wo_unified=wo_unified)
        old = Prototypes(jnp.ones((3, 6, WIDTH)), jnp.zeros((3, 6), bool).at[:, :2].set(True))
        part = client_step(method, with_pool(server, old), TASKS[1], batch([2, 3, 3]))[1].trainable
        results.append((part.adapter, part.classifier))
    jax.tree.map(np.testing.assert_array_equal, *results)


def full_pool(server, seed=5):
    pool = pool_of(server)
    vector = np.random.default_rng(seed).normal(size=pool.vector.shape).astype(np.float32)
    return with_pool(server, Prototypes(jnp.asarray(vector), jnp.ones_like(pool.present)))


@pytest.mark.long
def test_wo_unified_removes_the_loss_and_the_download_of_prototypes():
    data, reported = batch([2, 3, 3]), {}
    for wo_unified in (False, True):
        method, server = make(wo_unified=wo_unified)
        server = full_pool(server)
        reported[wo_unified] = float(client_step(method, server, TASKS[1], data)[2]["loss"].total)
        assert (prototypes_of(method, server, TASKS[1]) == ()) is wo_unified
        assert len(program_of(method).phases) == 2  # the server still debiases on what clients send
    part, seen = start(method, server, TASKS[1])[1].trainable, jnp.array([True, True, False])
    weights = gate_weights(part.adapter.gate, data.input, seen)
    fused = fuse(weights, adapter_of(server).prompt, part.adapter.prompt, jnp.int32(1))
    feature = encode(data.input, prompt_injection(fused))
    logits = apply_head(part.classifier, feature)
    expected = cross_entropy(logits, data.label, jnp.asarray(TASKS[1].current), data.mask, "sum")
    assert reported[True] == pytest.approx(float(expected), rel=1e-5)
    means = Prototypes(pool_of(server).vector.mean(0)[2:4], jnp.ones(2, bool))
    pull = unified(feature, data.label, means, data.mask, classes=(2, 3))
    assert reported[False] == pytest.approx(float(expected + 3 * pull), rel=1e-5)


@pytest.mark.long
def test_wo_fusion_takes_the_best_seen_task_and_never_trains_the_gate():
    method, server = make(wo_fusion=True)
    before, after, _ = client_step(method, server, TASKS[1], batch([2, 3, 3]))
    gate = before.trainable.adapter.gate
    jax.tree.map(np.testing.assert_array_equal, gate, after.trainable.adapter.gate)
    weights = gate_weights(gate, batch([2, 3, 3]).input, jnp.array([True, True, False]), soft=False)
    np.testing.assert_array_equal(np.sort(weights, -1), np.tile([0, 0, 1], (4, 1)))
    assert not weights[:, 2].any()


def test_local_prototypes_are_plain_means_of_features_under_the_trained_prompts():
    method, server = make()
    first, second = batch([1, 1, 1]), batch([1, 1], seed=9)
    context, local = start(method, server, TASKS[0], rows=5)
    trained = adapter_of(server).prompt[2]
    local = local._replace(
        trainable=local.trainable._replace(adapter=local.trainable.adapter._replace(prompt=trained))
    )
    for data in (first, second):
        local, _ = program_of(method).phases[1].step(context, local, data, jax.random.key(0))
    own = program_of(method).finish(context, local, state_of(method, server))[0].gather["prototypes"]
    shift = np.asarray(trained).mean(1).sum(0)  # in the first task the gate's weight is 1
    images = np.concatenate([first.input[:3], second.input[:2]])
    np.testing.assert_array_equal(own.present, [False, True])
    np.testing.assert_allclose(own.vector[1], images.mean(0) + shift, rtol=1e-5)


@pytest.mark.long
def test_padding_rows_change_no_upload():
    method, server = make()
    one, other = (
        upload_of(method, full_pool(server), TASKS[1], batch([2, 3, 3], padding=x)) for x in (0.0, 9.0)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), one.mean, other.mean)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), one.gather, other.gather)


# ---- where paper and release differ ------------------------------------------------------------------------


def test_a_given_value_wins_over_the_preset():
    assert resolved("fppl", reduction="sum").reduction == "sum"


def test_only_the_intended_reading_normalises_pixels_as_the_checkpoint_was_trained():
    for fidelity, normalise in (("intended", "checkpoint"), ("paper", "release"), ("released", "release")):
        assert resolved("fppl", fidelity=fidelity).normalise == normalise
    assert resolved("fppl", fidelity="released", normalise="imagenet").normalise == "imagenet"


@pytest.mark.long
def test_local_classes_decides_whether_classes_of_other_tasks_compete():
    moved = {}
    for choice in ("current", "all"):
        method, server = make(local_classes=choice)
        before, after, _ = client_step(method, server, TASKS[1], batch([2, 3, 3]))
        moved[choice] = changed(before.trainable.classifier.bias, after.trainable.classifier.bias)
    np.testing.assert_array_equal(moved["current"], TASKS[1].current)
    assert moved["all"].all()


def test_gate_scale_decides_whether_sigma_is_trained_and_sent():
    for choice in ("learnable", "fixed"):
        method, server = make(gate_scale=choice)
        before, after, _ = client_step(method, server, TASKS[1], batch([2, 3, 3]))
        old, new = (local.trainable.adapter.gate.sigma for local in (before, after))
        if choice == "learnable":
            assert old == 1 != new
        else:
            assert old is None is new


def test_reduction_scales_the_clients_gradient_by_its_rows():
    moments, reported = {}, {}
    for choice in ("mean", "sum"):
        method, server = make(reduction=choice)
        _, after, metrics = client_step(method, full_pool(server), TASKS[1], batch([2, 3, 3, 2]))
        moments[choice], reported[choice] = after.optimiser.mu, metrics["loss"]
    jax.tree.map(
        lambda s, m: np.testing.assert_allclose(s, 4 * m, rtol=1e-4, atol=1e-7),
        moments["sum"],
        moments["mean"],
    )
    np.testing.assert_allclose(reported["sum"], reported["mean"], rtol=1e-5)


def test_unified_average_divides_by_all_rows_or_by_those_with_a_prototype():
    # two of the four rows are of classes that have no prototype in this task
    data, pull = batch([2, 3, 4, 5]), {}
    for choice in ("holders", "batch"):
        method, server = make(unified_average=choice, local_classes="all")
        loss = lambda server, method=method: float(
            client_step(method, server, TASKS[1], data)[2]["loss"].total
        )
        pull[choice] = loss(full_pool(server)) - loss(server)
    assert pull["holders"] == pytest.approx(2 * pull["batch"], rel=1e-4) != 0


def test_prototype_view_decides_which_images_prototypes_are_made_of():
    for choice, augment in (("augmented", True), ("clean", False)):
        train, extract = program_of(make(prototype_view=choice)[0]).phases
        assert train.view.augment and extract.view == train.view._replace(epochs=1, augment=augment)


@pytest.mark.long
def test_features_of_both_are_those_without_prompts_and_then_those_under_them():
    method, server = make("improved")
    data = batch([0, 0, 1])
    upload = upload_of(method, server, TASKS[0], data)
    prompt = upload.mean.adapter.prompt.mean(-2).sum(0)  # what they add to a feature, by the formula
    images = np.stack([data.input[:2].mean(0), data.input[2]])
    sent = upload.gather["prototypes"].vector
    np.testing.assert_allclose(sent, np.concatenate([images, images + prompt], axis=-1), rtol=1e-5)
    assert np.abs(prompt).max() > 0.1

    added = adapter_of(server).prompt[0].mean(-2).sum(0)
    both = jnp.concatenate([data.input, data.input + added], axis=-1)
    logits = predict(method, server, TASKS[0], data.input)[:, :2]
    np.testing.assert_allclose(logits, apply_head(server.params.classifier, both)[:, :2], rtol=1e-5)


def test_prototypes_of_other_tasks_cross_the_wire_in_the_release_but_change_nothing():
    trained, rows = {}, {}
    for choice in ("current", "seen"):
        method, server = make(prototype_download=choice)
        server = full_pool(server)
        rows[choice] = len(prototypes_of(method, server, TASKS[1]).vector)
        trained[choice] = client_step(method, server, TASKS[1], batch([2, 3, 3]))[1].trainable
    assert rows == {"current": 2, "seen": 6}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), trained["current"], trained["seen"])


@pytest.mark.long
def test_sending_all_prompts_gives_the_server_the_same_prompts_as_sending_one():
    after, data = {}, (batch([2, 3, 3]), batch([2, 2, 3, 3], seed=4))
    for choice, tasks in (("current", ()), ("all", (3,))):
        method, server = make(prompt_upload=choice, wo_debias=True)
        uploads = [upload_of(method, server, TASKS[1], rows, i) for i, rows in enumerate(data)]
        assert uploads[0].mean.adapter.prompt.shape == (*tasks, 2, 2, WIDTH)
        broadcast, before = broadcast_of(method, server, TASKS[1]), adapter_of(server).prompt
        assert broadcast.payload.trainable.adapter.prompt.shape == uploads[0].mean.adapter.prompt.shape
        assert count_scalars(broadcast.cached) == (0 if tasks else before.size)
        after[choice], _ = served(method, server, TASKS[1], receive(uploads, (0, 1), (True, True)))
        new = adapter_of(after[choice]).prompt
        assert changed(before[1], new[1]).all()
        np.testing.assert_allclose(new[0], before[0], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), after["current"], after["all"])


# ---- the server --------------------------------------------------------------------------------------------


def test_models_are_averaged_by_rows_over_the_clients_that_have_some():
    stacked, rows = jnp.array([1.0, 5.0, jnp.nan]), jnp.array([30, 10, 0])
    assert float(weighted_mean(stacked, rows, rows > 0)) == 2.0
    method, server = make()
    assert float(upload_of(method, server, TASKS[1], batch([2, 3, 3])).weight) == 3


def test_global_prototypes_are_means_over_clients_however_many_rows_they_have():
    method, server = make(wo_debias=True)
    a, b = [2.0, 0, 0, 0], [0.0, 6, 0, 0]  # a is the mean of (1, 0) and (3, 0), b of a single row
    server, _ = serve(method, server, TASKS[1], [sent([a, None]), sent([b, None])], (0, 2))
    prototypes, pool = prototypes_of(method, server, TASKS[1]), pool_of(server)
    np.testing.assert_array_equal(prototypes.present, [True, False])
    np.testing.assert_allclose(prototypes.vector, [[1, 3, 0, 0], [0, 0, 0, 0]])
    client, label = np.nonzero(np.asarray(pool.present))
    # what debias would train on: two rows, both of class 2
    np.testing.assert_array_equal([client, label], [[0, 2], [2, 2]])
    np.testing.assert_allclose(pool.vector[client, label], [a, b])


def test_centred_clipping_of_prototypes_starts_from_zero():
    """Three steps of length 1 towards (6, 8), which both holders have; the other class is nobody's."""
    options = AggregationOptions(aggregator=CentredClipping(clip_radius=1.0))
    vectors, holds = jnp.full((2, 2, 2), jnp.array([6.0, 8.0])), jnp.array([[True, False]] * 2)
    merge = per_class(make_aggregation(options))
    merged, held = merge(vectors, holds, jnp.ones(2), jnp.ones(2, bool), jax.random.key(0))
    np.testing.assert_allclose(merged, [[1.8, 2.4], [0, 0]], rtol=1e-5)
    assert held.tolist() == [True, False]


def test_a_round_replaces_a_clients_prototypes_of_its_task_and_leaves_earlier_tasks():
    method, server = make(wo_debias=True)
    one, two, three = ([float(x)] * WIDTH for x in (1, 2, 3))
    server, _ = serve(method, server, TASKS[0], [sent([one, one])], (1,))
    server, _ = serve(method, server, TASKS[0], [sent([two, None])], (1,))
    server, _ = serve(method, server, TASKS[1], [sent([three, three])], (1,))
    pool = pool_of(server)
    np.testing.assert_array_equal(pool.present[1], [True, False, True, True, False, False])
    np.testing.assert_allclose(pool.vector[1, jnp.array([0, 2, 3]), 0], [2, 3, 3])
    assert not pool.present[jnp.array([0, 2])].any()


def test_clients_that_are_absent_or_rejected_leave_the_pool_as_it_is():
    method, server = make(wo_debias=True)
    server = full_pool(server)
    poison = sent([[np.nan] * WIDTH] * 2)
    sends, others = [sent([[7.0] * WIDTH] * 2), poison], jnp.array([0, 1, 4, 5])
    after, _ = serve(method, server, TASKS[1], sends, (0, 2), valid=(True, False))
    old, new = (pool_of(each).vector for each in (server, after))
    np.testing.assert_array_equal(new[1:], old[1:])
    np.testing.assert_array_equal(new[0, others], old[0, others])
    np.testing.assert_array_equal(new[0, 2:4], np.full((2, WIDTH), 7.0))


@pytest.mark.long
def test_after_twenty_full_tasks_debias_takes_2000_rows_in_80_steps():
    pool = Prototypes(jnp.zeros((10, 200, 2)), jnp.zeros((10, 200), bool))
    store = jax.jit(store_prototypes)
    everyone = jnp.ones(10, bool)
    for t, task in enumerate(make_tasks(200, 20)):
        sends = Prototypes(jnp.ones((10, 10, 2)), jnp.ones((10, 10), bool))
        pool = store(pool, sends, jnp.arange(10), everyone, task.classes)
        assert int(pool.present.sum()) == 10 * 10 * (t + 1)
    training = ServerTraining(epochs=5, batch_size=128, lr=1e-3)
    _, metrics = debias(Head(jnp.ones((2, 200)), jnp.zeros(200)), pool, jax.random.key(1), training)
    assert float(metrics["loss"].weight) == 80
    assert float(metrics["accuracy"].weight) == 1024  # a sample of the 2,000


def numpy_debias(head, feature, label, allowed, steps, lr, reduction):
    """Full-batch Adam on the masked cross-entropy of a linear classifier, written out."""
    weights = np.concatenate([head.kernel, head.bias[None]]).astype(np.float64)
    x = np.concatenate([feature, np.ones((len(feature), 1))], axis=1)
    m = v = np.zeros_like(weights)
    for step in range(1, steps + 1):
        odds = np.exp(x @ weights) * allowed
        error = odds / odds.sum(1, keepdims=True) - np.eye(len(allowed))[label]
        g = x.T @ error / (len(x) if reduction == "mean" else 1)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        weights = weights - lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return Head(weights[:-1], weights[-1])


def train_head(head, pool, lr, reduction):
    return jitted_debias(head, pool, jax.random.key(2), ServerTraining(7, 4, lr, reduction))


jitted_debias = jax.jit(debias, static_argnums=3)


@pytest.fixture
def head_and_pool():
    draw = np.random.default_rng(0).normal
    return Head(
        jnp.asarray(draw(size=(3, 4)), jnp.float32), jnp.asarray(draw(size=4), jnp.float32)
    ), jnp.asarray(draw(size=(2, 4, 3)), jnp.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_debias_is_adam_on_the_stored_prototypes_with_absent_classes_masked(head_and_pool, reduction):
    head, vector = head_and_pool
    present = jnp.array([[True, False, False, True], [True, False, False, False]])
    trained, _ = train_head(head, Prototypes(vector, present), 0.05, reduction)
    feature = np.asarray(vector)[[0, 0, 1], [0, 3, 0]]
    expected = numpy_debias(head, feature, np.array([0, 3, 0]), np.array([1, 0, 0, 1]), 7, 0.05, reduction)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), trained, expected)
    np.testing.assert_array_equal(trained.bias[1:3], head.bias[1:3])


@pytest.mark.parametrize("lr", [0.0, 0.05, 0.5])
def test_debias_says_how_many_prototypes_the_trained_classifier_gets_right(head_and_pool, lr):
    head, vector = head_and_pool
    present = np.array([[True, True, False, True], [True, True, False, False]])
    trained, metrics = train_head(head, Prototypes(vector, jnp.asarray(present)), lr, "mean")
    logits = np.array(vector @ trained.kernel + trained.bias)
    logits[..., 2] = -np.inf  # nobody has the class
    right = np.argmax(logits, -1) == np.arange(4)
    assert tuple(map(float, metrics["accuracy"])) == (np.sum(right & present), 5)


def test_debias_reads_every_stored_prototype_once_per_epoch(head_and_pool):
    head, vector = head_and_pool
    present = np.array([[True, True, False, True], [True, True, True, False]])
    still, metrics = train_head(head, Prototypes(vector, jnp.asarray(present)), 0.0, "sum")
    jax.tree.map(np.testing.assert_array_equal, still, head)
    loss = metrics["loss"]
    client, label = np.nonzero(present)
    logits = np.asarray(vector)[client, label] @ np.asarray(head.kernel) + np.asarray(head.bias)
    once = np.sum(np.log(np.exp(logits).sum(1)) - logits[np.arange(6), label])
    assert float(loss.total) == pytest.approx(7 * once, rel=1e-5)
    assert float(loss.weight) == 7 * 2  # batches of four rows and of two


def test_an_empty_pool_leaves_the_head(head_and_pool):
    head, vector = head_and_pool
    trained, _ = train_head(head, Prototypes(vector, jnp.zeros((2, 4), bool)), 0.05, "sum")
    jax.tree.map(np.testing.assert_array_equal, trained, head)


@pytest.mark.parametrize(
    ("fields", "trained", "rate"),
    [
        # the rate is the clients' unless it is given
        (dict(server_epochs=1, server_batch_size=16), [0, 1, 2, 3], 0.01),
        (dict(server_epochs=1, wo_pool=True, server_lr=0.02), [2, 3], 0.02),
        (dict(wo_debias=True), [], 0.0),
    ],
)
@pytest.mark.long
def test_the_pools_classes_are_those_whose_head_the_server_trains(fields, trained, rate):
    method, server = make(**fields)
    pool = pool_of(full_pool(server))
    server = with_pool(server, pool._replace(present=pool.present & TASKS[0].seen))
    vectors = np.random.default_rng(0).normal(size=(3, 2, WIDTH))
    after, metrics = serve(method, server, TASKS[1], [sent(list(v)) for v in vectors], (0, 1, 2))
    moved = jnp.abs(after.params.classifier.bias - server.params.classifier.bias)
    np.testing.assert_allclose(moved, np.where(np.isin(np.arange(6), trained), rate, 0), rtol=1e-3)
    np.testing.assert_array_equal(pool_of(after).present, np.tile(TASKS[1].seen, (3, 1)))
    assert ("debias_loss" in metrics) == bool(trained)


def test_without_debias_the_head_is_the_mean_of_the_clients_heads():
    method, server = make(wo_debias=True)
    uploads = [upload_of(method, server, TASKS[1], data) for data in (batch([2, 3, 3]), batch([2], seed=4))]
    after, _ = served(method, server, TASKS[1], receive(uploads, (0, 1), (True, True)))
    of_rows = lambda a, b: (3 * np.asarray(a) + np.asarray(b)) / 4
    mean, close = jax.tree.map(of_rows, *(upload.mean for upload in uploads)), np.testing.assert_allclose
    jax.tree.map(partial(close, rtol=1e-5, atol=1e-7), after.params.classifier, mean.classifier)
    close(adapter_of(after).prompt[1], mean.adapter.prompt, rtol=1e-5)


def test_without_pool_and_debias_no_prototype_is_made_or_sent():
    method, server = make(wo_unified=True, wo_debias=True)
    assert len(program_of(method).phases) == 1 and server.rules == ()
    assert upload_of(method, server, TASKS[0], batch([0, 1])).gather == {}


def test_fedavg_sends_no_prototypes():
    method, server = make(name="fedavg")
    upload = upload_of(method, server, TASKS[1], batch([2, 3]))
    assert upload.gather == {} == broadcast_of(method, server, TASKS[1]).payload.sent
    assert len(program_of(method).phases) == 1 and server.rules == ()  # there is no pool
    after, metrics = served(method, server, TASKS[1], receive([upload], (0,), (True,)))
    equal = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(equal, after.params.classifier, upload.mean.classifier)
    assert metrics == {}


@pytest.mark.parametrize("name", ["fppl", "fedavg"])
def test_logits_of_unseen_classes_never_win(name):
    method, server = make(name=name)
    server = with_head(server, server.params.classifier._replace(bias=jnp.arange(6) * 1e6))
    logits = predict(method, server, TASKS[1], batch([0, 0, 0, 0]).input)
    np.testing.assert_array_equal(jnp.argmax(logits, -1), [3, 3, 3, 3])
    np.testing.assert_array_equal(logits[:, 4:], np.full((4, 2), LOWEST))


def test_cached_queries_change_no_prediction():
    method, server = make()
    image = batch([0, 0, 0, 0]).input
    cached = predict(method, server, TASKS[2], image, query=encode(image, None))
    np.testing.assert_array_equal(cached, predict(method, server, TASKS[2], image))
    other = predict(method, server, TASKS[2], image, query=-image)
    assert jnp.abs(other - cached)[:, :6].max() > 1e-3  # it is the query that the gate reads


# ---- uneven tasks: the padding class -1 --------------------------------------------------------------------


def test_padding_classes_store_and_send_nothing():
    np.testing.assert_array_equal(UNEVEN_TASKS[1].classes, [3, 4, -1])
    method, server = make(sizes=UNEVEN)
    server = full_pool(server)
    junk = jax.tree.map(lambda x: x[None], sent([[1.0] * WIDTH, None, [9.0] * WIDTH]))
    who, classes, old = (jnp.array([1]), jnp.array([True])), UNEVEN_TASKS[1].classes, pool_of(server)
    pool = jax.jit(store_prototypes)(old, junk, *who, classes)
    np.testing.assert_array_equal(pool.vector[:, :3], old.vector[:, :3])
    np.testing.assert_array_equal(pool.vector[1, 3], [1.0] * WIDTH)
    np.testing.assert_array_equal(pool.present[1], [True, True, True, True, False])
    sends = jax.jit(partial(prototypes_of, method))(with_pool(server, pool), UNEVEN_TASKS[1])
    np.testing.assert_array_equal(sends.present, [True, True, False])


def test_no_row_is_of_a_padding_class():
    sums, counts = sum_by_class(batch([]).input, batch([]).label, jnp.array([0, -1]), batch([]).mask)
    assert not sums.any() and not counts.any()
    np.testing.assert_array_equal(
        sum_by_class(batch([3]).input, batch([3]).label, jnp.array([3, -1]), batch([3]).mask)[1], [1, 0]
    )


def test_a_padding_class_adds_nothing_to_the_unified_loss():
    padded = Prototypes(
        jnp.concatenate([CORNERS.vector, CORNERS.vector[:1]]), jnp.array([True, True, True, False])
    )
    assert float(unified(FEATURE, [1], padded, classes=(0, 1, 2, -1))) == float(unified(FEATURE, [1]))


# ---- all of it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_run():
    """Two uneven tasks of two rounds with three clients; client 2 has no row of the second task."""
    fields = dict(epochs=4, batch_size=4, lr=0.03, prompt_length=3, prompt_blocks=2)
    method = method_of("fppl", UNEVEN, FORMULA, **fields)
    label = np.tile(np.arange(5), 12)
    owner = np.where(label >= 3, np.arange(60) // 5 % 2, np.arange(60) // 5 % 3)
    centre = 4 * np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [-1, -1, 0, 0]])
    image = centre[label] + np.random.default_rng(0).normal(0, 0.1, (60, WIDTH))
    data = (jnp.asarray(image, jnp.float32), jnp.asarray(label, jnp.int32))
    partitions = [partition_of(task, label, owner) for task in UNEVEN_TASKS]
    fetch = lambda data, rows, keys, augment: (data[0][rows], data[1][rows], None)
    engine = engine_of(method, Lanes(), partitions, NOTHING, data, UNEVEN_TASKS[0], fetch)
    server, states = begin(method, NOTHING, 1, UNEVEN.clients)
    reports, servers = [], [server]
    for t, task in enumerate(UNEVEN_TASKS):
        server = compiled(method.begin_task)(round_context(task, frozen=NOTHING), server, jax.random.key(0))
        ids = np.flatnonzero(partitions[t].count)
        for r in range(2):
            server, states, report = run_round(
                engine,
                server,
                states,
                RoundInputs(NOTHING, data, partitions[t], ids, task, r, jax.random.key(3)),
            )
            reports.append(report)
        servers.append(server)
    logits = predict(method, server, UNEVEN_TASKS[1], data[0])
    return engine, servers, reports, label, owner, logits


def partition_of(task, label, owner):
    mine = [np.flatnonzero((owner == k) & task.current[label]) for k in range(3)]
    present = np.stack([np.bincount(label[rows], minlength=5) for rows in mine]).astype(np.int32)
    return ClientPartition(np.concatenate(mine), np.cumsum([0, *map(len, mine)]), present)


@pytest.mark.long
def test_a_run_fills_the_pool_with_the_classes_that_clients_hold(short_run):
    _, servers, reports, label, owner, _ = short_run
    holds = np.zeros((3, 5), bool)
    holds[owner, label] = True
    first, last = pool_of(servers[1]), pool_of(servers[-1])
    np.testing.assert_array_equal(last.present, holds)
    np.testing.assert_array_equal(last.vector[:, :3], first.vector[:, :3])
    assert [report.participants for report in reports] == [3, 3, 2, 2]
    assert not any(report.rejected for report in reports)


def test_a_run_learns_and_traces_everything_once(short_run):
    engine, servers, reports, label, _, logits = short_run
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(servers))
    assert reports[3].metrics["debias_loss"] < reports[2].metrics["debias_loss"]
    assert float(jnp.mean(jnp.argmax(logits, -1) == label)) > 0.6
    assert set(engine.traces.values()) == {1}


def test_a_run_leaves_prompts_of_other_tasks_exactly_as_they_were(short_run):
    start, first, last = map(adapter_of, short_run[1])
    np.testing.assert_array_equal(first.prompt[1], start.prompt[1])
    np.testing.assert_array_equal(last.prompt[0], first.prompt[0])
    assert changed(first.prompt[0], last.prompt[1]).any()
    np.testing.assert_allclose(first.gate.psi[1], start.gate.psi[1], rtol=1e-6)
