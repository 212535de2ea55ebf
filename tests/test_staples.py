"""SCAFFOLD, FedDyn, FedPer and Ditto on quadratics: regression with a linear classifier, whose optimum over
all clients' examples is known in closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import (
    FORMULA,
    KEY,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    client_round,
    compiled,
    main_of,
    method_of,
    rows_of,
)

from fcljax.adapters.linear import LinearOptions, linear
from fcljax.errors import InputError
from fcljax.methods.ditto import personal_model
from fcljax.methods.ewc import EWCOptions, elastic
from fcljax.methods.feddyn import dynamic_regularisation
from fcljax.methods.scaffold import controlled_averaging
from fcljax.models.heads import Head
from fcljax.parts.classifiers import linear as linear_head
from fcljax.parts.federate import Run, Training, federate
from fcljax.parts.learner import Loss, learner
from fcljax.types import Aggregate, RoundContext

RATE, EPOCHS, ALPHA = 0.1, 1, 0.5
TASK = TASKS[0]
BATCHES = {0: rows_of([0, 1, 2, 0], 1), 2: rows_of([1, 1, 2], 2), 3: rows_of([0, 2, 2, 1], 3)}


def squared(output, batch, task):
    """Half the mean squared error of one-hot labels."""
    del task
    error = output.logits - jax.nn.one_hot(batch.label, SIZES.classes)
    return jnp.sum(jnp.where(batch.mask[:, None], error, 0.0) ** 2) / 2 / jnp.sum(batch.mask)


LOSS = Loss(squared)


def run_of(optimiser=None):
    adapter = linear(LinearOptions(), SIZES, FORMULA)
    return Run(SIZES, FORMULA, adapter, Training(EPOCHS, 4, RATE, optimiser or optax.identity()))


def method_with(*rules, server=(), personal=()):
    run = run_of()
    model = learner(FORMULA, run.adapter, linear_head(WIDTH, SIZES.classes))
    return federate(run, model, loss=LOSS, client_rules=rules, server_rules=server, personal=personal)


def method_by(name, *others):
    if name == "scaffold":
        client, server = controlled_averaging(run_of())
    else:
        client, server = dynamic_regularisation(ALPHA, SIZES.clients)
    return method_with(*others, client, server=(server,))


def gradient_of(head, batch):
    """Of the client's loss, from the normal equations."""
    keep = np.asarray(batch.mask)
    x, y = np.asarray(batch.input, np.float64)[keep], np.eye(SIZES.classes)[np.asarray(batch.label)[keep]]
    error = (x @ np.asarray(head.kernel, np.float64) + np.asarray(head.bias) - y) / len(x)
    return Head(x.T @ error, error.sum(0))


@functools.cache
def optimum():
    """The least-squares classifier of all clients' examples."""
    keep = {i: np.asarray(batch.mask) for i, batch in BATCHES.items()}
    x = np.concatenate([np.asarray(batch.input, np.float64)[keep[i]] for i, batch in BATCHES.items()])
    label = np.concatenate([np.asarray(batch.label)[keep[i]] for i, batch in BATCHES.items()])
    x = np.hstack([x, np.ones((len(x), 1))])
    found = np.linalg.lstsq(x, np.eye(SIZES.classes)[label], rcond=None)[0]
    return Head(jnp.asarray(found[:-1], jnp.float32), jnp.asarray(found[-1], jnp.float32))


def round_of(method, server, states, steps=3, ids=tuple(BATCHES), round_=1):
    """The server and the states after a round in which each client takes so many steps."""
    uploads = {}
    for i in ids:
        uploads[i], states[i] = local(method, server, states[i], i, steps, round_)
    weight = jnp.asarray([float(uploads[i].weight) for i in ids])
    mean = jax.tree.map(
        lambda *x: sum(w * each for w, each in zip(weight, x, strict=True)) / weight.sum(),
        *[uploads[i].mean for i in ids],
    )
    total = jax.tree.map(lambda *x: sum(x), *[uploads[i].sum for i in ids])
    everybody = Aggregate(mean, total, {}, weight, jnp.asarray(ids), jnp.ones(len(ids), bool))
    now = RoundContext(SCALE, TASK, jnp.int32(round_), jnp.bool_(False), ())
    now = now._replace(previous=method.broadcast(now, server))
    server, _ = main_of(method).server(now, server, everybody, KEY)
    return server, states


def local(method, server, state, id_, steps, round_):
    """A client of one batch; `client_round` counts its rows, so K is the number of batches."""
    return client_round(method, server, TASK, [BATCHES[id_]] * steps, state, id_, round_)


