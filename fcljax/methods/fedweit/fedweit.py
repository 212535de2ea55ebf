"""FedWeIT: weighted inter-client transfer (Yoon et al., ICML 2021).

A client's network for task t is composed of a base that all clients share and average, and of what is its
own (`decomposed.py`): a mask of the base, sparse parameters A_t, and attention to what other clients have
learned. A_t goes up when its task is over, to the server's knowledge base, of which every new task is handed
some. The clients' loss is cross-entropy over the task's classes, and (equation 2)

    lambda_1 (sum_{i<=t} |A_i| + |m_t|) + lambda_2 sum_{i<t} || (B - B') * m_i + A_i - A'_i ||^2

with B' and A' those at the end of the task before. Clients are evaluated as themselves, with the newest base.

Departures from the release, and what it does otherwise than the paper, are in docs/fidelity.md.
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
from fcljax.parts.classifiers import linear_on
from fcljax.parts.federate import Collect, Run, Seen, ServerState, ServerStep, Survey, Term, Train, federate
from fcljax.parts.learner import Learner, Model, learner
from fcljax.settings import Preset, RunConfig
from fcljax.types import Aggregate, ClientContext, Method, RoundContext, Sizes, Weighted


@dataclasses.dataclass(frozen=True)
class FedWeITOptions:
    """Options of FedWeIT; the values are the release's."""

    sparse_weight: float = 1e-3
    """Weight lambda_1 of the L1 norm of the task-adaptive parameters."""
    mask_weight: float = 0.0
    """Weight lambda_1 of the L1 norm of the masks."""
    keep_weight: float = 100.0
    """Weight lambda_2 of the change of earlier tasks' parameters, half of which weighs the squares."""
    prune: float = 1e-3
    """Task-adaptive parameters up to this size are 0 where they are sent or evaluated."""
    unsent: float = option(0.3, below=1.0)
    """Share of each array's outputs, those with the smallest masks, whose base is not sent."""
    received: int = 5
    """Task-adaptive parameters that a task receives from the knowledge base."""
    remembered: int = 1
    """Finished tasks of each client in the knowledge base."""
    mask_start: float = option(0.9, positive=True, below=1.0)
    """Initial value of the masks."""
    adaptive_start: float = 0.0
    """Initial task-adaptive parameters, as a share of the first base."""
    retroactive: bool = True
    """Whether the task-adaptive parameters of earlier tasks go on training."""


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
    shape = Shape(
        options.received,
        options.mask_start,
        options.adaptive_start,
        options.retroactive,
        options.prune,
        options.unsent,
    )
    head = linear_on(run.adapter, run.network.width, run.sizes.classes)
    plain = learner(run.network, run.adapter, head)
    terms = (
        sparsity(options.sparse_weight, options.mask_weight, shape.retroactive),
        preservation(options.keep_weight, arrays_of(plain, run.sizes), run.sizes, shape.retroactive),
        others_only(),
    )
    survey = Survey(knowledge_base(options, run.sizes), "closing", run.train.batch_size)
    method = federate(
        decomposed(plain, run.sizes, shape),
        run.sizes,
        _at_the_networks_rate(run),
        (*terms, *run.terms),
        surveys=(survey,),
        aggregation=run.aggregation,
        personal=("classifier", "stats"),
    )
    return method._replace(handover=handover)


def _check_rule(options: FedWeITOptions, rule: Aggregation) -> None:
    if options.unsent and rule.name not in ("mean", "uniform"):
        raise InputError(
            f"aggregator: {rule.name!r} cannot merge bases of which clients send parts; nearest: 'uniform', "
            f"or --unsent 0"
        )


def _at_the_networks_rate(run: Run) -> Train:
    """A trains at the rate of the adapter, whose numbers it is added to; masks and attention at the run's."""
    ratio = 1.0 if run.adapter.rate is None else run.adapter.rate / run.train.lr

    def scale(direction: Any, part: Any) -> Any:
        del part
        own: Own = direction.classifier
        return direction._replace(classifier=own._replace(adaptive=ratio * own.adaptive))

    return run.train._replace(optimiser=optax.chain(run.train.optimiser, optax.stateless(scale)))


