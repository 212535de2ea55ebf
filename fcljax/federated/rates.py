"""Learning rates as data: a wrapper around any method, so that one compiled program serves all rates.

The rates are in `Frozen.rates`, which every function of a method reads through its context. The method is
made anew, with these rates, inside each function while it is traced.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from fcljax.errors import InputError
from fcljax.types import Method, Phase, Program, Round, ServerReplay

Rates = Mapping[str, float | Float[Array, ""]]
Build = Callable[[Rates], Method]
Find = Callable[[Method], Any]

# functions of a method whose first argument is a context
_OF_CONTEXT = (
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
    """The method whose learning rates are those of `context.frozen.rates`.

    Args:
      build: build(rates) -> the method; it must not decide anything by the values of rates, which are traced.
      usual: rates that decide the method's structure: its rounds, phases and views.
    """
    method = build(usual)
    names = [name for name in _OF_CONTEXT if getattr(method, name) is not None]
    changed = {name: _late(build, method, functools.partial(_field, name)) for name in names}
    replay = method.server_replay
    method = method._replace(**changed)  # pyrefly: ignore[bad-argument-type]
    return method._replace(
        init=lambda key, frozen: _made(build, frozen.rates).init(key, frozen),
        rounds=tuple(_round(build, method, i) for i in range(len(method.rounds))),
        server_replay=None if replay is None else _replay(build, method, replay),
    )


def _made(build: Build, rates: Rates) -> Method:
    """The method with rates that are traced.

    Raises:
      InputError: for a method that decides something by their values.
    """
    try:
        return build(rates)
    except (InputError, jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, InputError):
            raise
        raise InputError(
            "scale: with fit, learning rates are data, and the method uses them as Python numbers while it "
            "is made; nearest: 'paper'"
        ) from error


def _field(name: str, method: Method) -> Any:
    return getattr(method, name)


def _late(build: Build, method: Method, find: Find) -> Callable:
    """The function of the method that `find` finds, of the method with the rates of its context."""

    @functools.wraps(find(method))
    def called(context, *args):
        return find(_made(build, context.frozen.rates))(context, *args)

    return called


def _round(build: Build, method: Method, index: int) -> Round:
    each = method.rounds[index]

    def late(find: Callable[[Round], Any]) -> Callable:
        return _late(build, method, lambda method: find(method.rounds[index]))

    def phase(number: int, of: Phase) -> Phase:
        replay = of.replay and late(lambda each: each.program.phases[number].replay)
        return of._replace(step=late(lambda each: each.program.phases[number].step), replay=replay)

    program: Program = each.program
    receive = program.receive and late(lambda each: each.program.receive)
    program = program._replace(
        start=late(lambda each: each.program.start),
        phases=tuple(phase(number, of) for number, of in enumerate(program.phases)),
        finish=late(lambda each: each.program.finish),
        receive=receive,
    )
    return each._replace(program=program, server=each.server and late(lambda each: each.server))


def _replay(build: Build, method: Method, replay: ServerReplay) -> ServerReplay:
    def late(name: str) -> Callable:
        return _late(build, method, lambda method: getattr(method.server_replay, name))

    names = ("buffer", "start", "step", "finish", "reconstruct")
    changed = {name: late(name) for name in names if getattr(replay, name) is not None}
    return replay._replace(**changed)  # pyrefly: ignore[bad-argument-type]
