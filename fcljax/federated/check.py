"""Does a method return what the protocol asks for? Found out by shapes alone, before anything is computed.

Every function that the engine plays is traced once with `jax.eval_shape`. What is wrong becomes one line that
names the function, what it returned and what was expected.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.federated.client_loop import Fetch, Shapes, example_batch
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
)

_AS_A_NUMBER = (
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


class Example(NamedTuple):
    """What a method is tried on: parameters, data as `fetch` reads them, and a task."""

    frozen: PyTree
    data: PyTree
    task: Task


def check_method(method: Method, fetch: Fetch, example: Example) -> tuple[Shapes, ...]:
    """The shapes that the programs of a method's rounds make.

    Args:
      method: any method.
      fetch: as the engine's.
      example: arrays or `jax.ShapeDtypeStruct`; its data may be a `Host`.

    Raises:
      InputError: for a function that returns something else than the protocol says, or that uses a task as a
        Python number.
    """
    if isinstance(example.data, Host):
        example = example._replace(data=example.data.take(np.zeros(1, np.int32)))
    key, task = jax.eval_shape(lambda: jax.random.key(0)), example.task
    server = _call("init", method.init, key, example.frozen)
    round_context = RoundContext.on_host(example.frozen, task, 0, False)
    same = lambda name, *args: _alike(
        name, _call(name, getattr(method, name), round_context, server, *args), server
    )
    same("begin_task", key)
    same("end_task", key)
    broadcast = _call("broadcast", method.broadcast, round_context, server)
    if not isinstance(broadcast, Broadcast):
        raise _wrong("broadcast", broadcast, "a Broadcast(wire, held)")
    state = _call("init_client", method.init_client, key, server)
    _check_predictions(method, round_context, server, state, fetch, example)
    if method.server_replay:
        _check_server_replay(method.server_replay, round_context, server, key)
    round_context = round_context._replace(previous=broadcast)
    return tuple(
        _check_round(_place(method, i), each, round_context, server, state, fetch, example.data, key)
        for i, each in enumerate(method.rounds)
    )


def _check_server_replay(
    server_replay: ServerReplay, round_context: RoundContext, server: PyTree, key: PyTree
) -> None:
    call = lambda name, *args: _call(
        f"rehearsal.{name}", getattr(server_replay, name), round_context, server, *args
    )
    kept = call("kept")
    if not isinstance(kept, ReplayBuffer):
        raise _wrong("rehearsal.kept", kept, "a Kept(rows, label, used)")
    some = lambda x: jax.ShapeDtypeStruct((server_replay.batch_size, *x.shape[1:]), x.dtype)
    rows, label, mask = jax.tree.map(some, kept)
    batch, local = ReplayBatch(rows, label, label, mask, round_context.task.current), call("start")
    moved, metrics = _pair("rehearsal.step", call("step", local, batch, key), "(local, metrics)")
    _alike("rehearsal.step", moved, local)
    _weighted("rehearsal.step", metrics)
    _alike("rehearsal.finish", call("finish", local), server)


def _place(method: Method, index: int) -> str:
    """Where a function stands, for messages: nothing for the usual method of one round."""
    return f"rounds[{index}]." if len(method.rounds) > 1 else ""


def _check_round(
    where: str,
    each: Round,
    round_context: RoundContext,
    server: PyTree,
    state: PyTree,
    fetch: Fetch,
    data: PyTree,
    key: PyTree,
) -> Shapes:
    program, task = each.program, round_context.task
    info = ClientInfo.example(task.current.shape[0])
    context = ClientContext(
        round_context.frozen, round_context.previous.payload, round_context.previous.cached, task, info
    )
    local = _call(f"{where}start", program.start, context, state, key)
    if not program.phases:
        raise InputError(f"method: {where}phases is empty; expected at least one pass over a client's rows")
    if program.memory:
        _places(f"{where}memory", _call(f"{where}memory", program.memory, state), None)
    metrics = tuple(
        _check_phase(f"{where}phases[{i}].", program, phase, context, local, fetch, data, key)
        for i, phase in enumerate(program.phases)
    )
    upload = _check_finish(where, program, context, local, state)
    if each.server:
        _check_server(f"{where}server", each.server, round_context, server, upload, key)
    return Shapes(local, upload, metrics, state)


def _check_phase(
    where: str, program: Program, phase: Phase, context: ClientContext, local, fetch: Fetch, data, key
) -> Metrics:
    """The shapes of a step's metrics."""
    name, recalls = f"{where}step", phase.view.recall
    if (phase.recall is None) != (recalls == 0) or (phase.recall and program.memory is None):
        raise InputError(
            f"method: {where}recall needs a view that recalls rows and a memory to choose them from, and the "
            f"other way round; here the view recalls {recalls}"
        )
    if phase.recall:
        _places(f"{where}recall", _call(f"{where}recall", phase.recall, context, local, key), recalls)
    batch = jax.eval_shape(lambda data: example_batch(fetch, phase, data), data)
    result = _pair(name, _call(name, phase.step, context, local, batch, key), "(local, metrics)")
    _alike(name, result[0], local)
    return _weighted(name, result[1])


def _places(name: str, got: PyTree, size: int | None) -> None:
    """Check that what was returned are whole numbers [size], of any size if None."""
    whole = hasattr(got, "dtype") and jnp.issubdtype(got.dtype, jnp.integer) and len(got.shape) == 1
    if not whole or (size is not None and got.shape != (size,)):
        raise _wrong(name, got, f"whole numbers [{'M' if size is None else size}]")


