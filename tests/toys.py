"""Toy methods on a linear model with three weights, one for each channel of the protocol, and the engine's
work as plain loops.

The model predicts x . w, the loss is half the squared error, so a step of gradient descent is w - rate *
mean((x . w - y) x). `plain_round` knows nothing of lanes, chunks or tables: it calls a method's functions
client by client and batch by batch, and states in the shortest way how every draw is keyed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fcljax.federated.aggregation import conflate_sums
from fcljax.federated.engine import Engine, Lanes, init_clients, make_engine, play_chunks, run_round
from fcljax.federated.schedule import Roster, capacity, participants, plan_round
from fcljax.types import (
    Aggregate,
    Batch,
    Broadcast,
    ClientInfo,
    Method,
    Phase,
    Program,
    Task,
    Upload,
    View,
    Weighted,
)

CLASSES, TASKS, CLIENTS = 4, 2, 7
RATE = 0.1
TRAIN = View(epochs=2, batch_size=4)
LOOK = View(epochs=1, batch_size=3, shuffle=False, augment=False)


# ---- data --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The training store: x as images [N, 1, 1, 3], and classes, which are also the regression targets."""

    image: Any
    label: Any


def tasks() -> list[Task]:
    """Two tasks of two classes."""
    ids = np.arange(CLASSES, dtype=np.int32)
    return [Task(np.int32(t), ids[2 * t : 2 * t + 2], ids // 2 == t, ids // 2 <= t) for t in range(TASKS)]


def rows(seed: int = 0, count: int = 120) -> Rows:
    """Row 0 belongs to nobody."""
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(count, 1, 1, 3)).astype(np.float32)
    return Rows(jnp.asarray(image), jnp.asarray(np.arange(count) % CLASSES, jnp.int32))


def make_roster(owned: list[np.ndarray], label: np.ndarray, classes: int = CLASSES) -> Roster:
    """Client i holds the rows owned[i]."""
    offset = np.concatenate([[0], np.cumsum([len(mine) for mine in owned])]).astype(np.int64)
    held = np.stack([np.bincount(label[mine], minlength=classes) for mine in owned]).astype(np.int32)
    return Roster(np.concatenate(owned).astype(np.int32), offset, held)


def rosters(data: Rows, sizes=((9, 4, 0, 13, 1, 6, 8), (3, 0, 11, 5, 2, 12, 4))) -> list[Roster]:
    """Per task a roster with clients of these sizes (partial batches, one row, none), whose rows lie in the
    store in no order."""
    label, result = np.asarray(data.label), []
    for task, counts in zip(tasks(), sizes, strict=True):
        pool = np.random.default_rng(int(task.index)).permutation(np.flatnonzero(task.current[label])[1:])
        result.append(make_roster(np.split(pool[: sum(counts)], np.cumsum(counts)[:-1]), label))
    return result


def fetch(data: Rows, index, keys, augment: bool):
    """The training view adds noise that is keyed by row of the batch."""
    image = data.image[index]
    if augment:
        image = image + 0.1 * jax.vmap(lambda key: jax.random.uniform(key, (1, 1, 3)))(keys)
    return image, data.label[index], None


# ---- methods -----------------------------------------------------------------------------------------------


def descend(frozen, weight, batch: Batch):
    """One step of gradient descent on the masked batch, and the loss as a metric."""
    x, count = batch.image[:, 0, 0], jnp.sum(batch.mask)
    error = jnp.where(batch.mask, x @ weight - batch.label, 0.0)
    loss = Weighted(0.5 * jnp.sum(error**2), count.astype(jnp.float32))
    return weight - frozen["rate"] * (error @ x) / jnp.maximum(count, 1), {"loss": loss}


def train(frozen, broadcast, local, batch, task, key):
    """Gradient descent on a client's weights; every other part of `local` stays."""
    weight, metrics = descend(frozen, local["weight"], batch)
    return {**local, "weight": weight}, metrics


def begin(broadcast, state, task, info, key):
    return {"weight": broadcast.wire}


def toy(start=begin, phases=None, finish=None, **others) -> Method:
    """A method whose server state is the weights themselves and whose server takes the mean, unless `others`
    says otherwise."""
    standard = {
        "init": lambda key, frozen: jax.random.normal(key, (3,)),
        "broadcast": lambda server, task: Broadcast(server),
        "server": lambda frozen, server, aggregate, task, key: (aggregate.mean, {}),
        "predict": lambda frozen, server, image, query, task: image[:, 0, 0] @ server,
    }
    return Method(
        client=Program(start, phases or (Phase(TRAIN, train),), finish or send_mean), **{**standard, **others}
    )


def send_mean(broadcast, local, state, task, info):
    return Upload(mean=local["weight"], weight=info.rows), state


def sharing(view: View) -> Method:
    """FedAvg where the server says which share of its rows a client counts with, and nothing is random but
    the order of rows."""

    def start(broadcast, state, task, info, key):
        return {"weight": broadcast.wire["weight"]}

    def finish(broadcast, local, state, task, info):
        share = broadcast.wire["share"][info.id]
        return Upload(mean=local["weight"], gather=local["weight"], weight=share * info.rows), state + 1

    return toy(
        start, (Phase(view, train),), finish, init_client=lambda key, server: jnp.zeros((), jnp.int32),
        server=lambda frozen, server, aggregate, task, key: ({**server, "weight": aggregate.mean}, {}),
    )  # fmt: skip


def conflating() -> Method:
    """A Gaussian per weight: clients send precisions and precision-weighted means, and the server multiplies
    the Gaussians (VFCL)."""

    def start(broadcast, state, task, info, key):
        mean, sigma = broadcast.wire
        return {"weight": mean, "precision": sigma**-2}

    def step(frozen, broadcast, local, batch, task, key):
        seen = jnp.sum(jnp.where(batch.mask[:, None], batch.image[:, 0, 0] ** 2, 0), axis=0)
        return train(frozen, broadcast, {**local, "precision": local["precision"] + seen}, batch, task, key)

    def finish(broadcast, local, state, task, info):
        return Upload(sum=(local["precision"], local["precision"] * local["weight"])), state

    return toy(
        start, (Phase(TRAIN, step),), finish,
        init=lambda key, frozen: (jax.random.normal(key, (3,)), jnp.full(3, 2.0, jnp.float32)),
        server=lambda frozen, server, aggregate, task, key: (conflate_sums(*aggregate.sum), {}),
        predict=lambda frozen, server, image, query, task: image[:, 0, 0] @ server[0],
    )  # fmt: skip


class Memory(NamedTuple):
    """A server that keeps what every client last sent: class means [K, C, 3] and which of them exist (FPPL,
    PILoRA)."""

    weight: Any
    centre: Any
    held: Any


def gathering() -> Method:
    """Clients send weights to be averaged, and class means with a mask, which the server keeps per client and
    trains on with its own optimiser and key (FPPL's debias, HePCo, pMAE)."""

    def start(broadcast, state, task, info, key):
        return {"weight": broadcast.wire, "sums": jnp.zeros((CLASSES, 3))}

    def step(frozen, broadcast, local, batch, task, key):
        member = ((batch.label[:, None] == jnp.arange(CLASSES)) & batch.mask[:, None]).astype(jnp.float32)
        return train(
            frozen,
            broadcast,
            {**local, "sums": local["sums"] + member.T @ batch.image[:, 0, 0]},
            batch,
            task,
            key,
        )

    def finish(broadcast, local, state, task, info):
        means = local["sums"] / jnp.maximum(TRAIN.epochs * info.class_rows, 1)[:, None]
        return Upload(mean=local["weight"], gather=(means, info.class_rows > 0), weight=info.rows), state

    def server(frozen, server, aggregate, task, key):
        row = jnp.where(aggregate.valid, aggregate.id, CLIENTS)
        centre, held = jax.tree.map(
            lambda old, new: old.at[row].set(new, mode="drop"), server[1:], aggregate.gather
        )
        weight, loss = fit_centres(aggregate.mean, centre, held, 5 + task.index, key)
        return Memory(weight, centre, held), {"server_loss": loss}

    return toy(
        start, (Phase(TRAIN, step),), finish, server=server,
        init=lambda key, frozen: Memory(
            jax.random.normal(key, (3,)), jnp.zeros((CLIENTS, CLASSES, 3)), jnp.zeros((CLIENTS, CLASSES), bool)
        ),
        broadcast=lambda server, task: Broadcast(server.weight, server.centre),
        predict=lambda frozen, server, image, query, task: image[:, 0, 0] @ server.weight,
    )  # fmt: skip


def fit_centres(weight, centre, held, steps, key):
    """Adam on the centres that are held, each kept with probability 0.8 per step."""
    adam = optax.adam(0.05)

    def step(i, carry):
        weight, optimiser, total = carry
        keep = held & (jax.random.uniform(jax.random.fold_in(key, i), held.shape) < 0.8)
        loss_of = lambda weight: jnp.sum(jnp.where(keep, (centre @ weight - jnp.arange(CLASSES)) ** 2, 0.0))
        loss, gradient = jax.value_and_grad(loss_of)(weight)
        update, optimiser = adam.update(gradient, optimiser)
        return optax.apply_updates(weight, update), optimiser, total + loss

    weight, _, total = jax.lax.fori_loop(0, steps, step, (weight, adam.init(weight), jnp.zeros(())))
    return weight, Weighted(total, steps.astype(jnp.float32))


def remembering() -> Method:
    """Per-client state that enters training, random starts, the round and the client's id: everything a
    client can know (EWC, LwF)."""

    def start(broadcast, state, task, info, key):
        noise = 0.1 * jax.random.normal(key, (3,))
        known = jnp.stack([info.id, info.round, info.rows]).astype(jnp.float32)
        return {
            "weight": broadcast.wire + noise + 0.01 * known,
            "pull": state["last"],
            "times": state["times"],
        }

    def step(frozen, broadcast, local, batch, task, key):
        local, metrics = train(frozen, broadcast, local, batch, task, key)
        jitter = 0.01 * jax.random.normal(key, (3,))
        strength = 0.1 * (1 + task.index) * (local["times"] > 0)
        return {
            **local,
            "weight": local["weight"] + jitter + strength * (local["pull"] - local["weight"]),
        }, metrics

    def finish(broadcast, local, state, task, info):
        state = {"last": local["weight"], "times": state["times"] + 1}
        return Upload(mean=local["weight"], gather=local["weight"], weight=info.rows), state

    return toy(
        start, (Phase(TRAIN, step),), finish,
        init_client=lambda key, server: {"last": jax.random.normal(key, (3,)) + server, "times": jnp.zeros((), jnp.int32)},
    )  # fmt: skip


def two_pass() -> Method:
    """Train, then look at the rows again, clean and in their own order, with the trained weights (FPPL,
    HePCo, pMAE)."""

    def start(broadcast, state, task, info, key):
        return {"weight": broadcast.wire, "trail": jnp.zeros(())}

    def look(frozen, broadcast, local, batch, task, key):
        value = jnp.sum(jnp.where(batch.mask, batch.image[:, 0, 0] @ local["weight"], 0.0))
        looked = Weighted(jnp.sum(batch.mask).astype(jnp.float32), jnp.ones(()))
        return {**local, "trail": 0.5 * local["trail"] + value}, {"rows_per_look": looked}

    def finish(broadcast, local, state, task, info):
        return Upload(mean=local["weight"], gather=local["trail"], weight=info.rows), state

    def server(frozen, server, aggregate, task, key):
        return aggregate.mean + 0.01 * jnp.sum(jnp.where(aggregate.valid, aggregate.gather, 0.0)), {}

    return toy(start, (Phase(TRAIN, train), Phase(LOOK, look)), finish, server=server)


def personal() -> Method:
    """Clients keep a model of their own, which every client, taking part or not, pulls towards the new global
    one after aggregation."""

    def start(broadcast, state, task, info, key):
        return {"weight": broadcast.wire + 0.1 * state}

    def pull(broadcast, state, task, info, key):
        return {"weight": 0.5 * (broadcast.wire + state)}

    def keep(broadcast, local, state, task, info):
        return Upload(), local["weight"]

    return toy(
        start, refresh=Program(pull, (Phase(View(epochs=1, batch_size=5), train),), keep), init_client=lambda key, server: server,
        predict_client=lambda frozen, server, state, image, query, task: image[:, 0, 0] @ (state + server),
    )  # fmt: skip


TOYS: dict[str, Callable[[], Method]] = {
    toy.__name__: toy for toy in (conflating, gathering, remembering, two_pass, personal)
}
PARTICIPATION = {"remembering": 0.6, "personal": 0.6}  # of the other toys' clients all take part


# ---- the same work as plain loops --------------------------------------------------------------------------


class Played(NamedTuple):
    """What both runners report of a round."""

    metrics: dict[str, float]
    participants: int
    rejected: int


def fold(key, *numbers):
    """The key of a path of numbers."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def epoch_order(round_key, phase: int, epoch: int, mine: np.ndarray) -> np.ndarray:
    """A client's rows in the order of an epoch: sorted by a draw of random bits that belongs to the row."""
    key = fold(round_key, 2, phase, epoch)
    draw = [int(jax.random.bits(fold(key, row))) for row in mine.tolist()]
    return mine[np.argsort(draw, kind="stable")]


def plain_batch(fetch, view: View, data, chosen: np.ndarray, key) -> Batch:
    """The rows `chosen`, padded with zeros to the batch size."""
    pad = view.batch_size - len(chosen)
    index = np.pad(chosen, (0, pad)).astype(np.int32)
    mask = np.arange(view.batch_size) < len(chosen)
    image, label, query = fetch(data, index, jax.random.split(key, view.batch_size), view.augment)
    clear = lambda x: np.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, np.zeros_like(x))
    return Batch(
        clear(image),
        clear(label),
        mask,
        np.where(mask, index, np.int32(-1)),
        None if query is None else clear(query),
    )


