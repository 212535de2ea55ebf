"""Run fcljax under Flower (https://flower.ai): a `ClientApp` and a `ServerApp` for any
method, with clients on separate machines or in Flower's simulation.

The server asks every node once which client it is and what data it has ("query.hello"),
and then starts the method's rounds ("train.round"): the broadcast goes down and the
upload comes up as ArrayRecords. The engine does everything in between: what a client
computes, how uploads are aggregated, and what the server does with the result. A
client's state stays in its node's `context.state` and is never sent.
"""

import contextlib
import functools
import hashlib
import json
import secrets
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
from fcljax.bridges.node import Facts, OwnData, Request
from fcljax.bridges.records import (
    config,
    from_arrays,
    from_metrics,
    list_in,
    load_records,
    record_bytes,
    save_records,
    to_arrays,
    to_metrics,
)
from fcljax.config import RunConfig, plain
from fcljax.errors import InputError, one_line
from fcljax.federated.client_loop import Accumulator
from fcljax.federated.engine import Exchange, ExchangeOutcome, Serve
from fcljax.federated.schedule import ClientPartition, phase_examples, phase_steps
from fcljax.methods import find_method
from fcljax.options import whole_number
from fcljax.results.run_folder import write_json
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.folder import check_new, created
from fcljax.runs.records import Clock, Records, json_line
from fcljax.runs.rounds import first_server, make_play_round
from fcljax.runs.software import software
from fcljax.runs.summary import figures_of, summarize, warnings_of
from fcljax.runs.traffic import payload_shapes
from fcljax.terminal import say
from fcljax.types import (
    Broadcast,
    ClientContext,
    ClientInfo,
    Metrics,
    Program,
    PyTree,
    RoundContext,
)

# after the package's modules: records.py says what to do if Flower is not installed
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp import Grid, ServerApp  # isort: skip

HELLO = "query.hello"
ROUND = "train.round"
# Records of a client's context
STATE = "fcljax.state"
CACHED = "fcljax.cached"
OWNER = "fcljax.owner"
# a metric's weight is a sum in float32, which may come out above the number of examples
ROUNDING = 1.01
MAX_FACTS = 1 << 20  # characters of a node's report about itself
HELLO_TIMEOUT = 60.0  # seconds in which a new node must say what it has
_STAMP = ("index", "task", "round", "nonce")  # of a call: an answer has the same
_CLASSES = "classes.png"  # the figure of examples per class and client, which clients do not report

# the part of the run's configuration that only the server reads
_SERVER = ("out", "test", "wait", "timeout", "nodes", "most-examples")
OnRound = Callable[[int, int, PyTree], None]  # (task, round, the server's state)


# ---- the client ------------------------------------------------------------------------


def client_app(method: str | None = None, **settings: Any) -> ClientApp:
    """Return a Flower `ClientApp` that plays one client of a method.

    The node's configuration names the client, by `partition-id`. If the node has
    private data, `data` names a .npz file with x_train and y_train, whose labels number
    the classes of the federation. With `state-dir`, a folder, the client's state
    survives the node; Flower's own context does not.

    Args:
      method: as in `fcljax run METHOD`; None: the run's configuration has it under
        "method".
      settings: those of `fcljax run`, the same on all machines; the run's configuration
        wins.
    """
    app = ClientApp()
    # no local functions: Flower's simulation pickles the app, and functions of a module
    # are pickled by name
    app.query("hello")(functools.partial(_reply, _hello, method, settings))
    app.train("round")(functools.partial(_reply, _round, method, settings))
    return app


class _Client(NamedTuple):
    """One client, and the server's call to it."""

    settings: RunConfig
    id: int
    private: OwnData | None
    call: ConfigRecord


def _reply(
    content: Callable[[_Client, Message, Context], RecordDict],
    method: str | None,
    settings: dict[str, Any],
    message: Message,
    context: Context,
) -> Message:
    # options of the server alone are no settings of `fcljax run`, and would be refused
    options = {name: value for name, value in context.run_config.items() if name not in _SERVER}
    resolved = node.federation_settings(method, settings | options)
    client = node.check_client(resolved, context.node_config.get("partition-id"))
    call = message.content.config_records["call"]
    path = context.node_config.get("data")
    class_names = tuple(map(str, list_in(call, "class_names")))
    private_data = None
    if path is not None:
        private_data = OwnData(client, str(path), class_names)
    return Message(content(_Client(resolved, client, private_data, call), message, context), reply_to=message)


