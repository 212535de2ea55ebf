"""HePCo against its formulas: numbers of the specification (O1 to O14), and every part switched off once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from micro import (
    FORMULA,
    KEY,
    SCALE,
    SIZES,
    TASKS,
    TINY,
    by_hand,
    compiled,
    method_of,
    round_context_of,
    seen_by_rules,
)
from toys import same

from fcljax import config
from fcljax.adapters import find_adapter
from fcljax.adapters.pool import Pool, PoolOptions, pool, prefix_injection, weighted_prompts
from fcljax.data.sampled import sample_client
from fcljax.data.tasks import python_order
from fcljax.errors import InputError
from fcljax.methods.hepco import diagnosis as D
from fcljax.methods.hepco import hepco as H
from fcljax.methods.hepco.generator import GeneratorConfig, generate, init_generator
from fcljax.models.heads import Head, cross_entropy, init_head
from fcljax.models.initialisers import uniform_by_inputs
from fcljax.models.shapes import VITS
from fcljax.models.vit import vit_network
from fcljax.parts.classifiers import linear
from fcljax.parts.federate import Payload, Run, Training, linear_learner
from fcljax.parts.learner import Params, learner
from fcljax.parts.reports import moments_of, no_moments, normal_of
from fcljax.parts.schedules import Constant, EpochCosine, EpochCosineLag
from fcljax.parts.task_start import Start
from fcljax.results import metrics
from fcljax.types import Aggregate, Batch, Broadcast, Sizes, TrainingProgress

SMALL = {"pool_size": 3, "pool_length": 2, "pool_blocks": 2}
FEW = {
    "generator_steps": 3,
    "generator_growth": 2,
    "distill_steps": 3,
    "latent_batch": 6,
    "noise_width": 3,
    "label_width": 2,
}


def options(fidelity="intended", **values):
    cfg = config.resolve(config.from_mapping("hepco", {"fidelity": fidelity, **values}, "test"))
    return config.part(H.HepcoOptions, cfg)


def with_options(study, **more):
    """What losses share, with other options."""
    return study._replace(options=dataclasses.replace(study.options, **more))


def norm(tree):
    return float(optax.tree.norm(tree))


# ---- the pool ----------------------------------------------------------------------------------------------


def test_prompts_are_weighted_by_plain_cosines_without_a_softmax():
    """O1."""
    keys = jnp.array([[[1.0, 0], [0, 2]]])
    prompts = jax.random.normal(KEY, (1, 2, 4, 2))
    found = weighted_prompts(Pool(prompts, keys), jnp.array([[3.0, 4]]))
    np.testing.assert_allclose(found[0, 0], 0.6 * prompts[0, 0] + 0.8 * prompts[0, 1], rtol=1e-5)
    away = weighted_prompts(Pool(prompts, keys), jnp.array([[-3.0, 4]]))  # weights may be negative
    np.testing.assert_allclose(away[0, 0], -0.6 * prompts[0, 0] + 0.8 * prompts[0, 1], rtol=1e-5)


def test_a_prompt_is_half_keys_and_half_values():
    """O2."""
    prompt = jax.random.normal(KEY, (3, 5, 20, 8))
    prefix = prefix_injection(prompt).prefix
    assert set(prefix) == {0, 1, 2, 3, 4} and prefix[4].key.shape == (3, 10, 8)
    same(prefix[2].key, prompt[:, 2, :10])
    same(prefix[2].value, prompt[:, 2, 10:])


@pytest.mark.parametrize("classes, scalars", [(100, 8_140_900), (200, 8_217_800), (345, 8_329_305)])
def test_a_client_trains_as_many_numbers_as_the_paper_says(classes, scalars):
    """Specification section 9: CIFAR-100, ImageNet-R, DomainNet."""
    network, sizes = vit_network(VITS["vit_b16"]), Sizes(classes, 5, classes // 5, 5)
    model = learner(network, pool(PoolOptions(), sizes, network), linear(768, classes))
    shapes = jax.eval_shape(lambda: model.init(KEY, SCALE))
    count = lambda tree: sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
    assert count(shapes.adapter) == 8_064_000 and count(shapes) == scalars


def test_a_pool_of_odd_length_is_refused():
    network = vit_network(TINY)
    with pytest.raises(InputError, match="pool_length: 3 tokens .*; nearest: 4"):
        pool(PoolOptions(pool_length=3, pool_blocks=2), SIZES, network)
    with pytest.raises(InputError, match="pool_blocks: 5 where the network has 2 blocks"):
        pool(PoolOptions(), SIZES, network)


# ---- who holds what ----------------------------------------------------------------------------------------


def test_class_orders_are_those_of_the_release():
    """O6."""
    assert python_order(100, 9)[:10].tolist() == [52, 72, 74, 41, 80, 22, 94, 73, 36, 50]
    assert python_order(100, 1)[:10].tolist() == [53, 37, 65, 51, 4, 20, 38, 9, 10, 81]
    assert python_order(5, 0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed, active", [(18001, [0, 1, 2, 3, 7, 9]), (18002, [0, 1, 3, 4, 5, 7])])
def test_a_sampled_client_has_the_classes_of_the_release(seed, active):
    """O5."""
    labels = np.repeat(np.arange(10), 30)
    sample = sample_client(labels, seed, 0.1, 0.6, 1.0)
    assert sorted(sample.reported) == active and np.unique(labels[sample.indices]).tolist() == active
    assert len(set(sample.indices)) == len(sample.indices) == 18


@pytest.mark.parametrize(
    "classes, rows, imbalance, told",
    [
        (10, 500, 1.0, [50] * 6),
        (10, 500, 0.05, [50, 27, 15, 8, 4, 2]),
        (10, 500, 0.01, [50, 19, 7, 3, 1, 0]),
        (20, 120, 0.05, [12, 9, 6, 5, 4, 3, 2, 1, 1, 1, 0, 0]),
    ],
)
def test_a_sampled_client_has_a_long_tail(classes, rows, imbalance, told):
    """O4; where it is only told, the rows are those of the release's data sets."""
    labels = np.repeat(np.arange(classes), rows)
    sample = sample_client(labels, 18001, 0.1, 0.6, imbalance)
    assert list(sample.reported.values()) == told
    held = np.bincount(labels[sample.indices], minlength=classes)
    assert {name: held[name] for name in sample.reported} == sample.reported
    ignored = sample_client(labels, 18001, 0.1, 0.6, imbalance, applied=False)
    assert ignored.reported == sample.reported
    assert [np.sum(labels[ignored.indices] == name) for name in ignored.reported] == [rows // 10] * len(told)


def test_so_many_classes_are_active():
    """42 of DomainNet's 69; a share of 0.9 of ten classes is nine, although 1 - 0.9 is a little under 0.1."""
    active = lambda classes, category: len(sample_client(np.arange(classes), 1, 1.0, category, 1.0).reported)
    assert (active(69, 0.6), active(20, 0.6), active(10, 0.9), active(3, 1.0)) == (42, 12, 9, 3)


# ---- the client's schedule ---------------------------------------------------------------------------------


def test_the_learning_rate_falls_over_the_epochs_of_a_round():
    """O3."""
    factor = lambda schedule, epoch, epochs: schedule(
        TrainingProgress(jnp.int32(0), 1, jnp.int32(epoch), epochs)
    )
    lag = [float(factor(EpochCosineLag(), epoch, 10)) for epoch in range(10)]
    expected = [1, 1, 0.985109, 0.940881, 0.868632, 0.770513, 0.649448, 0.509041, 0.353475, 0.187381]
    np.testing.assert_allclose(lag, expected, atol=1e-6)
    np.testing.assert_allclose(5e-3 * lag[9], 9.369e-4, rtol=1e-4)
    np.testing.assert_allclose(factor(EpochCosine(), 9, 10), 0.015707, atol=1e-6)
    assert float(factor(Constant(), 9, 10)) == 1 and float(factor(EpochCosine(), 0, 1)) == 1


# ---- weights and losses ------------------------------------------------------------------------------------


def test_clients_count_by_their_rows_over_all_rows():
    """O7."""
    rows, valid = jnp.array([[2.0, 1, 0], [0, 1, 0]]), jnp.array([True, True])
    np.testing.assert_allclose(H.class_weights(rows, valid, "over_total"), [[0.4, 0.2, 0], [0, 0.2, 0]])
    np.testing.assert_allclose(H.class_weights(rows, valid, "per_class"), [[1, 0.5, 0], [0, 0.5, 0]])
    np.testing.assert_allclose(
        H.class_weights(rows, jnp.array([True, False]), "uniform"), [[1, 1, 1], [0, 0, 0]]
    )
    cifar = jnp.zeros((5, 100)).at[:, :6].set(50).at[0, 6:10].set(0)
    cifar = cifar.at[4].set(0).at[4, 4:10].set(50)  # together they have ten classes
    weight = H.class_weights(cifar, jnp.ones(5, bool), "over_total")
    np.testing.assert_allclose(weight[0, 0], 0.031447, atol=1e-6)
    np.testing.assert_allclose(jax.nn.softmax(H.log_frequencies(rows.sum(0))), [0.5, 0.5, 0], rtol=1e-6)


def test_the_generator_of_older_classes_trains_longer_in_every_task():
    """Specification 5.6: 100 + 50 t steps from the second task on; none where nobody takes part."""
    steps_of = lambda steps, t: int(H.steps_of_older(H.HepcoOptions(), jnp.int32(steps), jnp.int32(t)))
    assert [steps_of(100, t) for t in range(5)] == [0, 150, 200, 250, 300]
    assert steps_of(0, 3) == 0


@pytest.mark.parametrize("direction, expected", [("client_server", 0.143841), ("server_client", 0.130812)])
def test_the_divergence_has_both_directions(direction, expected):
    """O8; a class that is not seen says nothing."""
    client, server = jnp.log(jnp.array([[[0.5, 0.5, 9.0]]])), jnp.log(jnp.array([[0.25, 0.75, 1.0]]))
    seen = jnp.array([True, True, False])
    np.testing.assert_allclose(H.divergence(client, server, seen, direction), [[expected]], atol=1e-6)
    slope = jax.grad(lambda x: H.divergence(client, x, seen, direction).sum())(server)
    assert np.isfinite(slope).all() and float(slope[0, 2]) == 0


def test_the_clients_cross_entropy_leaves_past_classes_out():
    """O9."""
    loss = cross_entropy(
        jnp.array([[5.0, 1, 2]]), jnp.array([2]), jnp.array([False, True, True]), jnp.array([True])
    )
    np.testing.assert_allclose(loss, 0.313262, atol=1e-6)


def test_prompts_are_compared_by_a_sum_of_squares():
    """O10."""
    network, sizes = vit_network(TINY), Sizes(4, 2, 2, 1)
    model = learner(network, pool(PoolOptions(1, 20, 1), sizes, network), linear(TINY.width, 4))
    query, task = jnp.ones((1, TINY.width)), TASKS[0]
    base = Pool(jnp.zeros((1, 1, 20, TINY.width)), jnp.ones((1, 1, TINY.width)))
    head = init_head(KEY, TINY.width, 4)
    student, teacher = Params(base, head), Params(base._replace(prompt=base.prompt + 0.1), head)
    teachers = H.Teachers(student, jax.tree.map(lambda x: x[None], teacher), jnp.full((1, 4), 0.2))
    gap = H.prompt_gap(H.LatentModel(options(), model, student, task), student, teachers, query)
    np.testing.assert_allclose(0.2 * gap, [[0.2 * 20 * TINY.width * 0.01]], rtol=1e-5)
    assert np.isclose(0.2 * 20 * 768 * 0.01, 30.72)


@pytest.mark.long
def test_prompts_that_are_sums_are_compared_without_being_made():
    """With the gradients that generators need, for clients far from the server's model and near to it."""
    opts, _, model, params, aggregate, _ = world()
    task, z = TASKS[1], jax.random.normal(KEY, (5, FORMULA.width))
    part, study = model.trainable(params, task), H.LatentModel(opts, model, params, task)
    for share in (1.0, 1e-3):
        near = lambda mine, theirs, share=share: mine + share * (theirs - mine)
        parts = jax.tree.map(near, part, aggregate.gather["trainable"])
        teachers = H.Teachers(params, parts, jnp.ones((3, SIZES.classes)))
        fast = H.prompt_gaps(study, teachers)
        plain = functools.partial(H.prompt_gap, study, part, teachers)
        np.testing.assert_allclose(fast(z), plain(z), rtol=2e-3)
        slopes = [jax.grad(lambda z, gap=gap: gap(z).sum())(z) for gap in (fast, plain)]
        np.testing.assert_allclose(*slopes, rtol=1e-2, atol=5e-3 * float(jnp.abs(slopes[1]).max()))


@pytest.mark.long
def test_the_generators_may_see_the_mean_over_the_prompts_numbers():
    """O10: a mean is 0.002 where the sum is 30.72."""
    opts, _, model, params, aggregate, _ = world()
    task, z = TASKS[1], jax.random.normal(KEY, (5, FORMULA.width))
    teachers = H.Teachers(params, aggregate.gather["trainable"], jnp.ones((3, SIZES.classes)))
    study, label = H.LatentModel(opts, model, params, task), jnp.full(5, np.argmax(task.current))
    gaps = H.prompt_gaps(study, teachers)

    def of(**more):
        return jax.jit(lambda z: H.generator_loss(with_options(study, **more), teachers, gaps, z, label))(z)

    without = of(generator_mse="none")
    numbers = 2 * 2 * FORMULA.width  # blocks, tokens, channels
    assert float(without) == float(of(wo_mse=True)) and without > of(generator_mse="sum")
    np.testing.assert_allclose(
        (without - of(generator_mse="mean")) * numbers, without - of(generator_mse="sum"), rtol=1e-3
    )


# ---- generators --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes, scalars", [(100, 1_092_352), (200, 1_098_752), (345, 1_108_032)])
def test_a_generator_has_as_many_parameters_as_the_release(classes, scalars):
    shapes = jax.eval_shape(lambda: init_generator(GeneratorConfig(classes, 768), KEY))
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params)) == scalars


