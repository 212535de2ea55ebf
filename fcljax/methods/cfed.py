"""CFeD: continual federated learning with distillation (Ma et al., IJCAI 2022), as its release trains it and
HePCo compares with it (specification A17).

Every client has unlabelled images of a surrogate data set.

    learners    train on the task by cross-entropy
    reviewers   (a share of the clients, from the second task on) do not learn the task but keep to the model
                that it began with, on their shard of the surrogate images
    server      averages both; if asked, it pulls the average to the clients' models on surrogate images

The release draws learners and reviewers independently and lets a reviewer go over its shard. Here a client is
one of the two, drawn anew in every round, and a reviewer takes as many steps as on its own examples.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, UInt8

from fcljax.errors import InputError
from fcljax.methods.prompted import WHOLE, PromptedOptions, epoch_schedule
from fcljax.models.heads import distillation
from fcljax.options import SurrogateOptions, option
from fcljax.parts.client import ClientRule, ClientStep, OfEachClient
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss, replaced_loss
from fcljax.parts.optimise import optimise
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.task_start import (
    Start,
    began_with,
    distil_start,
    no_start,
    send_start_of_task,
    unlabelled,
    valid_parameters,
)
from fcljax.types import Frozen, LearningRate, Method, Task, Weighted


@dataclasses.dataclass(frozen=True)
class CFeDOptions(SurrogateOptions, PromptedOptions):
    """Options of CFeD; the values are those of its release."""

    reviewer_share: float = option(0.4, most=1.0)
    """Fraction of the clients that review old classes, from the second task on."""
    distill_weight: float = 0.1
    """Weight of the distillation at clients and server."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the distillation."""
    local_classes: Literal["current", "seen", "all"] = "current"
    """Classes in the clients' cross-entropy; paper and release do not say."""
    server_steps: int = option(0, least=0)
    """Number of server steps per round that distil the clients' models (release: 0 on
    CIFAR-100)."""
    server_batch: int = 128
    """Surrogate images per step of the server, over all teachers."""
    server_lr: LearningRate = option(5e-5, positive=True, learning_rate=True)
    """Learning rate of the server's Adam."""


PRESETS = {
    name: preset._replace(options=CFeDOptions(epoch_schedule=preset.options.epoch_schedule))
    for name, preset in WHOLE.items()
}


def cfed(options: CFeDOptions, run: Run) -> Method:
    """CFeD as a method, on any adapter."""
    rules = (send_start_of_task(), roles(options.reviewer_share, run.sizes.clients))
    if options.server_steps:
        rules += (server_distillation(options),)
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss(),
        client_rules=(learn_or_review(options, run.sizes.clients),),
        server_rules=rules,
        learning_rate=epoch_schedule(options, run),
    )


# ---- who reviews -------------------------------------------------------------------------------------------


def roles(share: float, clients: int) -> ServerRule:
    """Which clients review in the next round: a share of them, drawn anew after every round, and nobody in
    the first task."""
    count = round(share * clients)

    def init(params: Params, trainable: Params) -> Bool[Array, " K"]:
        del params, trainable
        return jnp.zeros(clients, bool)

    def update(round: ServerRound, params: Params, drawn: Bool[Array, " K"]) -> ServerUpdate:
        del drawn
        return ServerUpdate(params, jax.random.permutation(round.key, clients) < count)

    def sends(task: Task, drawn: Bool[Array, " K"]) -> Bool[Array, " K"]:
        return drawn & (task.index > 0)

    return ServerRule("roles", update, init, sends)


# ---- client ------------------------------------------------------------------------------------------------


def learn_or_review(options: CFeDOptions, clients: int) -> ClientRule:
    """The whole loss: cross-entropy of a learner, or a reviewer's distillation of old classes."""
    learn = cross_entropy_loss(options.local_classes)

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        context = step.context
        # only one of them is computed where clients train one by one
        return jax.lax.cond(
            context.payload.sent["roles"][context.client.id],
            lambda: options.distill_weight * review(step, clients, options.distill_temperature),
            lambda: learn.value(step.output, step.batch, context.task),
        )

    return ClientRule("cfed", loss)


