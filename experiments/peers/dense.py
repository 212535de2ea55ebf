"""Whole networks that train: a CNN, an MLP and tiny clients, by the engine and by loops in JAX and torch.

All ways do the same: FedAvg of clients that take steps of gradient descent on shuffled batches, the last of
which may be partial, from the same first weights. The plain loops know nothing of fcljax.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from fcljax.adapters.full import FullOptions, full
from fcljax.models.convolution import Window, conv, max_pool
from fcljax.parts.client import Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.types import Features, Frozen, Network, Sizes
from peers.game import KEY, Game, add_tree, partition, rows_of, task_of
from peers.networks import (
    from_torch,
    hidden,
    mean_loss,
    to_torch,
    torch_images,
    torch_kernel,
    torch_logits,
)

# apple/pfl-research, benchmarks/image_classification/configs/baseline.yaml: 50 of its users in a round,
# each with 50 images, an epoch of batches of 10; two convolutions, one pooling and a layer of 128. Its
# dropout is left out.
PFL_CIFAR10_ROUNDS = 1500
PFL_CIFAR10_EVERY = 10  # rounds from one evaluation of 10,000 images to the next

Order = Callable[[int, int, int], np.ndarray]  # (client, epoch, rows) -> a permutation of them


class Dense(NamedTuple):
    """A workload: 3 x 3 convolutions, if any, and dense layers below a linear classifier."""

    image: tuple[int, ...]
    convs: tuple[int, ...]  # channels, each with padding and max-pooling
    hidden: tuple[int, ...]
    classes: int
    rows: tuple[int, ...]  # of each client
    batch: int
    epochs: int = 1
    rate: float = 0.05
    valid: tuple[int, ...] = ()  # channels of convolutions before these, without padding, with one pooling


PFL_CIFAR10 = Dense((32, 32, 3), (), (128,), 10, (50,) * 50, batch=10, rate=0.1, valid=(32, 64))


def skewed(clients: int, mean: int, least: int, seed: int = 0) -> tuple[int, ...]:
    """Rows of clients, log-normal as users' data are, with about this mean."""
    draw = np.random.default_rng(seed).lognormal(0.0, 0.7, clients)
    return tuple(np.maximum(least, np.round(draw / draw.mean() * mean)).astype(int).tolist())


