"""Toy methods on a linear model with three weights, one for each channel of the protocol, and the engine's
work as the reference round plays it.

The model predicts x . w, the loss is half the squared error, so a step of gradient descent is w - rate *
mean((x . w - y) x).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fcljax.federated import reference
from fcljax.federated.check import Example
from fcljax.federated.engine import (
    Engine,
    Exchange,
    Lanes,
    RoundInputs,
    init_clients,
    make_engine,
    run_chunks,
    run_round,
)
from fcljax.federated.keys import fold
from fcljax.federated.schedule import ClientPartition, capacities, participants, plan_round
from fcljax.mesh import device_count, put_shared
from fcljax.methods.vfcl.conflation import conflate_sums
from fcljax.types import (
    Aggregate,
    Batch,
    Broadcast,
    ClientContext,
    Method,
    Phase,
    Program,
    Round,
    RoundContext,
    Task,
    Upload,
    View,
    Weighted,
)

CLASSES, TASKS, CLIENTS = 4, 2, 7
RATE = 0.1
TRAIN = View(epochs=2, batch_size=4)
LOOK = View(epochs=1, batch_size=3, shuffle=False, augment=False)
REPLAYED, MEMORY = 3, 5  # rows that join a batch, and rows that a client remembers


# ---- data --------------------------------------------------------------------------------------------------


class Examples(NamedTuple):
    """The training store: x as images [N, 1, 1, 3], and classes, which are also the regression targets."""

    input: Any
    label: Any


def tasks() -> list[Task]:
    """Two tasks of two classes."""
    ids = np.arange(CLASSES, dtype=np.int32)
    slices = [ids[2 * t : 2 * t + 2] for t in range(TASKS)]
    return [Task.of_numpy(np.int32(t), slices[t], ids // 2 == t, ids // 2 <= t) for t in range(TASKS)]


def examples(seed: int = 0, count: int = 120) -> Examples:
    """Row 0 belongs to nobody."""
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(count, 1, 1, 3)).astype(np.float32)
    return Examples(jnp.asarray(image), jnp.asarray(np.arange(count) % CLASSES, jnp.int32))


def make_partition(owned: list[np.ndarray], label: np.ndarray, classes: int = CLASSES) -> ClientPartition:
    """Client i holds the rows owned[i]."""
    offset = np.concatenate([[0], np.cumsum([len(mine) for mine in owned])]).astype(np.int64)
    held = np.stack([np.bincount(label[mine], minlength=classes) for mine in owned]).astype(np.int32)
    return ClientPartition(np.concatenate(owned).astype(np.int32), offset, held)


def partitions(
    data: Examples, sizes=((9, 4, 0, 13, 1, 6, 8), (3, 0, 11, 5, 2, 12, 4))
) -> list[ClientPartition]:
    """Per task a partition with clients of these sizes (partial batches, one example, none), whose examples
    lie in the store in no order."""
    label, result = np.asarray(data.label), []
    for task, counts in zip(tasks(), sizes, strict=True):
        pool = np.random.default_rng(int(task.index)).permutation(np.flatnonzero(task.current[label])[1:])
        result.append(make_partition(np.split(pool[: sum(counts)], np.cumsum(counts)[:-1]), label))
    return result


def streams(data: Examples) -> list[ClientPartition]:
    """The rosters of two tasks in which clients of odd id are a task ahead of, or behind, the others, each
    with rows of its own task's classes."""
    odd, (first, second) = np.arange(CLIENTS) % 2, partitions(data)
    result = []
    for t in range(TASKS):
        mine = (t + odd) % TASKS
        of_client = [(first, second)[task] for task in mine]
        owned = [each.of_client(i) for i, each in enumerate(of_client)]
        leaves = zip(*tasks(), strict=True)
        own = Task.of_numpy(*(np.stack([leaf[task] for task in mine]) for leaf in leaves))
        result.append(make_partition(owned, np.asarray(data.label))._replace(task=own))
    return result


