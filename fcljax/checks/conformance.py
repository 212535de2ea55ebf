"""What every method must hold, as statements that `fcljax check` tries on any of them.

A tiny random ViT, five classes in two tasks, four clients of which one has no rows in the first task: small
enough for seconds, large enough for partial batches, padding classes and absent clients.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fcljax.config import RunConfig
from fcljax.data.store import Split
from fcljax.data.tasks import make_tasks
from fcljax.federated.check import Example
from fcljax.federated.client_loop import Accumulator
from fcljax.federated.engine import (
    Engine,
    Exchange,
    Lanes,
    RoundInputs,
    init_clients,
    keep_task,
    make_engine,
    run_chunks,
    run_round,
)
from fcljax.federated.schedule import ClientPartition, capacities, plan_round
from fcljax.models.mae import DecoderConfig, autoencoder, init_decoder
from fcljax.models.vit import ViTConfig, init_vit, vit_network
from fcljax.runs import checkpoint
from fcljax.runs.build import make_method
from fcljax.types import Frozen, Method, Network, ReplayBuffer, RoundContext, Sizes, Task

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=6, heads=2, mlp=32)
DECODER = DecoderConfig(image_size=8, patch=4, encoder_width=16, width=8, depth=2, heads=2, mlp=16)
TASKS = make_tasks(5, 2)  # the second task has two classes and a padding class
SIZES = Sizes(classes=5, tasks=2, task_classes=3, clients=4, rounds=2, examples=9)
EXAMPLES = ((9, 0, 4, 7), (6, 5, 1, 8))  # rows of each client in each task
KEY = jax.random.key(0)
LANES = Lanes(2, "vmap")
SHORT = 2  # rows of a short batch


class Statement(NamedTuple):
    """One statement: what it says, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str


class Federation(NamedTuple):
    """A method on the tiny data, with its engine and where it starts."""

    method: Method
    engine: Engine
    frozen: Frozen
    data: Split
    partitions: list[ClientPartition]
    server: PyTree
    states: PyTree


class State(NamedTuple):
    """What goes from round to round, and what the server keeps of finished tasks."""

    server: PyTree
    clients: PyTree
    past: tuple[ReplayBuffer, ...] = ()


def check(method_name: str, cfg: RunConfig) -> list[Statement]:
    """Try every statement on a method.

    Args:
      method_name: of the package, or from outside.
      cfg: resolved settings, of which the method's, the adapter's and the training's count.

    Raises:
      InputError: for a method that does not keep to the protocol.
    """
    made = federation(make_method(method_name, cfg, SIZES, network(TINY)))
    history = play(made)
    return [statement(made, history) for statement in STATEMENTS]


# ---- the tiny federation -----------------------------------------------------------------------------------


def network(vit: ViTConfig) -> Network:
    """A ViT of images of 8 pixels, with a masked autoencoder whose pixels are in another range."""
    pair = autoencoder(vit, dataclasses.replace(DECODER, encoder_width=vit.width), (0.5,) * 3, (0.25,) * 3)
    return vit_network(vit, autoencoder=pair)


def frozen_parameters(vit: ViTConfig, surrogate: Array) -> Frozen:
    """Random parameters of `network` and images of another data set."""
    decoder = init_decoder(jax.random.key(4), dataclasses.replace(DECODER, encoder_width=vit.width))
    return Frozen(init_vit(jax.random.key(1), vit), decoder, surrogate)


def federation(
    method: Method, vit: ViTConfig = TINY, sizes: Sequence[Sequence[int]] = EXAMPLES
) -> Federation:
    """The method on 60 random images.

    Args:
      vit: the network, of images of 8 pixels.
      sizes: `[tasks][clients]`, rows.
    """
    label, rng = np.arange(60) % SIZES.classes, np.random.default_rng(0)
    image = jnp.asarray(rng.normal(size=(60, 8, 8, 3)), jnp.float32)
    data = Split(image, jnp.asarray(label, jnp.int32))
    partitions = [_roster(label, task, own) for task, own in zip(TASKS, sizes, strict=True)]
    surrogate = jnp.asarray(rng.integers(0, 256, (12, 8, 8, 3)), jnp.uint8)
    frozen = frozen_parameters(vit, surrogate)
    server = jax.jit(method.init)(jax.random.key(2), frozen)
    engine = _engine(method, LANES, frozen, data, partitions)
    states = init_clients(method, server, SIZES.clients, KEY)
    return Federation(method, engine, frozen, data, partitions, server, states)


def read(data: Split, rows, keys, augment: bool):
    """The rows as they are: there is nothing to augment, and nothing is cached."""
    del keys, augment
    return data.image[rows], data.label[rows], None