def _hello(client: _Client, message: Message, context: Context) -> RecordDict:
    """Report to the server before the node takes part."""
    report = node.facts(client.settings, client.id, node.load_client(client.settings, client.private))
    return RecordDict({"facts": config({"json": json.dumps(report._asdict())})})


def _round(client: _Client, message: Message, context: Context) -> RecordDict:
    """Play one round of the method; the client's new state goes to the context."""
    exp = node.client_experiment(client.settings, client.private, int(client.call["examples"]))
    stored = _stored(context, client.id)
    content = message.content
    cached = _cached(stored.get(CACHED, {}), content.array_records["cached"], client.call)
    if cached is None:
        # the server then sends everything again; an error would cost the client its round
        return RecordDict({"call": config({"incomplete": True})})
    shape = node.broadcast_shape(exp)
    state = stored.get(STATE)
    payload = from_arrays(content.array_records["payload"], shape.payload, "payload")
    broadcast = Broadcast(payload, from_arrays(cached, shape.cached, "cached"))
    # told to the server: a restarted node without a file has lost its state of earlier
    # tasks
    fresh = state is None
    state = node.first_state(exp, client.id) if fresh else from_arrays(state, node.state_shape(exp), "state")
    work = node.client_work(exp, client.id, _request(client.call), broadcast, state)
    _store(context, client.id, {STATE: to_arrays(work.state), CACHED: cached})
    valid = bool(work.valid)
    # the server rejects an upload that is not finite, and reads none where it merges
    # nothing, so these stay empty
    upload = ArrayRecord()
    if valid and client.call["aggregated"]:
        upload = to_arrays(work.upload)
    stamp = {name: client.call[name] for name in _STAMP}
    answer = config({"incomplete": False, "valid": valid, "fresh": fresh, **stamp})
    return RecordDict({"upload": upload, "metrics": to_metrics(work.metrics), "call": answer})


def _request(call: ConfigRecord) -> Request:
    key = jax.random.wrap_key_data(jnp.asarray(list_in(call, "key"), jnp.uint32))
    return Request(int(call["index"]), int(call["task"]), int(call["round"]), key)


def _cached(
    stored: Mapping[str, Array],
    received: ArrayRecord,
    call: ConfigRecord,
) -> ArrayRecord | None:
    """Return the cached part of earlier broadcasts, from the node's arrays and from
    those that were sent; None: an array is missing, or does not have the digest that
    the server expects."""
    expected = dict(zip(list_in(call, "cached"), list_in(call, "digests"), strict=True))
    # the digests decide, not the names: an array kept since an earlier round may have
    # changed on the server meanwhile
    both = {**stored, **received}
    cached = ArrayRecord({name: both[name] for name in expected if name in both})
    if _digests(cached) == expected:
        return cached
    return None


def _digests(arrays: ArrayRecord) -> dict[str, str]:
    """Compute the sha256 of the type, shape and bytes of each array, by name."""
    return {
        name: hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.data).hexdigest()
        for name, array in arrays.items()
    }


# ---- the state of a client -------------------------------------------------------------


def _stored(context: Context, client: int) -> dict[str, Any]:
    """Return the stored records of this client in this run, from the node's context,
    else from its file."""
    records = {name: context.state[name] for name in (STATE, CACHED, OWNER) if name in context.state}
    # a node outlives a run, and its context may hold the state of an earlier one
    if OWNER in records and dict(records[OWNER]) == _owner(context, client):
        return records
    path = _state_file(context, client)
    if path:
        return load_records(path)
    return {}


def _store(context: Context, client: int, records: dict[str, ArrayRecord]) -> None:
    for name, value in records.items():
        context.state[name] = value
    context.state[OWNER] = config(_owner(context, client))
    path = _state_file(context, client)
    if path:
        save_records(path, records)


def _owner(context: Context, client: int) -> dict[str, Any]:
    """Return the owner of a state: a node's context may survive from one run to the
    next."""
    return {"run": str(context.run_id), "client": client}


def _state_file(context: Context, client: int) -> Path | None:
    folder = context.node_config.get("state-dir")
    if folder is None:
        return None
    return Path(str(folder)) / f"run-{context.run_id}-client-{client}.npz"