def fetch(data: Examples, index, keys, augment: bool):
    """The training view adds noise that is keyed by row of the batch."""
    image = data.input[index]
    if augment:
        image = image + 0.1 * jax.vmap(lambda key: jax.random.uniform(key, (1, 1, 3)))(keys)
    return image, data.label[index], None


# ---- methods -----------------------------------------------------------------------------------------------


def descend(frozen, weight, batch: Batch):
    """One step of gradient descent on the masked batch, and the loss as a metric."""
    x, count = batch.input[:, 0, 0], jnp.sum(batch.mask)
    error = jnp.where(batch.mask, x @ weight - batch.label, 0.0)
    loss = Weighted(0.5 * jnp.sum(error**2), count.astype(jnp.float32))
    return weight - frozen["rate"] * (error @ x) / jnp.maximum(count, 1), {"loss": loss}


def train(context: ClientContext, local, batch, key):
    """Gradient descent on a client's weights; every other part of `local` stays."""
    weight, metrics = descend(context.frozen, local["weight"], batch)
    return {**local, "weight": weight}, metrics


def begin(context: ClientContext, state, key):
    return {"weight": context.payload}


def logits(weight, batch: Batch):
    """Minus half the squared error to every class."""
    return -0.5 * (batch.input[:, 0, 0] @ weight - jnp.arange(CLASSES)[:, None]).T ** 2


def take_mean(round_context: RoundContext, server, aggregate: Aggregate, key):
    return aggregate.mean, {}


def send_mean(context: ClientContext, local, state):
    return Upload(mean=local["weight"], weight=context.client.examples), state


def send_both(context: ClientContext, local, state):
    """The weights by the mean, and one by one."""
    return Upload(mean=local["weight"], gather=local["weight"], weight=context.client.examples), state


def toy(start=begin, phases=None, finish=send_mean, server=take_mean, rounds=(), program=None, **others):
    """A method whose server state is the weights themselves and whose server takes the mean, unless the
    arguments say otherwise. `program`: more of what clients do; `rounds`: what is played besides."""
    client = Program(start, phases or (Phase(TRAIN, train),), finish, **program or {})
    standard: dict[str, Any] = {
        "init": lambda key, frozen: jax.random.normal(key, (3,)),
        "broadcast": lambda round_context, server: Broadcast(server),
        "predict": lambda round_context, server, batch: logits(server, batch),
    }
    return Method(rounds=(Round(client, server), *rounds), **{**standard, **others})


def sharing(view: View) -> Method:
    """FedAvg where the server says which share of its rows a client counts with, and nothing is random but
    the order of rows."""

    def start(context, state, key):
        return {"weight": context.payload["weight"]}

    def finish(context, local, state):
        share = context.payload["share"][context.client.id]
        return Upload(
            mean=local["weight"], gather=local["weight"], weight=share * context.client.examples
        ), state + 1

    return toy(
        start,
        (Phase(view, train),),
        finish,
        server=lambda round_context, server, aggregate, key: ({**server, "weight": aggregate.mean}, {}),
        init=lambda key, frozen: {"weight": jax.random.normal(key, (3,)), "share": jnp.ones(CLIENTS)},
        predict=lambda round_context, server, batch: logits(server["weight"], batch),
        init_client=lambda key, server: jnp.zeros((), jnp.int32),
    )


def conflating() -> Method:
    """A Gaussian per weight: clients send precisions and precision-weighted means, and the server multiplies
    the Gaussians (VFCL)."""

    def start(context, state, key):
        mean, sigma = context.payload
        return {"weight": mean, "precision": sigma**-2}

    def step(context, local, batch, key):
        seen = jnp.sum(jnp.where(batch.mask[:, None], batch.input[:, 0, 0] ** 2, 0), axis=0)
        return train(context, {**local, "precision": local["precision"] + seen}, batch, key)

    def finish(context, local, state):
        return Upload(sum=(local["precision"], local["precision"] * local["weight"])), state

    return toy(
        start,
        (Phase(TRAIN, step),),
        finish,
        init=lambda key, frozen: (jax.random.normal(key, (3,)), jnp.full(3, 2.0, jnp.float32)),
        server=lambda round_context, server, aggregate, key: (conflate_sums(*aggregate.sum), {}),
        predict=lambda round_context, server, batch: logits(server[0], batch),
    )


