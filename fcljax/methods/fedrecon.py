"""FedRecon: federated reconnaissance by a prototypical network (Hendryx et al. 2021).

    once per task   each client embeds its examples and sends, for each class, the sum of the
                    embeddings and the number of examples
                    the server's prototypes are the means over all examples of all tasks, so
                    that a class that occurs again, at any client, is refined
    prediction      the nearest prototype by Euclidean distance

With a frozen embedding (the adapter `linear`, the default) this is FedNCM with
`classifier` nearest, whose sums are the paper's online averages: the two methods are the
same there, and so are their results. FedRecon adds how the embedding is trained: on base
classes, in episodes (prototypical networks, Snell et al. 2017). The paper does that in
advance and centrally. Here the adapter `full` does it in the first task, in whose rounds
clients train by episodes and the server averages; then the embedding is frozen. Later
tasks still play their rounds, which change nothing but the rounding of means.
"""

import dataclasses
import functools
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
from fcljax.parts.reports import longest_feature, possible_sums
from fcljax.parts.server import RuleTime, ServerRound, ServerRule, ServerUpdate
from fcljax.types import Batch, ClientContext, Method, RoundContext


@dataclasses.dataclass(frozen=True)
class FedReconOptions:
    """Options of FedRecon."""

    evaluated: Literal["server", "clients"] = "server"
    """Evaluate the prototypes on all classes so far (server), or per client on the
    classes that it has learned, as in VFCL's tables."""


def fedrecon(options: FedReconOptions, run: Run) -> Method:
    """Compose FedRecon; an adapter that trains does so in the first task."""
    classifier = nearest_mean(run.network.width, run.sizes.classes)
    model = learner(run.network, run.adapter, classifier)
    if run.adapter.plain:
        method = federate(run, model, server_rules=(merge_prototypes(run, "task_start"),))
    else:
        # at a task's end: the embedding must not change after its prototypes are taken
        method = federate(
            run,
            model,
            loss=replaced_loss(),
            client_rules=(episodes(),),
            server_rules=(merge_prototypes(run, "task_end"),),
        )
    if options.evaluated == "server":
        return method

    # all clients have the server's prototypes; only the classes of an evaluation differ
    def predict_client(
        round_context: RoundContext,
        server,
        _state,
        batch: Batch,
    ) -> Array:
        return method.predict(round_context, server, batch)

    return method._replace(predict_client=predict_client, personal=True)


# ---- prototypes ------------------------------------------------------------------------


def merge_prototypes(run: Run, when: RuleTime) -> ServerRule:
    """Add the clients' sums of embeddings to those of earlier tasks: running means.

    Clients report all classes, since their tasks may have different ones. Embeddings are
    those of evaluation, with batch normalisation by the running statistics.
    """
    classes = run.sizes.classes
    width = run.network.width

    def init(_context: ClientContext) -> Sums:
        return empty_sums(classes, width)

    def add(step: ClientStep, total: Sums) -> Sums:
        feature = step.forward(step.trainable, train=False).feature
        batch = step.batch
        all_classes = jnp.arange(classes)
        feature_sum, examples = sum_by_class(feature, batch.label, all_classes, batch.mask)
        return Sums(total.feature + feature_sum, total.examples + examples)

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sums = jax.tree.map(jnp.add, params.classifier.sums, round.reports["embeddings"])
        classifier = params.classifier._replace(sums=sums)
        return ServerUpdate(params._replace(classifier=classifier), state)

    longest = functools.partial(longest_feature, run)
    possible = functools.partial(possible_sums, longest=longest)
    report = Report("embeddings", init, add, merge="sum", possible=possible)
    return ServerRule("prototypes", update, reports=(report,), when=when)


# ---- training of the embedding ---------------------------------------------------------


def episodes() -> ClientRule:
    """Train on an episode per batch (`episode_loss`) in the first task only."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
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
    """Return the loss of prototypical networks on one batch (Snell et al. 2017,
    algorithm 1).

    Every second example supports its class's prototype, the others are queries, and their
    negative squared distances to the prototypes are the logits. Queries of classes
    without support do not count.

    Each epoch has a new order of examples, so an episode's halves are random. An episode
    has the classes and examples of the batch; the paper draws a fixed number of both.
    """
    is_support = jnp.arange(len(label)) % 2 == 0
    sums, examples = sum_by_class(feature, label, classes, mask & is_support)
    prototypes, present = class_means(sums, examples)
    position = jnp.argmax(label[:, None] == classes, axis=1)
    is_query = mask & ~is_support & present[position]
    return dce_loss(distances(feature, prototypes, "squared"), position, present, is_query)
