"""What commands start from: which pixels the backbone gets, where images lie, what features are kept."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import toys
from PIL import Image
from small_runs import OPTIONS, assert_same_run

from fcljax import cli, config
from fcljax.config import InputConfig
from fcljax.data.augment import clean_view, train_view
from fcljax.data.files.dataset import Dataset, with_part_of_training
from fcljax.data.files.sources import hold_out
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.federated.check import check_method
from fcljax.models.networks import network_name
from fcljax.models.shapes import VITS
from fcljax.models.vit import ViTConfig, apply_vit, init_vit
from fcljax.models.weights.pretrained import save_native
from fcljax.options import SurrogateOptions
from fcljax.pixels import NORMALISE, from_unit
from fcljax.runs import build, machine
from fcljax.runs.early_stop import hold_out_training
from fcljax.runs.features import feature_file, frozen_features, save_features, saved_features
from fcljax.runs.inputs import inputs_of, load_inputs, make_splits, read_clean, surrogate_images
from fcljax.types import Phase, Upload, View

SMALL = InputConfig(image_size=8)  # 8 pixels are one patch of vit_micro


def mib(count):
    """A data set whose images take so many MiB, a quarter of them test images."""
    images = np.zeros((count * 4, 512, 512, 1), np.uint8)
    return Dataset(
        "zeros",
        images[count:],
        np.zeros(3 * count, np.int64),
        images[:count],
        np.zeros(count, np.int64),
        ("a",),
    )


def where(budget, eval_batch_size=1):
    dataset = mib(8)
    return make_splits(dataset, (dataset.y_train, dataset.y_test), budget, eval_batch_size)


# ---- pixels ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs():
    return load_inputs(SMALL)


@pytest.mark.parametrize(
    ("normalise", "mean", "std"),
    [
        ("checkpoint", 0.5, 0.5),  # what the packaged weights were trained with
        ("release", 0.5071, 0.2675),  # PILoRA's release has CIFAR-100's constants
        ("imagenet", 0.485, 0.229),
        ("unit", 0.0, 1.0),
    ],
)
def test_pixels_are_in_the_range_that_is_asked_for(normalise, mean, std):
    found = load_inputs(dataclasses.replace(SMALL, normalise=normalise, preprocess="pilora"))
    assert (found.preprocess.mean[0], found.preprocess.std[0]) == (mean, std)
    assert found.preprocess.kernel == "bilinear"


def test_digits_fill_their_frame_and_lose_no_margin(inputs):
    assert inputs.preprocess.resized == 8
    assert not inputs.augments


@pytest.mark.long
def test_augment_decides_over_the_data_set():
    cfg = config.resolve(config.from_mapping("linear", {"image_size": "8"}, "test"))
    augments = lambda value: build.build(dataclasses.replace(cfg, augment=value)).inputs.augments
    assert [augments(value) for value in (None, True, False)] == [False, True, False]


def per_chunk(state_floats, rows=1, lanes=1, phases=1, change=0, **program):
    """How many clients with a state, and local work, of so many floats are played by one call. Each phase
    adds `change` to the work, if it is not 0."""
    begin = lambda context, state, key: {"weight": context.payload, "own": jnp.zeros(state_floats)}
    send = lambda context, local, state: (
        Upload(gather=local["weight"], weight=context.client.examples),
        state,
    )
    first = lambda key, server: jnp.full(state_floats, -1, jnp.int32)

    def step(context, local, batch, key):
        return {**local, "own": local["own"] + change} if change else local, {}

    each = (Phase(View(3, 4, augment=False), step),) * phases
    method = toys.toy(begin, each, send, None, init_client=first, program=program)
    shapes = check_method(method, toys.fetch, toys.EXAMPLE)
    return machine.clients_per_chunk(method, shapes, rows, 3 * 4, lanes)


def test_a_chunk_has_as_many_clients_as_its_memory_holds():
    """The chunk holds the state, an upload of 3 floats, the numbers of 3 epochs of rows, what waits between
    two phases if the first one changes it, and the images of 3 floats that may be replayed."""
    many, own = 2**20, 4 * 2**20
    assert per_chunk(0) == per_chunk(100) == machine.MOST_PER_CHUNK
    assert per_chunk(many) == machine.CHUNK_BYTES // (own + 3 * 4 + 3 * 4)
    assert per_chunk(many, rows=many) == machine.CHUNK_BYTES // (own + 3 * 4 + 3 * own)
    assert per_chunk(many, phases=2) == machine.CHUNK_BYTES // (own + 3 * 4 + 6 * 4)
    assert per_chunk(many, phases=2, change=1) == machine.CHUNK_BYTES // (own + 3 * 4 + 6 * 4 + own)
    assert per_chunk(many, replay_buffer=lambda state: state) == machine.CHUNK_BYTES // (
        own + 6 * 4 + many * 3 * 4
    )
    assert (per_chunk(2**26), per_chunk(2**26, lanes=5)) == (1, 5)


@pytest.mark.long
def test_joint_training_has_all_classes_in_one_task():
    def tasks(method):
        values = {"image_size": "8", "tasks": "5"}
        return build.build(config.resolve(config.from_mapping(method, values, "test"))).scenario.tasks

    assert [len(tasks(method)) for method in ("joint", "fedclm")] == [1, 5]


@pytest.mark.long
def test_auto_takes_the_network_that_the_checkpoint_holds(tmp_path):
    tiny = ViTConfig(image_size=16, patch=8, width=64, depth=1, heads=1, mlp=32)
    save_native(tmp_path / "tiny.safetensors", init_vit(jax.random.key(0), tiny), {})
    found = load_inputs(InputConfig(checkpoint=str(tmp_path / "tiny.safetensors")))
    assert found.backbone.config == tiny
    assert network_name(tiny) == "vit of width 64, depth 1, 1 heads, patch 8"


def test_known_shapes_have_names_at_any_image_size():
    for name, shape in VITS.items():
        assert network_name(dataclasses.replace(shape, image_size=96, dtype="bfloat16")) == name


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of upright and lying pictures of two classes, larger than the network's input."""
    root, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for part, each in (("train", 24), ("test", 6)):
        for row in range(each):
            shape = ((40, 60), (60, 40), (50, 50))[row % 3]
            folder = root / part / "ab"[row % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8)).save(folder / f"{row:02}.png")
    return root