class Memory(NamedTuple):
    """A server that keeps what every client last sent: class means [K, C, 3] and which of them exist (FPPL,
    PILoRA)."""

    weight: Any
    centre: Any
    held: Any


def gathering() -> Method:
    """Clients send weights to be averaged, and class means with a mask, which the server keeps per client and
    trains on with its own optimiser and key (FPPL's debias, HePCo, pMAE)."""

    def start(context, state, key):
        return {"weight": context.payload, "sums": jnp.zeros((CLASSES, 3))}

    def step(context, local, batch, key):
        member = ((batch.label[:, None] == jnp.arange(CLASSES)) & batch.mask[:, None]).astype(jnp.float32)
        return train(context, {**local, "sums": local["sums"] + member.T @ batch.input[:, 0, 0]}, batch, key)

    def finish(context, local, state):
        rows = context.client.class_examples
        means = local["sums"] / jnp.maximum(TRAIN.epochs * rows, 1)[:, None]
        return Upload(mean=local["weight"], gather=(means, rows > 0), weight=context.client.examples), state

    def server(round_context, server, aggregate, key):
        row = jnp.where(aggregate.valid, aggregate.id, CLIENTS)
        centre, held = jax.tree.map(
            lambda old, new: old.at[row].set(new, mode="drop"), server[1:], aggregate.gather
        )
        weight, loss = fit_centres(aggregate.mean, centre, held, 5 + round_context.task.index, key)
        return Memory(weight, centre, held), {"server_loss": loss}

    def init(key, frozen):
        nothing = jnp.zeros((CLIENTS, CLASSES, 3)), jnp.zeros((CLIENTS, CLASSES), bool)
        return Memory(jax.random.normal(key, (3,)), *nothing)

    return toy(
        start,
        (Phase(TRAIN, step),),
        finish,
        server=server,
        init=init,
        broadcast=lambda round_context, server: Broadcast(server.weight, server.centre),
        predict=lambda round_context, server, batch: logits(server.weight, batch),
    )


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


def remembering(finish=None, **others) -> Method:
    """Per-client state that enters training, random starts, the round and the client's id: everything a
    client can know (EWC, LwF)."""

    def start(context, state, key):
        noise = 0.1 * jax.random.normal(key, (3,))
        known = jnp.stack([context.client.id, context.client.round, context.client.examples]).astype(
            jnp.float32
        )
        return {
            "weight": context.payload + noise + 0.01 * known,
            "pull": state["last"],
            "times": state["times"],
        }

    def step(context, local, batch, key):
        local, metrics = train(context, local, batch, key)
        jitter = 0.01 * jax.random.normal(key, (3,))
        strength = 0.1 * (1 + context.task.index) * (local["times"] > 0)
        weight = local["weight"] + jitter + strength * (local["pull"] - local["weight"])
        return {**local, "weight": weight}, metrics

    def keep(context, local, state):
        return send_both(context, local, {"last": local["weight"], "times": state["times"] + 1})

    def init_client(key, server):
        return {"last": jax.random.normal(key, (3,)) + server, "times": jnp.zeros((), jnp.int32)}

    return toy(start, (Phase(TRAIN, step),), keep, init_client=init_client, **others)