def review(step: ClientStep, clients: int, temperature: float) -> Float[Array, ""]:
    """Distillation from the model that the task began with, on as many of the client's surrogate images as
    the batch has examples."""
    image = surrogate(step.context.frozen)
    first, last = shard(step.context.client.id, clients, len(image))
    chosen = jax.random.randint(step.key, step.batch.mask.shape, first, last)
    return distil_start(step, image[chosen] / 255, temperature)


def shard(client: Int[Array, ""], clients: int, images: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The first and one after the last of a client's surrogate images: equal shards of all of them, which
    overlap if there are fewer images than clients."""
    first = client * images // clients
    return first, jnp.maximum((client + 1) * images // clients, first + 1)


def surrogate(frozen: Frozen) -> UInt8[Array, "S *shape"]:
    """The surrogate images.

    Raises:
      InputError: if there are none.
    """
    if not len(frozen.surrogate):
        raise InputError("surrogate: cfed reviews images of another data set, and Frozen.surrogate has none")
    return frozen.surrogate


# ---- server ------------------------------------------------------------------------------------------------


def server_distillation(options: CFeDOptions) -> ServerRule:
    """The averaged model distils the clients' models, and from the second task on also the one that the task
    began with: each teacher on surrogate images of its own."""

    def update(round: ServerRound, params: Params, start: Start) -> ServerUpdate:
        task = round.task
        start = began_with(round, start)
        mean = round.learner.trainable(params, task)

        def stack(many: Array, one: Array) -> Array:
            return jnp.concatenate([many, one[None]])

        before = start.trainable._replace(extra={})
        teachers = Ensemble(
            jax.tree.map(stack, valid_parameters(round, mean), before),
            jnp.append(round.valid, task.index > 0),
        )
        steps = jnp.where(jnp.any(round.valid), options.server_steps, 0)
        trainable, loss = _distil(options, round, params, teachers, steps)
        return ServerUpdate(round.learner.merge(params, task, trainable), start, {"loss": loss})

    return ServerRule("distillation", update, no_start, reports=(OfEachClient("trainable"),))


class Ensemble(NamedTuple):
    """J models that the averaged one distils."""

    trainable: Params
    """Leaves [J, ...]."""
    valid: Bool[Array, " J"]


def _distil(
    options: CFeDOptions, round: ServerRound, params: Params, teachers: Ensemble, steps: Int[Array, ""]
) -> tuple[Params, Weighted]:
    """So many steps of Adam on the trainable parameters, and the mean loss."""
    image = surrogate(round.frozen)
    count = len(teachers.valid)
    shape = (count, -(-options.server_batch // count))

    def loss(trainable: Params, i: Array) -> Float[Array, ""]:
        chosen = image[jax.random.randint(jax.random.fold_in(round.key, i), shape, 0, len(image))]
        return teachers_loss(options, round, params, teachers, chosen, trainable)

    start = round.learner.trainable(params, round.task)
    return optimise(loss, start, optax.adam(options.server_lr), steps)


def teachers_loss(
    options: CFeDOptions,
    round: ServerRound,
    params: Params,
    teachers: Ensemble,
    image: UInt8[Array, "J images *shape"],
    trainable: Params,
) -> Float[Array, ""]:
    """Distillation of the seen classes from each teacher on its own images; the mean over the images of valid
    teachers."""
    learner = round.learner
    task = round.task

    def logits(trainable: Params, image: Array) -> Float[Array, "images C"]:
        batch = unlabelled(learner, image / 255)
        return learner.forward(round.frozen, params, trainable, batch, task, False).logits

    # one teacher after the other: their activations are not needed together
    target = jax.lax.map(lambda one: logits(*one), (teachers.trainable, image))
    student = logits(trainable, image.reshape(-1, *image.shape[2:]))
    used = jnp.repeat(teachers.valid, image.shape[1])
    heat = options.distill_temperature
    loss = distillation(student, target.reshape(student.shape), task.seen, used, heat)
    return options.distill_weight * loss
