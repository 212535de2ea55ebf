"""Measure the engine; one JSON line per setting.

    python experiments/bench_engine.py                 # everything
    python experiments/bench_engine.py slots lanes     # some of: slots packed lanes memory scale

slots: slot efficiency of packed lanes. packed: one packed round against the same steps dispatched one by one
from Python. lanes: training examples per second of each lane mode, on a small network and on FPPL over the
packaged micro ViT. memory: peak resident memory of a process that trains 1,000 or 10,000 clients. scale: a
round of 1,000 to 100,000 clients that all take part, and of 200 out of 1,000,000, whose uploads are added up
or gathered: seconds, microseconds per client, memory. Times are the best of several repeats of a compiled
round; memory is the high-water mark of a process of its own, as Linux keeps it.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from peers.game import rooms
from peers.machine import best

from fcljax import config
from fcljax.data.partition import count_matrix, dirichlet
from fcljax.data.store import ClientIndices
from fcljax.data.tasks import make_tasks
from fcljax.federated.check import Example
from fcljax.federated.engine import Lanes, RoundInputs, init_clients, make_engine, run_round
from fcljax.federated.schedule import ClientPartition, capacities, plan_round
from fcljax.models.heads import cross_entropy
from fcljax.models.weights.pretrained import load_backbone
from fcljax.runs.build import frozen_of, make_method
from fcljax.runs.inputs import network_of
from fcljax.types import (
    Batch,
    Broadcast,
    ClientContext,
    ClientInfo,
    Method,
    Phase,
    Program,
    Round,
    Sizes,
    Upload,
    View,
    Weighted,
)

WIDTH = 64
HIDDEN = 32
CLASSES = 10
BATCH = 16
KEY = jax.random.key(0)
TASK = make_tasks(CLASSES, 1)[0]


def small_method(epochs: int = 1, channel: str = "mean") -> Method:
    """FedAvg of a two-layer network on vectors: so little arithmetic that what is measured is the engine.
    Uploads are averaged on their way ("mean") or kept for the server one by one ("gather")."""
    sgd = optax.sgd(0.1)

    def init(key, frozen):
        first, second = jax.random.split(key)
        return 0.1 * jax.random.normal(first, (WIDTH, HIDDEN)), 0.1 * jax.random.normal(
            second, (HIDDEN, CLASSES)
        )

    def logits(params, batch):
        return jax.nn.relu(batch.input @ params[0]) @ params[1]

    def step(context, local, batch, key):
        params, optimiser = local
        loss_of = lambda p: cross_entropy(logits(p, batch), batch.label, context.task.current, batch.mask)
        loss, gradient = jax.value_and_grad(loss_of)(params)
        update, optimiser = sgd.update(gradient, optimiser)
        return (optax.apply_updates(params, update), optimiser), {"loss": Weighted(loss, jnp.ones(()))}

    def finish(context, local, state):
        return Upload(**{channel: local[0]}, weight=context.client.examples), state

    def serve(round_context, server, aggregate, key):
        if channel == "mean":
            return aggregate.mean, {}
        share = aggregate.weight / jnp.sum(aggregate.weight)
        return jax.tree.map(lambda each: jnp.tensordot(share, each, 1), aggregate.gather), {}

    program = Program(
        start=lambda context, state, key: (context.payload, sgd.init(context.payload)),
        phases=(Phase(View(epochs, BATCH), step),),
        finish=finish,
    )
    return Method(
        init=init,
        broadcast=lambda round_context, server: Broadcast(server),
        rounds=(Round(program, serve),),
        predict=lambda round_context, server, batch: logits(server, batch),
    )


def fetch(data, rows, keys, augment):
    """Rows of (image, label) arrays."""
    return data[0][rows], data[1][rows], None


def skewed(rows: int, clients: int, beta: float, seed: int = 0) -> tuple[np.ndarray, ClientPartition]:
    """Labels of 10 balanced classes and who holds them, Dirichlet(beta)."""
    label = np.repeat(np.arange(CLASSES), rows // CLASSES)
    parts = dirichlet(label, clients, beta, np.random.RandomState(seed), min_size=0)
    return label, ClientPartition(*ClientIndices.of(parts), count_matrix(label, parts, CLASSES))


def timed_round(
    method: Method,
    partition: ClientPartition,
    data,
    lanes: Lanes,
    frozen=(),
    reader=fetch,
    task=TASK,
    repeats: int = 3,
    ids: np.ndarray | None = None,
):
    """(seconds of one round, rows it reads, traces); `ids` take part, or all."""
    ids = np.arange(len(partition.count)) if ids is None else ids
    share = len(ids) / len(partition.count)
    example = Example(frozen, data, task)
    shapes = rooms(method, reader, example, [partition], lanes.count, share)
    engine = make_engine(method, reader, lanes, shapes, example)
    server = method.init(KEY, frozen)
    states = [init_clients(method, server, len(partition.count), KEY)]
    reports = []

    def once():
        _, states[0], report = run_round(
            engine, server, states[0], RoundInputs(frozen, data, partition, ids, task, 0, KEY)
        )
        reports.append(report)

    seconds = best(once, repeats)
    return seconds, reports[-1].examples, max(engine.traces.values())


def slots() -> None:
    """5,000 rows of 10 classes over 100 clients, batch 16, 8 lanes."""
    method = small_method()
    for beta in (0.05, 0.5):
        _, partition = skewed(5000, 100, beta)
        (room,) = capacities(method, [partition], 8, 128)
        _, (useful, paid) = plan_round(method.rounds[0].program, partition, np.arange(100), 0, 8, room)
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
    label, partition = skewed(5000, 100, 0.05)
    image = np.random.default_rng(0).normal(size=(len(label), WIDTH)).astype(np.float32)
    method = small_method()
    server = method.init(KEY, ())
    program = method.rounds[0].program
    step = jax.jit(program.phases[0].step)
    start = jax.jit(program.start)
    info = ClientInfo.example(CLASSES)
    total = jax.jit(lambda mean, params, weight: jax.tree.map(lambda m, p: m + weight * p, mean, params))

    def dispatched():
        mean = jax.tree.map(jnp.zeros_like, server)
        context = ClientContext((), server, (), TASK, info)
        for client in range(100):
            rows = partition.indices[partition.offset[client] : partition.offset[client + 1]]
            local = start(context, (), KEY)
            for i in range(0, len(rows), BATCH):
                mine = np.resize(rows[i : i + BATCH], BATCH)
                mask = np.arange(BATCH) < len(rows) - i
                local, _ = step(context, local, _batch(image[mine], label[mine], mask), KEY)
            mean = total(mean, local[0], np.float32(len(rows) / len(label)))
        jax.block_until_ready(mean)

    data = (jnp.asarray(image), jnp.asarray(label, jnp.int32))
    by_hand = best(dispatched, 5)
    for lanes in (Lanes(1, "loop"), Lanes(8, "vmap")):
        seconds, rows, traces = timed_round(method, partition, data, lanes, repeats=5)
        emit(
            "packed",
            lanes=lanes.count,
            mode=lanes.mode,
            round_ms=round(1000 * seconds, 2),
            dispatched_ms=round(1000 * by_hand, 2),
            ratio=round(by_hand / seconds, 2),
            rows=rows,
            traces=traces,
        )


def _batch(image, label, mask):
    return Batch(image, label.astype(np.int32), mask, jnp.zeros(BATCH, jnp.int32))


def lanes() -> None:
    """Training examples per second of each lane mode."""
    label, partition = skewed(5000, 100, 0.5)
    data = (jax.random.normal(KEY, (len(label), WIDTH)), jnp.asarray(label, jnp.int32))
    emit_modes("two-layer network", small_method(), partition, data)

    backbone = load_backbone("vit_micro", None, None)
    settings = config.from_mapping("fppl", {"epochs": 1, "batch_size": 32, "clients": 16}, "bench")
    sizes = Sizes(CLASSES, 1, CLASSES, 16)
    method = make_method(config.resolve(settings), sizes, network_of(backbone))
    label, partition = skewed(1600, 16, 5.0)
    data = (jax.random.normal(KEY, (len(label), 32, 32, 3)), jnp.asarray(label, jnp.int32))
    emit_modes("fppl on vit_micro", method, partition, data, frozen_of(backbone), repeats=2)


def emit_modes(
    model: str, method: Method, partition: ClientPartition, data, frozen=(), repeats: int = 3
) -> None:
    """One line for each lane mode."""
    modes = (Lanes(1, "loop"), Lanes(4, "loop"), Lanes(4, "vmap"), Lanes(8, "vmap"), Lanes(4, "unroll"))
    for mode in modes:
        seconds, rows, traces = timed_round(method, partition, data, mode, frozen, repeats=repeats)
        rate = round(rows / seconds)
        emit("lanes", model=model, lanes=mode.count, mode=mode.mode, examples_per_s=rate, traces=traces)


def memory() -> None:
    """Peak resident memory of fresh processes that differ in the number of clients only."""
    small, large = (in_a_process("memory", clients, clients, "mean") for clients in (1_000, 10_000))
    growth = {key: round(large[key] - small[key], 1) for key in ("peak_mb", "data_mb")}
    emit("memory", growth_mb=growth["peak_mb"], growth_of_data_mb=growth["data_mb"])


def scale() -> None:
    """Rounds of many clients."""
    for channel in ("mean", "gather"):
        for clients, taking_part in ((1_000, 1_000), (10_000, 10_000), (100_000, 100_000), (1_000_000, 200)):
            in_a_process("scale", clients, taking_part, channel)


def in_a_process(bench: str, clients: int, taking_part: int, channel: str) -> dict[str, float]:
    """What `many_clients` finds in a process of its own, whose memory is nobody else's."""
    command = [sys.executable, __file__, "many-clients", *map(str, (clients, taking_part)), channel]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    emit(bench, **json.loads(out))
    return json.loads(out)


