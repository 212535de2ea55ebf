"""FPPL: an efficient and non-IID robust federated continual learning framework (He et al.
2024, arXiv 2411.01904).

One round of task t:

    server    sends the task's prompt with the gate, the classifier and global prototypes G
    client k  trains them on L = L_ce + lambda L_ur                              (eq. 6-8)
              where the gate fuses the prompt with those of earlier tasks
              (eq. 2, adapters/prompts.py)
              sends them, with the mean feature C_k^y of each class y that it holds (eq. 3)
    server    averages the parameters, weighted by examples
              keeps each client's prototypes in a pool; G is their mean by class    (eq. 5)
              trains the averaged classifier on the pool: debiasing                 (eq. 4)

Where the paper and the authors' code differ, an option says which one is meant; the
presets are the readings.
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
from fcljax.federated import distances, rules, sums
from fcljax.federated.aggregation import Aggregation
from fcljax.models import heads
from fcljax.options import option
from fcljax.parts import classifiers
from fcljax.parts.client import ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, feature_width, federate
from fcljax.parts.learner import Params, Reads, cross_entropy_loss, learner
from fcljax.parts.optimise import optimise
from fcljax.parts.reports import Prototypes, class_prototypes
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, with_mini
from fcljax.types import LearningRate, Method, Metrics, Task, View, Weighted

Average = Literal["holders", "batch"]
# number of prototypes on which the server measures the debiased classifier, at most: the
# pool grows to K x C, and the measurement must not cost more than the training
EVALUATED = 1024


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
    reduction: heads.Reduction = "mean"
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


# mini: on few prototypes the paper's 5 server epochs are a few dozen steps, and a step of
# Adam moves a logit by about lr * sum |feature| at most, which is too little
PRESETS = with_mini(
    {
        "intended": Preset(FPPLOptions()),
        "improved": Preset(FPPLOptions(prototype_view="clean", features="both")),
        "paper": Preset(FPPLOptions(local_classes="all", reduction="sum", unified_average="batch")),
        "released": Preset(FPPLOptions(prototype_download="seen")),
    },
    server_epochs=30,
)


def fppl(options: FPPLOptions, run: Run) -> Method:
    """Compose FPPL on any adapter."""
    client_rules = ()
    if not options.wo_unified:
        client_rules = (unified_representation(options),)
    server_rules = ()
    # the unified loss and the debiasing both need the pool of prototypes
    if not (options.wo_unified and options.wo_debias):
        server_rules = (debias_classifier(options, run),)
    classifier = classifiers.linear(feature_width(run, options.features), run.sizes.classes)
    return federate(
        run,
        learner(run.network, run.adapter, classifier, fppl_keys, options.features),
        loss=cross_entropy_loss(options.local_classes, options.reduction),
        client_rules=client_rules,
        server_rules=server_rules,
    )


def fppl_keys(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the keys of adapter and classifier in the release's layout, split(key, 3).

    The prompt adapter gets `key` and splits it itself: it takes parts 0 and 1, for
    prompts and gate. The classifier gets part 2.
    """
    return key, jax.random.split(key, 3)[2]


# ---- client ----------------------------------------------------------------------------