# ---- the server ------------------------------------------------------------------------


class Service(NamedTuple):
    """The server's files, and how long it waits; as in `server_app`."""

    out: str | None
    test: str | None
    wait: float
    timeout: float
    nodes: str | None = None
    most_examples: int | None = None


def server_app(
    method: str | None = None,
    out: str | None = None,
    test: str | None = None,
    wait: float = 600.0,
    timeout: float = 3600.0,
    nodes: str | None = None,
    most_examples: int | None = None,
    on_round: OnRound | None = None,
    **settings: Any,
) -> ServerApp:
    """Return a Flower `ServerApp` that plays the server of a method, and leaves a run
    directory as `fcljax run` does, without checkpoints.

    Args:
      method: as in `fcljax run METHOD`; None: the run's configuration has it under
        "method".
      out: the run directory, a new one; None: the run's configuration has it, or
        nothing is written.
      test: a .npz file with x_test and y_test (and class_names); None: the test images
        of the settings' data set, of whose training images none is kept.
      wait: seconds in which all clients must have connected.
      timeout: seconds in which a client must answer in a round; otherwise it has
        dropped out of the round.
      nodes: the numbers of the nodes that may take part, separated by commas: first
        that of client 0, then of client 1, and so on. With authentication of nodes,
        Flower gives each registered key one number, so that a client is bound to a key.
        None: any connected node may be a client.
      most_examples: the most examples in a task that a client with data of its own may
        say that it has, on which its weight depends. Other clients have what the
        settings' partition assigns to them. None: any number, with a warning.
      on_round: called after every round, with task, round and the server's state.
      settings: those of `fcljax run`, the same on all machines; the run's configuration
        wins.
    """
    app = ServerApp()
    usual = Service(out, test, wait, timeout, nodes, most_examples)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        service_options = {
            name.replace("-", "_"): value for name, value in context.run_config.items() if name in _SERVER
        }
        options = {name: value for name, value in context.run_config.items() if name not in _SERVER}
        serve(
            grid,
            node.federation_settings(method, settings | options),
            usual._replace(**service_options),
            on_round,
        )

    return app


def serve(
    grid: Grid, settings: RunConfig, service: Service, on_round: OnRound | None = None
) -> dict[str, Any]:
    """Play all rounds of all tasks with the clients of a grid. Returns the content of
    summary.json.

    Raises:
      InputError: for bad settings or files, or if not all clients connect.
    """
    out = None
    if service.out:
        out = Path(service.out)
    console = Console(stderr=True)

    def say_line(line: str) -> None:
        say(console, line)

    if out:
        check_new(out)
    # it holds back a part of the training images, of which the server knows nothing
    if settings.stop_when_flat:
        raise InputError("stop_when_flat: nodes train on all of their examples; leave it out")
    bound = numbers_of_nodes(service.nodes, settings.clients)
    inputs, assigned = node.load_server(settings, service.test)
    facts = node.server_facts(settings, inputs, service.test)
    nodes = Nodes(
        grid,
        settings.clients,
        inputs.dataset.class_names,
        facts,
        say_line,
        bound,
        assigned,
        service.most_examples,
    )
    # a joint method has one task, whatever the settings say
    tasks = settings.tasks
    if find_method(settings.source).joint:
        tasks = 1
    exp = node.server_experiment(settings, inputs, nodes.gather(service.wait, tasks))
    link = Link(nodes, exp, service.timeout, say_line)
    records = Records()
    # only now, when all clients have connected: a federation that never starts leaves no
    # folder behind
    with created(out, settings) if out else contextlib.nullcontext():
        _play(exp, records, link, out, on_round)
        summary = _summary(exp, records, link)
        if out:
            write_json(out / "summary.json", summary)
            for name, draw in figures_of(exp, summary).items() if summary["accuracy"] else ():
                # clients report numbers of examples, not classes
                if name != _CLASSES:
                    draw(out / "figures" / name)
    for line in warnings_of(records, exp.settings):
        say_line(line)
    return summary


