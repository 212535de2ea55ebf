"""Checks, before anything is computed, that a method's functions return what the
protocol asks for.

Every function that the engine calls is traced once, without computing anything. A
mistake becomes one line that names the function, its place in the user's file, what it
returned and what was expected.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

import fcljax
from fcljax.data.streaming import Host
from fcljax.errors import InputError, choose
from fcljax.federated.client_loop import Fetch, Shapes, example_batch, recorded
from fcljax.federated.health import GRADIENT_NORM
from fcljax.types import (
    Aggregate,
    Batch,
    Broadcast,
    ClientContext,
    ClientInfo,
    Method,
    Metrics,
    Phase,
    Program,
    PyTree,
    ReplayBatch,
    ReplayBuffer,
    Round,
    RoundContext,
    ServerReplay,
    Task,
    Upload,
    Weighted,
    When,
    Who,
)

# integers of so many bits can be averaged: float32 holds whole numbers up to 2^24 exactly
EXACT_BITS = 16
_PACKAGE = Path(fcljax.__file__).parent
# JAX raises these where Python code uses a traced value as a number
_AS_A_NUMBER = (
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


class Example(NamedTuple):
    """Inputs with which a method is traced; arrays or `jax.ShapeDtypeStruct`."""

    frozen: PyTree
    """Arrays that never train."""
    data: PyTree
    """Input of `Fetch`, or a `Host`."""
    task: Task
    """Any task."""


class _Case(NamedTuple):
    """The shapes that a method's functions are called with."""

    context: RoundContext
    server: PyTree
    state: PyTree
    key: PyTree
    fetch: Fetch
    data: PyTree


class _LeafUse(NamedTuple):
    """Which leaves of the local state a step reads, and which it changes, by number."""

    reads: frozenset[int]
    changes: frozenset[int]


def describe(function: Callable) -> str:
    """Return where a function was written: "my_method.py:12 loss()"."""
    code = _code(function)
    if code is None:
        return type(function).__name__
    name = f"{code.co_name}()"
    if code.co_name == "<lambda>":
        name = "lambda"
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {name}"


def name_part(part: str, function: Callable) -> str:
    """Return the name of a method's part for messages, with its place unless this
    package has the function."""
    code = _code(function)
    if code is None or Path(code.co_filename).is_relative_to(_PACKAGE):
        return part
    return f"{part} ({describe(function)})"


def _code(function: Callable):
    """Return the code object of a function, or of an object that can be called."""
    # partials and decorators would hide the line that the user wrote
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def in_users_code(part: str, error: Exception, field: str = "method") -> Exception:
    """Return the error to raise for an exception in a function of a method, or of
    another field.

    It is one line that names the user's file if the user's code was running, else the
    exception itself.
    """
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return leaked_tracer(error)
    place = _users_place(error)
    if place is None or isinstance(error, InputError):
        return error
    return InputError(f"{field}: {part}: {place}: {type(error).__name__}: {_line(error)}")


@contextlib.contextmanager
def leaks_in_one_line() -> Iterator[None]:
    """Report in one line a traced value that a user's function keeps between traces.

    `check_method` traces functions one by one, and may not see such a leak.

    Raises:
      InputError: naming the line of the user's file.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise leaked_tracer(error) from error


def leaked_tracer(error: jax.errors.UnexpectedTracerError) -> InputError:
    """Return the error for a traced value that outlived its trace, with the lines that
    read it and made it."""
    place = _users_place(error)
    places = []
    if place:
        places = [f"{place} reads it"]
    origin = _leaked_from()
    if origin:
        places.append(f"{origin} made it")
    where = ""
    if places:
        where = f": {', '.join(places)}"
    return InputError(
        "method: a traced value is kept in a global or an attribute and read in another trace"
        f"{where}; return it from the function, as state or as a report"
    )


class _CodeLine(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return "my_method.py:12 loss()"."""
        # a qualified name, such as make.<locals>.loss, without the functions around it
        name = self.function.rpartition(".")[-1]
        return f"{Path(self.file).name}:{self.line} {name}()"


def _users_place(error: Exception) -> str | None:
    """Return the last line of user code in a traceback: "my_method.py:12 loss()"."""
    frames = traceback.extract_tb(error.__traceback__)
    place = _last_users([_CodeLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames])
    if not place:
        return None
    return str(place)


