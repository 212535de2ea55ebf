"""PILoRA: prototype guided incremental LoRA for federated class-incremental learning (Guo et al. 2024, ECCV,
arXiv 2401.02094).

Clients learn class prototypes and one low-rank pair per task in the first block, whose A is kept orthogonal
to the A of earlier tasks. The server averages the pairs by rows, and the prototypes by how close each lies to
the mean features that clients report for its class. Where paper and release differ, a field of `PiloraConfig`
says which one is meant.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from fcljax.errors import InputError
from fcljax.federated.aggregation import prototype_reweight, uniform_mean
from fcljax.models.heads import class_sums, correct
from fcljax.models.lora import init_pairs, l1, lora_injection, orthogonality, pair_of, put_pair, summed
from fcljax.models.prototypes import class_means, dce_loss, distance_logits, distances, pl_loss
from fcljax.models.vit import Lora
from fcljax.types import (
    Backbone,
    Broadcast,
    Extra,
    Method,
    Phase,
    Program,
    Setting,
    Task,
    Upload,
    View,
    Weighted,
)


@dataclasses.dataclass(frozen=True)
class PiloraConfig:
    """Fields with default None take the value of the fidelity preset (`FIDELITY`). Prototypes train at the
    run's learning rate (paper: 2e-3 on CIFAR-100, 5e-3 on TinyImageNet), LoRA at `lora_lr` (1e-5 and
    5e-6)."""

    pl_weight: float = 0.001  # lambda, of the prototype-learning loss
    orthogonality_weight: float = 0.5  # gamma
    hardness: float = 1.0  # delta: factor on the distances in the softmax
    reweight_temperature: float = 0.2  # eta
    prototype_init: float = 0.1  # standard deviation of the first prototypes
    lora_rank: int = 4  # r
    lora_blocks: int = 1  # the first blocks of the network
    lora_lr: float = 1e-5  # Adam's learning rate of LoRA
    backbone_lr: float = 1e-5  # Adam's learning rate of the whole network, where that is tuned
    weight_decay: float = 1e-5  # of everything trained, added to the gradient
    tune: Literal["lora", "none", "all"] = (
        "lora"  # ablations: a frozen network with prototypes alone, and full fine-tuning
    )
    wo_reweight: bool = False  # ablation: prototypes are averaged uniformly
    wo_orthogonality: bool = False  # ablation: no orthogonality loss
    headtune: bool = False  # +HT: prototypes of a new task start at the mean features of all clients (FedNCM)
    distance: Literal["sqrt_scaled", "squared"] | None = (
        None  # feature to prototype: ||f - m|| / sqrt(width) or ||f - m||^2
    )
    negatives: Literal["seen", "all"] | None = (
        None  # prototypes that compete in the loss; all includes classes that are yet to come
    )
    predict_classes: Literal["seen", "all"] | None = None  # prototypes that compete in predictions
    l1_weight: float | None = None  # of the sum of |A|
    local_lora: Literal["sum", "current", "products"] | None = None  # pairs in the client's network
    global_lora: Literal["sum", "first", "products"] | None = None  # pairs in the network that is evaluated
    lora_init: Literal["kaiming_uniform", "gaussian"] | None = None  # of A; B starts at 0
    schedule: Literal["cosine", "cosine_lag", "constant"] | None = (
        None  # of the learning rates over the rounds of a task
    )
    mean_features: Literal["trajectory", "clean"] | None = (
        None  # reported means: of the features in training, or of one pass after it
    )
    reweight_distance: Literal["l2", "l2sq"] | None = None  # prototype to mean feature
    reweight_mode: Literal["divide", "multiply"] | None = None  # what eta does to the normalised reciprocals


FIDELITY: dict[str, dict[str, Any]] = {
    "intended": dict(
        distance="sqrt_scaled", negatives="all", predict_classes="seen", l1_weight=0.0, local_lora="sum", global_lora="sum",
        lora_init="kaiming_uniform", schedule="cosine", mean_features="trajectory", reweight_distance="l2", reweight_mode="divide",
    ),
    "paper": dict(
        distance="squared", negatives="all", predict_classes="seen", l1_weight=0.0, local_lora="sum", global_lora="sum",
        lora_init="gaussian", schedule="cosine", mean_features="clean", reweight_distance="l2sq", reweight_mode="multiply",
    ),
    "released": dict(
        distance="sqrt_scaled", negatives="all", predict_classes="all", l1_weight=0.01, local_lora="current", global_lora="first",
        lora_init="kaiming_uniform", schedule="cosine_lag", mean_features="trajectory", reweight_distance="l2", reweight_mode="divide",
    ),
}  # fmt: skip


class Trained(NamedTuple):
    """What a client trains, which is also what comes down: the current task's prototypes, and its LoRA pair
    or the whole network."""

    prototypes: Float[Array, "Ct width"]
    lora: Lora | tuple[()]  # leaves [blocks, ...]
    backbone: Any


class ServerState(NamedTuple):
    """The global model: prototypes of all classes, the LoRA pairs of all tasks, and the network where that is
    tuned."""

    prototypes: Float[Array, "C width"]
    lora: Lora | tuple[()]  # leaves [tasks, blocks, ...]
    backbone: Any


class Held(NamedTuple):
    """What clients have from earlier rounds: prototypes, whose current rows are not read, and LoRA pairs of
    earlier tasks."""

    prototypes: Float[Array, "C width"]
    lora: Lora | tuple[()]


class Sent(NamedTuple):
    """Up, one per client: its prototypes, and the mean features of the classes it has rows of. Without
    re-weighting, the former only."""

    prototypes: Float[Array, "Ct width"]
    features: Float[Array, "Ct width"] | tuple[()]
    present: Bool[Array, " Ct"] | tuple[()]


class Client(NamedTuple):
    """A client at work: parameters, Adam's state, the round's factor on learning rates, and sums that become
    mean features."""

    trained: Trained
    optimiser: optax.OptState
    factor: Float[Array, ""]
    sums: Float[Array, "Ct width"]
    counts: Float[Array, " Ct"]


class Recipe(NamedTuple):
    """Everything static that PILoRA's functions close over. `config` is resolved."""

    config: PiloraConfig
    setting: Setting
    backbone: Backbone
    epochs: int
    batch_size: int
    lr: float