def _play(
    exp: Experiment,
    records: Records,
    link: "Link",
    out: Path | None,
    on_round: OnRound | None,
) -> None:
    """Play and log all rounds."""
    # () in place of the clients' states, which stay on their nodes
    state = State(first_server(exp), (), jax.random.key_data(exp.key))
    past = ()
    with Clock(records.seconds) as clock:
        play_round = make_play_round(exp, records, clock, link.play)
        for step in range(exp.sizes.tasks * exp.sizes.rounds):
            state, replay, line, _ = play_round(exp, state, past, step)
            if replay is not None:
                past += (replay,)
            line |= link.counted()
            # opened for each line, so that a server that is killed has written all lines
            if out:
                with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json_line(line))
            if on_round:
                on_round(*divmod(step, exp.sizes.rounds), state.server)


def _summary(exp: Experiment, records: Records, link: "Link") -> dict[str, Any]:
    """Return the content of summary.json: as of a run, without what only clients know,
    and with the traffic. A method of personal models has no accuracies: the server
    cannot evaluate them."""
    if not exp.method.personal:
        return summarize(exp, records, None) | {"client_accuracy": None, "traffic": dict(link.total)}
    link.say("warning: no accuracy was measured, because each client has a personal model")
    return {
        "method": exp.settings.method,
        "dataset": exp.settings.dataset,
        "seed": exp.settings.seed,
        "fidelity": exp.settings.fidelity,
        "accuracy": None,
        "rejected_uploads": int(records.counts["rejected"]),
        "refused_results": int(records.counts["refused"]),
        "software": software(),
        "config": plain(exp.settings),
        "traffic": dict(link.total),
    }


def numbers_of_nodes(text: str | None, clients: int) -> dict[int, int]:
    """Return the one client that each node may be, by the node's number; empty if any
    node may be any.

    Raises:
      InputError: for anything else than a different number for each client.
    """
    if text is None:
        return {}
    numbers = [whole_number(part) for part in str(text).split(",")]
    nodes = [number for number in numbers if number is not None]
    if len(nodes) < len(numbers):
        raise InputError(f"nodes: {text!r} is not a list of numbers, such as '815,4711'")
    if len(nodes) != clients or len({*nodes}) != clients:
        raise InputError(f"nodes: {len(nodes)} given, of which {len({*nodes})} differ; expected {clients}")
    return {node: client for client, node in enumerate(nodes)}