def _last_users(calls: Sequence[_CodeLine]) -> _CodeLine | None:
    """Return the last of some calls, outermost first, in user's code that this package
    called."""
    # calls before the first one of this package are the script that started it
    within = itertools.dropwhile(lambda call: not Path(call.file).is_relative_to(_PACKAGE), calls)
    return next((call for call in reversed(list(within)) if _is_users(call.file)), None)


def _leaked_from() -> _CodeLine | None:
    """Return the line of user code that made a traced value which is still alive."""
    # JAX's error does not say who made the value, but the value itself does
    for value in gc.get_objects():
        info = None
        if isinstance(value, jax.core.Tracer):
            info = getattr(value, "_line_info", None)
        if info is None or info.traceback is None:
            continue
        frames = reversed(info.traceback.frames)
        place = _last_users([_CodeLine(f.file_name, f.line_num, f.function_name) for f in frames])
        if place:
            return place
    return None


def _is_users(file: str) -> bool:
    """Return whether a file is not of this package, of Python or of its libraries."""
    # code without a file: Python's imports and the type checks of the tests
    if file.startswith(("<frozen", "<@beartype")):
        return False
    folders = (_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    return not any(Path(file).is_relative_to(folder) for folder in folders)


def check_method(method: Method, fetch: Fetch, example: Example) -> tuple[Shapes, ...]:
    """Trace all functions of a method, and return the shapes of its rounds' programs.

    Args:
      method: any method.
      fetch: as the engine's.
      example: what it is tried on.

    Raises:
      InputError: for a function that returns something else than the protocol says, or
        that uses a task as a Python number.
    """
    data = example.data
    task = example.task
    # one example stands for the windows that the engine would load
    if isinstance(data, Host):
        data = data.take(np.zeros(1, np.int32))
    key = jax.eval_shape(lambda: jax.random.key(0))
    server = _call("init", method.init, key, example.frozen)
    context = RoundContext.on_host(example.frozen, task, 0, False)
    server_of_task = _call("begin_task", method.begin_task, context, server, key)
    _check_alike("begin_task", method.begin_task, server_of_task, server)
    broadcast = _call("broadcast", method.broadcast, context, server)
    if not isinstance(broadcast, Broadcast):
        raise _wrong(name_part("broadcast", method.broadcast), broadcast, "a Broadcast(payload, cached)")
    state = _call("init_client", method.init_client, key, server)
    case = _Case(context, server, state, key, fetch, data)
    _check_predictions(method, case)
    if method.server_replay:
        _check_server_replay(method.server_replay, case)
    case = case._replace(context=context._replace(previous=broadcast))
    if len(method.rounds) == 1:
        # messages about a method with one round need not name the round
        return (_check_round("", method.rounds[0], case),)
    return tuple(
        _check_round(f"rounds[{i}].", this_round, case) for i, this_round in enumerate(method.rounds)
    )


def _check_predictions(method: Method, case: _Case) -> None:
    """Check that all functions that predict return logits [1, C] of one example."""

    def one_example(data: PyTree) -> Batch:
        index = jnp.zeros(1, jnp.int32)
        inputs, label, query = case.fetch(data, index, jax.random.split(jax.random.key(0), 1), False)
        return Batch(inputs, label, index == 0, index, query)

    batch = jax.eval_shape(one_example, case.data)
    expected = (1, *case.context.task.current.shape)
    global_model = (case.context, case.server)
    personal_model = (case.context, case.server, case.state)
    models = {
        "predict": global_model,
        "predict_provisional": global_model,
        "predict_client": personal_model,
        "predict_drawn": personal_model,
    }
    for name, model in models.items():
        function = getattr(method, name)
        if function is None:
            continue
        logits = _call(name, function, *model, batch)
        if getattr(logits, "shape", None) != expected:
            message = f"logits of shape [batch, classes], here {list(expected)}"
            raise _wrong(name_part(name, function), logits, message)


def _check_server_replay(rule: ServerReplay, case: _Case) -> None:
    def call(name: str, *args: PyTree) -> PyTree:
        return _call(f"server_replay.{name}", getattr(rule, name), case.context, case.server, *args)

    buffer = call("buffer")
    if not isinstance(buffer, ReplayBuffer):
        message = "a ReplayBuffer(examples, label, used)"
        raise _wrong(name_part("server_replay.buffer", rule.buffer), buffer, message)
    examples, label, mask = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rule.batch_size, *x.shape[1:]), x.dtype), buffer
    )
    # only shapes and types matter: task numbers are integers [B] as labels are, and the
    # replayed classes a mask [C] as a task's
    batch = ReplayBatch(examples, label, task=label, mask=mask, classes=case.context.task.current)
    local = call("start")
    _check_local_and_metrics("server_replay.step", rule.step, call("step", local, batch, case.key), local)
    _check_alike("server_replay.finish", rule.finish, call("finish", local), case.server)


