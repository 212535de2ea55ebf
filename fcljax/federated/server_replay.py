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
from fcljax.types import Kept, KeptBatch, Metrics, PyTree, Rehearsal, Turn, Weighted


class Rehearser(NamedTuple):
    """The compiled functions of a rehearsal. `finish` keeps the server's state if what comes out is not
    finite, and says so."""

    rehearsal: Rehearsal
    kept: Callable[..., Kept]
    start: Callable[..., PyTree]
    step: Callable[..., tuple[PyTree, Metrics]]
    finish: Callable[..., tuple[PyTree, Array]]


class Rehearsed(NamedTuple):
    """What came of it: the server's state, sums of metrics, the rows read, and was the result refused?"""

    server: PyTree
    metrics: Metrics
    rows: int
    refused: bool


def make_rehearser(rehearsal: Rehearsal, jit: Callable) -> Rehearser:
    """Compile-once functions; `jit(name, function, **options)` is the engine's."""

    def finish(turn: Turn, server: PyTree, local: PyTree) -> tuple[PyTree, Array]:
        new = jax.tree.map(jnp.asarray, rehearsal.finish(turn, server, local))
        refused = spoiled(new, server)
        return select(~refused, new, server), refused

    return Rehearser(
        rehearsal, jit("rehearsal kept", rehearsal.kept), jit("rehearsal start", rehearsal.start),
        jit("rehearsal step", rehearsal.step, donate_argnums=2), jit("rehearsal finish", finish),
    )  # fmt: skip


def spoiled(new: PyTree, old: PyTree) -> Array:
    """Has a number become NaN or infinite?"""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    found = [
        jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)) for a, b in pairs if jnp.issubdtype(a.dtype, jnp.inexact)
    ]
    return jnp.any(jnp.stack(found)) if found else jnp.zeros((), bool)


def kept_rows(rehearser: Rehearser, turn: Turn, server: PyTree) -> Kept:
    """The rows of the current task on the host, numpy, without the places that are not taken."""
    kept = jax.device_get(rehearser.kept(turn._replace(previous=()), server))
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(kept.used)], kept)


def rehearse(
    rehearser: Rehearser, turn: Turn, server: PyTree, past: Sequence[Kept], key: PRNGKeyArray,
    place: Callable[[PyTree], PyTree],
) -> Rehearsed:  # fmt: skip
    """All epochs of a round.

    Args:
      rehearser: from `make_rehearser`.
      turn: the round that is over.
      server: its state after that.
      past: rows of the tasks before, in their order, as `kept_rows` gave them.
      key: of this rehearsal.
      place: puts arrays where the engine works.
    """
    turn = turn._replace(previous=())
    stores = (*(jax.tree.map(np.asarray, kept) for kept in past), kept_rows(rehearser, turn, server))
    pairs = rehearser.rehearsal.plan(int(turn.task.index), bool(turn.last))
    chosen = _chosen(stores, pairs)
    if not len(chosen.row):
        return Rehearsed(server, {}, 0, False)
    classes = np.isin(np.arange(len(turn.task.current)), _labels(stores, chosen))
    local, found, rows = rehearser.start(turn, server), [], 0
    for epoch in range(rehearser.rehearsal.epochs):
        own = jax.random.fold_in(key, epoch)
        for i, batch in enumerate(_batches(stores, chosen, classes, rehearser.rehearsal.batch_size, own)):
            step_key = jax.random.fold_in(own, i)
            local, metrics = rehearser.step(turn, server, local, place(batch), step_key)
            found.append(metrics)
            rows += int(np.sum(batch.mask))
    server, refused = rehearser.finish(turn, server, local)
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), jax.device_get(found))
    return Rehearsed(server, {name: Weighted(*value) for name, value in total.items()}, rows, bool(refused))


class _Chosen(NamedTuple):
    """Rows of some stores: in which store, at which place, and as whose each is taken."""

    store: Int[np.ndarray, " n"]
    row: Int[np.ndarray, " n"]
    task: Int[np.ndarray, " n"]


def _chosen(stores: Sequence[Kept], pairs: Sequence[tuple[int, int]]) -> _Chosen:
    """All rows of each pair's task, in the order of the pairs."""
    found = []
    for source, as_task in pairs:
        row = np.arange(len(stores[source].label))
        found.append((np.full_like(row, source), row, np.full_like(row, as_task)))
    return _Chosen(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _labels(stores: Sequence[Kept], chosen: _Chosen) -> Int[np.ndarray, " labels"]:
    found = [np.asarray(stores[store].label) for store in np.unique(chosen.store)]
    return np.unique(np.concatenate(found))


def _batches(
    stores: Sequence[Kept], chosen: _Chosen, classes: np.ndarray, size: int, key: PRNGKeyArray
) -> Iterator[KeptBatch]:
    """An epoch, shuffled; the last batch is padded with rows that do not count."""
    order = np.random.default_rng(np.asarray(jax.random.key_data(key))).permutation(len(chosen.row))
    for first in range(0, len(order), size):
        mine = order[first : first + size]
        mask = np.arange(size) < len(mine)
        # padding repeats a row, whose mask is False
        some = _Chosen(*(each[np.resize(mine, size)] for each in chosen))
        rows, label = _taken([(kept.rows, kept.label) for kept in stores], some)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        yield KeptBatch(rows, label, some.task.astype(np.int32), mask, classes)


def _taken(trees: list, chosen: _Chosen) -> tuple:
    """The chosen rows of trees [N, ...] of several stores as one."""

    def one(*leaves: np.ndarray) -> np.ndarray:
        out = np.empty((len(chosen.row), *leaves[0].shape[1:]), leaves[0].dtype)
        for store in np.unique(chosen.store):
            mine = chosen.store == store
            out[mine] = leaves[store][chosen.row[mine]]
        return out

    return jax.tree.map(one, *trees)
