"""DOLFIN: the memory against DualGPM with bases in numpy, and updates that earlier inputs do not see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FROZEN,
    IMAGE,
    KEY,
    PARTITIONS,
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

from fcljax.errors import InputError
from fcljax.methods.dolfin import (
    ROW_LENGTH,
    DolfinOptions,
    extend_directions,
    new_directions,
    threshold,
)
from fcljax.models.vit import apply_vit, attention_inputs
from fcljax.options import check_ranges
from fcljax.parts.gram import possible_inputs

D = 8
RNG = np.random.default_rng(0)


def gram_of(rank, seed):
    """Of inputs in few directions, with a little of all others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(D, rank)) @ rng.normal(size=(rank, 50)) + 0.05 * rng.normal(size=(D, 50))
    return x @ x.T / 50


def dual_gpm(basis, gram, epsilon):
    """The basis of the memory after a task, one direction after the other (GPM, eq. 8 and 9)."""
    total = np.sum(np.linalg.svd(gram)[1] ** 2)
    rest = gram - basis @ (basis.T @ gram)
    left, values, _ = np.linalg.svd(rest)
    explained = (total - np.sum(values**2)) / total
    for direction, value in zip(left.T, values, strict=True):
        if explained >= epsilon:
            break
        basis = np.column_stack([basis, direction])
        explained += value**2 / total
    return basis


def test_the_memory_is_dual_gpm_s():
    basis, memory, sizes = np.zeros((D, 0)), jnp.zeros((D, D)), []
    for task in range(3):
        gram, epsilon = gram_of(2, task), 0.97 + 0.01 * task
        expected = dual_gpm(basis, gram, epsilon)
        memory = extend_directions(memory, jnp.asarray(gram, jnp.float32), jnp.float32(epsilon))
        np.testing.assert_allclose(memory, expected @ expected.T, atol=1e-4)
        basis = expected
        sizes.append(basis.shape[1])
    assert 1 <= sizes[0] < sizes[1] < sizes[2] < D


def test_a_new_task_reads_directions_of_its_own():
    old, new = (jnp.asarray(gram_of(2, seed), jnp.float32) for seed in (0, 1))
    memory = extend_directions(jnp.zeros((D, D)), old, jnp.float32(0.9999))
    a = new_directions(memory, new, 2)
    np.testing.assert_allclose(a @ a.T, ROW_LENGTH**2 * np.eye(2), atol=1e-5)
    np.testing.assert_allclose(a @ memory, 0, atol=1e-5)
    seen = float(jnp.linalg.norm(a @ old) / jnp.linalg.norm(a @ new))
    assert seen < 0.02 < float(jnp.linalg.norm(new_directions(jnp.zeros((D, D)), new, 2) @ old))
    nothing = new_directions(jnp.eye(D), new, 2)  # a memory of everything leaves no direction
    np.testing.assert_allclose(nothing, 0)


def test_the_threshold_grows_linearly():
    options = DolfinOptions(0.9, 1.0)
    assert [float(threshold(options, jnp.int32(t), 5)) for t in (0, 1, 4)] == pytest.approx([0.9, 0.92, 0.98])


@pytest.mark.parametrize("name", ["memory_first", "memory_last"])
def test_a_share_is_at_most_all(name):
    check_ranges(DolfinOptions(**{name: 1.0}))
    with pytest.raises(InputError, match=f"^{name}: 1.5 is too large; nearest valid value: 1.0"):
        check_ranges(DolfinOptions(**{name: 1.5}))


@pytest.mark.long
def test_products_larger_than_the_squares_allow_are_refused():
    method = dolfin()
    context = context_of(method, compiled(method.init)(KEY, FROZEN), STREAM[0], info_of(5), FROZEN)
    gram = jnp.asarray(gram_of(2, 0), jnp.float32)[None]
    assert possible_inputs(context, gram) and not possible_inputs(context, gram.at[0, 0, 1].set(1e3))
    assert not possible_inputs(context, -gram)


# ---- in a run ----------------------------------------------------------------------------------------------


def dolfin(**options):
    values = {"lora_blocks": 1, "lora_rank": 3, "lora_lr": 0.05, "lr": 0.01, "epochs": 1} | options
    return method_of("dolfin", **values)


@pytest.fixture(scope="module")
def servers():
    method = dolfin(memory_first=0.5)
    server, states = begin(method)
    return [step[0] for step in play(engine_of(method), server, states, PARTITIONS)]


def inputs_of(task):
    """What the first block's pair reads of everybody's images of a task, [tokens, D]."""

    @jax.jit
    def read(params, image):
        return attention_inputs(params, apply_vit(TINY, params, image), 1)[0]

    image = jnp.asarray(IMAGE[PARTITIONS[task].indices], jnp.float32)
    return np.asarray(read(FROZEN.network, image)).reshape(-1, TINY.width)


@pytest.mark.long
def test_a_does_not_train_and_is_the_leading_directions_of_everybody_s_inputs(servers):
    x = inputs_of(0).astype(np.float64)
    expected = np.linalg.svd(x.T @ x)[0][:, :3]
    a = np.asarray(servers[-1].params.adapter.a_q)[0, 0]
    np.testing.assert_allclose(a.T @ a, ROW_LENGTH**2 * expected @ expected.T, atol=1e-4)
    np.testing.assert_array_equal(servers[1].params.adapter.a_q[0], servers[0].params.adapter.a_q[0])
    assert np.abs(servers[-1].params.adapter.b_v[0]).max() > 0


@pytest.mark.long
def test_a_second_task_s_pair_reads_nothing_that_the_memory_of_the_first_has(servers):
    memory, pairs = np.asarray(servers[1].rules[0][0]), servers[-1].params.adapter
    assert 0.9 < np.trace(memory) < TINY.width - 3
    seen = np.linalg.eigh(memory)[1][:, -1]  # an input of the first task, as the memory knows it
    before, after = (np.asarray(pairs.a_v)[task, 0] @ seen for task in (0, 1))
    assert np.abs(before).max() > 1e-3 and np.abs(after).max() < 1e-5
    update = np.asarray(pairs.b_v)[1, 0] @ np.asarray(pairs.a_v)[1, 0]
    assert np.linalg.norm(update) > 1e-3 and np.linalg.norm(update @ memory) < 1e-5


def test_clients_send_b_and_the_classifier_and_d_squared_once_per_task():
    method = dolfin()
    server = compiled(method.init)(KEY, FROZEN)
    context = context_of(method, server, STREAM[0], info_of(5), FROZEN)
    state, sizes = method.init_client(KEY, server), {}

    def send(program, context, state):
        return program.finish(context, program.start(context, state, KEY), state)[0]

    for each in method.rounds:
        upload = jax.eval_shape(functools.partial(send, each.program), context, state)
        sizes[each.when] = sum(
            leaf.size for leaf in jax.tree.leaves((upload.mean, upload.sum, upload.gather))
        )
    width = TINY.width
    assert sizes == {"round": 2 * 3 * width + 5 * width + 5, "task_start": width**2}
