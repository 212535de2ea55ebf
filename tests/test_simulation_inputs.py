"""What `simulate` and `fedavg` take: targets and inputs of any form, layers with a state, wrong arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fcljax
from fcljax.errors import InputError
from fcljax.options import LARGEST_INT

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
OWNER = np.repeat(["a", "b", "c"], [4, 8, 12])


def squares(model, x, y):
    return jnp.sum((x @ model["w"] - y) ** 2, axis=tuple(range(1, y.ndim)))


SGD = fcljax.local_sgd(squares, optax.sgd(0.05), batch_size=100)


def by_hand(y, gradient_of, weights, rounds, lr=0.05):
    """Federated averaging of full gradients: mean over clients by their examples."""
    for _ in range(rounds):
        moved = []
        for name in "abc":
            mine = np.equal(OWNER, name)
            moved.append(np.mean(mine) * (weights - lr * gradient_of(weights, X[mine], y[mine])))
        weights = sum(moved)
    return weights


# padding of the second, which is so large, would fill memory
@pytest.mark.parametrize("batch_size", [100, pytest.param(LARGEST_INT, marks=pytest.mark.long)])
def test_targets_of_several_axes_are_those_of_federated_averaging_by_hand(batch_size):
    y = RNG.normal(size=(24, 2)).astype(np.float32)
    client = fcljax.local_sgd(squares, optax.sgd(0.05), batch_size=batch_size)
    found = fcljax.simulate(fcljax.fedavg({"w": jnp.zeros((3, 2))}, client), X, y, OWNER, rounds=3)
    expected = by_hand(y, lambda w, x, y: 2 * x.T @ (x @ w - y) / len(x), np.zeros((3, 2)), 3)
    np.testing.assert_allclose(found.model["w"], expected, atol=1e-5)


@pytest.mark.long
def test_inputs_are_any_pytree_and_padding_of_it_does_not_count():
    def loss(model, x, y):
        return (jnp.sum(x["parts"][0] * x["mask"][:, None], -1) * model["w"] - y) ** 2

    parts = {"parts": (X, X[:, 0].tolist()), "mask": OWNER != "b"}
    results = []
    for batch_size in (24, 7):
        client = fcljax.local_sgd(loss, optax.sgd(0.0), batch_size=batch_size)
        results.append(fcljax.simulate(fcljax.fedavg({"w": 1.0}, client), parts, X[:, 0], OWNER, rounds=1))
    expected = np.mean((X.sum(1) * (OWNER != "b") - X[:, 0]) ** 2)
    for found in results:
        assert found.history[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "y",
    [
        np.sign(X[:, 0]).astype(int),
        -np.ones(24, int),
        (1 << 30) + np.arange(24),
    ],
)
@pytest.mark.long
def test_integers_that_are_no_classes_are_targets(y):
    client = fcljax.local_sgd(lambda w, x, y: x @ w * y, optax.sgd(1e-12))
    assert fcljax.simulate(fcljax.fedavg(jnp.ones(3), client), X, y, OWNER, 1).history[0]["participants"] == 3


class Noisy(nnx.Module):
    """Layers whose state changes while they train."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.norm(x)))[:, 0]


@pytest.mark.long
def test_layers_with_a_state_train_and_a_key_is_new_in_every_step():
    keys = []

    def loss(model, x, y, key):
        nnx.reseed(model, default=key)
        jax.debug.callback(lambda data: keys.append(data.tobytes()), jax.random.key_data(key))
        return (model(x) - y) ** 2

    def without_key(model, x, y):
        return (model(x) - y) ** 2

    model = Noisy(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)["norm"]))
    for each in (loss, without_key):
        client = fcljax.local_sgd(each, optax.sgd(0.01), batch_size=4)
        found = fcljax.simulate(fcljax.fedavg(model, client), X, X[:, 0], OWNER, rounds=2)
        assert isinstance(found.model, Noisy) and np.isfinite(found.history[-1]["loss"])
    jax.effects_barrier()
    # six steps in each of two rounds
    assert len(set(keys)) == len(keys) == 12
    after = nnx.to_pure_dict(nnx.state(found.model)["norm"])
    np.testing.assert_array_equal(after["mean"], before["mean"])


# as users call them: the tests check types besides, and would refuse the arguments first
local_sgd, fedavg, simulate = map(inspect.unwrap, (fcljax.local_sgd, fcljax.fedavg, fcljax.simulate))


def method(**options):
    return fedavg({"w": jnp.zeros(3)}, SGD, **options)


def simulated(of=None, x=X, y=X[:, 0], owner=OWNER, rounds=1, **options):
    return simulate(of or method(), x, y, owner, rounds, **options)


def one_loss(loss):
    client = fcljax.local_sgd(loss, optax.sgd(0.1))
    return simulated(fcljax.fedavg({"w": jnp.zeros(3)}, client))


