"""FedWeIT's parts: networks composed for every task, the clients' loss, sparse bases, the knowledge base."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import (
    DATA,
    FORMULA,
    KEY,
    NETWORK,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    aggregate_of,
    client_round,
    compiled,
    context_of,
    info_of,
    method_of,
    read,
    round_context_of,
    rows_of,
    seen_by_rules,
    server_round,
    train,
)
from small_runs import some
from toys import same

from fcljax.adapters.full import FullOptions, full
from fcljax.errors import InputError
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.federated.check import Example, check_method
from fcljax.methods import fedavg
from fcljax.methods.fedweit.decomposed import (
    Arrays,
    ClientParams,
    Composition,
    Received,
    compose,
    decomposed,
    filled,
    runs,
    sparse,
)
from fcljax.methods.fedweit.fedweit import (
    FedWeITOptions,
    FinishedTasks,
    Knowledge,
    fedweit,
    hand_out,
    preservation,
    sparsity,
    store_uploads,
)
from fcljax.models.resnet import resnet_network
from fcljax.models.shapes import RESNETS
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run, Training
from fcljax.parts.learner import Params, learner
from fcljax.parts.task_end import of_task_before
from fcljax.types import Aggregate, Features, Frozen, Network

RATE = 0.05
GRADIENT = Training(1, 4, RATE, optax.identity())
OF_FIRST, BATCHES = [rows_of([0, 1, 2])], [rows_of([3, 4, 4]), rows_of([4], seed=2)]
USUAL = dict(mask_start=0.5, adaptive_start=0.0, retroactive=True, kb_samples=2)
TWO = Arrays(jax.tree.structure([0, 0]), ((2, 3), (3,)))  # N = 9, M = 6


def run_of(optimiser=GRADIENT.optimiser, rate=RATE, **aggregation):
    adapter = full(FullOptions(rate), SIZES, FORMULA)
    rule = make_aggregation(AggregationOptions(**aggregation))
    return Run(SIZES, FORMULA, adapter, GRADIENT._replace(optimiser=optimiser), rule)


def weit(run=None, **options):
    return usual(**options) if run is None else fedweit(FedWeITOptions(**USUAL | options), run)


@functools.cache
def usual(**options):
    """One trace of each function for all tests that ask for the same."""
    return weit(run_of(), **options)


def fresh(method):
    return compiled(method.init)(KEY, SCALE)


def close(left, right, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), left, right)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def logit(x):
    return np.log(x / (1 - np.asarray(x, np.float64))).astype(np.float32)


# ---- one network -------------------------------------------------------------------------------------------


def test_arrays_lie_one_after_the_other_and_know_their_outputs():
    tree = [jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0, 9.0)]
    close(TWO.flat(tree), jnp.arange(9.0), atol=0)
    close(TWO.tree(TWO.flat(tree)), tree, atol=0)
    assert TWO.of_outputs(jnp.arange(6.0)).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert TWO.of_arrays(jnp.array([[1.0, 2], [3, 4]])).tolist() == [[1] * 6 + [2] * 3, [3] * 6 + [4] * 3]


BLOCKS = ((4,), (2, 3), (3,), (2, 3), (3,), (2, 3), (3,), (5, 1), ())


def test_equal_blocks_in_a_row_are_found_and_nothing_is_left_out():
    assert runs(BLOCKS) == [(((4,),), 1), (((2, 3), (3,)), 3), (((5, 1), ()), 1)]
    assert runs(((2,), (2,))) == [(((2,),), 2)] and runs(((2,),)) == [(((2,),), 1)]


@pytest.mark.parametrize("lead", [(), (2,)])
def test_blocks_done_at_once_have_the_values_that_each_array_has_by_itself(lead):
    arrays = Arrays(jax.tree.structure([0] * len(BLOCKS)), BLOCKS)
    outputs, each = sum(arrays.outputs), len(BLOCKS)
    values = np.random.RandomState(0).rand(*lead, outputs + each).astype(np.float32)
    of_outputs, of_arrays, parts = values[..., :outputs], values[..., outputs:], []
    pieces = np.split(of_outputs, np.cumsum(arrays.outputs)[:-1], -1)
    for piece, size in zip(pieces, arrays.sizes, strict=True):
        parts.append(np.concatenate([piece] * (size // piece.shape[-1]), -1))
    same(arrays.of_outputs(jnp.asarray(of_outputs)), np.concatenate(parts, -1))
    same(arrays.of_arrays(jnp.asarray(of_arrays)), np.repeat(of_arrays, arrays.sizes, axis=-1))


def test_a_network_is_the_masked_base_plus_its_own_numbers_plus_what_it_attends_to():
    arrays = Arrays(jax.tree.structure([0, 0]), ((2, 2), ()))
    base, mask = jnp.array([1.0, 2, 3, 4, 5]), logit([0.5, 0.25, 0.2])
    own = ClientParams((), mask, jnp.array([0.0, 0, 0, 0.5, 1]), jnp.array([[1.0, 2], [-1, 0.5]]))
    received = jnp.array([[1.0, 1, 1, 1, 1], [0, 1, 2, 3, 4]])
    theta = compose(arrays, base, own, received)
    by_hand = [0.5 + 1, 0.5 + 1 - 1, 1.5 + 1 - 2, 1 + 0.5 + 1 - 3, 1 + 1 + 2 + 2]
    np.testing.assert_allclose(theta, by_hand, rtol=1e-6)


SHAPE = Composition(
    kb_samples=2, mask=0.5, adaptive=0.0, retroactive=True, prune_threshold=0.4, client_sparsity=0.0
)


def made(shape=SHAPE, network=FORMULA):
    adapter = full(FullOptions(RATE), SIZES, network)
    return decomposed(learner(network, adapter, linear(network.width, SIZES.classes)), SIZES, shape)


def filled_in(model):
    """Parameters of a client that has learned both tasks and attends to others."""
    params = compiled(model.init)(KEY, SCALE)
    own = params.classifier._replace(
        mask=numbers(2, WIDTH, seed=1),
        adaptive=numbers(2, WIDTH, seed=2),
        attention=numbers(2, 2, 1, seed=3),
        task=jnp.array([0, 0, 0, 1, 1]),
    )
    received = Received(numbers(2, 2, WIDTH, seed=4), jnp.array([[-1, -1], [1, 2]]))
    return params._replace(classifier=own, adapter=params.adapter._replace(received=received))


def theta_of(params, index, prune_threshold=0.0):
    own = params.classifier
    a = np.where(np.abs(own.adaptive[index]) > prune_threshold, own.adaptive[index], 0)
    given = (own.attention[index] * params.adapter.received.values[index]).sum(0)
    return params.adapter.base / (1 + np.exp(-own.mask[index])) + a + given


@pytest.mark.parametrize("retroactive", [True, False])
def test_training_computes_with_the_network_of_the_current_task(retroactive):
    model = made(SHAPE._replace(retroactive=retroactive))
    params, batch = filled_in(model), BATCHES[0]
    part, cached = model.trainable(params, TASKS[1]), model.cached(params)
    output = model.forward(SCALE, cached, part, batch, TASKS[1], True)
    np.testing.assert_allclose(output.feature, batch.input * theta_of(params, 1), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, model.merge(params, TASKS[1], part), params)
    assert part.classifier.adaptive.shape == ((2, WIDTH) if retroactive else (WIDTH,))


@pytest.mark.parametrize("now", [0, 1])
def test_every_class_is_judged_by_the_pruned_network_of_its_own_task(now):
    """In the first task classes to come, which belong to no task yet, are judged by the network that there
    is."""
    model = made()
    params, batch = filled_in(model), BATCHES[0]
    if now == 0:
        own = params.classifier
        params = params._replace(classifier=own._replace(task=jnp.where(own.task == 1, -1, own.task)))
    found = compiled(model.predict)(SCALE, params, batch, TASKS[now])
    head = params.classifier.head
    for index, classes in ((0, [0, 1, 2]), (1, [3, 4])):
        logits = batch.input * theta_of(params, index, 0.4) @ head.kernel + head.bias
        if index > now:
            logits = batch.input * theta_of(params, now, 0.4) @ head.kernel + head.bias
        np.testing.assert_allclose(found[:, classes], logits[:, classes], rtol=1e-4)
    assert np.any(np.abs(params.classifier.adaptive) <= 0.4)


def test_a_client_learns_which_task_brought_a_class():
    method = weit()
    server = fresh(method)
    _, state = client_round(method, server, TASKS[1], BATCHES)
    assert state[-1]["classifier"].task.tolist() == [-1, -1, -1, 1, 1]
    _, state = client_round(method, server, TASKS[0], OF_FIRST, state)
    assert state[-1]["classifier"].task.tolist() == [0, 0, 0, 1, 1]


def with_statistics():
    """Features are the images less a running mean, in training less the batch's."""

    def apply(params, image, injection, train, mask):
        weights, mean = params
        now = jnp.mean(image, axis=0) if train else mean
        return Features(weights * (image - now), None, {}), (weights, 0.5 * mean + 0.5 * now)

    start = (jnp.ones(WIDTH), jnp.zeros(WIDTH))
    split, join = lambda params: params, lambda weights, mean: (weights, mean)
    return Network(lambda key: start, apply, WIDTH, 0, (WIDTH,), split=split, join=join), Frozen(start)


