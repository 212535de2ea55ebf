"""A method from parts against the same work by hand: which parts do nothing, which cannot go together, what
is sent, and how uploads are merged. `test_compose.py` runs all combinations through the engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import (
    FORMULA,
    FPPL,
    KEY,
    PILORA,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    aggregate_of,
    by_hand,
    client_round,
    compiled,
    context_of,
    info_of,
    main_of,
    method_of,
    resolved,
    round_context_of,
    rows_of,
    server_round,
    train,
)
from small_runs import some

from fcljax.adapters import find_adapter
from fcljax.adapters.full import FullOptions
from fcljax.adapters.linear import LinearOptions
from fcljax.choices import with_options
from fcljax.errors import InputError
from fcljax.federated import sums
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.methods.fppl import FPPLOptions, debias_classifier, unified_representation
from fcljax.methods.pilora import average_prototypes, distance_cross_entropy, reweight_prototypes
from fcljax.models.heads import Head, cross_entropy
from fcljax.parts.classifiers import linear, nearest_mean, prototypes
from fcljax.parts.client import ClientPass, ClientRule, OfEachClient, Replay, Training
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import cross_entropy_loss, learner
from fcljax.parts.optimise import joined_steps
from fcljax.parts.proximal import norm_bound, prox
from fcljax.parts.replay import replay
from fcljax.parts.reports import Prototypes, class_mean_rule, class_prototypes, class_sums
from fcljax.parts.server import ServerRule, ServerUpdate
from fcljax.runs.build import make_train
from fcljax.types import Aggregate, View, Weighted

RATE = 0.1
GRADIENT = Training(1, 4, RATE, optax.identity())
CROSS_ENTROPY = cross_entropy_loss()
BATCHES = [rows_of([3, 4, 4]), rows_of([4], seed=2)]


def run_of(adapter="linear", training=GRADIENT, **aggregation):
    options = {"linear": LinearOptions(), "full": FullOptions(RATE)}[adapter]
    built = find_adapter(adapter).build(options, SIZES, FORMULA)
    return Run(
        SIZES, FORMULA, built, training, make_aggregation(with_options(AggregationOptions(), aggregation))
    )


def compose(run, client_rules=(), server_rules=(), classifier=linear, loss=CROSS_ENTROPY, **others):
    """A method of these parts."""
    model = learner(run.network, run.adapter, classifier(WIDTH, SIZES.classes))
    return federate(run, model, loss=loss, client_rules=client_rules, server_rules=server_rules, **others)


def fresh(method):
    return compiled(method.init)(KEY, SCALE)


def uploads_of(method, server, task, count=2):
    """Uploads of clients with different rows."""
    own = [int(label) for label in task.classes if label >= 0]
    batches = lambda i: [rows_of([*own, own[i % 2]], 3 * i), rows_of(own[: 1 + i % 2], 3 * i + 1)]
    return [client_round(method, server, task, batches(i), id_=i)[0] for i in range(count)]


def received(uploads, valid=None):
    ids = range(len(uploads))
    return aggregate_of(uploads, ids, [True] * len(uploads) if valid is None else valid, SIZES.clients)


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def close(left, right, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), left, right)


def differ(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


# ---- the same method from other parts ----------------------------------------------------------------------


@pytest.mark.long
def test_fppl_with_its_parts_off_is_fedavg_on_its_adapter():
    own = dict(network=FORMULA, lr=RATE, batch_size=4, prompt_length=2, prompt_blocks=2)
    fused = dict(wo_fusion=False, gate_scale="learnable", prompt_upload="current")
    ours = by_hand(method_of("fppl", wo_unified=True, wo_debias=True, **own))
    same(ours, by_hand(method_of("fedavg", **fused, **own)))
    whole = by_hand(method_of("fppl", **own)).params
    assert differ(ours.params, whole._replace(extra={})) > 1e-3


@pytest.mark.long
def test_nothing_inside_the_network_and_the_mean_is_the_method_linear_and_a_plain_loop():
    """Two rounds of both tasks of Adam, as optax does it, on unpadded rows, averaged by rows."""
    own = dict(network=FORMULA, lr=RATE, batch_size=4)
    ours = by_hand(compose(run_of(training=Training(5, 4, RATE))), rounds=2)
    named = by_hand(method_of("linear", **own), rounds=2)
    start = fresh(method_of("linear", **own)).params.classifier
    close(named.params.classifier, plain_loop(start, rounds=2), atol=1e-5)
    other = fresh(compose(run_of())).params.classifier  # its first values are drawn from another key
    close(ours.params.classifier, plain_loop(other, rounds=2), atol=1e-5)


def weighted(share):
    return lambda *each: sum(x * n for x, n in zip(each, share, strict=True))


def plain_loop(head, rounds):
    """FedAvg of a linear classifier on the rows of `by_hand`."""
    adam = optax.adam(RATE)

    @functools.partial(jax.jit, static_argnums=3)
    def gradient(head, image, label, classes):
        def loss(head):
            logits = (image @ head.kernel + head.bias)[:, jnp.asarray(classes)]
            place = jnp.argmax(label[:, None] == jnp.asarray(classes), axis=1)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, place))

        return jax.grad(loss)(head)

    for task in TASKS:
        own = tuple(int(label) for label in task.classes if label >= 0)
        for _ in range(rounds):
            sent = []
            for i in (0, 2):
                mine, optimiser, count = head, adam.init(head), 0
                for labels, seed in (([*own, own[i // 2]][:4], 3 * i), (own[: i + 1], 3 * i + 1)):
                    rows = rows_of(list(labels), seed)
                    n = int(rows.mask.sum())
                    g = gradient(mine, rows.input[:n], rows.label[:n], own)
                    update, optimiser = adam.update(g, optimiser)
                    mine, count = optax.apply_updates(mine, update), count + n
                sent.append((mine, count))
            weight = np.array([count for _, count in sent]) / sum(count for _, count in sent)
            head = jax.tree.map(weighted(weight), *(mine for mine, _ in sent))
    return head


# ---- server rules that do nothing --------------------------------------------------------------------------


def with_no_prototypes(aggregate):
    """As if no client held any class."""
    sent = aggregate.gather["prototypes"]
    gather = aggregate.gather | {"prototypes": sent._replace(present=jnp.zeros_like(sent.present))}
    return aggregate._replace(gather=gather)


@pytest.mark.parametrize("idle", some(["empty pool", "wo_debias"], ["empty pool"]))
def test_a_server_that_has_nothing_to_debias_leaves_the_mean(idle):
    run = run_of()
    rule = debias_classifier(FPPLOptions(**vars(FPPL) | dict(wo_debias=idle == "wo_debias")), run)
    debiasing, plain = compose(run, server_rules=(rule,)), compose(run)
    server, mean = fresh(debiasing), fresh(plain)
    aggregate = received(uploads_of(debiasing, server, TASKS[1]))
    after, _ = server_round(
        debiasing, server, TASKS[1], with_no_prototypes(aggregate) if idle == "empty pool" else aggregate
    )
    expected, _ = server_round(plain, mean, TASKS[1], aggregate._replace(gather={}))
    same(after.params, expected.params)
    trained = compose(run, server_rules=(debias_classifier(FPPL, run),))
    assert differ(server_round(trained, server, TASKS[1], aggregate)[0].params, expected.params) > 1e-4


def test_prototypes_at_equal_distances_are_averaged_uniformly_as_without_reweighting():
    run = run_of()
    weighing = compose(run, server_rules=(reweight_prototypes(PILORA, run),), classifier=prototypes)
    plain = compose(run, server_rules=(average_prototypes(run),), classifier=prototypes)
    server = fresh(weighing)
    one = jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH)), jnp.float32)
    sent = jnp.stack([one, -one, one, -one])  # all at the same distance from features that are 0
    present = Prototypes(jnp.zeros((4, 3, WIDTH)), jnp.ones((4, 3), bool))
    gather = {"classifier": sent, "features": present}
    mean = server.params._replace(classifier=())
    everyone = (jnp.array([1.0, 9, 1, 1]), jnp.arange(4), jnp.ones(4, bool))
    aggregate = Aggregate(mean, {}, gather, *everyone)
    after, _ = server_round(weighing, server, TASKS[1], aggregate)
    expected, _ = server_round(plain, server, TASKS[1], aggregate._replace(gather={"classifier": sent}))
    close(after.params, expected.params)
    np.testing.assert_allclose(after.params.classifier[3:], 0.0, atol=1e-6)
    near = aggregate._replace(gather=gather | {"features": present._replace(vector=present.vector + one)})
    moved, _ = server_round(weighing, server, TASKS[1], near)
    odds = np.exp(1 / 0.2)
    np.testing.assert_allclose(moved.params.classifier[3:], (odds - 1) / (odds + 1) * one[:2], rtol=1e-4)


# ---- parts that cannot go together -------------------------------------------------------------------------


def refused(message, *args, **others):
    with pytest.raises(InputError) as error:
        compose(*args, **others)
    assert str(error.value) == message and "\n" not in message


def test_a_rule_that_reads_what_nobody_sends_is_refused_by_name():
    run = run_of()
    for server_rules, classifier in (((), linear), ((reweight_prototypes(PILORA, run),), prototypes)):
        method = compose(run, (unified_representation(FPPL),), server_rules, classifier)
        message = r"client rule 'unified': fppl.py:\d+ loss\(\) reads 'debias', which no server rule sends"
        with pytest.raises(InputError, match=message):
            train(method, fresh(method), TASKS[1], BATCHES)


def test_two_rules_that_replay_examples_and_rules_that_are_half_made_are_refused():
    first, second = replay(4, 4), dataclasses.replace(replay(4, 4), name="second")
    refused("client_rules: only one of them can replay past examples", run_of(), (first, second))
    refused("client_rules: two of them have the name 'replay'", run_of(), (first, replay(4, 4)))
    with pytest.raises(TypeError, match="view"):
        ClientPass("after_training", step=lambda step, memory: memory)
    with pytest.raises(TypeError, match="stored"):
        Replay(2, choose=lambda context, memory, key: jnp.zeros(2, jnp.int32))


def test_a_rule_of_a_method_that_does_not_train_is_refused():
    refused(
        "client_rules: prox acts on training, but nothing trains here; leave it out",
        run_of(),
        (prox(1.0),),
        loss=None,
    )


RULES = [dict(aggregator="median"), dict(clip_norm=1.0), dict(server_optimiser="adam")]


def cannot(run, part):
    return (
        f"aggregator: {run.aggregation.name!r} cannot be applied, because {part} merges uploads by its "
        f"own rule; nearest: 'mean'"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule)))
def test_an_aggregation_rule_that_a_server_rule_cannot_follow_is_refused_by_name(rule):
    run = run_of(**rule)
    refused(cannot(run, "reweight"), run, (), (reweight_prototypes(PILORA, run),), prototypes)
    refused(cannot(run, "class_means"), run, server_rules=(class_mean_rule(run, "task_end"),))
    compose(
        run, server_rules=(debias_classifier(FPPL, run),)
    )  # what this one gathers is not what is averaged
    averaging = run, (), (average_prototypes(run),), prototypes
    if "aggregator" in rule:
        compose(*averaging)
    else:  # these act on what is averaged, which its prototypes are not
        refused(cannot(run, "average"), *averaging)


def test_noise_is_refused_by_rules_that_gather_even_if_they_follow_the_aggregation_rule():
    """What is gathered is sent without noise."""
    run = run_of(clip_norm=1.0, noise_multiplier=1.0)
    refused(cannot(run, "debias"), run, (), (debias_classifier(FPPL, run),))
    compose(run)


# ---- aggregation -------------------------------------------------------------------------------------------


def test_a_median_ignores_one_client_in_three_and_the_mean_does_not():
    robust, plain = (compose(run_of("full", aggregator=rule)) for rule in ("median", "uniform"))
    server, after = fresh(plain), {}
    for method in (robust, plain):
        uploads = uploads_of(method, server, TASKS[1], 3)
        merged = lambda upload: upload.gather["mean"] if upload.mean == () else upload.mean
        parts = jax.tree.map(lambda *x: jnp.stack(x), *map(merged, uploads))
        mean, gather = jax.tree.map(lambda x: 1e6 * x, (uploads[2].mean, uploads[2].gather))
        malicious = [*uploads[:2], uploads[2]._replace(mean=mean, gather=gather)]
        after[method] = [
            server_round(method, server, TASKS[1], received(each))[0].params for each in (uploads, malicious)
        ]
    assert uploads_of(robust, server, TASKS[1], 1)[0].mean == ()  # the rule needs all of them at once
    close(after[robust][0], jax.tree.map(lambda x: jnp.median(x, axis=0), parts), atol=1e-7)
    close(after[plain][0], jax.tree.map(lambda x: jnp.mean(x, axis=0), parts))
    honest = jax.tree.map(lambda x: x[:2], parts)
    low, high = (jax.tree.map(lambda x, f=f: f(x, axis=0), honest) for f in (jnp.min, jnp.max))
    inside = lambda x, a, b: bool(jnp.all((x >= a - 1e-6) & (x <= b + 1e-6)))
    assert all(jax.tree.leaves(jax.tree.map(inside, after[robust][1], low, high)))
    assert differ(after[plain][1], server.params) > 1e4


def aggregate_from(part):
    """What the server sees of two clients whose mean is this part."""
    return Aggregate(part, {}, {}, jnp.ones(2), jnp.arange(2), jnp.ones(2, bool))


def test_server_momentum_steps_along_the_sum_of_past_changes_and_starts_anew_with_a_task():
    step, beta = 0.5, 0.8
    run = run_of("full", server_optimiser="momentum", server_step=step, server_momentum=beta)
    method = compose(run)
    draw = np.random.default_rng(0).normal
    random = lambda tree: jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), jnp.float32), tree)
    begin = lambda task, server: compiled(method.begin_task)(
        round_context_of(task, frozen=SCALE), server, KEY
    )
    server = begin(TASKS[0], fresh(method))
    x, m = server.params, jax.tree.map(jnp.zeros_like, server.params)
    for task, rounds in ((TASKS[0], 2), (TASKS[1], 1)):
        server, m = begin(task, server), jax.tree.map(jnp.zeros_like, m)
        for _ in range(rounds):
            mean = random(x)
            server, _ = server_round(method, server, task, aggregate_from(mean))
            m = jax.tree.map(lambda m, x, mean: beta * m + (x - mean), m, x, mean)
            x = jax.tree.map(lambda x, m: x - step * m, x, m)
            close(server.params, x, atol=1e-5)


@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_a_clipped_upload_keeps_its_direction_and_its_length_is_bounded(clip_norm):
    clipping, plain = compose(run_of("full", clip_norm=clip_norm)), compose(run_of("full"))
    server = fresh(plain)
    uploads = [client_round(method, server, TASKS[1], BATCHES)[0] for method in (clipping, plain)]
    start = server.params
    short, long = (jax.tree.map(jnp.subtract, upload.mean, start) for upload in uploads)
    length = float(optax.tree.norm(long))
    assert length > 0.09
    close(short, jax.tree.map(lambda x: x * min(1.0, clip_norm / length), long))
    assert float(optax.tree.norm(short)) <= clip_norm * (1 + 1e-5)
    assert float(uploads[0].weight) == float(uploads[1].weight) == 4


def test_noise_is_added_once_at_the_server_and_every_client_weighs_the_same():
    run = run_of("full", clip_norm=2.0, noise_multiplier=3.0)
    method = compose(run)
    server = fresh(method)
    upload, _ = client_round(method, server, TASKS[1], BATCHES)
    assert float(upload.weight) == 1
    mean = jax.tree.map(jnp.zeros_like, server.params)
    wide = jnp.zeros((400, 400))
    noisy = method_noise(run, mean._replace(adapter={"scale": wide}))
    # three standard deviations over two clients, of 160,000 draws
    assert float(jnp.std(noisy.adapter["scale"])) == pytest.approx(3.0 * 2.0 / 2, rel=0.02)
    after = [
        server_round(method, server, TASKS[1], aggregate_from(mean), key=key)[0].params
        for key in (jax.random.key(1), jax.random.key(2), jax.random.key(1))
    ]
    assert differ(after[0], after[1]) > 0.1
    same(after[0], after[2])


def method_noise(run, mean):
    return run.aggregation.post(mean, mean, (), jnp.int32(2), KEY)[0]


# ---- what is sent ------------------------------------------------------------------------------------------


def test_an_upload_has_the_trainable_parameters_the_reports_and_what_a_rule_merges_by_itself():
    run, view = run_of("full"), View(1, 4, augment=False)
    nothing = lambda round, params, state: ServerUpdate(params, state)
    sums = class_sums(3, WIDTH, view)
    means = class_prototypes("means", 3, WIDTH, view)
    first = ServerRule("a", nothing, reports=(sums, means))
    second = ServerRule("b", nothing, reports=(means, OfEachClient("classifier"), OfEachClient("trainable")))
    method = compose(run, server_rules=(first, second))
    server = fresh(method)
    assert len(main_of(method).program.phases) == 2  # both reports are made in one pass
    _, local = train(method, server, TASKS[1], BATCHES)
    upload, _ = client_round(method, server, TASKS[1], BATCHES)
    assert upload.mean == () and set(upload.sum) == {"class_sums"}
    assert set(upload.gather) == {"means", "trainable"}  # a part that rules see is sent once, as a whole
    same(upload.gather["trainable"], local.trainable)
    merging = dataclasses.replace(second, reports=second.reports[:2])
    alone = compose(run, server_rules=(first, merging))
    apart, _ = client_round(alone, server, TASKS[1], BATCHES)
    assert apart.mean.classifier == () and set(apart.gather) == {"means", "classifier"}
    same(apart.gather["classifier"], local.trainable.classifier)
    same(apart.mean.adapter, local.trainable.adapter)
    image = np.concatenate([batch.input[batch.mask] for batch in BATCHES]) * local.trainable.adapter["scale"]
    label = np.concatenate([batch.label[batch.mask] for batch in BATCHES])
    total = np.stack([image[label == c].sum(0) for c in (3, 4)])
    np.testing.assert_allclose(upload.sum["class_sums"].feature[:2], total, rtol=1e-5)
    np.testing.assert_allclose(upload.gather["means"].vector[:2], total / [[1], [3]], rtol=1e-5)
    assert upload.gather["means"].present.tolist() == [True, True, False]
    assert int(upload.weight) == 4


def test_what_a_rule_takes_over_is_not_averaged_and_stays_unless_the_rule_changes_it():
    keep = lambda round, params, state: ServerUpdate(params, state)
    method = compose(
        run_of("full"), server_rules=(ServerRule("keep", keep, reports=(OfEachClient("classifier"),)),)
    )
    server = fresh(method)
    after, _ = server_round(method, server, TASKS[1], received(uploads_of(method, server, TASKS[1])))
    same(after.params.classifier, server.params.classifier)
    assert differ(after.params.adapter, server.params.adapter) > 1e-3


def test_server_rules_follow_each_other_and_their_metrics_have_their_names():
    def bump(round, params, state):
        moved = params._replace(classifier=jax.tree.map(lambda x: 2 * x + state, params.classifier))
        return ServerUpdate(moved, state + 1, {"seen": Weighted(state, jnp.ones(()))})

    rules = tuple(ServerRule(name, bump, init=lambda params, trainable: jnp.float32(1)) for name in "ab")
    method = compose(run_of(), server_rules=rules)
    server = fresh(method)
    mean = jax.tree.map(jnp.ones_like, server.params)
    after, metrics = server_round(method, server, TASKS[1], aggregate_from(mean))
    assert set(metrics) == {"a_seen", "b_seen"} and [float(state) for state in after.rules] == [2, 2]
    assert float(after.params.classifier.bias[0]) == 2 * (2 * 1 + 1) + 1


def test_a_rule_may_train_and_send_parameters_of_its_own():
    """One number per task, pulled to 1 by the rule: it trains, is merged and counted."""

    def loss(step, memory):
        return 0.5 * (step.trainable.extra["mine"][step.context.task.index] - 1.0) ** 2

    method = compose(run_of(), (ClientRule("mine", loss, parameters=lambda key: jnp.zeros(SIZES.tasks)),))
    server = fresh(method)
    context, local = train(method, server, TASKS[1], BATCHES)
    expected = 1 - (1 - RATE) ** 2
    np.testing.assert_allclose(local.trainable.extra["mine"], [0.0, expected], rtol=1e-5)
    aggregate = received(uploads_of(method, server, TASKS[1]))
    after, _ = server_round(method, server, TASKS[1], aggregate)
    np.testing.assert_allclose(after.params.extra["mine"], [0.0, expected], rtol=1e-5)
    counted = method.trainable(round_context_of(TASKS[1], frozen=SCALE), server)
    assert set(counted) == {"adapter", "classifier", "mine"} and counted["mine"].shape == (SIZES.tasks,)
    plain = compose(run_of())
    close(local.trainable.classifier, train(plain, fresh(plain), TASKS[1], BATCHES)[1].trainable.classifier)


def test_what_clients_keep_to_themselves_is_not_sent_or_merged_and_goes_on_from_where_it_was():
    """A classifier of each client's own: the adapter alone travels, and predictions are personal."""
    run = run_of("full")
    method = compose(run, (ClientRule("none"),), personal=("classifier",))
    server, plain = fresh(method), compose(run)
    task, round_context = TASKS[1], round_context_of(TASKS[1], frozen=SCALE)
    assert method.broadcast(round_context, server).payload.trainable.classifier == ()
    uploads, states = zip(
        *[client_round(method, server, task, [rows_of([3, 4, i])]) for i in (3, 4)], strict=True
    )
    assert uploads[0].mean.classifier == () and jax.tree.leaves(uploads[0].mean.adapter)
    own = [state[-1]["classifier"] for state in states]
    assert differ(*own) > 1e-3
    expected = train(plain, fresh(plain), task, [rows_of([3, 4, 3])])[1].trainable
    close(own[0], expected.classifier)
    after, _ = server_round(method, server, task, received(uploads))
    same(after.params.classifier, server.params.classifier)
    assert differ(after.params.adapter, server.params.adapter) > 1e-4
    # the next round starts from the client's own classifier and the server's adapter
    _, local = train(method, after, task, [], states[0])
    same(local.trainable.classifier, own[0])
    same(local.trainable.adapter, after.params.adapter)
    batch = rows_of([3, 4, 3])
    mine = after._replace(params=after.params._replace(classifier=own[0]))
    np.testing.assert_array_equal(
        method.predict_client(round_context, after, states[0], batch),
        method.predict(round_context, mine, batch),
    )
    assert plain.predict_client is None


