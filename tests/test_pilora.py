"""PILoRA: the numeric oracles of the paper and its release, what crosses the wire, the ablations, and every
point on which the two differ.

Most tests run the method on a network that is a formula: the feature of an image is the scaled image plus its
LoRA updates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
import toys
from micro import begin as first_state
from micro import context_of, engine_of, info_of, method_of, resolved, rows_of
from micro import round_context_of as round_context

from fcljax.adapters.lora import pair_of
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.federated.communication import count_scalars, extra_storage, traffic
from fcljax.federated.engine import Lanes, RoundInputs, run_round
from fcljax.federated.reference import epoch_order
from fcljax.federated.rules import weighted_mean
from fcljax.methods.pilora import PRESETS, l1, orthogonality, pl_loss
from fcljax.models.prototypes import dce_loss, distances
from fcljax.models.shapes import VITS
from fcljax.models.vit import ViTConfig, init_vit, parameter_shapes, vit_network
from fcljax.parts.reports import Prototypes
from fcljax.parts.schedules import Constant, Cosine, CosineLag
from fcljax.types import Aggregate, Batch, ClientContext, Features, Frozen, Network, Sizes, TrainingProgress

WIDTH, LOWEST = 4, np.finfo(np.float32).min
SIZES = Sizes(classes=6, tasks=3, task_classes=2, clients=3, rounds=30)
TASKS = jax.tree.map(jnp.asarray, make_tasks(6, 3))
UNEVEN = Sizes(classes=5, tasks=2, task_classes=3, clients=3, rounds=2)
UNEVEN_TASKS = jax.tree.map(jnp.asarray, make_tasks(5, 2))
FROZEN = Frozen({"scale": jnp.ones(WIDTH)})
KEY = jax.random.key(0)


def encode(params, image, injection):
    x = image * params["scale"]
    return x + sum(
        x @ m.a_q.T @ m.b_q.T + 2 * x @ m.a_v.T @ m.b_v.T
        for m in (injection.lora.values() if injection else ())
    )


def apply(params, image, injection, train, mask=None):
    return Features(encode(params, image, injection), None, {}), params


FORMULA = Network(lambda key: FROZEN.network, apply, WIDTH, 2, (WIDTH,))
batch = functools.partial(rows_of, width=WIDTH)


def options(adapter="lora", **fields):
    """A pair of rank 2, where there are pairs."""
    own = dict(lora_rank=2, lora_lr=1e-3) if adapter == "lora" else {}
    return own | dict(adapter=adapter) | fields


def build(sizes=UNEVEN, network=FORMULA, **fields):
    return method_of("pilora", sizes, network, **options(**fields))


def make(fidelity="intended", sizes=SIZES, lr=1e-2, **fields):
    """A method on the formula, and a server whose prototypes and pairs are all far from 0, as after some
    training."""
    method = build(sizes, fidelity=fidelity, epochs=1, batch_size=8, lr=lr, **fields)
    return method, trained_server(method)


def trained_server(method, seed=3):
    rng = np.random.default_rng(seed)
    server = method.init(KEY, FROZEN)
    draw = lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), jnp.float32)
    params, of_network = server.params, isinstance(server.params.adapter, dict)
    pairs = params.adapter if of_network else jax.tree.map(draw, params.adapter)
    return server._replace(params=params._replace(classifier=draw(params.classifier), adapter=pairs))


def prototypes_of(server):
    return server.params.classifier


def with_prototypes(server, prototypes):
    return server._replace(params=server.params._replace(classifier=prototypes))


def lora_of(server):
    """The pairs of all tasks."""
    return server.params.adapter


def info(rows=1, round_=0):
    return info_of(SIZES.classes, rows, round_=round_)


def main_of(method):
    (main,) = [each for each in method.rounds if each.when == "round"]
    return main


def phases_of(method):
    return main_of(method).program.phases


def begin(method, server, task, round_=0, rows=1):
    """What a client may read, and the client before its first step."""
    context, state = (
        context_of(method, server, task, info(rows, round_), FROZEN),
        method.init_client(KEY, server),
    )
    return context, main_of(method).program.start(context, state, KEY)


def client_step(method, server, task, data, round_=0):
    """The client before and after one step."""
    context, before = begin(method, server, task, round_)
    after, metrics = jax.jit(phases_of(method)[0].step)(context, before, data, KEY)
    return before, after, metrics


def finish(method, server, task, local, rows):
    context, state = context_of(method, server, task, info(rows), FROZEN), method.init_client(KEY, server)
    return main_of(method).program.finish(context, local, state)[0]


def round_after(method, server, task):
    """What the server may read once clients have answered."""
    now = round_context(task, frozen=FROZEN)
    return now._replace(previous=method.broadcast(now, server))


def unchanged(method, server, task):
    """The mean of clients that changed nothing."""
    return round_after(method, server, task).previous.payload.trainable._replace(classifier=())


def serve(method, server, task, prototypes, means, valid=None, mean=None):
    """The server after clients sent these prototypes and mean features, by client and class; None where a
    client has no rows."""
    pad = lambda v: [0.0] * WIDTH if v is None else [*v, *[0.0] * (WIDTH - len(v))]
    table = lambda rows: jnp.asarray([[pad(v) for v in client] for client in rows])
    cached = jnp.asarray([[v is not None for v in client] for client in means])
    sent = {"classifier": table(prototypes), "features": Prototypes(table(means), cached)}
    valid = jnp.ones(len(prototypes), bool) if valid is None else jnp.asarray(valid)
    mean = unchanged(method, server, task) if mean is None else mean
    aggregate = Aggregate(mean, {}, sent, valid.astype(jnp.float32), jnp.arange(len(valid)), valid)
    return jax.jit(main_of(method).server)(round_after(method, server, task), server, aggregate, KEY)[0]


def predict(method, server, task, image, query=None):
    nothing = jnp.zeros(len(image), jnp.int32)
    rows = Batch(image, nothing, nothing == 0, nothing, query)
    return method.predict(round_context(task, frozen=FROZEN), server, rows)


def expected_loss(cfg, server, task, data, lora=None):
    """The loss from its parts, for the network with `lora` as its only pair."""
    feature = encode(FROZEN.network, data.input, None)
    if lora is not None:
        a_q, b_q, a_v, b_v = (x[0] for x in lora)
        feature = data.input @ (jnp.eye(WIDTH) + b_q @ a_q + 2 * b_v @ a_v).T
    distance = distances(feature, prototypes_of(server), cfg.distance)
    allowed = jnp.ones(6, bool) if cfg.negatives == "all" else task.seen
    dce, pl = dce_loss(distance, data.label, allowed, data.mask), pl_loss(distance, data.label, data.mask)
    loss = dce + 0.001 * pl
    if cfg.adapter == "lora":
        current = pair_of(lora_of(server), task.index)
        loss += 0 if cfg.wo_orthogonality else 0.5 * orthogonality(lora_of(server), current, task.index)
        loss += cfg.l1_weight * l1(current)
    return float(loss)


# ---- counts ------------------------------------------------------------------------------------------------

VIT_B16 = parameter_shapes(VITS["vit_b16"])


@functools.cache
def counts(fidelity="intended", classes=100, **fields):
    """Shapes of upload, broadcast, trained parts and server of PILoRA on ViT-B/16 with ten tasks; nothing is
    computed. Ranks and rates are the papers'."""
    sizes, vit = Sizes(classes, 10, classes // 10, 10, 30), VITS["vit_b16"]
    method = method_of("pilora", sizes, vit_network(vit), fidelity=fidelity, batch_size=64, lr=2e-3, **fields)
    task, program = make_tasks(classes, 10)[0], main_of(method).program

    def client(key, frozen):
        server, now = method.init(key, frozen), round_context(task, frozen=frozen)
        broadcast, state = method.broadcast(now, server), method.init_client(key, server)
        context = ClientContext(frozen, broadcast.payload, broadcast.cached, task, info_of(classes))
        upload, _ = program.finish(context, program.start(context, state, key), state)
        return upload, broadcast, method.trainable(now, server), server

    return jax.eval_shape(client, KEY, Frozen(VIT_B16))


@pytest.mark.parametrize("fidelity", PRESETS)
@pytest.mark.parametrize(("classes", "up", "down"), [(100, 27_648, 19_968), (200, 43_008, 27_648)])
def test_a_client_sends_and_receives_the_papers_numbers(fidelity, classes, up, down):
    upload, broadcast, _, _ = counts(fidelity, classes)
    assert traffic(upload, broadcast)[::2] == (up, down)
    assert count_scalars(upload.mean) == count_scalars(broadcast.payload.trainable.adapter) == 12_288
    sent = upload.gather
    assert count_scalars(sent["classifier"]) == count_scalars(sent["features"]) == 768 * classes // 10


@pytest.mark.parametrize(("fidelity", "down"), [("intended", 12_288 + 7_680), ("released", 6_144 + 7_680)])
def test_the_last_state_of_a_finished_task_comes_down_too(fidelity, down):
    """Its pair, of which the release's clients read A alone, and its prototypes."""
    sizes, frozen = Sizes(100, 10, 10, 10, 30), Frozen(VIT_B16)
    method = method_of("pilora", sizes, vit_network(VITS["vit_b16"]), fidelity=fidelity)
    task = make_tasks(100, 10)[0]

    def handover(key, frozen):
        return method.handover(round_context(task, frozen=frozen), method.init(key, frozen))

    assert count_scalars(jax.eval_shape(handover, KEY, frozen)) == down


def test_bytes_of_a_task_are_a_sixth_of_one_transfer_of_the_network():
    upload, broadcast, _, _ = counts()
    floats = sum(traffic(upload, broadcast)[::2])
    assert 4 * floats * 300 == 57_139_200
    # which classes are present, and the weight
    assert traffic(upload, broadcast).upload_bytes == 110_592 + 10 + 4
    assert count_scalars(VIT_B16) == 85_798_656


def test_the_a_matrices_that_clients_keep_are_the_papers_share_of_the_network():
    _, broadcast, _, _ = counts("released")
    per_task = count_scalars(broadcast.cached.adapter) / 10
    assert per_task == 6_144
    assert 100 * per_task * np.mean(np.arange(1, 11)) / count_scalars(VIT_B16) == pytest.approx(
        0.0394, abs=5e-5
    )
    _, broadcast, _, _ = counts("intended")
    assert count_scalars(broadcast.cached.adapter) == 10 * 12_288
    assert extra_storage(broadcast)["scalars"] == 10 * 12_288 + 76_800


def test_ablations_send_only_what_they_need():
    upload, broadcast, trainable, server = counts(adapter="linear")
    assert traffic(upload, broadcast)[::2] == (15_360, 7_680)
    assert count_scalars(server) == count_scalars(broadcast.cached) == 76_800
    assert count_scalars(trainable) == 7_680
    upload, _, _, _ = counts(wo_reweight=True)
    assert count_scalars(upload) == 19_968
    upload, broadcast, _, server = counts(adapter="full")
    assert traffic(upload, broadcast)[::2] == (85_798_656 + 15_360, 85_798_656 + 7_680)
    assert count_scalars(server) == 85_798_656 + 76_800


def test_a_network_that_is_not_tuned_is_not_in_the_servers_state():
    for adapter, pairs in (("lora", 10 * 12_288), ("linear", 0)):
        server = counts(adapter=adapter)[3]
        assert count_scalars(server.params.adapter) == pairs and count_scalars(server) == pairs + 76_800
    frozen = Frozen({"scale": jnp.ones(WIDTH, jnp.bfloat16)})
    tuned = build(SIZES, adapter="full").init(KEY, frozen)
    assert tuned.params.adapter["scale"].dtype == jnp.float32


# ---- presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "said"),
    [(0, "0 is too small; nearest valid value: 1"), (3, "3 where the network has 2 blocks; nearest: 2")],
)
def test_lora_blocks_that_the_network_does_not_have_are_refused(blocks, said):
    with pytest.raises(InputError, match=f"^lora_blocks: {said}$"):
        make(lora_blocks=blocks)


