"""`fcljax export`: a run's model for other libraries."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
from safetensors.numpy import load_file

import fcljax
from fcljax import cli
from fcljax.models.shapes import VITS, ViTConfig
from fcljax.models.vit import Lora, low_rank, parameter_shapes
from fcljax.models.weights import finding, naming
from fcljax.results import metrics
from fcljax.results.repeat import software_of
from fcljax.runs import export

WIDTH = 8


def random_like(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def test_tensors_under_timm_s_names_are_read_back_as_they_were():
    config = ViTConfig(image_size=8, patch=4, width=WIDTH, depth=2, heads=2, mlp=16)
    params = random_like(parameter_shapes(config))
    params["head"] = random_like({"kernel": np.empty((WIDTH, 3)), "bias": np.empty(3)}, 1)
    tensors = naming.timm_tensors(params, config)
    assert tensors["blocks.1.attn.qkv.weight"].shape == (3 * WIDTH, WIDTH)
    network = naming.name_tensors(finding.find(tensors, "teacher"))
    read = naming.interpret(network, None, naming.TensorFacts(heads=2))
    head = params.pop("head")
    jax.tree.map(np.testing.assert_array_equal, read.params, params)
    jax.tree.map(np.testing.assert_array_equal, read.head, head)


def test_updates_of_queries_and_values_are_one_update_of_timm_s_projection():
    shapes = Lora(*(np.empty(shape) for shape in [(2, WIDTH), (WIDTH, 2)] * 2))
    pair = jax.tree.map(jnp.asarray, random_like(shapes))
    head = export.Head(*random_like((np.empty((WIDTH, 3)), np.empty(3)), 1))
    tensors = export._peft_tensors({4: pair}, head)
    prefix = "base_model.model.blocks.4.attn.qkv"
    x = np.random.default_rng(2).normal(size=(5, WIDTH)).astype(np.float32)
    update = x @ tensors[f"{prefix}.lora_A.weight"].T @ tensors[f"{prefix}.lora_B.weight"].T
    query, key, value = np.split(update, 3, axis=-1)
    np.testing.assert_allclose(query, low_rank(jnp.asarray(x), pair.a_q, pair.b_q), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value, low_rank(jnp.asarray(x), pair.a_v, pair.b_v), rtol=1e-5, atol=1e-5)
    assert not key.any()


@pytest.mark.long
def test_an_export_has_the_model_s_parameters_classifier_and_card(tmp_path, capsys):
    run = small_runs.finished("linear")
    folder = tmp_path / "new" / "out"
    capsys.readouterr()
    assert cli.main(["export", str(run), "--out", str(folder), "--network"]) == 0
    shown = capsys.readouterr().out
    assert "no adapter_model.safetensors: the run trained no low-rank updates" in shown
    head = load_file(folder / export.CLASSIFIER)
    trained = load_file(folder / export.TRAINED)
    np.testing.assert_allclose(head["weight"].T, trained["classifier.kernel"], atol=1e-5)
    np.testing.assert_allclose(head["bias"], trained["classifier.bias"], atol=1e-6)
    network = load_file(folder / export.NETWORK)
    assert network["cls_token"].shape == (1, 1, VITS["vit_micro"].width)
    card = (folder / export.CARD).read_text()
    result = fcljax.Result.of(run)
    assert f"{100 * result.metrics['A_last']:.1f} %" in card and "## Classes" in card
    assert software_of(result.metrics) in card and "with alpha 0.5, seed" in card
    assert f"{100 * result.metrics['forgetting']['paper']:.1f} points" in card
    # PEFT cannot load what has no adapter_model.safetensors
    assert "library_name: fcljax" in card
    # a second export would overwrite the first
    assert cli.main(["export", str(run), "--out", str(folder)]) == 2
    assert "exists; give another folder" in capsys.readouterr().err


def test_the_confusion_matrix_is_in_the_run_directory():
    result = fcljax.Result.of(small_runs.finished("linear"))
    confusion = result.confusion
    classes = len(result.metrics["class_names"])
    assert confusion.shape == (classes, classes + 1)
    np.testing.assert_allclose(np.diag(confusion) / confusion.sum(1), result.metrics["class_accuracy"])


def test_predictions_are_in_the_run_directory_and_make_the_confusion_matrix():
    result = fcljax.Result.of(small_runs.finished("linear"))
    names = result.metrics["class_names"]
    rows = result.predictions
    places = [np.searchsorted(names, rows[of], sorter=np.argsort(names)) for of in ("class", "predicted")]
    label, predicted = (np.argsort(names)[place] for place in places)
    confusion = np.zeros_like(result.confusion)
    np.add.at(confusion, (label, predicted), 1)
    np.testing.assert_array_equal(confusion, result.confusion)
    np.testing.assert_array_equal(rows["index"], np.arange(len(label)))
    task_of_class = {c: t for t, task in enumerate(result.metrics["task_classes"]) for c in task}
    assert [task_of_class[c] for c in label] == rows["task"].tolist()
    # the calibration of the same predictions, whose bins are fifteenths
    bins = np.minimum((rows["probability"] * 15).astype(int), 14)
    assert np.bincount(bins, minlength=15).tolist() == result.metrics["calibration"]["examples"]


def test_the_card_of_a_run_of_one_task_has_no_forgetting():
    summary = dict(fcljax.Result.of(small_runs.finished("linear")).metrics)
    assert export._stream(summary) == "10 classes in 5 tasks"
    summary["A"] = summary["A"][:1]
    assert export._stream(summary) == "10 classes at once"
    summary["forgetting"] = metrics.forgetting([[0.5]])
    assert export._forgetting(summary) == "-"


@pytest.mark.long
def test_a_run_that_is_resumed_after_its_last_round_predicts_again(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(small_runs.finished("linear"), run)
    written = (run / "predictions.csv").read_bytes()
    for name in ("summary.json", "predictions.csv", "digests.json"):
        (run / name).unlink()
    assert cli.main(["run", "linear", "--resume", str(run)]) == 0
    assert (run / "predictions.csv").read_bytes() == written


@pytest.mark.long
def test_a_classifier_that_is_no_linear_layer_is_left_out(tmp_path):
    lines = fcljax.Result.of(small_runs.finished("fppl")).export(tmp_path / "out")
    assert any(line.startswith("no adapter_model.safetensors: the adapter adds more") for line in lines)


@pytest.mark.long
def test_peft_loads_the_adapter_and_gives_the_same_logits(tmp_path):
    peft = pytest.importorskip("peft")
    timm = pytest.importorskip("timm")
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    from fcljax.runs.inputs import clean_input
    from fcljax.runs.loop import final_state

    result = fcljax.run(
        "fed-talora",
        "digits",
        tasks=2,
        clients=2,
        rounds=1,
        epochs=1,
        image_size=32,
        lora_lr=0.05,
        progress=False,
    )
    folder = tmp_path / "out"
    result.export(folder, network=True)
    exp, _ = final_state(result.settings, result.folder)
    images = exp.inputs.dataset.x_test[:50]
    x = np.asarray(clean_input(exp.inputs.preprocess, jnp.asarray(images)))
    shape = VITS["vit_micro"]
    network = timm.models.VisionTransformer(
        img_size=32,
        patch_size=shape.patch,
        embed_dim=shape.width,
        depth=shape.depth,
        num_heads=shape.heads,
        mlp_ratio=shape.mlp / shape.width,
        num_classes=10,
    )
    loaded = network.load_state_dict(load_torch(folder / export.NETWORK), strict=False)
    assert loaded.missing_keys == ["head.weight", "head.bias"] and not loaded.unexpected_keys
    plain = network.eval()(torch.tensor(x).permute(0, 3, 1, 2))
    model = peft.PeftModel.from_pretrained(network, str(folder)).eval()
    with torch.no_grad():
        logits = model(torch.tensor(x).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(logits, result.model.scores(images), atol=1e-5)
    assert abs(logits - plain.detach().numpy()).max() > 0.1
    config = json.loads((folder / export.PEFT[0]).read_text())
    assert config["r"] == config["lora_alpha"]
    assert "library_name: peft" in (folder / export.CARD).read_text()
