"""PILoRA: prototype guided incremental LoRA for federated class-incremental learning (Guo et al., ECCV 2024,
arXiv 2401.02094).

One round of task t (Algorithm 1 of the paper):

    server    sends the task's LoRA pair (A_t, B_t) and the prototypes m_c of its classes
    client k  trains both for E epochs on   L = L_dce + lambda L_pl + gamma L_ort              (eq. 15)
              sends them, with its mean feature mu_kc of each class c that it holds
    server    averages the LoRA pairs, weighted by examples                                    (eq. 4)
              merges the prototypes, each client weighted by how close its m_kc lies to the
              mean features of all clients                                                     (eq. 11-14)

Where the paper and the authors' code differ, an option says which one is meant; the presets are the three
readings.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError, choose
from fcljax.federated.distances import EQUAL_DISTANCES
from fcljax.federated.rules import uniform_mean
from fcljax.federated.sums import cast_like, where_valid, widen
from fcljax.models.heads import cross_entropy, reduce_rows
from fcljax.models.products import exact_einsum
from fcljax.models.prototypes import Distance
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.classifiers import current_classes, merge_current, prototypes
from fcljax.parts.client import ClientRule, ClientStep, OfEachClient
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Classes, Loss, Output, Params, competing, learner
from fcljax.parts.reports import (
    PROTOTYPE_DISTANCE,
    Prototypes,
    class_prototypes,
    prototype_distance,
    start_at_class_means,
)
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import Batch, Method, Task, View, Weighted

Schedule = Literal["cosine", "cosine_lag", "constant"]


@dataclasses.dataclass(frozen=True)
class PiloraOptions:
    """Options of PILoRA. Prototypes train at the run's learning rate (paper: 2e-3 on CIFAR-100, 5e-3 on
    TinyImageNet), LoRA at `lora_lr` (1e-5, 5e-6)."""

    prototype_weight: float = 0.001
    """Weight lambda of the prototype loss (eq. 10)."""
    hardness: float = option(1.0, positive=True)
    """Factor delta on the distances in the softmax."""
    reweight_temperature: float = option(0.2, positive=True)
    """Temperature eta of the prototype re-weighting (eq. 13)."""
    prototype_init: float = option(0.1, positive=True)
    """Standard deviation of the initial prototypes."""
    wo_reweight: bool = False
    """Ablation: average prototypes uniformly."""
    headtune: bool = False
    """Start a new task's prototypes at the mean features of all clients (+HT)."""
    distance: Distance = "sqrt_scaled"
    """Distance of a feature to a prototype: ||f - m|| / sqrt(width), or ||f - m||^2."""
    negatives: Literal["seen", "all"] = "all"
    """Prototypes in the loss: those of seen classes, or of all classes."""
    predict_classes: Literal["seen", "all"] = "seen"
    """Prototypes that compete in predictions: those of seen classes, or of all classes."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule over the rounds of a task."""
    mean_features: Literal["trajectory", "clean"] = "trajectory"
    """Compute mean features during the training steps (trajectory), or in a pass over
    clean images after training."""
    reweight_distance: Literal["l2", "l2sq"] = "l2"
    """Distance of a prototype to a mean feature in the re-weighting."""
    reweight_mode: Literal["divide", "multiply"] = "divide"
    """Divide or multiply the inverse distances by eta in the re-weighting."""


@dataclasses.dataclass(frozen=True)
class PiloraLoraOptions(PiloraOptions):
    """Options of PILoRA with LoRA, with the losses that act on LoRA pairs."""

    orthogonality_weight: float = 0.5
    """Weight gamma of the orthogonality loss between the tasks' LoRA pairs (eq. 7)."""
    wo_orthogonality: bool = False
    """Ablation: leave out the orthogonality loss."""
    l1_weight: float = 0.0
    """Weight of the release's L1 loss, the sum of |A|."""


