"""Masking, a masked autoencoder's decoder and its loss: counts and closed forms, and what must not matter."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_vit import products

from fcljax.adapters.prompts import init_prompts
from fcljax.errors import InputError
from fcljax.federated.communication import count_scalars
from fcljax.models.mae import (
    DecoderConfig,
    decode,
    decoder_shapes,
    init_decoder,
    mask_by_noise,
    patchify,
    random_mask,
    reconstruction_loss,
    sincos_positions,
    unpatchify,
)
from fcljax.models.shapes import VITS
from fcljax.models.vit import Block, Injection, ViTConfig, apply_vit, parameter_shapes

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)
SMALL = DecoderConfig(image_size=8, patch=4, encoder_width=16, width=12, depth=2, heads=2, mlp=20)
ROWS, PATCHES, PIXELS = 3, TINY.grid**2, 3 * TINY.patch**2
encode = jax.jit(apply_vit, static_argnums=(0, 4))
run = jax.jit(decode, static_argnums=0)
draw_mask = jax.jit(random_mask, static_argnums=(1, 2, 3))
loss = jax.jit(reconstruction_loss)
draw = np.random.default_rng(0).normal


def random(*shape, scale=1.0):
    return jnp.asarray(draw(0, scale, shape), jnp.float32)


@pytest.fixture(scope="module")
def encoder():
    return jax.tree.map(lambda x: random(*x.shape, scale=0.3), parameter_shapes(TINY))


@pytest.fixture(scope="module")
def decoder():
    return jax.tree.map(lambda x: random(*x.shape, scale=0.3), decoder_shapes(SMALL))


@pytest.fixture(scope="module")
def image():
    return random(ROWS, 8, 8, 3)


@pytest.fixture(scope="module")
def masking():
    return draw_mask(jax.random.key(0), ROWS, PATCHES, 0.5)


@pytest.fixture(scope="module")
def latent():
    return random(ROWS, 1 + PATCHES // 2, TINY.width)


# ---- sizes -------------------------------------------------------------------------------------------------


def test_the_decoder_has_the_published_number_of_parameters():
    shapes = decoder_shapes(DecoderConfig())
    parts = {name: count_scalars(tree) for name, tree in shapes.items()}
    assert {name: parts[name] for name in ("embed", "mask", "block_00", "norm", "predict", "pos")} == {
        "embed": 393_728,
        "mask": 512,
        "block_00": 3_152_384,
        "norm": 1_024,
        "predict": 393_984,
        "pos": 100_864,
    }
    assert count_scalars(shapes) - parts["pos"] == 26_008_320


def test_prompts_and_latents_of_pmae_have_the_published_sizes():
    assert count_scalars(parameter_shapes(VITS["vit_b16"])) == 85_798_656
    prompts = jax.eval_shape(lambda key: init_prompts(key, 1, 5, 20, 768)[0], jax.random.key(0))
    reconstructive = jax.eval_shape(
        lambda key: init_prompts(key, 1, 1, 5, DecoderConfig().width)[0], jax.random.key(0)
    )
    head = 200 * (768 + 1)
    assert (prompts.shape, count_scalars(prompts)) == ((5, 20, 768), 76_800)
    assert (reconstructive.shape, count_scalars(reconstructive)) == ((1, 5, 512), 2_560)
    assert count_scalars((prompts, reconstructive)) + head == 233_160


def test_an_uploaded_latent_is_50_tokens_and_an_order_of_196_patches():
    masking = jax.eval_shape(lambda key: random_mask(key, 2, 196, 0.75), jax.random.key(0))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    b16 = VITS["vit_b16"]
    run = lambda params, image, keep: apply_vit(b16, params, image, Injection(keep=keep), full=True).tokens
    latent = jax.eval_shape(run, parameter_shapes(b16), shape(2, 224, 224, 3), masking.keep)
    assert latent.shape == (2, 50, 768) and math.prod(latent.shape[1:]) == 38_400
    assert masking.keep.shape == (2, 49) and masking.restore.shape == masking.masked.shape == (2, 196)
    config, prompt = DecoderConfig(), shape(5, 512)
    out = jax.eval_shape(
        functools.partial(decode, config), decoder_shapes(config), latent, masking.restore, prompt
    )
    assert out.shape == (2, 196, 768)


# ---- masking -----------------------------------------------------------------------------------------------


def test_the_patches_with_the_least_noise_stay():
    masking = jax.jit(mask_by_noise, static_argnums=1)(jnp.array([[0.3, 0.1, 0.4, 0.2]]), 0.5)
    np.testing.assert_array_equal(masking.keep, [[1, 3]])
    np.testing.assert_array_equal(masking.restore, [[2, 0, 3, 1]])
    np.testing.assert_array_equal(masking.masked, [[True, False, True, False]])


def test_49_of_196_patches_stay_and_the_rest_is_masked():
    masking = draw_mask(jax.random.key(0), 8, 196, 0.75)
    assert masking.keep.shape == (8, 49) and (masking.masked.sum(axis=1) == 147).all()
    for keep, restore, masked in zip(*jax.tree.map(np.asarray, masking), strict=True):
        assert set(keep) == set(np.flatnonzero(~masked)) and sorted(restore) == list(range(196))
        np.testing.assert_array_equal(restore[keep], np.arange(49))
    assert (np.asarray(masking.keep) != np.asarray(masking.keep[:1])).any(axis=1)[1:].all()


def test_ratio_0_masks_nothing_and_ratio_1_everything():
    none, everything = (draw_mask(jax.random.key(0), ROWS, 64, ratio) for ratio in (0.0, 1.0))
    assert not none.masked.any() and everything.masked.all()
    assert none.keep.shape == (ROWS, 64) and everything.keep.shape == (ROWS, 0)
    assert (none.restore != jnp.arange(64)).any(axis=1).all()


def test_each_patch_is_masked_at_the_asked_rate():
    masked = draw_mask(jax.random.key(1), 4000, 16, 0.75).masked
    np.testing.assert_allclose(masked.mean(axis=0), 0.75, atol=5 * math.sqrt(0.75 * 0.25 / 4000))


def test_the_mask_of_a_sample_depends_on_its_own_key_alone():
    keys = jax.random.split(jax.random.key(0), 5)
    together, reordered = draw_mask(keys, 5, 16, 0.5), draw_mask(keys[jnp.array([3, 0])], 2, 16, 0.5)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[jnp.array([3, 0])], b), together, reordered)
    long, short = (draw_mask(jax.random.key(0), batch, 16, 0.5) for batch in (5, 2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:2], b), long, short)


@pytest.mark.parametrize("ratio", [-0.1, 75.0])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(
        InputError, match=rf"mask_ratio: {ratio} is not in \[0, 1\]; nearest: {int(ratio > 1)}"
    ):
        random_mask(jax.random.key(0), 1, 4, ratio)


# ---- patches and positions ---------------------------------------------------------------------------------


def test_a_patch_lists_rows_then_columns_then_channels():
    names = np.array(
        [[["R00", "G00", "B00"], ["R01", "G01", "B01"]], [["R10", "G10", "B10"], ["R11", "G11", "B11"]]]
    )
    order = np.asarray(patchify(jnp.arange(12.0).reshape(1, 2, 2, 3), 2))[0, 0].astype(int)
    assert list(names.ravel()[order]) == [
        "R00",
        "G00",
        "B00",
        "R01",
        "G01",
        "B01",
        "R10",
        "G10",
        "B10",
        "R11",
        "G11",
        "B11",
    ]


def test_patches_are_numbered_row_by_row():
    image = jnp.zeros((1, 6, 6, 3)).at[0, 2:4, 4:6].set(1.0)  # row 1, column 2 of 3 x 3
    np.testing.assert_array_equal(patchify(image, 2)[0].any(axis=1), np.arange(9) == 5)


def test_unpatchify_puts_together_what_patchify_took_apart(image):
    np.testing.assert_array_equal(unpatchify(patchify(image, 4), 4), image)
    patches = random(2, 9, 12)
    np.testing.assert_array_equal(patchify(unpatchify(patches, 2), 2), patches)


def test_the_encoder_embeds_the_pixels_in_the_order_of_patchify(encoder, image):
    embedded = patchify(image, 4) @ encoder["patch"]["kernel"] + encoder["patch"]["bias"]
    tap = encode(TINY, encoder, image, None, True).taps["embed"]
    np.testing.assert_allclose(tap[:, 1:], embedded + encoder["pos"][1:], atol=1e-5)


def test_positions_encode_the_column_first_and_then_the_row():
    s, c, small, near = math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)
    expected = [
        [0] * 8,
        [0, 0, 1, 1] * 2,
        [s, small, c, near, 0, 0, 1, 1],
        [0, 0, 1, 1, s, small, c, near],
        [s, small, c, near] * 2,
    ]
    np.testing.assert_allclose(sincos_positions(2, 8), expected, atol=1e-7)


def test_positions_of_the_published_decoder():
    position = np.asarray(sincos_positions(14, 512))
    assert position.shape == (197, 512) and not position[0].any() and len(np.unique(position, axis=0)) == 197
    row, column = 3, 11
    token = position[1 + 14 * row + column]
    for i in (0, 7, 127):
        w = 10000 ** (-i / 128)
        found = [token[i], token[128 + i], token[256 + i], token[384 + i]]
        np.testing.assert_allclose(
            found,
            [math.sin(column * w), math.cos(column * w), math.sin(row * w), math.cos(row * w)],
            atol=1e-6,
        )


def test_a_width_that_cannot_hold_two_sines_and_cosines_is_refused():
    with pytest.raises(InputError, match="decoder width: 510 is not a multiple of 4; nearest: 512"):
        sincos_positions(2, 510)


@pytest.mark.long
def test_a_new_decoder_is_drawn_as_in_mae():
    wide = dataclasses.replace(SMALL, width=64, depth=1, mlp=96)
    params = jax.jit(init_decoder, static_argnums=1)(jax.random.key(0), wide)
    jax.tree.map(
        lambda x, shape: np.testing.assert_equal((x.shape, x.dtype), (shape.shape, shape.dtype)),
        params,
        decoder_shapes(wide),
    )
    np.testing.assert_array_equal(params["pos"], sincos_positions(2, 64))
    assert 0.01 < params["mask"].std() < 0.03
    block = params["block_00"]
    assert (block["norm1"]["scale"] == 1).all() and not block["norm1"]["bias"].any()
    for dense in (
        params["embed"],
        params["predict"],
        block["attn"]["qkv"],
        block["attn"]["proj"],
        block["fc1"],
        block["fc2"],
    ):
        bound = math.sqrt(6 / sum(dense["kernel"].shape))
        assert 0.95 * bound < jnp.abs(dense["kernel"]).max() <= bound and not dense["bias"].any()
    other = jax.jit(init_decoder, static_argnums=1)(jax.random.key(1), wide)
    assert (other["embed"]["kernel"] != params["embed"]["kernel"]).all() and (
        other["mask"] != params["mask"]
    ).all()


# ---- encoding and decoding ---------------------------------------------------------------------------------


def test_all_patches_in_random_order_give_the_same_class_token(encoder, image):
    shuffled = draw_mask(jax.random.key(3), ROWS, PATCHES, 0.0)
    out = encode(TINY, encoder, image, Injection(keep=shuffled.keep), True)
    plain = encode(TINY, encoder, image, None, True)
    assert (shuffled.keep != jnp.arange(PATCHES)).any()
    np.testing.assert_allclose(out.cls, plain.cls, atol=1e-5)
    restored = jnp.take_along_axis(out.tokens[:, 1:], shuffled.restore[..., None], axis=1)
    np.testing.assert_allclose(restored, plain.tokens[:, 1:], atol=1e-5)


def blocks_of(params, x, prompt):
    """What follows a decoder's positions, by block: prompts join before the first and go after it."""
    config = ViTConfig(SMALL.image_size, SMALL.patch, SMALL.width, SMALL.depth, SMALL.heads, SMALL.mlp)
    x = jnp.concatenate([x, jnp.tile(prompt, (ROWS, 1, 1))], axis=1)
    for i in range(SMALL.depth):
        x = Block(config).apply({"params": params[f"block_{i:02d}"]}, x)[:, : 1 + PATCHES]
    return x


