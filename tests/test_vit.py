"""The Vision Transformer against its equations in numpy, and what adapters put into it."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fcljax.federated.communication import count_scalars
from fcljax.models.heads import init_head
from fcljax.models.products import matmul
from fcljax.models.shapes import VITS, AttentionKernel
from fcljax.models.vit import (
    Block,
    HiddenLayer,
    Injection,
    Lora,
    Prefix,
    ViTConfig,
    apply_vit,
    gelu_polynomial,
    init_vit,
    layer_norm,
    parameter_shapes,
    vit_network,
)

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)
ROWS, TOKENS = 3, 1 + TINY.grid**2
run = jax.jit(apply_vit, static_argnums=(0, 4))
draw = np.random.default_rng(0).normal


def random(*shape, scale=1.0):
    return jnp.asarray(draw(0, scale, shape), jnp.float32)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: random(*x.shape, scale=0.3), parameter_shapes(TINY))


@pytest.fixture(scope="module")
def image():
    return random(ROWS, 8, 8, 3)


# ---- the equations -----------------------------------------------------------------------------------------


def norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def attention(p, x, prefix):
    """Softmax attention, head by head and image by image."""
    width, size = x.shape[-1], x.shape[-1] // TINY.heads
    out = np.zeros_like(x)
    for image, head in np.ndindex(len(x), TINY.heads):
        q, k, v = (dense(p["qkv"], x[image])[:, i * width + head * size :][:, :size] for i in range(3))
        if prefix is not None:
            k, v = (
                np.concatenate([own, np.asarray(extra[image, :, head * size :][:, :size])])
                for own, extra in ((k, prefix.key), (v, prefix.value))
            )
        odds = np.exp(q @ k.T / math.sqrt(size))
        out[image, :, head * size : (head + 1) * size] = odds / odds.sum(-1, keepdims=True) @ v
    return dense(p["proj"], out)


def equations(params, image, prefix=None):
    """All tokens after the final norm. Patches are numbered by row, pixels by row, column, channel."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    n = TINY.patch
    cells = [
        image[:, i : i + n, j : j + n].reshape(len(image), -1) for i in range(0, 8, n) for j in range(0, 8, n)
    ]
    tokens = dense(p["patch"], np.stack(cells, axis=1))
    x = np.concatenate([np.broadcast_to(p["cls"], (len(image), 1, TINY.width)), tokens], axis=1) + p["pos"]
    for i in range(TINY.depth):
        block = p[f"block_{i:02d}"]
        x = x + attention(block["attn"], norm(block["norm1"], x), prefix if i == 0 else None)
        hidden = dense(block["fc1"], norm(block["norm2"], x))
        x = x + dense(block["fc2"], hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))))
    return norm(p["norm"], x)


def test_the_network_is_its_equations(params, image):
    out = run(TINY, params, image, None, True)
    np.testing.assert_allclose(out.tokens, equations(params, image), atol=1e-4)
    assert out.tokens.shape == (ROWS, TOKENS, TINY.width) and out.cls.shape == (ROWS, TINY.width)


