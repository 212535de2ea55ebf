"""FedWeIT: weighted inter-client transfer (Yoon et al., ICML 2021).

A client's network for task t is composed (decomposed.py) of a base B that all clients
share, a mask m_t of it, sparse task-adaptive parameters A_t, and attention to those
of other clients:

    theta_t = B * m_t + A_t + sum_r alpha_r A^r                                     (eq. 1)

    client     trains all of it on L_ce over the task's classes, and                (eq. 2)
               lambda_1 (sum_{i<=t} |A_i| + |m_t|)
               + lambda_2 sum_{i<t} || (B - B') * m_i + A_i - A'_i ||^2
               with B' and A' from the end of the previous task; sends its base
    server     averages the bases
    task end   clients send their pruned A_t to the server's knowledge base, from which each
               client receives some for the next task

Clients are evaluated with their personal models, on the newest base. docs/fidelity.md
lists where this departs from the release, and the release from the paper.
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
from fcljax.methods.fedweit.decomposed import (
    Arrays,
    ClientParams,
    Composition,
    Received,
    arrays_of,
    decomposed,
    pruned,
)
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
    """Compose FedWeIT.

    Raises:
      InputError: for an aggregation rule that cannot merge bases of which clients send
        parts, or an adapter that has parameters for each task.
    """
    _check_rule(options, run.aggregation)
    inner = linear_learner(run)
    arrays = arrays_of(inner, run.sizes)
    retroactive = options.retroactive
    composition = Composition(
        options.kb_samples,
        options.mask_start,
        options.adaptive_start,
        retroactive,
        options.prune_threshold,
        options.client_sparsity,
    )
    training = run.training._replace(optimiser=adapters_learning_rate(run))
    method = federate(
        run._replace(training=training),
        decomposed(inner, run.sizes, composition),
        loss=cross_entropy_loss(),
        client_rules=(
            sparsity(options.sparse_weight, options.mask_weight, retroactive),
            preservation(options.keep_weight, arrays, run.sizes, retroactive),
            others_only(),
        ),
        server_rules=(knowledge_base(options, run.sizes),),
        personal=("classifier", "stats"),
    )
    return method._replace(handover=handover)


def _check_rule(options: FedWeITOptions, rule: Aggregation) -> None:
    if options.client_sparsity and rule.name not in ("mean", "uniform"):
        raise InputError(
            f"aggregator: {rule.name!r} cannot merge bases of which clients send only parts; "
            f"nearest: 'uniform', or --client-sparsity 0"
        )


def adapters_learning_rate(run: Run) -> optax.GradientTransformation:
    """Train A at the adapter's learning rate, as it is added to the base of the adapter.

    Masks and attention train at the run's learning rate.
    """
    # A stands in the classifier's place, which `train_step` moves at the run's rate
    ratio = 1.0
    if run.adapter.rate is not None:
        ratio = run.adapter.rate / run.training.lr

    def scale(direction: Any, _trainable: Any) -> Any:
        client: ClientParams = direction.classifier
        client = client._replace(adaptive=ratio * client.adaptive)
        return direction._replace(classifier=client)

    return optax.chain(run.training.optimiser, optax.stateless(scale))


# ---- client (eq. 2) --------------------------------------------------------------------


def sparsity(adaptive_weight: float, mask_weight: float, retroactive: bool) -> ClientRule:
    """Add lambda_1 (sum_{i<=t} |A_i| + |m_t|) (eq. 2).

    The release takes masks before their sigmoid here, which would pull them to 1/2, and
    gives that a weight of 0.

    Args:
      adaptive_weight: lambda_1 of A.
      mask_weight: lambda_1 of the mask.
      retroactive: whether the A of earlier tasks train, and count.
    """

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        client: ClientParams = step.trainable.classifier
        adaptive = jnp.abs(client.adaptive)
        # with all tasks' A, those of later tasks have initial values and must not count
        if retroactive:
            started = _before(step.context.task.index + 1, adaptive)
            adaptive = jnp.where(started, adaptive, 0.0)
        mask = jax.nn.sigmoid(client.mask)
        return adaptive_weight * jnp.sum(adaptive) + mask_weight * jnp.sum(mask)

    return ClientRule("sparsity", loss)


def _before(task: ArrayLike, values: Float[Array, "T _"]) -> Bool[Array, "T 1"]:
    """Return which rows [T, ...] belong to tasks before this one."""
    return jnp.arange(len(values))[:, None] < task


class FinishedTasks(NamedTuple):
    """A client's state of finished tasks."""

    base: Float[Array, " N"]
    """B', after the client's last round of the latest one."""
    adaptive: PyTree
    """A', after that round too; () where the A of earlier tasks are fixed."""
    mask: Float[Array, "T M"]
    """After the sigmoid, of the tasks that the client has trained in; 0 elsewhere."""


