"""A tiny federation on which `fcljax check` tests a method.

A tiny random network, five classes in two tasks, four clients, one of which has no
examples of the first task: small enough for seconds, large enough for partial batches,
padding classes and absent clients.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fcljax.checks.examples import CLASSES, COUNT, TinyData, images
from fcljax.data.kinds import take
from fcljax.data.partition import count_matrix
from fcljax.data.store import ClientIndices, Split
from fcljax.data.tasks import make_tasks
from fcljax.errors import one_line
from fcljax.federated.check import Example
from fcljax.federated.client_loop import Accumulator
from fcljax.federated.engine import (
    Engine,
    Exchange,
    Lanes,
    RoundInputs,
    RoundReport,
    init_clients,
    keep_task,
    make_engine,
    run_chunks,
    run_round,
)
from fcljax.federated.schedule import ClientPartition, capacities, plan_round
from fcljax.types import (
    Batch,
    Frozen,
    Method,
    Phase,
    ReplayBuffer,
    Round,
    RoundContext,
    Sizes,
    Task,
)

TASKS = make_tasks(CLASSES, 2)  # the second task has two classes and a padding class
SIZES = Sizes(classes=CLASSES, tasks=2, task_classes=3, clients=4, rounds=2, examples=9)
# examples of each client in each task: one client has none of the first task, and one
# has a single example of the second
EXAMPLES = ((9, 0, 4, 7), (6, 5, 1, 8))
KEY = jax.random.key(0)
LANES = Lanes(2, "vmap")
SHORT = 2  # examples of a short batch
GARBAGE = (7.0, 1)  # numbers and label of padding, where the engine has zeros


class Statement(NamedTuple):
    """One tested invariant."""

    name: str
    """The invariant, as a sentence."""
    holds: bool
    """Whether the method satisfies it."""
    found: str
    """The measurement behind it, or what is wrong and its usual cause."""


class Federation(NamedTuple):
    """A method on the tiny data, with its engine and its state before the first task."""

    method: Method
    engine: Engine
    frozen: Frozen
    data: Split
    partitions: list[ClientPartition]
    server: PyTree
    states: PyTree


class PlayedState(NamedTuple):
    """The state between two rounds."""

    server: PyTree
    clients: PyTree
    past: tuple[ReplayBuffer, ...] = ()
    """The server's replay buffers of finished tasks."""


def tiny_federation(
    method: Method,
    data: TinyData | None = None,
    sizes: Sequence[Sequence[int]] = EXAMPLES,
) -> Federation:
    """Return the method on 60 random examples.

    Args:
      method: the method.
      data: the examples, and the network that reads them; None: `images`.
      sizes: numbers of examples, `[task][client]`.
    """
    # before the engine is made, which compiles the method's steps as they are then
    method = _with_padding(method)
    if data is None:
        data = images()
    label = np.arange(COUNT) % SIZES.classes
    # query features stand for the padding's content here, see `padding_features`
    query = padding_features(0.0, 0, data.network.width)
    split = Split(data.examples, jnp.asarray(label, jnp.int32), query=query)
    partitions = [partition_of(label, task, counts) for task, counts in zip(TASKS, sizes, strict=True)]
    server = jax.jit(method.init)(jax.random.key(2), data.frozen)
    engine = engine_of(method, LANES, data.frozen, split, partitions)
    states = init_clients(method, server, SIZES.clients, KEY)
    return Federation(method, engine, data.frozen, split, partitions, server, states)


def read_plain(data: Split, index: Array, _keys: Array, _augment: bool) -> tuple[PyTree, Array, Array]:
    """Return examples without augmentation, labels, and the content of padding in place
    of query features."""
    assert data.query is not None
    return take(data.input, index), data.label[index], data.query[index]


def padding_features(number: float, label: int, width: int) -> Array:
    """Return the content of padding in place of query features [60, width].

    Every example carries it, since the engine clears padding itself.
    """
    return jnp.zeros((COUNT, width)).at[:, 0].set(number).at[:, 1].set(label)


def fill_padding(mask: Array | np.ndarray, examples: PyTree, number: Array | float) -> PyTree:
    """Replace the examples outside of the mask [B] by a number in all entries.

    Among booleans every number but 0 is True. NaN is 0 among integers and booleans.
    """

    def fill(leaf: Array) -> Array:
        filler = jnp.asarray(number)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            filler = jnp.nan_to_num(filler)
        rows = mask.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(rows, leaf, filler.astype(leaf.dtype))

    return jax.tree.map(fill, examples)


