"""`fcljax reproduce`: rows as runs, mini scale, what is written, and mistakes in one line."""

import configparser
import dataclasses
import functools
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_runs
from test_experiments import FOLDER, TABLES, network_with_shapes

from fcljax import cli, config
from fcljax.commands import running
from fcljax.commands.reproducing import _command
from fcljax.data.files.dataset import Dataset
from fcljax.errors import InputError
from fcljax.methods import find_method
from fcljax.runs.build import make_method
from fcljax.scenario import make_scenario
from fcljax.studies import papers, reproduce, sweeps
from fcljax.studies.mini import MOST, RATES, VALUES, mini
from fcljax.studies.sweeps import Outcome
from fcljax.types import Sizes

TINY = """paper: nobody
method: linear
seeds: [7, 8, 9]
base: {dataset: digits, tasks: 2, clients: 2, rounds: 1, epochs: 1, batch_size: 64, image_size: 8}
tables:
  table1:
    title: a table
    source: table 1
    metrics: [A_avg, A_last]
    upload: 3
    claims: [a slow one learns less]
    rows:
    - {method: linear, numbers: [FIRST, null]}
    - {method: linear, options: {lr: 0.01}, numbers: [SECOND, 50]}
verified: {}
"""


OF_FOLDER = ["reproduce", "--experiments", "experiments"]


def tiny(first, second):
    """The file, with the first numbers of its rows."""
    return TINY.replace("FIRST", first).replace("SECOND", second)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder `experiments` with one paper, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "x.yaml").write_text(tiny("[40, 1]", "[90, 1]"))
    return tmp_path / "experiments"


@functools.cache
def columns_of(system, table):
    """The columns of a table of the package's own files, read once."""
    return papers.find_columns(FOLDER, system, table)


def planned(system, table, scale="mini", seeds=None, folder=FOLDER, row=None):
    columns = columns_of(system, table) if folder is FOLDER else papers.find_columns(folder, system, table)
    return reproduce.plan(columns, scale, seeds, row)


# ---- what is asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: fcljax reproduce SYSTEM TABLE [options], such as fppl table3"),
        (["fppl"], "usage: fcljax reproduce SYSTEM TABLE"),
        (["fppl", "--scale", "mini"], "usage: fcljax reproduce SYSTEM TABLE"),
        (["fpl", "table3"], "system: unknown value 'fpl'; did you mean 'fppl'?"),
        (["fppl", "tabel3"], "table: unknown value 'tabel3'; did you mean 'table3'?"),
        (["fppl", "table3", "--scale", "full"], "scale: unknown value 'full'"),
        (["fppl", "table3", "--seeds", "0"], "seeds: 0 is too small; nearest valid value: 1"),
        (["fppl", "table3", "--jobs", "0"], "jobs: 0 is too small; nearest valid value: 1"),
        (["fppl", "table3", "--sed", "1"], "did you mean '--seeds'?"),
        (["fppl", "table3", "--out", "a", "--resume", "b"], "resume: 'b' already has a folder"),
        (
            ["fppl", "table3", "--row", "fppl [non]"],
            "row: unknown value 'fppl [non]'; did you mean 'fppl [none]'?",
        ),
        (
            ["fppl", "figure4", "--row", "glfc"],
            "row: unknown value 'glfc'; choose from: coda-prompt, fedslca --lr 0.01 --full-lr 0.0001, fppl, "
            "fppl --wo-pool, glfc --lr 0.01 --full-lr 0.0001 --memory-size 200\n",
        ),
        (["fppl", "table3", "--resume", "nothing"], "resume: 'nothing' is not a sweep folder"),
        (["fppl", "table3", "--experiments", "nowhere"], "experiments: no folder 'nowhere'"),
        (["fppl", "table3", "--experiments", "."], "experiments: no file in '.' has a paper's tables"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err
    assert not list(tmp_path.iterdir())


def test_a_row_that_is_no_run_is_named(folder, capsys):
    path = folder / "x.yaml"
    path.write_text(path.read_text().replace("{lr: 0.01}", "{lora_lr: 0.01}"))
    assert cli.main([*OF_FOLDER, "x", "table1"]) == 2
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1 and "row 'linear --lora-lr 0.01': " in err and "--lora-lr is an option of" in err
    )


