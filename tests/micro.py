"""One micro federation for tests of methods and of their parts: a tiny ViT, five classes in two tasks, four
clients of which one has no rows. And one client's work without an engine, for numbers derived by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import toys

from fcljax import config
from fcljax.data.tasks import make_tasks
from fcljax.federated.aggregation import weighted_mean
from fcljax.federated.check import Example
from fcljax.federated.engine import Lanes, init_clients, make_engine, run_round
from fcljax.federated.schedule import Roster, capacities
from fcljax.models.vit import ViTConfig, init_vit, vit_network
from fcljax.runs.build import make_method
from fcljax.types import Aggregate, Batch, ClientInfo, Ctx, Frozen, Setting, Turn

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)
# the second task has two classes and a padding class
SETTING = Setting(classes=5, tasks=2, task_classes=3, clients=4, rounds=2)
STREAM = make_tasks(5, 2)
NETWORK = vit_network(TINY)
FROZEN = Frozen(init_vit(jax.random.key(1), TINY))
LABEL = np.arange(60) % SETTING.classes
IMAGE = np.random.default_rng(0).normal(size=(60, 8, 8, 3))
DATA = toys.Rows(jnp.asarray(IMAGE, jnp.float32), jnp.asarray(LABEL, jnp.int32))
KEY = toys.KEY
PAIR = Lanes(2, "vmap")


def deal(task, counts) -> Roster:
    """Clients with so many rows of the task; the task's first row belongs to nobody."""
    mine = np.flatnonzero(task.current[LABEL])[1 : 1 + sum(counts)]
    return toys.make_roster(np.split(mine, np.cumsum(counts)[:-1]), LABEL, SETTING.classes)


DEALS = [deal(task, (9, 0, 4, 7)) for task in STREAM]


def read(data, index, keys, augment):
    return data.image[index], data.label[index], None


def resolved(name, **values):
    """Settings of a method as a run has them."""
    return config.resolve(name, config.from_mapping(name, values, "test"))


def method_of(name, setting=SETTING, network=NETWORK, **values):
    """A method as a run makes it."""
    return make_method(name, resolved(name, **values), setting, network)


# ---- through the engine ------------------------------------------------------------------------------------


def engine_of(method, lanes=PAIR, deals=DEALS, frozen=FROZEN, data=DATA, task=STREAM[0], fetch=read):
    shapes = capacities(method, list(deals), lanes.count, 128)
    return make_engine(method, fetch, lanes, shapes, Example(frozen, data, task))


def turn_of(task, round_=0, last=False, frozen=FROZEN, previous=()):
    return Turn(frozen, task, np.int32(round_), np.bool_(last), previous)


def begin(method, frozen=FROZEN, key=2, clients=SETTING.clients):
    """The server and the stacked states of all clients before the first round."""
    server = jax.jit(method.init)(jax.random.key(key), frozen)
    return server, init_clients(method, server, clients, KEY)


@functools.cache
def compiled(function):
    """One trace for all calls of a method's function."""
    return jax.jit(function)


def play(engine, server, states, deals=DEALS, ids=None, data=DATA, frozen=FROZEN, stream=STREAM, rounds=2):
    """(server, states, report) after every round of all tasks, with what comes before and after a task's
    rounds. ids: who takes part; None: everyone."""
    begin_task, end_task = compiled(engine.method.begin_task), compiled(engine.method.end_task)
    states, history, reports = jax.tree.map(jnp.copy, states), [], {}
    for task, roster in zip(stream, deals, strict=True):
        everyone = np.flatnonzero(roster.count)
        chosen = everyone if ids is None else np.intersect1d(everyone, ids)
        server = begin_task(turn_of(task, frozen=frozen), server, KEY)
        for round_ in range(rounds):
            last = round_ == rounds - 1
            for when in ("opening",) * (round_ == 0) + ("round",) + ("closing",) * last:
                number, who = (round_, chosen) if when == "round" else (0, everyone)
                server, states, reports[when] = run_round(
                    engine, frozen, server, states, data, roster, who, task, number, jax.random.key(3),
                    when=when, last=last,
                )  # fmt: skip
            server = end_task(turn_of(task, round_, last, frozen), server, KEY) if last else server
            history.append((*jax.tree.map(jnp.copy, (server, states)), reports["round"]))
    return history


def receive(engine, index, server, states, roster, ids, task, frozen=FROZEN, data=DATA):
    """What the engine receives in one of the method's rounds, before the server's part: (accumulator, new
    states). Gathered uploads are in order of id, `mean` is the sum of weight times upload."""
    player = engine.players[index]
    one = engine._replace(players=(player,))
    return toys.receive(one, frozen, server, states, data, roster, ids, task)


# ---- one client at a time ----------------------------------------------------------------------------------


def rows_of(labels, seed=1, padding=0.0, width=4):
    """Up to four rows that are vectors [width], always padded to four: operations that run outside of jit
    compile once per shape."""
    image = np.random.default_rng(seed).normal(size=(4, width)).astype(np.float32)
    image[len(labels) :] = padding
    mask = np.arange(4) < len(labels)
    label = np.asarray([*labels, 0, 0, 0, 0][:4])
    return jax.tree.map(jnp.asarray, Batch(image, label, mask, np.where(mask, np.arange(4), -1)))


def info_of(classes, rows=1, id_=0, round_=0):
    return ClientInfo(jnp.int32(id_), jnp.int32(rows), jnp.zeros(classes, jnp.int32), jnp.int32(round_))


def ctx_of(method, server, task, info, frozen):
    """What a client may read once the server has broadcast."""
    broadcast = method.broadcast(turn_of(task, info.round, frozen=frozen), server)
    return Ctx(frozen, broadcast.wire, broadcast.held, task, info)


def aggregate_of(uploads, ids, valid, places):
    """What the server sees of some uploads, in order of id, padded to so many places."""
    pad = places - len(uploads)
    stack = lambda *x: jnp.asarray(np.stack([*map(np.asarray, x), *[np.zeros_like(x[0])] * pad]))
    parts = zip(*((u.mean, u.gather) for u in uploads), strict=True)
    mean, gather = (jax.tree.map(stack, *part) for part in parts)
    ids, valid = jnp.asarray([*ids, *[places] * pad]), jnp.asarray([*valid, *[False] * pad])
    weight = jnp.where(valid, jnp.asarray([*(float(u.weight) for u in uploads), *[0.0] * pad]), 0)
    return Aggregate(jax.jit(weighted_mean)(mean, weight, valid), (), gather, weight, ids, valid)
