"""fcljax under Flower (https://flower.ai): a `ClientApp` and a `ServerApp` that play any method with clients
on machines of their own, or in Flower's simulation.

The server asks every node once who it is and what it has ("query.hello"), then has the method's rounds played
("train.round"): the broadcast goes down and the upload comes up as ArrayRecords. Everything between is the
engine's: what a client computes, what is merged of whom, and what the server makes of it. A client's state
lies in its node's `context.state` and never leaves it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray
from rich.console import Console

from fcljax.bridges import node
from fcljax.bridges.node import Facts, Order, Own
from fcljax.bridges.records import (
    config,
    from_arrays,
    from_metrics,
    listed,
    load_records,
    record_bytes,
    save_records,
    to_arrays,
    to_metrics,
)
from fcljax.config import RunConfig
from fcljax.errors import InputError, one_line
from fcljax.federated.client_loop import Accumulator
from fcljax.federated.engine import Exchange, Played
from fcljax.federated.schedule import ClientPartition, phase_steps
from fcljax.files import check_folder
from fcljax.methods import find_method
from fcljax.results.run_folder import write_json
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import NOT_EVALUATED, make_evaluate
from fcljax.runs.loop import check_new, claimed, first_server, make_play
from fcljax.runs.records import Clock, Records, json_line, record
from fcljax.runs.summary import figures_of, payload_shapes, summarize, warnings_of
from fcljax.terminal import say
from fcljax.types import Broadcast, ClientContext, ClientInfo, PyTree, RoundContext, Upload

# after our own modules: records.py says what to do where Flower is not here
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp import Grid, ServerApp  # isort: skip

HELLO, ROUND = "query.hello", "train.round"
STATE, CACHED, NOTE = "fcljax.state", "fcljax.cached", "fcljax.note"  # records of a client's context
_CLASSES = "classes.png"  # a figure of rows per class and client, which clients do not tell

_SERVER = ("out", "test", "wait", "timeout")  # of the run's configuration, what the server alone reads
OnRound = Callable[[int, int, PyTree], None]  # (task, round, the server's state)


# ---- the client --------------------------------------------------------------------------------------------


def client_app(method: str | None = None, **settings: Any) -> ClientApp:
    """A Flower `ClientApp` that plays one client of a method.

    The node's configuration says which: `partition-id`, and where it has data of its own `data`, a .npz file
    with x_train and y_train, whose labels number the classes of the federation. With `state-dir`, a folder,
    the client's state outlives its node: Flower's own does not.

    Args:
      method: as in `fcljax run METHOD`; None: the run's configuration has it under "method".
      settings: those of `fcljax run`, the same on all machines; the run's configuration wins.
    """
    app = ClientApp()
    # not functions made here: Flower's simulation pickles the app, and those of a module go by their name
    app.query("hello")(functools.partial(_reply, _hello, method, settings))
    app.train("round")(functools.partial(_reply, _round, method, settings))
    return app


def _reply(
    content: Callable[..., RecordDict],
    method: str | None,
    settings: dict[str, Any],
    message: Message,
    context: Context,
) -> Message:
    return Message(content(method, settings, message, context), reply_to=message)


class _Client(NamedTuple):
    """Who a node is: the method, the settings, its id, data of its own if it has some, and what the server
    asks."""

    method: str
    cfg: RunConfig
    id: int
    own: Own | None
    call: ConfigRecord


def _client(method: str | None, settings: dict[str, Any], message: Message, context: Context) -> _Client:
    given = {name: value for name, value in context.run_config.items() if name not in _SERVER}
    method, cfg = node.settings_of(method, settings | given)
    client, path = (
        node.check_client(cfg, context.node_config.get("partition-id")),
        context.node_config.get("data"),
    )
    call = message.content.config_records["call"]
    own = None if path is None else Own(client, str(path), tuple(map(str, listed(call, "class_names"))))
    return _Client(method, cfg, client, own, call)


def _hello(method: str | None, settings: dict[str, Any], message: Message, context: Context) -> RecordDict:
    """What the server asks of a node before it takes part."""
    me = _client(method, settings, message, context)
    facts = node.facts(me.method, me.cfg, me.id, node.hold(me.method, me.cfg, me.own))
    return RecordDict({"facts": config({"json": json.dumps(facts._asdict())})})


def _round(method: str | None, settings: dict[str, Any], message: Message, context: Context) -> RecordDict:
    """One round of the method, and the client's new state in the context."""
    me = _client(method, settings, message, context)
    exp = node.client_experiment(me.method, me.cfg, me.own, int(me.call["rows"]))
    memory, content = _remembered(context, me.id), message.content
    cached = _cached(memory.get(CACHED, {}), content.array_records["cached"], me.call)
    if cached is None:
        return RecordDict({"call": config({"lacks": True})})
    shape, kept = node.broadcast_shape(exp), memory.get(STATE)
    payload = from_arrays(content.array_records["payload"], shape.payload, "payload")
    broadcast = Broadcast(payload, from_arrays(cached, shape.cached, "cached"))
    fresh = kept is None
    state = node.first_state(exp, me.id) if fresh else from_arrays(kept, node.state_shape(exp), "state")
    done = node.work(exp, me.id, _order(me.call), broadcast, state)
    _remember(context, me.id, {STATE: to_arrays(done.state), CACHED: cached})
    valid = bool(done.valid)
    upload = to_arrays(done.upload) if valid and me.call["merged"] else ArrayRecord()
    told = config({"lacks": False, "valid": valid, "fresh": fresh})
    return RecordDict({"upload": upload, "metrics": to_metrics(done.metrics), "call": told})


