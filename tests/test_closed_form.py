"""AFCL and FedRanPAC: ridge regression from sums over clients equals that of all examples together, for every
partition and order of clients; the oracle is written in float64 from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from micro import (
    IMAGE,
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
    method_of,
    play,
    round_context_of,
)
from small_runs import some
from test_fedrecon import PIXELS, batch_of, run_of

from fcljax.data import partition
from fcljax.errors import InputError
from fcljax.federated import communication
from fcljax.federated.schedule import ClientPartition
from fcljax.methods import fedranpac as ranpac
from fcljax.methods.afcl import AFCLOptions, afcl, recursion
from fcljax.methods.fedranpac import FedRanPACOptions, choose_ridge, fedranpac, held_out_error, is_held_out
from fcljax.parts.ridge import add_examples, no_moments

FEATURES = IMAGE.reshape(len(IMAGE), -1)[:, :WIDTH]
ONE_HOT = np.eye(SIZES.classes)[LABEL]
CLIENTS = SIZES.clients


def assigned(split) -> list[ClientPartition]:
    """A partition of every task: split(labels) -> each client's positions."""
    result = []
    for task in STREAM:
        rows = np.flatnonzero(task.current[LABEL])
        owned = [rows[np.asarray(mine, int)] for mine in split(LABEL[rows])]
        result.append(toys.make_partition(owned, LABEL, SIZES.classes))
    return result


def rng():
    return np.random.RandomState(0)


def dirichlet(labels):
    return partition.dirichlet(labels, CLIENTS, 0.05, rng(), 0)


def one_class_each(labels):
    """The second task has two classes, so that two clients have nothing in it."""
    own = [*np.unique(labels), -1, -1][:CLIENTS]
    return [np.flatnonzero(labels == label) for label in own]


PARTITIONS = {
    "iid": assigned(lambda labels: partition.iid(labels, CLIENTS, rng(), 0)),
    "dirichlet 0.05": assigned(dirichlet),
    "other order of clients": assigned(lambda labels: dirichlet(labels)[::-1]),
    "quantity": assigned(lambda labels: partition.quantity(labels, CLIENTS, 2, rng())),
    "one class a client": assigned(one_class_each),
}


@functools.cache
def engine(name, **options):
    method = {"afcl": afcl, "fedranpac": fedranpac}[name](options_of(name, **options), run_of(False, PIXELS))
    shapes = [each for partitions in PARTITIONS.values() for each in partitions]
    return engine_of(method, partitions=shapes, frozen=SCALE)


def options_of(name, **options):
    return AFCLOptions(0.5) if name == "afcl" else FedRanPACOptions(projection=12, **options)


def played(name, partitions, **options):
    """The server after every round."""
    made = engine(name, **options)
    server, states = begin(made.method, SCALE)
    return [step[0] for step in play(made, server, states, partitions, frozen=SCALE)]


def ridge_of(h, y, ridge):
    """argmin |y - h w|^2 + ridge |w|^2, in float64."""
    return np.linalg.solve(h.T @ h + ridge * np.eye(h.shape[1]), h.T @ y)


def seen_after(tasks):
    """The examples of the first tasks."""
    return np.flatnonzero(STREAM[tasks - 1].seen[LABEL])


@pytest.mark.parametrize("name", PARTITIONS)
def test_afcl_is_the_ridge_regression_of_all_examples_so_far(name):
    history = played("afcl", PARTITIONS[name])
    for server, tasks in ((history[0], 1), (history[-1], 2)):
        rows = seen_after(tasks)
        expected = ridge_of(FEATURES[rows], ONE_HOT[rows], 0.5)
        np.testing.assert_allclose(server.params.classifier.weights, expected, atol=2e-6)
    assert np.all(np.asarray(history[0].params.classifier.weights)[:, 3:] == 0)  # unknown classes


def test_recursive_least_squares_by_hand():
    """One feature: R^-1 = 1 at first, two clients with examples (2, 1) and (1, 3)."""
    knowledge, weight = jnp.ones((1, 1)), jnp.zeros((1, 1))
    knowledge, weight = recursion(knowledge, weight, jnp.full((1, 1), 4.0), jnp.full((1, 1), 2.0))
    assert (knowledge.item(), weight.item()) == (5.0, pytest.approx(0.4))
    knowledge, weight = recursion(knowledge, weight, jnp.ones((1, 1)), jnp.full((1, 1), 3.0))
    assert (knowledge.item(), weight.item()) == (6.0, pytest.approx(5 / 6))


def test_a_task_costs_one_round_without_a_download_and_the_squares_are_counted():
    for name, upload in (("afcl", 4 * 4 + 4 * 5 + 1), ("fedranpac", 2 * (12 * 12 + 12 * 5 + 1))):
        (only,) = engine(name).method.rounds
        assert (only.when, only.who) == ("task_start", "everyone")
        sent, broadcast = exchanged(engine(name).method)
        traffic = communication.traffic(sent, broadcast)
        assert (traffic.upload_scalars, traffic.download_scalars) == (upload, 0), name
        assert not jax.tree.leaves(sent.gather)  # summed as they arrive, never one per client


