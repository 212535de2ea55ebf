"""Client rules, derived by hand: a client trains by gradient descent on features that are its
images."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import (
    DATA,
    FORMULA,
    KEY,
    PAIR,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    begin,
    by_hand,
    client_round,
    compiled,
    context_of,
    end_of_task,
    engine_of,
    info_of,
    main_of,
    method_of,
    play,
    rows_of,
    train,
)
from small_runs import some

from fcljax.adapters import find_adapter
from fcljax.adapters.linear import LinearOptions
from fcljax.errors import InputError
from fcljax.federated.client_loop import Lanes
from fcljax.methods import METHODS
from fcljax.methods import ewc as module
from fcljax.methods.ewc import Anchor, EWCOptions, elastic
from fcljax.models.heads import Head, cross_entropy
from fcljax.parts.client import ClientRule, Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.proximal import norm_bound, prox

RATE, TASK = 0.1, TASKS[1]
BATCHES = [rows_of([3, 4, 4]), rows_of([4], seed=2), rows_of([3, 3, 4, 4], seed=3)]
SGD = dict(network=FORMULA, optimiser="sgd", lr=RATE, momentum=0.0, weight_decay=0.0)
# what every method's client can be made of on the formula, with a rate at which its adapter moves
OWN = {
    "lora": dict(lora_rank=2, lora_lr=RATE),
    "prompts": dict(prompt_length=2, prompt_blocks=2),
    "full": dict(full_lr=RATE),
    "pool": dict(pool_size=3, pool_length=2, pool_blocks=2),
    "linear": {},
    "vpt": dict(vpt_length=2, vpt_blocks=2),
    "l2p": dict(l2p_size=3, l2p_length=2, l2p_top_k=2),
    "dualprompt": dict(dual_length=2, dual_shared_length=2, dual_blocks=1, dual_shared_blocks=1),
    "coda": dict(coda_components=4, coda_length=2, coda_blocks=2),
}


ADAPTER = find_adapter("linear").build(LinearOptions(), SIZES, FORMULA)
RUN = Run(SIZES, FORMULA, ADAPTER, Training(1, 4, RATE, optax.identity()))


def with_rules(*client_rules: ClientRule):
    """FedAvg of a linear classifier by gradient descent, with these rules."""
    return federate(RUN, linear_learner(RUN), loss=cross_entropy_loss(), client_rules=client_rules)


def fresh(method):
    return compiled(method.init)(KEY, SCALE)


def loss_of(head, batch):
    """The client's own loss, over the classes of the second task."""
    logits = batch.input @ head.kernel + head.bias
    return cross_entropy(logits, batch.label, TASK.current, batch.mask)


slope = jax.jit(jax.grad(loss_of))


def descend(head, batches, more=lambda w: 0.0, project=lambda w: w):
    """Plain gradient descent on a classifier: `more` is added to the gradient, `project` follows a step."""
    for batch in batches:
        own, extra = slope(head, batch), more(head)
        extra = jax.tree.map(jnp.zeros_like, head) if isinstance(extra, float) else extra
        head = project(jax.tree.map(lambda w, g, e: w - RATE * (g + e), head, own, extra))
    return head


def norm_of(context, local):
    """How far a client is from what it was sent; what it keeps to itself was not."""
    sent = {name: part for name, part in context.payload.trainable._asdict().items() if jax.tree.leaves(part)}
    mine = {name: getattr(local.trainable, name) for name in sent}
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, mine, sent)))


def close(left, right, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), left, right)


# ---- nothing, then FedProx ---------------------------------------------------------------------------------


def test_without_rules_a_client_is_plain_gradient_descent():
    method = with_rules()
    server = fresh(method)
    _, local = train(method, server, TASK, BATCHES)
    close(local.trainable.classifier, descend(server.params.classifier, BATCHES))


def test_the_proximal_term_adds_mu_times_the_way_already_gone_to_the_gradient():
    mu = 3.0
    method = method_of("linear", prox_weight=mu, **SGD)
    server = fresh(method)
    start = server.params.classifier
    _, local = train(method, server, TASK, BATCHES)
    pull = lambda head: jax.tree.map(lambda w, sent: mu * (w - sent), head, start)
    close(local.trainable.classifier, descend(start, BATCHES, pull))
    gone = lambda head: float(optax.tree.norm(jax.tree.map(jnp.subtract, head, start)))
    assert gone(local.trainable.classifier) < gone(descend(start, BATCHES))


def test_the_proximal_loss_is_half_mu_times_the_squared_distance():
    method = with_rules(prox(3.0))
    context, local = train(method, fresh(method), TASK, BATCHES[:1])
    _, metrics = compiled(main_of(method).program.phases[0].step)(context, local, BATCHES[2], KEY)
    expected = loss_of(local.trainable.classifier, BATCHES[2]) + 3.0 / 2 * norm_of(context, local) ** 2
    assert float(metrics["loss"].total) == pytest.approx(4 * float(expected), rel=1e-5)
    assert norm_of(context, local) > 0.01


