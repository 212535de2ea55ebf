"""`simulate` with tasks: the matrix of what is measured, a state, sequences, wrong arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fcljax
from fcljax.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3)).astype(np.float32)
Y = np.arange(48) % 4
OWNER = np.repeat(["a", "b", "c"], [8, 16, 24])
ZEROS = {"w": jnp.zeros((3, 4))}


def cross_entropy(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ model["w"], y)


def average(batch_size=4, **options):
    return fcljax.fedavg(ZEROS, fcljax.local_sgd(cross_entropy, optax.sgd(0.5), 1, batch_size), **options)


def share_right(model, x, y):
    return jnp.argmax(x @ model["w"], -1) == y


simulate = inspect.unwrap(fcljax.simulate)


def played(tasks=2, rounds=2, x=X, y=Y, owner=OWNER, **options):
    return simulate(average(), x, y, owner, rounds, tasks=tasks, **options)


def test_a_task_trains_on_its_examples_alone_and_is_measured_on_its_own():
    """Full gradients of a linear regression: the mean of the clients' steps is a step on all examples."""
    y = X @ np.array([1.0, -2.0, 0.5], np.float32)
    task = np.where(X[:, 0] > 0, "second", "first")

    def squares(model, x, y):
        return (x @ model - y) ** 2

    client = fcljax.local_sgd(squares, optax.sgd(0.1), batch_size=100)
    method = fcljax.fedavg(jnp.zeros(3), client)
    ended = fcljax.simulate(method, X, y, OWNER, 3, tasks=task, test=(X, y, task))
    weights = np.zeros(3)
    expected = np.full((2, 2), np.nan)
    for t, name in enumerate(("first", "second")):
        x_task, y_task = X[task == name], y[task == name]
        for _ in range(3):
            weights = weights - 0.1 * 2 * x_task.T @ (x_task @ weights - y_task) / len(x_task)
        for i, other in enumerate(("first", "second")[: t + 1]):
            expected[t, i] = np.mean((X[task == other] @ weights - y[task == other]) ** 2)
    np.testing.assert_allclose(ended.scores, expected, rtol=1e-4)
    np.testing.assert_allclose(ended.model, weights, atol=1e-5)