def test_the_derivative_of_a_norm_is_that_of_its_formula():
    """In float64 by central differences, along a random move of all that it reads; and backwards the same."""
    values, moves = ((random(5, 16), random(16), random(16)) for _ in range(2))

    def formula(step):
        x, scale, bias = (np.float64(v) + step * np.float64(m) for v, m in zip(values, moves, strict=True))
        return norm({"scale": scale, "bias": bias}, x)

    epsilon = 1e-6
    found, forwards = jax.jvp(lambda *args: layer_norm(*args, epsilon), values, moves)
    np.testing.assert_allclose(found, formula(0.0), rtol=0, atol=1e-5)
    expected = (formula(1e-4) - formula(-1e-4)) / 2e-4
    np.testing.assert_allclose(forwards, expected, rtol=0, atol=1e-4)
    slope = random(5, 16)
    backwards = jax.vjp(lambda *args: layer_norm(*args, epsilon), *values)[1](slope)
    along = sum(np.sum(np.float64(b) * np.float64(m)) for b, m in zip(backwards, moves, strict=True))
    assert along == pytest.approx(np.sum(np.float64(slope) * expected), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu_is_x_times_the_normal_distribution_function(dtype):
    x = np.linspace(-6, 6, 101)
    below = np.array([0.5 * (1 + math.erf(each / math.sqrt(2))) for each in x])
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    layer = HiddenLayer(dataclasses.replace(TINY, mlp=len(x), dtype=dtype))
    params = {"kernel": jnp.eye(len(x)), "bias": jnp.full(len(x), 0.5)}

    def gelu(x):
        return layer.apply({"params": params}, x - 0.5)

    given = jnp.asarray(x, jnp.float32)
    tolerance = {"float32": 1e-6, "bfloat16": 0.05}[dtype]
    np.testing.assert_allclose(np.float32(gelu(given)), x * below, rtol=0, atol=tolerance)
    slope = jax.grad(lambda x: jnp.sum(gelu(x).astype(jnp.float32)))(given)
    np.testing.assert_allclose(np.float32(slope), below + x * density, rtol=0, atol=tolerance)


def test_blocks_of_equal_shapes_are_traced_once(image):
    """Of six blocks the last one computes the class token alone, and is another one; and there is nothing to
    trace for a second program."""
    deep = dataclasses.replace(TINY, depth=6)
    shapes, traced = parameter_shapes(deep), []

    def count(call, args, kwargs, context):
        if isinstance(context.module, Block) and context.method_name == "__call__":
            traced.append(context.module)
        return call(*args, **kwargs)

    def features(scale, params, image):
        return apply_vit(deep, params, scale * image).cls

    jax.clear_caches()
    with nn.intercept_methods(count):
        for scale in (1.0, 2.0):
            jax.make_jaxpr(functools.partial(features, scale))(shapes, image)
            assert len(traced) == 2


def test_the_class_token_is_the_same_whether_all_tokens_are_asked_for_or_not(params, image):
    lean, full = run(TINY, params, image, None, False), run(TINY, params, image, None, True)
    np.testing.assert_allclose(lean.cls, full.cls, atol=1e-5)
    np.testing.assert_array_equal(full.cls, full.tokens[:, 0])
    assert lean.tokens is None
    assert {name: tap.shape[1] for name, tap in lean.taps.items()} == {
        "embed": TOKENS,
        "block_00": TOKENS,
        "block_01": 1,
    }


def test_the_patch_embedding_is_a_convolution_with_the_patch_as_stride(params, image):
    n = TINY.patch
    # torch's [out, in, rows, columns]
    kernel = params["patch"]["kernel"].reshape(n, n, 3, TINY.width).transpose(3, 2, 0, 1)
    cells = (
        jax.lax.conv(image.transpose(0, 3, 1, 2), kernel, (n, n), "VALID")
        .reshape(ROWS, TINY.width, -1)
        .transpose(0, 2, 1)
    )
    embedded = run(TINY, params, image, None, False).taps["embed"][:, 1:] - params["pos"][1:]
    np.testing.assert_allclose(embedded, cells + params["patch"]["bias"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "count"),
    [("vit_micro", 691_488), ("vit_ti16", 5_524_416), ("vit_s16", 21_665_664), ("vit_b16", 85_798_656)],
)
def test_parameter_counts(name, count):
    c = VITS[name]
    patch, embed = (3 * c.patch**2 + 1) * c.width, (2 + c.grid**2) * c.width
    block = 4 * c.width * (c.width + 1) + 2 * c.width * c.mlp + c.mlp + c.width + 4 * c.width
    assert count_scalars(parameter_shapes(c)) == patch + embed + c.depth * block + 2 * c.width == count


def test_heads_and_low_rank_updates_have_the_numbers_that_the_papers_count():
    """FPPL section 8 and HePCo's full network: a ViT-B/16 with 200 and with 1,000 classes.

    PILoRA section 2: rank 4 on q and v.
    """
    body = count_scalars(parameter_shapes(VITS["vit_b16"]))
    head = lambda classes: count_scalars(jax.eval_shape(lambda: init_head(jax.random.key(0), 768, classes)))
    assert (head(100), head(200), head(345)) == (76_900, 153_800, 265_305)
    assert (body + head(200), body + head(1000)) == (85_952_456, 86_567_656)
    down, up = jax.ShapeDtypeStruct((4, 768), jnp.float32), jax.ShapeDtypeStruct((768, 4), jnp.float32)
    assert count_scalars(Lora(down, up, down, up)) == 12_288


def test_a_random_network_depends_on_its_key_and_has_the_declared_shapes():
    init = jax.jit(init_vit, static_argnums=1)
    one, other = (init(jax.random.key(seed), TINY) for seed in (0, 1))
    jax.tree.map(
        lambda x, shape: np.testing.assert_equal((x.shape, x.dtype), (shape.shape, shape.dtype)),
        one,
        parameter_shapes(TINY),
    )
    for part in ("cls", "pos"):
        assert (one[part] != other[part]).all()
    assert (one["block_01"]["attn"]["qkv"]["kernel"] != other["block_01"]["attn"]["qkv"]["kernel"]).all()


def test_bfloat16_is_close_to_float32_and_gives_float32_features(image):
    params = jax.tree.map(lambda x: random(*x.shape, scale=0.1), parameter_shapes(TINY))
    params["norm"]["scale"] = jnp.ones(TINY.width)
    half = run(dataclasses.replace(TINY, dtype="bfloat16"), params, image, None, False).cls
    exact = run(TINY, params, image, None, False).cls
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, exact, atol=0.05)
    assert (half != exact).any()


