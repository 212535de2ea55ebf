"""FPPL: an efficient and non-IID robust federated continual learning framework (He et al. 2024, arXiv
2411.01904).

One round of task t:

    server    sends the task's prompt with the gate, the classifier, and the global prototypes G
    client k  trains them on   L = L_ce + lambda L_ur                                            (eq. 6, 7)
              where the prompt is fused with those of earlier tasks by the gate  (adapters/prompts.py)
              sends them, with the mean feature C_k^y of each class y that it holds
    server    averages the parameters, weighted by examples
              keeps each client's prototypes in a pool; G is their mean by class                 (eq. 5)
              trains the averaged classifier on the pool: debiasing                              (eq. 4)

Where the paper and the authors' code differ, an option says which one is meant; the presets are the readings.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation
from fcljax.federated.distances import EQUAL_DISTANCES, SHRINK, difference, norm
from fcljax.federated.rules import coordinate_median
from fcljax.federated.sums import cast_like, widen
from fcljax.models.heads import (
    Head,
    Reduction,
    apply_head,
    correct,
    cosine,
    cross_entropy,
    mask_logits,
    reduce_rows,
)
from fcljax.options import option
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, feature_width, federate
from fcljax.parts.learner import Params, Reads, cross_entropy_loss, learner, three_keys
from fcljax.parts.optimise import optimise
from fcljax.parts.reports import Prototypes, class_prototypes
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset
from fcljax.types import LearningRate, Method, Metrics, Task, View, Weighted

Average = Literal["holders", "batch"]
JUDGED = 1024  # prototypes on which the server measures its classifier


@dataclasses.dataclass(frozen=True)
class FPPLOptions:
    """Options of FPPL."""

    temperature: float = option(0.2, positive=True)
    """Temperature tau of the unified-representation loss."""
    unified_weight: float = 1.0
    """Weight lambda of the unified-representation loss."""
    server_epochs: int = 5
    """Number of epochs of the server's debiasing per round."""
    server_batch_size: int | None = option(None, unset="the clients' batch size")
    """Prototypes per step of the server's debiasing."""
    server_lr: LearningRate | None = option(
        None, positive=True, unset="the clients' learning rate", learning_rate=True
    )
    """Learning rate of the server's debiasing."""
    wo_unified: bool = False
    """Ablation: leave out the unified-representation loss."""
    wo_debias: bool = False
    """Ablation: do not train the classifier at the server."""
    wo_pool: bool = False
    """Ablation: debias with the current task's prototypes only."""
    local_classes: Literal["current", "all"] = "current"
    """Classes in the clients' cross-entropy."""
    reduction: Reduction = "mean"
    """Reduction of the losses over a batch, at clients and server."""
    unified_average: Average = "holders"
    """Average the unified loss over the examples whose class has a prototype (holders),
    or over the whole batch."""
    prototype_view: Literal["augmented", "clean"] = "augmented"
    """Images from which clients compute their prototypes."""
    prototype_download: Literal["current", "seen"] = "current"
    """Prototypes that the server sends: those of the current task's classes, or of all
    seen classes."""
    features: Reads = "prompted"
    """Input of the classifier and prototypes: features with prompts (prompted), or with
    them also the features without prompts, which the gate reads (both)."""


PRESETS = {
    "intended": Preset(FPPLOptions()),
    "improved": Preset(FPPLOptions(prototype_view="clean", features="both")),
    "paper": Preset(FPPLOptions(local_classes="all", reduction="sum", unified_average="batch")),
    "released": Preset(FPPLOptions(prototype_download="seen")),
}


def fppl(options: FPPLOptions, run: Run) -> Method:
    """FPPL as a method, on any adapter."""
    classifier = linear(feature_width(run, options.features), run.sizes.classes)
    reads_prototypes = not (options.wo_unified and options.wo_debias)
    return federate(
        run,
        learner(run.network, run.adapter, classifier, three_keys, options.features),
        loss=cross_entropy_loss(options.local_classes, options.reduction),
        client_rules=() if options.wo_unified else (unified_representation(options),),
        server_rules=(debias_classifier(options, run),) if reads_prototypes else (),
    )


