"""GLFC and LGA: the published numbers, what a client notices and keeps, what a proxy can rebuild and which
model it chooses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FROZEN,
    IMAGE,
    KEY,
    LABEL,
    NETWORK,
    SIZES,
    TASKS,
    info_of,
    method_of,
    round_context_of,
    seen_by_rules,
)

from fcljax.errors import InputError
from fcljax.methods import find_method
from fcljax.methods.glfc import glfc as G
from fcljax.methods.glfc import lga
from fcljax.methods.glfc import proxy as P
from fcljax.methods.glfc.lenet import _patches, apply_lenet, gradient_of, init_lenet, label_of
from fcljax.models.heads import unit
from fcljax.parts.client import ClientStep, Local, Report
from fcljax.parts.federate import Run, Training
from fcljax.parts.learner import Classifier, Learner, Output, Params
from fcljax.parts.replay import Exemplars, Gathered, Herded
from fcljax.parts.schedules import Constant, Step, StepInRound
from fcljax.types import Aggregate, Batch, ClientContext, TrainingProgress

FIRST, SECOND = TASKS
GAP = jnp.array([0.2, 0.6, 0.5])
SMALL = dict(match_steps=2, prototype_steps=2, memory_size=4, epochs=1, batch_size=4)
NAMES = [field.name for field in G.dataclasses.fields(lga.LGAOptions)]


def options_of(options=G.GLFCOptions, fidelity="intended", **values):
    entry = find_method("glfc" if options is G.GLFCOptions else "lga")
    return dataclasses.replace(entry.presets[fidelity].options, **values)


def batch_of(label, mask=None):
    label = jnp.asarray(label)
    mask = jnp.ones(len(label), bool) if mask is None else jnp.asarray(mask)
    return Batch(jnp.zeros((len(label), 8, 8, 3)), label, mask, jnp.arange(len(label)))


def known_of(learned, block=(0, 0, 0, -1, -1), now=(), later=()):
    """A client that has learned these classes, and remembers rows now and once its task has changed."""

    def herded(rows):
        row = jnp.asarray([*rows, *[-1] * (4 - len(rows))])
        exemplars = Exemplars(jnp.asarray(LABEL)[jnp.maximum(row, 0)], row, jnp.zeros(4))
        return Herded(exemplars, jnp.isin(jnp.arange(5), jnp.asarray(learned, int)))

    return G.ClientMemory(jnp.float32(0.3), herded(now), herded(later), jnp.asarray(block), jnp.bool_(False))


# ---- weights of rows: B12 and B' ---------------------------------------------------------------------------


def test_gradient_compensation_is_over_the_mean_of_old_or_of_new_rows():
    weight = G.by_group(GAP, batch_of([0, 1, 3]), known_of([0, 1, 2]), SECOND)
    np.testing.assert_allclose(weight, [0.5, 1.5, 1.0], rtol=1e-6)
    alone = G.by_group(GAP, batch_of([0, 1, 3]), known_of([]), SECOND)
    assert alone.tolist() == [1, 1, 1]  # a client that has learned nothing


def test_category_balanced_weights_are_of_powered_gaps():
    np.testing.assert_allclose(GAP**0.5, [0.447214, 0.774597, 0.707107], atol=1e-6)
    weight = lga.by_tasks(GAP, batch_of([0, 1, 3]), known_of([0, 1, 2]), SECOND)
    np.testing.assert_allclose(weight, [0.732051, 1.267949, 1.0], atol=1e-6)
    assert lga.by_tasks(GAP, batch_of([0, 1, 3]), known_of([]), SECOND).tolist() == [1, 1, 1]


@pytest.mark.long
def test_older_tasks_add_up_and_weights_are_bounded():
    """In the third task, of a class learned in the first and one in the second: the older one counts for
    both, over the means of {0} and of {0, 1}."""
    task = SECOND._replace(index=jnp.int32(2))
    known = known_of([0, 1], block=(0, 1, -1, -1, -1))
    power = np.asarray(GAP) ** (2 / 3)
    expected = [1 + power[0] / power[:2].mean(), power[1] / power[:2].mean(), 1]
    np.testing.assert_allclose(lga.by_tasks(GAP, batch_of([0, 1, 3]), known, task), expected, rtol=1e-5)
    far = jnp.array([1e-6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    label = [3, 3, 3, 3, 3, 3, 3, 4]
    weight = lga.by_tasks(far, batch_of(label), known_of([0]), SECOND)
    assert float(weight.min()) == 0.5
    many = [0, *[1] * 15]
    weight = lga.by_tasks(jnp.array([1.0, *[1e-6] * 15]), batch_of(many), known_of([0, 1]), SECOND)
    assert float(weight.max()) == 5.0


@pytest.mark.parametrize("weigh", [G.by_group, lga.by_tasks])
def test_rows_of_padding_have_no_say_in_weights(weigh):
    three = weigh(GAP, batch_of([0, 1, 3]), known_of([0, 1, 2]), SECOND)
    padded = batch_of([0, 1, 3, 0, 4], [True] * 3 + [False] * 2)
    five = weigh(jnp.array([*GAP, 0.9, 0.1]), padded, known_of([0, 1, 2]), SECOND)
    np.testing.assert_allclose(five[:3], three)


def test_the_gap_is_how_far_the_sigmoid_is_from_1_and_has_no_gradient():
    logits = jnp.array([[0.0, 2.0], [1.0, -1.0]])
    gap = lambda z: jnp.sum(G.gap_of(z, jnp.array([1, 1])))
    np.testing.assert_allclose(G.gap_of(logits, jnp.array([1, 1])), [1 - 0.880797, 1 - 0.268941], atol=1e-6)
    assert not np.asarray(jax.grad(gap)(logits)).any()


# ---- the loss ----------------------------------------------------------------------------------------------


def learner_of(forward, classifier=None):
    """A learner by what it says of a batch alone; its trainable parameters are all that it has."""
    same = lambda params, task: params
    return Learner(NETWORK, None, classifier, None, None, same, None, None, forward, None, False)


def step_of(learner, context, trainable, batch, output=None):
    """A client's step on a batch."""
    return ClientStep(learner, context, trainable, output, batch, KEY, trainable)


