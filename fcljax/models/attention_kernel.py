"""Attention of short sequences in one kernel, for TPUs: the scores of an image and a head never leave the
chip's vector memory.

What XLA makes of attention writes all scores of a batch to memory in float32 and reads them again. Of the 200
tokens of an image they are larger than everything else in a block. Kernels for long sequences (flash
attention) keep sums for their backward pass that are as large. Here the backward pass computes the scores
again from the queries and keys.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEWEST, MOST = 16, 640  # tokens; with more the scores of a head do not fit, with fewer they are small


def fits(queries: int, keys: int) -> bool:
    """Whether the kernel computes attention of so many tokens."""
    return queries >= FEWEST and keys <= MOST


@jax.custom_vjp
def kernel_attention(
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
) -> Float[Array, "batch heads queries size"]:
    """As `products.attention` of bfloat16, with the same roundings."""
    return _each_head(_attend, 4, (q,), q, k, v)[0]


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return kernel_attention(q, k, v), (q, k, v)


def _backward(kept: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, ...]:
    return _each_head(_attend_back, 14, kept, *kept, gradient.astype(kept[0].dtype))


kernel_attention.defvjp(_forward, _backward)


def _each_head(function: Callable, products: int, results: tuple[Array, ...], *arrays: Array) -> tuple:
    """function(*arrays, *results), which writes the results, of each image and head.

    Args:
      function: of references to arrays [heads, tokens, size].
      products: operations for each of its scores, over the size of a head.
      results: give shapes and types.
      arrays: [batch, heads, tokens, size].
    """
    from jax.experimental import pallas as pl  # which takes its time to load

    flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]
    out = [jax.ShapeDtypeStruct((len(flat[0]), *x.shape[2:]), x.dtype) for x in results]
    (heads, queries, size), keys = flat[0].shape, flat[1].shape[1]
    each = math.gcd(heads, 4 if keys <= 256 else 2 if keys <= 384 else 1)  # as vector memory holds

    def block(x: Any) -> Any:
        return pl.BlockSpec((each, *x.shape[1:]), lambda i: (i, 0, 0))

    cost = pl.CostEstimate(
        flops=products * heads * queries * keys * size,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*flat, *out)),
        transcendentals=heads * queries * keys,
    )
    found = pl.pallas_call(
        function,
        out_shape=out,
        grid=(heads // each,),
        in_specs=[block(x) for x in flat],
        out_specs=[block(x) for x in out],
        cost_estimate=cost,
    )(*flat)
    return tuple(x.reshape(like.shape) for x, like in zip(found, results, strict=True))


def _attend(q: Any, k: Any, v: Any, out: Any) -> None:
    for i in range(q.shape[0]):
        out[i] = _product(_odds(q[i], k[i]), v[i], 1, 0).astype(out.dtype)


def _attend_back(q: Any, k: Any, v: Any, gradient: Any, of_q: Any, of_k: Any, of_v: Any) -> None:
    scale = q.shape[-1] ** -0.5
    for i in range(q.shape[0]):
        odds = _odds(q[i], k[i])
        out = _product(odds, v[i], 1, 0).astype(q.dtype).astype(jnp.float32)
        row = jnp.sum(gradient[i].astype(jnp.float32) * out, axis=-1, keepdims=True)
        of_odds = _product(gradient[i], v[i], 1, 1)
        of_score = (odds.astype(jnp.float32) * (of_odds - row) * scale).astype(q.dtype)
        of_q[i] = _product(of_score, k[i], 1, 0).astype(of_q.dtype)
        of_k[i] = _product(of_score, q[i], 0, 0).astype(of_k.dtype)
        of_v[i] = _product(odds, gradient[i], 0, 0).astype(of_v.dtype)


def _odds(q: Array, k: Array) -> Array:
    """Softmax of the scores of a head [queries, keys], in the type of q."""
    return jax.nn.softmax(_product(q, k, 1, 1) * q.shape[-1] ** -0.5).astype(q.dtype)


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """The product over these axes, as float32."""
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