# ---- the client --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (CosineLag(), (1, 1, 0.997261, 0.989074, 0.552264, 0.5, 0.010926)),  # O8
        (Cosine(), (1, 0.997261, 0.989074, 0.975528, 0.5, 0.447736, 0.002739)),
        (Constant(), (1,) * 7),
    ],
)
def test_learning_rates_follow_the_round_of_the_task(schedule, factors):
    rounds = jnp.array([0, 1, 2, 3, 15, 16, 29])
    found = [schedule(TrainingProgress(round_, 30, jnp.int32(0), 1)) for round_ in rounds]
    np.testing.assert_allclose(found, factors, atol=1e-6)


@pytest.mark.parametrize("round_", [0, 15])
def test_the_first_step_of_adam_moves_every_part_by_its_learning_rate_and_nothing_else(round_):
    method, server = make()
    before, after, _ = client_step(method, server, TASKS[1], batch([2, 3, 3]), round_)
    move = jax.tree.map(lambda a, b: np.abs(np.asarray(b - a)), before.trainable, after.trainable)
    factor = {0: 1, 15: 0.5}[round_]
    np.testing.assert_allclose(move.classifier, 1e-2 * factor, rtol=1e-3)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 1e-3 * factor, rtol=1e-2), move.adapter)


def test_steps_are_adam_with_l2_in_the_gradient():
    """Three steps on one batch against Adam written out, with a weight decay that would be seen."""
    method, server = make(weight_decay=0.3, adapter="linear")
    data, task = batch([2, 3, 3]), TASKS[1]
    context, local = begin(method, server, task)
    x = np.asarray(local.trainable.classifier, np.float64)
    loss = lambda m: expected_loss_of_prototypes(server, data, m)
    gradient_of, first, second = jax.jit(jax.grad(loss)), np.zeros_like(x), np.zeros_like(x)
    step = jax.jit(phases_of(method)[0].step)
    for i in range(1, 4):
        local, _ = step(context, local, data, KEY)
        g = np.asarray(gradient_of(jnp.asarray(x, jnp.float32))) + 0.3 * x
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        x = x - 1e-2 * (first / (1 - 0.9**i)) / (np.sqrt(second / (1 - 0.999**i)) + 1e-8)
    np.testing.assert_allclose(local.trainable.classifier, x, atol=1e-5)