def test_running_statistics_are_one_set_for_each_task():
    network, frozen = with_statistics()
    model = made(network=network)
    params, batch = model.init(KEY, frozen), rows_of([3, 4, 4, 3])
    output = model.forward(
        frozen, model.cached(params), model.trainable(params, TASKS[1]), batch, TASKS[1], True
    )
    assert output.stats[0].tolist() == [0.0] * WIDTH
    np.testing.assert_allclose(output.stats[1], batch.input.mean(0) / 2, rtol=1e-6)
    params = params._replace(
        stats=output.stats, classifier=params.classifier._replace(task=jnp.array([0, 0, 0, 1, 1]))
    )
    found, head = model.predict(frozen, params, batch, TASKS[1]), params.classifier.head
    feature = 0.5 * (batch.input - np.where(np.arange(2) == 1, 1, 0)[:, None, None] * output.stats[1])
    logits = feature @ head.kernel + head.bias
    np.testing.assert_allclose(found, np.where(np.arange(5) < 3, logits[0], logits[1]), rtol=1e-4)


def test_what_is_the_clients_own_stays_with_it_and_the_next_round_starts_from_there():
    method = weit()
    server = fresh(method)
    upload, state = client_round(method, server, TASKS[0], OF_FIRST)
    assert (
        upload.mean.classifier == ()
        and method.broadcast(round_context_of(TASKS[0]), server).payload.trainable.classifier == ()
    )
    own, start = state[-1]["classifier"], server.params.classifier
    for name in ("mask", "adaptive"):
        moved = np.abs(getattr(own, name) - getattr(start, name)).max(axis=1)
        assert moved[0] > 1e-3 and moved[1] == 0
    after, _ = server_round(method, server, TASKS[0], received_by_server([upload]))
    jax.tree.map(np.testing.assert_array_equal, after.params.classifier.adaptive, start.adaptive)
    context, local = train(method, after, TASKS[0], [], state, round_=1)
    np.testing.assert_array_equal(local.trainable.adapter, after.params.adapter.base)
    np.testing.assert_array_equal(local.trainable.classifier.adaptive, own.adaptive)
    np.testing.assert_array_equal(local.trainable.classifier.mask, own.mask[0])


