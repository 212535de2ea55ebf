"""VFCL's parts: a Bayesian learner, the clients' two priors, and conflation at the server."""

import json
import shutil

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
    aggregate_of,
    client_round,
    compiled,
    context_of,
    end_of_task,
    info_of,
    main_of,
    round_context_of,
    rows_of,
    server_round,
    train,
)
from small_runs import COMMON

from fcljax import cli
from fcljax.adapters.full import FullOptions, full
from fcljax.errors import InputError
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.methods.vfcl.bayesian import bayesian, means
from fcljax.methods.vfcl.conflation import conflate_sums, precision_terms
from fcljax.methods.vfcl.posterior import Posterior, in_blocks, of_gaussian
from fcljax.methods.vfcl.vfcl import (
    ClientPrior,
    VFCLOptions,
    bounded_certainty,
    conflation,
    two_priors,
    vfcl,
)
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run, Training, federate
from fcljax.parts.learner import Params, cross_entropy_loss, learner
from fcljax.parts.task_end import no_task_end, of_task_before

RATE = 0.05
GRADIENT = Training(1, 4, RATE, optax.identity())
BATCHES = [rows_of([3, 4, 4]), rows_of([4], seed=2)]
OF_FIRST = [rows_of([0, 1, 2])]
OFF = {"prior_weight": 0.0}


def run_of(**aggregation):
    adapter = full(FullOptions(RATE), SIZES, FORMULA)
    return Run(SIZES, FORMULA, adapter, GRADIENT, make_aggregation(AggregationOptions(**aggregation)))


def method_of(aggregation=(), **options):
    return vfcl(VFCLOptions(**{"merge": "conflation", "exemplars": 0} | options), run_of(**dict(aggregation)))


def fresh(method):
    return compiled(method.init)(KEY, SCALE)


def close(left, right, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4), left, right)


def received(uploads):
    return aggregate_of(uploads, range(len(uploads)), [True] * len(uploads), SIZES.clients)


# ---- the learner -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_without_priors_and_without_spread_it_is_deterministic_training():
    """lambda_p = 0 and sigma near 0: the means follow plain gradient descent."""
    run = run_of()
    plain = learner(FORMULA, run.adapter, linear(WIDTH, SIZES.classes))
    usual = federate(run, plain, loss=cross_entropy_loss("seen"), personal=("classifier", "stats"))
    narrow = method_of(init_std=1e-6, **OFF)
    expected = train(usual, fresh(usual), TASKS[1], BATCHES)[1].trainable
    found = train(narrow, fresh(narrow), TASKS[1], BATCHES)[1].trainable
    close(means(found), expected)


def test_a_wide_posterior_draws_other_parameters_in_every_step_and_evaluates_at_its_mean():
    method = method_of(init_std=0.5, **OFF)
    server, round_context = fresh(method), round_context_of(TASKS[1], frozen=SCALE)
    one, other = (
        train(method, server, TASKS[1], BATCHES, key=jax.random.key(i))[1].trainable for i in (0, 1)
    )
    assert float(jnp.abs(one.classifier.mean.kernel - other.classifier.mean.kernel).max()) > 1e-4
    run = run_of()
    inner = learner(FORMULA, run.adapter, linear(WIDTH, SIZES.classes))
    logits = inner.predict(SCALE, means(server.params), BATCHES[0], round_context.task)
    seen = np.asarray(round_context.task.seen)
    np.testing.assert_allclose(
        method.predict(round_context, server, BATCHES[0])[:, seen], logits[:, seen], rtol=1e-6
    )


@pytest.mark.long
def test_the_loss_of_several_draws_is_their_mean():
    """Its gradient has less spread: over 20 keys a quarter of the variance with 4 draws."""

    def step(samples, seed):
        method = method_of(init_std=0.3, mc_samples=samples, **OFF)
        server = fresh(method)
        return np.asarray(
            train(method, server, TASKS[1], BATCHES[:1], key=jax.random.key(seed))[
                1
            ].trainable.classifier.mean.kernel
        )

    spread = {n: np.var([step(n, seed) for seed in range(20)], axis=0).mean() for n in (1, 4)}
    assert spread[4] < 0.5 * spread[1]


