"""One micro federation for tests of methods and of their parts: a tiny ViT, five classes in two tasks, four
clients of which one has no rows. And the same work without an engine, on a network that is a formula, for
numbers derived by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toys

from fcljax import config
from fcljax.adapters.linear import LinearOptions, linear
from fcljax.checks.examples import frozen_parameters, network
from fcljax.data.tasks import make_tasks
from fcljax.federated.check import Example
from fcljax.federated.engine import Lanes, RoundInputs, init_clients, keep_task, make_engine, run_round
from fcljax.federated.rules import weighted_mean
from fcljax.federated.schedule import ClientPartition, capacities
from fcljax.mesh import device_count
from fcljax.methods.fppl import FPPLOptions
from fcljax.methods.pilora import PiloraOptions
from fcljax.models.vit import ViTConfig
from fcljax.parts.classifiers import linear as linear_classifier
from fcljax.parts.client import train_step
from fcljax.parts.learner import learner
from fcljax.parts.server import ServerRound
from fcljax.runs.build import make_method
from fcljax.types import (
    Aggregate,
    Batch,
    ClientContext,
    ClientInfo,
    Features,
    Frozen,
    Network,
    RoundContext,
    Sizes,
)

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)
# the second task has two classes and a padding class
SIZES = Sizes(classes=5, tasks=2, task_classes=3, clients=4, rounds=2, examples=9)
STREAM = make_tasks(5, 2)
NETWORK = network(TINY)
SURROGATE = jnp.asarray(np.random.default_rng(1).integers(0, 256, (12, 8, 8, 3)), jnp.uint8)
FROZEN = frozen_parameters(TINY, SURROGATE)
LABEL = np.arange(60) % SIZES.classes
IMAGE = np.random.default_rng(0).normal(size=(60, 8, 8, 3))
DATA = toys.Examples(jnp.asarray(IMAGE, jnp.float32), jnp.asarray(LABEL, jnp.int32))
KEY = toys.KEY
PAIR = Lanes(2, "vmap")
# of the two papers' server steps, for methods that are put together in a test
FPPL = FPPLOptions(
    server_epochs=1,
    local_classes="current",
    reduction="mean",
    unified_average="holders",
    prototype_view="clean",
    prototype_download="current",
)
PILORA = PiloraOptions(
    distance="sqrt_scaled",
    negatives="all",
    predict_classes="seen",
    mean_features="clean",
    reweight_distance="l2",
    reweight_mode="divide",
)


def partition_of(task, counts) -> ClientPartition:
    """Clients with so many rows of the task; the task's first row belongs to nobody."""
    mine = np.flatnonzero(task.current[LABEL])[1 : 1 + sum(counts)]
    return toys.make_partition(np.split(mine, np.cumsum(counts)[:-1]), LABEL, SIZES.classes)


PARTITIONS = [partition_of(task, (9, 0, 4, 7)) for task in STREAM]


def read(data, index, keys, augment):
    return data.input[index], data.label[index], None


def resolved(name, **values):
    """Settings of a method as a run has them."""
    return config.resolve(config.from_mapping(name, values, "test"))


def method_of(name, sizes=SIZES, network=NETWORK, **values):
    """A method as a run makes it."""
    return make_method(resolved(name, **values), sizes, network)


# ---- through the engine ------------------------------------------------------------------------------------


def engine_of(
    method, lanes=PAIR, partitions=PARTITIONS, frozen=FROZEN, data=DATA, task=STREAM[0], fetch=read, mesh=None
):
    shapes = capacities(method, list(partitions), lanes.count, 128, devices=device_count(mesh))
    return make_engine(method, fetch, lanes, shapes, Example(frozen, data, task), mesh=mesh)


def round_context_of(task, round_=0, last=False, frozen=FROZEN, previous=()):
    return RoundContext.on_host(frozen, task, int(round_), bool(last))._replace(previous=previous)


def begin(method, frozen=FROZEN, key=2, clients=SIZES.clients):
    """The server and the stacked states of all clients before the first round."""
    server = jax.jit(method.init)(jax.random.key(key), frozen)
    return server, init_clients(method, server, clients, KEY)


@functools.cache
def compiled(function):
    """One trace for all calls of a method's function."""
    return jax.jit(function)


