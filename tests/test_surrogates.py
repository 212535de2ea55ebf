"""Baselines that distil old classes on images that are no client's: CFeD on those of another data set, TARGET
on ones that the server makes of noise."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    DATA,
    FROZEN,
    KEY,
    LABEL,
    MEANS,
    NETWORK,
    SIZES,
    SURROGATE,
    TASKS,
    begin,
    compiled,
    context_of,
    engine_of,
    info_of,
    linear_on,
    main_of,
    method_of,
    play,
    resolved,
    round_context_of,
    seen_by_rules,
)
from toys import same

from fcljax import config
from fcljax.errors import InputError
from fcljax.methods import cfed as C
from fcljax.methods import target as T
from fcljax.models.heads import cross_entropy, distillation, init_head, kl, mask_logits
from fcljax.parts.federate import Payload
from fcljax.parts.image_generator import ImageGeneratorConfig, _Conv, generate_images, init_image_generator
from fcljax.parts.learner import Params
from fcljax.pixels import from_unit
from fcljax.types import Aggregate, Batch, Broadcast, Frozen

SMALL = {
    "synthesis_rounds": 3,
    "synthesis_batch": 4,
    "synthesis_warmup": 1,
    "generator_steps": 2,
    "student_steps": 2,
    "synthetic_batch": 4,
    "generator_channels": 4,
    "noise_width": 4,
}
PLAIN = {
    "optimiser": "sgd",
    "lr": 0.1,
    "batch_size": 4,
    "epochs": 1,
    "lr_schedule": "constant",
    "adapter": "linear",
}
OLD, NEW = TASKS
HEADS = [init_head(jax.random.key(i), NETWORK.width, SIZES.classes) for i in range(4)]


def features(image):
    return NETWORK.apply(FROZEN.network, image, None, False)[0].cls


def logits(head, image):
    return features(image) @ head.kernel + head.bias


def made(name, **values):
    return method_of(name, **PLAIN | values)


def batch_of(task):
    rows = jnp.asarray(np.flatnonzero(np.asarray(task.current)[LABEL])[:4])
    return Batch(DATA.input[rows], DATA.label[rows], jnp.ones(4, bool), rows)


def furthest(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def with_head(server, head):
    return server._replace(params=server.params._replace(classifier=head))


def step_of(method, server, task, id_=0, round_=1):
    """A client's classifier after one step, from the server's."""
    context = context_of(method, server, task, info_of(SIZES.classes, 4, id_, round_), FROZEN)
    program = main_of(method).program
    local = compiled(program.start)(context, method.init_client(KEY, server), KEY)
    after, _ = compiled(program.phases[0].step)(context, local, batch_of(task), KEY)
    return after.trainable.classifier


def descended(head, loss, rate=0.1):
    return jax.tree.map(lambda x, g: x - rate * g, head, jax.grad(loss)(head))


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), a, b)


def began(method, server, task, head):
    """The server in the middle of a task that began with another classifier."""
    start = server.rules[0]
    part = start.trainable._replace(classifier=head)
    return server._replace(rules=(start._replace(trainable=part, task=task.index), *server.rules[1:]))


def history(method):
    server, states = begin(method)
    return [server for server, _, _ in play(engine_of(method), server, states)]


def options_of(name, **values):
    entry = {"cfed": C.CFeDOptions, "target": T.TargetOptions}[name]
    return config.part(entry, resolved(name, **values))


# ---- CFeD: who reviews, and what ---------------------------------------------------------------------------


def reviewing(server, clients):
    roles = jnp.isin(jnp.arange(SIZES.clients), jnp.asarray(clients))
    return server._replace(rules=(server.rules[0], roles, *server.rules[2:]))


def test_a_share_of_the_clients_reviews_drawn_anew_and_nobody_in_the_first_task():
    rule, params = C.roles(0.4, 10), Params((), HEADS[0])
    nobody = Aggregate((), {}, {}, jnp.ones(1), jnp.zeros(1, int), jnp.ones(1, bool))
    around = functools.partial(seen_by_rules, linear_on(NETWORK), round_context_of(OLD), nobody)
    draws = [rule.update(around(jax.random.key(i)), params, jnp.zeros(10, bool)) for i in range(20)]
    assert all(after is params and int(drawn.sum()) == 4 for after, drawn, _ in draws)
    assert len({tuple(drawn.tolist()) for _, drawn, _ in draws}) > 3
    assert np.mean([drawn for _, drawn, _ in draws], 0).max() < 1  # nobody is always one of them
    drawn = draws[0][1]
    assert not rule.sends(OLD, drawn).any() and (rule.sends(NEW, drawn) == drawn).all()
    same(rule.init(params, params), jnp.zeros(10, bool))


@pytest.mark.long
def test_a_reviewer_keeps_to_the_old_model_on_its_surrogate_images_and_a_learner_learns():
    """Specification A17: 0.1 KD_2 towards the model that the task began with, nothing of its own rows."""
    method = made("cfed")
    server = with_head(begin(method)[0], HEADS[0])
    server = reviewing(began(method, server, NEW, HEADS[1]), [2])
    batch = batch_of(NEW)
    learn = lambda head: cross_entropy(logits(head, batch.input), batch.label, NEW.current, batch.mask)
    close(step_of(method, server, NEW, id_=1), descended(HEADS[0], learn))
    chosen = SURROGATE[jax.random.randint(KEY, (4,), 6, 9)]  # the third of four shards of 12

    def review(head):
        image = from_unit(NETWORK, chosen / 255)
        return 0.1 * distillation(logits(head, image), logits(HEADS[1], image), NEW.old, batch.mask)

    found = step_of(method, server, NEW, id_=2)
    close(found, descended(HEADS[0], review))
    assert furthest(found, HEADS[0]) > 1e-4
    # what a reviewer holds of the task is nothing to it
    alone = made("cfed", distill_weight=0.0)
    same(step_of(alone, server, NEW, id_=2), HEADS[0])
    # and in the first task it learns
    first = reviewing(server, [0, 1, 2, 3])
    assert furthest(step_of(method, first, OLD, id_=2, round_=0), HEADS[0]) > 1e-3


def test_shards_are_equal_and_nobody_shares_unless_there_are_too_few():
    shards = [[int(x) for x in C.shard(jnp.int32(i), 4, 11)] for i in range(4)]
    assert shards == [[0, 2], [2, 5], [5, 8], [8, 11]]
    assert [[int(x) for x in C.shard(jnp.int32(i), 4, 2)] for i in range(4)] == [
        [0, 1],
        [0, 1],
        [1, 2],
        [1, 2],
    ]


def test_without_surrogate_images_there_is_one_line():
    method = made("cfed")
    server = begin(method)[0]
    context = context_of(method, server, NEW, info_of(SIZES.classes, 4), FROZEN._replace(surrogate=()))
    program = main_of(method).program

    def first_step(key):
        carry = program.start(context, method.init_client(key, server), key)
        return program.phases[0].step(context, carry, batch_of(NEW), key)

    with pytest.raises(InputError, match="surrogate: cfed reviews images of another data set"):
        jax.eval_shape(first_step, KEY)


@pytest.mark.long
def test_reviewers_change_a_run():
    assert (
        furthest(history(made("cfed"))[-1].params, history(made("cfed", reviewer_share=0.0))[-1].params)
        > 1e-4
    )


@pytest.mark.long
def test_each_teacher_of_the_server_has_images_of_its_own_and_dead_ones_count_for_nothing():
    options, own = options_of("cfed", server_steps=2, server_batch=6), linear_on(NETWORK)
    teachers = jax.tree.map(lambda *x: jnp.stack(x), *[Params((), head) for head in HEADS[1:]])
    image, round_context = SURROGATE[:6].reshape(3, 2, 8, 8, 3), round_context_of(NEW, frozen=FROZEN)
    params = Params((), HEADS[0])
    nobody = Aggregate((), {}, {}, jnp.ones(1), jnp.zeros(1, int), jnp.ones(1, bool))
    valid = C.Ensemble(teachers, jnp.array([True, False, True]))
    around = seen_by_rules(own, round_context, nobody)
    found = C.teachers_loss(options, around, params, valid, image, params)
    seen = [from_unit(NETWORK, image[i] / 255) for i in (0, 2)]
    both = jnp.ones(2, bool)
    expected = [
        0.1 * distillation(logits(HEADS[0], x), logits(HEADS[1 + i], x), NEW.seen, both)
        for x, i in zip(seen, (0, 2), strict=True)
    ]
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-5)


@pytest.mark.long
def test_the_server_distils_towards_its_clients_when_asked():
    options = options_of("cfed", server_steps=30, server_batch=12, server_lr=0.05)
    own = linear_on(NETWORK)
    rule = C.server_distillation(options)
    gathered = jax.tree.map(
        lambda *x: jnp.stack(x), HEADS[1], HEADS[1], jax.tree.map(lambda x: x * jnp.nan, HEADS[1])
    )
    aggregate = Aggregate(
        (),
        {},
        {"trainable": Params((), gathered)},
        jnp.ones(3),
        jnp.arange(3),
        jnp.array([True, True, False]),
    )
    params = Params((), HEADS[0])
    start = rule.init(params, params)
    round_context = round_context_of(OLD, frozen=FROZEN)._replace(previous=Broadcast(Payload(params, {})))
    call = jax.jit(lambda aggregate: rule.update(seen_by_rules(own, round_context, aggregate), params, start))
    after, kept, metrics = call(aggregate)
    image = from_unit(NETWORK, SURROGATE / 255)
    gap = lambda head: float(
        jnp.abs(
            jax.nn.softmax(mask_logits(logits(head, image), OLD.seen))
            - jax.nn.softmax(mask_logits(logits(HEADS[1], image), OLD.seen))
        ).mean()
    )
    assert gap(after.classifier) < 0.7 * gap(HEADS[0]) and float(metrics["loss"].weight) == 30
    nobody, _, metrics = call(aggregate._replace(valid=jnp.zeros(3, bool)))
    same(nobody.classifier, HEADS[0])
    assert float(metrics["loss"].weight) == 0


def test_the_server_distils_on_any_of_the_surrogate_images():
    """Of two, whichever is another one."""
    rule = C.server_distillation(options_of("cfed", server_steps=4, server_batch=8, server_lr=0.1))
    params, sent = (Params((), init_head(jax.random.key(i), 3, SIZES.classes)) for i in (0, 1))
    sent = jax.tree.map(lambda x: 10 * x[None], sent)
    arrived = Aggregate((), {}, {"trainable": sent}, jnp.ones(1), jnp.arange(1), jnp.ones(1, bool))

    @jax.jit
    def distilled(grey):
        image = jnp.broadcast_to(grey[:, None, None, :], (2, 2, 2, 3)).astype(jnp.uint8)
        previous = Broadcast(Payload(params, {}))
        now = round_context_of(OLD, frozen=Frozen({}, surrogate=image), previous=previous)
        seen = seen_by_rules(linear_on(MEANS), now, arrived)
        return rule.update(seen, params, rule.init(params, params))[0]

    grey = jnp.array([[0, 80, 160], [250, 20, 90]])
    changed = [distilled(grey.at[i].set(255 - grey[i])) for i in (0, 1)]
    assert min(furthest(distilled(grey), each) for each in changed) > 1e-3


@pytest.mark.long
def test_server_distillation_changes_a_run_and_refuses_rules_that_it_would_not_follow():
    first = history(made("cfed"))[0].params
    assert furthest(history(made("cfed", server_steps=2, server_lr=0.01))[0].params, first) > 1e-4
    with pytest.raises(InputError, match="aggregator: 'median' cannot be applied, because distillation"):
        made("cfed", server_steps=2, aggregator="median")
    made("cfed", aggregator="median")


# ---- TARGET: the images ------------------------------------------------------------------------------------


def test_a_generator_has_the_layers_of_the_source():
    """Specification C6: linear noise -> 2c (s/4)^2, norm, x2, conv 2c, norm, x2, conv c, norm, conv 3."""
    shape = ImageGeneratorConfig(32, 32, 256, 64)
    params = jax.eval_shape(functools.partial(init_image_generator, shape), KEY)
    count = sum(x.size for x in jax.tree.leaves(params))
    maps, norms = 257 * 128 * 64, 2 * (128 + 128 + 64)
    convolutions = (9 * 128 + 1) * 128 + (9 * 128 + 1) * 64 + (9 * 64 + 1) * 3
    assert count == maps + norms + convolutions
    odd = ImageGeneratorConfig(10, 7, 3, 2)

    @jax.jit
    def generated(key):
        return generate_images(odd, init_image_generator(odd, key), jax.random.normal(key, (5, 3)))

    image = generated(KEY)
    assert image.shape == (5, 10, 7, 3) and 0 <= image.min() < image.max() <= 1


@pytest.mark.long
@pytest.mark.parametrize("doubled", [False, True])
def test_a_layer_is_a_convolution_of_its_images_or_of_the_doubled_ones(doubled):
    x, layer = jax.random.normal(KEY, (2, 5, 4, 3)), _Conv(6, doubled)
    variables = layer.init(KEY, x)

    def plain(variables, x):
        kernel, bias = (variables["params"][name] for name in ("kernel", "bias"))
        image = x.repeat(2, 1).repeat(2, 2) if doubled else x
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers) + bias

    expected, back = jax.vjp(plain, variables, x)
    found, own_back = jax.vjp(layer.apply, variables, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    way = jax.random.normal(KEY, expected.shape)
    chex.assert_trees_all_close(own_back(way), back(way), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_convolution_begins_within_one_over_the_root_of_its_inputs():
    """Of 3 x 3 pixels of 64 channels: 576."""
    first = init_image_generator(ImageGeneratorConfig(8, 8, noise=4, channels=32), KEY)["_Conv_0"]
    for name, least in (("kernel", 0.99), ("bias", 0.9)):
        assert least < 24 * np.abs(first[name]).max() <= 1 + 1e-6


def test_jitter_moves_and_mirrors_and_nothing_else():
    image = jnp.arange(1.0, 193.0).reshape(1, 8, 8, 3).repeat(64, 0)
    padded = np.pad(np.asarray(image[0]), ((1, 1), (1, 1), (0, 0)))
    windows = {
        padded[y : y + 8, x : x + 8][:, ::way].tobytes()
        for y in range(3)
        for x in range(3)
        for way in (1, -1)
    }
    found = {np.asarray(one).tobytes() for one in T.jitter(KEY, image, 0.125)}
    assert found <= windows and len(found) > 12
    still = {np.asarray(one).tobytes() for one in T.jitter(KEY, image, 0.0)}
    assert still == {np.asarray(image[0]).tobytes(), np.asarray(image[0, :, ::-1]).tobytes()}


def test_disagreement_is_the_divergence_over_seen_classes():
    seen = jnp.array([True, True, False])
    p, q = jnp.array([[0.8, 0.2, 0]]), jnp.array([[0.5, 0.5, 0]])
    logs = lambda x: mask_logits(jnp.log(x) + 3, seen)
    expected = 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5)
    np.testing.assert_allclose(kl(logs(p), logs(q), seen), [expected], rtol=1e-5)
    np.testing.assert_allclose(kl(logs(p), logs(p), seen), [0], atol=1e-7)


def test_images_are_made_to_be_recognised_and_where_both_agree_to_be_disputed():
    """Specification C6, by hand: oh CE - adv mean(1[agree] KL), the second after the warm-up only."""
    options = options_of("target", label_weight=0.5, adversarial_weight=2.0)
    teacher, student = (
        jnp.log(jnp.array([[0.7, 0.3], [0.6, 0.4]])),
        jnp.log(jnp.array([[0.5, 0.5], [0.1, 0.9]])),
    )
    task = OLD._replace(seen=jnp.array([True, True]))
    loss = lambda late: T.synthesis_loss(
        options,
        lambda x: teacher,
        lambda x: student,
        task,
        jnp.bool_(late),
        jnp.array([0, 1]),
        jnp.zeros((2, 8, 8, 3)),
    )
    right = 0.5 * -np.log([0.7, 0.4]).mean()
    np.testing.assert_allclose(loss(False), right, rtol=1e-5)
    # only the first row is agreed upon
    kl = 0.7 * np.log(0.7 / 0.5) + 0.3 * np.log(0.3 / 0.5)
    np.testing.assert_allclose(loss(True), right - 2.0 * kl / 2, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True])
def test_a_step_on_the_pixels_lowers_the_teachers_loss_and_raises_disagreement(late):
    options = options_of("target", label_weight=0.0 if late else 1.0)
    image, label = jax.random.uniform(KEY, (4, 8, 8, 3)), jnp.array([0, 1, 2, 0])
    say = lambda head: lambda x: mask_logits(logits(head, from_unit(NETWORK, x)), OLD.seen)
    near = jax.tree.map(lambda a, b: a + 0.2 * b, HEADS[0], HEADS[1])
    teacher, student = say(HEADS[0]), say(near)
    agreed = jnp.argmax(teacher(image), -1) == jnp.argmax(student(image), -1)
    assert agreed.any()
    loss = lambda x: T.synthesis_loss(options, teacher, student, OLD, jnp.bool_(late), label, x)
    slope = jax.grad(loss)(image)
    moved = image - 0.05 * slope / jnp.max(jnp.abs(slope))  # a step that float32 can tell from rounding
    apart = lambda x: float(jnp.where(agreed, kl(teacher(x), student(x), OLD.seen), 0).sum())
    known = lambda x: float(cross_entropy(teacher(x), label, OLD.seen, jnp.ones(4, bool)))
    assert (apart(moved) > apart(image)) if late else (known(moved) < known(image))


def test_what_a_generator_keeps_of_a_round_moves_by_the_release_s_adam():
    """Betas 0.5 and 0.999, and as many learning rates as the generator took steps."""
    options = options_of("target", generator_lr=0.1, generator_steps=3)
    adam = T._meta_optimiser(options)
    first, second = np.array([1.0, -2.0]), np.array([0.5, 3.0])
    _, state = adam.update(jnp.asarray(first), adam.init(jnp.zeros(2)))
    moved, _ = adam.update(jnp.asarray(second), state)
    mean = (0.25 * first + 0.5 * second) / (1 - 0.5**2)
    square = (0.999 * 0.001 * first**2 + 0.001 * second**2) / (1 - 0.999**2)
    np.testing.assert_allclose(moved, -0.3 * mean / (np.sqrt(square) + 1e-8), rtol=1e-3)


def test_the_generator_keeps_the_sum_of_its_gradients_or_the_way_it_went():
    generator, fast, total = {"w": jnp.array([1.0])}, {"w": jnp.array([0.9])}, {"w": jnp.array([5.0])}
    best = T.Best((fast, jnp.zeros(1)), (), (total, jnp.zeros(1)), jnp.zeros(()), jnp.zeros((1, 2, 2, 3)))
    same(T._meta_gradient(options_of("target", meta_update="fomaml"), generator, best), total)
    close(
        T._meta_gradient(options_of("target", meta_update="reptile"), generator, best),
        {"w": jnp.array([6.7])},
    )


def synthesised(seed=0, **values):
    """Images of a global model, of which the student has a notion from the start."""
    near = jax.tree.map(lambda a, b: a + 0.1 * b, HEADS[0], HEADS[1])
    options = options_of("target", **SMALL | values)
    own = linear_on(NETWORK)._replace(init=lambda *_: Params((), near))
    shape = ImageGeneratorConfig(8, 8, 4, 4)
    count = options.synthesis_rounds * options.synthesis_batch
    nothing, params = jnp.zeros((count, 8, 8, 3), jnp.uint8), Params((), HEADS[0])
    nobody = Aggregate((), {}, {}, jnp.ones(1), jnp.zeros(1, int), jnp.ones(1, bool))

    def call(key, images):
        around = seen_by_rules(own, round_context_of(OLD), nobody, key)
        return T.synthesise(options, shape, around, params, images)

    return jax.jit(call)(jax.random.key(seed), nothing)


@pytest.mark.long
def test_images_of_every_round_are_new_and_depend_on_the_key():
    images, loss = synthesised()
    assert images.dtype == jnp.uint8 and images.shape == (12, 8, 8, 3)
    assert len({np.asarray(one).tobytes() for one in images}) == 12 and float(loss.weight) == 3
    same(synthesised()[0], images)
    assert (synthesised(seed=1)[0] != images).any()


@pytest.mark.long
def test_more_steps_are_better_recognised():
    """The mean of the rounds' lowest losses, before the student has a word."""
    mean = lambda found: float(found[1].total / found[1].weight)
    few, many = (synthesised(synthesis_warmup=9, generator_steps=n, label_weight=1.0) for n in (1, 40))
    assert mean(many) < mean(few) - 0.05