def unified_representation(options: FPPLOptions) -> ClientRule:
    """Add lambda L_ur (eq. 6), against the global prototypes that the server sent."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
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
    """Return G of the current task at a client, and the class of each prototype.

    It is the server's after the round before: in a task's first round there is none.
    """
    received = step.context.payload.sent["debias"]
    task = step.context.task
    if options.prototype_download == "current":
        return received, task.classes
    # the release sends the prototypes of all classes, but L_ur reads those of the current
    # ones (eq. 6)
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
    reduction: heads.Reduction = "mean",
) -> Float[Array, ""]:
    """Return L_ur (FPPL eq. 6), InfoNCE of features against the global prototypes.

        -log( exp(sim(c_x, G^y) / tau) / sum_a exp(sim(c_x, G^a) / tau) )

    Args:
      feature: c_x.
      label: y.
      mask: examples that are no padding.
      prototypes: G; classes that are not present do not occur in the sum over a.
      classes: row i of the prototypes is class classes[i].
      temperature: tau.
      average: whether examples whose class has no prototype count in the mean ("batch")
        or not ("holders"). They add nothing to the sum.
      reduction: over the batch; 0 if no example has a prototype.
    """
    # the prototypes are targets, so only the features get a gradient
    similarity = heads.cosine(feature, jax.lax.stop_gradient(prototypes.vector)) / temperature
    # one-hot in the example's class, or all False if that has no prototype
    positive = (label[:, None] == classes) & prototypes.present
    # absent prototypes would add exp(0) to the denominator
    log_denominator = jax.nn.logsumexp(heads.mask_logits(similarity, prototypes.present), axis=-1)
    loss = log_denominator - jnp.sum(similarity * positive, axis=-1)
    has_prototype = mask & jnp.any(positive, axis=-1)
    averaged = mask
    if average == "holders":
        averaged = has_prototype
    return heads.reduce_rows(loss, has_prototype, jnp.sum(averaged), reduction)


# ---- server ----------------------------------------------------------------------------


def debias_classifier(options: FPPLOptions, run: Run) -> ServerRule:
    """Store prototypes, send their means G (eq. 5), debias the classifier (eq. 4).

    Under a robust aggregation rule G is merged by that rule, class by class, and the
    debiasing leaves out prototypes that lie far from it.
    """
    width = feature_width(run, options.features)
    server_lr = options.server_lr
    # the paper names one learning rate for clients and server
    if server_lr is None:
        server_lr = run.training.lr
    training = ServerTraining(
        options.server_epochs,
        options.server_batch_size or run.training.batch_size,
        server_lr,
        options.reduction,
    )

    def init(_params: Params, _trainable: Params) -> Prototypes:
        # K x C vectors from the start, because the pool's shape must not grow with tasks
        shape = (run.sizes.clients, run.sizes.classes)
        return Prototypes(jnp.zeros((*shape, width)), jnp.zeros(shape, bool))

    def sends(task: Task, pool: Prototypes) -> Prototypes | tuple[()]:
        if options.wo_unified:
            return ()
        global_means = merge_pool(run.aggregation, pool)
        if options.prototype_download == "seen":
            return global_means
        return _of_classes(global_means, task.classes)

    def update(round: ServerRound, params: Params, pool: Prototypes) -> ServerUpdate:
        task = round.task
        uploads = round.reports["prototypes"]
        pool = store_prototypes(pool, uploads, round.ids, round.valid, task.classes)
        if options.wo_debias:
            return ServerUpdate(params, pool)
        stored_classes = task.seen
        if options.wo_pool:
            stored_classes = task.current
        present = pool.present & stored_classes
        # with a robust rule, a poisoned prototype must not train the classifier
        if run.aggregation.reduce is not None:
            global_means = merge_pool(run.aggregation, pool)
            all_clients = jnp.ones(run.sizes.clients, bool)
            present = screen_prototypes(pool.vector, present, global_means.vector, all_clients)
        examples = pool._replace(present=present)
        head, metrics = debias(params.classifier, examples, round.key, training)
        return ServerUpdate(params._replace(classifier=head), pool, metrics)

    return ServerRule("debias", update, init, sends, reports=(local_prototypes(options, run),))


def local_prototypes(options: FPPLOptions, run: Run) -> Report:
    """Report C_k^y (eq. 3): the mean feature of a client's examples of each class.

    Features are those of the model that the client has just trained.
    """
    # one pass after training, whatever the number of epochs
    view = View(1, run.training.batch_size, augment=options.prototype_view == "augmented")
    width = feature_width(run, options.features)
    return class_prototypes("prototypes", run.sizes.task_classes, width, view, follows_rule=True)


def store_prototypes(
    pool: Prototypes,
    uploads: Prototypes,
    client_id: Int[Array, " P"],
    valid: Bool[Array, " P"],
    classes: Int[Array, " Ct"],
) -> Prototypes:
    """Return the pool with the prototypes that valid clients sent for the current task.

    Args:
      pool: [K, C, ...]. Prototypes of other tasks and of absent clients stay.
      uploads: of the participants and the task's classes, [P, Ct, ...].
      client_id: the participants' ids.
      valid: participants whose upload arrived.
      classes: the task's class ids; -1 is padding.
    """
    # a client's newer prototype of a class replaces its older one, of an older model
    clients, total_classes = pool.present.shape
    # JAX drops writes beyond the pool: invalid clients and padding classes change nothing
    client = jnp.where(valid, client_id, clients)[:, None]
    label = jnp.where(classes >= 0, classes, total_classes)[None, :]

    def store(buffer: Array, upload: Array) -> Array:
        return buffer.at[client, label].set(upload, mode="drop")

    return jax.tree.map(store, pool, uploads)


class ServerTraining(NamedTuple):
    """How the server trains the classifier."""

    epochs: int
    batch_size: int
    lr: LearningRate
    reduction: heads.Reduction = "mean"


def debias(
    head: heads.Head, pool: Prototypes, key: PRNGKeyArray, training: ServerTraining
) -> tuple[heads.Head, Metrics]:
    """Train the classifier alone on every stored prototype (eq. 4), with a new Adam.

    Args:
      head: the averaged classifier. Classes without a prototype are masked.
      pool: vectors [K, C, width] and present [K, C]; a training example per present entry.
      key: of the shuffling, which differs in each epoch.
      training: epochs, batch size, learning rate, reduction of the loss.

    Returns:
      The classifier; the mean `loss` of the steps, and the `accuracy` of the trained
      classifier on up to `EVALUATED` of the prototypes.
    """
    # the entries [K, C] of the pool as one list of training examples [K * C]
    feature = pool.vector.reshape(-1, pool.vector.shape[-1])
    present = pool.present.reshape(-1)
    classes = jnp.arange(pool.present.shape[1])
    label = jnp.broadcast_to(classes, pool.present.shape).reshape(-1)
    # without examples of its own a class could only be pushed down
    allowed = jnp.any(pool.present, axis=0)
    count = jnp.sum(present)
    # the number of batches is data: the pool fills up from round to round, and one
    # program serves all rounds
    batches = -(-count // training.batch_size)
    order = _epoch_orders(present, training.epochs, key)

    def loss(head: heads.Head, step: Array) -> Float[Array, ""]:
        position = (step % batches) * training.batch_size + jnp.arange(training.batch_size)
        # the last batch of an epoch may reach beyond the buffer; its mask leaves that out
        index = order[step // batches, jnp.minimum(position, present.shape[0] - 1)]
        logits = heads.apply_head(head, feature[index])
        in_epoch = position < count
        return heads.cross_entropy(logits, label[index], allowed, in_epoch, training.reduction)

    steps = training.epochs * batches
    head, mean_loss = optimise(loss, head, optax.adam(training.lr), steps)
    # the first epoch's order has the present entries in front, in random order
    evaluated = order[0, :EVALUATED]
    # accuracy on the training set itself, which tells whether the debiasing has converged
    logits = heads.apply_head(head, feature[evaluated])
    correct = heads.correct(logits, label[evaluated], allowed, present[evaluated])
    accuracy = Weighted(correct, jnp.sum(present[evaluated]).astype(jnp.float32))
    return head, {"loss": mean_loss, "accuracy": accuracy}


def _epoch_orders(
    present: Bool[Array, " n"],
    epochs: int,
    key: PRNGKeyArray,
) -> Int[Array, "epochs n"]:
    """Return random orders per epoch, with the present entries in front."""

    def uniform(epoch: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)

    # draws are below 1, so absent entries sort last
    draws = jnp.where(present, jax.vmap(uniform)(jnp.arange(epochs)), 2.0)
    return jnp.argsort(draws, axis=-1)


def _of_classes(
    prototypes: Prototypes,
    classes: Int[Array | np.ndarray, " Ct"],
) -> Prototypes:
    """Return the prototypes of `classes`; padding (-1) has none."""
    index = jnp.maximum(classes, 0)
    return Prototypes(prototypes.vector[index], prototypes.present[index] & (classes >= 0))


# ---- prototypes by class, also under a robust aggregation rule -------------------------


def merge_pool(aggregation: Aggregation, pool: Prototypes) -> Prototypes:
    """Return the global prototypes G of a pool [K, C, ...].

    They are means by class (eq. 5), or what a robust aggregation rule makes of them.
    """
    clients = pool.present.shape[0]
    weight = jnp.ones(clients)
    valid = jnp.ones(clients, bool)
    merge = per_class(aggregation)
    return Prototypes(*merge(pool.vector, pool.present, weight, valid, jax.random.key(0)))


def prototype_mean(
    prototype: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
) -> tuple[Float[Array, "C D"], Bool[Array, " C"]]:
    """Return the unweighted mean over the valid clients that hold a class (FPPL eq. 5).

    Returns:
      (mean, held): held [C] is False, and the mean 0, for classes that no valid client holds.
    """
    holds = present & valid[:, None]
    # a client with many examples of a class counts once, as any other (eq. 5)
    holders = jnp.sum(holds, axis=0)
    wide = sums.widen(prototype)

    # one client after the other: XLA for CPUs would copy a sum's masked terms, which for
    # 5,000 clients and 1,000 classes are 14 GiB
    def add(client: Array, total: Array) -> Array:
        return total + jnp.where(holds[client][:, None], wide[client], 0)

    total = jax.lax.fori_loop(0, wide.shape[0], add, jnp.zeros(wide.shape[1:], wide.dtype))
    mean = total / jnp.maximum(holders, 1)[:, None]
    return sums.cast_like(mean, prototype), holders > 0


def per_class(aggregation: Aggregation) -> Callable[..., tuple[Array, Array]]:
    """Return the rule's `reduce` for prototypes, over the holders of each class.

    Clipping, noise and server optimiser have no part in it: prototypes have no reference,
    so centred clipping starts from zeros.

    Returns:
      merge(vectors [K, C, D], present [K, C], weight [K], valid [K], key) -> (merged [C,
      D], held [C]). Held is False, and merged 0, for classes that no valid client holds.
      Means are unweighted (`prototype_mean`).
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
        # prototypes have no broadcast value from which clients started
        reference = jnp.zeros(vectors.shape[1:], vectors.dtype)
        # a key per class: rules that draw must not draw alike for all classes
        keys = jax.random.split(key, vectors.shape[1])
        reduce_classes = jax.vmap(aggregation.reduce, in_axes=(1, 0, None, 1, 0))
        merged = reduce_classes(vectors, reference, weight, holds, keys)
        return merged, jnp.any(holds, axis=0)

    return merge