def test_mask_tokens_stand_where_patches_are_missing_and_prompts_join_the_first_block(decoder, latent):
    restore = jnp.array([[2, 0, 3, 1]] * ROWS)  # of [v0, v1, M, M] this makes [M, v0, M, v1]
    embedded = latent @ decoder["embed"]["kernel"] + decoder["embed"]["bias"]
    mask = jnp.broadcast_to(decoder["mask"], (ROWS, SMALL.width))
    cls, v0, v1 = (embedded[:, i] for i in range(3))
    tokens = jnp.stack([cls, mask, v0, mask, v1], axis=1) + decoder["pos"]
    prompt = random(5, SMALL.width)
    for given, appended in ((None, prompt[:0]), (prompt, prompt)):
        x = jax.jit(blocks_of)(decoder, tokens, appended)
        centred = x - x.mean(axis=-1, keepdims=True)
        x = (
            centred
            / jnp.sqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-6)
            * decoder["norm"]["scale"]
        )
        expected = (x + decoder["norm"]["bias"])[:, 1:] @ decoder["predict"]["kernel"] + decoder["predict"][
            "bias"
        ]
        np.testing.assert_allclose(run(SMALL, decoder, latent, restore, given), expected, atol=1e-4)


def test_the_order_in_which_visible_patches_are_stored_does_not_matter(decoder, latent, masking):
    swapped = latent[:, jnp.array([0, 2, 1])]
    restore = jnp.where(masking.restore < 2, 1 - masking.restore, masking.restore)
    np.testing.assert_allclose(
        run(SMALL, decoder, swapped, restore), run(SMALL, decoder, latent, masking.restore), atol=1e-5
    )