def loss_of(weights, logits, label, answers, known, old_task):
    """The loss of a batch, where an old model of a task (None: there is none) gives these answers."""
    task = SECOND if old_task is None else old_task
    index = jnp.int32(-1) if old_task is None else jnp.int32(old_task.index)
    old = P.OldModel(Params((), ()), jax.tree.map(jnp.asarray, task)._replace(index=index))
    context = ClientContext(FROZEN, None, None, SECOND, info_of(5))
    says = learner_of(lambda *args: Output(jnp.asarray(answers), logits))
    step = step_of(says, context, Params((), ()), batch_of(label), Output(logits, logits))
    return G.weighted_loss(weights, step, known, old)


def by_hand(logits, target, weight):
    """The mean weighted binary cross-entropy, by numpy."""
    z, y = np.asarray(logits, np.float64), np.asarray(target, np.float64)
    p = 1 / (1 + np.exp(-z))
    each = -(y * np.log(p) + (1 - y) * np.log(1 - p))
    return float((np.asarray(weight)[:, None] * each).mean())


LOGITS = jax.random.normal(jax.random.key(3), (3, 5))
ANSWERS = 2 * jax.random.normal(jax.random.key(4), (3, 5))
LABELS = [0, 1, 3]
RULES = {
    "glfc": (G.LossWeights(G.by_group), G.by_group, (0.5, 0.5, 1.0), False),
    "lga": (G.LossWeights(lga.by_tasks, 0.7, 0.7, 0.7, True), lga.by_tasks, (0.7, 0.7, 0.7), True),
}


@pytest.mark.parametrize("name", RULES)
def test_the_loss_is_that_of_labels_and_of_an_old_model_s_answers(name):
    """GLFC: half of each, the second one not weighted. LGA: lambda times both, weighted."""
    weights, weigh, (current, old, alone), weighs_old = RULES[name]
    known = known_of([0, 1, 2])
    weight = weigh(G.gap_of(LOGITS, jnp.asarray(LABELS)), batch_of(LABELS), known, SECOND)
    label = np.eye(5)[LABELS]
    target = np.where(np.asarray(FIRST.seen), jax.nn.sigmoid(ANSWERS), label)
    second = by_hand(LOGITS, target, weight if weighs_old else np.ones(3))
    expected = current * by_hand(LOGITS, label, weight) + old * second
    assert loss_of(weights, LOGITS, LABELS, ANSWERS, known, FIRST) == pytest.approx(expected, rel=1e-5)
    lonely = loss_of(weights, LOGITS, LABELS, ANSWERS, known, None)
    assert lonely == pytest.approx(alone * by_hand(LOGITS, label, weight), rel=1e-5)
    assert abs(lonely - expected) > 1e-2


