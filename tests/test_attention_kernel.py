"""Attention in one kernel: the numbers of XLA's attention, and where it is used. No TPU or GPU is here:
kernels are interpreted, and programs lowered."""

import dataclasses
import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from fcljax.checks.chips import product_flops, traced_for
from fcljax.mesh import WHOLE, abstract_mesh, mesh_of, on_each
from fcljax.models import products
from fcljax.models.attention_kernel import MOST, QUERIES, cudnn_attention, fits
from fcljax.models.mae import DecoderConfig, init_decoder
from fcljax.models.shapes import AttentionKernel, ViTConfig
from fcljax.models.vit import vit_network
from fcljax.models.weights.pretrained import Pretrained, PretrainedDecoder
from fcljax.runs.inputs import network_of
from fcljax.runs.machine import Machine, kernel_on

SHAPE = ViTConfig(image_size=32, patch=8, width=64, depth=2, heads=4, mlp=64, dtype="bfloat16")


def with_gradients(attention, q, k, v, gradient):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(gradient)


@pytest.mark.parametrize("lanes", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("chip", ["tpu", "gpu"])
def test_the_kernel_gives_the_numbers_of_attention_and_of_its_gradient(chip, lanes, monkeypatch):
    """69 queries and 77 keys, which no tile divides; 6 heads, two at a time on a TPU. Also of three clients
    side by side. All but some bits of a sum are the same."""
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    assert all(rows < 69 for rows in QUERIES.values())  # a GPU reads them in more than one part
    draws = zip(jax.random.split(jax.random.key(0), 4), (69, 77, 77, 69), strict=True)
    arrays = [jax.random.normal(key, (3, 2, 3, n, 16)).astype(jnp.bfloat16) for key, n in draws]
    found = []
    for kernel in (chip, "none"):
        each = functools.partial(with_gradients, functools.partial(products.attention, chip=kernel))
        found.append(jax.vmap(each)(*arrays) if lanes else each(*(x[0] for x in arrays)))
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == expected.dtype == jnp.bfloat16 and ours.shape == expected.shape
        assert float(jnp.max(jnp.abs(expected))) > 0.5
        np.testing.assert_allclose(np.float32(ours), np.float32(expected), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    "tokens", [(69, 77), pytest.param((64, 66), marks=pytest.mark.long)], ids=["odd", "even"]
)
def test_padding_for_cudnn_changes_neither_attention_nor_its_gradient(tokens):
    """As XLA computes what cuDNN would: a padding token gets no weight, and gives no gradient."""
    queries, keys = tokens
    draws = zip(jax.random.split(jax.random.key(0), 4), (queries, keys, keys, queries), strict=True)
    arrays = [jax.random.normal(key, (2, 3, n, 16)).astype(jnp.bfloat16) for key, n in draws]
    by_xla = functools.partial(cudnn_attention, implementation="xla")
    found = with_gradients(by_xla, *arrays)
    for ours, expected in zip(found, with_gradients(products.attention, *arrays), strict=True):
        assert ours.dtype == jnp.bfloat16 and ours.shape == expected.shape
        np.testing.assert_allclose(np.float32(ours), np.float32(expected), rtol=2**-6, atol=2**-6)


def test_cudnn_is_asked_where_it_is_chosen_and_takes_the_size_of_a_head(monkeypatch):
    monkeypatch.setattr(products, "cudnn_attention", lambda q, k, v: q + 7)
    q = jnp.zeros((1, 1, 16, 8), jnp.bfloat16)
    assert products.attention(q, q, q, chip="cudnn")[0, 0, 0, 0] == 7
    assert products.attention(q[..., :4], q[..., :4], q[..., :4], chip="cudnn")[0, 0, 0, 0] == 0
    assert fits("cudnn", 197, 207, 64) and not fits("cudnn", 197, 207, 136)
    assert not fits("cudnn", 1, 197, 64)


def test_one_query_very_many_tokens_and_odd_heads_are_left_to_xla():
    assert all(fits(chip, 197, 207, 64) and fits(chip, most, most, 64) for chip, most in MOST.items())
    for chip, most in MOST.items():
        assert not fits(chip, 1, 197, 64) and not fits(chip, most, most + 1, 64)
    assert not fits("none", 197, 207, 64)
    assert fits("tpu", 197, 207, 80) and not fits("gpu", 197, 207, 80)


@pytest.mark.parametrize("chip", ["tpu", "gpu"])
def test_a_kernels_products_are_counted_as_those_of_xla(chip):
    """A GPU's kernel pads these 24 tokens, which does not count."""
    x = jax.ShapeDtypeStruct((4, 2, 24, 16), jnp.bfloat16)
    ours, plain = (
        product_flops(jax.make_jaxpr(functools.partial(products.attention, chip=each))(x, x, x).jaxpr)
        for each in (chip, "none")
    )
    assert ours == plain == 2 * 2 * 4 * 2 * 24 * 24 * 16


CALLS = {"tpu": "@tpu_custom_call", "gpu": "@__gpu$xla.gpu.triton"}


def lowered(kernel, dtype="bfloat16", mesh=None, chip="tpu"):
    """The features of two images and their gradient, for a TPU or a GPU: how often they call a kernel."""
    network = vit_network(dataclasses.replace(SHAPE, kernel=kernel, dtype=dtype))
    params = jax.eval_shape(network.init, jax.random.key(0))

    def features(params, image):
        def total(image):
            return jnp.sum(network.apply(params, image, None, True)[0].cls)

        return jax.grad(total)(image)

    function = jax.jit(on_each(features, mesh, (WHOLE, WHOLE), WHOLE))
    image = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    return calls(function, chip, params, image)


def calls(function, chip, *arguments):
    """How often a function calls a kernel, lowered for a chip that is not here."""
    device = types.SimpleNamespace(platform=chip, device_kind="NVIDIA H100", core_count=132)
    with traced_for(device):
        traced, platform = jax.jit(function).trace(*arguments), {"tpu": "tpu", "gpu": "cuda"}[chip]
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return text.count(f"stablehlo.custom_call {CALLS[chip]}")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # from jax 0.11 on
@pytest.mark.parametrize("chip", ["tpu", pytest.param("gpu", marks=pytest.mark.long)])
def test_programs_for_accelerators_have_the_kernel_and_exact_ones_have_not(chip):
    """One block, forwards and backwards; the last one has the query of the class token alone."""
    assert lowered(AttentionKernel(chip), chip=chip) == 2
    others = lowered(AttentionKernel(), chip=chip), lowered(AttentionKernel(chip), "float32", chip=chip)
    assert [*others, lowered(AttentionKernel(chip, single_device=True), chip=chip)] == [0, 0, 0]


def test_a_jax_without_pallas_for_triton_has_xlas_attention_on_a_gpu(monkeypatch):
    found = importlib.util.find_spec

    def without_triton(name):
        return None if name == "jax.experimental.pallas.triton" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_triton)
    assert kernel_on(Machine("gpu")) == AttentionKernel()
    assert kernel_on(Machine("tpu")) == AttentionKernel("tpu")