def test_a_function_done_in_blocks_has_its_value_and_slopes():
    """Over more than one block and a remainder; of clients side by side, each with a number of its own, and
    over draws one after the other, each with a number of its own too."""
    first, second = jax.random.normal(jax.random.key(0), (2, 3, 20_000))

    def of_numbers(factor, a, b):
        return factor * a * jnp.exp(b)

    def total(apply, first, second, share):
        def of_draw(draw):
            factor = draw * jnp.where(share < 0, 1.0, share)
            return jnp.sum(apply(of_numbers, factor, first, second) ** 2)

        return of_draw(1.0) + jnp.mean(jax.lax.map(of_draw, jnp.array([2.0, -3.0])))

    def slopes(apply):
        each = jax.value_and_grad(lambda *args: total(apply, *args), (0, 1))
        return jax.jit(jax.vmap(each))(first, second, jnp.array([0.1, -1.0, 0.3]))

    plain = slopes(lambda function, *args: function(*args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), slopes(in_blocks), plain)


# ---- the priors --------------------------------------------------------------------------------------------


def loss_of(method, server, state, task, batch):
    """A client's loss on a batch before it has taken a step."""
    program = main_of(method).program
    context = context_of(method, server, task, info_of(SIZES.classes, 3), SCALE)
    local = compiled(program.start)(context, state, KEY)
    _, metrics = compiled(program.phases[0].step)(context, local, batch, KEY)
    return float(metrics["loss"].total / metrics["loss"].weight)


def gaussian(x, mean, sigma):
    return -0.5 * ((x - mean) / sigma) ** 2 - np.log(sigma * np.sqrt(2 * np.pi))


@pytest.mark.parametrize("scale, factor", [("per_sample", 1 / 3), ("none", 1.0)])
@pytest.mark.long
def test_at_first_the_body_is_where_its_prior_is_and_the_heads_prior_is_standard(scale, factor):
    """Before the first step q is the global posterior, so that only the classifier's term is left; it is
    counted over the classes that the client has seen."""
    batch = rows_of([0, 1, 2])
    method, without = method_of(init_std=0.4, kl_scale=scale), method_of(init_std=0.4, **OFF)
    server = fresh(method)
    state = method.init_client(KEY, server)
    found = loss_of(method, server, state, TASKS[0], batch) - loss_of(
        without, fresh(without), state[-1:], TASKS[0], batch
    )
    keys = jax.random.split(jax.random.fold_in(KEY, 1002), 1)
    model = bayesian(learner(FORMULA, run_of().adapter, linear(WIDTH, SIZES.classes)), 0.4)
    drawn = model.sampling.draw(keys[0], server.params)
    mean, w = server.params.classifier.mean, drawn.classifier
    seen = np.asarray(TASKS[0].seen)
    terms = [
        (gaussian(np.asarray(a), np.asarray(m), 0.4) - gaussian(np.asarray(a), 0.0, 1.0))[..., seen].sum()
        for a, m in zip(jax.tree.leaves(w), jax.tree.leaves(mean), strict=True)
    ]
    assert found == pytest.approx(factor * sum(terms), rel=1e-3)


@pytest.mark.long
def test_the_loss_of_two_draws_is_their_mean_with_the_priors():
    """Of a client with a posterior of the task before, each draw as by a method of one draw."""
    batch, samples = rows_of([0, 1, 2]), 2
    keys = jax.random.split(jax.random.fold_in(KEY, 1002), samples)
    method = method_of(init_std=0.4, mc_samples=samples)
    server = fresh(method)
    prior, *rest = method.init_client(KEY, server)
    own = of_task_before(prior, TASKS[0])
    own = own._replace(adapter=shifted(own.adapter, 0.2), seen=TASKS[0].seen, task=jnp.int32(0))
    context = context_of(method, server, TASKS[1], info_of(SIZES.classes, 3), SCALE)
    model = bayesian(learner(FORMULA, run_of().adapter, linear(WIDTH, SIZES.classes)), 0.4)
    rule, likelihood = two_priors(VFCLOptions(init_std=0.4), run_of()), cross_entropy_loss("seen")
    expected = []
    for key in keys:
        drawn = model.sampling.draw(key, server.params)
        output = model.forward(context.frozen, context.cached, drawn, batch, TASKS[1], True)
        step = ClientStep(model, context, server.params, output, batch, KEY, drawn)
        expected.append(float(likelihood.value(output, batch, TASKS[1]) + rule.loss(step, own)))
    assert abs(expected[0] - expected[1]) > 1e-3
    found = loss_of(method, server, (no_task_end(own), *rest), TASKS[1], batch)
    assert found == pytest.approx(np.mean(expected), rel=1e-4)