def _roster(label: np.ndarray, task, sizes: Sequence[int], order=range(SIZES.clients)) -> ClientPartition:
    """Clients with so many rows of the task, in `order`; row 0 of the task belongs to nobody."""
    mine = np.flatnonzero(task.current[label])[1 : 1 + sum(sizes)]
    owned = np.split(mine, np.cumsum(sizes)[:-1])
    owned = [owned[i] for i in order]
    counts = [np.bincount(label[rows], minlength=SIZES.classes) for rows in owned]
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in owned])])
    return ClientPartition(np.concatenate(owned).astype(np.int32), offset, np.stack(counts).astype(np.int32))


def _engine(
    method: Method,
    lanes: Lanes,
    frozen: Frozen,
    data: Split,
    partitions: list[ClientPartition],
    short: bool = False,
) -> Engine:
    """short: are batches of one and two rows computed as such?"""
    room = capacities(method, partitions, lanes.count, slots=128)
    if short:
        room = tuple(each._replace(widths=tuple(map(_with_short, each.widths))) for each in room)
    return make_engine(method, read, lanes, room, Example(frozen, data, TASKS[0]))


def _with_short(widths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({min(SHORT, widths[-1]), *widths}))


def play(
    made: Federation,
    data: Split | None = None,
    start: int = 0,
    state: State | None = None,
    ids: Sequence[int] | None = None,
) -> list[State]:
    """The states after every round of the tasks from `start` on, with what comes before and after a task.

    Args:
      data: instead of the federation's own.
      state: from which to start.
      ids: the clients that take part in rounds; None: all that have rows.
    """
    data, history = made.data if data is None else data, []
    server, clients, past = state or State(made.server, jax.tree.map(jnp.copy, made.states))
    begin = jax.jit(made.method.begin_task)
    for task, partition in list(zip(TASKS, made.partitions, strict=True))[start:]:
        round_context = RoundContext.on_host(made.frozen, task, 0, False)
        server, everyone = begin(round_context, server, KEY), np.flatnonzero(partition.count)
        chosen = everyone if ids is None else np.intersect1d(everyone, ids)
        for r in range(SIZES.rounds):
            last = r == SIZES.rounds - 1
            for when in ("task_start",) * (r == 0) + ("round",) + ("task_end",) * last:
                number, who = (r, chosen) if when == "round" else (0, everyone)
                inputs = RoundInputs(
                    made.frozen, data, partition, who, task, number, jax.random.key(3), when, last, past
                )
                server, clients, _ = run_round(made.engine, server, clients, inputs)
            kept = keep_task(made.engine, made.frozen, server, task, r) if last else None
            past += () if kept is None else (kept,)
            history.append(State(server, jax.tree.map(jnp.copy, clients), past))
    return history


def present(partition: ClientPartition) -> list[int]:
    """The clients that have rows."""
    return np.flatnonzero(partition.count).tolist()


def receive(
    made: Federation,
    engine: Engine,
    index: int,
    state: State,
    partition: ClientPartition,
    ids: Sequence[int],
    task: Task = TASKS[1],
) -> tuple[Accumulator, PyTree]:
    """What the server gets from clients `ids` in one of the method's rounds, and everybody's new states."""
    player = engine.players[index]
    chunks, _ = plan_round(
        player.round.program, partition, np.array(ids), 0, engine.lanes.count, player.capacity
    )
    round_context = RoundContext.on_host(made.frozen, task, 0, False)
    broadcast, states = engine.broadcast(round_context, state.server), jax.tree.map(jnp.copy, state.clients)
    exchange = Exchange(index, round_context, broadcast, partition, np.array(ids), KEY)
    return run_chunks(engine, chunks, exchange, states, made.data)


# ---- the statements ----------------------------------------------------------------------------------------


def stays_finite(made: Federation, history: list[State]) -> Statement:
    """Everything stays finite and the server moves."""
    floats = [x for x in jax.tree.leaves(history[-1]) if jnp.issubdtype(x.dtype, jnp.floating)]
    finite = all(bool(jnp.all(jnp.isfinite(x))) for x in floats)
    moved = _difference(made.server, history[-1].server) > 0
    found = "it does" if finite and moved else "NaN or infinite numbers" if not finite else "nothing moves"
    return Statement("everything stays finite, and the server's state moves", finite and moved, found)


def lanes_do_not_matter(made: Federation, history: list[State]) -> Statement:
    """One lane in a loop, where short batches are computed as such, receives what two vmapped lanes do, which
    pad them. That is up to rounding, of which Adam makes whole steps where a gradient is nothing else:
    FedLwF.MC's teachers are the students at first."""
    single = _engine(made.method, Lanes(1, "loop"), made.frozen, made.data, made.partitions, short=True)
    worst = 0.0
    for index in range(len(made.method.rounds)):
        pair = [
            receive(made, engine, index, history[1], made.partitions[1], [0, 2, 3])[0]
            for engine in (made.engine, single)
        ]
        worst = max(worst, *(_relative(*(_sent(one)[part] for one in pair)) for part in range(3)))
    return Statement(
        "uploads do not depend on lanes or padding", worst < 2e-3, f"largest relative difference {worst:.1e}"
    )