def _order(call: ConfigRecord) -> Order:
    key = jax.random.wrap_key_data(jnp.asarray(listed(call, "key"), jnp.uint32))
    return Order(int(call["index"]), int(call["task"]), int(call["round"]), key)


def _cached(mine: Mapping[str, Array], sent: ArrayRecord, call: ConfigRecord) -> ArrayRecord | None:
    """What every client holds of earlier rounds: what the node has of it and what was sent, as the server
    names it; None: something is missing, or is not what the server has."""
    told = dict(zip(listed(call, "cached"), listed(call, "digests"), strict=True))
    both = {**mine, **sent}
    cached = ArrayRecord({name: both[name] for name in told if name in both})
    return cached if _digests(cached) == told else None


def _digests(arrays: ArrayRecord) -> dict[str, str]:
    """sha256 of what each array holds, by name."""
    of = lambda array: hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.data).hexdigest()
    return {name: of(array) for name, array in arrays.items()}


# ---- what a client remembers -------------------------------------------------------------------------------


def _remembered(context: Context, client: int) -> dict[str, Any]:
    """What the node remembers of this client in this run, as records by name: of its context, else of its
    file."""
    found = {name: context.state[name] for name in (STATE, CACHED, NOTE) if name in context.state}
    mine = NOTE in found and dict(found[NOTE]) == _note(context, client)
    path = _state_file(context, client)
    return found if mine else load_records(path) if path else {}


def _remember(context: Context, client: int, records: dict[str, ArrayRecord]) -> None:
    for name, value in records.items():
        context.state[name] = value
    context.state[NOTE] = config(_note(context, client))
    path = _state_file(context, client)
    if path:
        save_records(path, records)


def _note(context: Context, client: int) -> dict[str, Any]:
    """Whose state it is: a node's context may go from one run of a series to the next."""
    return {"run": str(context.run_id), "client": client}


def _state_file(context: Context, client: int) -> Path | None:
    folder = context.node_config.get("state-dir")
    return None if folder is None else Path(str(folder)) / f"run-{context.run_id}-client-{client}.npz"


# ---- the server --------------------------------------------------------------------------------------------


