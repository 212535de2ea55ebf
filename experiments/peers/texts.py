"""FedAvg of LoRA pairs on a text encoder with random weights: fcljax's engine, and a plain loop in JAX.

The plain loop has the encoder of `fcljax.models.text`; its loss, steps and averages know nothing of the
engine.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from fcljax import config
from fcljax.adapters.lora import lora_injection, pair_of
from fcljax.data.kinds import TextData
from fcljax.data.store import Split
from fcljax.models.shapes import TextConfig
from fcljax.models.text import apply_text, init_text, text_network
from fcljax.models.vit import Lora
from fcljax.runs.build import make_method
from fcljax.runs.inputs import inputs_of
from fcljax.types import Frozen, RoundContext, Sizes
from peers.game import KEY, Game, mean_tree, partition, rows_of, task_of
from peers.prompted import CLASSES, TASK_CLASSES, TASKS, padded


class TextWork(NamedTuple):
    """A workload: clients' rows, and the encoder that they train pairs on."""

    encoder: TextConfig
    rows: tuple[int, ...]  # of each client
    batch: int
    epochs: int = 2
    optimiser: str = "adam"  # or sgd
    rate: float = 1e-3


class Trained(NamedTuple):
    """What a client trains: the pairs of all blocks, and the classifier."""

    pairs: Lora
    kernel: Array
    bias: Array


def game_of(work: TextWork) -> Game:
    """Make the federation as fcljax has it: the first round of the second of two tasks."""
    rng = np.random.default_rng(0)
    rows = sum(work.rows)
    label = rng.integers(TASK_CLASSES, CLASSES, rows).astype(np.int32)
    length = rng.integers(work.encoder.length // 4, work.encoder.length + 1, rows)
    text = {
        "ids": rng.integers(1, work.encoder.vocabulary, (rows, work.encoder.length), np.int32),
        "mask": np.arange(work.encoder.length) < length[:, None],
    }
    settings = {
        "adapter": "lora",
        "lora_pairs": "one",
        "lora_blocks": work.encoder.blocks.depth,
        "epochs": work.epochs,
        "batch_size": work.batch,
        "clients": len(work.rows),
        "lr": work.rate,
        "lora_lr": work.rate,
        "optimiser": work.optimiser,
        "rounds": 30,
    }
    resolved = config.resolve(config.from_mapping("fedavg", settings, "bench"))
    sizes = Sizes(CLASSES, TASKS, TASK_CLASSES, len(work.rows), 30, max(work.rows))
    method = make_method(resolved, sizes, text_network(work.encoder))
    frozen = Frozen(init_text(jax.random.key(1), work.encoder))
    task = task_of(1, TASK_CLASSES, TASKS)
    server = jax.jit(method.init)(KEY, frozen)
    server = method.begin_task(RoundContext.on_host(frozen, task, 0, False), server, KEY)
    # B is 0 before the first step, and A then has no gradient
    pairs = server.params.adapter
    noise = 0.02 * jax.random.normal(jax.random.key(3), pairs.b_q.shape)
    server = server._replace(params=server.params._replace(adapter=pairs._replace(b_q=noise, b_v=noise)))
    return Game(
        method,
        frozen,
        server,
        Split(jax.tree.map(jnp.asarray, text), jnp.asarray(label)),
        partition(work.rows, label, CLASSES),
        task,
        functools.partial(inputs_of, TextData(), False),
    )


def start_of(game: Game) -> Trained:
    """Copy what the round starts from."""
    params = game.server.params
    return jax.tree.map(jnp.copy, Trained(pair_of(params.adapter, 0), *params.classifier))


def loss_of(work: TextWork, part: Trained, frozen: PyTree, text: PyTree, label: Array, mask: Array) -> Array:
    """Cross-entropy over the classes of the task."""
    feature = apply_text(work.encoder, frozen, text, lora_injection(part.pairs)).cls
    logits = (feature @ part.kernel + part.bias)[:, TASK_CLASSES:]
    cross = optax.softmax_cross_entropy_with_integer_labels(logits, label - TASK_CLASSES)
    return jnp.sum(cross * mask) / jnp.sum(mask)


def jax_steps(work: TextWork, game: Game) -> Callable[[], PyTree]:
    """Return a round with a compiled call for every step: the averaged parameters."""
    start = start_of(game)
    optimiser = optax.adam(work.rate) if work.optimiser == "adam" else optax.sgd(work.rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(part, state, frozen, data: Split, rows: Array, mask: Array):
        text = jax.tree.map(lambda array: array[rows], data.input)
        of = functools.partial(loss_of, work)
        gradient = jax.grad(of)(part, frozen, text, data.label[rows], mask)
        update, state = optimiser.update(gradient, state, part)
        return optax.apply_updates(part, update), state

    def play(client: int) -> PyTree:
        rng = np.random.default_rng(client)
        part = jax.tree.map(jnp.copy, start)
        state = optimiser.init(part)
        for _ in range(work.epochs):
            order = rng.permutation(rows_of(game.partition, client))
            for rows, mask in padded(order, work.batch):
                part, state = step(part, state, game.frozen.network, game.data, rows, mask)
        return part

    return lambda: mean_tree([play(client) for client in range(len(work.rows))], work.rows)