@pytest.mark.long
@pytest.mark.parametrize(
    "changed",
    [
        {"adversarial_weight": 0.0},
        {"student_steps": 1},
        {"student_temperature": 2.0},
        {"meta_update": "reptile"},
    ],
)
def test_every_part_of_the_synthesis_counts(changed):
    """After the warm-up the student decides; with a warm-up that never ends (the release) it does not."""
    strong = {"adversarial_weight": 50.0, "student_lr": 1.0, "noise_lr": 0.5}
    total = lambda found: float(found[1].total)
    assert abs(total(synthesised(**strong)) - total(synthesised(**strong | changed))) > 1e-4
    if "meta_update" not in changed:
        late = strong | {"synthesis_warmup": 4}
        assert total(synthesised(**late)) == total(synthesised(**late | changed))


@pytest.mark.long
def test_disagreement_counts_a_round_before_the_student_learns():
    """As in the release: from round w of the warm-up on, counted from 1; the student learns after w + 1."""
    total = lambda **values: float(synthesised(noise_lr=0.5, student_lr=1.0, **values)[1].total)
    for warmup, disputed, taught in ((4, False, False), (3, True, False), (2, True, False), (1, True, True)):
        own = {"synthesis_warmup": warmup}
        assert (abs(total(**own) - total(**own, adversarial_weight=50.0)) > 1e-4) == disputed
        strong = own | {"adversarial_weight": 50.0}
        assert (abs(total(**strong) - total(**strong, student_steps=40)) > 1e-4) == taught


