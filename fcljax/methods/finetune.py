"""FedAvg of LoRA and a linear classifier: what the baselines of PILoRA's tables have in common.

One low-rank pair serves all tasks and goes on training, so nothing but the baselines' own terms keeps it from
forgetting. Those terms are the arguments of `make_client`: a `memory` that a client carries while it works,
and a loss that reads it. Alone, over all classes at once, this is the tables' joint training. Ranks, rates
and blocks are not stated for the baselines; PILoRA's are taken.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fcljax.models.heads import Head, apply_head, correct, cross_entropy, init_head, mask_logits
from fcljax.models.lora import init_pairs, lora_injection, pair_of
from fcljax.models.vit import Lora
from fcljax.types import (
    Backbone,
    Batch,
    Broadcast,
    ClientInfo,
    Method,
    Phase,
    Program,
    PyTree,
    Setting,
    Task,
    Upload,
    View,
    Weighted,
)


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """What LoRA baselines share. The classifier trains at the run's rate."""

    lora_rank: int = 4  # rank of the pair
    lora_blocks: int = 1  # how many of the first blocks have one
    lora_lr: float = 1e-5  # learning rate of the pair


FIDELITY: dict[str, dict] = {"intended": {}, "paper": {}, "released": {}}


class Tuned(NamedTuple):
    """What a client trains. Leaves of `lora` are [blocks, ...]."""

    lora: Lora
    head: Head


class Local(NamedTuple):
    """A client at work: parameters, Adam's state, and what the baseline remembers."""

    tuned: Tuned
    optimiser: optax.OptState
    memory: PyTree


class Recipe(NamedTuple):
    """Everything static that the functions below close over."""

    config: FinetuneConfig
    setting: Setting
    backbone: Backbone
    epochs: int
    batch_size: int
    lr: float

    @property
    def adam(self) -> optax.GradientTransformation:
        """Adam, with a rate for each part; new every round."""
        return optax.partition(
            {"lora": optax.adam(self.config.lora_lr), "head": optax.adam(self.lr)}, Tuned("lora", "head")
        )


# (frozen, tuned, memory, batch, task, key, logits of the batch) -> loss that is added to the cross-entropy
Term = Callable[[PyTree, Tuned, PyTree, Batch, Task, Array, Array], Float[Array, ""]]


def finetune(
    config: FinetuneConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """FedAvg of LoRA and head, with nothing against forgetting."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)
    return make_method(recipe, make_client(recipe))


def make_method(recipe: Recipe, client: Program, **others) -> Method:
    """A baseline whose server keeps the averaged parameters and predicts with the classifier, unless `others`
    says otherwise."""

    def predict(frozen, server: Tuned, image, query, task):
        del query
        return mask_logits(logits_of(recipe, frozen, server, image), task.seen)

    standard = dict(
        init=lambda key, frozen: init_tuned(recipe, key),
        broadcast=lambda server, task: Broadcast(server),
        server=lambda frozen, server, aggregate, task, key: (aggregate.mean, {}),
        predict=predict,
        trainable=lambda server, task: server._asdict(),
    )
    return Method(client=client, **{**standard, **others})


def init_tuned(recipe: Recipe, key) -> Tuned:
    """B = 0, A and the classifier uniform."""
    first, second = jax.random.split(key)
    config, width = recipe.config, recipe.backbone.width
    pairs = init_pairs(first, 1, config.lora_blocks, config.lora_rank, width)
    return Tuned(pair_of(pairs, 0), init_head(second, width, recipe.setting.classes))


def features(recipe: Recipe, frozen, tuned: Tuned, image) -> Float[Array, "batch width"]:
    """The class token under the low-rank updates."""
    return recipe.backbone.encode(frozen, image, lora_injection(tuned.lora))


def logits_of(recipe: Recipe, frozen, tuned: Tuned, image) -> Float[Array, "batch classes"]:
    """Logits of all classes."""
    return apply_head(tuned.head, features(recipe, frozen, tuned, image))


def old_classes(task: Task) -> Array:
    """Classes of earlier tasks [C]."""
    return task.seen & ~task.current


def no_memory(broadcast: Broadcast, state, task: Task, info: ClientInfo, key) -> tuple[()]:
    """What a client without memory carries."""
    del broadcast, state, task, info, key
    return ()


def same_state(local: Local, state, task: Task):
    """What a client without memory keeps."""
    del local, task
    return state


def make_client(
    recipe: Recipe,
    open_memory: Callable = no_memory,
    term: Term | None = None,
    later: tuple[Phase, ...] = (),
    keep: Callable = same_state,
    train: Callable | None = None,
) -> Program:
    """The client of a baseline.

    Args:
      recipe: static settings.
      open_memory: (broadcast, state, task, info, key) -> memory, when a client starts.
      term: a loss beside the cross-entropy on the classes of the current task.
      later: phases after training.
      keep: (local, state, task) -> the client's new state.
      train: the step of training, if it is not `train_step`.
    """

    def start(broadcast, state, task, info, key):
        return Local(
            broadcast.wire, recipe.adam.init(broadcast.wire), open_memory(broadcast, state, task, info, key)
        )

    def finish(broadcast, local: Local, state, task, info):
        del broadcast
        return Upload(mean=local.tuned, weight=info.rows), keep(local, state, task)

    step = train or train_step(recipe, term)
    return Program(start, (Phase(View(recipe.epochs, recipe.batch_size), step), *later), finish)


def train_step(recipe: Recipe, term: Term | None = None) -> Callable:
    """Cross-entropy over the classes of the current task, plus the term, and a step of Adam."""

    def step(frozen, broadcast, local: Local, batch, task, key):
        del broadcast

        def loss_of(tuned):
            logits = logits_of(recipe, frozen, tuned, batch.image)
            loss = cross_entropy(logits, batch.label, task.current, batch.mask)
            if term is not None:
                loss = loss + term(frozen, tuned, local.memory, batch, task, key, logits)
            return loss, correct(logits, batch.label, task.current, batch.mask)

        return descend(recipe, local, loss_of, jnp.sum(batch.mask))

    return step


def descend(recipe: Recipe, local: Local, loss_of: Callable, rows) -> tuple[Local, dict[str, Weighted]]:
    """One step of Adam on loss_of(tuned) -> (loss, hits), and the metrics of `rows` rows."""
    (loss, hits), gradient = jax.value_and_grad(loss_of, has_aux=True)(local.tuned)
    update, optimiser = recipe.adam.update(gradient, local.optimiser)
    rows = rows.astype(jnp.float32)
    metrics = {"loss": Weighted(loss * rows, rows), "train_accuracy": Weighted(hits, rows)}
    return local._replace(tuned=optax.apply_updates(local.tuned, update), optimiser=optimiser), metrics
