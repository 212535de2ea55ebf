"""CFeD: continual federated learning with distillation on images of another data set (Ma et al., IJCAI 2022),
as its release trains it and HePCo compares with it (specification A17).

Everybody has unlabelled images of a surrogate data set. From the second task on a share of the clients are
reviewers: they do not learn the task but keep to the model that it began with, on their shard of the
surrogate images; all others learn the task by cross-entropy. The server averages both. If asked, it then
pulls the average to the clients' models on surrogate images.

The release draws learners and reviewers independently and lets a reviewer go over its shard; here a client is
one of the two, drawn anew in every round, and a reviewer takes as many steps as it would on its own rows.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from fcljax.errors import InputError
from fcljax.methods.fedavg import averaging
from fcljax.methods.hepco.hepco import WHOLE, PromptedOptions, scheduled
from fcljax.models.heads import distillation
from fcljax.options import SurrogateOptions, option
from fcljax.parts.federate import Run, Seen, ServerStep, Term
from fcljax.parts.learner import Learner, Model, Objective, objective_loss
from fcljax.parts.task_start import (
    Start,
    began_with,
    distil_start,
    no_start,
    sound_parts,
    start_of_task,
    unlabelled,
)
from fcljax.types import Aggregate, Frozen, Method, RoundContext, Weighted


@dataclasses.dataclass(frozen=True)
class CFeDOptions(SurrogateOptions, PromptedOptions):
    """Options of CFeD; the values are those of its release."""

    reviewer_share: float = option(0.4, most=1.0)
    """Share of the clients that review old classes, from the second task on."""
    distill_weight: float = 0.1
    """Weight of the distillation, at clients and server."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the distillation."""
    local_classes: Literal["current", "seen", "all"] = "current"
    """Classes in the cross-entropy of the clients, which the sources leave open."""
    server_steps: int = option(0, least=0)
    """Steps of the server's distillation from the clients' models after a round (release: 0 on CIFAR-100)."""
    server_batch: int = 128
    """Surrogate images per step of the server, over all teachers."""
    server_lr: float = option(5e-5, positive=True)
    """Learning rate of the server's Adam."""


PRESETS = {
    name: preset._replace(options=CFeDOptions(epoch_schedule=preset.options.epoch_schedule))
    for name, preset in WHOLE.items()
}


def cfed(options: CFeDOptions, run: Run) -> Method:
    """CFeD as a method, on any adapter."""
    term = learn_or_review(options, run.sizes.clients)
    steps = (start_of_task(), roles(options.reviewer_share, run.sizes.clients))
    if options.server_steps:
        steps += (server_distillation(options),)
    return averaging(scheduled(run, options), Objective(weight=0.0), terms=(term,), steps=steps)


# ---- who reviews -------------------------------------------------------------------------------------------


def roles(share: float, clients: int) -> ServerStep:
    """Which clients review in the next round: a share of them, drawn anew after every round, and nobody in
    the first task."""
    count = round(share * clients)

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        drawn: Array,
        aggregate: Aggregate,
        key: Array,
    ):
        del round_context, learner, drawn, aggregate
        return params, jax.random.permutation(key, clients) < count, {}

    return ServerStep(
        "roles",
        step,
        init=lambda params, part: jnp.zeros(clients, bool),
        sends=lambda task, drawn: drawn & (task.index > 0),
    )


# ---- client ------------------------------------------------------------------------------------------------


def learn_or_review(options: CFeDOptions, clients: int) -> Term:
    """The whole loss: cross-entropy of a learner, or a reviewer's distillation of old classes."""
    objective = Objective(options.local_classes)

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del memory
        context = seen.context
        # only one of them is computed where clients train one by one
        return jax.lax.cond(
            context.payload.sent["roles"][context.client.id],
            lambda: options.distill_weight * review(learner, seen, clients, options.distill_temperature),
            lambda: objective_loss(objective, seen.output, seen.batch, context.task),
        )

    return Term("cfed", loss, reads=("start", "roles"))


def review(learner: Learner, seen: Seen, clients: int, temperature: float) -> Float[Array, ""]:
    """Distillation from the model that the task began with, on as many of the client's surrogate images as
    the batch has rows."""
    context = seen.context
    image = surrogate(context.frozen)
    first, last = shard(context.client.id, clients, len(image))
    chosen = jax.random.randint(seen.key, seen.batch.mask.shape, first, last)
    return distil_start(learner, seen, image[chosen] / 255, temperature)


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


def server_distillation(options: CFeDOptions) -> ServerStep:
    """The averaged model distils the clients' models, and from the second task on also the one that the task
    began with: each teacher on surrogate images of its own."""

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        start: Start,
        aggregate: Aggregate,
        key: Array,
    ):
        task, start = round_context.task, began_with(round_context, start)
        part = learner.part(params, task)
        clients = sound_parts(part, aggregate)
        stack = lambda many, one: jnp.concatenate([many, one[None]])
        teachers = jax.tree.map(stack, clients, start.part._replace(extra={}))
        alive = jnp.append(aggregate.valid, task.index > 0)
        steps = jnp.where(jnp.any(aggregate.valid), options.server_steps, 0)
        part, found = _distil(options, learner, round_context, params, part, teachers, alive, steps, key)
        return learner.put(params, task, part), start, {"loss": found}

    return ServerStep("distillation", step, init=no_start, sees_parts=True, changes=True)


def _distil(
    options: CFeDOptions,
    learner: Learner,
    round_context: RoundContext,
    params: Model,
    part: Model,
    teachers: Model,
    alive: Bool[Array, " J"],
    steps: Int[Array, ""],
    key: PRNGKeyArray,
) -> tuple[Model, Weighted]:
    """So many steps of Adam on a part, and the mean loss."""
    image, adam = surrogate(round_context.frozen), optax.adam(options.server_lr)
    shape = (len(alive), -(-options.server_batch // len(alive)))

    def step(i: Array, carry: tuple) -> tuple:
        part, optimiser, total = carry
        chosen = image[jax.random.randint(jax.random.fold_in(key, i), shape, 0, len(image))]
        loss = functools.partial(
            teachers_loss, options, learner, round_context, params, teachers, alive, chosen
        )
        value, gradient = jax.value_and_grad(loss)(part)
        update, optimiser = adam.update(gradient, optimiser)
        return optax.apply_updates(part, update), optimiser, total + value

    part, _, total = jax.lax.fori_loop(0, steps, step, (part, adam.init(part), jnp.zeros(())))
    return part, Weighted(total, steps.astype(jnp.float32))


def teachers_loss(
    options: CFeDOptions,
    learner: Learner,
    round_context: RoundContext,
    params: Model,
    teachers: Model,
    alive: Bool[Array, " J"],
    image: UInt8[Array, "J rows *shape"],
    part: Model,
) -> Float[Array, ""]:
    """Distillation of the seen classes from each teacher on its own images; the mean over the images of
    teachers that are alive."""
    task = round_context.task

    def logits(part: Model, image: Array) -> Float[Array, "rows C"]:
        batch = unlabelled(learner, image / 255)
        return learner.forward(round_context.frozen, params, part, batch, task, False).logits

    # one teacher after the other: their activations are not needed together
    target = jax.lax.map(lambda one: logits(*one), (teachers, image))
    student = logits(part, image.reshape(-1, *image.shape[2:]))
    used, heat = jnp.repeat(alive, image.shape[1]), options.distill_temperature
    loss = distillation(student, target.reshape(student.shape), task.seen, used, heat)
    return options.distill_weight * loss
