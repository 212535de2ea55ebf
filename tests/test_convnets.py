"""Convolutional networks: a convolution with gradients of its own, ResNets and DenseNets."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
from flax import linen as nn
from jax import lax
from safetensors.numpy import load_file, save_file

from fcljax import cli
from fcljax.adapters.full import FullOptions, full
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.methods.fedavg import NoOptions
from fcljax.methods.fedavg import plain as plain_method
from fcljax.models.convnet import init_convnet
from fcljax.models.convolution import Window, conv, conv_general_dilated, max_pool
from fcljax.models.densenet import DenseNet, DenseNetConfig, densenet_network
from fcljax.models.networks import make_network
from fcljax.models.resnet import ResNet, ResNetConfig, resnet_network
from fcljax.models.shapes import DENSENETS, RESNETS, ConvNeXtConfig
from fcljax.models.vit import Injection
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.pretrained import WeightOptions, load_backbone
from fcljax.parts.federate import Run, Training
from fcljax.pixels import NORMALISE
from fcljax.types import Batch, ClientContext, ClientInfo, Frozen, RoundContext, Sizes

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = ("NHWC", "HWIO", "NHWC")
RESNET = ResNetConfig(8, (1, 1), 4, "cifar")
DENSENET = DenseNetConfig(16, (2, 1), 4, 6, "imagenet")
NETWORKS = {"resnet": resnet_network(RESNET), "densenet": densenet_network(DENSENET)}
DENSE_IS_LONG = ["resnet", pytest.param("densenet", marks=pytest.mark.long)]
draw = np.random.default_rng(0).normal


def random(*shape):
    return jnp.asarray(draw(size=shape), jnp.float32)


def plain(window, x, kernel):
    return lax.conv_general_dilated(
        x,
        kernel,
        window.stride,
        window.pads,
        dimension_numbers=LAYOUT,
    )


# ---- the convolution ---------------------------------------------------------------------------------------

# size, stride, pads, side, inputs: each with each other's plain value, and all at once; the kernel of a first
# layer, of few inputs and with stride 1, has a gradient of its own
SIZES = [
    (3, 1, (1, 1), 8, 8),
    (1, 2, (0, 0), 8, 8),
    (3, 2, (1, 1), 7, 8),
    (3, 3, (2, 1), 8, 8),
    (3, 1, (2, 1), 8, 8),
    (2, 3, (1, 0), 7, 8),
    (3, 2, (2, 1), 8, 8),
    (3, 1, (1, 1), 8, 3),
    (3, 1, (2, 1), 8, 1),
    (3, 2, (2, 1), 8, 3),
]


@pytest.mark.parametrize("size, stride, pads, side, inputs", small_runs.some(SIZES, SIZES[::3]))
def test_values_and_both_gradients_are_those_of_jax(size, stride, pads, side, inputs):
    window = Window((stride, 1), (pads, (1, 2)))
    x, kernel = random(3, side, 6, inputs), random(size, 2, inputs, 6)
    (ours, back), (theirs, expected) = (
        jax.vjp(lambda x, kernel, f=f: f(window, x, kernel), x, kernel) for f in (conv, plain)
    )
    gradient = random(*ours.shape)
    for one, other in zip((ours, *back(gradient)), (theirs, *expected(gradient)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_every_convolution_of_a_training_step_has_the_layout_that_is_fast_inside_loops():
    """jax's own kernel gradient has the batch where channels belong (jax issue 12868)."""

    def layouts(convolution):
        loss = lambda kernel, x: convolution(Window((2, 2), ((1, 1), (1, 1))), x, kernel).sum() ** 2
        step = jax.grad(loss, argnums=(0, 1))
        text = jax.jit(step).lower(random(3, 3, 4, 6), random(2, 8, 8, 4)).as_text()
        return {
            line.split("dim_numbers = ")[1].split(",  window")[0].split(", window")[0]
            for line in text.splitlines()
            if "dim_numbers = " in line
        }

    assert layouts(conv) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    assert len(layouts(plain)) == 3