def expected_loss_of_prototypes(server, data, current):
    distance = distances(data.input, prototypes_of(server).at[2:4].set(current))
    dce = dce_loss(distance, data.label, jnp.ones(6, bool), data.mask)
    return dce + 0.001 * pl_loss(distance, data.label, data.mask)


@pytest.mark.parametrize(
    ("fidelity", "fields", "pairs"),
    [
        ("intended", {}, "sum"),
        ("paper", {}, "sum"),
        ("released", {}, "current"),
        ("intended", dict(negatives="seen"), "sum"),
        ("intended", dict(wo_orthogonality=True), "sum"),
        ("intended", dict(adapter="linear"), None),
        ("intended", dict(adapter="full"), None),
    ],
)
@pytest.mark.long
def test_the_reported_loss_is_the_papers_or_the_releases(fidelity, fields, pairs):
    method, server = make(fidelity, **fields)
    data = batch([2, 3, 3])
    lora = {
        "sum": lambda: [x[0] + x[1] for x in lora_of(server)],
        "current": lambda: [x[1] for x in lora_of(server)],
        None: lambda: None,
    }[pairs]()
    _, _, metrics = client_step(method, server, TASKS[1], data)
    cfg = resolved("pilora", fidelity=fidelity, **options(**fields))
    total = expected_loss(cfg, server, TASKS[1], data, lora)
    assert float(metrics["loss"].total) == pytest.approx(3 * total, rel=1e-4)
    assert float(metrics["loss"].weight) == 3


