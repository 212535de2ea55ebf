"""Learning rates as data: a wrapper around any method, so that one compiled program
serves all rates.

A method is made with its learning rates as Python numbers, which jit makes constants of
the program. Here they are in `Frozen.rates`, which every function of a method gets with
its context. Each function makes the method anew, with these rates, while it is traced.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from fcljax.errors import InputError
from fcljax.types import Method, Phase, Program, Round, ServerReplay

Rates = Mapping[str, float | Float[Array, ""]]
Build = Callable[[Rates], Method]
Find = Callable[[Method], Any]

# JAX raises these where Python code needs the value of a traced rate
_NEEDS_A_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)

# functions of a method whose first argument is a context
_WITH_CONTEXT = (
    "broadcast",
    "predict",
    "begin_task",
    "predict_client",
    "trainable",
    "handover",
    "predict_provisional",
    "predict_drawn",
)


def with_rates(build: Build, usual: Rates) -> Method:
    """Return the method whose learning rates are those of `context.frozen.rates`.

    Args:
      build: build(rates) -> the method; it must not decide anything by the values of
        rates, which are traced.
      usual: rates that decide the method's structure: its rounds, phases and views.
    """
    method = build(usual)

    def init(key, frozen):
        # `init` has no context: the rates come with the frozen parameters
        return _build_traced(build, frozen.rates).init(key, frozen)

    functions = {}
    for name in _WITH_CONTEXT:
        if getattr(method, name) is not None:
            functions[name] = _with_rates_of_context(build, method, operator.attrgetter(name))
    rounds = tuple(_round(build, method, index) for index in range(len(method.rounds)))
    server_replay = None
    if method.server_replay is not None:
        server_replay = _server_replay(build, method, method.server_replay)
    method = method._replace(**functions)  # pyrefly: ignore[bad-argument-type]
    return method._replace(init=init, rounds=rounds, server_replay=server_replay)


def _build_traced(build: Build, rates: Rates) -> Method:
    """Build the method with rates that are traced.

    Raises:
      InputError: for a method that decides something by their values.
    """
    try:
        return build(rates)
    except (InputError, *_NEEDS_A_VALUE) as error:
        cause = error.__cause__ or error
        if isinstance(cause, InputError):
            raise
        raise InputError(
            "scale: with fit, learning rates are data, and the method uses them as Python numbers while it "
            "is made; nearest: 'paper'"
        ) from error


def _with_rates_of_context(build: Build, method: Method, find: Find) -> Callable:
    """Return a function that builds the method with the rates of its context, and calls
    what `find` finds there."""

    @functools.wraps(find(method))
    def with_context(context, *args):
        function = find(_build_traced(build, context.frozen.rates))
        return function(context, *args)

    return with_context


def _round(build: Build, method: Method, index: int) -> Round:
    """Return one of the method's rounds, whose functions get the rates of their
    context."""
    this_round = method.rounds[index]
    program: Program = this_round.program

    # by path and not as functions: each trace makes new ones
    def with_rates_of(path: str) -> Callable:
        """Return the function at a path within the round."""
        find = operator.attrgetter(path)
        return _with_rates_of_context(build, method, lambda method: find(method.rounds[index]))

    def phase_with_rates(number: int) -> Phase:
        phase = program.phases[number]

        def step(method: Method) -> Callable:
            return method.rounds[index].program.phases[number].step

        def replay(method: Method) -> Callable | None:
            return method.rounds[index].program.phases[number].replay

        phase = phase._replace(step=_with_rates_of_context(build, method, step))
        if phase.replay is not None:
            phase = phase._replace(replay=_with_rates_of_context(build, method, replay))
        return phase

    program = program._replace(
        start=with_rates_of("program.start"),
        phases=tuple(map(phase_with_rates, range(len(program.phases)))),
        finish=with_rates_of("program.finish"),
    )
    if program.receive is not None:
        program = program._replace(receive=with_rates_of("program.receive"))
    this_round = this_round._replace(program=program)
    if this_round.server is not None:
        this_round = this_round._replace(server=with_rates_of("server"))
    return this_round


def _server_replay(
    build: Build,
    method: Method,
    server_replay: ServerReplay,
) -> ServerReplay:
    def with_rates_of(name: str) -> Callable:
        return _with_rates_of_context(build, method, operator.attrgetter(f"server_replay.{name}"))

    functions = {}
    for name in ("buffer", "start", "step", "finish", "reconstruct"):
        if getattr(server_replay, name) is not None:
            functions[name] = with_rates_of(name)
    return server_replay._replace(**functions)  # pyrefly: ignore[bad-argument-type]