@pytest.mark.parametrize("padding", ["SAME", "VALID", 1, ((2, 0), (1, 3))])
def test_flax_layers_take_it_in_the_place_of_jax_own(padding):
    x = random(2, 9, 7, 4)
    ours, theirs = (
        nn.Conv(6, (3, 2), (2, 1), padding, **more)
        for more in ({"conv_general_dilated": conv_general_dilated}, {})
    )
    params = ours.init(jax.random.key(0), x)
    loss = lambda layer: lambda params: (layer.apply(params, x) ** 2).sum()
    mine, usual = (jax.value_and_grad(loss(layer))(params) for layer in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), mine, usual)


@pytest.mark.parametrize(
    "more", [{"lhs_dilation": (2, 1)}, {"rhs_dilation": (1, 2)}, {"precision": "highest"}]
)
def test_what_it_is_not_for_is_as_jax_does_it(more):
    x, kernel = random(2, 5, 5, 3), random(3, 3, 3, 4)
    one, other = (
        f(x, kernel, (1, 1), ((1, 1), (2, 0)), dimension_numbers=LAYOUT, **more)
        for f in (conv_general_dilated, lax.conv_general_dilated)
    )
    np.testing.assert_array_equal(one, other)


# size, stride, pads, height: two by two as of small networks, the stem of a ResNet, and others
WINDOWS = [
    ((2, 2), (2, 2), ((0, 0), (0, 0)), 8),
    ((2, 3), (2, 3), ((0, 0), (0, 0)), 7),
    ((3, 3), (2, 2), ((1, 1), (1, 1)), 8),
    ((3, 2), (1, 2), ((1, 0), (0, 1)), 5),
    ((1, 1), (2, 3), ((0, 0), (0, 0)), 5),
]


@pytest.mark.parametrize("size, stride, pads, height", small_runs.some(WINDOWS, WINDOWS[::2]))
def test_max_pooling_and_its_gradient_are_those_of_flax_also_of_equal_values(size, stride, pads, height):
    x = jnp.round(2 * random(3, height, 9, 4))  # many windows have their largest value twice
    (ours, back), (theirs, expected) = (
        jax.vjp(f, x)
        for f in (
            lambda x: max_pool(size, Window(stride, pads), x),
            lambda x: nn.max_pool(x, size, stride, pads),
        )
    )
    np.testing.assert_array_equal(ours, theirs)
    gradient = random(*ours.shape)
    np.testing.assert_allclose(back(gradient)[0], expected(gradient)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platform, scattered", [("cpu", False), ("tpu", True), ("cuda", True)])
def test_xla_scatters_the_gradient_of_max_pooling_where_that_is_fast(platform, scattered):
    def pooled(x):
        return max_pool((3, 3), Window((2, 2), ((1, 1), (1, 1))), x).sum()

    traced = jax.jit(jax.grad(pooled)).trace(random(1, 8, 8, 2))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("select_and_scatter" in text) == scattered


# ---- the networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, count",
    [
        ("resnet18", 11_689_512),
        pytest.param("densenet121", 7_978_856, marks=pytest.mark.long),
        pytest.param("resnet34", 21_797_672, marks=pytest.mark.long),
        pytest.param("densenet169", 14_149_480, marks=pytest.mark.long),
    ],
)
def test_parameters_are_as_many_as_in_torchvision(name, count):
    """With a classifier of 1000 classes (specification of VFCL, O6)."""
    config = (RESNETS | DENSENETS)[name]
    module = ResNet(config) if name in RESNETS else DenseNet(config)
    shapes = jax.eval_shape(lambda key: init_convnet(key, module, config.image_size), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes.weights)) + 1000 * (config.width + 1) == count


@pytest.fixture(params=DENSE_IS_LONG)
def network(request):
    return NETWORKS[request.param]


@pytest.fixture
def variables(network):
    return jax.jit(network.init)(jax.random.key(0))


