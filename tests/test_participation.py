"""Part of the clients in a round: the optimum of all clients' loss, and what a client that comes late gets.

`test_conformance` tests the two statements of `checks/participation.py` on every method; here they must fail
where they should, and SCAFFOLD and FedDyn must reach what they promise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import TINY
from test_conformance import federation, history

import fcljax
from fcljax.adapters.lora import LoraOptions, lora
from fcljax.checks import examples
from fcljax.checks import federation as tiny
from fcljax.checks.participation import late_clients_keep_the_same, participation_equals_the_reference
from fcljax.methods.feddyn import dynamic_regularisation
from fcljax.methods.scaffold import controlled_averaging
from fcljax.parts.client import ClientRule, Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss

CLIENTS, DIM, RATE, EPOCHS = 6, 3, 0.1, 20
EXAMPLES = np.array([12, 25, 8, 31, 10, 18])
ROUNDS = 300


# ---- the optimum of all clients together -------------------------------------------------------------------


def quadratics():
    """Minima and curvatures of the clients' losses, [K, D] each."""
    rng = np.random.default_rng(7)
    return 2 * rng.normal(size=(CLIENTS, DIM)), rng.uniform(0.3, 2.0, size=(CLIENTS, DIM))


def optimum():
    """argmin_w sum_k n_k / 2 sum_d curvature_kd (w_d - minimum_kd)^2."""
    minimum, curvature = quadratics()
    weight = EXAMPLES[:, None] * curvature
    return (weight * minimum).sum(0) / weight.sum(0)


def simulated(rules, participation, rounds=ROUNDS):
    """The model of six clients that descend on their quadratics by full batches."""
    minimum, curvature = quadratics()
    x = np.repeat(np.concatenate([minimum, curvature], axis=1), EXAMPLES, axis=0).astype(np.float32)
    owner = np.repeat(np.arange(CLIENTS), EXAMPLES)

    def loss(weight, x, y):
        return 0.5 * jnp.sum(x[:, DIM:] * (weight - x[:, :DIM]) ** 2, axis=-1)

    client = fcljax.local_sgd(loss, optax.sgd(RATE), epochs=EPOCHS, batch_size=64)
    method = fcljax.fedavg(jnp.zeros(DIM), client, client_rules=rules[0], server_rules=rules[1])
    labels = np.zeros(len(x), np.int32)
    found = fcljax.simulate(method, x, labels, owner, rounds=rounds, participation=participation, seed=3)
    return np.asarray(found.model)


def rules_of(name):
    if name == "fedavg":
        return (), ()
    if name == "feddyn":
        client, server = dynamic_regularisation(1.0, CLIENTS)
    else:
        client, server = controlled_averaging(scaffold_run())
    return (client,), (server,)


def scaffold_run():
    """What SCAFFOLD reads of a run: the clients' rate, epochs and batches."""
    made = federation_of_lora()
    training = Training(EPOCHS, 64, RATE, optax.identity())
    return made._replace(sizes=made.sizes._replace(clients=CLIENTS), training=training)


def federation_of_lora():
    sizes, network = tiny.SIZES, examples.network(examples.TINY)
    adapter = lora(LoraOptions(lora_pairs="one", lora_lr=RATE, lora_blocks=2), sizes, network)
    return Run(sizes, network, adapter, Training(1, 4, RATE, optax.identity()))


@pytest.mark.long
@pytest.mark.parametrize("participation", [1.0, 0.34])
@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_the_optimum_is_reached_however_many_clients_take_part(name, participation):
    found = simulated(rules_of(name), participation)
    np.testing.assert_allclose(found, optimum(), atol=1e-3)


@pytest.mark.long
def test_the_optimum_is_not_where_fedavg_ends():
    assert np.abs(simulated(rules_of("fedavg"), 1.0) - optimum()).max() > 0.05


# ---- the statements fail where they should -----------------------------------------------------------------


@pytest.mark.long
def test_a_teacher_that_each_client_takes_from_its_first_round_is_caught():
    """LwF as it was: the client keeps the first model that it got in the task."""

    def first_model(context, state, key):
        stale = state[1] != context.task.index
        pick = lambda new, old: jnp.where(stale, new, old)
        return jax.tree.map(pick, context.payload.trainable, state[0]), context.task.index

    rule = ClientRule(
        "teacher",
        init=lambda key, trainable: (trainable, jnp.int32(-1)),
        on_start=first_model,
        on_end=lambda context, memory, trainable, state: memory,
    )
    run = federation_of_lora()
    method = federate(run, linear_learner(run), loss=cross_entropy_loss(), client_rules=(rule,))
    made = tiny.tiny_federation(method)
    found = late_clients_keep_the_same(made, tiny.states_after_rounds(made))
    assert not found.holds and "newest" in found.found, found


@pytest.mark.long
def test_an_aggregate_of_others_is_caught():
    """A method whose server reads how many places the engine has, which the reference round does not have."""
    made = federation("linear")
    (main,) = [each for each in made.method.rounds if each.when == "round"]
    assert main.server is not None

    def server(round_context, state, aggregate, key):
        state, metrics = main.server(round_context, state, aggregate, key)
        shift = 0.01 * len(aggregate.valid)
        classifier = jax.tree.map(lambda leaf: leaf + shift, state.params.classifier)
        return state._replace(params=state.params._replace(classifier=classifier)), metrics

    rounds = tuple(each._replace(server=server) if each is main else each for each in made.method.rounds)
    wrong = tiny.tiny_federation(made.method._replace(rounds=rounds), examples.images(TINY))
    found = participation_equals_the_reference(wrong, tiny.states_after_rounds(wrong))
    assert not found.holds, found
    assert participation_equals_the_reference(made, history("linear")).holds
