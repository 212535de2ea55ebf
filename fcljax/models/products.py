"""Matrix products and attention, and what they round: no other module decides that.

float32 rounds nothing: products take all bits of their factors on every platform.

tf32 rounds the factors of products alone, to 11 bits on NVIDIA's GPUs; a TPU takes about
16, by three products of bfloat16, and a CPU all.

bfloat16 is the format of accelerators, where memory bounds a network. It rounds the
factors of products, forwards and backwards, and the results that one operation passes to
the next, the residual stream included. A network that trains keeps its parameters in
float32. Inside an operation (the sum of a product with its bias, a norm, GELU, softmax,
the residual sum) all is float32; the backward pass recomputes it from the rounded inputs.
Features are float32 in any case, and so are statistics, losses and classifiers, whose
products are exact (`exact_einsum`).

XLA's CPU backend has one fast bfloat16 product: that with a float32 result. For a
bfloat16 result it widens both factors first. So results are rounded after the product;
accelerators do both at once, where the program asks for the rounded result
(`_rounded_einsum`): a library of products, as a GPU has, would else write float32 for
another kernel to round.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from fcljax.models.attention_kernel import cudnn_attention, fits, kernel_attention
from fcljax.models.shapes import ChipKind, NumberFormat

# sums in float32, whatever the factors are
einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
# For statistics, prototypes, distances, prompts and classifiers, which are float32:
# without a precision TPUs would round the factors to bfloat16, and NVIDIA's GPUs to
# TF32.
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
exact_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


FLOAT32 = NumberFormat()
# jax's name for TF32 on GPUs, and for three products of bfloat16 on TPUs
TF32 = jax.lax.Precision.HIGH


def product(
    spec: str, a: Float[Array, "..."], b: Float[Array, "..."], number_format: NumberFormat = FLOAT32
) -> Float[Array, "..."]:
    """Return the einsum of two arrays of one type, as float32, or as bfloat16 where the
    format says so.

    Args:
      spec: of `jnp.einsum`, with every index named; each index of a factor stands in the
        other factor or in the result.
      a, b: float32 or bfloat16. bfloat16 rounds the factors of the gradient too.
      number_format: what is rounded besides.
    """
    if a.dtype == jnp.bfloat16:
        return _bfloat16_product(spec, number_format.rounds_results, a, b)
    if number_format.dtype == "tf32":
        return jnp.einsum(spec, a, b, precision=TF32)
    return exact_einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bfloat16_product(spec: str, rounds: bool, a: Array, b: Array) -> Array:
    return _rounded_einsum(spec, a, b) if rounds else einsum(spec, a, b)


def _product_forward(spec: str, rounds: bool, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _bfloat16_product(spec, rounds, a, b), (a, b)


def _rounded_einsum(spec: str, a: Array, b: Array) -> Array:
    """Return the einsum of bfloat16 arrays, summed in float32 and rounded to bfloat16."""

    def rounded_after(a: Array, b: Array) -> Array:
        return einsum(spec, a, b).astype(a.dtype)

    def rounded_at_once(a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b)

    return jax.lax.platform_dependent(a, b, cpu=rounded_after, default=rounded_at_once)


def _product_backward(
    spec: str, _rounds: bool, factors: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    a, b = factors
    axes_a, axes_b, axes_out = spec.replace("->", ",").split(",")
    gradient = gradient.astype(a.dtype)
    grad_a = _rounded_einsum(f"{axes_out},{axes_b}->{axes_a}", gradient, b)
    grad_b = _rounded_einsum(f"{axes_a},{axes_out}->{axes_b}", a, gradient)
    return grad_a, grad_b


_bfloat16_product.defvjp(_product_forward, _product_backward)


def matmul(
    x: Float[Array, "*rows k"], kernel: Float[Array, "k m"], number_format: NumberFormat = FLOAT32
) -> Float[Array, "*rows m"]:
    """Return x @ kernel, in the type that `product` returns."""
    rows = "abcd"[: x.ndim - 1]
    return product(f"{rows}k,km->{rows}m", x, kernel, number_format)


def dense(features: int, number_format: NumberFormat, name: str) -> nn.Dense:
    """Make a linear layer with bias: kernel and input in the compute type, the result as
    of `product`."""

    # a Dense layer always contracts the last axis of x with the first of the kernel
    def dot_general(x: Array, kernel: Array, _dimensions: object, precision: object = None) -> Array:
        return matmul(x, kernel, number_format)

    return nn.Dense(features, dtype=jnp.dtype(number_format.array), dot_general=dot_general, name=name)


# ---- between products ------------------------------------------------------------------


def activated(
    function: Callable[[Array], Array],
    x: Float[Array, "*rows width"],
    bias: Float[Array, " width"],
    dtype: str,
) -> Float[Array, "*rows width"]:
    """Return function(x + bias), for example GELU, computed in float32, in the compute type.

    Where x is a rounded product, so is the bias, which is then part of the product's kernel.
    """

    def activate(*summands: Array) -> Array:
        first, *rest = (summand.astype(jnp.float32) for summand in summands)
        return function(sum(rest, first)).astype(dtype)

    # The backward pass recomputes the function, so only its input is stored: x and
    # bias, or under bfloat16 their rounded sum, which is half as large.
    summands = (x, bias)
    if dtype != "float32":
        summands = ((x + bias.astype(x.dtype)).astype(dtype),)
    return jax.checkpoint(activate)(*summands)


def attention(
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
    chip: ChipKind = "none",
    number_format: NumberFormat = FLOAT32,
) -> Float[Array, "batch heads queries size"]:
    """Return softmax(q k^T / sqrt(size)) v, in the type of q, k and v.

    With bfloat16 and a number of tokens that `fits`, the kernel of `chip` computes it.
    """
    if q.dtype == jnp.bfloat16:
        if not fits(chip, q.shape[2], k.shape[2], q.shape[3]):
            return _bfloat16_attention(q, k, v)
        if chip == "cudnn":
            return cudnn_attention(q, k, v)
        return kernel_attention(chip, q, k, v)
    return product("bhqk,bhkd->bhqd", _weights(q, k, number_format), v, number_format)


def masked_attention(
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
    mask: Bool[Array, "batch #queries keys"],
    number_format: NumberFormat = FLOAT32,
) -> Float[Array, "batch heads queries size"]:
    """Return attention in which queries read the keys whose mask is True."""
    scores = product("bhqd,bhkd->bhqk", q, k, number_format).astype(jnp.float32) * q.shape[-1] ** -0.5
    # the lowest finite number, not -inf: a query of padding that reads no key gets equal
    # weights, and not NaN
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min))
    return product("bhqk,bhkd->bhqd", weights.astype(q.dtype), v, number_format).astype(q.dtype)


def _weights(q: Array, k: Array, number_format: NumberFormat = FLOAT32) -> Array:
    return jax.nn.softmax(product("bhqd,bhkd->bhqk", q, k, number_format) * q.shape[-1] ** -0.5)


@jax.custom_vjp
def _bfloat16_attention(q: Array, k: Array, v: Array) -> Array:
    return _attention_forward(q, k, v)[0]


def _attention_forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    weights = _weights(q, k).astype(q.dtype)
    out = _rounded_einsum("bhqk,bhkd->bhqd", weights, v)
    return out, (q, k, v, weights, out)


def _attention_backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, without a float32 array of all scores in memory.

    Softmax's gradient needs sum_k(weights * grad_weights), which equals sum_d(out *
    gradient) (Dao et al. 2022, appendix B.2).
    """
    q, k, v, weights, out = saved
    scale = q.shape[-1] ** -0.5
    row_sum = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    grad_weights = einsum("bhqd,bhkd->bhqk", gradient, v)
    grad_scores = (weights.astype(jnp.float32) * (grad_weights - row_sum) * scale).astype(q.dtype)
    grad_q = _rounded_einsum("bhqk,bhkd->bhqd", grad_scores, k)
    grad_k = _rounded_einsum("bhqk,bhqd->bhkd", grad_scores, q)
    grad_v = _rounded_einsum("bhqk,bhqd->bhkd", weights, gradient)
    return grad_q, grad_k, grad_v


_bfloat16_attention.defvjp(_attention_forward, _attention_backward)
