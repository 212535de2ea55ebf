"""From other libraries' names to a network: which it is, what it says, what is assumed, what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import vit_files as files
from flax.traverse_util import flatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vit_files import TINY, TINY_DECODER, same, wrapped

from fcljax.errors import InputError
from fcljax.models.mae import decoder_shapes, sincos_positions
from fcljax.models.shapes import VITS
from fcljax.models.vit import ViTConfig, apply_vit, parameter_shapes
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.pretrained import WeightOptions, interpolate_positions, load_backbone
from fcljax.pixels import NORMALISE

ENCODER, DECODER, HEAD = files.encoder(), files.decoder(), files.head()
TEACHER, STUDENT = ENCODER, files.encoder(seed=9)
TIMM = files.timm(ENCODER)
DINO = (
    wrapped("teacher.backbone.", files.timm(TEACHER))
    | wrapped("student.module.backbone.", files.timm(STUDENT))
    | wrapped("teacher.", files.projection_head())
    | wrapped("student.module.", files.projection_head())
    | {"dino_loss.center": np.zeros((1, 5), np.float32)}
)
IBOT = DINO | {"student.module.backbone.masked_embed": np.zeros((1, 12), np.float32)}
IBOT |= {
    "teacher.head.mlp2.weight": np.zeros((2, 2), np.float32),
    "ibot_loss.center2": np.zeros((1, 1, 5), np.float32),
}
MAE = files.timm(ENCODER) | files.mae_decoder(DECODER)
PMAE = wrapped("model.encoder.", files.timm(ENCODER)) | wrapped("model.decoder.", files.mae_decoder(DECODER))
HF_MAE = files.huggingface(ENCODER) | files.huggingface_decoder(DECODER)

# name -> tensors, the mapping they should be found to have, and whether ImageNet's constants are likely
KINDS = {
    "ours": (files.native(ENCODER, HEAD), "fcljax", False),
    "timm": (files.timm(ENCODER, HEAD), "timm", False),
    "timm headless": (TIMM, "timm", False),
    "deit": (wrapped("model.", files.timm(ENCODER, HEAD)), "timm", True),
    "dino": (DINO, "timm", True),
    "dino backbone": (wrapped("module.backbone.", TIMM), "timm", True),
    "ibot": (IBOT, "timm", True),
    "ibot teacher": (wrapped("state_dict.", TIMM), "timm", True),
    "mae": (MAE, "mae", True),
    "mae encoder": (TIMM | {"mask_token": np.zeros((1, 1, 16), np.float32)}, "timm", True),
    "pmae": (PMAE, "mae", True),
    "huggingface": (files.huggingface(ENCODER, HEAD), "huggingface", False),
    "huggingface features": (files.huggingface(ENCODER, prefix=""), "huggingface", False),
    "huggingface 5": (files.huggingface(ENCODER, HEAD, version=5), "huggingface", False),
    "huggingface mae": (HF_MAE, "huggingface", True),
    "huggingface mae 5": (
        files.huggingface(ENCODER) | files.huggingface_decoder(DECODER, "decoder_encoder.layer"),
        "huggingface",
        True,
    ),
    "huggingface mae state": (
        files.huggingface(ENCODER, version=5) | files.huggingface_decoder(DECODER, version=5),
        "huggingface",
        True,
    ),
    "google": (files.google(ENCODER, HEAD), "google", False),
}
WITH_HEAD = {"ours", "timm", "deit", "huggingface", "huggingface 5", "google"}


def save(path, tensors, metadata=None):
    return str(files.save(path, tensors, metadata))


@pytest.fixture
def load(tmp_path):
    """Tensors -> the network, from a file."""

    def load(
        tensors,
        name=None,
        size=None,
        *,
        suffix=".safetensors",
        metadata=None,
        heads=2,
        dtype="float32",
        **options,
    ):
        heads = None if name else heads
        path = save(tmp_path / f"a{suffix}", tensors, metadata)
        return load_backbone(name, path, size, dtype, options=WeightOptions(heads=heads, **options))

    return load


@pytest.fixture
def refuses(load):
    def refuses(tensors, message, **options):
        with pytest.raises(InputError, match=message) as caught:
            load(tensors, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refuses


@pytest.fixture
def known(monkeypatch):
    """The tiny network under a name of its own."""
    monkeypatch.setitem(VITS, "tiny", TINY)


EPSILON = {"huggingface": 1e-12}  # of LayerNorms, where nothing else is said; all others have 1e-6


# ---- whose names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_names_gives_the_same_network(load, kind):
    tensors, mapping, imagenet = KINDS[kind]
    loaded = load(tensors)
    assert loaded.config == dataclasses.replace(TINY, epsilon=EPSILON.get(mapping, 1e-6))
    assert loaded.mapping == mapping
    same(loaded.params, jax.tree.map(jnp.asarray, ENCODER))
    assert (loaded.head is not None) == (kind in WITH_HEAD)
    if loaded.head is not None:
        same(loaded.head, jax.tree.map(jnp.asarray, HEAD))
        assert any("head of 7 classes is not part of the backbone" in note for note in loaded.notes)
    assert (loaded.mean, loaded.std) == NORMALISE["imagenet" if imagenet else "half"]
    assert any(f"assumed ({'imagenet' if imagenet else 'half'})" in note for note in loaded.notes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "mae" in kind and kind != "mae encoder"])
def test_a_masked_autoencoder_comes_with_its_decoder(load, kind):
    config, params = load(KINDS[kind][0]).decoder[:2]
    assert config == dataclasses.replace(TINY_DECODER, epsilon=EPSILON.get(KINDS[kind][1], 1e-6))
    same(params, jax.tree.map(jnp.asarray, DECODER))
    same(jax.tree.map(jnp.shape, params), jax.tree.map(lambda x: x.shape, decoder_shapes(config)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "mae" not in kind or kind == "mae encoder"])
def test_no_other_network_has_a_decoder(load, kind):
    assert load(KINDS[kind][0]).decoder is None


@pytest.mark.parametrize("kind", ["timm", "google", "huggingface", "ours", "mae", "dino"])
def test_npz_and_safetensors_give_the_same_network(load, kind):
    one, other = (load(KINDS[kind][0], suffix=suffix) for suffix in (".npz", ".safetensors"))
    assert one._replace(params=0, head=0, decoder=0, digest="") == other._replace(
        params=0, head=0, decoder=0, digest=""
    )
    same((one.params, one.head), (other.params, other.head))


def test_the_student_is_taken_where_it_is_asked_for(load):
    for tensors in (DINO, IBOT):
        teacher, student = (load(tensors, part=part) for part in ("teacher", "student"))
        same(teacher.params, jax.tree.map(jnp.asarray, TEACHER))
        same(student.params, jax.tree.map(jnp.asarray, STUDENT))
        assert (
            "the teacher's weights were taken" in teacher.notes
            and "the student's weights were taken" in student.notes
        )


def test_a_part_that_is_not_there_is_refused_with_the_one_that_is(refuses):
    student = {name: x for name, x in DINO.items() if not name.startswith("teacher.")}
    refuses(student, "part: the checkpoint has no teacher; choose 'student'")
    refuses(DINO, "part: unknown value 'techer'; did you mean 'teacher'", part="techer")


def test_what_lies_beside_a_backbone_is_named_in_one_note(load):
    note = "left out, being no part of the backbone: "
    count = len(files.timm(STUDENT)) + len(files.projection_head())
    assert note + f"student ({count}), centers of the loss (1), projection head (4)" in load(DINO).notes
    assert note + "mask_token (1)" in load(KINDS["mae encoder"][0]).notes
    pooler = {
        "pooler.dense.weight": np.ones((12, 12), np.float32),
        "pooler.dense.bias": np.ones(12, np.float32),
    }
    assert note + "pooler (2)" in load(KINDS["huggingface features"][0] | pooler).notes
    extra = {"optimizer.state.0": np.ones(3, np.float32), "epoch": np.array(3)}
    assert note + "optimizer and schedule (2)" in load(KINDS["deit"][0] | extra).notes


@pytest.mark.parametrize("kind", ["timm", "google"])
def test_a_head_that_does_not_read_the_class_token_is_left_out(load, kind):
    name = {"timm": "pre_logits.fc.weight", "google": "pre_logits/kernel"}[kind]
    loaded = load(KINDS[kind][0] | {name: np.ones((12, 12), np.float32)})
    assert loaded.head is None
    assert any("behind pre_logits is left out" in note for note in loaded.notes)


def test_the_packaged_network_needs_no_file():
    loaded = load_backbone("vit_micro", None, None)
    assert loaded.config == VITS["vit_micro"] == load_backbone(None, None, None).config
    same(
        jax.tree.map(jnp.shape, loaded.params),
        jax.tree.map(lambda x: x.shape, parameter_shapes(loaded.config)),
    )
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(loaded.params))
    assert (loaded.mapping, loaded.mean, loaded.std, loaded.notes) == ("fcljax", (0.5,) * 3, (0.5,) * 3, ())


# ---- layouts -----------------------------------------------------------------------------------------------


def test_linear_weights_act_as_torchs_do(load):
    params, x = load(TIMM).params, np.random.default_rng(0).normal(size=(3, TINY.width)).astype(np.float32)
    for ours, theirs in (
        (params["block_01"]["attn"]["qkv"], "blocks.1.attn.qkv"),
        (params["block_00"]["fc1"], "blocks.0.mlp.fc1"),
    ):
        torch = x @ TIMM[f"{theirs}.weight"].T + TIMM[f"{theirs}.bias"]
        np.testing.assert_allclose(x @ ours["kernel"] + ours["bias"], torch, rtol=1e-5, atol=1e-5)


def test_the_patch_kernel_acts_as_torchs_convolution(load):
    image = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    torch = jax.lax.conv(image.transpose(0, 3, 1, 2), TIMM["patch_embed.proj.weight"], (4, 4), "VALID")
    torch = (
        torch.reshape(2, TINY.width, 4).transpose(0, 2, 1)
        + TIMM["patch_embed.proj.bias"]
        + TIMM["pos_embed"][:, 1:]
    )
    embedded = jax.jit(lambda params, image: apply_vit(TINY, params, image).taps["embed"])(
        load(TIMM).params, image
    )
    np.testing.assert_allclose(embedded[:, 1:], torch, atol=1e-5)
    np.testing.assert_allclose(
        embedded[:, 0], np.tile(TIMM["cls_token"][0] + TIMM["pos_embed"][0, :1], (2, 1)), rtol=1e-6
    )


def test_matrices_take_the_compute_type_and_norms_and_embeddings_stay_float32(load):
    loaded = load(MAE, dtype="bfloat16")
    assert loaded.config.dtype == loaded.decoder[0].dtype == "bfloat16"
    for tree, depth in ((loaded.params, TINY.depth), (loaded.decoder[1], TINY_DECODER.depth)):
        kinds = {name: x.dtype.name for name, x in flatten_dict(tree, sep=".").items()}
        exact = {name for name in kinds if name in ("cls", "mask", "pos") or "norm" in name}
        assert kinds == {name: "float32" if name in exact else "bfloat16" for name in kinds}
        assert len(exact) == 2 + 2 + 4 * depth


@pytest.mark.parametrize("kind", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floating_point_types_load_as_float32(load, kind):
    loaded = load({name: x.astype(kind) for name, x in KINDS["timm"][0].items()})
    assert {x.dtype for x in jax.tree.leaves((loaded.params, loaded.head))} == {np.dtype(np.float32)}
    same(loaded.params, jax.tree.map(lambda x: jnp.asarray(x.astype(kind).astype(np.float32)), ENCODER))


# ---- which architecture ------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    kind=st.sampled_from(["native", "timm", "huggingface", "google"]),
    patch=st.integers(1, 4),
    grid=st.integers(1, 4),
    heads=st.integers(1, 3),
    depth=st.integers(1, 3),
    mlp=st.integers(1, 40),
)
@pytest.mark.long
def test_the_architecture_is_read_from_the_tensors(tmp_path_factory, kind, patch, grid, heads, depth, mlp):
    config = ViTConfig(patch * grid, patch, 4 * heads, depth, heads, mlp)
    params = files.encoder(config)
    options = {"native": {}, "google": {"heads": heads, "patch": patch}}.get(kind, {"patch": patch})
    path = save(tmp_path_factory.mktemp("a") / "a.npz", getattr(files, kind)(params, **options))
    loaded = load_backbone(None, path, None, options=WeightOptions(heads=None if kind == "google" else heads))
    assert loaded.config == dataclasses.replace(config, epsilon=EPSILON.get(kind, 1e-6))
    same(loaded.params, jax.tree.map(jnp.asarray, params))


def test_heads_are_known_from_google_s_shapes_and_from_our_metadata(load):
    assert load(files.google(ENCODER, heads=3), heads=None).config.heads == 3
    metadata = {"format": "fcljax-1", "config": json.dumps({"heads": 4})}
    assert load(files.native(ENCODER), metadata=metadata, heads=None).config.heads == 4


def test_heads_that_nothing_tells_are_assumed_with_a_note_or_asked_for(load, refuses):
    refuses(
        TIMM,
        "heads: the checkpoint does not state them, and its width 12 is not a multiple of 64",
        heads=None,
    )
    refuses(
        files.timm(files.encoder(dataclasses.replace(TINY, width=1056))),
        "width 1056 is not a multiple of 64",
        heads=None,
    )
    wide = ViTConfig(image_size=4, patch=4, width=128, depth=1, heads=2, mlp=4)
    loaded = load(files.timm(files.encoder(wide)), heads=None)
    assert loaded.config == wide
    assert any(note.startswith("2 attention heads are assumed, 64 channels each") for note in loaded.notes)
    huge = ViTConfig(image_size=2, patch=2, width=1280, depth=1, heads=16, mlp=2)
    assert load(files.timm(files.encoder(huge), patch=2), heads=None).config == huge


def test_heads_that_contradict_the_checkpoint_or_the_width_are_refused(refuses):
    refuses(files.google(ENCODER), "heads: 3 requested, but the checkpoint has 2", heads=3)
    metadata = {"format": "fcljax-1", "config": '{"heads": 2}'}
    refuses(files.native(ENCODER), "heads: 3 requested, but the checkpoint has 2", metadata=metadata, heads=3)
    refuses(TIMM, "heads: 5 does not divide the width 12", heads=5)
    refuses(TIMM, "heads: 0 is not positive", heads=0)
    refuses(MAE, "decoder_heads: 5 does not divide the decoder's width 16", decoder_heads=5)


def test_a_decoder_s_heads_are_those_given_or_mae_s_sixteen(load):
    assert load(MAE, decoder_heads=4).decoder[0].heads == 4
    loaded = load(MAE)
    assert loaded.decoder[0].heads == 16
    assert "16 attention heads of the decoder are assumed: the checkpoint does not state them" in loaded.notes


def test_a_network_without_a_final_norm_is_one_without(load, refuses):
    bare = {name: x for name, x in ENCODER.items() if name != "norm"}
    loaded = load(files.timm(bare))
    assert loaded.config == dataclasses.replace(TINY, final_norm=False)
    assert "the network has no final norm" in loaded.notes
    image = jnp.ones((1, 8, 8, 3))
    features = apply_vit(loaded.config, loaded.params, image, full=True)
    np.testing.assert_array_equal(features.tokens, features.taps["block_01"])
    same(
        jax.tree.map(jnp.shape, loaded.params),
        jax.tree.map(lambda x: x.shape, parameter_shapes(loaded.config)),
    )
    refuses({name: x for name, x in TIMM.items() if name != "norm.bias"}, "missing: norm.bias$")


def test_a_name_is_a_demand(load, refuses, known):
    assert load(files.google(ENCODER), "tiny").config == TINY
    assert load(TIMM, "tiny").config == TINY  # the name tells the heads
    refuses(files.google(ENCODER, heads=3), "does not fit tiny: it has 3 heads, needs 2", name="tiny")
    refuses(
        files.timm({k: v for k, v in ENCODER.items() if k != "norm"}),
        "does not fit tiny: missing: norm.bias, norm.weight",
        name="tiny",
    )


# ---- pixel constants ---------------------------------------------------------------------------------------


def test_constants_in_our_metadata_are_taken_as_they_are(load):
    metadata = {"mean": "[0.1, 0.2, 0.3]", "std": "0.5"}
    loaded = load(files.native(ENCODER), metadata=metadata)
    assert (loaded.mean, loaded.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    assert not any("assumed" in note for note in loaded.notes)


@pytest.mark.parametrize(
    "name", ["dino_vitbase16_pretrain", "deit_base_patch16_224-b5f2ef4d", "mae_pretrain_vit_base"]
)
def test_the_names_of_published_files_tell_their_constants(tmp_path, name):
    loaded = load_backbone(
        None, save(tmp_path / f"{name}.safetensors", TIMM), None, options=WeightOptions(heads=2)
    )
    assert (loaded.mean, loaded.std) == NORMALISE["imagenet"]
    assert any("assumed (imagenet)" in note for note in loaded.notes)


def sidecars(folder, **objects):
    for name, value in objects.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_the_files_beside_a_model_tell_heads_and_constants(tmp_path):
    path = save(tmp_path / "model.safetensors", HF_MAE)
    config = {
        "num_attention_heads": 3,
        "decoder_num_attention_heads": 4,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    sidecars(
        tmp_path,
        config=config,
        preprocessor_config={"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
    )
    loaded = load_backbone(None, path, None)
    assert (loaded.config.heads, loaded.decoder[0].heads) == (3, 4)
    assert (loaded.mean, loaded.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (loaded.config.epsilon, loaded.decoder[0].epsilon) == (1e-12, 1e-12)
    assert loaded.notes == ()


def test_layer_norms_have_the_epsilon_that_the_network_was_trained_with(tmp_path):
    """transformers' default is another than everybody else's, and a config.json beside the file wins."""
    assert (
        load_backbone(
            None, save(tmp_path / "timm.safetensors", TIMM), None, options=WeightOptions(heads=2)
        ).config.epsilon
        == 1e-6
    )
    path = save(tmp_path / "model.safetensors", HF_MAE)
    assert load_backbone(None, path, None, options=WeightOptions(heads=3)).config.epsilon == 1e-12
    sidecars(tmp_path, config={"layer_norm_eps": 1e-5})
    assert load_backbone(None, path, None, options=WeightOptions(heads=3)).config.epsilon == 1e-5
    convert(path, str(tmp_path / "converted.safetensors"), ConvertOptions(heads=3))
    assert load_backbone(None, str(tmp_path / "converted.safetensors"), None).config.epsilon == 1e-5


def test_timm_s_config_tells_constants_too(tmp_path):
    path = save(tmp_path / "model.safetensors", TIMM)
    sidecars(tmp_path, config={"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}})
    assert load_backbone(None, path, None, options=WeightOptions(heads=2))[4:6] == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"layer_norm_eps": "small"}, "epsilon 'small'"),
        ({"layer_norm_eps": 0.1}, "epsilon 0.1"),
        ({"num_attention_heads": "two"}, "'two' heads"),
        ([1], "holds no JSON object"),
    ],
)
def test_a_config_of_another_network_is_refused(tmp_path, config, message):
    path = save(tmp_path / "model.safetensors", HF_MAE)
    sidecars(tmp_path, config=config)
    with pytest.raises(InputError, match=message):
        load_backbone(
            None, path, None, options=WeightOptions(heads=None if "num_attention_heads" in config else 3)
        )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "fcljax-9"}, "has format 'fcljax-9', and this version reads 'fcljax-1'"),
        ({"format": "fcljax-1", "config": "{"}, "broken metadata: config"),
        ({"format": "fcljax-1", "config": "[" * 100_000}, "broken metadata: config"),
        ({"format": "fcljax-1", "config": "[1]"}, "broken metadata: config"),
        ({"mean": "[1, 2]", "std": "1"}, "a mean that is not three numbers"),
        ({"mean": "0", "std": "[1, 0, 1]"}, "a std that is not three numbers"),
        ({"mean": "[NaN, 0, 0]", "std": "1"}, "a mean that is not three numbers"),
        ({"mean": "9" * 400, "std": "1"}, "a mean that is not three numbers"),
        ({"mean": "0.5", "std": "[1, 1, " + "9" * 400 + "]"}, "a std that is not three numbers"),
    ],
)
def test_metadata_that_make_no_sense_are_refused(refuses, metadata, message):
    refuses(files.native(ENCODER), message, metadata=metadata)


# ---- other image sizes -------------------------------------------------------------------------------------


def test_positions_of_the_same_grid_stay_bit_for_bit():
    position = jnp.asarray(files.drawn(np.empty((10, 4))))
    np.testing.assert_array_equal(interpolate_positions(position, 3), position)


@pytest.mark.parametrize("grid", [3, 7, 12])
def test_constant_positions_stay_constant(grid):
    resized = interpolate_positions(jnp.full((26, 2), 1.5), grid)
    assert resized.shape == (1 + grid**2, 2)
    np.testing.assert_allclose(resized, 1.5, rtol=1e-5)


@pytest.mark.parametrize("grid", [8, 24])
def test_positions_are_resampled_as_pillows_bicubic_does(grid):
    rows, columns = np.mgrid[:14, :14] / 14
    maps = np.stack([np.sin(5 * rows + columns), np.cos(4 * columns) * rows], axis=-1).astype(np.float32)
    cls = files.drawn(np.empty((1, 2)))
    resized = interpolate_positions(jnp.asarray(np.concatenate([cls, maps.reshape(-1, 2)])), grid)
    pillow = [
        np.asarray(Image.fromarray(maps[..., i]).resize((grid, grid), Image.Resampling.BICUBIC))
        for i in range(2)
    ]
    np.testing.assert_allclose(resized[1:].reshape(grid, grid, 2), np.stack(pillow, axis=-1), atol=1e-5)
    np.testing.assert_array_equal(resized[:1], cls)


def test_plain_positions_are_torchs_bicubic_without_antialiasing():
    """From 14 to 4 places the four taps lie at distances 1.25, 0.25, 0.75 and 1.75 of places 0 to 3; torch's
    kernel has a = -0.75, which gives these weights. At the border the first value stands for those beyond."""
    tap = np.array([-0.10546875, 0.87890625, 0.26171875, -0.03515625])
    row = np.zeros(14)
    row[:4] = tap
    maps = np.random.default_rng(0).normal(size=(14, 14, 3)).astype(np.float32)
    position = jnp.asarray(np.concatenate([np.ones((1, 3)), maps.reshape(-1, 3)]), jnp.float32)
    found = interpolate_positions(position, 4, "plain")
    np.testing.assert_array_equal(found[0], 1)
    np.testing.assert_allclose(found[1], np.einsum("y,x,yxd->d", row, row, maps), atol=1e-5)
    wider = interpolate_positions(position, 28, "plain")[1]  # its place is -0.25: taps at -2, -1, 0 and 1
    row = np.zeros(14)
    row[:2] = tap[3] + tap[2] + tap[1], tap[0]
    np.testing.assert_allclose(wider, np.einsum("y,x,yxd->d", row, row, maps), atol=1e-5)


def test_a_checkpoint_can_be_loaded_with_plain_positions(load):
    plain, usual = (load(TIMM, size=16, positions=how).params["pos"] for how in ("plain", "antialiased"))
    own = load(TIMM).params["pos"]
    np.testing.assert_allclose(plain, interpolate_positions(own, 4, "plain"), rtol=1e-6)
    assert np.abs(plain - usual).max() > 1e-3


def test_another_image_size_gives_another_grid_and_touches_positions_only(load):
    before, after = (load(MAE, size=size) for size in (None, 16))
    assert (before.config.grid, after.config.grid, after.config.image_size, after.decoder[0].image_size) == (
        2,
        4,
        16,
        16,
    )
    for old, new in ((before.params, after.params), (before.decoder[1], after.decoder[1])):
        np.testing.assert_allclose(new["pos"], interpolate_positions(old["pos"], 4), rtol=1e-6)
        same(old | {"pos": 0}, new | {"pos": 0})
    assert "position embeddings were interpolated from 2 x 2 to 4 x 4 patches (antialiased)" in after.notes


def test_a_decoder_s_sine_positions_are_those_of_the_new_grid(load):
    decoder = DECODER | {"pos": np.asarray(sincos_positions(2, 16))}
    resized = load(files.timm(ENCODER) | files.mae_decoder(decoder), size=16)
    np.testing.assert_array_equal(resized.decoder[1]["pos"], sincos_positions(4, 16))


@pytest.mark.parametrize(("size", "nearest"), [(225, 224), (30, 32), (3, 16), (0, 16)])
def test_an_image_size_that_is_no_multiple_of_the_patch_is_refused_with_the_nearest(size, nearest):
    with pytest.raises(
        InputError, match=rf"image_size: {size} .* patch size 16 of vit_b16; nearest: {nearest}$"
    ):
        load_backbone("vit_b16", None, size)


def test_an_image_size_is_held_against_the_patch_that_the_checkpoint_has(refuses):
    refuses(
        TIMM, "image_size: 10 is not a multiple of the patch size 4 of the checkpoint; nearest: 8", size=10
    )


# ---- what is refused ---------------------------------------------------------------------------------------


def test_unknown_networks_and_networks_without_weights_are_named():
    with pytest.raises(InputError, match="backbone: unknown value 'vit_b17'; did you mean 'vit_b16'?"):
        load_backbone("vit_b17", None, None)
    with pytest.raises(InputError, match="checkpoint: vit_b16 needs a file of weights .*only vit_micro"):
        load_backbone("vit_b16", None, None)


def test_what_is_no_vit_is_refused_with_what_it_holds(refuses):
    refuses(
        {"conv1.weight": np.ones(3, np.float32)}, "no Vision Transformer in it: .*it holds: conv1.weight$"
    )
    refuses({}, "it holds: no tensors")
    refuses(
        wrapped("model.", TIMM) | wrapped("module.", TIMM),
        "several networks, under 'model.', 'module.'; choose one with --part model or module",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dist_token": np.ones((1, 1, 12))}, "distilled"),
        ({"head_dist.weight": np.ones((7, 12))}, "distilled"),
        ({"fc_norm.weight": np.ones(12), "fc_norm.bias": np.ones(12)}, "means over patches"),
        ({"cls_token": None}, r"no class token \(cls_token\)"),
        (
            {"pos_embed": np.ones((1, 7, 12))},
            "7 position embeddings are not those of a class token and a square grid",
        ),
        ({"pos_embed": np.ones((1, 3, 12))}, "3 position embeddings"),
        ({"patch_embed.proj.weight": np.ones((12, 3, 4, 2))}, "square patches of 3 channels"),
        ({"patch_embed.proj.weight": np.ones((12, 1, 4, 4))}, "square patches of 3 channels"),
        ({"patch_embed.proj.weight": np.ones(12)}, "square patches of 3 channels"),
        (
            {"blocks.0.ls1.gamma": np.ones(12), "blocks.1.ls1.gamma": np.ones(12)},
            "missing: blocks.0.ls2.weight, blocks.1.ls2.weight$",
        ),
        ({"reg_token": np.ones((1, 4, 11))}, "misshaped: reg_token has shape"),
        ({"blocks.0.attn.q_norm.weight": np.ones(6)}, "missing: blocks.0.attn.k_norm.bias"),
        ({"blocks.0.attn.qkv.bias": None}, "missing: blocks.0.attn.qkv.bias$"),
        ({"norm_pre.weight": np.ones(12)}, "missing: norm_pre.bias$"),
        ({"neck.weight": np.ones((7, 12))}, "unexpected: neck.weight$"),
        ({"blocks.0.head.running_mean": np.ones(12)}, "unexpected: blocks.0.head.running_mean$"),
        ({"blocks.999999999999.norm1.bias": np.ones(12)}, "unexpected: blocks.999999999999.norm1.bias$"),
        ({"blocks.99999999.norm1.bias": np.ones(12)}, "missing: "),
        ({"decoder_embed.weight": np.ones((16, 12))}, "missing: decoder_blocks.0"),
        ({"cls_token": np.ones(())}, r"cls_token has shape \(\), needs \(1, 1, 12\)$"),
        ({"blocks.0.mlp.fc1.bias": np.ones(0)}, r"blocks.0.mlp.fc1.bias has shape \(0,\), needs \(48,\)"),
        ({"blocks.0.mlp.fc1.bias": np.ones(())}, r"blocks.0.mlp.fc1.bias has shape \(\), needs"),
        ({"norm.weight": np.full(12, np.nan)}, "norm.weight has values that are not finite"),
        (
            {"blocks.1.mlp.fc1.bias": np.full(20, np.inf)},
            "blocks.1.mlp.fc1.bias has values that are not finite",
        ),
        ({"norm.weight": np.full(12, 1e300)}, "norm.weight has values that are not finite"),
        ({"norm.weight": np.ones(12, np.int8)}, "norm.weight holds int8"),
    ],
)
def test_other_networks_and_broken_ones_are_refused_in_one_line(refuses, change, message):
    refuses({name: x for name, x in (TIMM | change).items() if x is not None}, message)


def test_the_same_holds_under_other_names(refuses):
    refuses(
        files.huggingface(ENCODER) | {"vit.embeddings.distillation_token": np.ones((1, 1, 12))}, "distilled"
    )
    refuses(
        files.google(ENCODER) | {"Transformer/encoderblock_0/LayerScale": np.ones(12)},
        "unexpected: .*LayerScale$",
    )
    refuses(files.native(ENCODER) | {"optimizer.x": np.ones(12)}, "unexpected: optimizer.x$")
    refuses(wrapped("model.", TIMM | {"other.x": np.ones(12)}), "unexpected: other.x$")
    refuses({k: v for k, v in HF_MAE.items() if "mask_token" not in k}, "missing: mask_token$")
    bad = files.native(ENCODER, decoder=DECODER)
    refuses(
        bad | {"decoder.norm.bias": np.ones(3, np.float32)},
        r"decoder.norm.bias has shape \(3,\), needs \(16,\)$",
    )


def test_tensors_that_do_not_fit_are_named(refuses, known):
    tensors = dict(TIMM)
    tensors["blocks.1.mlp.fc2.weight"] = np.ones((TINY.width, 21), np.float32)
    tensors["blocks.2.norm1.bias"] = tensors.pop("norm.bias")
    assert refuses(tensors, "does not fit", name="tiny") == (
        "checkpoint: does not fit tiny: "
        "misshaped: blocks.1.mlp.fc2.weight has shape (12, 21), needs (12, 20); "
        "missing: norm.bias; unexpected: blocks.2.norm1.bias"
    )
    ours = {name: x for name, x in files.native(ENCODER).items() if "block_00.norm1" not in name}
    refuses(ours, "missing: block_00.norm1.bias, block_00.norm1.scale", name="tiny")


def test_a_long_list_of_tensors_is_cut_after_three(refuses, known, monkeypatch):
    few = {name: x for name, x in TIMM.items() if name in ("cls_token", "patch_embed.proj.weight")}
    refuses(few, r"missing: [^,]*, [^,]*, [^,]* and 25 more$", name="tiny")
    monkeypatch.setitem(VITS, "tiny", dataclasses.replace(TINY, depth=1))
    refuses(TIMM, r"unexpected: blocks.1.\S+, blocks.1.\S+, blocks.1.\S+ and 9 more$", name="tiny")