def plain_client(program: Program, fetch, frozen, broadcast, state, data, mine, info: ClientInfo, task, key):
    """One client's program, start to finish: (upload, new state, the metrics of every step)."""
    own, metrics = fold(key, 3, info.id), []
    local = jax.jit(program.start)(broadcast, state, task, info, fold(own, 0))
    for index, phase in enumerate(program.phases):
        step = 0
        for epoch in range(phase.view.epochs):
            order = epoch_order(key, index, epoch, mine) if phase.view.shuffle else mine
            for first in range(0, len(mine), phase.view.batch_size):
                step_key = fold(own, 1 + index, step)
                batch = plain_batch(
                    fetch, phase.view, data, order[first : first + phase.view.batch_size], fold(step_key, 0)
                )
                local, got = jax.jit(phase.step)(frozen, broadcast, local, batch, task, fold(step_key, 1))
                metrics, step = [*metrics, got], step + 1
    return *jax.jit(program.finish)(broadcast, local, state, task, info), metrics


def plain_sweep(
    program: Program, fetch, frozen, broadcast, states: list, data, roster: Roster, ids, task, round_, key
):
    """The program of every client of `ids` that has rows: uploads by id (None if the engine must refuse it),
    new states, all metrics."""
    uploads, states, metrics = {}, list(states), []
    for i in ids:
        if roster.count[i] == 0:
            continue
        info = ClientInfo(np.int32(i), np.int32(roster.count[i]), roster.class_rows[i], np.int32(round_))
        mine = roster.rows[roster.offset[i] : roster.offset[i + 1]]
        upload, new, got = plain_client(
            program, fetch, frozen, broadcast, states[i], data, mine, info, task, key
        )
        good = upload.weight >= 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(upload))
        uploads[int(i)] = upload if good else None
        states[i] = new if good else states[i]
        metrics = metrics + got
    return uploads, states, metrics


