"""Malicious uploads for experiments/torture.py: what a client may send to a server that knows how many
examples it has.

Each is drawn from an honest upload by changing some of its values, and received by the engine, or, where
Flower is installed, by its server as a message. It must be left out and counted, or be finite and possible;
what a node says of itself is refused in one line, and asks for no memory.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
from torture_common import DECODER, Outcome

METHODS = ("linear", "hepco", "vfcl", "pmae", "glfc", "fedclm", "fedproto", "lorm", "pilora", "scaffold")
SETTINGS = dict(tasks=2, clients=3, rounds=2, epochs=1, image_size=16, batch_size=64)
VALUES = (np.nan, np.inf, -np.inf, 1e30, -1e30, 3e38, -1.0, 1e9, 2.0**31, 1e-45, -0.0)
WEIGHTS = (1e30, -1.0, np.nan, np.inf, -np.inf, 1e9, 3e38, -1e-3)


class Server(NamedTuple):
    """A server of a method, as far as it receives uploads."""

    exp: Any
    index: int  # of the method's round
    upload: Any  # an honest one
    context: Any  # of the client that sends it

    @property
    def player(self) -> Any:
        """Of the round."""
        return self.exp.engine.players[self.index]


@functools.cache
def server_of(method: str) -> Server:
    """The server of a method, before its first round."""
    from fcljax import config
    from fcljax.federated.claims import claims_hold
    from fcljax.runs.build import build
    from fcljax.runs.rounds import first_server
    from fcljax.types import ClientContext, ClientInfo, RoundContext

    own = {"decoder": str(DECODER)} if method == "pmae" else {}
    exp = build(config.resolve(config.from_mapping(method, SETTINGS | own, "settings")))
    server = first_server(exp)
    index = next(i for i, each in enumerate(exp.method.rounds) if each.when == "round" and each.server)
    task = exp.scenario.tasks[0]
    partition = exp.scenario.partitions[0][0]
    round_context = RoundContext.on_host(exp.frozen, task, 0, False)
    sent = exp.method.broadcast(round_context, server)
    info = ClientInfo(
        jnp.int32(1), jnp.int32(partition.count[1]), jnp.asarray(partition.class_examples[1]), jnp.int32(0)
    )
    context = ClientContext(exp.frozen, sent.payload, sent.cached, task, info)

    def honest(context: ClientContext, state: Any) -> Any:
        program = exp.method.rounds[index].program
        return program.finish(context, program.start(context, state, exp.key), state)[0]

    state = exp.method.init_client(exp.key, server)
    upload = jax.jit(honest)(context, state)
    upload = upload._replace(weight=jnp.minimum(jnp.float32(upload.weight), partition.count[1]))
    assert np.all(claims_hold(exp.method.rounds[index].program, context, upload)), (
        f"{method}: no honest upload"
    )
    return Server(exp, index, jax.device_get(upload), context)


def spoiled(rng: random.Random, upload: Any) -> tuple[Any, str]:
    """The upload with its weight, or values of one of its arrays, replaced."""
    if rng.random() < 0.2:
        weight = rng.choice(WEIGHTS)
        return upload._replace(weight=np.float32(weight)), f"weight {weight}"
    paths, tree = jax.tree_util.tree_flatten_with_path(upload._replace(weight=()))
    i = rng.choice([i for i, (_, leaf) in enumerate(paths) if np.size(leaf)])
    path, leaf = paths[i]
    value = rng.choice(VALUES)
    leaf = np.array(leaf)
    if leaf.dtype.kind in "iub":
        most = 1 if leaf.dtype.kind == "b" else np.iinfo(leaf.dtype).max
        least = 0 if leaf.dtype.kind == "b" else np.iinfo(leaf.dtype).min
        value = rng.choice((least, most, min(most, 10**6)))
    where = slice(None) if rng.random() < 0.5 else rng.randrange(leaf.size)
    leaf.reshape(-1)[where] = np.asarray(value).astype(leaf.dtype)
    leaves = [leaf if j == i else old for j, (_, old) in enumerate(paths)]
    spoiled_upload = tree.unflatten(leaves)._replace(weight=upload.weight)
    return spoiled_upload, f"{jax.tree_util.keystr(path)} {where} {value}"


def by_simulation(rng: random.Random) -> Outcome:
    """An upload that the engine receives after an honest one."""
    method = rng.choice(METHODS)
    server = server_of(method)
    before = server.player.receive(server.player.empty(), server.context, server.upload, np.int32(0))[0]
    upload, what = spoiled(rng, server.upload)
    after, valid = server.player.receive(before, server.context, upload, np.int32(1))
    return judged(f"{method}: {what}", before, after, bool(valid), server, upload)


def judged(what: str, before: Any, after: Any, valid: bool, server: Server, upload: Any) -> Outcome:
    """What became of an upload: `before` and `after` are what the server has received."""
    counted = int(after.rejected) - int(before.rejected)
    kept = ("mean", "sum", "gather", "weight", "valid")
    if not valid:
        same = all(map(_same, (getattr(before, n) for n in kept), (getattr(after, n) for n in kept)))
        return Outcome("survived" if same and counted == 1 else "different", f"{what}: left out")
    weight = float(after.weight[1])
    examples = int(server.context.client.examples)
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves((upload.mean, upload.sum, upload.gather)))
    possible = finite and 0 <= weight <= max(examples, 1) and counted == 0
    return Outcome("survived" if possible else "different", f"{what}: taken with weight {weight}")


def _same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


# ---- through Flower ----------------------------------------------------------------------------------------


@functools.cache
def flower_server(method: str) -> Any:
    """A server of `fcljax.bridges.flower` whose nodes have connected, and an honest answer to a call."""
    from flwr.app import RecordDict

    from fcljax.bridges import flower, node
    from fcljax.bridges.records import config, to_arrays, to_metrics

    server = server_of(method)
    mine = node.Facts(-1, [], {"clients": 3}, {"images": "x"})
    nodes = flower.Nodes(_no_grid(), 3, (), mine, lambda line: None)
    link = flower.Link(nodes, server.exp, 1.0, lambda line: None)
    call = {"index": server.index, "task": 0, "round": 0, "nonce": "5f" * 16}
    metrics = jax.tree.map(np.zeros_like, server.player.empty().metrics)

    def answer() -> Any:
        stamp = config({"incomplete": False, "valid": True, "fresh": False, **call})
        records = {"upload": to_arrays(server.upload), "metrics": to_metrics(metrics), "call": stamp}
        return flower.Answer(call, RecordDict(records))

    return link, answer


def _no_grid() -> Any:
    """A grid by which nothing is sent."""
    from flwr.serverapp import Grid

    return Mock(spec=Grid)


def by_flower(rng: random.Random) -> Outcome:
    """An answer of a node whose arrays, numbers or stamp are not as they should be."""
    from fcljax.bridges.records import to_arrays

    method = rng.choice(METHODS)
    server = server_of(method)
    (link, answer) = flower_server(method)
    before = link._receive(server.player.empty(), server.context, answer(), 0)
    upload = server.upload
    tampered = answer()
    what = rng.choice((*_TAMPER, "values"))
    must = True
    if what == "values":
        upload, how = spoiled(rng, server.upload)
        tampered.content["upload"] = to_arrays(upload)
        must = False
    else:
        how = _TAMPER[what](rng, tampered.content)
    after = link._receive(before, server.context, tampered, 1)
    valid = int(after.rejected) == int(before.rejected)
    if must and valid:
        return Outcome("different", f"flower {method}: {what} {how}: taken")
    return judged(f"flower {method}: {what} {how}", before, after, valid, server, upload)


def _other_arrays(rng: random.Random, content: Any) -> str:
    from flwr.app import Array

    record = content["upload"]
    name = rng.choice(list(record))
    array = record[name]
    how = rng.choice(("gone", "added", "shape", "type", "bytes", "cut", "pickle", "huge", "format"))
    if how == "gone":
        del record[name]
    elif how == "added":
        record["x" * rng.randrange(1, 99)] = array
    else:
        dtype = array.dtype
        shape = tuple(array.shape)
        kind = array.stype
        data = array.data
        dtype = rng.choice(("float64", "object", "", "int8", "complex64")) if how == "type" else dtype
        shape = (*shape, 2) if how == "shape" else (10**12,) if how == "huge" else shape
        kind = rng.choice(("pickle", "", "torch")) if how == "format" else kind
        data = {
            "bytes": rng.randbytes(len(data)),
            "cut": data[: rng.randrange(len(data))],
            "pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR.",
        }.get(how, data)
        record[name] = Array(dtype, shape, kind, data)
    return f"{how} {name}"


def _other_metrics(rng: random.Random, content: Any) -> str:
    record = content["metrics"]
    if not record:
        record["x"] = 1.0
        return "added x"
    name = rng.choice(list(record))
    weights = [each for each in record if each.endswith("weight")]
    how = rng.choice(("gone", "added", "nan", "inf", *(("weight", "more", "negative") if weights else ())))
    if how == "gone":
        del record[name]
    elif how in ("weight", "more", "negative"):
        record[rng.choice(weights)] = {"weight": 1e30, "more": 1e6, "negative": -1.0}[how]
    else:
        value = {"added": 1.0, "nan": float("nan"), "inf": float("inf")}[how]
        record["x" if how == "added" else name] = value
    return f"{how} {name}"


def _other_stamp(rng: random.Random, content: Any) -> str:
    record = content["call"]
    name = rng.choice(("index", "task", "round", "nonce", "valid"))
    if name == "valid":
        record[name] = False
    elif rng.random() < 0.3:
        del record[name]
    else:
        record[name] = rng.choice((7, -1, 2**62, "0", "", 0.5, b"0"))
    return f"{name} {record.get(name)!r}"


def _other_records(rng: random.Random, content: Any) -> str:
    # a method without metrics sends an empty record, whose absence says nothing else
    name = rng.choice([name for name in ("upload", "metrics") if content[name]])
    del content[name]
    return f"no {name}"


_TAMPER = {
    "arrays": _other_arrays,
    "metrics": _other_metrics,
    "stamp": _other_stamp,
    "records": _other_records,
}


def by_hello(rng: random.Random) -> Outcome:
    """What a node says of itself."""
    from flwr.app import Message, RecordDict

    from fcljax.bridges import flower, node
    from fcljax.bridges.records import config
    from fcljax.errors import InputError

    mine = node.Facts(-1, [], {"clients": 3, "lr": 0.1}, {"images": "x"})
    facts = {"client": 1, "examples": [5, 6], "settings": dict(mine.settings), "digests": {"images": "x"}}
    strange = (None, True, -1, 3, 10**18, 10**400, 0.5, "1", "x" * 10**5)
    strange += (
        [],
        [[]],
        {},
        {"a": 1},
        [5],
        [-1, 5],
        [10**9, 1],
        [1e18, 1],
        [True, 1],
        [None, None],
        [1] * 9999,
        {"images": 3},
        {"clients": 2},
    )
    field = rng.choice(list(facts))
    value = rng.choice(strange)
    whole = json.dumps(facts)
    less = {name: each for name, each in facts.items() if name != field}
    wrong = [json.dumps(each) for each in (less, facts | {"more": 1}, [facts])]
    wrong += [whole[: rng.randrange(5, 40)], "[" * 10**5, "NaN", "[]", "x" * 2**21]
    text = json.dumps(facts | {field: value}) if rng.random() < 0.4 else rng.choice(wrong)
    said = RecordDict({"facts": config({"json": text})} if rng.random() < 0.95 else {})
    asked = Message(RecordDict(), 7, "query.hello")
    nodes = flower.Nodes(_no_grid(), 3, (), mine, lambda line: None)
    what = f"flower hello: {text[:80]}"
    try:
        nodes._add(Message(said, reply_to=asked), 2)
    except InputError as error:
        good = "\n" not in str(error) and len(str(error)) < 10_000
        return Outcome("survived" if good else "other", f"{what}: {str(error)[:200]}")
    return Outcome("different", f"{what}: was taken")


@functools.cache
def tampers() -> dict[str, Any]:
    """Ways to change an answer: tamper(rng, content) -> what it did. Afterwards messages can be made
    outside of an app.

    Raises:
      ImportError: without Flower.
    """
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("node_id", "run_id", "task_id"):
        setattr(TaskIdentity, f"_{name}", 1)
    return _TAMPER


@functools.cache
def ways() -> tuple:
    """Ways to send: through Flower only where it is installed."""
    try:
        tampers()
    except ImportError:
        return (by_simulation,)
    return (by_simulation, by_flower, by_hello)


def hostile_upload(rng: random.Random, folder: Path, *_: object) -> Outcome:
    """One of them."""
    way = rng.choice(ways())
    try:
        return way(rng)
    except Exception as error:
        return Outcome("other", f"{way.__name__}: Traceback: {type(error).__name__}: {error}")
