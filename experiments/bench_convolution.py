"""How convolutions with trained kernels are best done, alone and in the engine's loop; one JSON line each.

    python experiments/bench_convolution.py [batch]

The work is a step of gradient descent on one 3 x 3 layer of 64 channels at 32 x 32, forwards, the images'
gradient and the kernel's: 7.2 GFLOP at the default batch of 32. `alone` is one compiled step; `loop` a
`fori_loop` of two. `clients` are 4 models with kernels of their own, in a loop of steps: vmapped (XLA makes a
grouped convolution of them), one after the other (`lax.map`, the engine's lane mode `loop`), or unrolled.

  lax       jax.lax.conv_general_dilated with the gradients that jax derives
  ours      fcljax.models.convolution
  patches   every place's patch as a row (shifted copies side by side), then one matrix product

Times are the best of three, in ms per step (of all clients); `of_peak` is the share of the matrix product of
1024 x 1024 that was timed in the same process. `gradient_error` is the largest difference of the kernel's
gradient from lax's, over its largest value.

Then max-pooling and its gradient, of this batch, by `flax.linen.max_pool` and by ours.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array
from peers.machine import best, peak, processor

from fcljax.models.convolution import Window, conv, max_pool

CHANNELS = 64
SIDE = 32
CLIENTS = 4
STEPS = 2
# size, window, pixels of a side, channels: of a small network, and of a ResNet's stem
POOLS = {
    "2 x 2": ((2, 2), Window((2, 2)), 28, 32),
    "3 x 3, stride 2": ((3, 3), Window((2, 2), ((1, 1), (1, 1))), 112, 64),
}
WINDOW = Window((1, 1), ((1, 1), (1, 1)))


def plain(x: Array, kernel: Array) -> Array:
    """jax's own."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, WINDOW.stride, WINDOW.pads, dimension_numbers=numbers)


def patches(x: Array, kernel: Array) -> Array:
    """A matrix product of shifted copies."""
    padded = jnp.pad(x, ((0, 0), *WINDOW.pads, (0, 0)))
    copies = [padded[:, i : i + SIDE, j : j + SIDE] for i in range(3) for j in range(3)]
    return jnp.concatenate(copies, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


WAYS: dict[str, Callable] = {"lax": plain, "ours": functools.partial(conv, WINDOW), "patches": patches}


def step(way: Callable, pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Both gradients of a quadratic loss, and a step along them."""
    loss = lambda x, kernel: (way(x, kernel) ** 2).sum()
    gradient = jax.grad(loss, (0, 1))(*pair)
    return jax.tree.map(lambda value, by: value - 1e-6 * by, pair, gradient)


def ways_to_run(way: Callable) -> dict[str, tuple[Callable, int, int]]:
    """Name -> (function of a pair or of CLIENTS pairs, steps that it makes, clients)."""
    one = functools.partial(step, way)
    repeat = lambda f: lambda pair: lax.fori_loop(0, STEPS, lambda _, p: f(p), pair)
    at = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
    unrolled = lambda pairs: jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[one(at(pairs, i)) for i in range(CLIENTS)]
    )
    return {
        "alone": (one, 1, 1),
        "loop": (repeat(one), STEPS, 1),
        "clients vmap": (repeat(jax.vmap(one)), STEPS, CLIENTS),
        "clients map": (repeat(functools.partial(lax.map, one)), STEPS, CLIENTS),
        "clients unrolled": (repeat(unrolled), STEPS, CLIENTS),
    }


def seconds(f: Callable, *arguments: Array | tuple) -> float:
    """The best of three calls, after one that compiles."""
    compiled = jax.jit(f)
    return best(lambda: compiled(*arguments), 3)


def main(batch: int) -> None:
    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape)
    top = peak(1024, repeats=3)
    print(json.dumps({"processor": processor(), "peak_gflops": round(top, 1), "batch": batch}))
    x = draw(0, batch, SIDE, SIDE, CHANNELS)
    kernel = 0.03 * draw(1, 3, 3, CHANNELS, CHANNELS)
    work = 3 * 2 * batch * SIDE**2 * 9 * CHANNELS**2
    gradients = {
        name: jax.grad(lambda k, way=way: (way(x, k) ** 2).sum())(kernel) for name, way in WAYS.items()
    }
    for name, way in WAYS.items():
        error = jnp.abs(gradients[name] - gradients["lax"]).max() / jnp.abs(gradients["lax"]).max()
        for how, (run, steps, clients) in ways_to_run(way).items():
            pair = (x, kernel)
            if clients > 1:
                pair = jax.tree.map(lambda leaf: jnp.stack([leaf] * CLIENTS), pair)
            taken = seconds(run, pair) / steps
            line = {
                "way": name,
                "how": how,
                "ms": round(1e3 * taken, 1),
                "of_peak": round(clients * work / taken / top / 1e9, 3),
                "gradient_error": float(f"{error:.1e}"),
            }
            print(json.dumps(line), flush=True)
    for line in pooling(batch):
        print(json.dumps(line), flush=True)


def pooling(batch: int) -> Iterator[dict[str, str | float]]:
    """A line for each kind of max-pooling and each way: the pooled images and their gradient."""
    for name, (size, window, side, channels) in POOLS.items():
        x = jax.random.normal(jax.random.key(2), (batch, side, side, channels))
        ways = {
            "flax": functools.partial(
                nn.max_pool, window_shape=size, strides=window.stride, padding=window.pads
            ),
            "ours": functools.partial(max_pool, size, window),
        }
        for way, pool in ways.items():
            slope = jax.grad(lambda x, pool=pool: (pool(x) ** 2).sum())
            yield {"way": way, "max-pooling": name, "ms": round(1e3 * seconds(slope, x), 2)}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