@pytest.mark.parametrize("old", [FIRST, None], ids=["old model", "none"])
def test_the_loss_has_a_gradient_with_an_old_model_and_without(old):
    """Whether there is one chooses the targets alone: no gradient leaves that choice, for XLA's compiler for
    TPUs crashed on the pieces that it would return."""

    def equal(gap, *_):  # no weight moves with the logits
        return jnp.ones_like(gap)

    def loss(logits):
        return loss_of(G.LossWeights(equal), logits, LABELS, ANSWERS, known_of([0, 1, 2]), old)

    step, found = 1e-2, jax.grad(loss)(LOGITS)
    for i in ((0, 0), (1, 3), (2, 1)):
        more, less = (loss(LOGITS.at[i].add(by)) for by in (step, -step))
        assert found[i] == pytest.approx(float(more - less) / (2 * step), abs=1e-4)
    choices = [e for e in jax.make_jaxpr(jax.grad(loss))(LOGITS).eqns if e.primitive.name == "cond"]
    assert [len(each.outvars) for each in choices] == [1]


# ---- has the task changed? ---------------------------------------------------------------------------------


def work_of(known, entropy, rows=4.0):
    return G.LocalState(known, jnp.float32(entropy * rows), jnp.float32(rows), None, None, None)


def test_the_entropy_of_a_uniform_guess_among_ten_is_their_logarithm():
    """2.302585 > 1.2: a first task is always new (B12). The floor below the logarithm takes 1e-4 off."""
    entropy = float(G.entropy_of(jnp.zeros((1, 10)), jnp.ones(10, bool))[0])
    assert entropy == pytest.approx(2.302585, abs=2e-4)
    blank = work_of(known_of([])._replace(entropy=jnp.zeros(())), entropy)
    ten = FIRST._replace(seen=jnp.ones(10, bool))
    for fidelity in ("intended", "released"):
        assert bool(G.task_changed(options_of(fidelity=fidelity), blank, ten))
    unseen = G.entropy_of(jnp.array([[0.0, 0.0, 50.0]]), jnp.array([True, True, False]))
    assert float(unseen[0]) == pytest.approx(np.log(2), abs=1e-4)


@pytest.mark.parametrize(("unit", "rise"), [("nats", 1.2), ("share", 0.3)])
def test_the_signal_is_a_rise_above_the_threshold(unit, rise):
    options = options_of(entropy_unit=unit, entropy_rise=rise)
    top = np.log(5) if unit == "share" else 1.0  # all five classes are seen
    at = lambda level: bool(G.task_changed(options, work_of(known_of([]), level * top), SECOND))
    assert [at(0.3 + rise * share) for share in (-1, 0.0, 0.99, 1.01)] == [False, False, False, True]


def test_a_client_that_notices_adopts_what_it_has_chosen():
    known = known_of([0], now=[0], later=[5, 10])
    assert G.adopt_exemplars(known, jnp.bool_(True)).current.exemplars.index.tolist() == [5, 10, -1, -1]
    assert G.adopt_exemplars(known, jnp.bool_(False)).current.exemplars.index.tolist() == [0, -1, -1, -1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("entropy", "classes"), [(None, [0, 1, 2, 3, 4]), (5.0, [0, 1, 2, 3, 4]), (0.0, [3, 4])]
)
def test_a_client_that_sits_out_a_task_keeps_exemplars_of_the_one_before(entropy, classes):
    """As one that notices the change, since in the release all clients look for it in every round (B5). One
    that takes part and does not notice the change loses them, as there. `entropy` None: it sits out."""
    run = Run(SIZES, NETWORK, None, Training(1, 4, 0.1))
    rule = G.compensate(options_of(memory_size=10), run, G.LossWeights(G.by_group))

    def end_of(task, known):
        label = jnp.asarray(np.resize(np.flatnonzero(task.current), 9))
        feature = jax.random.normal(KEY, (9, NETWORK.width))
        gathered = Gathered(feature, label, jnp.arange(9), jnp.int32(9))
        context = ClientContext(FROZEN, None, None, task, info_of(5, 9))
        return rule.passes[-1].on_end(context, gathered, Params((), ()), known)

    known = end_of(FIRST, rule.init(KEY, Params((), ())))
    if entropy is not None:
        context = ClientContext(FROZEN, None, None, SECOND, info_of(5, 9))
        known = rule.on_end(context, work_of(known, entropy), Params((), ()), known)
    exemplars = end_of(SECOND, known).upcoming.exemplars
    assert sorted({*np.asarray(exemplars.label)[exemplars.index >= 0].tolist()}) == classes