@pytest.mark.long
def test_images_are_made_once_a_task_and_none_after_the_last():
    rounds = history(made("target", **SMALL))  # two rounds in each of two tasks
    images = [server.rules[1] for server in rounds]
    assert not images[0].any() and images[1].any()
    same(images[2], images[1])
    same(images[3], images[1])


# ---- TARGET: the client ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_client_learns_its_rows_and_distils_on_synthetic_images():
    """Specification C5: CE + 25 KD_2; in the first task cross-entropy alone."""
    method = made("target", **SMALL, crop_padding=0.0)
    server = with_head(begin(method)[0], HEADS[0])
    server = began(method, server, NEW, HEADS[1])
    one = SURROGATE[:1].repeat(12, 0)
    even = (one // 2 + one[:, :, ::-1] // 2).astype(jnp.uint8)  # mirrored it is itself
    server = server._replace(rules=(server.rules[0], even))
    batch, mask = batch_of(NEW), jnp.ones(4, bool)
    learn = lambda head, task: cross_entropy(
        logits(head, batch_of(task).input), batch_of(task).label, task.current, mask
    )
    image = from_unit(NETWORK, even[:4] / 255)
    keep = lambda head: 25 * distillation(logits(head, image), logits(HEADS[1], image), NEW.old, batch.mask)
    found = step_of(method, server, NEW)
    close(found, descended(HEADS[0], lambda head: learn(head, NEW) + keep(head)))
    assert furthest(found, descended(HEADS[0], lambda head: learn(head, NEW))) > 1e-3
    close(step_of(method, server, OLD, round_=0), descended(HEADS[0], lambda head: learn(head, OLD)))


@pytest.mark.long
def test_the_images_change_a_run():
    with_images, without = (
        history(made("target", **SMALL, adapter="full", distill_weight=w))[-1].params for w in (25.0, 0.0)
    )
    assert furthest(with_images, without) > 1e-4