def _check_round(where: str, this_round: Round, case: _Case) -> Shapes:
    """Check one of the method's rounds, and return the shapes of its program; `where`
    begins the names of its parts in messages."""
    choose(f"method: {where}when", this_round.when, get_args(When))
    choose(f"method: {where}who", this_round.who, get_args(Who))
    program = this_round.program
    task = case.context.task
    broadcast = case.context.previous
    client = ClientInfo.example(task.current.shape[0])
    context = ClientContext(case.context.frozen, broadcast.payload, broadcast.cached, task, client)
    local = _call(f"{where}start", program.start, context, case.state, case.key)
    if not program.phases:
        raise InputError(f"method: {where}phases is empty; expected at least one pass over the examples")
    if program.replay_buffer:
        indices = _call(f"{where}replay_buffer", program.replay_buffer, case.state)
        _check_indices(name_part(f"{where}replay_buffer", program.replay_buffer), indices, None)
    metrics = []
    uses = []
    for i, phase in enumerate(program.phases):
        phase_metrics, use = _check_phase(f"{where}phases[{i}].", program, phase, context, local, case)
        metrics.append(phase_metrics)
        uses.append(use)
    upload, read_at_end = _check_finish(where, program, context, local, case.state)
    if this_round.server:
        aggregate = jax.eval_shape(_aggregate_of_one, upload)
        name = f"{where}server"
        result = _call(name, this_round.server, case.context, case.server, aggregate, case.key)
        _check_local_and_metrics(name, this_round.server, result, case.server, "(server, metrics)")
    return Shapes(local, upload, tuple(metrics), case.state, _stored_leaves(uses, read_at_end))


def _check_phase(
    where: str,
    program: Program,
    phase: Phase,
    context: ClientContext,
    local: PyTree,
    case: _Case,
) -> tuple[Metrics, _LeafUse]:
    """Check a phase, and return the shapes of its metrics and how its step uses the local
    state."""
    replayed = phase.view.replay
    read_by_choice = frozenset()
    if (phase.replay is None) != (replayed == 0) or (phase.replay and program.replay_buffer is None):
        raise InputError(
            f"method: {where}replay, View.replay and Program.replay_buffer go together: give all of them or "
            f"none; here View.replay is {replayed}"
        )
    if phase.replay:
        traced, positions = _trace(f"{where}replay", phase.replay, context, local, case.key)
        _check_indices(name_part(f"{where}replay", phase.replay), positions, replayed)
        read_by_choice = _reads(traced, context, local, [True])
    batch = jax.eval_shape(lambda data: example_batch(case.fetch, phase, data), case.data)
    traced, result = _trace(f"{where}step", phase.step, context, local, batch, case.key)
    metrics = _check_local_and_metrics(f"{where}step", phase.step, result, local)
    if phase.terms and GRADIENT_NORM not in metrics:
        expected = f"the metric {GRADIENT_NORM!r}, since the phase names terms of its loss"
        raise _wrong(name_part(f"{where}step", phase.step), metrics, expected)
    metrics = jax.eval_shape(
        lambda of_step: recorded(phase, of_step, jnp.bool_(True), jnp.int32(-1)), metrics
    )
    use = _leaf_use(traced, context, local)
    return metrics, use._replace(reads=use.reads | read_by_choice)


def _check_indices(name: str, indices: PyTree, size: int | None) -> None:
    """Check that a function returned integers [size]; None: of any size."""
    is_integer = hasattr(indices, "dtype") and jnp.issubdtype(indices.dtype, jnp.integer)
    if not is_integer or len(indices.shape) != 1 or (size is not None and indices.shape != (size,)):
        raise _wrong(name, indices, f"integers [{'M' if size is None else size}]")


