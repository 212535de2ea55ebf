"""Attention of short sequences in one kernel, for TPUs and NVIDIA's GPUs: the scores of an image and a head
never leave the processor.

What XLA makes of attention writes all scores of a batch to memory in float32 and reads them again. Of the 200
tokens of an image they are larger than everything else in a block. Kernels for long sequences (flash
attention) keep sums for their backward pass that are as large on a TPU, and want tokens in multiples of their
tiles. Here the backward pass computes the scores again from the queries and keys.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fcljax.models.shapes import ChipKind

# Tokens. With fewer, scores are small; with more, those of a head do not fit into a TPU's vector memory, nor
# the gradients of its keys and values into a GPU's registers.
FEWEST = 16
MOST = {"tpu": 640, "gpu": 256}
QUERIES = {"forward": 64, "backward": 32}  # that a GPU takes at a time
# Of 32 threads, which share a GPU's registers. On an H200 the forward pass takes 0.17 ms with 4 of them and
# 0.28 with 8, and the backward pass is faster with 8 (docs/accelerators.md).
WARPS = {"forward": 4, "backward": 8}


def fits(chip: ChipKind, queries: int, keys: int, size: int) -> bool:
    """Whether the chip's kernel computes attention of so many tokens, with heads of this size."""
    if chip == "gpu" and (size < FEWEST or size.bit_count() > 1):
        return False  # its products have powers of 2
    return chip != "none" and queries >= FEWEST and keys <= MOST[chip]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_attention(
    chip: ChipKind,
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
) -> Float[Array, "batch heads queries size"]:
    """As `products.attention` of bfloat16, with the same roundings, in the kernel of a TPU or a GPU."""
    return _each_head(_FORWARD[chip], (q,), q, k, v)[0]