class Nodes:
    """Nodes of a grid: which client each is, and what data it has.

    Nodes come and go, and a restarted node has another number: unknown nodes are asked
    before every exchange, once, so that a silent one delays one exchange by a minute.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        class_names: tuple[str, ...],
        server: Facts,
        say: Callable[[str], None],
        bound: Mapping[int, int] | None = None,
        assigned: list[list[int]] | None = None,
        most_examples: int | None = None,
    ):
        self.bound = bound or {}
        self.assigned = assigned
        self.most_examples = most_examples
        self.grid = grid
        self.clients = clients
        self.class_names = class_names
        self.server = server
        self.say = say
        self.of_client: dict[int, int] = {}  # client -> node
        self.facts: dict[int, Facts] = {}  # of each client
        self.asked: set[int] = set()  # nodes
        self.silent: set[int] = set()  # nodes that did not answer
        self.connected: set[int] = set()  # nodes

    def gather(self, wait: float, tasks: int) -> Int[np.ndarray, "T K"]:
        """Wait for all clients. Returns how many examples each has in each task. Nodes
        that cannot take part are named, and the others are waited for.

        Raises:
          InputError: if a client does not connect in time, with the first node that
            could not take part.
        """
        end = time.monotonic() + wait
        refused = []
        while True:
            # a node that did not answer in time may have been loading its data: as long
            # as clients are missing it is asked again
            self.asked -= self.silent
            for line in self.refresh(tasks, max(end - time.monotonic(), 1.0)):
                refused.append(line)
                self.say(f"warning: a node is refused: {line}")
            missing = sorted({*range(self.clients)} - {*self.of_client})
            if not missing:
                break
            if time.monotonic() > end:
                refusal = ""
                if refused:
                    refusal = f"; refused: {refused[0]}"
                raise InputError(
                    f"clients: {self.clients} wanted, and after {wait:g} s {len(missing)} had not connected, "
                    f"the first with partition-id {missing[0]}{refusal}"
                )
            time.sleep(1.0)
        return np.array([self.facts[client].examples for client in range(self.clients)]).T

    def refresh(self, tasks: int, timeout: float) -> list[str]:
        """Ask all unknown nodes. Returns a line for each that cannot take part."""
        connected = self.connected = set(self.grid.get_node_ids())
        # where nodes are bound to clients, other nodes are not even asked
        strangers = set()
        if self.bound:
            strangers = connected - self.asked - {*self.bound}
        self.asked |= strangers
        new = sorted(connected - self.asked)
        call = {"class_names": list(self.class_names)}
        messages = [Message(RecordDict({"call": config(call)}), node_id, HELLO) for node_id in new]
        refusals = [f"nodes: node {node_id} may not take part" for node_id in sorted(strangers)]
        seconds = min(timeout, HELLO_TIMEOUT)
        self.asked |= {*new}
        waiting = {*new}
        replies = ()
        if messages:
            replies = self.grid.send_and_receive(messages, timeout=seconds)
        for reply in replies:
            # for a node that is gone Flower's SuperLink answers, under its own number
            if reply.metadata.src_node_id not in connected:
                continue
            waiting.discard(reply.metadata.src_node_id)
            try:
                self._add(reply, tasks)
            except InputError as error:
                refusals.append(str(error))
        # told once, not every time that a silent node is asked again
        for node_id in sorted(waiting - self.silent):
            refusals.append(f"nodes: node {node_id} did not say within {seconds:g} s which client it is")
        self.silent -= {*new} - waiting
        self.silent |= waiting
        return refusals

    def _add(self, reply: Message, tasks: int) -> None:
        """Add a node that can take part."""
        facts = _facts(reply)
        sender = reply.metadata.src_node_id
        node.check_facts(self.server, facts, tasks)
        node.check_examples(facts, self.assigned, self.most_examples)
        if self.bound and self.bound[sender] != facts.client:
            raise InputError(
                f"partition-id: node {sender} says that it is client {facts.client}; it is client "
                f"{self.bound[sender]}"
            )
        other_node = self.of_client.get(facts.client)
        previous = self.facts.get(facts.client)
        # a restarted node has another number: the client's old node must be gone
        if other_node in self.connected:
            raise InputError(f"partition-id: two nodes say that they are client {facts.client}")
        if previous and previous.examples != facts.examples:
            raise InputError(
                f"client {facts.client}: it came back with {facts.examples} examples per task, not "
                f"{previous.examples}"
            )
        reports = (*self.facts.values(), facts)
        # With test images of its own the server has no digest to compare with, so clients
        # are compared with each other. Private images differ by nature.
        images = {report.digests["images"] for report in reports} - {node.OWN}
        if len(images) > 1:
            raise InputError(f"client {facts.client}: its images are not those of the other clients")
        self.of_client[facts.client], self.facts[facts.client] = sender, facts
        if facts.digests["images"] == node.OWN and self.most_examples is None and not previous:
            self.say(
                f"warning: client {facts.client} has data of its own, and says itself how many examples: "
                f"{facts.examples}; most-examples limits the number"
            )


def _facts(reply: Message) -> Facts:
    """Parse a node's report about itself.

    Raises:
      InputError: if it could not answer, or not in this form.
    """
    if reply.has_error():
        raise InputError(f"a node could not answer: {reply.error.reason}")
    try:
        text = str(reply.content.config_records["facts"]["json"])
        if len(text) > MAX_FACTS:
            raise ValueError(f"it has {len(text):,} characters, more than {MAX_FACTS:,}")
        facts = Facts(**json.loads(text))
        has_integers = type(facts.client) is int and all(type(count) is int for count in facts.examples)
        has_texts = all(isinstance(digest, str) for digest in facts.digests.values())
        if not (has_integers and has_texts and isinstance(facts.settings, dict)):
            raise ValueError("its values are of other types")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"a node did not report what it has: {error}") from None
    return facts


class Answer(NamedTuple):
    """Answer of a client, and the call that it answers."""

    call: dict[str, Any]  # as it was sent to the client
    content: RecordDict


class Link:
    """Play the clients' part of every exchange on nodes, and count the traffic."""

    def __init__(
        self,
        nodes: Nodes,
        exp: Experiment,
        timeout: float,
        say: Callable[[str], None],
    ):
        self.nodes = nodes
        self.exp = exp
        self.timeout = timeout
        self.say = say
        self.uploads = [node.upload_shape(upload) for upload in payload_shapes(exp).uploads]
        self.cached: dict[int, dict[str, str]] = {}  # client -> digests of its arrays of earlier broadcasts
        self.begun: set[int] = set()  # clients that have a state
        self.now: dict[str, int] = {}
        self.total: dict[str, int] = {}

    def counted(self) -> dict[str, int]:
        """Return the traffic since the last call, for a line of metrics.jsonl."""
        now = self.now
        self.now = {}
        return {f"traffic_{name}": value for name, value in now.items()}

    def _count(self, **counts: int) -> None:
        for tally in (self.now, self.total):
            for name, value in counts.items():
                tally[name] = tally.get(name, 0) + value

    def play(self, exchange: Exchange, states: PyTree, serve: Serve) -> ExchangeOutcome:
        """`engine.Clients`: ask the nodes of these clients, and receive their uploads."""
        for line in self.nodes.refresh(len(self.exp.scenario.tasks), self.timeout):
            self.say(f"warning: {line}")
        index, round_context, broadcast, partition, ids, key = exchange
        call = self._call(index, round_context, key)
        replies = self._replies(call, broadcast, [int(client) for client in ids])
        player = self.exp.engine.players[index]
        accumulator = player.empty()
        present = np.array(sorted(replies), np.int64)
        # not as they arrive but in the order in which one lane plays them: sums of floats
        # depend on it, and these are to be those of a simulation
        for client in sorted(replies, key=lambda client: (-int(partition.count[client]), client)):
            position = int(np.searchsorted(present, client))
            context = _client_context(round_context, broadcast, partition, client)
            accumulator = self._receive(accumulator, context, replies[client], position)
        phases = player.round.program.phases
        steps = sum(int(phase_steps(partition.count[present], phase.view).sum()) for phase in phases)
        self._count(uploads=len(replies), dropped=len(ids) - len(replies))
        return ExchangeOutcome(accumulator, states, serve(accumulator), present, (steps, steps))

    def _call(
        self,
        index: int,
        round_context: RoundContext,
        key: PRNGKeyArray,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "task": int(round_context.task.index),
            "round": int(round_context.round),
            "key": [int(word) for word in jax.random.key_data(key)],
            "examples": self.exp.sizes.examples,
            "aggregated": self.exp.method.rounds[index].server is not None,
            "class_names": list(self.nodes.class_names),
        }

    def _replies(
        self,
        call: dict[str, Any],
        broadcast: Broadcast,
        clients: list[int],
    ) -> dict[int, Answer]:
        """Collect the answers of those clients that answer. A client that lacks an
        array is sent everything again. Each call has a nonce, which the answer must
        repeat."""
        payload = to_arrays(broadcast.payload)
        cached = to_arrays(broadcast.cached)
        replies = {}
        # twice: those that lacked an array get everything in the second pass
        for _ in range(2):
            # an answer to an earlier call must not count for this one
            calls = {client: call | {"nonce": secrets.token_hex(16)} for client in clients}
            contents = {
                client: self._content(client, client_call, payload, cached)
                for client, client_call in calls.items()
            }
            answers = self._ask(contents)
            for client, content in answers.items():
                if content.config_records["call"].get("incomplete"):
                    self.cached.pop(client, None)
                else:
                    replies[client] = Answer(calls[client], content)
                    self.cached[client] = _digests(cached)
                    self._begin(client, bool(content.config_records["call"].get("fresh")))
            clients = [client for client in answers if client not in replies]
        for client in clients:
            self.say(f"warning: client {client} still lacks its cached payload; it dropped out")
        return replies

    def _begin(self, client: int, fresh: bool) -> None:
        """Note that a client has worked, from its first state if `fresh`."""
        restarted = fresh and client in self.begun
        # counted and told, because without its old state a client computes something else
        self._count(restarted=int(restarted))
        self.begun.add(client)
        if restarted:
            self.say(f"warning: client {client} has lost its state and started again")

    def _content(
        self, client: int, call: dict[str, Any], payload: ArrayRecord, cached: ArrayRecord
    ) -> RecordDict:
        """Return the message to a client: of cached arrays only those that it does not
        have yet."""
        digests = _digests(cached)
        known_digests = self.cached.get(client, {})
        missing = ArrayRecord(
            {name: array for name, array in cached.items() if known_digests.get(name) != digests[name]}
        )
        full_call = config(call | {"cached": list(digests), "digests": list(digests.values())})
        return RecordDict({"payload": payload, "cached": missing, "call": full_call})

    def _ask(self, contents: dict[int, RecordDict]) -> dict[int, RecordDict]:
        """Send the contents and return the answers of those clients that answer."""
        # Flower would wait until the timeout for nodes that are gone, so they are left
        # out
        connected = self.nodes.connected
        node_of = self.nodes.of_client
        # the other way round too, since a reply names its node
        client_of = {node_of[client]: client for client in contents if node_of.get(client) in connected}
        group = str(self.total.get("uploads", 0))
        messages = [
            Message(contents[client], node_id, ROUND, group_id=group) for node_id, client in client_of.items()
        ]
        self._count(download_bytes=sum(record_bytes(message.content) for message in messages))
        answers = {}
        replies = ()
        if messages:
            replies = self.nodes.grid.send_and_receive(messages, timeout=self.timeout)
        for reply in replies:
            # None in a report of the SuperLink, which answers for nodes that are gone
            client = client_of.get(reply.metadata.src_node_id)
            if reply.has_error():
                sender = "a client"
                if client is not None:
                    sender = f"client {client}"
                self.say(f"warning: {sender} dropped out: {one_line(reply.error.reason)}")
            elif client is not None and "call" in reply.content.config_records:
                self._count(upload_bytes=record_bytes(reply.content))
                answers[client] = reply.content
        for client in sorted({*contents} - {*answers}):
            self.say(f"warning: client {client} did not answer")
        return answers

    def _receive(
        self,
        accumulator: Accumulator,
        context: ClientContext,
        answer: Answer,
        position: int,
    ) -> Accumulator:
        """Add an answer. A wrong one is left out and counted, as one that is not
        finite."""
        index = answer.call["index"]
        player = self.exp.engine.players[index]
        # all checks before the first sum: a wrong answer leaves the accumulator as it was
        try:
            _check_stamp(answer)
            metrics = _metrics(player.round.program, accumulator, context, answer.content)
            updated = accumulator._replace(metrics=jax.tree.map(jnp.add, accumulator.metrics, metrics))
            if player.round.server is None:
                return updated
            if not answer.content.config_records["call"].get("valid"):
                raise InputError("upload: it is not finite")
            records = answer.content.array_records.get("upload", ArrayRecord())
            upload = from_arrays(records, self.uploads[index], "upload")
        except InputError as error:
            self.say(f"warning: the answer of client {int(context.client.id)} was left out: {error}")
            return accumulator._replace(rejected=accumulator.rejected + 1)
        return player.receive(updated, context, upload, np.int32(position))[0]


