"""Matrix products and attention, and what they round: no other module decides that.

float32 rounds nothing: products take all bits of their factors on every platform.

bfloat16 is meant for frozen networks, which memory bounds on an accelerator. It rounds the factors of
products, forwards and backwards, and the results that one operation passes to the next, the residual
stream included. Inside an operation (the sum of a product with its bias, a norm, GELU, softmax, the
residual sum) all is float32; the backward pass recomputes it from the rounded inputs. Features are
float32 in any case, and so are trainable parameters, statistics, losses and classifiers, whose products
are exact (`exact_einsum`).

XLA's CPU backend has one fast bfloat16 product: that with a float32 result. For a bfloat16 result it
widens both factors first. So results are rounded after the product; accelerators do both at once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from fcljax.models.attention_kernel import fits, kernel_attention
from fcljax.models.shapes import ChipKind

einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
# Of float32 factors, which TPUs would round to bfloat16 and NVIDIA GPUs to TF32. For statistics,
# prototypes, distances, prompts and classifiers.
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
exact_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def product(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the einsum of two arrays of one type, as float32.

    Args:
      spec: of `jnp.einsum`, with every index named; each index of a factor stands in the other factor
        or in the result.
      a, b: float32 or bfloat16. bfloat16 rounds the factors of the gradient too.
    """
    if a.dtype == jnp.bfloat16:
        return _bfloat16_product(spec, a, b)
    return exact_einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bfloat16_product(spec: str, a: Array, b: Array) -> Array:
    return einsum(spec, a, b)


def _product_forward(spec: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum(spec, a, b), (a, b)


def _product_backward(spec: str, factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = factors
    axes_a, axes_b, axes_out = spec.replace("->", ",").split(",")
    gradient = gradient.astype(a.dtype)
    grad_a = einsum(f"{axes_out},{axes_b}->{axes_a}", gradient, b)
    grad_b = einsum(f"{axes_a},{axes_out}->{axes_b}", a, gradient)
    return grad_a.astype(a.dtype), grad_b.astype(b.dtype)


_bfloat16_product.defvjp(_product_forward, _product_backward)


def matmul(x: Float[Array, "*rows k"], kernel: Float[Array, "k m"]) -> Float[Array, "*rows m"]:
    """Return x @ kernel as float32."""
    rows = "abcd"[: x.ndim - 1]
    return product(f"{rows}k,km->{rows}m", x, kernel)


def dense(features: int, dtype: str, name: str) -> nn.Dense:
    """Make a linear layer with bias: kernel and input in the compute type, the result float32."""
    return nn.Dense(features, dtype=jnp.dtype(dtype), dot_general=_dot_general, name=name)


def _dot_general(x: Array, kernel: Array, _dimensions: object, precision: object = None) -> Array:
    # flax asks for the last axis of x and the first of the kernel, always
    return matmul(x, kernel)


# ---- between products --------------------------------------------------------------------------------------


def activated(
    function: Callable[[Array], Array],
    x: Float[Array, "*rows width"],
    bias: Float[Array, " width"],
    dtype: str,
) -> Float[Array, "*rows width"]:
    """Return function(x + bias), for example GELU, computed in float32, in the compute type."""

    def activate(*summands: Array) -> Array:
        first, *rest = (summand.astype(jnp.float32) for summand in summands)
        return function(sum(rest, first)).astype(dtype)

    # The backward pass recomputes the function from x and bias, or under bfloat16 from their rounded
    # sum: half the memory.
    summands = (x, bias)
    if dtype != "float32":
        summands = ((x + bias).astype(dtype),)
    return jax.checkpoint(activate)(*summands)


def attention(
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
    chip: ChipKind = "none",
) -> Float[Array, "batch heads queries size"]:
    """Return softmax(q k^T / sqrt(size)) v, in the type of q, k and v.

    With bfloat16 and a number of tokens that `fits`, the kernel of `chip` computes it.
    """
    if q.dtype == jnp.bfloat16:
        if fits(chip, q.shape[2], k.shape[2], q.shape[3]):
            return kernel_attention(chip, q, k, v)
        return _bfloat16_attention(q, k, v)
    return product("bhqk,bhkd->bhqd", _weights(q, k), v)


def _weights(q: Array, k: Array) -> Array:
    return jax.nn.softmax(product("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5)


@jax.custom_vjp
def _bfloat16_attention(q: Array, k: Array, v: Array) -> Array:
    return _attention_forward(q, k, v)[0]


def _attention_forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    weights = _weights(q, k).astype(q.dtype)
    out = einsum("bhqk,bhkd->bhqd", weights, v).astype(q.dtype)
    return out, (q, k, v, weights, out)


def _attention_backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, without a float32 array of all scores in memory.

    Softmax's gradient needs sum_k(weights * grad_weights), which equals sum_d(out * gradient) (Dao et al.
    2022, appendix B.2).
    """
    q, k, v, weights, out = saved
    scale = q.shape[-1] ** -0.5
    row_sum = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    grad_weights = einsum("bhqd,bhkd->bhqk", gradient, v)
    grad_scores = (weights.astype(jnp.float32) * (grad_weights - row_sum) * scale).astype(q.dtype)
    grad_q = einsum("bhqk,bhkd->bhqd", grad_scores, k)
    grad_k = einsum("bhqk,bhqd->bhkd", grad_scores, q)
    grad_v = einsum("bhqk,bhqd->bhkd", weights, gradient)
    return grad_q.astype(q.dtype), grad_k.astype(q.dtype), grad_v.astype(q.dtype)


_bfloat16_attention.defvjp(_attention_forward, _attention_backward)