def test_clients_keep_what_is_personal_of_all_tasks_and_train_that_of_the_task():
    """Prototypes, of which those of the task's classes train: each task's stay when the next one comes."""
    method = compose(run_of("full"), classifier=prototypes, personal=("classifier",))
    server = fresh(method)
    _, first = client_round(method, server, TASKS[0], [rows_of([0, 1, 2])])
    _, second = client_round(method, server, TASKS[1], BATCHES, first)
    start, early, late = server.params.classifier, first[-1]["classifier"], second[-1]["classifier"]
    same(late[:3], early[:3])
    same(early[3:], start[3:])
    assert differ(early[:3], start[:3]) > 1e-4 and differ(late[3:], early[3:]) > 1e-4


def test_a_personal_classifier_is_outside_of_prox_and_of_the_bound_on_the_change():
    run, batches = run_of("full"), [rows_of([3, 4, 4]), rows_of([4, 3], seed=2)]
    start = fresh(compose(run, personal=("classifier",)))
    trained = lambda client_rules: (
        train(compose(run, client_rules, personal=("classifier",)), start, TASKS[1], batches)[1].trainable
    )
    bounded, free = trained((norm_bound(1e-6),)), trained(())
    assert differ(bounded.adapter, start.params.adapter) <= 1e-6 < differ(free.adapter, start.params.adapter)
    assert differ(bounded.classifier, start.params.classifier) > 1e-3
    pulled = trained((prox(1.0),))
    assert differ(pulled.adapter, free.adapter) > 0
    assert differ(pulled.classifier, start.params.classifier) > 1e-3


