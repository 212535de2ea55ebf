"""Draws while tracing: a number from `random` or `numpy.random` becomes a
constant of the compiled program, the same for all clients, steps and rounds, and
another one in the next process.

Every function of the method is traced twice, and the two programs must be the same.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

# private, but no public function of jax gives the source line of an equation
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import PyTree

from fcljax.checks.federation import TASKS, Federation, PlayedState, Statement, read_plain
from fcljax.federated.check import Example, check_method, name_part
from fcljax.types import Method, Round

NAME = "tracing twice gives the same program"
CAUSE = "numbers of random or numpy.random become constants: draw with jax.random and the key that is given"
ADDRESS = re.compile(r"0x[0-9a-f]+")
OF_METHOD = ("init", "begin_task", "broadcast", "init_client", "predict", "predict_client", "predict_drawn")


def traces_are_the_same(federation: Federation, _history: list[PlayedState]) -> Statement:
    """Check that no function of the method draws random numbers while it is traced."""
    differences: list[str] = []
    example = Example(federation.frozen, federation.data, TASKS[0])
    check_method(_traced_twice(federation.method, differences), read_plain, example)
    measurement = f"{differences[0]}: {CAUSE}" if differences else "the same programs"
    return Statement(NAME, not differences, measurement)


def _traced_twice(method: Method, differences: list[str]) -> Method:
    """Return the method with functions that add to `differences` where two of their
    traces differ."""

    def twice(part: str, function: Any) -> Any:
        if function is None:
            return None

        # twice in a row: between the two only Python's random state has changed. The
        # result is needed too, since `check_method` passes it on to the next function.
        @functools.wraps(function)
        def traced(*args: PyTree) -> PyTree:
            place = first_difference(_program(function, args), _program(function, args))
            if place is not None:
                where = ""
                if place:
                    where = f", {place},"
                differences.append(f"{name_part(part, function)}{where} differs")
            return function(*args)

        return traced

    def round_of(index: int, round_: Round) -> Round:
        prefix = ""
        if len(method.rounds) > 1:
            prefix = f"rounds[{index}]."
        program = round_.program
        phases = tuple(
            phase._replace(step=twice(f"{prefix}phases[{i}].step", phase.step))
            for i, phase in enumerate(program.phases)
        )
        program = program._replace(
            start=twice(f"{prefix}start", program.start),
            phases=phases,
            finish=twice(f"{prefix}finish", program.finish),
        )
        return round_._replace(program=program, server=twice(f"{prefix}server", round_.server))

    functions: dict[str, Any] = {name: twice(name, getattr(method, name)) for name in OF_METHOD}
    return method._replace(**functions, rounds=tuple(round_of(*pair) for pair in enumerate(method.rounds)))


def _program(function: Callable, args: PyTree) -> ClosedJaxpr:
    """Trace the function under a new name, because JAX caches traces by function."""

    def unseen(*args: PyTree) -> PyTree:
        return function(*args)

    return jax.make_jaxpr(unseen)(*args)


def first_difference(a: ClosedJaxpr, b: ClosedJaxpr) -> str | None:
    """Return where two traces of a function differ first: file and line, "" if unknown;
    None: nowhere."""
    # constants first: an array of numpy.random becomes one, and the line to name is that
    # of the first equation that reads it
    for k, (constant_a, constant_b) in enumerate(zip(a.consts, b.consts, strict=False)):
        if not _equal(constant_a, constant_b):
            return _place(a.jaxpr, lambda eqn, k=k: a.jaxpr.constvars[k] in eqn.invars)
    # then equations: a Python number becomes a literal in one of them
    for eqn_a, eqn_b in zip(a.jaxpr.eqns, b.jaxpr.eqns, strict=False):
        inner = zip(_inside(eqn_a.params), _inside(eqn_b.params), strict=False)
        # first inside, where loops and branches have most of a method: their own line is
        # closer to the cause than that of the loop
        places = (first_difference(*pair) for pair in inner)
        place = next((place for place in places if place is not None), None)
        if place is not None:
            return place or _line(eqn_a)
        if not _equal_equations(eqn_a, eqn_b):
            return _line(eqn_a)
    # one program goes on after the other has ended: no line is at fault
    if len(a.jaxpr.eqns) == len(b.jaxpr.eqns):
        return None
    return ""


def _equal_equations(a: Any, b: Any) -> bool:
    """Return whether two equations apply the same primitive to the same literals."""
    if a.primitive is not b.primitive or _shown(a) != _shown(b):
        return False
    values = [[x.val for x in eqn.invars if isinstance(x, Literal)] for eqn in (a, b)]
    return all(map(_equal, *values))


def _inside(params: dict[str, Any]) -> Iterator[ClosedJaxpr]:
    """Yield the programs within an equation, such as a loop's body."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item
            elif isinstance(item, Jaxpr):
                yield ClosedJaxpr(item, ())


def _shown(eqn: Any) -> list[str]:
    """Return an equation's plain parameters as text, without addresses."""
    # other parameters hold functions and programs, which print their addresses
    plain = (int, float, bool, str)
    return [ADDRESS.sub("", f"{k}={v}") for k, v in eqn.params.items() if type(v) in plain]


def _equal(a: Any, b: Any) -> bool:
    """Return whether two constants have equal entries; NaN equals NaN, and keys compare
    by their bits."""
    if any(hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in (a, b)):
        a = jax.random.key_data(a)
        b = jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc")


def _place(jaxpr: Jaxpr, reads: Callable[[Any], bool]) -> str:
    """Return the line of the first equation that `reads` accepts; "" if there is none."""
    return next((_line(eqn) for eqn in jaxpr.eqns if reads(eqn)), "")


def _line(eqn: Any) -> str:
    """Return the source line of an equation, as "my_method.py:12 loss()"; "": unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return f"{Path(frame.file_name).name}:{frame.start_line} {frame.function_name}()"