def many_clients(clients: int, taking_part: int, channel: str) -> None:
    """Rounds of `clients` clients with 8 rows each of which some take part, in this process. Where there are
    more than 100,000, several share the same rows, so that the data fit."""
    own = min(clients, 100_000) * 8
    label = np.tile(np.arange(CLASSES), own // CLASSES + 1)[:own]
    rows = np.tile(np.arange(own, dtype=np.int32), -(-clients * 8 // own))[: clients * 8]
    counts = np.zeros((clients, CLASSES), np.int32)
    np.add.at(counts, (np.repeat(np.arange(clients), 8), label[rows]), 1)
    partition = ClientPartition(rows, np.arange(clients + 1, dtype=np.int64) * 8, counts)
    image = np.random.default_rng(0).normal(size=(own, WIDTH)).astype(np.float32)
    data = (jnp.asarray(image), jnp.asarray(label, jnp.int32))
    ids = np.sort(np.random.default_rng(1).permutation(clients)[:taking_part])
    before = high_water_mb()
    seconds, _, traces = timed_round(
        small_method(channel=channel), partition, data, Lanes(8, "vmap"), ids=ids
    )
    present = image.nbytes + sum(array.nbytes for array in (label, *partition[:3]))
    found = {
        "clients": clients,
        "taking_part": taking_part,
        "channel": channel,
        "seconds": round(seconds, 3),
        "us_per_participant": round(1e6 * seconds / taking_part, 1),
        "peak_mb": round(high_water_mb(), 1),
        "before_mb": round(before, 1),
        "data_mb": round(present / 2**20, 1),
        "traces": traces,
    }
    print(json.dumps(found))


def high_water_mb() -> float:
    """The most memory that this process has had resident. `resource.getrusage` would also know that of the
    process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def emit(bench: str, **values: object) -> None:
    """One JSON line."""
    print(json.dumps({"bench": bench, "backend": jax.default_backend(), **values}), flush=True)


def main(arguments: list[str]) -> None:
    """Run the named benches, or all."""
    benches = {"slots": slots, "packed": packed, "lanes": lanes, "memory": memory, "scale": scale}
    if arguments[:1] == ["many-clients"]:
        return many_clients(int(arguments[1]), int(arguments[2]), arguments[3])
    unknown = [name for name in arguments if name not in benches]
    if unknown:
        sys.exit(f"bench: unknown name {unknown[0]!r}; choose from: {', '.join(benches)}")
    for name in arguments or benches:
        benches[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
