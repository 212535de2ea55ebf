"""What closed-form methods report of n examples: what cannot be the sums of so many is left out.

The claims are crafted by hand: each entry lies within the bounds that its neighbours set, and the whole is
the sum of no n examples.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FROZEN,
    IMAGE,
    NETWORK,
    PARTITIONS,
    SIZES,
    STREAM,
    TINY,
    begin,
    compiled,
    context_of,
    engine_of,
    info_of,
    method_of,
    play,
)
from small_runs import some

from fcljax.federated import claims, faults
from fcljax.methods import fedran, lorm
from fcljax.models.vit import apply_vit, attention_inputs, longest_attention_inputs
from fcljax.parts import class_gaussians, gram, reports, ridge
from fcljax.parts.random_features import longest_projected, project
from fcljax.types import ClientContext, Upload

N, WIDTH, CLASSES = 10, 6, 3
LONGEST = 4.0
RNG = np.random.default_rng(0)
H = RNG.normal(size=(N, WIDTH))
H = jnp.asarray(H / np.linalg.norm(H, axis=1, keepdims=True) * LONGEST, jnp.float32)
Y = jnp.asarray(np.arange(N) % CLASSES, jnp.int32)
EVERY = jnp.ones(N, bool)


def context(examples=N):
    return ClientContext((), (), (), (), info_of(CLASSES, examples))


def longest(_context):
    return jnp.float32(LONGEST)


# ---- Gram matrices -----------------------------------------------------------------------------------------

MOMENTS = ridge.add_examples(ridge.no_moments(WIDTH, CLASSES), H, Y, EVERY)
EQUAL = jnp.mean(jnp.diagonal(MOMENTS.gram))
OFF_DIAGONAL = 1 - jnp.eye(WIDTH)
GRAMS = {
    "indefinite": EQUAL * (jnp.eye(WIDTH) - 0.9 * OFF_DIAGONAL),
    "asymmetric": MOMENTS.gram.at[0, 1].mul(0.5),
    "upper triangle": MOMENTS.gram * (jnp.eye(WIDTH) + jnp.triu(OFF_DIAGONAL)),
    "negative": -MOMENTS.gram,
    "negative square": MOMENTS.gram.at[2, 2].set(-1.0),
    "1e20 I": 1e20 * jnp.eye(WIDTH),
    "trace 1e30": 1e30 * MOMENTS.gram,
    "1e38": jnp.full((WIDTH, WIDTH), 3e38),
    "ten times": 10 * MOMENTS.gram,
    "NaN": MOMENTS.gram.at[0, 0].set(jnp.nan),
}
# of these not even the trace is known where features are not bounded
SCALES = ("1e20 I", "trace 1e30", "ten times")


@pytest.mark.parametrize("name", GRAMS)
def test_a_matrix_that_is_no_sum_of_outer_products_is_impossible(name):
    lie = MOMENTS._replace(gram=GRAMS[name])
    assert not ridge.possible_moments(context(), lie, longest)
    assert ridge.possible_moments(context(), lie) == (name in SCALES)
    grams = jnp.stack([GRAMS[name]] * CLASSES)
    lie = class_gaussians.ClassSums(MOMENTS.products.T, grams, jnp.asarray([4, 3, 3]))
    assert not class_gaussians.possible_statistics(context(), lie, longest)


def test_the_sums_of_the_examples_are_possible():
    """Also of no example, of one, and of examples that are all alike, which reach every bound."""
    for mask in (EVERY, ~EVERY, jnp.arange(N) < 1):
        for h in (H, jnp.broadcast_to(H[0], H.shape)):
            moments = ridge.add_examples(ridge.no_moments(WIDTH, CLASSES), h, Y, mask)
            examples = int(jnp.sum(mask))
            assert ridge.possible_moments(context(examples), moments, longest)
            assert examples == 0 or not ridge.possible_moments(context(examples - 1), moments, longest)
            assert class_gaussians.possible_statistics(context(examples), outer_sums(h, mask), longest)
            sums = reports.moments_of(h, Y, jnp.arange(CLASSES), mask)
            assert reports.possible_moments(context(examples), sums, longest)
            summary = fedran.summary_of(moments, 4)
            assert fedran.possible_summary(context(examples), summary, longest)


def test_sums_of_a_class_outside_of_the_span_of_all_examples_are_impossible():
    """Each is short enough for its class; ridge regression would divide it by the ridge alone."""
    plane = H.at[:, 3:].set(0.0)
    honest = ridge.add_examples(ridge.no_moments(WIDTH, CLASSES), plane, Y, EVERY)
    lie = honest._replace(products=honest.products.at[5, 0].set(0.5 * LONGEST))
    assert ridge.possible_moments(context(), honest, longest)
    assert not ridge.possible_moments(context(), lie, longest)
    rank = fedran.summary_of(honest, 4)
    assert fedran.possible_summary(context(), rank, longest)
    assert not fedran.possible_summary(context(), rank._replace(products=lie.products), longest)


@pytest.mark.parametrize("examples", [40, 1500])
def test_a_wide_matrix_is_judged_by_its_sketch(examples):
    """With fewer examples than directions any negative eigenvalue is found, else one of 3 % of the trace."""
    width = claims.EXACT + 76
    draw = np.random.default_rng(examples)
    h = jnp.asarray(np.maximum(draw.normal(size=(examples, width)), 0), jnp.float32)
    y = jnp.asarray(np.arange(examples) % CLASSES, jnp.int32)
    honest = ridge.add_examples(ridge.no_moments(width, CLASSES), h, y, jnp.ones(examples, bool))
    holds = jax.jit(lambda moments: ridge.possible_moments(context(examples), moments))
    assert holds(honest)
    gram = honest.gram
    trace = jnp.trace(gram)
    outside = draw.normal(size=width)
    if examples < width:
        outside -= h.T @ np.linalg.lstsq(np.asarray(h.T), outside, rcond=None)[0]
    outside = jnp.asarray(outside / np.linalg.norm(outside), jnp.float32)
    share = 1e-3 if examples == 40 else 0.03
    lies = [
        honest._replace(gram=gram - share * trace * jnp.outer(outside, outside)),
        honest._replace(gram=jnp.triu(gram)),
        honest._replace(gram=-gram),
        honest._replace(products=honest.products.at[:, 0].add(0.5 * examples * outside * jnp.sqrt(trace))),
    ]
    assert not any(holds(lie) for lie in lies)


def test_a_ridge_grows_until_the_matrix_is_positive_definite():
    negative = jnp.diag(jnp.asarray([100.0, 10.0, -0.003]))
    products = jnp.asarray([[1.0], [1.0], [0.0]])
    assert not np.all(np.isfinite(ridge.solve_ridge(negative, products, 1e-3)))
    # s is 1e-6 of the trace 110; the first of s, 10 s, 100 s above 0.003 is 0.011
    found = jax.jit(ridge.solve_definite)(negative, products, 1e-3)
    np.testing.assert_allclose(found[:2, 0], [1 / 100.011, 1 / 10.011], rtol=1e-5)
    positive = jnp.diag(jnp.asarray([100.0, 10.0, 0.003]))
    expected = ridge.solve_ridge(positive, products, 1e-3)
    assert np.array_equal(ridge.solve_definite(positive, products, 1e-3), expected)
    assert np.all(np.isnan(ridge.solve_definite(jnp.full((3, 3), jnp.nan), products, 1e-3)))


@pytest.mark.parametrize("examples", some([1, 2, 9], [2]))
def test_few_examples_are_possible_where_the_matrix_is_sketched(examples):
    """A sketch of few examples has small entries, beside which its rounding is large."""
    width = claims.EXACT + 200
    for seed in range(6):
        rng = np.random.default_rng(seed)
        h = jnp.asarray(10 * np.maximum(rng.normal(size=(examples, width)), 0), jnp.float32)
        y = jax.nn.one_hot(rng.integers(0, 3, examples), 5)
        gram, products = h.T @ h, h.T @ y
        norm = jax.jit(claims.norm_by_gram)
        assert 0.9 * examples <= norm(gram, products) <= examples * (1 + claims.SUMS)
        assert jnp.isnan(norm(jnp.triu(gram), products)) and jnp.isnan(norm(-gram, products))


@pytest.mark.long
@pytest.mark.parametrize("examples", [3, 300, 3000])
def test_rounding_makes_no_honest_sum_impossible(examples):
    """Features nearly on a line, in more dimensions than examples, or added up in many batches."""
    rng = np.random.default_rng(examples)
    h = 5 + np.abs(rng.normal(size=(examples, 64))) * 10.0 ** -rng.integers(0, 5, 64)
    h = jnp.asarray(h, jnp.float32)
    y = jnp.asarray(rng.integers(0, 5, examples), jnp.int32)

    @jax.jit
    def added(total, batch):
        features, labels = batch
        return ridge.add_examples(total, features, labels, jnp.ones(3, bool)), None

    batches = (h.reshape(-1, 3, 64), y.reshape(-1, 3))
    moments, _ = jax.lax.scan(added, ridge.no_moments(64, 5), batches)
    bound = lambda _context: jnp.max(jnp.linalg.norm(h, axis=1))
    assert ridge.possible_moments(context(examples), moments, bound)
    for rank in (2, 64):
        assert fedran.possible_summary(context(examples), fedran.summary_of(moments, rank), bound)


# ---- sums by class -----------------------------------------------------------------------------------------


def outer_sums(h, mask=EVERY):
    one_hot = jax.nn.one_hot(Y, CLASSES) * mask[:, None]
    outer = jnp.einsum("nc,nd,ne->cde", one_hot, h, h)
    return class_gaussians.ClassSums(one_hot.T @ h, outer, jnp.sum(one_hot, 0).astype(jnp.int32))


def test_a_class_without_examples_has_no_sums():
    few = jnp.arange(N) % CLASSES != 2  # nothing of the last class
    honest = outer_sums(H, few)
    assert class_gaussians.possible_statistics(context(), honest)
    for value in (1e30, 1e-3):
        assert not class_gaussians.possible_statistics(
            context(), honest._replace(outer=honest.outer.at[2].set(value * jnp.eye(WIDTH)))
        )
        assert not class_gaussians.possible_statistics(
            context(), honest._replace(feature=honest.feature.at[2].set(value))
        )
    sums = reports.moments_of(H, Y, jnp.arange(CLASSES), few)
    assert reports.possible_moments(context(), sums)
    for value in (1e30, -1.0, 1e-3):
        lie = sums._replace(square=sums.square.at[2, 0].set(value))
        assert not reports.possible_moments(context(), lie)
    only_sums = reports.Sums(sums.feature, sums.examples)
    assert reports.possible_sums(context(), only_sums)
    assert not reports.possible_sums(context(), only_sums._replace(feature=sums.feature.at[2, 0].set(1e-3)))


def test_sums_are_no_longer_than_so_many_features():
    sums = reports.moments_of(jnp.broadcast_to(H[0], H.shape), Y, jnp.arange(CLASSES), EVERY)
    only_sums = reports.Sums(sums.feature, sums.examples)
    assert reports.possible_sums(context(), only_sums, longest)
    assert reports.possible_moments(context(), sums, longest)
    assert not reports.possible_sums(context(), only_sums._replace(feature=1.1 * sums.feature), longest)
    assert not reports.possible_moments(context(), sums._replace(square=1.1 * sums.square), longest)


def test_a_summary_has_no_larger_trace_than_its_examples():
    honest = fedran.summary_of(MOMENTS, 4)
    assert fedran.possible_summary(context(), honest, longest)
    for trace in (1e30, 2 * float(honest.trace), -1.0, jnp.nan):
        lie = honest._replace(trace=jnp.float32(trace))
        assert not fedran.possible_summary(context(), lie, longest)


# ---- inputs of pairs, and what moves in training -----------------------------------------------------------


@functools.cache
def lorm_of(pair_gram="diagonal"):
    """LoRM, its first server, and its claim about a round's report."""
    method = method_of("lorm", lora_blocks=2, lora_rank=3, pair_gram=pair_gram)
    server = compiled(method.init)(jax.random.key(2), FROZEN)
    for round_ in method.rounds:
        for claim in round_.program.claims:
            if claim.name == "responses":
                return method, server, claim
    raise AssertionError("no claim")