# ---- client ------------------------------------------------------------------------------------------------


def unified_representation(options: FPPLOptions) -> ClientRule:
    """lambda L_ur (eq. 6), against the global prototypes that came down."""

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        prototypes, classes = global_prototypes(step, options)
        value = unified_representation_loss(
            step.output.feature,
            step.batch.label,
            step.batch.mask,
            prototypes,
            classes,
            options.temperature,
            options.unified_average,
            options.reduction,
        )
        return options.unified_weight * value

    return ClientRule("unified", loss)


def global_prototypes(step: ClientStep, options: FPPLOptions) -> tuple[Prototypes, Array]:
    """G of the current task at a client, and the class of each prototype."""
    received = step.context.payload.sent["debias"]
    task = step.context.task
    if options.prototype_download == "current":
        return received, task.classes
    present = received.present & task.current
    return received._replace(present=present), jnp.arange(task.current.shape[0])


def unified_representation_loss(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    prototypes: Prototypes,
    classes: Int[Array, " Ct"],
    temperature: float,
    average: Average = "holders",
    reduction: Reduction = "mean",
) -> Float[Array, ""]:
    """L_ur (FPPL eq. 6): InfoNCE of each feature against the global prototypes of `classes` that exist.

    Row a of the prototypes is class classes[a]. Rows of the batch whose class has no prototype are left out,
    of the average too unless `average` is "batch"; 0 if no row is left.
    """
    similarity = cosine(feature, jax.lax.stop_gradient(prototypes.vector)) / temperature
    positive = (label[:, None] == classes) & prototypes.present
    has_prototype = mask & jnp.any(positive, axis=-1)
    others = jax.nn.logsumexp(mask_logits(similarity, prototypes.present), axis=-1)
    loss = others - jnp.sum(similarity * positive, axis=-1)
    return reduce_rows(
        loss, has_prototype, jnp.sum(has_prototype if average == "holders" else mask), reduction
    )


# ---- server ------------------------------------------------------------------------------------------------


def debias_classifier(options: FPPLOptions, run: Run) -> ServerRule:
    """Stores the clients' prototypes, sends their means G (eq. 5), debiases the classifier (eq. 4).

    Under a robust aggregation rule G is merged by that rule, class by class, and the debiasing leaves out the
    prototypes that lie far from it.
    """
    clients = run.sizes.clients
    robust = run.aggregation.reduce is not None

    def init(params: Params, trainable: Params) -> Prototypes:
        del params, trainable
        shape = (clients, run.sizes.classes)
        return Prototypes(jnp.zeros((*shape, feature_width(run, options.features))), jnp.zeros(shape, bool))

    def sends(task: Task, pool: Prototypes) -> Prototypes | tuple[()]:
        if options.wo_unified:
            return ()
        means = merge_pool(run.aggregation, pool)
        return _of_classes(means, task.classes) if options.prototype_download == "current" else means

    def update(round: ServerRound, params: Params, pool: Prototypes) -> ServerUpdate:
        task = round.task
        sent = round.reports["prototypes"]
        pool = store_prototypes(pool, sent, round.ids, round.valid, task.classes)
        if options.wo_debias:
            return ServerUpdate(params, pool)
        present = pool.present & (task.current if options.wo_pool else task.seen)
        if robust:
            merged = merge_pool(run.aggregation, pool)
            present = screen_prototypes(pool.vector, present, merged.vector, jnp.ones(clients, bool))
        server = ServerTraining(
            options.server_epochs,
            options.server_batch_size or run.training.batch_size,
            run.training.lr if options.server_lr is None else options.server_lr,
            options.reduction,
        )
        head, metrics = debias(params.classifier, pool._replace(present=present), round.key, server)
        return ServerUpdate(params._replace(classifier=head), pool, metrics)

    return ServerRule("debias", update, init, sends, reports=(local_prototypes(options, run),))


