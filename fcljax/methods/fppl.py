"""FPPL: an efficient and non-IID robust federated continual learning framework (He et al. 2024).

arXiv 2411.01904. Clients learn a prompt per task that is fused with the frozen prompts of earlier tasks by a
gate on the un-prompted features (`adapters/prompts.py`); class prototypes go up, are averaged, come back to
pull the clients' features together (unified representation), and fill a pool on which the server removes the
bias of the averaged classifier. Where paper and release differ, a field of `FPPLOptions` says which one is
meant.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.methods.fppl_robust import per_class, screen_prototypes
from fcljax.models.heads import Head, Reduction, apply_head, cosine, cross_entropy, mask_logits, reduce_rows
from fcljax.options import option
from fcljax.parts.classifiers import linear
from fcljax.parts.federate import Run, Seen, ServerStep, Term, federate
from fcljax.parts.learner import Learner, Model, Objective, learner
from fcljax.parts.reports import Prototypes, class_prototypes
from fcljax.settings import Preset
from fcljax.types import Aggregate, Method, RoundContext, Task, View, Weighted

Average = Literal["holders", "batch"]


@dataclasses.dataclass(frozen=True)
class FPPLOptions:
    """Options of FPPL."""

    temperature: float = option(0.2, positive=True)
    """Temperature tau of the unified-representation loss."""
    unified_weight: float = 1.0
    """Weight lambda of the unified-representation loss."""
    server_epochs: int = 5
    """Epochs of the server's debiasing per round."""
    server_batch_size: int | None = option(None, unset="the clients' batch size")
    """Prototypes per step of the server's debiasing."""
    server_lr: float | None = option(None, positive=True, unset="the clients' learning rate")
    """Learning rate of the server's debiasing."""
    wo_unified: bool = False
    """Ablation: no unified-representation loss."""
    wo_debias: bool = False
    """Ablation: the server does not train the classifier."""
    wo_pool: bool = False
    """Ablation: debias on the current task's prototypes only."""
    local_classes: Literal["current", "all"] = "current"
    """Classes in the cross-entropy of the clients."""
    reduction: Reduction = "mean"
    """Reduction of the losses over a batch, at clients and server."""
    unified_average: Average = "holders"
    """Whether the unified loss averages the examples whose class has a prototype, or the whole batch."""
    prototype_view: Literal["augmented", "clean"] = "augmented"
    """Images from which local prototypes are computed."""
    prototype_download: Literal["current", "seen"] = "current"
    """Prototypes that the server sends: of the current task's classes, or of all seen classes."""


PRESETS = {
    "intended": Preset(FPPLOptions()),
    "improved": Preset(FPPLOptions(prototype_view="clean")),
    "paper": Preset(FPPLOptions(local_classes="all", reduction="sum", unified_average="batch")),
    "released": Preset(FPPLOptions(prototype_download="seen")),
}


