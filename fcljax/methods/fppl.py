"""FPPL: an efficient and non-IID robust federated continual learning framework (He et al. 2024, arXiv
2411.01904).

Clients learn a prompt per task that is fused with the frozen prompts of earlier tasks by a gate on the
un-prompted features; class prototypes go up, are averaged, come back to pull the clients' features together
(unified representation), and fill a pool on which the server removes the bias of the averaged classifier.
Where paper and release differ, a field of `FPPLConfig` says which one is meant.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fcljax.federated.aggregation import prototype_mean
from fcljax.models.heads import (
    Head,
    apply_head,
    class_sums,
    correct,
    cosine,
    cross_entropy,
    init_head,
    mask_logits,
    reduce_rows,
)  # fmt: skip
from fcljax.models.prompts import Gate, fuse, gate_weights, init_gate, init_prompts, prompt_injection
from fcljax.types import Backbone, Broadcast, Method, Phase, Program, Setting, Task, Upload, View, Weighted


@dataclasses.dataclass(frozen=True)
class FPPLConfig:
    """Fields with default None take the value of the fidelity preset (`FIDELITY`)."""

    temperature: float = 0.2  # tau of the unified-representation loss
    unified_weight: float = 1.0  # lambda
    prompt_length: int = 20  # tokens per block
    prompt_blocks: int = 5  # blocks 0..4
    server_epochs: int = 5  # debias epochs per round
    server_batch_size: int | None = (
        None  # prototypes per debias step; default: the clients' batch size, as in paper and release
    )
    server_lr: float | None = (
        None  # of the debias steps; default: the clients' learning rate, as in paper and release
    )
    wo_unified: bool = False  # ablation: no unified-representation loss
    wo_fusion: bool = False  # ablation: the gate's best task alone, gate untrained
    wo_debias: bool = False  # ablation: no server training of the classifier
    wo_pool: bool = False  # ablation: debias on the current task's prototypes only
    gate_scale: Literal["learnable", "fixed"] | None = None  # is sigma trained and sent, or 1
    local_classes: Literal["current", "all"] | None = (
        None  # classes that compete in the client's cross-entropy
    )
    reduction: Literal["mean", "sum"] | None = None  # of the losses over a batch, at clients and server
    unified_average: Literal["holders", "batch"] | None = (
        None  # divide the unified loss by rows with a prototype, or all rows
    )
    prototype_view: Literal["augmented", "clean"] | None = None  # images that local prototypes are made of
    prototype_download: Literal["current", "seen"] | None = None  # prototypes sent down
    prompt_upload: Literal["current", "all"] | None = None  # prompts that cross the wire


FIDELITY: dict[str, dict[str, str]] = {
    "intended": dict(
        gate_scale="learnable", local_classes="current", reduction="mean", unified_average="holders",
        prototype_view="clean", prototype_download="current", prompt_upload="current",
    ),
    "paper": dict(
        gate_scale="fixed", local_classes="all", reduction="sum", unified_average="batch",
        prototype_view="augmented", prototype_download="current", prompt_upload="current",
    ),
    "released": dict(
        gate_scale="learnable", local_classes="current", reduction="mean", unified_average="holders",
        prototype_view="augmented", prototype_download="seen", prompt_upload="all",
    ),
}  # fmt: skip


class Trained(NamedTuple):
    """What a client trains: p_t, (psi, sigma) and theta."""

    prompt: Float[Array, "blocks length width"]
    gate: Gate
    head: Head


class Prototypes(NamedTuple):
    """Class prototypes, one row per class of some list of classes, and which of them exist."""

    vector: Float[Array, "classes width"]
    held: Bool[Array, " classes"]


class ServerState(NamedTuple):
    """The global model w and the prototype pool: C_k^y of every client and class, the latest of its task."""

    prompts: Float[Array, "tasks blocks length width"]
    gate: Gate
    head: Head
    pool: Prototypes  # [K, C, width] and [K, C]


class Wire(NamedTuple):
    """Down: the trained parts and the global prototypes G. In the release `trained.prompt` holds all prompts,
    [tasks, ...]."""

    trained: Trained
    prototypes: Prototypes | tuple[()]


class Client(NamedTuple):
    """A client at work: parameters, Adam's state, and the sums and counts that become prototypes."""

    trained: Trained
    optimiser: optax.OptState
    sums: Float[Array, "Ct width"]
    counts: Float[Array, " Ct"]


