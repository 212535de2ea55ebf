"""Pretraining: atomic, repeatable, small files, and packaged weights that fit and know unseen letters."""

import dataclasses
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict

from fcljax.data.glyphs import GLYPHS, PRETRAIN, Style, glyphs
from fcljax.errors import InputError
from fcljax.models.shapes import VITS
from fcljax.models.vit import init_vit, parameter_shapes
from fcljax.models.weights.pretrained import load_backbone
from fcljax.pretraining.encoder import PretrainConfig, eased, features, normalise, pretrain
from fcljax.results.metrics import nearest_class_mean

pytestmark = pytest.mark.long  # it trains a network; the weights that it made are checked elsewhere

VIT = VITS["vit_micro"]
TINY = PretrainConfig(steps=2, batch_size=4, classes=12, validate=1)
ASSET = resources.files("fcljax") / "assets" / "vit_micro.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrain")
    return folder, pretrain(dataclasses.replace(TINY, out=folder / "a.safetensors"))


def shapes():
    return {name: value.shape for name, value in flatten_dict(parameter_shapes(VIT), sep=".").items()}


def test_a_short_run_writes_a_loadable_file_and_nothing_else(run):
    folder, summary = run
    assert [path.name for path in folder.iterdir()] == ["a.safetensors"]
    tensors = safetensors.numpy.load_file(folder / "a.safetensors")
    assert {name: x.shape for name, x in tensors.items()} == shapes()
    assert all(np.isfinite(x).all() for x in tensors.values())
    assert summary["bytes"] == (folder / "a.safetensors").stat().st_size <= 1_500_000
    assert np.isfinite(summary["loss"]) and 0 <= summary["validation"] <= 1 and summary["steps"] == 2
    load_backbone("vit_micro", str(folder / "a.safetensors"), None)


def test_training_moves_every_parameter(run):
    stored = safetensors.numpy.load_file(run[0] / "a.safetensors")
    body, _ = jax.random.split(jax.random.key(TINY.seed))
    initial = flatten_dict(init_vit(body, VIT), sep=".")
    assert not [
        name for name, x in initial.items() if np.array_equal(stored[name], np.asarray(x, np.float16))
    ]


def test_the_same_seed_gives_the_same_bytes(run, tmp_path):
    pretrain(dataclasses.replace(TINY, out=tmp_path / "b.safetensors"))
    assert (run[0] / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def metadata(path):
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata()


def test_the_metadata_tell_how_the_file_was_made(run):
    told = metadata(run[0] / "a.safetensors")
    assert told["command"] == "fcljax pretrain --steps 2 --batch-size 4 --classes 12 --validate 1"
    assert (told["steps"], told["seed"], told["classes"]) == ("2", "0", PRETRAIN[:12])
    assert (told["mean"], told["std"], told["image_size"]) == ("0.5", "0.5", "32")


def test_a_failed_run_leaves_the_old_file(tmp_path, monkeypatch):
    def broken(self, content):
        raise OSError("disk full")

    (tmp_path / "a.safetensors").write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(OSError, match="disk full"):
        pretrain(dataclasses.replace(TINY, out=tmp_path / "a.safetensors"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.safetensors", b"old")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("validate", 0),
        ("seed", -1),
        ("classes", 601),
        ("lr", -1.0),
        ("warmup", 2.0),
        ("ramp", -0.1),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(InputError, match=f"^{field}: {value} (is too|must be)"):
        pretrain(dataclasses.replace(TINY, **{field: value}))


def test_another_suffix_or_a_folder_is_named_before_training(tmp_path):
    with pytest.raises(
        InputError, match=r"^out: .*\.npz' must end in \.safetensors; nearest: 'a\.safetensors'$"
    ):
        pretrain(dataclasses.replace(TINY, out=Path("a.npz")))
    folder = tmp_path / "a.safetensors"
    folder.mkdir()
    with pytest.raises(InputError, match=r"^out: .*a\.safetensors' is a folder; give the name of a file"):
        pretrain(dataclasses.replace(TINY, out=folder))


def test_full_strength_is_the_style_itself_and_less_is_slighter():
    full, half = eased(Style(), 1.0), eased(Style(), 0.5)
    assert dataclasses.replace(full, contrast=round(full.contrast, 9)) == Style()
    assert (
        half.rotation == Style().rotation / 2
        and half.resolution[0] > 8
        and half.scale[0] > 0.6
        and half.contrast > Style().contrast
    )


def test_normalised_black_is_minus_one_and_white_is_one():
    np.testing.assert_allclose(normalise(jnp.array([[[0, 255]]], jnp.uint8))[0, 0], [[-1] * 3, [1] * 3])


def test_nearest_means_by_hand():
    # The means are (1, 0) and (10, 0), so the border is at 5.5.
    train, label = np.array([[0.0, 0.0], [2.0, 0.0], [10.0, 0.0]], np.float32), np.array([0, 0, 1])
    test = np.array([[1.0, 5.0], [5.4, 0.0], [5.6, 0.0], [5.6, 0.0]], np.float32)
    assert nearest_class_mean(train, label, test, np.array([0, 0, 1, 0])) == 0.75


def test_the_packaged_weights_have_exactly_the_shapes_of_vit_micro():
    tensors = safetensors.numpy.load_file(str(ASSET))
    assert {name: x.shape for name, x in tensors.items()} == shapes()
    assert len(ASSET.read_bytes()) <= 1_500_000


def test_the_packaged_weights_were_made_by_the_default_command():
    told = metadata(str(ASSET))
    assert told["command"] == "fcljax pretrain"
    assert told["steps"] == str(PretrainConfig().steps) and told["classes"] == PRETRAIN


def test_the_packaged_weights_separate_letters_that_they_were_not_trained_on():
    x, y, x_test, y_test = glyphs(20, 10, seed=11, chars=GLYPHS[::5])
    packaged = load_backbone("vit_micro", None, None)[1]
    body = init_vit(jax.random.key(0), VIT)
    score = lambda p: nearest_class_mean(
        features(VIT, p, x[..., 0]), y, features(VIT, p, x_test[..., 0]), y_test
    )
    assert score(packaged) > 0.4 > 2 * score(body)  # 20 classes: chance is 0.05