def exchanged(method):
    """What a client sends and gets."""
    server = method.init(KEY, SCALE)
    context = context_of(method, server, STREAM[0], info_of(SIZES.classes), SCALE)
    program = method.rounds[0].program
    upload, _ = program.finish(context, program.start(context, (), KEY), ())
    return upload, method.broadcast(round_context_of(STREAM[0], frozen=SCALE), server)


# ---- FedRanPAC ---------------------------------------------------------------------------------------------


def projected(server, rows):
    projection = np.asarray(server.params.classifier.projection, np.float64)
    return np.maximum(FEATURES[rows] @ projection, 0)


def errors_of(server, rows):
    """The squared error of every ridge on the examples apart, example by example."""
    apart = np.asarray(is_held_out(jnp.asarray(rows)))
    fit, other = rows[~apart], rows[apart]
    assert len(other) > 3

    def error(ridge):
        weights = ridge_of(projected(server, fit), ONE_HOT[fit], ridge)
        return ((ONE_HOT[other] - projected(server, other) @ weights) ** 2).sum()

    return {float(ridge): error(ridge) for ridge in np.asarray(ranpac.RIDGES, np.float64)}


@pytest.mark.long
@pytest.mark.parametrize("choice", ["all", "task"])
def test_fedranpac_takes_the_ridge_that_errs_least_on_the_examples_apart(choice):
    history = played("fedranpac", PARTITIONS["dirichlet 0.05"], ridge_choice=choice)
    for server, tasks in ((history[0], 1), (history[-1], 2)):
        rows = seen_after(tasks)
        judged = rows if choice == "all" else np.flatnonzero(STREAM[tasks - 1].current[LABEL])
        errors = errors_of(server, judged)
        expected = ridge_of(projected(server, rows), ONE_HOT[rows], min(errors, key=errors.__getitem__))
        np.testing.assert_allclose(server.params.classifier.weights, expected, atol=1e-4)


@pytest.mark.parametrize("name", some(PARTITIONS, ("dirichlet 0.05",)))
def test_fedranpac_does_not_depend_on_the_partition(name):
    given = dict(ridge_choice="fixed", ridge=3.0)
    server = played("fedranpac", PARTITIONS[name], **given)[-1]
    rows = seen_after(2)
    expected = ridge_of(projected(server, rows), ONE_HOT[rows], 3.0)
    np.testing.assert_allclose(server.params.classifier.weights, expected, atol=1e-5)
    check_prediction(engine("fedranpac", **given).method, server, rows)


def check_prediction(method, server, rows):
    logits = method.predict(round_context_of(STREAM[1], frozen=SCALE), server, batch_of(rows))
    expected = projected(server, rows) @ np.asarray(server.params.classifier.weights)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_the_squared_error_comes_from_sums_alone():
    h, label = jnp.asarray(FEATURES[:20], jnp.float32), jnp.asarray(LABEL[:20])
    apart = jnp.arange(20) % 3 == 0
    empty = no_moments(WIDTH, SIZES.classes)
    split = {"fit": add_examples(empty, h, label, ~apart), "held_out": add_examples(empty, h, label, apart)}
    keep = np.asarray(~apart)
    weights = ridge_of(FEATURES[:20][keep], ONE_HOT[:20][keep], 0.1)
    expected = ((ONE_HOT[:20][~keep] - FEATURES[:20][~keep] @ weights) ** 2).sum()
    assert float(held_out_error(split, jnp.float32(0.1))) == pytest.approx(expected, rel=1e-4)


def test_a_ridge_that_leaves_the_matrix_singular_is_never_chosen():
    """One example with two equal features: without a ridge there is no solution."""
    empty = no_moments(2, 2)
    one = add_examples(empty, jnp.ones((1, 2)), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    assert np.isfinite(float(choose_ridge({"fit": one, "held_out": one})))
    assert not np.isfinite(float(held_out_error({"fit": one, "held_out": one}, jnp.float32(-2.0))))


@pytest.mark.long
def test_a_first_session_trains_the_network_in_the_first_task_alone():
    method = fedranpac(FedRanPACOptions(projection=12), run_of(True, PIXELS))
    assert [each.when for each in method.rounds] == ["round", "task_end"]
    server, states = begin(method, SCALE)
    partitions = PARTITIONS["iid"]
    history = [
        s[0]
        for s in play(
            engine_of(method, partitions=partitions, frozen=SCALE), server, states, partitions, frozen=SCALE
        )
    ]
    scales = [np.asarray(each.params.adapter["scale"]) for each in history]
    assert np.abs(scales[1] - scales[0]).max() > 1e-4
    np.testing.assert_allclose(scales[2:], [scales[1]] * 2, rtol=1e-6)


def test_clients_keep_the_projection_and_no_classifier_that_travels():
    method = fedranpac(FedRanPACOptions(projection=12), run_of(True, PIXELS))
    server = jax.eval_shape(method.init, KEY, SCALE)
    broadcast = jax.eval_shape(method.broadcast, round_context_of(STREAM[0], frozen=SCALE), server)
    assert communication.extra_storage(broadcast)["scalars"] == WIDTH * 12


@pytest.mark.parametrize("name", ["afcl", "fedranpac"])
def test_no_other_rule_merges_the_sums(name):
    with pytest.raises(InputError, match="^aggregator: 'median'"):
        method_of(name, aggregator="median")