@pytest.mark.long
def test_a_generators_first_values_are_those_of_layers_drawn_one_by_one():
    shape = GeneratorConfig(classes=3, width=5, noise=2, label=2)
    params = init_generator(shape, jax.random.key(4)).params

    class Plain(nn.Module):
        @nn.compact
        def __call__(self):
            nn.Embed(3, 2, embedding_init=nn.initializers.normal(1.0), name="label")(jnp.zeros(1, jnp.int32))
            for name, inputs, width in (("linear0", 4, 256), ("linear1", 256, 1024), ("out", 1024, 5)):
                init = uniform_by_inputs(inputs)
                nn.Dense(width, kernel_init=init, bias_init=init, name=name)(jnp.zeros((1, inputs)))

    plain = Plain().init(jax.random.key(4))["params"]
    same({name: params[name] for name in plain}, plain)


@pytest.mark.long
def test_batch_normalisation_uses_the_batch_in_training_and_what_it_remembers_after_it():
    shape = GeneratorConfig(3, 4, 2, 2)
    generator = init_generator(shape, KEY)
    noise, label = jax.random.normal(KEY, (6, 2)), jnp.array([0, 1, 2, 0, 1, 2])
    trained, moved = generate(shape, generator, noise, label, True)
    still, kept = generate(shape, generator, noise, label, False)
    same(kept, generator)
    assert norm(jax.tree.map(jnp.subtract, moved.stats, generator.stats)) > 1e-3
    assert float(jnp.abs(trained - still).max()) > 1e-3
    x = jnp.concatenate([noise, generator.params["label"]["embedding"][label]], -1)
    hidden = x @ generator.params["linear0"]["kernel"] + generator.params["linear0"]["bias"]
    np.testing.assert_allclose(moved.stats["norm0"]["mean"], 0.1 * hidden.mean(0), atol=1e-6)
    plain = shape._replace(norm=False)
    same(*(generate(plain, init_generator(plain, KEY), noise, label, train)[0] for train in (True, False)))


