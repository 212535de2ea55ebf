"""`convert`: any checkpoint to a file of our own that keeps everything that was known."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import vit_files as files
from flax.traverse_util import flatten_dict

from fcljax.errors import InputError
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.finding import find
from fcljax.models.weights.naming import TensorFacts, interpret, name_tensors
from fcljax.models.weights.pretrained import WeightOptions, load_backbone, save_native
from fcljax.pixels import NORMALISE

ENCODER, DECODER, HEAD = files.encoder(), files.decoder(), files.head()
TIMM = files.timm(ENCODER, HEAD)
TWO = ConvertOptions(heads=2)
SOURCES = {
    "timm": TIMM,
    "huggingface": files.huggingface(ENCODER, HEAD),
    "google": files.google(ENCODER, HEAD),
    "mae": files.timm(ENCODER) | files.mae_decoder(DECODER),
    "teacher": files.wrapped("teacher.backbone.", files.timm(ENCODER))
    | files.wrapped("student.backbone.", files.timm(files.encoder(seed=9))),
    "fcljax": files.native(ENCODER, HEAD),
    "no norm": files.timm({name: x for name, x in ENCODER.items() if name != "norm"}),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, for names without one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def source(folder, tensors, name="weights.npz"):
    return str(files.save(folder / name, tensors))


def metadata(path):
    with safetensors.safe_open(path, "np") as file:
        return file.metadata()


def refuses(message, *arguments):
    with pytest.raises(InputError, match=message) as caught:
        convert(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_converted_file_gives_the_network_that_its_source_gives(folder, kind):
    path = source(folder, SOURCES[kind])
    convert(
        path,
        "ours.safetensors",
        dataclasses.replace(TWO, keep_head=True, decoder_heads=4 if kind == "mae" else None),
    )
    before = load_backbone(
        None, path, None, options=WeightOptions(heads=2, decoder_heads=4 if kind == "mae" else None)
    )
    after = load_backbone(None, "ours.safetensors", None)
    assert (after.config, after.mean, after.std, after.mapping) == (
        before.config,
        before.mean,
        before.std,
        "fcljax",
    )
    files.same((after.params, after.head, after.decoder), (before.params, before.head, before.decoder))
    assert not any("assumed" in note for note in after.notes)


def test_a_converted_file_converts_to_itself(folder):
    convert(source(folder, SOURCES["mae"]), "one.safetensors", TWO)
    convert("one.safetensors", "two.safetensors", ConvertOptions())
    one, two = (load_backbone(None, f"{name}.safetensors", None) for name in ("one", "two"))
    files.same((one.params, one.decoder), (two.params, two.decoder))
    assert metadata("two.safetensors")["source"] == "one.safetensors"


def test_the_metadata_say_where_the_weights_are_from(folder):
    path = source(folder, SOURCES["teacher"])
    convert(path, "ours.safetensors", dataclasses.replace(TWO, part="student"))
    found = metadata("ours.safetensors")
    assert json.loads(found.pop("config")) == {
        **{"image_size": 8, "patch": 4, "width": 12, "depth": 2, "heads": 2, "mlp": 20, "epsilon": 1e-6},
        "final_norm": True,
    }
    assert found == {
        "format": "fcljax-1",
        "source": "weights.npz",
        "sha256": hashlib.sha256((folder / "weights.npz").read_bytes()).hexdigest(),
        "mapping": "timm",
        "mean": json.dumps(NORMALISE["imagenet"][0]),
        "std": json.dumps(NORMALISE["imagenet"][1]),
        "part": "student",
    }


def test_rows_say_what_was_found_and_written(folder):
    rows = convert(source(folder, TIMM), "ours.safetensors", TWO)
    found = dict(row for row in rows if row[0] != "note")
    parameters = sum(x.size for x in jax.tree.leaves(ENCODER))
    assert found == {
        **{
            "mapping": "timm",
            "width": "12",
            "depth": "2",
            "heads": "2",
            "mlp": "20",
            "patch": "4",
            "image size": "8",
        },
        **{
            "class token": "yes",
            "final norm": "yes",
            "qkv": "fused",
            "parameters": f"{parameters:,}",
            "head": "7 classes, dropped",
        },
        **{"decoder": "none", "mean": "0.5, 0.5, 0.5", "std": "0.5, 0.5, 0.5"},
        "sha256": hashlib.sha256((folder / "weights.npz").read_bytes()).hexdigest(),
        "written to": "ours.safetensors",
    }
    notes = [text for kind, text in rows if kind == "note"]
    assert len(notes) == 2 and "head of 7 classes" in notes[0] and "assumed (half)" in notes[1]
    assert all(isinstance(text, str) for row in rows for text in row)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("huggingface", ("qkv", "split")),
        ("google", ("qkv", "split")),
        ("mae", ("decoder", "width 16, depth 1, heads 16")),
        ("mae", ("head", "none")),
        ("teacher", ("mapping", "timm (teacher)")),
        ("no norm", ("final norm", "no")),
    ],
)
def test_rows_tell_other_kinds_apart(folder, kind, row):
    assert row in convert(source(folder, SOURCES[kind]), "ours.safetensors", TWO)


@pytest.mark.parametrize("keep", [False, True])
def test_the_head_is_kept_on_demand_only(folder, keep):
    rows = dict(convert(source(folder, TIMM), "ours.safetensors", dataclasses.replace(TWO, keep_head=keep)))
    head = load_backbone(None, "ours.safetensors", None).head
    assert (rows["head"], head is not None) == (f"7 classes, {'kept' if keep else 'dropped'}", keep)


def test_an_image_size_is_part_of_what_is_written(folder):
    path = source(folder, TIMM)
    convert(path, "ours.safetensors", dataclasses.replace(TWO, image_size=16))
    resized, direct = (
        load_backbone(None, "ours.safetensors", None),
        load_backbone(None, path, 16, options=WeightOptions(heads=2)),
    )
    assert resized.config == direct.config
    files.same(resized.params, direct.params)


def test_pixel_constants_that_are_given_are_kept(folder):
    rows = convert(source(folder, TIMM), "ours.safetensors", dataclasses.replace(TWO, normalise="unit"))
    loaded = load_backbone(None, "ours.safetensors", None)
    assert (loaded.mean, loaded.std) == NORMALISE["unit"]
    assert not any("assumed" in text for _, text in rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_can_be_stored_in_half_the_space(folder, dtype):
    convert(source(folder, TIMM), "ours.safetensors", dataclasses.replace(TWO, dtype=dtype))
    loaded = load_backbone(None, "ours.safetensors", None)
    files.same(loaded.params, jax.tree.map(lambda x: jnp.asarray(x).astype(dtype).astype("float32"), ENCODER))
    with safetensors.safe_open("ours.safetensors", "np") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes == {"F16" if dtype == "float16" else "BF16"}


def test_values_beyond_float16_are_refused_and_nothing_is_written(folder):
    path = source(folder, TIMM | {"norm.bias": np.full(12, 1e5, np.float32)})
    refuses(
        "dtype: norm.bias has values beyond float16; choose 'bfloat16' or 'float32'",
        path,
        "ours.safetensors",
        dataclasses.replace(TWO, dtype="float16"),
    )
    assert [file.name for file in folder.iterdir()] == ["weights.npz"]


def test_without_a_target_the_source_s_name_is_taken_in_the_current_folder(folder):
    (folder / "elsewhere").mkdir()
    weights = source(folder / "elsewhere", TIMM, "vit.tiny.npz")
    rows = convert(weights, None, TWO)
    assert rows[-1] == ("written to", "vit.tiny.safetensors")
    assert (folder / "vit.tiny.safetensors").is_file()
    convert(weights, "new/folder/ours.safetensors", TWO)
    assert (folder / "new" / "folder" / "ours.safetensors").is_file()


def test_nothing_is_ever_overwritten(folder):
    path = source(folder, TIMM, "weights.safetensors")
    before = (folder / "weights.safetensors").read_bytes()
    refuses("target: 'weights.safetensors' exists; give another name", path, None, TWO)
    (folder / "link.safetensors").symlink_to("nowhere")
    refuses("target: 'link.safetensors' exists", path, "link.safetensors", TWO)
    assert (folder / "weights.safetensors").read_bytes() == before


def test_targets_that_cannot_be_are_named_before_the_source_is_read():
    refuses("target: 'ours.npz' must end in .safetensors", "absent.npz", "ours.npz", TWO)
    refuses("checkpoint: no file 'absent.npz'", "absent.npz", "ours.safetensors", TWO)


def test_the_target_of_a_hub_repository_is_named_after_it(folder):
    (folder / "vit-tiny.safetensors").touch()
    for place in (
        "hf:someone/vit-tiny",
        "hf:someone/vit-tiny@main",
        "hf:someone/vit-tiny@main:b/weights.npz",
    ):
        refuses("target: 'vit-tiny.safetensors' exists", place, None, TWO)


# ---- our own format ----------------------------------------------------------------------------------------


def test_saved_parameters_come_back_bit_for_bit_with_their_provenance(folder):
    save_native("ours.safetensors", ENCODER, {"source": "drawn at random"})
    files.same(load_backbone(None, "ours.safetensors", None, options=WeightOptions(heads=2)).params, ENCODER)
    assert metadata("ours.safetensors") == {"source": "drawn at random"}
    assert [file.name for file in folder.iterdir()] == ["ours.safetensors"]


def test_views_are_saved_as_what_they_show_not_as_they_lie_in_memory(folder):
    turned = jax.tree.map(lambda x: np.asfortranarray(x) if x.ndim == 2 else x, ENCODER)
    save_native("ours.safetensors", turned, {})
    files.same(load_backbone(None, "ours.safetensors", None, options=WeightOptions(heads=2)).params, ENCODER)


def test_a_loaded_network_keeps_nothing_of_the_file(folder):
    save_native("ours.safetensors", ENCODER, {})
    params = load_backbone(None, "ours.safetensors", None, options=WeightOptions(heads=2)).params
    with open("ours.safetensors", "r+b") as file:  # in place, as no writer of ours does
        file.seek(-4 * 12, 2)
        file.write(bytes(4 * 12))
    files.same(params, ENCODER)


def test_views_of_a_file_are_not_copied_before_the_network_is_built(folder):
    tensors = files.timm(ENCODER)
    network = interpret(name_tensors(find(tensors, "teacher")), None, TensorFacts(heads=2))
    built = flatten_dict(network.params, sep=".")
    copied = {name for name, x in built.items() if not any(np.shares_memory(x, y) for y in tensors.values())}
    assert copied == {"patch.kernel"}  # its axes change places inside rows
