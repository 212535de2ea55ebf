"""FedKNOW: what is kept of a task, restored gradients, and the integrator against a solver of its quadratic
program (numpy and scipy, float64)."""

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
    WIDTH,
    client_round,
    compiled,
    end_of_task,
    method_of,
    rows_of,
    train,
)
from scipy.optimize import nnls

from fcljax.errors import InputError
from fcljax.methods.fedknow import extract, least_aligned, restore, rotation
from fcljax.models.heads import Head
from fcljax.parts.learner import Params

RNG = np.random.default_rng(0)
RATE, TEMPERATURE, MARGIN = 0.1, 2.0, 0.5
FIRST = rows_of([0, 1, 2, 0], 1)
# two examples are nearly the same and have different labels: models that are right on one of them are wrong
# on the other, and their gradients oppose each other
SECOND = rows_of([3, 4, 3], 2, padding=50.0)
SECOND = SECOND._replace(input=SECOND.input.at[1].set(SECOND.input[0] + 0.1))


def fedknow(**options):
    values = {"lr": RATE, "optimiser": "sgd", "momentum": 0.0, "adapter": "linear", "rounds": 2, "epochs": 1}
    return method_of("fedknow", network=FORMULA, **values | options)


def turned(gradient, rows, margin):
    """g + G^T v with v = argmin_{v >= margin} |G^T v + g|^2, if a row is at an obtuse angle to g."""
    if not np.any(rows @ gradient < 0):
        return gradient
    least = gradient + margin * rows.sum(0)
    return least + rows.T @ nnls(rows.T, -least)[0]


# ---- the integrator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [0.0, MARGIN])
def test_the_gradient_is_turned_as_the_quadratic_program_says(margin):
    gradient, common = RNG.normal(size=30), RNG.normal(size=30)
    rows = RNG.normal(size=(5, 30)) + common  # cosines of about a half
    rows[3] = 0.0  # of a task that is not over
    for sign in (1, -1):
        g = sign * gradient - 0.5 * common
        change = rotation(jnp.asarray(g, jnp.float32), jnp.asarray(rows, jnp.float32), margin)
        np.testing.assert_allclose(g + change, turned(g, rows, margin), atol=1e-4)
        assert (rows @ (g + np.asarray(change))).min() > -1e-3 > (rows @ g).min()
    agreeing = jnp.asarray(common + rows.sum(0), jnp.float32)
    assert not rotation(agreeing, jnp.asarray(rows, jnp.float32), margin).any()


def test_the_least_aligned_gradients_are_taken_and_absent_ones_last():
    past = jnp.asarray([[1.0, 0.0], [-3.0, 0.1], [0.0, 0.0], [0.0, 2.0]])
    gradient = jnp.asarray([1.0, 0.0])
    np.testing.assert_array_equal(least_aligned(past, gradient, 2), past[jnp.array([1, 3])])
    np.testing.assert_array_equal(least_aligned(past, gradient, 9), past[jnp.array([1, 3, 0, 2])])


# ---- what is kept of a task --------------------------------------------------------------------------------


def test_the_largest_weights_of_each_leaf_are_kept():
    a, b = RNG.normal(size=(2, 3, 5)), 100 * RNG.normal(size=(4, 5))
    trainable = Params({"a": jnp.asarray(a), "b": jnp.asarray(b)}, jnp.ones(3))
    signature = extract(trainable, jnp.ones(5, bool), 0.2)
    restored = restore(signature, jax.tree.map(jnp.zeros_like, trainable))
    for leaf, kept in ((a, restored.adapter["a"]), (b, restored.adapter["b"])):
        least = np.sort(np.abs(leaf).ravel())[-round(0.2 * leaf.size)]
        np.testing.assert_allclose(kept, np.where(np.abs(leaf) >= least, leaf, 0), rtol=1e-6)
    np.testing.assert_array_equal(restored.classifier, 1.0)


@pytest.mark.long
def test_clients_tune_what_they_keep_of_the_global_model():
    method = fedknow(adapter="lora", lora_blocks=2, lora_rank=2, lora_lr=RATE, signature_share=0.25)
    server = compiled(method.init)(KEY, SCALE)
    before = method.init_client(KEY, server)
    (knowledge,) = end_of_task(method, server, TASKS[0], [FIRST], before)
    received = Params(jax.tree.map(lambda pairs: pairs[0], server.params.adapter), server.params.classifier)
    expected = extract(received, TASKS[0].current, 0.25)
    kept = jax.tree.map(lambda leaf: leaf[0], knowledge.signatures)
    np.testing.assert_array_equal(kept.classes, TASKS[0].current)
    for found, largest in zip(
        jax.tree.leaves(kept.positions), jax.tree.leaves(expected.positions), strict=True
    ):
        np.testing.assert_array_equal(found, largest)
    # one step against the gradient of the pruned model, whose B is 0: only B and the classifier move
    gradient = head_gradient(FIRST, expected.weights.classifier, TASKS[0])
    moved = flat(kept.weights.classifier) - flat(expected.weights.classifier)
    np.testing.assert_allclose(moved, -RATE * gradient, atol=1e-6)
    assert np.abs(kept.weights.adapter.b_v).max() > 0
    np.testing.assert_array_equal(kept.weights.adapter.a_v, expected.weights.adapter.a_v)
    assert not knowledge.signatures.classes[1].any()


