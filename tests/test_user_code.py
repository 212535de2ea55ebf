"""Users' own code: a method whose author never mentions aggregation merges by the run's rule, and each
mistake in a function is told in one line that names the file, the line and the part."""

import inspect
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
from micro import (
    FORMULA,
    FROZEN,
    IMAGE,
    KEY,
    LABEL,
    NETWORK,
    SCALE,
    SIZES,
    STREAM,
    TASKS,
    WIDTH,
    aggregate_of,
    begin,
    by_hand,
    client_round,
    compiled,
    end_of_task,
    engine_of,
    partition_of,
    play,
    rows_of,
    server_round,
    train,
)

import fcljax
from fcljax import cli
from fcljax.adapters import find_adapter
from fcljax.adapters.linear import LinearOptions
from fcljax.errors import InputError
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.methods import find_method
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientPass, ClientRule, Replay, Report, Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Adapter, Loss, cross_entropy_loss, learner
from fcljax.parts.proximal import prox
from fcljax.parts.server import ServerRule, ServerUpdate
from fcljax.types import View

FOLDER = small_runs.ROOT / "experiments" / "methods"
TASK, BATCHES = TASKS[1], [rows_of([3, 4, 4]), rows_of([4], seed=2)]
CROSS_ENTROPY, VIEW = cross_entropy_loss(), View(1, 4, augment=False)


def run_of(network=FORMULA, rules=(), **aggregation):
    """A run of a linear classifier."""
    adapter = find_adapter("linear").build(LinearOptions(), SIZES, network)
    merging = make_aggregation(AggregationOptions(**aggregation))
    return Run(SIZES, network, adapter, Training(1, 4, 0.1), merging, rules)


def method_of_file(name, run, **options):
    """The method of a file outside of the package."""
    entry = find_method(str(FOLDER / f"{name}.py"))
    made = entry.presets["intended"].options
    return entry.build(type(made)(**options), run)


def method_of(*rules, loss=CROSS_ENTROPY):
    """FedAvg with these client rules and server rules."""
    run = run_of()
    client_rules = tuple(rule for rule in rules if isinstance(rule, ClientRule))
    server_rules = tuple(rule for rule in rules if isinstance(rule, ServerRule))
    return federate(run, linear_learner(run), loss=loss, client_rules=client_rules, server_rules=server_rules)


def fresh(method):
    return compiled(method.init)(KEY, SCALE)


def played(method):
    """A round of one client, the server's part, and the client's end of the task."""
    server = fresh(method)
    upload, state = client_round(method, server, TASK, BATCHES)
    end_of_task(method, server, TASK, BATCHES, state)
    server_round(method, server, TASK, aggregate_of([upload], [0], [True], SIZES.clients))


# ---- the files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("fedprox", 25), ("fedranpac", 40)])
def test_a_method_of_ones_own_is_short_and_not_packed(name, most):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= most and max(map(len, lines)) <= 110
    assert not any("fmt:" in line for line in lines)


@pytest.mark.long
def test_fedprox_of_ones_own_is_the_package_s():
    run = run_of()
    own = method_of_file("fedprox", run, mu=2.0)
    ours = federate(run, linear_learner(run), loss=CROSS_ENTROPY, client_rules=(prox(2.0),))
    plain = federate(run, linear_learner(run), loss=CROSS_ENTROPY)
    heads = [by_hand(method, rounds=2).params.classifier for method in (own, ours, plain)]
    jax.tree.map(np.testing.assert_array_equal, heads[0], heads[1])
    assert float(jnp.abs(heads[0].kernel - heads[2].kernel).max()) > 1e-3


def ridge_by_numpy(partitions, width, ridge):
    """The classifier of all examples of all clients and tasks together."""
    rows = np.concatenate([partition.indices for partition in partitions])
    features, _ = NETWORK.apply(FROZEN.network, jnp.asarray(IMAGE[rows], jnp.float32), None, False)
    draw = np.asarray(jax.random.normal(jax.random.key(0), (NETWORK.width, width)), np.float64)
    h = np.maximum(np.asarray(features.cls, np.float64) @ draw, 0)
    y = np.eye(SIZES.classes)[LABEL[rows]]
    return np.linalg.solve(h.T @ h + ridge * np.eye(width), h.T @ y)