def _check_stamp(answer: Answer) -> None:
    """Check that an answer belongs to its call: one to an earlier call, sent again,
    never counts. Equal uploads are no replay: where nothing is random, an honest client
    sends the same bits in every round.

    Raises:
      InputError: naming what differs.
    """
    stamp = answer.content.config_records["call"]
    for name in _STAMP:
        if stamp.get(name) != answer.call[name]:
            raise InputError(f"upload: its {name} is {stamp.get(name)!r}, not {answer.call[name]!r}")


def _metrics(
    program: Program,
    accumulator: Accumulator,
    context: ClientContext,
    content: RecordDict,
) -> tuple[Metrics, ...]:
    """Return the metrics of an answer, none of which may be over more examples than the
    client reads.

    Raises:
      InputError: naming the metric.
    """
    metrics = from_metrics(content.metric_records.get("metrics", {}), accumulator.metrics, "metrics")
    for phase, by_name in zip(program.phases, metrics, strict=True):
        examples = phase_examples(np.asarray(context.client.examples), phase.view)
        for name, metric in by_name.items():
            if not 0 <= metric.weight <= ROUNDING * examples:
                raise InputError(
                    f"metrics: {name} is over {float(metric.weight):g} examples; the client reads {examples}"
                )
    return metrics


def _client_context(
    round_context: RoundContext,
    broadcast: Broadcast,
    partition: ClientPartition,
    client: int,
) -> ClientContext:
    """Return a client's context as far as the server knows it: not how many examples of
    each class it has."""
    examples = jnp.asarray(partition.count[client], jnp.int32)
    by_class = jnp.asarray(partition.class_examples[client], jnp.int32)
    info = ClientInfo(jnp.asarray(client, jnp.int32), examples, by_class, round_context.round)
    return ClientContext(round_context.frozen, broadcast.payload, broadcast.cached, round_context.task, info)