def test_rows_are_runs_with_the_files_first_seeds(folder):
    made = planned("x", "table1", "paper", None, folder)
    assert [run.name for run in made.runs] == [f"linear_seed-{seed}" for seed in (7, 8, 9)] + [
        f"linear_lr-0.01-{made.runs[3].name[-13:-7]}_seed-{seed}" for seed in (7, 8, 9)
    ]
    assert [run.cfg.lr for run in made.runs] == [1e-3] * 3 + [1e-2] * 3
    assert made.runs[3].given["lr"] == 0.01 and "lr" not in made.runs[0].given
    assert [len(part.runs) for part in made.parts] == [3, 3]
    (column,) = papers.find_columns(folder, "x", "table1")
    assert reproduce.seeds_of(column, "mini", None) == [7]
    assert reproduce.seeds_of(column, "paper", None) == [7, 8, 9]
    assert reproduce.seeds_of(column, "mini", 5) == [7, 8, 9, 10, 11]


@pytest.mark.long
def test_what_the_plan_gives_a_run_is_all_of_it():
    for run in first_of_each():
        again = config.from_mapping(run.method, run.given, "given")
        assert again == run.cfg


@pytest.mark.long
def test_the_printed_command_makes_the_same_run():
    for run in first_of_each():
        program, verb, method, *options = shlex.split(reproduce.command(run))
        assert (program, verb, method) == ("fcljax", "run", run.method)
        given = running.parse_run(method, options, "run", "")
        assert running.settings(method, given, running.Paths()) == run.cfg


def test_one_row_is_run_alone_with_the_settings_that_it_has_in_the_table(capsys):
    whole = planned("hepco", "table1")
    assert len(whole.parts) == 24 and len({run.cfg for run in whole.runs}) < 24
    alone = planned("hepco", "table1", row="target --lr 5e-5 [domainnet]")
    (part,) = alone.parts
    (same,) = [each for each in whole.parts if each.label == part.label]
    settings = {run.name: run.cfg for run in whole.runs}
    assert [run.cfg for run in alone.runs] == [settings[name] for name in same.runs]
    columns = planned("hepco", "table1", row="target --lr 5e-5").parts
    assert [part.column.name for part in columns] == ["cifar-100", "domainnet", "imagenet-r"]
    arguments = ["fppl", "table3", "--row", "fppl [ud]", "--dry-run"]
    assert cli.main(["reproduce", *arguments]) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fcljax run")]
    assert "--wo-fusion" in command and "--wo-debias" not in command


def test_rows_with_the_same_settings_share_their_runs():
    made = planned("fppl", "table1")
    assert len(made.runs) == 8 and "fppl [cub-200], fppl [imagenet-r]" in reproduce.shared(made)
    assert len(planned("fppl", "table1", "paper").runs) == 48
    assert not reproduce.shared(planned("fppl", "table3"))


# ---- mini scale --------------------------------------------------------------------------------------------


def labels_only(cfg):
    """The glyphs of a run, and the digits of a mixture, without their pixels."""
    digits = 10 * (cfg.dataset == "mix:digits+glyphs")
    train = np.concatenate(
        [np.repeat(np.arange(digits), 143), np.repeat(np.arange(100), cfg.glyph_train) + digits]
    )
    test = np.repeat(np.arange(100 + digits), 10)
    image = lambda rows: np.zeros((len(rows), 1, 1, 3), np.uint8)
    names = tuple(map(str, range(100 + digits)))
    sources = tuple([0] * digits + [1] * 100) if digits else None
    return Dataset(cfg.dataset, image(train), train, image(test), test, names, sources=sources)


@functools.cache
def first_of_each():
    """A run for each method and adapter of all tables, at mini scale."""
    found = {}
    for name in TABLES:
        for run in planned(*name).runs:
            found.setdefault((run.method, run.cfg.adapter, run.cfg.partition), run)
    return list(found.values())


@pytest.mark.long
def test_mini_runs_can_be_built_of_every_method():
    runs = first_of_each()
    assert len({run.method for run in runs}) >= 25
    for run in runs:
        can_be_built(run)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLES, ids="-".join)
def test_every_mini_run_can_be_built(name):
    made = planned(*name)
    assert not [part.why for part in made.parts if part.why]
    for run in made.runs:
        can_be_built(run)


@functools.cache
def network(name):
    return network_with_shapes(name)[0]