def preservation(
    weight: float,
    arrays: Arrays,
    sizes: Sizes,
    retroactive: bool,
) -> ClientRule:
    """Add lambda_2 / 2 sum_{i<t} || (B - B') * m_i + A_i - A'_i ||^2 (eq. 2, halved
    as in the release), which keeps the networks of earlier tasks as they were while
    the base moves.

    Args:
      weight: lambda_2.
      arrays: of the network.
      sizes: of the run.
      retroactive: whether the A of earlier tasks train.
    """

    def finished(trainable: Params, mask: Float[Array, "T M"]) -> FinishedTasks:
        if retroactive:
            return FinishedTasks(trainable.adapter, trainable.classifier.adaptive, mask)
        return FinishedTasks(trainable.adapter, (), mask)

    def init(_key: PRNGKeyArray, trainable: Params) -> TaskEnd:
        no_masks = jnp.zeros((sizes.tasks, *trainable.classifier.mask.shape))
        return no_task_end(finished(trainable, no_masks))

    def on_start(
        context: ClientContext,
        state: TaskEnd,
        _key: PRNGKeyArray,
    ) -> FinishedTasks:
        return of_task_before(state, context.task)

    def loss(step: ClientStep, past: FinishedTasks) -> Float[Array, ""]:
        task = step.context.task.index
        base_change = step.trainable.adapter - past.base  # B - B'
        mask = jnp.where(_before(task, past.mask), past.mask, 0.0)
        if not retroactive:
            # A_i = A'_i. The sum over tasks of the squared masks comes first, so that no
            # array is [T, N]
            squared_masks = arrays.of_outputs(jnp.sum(mask**2, axis=0))
            return weight / 2 * jnp.sum(base_change**2 * squared_masks)
        adaptive_after = step.trainable.classifier.adaptive
        drift = base_change * arrays.of_outputs(mask) + adaptive_after - past.adaptive
        return weight / 2 * jnp.sum(jnp.where(_before(task, drift), drift, 0.0) ** 2)

    def on_end(context: ClientContext, past: FinishedTasks, trainable: Params, _state: TaskEnd) -> TaskEnd:
        task_mask = jax.nn.sigmoid(trainable.classifier.mask)
        mask = past.mask.at[context.task.index].set(task_mask)
        return after_round(past, finished(trainable, mask), context.task)

    return ClientRule("preservation", loss, init, on_start, on_end=on_end)


def others_only() -> ClientRule:
    """Keep a client's attention to its own A at 0, when it receives that from the server.

    Eq. 1 sums over the other clients; the release has no such exception.
    """

    def project(context: ClientContext, trainable: Params) -> Params:
        client: ClientParams = trainable.classifier
        source = context.cached.adapter.client[context.task.index]
        is_other = source != context.client.id
        attention = jnp.where(is_other[:, None], client.attention, 0.0)
        return trainable._replace(classifier=client._replace(attention=attention))

    return ClientRule("others_only", project=project)


# ---- server: the knowledge base --------------------------------------------------------


class Knowledge(NamedTuple):
    """A of the last S finished tasks of all K clients."""

    adaptive: Float[Array, "S K N"]
    present: Bool[Array, "S K"]
    """Which of them exist."""


