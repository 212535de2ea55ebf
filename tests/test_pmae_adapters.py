"""The adapters of pMAE's baselines: L2P, DualPrompt and CODA-Prompt, by the numbers of the specification."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FORMULA,
    KEY,
    SCALE,
    SIZES,
    TASKS,
    TINY,
    WIDTH,
    by_hand,
    compiled,
    method_of,
    round_context_of,
)
from toys import same

from fcljax import config
from fcljax.adapters import coda, dualprompt, find_adapter, l2p
from fcljax.adapters.slots import Slots
from fcljax.errors import InputError
from fcljax.federated import communication
from fcljax.methods import METHODS
from fcljax.models.heads import cosine, init_truncated
from fcljax.models.shapes import VITS
from fcljax.models.vit import Injection, apply_vit, init_vit, parameter_shapes, vit_network
from fcljax.runs.build import make_method
from fcljax.types import Features, Frozen, Sizes

EVERY = jnp.ones(4, bool)
QUERY = jax.random.normal(KEY, (4, WIDTH))
OLD, NEW = TASKS


def options_of(name, **values):
    cfg = config.resolve(config.from_mapping("linear", {"adapter": name, **values}, "test"))
    return config.part(find_adapter(name).options, cfg)


def adapter_of(name, network=FORMULA, sizes=SIZES, **values):
    return find_adapter(name).build(options_of(name, **values), sizes, network)


# ---- counts (specification 9) ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fidelity", "expected"),
    [
        ("l2p", "intended", 199_880),
        ("dualprompt", "intended", 262_088),
        ("dualprompt", "released", 2_027_720),
        ("coda-prompt", "intended", 345_800),
        ("coda-prompt", "released", 3_993_800),
    ],
)
def test_what_is_uploaded_is_what_the_paper_counts(method, fidelity, expected):
    sizes, vit = Sizes(200, 20, 10, 10), VITS["vit_b16"]
    cfg = config.resolve(config.preset(method, fidelity=fidelity))
    made = make_method(cfg, sizes, vit_network(vit))
    server = jax.eval_shape(made.init, KEY, Frozen(parameter_shapes(vit)))
    broadcast = jax.eval_shape(functools.partial(made.broadcast, round_context_of(OLD)), server)
    assert communication.count_scalars(broadcast.payload.trainable) == expected


# ---- tokens that go through the network --------------------------------------------------------------------


@pytest.mark.long
def test_injected_tokens_take_part_in_every_block_with_the_class_tokens_position():
    """222 tokens of a ViT-B (specification 9); here 1 + 3 + 4. A token that is what the class token is before
    its position is added becomes what the class token becomes."""
    params, image = init_vit(KEY, TINY), jax.random.normal(KEY, (2, 8, 8, 3))
    shape = jax.eval_shape(
        lambda: apply_vit(
            VITS["vit_b16"],
            parameter_zeros(),
            jnp.zeros((1, 224, 224, 3)),
            Injection(tokens=jnp.zeros((25, 768))),
            full=True,
        )
    )
    assert shape.tokens.shape == (1, 222, 768) and shape.prompts.shape == (1, 25, 768)
    call = jax.jit(
        lambda tokens, full: apply_vit(TINY, params, image, Injection(tokens=tokens), full), static_argnums=1
    )
    twins = call(params["cls"][None].repeat(3, 0), False)
    np.testing.assert_allclose(twins.prompts, twins.cls[:, None].repeat(3, 1), atol=1e-5)
    other = jax.random.normal(KEY, (2, 3, TINY.width))
    short, whole = call(other, False), call(other, True)
    np.testing.assert_allclose(short.prompts, whole.tokens[:, 1:4], atol=1e-5)
    np.testing.assert_allclose(short.cls, whole.tokens[:, 0], atol=1e-5)
    assert float(jnp.abs(short.cls - twins.cls).max()) > 1e-3


def parameter_zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameter_shapes(VITS["vit_b16"]))


# ---- L2P ---------------------------------------------------------------------------------------------------


def test_a_batch_chooses_the_prompts_with_the_most_votes():
    """O14: {0,1}, {0,2}, {0,1} -> votes 3, 2, 1 -> {0, 1}; padding has none."""
    score = jnp.array([[3.0, 2, 1], [3, 1, 2], [3, 2, 1], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    mask = jnp.array([True, True, True, False, False, False])
    np.testing.assert_array_equal(l2p.choose_prompts(score, mask, 2, True), [[0, 1]] * 6)
    np.testing.assert_array_equal(l2p.choose_prompts(score, ~mask, 2, True), [[1, 2]] * 6)
    alone = l2p.choose_prompts(score, mask, 2, False)
    np.testing.assert_array_equal(alone, [[0, 1], [0, 2], [0, 1], [2, 1], [2, 1], [2, 1]])


@pytest.mark.parametrize(
    ("fidelity", "train", "evaluation"),
    [("intended", True, False), ("paper", False, False), ("released", True, True)],
)
def test_batches_vote_in_training_and_in_the_release_in_evaluation(fidelity, train, evaluation):
    """Three images: {0}, {1}, {1}. By votes all get 1."""
    adapter = adapter_of("l2p", fidelity=fidelity, l2p_size=2, l2p_top_k=1, l2p_length=1)
    part = adapter.init(KEY, None)._replace(key=jnp.eye(WIDTH)[:2])
    query = jnp.eye(WIDTH)[jnp.array([0, 1, 1, 0])]
    own, voted = part.prompt[jnp.array([0, 1, 1])], part.prompt[jnp.array([1, 1, 1])]
    mask = jnp.array([True, True, True, False])
    for training, votes in ((True, train), (False, evaluation)):
        tokens = adapter.inject((), part, query, OLD, training, mask).tokens[:3]
        np.testing.assert_array_equal(tokens, voted if votes else own)
    np.testing.assert_array_equal(adapter.prompt((), part, query[:3], OLD), voted if evaluation else own)
    assert adapter.batchwise == (("l2p_eval_batchwise",) if evaluation else ())


@pytest.mark.long
def test_chosen_keys_are_pulled_to_the_queries():
    """O14: cosines (0.5, 0.5, 0, 0, 0) of the five chosen keys of every row: S = 1, the term -0.1."""
    query = jnp.eye(4)[:2] + 0
    half = jnp.array([0.5, 0.5, 0.5, 0.5])  # cosine 0.5 with every axis
    away = jnp.array([0.0, 0, 1, -1])
    key = jnp.stack([half, 2 * half, away, away, 3 * away, -half])
    chosen = jnp.tile(jnp.arange(5), (2, 1))
    np.testing.assert_allclose(l2p.key_similarity(key, query, chosen, jnp.ones(2, bool)), 1.0, atol=1e-6)
    one = l2p.key_similarity(key, query.at[1].set(jnp.nan), chosen, jnp.array([True, False]))
    np.testing.assert_allclose(one, 1.0, atol=1e-6)
    adapter = adapter_of("l2p", l2p_size=5, l2p_top_k=5, l2p_length=1)
    part = l2p.KeyedPrompts(jnp.zeros((5, 1, WIDTH)), key[:5])
    np.testing.assert_allclose(adapter.loss((), part, query, OLD, jnp.ones(2, bool)), -0.1, atol=1e-6)
    # keys are all that the term moves, towards the queries
    slope = jax.grad(lambda part: adapter.loss((), part, QUERY, OLD, EVERY))(part)
    assert not slope.prompt.any() and slope.key.any()
    moved = part._replace(key=part.key - 0.1 * slope.key)
    near = lambda part: float(cosine(QUERY, part.key).sum())
    assert near(moved) > near(part)


def test_the_classifier_reads_the_mean_of_what_becomes_of_the_prompts():
    adapter = adapter_of("l2p", l2p_size=4, l2p_top_k=2, l2p_length=3)
    part = adapter.init(KEY, None)
    tokens = adapter.inject((), part, QUERY, OLD, False, EVERY).tokens
    assert tokens.shape == (4, 6, WIDTH)
    np.testing.assert_array_equal(tokens, adapter.prompt((), part, QUERY, OLD))
    found = adapter.feature(Features(jnp.zeros((4, WIDTH)), None, {}, tokens))
    np.testing.assert_allclose(found, tokens.mean(1), atol=1e-6)
    with pytest.raises(InputError, match="l2p: the network gives back no injected tokens"):
        adapter.feature(Features(jnp.zeros((4, WIDTH)), None, {}))
    with pytest.raises(InputError, match="l2p_top_k: 5 of a pool of 4; nearest: 4"):
        adapter_of("l2p", l2p_size=4)


# ---- DualPrompt --------------------------------------------------------------------------------------------

DUAL = {"dual_shared_length": 2, "dual_length": 2, "dual_shared_blocks": 1, "dual_blocks": 1}


def test_the_release_deals_keys_and_values_out_in_the_wrong_order():
    """O12, for batches of 4 and 3."""
    both = jnp.arange(8.0).reshape(4, 2, 1, 1)  # image b: keys 2b, values 2b + 1
    place = lambda half, image: 2 * image + half
    expected = [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    found = dualprompt.mixed_up(both, EVERY)[..., 0, 0]
    np.testing.assert_array_equal(found, [[place(*pair) for pair in row] for row in expected])
    expected = [[(0, 0), (0, 1)], [(0, 2), (1, 0)], [(1, 1), (1, 2)]]
    found = dualprompt.mixed_up(both, jnp.array([True, True, True, False]))[..., 0, 0]
    np.testing.assert_array_equal(found[:3], [[place(*pair) for pair in row] for row in expected])


def test_the_bug_is_an_option_and_mixes_up_the_tasks_prefixes_alone():
    part = adapter_of("dualprompt", **DUAL).init(KEY, None)
    cached = jax.tree.map(lambda x: x, part)
    of = lambda bug: adapter_of("dualprompt", **DUAL, dual_reshape_bug=bug)
    inject = lambda bug: (
        of(bug)
        .inject(cached, Slots(("task_prefix", "key")).current(part, OLD), QUERY, OLD, True, EVERY)
        .prefix
    )
    right, wrong = inject(False), inject(True)
    np.testing.assert_array_equal(right[0].key[0], part.shared[0, 0])
    np.testing.assert_array_equal(right[1].value[0], part.task_prefix[0, 0, 1])
    same(wrong[0], right[0])  # the release takes shared prefixes by index, without a reshape
    np.testing.assert_array_equal(wrong[1].value[0], right[1].key[0])  # keys for both
    np.testing.assert_array_equal(wrong[1].key[3], right[1].value[3])  # values for both


def test_training_uses_the_tasks_prefix_and_evaluation_that_of_the_nearest_key():
    adapter = adapter_of("dualprompt", **DUAL, dual_eval_batchwise=True)
    params = adapter.init(KEY, None)._replace(key=jnp.eye(WIDTH)[:2])
    part = adapter.trainable(params, NEW)
    queries = jnp.eye(WIDTH)[jnp.array([0, 0, 1, 1])]

    def of(train, mask, task=NEW):
        trainable = adapter.trainable(params, task)
        return adapter.inject(params, trainable, queries, task, train, mask).prefix[1].key[:, 0, 0]

    own = params.task_prefix[:, 0, 0, 0, 0]
    np.testing.assert_allclose(of(True, EVERY), own[jnp.array([1, 1, 1, 1])])
    three = jnp.array([False, True, True, True])
    np.testing.assert_allclose(of(False, three), own[jnp.array([1, 1, 1, 1])])
    np.testing.assert_allclose(of(False, ~three), own[jnp.array([0, 0, 0, 0])])
    # a task that was not seen yet is not chosen, but in the release
    np.testing.assert_allclose(of(False, three, OLD), own[jnp.array([0, 0, 0, 0])])
    adapter = adapter_of("dualprompt", **DUAL, dual_eval_batchwise=True, dual_candidates="all")
    np.testing.assert_allclose(of(False, three, OLD), own[jnp.array([1, 1, 1, 1])])
    # prefixes of other tasks have no gradient, and cannot have one: they do not travel
    assert part.task_prefix.shape == params.task_prefix.shape[1:]
    # each image by itself, but in the release
    adapter = adapter_of("dualprompt", **DUAL)
    np.testing.assert_allclose(of(False, EVERY), own[jnp.array([0, 0, 1, 1])])
    votes = {
        each: adapter_of("dualprompt", **DUAL, fidelity=each).batchwise for each in ("paper", "released")
    }
    assert votes == {"paper": (), "released": ("dual_eval_batchwise", "dual_reshape_bug")}


def test_the_tasks_key_is_pulled_to_the_queries():
    adapter = adapter_of("dualprompt", **DUAL)
    part = adapter.trainable(adapter.init(KEY, None), NEW)
    expected = -0.1 * float(cosine(QUERY, part.key[None]).mean())
    np.testing.assert_allclose(adapter.loss((), part, QUERY, NEW, EVERY), expected, rtol=1e-5)
    whole = adapter_of("dualprompt", **DUAL, dual_upload="all")
    params = whole.init(KEY, None)
    slope = jax.grad(lambda part: whole.loss((), part, QUERY, NEW, EVERY))(params)
    assert not slope.key[0].any() and slope.key[1].any()


@pytest.mark.parametrize(("limit", "last"), [(0, 19), (10, 9), (1, 0)])
def test_a_prefix_starts_as_the_one_before_up_to_the_releases_limit(limit, last):
    """O15: in the release tasks 1 to 9 copy, 10 to 19 do not."""
    sizes = Sizes(20, 20, 1, 2)
    adapter = adapter_of("dualprompt", sizes=sizes, **DUAL, dual_transfer=limit)
    params = adapter.init(KEY, None)
    for index in (0, 1, 9, 10, 19):
        opened = adapter.open_task(params, OLD._replace(index=jnp.int32(index)))
        copied = bool((opened.task_prefix[index] == params.task_prefix[index - 1]).all()) if index else False
        assert copied == (0 < index <= last)
        same(opened.key, params.key)


# ---- CODA-Prompt -------------------------------------------------------------------------------------------


def test_components_are_weighted_by_attended_cosines():
    """O13: q = (1, 0), A = ((1, 1), (0, 1)), K = ((1, 0), (1, 0)) -> (1, 0)."""
    prompt = jax.random.normal(KEY, (1, 1, 2, 2, 2))
    key = jnp.array([[1.0, 0], [1, 0]])[None, None]
    attention = jnp.array([[1.0, 1], [0, 1]])[None, None]
    found = coda.combined(coda.Components(prompt, key, attention), jnp.array([[1.0, 0]]), OLD)
    np.testing.assert_allclose(found[0, 0], prompt[0, 0, 0], atol=1e-6)


def test_gram_schmidt_takes_projections_off():
    """O13: a past row (1, 0, 0), a draw (2, 3, 0) -> (0, 1, 0)."""
    rows = jnp.array([[1.0, 0, 0], [2, 3, 0]])[:, None, None]
    found = coda.orthogonal_start(rows, jnp.int32(1))
    np.testing.assert_allclose(found[1, 0, 0], [0, 1, 0], atol=1e-6)
    many = jax.random.normal(KEY, (3, 2, 2, 4, 3))
    for task in range(3):
        many = coda.orthogonal_start(many, jnp.int32(task))
    flat = np.moveaxis(np.asarray(many), 1, 0).reshape(2, 6, 12)
    np.testing.assert_allclose(flat @ flat.transpose(0, 2, 1), np.tile(np.eye(6), (2, 1, 1)), atol=1e-5)


CODA = {"coda_components": 4, "coda_length": 4, "coda_blocks": 2}


@pytest.mark.long
@pytest.mark.parametrize("upload", ["current", "all"])
def test_components_of_earlier_tasks_count_and_stay_and_coming_ones_do_not(upload):
    adapter = adapter_of("coda", **CODA, coda_upload=upload)
    params = adapter.init(KEY, None)
    cached = adapter.cached(params)

    def total(params, part, task):
        injected = adapter.inject(params, part, QUERY, task, True, EVERY)
        return sum(jnp.sum(each.key + 2 * each.value) for each in injected.prefix.values())

    for task in TASKS:
        part = adapter.trainable(params, task)
        np.testing.assert_allclose(total(params, part, task), total(cached or params, part, task), rtol=1e-5)
        slopes, own = jax.grad(total, argnums=(0, 1))(params, part, task)
        every = own if upload == "all" else adapter.merge(jax.tree.map(jnp.zeros_like, params), task, own)
        assert all(x[task.index].any() for x in every)
        assert not any(x[1 - task.index].any() for x in every)
        assert not any(x.any() for x in slopes)
    wild = jax.tree.map(lambda x: x.at[1].set(1e3), params)
    first = adapter.trainable(params, OLD)
    if upload == "current":
        np.testing.assert_allclose(total(wild, first, OLD), total(params, first, OLD), rtol=1e-5)
    past = jax.tree.map(lambda x: x.at[0].set(2 * x[0]), params)
    second = adapter.trainable(past, NEW)
    assert abs(float(total(past, second, NEW) - total(params, adapter.trainable(params, NEW), NEW))) > 1e-3


def test_orthogonality_is_an_option():
    assert adapter_of("coda", **CODA).loss is None
    adapter = adapter_of("coda", **CODA, coda_orthogonality=0.5)
    part = coda.Components(jnp.zeros((1, 2, 2, 2)), jnp.eye(2)[None], 2 * jnp.eye(2)[None])
    later = jax.tree.map(lambda x: jnp.stack([x, x + 9]), part)  # the second task's count for nothing yet
    # P: mean of I^2 = 1/2; K: 0; A: (4 - 1)^2 on the diagonal, 9 / 2
    found = adapter.loss(later, part, QUERY, OLD, EVERY)
    np.testing.assert_allclose(found, 0.5 * (0.5 + 0 + 4.5), rtol=1e-6)


@pytest.mark.parametrize("upload", ["current", "all"])
def test_orthogonality_pushes_new_components_off_old_ones_which_stay(upload):
    """One old row r and one new row x: ((r r - 1)^2 + 2 (r x)^2 + (x x - 1)^2) / 4."""
    adapter = adapter_of(
        "coda", coda_components=2, coda_length=2, coda_blocks=1, coda_orthogonality=1.0, coda_upload=upload
    )
    rows = jnp.array([[3.0, 4.0], [1.0, 2.0]])[:, None, None]
    params = coda.Components(rows[..., None, :], jnp.zeros_like(rows), jnp.zeros_like(rows))
    cached, part = adapter.cached(params), adapter.trainable(params, NEW)
    value, slope = jax.value_and_grad(lambda part: adapter.loss(cached, part, QUERY, NEW, EVERY))(part)
    np.testing.assert_allclose(value, (24**2 + 2 * 11**2 + 4**2) / 4 + 0.5 + 0.5, rtol=1e-6)
    old, new = slope.prompt if upload == "all" else (jnp.zeros(2), slope.prompt)
    assert not old.any()
    # 1/4 (4 (r x) r + 4 (x x - 1) x)
    np.testing.assert_allclose(new.ravel(), 11 * np.array([3, 4]) + 4 * np.array([1, 2]), rtol=1e-6)


def test_without_gram_schmidt_components_are_what_was_drawn():
    adapter = adapter_of("coda", **CODA, coda_gram_schmidt=False)
    params = adapter.init(KEY, None)
    same(adapter.open_task(params, NEW), params)
    started = adapter_of("coda", **CODA).open_task(params, NEW)
    assert (started.key[1] != params.key[1]).any()
    same(started.key[0], params.key[0])


def test_too_few_components_or_an_odd_length_are_refused():
    with pytest.raises(InputError, match="coda_components: 1 are too few for 2 tasks; nearest: 2"):
        adapter_of("coda", coda_components=1, coda_blocks=2)
    with pytest.raises(InputError, match="coda_length: 7 tokens cannot be .* nearest: 8"):
        adapter_of("coda", coda_length=7, coda_blocks=2)


# ---- the baselines -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_first_classifiers_are_those_of_the_releases():
    head = init_truncated(KEY, 100, 400)
    assert not head.bias.any() and float(jnp.abs(head.kernel).max()) <= 0.04
    assert 0.015 < float(head.kernel.std()) < 0.02
    first = lambda name: compiled(method_of(name, network=FORMULA, **SMALL[name]).init)(KEY, SCALE).params
    assert not first("l2p").classifier.bias.any() and not first("dualprompt").classifier.bias.any()
    assert first("coda-prompt").classifier.bias.any()


SMALL = {
    "l2p": {"l2p_size": 4, "l2p_length": 2, "l2p_top_k": 2},
    "dualprompt": DUAL,
    "coda-prompt": CODA,
}


@pytest.mark.parametrize("name", ["l2p", "dualprompt"])
@pytest.mark.long
def test_the_adapters_own_loss_is_part_of_every_methods(name):
    """The pull reaches the keys in FedAvg: without its weight they stay."""
    pull = {"l2p": "l2p_key_weight", "dualprompt": "dual_key_weight"}[name]
    plain = by_hand(method_of(name, network=FORMULA, lr=0.05, **SMALL[name])).params
    without = by_hand(method_of(name, network=FORMULA, lr=0.05, **SMALL[name] | {pull: 0.0})).params
    first = compiled(method_of(name, network=FORMULA, **SMALL[name]).init)(KEY, SCALE).params
    np.testing.assert_allclose(without.adapter.key, first.adapter.key, atol=1e-6)
    assert float(jnp.abs(plain.adapter.key - first.adapter.key).max()) > 1e-3
    assert METHODS[name].adapter == name
