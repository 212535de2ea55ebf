"""Attention in one kernel: the numbers of XLA's attention, and where it is used. No TPU is here: kernels are
interpreted, and programs are lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from fcljax.checks.chips import product_flops
from fcljax.mesh import WHOLE, abstract_mesh, mesh_of, on_each
from fcljax.models import products
from fcljax.models.attention_kernel import MOST, fits
from fcljax.models.mae import DecoderConfig, init_decoder
from fcljax.models.shapes import ViTConfig
from fcljax.models.vit import vit_network
from fcljax.models.weights.pretrained import Pretrained, PretrainedDecoder
from fcljax.runs.build import Machine, kernel_on
from fcljax.runs.inputs import network_of

SHAPE = ViTConfig(image_size=32, patch=8, width=64, depth=2, heads=4, mlp=64, dtype="bfloat16")


def with_gradients(attention, q, k, v, gradient):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(gradient)


@pytest.mark.parametrize("lanes", [False, True])
def test_the_kernel_gives_the_numbers_of_attention_and_of_its_gradient(lanes, monkeypatch):
    """21 queries and 29 keys, which no tile divides; 6 heads, two at a time. Also of three clients side by
    side. All but some bits of a sum are the same."""
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    draws = zip(jax.random.split(jax.random.key(0), 4), (21, 29, 29, 21), strict=True)
    arrays = [jax.random.normal(key, (3, 2, 3, n, 16)).astype(jnp.bfloat16) for key, n in draws]
    found = []
    for kernel in (True, False):
        each = functools.partial(with_gradients, functools.partial(products.attention, kernel=kernel))
        found.append(jax.vmap(each)(*arrays) if lanes else each(*(x[0] for x in arrays)))
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == expected.dtype == jnp.bfloat16 and ours.shape == expected.shape
        assert float(jnp.max(jnp.abs(expected))) > 0.5
        np.testing.assert_allclose(np.float32(ours), np.float32(expected), rtol=2**-7, atol=2**-7)


def test_one_query_and_very_many_tokens_are_left_to_xla():
    assert fits(197, 207) and fits(MOST, MOST)
    assert not fits(1, 197) and not fits(MOST, MOST + 1)


def test_a_kernels_products_are_counted_as_those_of_xla():
    x = jax.ShapeDtypeStruct((4, 2, 24, 16), jnp.bfloat16)
    ours, plain = (
        product_flops(jax.make_jaxpr(functools.partial(products.attention, kernel=each))(x, x, x).jaxpr)
        for each in (True, False)
    )
    assert ours == plain == 2 * 2 * 4 * 2 * 24 * 24 * 16


def lowered(kernel, dtype="bfloat16", mesh=None):
    """The features of two images and their gradient, for a TPU."""
    network = vit_network(dataclasses.replace(SHAPE, kernel=kernel, dtype=dtype))
    params = jax.eval_shape(network.init, jax.random.key(0))

    def features(params, image):
        def total(image):
            return jnp.sum(network.apply(params, image, None, True)[0].cls)

        return jax.grad(total)(image)

    function = jax.jit(on_each(features, mesh, (WHOLE, WHOLE), WHOLE))
    image = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    return jax.export.export(function, platforms=("tpu",))(params, image).mlir_module()


def test_programs_for_tpus_have_the_kernel_and_exact_ones_have_not():
    assert "tpu_custom_call" in lowered("all")
    for other in (lowered("none"), lowered("all", "float32"), lowered("on each device")):
        assert "tpu_custom_call" not in other


def test_a_decoder_has_the_kernel_too_and_predicts_the_same(monkeypatch):
    """Of a masked autoencoder: one kernel for each of its two blocks, whose pixels are within 2^-7 of the
    largest of XLA's attention."""
    shape = DecoderConfig(image_size=32, patch=8, encoder_width=64, width=32, depth=2, heads=2, mlp=64)
    shape, half = dataclasses.replace(shape, dtype="bfloat16"), (0.5, 0.5, 0.5)
    params = init_decoder(jax.random.key(0), shape)
    weights = PretrainedDecoder(shape, params, half, half)
    backbone = Pretrained(SHAPE, {}, None, weights, half, half, "random", "0", ())
    decode, plain = (network_of(backbone, kernel=each).autoencoder.decode for each in ("all", "none"))
    latent = jax.random.normal(jax.random.key(1), (3, 5, 64))
    given = params, latent, jnp.argsort(jax.random.uniform(jax.random.key(2), (3, 16)), axis=1)
    text = jax.export.export(jax.jit(decode), platforms=("tpu",))(*given).mlir_module()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    found, expected = np.float32(decode(*given)), np.float32(plain(*given))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-7 * np.abs(expected).max())


def test_where_there_are_several_devices_only_what_each_computes_by_itself_has_the_kernel():
    assert "tpu_custom_call" in lowered("on each device", mesh=abstract_mesh(2))
    assert kernel_on(Machine("cpu")) == kernel_on(Machine("gpu")) == "none"
    assert kernel_on(Machine("tpu")) == "all"
    assert kernel_on(Machine("tpu", mesh_of(jax.devices()))) == "on each device"