@pytest.mark.parametrize(
    "counts",
    [(9, 0, 4, 7), (20, 0, 0, 0), (1, 3, 8, 2)],
)
@pytest.mark.long
def test_federated_ranpac_is_ridge_regression_on_all_examples_whoever_holds_them(counts):
    method = method_of_file("fedranpac", run_of(NETWORK), width=12, ridge=0.5)
    partitions = [partition_of(task, counts) for task in STREAM]
    engine = engine_of(method, partitions=partitions)
    server, states = begin(method)
    after, _, report = play(engine, server, states, partitions=partitions, rounds=1)[-1]
    expected = ridge_by_numpy(partitions, 12, 0.5)
    np.testing.assert_allclose(after.params.classifier, expected, rtol=2e-3, atol=2e-4)
    assert np.abs(expected).max() > 0.05
    # the second task's examples are in it
    assert np.abs(expected - ridge_by_numpy(partitions[:1], 12, 0.5)).max() > 0.05


@pytest.mark.long
def test_federated_ranpac_runs_from_its_file_and_does_not_depend_on_the_partition(tmp_path):
    found = []
    for clients in ("1", "3"):
        out = tmp_path / clients
        short = ["--tasks", "5", "--image-size", "8", "--clients", clients, "--rounds", "1", "--width", "40"]
        assert cli.main(["run", str(FOLDER / "fedranpac.py"), *short, "--out", str(out)]) == 0
        found.append(json.loads((out / "summary.json").read_text())["A"])
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)
    assert found[0][-1] > 0.5


# ---- nothing forgets the run's own rules -------------------------------------------------------------------


def uploads_of(method, server):
    own = [[rows_of([3, 4, 4])], [rows_of([4, 3], 2)], [rows_of([3, 3], 3)]]
    return [client_round(method, server, TASK, batches, id_=i)[0] for i, batches in enumerate(own)]


def merged(method):
    """What the server makes of two honest clients and one that sends 1e6 times its parameters."""
    server = fresh(method)
    uploads = uploads_of(method, server)
    mean, gather = jax.tree.map(lambda x: 1e6 * x, (uploads[2].mean, uploads[2].gather))
    aggregate = aggregate_of(
        [*uploads[:2], uploads[2]._replace(mean=mean, gather=gather)], range(3), [True] * 3, SIZES.clients
    )
    return server_round(method, server, TASK, aggregate)[0].params.classifier


def test_a_method_whose_author_never_mentions_aggregation_merges_by_the_run_s_rule():
    assert "aggregat" not in (FOLDER / "fedprox.py").read_text()
    plain, robust = (method_of_file("fedprox", run_of(aggregator=rule)) for rule in ("uniform", "median"))
    assert float(jnp.abs(merged(plain).kernel).max()) > 1e4
    assert float(jnp.abs(merged(robust).kernel).max()) < 10
    honest = [upload.gather["mean"].classifier.kernel for upload in uploads_of(robust, fresh(robust))[:2]]
    inside = (merged(robust).kernel >= jnp.minimum(*honest) - 1e-6) & (
        merged(robust).kernel <= jnp.maximum(*honest) + 1e-6
    )
    assert bool(inside.all())


def test_clipping_reaches_a_method_whose_author_never_mentions_it():
    start = fresh(method_of_file("fedprox", run_of())).params.classifier
    moved = {}
    for clip in (1e-3, 1e3):
        method = method_of_file("fedprox", run_of(clip_norm=clip))
        upload, _ = client_round(method, fresh(method), TASK, BATCHES)
        change = jax.tree.map(jnp.subtract, upload.mean.classifier, start)
        moved[clip] = float(sum(jnp.sum(leaf**2) for leaf in change) ** 0.5)
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-4) and moved[1e3] > 0.01


