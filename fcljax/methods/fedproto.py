"""FedProto: clients agree on class prototypes (Tan et al., AAAI 2022, arXiv 2105.00243).

    client    trains on   L_ce + lambda L_R,   L_R the distance of its features from the global prototypes
              of their classes                                                                 (eq. 7, 8)
              sends, for each class of the task, the sum of its features and its number of examples
    server    C_j <- the mean over clients of their mean features of class j                   (eq. 6)

In the paper nothing but prototypes travels, and each client has a model of its own. A global model is what
Class-IL accuracy asks for: here clients also send what trains, which the server averages, as LoRM's authors
do where they compare with FedProto. A class has no global prototype before its first round is over, and then
adds nothing to the loss.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.models.heads import masked_sum, sum_by_class
from fcljax.models.prototypes import class_means, distance_logits, distances
from fcljax.options import option
from fcljax.parts.classifiers import Sums, computed, empty_sums, linear_on
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Classifier, Params, cross_entropy_loss, learner
from fcljax.parts.reports import Prototypes, add_features, possible_sums
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset
from fcljax.types import ClientContext, Method, Task, View

NAME = "prototypes"


@dataclasses.dataclass(frozen=True)
class FedProtoOptions:
    """Options of FedProto."""

    proto_weight: float = option(1.0, least=0.0)
    """Weight lambda of the distance to the global prototypes."""
    proto_distance: Literal["examples", "means"] = "examples"
    """Distance to the global prototypes. examples: mean squared difference of every
    example's features; means: Euclidean distance of the batch's mean features of each
    class."""
    proto_mean: Literal["examples", "clients"] = "examples"
    """Weight clients in a class's global prototype by their examples of it, or equally
    (clients)."""
    proto_predict: Literal["linear", "nearest"] = "linear"
    """Predict by the linear classifier, or by the nearest global prototype."""


_ONE_PAIR = (LoraOptions(lora_pairs="one"),)
PRESETS = {
    "intended": Preset(FedProtoOptions(), adapters=_ONE_PAIR),
    "paper": Preset(FedProtoOptions(proto_distance="means", proto_predict="nearest"), adapters=_ONE_PAIR),
}


class Classified(NamedTuple):
    """The parameters of the classifier."""

    inner: PyTree
    """Of the linear classifier, which trains."""
    prototypes: Prototypes
    """Global ones of all classes [C]."""


def fedproto(options: FedProtoOptions, run: Run) -> Method:
    """FedProto as a method."""
    head = linear_on(run.adapter, run.network.width, run.sizes.classes)
    if options.proto_predict == "nearest":
        head = with_prototypes(head, run.network.width, run.sizes.classes)
    return federate(
        run,
        learner(run.network, run.adapter, head),
        loss=cross_entropy_loss(),
        client_rules=(near_prototypes(options),),
        server_rules=(global_prototypes(options, run),),
    )


def with_prototypes(head: Classifier, width: int, classes: int) -> Classifier:
    """Trains `head` and predicts the class of the nearest global prototype (algorithm 1, inference).

    Args:
      head: what trains.
      width: of the features.
      classes: C.
    """

    def first(key: PRNGKeyArray, inner: PyTree) -> Classified:
        del key
        return Classified(inner, no_prototypes(width, classes))

    def predict(params: Classified, feature: Array, task: Task) -> Array:
        vector, present = params.prototypes
        return distance_logits(distances(feature, vector, "squared"), task.seen & present)

    return computed(classes, first, predict, head)


def no_prototypes(width: int, classes: int) -> Prototypes:
    """Prototypes of no class yet."""
    return Prototypes(jnp.zeros((classes, width)), jnp.zeros(classes, bool))


# ---- the client --------------------------------------------------------------------------------------------


def near_prototypes(options: FedProtoOptions) -> ClientRule:
    """lambda L_R (eq. 7)."""
    distance = {"examples": distance_of_examples, "means": distance_of_means}[options.proto_distance]

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        return options.proto_weight * distance(step, step.context.payload.sent[NAME])

    return ClientRule("fedproto", loss)


def distance_of_examples(step: ClientStep, known: Prototypes) -> Float[Array, ""]:
    """Mean over examples and coordinates of (f(x) - C_y)^2 (release); 0 for classes without a prototype."""
    label = step.batch.label
    mask = step.batch.mask
    far = jnp.mean((step.output.feature - known.vector[label]) ** 2, axis=-1)
    return masked_sum(far, mask & known.present[label]) / jnp.maximum(jnp.sum(mask), 1)


def distance_of_means(step: ClientStep, known: Prototypes) -> Float[Array, ""]:
    """Sum over the batch's classes of ||mean of f(x) - C_j|| (eq. 8)."""
    every: Int[Array, " C"] = jnp.arange(len(known.present))
    sums, examples = sum_by_class(step.output.feature, step.batch.label, every, step.batch.mask)
    mean, here = class_means(sums, examples)
    squared = jnp.sum((mean - known.vector) ** 2, axis=-1)
    counts = here & known.present & (squared > 0)  # the root has no gradient at 0
    return jnp.sum(jnp.where(counts, jnp.sqrt(jnp.where(counts, squared, 1.0)), 0.0))


def local_prototypes(options: FedProtoOptions, run: Run) -> Report:
    """C_{i,j} of the task's classes j (eq. 3), as sums that the server can add, after training."""

    def init(context: ClientContext) -> Sums:
        del context
        return empty_sums(run.sizes.task_classes, run.network.width)

    def finalize(end: ClientEnd, total: Sums) -> Sums:
        del end
        if options.proto_mean == "examples":
            return total
        mean, present = class_means(*total)
        return Sums(mean, present.astype(jnp.float32))

    view = View(1, run.training.batch_size, shuffle=False, augment=False)
    return Report("class_sums", init, add_features, finalize, view, "sum", possible=possible_sums)


# ---- the server --------------------------------------------------------------------------------------------


def global_prototypes(options: FedProtoOptions, run: Run) -> ServerRule:
    """The global prototypes of all classes; those of classes that nobody had stay as they were (eq. 6)."""

    def init(params: Params, trainable: Params) -> Prototypes:
        del params, trainable
        return no_prototypes(run.network.width, run.sizes.classes)

    def sends(task: Task, known: Prototypes) -> Prototypes:
        del task
        return known

    def update(round: ServerRound, params: Params, known: Prototypes) -> ServerUpdate:
        sums: Sums = round.reports["class_sums"]
        known = replace_present(known, Prototypes(*class_means(*sums)), round.task)
        if options.proto_predict == "nearest":
            params = params._replace(classifier=params.classifier._replace(prototypes=known))
        return ServerUpdate(params, known)

    return ServerRule(NAME, update, init, sends, (local_prototypes(options, run),))


def replace_present(known: Prototypes, new: Prototypes, task: Task) -> Prototypes:
    """All prototypes with the new ones of the task's classes [Ct] that somebody had examples of."""
    place = jnp.where((task.classes >= 0) & new.present, task.classes, len(known.present))
    vector = known.vector.at[place].set(new.vector, mode="drop")
    return Prototypes(vector, known.present.at[place].set(True, mode="drop"))
