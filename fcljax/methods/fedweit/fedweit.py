"""FedWeIT: weighted inter-client transfer (Yoon et al., ICML 2021).

A client's network for task t is composed (decomposed.py) of a base B that all clients share, a mask m_t of
it, sparse parameters A_t of its own, and attention to what other clients have learned:    (eq. 1)

    theta_t = B * m_t + A_t + sum_r alpha_r A^r

    client     trains all of it on L_ce over the task's classes, and                           (eq. 2)
               lambda_1 (sum_{i<=t} |A_i| + |m_t|)
               + lambda_2 sum_{i<t} || (B - B') * m_i + A_i - A'_i ||^2
               with B' and A' those at the end of the task before; sends its base
    server     averages the bases
    task end   clients send their pruned A_t to the server's knowledge base, from which every client is handed
               some for the next task

Clients are evaluated as themselves, with the newest base. Departures from the release, and what it does
otherwise than the paper, are in docs/fidelity.md.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from fcljax.adapters.full import FullOptions
from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation
from fcljax.methods.fedweit.decomposed import Arrays, Own, Received, Shape, arrays_of, decomposed, pruned
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.task_end import TaskEnd, after_round, no_task_end, of_task_before
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, RoundContext, Sizes, Weighted


@dataclasses.dataclass(frozen=True)
class FedWeITOptions:
    """Options of FedWeIT; the values are the release's."""

    sparse_weight: float = 1e-3
    """Weight lambda_1 of the L1 norm of the task-adaptive parameters."""
    mask_weight: float = 0.0
    """Weight lambda_1 of the L1 norm of the masks."""
    keep_weight: float = 100.0
    """Weight lambda_2 of the change of earlier tasks' parameters; lambda_2 / 2 multiplies
    the squares."""
    prune_threshold: float = 1e-3
    """Threshold up to which task-adaptive parameters are sent and evaluated as 0."""
    client_sparsity: float = option(0.3, below=1.0)
    """Fraction of each array's outputs whose base is not sent; they have the smallest
    masks."""
    kb_samples: int = 5
    """Number of task-adaptive parameters that a task receives from the knowledge base."""
    kb_tasks: int = 1
    """Number of finished tasks per client in the knowledge base."""
    mask_start: float = option(0.9, positive=True, below=1.0)
    """Initial value of the masks."""
    adaptive_start: float = 0.0
    """Initial task-adaptive parameters, as a fraction of the first base."""
    retroactive: bool = True
    """Continue training the task-adaptive parameters of earlier tasks."""


_RUN = RunConfig(aggregator="uniform", lr=0.01)
_ADAPTERS = (LoraOptions(lora_pairs="one", lora_lr=1e-3), FullOptions(full_lr=1e-3 / 3))
_PAPER = FedWeITOptions(mask_start=0.5, adaptive_start=1 / 3)
PRESETS = {
    "intended": Preset(FedWeITOptions(), _RUN, _ADAPTERS),
    "paper": Preset(_PAPER, _RUN, _ADAPTERS),
    "released": Preset(dataclasses.replace(_PAPER, retroactive=False), _RUN, _ADAPTERS),
}


def fedweit(options: FedWeITOptions, run: Run) -> Method:
    """FedWeIT as a method.

    Raises:
      InputError: for a rule that cannot merge bases of which clients send parts, or an adapter that has
        parameters for each task.
    """
    _check_rule(options, run.aggregation)
    plain = linear_learner(run)
    retroactive = options.retroactive
    shape = Shape(
        options.kb_samples,
        options.mask_start,
        options.adaptive_start,
        retroactive,
        options.prune_threshold,
        options.client_sparsity,
    )
    method = federate(
        run._replace(training=run.training._replace(optimiser=adapters_learning_rate(run))),
        decomposed(plain, run.sizes, shape),
        loss=cross_entropy_loss(),
        client_rules=(
            sparsity(options.sparse_weight, options.mask_weight, retroactive),
            preservation(options.keep_weight, arrays_of(plain, run.sizes), run.sizes, retroactive),
            others_only(),
        ),
        server_rules=(knowledge_base(options, run.sizes),),
        personal=("classifier", "stats"),
    )
    return method._replace(handover=handover)


