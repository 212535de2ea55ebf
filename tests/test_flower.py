"""Flower's clients and servers do what the simulation does: the same numbers, checked messages, and clients
that go and come back."""

import importlib.util
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

pytest.importorskip("flwr")
pytestmark = pytest.mark.filterwarnings("ignore")  # Flower's and Ray's own

import flower_machines  # noqa: E402
from flwr.app import Array, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402

from fcljax.bridges import flower, node  # noqa: E402
from fcljax.bridges.flower import (  # noqa: E402
    HELLO,
    Nodes,
    client_app,
    numbers_of_nodes,
    server_app,
)
from fcljax.bridges.records import (  # noqa: E402
    config,
    from_arrays,
    from_metrics,
    load_records,
    record_bytes,
    save_records,
    to_arrays,
    to_metrics,
)
from fcljax.errors import InputError  # noqa: E402
from fcljax.federated.client_loop import Shapes, empty_accumulator  # noqa: E402
from fcljax.federated.schedule import Capacity  # noqa: E402
from fcljax.runs import resume  # noqa: E402
from fcljax.types import ClientContext, ClientInfo, Phase, Program, Upload, View, Weighted  # noqa: E402

TINY = dict(tasks=2, clients=3, rounds=2, epochs=1, image_size=8, batch_size=64)
TREE = {
    "half": jnp.asarray([1.0, -0.0, jnp.inf], jnp.bfloat16),
    "pair": (jnp.float32(2.5), np.array([[True], [False]])),
    "key": jax.random.key(3),
    "none": jnp.zeros((0, 3), jnp.int8),
}


