"""FedDyn: federated learning with dynamic regularisation (Acar et al., ICLR 2021, arXiv 2111.04263).

    client    trains on   L_ce - <h_i, w> + alpha / 2 ||w - x||^2,   x the model that it was sent     (eq. 1)
              keeps       h_i <- h_i - alpha (w_i - x)
    server    h = sum_i n_i h_i / sum_i n_i over the clients seen so far, also those that rest in this round:
              participants move the sum by -alpha sum_i n_i (w_i - x) = -alpha (sum_i n_i) (mean_i w_i - x)
              x <- mean_i w_i - h / alpha                                                (algorithm 1)

Where nobody moves any more, h_i is the gradient of client i's loss and h, their weighted mean, is 0: the
model is a stationary point of all clients' loss together, which FedAvg's is not. Clients are weighted by
their examples where the paper weighs them equally. A new task has a new objective: h and h_i start anew.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.seen import Seen, nobody, num_examples, with_participants
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, Task


@dataclasses.dataclass(frozen=True)
class FedDynOptions:
    """Options of FedDyn."""

    dynamic_weight: float = option(0.01, positive=True)
    """Weight alpha of the regularisation."""


PRESETS = {
    "intended": Preset(
        FedDynOptions(), RunConfig(optimiser="sgd", lr=0.1), (LoraOptions(lora_pairs="one", lora_lr=0.1),)
    )
}


class ClientSlope(NamedTuple):
    """What a client keeps."""

    slope: Params
    """h_i."""
    task: Int[Array, ""]
    """The task that it belongs to."""


class ServerSlope(NamedTuple):
    """What the server keeps."""

    total: Params
    """The sum of n_i h_i over the clients seen so far. h itself would keep the denominators of earlier
    rounds, with fewer clients."""
    seen: Seen


def feddyn(options: FedDynOptions, run: Run) -> Method:
    """FedDyn as a method."""
    client, server = dynamic_regularisation(options.dynamic_weight, run.sizes.clients)
    loss = cross_entropy_loss()
    return federate(run, linear_learner(run), loss=loss, client_rules=(client,), server_rules=(server,))


def dynamic_regularisation(weight: float, clients: int) -> tuple[ClientRule, ServerRule]:
    """The two rules, for any method that averages what trains.

    Args:
      weight: alpha.
      clients: K.
    """
    return ClientRule("feddyn", _loss(weight), _at_first, _opened, on_end=_end(weight)), ServerRule(
        "feddyn", _update(weight), lambda params, trainable: ServerSlope(_zeros(trainable), nobody(clients))
    )


def _zeros(trainable: Params) -> Params:
    """Running statistics are no parameters."""
    return jax.tree.map(jnp.zeros_like, trainable._replace(stats=()))


def _moved(context: ClientContext, trainable: Params) -> Params:
    """w - x."""
    sent: Params = context.payload.trainable
    return optax.tree.sub(trainable._replace(stats=()), sent._replace(stats=()))


def _at_first(key: PRNGKeyArray, trainable: Params) -> ClientSlope:
    del key
    return ClientSlope(_zeros(trainable), jnp.int32(-1))


def _opened(context: ClientContext, kept: ClientSlope, key: PRNGKeyArray) -> ClientSlope:
    """h_i, or 0 in a new task."""
    del key
    same = kept.task == context.task.index
    index = context.task.index
    return ClientSlope(jax.tree.map(lambda h: jnp.where(same, h, 0.0), kept.slope), index)


def _loss(weight: float):
    def loss(step: ClientStep, memory: ClientSlope) -> Float[Array, ""]:
        by = _moved(step.context, step.trainable)  # <h_i, x> is constant
        return weight / 2 * optax.tree.norm(by, squared=True) - optax.tree.vdot(memory.slope, by)

    return loss


def _end(weight: float):
    def end(
        context: ClientContext, memory: ClientSlope, trainable: Params, state: ClientSlope
    ) -> ClientSlope:
        del state
        return memory._replace(slope=optax.tree.add_scale(memory.slope, -weight, _moved(context, trainable)))

    return end


def _update(weight: float):
    def update(round: ServerRound, params: Params, state: ServerSlope) -> ServerUpdate:
        seen = with_participants(state.seen, round)
        mean = _trainable(round, params)
        change = optax.tree.sub(mean, round.previous.payload.trainable._replace(stats=()))
        same_task = state.seen.task == round.task.index
        participants = jnp.sum(jnp.where(round.valid, round.weights, 0.0))

        def next_total(total: Array, change: Array) -> Array:
            return jnp.where(same_task, total, 0.0) - weight * participants * change

        total = jax.tree.map(next_total, state.total, change)
        slope = optax.tree.scale(1 / num_examples(seen), total)
        model = optax.tree.add_scale(mean, -1 / weight, slope)
        return ServerUpdate(_merged(round, params, model), ServerSlope(total, seen))

    return update


def _trainable(round: ServerRound, params: Params) -> Params:
    """What was averaged."""
    return round.learner.trainable(params, round.task)._replace(extra=params.extra, stats=())


def _merged(round: ServerRound, params: Params, model: Params) -> Params:
    task: Task = round.task
    stats = round.learner.trainable(params, task).stats
    return round.learner.merge(params, task, model._replace(stats=stats))._replace(extra=model.extra)