def _check_rule(options: FedWeITOptions, rule: Aggregation) -> None:
    if options.client_sparsity and rule.name not in ("mean", "uniform"):
        raise InputError(
            f"aggregator: {rule.name!r} cannot merge bases of which clients send parts; nearest: 'uniform', "
            f"or --client-sparsity 0"
        )


def adapters_learning_rate(run: Run) -> optax.GradientTransformation:
    """A trains at the learning rate of the adapter, to whose parameters it is added; masks and attention at
    the run's."""
    own_rate = run.adapter.rate
    ratio = 1.0 if own_rate is None else own_rate / run.training.lr

    def scale(direction: Any, _trainable: Any) -> Any:
        own: Own = direction.classifier
        return direction._replace(classifier=own._replace(adaptive=ratio * own.adaptive))

    return optax.chain(run.training.optimiser, optax.stateless(scale))


# ---- client (eq. 2) ----------------------------------------------------------------------------------------


def sparsity(adaptive_weight: float, mask_weight: float, retroactive: bool) -> ClientRule:
    """lambda_1 (sum_{i<=t} |A_i| + |m_t|) (eq. 2). The release takes masks before their sigmoid here, which
    would pull them to 1/2, and gives that a weight of 0.

    Args:
      adaptive_weight: lambda_1 of A.
      mask_weight: lambda_1 of the mask.
      retroactive: whether the A of earlier tasks train, and count.
    """

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        own: Own = step.trainable.classifier
        sizes = jnp.abs(own.adaptive)
        if retroactive:
            sizes = jnp.where(_first(sizes, step.context.task.index + 1), sizes, 0.0)
        return adaptive_weight * jnp.sum(sizes) + mask_weight * jnp.sum(jax.nn.sigmoid(own.mask))

    return ClientRule("sparsity", loss)


def _first(values: Float[Array, "T _"], count: ArrayLike) -> Bool[Array, "T 1"]:
    """The first so many tasks."""
    return jnp.arange(len(values))[:, None] < count


class Before(NamedTuple):
    """What a client knows of finished tasks."""

    base: Float[Array, " N"]
    """B', after the client's last round of the last of them."""
    adaptive: PyTree
    """A', likewise; () where those of earlier tasks are fixed."""
    mask: Float[Array, "T M"]
    """After the sigmoid, of the tasks that the client has trained in; 0 elsewhere."""


def preservation(weight: float, arrays: Arrays, sizes: Sizes, retroactive: bool) -> ClientRule:
    """lambda_2 / 2 sum_{i<t} || (B - B') * m_i + A_i - A'_i ||^2 (eq. 2, halved as in the release): the
    networks of earlier tasks stay where they were, whatever the base does.

    Args:
      weight: lambda_2.
      arrays: of the network.
      sizes: of the run.
      retroactive: whether the A of earlier tasks train.
    """

    def init(_key: PRNGKeyArray, trainable: Params) -> TaskEnd:
        own: Own = trainable.classifier
        masks = jnp.zeros((sizes.tasks, *own.mask.shape))
        return no_task_end(Before(trainable.adapter, own.adaptive if retroactive else (), masks))

    def on_start(context: ClientContext, state: TaskEnd, _key: PRNGKeyArray) -> Before:
        return of_task_before(state, context.task)

    def loss(step: ClientStep, before: Before) -> Float[Array, ""]:
        task = step.context.task.index
        moved = step.trainable.adapter - before.base
        old = jnp.where(_first(before.mask, task), before.mask, 0.0)
        if not retroactive:  # the masks of all tasks at once: nothing has an axis T and N
            return weight / 2 * jnp.sum(moved**2 * arrays.of_outputs(jnp.sum(old**2, axis=0)))
        drift = moved * arrays.of_outputs(old) + step.trainable.classifier.adaptive - before.adaptive
        return weight / 2 * jnp.sum(jnp.where(_first(drift, task), drift, 0.0) ** 2)

    def on_end(context: ClientContext, before: Before, trainable: Params, _state: TaskEnd) -> TaskEnd:
        own: Own = trainable.classifier
        mask = before.mask.at[context.task.index].set(jax.nn.sigmoid(own.mask))
        newest = Before(trainable.adapter, own.adaptive if retroactive else (), mask)
        return after_round(before, newest, context.task)

    return ClientRule("preservation", loss, init, on_start, on_end=on_end)