def two_pass() -> Method:
    """Train, then look at the rows again, clean and in their own order, with the trained weights (FPPL,
    HePCo, pMAE). How far the server goes from what it had sent depends on the round, and whether it is the
    task's last."""

    def start(context, state, key):
        return {"weight": context.payload, "trail": jnp.zeros(())}

    def look(context, local, batch, key):
        value = jnp.sum(jnp.where(batch.mask, batch.input[:, 0, 0] @ local["weight"], 0.0))
        looked = Weighted(jnp.sum(batch.mask).astype(jnp.float32), jnp.ones(()))
        return {**local, "trail": 0.5 * local["trail"] + value}, {"rows_per_look": looked}

    def finish(context, local, state):
        return Upload(mean=local["weight"], gather=local["trail"], weight=context.client.examples), state

    def server(round_context, server, aggregate, key):
        rate, start = 1 - 0.1 * round_context.round + 0.2 * round_context.last, round_context.previous.payload
        trails = jnp.sum(jnp.where(aggregate.valid, aggregate.gather, 0.0))
        return start + rate * (aggregate.mean - start) + 0.01 * trails, {}

    return toy(start, (Phase(TRAIN, train), Phase(LOOK, look)), finish, server=server)


def three_pass() -> Method:
    """Train with momentum, then measure the rows by the trained weights, then measure that measure: parts of
    the work that one pass alone changes, that nobody changes, and that nobody reads again."""

    def start(context, state, key):
        zero, noise = jnp.zeros(()), 0.1 * jax.random.normal(key, (3,))
        return {
            "weight": context.payload,
            "velocity": jnp.zeros(3),
            "noise": noise,
            "trail": zero,
            "length": zero,
        }

    def push(context, local, batch, key):
        new, metrics = descend(context.frozen, local["weight"], batch)
        velocity = 0.5 * local["velocity"] + new - local["weight"]
        return {**local, "weight": local["weight"] + velocity, "velocity": velocity}, metrics

    def look(context, local, batch, key):
        value = batch.input[:, 0, 0] @ (local["weight"] + local["noise"])
        return {**local, "trail": 0.5 * local["trail"] + jnp.sum(jnp.where(batch.mask, value, 0.0))}, {}

    def look_again(context, local, batch, key):
        return {**local, "length": 0.5 * local["length"] + local["trail"] * jnp.sum(batch.mask)}, {}

    def finish(context, local, state):
        return Upload(mean=local["weight"], gather=local["length"], weight=context.client.examples), state

    return toy(start, (Phase(TRAIN, push), Phase(LOOK, look), Phase(LOOK, look_again)), finish)


def personal() -> Method:
    """Clients keep a model of their own, which every client, taking part or not, pulls towards the new global
    one after aggregation."""

    def start(context, state, key):
        return {"weight": context.payload + 0.1 * state}

    def pull(context, state, key):
        return {"weight": 0.5 * (context.payload + state)}

    def keep(context, local, state):
        return Upload(), local["weight"]

    refresh = Program(pull, (Phase(View(epochs=1, batch_size=5), train),), keep)
    return toy(
        start,
        rounds=(Round(refresh, None, who="everyone", when="after_round"),),
        init_client=lambda key, server: server,
        predict_client=lambda round_context, server, state, batch: logits(state + server, batch),
    )


def clipping(bound: float = 0.05) -> Method:
    """The server bounds the length of every client's change as it arrives, and halves the weight of those
    that it had to clip (differential privacy)."""

    def receive(context, upload):
        change = upload.mean - context.payload
        length = jnp.linalg.norm(change)
        weight = jnp.where(length > bound, 0.5, 1.0) * upload.weight
        clipped = context.payload + change * jnp.minimum(1.0, bound / length)
        return upload._replace(mean=clipped, gather=clipped, weight=weight)

    return toy(finish=send_both, program={"receive": receive})


def own_task(view: View = TRAIN) -> Method:
    """Clients train on the classes of their own task only, faster in later ones, and say which task that
    is."""

    def step(context, local, batch, key):
        mine = batch.mask & context.task.current[batch.label]
        weight, metrics = descend(context.frozen, local["weight"], batch._replace(mask=mine))
        return {"weight": weight + 0.1 * context.task.index}, metrics

    def finish(context, local, state):
        upload, state = send_mean(context, local, state)
        return upload._replace(gather=(context.task.index, context.task.current, context.task.seen)), state

    return toy(phases=(Phase(view, step),), finish=finish)


