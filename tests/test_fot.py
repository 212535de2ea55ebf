"""FOT: updates that earlier inputs do not see, and principal subspaces against the client's side in numpy."""

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
from fcljax.methods.fot import orthogonal, possible_sketch
from fcljax.models.vit import apply_vit, attention_inputs
from fcljax.parts.subspaces import extend_directions

D = 8


def fot(**options):
    values = {"lora_blocks": 1, "lora_rank": 3, "lora_lr": 0.05, "lr": 0.01, "epochs": 1} | options
    return method_of("fot", **values)


def sketch_of(rank, seed):
    """X Omega for inputs X in few directions, with a little of all others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(D, rank)) @ rng.normal(size=(rank, 50)) + 0.05 * rng.normal(size=(D, 50))
    return x, x @ rng.choice([-1.0, 1.0], (50, D))


def extended_basis(basis, sketch, epsilon):
    """As the release does: clients remove what the basis has, the server adds to it until the share of the
    rest that it still lacks is explained."""
    rest = sketch - basis @ (basis.T @ sketch)
    ratio = np.sum(rest**2) / np.sum(sketch**2)
    needed = (ratio - (1 - epsilon)) / ratio
    left, values, _ = np.linalg.svd(rest)
    count = 0
    while np.sum(values[:count] ** 2) < needed * np.sum(values**2):
        count += 1
    return np.linalg.qr(np.column_stack([basis, left[:, :count]]))[0]


def test_subspaces_grow_as_in_the_release():
    basis, projection, sizes = np.zeros((D, 0)), jnp.zeros((D, D)), []
    for task in range(3):
        epsilon = 0.97 + 0.01 * task
        _, sketch = sketch_of(2, task)
        basis = extended_basis(basis, sketch, epsilon)
        projection = extend_directions(projection, jnp.asarray(sketch, jnp.float32), jnp.float32(epsilon))
        np.testing.assert_allclose(projection, basis @ basis.T, atol=1e-4)
        sizes.append(basis.shape[1])
    assert 1 <= sizes[0] < sizes[1] < sizes[2] < D


def test_a_sketch_has_the_directions_of_the_inputs():
    x, sketch = sketch_of(2, 5)
    projection = extend_directions(jnp.zeros((D, D)), jnp.asarray(sketch, jnp.float32), jnp.float32(0.99))
    assert np.trace(projection) == pytest.approx(2, abs=1e-4)
    outside = np.linalg.norm(x - np.asarray(projection) @ x) / np.linalg.norm(x)
    best = np.linalg.norm(np.linalg.svd(x)[1][2:]) / np.linalg.norm(x)
    assert best <= outside < 2 * best


def test_an_update_changes_nothing_for_earlier_inputs():
    # by hand: of the rows of dW, what lies along x = (0.6, 0.8, 0) is removed
    x = np.array([0.6, 0.8, 0.0])
    update = jnp.array([[[5.0, 0.0, 2.0], [0.0, 5.0, 0.0]]])
    left = orthogonal(update, jnp.asarray(np.outer(x, x), jnp.float32)[None])
    np.testing.assert_allclose(left[0], [[3.2, -2.4, 2.0], [-2.4, 1.8, 0.0]], atol=1e-6)
    np.testing.assert_allclose(left[0] @ x, 0, atol=1e-6)


def test_a_pair_per_task_is_refused():
    with pytest.raises(InputError, match="lora_pairs: 'task' leaves no pair .*; nearest: 'one'"):
        fot(lora_pairs="task").init(KEY, FROZEN)


@pytest.fixture(scope="module")
def servers():
    method = fot(subspace_share=0.8, sketch_columns=20)
    server, states = begin(method)
    return [step[0] for step in play(engine_of(method), server, states, PARTITIONS)]


@pytest.mark.long
def test_the_second_task_trains_what_the_first_task_s_inputs_do_not_reach(servers):
    first, last = servers[1].params.adapter, servers[-1].params.adapter
    for name, projection in (("a_v", first.tokens), ("b_v", first.value), ("a_q", first.tokens)):
        change = getattr(last.pairs, name)[0, 0] - getattr(first.pairs, name)[0, 0]
        seen = np.linalg.norm(change @ projection[0])
        assert seen < 1e-5 and np.linalg.norm(change) > 1e-3, name
    # A's inputs take one factor's projection, B's the other's: sizes tell them apart
    assert first.tokens.shape == (1, TINY.width, TINY.width) and first.value.shape == (1, 3, 3)


def inputs_of(task):
    """What the first block's pair reads of everybody's images of a task, [tokens, D]."""

    @jax.jit
    def read(params, image):
        return attention_inputs(params, apply_vit(TINY, params, image), 1)[0]

    image = jnp.asarray(IMAGE[PARTITIONS[task].indices], jnp.float32)
    return np.asarray(read(FROZEN.network, image)).reshape(-1, TINY.width)


def test_projections_explain_their_share_of_everybody_s_inputs(servers):
    x = inputs_of(0)
    adapter = servers[1].params.adapter
    projection = np.asarray(adapter.tokens[0])
    explained = np.sum((x @ projection) ** 2) / np.sum(x**2)
    assert 0.7 < explained < 0.9 and np.trace(projection) < 0.7 * TINY.width
    hidden = x @ np.asarray(adapter.pairs.a_v)[0, 0].T
    value = np.asarray(adapter.value[0])
    assert np.sum((hidden @ value) ** 2) / np.sum(hidden**2) > 0.7
    # the second task adds to it, and what was there stays
    later = np.asarray(servers[-1].params.adapter.tokens[0])
    assert np.trace(later) >= np.trace(projection)
    np.testing.assert_allclose(later @ projection, projection, atol=1e-4)


def test_sketches_larger_than_the_inputs_can_be_are_refused():
    method = fot()
    context = context_of(method, compiled(method.init)(KEY, FROZEN), STREAM[0], info_of(5, 5), FROZEN)
    x = inputs_of(0)[: 5 * 5]  # five images of a class token and four patches
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(x), TINY.width))
    sketch = jnp.asarray(x.T @ signs, jnp.float32)[None]
    assert possible_sketch(context, sketch) and not possible_sketch(context, 10 * sketch)
    assert not possible_sketch(context, jnp.full_like(sketch, jnp.nan))