@functools.cache
def glfc_program():
    method = method_of("glfc", **SMALL)
    (main,) = [each for each in method.rounds if each.when == "round"]
    return method, main.program


@pytest.mark.parametrize("level", [0.0, 5.0])
def test_exemplars_are_replayed_from_what_holds_once_the_client_knows(level):
    """Places in the two memories laid end to end: the first four, or behind them."""
    method, program = glfc_program()
    known = known_of([0], now=[0], later=[5, 10])
    (replay,) = [phase.replay for phase in program.phases if phase.replay]
    context = ClientContext(FROZEN, None, None, SECOND, info_of(5, 2))
    local = at_work(work_of(known, level))
    found = {int(i) for key in jax.random.split(KEY, 8) for i in replay(context, local, key)}
    rows = np.asarray(program.replay_buffer((known,)))
    assert {int(rows[i]) for i in found if i >= 0} == ({5, 10} if level else {0})


def at_work(work):
    """A client at work, of which only the rule's memory is read."""
    return Local(None, (), (work,), {}, jnp.int32(0))


# ---- the rate of learning ----------------------------------------------------------------------------------


def test_the_release_s_rate_is_back_at_the_top_after_every_round():
    """Twenty epochs in each of ten rounds: a fifth in round 5, a fifth of that from the middle of round 7 on,
    and again in round 9; rounds 6 and 8 as if nothing had been."""
    rate = lambda schedule, round_, epoch: float(
        schedule(TrainingProgress(jnp.int32(round_), 10, jnp.int32(epoch), 20))
    )
    rounds = lambda schedule, epoch: [round(1 / rate(schedule, r, epoch)) for r in range(10)]
    assert rounds(StepInRound(), 19) == [1, 1, 1, 1, 1, 5, 1, 25, 1, 125]
    assert rounds(StepInRound(), 9) == [1, 1, 1, 1, 1, 5, 1, 1, 1, 125]
    assert rounds(Step(), 19) == [1, 1, 1, 1, 1, 5, 5, 25, 25, 125]
    assert rounds(Constant(), 19) == [1] * 10


# ---- prototypes and gradients ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lenet():
    return init_lenet(jax.random.key(0), 8, 8, 5)


def smooth(count=3):
    """Images of pixels in [0, 1] that a network can be told apart by."""
    return jax.random.uniform(jax.random.key(5), (count, 8, 8, 3))


def test_the_shared_network_is_that_of_the_release_at_its_size(lenet):
    shapes = jax.eval_shape(lambda: init_lenet(KEY, 32, 32, 100))
    assert shapes.kernel.shape == (768, 100)
    assert [conv.kernel.shape for conv in shapes.convs] == [(75, 12), (300, 12), (300, 12)]
    leaves = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(lenet)])
    assert -0.5 <= leaves.min() < -0.45 and 0.45 < leaves.max() <= 0.5
    out = jax.eval_shape(apply_lenet, lenet, jax.ShapeDtypeStruct((8, 8, 3), jnp.float32))
    assert out.shape == (5,)


def test_its_values_are_draws_of_a_key_for_each_array(lenet):
    """However they are drawn together: everybody must get the same network."""
    leaves = jax.tree.leaves(lenet)
    for key, leaf in zip(jax.random.split(jax.random.key(0), len(leaves)), leaves, strict=True):
        np.testing.assert_array_equal(leaf, jax.random.uniform(key, leaf.shape, minval=-0.5, maxval=0.5))