def local_prototypes(options: FPPLOptions, run: Run) -> Report:
    """C_k^y: the plain mean of the features of a client's examples of a class, under the model that it has
    just trained."""
    view = View(1, run.training.batch_size, augment=options.prototype_view == "augmented")
    width = feature_width(run, options.features)
    return class_prototypes("prototypes", run.sizes.task_classes, width, view, follows_rule=True)


def store_prototypes(
    pool: Prototypes,
    sent: Prototypes,
    id_: Int[Array, " P"],
    valid: Bool[Array, " P"],
    classes: Int[Array, " Ct"],
) -> Prototypes:
    """The pool [K, C, ...] with what the valid clients sent for the current task [P, Ct, ...] in place of
    their older prototypes; those of other tasks and of absent clients stay."""
    clients, total = pool.present.shape
    client = jnp.where(valid, id_, clients)[:, None]
    label = jnp.where(classes >= 0, classes, total)[None, :]

    def put(buffer: Array, new: Array) -> Array:
        return buffer.at[client, label].set(new, mode="drop")

    return jax.tree.map(put, pool, sent)


class ServerTraining(NamedTuple):
    """How the server trains the classifier."""

    epochs: int
    batch_size: int
    lr: LearningRate
    reduction: Reduction = "mean"


def debias(head: Head, pool: Prototypes, key: PRNGKeyArray, training: ServerTraining) -> tuple[Head, Metrics]:
    """Trains the classifier alone on every stored prototype (eq. 4).

    Adam is new, batches are shuffled, and classes without a prototype are masked.

    Args:
      head: the averaged classifier.
      pool: vectors [K, C, width] and present [K, C]; a training example per present entry.
      key: of the shuffling.
      training: epochs, batch size, learning rate, reduction of the loss.

    Returns:
      The classifier; the mean `loss` of the steps, and the `accuracy` of the trained classifier on up to
      `JUDGED` of the prototypes.
    """
    feature = pool.vector.reshape(-1, pool.vector.shape[-1])
    present = pool.present.reshape(-1)
    label = jnp.broadcast_to(jnp.arange(pool.present.shape[1]), pool.present.shape).reshape(-1)
    allowed = jnp.any(pool.present, axis=0)
    count = jnp.sum(present)
    batches = -(-count // training.batch_size)
    order = _epoch_orders(present, training.epochs, key)
    judged = order[0, :JUDGED]

    def loss(head: Head, i: Array) -> Float[Array, ""]:
        within = (i % batches) * training.batch_size + jnp.arange(training.batch_size)
        chosen = order[i // batches, jnp.minimum(within, present.shape[0] - 1)]
        logits = apply_head(head, feature[chosen])
        return cross_entropy(logits, label[chosen], allowed, within < count, training.reduction)

    head, mean_loss = optimise(loss, head, optax.adam(training.lr), training.epochs * batches)
    right = correct(apply_head(head, feature[judged]), label[judged], allowed, present[judged])
    accuracy = Weighted(right, jnp.sum(present[judged]).astype(jnp.float32))
    return head, {"loss": mean_loss, "accuracy": accuracy}


def _epoch_orders(present: Bool[Array, " n"], epochs: int, key: PRNGKeyArray) -> Int[Array, "epochs n"]:
    """The present entries first, in a new random order in every epoch."""

    def uniform(epoch: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)

    return jnp.argsort(jnp.where(present, jax.vmap(uniform)(jnp.arange(epochs)), 2.0), axis=-1)


def _of_classes(prototypes: Prototypes, classes: Int[Array | np.ndarray, " Ct"]) -> Prototypes:
    """The prototypes of `classes`; padding (-1) has none."""
    index = jnp.maximum(classes, 0)
    return Prototypes(prototypes.vector[index], prototypes.present[index] & (classes >= 0))


# ---- prototypes by class, also under a robust aggregation rule ---------------------------------------------


def merge_pool(aggregation: Aggregation, pool: Prototypes) -> Prototypes:
    """The global prototypes G of a pool [K, C, ...]: means by class (eq. 5), or what a robust rule makes of
    them."""
    clients = pool.present.shape[0]
    everyone = jnp.ones(clients, bool)
    equal = jnp.ones(clients)
    merge = per_class(aggregation)
    return Prototypes(*merge(pool.vector, pool.present, equal, everyone, jax.random.key(0)))


def prototype_mean(
    prototype: Float[Array, "K C D"], present: Bool[Array, "K C"], valid: Bool[Array, " K"]
) -> tuple[Float[Array, "C D"], Bool[Array, " C"]]:
    """Global prototypes: the unweighted mean over the valid clients that hold the class (FPPL eq. 5).

    Returns:
      (mean, held): held [C] is False, and the mean 0, for classes that no valid client holds.
    """
    holds = present & valid[:, None]
    holders = jnp.sum(holds, axis=0)
    total = jnp.sum(jnp.where(holds[..., None], widen(prototype), 0), axis=0)
    return cast_like(total / jnp.maximum(holders, 1)[:, None], prototype), holders > 0


def per_class(aggregation: Aggregation) -> Callable[..., tuple[Array, Array]]:
    """The rule's `reduce` for stacks of class prototypes, class by class over the clients that hold it.

    Clipping, noise and server optimiser have no part in it: prototypes have no reference, so centred clipping
    starts from zeros.

    Returns:
      merge(vectors [K, C, D], present [K, C], weight [K], valid [K], key) -> (merged [C, D], held [C]). Held
      is False, and merged 0, for classes that no valid client holds. Means are unweighted (`prototype_mean`).
    """

    def merge(
        vectors: Float[Array, "K C D"],
        present: Bool[Array, "K C"],
        weight: Num[Array, " K"],
        valid: Bool[Array, " K"],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, "C D"], Bool[Array, " C"]]:
        if aggregation.reduce is None:
            return prototype_mean(vectors, present, valid)
        holds = present & valid[:, None]
        nothing = jnp.zeros(vectors.shape[1:], vectors.dtype)
        keys = jax.random.split(key, vectors.shape[1])
        of_class = jax.vmap(aggregation.reduce, in_axes=(1, 0, None, 1, 0))
        return of_class(vectors, nothing, weight, holds, keys), jnp.any(holds, axis=0)

    return merge


def screen_prototypes(
    vectors: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    merged: Float[Array, "C D"],
    valid: Bool[Array, " K"],
    factor: float = 3.0,
) -> Bool[Array, "K C"]:
    """Which prototypes to believe: those whose L2 distance to the merged one is at most `factor` times the
    median distance of the class's holders.

    A class with fewer than 3 valid holders keeps all of them, since two cannot say which of them is wrong. By
    construction at least half of the holders stay. `merged` should come from a robust rule: a plain mean of n
    holders puts a far one at only n - 1 times the others' distance.

    Returns:
      `present` without the screened prototypes and without the rows of invalid clients.

    Raises:
      InputError: factor < 1.
    """
    if not factor >= 1:
        raise InputError(f"factor: {factor} is too small; nearest valid value: 1, and 3 is usual")
    holds = present & valid[:, None]
    apart = difference(jnp.where(holds[..., None], widen(vectors), 0), widen(merged))
    distance = jax.vmap(jax.vmap(norm))(apart)
    usual = jax.vmap(coordinate_median, in_axes=(1, None, 1))(distance, jnp.ones(valid.shape), holds)
    # where most prototypes equal the merged one, a difference by rounding is no outlier
    rounding = EQUAL_DISTANCES * jax.vmap(norm)(SHRINK * widen(merged))
    far = (distance > factor * usual + rounding) & (jnp.sum(holds, axis=0) >= 3)
    return holds & ~far