@pytest.mark.long
def test_with_masks_of_one_and_nothing_of_its_own_a_client_trains_as_fedavgs_does():
    def base_alone(direction, part):
        own = direction.classifier
        none = jax.tree.map(jnp.zeros_like, (own.mask, own.adaptive, own.attention))
        return direction._replace(classifier=ClientParams(own.head, *none))

    off = dict(mask_start=1 - 1e-7, client_sparsity=0.0, sparse_weight=0.0, keep_weight=0.0)
    ours = weit(run_of(optax.stateless(base_alone)), **off)
    server, plain = fresh(ours), fedavg.plain(fedavg.NoOptions(), run_of())
    usual = fresh(plain)._replace(
        params=Params({"scale": server.params.adapter.base}, server.params.classifier.head)
    )
    expected = train(plain, usual, TASKS[1], BATCHES)[1].trainable
    found = train(ours, server, TASKS[1], BATCHES)[1].trainable
    close(found.adapter, expected.adapter["scale"], atol=1e-5)
    close(found.classifier.head, expected.classifier, atol=1e-5)
    assert np.abs(found.adapter - server.params.adapter.base).max() > 1e-3
    upload, _ = client_round(ours, server, TASKS[1], BATCHES)
    close(upload.mean.adapter, found.adapter)