def _with_padding(method: Method) -> Method:
    """Return the method with steps that see the content of padding."""

    def filled(batch: Batch) -> Batch:
        if batch.query is None:  # a batch that the server draws carries none
            return batch
        number, label, *_ = jnp.max(batch.query, axis=0)
        return batch._replace(
            input=fill_padding(batch.mask, batch.input, number),
            label=jnp.where(batch.mask, batch.label, label.astype(jnp.int32)),
            query=None,
        )

    def phase_of(phase: Phase) -> Phase:
        def step(context, local, batch, key):
            return phase.step(context, local, filled(batch), key)

        return phase._replace(step=step)

    def round_of(round_: Round) -> Round:
        phases = tuple(map(phase_of, round_.program.phases))
        return round_._replace(program=round_.program._replace(phases=phases))

    return method._replace(rounds=tuple(map(round_of, method.rounds)))


def partition_of(
    label: np.ndarray, task, sizes: Sequence[int], order=range(SIZES.clients)
) -> ClientPartition:
    """Return the partition of a task's examples, of which the first belongs to no client.

    Args:
      label: of all examples.
      task: whose classes are partitioned.
      sizes: numbers of examples.
      order: which of these numbers each client gets.
    """
    # the first example belongs to nobody: poison in it must not matter
    examples = np.flatnonzero(task.current[label])[1 : 1 + sum(sizes)]
    shares = np.split(examples, np.cumsum(sizes)[:-1])
    indices = ClientIndices.of([shares[i] for i in order])
    class_examples = count_matrix(label, indices.by_client(), SIZES.classes).astype(np.int32)
    return ClientPartition(*indices, class_examples)


def engine_of(
    method: Method,
    lanes: Lanes,
    frozen: Frozen,
    data: Split,
    partitions: list[ClientPartition],
    short: bool = False,
) -> Engine:
    """Return the engine; `short` computes batches of one and two without padding."""
    # slots=128: more than there are clients, so that a round is one chunk
    sizes = capacities(method, partitions, lanes.count, slots=128)
    if short:
        sizes = tuple(size._replace(widths=tuple(map(_with_short, size.widths))) for size in sizes)
    return make_engine(method, read_plain, lanes, sizes, Example(frozen, data, TASKS[0]))