def test_frozen_slots_get_a_gradient_of_exactly_zero_through_a_clients_step():
    """Pairs of all tasks as the client holds them, and the held rows of the prototypes that it trains."""
    method, server = make()
    context, _ = begin(method, server, TASKS[1])

    def loss(cached, part):
        received = context._replace(payload=context.payload._replace(trainable=part), cached=cached)
        start = main_of(method).program.start(received, method.init_client(KEY, server), KEY)
        return phases_of(method)[0].step(received, start, batch([2, 3, 3]), KEY)[1]["loss"].total

    cached, part = jax.jit(jax.grad(loss, argnums=(0, 1)))(context.cached, context.payload.trainable)
    assert not any(leaf.any() for leaf in cached.adapter) and not cached.classifier[2:4].any()
    assert all(leaf.any() for leaf in part.adapter) and part.classifier.all()


def test_padding_rows_change_no_upload():
    method, server = make()
    uploads = []
    for padding in (0.0, 9.0):
        _, local, _ = client_step(method, server, TASKS[1], batch([2, 3, 3], padding=padding))
        uploads.append(finish(method, server, TASKS[1], local, 3))
    jax.tree.map(np.testing.assert_array_equal, *uploads)


def test_means_on_the_way_are_of_features_before_each_update_and_a_class_without_rows_is_absent():
    method, server = make(adapter="full", full_lr=0.1)
    first, second = batch([3, 3, 3]), batch([3, 3], seed=9)
    (train,), (context, local) = phases_of(method), begin(method, server, TASKS[1])
    step = jax.jit(train.step)
    local, _ = step(context, local, first, KEY)
    scale = np.asarray(local.trainable.adapter["scale"])
    assert np.abs(scale - 1).min() > 0.09
    local, _ = step(context, local, second, KEY)
    sent = finish(method, server, TASKS[1], local, 5).gather["features"]
    assert sent.present.tolist() == [False, True]
    images = np.concatenate([first.input[:3], scale * second.input[:2]])
    np.testing.assert_allclose(sent.vector, [[0] * WIDTH, images.mean(0)], rtol=1e-5)


@pytest.mark.long
def test_clean_means_are_of_one_pass_with_the_trained_model():
    method, server = make(adapter="full", full_lr=0.1, mean_features="clean")
    train, extract = phases_of(method)
    assert train.view.augment and extract.view == train.view._replace(epochs=1, augment=False)
    data = batch([2, 2])
    context, local = begin(method, server, TASKS[1])
    for phase in (train, extract):
        local, _ = phase.step(context, local, data, KEY)
    sent, scale = (
        finish(method, server, TASKS[1], local, 2).gather["features"],
        local.trainable.adapter["scale"],
    )
    assert np.abs(scale - 1).min() > 0.09
    np.testing.assert_allclose(sent.vector[0], scale * data.input[:2].mean(0), rtol=1e-5)


def test_without_reweighting_no_features_are_summed_or_sent():
    for means in ("trajectory", "clean"):
        method, server = make(wo_reweight=True, mean_features=means)
        _, local, _ = client_step(method, server, TASKS[1], batch([2, 3]))
        assert len(phases_of(method)) == 1 and local.totals == {}
        assert set(finish(method, server, TASKS[1], local, 2).gather) == {"classifier"}


