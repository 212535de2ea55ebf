"""ViTs with scaled layers, registers, normed queries and CLIP's norms give the outputs of their source
libraries, under each library's names (by golden/make_vits.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_runs import some
from test_golden import FOLDER, HEADS, agree

from fcljax.errors import InputError
from fcljax.models.vit import Injection, ViTConfig, apply_vit, patch_angles, rotate
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.dialects import translate
from fcljax.models.weights.pretrained import WeightOptions, load_backbone
from fcljax.pixels import NORMALISE

with np.load(FOLDER / "vits.npz", allow_pickle=False) as stored:
    EXPECTED = dict(stored)
# what is particular in each file
FILES = {
    "vit_timm_registers": {"layer_scale": True, "registers": 3},
    "vit_timm_qk_norm": {"layer_scale": True, "qk_norm": True},
    "vit_timm_clip": {"pre_norm": True, "epsilon": 1e-5},
    "vit_timm_clip_quickgelu": {"pre_norm": True, "activation": "quick_gelu"},
    "vit_huggingface_dinov2": {"layer_scale": True},
    "vit_huggingface_registers": {"layer_scale": True, "registers": 3},
    "vit_facebook_registers": {"layer_scale": True, "registers": 3},
    "vit_huggingface_clip": {"pre_norm": True, "activation": "quick_gelu", "epsilon": 1e-5},
    "vit_openai_clip": {"pre_norm": True, "activation": "quick_gelu"},
    "vit_huggingface_dinov3": {"rotary_base": 100.0, "registers": 3, "layer_scale": True, "epsilon": 1e-5},
    "vit_facebook_dinov3": {"rotary_base": 100.0, "registers": 3, "layer_scale": True, "epsilon": 1e-5},
    "vit_timm_dinov3": {"rotary_base": 100.0, "registers": 3, "layer_scale": True, "epsilon": 1e-5},
    "vit_moco": {},
}
PIXELS = {
    "clip": "clip",
    "dinov2": "imagenet",
    "dinov3": "imagenet",
    "registers": "imagenet",
    "moco": "imagenet",
}
encode = jax.jit(apply_vit, static_argnums=0)


def load(name, folder=FOLDER, **options):
    size = EXPECTED["image"].shape[1] if "dinov3" in name else None  # their files have no size of their own
    return load_backbone(None, str(folder / f"{name}.safetensors"), size, options=WeightOptions(**options))


def quick(name, folder):
    """timm's files say in their config.json that the activation is OpenAI's."""
    (folder / "model.safetensors").write_bytes((FOLDER / f"{name}.safetensors").read_bytes())
    (folder / "config.json").write_text('{"architecture": "vit_base_patch16_clip_quickgelu_224"}')
    return load("model", folder, heads=HEADS)


@pytest.mark.parametrize("name", some(FILES, [*FILES][::3]))
def test_the_class_token_is_that_of_the_source_library(name, tmp_path):
    loaded = quick(name, tmp_path) if name.endswith("quickgelu") else load(name, heads=HEADS)
    assert {field: getattr(loaded.config, field) for field in FILES[name]} == FILES[name]
    found = encode(loaded.config, loaded.params, jnp.asarray(EXPECTED["image"])).cls
    agree(found, EXPECTED[f"{name}.safetensors/cls"])
    kind = next((kind for word, kind in PIXELS.items() if word in name), None)
    if kind and "timm_clip" not in name:
        assert (loaded.mean, loaded.std) == NORMALISE[kind]


@pytest.mark.parametrize(
    "name", ["vit_facebook_registers", "vit_openai_clip", "vit_timm_qk_norm", "vit_facebook_dinov3"]
)
def test_a_converted_file_is_the_same_network(name, tmp_path):
    out = tmp_path / f"own_{name}.safetensors"
    convert(str(FOLDER / f"{name}.safetensors"), str(out), ConvertOptions(heads=HEADS))
    theirs, ours = load(name, heads=HEADS), load(f"own_{name}", tmp_path)
    assert (theirs.config, theirs.mean, theirs.std) == (ours.config, ours.mean, ours.std)
    jax.tree.map(np.testing.assert_array_equal, theirs.params, ours.params)


def test_names_that_transformers_wrote_before_version_5_are_the_same_network(tmp_path):
    new = safetensors.numpy.load_file(FOLDER / "vit_huggingface_registers.safetensors")
    words = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    words |= {"o_proj": "output.dense"}
    old = {}
    for name, x in new.items():
        part = next((part for part in words if part in name), None)
        old[name.replace(part, words[part]) if part else name] = x
    safetensors.numpy.save_file(old, tmp_path / "old.safetensors")
    jax.tree.map(
        np.testing.assert_array_equal,
        load("old", tmp_path, heads=HEADS).params,
        load("vit_huggingface_registers", heads=HEADS).params,
    )


def test_each_part_matters():
    """A network that forgets one of them gives other features."""
    loaded = load("vit_timm_registers", heads=HEADS)
    image, right = jnp.asarray(EXPECTED["image"]), EXPECTED["vit_timm_registers.safetensors/cls"]
    unscaled = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ones_like(x) if "ls" in str(path) else x, loaded.params
    )
    without = loaded.params | {"registers": jnp.zeros_like(loaded.params["registers"])}
    for wrong in (unscaled, without):
        assert jnp.abs(encode(loaded.config, wrong, image).cls - right).max() > 0.01


def test_networks_of_another_kind_are_refused_by_what_they_have():
    for name, says in (
        ("rope.freqs_cos", "rotary positions"),
        ("blocks.0.mlp.w12.weight", "gated MLPs"),
        ("layer.0.mlp.gate_proj.weight", "gated MLPs"),
    ):
        with pytest.raises(InputError, match=says):
            translate({name: np.zeros(1)})


def test_other_images_sizes_keep_registers_and_scales(tmp_path):
    loaded = load_backbone(
        None, str(FOLDER / "vit_facebook_registers.safetensors"), 24, options=WeightOptions(heads=HEADS)
    )
    image = jnp.zeros((1, 24, 24, 3))
    assert encode(loaded.config, loaded.params, image).cls.shape == (1, loaded.config.width)
    tensors = safetensors.numpy.load_file(FOLDER / "vit_facebook_registers.safetensors")
    np.testing.assert_array_equal(loaded.params["registers"], tensors["register_tokens"][0])


@pytest.mark.long
def test_rotary_positions_stay_with_their_patches():
    """An autoencoder's encoder reads some of the patches, in any order; prompts have no place."""
    loaded, rng = load("vit_timm_dinov3", heads=HEADS), np.random.default_rng(1)
    image, width = jnp.asarray(EXPECTED["image"][:2]), loaded.config.width
    keep = jnp.asarray([[3, 9, 0, 14, 7], [1, 2, 15, 8, 4]])
    prompt = jnp.asarray(rng.normal(size=(2, width)), jnp.float32)
    extra = Injection(prompt={0: prompt}, tokens=prompt)

    def cls(keep):
        return encode(loaded.config, loaded.params, image, extra._replace(keep=keep)).cls

    whole = encode(loaded.config, loaded.params, image, extra).cls
    np.testing.assert_allclose(cls(jnp.tile(jnp.arange(16), (2, 1))), whole, atol=1e-6)
    np.testing.assert_allclose(cls(keep[:, ::-1]), cls(keep), atol=1e-6)
    assert jnp.abs(cls(keep) - whole).max() > 1e-3
    assert isinstance(loaded.config, ViTConfig)
    shifted = dataclasses.replace(loaded.config, rotary_base=0.0)
    assert jnp.abs(encode(shifted, loaded.params, image, extra).cls - whole).max() > 1e-3


def test_a_rotation_turns_pairs_of_channels():
    """From Siméoni et al. 2025: channels i and i + half of a head are a point in a plane; those of rows come
    first. At base 16, with a head of 8, periods are 1 and 4 half images."""
    config = ViTConfig(image_size=4, patch=2, width=8, heads=1, rotary_base=16.0)
    angle = patch_angles(config)
    np.testing.assert_allclose(angle[1], np.tile([-np.pi, -np.pi / 4, np.pi, np.pi / 4], 2), rtol=1e-6)
    x = jnp.zeros((1, 1, 4, 8)).at[..., 1].set(1.0)
    turned = rotate(x, angle)[0, 0, 1]
    np.testing.assert_allclose(turned[1], np.cos(np.pi / 4), rtol=1e-6)
    np.testing.assert_allclose(turned[5], -np.sin(np.pi / 4), rtol=1e-6)