def plain_aggregate(uploads: dict[int, Any], places: int, mean: Callable) -> Aggregate:
    """Uploads by client id as the server sees them: finite ones only, at the rank of their client among all
    that took part."""
    kept = [(place, i, upload) for place, (i, upload) in enumerate(uploads.items()) if upload is not None]
    weight, id_, valid = (
        np.zeros(places, np.float32),
        np.full(places, CLIENTS, np.int32),
        np.zeros(places, bool),
    )
    for place, i, upload in kept:
        weight[place], id_[place], valid[place] = upload.weight, i, True
    sent = [jax.tree.map(np.asarray, upload) for _, _, upload in kept]
    at = [place for place, _, _ in kept]

    def gather(*leaves):
        buffer = np.zeros((places, *leaves[0].shape), leaves[0].dtype)
        buffer[at] = leaves
        return buffer

    return Aggregate(
        jax.tree.map(lambda *leaves: mean(np.stack(leaves), weight[at]), *(one.mean for one in sent)),
        jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *(one.sum for one in sent)),
        jax.tree.map(gather, *(one.gather for one in sent)), weight, id_, valid,
    )  # fmt: skip


def weighted(stacked: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.average(stacked, axis=0, weights=weight).astype(np.float32)


def plain_round(
    method: Method,
    fetch,
    frozen,
    server,
    states: list,
    data,
    roster: Roster,
    ids,
    task,
    round_: int,
    key,
    places: int,
    mean=weighted,
):
    """One round: (server, states, Played). `places` is the number of participants that the gathered uploads
    have room for."""
    key = fold(key, task.index, round_)
    broadcast = jax.jit(method.broadcast)(server, task)
    uploads, states, steps = plain_sweep(
        method.client, fetch, frozen, broadcast, states, data, roster, ids, task, round_, key
    )
    rejected = sum(upload is None for upload in uploads.values())
    if rejected < len(uploads):
        aggregate = plain_aggregate(uploads, places, mean)
        server, last = jax.jit(method.server)(frozen, server, aggregate, task, fold(key, 0))
        steps = [*steps, last]
    if method.refresh is not None:
        broadcast, everyone = jax.jit(method.broadcast)(server, task), np.arange(len(roster.count))
        refresh = (
            method.refresh,
            fetch,
            frozen,
            broadcast,
            states,
            data,
            roster,
            everyone,
            task,
            round_,
            fold(key, 1),
        )
        _, states, _ = plain_sweep(*refresh)
    return server, states, Played(means(steps), len(uploads), rejected)


def means(steps: list[dict[str, Weighted]]) -> dict[str, float]:
    """Total over weight of every metric that some step gave."""
    named = {name for step in steps for name in step}
    pairs = {name: [step[name] for step in steps if name in step] for name in named}
    return {
        name: float(sum(p.total for p in pair)) / float(sum(p.weight for p in pair))
        for name, pair in pairs.items()
    }


# ---- runs --------------------------------------------------------------------------------------------------

KEY = jax.random.key(5)
FROZEN = {"rate": jnp.float32(RATE)}


def build(
    method: Method, deals: list[Roster], lanes: Lanes, slots=128, participation=1.0, fetch=fetch, **options
) -> Engine:
    """An engine with room for these rosters."""
    shapes = capacity(method.client, deals, lanes.count, slots, participation)
    again = capacity(method.refresh, deals, lanes.count, slots) if method.refresh else None
    return make_engine(method, fetch, lanes, shapes, refresh_capacity=again, **options)


WAYS: dict[str, tuple[Lanes, int]] = {  # lanes, and clients per chunk
    "loop1": (Lanes(1, "loop"), 128),
    "loop3": (Lanes(3, "loop"), 4),
    "vmap3": (Lanes(3, "vmap"), 128),
    "unroll2": (Lanes(2, "unroll"), 2),
}


@functools.cache
def engine_of(name: str, way: str) -> Engine:
    """One engine per toy and way for all tests: compiling is what takes time."""
    return build(TOYS[name](), rosters(rows()), *WAYS[way], PARTICIPATION.get(name, 1.0))


def begin_run(method: Method):
    """(server, list of client states) before the first round."""
    server = jax.jit(method.init)(fold(KEY, 0), FROZEN)
    return server, [jax.jit(method.init_client)(fold(KEY, 1, i), server) for i in range(CLIENTS)]


def stack(states: list) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def drive(play: Callable, server, states, deals: list[Roster], rounds: int = 2, participation: float = 1.0):
    """`rounds` rounds of every roster's task: play(server, states, roster, ids, task, round) -> (server,
    states, report)."""
    reports = []
    for task, roster in zip(tasks(), deals, strict=False):
        for round_ in range(rounds):
            ids = participants(0, int(task.index), round_, np.flatnonzero(roster.count), participation)
            server, states, report = play(server, states, roster, ids, task, round_)
            reports.append(report)
    return server, states, reports


def drive_engine(engine: Engine, data, deals, participation: float = 1.0, rounds: int = 2):
    """The engine over two tasks: (server, stacked states, reports)."""
    server, _ = begin_run(engine.method)
    states = init_clients(engine.method, server, CLIENTS, fold(KEY, 1))
    play = lambda server, states, *rest: run_round(engine, FROZEN, server, states, data, *rest, fold(KEY, 2))
    return drive(play, server, states, deals, rounds, participation)


def drive_plain(
    method: Method,
    data,
    deals,
    places: int,
    participation: float = 1.0,
    rounds: int = 2,
    mean=weighted,
    fetch=fetch,
):
    """The plain loops over two tasks: (server, stacked states, reports)."""
    fetch = jax.jit(fetch, static_argnums=3)
    play = lambda server, states, *rest: plain_round(
        method, fetch, FROZEN, server, states, data, *rest, fold(KEY, 2), places, mean
    )
    server, states, reports = drive(play, *begin_run(method), deals, rounds, participation)
    return server, stack(states), reports


def receive(engine: Engine, frozen, server, states, data, roster, ids, task, round_: int = 0, key=KEY):
    """What the engine receives in one round, before the server's part: (accumulator, new states). Gathered
    uploads are in order of id, `mean` is the sum of weight times upload."""
    key, ids = fold(key, task.index, round_), np.asarray(ids)
    chunks, _ = plan_round(engine.method.client, roster, ids, round_, engine.lanes.count, engine.capacity)
    states = jax.tree.map(jnp.copy, states)  # the engine donates them
    frozen, server, states, data, task, key = engine.place((frozen, server, states, data, task, key))
    broadcast = engine.broadcast(server, task)
    args = (frozen, broadcast, states, data, task, key)
    return play_chunks(engine.clients, engine.method.client, engine.lanes, chunks, *args)


def close(left, right, atol: float = 1e-5) -> None:
    """Assert that two pytrees hold the same numbers up to rounding."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=1e-5),
        left,
        right,
    )


def same(left, right) -> None:
    """Assert that two pytrees are equal bit for bit."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), left, right)