def init(work: Dense) -> dict[str, Array]:
    """First weights of all but the classifier: He's for convolutions, Glorot's for matrices."""
    rng = np.random.default_rng(0)
    weights = {}
    size = list(work.image)
    draw = lambda *shape: rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape).astype(np.float32)
    for i, channels in enumerate(work.valid):
        weights[f"valid{i}"] = draw(3, 3, size[-1], channels)
        weights[f"valid{i}_bias"] = np.zeros(channels, np.float32)
        size = [size[0] - 2, size[1] - 2, channels]
    if work.valid:
        size = [size[0] // 2, size[1] // 2, size[2]]
    for i, channels in enumerate(work.convs):
        weights[f"conv{i}"] = draw(3, 3, size[-1], channels)
        weights[f"conv{i}_bias"] = np.zeros(channels, np.float32)
        size = [size[0] // 2, size[1] // 2, channels]
    width = int(np.prod(size))
    for i, features in enumerate(work.hidden):
        weights[f"dense{i}"] = draw(width, features)
        weights[f"dense{i}_bias"] = np.zeros(features, np.float32)
        width = features
    return jax.tree.map(jnp.asarray, weights)


def convolve(x: Array, kernel: Array, padding: int) -> Array:
    """The package's convolution, in steps of one pixel."""
    return conv(Window((1, 1), ((padding, padding),) * 2), x, kernel)


def halve(x: Array) -> Array:
    """The largest of 2 x 2 pixels."""
    return max_pool((2, 2), Window((2, 2)), x)


# ---- fcljax ------------------------------------------------------------------------------------------------


def game_of(work: Dense) -> Game:
    """The federation as fcljax has it, of random images."""

    def apply(params, image, injection, train, mask=None):
        del injection, train, mask
        return Features(hidden(convolve, halve, params, image), None, {}), params

    rows = sum(work.rows)
    rng = np.random.default_rng(1)
    label = rng.integers(0, work.classes, rows).astype(np.int32)
    image = rng.normal(size=(rows, *work.image)).astype(np.float32)
    sizes = Sizes(work.classes, 1, work.classes, len(work.rows))
    network = Network(lambda key: init(work), apply, work.hidden[-1], 0, work.image)  # pyrefly: ignore
    training = Training(work.epochs, work.batch, work.rate, optax.identity())
    run = Run(sizes, network, full(FullOptions(work.rate), sizes, network), training)
    method = federate(run, linear_learner(run), loss=cross_entropy_loss())
    frozen = Frozen(init(work))
    return Game(
        method,
        frozen,
        jax.jit(method.init)(KEY, frozen),
        (jnp.asarray(image), jnp.asarray(label)),
        partition(work.rows, label, work.classes),
        task_of(0, work.classes, 1),
        fetch,
    )


def fetch(data: tuple[Array, Array], rows: Array, keys: Array, augment: bool) -> tuple[Array, Array, None]:
    """Rows of (image, label) arrays."""
    del keys, augment
    return data[0][rows], data[1][rows], None


def weights_of(game: Game) -> dict[str, Array]:
    """All weights that the round starts from, the classifier's as `head` and `head_bias`."""
    params = game.server.params
    return params.adapter | {"head": params.classifier.kernel, "head_bias": params.classifier.bias}


def dense_logits(weights: PyTree, image: Array) -> Array:
    """Logits [B, classes] by the network of the engine's rounds, of weights as `weights_of` has them."""
    return hidden(convolve, halve, weights, image) @ weights["head"] + weights["head_bias"]


def shuffled(client: int, epoch: int, rows: int) -> np.ndarray:
    """The order of a client's rows in an epoch."""
    return np.random.default_rng([client, epoch]).permutation(rows)


# ---- a plain loop in JAX -----------------------------------------------------------------------------------


def descend(work: Dense, weights: PyTree, image: Array, label: Array, mask: Array) -> PyTree:
    """A step of gradient descent on the mean cross-entropy of the rows in the mask."""
    slope = jax.grad(mean_loss)(weights, image, label, mask)
    return jax.tree.map(lambda w, g: w - work.rate * g, weights, slope)


def batches(work: Dense, game: Game, client: int, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """Rows [steps, batch] of a client's steps, padded by row 0, and which of them are real."""
    mine = rows_of(game.partition, client)
    size = work.batch
    steps = -(-len(mine) // size)
    pad = lambda values: np.pad(values, (0, steps * size - len(mine))).reshape(steps, size)
    rows = [pad(mine[order(client, epoch, len(mine))]) for epoch in range(work.epochs)]
    mask = pad(np.ones(len(mine), np.float32))
    return np.concatenate(rows), np.concatenate([mask] * work.epochs)


def jax_steps(work: Dense, game: Game, order: Order = shuffled) -> Callable[[], PyTree]:
    """A compiled call for every step."""
    step = jax.jit(functools.partial(descend, work), donate_argnums=0)
    add = jax.jit(add_tree, donate_argnums=0)
    start = weights_of(game)
    image, label = map(np.asarray, game.data)
    total = sum(work.rows)

    def once() -> PyTree:
        mean = jax.tree.map(jnp.zeros_like, start)
        for client, count in enumerate(work.rows):
            weights = jax.tree.map(jnp.copy, start)
            for rows, mask in zip(*batches(work, game, client, order), strict=True):
                weights = step(weights, image[rows], label[rows], mask)
            mean = add(mean, weights, count / total)
        return mean

    return once


def jax_clients(work: Dense, game: Game, order: Order = shuffled) -> Callable[[], PyTree]:
    """A compiled call for every client: a loop over its steps inside, with as many passes as it has steps."""
    most = work.epochs * -(-max(work.rows) // work.batch)
    start = weights_of(game)
    total = sum(work.rows)

    @functools.partial(jax.jit, donate_argnums=0)
    def play(mean: PyTree, start: PyTree, data: tuple, rows: Array, mask: Array, steps: Array, share: Array):
        def body(i: Array, weights: PyTree) -> PyTree:
            return descend(work, weights, data[0][rows[i]], data[1][rows[i]], mask[i])

        return add_tree(mean, jax.lax.fori_loop(0, steps, body, start), share)

    def once() -> PyTree:
        mean = jax.tree.map(jnp.zeros_like, start)
        for client, count in enumerate(work.rows):
            rows, mask = batches(work, game, client, order)
            room = ((0, most - len(rows)), (0, 0))
            padded = np.pad(rows, room), np.pad(mask, room)
            mean = play(mean, start, game.data, *padded, np.int32(len(rows)), np.float32(count / total))
        return mean

    return once


# ---- a plain loop in torch ---------------------------------------------------------------------------------


def torch_steps(work: Dense, game: Game, order: Order = shuffled) -> Callable[[], dict[str, Any]]:
    """The usual loop: each client loads the weights, and goes forward, back and a step for each batch."""
    import torch
    from torch.nn import functional as F

    start = {name: torch_kernel(x) for name, x in weights_of(game).items()}
    image = torch_images(game.data[0])
    label = to_torch(game.data[1]).long()

    def once() -> dict[str, Any]:
        mean = {name: torch.zeros_like(x) for name, x in start.items()}
        for client, count in enumerate(work.rows):
            mine = rows_of(game.partition, client)
            weights = {name: x.clone().requires_grad_() for name, x in start.items()}
            optimiser = torch.optim.SGD(weights.values(), lr=work.rate)
            for epoch in range(work.epochs):
                rows = torch.from_numpy(mine[order(client, epoch, count)]).long()
                for some in rows.split(work.batch):
                    optimiser.zero_grad()
                    F.cross_entropy(torch_logits(weights, image[some]), label[some]).backward()
                    optimiser.step()
            for name, x in weights.items():
                mean[name].add_(x.detach(), alpha=count / sum(work.rows))
        return {name: from_torch(x) for name, x in mean.items()}

    return once
