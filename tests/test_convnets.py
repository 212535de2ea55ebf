"""Convolutional networks: a convolution with gradients of its own, ResNets and DenseNets."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from fcljax.errors import InputError
from fcljax.models.convnet import init_convnet
from fcljax.models.convolution import Window, conv, conv_general_dilated
from fcljax.models.densenet import DENSENETS, DenseNet, DenseNetConfig, densenet_network
from fcljax.models.resnet import RESNETS, ResNet, ResNetConfig, resnet_network
from fcljax.models.vit import Injection

LAYOUT = ("NHWC", "HWIO", "NHWC")
RESNET = ResNetConfig(8, (1, 1), 4, "cifar")
DENSENET = DenseNetConfig(16, (2, 1), 4, 6, "imagenet")
NETWORKS = {"resnet": resnet_network(RESNET), "densenet": densenet_network(DENSENET)}
draw = np.random.default_rng(0).normal


def random(*shape):
    return jnp.asarray(draw(size=shape), jnp.float32)


def plain(window, x, kernel):
    return lax.conv_general_dilated(
        x, kernel, window.stride, window.pads, rhs_dilation=window.dilation, dimension_numbers=LAYOUT,
        feature_group_count=window.groups,
    )  # fmt: skip


# ---- the convolution ---------------------------------------------------------------------------------------

SIZES = list(itertools.product((1, 3), (1, 2), (1, 2), (1, 2), ((0, 0), (2, 1)), (8,))) + [
    (2, 3, 1, 2, (1, 0), 7)
]


@pytest.mark.parametrize("size, stride, dilation, groups, pads, side", SIZES)
def test_values_and_both_gradients_are_those_of_jax(size, stride, dilation, groups, pads, side):
    window = Window((stride, 1), (pads, (1, 2)), (dilation, 1), groups)
    x, kernel = random(3, side, 6, 4), random(size, 2, 4 // groups, 6)
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
        return {line.split("dim_numbers = ")[1].split(",  window")[0].split(", window")[0]
                for line in text.splitlines() if "dim_numbers = " in line}  # fmt: skip

    assert layouts(conv) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    assert len(layouts(plain)) == 3


@pytest.mark.parametrize("padding", ["SAME", "VALID", 1, ((2, 0), (1, 3))])
def test_flax_layers_take_it_in_the_place_of_jax_own(padding):
    x = random(2, 9, 7, 4)
    ours, theirs = (
        nn.Conv(6, (3, 2), (2, 1), padding, kernel_dilation=(1, 2), feature_group_count=2, **more)
        for more in ({"conv_general_dilated": conv_general_dilated}, {})
    )
    params = ours.init(jax.random.key(0), x)
    loss = lambda layer: lambda params: (layer.apply(params, x) ** 2).sum()
    mine, usual = (jax.value_and_grad(loss(layer))(params) for layer in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), mine, usual)


@pytest.mark.parametrize("more", [{"lhs_dilation": (2, 1)}, {"precision": "highest"}])
def test_what_it_is_not_for_is_as_jax_does_it(more):
    x, kernel = random(2, 5, 5, 3), random(3, 3, 3, 4)
    one, other = (
        f(x, kernel, (1, 1), ((1, 1), (2, 0)), dimension_numbers=LAYOUT, **more)
        for f in (conv_general_dilated, lax.conv_general_dilated)
    )
    np.testing.assert_array_equal(one, other)


# ---- the networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, count",
    [
        ("resnet18", 11_689_512),
        ("densenet121", 7_978_856),
        pytest.param("resnet34", 21_797_672, marks=pytest.mark.long),
        pytest.param("densenet169", 14_149_480, marks=pytest.mark.long),
    ],
)
def test_parameters_are_as_many_as_in_torchvision(name, count):
    """With a classifier of 1000 classes (specification of VFCL, O6)."""
    config = (RESNETS | DENSENETS)[name]
    module = ResNet(config) if name in RESNETS else DenseNet(config)
    shapes = jax.eval_shape(lambda key: init_convnet(key, module, config.image_size), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes.params)) + 1000 * (config.width + 1) == count


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]


@pytest.fixture
def variables(network):
    return network.init(jax.random.key(0))


def test_in_training_statistics_move_towards_those_of_the_rows_that_count(network, variables):
    """A tenth of the way; in evaluation they stay. The first layer's are known by its output."""
    image, mask = random(4, *network.image), jnp.array([True, True, False, True])
    features, stats = network.apply(variables.params, variables.stats, image, None, True, mask)
    first = jax.tree.map(np.asarray, stats["stem"]["norm"]["norm"])
    kernel = variables.params["stem"]["conv"]["kernel"]
    side = kernel.shape[0]
    window = Window(*[((s, s), ((p, p), (p, p))) for s, p in [(1, 1) if side == 3 else (2, 3)]][0])
    seen = np.asarray(plain(window, image, kernel))[np.asarray(mask)]
    np.testing.assert_allclose(first["mean"], 0.1 * seen.mean(axis=(0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first["var"], 0.9 + 0.1 * seen.var(axis=(0, 1, 2)), rtol=1e-4)
    _, still = network.apply(variables.params, stats, image, None, False, mask)
    jax.tree.map(np.testing.assert_array_equal, still, stats)
    assert features.cls.shape == (4, network.width) and features.cls.dtype == jnp.float32


def test_padding_is_inert(network, variables):
    """NaN in a row that does not count changes neither the others' features nor the statistics."""
    image, mask = random(4, *network.image), jnp.array([True, True, False, True])
    poisoned = image.at[2].set(jnp.nan)
    (clean, stats), (other, also) = (
        network.apply(variables.params, variables.stats, x, None, True, mask) for x in (image, poisoned)
    )
    np.testing.assert_array_equal(clean.cls[mask], other.cls[mask])
    jax.tree.map(np.testing.assert_array_equal, stats, also)


def test_in_evaluation_rows_do_not_see_each_other(network, variables):
    image = random(4, *network.image)
    whole = network.apply(variables.params, variables.stats, image, None, False)[0].cls
    alone = network.apply(variables.params, variables.stats, image[:1], None, False)[0].cls
    np.testing.assert_allclose(whole[:1], alone, rtol=1e-4, atol=1e-5)


def test_an_adapter_for_attention_is_refused_by_name(network, variables):
    image = random(1, *network.image)
    with pytest.raises(InputError, match="adapter: .*'full'"):
        network.apply(variables.params, variables.stats, image, Injection(), False)


def test_bfloat16_is_close_to_float32_and_gives_float32_features():
    exact, half = (
        resnet_network(dataclasses.replace(RESNET, dtype=kind)) for kind in ("float32", "bfloat16")
    )
    variables, image = exact.init(jax.random.key(0)), random(4, *exact.image)
    one, other = (each.apply(*variables, image, None, False)[0].cls for each in (exact, half))
    assert other.dtype == jnp.float32 and (one != other).any()
    np.testing.assert_allclose(one, other, rtol=0.1, atol=0.05)