def others_do_not_matter(made: Federation, history: list[State]) -> Statement:
    """What a client sends and keeps is the same bits, whoever else takes part."""
    worst = 0.0
    for index in range(len(made.method.rounds)):
        call = lambda ids, i=index: receive(made, made.engine, i, history[1], made.partitions[1], ids)
        together, after = call([0, 2, 3])
        for rank, client in enumerate([0, 2, 3]):
            alone, its = call([client])
            worst = max(worst, _difference(_row(alone.gather, 0), _row(together.gather, rank)))
            worst = max(worst, _difference(_row(its, client), _row(after, client)))
    return Statement(
        "what a client sends and keeps does not depend on who else takes part",
        worst == 0,
        f"largest difference {worst:.1e}",
    )


def padding_is_inert(made: Federation, history: list[State]) -> Statement:
    """Rows that nobody holds, which padding reads, may be NaN."""
    held = np.isin(np.arange(60), np.concatenate([partition.indices for partition in made.partitions]))
    image = jnp.where(held[:, None, None, None], made.data.image, jnp.nan)
    poisoned = play(made, made.data._replace(image=image))
    worst = _difference(poisoned[-1], history[-1])
    return Statement(
        "padding is inert: poisoned with NaN, nothing changes", worst == 0, f"difference {worst:.1e}"
    )


def order_does_not_matter(made: Federation, history: list[State]) -> Statement:
    """Renamed clients send the same sum. Of a client's first round, since its key belongs to its number."""
    del history
    label, worst, order = np.asarray(made.data.label), 0.0, [3, 2, 0, 1]
    renamed = _roster(label, TASKS[0], made.partitions[0].count.tolist(), order)
    begin = jax.jit(made.method.begin_task)
    round_context = RoundContext.on_host(made.frozen, TASKS[0], 0, False)
    state = State(begin(round_context, made.server, KEY), made.states)
    for index in range(len(made.method.rounds)):
        pair = [
            receive(made, made.engine, index, state, partition, present(partition), TASKS[0])[0]
            for partition in (made.partitions[0], renamed)
        ]
        worst = max(worst, *(_relative(*(_sent(one)[part] for one in pair)) for part in range(2)))
    return Statement(
        "permuting clients does not change what is added up",
        worst < 1e-3,
        f"largest relative difference {worst:.1e}",
    )


def resumes(made: Federation, history: list[State]) -> Statement:
    """A run that goes on from a checkpoint on disk gives the same bits."""
    with tempfile.TemporaryDirectory() as folder, checkpoint.open_checkpoints(Path(folder), 1) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, history[1], {}))
        checkpoint.finish(manager)
        found = checkpoint.latest(manager, history[1])
    again = play(made, start=1, state=found.state if found else None)
    worst = _difference(again[-1], history[-1])
    return Statement("a resumed run equals the uninterrupted one", worst == 0, f"difference {worst:.1e}")


def traced_once(made: Federation, history: list[State]) -> Statement:
    """After all of the above, every function of the engine was traced once."""
    del history
    most = max(made.engine.traces.items(), key=lambda item: item[1])
    return Statement("all rounds of all tasks share one trace", most[1] == 1, f"{most[0]}: {most[1]} traces")


STATEMENTS = (
    stays_finite,
    lanes_do_not_matter,
    others_do_not_matter,
    padding_is_inert,
    order_does_not_matter,
    resumes,
    traced_once,
)


# ---- pytrees -----------------------------------------------------------------------------------------------


def _sent(received: Accumulator) -> tuple[PyTree, PyTree, PyTree]:
    return received.mean, received.sum, received.gather


def _row(tree: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _largest(tree: PyTree, function: Callable) -> float:
    values = [float(jnp.max(jnp.abs(function(x)), initial=0.0)) for x in jax.tree.leaves(tree)]
    return max(values, default=0.0)


def _difference(a: PyTree, b: PyTree) -> float:
    """The largest absolute difference; NaN on one side alone is infinite, on both no difference."""

    def apart(x, y):
        x, y = (jnp.asarray(v).astype(jnp.float32) for v in (x, y))
        gap = jnp.where((x == y) | (jnp.isnan(x) & jnp.isnan(y)), 0.0, jnp.abs(x - y))
        return jnp.where(jnp.isnan(gap), jnp.inf, gap)

    return _largest(jax.tree.map(apart, a, b), lambda x: x)


def _relative(a: PyTree, b: PyTree) -> float:
    """The largest difference over the largest number."""
    scale = _largest(b, lambda x: jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32))
    return _difference(a, b) / max(scale, 1e-6)
