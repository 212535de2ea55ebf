"""PILoRA: prototype guided incremental LoRA for federated class-incremental learning (Guo et al., ECCV 2024).

arXiv 2401.02094. Clients learn class prototypes and one low-rank pair per task in the first block
(`adapters/lora.py`), whose A is kept orthogonal to the A of earlier tasks. The server averages the pairs by
rows, and the prototypes by how close each lies to the mean features that clients report for its class. Where
paper and release differ, a field of `PiloraOptions` or of the adapter says which one is meant.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions, l1, orthogonality
from fcljax.federated.rules import uniform_mean
from fcljax.methods.pilora_prototypes import prototype_reweight
from fcljax.models.prototypes import Distance, class_means, pl_loss
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.classifiers import Sums, current_rows, prototypes, put_current
from fcljax.parts.federate import Collect, Run, Seen, ServerStep, Survey, Term, federate
from fcljax.parts.learner import Learner, Model, Objective, learner
from fcljax.parts.reports import Prototypes, class_prototypes, class_sums
from fcljax.settings import Preset, RunConfig
from fcljax.types import Aggregate, Method, RoundContext, View

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
    """Prototypes in the loss: those of classes seen so far, or of all classes."""
    predict_classes: Literal["seen", "all"] = "seen"
    """Prototypes that compete in predictions: those of classes seen so far, or of all classes."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule over the rounds of a task."""
    mean_features: Literal["trajectory", "clean"] = "trajectory"
    """Mean features come from the training steps, or from a pass over clean images after training."""
    reweight_distance: Literal["l2", "l2sq"] = "l2"
    """Distance of a prototype to a mean feature in the re-weighting."""
    reweight_mode: Literal["divide", "multiply"] = "divide"
    """Whether eta divides or multiplies the inverse distances in the re-weighting."""


@dataclasses.dataclass(frozen=True)
class PiloraLoraOptions(PiloraOptions):
    """Options of PILoRA with LoRA, with the losses that act on LoRA pairs."""

    orthogonality_weight: float = 0.5
    """Weight gamma of the orthogonality loss between the tasks' LoRA pairs (eq. 7)."""
    wo_orthogonality: bool = False
    """Ablation: no orthogonality loss."""
    l1_weight: float = 0.0
    """Weight of the sum of |A|, an L1 loss of the release."""


