"""What servers do: the rules that a method adds to the aggregation of what clients send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError, choose
from fcljax.federated.aggregation import Aggregation
from fcljax.parts.client import OfEachClient, Report
from fcljax.parts.learner import Learner, Params
from fcljax.parts.user_code import check_arguments
from fcljax.types import Broadcast, Frozen, Metrics, Task

RuleTime = Literal["round", "task_start", "task_end"]


class ServerRound(NamedTuple):
    """Everything that a server rule may read. P: the participants of the round, padded."""

    learner: Learner
    """Of the method."""
    frozen: Frozen
    """What never trains."""
    task: Task
    """The current one."""
    index: Int[Array, ""]
    """Of the round in its task, from 0."""
    last: Bool[Array, ""]
    """Whether it is the last round of the task."""
    previous: Broadcast
    """What clients worked from in this round."""
    reports: dict[str, Any]
    """By name: [P, ...] per client, or a sum. Reports of clients that are not valid hold anything."""
    valid: Bool[Array, " P"]
    """Participants whose upload arrived and is finite."""
    ids: Int[Array, " P"]
    """The participants' numbers."""
    weights: Float[Array, " P"]
    """Of each upload in the mean: the client's number of examples, unless the aggregation rule changed it."""
    key: PRNGKeyArray
    """Of this round and rule."""


class ServerUpdate(NamedTuple):
    """What a server rule returns."""

    params: Params
    """Of all tasks."""
    state: Any = ()
    """What the rule keeps until the next round."""
    metrics: Metrics = {}
    """Recorded under the rule's name."""


@runtime_checkable
class Update(Protocol):
    """Returns the parameters and the rule's state after a round. `params` hold the merged upload."""

    def __call__(self, round: ServerRound, params: Params, state: Any, /) -> ServerUpdate: ...


def _stateless(_params: Params, _trainable: Params) -> tuple:
    return ()


@dataclass(frozen=True)
class ServerRule:
    """What the server does with what was merged."""

    name: str
    """Of the rule in messages, payloads and metrics."""
    update: Update
    """update(round, params, state) -> the parameters, the rule's state and metrics after a round."""
    init: Callable[[Params, Params], PyTree] = _stateless
    """init(params, trainable) -> the rule's first state; `trainable` are those of the first task."""
    sends: Callable[[Task, Any], PyTree] | None = None
    """sends(task, state) -> what clients get in `context.payload.sent[name]`, in every round."""
    reports: tuple[Report | OfEachClient, ...] = ()
    """What clients must send for it."""
    when: RuleTime = "round"
    """In every round; or once per task, in a round of its own in which every client with examples reports and
    nobody trains."""

    def __post_init__(self) -> None:
        choose("when", self.when, ("round", "task_start", "task_end"))
        part = f"server rule {self.name!r}"
        if self.update is None:
            raise InputError(f"update: {part} has none; it needs update(round, params, state)")
        check_arguments(part, update=(self.update, 3), init=(self.init, 2), sends=(self.sends, 2))


def merged_by_rules(rules: tuple[ServerRule, ...]) -> tuple[str, ...]:
    """The parts of the parameters that server rules merge themselves, in place of the mean."""
    every = (report for rule in rules for report in rule.reports)
    return tuple(each.name for each in every if isinstance(each, OfEachClient) and each.name != "trainable")


def sees_each_client(rules: tuple[ServerRule, ...]) -> bool:
    """Whether a server rule reads the trainable parameters of each client."""
    every = (report for rule in rules for report in rule.reports)
    return any(isinstance(each, OfEachClient) and each.name == "trainable" for each in every)


def reports_of(rules: tuple[ServerRule, ...]) -> tuple[Report, ...]:
    """What clients report for these rules; rules that ask for the same name share it."""
    every = [report for rule in rules for report in rule.reports if isinstance(report, Report)]
    return tuple({report.name: report for report in every}.values())


def check_aggregation(rules: tuple[ServerRule, ...], aggregation: Aggregation) -> None:
    """Check that each server rule can work under the run's aggregation rule.

    Raises:
      InputError: naming the aggregation rule and the server rule that merges by a formula of its own.
    """
    if aggregation.pre is None and aggregation.reduce is None and aggregation.post is None:
        return
    for rule in rules:
        if rule.reports and (aggregation.noise or not _follows(rule, aggregation)):
            raise InputError(
                f"aggregator: {aggregation.name!r} cannot be honoured, because {rule.name} merges what "
                f"clients send by a rule of its own; nearest: 'mean'"
            )


def _follows(rule: ServerRule, aggregation: Aggregation) -> bool:
    whole = sees_each_client((rule,))
    merges = merged_by_rules((rule,))
    # a rule that merges none of the parameters that it reads leaves their mean to the aggregation rule
    if whole and not merges and aggregation.name == "uniform":
        return True
    # clipping and server optimisers act on what is averaged, so not on what a server rule merges itself
    partly = merges and (aggregation.post or (aggregation.pre and aggregation.name != "uniform"))
    return all(report.follows_rule for report in rule.reports) and not partly
