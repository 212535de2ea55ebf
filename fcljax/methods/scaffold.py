"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al., ICML 2020, arXiv 1910.06378).

    client    receives the model x and the control variate c
              steps along  g_i(y) - c_i + c                                        (eq. 3)
              keeps  c_i <- c_i - c + (x - y_i) / (K eta)  after K steps (eq. 4, option II)
              sends  its model, and the change of c_i
    server    averages the models, and c = sum_i n_i c_i / sum_i n_i over the clients seen so
              far

The correction removes the effect of heterogeneous data: at the optimum of the sum of all
clients' losses every corrected gradient is 0. Clients are weighted by their examples; the
paper weighs them equally. A new task has a new objective, so all control variates start
anew. (x - y_i) / (K eta) is the mean gradient only where clients descend without
momentum, which is checked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.methods.fedavg import NoOptions
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report, Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.seen import Seen, no_clients, num_examples, with_participants
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.this_task import OfTask, of_no_task, of_this_task, without_stats, zeros_like
from fcljax.settings import Preset, RunConfig, with_headtune, with_mini
from fcljax.types import ClientContext, LearningRate, Method, Task

_RUN = RunConfig(optimiser="sgd", lr=0.1)
_LORA = LoraOptions(lora_pairs="one", lora_lr=0.1)
# mini: at the classifier's learning rate LoRA diverges
PRESETS = with_headtune(with_mini({"intended": Preset(NoOptions(), _RUN, (_LORA,))}, lora_lr=1e-2))


class ServerVariate(NamedTuple):
    """The server's state, from which c follows."""

    total: Params
    """The sum of n_i c_i over the clients seen so far."""
    seen: Seen
    """These clients, with their numbers of examples."""


def scaffold(_options: NoOptions, run: Run) -> Method:
    """Compose SCAFFOLD."""
    client, server = controlled_averaging(run)
    loss = cross_entropy_loss()
    return federate(run, linear_learner(run), loss=loss, client_rules=(client,), server_rules=(server,))


def controlled_averaging(run: Run) -> tuple[ClientRule, ServerRule]:
    """Return the rules of clients and server, for any method that averages what trains.

    Raises:
      InputError: for an optimiser whose steps are not the gradients.
    """
    check_plain_descent(run.training.optimiser)
    # eta of the adapter, which may differ from that of all other parameters
    adapter_rate = run.adapter.rate
    if adapter_rate is None:
        adapter_rate = run.training.lr
    rates = (adapter_rate, run.training.lr)

    def change(context: ClientContext, trainable: Params) -> Params:
        """Return how c_i changes: -c + (x - y_i) / (K eta)."""
        gradient = mean_gradient(run.training, rates, context, trainable)
        return optax.tree.sub(gradient, context.payload.sent["scaffold"])

    def on_end(context: ClientContext, memory: OfTask, trainable: Params, _state: OfTask) -> OfTask:
        variate = optax.tree.add(memory.params, change(context, trainable))
        return memory._replace(params=variate)

    def finalize(end: ClientEnd, _total: tuple) -> Params:
        # n_i times the change: added up, these turn the old sum of n_i c_i into the new one
        return optax.tree.scale(end.context.client.examples, change(end.context, end.trainable))

    def init(_params: Params, trainable: Params) -> ServerVariate:
        return ServerVariate(zeros_like(trainable), no_clients(run.sizes.clients))

    client = ClientRule("scaffold", correction, of_no_task, of_this_task, on_end=on_end)
    report = Report("variates", finalize=finalize, merge="sum")
    return client, ServerRule("scaffold", add_changes, init, server_variate, (report,))


def check_plain_descent(optimiser: optax.GradientTransformation) -> None:
    """Check that an optimiser steps along the gradient itself.

    Raises:
      InputError: for any other, such as Adam or momentum.
    """
    # numbers are needed here, and a method may be made inside of jit (`federated/rates.py`)
    with jax.ensure_compile_time_eval():
        gradient = jnp.float32(2.0)
        start = jnp.zeros(())
        # Adam differs from the gradient in its first step, momentum only in its second
        step_1, state = optimiser.update(gradient, optimiser.init(start), start)
        step_2, _ = optimiser.update(gradient, state, start)
    if any(abs(float(step) - 2.0) > 1e-6 for step in jax.tree.leaves((step_1, step_2))):
        raise InputError(
            "optimiser: scaffold reads gradients from how far clients move, which Adam and momentum hide; "
            "nearest: --optimiser sgd --momentum 0"
        )


def mean_gradient(
    training: Training,
    rates: tuple[LearningRate, LearningRate],
    context: ClientContext,
    trainable: Params,
) -> Params:
    """Return (x - y_i) / (K eta), the mean of the corrected gradients of a client's K steps.

    Args:
      training: epochs and batch size, from which K follows, and the learning rate's schedule.
      rates: learning rates of the adapter and of all other parameters.
      context: for x and the client's number of examples.
      trainable: y_i.
    """
    received = without_stats(context.payload.trainable)
    difference = optax.tree.sub(received, without_stats(trainable))
    # K is the number of batches in all epochs. Under a schedule, x - y_i is the sum of
    # eta_j g_j, so a step at half the learning rate counts as half a step
    epochs = sum(training.rate_factor(context, epoch) for epoch in range(training.epochs))
    steps = epochs * jnp.ceil(context.client.examples / training.batch_size)
    # without examples K = 0, and the change 0 / 1 is 0
    steps = jnp.where(steps > 0, steps, 1)
    adapter_scale, scale = (1 / (rate * steps) for rate in rates)
    adapter = optax.tree.scale(adapter_scale, difference.adapter)
    return optax.tree.scale(scale, difference)._replace(adapter=adapter)


def correction(step: ClientStep, memory: OfTask) -> Float[Array, ""]:
    """Return a term of value 0 whose gradient is c - c_i (eq. 3)."""
    difference = optax.tree.sub(step.context.payload.sent["scaffold"], memory.params)
    # the gradient of <c - c_i, y>; minus its value, so that the reported loss stays the
    # cross-entropy
    term = jnp.asarray(optax.tree.vdot(difference, without_stats(step.trainable)))
    return term - jax.lax.stop_gradient(term)


def server_variate(task: Task, state: ServerVariate) -> Params:
    """Return c, which is 0 when a task begins."""
    # divided only here: the clients seen so far, and their examples, grow with the rounds
    examples = num_examples(state.seen)
    same_task = state.seen.task == task.index
    return jax.tree.map(lambda total: jnp.where(same_task, total / examples, 0.0), state.total)


def add_changes(round: ServerRound, params: Params, state: ServerVariate) -> ServerUpdate:
    """Add the changes of the participants' c_i to the sum over the clients seen so far."""
    same_task = state.seen.task == round.task.index

    def add(total: Array, change: Array) -> Array:
        return jnp.where(same_task, total, 0.0) + change

    total = jax.tree.map(add, state.total, round.reports["variates"])
    return ServerUpdate(params, ServerVariate(total, with_participants(state.seen, round)))