def server_app(
    method: str | None = None,
    out: str | None = None,
    test: str | None = None,
    wait: float = 600.0,
    timeout: float = 3600.0,
    on_round: OnRound | None = None,
    **settings: Any,
) -> ServerApp:
    """A Flower `ServerApp` that plays the server of a method, and leaves a run directory as `fcljax run`
    does, without checkpoints.

    Args:
      method: as in `fcljax run METHOD`; None: the run's configuration has it under "method".
      out: the run directory, a new one; None: the run's configuration has it, or nothing is written.
      test: a .npz file with x_test and y_test (and class_names); None: the settings' data set, of whose
        training images none is kept.
      wait: seconds in which all clients must have come.
      timeout: seconds in which a client must answer in a round; else it has dropped out of it.
      on_round: called after every round, with task, round and the server's state.
      settings: those of `fcljax run`, the same on all machines; the run's configuration wins.
    """
    app, usual = ServerApp(), Service(out, test, wait, timeout)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        own = {name: value for name, value in context.run_config.items() if name in _SERVER}
        given = {name: value for name, value in context.run_config.items() if name not in _SERVER}
        serve(grid, *node.settings_of(method, settings | given), usual._replace(**own), on_round)

    return app


class Service(NamedTuple):
    """Where the server's files go and come from, and how long it waits; as in `server_app`."""

    out: str | None
    test: str | None
    wait: float
    timeout: float


def serve(grid: Grid, method: str, cfg: RunConfig, service: Service, on_round: OnRound | None = None) -> dict:
    """All rounds of all tasks with the clients of a grid; returns the content of summary.json.

    Raises:
      InputError: for bad settings or files, or if not all clients come.
    """
    out, console = Path(service.out) if service.out else None, Console(stderr=True)
    if out:
        check_new(out)
        check_folder(out)
    inputs = node.load_server(cfg, service.test)
    say_line = lambda line: say(console, line)
    nodes = Nodes(grid, cfg, inputs.dataset.class_names, node.server_facts(method, cfg, inputs, service.test))
    rows = nodes.gather(service.wait, 1 if find_method(method).joint else cfg.tasks, say_line)
    exp = node.server_experiment(method, cfg, inputs, rows)
    with claimed(out, method, cfg) if out else contextlib.nullcontext():
        records = Records()
        with Clock(records.seconds) as clock:
            link = Link(nodes, exp, payload_shapes(exp).uploads, service.timeout, say_line)
            play = make_play(exp, cfg, records, clock, link.play)
            state = State(first_server(exp), (), jax.random.key_data(exp.key))
            _rounds(exp, cfg, state, records, clock, play, link, out, on_round)
        summary = _summary(exp, method, cfg, records, link)
        if out:
            write_json(out / "summary.json", summary)
            for name, draw in figures_of(exp, summary).items() if summary["accuracy"] else ():
                if name != _CLASSES:
                    draw(out / "figures" / name)
    for line in warnings_of(records):
        say_line(line)
    return summary


def _rounds(
    exp: Experiment,
    cfg: RunConfig,
    state: State,
    records: Records,
    clock: Clock,
    play: Callable,
    link: "Link",
    out: Path | None,
    on_round: OnRound | None,
) -> None:
    """Play, evaluate and log all rounds. Where clients' own models are what counts, nothing is evaluated: the
    server does not have them."""
    evaluate, past = None if exp.method.personal else make_evaluate(exp, cfg.eval_batch_size), ()
    for t, r in itertools.product(range(len(exp.scenario.tasks)), range(cfg.rounds)):
        last, row = r == cfg.rounds - 1, NOT_EVALUATED
        state, kept, done = play(exp.train, state, past, t, r, last)
        if kept is not None:
            past += (kept,)
            records.add(replay_examples=len(kept.label))
        if evaluate and (last or cfg.eval_every_round):
            with clock("eval"):
                row = evaluate(exp.test, state, t, records)
            if last:
                records.keep(*row)
        line = record(records, t, r, done, *row)
        line |= link.take()
        if out:
            with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json_line(line))
        if on_round:
            on_round(t, r, state.server)


