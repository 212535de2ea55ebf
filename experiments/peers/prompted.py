"""FPPL and PILoRA on a ViT with random weights: fcljax's engine, and the same as plain loops in JAX.

A federation is in the first round of the second of two tasks, with global prototypes of its classes, so that
every part of the clients' algorithm has work to do. Images are random and already have the network's size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from fcljax import config
from fcljax.adapters.lora import lora_injection, pair_of
from fcljax.adapters.prompts import Gate, fuse, gate_weights, prompt_injection
from fcljax.data.augment import Preprocess, clean_view, input_pipeline, train_view
from fcljax.data.store import Split
from fcljax.methods.pilora import orthogonality
from fcljax.models.vit import Lora, ViTConfig, apply_vit, init_vit, vit_network
from fcljax.parts.reports import Prototypes
from fcljax.runs.build import make_method
from fcljax.runs.inputs import inputs_of, read_clean
from fcljax.runs.predict import Predicted, make_features, make_predict
from fcljax.types import Batch, ClientContext, ClientInfo, Frozen, RoundContext, Sizes, Task
from peers.game import KEY, Game, mean_tree, partition, rows_of, task_of

TASKS = 2
TASK_CLASSES = 10
CLASSES = TASKS * TASK_CLASSES
PROMPTS = 20  # tokens of a block
TEMPERATURE = 0.2
L1 = 0.01
ORTHOGONALITY = 0.5
PL = 0.001
DECAY = 1e-5
LORA_RATE = 1e-5

Crops = Callable[[np.ndarray], Any]


class Work(NamedTuple):
    """A workload: `method` is "fppl" or "pilora"; `test` images are evaluated."""

    method: str
    vit: ViTConfig
    rows: tuple[int, ...]  # of each client
    batch: int
    epochs: int = 2
    test: int = 256
    augment: bool = True
    optimiser: str = "adam"  # or sgd
    rate: float = 1e-3
    blocks: int = 5  # that have prompts, in FPPL

    @property
    def preprocess(self) -> Preprocess:
        """How its images are made: as the papers' releases do."""
        return input_pipeline(self.method, self.vit.image_size)


# What is not the clients' own work is off: FPPL's server would train the classifier on prototypes.
OPTIONS: dict[str, dict[str, Any]] = {
    "fppl": {"wo_debias": True},
    "pilora": {"fidelity": "released", "lora_lr": LORA_RATE},
}


def game_of(work: Work) -> Game:
    """The federation as fcljax has it."""
    size = work.vit.image_size
    rng = np.random.default_rng(0)
    rows = sum(work.rows)
    task = task_of(1, TASK_CLASSES, TASKS)
    label = rng.integers(TASK_CLASSES, CLASSES, rows).astype(np.int32)
    image = rng.integers(0, 256, (rows, size, size, 3), np.uint8)
    settings = OPTIONS[work.method] | {
        "epochs": work.epochs,
        "batch_size": work.batch,
        "clients": len(work.rows),
        "lr": work.rate,
        "optimiser": work.optimiser,
        "rounds": 30,
    }
    if work.method == "fppl":
        settings["prompt_blocks"] = work.blocks
    if work.method == "pilora":
        settings["weight_decay"] = DECAY if work.optimiser == "adam" else 0.0
        settings["lora_lr"] = LORA_RATE if work.optimiser == "adam" else work.rate
    resolved = config.resolve(config.from_mapping(work.method, settings, "bench"))
    sizes = Sizes(CLASSES, TASKS, TASK_CLASSES, len(work.rows), 30, max(work.rows))
    preprocess = work.preprocess
    network = vit_network(work.vit, preprocess.mean, preprocess.std)
    method = make_method(resolved, sizes, network)
    frozen = frozen_of(work.vit)
    server = jax.jit(method.init)(KEY, frozen)
    server = with_past(work, method.begin_task(RoundContext.on_host(frozen, task, 0, False), server, KEY))
    return Game(
        method,
        frozen,
        server,
        Split(jnp.asarray(image), jnp.asarray(label)),
        partition(work.rows, label, CLASSES),
        task,
        functools.partial(inputs_of, preprocess, work.augment),
    )