def others_only() -> ClientRule:
    """A client pays no attention to its own parameters when the server hands them out (eq. 1 sums over the
    others; the release has no such exception)."""

    def project(context: ClientContext, trainable: Params) -> Params:
        own: Own = trainable.classifier
        theirs = context.cached.adapter.client[context.task.index] != context.client.id
        attention = jnp.where(theirs[:, None], own.attention, 0.0)
        return trainable._replace(classifier=own._replace(attention=attention))

    return ClientRule("others_only", project=project)


# ---- server: the knowledge base ----------------------------------------------------------------------------


class Knowledge(NamedTuple):
    """A of the last S finished tasks of all K clients."""

    adaptive: Float[Array, "S K N"]
    known: Bool[Array, "S K"]
    """Which there are."""


def knowledge_base(options: FedWeITOptions, sizes: Sizes) -> ServerRule:
    """When a task is over every client with examples of it sends its pruned A, and the server draws which of
    all that it holds it hands out for the next task: R at random, without repetition.

    Metric: the share of nonzero parameters of A, which is what a sparse format would send.
    """

    def init(_params: Params, trainable: Params) -> Knowledge:
        shape = (options.kb_tasks, sizes.clients)
        return Knowledge(jnp.zeros((*shape, len(trainable.adapter))), jnp.zeros(shape, bool))

    def nothing_sent(context: ClientContext) -> Float[Array, " N"]:
        return jnp.zeros_like(context.payload.trainable.adapter)

    def sparse_adaptive(step: ClientStep, _total: Array) -> Float[Array, " N"]:
        own: Own = step.trainable.classifier
        adaptive = own.adaptive[step.context.task.index] if options.retroactive else own.adaptive
        return pruned(adaptive, options.prune_threshold)

    def update(round: ServerRound, params: Params, state: Knowledge) -> ServerUpdate:
        task = round.task.index
        state = store_uploads(state, task % options.kb_tasks, round)
        received = hand_out(state, params.adapter.received, task + 1, round.key)
        params = params._replace(adapter=params.adapter._replace(received=received))
        return ServerUpdate(params, state, {"nonzero": _nonzero(round)})

    # nothing is merged, so that any aggregation rule is followed
    report = Report("adaptive", nothing_sent, sparse_adaptive, follows_rule=True)
    return ServerRule("knowledge", update, init, reports=(report,), when="task_end")


def store_uploads(state: Knowledge, slot: ArrayLike, round: ServerRound) -> Knowledge:
    """The knowledge base with what arrived in place of what these clients sent S tasks ago."""
    client = jnp.where(round.valid, round.ids, state.known.shape[1])

    def put(every: Array, new: Array) -> Array:
        return every.at[slot, client].set(new, mode="drop")

    return Knowledge(put(state.adaptive, round.reports["adaptive"]), put(state.known, round.valid))


def hand_out(state: Knowledge, received: Received, task: ArrayLike, key: PRNGKeyArray) -> Received:
    """What was handed out, with R of all that is known for one task; after the last task nothing changes."""
    known = state.known.reshape(-1)
    count = received.client.shape[1]
    priority = jnp.where(known, jax.random.uniform(key, known.shape), -1.0)
    order = jnp.argsort(-priority)[:count]
    order = jnp.pad(order, (0, count - len(order)), constant_values=len(known))  # where R is more than all
    real = known.at[order].get(mode="fill", fill_value=False)
    chosen = state.adaptive.reshape(len(known), -1).at[order].get(mode="fill", fill_value=0.0)
    client = jnp.where(real, order % state.known.shape[1], -1)
    values = received.values.at[task].set(jnp.where(real[:, None], chosen, 0.0), mode="drop")
    return Received(values, received.client.at[task].set(client, mode="drop"))


def _nonzero(round: ServerRound) -> Weighted:
    sent = jnp.where(round.valid[:, None], round.reports["adaptive"], 0.0)
    count = jnp.sum(round.valid) * sent.shape[1]
    return Weighted(jnp.sum(sent != 0).astype(jnp.float32), count.astype(jnp.float32))


def handover(round_context: RoundContext, server: ServerState) -> Float[Array, "R N"]:
    """What every client is handed from the knowledge base when a task begins, for counting."""
    return server.params.adapter.received.values[round_context.task.index]