@functools.cache
def learns():
    adapter = find_adapter("pool").build(PoolOptions(**SMALL), SIZES, FORMULA)
    model = learner(FORMULA, adapter, linear(FORMULA.width, SIZES.classes))
    return Run(SIZES, FORMULA, adapter, Training(1, 4, 0.1)), model


def world(**values):
    """A learner on the formula network, three clients' parts around the server's, and what the step reads in
    the second task."""
    seen = {} if "fidelity" in values else {"generator_mse": "sum"}  # every part of the loss has its word
    given = {"scale": "paper"} | SMALL | FEW | seen | values
    cfg = config.resolve(config.from_mapping("hepco", given, "test"))
    run, model = learns()
    params = model.init(KEY, SCALE)
    noise = lambda i, x: 0.1 * jax.random.normal(jax.random.fold_in(KEY, i), x.shape)
    move = lambda i: jax.tree.map(lambda x: x + noise(i, x), model.trainable(params, TASKS[1]))
    parts = jax.tree.map(lambda *x: jnp.stack(x), *map(move, range(3)))
    rows = np.zeros((3, SIZES.classes), np.int32)
    current = np.flatnonzero(TASKS[1].current)
    rows[0, current[0]], rows[1, current], rows[2, current[-1]] = 4, 2, 7
    aggregate = Aggregate(
        (),
        {},
        {"trainable": parts, "class_examples": jnp.asarray(rows)},
        jnp.ones(3),
        jnp.arange(3),
        jnp.array([True, True, False]),
    )
    past = H.History(Start(move(9), jnp.int32(1)), jnp.where(TASKS[0].current, 3.0, 0.0))
    return config.part(H.HepcoOptions, cfg), run, model, params, aggregate, past