def frozen_of(vit: ViTConfig) -> Frozen:
    """Random weights, matrices in the compute type as in a run."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(functools.partial(init_vit, config=vit), KEY)

    def draw(path: Any, x: Any) -> Array:  # XLA would take its time to compile as many draws
        value = 0.02 * rng.standard_normal(x.shape, np.float32) + (path[-1].key == "scale")
        return jnp.asarray(value, vit.dtype if path[-1].key == "kernel" else x.dtype)

    return Frozen(jax.tree_util.tree_map_with_path(draw, shapes))


def with_past(work: Work, server: PyTree) -> PyTree:
    """The server with what earlier rounds would have left: FPPL's pool of prototypes, PILoRA's B of pairs."""
    if work.method == "fppl":
        pool = server.rules[0]
        vector = jax.random.normal(jax.random.key(2), pool.vector.shape)
        return server._replace(rules=(Prototypes(vector, jnp.ones_like(pool.present)), *server.rules[1:]))
    pairs = server.params.adapter
    noise = lambda key, x: 0.02 * jax.random.normal(jax.random.key(key), x.shape)
    pairs = pairs._replace(b_q=noise(3, pairs.b_q), b_v=noise(4, pairs.b_v))
    return server._replace(params=server.params._replace(adapter=pairs))


def predict_of(work: Work, game: Game, later: bool = False) -> Callable[[], Predicted]:
    """Evaluation as a run does it. `later`: of images that it has evaluated before, with the un-prompted
    features that it has kept of them."""
    split = test_split(work)
    rows = np.arange(work.test)
    split = split._replace(query=queries(work, game, split)) if later else split
    read = functools.partial(read_clean, work.preprocess)
    predict = make_predict(game.method.predict, read, work.batch, work.test)
    round_context = RoundContext.on_host(game.frozen, game.task, 0, True)
    task_of_class = np.arange(CLASSES) // TASK_CLASSES
    return lambda: predict(round_context, (game.server,), split, rows, task_of_class)


def queries(work: Work, game: Game, split: Split) -> Array | np.ndarray:
    """The un-prompted features of all images."""

    def class_token(frozen: Frozen, image: Array) -> Array:
        return apply_vit(work.vit, frozen.network, image).cls

    compute = make_features(class_token, functools.partial(read_clean, work.preprocess), work.batch)
    return compute(game.frozen, split)


def test_split(work: Work) -> Split:
    """Random test images."""
    size = work.vit.image_size
    rng = np.random.default_rng(5)
    image = rng.integers(0, 256, (work.test, size, size, 3), np.uint8)
    return Split(jnp.asarray(image), jnp.asarray(rng.integers(0, CLASSES, work.test), jnp.int32))


# ---- plain loops in JAX ------------------------------------------------------------------------------------


class Prompted(NamedTuple):
    """What FPPL's client trains."""

    prompt: Array
    gate: Gate
    kernel: Array
    bias: Array


class Paired(NamedTuple):
    """What PILoRA's client trains: its pair, and the prototypes of the task."""

    pair: Lora
    prototype: Array


class Fixed(NamedTuple):
    """What it reads besides: prompts or pairs of all tasks, prototypes, which of them exist."""

    past: PyTree
    prototype: Array


def start_of(work: Work, game: Game) -> tuple[Prompted | Paired, Fixed]:
    """Both, at the start of the round."""
    params = game.server.params
    task = int(game.task.index)
    if work.method == "fppl":
        adapter = params.adapter
        head = params.classifier
        pool = game.server.rules[0].vector.mean(0)[TASK_CLASSES:]
        return Prompted(adapter.prompt[task], adapter.gate, *head), Fixed(adapter.prompt, pool)
    pair = pair_of(params.adapter, task)
    return Paired(pair, params.classifier[TASK_CLASSES:]), Fixed(params.adapter, params.classifier)


def fppl_feature(work: Work, frozen: PyTree, part: Prompted, fixed: Fixed, image: Array) -> Array:
    """The class token under fused prompts."""
    query = apply_vit(work.vit, frozen, image).cls
    task = jnp.int32(1)
    weight = gate_weights(part.gate, query, jnp.arange(TASKS) <= task)
    fused = fuse(weight, fixed.past, part.prompt, task)
    return apply_vit(work.vit, frozen, image, prompt_injection(fused)).cls


def fppl_loss(work: Work, part, frozen, fixed: Fixed, image: Array, label: Array, mask: Array):
    """Cross-entropy over the task's classes, and the pull to the global prototypes; and the features."""
    feature = fppl_feature(work, frozen, part, fixed, image)
    count = jnp.sum(mask)
    own = label - TASK_CLASSES
    mean = lambda x: jnp.sum(x * mask) / count
    logits = (feature @ part.kernel + part.bias)[:, TASK_CLASSES:]
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    similarity = unit(feature) @ unit(fixed.prototype).T / TEMPERATURE
    cross = optax.softmax_cross_entropy_with_integer_labels
    return mean(cross(logits, own)) + mean(cross(similarity, own)), feature


def pilora_feature(work: Work, frozen: PyTree, part: Paired, fixed: Fixed, image: Array) -> Array:
    """The class token under the task's own pair."""
    del fixed
    return apply_vit(work.vit, frozen, image, lora_injection(part.pair)).cls