_RUN = RunConfig(lr=0.1, weight_decay=1e-5, train_share=0.8)
PRESETS = {
    "intended": Preset(PiloraLoraOptions(), _RUN),
    "improved": Preset(PiloraLoraOptions(), dataclasses.replace(_RUN, train_share=1.0)),
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
    """PILoRA as a method, on any adapter. `options` must be resolved."""
    sizes, width = run.sizes, run.network.width
    classifier = prototypes(width, sizes.classes, options.distance, options.prototype_init)
    factor = functools.partial(learning_rate_factor, options.schedule)
    step = average_step(run) if options.wo_reweight else reweight_step(options, run)
    on_lora = (lora_term(options),) if isinstance(options, PiloraLoraOptions) else ()
    return federate(
        learner(run.network, run.adapter, classifier, _classifier_first),
        sizes,
        run.train._replace(factor=factor),
        terms=(prototype_term(options.prototype_weight), *on_lora, *run.terms),
        steps=(step,),
        surveys=(headtune(run),) if options.headtune else (),
        objective=Objective(options.negatives, hardness=options.hardness),
        aggregation=run.aggregation,
        predicts=options.predict_classes,
    )


def _classifier_first(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The prototypes draw from the first of two keys, the adapter from the second."""
    first, second = jax.random.split(key)
    return second, first


def learning_rate_factor(
    schedule: Schedule, round_: ArrayLike, rounds: int, epoch: ArrayLike = 0
) -> Float[Array, ""]:
    """The factor on all learning rates in round r of a task of R rounds.

    1 ("constant"), (1 + cos(pi r / R)) / 2 ("cosine"), or that of the round before, 1 in the first
    ("cosine_lag": the release moves one round late). All epochs of a round have the same.
    """
    del epoch
    if schedule == "constant":
        return jnp.ones(())
    position = jnp.maximum(round_ - 1, 0) if schedule == "cosine_lag" else round_
    return jnp.asarray(0.5 * (1 + jnp.cos(jnp.pi * position / rounds)), jnp.float32)


# ---- client: L = L_dce + lambda L_pl + gamma L_ort (eq. 15) ------------------------------------------------


def prototype_term(weight: float) -> Term:
    """lambda L_pl (eq. 10): the distance to the prototype of the own class."""

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del learner, memory
        return weight * pl_loss(-seen.output.logits, seen.batch.label, seen.batch.mask)

    return Term("prototype", loss)


def lora_term(options: PiloraLoraOptions) -> Term:
    """gamma L_ort (eq. 7), and the release's L1 penalty. A single pair for all tasks has none to be kept
    apart from."""

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""] | float:
        del learner, memory
        part, pairs = seen.part.adapter, seen.context.cached.adapter
        keep_apart = isinstance(pairs, Lora) and not options.wo_orthogonality
        overlap = orthogonality(pairs, part, seen.context.task.index) if keep_apart else 0.0
        penalty = options.orthogonality_weight * overlap
        return penalty + options.l1_weight * l1(part) if options.l1_weight else penalty

    return Term("lora", loss)


def feature_collect(options: PiloraOptions, run: Run) -> Collect:
    """Mean features of the client's classes: of all epochs' training views, each before its step (release),
    or of one clean pass with the trained model."""
    clean = View(1, run.train.batch_size, augment=False)
    view = clean if options.mean_features == "clean" else None
    return class_prototypes("features", run.sizes.task_classes, run.network.width, view)


# ---- server ------------------------------------------------------------------------------------------------


def reweight_step(options: PiloraOptions, run: Run) -> ServerStep:
    """Prototypes by their weights (eq. 11-14). LoRA is averaged by rows, A and B apart."""
    distance, mode = options.reweight_distance, options.reweight_mode

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        state: tuple,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner, key
        features: Prototypes = aggregate.gather["features"]
        merged = prototype_reweight(
            aggregate.gather["classifier"],
            features.vector,
            features.present,
            aggregate.valid,
            distance=distance,
            temperature=options.reweight_temperature,
            temperature_mode=mode,
        )
        return (
            params._replace(classifier=put_current(params.classifier, round_context.task, merged)),
            state,
            {},
        )

    collects = (feature_collect(options, run),)
    return ServerStep("reweight", step, collects=collects, takes=("classifier",))


def average_step(run: Run) -> ServerStep:
    """Ablation: the plain mean of the clients' prototypes, or what the run's rule makes of them."""
    rule = run.aggregation.reduce

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        state: tuple,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner
        sent, weight, valid = aggregate.gather["classifier"], aggregate.weight, aggregate.valid
        before = round_context.previous.payload.part.classifier
        merged = rule(sent, before, weight, valid, key) if rule else uniform_mean(sent, weight, valid)
        return (
            params._replace(classifier=put_current(params.classifier, round_context.task, merged)),
            state,
            {},
        )

    return ServerStep("average", step, takes=("classifier",), follows_rule=True)


def headtune(run: Run) -> Survey:
    """+HeadTune: before a task's first round clients sum the features of their rows by class, and the server
    starts the prototypes at the means (FedNCM)."""
    view = View(1, run.train.batch_size, augment=False)
    collect = class_sums(run.sizes.task_classes, run.network.width, view)

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        state: tuple,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner, key
        sums: Sums = aggregate.sum["class_sums"]
        means, present = class_means(sums.feature, sums.rows)
        kept = current_rows(params.classifier, round_context.task)
        started = put_current(params.classifier, round_context.task, jnp.where(present[:, None], means, kept))
        return params._replace(classifier=started), state, {}

    return Survey(ServerStep("headtune", step, collects=(collect,)), "opening", run.train.batch_size)
