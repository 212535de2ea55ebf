"""FedDyn: federated learning with dynamic regularisation (Acar et al., ICLR 2021, arXiv
2111.04263).

    client    trains on  L_ce - <h_i, w> + alpha / 2 ||w - x||^2,
              where x is the model that it received                                 (eq. 1)
              keeps  h_i <- h_i - alpha (w_i - x)
    server    h = sum_i n_i h_i / sum_i n_i over the clients seen so far, also those that are
              absent in this round: participants change the sum by
                  -alpha sum_i n_i (w_i - x) = -alpha (sum_i n_i) (mean_i w_i - x)
              x <- mean_i w_i - h / alpha                                     (algorithm 1)

At a fixed point h_i is the gradient of client i's loss, and h, their weighted mean, is 0:
the model is a stationary point of the sum of all clients' losses, which FedAvg's fixed
point is not. Clients are weighted by their examples; the paper weighs them equally. A new
task has a new objective, so h and h_i start anew.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fcljax.adapters.lora import LoraOptions
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.seen import Seen, no_clients, num_examples, with_participants
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.this_task import OfTask, of_no_task, of_this_task, without_stats, zeros_like
from fcljax.settings import Preset, RunConfig, with_headtune, with_mini
from fcljax.types import ClientContext, Method


@dataclasses.dataclass(frozen=True)
class FedDynOptions:
    """Options of FedDyn."""

    dynamic_weight: float = option(0.01, positive=True)
    """Weight alpha of the regularisation."""


_RUN = RunConfig(optimiser="sgd", lr=0.1)
_LORA = LoraOptions(lora_pairs="one", lora_lr=0.1)
# mini: at the classifier's learning rate LoRA diverges
PRESETS = with_headtune(with_mini({"intended": Preset(FedDynOptions(), _RUN, (_LORA,))}, lora_lr=1e-2))


class ServerSlope(NamedTuple):
    """The server's state, from which h follows."""

    total: Params
    """The sum of n_i h_i over the clients seen so far. It is divided when h is used, as
    the number of these clients grows."""
    seen: Seen
    """These clients, with their numbers of examples."""


def feddyn(options: FedDynOptions, run: Run) -> Method:
    """Compose FedDyn."""
    client, server = dynamic_regularisation(options.dynamic_weight, run.sizes.clients)
    loss = cross_entropy_loss()
    return federate(run, linear_learner(run), loss=loss, client_rules=(client,), server_rules=(server,))


def dynamic_regularisation(weight: float, clients: int) -> tuple[ClientRule, ServerRule]:
    """Return the rules of clients and server, for any method that averages what trains.

    Args:
      weight: alpha.
      clients: K.
    """

    def loss(step: ClientStep, memory: OfTask) -> Float[Array, ""]:
        # eq. 1 with <h_i, w - x> for <h_i, w>: the difference <h_i, x> is constant
        change = model_change(step.context, step.trainable)
        squared_norm = optax.tree.norm(change, squared=True)
        return weight / 2 * squared_norm - optax.tree.vdot(memory.params, change)

    def on_end(
        context: ClientContext,
        memory: OfTask,
        trainable: Params,
        _state: OfTask,
    ) -> OfTask:
        change = model_change(context, trainable)
        # where the gradient of eq. 1 is 0, this is the gradient of L_ce at w_i
        return memory._replace(params=optax.tree.add_scale(memory.params, -weight, change))

    def init(_params: Params, trainable: Params) -> ServerSlope:
        return ServerSlope(zeros_like(trainable), no_clients(clients))

    def update(round: ServerRound, params: Params, state: ServerSlope) -> ServerUpdate:
        mean = averaged(round, params)
        model, state = corrected(weight, round, mean, state)
        return ServerUpdate(merged(round, params, model), state)

    client = ClientRule("feddyn", loss, of_no_task, of_this_task, on_end=on_end)
    return client, ServerRule("feddyn", update, init)


def model_change(context: ClientContext, trainable: Params) -> Params:
    """Return w - x."""
    received = without_stats(context.payload.trainable)
    return optax.tree.sub(without_stats(trainable), received)


def corrected(
    weight: float, round: ServerRound, mean: Params, state: ServerSlope
) -> tuple[Params, ServerSlope]:
    """Return mean_i w_i - h / alpha and the new state of the server (algorithm 1)."""
    # with this round's participants, whose terms join the sum
    seen = with_participants(state.seen, round)
    change = optax.tree.sub(mean, without_stats(round.previous.payload.trainable))
    same_task = state.seen.task == round.task.index
    # of clients that are part of the mean
    examples = jnp.sum(jnp.where(round.valid, round.weights, 0.0))

    def next_total(total: Array, change: Array) -> Array:
        # -alpha sum_i n_i (w_i - x) follows from the mean: no upload needs to be gathered
        return jnp.where(same_task, total, 0.0) - weight * examples * change

    total = jax.tree.map(next_total, state.total, change)
    slope = optax.tree.scale(1 / num_examples(seen), total)
    return optax.tree.add_scale(mean, -1 / weight, slope), ServerSlope(total, seen)


def averaged(round: ServerRound, params: Params) -> Params:
    """Return the mean of the clients' models, without running statistics."""
    mean = round.learner.trainable(params, round.task)
    # running statistics have no gradient, and so no h
    return mean._replace(extra=params.extra, stats=())


def merged(round: ServerRound, params: Params, model: Params) -> Params:
    """Return the parameters of all tasks with the new model; statistics stay."""
    stats = round.learner.trainable(params, round.task).stats
    params = round.learner.merge(params, round.task, model._replace(stats=stats))
    return params._replace(extra=model.extra)