def beside():
    path = small_runs.ROOT / "experiments" / "flower_beside_simulation.py"
    spec = importlib.util.spec_from_file_location("flower_beside_simulation", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- records -----------------------------------------------------------------------------------------------


def same_bits(a, b):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert plain(x).tobytes() == plain(y).tobytes()


def test_trees_come_back_bit_for_bit_with_their_types():
    record = to_arrays(TREE)
    found = from_arrays(record, jax.eval_shape(lambda: TREE), "tree")
    assert jax.tree.structure(found) == jax.tree.structure(TREE)
    same_bits(found, TREE)
    np.testing.assert_array_equal(record["['pair'][1]"].numpy(), TREE["pair"][1])  # Flower reads it, too


def test_trees_come_back_from_a_file(tmp_path):
    save_records(tmp_path / "deep" / "state.npz", {"a": to_arrays(TREE), "b": to_arrays(())})
    found = load_records(tmp_path / "deep" / "state.npz")
    same_bits(from_arrays(found["a"], TREE, "tree"), TREE)
    assert dict(found["b"]) == {}
    assert load_records(tmp_path / "other.npz") == {}
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(
        InputError,
        match="bad.npz' is damaged: .*pickled objects, which are never read; remove it to start again",
    ):
        load_records(tmp_path / "bad.npz")


def replaced(**fields):
    """The record with another first array."""
    record = to_arrays(TREE)
    plain = record["['half']"]
    usual = {"dtype": plain.dtype, "shape": plain.shape, "stype": plain.stype, "data": plain.data}
    record["['half']"] = Array(**(usual | fields))
    return record


BAD = {
    "half'] is missing": lambda: to_arrays({name: leaf for name, leaf in TREE.items() if name != "half"}),
    "unknown array \"['hall']\"; did you mean \"['half']\"": lambda: to_arrays(TREE | {"hall": jnp.ones(1)}),
    "half'] is 'float32'; expected 'bfloat16'": lambda: to_arrays(TREE | {"half": jnp.ones(3)}),
    "half'] has shape [2]; expected [3]": lambda: to_arrays(TREE | {"half": jnp.ones(2, jnp.bfloat16)}),
    "half'] is damaged: it holds uint16 of shape [2]": lambda: replaced(
        data=to_arrays({"half": jnp.ones(2, jnp.bfloat16)})["['half']"].data
    ),
    "half'] is damaged: it is not in numpy format": lambda: replaced(stype="pickle"),
    "half'] is damaged": lambda: replaced(data=b"\x93NUMPY\x01\x00"),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_record_is_refused_by_name(words):
    with pytest.raises(InputError, match=re.escape(words)):
        from_arrays(BAD[words](), TREE, "upload")


def test_metrics_are_finite_numbers_by_name():
    metrics = ({"loss": (jnp.float32(0.1), jnp.float32(3))},)
    same_bits(from_metrics(to_metrics(metrics), metrics, "metrics"), metrics)
    with pytest.raises(InputError, match="is nan; expected a finite number"):
        from_metrics(to_metrics(({"loss": (jnp.float32(jnp.nan), jnp.float32(3))},)), metrics, "metrics")


def test_pieces_that_are_alike_are_counted_once():
    one, two = to_arrays({"a": jnp.ones(1000)}), to_arrays({"a": jnp.ones(1000), "b": jnp.ones(1000)})
    first, second = record_bytes(RecordDict({"x": one})), record_bytes(RecordDict({"x": two}))
    assert 4000 < first < second < first + 500


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"partition": "sampled"},
            "partition: 'sampled' clients are drawn from all.*nearest: 'task_dirichlet'",
        ),
        ({"population": "redrawn"}, "population: 'redrawn' assigns all examples anew.*nearest: 'static'"),
        (
            {"partition": "private", "task_pool": "order"},
            "task_pool: 'order' makes the tasks from",
        ),
        ({"lanes": 2}, "lanes: 2 is for simulations.*nearest: 0"),
        ({"method": "ewc"}, "method: 'ewc' given; name one method"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused_by_name(settings, words):
    with pytest.raises(InputError, match=words):
        node.federation_settings("linear", settings)


def test_machines_compare_the_number_format_in_which_they_compute(monkeypatch):
    server = node.federation_settings("linear", {})
    assert server.dtype == "float32"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    client = node.federation_settings("linear", {})
    assert client.dtype == "bfloat16" and node.federation_settings("linear", {"dtype": "float32"}) == server
    facts = [node.Facts(0, [5], resume.plain_settings(each), {}) for each in (server, client)]
    words = "dtype ('bfloat16', not 'float32'); give all machines the same dtype"
    with pytest.raises(InputError, match=re.escape(words)):
        node.check_facts(facts[0], facts[1], 1)


# ---- answers -----------------------------------------------------------------------------------------------

CALL = {"index": 0, "task": 1, "round": 2, "nonce": "5f"}


def test_an_answer_has_the_stamp_of_its_call():
    def check(said):
        flower._check_stamp(flower.Answer(CALL, RecordDict({"call": config(said)})))

    check(CALL)
    for said in (*(CALL | {name: 7} for name in CALL), {**CALL, "nonce": "5e"}, {"index": 0}):
        with pytest.raises(InputError, match="^upload: its (index|task|round|nonce) is "):
            check(said)


@pytest.mark.parametrize(("weight", "replay", "good"), [(20, 0, True), (21, 0, False), (38, 3, True)])
def test_metrics_are_over_no_more_examples_than_the_client_reads(weight, replay, good):
    """10 examples, twice, in 6 batches of at most 4."""
    phase = Phase(View(epochs=2, batch_size=4, replay=replay), lambda *_: ({}, {}))
    client = ClientInfo(jnp.int32(0), jnp.int32(10), jnp.zeros(3, jnp.int32), jnp.int32(0))
    context, program = ClientContext((), (), (), (), client), Program(lambda *_: {}, (phase,), lambda *_: ())
    empty = empty_accumulator(
        Shapes((), Upload(), ({"loss": Weighted(jnp.float32(0), jnp.float32(0))},), (), ()),
        Capacity(1, 1, 1, 1, (1,), ((4,),)),
        1,
    )

    def check(weight):
        said = ({"loss": Weighted(jnp.float32(1), jnp.float32(weight))},)
        return flower._metrics(program, empty, context, RecordDict({"metrics": to_metrics(said)}))

    if good:
        assert check(weight)[0]["loss"].weight == weight
    for wrong in (-1, 1e30, *(() if good else (weight,))):
        with pytest.raises(InputError, match="^metrics: loss is over .* examples; the client reads"):
            check(wrong)


# ---- a grid in this process --------------------------------------------------------------------------------


class Here(Grid):
    """Nodes that answer at once. `answers(node, reply)` may change a reply, or leave it out by None."""

    def __init__(self, app, configs, answers=lambda place, reply: reply):
        self.app, self.answers = app, answers
        self.contexts = {
            100 + i: Context(1, 100 + i, config, RecordDict(), {}) for i, config in enumerate(configs)
        }

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = [self.one(each) for each in messages]
        return [each for each in replies if each is not None]

    def one(self, message):
        place = message.metadata.dst_node_id
        reply = self.app(message, self.contexts[place])
        return reply if message.metadata.message_type == HELLO else self.answers(place, reply)

    def refuse(self, *args, **kwargs):
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = refuse
    run = property(refuse)


@pytest.fixture
def identity(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("node_id", "run_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def run_here(grid, out, method="linear", **settings):
    server_app(method, str(out), wait=1.0, **settings)(grid, Context(1, 1, {}, RecordDict(), {}))
    return json.loads((out / "summary.json").read_text())


@pytest.mark.long
def test_wrong_and_missing_uploads_are_left_out_and_counted(identity, tmp_path):
    seen = []

    def answers(place, reply):
        """Client 0 sends a NaN the first time, then an array of another shape; client 1 drops out once."""
        seen.append(place)
        number = seen.count(place)
        if place == 101 and number == 2:
            return None
        if place == 100 and number <= 2:
            arrays = reply.content["upload"]
            name = next(name for name in arrays if "classifier" in name)
            bad = np.array(arrays[name].numpy())
            bad = np.full_like(bad, np.nan) if number == 1 else bad[:1]
            arrays[name] = Array(bad)
        return reply

    grid = Here(client_app("linear", **TINY), [{"partition-id": i} for i in range(3)], answers)
    summary = run_here(grid, tmp_path / "out", **TINY)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rejected"] for line in lines] == [1, 1, 0, 0]
    assert [line["participants"] for line in lines] == [3, 2, 3, 3]
    assert [line["traffic_dropped"] for line in lines] == [0, 1, 0, 0]
    assert summary["rejected_uploads"] == 2
    assert np.isfinite(summary["A_last"])


@pytest.mark.long
def test_the_server_needs_no_training_images_where_clients_have_their_own(identity, tmp_path):
    rng = np.random.default_rng(0)
    image = lambda n: rng.integers(0, 256, (n, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "test.npz", x_test=image(40), y_test=np.arange(40) % 4)
    paths = [tmp_path / f"{i}.npz" for i in range(3)]
    for i, path in enumerate(paths):  # client 2 has rows of the last classes alone
        label = np.arange(20 + i) % 4 if i < 2 else 2 + np.arange(7) % 2
        np.savez(path, x_train=image(len(label)), y_train=label)
    settings = TINY | {"dataset": "npz:nowhere.npz", "class_order": "natural", "augment": False}
    grid = Here(
        client_app("linear", **settings), [{"partition-id": i, "data": str(p)} for i, p in enumerate(paths)]
    )
    summary = run_here(grid, tmp_path / "out", test=str(tmp_path / "test.npz"), **settings)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in lines] == [2, 2, 3, 3]
    assert len(summary["class_accuracy"]) == 4


@pytest.mark.long
def test_a_client_with_other_settings_is_refused_by_name(identity, tmp_path):
    grid = Here(client_app("linear", **TINY | {"lr": 0.5}), [{"partition-id": i} for i in range(3)])
    with pytest.raises(InputError, match=r"client 0: it has other settings: lr \(0.5, not 0.01\)"):
        run_here(grid, tmp_path / "out", **TINY)
    grid = Here(client_app("linear", **TINY), [{"partition-id": 1}, {"partition-id": 1}])
    with pytest.raises(InputError, match="partition-id: two nodes say that they are client 1"):
        run_here(grid, tmp_path / "out", **TINY)
    grid = Here(client_app("linear", **TINY), [{"partition-id": 0}])
    with pytest.raises(InputError, match="3 wanted.*2 had not connected, the first with partition-id 1"):
        run_here(grid, tmp_path / "out", **TINY)
    assert not (tmp_path / "out").exists()


class Lying(Here):
    """A fourth node says that it has 1e18 examples, a fifth that it is a client that there is already. Client
    2 answers once with an upload of another round. Client 0 lacks, from its fourth answer on, what it is
    sent. Client 1 answers in the second and third round with its first answer, which is that of another
    round, and then of another task."""

    lied, asked = False, 0

    def one(self, message):
        place, reply = message.metadata.dst_node_id, super().one(message)
        records = reply.content.config_records
        if "call" in records and place == 101:
            self.sent.append(reply.content)
            if len(self.sent) in (2, 3):
                return Message(self.sent[0], reply_to=message)
        if "facts" in records and place == 103:
            facts = json.loads(str(records["facts"]["json"]))
            records["facts"]["json"] = json.dumps(facts | {"examples": [10**18, 1]})
        if "call" in records and place == 100:
            self.asked += 1
            records["call"]["incomplete"] = self.asked > 3
        if "call" in records and place == 102 and not self.lied:
            records["call"]["round"], self.lied = 7, True
        return reply


@pytest.mark.long
def test_a_node_that_cannot_take_part_is_named_and_the_others_go_on(identity, tmp_path, capsys):
    nodes = [{"partition-id": i} for i in (0, 1, 2, 0, 1)]
    grid = Lying(client_app("linear", **TINY), nodes)
    grid.sent = []
    summary = run_here(grid, tmp_path / "out", **TINY)
    err = " ".join(capsys.readouterr().err.split())
    assert "a node is refused: client 0: it has 1000000000000000000 examples" in err
    assert "a node is refused: partition-id: two nodes say that they are client 1" in err
    assert "client 2 was left out: upload: its round is 7, not 0" in err
    assert "client 1 was left out: upload: its round is 0, not 1" in err
    assert "client 1 was left out: upload: its task is 0, not 1" in err
    assert "client 0 still lacks its cached payload; it dropped out" in err
    assert grid.asked == 5  # it is sent everything again, once
    assert summary["rejected_uploads"] == 3
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["traffic_dropped"] for line in lines] == [0, 0, 0, 1]


REPEATS = '''
import jax.numpy as jnp

from fcljax import MethodEntry, federate, learner, nearest_mean
from fcljax.parts.reports import class_mean_rule
from fcljax.types import Weighted


def class_sums(options, run):
    """Sums of frozen features, which are the same in every round, and a metric of every step."""
    model = learner(run.network, run.adapter, nearest_mean(run.network.width, run.sizes.classes))
    method = federate(run, model, server_rules=(class_mean_rule(run, "task_start"),))

    def with_metric(phase):
        def step(context, local, batch, key):
            local, _ = phase.step(context, local, batch, key)
            examples = jnp.sum(batch.mask.astype(jnp.float32))
            return local, {"brightness": Weighted(jnp.sum(batch.input), examples)}

        return phase._replace(step=step)

    def broadcast(round_context, server):
        sent = method.broadcast(round_context, server)
        return sent._replace(payload=sent.payload._replace(sent={"round": round_context.round}))

    once = method.rounds[0]
    program = once.program._replace(phases=tuple(map(with_metric, once.program.phases)))
    rounds = (once._replace(program=program, who="sampled", when="round"),)
    return method._replace(broadcast=broadcast, rounds=rounds)


METHOD = MethodEntry("class sums in every round", None, class_sums, adapter="linear", name="class_sums")
'''


@pytest.mark.long
def test_an_honest_client_may_send_the_same_bits_in_every_round(identity, tmp_path, capsys):
    """It also reports metrics, and what it is sent differs from round to round."""
    uploads, source = [], tmp_path / "repeats.py"
    source.write_text(REPEATS)

    def answers(place, reply):
        uploads.append((place, {name: bytes(array.data) for name, array in reply.content["upload"].items()}))
        return reply

    grid = Here(client_app(str(source), **TINY), [{"partition-id": i} for i in range(3)], answers)
    summary = run_here(grid, tmp_path / "out", str(source), **TINY)
    assert len(uploads) == 12 and all(uploads[i] == uploads[i + 3] for i in (0, 1, 2, 6, 7, 8))
    assert summary["rejected_uploads"] == 0
    assert "left out" not in capsys.readouterr().err


class Claims(Here):
    """A grid whose nodes say which client they are, and what is `said`, and nothing else."""

    def __init__(self, claims, **said):
        self.claims, self.said = claims, said

    def get_node_ids(self):
        return list(self.claims)

    def send_and_receive(self, messages, *, timeout=None):
        return [self.one(each) for each in messages]

    def one(self, message):
        client = self.claims[message.metadata.dst_node_id]
        facts = {"client": client, "examples": [5], "settings": {"clients": 3}, "digests": {"images": "x"}}
        facts |= self.said
        return Message(RecordDict({"facts": config({"json": json.dumps(facts)})}), reply_to=message)


def test_a_client_is_bound_to_the_node_that_the_server_names(identity):
    mine = node.Facts(-1, [], {"clients": 3}, {"images": "x"})
    bound = numbers_of_nodes("70, 71,72", 3)
    nodes = Nodes(Claims({70: 0, 71: 2, 9: 1, 72: 2}), 3, (), mine, print, bound)
    assert nodes.refresh(1, 1.0) == [
        "nodes: node 9 may not take part",
        "partition-id: node 71 says that it is client 2; it is client 1",
    ]
    assert nodes.of_client == {0: 70, 2: 72} and nodes.refresh(1, 1.0) == []
    # client 0 is gone, and a node of another key says that it is it
    nodes.grid.claims = {72: 2, 9: 0, 8: 0}
    assert nodes.refresh(1, 1.0) == ["nodes: node 8 may not take part"]
    assert nodes.of_client == {0: 70, 2: 72}
    # without a list any node may be any client
    free = Nodes(Claims({9: 0}), 3, (), mine, print)
    assert free.refresh(1, 1.0) == [] and free.of_client == {0: 9}


@pytest.mark.parametrize("field", ["client", "examples", "settings", "digests"])
@pytest.mark.parametrize("value", [None, 1.5, True, "x", [], [[1]], [None], {"images": 3}, 10**400])
def test_a_report_of_other_types_is_refused_in_one_line(field, value, identity):
    mine = node.Facts(-1, [], {"clients": 3}, {"images": "x"})
    nodes = Nodes(Claims({9: 0}, **{field: value}), 3, (), mine, print)
    (line,) = nodes.refresh(1, 1.0)
    assert nodes.of_client == {} and "\n" not in line


def test_a_client_has_as_many_examples_as_the_partition_assigns(identity):
    """On them depend its weight and every other claim; of its own data only a maximum is known."""
    mine = node.Facts(-1, [], {"clients": 3}, {"images": "x"})
    assigned = [[5], [7], [0]]
    nodes = Nodes(Claims({9: 0, 8: 1}), 3, (), mine, print, assigned=assigned)
    assert nodes.refresh(1, 1.0) == [
        "client 1: it says that it has [5] examples in its tasks; the partition assigns [7]"
    ]
    assert nodes.of_client == {0: 9}
    said, own = [], Claims({9: 0, 8: 1}, digests={"images": node.OWN})
    nodes = Nodes(own, 3, (), mine, said.append, assigned=assigned, most_examples=4)
    assert nodes.refresh(1, 1.0) == [
        f"client {client}: it has 5 examples in a task; most-examples is 4" for client in (1, 0)
    ]
    nodes = Nodes(own, 3, (), mine, said.append, assigned=assigned, most_examples=5)
    assert nodes.refresh(1, 1.0) == [] and said == []
    nodes = Nodes(own, 3, (), mine, said.append, assigned=assigned)
    assert nodes.refresh(1, 1.0) == [] and len(said) == 2 and "most-examples limits the number" in said[0]


class Silent(Claims):
    """Some of its nodes never answer; `asked` has the nodes and the time-out of each call."""

    def __init__(self, claims, silent):
        super().__init__(claims)
        self.silent, self.asked = silent, []

    def send_and_receive(self, messages, *, timeout=None):
        nodes = [message.metadata.dst_node_id for message in messages]
        self.asked.append((nodes, timeout))
        return [self.one(each) for each in messages if each.metadata.dst_node_id not in self.silent]


def test_a_silent_node_is_asked_once_for_a_minute_and_named(identity):
    mine = node.Facts(-1, [], {"clients": 3}, {"images": "x"})
    nodes = Nodes(Silent({9: 0, 7: 1}, {7}), 3, (), mine, print)
    assert nodes.refresh(1, 3600.0) == ["nodes: node 7 did not say within 60 s which client it is"]
    assert nodes.refresh(1, 3600.0) == [] and nodes.of_client == {0: 9}
    assert nodes.grid.asked == [([7, 9], 60.0)]
    # it connects again, with another number, and answers
    nodes.grid.claims = {9: 0, 6: 1}
    assert nodes.refresh(1, 3600.0) == [] and nodes.of_client == {0: 9, 1: 6}


def test_a_slow_node_is_asked_again_while_clients_are_missing(identity, monkeypatch):
    mine = node.Facts(-1, [], {"clients": 2}, {"images": "x"})
    nodes = Nodes(Silent({9: 0, 7: 1}, {7}), 2, (), mine, print)
    monkeypatch.setattr("fcljax.bridges.flower.time.sleep", lambda _seconds: nodes.grid.silent.clear())
    nodes.server.settings["clients"] = 3
    assert nodes.gather(100.0, 1).tolist() == [[5, 5]]
    assert [asked for asked, _ in nodes.grid.asked] == [[7, 9], [7]]


@pytest.mark.parametrize("value", [1e300, 3e38, -1e33, float("nan"), float("inf"), 10**400])
def test_metrics_are_finite_in_float32_also_added_up(value):
    like = {"loss": np.float32(0)}
    assert from_metrics(MetricRecord({"['loss']": 2.0}), like, "metrics")["loss"] == 2.0
    with pytest.raises(InputError, match="expected a finite number"):
        from_metrics(MetricRecord({"['loss']": value}), like, "metrics")


@pytest.mark.parametrize("text", ["1,2", "1,2,2", "1,2,x", "", "1,2,-3", "1,2,3,4"])
def test_numbers_of_nodes_are_one_for_each_client(text):
    with pytest.raises(InputError, match="^nodes: "):
        numbers_of_nodes(text, 3)


@pytest.mark.long
def test_clients_with_models_of_their_own_are_not_evaluated_by_the_server(identity, tmp_path):
    grid = Here(client_app("fedweit", **TINY), [{"partition-id": i} for i in range(3)])
    summary = run_here(grid, tmp_path / "out", "fedweit", **TINY)
    assert summary["accuracy"] is None
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["participants"] for line in lines] == [3, 3, 3, 3]


# ---- Flower's own simulation -------------------------------------------------------------------------------

FPPL = {"prompt_blocks": 2, "prompt_length": 2, "server_epochs": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "more"), [("linear", {"participation": 0.6}), ("fppl", FPPL), ("ewc", {})]
)
def test_flowers_simulation_gives_the_numbers_of_ours(method, more):
    module, settings = beside(), TINY | more
    states, _ = module.simulated(node.federation_settings(method, settings))
    found = module.flowered(method, settings, TINY["clients"])
    assert len(found) == TINY["tasks"] * TINY["rounds"]
    apart = [module.largest_difference(*pair) for pair in zip(states, found, strict=True)]
    assert max(apart) < 1e-5, apart


