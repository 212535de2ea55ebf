"""C2Prompt against numpy: moments of classes, compensation prompts, wrong classes, mixed components."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    KEY,
    SCALE,
    SIZES,
    TASKS,
    WIDTH,
    aggregate_of,
    client_round,
    compiled,
    context_of,
    formula,
    info_of,
    main_of,
    method_of,
    round_context_of,
    rows_of,
    server_round,
)
from small_runs import some

from fcljax.errors import InputError
from fcljax.methods import c2prompt as C
from fcljax.types import Aggregate, Features, Network

TASK = TASKS[0]
BATCHES = {0: rows_of([0, 1, 2, 0], 1), 2: rows_of([1, 1, 2], 2), 3: rows_of([0, 2], 3)}
OPTIONS = dict(
    coda_components=4, coda_length=2, coda_blocks=2, lr=0.05, compensation_length=2, compensation_lr=0.5
)


def _apply(params, image, injection, train, mask=None):
    """The scaled image, plus what prefixes add, plus the mean of the tokens beside the patches."""
    feature = formula(params, image, injection)
    if injection is not None and injection.tokens is not None:
        feature = feature + injection.tokens.mean(-2)
    return Features(feature, None, {}), params


BESIDE = Network(lambda key: SCALE.network, _apply, WIDTH, 2, (WIDTH,))


def made(**options):
    return method_of("c2prompt", network=BESIDE, **OPTIONS | options)


def before_task(method, server, task=TASK, batches=BATCHES):
    """The server after clients have sent the moments of the task's classes."""
    (round_,) = [each for each in method.rounds if each.when == "task_start"]
    total = None
    for id_, batch in batches.items():
        context = context_of(method, server, task, info_of(SIZES.classes, int(batch.mask.sum()), id_), SCALE)
        local = compiled(round_.program.start)(context, method.init_client(KEY, server), KEY)
        local, _ = compiled(round_.program.phases[0].step)(context, local, batch, KEY)
        upload, _ = compiled(round_.program.finish)(context, local, method.init_client(KEY, server))
        assert all(claim.holds(context, upload) for claim in round_.program.claims)
        total = upload.sum if total is None else jax.tree.map(jnp.add, total, upload.sum)
    valid = jnp.ones(len(batches), bool)
    aggregate = Aggregate((), total, {}, valid.astype(float), jnp.asarray([*batches]), valid)
    return compiled(round_.server)(round_context_of(task, frozen=SCALE), server, aggregate, KEY)[0]


def begun(method, task=TASK):
    server = compiled(method.init)(KEY, SCALE)
    server = compiled(method.begin_task)(round_context_of(task, frozen=SCALE), server, KEY)
    return before_task(method, server, task)


def sent(method, server, task=TASK):
    return method.broadcast(round_context_of(task, frozen=SCALE), server).payload.sent


@pytest.mark.long
def test_the_moments_of_a_class_are_those_of_the_mixture_of_all_clients():
    method = made()
    found = sent(method, begun(method))["moments"]
    mean, variance = C.reports.normal_of(found)
    for place, label in enumerate(np.asarray(TASK.classes)):
        own = [np.asarray(b.input)[np.asarray(b.mask & (b.label == label))] for b in BATCHES.values()]
        own = [np.asarray(x, np.float64) for x in own if len(x)]
        share = np.array([len(x) for x in own]) / sum(map(len, own))
        mu = sum(p * x.mean(0) for p, x in zip(share, own, strict=True))
        square = sum(p * (x.mean(0) ** 2 + x.var(0)) for p, x in zip(share, own, strict=True))
        np.testing.assert_allclose(mean[place], mu, atol=1e-5)
        np.testing.assert_allclose(variance[place], square - mu**2, atol=1e-5)
        assert found.examples[place] == sum(map(len, own))


def misfit_of(prompt, batch, found):
    """L_c by hand."""
    mean, variance = (np.asarray(x, np.float64) for x in C.reports.normal_of(found))
    label, keep = np.asarray(batch.label), np.asarray(batch.mask)
    feature = np.asarray(batch.input, np.float64) + np.asarray(prompt, np.float64)[label].mean(1)
    apart = (feature - mean[label]) ** 2 / np.maximum(variance[label], C.LEAST_VARIANCE)
    return apart.sum(1)[keep].mean() / 2


