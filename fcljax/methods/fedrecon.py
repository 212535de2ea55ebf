"""FedRecon: federated reconnaissance by a prototypical network (Hendryx et al. 2021).

Clients embed the rows of their new classes and send, for each class, the sum of the embeddings and how many
there are; the server merges these into prototypes, the means over all rows ever sent, so that a class that is
met again, by whomever and in whichever task, is refined. The nearest prototype by Euclidean distance wins.
Nothing iterates in the stream.

With a frozen embedding (the adapter `linear`, the default) this is FedNCM with `classifier` nearest, whose
sums are the paper's online averages: the two papers have the same method there, and the same numbers. What
FedRecon has besides is how its embedding comes to be: by training on base classes, in episodes (prototypical
networks, Snell et al. 2017). The paper does that beforehand and centrally. Here the adapter `full` does it in
the first task, in whose rounds clients train by episodes and the server averages; then the embedding is
frozen for good. Later tasks still play their rounds, in which nothing changes but by the rounding of means.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.models.heads import class_sums
from fcljax.models.prototypes import class_means, dce_loss, distances
from fcljax.parts.classifiers import Sums, empty_sums, nearest_mean
from fcljax.parts.federate import Collect, Run, Seen, ServerStep, Survey, Term, federate
from fcljax.parts.learner import Learner, Model, Objective, learner
from fcljax.types import Aggregate, ClientContext, Method, RoundContext, Sizes


@dataclasses.dataclass(frozen=True)
class FedReconOptions:
    """Options of FedRecon."""

    evaluated: Literal["server", "clients"] = "server"
    """Where the prototypes are evaluated: on all classes so far, or per client on the classes that it has
    learned, as in VFCL's tables."""


def fedrecon(options: FedReconOptions, run: Run) -> Method:
    """FedRecon as a method; with an adapter that trains, it does so in the first task."""
    width, sizes, trains = run.network.width, run.sizes, not run.adapter.plain
    model = learner(run.network, run.adapter, nearest_mean(width, sizes.classes))
    # the first task's prototypes are those of the embedding that it ends with
    survey = Survey(merging(sizes, width), "closing" if trains else "opening", run.train.batch_size)
    terms = (episodes(),) if trains else ()
    method = federate(
        model,
        sizes,
        run.train if trains else None,
        (*terms, *run.terms),
        surveys=(survey,),
        objective=Objective(weight=0.0),
        aggregation=run.aggregation,
    )
    if options.evaluated == "server":
        return method
    everybodys = lambda round_context, server, state, batch: method.predict(round_context, server, batch)
    return method._replace(predict_client=everybodys, personal=True)


# ---- prototypes --------------------------------------------------------------------------------------------


def merging(sizes: Sizes, width: int) -> ServerStep:
    """Sums of embeddings of all classes go up, since clients' tasks may have different ones, and are added to
    those of all tasks before: the running means of what anybody ever sent.

    Embeddings are those of evaluation: batch normalisation by the running statistics.
    """

    def look(model: Learner, seen: Seen, total: Sums) -> Sums:
        context, batch, classes = seen.context, seen.batch, jnp.arange(sizes.classes)
        output = model.forward(context.frozen, context.cached, seen.part, batch, context.task, False)
        more, rows = class_sums(output.feature, batch.label, classes, batch.mask)
        return Sums(total.feature + more, total.rows + rows)

    def step(
        round_context: RoundContext,
        model: Learner,
        params: Model,
        state: tuple,
        aggregate: Aggregate,
        key: Array,
    ):
        del round_context, model, key
        sums = jax.tree.map(jnp.add, params.classifier.sums, aggregate.sum["embeddings"])
        return params._replace(classifier=params.classifier._replace(sums=sums)), state, {}

    empty = lambda context: empty_sums(sizes.classes, width)
    return ServerStep("prototypes", step, collects=(Collect("embeddings", empty, look, channel="sum"),))


# ---- training of the embedding -----------------------------------------------------------------------------


def episodes() -> Term:
    """In the first task every batch is an episode (`episode_loss`); later nothing changes."""

    def loss(model: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del model, memory
        batch, task = seen.batch, seen.context.task
        value = episode_loss(seen.output.feature, batch.label, task.classes, batch.mask)
        return jnp.where(task.index == 0, value, 0.0)

    def limit(context: ClientContext, part: Model) -> Model:
        """Weight decay and running statistics stop too."""
        first = context.task.index == 0
        frozen = context.payload.part
        pick = lambda new, old: jax.tree.map(lambda a, b: jnp.where(first, a, b), new, old)
        return part._replace(adapter=pick(part.adapter, frozen.adapter), stats=pick(part.stats, frozen.stats))

    return Term("episodes", loss, limit=limit)


def episode_loss(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    classes: Int[Array, " Ct"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """Prototypical networks' loss (Snell et al. 2017, algorithm 1) on one batch: every other row supports its
    class's prototype, the rest are queries, and their negative squared distances to the prototypes are the
    logits. Queries of classes without support do not count.

    Batches come in a new order in every epoch, so that an episode's halves are random; its classes and the
    rows of each are those of the batch, where the paper draws a fixed number of both.
    """
    support = jnp.arange(len(label)) % 2 == 0
    prototypes, present = class_means(*class_sums(feature, label, classes, mask & support))
    place = jnp.argmax(label[:, None] == classes, axis=1)
    queries = mask & ~support & present[place]
    return dce_loss(distances(feature, prototypes, "squared"), place, present, queries)