def test_products_in_bfloat16_round_the_factors_and_not_the_result_and_their_gradient_likewise():
    a, b, gradient = random(3, 5, 7), random(7, 4), random(3, 5, 4)
    rounded = lambda x: np.asarray(x.astype(jnp.bfloat16), np.float64)
    half = [x.astype(jnp.bfloat16) for x in (a, b)]
    result, back = jax.vjp(matmul, *half)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, rounded(a) @ rounded(b), rtol=1e-5, atol=1e-5)
    of_a, of_b = back(gradient)
    assert of_a.dtype == of_b.dtype == jnp.bfloat16
    sums = np.einsum("abk,abm->km", rounded(a), rounded(gradient))
    np.testing.assert_array_equal(of_a, jnp.asarray(rounded(gradient) @ rounded(b).T).astype(jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(of_b, np.float32), sums, rtol=2**-8)


def test_no_product_in_bfloat16_is_widened_before_it_is_taken(image):
    """Each one takes bfloat16 factors and gives float32: a processor's bfloat16 instructions need both."""
    half = dataclasses.replace(TINY, dtype="bfloat16")
    loss = lambda prompt, p, x: apply_vit(half, p, x, Injection(prompt={0: prompt})).cls.sum()
    lowered = jax.jit(jax.grad(loss)).lower(random(ROWS, 2, TINY.width), parameter_shapes(TINY), image)
    products = re.findall(r"stablehlo.dot_general.*: \((.*)\) -> (.*)", lowered.as_text())
    assert len(products) > 20
    for factors, result in products:
        assert factors.count("bf16") == 2 and result.count("xf32") == 1


def products_of(config, image, platform):
    """Pairs (factors, result) of the types of a prompt's gradient's products, lowered for a platform."""
    loss = lambda prompt, p, x: apply_vit(config, p, x, Injection(prompt={0: prompt})).cls.sum()
    arguments = random(ROWS, 2, TINY.width), parameter_shapes(TINY), image
    text = jax.export.export(jax.jit(jax.grad(loss)), platforms=(platform,))(*arguments).mlir_module()
    return re.findall(r"stablehlo.dot_general(.*): \(.*\) -> tensor<[\dx]*x(.*)>", text)


@pytest.mark.parametrize(("chip", "expected"), [("none", {"f32", "bf16"}), ("gpu", {"bf16"})])
def test_on_accelerators_products_return_what_is_rounded_next_in_bfloat16(image, chip, expected):
    """Those of the backward pass always; on a GPU with the kernel also those of the forward pass."""
    half = dataclasses.replace(TINY, dtype="bfloat16", kernel=AttentionKernel(chip))
    found = [result for _, result in products_of(half, image, "cuda")]
    scores = 2 * TINY.depth - 1  # of attention in float32, and their gradients, but for the first block's
    assert found.count("bf16") > 10
    assert set(found) == {"f32", "bf16"} and (found.count("f32") <= 2 * scores + 2) == (expected == {"bf16"})


@pytest.mark.long
def test_a_gpu_that_rounds_results_stays_as_close_to_float32(image):
    """In features and in a prompt's gradient, within the 3 % of the test of bfloat16 below."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ones(x.shape) if path[-1].key == "scale" else random(*x.shape, scale=0.1),
        parameter_shapes(TINY),
    )
    half = dataclasses.replace(TINY, dtype="bfloat16")
    prompt = random(ROWS, 3, TINY.width)

    def loss(config, prompt):
        features = apply_vit(config, params, image, Injection(prompt={0: prompt})).cls
        return jnp.sum(jnp.sin(features)), features

    exact, plain, rounded = (
        jax.jit(jax.grad(functools.partial(loss, config), has_aux=True))(prompt)
        for config in (TINY, half, dataclasses.replace(half, kernel=AttentionKernel("gpu")))
    )
    for expected, before, now in zip(exact, plain, rounded, strict=True):
        assert (before != now).any()
        assert jnp.linalg.norm(now - expected) < 0.03 * jnp.linalg.norm(expected)


def test_tf32_asks_for_it_in_every_product_and_leaves_a_cpu_exact(image):
    coarse = dataclasses.replace(TINY, dtype="tf32")
    found = products_of(coarse, image, "cuda")
    assert len(found) > 20
    assert all("precision = [HIGH, HIGH]" in options and result == "f32" for options, result in found)
    params = jax.tree.map(lambda x: random(*x.shape, scale=0.1), parameter_shapes(TINY))
    exact, same = (run(config, params, image, None, False).cls for config in (TINY, coarse))
    np.testing.assert_array_equal(exact, same)


def kept(config, image, remat=False):
    """The activations that the gradient of a prompt reads, but for the weights, as shapes and types."""
    params = jax.tree.map(lambda x: random(*x.shape, scale=0.1), parameter_shapes(config))
    weights = {x.shape for x in jax.tree.leaves(params)}

    def tokens(prompt):
        return apply_vit(config, params, image, Injection(prompt={0: prompt}), True, remat).tokens

    def backward(prompt):
        return jax.vjp(tokens, prompt)[1]

    leaves = jax.tree.leaves(jax.eval_shape(backward, random(2, config.width)))
    return [x for x in leaves if x.shape not in weights and x.size >= ROWS * TOKENS * config.width]


def test_what_the_backward_pass_keeps_of_activations_is_bfloat16(image):
    """Of the network's size there is nothing in float32: memory and its traffic are half as large."""
    config = dataclasses.replace(TINY, mlp=24)
    full, half = (kept(dataclasses.replace(config, dtype=dtype), image) for dtype in ("float32", "bfloat16"))
    assert {x.dtype.name for x in full} == {"float32"}
    hidden = [x.shape for x in full if x.shape[-1] == config.mlp and x.ndim == 3]
    assert len(hidden) == config.depth  # of GELU what enters it
    inputs = [x for x in half if x.shape == image.shape]  # none: the gradient does not reach the patches
    assert half and not inputs and {x.dtype.name for x in half} == {"bfloat16"}


def test_with_remat_the_backward_pass_keeps_what_enters_each_block(image):
    deep = dataclasses.replace(TINY, depth=4)
    without, with_remat = (kept(deep, image, remat) for remat in (False, True))
    assert {x.shape for x in with_remat} == {(ROWS, TOKENS, deep.width)}
    assert sum(x.size for x in with_remat) < 0.3 * sum(x.size for x in without)


@pytest.mark.long
def test_gradients_in_bfloat16_are_close_to_those_in_float32(image):
    params = jax.tree.map(lambda x: random(*x.shape, scale=0.1), parameter_shapes(TINY))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ones_like(x) if path[-1].key == "scale" else x, params
    )

    def gradient(dtype, put):
        def loss(prompt):
            injection = Injection(**put(prompt))
            config = dataclasses.replace(TINY, dtype=dtype)
            return jnp.sum(jnp.sin(apply_vit(config, params, image, injection).cls))

        return np.asarray(jax.jit(jax.grad(loss))(random_prompt))

    random_prompt = random(ROWS, 3, TINY.width)
    ways = {
        "prompt": lambda x: {"prompt": {0: x}},
        "prefix": lambda x: {"prefix": {0: Prefix(x, 2 * x)}},
        "tokens": lambda x: {"tokens": x},
        # small, or else the softmax saturates
        "lora": lambda x: {"lora": {0: Lora(*(0.3 * y for y in (x[0], x[1].T, x[1], x[2].T)))}},
    }
    for name, put in ways.items():
        exact, half = gradient("float32", put), gradient("bfloat16", put)
        assert np.linalg.norm(half - exact) < 0.03 * np.linalg.norm(exact), name
        assert half.dtype == np.float32