def test_the_run_s_client_rules_act_in_every_method():
    free, held = (
        train(method := method_of_file("fedprox", run_of(rules=rules), mu=0.0), fresh(method), TASK, BATCHES)
        for rules in ((), (prox(1e3),))
    )
    assert (
        float(jnp.abs(free[1].trainable.classifier.kernel - held[1].trainable.classifier.kernel).max()) > 1e-3
    )


def test_a_rule_that_merges_by_itself_refuses_an_aggregation_rule_by_name():
    """FedRanPAC adds sums up; the distillation server reads every client's parameters."""
    for name in ("fedranpac", "distill"):
        with pytest.raises(InputError, match="aggregator: 'median' cannot be applied, because"):
            method_of_file(name, run_of(aggregator="median"))
    method_of_file("distill", run_of(aggregator="uniform"))


# ---- mistakes that are told where they are written ---------------------------------------------------------


# Python that a user may write, and what is said. It is run by itself, without the type checks of these tests.
MISWRITTEN = {
    "ClientPass('start', View(1, 4), print)": (
        "when: unknown value 'start'; choose from: after_training, before_training, task_end"
    ),
    "ServerRule('mine', print, when='start')": "when: unknown value 'start'; did you mean 'task_start'?",
    "Report('mine', merge='mean')": "merge: unknown value 'mean'; choose from: gather, sum",
    "Report('mine', merge='sum', follows_rule=True)": (
        "follows_rule: report 'mine' is a sum, which no aggregation rule can merge; nearest: False"
    ),
    "OfEachClient('adaptor')": "name: unknown value 'adaptor'; did you mean 'adapter'?",
    "ClientRule('mine', loss=3.0)": "loss: client rule 'mine' has 3.0; expected a function",
}


@pytest.fixture(scope="module")
def said():
    """The error of each, by what was written."""
    code = "import json\nfrom fcljax import *\nsaid = {}\n"
    for written in MISWRITTEN:
        code += f"try:\n    {written}\nexcept ValueError as error:\n    said[{written!r}] = str(error)\n"
    code += "print(json.dumps(said))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=small_runs.ROOT, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("written", MISWRITTEN)
def test_a_wrong_value_is_refused_where_it_is_written(written, said):
    assert said.get(written) == MISWRITTEN[written]


def test_every_name_of_the_package_can_be_imported():
    assert all(hasattr(fcljax, name) for name in fcljax.__all__)


def nothing(*_):
    return ()


def seven(a, b, c, d, e, f, g):
    """Of more arguments than anything gets."""


def none():
    """Of no arguments."""


FIELDS = {
    "client rule 'mine'": (
        lambda **field: ClientRule("mine", **field),
        ("loss", "init", "on_start", "on_end", "project", "parameters"),
    ),
    "client pass": (
        lambda **field: ClientPass("task_end", VIEW, **{"step": nothing} | field),
        ("step", "on_start", "on_end"),
    ),
    "replay": (
        lambda **field: Replay(2, **dict(stored=nothing, choose=nothing) | field),
        ("stored", "choose"),
    ),
    "report 'mine'": (lambda **field: Report("mine", **field), ("init", "step", "finalize")),
    "server rule 'mine'": (
        lambda **field: ServerRule("mine", **{"update": nothing} | field),
        ("update", "init", "sends"),
    ),
    "classifier": (
        lambda **field: learner(FORMULA, run_of().adapter, linear(WIDTH, SIZES.classes)._replace(**field)),
        ("init", "logits", "trainable", "merge", "cached", "predict", "lasting"),
    ),
    "adapter": (
        lambda **field: learner(FORMULA, Adapter(nothing)._replace(**field), linear(WIDTH, SIZES.classes)),
        tuple(
            name
            for name in Adapter._fields
            if name not in ("mixture", "truncated", "queries", "rate", "batchwise", "train_batchwise")
        ),
    ),
}