def test_a_frozen_network_reads_cached_features():
    method, server = make(adapter="linear")
    assert method.queries and not make()[0].queries
    data = batch([2, 3, 3])
    cached = data._replace(input=jnp.zeros_like(data.input), query=data.input)
    plain, by_query = (client_step(method, server, TASKS[1], x)[1] for x in (data, cached))
    jax.tree.map(np.testing.assert_array_equal, plain, by_query)
    logits = predict(method, server, TASKS[1], data.input)
    np.testing.assert_array_equal(predict(method, server, TASKS[1], cached.input, cached.query), logits)


# ---- the server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fidelity", "expected"), [("intended", 1.053614), ("released", 1.053614), ("paper", 2.238671)]
)
def test_prototypes_are_reweighted_by_their_distance_to_the_mean_features(fidelity, expected):  # O1
    method, server = make(fidelity)
    prototypes = [[[9.0], [1.0]], [[9.0], [2.0]], [[9.0], [4.0]]]
    after = serve(method, server, TASKS[1], prototypes, [[None, [0.0]], [None, [0.0]], [None, None]])
    np.testing.assert_allclose(prototypes_of(after)[2:4], [[9, 0, 0, 0], [expected, 0, 0, 0]], atol=2e-6)


def test_a_high_temperature_weighs_all_clients_alike():
    method, server = make(reweight_temperature=1e6)
    prototypes = [[[9.0], [1.0]], [[9.0], [2.0]], [[9.0], [4.0]]]
    after = serve(method, server, TASKS[1], prototypes, [[None, [0.0]], [None, [0.0]], [None, [0.0]]])
    np.testing.assert_allclose(prototypes_of(after)[3, 0], 7 / 3, rtol=1e-4)


@pytest.mark.parametrize(
    ("fidelity", "expected"), [("intended", (1.515109, 2.020146)), ("paper", (2.807074, 3.742765))]
)
def test_reweighting_in_two_dimensions(fidelity, expected):  # O2
    method, server = make(fidelity)
    prototypes = [[[0.0, 0], [0.0]], [[3.0, 4], [0.0]], [[6.0, 8], [0.0]]]
    after = serve(method, server, TASKS[1], prototypes, [[[0.0, 0], None], [[3.0, 4], None], [None, None]])
    np.testing.assert_allclose(prototypes_of(after)[2, :2], expected, atol=5e-6)


@pytest.mark.parametrize("fidelity", small_runs.some(PRESETS, ("intended",)))
@pytest.mark.parametrize(
    ("prototypes", "means", "expected"),
    [
        ([[2.0], [4.0], [9.0]], [None, None, None], 5.0),  # a class that nobody holds
        ([[3.0], [3.0], [3.0]], [[1.0], None, [7.0]], 3.0),  # identical prototypes
        ([[1.0], [-1.0]], [[0.0], [0.0]], 0.0),  # O4: equal distances
        ([[5.0]], [[5.0]], 5.0),  # one client, at distance 0 of its own mean
    ],
)
def test_degenerate_rounds_end_in_the_plain_mean(fidelity, prototypes, means, expected):
    method, server = make(fidelity)
    after = serve(method, server, TASKS[1], [[p, [0.0]] for p in prototypes], [[m, None] for m in means])
    assert prototypes_of(after)[2, 0] == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(prototypes_of(after)).all()


def test_a_prototype_at_distance_zero_takes_the_weight_of_the_nearest():
    method, server = make()
    after = serve(method, server, TASKS[1], [[[0.0], [0.0]], [[1.0], [0.0]]], [[[0.0], None], [None, None]])
    assert prototypes_of(after)[2, 0] == pytest.approx(1 / (1 + np.exp(5)), rel=1e-5)


def test_without_reweighting_prototypes_are_averaged_uniformly_over_valid_clients():
    method, server = make(wo_reweight=True)
    table = jnp.asarray([[[1.0] * WIDTH] * 2, [[3.0] * WIDTH] * 2, [[jnp.nan] * WIDTH] * 2])
    mean, valid = unchanged(method, server, TASKS[1]), jnp.array([True, True, False])
    sent, weight = {"classifier": table}, jnp.array([1.0, 9, 0])
    aggregate = Aggregate(mean, {}, sent, weight, jnp.arange(3), valid)
    after, _ = main_of(method).server(round_after(method, server, TASKS[1]), server, aggregate, KEY)
    np.testing.assert_array_equal(prototypes_of(after)[2:4], np.full((2, WIDTH), 2.0))