def shifted(posterior, by):
    return posterior._replace(mean=jax.tree.map(lambda x: x + by, posterior.mean))


@pytest.mark.parametrize("task, share", [(-1, 1.0), (0, 0.25)])
def test_the_bodys_prior_is_the_mixture_of_what_was_sent_and_its_own_of_the_task_before(task, share):
    """A client that stands 0.2 from the global posterior and 0.3 from its own; without one, the first counts
    alone. The heads of its classes stand where they stood."""
    options, sigma, rows = VFCLOptions(init_std=0.1, global_share=0.25, prior_weight=2.0), 0.1, 3
    method = method_of(init_std=0.1)
    server = fresh(method)
    context = context_of(method, server, TASKS[0], info_of(SIZES.classes, rows), SCALE)
    own = server.params._replace(adapter=shifted(server.params.adapter, 0.2))
    known = jnp.ones(SIZES.classes, bool)
    prior = ClientPrior(shifted(own.adapter, -0.3), own.classifier, known, jnp.int32(task))
    rule = two_priors(options, run_of())
    model = bayesian(learner(FORMULA, run_of().adapter, linear(WIDTH, SIZES.classes)), sigma)

    def value(trainable):
        step = ClientStep(model, context, trainable, None, BATCHES[0], KEY, means(trainable))
        return rule.loss(step, prior)

    numbers = sum(x.size for x in jax.tree.leaves(own.adapter.mean))
    mixed = np.logaddexp(np.log(share) - 0.5 * 4, np.log(1 - share + 1e-30) - 0.5 * 9)
    assert float(value(own)) == pytest.approx(2.0 / rows * numbers * -mixed, rel=1e-3)
    slope = jax.jit(jax.grad(value))(own).adapter.mean
    # at its own mean only the prior pulls: down the mixture's slope, to what was sent in the first task
    part = share * np.exp(-2) / (share * np.exp(-2) + (1 - share) * np.exp(-4.5))
    expected = 2.0 / rows * (part * 0.2 + (1 - part) * 0.3) / sigma**2
    jax.tree.map(lambda x: np.testing.assert_allclose(x, expected, rtol=1e-3), slope)


def test_a_client_keeps_its_posterior_of_a_tasks_last_round_and_no_other():
    method = method_of(init_std=0.1)
    server = fresh(method)
    state = method.init_client(KEY, server)
    before = lambda state, task: of_task_before(state[0], task)
    _, early = client_round(method, server, TASKS[0], OF_FIRST, state, round_=0)
    assert before(early, TASKS[0]).task == -1 and not before(early, TASKS[0]).seen.any()
    _, late = client_round(method, server, TASKS[0], OF_FIRST, early, round_=SIZES.rounds - 1)
    assert before(late, TASKS[1]).task == 0 and (before(late, TASKS[1]).seen == TASKS[0].seen).all()
    part = train(method, server, TASKS[0], OF_FIRST, early, round_=SIZES.rounds - 1)[1].trainable
    close(before(late, TASKS[1]).adapter, part.adapter)
    _, next_ = client_round(method, server, TASKS[1], BATCHES, late, round_=0)
    close(before(next_, TASKS[1]).adapter, before(late, TASKS[1]).adapter, atol=0)


def test_a_client_that_misses_a_tasks_last_round_keeps_the_posterior_that_it_had_before():
    method = method_of(init_std=0.1)
    server = fresh(method)
    state = method.init_client(KEY, server)
    trained = train(method, server, TASKS[0], OF_FIRST, state)[1].trainable
    _, early = client_round(method, server, TASKS[0], OF_FIRST, state, round_=0)
    prior = of_task_before(early[0], TASKS[1])
    assert prior.task == 0 and (prior.seen == TASKS[0].seen).all()
    close(prior.adapter, trained.adapter)
    close(prior.classifier, trained.classifier)


# ---- the server --------------------------------------------------------------------------------------------


