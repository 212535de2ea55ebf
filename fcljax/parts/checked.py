"""Rules and reports whose functions check what they read and return.

`federate` wraps what a user gives it once, so that nothing else needs to check. Each
mistake is one line that names the part, the function and its place in the user's file.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, PyTree

from fcljax.errors import InputError
from fcljax.federated.check import describe
from fcljax.parts.client import ClientEnd, ClientPass, ClientRule, ClientStep, Report
from fcljax.parts.learner import Params
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.user_code import check_like, check_scalar, reading
from fcljax.types import ClientContext

_NOT_SENT = "which no server rule sends"
_NOT_REPORTED = "which it does not ask for in its reports"


def checked_client_rule(rule: ClientRule) -> ClientRule:
    """Return a client rule with checks around its functions."""
    part = f"client rule {rule.name!r}"
    return dataclasses.replace(
        rule,
        loss=rule.loss and _scalar(part, rule.loss),
        on_start=_readable(part, rule.on_start),
        passes=tuple(_checked_pass(part, client_pass) for client_pass in rule.passes),
        on_end=_like_argument(part, rule.on_end, 3),
        project=rule.project and _like_argument(part, rule.project, 1),
    )


def _checked_pass(part: str, client_pass: ClientPass) -> ClientPass:
    return dataclasses.replace(
        client_pass,
        step=_like_argument(part, client_pass.step, 1),
        on_start=_readable(part, client_pass.on_start),
        on_end=_like_argument(part, client_pass.on_end, 3),
    )


def checked_report(report: Report) -> Report:
    """Return a report with checks around its functions."""
    part = f"report {report.name!r}"
    finalize = report.finalize

    @functools.wraps(finalize)
    def checked_finalize(end: ClientEnd, total: PyTree) -> PyTree:
        names = {**end.context.payload.sent, **end.memories}
        # a report may read what server rules send and the memories of client rules
        with reading(part, finalize, names, f"{_NOT_SENT} and no client rule is named"):
            return finalize(end, total)

    return dataclasses.replace(
        report,
        init=_readable(part, report.init),
        step=_like_argument(part, report.step, 1),
        finalize=checked_finalize,
    )


def checked_server_rule(rule: ServerRule) -> ServerRule:
    """Return a server rule with checks of its update and of its reports."""
    part = f"server rule {rule.name!r}"
    update = rule.update

    @functools.wraps(update)
    def checked_update(round: ServerRound, params: Params, state: Any) -> ServerUpdate:
        with reading(part, update, round.reports, _NOT_REPORTED):
            result = update(round, params, state)
        if not isinstance(result, ServerUpdate):
            raise InputError(
                f"{part}: {describe(update)} returned {type(result).__name__}; "
                f"expected ServerUpdate(params, state, metrics)"
            )
        # the same shapes in every round, or the engine would compile anew
        check_like(part, update, result.params, params)
        check_like(part, update, result.state, state)
        return result

    reports = tuple(
        checked_report(report) if isinstance(report, Report) else report for report in rule.reports
    )
    return dataclasses.replace(rule, update=checked_update, reports=reports)


def _readable(part: str, function: Callable) -> Callable:
    """Return a function of a context or a step, with a check of the names that it reads
    in `payload.sent`."""

    # `wraps` keeps the user's name and file for messages
    @functools.wraps(function)
    def checked(argument: ClientContext | ClientStep, *arguments: Any) -> Any:
        context = argument.context if isinstance(argument, ClientStep) else argument
        with reading(part, function, context.payload.sent, _NOT_SENT):
            return function(argument, *arguments)

    return checked


def _scalar(part: str, function: Callable) -> Callable:
    """Return a function whose value must be one number."""
    readable = _readable(part, function)

    @functools.wraps(function)
    def checked(*arguments: Any) -> Array | float:
        return check_scalar(part, function, readable(*arguments))

    return checked


def _like_argument(part: str, function: Callable, number: int) -> Callable:
    """Return a function whose value must have the structure and the shapes of one of its
    arguments."""
    # a memory or state of other shapes in the next step could not be carried by a scan
    readable = _readable(part, function)

    @functools.wraps(function)
    def checked(*arguments: Any) -> PyTree:
        return check_like(part, function, readable(*arguments), arguments[number])

    return checked