# ---- the norm bound ----------------------------------------------------------------------------------------


def test_a_norm_bound_is_gradient_descent_projected_after_every_step():
    radius = 0.05
    method = method_of("linear", norm_bound=radius, **SGD)
    server = fresh(method)
    start = server.params.classifier

    def project(head):
        change = jax.tree.map(jnp.subtract, head, start)
        scale = min(1.0, radius / float(optax.tree.norm(change)))
        return jax.tree.map(lambda w, by: w + scale * by, start, change)

    context, local = train(method, server, TASK, BATCHES)
    close(local.trainable.classifier, descend(start, BATCHES, project=project))
    assert norm_of(context, local) == pytest.approx(radius, rel=1e-5)


def test_a_norm_bound_that_nobody_reaches_changes_nothing():
    (_, free), (_, bound) = (
        train(method, fresh(method), TASK, BATCHES) for method in (with_rules(), with_rules(norm_bound(1e6)))
    )
    close(free.trainable.classifier, bound.trainable.classifier, atol=1e-7)


def test_a_client_that_has_not_moved_stays_finite_under_a_norm_bound():
    method = with_rules(norm_bound(0.05))
    context, local = train(method, fresh(method), TASK, [rows_of([])])
    assert norm_of(context, local) == 0


# CFeD, TARGET, LANDER, MFCL, GLFC, LGA and pMAE need networks of images
IMAGES = {
    "promptfl",
    "fedtpg",
    "cfed",
    "target",
    "lander",
    "mfcl",
    "glfc",
    "lga",
    *(name for name in METHODS if name.endswith("pmae")),
}


# nothing trains by default
FROZEN = {"fedncm", "fedrecon", "afcl", "fedranpac", "fedran", "stsa", "zero-shot"}


@pytest.mark.parametrize(
    "name",
    sorted(set(METHODS) - FROZEN - IMAGES - {"local"}),  # local has nothing to stay near
)
@pytest.mark.long
def test_every_method_that_trains_carries_a_norm_bound_over_all_that_it_trains(name):
    """Adapter and classifier together: 0.01 is far less than two steps of either."""
    radius, own = 0.01, OWN[METHODS[name].adapter]
    method = method_of(name, network=FORMULA, norm_bound=radius, lr=RATE, **own)
    context, local = train(method, fresh(method), TASKS[0], [rows_of([0, 1, 2]), rows_of([2, 1], seed=2)])
    assert norm_of(context, local) == pytest.approx(radius, rel=1e-4)


def test_local_clients_have_nothing_to_stay_near():
    for option in ("norm_bound", "prox_weight"):
        with pytest.raises(
            InputError, match=f"^{option}: clients of local are sent no parameters to stay near"
        ):
            method_of("local", network=FORMULA, **{option: 0.1}, **OWN["lora"])


# ---- elastic weights ---------------------------------------------------------------------------------------


def elastic_of(weight, limit, **options):
    return elastic(EWCOptions(weight, limit, **options), linear_learner(RUN), 4)


def anchored(server, fisher, anchor):
    """A client with a task behind it."""
    model = lambda head: Params((), head)
    return (Anchor(model(anchor), model(fisher), jnp.bool_(True)),)


def random_head(seed):
    draw = np.random.default_rng(seed).uniform
    uniform = lambda *shape: jnp.asarray(draw(size=shape), jnp.float32)
    return Head(uniform(WIDTH, SIZES.classes), uniform(SIZES.classes))


def fisher_of(head, batches, classes):
    """The diagonal of the Fisher information in float64: the mean over examples of the squared gradient of
    -log softmax(x W + b)[y] (Kirkpatrick et al. 2017), which is p - onehot(y) for b and x times that for W.
    """
    total, count = Head(0.0, 0.0), 0
    kernel, bias = (np.asarray(leaf, np.float64) for leaf in head)
    for batch in batches:
        batch = jax.tree.map(np.asarray, batch)
        for n in np.flatnonzero(batch.mask):
            x, label = batch.input[n], batch.label[n]
            z = np.where(np.asarray(classes), x.astype(np.float64) @ kernel + bias, -np.inf)
            p = np.exp(z - z.max())
            slope = p / p.sum() - (np.arange(len(p)) == label)
            total = Head(total.kernel + np.outer(x, slope) ** 2, total.bias + slope**2)
            count += 1
    return Head(total.kernel / count, total.bias / count)