def test_a_prompt_changes_pixels_and_not_their_number(decoder, latent, masking):
    prompted, plain = (
        run(SMALL, decoder, latent, masking.restore, prompt) for prompt in (random(5, SMALL.width), None)
    )
    assert prompted.shape == plain.shape == (ROWS, PATCHES, PIXELS)
    assert jnp.abs(prompted - plain).max() > 0.01


def test_prompts_have_no_order_and_may_be_given_per_image(decoder, latent, masking):
    prompt = random(5, SMALL.width)
    expected = run(SMALL, decoder, latent, masking.restore, prompt)
    np.testing.assert_allclose(
        run(SMALL, decoder, latent, masking.restore, prompt[::-1]), expected, atol=1e-5
    )
    each = jnp.stack([prompt, random(5, SMALL.width), prompt])
    found = run(SMALL, decoder, latent, masking.restore, each)
    np.testing.assert_allclose(found[::2], expected[::2], atol=1e-5)
    assert jnp.abs(found[1] - expected[1]).max() > 0.01


@pytest.fixture(scope="module")
def predict(encoder, decoder, masking):
    """Encode and decode."""

    def predict(image, prompt):
        latent = apply_vit(TINY, encoder, image, Injection(keep=masking.keep), full=True).tokens
        return decode(SMALL, decoder, latent, masking.restore, prompt)

    return jax.jit(predict)