BAD = {
    "optimiser: 'sgd' is not an optax optimiser": lambda: local_sgd(squares, "sgd"),
    "epochs: 0; nearest valid value: 1": lambda: local_sgd(squares, optax.sgd(1), epochs=0),
    "epochs: True is not a whole number": lambda: local_sgd(squares, optax.sgd(1), epochs=True),
    "batch_size: '32' is not a whole number": lambda: local_sgd(squares, optax.sgd(1), batch_size="32"),
    "client: function; nearest": lambda: fedavg({}, squares),
    "model: it has no floating-point parameters": lambda: fedavg({"w": 3}, SGD),
    "model: parameter ['w'] is <U1": lambda: fedavg({"w": "a"}, SGD),
    "model: parameter ['w'] is object": lambda: fedavg({"w": object()}, SGD),
    "malicious: -1; nearest valid value: 0": lambda: method(malicious=-1),
    "malicious: 0.5 is not a whole number": lambda: method(malicious=0.5),
    "malicious: 9 of 3 clients; nearest: 3": lambda: simulated(method(malicious=9)),
    "attack: unknown value 'flip'": lambda: method(attack="flip"),
    "attack: clients of this method send no 'counts'": lambda: simulated(
        method(malicious=1, attack="counts")
    ),
    "of this method are not 'certain'": lambda: simulated(method(malicious=1, attack="certain")),
    "attack: y has no class numbers to flip": lambda: simulated(method(malicious=1, attack="label_flip")),
    "unknown option 'cliping'; did you mean 'clip_norm'": lambda: method(cliping=1),
    "aggregator: unknown value 'men'; did you mean 'mean'": lambda: method(aggregator="men"),
    "clip_norm: 'a' is not a number": lambda: method(clip_norm="a"),
    "clip_norm: nan must be finite": lambda: method(clip_norm=float("nan")),
    "malicious_bound: 1.5 is not a whole number": lambda: method(aggregator="krum", malicious_bound=1.5),
    "trim: only trimmed_mean reads it": lambda: method(trim=0.2),
    "method: LocalSGD; nearest: fcljax.fedavg": lambda: simulated(SGD),
    "rounds: 0; nearest valid value: 1": lambda: simulated(rounds=0),
    "rounds: -1; nearest": lambda: simulated(rounds=-1),
    "rounds: '3' is not a whole number": lambda: simulated(rounds="3"),
    "participation: 0; expected a fraction of the clients": lambda: simulated(participation=0),
    "participation: nan": lambda: simulated(participation=float("nan")),
    "participation: 9; expected": lambda: simulated(participation=9),
    "participation: 1.5": lambda: simulated(participation=1.5),
    "seed: 1180591620717411303424; nearest valid value: 4294967295": lambda: simulated(seed=2**70),
    "x: <U1 of shape [24]; expected numbers": lambda: simulated(x=["a"] * 24),
    "x: it is not an array: ": lambda: simulated(x=[[1.0], [1.0, 2.0]] * 12),
    "x['b']: shape [3]; owner has 24 values": lambda: simulated(x={"a": X, "b": X[:3, 0]}),
    "x: object of shape []": lambda: simulated(x=None),
    "have the shapes (24, 3), (3,) and (24,)": lambda: simulated(y=X[:3, 0].tolist()),
    "y: shape []": lambda: simulated(y=1.0),
    "y: 1099511627776 needs more than the 32 bits": lambda: simulated(y=np.full(24, 2**40)),
    "y: a masked array": lambda: simulated(y=np.ma.masked_array(X[:, 0], X[:, 0] > 0)),
    "owner: mixes text with other values": lambda: simulated(owner=[*range(23), "a"]),
    "x: a masked array": lambda: simulated(x=[np.ma.masked_array(row, row > 0) for row in X]),
    "owner: object of shape []": lambda: simulated(owner=None),
    "owner: float32 of shape [24]; expected integers or text": lambda: simulated(owner=X[:, 0]),
    "owner: -1; expected numbers from 0, or text": lambda: simulated(owner=np.arange(24) % 3 - 1),
    "owner: shape [24, 1]": lambda: simulated(owner=OWNER[:, None]),
    "owner: shape [0]": lambda: simulated(x=X[:0], y=X[:0], owner=OWNER[:0]),
    "returned shape (); expected one loss for each example": lambda: one_loss(lambda m, x, y: jnp.mean(x)),
    "loss: test_simulation_inputs.py:": lambda: one_loss(lambda m, x, y: x @ m["v"]),
    "TypeError: dot_general requires contracting": lambda: one_loss(lambda m, x, y: x.T @ m["w"]),
}


@pytest.mark.parametrize("says", BAD)
def test_a_wrong_argument_is_one_line_that_names_it(says):
    with pytest.raises(InputError) as error:
        BAD[says]()
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_label_flip_of_classes_and_a_number_of_participants_are_taken():
    honest = method(malicious=1, attack="label_flip")
    found = simulated(honest, y=RNG.integers(0, 3, 24), participation=2, seed=np.int64(3))
    assert found.history[0]["participants"] == 2