def screen_prototypes(
    vectors: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    merged: Float[Array, "C D"],
    valid: Bool[Array, " K"],
    factor: float = 3.0,
) -> Bool[Array, "K C"]:
    """Return `present` without prototypes far from the merged one of their class.

    Prototypes stay if their L2 distance is at most `factor` times the median distance of
    the class's holders: at least half of them stay. A class with fewer than 3 valid
    holders keeps all, since of two it is unknown which one is wrong. `merged` should come
    from a robust rule: an outlier among n holders pulls a plain mean so near to itself
    that it is only n - 1 times as far as the others.

    Returns:
      [K, C], False for invalid clients.

    Raises:
      InputError: factor < 1.
    """
    if not factor >= 1:
        raise InputError(f"factor: {factor} is too small; nearest valid value: 1, and 3 is usual")
    holds = present & valid[:, None]
    # absent entries may have any value; zeros stay finite and are masked
    held_vectors = jnp.where(holds[..., None], sums.widen(vectors), 0)
    shifted = distances.difference(held_vectors, sums.widen(merged))
    distance = jax.vmap(jax.vmap(distances.norm))(shifted)
    median_over_clients = jax.vmap(rules.coordinate_median, in_axes=(1, None, 1))
    # over the clients that have the class
    median = median_over_clients(distance, jnp.ones(valid.shape), holds)
    # if most prototypes equal the merged one the median is 0, and rounding alone would
    # make an outlier
    length = jax.vmap(distances.norm)(distances.SHRINK * sums.widen(merged))
    rounding = distances.EQUAL_DISTANCES * length
    is_outlier = (distance > factor * median + rounding) & (jnp.sum(holds, axis=0) >= 3)
    return holds & ~is_outlier