def pilora_loss(work: Work, part: Paired, frozen, fixed: Fixed, image: Array, label: Array, mask: Array):
    """Cross-entropy of distances, the distance to the own prototype, and the penalties of A."""
    feature = pilora_feature(work, frozen, part, fixed, image)
    count = jnp.sum(mask)
    prototype = fixed.prototype.at[TASK_CLASSES:].set(part.prototype)
    distance = jnp.linalg.norm(feature[:, None] - prototype, axis=-1) / work.vit.width**0.5
    mean = lambda x: jnp.sum(x * mask) / count
    own = jnp.take_along_axis(distance, label[:, None], 1)[:, 0]
    cross = optax.softmax_cross_entropy_with_integer_labels(-distance, label)
    penalty = L1 * sum(jnp.sum(jnp.abs(a)) for a in (part.pair.a_q, part.pair.a_v))
    apart = ORTHOGONALITY * orthogonality(fixed.past, part.pair, 1)
    return mean(cross) + PL * mean(own) + penalty + apart, feature


LOSSES = {"fppl": fppl_loss, "pilora": pilora_loss}
FEATURES = {"fppl": fppl_feature, "pilora": pilora_feature}


def optimiser_of(work: Work) -> optax.GradientTransformation:
    """Adam, as the releases have it: PILoRA's with weight decay and a rate for the pair."""
    if work.method == "fppl":
        return optax.adam(work.rate)
    decayed = lambda rate: optax.chain(optax.add_decayed_weights(DECAY), optax.adam(rate))
    labels = Paired("pair", "prototype")  # pyrefly: ignore
    return optax.multi_transform({"pair": decayed(LORA_RATE), "prototype": decayed(work.rate)}, labels)


def jax_steps(work: Work, game: Game) -> Callable[[], tuple[PyTree, PyTree]]:
    """A compiled call for every step: (averaged parameters, class features of every client)."""
    start, fixed = start_of(work, game)
    optimiser = optimiser_of(work)
    loss = LOSSES[work.method]
    of_class = jnp.arange(TASK_CLASSES, CLASSES)

    def see(data: Split, rows: Array, key: Array) -> Array:
        if not work.augment:
            return clean_view(work.preprocess, data.input[rows])
        return train_view(work.preprocess, data.input[rows], jax.random.split(key, len(rows)))

    def sums(feature: Array, label: Array, mask: Array) -> Array:
        return ((label[:, None] == of_class) * mask[:, None]).T @ feature

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(part, state, frozen, fixed, data: Split, rows: Array, mask: Array, key: Array):
        image = see(data, rows, key)
        label = data.label[rows]
        bound = functools.partial(loss, work)
        gradient, feature = jax.grad(bound, has_aux=True)(part, frozen, fixed, image, label, mask)
        update, state = optimiser.update(gradient, state, part)
        return optax.apply_updates(part, update), state, sums(feature, label, mask)

    @jax.jit
    def look(part, frozen, fixed, data: Split, rows: Array, mask: Array, key: Array) -> Array:
        feature = FEATURES[work.method](work, frozen, part, fixed, see(data, rows, key))
        return sums(feature, data.label[rows], mask)

    def play(client: int) -> tuple[PyTree, Array]:
        mine = rows_of(game.partition, client)
        rng = np.random.default_rng(client)
        part = jax.tree.map(jnp.copy, start)
        key = jax.random.fold_in(KEY, client)
        state = optimiser.init(part)
        total = jnp.zeros((TASK_CLASSES, work.vit.width))
        count = 0
        for _ in range(work.epochs):
            for rows, mask in padded(rng.permutation(mine), work.batch):
                count += 1
                own = jax.random.fold_in(key, count)
                part, state, seen = step(part, state, game.frozen.network, fixed, game.data, rows, mask, own)
                total = total + seen if work.method == "pilora" else total
        for rows, mask in padded(mine, work.batch) if work.method == "fppl" else ():
            count += 1
            own = jax.random.fold_in(key, count)
            total = total + look(part, game.frozen.network, fixed, game.data, rows, mask, own)
        return part, total

    def once() -> tuple[PyTree, PyTree]:
        parts, totals = zip(*map(play, range(len(work.rows))), strict=True)
        return mean_tree(parts, work.rows), totals

    return once