def at_optimum(name, *others):
    """The method where everybody is at the optimum and knows its own gradient there."""
    method = method_by(name, *others)
    server = compiled(method.init)(KEY, SCALE)
    server = server._replace(params=server.params._replace(classifier=optimum()))
    states = {i: list(method.init_client(KEY, server)) for i in BATCHES}
    for i, state in states.items():
        kept, slope = state[-1], jax.tree.map(jnp.asarray, gradient_of(optimum(), BATCHES[i]))
        tree = kept[0]._replace(classifier=jax.tree.map(lambda g: g.astype(jnp.float32), slope))
        state[-1] = type(kept)(tree, jnp.int32(0))
        states[i] = tuple(state)
    return method, opened(server), states


def opened(server):
    """The server in the middle of task 0, with everybody seen."""
    (rule,) = server.rules
    examples = (
        jnp.zeros(SIZES.clients)
        .at[jnp.asarray([*BATCHES])]
        .set(jnp.asarray([float(batch.mask.sum()) for batch in BATCHES.values()]))
    )
    return server._replace(rules=(rule._replace(seen=type(rule.seen)(examples, jnp.int32(0))),))


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_the_optimum_of_all_clients_together_is_a_fixed_point(name):
    method, server, states = at_optimum(name)
    before = jax.tree.map(jnp.copy, states)
    server, states = round_of(method, server, states)
    assert distance(server.params.classifier, optimum()) < 1e-5
    for i, state in states.items():
        assert distance(state[0][0].classifier, before[i][0][0].classifier) < 1e-4
    # which it is not for FedAvg: clients of different data leave it in different directions
    plain = method_with()
    server, _ = round_of(plain, server._replace(rules=()), {i: () for i in BATCHES})
    assert distance(server.params.classifier, optimum()) > 1e-3


def distance(one, other):
    return float(optax.tree.norm(optax.tree.sub(one, other)))


def from_start(name, steps=1, ids=tuple(BATCHES), *others):
    """A first round of the task, from the first model: (first model, server, states)."""
    method = method_by(name, *others)
    server = compiled(method.init)(KEY, SCALE)
    states = {i: method.init_client(KEY, server) for i in BATCHES}
    start = server.params.classifier
    server, states = round_of(method, server, states, steps, ids, 0)
    return start, method, server, states


def mean_slope(head, ids=tuple(BATCHES)):
    """The gradient of the loss over the examples of these clients."""
    weight = np.array([float(BATCHES[i].mask.sum()) for i in ids])
    slopes = [gradient_of(head, BATCHES[i]) for i in ids]
    return jax.tree.map(
        lambda *g: sum(w * each for w, each in zip(weight, g, strict=True)) / weight.sum(), *slopes
    )


def test_scaffold_s_first_step_is_fedavg_s_and_its_variates_are_the_gradients():
    start, method, server, states = from_start("scaffold")
    slope = mean_slope(start)
    expected = jax.tree.map(lambda w, g: w - RATE * g, start, slope)
    assert distance(server.params.classifier, expected) < 1e-5
    for i, (kept,) in states.items():
        assert distance(kept.params.classifier, gradient_of(start, BATCHES[i])) < 1e-4
    now = RoundContext(SCALE, TASK, jnp.int32(1), jnp.bool_(False), ())
    assert distance(method.broadcast(now, server).payload.sent["scaffold"].classifier, slope) < 1e-4
    # a second step starts at c - c_i: everybody moves along the mean gradient, to second order
    later = round_of(method, server, states)[0].params.classifier
    assert distance(later, server.params.classifier) > 1e-3


def test_scaffold_s_control_variate_is_the_mean_of_the_clients_also_if_few_take_part():
    _, method, server, states = from_start("scaffold", 2, (0, 3))
    for round_, ids in ((1, (2, 3)), (2, (0, 2))):
        server, states = round_of(method, server, states, 2, ids, round_)
    total = jax.tree.map(jnp.zeros_like, server.rules[0].total.classifier)
    for i, (kept,) in states.items():
        total = optax.tree.add_scale(total, 2 * float(BATCHES[i].mask.sum()), kept.params.classifier)
    assert distance(server.rules[0].total.classifier, total) < 1e-4
    new = RoundContext(SCALE, TASKS[1], jnp.int32(0), jnp.bool_(False), ())
    assert float(optax.tree.norm(method.broadcast(new, server).payload.sent["scaffold"])) == 0


def test_feddyn_s_first_step_by_hand():
    """One step of rate eta: w_i = x - eta g_i, h_i = alpha eta g_i, and x <- x - 2 eta g, g their mean."""
    start, _, server, states = from_start("feddyn")
    expected = jax.tree.map(lambda w, g: w - 2 * RATE * g, start, mean_slope(start))
    assert distance(server.params.classifier, expected) < 1e-5
    for i, (kept,) in states.items():
        slope = jax.tree.map(lambda g: ALPHA * RATE * g, gradient_of(start, BATCHES[i]))
        assert distance(kept.params.classifier, slope) < 1e-5


