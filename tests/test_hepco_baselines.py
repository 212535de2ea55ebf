"""The baselines of HePCo's tables: their losses by hand, and what the clients' teacher is."""

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
    aggregate_of,
    by_hand,
    client_round,
    compiled,
    context_of,
    info_of,
    main_of,
    method_of,
    round_context_of,
    rows_of,
    server_round,
)
from toys import same

from fcljax.adapters.pool import weighted_prompts
from fcljax.methods.fed_cprompt import contrastive_loss
from fcljax.methods.fedlwf_mc import distilled_binary_loss
from fcljax.parts.task_start import teacher

POOL = {"pool_size": 3, "pool_length": 2, "pool_blocks": 1}
OPTIONS = {
    "fedavg-prompt": POOL,
    "fedprox": POOL,
    "fed-cprompt": POOL,
    "centralized-prompt": POOL,
    "fedavg-ft": {"full_lr": 0.05},
    "fedlwf-mc": {"full_lr": 0.05},
}
CLASSES = SIZES.classes


def method(name, **values):
    return method_of(name, network=FORMULA, **{"batch_size": 4, "lr": 0.05} | OPTIONS[name] | values)


def furthest(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_old_classes_learn_what_the_teacher_says_of_them():
    """Specification C9: targets (.880797, 1, 0)."""
    z, old_z = jnp.array([[0.0, 1, -1]]), jnp.array([[2.0, 9, 9]])
    old, seen, mask = jnp.array([True, False, False]), jnp.ones(3, bool), jnp.array([True])
    loss = distilled_binary_loss(z, old_z, jnp.array([1]), old, seen, mask)
    np.testing.assert_allclose(loss, 0.439890, atol=1e-6)
    three = lambda x: jnp.concatenate([x, x + 7, x * jnp.nan])  # rows outside of the mask, and unseen classes
    partly = distilled_binary_loss(
        three(z),
        three(old_z),
        jnp.array([1, 0, 0]),
        old,
        jnp.array([True, True, False]),
        jnp.array([True, False, False]),
    )
    np.testing.assert_allclose(partly, (0.439890 * 3 - np.log1p(np.exp(-1))) / 2, atol=1e-5)


def test_logits_are_kept_near_the_newest_model_and_far_from_the_last_tasks():
    """Specification A7."""
    z, near, far = jnp.array([[1.0, 2], [5, 5]]), jnp.array([[1.0, 1], [0, 0]]), jnp.array([[0.0, 0], [9, 9]])
    mask = jnp.array([True, False])
    assert float(contrastive_loss(z, near, far, mask, 1e3, 10.0, 1.0)) == 1e3 * 1 - 10 * 5 + 1
    assert float(contrastive_loss(z, z, far, mask, 1e3, 10.0, 1.0)) == 0
    both = contrastive_loss(z, near, far, jnp.array([True, True]), 1.0, 1.0, 0.0)
    assert float(both) == (1 - 5) + (50 - 32)


@pytest.mark.parametrize("name", [pytest.param("fed-cprompt", marks=pytest.mark.long), "fedlwf-mc"])
def test_the_teacher_is_the_model_that_the_task_began_with(name):
    made = method(name)
    server = compiled(made.init)(KEY, SCALE)
    for task in TASKS:
        server, began = compiled(made.begin_task)(round_context_of(task, frozen=SCALE), server, KEY), None
        for round_ in range(3):
            context = context_of(made, server, task, info_of(CLASSES, 4, 0, round_), SCALE)
            began = context.payload.trainable if round_ == 0 else began
            same(teacher(context), began)
            assert round_ == 0 or furthest(context.payload.trainable, began) > 1e-3  # the newest is another
            batch = rows_of([int(c) for c in task.classes if c >= 0][:4])
            upload, _ = client_round(made, server, task, [batch], round_=round_)
            server, _ = server_round(made, server, task, aggregate_of([upload], [0], [True], 4), round_)


@pytest.mark.parametrize(
    "name, values",
    [
        pytest.param("fed-cprompt", {"contrast_near": 0.0, "contrast_far": 0.0}, marks=pytest.mark.long),
        ("fedprox", {"prox_weight": 0.0}),
    ],
)
def test_without_their_weight_they_are_fedavg_prompt(name, values):
    plain = by_hand(method("fedavg-prompt"), rounds=2).params
    assert furthest(by_hand(method(name), rounds=2).params, plain) > 1e-6
    assert furthest(by_hand(method(name, **values), rounds=2).params, plain) < 1e-6


@pytest.mark.long
def test_binary_problems_are_all_that_fedlwf_mc_learns():
    """A step of the client is one on the binary loss alone, in both tasks."""
    made = method("fedlwf-mc", optimiser="sgd", lr=0.1, full_lr=0.1, lr_schedule="constant")
    server = by_hand(made)
    task, batch = TASKS[1], rows_of([int(TASKS[1].classes[0])] * 3)
    server = server._replace(params=jax.tree.map(lambda x: x + 0.05, server.params))
    info = info_of(CLASSES, 3, 0, 1)
    context = context_of(made, server, task, info, SCALE)
    program, part = main_of(made).program, context.payload.trainable

    def logits(part):
        head = part.classifier
        return batch.input * part.adapter["scale"] @ head.kernel + head.bias

    old = logits(server.rules[0].trainable)
    loss = lambda part: distilled_binary_loss(logits(part), old, batch.label, task.old, task.seen, batch.mask)
    expected = jax.tree.map(lambda x, g: x - 0.1 * g, part, jax.grad(loss)(part))
    local = compiled(program.start)(context, made.init_client(KEY, server), KEY)
    after, _ = compiled(program.phases[0].step)(context, local, batch, KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.trainable, expected)
    assert furthest(after.trainable, part) > 1e-4


def test_the_whole_network_trains_in_fedavg_ft():
    made = method("fedavg-ft")
    server = by_hand(made)
    assert furthest(server.params.adapter, SCALE.network) > 1e-3


@pytest.mark.long
def test_rates_fall_over_the_epochs_of_a_round():
    """Two epochs of two batches: the third and fourth step have the second epoch's factor."""
    made = method("fedavg-prompt", optimiser="sgd", epochs=2, lr=0.1)
    task, program = TASKS[0], main_of(made).program
    server = compiled(made.init)(KEY, SCALE)
    own = [int(c) for c in task.classes if c >= 0]
    context = context_of(made, server, task, info_of(CLASSES, 8), SCALE)
    local = compiled(program.start)(context, (), KEY)
    batch = rows_of((own * 4)[:4])

    def loss(head, local):
        z = jnp.where(task.current, feature(local) @ head.kernel + head.bias, -1e30)
        return -jnp.mean(jax.nn.log_softmax(z)[jnp.arange(4), batch.label])

    def feature(local):
        prompt = weighted_prompts(local.trainable.adapter, batch.input)
        return batch.input + prompt[:, 0, 0] - 2 * prompt[:, 0, 1]

    for factor in (1, 1, 0.015707, 0.015707):
        slope = jax.grad(loss)(local.trainable.classifier, local)
        expected = jax.tree.map(lambda x, g, f=factor: x - 0.1 * f * g, local.trainable.classifier, slope)
        local, _ = compiled(program.phases[0].step)(context, local, batch, KEY)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), local.trainable.classifier, expected
        )
        assert float(jnp.abs(slope.bias).max()) > 1e-2