def knowledge_base(options: FedWeITOptions, sizes: Sizes) -> ServerRule:
    """Collect the clients' pruned A when a task is over, and draw some for the next task.

    Each client with examples of the task sends its A. The server draws R of all stored
    A, at random and without repetition; all clients receive the same.

    Metric: the share of nonzero parameters of A, which a sparse format would send.
    """

    def init(_params: Params, trainable: Params) -> Knowledge:
        shape = (options.kb_tasks, sizes.clients)
        return Knowledge(jnp.zeros((*shape, len(trainable.adapter))), jnp.zeros(shape, bool))

    def no_adaptive(context: ClientContext) -> Float[Array, " N"]:
        return jnp.zeros_like(context.payload.trainable.adapter)

    # A does not depend on the batch, so every step gives the same total
    def sparse_adaptive(step: ClientStep, _total: Array) -> Float[Array, " N"]:
        adaptive = step.trainable.classifier.adaptive
        if options.retroactive:
            adaptive = adaptive[step.context.task.index]
        return pruned(adaptive, options.prune_threshold)

    def update(round: ServerRound, params: Params, state: Knowledge) -> ServerUpdate:
        task = round.task.index
        state = store_uploads(state, task % options.kb_tasks, round)
        received = hand_out(state, params.adapter.received, task + 1, round.key)
        params = params._replace(adapter=params.adapter._replace(received=received))
        return ServerUpdate(params, state, {"nonzero": _nonzero(round)})

    # `follows_rule`: reports are not merged, so any aggregation rule may be chosen
    report = Report("adaptive", no_adaptive, sparse_adaptive, follows_rule=True)
    return ServerRule("knowledge", update, init, reports=(report,), when="task_end")


def store_uploads(state: Knowledge, slot: ArrayLike, round: ServerRound) -> Knowledge:
    """Store the reports in place of those that these clients sent S tasks ago."""
    # JAX drops writes beyond the last client: invalid reports are not stored
    client = jnp.where(round.valid, round.ids, state.present.shape[1])

    def store(buffer: Array, new: Array) -> Array:
        return buffer.at[slot, client].set(new, mode="drop")

    adaptive = store(state.adaptive, round.reports["adaptive"])
    return Knowledge(adaptive, store(state.present, round.valid))


def hand_out(
    state: Knowledge,
    received: Received,
    task: ArrayLike,
    key: PRNGKeyArray,
) -> Received:
    """Draw R of the stored A for a task; after the last task nothing changes.

    Args:
      state: of the knowledge base.
      received: of all tasks.
      task: the one that receives them; an index beyond the last task is dropped.
      key: of the draw.
    """
    present = state.present.reshape(-1)
    count = received.client.shape[1]
    # a random order of the stored entries; empty ones come last
    priority = jnp.where(present, jax.random.uniform(key, present.shape), -1.0)
    order = jnp.argsort(-priority)[:count]
    # R may exceed the S K places: the rest gets an index that reads as absent
    order = jnp.pad(order, (0, count - len(order)), constant_values=len(present))
    exists = present.at[order].get(mode="fill", fill_value=False)
    stored = state.adaptive.reshape(len(present), -1)
    adaptive = stored.at[order].get(mode="fill", fill_value=0.0)
    adaptive = jnp.where(exists[:, None], adaptive, 0.0)
    client = jnp.where(exists, order % state.present.shape[1], -1)
    values = received.values.at[task].set(adaptive, mode="drop")
    return Received(values, received.client.at[task].set(client, mode="drop"))


def _nonzero(round: ServerRound) -> Weighted:
    adaptive = jnp.where(round.valid[:, None], round.reports["adaptive"], 0.0)
    count = jnp.sum(round.valid) * adaptive.shape[1]
    nonzero = jnp.sum(adaptive != 0)
    return Weighted(nonzero.astype(jnp.float32), count.astype(jnp.float32))


def handover(round_context: RoundContext, server: ServerState) -> Float[Array, "R N"]:
    """Return what clients download from the knowledge base at a task's start."""
    return server.params.adapter.received.values[round_context.task.index]
