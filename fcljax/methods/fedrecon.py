"""FedRecon: federated reconnaissance by a prototypical network (Hendryx et al. 2021).

    once per task   each client embeds its examples and sends, for each class, the sum of the embeddings and
                    the number of examples
                    the server's prototypes are the means over all examples ever sent, so that a class that is
                    met again, by any client in any task, is refined
    prediction      the nearest prototype by Euclidean distance

With a frozen embedding (the adapter `linear`, the default) this is FedNCM with `classifier` nearest, whose
sums are the paper's online averages: both papers have the same method there, and the same numbers. What
FedRecon adds is how its embedding comes to be: by training on base classes, in episodes (prototypical
networks, Snell et al. 2017). The paper does that beforehand and centrally. Here the adapter `full` does it in
the first task, in whose rounds clients train by episodes and the server averages; then the embedding is
frozen. Later tasks still play their rounds, in which nothing changes but by the rounding of means.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.models.heads import sum_by_class
from fcljax.models.prototypes import class_means, dce_loss, distances
from fcljax.parts.classifiers import Sums, empty_sums, nearest_mean
from fcljax.parts.client import ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.first_task import first_task_only
from fcljax.parts.learner import Params, learner, replaced_loss
from fcljax.parts.reports import possible_sums
from fcljax.parts.server import RuleTime, ServerRound, ServerRule, ServerUpdate
from fcljax.types import Batch, ClientContext, Method, RoundContext


@dataclasses.dataclass(frozen=True)
class FedReconOptions:
    """Options of FedRecon."""

    evaluated: Literal["server", "clients"] = "server"
    """Evaluate the prototypes on all classes so far (server), or per client on the
    classes that it has learned, as in VFCL's tables."""


def fedrecon(options: FedReconOptions, run: Run) -> Method:
    """FedRecon as a method; with an adapter that trains, it does so in the first task."""
    trains = not run.adapter.plain
    # the first task's prototypes are those of the embedding that it ends with
    method = federate(
        run,
        learner(run.network, run.adapter, nearest_mean(run.network.width, run.sizes.classes)),
        loss=replaced_loss() if trains else None,
        client_rules=(episodes(),) if trains else (),
        server_rules=(merge_prototypes(run, "task_end" if trains else "task_start"),),
    )
    if options.evaluated == "server":
        return method

    def predict_client(round_context: RoundContext, server, state, batch: Batch) -> Array:
        return method.predict(round_context, server, batch)

    return method._replace(predict_client=predict_client, personal=True)


# ---- prototypes --------------------------------------------------------------------------------------------


def merge_prototypes(run: Run, when: RuleTime) -> ServerRule:
    """Sums of embeddings of all classes are sent, since clients' tasks may have different ones, and added to
    those of all tasks before: the running means of all examples ever sent.

    Embeddings are those of evaluation: batch normalisation by the running statistics.
    """
    classes = run.sizes.classes
    width = run.network.width

    def init(context: ClientContext) -> Sums:
        del context
        return empty_sums(classes, width)

    def add(step: ClientStep, total: Sums) -> Sums:
        feature = step.forward(step.trainable, train=False).feature
        batch = step.batch
        more, examples = sum_by_class(feature, batch.label, jnp.arange(classes), batch.mask)
        return Sums(total.feature + more, total.examples + examples)

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sums = jax.tree.map(jnp.add, params.classifier.sums, round.reports["embeddings"])
        return ServerUpdate(params._replace(classifier=params.classifier._replace(sums=sums)), state)

    report = Report("embeddings", init, add, merge="sum", possible=possible_sums)
    return ServerRule("prototypes", update, reports=(report,), when=when)


# ---- training of the embedding -----------------------------------------------------------------------------


def episodes() -> ClientRule:
    """In the first task every batch is an episode (`episode_loss`); later nothing changes."""

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        batch = step.batch
        task = step.context.task
        value = episode_loss(step.output.feature, batch.label, task.classes, batch.mask)
        return jnp.where(task.index == 0, value, 0.0)

    return first_task_only("episodes", loss)


def episode_loss(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    classes: Int[Array, " Ct"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """Prototypical networks' loss (Snell et al. 2017, algorithm 1) on one batch.

    Every other example supports its class's prototype, the rest are queries, and their negative squared
    distances to the prototypes are the logits. Queries of classes without support do not count.

    Batches come in a new order in every epoch, so that an episode's halves are random; its classes and the
    examples of each are those of the batch, where the paper draws a fixed number of both.
    """
    support = jnp.arange(len(label)) % 2 == 0
    prototypes, present = class_means(*sum_by_class(feature, label, classes, mask & support))
    place = jnp.argmax(label[:, None] == classes, axis=1)
    queries = mask & ~support & present[place]
    return dce_loss(distances(feature, prototypes, "squared"), place, present, queries)