def test_task_adaptive_numbers_move_at_the_networks_rate():
    """The masks begin with 1/2, so that the base has half of their gradient; and ten times the rate of the
    rest is theirs as well."""
    off = dict(sparse_weight=0.0, keep_weight=0.0)
    method = weit(run_of(rate=10 * RATE), **off)
    server = fresh(method)
    part = train(method, server, TASKS[0], OF_FIRST)[1].trainable
    moved = part.adapter - server.params.adapter.base
    close(part.classifier.adaptive[0], 2 * moved)
    slow = weit(run_of(rate=RATE), **off)
    close(
        train(slow, server, TASKS[0], OF_FIRST)[1].trainable.adapter - server.params.adapter.base, moved / 10
    )


# ---- the loss ----------------------------------------------------------------------------------------------


def seen_of(adapter, own, index=1):
    context = context_of(weit(), fresh(weit()), TASKS[index], info_of(SIZES.classes, 3), SCALE)
    part = Params(adapter, own)
    return ClientStep(made(), context, part, None, BATCHES[0], KEY, part)


def test_sparsity_is_the_size_of_all_numbers_up_to_the_task_and_of_its_mask():
    own = ClientParams((), logit([0.5, 0.25]), jnp.array([[1.0, -2], [0.5, 0]]), jnp.zeros((2, 1)))

    def loss(index, adaptive_weight, mask_weight):
        rule = sparsity(adaptive_weight, mask_weight, True)
        return float(rule.loss(seen_of(jnp.zeros(2), own, index), ()))

    assert loss(0, 0.1, 0.0) == pytest.approx(0.1 * 3)
    assert loss(1, 0.1, 0.0) == pytest.approx(0.1 * 3.5)
    assert loss(1, 0.1, 2.0) == pytest.approx(0.35 + 2 * 0.75)
    alone = own._replace(adaptive=own.adaptive[0])
    rule = sparsity(0.1, 0.0, False)
    assert float(rule.loss(seen_of(jnp.zeros(2), alone), ())) == pytest.approx(0.3)


ONE = Arrays(jax.tree.structure([0]), ((2, 2),))  # N = 4, M = 2
THREE_TASKS = SIZES._replace(tasks=3)


@pytest.mark.parametrize("retroactive", [True, False])
def test_preservation_holds_the_networks_of_earlier_tasks_where_they_were(retroactive):
    """A base that moved by 1, 2, 3, 4 under masks of 1/2 and 1/4, and the first task's own numbers by 1; the
    later tasks do not count."""
    rule = preservation(10.0, ONE, THREE_TASKS, retroactive)
    base, before = jnp.array([1.0, 2, 3, 4]), jnp.array([[0.5, 0.25], [1.0, 1.0], [1.0, 1.0]])
    adaptive = jnp.array([[1.0, 1, 1, 1], [9, 9, 9, 9], [9, 9, 9, 9]]) if retroactive else jnp.full(4, 9.0)
    own = ClientParams((), jnp.zeros(2), adaptive, ())
    memory = FinishedTasks(jnp.zeros(4), jnp.zeros((3, 4)) if retroactive else (), before)
    value = lambda index: float(rule.loss(seen_of(base, own, index), memory))
    drift = np.array([0.5, 0.5, 1.5, 1.0]) + retroactive
    assert value(1) == pytest.approx(5 * (drift**2).sum())
    assert value(0) == 0.0


@pytest.mark.parametrize("retroactive", [True, False])
def test_a_client_keeps_base_and_numbers_of_a_tasks_last_round(retroactive):
    method = weit(retroactive=retroactive)
    server = fresh(method)
    before = lambda state, task: of_task_before(state[1], task)
    _, early = client_round(method, server, TASKS[0], OF_FIRST, round_=0)
    np.testing.assert_array_equal(before(early, TASKS[0]).base, server.params.adapter.base)
    part = train(method, server, TASKS[0], OF_FIRST, early, round_=1)[1].trainable
    _, late = client_round(method, server, TASKS[0], OF_FIRST, early, round_=1)
    close(before(late, TASKS[1]).base, part.adapter)
    close(before(late, TASKS[1]).mask, np.stack([jax.nn.sigmoid(part.classifier.mask), np.zeros(WIDTH)]))
    if retroactive:
        close(before(late, TASKS[1]).adaptive, part.classifier.adaptive)
    _, next_ = client_round(method, server, TASKS[1], BATCHES, late, round_=0)
    jax.tree.map(np.testing.assert_array_equal, before(next_, TASKS[1]).base, before(late, TASKS[1]).base)


