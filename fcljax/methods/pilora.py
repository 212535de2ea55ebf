"""PILoRA: prototype guided incremental LoRA for federated class-incremental learning
(Guo et al., ECCV 2024, arXiv 2401.02094).

One round of task t (Algorithm 1 of the paper):

    server    sends the task's LoRA pair (A_t, B_t) and the prototypes m_c of its classes
    client k  trains both for E epochs on L = L_dce + lambda L_pl + gamma L_ort (eq. 15)
              sends them, with its mean feature mu_kc of each class c that it holds
    server    averages the LoRA pairs, weighted by examples                     (eq. 4)
              merges the prototypes, each client weighted by how close its m_kc lies
              to the mean features of all clients                               (eq. 11-14)

Where the paper and the authors' code differ, an option says which one is meant; the
presets are the three readings.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError, choose
from fcljax.federated import rules, sums
from fcljax.federated.distances import EQUAL_DISTANCES
from fcljax.models import heads
from fcljax.models.products import exact_einsum
from fcljax.models.prototypes import Distance
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts import classifiers, reports
from fcljax.parts.client import ClientRule, ClientStep, OfEachClient
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Classes, Loss, Output, Params, competing, learner
from fcljax.parts.optimisers import Adam
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Batch, Method, Task, View, Weighted


@dataclasses.dataclass(frozen=True)
class PiloraOptions:
    """Options of PILoRA. Prototypes train at the run's learning rate (paper: 2e-3 on
    CIFAR-100, 5e-3 on TinyImageNet), LoRA at `lora_lr` (1e-5, 5e-6)."""

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
    distance: Distance = "sqrt_scaled"
    """Distance of a feature to a prototype: ||f - m|| / sqrt(width), or ||f - m||^2."""
    negatives: Literal["seen", "all"] = "all"
    """Prototypes in the loss: those of seen classes, or of all classes."""
    predict_classes: Literal["seen", "all"] = "seen"
    """Prototypes that compete in predictions: those of seen classes, or of all classes."""
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


_RUN = RunConfig(optimiser=Adam(weight_decay=1e-5), lr=0.1, lr_schedule="cosine", train_share=0.8)
# mini: at a learning rate of 1e-3 LoRA spoils the features, of which prototypes are means
PRESETS = with_mini(
    {
        "intended": Preset(PiloraLoraOptions(), _RUN),
        "improved": Preset(PiloraLoraOptions(), dataclasses.replace(_RUN, train_share=1.0, headtune=True)),
        "paper": Preset(
            PiloraLoraOptions(
                distance="squared", mean_features="clean", reweight_distance="l2sq", reweight_mode="multiply"
            ),
            _RUN,
            (LoraOptions(lora_init="gaussian"),),
        ),
        "released": Preset(
            PiloraLoraOptions(predict_classes="all", l1_weight=0.01),
            dataclasses.replace(
                _RUN,
                preprocess="pilora",
                class_order="natural",
                population="independent",
                lr_schedule="cosine_lag",
            ),
            (LoraOptions(local_lora="current", global_lora="first"),),
        ),
    },
    lora_lr=1e-4,
    full_lr=1e-3,
)


def pilora(options: PiloraOptions, run: Run) -> Method:
    """Compose PILoRA on any adapter."""
    classifier = classifiers.prototypes(
        run.network.width, run.sizes.classes, options.distance, options.prototype_init
    )
    client_rules = [prototype_loss(options.prototype_weight)]
    # these options exist where the run's adapter is LoRA
    if isinstance(options, PiloraLoraOptions):
        client_rules.append(lora_losses(options))
    # prototypes are not averaged; the pairs keep the run's aggregation rule
    server_rules = [reweight_prototypes(options, run)]
    if options.wo_reweight:
        server_rules = [average_prototypes(run)]
    return federate(
        run,
        learner(run.network, run.adapter, classifier, classifier_then_adapter),
        loss=distance_cross_entropy(options.negatives, options.hardness),
        client_rules=tuple(client_rules),
        server_rules=tuple(server_rules),
        predicts=options.predict_classes,
    )


def classifier_then_adapter(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the keys of adapter and classifier: prototypes get the first of two keys."""
    prototype_key, lora_key = jax.random.split(key)
    return lora_key, prototype_key


# ---- client: L = L_dce + lambda L_pl + gamma L_ort (eq. 15) ----------------------------


def distance_cross_entropy(classes: Classes, hardness: float) -> Loss:
    """Return L_dce (eq. 8, 9): cross-entropy of the negative distances to the prototypes.

    Args:
      classes: whose prototypes compete.
      hardness: delta, the factor on the distances.
    """

    def value(output: Output, batch: Batch, task: Task) -> Float[Array, ""]:
        # delta acts on the distances of the softmax only: L_pl has none (eq. 10)
        logits = hardness * output.logits
        return heads.cross_entropy(logits, batch.label, competing(classes, task), batch.mask)

    return Loss(value, classes)