def play(
    engine,
    server,
    states,
    partitions=PARTITIONS,
    ids=None,
    data=DATA,
    frozen=FROZEN,
    stream=STREAM,
    rounds=2,
    heard=lambda when, report: None,
):
    """(server, states, report) after every round of all tasks, with what comes before and after a task's
    rounds. ids: who takes part; None: everyone. heard: gets the report of every exchange."""
    begin_task = compiled(engine.method.begin_task)
    states, history, reports, past = jax.tree.map(jnp.copy, states), [], {}, ()
    for task, partition in zip(stream, partitions, strict=True):
        everyone = np.flatnonzero(partition.count)
        chosen = everyone if ids is None else np.intersect1d(everyone, ids)
        server = begin_task(round_context_of(task, frozen=frozen), server, KEY)
        for round_ in range(rounds):
            last = round_ == rounds - 1
            for when in ("task_start",) * (round_ == 0) + ("round",) + ("task_end",) * last:
                number, who = (round_, chosen) if when == "round" else (0, everyone)
                inputs = RoundInputs(
                    frozen, data, partition, who, task, number, jax.random.key(3), when, last, past
                )
                server, states, reports[when] = run_round(engine, server, states, inputs)
                heard(when, reports[when])
            kept = keep_task(engine, frozen, server, task, round_) if last else None
            past += () if kept is None else (kept,)
            history.append((*jax.tree.map(jnp.copy, (server, states)), reports["round"]))
    return history


def receive(engine, index, server, states, partition, ids, task, frozen=FROZEN, data=DATA):
    """What the engine receives in one of the method's rounds, before the server's part: (accumulator, new
    states). Gathered uploads are in order of id, `mean` is the sum of weight times upload."""
    player = engine.players[index]
    one = engine._replace(players=(player,))
    return toys.receive(one, frozen, server, states, data, partition, ids, task)


# ---- one client at a time ----------------------------------------------------------------------------------


def rows_of(labels, seed=1, padding=0.0, width=4):
    """Up to four rows that are vectors [width], always padded to four: operations that run outside of jit
    compile once per shape."""
    image = np.random.default_rng(seed).normal(size=(4, width)).astype(np.float32)
    image[len(labels) :] = padding
    mask = np.arange(4) < len(labels)
    label = np.asarray([*labels, 0, 0, 0, 0][:4])
    arrays = (image, label, mask, np.where(mask, np.arange(4), -1))
    return Batch(*map(jnp.asarray, arrays))


def info_of(classes, rows=1, id_=0, round_=0):
    return ClientInfo(jnp.int32(id_), jnp.int32(rows), jnp.zeros(classes, jnp.int32), jnp.int32(round_))


def context_of(method, server, task, info, frozen):
    """What a client may read once the server has broadcast."""
    broadcast = method.broadcast(round_context_of(task, info.round, frozen=frozen), server)
    return ClientContext(frozen, broadcast.payload, broadcast.cached, task, info)


def aggregate_of(uploads, ids, valid, places):
    """What the server sees of some uploads, in order of id, padded to so many places."""
    pad = places - len(uploads)
    stack = lambda *x: jnp.asarray(np.stack([*map(np.asarray, x), *[np.zeros_like(x[0])] * pad]))
    parts = zip(*((u.mean, u.gather) for u in uploads), strict=True)
    mean, gather = (jax.tree.map(stack, *part) for part in parts)
    ids, valid = jnp.asarray([*ids, *[places] * pad]), jnp.asarray([*valid, *[False] * pad])
    weight = jnp.where(valid, jnp.asarray([*(float(u.weight) for u in uploads), *[0.0] * pad]), 0)
    return Aggregate(jax.jit(weighted_mean)(mean, weight, valid), {}, gather, weight, ids, valid)


# ---- whole rounds on a formula -----------------------------------------------------------------------------

WIDTH = 4
SCALE = Frozen({"scale": jnp.ones(WIDTH)})
TASKS = jax.tree.map(jnp.asarray, STREAM)


def formula(params, image, injection):
    """The scaled image, plus its LoRA updates and the mean prompt and prefix of every block."""
    x = image * params["scale"]
    if injection is None:
        return x
    pairs = sum(x @ m.a_q.T @ m.b_q.T + 2 * x @ m.a_v.T @ m.b_v.T for m in injection.lora.values())
    prefixes = sum(prefix.key.mean(-2) - 2 * prefix.value.mean(-2) for prefix in injection.prefix.values())
    return x + pairs + prefixes + sum(prompt.mean(-2) for prompt in injection.prompt.values())


def _apply(params, image, injection, train, mask=None):
    feature = formula(params, image, injection)
    tokens = None if injection is None or injection.tokens is None else feature[:, None] + injection.tokens
    return Features(feature, None, {}, tokens), params