@pytest.mark.long
def test_compensation_prompts_move_features_to_their_class_once_in_a_task_and_stay():
    method = made()
    server = begun(method)
    state, moments = method.init_client(KEY, server), sent(method, server)["moments"]
    batches = [BATCHES[0]] * 20
    upload, first = client_round(method, server, TASK, batches, state, id_=0)
    start = np.asarray(C.initial_prompts(first[0].prompt.shape))
    before, after = (misfit_of(x, BATCHES[0], moments) for x in (start, first[0].prompt))
    assert after < 0.7 * before
    assert first[0].task == 0
    _, second = client_round(method, server, TASK, batches, first, id_=0, round_=1)
    np.testing.assert_array_equal(second[0].prompt, first[0].prompt)
    stale = (first[0]._replace(task=jnp.int32(-1)), *first[1:])
    _, other = client_round(method, server, TASK, batches, stale, id_=0)
    np.testing.assert_array_equal(other[0].prompt, first[0].prompt)  # as new ones
    shapes = {leaf.shape for leaf in jax.tree.leaves((upload.mean, upload.sum, upload.gather))}
    assert first[0].prompt.shape not in shapes


@pytest.mark.long
def test_a_step_of_the_compensation_descends_l_c():
    method = made(optimiser="sgd", momentum=0.0)
    server = begun(method)
    found, batch = sent(method, server)["moments"], BATCHES[2]
    _, (state, _) = client_round(method, server, TASK, [batch], id_=2)
    start = np.asarray(C.initial_prompts(state.prompt.shape), np.float64)
    gradient = np.zeros_like(start)
    for index in np.ndindex(start.shape):
        by = np.zeros_like(start)
        by[index] = 1e-5
        rise = misfit_of(start + by, batch, found) - misfit_of(start - by, batch, found)
        gradient[index] = rise / 2e-5
    np.testing.assert_allclose(state.prompt, start - 0.5 * gradient, rtol=1e-3, atol=1e-4)


# ---- the clients' loss -------------------------------------------------------------------------------------


def loss_of(method, server, batch, prompt, round_=0, trainable=None):
    """The loss of a client's first step of training with these compensation prompts."""
    program, rows = main_of(method).program, int(batch.mask.sum())
    context = context_of(method, server, TASK, info_of(SIZES.classes, rows, 0, round_), SCALE)
    state = method.init_client(KEY, server)
    if prompt is not None:
        state = (C.Compensation(jnp.asarray(prompt, jnp.float32), jnp.int32(0)), *state[1:])
    local = compiled(program.start)(context, state, KEY)
    if trainable is not None:
        local = local._replace(trainable=trainable)
    _, metrics = compiled(program.phases[-1].step)(context, local, batch, KEY)
    return float(metrics["loss"].total / metrics["loss"].weight), context


def entropy(logits, batch):
    """The mean cross-entropy over the task's classes, in float64."""
    keep, label = np.asarray(batch.mask), np.asarray(batch.label)
    z = np.asarray(logits, np.float64)[keep][:, np.asarray(TASK.current)]
    odds = z - np.log(np.exp(z).sum(1, keepdims=True))
    return -odds[np.arange(len(z)), label[keep]].mean()


@pytest.mark.parametrize("share", [0.5, pytest.param(0.25, marks=pytest.mark.long)])
def test_a_share_of_the_cross_entropy_is_on_images_beside_their_compensation_prompt(share):
    method = made(compensation_share=share)
    server, batch = begun(method), BATCHES[0]
    prompt = 3 * np.random.default_rng(5).normal(size=(SIZES.task_classes, 2, WIDTH))
    loss, context = loss_of(method, server, batch, prompt)
    head = context.payload.trainable.classifier
    image, label = np.asarray(batch.input, np.float64), np.asarray(batch.label)

    def logits(shift):
        cached = server.params.adapter
        inject = method_adapter().inject
        injection = inject(cached, context.payload.trainable.adapter, batch.input, TASK, True, batch.mask)
        feature = np.asarray(formula(SCALE.network, batch.input, injection)) + shift
        return feature @ np.asarray(head.kernel) + np.asarray(head.bias)

    plain, beside = entropy(logits(0 * image), batch), entropy(logits(prompt[label].mean(1)), batch)
    np.testing.assert_allclose(loss, (1 - share) * plain + share * beside, rtol=1e-4)
    assert abs(plain - beside) > 0.05
    without, _ = loss_of(made(wo_lcdc=True), compiled(made(wo_lcdc=True).init)(KEY, SCALE), batch, None)
    assert abs(without - loss) > 1e-3