def _with_short(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch widths that are compiled, with that of a short batch."""
    return tuple(sorted({min(SHORT, widths[-1]), *widths}))


def states_after_rounds(
    federation: Federation,
    data: Split | None = None,
    start: int = 0,
    state: PlayedState | None = None,
    ids: Sequence[int] | None = None,
    on_report: Callable[[RoundReport], object] | None = None,
) -> list[PlayedState]:
    """Return the states after every round from task `start` on.

    Args:
      federation: what is played.
      data: in place of the federation's data.
      start: first task.
      state: at the start; None: before the first task.
      ids: clients that participate in rounds; None: all that have examples.
      on_report: called with the report of every round, and of a task's start and end.
    """
    if data is None:
        data = federation.data
    history = []
    server, clients, past = state or PlayedState(federation.server, jax.tree.map(jnp.copy, federation.states))
    # compiled once for all tasks, as a run does
    begin = jax.jit(federation.method.begin_task)
    for task, partition in list(zip(TASKS, federation.partitions, strict=True))[start:]:
        round_context = RoundContext.on_host(federation.frozen, task, 0, False)
        server = begin(round_context, server, KEY)
        everyone = np.flatnonzero(partition.count)
        chosen = everyone
        if ids is not None:
            chosen = np.intersect1d(everyone, ids)
        for r in range(SIZES.rounds):
            last = r == SIZES.rounds - 1
            # at a task's start and end all clients with examples take part
            for when in ("task_start",) * (r == 0) + ("round",) + ("task_end",) * last:
                number = 0
                who = everyone
                if when == "round":
                    number = r
                    who = chosen
                inputs = RoundInputs(
                    federation.frozen, data, partition, who, task, number, jax.random.key(3), when, last, past
                )
                server, clients, report = run_round(federation.engine, server, clients, inputs)
                if on_report is not None:
                    on_report(report)
            if last:
                # replay of finished tasks, for methods whose server trains on it
                buffer = keep_task(federation.engine, federation.frozen, server, task, r)
                if buffer is not None:
                    past += (buffer,)
            # a copy: the next round takes over the memory of the clients' states
            history.append(PlayedState(server, jax.tree.map(jnp.copy, clients), past))
    return history


def present(partition: ClientPartition) -> list[int]:
    """Return the ids of clients that have examples."""
    return np.flatnonzero(partition.count).tolist()


def receive(
    federation: Federation,
    engine: Engine,
    index: int,
    state: PlayedState,
    partition: ClientPartition,
    ids: Sequence[int],
    task: Task = TASKS[1],
    round_: int = 0,
) -> tuple[Accumulator, PyTree]:
    """Return what the server receives from some clients in one of the method's rounds,
    and all new states.

    Args:
      federation: whose data are read.
      engine: which plays the round.
      index: of the method's round.
      state: before the round.
      partition: of the round.
      ids: clients that take part.
      task: of the round.
      round_: its number within the task.
    """
    player = engine.players[index]
    chunks, _ = plan_round(
        player.round.program, partition, np.array(ids), round_, engine.lanes.count, player.capacity
    )
    round_context = RoundContext.on_host(federation.frozen, task, round_, False)
    broadcast = engine.broadcast(round_context, state.server)
    # a copy, since the engine takes over the memory of its arguments
    states = jax.tree.map(jnp.copy, state.clients)
    exchange = Exchange(index, round_context, broadcast, partition, np.array(ids), KEY)
    received, states, _ = run_chunks(engine, chunks, exchange, states, federation.data)
    return received, states


# ---- pytrees ---------------------------------------------------------------------------


def parts_of(received: Accumulator) -> tuple[PyTree, PyTree, PyTree]:
    """Return weighted means, sums and what is gathered per client."""
    return received.mean, received.sum, received.gather


def of_client(tree: PyTree, index: int) -> PyTree:
    """Return the leaves of one client, from a tree that is stacked over clients."""
    return jax.tree.map(lambda x: x[index], tree)


def begin_task(federation: Federation, server: PyTree, task: Task) -> PyTree:
    """Return the server's state when a task begins, before its first round."""
    round_context = RoundContext.on_host(federation.frozen, task, 0, False)
    return jax.jit(federation.method.begin_task)(round_context, server, KEY)


def equal_bits(name: str, problem: str) -> Statement:
    """Return the statement that two trees have the same bits; `problem` says how they
    differ, "" if equal."""
    return Statement(name, not problem, problem or "the same bits")


def difference(a: PyTree, b: PyTree) -> str:
    """Return how two trees differ; "" if they have the same bits."""
    try:
        # chex also compares structures, and names the leaves that differ in its message
        chex.assert_trees_all_equal(a, b)
    except AssertionError as error:
        leaves = re.findall(r"differ in leaves '([^']*)'", str(error))
        if leaves:
            return f"{', '.join(leaves[:3])} differ"
        return one_line(str(error))[:200]
    return ""


def not_finite(tree: PyTree) -> str:
    """Return the first three leaves with NaN or infinity; "" if there are none."""
    leaves = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf)))
    ]
    return ", ".join(leaves[:3])


def farthest_leaf(a: PyTree, b: PyTree) -> tuple[float, str]:
    """Return the largest difference over a tree's largest value, and its leaf's path."""
    # relative to the largest value of the whole tree: in a leaf of tiny values rounding
    # is a large share
    scale = max(largest(b), 1e-6)
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    differences = [
        (largest(x.astype(jnp.float32) - y.astype(jnp.float32)) / scale, jax.tree_util.keystr(path))
        for (path, x), y in pairs
    ]
    return max(differences, default=(0.0, ""))


def largest(tree: PyTree) -> float:
    """Return the largest absolute value; infinite if one is NaN."""
    values = [jnp.nan_to_num(jnp.abs(x.astype(jnp.float32)), nan=jnp.inf) for x in jax.tree.leaves(tree)]
    return max((float(jnp.max(x, initial=0.0)) for x in values), default=0.0)


def relative_difference(a: PyTree, b: PyTree) -> float:
    """Return the largest difference over the largest value; infinite with NaN or inf."""
    differences = jax.tree.map(lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), a, b)
    return largest(differences) / max(largest(b), 1e-6)
