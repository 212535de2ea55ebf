"""Which runs a file of `fcljax sweep` asks for."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from small_runs import ROOT

from fcljax import cli, config
from fcljax.errors import InputError
from fcljax.methods import METHODS
from fcljax.studies import grid
from fcljax.studies.grid import folder_name, plan_of


def plan(text):
    return plan_of(yaml.safe_load(text), "file")


def test_all_combinations_with_variants_methods_and_seeds():
    runs = plan("""
        method: [linear, fedavg]
        base: {tasks: 2, seed: 7}
        grid: {alpha: [0.1, 1e-2], clients: [3]}
        runs: [{name: plain}, {name: ours, method: ewc, adapter: lora, lora_rank: 2, tasks: 4}]
        seeds: 2
    """)
    names = [run.name for run in runs]
    assert names[:4] == [
        "linear_plain_alpha-0.1_clients-3_seed-7",
        "linear_plain_alpha-0.1_clients-3_seed-8",
        "linear_plain_alpha-0.01_clients-3_seed-7",
        "linear_plain_alpha-0.01_clients-3_seed-8",
    ]
    assert len(names) == len(set(names)) == 3 * 2 * 2
    last = runs[-1]
    assert (last.name, last.method) == ("ewc_ours_alpha-0.01_clients-3_seed-8", "ewc")
    assert last.given == {
        "tasks": 4,
        "seed": 8,
        "adapter": "lora",
        "lora_rank": 2,
        "alpha": 0.01,
        "clients": 3,
    }
    asked = config.from_mapping("ewc", {**last.given, "alpha": "1e-2"}, "options")
    assert last.cfg == asked


def test_an_option_at_its_default_that_one_of_the_methods_does_not_read_is_no_mistake():
    """alpha 0.5 beside centralised training, whose single client has no partition by classes."""
    runs = "[{name: one, method: centralised, clients: 1}, {name: many, method: linear}]"
    planned = plan(f"{{base: {{alpha: 0.5, tasks: 2}}, runs: {runs}}}")
    assert [run.given["alpha"] for run in planned] == [0.5, 0.5]
    with pytest.raises(InputError, match="^file: base.alpha: alpha: only dirichlet and task_dirichlet"):
        plan(f"{{base: {{alpha: 0.1, tasks: 2}}, runs: {runs}}}")


def test_a_method_alone_is_a_run():
    (run,) = plan("method: fppl")
    assert run.name == "fppl_seed-2023" and run.given == {}


WRONG = {
    "- a": "does not map names to values",
    "metod: linear": "unknown key 'metod'; did you mean 'method'?",
    "base: {tasks: 2}": "method: none given",
    "method: fpl": "the method fpl: method: unknown value 'fpl'; did you mean 'fppl'?",
    "method: 3": "method: 3 is not text or a list",
    "{method: linear, base: {taks: 3}}": "base.taks: unknown key 'taks'; did you mean 'tasks'?",
    "{method: linear, base: [3]}": "base: [3] is not a mapping",
    "{method: linear, base: {method: ewc}}": "base.method: write it next to base",
    "{method: linear, base: {lora_rank: 2}}": "base.lora_rank: --lora-rank is an option of the adapter",
    "{method: linear, grid: {alpha: 0.1}}": "grid.alpha: 0.1 is not a list",
    "{method: linear, grid: {alpha: []}}": "grid.alpha: it has no values",
    "{method: linear, grid: {alpha: [0.5, -1]}}": "grid.alpha: alpha: -1.0 must be finite and positive",
    "{method: linear, grid: {alpha: [few]}}": "grid.alpha: alpha: 'few' is not a number",
    "{method: linear, grid: {adapter: [lora, lra]}}": "grid.adapter: adapter: unknown value 'lra'",
    "{method: linear, base: {lr: 1}, grid: {lr: [1, 2]}}": "grid.lr: base sets it too",
    "{method: linear, runs: [{name: a, lr: 1}], grid: {lr: [1]}}": "grid.lr: runs[a] sets it too",
    "{method: linear, grid: {lr: [0.1, 1e-1]}}": "are the same run",
    "{method: linear, runs: [{name: a}, {name: b}]}": "linear_a_seed-2023 and linear_b_seed-2023 are",
    "{method: linear, runs: [{lr: 1}]}": "runs[0].name: each of runs needs a name",
    "{method: linear, runs: [{name: a}, {name: a}]}": "runs: 'a' is the name of two runs",
    "{method: linear, runs: [{name: a, method: ewc}]}": "method: 'linear' has no effect",
    "{method: linear, runs: [{name: a, malicious: 9}]}": "runs[a].malicious: malicious: 9 of 5 clients",
    "{method: linear, grid: {seed: [1, 2]}}": "grid.seed: list them as seeds",
    "{method: linear, seeds: x}": "seeds: 'x' is not a whole number or a list",
    "{method: linear, seeds: [1, 1]}": "seeds: '1,1,' must be different",
    "{method: linear, seeds: 1000}": "seeds: 1000 runs; nearest: 100",
    "{method: linear, base: {seed: 1}, seeds: [1, 2]}": "base.seed: 1 has no effect",
    f"{{method: linear, seeds: 99, grid: {{lr: {list(range(200))}}}}}": "more than 10,000 runs",
    "{method: linear, slurm: {partion: a}}": "slurm: unknown key 'partion'; did you mean 'partition'?",
    "{method: linear, ray: {gpus: -1}}": "ray: gpus: -1",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_one_line_that_names_the_place_and_nothing_is_made(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(text)
    assert cli.main(["sweep", "sweep.yaml", "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and WRONG[text] in err and "sweep.yaml" in err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


OPTIONS = [
    ([], "sweep: no file given"),
    (["sweep.yaml", "--jbs", "2"], "'--jobs'"),
    (["sweep.yaml", "--jobs", "0"], "jobs: 0 is too small"),
    (["sweep.yaml", "--engine", "slrm"], "engine: unknown value 'slrm'; did you mean 'slurm'?"),
    (["sweep.yaml", "--out", "a", "--resume", "b"], "leave out --out"),
    (["sweep.yaml", "--resume", "."], "resume: '.' is not a sweep folder"),
    (["sweep.yaml", "--devices", "0,0"], "devices: '0,0' is not a list of distinct GPUs"),
    (["sweep.yaml", "--devices", "all"], "devices: 'all' is not a list"),
    (["sweep.yaml", "--devices", "0,1", "--jobs", "3"], "jobs: 3 runs at a time on 2 devices; nearest: 2"),
    (["sweep.yaml", "--devices", "0", "--engine", "ray"], "--engine ray assigns devices to runs"),
    (["several.yaml", "--devices", "0,1"], "devices: the run linear_seed-2023 needs 2"),
]


@pytest.mark.parametrize(("arguments", "words"), OPTIONS)
def test_options_that_make_no_sense_are_refused(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "sweep.yaml").write_text("method: linear")
    (tmp_path / "several.yaml").write_text("{method: linear, base: {devices: 2}}")
    assert cli.main(["sweep", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err
    assert len(list(tmp_path.iterdir())) == 2


def test_devices_are_refused_where_jax_uses_no_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "sweep.yaml").write_text("method: linear")
    assert cli.main(["sweep", str(tmp_path / "sweep.yaml"), "--devices", "0,1"]) == 2
    assert "JAX_PLATFORMS is 'cpu'" in capsys.readouterr().err


def test_a_dry_run_lists_the_runs_of_the_example_and_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", str(ROOT / "experiments" / "sweep_digits.yaml"), "--dry-run"]) == 0
    assert "18 runs" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_sweep_of_embedded_data_has_every_method_with_its_defaults():
    runs = grid.plan(ROOT / "experiments" / "sweep_embedded.yaml")
    assert {run.method for run in runs} == set(METHODS) and len(runs) == 6 * len(METHODS)
    assert {name for run in runs for name in run.given} == {"glyph_train", "dataset", "seed"}


TEXTS = st.text(min_size=1, max_size=60) | st.sampled_from(
    ["0.1", "a_b", "a-b", "npz:x/a.npz", "npz:y/a.npz", "."]
)
RUNS = st.tuples(TEXTS, TEXTS, st.lists(TEXTS, min_size=2, max_size=2), st.integers(0, 2**32 - 1))


def named(run):
    method, variant, values, seed = run
    return folder_name(method, variant, list(zip(("lr", "class_list"), values, strict=True)), seed)


@given(st.lists(RUNS, min_size=2, max_size=8, unique_by=repr))
@pytest.mark.long
def test_names_are_those_of_folders_and_no_two_runs_share_one(runs):
    names = [named(run) for run in runs]
    assert len(set(names)) == len(runs)
    assert all(re.fullmatch(r"[A-Za-z0-9+-][A-Za-z0-9.+_-]*", name) and len(name) <= 120 for name in names)
    assert names == [named(run) for run in runs]


def test_further_values_and_variants_leave_names_as_they_are():
    text = "{method: linear, grid: {lr: [0.1%s]}, runs: [{name: a}%s], seeds: [1%s]}"
    (few,), many = plan(text % ("", "", "")), plan(text % (", 0.2", ", {name: b, epochs: 1}", ", 2"))
    assert few == many[0] and len(many) == 8


def test_a_value_whose_name_says_all_is_shown_as_it_is():
    assert folder_name("./mine.py", None, [("batch_size", 64), ("lr", 1e-5), ("augment", None)], 1) == (
        "mine.py-f66860_batch-size-64_lr-1e-05_augment-None_seed-1"
    )


def test_two_places_for_one_option_are_named_with_the_file():
    with pytest.raises(InputError, match=r"^my file: grid.lr: base sets it too; keep one of them$"):
        plan_of({"method": "linear", "base": {"lr": 1}, "grid": {"lr": [1]}}, "my file")


def test_all_18_published_cells_of_lorm_are_planned():
    path = ROOT / "experiments" / "lorm.yaml"
    runs = plan(path.read_text())
    assert len(runs) == 18
    assert {run.cfg.dataset for run in runs} == {
        "cifar100",
        "imagenet_r",
        "eurosat",
        "cub200",
        "cars196",
        "imagenet_a",
    }
    # every cell has three concentrations
    assert len({(run.cfg.dataset, run.cfg.alpha) for run in runs}) == 18