def method_adapter():
    from fcljax.adapters.coda import CodaOptions, coda

    return coda(CodaOptions(coda_components=4, coda_length=2, coda_blocks=2), SIZES, BESIDE)


def test_wrong_classes_stay_near_the_rounds_first_model_from_the_second_round_on():
    method = made(wo_lcdc=True, kd_weight=2.0, kd_temperature=3.0)
    server, batch = begun_plain(method), BATCHES[0]
    start = method.broadcast(round_context_of(TASK, frozen=SCALE), server).payload.trainable
    head = start.classifier
    noise = np.random.default_rng(3).normal(size=head.kernel.shape).astype(np.float32)
    moved = start._replace(classifier=head._replace(kernel=head.kernel + noise))
    first, _ = loss_of(method, server, batch, None, 0, moved)
    second, _ = loss_of(method, server, batch, None, 1, moved)
    predict = lambda trainable: np.asarray(
        method.predict(
            round_context_of(TASK, frozen=SCALE),
            server._replace(params=server.params._replace(classifier=trainable.classifier)),
            batch,
        ),
        np.float64,
    )
    student, teacher = predict(moved)[:, :3] / 3, predict(start)[:, :3] / 3
    value = []
    for s, t, label, keep in zip(student, teacher, batch.label, batch.mask, strict=True):
        wrong = [i for i in range(3) if i != label]
        p, q = (np.exp(x[wrong]) / np.exp(x[wrong]).sum() for x in (t, s))
        value += [(p * np.log(p / q)).sum()] if keep else []
    np.testing.assert_allclose(second - first, 2.0 * 9 * np.mean(value), rtol=1e-3)
    np.testing.assert_allclose(first, entropy(predict(moved), batch), rtol=1e-4)


def begun_plain(method):
    server = compiled(method.init)(KEY, SCALE)
    return compiled(method.begin_task)(round_context_of(TASK, frozen=SCALE), server, KEY)


# ---- the server's mixture ----------------------------------------------------------------------------------


def a_round(method, server, valid=(True, True, True)):
    """(the server after a round, the clients' uploads)."""
    uploads = [client_round(method, server, TASK, [BATCHES[i]] * 3, id_=i)[0] for i in BATCHES]
    aggregate = aggregate_of(uploads, [*BATCHES], valid, SIZES.clients)
    return server_round(method, server, TASK, aggregate)[0], uploads


def mixed_by_hand(uploads, shares, temperature):
    """P* = softmax(H H^T / tau) P over the rows (client, component), averaged over the clients."""
    components = [jax.tree.map(lambda x: np.asarray(x, np.float64), u.gather["adapter"]) for u in uploads]
    affinity = np.stack([np.asarray(u.gather["affinity"], np.float64) for u in uploads])
    clients, blocks, count, _ = affinity.shape
    result = [np.zeros_like(x) for x in components[0]]
    for m in range(blocks):
        rows = affinity[:, m].reshape(clients * count, -1)
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        odds = np.exp(rows @ rows.T / temperature)
        mixing = odds / odds.sum(1, keepdims=True)
        for each, own in zip(result, zip(*components, strict=True), strict=True):
            every = np.stack([x[m] for x in own]).reshape(clients * count, -1)
            mixed = (mixing @ every).reshape(clients, count, *each.shape[2:])
            each[m] = np.tensordot(shares, mixed, 1)
    return result