def can_be_built(run):
    cfg = run.cfg
    assert (cfg.dataset in ("glyphs", "mix:digits+glyphs"), cfg.checkpoint) == (True, None)
    scenario = make_scenario(labels_only(cfg), cfg, cfg.rounds, find_method(run.method).joint)
    first = scenario.tasks[0]
    sizes = Sizes(len(first.seen), len(scenario.tasks), len(first.classes), cfg.clients, cfg.rounds, 50)
    assert make_method(cfg, sizes, network(cfg.backbone))
    rows = sum(int(partition.count.sum()) for of_task in scenario.partitions for partition in of_task[:1])
    assert 200 <= rows <= 10_000


def test_mini_keeps_the_design_and_what_a_row_sets():
    (column,) = papers.find_columns(FOLDER, "hepco", "table3")
    full = reproduce.settings_of(column, column.rows[1])
    small = mini(full)
    same = ("partition", "imbalance", "category_ratio", "wo_previous", "class_order", "fidelity", "pool_size")
    assert all(getattr(small, name) == getattr(full, name) for name in same) and small.wo_previous
    assert (small.tasks, small.clients, small.rounds, small.epochs, small.batch_size) == (5, 5, 3, 3, 16)
    assert (small.backbone, small.dataset, small.augment, small.normalise) == (
        "vit_micro",
        "glyphs",
        None,
        "checkpoint",
    )
    assert mini(full, {"epochs"}).epochs == 10
    changed = {
        field.name
        for field in dataclasses.fields(full)
        if getattr(full, field.name) != getattr(small, field.name, None)
    }
    known = {
        "scale",
        *VALUES,
        *MOST,
        *RATES,
        "optimiser",
        "momentum",
        "weight_decay",
        "dataset",
        "backbone",
        "glyph_train",
        "classes_per_client",
        "task_pool",
    }
    assert changed <= known and all(
        name in mini.__doc__ for name in ("classes_per_client", "surrogate", "exemplars")
    )


def test_mini_takes_the_methods_own_rates_and_the_rows():
    runs = {run.name.partition("_")[0]: run.cfg for run in planned("pilora", "table1").runs}
    assert (runs["pilora"].lr, runs["ewc"].lr, runs["ewc"].optimiser, runs["ewc"].momentum) == (
        0.1,
        0.01,
        "sgd",
        0.9,
    )
    assert runs["fedclm"].optimiser == "adam" and not hasattr(runs["fedclm"], "momentum")
    weights = [run.cfg.prior_weight for run in planned("vfcl", "table4").runs]
    assert weights == [1e-4, 1e-2, 1.0, 1e2, 1e4]


def test_mini_multiplies_rates_where_the_paper_has_many_more_steps():
    runs = {run.name.partition("_")[0]: run.cfg for run in planned("pilora", "table1").runs}
    assert runs["pilora"].lora_lr == pytest.approx(10 * 1e-5)
    assert (runs["ewc"].lora_lr, runs["icarl"].lora_lr) == (0.01, 0.01)  # of another optimiser
    hepco = {run.method: run.cfg for run in planned("hepco", "table1").runs}
    fast = [hepco[name].lr for name in ("hepco", "fed-cprompt", "fedavg-ft")]
    # the last is what its row says, as many times as the method's own is larger at this scale
    assert fast == pytest.approx([1e-2, 1e-2, 5e-3]) and hepco["fedavg-ft"].full_lr == 5e-4
    assert {run.cfg.lr for run in planned("fppl", "table3").runs} == {1e-3}
    assert {(run.cfg.lr, run.cfg.tune_lr, run.cfg.mask_ratio) for run in planned("pmae", "table3").runs} == {
        (0.01, 0.001, 0.5)
    }


def test_mini_has_the_packaged_network_in_place_of_convolutional_ones():
    runs = {run.method: run.cfg for run in planned("vfcl", "table5").runs}
    assert {cfg.backbone for cfg in runs.values()} == {"vit_micro"}
    rates = [(runs[name].lr, runs[name].full_lr) for name in ("vfcl", "glfc")]
    assert rates == [pytest.approx((0.05, 0.001)), pytest.approx((0.03, 3e-4))]
    assert [runs[name].optimiser for name in ("vfcl", "glfc")] == ["sgd", "adam"]
    assert (runs["vfcl"].task_pool, runs["vfcl"].exemplars, runs["cfed"].surrogate) == ("order", 2, "digits")


def test_mini_keeps_the_number_of_clients_where_the_table_is_about_it():
    assert [run.cfg.clients for run in planned("fppl", "table4").runs] == [10, 20, 30, 40]
    assert {run.cfg.clients for run in planned("fppl", "table3").runs} == {5}