@pytest.mark.parametrize("retroactive", [True, False])
def test_a_client_that_misses_a_tasks_last_round_keeps_what_it_had_before_it(retroactive):
    """Its anchor is that of the round in which it took part, by training without the rule."""
    method, free = weit(retroactive=retroactive), weit(retroactive=retroactive, keep_weight=0.0)
    server = fresh(method)
    trained = train(free, server, TASKS[0], OF_FIRST)[1].trainable
    _, state = client_round(method, server, TASKS[0], OF_FIRST, round_=0)
    anchor = of_task_before(state[1], TASKS[1])
    close(anchor.base, trained.adapter)
    assert np.abs(anchor.base - server.params.adapter.base).max() > 1e-3
    close(anchor.mask[0], jax.nn.sigmoid(trained.classifier.mask))


@pytest.mark.parametrize("weight", some(["sparse_weight", "mask_weight", "keep_weight"], ["sparse_weight"]))
def test_every_weight_acts_on_a_clients_training(weight):
    parts = []
    for value in (0.0, 5.0):
        method = weit(**{"sparse_weight": 0.0, "keep_weight": 0.0, weight: value})
        server = fresh(method)
        _, state = client_round(method, server, TASKS[0], OF_FIRST, round_=1)
        parts.append(train(method, server, TASKS[1], BATCHES, state)[1].trainable)
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, parts), strict=True)) > 1e-4


@pytest.mark.parametrize("retroactive", [True, False])
def test_the_numbers_of_earlier_tasks_train_if_asked_for(retroactive):
    method = weit(retroactive=retroactive)
    server = fresh(method)
    _, state = client_round(method, server, TASKS[0], OF_FIRST, round_=1)
    _, after = client_round(method, server, TASKS[1], BATCHES, state)
    moved = np.abs(after[-1]["classifier"].adaptive[0] - state[-1]["classifier"].adaptive[0]).max()
    assert (moved > 1e-5) == retroactive
    np.testing.assert_array_equal(after[-1]["classifier"].mask[0], state[-1]["classifier"].mask[0])


# ---- sparse bases ------------------------------------------------------------------------------------------


def received_by_server(uploads):
    return aggregate_of(uploads, range(len(uploads)), [True] * len(uploads), SIZES.clients)


def test_each_array_leaves_out_its_outputs_with_the_smallest_masks():
    mask = jnp.array([0.3, -5, 0.1, -3, -4, -2])
    sent = sparse(TWO, jnp.arange(1.0, 10), mask, 0.4)
    assert sent.is_sent.tolist() == [1, 0, 1, 1, 0, 1]
    assert sent.base.tolist() == [1, 0, 3, 4, 0, 6, 7, 0, 9]
    assert sparse(TWO, jnp.arange(9.0), mask, 0.7).is_sent.tolist() == [1, 0, 0, 0, 0, 1]


def test_a_merged_number_is_the_mean_of_those_who_sent_it():
    bases, masks = (jnp.full(9, 2.0), jnp.full(9, 5.0)), jnp.array([[0.0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 2, 1]])
    both = [sparse(TWO, base, mask, 0.4) for base, mask in zip(bases, masks, strict=True)]
    mean = jax.tree.map(lambda a, b: 0.25 * a + 0.75 * b, *both)
    merged = filled(TWO, mean, jnp.full(9, -1.0))
    np.testing.assert_allclose(merged, [-1, 4.25, 4.25] * 3)
    some = [sparse(TWO, base, mask, 0.7) for base, mask in zip(bases, masks, strict=True)]
    merged = filled(TWO, jax.tree.map(lambda a, b: 0.25 * a + 0.75 * b, *some), jnp.full(9, -1.0))
    np.testing.assert_allclose(merged, [-1, 5, 2] * 3)


