"""Files of weights in the forms that people have: as other libraries, trainings and tools write them.

The class tokens of tests/golden/make_forms.py are those of the source libraries.
"""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vit_files as files
from flax import serialization, traverse_util
from safetensors.numpy import load_file, save_file
from small_runs import some
from test_golden import FOLDER, agree
from test_torch_zip import save_zip
from vit_files import same, wrapped

from fcljax import cli
from fcljax.checks.doctor import checkpoint as doctor
from fcljax.errors import InputError
from fcljax.models.vit import ViTConfig, apply_vit
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.pretrained import WeightOptions, load_backbone
from fcljax.pixels import NORMALISE

HEADS = 2
ENCODER, HEAD = files.encoder(), files.head()
TIMM = files.timm(ENCODER)
encode = jax.jit(apply_vit, static_argnums=0)
with np.load(FOLDER / "vits.forms.npz") as forms, np.load(FOLDER / "vits.flax.npz") as of_flax:
    EXPECTED = dict(forms) | dict(of_flax)
with np.load(FOLDER / "vits.npz") as stored:
    IMAGE = jnp.asarray(stored["image"])
# what a file does not tell
GIVEN = {"vit_timm_dinov3_qkvb.safetensors": 16}


def load(path, size=None, **options):
    return load_backbone(None, str(path), size, options=WeightOptions(**{"heads": HEADS, **options}))


def refuses(path, message, **options):
    with pytest.raises(InputError, match=message) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)


def resnet():
    """A ResNet of three stages in torchvision's names, its values those of a golden file."""
    return load_file(FOLDER / "torchvision_resnet_cifar.safetensors")


# ---- forms of ViTs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(EXPECTED, [*EXPECTED][::3]))
def test_the_class_token_is_that_of_the_source_library(name):
    loaded = load(FOLDER / name, GIVEN.get(name))
    agree(encode(loaded.config, loaded.params, IMAGE).cls, EXPECTED[name])


def test_a_class_token_without_a_position_keeps_none_at_other_sizes():
    loaded = load(FOLDER / "vit_deit3.safetensors", 24)
    assert loaded.config.grid == 6 and not loaded.params["pos"][0].any()


def test_the_constants_and_activations_are_those_of_the_authors():
    kinds = {
        "vit_torchvision.safetensors": ("imagenet", "gelu"),
        "vit_deit3.safetensors": ("imagenet", "gelu"),
    }
    kinds |= {"vit_big_vision.npz": ("half", "gelu_tanh"), "vit_timm_clip.safetensors": ("clip", "gelu")}
    for name, (pixels, activation) in kinds.items():
        loaded = load(FOLDER / name)
        assert (loaded.mean, loaded.std) == NORMALISE[pixels]
        assert loaded.config.activation == activation