def test_feddyn_s_server_slope_is_the_mean_of_the_clients_also_if_few_take_part():
    """h = sum_i n_i h_i / sum_i n_i over those seen so far, and x = mean_i w_i - h / alpha."""
    start, method, server, states = from_start("feddyn", 2, (0, 3))
    for round_, ids in ((1, (2, 3)), (2, (0, 2)), (3, (3,))):
        sent = server.params.classifier
        before = dict(states)
        server, states = round_of(method, server, states, 2, ids, round_)
        examples = {i: 2 * float(BATCHES[i].mask.sum()) for i in BATCHES}
        total = jax.tree.map(jnp.zeros_like, sent)
        for i, (kept,) in states.items():
            total = optax.tree.add_scale(total, examples[i], kept.params.classifier)
        slope = optax.tree.scale(1 / sum(examples.values()), total)
        mean = sent  # w_i = x - (what h_i gained) / alpha
        for i in ids:
            gained = optax.tree.sub(states[i][0].params.classifier, before[i][0].params.classifier)
            share = examples[i] / sum(examples[j] for j in ids)
            mean = optax.tree.add_scale(mean, -share / ALPHA, gained)
        expected = optax.tree.add_scale(mean, -1 / ALPHA, slope)
        assert distance(server.params.classifier, expected) < 1e-5
    assert distance(server.params.classifier, start) > 0.01


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_it_carries_another_strategy(name):
    """Elastic weights, which are 0 in a first task: nothing changes, and both states are kept."""
    alone = from_start(name)[2].params.classifier
    model = learner(FORMULA, run_of().adapter, linear_head(WIDTH, SIZES.classes))
    _, _, server, states = from_start(name, 1, tuple(BATCHES), elastic(EWCOptions(10.0, 1.0), model, 4))
    assert distance(server.params.classifier, alone) < 1e-6
    assert all(len(state) == 2 for state in states.values())


@pytest.mark.parametrize("optimiser", [dict(optimiser="adam"), dict(optimiser="sgd", momentum=0.9)])
def test_scaffold_needs_steps_that_are_gradients(optimiser):
    with pytest.raises(InputError, match="^optimiser: scaffold"):
        method_of("scaffold", adapter="linear", **optimiser)


def test_ditto_s_own_model_descends_on_its_loss_and_the_pull():
    weight, batch = 0.7, BATCHES[0]
    method = method_with(personal_model(weight, LOSS, run_of().training, run_of().adapter))
    server = compiled(method.init)(KEY, SCALE)
    own = jax.tree.map(lambda w: w + 1.0, server.params.classifier)
    (state,) = method.init_client(KEY, server)
    upload, (kept,) = client_round(method, server, TASK, [batch], (state._replace(classifier=own),))
    sent = server.params.classifier
    expected = jax.tree.map(
        lambda v, g, w: v - RATE * (g + weight * (v - w)), own, gradient_of(own, batch), sent
    )
    assert distance(kept.classifier, expected) < 1e-5
    alone = jax.tree.map(lambda w, g: w - RATE * g, sent, gradient_of(sent, batch))
    assert distance(upload.mean.classifier, alone) < 1e-5  # what it sends is FedAvg's


def test_clients_to_whom_all_is_personal_send_no_parameters_and_train_as_if_alone():
    method = method_with(personal=("adapter", "classifier", "stats"))
    server = compiled(method.init)(KEY, SCALE)
    state = method.init_client(KEY, server)
    moved = jax.tree.map(lambda leaf: leaf + 1, server.params.classifier)
    (personal,) = state
    upload, (kept,) = client_round(method, server, TASK, [BATCHES[0]], ({**personal, "classifier": moved},))
    assert not jax.tree.leaves(upload.mean) and method.personal
    # its training starts from its own classifier, whatever the server has
    expected = jax.tree.map(lambda w, g: w - RATE * g, moved, gradient_of(moved, BATCHES[0]))
    assert distance(kept["classifier"], expected) < 1e-5


def test_fedper_s_classifier_never_travels():
    method = method_of("fedper", network=FORMULA, lora_blocks=2)
    server = compiled(method.init)(KEY, SCALE)
    upload, _ = client_round(method, server, TASK, [BATCHES[0]])
    now = RoundContext(SCALE, TASK, jnp.int32(0), jnp.bool_(False), ())
    assert upload.mean.classifier == method.broadcast(now, server).payload.trainable.classifier == ()
    assert jax.tree.leaves(upload.mean.adapter) and method.personal
