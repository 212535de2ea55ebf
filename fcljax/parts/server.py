"""Server rules: the steps that a method adds after the aggregation of uploads."""

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
    """The inputs of a server rule.

    P: the participants of the round, padded."""

    learner: Learner
    """The method's learner."""
    frozen: Frozen
    """Parameters that never train."""
    task: Task
    """The current task."""
    index: Int[Array, ""]
    """Number of the round in its task, from 0."""
    last: Bool[Array, ""]
    """Whether it is the last round of the task."""
    previous: Broadcast
    """The broadcast of this round."""
    reports: dict[str, Any]
    """By name: [P, ...] per client, or a sum.

    Gathered reports of invalid clients have arbitrary values, NaN included."""
    valid: Bool[Array, " P"]
    """Participants whose upload arrived and is finite."""
    ids: Int[Array, " P"]
    """The participants' numbers."""
    weights: Float[Array, " P"]
    """Weight of each upload in the mean: the client's number of examples, unless the
    aggregation rule changed it."""
    key: PRNGKeyArray
    """Key of this round and rule."""


class ServerUpdate(NamedTuple):
    """The result of a server rule."""

    params: Params
    """Parameters of all tasks."""
    state: Any = ()
    """The rule's state."""
    metrics: Metrics = {}
    """Recorded under the rule's name."""


@runtime_checkable
class Update(Protocol):
    """Returns the parameters and the rule's state after a round.

    `params` hold the merged upload."""

    def __call__(self, round: ServerRound, params: Params, state: Any, /) -> ServerUpdate: ...


def _stateless(_params: Params, _trainable: Params) -> tuple:
    return ()


@dataclass(frozen=True)
class ServerRule:
    """A step of the server after merging."""

    name: str
    """Names the rule in messages, payloads and metrics."""
    update: Update
    """update(round, params, state) -> the parameters, the rule's state and metrics after
    a round."""
    init: Callable[[Params, Params], PyTree] = _stateless
    """init(params, trainable) -> the rule's first state; `trainable` are those of the
    first task."""
    sends: Callable[[Task, Any], PyTree] | None = None
    """sends(task, state) -> what clients get in `context.payload.sent[name]`, in every
    round."""
    reports: tuple[Report | OfEachClient, ...] = ()
    """Reports that it reads."""
    when: RuleTime = "round"
    """In every round; or once per task, in a round of its own in which every client
    with examples reports and nobody trains."""

    def __post_init__(self) -> None:
        choose("when", self.when, ("round", "task_start", "task_end"))
        part = f"server rule {self.name!r}"
        if self.update is None:
            raise InputError(f"update: {part} has none; it needs update(round, params, state)")
        check_arguments(part, update=(self.update, 3), init=(self.init, 2), sends=(self.sends, 2))


def merged_by_rules(rules: tuple[ServerRule, ...]) -> tuple[str, ...]:
    """Return the parts of the parameters that server rules merge themselves, in place of
    the mean."""
    names = _params_of_each_client(rules)
    return tuple(name for name in names if name != "trainable")


def sees_each_client(rules: tuple[ServerRule, ...]) -> bool:
    """Return whether a server rule reads all trainable parameters of each client."""
    return "trainable" in _params_of_each_client(rules)


def _params_of_each_client(rules: tuple[ServerRule, ...]) -> list[str]:
    """Return the names of the parameters of each client that server rules read."""
    reports = [report for rule in rules for report in rule.reports]
    return [report.name for report in reports if isinstance(report, OfEachClient)]


def reports_of(rules: tuple[ServerRule, ...]) -> tuple[Report, ...]:
    """Return the reports that these rules ask for; rules share a report of the same name."""
    reports = [report for rule in rules for report in rule.reports if isinstance(report, Report)]
    # a dict by name has each report once; rules that share one ask for the same report
    return tuple({report.name: report for report in reports}.values())


def check_aggregation(
    rules: tuple[ServerRule, ...], aggregation: Aggregation, sends_nothing: bool = False
) -> None:
    """Check that each server rule can work under the run's aggregation rule.

    Args:
      rules: of the server.
      aggregation: of the run.
      sends_nothing: whether uploads are empty, so that there is nothing to merge.

    Raises:
      InputError: naming the aggregation rule and the server rule that merges by a formula
        of its own, or for empty uploads.
    """
    # the plain mean has nothing that a rule's own formula could ignore
    if aggregation.pre is None and aggregation.reduce is None and aggregation.post is None:
        return
    if sends_nothing:
        raise InputError(
            f"aggregator: {aggregation.name!r} has nothing to merge, because clients send nothing; "
            "nearest: 'mean'"
        )
    for rule in rules:
        # noise of differential privacy covers the mean alone: any report would leak
        if rule.reports and (aggregation.noise or not _follows(rule, aggregation)):
            raise InputError(
                f"aggregator: {aggregation.name!r} cannot be applied, because {rule.name} merges "
                f"uploads by its own rule; nearest: 'mean'"
            )


def _follows(rule: ServerRule, aggregation: Aggregation) -> bool:
    """Return whether a server rule works with an aggregation rule other than the mean."""
    reads_all_params = sees_each_client((rule,))
    merges = merged_by_rules((rule,))
    # a rule that reads parameters and merges none of them
    # leaves their mean to the aggregation rule
    if reads_all_params and not merges and aggregation.name == "uniform":
        return True
    # clipping (`pre`) and server optimisers (`post`) act on the mean of all parameters,
    # so they would miss those that a server rule merges. The `pre` of "uniform" sets
    # weights alone
    misses_some = merges and (aggregation.post or (aggregation.pre and aggregation.name != "uniform"))
    return all(report.follows_rule for report in rule.reports) and not misses_some