class Recipe(NamedTuple):
    """Everything static that FPPL's functions close over. `config` is resolved (no None but the server's
    batch and rate)."""

    config: FPPLConfig
    setting: Setting
    backbone: Backbone
    epochs: int
    batch_size: int
    lr: float

    @property
    def extracts(self) -> bool:
        """Do clients send prototypes? Without the unified loss and the debias nobody reads them."""
        return not (self.config.wo_unified and self.config.wo_debias)

    @property
    def sends_all(self) -> bool:
        """Do all prompts cross the wire, as in the release?"""
        return self.config.prompt_upload == "all"


def fppl(
    config: FPPLConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """FPPL as a method. `config` must be resolved; `epochs`, `batch_size` and `lr` are the clients'."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def init(key, frozen):
        return _init(recipe, key, frozen)

    def broadcast(server: ServerState, task):
        return _broadcast(recipe, server, task)

    def serve(frozen, server: ServerState, aggregate, task, key):
        return _serve(recipe, frozen, server, aggregate, task, key)

    def predict(frozen, server: ServerState, image, query, task):
        feature = features(recipe, frozen, current_part(server, task), server.prompts, image, query, task)
        return mask_logits(apply_head(server.head, feature), task.seen)

    return Method(
        init=init,
        broadcast=broadcast,
        client=_client(recipe),
        server=serve,
        predict=predict,
        begin_task=_transfer_prompt,
        queries=True,
        trainable=lambda server, task: current_part(server, task)._asdict(),
    )


def features(recipe: Recipe, frozen, trained: Trained, prompts, image, query, task: Task):
    """c_x: the class token under the prompts that the query of this image fuses (eq. 1, 2)."""
    query = recipe.backbone.encode(frozen, image, None) if query is None else query
    seen_tasks = jnp.arange(recipe.setting.tasks) <= task.index
    weights = gate_weights(trained.gate, query, seen_tasks, soft=not recipe.config.wo_fusion)
    fused = fuse(weights, prompts, trained.prompt, task.index)
    return recipe.backbone.encode(frozen, image, prompt_injection(fused))


def current_part(server: ServerState, task: Task) -> Trained:
    """What clients start from: p_t, the gate and the classifier."""
    return Trained(server.prompts[task.index], server.gate, server.head)


# ---- client ------------------------------------------------------------------------------------------------


def _client(recipe: Recipe) -> Program:
    """Algorithm 1, client side: train for E epochs, then extract prototypes."""
    config, adam = recipe.config, optax.adam(recipe.lr)

    def held_prompts(broadcast: Broadcast):
        return broadcast.wire.trained.prompt if recipe.sends_all else broadcast.held

    def start(broadcast: Broadcast, state, task, info, key):
        """Load the global model; Adam is new every round."""
        del state, info, key
        trained = broadcast.wire.trained
        if recipe.sends_all:
            trained = trained._replace(prompt=trained.prompt[task.index])
        zeros = jnp.zeros((recipe.setting.task_classes, recipe.backbone.width))
        return Client(trained, adam.init(trained), zeros, zeros[:, 0])

    def train(frozen, broadcast, local: Client, batch, task, key):
        """L = L_ce + lambda L_ur (eq. 3, 6) and an Adam step on p_t, psi, sigma and theta."""
        del key
        allowed = task.current if config.local_classes == "current" else jnp.ones_like(task.current)
        prototypes, classes = _current_prototypes(broadcast.wire.prototypes, task, config)

        def loss_of(trained):
            feature = features(
                recipe, frozen, trained, held_prompts(broadcast), batch.image, batch.query, task
            )
            logits = apply_head(trained.head, feature)
            loss = cross_entropy(logits, batch.label, allowed, batch.mask, config.reduction)
            if not config.wo_unified:
                pull = unified_representation_loss(
                    feature, batch.label, batch.mask, prototypes, classes,
                    config.temperature, config.unified_average, config.reduction,
                )  # fmt: skip
                loss = loss + config.unified_weight * pull
            return loss, correct(logits, batch.label, task.current, batch.mask)

        (loss, hits), gradient = jax.value_and_grad(loss_of, has_aux=True)(local.trained)
        update, optimiser = adam.update(gradient, local.optimiser)
        rows = jnp.sum(batch.mask).astype(jnp.float32)
        total = loss if config.reduction == "sum" else loss * rows
        metrics = {"loss": Weighted(total, rows), "train_accuracy": Weighted(hits, rows)}
        return local._replace(
            trained=optax.apply_updates(local.trained, update), optimiser=optimiser
        ), metrics

    def extract(frozen, broadcast, local: Client, batch, task, key):
        """Local prototypes C_k^y: the plain mean of c_x over the client's rows of a class, under the model it
        has just trained."""
        del key
        feature = features(
            recipe, frozen, local.trained, held_prompts(broadcast), batch.image, batch.query, task
        )
        sums, counts = class_sums(feature, batch.label, task.classes, batch.mask)
        return local._replace(sums=local.sums + sums, counts=local.counts + counts), {}

    def finish(broadcast, local: Client, state, task, info):
        trained = local.trained
        if recipe.sends_all:
            trained = trained._replace(prompt=held_prompts(broadcast).at[task.index].set(trained.prompt))
        own = Prototypes(local.sums / jnp.maximum(local.counts, 1)[:, None], local.counts > 0)
        return Upload(mean=trained, gather=own if recipe.extracts else (), weight=info.rows), state

    phases = (Phase(View(recipe.epochs, recipe.batch_size), train),)
    if recipe.extracts:
        phases += (Phase(View(1, recipe.batch_size, augment=config.prototype_view == "augmented"), extract),)
    return Program(start, phases, finish)


# ---- server ------------------------------------------------------------------------------------------------


def _init(recipe: Recipe, key, frozen) -> ServerState:
    config, setting, width = recipe.config, recipe.setting, recipe.backbone.width
    del frozen
    keys = jax.random.split(key, 3)
    return ServerState(
        prompts=init_prompts(keys[0], setting.tasks, config.prompt_blocks, config.prompt_length, width),
        gate=init_gate(keys[1], setting.tasks, width, config.gate_scale == "learnable"),
        head=init_head(keys[2], width, setting.classes),
        pool=Prototypes(
            jnp.zeros((setting.clients, setting.classes, width)),
            jnp.zeros((setting.clients, setting.classes), bool),
        ),
    )


def _transfer_prompt(server: ServerState, task, key):
    """Prompt transfer: p_t starts from p_{t-1}."""
    del key
    previous = server.prompts[jnp.maximum(task.index - 1, 0)]
    return server._replace(prompts=server.prompts.at[task.index].set(previous))


def _broadcast(recipe: Recipe, server: ServerState, task) -> Broadcast:
    """w and G (eq. 5). Prompts of earlier tasks are already at the clients."""
    everyone = jnp.ones(recipe.setting.clients, bool)
    prototypes = Prototypes(*prototype_mean(server.pool.vector, server.pool.held, everyone))
    if recipe.config.prototype_download == "current":
        prototypes = Prototypes(*_rows(prototypes, task.classes))
    trained = current_part(server, task)
    wire = Wire(
        trained._replace(prompt=server.prompts) if recipe.sends_all else trained,
        () if recipe.config.wo_unified else prototypes,
    )
    return Broadcast(wire, held=() if recipe.sends_all else server.prompts)


def _serve(recipe: Recipe, frozen, server: ServerState, aggregate, task, key):
    """Average, put the prototypes into the pool, debias the classifier (eq. 4)."""
    del frozen
    config = recipe.config
    trained: Trained = aggregate.mean
    prompts = trained.prompt if recipe.sends_all else server.prompts.at[task.index].set(trained.prompt)
    server = ServerState(prompts, trained.gate, trained.head, server.pool)
    if not recipe.extracts:
        return server, {}
    server = server._replace(
        pool=store_prototypes(server.pool, aggregate.gather, aggregate.id, aggregate.valid, task.classes)
    )
    if config.wo_debias:
        return server, {}
    held = server.pool.held & (task.current if config.wo_pool else task.seen)
    head, metrics = debias(
        server.head, server.pool._replace(held=held), key,
        config.server_epochs, config.server_batch_size or recipe.batch_size, config.server_lr or recipe.lr, config.reduction,
    )  # fmt: skip
    return server._replace(head=head), metrics


def unified_representation_loss(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    prototypes: Prototypes,
    classes: Int[Array, " Ct"],
    temperature: float,
    average: str = "holders",
    reduction: str = "mean",
) -> Float[Array, ""]:
    """L_ur (FPPL eq. 6): InfoNCE of each feature against the global prototypes of `classes` that exist; row a
    is class classes[a].

    Rows whose class has no prototype are left out, of the average too unless `average` is "batch"; 0 if no
    row is left.
    """
    similarity = cosine(feature, jax.lax.stop_gradient(prototypes.vector)) / temperature
    positive = (label[:, None] == classes) & prototypes.held
    has_prototype = mask & jnp.any(positive, axis=-1)
    loss = jax.nn.logsumexp(mask_logits(similarity, prototypes.held), axis=-1) - jnp.sum(
        similarity * positive, axis=-1
    )
    return reduce_rows(
        loss, has_prototype, jnp.sum(has_prototype if average == "holders" else mask), reduction
    )


def store_prototypes(
    pool: Prototypes, sent: Prototypes, id_: Array, valid: Array, classes: Array
) -> Prototypes:
    """The pool [K, C, ...] with the rows [P, Ct, ...] that the valid clients sent for the current task in
    place of their older ones; entries of other tasks and of absent clients stay."""
    clients, total = pool.held.shape
    row = jnp.where(valid, id_, clients)[:, None]
    column = jnp.where(classes >= 0, classes, total)[None, :]
    put = lambda buffer, x: buffer.at[row, column].set(x, mode="drop")
    return jax.tree.map(put, pool, sent)


def debias(
    head: Head, pool: Prototypes, key, epochs: int, batch_size: int, lr: float, reduction: str = "mean"
) -> tuple[Head, dict[str, Weighted]]:
    """Train the classifier alone on every stored prototype (FPPL eq. 4): new Adam, shuffled batches, classes
    without a prototype masked. pool: vectors [K, C, width] and held [K, C]; one training row per held
    entry."""
    width = pool.vector.shape[-1]
    feature = pool.vector.reshape(-1, width)
    held = pool.held.reshape(-1)
    label = jnp.broadcast_to(jnp.arange(pool.held.shape[1]), pool.held.shape).reshape(-1)
    allowed = jnp.any(pool.held, axis=0)
    count = jnp.sum(held)
    adam = optax.adam(lr)
    batches = -(-count // batch_size)
    # Held rows first, in a fresh random order every epoch.
    draw = jax.vmap(lambda epoch: jax.random.uniform(jax.random.fold_in(key, epoch), held.shape))(
        jnp.arange(epochs)
    )
    order = jnp.argsort(jnp.where(held, draw, 2.0), axis=-1)

    def step(i, carry):
        head, optimiser, total = carry
        within = (i % batches) * batch_size + jnp.arange(batch_size)
        rows, mask = order[i // batches, jnp.minimum(within, held.shape[0] - 1)], within < count

        def loss_of(head):
            return cross_entropy(apply_head(head, feature[rows]), label[rows], allowed, mask, reduction)

        loss, gradient = jax.value_and_grad(loss_of)(head)
        update, optimiser = adam.update(gradient, optimiser)
        return optax.apply_updates(head, update), optimiser, total + loss

    start = (head, adam.init(head), jnp.zeros(()))
    head, _, total = jax.lax.fori_loop(0, epochs * batches, step, start)
    return head, {"debias_loss": Weighted(total, (epochs * batches).astype(jnp.float32))}


def _rows(prototypes: Prototypes, classes) -> Prototypes:
    """The prototypes of `classes`; padding (-1) holds none."""
    index = jnp.maximum(classes, 0)
    return Prototypes(prototypes.vector[index], prototypes.held[index] & (classes >= 0))


def _current_prototypes(received: Prototypes | tuple[()], task: Task, config: FPPLConfig):
    """G of the current task as the client reads it, with the class of each row."""
    if config.wo_unified:
        return None, None
    if config.prototype_download == "current":
        return received, task.classes
    return received._replace(held=received.held & task.current), jnp.arange(task.current.shape[0])
