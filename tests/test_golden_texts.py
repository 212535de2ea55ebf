"""Text encoders of transformers, read by their names, give the features that transformers computes."""

import json
import math
import re
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fcljax
from fcljax.checks.doctor import checkpoint
from fcljax.commands.running import Paths
from fcljax.commands.running import settings as settings_of
from fcljax.data.files.any_arrays import dataset_of_any_arrays
from fcljax.errors import InputError
from fcljax.models.shapes import TextConfig
from fcljax.models.text import apply_text
from fcljax.models.vit import Injection, Lora, Prefix, attention_inputs, longest_attention_inputs
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.pretrained import load_backbone, load_text_encoder
from fcljax.runs.inputs import load_inputs

EXPECTED = dict(np.load(Path(__file__).parent / "golden" / "texts.npz"))
TEXT = {"ids": EXPECTED["ids"].astype(np.int32), "mask": EXPECTED["mask"]}
POOLING = {
    "mean": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "first": {"pooling_mode": "cls"},
}
ENCODERS = ("bert", "roberta", "distilbert", "clip")


def tensors_of(name):
    shapes = json.loads(str(EXPECTED[f"{name}/shapes"]))
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(EXPECTED[f"{name}/weights"], ends[:-1])
    return {key: x.reshape(shape) for (key, shape), x in zip(shapes.items(), parts, strict=True)}


def written(folder, name, tensors=None, pooling=None, **changed):
    """Writes a folder as transformers and sentence-transformers do."""
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors or tensors_of(name), folder / "model.safetensors")
    config = json.loads(str(EXPECTED[f"{name}/config"])) | changed
    (folder / "config.json").write_text(json.dumps(config))
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    @lru_cache
    def load(name):
        return load_text_encoder(written(tmp_path_factory.mktemp(name), name), "float32")

    return load


def features(loaded, text=TEXT, injection=None):
    return np.asarray(apply_text(loaded.config, loaded.params, text, injection).cls)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_feature_is_that_of_transformers(encoder, name):
    loaded = encoder(name)
    pooling = "end" if name == "clip" else "first"
    assert (loaded.config.pooling, loaded.mapping) == (pooling, "huggingface")
    np.testing.assert_allclose(features(loaded), EXPECTED[f"{name}/{pooling}"], atol=1e-5)
    # nothing reads padding, and nothing depends on it
    shorter = {key: x[1:, :6] for key, x in TEXT.items()}
    np.testing.assert_allclose(features(loaded, shorter), EXPECTED[f"{name}/{pooling}"][1:], atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_positions_in_files_of_old_versions_are_no_weights(encoder, name, tmp_path):
    """transformers wrote ids of positions beside the embeddings until 4.31, as all-MiniLM-L6-v2 has them."""
    tensors = tensors_of(name)
    where = next(key for key in tensors if "position_embedding" in key).rpartition("position_embedding")[0]
    old = {f"{where}position_ids": np.arange(32)[None]} | tensors
    loaded = load_text_encoder(written(tmp_path, name, old), "float32")
    assert loaded.config == encoder(name).config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, encoder(name).params)


def test_the_mean_of_sentence_transformers_and_types_of_tokens(encoder, tmp_path):
    mean = load_text_encoder(written(tmp_path / "mean", "bert", pooling=POOLING["mean"]), "float32")
    np.testing.assert_allclose(features(mean), EXPECTED["bert/mean"], atol=1e-5)
    assert mean.notes[-1] == "the feature of a text is the mean over tokens"
    typed = TEXT | {"types": EXPECTED["types"].astype(np.int32)}
    np.testing.assert_allclose(features(encoder("bert"), typed), EXPECTED["bert/types"], atol=1e-5)
    first = written(tmp_path / "first", "bert", pooling=POOLING["first"])
    assert load_text_encoder(first, "float32").config.pooling == "first"


