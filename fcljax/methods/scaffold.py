"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al., ICML 2020, arXiv 1910.06378).

    client    gets the model x and the control variate c, and steps along  g_i(y) - c_i + c       (eq. 3)
              keeps  c_i <- c_i - c + (x - y_i) / (K eta)  after K steps                (eq. 4, option II)
              sends  its model, and how much c_i changed
    server    averages the models, and c = sum_i n_i c_i / sum_i n_i over the clients seen so far

A client's correction takes away the way in which its data differ from everybody's: at the optimum of all
clients' loss together every step has length 0. Clients are weighted by their examples where the paper weighs
them equally. A new task has a new objective, so all control variates start anew. (x - y_i) / (K eta) is the
mean gradient only where clients descend without momentum, which is checked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.methods.fedavg import NoOptions
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report, Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.seen import Seen, nobody, num_examples, with_participants
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, LearningRate, Method, Task

PRESETS = {
    "intended": Preset(
        NoOptions(), RunConfig(optimiser="sgd", lr=0.1), (LoraOptions(lora_pairs="one", lora_lr=0.1),)
    )
}


class ClientVariate(NamedTuple):
    """What a client keeps."""

    variate: Params
    """c_i."""
    task: Int[Array, ""]
    """The task that it belongs to."""


class ServerVariate(NamedTuple):
    """What the server keeps."""

    total: Params
    """The sum of n_i c_i over the clients seen so far."""
    seen: Seen


def scaffold(options: NoOptions, run: Run) -> Method:
    """SCAFFOLD as a method."""
    del options
    client, server = controlled_averaging(run)
    loss = cross_entropy_loss()
    return federate(run, linear_learner(run), loss=loss, client_rules=(client,), server_rules=(server,))


def controlled_averaging(run: Run) -> tuple[ClientRule, ServerRule]:
    """The two rules, for any method that averages what trains.

    Raises:
      InputError: for an optimiser whose steps are not the gradients.
    """
    check_plain_descent(run.training.optimiser)
    rates = (run.training.lr if run.adapter.rate is None else run.adapter.rate, run.training.lr)

    def change(context: ClientContext, trainable: Params) -> Params:
        """How c_i changes: -c + (x - y_i) / (K eta)."""
        return optax.tree.sub(
            mean_gradient(run.training, rates, context, trainable), context.payload.sent["scaffold"]
        )

    def end(
        context: ClientContext, memory: ClientVariate, trainable: Params, state: ClientVariate
    ) -> ClientVariate:
        del state
        return memory._replace(variate=optax.tree.add(memory.variate, change(context, trainable)))

    def sent(end: ClientEnd, total: tuple) -> Params:
        del total
        return optax.tree.scale(end.context.client.examples, change(end.context, end.trainable))

    report = Report("variates", finalize=sent, merge="sum")
    server = ServerRule(
        "scaffold",
        _update,
        lambda params, trainable: ServerVariate(_zeros(trainable), nobody(run.sizes.clients)),
        _variate,
        (report,),
    )
    return ClientRule("scaffold", _correction, _at_first, _opened, on_end=end), server


def check_plain_descent(optimiser: optax.GradientTransformation) -> None:
    """Check that an optimiser steps along the gradient itself.

    Raises:
      InputError: for any other, such as Adam or momentum.
    """
    with jax.ensure_compile_time_eval():  # a method may be made inside of jit (`federated/rates.py`)
        gradient = jnp.float32(2.0)
        start = jnp.zeros(())
        first, state = optimiser.update(gradient, optimiser.init(start), start)
        second, _ = optimiser.update(gradient, state, start)
    if any(abs(float(step) - 2.0) > 1e-6 for step in jax.tree.leaves((first, second))):
        raise InputError(
            "optimiser: scaffold reads gradients from how far clients move, which Adam and momentum hide; "
            "nearest: --optimiser sgd --momentum 0"
        )


def mean_gradient(
    training: Training, rates: tuple[LearningRate, LearningRate], context: ClientContext, trainable: Params
) -> Params:
    """(x - y_i) / (K eta), the mean of the corrected gradients of a client's K steps.

    Args:
      training: epochs and batch size, from which K follows.
      rates: learning rates of the adapter and of everything else.
    """
    sent: Params = context.payload.trainable
    by = optax.tree.sub(sent._replace(stats=()), trainable._replace(stats=()))
    steps = training.epochs * jnp.ceil(context.client.examples / training.batch_size)
    adapter, other = (1 / (rate * jnp.maximum(steps, 1)) for rate in rates)
    return optax.tree.scale(other, by)._replace(adapter=optax.tree.scale(adapter, by.adapter))


def _zeros(trainable: Params) -> Params:
    """Running statistics are no parameters."""
    return jax.tree.map(jnp.zeros_like, trainable._replace(stats=()))


def _at_first(key: PRNGKeyArray, trainable: Params) -> ClientVariate:
    del key
    return ClientVariate(_zeros(trainable), jnp.int32(-1))


def _opened(context: ClientContext, kept: ClientVariate, key: PRNGKeyArray) -> ClientVariate:
    """c_i, or 0 in a new task."""
    del key
    same = kept.task == context.task.index
    index = context.task.index
    return ClientVariate(jax.tree.map(lambda c: jnp.where(same, c, 0.0), kept.variate), index)


def _correction(step: ClientStep, memory: ClientVariate) -> Float[Array, ""]:
    """<c - c_i, y>, whose gradient is c - c_i; its value does not count as loss."""
    correction = optax.tree.sub(step.context.payload.sent["scaffold"], memory.variate)
    term = jnp.asarray(optax.tree.vdot(correction, step.trainable._replace(stats=())))
    return term - jax.lax.stop_gradient(term)


def _variate(task: Task, state: ServerVariate) -> Params:
    """c, which is 0 when a task begins."""
    examples = num_examples(state.seen)
    same = state.seen.task == task.index
    return jax.tree.map(lambda total: jnp.where(same, total / examples, 0.0), state.total)


def _update(round: ServerRound, params: Params, state: ServerVariate) -> ServerUpdate:
    same = state.seen.task == round.task.index

    def add(total: Array, change: Array) -> Array:
        return jnp.where(same, total, 0.0) + change

    total = jax.tree.map(add, state.total, round.reports["variates"])
    return ServerUpdate(params, ServerVariate(total, with_participants(state.seen, round)))