def test_its_first_layer_is_a_convolution(lenet):
    image, kernel = smooth(1)[0], lenet.convs[0].kernel
    # patches lie by column, row and channel
    square = kernel.reshape(5, 5, 3, 12).transpose(1, 0, 2, 3)
    plain = jax.lax.conv_general_dilated(
        image[None], square, (2, 2), ((2, 2), (2, 2)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(_patches(image, 2) @ kernel, plain[0], atol=1e-5)


@pytest.mark.long
def test_the_label_is_read_off_the_gradient_and_the_image_is_rebuilt(lenet):
    image = smooth()
    label = jnp.array([3, 0, 4])
    encode = jax.jit(jax.vmap(lambda x, y: gradient_of(lenet, x, jax.nn.one_hot(y, 5))))
    gradient = encode(image, label)
    assert label_of(gradient).tolist() == label.tolist()
    options = options_of(match_steps=120, monitor_images=2)
    first = jax.tree.map(lambda leaf: leaf[0], gradient)
    build = jax.jit(lambda key, y: P.match_gradient(options, lenet, (8, 8), key, first, y))
    right, wrong = build(KEY, label[0]), build(KEY, jnp.int32(1))
    assert right.shape == (2, 8, 8, 3)
    apart = lambda found: float(jnp.mean((found[-1] - image[0]) ** 2))
    assert apart(right) < 0.01 < 0.05 < apart(wrong)
    assert float(jnp.mean((image[1] - image[0]) ** 2)) > 0.1  # another image is further off


@pytest.mark.long
def test_the_nearest_image_to_the_class_mean_is_found_over_batches():
    """Features are the images' own sums here; padding and other classes do not count."""

    def forward(frozen, held, part, batch, task, train):
        assert not train
        feature = batch.input.reshape(len(batch.label), -1)[:, :4]
        return Output(feature, feature)

    label, row = jnp.asarray(LABEL[:10]), jnp.arange(10)
    image = jnp.asarray(IMAGE[:10], jnp.float32)
    context = ClientContext(FROZEN, None, None, FIRST, info_of(5, 10))
    zero = jnp.zeros(())
    sums = G.FeatureSums(jnp.zeros((3, 4)), jnp.zeros((3, 4)), jnp.zeros(3), jnp.zeros(3))
    work = G.LocalState(known_of([]), zero, zero, sums, jnp.zeros((3, 8, 8, 3)), jnp.full(3, jnp.inf))
    mask = jnp.arange(10) != 0
    parts = [slice(0, 6), slice(6, 10)]
    batches = [Batch(image[s], label[s], mask[s], row[s]) for s in parts]
    for look in (G.add_statistics, G.find_nearest):
        for batch in batches:
            work = look(step_of(learner_of(forward), context, Params((), ()), batch), work)
    feature = np.asarray(image.reshape(10, -1)[:, :4])
    near = np.asarray(unit(jnp.asarray(feature)))
    spread = []
    for c in range(3):
        mine = [i for i in range(10) if LABEL[i] == c and mask[i]]
        gaps = [np.linalg.norm(near[i] - near[mine].mean(0)) for i in mine]
        np.testing.assert_array_equal(work.image[c], image[mine[int(np.argmin(gaps))]])
        spread.append(feature[mine].var(0).sum())
    assert work.sums.examples.tolist() == [1, 2, 2]
    assert float(G.spread_of(work.sums)) == pytest.approx(np.mean(spread) / 4, rel=1e-4)


def test_a_prototype_is_moved_down_its_own_loss():
    def forward(frozen, held, part, batch, task, train):
        logits = part.adapter * jnp.sum(batch.input.reshape(len(batch.label), -1, 1)[:, :1], axis=1)
        return Output(logits, logits)

    part, pixels = jnp.array([1.0, -1.0, 0.5, 0.0, 2.0]), smooth(2)
    context = ClientContext(FROZEN, None, None, SECOND, info_of(5))
    label, model = jnp.array([0, 4]), Params(part, ())
    options = options_of(prototype_steps=1, prototype_decay=0.1)
    moved = G.perturb(options, learner_of(forward), context, model, pixels, label)
    for i in range(2):
        x = float(pixels[i, 0, 0, 0])
        share = 1 / (1 + np.exp(-np.asarray(part) * x))
        slope = np.mean((share - np.eye(5)[int(label[i])]) * np.asarray(part))
        assert float(moved[i, 0, 0, 0]) == pytest.approx(x - 0.2 * (slope + 0.1 * x), rel=1e-4)
        np.testing.assert_allclose(moved[i, 1:], pixels[i, 1:] * (1 - 0.02), rtol=1e-4)
    still = G.perturb(options_of(prototype_steps=0), learner_of(forward), context, model, pixels, label)
    np.testing.assert_array_equal(still, pixels)


# ---- the proxy ---------------------------------------------------------------------------------------------


def named(frozen, held, part, batch, task, train):
    """A model that is a number, and predicts the class of this number."""
    logits = jnp.broadcast_to(jax.nn.one_hot(part.adapter, 5), (len(batch.label), 5))
    return Output(logits, batch.input.reshape(len(batch.label), -1))


def of_number(held, part, feature, task):
    return jnp.broadcast_to(jax.nn.one_hot(part, 5), (len(feature), 5))


# the classifier of a model that is a number has this number too
NAMED = learner_of(named, Classifier(None, of_number))


@functools.cache
def sent_of(labels):
    """What two clients send: the first one nothing, the other a gradient of an image of each label."""
    options = options_of(match_steps=1, monitor_images=2)
    encode = lambda label: P.encode(options, NETWORK, 5, smooth(3), jnp.asarray(label))
    made = jax.jit(encode)(jnp.asarray((*labels, 0, 0, 0)[:3]))
    gradient = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf), leaf]), made)
    there = jnp.asarray([[False] * 3, [i < len(labels) for i in range(3)]])
    return P.Gradients(gradient, there, jnp.array([9.0, 0.25]))