def test_other_spellings_are_the_same_encoder(encoder, tmp_path):
    """BERT's first files, a prefix, a head; and the towers of CLIP under OpenAI's names."""
    words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {"cls.predictions.bias": np.zeros(3, np.float32)}
    for name, x in tensors_of("bert").items():
        for new, spelling in words.items():
            name = name.replace(new, spelling)
        old[f"bert.{name}"] = x
    loaded = load_text_encoder(written(tmp_path / "old", "bert", old), "float32")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, encoder("bert").params)

    words = {
        "text_model.": "",
        "encoder.layers": "transformer.resblocks",
        "embeddings.token_embedding": "token_embedding",
        "embeddings.position_embedding.weight": "positional_embedding",
        "self_attn": "attn",
        "q_proj.": "in_proj_",
        "final_layer_norm": "ln_final",
        "layer_norm": "ln_",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    openai = {}
    tensors = tensors_of("clip")
    for name, x in tensors.items():
        if name.startswith("vis") or re.search("attn.[kv]_proj", name):
            continue
        if "q_proj" in name:
            x = np.concatenate([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for new, spelling in words.items():
            name = name.replace(new, spelling)
        openai[name] = x
    folder = tmp_path / "openai"
    folder.mkdir()
    safetensors.numpy.save_file(openai, folder / "model.safetensors")
    tower = {"model_cfg": {"text_cfg": {"heads": 2}, "quick_gelu": True}}
    (folder / "open_clip_config.json").write_text(json.dumps(tower))
    loaded = load_text_encoder(str(folder), "float32")
    np.testing.assert_allclose(features(loaded), EXPECTED["clip/end"], atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_a_converted_file_is_the_same_encoder(encoder, name, tmp_path):
    source = written(tmp_path / name, name)
    rows = dict(convert(source, str(tmp_path / "own.safetensors"), ConvertOptions(text=True)))
    assert rows["pooling"] == ("end" if name == "clip" else "first")
    own = load_text_encoder(str(tmp_path / "own.safetensors"), "float32")
    assert own.config == encoder(name).config
    jax.tree.map(np.testing.assert_array_equal, own.params, encoder(name).params)


def test_clip_has_a_tower_for_images_too(tmp_path):
    loaded = load_backbone(None, written(tmp_path, "clip"), None)
    assert (loaded.config.width, loaded.config.image_size) == (16, 8)


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_every_adapter_acts_in_every_encoder(encoder, name):
    loaded = encoder(name)
    rng = np.random.default_rng(1)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    injection = Injection(
        prompt={0: draw(3, 16)},
        prefix={1: Prefix(draw(2, 3, 16), draw(2, 3, 16))},
        tokens=draw(3, 16),
        lora={0: Lora(draw(2, 16), draw(16, 2), draw(2, 16), draw(16, 2))},
    )

    @jax.jit
    def gradient(injection, text):
        def total(injection):
            output = apply_text(loaded.config, loaded.params, text, injection)
            return jnp.sum(output.cls[-1]), output

        return jax.grad(total, has_aux=True)(injection)

    found, output = gradient(injection, TEXT)
    assert output.prompts.shape == (2, 3, 16)
    # the prefix of the first text has no effect on the second
    leaves = [leaf[-1] if leaf.ndim == 3 else leaf for leaf in jax.tree.leaves(found)]
    assert min(jnp.abs(leaf).max() for leaf in leaves) > 1e-3
    padded = TEXT | {"ids": np.where(TEXT["mask"], TEXT["ids"], 17)}
    np.testing.assert_array_equal(gradient(injection, padded)[1].cls, output.cls)


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_lora_pairs_read_what_attention_reads(encoder, name):
    """A pair whose B is W_q's change acts as that change: q + B A x with x the projection's input."""
    loaded = encoder(name)
    output = apply_text(loaded.config, loaded.params, TEXT, full=True)
    x = attention_inputs(loaded.params, output, 2)
    kernel = loaded.params["block_01"]["attn"]["qkv"]["kernel"]
    changed = jax.tree.map(lambda leaf: leaf, loaded.params)
    # a change of rank one that only acts on inputs along the first text's first token
    direction = x[1, 0, 0] / jnp.linalg.norm(x[1, 0, 0])
    update = jnp.outer(direction, jnp.ones(16))
    changed["block_01"]["attn"]["qkv"]["kernel"] = kernel.at[:, :16].add(update)
    pair = Lora(direction[None], jnp.ones((16, 1)), jnp.zeros((1, 16)), jnp.zeros((16, 1)))
    acting = features(loaded, TEXT, Injection(lora={1: pair}))
    np.testing.assert_allclose(features(loaded._replace(params=changed)), acting, atol=1e-4)
    np.testing.assert_array_equal(jnp.any(x != 0, axis=-1)[0], TEXT["mask"])
    tokens = jnp.sqrt(jnp.sum(x**2, axis=(2, 3)))
    assert (tokens <= longest_attention_inputs(loaded.params, 2)[:, None]).all()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "electra"}, "model_type 'electra', which is no text encoder"),
        ({"model_type": "robert"}, "did you mean 'roberta'?"),
        ({"position_embedding_type": "relative_key"}, "the encoders here have 'absolute'"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"num_attention_heads": 3}, "heads: 3 does not divide the width 16"),
        ({"hidden_size": 32}, "hidden_size 32, and the file has width 16"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ],
)
def test_another_architecture_is_refused(tmp_path, changed, says):
    with pytest.raises(InputError) as error:
        load_text_encoder(written(tmp_path, "bert", **changed), "float32")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_is_missing_or_of_another_kind_is_refused(tmp_path):
    def refusal(path, load=lambda path: load_text_encoder(path, "float32")):
        with pytest.raises(InputError) as error:
            load(path)
        return str(error.value)

    folder = tmp_path / "bert"
    assert "reads images: it is of BERT" in refusal(
        written(folder, "bert"), lambda path: load_backbone(None, path, None)
    )
    (folder / "config.json").unlink()
    assert "no config.json beside 'bert' says which encoder" in refusal(str(folder))
    vit = Path(__file__).parent / "golden" / "timm.safetensors"
    assert "reads text: it is of timm; nearest: hf:sentence-transformers/" in refusal(str(vit))
    pooling = {"pooling_mode_max_tokens": True}
    assert "pooling 'max_tokens'" in refusal(written(tmp_path / "max", "bert", pooling=pooling))
    tensors = tensors_of("bert")
    del tensors["encoder.layer.1.output.dense.bias"]
    assert checkpoint(written(tmp_path / "whole", "bert")).state == "ok"
    assert "missing: blocks.1.mlp.fc2.bias" in refusal(written(tmp_path / "part", "bert", tensors))