def _check_finish(where: str, program: Program, context: ClientContext, local, state) -> Upload:
    name = f"{where}finish"
    upload, new = _pair(name, _call(name, program.finish, context, local, state), "(Upload, client state)")
    if not isinstance(upload, Upload):
        raise _wrong(name, upload, "an Upload as the first of two")
    if getattr(upload.weight, "shape", ()):
        raise _wrong(f"{name}, weight,", upload.weight, "a scalar")
    _alike(name, new, state)
    upload = jax.eval_shape(_with_weight, upload)
    receive = program.receive
    if receive:
        weighed = lambda *args: _with_weight(receive(*args))
        _alike(f"{where}receive", _call(f"{where}receive", weighed, context, upload), upload)
    return upload


def _with_weight(upload: PyTree) -> PyTree:
    """The upload with its weight in float32, in which it is held however it comes."""
    if not isinstance(upload, Upload):
        return upload
    return upload._replace(weight=jnp.asarray(upload.weight, jnp.float32))


def _check_server(
    name: str, function: Callable, round_context: RoundContext, server, upload: Upload, key
) -> None:
    aggregate = jax.eval_shape(_of_one, upload)
    result = _pair(name, _call(name, function, round_context, server, aggregate, key), "(server, metrics)")
    _alike(name, result[0], server)
    _weighted(name, result[1])


def _of_one(upload: Upload) -> Aggregate:
    """What the server sees of one client."""
    gather, zero = jax.tree.map(lambda x: x[None], upload.gather), jnp.zeros(1, jnp.int32)
    return Aggregate(upload.mean, upload.sum, gather, zero.astype(jnp.float32), zero, zero > 0)


def _check_predictions(
    method: Method, round_context: RoundContext, server, state, fetch: Fetch, example: Example
) -> None:

    def one_row(data: PyTree) -> Batch:
        row = jnp.zeros(1, jnp.int32)
        image, _, query = fetch(data, row, jax.random.split(jax.random.key(0), 1), False)
        return Batch(image, row, row == 0, row, query)

    batch = jax.eval_shape(one_row, example.data)
    expected = (1, *round_context.task.current.shape)
    results = {
        "predict": (round_context, server, batch),
        "predict_client": (round_context, server, state, batch),
    }
    for name, args in results.items():
        if getattr(method, name) is None:
            continue
        logits = _call(name, getattr(method, name), *args)
        if getattr(logits, "shape", None) != expected:
            raise _wrong(name, logits, f"logits of shape [batch, classes], here {list(expected)}")


def _call(name: str, function: Callable, *args) -> PyTree:
    """The shapes that a function of the method returns.

    Raises:
      InputError: if it cannot take these arguments, reads a traced value as a number, or returns what is no
        array.
    """
    returned = []
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise InputError(f"method: {name} cannot take its {len(args)} arguments: {_line(error)}") from None

    def traced(*args):
        result = function(*args)
        returned.append(True)
        return jax.tree.map(jnp.asarray, result)

    try:
        return jax.eval_shape(traced, *args)
    except _AS_A_NUMBER:
        raise InputError(
            f"method: {name} uses a traced value as a Python number; a task is data: index arrays with "
            f"task.index, and choose with jnp.where, not with lists, int() or if"
        ) from None
    except TypeError as error:
        if returned:  # the function has ended: what it returned is no pytree of arrays
            raise InputError(f"method: {name} returned what is no array: {_line(error)}") from None
        raise


def _pair(name: str, result: PyTree, expected: str) -> tuple:
    if type(result) is not tuple or len(result) != 2:
        raise _wrong(name, result, f"two things, {expected}")
    return result


def _weighted(name: str, metrics: PyTree) -> Metrics:
    """The metrics, if they are Weighted numbers by name."""
    if not isinstance(metrics, dict):
        raise _wrong(name, metrics, "a dictionary of metrics as the second of two")
    for metric, value in metrics.items():
        if not isinstance(value, Weighted):
            raise _wrong(f"{name}, metric {metric!r},", value, "a Weighted(total, weight)")
        if value.total.shape or value.weight.shape:
            raise _wrong(f"{name}, metric {metric!r},", value, "a Weighted of two scalars")
    return metrics


def _alike(name: str, got: PyTree, expected: PyTree) -> PyTree:
    """`got`, if it has the structure, shapes and types of `expected`."""
    if jax.tree.structure(got) != jax.tree.structure(expected):
        raise _wrong(name, got, f"the structure that it was given, {_said(expected)}")
    named = jax.tree_util.tree_leaves_with_path(expected)
    for (path, old), new in zip(named, jax.tree.leaves(got), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            where = jax.tree_util.keystr(path) or "its value"
            raise InputError(f"method: {name} returned {where} as {_said(new)}; expected {_said(old)}")
    return got


def _wrong(name: str, got: PyTree, expected: str) -> InputError:
    return InputError(f"method: {name} returned {_said(got)}; expected {expected}")


def _said(tree: PyTree) -> str:
    """A tree in few words: type and shape of an array, else the kind of tree and its leaves."""
    if hasattr(tree, "shape"):
        return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
    leaves = ", ".join(_said(leaf) for leaf in jax.tree.leaves(tree)[:4])
    more = len(jax.tree.leaves(tree)) - 4
    return f"{type(tree).__name__} of ({leaves}{f' and {more} more' if more > 0 else ''})"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
