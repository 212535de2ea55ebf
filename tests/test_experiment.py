"""What a run leaves behind, on two small real runs with the packaged backbone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

from fcljax import cli, config
from fcljax.commands import running
from fcljax.data.files.sources import load_dataset
from fcljax.data.tasks import class_order, relabel
from fcljax.federated.engine import Lanes
from fcljax.methods import METHODS
from fcljax.methods.fedavg import linear
from fcljax.results import run_folder
from fcljax.runs import build, evaluate, machine
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import make_evaluate, personal_accuracy
from fcljax.runs.records import Records

WIDTH, CLASSES, TASKS = 96, 10, 5  # of vit_micro and of the digits
HEAD = WIDTH * CLASSES + CLASSES


@pytest.fixture(params=["linear", pytest.param("fppl", marks=pytest.mark.long)])
def run(request):
    return small_runs.finished(request.param)


@pytest.fixture
def linear_run():
    return small_runs.finished("linear")


@pytest.fixture
def fppl_run():
    return small_runs.finished("fppl")


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- files -------------------------------------------------------------------------------------------------


def test_a_run_directory_holds_what_it_should_and_nothing_half_written(run):
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "figures",
        "confusion.csv",
        "predictions.csv",
        "digests.json",
        "report.html",
        ".lock",
    }
    figures = {path.name: path.read_bytes() for path in (run / "figures").iterdir()}
    assert set(figures) == {"accuracy.png", "matrix.png", "classes.png", "reliability.png"}
    assert all(content.startswith(b"\x89PNG") for content in figures.values())


def test_the_last_checkpoints_are_kept(run):
    rounds = len(lines_of(run))
    assert {path.name for path in (run / "checkpoints").iterdir()} == {str(rounds - 1), str(rounds)}


def test_config_yaml_gives_the_same_settings_back(run):
    summary = summary_of(run)
    again = running.settings(summary["method"], {}, running.Paths(config=str(run / "config.yaml")))
    assert dataclasses.asdict(again) == summary["config"]
    assert config.to_yaml(again) == (run / "config.yaml").read_text()


# ---- summary.json ------------------------------------------------------------------------------------------


def test_the_summary_has_every_field_that_reports_read(run):
    assert run_folder.load_summary(run) == summary_of(run)


def test_accuracy_is_square_with_null_above_the_diagonal(run):
    accuracy = summary_of(run)["accuracy"]
    assert [len(row) for row in accuracy] == [TASKS] * TASKS
    for t, row in enumerate(accuracy):
        assert all(0 <= value <= 1 for value in row[: t + 1])
        assert row[t + 1 :] == [None] * (TASKS - t - 1)


def test_average_accuracy_and_forgetting_follow_from_the_matrix(run):
    summary = summary_of(run)
    a = np.array(summary["accuracy"], float)
    assert summary["A"] == pytest.approx([np.mean(a[t, : t + 1]) for t in range(TASKS)])
    assert summary["A_avg"] == pytest.approx(np.mean(summary["A"]))
    assert summary["A_last"] == summary["A"][-1]
    assert summary["forgetting"]["diagonal"] == pytest.approx(
        np.mean([a[i, i] - a[-1, i] for i in range(TASKS - 1)])
    )
    assert summary["backward_transfer"] == pytest.approx(-summary["forgetting"]["diagonal"])


def test_class_accuracy_averages_to_task_accuracy_weighted_by_test_rows(linear_run):
    summary = summary_of(linear_run)
    data = load_dataset("digits")
    label = relabel(data.y_test, class_order(CLASSES, np.random.RandomState(summary["seed"])))
    rows = np.bincount(label, minlength=CLASSES)
    right = np.array(summary["class_accuracy"]) * rows
    by_task = right.reshape(TASKS, 2).sum(1) / rows.reshape(TASKS, 2).sum(1)
    assert by_task == pytest.approx(summary["accuracy"][-1])


def test_every_compiled_function_was_traced_once_over_all_tasks_and_rounds(run):
    assert summary_of(run)["traces"] == 1


def test_communication_of_linear_is_its_head_and_a_weight(linear_run):
    assert summary_of(linear_run)["communication"] == {
        "upload_scalars": HEAD,
        "upload_bytes": 4 * HEAD + 4,
        "download_scalars": HEAD,
        "download_bytes": 4 * HEAD,
    }


@pytest.mark.long
def test_communication_of_fppl_is_prompt_gate_head_and_prototypes(fppl_run):
    prompt, gate, prototypes = 2 * 2 * WIDTH, TASKS * WIDTH + 1, 2 * WIDTH
    summary = summary_of(fppl_run)
    assert summary["trainable_params_by_part"] == {"adapter": prompt + gate, "classifier": HEAD}
    assert summary["trainable_params"] == prompt + gate + HEAD
    assert summary["communication"]["upload_scalars"] == prompt + gate + HEAD + prototypes
    assert summary["communication"]["download_scalars"] == prompt + gate + HEAD + prototypes
    assert (
        summary["communication"]["upload_bytes"] == 4 * summary["communication"]["upload_scalars"] + 2 + 4
    )  # two flags, a weight
    assert summary["extra_storage"] == {"scalars": TASKS * prompt, "bytes": 4 * TASKS * prompt}


def test_total_communication_counts_every_upload(run):
    summary, uploads = summary_of(run), sum(line["participants"] for line in lines_of(run))
    assert uploads > 0
    expected = {name: value * uploads for name, value in summary["communication"].items()}
    handover = summary["communication_extra"].get("handover", {})
    if summary["method"] == "fppl":  # clients hold the prompts of earlier tasks, in their last state
        assert handover["download_scalars"] == summary["extra_storage"]["scalars"] // TASKS > 0
    for name, value in handover.items():
        expected[name] += value * summary["config"]["clients"] * (TASKS - 1)
    assert summary["communication_total"] == expected


def test_times_and_rates_are_positive_and_efficiency_is_a_share(run):
    summary = summary_of(run)
    assert all(seconds > 0 for seconds in summary["time"].values())
    assert summary["client_images_per_s"] >= summary["trained_images_per_s"] > 0
    assert summary["eval_images_per_s"] > 0
    assert 0 < summary["slot_efficiency"] <= 1


def test_client_accuracy_is_per_client_and_methods_without_personal_models_have_none(run):
    summary = summary_of(run)
    assert len(summary["client_accuracy"]) == summary["config"]["clients"]
    assert all(0 <= value <= 1 for value in summary["client_accuracy"])
    assert summary["personal_accuracy"] is None
    calibration, confusion_rows = summary["calibration"], sum(summary["calibration"]["examples"])
    assert 0 < calibration["ece"] < 1 and len(calibration["examples"]) == 15
    right = sum(n * a for n, a in zip(calibration["examples"], calibration["accuracy"], strict=True) if n)
    assert right / confusion_rows == pytest.approx(summary["by_image"]["acc"][-1])


# ---- metrics.jsonl -----------------------------------------------------------------------------------------


def test_metrics_have_a_line_per_round_in_order(run):
    rounds = summary_of(run)["config"]["rounds"]
    assert [(line["task"], line["round"]) for line in lines_of(run)] == [
        (t, r) for t in range(TASKS) for r in range(rounds)
    ]


def test_accuracy_is_logged_at_the_end_of_tasks_and_is_the_summarys(run):
    summary = summary_of(run)
    ends = [line for line in lines_of(run) if line["round"] == summary["config"]["rounds"] - 1]
    for line, row, average in zip(ends, summary["accuracy"], summary["A"], strict=True):
        assert line["accuracy"] == row[: line["task"] + 1]
        assert line["A"] == pytest.approx(average)


def test_accuracy_is_logged_in_every_round_if_asked_for(linear_run):
    assert all(len(line["accuracy"]) == line["task"] + 1 for line in lines_of(linear_run))


@pytest.mark.long
def test_accuracy_is_logged_after_a_task_s_last_round_alone_unless_asked_for(fppl_run):
    assert all(("accuracy" in line) == (line["round"] == 1) for line in lines_of(fppl_run))
    assert all(line["participants"] <= 2 for line in lines_of(fppl_run))


def test_the_share_of_clients_that_was_asked_for_takes_part(linear_run):
    assert all(line["participants"] == 2 for line in lines_of(linear_run))  # ceil(0.6 * 3)


# ---- personal models ---------------------------------------------------------------------------------------


def counting(options, run):
    """`linear` whose client's personal model predicts the class numbered like the rounds it took part in."""
    method = linear(options, run)
    (main,) = method.rounds
    program = main.program

    def start(context, state, key):
        return program.start(context, (), key)

    def finish(context, local, state):
        return program.finish(context, local, ())[0], state + 1

    def predict_client(round_context, server, state, batch):
        shape = (batch.input.shape[0], run.sizes.classes)
        return jnp.broadcast_to(jax.nn.one_hot(state, run.sizes.classes), shape)

    return method._replace(
        rounds=(main._replace(program=program._replace(start=start, finish=finish)),),
        init_client=lambda key, server: jnp.zeros((), jnp.int32),
        predict_client=predict_client,
    )