# ---- what adapters put in ----------------------------------------------------------------------------------


def test_prompts_for_all_images_alike_are_the_same_prompts_for_each(params, image):
    shared = {0: random(5, TINY.width), 1: random(2, TINY.width)}
    each = {block: jnp.tile(prompt, (ROWS, 1, 1)) for block, prompt in shared.items()}
    one, other = (run(TINY, params, image, Injection(prompt=prompt), False) for prompt in (shared, each))
    np.testing.assert_allclose(one.cls, other.cls, atol=1e-5)
    assert jnp.abs(one.cls - run(TINY, params, image, None, False).cls).max() > 0.01


def test_lanes_with_prompts_of_their_own_equal_a_loop_over_them(params):
    images, prompts = random(2, ROWS, 8, 8, 3), {block: random(2, 5, TINY.width) for block in (0, 1)}
    apply = vit_network(TINY).apply
    encode = lambda p, image, prompt: apply(p, image, Injection(prompt=prompt), True)[0].cls
    lanes = jax.jit(jax.vmap(encode, in_axes=(None, 0, 0)))
    loop = [
        run(TINY, params, images[i], Injection(prompt=jax.tree.map(lambda x, i=i: x[i], prompts)), False).cls
        for i in range(2)
    ]
    np.testing.assert_allclose(lanes(params, images, prompts), loop, atol=1e-5)