def _summary(exp: Experiment, method: str, cfg: RunConfig, records: Records, link: "Link") -> dict[str, Any]:
    """What summary.json holds: as of a run, without what only clients know, and with what went over the wire.
    Where clients' own models are what counts, there are no accuracies."""
    payload = {"payload": dict(link.total)}
    if not exp.method.personal:
        return summarize(exp, method, cfg, records, None) | {"client_accuracy": None} | payload
    link.tell("warning: no accuracy was measured: the models that count are the clients' own")
    counts = {name: int(records.counts[name]) for name in ("rejected", "refused")}
    return {
        "method": method,
        "dataset": cfg.dataset,
        "seed": cfg.seed,
        "fidelity": cfg.fidelity,
        "accuracy": None,
        "rejected_uploads": counts["rejected"],
        "refused_results": counts["refused"],
        "config": dataclasses.asdict(cfg),
        **payload,
    }


class Nodes:
    """The nodes of a grid: which client each is, and what it says that it has.

    Nodes come and go, and one that was started again has another number: those that are not known are asked
    before every exchange.
    """

    def __init__(self, grid: Grid, cfg: RunConfig, class_names: tuple[str, ...], mine: Facts):
        self.grid, self.cfg, self.class_names, self.mine = grid, cfg, class_names, mine
        self.of_client: dict[int, int] = {}  # client -> node
        self.facts: dict[int, Facts] = {}  # client -> what it said
        self.asked: set[int] = set()
        self.there: set[int] = set()

    def gather(self, wait: float, tasks: int, tell: Callable[[str], None]) -> Int[np.ndarray, "T K"]:
        """Wait for all clients; the rows that each has in each task.

        Raises:
          InputError: for a client that cannot take part, or if one does not come in time.
        """
        end = time.monotonic() + wait
        while True:
            for line in self.refresh(tasks, max(end - time.monotonic(), 1.0)):
                raise InputError(line)
            missing = sorted({*range(self.cfg.clients)} - {*self.of_client})
            if not missing:
                break
            if time.monotonic() > end:
                raise InputError(
                    f"clients: {self.cfg.clients} wanted, and after {wait:g} s {len(missing)} had not come, "
                    f"the first with partition-id {missing[0]}"
                )
            time.sleep(1.0)
        return np.array([self.facts[client].rows for client in range(self.cfg.clients)]).T

    def refresh(self, tasks: int, timeout: float) -> list[str]:
        """Ask all nodes that are not known yet; what is wrong with those that cannot take part."""
        there = self.there = set(self.grid.get_node_ids())
        new = sorted(there - self.asked)
        call = {"class_names": list(self.class_names)}
        ask = [Message(RecordDict({"call": config(call)}), each, HELLO) for each in new]
        wrong = []
        for reply in self.grid.send_and_receive(ask, timeout=timeout) if ask else ():
            if reply.metadata.src_node_id not in there:
                continue  # the SuperLink says that a node is gone
            self.asked.add(reply.metadata.src_node_id)
            try:
                self._take(reply, there, tasks)
            except InputError as error:
                wrong.append(str(error))
        return wrong

    def _take(self, reply: Message, there: set[int], tasks: int) -> None:
        """One more node that can take part."""
        found, sender = _facts(reply), reply.metadata.src_node_id
        node.check_facts(self.mine, found, tasks)
        holder, before = self.of_client.get(found.client), self.facts.get(found.client)
        if holder in there:
            raise InputError(f"partition-id: two nodes say that they are client {found.client}")
        if before and before.rows != found.rows:
            raise InputError(f"client {found.client}: it came back with rows {found.rows}, not {before.rows}")
        images = {each.digests["images"] for each in (*self.facts.values(), found)} - {node.OWN}
        if len(images) > 1:
            raise InputError(f"client {found.client}: its images are not those of the other clients")
        self.of_client[found.client], self.facts[found.client] = sender, found


