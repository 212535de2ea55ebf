"""MFCL and LANDER: the terms of their losses by hand, what they reach, and what servers make and send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import (
    FROZEN,
    KEY,
    MEANS,
    NETWORK,
    SIZES,
    TASKS,
    info_of,
    linear_on,
    main_of,
    method_of,
    round_context_of,
    rows_of,
    seen_by_rules,
)
from toys import same

from fcljax.federated import communication
from fcljax.methods import lander as L
from fcljax.methods import mfcl as M
from fcljax.models.convnet import Norm
from fcljax.models.heads import Head, init_head
from fcljax.models.resnet import ResNetConfig, resnet_network
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Payload
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Output, Params
from fcljax.parts.synthesis import (
    MOMENTUM,
    ImageBuffer,
    append_images,
    batch_statistics,
    best_images,
    disagreement,
)
from fcljax.parts.task_start import Start
from fcljax.types import Aggregate, ClientContext, Frozen

SEEN = jnp.array([True, True, False])


# ---- what both share ---------------------------------------------------------------------------------------


def test_the_images_of_the_lowest_loss_stay():
    """The parameter is the step's number; its loss is lowest at step 2."""

    counting = optax.GradientTransformation(lambda fast: (), lambda *given: (jnp.ones(()), given[1]))

    def loss(fast, step):
        return (fast - 2.0) ** 2, jnp.full((1, 2, 2, 3), fast)

    best = best_images(loss, jnp.zeros(()), counting, 5, (1, 2, 2))
    assert float(best.image[0, 0, 0, 0]) == 2 and float(best.loss) == 0 and float(best.params) == 5
    assert float(best.gradient_sum) == sum(2 * (i - 2) for i in range(5))


def test_images_are_added_in_the_next_places():
    made = ImageBuffer(jnp.zeros((4, 1, 1, 3), jnp.uint8), jnp.int32(0))
    for value in (0.2, 1.0):
        made = append_images(made, jnp.full((2, 1, 1, 3), value))
    assert list(np.asarray(made.images[:, 0, 0, 0])) == [51, 51, 255, 255] and int(made.filled) == 4


def test_only_what_both_see_alike_is_disputed():
    theirs, own = jnp.log(jnp.array([[0.7, 0.3], [0.6, 0.4]])), jnp.log(jnp.array([[0.5, 0.5], [0.1, 0.9]]))
    kl = 0.7 * np.log(0.7 / 0.5) + 0.3 * np.log(0.3 / 0.5)
    np.testing.assert_allclose(disagreement(theirs, own, jnp.ones(2, bool)), -kl / 2, rtol=1e-5)