@pytest.mark.parametrize("temperature", [0.1, pytest.param(2.0, marks=pytest.mark.long)])
def test_components_are_mixed_by_the_classes_that_they_match(temperature):
    method = made(affinity_temperature=temperature)
    server = begun(method)
    after, uploads = a_round(method, server)
    expected = mixed_by_hand(uploads, np.array([4, 3, 2]) / 9, temperature)
    for found, old, mine in zip(after.params.adapter, server.params.adapter, expected, strict=True):
        np.testing.assert_allclose(found[0], mine, atol=2e-5)
        np.testing.assert_array_equal(found[1], old[1])  # another task's
    mean = sum(
        n / 9 * np.asarray(u.gather["adapter"].prompt) for n, u in zip((4, 3, 2), uploads, strict=True)
    )
    assert np.abs(expected[0] - mean).max() > 1e-2


def test_the_affinity_is_the_sum_of_each_component_s_match_with_each_class():
    method = made(lr=1e-9)
    server = begun(method)
    _, uploads = a_round(method, server)
    own = jax.tree.map(lambda x: np.asarray(x, np.float64)[0], server.params.adapter)
    batch = BATCHES[2]
    expected = np.zeros(uploads[1].gather["affinity"].shape)
    for query, label in zip(np.asarray(batch.input, np.float64)[:3], (1, 1, 2), strict=True):
        for m, n in np.ndindex(expected.shape[:2]):
            attended, key = query * own.attention[m, n], own.key[m, n]
            cosine = attended @ key / np.linalg.norm(attended) / np.linalg.norm(key)
            expected[m, n, int(label)] += 3 * cosine  # three steps on the batch
    np.testing.assert_allclose(uploads[1].gather["affinity"], expected, atol=1e-5)


@pytest.mark.long
def test_who_is_not_valid_has_no_part_in_the_mixture():
    method = made()
    server = begun(method)
    after, uploads = a_round(method, server, (True, False, True))
    expected = mixed_by_hand([uploads[0], uploads[2]], np.array([4, 2]) / 6, 0.1)
    np.testing.assert_allclose(after.params.adapter.prompt[0], expected[0], atol=2e-5)
    spoilt = [jax.tree.map(lambda x: x * jnp.nan, u) if i == 1 else u for i, u in enumerate(uploads)]
    aggregate = aggregate_of(spoilt, [*BATCHES], (True, False, True), SIZES.clients)
    same, _ = server_round(method, server, TASK, aggregate)
    np.testing.assert_array_equal(same.params.adapter.prompt, after.params.adapter.prompt)
    nobody, _ = a_round(method, server, (False, False, False))
    np.testing.assert_array_equal(nobody.params.adapter.prompt, server.params.adapter.prompt)


@pytest.mark.long
def test_without_cpa_and_lcdc_it_is_coda_prompt_with_distillation():
    method = made(wo_cpa=True, wo_lcdc=True, kd_weight=0.0)
    plain = method_of(
        "coda-prompt", network=BESIDE, **{k: OPTIONS[k] for k in OPTIONS if "comp" not in k[:5]}
    )
    for each in (method, plain):
        assert [r.when for r in each.rounds] == ["round"]
    servers = []
    for each in (method, plain):
        after, uploads = a_round(each, begun_plain(each))
        assert not uploads[0].gather
        servers.append(after.params)
    for one, other in zip(*map(jax.tree.leaves, servers), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# ---- liars -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", some([1.0, 40.0], [1.0]))
def test_an_affinity_that_no_client_can_have_is_left_out(scale):
    method = made()
    server, batch = begun(method), BATCHES[0]
    program = main_of(method).program
    context = context_of(method, server, TASK, info_of(SIZES.classes, 4), SCALE)
    upload, _ = client_round(method, server, TASK, [batch], id_=0)
    lie = upload._replace(gather=upload.gather | {"affinity": scale * upload.gather["affinity"]})
    (claim,) = [each for each in program.claims if each.name == "affinity"]
    assert claim.holds(context, lie) == (scale == 1)


def test_adapters_without_components_are_refused():
    with pytest.raises(InputError, match="it mixes CODA-Prompt's components"):
        method_of("c2prompt", network=BESIDE, adapter="lora")