def test_an_adapter_with_parameters_of_each_task_is_refused():
    method = fedknow(adapter="lora", lora_blocks=2, lora_pairs="task")

    def init_client(key):
        return method.init_client(key, method.init(key, SCALE))

    with pytest.raises(InputError, match="adapter: clients keep signature knowledge .* --lora-pairs one"):
        jax.eval_shape(init_client, KEY)


# ---- a training step ---------------------------------------------------------------------------------------


def flat(head):
    return np.concatenate([np.asarray(head.kernel, np.float64).ravel(), np.asarray(head.bias, np.float64)])


def softmax(logits):
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def examples_of(batch):
    mask = np.asarray(batch.mask)
    return np.asarray(batch.input, np.float64)[mask], np.asarray(batch.label)[mask]


def spread(x, error, classes):
    """d/d(kernel, bias) of a loss whose gradient by the logits of these classes is `error`."""
    by_logits = np.zeros((len(x), SIZES.classes))
    by_logits[:, classes] = error / len(x)
    return np.concatenate([(x.T @ by_logits).ravel(), by_logits.sum(0)])


def logits_of(head, x, classes):
    return (x @ np.asarray(head.kernel, np.float64) + np.asarray(head.bias, np.float64))[:, classes]


def head_gradient(batch, head, task):
    """Of the mean cross-entropy among the task's classes."""
    x, label = examples_of(batch)
    classes = np.flatnonzero(task.current)
    return spread(x, softmax(logits_of(head, x, classes)) - (label[:, None] == classes), classes)


def restored_gradient(batch, head, teacher, task):
    """Of CE(softmax(teacher / T), softmax(student / T)) among the classes of a past task."""
    x, _ = examples_of(batch)
    classes = np.flatnonzero(task.current)
    student, target = (softmax(logits_of(h, x, classes) / TEMPERATURE) for h in (head, teacher))
    return spread(x, (student - target) / TEMPERATURE, classes)


def with_head(server, seed):
    """The server after some aggregation."""
    rng = np.random.default_rng(seed)
    kernel, bias = rng.normal(size=(WIDTH, SIZES.classes)), rng.normal(size=SIZES.classes)
    head = Head(jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32))
    return server._replace(params=server.params._replace(classifier=head))


@functools.cache
def in_second_task():
    """(method, server, state) of a client after the first task and one round of the second, which has the
    first one's classes back: restored gradients and the client's own move the same weights."""
    method = fedknow(rotation_margin=MARGIN)
    server = compiled(method.init)(KEY, SCALE)
    state = method.init_client(KEY, server)
    _, state = client_round(method, server, TASKS[0], [FIRST], state)
    server = with_head(server, 1)
    state = end_of_task(method, server, TASKS[0], [FIRST], state)
    _, (knowledge,) = client_round(method, with_head(server, 3), TASKS[1], [rows_of([4, 3], 5)], state)
    classes = knowledge.signatures.classes.at[0].set(TASKS[1].current)
    knowledge = knowledge._replace(signatures=knowledge.signatures._replace(classes=classes))
    return method, with_head(server, 11), knowledge


def stepped(knowledge):
    """The gradient that a client with this knowledge steps along."""
    method, server, _ = in_second_task()
    _, local = train(method, server, TASKS[1], [SECOND], (knowledge,), round_=1)
    return (flat(server.params.classifier) - flat(local.trainable.classifier)) / RATE


@pytest.mark.parametrize("rows", ["both", "restored", "local"])
def test_a_step_is_along_the_turned_gradient(rows):
    """With g of the batch, g_1 from the first task's signature, and g_2 of the same loss at the client's own
    model before aggregation, which it has from its second round of a task on."""
    _, server, knowledge = in_second_task()
    head = server.params.classifier
    gradient = head_gradient(SECOND, head, TASKS[1])
    teacher = jax.tree.map(lambda leaf: leaf[0], knowledge.signatures.weights.classifier)
    restored = restored_gradient(SECOND, head, teacher, TASKS[1])
    before = head_gradient(SECOND, knowledge.model.classifier, TASKS[1])
    assert restored @ gradient < -0.01 and before @ gradient < -0.01
    past = [restored, before]
    if rows == "restored":
        knowledge, past = knowledge._replace(task=jnp.int32(0)), [restored]
    if rows == "local":
        none = jnp.zeros_like(knowledge.signatures.classes)
        signatures = knowledge.signatures._replace(classes=none)
        knowledge, past = knowledge._replace(signatures=signatures), [before]
    expected = turned(gradient, np.stack(past), MARGIN)
    np.testing.assert_allclose(stepped(knowledge), expected, atol=2e-5)
    assert np.abs(expected - gradient).max() > 0.01


def test_a_client_keeps_the_task_s_classes_and_its_model_before_aggregation():
    _, server, knowledge = in_second_task()
    assert knowledge.task == 1 and not knowledge.signatures.classes[1].any()
    trained, received = flat(knowledge.model.classifier), flat(with_head(server, 3).params.classifier)
    assert 0 < np.abs(trained - received).max() < 1
