"""Attention of short sequences in one kernel, for TPUs and NVIDIA's GPUs; and by cuDNN.

XLA's attention writes all scores of a batch to memory in float32 and reads them again.
For the 200 tokens of an image they are larger than everything else in a block. Kernels
for long sequences (flash attention) store sums for their backward pass that are as
large on a TPU, and want tokens in multiples of their tiles. Here the scores of an image
and a head never leave the processor: the backward pass recomputes them from queries and
keys.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fcljax.models.shapes import ChipKind

# Tokens. With fewer, the scores are small anyway. With more, the scores of a head do
# not fit into a TPU's vector memory, nor the gradients of its keys and values into a
# GPU's registers.
FEWEST = 16
MOST = {"tpu": 640, "gpu": 256}
# channels of a head that cuDNN takes at most, and in multiples of
CUDNN_SIZE = {"most": 128, "multiple": 8}
QUERIES = {"forward": 64, "backward": 32}  # queries that a GPU takes at a time
# Groups of 32 threads, which share a GPU's registers. On an H200 the forward pass takes
# 0.17 ms with 4 of them and 0.28 ms with 8; the backward pass is faster with 8
# (docs/accelerators.md).
WARPS = {"forward": 4, "backward": 8}


def fits(chip: ChipKind, queries: int, keys: int, size: int) -> bool:
    """Check whether the kernel takes so many queries, keys and channels of a head."""
    if chip == "cudnn":
        size_fits = size <= CUDNN_SIZE["most"] and size % CUDNN_SIZE["multiple"] == 0
        return queries >= FEWEST and size_fits
    # Triton multiplies blocks whose sides are powers of 2, and at least 16
    if chip == "gpu" and (size < FEWEST or size.bit_count() > 1):
        return False
    return chip != "none" and queries >= FEWEST and keys <= MOST[chip]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_attention(
    chip: ChipKind,
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
) -> Float[Array, "batch heads queries size"]:
    """Compute `products.attention` of bfloat16, with its roundings, in the kernel of a
    TPU or a GPU."""
    return _run_pass(_FORWARD[chip], (q,), q, k, v)[0]


def _forward(
    chip: ChipKind,
    q: Array,
    k: Array,
    v: Array,
) -> tuple[Array, tuple[Array, Array, Array]]:
    return kernel_attention(chip, q, k, v), (q, k, v)


def _backward(
    chip: ChipKind,
    saved: tuple[Array, Array, Array],
    gradient: Array,
) -> tuple[Array, ...]:
    return _run_pass(_BACKWARD[chip], saved, *saved, gradient.astype(saved[0].dtype))


kernel_attention.defvjp(_forward, _backward)


def cudnn_attention(
    q: Float[Array, "batch heads queries size"],
    k: Float[Array, "batch heads keys size"],
    v: Float[Array, "batch heads keys size"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch heads queries size"]:
    """Compute `products.attention` of bfloat16 by cuDNN, forwards and backwards.

    No run chooses it until it is measured in a whole step: `experiments/bench_gpu.py`.

    Args:
      q, k, v: bfloat16.
      implementation: "xla" computes the same on any platform, for tests.
    """
    queries, keys = q.shape[2], k.shape[2]
    # cuDNN refuses an odd number of tokens where a gradient is asked for
    padded = [_even_tokens(x) for x in (q, k, v)]
    batch = len(q)
    out = jax.nn.dot_product_attention(
        *padded,
        query_seq_lengths=jnp.full(batch, queries, jnp.int32),
        key_value_seq_lengths=jnp.full(batch, keys, jnp.int32),
        implementation=implementation,
    )
    return out[:, :queries].swapaxes(1, 2)


def _even_tokens(x: Float[Array, "batch heads tokens size"]) -> Float[Array, "batch tokens_ heads size"]:
    """Put the tokens before the heads, with a token of zeros after an odd number."""
    x = x.swapaxes(1, 2)
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


class _Layout(NamedTuple):
    """How a chip's kernel takes arrays [batch, heads, tokens, size]."""

    heads_at_a_time: int
    to: Callable[[Array], Array]
    back: Callable[[Array, Array], Array]  # back(array, like)
    # the part of an array that one call of the kernel takes
    block: Callable[[Any], Any]
    options: Any = None  # for the compiler
    # number of tokens, for functions whose blocks have more rows
    tokens: Mapping[str, int] = {}