def test_the_server_merges_what_was_sent_and_keeps_the_rest():
    """Two clients whose second output has the smallest mask: nobody sends it."""
    method = weit(run_of(aggregator="uniform"), sparse_weight=0.0, keep_weight=0.0)
    server = fresh(method)
    _, state = client_round(method, server, TASKS[0], [])
    own = state[-1]["classifier"]
    mask = own.mask.at[0].set(logit([0.5, 0.01, 0.6, 0.7]))
    state = (*state[:-1], state[-1] | {"classifier": own._replace(mask=mask)})
    batches = ([rows_of([0, 1, 2, 0])], [rows_of([2, 1], seed=3)])
    parts = [train(method, server, TASKS[0], rows, state, i)[1].trainable for i, rows in enumerate(batches)]
    sent = [client_round(method, server, TASKS[0], rows, state, i)[0] for i, rows in enumerate(batches)]
    after, _ = server_round(method, server, TASKS[0], received_by_server(sent))
    expected = (parts[0].adapter + parts[1].adapter) / 2
    expected = expected.at[1].set(server.params.adapter.base[1])
    close(after.params.adapter.base, expected)
    assert np.abs(expected - server.params.adapter.base).max() > 1e-3


def test_rules_that_cannot_merge_parts_of_bases_are_refused_unless_all_is_sent():
    with pytest.raises(
        InputError, match="aggregator: 'median' cannot merge .* nearest: 'uniform', or --client-sparsity 0"
    ):
        weit(run_of(aggregator="median"))
    with pytest.raises(InputError, match="aggregator: 'mean, clip_norm' cannot merge"):
        weit(run_of(clip_norm=1.0))
    assert weit(run_of(aggregator="median"), client_sparsity=0.0).aggregation == "median"


# ---- the knowledge base ------------------------------------------------------------------------------------


def arrived(rows, ids, valid):
    adaptive = jnp.asarray(rows, jnp.float32)[:, None] * jnp.ones(3)
    weight = jnp.asarray(valid, jnp.float32)
    aggregate = Aggregate((), {}, {"adaptive": adaptive}, weight, jnp.array(ids), jnp.array(valid))
    return seen_by_rules(None, round_context_of(TASKS[0]), aggregate)


PRUNE = 0.004
EMPTY = Knowledge(jnp.zeros((2, 3, 3)), jnp.zeros((2, 3), bool))  # two tasks of three clients


def test_the_knowledge_base_has_what_each_client_sent_last_and_nothing_of_those_who_did_not():
    state = store_uploads(EMPTY, 0, arrived([1, 2, np.nan], [0, 2, 1], [True, True, False]))
    assert state.adaptive[0, :, 0].tolist() == [1, 0, 2] and state.present[0].tolist() == [True, False, True]
    state = store_uploads(state, 1, arrived([3], [1], [True]))
    state = store_uploads(state, 0, arrived([4], [1], [True]))
    assert state.adaptive[:, :, 0].tolist() == [[1, 4, 2], [0, 3, 0]]
    assert state.present.tolist() == [[True, True, True], [False, True, False]]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.long
def test_a_task_is_handed_at_most_so_many_of_what_is_known_each_once(count):
    state = store_uploads(EMPTY, 0, arrived([1, 2], [0, 2], [True, True]))
    state = store_uploads(state, 1, arrived([3], [1], [True]))
    received = Received(jnp.zeros((2, count, 3)), jnp.full((2, count), -1))
    drawn = []
    for seed in range(8):
        found = hand_out(state, received, 1, jax.random.key(seed))
        real = min(count, 3)
        values, client = found.values[1, :, 0].tolist(), found.client[1].tolist()
        assert values[real:] == [0.0] * (count - real) and client[real:] == [-1] * (count - real)
        assert len(set(values[:real])) == real
        assert all(
            {1: 0, 2: 2, 3: 1}[int(value)] == owner
            for value, owner in zip(values[:real], client, strict=False)
        )
        assert found.client[0].tolist() == [-1] * count and not found.values[0].any()
        drawn.append(tuple(values))
    assert len(set(drawn)) > 1
    after_the_last = hand_out(state, received, 2, KEY)
    jax.tree.map(np.testing.assert_array_equal, after_the_last, received)