# ---- the clients' loss -------------------------------------------------------------------------------------


def sparsity(adaptive_weight: float, mask_weight: float, retroactive: bool) -> Term:
    """lambda_1 (sum_{i<=t} |A_i| + |m_t|) (equation 2). The release takes masks before their sigmoid here,
    which would pull them to 1/2, and gives that a weight of 0.

    Args:
      adaptive_weight: lambda_1 of A.
      mask_weight: lambda_1 of the mask.
      retroactive: do the A of earlier tasks train, and count?
    """

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del learner, memory
        own: Own = seen.part.classifier
        sizes = jnp.abs(own.adaptive)
        if retroactive:
            sizes = jnp.where(_first(sizes, seen.context.task.index + 1), sizes, 0.0)
        return adaptive_weight * jnp.sum(sizes) + mask_weight * jnp.sum(jax.nn.sigmoid(own.mask))

    return Term("sparsity", loss)


def _first(values: Float[Array, "T _"], count: ArrayLike) -> Bool[Array, "T 1"]:
    """The first so many tasks."""
    return jnp.arange(len(values))[:, None] < count


class Before(NamedTuple):
    """What a client knows of finished tasks: base and A (() where those of earlier tasks are fixed) as they
    were when the last of them was over, and the masks, after the sigmoid, of those that it has trained in; 0
    elsewhere."""

    base: Float[Array, " N"]
    adaptive: PyTree
    mask: Float[Array, "T M"]


def preservation(weight: float, arrays: Arrays, sizes: Sizes, retroactive: bool) -> Term:
    """lambda_2 / 2 sum_{i<t} || (B - B') * m_i + A_i - A'_i ||^2 (equation 2, halved as in the release): the
    networks of earlier tasks stay where they were, whatever the base does.

    Args:
      weight: lambda_2.
      arrays: of the network.
      setting: the stream's sizes.
      retroactive: do the A of earlier tasks train?
    """

    def init(key: PRNGKeyArray, part: Model) -> Before:
        del key
        own: Own = part.classifier
        masks = jnp.zeros((sizes.tasks, *own.mask.shape))
        return Before(part.adapter, own.adaptive if retroactive else (), masks)

    def loss(learner: Learner, seen: Seen, before: Before) -> Float[Array, ""]:
        del learner
        task, moved = seen.context.task.index, seen.part.adapter - before.base
        old = jnp.where(_first(before.mask, task), before.mask, 0.0)
        if not retroactive:  # the masks of all tasks at once: nothing has an axis T and N
            return weight / 2 * jnp.sum(moved**2 * arrays.of_outputs(jnp.sum(old**2, axis=0)))
        drift = moved * arrays.of_outputs(old) + seen.part.classifier.adaptive - before.adaptive
        return weight / 2 * jnp.sum(jnp.where(_first(drift, task), drift, 0.0) ** 2)

    def keep(context: ClientContext, memory: Before, part: Model, state: Before) -> Before:
        """The mask now; base and A of a task's last round, and before it those of the task before."""
        del memory
        own: Own = part.classifier
        mask = state.mask.at[context.task.index].set(jax.nn.sigmoid(own.mask))
        now = Before(part.adapter, own.adaptive if retroactive else (), mask)
        last = context.client.round == sizes.rounds - 1
        pick = lambda new, old: jnp.where(last, new, old)
        return jax.tree.map(pick, now, state)._replace(mask=mask)

    return Term("preservation", loss, init=init, open=lambda context, state, key: state, keep=keep)