@pytest.mark.parametrize("pipeline", ["fppl", "hepco"])
@pytest.mark.long
def test_training_crops_of_photographs_are_drawn_in_their_own_pixels(pipeline, photographs, tmp_path):
    cfg = dataclasses.replace(
        SMALL, dataset=f"folder:{photographs}", data_dir=str(tmp_path), preprocess=pipeline, store_size=30
    )
    found = load_inputs(cfg)
    dataset = found.dataset
    assert dataset.x_train.shape == (24, 30, 30, 3)
    assert {tuple(size) for size in dataset.size_train} == {(40, 60), (60, 40), (50, 50)}
    assert dataset.x_test.shape == (6, *({"fppl": (9, 9), "hepco": (8, 8)}[pipeline]), 3)
    train, test = make_splits(dataset, (dataset.y_train, dataset.y_test), None, 4)
    rows, keys = jnp.arange(24), jax.random.split(jax.random.key(0), 24)
    image, label, _ = inputs_of(found.preprocess, True, train, rows, keys, True)
    expected = train_view(
        found.preprocess, jnp.asarray(dataset.x_train), keys, jnp.asarray(dataset.size_train)
    )
    np.testing.assert_array_equal(image, expected)
    squeezed = train_view(found.preprocess, jnp.asarray(dataset.x_train), keys)
    assert np.abs(image - squeezed).max() > 0.1  # sizes matter
    np.testing.assert_array_equal(label, dataset.y_train)
    clean = read_clean(found.preprocess, test, jnp.arange(6))
    assert clean.shape == (6, 8, 8, 3)


