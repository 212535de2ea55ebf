"""Other libraries' weights in their own names and layouts give their outputs (by golden/make_golden.py)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax.models.mae import decode, mask_by_noise, reconstruction_loss, sincos_positions
from fcljax.models.vit import Injection, apply_vit
from fcljax.models.weights.pretrained import WeightOptions, load_backbone

FOLDER = Path(__file__).parent / "golden"
HEADS = 2
CLASSIFIERS = ["timm.safetensors", "timm.npz", "deit.safetensors", "google.npz", "huggingface.safetensors"]
STUDENTS = ["dino.safetensors", "ibot.safetensors"]
AUTOENCODERS = ["mae.safetensors", "pmae.safetensors", "huggingface_mae.safetensors"]
FILES = [*CLASSIFIERS, *STUDENTS, *AUTOENCODERS, "huggingface_features.safetensors"]
OTHERS = ("torchvision_", "convnets.", "vit_", "vits.", "timm_convnext", "texts.", "lorm.")
encode = jax.jit(apply_vit, static_argnums=(0, 4))


@pytest.fixture(scope="module")
def expected():
    with np.load(FOLDER / "expected.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@functools.cache
def load(name, part="teacher"):
    return load_backbone(
        None, str(FOLDER / name), None, options=WeightOptions(heads=HEADS, decoder_heads=HEADS, part=part)
    )


def agree(found, expected, tolerance=1e-4):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * min(1.0, np.abs(expected).max()))


def features(loaded, expected):
    return encode(loaded.config, loaded.params, expected["image"], None, False).cls


def test_every_file_is_compared_with_what_its_library_made_of_it_and_is_small(expected):
    files = {
        path.name: path.stat().st_size
        for pattern in ("*.npz", "*.safetensors")
        for path in FOLDER.glob(pattern)
        # of test_convnets, test_golden_vits, test_lorm and the text encoders
        if not path.name.startswith(OTHERS)
    }
    assert (
        set(files) - {"expected.npz"}
        == {name.split("/")[0] for name in expected if "/" in name}
        == set(FILES)
    )
    assert max(files.values()) <= 200_000
    assert {name.split("/")[0] for name in expected if name.endswith("/logits")} == set(CLASSIFIERS)
    assert {name.split("/")[0] for name in expected if name.endswith("/prediction")} == set(AUTOENCODERS)


@pytest.mark.parametrize("name", FILES)
def test_the_class_token_is_that_of_the_source_library(name, expected):
    agree(features(load(name), expected), expected[f"{name}/cls"])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_logits_are_those_of_the_source_library(name, expected):
    loaded = load(name)
    agree(
        features(loaded, expected) @ loaded.head["kernel"] + loaded.head["bias"], expected[f"{name}/logits"]
    )


@pytest.mark.parametrize("name", [name for name in FILES if name not in CLASSIFIERS])
def test_what_is_no_classifier_has_no_head(name):
    assert load(name).head is None


@pytest.mark.parametrize("name", STUDENTS)
def test_the_student_of_a_self_supervised_checkpoint_can_be_had_instead_of_the_teacher(name, expected):
    student = features(load(name, "student"), expected)
    agree(student, expected[f"{name}/student_cls"])
    assert jnp.abs(student - expected[f"{name}/cls"]).max() > 0.1


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_the_predicted_pixels_are_those_of_the_source_library(name, expected):
    loaded = load(name)
    config, params = loaded.decoder[:2]
    masking = mask_by_noise(jnp.asarray(expected[f"{name}/noise"]), 0.75)
    np.testing.assert_array_equal(masking.masked, expected[f"{name}/masked"].astype(bool))
    latent = encode(
        loaded.config, loaded.params, expected["image"], Injection(keep=masking.keep), True
    ).tokens
    prediction = jax.jit(decode, static_argnums=0)(config, params, latent, masking.restore)
    agree(prediction, expected[f"{name}/prediction"])
    agree(
        reconstruction_loss(prediction, jnp.asarray(expected["image"]), masking.masked),
        expected[f"{name}/loss"],
    )


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_the_positions_of_a_published_decoder_are_the_fixed_ones(name):
    config, params = load(name).decoder[:2]
    np.testing.assert_allclose(params["pos"], sincos_positions(config.grid, config.width), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FILES if name not in AUTOENCODERS])
def test_only_an_autoencoder_has_a_decoder(name):
    assert load(name).decoder is None


def exchange(params, order):
    """The parameters with queries, keys and values of every block in another order."""
    changed = dict(params)
    for name in (name for name in params if name.startswith("block_")):
        qkv = params[name]["attn"]["qkv"]
        mixed = {
            leaf: jnp.concatenate([jnp.split(x, 3, axis=-1)[i] for i in order], axis=-1)
            for leaf, x in qkv.items()
        }
        changed[name] = params[name] | {"attn": params[name]["attn"] | {"qkv": mixed}}
    return changed


def interleave(params):
    """The parameters with the channels of the two heads dealt out in turn."""
    changed = dict(params)
    for name in (name for name in params if name.startswith("block_")):
        qkv = params[name]["attn"]["qkv"]
        deal = lambda x: jnp.swapaxes(x.reshape(*x.shape[:-1], 3, HEADS, -1), -1, -2).reshape(x.shape)
        changed[name] = params[name] | {"attn": params[name]["attn"] | {"qkv": jax.tree.map(deal, qkv)}}
    return changed


def flip(params):
    """The parameters with the patches' rows and columns exchanged."""
    size = round((params["patch"]["kernel"].shape[0] / 3) ** 0.5)
    kernel = params["patch"]["kernel"].reshape(size, size, 3, -1)
    return params | {"patch": params["patch"] | {"kernel": kernel.swapaxes(0, 1).reshape(3 * size**2, -1)}}


@pytest.mark.parametrize("name", FILES)
def test_wrong_mappings_that_no_shape_betrays_would_be_noticed(name, expected):
    loaded = load(name)
    for wrong in (
        exchange(loaded.params, (1, 0, 2)),
        exchange(loaded.params, (0, 2, 1)),
        interleave(loaded.params),
        flip(loaded.params),
    ):
        found = encode(loaded.config, wrong, expected["image"], None, False).cls
        assert jnp.abs(found - expected[f"{name}/cls"]).max() > 0.1


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_the_same_mistakes_in_a_decoder_would_be_noticed(name, expected):
    config, params = load(name).decoder[:2]
    latent = jax.random.normal(jax.random.key(0), (1, 1 + config.grid**2, config.encoder_width))
    restore = jnp.arange(config.grid**2)[None]
    pixels = lambda params: jax.jit(decode, static_argnums=0)(config, params, latent, restore)
    for wrong in (exchange(params, (1, 0, 2)), exchange(params, (0, 2, 1)), interleave(params)):
        assert jnp.abs(pixels(wrong) - pixels(params)).max() > 0.1
