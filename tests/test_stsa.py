"""STSA: ridge regression of projected features from sums of clients and tasks, and STSA-E's estimate of Gram
matrices from sums of groups (numpy, float64)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import KEY, SCALE, SIZES, STREAM, begin, context_of, engine_of, info_of, play
from test_closed_form import FEATURES, ONE_HOT, PARTITIONS, ridge_of, seen_after
from test_fedrecon import PIXELS, run_of

from fcljax.methods.stsa import STSAOptions, estimate, group_of, stsa
from fcljax.parts.classifiers import Sums
from fcljax.types import Upload

M, CLASSES = 12, SIZES.classes
RNG = np.random.default_rng(0)
EFFICIENT = STSAOptions(projection=M, ridge=0.5, statistics="first", dummy_clients=2)


@pytest.mark.parametrize("name", ["dirichlet 0.05", *[pytest.param("iid", marks=pytest.mark.long)]])
def test_stsa_is_the_ridge_regression_of_all_projected_examples_so_far(name):
    method = stsa(STSAOptions(projection=M, ridge=0.5), run_of(False, PIXELS))
    server, states = begin(method, SCALE)
    partitions = PARTITIONS[name]
    engine = engine_of(method, partitions=partitions, frozen=SCALE)
    history = [step[0] for step in play(engine, server, states, partitions, frozen=SCALE)]
    projection = np.asarray(server.params.classifier.projection, np.float64)
    x = np.maximum(FEATURES @ projection, 0)
    for after, tasks in ((history[0], 1), (history[-1], 2)):
        rows = seen_after(tasks)
        expected = ridge_of(x[rows], ONE_HOT[rows], 0.5)
        np.testing.assert_allclose(after.params.classifier.weights, expected, atol=1e-4)


def summed(x, label, group, groups, valid):
    """Sums [P, S, Ct, M] over examples of each client's groups; P clients have S = 2 groups."""
    member = np.eye(groups)[group][:, :, None] * np.eye(3)[label][:, None]  # [N, groups, Ct]
    feature = np.einsum("ngc,nm->gcm", member, x).reshape(len(valid), 2, 3, -1)
    return Sums(jnp.asarray(feature, jnp.float32), jnp.asarray(member.sum(0).reshape(len(valid), 2, 3)))


@pytest.mark.long
def test_with_one_example_in_each_group_the_estimate_is_the_gram_matrix():
    x, label, valid = RNG.normal(size=(8, M)), np.array([0, 1, 0, 0, 1, 1, 0, 1]), np.ones(5, bool)
    valid[4] = False
    sums = summed(x, label, np.arange(8), 10, valid)
    # what an invalid upload holds may be anything
    sums = jax.tree.map(lambda leaf: leaf.at[4].set(jnp.nan), sums)
    found = estimate(sums, jnp.asarray(valid), STREAM[0], CLASSES)
    np.testing.assert_allclose(found.gram, x.T @ x, atol=1e-4)
    np.testing.assert_allclose(found.products, x.T @ np.eye(CLASSES)[label], atol=1e-5)
    assert found.examples == 8


@pytest.mark.long
def test_the_mean_estimate_over_random_groups_is_the_gram_matrix():
    """Class 2 is in two of the six groups only: the others do not count."""
    label = np.repeat([0, 1, 2], [17, 12, 5])
    x = RNG.normal(size=(len(label), M)) + 2 * RNG.normal(size=(3, M))[label]
    group = np.concatenate([np.arange(29) % 6, [0, 0, 3, 3, 3]])
    draws = []
    for _ in range(400):
        order = np.concatenate([RNG.permutation(np.flatnonzero(label == c)) for c in range(3)])
        draws.append(summed(x, label, group[order], 6, np.ones(3)))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws)
    grams = jax.vmap(lambda sums: estimate(sums, jnp.ones(3, bool), STREAM[0], CLASSES).gram)(stacked)
    error = np.linalg.norm(np.mean(np.asarray(grams, np.float64), 0) - x.T @ x)
    spread = np.sqrt(np.sum(np.var(grams, axis=0)) / len(draws))
    assert error < 2.5 * spread
    assert np.linalg.eigvalsh(grams).min() > -1e-3  # never indefinite
    first_order = sum(np.outer(x[label == c].sum(0), x[label == c].mean(0)) for c in range(3))
    assert np.linalg.norm(first_order - x.T @ x) > 20 * spread


def test_groups_are_drawn_by_the_index_and_equally_often():
    group = np.asarray(group_of(jnp.arange(2000), 4))
    assert np.abs(np.bincount(group, minlength=4) / 2000 - 0.25).max() < 0.03
    np.testing.assert_array_equal(group_of(jnp.asarray([7, 1999]), 4), group[[7, 1999]])


def test_efficient_clients_send_sums_of_groups_alone_and_no_impossible_ones():
    method = stsa(EFFICIENT, run_of(False, PIXELS))
    (only,) = method.rounds
    server = method.init(KEY, SCALE)
    context = context_of(method, server, STREAM[0], info_of(CLASSES, 6), SCALE)
    upload, _ = only.program.finish(context, only.program.start(context, (), KEY), ())
    sent = sum(leaf.size for leaf in jax.tree.leaves((upload.mean, upload.sum, upload.gather)))
    assert (only.when, sent) == ("task_start", 2 * 3 * (M + 1))
    (claim,) = [claim for claim in only.program.claims if claim.name == "groups"]
    honest = Sums(jnp.ones((2, 3, M)), jnp.asarray([[2.0, 1, 1], [1, 0, 1]]))
    honest = honest._replace(feature=honest.feature.at[1, 1].set(0.0))
    holds = lambda sums: bool(claim.holds(context, Upload(sum={}, gather={"groups": sums})))
    assert holds(honest)
    assert not holds(honest._replace(examples=honest.examples.at[0, 0].set(3.0)))  # seven of six
    assert not holds(honest._replace(examples=honest.examples.at[0, 0].set(-1.0)))
    assert not holds(honest._replace(feature=honest.feature.at[1, 1].set(1.0)))  # of no examples
    assert not holds(honest._replace(feature=honest.feature.at[0, 0].set(jnp.nan)))
