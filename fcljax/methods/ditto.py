"""Ditto: a personal model beside the global one (Li et al., ICML 2021, arXiv 2012.04221).

    client    trains the global model w as in FedAvg and sends it
              then trains its personal model v on  L_ce(v) + lambda / 2 ||v - w_t||^2,
              where w_t is the global model that it received                     (eq. 1)
    server    averages the global models

The larger lambda, the nearer a personal model stays to the global one. Clients are
evaluated with their personal models, which they keep over rounds and tasks (algorithm 1);
the global model is FedAvg's. v has one meaning in all tasks, so adapters of which each
task has its own parameters are refused.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.parts.client import ClientPass, ClientRule, ClientStep, Training
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Adapter, Loss, Params, check_all_last, cross_entropy_loss
from fcljax.settings import Preset, with_mini
from fcljax.types import Batch, ClientContext, Method, RoundContext, View


@dataclasses.dataclass(frozen=True)
class DittoOptions:
    """Options of Ditto."""

    personal_weight: float = 1.0
    """Weight lambda that keeps a client's personal model close to the global one."""


_LORA = LoraOptions(lora_pairs="one")
PRESETS = with_mini({"intended": Preset(DittoOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=1e-3)


class Personal(NamedTuple):
    """The personal model of a client while it trains."""

    model: Params
    """v."""
    optimiser: PyTree
    """The optimiser's state."""
    steps: Int[Array, ""]
    """Steps that it took in this round."""


def ditto(options: DittoOptions, run: Run) -> Method:
    """Compose Ditto.

    Raises:
      InputError: for an adapter that trains other parameters in each task.
    """
    model = linear_learner(run)
    loss = cross_entropy_loss()
    rule = personal_model(options.personal_weight, loss, run.training, run.adapter)
    method = federate(run, model, loss=loss, client_rules=(rule,))

    def predict_client(round_context: RoundContext, server: ServerState, state: tuple, batch: Batch) -> Array:
        # the method's only client rule comes first, so its state is the personal model
        personal = state[0]
        params = model.merge(server.params, round_context.task, personal)
        return method.predict(round_context, server._replace(params=params), batch)

    return method._replace(predict_client=predict_client, personal=True)


def personal_model(weight: float, loss: Loss, training: Training, adapter: Adapter) -> ClientRule:
    """Train the personal model after the global one, for as many epochs. It is the
    client's state.

    Args:
      weight: lambda.
      loss: the clients' loss L_ce.
      training: epochs, batch size, optimiser and learning rate.
      adapter: for its learning rate; it must train the same parameters in every task.
    """

    def init(_key: PRNGKeyArray, trainable: Params) -> Params:
        # v trains in all tasks; a leaf that belongs to one task would be lost with it
        check_all_last(adapter, trainable.adapter, "ditto keeps a client's own model")
        return trainable

    def start(_context: ClientContext, model: Params, _key: PRNGKeyArray) -> Personal:
        # a new optimiser in every round, as for the global model
        return Personal(model, training.optimiser.init(model), jnp.int32(0))

    def end(
        _context: ClientContext,
        memory: Personal,
        _trainable: Params,
        _state: Params,
    ) -> Params:
        return memory.model

    def step(step: ClientStep, memory: Personal) -> Personal:
        model = memory.model
        loss_of = functools.partial(personal_loss, weight, loss, step)
        gradient = jax.grad(loss_of)(model)
        # the global model's optimiser and learning rates: the paper trains both alike
        direction, optimiser = training.optimiser.update(gradient, memory.optimiser, model)
        epoch = training.epoch_of(step.context, memory.steps)
        factor = training.rate_factor(step.context, epoch)
        update: Params = optax.tree.scale(-training.lr * factor, direction)
        if adapter.rate is not None:
            # the update above has the run's learning rate
            scaled = optax.tree.scale(adapter.rate / training.lr, update.adapter)
            update = update._replace(adapter=scaled)
        updated: Params = optax.tree.add(model, update)
        # running statistics move with the forward pass of v on the client's data
        stats = step.forward(model).stats
        return Personal(updated._replace(stats=stats), optimiser, memory.steps + 1)

    view = View(training.epochs, training.batch_size)
    personal_pass = ClientPass("after_training", view, step, trains=True)
    return ClientRule("ditto", None, init, start, (personal_pass,), end)


def personal_loss(weight: float, loss: Loss, step: ClientStep, model: Params) -> Float[Array, ""]:
    """Return L_ce(v) + lambda / 2 ||v - w_t||^2 (eq. 1)."""
    value = loss.value(step.forward(model), step.batch, step.context.task)
    # w_t is what the client received, not what it has trained from it. Running statistics
    # follow the client's data and are not pulled towards the global ones
    global_model = step.context.payload.trainable._replace(stats=())
    difference = optax.tree.sub(model._replace(stats=()), global_model)
    return value + weight / 2 * optax.tree.norm(difference, squared=True)