def test_mini_keeps_the_number_of_tasks_where_the_columns_differ_in_nothing_else():
    assert [run.cfg.tasks for run in planned("vfcl", "figure5").runs[::5]] == [10, 20, 5]
    assert {run.cfg.tasks for run in planned("hepco", "table1").runs} == {5}


def test_mini_keeps_the_share_of_labels_that_a_client_owns():
    owned = {
        run.name.split("_")[1]: vars(run.cfg).get("classes_per_client")
        for run in planned("pilora", "table1").runs
    }
    assert (owned["a2"], owned["a4"], owned["a6"]) == (4, 8, 12)
    owned = {
        run.name.split("_")[1]: vars(run.cfg).get("classes_per_client")
        for run in planned("pilora", "table2").runs
    }
    assert (owned["a4"], owned["a8"], owned["a12"]) == (4, 8, 12)


def test_all_rows_of_a_file_see_the_same_images():
    made = planned("hepco", "table1")
    assert {run.cfg.glyph_train for run in made.runs} == {100}
    alone = next(run.cfg for run in made.runs if run.method == "centralized-prompt")
    assert (alone.clients, alone.rounds, alone.epochs, alone.partition) == (1, 1, 9, "iid")


def test_a_row_that_cannot_be_at_this_scale_is_said(folder, monkeypatch):
    def refuse(settings, kept):
        if settings.lr == 0.01:
            raise InputError("lr: not so fast")
        return mini(settings, kept)

    monkeypatch.setattr(reproduce, "mini", refuse)
    made = planned("x", "table1", folder=folder)
    assert [part.why for part in made.parts] == ["", "cannot run at mini scale: lr: not so fast"]
    (run,) = made.runs
    found = reproduce.results(made, {run.name: Outcome("failed", 2, "no data", None)}, folder)
    assert [each.why for each in found] == ["failed: no data", made.parts[1].why]


# ---- what comes out ----------------------------------------------------------------------------------------


def summary(A_avg, A_last):
    """That of a finished run, with other accuracies."""
    found = json.loads((small_runs.finished("linear") / "summary.json").read_text())
    return found | {"A_avg": A_avg, "A_last": A_last}


@pytest.fixture
def swept(monkeypatch):
    """A sweep that makes no run: those with a rate of their own have an A_avg of 0.9, the others of 0.4, and
    0.01 more with each seed."""

    def sweep(runs, out, resume, ways, console):
        out.mkdir(exist_ok=resume)
        outcomes = {}
        for run in runs:
            shutil.copytree(small_runs.finished("linear"), out / run.name, dirs_exist_ok=True)
            more = 0.01 * (run.cfg.seed - 8)
            found = summary(0.9 + more if "lr" in run.given else 0.4 + more, 0.5)
            (out / run.name / "summary.json").write_text(json.dumps(found))
            outcomes[run.name] = Outcome("finished", 0, "", found)
        return outcomes

    monkeypatch.setattr(sweeps, "sweep", sweep)


def test_tables_are_written_and_mini_leaves_the_files_alone(folder, swept, capsys):
    before = (folder / "x.yaml").read_bytes()
    assert cli.main([*OF_FOLDER, "x", "table1", "--seeds", "3", "--out", "out"]) == 0
    said, out = capsys.readouterr().out, Path("out")
    text = (out / "table.md").read_text()
    assert "| linear | A\\_avg (%) | 40.00±1.00 | 40.00±0.82 | 3 | +0.00 | -2.48 to +2.48 |" in text
    assert "Of 1 pairs of rows that the paper orders by a clear gap 1 have the same order here." in text
    assert "Of 1 pairs" in said and "a slow one learns less" in said and "mini scale" in said
    found = json.loads((out / "table.json").read_text())
    assert found["order"]["alike"] == 1 and found["rows"][1]["metrics"]["A_avg"]["values"] == [89, 90, 91]
    assert (out / "accuracy.png").stat().st_size > 1000
    assert (folder / "x.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("paper", "seeds", "status"),
    [
        ("[90, 1]", "3", "reproduced"),
        pytest.param("[70, 9]", "3", "not reproduced", marks=pytest.mark.long),
        pytest.param("90", "2", None, marks=pytest.mark.long),
    ],
)
def test_runs_at_the_papers_scale_update_status_and_cost(paper, seeds, status, folder, swept, capsys):
    path = folder / "x.yaml"
    path.write_text(tiny("40", paper))
    before = path.read_text()
    arguments = [*OF_FOLDER, "x", "table1", "--scale", "paper", "--seeds", seeds, "--out", "out"]
    assert cli.main(arguments) == 0
    (column,) = papers.find_columns(folder, "x", "table1")
    assert (": unchanged, because" in capsys.readouterr().out) == (status is None)
    if status is None:
        assert path.read_text() == before
    else:
        found = column.paper.verified["table1"]
        assert found.status == status
        assert re.match(r"6 runs, [\d.]+ hours in all, cpu", found.cost)
        assert path.read_text().startswith(before.partition("verified:")[0])
    assert not list(folder.glob(".*"))