_RUN = RunConfig(lr=0.1, weight_decay=1e-5, train_share=0.8)
PRESETS = {
    "intended": Preset(PiloraLoraOptions(), _RUN),
    "improved": Preset(PiloraLoraOptions(headtune=True), dataclasses.replace(_RUN, train_share=1.0)),
    "paper": Preset(
        PiloraLoraOptions(
            distance="squared", mean_features="clean", reweight_distance="l2sq", reweight_mode="multiply"
        ),
        _RUN,
        (LoraOptions(lora_init="gaussian"),),
    ),
    "released": Preset(
        PiloraLoraOptions(predict_classes="all", l1_weight=0.01, schedule="cosine_lag"),
        dataclasses.replace(_RUN, preprocess="pilora", class_order="natural", population="independent"),
        (LoraOptions(local_lora="current", global_lora="first"),),
    ),
}


def pilora(options: PiloraOptions, run: Run) -> Method:
    """PILoRA as a method, on any adapter."""
    width = run.network.width
    classes = run.sizes.classes
    classifier = prototypes(width, classes, options.distance, options.prototype_init)
    on_lora = (lora_losses(options),) if isinstance(options, PiloraLoraOptions) else ()
    merging = average_prototypes(run) if options.wo_reweight else reweight_prototypes(options, run)
    return federate(
        run,
        learner(run.network, run.adapter, classifier, _prototypes_first),
        loss=distance_cross_entropy(options.negatives, options.hardness),
        client_rules=(prototype_loss(options.prototype_weight), *on_lora),
        server_rules=(merging, head_tune(run)) if options.headtune else (merging,),
        learning_rate=functools.partial(learning_rate_factor, options.schedule),
        predicts=options.predict_classes,
    )