def test_lora_is_averaged_by_rows_with_a_and_b_apart():  # O13
    method, server = make()
    _, local, _ = client_step(method, server, TASKS[1], batch([2, 3, 3]))
    upload = finish(method, server, TASKS[1], local, 240)
    assert int(upload.weight) == 240 and upload.mean.classifier == ()
    full = lambda value: jax.tree.map(lambda x: jnp.full_like(x, value), upload.mean.adapter)
    one, six = (upload.mean._replace(adapter=full(value)) for value in (1, 6))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), one, six)
    mean = weighted_mean(stacked, jnp.array([240, 160]), jnp.ones(2, bool))
    after = serve(method, server, TASKS[1], [[[0.0], [0.0]]] * 2, [[None, None]] * 2, mean=mean)
    for leaf, old in zip(lora_of(after), lora_of(server), strict=True):
        np.testing.assert_allclose(leaf[1], 3.0, rtol=1e-6)
        np.testing.assert_array_equal(leaf[::2], old[::2])


def test_prototypes_of_other_tasks_never_change():
    method, server = make()
    after = serve(method, server, TASKS[1], [[[1.0], [2.0]]], [[[1.0], None]])
    others, old, new = jnp.array([0, 1, 4, 5]), prototypes_of(server), prototypes_of(after)
    np.testing.assert_array_equal(new[others], old[others])
    assert (new[2:4, 0] != old[2:4, 0]).all()


# ---- predictions -------------------------------------------------------------------------------------------


def predicted_feature(method, server, task):
    """The feature that predictions see of an image of ones, from its distances to prototypes at 0 and at the
    unit vectors."""
    nothing = jnp.zeros((1, WIDTH))
    server = with_prototypes(server, jnp.concatenate([nothing, jnp.eye(WIDTH), nothing]))
    squared = -np.asarray(predict(method, server, task, jnp.ones((1, WIDTH))), np.float64)[0]
    return (squared[0] + 1 - squared[1:5]) / 2


@pytest.mark.parametrize(("rule", "first", "last"), [("sum", None, None), ("first", 0, 0)])
def test_the_evaluated_model_follows_the_global_rule(rule, first, last):
    method, server = make(global_lora=rule, distance="squared", predict_classes="all")
    stop = 3 if rule == "sum" else 1
    a_q, b_q, a_v, b_v = (np.asarray(x[:stop, 0]).sum(0) for x in lora_of(server))
    expected = np.ones(WIDTH) @ (np.eye(WIDTH) + b_q @ a_q + 2 * b_v @ a_v).T
    np.testing.assert_allclose(predicted_feature(method, server, TASKS[2]), expected, atol=1e-4)


def test_products_of_pairs_add_up_in_the_evaluated_model():
    method, server = make(
        global_lora="products", local_lora="products", distance="squared", predict_classes="all"
    )
    a_q, b_q, a_v, b_v = (np.asarray(x[:2, 0]) for x in lora_of(server))
    product = (b_q @ a_q + 2 * b_v @ a_v).sum(0)
    np.testing.assert_allclose(
        predicted_feature(method, server, TASKS[1]), np.ones(WIDTH) @ (np.eye(WIDTH) + product).T, atol=1e-4
    )


def test_unseen_classes_never_win_unless_the_release_is_asked_for():
    method, server = make(adapter="linear")
    server = with_prototypes(server, jnp.zeros((6, WIDTH)).at[:4].set(100.0))
    logits = predict(method, server, TASKS[1], jnp.zeros((2, WIDTH)))
    np.testing.assert_array_equal(logits[:, 4:], np.full((2, 2), LOWEST))
    assert (jnp.argmax(logits, -1) < 4).all()
    released, _ = make("released", adapter="linear")
    assert (jnp.argmax(predict(released, server, TASKS[1], jnp.zeros((2, WIDTH))), -1) >= 4).all()


# ---- HeadTune ----------------------------------------------------------------------------------------------


def opening_of(method):
    (opening,) = [each for each in method.rounds if each.when == "task_start"]
    return opening


def test_headtune_starts_prototypes_at_the_means_of_all_clients_rows():
    method, server = make(adapter="linear", headtune=True)
    opening = opening_of(method)
    program, task, data = opening.program, TASKS[1], [batch([2, 2, 2]), batch([2], seed=7)]
    sums, state = [], method.init_client(KEY, server)
    for rows in data:
        context = context_of(method, server, task, info(int(rows.mask.sum())), FROZEN)
        local, _ = program.phases[0].step(context, program.start(context, state, KEY), rows, KEY)
        sums.append(program.finish(context, local, state)[0].sum)
    assert not program.phases[0].view.augment and program.phases[0].view.epochs == 1
    assert opening.who == "everyone"
    total = jax.tree.map(lambda *x: sum(x), *sums)
    aggregate = Aggregate((), total, {}, jnp.ones(2), jnp.arange(2), jnp.ones(2, bool))
    after, _ = opening.server(round_after(method, server, task), server, aggregate, KEY)
    means = np.concatenate([data[0].input[:3], data[1].input[:1]]).mean(0)
    np.testing.assert_allclose(prototypes_of(after)[2], means, rtol=1e-5)
    others = jnp.array([0, 1, 3, 4, 5])  # class 3 has no rows
    np.testing.assert_array_equal(prototypes_of(after)[others], prototypes_of(server)[others])


