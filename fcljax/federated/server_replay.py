"""Training of the server on its replay buffer (`types.ServerReplay`).

The examples lie on the host, and the device sees a batch of them at a time: its memory
does not grow with the tasks. The order of the examples comes from the round's key.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.federated.sums import became_non_finite, one_of
from fcljax.mesh import WHOLE
from fcljax.types import Metrics, PyTree, ReplayBatch, ReplayBuffer, RoundContext, ServerReplay, Weighted


class Replayer(NamedTuple):
    """The compiled functions of a `ServerReplay`."""

    server_replay: ServerReplay
    buffer: Callable[..., ReplayBuffer]
    start: Callable[..., PyTree]
    step: Callable[..., tuple[PyTree, Metrics]]
    # finish(round_context, server, local) -> (server, refused); the server keeps its old
    # state, and `refused` is True, if the new one is not finite
    finish: Callable[..., tuple[PyTree, Array]]


class Replayed(NamedTuple):
    """The result of one round's training."""

    server: PyTree  # the server's new state
    metrics: Metrics  # added over all steps
    examples: int  # examples read, in all epochs
    # whether the result was not finite, so that the server kept its state
    refused: bool


def make_replayer(
    server_replay: ServerReplay,
    jit: Callable,
    specs: PyTree = WHOLE,
) -> Replayer:
    """Make functions that are compiled once.

    Args:
      server_replay: what the server does.
      jit: the engine's jit(name, function, spec, **options).
      specs: how the devices share the server's state.
    """

    def finish(
        round_context: RoundContext,
        server: PyTree,
        local: PyTree,
    ) -> tuple[PyTree, Array]:
        new_server = jax.tree.map(jnp.asarray, server_replay.finish(round_context, server, local))
        refused = became_non_finite(new_server, server)
        return one_of(~refused, new_server, server), refused

    return Replayer(
        server_replay,
        jit("server replay buffer", server_replay.buffer),
        jit("server replay start", server_replay.start),
        jit("server replay step", server_replay.step, donate_argnums=2),
        jit("server replay finish", finish, spec=(specs, WHOLE)),
    )


def current_buffer(replayer: Replayer, round_context: RoundContext, server: PyTree) -> ReplayBuffer:
    """Return the current task's filled entries on the host, in numpy."""
    buffer = jax.device_get(replayer.buffer(round_context._replace(previous=()), server))
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(buffer.used)], buffer)


def replay_on_server(
    replayer: Replayer,
    round_context: RoundContext,
    server: PyTree,
    past: Sequence[ReplayBuffer],
    key: PRNGKeyArray,
    place: Callable[[PyTree], PyTree],
) -> Replayed:
    """Train the server for all epochs of a round.

    Args:
      replayer: from `make_replayer`.
      round_context: of the round that is over.
      server: its state after that round.
      past: examples of the earlier tasks, in the order of the tasks, as `current_buffer`
        returned them.
      key: of this training.
      place: puts arrays where the engine works.
    """
    rule = replayer.server_replay
    # the same structure in all calls, so that each function is traced once
    round_context = round_context._replace(previous=())
    buffers = [jax.tree.map(np.asarray, buffer) for buffer in past]
    buffers.append(current_buffer(replayer, round_context, server))
    pairs = rule.plan(int(round_context.task.index), bool(round_context.last))
    replayed = _replayed_examples(buffers, pairs)
    if not len(replayed.index):
        return Replayed(server, {}, examples=0, refused=False)
    # the classes that occur in this training; all batches have the same mask of them
    labels = np.concatenate([np.asarray(buffers[i].label) for i in np.unique(replayed.buffer)])
    classes = np.isin(np.arange(len(round_context.task.current)), labels)
    local = replayer.start(round_context, server)
    step_metrics = []
    examples = 0
    for epoch in range(rule.epochs):
        epoch_key = jax.random.fold_in(key, epoch)
        for i, batch in enumerate(_batches(buffers, replayed, classes, rule.batch_size, epoch_key)):
            step_key = jax.random.fold_in(epoch_key, i)
            local, metrics = replayer.step(round_context, server, local, place(batch), step_key)
            step_metrics.append(metrics)
            examples += int(np.sum(batch.mask))
    server, refused = replayer.finish(round_context, server, local)
    # only here the host waits for the device: it has queued all steps before
    totals = functools.reduce(_add, jax.device_get(step_metrics))
    metrics = {name: Weighted(*total) for name, total in totals.items()}
    return Replayed(server, metrics, examples, bool(refused))


def _add(total: PyTree, metrics: PyTree) -> PyTree:
    return jax.tree.map(np.add, total, metrics)


class _ReplayedExamples(NamedTuple):
    """n examples of several buffers."""

    buffer: Int[np.ndarray, " n"]  # number of the buffer that each is in
    index: Int[np.ndarray, " n"]  # its index there
    task: Int[np.ndarray, " n"]  # number of the task as whose example it is used


def _replayed_examples(
    buffers: Sequence[ReplayBuffer], pairs: Sequence[tuple[int, int]]
) -> _ReplayedExamples:
    """Return all examples of each pair's task, in the order of the pairs
    (`types.ReplayPlan`)."""
    columns = []
    for source, as_task in pairs:
        index = np.arange(len(buffers[source].label))
        columns.append((np.full_like(index, source), index, np.full_like(index, as_task)))
    return _ReplayedExamples(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _batches(
    buffers: Sequence[ReplayBuffer],
    replayed: _ReplayedExamples,
    classes: np.ndarray,
    batch_size: int,
    key: PRNGKeyArray,
) -> Iterator[ReplayBatch]:
    """Yield the batches of a shuffled epoch; the last one is padded."""
    # a numpy generator from the JAX key: the order is made on the host, where the data are
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    order = rng.permutation(len(replayed.index))
    for start in range(0, len(order), batch_size):
        batch_order = order[start : start + batch_size]
        mask = np.arange(batch_size) < len(batch_order)
        # `resize` repeats examples as padding, whose mask is False
        padded_order = np.resize(batch_order, batch_size)
        of_batch = _ReplayedExamples(*(column[padded_order] for column in replayed))
        examples, label = _take([(buffer.examples, buffer.label) for buffer in buffers], of_batch)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        yield ReplayBatch(examples, label, of_batch.task.astype(np.int32), mask, classes)


def _take(trees: list, replayed: _ReplayedExamples) -> tuple:
    """Return the replayed entries of the buffers' trees [N, ...], as one tree."""

    def take_leaf(*leaves: np.ndarray) -> np.ndarray:
        entries = np.empty((len(replayed.index), *leaves[0].shape[1:]), leaves[0].dtype)
        for buffer in np.unique(replayed.buffer):
            in_buffer = replayed.buffer == buffer
            entries[in_buffer] = leaves[buffer][replayed.index[in_buffer]]
        return entries

    return jax.tree.map(take_leaf, *trees)