def prototype_loss(weight: float) -> ClientRule:
    """Add lambda L_pl (eq. 10), which pulls features to the prototypes of their classes.

    Args:
      weight: lambda.
    """

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        # the classifier's logits are minus the distances (`classifiers.prototypes`)
        distance = -step.output.logits
        return weight * pl_loss(distance, step.batch.label, step.batch.mask)

    return ClientRule("prototype", loss)


def pl_loss(
    distance: Float[Array, "batch classes"], label: Int[Array, " batch"], mask: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """Return L_pl (eq. 10): the mean distance of examples to their classes' prototypes."""
    # d(f, m_y) of each example; padding has label 0 and is masked below
    to_prototype = jnp.take_along_axis(distance, label[:, None], axis=1)[:, 0]
    return heads.reduce_rows(to_prototype, mask, jnp.sum(mask), "mean")


def lora_losses(options: PiloraLoraOptions) -> ClientRule:
    """Add gamma L_ort (eq. 7) and the release's L1 penalty."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""] | float:
        pair = step.trainable.adapter
        task_pairs = step.context.cached.adapter
        penalty = 0.0
        # a single pair for all tasks has no earlier pairs to be orthogonal to
        if isinstance(task_pairs, Lora) and not options.wo_orthogonality:
            overlap = orthogonality(task_pairs, pair, step.context.task.index)
            penalty = options.orthogonality_weight * overlap
        if options.l1_weight:
            penalty = penalty + options.l1_weight * l1(pair)
        return penalty

    return ClientRule("lora", loss)


def orthogonality(task_pairs: Lora, current: Lora, task: ArrayLike) -> Float[Array, ""]:
    """Return L_ort (eq. 7): sum_{i < t} |A_i A_t^T|_1 over queries, values and blocks.

    It is exactly 0 in the first task.

    Args:
      task_pairs: the pairs of all tasks, which get no gradient. Only their A are read.
      current: the pair of task t.
      task: t.
    """
    # later pairs have initial values, which the loss must not see
    earlier = jnp.arange(task_pairs.a_q.shape[0]) < task
    queries = _absolute_products(task_pairs.a_q, current.a_q, earlier)
    values = _absolute_products(task_pairs.a_v, current.a_v, earlier)
    return queries + values


def l1(current: Lora) -> Float[Array, ""]:
    """Return the sum of |A_t| over queries and values (release; B is not penalised)."""
    return jnp.sum(jnp.abs(current.a_q)) + jnp.sum(jnp.abs(current.a_v))


def _absolute_products(
    task_a: Float[Array, "tasks blocks rank width"],
    current_a: Float[Array, "blocks rank width"],
    earlier: Bool[Array, " tasks"],
) -> Float[Array, ""]:
    """Return the sum over earlier tasks and blocks of the entries of |A_i A_t^T|."""
    # exact, because training drives these products to 0: bfloat16 would end in noise
    product = exact_einsum("tmrd,msd->tmrs", jax.lax.stop_gradient(task_a), current_a)
    return jnp.sum(jnp.where(earlier[:, None, None, None], jnp.abs(product), 0.0))


# ---- server: prototypes (eq. 11-14); LoRA pairs are averaged, A and B apart (eq. 4) ----


def reweight_prototypes(options: PiloraOptions, run: Run) -> ServerRule:
    """Merge the clients' prototypes by their weights (eq. 11-14), in place of their mean."""
    # None: features of the training batches, each before its step, as in the release. The
    # paper takes them from a pass over clean images after training
    view = None
    if options.mean_features == "clean":
        view = View(1, run.training.batch_size, augment=False)
    features = reports.class_prototypes("features", run.sizes.task_classes, run.network.width, view)

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        prototypes = round.reports["classifier"]
        features: reports.Prototypes = round.reports["features"]
        merged = prototype_reweight(
            prototypes,
            features.vector,
            features.present,
            round.valid,
            distance=options.reweight_distance,
            temperature=options.reweight_temperature,
            temperature_mode=options.reweight_mode,
        )
        # how far merged prototypes lie from the features that they stand for
        holders = features._replace(present=features.present & round.valid[:, None])
        distance = reports.prototype_distance(merged, holders)
        metrics = {reports.PROTOTYPE_DISTANCE: Weighted(distance, jnp.float32(1))}
        return ServerUpdate(replace_prototypes(params, round.task, merged), state, metrics)

    return ServerRule("reweight", update, reports=(features, OfEachClient("classifier")))


def replace_prototypes(params: Params, task: Task, prototypes: Float[Array, "Ct width"]) -> Params:
    """Return the parameters with these prototypes of the task's classes."""
    return params._replace(classifier=classifiers.merge_current(params.classifier, task, prototypes))


def prototype_reweight(
    prototype: Float[Array, "K C D"],
    feature_mean: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
    **weighting: Any,
) -> Float[Array, "C D"]:
    """Return the global prototypes m = sum_k w_k m_k (PILoRA eq. 14).

    Arguments and errors are those of `prototype_weights`, which makes w_k.

    Returns:
      [C, D]; the plain mean over valid clients for a class that no client holds; zeros if
      no client is valid.
    """
    weight = prototype_weights(prototype, feature_mean, present, valid, **weighting)
    # an invalid upload may be NaN, and 0 times NaN is NaN
    prototype_or_zero = sums.where_valid(prototype, valid, 0.0)
    merged = jnp.sum(weight[..., None] * prototype_or_zero, axis=0)
    return sums.cast_like(merged, prototype)


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
    """Return PILoRA's weights w_k of the clients' prototypes, per class (PILoRA eq. 11-13).

        d_k = sum_j dist(m_k, mu_j)                                        (eq. 11)
        a_k = (1/d_k - min 1/d) / (max 1/d - min 1/d)                      (eq. 12)
        w   = softmax_k(a_k / temperature)                                 (eq. 13)

    k runs over the valid clients, holders of the class or not; j over those that hold
    it. The paper has dist = squared L2 and exp(temperature * a); its release has L2 and
    exp(a / temperature).

    Args:
      prototype: m_k, the clients' learned prototypes.
      feature_mean: mu_j, the clients' mean features; read only where present.
      present: which client has examples of which class.
      valid: clients whose upload arrived.
      distance: 'l2' or 'l2sq'.
      temperature: positive.
      temperature_mode: 'divide' or 'multiply'.

    Returns:
      Weights that sum to 1 over the valid clients: uniform where all distances are equal
      (one client included) and for classes that no client holds. All 0 if no client is
      valid.

    Raises:
      InputError: for an unknown distance or temperature_mode, or a temperature that
        is not positive.
    """
    choose("distance", distance, ("l2", "l2sq"))
    choose("temperature_mode", temperature_mode, ("divide", "multiply"))
    if not temperature > 0:
        raise InputError(f"temperature: must be positive, got {temperature}; the paper has 0.2")
    distance_sum = _distance_sums(prototype, feature_mean, present, valid, distance)  # eq. 11
    closeness = _min_max_inverse(distance_sum, valid)  # eq. 12
    scale = 1 / temperature
    if temperature_mode == "multiply":
        scale = temperature
    # eq. 13. The largest closeness is 1, so subtracting it as usual in a softmax leaves
    # exponents of at most 0
    unnormalised = jnp.where(valid[:, None], jnp.exp(scale * (closeness - 1)), 0)
    total = jnp.sum(unnormalised, axis=0)
    return unnormalised / jnp.maximum(total, jnp.finfo(unnormalised.dtype).tiny)


def _distance_sums(
    prototype: Float[Array, "K C D"],
    feature_mean: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
    distance: str,
) -> Float[Array, "K C"]:
    """Return d of eq. 11: a client's prototype to the mean features of all holders, summed."""
    holds = present & valid[:, None]
    prototype = sums.where_valid(prototype, valid, 0.0)
    feature_mean = jnp.where(holds[..., None], sums.widen(feature_mean), 0)

    def to_one_holder(holder: tuple[Array, Array]) -> Float[Array, "K C"]:
        mean, holds_class = holder
        result = jnp.sum(jnp.square(prototype - mean), axis=-1)
        if distance == "l2":
            result = jnp.sqrt(result)
        return jnp.where(holds_class, result, 0)

    # one holder at a time: the differences of all pairs, [K, K, C, D], may not fit into memory
    return jnp.sum(jax.lax.map(to_one_holder, (feature_mean, holds)), axis=0)


def _min_max_inverse(
    distance: Float[Array, "K C"],
    valid: Bool[Array, " K"],
) -> Float[Array, "K C"]:
    """Return 1/d scaled to [0, 1] over the valid clients (eq. 12), 1 where all d are equal."""
    valid = valid[:, None]
    # scaling all 1/d changes nothing in eq. 12. So min(d)/d replaces 1/d: it lies in
    # [0, 1], cannot overflow, and tends to 1 at d = 0
    nearest = jnp.min(jnp.where(valid, distance, jnp.inf), axis=0)
    inverse = jnp.where(distance > 0, nearest / jnp.where(distance > 0, distance, 1), 1)
    lowest = jnp.min(jnp.where(valid, inverse, 1), axis=0)
    # 0 / 0 in eq. 12, or rounding errors over rounding errors
    all_equal = 1 - lowest < EQUAL_DISTANCES
    return jnp.where(all_equal, 1, (inverse - lowest) / jnp.where(all_equal, 1, 1 - lowest))


def average_prototypes(run: Run) -> ServerRule:
    """Merge the prototypes by their mean or the run's aggregation rule (ablation)."""
    reduce = run.aggregation.reduce

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        prototypes = round.reports["classifier"]
        if reduce is None:
            merged = rules.uniform_mean(prototypes, round.weights, round.valid)
        else:
            reference = round.previous.payload.trainable.classifier
            merged = reduce(prototypes, reference, round.weights, round.valid, round.key)
        return ServerUpdate(replace_prototypes(params, round.task, merged), state)

    return ServerRule("average", update, reports=(OfEachClient("classifier", follows_rule=True),))
