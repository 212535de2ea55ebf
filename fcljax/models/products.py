"""Number formats of the networks: the one place that says what is rounded.

With float32 nothing is: products take all bits of their factors on every platform. With bfloat16, which is
meant for frozen networks, the factors of products are rounded to it, forwards and backwards, and so is what
one operation leaves for the next one, the residual stream included: memory is what bounds a frozen network
on an accelerator. Inside an operation (the sum of a product with its bias, a norm, GELU, softmax, the
residual sum) all is float32, and the backward pass computes it again from what was kept. Features are float32
in any case.

What trains, statistics, losses and classifiers are float32, and their products exact (`exact_einsum`).

XLA's CPU backend has no other fast bfloat16 product than one whose result is float32: for a bfloat16 result
it widens both factors first. So results are rounded after the product; accelerators do both at once.
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
# Of float32, where the platform would round the factors of a product (TPUs to bfloat16, NVIDIA GPUs to TF32):
# for statistics, prototypes, distances, prompts and classifiers. A CPU does not round.
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
exact_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def product(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """The einsum of two arrays of one type, as float32.

    Args:
      spec: of `jnp.einsum`, with every index named; each index of a factor stands in the other factor or in
        the result.
      a, b: float32, or bfloat16, in which case the gradient's factors are rounded to it too.
    """
    return _rounded(spec, a, b) if a.dtype == jnp.bfloat16 else exact_einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(spec: str, a: Array, b: Array) -> Array:
    return einsum(spec, a, b)


def _forward(spec: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum(spec, a, b), (a, b)


def _backward(spec: str, factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = factors
    first, second, result = spec.replace("->", ",").split(",")
    gradient = gradient.astype(a.dtype)
    of_a = einsum(f"{result},{second}->{first}", gradient, b)
    of_b = einsum(f"{first},{result}->{second}", a, gradient)
    return of_a.astype(a.dtype), of_b.astype(b.dtype)


_rounded.defvjp(_forward, _backward)


def matmul(x: Float[Array, "*rows k"], kernel: Float[Array, "k m"]) -> Float[Array, "*rows m"]:
    """x @ kernel, as float32."""
    lead = "abcd"[: x.ndim - 1]
    return product(f"{lead}k,km->{lead}m", x, kernel)


def dense(features: int, dtype: str, name: str) -> nn.Dense:
    """A linear layer with bias: kernel and input in the compute type, the result float32."""
    return nn.Dense(features, dtype=jnp.dtype(dtype), dot_general=_dot_general, name=name)


def _dot_general(x: Array, kernel: Array, dimensions: object, precision: object = None) -> Array:
    del dimensions, precision  # always the last axis of x and the first of the kernel
    return matmul(x, kernel)


# ---- between products --------------------------------------------------------------------------------------


def activated(
    function: Callable[[Array], Array],
    x: Float[Array, "*rows width"],
    bias: Float[Array, " width"],
    dtype: str,
) -> Float[Array, "*rows width"]:
    """function(x + bias) in float32, such as GELU, with a result in the compute type. The backward pass
    computes it again: of x and the bias, or where activations are rounded, of their rounded sum."""

    def of_sum(*kept: Array) -> Array:
        first, *rest = (part.astype(jnp.float32) for part in kept)
        return function(sum(rest, first)).astype(dtype)

    kept = (x, bias) if dtype == "float32" else ((x + bias).astype(dtype),)
    return jax.checkpoint(of_sum)(*kept)


def attention(
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
    chip: ChipKind = "none",
) -> Float[Array, "batch heads queries size"]:
    """Softmax attention, softmax(q k^T / sqrt(size)) v, of one type, with a result in that type. `chip`: in
    its kernel, if the type is bfloat16 and the tokens are not too many."""
    if q.dtype == jnp.bfloat16:
        fused = fits(chip, q.shape[2], k.shape[2], q.shape[3])
        return kernel_attention(chip, q, k, v) if fused else _attention(q, k, v)
    return product("bhqk,bhkd->bhqd", _odds(q, k), v)


def _odds(q: Array, k: Array) -> Array:
    return jax.nn.softmax(product("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5)


@jax.custom_vjp
def _attention(q: Array, k: Array, v: Array) -> Array:
    return _attend(q, k, v)[0]


def _attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    odds = _odds(q, k).astype(q.dtype)
    out = einsum("bhqk,bhkd->bhqd", odds, v).astype(q.dtype)
    return out, (q, k, v, odds, out)


def _attend_back(kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    """The gradient, which keeps no float32 array of all scores: the sum of a row of odds times their
    gradient is that of the result times its gradient (Dao et al. 2022, appendix B.2)."""
    q, k, v, odds, out = kept
    scale = q.shape[-1] ** -0.5
    row = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    of_odds = einsum("bhqd,bhkd->bhqk", gradient, v)
    of_score = (odds.astype(jnp.float32) * (of_odds - row) * scale).astype(q.dtype)
    of_q = einsum("bhqk,bhkd->bhqd", of_score, k)
    of_k = einsum("bhqk,bhqd->bhkd", of_score, q)
    of_v = einsum("bhqk,bhqd->bhkd", odds, gradient)
    return of_q.astype(q.dtype), of_k.astype(q.dtype), of_v.astype(q.dtype)


_attention.defvjp(_attend, _attend_back)