def two_clients(method, server):
    """Clients of seven rows and of three: their parts after training, and what they send."""
    rows = ([rows_of([0, 1, 2, 0]), rows_of([1, 2, 0], seed=2)], [rows_of([2, 1, 1], seed=3)])
    parts = [train(method, server, TASKS[0], mine, id_=i)[1].trainable for i, mine in enumerate(rows)]
    return parts, [client_round(method, server, TASKS[0], mine, id_=i)[0] for i, mine in enumerate(rows)]


def test_conflation_of_one_client_is_the_client_and_of_several_their_product_whatever_their_rows():
    method = method_of(init_std=0.1)
    server = fresh(method)
    parts, uploads = two_clients(method, server)
    assert uploads[0].mean.classifier == () and uploads[0].weight == uploads[1].weight == 1
    alone, _ = server_round(method, server, TASKS[0], received(uploads[:1]))
    close(alone.params.adapter, parts[0].adapter)
    both, _ = server_round(method, server, TASKS[0], received(uploads))
    stack = lambda pick: jax.tree.map(lambda *x: jnp.stack(x), *[pick(part.adapter) for part in parts])
    terms = precision_terms(stack(lambda p: p.mean), stack(lambda p: p.sigma))
    mean, sigma = conflate_sums(*jax.tree.map(lambda leaf: leaf.sum(0), terms))
    close(both.params.adapter.mean, mean)
    close(both.params.adapter.sigma, sigma)
    swapped, _ = server_round(method, server, TASKS[0], received(uploads[::-1]))
    close(swapped.params.adapter, both.params.adapter, atol=1e-6)


@pytest.mark.long
def test_tempered_conflation_has_the_same_means_and_does_not_narrow_what_is_alike():
    made = {}
    for merge in ("conflation", "tempered"):
        method = method_of(init_std=0.1, merge=merge)
        server = fresh(method)
        _, uploads = two_clients(method, server)
        made[merge] = server_round(method, server, TASKS[0], received(uploads))[0].params.adapter
    close(made["tempered"].mean, made["conflation"].mean)
    wider = jax.tree.map(lambda sigma: sigma * 2**0.5, made["conflation"].sigma)
    close(made["tempered"].sigma, wider)


def test_labels_bound_how_certain_a_client_can_become():
    """9 labels of 3 classes have 9 log 3 nats: a tenth of the standard deviation of four weights is possible,
    of a thousand it is not. What is possible keeps its bits."""
    nats, sent = jnp.float32(9 * np.log(3)), of_gaussian(jnp.zeros(1000), jnp.full(1000, 0.02))
    factor = jnp.ones(1000).at[:4].set(0.1).at[4:500].set(3.0)
    few = of_gaussian(sent.mean, 0.02 * factor)
    assert (bounded_certainty(few, sent, nats) == few.sigma).all()
    all_ = of_gaussian(sent.mean, sent.sigma / 9.9)
    gained = jnp.log(sent.sigma / bounded_certainty(all_, sent, nats))
    np.testing.assert_allclose(gained, nats / 1000, rtol=1e-2)
    # wider weights buy nothing, and stay as they are
    half = of_gaussian(sent.mean, sent.sigma * jnp.where(jnp.arange(1000) < 500, 0.1, 10.0))
    found = bounded_certainty(half, sent, nats)
    np.testing.assert_allclose(jnp.log(sent.sigma / found)[:500], nats / 500, rtol=1e-2)
    assert (found[500:] == half.sigma[500:]).all()


@pytest.mark.parametrize("merge", ["conflation", "tempered"])
@pytest.mark.long
def test_two_of_ten_that_are_certain_have_little_more_than_their_share(merge):
    """Honest means are 1 and the liars' -1, at a precision of a hundred times what was sent. Without a bound
    they have 96 % of the weight."""
    rule = conflation(VFCLOptions(merge=merge), make_aggregation(AggregationOptions()), 10)
    sent = Params(of_gaussian(jnp.zeros(20_000), jnp.full(20_000, 0.02)), (), {}, ())
    honest = sent._replace(adapter=sent.adapter._replace(mean=jnp.ones(20_000)))
    lie = sent._replace(adapter=of_gaussian(-jnp.ones(20_000), jnp.full(20_000, 0.002)))
    arrived = [rule.pre(each, sent, jnp.float32(144)) for each in [lie] * 2 + [honest] * 8]
    mean = jax.tree.map(lambda *x: sum(x) / 10, *[each for each, _ in arrived])
    found, _ = rule.post(mean, sent, (), jnp.int32(10), KEY)
    shares = (1 - found.adapter.mean) / 2
    assert shares.max() < 0.21
    narrowed = found.adapter.sigma / 0.02 * (10**0.5 if merge == "conflation" else 1)
    np.testing.assert_allclose(narrowed, 1.0, atol=0.01)


