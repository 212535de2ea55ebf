"""ViTs with scaled layers, registers, normed queries and CLIP's norms give the outputs of their source
libraries, under each library's names (by golden/make_vits.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_golden import FOLDER, HEADS, agree

from fcljax.errors import InputError
from fcljax.models.vit import apply_vit
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
    "vit_moco": {},
}
PIXELS = {"clip": "clip", "dinov2": "imagenet", "registers": "imagenet", "moco": "imagenet"}
encode = jax.jit(apply_vit, static_argnums=0)


def load(name, folder=FOLDER, **options):
    return load_backbone(None, str(folder / f"{name}.safetensors"), None, options=WeightOptions(**options))


def quick(name, folder):
    """timm's files say in their config.json that the activation is OpenAI's."""
    (folder / "model.safetensors").write_bytes((FOLDER / f"{name}.safetensors").read_bytes())
    (folder / "config.json").write_text('{"architecture": "vit_base_patch16_clip_quickgelu_224"}')
    return load("model", folder, heads=HEADS)


@pytest.mark.parametrize("name", FILES)
def test_the_class_token_is_that_of_the_source_library(name, tmp_path):
    loaded = quick(name, tmp_path) if name.endswith("quickgelu") else load(name, heads=HEADS)
    assert {field: getattr(loaded.config, field) for field in FILES[name]} == FILES[name]
    found = encode(loaded.config, loaded.params, jnp.asarray(EXPECTED["image"])).cls
    agree(found, EXPECTED[f"{name}.safetensors/cls"])
    kind = next((kind for word, kind in PIXELS.items() if word in name), None)
    if kind and "timm_clip" not in name:
        assert (loaded.mean, loaded.std) == NORMALISE[kind]


@pytest.mark.parametrize("name", ["vit_facebook_registers", "vit_openai_clip", "vit_timm_qk_norm"])
def test_a_converted_file_is_the_same_network(name, tmp_path):
    out = tmp_path / "own.safetensors"
    convert(str(FOLDER / f"{name}.safetensors"), str(out), ConvertOptions(heads=HEADS))
    theirs, ours = load(name, heads=HEADS), load("own", tmp_path)
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
        ("rope_embeddings.inv_freq", "rotary positions"),
        ("blocks.0.mlp.w12.weight", "gated MLPs"),
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