def test_clip_under_timm_s_names_says_that_its_activation_is_assumed(tmp_path):
    path = tmp_path / "tower.safetensors"
    shutil.copy(FOLDER / "vit_timm_clip_quickgelu.safetensors", path)
    assert any("activation gelu of its kind is assumed" in note for note in load(path).notes)
    config = {"architecture": "vit_base_patch32_clip_quickgelu_224", "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(path)
    assert loaded.config.activation == "quick_gelu"
    assert not any("activation" in note for note in loaded.notes)


def test_the_layer_scale_of_open_clip_multiplies_what_each_layer_adds(tmp_path):
    """The oracle has the scales in the weights and biases of the layers' last products."""
    tensors = load_file(FOLDER / "vit_openai_clip.safetensors")
    folded = dict(tensors)
    scaled = dict(tensors)
    rng = np.random.default_rng(0)
    for block, (number, product) in itertools.product((0, 1), ((1, "attn.out_proj"), (2, "mlp.c_proj"))):
        layer = f"visual.transformer.resblocks.{block}"
        weight, bias = f"{layer}.{product}.weight", f"{layer}.{product}.bias"
        gamma = rng.normal(size=24).astype(np.float32)
        scaled[f"{layer}.ls_{number}.gamma"] = gamma
        folded[weight] = tensors[weight] * gamma[:, None]
        folded[bias] = tensors[bias] * gamma
    save_file(scaled, tmp_path / "scaled.safetensors")
    save_file(folded, tmp_path / "folded.safetensors")
    one, other = (load(tmp_path / f"{name}.safetensors") for name in ("scaled", "folded"))
    expected = encode(other.config, other.params, IMAGE).cls
    agree(encode(one.config, one.params, IMAGE).cls, expected)
    assert one.config.layer_scale and not other.config.layer_scale


# ---- a family only with all that it must have --------------------------------------------------------------


def test_scaled_layers_and_no_positions_without_registers_are_no_dinov3(tmp_path):
    tensors = load_file(FOLDER / "vit_timm_dinov3.safetensors")
    save_file(tensors, tmp_path / "dinov3.safetensors")
    assert load(tmp_path / "dinov3.safetensors", 16).config.rotary_base == 100
    rope = tensors | {
        name.replace("weight", "bias"): np.zeros(len(x), np.float32)
        for name, x in tensors.items()
        if name.endswith("attn.qkv.weight")
    }
    save_file(rope, tmp_path / "biased.safetensors")
    refuses(tmp_path / "biased.safetensors", "gamma_1 belongs to a network with scaled layers")
    tensors.pop("reg_token")
    save_file(tensors, tmp_path / "rope.safetensors")
    refuses(
        tmp_path / "rope.safetensors",
        "gamma_1 belongs to a network with scaled layers .* not DINOv3's registers",
    )


@pytest.mark.parametrize("name", ["resnetblur50.a1_in1k", "resnetaa50d", "resnetrs50"])
def test_a_network_that_its_config_names_otherwise_is_refused(tmp_path, name):
    save_file(resnet(), tmp_path / "any name.safetensors")
    assert load(tmp_path / "any name.safetensors", 40, heads=None).config.channels == 4
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    refuses(tmp_path / "any name.safetensors", f"says that it is {name}", heads=None)


@pytest.mark.parametrize("prefix, heads", [("module.base_encoder.", 12), ("module.", 6)])
def test_assumed_heads_are_those_of_the_authors(tmp_path, prefix, heads):
    vit = ViTConfig(image_size=4, patch=4, width=384, depth=1, heads=1, mlp=4)
    files.save(tmp_path / "a.npz", wrapped(prefix, files.timm(files.encoder(vit))))
    loaded = load(tmp_path / "a.npz", heads=None)
    assert loaded.config.heads == heads
    assert any(f"{heads} attention heads are assumed" in note for note in loaded.notes)


def test_heads_of_networks_that_have_them_in_several_sizes_are_asked_for(tmp_path):
    vit = ViTConfig(image_size=4, patch=4, width=64, depth=1, heads=2, mlp=192)
    path = files.save(tmp_path / "test_vit.npz", files.timm(files.encoder(vit)))
    refuses(path, "width 64 with MLPs of 192 have heads of several sizes; give heads", heads=None)
    assert load(path, heads=2).config.heads == 2


# ---- several networks, prefixes and what is left out -------------------------------------------------------


PREFIXES = ["model_state_dict.backbone.", "image_encoder.", "visual.trunk.", "net.module.", "a.b.c.d."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_one_network_may_have_any_prefix_and_the_rest_is_counted(tmp_path, prefix):
    parent = prefix.rpartition(".")[0].rpartition(".")[0]
    beside = {f"{parent}.fc.weight" if parent else "fc.weight": np.ones((3, 12), np.float32)}
    beside |= {"text.0": np.ones(3, np.float32), "text.1": np.ones(3, np.float32)}
    loaded = load(files.save(tmp_path / "a.npz", wrapped(prefix, TIMM) | beside))
    same(loaded.params, jax.tree.map(jnp.asarray, ENCODER))
    (note,) = (note for note in loaded.notes if note.startswith("left out"))
    assert "fc (1)" in note and "text (2)" in note


@pytest.mark.parametrize(
    "head", ["fc.weight", "head.weight", "head.0.weight", "fc.2.bias", "projector.1.weight"]
)
def test_other_heads_are_left_out_and_counted(tmp_path, head):
    for name, tensors in (("vit", TIMM), ("resnet", resnet())):
        tensors = {key: x for key, x in tensors.items() if not key.startswith("fc.")}
        path = files.save(tmp_path / f"{name}.npz", tensors | {head: np.ones((3, 5), np.float32)})
        loaded = load(path, heads=HEADS if name == "vit" else None)
        assert loaded.head is None
        assert f"left out, being no part of the backbone: {head.split('.')[0]} (1)" in loaded.notes


def two(first, second, tensors):
    """Two networks whose values are 1 and 2."""
    one = {f"{first}{name}": np.full(x.shape, 1.0, np.float32) for name, x in tensors.items()}
    return one | {f"{second}{name}": np.full(x.shape, 2.0, np.float32) for name, x in tensors.items()}


TWO = {
    ("student.module.backbone.", "teacher.backbone."): 2,
    ("state_dict.", "state_dict_ema."): 1,
    ("model.", "model_ema."): 1,
    ("module.encoder_q.", "module.encoder_k."): 1,
    ("module.momentum_encoder.", "module.base_encoder."): 2,
    ("params/", "opt_state/0/mu/"): 1,
}


@pytest.mark.parametrize("prefixes", TWO)
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_of_two_networks_the_one_that_its_authors_use_is_taken(tmp_path, prefixes, kind):
    if "/" in prefixes[0] and kind == "resnet":
        pytest.skip("no ResNet is read from names with slashes")
    tensors = resnet() if kind == "resnet" else TIMM
    tensors = files.google(ENCODER) if "/" in prefixes[0] else tensors
    path = files.save(tmp_path / "a.npz", two(prefixes[0], prefixes[1], tensors))
    loaded = load(path, heads=HEADS if kind == "vit" else None)
    assert float(np.asarray(jax.tree.leaves(loaded.params)[0]).ravel()[0]) == TWO[prefixes]
    assert any(note.startswith("left out") for note in loaded.notes)


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_two_networks_without_a_rule_are_refused_until_one_is_named(tmp_path, kind):
    heads = HEADS if kind == "vit" else None
    tensors = resnet() if kind == "resnet" else TIMM
    path = files.save(tmp_path / "a.npz", two("online.net.", "target.net.", tensors))
    says = "several networks, under 'online.net.', 'target.net.'; choose one with --part online or target"
    refuses(path, says, heads=heads)
    found = load(path, heads=heads, part="target")
    assert float(np.asarray(jax.tree.leaves(found.params)[0]).ravel()[0]) == 2
    refuses(path, "part: unknown value 'tarjet'; did you mean 'target'", heads=heads, part="tarjet")
    refuses(path, "part: the checkpoint has no student", heads=heads, part="student")


# ---- files beside it ---------------------------------------------------------------------------------------


def test_the_files_beside_a_file_of_any_name_tell_heads_activation_and_constants(tmp_path):
    path = files.save(tmp_path / "vit.fp16.safetensors", files.huggingface(ENCODER))
    config = {"num_attention_heads": 3, "hidden_size": 12, "hidden_act": "gelu_new"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(path, heads=None)
    assert (loaded.config.heads, loaded.config.activation) == (3, "gelu_tanh")
    other = {"vision_cfg": {"width": 12, "head_width": 4, "layers": 2}, "quick_gelu": True}
    pixels = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    (tmp_path / "config.json").unlink()
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": other, "preprocess_cfg": pixels})
    )
    loaded = load(path, heads=None)
    assert (loaded.config.heads, loaded.config.activation) == (3, "quick_gelu")
    assert (loaded.mean, loaded.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert loaded.notes == ()


def test_a_config_of_another_network_in_the_same_folder_is_not_used(tmp_path):
    path = files.save(tmp_path / "vit.safetensors", TIMM)
    config = {"hidden_size": 768, "num_attention_heads": 4, "layer_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": 0.1, "image_std": 0.1}))
    loaded = load(path)
    assert (loaded.config.heads, loaded.config.epsilon, loaded.mean) == (HEADS, 1e-6, (0.5,) * 3)
    assert "config.json beside the file is not used: it says hidden_size 768, here 12" in loaded.notes


# ---- the kind of a file ------------------------------------------------------------------------------------


NAMES = ["moco.pth.tar", "last.ckpt", "resnet.th", "weights", "weights.bin", "weights.npz"]


@pytest.mark.parametrize("name", NAMES)
def test_the_content_tells_the_kind_whatever_the_name(tmp_path, name):
    writers = {
        "torch": lambda path: save_zip(path, {"state_dict": TIMM}),
        "safetensors": lambda path: save_file(TIMM, path),
        "msgpack": lambda path: path.write_bytes(
            serialization.msgpack_serialize(
                {"params": traverse_util.unflatten_dict(files.google(ENCODER), sep="/")}
            )
        ),
    }
    for write in writers.values():
        path = tmp_path / name
        write(path)
        same(load(path).params, jax.tree.map(jnp.asarray, ENCODER))


@pytest.mark.parametrize(
    "content, says",
    [
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html>", "a page of HTML"),
        (bytes(257) + b"ustar\x0000", "a tar archive"),
        (b"hello", "its content is unknown, and it has suffix '.model'"),
        (b"\x81\xa1a\xc7\x03\x01abc", "damaged"),
        (b"\x81\xa1a" + b"\x81\xa1a" * 4000 + b"\xc0", "damaged"),
    ],
)
def test_files_of_other_kinds_are_refused_by_what_they_are(tmp_path, content, says):
    (tmp_path / "a.model").write_bytes(content)
    refuses(tmp_path / "a.model", says)


def test_a_network_in_several_files_is_read_by_its_index_its_folder_or_one_of_them(tmp_path):
    names = sorted(TIMM)
    shards = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for shard, own in shards.items():
        save_file({name: TIMM[name] for name in own}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    weights = {name: shard for shard, own in shards.items() for name in own}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    digests = set()
    for path in (index, tmp_path, tmp_path / "model-00002-of-00002.safetensors"):
        loaded = load(path)
        same(loaded.params, jax.tree.map(jnp.asarray, ENCODER))
        digests.add(loaded.digest)
    assert len(digests) == 1
    index.write_text(json.dumps({"weight_map": weights | {"more": "model-00001-of-00002.safetensors"}}))
    refuses(tmp_path, "has no 'more'")
    index.write_text(json.dumps({"weight_map": {"norm.bias": "../outside.safetensors"}}))
    refuses(tmp_path, "names the file '../outside.safetensors', which is not beside it")
    index.write_text(json.dumps({"weight_map": {}}))
    refuses(tmp_path, "no weight_map")


# ---- ResNets of other code ---------------------------------------------------------------------------------


def test_shortcut_and_linear_are_downsample_and_fc(tmp_path):
    def renamed(name):
        return name.replace("downsample", "shortcut").replace("fc.", "linear.")

    tensors = {f"net.module.{renamed(name)}": x for name, x in resnet().items()}
    loaded = load(files.save(tmp_path / "ckpt.npz", tensors), 40, heads=None)
    plain = load(FOLDER / "torchvision_resnet_cifar.safetensors", 40, heads=None)
    same((loaded.params, loaded.head), (plain.params, plain.head))
    bare = {name: x for name, x in tensors.items() if "shortcut" not in name}
    path = files.save(tmp_path / "akamaster.npz", bare)
    refuses(path, "missing: layer2.0.downsample", heads=None)


# ---- every way in says the same ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "no network", "shortcuts without weights", "two networks"])
def test_convert_doctor_and_run_agree_on_what_can_be_read(tmp_path, capsys, kind):
    bare = {name: x for name, x in resnet().items() if "downsample" not in name}
    content = {
        "read": files.google(ENCODER, HEAD),
        "no network": {"x": np.ones(3, np.float32)},
        "shortcuts without weights": bare,
        "two networks": two("a.", "b.", resnet()),
    }
    path = str(files.save(tmp_path / "weights.npz", content[kind]))
    finding = doctor(path)
    code = cli.main(["convert", path, str(tmp_path / "out.safetensors")])
    converted = capsys.readouterr().err
    assert finding.state == ("ok" if kind == "read" else "failed")
    assert code == (0 if kind == "read" else 2)
    if kind != "read":
        assert finding.value in converted and "is read as it is" not in converted
        assert converted.count("\n") == 1
        with pytest.raises(InputError, match="checkpoint: "):
            load_backbone(None, path, None)


def test_part_of_convert_takes_any_name_and_says_what_was_left_out(tmp_path):
    path = str(files.save(tmp_path / "a.npz", two("online.", "target.", TIMM)))
    out = str(tmp_path / "target.safetensors")
    rows = convert(path, out, ConvertOptions(heads=HEADS, part="target"))
    assert ("note", f"left out, being no part of the backbone: online ({len(TIMM)})") in rows
    assert load(out).params["cls"][0] == 2