@pytest.mark.long
def test_headtune_without_which_there_is_no_opening_plays_through_the_engine():
    assert [each.when for each in make()[0].rounds] == ["round"]
    method = build(headtune=True, epochs=1, batch_size=8)
    (start, _, end), reports, _ = play(method, when="task_start")
    # every B is 0, so that features are images
    means = np.stack([IMAGE[np.equal(LABEL, c)].mean(0) for c in range(5)])
    np.testing.assert_allclose(prototypes_of(end), means, rtol=1e-4, atol=1e-5)
    toys.same(lora_of(end), lora_of(start))
    assert [report.participants for report in reports] == [3, 2]
    assert not any(report.rejected for report in reports)


# ---- uneven tasks: the padding class -1 --------------------------------------------------------------------


@pytest.mark.long
def test_padding_classes_send_zeros_and_store_nothing():
    method, server = make(sizes=UNEVEN)
    task = UNEVEN_TASKS[1]
    assert task.classes.tolist() == [3, 4, -1]
    before, after, _ = client_step(method, server, task, batch([3, 4, 4]))
    assert not before.trainable.classifier[2].any() and not after.trainable.classifier[2].any()
    old = prototypes_of(server)
    np.testing.assert_array_equal(before.trainable.classifier[:2], old[3:])
    served = serve(method, server, task, [[[1.0], [2.0], [9.0]]], [[[1.0], None, None]])
    np.testing.assert_array_equal(prototypes_of(served)[:, 0], [*old[:3, 0], 1, 2])


# ---- all of it ---------------------------------------------------------------------------------------------

LABEL = np.tile(np.arange(5), 12)
OWNER = np.where(LABEL >= 3, np.arange(60) // 5 % 2, np.arange(60) // 5 % 3)
OWNER[(OWNER == 1) & (LABEL < 3)] = 0
OWNER[6] = 1  # client 1 has a single image of the first task; client 2 has none of the second
CENTRE = 2 * np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [-1, -1, 0, 0]])
IMAGE = (CENTRE[LABEL] + np.random.default_rng(0).normal(0, 0.1, (60, WIDTH))).astype(np.float32)
PARTITIONS = [
    toys.make_partition([np.flatnonzero((k == OWNER) & t.current[LABEL]) for k in range(3)], LABEL, 5)
    for t in UNEVEN_TASKS
]


def fetch(data, rows, keys, augment):
    return data[0][rows], data[1][rows], None


def play(
    method,
    partitions=PARTITIONS,
    rounds=1,
    image=IMAGE,
    frozen=FROZEN,
    tasks=UNEVEN_TASKS,
    when="round",
    server=None,
):
    """Servers after every task, reports, and the engine."""
    data = jnp.asarray(image), jnp.asarray(LABEL, jnp.int32)
    engine = engine_of(method, Lanes(), partitions, frozen, data, tasks[0], fetch)
    first, states = first_state(method, frozen, 1, UNEVEN.clients)
    server = first if server is None else server
    servers, reports = [server], []
    for task, partition in zip(tasks, partitions, strict=True):
        for round_ in range(rounds):
            ids = np.flatnonzero(partition.count)
            server, states, report = run_round(
                engine,
                server,
                states,
                RoundInputs(frozen, data, partition, ids, task, round_, jax.random.key(3), when=when),
            )
            reports.append(report)
        servers.append(server)
    return servers, reports, engine


@pytest.fixture(scope="module")
def short_run():
    """Two uneven tasks of two rounds; among the clients are one with a single image and one without any."""
    method = build(epochs=30, batch_size=8, lr=0.03)
    return *play(method, rounds=2), method


@pytest.mark.long
def test_a_run_learns_and_traces_everything_once(short_run):
    servers, reports, engine, method = short_run
    assert [report.participants for report in reports] == [3, 3, 2, 2]
    assert not any(report.rejected for report in reports)
    assert reports[1].metrics["loss"] < reports[0].metrics["loss"]
    logits = predict(method, servers[-1], UNEVEN_TASKS[1], jnp.asarray(IMAGE))
    assert float(np.mean(np.argmax(logits, -1) == LABEL)) > 0.9
    assert set(engine.traces.values()) == {1}


@pytest.mark.long
def test_a_run_leaves_prototypes_and_pairs_of_other_tasks_exactly_as_they_were(short_run):
    start, first, last = short_run[0]
    np.testing.assert_array_equal(prototypes_of(first)[3:], prototypes_of(start)[3:])
    np.testing.assert_array_equal(prototypes_of(last)[:3], prototypes_of(first)[:3])
    for begun, done, end in zip(*map(lora_of, (start, first, last)), strict=True):
        begun, done, end = map(np.asarray, (begun, done, end))
        np.testing.assert_array_equal(done[1], begun[1])
        np.testing.assert_array_equal(end[0], done[0])
        assert (done[0] != begun[0]).any() and (end[1] != done[1]).any()