def test_the_elastic_term_adds_lambda_times_fisher_times_the_distance_to_the_anchor():
    weight, fisher, anchor = 7.0, random_head(1), random_head(2)
    method = with_rules(elastic_of(weight, 1.0))
    server = fresh(method)
    _, local = train(method, server, TASK, BATCHES, anchored(server, fisher, anchor))
    pull = lambda head: jax.tree.map(lambda f, w, old: weight * f * (w - old), fisher, head, anchor)
    close(local.trainable.classifier, descend(server.params.classifier, BATCHES, pull), atol=1e-5)


@pytest.mark.parametrize("limit", [9.0, 1e-2])
def test_fisher_information_is_the_mean_of_squared_gradients_of_examples_up_to_its_limit(limit):
    method = with_rules(elastic_of(7.0, limit))
    server = fresh(method)
    head, state = server.params.classifier, method.init_client(KEY, server)
    (kept,) = end_of_task(method, server, TASK, BATCHES, state)
    mean = jax.tree.map(lambda f: np.minimum(f, limit), fisher_of(head, BATCHES, TASK.current))
    # though it is the second task: the client has nothing old that its Fisher information could be mixed with
    close(kept.fisher.classifier, mean, atol=1e-7)
    reached = [bool(jnp.any(leaf == limit)) for leaf in jax.tree.leaves(kept.fisher)]
    assert any(reached) == (limit == 1e-2)
    jax.tree.map(np.testing.assert_array_equal, kept.trainable.classifier, head)
    assert bool(kept.measured)


def test_microbatches_bound_how_many_gradients_there_are_at_a_time_and_change_nothing(monkeypatch):
    def measured(most):
        monkeypatch.setattr(module, "GRADIENT_SCALARS", most)
        method = with_rules(elastic_of(7.0, 9.0))
        server = fresh(method)
        return end_of_task(method, server, TASK, BATCHES, method.init_client(KEY, server))

    close(measured(1), measured(2**20), atol=1e-7)
    sizes = [module.microbatches(BATCHES[0], most).input.shape for most in (1, 3, 9)]
    assert sizes == [(4, 1, 1, WIDTH), (2, 2, 1, WIDTH), (1, 4, 1, WIDTH)]