@pytest.mark.parametrize(
    "tasks",
    [2, pytest.param([[0, 1], [2, 3]], marks=pytest.mark.long), np.where(Y < 2, 0, 5)],
)
def test_tasks_are_a_number_labels_or_an_array(tasks):
    test = (X, Y) if not isinstance(tasks, np.ndarray) else (X, Y, tasks)
    heard = []
    ended = played(
        tasks, test=test, evaluate=share_right, callback=lambda line, model: heard.append((line, model))
    )
    right = np.argmax(X @ ended.model["w"], -1) == Y
    np.testing.assert_allclose(ended.scores[1], [right[Y < 2].mean(), right[Y >= 2].mean()])
    assert np.isnan(ended.scores[0, 1])
    lines = [line for line, _ in heard]
    assert [(line["task"], line["round"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert lines == ended.history
    np.testing.assert_array_equal(heard[-1][1]["w"], ended.model["w"])


@pytest.mark.long
def test_going_on_from_a_state_gives_the_model_of_one_simulation():
    # one batch of all examples: their order, which depends on their indices, does not matter
    def of_part(part, tasks=None, **options):
        return simulate(average(batch_size=100), X[part], Y[part], OWNER[part], 2, tasks=tasks, **options)

    whole = of_part(slice(None), 2)
    first = of_part(Y < 2)
    # the same state may be used twice
    for _ in range(2):
        second = of_part(Y >= 2, state=first.state)
        np.testing.assert_allclose(second.model["w"], whole.model["w"], atol=1e-6)
    assert np.abs(first.model["w"] - whole.model["w"]).max() > 0.01
    assert second.state.tasks == 2 and second.state.seen.all()
    model, history = second
    assert model is second.model and history is second.history


class NextToken(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(5, 5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.table(x)


@pytest.mark.long
def test_perplexity_is_of_all_tokens_and_padding_is_none():
    tokens = RNG.integers(0, 5, (24, 7))
    x, y = tokens[:, :-1], tokens[:, 1:].copy()
    y[:5, 2:] = -1

    def loss(model, x, y):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), jnp.maximum(y, 0))
        return jnp.sum(losses * (y >= 0), 1)

    method = fcljax.fedavg(NextToken(), fcljax.local_sgd(loss, optax.sgd(0.0)))
    owner = np.arange(24) % 2
    score = fcljax.simulate(method, x, y, owner, 1, test=(x, y), evaluate="perplexity").scores
    log_probability = jax.nn.log_softmax(NextToken()(x))
    chosen = np.take_along_axis(np.asarray(log_probability), np.maximum(y, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(score, [[np.exp(-chosen[y >= 0].mean())]], rtol=1e-5)
    found = fcljax.simulate(method, x, y, owner, 1, test=(x, y), evaluate="accuracy").scores
    hits = np.argmax(log_probability, -1) == y
    np.testing.assert_allclose(found, [[hits[y >= 0].mean()]], rtol=1e-6)


TEST = (X, Y)
BAD = {
    "tasks: 5 of 4 classes; nearest: 4": lambda: played(5),
    "tasks: True of 4 classes": lambda: played(True),
    "tasks: y has no class numbers to divide": lambda: played(2, y=X[:, 0]),
    "tasks: no example has the label 7; labels go up to 3": lambda: played([[0, 1], [2, 3, 7]]),
    "tasks: label 1 is in two tasks": lambda: played([[0, 1], [1, 2, 3]]),
    "tasks: label 3 of y is in no task": lambda: played([[0, 1], [2]]),
    "tasks: task 2 has no labels": lambda: played([[0, 1, 2, 3], []]),
    "tasks: shape [3]; expected a number": lambda: played([0, 1, 2]),
    "tasks: <U1 of shape [1]; expected numbers": lambda: played([["a"], ["b"]]),
    "test: y_test: it is not an array": lambda: played(test=(X, [[1], [2, 3]])),
    "tasks: float64 of shape [48]; expected integers": lambda: played(np.ones(48)),
    "test: 3 values; expected (x_test, y_test)": lambda: played(test=(X, Y, Y)),
    "test: 2 values; expected (x_test, y_test, tasks_test)": lambda: played(Y, test=TEST),
    "tasks_test has 4, which tasks has not": lambda: played(Y, test=(X, Y, Y + 1)),
    "test: x, y and owner have the shapes (3, 3), (48,)": lambda: played(test=(X[:3], Y)),
    "test: an example of x is float32 [3] and of x_test float32 [2]": lambda: played(test=(X[:, :2], Y)),
    "test: y_test has the label 9": lambda: played(test=(X, Y + 6)),
    "evaluate: unknown value 'acuracy'; did you mean 'accuracy'": lambda: played(
        test=TEST, evaluate="acuracy"
    ),
    "evaluate: there are no test examples": lambda: played(evaluate="accuracy"),
    "evaluate: it calls the model, and a dict is none": lambda: played(test=TEST, evaluate="accuracy"),
    "returned the shape ()": lambda: played(test=TEST, evaluate=lambda model, x, y: jnp.mean(x)),
    "evaluate: simulate gets 3 arguments": lambda: played(test=TEST, evaluate=lambda model: 0),
    "callback: simulate gets 2 arguments": lambda: played(callback=lambda line: 0),
    "state: dict; nearest: the field `state`": lambda: played(state={}),
    "owner: 'd' is no client of state": lambda: played(
        owner=np.repeat(["a", "d"], 24), state=played(None, rounds=1).state
    ),
    "state: its server have arrays": lambda: simulate(
        fcljax.fedavg({"w": jnp.zeros((3, 5))}, fcljax.local_sgd(cross_entropy, optax.sgd(0.5))),
        X,
        Y,
        OWNER,
        1,
        state=played(None, rounds=1).state,
    ),
}


@pytest.mark.parametrize("says", BAD)
def test_a_wrong_argument_is_one_line(says):
    with pytest.raises(InputError) as error:
        BAD[says]()
    assert says in str(error.value) and "\n" not in str(error.value)