@pytest.mark.parametrize("pair_gram", ["diagonal", "full"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.long
def test_a_movement_is_within_the_reach_of_training(pair_gram, number):
    method, server, claim = lorm_of(pair_gram)
    context = context_of(method, server, STREAM[0], info_of(SIZES.classes, 9, round_=number), FROZEN)
    x = attention_inputs(FROZEN.network, features(9), 2).reshape(2, -1, TINY.width)
    pairs = jnp.einsum("mnd,mne->mde", x, x)
    if pair_gram == "diagonal":
        pairs = jnp.einsum("mnd,mnd->md", x, x)
    f = features(9).cls
    pair = context.payload.trainable.adapter
    step = 1e-3 * jnp.sign(jnp.sin(jnp.arange(3.0 * TINY.width))).reshape(3, TINY.width)
    inner = gram.inner_gram(pair.a_q, pairs)
    moved = inner @ step if number == 0 else gram.apply_gram(jnp.stack([step] * 2), pairs)
    head = gram.scale_off_diagonal(f.T @ f, 0.5)
    kernel = head @ (1e-3 * jnp.ones((TINY.width, SIZES.classes)))
    honest = lorm.WeightedChange(lorm.Grams(pairs, head), moved, 0 * moved, kernel)

    @jax.jit
    def holds(change):
        return claim.holds(context, Upload(sum={"responses": change}, gather={}))

    assert holds(honest)
    lies = [
        honest._replace(kernel=honest.kernel.at[0, 0].set(1e30)),
        honest._replace(kernel=1e5 * honest.kernel),
        honest._replace(query=1e10 * moved),
        honest._replace(value=honest.value.at[0, 0, 0].set(1e10)),
        honest._replace(grams=lorm.Grams(pairs, 1e20 * jnp.eye(TINY.width))),
        honest._replace(grams=lorm.Grams(1e3 * pairs, head)),
        honest._replace(grams=lorm.Grams(-pairs, head)),
    ]
    assert not any(holds(lie) for lie in lies)


def features(images):
    return apply_vit(TINY, FROZEN.network, jnp.asarray(IMAGE[:images], jnp.float32), full=True)


@pytest.mark.long
def test_inputs_of_pairs_are_gram_matrices_within_the_norms_of_the_blocks():
    x = attention_inputs(FROZEN.network, features(9), 2).reshape(2, -1, TINY.width)
    grams = jnp.einsum("mnd,mne->mde", x, x)
    around = ClientContext(FROZEN, (), (), (), info_of(CLASSES, 9))
    assert gram.possible_inputs(around, grams)
    most = 9 * longest_attention_inputs(FROZEN.network, 2) ** 2
    trace = jnp.trace(grams, axis1=1, axis2=2)
    assert np.all(trace <= most) and np.all(trace > 0.5 * most)  # the bound is near
    for lie in (-grams, 3 * grams, grams.at[0, 0, 1].mul(0.5), grams.at[1].set(1e20 * jnp.eye(TINY.width))):
        assert not gram.possible_inputs(around, lie)
    equal = jnp.mean(jnp.diagonal(grams[0]))
    indefinite = equal * (2 * jnp.eye(TINY.width) - 0.9)
    assert not gram.possible_inputs(around, grams.at[0].set(indefinite))


# ---- the bound on a feature --------------------------------------------------------------------------------


def test_a_layer_norm_bounds_features_whatever_is_in_front_of_it():
    assert NETWORK.longest is not None
    norm = FROZEN.network["norm"]
    changed = {"scale": norm["scale"].at[3].set(-2.5), "bias": norm["bias"] + 0.3}
    params = FROZEN.network | {"norm": changed}
    bound = float(NETWORK.longest(params))
    images = 1e4 * jnp.asarray(IMAGE[:20], jnp.float32)
    lengths = jnp.linalg.norm(apply_vit(TINY, params, images).cls, axis=1)
    assert float(jnp.max(lengths)) <= bound
    assert bound == pytest.approx(4 * 2.5 + np.linalg.norm(changed["bias"]), rel=1e-5)


def test_random_features_are_bounded_by_the_projection():
    projection = jnp.asarray(RNG.normal(size=(WIDTH, 40)), jnp.float32)
    bound = float(longest_projected(LONGEST, projection))
    assert bound == pytest.approx(LONGEST * np.linalg.norm(projection, 2), rel=1e-4)
    assert float(jnp.max(jnp.linalg.norm(project(H, projection), axis=1))) <= bound


# ---- in a federation ---------------------------------------------------------------------------------------

CLOSED = (
    "afcl",
    "fedran",
    "fedranpac",
    "fedslca",
    "ccvr",
    "stsa",
    "lorm",
    "regmean",
    "dolfin",
    "fot",
    "fedncm",
    "fedproto",
    "fedrecon",
    "fedclm",
)
OPTIONS = {
    "fedran": dict(projection=40, rank=12),
    "fedranpac": dict(projection=40),
    "stsa": dict(projection=40, statistics="first"),
    "lorm": dict(lora_blocks=2, lora_rank=3),
    "regmean": dict(lora_blocks=2, lora_rank=3),
    "dolfin": dict(lora_blocks=2, lora_rank=3),
    "fot": dict(lora_blocks=2, lora_rank=3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CLOSED)
def test_the_worst_sums_that_are_believed_reach_the_server(name):
    """Of the attack `gram` nothing is left out, and what the server makes of it is another model."""
    method = method_of(name, **OPTIONS.get(name, {}))
    models = []
    for attacked in (method, faults.corrupt(method, "gram", malicious=1)):
        engine = engine_of(attacked)
        server, states = begin(engine.method)
        reports = []
        heard = lambda when, report, reports=reports: reports.append(report)
        server, _, _ = play(engine, server, states, PARTITIONS, heard=heard)[-1]
        assert not any(report.rejected or report.impossible for report in reports)
        models.append(server)
    honest, lied = map(jax.tree.leaves, models)
    assert all(np.all(np.isfinite(leaf)) for leaf in lied if np.issubdtype(leaf.dtype, np.floating))
    assert any(not np.array_equal(one, other) for one, other in zip(honest, lied, strict=True))
