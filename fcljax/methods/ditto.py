"""Ditto: a personal model beside the global one (Li et al., ICML 2021, arXiv 2012.04221).

    client    trains the global model w as in FedAvg and sends it
              then trains its own model v on   L_ce(v) + lambda / 2 ||v - w_t||^2,   w_t what it was sent
    server    averages the global models

The larger lambda, the nearer a client's own model stays to the global one. Clients are evaluated with their
own models, which they keep over rounds and tasks (algorithm 1); the global model is FedAvg's. v has one
meaning in all tasks, so adapters of which each task has parameters of its own are refused.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.parts.client import ClientPass, ClientRule, ClientStep, Training
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Adapter, Loss, Params, all_last, cross_entropy_loss
from fcljax.settings import Preset
from fcljax.types import Batch, ClientContext, Method, RoundContext, View


@dataclasses.dataclass(frozen=True)
class DittoOptions:
    """Options of Ditto."""

    personal_weight: float = 1.0
    """Weight lambda that keeps a client's personal model close to the global one."""


PRESETS = {"intended": Preset(DittoOptions(), adapters=(LoraOptions(lora_pairs="one"),))}


class Personal(NamedTuple):
    """A client that trains its own model."""

    model: Params
    """v."""
    optimiser: PyTree


def ditto(options: DittoOptions, run: Run) -> Method:
    """Ditto as a method.

    Raises:
      InputError: for an adapter that trains other parameters in each task.
    """
    model = linear_learner(run)
    loss = cross_entropy_loss()
    rule = personal_model(options.personal_weight, loss, run.training, run.adapter)
    method = federate(run, model, loss=loss, client_rules=(rule,))

    def predict_client(round_context: RoundContext, server: ServerState, state: tuple, batch: Batch) -> Array:
        params = model.merge(server.params, round_context.task, state[0])
        return method.predict(round_context, server._replace(params=params), batch)

    return method._replace(predict_client=predict_client, personal=True)


def personal_model(weight: float, loss: Loss, training: Training, adapter: Adapter) -> ClientRule:
    """After training, as many epochs on the client's own model; its state is that model.

    Args:
      weight: lambda.
      loss: the clients' own.
      training: epochs, batch size, optimiser and learning rate.
      adapter: for its learning rate; it must train the same parameters in every task.
    """
    rate = adapter.rate

    def init(key: PRNGKeyArray, trainable: Params) -> Params:
        del key
        if not all_last(adapter, trainable.adapter):
            raise InputError(
                "adapter: ditto keeps a client's own model over tasks, and this adapter trains other "
                "parameters in each; nearest: --adapter lora --lora-pairs one"
            )
        return trainable

    def start(context: ClientContext, model: Params, key: PRNGKeyArray) -> Personal:
        del context, key
        return Personal(model, training.optimiser.init(model))

    def end(context: ClientContext, memory: Personal, trainable: Params, state: Params) -> Params:
        del context, trainable, state
        return memory.model

    def step(step: ClientStep, memory: Personal) -> Personal:
        gradient = jax.grad(functools.partial(personal_loss, weight, loss, step))(memory.model)
        direction, optimiser = training.optimiser.update(gradient, memory.optimiser, memory.model)
        by: Params = optax.tree.scale(-training.lr, direction)
        if rate is not None:
            by = by._replace(adapter=optax.tree.scale(rate / training.lr, by.adapter))
        moved: Params = optax.tree.add(memory.model, by)
        return Personal(moved._replace(stats=step.forward(memory.model).stats), optimiser)

    view = View(training.epochs, training.batch_size)
    own = ClientPass("after_training", view, step, trains=True)
    return ClientRule("ditto", None, init, start, (own,), end)


def personal_loss(weight: float, loss: Loss, step: ClientStep, model: Params) -> Float[Array, ""]:
    """L_ce(v) + lambda / 2 ||v - w_t||^2 (eq. 1)."""
    value = loss.value(step.forward(model), step.batch, step.context.task)
    by = optax.tree.sub(model._replace(stats=()), step.context.payload.trainable._replace(stats=()))
    return value + weight / 2 * optax.tree.norm(by, squared=True)