def _check_finish(
    where: str, program: Program, context: ClientContext, local: PyTree, state: PyTree
) -> tuple[Upload, frozenset[int]]:
    """Check the end of a client's work: the shapes of its upload, and which leaves of
    the local state it reads."""
    name = f"{where}finish"
    finish = program.finish
    finish_name = name_part(name, finish)
    traced, result = _trace(name, finish, context, local, state)
    upload, new_state = _pair(name, finish, result, "(Upload, client state)")
    if not isinstance(upload, Upload):
        raise _wrong(finish_name, upload, "an Upload as the first of two")
    if getattr(upload.weight, "shape", ()):
        raise _wrong(f"{finish_name}, weight,", upload.weight, "a scalar")
    _check_alike(name, finish, new_state, state)
    upload = jax.eval_shape(_with_float_weight, upload)
    check_averaged(finish_name, upload.mean)
    if program.receive:
        name = f"{where}receive"
        received = _call(name, program.receive, context, upload)
        _check_alike(name, program.receive, jax.eval_shape(_with_float_weight, received), upload)
    return upload, _reads(traced, context, local, [True] * len(traced.jaxpr.outvars))


def _with_float_weight(upload: PyTree) -> PyTree:
    """Return the upload with its weight in float32, as the engine has it."""
    if not isinstance(upload, Upload):
        return upload
    return upload._replace(weight=jnp.asarray(upload.weight, jnp.float32))


def check_averaged(name: str, mean: PyTree) -> None:
    """Check that no integer that clients average is too large for float32, which holds
    whole numbers exactly up to 2^24 only.

    Raises:
      InputError: naming the first leaf of integers with more bits.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(mean):
        if jnp.issubdtype(leaf.dtype, jnp.integer) and jnp.iinfo(leaf.dtype).bits > EXACT_BITS:
            raise InputError(
                f"method: {name} sends {_shown(leaf)} to be averaged, mean{jax.tree_util.keystr(path)}, and "
                f"averages are taken in float32, which rounds integers above 2^24; send it as a sum or a "
                f"gathered report, or as float32"
            )


def _aggregate_of_one(upload: Upload) -> Aggregate:
    """Return the aggregate of one client's upload, for its shapes."""
    zero = jnp.zeros(1, jnp.int32)
    return Aggregate(
        mean=upload.mean,
        sum=upload.sum,
        gather=jax.tree.map(lambda leaf: leaf[None], upload.gather),
        weight=zero.astype(jnp.float32),
        id=zero,
        valid=zero > 0,
    )


def _leaf_use(traced: ClosedJaxpr, context: PyTree, local: PyTree) -> _LeafUse:
    """Return how a traced step uses the local state. A leaf that the step returns as it
    is counts as neither read nor changed."""
    # the step's arguments are (context, local, ...), flattened
    old_leaves = traced.jaxpr.invars[len(jax.tree.leaves(context)) :]
    results = traced.jaxpr.outvars
    # the first results are the new local state, then come the metrics
    leaves = range(len(jax.tree.leaves(local)))
    changes = frozenset(i for i in leaves if results[i] is not old_leaves[i])
    # metrics and changed leaves; a leaf returned as it is would always count as read
    needed = [i not in leaves or i in changes for i in range(len(results))]
    return _LeafUse(_reads(traced, context, local, needed), changes)


# ---- what a client keeps between phases ------------------------------------------------


def _reads(traced: ClosedJaxpr, context: PyTree, local: PyTree, results: list[bool]) -> frozenset[int]:
    """Return which leaves of `local` a traced function of (context, local, ...) needs
    for some of its results."""
    first = len(jax.tree.leaves(context))
    # dead code elimination keeps the inputs that these results need
    _, used = dce_jaxpr(traced.jaxpr, results)
    return frozenset(i for i in range(len(jax.tree.leaves(local))) if used[first + i])


def _stored_leaves(
    uses: list[_LeafUse],
    read_at_end: frozenset[int],
) -> tuple[frozenset[int], ...]:
    """Return the leaves that are stored after each phase but the last one: its step
    changes them, and something reads them later."""
    stored = []
    read_later = read_at_end
    # backwards, so that `read_later` has the reads of all later phases
    for use, next_use in reversed(list(itertools.pairwise(uses))):
        read_later |= next_use.reads
        stored.append(use.changes & read_later)
    return tuple(reversed(stored))