def test_the_anchor_changes_when_a_task_is_over_and_not_in_its_rounds():
    method = with_rules(elastic_of(7.0, 9.0))
    server = fresh(method)
    state = anchored(server, random_head(1), random_head(2))
    _, same = client_round(method, server, TASK, BATCHES, state)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    (kept,) = end_of_task(method, server, TASK, BATCHES, state)
    # in the second task 3 of 5 classes are old
    mix = lambda old, new: 3 / 5 * old + 2 / 5 * new
    new = fisher_of(server.params.classifier, BATCHES, TASK.current)
    close(kept.fisher.classifier, jax.tree.map(mix, random_head(1), new), atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_the_release_measures_after_every_training_under_the_clients_own_model(task):
    """It squares the gradient of a batch's mean loss over all classes seen, and mixes the rows of classes
    that it had before. The penalty counts from the second task on, as in the release."""
    method = with_rules(elastic_of(7.0, 9.0, fisher_measured="round", fisher_gradients="batches"))
    server, later = fresh(method), bool(task.old.any())
    batches = [batch._replace(label=batch.label % (5 if later else 3)) for batch in BATCHES]
    # the classifier's rows of the second task's classes, 3 and 4, were never measured
    before = jax.tree.map(lambda leaf: leaf.at[..., 3:].set(0.0), random_head(1))
    state = anchored(server, before, random_head(2))
    anchor = state[0].trainable.classifier
    context, local = train(method, server, task, batches, state)
    _, (kept,) = client_round(method, server, task, batches, state)
    end = local.trainable.classifier
    jax.tree.map(np.testing.assert_array_equal, kept.trainable.classifier, end)

    def loss(head, batch, classes):
        return cross_entropy(batch.input @ head.kernel + head.bias, batch.label, classes, batch.mask)

    expected = server.params.classifier
    for batch in batches:
        own = jax.grad(loss)(expected, batch, task.current)
        pull = jax.tree.map(lambda f, w, old: 7.0 * later * f * (w - old), before, expected, anchor)
        expected = jax.tree.map(lambda w, g, p: w - RATE * (g + p), expected, own, pull)
    close(end, expected, atol=1e-5)
    squares = [jax.tree.map(jnp.square, jax.grad(loss)(end, batch, task.seen)) for batch in batches]
    share = jnp.asarray([3 / 5] * 3 + [0] * 2 if later else [0] * 5)
    mix = lambda old, *new: share * old + (1 - share) * sum(new) / len(new)
    close(kept.fisher.classifier, jax.tree.map(mix, before, *squares), atol=1e-6)


# ---- weights of 0 ------------------------------------------------------------------------------------------

LORA = OWN["lora"]
OFF = {
    # a server that trains by Adam makes whole steps of rounding noise: here they are small
    "fppl": (dict(unified_weight=0.0), "fppl", dict(wo_unified=True), OWN["prompts"] | dict(server_lr=1e-4)),
    "pilora": (dict(orthogonality_weight=0.0), "pilora", dict(wo_orthogonality=True), LORA),
    "ewc": (dict(ewc_weight=0.0), "joint", {}, LORA | dict(lora_pairs="one")),
    "lwf": (dict(distill_weight=0.0), "joint", {}, LORA | dict(lora_pairs="one")),
}


def leaves_of(server):
    return jax.tree.leaves((server.params.adapter, server.params.classifier))


@pytest.mark.parametrize("name", some(OFF, ("fppl",)))
def test_a_term_of_weight_0_is_no_term_and_one_with_weight_changes_the_model(name):
    """Two rounds of two tasks, so that prototypes, earlier pairs, anchors and teachers are there."""
    fields, other, without, own = OFF[name]
    play = lambda name, **fields: leaves_of(by_hand(method_of(name, **SGD, **own, **fields), rounds=2))
    zero, none = play(name, **fields), play(other, **without)
    for ours, theirs in zip(zero, none, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
    strong = play(name, **{field: 1e3 if name == "ewc" else 1.0 for field in fields})
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(strong, none, strict=True)) > 1e-4


def test_a_proximal_term_of_weight_0_leaves_every_bit():
    plain, zero = with_rules(), with_rules(prox(0.0))
    for ours, theirs in zip(leaves_of(by_hand(zero)), leaves_of(by_hand(plain)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# ---- how much each term contributes ------------------------------------------------------------------------


def times(weight):
    """A rule whose term is the clients' own loss, so many times."""

    def loss(step, memory):
        return weight * cross_entropy_loss().value(step.output, step.batch, step.context.task)

    return ClientRule("again", loss)


def played(method, lanes=PAIR):
    """(server, metrics) after each round of all tasks; images are vectors."""
    data = DATA._replace(input=DATA.input.reshape(len(DATA.input), -1)[:, :WIDTH])
    engine = engine_of(method, lanes, frozen=SCALE, data=data)
    history = play(engine, *begin(method, SCALE), frozen=SCALE, data=data)
    return [(server, report.metrics) for server, _, report in history]


@pytest.mark.parametrize(("weight", "share"), [(0.0, 0.0), (3.0, 0.75), (1e6, 1.0)])
@pytest.mark.long
def test_every_round_reports_the_share_of_each_term_in_the_gradient(weight, share):
    for _, metrics in played(with_rules(times(weight))):
        assert metrics["gradient_share_again"] == pytest.approx(share, abs=1e-5)
        assert metrics["gradient_share_own"] == pytest.approx(1 - share, abs=1e-5)


def test_terms_are_measured_by_the_program_of_the_step():
    """A further copy of the network would take seconds to compile."""
    traced = []

    def loss(step, memory):
        traced.append(step)
        return 0.0

    method = with_rules(ClientRule("counted", loss))
    program, server = main_of(method).program, method.init(KEY, SCALE)
    context = context_of(method, server, TASKS[0], info_of(SIZES.classes, 3), SCALE)
    local = program.start(context, method.init_client(KEY, server), KEY)
    step = jax.jit(program.phases[0].step)
    norms = []
    for weights in ([1, 1], [1, 0], [0, 1]):
        batch = rows_of([0, 1, 2])._replace(term_weights=jnp.float32(weights))
        norms.append(float(step(context, local, batch, KEY)[1]["gradient_norm"].total))
    assert norms == [pytest.approx(norms[0]), norms[0], 0] and norms[0] > 0
    assert len(traced) == 1


@pytest.mark.long
def test_a_pull_to_what_was_sent_is_measured_where_the_client_has_moved():
    _, metrics = played(with_rules(prox(1.0)))[0]
    assert 0.01 < metrics["gradient_share_prox"] < 0.99


@pytest.mark.long
def test_shares_depend_on_no_lanes_and_measuring_them_changes_no_bit():
    method = with_rules(prox(0.1))
    (each,) = method.rounds
    (phase,) = each.program.phases
    plain = each.program._replace(phases=(phase._replace(terms=()),))
    without = played(method._replace(rounds=(each._replace(program=plain),)))
    found, alone = played(method), played(method, Lanes())
    for (server, metrics), (other, rest), (_, one) in zip(found, without, alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, server, other)
        assert metrics["gradient_share_prox"] == pytest.approx(one["gradient_share_prox"], rel=1e-4)
        assert not [name for name in rest if name.startswith("gradient_share_")]


def test_a_loss_of_one_term_measures_nothing():
    assert not any(phase.terms for phase in with_rules().rounds[0].program.phases)