VECTOR: Any = (WIDTH,)  # a vector, which no operation here minds
FORMULA = Network(lambda key: SCALE.network, _apply, WIDTH, 2, VECTOR)


def _means(params, image, injection, train, mask=None):
    return Features(image.mean(axis=(1, 2)), None, {}), params


# its features are the means of the channels of images of 2 x 2 pixels
MEANS = Network(lambda key: {}, _means, 3, 1, (2, 2, 3))


def linear_on(network):
    """A linear classifier on the network's frozen features."""
    adapter = linear(LinearOptions(), SIZES, network)
    return learner(network, adapter, linear_classifier(network.width, SIZES.classes))


def main_of(method):
    """What is played in every round of a task."""
    (main,) = [each for each in method.rounds if each.when == "round"]
    return main


def train(method, server, task, batches, state=None, id_=0, round_=0, key=KEY):
    """A client that makes the passes before training, and takes a step on each of the batches: what it could
    read, and how it ends."""
    program, rows = main_of(method).program, sum(int(batch.mask.sum()) for batch in batches)
    context = context_of(method, server, task, info_of(SIZES.classes, rows, id_, round_), SCALE)
    state = method.init_client(key, server) if state is None else state
    local = compiled(program.start)(context, state, key)
    for phase in program.phases[: passes_before(program) + 1]:
        for batch in batches:
            local, _ = compiled(phase.step)(context, local, batch, key)
    return context, local


def passes_before(program):
    """How many passes over its examples a client makes before it trains."""
    steps = [getattr(phase.step, "func", phase.step) for phase in program.phases]
    return steps.index(train_step) if train_step in steps else 0


def client_round(method, server, task, batches, state=None, id_=0, round_=0, key=KEY):
    """A client that trains on the batches and looks at them again: its upload as it arrives, its state."""
    program = main_of(method).program
    state = method.init_client(key, server) if state is None else state
    context, local = train(method, server, task, batches, state, id_, round_, key)
    for phase in program.phases[passes_before(program) + 1 :]:
        for batch in batches:
            local, _ = compiled(phase.step)(context, local, batch, key)
    upload, state = compiled(program.finish)(context, local, state)
    return compiled(program.receive)(context, upload) if program.receive else upload, state


def end_of_task(method, server, task, batches, state, id_=0, key=KEY):
    """A client's state once it has looked at these batches of the task that is over."""
    rows = sum(int(batch.mask.sum()) for batch in batches)
    context = context_of(method, server, task, info_of(SIZES.classes, rows, id_), SCALE)
    for program in [each.program for each in method.rounds if each.when == "task_end" and not each.server]:
        local = compiled(program.start)(context, state, key)
        for phase in program.phases:
            for batch in batches:
                local, _ = compiled(phase.step)(context, local, batch, key)
        _, state = compiled(program.finish)(context, local, state)
    return state


def server_round(method, server, task, aggregate, round_=0, key=KEY):
    """The server after it got these uploads, and its metrics."""
    now = round_context_of(task, round_, frozen=SCALE)
    round_context = now._replace(previous=method.broadcast(now, server))
    return compiled(main_of(method).server)(round_context, server, aggregate, key)


def seen_by_rules(learner, round_context, aggregate, key=KEY):
    """A round as server rules see it, of uploads that were gathered."""
    frozen, task, index, last, previous = round_context
    who = aggregate.valid, aggregate.id, aggregate.weight
    return ServerRound(learner, frozen, task, index, last, previous, aggregate.gather, *who, key)


def by_hand(method, rounds=1):
    """The server after so many rounds of both tasks, with two clients of two batches each."""
    server, ids = compiled(method.init)(KEY, SCALE), (0, 2)
    states = {i: method.init_client(jax.random.fold_in(KEY, i), server) for i in ids}
    for task in TASKS:
        own = [int(label) for label in task.classes if label >= 0]
        both = lambda i, own: [rows_of([*own, own[i // 2]][:4], 3 * i), rows_of(own[: i + 1], 3 * i + 1)]
        batches = {i: both(i, own) for i in ids}
        server = compiled(method.begin_task)(round_context_of(task, frozen=SCALE), server, KEY)
        for round_ in range(rounds):
            uploads = []
            for i in ids:
                upload, states[i] = client_round(method, server, task, batches[i], states[i], i, round_)
                uploads.append(upload)
            aggregate = aggregate_of(uploads, ids, [True, True], SIZES.clients)
            server, _ = server_round(method, server, task, aggregate, round_)
        states = {i: end_of_task(method, server, task, batches[i], states[i], i) for i in ids}
    return server
