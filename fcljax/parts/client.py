"""Clients: their training step, the rules that methods add to it, and their reports.

A `ClientRule` acts in training and may keep a state per client. A `Report` goes to the
server besides the trainable parameters. `train_step` is the only training step of the
package: read it first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError, choose
from fcljax.federated.health import ACCURACY, CROSS_ENTROPY, GRADIENT_NORM, NOT_FINITE
from fcljax.federated.sums import joined
from fcljax.parts.learner import (
    Learner,
    Loss,
    Output,
    Params,
    correct_examples,
    total_cross_entropy,
)
from fcljax.parts.user_code import check_arguments
from fcljax.types import (
    Batch,
    ClientContext,
    LearningRate,
    LearningRateSchedule,
    Metrics,
    Phase,
    TrainingProgress,
    View,
    Weighted,
)

# names of the loss's terms in messages and metrics: the clients' own, and the adapter's
OWN = "own"
ADAPTER = "adapter"


class Training(NamedTuple):
    """How clients train: epochs with an optimiser that is new in every round."""

    epochs: int
    """Passes over the client's examples in a round."""
    batch_size: int
    """Examples of a step."""
    lr: LearningRate
    """Of all parameters but those of an adapter with its own rate (`Adapter.rate`)."""
    optimiser: optax.GradientTransformation = optax.scale_by_adam()
    """Gives the direction of a step; the learning rate is applied afterwards."""
    schedule: LearningRateSchedule | None = None
    """Learning-rate schedule; None: constant."""
    rounds: int = 1
    """Rounds of a task, for the schedule."""
    loss: Loss | None = None
    """The clients' own loss; None: they never train."""

    def rate_factor(self, context: ClientContext, epoch: Int[Array, ""] | int) -> Array | float:
        """Return the factor on all learning rates in an epoch of the client's round."""
        if self.schedule is None:
            return 1.0
        progress = TrainingProgress(context.client.round, self.rounds, jnp.asarray(epoch), self.epochs)
        return self.schedule(progress)

    def epoch_of(self, context: ClientContext, steps: Int[Array, ""]) -> Int[Array, ""]:
        """Return the epoch of a client that has taken so many steps in this round."""
        # rounded up, as the last batch of an epoch may be short; at least 1, because a
        # client without examples would divide by 0
        steps_per_epoch = jnp.maximum(-(-context.client.examples // self.batch_size), 1)
        return steps // steps_per_epoch


class ClientStep(NamedTuple):
    """One batch of a client, as its rules and reports see it."""

    learner: Learner
    """The method's learner."""
    context: ClientContext
    """What the client knows: frozen network, payload, cached parameters, task, examples."""
    trainable: Params
    """The client's trainable parameters before the step."""
    output: Output
    """What the learner computed for the batch."""
    batch: Batch
    """The examples, with the mask of those that count."""
    key: PRNGKeyArray
    """The key of this step."""
    drawn: Params
    """The parameters of `output`: `trainable`, or a Bayesian learner's draw from it."""
    train: bool = True
    """Whether `output` was computed as in training. False in passes that measure, where
    batch norm or a vote of the batch would make the result depend on the batch size."""

    def forward(self, trainable: Params, train: bool | None = None) -> Output:
        """Compute the batch's output of other parameters; `train` None: as in `output`."""
        if train is None:
            train = self.train
        context = self.context
        return self.learner.forward(
            context.frozen, context.cached, trainable, self.batch, context.task, train
        )


@runtime_checkable
class StepLoss(Protocol):
    """Returns a scalar that is added to the client's loss at every step."""

    def __call__(self, step: ClientStep, memory: Any, /) -> Array | float: ...


@runtime_checkable
class StepMemory(Protocol):
    """Returns the memory after a batch."""

    def __call__(self, step: ClientStep, memory: Any, /) -> Any: ...


@runtime_checkable
class RoundStart(Protocol):
    """Returns a rule's memory for the round from the state that the client kept."""

    def __call__(self, context: ClientContext, state: Any, key: PRNGKeyArray, /) -> Any: ...


@runtime_checkable
class RoundEnd(Protocol):
    """Returns the state that the client keeps until its next round."""

    def __call__(
        self,
        context: ClientContext,
        memory: Any,
        trainable: Params,
        state: Any,
        /,
    ) -> Any: ...


@runtime_checkable
class Project(Protocol):
    """Returns the trainable parameters after a step, moved to where the rule allows them to be."""

    def __call__(self, context: ClientContext, trainable: Params, /) -> Params: ...


def _stateless(_key: PRNGKeyArray, _trainable: Params) -> tuple:
    return ()


def _memory_is_state(_context: ClientContext, state: PyTree, _key: PRNGKeyArray) -> PyTree:
    return state


def _keep_state(
    _context: ClientContext,
    _memory: PyTree,
    _trainable: Params,
    state: PyTree,
) -> PyTree:
    return state


@dataclass(frozen=True)
class ClientPass:
    """A pass over the client's examples besides training: a rule updates its memory."""

    when: Literal["before_training", "after_training", "task_end"]
    """`task_end`: after a task's last round, with its model, at clients with examples."""
    view: View
    """How the examples are read."""
    step: StepMemory
    """step(step, memory) -> the memory after a batch."""
    on_start: RoundStart = _memory_is_state
    """on_start(context, state, key) -> the memory of the pass; read at `task_end` only."""
    on_end: RoundEnd = _keep_state
    """on_end(context, memory, trainable, state) -> the state after a `task_end` pass."""
    trains: bool = False
    """Whether the rule trains its own parameters in it; the client's stay."""

    def __post_init__(self) -> None:
        choose("when", self.when, ("before_training", "after_training", "task_end"))
        check_arguments(
            "client pass", step=(self.step, 2), on_start=(self.on_start, 3), on_end=(self.on_end, 4)
        )


@dataclass(frozen=True)
class Replay:
    """Past examples of the client that join every training batch."""

    count: int
    """The most examples that join a batch."""
    stored: Callable[[PyTree], Int[Array, " M"]]
    """stored(state) -> indices of the training examples that the client may replay; -1: an
    empty place."""
    choose: Callable[[ClientContext, PyTree, PRNGKeyArray], Int[Array, " count"]]
    """choose(context, memory, key) -> indices into `stored`; -1: none."""

    def __post_init__(self) -> None:
        check_arguments("replay", stored=(self.stored, 1), choose=(self.choose, 3))


@dataclass(frozen=True)
class ClientRule:
    """What clients do besides minimising their loss; only the name is required."""

    name: str
    """Names the rule in messages, and its parameters."""
    loss: StepLoss | None = None
    """loss(step, memory) -> a scalar that is added to the client's loss in every step."""
    init: Callable[[PRNGKeyArray, Params], PyTree] = _stateless
    """init(key, trainable) -> the client's state before its first participation."""
    on_start: RoundStart = _memory_is_state
    """on_start(context, state, key) -> the memory for the round."""
    passes: tuple[ClientPass, ...] = ()
    """Passes over the client's examples besides training."""
    on_end: RoundEnd = _keep_state
    """on_end(context, memory, trainable, state) -> the state that the client keeps."""
    project: Project | None = None
    """project(context, trainable) -> the parameters, moved to where the rule allows;
    after every step."""
    replay: Replay | None = None
    """Past examples that join every training batch."""
    parameters: Callable[[PRNGKeyArray], PyTree] | None = None
    """parameters(key) -> the rule's own, which train and travel as `Params.extra[name]`."""

    def __post_init__(self) -> None:
        check_arguments(
            f"client rule {self.name!r}",
            loss=(self.loss, 2),
            init=(self.init, 2),
            on_start=(self.on_start, 3),
            on_end=(self.on_end, 4),
            project=(self.project, 2),
            parameters=(self.parameters, 1),
        )

    def pass_at(self, when: str, level: int) -> ClientPass | None:
        """Return pass number `level`, from 0, of the rule's passes at this time; None: it
        has fewer."""
        passes = [client_pass for client_pass in self.passes if client_pass.when == when]
        return passes[level] if level < len(passes) else None


# ---- reports ---------------------------------------------------------------------------


class ClientEnd(NamedTuple):
    """A client after its training, as its reports see it."""

    context: ClientContext
    """What the client knows."""
    trainable: Params
    """The trainable parameters after training."""
    memories: dict[str, PyTree]
    """The memory of each client rule, by its name."""


def _empty(_context: ClientContext) -> tuple:
    return ()


def _unchanged(_step: ClientStep, total: PyTree) -> PyTree:
    return total


def _total(_end: ClientEnd, total: PyTree) -> PyTree:
    return total


@dataclass(frozen=True)
class Report:
    """What a client sends besides its trainable parameters, in `ServerRound.reports[name]`."""

    name: str
    """The report's name in `ServerRound.reports`."""
    init: Callable[[ClientContext], PyTree] = _empty
    """init(context) -> the total before the first batch."""
    step: StepMemory = _unchanged
    """step(step, total) -> the total after a batch."""
    finalize: Callable[[ClientEnd, PyTree], PyTree] = _total
    """finalize(end, total) -> what is sent."""
    view: View | None = None
    """How a pass after training reads examples; None: in training, before each update."""
    merge: Literal["gather", "sum"] = "gather"
    """`gather`: one per client, [P, ...]; `sum`: added up."""
    follows_rule: bool = False
    """Whether the server rule merges it by the run's aggregation rule, or merges nothing,
    so that the run may choose any rule."""
    possible: Callable[[ClientContext, PyTree], Bool[Array, ""]] | None = None
    """possible(context, sent) -> whether a client that read `context.client.examples`
    examples can have sent it (over several epochs, each reading counts); the server
    rejects uploads that cannot be."""

    def __post_init__(self) -> None:
        choose("merge", self.merge, ("gather", "sum"))
        part = f"report {self.name!r}"
        check_arguments(part, init=(self.init, 1), step=(self.step, 2), finalize=(self.finalize, 2))
        check_arguments(part, possible=(self.possible, 2))
        if self.follows_rule and self.merge == "sum":
            raise InputError(
                f"follows_rule: {part} is a sum, which no aggregation rule can merge; nearest: False"
            )


@dataclass(frozen=True)
class OfEachClient:
    """A report of trainable parameters themselves, one set per client."""

    name: Literal["adapter", "classifier", "trainable"]
    """`trainable`: all of them, besides their mean. Else this part alone, which is then
    not averaged: the server rule merges it."""
    follows_rule: bool = False
    """As in a `Report`."""

    def __post_init__(self) -> None:
        choose("name", self.name, ("adapter", "classifier", "trainable"))


# ---- the training step -----------------------------------------------------------------


class ClientWork(NamedTuple):
    """The static parts of a client's work: nothing here depends on data."""

    learner: Learner
    training: Training
    rules: tuple[ClientRule, ...]
    reports: tuple[Report, ...]


class Local(NamedTuple):
    """A client's local state within a round."""

    trainable: Params
    optimiser: PyTree
    """The optimiser's state."""
    memory: tuple[PyTree, ...]
    """The memory of each client rule, in their order."""
    totals: dict[str, PyTree]
    """The total of each report so far, by its name."""
    steps: Int[Array, ""]
    """Training steps so far."""


def train_step(
    work: ClientWork, context: ClientContext, local: Local, batch: Batch, key: PRNGKeyArray
) -> tuple[Local, Metrics]:
    """Take one training step: the gradient of the loss, and a step of the optimiser against it."""
    learner = work.learner

    def expected_loss(trainable: Params) -> tuple[Array, Output]:
        # a Bayesian learner draws the parameters of its forward pass from `trainable`;
        # for every other learner `drawn` is `trainable`
        return learner.expectation(functools.partial(loss_at, trainable), trainable, batch, key)

    def loss_at(trainable: Params, drawn: Params) -> tuple[Array, Output]:
        output = learner.forward(context.frozen, context.cached, drawn, batch, context.task, True)
        step = ClientStep(learner, context, trainable, output, batch, key, drawn)
        return add_terms(loss_terms(work, step, local.memory), batch.term_weights), output

    (loss, output), gradient = jax.value_and_grad(expected_loss, has_aux=True)(local.trainable)
    # the optimiser gives only the direction: learning rates differ between the leaves
    direction, optimiser = work.training.optimiser.update(gradient, local.optimiser, local.trainable)
    # running statistics move with the forward pass
    trainable = descend(work, context, local, direction)._replace(stats=output.stats)
    # reports see the model before the update, which `output` was computed with
    step = ClientStep(learner, context, local.trainable, output, batch, key, local.trainable)
    reports = [report for report in work.reports if report.view is None]
    totals = local.totals | add_to_totals(reports, step, local.totals)
    metrics = step_metrics(work, step, loss, gradient)
    return Local(trainable, optimiser, local.memory, totals, local.steps + 1), metrics


def loss_terms(
    work: ClientWork,
    step: ClientStep,
    memory: tuple[PyTree, ...],
) -> list[Array | float]:
    """Return the terms of the loss, in the order of `term_names`: the clients' own loss,
    the adapter's, and one for each rule that has a loss."""
    assert work.training.loss is not None
    context = step.context
    terms: list[Array | float] = [work.training.loss.value(step.output, step.batch, context.task)]
    adapter_loss = work.learner.adapter.loss
    if adapter_loss is not None:
        terms.append(
            adapter_loss(
                context.cached.adapter,
                step.drawn.adapter,
                step.output.query,
                context.task,
                step.batch.mask,
            )
        )
    for rule, rule_memory in zip(work.rules, memory, strict=True):
        if rule.loss:
            terms.append(rule.loss(step, rule_memory))
    return terms


def term_names(work: ClientWork) -> tuple[str, ...]:
    """Return the names of the loss's terms, in order; none if clients never train."""
    if work.training.loss is None:
        return ()
    adapter = () if work.learner.adapter.loss is None else (ADAPTER,)
    return (OWN, *adapter, *(rule.name for rule in work.rules if rule.loss))


def add_terms(
    terms: list[Array | float],
    weights: Float[Array, " terms"] | None,
) -> Float[Array, ""]:
    """Return the sum of the loss's terms, each times its weight; None: each counts once."""
    if weights is not None:
        terms = [weights[i] * term for i, term in enumerate(terms)]
    return jnp.asarray(functools.reduce(jnp.add, terms))


def descend(work: ClientWork, context: ClientContext, local: Local, direction: PyTree) -> Params:
    """Return trainable - learning rate * direction, after the rules' projections."""
    training = work.training
    factor = training.rate_factor(context, training.epoch_of(context, local.steps))
    trainable = moved_against(training, work.learner, local.trainable, direction, factor)
    # each rule projects what the rules before it returned
    for rule in work.rules:
        if rule.project:
            trainable = rule.project(context, trainable)
    return trainable


def moved_against(
    training: Training,
    learner: Learner,
    trainable: Params,
    direction: PyTree,
    factor: Array | float = 1.0,
) -> Params:
    """Return trainable - factor * learning rate * direction, with the adapter's own rate
    where it has one."""
    adapter_rate = learner.adapter.rate
    if adapter_rate is None:
        adapter_rate = training.lr
    # in the order of `Params`: adapter, classifier, parameters of client rules
    rates = (adapter_rate, training.lr, training.lr)

    def updated(params: PyTree, direction: PyTree, rate: LearningRate) -> PyTree:
        return jax.tree.map(lambda x, step: x - rate * factor * step, params, direction)

    # without the last field: running statistics have no gradient
    parts = map(updated, trainable[:3], direction[:3], rates)
    return Params(*parts, stats=trainable.stats)


def step_metrics(
    work: ClientWork, step: ClientStep, loss: Float[Array, ""], gradient: Params
) -> dict[str, Weighted]:
    """Return what a training step records: its loss and, where labels are classes,
    accuracy and cross-entropy; where the loss has several terms, its gradient's norm."""
    training_loss = work.training.loss
    assert training_loss is not None
    batch = step.batch
    task = step.context.task
    examples = jnp.sum(batch.mask).astype(jnp.float32)
    # metrics are sums with weights, so that short batches count less; a loss that is a
    # sum already must not be multiplied again
    total = loss if training_loss.reduction == "sum" else loss * examples
    metrics = {
        "loss": Weighted(total, examples),
        NOT_FINITE: Weighted(jnp.where(jnp.isfinite(total), 0.0, examples), examples),
    }
    labels_are_classes = batch.label.ndim == 1 and jnp.issubdtype(batch.label.dtype, jnp.integer)
    if labels_are_classes and step.output.losses is None:
        correct = correct_examples(training_loss, step.output, batch, task)
        metrics[ACCURACY] = Weighted(correct, examples)
        metrics[CROSS_ENTROPY] = total_cross_entropy(training_loss, step.output, batch, task)
    if len(term_names(work)) > 1:
        # small leaves as one vector: the norm of each leaf alone takes 50 ms to compile
        leaves = joined(jax.tree.leaves(gradient._replace(stats=())))
        metrics[GRADIENT_NORM] = Weighted(optax.tree.norm(leaves), jnp.float32(1))
    return metrics


def first_totals(reports: tuple[Report, ...], context: ClientContext) -> dict[str, PyTree]:
    """Return the totals of reports before the first batch."""
    return {report.name: report.init(context) for report in reports}


def add_to_totals(
    reports: list[Report],
    step: ClientStep,
    totals: dict[str, PyTree],
) -> dict[str, PyTree]:
    """Return the totals of some reports after a batch."""
    return {report.name: report.step(step, totals[report.name]) for report in reports}


def finalized(
    reports: tuple[Report, ...], end: ClientEnd, totals: dict[str, PyTree]
) -> dict[str, tuple[Report, PyTree]]:
    """Return name -> (report, what the client sends of it)."""
    return {report.name: (report, report.finalize(end, totals[report.name])) for report in reports}


# ---- passes without training -----------------------------------------------------------


def passes_before(work: ClientWork) -> tuple[Phase, ...]:
    """Return the rules' passes before training."""
    return _levels(work, "before_training", ())


def passes_after(work: ClientWork) -> tuple[Phase, ...]:
    """Return the rules' passes after training, joined by reports with their own view."""
    return _levels(work, "after_training", tuple(report for report in work.reports if report.view))


def passes_at_task_end(work: ClientWork) -> tuple[Phase, ...]:
    """Return the rules' passes after a task's last round."""
    return _levels(work, "task_end", ())


def _levels(work: ClientWork, when: str, reports: tuple[Report, ...]) -> tuple[Phase, ...]:
    """Return the phases of a time: the first passes of all rules, then the second ones.

    A rule's second pass may need the result of its first, so it must come later.
    """
    phases: tuple[Phase, ...] = ()
    level = 0
    while True:
        passes_of_level = {}
        for i, rule in enumerate(work.rules):
            client_pass = rule.pass_at(when, level)
            if client_pass:
                passes_of_level[i] = client_pass
        # level 0 is needed without rules too, for the reports
        if level > 0 and not passes_of_level:
            return phases
        phases += passes(work, passes_of_level, reports if level == 0 else ())
        level += 1


def passes(
    work: ClientWork, rule_passes: dict[int, ClientPass], reports: tuple[Report, ...]
) -> tuple[Phase, ...]:
    """Return one phase for each view: rules, by their index, and reports that share a
    view share one reading of the examples. Rules that train have phases of their own."""
    kinds = [(client_pass.view, client_pass.trains) for client_pass in rule_passes.values()]
    kinds += [(report.view, False) for report in reports if report.view]

    def phase(view: View, trains: bool) -> Phase:
        steps = {
            i: client_pass.step
            for i, client_pass in rule_passes.items()
            if (client_pass.view, client_pass.trains) == (view, trains)
        }
        # reports measure, so they never join a pass that trains
        reports_of_view = [report for report in reports if report.view == view and not trains]
        step = functools.partial(_step_of_pass, work, steps, reports_of_view, trains)
        return Phase(view, step, trains=trains)

    # each kind once, in a fixed order: keys of batches depend on the number of the phase
    return tuple(phase(*kind) for kind in dict.fromkeys(kinds))


def _step_of_pass(
    work: ClientWork,
    steps: dict[int, StepMemory],
    reports: list[Report],
    trains: bool,
    context: ClientContext,
    local: Local,
    batch: Batch,
    key: PRNGKeyArray,
) -> tuple[Local, Metrics]:
    """Show one batch to rules and reports. In a pass that trains, rules alone train."""
    trainable = local.trainable
    # adapters work as in training, but neither a batch's statistics nor its votes may
    # change what is measured
    depends_on_batch = work.learner.network.split is not None or work.learner.adapter.train_batchwise
    train = trains or not depends_on_batch
    output = work.learner.forward(context.frozen, context.cached, trainable, batch, context.task, train)
    step = ClientStep(work.learner, context, trainable, output, batch, key, trainable, train)
    memory = list(local.memory)
    for i, rule_step in steps.items():
        memory[i] = rule_step(step, memory[i])
    totals = local.totals | add_to_totals(reports, step, local.totals)
    return local._replace(memory=tuple(memory), totals=totals), {}


# ---- the start and the end of a client -------------------------------------------------


def start_memory(
    rules: tuple[ClientRule, ...],
    when: str,
    context: ClientContext,
    state: tuple,
    key: PRNGKeyArray,
) -> tuple[PyTree, ...]:
    """Return each rule's memory when a client starts; rules' states come first in `state`."""

    def memory(i: int, rule: ClientRule) -> PyTree:
        part = _part_at(rule, when)
        if part is None:
            return ()
        # the first rule has the client's key: a second rule does not change its draws
        rule_key = key if i == 0 else jax.random.fold_in(key, i)
        return part.on_start(context, state[i], rule_key)

    return tuple(memory(i, rule) for i, rule in enumerate(rules))


def end_state(
    rules: tuple[ClientRule, ...], when: str, context: ClientContext, local: Local, state: tuple
) -> tuple[PyTree, ...]:
    """Return each rule's state when a client ends. At a task's end, rules without a pass
    there keep theirs."""

    def after(i: int, rule: ClientRule) -> PyTree:
        part = _part_at(rule, when)
        if part is None:
            return state[i]
        return part.on_end(context, local.memory[i], local.trainable, state[i])

    return tuple(after(i, rule) for i, rule in enumerate(rules))


def _part_at(rule: ClientRule, when: str) -> ClientRule | ClientPass | None:
    """Return what starts and ends a client for a rule: itself, or its task-end pass."""
    if when == "task_end":
        return rule.pass_at("task_end", 0)
    return rule