VARIANTS = {
    "paper": ("paper", {}),
    "released": ("released", {}),
    "products": ("intended", dict(local_lora="products", global_lora="products")),
    "w/o PR": ("intended", dict(wo_reweight=True, lr_schedule="constant")),
    "w/o l_ort": ("intended", dict(wo_orthogonality=True, negatives="seen", lora_blocks=2)),
    "frozen": ("intended", dict(adapter="linear")),
    "fine-tuned": ("intended", dict(adapter="full")),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.long
def test_every_variant_plays_both_tasks_and_stays_finite(name):
    fidelity, fields = VARIANTS[name]
    method = build(fidelity=fidelity, epochs=2, batch_size=8, lr=0.03, **fields)
    servers, reports, engine = play(method)
    assert not any(report.rejected for report in reports) and set(engine.traces.values()) == {1}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(servers))
    assert (prototypes_of(servers[2]) != prototypes_of(servers[0])).all()


TINY = ViTConfig(image_size=8, patch=4, width=16, depth=1, heads=2, mlp=32)


@pytest.mark.long
@pytest.mark.parametrize("fields", [{}, dict(adapter="full")])
def test_a_round_on_a_transformer_changes_exactly_what_is_tuned(fields):
    method = build(network=vit_network(TINY), epochs=1, batch_size=8, lr=0.01, **fields)
    image = np.random.default_rng(0).normal(size=(60, 8, 8, 3)).astype(np.float32)
    frozen = Frozen(init_vit(jax.random.key(1), TINY))
    (start, end), reports, _ = play(
        method, PARTITIONS[:1], image=image, frozen=frozen, tasks=UNEVEN_TASKS[:1]
    )
    assert np.isfinite(reports[0].metrics["loss"]) and not reports[0].rejected
    differ = lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b)))
    moved = jax.tree.leaves(jax.tree.map(differ, start.params, end.params))
    assert len(moved) == 1 + len(jax.tree.leaves(start.params.adapter)) > 4 and all(moved)


@pytest.mark.long
def test_one_client_that_holds_all_rows_is_centralised_training():
    """A plain optax loop on unpadded batches, written from the paper's equations, in the second task."""
    epochs, size, rate, lora_rate, task = 2, 8, 0.03, 1e-3, UNEVEN_TASKS[1]
    method = build(lora_lr=lora_rate, epochs=epochs, batch_size=size, lr=rate)
    rows = np.flatnonzero(task.current[LABEL])
    alone = toys.make_partition([rows, rows[:0], rows[:0]], LABEL, 5)
    server, key, data = trained_server(method), jax.random.key(3), (jnp.asarray(IMAGE), jnp.asarray(LABEL))
    (_, after), _, _ = play(method, [alone], tasks=[task], server=server)
    before, pairs = prototypes_of(server), lora_of(server)

    def loss(parameters, image, label):
        current, lora = parameters
        a_q, b_q, a_v, b_v = (old[0, 0] + new[0] for old, new in zip(pairs, lora, strict=True))
        feature = image @ (jnp.eye(WIDTH) + b_q @ a_q + 2 * b_v @ a_v).T
        prototypes = jnp.concatenate([before[:3], current])
        distance = jnp.linalg.norm(feature[:, None] - prototypes, axis=-1) / WIDTH**0.5
        own = distance[jnp.arange(len(label)), label]
        dce = jnp.mean(own + jax.nn.logsumexp(-distance, axis=-1))
        overlap = sum(
            jnp.abs(old[0, 0] @ new[0].T).sum() for old, new in ((pairs.a_q, lora.a_q), (pairs.a_v, lora.a_v))
        )
        return dce + 0.001 * jnp.mean(own) + 0.5 * overlap

    parameters = (before[3:], pair_of(pairs, 1))
    by_part = optax.partition(
        {"prototypes": optax.adam(rate), "lora": optax.adam(lora_rate)}, ("prototypes", "lora")
    )
    adam = optax.chain(optax.add_decayed_weights(1e-5), by_part)
    optimiser, gradient_of = adam.init(parameters), jax.jit(jax.grad(loss))
    for epoch in range(epochs):
        order = epoch_order(toys.fold(key, task.index, 0), 0, epoch, rows)
        for chosen in np.split(order, range(size, len(rows), size)):
            gradient = gradient_of(parameters, data[0][chosen], data[1][chosen])
            update, optimiser = adam.update(gradient, optimiser, parameters)
            parameters = optax.apply_updates(parameters, update)
    toys.close((prototypes_of(after)[3:], pair_of(lora_of(after), 1)), parameters, atol=1e-5)
    assert float(jnp.abs(parameters[0] - before[3:]).max()) > rate
