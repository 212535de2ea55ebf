"""FedRecon: federated reconnaissance by a prototypical network (Hendryx et al. 2021).

Clients embed the rows of their new classes and send, for each class, the sum of the embeddings and how many
there are; the server merges these into prototypes, the means over all rows ever sent, so that a class that is
met again, by whomever and in whichever task, is refined. The nearest prototype by Euclidean distance wins.
Nothing iterates in the stream.

With a frozen embedding (the adapter `linear`, the default) this is FedNCM with `classifier` nearest, whose
running sums are the paper's online averages: the two papers have the same method there, and the same numbers.
What FedRecon has besides is how its embedding comes to be: by training on base classes, in episodes
(prototypical networks, Snell et al. 2017). The paper does that beforehand and centrally. Here the adapter
`full` does it in the first task, in whose rounds clients train by episodes and the server averages; then the
embedding is frozen for good. Later tasks still play their rounds, in which nothing changes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.federate import Collect, Kit, Seen, Survey, Term, federate
from fcljax.learner import Learner, Model, Objective, learner
from fcljax.methods.fedavg import NoOptions
from fcljax.methods.fedncm import class_mean_step
from fcljax.models.classifiers import Sums, add_batch, empty_sums, nearest_mean
from fcljax.models.heads import class_sums
from fcljax.models.prototypes import class_means, dce_loss, distances
from fcljax.types import Ctx, Method, Setting


def fedrecon(options: NoOptions, kit: Kit) -> Method:
    """FedRecon as a method; with an adapter that trains, it does so in the first task."""
    del options
    width, setting, trains = kit.network.width, kit.setting, not kit.adapter.plain
    model = learner(kit.network, kit.adapter, nearest_mean(width, setting.classes))
    step = class_mean_step(embedded_sums(setting, width))
    # the first task's prototypes are those of the embedding that it ends with
    survey = Survey(step, "closing" if trains else "opening", kit.train.batch_size)
    terms = (episodes(),) if trains else ()
    return federate(
        model, setting, kit.train if trains else None, (*terms, *kit.terms), surveys=(survey,),
        objective=Objective(weight=0.0), aggregation=kit.aggregation,
    )  # fmt: skip


def embedded_sums(setting: Setting, width: int) -> Collect:
    """Sums of the embeddings of the task's classes, as evaluation computes them: batch normalisation by the
    running statistics."""

    def look(model: Learner, seen: Seen, total: Sums) -> Sums:
        ctx, batch = seen.ctx, seen.batch
        output = model.forward(ctx.frozen, ctx.held, seen.part, batch, ctx.task, False)
        return add_batch(total, output.feature, batch, ctx.task)

    empty = lambda ctx: empty_sums(setting.task_classes, width)
    return Collect("class_sums", empty, look, channel="sum")


# ---- training of the embedding -----------------------------------------------------------------------------


def episodes() -> Term:
    """In the first task every batch is an episode (`episode_loss`); later nothing changes."""

    def loss(model: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del model, memory
        batch, task = seen.batch, seen.ctx.task
        value = episode_loss(seen.output.feature, batch.label, task.classes, batch.mask)
        return jnp.where(task.index == 0, value, 0.0)

    def limit(ctx: Ctx, part: Model) -> Model:
        """Weight decay and running statistics stop too."""
        first = ctx.task.index == 0
        frozen = ctx.wire.part
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
    prototypes, held = class_means(*class_sums(feature, label, classes, mask & support))
    place = jnp.argmax(label[:, None] == classes, axis=1)
    queries = mask & ~support & held[place]
    return dce_loss(distances(feature, prototypes, "squared"), place, held, queries)