def test_a_prefix_is_more_keys_and_values(params, image):
    prefix = Prefix(*(random(ROWS, 3, TINY.width) for _ in range(2)))
    features = run(TINY, params, image, Injection(prefix={0: prefix}), False)
    expected = equations(params, image, prefix)[:, 0]
    np.testing.assert_allclose(features.cls, expected, atol=1e-4)
    assert np.abs(expected - equations(params, image)[:, 0]).max() > 0.01


def test_low_rank_updates_equal_a_changed_projection_of_queries_and_values(params, image):
    lora = Lora(*(random(*shape, scale=0.5) for shape in ((3, 16), (16, 3), (3, 16), (16, 3))))
    with jax.default_matmul_precision("highest"):
        change = jnp.concatenate(
            [(lora.b_q @ lora.a_q).T, jnp.zeros((16, 16)), (lora.b_v @ lora.a_v).T], axis=1
        )
    changed = jax.tree.map(lambda x: x, params)
    changed["block_01"]["attn"]["qkv"]["kernel"] += change
    adapted = run(TINY, params, image, Injection(lora={1: lora}), False).cls
    np.testing.assert_allclose(adapted, run(TINY, changed, image, None, False).cls, atol=1e-4)
    assert jnp.abs(adapted - run(TINY, params, image, None, False).cls).max() > 0.01


def test_the_order_of_the_kept_patches_does_not_matter(params, image):
    keep = jnp.array([[2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0]])
    kept = run(TINY, params, image, Injection(keep=keep), False).cls
    np.testing.assert_allclose(kept, run(TINY, params, image, None, False).cls, atol=1e-5)