# ---- calls and comparisons -------------------------------------------------------------


def _call(part: str, function: Callable, *args) -> PyTree:
    """Return the shapes that a function of the method returns; errors as of `_trace`."""
    return _trace(part, function, *args)[1]


def _trace(part: str, function: Callable, *args) -> tuple[ClosedJaxpr, PyTree]:
    """Trace a function of the method; return the trace and the result's shapes.

    Raises:
      InputError: if it cannot take these arguments, reads a traced value as a number, or
        returns something that is no array.
    """
    ended = []  # not empty once the function itself has returned
    name = name_part(part, function)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise InputError(f"method: {name} cannot take its {len(args)} arguments: {_line(error)}") from None

    def traced(*args):
        result = function(*args)
        ended.append(True)
        return jax.tree.map(jnp.asarray, result)

    try:
        return jax.make_jaxpr(traced, return_shape=True)(*args)
    except _AS_A_NUMBER as error:
        place = _users_place(error)
        if place and name == part:
            name = f"{part} ({place})"
        raise InputError(
            f"method: {name} uses a traced value as a Python number; a task is data: index arrays with "
            f"task.index, and choose with jnp.where, not with lists, int() or if"
        ) from None
    except Exception as error:
        if ended and isinstance(error, TypeError):
            # from `jnp.asarray` above: the result is not a pytree of arrays
            raise InputError(
                f"method: {name} returned something that is not an array: {_line(error)}"
            ) from None
        raise in_users_code(part, error) from error


def _pair(part: str, function: Callable, result: PyTree, expected: str) -> tuple:
    """Check that two things were returned, and return them."""
    if type(result) is not tuple or len(result) != 2:
        raise _wrong(name_part(part, function), result, f"two things, {expected}")
    return result


def _check_local_and_metrics(
    part: str,
    function: Callable,
    result: PyTree,
    local: PyTree,
    expected: str = "(local, metrics)",
) -> Metrics:
    """Check that a function returned a pytree like `local`, and named `Weighted`
    numbers; return the latter."""
    name = name_part(part, function)
    new_local, metrics = _pair(part, function, result, expected)
    _check_alike(part, function, new_local, local)
    if not isinstance(metrics, dict):
        raise _wrong(name, metrics, "a dictionary of metrics as the second of two")
    for metric, value in metrics.items():
        if not isinstance(value, Weighted):
            raise _wrong(f"{name}, metric {metric!r},", value, "a Weighted(total, weight)")
        if value.total.shape or value.weight.shape:
            raise _wrong(f"{name}, metric {metric!r},", value, "a Weighted of two scalars")
    return metrics


def _check_alike(part: str, function: Callable, tree: PyTree, expected: PyTree) -> None:
    """Check that a returned tree has the structure, shapes and types of `expected`."""
    name = name_part(part, function)
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        raise _wrong(name, tree, f"the structure that it was given, {_shown(expected)}")
    expected_leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, expected_leaf), leaf in zip(expected_leaves, jax.tree.leaves(tree), strict=True):
        if (expected_leaf.shape, expected_leaf.dtype) != (leaf.shape, leaf.dtype):
            where = jax.tree_util.keystr(path) or "its value"
            raise InputError(
                f"method: {name} returned {where} as {_shown(leaf)}; expected {_shown(expected_leaf)}"
            )


def _wrong(name: str, result: PyTree, expected: str) -> InputError:
    return InputError(f"method: {name} returned {_shown(result)}; expected {expected}")


def _shown(tree: PyTree) -> str:
    """Return a tree in a few words: type and shape of an array, else the kind of tree and
    its leaves."""
    if hasattr(tree, "shape"):
        return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
    leaves = jax.tree.leaves(tree)
    shown = ", ".join(map(_shown, leaves[:4]))
    if len(leaves) > 4:
        shown += f" and {len(leaves) - 4} more"
    return f"{type(tree).__name__} of ({shown})"


def _line(error: Exception) -> str:
    # JAX's messages have many lines
    return " ".join(str(error).split())[:200]
