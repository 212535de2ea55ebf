"""FedRAN: with enough directions it is the ridge regression of all examples; with few, the largest ones; and
examples without a label take the class of the nearest prototype. Oracles in float64, from the definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    KEY,
    LABEL,
    SCALE,
    SIZES,
    STREAM,
    WIDTH,
    begin,
    context_of,
    engine_of,
    info_of,
    play,
)
from test_closed_form import FEATURES, ONE_HOT, PARTITIONS, exchanged, projected, ridge_of, seen_after
from test_fedrecon import PIXELS, run_of

from fcljax import matrices
from fcljax.federated import communication
from fcljax.methods import fedran as module
from fcljax.methods.fedran import (
    FedRANOptions,
    fedran,
    has_label,
    largest_directions,
    merge_directions,
    possible_summary,
    pseudo_label,
    solve_low_rank,
)
from fcljax.parts.classifiers import Sums
from fcljax.parts.ridge import add_examples, no_moments

M, RIDGE = 12, 0.3


MOST = len(LABEL)  # examples of a client; at most M of them are kept as they are


def method(examples=MOST, **options):
    values = {"projection": M, "rank": M, "server_rank": M, "ridge": RIDGE} | options
    run = run_of(False, PIXELS)
    return fedran(FedRANOptions(**values), run._replace(sizes=run.sizes._replace(examples=examples)))


@functools.cache
def engine_with(**options):
    shapes = [each for partitions in PARTITIONS.values() for each in partitions]
    return engine_of(method(**options), partitions=shapes, frozen=SCALE)


def played(partitions, **options):
    engine = engine_with(**options)
    server, states = begin(engine.method, SCALE)
    return [step[0] for step in play(engine, server, states, partitions, frozen=SCALE)]


def relative_ridge(h):
    return RIDGE * np.trace(h.T @ h) / M


@pytest.mark.long
@pytest.mark.parametrize("name", ["dirichlet 0.05", "one class a client"])
def test_with_all_directions_it_is_the_ridge_regression_of_all_examples_so_far(name):
    history = played(PARTITIONS[name])
    for server, tasks in ((history[0], 1), (history[-1], 2)):
        rows = seen_after(tasks)
        h = projected(server, rows)
        expected = ridge_of(h, ONE_HOT[rows], relative_ridge(h))
        np.testing.assert_allclose(server.params.classifier.weights, expected, atol=1e-5)


def low_rank(gram, rank):
    """The best approximation of a Gram matrix."""
    values, vectors = np.linalg.eigh(gram)
    keep = vectors[:, -rank:] * np.sqrt(np.maximum(values[-rank:], 0))
    return keep @ keep.T


@pytest.mark.long
def test_with_few_directions_clients_send_and_the_server_keeps_the_largest():
    partitions = PARTITIONS["iid"]
    server = played(partitions, rank=2, server_rank=3)[-1]
    total = np.zeros((M, M))
    for mine in partitions:
        of_task = sum(low_rank(gram_of(server, rows), 2) for rows in rows_of_clients(mine))
        total = low_rank(total + low_rank(of_task, 3), 3)
    factor = np.asarray(server.rules[0].factor, np.float64)
    scale = np.abs(total).max()
    np.testing.assert_allclose(factor @ factor.T / scale, total / scale, atol=1e-4)


def rows_of_clients(mine):
    return np.split(mine.indices, mine.offset[1:-1])


def gram_of(server, rows):
    h = projected(server, rows)
    return h.T @ h


def test_the_largest_directions_of_a_gram_matrix():
    h = np.random.default_rng(0).normal(size=(40, 24)) * 2.0 ** -np.arange(24)
    factor = np.asarray(largest_directions(jnp.asarray(h.T @ h, jnp.float32), 5), np.float64)
    assert factor.shape == (24, 5)
    np.testing.assert_allclose(factor @ factor.T, low_rank(h.T @ h, 5), atol=1e-3)
    # more directions than there are: the whole matrix, and zeros
    whole = np.asarray(largest_directions(jnp.asarray(h[:3].T @ h[:3], jnp.float32), 30), np.float64)
    assert whole.shape == (24, 30) and np.abs(whole[:, 24:]).max() == 0
    np.testing.assert_allclose(whole @ whole.T, h[:3].T @ h[:3], atol=1e-4)


@pytest.mark.parametrize("rank", [pytest.param(3, marks=pytest.mark.long), 12])
def test_few_examples_have_the_directions_of_their_gram_matrix(rank):
    """Seven examples of 24 features come in batches with padding anywhere; the Gram matrix has rank 7."""
    h = np.random.default_rng(0).normal(size=(9, 24)).astype(np.float32) * 2.0 ** -np.arange(9)[:, None]
    label, mask = jnp.arange(9) % 5, jnp.asarray([1, 0, 1, 1, 1, 0, 1, 1, 1], bool)
    few, gram = module.no_examples(8, 24, 5), no_moments(24, 5)
    for part in (slice(0, 4), slice(4, 9)):
        batch = jnp.where(mask[part, None], h[part], jnp.nan), label[part], mask[part]
        few, gram = module.keep_examples(few, *batch), add_examples(gram, *batch)
    found, expected = module.summary_of_examples(few, rank), module.summary_of(gram, rank)
    scale = float(expected.trace)
    np.testing.assert_allclose(
        found.factor @ found.factor.T / scale, expected.factor @ expected.factor.T / scale, atol=2e-6
    )
    for name in ("products", "examples", "trace"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    assert found.factor.shape == expected.factor.shape == (24, rank)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"rank": 2, "server_rank": 3}, {"labelled": 0.5}])
def test_a_run_is_the_same_with_and_without_gram_matrices(options):
    mine = PARTITIONS["iid"]
    most = max(int(each.count.max()) for each in mine)
    assert most <= M
    few, gram = (played(mine, examples=examples, **options)[-1] for examples in (most, 0))
    np.testing.assert_allclose(few.params.classifier.weights, gram.params.classifier.weights, atol=2e-4)


def test_many_examples_have_the_directions_of_their_gram_matrix_without_its_whole_decomposition(monkeypatch):
    monkeypatch.setattr(module, "EXACT", 32)
    decomposed, eigh = [], matrices.eigh

    def recorded(matrix):
        decomposed.append(matrix.shape)
        return eigh(matrix)

    monkeypatch.setattr(matrices, "eigh", recorded)
    h = (np.random.default_rng(0).normal(size=(40, 48)) * 2.0 ** -np.arange(40)[:, None]).astype(np.float32)
    examples = module.Examples(jnp.asarray(h), jnp.zeros((48, 5)), jnp.int32(40))
    factor = np.asarray(module.summary_of_examples(examples, 5).factor, np.float64)
    np.testing.assert_allclose(factor @ factor.T, low_rank(h.T @ h, 5), atol=1e-3)
    assert decomposed == [(15, 15)]  # 5 directions and 10 beyond them, of 40 rows


def test_more_examples_than_promised_are_refused_and_not_dropped():
    few = module.no_examples(2, 4, 5)
    few = module.keep_examples(few, jnp.ones((3, 4)), jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
    assert np.isnan(module.summary_of_examples(few, 2).factor).all()


def test_merged_directions_are_those_of_the_sum():
    one, other = np.random.default_rng(1).normal(size=(2, 6, 2))
    merged = np.asarray(merge_directions(jnp.asarray(np.hstack([one, other]), jnp.float32), 3))
    np.testing.assert_allclose(merged @ merged.T, low_rank(one @ one.T + other @ other.T, 3), atol=1e-4)


def test_the_classifier_by_hand():
    """F F^T = diag(4, 0), ridge 1: the first direction is divided by 5, the second by 1."""
    weights = solve_low_rank(jnp.asarray([[2.0], [0.0]]), jnp.asarray([[10.0], [3.0]]), jnp.float32(1.0))
    np.testing.assert_allclose(weights, [[2.0], [3.0]], rtol=1e-6)


def test_a_client_sends_r_vectors_in_place_of_a_matrix():
    sent, broadcast = exchanged(method(rank=3))
    traffic = communication.traffic(sent, broadcast)
    assert (traffic.upload_scalars, traffic.download_scalars) == (M * 3 + M * 5 + 2, 0)
    few = method(rank=3, labelled=0.2)
    assert [each.when for each in few.rounds] == ["task_start"] * 2
    first, broadcast = exchanged(few)
    traffic = communication.traffic(first, broadcast)
    # class sums go up, and those of all clients come down
    assert (traffic.upload_scalars, traffic.download_scalars) == (3 * WIDTH + 3, 3 * WIDTH + 3)


@pytest.mark.long
def test_claims_about_more_than_there_is_are_impossible():
    h = jnp.asarray(np.random.default_rng(2).normal(size=(4, 6)), jnp.float32)
    honest = module.summary_of(
        add_examples(no_moments(6, 3), h, jnp.asarray([0, 1, 2, 0]), jnp.ones(4, bool)), 3
    )
    context = toy_context(4)
    assert possible_summary(context, honest)
    assert not possible_summary(toy_context(3), honest)
    assert not possible_summary(context, honest._replace(factor=3 * honest.factor))
    assert not possible_summary(context, honest._replace(products=9 * honest.products))


def toy_context(examples):
    made = method()
    return context_of(made, made.init(KEY, SCALE), STREAM[0], info_of(SIZES.classes, examples), SCALE)


# ---- few labels --------------------------------------------------------------------------------------------


def test_an_example_without_a_label_takes_the_nearest_prototype_by_angle():
    sums = Sums(jnp.asarray([[8.0, 0.0], [0.0, 0.5], [9.0, 9.0]]), jnp.asarray([2.0, 1.0, 0.0]))
    feature = jnp.asarray([[1.0, 0.2], [1.0, 3.0]])
    label, known = pseudo_label(feature, sums, STREAM[0])  # the third class has no labelled example
    assert list(np.asarray(label)) == list(np.asarray(STREAM[0].classes)[:2]) and known
    assert not pseudo_label(feature, sums._replace(examples=jnp.zeros(3)), STREAM[0])[1]


@pytest.mark.long
@pytest.mark.parametrize("pseudo", [True, False])
def test_with_few_labels_the_server_solves_for_labels_and_pseudo_labels(pseudo):
    share = 0.4
    server = played(PARTITIONS["iid"], labelled=share, pseudo_labels=pseudo)[-1]
    rows, target = [], []
    for task in STREAM:
        mine = np.flatnonzero(task.current[LABEL])
        known = np.asarray(has_label(jnp.asarray(mine), share))
        assert 0 < known.sum() < len(mine)
        given = np.where(known, LABEL[mine], nearest(mine, known))
        keep = known | pseudo
        rows, target = [*rows, *mine[keep]], [*target, *given[keep]]
    h = projected(server, np.asarray(rows))
    expected = ridge_of(h, np.eye(SIZES.classes)[target], relative_ridge(h))
    np.testing.assert_allclose(server.params.classifier.weights, expected, atol=1e-5)


def nearest(rows, known):
    """The class whose labelled examples' mean has the least angle."""
    classes = np.unique(LABEL[rows[known]])
    means = np.stack([FEATURES[rows[known]][LABEL[rows[known]] == each].mean(0) for each in classes])
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    return classes[(unit(FEATURES[rows]) @ unit(means).T).argmax(1)]


def test_the_labels_that_are_known_do_not_depend_on_who_holds_them():
    index = jnp.arange(1000)
    known = has_label(index, 0.2)
    assert 0.15 < float(known.mean()) < 0.25
    np.testing.assert_array_equal(jax.jit(has_label, static_argnums=1)(index[::-1], 0.2), known[::-1])
    assert bool(has_label(index, 1.0).all())