def test_averaging_takes_means_and_rhos_by_the_clients_rows():
    method = method_of(init_std=0.1, merge="average")
    server = fresh(method)
    parts, uploads = two_clients(method, server)
    after, _ = server_round(method, server, TASKS[0], received(uploads))
    expected = jax.tree.map(lambda a, b: (7 * a + 3 * b) / 10, parts[0].adapter, parts[1].adapter)
    close(after.params.adapter, expected)
    assert isinstance(after.params.adapter, Posterior)


def test_another_rule_than_the_mean_is_refused_in_the_place_of_conflation():
    with pytest.raises(InputError, match="aggregator: 'median' .* nearest: 'mean', or --merge average"):
        method_of({"aggregator": "median"}.items())
    assert method_of({"aggregator": "median"}.items(), merge="average").aggregation == "median"


# ---- clients as themselves ---------------------------------------------------------------------------------


def test_drawn_predictions_are_the_mean_of_those_of_parameters_from_the_clients_posterior():
    """With a narrow posterior the same as by its means; with a wide one less sure than each draw alone."""
    for sigma, same in ((1e-6, True), (1.0, False)):
        method = method_of(init_std=sigma, mc_test_samples=4)
        server, round_context = fresh(method), round_context_of(TASKS[1], frozen=SCALE)
        state = method.init_client(KEY, server)
        drawn = jax.nn.softmax(method.predict_drawn(round_context, server, state, BATCHES[0]))
        plain = jax.nn.softmax(method.predict_client(round_context, server, state, BATCHES[0]))
        np.testing.assert_allclose(drawn.sum(axis=1), 1.0, rtol=1e-5)
        assert np.allclose(drawn, plain, atol=1e-4) == same
    assert method_of(mc_test_samples=0).predict_drawn is None


def test_a_client_that_has_learned_replays_examples_of_earlier_tasks_and_one_that_has_not_none():
    method = method_of(exemplars=2)
    program, server = main_of(method).program, fresh(method)
    assert main_of(method_of()).program.replay_buffer is None
    state = method.init_client(KEY, server)
    assert (np.asarray(program.replay_buffer(state)) == -1).all()
    _, state = client_round(method, server, TASKS[0], OF_FIRST, state, round_=SIZES.rounds - 1)
    after = end_of_task(method, server, TASKS[0], OF_FIRST, state)
    rows = np.asarray(program.replay_buffer(after))
    assert set(rows[rows >= 0]) == {0, 1, 2}  # one row of each class is all that there is


@pytest.mark.long
def test_a_run_on_private_streams_evaluates_every_client_as_itself_and_goes_on_after_a_stop(tmp_path):
    """[task learned][client][task], with the task untold and told; a summary of a resumed run is the same."""
    options = [*COMMON, "--rounds", "2", "--clients", "3", "--partition", "private", "--task-pool", "order"]
    options += ["--task-pool-classes", "2", "--tasks", "3", "--mc-test-samples", "2", "--exemplars", "3"]
    out = tmp_path / "run"
    assert cli.main(["run", "vfcl", *options, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    found, told = summary["personal"]["accuracy"], summary["personal"]["task_il"]
    assert [[len(own) for own in each] for each in found] == [[1] * 3, [2] * 3, [3] * 3]
    for untold, better in zip(np.concatenate(found[2]), np.concatenate(told[2]), strict=True):
        assert 0 <= untold <= better <= 1
    assert summary["calibration"]["ece"] != summary["calibration_drawn"]["ece"]
    assert summary["client_state"]["bytes"] > 0
    steps = sorted(int(folder.name) for folder in (out / "checkpoints").iterdir())
    shutil.rmtree(out / "checkpoints" / str(steps[-1]))
    (out / "summary.json").unlink()
    assert cli.main(["run", "vfcl", "--resume", str(out)]) == 0
    again = json.loads((out / "summary.json").read_text())
    assert again["personal"] == summary["personal"] and again["accuracy"] == summary["accuracy"]