def pilora(
    config: PiloraConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """PILoRA as a method.

    Args:
      config: resolved, no None.
      setting: `rounds` is the length of the learning-rate schedule.
      backbone: without `tune` = "none", `encode` must take LoRA.
      epochs: of a client in a round.
      batch_size: of a client's step.
      lr: of the prototypes.

    Raises:
      InputError: more LoRA blocks than the network has, or none.
    """
    if config.tune == "lora" and not 1 <= config.lora_blocks <= backbone.blocks:
        valid = min(max(config.lora_blocks, 1), backbone.blocks)
        raise InputError(
            f"lora_blocks: must be 1 to {backbone.blocks}, got {config.lora_blocks}; nearest: {valid}"
        )
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def predict(frozen, server: ServerState, image, query, task):
        """The class of the nearest prototype."""
        feature = features(
            recipe, frozen, current_part(server, task), server.lora, image, query, task, config.global_lora
        )
        allowed = task.seen if config.predict_classes == "seen" else jnp.ones_like(task.seen)
        return distance_logits(distances(feature, server.prototypes, config.distance), allowed)

    return Method(
        init=lambda key, frozen: _init(recipe, key, frozen),
        broadcast=lambda server, task: _broadcast(recipe, server, task),
        client=_client(recipe),
        server=lambda frozen, server, aggregate, task, key: _serve(recipe, server, aggregate, task),
        predict=predict,
        queries=config.tune == "none",
        opening=_headtune(recipe) if config.headtune else None,
        trainable=lambda server, task: current_part(server, task)._asdict(),
    )


def features(recipe: Recipe, frozen, trained: Trained, pairs, image, query, task: Task, rule: str):
    """f(x): the class token of the network with the LoRA of tasks 0..t under `rule` (eq. 6), of the tuned, or
    of the frozen one."""
    if recipe.config.tune == "lora":
        lora = summed(pairs, trained.lora, task.index, rule)
        return recipe.backbone.encode(frozen, image, lora_injection(lora))
    if recipe.config.tune == "all":
        return recipe.backbone.encode(trained.backbone, image, None)
    return recipe.backbone.encode(frozen, image, None) if query is None else query


def current_part(server: ServerState, task: Task) -> Trained:
    """What clients start from. Prototypes of padding classes are 0."""
    rows = server.prototypes[jnp.maximum(task.classes, 0)]
    prototypes = jnp.where(task.classes[:, None] >= 0, rows, 0.0)
    return Trained(prototypes, pair_of(server.lora, task.index), server.backbone)


def put_current(
    prototypes: Float[Array, "C width"], task: Task, current: Float[Array, "Ct width"]
) -> Float[Array, "C width"]:
    """All prototypes with those of the task replaced; padding classes are dropped."""
    row = jnp.where(task.classes >= 0, task.classes, prototypes.shape[0])
    return prototypes.at[row].set(current, mode="drop")


def learning_rate_factor(schedule: str, round_: ArrayLike, rounds: int) -> Float[Array, ""]:
    """The factor on all learning rates in round r of a task of R rounds: 1 ("constant"), (1 + cos(pi r / R))
    / 2 ("cosine"), or that of the round before, 1 in the first ("cosine_lag": in the release the schedule
    moves one round late)."""
    if schedule == "constant":
        return jnp.ones(())
    position = jnp.maximum(round_ - 1, 0) if schedule == "cosine_lag" else round_
    return jnp.asarray(0.5 * (1 + jnp.cos(jnp.pi * position / rounds)), jnp.float32)


# ---- client ------------------------------------------------------------------------------------------------


def _client(recipe: Recipe) -> Program:
    """Train for E epochs; report prototypes, LoRA and mean features."""
    config, adam = recipe.config, _adam(recipe.config)
    rates = Trained(recipe.lr, config.lora_lr, config.backbone_lr)
    on_the_way = not config.wo_reweight and config.mean_features == "trajectory"

    def start(broadcast: Broadcast, state, task, info, key):
        """Load the global model; Adam is new every round."""
        del state, key
        factor = learning_rate_factor(config.schedule, info.round, recipe.setting.rounds)
        return Client(broadcast.wire, adam.init(broadcast.wire), factor, *_no_features(recipe))

    def train(frozen, broadcast, local: Client, batch, task, key):
        """L = L_dce + lambda L_pl + gamma L_ort (eq. 15; the release adds an L1 penalty) and an Adam step."""
        del key

        def loss_of(trained: Trained):
            feature = _local_features(recipe, frozen, broadcast, trained, batch, task)
            distance = distances(
                feature, put_current(broadcast.held.prototypes, task, trained.prototypes), config.distance
            )
            allowed = task.seen if config.negatives == "seen" else jnp.ones_like(task.seen)
            loss = dce_loss(distance, batch.label, allowed, batch.mask, config.hardness)
            loss = loss + config.pl_weight * pl_loss(distance, batch.label, batch.mask)
            loss = loss + _lora_penalty(config, broadcast.held.lora, trained.lora, task)
            return loss, (feature, correct(-distance, batch.label, task.current, batch.mask))

        (loss, (feature, hits)), gradient = jax.value_and_grad(loss_of, has_aux=True)(local.trained)
        update, optimiser = adam.update(gradient, local.optimiser, local.trained)
        move = lambda part, by, rate: jax.tree.map(lambda x, u: x - rate * local.factor * u, part, by)
        trained = Trained(*map(move, local.trained, update, rates))
        if on_the_way:
            local = _add_features(local, feature, batch, task)
        rows = jnp.sum(batch.mask).astype(jnp.float32)
        metrics = {"loss": Weighted(loss * rows, rows), "train_accuracy": Weighted(hits, rows)}
        return local._replace(trained=trained, optimiser=optimiser), metrics

    def finish(broadcast, local: Client, state, task, info):
        means = ((), ()) if config.wo_reweight else class_means(local.sums, local.counts)
        mean = local.trained._replace(prototypes=())
        return Upload(mean=mean, gather=Sent(local.trained.prototypes, *means), weight=info.rows), state

    phases = (Phase(View(recipe.epochs, recipe.batch_size), train),)
    if not config.wo_reweight and not on_the_way:
        phases += (Phase(View(1, recipe.batch_size, augment=False), _extract(recipe)),)
    return Program(start, phases, finish)


def _extract(recipe: Recipe) -> Callable:
    """Sum the features of the client's own rows by class, under the model that it has."""

    def extract(frozen, broadcast, local: Client, batch, task, key):
        del key
        feature = _local_features(recipe, frozen, broadcast, local.trained, batch, task)
        return _add_features(local, feature, batch, task), {}

    return extract


def _adam(config: PiloraConfig) -> optax.GradientTransformation:
    """Adam with L2 in the gradient, before learning rates, of which every part has its own."""
    return optax.chain(optax.add_decayed_weights(config.weight_decay), optax.scale_by_adam())


def _local_features(recipe: Recipe, frozen, broadcast: Broadcast, trained: Trained, batch, task):
    rule = recipe.config.local_lora
    return features(recipe, frozen, trained, broadcast.held.lora, batch.image, batch.query, task, rule)


def _lora_penalty(config: PiloraConfig, pairs, current, task: Task):
    """gamma L_ort (eq. 7) and the release's L1."""
    if config.tune != "lora":
        return 0.0
    penalty = (
        0.0
        if config.wo_orthogonality
        else config.orthogonality_weight * orthogonality(pairs, current, task.index)
    )
    return penalty + config.l1_weight * l1(current) if config.l1_weight else penalty


def _no_features(recipe: Recipe) -> tuple[Array, Array]:
    zeros = jnp.zeros((recipe.setting.task_classes, recipe.backbone.width))
    return zeros, zeros[:, 0]


def _add_features(local: Client, feature, batch, task: Task) -> Client:
    sums, counts = class_sums(feature, batch.label, task.classes, batch.mask)
    return local._replace(sums=local.sums + sums, counts=local.counts + counts)


# ---- server ------------------------------------------------------------------------------------------------


def _init(recipe: Recipe, key, frozen) -> ServerState:
    """Prototypes and LoRA pairs of all classes and tasks; tuning the network starts from the frozen one."""
    config, setting, width = recipe.config, recipe.setting, recipe.backbone.width
    keys = jax.random.split(key)
    lora, backbone = (), ()
    if config.tune == "lora":
        lora = init_pairs(
            keys[1], setting.tasks, config.lora_blocks, config.lora_rank, width, config.lora_init
        )
    if config.tune == "all":
        # a step of 1e-5 would be lost in the bfloat16 of a frozen network
        backbone = jax.tree.map(lambda x: x.astype(jnp.float32), frozen)
    return ServerState(
        config.prototype_init * jax.random.normal(keys[0], (setting.classes, width)), lora, backbone
    )


def _broadcast(recipe: Recipe, server: ServerState, task: Task) -> Broadcast:
    """Down: the current task's part. Clients have what came before."""
    config, pairs = recipe.config, server.lora
    if config.tune == "lora" and config.local_lora == "current":
        pairs = pairs._replace(
            b_q=None, b_v=None
        )  # only the orthogonality loss reads earlier pairs, and it reads A
    return Broadcast(current_part(server, task), Held(server.prototypes, pairs))


def _serve(recipe: Recipe, server: ServerState, aggregate, task: Task):
    """Average what is trained by rows, A and B apart, and the prototypes by their weights (eq. 11-14).
    Earlier tasks stay."""
    config, sent = recipe.config, aggregate.gather
    if config.wo_reweight:
        prototypes = uniform_mean(sent.prototypes, aggregate.weight, aggregate.valid)
    else:
        prototypes = prototype_reweight(
            sent.prototypes, sent.features, sent.present, aggregate.valid, distance=config.reweight_distance,
            temperature=config.reweight_temperature, temperature_mode=config.reweight_mode,
        )  # fmt: skip
    mean: Trained = aggregate.mean
    lora = put_pair(server.lora, task.index, mean.lora)
    return ServerState(put_current(server.prototypes, task, prototypes), lora, mean.backbone), {}


# ---- HeadTune ----------------------------------------------------------------------------------------------


def _headtune(recipe: Recipe) -> Extra:
    """Before a task's first round: clients sum the features of their rows by class, the server starts
    prototypes at the means (FedNCM)."""

    def start(broadcast: Broadcast, state, task, info, key):
        del state, task, info, key
        return Client(broadcast.wire, (), jnp.ones(()), *_no_features(recipe))

    def finish(broadcast, local: Client, state, task, info):
        return Upload(sum=(local.sums, local.counts), weight=info.rows), state

    def serve(frozen, server: ServerState, aggregate, task, key):
        del frozen, key
        means, present = class_means(*aggregate.sum)
        kept = current_part(server, task).prototypes
        return server._replace(
            prototypes=put_current(server.prototypes, task, jnp.where(present[:, None], means, kept))
        ), {}

    return Extra(
        Program(start, (Phase(View(1, recipe.batch_size, augment=False), _extract(recipe)),), finish), serve
    )