def test_a_run_that_failed_is_said_and_counts_for_nothing(folder, monkeypatch, capsys):
    def sweep(runs, out, resume, ways, console):
        out.mkdir()
        return {run.name: Outcome("failed", 2, "dataset: 'x' is not here", None) for run in runs}

    monkeypatch.setattr(sweeps, "sweep", sweep)
    before = (folder / "x.yaml").read_bytes()
    assert cli.main([*OF_FOLDER, "x", "table1", "--scale", "paper", "--out", "out"]) == 1
    assert "failed: dataset: 'x' is not here" in Path("out/table.md").read_text()
    assert "In 1 further pair a row was not run." in capsys.readouterr().out
    assert (folder / "x.yaml").read_bytes() == before


def test_only_the_plan_is_listed_when_nothing_is_to_be_run(folder, capsys):
    assert cli.main([*OF_FOLDER, "x", "table1", "--dry-run", "--seeds", "2"]) == 0
    assert "4 runs" in capsys.readouterr().out and sorted(path.name for path in Path().iterdir()) == [
        "experiments"
    ]


def test_the_advice_of_a_stopped_run_is_the_command_that_goes_on():
    arguments = ["fppl", "table3", "--seeds", "3", "--out", "a b", "--jobs=2"]
    assert _command(arguments, Path("a b")) == (
        "fcljax reproduce fppl table3 --seeds 3 --jobs=2 --resume 'a b'"
    )
    assert _command(["x", "y", "--resume=c"], Path("c")) == "fcljax reproduce x y --resume c"


def test_the_files_of_papers_are_package_data():
    """As an installed package has them: the wheel takes what setup.cfg's globs name."""
    setup = configparser.ConfigParser()
    setup.read(small_runs.ROOT / "setup.cfg")
    package = small_runs.ROOT / "fcljax"
    globs = setup["options.package_data"]["fcljax"].split()
    data = {path for pattern in globs for path in package.glob(pattern)}
    assert {path.stem for path in data if path.suffix == ".yaml"} == {
        "fppl",
        "hepco",
        "pilora",
        "pmae",
        "vfcl",
    }
    assert {path for path in (package / "assets").rglob("*") if path.is_file()} <= data


def test_reproduce_reads_the_package_and_not_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    assert cli.main(["reproduce", "pmae", "table1", "--dry-run"]) == 0
    assert "runs" in capsys.readouterr().out


def test_a_verdict_on_the_package_s_own_file_is_only_reported(folder, monkeypatch):
    monkeypatch.setattr(papers, "write_verified", lambda *_: pytest.fail("written"))
    made = planned("x", "table1", "paper", 3, folder)
    summary = {"A_avg": 0.9, "A_last": 0.5, "time": {"client_s": 1.0}}
    outcomes = {run.name: Outcome("finished", 0, "", summary) for run in made.runs}
    found = reproduce.results(made, outcomes, folder)
    assert reproduce.record_paper_runs(found, outcomes, made, "cpu", False) == ["table1: not reproduced"]


@pytest.mark.long
def test_a_row_of_a_table_is_reproduced_at_mini_scale_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(small_runs.ROOT))
    arguments = ["reproduce", "fppl", "table1", "--row", "fppl"]
    assert cli.main([*arguments, "--out", "out"]) == 0
    rows = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["seeds"] == 1 for row in rows)
    assert all(50 < row["metrics"]["A_avg"]["mean"] < 100 for row in rows)
    logs = {path: path.read_bytes() for path in (tmp_path / "out").glob("*/metrics.jsonl")}
    assert cli.main([*arguments, "--resume", "out"]) == 0
    assert logs and {path: path.read_bytes() for path in logs} == logs