@pytest.mark.long
def test_where_personal_models_count_the_last_evaluation_has_their_accuracy(monkeypatch):
    """That of predictions made once more, which would be compiled once more."""
    monkeypatch.setitem(METHODS, "linear", dataclasses.replace(METHODS["linear"], build=counting))
    given = {"clients": 2, "partition": "iid", "rounds": 1, "epochs": 1, "image_size": 8}
    exp = build.build(config.resolve(config.from_mapping("linear", given, "test")))
    exp = exp._replace(method=exp.method._replace(personal=True))
    state = State(exp.method.init(exp.key, exp.frozen), jnp.array([0, 3]), exp.key)
    records = Records()
    records.keep(make_evaluate(exp)(exp.test, state, TASKS - 1, records))
    share = [np.mean(exp.scenario.test_label == label) for label in (0, 3)]
    assert personal_accuracy(exp, state, Records()) == pytest.approx(share)
    monkeypatch.setattr(evaluate, "predictor", None)
    assert personal_accuracy(exp, state, records) == pytest.approx(share)


@pytest.mark.long
def test_personal_accuracy_uses_each_clients_own_state(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "linear", dataclasses.replace(METHODS["linear"], build=counting))
    options = [*small_runs.COMMON, "--rounds", "1", "--clients", "2", "--partition", "iid"]
    assert cli.main(["run", "linear", *options, "--out", str(tmp_path / "run")]) == 0
    label = relabel(load_dataset("digits").y_test, class_order(CLASSES, np.random.RandomState(2023)))
    assert summary_of(tmp_path / "run")["personal_accuracy"] == pytest.approx([np.mean(label == TASKS)] * 2)