class _Pass(NamedTuple):
    """The forward or the backward pass of attention on a chip."""

    # layout(shape of q, number of keys)
    layout: Callable[[tuple[int, ...], int], _Layout]
    # takes references to arrays [heads, tokens, size]; on a GPU [rows, size]
    function: Callable[..., None]
    products: int  # operations per score, over the size of a head


def _run_pass(attention_pass: _Pass, results: tuple[Array, ...], *arrays: Array) -> tuple:
    """Run the pass's function(*arrays, *results), which writes the results, for each
    image and head.

    Args:
      attention_pass: forward or backward.
      results: arrays of the results' shapes and types.
      arrays: [batch, heads, tokens, size].
    """
    from jax.experimental import pallas as pl  # slow to load

    batch, heads, queries, size = arrays[0].shape
    keys = arrays[1].shape[2]
    layout = attention_pass.layout(arrays[0].shape, keys)
    inputs = [layout.to(x) for x in arrays]
    outputs = [jax.eval_shape(layout.to, x) for x in results]
    cost = pl.CostEstimate(
        flops=attention_pass.products * batch * heads * queries * keys * size,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
        transcendentals=batch * heads * queries * keys,
    )
    written = pl.pallas_call(
        functools.partial(attention_pass.function, **layout.tokens),
        out_shape=outputs,
        grid=(batch * heads // layout.heads_at_a_time,),
        in_specs=[layout.block(x) for x in inputs],
        out_specs=[layout.block(x) for x in outputs],
        cost_estimate=cost,
        compiler_params=layout.options,
    )(*inputs)
    return tuple(layout.back(x, like) for x, like in zip(written, results, strict=True))


def _weights(q: Array, k: Array, keys: int | None = None) -> Array:
    """Return the attention weights of a head [queries, keys], in the type of q. With
    `keys`, only the first so many keys exist; the others pad them."""
    score = _product(q, k, 1, 1) * q.shape[-1] ** -0.5
    # every query has a key that exists, so no row is -inf alone and softmax is never NaN
    if keys is not None:
        score = jnp.where(jnp.arange(len(k))[None] < keys, score, -jnp.inf)
    return jax.nn.softmax(score).astype(q.dtype)


def _product(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """Contract these axes of two matrices, as float32."""
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


# ---- TPU: some heads at a time, all tokens of each -------------------------------------


def _layout_on_tpu(shape: tuple[int, ...], keys: int) -> _Layout:
    """Lay arrays out as [batch * heads, tokens, size]."""
    from jax.experimental import pallas as pl

    # as many heads at a time as have their scores in vector memory; more heads keep the
    # processor busy
    if keys <= 256:
        most = 4
    elif keys <= 384:
        most = 2
    else:
        most = 1
    # a divisor, so that every call of the kernel has the same number
    heads = math.gcd(shape[0] * shape[1], most)
    return _Layout(
        heads,
        to=lambda x: x.reshape(-1, *x.shape[2:]),
        back=lambda x, like: x.reshape(like.shape),
        block=lambda x: pl.BlockSpec((heads, *x.shape[1:]), lambda i: (i, 0, 0)),
    )


def _attend(q: Any, k: Any, v: Any, out: Any) -> None:
    for i in range(q.shape[0]):
        out[i] = _product(_weights(q[i], k[i]), v[i], 1, 0).astype(out.dtype)


def _attend_back(
    q: Any,
    k: Any,
    v: Any,
    gradient: Any,
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
) -> None:
    scale = q.shape[-1] ** -0.5
    for i in range(q.shape[0]):
        weights = _weights(q[i], k[i])
        # as in `products._attention_backward`, from the rounded output
        out = _product(weights, v[i], 1, 0).astype(q.dtype).astype(jnp.float32)
        row_sum = jnp.sum(gradient[i].astype(jnp.float32) * out, axis=-1, keepdims=True)
        grad_weights = _product(gradient[i], v[i], 1, 1)
        grad_scores = (weights.astype(jnp.float32) * (grad_weights - row_sum) * scale).astype(q.dtype)
        grad_q[i] = _product(grad_scores, k[i], 1, 0).astype(grad_q.dtype)
        grad_k[i] = _product(grad_scores, q[i], 0, 0).astype(grad_k.dtype)
        grad_v[i] = _product(weights, gradient[i], 0, 0).astype(grad_v.dtype)


# ---- GPU: one head, some queries at a time ---------------------------------------------
# Triton's arrays have powers of 2, and so have the blocks: since jax 0.12 no slice may
# reach beyond a block. Rows beyond the last token are read as zeros and not written.


def _layout_on_gpu(warps: int, shape: tuple[int, ...], keys: int) -> _Layout:
    """Lay arrays out as [batch, tokens, heads, size], as projections do."""
    from jax.experimental import pallas as pl

    heads = shape[1]
    return _Layout(
        heads_at_a_time=1,
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


def _rows(ref: Any, start: Array | int, count: int, tokens: int) -> tuple[Any, Array]:
    """Return a reference to `count` rows of a head, and which are tokens."""
    from jax.experimental import pallas as pl

    exists = (start + jnp.arange(count) < tokens)[:, None]
    return ref.at[pl.ds(start, count), :], exists


def _read(ref: Any, start: Array | int, count: int, tokens: int) -> Array:
    rows, exists = _rows(ref, start, count, tokens)
    return _triton().load(rows, mask=exists, other=0.0)


def _write(ref: Any, start: Array | int, value: Array, tokens: int) -> None:
    rows, exists = _rows(ref, start, len(value), tokens)
    _triton().store(rows, value.astype(ref.dtype), mask=exists)


def _power_of_2(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _attend_on_gpu(q: Any, k: Any, v: Any, out: Any, *, queries: int, keys: int) -> None:
    rows = QUERIES["forward"]
    all_k = _read(k, 0, len(k), keys)
    all_v = _read(v, 0, len(v), keys)

    def attend_rows(i: Array, carry: None) -> None:
        weights = _weights(_read(q, i * rows, rows, queries), all_k, keys)
        _write(out, i * rows, _product(weights, all_v, 1, 0), queries)

    jax.lax.fori_loop(0, -(-queries // rows), attend_rows, None)


def _attend_back_on_gpu(
    q: Any,
    k: Any,
    v: Any,
    gradient: Any,
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
    *,
    queries: int,
    keys: int,
) -> None:
    rows = QUERIES["backward"]
    scale = q.shape[-1] ** -0.5
    all_k = _read(k, 0, len(k), keys)
    all_v = _read(v, 0, len(v), keys)

    def add_gradients_of_rows(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        sum_k, sum_v = sums
        q_rows = _read(q, i * rows, rows, queries)
        gradient_rows = _read(gradient, i * rows, rows, queries)
        rounded = _weights(q_rows, all_k, keys)
        weights = rounded.astype(jnp.float32)
        grad_weights = _product(gradient_rows, all_v, 1, 1)
        row_sum = jnp.sum(weights * grad_weights, axis=-1, keepdims=True)
        grad_scores = (weights * (grad_weights - row_sum) * scale).astype(q_rows.dtype)
        _write(grad_q, i * rows, _product(grad_scores, all_k, 1, 0), queries)
        sum_k = sum_k + _product(grad_scores, q_rows, 0, 0)
        sum_v = sum_v + _product(rounded, gradient_rows, 0, 0)
        return sum_k, sum_v

    zeros = jnp.zeros(all_k.shape, jnp.float32)
    sum_k, sum_v = jax.lax.fori_loop(0, -(-queries // rows), add_gradients_of_rows, (zeros, zeros))
    _write(grad_k, 0, sum_k, keys)
    _write(grad_v, 0, sum_v, keys)


def _on_gpu(direction: str, function: Callable[..., None], products: int) -> _Pass:
    return _Pass(functools.partial(_layout_on_gpu, WARPS[direction]), function, products)


_FORWARD = {"tpu": _Pass(_layout_on_tpu, _attend, 4), "gpu": _on_gpu("forward", _attend_on_gpu, 4)}
_BACKWARD = {
    # 14, not 10: on a TPU it recomputes the output too
    "tpu": _Pass(_layout_on_tpu, _attend_back, 14),
    "gpu": _on_gpu("backward", _attend_back_on_gpu, 10),
}
