"""What is drawn while tracing: a number from `random` or `numpy.random` becomes a constant of the compiled
program, the same for all clients, steps and rounds, and another one in the next process.

Every function of the method is traced twice, and the two programs must be the same.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util  # the line of an equation is known nowhere else
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import PyTree

from fcljax.checks.federation import TASKS, Federation, PlayedState, Statement, read_plain
from fcljax.federated.check import Example, check_method, name_part
from fcljax.types import Method, Round

NAME = "tracing twice gives the same program"
CAUSE = "numbers of random or numpy.random become constants: draw with jax.random and the key that is given"
ADDRESS = re.compile(r"0x[0-9a-f]+")
OF_METHOD = ("init", "begin_task", "broadcast", "init_client", "predict", "predict_client", "predict_drawn")


def traces_are_the_same(made: Federation, history: list[PlayedState]) -> Statement:
    """Nothing random is drawn while tracing."""
    del history
    found: list[str] = []
    check_method(_traced_twice(made.method, found), read_plain, Example(made.frozen, made.data, TASKS[0]))
    return Statement(NAME, not found, f"{found[0]}: {CAUSE}" if found else "the same programs")


def _traced_twice(method: Method, found: list[str]) -> Method:
    """The method whose functions note in `found` where two traces of them differ."""

    def twice(part: str, function: Any) -> Any:
        if function is None:
            return None

        @functools.wraps(function)
        def traced(*args: PyTree) -> PyTree:
            place = first_difference(_program(function, args), _program(function, args))
            if place is not None:
                found.append(f"{name_part(part, function)}{place and f', {place},'} differs")
            return function(*args)

        return traced

    def round_of(index: int, each: Round) -> Round:
        where = f"rounds[{index}]." if len(method.rounds) > 1 else ""
        phases = tuple(
            phase._replace(step=twice(f"{where}phases[{i}].step", phase.step))
            for i, phase in enumerate(each.program.phases)
        )
        program = each.program._replace(
            start=twice(f"{where}start", each.program.start),
            phases=phases,
            finish=twice(f"{where}finish", each.program.finish),
        )
        return each._replace(program=program, server=twice(f"{where}server", each.server))

    functions: dict[str, Any] = {name: twice(name, getattr(method, name)) for name in OF_METHOD}
    return method._replace(**functions, rounds=tuple(round_of(*pair) for pair in enumerate(method.rounds)))


def _program(function: Callable, args: PyTree) -> ClosedJaxpr:
    """A trace of its own: JAX remembers that of a function that it has seen."""

    def unseen(*args: PyTree) -> PyTree:
        return function(*args)

    return jax.make_jaxpr(unseen)(*args)


def first_difference(one: ClosedJaxpr, other: ClosedJaxpr) -> str | None:
    """Where two traces of a function differ first, as file and line if they are known; None: nowhere."""
    for k, (a, b) in enumerate(zip(one.consts, other.consts, strict=False)):
        if not _equal(a, b):
            return _place(one.jaxpr, lambda eqn, k=k: one.jaxpr.constvars[k] in eqn.invars)
    for a, b in zip(one.jaxpr.eqns, other.jaxpr.eqns, strict=False):
        inner = list(zip(_inside(a.params), _inside(b.params), strict=False))
        found = next((place for pair in inner if (place := first_difference(*pair)) is not None), None)
        if found is not None:
            return found or _line(a)
        values = [[x.val for x in eqn.invars if isinstance(x, Literal)] for eqn in (a, b)]
        if a.primitive is not b.primitive or not all(map(_equal, *values)) or _shown(a) != _shown(b):
            return _line(a)
    return None if len(one.jaxpr.eqns) == len(other.jaxpr.eqns) else ""


def _inside(params: dict[str, Any]) -> Iterator[ClosedJaxpr]:
    """The programs within an equation, such as a loop's body."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each
            elif isinstance(each, Jaxpr):
                yield ClosedJaxpr(each, ())


def _shown(eqn: Any) -> list[str]:
    """What else an equation says, without the addresses of functions."""
    plain = (int, float, bool, str, tuple, type(None))
    return [ADDRESS.sub("", f"{k}={v}") for k, v in eqn.params.items() if type(v) in plain[:4]]


def _equal(a: Any, b: Any) -> bool:
    if any(hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in (a, b)):
        a = jax.random.key_data(a)
        b = jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc")


def _place(jaxpr: Jaxpr, reads: Callable[[Any], bool]) -> str:
    """The line of the first equation that reads something; empty if none does."""
    return next((_line(eqn) for eqn in jaxpr.eqns if reads(eqn)), "")


def _line(eqn: Any) -> str:
    """Such as "my_method.py:12 loss()"."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{Path(frame.file_name).name}:{frame.start_line} {frame.function_name}()"