def test_running_statistics_tell_those_of_a_batch():
    x = jax.random.normal(KEY, (5, 3, 3, 2)) * 3 + 1
    variables = Norm(True).init(KEY, x, None)
    _, after = Norm(True).apply(variables, x, None, mutable=["batch_stats"])
    ((kept, own),) = batch_statistics(variables["batch_stats"], after["batch_stats"])
    np.testing.assert_allclose(own.mean, x.mean((0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(own.var, x.var((0, 1, 2)), rtol=1e-4)
    same(kept.mean, jnp.zeros(2))
    # KL(N(0, 1) || N(mean, var)), and the sum of lengths
    mean, var = np.asarray(own.mean, np.float64), np.asarray(own.var, np.float64)
    kl = 0.5 * (np.log(var) - 1 + (1 + mean**2) / var)
    stats = variables["batch_stats"], after["batch_stats"]
    np.testing.assert_allclose(M.statistics_gap(*stats), kl.mean(), rtol=1e-4)
    gap = np.linalg.norm(mean) + np.linalg.norm(var - 1)
    np.testing.assert_allclose(L.statistics_distance(*stats), gap, rtol=1e-4)


def test_the_gap_of_statistics_is_between_running_means_and_those_of_the_batch():
    """N(2, 1) and a batch of N(5, 4): KL = log 2 + (1 + 3^2) / 8 - 1/2."""
    running, batch = {"mean": 2.0, "var": 1.0}, {"mean": 5.0, "var": 4.0}
    after = {key: MOMENTUM * running[key] + (1 - MOMENTUM) * batch[key] for key in running}
    stats = ({"norm": jax.tree.map(jnp.float32, layer)} for layer in (running, after))
    assert float(M.statistics_gap(*stats)) == pytest.approx(np.log(2) + 10 / 8 - 0.5, rel=1e-4)


# ---- MFCL: the generator's loss ----------------------------------------------------------------------------


def test_predictions_shall_be_certain_and_classes_balanced():
    logits = jnp.log(jnp.array([[0.9, 0.1, 1e-30], [0.3, 0.7, 1e-30]]))
    np.testing.assert_allclose(M.uncertainty(logits, 1.0), -np.log([0.9, 0.7]).mean(), rtol=1e-5)
    np.testing.assert_allclose(M.uncertainty(logits, 1e6), np.log(3), rtol=1e-3)
    share = np.array([0.6, 0.4])
    expected = 1 + (share * np.log(share)).sum() / np.log(2)
    np.testing.assert_allclose(M.imbalance(logits, SEEN), expected, rtol=1e-4)
    even = jnp.array([[3.0, 3.0, -99.0]])
    np.testing.assert_allclose(M.imbalance(even, SEEN), 0, atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: M.imbalance(x, SEEN))(jnp.array([[200.0, 0.0, -3e38]]))).all()


def test_smooth_images_cost_nothing_and_a_spike_what_smoothing_takes_of_it():
    assert float(M.roughness(jnp.full((1, 6, 7, 3), 0.3))) < 1e-10
    spike = jnp.zeros((1, 7, 7, 3)).at[0, 3, 3].set(1.0)
    one = np.exp(-((np.arange(-2, 3) / 2) ** 2))
    kernel = np.outer(one, one) / one.sum() ** 2
    expected = np.pad(kernel, 1).copy()
    expected[3, 3] -= 1
    np.testing.assert_allclose(M.roughness(spike), (expected**2).mean(), rtol=1e-5)


@pytest.mark.long
def test_the_generator_begins_anew_in_the_first_task_and_then_goes_on_from_where_it_was():
    """Without a step it is what it begins with."""
    options, shape = M.MFCLOptions(generator_steps=0, generator_batch=2), ImageGeneratorConfig(2, 2, 2, 2)
    shapes = jax.eval_shape(functools.partial(init_image_generator, shape), KEY)
    before = jax.tree.map(lambda x: np.full(x.shape, 3.0, np.float32), shapes)
    nobody = Aggregate((), {}, {}, jnp.ones(1), jnp.zeros(1, int), jnp.ones(1, bool))
    model = linear_on(MEANS)

    @jax.jit
    def begun(task):
        around = seen_by_rules(model, round_context_of(task, frozen=Frozen({})), nobody)
        return M.train_generator(options, shape, around, model.init(KEY, Frozen({})), before)[0]

    same(begun(TASKS[1]), before)
    fresh = jax.tree.leaves(begun(TASKS[0]))
    assert all(np.abs(x - y).min() > 0.1 for x, y in zip(fresh, jax.tree.leaves(before), strict=True))


# ---- MFCL: the client --------------------------------------------------------------------------------------


class Formula:
    """A learner whose feature is the image, with a linear classifier."""

    class classifier:
        @staticmethod
        def logits(cached, trainable, feature, task):
            return feature @ trainable


@pytest.mark.long
def test_only_the_classifier_learns_of_all_seen_classes_and_only_features_are_kept():
    """Features and classifiers are numbers; the gradient of each term reaches what it should."""
    task, width = TASKS[1], 2
    rng = np.random.default_rng(0)
    old_head = jnp.asarray(rng.normal(size=(width, SIZES.classes)), jnp.float32)
    began = Params((), old_head)
    batch = rows_of([3, 4], padding=np.nan)
    payload = Payload(began, {"start": Start(began, task.index)})
    context = ClientContext({}, payload, Params((), ()), task, info_of(SIZES.classes))
    f_old, f_made = (jnp.asarray(rng.normal(size=(4, width)), jnp.float32) for _ in range(2))

    def outputs(feature, head):
        return M.Outputs(Output(feature @ head, feature), Output(f_made @ head, 2 * f_made))

    def terms(feature, head):
        step = ClientStep(Formula, context, Params((), head), None, batch, KEY, Params((), head))
        own = outputs(feature, head)
        old = M.Outputs(Output(f_old @ old_head, f_old), Output(f_made @ old_head, f_made))
        return M.finetune_loss(step, own, old), M.feature_loss(step, own, old)

    feature, head = jnp.asarray(rng.normal(size=(4, width)), jnp.float32), old_head + 0.3
    by_feature, by_head = (jax.jacobian(terms, i)(feature, head) for i in (0, 1))
    assert not by_feature[0].any() and by_head[0].any()
    assert by_feature[1].any() and not by_head[1].any()
    # padding counts for nothing: 2 examples and 4 images
    assert not by_feature[1][2:].any()
    keep = np.array([0, 1, 4, 5, 6, 7])
    both = np.concatenate([feature, 2 * f_made])[keep], np.concatenate([f_old, f_made])[keep]
    squares = ((both[0] - both[1]) @ np.asarray(old_head)[:, :3]) ** 2
    np.testing.assert_allclose(terms(feature, head)[1], squares.sum() / 3 / 6, rtol=1e-4)
    label = [3, 4, *np.asarray(f_made @ old_head)[:, :3].argmax(1)]
    logits = both[0] @ np.asarray(head)
    log_sum = np.log(np.exp(logits).sum(1))
    expected = (log_sum - logits[np.arange(6), label]).mean()
    np.testing.assert_allclose(terms(feature, head)[0], expected, rtol=1e-4)


# ---- LANDER ------------------------------------------------------------------------------------------------


def test_within_the_radius_an_anchor_does_not_pull():
    place, anchor = jnp.array([[0.1, 0.0], [0.4, 0.2], [9.0, 9.0]]), jnp.zeros((3, 2))
    mask = jnp.array([True, True, False])
    square = (0.01 + 0.16 + 0.04) / 4
    np.testing.assert_allclose(L.bound_loss(place, anchor, mask, 0.01), square - 0.01, rtol=1e-5)
    slope = functools.partial(jax.grad(L.bound_loss), place, anchor, mask)
    assert slope(0.01).any() and not slope(0.06).any()


def test_weights_of_old_and_new_tasks():
    """2 + 3 of 5 classes: alpha = log2(5/2 + 1), beta = sqrt(3/5). 1 + 1 of 2, the fewest that there can be:
    alpha = 1, beta = sqrt(1/2)."""
    options = L.LanderOptions()
    two = TASKS[1]._replace(current=jnp.arange(5) == 1, seen=jnp.arange(5) < 2)
    np.testing.assert_allclose(L.task_weights(options, two), [0.2 * 2 * 2**0.5, 0.4 * 0.5**0.5], rtol=1e-5)
    found = L.task_weights(options, TASKS[1])
    alpha, beta = np.log2(3.5), np.sqrt(3 / 5)
    np.testing.assert_allclose(found.current, 0.2 * (1 + 1 / alpha) / beta, rtol=1e-5)
    np.testing.assert_allclose(found.previous, 0.4 * alpha * beta, rtol=1e-5)


@pytest.mark.long
def test_synthetic_images_distil_old_classes_and_keep_the_places_of_features():
    """White images without a crop: every feature is 1, whoever computes it."""
    model = linear_on(MEANS)
    rng = np.random.default_rng(0)

    def params():
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        place = Head(draw(3, L.ANCHOR_WIDTH), draw(L.ANCHOR_WIDTH))
        return Params((), Head(draw(3, SIZES.classes), draw(SIZES.classes)), extra={"lander": place})

    mine, began = params(), params()
    white = jnp.full((5, 2, 2, 3), 255, jnp.uint8)
    payload = Payload(mine, {"start": Start(began, TASKS[1].index), "synthesis": white})
    context = ClientContext(Frozen({}), payload, Params((), ()), TASKS[1], info_of(SIZES.classes))
    step = ClientStep(model, context, mine, None, rows_of([3]), KEY, mine)
    options = L.LanderOptions(synthetic_batch=4, crop_padding=0.0)
    own, old = (np.asarray(x.classifier.kernel.sum(0) + x.classifier.bias)[:3] / 2 for x in (mine, began))
    target = np.exp(old) / np.exp(old).sum()
    distilled = -(target * (own - np.log(np.exp(own).sum()))).sum()
    places = (np.asarray(x.extra["lander"].kernel.sum(0) + x.extra["lander"].bias) for x in (mine, began))
    apart = np.mean(np.subtract(*places) ** 2)
    np.testing.assert_allclose(L.earlier_tasks_loss(options, step), distilled + apart, rtol=1e-4)


def test_anchors_lie_as_far_apart_as_the_release_s_text_embeddings():
    anchor = np.asarray(L.anchors(40))
    apart = ((anchor[:, None] - anchor) ** 2).mean(-1)[np.triu_indices(40, 1)]
    assert 0.07 < apart.min() < apart.mean() < 0.1
    assert apart.min() > 4 * L.LanderOptions().bound_radius  # radii do not overlap


def test_anchors_are_text_features_of_the_classes_where_prompts_are_given():
    frozen = Frozen({}, text=FROZEN.text)
    same(L.class_anchors(L.LanderOptions(), frozen, 5), L.anchors(5))
    same(L.class_anchors(L.LanderOptions(class_prompts="a {}"), frozen, 5), FROZEN.text.features)
    drawn, named = (
        jax.eval_shape(method_of("lander", class_prompts=prompts).init, KEY, FROZEN).params.extra["lander"]
        for prompts in ("none", "a {}")
    )
    assert (drawn.kernel.shape[1], named.kernel.shape[1]) == (L.ANCHOR_WIDTH, FROZEN.text.features.shape[1])


def test_labels_are_balanced_over_the_seen_classes():
    seen = jnp.array([False, True, True, False, True])
    label = np.asarray(L.balanced_labels(seen, 8, KEY))
    values, counts = np.unique(label, return_counts=True)
    assert list(values) == [1, 2, 4] and sorted(counts) == [2, 3, 3]


def test_a_random_layer_tells_images_of_one_class_apart():
    layer = jax.random.normal(KEY, (2, L.ANCHOR_WIDTH, 4))
    z = np.asarray(L.generator_input(layer, L.anchors(3)[jnp.tile(jnp.arange(2), 10)]))
    np.testing.assert_allclose(z[0], z[2], atol=1e-4)  # one class, one group of ten
    assert np.abs(z[0] - z[10]).max() > 1  # one class, another group
    assert np.abs(z[0] - z[1]).max() > 1


@pytest.mark.long
def test_images_are_disputed_from_the_third_round_of_the_student_on():
    """With a warm-up of w rounds the student learns from round w + 1 on, counted from 1, and its disagreement
    counts from round w + 3 on. So of three rounds that make images only the last one feels its weight."""
    head = init_head(jax.random.key(1), NETWORK.width, SIZES.classes)
    place = init_head(jax.random.key(2), NETWORK.width, L.ANCHOR_WIDTH)
    near = jax.tree.map(lambda x: 1.1 * x, head)  # a student that has a notion of the classes from the start
    learner = linear_on(NETWORK)._replace(init=lambda *_: Params((), near))
    shape = ImageGeneratorConfig(8, 8, 4, 4)
    nobody = Aggregate((), {}, {}, jnp.ones(1), jnp.zeros(1, int), jnp.ones(1, bool))

    def loss(rounds, weight):
        options = L.LanderOptions(
            **SMALL | {"synthesis_warmup": 1, "synthesis_batch": 4, "student_steps": 2},
            synthesis_rounds=rounds,
            adversarial_weight=weight,
        )

        def total(key):
            around = seen_by_rules(learner, round_context_of(TASKS[0]), nobody, key)
            params = Params((), head, extra={"lander": place})
            nothing = jnp.zeros((4 * rounds, 8, 8, 3), jnp.uint8)
            return L.synthesise(options, shape, around, params, nothing)[1].total

        return float(jax.jit(total)(KEY))

    assert loss(2, 1.0) == loss(2, 50.0)
    assert abs(loss(3, 1.0) - loss(3, 50.0)) > 1e-3


# ---- rounds ------------------------------------------------------------------------------------------------

SMALL = {"generator_steps": 2, "generator_channels": 4, "noise_width": 4, "synthetic_batch": 4}
OPTIONS = {
    "mfcl": SMALL | {"generator_batch": 4},
    "lander": SMALL
    | {"synthesis_rounds": 2, "synthesis_batch": 4, "synthesis_warmup": 1, "student_steps": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_stands_for_old_classes_goes_down_in_every_round_and_is_counted(name):
    made = method_of(name, **OPTIONS[name])
    server = jax.eval_shape(made.init, KEY, FROZEN)
    now = round_context_of(TASKS[0], frozen=FROZEN)
    broadcast = jax.eval_shape(made.broadcast, now, server)
    sent = broadcast.payload.sent["generator" if name == "mfcl" else "synthesis"]
    if name == "mfcl":
        shape = ImageGeneratorConfig(8, 8, 4, 4)
        expected = communication.count_scalars(jax.eval_shape(lambda: init_image_generator(shape, KEY)))
        assert communication.count_scalars(sent) == expected > 0
    else:
        assert sent.shape == (8, 8, 8, 3) and sent.dtype == jnp.uint8
    assert communication.traffic(None, broadcast).download_bytes > communication.num_bytes(sent)


def test_a_generator_makes_other_images_of_other_noise():
    shape = ImageGeneratorConfig(8, 8, 4, 4)

    @jax.jit
    def generated(key):
        return generate_images(shape, init_image_generator(shape, key), jax.random.normal(key, (3, 4)))

    image = generated(KEY)
    assert len({np.asarray(one).tobytes() for one in image}) == 3


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_statistics_of_batch_normalisation_count_where_there_are_any(name):
    network = resnet_network(ResNetConfig(8, (1, 1), 4, "cifar"))

    def loss(weight):
        made = method_of(name, network=network, **OPTIONS[name], statistics_weight=weight)

        def after_a_task(key):
            frozen = Frozen(network.init(key))
            server = made.init(key, frozen)
            now = round_context_of(jax.tree.map(jnp.asarray, TASKS[0]), 1, True, frozen)
            now = now._replace(previous=made.broadcast(now, server))
            who = jnp.ones(4), jnp.arange(4), jnp.ones(4, bool)
            return main_of(made).server(
                now, server, Aggregate(now.previous.payload.trainable, {}, {}, *who), key
            )

        (found,) = jax.jit(after_a_task)(KEY)[1].values()
        return float(found.total / found.weight)

    assert loss(5.0) > loss(0.0) + 0.1