# ---- widths of steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flops", "widths"),
    [
        ({}, 3e8, ((3, 18, 32), (32,))),  # the second pass is of one epoch
        pytest.param({"rounds": 1}, 3e8, ((32,), (32,)), marks=pytest.mark.long),  # too short a run
        # long enough for both
        pytest.param({"rounds": 9}, 3e8, ((3, 18, 32), (18, 32)), marks=pytest.mark.long),
        ({}, 2.3e7, ((32,), (32,))),  # as vit_micro's: less is saved than compiling costs
        pytest.param({"lanes": 4, "lane_mode": "vmap"}, 3e8, ((32,), (32,)), marks=pytest.mark.long),
        pytest.param({"lanes": 4, "lane_mode": "loop"}, 3e8, ((3, 18, 32), (32,)), marks=pytest.mark.long),
        pytest.param({"batch_size": 1}, 3e8, ((1,), (1,)), marks=pytest.mark.long),
    ],
)
def test_a_step_has_further_widths_where_they_save_more_than_they_cost(options, flops, widths, monkeypatch):
    cfg = config.resolve(config.from_mapping("fppl", options, "test"))
    monkeypatch.setattr(machine, "forward_flops", lambda backbone: flops)
    (player,) = build.build(cfg).engine.players
    assert player.capacity.widths == widths


# ---- lanes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "options", "flops", "lanes"),
    [
        ("cpu", {}, 2.3e7, Lanes(1, "loop")),  # whatever the network
        ("tpu", {}, 3.5e10, Lanes(1, "loop")),  # a ViT-B fills a chip alone
        ("tpu", {}, 2.3e7, Lanes(10, "vmap")),  # vit_micro: ten equal clients side by side
        ("gpu", {"lanes": 4}, 3.5e10, Lanes(4, "vmap")),  # as asked
        ("gpu", {"lane_mode": "unroll"}, 2.3e7, Lanes(10, "unroll")),
    ],
)
def test_the_lanes_fit_the_device_the_network_and_the_clients(backend, options, flops, lanes, monkeypatch):
    given = {"clients": 10, "partition": "iid", **options}
    cfg = config.resolve(config.from_mapping("linear", given, "test"))
    monkeypatch.setattr(machine, "forward_flops", lambda backbone: flops)
    monkeypatch.setattr(machine.jax, "default_backend", lambda: backend)
    assert build.build(cfg).engine.lanes == lanes


def test_flops_are_those_of_the_network():
    cfg = config.resolve(config.from_mapping("fedavg", {}, "test"))
    backbone = build.build(cfg).inputs.backbone
    vit, patches = backbone.config, (backbone.config.image_size // backbone.config.patch) ** 2
    tokens = patches + 1
    whole = 4 * vit.width**2 + 2 * vit.width * vit.mlp + 2 * tokens * vit.width  # of a token in a block
    # of the last block the class token alone is computed, and the keys and values of all
    last = whole - 2 * vit.width**2 + tokens * 2 * vit.width**2
    products = (vit.depth - 1) * tokens * whole + last + patches * 3 * vit.patch**2 * vit.width
    assert machine.forward_flops(backbone) == pytest.approx(2 * products, rel=0.05)