@pytest.mark.parametrize("name", ["classifier", "trainable"])
def test_a_server_rule_that_needs_what_stays_with_the_clients_is_refused(name):
    rule = ServerRule("greedy", lambda *_: None, reports=(OfEachClient(name),))
    with pytest.raises(InputError, match="personal: classifier is not sent, and greedy needs it"):
        compose(run_of(), server_rules=(rule,), personal=("classifier",))


# ---- the loss and predictions ------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", ["current", "seen", "all"])
def test_the_loss_says_which_classes_compete(classes):
    method, competing = compose(run_of(), loss=cross_entropy_loss(classes)), {}
    for task, batches in ((TASKS[0], [rows_of([0, 1, 2])]), (TASKS[1], BATCHES)):
        context, local = train(method, fresh(method), task, batches)
        moved = (
            np.abs(np.asarray(local.trainable.classifier.bias - context.payload.trainable.classifier.bias))
            > 0
        )
        competing[int(task.index)] = np.flatnonzero(moved).tolist()
    everything = [0, 1, 2, 3, 4]
    expected = {"current": ([0, 1, 2], [3, 4]), "seen": ([0, 1, 2], everything), "all": (everything,) * 2}
    assert tuple(competing.values()) == expected[classes]


def test_hardness_multiplies_the_logits_of_the_loss():
    method = compose(run_of(), loss=distance_cross_entropy("current", hardness=3.0))
    server = fresh(method)
    context = context_of(method, server, TASKS[1], info_of(SIZES.classes), SCALE)
    local = compiled(main_of(method).program.start)(context, (), KEY)
    _, metrics = compiled(main_of(method).program.phases[0].step)(context, local, BATCHES[0], KEY)
    head: Head = server.params.classifier
    logits = 3.0 * (BATCHES[0].input @ head.kernel + head.bias)
    expected = cross_entropy(logits, BATCHES[0].label, TASKS[1].current, BATCHES[0].mask, "sum")
    assert float(metrics["loss"].total) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("predicts", ["seen", "all"])