def three_keys(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The adapter draws prompts and gate from the first two of three keys, the classifier from the third."""
    return key, jax.random.split(key, 3)[2]


def fppl(options: FPPLOptions, run: Run) -> Method:
    """FPPL as a method, on any adapter. `options` must be resolved."""
    sizes, width = run.sizes, run.network.width
    model = learner(run.network, run.adapter, linear(width, sizes.classes), three_keys)
    terms = () if options.wo_unified else (unified_term(options),)
    reads_prototypes = not (options.wo_unified and options.wo_debias)
    objective = Objective(options.local_classes, options.reduction)
    return federate(
        model,
        sizes,
        run.train,
        terms + run.terms,
        steps=(prototype_step(options, run),) if reads_prototypes else (),
        objective=objective,
        aggregation=run.aggregation,
    )


# ---- client ------------------------------------------------------------------------------------------------


def unified_term(options: FPPLOptions) -> Term:
    """lambda L_ur (eq. 6), on the global prototypes that came down."""
    average, reduction = options.unified_average, options.reduction

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del learner, memory
        task, batch = seen.context.task, seen.batch
        prototypes, classes = _of_task(seen.context.payload.sent["debias"], task, options)
        pull = unified_representation_loss(
            seen.output.feature,
            batch.label,
            batch.mask,
            prototypes,
            classes,
            options.temperature,
            average,
            reduction,
        )
        return options.unified_weight * pull

    return Term("unified", loss, reads=("debias",))


def _of_task(received: Prototypes, task: Task, options: FPPLOptions) -> tuple[Prototypes, Array]:
    """G of the current task as the client reads it, with the class of each row."""
    if options.prototype_download == "current":
        return received, task.classes
    return received._replace(present=received.present & task.current), jnp.arange(task.current.shape[0])


def unified_representation_loss(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    prototypes: Prototypes,
    classes: Int[Array, " Ct"],
    temperature: float,
    average: Average = "holders",
    reduction: Reduction = "mean",
) -> Float[Array, ""]:
    """L_ur (FPPL eq. 6): InfoNCE of each feature against the global prototypes of `classes` that exist.

    Row a of the prototypes is class classes[a]. Rows of the batch whose class has no prototype are left out,
    of the average too unless `average` is "batch"; 0 if no row is left.
    """
    similarity = cosine(feature, jax.lax.stop_gradient(prototypes.vector)) / temperature
    positive = (label[:, None] == classes) & prototypes.present
    has_prototype = mask & jnp.any(positive, axis=-1)
    others = jax.nn.logsumexp(mask_logits(similarity, prototypes.present), axis=-1)
    loss = others - jnp.sum(similarity * positive, axis=-1)
    return reduce_rows(
        loss, has_prototype, jnp.sum(has_prototype if average == "holders" else mask), reduction
    )


# ---- server ------------------------------------------------------------------------------------------------


def prototype_step(options: FPPLOptions, run: Run) -> ServerStep:
    """Put what clients sent into the pool, send its means G down (eq. 5), debias the classifier (eq. 4).

    Under a robust aggregation rule G is merged by that rule, class by class, and the debias leaves out the
    prototypes that lie far from it.
    """
    sizes, width, batch_size = run.sizes, run.network.width, run.train.batch_size
    merge, robust = per_class(run.aggregation), run.aggregation.reduce is not None
    reduction = options.reduction
    everyone, equal = jnp.ones(sizes.clients, bool), jnp.ones(sizes.clients)

    def init(params: Model, part: Model) -> Prototypes:
        del params, part
        shape = (sizes.clients, sizes.classes)
        return Prototypes(jnp.zeros((*shape, width)), jnp.zeros(shape, bool))

    def merged(pool: Prototypes) -> Prototypes:
        return Prototypes(*merge(pool.vector, pool.present, equal, everyone, jax.random.key(0)))

    def sends(task: Task, pool: Prototypes) -> Prototypes | tuple[()]:
        if options.wo_unified:
            return ()
        means = merged(pool)
        return _rows(means, task.classes) if options.prototype_download == "current" else means

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        pool: Prototypes,
        aggregate: Aggregate,
        key,
    ):
        del learner
        task, sent = round_context.task, aggregate.gather["prototypes"]
        pool = store_prototypes(pool, sent, aggregate.id, aggregate.valid, task.classes)
        if options.wo_debias:
            return params, pool, {}
        present = pool.present & (task.current if options.wo_pool else task.seen)
        if robust:
            present = screen_prototypes(pool.vector, present, merged(pool).vector, everyone)
        head, metrics = debias(
            params.classifier,
            pool._replace(present=present),
            key,
            options.server_epochs,
            options.server_batch_size or batch_size,
            options.server_lr or run.train.lr,
            reduction,
        )
        return params._replace(classifier=head), pool, metrics

    view = View(1, batch_size, augment=options.prototype_view == "augmented")
    # local prototypes C_k^y: the plain mean of c_x over the client's rows of a class, under the model that it
    # has just trained
    collects = (class_prototypes("prototypes", sizes.task_classes, width, view),)
    return ServerStep("debias", step, init, sends, collects, follows_rule=True)


def store_prototypes(
    pool: Prototypes,
    sent: Prototypes,
    id_: Int[Array, " P"],
    valid: Bool[Array, " P"],
    classes: Int[Array, " Ct"],
) -> Prototypes:
    """The pool [K, C, ...] with the rows [P, Ct, ...] that the valid clients sent for the current task in
    place of their older ones; entries of other tasks and of absent clients stay."""
    clients, total = pool.present.shape
    row = jnp.where(valid, id_, clients)[:, None]
    column = jnp.where(classes >= 0, classes, total)[None, :]
    put = lambda buffer, x: buffer.at[row, column].set(x, mode="drop")
    return jax.tree.map(put, pool, sent)


def debias(
    head: Head,
    pool: Prototypes,
    key: PRNGKeyArray,
    epochs: int,
    batch_size: int,
    lr: float,
    reduction: Reduction = "mean",
) -> tuple[Head, dict[str, Weighted]]:
    """Train the classifier alone on every stored prototype (FPPL eq. 4): new Adam, shuffled batches, classes
    without a prototype masked. pool: vectors [K, C, width] and held [K, C], a training row per held entry."""
    feature, present = pool.vector.reshape(-1, pool.vector.shape[-1]), pool.present.reshape(-1)
    label = jnp.broadcast_to(jnp.arange(pool.present.shape[1]), pool.present.shape).reshape(-1)
    allowed, count, adam = jnp.any(pool.present, axis=0), jnp.sum(present), optax.adam(lr)
    batches = -(-count // batch_size)
    # Held rows first, in a fresh random order every epoch.
    uniform = lambda epoch: jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)
    order = jnp.argsort(jnp.where(present, jax.vmap(uniform)(jnp.arange(epochs)), 2.0), axis=-1)

    def step(i, carry):
        head, optimiser, total = carry
        within = (i % batches) * batch_size + jnp.arange(batch_size)
        rows, mask = order[i // batches, jnp.minimum(within, present.shape[0] - 1)], within < count

        def loss_of(head):
            return cross_entropy(apply_head(head, feature[rows]), label[rows], allowed, mask, reduction)

        loss, gradient = jax.value_and_grad(loss_of)(head)
        update, optimiser = adam.update(gradient, optimiser)
        return optax.apply_updates(head, update), optimiser, total + loss

    start = (head, adam.init(head), jnp.zeros(()))
    head, _, total = jax.lax.fori_loop(0, epochs * batches, step, start)
    return head, {"loss": Weighted(total, (epochs * batches).astype(jnp.float32))}


def _rows(prototypes: Prototypes, classes: Int[Array | np.ndarray, " Ct"]) -> Prototypes:
    """The prototypes of `classes`; padding (-1) holds none."""
    index = jnp.maximum(classes, 0)
    return Prototypes(prototypes.vector[index], prototypes.present[index] & (classes >= 0))
