"""The search of `--scale fit`: what it holds out, plays and chooses, and that a run repeats it."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as cases
from hypothesis import strategies as st

import fcljax
from fcljax import config
from fcljax.checks import examples, federation
from fcljax.data.store import Split
from fcljax.errors import InputError
from fcljax.federated import health
from fcljax.federated.check import Example, check_method
from fcljax.federated.rates import with_rates
from fcljax.federated.schedule import ClientPartition
from fcljax.methods import METHODS, MethodEntry
from fcljax.runs import loop, rate_search
from fcljax.runs.build import _with, as_data, build, make_method
from fcljax.runs.rate_search import Candidate, Tried
from fcljax.runs.signals import Stopped
from fcljax.scenario import Scenario

# 24 steps a client and task, on images of 8 pixels, which are one patch
SMALL = dict(
    tasks=4, clients=3, rounds=2, epochs=3, image_size=8, batch_size=16, partition="iid", backbone="vit_micro"
)
VIT_TINY = {"backbone": "vit_tiny"}


def settings_of(method="linear", **given):
    return config.from_mapping(method, SMALL | {"scale": "fit"} | given, "options")


# ---- rates as data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.long
def test_the_learning_rates_of_every_method_may_be_data(name):
    """Each function of the method is traced with rates that are no constants, and keeps to the protocol."""
    settings = config.from_mapping(name, dict(scale="fit", batch_size=4, epochs=2), "options")
    rates, network = config.learning_rates(settings), examples.network(examples.TINY)
    assert bool(rates) != METHODS[name].closed_form

    def build_(rates):
        return make_method(_with(settings, rates), federation.SIZES, network)

    method = with_rates(build_, rates)
    query = federation.padding_features(0.0, 0, examples.TINY.width)
    data = federation.Split(jnp.zeros((60, 8, 8, 3)), jnp.zeros(60, jnp.int32), query=query)
    frozen = examples.frozen_parameters(examples.TINY, jnp.zeros((12, 8, 8, 3), jnp.uint8))
    frozen = frozen._replace(rates=as_data(rates))
    check_method(method, federation.read_plain, Example(frozen, data, federation.TASKS[0]))


@pytest.mark.long
def test_a_method_that_decides_by_the_value_of_a_rate_is_refused_in_one_line():
    def build_(rates):
        if rates["lr"] > 1:
            raise ValueError
        return made

    settings = settings_of()
    made = make_method(settings, federation.SIZES, examples.network(examples.TINY))
    method = with_rates(build_, {"lr": 0.1})
    frozen = examples.frozen_parameters(examples.TINY, jnp.zeros((1, 8, 8, 3)))
    with pytest.raises(InputError, match="^scale: with fit, learning rates are data"):
        jax.eval_shape(method.init, jax.random.key(0), frozen._replace(rates=as_data({"lr": 0.1})))


@pytest.mark.long
def test_rates_as_data_train_as_constants_do(tmp_path):
    """A factor of 3 on rates that are data, and rates three times as large that are constants. Both runs have
    the fidelity that fit chooses, in which classes start at their means."""
    data = fcljax.run("linear", out=tmp_path / "data", **SMALL, scale="fit", rate_factor=3.0)
    constant = fcljax.run(
        "linear", out=tmp_path / "constant", **SMALL, scale="paper", fidelity="improved", lr=3e-3
    )
    losses = [[line["loss"] for line in read_rounds(each.folder)] for each in (data, constant)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_factor_multiplies_every_rate_that_the_method_has():
    hepco = config.from_mapping("hepco", {"scale": "paper", "rate_factor": 10}, "options")
    assert config.learning_rates(hepco) == pytest.approx(dict(lr=1e-2, generator_lr=1e-3, distill_lr=1e-3))
    assert config.learning_rates(config.from_mapping("fedncm", {}, "options")) == {}


def read_rounds(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- what is held out --------------------------------------------------------------------------------------


@st.composite
def partitions(draw):
    """Labels of 1 to 40 examples, and a client of up to 4 for each."""
    label = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)))
    owner = np.array(draw(st.lists(st.integers(0, 3), min_size=len(label), max_size=len(label))))
    order = np.argsort(owner, kind="stable")
    count = np.bincount(owner, minlength=4)
    of_class = np.zeros((4, 4), np.int32)
    np.add.at(of_class, (owner, label), 1)
    return label, ClientPartition(order, np.cumsum([0, *count]), of_class)


@cases(partitions(), st.integers(0, 5))
def test_held_out_examples_are_trained_on_by_nobody_and_no_client_is_emptied(drawn, seed):
    label, partition = drawn
    scenario = Scenario(label, label[:0], (), [[partition]], partition.class_examples)
    held = rate_search.hold_out_examples(scenario, 1, seed)
    left = rate_search.without(partition, label, held >= 0, np.arange(4))
    assert not set(left.indices) & set(np.flatnonzero(held >= 0))
    assert sorted([*left.indices, *np.flatnonzero(held >= 0)]) == list(range(len(label)))
    assert ((left.count > 0) == (partition.count > 0)).all()
    assert (left.class_examples.sum(axis=1) == left.count).all()
    for client in range(4):
        assert set(left.of_client(client)) <= set(partition.of_client(client))
    few = rate_search.without(partition, label, held >= 0, np.arange(3), 2)
    assert few.count.tolist() == [*np.minimum(left.count[:3], 2), 0] and set(few.indices) <= set(left.indices)
    for each in np.unique(label):
        share = np.mean(held[label == each] >= 0)
        assert share <= max(rate_search.HELD_OUT, 1 / np.sum(label == each))


# ---- what is chosen ----------------------------------------------------------------------------------------


def test_the_best_is_chosen_of_equal_ones_the_smaller_and_nan_loses():
    values = {30.0: 0.5, 10.0: 0.5, 3.0: 0.2, 0.1: math.nan, 1000.0: None, 100.0: math.inf}
    assert rate_search.best(values, float) == 10.0
    assert rate_search.best({1.0: None, 3.0: math.nan}, float) is None


def test_of_the_range_test_mini_s_rates_and_the_best_go_on():
    mini, small, large = Candidate("mini", 1.0), Candidate("paper", 0.1), Candidate("paper", 30.0)
    found = {small: 0.5, large: 0.6, Candidate("paper", 3.0): 0.4, mini: 0.1}
    assert rate_search.promising(found, 3) == [mini, large, small]
    assert rate_search.promising(found | {mini: None}, 2) == [large, small]


def test_those_that_went_furthest_are_compared():
    one, two = Candidate("paper", 1.0), Candidate("paper", 3.0)
    trials = [Tried(one, "range test", 1, 0.9, 9), Tried(two, "range test", 1, 0.1, 9)]
    trials += [Tried(one, "tasks", 1, 0.8, 9), Tried(two, "tasks", 1, 0.7, 9)]
    trials += [Tried(one, "tasks", 2, 0.3, 9), Tried(two, "tasks", 2, 0.4, 9)]
    assert rate_search._chosen(trials) == two


class Experiment(NamedTuple):
    """What a trial reads of one: a task with two of four classes, then one with all."""

    frozen: Any = SimpleNamespace(_replace=lambda rates: rates)
    engine: Any = SimpleNamespace(place=lambda arrays: arrays)
    settings: Any = SimpleNamespace(rounds=1)
    train: Any = None
    scenario: Any = SimpleNamespace(
        tasks=[SimpleNamespace(seen=np.arange(4) < 2), SimpleNamespace(seen=np.ones(4, bool))],
        tests_seen=lambda t: np.ones(10 * (t + 1)),
    )


def test_a_trial_says_whether_its_training_diverged_in_a_task():
    losses = iter([0.8, 0.1, 0.6, 0.1])  # guessing has log 2 = 0.69 in the first task
    stage: Any = object.__new__(rate_search._Stage)
    stage.exp = Experiment()
    stage.play = lambda exp, state, past, t, r: (
        state,
        None,
        SimpleNamespace(metrics={health.CROSS_ENTROPY: next(losses)}),
        [],
    )
    stage.evaluate = lambda *_: SimpleNamespace(accuracy=[0.9])
    found = []
    for factor in (1000.0, 1.0):
        after = rate_search.AfterTasks(None, ())
        for t in (0, 1):
            after = stage.task({"lr": factor}, after, t, lambda: None)
        tried = stage.tried(rate_search.Candidate("paper", factor), "tasks", after, 1)
        found.append((tried.diverged, tried.accuracy))
    assert found == [(True, 0.9), (False, 0.9)]


def test_a_candidate_that_diverged_wins_by_a_lead_beyond_chance_alone():
    large, small = Candidate("paper", 30.0), Candidate("paper", 3.0)

    def chosen(accuracy, images):
        trials = [Tried(large, "tasks", 2, accuracy, images, True), Tried(small, "tasks", 2, 0.5, images)]
        return rate_search._chosen(trials)

    assert (chosen(0.6, 100), chosen(0.6, 200)) == (small, large)  # the bounds of the test below
    alone = [Tried(large, "tasks", 2, 0.6, 9, True), Tried(small, "tasks", 2, 0.5, 9, True)]
    assert rate_search._chosen(alone) == large


def test_candidates_of_a_short_schedule_are_multiples_of_mini_s_rates():
    scaffold = config.from_mapping("scaffold", VIT_TINY | {"scale": "fit"}, "options")
    candidates = rate_search.candidates_of(scaffold, short=True)
    assert candidates[:4] == [
        Candidate("mini", 1.0), Candidate("paper", 1.0), Candidate("mini", 3.0), Candidate("mini", 10.0)
    ]  # fmt: skip
    mini = config.preset("scaffold", scale="mini")
    assert candidates[2].rates(scaffold) == {"lr": 3 * mini.lr, "lora_lr": 3 * mini.lora_lr}
    # ten times the paper's rates of linear are mini's: no candidate twice
    linear = config.from_mapping("linear", VIT_TINY | {"scale": "fit"}, "options")
    for short in (True, False):
        rates = [candidate.rates(linear)["lr"] for candidate in rate_search.candidates_of(linear, short)]
        assert len({round(math.log10(rate), 3) for rate in rates}) == len(rates)
    assert rate_search.candidates_of(linear, short=False)[:2] == [
        Candidate("mini", 1.0),
        Candidate("paper", 1.0),
    ]
    given = config.from_mapping("scaffold", VIT_TINY | {"scale": "fit", "lr": 0.3}, "options")
    assert {candidate.scale for candidate in rate_search.candidates_of(given, short=True)} == {"paper"}


def test_mini_s_rates_stay_unless_the_lead_of_others_is_beyond_chance():
    mini, other = Candidate("mini", 1.0), Candidate("paper", 30.0)

    def chosen(usual, value, images):
        both = (mini, usual), (other, value)
        return rate_search._chosen([Tried(each, "tasks", 2, found, images) for each, found in both])

    # by hand: the error of the difference is sqrt(2 * 0.55 * 0.45 / n), and 1.645 of it are 0.1157 of 100
    # images and 0.0818 of 200
    assert (chosen(0.5, 0.6, 100), chosen(0.5, 0.6, 200)) == (mini, other)
    assert chosen(None, 0.01, 9) == other


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param(dict(tasks=10, clients=10, rounds=3, epochs=5, batch_size=4), marks=pytest.mark.long),
        pytest.param(dict(tasks=2, clients=2), marks=pytest.mark.long),
        pytest.param(dict(participation=0.5, rounds=6), marks=pytest.mark.long),
        pytest.param(dict(partition="quantity", classes_per_client=1, clients=2), marks=pytest.mark.long),
        pytest.param(dict(population="redrawn"), marks=pytest.mark.long),
        pytest.param(dict(method="ewc"), marks=pytest.mark.long),
    ],
)
def test_a_search_takes_at_most_half_of_the_run_s_training_steps(given):
    exp = build(settings_of(**given))
    total = rate_search.run_steps(exp)
    design = rate_search.design_of(exp, total)
    assert design is not None and 0 < design.steps <= total / 2
    assert (design.held_out >= 0).any() and len(design.range_clients)
    clients = design.clients if design.begin else design.range_clients  # two clients have no half to spare
    left = rate_search.scenario_without(exp.scenario, design, clients, None, 1)
    partitions = left.partitions[: max(1, design.tasks)]
    trained = np.concatenate([each.indices for of_task in partitions for each in of_task])
    assert len(trained) and not set(trained) & set(np.flatnonzero(left.test_task >= 0))
    assert set(np.flatnonzero(design.held_out >= 0)) <= set(np.flatnonzero(left.test_task >= 0))


@pytest.mark.parametrize(
    "given, whose, rate",
    [
        pytest.param({}, "mini's", 1e-2, marks=pytest.mark.long),
        ({"lr": 0.3}, "those given", 0.3),
    ],
)
def test_a_run_too_short_for_a_search_takes_the_rates_for_short_schedules(given, whose, rate):
    few = dict(tasks=2, clients=1, rounds=1, epochs=1, batch_size=512, partition="iid")
    exp = build(settings_of(**few, **given))
    choice = rate_search.search(exp, loop.QUIET, lambda line: None)
    assert choice.settings.rate_factor == 1
    assert choice.line.startswith(f"learning rates: {whose}, because the run is too short")
    assert choice.settings.lr == rate


# ---- the scale -----------------------------------------------------------------------------------------


def test_fit_starts_from_the_paper_s_rates_mini_s_server_training_and_improved():
    fppl = config.from_mapping("fppl", {"scale": "fit"}, "options")
    mini = config.preset("fppl", fidelity="improved")
    assert (fppl.fidelity, fppl.rate_factor, fppl.server_epochs) == ("improved", 0.0, mini.server_epochs)
    assert fppl.lr == config.preset("fppl", fidelity="improved", scale="paper").lr
    given = config.from_mapping("fppl", {"scale": "fit", "fidelity": "paper"}, "options")
    assert given.fidelity == "paper"


@pytest.mark.parametrize(
    ("given", "examples", "scale"),
    [
        ({}, 30, "fit"),  # a step an epoch
        ({}, 500, "paper"),
        ({}, 5000, "fit"),
        ({"lr": 0.1}, 30, "paper"),
        ({"fidelity": "intended"}, 30, "paper"),
        ({"scale": "paper"}, 30, "paper"),
        ({"backbone": "vit_micro"}, 30, "mini"),
        ({"scale": "mini"}, 30, "mini"),
    ],
)
def test_auto_takes_fit_where_the_schedule_is_far_from_the_preset_s(given, examples, scale):
    settings = config.from_mapping("pilora", VIT_TINY | given, "options")
    decided = config.with_scale_of_schedule(settings, float(examples))
    assert decided.scale == scale
    assert decided.rate_factor == (0.0 if scale == "fit" else 1.0)
    if scale == "fit":
        assert decided.fidelity == ("improved" if examples < 500 else "intended")


@pytest.mark.parametrize("other", [{"aggregator": "krum"}, {"clip_norm": 1.0}, {"server_optimiser": "adam"}])
def test_fit_starts_no_class_at_a_mean_where_uploads_are_not_simply_averaged(other):
    """Class means need sums over clients, and no other rule of merging gives them."""
    for settings in (
        config.from_mapping("linear", VIT_TINY | other | {"scale": "fit"}, "options"),
        config.with_scale_of_schedule(config.from_mapping("linear", VIT_TINY | other, "options"), 30.0),
    ):
        assert (settings.scale, settings.fidelity, settings.headtune) == ("fit", "intended", False)
        assert not config.improvement(settings)  # of which the summary's note tells
    settings = config.with_scale_of_schedule(config.from_mapping("hepco", VIT_TINY | other, "options"), 30.0)
    assert not settings.headtune
    # with another rule as such HePCo's clients stay as they are
    assert settings.aggregator == other.get("aggregator", "uniform")


def test_fit_reads_an_online_stream_once():
    """Class means would take a second pass, which `build.check_one_pass` refuses."""
    online = {"population": "online"}
    for settings in (
        config.from_mapping("linear", VIT_TINY | online | {"scale": "fit"}, "options"),
        config.with_scale_of_schedule(config.from_mapping("linear", VIT_TINY | online, "options"), 30.0),
    ):
        assert (settings.scale, settings.fidelity, settings.headtune) == ("fit", "intended", False)
        assert not config.improvement(settings)


def test_fit_keeps_a_rule_that_the_user_names_even_if_it_is_the_preset_s():
    given = VIT_TINY | {"scale": "fit", "aggregator": "uniform"}
    settings = config.resolve(config.from_mapping("hepco", given, "options"))
    assert (settings.aggregator, settings.fidelity, settings.headtune) == ("uniform", "intended", False)
    improved = config.from_mapping("hepco", VIT_TINY | {"scale": "fit"}, "options")
    assert (improved.aggregator, improved.fidelity, improved.headtune) == ("mean", "improved", True)


def test_auto_leaves_closed_forms_as_they_are():
    settings = config.from_mapping("fedncm", VIT_TINY, "options")
    assert config.with_scale_of_schedule(settings, 5.0).scale == "paper"


# ---- a run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A run whose learning rate is searched, and what it said."""
    out, lines = tmp_path_factory.mktemp("search") / "run", []
    observer = dataclasses.replace(loop.Observer(), console=loop.QUIET)
    object.__setattr__(observer, "say", lines.append)
    summary = loop.run(settings_of(), out, observer=observer)
    return out, summary, lines


