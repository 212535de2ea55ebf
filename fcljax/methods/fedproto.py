"""FedProto: clients agree on class prototypes (Tan et al., AAAI 2022, arXiv 2105.00243).

    client    trains on  L_ce + lambda L_R,  where L_R is the distance of its features from
              the global prototypes of their classes                            (eq. 7, 8)
              sends the sum of its features and its number of examples of each class
    server    C_j <- the mean over clients of their mean features of class j       (eq. 6)

In the paper clients send prototypes only, and each client has a personal model. Class-IL
accuracy needs a global model: here clients also send their trainable parameters, which the
server averages, as LoRM's authors do in their comparison with FedProto. A class has no
global prototype before its first round is over; until then it adds nothing to the loss.
"""

import dataclasses
import functools
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
from fcljax.parts.reports import Prototypes, add_features, longest_feature, possible_sums
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, with_headtune, with_mini
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
# mini: at a learning rate of 1e-3 LoRA spoils the features of which prototypes are means
PRESETS = with_headtune(
    with_mini(
        {
            "intended": Preset(FedProtoOptions(), adapters=_ONE_PAIR),
            "paper": Preset(
                FedProtoOptions(proto_distance="means", proto_predict="nearest"), adapters=_ONE_PAIR
            ),
        },
        lr=1e-2,
        lora_lr=1e-4,
    )
)


class Classified(NamedTuple):
    """The parameters of the classifier."""

    inner: PyTree
    """Of the linear classifier, which trains."""
    prototypes: Prototypes
    """The global prototypes of all classes [C]."""


def fedproto(options: FedProtoOptions, run: Run) -> Method:
    """Compose FedProto."""
    classifier = linear_on(run.adapter, run.network.width, run.sizes.classes)
    if options.proto_predict == "nearest":
        classifier = with_prototypes(classifier, run.network.width, run.sizes.classes)
    return federate(
        run,
        learner(run.network, run.adapter, classifier),
        loss=cross_entropy_loss(),
        client_rules=(near_prototypes(options),),
        server_rules=(global_prototypes(options, run),),
    )


def with_prototypes(inner: Classifier, width: int, classes: int) -> Classifier:
    """Train `inner`, and predict the class of the nearest global prototype (algorithm 1).

    Args:
      inner: the classifier that trains.
      width: of the features.
      classes: C.
    """

    def init(_key: PRNGKeyArray, inner_params: PyTree) -> Classified:
        return Classified(inner_params, no_prototypes(width, classes))

    def predict(params: Classified, feature: Array, task: Task) -> Array:
        vector, present = params.prototypes
        return distance_logits(distances(feature, vector, "squared"), task.seen & present)

    return computed(classes, init, predict, inner)


def no_prototypes(width: int, classes: int) -> Prototypes:
    """Return zeros [C, width] that mark no class as present."""
    return Prototypes(jnp.zeros((classes, width)), jnp.zeros(classes, bool))


# ---- the client ------------------------------------------------------------------------


def near_prototypes(options: FedProtoOptions) -> ClientRule:
    """Add lambda L_R (eq. 7): features stay near the prototypes of their classes."""
    distance = distance_of_means
    if options.proto_distance == "examples":
        distance = distance_of_examples

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        return options.proto_weight * distance(step, step.context.payload.sent[NAME])

    return ClientRule("fedproto", loss)


def distance_of_examples(step: ClientStep, prototypes: Prototypes) -> Float[Array, ""]:
    """Return the mean over examples and coordinates of (f(x) - C_y)^2 (release).

    Examples whose class has no prototype add 0.
    """
    label = step.batch.label
    mask = step.batch.mask
    squared = jnp.mean((step.output.feature - prototypes.vector[label]) ** 2, axis=-1)
    has_prototype = mask & prototypes.present[label]
    # divided by all examples of the batch and not by those with a prototype (release)
    return masked_sum(squared, has_prototype) / jnp.maximum(jnp.sum(mask), 1)


def distance_of_means(step: ClientStep, prototypes: Prototypes) -> Float[Array, ""]:
    """Return the sum over the batch's classes of ||mean of f(x) - C_j|| (eq. 8)."""
    batch = step.batch
    # all classes of the stream, in the order of the prototypes
    classes: Int[Array, " C"] = jnp.arange(len(prototypes.present))
    sums, examples = sum_by_class(step.output.feature, batch.label, classes, batch.mask)
    mean, in_batch = class_means(sums, examples)
    squared = jnp.sum((mean - prototypes.vector) ** 2, axis=-1)
    # the gradient of a root at 0 is infinite, so a distance of 0 is left out
    counts = in_batch & prototypes.present & (squared > 0)
    # two `where`s: with the outer one alone, 0 times the infinite gradient would be NaN
    return jnp.sum(jnp.where(counts, jnp.sqrt(jnp.where(counts, squared, 1.0)), 0.0))


def local_prototypes(options: FedProtoOptions, run: Run) -> Report:
    """Report C_{i,j} of the task's classes after training (eq. 3), as sums."""

    def init(_context: ClientContext) -> Sums:
        return empty_sums(run.sizes.task_classes, run.network.width)

    def finalize(_end: ClientEnd, total: Sums) -> Sums:
        if options.proto_mean == "examples":
            return total
        # each client adds its mean as if it were one example, so clients count equally
        mean, present = class_means(*total)
        return Sums(mean, present.astype(jnp.float32))

    # a pass over clean images after training, under the trained model (eq. 3)
    view = View(1, run.training.batch_size, shuffle=False, augment=False)
    longest = functools.partial(longest_feature, run)
    possible = functools.partial(possible_sums, longest=longest)
    return Report("class_sums", init, add_features, finalize, view, "sum", possible=possible)


# ---- the server ------------------------------------------------------------------------


def global_prototypes(options: FedProtoOptions, run: Run) -> ServerRule:
    """Send the global prototypes (eq. 6), old ones for classes without reports."""

    def init(_params: Params, _trainable: Params) -> Prototypes:
        return no_prototypes(run.network.width, run.sizes.classes)

    def sends(_task: Task, prototypes: Prototypes) -> Prototypes:
        return prototypes

    def update(
        round: ServerRound,
        params: Params,
        prototypes: Prototypes,
    ) -> ServerUpdate:
        sums: Sums = round.reports["class_sums"]
        reported = Prototypes(*class_means(*sums))
        prototypes = replace_present(prototypes, reported, round.task)
        if options.proto_predict == "nearest":
            classifier = params.classifier._replace(prototypes=prototypes)
            params = params._replace(classifier=classifier)
        return ServerUpdate(params, prototypes)

    return ServerRule(NAME, update, init, sends, (local_prototypes(options, run),))


def replace_present(
    prototypes: Prototypes,
    reported: Prototypes,
    task: Task,
) -> Prototypes:
    """Return the prototypes of all classes with those that were reported of this task.

    Args:
      prototypes: of all classes [C].
      reported: of the task's classes [Ct]; those that are not present change nothing.
      task: says which classes these are.
    """
    changes = (task.classes >= 0) & reported.present
    # JAX drops writes beyond the last class
    index = jnp.where(changes, task.classes, len(prototypes.present))
    vector = prototypes.vector.at[index].set(reported.vector, mode="drop")
    return Prototypes(vector, prototypes.present.at[index].set(True, mode="drop"))