def others_only() -> Term:
    """A client pays no attention to parameters of its own that the server hands out to everybody (equation 1
    sums over the others; the release has no such exception)."""

    def limit(context: ClientContext, part: Model) -> Model:
        own: Own = part.classifier
        theirs = context.cached.adapter.client[context.task.index] != context.client.id
        attention = jnp.where(theirs[:, None], own.attention, 0.0)
        return part._replace(classifier=own._replace(attention=attention))

    return Term("others_only", limit=limit)


# ---- the server's knowledge base ---------------------------------------------------------------------------


class Knowledge(NamedTuple):
    """A of the last S finished tasks of all K clients, and which there are."""

    adaptive: Float[Array, "S K N"]
    known: Bool[Array, "S K"]


def knowledge_base(options: FedWeITOptions, sizes: Sizes) -> ServerStep:
    """When a task is over everybody who had rows of it sends its pruned A, and the server draws which of all
    that it holds it hands out for the next task: R at random, without repetition.

    Metric: the share of the numbers of the A that are not 0, which is what a sparse format would send.
    """

    def init(params: Model, part: Model) -> Knowledge:
        del params
        shape = (options.remembered, sizes.clients)
        return Knowledge(jnp.zeros((*shape, len(part.adapter))), jnp.zeros(shape, bool))

    def look(learner: Learner, seen: Seen, total: Array) -> Float[Array, " N"]:
        del learner, total
        own: Own = seen.part.classifier
        adaptive = own.adaptive[seen.context.task.index] if options.retroactive else own.adaptive
        return pruned(adaptive, options.prune)

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        state: Knowledge,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner
        state = remember(state, round_context.task.index % options.remembered, aggregate)
        received = hand_out(state, params.adapter.received, round_context.task.index + 1, key)
        params = params._replace(adapter=params.adapter._replace(received=received))
        return params, state, {"nonzero": _nonzero(aggregate)}

    collect = Collect("adaptive", lambda context: jnp.zeros_like(context.payload.part.adapter), look)
    # nothing is merged, so that there is no aggregation rule that it does not follow
    return ServerStep("knowledge", step, init, collects=(collect,), follows_rule=True)


def remember(state: Knowledge, slot: ArrayLike, aggregate: Aggregate) -> Knowledge:
    """With what arrived in the place of what each of these clients sent S tasks ago."""
    client = jnp.where(aggregate.valid, aggregate.id, state.known.shape[1])
    put = lambda all_, new: all_.at[slot, client].set(new, mode="drop")
    return Knowledge(put(state.adaptive, aggregate.gather["adaptive"]), put(state.known, aggregate.valid))


def hand_out(state: Knowledge, received: Received, task: ArrayLike, key: PRNGKeyArray) -> Received:
    """What was handed out, with R of all that is known for one task; after the last task nothing changes."""
    known, count = state.known.reshape(-1), received.client.shape[1]
    priority = jnp.where(known, jax.random.uniform(key, known.shape), -1.0)
    order = jnp.argsort(-priority)[:count]
    order = jnp.pad(order, (0, count - len(order)), constant_values=len(known))  # where R is more than all
    real = known.at[order].get(mode="fill", fill_value=False)
    chosen = state.adaptive.reshape(len(known), -1).at[order].get(mode="fill", fill_value=0.0)
    client = jnp.where(real, order % state.known.shape[1], -1)
    values = received.values.at[task].set(jnp.where(real[:, None], chosen, 0.0), mode="drop")
    return Received(values, received.client.at[task].set(client, mode="drop"))


def _nonzero(aggregate: Aggregate) -> Weighted:
    sent = jnp.where(aggregate.valid[:, None], aggregate.gather["adaptive"], 0.0)
    numbers = jnp.sum(aggregate.valid) * sent.shape[1]
    return Weighted(jnp.sum(sent != 0).astype(jnp.float32), numbers.astype(jnp.float32))


def handover(round_context: RoundContext, server: ServerState) -> Float[Array, "R N"]:
    """What every client is handed from the knowledge base when a task begins, for counting."""
    return server.params.adapter.received.values[round_context.task.index]