@pytest.mark.long
def test_a_run_says_what_was_chosen_and_how_and_writes_it(searched):
    out, summary, lines = searched
    written = config.load_yaml(out / "config.yaml")
    factor = written["lr"] * written["rate_factor"] / 1e-3
    assert written["scale"] == "fit" and factor > 1  # the paper's 1e-3 is too small here
    said = [line for line in lines if line.startswith("learning rates: ")]
    assert len(said) == 2 and "training steps where the run has" in said[0]
    assert f"{factor:g} x the paper's, chosen on " in said[1] and "% of the first" in said[1]
    found = summary["rate_search"]
    assert found == json.loads((out / "search.json").read_text())
    assert found["steps"] <= found["run_steps"] / 2 and summary["time"]["search_s"] > 0
    compared = [trial for trial in found["trials"] if trial["stage"] == "tasks"]
    assert len({(trial["scale"], trial["factor"]) for trial in compared}) in (2, 3)
    assert ("mini", 1.0) in {(trial["scale"], trial["factor"]) for trial in compared}


@pytest.mark.long
def test_the_settings_repeat_the_run_without_a_search_bit_for_bit(searched, tmp_path):
    out, summary, _ = searched
    settings = config.from_mapping("linear", config.load_yaml(out / "config.yaml"), "config.yaml")
    again = loop.run(settings, tmp_path / "again", observer=loop.Observer(console=loop.QUIET))
    assert not (tmp_path / "again" / "search.json").exists() and "rate_search" not in again
    assert read_rounds(tmp_path / "again") == read_rounds(out)
    assert again["accuracy"] == summary["accuracy"]