def test_classes_to_come_compete_in_predictions_only_if_asked_for(predicts):
    method = compose(run_of(), predicts=predicts)
    server = fresh(method)
    tempting = server.params.classifier._replace(bias=jnp.arange(5.0) * 1e6)
    server = server._replace(params=server.params._replace(classifier=tempting))
    logits = method.predict(round_context_of(TASKS[0], frozen=SCALE), server, BATCHES[0])
    assert set(np.argmax(logits, -1).tolist()) == ({4} if predicts == "all" else {2})


@pytest.mark.parametrize("when", ["task_start", "task_end"])
def test_what_a_rule_of_once_per_task_keeps_is_there_in_the_next_one(when):
    update = lambda round, params, count: ServerUpdate(params, count + 1)
    counting = ServerRule(
        "count", update, lambda params, trainable: jnp.int32(0), reports=(class_sums(3, WIDTH),), when=when
    )
    method = compose(run_of(), server_rules=(counting,))
    (once,) = [each for each in method.rounds if each.when == when]
    nobody = Aggregate((), {}, {}, jnp.zeros(1), jnp.zeros(1, int), jnp.zeros(1, bool))
    server = fresh(method)
    for count in (1, 2):
        server, _ = once.server(round_context_of(TASKS[0], frozen=SCALE), server, nobody, KEY)
        assert int(server.rules[-1]) == count


