"""A federation in the middle of its stream, and one round of it by the engine."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fcljax.federated.check import Example, check_method
from fcljax.federated.client_loop import Fetch, Lanes
from fcljax.federated.engine import Engine, RoundInputs, init_clients, make_engine, run_round
from fcljax.federated.schedule import Capacity, ClientPartition, capacities
from fcljax.runs.machine import clients_per_chunk
from fcljax.types import Frozen, Method, PyTree, Task

KEY = jax.random.key(0)
TASKS = 10
ROUNDS = 10


class Game(NamedTuple):
    """A federation before a round. `fetch` reads rows of `data`; `server` is what the round starts from."""

    method: Method
    frozen: Frozen
    server: PyTree
    data: PyTree
    partition: ClientPartition
    task: Task
    fetch: Fetch


def partition(rows: Sequence[int], label: np.ndarray, classes: int) -> ClientPartition:
    """Clients with so many rows each, in the order of the rows."""
    ends = np.cumsum(rows)
    owned = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    held = np.stack([np.bincount(label[own], minlength=classes) for own in owned]).astype(np.int32)
    return ClientPartition(np.concatenate(owned), np.concatenate([[0], ends]).astype(np.int64), held)


def rows_of(partition: ClientPartition, client: int) -> np.ndarray:
    """The rows of a client."""
    return partition.indices[partition.offset[client] : partition.offset[client + 1]]


def rooms(
    method: Method,
    reader: Fetch,
    example: Example,
    partitions: Sequence[ClientPartition],
    lanes: int,
    participation: float = 1.0,
) -> tuple[Capacity, ...]:
    """Shapes of a run with these rosters, with as many clients per chunk as a run would have."""
    image = jax.tree.leaves(example.data)[0]
    shapes = check_method(method, reader, example)
    most = max(int(partition.count.max()) for partition in partitions)
    slots = clients_per_chunk(method, shapes, most, image.nbytes // len(image), lanes)
    return capacities(method, list(partitions), lanes, slots, participation)


def capacities_of(game: Game, lanes: int) -> tuple[Capacity, ...]:
    """Shapes as of a run of ten such tasks of ten rounds: what is worth a compilation depends on how often it
    is used."""
    example = Example(game.frozen, game.data, game.task)
    partitions = [game.partition] * TASKS * ROUNDS
    return rooms(game.method, game.fetch, example, partitions, lanes)


def engine_of(game: Game, lanes: Lanes) -> Engine:
    """The engine of a federation."""
    shapes = capacities_of(game, lanes.count)
    return make_engine(game.method, game.fetch, lanes, shapes, Example(game.frozen, game.data, game.task))


def round_of(game: Game, lanes: Lanes) -> Callable[[], PyTree]:
    """A call that plays the round with all clients, always from the same start -> the server after it."""
    engine = engine_of(game, lanes)
    clients = len(game.partition.count)
    states = [init_clients(game.method, game.server, clients, KEY)]

    def once() -> PyTree:
        server, states[0], _ = run_round(
            engine,
            game.server,
            states[0],
            RoundInputs(game.frozen, game.data, game.partition, np.arange(clients), game.task, 0, KEY),
        )
        if max(engine.traces.values()) > 1:
            raise RuntimeError(f"a function was traced twice: {engine.traces}")
        return server

    return once


def mean_tree(trees: Sequence[PyTree], weights: Sequence[float]) -> PyTree:
    """FedAvg as a plain loop has it: the weighted mean of parameters."""
    share = np.asarray(weights, np.float32) / np.sum(weights)
    return jax.tree.map(lambda *x: sum(s * leaf for s, leaf in zip(share, x, strict=True)), *trees)


def add_tree(total: PyTree, tree: PyTree, share: float | jax.Array) -> PyTree:
    """The same as a running sum."""
    return jax.tree.map(lambda a, b: a + share * b, total, tree)


def task_of(index: int, task_classes: int, tasks: int) -> Task:
    """Task number `index` of a stream of equal tasks, on the device."""
    ids = np.arange(task_classes * tasks, dtype=np.int32)
    mine = ids // task_classes == index
    task = Task.of_numpy(np.int32(index), ids[mine], mine, ids // task_classes <= index)
    return jax.tree.map(jnp.asarray, task)