def _forward(chip: ChipKind, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return kernel_attention(chip, q, k, v), (q, k, v)


def _backward(chip: ChipKind, kept: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, ...]:
    return _each_head(_BACKWARD[chip], kept, *kept, gradient.astype(kept[0].dtype))


kernel_attention.defvjp(_forward, _backward)


class _Layout(NamedTuple):
    """How arrays [batch, heads, tokens, size] lie for a chip's kernel."""

    each: int  # heads that it takes at a time
    to: Callable[[Array], Array]
    back: Callable[[Array, Array], Array]  # back(array, like)
    block: Callable[[Any], Any]  # what it takes at a time of such an array
    options: Any = None  # for the compiler
    tokens: Mapping[str, int] = {}  # for the pass's function, where blocks have more rows than that


class _Pass(NamedTuple):
    """The forward or the backward pass of attention on a chip."""

    layout: Callable[[tuple[int, ...], int], _Layout]  # of q's shape and the number of keys
    function: Callable[..., None]  # of references to arrays [heads, tokens, size], on a GPU [rows, size]
    products: int  # operations for each of its scores, over the size of a head


def _each_head(attend: _Pass, results: tuple[Array, ...], *arrays: Array) -> tuple:
    """attend.function(*arrays, *results), which writes the results, of each image and head.

    Args:
      attend: the pass.
      results: give shapes and types.
      arrays: [batch, heads, tokens, size].
    """
    from jax.experimental import pallas as pl  # which takes its time to load

    (batch, heads, queries, size) = arrays[0].shape
    keys = arrays[1].shape[2]
    layout = attend.layout(arrays[0].shape, keys)
    given = [layout.to(x) for x in arrays]
    out = [jax.eval_shape(layout.to, x) for x in results]
    cost = pl.CostEstimate(
        flops=attend.products * batch * heads * queries * keys * size,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given, *out)),
        transcendentals=batch * heads * queries * keys,
    )
    found = pl.pallas_call(
        functools.partial(attend.function, **layout.tokens),
        out_shape=out,
        grid=(batch * heads // layout.each,),
        in_specs=[layout.block(x) for x in given],
        out_specs=[layout.block(x) for x in out],
        cost_estimate=cost,
        compiler_params=layout.options,
    )(*given)
    return tuple(layout.back(x, like) for x, like in zip(found, results, strict=True))


def _odds(q: Array, k: Array, keys: int | None = None) -> Array:
    """Softmax of the scores of a head [queries, keys], in the type of q; `keys`: only these first ones."""
    score = _product(q, k, 1, 1) * q.shape[-1] ** -0.5
    if keys is not None:
        score = jnp.where(jnp.arange(len(k))[None] < keys, score, -jnp.inf)
    return jax.nn.softmax(score).astype(q.dtype)


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """The product over these axes, as float32."""
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


# ---- TPU: some heads at a time, each as a whole ------------------------------------------------------------


def _layout_on_tpu(shape: tuple[int, ...], keys: int) -> _Layout:
    """[batch * heads, tokens, size]."""
    from jax.experimental import pallas as pl

    most = 4 if keys <= 256 else 2 if keys <= 384 else 1  # that vector memory holds
    each = math.gcd(shape[0] * shape[1], most)
    return _Layout(
        each,
        to=lambda x: x.reshape(-1, *x.shape[2:]),
        back=lambda x, like: x.reshape(like.shape),
        block=lambda x: pl.BlockSpec((each, *x.shape[1:]), lambda i: (i, 0, 0)),
    )


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


# ---- GPU: one head, some queries at a time -----------------------------------------------------------------
# Triton's arrays have powers of 2, and so have the blocks: since jax 0.12 no slice may reach beyond a block.
# What is beyond the last token is read as zeros and not written.


def _layout_on_gpu(warps: int, shape: tuple[int, ...], keys: int) -> _Layout:
    """[batch, tokens, heads, size], which is how projections leave their results and take them."""
    from jax.experimental import pallas as pl

    heads = shape[1]
    return _Layout(
        each=1,
        to=lambda x: x.swapaxes(1, 2),
        back=lambda x, like: x.swapaxes(1, 2),
        block=lambda x: pl.BlockSpec(
            (None, _power_of_2(x.shape[1]), None, x.shape[3]), lambda i: (i // heads, 0, i % heads, 0)
        ),
        tokens={"queries": shape[2], "keys": keys},
        options=_triton().CompilerParams(num_warps=warps, num_stages=1),
    )


def _triton() -> Any:
    from jax.experimental.pallas import triton

    return triton


def _rows(ref: Any, first: Array | int, count: int, tokens: int) -> tuple[Any, Array]:
    """`count` of a head's tokens, and which of them there are."""
    from jax.experimental import pallas as pl

    there = (first + jnp.arange(count) < tokens)[:, None]
    return ref.at[pl.ds(first, count), :], there


def _read(ref: Any, first: Array | int, count: int, tokens: int) -> Array:
    rows, there = _rows(ref, first, count, tokens)
    return _triton().load(rows, mask=there, other=0.0)


def _write(ref: Any, first: Array | int, value: Array, tokens: int) -> None:
    rows, there = _rows(ref, first, len(value), tokens)
    _triton().store(rows, value.astype(ref.dtype), mask=there)


def _power_of_2(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _attend_on_gpu(q: Any, k: Any, v: Any, out: Any, *, queries: int, keys: int) -> None:
    rows = QUERIES["forward"]
    all_k, all_v = (_read(ref, 0, len(ref), keys) for ref in (k, v))

    def some_queries(i: Array, carry: None) -> None:
        odds = _odds(_read(q, i * rows, rows, queries), all_k, keys)
        _write(out, i * rows, _product(odds, all_v, 1, 0), queries)

    jax.lax.fori_loop(0, -(-queries // rows), some_queries, None)


def _attend_back_on_gpu(
    q: Any, k: Any, v: Any, gradient: Any, of_q: Any, of_k: Any, of_v: Any, *, queries: int, keys: int
) -> None:
    rows = QUERIES["backward"]
    scale = q.shape[-1] ** -0.5
    all_k, all_v = (_read(ref, 0, len(ref), keys) for ref in (k, v))

    def some_queries(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        own_q, own_gradient = (_read(ref, i * rows, rows, queries) for ref in (q, gradient))
        odds = _odds(own_q, all_k, keys)
        wide = odds.astype(jnp.float32)
        of_odds = _product(own_gradient, all_v, 1, 1)
        row = jnp.sum(wide * of_odds, axis=-1, keepdims=True)
        of_score = (wide * (of_odds - row) * scale).astype(own_q.dtype)
        _write(of_q, i * rows, _product(of_score, all_k, 1, 0), queries)
        return sums[0] + _product(of_score, own_q, 0, 0), sums[1] + _product(odds, own_gradient, 0, 0)

    nothing = jnp.zeros(all_k.shape, jnp.float32)
    sums = jax.lax.fori_loop(0, -(-queries // rows), some_queries, (nothing, nothing))
    _write(of_k, 0, sums[0], keys)
    _write(of_v, 0, sums[1], keys)


def _on_gpu(name: str, function: Callable[..., None], products: int) -> _Pass:
    return _Pass(functools.partial(_layout_on_gpu, WARPS[name]), function, products)


_FORWARD = {"tpu": _Pass(_layout_on_tpu, _attend, 4), "gpu": _on_gpu("forward", _attend_on_gpu, 4)}
_BACKWARD = {
    "tpu": _Pass(_layout_on_tpu, _attend_back, 14),  # it computes the result again, too
    "gpu": _on_gpu("backward", _attend_back_on_gpu, 10),
}