@pytest.mark.parametrize("function", [seven, none], ids=["too many", "none"])
@pytest.mark.parametrize(
    ("part", "field"), [(part, field) for part, (_, fields) in FIELDS.items() for field in fields]
)
def test_a_function_with_the_wrong_number_of_arguments_is_told_at_once(part, field, function):
    with pytest.raises(InputError) as error:
        FIELDS[part][0](**{field: function})
    line = inspect.getsourcelines(function)[1]
    where = rf"test_user_code.py:{line} {function.__name__}\(\)"
    assert re.fullmatch(rf"{field}: {part} gets \d arguments, and {where} takes \(.*\)", str(error.value))


def test_a_loss_of_ones_own_with_the_wrong_number_of_arguments_is_told_at_once():
    with pytest.raises(
        InputError, match=r"^loss: federate gets 3 arguments, and test_user_code.py:\d+ seven"
    ):
        method_of(loss=Loss(seven))


# ---- mistakes that the first trace finds -------------------------------------------------------------------


def told(part, function, *rules, asks="; expected "):
    """The one line about this function."""
    with pytest.raises(InputError) as error:
        played(method_of(*rules))
    line, first = str(error.value), inspect.getsourcelines(function)[1]
    assert line.startswith(f"{part}: test_user_code.py:{first} {function.__name__}() "), line
    assert asks in line and "\n" not in line
    return line


def test_a_loss_that_is_no_scalar_is_told():
    def loss(step, memory):
        return step.output.logits[:, 0]

    line = told("client rule 'mine'", loss, ClientRule("mine", loss))
    assert "returned shape (4,); expected a scalar" in line

    def nothing_at_all(step, memory):
        pass

    line = told("client rule 'mine'", nothing_at_all, ClientRule("mine", nothing_at_all))
    assert "returned NoneType; expected a scalar" in line


def test_an_update_that_returns_no_server_update_is_told():
    def update(round, params, state):
        return params, state, {}

    line = told("server rule 'mine'", update, ServerRule("mine", update))
    assert "returned tuple; expected ServerUpdate(params, state, metrics)" in line


def test_an_update_that_returns_parameters_of_another_shape_is_told():
    def update(round, params, state):
        return ServerUpdate(params._replace(classifier=params.classifier.kernel), state)

    def shorter(round, params, state):
        return ServerUpdate(jax.tree.map(lambda x: x[:-1], params), state)

    for function in (update, shorter):
        told("server rule 'mine'", function, ServerRule("mine", function))


def test_an_update_that_returns_another_state_is_told():
    def update(round, params, state):
        return ServerUpdate(params, {"count": state})

    told("server rule 'mine'", update, ServerRule("mine", update, init=lambda *_: jnp.zeros(())))


def test_an_update_that_forgets_its_state_is_told():
    def update(round, params, state):
        return ServerUpdate(params)

    told("server rule 'mine'", update, ServerRule("mine", update, init=lambda *_: jnp.zeros(())))


def test_an_on_end_whose_state_changes_its_structure_is_told():
    def on_end(context, memory, trainable, state):
        return (state, trainable)

    told("client rule 'mine'", on_end, ClientRule("mine", on_end=on_end))
    last = ClientPass("task_end", VIEW, lambda step, memory: memory, on_end=on_end)
    told("client rule 'mine'", on_end, ClientRule("mine", passes=(last,)))


@pytest.mark.parametrize("when", ["before_training", "after_training", "task_end"])
def test_a_pass_whose_memory_changes_its_shape_is_told(when):
    def step(step, memory):
        return jnp.zeros(2)

    rule = ClientRule("mine", init=lambda *_: jnp.zeros(3), passes=(ClientPass(when, VIEW, step),))
    told("client rule 'mine'", step, rule)


@pytest.mark.parametrize("view", [None, VIEW], ids=["in training", "in a pass"])
def test_a_report_whose_total_changes_its_shape_is_told(view):
    def step(step, total):
        return step.output.feature

    report = Report("mine", lambda context: jnp.zeros(2), step, view=view)
    told("report 'mine'", step, ServerRule("r", lambda round, params, state: None, reports=(report,)))