def replaying() -> Method:
    """Clients remember the ids of the MEMORY highest rows that they have held, and some of these join every
    batch, or none: a place is drawn from one too many (iCaRL). They send what joined their last batch."""

    def start(context, state, key):
        return {
            "weight": context.payload,
            "rows": state,
            "joined": jax.tree.map(jnp.zeros_like, joined_examples()),
        }

    def choose(context, local, key):
        return jax.random.randint(key, (REPLAYED,), -1, MEMORY)

    def step(context, local, batch, key):
        joined = tuple(leaf[-REPLAYED:] for leaf in batch[:4])
        return train(context, {**local, "joined": joined}, batch, key)

    def remember(context, local, batch, key):
        known = jnp.any(batch.index[:, None] == local["rows"], axis=1)
        rows = jnp.concatenate([local["rows"], jnp.where(known, -1, batch.index)])
        return {**local, "rows": jnp.sort(rows)[-MEMORY:]}, {}

    def finish(context, local, state):
        return Upload(mean=local["weight"], gather=local["joined"], weight=context.client.examples), local[
            "rows"
        ]

    return toy(
        start,
        (Phase(TRAIN._replace(replay=REPLAYED), step, choose), Phase(LOOK, remember)),
        finish,
        program={"replay_buffer": lambda state: state},
        init_client=lambda key, server: jnp.full(MEMORY, -1),
    )


def joined_examples():
    """Image, label, mask and row of what joins a batch, all of it padding."""
    n = REPLAYED
    return jnp.zeros((n, 1, 1, 3)), jnp.zeros(n, jnp.int32), jnp.zeros(n, bool), jnp.full(n, -1)


TOYS: dict[str, Callable[[], Method]] = {
    toy.__name__: toy
    for toy in (conflating, gathering, remembering, two_pass, three_pass, personal, clipping, replaying)
}
PARTICIPATION = {"remembering": 0.6, "personal": 0.6}  # of the other toys' clients all take part


# ---- the same work as plain loops --------------------------------------------------------------------------


class Played(NamedTuple):
    """What both runners report of a round."""

    metrics: dict[str, float]
    participants: int
    rejected: int
    uploads: tuple[int, ...]


def plain_round(method: Method, fetch, server, states: list, inputs: RoundInputs):
    """The reference round: (server, states, Played)."""
    server, states, results = reference.play_round(method, fetch, server, states, inputs)
    metrics = {}
    for i, result in results.items():
        stage = method.rounds[i].when
        named = means(result.metrics)
        metrics |= {f"{stage}_{i}_{name}" if name in metrics else name: x for name, x in named.items()}
    sent = [results[i].uploads if i in results else {} for i in range(len(method.rounds))]
    played = next(i for i, each in enumerate(method.rounds) if each.when == inputs.when)
    rejected = sum(upload is None for uploads in sent for upload in uploads.values())
    return server, states, Played(metrics, len(sent[played]), rejected, tuple(map(len, sent)))


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
EXAMPLE = Example(FROZEN, examples(), tasks()[0])


def build(
    method: Method,
    partitions: list[ClientPartition],
    lanes: Lanes,
    slots=128,
    participation=1.0,
    fetch=fetch,
    short=False,
    **options,
) -> Engine:
    """An engine with room for these rosters. short: no batch is padded."""
    devices = device_count(options.get("mesh"))
    shapes = capacities(method, partitions, lanes.count, slots, participation, devices=devices)
    widths = lambda most: tuple(range(1, most + 1)) if short else (most,)
    shapes = tuple(each._replace(widths=tuple(widths(w[-1]) for w in each.widths)) for each in shapes)
    return make_engine(method, fetch, lanes, shapes, EXAMPLE, **options)


WAYS: dict[str, tuple[Lanes, int]] = {  # lanes, and clients per chunk
    "loop1": (Lanes(1, "loop"), 128),
    "loop3": (Lanes(3, "loop"), 4),
    "vmap3": (Lanes(3, "vmap"), 128),
    "unroll2": (Lanes(2, "unroll"), 2),
}


