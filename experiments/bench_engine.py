"""Measure the engine; one JSON line per setting.

    python experiments/bench_engine.py                 # everything
    python experiments/bench_engine.py slots lanes     # some of: slots packed lanes memory

slots: slot efficiency of packed lanes. packed: one packed round against the same steps dispatched one by one
from Python. lanes: training examples per second of each lane mode, on a small network and on FPPL over the
packaged micro ViT. memory: peak resident memory of a process that trains 1,000 or 10,000 clients. Times are
the best of several repeats of a compiled round.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fcljax import config
from fcljax.data.partition import count_matrix, dirichlet
from fcljax.data.store import client_rows
from fcljax.data.tasks import make_tasks
from fcljax.federated.check import Example
from fcljax.federated.engine import Lanes, init_clients, make_engine, run_round
from fcljax.federated.schedule import Roster, capacities, plan_round
from fcljax.models.heads import cross_entropy
from fcljax.models.weights.pretrained import load_backbone
from fcljax.runs.build import frozen_of, make_method
from fcljax.runs.inputs import network_of
from fcljax.types import (
    Batch,
    Broadcast,
    ClientInfo,
    Ctx,
    Method,
    Phase,
    Program,
    Round,
    Setting,
    Upload,
    View,
    Weighted,
)

WIDTH, HIDDEN, CLASSES, BATCH = 64, 32, 10, 16
KEY = jax.random.key(0)
TASK = make_tasks(CLASSES, 1)[0]


def small_method(epochs: int = 1) -> Method:
    """FedAvg of a two-layer network on vectors: so little arithmetic that what is measured is the engine."""
    sgd = optax.sgd(0.1)

    def init(key, frozen):
        first, second = jax.random.split(key)
        return 0.1 * jax.random.normal(first, (WIDTH, HIDDEN)), 0.1 * jax.random.normal(
            second, (HIDDEN, CLASSES)
        )

    def logits(params, batch):
        return jax.nn.relu(batch.image @ params[0]) @ params[1]

    def step(ctx, local, batch, key):
        params, optimiser = local
        loss_of = lambda p: cross_entropy(logits(p, batch), batch.label, ctx.task.current, batch.mask)
        loss, gradient = jax.value_and_grad(loss_of)(params)
        update, optimiser = sgd.update(gradient, optimiser)
        return (optax.apply_updates(params, update), optimiser), {"loss": Weighted(loss, jnp.ones(()))}

    program = Program(
        start=lambda ctx, state, key: (ctx.wire, sgd.init(ctx.wire)),
        phases=(Phase(View(epochs, BATCH), step),),
        finish=lambda ctx, local, state: (Upload(mean=local[0], weight=ctx.info.rows), state),
    )
    return Method(
        init=init,
        broadcast=lambda turn, server: Broadcast(server),
        rounds=(Round(program, lambda turn, server, aggregate, key: (aggregate.mean, {})),),
        predict=lambda turn, server, batch: logits(server, batch),
    )


def fetch(data, rows, keys, augment):
    """Rows of (image, label) arrays."""
    return data[0][rows], data[1][rows], None


def skewed(rows: int, clients: int, beta: float, seed: int = 0) -> tuple[np.ndarray, Roster]:
    """Labels of 10 balanced classes and who holds them, Dirichlet(beta)."""
    label = np.repeat(np.arange(CLASSES), rows // CLASSES)
    parts = dirichlet(label, clients, beta, np.random.RandomState(seed), min_size=0)
    return label, Roster(*client_rows(parts, label, TASK), count_matrix(label, parts, CLASSES))


def best(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one that compiles."""
    function()
    return min(_seconds(function) for _ in range(repeats))


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def timed_round(
    method: Method, roster: Roster, data, lanes: Lanes, frozen=(), reader=fetch, task=TASK, repeats: int = 3
):
    """(seconds of one round, rows it reads, traces)."""
    rooms = capacities(method, [roster], lanes.count, 128)
    engine = make_engine(method, reader, lanes, rooms, Example(frozen, data, task))
    server = method.init(KEY, frozen)
    ids = np.arange(len(roster.count))
    states = [init_clients(method, server, len(ids), KEY)]
    reports = []

    def once():
        _, states[0], report = run_round(engine, frozen, server, states[0], data, roster, ids, task, 0, KEY)
        reports.append(report)

    seconds = best(once, repeats)
    return seconds, reports[-1].rows, max(engine.traces.values())


def slots() -> None:
    """5,000 rows of 10 classes over 100 clients, batch 16, 8 lanes."""
    method = small_method()
    for beta in (0.05, 0.5):
        _, roster = skewed(5000, 100, beta)
        (room,) = capacities(method, [roster], 8, 128)
        _, (useful, paid) = plan_round(method.rounds[0].program, roster, np.arange(100), 0, 8, room)
        emit(
            "slots",
            clients=100,
            rows=5000,
            beta=beta,
            batch=BATCH,
            lanes=8,
            slot_efficiency=round(useful / paid, 4),
        )