@functools.cache
def proxy_of(reset):
    """A proxy's first state, and what it does after a merge, compiled."""
    options = options_of(match_steps=1, monitor_images=2, reset_best=reset)
    judge = functools.partial(P.accuracy, options)
    run = Run(SIZES, NETWORK, None, Training(1, 4, 0.1))
    rule = P.proxy_server(options, run, judge, Report(P.REPORT))
    state = rule.init(Params(jnp.int32(0), ()), Params(jnp.int32(0), ()))

    def update(round_context, params, proxy, sent, key):
        return rule.update(server_round_of(round_context, {P.REPORT: sent}, key), params, proxy)

    return state, jax.jit(update)


def server_round_of(round_context, reports, key):
    """What the proxy reads in a round of two clients."""
    two = jnp.ones(2), jnp.arange(2), jnp.ones(2, bool)
    return seen_by_rules(NAMED, round_context, Aggregate((), {}, reports, *two), key)


class Server:
    """A proxy that is told of merged models, which are numbers, one after the other."""

    def __init__(self, reset="arrival"):
        self.state, self.one = proxy_of(reset)

    def merge(self, number, task, round_=1, labels=()):
        sent = sent_of(labels)
        round_context = round_context_of(jax.tree.map(jnp.asarray, task), round_)
        model = Params(jnp.int32(number), ())
        _, self.state, metrics = self.one(round_context, model, self.state, sent, KEY)
        choice = self.state.models
        number = lambda old: int(old.trainable.adapter) if int(old.task.index) >= 0 else None
        return number(choice.previous), number(choice.current), float(metrics["score"].total)


@pytest.mark.parametrize("reset", ["arrival", "second", "never"])
@pytest.mark.long
def test_the_proxy_keeps_the_best_model_of_now_and_of_before(reset):
    """Models predict one class each. In the first task two of three images are of class 2."""
    server = Server(reset)
    half = pytest.approx(2 / 3)
    assert server.merge(1, FIRST, 0, (2, 2, 1)) == (None, 1, pytest.approx(1 / 3))
    assert server.merge(2, FIRST) == (None, 2, half)
    assert server.merge(0, FIRST) == (None, 2, 0)
    assert server.merge(2, FIRST) == (None, 2, half)
    assert server.state.monitor.used.tolist()[1] == [True] * 3
    # new gradients: the best so far steps back, and a worse score is the best one only after a reset
    previous, current, score = server.merge(4, SECOND, 0, (4, 3, 3))
    assert (previous, current, score) == (2, 2 if reset == "never" else 4, pytest.approx(1 / 3))
    assert server.merge(3, SECOND) == (2, 3, half)
    assert server.state.monitor.label[1].tolist() == [4, 3, 3]


@pytest.mark.long
def test_the_radius_is_that_of_the_first_task_s_senders():
    server = Server()
    assert float(server.state.radius) == pytest.approx(0.15)
    server.merge(1, FIRST, 0, (2, 2, 1))
    assert float(server.state.radius) == pytest.approx(0.5)  # the root of the second client's 0.25
    server.merge(1, SECOND, 0, (4, 3, 3))
    assert float(server.state.radius) == pytest.approx(0.5)