def closing(method, server, states):
    """The server after a task's closing round, and what the clients sent."""
    (report_round,) = [each for each in method.rounds if each.when == "task_end"]
    uploads = []
    for i, state in states.items():
        context = context_of(method, server, TASKS[0], info_of(SIZES.classes, 3, i), SCALE)
        local = report_round.program.start(context, state, KEY)
        local, _ = report_round.program.phases[0].step(context, local, OF_FIRST[0], KEY)
        upload, kept = report_round.program.finish(context, local, state)
        jax.tree.map(np.testing.assert_array_equal, kept, state)
        uploads.append(upload)
    aggregate = aggregate_of(uploads, tuple(states), [True] * len(states), SIZES.clients)
    return *report_round.server(round_context_of(TASKS[0], 1, True, SCALE), server, aggregate, KEY), uploads


@functools.cache
def after_first():
    """A method whose clients 0 and 2 have finished the first task: its server, their states and reports."""
    method = weit(prune_threshold=PRUNE, sparse_weight=0.0)
    server = fresh(method)
    rows = {0: OF_FIRST, 2: [rows_of([2, 1], seed=5)]}
    states = {i: client_round(method, server, TASKS[0], mine, id_=i, round_=1)[1] for i, mine in rows.items()}
    return method, server, states, *closing(method, server, states)


def test_what_a_client_learned_in_a_task_goes_up_pruned_when_it_is_over_and_comes_down_for_the_next():
    _, server, states, after, metrics, uploads = after_first()
    for state, upload in zip(states.values(), uploads, strict=True):
        own = state[-1]["classifier"].adaptive[0]
        np.testing.assert_array_equal(upload.gather["adaptive"], jnp.where(jnp.abs(own) > PRUNE, own, 0.0))
    sent = np.stack([upload.gather["adaptive"] for upload in uploads])
    assert 0 < (sent != 0).sum() < sent.size
    counted = metrics["knowledge_nonzero"]
    assert float(counted.total) == (sent != 0).sum() and float(counted.weight) == sent.size
    received = after.params.adapter.received
    assert sorted(received.client[1].tolist()) == [0, 2] and received.client[0].tolist() == [-1, -1]
    order = [0 if owner == 0 else 1 for owner in received.client[1].tolist()]
    np.testing.assert_array_equal(received.values[1], sent[order])
    np.testing.assert_array_equal(after.params.adapter.base, server.params.adapter.base)


def test_a_client_attends_to_others_and_never_to_itself():
    method, _, states, after, *_ = after_first()
    owners = np.asarray(after.params.adapter.received.client[1])
    for id_ in (0, 1):
        state = states.get(id_, method.init_client(KEY, after))
        attention = train(method, after, TASKS[1], BATCHES, state, id_)[1].trainable.classifier.attention
        assert np.all((np.abs(attention[:, 0]) > 1e-6) == (owners != id_))


def test_in_the_first_task_there_is_nothing_to_attend_to():
    method = weit()
    attention = train(method, fresh(method), TASKS[0], OF_FIRST)[1].trainable.classifier.attention
    assert not np.any(attention)


def test_what_is_handed_out_is_counted_once_a_task():
    method = weit(kb_samples=3)
    server = fresh(method)
    assert method.handover(round_context_of(TASKS[1], frozen=SCALE), server).shape == (3, WIDTH)
    assert method.broadcast(round_context_of(TASKS[1], frozen=SCALE), server).cached.adapter.values.shape == (
        2,
        3,
        WIDTH,
    )


# ---- other networks and adapters ---------------------------------------------------------------------------


def micro_resnet():
    config = RESNETS["resnet_micro"]
    network = resnet_network(config)
    size = config.image_size
    nothing = jnp.zeros(1, jnp.int32)
    image = jnp.zeros((1, size, size, 3))
    example = Example(
        Frozen(jax.eval_shape(network.init, KEY)), DATA._replace(input=image, label=nothing), TASKS[0]
    )
    return network, example


@pytest.mark.long
def test_it_keeps_to_the_protocol_on_lora():
    method = method_of("fedweit", adapter="lora", network=NETWORK)
    check_method(method, read, Example(Frozen(jax.eval_shape(NETWORK.init, KEY)), DATA, TASKS[0]))


@pytest.mark.long
def test_it_keeps_to_the_protocol_on_a_resnet():
    network, example = micro_resnet()
    check_method(method_of("fedweit", network=network), read, example)


def test_adapters_with_parameters_for_each_task_are_refused():
    with pytest.raises(InputError, match="adapter: it has parameters for each task .* --lora-pairs one"):
        method_of("fedweit", adapter="lora", lora_pairs="task", network=NETWORK)