def test_a_projection_that_returns_something_else_is_told():
    def project(context, trainable):
        return trainable.classifier

    told("client rule 'mine'", project, ClientRule("mine", project=project))


# what users write that may read what the server sends, each as the part that it belongs to
def reads(context):
    return 0.0 * context.payload.sent["mean"]


def loss(step, memory):
    return reads(step.context)


def on_start(context, state, key):
    return reads(context)


def on_end(context, memory, trainable, state):
    return reads(context)


def step(step, memory):
    return reads(step.context)


def project(context, trainable):
    return reads(context)


READERS = {
    "loss": (loss, lambda: ClientRule("mine", loss)),
    "on_start": (on_start, lambda: ClientRule("mine", on_start=on_start)),
    "on_end": (on_end, lambda: ClientRule("mine", on_end=on_end)),
    "step": (step, lambda: ClientRule("mine", passes=(ClientPass("after_training", VIEW, step),))),
    "project": (project, lambda: ClientRule("mine", project=project)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_rule_that_reads_what_no_server_rule_sends_is_told(name):
    function, make = READERS[name]
    told("client rule 'mine'", function, make(), asks="reads 'mean', which no server rule sends")


def test_a_report_that_reads_what_no_server_rule_sends_is_told():
    rule = ServerRule("r", lambda round, params, state: None, reports=(Report("mine", step=step),))
    told("report 'mine'", step, rule, asks="reads 'mean', which no server rule sends")


def test_a_report_that_begins_or_ends_with_what_is_not_there_is_told():
    def init(context):
        return reads(context)

    def finalize(end, total):
        return end.memories["mine"]

    for function, asks in (
        (init, "reads 'mean', which no server rule sends"),
        (finalize, "reads 'mine', which no server rule sends and no client rule is named"),
    ):
        report = Report("mine", **{function.__name__: function})
        rule = ServerRule("r", lambda round, params, state: None, reports=(report,))
        told("report 'mine'", function, rule, asks=asks)


def test_a_server_rule_without_an_update_is_refused_when_it_is_written():
    rule = ServerRule("mine", lambda round, params, state: None)
    object.__setattr__(rule, "update", None)  # tests check the types of fields; users' programs do not
    with pytest.raises(InputError, match="^update: server rule 'mine' has none; it needs update"):
        rule.__post_init__()


def test_a_server_rule_that_reads_what_it_does_not_ask_for_is_told():
    def update(round, params, state):
        return ServerUpdate(params, round.reports["prototypes"])

    asks = "reads 'prototypes', which it does not ask for in its reports"
    told("server rule 'mine'", update, ServerRule("mine", update), asks=asks)


def test_what_a_user_s_own_dict_misses_stays_the_error_that_it_is():
    """A name that is sent, or that is no name, is no fault of the server's rules."""

    def loss(step, memory):
        return {}[1]

    with pytest.raises(KeyError):
        played(method_of(ClientRule("mine", loss)))


WRONG = """
from fcljax import ClientRule, MethodEntry, cross_entropy_loss, federate, linear_learner
from fcljax.methods.fedavg import NoOptions

def loss(step, memory):
    return step.output.logits

def wrong(options, run):
    return federate(
        run, linear_learner(run), loss=cross_entropy_loss(), client_rules=(ClientRule("mine", loss),)
    )

METHOD = MethodEntry("wrong on purpose", NoOptions, wrong, adapter="linear")
"""


def test_the_command_line_says_it_in_one_line(tmp_path, capsys):
    file = tmp_path / "my_method.py"
    file.write_text(WRONG)
    short = ["--tasks", "5", "--clients", "2", "--image-size", "8", "--out", str(tmp_path / "run")]
    assert cli.main(["run", str(file), *short]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "client rule 'mine': my_method.py:5 loss() returned shape" in said
    assert said.endswith("; expected a scalar")