@functools.cache
def engine_of(name: str, way: str) -> Engine:
    """One engine per toy and way for all tests: compiling is what takes time."""
    return build(TOYS[name](), partitions(examples()), *WAYS[way], PARTICIPATION.get(name, 1.0))


def begin_run(method: Method):
    """(server, list of client states) before the first round."""
    server = jax.jit(method.init)(fold(KEY, 0), FROZEN)
    return server, [jax.jit(method.init_client)(fold(KEY, 1, i), server) for i in range(CLIENTS)]


def stack(states: list) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def drive(
    play: Callable,
    server,
    states,
    partitions: list[ClientPartition],
    rounds: int = 2,
    participation: float = 1.0,
):
    """`rounds` rounds of every partition's task: play(server, states, partition, ids, task, round, last=) ->
    (server, states, report)."""
    reports = []
    for task, partition in zip(tasks(), partitions, strict=False):
        for round_ in range(rounds):
            ids = participants(0, int(task.index), round_, np.flatnonzero(partition.count), participation)
            last = round_ == rounds - 1
            server, states, report = play(server, states, partition, ids, task, round_, last=last)
            reports.append(report)
    return server, states, reports


def drive_engine(engine: Engine, data, partitions, participation: float = 1.0, rounds: int = 2):
    """The engine over two tasks: (server, stacked states, reports)."""
    server, _ = begin_run(engine.method)
    states = init_clients(engine.method, server, CLIENTS, fold(KEY, 1))

    def play(server, states, partition, ids, task, round_, *, last):
        inputs = RoundInputs(FROZEN, data, partition, ids, task, round_, fold(KEY, 2), last=last)
        return run_round(engine, server, states, inputs)

    return drive(play, server, states, partitions, rounds, participation)


def drive_plain(
    method: Method,
    data,
    partitions,
    participation: float = 1.0,
    rounds: int = 2,
    fetch=fetch,
):
    """The plain loops over two tasks: (server, stacked states, reports)."""
    fetch = jax.jit(fetch, static_argnums=3)

    def play(server, states, partition, ids, task, round_, *, last):
        inputs = RoundInputs(FROZEN, data, partition, ids, task, round_, fold(KEY, 2), last=last)
        return plain_round(method, fetch, server, states, inputs)

    server, states, reports = drive(play, *begin_run(method), partitions, rounds, participation)
    return server, stack(states), reports


def receive(engine: Engine, frozen, server, states, data, partition, ids, task, round_: int = 0, key=KEY):
    """What the engine receives in the method's first round, before the server's part: (accumulator, new
    states). Gathered uploads are in order of id, `mean` is the sum of weight times upload."""
    key, ids, player = fold(key, task.index, round_), np.asarray(ids), engine.players[0]
    program, lanes = player.round.program, engine.lanes
    chunks, _ = plan_round(program, partition, ids, round_, lanes.count, player.capacity)
    round_context = RoundContext.on_host(frozen, task, int(round_), False)
    states = put_shared(jax.tree.map(jnp.copy, states), engine.mesh)  # the engine donates them
    round_context, server, data, key = engine.place((round_context, server, data, key))
    broadcast = engine.broadcast(round_context, server)
    exchange = Exchange(0, round_context, broadcast, partition, ids, key)
    received, new, _ = run_chunks(engine, chunks, exchange, states, data)
    entries = {name: getattr(received, name) for name in ("gather", "weight", "id", "valid")}
    entries = jax.tree.map(lambda x: x[: player.capacity.participants], entries)
    return received._replace(**entries), jax.tree.map(lambda x: x[: player.capacity.clients], new)


def close(left, right, atol: float = 1e-5) -> None:
    """Assert that two pytrees hold the same numbers up to rounding."""
    chex.assert_trees_all_close(left, right, atol=atol, rtol=1e-5)


def same(left, right) -> None:
    """Assert that two pytrees are equal bit for bit."""
    chex.assert_trees_all_equal(left, right)