BROADCAST = functools.partial(jax.tree.map, lambda x: x - 0.25)  # what the clients began the round with


@functools.cache
def update_of(opts, run, model):
    """One trace for all tests with the same settings."""
    rule = H.latent_distillation(opts, run)

    def update(round_context, params, past, aggregate, key):
        return rule.update(seen_by_rules(model, round_context, aggregate, key), params, past)

    return jax.jit(update)


def played(opts, run, model, params, aggregate, past, task=TASKS[1]):
    previous = Broadcast(Payload(model.trainable(BROADCAST(params), task), {}))
    now = round_context_of(task, 0, frozen=SCALE, previous=previous)
    return update_of(opts, run, model)(now, params, past, aggregate, KEY)


@pytest.mark.long
def test_the_step_is_what_its_formulas_say():
    """Every loss and every step of Adam written out, under the release's preset, with the same draws."""
    opts, run, model, params, aggregate, past = world(fidelity="released")
    after, _, _ = played(opts, run, model, params, aggregate, past)
    shape, task = GeneratorConfig(SIZES.classes, FORMULA.width, 3, 2), TASKS[1]
    seen, old = np.asarray(task.seen), np.asarray(task.old)
    rows = np.asarray(aggregate.gather["class_examples"] * aggregate.valid[:, None], np.float32)
    weight = rows / (rows.sum() + (rows.sum(0) == 0).sum())
    part = lambda i: jax.tree.map(lambda x: x[i], aggregate.gather["trainable"])
    keys = jax.random.split(KEY, 3)
    odds = lambda count: jnp.where(count > 0, jnp.log(jnp.maximum(count, 1e-12)), -jnp.inf)

    def logits(model, z):
        return jnp.where(seen, z @ model.classifier.kernel + model.classifier.bias, -1e30)

    def prompt(model, z):
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        cosines = jnp.einsum("bd,lmd->blm", unit(z), unit(model.adapter.key))
        return jnp.einsum("blm,lmnd->blnd", cosines, model.adapter.prompt)

    def xent(logits, y):
        return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y]

    def kl(p, q):
        apart = jax.nn.log_softmax(p) - jax.nn.log_softmax(q)
        return jnp.sum(jnp.where(seen, jax.nn.softmax(p) * apart, 0), -1)

    def conditions(key, count, log_odds):
        first, second = jax.random.split(key)
        noise = jax.random.normal(first, (count, 3))
        return noise, jax.random.categorical(second, log_odds, shape=(count,))

    def train(key, steps, log_odds, teachers, weights):
        adam, generator = optax.adam(1e-4), init_generator(shape, jax.random.fold_in(key, 0))
        state = adam.init(generator.params)
        for i in range(steps):
            noise, y = conditions(jax.random.fold_in(key, i + 1), 6, log_odds)

            def loss(p, noise=noise, y=y, generator=generator):
                z, moved = generate(shape, generator._replace(params=p), noise, y, True)
                terms = [
                    jnp.sum(w[y] * (xent(logits(m, z), y) - kl(logits(m, z), logits(params, z))))
                    for m, w in zip(teachers, weights, strict=True)
                ]
                return sum(terms), moved

            slope, moved = jax.grad(loss, has_aux=True)(generator.params)
            update, state = adam.update(slope, state)
            generator = moved._replace(params=optax.apply_updates(generator.params, update))
        return generator

    new = train(keys[0], 3, odds(rows.sum(0)), [part(0), part(1)], weight[:2])
    older = train(
        keys[1], 3 + 2, odds(past.class_examples * old), [past.start.trainable], [old.astype(np.float32)]
    )

    def draw(key):
        first, second = jax.random.split(key)
        noise, y = conditions(first, 6, odds(rows.sum(0)))
        old_noise, old_y = conditions(second, 3, odds(past.class_examples * old))
        value = generate(shape, new, noise, y, False)[0]
        return value, generate(shape, older, old_noise, old_y, False)[0], y, old_y

    expected = params
    for phase, name in enumerate(("adapter", "classifier")):
        adam, key = optax.adam(1e-4), jax.random.fold_in(keys[2], phase)
        state = adam.init(getattr(expected, name))
        for i in range(3):
            z, old_z, y, old_y = draw(jax.random.fold_in(key, i))

            def loss(piece, z=z, old_z=old_z, y=y, old_y=old_y, name=name, expected=expected):
                own = expected._replace(**{name: piece})
                if name == "classifier":
                    both = jnp.concatenate([z, old_z]), jnp.concatenate([y, old_y])
                    return jnp.mean(xent(logits(own, both[0]), both[1]))
                far = lambda a, b: jnp.sum((a - b) ** 2, (1, 2, 3))
                clients = [jnp.sum(weight[j][y] * far(prompt(own, z), prompt(part(j), z))) for j in (0, 1)]
                return sum(clients) + jnp.sum(far(prompt(own, old_z), prompt(past.start.trainable, old_z)))

            update, state = adam.update(jax.grad(loss)(getattr(expected, name)), state)
            expected = expected._replace(**{name: optax.apply_updates(getattr(expected, name), update)})
    change = lambda model: jax.tree.map(jnp.subtract, model, params)
    assert norm(change(expected).adapter) > 1e-3 and norm(change(expected).classifier) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), change(after), change(expected))