@pytest.mark.long
def test_a_search_that_is_stopped_is_made_again_when_the_run_is_resumed(searched, tmp_path):
    out, summary, _ = searched
    calls = iter([None] * 5 + [15])
    stopping = loop.Observer(console=loop.QUIET, stop=lambda: next(calls))
    with pytest.raises(Stopped):
        loop.run(settings_of(), tmp_path / "run", observer=stopping)
    assert config.load_yaml(tmp_path / "run" / "config.yaml")["rate_factor"] == 0
    resumed = loop.run(settings_of(), tmp_path / "run", True, loop.Observer(console=loop.QUIET))
    assert read_rounds(tmp_path / "run") == read_rounds(out)
    trials = [each["rate_search"]["trials"] for each in (resumed, summary)]
    assert trials[0] == trials[1]
    # the sweep that asked for it knows the run again
    assert loop.run(settings_of(), out, True, loop.Observer(console=loop.QUIET)) == summary


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_damaged_search_is_refused_in_one_line(content, tmp_path):
    assert loop._searched_before(tmp_path) == {}
    (tmp_path / loop.SEARCH).write_bytes(content)
    with pytest.raises(InputError, match=r"^resume: '[^\n]*search\.json' cannot be read \([^\n]*$"):
        loop._searched_before(tmp_path)