def _prototypes_first(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The prototypes draw from the first of two keys, the adapter from the second."""
    first, second = jax.random.split(key)
    return second, first


def learning_rate_factor(
    schedule: Schedule, round: ArrayLike, rounds: int, epoch: ArrayLike = 0
) -> Float[Array, ""]:
    """The factor on all learning rates in round r of a task of R rounds; all epochs of a round share it.

    1 ("constant"), (1 + cos(pi r / R)) / 2 ("cosine"), or that of the round before, and 1 in the first
    ("cosine_lag": the release moves one round late).
    """
    del epoch
    if schedule == "constant":
        return jnp.ones(())
    position = jnp.maximum(round - 1, 0) if schedule == "cosine_lag" else round
    return jnp.asarray(0.5 * (1 + jnp.cos(jnp.pi * position / rounds)), jnp.float32)


# ---- client: L = L_dce + lambda L_pl + gamma L_ort (eq. 15) ------------------------------------------------


def distance_cross_entropy(classes: Classes, hardness: float) -> Loss:
    """L_dce (eq. 8, 9): cross-entropy over the negative distances to the prototypes.

    Args:
      classes: whose prototypes compete.
      hardness: delta, the factor on the distances.
    """

    def value(output: Output, batch: Batch, task: Task) -> Float[Array, ""]:
        logits = hardness * output.logits  # the classifier's logits are negative distances
        return cross_entropy(logits, batch.label, competing(classes, task), batch.mask)

    return Loss(value, classes)


def prototype_loss(weight: float) -> ClientRule:
    """lambda L_pl (eq. 10): the distance of each example to the prototype of its own class.

    Args:
      weight: lambda.
    """

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        return weight * pl_loss(-step.output.logits, step.batch.label, step.batch.mask)

    return ClientRule("prototype", loss)


def pl_loss(
    distance: Float[Array, "batch classes"], label: Int[Array, " batch"], mask: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """L_pl (eq. 10): the mean, over the examples in the mask, of the distance to the own prototype."""
    own = jnp.take_along_axis(distance, label[:, None], axis=1)[:, 0]
    return reduce_rows(own, mask, jnp.sum(mask), "mean")


def lora_losses(options: PiloraLoraOptions) -> ClientRule:
    """gamma L_ort (eq. 7), and the release's L1 penalty.

    A single pair for all tasks has no earlier ones to be orthogonal to.
    """

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""] | float:
        del memory
        pair = step.trainable.adapter
        pairs = step.context.cached.adapter
        apart = isinstance(pairs, Lora) and not options.wo_orthogonality
        overlap = orthogonality(pairs, pair, step.context.task.index) if apart else 0.0
        penalty = options.orthogonality_weight * overlap
        return penalty + options.l1_weight * l1(pair) if options.l1_weight else penalty

    return ClientRule("lora", loss)


def orthogonality(pairs: Lora, current: Lora, task: ArrayLike) -> Float[Array, ""]:
    """l_ort (eq. 7): sum over earlier tasks i, blocks, and q and v of sum_rs |A_i A_t^T|_rs.

    Exactly 0 in the first task. `pairs` are constants and only their A are read, so clients need not cache
    the B for it.
    """
    past = jnp.arange(pairs.a_q.shape[0]) < task
    return _overlap(pairs.a_q, current.a_q, past) + _overlap(pairs.a_v, current.a_v, past)


def l1(current: Lora) -> Float[Array, ""]:
    """Sum of |A_t| over q and v (the release's penalty; B is not in it)."""
    return jnp.sum(jnp.abs(current.a_q)) + jnp.sum(jnp.abs(current.a_v))


def _overlap(
    old: Float[Array, "tasks blocks rank width"],
    new: Float[Array, "blocks rank width"],
    past: Bool[Array, " tasks"],
):
    # in full precision, since the loss drives these products to 0
    product = exact_einsum("tmrd,msd->tmrs", jax.lax.stop_gradient(old), new)
    return jnp.sum(jnp.where(past[:, None, None, None], jnp.abs(product), 0.0))


# ---- server: prototypes (eq. 11-14); LoRA pairs are averaged, A and B apart (eq. 4) ------------------------


def reweight_prototypes(options: PiloraOptions, run: Run) -> ServerRule:
    """Merges the clients' prototypes by their weights (eq. 11-14)."""
    clean = View(1, run.training.batch_size, augment=False)
    # mean features of the training views before each step (release), or of a clean pass after training
    view = clean if options.mean_features == "clean" else None
    features = class_prototypes("features", run.sizes.task_classes, run.network.width, view)

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        mean_features: Prototypes = round.reports["features"]
        merged = prototype_reweight(
            round.reports["classifier"],
            mean_features.vector,
            mean_features.present,
            round.valid,
            distance=options.reweight_distance,
            temperature=options.reweight_temperature,
            temperature_mode=options.reweight_mode,
        )
        holds = mean_features.present & round.valid[:, None]
        away = prototype_distance(merged, mean_features._replace(present=holds))
        metrics = {PROTOTYPE_DISTANCE: Weighted(away, jnp.float32(1))}
        return ServerUpdate(replace_prototypes(params, round.task, merged), state, metrics)

    return ServerRule("reweight", update, reports=(features, OfEachClient("classifier")))


def replace_prototypes(params: Params, task: Task, merged: Float[Array, "Ct width"]) -> Params:
    """The parameters with these prototypes of the task's classes."""
    return params._replace(classifier=merge_current(params.classifier, task, merged))


def prototype_weights(
    prototype: Float[Array, "K C D"],
    feature_mean: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
    *,
    distance: str = "l2",
    temperature: float = 0.2,
    temperature_mode: str = "divide",
) -> Float[Array, "K C"]:
    """PILoRA's weights of the clients' prototypes, per class (PILoRA eq. 11-13).

        d_k = sum_j dist(m_k, mu_j),   a_k = (1/d_k - min 1/d) / (max 1/d - min 1/d),   w = softmax_k(a_k /
        temperature)

    with k over the valid clients, holders of the class or not, and j over those that hold it. The paper has
    dist = squared L2 and exp(temperature * a); its release has L2 and exp(a / temperature).

    Args:
      prototype: m_k, the clients' learned prototypes.
      feature_mean: mu_j, the clients' mean features; read only where present.
      present: which client has rows of which class.
      valid: which clients count.
      distance: 'l2' or 'l2sq'.
      temperature: positive.
      temperature_mode: 'divide' or 'multiply'.

    Returns:
      Weights that sum to 1 over the valid clients: uniform where all distances are equal (one client
      included) and for classes that nobody holds. All 0 if nobody is valid.

    Raises:
      InputError: unknown distance or temperature_mode, or a temperature that is not positive.
    """
    choose("distance", distance, ("l2", "l2sq"))
    choose("temperature_mode", temperature_mode, ("divide", "multiply"))
    if not temperature > 0:
        raise InputError(f"temperature: must be positive, got {temperature}; the paper has 0.2")
    spread = _spread(prototype, feature_mean, present, valid, distance)
    # a is unchanged when all 1/d are scaled, so d_min/d in [0, 1] replaces 1/d: no overflow, and d = 0 has
    # its limit, 1
    valid = valid[:, None]
    nearest = jnp.min(jnp.where(valid, spread, jnp.inf), axis=0)
    inverse = jnp.where(spread > 0, nearest / jnp.where(spread > 0, spread, 1), 1)
    lowest = jnp.min(jnp.where(valid, inverse, 1), axis=0)
    equal = 1 - lowest < EQUAL_DISTANCES
    score = jnp.where(equal, 1, (inverse - lowest) / jnp.where(equal, 1, 1 - lowest))
    scale = 1 / temperature if temperature_mode == "divide" else temperature
    odds = jnp.where(valid, jnp.exp(scale * (score - 1)), 0)
    return odds / jnp.maximum(jnp.sum(odds, axis=0), jnp.finfo(odds.dtype).tiny)


def prototype_reweight(
    prototype: Float[Array, "K C D"],
    feature_mean: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
    *,
    distance: str = "l2",
    temperature: float = 0.2,
    temperature_mode: str = "divide",
) -> Float[Array, "C D"]:
    """Global prototypes m = sum_k w_k m_k with PILoRA's weights; arguments and errors of `prototype_weights`
    (PILoRA eq. 11-13).

    Returns:
      [C, D]; the plain mean over valid clients for a class that nobody holds; zeros if nobody is valid.
    """
    weight = prototype_weights(
        prototype,
        feature_mean,
        present,
        valid,
        distance=distance,
        temperature=temperature,
        temperature_mode=temperature_mode,
    )
    return cast_like(jnp.sum(weight[..., None] * where_valid(prototype, valid, 0.0), axis=0), prototype)


def _spread(prototype: Array, feature_mean: Array, present: Array, valid: Array, distance: str) -> Array:
    """d [K, C]: every client's prototype to the mean features of all holders; one holder at a time, as [K, K,
    C, D] may not fit."""
    holds = present & valid[:, None]
    prototype = where_valid(prototype, valid, 0.0)
    feature = jnp.where(holds[..., None], widen(feature_mean), 0)

    def to_holder(one: tuple[Array, Array]) -> Array:
        squared = jnp.sum(jnp.square(prototype - one[0]), axis=-1)
        return jnp.where(one[1], squared if distance == "l2sq" else jnp.sqrt(squared), 0)

    return jnp.sum(jax.lax.map(to_holder, (feature, holds)), axis=0)


def average_prototypes(run: Run) -> ServerRule:
    """Ablation: merges the clients' prototypes by their plain mean, or by the run's aggregation rule."""
    rule = run.aggregation.reduce

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sent = round.reports["classifier"]
        weights = round.weights
        valid = round.valid
        before = round.previous.payload.trainable.classifier
        merged = rule(sent, before, weights, valid, round.key) if rule else uniform_mean(sent, weights, valid)
        return ServerUpdate(replace_prototypes(params, round.task, merged), state)

    return ServerRule("average", update, reports=(OfEachClient("classifier", follows_rule=True),))


def head_tune(run: Run) -> ServerRule:
    """+HeadTune: a task's prototypes start at the mean features of all clients."""

    def place(params: Params, task: Task, means: Array, present: Array) -> Params:
        kept = current_classes(params.classifier, task)
        return replace_prototypes(params, task, jnp.where(present[:, None], means, kept))

    return start_at_class_means(run, place)