def test_what_is_reported_of_the_distillation_is_the_sum_of_its_losses():
    """x^2 from 2 on by steps of a quarter of the slope 2x: 2, 1, 1/2."""
    model = Params((), jnp.float32(2.0))
    loss = {"classifier": lambda trainable, latents: trainable.classifier**2}
    nothing = H.Composite(H.Latents(jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32)), None)
    after, totals = H.train_parts(loss, optax.sgd(0.25), model, lambda key: nothing, KEY, jnp.int32(2))
    assert (float(after.classifier), float(totals["classifier"])) == (0.5, 4 + 1)


SWITCHES = ["wo_previous", "wo_kl", "wo_mse", "wo_prompt_distillation", "wo_classifier_distillation"]


# each compiles a step of its own
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.long
def test_every_ablation_takes_something_away(switch):
    plain, without = (played(*world(**{switch: on}))[0] for on in (False, True))
    start = world()[3]
    assert norm(jax.tree.map(jnp.subtract, plain, without)) > 1e-7
    if switch == "wo_prompt_distillation":
        same(without.adapter, start.adapter)
    if switch == "wo_classifier_distillation":
        same(without.classifier, start.classifier)


READINGS = [
    ("kl_direction", "client_server"),
    ("generator_mse", "none"),
    ("loss_weights", "uniform"),
    ("loss_weights", "per_class"),
    ("distill_phases", "sequential"),
    ("generator_norm", False),
    ("kl_weight", 2.0),
    ("mse_weight", 0.5),
    ("replay_ratio", 1.0),
    ("distill_lr", 1e-3),
    ("generator_lr", 1e-3),
    ("generator_growth", 4),
]


@pytest.mark.parametrize("field, value", READINGS)
@pytest.mark.long
def test_every_reading_changes_the_result(field, value):
    plain, other = (played(*world(**more))[0] for more in ({}, {field: value}))
    assert norm(jax.tree.map(jnp.subtract, plain, other)) > 1e-8


