"""Training of the server on its replay buffer (`types.ServerReplay`).

The examples lie on the host, and the device sees a batch of them at a time: its memory does not grow with the
tasks. The order of the examples comes from the round's key.
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
    # finish(round_context, server, local) -> (server, refused): the old state if the new is not finite
    finish: Callable[..., tuple[PyTree, Array]]


class Replayed(NamedTuple):
    """The result of one round's training."""

    server: PyTree  # the server's state
    metrics: Metrics  # their sums
    examples: int  # examples read, in all epochs
    refused: bool  # whether the result was not finite, so that the server kept its state


def make_replayer(server_replay: ServerReplay, jit: Callable, specs: PyTree = WHOLE) -> Replayer:
    """Functions that are compiled once; `jit(name, function, spec, **options)` is the engine's, and `specs`
    say how the devices have the server's state."""

    def finish(round_context: RoundContext, server: PyTree, local: PyTree) -> tuple[PyTree, Array]:
        new = jax.tree.map(jnp.asarray, server_replay.finish(round_context, server, local))
        refused = became_non_finite(new, server)
        return one_of(~refused, new, server), refused

    return Replayer(
        server_replay,
        jit("server replay buffer", server_replay.buffer),
        jit("server replay start", server_replay.start),
        jit("server replay step", server_replay.step, donate_argnums=2),
        jit("server replay finish", finish, spec=(specs, WHOLE)),
    )


def current_buffer(replayer: Replayer, round_context: RoundContext, server: PyTree) -> ReplayBuffer:
    """The examples of the current task on the host, numpy, without unfilled entries."""
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
      past: examples of the earlier tasks, in the order of the tasks, as `current_buffer` returned them.
      key: of this training.
      place: puts arrays where the engine works.
    """
    rule = replayer.server_replay
    round_context = round_context._replace(previous=())
    buffers = [jax.tree.map(np.asarray, buffer) for buffer in past]
    buffers.append(current_buffer(replayer, round_context, server))
    chosen = _chosen(buffers, rule.plan(int(round_context.task.index), bool(round_context.last)))
    if not len(chosen.index):
        return Replayed(server, {}, 0, False)
    labels = np.concatenate([np.asarray(buffers[i].label) for i in np.unique(chosen.buffer)])
    classes = np.isin(np.arange(len(round_context.task.current)), labels)
    local = replayer.start(round_context, server)
    found = []
    examples = 0
    for epoch in range(rule.epochs):
        epoch_key = jax.random.fold_in(key, epoch)
        for i, batch in enumerate(_batches(buffers, chosen, classes, rule.batch_size, epoch_key)):
            step_key = jax.random.fold_in(epoch_key, i)
            local, metrics = replayer.step(round_context, server, local, place(batch), step_key)
            found.append(metrics)
            examples += int(np.sum(batch.mask))
    server, refused = replayer.finish(round_context, server, local)
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), jax.device_get(found))
    metrics = {name: Weighted(*value) for name, value in total.items()}
    return Replayed(server, metrics, examples, bool(refused))


class _Chosen(NamedTuple):
    """n examples of several buffers."""

    buffer: Int[np.ndarray, " n"]  # number of the buffer that each is in
    index: Int[np.ndarray, " n"]  # its index there
    task: Int[np.ndarray, " n"]  # as whose task's example it is used


def _chosen(buffers: Sequence[ReplayBuffer], pairs: Sequence[tuple[int, int]]) -> _Chosen:
    """All examples of each pair's task, in the order of the pairs."""
    found = []
    for source, as_task in pairs:
        index = np.arange(len(buffers[source].label))
        found.append((np.full_like(index, source), index, np.full_like(index, as_task)))
    return _Chosen(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _batches(
    buffers: Sequence[ReplayBuffer], chosen: _Chosen, classes: np.ndarray, size: int, key: PRNGKeyArray
) -> Iterator[ReplayBatch]:
    """The batches of a shuffled epoch; the last one is padded."""
    order = np.random.default_rng(np.asarray(jax.random.key_data(key))).permutation(len(chosen.index))
    for first in range(0, len(order), size):
        mine = order[first : first + size]
        mask = np.arange(size) < len(mine)
        # padding repeats an example, whose mask is False
        some = _Chosen(*(each[np.resize(mine, size)] for each in chosen))
        examples, label = _taken([(buffer.examples, buffer.label) for buffer in buffers], some)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        yield ReplayBatch(examples, label, some.task.astype(np.int32), mask, classes)


def _taken(trees: list, chosen: _Chosen) -> tuple:
    """The chosen entries of the buffers' trees [N, ...], as one tree."""

    def one(*leaves: np.ndarray) -> np.ndarray:
        out = np.empty((len(chosen.index), *leaves[0].shape[1:]), leaves[0].dtype)
        for buffer in np.unique(chosen.buffer):
            mine = chosen.buffer == buffer
            out[mine] = leaves[buffer][chosen.index[mine]]
        return out

    return jax.tree.map(one, *trees)