def test_patches_that_are_not_kept_have_no_influence(params, image):
    keep = jnp.array([[0, 3]] * ROWS)  # the upper left and the lower right of four
    out = run(TINY, params, image, Injection(keep=keep), True)
    assert out.tokens.shape == (ROWS, 1 + 2, TINY.width)
    elsewhere = run(
        TINY, params, image.at[:, :4, 4:].set(9.0).at[:, 4:, :4].set(9.0), Injection(keep=keep), True
    )
    np.testing.assert_array_equal(out.tokens, elsewhere.tokens)
    here = run(TINY, params, image.at[:, :4, :4].set(9.0), Injection(keep=keep), True)
    assert jnp.abs(out.cls - here.cls).max() > 0.01


def products(jaxpr):
    """Shapes of all matrix products in a computation, nested calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(sorted(equation.outvars[0].aval.shape))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from products(getattr(inner, "jaxpr", inner))


def test_the_gradient_of_the_prompts_computes_no_gradient_of_the_frozen_weights():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    loss = lambda prompt, params, image: apply_vit(
        TINY, params, image, Injection(prompt={0: prompt})
    ).cls.sum()
    args = (shape(ROWS, 7, TINY.width), parameter_shapes(TINY), shape(ROWS, 8, 8, 3))
    kernels = {tuple(sorted(x.shape)) for x in jax.tree.leaves(args[1]) if len(x.shape) == 2} - {
        (TOKENS, TINY.width)
    }
    frozen = set(products(jax.make_jaxpr(jax.grad(loss))(*args).jaxpr))
    trained = set(products(jax.make_jaxpr(jax.grad(loss, argnums=1))(*args).jaxpr))
    assert len(frozen) > 5 and not kernels & frozen
    assert kernels <= trained


def test_a_norm_by_two_passes_is_the_norm_of_numpy_and_has_the_gradient_of_one_pass():
    x = random(5, 12) + 3
    scale, bias = random(12), random(12)
    exact = norm({"scale": scale, "bias": bias}, np.asarray(x, np.float64))

    def value(x, one_pass):
        return layer_norm(x, scale, bias, 1e-6, one_pass)

    def gradient(one_pass):
        return jax.grad(lambda x: jnp.sum(jnp.sin(value(x, one_pass))))(x)

    np.testing.assert_allclose(value(x, False), exact, atol=1e-5)
    np.testing.assert_allclose(gradient(False), gradient(True), rtol=1e-4, atol=1e-4)


def test_two_passes_keep_digits_that_one_pass_loses():
    x = random(5, 64) + 1000
    exact = np.asarray(x, np.float64).std(-1)
    one, two = (
        np.std(layer_norm(x, jnp.ones(64), jnp.zeros(64), 0.0, one_pass), axis=-1)
        for one_pass in (True, False)
    )
    assert np.all(exact > 0) and np.max(abs(two - 1)) < 1e-4 < np.max(abs(one - 1))


def test_fewer_operations_change_bfloat16_less_than_its_rounding(params, image):
    plain = dataclasses.replace(TINY, dtype="bfloat16")
    fewer = dataclasses.replace(plain, fewer_operations=True)
    exact, rounded, found = (run(c, params, image, None, False).cls for c in (TINY, plain, fewer))
    assert 0 < np.max(abs(found - rounded)) <= 1.5 * np.max(abs(rounded - exact))

    def ways(config):
        traced = str(jax.make_jaxpr(lambda image: apply_vit(config, params, image, None).cls)(image))
        # E[x]^2 is computed by the form of one pass alone, which bounds the variance by 0
        return "erf" in traced, " max 0.0" in traced

    assert (ways(plain), ways(fewer)) == ((True, True), (False, False))


def test_gelu_by_a_polynomial_is_gelu_for_bfloat16():
    x = jnp.linspace(-12, 12, 20_001)
    exact = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in np.asarray(x, float)])
    found = np.asarray(gelu_polynomial(x), float)
    assert np.max(abs(found - exact)) < 5e-5
    middle = np.abs(x) < 2
    assert np.max(abs(found - exact)[middle] / np.maximum(abs(exact[middle]), 1e-6)) < 2**-10
    slope = jax.vmap(jax.grad(gelu_polynomial))(x)
    exact_slope = jax.vmap(jax.grad(lambda value: jax.nn.gelu(value, approximate=False)))(x)
    np.testing.assert_allclose(slope, exact_slope, atol=1e-4)
