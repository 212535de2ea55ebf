"""Training of the server on rows that it keeps of every task (`types.Rehearsal`).

The rows lie on the host, and the device sees a batch of them at a time: its memory does not grow with the
tasks. The order of the rows comes from the round's key.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.federated.client_loop import select
from fcljax.types import Metrics, PyTree, ReplayBatch, ReplayBuffer, RoundContext, ServerReplay, Weighted


class Replayer(NamedTuple):
    """The compiled functions of a rehearsal. `finish` keeps the server's state if what comes out is not
    finite, and says so."""

    server_replay: ServerReplay
    kept: Callable[..., ReplayBuffer]
    start: Callable[..., PyTree]
    step: Callable[..., tuple[PyTree, Metrics]]
    finish: Callable[..., tuple[PyTree, Array]]


class Replayed(NamedTuple):
    """What came of it: the server's state, sums of metrics, the rows read, and was the result refused?"""

    server: PyTree
    metrics: Metrics
    rows: int
    refused: bool


def make_replayer(server_replay: ServerReplay, jit: Callable) -> Replayer:
    """Compile-once functions; `jit(name, function, **options)` is the engine's."""

    def finish(round_context: RoundContext, server: PyTree, local: PyTree) -> tuple[PyTree, Array]:
        new = jax.tree.map(jnp.asarray, server_replay.finish(round_context, server, local))
        refused = spoiled(new, server)
        return select(~refused, new, server), refused

    return Replayer(
        server_replay,
        jit("rehearsal kept", server_replay.kept),
        jit("rehearsal start", server_replay.start),
        jit("rehearsal step", server_replay.step, donate_argnums=2),
        jit("rehearsal finish", finish),
    )


def spoiled(new: PyTree, old: PyTree) -> Array:
    """Has a number become NaN or infinite?"""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    found = [
        jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)) for a, b in pairs if jnp.issubdtype(a.dtype, jnp.inexact)
    ]
    return jnp.any(jnp.stack(found)) if found else jnp.zeros((), bool)


def current_buffer(replayer: Replayer, round_context: RoundContext, server: PyTree) -> ReplayBuffer:
    """The rows of the current task on the host, numpy, without the places that are not taken."""
    kept = jax.device_get(replayer.kept(round_context._replace(previous=()), server))
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(kept.used)], kept)


def rehearse(
    replayer: Replayer,
    round_context: RoundContext,
    server: PyTree,
    past: Sequence[ReplayBuffer],
    key: PRNGKeyArray,
    place: Callable[[PyTree], PyTree],
) -> Replayed:
    """All epochs of a round.

    Args:
      rehearser: from `make_rehearser`.
      turn: the round that is over.
      server: its state after that.
      past: rows of the tasks before, in their order, as `kept_rows` gave them.
      key: of this rehearsal.
      place: puts arrays where the engine works.
    """
    round_context = round_context._replace(previous=())
    stores = (
        *(jax.tree.map(np.asarray, kept) for kept in past),
        current_buffer(replayer, round_context, server),
    )
    pairs = replayer.server_replay.plan(int(round_context.task.index), bool(round_context.last))
    chosen = _chosen(stores, pairs)
    if not len(chosen.row):
        return Replayed(server, {}, 0, False)
    classes = np.isin(np.arange(len(round_context.task.current)), _labels(stores, chosen))
    local, found, rows = replayer.start(round_context, server), [], 0
    for epoch in range(replayer.server_replay.epochs):
        own = jax.random.fold_in(key, epoch)
        for i, batch in enumerate(_batches(stores, chosen, classes, replayer.server_replay.batch_size, own)):
            step_key = jax.random.fold_in(own, i)
            local, metrics = replayer.step(round_context, server, local, place(batch), step_key)
            found.append(metrics)
            rows += int(np.sum(batch.mask))
    server, refused = replayer.finish(round_context, server, local)
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), jax.device_get(found))
    return Replayed(server, {name: Weighted(*value) for name, value in total.items()}, rows, bool(refused))


class _Chosen(NamedTuple):
    """Rows of some stores: in which store, at which place, and as whose each is taken."""

    store: Int[np.ndarray, " n"]
    row: Int[np.ndarray, " n"]
    task: Int[np.ndarray, " n"]


def _chosen(stores: Sequence[ReplayBuffer], pairs: Sequence[tuple[int, int]]) -> _Chosen:
    """All rows of each pair's task, in the order of the pairs."""
    found = []
    for source, as_task in pairs:
        row = np.arange(len(stores[source].label))
        found.append((np.full_like(row, source), row, np.full_like(row, as_task)))
    return _Chosen(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _labels(stores: Sequence[ReplayBuffer], chosen: _Chosen) -> Int[np.ndarray, " labels"]:
    found = [np.asarray(stores[store].label) for store in np.unique(chosen.store)]
    return np.unique(np.concatenate(found))


def _batches(
    stores: Sequence[ReplayBuffer], chosen: _Chosen, classes: np.ndarray, size: int, key: PRNGKeyArray
) -> Iterator[ReplayBatch]:
    """An epoch, shuffled; the last batch is padded with rows that do not count."""
    order = np.random.default_rng(np.asarray(jax.random.key_data(key))).permutation(len(chosen.row))
    for first in range(0, len(order), size):
        mine = order[first : first + size]
        mask = np.arange(size) < len(mine)
        # padding repeats a row, whose mask is False
        some = _Chosen(*(each[np.resize(mine, size)] for each in chosen))
        rows, label = _taken([(kept.rows, kept.label) for kept in stores], some)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        yield ReplayBatch(rows, label, some.task.astype(np.int32), mask, classes)


def _taken(trees: list, chosen: _Chosen) -> tuple:
    """The chosen rows of trees [N, ...] of several stores as one."""

    def one(*leaves: np.ndarray) -> np.ndarray:
        out = np.empty((len(chosen.row), *leaves[0].shape[1:]), leaves[0].dtype)
        for store in np.unique(chosen.store):
            mine = chosen.store == store
            out[mine] = leaves[store][chosen.row[mine]]
        return out

    return jax.tree.map(one, *trees)