@pytest.mark.long
def test_in_the_release_the_generator_does_not_see_the_disagreement_of_prompts():
    """O11: the gradient of the generators' loss is the same without it."""
    opts, _, model, params, aggregate, _ = world(fidelity="released")
    study = H.LatentModel(opts, model, params, TASKS[1])
    teachers = H.Teachers(params, aggregate.gather["trainable"], jnp.ones((3, SIZES.classes)))
    gaps = H.prompt_gaps(study, teachers)
    loss_at = lambda z, **more: H.generator_loss(with_options(study, **more), teachers, gaps, z, label)
    z, label = jax.random.normal(KEY, (5, FORMULA.width)), jnp.full(5, np.argmax(TASKS[1].current))
    slope = lambda **more: jax.jit(jax.grad(lambda z: loss_at(z, **more)))(z)
    same(slope(), slope(wo_mse=True))
    assert float(jnp.abs(slope(generator_mse="sum") - slope()).max()) > 1e-4


@pytest.mark.long
def test_generators_seek_latents_that_teachers_recognise_and_the_mean_does_not():
    """The signs of eq. 5: the loss falls with the cross-entropy and rises with both disagreements."""
    opts, _, model, params, aggregate, _ = world()
    part = aggregate.gather["trainable"]
    teachers = H.Teachers(params, part, jnp.ones((3, SIZES.classes)))
    z, label = jax.random.normal(KEY, (5, FORMULA.width)), jnp.full(5, np.argmax(TASKS[1].current))
    study = H.LatentModel(opts, model, params, TASKS[1])
    gaps = H.prompt_gaps(study, teachers)
    loss = lambda **more: H.generator_loss(with_options(study, **more), teachers, gaps, z, label)
    own = z @ params.classifier.kernel + params.classifier.bias
    theirs = jax.vmap(lambda head: z @ head.kernel + head.bias)(part.classifier)
    apart = H.divergence(theirs, own, TASKS[1].seen, "server_client").sum()
    gap = H.prompt_gap(study, params, teachers, z).sum()
    assert apart > 0 and gap > 0
    np.testing.assert_allclose(loss(wo_kl=True) - loss(), apart, rtol=1e-4)
    np.testing.assert_allclose(loss(wo_mse=True) - loss(), 0.1 * gap, rtol=1e-4)
    easier = with_options(study, wo_kl=True, wo_mse=True)
    surer = Head(part.classifier.kernel, part.classifier.bias.at[:, label[0]].add(1))
    better = teachers._replace(trainable=part._replace(classifier=surer))
    harder, easy = (
        H.generator_loss(easier, each, H.prompt_gaps(easier, each), z, label) for each in (teachers, better)
    )
    assert easy < harder


def test_an_ablation_of_nothing_is_refused():
    with pytest.raises(InputError, match="wo_mse: --generator-mse is none, so it has no effect"):
        method_of("hepco", network=FORMULA, **SMALL, **FEW, wo_mse=True)
    method_of("hepco", network=FORMULA, **SMALL, **FEW, wo_mse=True, generator_mse="sum")


@pytest.mark.long
@pytest.mark.parametrize("ratio, count", [(0.5, 32), (1.0, 64), (0.125, 8)])
def test_so_many_latents_of_older_classes_are_replayed(ratio, count):
    """O12."""
    opts = options(replay_ratio=ratio)
    shape = GeneratorConfig(SIZES.classes, FORMULA.width)
    past = world()[-1]
    draw = lambda: H.draw_latents(
        opts,
        shape,
        jnp.ones(SIZES.classes) * TASKS[1].current,
        past,
        TASKS[1],
        H.Generators(init_generator(shape, KEY), init_generator(shape, KEY)),
        KEY,
    )
    batch = jax.jit(draw)()
    assert batch.current.value.shape == (64, FORMULA.width) and batch.old.value.shape == (
        count,
        FORMULA.width,
    )
    assert np.asarray(TASKS[1].current)[batch.current.label].all()
    assert np.asarray(TASKS[1].old)[batch.old.label].all()


@pytest.mark.long
def test_the_first_task_has_no_previous_model():
    """Whatever stands in its place does nothing; afterwards the model and the rows are kept."""
    opts, run, model, params, aggregate, past = world()
    first = past._replace(
        start=past.start._replace(task=jnp.int32(-1)), class_examples=jnp.zeros(SIZES.classes)
    )
    spoilt = jax.tree.map(lambda x: x + 5, first.start.trainable)
    poisoned = first._replace(start=first.start._replace(trainable=spoilt))
    task = TASKS[0]
    rows = aggregate.gather["class_examples"].at[:].set(jnp.where(task.current, 3, 0))
    aggregate = aggregate._replace(gather=aggregate.gather | {"class_examples": rows})
    (one, kept, _), (two, _, _) = (
        played(opts, run, model, params, aggregate, each, task) for each in (first, poisoned)
    )
    same(one, two)
    assert norm(jax.tree.map(jnp.subtract, one, params)) > 1e-4
    same(kept.start.trainable, model.trainable(BROADCAST(params), task))  # what the round began with
    assert (
        int(kept.start.task) == 0 and kept.class_examples.tolist() == (6 * np.asarray(task.current)).tolist()
    )


@pytest.mark.long
def test_what_is_not_valid_teaches_nothing():
    opts, run, model, params, aggregate, past = world()
    spoilt = jax.tree.map(lambda x: x.at[2].set(jnp.nan), aggregate.gather["trainable"])
    other = aggregate._replace(gather=aggregate.gather | {"trainable": spoilt})
    same(*(played(opts, run, model, params, each, past)[0] for each in (aggregate, other)))
    nobody = aggregate._replace(valid=jnp.zeros(3, bool))
    same(played(opts, run, model, params, nobody, past)[0], params)