def padded(rows: np.ndarray, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of rows, the last one padded by row 0, and which of them are real."""
    pieces = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    room = lambda piece: (0, batch - len(piece))
    return [(np.pad(x, room(x)), np.pad(np.ones(len(x), np.float32), room(x))) for x in pieces]


def jax_predict(work: Work, game: Game) -> Callable[[], list[np.ndarray]]:
    """Evaluation as a plain loop: a compiled call for every batch."""
    (part, fixed) = start_of(work, game)
    split = test_split(work)
    images = np.asarray(split.input)

    @jax.jit
    def found(part, frozen, fixed, image: Array) -> Array:
        feature = FEATURES[work.method](work, frozen, part, fixed, clean_view(work.preprocess, image))
        if work.method == "fppl":
            return jnp.argmax(feature @ part.kernel + part.bias, -1)
        prototype = fixed.prototype.at[TASK_CLASSES:].set(part.prototype)
        return jnp.argmin(jnp.sum((feature[:, None] - prototype) ** 2, -1), -1)

    def once() -> list[np.ndarray]:
        parts = [images[i : i + work.batch] for i in range(0, work.test, work.batch)]
        return [np.asarray(found(part, game.frozen.network, fixed, some)) for some in parts]

    return once


# ---- arithmetic --------------------------------------------------------------------------------------------


def block_flops(vit: ViTConfig, keys: int, queries: int) -> tuple[int, int]:
    """FLOPs of one image in one block, forwards: of q, k and v, and of what comes after them. `queries`
    tokens go out; `keys` are all tokens and prompts."""
    d = vit.width
    hidden = vit.mlp
    projections = 2 * d * d * (queries + 2 * keys)
    after = 4 * queries * keys * d + 2 * queries * d * d + 4 * queries * d * hidden
    return projections, after


def forward_flops(vit: ViTConfig, prompts: int, blocks: int) -> int:
    """FLOPs of one image's matrix products through a ViT whose first `blocks` read `prompts` more keys each.
    Of the last block the class token alone is computed."""
    tokens = 1 + vit.grid**2
    total = 2 * vit.grid**2 * vit.patch**2 * 3 * vit.width
    for i in range(vit.depth):
        queries = 1 if i == vit.depth - 1 else tokens
        total += sum(block_flops(vit, tokens + (prompts if i < blocks else 0), queries))
    return total


def backward_flops(vit: ViTConfig, prompts: int, blocks: int) -> int:
    """FLOPs of the gradient to what is injected from the first block on, no weight's: one product for each of
    the forward's, two for those of attention. In the first block nothing goes back to the tokens."""
    tokens = 1 + vit.grid**2
    total = 0
    for i in range(vit.depth):
        queries = 1 if i == vit.depth - 1 else tokens
        more = prompts if i < blocks else 0
        projections, after = block_flops(vit, tokens + more, queries)
        attention = 4 * queries * (tokens + more) * vit.width
        first = 4 * more * vit.width**2
        total += (first if i == 0 else projections) + after + attention
    return total


def useful_flops(work: Work) -> tuple[int, int]:
    """FLOPs that a round needs for its real rows, and those of an evaluation.

    Matrix products of the network in the cheapest form that is known here: prompts are keys and values, no
    gradient of weights, the last block for the class token alone. Padding, augmentation, norms, activations
    and losses are not useful."""
    vit = work.vit
    rows = sum(work.rows)
    length = PROMPTS
    blocks = work.blocks
    if work.method == "pilora":
        forward = forward_flops(vit, 0, 0)
        return rows * work.epochs * (forward + backward_flops(vit, 0, 0)), work.test * forward
    both = forward_flops(vit, 0, 0) + forward_flops(vit, length, blocks)
    round_ = rows * (work.epochs * (both + backward_flops(vit, length, blocks)) + both)
    return round_, work.test * both


def later_flops(work: Work) -> int:
    """FLOPs of an evaluation of FPPL that has kept the un-prompted features."""
    return work.test * forward_flops(work.vit, PROMPTS, work.blocks)


def rows_seen(work: Work) -> int:
    """Images that a round's clients pass through the network, the prototype pass included."""
    return sum(work.rows) * (work.epochs + (work.method == "fppl"))


def clients_step(game: Game, image: Array, label: Array) -> tuple[float, PyTree, PyTree]:
    """A client's first step on one batch without augmentation: the loss, and the trainable parameters
    before and after it."""
    task: Task = game.task
    sent = game.method.broadcast(RoundContext.on_host(game.frozen, task, 0, False), game.server)
    ids = jnp.arange(len(label), dtype=jnp.int32)
    info = ClientInfo(jnp.int32(0), jnp.int32(len(label)), jnp.ones(CLASSES, jnp.int32), jnp.int32(0))
    context = ClientContext(game.frozen, sent.payload, sent.cached, task, info)
    program = game.method.rounds[0].program
    local = program.start(context, game.method.init_client(KEY, game.server), KEY)
    after, metrics = jax.jit(program.phases[0].step)(context, local, Batch(image, label, ids >= 0, ids), KEY)
    return float(metrics["loss"].total / metrics["loss"].weight), local.trainable, after.trainable