@pytest.mark.long
def test_the_search_never_sees_a_test_image(searched):
    """With noise as test images, every trial ends as before."""
    _, summary, _ = searched
    exp = build(settings_of())
    noise = np.random.default_rng(0).integers(0, 256, exp.test.input.shape, np.uint8)
    assert isinstance(exp.test, Split)
    exp = exp._replace(test=exp.test._replace(input=jnp.asarray(noise)))
    choice = rate_search.search(loop.placed(exp), loop.QUIET, lambda line: None)
    assert choice.to_json()["trials"] == summary["rate_search"]["trials"]


@pytest.mark.long
def test_two_devices_choose_as_one_does(searched):
    _, summary, _ = searched
    exp = loop.placed(build(settings_of(devices=2)))
    choice = rate_search.search(exp, loop.QUIET, lambda line: None)
    found = choice.to_json()["trials"], summary["rate_search"]["trials"]
    np.testing.assert_allclose(*([each["accuracy"] for each in trials] for trials in found), atol=0.05)


def test_a_method_of_a_closed_form_says_that_nothing_is_searched():
    choice = rate_search.search(build(settings_of("fedncm")), loop.QUIET, lambda line: None)
    assert choice.settings.rate_factor == 1 and "searches nothing" in choice.line and not choice.trials


def test_an_entry_from_outside_is_searched_too():
    entry = MethodEntry("mine", None, METHODS["l2p"].build, "linear", name="mine")
    settings = config.from_mapping(entry, SMALL | {"scale": "fit"}, "options")
    rates = [candidate.rates(settings)["lr"] for candidate in rate_search.candidates_of(settings, False)]
    assert rates[:3] == pytest.approx([1e-3, 3e-3, 1e-2])
