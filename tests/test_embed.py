"""`fcljax embed`: what the file holds, and what is refused."""

import jax
import numpy as np
import pytest

from fcljax import cli
from fcljax.errors import InputError
from fcljax.models.vit import ViTConfig, apply_vit, init_vit
from fcljax.models.weights.pretrained import save_native
from fcljax.results.metrics import nearest_class_mean
from fcljax.runs.embed import EmbedConfig, embed

TINY = ViTConfig(image_size=8, patch=4, width=64, depth=1, heads=1, mlp=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of 30 + 12 grey images of three classes, and a tiny network with a head of five classes."""
    folder, rng = tmp_path_factory.mktemp("embed"), np.random.default_rng(0)
    labels = {"y_train": np.arange(30) % 3, "y_test": np.arange(12) % 3}
    images = {}
    for part, n in (("train", 30), ("test", 12)):
        grey = 80 * labels[f"y_{part}"][:, None, None] + rng.integers(0, 60, (n, 8, 8))
        images[f"x_{part}"] = grey.astype(np.uint8)
    np.savez(folder / "data.npz", **images, **labels)
    params = init_vit(jax.random.key(0), TINY)
    head = {
        "kernel": rng.normal(size=(64, 5)).astype(np.float32),
        "bias": rng.normal(size=5).astype(np.float32),
    }
    save_native(folder / "headless.safetensors", params, {})
    save_native(folder / "with-head.safetensors", params | {"head": head}, {})
    return folder, images, labels, params, head


def settings(folder, checkpoint, **others):
    cfg = EmbedConfig(
        dataset=f"npz:{folder / 'data.npz'}",
        checkpoint=str(folder / f"{checkpoint}.safetensors"),
        normalise="unit",
        eval_batch_size=8,
        **{"data_dir": str(folder / "data"), **others},
    )
    return cfg


def test_the_file_holds_features_labels_and_logits_of_both_splits(folder, tmp_path):
    path, images, labels, params, head = folder
    summary = embed(settings(path, "with-head", keep_head=True, preprocess="hepco"), tmp_path / "out")
    with np.load(tmp_path / "out", allow_pickle=False) as file:
        found = dict(file)
    both = (
        np.concatenate([images["x_train"], images["x_test"]])[..., None]
        / np.float32(255)
        * np.ones(3, np.float32)
    )
    cls = np.asarray(jax.jit(lambda image: apply_vit(TINY, params, image).cls)(both))
    assert found["features"].dtype == np.float32
    np.testing.assert_allclose(found["features"], cls, atol=1e-4)
    np.testing.assert_allclose(found["logits"], cls @ head["kernel"] + head["bias"], atol=1e-3)
    np.testing.assert_array_equal(found["labels"], np.concatenate([labels["y_train"], labels["y_test"]]))
    np.testing.assert_array_equal(found["is_test"], np.arange(42) >= 30)
    assert found["class_names"].tolist() == ["0", "1", "2"]
    assert summary["features"] == [42, 64]
    train, test = found["features"][:30], found["features"][30:]
    nearest = nearest_class_mean(train, labels["y_train"], test, labels["y_test"])
    assert summary["nearest class mean, test accuracy"] == round(nearest, 4) > 0.3
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.long
def test_several_devices_give_the_same_features(folder, tmp_path):
    for devices in (1, 4):
        embed(settings(folder[0], "headless", devices=devices), tmp_path / f"{devices}.npz")
    with np.load(tmp_path / "1.npz") as one, np.load(tmp_path / "4.npz") as four:
        np.testing.assert_allclose(four["features"], one["features"], atol=1e-5)
        assert all((one[name] == four[name]).all() for name in ("labels", "is_test", "class_names"))


def test_without_keep_head_there_are_no_logits(folder, tmp_path):
    embed(settings(folder[0], "with-head"), tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as file:
        assert set(file.files) == {"features", "labels", "is_test", "class_names"}


def test_a_head_that_is_not_there_cannot_be_kept(folder, tmp_path):
    with pytest.raises(InputError, match="^keep_head: the checkpoint has no classification head"):
        embed(settings(folder[0], "headless", keep_head=True), tmp_path / "out.npz")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(folder, tmp_path):
    (tmp_path / "out.npz").write_text("mine")
    with pytest.raises(InputError, match="^out: .*out.npz' exists already"):
        embed(settings(folder[0], "headless"), tmp_path / "out.npz")
    assert (tmp_path / "out.npz").read_text() == "mine"


def test_the_command_takes_the_options_of_run(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = folder[0]
    arguments = ["--dataset", f"npz:{path / 'data.npz'}", "--checkpoint", str(path / "headless.safetensors")]
    assert (
        cli.main(
            [
                "embed",
                *arguments,
                "--preprocess",
                "pilora",
                "--image-size",
                "12",
                "--data-dir",
                str(tmp_path / "data"),
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "data-headless.npz" in out and "nearest class mean" in out
    assert "position embeddings were interpolated" in " ".join(err.split())
    assert (tmp_path / "data-headless.npz").exists()
    assert len(list((tmp_path / "data" / "features").iterdir())) == 2


def test_the_nearest_class_mean_by_hand():
    # class 4 has mean (1, 0), class 7 (10, 0)
    train = np.array([[0.0, 0.0], [2.0, 0.0], [10.0, 0.0]], np.float32)
    test = np.array([[5.0, 9.0], [6.0, 0.0], [5.6, 0.0]], np.float32)
    assert nearest_class_mean(train, np.array([4, 4, 7]), test, np.array([4, 7, 4])) == pytest.approx(2 / 3)