def packed() -> None:
    """One packed round of 100 skewed clients against a jitted step dispatched from Python for each batch of
    each client."""
    label, roster = skewed(5000, 100, 0.05)
    image = np.random.default_rng(0).normal(size=(len(label), WIDTH)).astype(np.float32)
    method = small_method()
    server = method.init(KEY, ())
    program = method.rounds[0].program
    step, start = jax.jit(program.phases[0].step), jax.jit(program.start)
    info = ClientInfo(np.int32(0), np.int32(1), np.zeros(CLASSES, np.int32), np.int32(0))
    total = jax.jit(lambda mean, params, weight: jax.tree.map(lambda m, p: m + weight * p, mean, params))

    def dispatched():
        mean, ctx = jax.tree.map(jnp.zeros_like, server), Ctx((), server, (), TASK, info)
        for client in range(100):
            rows = roster.rows[roster.offset[client] : roster.offset[client + 1]]
            local = start(ctx, (), KEY)
            for i in range(0, len(rows), BATCH):
                mine = np.resize(rows[i : i + BATCH], BATCH)
                mask = np.arange(BATCH) < len(rows) - i
                local, _ = step(ctx, local, _batch(image[mine], label[mine], mask), KEY)
            mean = total(mean, local[0], np.float32(len(rows) / len(label)))
        jax.block_until_ready(mean)

    data = (jnp.asarray(image), jnp.asarray(label, jnp.int32))
    by_hand = best(dispatched, 5)
    for lanes in (Lanes(1, "loop"), Lanes(8, "vmap")):
        seconds, rows, traces = timed_round(method, roster, data, lanes, repeats=5)
        emit(
            "packed", lanes=lanes.count, mode=lanes.mode, round_ms=round(1000 * seconds, 2),
            dispatched_ms=round(1000 * by_hand, 2), ratio=round(by_hand / seconds, 2), rows=rows,
            traces=traces,
        )  # fmt: skip


def _batch(image, label, mask):
    return Batch(image, label.astype(np.int32), mask, np.zeros(BATCH, np.int32))


def lanes() -> None:
    """Training examples per second of each lane mode."""
    label, roster = skewed(5000, 100, 0.5)
    data = (jax.random.normal(KEY, (len(label), WIDTH)), jnp.asarray(label, jnp.int32))
    emit_modes("two-layer network", small_method(), roster, data)

    backbone = load_backbone("vit_micro", None, None)
    settings = config.from_mapping("fppl", {"epochs": 1, "batch_size": 32, "clients": 16}, "bench")
    setting = Setting(CLASSES, 1, CLASSES, 16)
    method = make_method("fppl", config.resolve("fppl", settings), setting, network_of(backbone))
    label, roster = skewed(1600, 16, 5.0)
    data = (jax.random.normal(KEY, (len(label), 32, 32, 3)), jnp.asarray(label, jnp.int32))
    emit_modes("fppl on vit_micro", method, roster, data, frozen_of(backbone), repeats=2)


def emit_modes(model: str, method: Method, roster: Roster, data, frozen=(), repeats: int = 3) -> None:
    """One line for each lane mode."""
    modes = (Lanes(1, "loop"), Lanes(4, "loop"), Lanes(4, "vmap"), Lanes(8, "vmap"), Lanes(4, "unroll"))
    for mode in modes:
        seconds, rows, traces = timed_round(method, roster, data, mode, frozen, repeats=repeats)
        rate = round(rows / seconds)
        emit("lanes", model=model, lanes=mode.count, mode=mode.mode, examples_per_s=rate, traces=traces)


def memory() -> None:
    """Peak resident memory of fresh processes that differ in the number of clients only."""
    peaks = {}
    for clients in (1_000, 10_000):
        out = subprocess.run(
            [sys.executable, __file__, "one-memory", str(clients)], check=True, capture_output=True, text=True
        ).stdout
        peaks[clients] = json.loads(out)
        emit("memory", clients=clients, **peaks[clients])
    growth = peaks[10_000]["peak_rss_mb"] - peaks[1_000]["peak_rss_mb"]
    data = peaks[10_000]["data_mb"] - peaks[1_000]["data_mb"]
    emit("memory", growth_mb=round(growth, 1), growth_of_data_mb=round(data, 1))


def one_memory(clients: int) -> None:
    """A round of `clients` clients with 8 rows each, in this process."""
    label = np.tile(np.arange(CLASSES), clients * 8 // CLASSES + 1)[: clients * 8]
    parts = np.arange(len(label)).reshape(clients, 8)
    roster = Roster(*client_rows(list(parts), label, TASK), count_matrix(label, list(parts), CLASSES))
    image = np.random.default_rng(0).normal(size=(len(label), WIDTH)).astype(np.float32)
    data = (jnp.asarray(image), jnp.asarray(label, jnp.int32))
    seconds, rows, traces = timed_round(small_method(), roster, data, Lanes(8, "vmap"))
    held = image.nbytes + sum(array.nbytes for array in (label, *roster[:3]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            dict(
                peak_rss_mb=round(peak, 1),
                data_mb=round(held / 2**20, 1),
                examples_per_s=round(rows / seconds),
                traces=traces,
            )
        )
    )


def emit(bench: str, **values: object) -> None:
    """One JSON line."""
    print(json.dumps({"bench": bench, "backend": jax.default_backend(), **values}), flush=True)


def main(arguments: list[str]) -> None:
    """Run the named benches, or all."""
    benches = {"slots": slots, "packed": packed, "lanes": lanes, "memory": memory}
    if arguments[:1] == ["one-memory"]:
        return one_memory(int(arguments[1]))
    unknown = [name for name in arguments if name not in benches]
    if unknown:
        sys.exit(f"bench: unknown name {unknown[0]!r}; choose from: {', '.join(benches)}")
    for name in arguments or benches:
        benches[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