@pytest.mark.long
def test_the_radius_is_of_the_mean_variance_of_all_that_sent_whatever_classes_they_have():
    """One client has an image of one class and a variance of 9, the other three and 1/4."""
    sent, server = sent_of((2, 2, 1)), Server()
    both = jax.tree.map(lambda leaf: jnp.stack([leaf[1], leaf[1]]), sent.gradient)
    sent = sent._replace(gradient=both, present=jnp.array([[True, False, False], [True] * 3]))
    round_context = round_context_of(jax.tree.map(jnp.asarray, FIRST), 0)
    _, state, metrics = server.one(round_context, Params(jnp.int32(1), ()), server.state, sent, KEY)
    assert float(state.radius) == pytest.approx(((9 + 0.25) / 2) ** 0.5)
    assert float(metrics["senders"].total) == 2


def test_clients_distil_the_best_of_all_when_their_task_changes_and_later_that_of_before():
    one = lambda number: P.OldModel(Params(jnp.int32(number), ()), FIRST)
    context = ClientContext(
        FROZEN, type("Payload", (), {"sent": {"proxy": P.BestModels(one(1), one(2))}}), None, SECOND, None
    )
    found = [int(G.old_model(context, jnp.bool_(changed)).trainable.adapter) for changed in (False, True)]
    assert found == [1, 2]


# ---- LGA's judge -------------------------------------------------------------------------------------------


def test_perturbed_features_stay_near_and_five_of_each_count():
    feature = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    some, accepted = lga.perturbed(feature, jnp.full(2, 0.1), KEY)
    gap = np.linalg.norm(np.asarray(some).reshape(20, 2, 2) - np.asarray(feature), axis=-1) ** 2
    accepted = np.asarray(accepted).reshape(20, 2)
    assert accepted.sum(0).tolist() == [5, 5] and accepted[:5, 0].all() and not accepted[:5, 1].all()
    assert (gap[:, 1][accepted[:, 1]] <= 0.1 * 0.25).all() and gap.max() > 0.1 * 0.25
    _, none = lga.perturbed(feature, jnp.full(2, 1e3), KEY)
    assert not np.asarray(none).any()


def test_the_variance_of_a_class_is_over_all_its_images():
    feature = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32)
    label, used = jnp.array([1, 1, 0, 1]), jnp.array([True, True, True, False])
    found = lga.class_variance(feature, label, used, 3)
    np.testing.assert_allclose(found[1], np.asarray(feature[:2]).reshape(4, 3).var(0), rtol=1e-5)
    np.testing.assert_allclose(found[0], np.asarray(feature[2]).var(0), rtol=1e-5)
    assert not np.asarray(found[2]).any()


@pytest.mark.long
def test_lga_s_judge_is_silent_in_a_task_s_first_rounds():
    """Of ten rounds the first six; then a model that predicts class 2 has two of three."""
    options = options_of(lga.LGAOptions, match_steps=1, monitor_images=2)
    server = Server()
    server.merge(1, FIRST, 0, (2, 2, 1))
    model = Params(jnp.int32(2), jnp.int32(2))

    @jax.jit
    def judge(round_context, proxy):
        return lga.accuracy_around(options, 10, server_round_of(round_context, {}, KEY), model, proxy, KEY)

    task = jax.tree.map(jnp.asarray, FIRST)
    score = lambda round_: float(judge(round_context_of(task, jnp.int32(round_)), server.state))
    assert [score(5), score(6)] == [0, pytest.approx(2 / 3)]


# ---- the whole ---------------------------------------------------------------------------------------------


def test_released_values_are_those_of_the_release():
    found = find_method("glfc").presets["released"].options
    assert (found.memory_size, found.entropy_rise, found.entropy_unit) == (2000, 1.2, "nats")
    assert (found.match_steps, found.monitor_images, found.reset_best) == (5000, 20, "never")
    assert find_method("lga").presets["released"].options.reset_best == "second"
    assert find_method("glfc").presets["released"].run.lr_schedule == "step_in_round" and found.memory_repeats


def test_a_run_that_does_not_know_the_rows_is_refused():
    with pytest.raises(InputError, match="examples: 0"):
        method_of("glfc", SIZES._replace(examples=0), **SMALL)