@pytest.mark.long
def test_a_decoder_has_the_kernel_too_and_predicts_the_same(monkeypatch):
    """Of a masked autoencoder: one kernel for each of its two blocks, whose pixels are within 2^-7 of the
    largest of XLA's attention."""
    shape = DecoderConfig(image_size=32, patch=8, encoder_width=64, width=32, depth=2, heads=2, mlp=64)
    shape, half = dataclasses.replace(shape, dtype="bfloat16"), (0.5, 0.5, 0.5)
    params = init_decoder(jax.random.key(0), shape)
    weights = PretrainedDecoder(shape, params, half, half)
    backbone = Pretrained(SHAPE, {}, None, weights, half, half, "random", "0", ())
    networks = (network_of(backbone, kernel=each) for each in (AttentionKernel("tpu"), AttentionKernel()))
    decode, plain = (network.autoencoder.decode for network in networks)
    latent = jax.random.normal(jax.random.key(1), (3, 5, 64))
    given = params, latent, jnp.argsort(jax.random.uniform(jax.random.key(2), (3, 16)), axis=1)
    assert calls(decode, "tpu", *given) == 2
    jax.clear_caches()  # of a block's trace, which is to be another one
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    found, expected = np.float32(decode(*given)), np.float32(plain(*given))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-7 * np.abs(expected).max())


def test_where_there_are_several_devices_only_what_each_computes_by_itself_has_the_kernel():
    assert lowered(AttentionKernel("tpu", single_device=True), mesh=abstract_mesh(2)) == 2
    assert kernel_on(Machine("cpu")) == kernel_on(Machine("METAL")) == AttentionKernel()
    for chip in ("tpu", "gpu"):
        assert kernel_on(Machine(chip)) == AttentionKernel(chip)
        assert kernel_on(Machine(chip, mesh_of(jax.devices()))) == AttentionKernel(chip, single_device=True)


@pytest.mark.parametrize(("capability", "chip"), [("9.0", "gpu"), ("8.9", "none"), ("gfx942", "none")])
def test_a_gpu_without_the_shared_memory_has_no_kernel(capability, chip, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda *args: [device])
    assert kernel_on(Machine("gpu")).chip == chip