def test_a_method_that_does_not_train_has_reports_alone_and_counts_nothing():
    run = run_of()
    method = compose(
        run, server_rules=(class_mean_rule(run, "task_start"),), classifier=nearest_mean, loss=None
    )
    assert [(each.when, each.who) for each in method.rounds] == [("task_start", "everyone")]
    assert method.trainable(round_context_of(TASKS[0], frozen=SCALE), fresh(method)) == {}


# ---- the optimiser's steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [optax.scale_by_adam(), optax.trace(0.9)], ids=["adam", "momentum"])
def test_steps_of_joined_arrays_are_those_of_each_array(inner):
    draw = np.random.default_rng(0).normal

    def numbers(*shape):
        return jnp.asarray(draw(size=shape), jnp.float32)

    def some():
        return {"a": numbers(3), "b": [numbers(2, 3), numbers(), numbers(sums.SMALL + 1)]}

    joined = joined_steps(inner)
    states = inner.init(some()), joined.init(some())
    assert len(jax.tree.leaves(states[1])) < len(jax.tree.leaves(states[0]))
    for gradient in (some(), some(), some()):
        (one, first), (other, second) = (
            jax.jit(by.update)(gradient, state) for by, state in zip((inner, joined), states, strict=True)
        )
        if jax.__version_info__ < (0, 12):
            same(one, other)
        # jax 0.12 rounds the last bit differently
        jax.tree.map(functools.partial(np.testing.assert_array_max_ulp, maxulp=1), one, other)
        states = first, second


def test_runs_take_steps_of_joined_arrays():
    """Adam's moments of a tree of small arrays are two vectors, beside the number of steps."""
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    for values, count in ((dict(), 3), (dict(optimiser="sgd", momentum=0.9), 1), (dict(optimiser="sgd"), 0)):
        training = make_train(resolved("linear", **values), SIZES)
        assert len(jax.tree.leaves(training.optimiser.init(params))) == count