@pytest.mark.long
def test_a_run_over_photographs_of_many_sizes_streams_and_finishes(photographs, tmp_path, capsys):
    arguments = [
        "--dataset",
        f"folder:{photographs}",
        "--data-dir",
        str(tmp_path / "data"),
        "--image-size",
        "8",
        "--tasks",
        "2",
    ]
    arguments += [
        "--clients",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--min-examples",
        "1",
        "--eval-batch-size",
        "2",
        "--store-size",
        "400",
    ]
    assert cli.main(["run", "linear", *arguments, "--data-budget", "8", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["traces"] == 1
    capsys.readouterr()


# ---- where the images lie ----------------------------------------------------------------------------------


def test_images_that_fit_into_the_budget_lie_on_the_device():
    for budget in (None, 8):
        assert not any(isinstance(split, Host) for split in where(budget))


def test_the_training_images_are_the_first_to_stay_on_the_host():
    train, test = where(7)
    assert isinstance(train, Host) and not isinstance(test, Host)
    assert train.window == 7  # a quarter of 7 MiB, at 0.25 MiB each: two windows beside the test images


def test_a_small_budget_keeps_both_splits_on_the_host():
    train, test = where(2)
    assert isinstance(train, Host) and isinstance(test, Host)
    assert train.window == test.window == 2


def test_a_budget_that_holds_no_two_steps_is_refused_with_the_least():
    with pytest.raises(
        InputError, match=r"^data_budget: 1 MiB cannot hold windows of 32 images; nearest valid value: 32$"
    ):
        where(1, eval_batch_size=16)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fppl", "linear"])
def test_a_run_over_images_on_the_host_leaves_the_bits_of_one_over_resident_images(method, tmp_path):
    """In a process of its own, with XLA's newer emitters, which large networks have. The older ones round
    some sums by the shapes of the arrays that they gather from.
    """
    script = "import json, sys; from fcljax import cli; "
    script += "sys.exit(max(cli.main(run) for run in json.loads(sys.argv[1])))"
    resident, streamed = str(tmp_path / "resident"), str(tmp_path / "streamed")
    common = ["run", method, *OPTIONS[method]]
    runs = [[*common, "--out", resident], [*common, "--data-budget", "2", "--out", streamed]]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=true",
        "PYTHONPATH": str(small_runs.ROOT),
    }
    subprocess.run(
        [sys.executable, "-c", script, json.dumps(runs)],
        env=environment,
        check=True,
        timeout=300,
        capture_output=True,
    )
    assert_same_run(Path(streamed), Path(resident), but=("config", "given"))


# ---- frozen features ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def splits(inputs):
    dataset = inputs.dataset
    return make_splits(dataset, (dataset.y_train, dataset.y_test), None, 64)


@pytest.fixture(scope="module")
def features(inputs, splits):
    told = []
    found = frozen_features(inputs, 64, told.append)(build.frozen_of(inputs.backbone), splits[1])
    assert sum(told) == len(splits[1].label)
    return np.asarray(found)


@pytest.mark.long
def test_features_are_the_class_tokens_of_the_clean_view(inputs, splits, features):
    rows = jnp.array([0, 63, 64, 358])
    image = build.read_clean(inputs.preprocess, splits[1], rows)
    expected = apply_vit(inputs.backbone.config, inputs.backbone.params, image).cls
    np.testing.assert_allclose(features[rows], expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 100, 128, 359])
@pytest.mark.long
def test_features_of_images_on_the_host_have_the_same_bits(rows, inputs, splits, features):
    host = Host(jax.tree.map(np.asarray, splits[1]), rows)
    found = frozen_features(inputs, 64)(build.frozen_of(inputs.backbone), host)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, features)


def test_features_are_kept_under_all_that_decides_them(inputs, features, tmp_path):
    cfg = dataclasses.replace(SMALL, data_dir=str(tmp_path))
    assert saved_features(cfg, inputs, "test") is None
    save_features(cfg, inputs, "test", features)
    np.testing.assert_array_equal(saved_features(cfg, inputs, "test"), features)
    assert saved_features(cfg, inputs, "train") is None
    assert saved_features(dataclasses.replace(cfg, eval_batch_size=32), inputs, "test") is None
    other = inputs._replace(preprocess=dataclasses.replace(inputs.preprocess, mean=(0.0, 0.0, 0.0)))
    assert saved_features(cfg, other, "test") is None
    assert (
        saved_features(cfg, inputs._replace(backbone=inputs.backbone._replace(digest="other")), "test")
        is None
    )
    assert (
        saved_features(cfg, inputs._replace(dataset=inputs.dataset._replace(digest="other")), "test") is None
    )


def test_held_out_splits_take_rows_of_the_whole_data_set_s_features(inputs, tmp_path):
    cfg = dataclasses.replace(SMALL, data_dir=str(tmp_path))
    held_out = inputs._replace(dataset=hold_out(inputs.dataset, 0.25))
    assert saved_features(cfg, held_out, "train") is None
    # a feature that says which image it is of
    width = inputs.backbone.config.width
    mean = inputs.dataset.x_train.reshape(len(inputs.dataset.y_train), -1).mean(axis=1, dtype=np.float32)
    save_features(cfg, inputs, "train", np.repeat(mean[:, None], width, axis=1))
    for part in ("train", "test"):
        image = getattr(held_out.dataset, f"x_{part}")
        expected = image.reshape(len(image), -1).mean(axis=1, dtype=np.float32)
        np.testing.assert_array_equal(saved_features(cfg, held_out, part)[:, 0], expected)
    assert saved_features(cfg, inputs, "test") is None
    fewer = with_part_of_training(held_out.dataset, np.arange(5))
    assert saved_features(cfg, held_out._replace(dataset=fewer), "train") is None
    # with --stop-when-flat the test images stay
    reduced, _ = hold_out_training(inputs.dataset)
    assert saved_features(cfg, inputs._replace(dataset=reduced), "test") is None