def test_the_packaged_encoder_is_one_of_them():
    assert load_text_encoder(None, "float32").config == TextConfig()


LABEL = np.arange(60) % 4
IDS = np.random.default_rng(0).integers(2, 29, (60, 10)).astype(np.int32)
X = {"ids": IDS, "mask": np.ones(IDS.shape, bool)}


def test_texts_that_an_encoder_cannot_read_are_refused(tmp_path):
    def refusal(x, **options):
        options = {"adapter": "linear", "scale": "mini"} | options
        with pytest.raises(InputError) as error:
            load_inputs(settings_of("linear", options, Paths()), dataset_of_any_arrays((x, LABEL)).dataset)
        assert "\n" not in str(error.value)
        return str(error.value)

    folder = written(tmp_path / "bert", "bert")
    assert "reads ids of a tokenizer, and" in refusal(["two words"] * 60, checkpoint=folder)
    assert "id 37 is not below the vocabulary of 30" in refusal(X | {"ids": IDS + 9}, checkpoint=folder)
    assert "leave one out" in refusal(X, checkpoint=folder, backbone="text_micro")
    vit = str(Path(__file__).parent / "golden" / "timm.safetensors")
    assert "reads text: it is of timm" in refusal(X, checkpoint=vit)
    assert "checkpoint: " in refusal(np.ones((60, 3)), checkpoint=folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "name", "options"),
    [
        ("ewc", "bert", {}),
        ("fedavg-prompt", "bert", {"pool_blocks": 2}),
        ("fedavg-ft", "bert", {}),
        ("lorm", "clip", {"lora_blocks": 2}),
        ("l2p", "clip", {}),
        ("fedncm", "clip", {}),
    ],
)
def test_adapters_of_every_kind_train_in_a_converted_encoder(tmp_path, method, name, options):
    options = {"clients": 2, "rounds": 1, "tasks": 2, "scale": "mini", "progress": False} | options
    result = fcljax.run(method, (X, LABEL), checkpoint=written(tmp_path / name, name), **options)
    assert np.isfinite(result.metrics["A_last"])
