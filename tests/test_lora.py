"""LoRA pairs: the rules by which pairs of several tasks act as one, the penalties, and which slots get a
gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax.adapters.lora import init_pairs, lora_injection, merge_pair, pair_of, summed
from fcljax.methods.pilora import l1, orthogonality
from fcljax.models.vit import Lora, ViTConfig, apply_vit, parameter_shapes

TASKS, BLOCKS, RANK, WIDTH = 3, 2, 2, 5
combine = jax.jit(summed, static_argnames="rule")


def draw(seed=0, tasks=TASKS, blocks=BLOCKS, rank=RANK, width=WIDTH):
    """Pairs of which no element is 0."""
    rng = np.random.default_rng(seed)
    one = lambda *shape: jnp.asarray(rng.normal(size=(tasks, blocks, *shape)), jnp.float32)
    return Lora(one(rank, width), one(width, rank), one(rank, width), one(width, rank))


def updates(pair):
    """B A of queries and of values, [blocks, width, width]."""
    return np.stack(
        [np.asarray(pair.b_q) @ np.asarray(pair.a_q), np.asarray(pair.b_v) @ np.asarray(pair.a_v)]
    )


def toy(a, b=None):
    """A pair, or pairs, of one block whose queries and values have the same A and B; leaves [..., blocks,
    ...]."""
    a = jnp.asarray(a, jnp.float32)[..., None, :, :]
    b = (
        jnp.zeros((*a.shape[:-2], a.shape[-1], a.shape[-2]))
        if b is None
        else jnp.asarray(b, jnp.float32)[..., None, :, :]
    )
    return Lora(a, b, a, b)


# ---- init --------------------------------------------------------------------------------------------------


def test_a_starts_uniform_within_one_over_the_root_of_the_width_and_b_at_zero():  # O12
    pairs = init_pairs(jax.random.key(0), 10, 1, 4, 768)
    assert 0.0360 < np.abs(pairs.a_q).max() <= 0.0360844 and -0.0360844 <= pairs.a_v.min() < -0.0360
    assert not pairs.b_q.any() and not pairs.b_v.any()
    assert (pairs.a_q != pairs.a_v).all() and (pairs.a_q[0] != pairs.a_q[1]).all()


def test_the_gaussian_has_the_deviation_of_the_uniform():
    uniform, gaussian = (
        init_pairs(jax.random.key(0), 10, 1, 4, 768, name).a_q for name in ("kaiming_uniform", "gaussian")
    )
    assert (
        float(gaussian.std())
        == pytest.approx(float(uniform.std()), rel=0.02)
        == pytest.approx((3 * 768) ** -0.5, rel=0.02)
    )
    assert gaussian.max() > uniform.max() * 1.5


def test_a_pair_of_vit_b16_has_12288_parameters():
    pairs = jax.eval_shape(lambda key: init_pairs(key, 10, 1, 4, 768), jax.random.key(0))
    assert sum(leaf.size for leaf in pairs) == 10 * 12_288


# ---- rules -------------------------------------------------------------------------------------------------


def test_the_product_of_sums_is_not_the_sum_of_products():  # O7
    pairs = toy([[[1, 0]], [[0, 2]]], [[[1], [0]], [[0], [3]]])
    np.testing.assert_allclose(
        updates(summed(pairs, pair_of(pairs, 1), 1, "sum"))[:, 0], [[[1, 2], [3, 6]]] * 2
    )
    np.testing.assert_allclose(
        updates(summed(pairs, pair_of(pairs, 1), 1, "products"))[:, 0], [[[1, 0], [0, 6]]] * 2
    )


@pytest.mark.parametrize("task", range(TASKS))
def test_rules_on_random_pairs(task):
    pairs, current = draw(), pair_of(draw(1), 0)
    slots = merge_pair(pairs, task, current)
    sum_of = lambda leaf: np.asarray(leaf)[: task + 1].sum(0)
    product_of_sums = updates(jax.tree.map(sum_of, slots))
    sum_of_products = sum(updates(pair_of(slots, i)) for i in range(task + 1))
    expected = {
        "sum": product_of_sums,
        "products": sum_of_products,
        "current": updates(current),
        "first": updates(pair_of(slots, 0)),
    }
    for rule, update in expected.items():
        np.testing.assert_allclose(
            updates(combine(pairs, current, task, rule=rule)), update, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("rule", ["sum", "current", "products", "first"])
def test_pairs_of_later_tasks_and_the_old_value_of_the_current_one_are_not_read(rule):
    pairs, current = draw(), pair_of(draw(1), 0)
    poisoned = jax.tree.map(lambda leaf: leaf.at[1:].set(jnp.nan), pairs)
    jax.tree.map(
        np.testing.assert_array_equal,
        combine(poisoned, current, 1, rule=rule),
        combine(pairs, current, 1, rule=rule),
    )


@pytest.mark.parametrize("rule", ["sum", "current", "products", "first"])
def test_gradients_of_frozen_slots_are_exactly_zero_for_every_task(rule):
    gradient = jax.jit(
        jax.grad(
            lambda pairs, current, task: jnp.sum(
                jnp.stack([x.sum() for x in summed(pairs, current, task, rule)]) ** 2
            ),
            argnums=(0, 1),
        )
    )
    for task in range(TASKS):
        frozen, current = gradient(draw(), pair_of(draw(1), 0), task)
        assert not any(leaf.any() for leaf in frozen)
        assert all(leaf.any() == (rule != "first" or task == 0) for leaf in current)
    assert gradient._cache_size() == 1  # the task is data


# ---- penalties ---------------------------------------------------------------------------------------------


def test_orthogonality_and_l1_of_the_toy():  # O6, for queries and again for values
    old, current = toy([[[1, 0, 0], [0, 1, 0]]] * 2), toy([[1, 2, 3], [-1, 0, 1]])
    assert float(orthogonality(old, current, 1)) == 2 * 4
    assert float(l1(current)) == 2 * 8


def test_orthogonality_adds_up_over_earlier_tasks_and_blocks():
    pairs, current = draw(), pair_of(draw(1), 0)
    overlap = lambda i, a, b: sum(
        np.abs(np.asarray(a[i, m]) @ np.asarray(b[m]).T).sum() for m in range(BLOCKS)
    )
    for task in range(TASKS):
        expected = sum(
            overlap(i, pairs.a_q, current.a_q) + overlap(i, pairs.a_v, current.a_v) for i in range(task)
        )
        assert float(jax.jit(orthogonality)(pairs, current, task)) == pytest.approx(expected, rel=1e-5)


def test_orthogonality_of_the_first_task_is_exactly_zero_and_so_is_its_gradient():
    value, gradient = jax.jit(jax.value_and_grad(orthogonality, argnums=1))(draw(), pair_of(draw(1), 0), 0)
    assert float(value) == 0 and not any(leaf.any() for leaf in gradient)


def test_orthogonality_reads_no_b_and_moves_only_the_current_a():
    pairs, current = draw(), pair_of(draw(1), 0)
    without = pairs._replace(b_q=None, b_v=None)
    assert float(orthogonality(without, current, 2)) == float(orthogonality(pairs, current, 2)) > 0
    frozen, moved = jax.jit(jax.grad(orthogonality, argnums=(0, 1)))(pairs, current, 2)
    assert not any(leaf.any() for leaf in frozen)
    assert moved.a_q.all() and moved.a_v.all() and not moved.b_q.any() and not moved.b_v.any()


# ---- in the transformer ------------------------------------------------------------------------------------

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)


def test_a_pair_in_the_network_equals_its_product_added_to_the_projection():
    """One of two blocks gets a pair; its product is added to the weights of q and v by hand."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), parameter_shapes(TINY)
    )
    image = jnp.asarray(rng.normal(size=(3, 8, 8, 3)), jnp.float32)
    pairs = draw(tasks=2, blocks=1, rank=4, width=TINY.width)
    pair = summed(pairs, pair_of(pairs, 1), 1, "sum")
    encode = jax.jit(lambda params, pair: apply_vit(TINY, params, image, pair and lora_injection(pair)).cls)
    query, value = updates(pair)[:, 0]
    kernel = params["block_00"]["attn"]["qkv"]["kernel"]
    moved = kernel.at[:, : TINY.width].add(query.T).at[:, 2 * TINY.width :].add(value.T)
    block = {
        **params["block_00"],
        "attn": {**params["block_00"]["attn"], "qkv": {**params["block_00"]["attn"]["qkv"], "kernel": moved}},
    }
    expected = encode({**params, "block_00": block}, None)
    np.testing.assert_allclose(encode(params, pair), expected, atol=1e-4)
    assert np.abs(expected - encode(params, None)).max() > 1e-2


def test_injection_names_the_first_blocks():
    injection = jax.eval_shape(lora_injection, pair_of(draw(), 0))
    assert sorted(injection.lora) == [0, 1] and not injection.prompt and not injection.prefix
    assert injection.lora[1].a_q.shape == (RANK, WIDTH) and injection.lora[1].b_v.shape == (WIDTH, RANK)