def test_samples_do_not_see_each_other(predict, image):
    prompt = random(ROWS, 5, SMALL.width)
    poisoned = predict(image.at[1].set(jnp.nan), prompt.at[1].set(jnp.nan))
    np.testing.assert_array_equal(poisoned[::2], predict(image, prompt)[::2])
    assert jnp.isnan(poisoned[1]).all()


def test_hidden_pixels_do_not_reach_the_prediction_and_visible_ones_do(predict, image, masking):
    prompt = random(ROWS, 5, SMALL.width)
    expected, patches = predict(image, prompt), patchify(image, 4)
    hidden = jnp.where(masking.masked[..., None], 9.0, patches)
    np.testing.assert_array_equal(predict(unpatchify(hidden, 4), prompt), expected)
    visible = jnp.where(masking.masked[..., None], patches, 9.0)
    assert (jnp.abs(predict(unpatchify(visible, 4), prompt) - expected).max(axis=(1, 2)) > 0.01).all()


@pytest.mark.long
def test_bfloat16_is_close_to_float32_and_gives_float32_pixels(latent, masking):
    params = init_decoder(jax.random.key(0), SMALL)
    exact = run(SMALL, params, latent, masking.restore)
    half = run(dataclasses.replace(SMALL, dtype="bfloat16"), params, latent, masking.restore)
    assert half.dtype == jnp.float32 and (half != exact).any()
    np.testing.assert_allclose(half, exact, atol=0.05)


# ---- the loss ----------------------------------------------------------------------------------------------


def with_errors(errors):
    """Predictions whose squared error is the given one in all pixels of a 2 x 2 patch: [batch][patches]."""
    image = random(len(errors), 4, 4, 3)
    return patchify(image, 2) + jnp.sqrt(jnp.asarray(errors, jnp.float32))[..., None], image


@pytest.mark.parametrize(
    ("masked", "expected"),
    [([1, 0, 0, 0], 4), ([1, 1, 0, 0], 52), ([0, 0, 1, 1], 0.5), ([1, 1, 1, 1], 26.25), ([0, 0, 0, 0], 0)],
)
def test_the_loss_is_the_mean_over_hidden_patches(masked, expected):
    prediction, image = with_errors([[4, 100, 0, 1]])
    np.testing.assert_allclose(loss(prediction, image, jnp.array([masked], bool)), expected, rtol=1e-5)