# ---- the diagnosis -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_latents_are_compared_with_real_features_class_by_class():
    """Three classes at (0, 0), (10, 0), (0, 10), every example one away from its mean. Latents of the first
    are two away from it, those of the second at (4, 0) and (6, 0); the third is not made."""
    means = np.array([[0.0, 0], [10, 0], [0, 10]])
    around = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    points = (means[:, None] + around).reshape(-1, 2)
    labels, every = np.repeat(np.arange(3), 4), jnp.arange(3)
    # the mask leaves an example out that would move everything
    points, labels = np.vstack([points, [[1e3, 1e3]]]), np.append(labels, 0)
    real = moments_of(jnp.asarray(points), jnp.asarray(labels), every, jnp.arange(13) < 12)
    np.testing.assert_allclose(D.class_spread(real).mean, means, atol=1e-5)
    np.testing.assert_allclose(D.class_spread(real).variance, np.ones(3), rtol=1e-4)
    label = np.repeat(np.arange(3), D.PER_CLASS)
    latent = np.zeros((len(label), 2))
    latent[label == 0, 1] = np.tile([2.0, -2], D.PER_CLASS // 2)
    latent[label == 1, 0] = np.tile([4.0, 6], D.PER_CLASS // 2)
    logits = np.zeros((len(label), 3))
    logits[label == 0, 0] = 50  # sure and right
    logits[label == 1, 2] = 50  # says the third, which is not seen, so that the first two are equal
    drawn, seen = jnp.array([True, True, False]), jnp.array([True, True, False])
    given = jnp.asarray(latent), jnp.asarray(label), drawn, jnp.asarray(logits), seen, real
    found = {name: float(value.total / value.weight) for name, value in D.compare(*given).items()}
    halves = dict.fromkeys(("recognised", "coverage", "entropy"), 0.5)
    assert found == pytest.approx(halves | {"nearest": 0.75, "distance": 2.5, "spread": 1.5}, rel=1e-3)


def test_latents_between_all_seen_classes_have_an_entropy_of_one():
    logits, seen = jnp.array([[2.0, 2.0, 2.0, 9.0], [50.0, 0.0, 0.0, 9.0]]), jnp.arange(4) < 3
    np.testing.assert_allclose(D._entropy(logits, seen), [1.0, 0.0], atol=1e-5)


def test_a_diagnosis_speaks_of_the_generators_that_there_are():
    opts, run, model, params, _, past = world()
    study, shape = (
        H.LatentModel(opts, model, params, TASKS[1]),
        GeneratorConfig(SIZES.classes, run.network.width),
    )
    examples = jnp.ones(SIZES.classes)

    def found():
        no_features = no_moments(run.sizes.classes, run.network.width)
        history = past._replace(features=no_features)
        return H.diagnosis(study, shape, H.Generators(init_generator(shape, KEY)), examples, history, KEY)

    says = ("recognised", "coverage", "entropy", "nearest", "distance", "spread")
    assert set(jax.eval_shape(found)) == {f"new_{what}" for what in says}


@pytest.mark.long
def test_a_diagnosis_records_and_changes_nothing():
    opts, run, model, params, aggregate, past = world()
    plain = played(opts, run, model, params, aggregate, past)
    total = jax.tree.map(jnp.ones_like, no_moments(run.sizes.classes, run.network.width))
    gather = aggregate.gather | {"features": total}
    own = dataclasses.replace(opts, diagnose=True)
    asked = played(own, run, model, params, aggregate._replace(gather=gather), past._replace(features=total))
    same(plain.params, asked.params)
    same(asked.state.features, jax.tree.map(lambda x: 2 * x, total))
    more = set(asked.metrics) - set(plain.metrics)
    says = ("recognised", "coverage", "entropy", "nearest", "distance", "spread")
    assert more == {f"{which}_{what}" for which in ("new", "older") for what in says}
    reports = [each.name for each in H.latent_distillation(own, run).reports]
    assert reports == ["class_examples", "trainable", "features"]


def test_normal_latents_have_the_means_and_variances_of_real_features():
    """Two channels of two classes, 400 examples each, of which the second class is drawn three times as
    often."""
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal([1, 5], [1, 0.3], (400, 2)), rng.normal([-2, 0], [0.5, 3], (400, 2))])
    label = np.repeat(np.arange(2), 400)
    real = moments_of(
        jnp.asarray(points, jnp.float32), jnp.asarray(label), jnp.arange(2), jnp.ones(800, bool)
    )
    for found, expected in zip(normal_of(real), (np.mean, np.var), strict=True):
        np.testing.assert_allclose(found, [expected(points[label == c], 0) for c in (0, 1)], rtol=1e-3)
    drawn = H.normal_latents(real, KEY, 4000, jnp.log(jnp.array([1.0, 3.0])))
    own = np.asarray(drawn.label)
    assert 0.7 < own.mean() < 0.8
    for c in (0, 1):
        of_class = np.asarray(drawn.value)[own == c]
        np.testing.assert_allclose(of_class.mean(0), points[label == c].mean(0), atol=0.15)
        np.testing.assert_allclose(of_class.std(0), points[label == c].std(0), rtol=0.1)