def _facts(reply: Message) -> Facts:
    """What a node says of itself.

    Raises:
      InputError: if it could not answer, or not in this form.
    """
    if reply.has_error():
        raise InputError(f"a node could not answer: {reply.error.reason}")
    try:
        found = Facts(**json.loads(str(reply.content.config_records["facts"]["json"])))
        plain = [type(found.client) is int, all(type(row) is int for row in found.rows)]
        if not (all(plain) and isinstance(found.settings, dict) and isinstance(found.digests, dict)):
            raise ValueError("its values are of other types")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a node did not say what it has: {error}") from None
    return found


class Link:
    """The clients' part of every exchange, played by nodes. Counts what goes over the wire."""

    def __init__(
        self,
        nodes: Nodes,
        exp: Experiment,
        uploads: tuple[Upload, ...],
        timeout: float,
        tell: Callable[[str], None],
    ):
        self.nodes, self.exp, self.timeout, self.tell = nodes, exp, timeout, tell
        self.uploads = [node.upload_shape(each) for each in uploads]
        self.holds: dict[int, dict[str, str]] = {}  # client -> digests of what it holds of earlier rounds
        self.began: set[int] = set()  # clients that have a state
        self.now: dict[str, int] = {}
        self.total: dict[str, int] = {}

    def take(self) -> dict[str, int]:
        """What was counted since the last time."""
        now, self.now = self.now, {}
        return now

    def _count(self, **counts: int) -> None:
        for tally in (self.now, self.total):
            for name, value in counts.items():
                tally[f"wire_{name}"] = tally.get(f"wire_{name}", 0) + value

    def play(self, exchange: Exchange, states: PyTree) -> Played:
        """`engine.Clients`: ask the nodes of these clients, and receive what they send."""
        for line in self.nodes.refresh(len(self.exp.scenario.tasks), self.timeout):
            self.tell(f"warning: {line}")
        index, round_context, broadcast, partition, ids, key = exchange
        replies = self._replies(index, round_context, broadcast, [int(client) for client in ids], key)
        player = self.exp.engine.players[index]
        accumulator, present = player.empty(), np.array(sorted(replies), np.int64)
        # the order in which one lane plays them: the sums have the same rounding as in a simulation
        for client in sorted(replies, key=lambda client: (-int(partition.count[client]), client)):
            position = int(np.searchsorted(present, client))
            client_context = _ctx(round_context, broadcast, partition, client)
            accumulator = self._receive(index, accumulator, client_context, replies[client], position)
        phases = player.round.program.phases
        steps = sum(int(phase_steps(partition.count[present], phase.view).sum()) for phase in phases)
        self._count(uploads=len(replies), dropped=len(ids) - len(replies))
        return Played(accumulator, states, present, (steps, steps))

    def _replies(
        self,
        index: int,
        round_context: RoundContext,
        broadcast: Broadcast,
        clients: list[int],
        key: PRNGKeyArray,
    ) -> dict[int, RecordDict]:
        """What those clients answer who do. Those that lack something are sent everything once more."""
        call = {
            "index": index,
            "task": int(round_context.task.index),
            "round": int(round_context.round),
            "key": [int(word) for word in jax.random.key_data(key)],
            "rows": self.exp.sizes.examples,
            "merged": self.exp.method.rounds[index].server is not None,
            "class_names": list(self.nodes.class_names),
        }
        payload, cached = to_arrays(broadcast.payload), to_arrays(broadcast.cached)
        found: dict[int, RecordDict] = {}
        for _ in range(2):
            asked = [client for client in clients if client not in found]
            answers = self._ask({c: self._content(c, call, payload, cached) for c in asked})
            for client, content in answers.items():
                if content.config_records["call"].get("lacks"):
                    self.holds.pop(client, None)
                else:
                    found[client], self.holds[client] = content, _digests(cached)
                    self._begun(client, bool(content.config_records["call"].get("fresh")))
            clients = [client for client in answers if client not in found]
        return found

    def _begun(self, client: int, fresh: bool) -> None:
        """A client has worked, from its first state if `fresh`."""
        anew = fresh and client in self.began
        self._count(restarted=int(anew))
        self.began.add(client)
        if anew:
            self.tell(f"warning: client {client} has lost what it kept, and began anew")

    def _content(
        self, client: int, call: dict[str, Any], payload: ArrayRecord, cached: ArrayRecord
    ) -> RecordDict:
        """What one client is sent: of what clients hold only what it does not have yet."""
        digests, has = _digests(cached), self.holds.get(client, {})
        new = ArrayRecord({name: array for name, array in cached.items() if has.get(name) != digests[name]})
        told = config(call | {"cached": list(digests), "digests": list(digests.values())})
        return RecordDict({"payload": payload, "cached": new, "call": told})

    def _ask(self, contents: dict[int, RecordDict]) -> dict[int, RecordDict]:
        """The answers of clients, without those that have none."""
        # who is known to be gone is not waited for
        there, known = self.nodes.there, self.nodes.of_client
        client_of = {known[client]: client for client in contents if known.get(client) in there}
        group = str(self.total.get("wire_uploads", 0))
        asked = [Message(contents[c], place, ROUND, group_id=group) for place, c in client_of.items()]
        self._count(download_bytes=sum(record_bytes(each.content) for each in asked))
        found = {}
        for reply in self.nodes.grid.send_and_receive(asked, timeout=self.timeout) if asked else ():
            client = client_of.get(reply.metadata.src_node_id)  # what the SuperLink says has another source
            if reply.has_error():
                self.tell(f"warning: {_who(client)} dropped out: {one_line(reply.error.reason)}")
            elif client is not None and "call" in reply.content.config_records:
                self._count(upload_bytes=record_bytes(reply.content))
                found[client] = reply.content
        for client in sorted({*contents} - {*found}):
            self.tell(f"warning: client {client} did not answer")
        return found

    def _receive(
        self,
        index: int,
        accumulator: Accumulator,
        client_context: ClientContext,
        content: RecordDict,
        position: int,
    ) -> Accumulator:
        """One more answer. A wrong one is left out and counted, as one that is not finite."""
        player, shape = self.exp.engine.players[index], self.uploads[index]
        try:
            if player.round.server is None:
                return self._add_metrics(accumulator, content)
            if not content.config_records["call"].get("valid"):
                raise InputError("upload: what it made is not finite")
            upload = from_arrays(content.array_records.get("upload", {}), shape, "upload")
            accumulator = self._add_metrics(accumulator, content)
        except InputError as error:
            self.tell(f"warning: the answer of client {int(client_context.client.id)} was left out: {error}")
            return accumulator._replace(rejected=accumulator.rejected + 1)
        return player.receive(accumulator, client_context, upload, np.int32(position))[0]

    def _add_metrics(self, accumulator: Accumulator, content: RecordDict) -> Accumulator:
        told = from_metrics(content.metric_records.get("metrics", {}), accumulator.metrics, "metrics")
        return accumulator._replace(metrics=jax.tree.map(jnp.add, accumulator.metrics, told))


def _who(client: int | None) -> str:
    return "a client" if client is None else f"client {client}"


def _ctx(
    round_context: RoundContext, broadcast: Broadcast, partition: ClientPartition, client: int
) -> ClientContext:
    """What a client could read, as far as the server knows: not how many rows of each class it has."""
    number = lambda value: jnp.asarray(value, jnp.int32)
    info = ClientInfo(
        number(client),
        number(partition.count[client]),
        number(partition.class_examples[client]),
        round_context.round,
    )
    return ClientContext(round_context.frozen, broadcast.payload, broadcast.cached, round_context.task, info)