def test_the_loss_pools_the_patches_of_the_whole_batch():
    prediction, image = with_errors([[4, 7, 7, 7], [10, 10, 7, 7]])
    masked = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0]], bool)
    np.testing.assert_allclose(loss(prediction, image, masked), 24 / 3, rtol=1e-5)


def test_the_error_of_a_patch_is_the_mean_over_its_pixels():
    prediction, image = with_errors([[0, 0, 0, 0]])
    masked = jnp.array([[0, 1, 0, 0]], bool)
    np.testing.assert_allclose(loss(prediction.at[0, 1, 5].add(6.0), image, masked), 36 / 12, rtol=1e-5)


def test_rows_of_padding_are_inert_whatever_they_hold():
    prediction, image = with_errors([[4, 100, 0, 1], [1, 1, 1, 1]])
    masked, row = jnp.ones((2, 4), bool), jnp.array([True, False])
    prediction, image = prediction.at[1].set(jnp.nan), image.at[1].set(jnp.inf)
    value, gradient = jax.jit(jax.value_and_grad(reconstruction_loss))(prediction, image, masked, row)
    np.testing.assert_allclose(value, 26.25, rtol=1e-5)
    assert jnp.isfinite(gradient).all() and not gradient[1].any() and gradient[0].any()
    assert loss(prediction, image, masked, jnp.zeros(2, bool)) == 0


def test_only_hidden_patches_have_a_gradient():
    prediction, image = with_errors([[4, 9, 1, 1]])
    masked = jnp.array([[0, 1, 0, 0]], bool)
    gradient = jax.jit(jax.grad(reconstruction_loss))(prediction, image, masked)[0]
    np.testing.assert_allclose(gradient[1], 2 * 3 / 12, rtol=1e-4)
    assert not gradient[jnp.array([0, 2, 3])].any()


def restore_loss(prompt, decoder, encoder, image, masking):
    latent = apply_vit(TINY, encoder, image, Injection(keep=masking.keep), full=True).tokens
    return reconstruction_loss(decode(SMALL, decoder, latent, masking.restore, prompt), image, masking.masked)


learn = jax.jit(jax.value_and_grad(restore_loss))


@pytest.mark.long
def test_a_decoder_prompt_learns_alone(encoder, decoder, image, masking):
    prompt = random(5, SMALL.width)
    value, gradient = learn(prompt, decoder, encoder, image, masking)
    assert gradient.shape == prompt.shape and (jnp.abs(gradient).max(axis=1) > 1e-5).all()
    assert learn(prompt - 0.05 * gradient, decoder, encoder, image, masking)[0] < value
    args = (prompt, decoder, encoder, image, masking)
    shapes = {
        tuple(sorted(x.shape))
        for x in jax.tree.leaves((decoder, encoder))
        if x.ndim == 2 and x.shape[0] != 1 + PATCHES
    }
    # The fused projection is used in two parts, queries apart from keys and values.
    kernels = shapes - {(12, 36), (16, 48)} | {(w, n * w) for w in (12, 16) for n in (1, 2)}
    alone = set(products(jax.make_jaxpr(jax.grad(restore_loss))(*args).jaxpr))
    everything = set(products(jax.make_jaxpr(jax.grad(restore_loss, argnums=(1, 2)))(*args).jaxpr))
    assert len(alone) > 5 and not kernels & alone
    assert kernels <= everything


def test_the_gradient_of_the_prompt_is_the_slope_of_the_loss(encoder, decoder, image, masking):
    prompt, way = random(5, SMALL.width), random(5, SMALL.width, scale=0.01)
    slope = learn(prompt, decoder, encoder, image, masking)[1]
    rise = (
        learn(prompt + way, decoder, encoder, image, masking)[0]
        - learn(prompt - way, decoder, encoder, image, masking)[0]
    )
    np.testing.assert_allclose((slope * way).sum(), rise / 2, rtol=0.02, atol=1e-6)


@pytest.mark.long
def test_positions_are_fixed_and_everything_else_of_a_decoder_learns(encoder, decoder, image, masking):
    gradient = jax.jit(jax.grad(restore_loss, argnums=1))(None, decoder, encoder, image, masking)
    assert not gradient.pop("pos").any()
    assert all(x.any() for x in jax.tree.leaves(gradient))