def other_number(content):
    """A whole file of features of which one is another, with the old checksum."""
    with np.load(io.BytesIO(content)) as file:
        features, sha256 = file["features"].copy(), file["sha256"]
    features[0, 0] += 1
    stream = io.BytesIO()
    np.savez(stream, features=features, sha256=sha256)
    return stream.getvalue()


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-9], lambda content: b"", lambda content: b"text", other_number]
)
def test_damaged_features_are_computed_again(damage, inputs, features, tmp_path):
    cfg = dataclasses.replace(SMALL, data_dir=str(tmp_path))
    save_features(cfg, inputs, "test", features)
    file = feature_file(cfg, inputs, "test")
    file.write_bytes(damage(file.read_bytes()))
    assert saved_features(cfg, inputs, "test") is None


@pytest.mark.long
def test_a_run_takes_the_features_that_embed_has_left(tmp_path, monkeypatch, capsys):
    reference = small_runs.finished("fppl")
    common = ["--data-dir", str(tmp_path / "data")]
    assert cli.main(["embed", "--image-size", "8", *common, "--out", str(tmp_path / "digits.npz")]) == 0
    monkeypatch.setattr(
        "fcljax.runs.features.frozen_features", lambda *a, **k: lambda *a: pytest.fail("computed again")
    )
    assert cli.main(["run", "fppl", *OPTIONS["fppl"], *common, "--out", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", reference, but=("config", "given"))
    capsys.readouterr()


# ---- images of another data set ----------------------------------------------------------------------------


def test_surrogate_images_are_another_data_sets_under_the_clean_view(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3)).astype(np.uint8)
    np.savez(tmp_path / "x.npz", x_train=image, y_train=np.arange(7), x_test=image, y_test=np.arange(7))
    name, cfg = f"npz:{tmp_path / 'x.npz'}", dataclasses.replace(SMALL, preprocess="hepco")
    found = surrogate_images(cfg, SurrogateOptions(name, 5), 8)
    assert found.dtype == np.uint8 and found.shape == (5, 8, 8, 3)
    assert all(any((one == other).all() for other in image) for one in found)  # of the right size already
    assert len({one.tobytes() for one in found}) == 5
    again = surrogate_images(dataclasses.replace(cfg, seed=1), SurrogateOptions(name, 5), 8)
    assert found.tobytes() != again.tobytes()
    assert len(surrogate_images(cfg, SurrogateOptions(name, 99), 4)) == 7


@pytest.mark.parametrize(
    ("own", "other"), [pytest.param("digits", "glyphs", marks=pytest.mark.long), ("glyphs", "digits")]
)
def test_surrogate_images_are_embedded_ones_that_the_run_does_not_have(own, other):
    cfg = dataclasses.replace(SMALL, dataset=own, glyph_train=1, glyph_test=1)
    found, named = (surrogate_images(cfg, SurrogateOptions(name, 3), 8) for name in ("other", other))
    np.testing.assert_array_equal(found, named)


def test_surrogate_images_of_the_run_itself_or_of_nothing_are_refused():
    with pytest.raises(
        InputError, match="surrogate: 'digits' is the run's own data set; name another, such as 'glyphs'"
    ):
        surrogate_images(SMALL, SurrogateOptions("digits"), 8)
    with pytest.raises(InputError, match="^surrogate: unknown name 'digit'; did you mean 'digits'"):
        surrogate_images(SMALL, SurrogateOptions("digit"), 8)


def test_the_network_that_methods_see_knows_the_pixels_that_it_gets():
    found = load_inputs(dataclasses.replace(SMALL, normalise="cifar100"))
    network = build.network_of(found.backbone, found.preprocess)
    assert (network.mean, network.std) == NORMALISE["cifar100"]
    grey = jnp.full((1, 8, 8, 3), 51, jnp.uint8)
    expected = clean_view(found.preprocess, grey)
    np.testing.assert_allclose(from_unit(network, grey / 255), expected, rtol=1e-6)