# ---- real processes ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
def test_a_killed_node_drops_out_and_comes_back(tmp_path, kept):
    out = tmp_path / "out"
    settings = TINY | {"method": "ewc", "clients": 2, "out": str(out), "timeout": 200.0}
    where = f'state-dir="{tmp_path / "state"}"' if kept else ""

    def lines():
        path = out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    with flower_machines.machines(tmp_path) as here:
        for client in range(2):
            here.node(client, where)
        here.submit(settings)
        here.wait_for(lambda: len(lines()) >= 1)
        here.kill("node-1")
        here.wait_for(lambda: any(line["traffic_dropped"] for line in lines()))
        here.node(1, where)
        here.wait_for(lambda: (out / "summary.json").exists())
    dropped = [line["traffic_dropped"] for line in lines()]
    assert dropped[0] == 0 and sum(dropped) >= 1 and dropped[-1] == 0
    assert sum(line["traffic_restarted"] for line in lines()) == (0 if kept else 1)
    assert np.isfinite(json.loads((out / "summary.json").read_text())["A_last"])


@pytest.mark.long
def test_with_tls_and_keys_only_registered_nodes_take_part_each_as_its_own_client(tmp_path):
    """The start that docs/deployment.md names: a node that is not registered never connects, and one that is
    says that it is another's client."""
    out, settings = tmp_path / "out", TINY | {"method": "linear", "clients": 2, "rounds": 1}
    with flower_machines.machines(tmp_path, secure=True) as here:
        numbers = [here.register(key) for key in ("a", "b", "thief")]
        here.node(0, key="thief")
        here.node(0, key="a")
        here.node(1, key="b")
        flower_machines.make_key(tmp_path / "stranger")
        here.node(1, key="stranger")
        stranger = here.running.pop("node-1stranger")
        run = here.submit(settings | {"out": str(out), "nodes": f"{numbers[0]},{numbers[1]}"})
        here.wait_for(lambda: (out / "summary.json").exists())
        stranger.kill()
        said = " ".join(here.flwr("log", run, "--show").split())
        assert f"nodes: node {numbers[2]} may not take part" in said
    said = (tmp_path / "node-1stranger.log").read_text()
    assert "Connection attempt failed" in said and "[RUN" not in said
    assert "[RUN" in (tmp_path / "node-1b.log").read_text()
    assert np.isfinite(json.loads((out / "summary.json").read_text())["A_last"])