@pytest.mark.long
def test_with_normal_latents_no_generator_trains_and_clients_send_sums():
    opts, run, model, params, aggregate, past = world()
    own = dataclasses.replace(opts, latents="gaussian")
    reports = [each.name for each in H.latent_distillation(own, run).reports]
    assert reports == ["class_examples", "trainable", "features"]
    nothing = no_moments(run.sizes.classes, run.network.width)
    far = jax.tree.map(jnp.ones_like, nothing)
    past = past._replace(features=nothing)

    def after(sums):
        gather = aggregate.gather | {"features": sums}
        return played(own, run, model, params, aggregate._replace(gather=gather), past)

    one, other = after(nothing), after(far)
    assert float(one.metrics["generator"].weight) == 0
    assert norm(jax.tree.map(jnp.subtract, one.params, other.params)) > 1e-5
    same(other.state.features, far)


def test_of_both_features_prompts_read_the_frozen_network_s_and_the_classifier_all():
    opts, run, *_ = world(fidelity="improved")
    model = linear_learner(run, features=opts.features)
    params = model.init(KEY, SCALE)
    study = H.LatentModel(opts, model, params, TASKS[1])
    frozen, prompted = jax.random.normal(KEY, (2, 5, run.network.width))
    both = jnp.concatenate([frozen, prompted], axis=-1)
    trainable = study.trainable
    same(study.prompt(params, trainable, both), study.prompt(params, trainable, frozen))
    head = params.classifier
    expected = both @ head.kernel + head.bias
    np.testing.assert_allclose(study.logits(params, trainable, both), expected, rtol=1e-5, atol=1e-6)


def test_generators_of_both_features_are_refused():
    with pytest.raises(InputError, match="^features: generators produce one kind"):
        method_of("hepco", features="both", pool_blocks=2)


def test_the_diagnosis_of_generators_that_there_are_not_is_refused():
    with pytest.raises(InputError, match="^diagnose: it compares generators"):
        method_of("hepco", diagnose=True, latents="gaussian", pool_blocks=2)


# ---- the method --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["pool", "lora"])
def test_it_runs_on_adapters_with_and_without_prompts(adapter):
    own = SMALL if adapter == "pool" else {"lora_lr": 1e-3, "lora_blocks": 1}
    hepco, mean = (
        method_of(name, network=FORMULA, adapter=adapter, batch_size=4, lr=0.05, **own, **more)
        for name, more in (("hepco", FEW), ("fedavg-prompt", {}))
    )
    ours, theirs = by_hand(hepco), by_hand(mean)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), ours.params, theirs.params)
    assert max(jax.tree.leaves(moved.classifier)) > 1e-5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours.params))


def test_uploads_are_averaged_without_weights():
    """O14."""
    method = method_of("fedavg-prompt", network=FORMULA, **SMALL)
    uploads = jnp.array([1.0, 2, 3, 4, 10])
    program = method.rounds[0].program
    assert method.aggregation == "uniform" and program.receive is not None
    assert float(uploads.mean()) == 4


@pytest.mark.long
def test_the_merged_model_is_evaluated_too():
    """predisacc: what the clients' mean says, before the server changes it."""
    method = method_of("hepco", network=FORMULA, batch_size=4, lr=0.05, **SMALL, **FEW)
    server = by_hand(method)
    round_context = round_context_of(TASKS[1], frozen=SCALE)
    nothing = jnp.zeros(4, jnp.int32)
    batch = Batch(jax.random.normal(KEY, (4, FORMULA.width)), nothing, nothing == 0, nothing)
    merged, final = (
        compiled(f)(round_context, server, batch) for f in (method.predict_provisional, method.predict)
    )
    assert float(jnp.abs(merged - final).max()) > 1e-6
    as_if = server._replace(
        params=server.params._replace(
            **{name: getattr(server.provisional, name) for name in ("adapter", "classifier")}
        )
    )
    same(merged, compiled(method.predict)(round_context, as_if, batch))
    assert method_of("fedavg-prompt", network=FORMULA, **SMALL).predict_provisional is None


def test_metrics_over_images():
    """O13, and tasks of different sizes."""
    matrix = [[90], [80, 70], [60, 65, 75]]
    assert np.isclose(metrics.A_last(matrix), 66.667, atol=1e-3)
    assert metrics.forgetting(matrix)["paper"] == 17.5 and metrics.drop(matrix, [1, 1, 1]) == 11.25
    found = metrics.by_image(matrix, [100, 300, 100])
    np.testing.assert_allclose(found.acc, [90, 72.5, 66])
    np.testing.assert_allclose(found.lastacc, [np.nan, 80, 63.75])
    np.testing.assert_allclose(found.plastic, [90, 70, 75])
    np.testing.assert_allclose(metrics.drop(matrix, [100, 300, 100]), ((90 - 80) + (72.5 - 63.75)) / 2)
    assert metrics.drop([[90]], [5]) == 0