def test_in_training_statistics_move_towards_those_of_the_rows_that_count(network, variables):
    """A tenth of the way; in evaluation they stay. The first layer's are known by its output."""
    image, mask = random(4, *network.image), jnp.array([True, True, False, True])
    features, moved = network.apply(variables, image, None, True, mask)
    first = jax.tree.map(np.asarray, moved.stats["stem"]["norm"]["norm"])
    kernel = variables.weights["stem"]["conv"]["kernel"]
    side = kernel.shape[0]
    window = Window(*[((s, s), ((p, p), (p, p))) for s, p in [(1, 1) if side == 3 else (2, 3)]][0])
    seen = np.asarray(plain(window, image, kernel))[np.asarray(mask)]
    np.testing.assert_allclose(first["mean"], 0.1 * seen.mean(axis=(0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first["var"], 0.9 + 0.1 * seen.var(axis=(0, 1, 2)), rtol=1e-4)
    _, still = network.apply(moved, image, None, False, mask)
    jax.tree.map(np.testing.assert_array_equal, still, moved)
    assert features.cls.shape == (4, network.width) and features.cls.dtype == jnp.float32


def test_padding_is_inert(network, variables):
    """NaN in a row that does not count changes neither the others' features nor the statistics."""
    image, mask = random(4, *network.image), jnp.array([True, True, False, True])
    poisoned = image.at[2].set(jnp.nan)
    (clean, stats), (other, also) = (network.apply(variables, x, None, True, mask) for x in (image, poisoned))
    np.testing.assert_array_equal(clean.cls[mask], other.cls[mask])
    jax.tree.map(np.testing.assert_array_equal, stats, also)


def test_in_evaluation_rows_do_not_see_each_other(network, variables):
    image = random(4, *network.image)
    whole = network.apply(variables, image, None, False)[0].cls
    alone = network.apply(variables, image[:1], None, False)[0].cls
    np.testing.assert_allclose(whole[:1], alone, rtol=1e-4, atol=1e-5)


def test_what_adapters_put_into_attention_is_refused(network, variables):
    image = random(1, *network.image)
    with pytest.raises(InputError, match="injection: .* no attention"):
        network.apply(variables, image, Injection(), False)


def test_bfloat16_is_close_to_float32_and_gives_float32_features():
    exact, half = (
        resnet_network(dataclasses.replace(RESNET, dtype=kind)) for kind in ("float32", "bfloat16")
    )
    variables, image = jax.jit(exact.init)(jax.random.key(0)), random(4, *exact.image)
    one, other = (each.apply(variables, image, None, False)[0].cls for each in (exact, half))
    assert other.dtype == jnp.float32 and (one != other).any()
    np.testing.assert_allclose(one, other, rtol=0.1, atol=0.05)


def test_tf32_asks_for_it_in_every_convolution_and_its_gradients():
    coarse = resnet_network(dataclasses.replace(RESNET, dtype="tf32"))
    shapes = jax.eval_shape(coarse.init, jax.random.key(0))

    def loss(variables, image):
        return coarse.apply(variables, image, None, True)[0].cls.sum()

    image = jax.ShapeDtypeStruct((4, *coarse.image), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(shapes, image).as_text()
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) > 10
    assert all("precision_config = [#stablehlo<precision HIGH>" in line for line in convolutions)


# ---- other libraries' weights ------------------------------------------------------------------------------


GOLDENS = ["resnet", "resnet_cifar", "resnet_bottleneck", "densenet"]


@pytest.mark.parametrize("name", small_runs.some(GOLDENS, ("resnet",)))
def test_torchvision_weights_give_torchvision_outputs(name):
    expected = np.load(GOLDEN / "convnets.npz")
    loaded = load_backbone(None, str(GOLDEN / f"torchvision_{name}.safetensors"), 40)
    assert loaded.mapping == "torchvision" and isinstance(loaded.config, ResNetConfig | DenseNetConfig)
    network = make_network(loaded.config, loaded.mean, loaded.std)
    features = network.apply(loaded.params, jnp.asarray(expected["image"]), None, False)[0].cls
    np.testing.assert_allclose(features, expected[f"{name}.features"], rtol=1e-4, atol=1e-4)
    logits = features @ loaded.head["kernel"] + loaded.head["bias"]
    np.testing.assert_allclose(logits, expected[f"{name}.logits"], rtol=1e-4, atol=1e-4)
    assert NORMALISE["imagenet"] == (loaded.mean, loaded.std)
    assert any("7 classes" in note for note in loaded.notes)


def as_torchvision_names_convnexts(tensors):
    for name in list(tensors):
        new = re.sub(r"^stem\.", "features.0.", name)
        new = re.sub(r"^stages\.(\d)\.blocks\.", lambda m: f"features.{2 * int(m[1]) + 1}.", new)
        new = re.sub(r"^stages\.(\d)\.downsample\.", lambda m: f"features.{2 * int(m[1])}.", new)
        words = {"conv_dw": "block.0", "norm": "block.2", "mlp.fc1": "block.3", "mlp.fc2": "block.5"}
        for ours, theirs in words.items():
            new = re.sub(rf"^(features\.[1357]\.\d\.){ours}\.", rf"\1{theirs}.", new)
        for ours, theirs in {"head.norm": "classifier.0", "head.fc": "classifier.2"}.items():
            new = new.replace(ours, theirs)
        tensors[new.replace("gamma", "layer_scale")] = tensors.pop(name)


def as_its_authors_name_convnexts(tensors):
    for name in list(tensors):
        new = re.sub(r"^stages\.(\d)\.downsample", r"downsample_layers.\1", name)
        new = re.sub(r"^stem\.", "downsample_layers.0.", new).replace(".blocks.", ".")
        for ours, theirs in {"conv_dw": "dwconv", "mlp.fc1": "pwconv1", "mlp.fc2": "pwconv2"}.items():
            new = new.replace(ours, theirs)
        tensors[new.replace("head.norm", "norm").replace("head.fc", "head")] = tensors.pop(name)


@pytest.mark.long
def test_convnexts_of_timm_torchvision_and_their_authors_give_timms_outputs(tmp_path):
    expected, path = np.load(GOLDEN / "vits.npz"), GOLDEN / "timm_convnext.safetensors"
    loaded = load_backbone(None, str(path), 40)
    assert loaded.config == ConvNeXtConfig(40, (1, 1, 2, 1), (8, 16, 24, 32))
    network = make_network(loaded.config, loaded.mean, loaded.std)
    apply = jax.jit(lambda params, image: network.apply(params, image, None, False)[0].cls)
    features = apply(loaded.params, jnp.asarray(expected["convnext/image"]))
    np.testing.assert_allclose(features, expected["convnext/features"], rtol=1e-4, atol=1e-4)
    logits = features @ loaded.head["kernel"] + loaded.head["bias"]
    np.testing.assert_allclose(logits, expected["convnext/logits"], rtol=1e-4, atol=1e-4)
    tensors = load_file(path)
    for change in (as_torchvision_names_convnexts, as_its_authors_name_convnexts):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, tmp_path / "other.safetensors")
        other = load_backbone(None, str(tmp_path / "other.safetensors"), 40)
        jax.tree.map(np.testing.assert_array_equal, other.params, loaded.params)
    tensors.pop("stages.0.0.norm.bias")
    save_file(tensors, tmp_path / "broken.safetensors")
    with pytest.raises(InputError, match="stem or a first block of this ConvNeXt is missing"):
        load_backbone(None, str(tmp_path / "broken.safetensors"), 40)


def edited(tmp_path, change, name="resnet"):
    """A golden file with its tensors changed."""
    tensors = load_file(GOLDEN / f"torchvision_{name}.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "edited.safetensors")
    return str(tmp_path / "edited.safetensors")


def as_in_a_checkpoint(tensors):
    for name in list(tensors):
        tensors[f"state_dict.module.{name}"] = tensors.pop(name)


def as_in_files_of_densenets(tensors):
    """torchvision's own files have the names of its first versions."""
    for name in list(tensors):
        tensors[re.sub(r"(denselayer\d+\.(?:norm|conv))", r"\1.", name)] = tensors.pop(name)


@pytest.mark.parametrize(
    "name, change", [("resnet", as_in_a_checkpoint), ("densenet", as_in_files_of_densenets)]
)
def test_other_spellings_of_the_names_are_understood(tmp_path, name, change):
    plain = load_backbone(None, str(GOLDEN / f"torchvision_{name}.safetensors"), 40)
    other = load_backbone(None, edited(tmp_path, change, name), 40)
    jax.tree.map(np.testing.assert_array_equal, other.params, plain.params)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("layer3.0.bn1.running_var"), ["layer3.0.bn1.running_var", "missing"]),
        (lambda t: t.update({"layer2.0.se": np.ones(3, np.float32)}), ["unexpected", "layer2.0.se"]),
        (lambda t: t.update({"bn1.bias": np.ones(3, np.float32)}), ["bn1.bias", "(3,)", "(4,)"]),
        (lambda t: t["bn1.bias"].fill(np.nan), ["bn1.bias", "finite"]),
        (lambda t: t.update({"layer1.0.conv3.weight": np.ones(3, np.float32)}), ["does not fit", "missing"]),
        (lambda t: t.update({"conv1.weight": np.ones((4, 3, 5, 5), np.float32)}), ["first convolution"]),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, words):
    with pytest.raises(InputError) as refused:
        load_backbone(None, edited(tmp_path, change), 40)
    assert all(word in str(refused.value) for word in words)


