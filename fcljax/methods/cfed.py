"""CFeD: continual federated learning with distillation (Ma et al., IJCAI 2022), as its
release trains it and HePCo compares with it.

Every client has unlabelled images of a surrogate data set.

    learners    train on the task by cross-entropy
    reviewers   (a share of the clients, from the second task on) do not learn the task: they
                distil the task's first model on their shard of the surrogate images
    server      averages both; optionally it distils the clients' models into the average on
                surrogate images

The release draws learners and reviewers independently, and a reviewer passes over its
shard. Here a client is one of the two, drawn anew in every round, and a reviewer takes as
many steps as on its own examples.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, UInt8

from fcljax.errors import InputError
from fcljax.methods.prompted import WHOLE
from fcljax.models.heads import distillation
from fcljax.options import SurrogateOptions, option
from fcljax.parts import task_start
from fcljax.parts.client import ClientRule, ClientStep, OfEachClient
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss, replaced_loss
from fcljax.parts.optimise import optimise
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.types import Frozen, LearningRate, Method, Task, Weighted


@dataclasses.dataclass(frozen=True)
class CFeDOptions(SurrogateOptions):
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


PRESETS = {name: preset._replace(options=CFeDOptions()) for name, preset in WHOLE.items()}


def cfed(options: CFeDOptions, run: Run) -> Method:
    """Compose CFeD on any adapter."""
    server_rules = [
        task_start.send_start_of_task(),
        roles(options.reviewer_share, run.sizes.clients),
    ]
    if options.server_steps:
        server_rules.append(server_distillation(options))
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss(),
        client_rules=(learn_or_review(options, run.sizes.clients),),
        server_rules=tuple(server_rules),
    )


# ---- who reviews -----------------------------------------------------------------------


def roles(share: float, clients: int) -> ServerRule:
    """Draw the reviewers of the next round, and send a mask of them.

    Args:
      share: of the clients; no client reviews in the first task.
      clients: K.
    """
    count = round(share * clients)

    def init(_params: Params, _trainable: Params) -> Bool[Array, " K"]:
        return jnp.zeros(clients, bool)

    def update(round: ServerRound, params: Params, _reviews: Bool[Array, " K"]) -> ServerUpdate:
        return ServerUpdate(params, jax.random.permutation(round.key, clients) < count)

    # the first task has no old classes to review
    def sends(task: Task, reviews: Bool[Array, " K"]) -> Bool[Array, " K"]:
        return reviews & (task.index > 0)

    return ServerRule("roles", update, init, sends)


# ---- client ----------------------------------------------------------------------------


def learn_or_review(options: CFeDOptions, clients: int) -> ClientRule:
    """Add the whole loss: a learner's cross-entropy, or a reviewer's distillation."""
    learn = cross_entropy_loss(options.local_classes)

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        context = step.context
        # `cond` computes only one of the two, unless clients are batched by vmap
        return jax.lax.cond(
            context.payload.sent["roles"][context.client.id],
            lambda: options.distill_weight * review(step, clients, options.distill_temperature),
            lambda: learn.value(step.output, step.batch, context.task),
        )

    return ClientRule("cfed", loss)


def review(step: ClientStep, clients: int, temperature: float) -> Float[Array, ""]:
    """Return the distillation loss towards the model that the task began with.

    It is taken on as many of the client's surrogate images as the batch has examples.
    """
    image = surrogate(step.context.frozen)
    start, end = shard(step.context.client.id, clients, len(image))
    # other images of the shard in every step
    index = jax.random.randint(step.key, step.batch.mask.shape, start, end)
    return task_start.distil_start(step, image[index] / 255, temperature)


def shard(
    client: Int[Array, ""],
    clients: int,
    images: int,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the range [start, end) of a client's surrogate images.

    Shards are equal. They overlap if there are fewer images than clients.
    """
    start = client * images // clients
    end = (client + 1) * images // clients
    # at least one image, also where there are more clients than images
    return start, jnp.maximum(end, start + 1)


def surrogate(frozen: Frozen) -> UInt8[Array, "S *shape"]:
    """Return the surrogate images.

    Raises:
      InputError: if there are none.
    """
    if not len(frozen.surrogate):
        raise InputError("surrogate: cfed reviews images of another data set, and Frozen.surrogate has none")
    return frozen.surrogate


# ---- server ----------------------------------------------------------------------------


def server_distillation(options: CFeDOptions) -> ServerRule:
    """Distil the clients' models into the averaged one, each on surrogate images of its own.

    From the second task on the model that the task began with is a teacher too.
    """

    def update(round: ServerRound, params: Params, start: task_start.Start) -> ServerUpdate:
        task = round.task
        start = task_start.start_of(round, start)
        mean = round.learner.trainable(params, task)

        def append(clients: Array, start: Array) -> Array:
            return jnp.concatenate([clients, start[None]])

        client_models = task_start.valid_parameters(round, mean)
        # parameters of client rules are not part of a teacher
        start_model = start.trainable._replace(extra={})
        teachers = Ensemble(
            jax.tree.map(append, client_models, start_model),
            # the task's first model comes last, and counts from the second task on
            jnp.append(round.valid, task.index > 0),
        )
        # without an upload there is no teacher
        steps = jnp.where(jnp.any(round.valid), options.server_steps, 0)
        trainable, loss = _distil(options, round, params, teachers, steps)
        return ServerUpdate(round.learner.merge(params, task, trainable), start, {"loss": loss})

    reports = (OfEachClient("trainable"),)
    return ServerRule("distillation", update, task_start.no_start, reports=reports)


class Ensemble(NamedTuple):
    """J models that are distilled into the averaged one."""

    trainable: Params
    """Leaves [J, ...]."""
    valid: Bool[Array, " J"]
    """Which of them count."""


def _distil(
    options: CFeDOptions,
    round: ServerRound,
    params: Params,
    teachers: Ensemble,
    steps: Int[Array, ""],
) -> tuple[Params, Weighted]:
    """Take `steps` steps of Adam on the trainable parameters; return them and the mean loss."""
    image = surrogate(round.frozen)
    count = len(teachers.valid)
    # each teacher judges images of its own: an equal share of the batch, rounded up
    shape = (count, -(-options.server_batch // count))

    def loss(trainable: Params, i: Array) -> Float[Array, ""]:
        key = jax.random.fold_in(round.key, i)
        batch = image[jax.random.randint(key, shape, 0, len(image))]
        return teachers_loss(options, round, params, teachers, batch, trainable)

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
    """Return the distillation loss of the seen classes, the mean over valid teachers' images.

    Args:
      options: weight and temperature.
      round: of the server.
      params: the averaged model.
      teachers: J models.
      image: the images of each teacher, grey levels 0..255.
      trainable: the student.
    """
    learner = round.learner
    task = round.task

    def logits(trainable: Params, image: Array) -> Float[Array, "images C"]:
        batch = task_start.unlabelled(learner, image / 255)
        return learner.forward(round.frozen, params, trainable, batch, task, False).logits

    # one teacher after the other, so that only one's activations are in memory
    target = jax.lax.map(lambda teacher: logits(*teacher), (teachers.trainable, image))
    student = logits(trainable, image.reshape(-1, *image.shape[2:]))
    target = target.reshape(student.shape)
    # an invalid client has the mean's parameters, which are finite, and is masked here
    counts = jnp.repeat(teachers.valid, image.shape[1])
    loss = distillation(student, target, task.seen, counts, options.distill_temperature)
    return options.distill_weight * loss