def test_options_that_contradict_a_convolutional_network_are_refused(tmp_path):
    resnet = str(GOLDEN / "torchvision_resnet.safetensors")
    for words, ask in {
        "does not fit resnet18: it is resnet of 1-2-1-1 blocks, 4 channels": ("resnet18", resnet, 40),
        "image_size: 16 .* nearest: 32": (None, resnet, 16),
    }.items():
        with pytest.raises(InputError, match=words):
            load_backbone(*ask)
    for words, more in {
        "heads: 3 is an option of a ViT": {"heads": 3},
        "stem: 'cifar' requested": {"stem": "cifar"},
    }.items():
        with pytest.raises(InputError, match=words):
            load_backbone(None, resnet, 40, options=WeightOptions(**more))
    with pytest.raises(InputError, match="read as it is"):
        convert(resnet, str(tmp_path / "new.safetensors"), ConvertOptions())


@pytest.mark.long
def test_without_a_file_values_depend_on_the_seed_and_the_stem_on_the_images():
    one, same, other = (
        load_backbone("resnet_micro", None, None, options=WeightOptions(seed=seed)) for seed in (1, 1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one.params, same.params)
    kernel = lambda loaded: loaded.params.weights["stem"]["conv"]["kernel"]
    assert (kernel(one) != kernel(other)).all() and "seed 1" in one.notes[0]
    assert kernel(load_backbone("resnet_micro", None, 64)).shape[0] == 7
    assert kernel(load_backbone("resnet_micro", None, 64, options=WeightOptions(stem="cifar"))).shape[0] == 3
    with pytest.raises(InputError, match="stem: 'cifar'.* vit_micro"):
        load_backbone("vit_micro", None, None, options=WeightOptions(stem="cifar"))


# ---- in a run ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_trains_it_and_moves_its_statistics_and_other_adapters_are_refused(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    small = ["--backbone", "resnet_micro", "--tasks", "2", "--clients", "2", "--rounds", "1", "--epochs", "1"]
    assert cli.main(["run", "fedavg-ft", *small, "--out", "run", "--full-lr", "0.01"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["backbone"] == "resnet_micro" and 0 < summary["A_last"] <= 1
    assert "random values of seed 2023" in capsys.readouterr().err
    assert cli.main(["run", "fppl", *small, "--out", "other"]) == 2
    assert "adapter: 'prompts' works inside attention" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_the_adapter_full_descends_along_the_weights_and_takes_the_statistics_of_the_batch():
    """Whatever the optimiser and the decay of weights do, statistics are those of the forward pass."""
    network = NETWORKS["resnet"]
    frozen = Frozen(jax.jit(network.init)(jax.random.key(0)))
    train = Training(1, 4, 0.1, optax.chain(optax.add_decayed_weights(0.5), optax.identity()))
    sizes = Sizes(4, 2, 2, 1)
    adapter = full(FullOptions(full_lr=0.1), sizes, network)
    run = Run(sizes, network, adapter, train, make_aggregation(AggregationOptions()), ())
    method = plain_method(NoOptions(), run)
    server = jax.jit(method.init)(jax.random.key(1), frozen)
    round_context = RoundContext.on_host(frozen, jax.tree.map(jnp.asarray, make_tasks(4, 2)[0]), 0, True)
    cast = method.broadcast(round_context, server)
    context = ClientContext(
        frozen,
        cast.payload,
        cast.cached,
        round_context.task,
        jax.tree.map(jnp.asarray, ClientInfo.example(4)),
    )
    image, mask = random(4, *network.image), jnp.array([True, True, True, False])
    batch = Batch(image, jnp.array([0, 1, 1, 0]), mask, jnp.arange(4))
    program = next(each.program for each in method.rounds if each.when == "round")
    local = program.start(context, method.init_client(jax.random.key(2), server), jax.random.key(3))
    after, _ = program.phases[0].step(context, local, batch, jax.random.key(4))
    _, expected = network.apply(frozen.network, image, None, True, mask)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(same, after.trainable.stats, expected.stats)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.trainable.adapter, frozen.network.weights)
    assert all(jax.tree.leaves(moved))
