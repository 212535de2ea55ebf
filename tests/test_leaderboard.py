"""`fcljax leaderboard`: the same search for every method, on held-out examples alone; what its page says."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from small_runs import ROOT, some

from fcljax import cli
from fcljax.config import InputConfig, PartitionConfig
from fcljax.methods import METHODS
from fcljax.results import figures
from fcljax.studies import leaderboard as board
from fcljax.studies import sweeps
from fcljax.studies.sweeps import Outcome

GLYPHS, CIFAR = (ROOT / "experiments" / f"leaderboard_{name}.yaml" for name in ("glyphs", "cifar"))
TINY = """base: {tasks: 2, clients: 2, rounds: 1, epochs: 1, batch_size: 64, image_size: 8}
seeds: [1, 2]
search: {holdout: 0.25, seed: 5}
factors: [1, 10]
methods: {linear: {}, fedncm: {}}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with the file tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def summary(run, a_last):
    """What is read of a summary.json, by hand."""
    return {
        "seed": run.cfg.seed,
        "A_last": a_last,
        "A_avg": a_last / 2,
        "forgetting": {"paper": 0.01},
        "personal": None,
        "communication_total": {"upload_bytes": 4e6, "download_bytes": 2e6},
        "time": {"client_s": 60.0, "compile_s": 30.0},
        "config": {"clients": run.cfg.clients},
        # two methods by one version of the package, and a later seed by another one
        "software": {"fcljax": "0.1.0" if run.cfg.seed < 2 else "0.2.0", "commit": None, "jax": "0.10.2"},
    }


class Made:
    """In the place of `sweeps.sweep`: the runs that were asked for, and A_last by a rule of theirs."""

    def __init__(self, a_last):
        self.a_last, self.asked = a_last, []

    def __call__(self, runs, folder, resume, ways, console):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / sweeps.PLAN).write_text("")
        self.asked += [(str(folder), run) for run in runs]
        found = {run.name: self.a_last(run) for run in runs}
        return {
            run.name: Outcome("failed", 2, "lost", None)
            if found[run.name] is None
            else Outcome("finished", 0, "", summary(run, found[run.name]))
            for run in runs
        }


# ---- what is planned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "old", "new", "said"),
    [
        ([], "", "", "usage: fcljax leaderboard FILE.yaml [options]"),
        (["none.yaml"], "", "", "none.yaml"),
        (["tiny.yaml", "--methods", "fppl"], "", "", "methods: 'fppl' is not one of linear, fedncm"),
        (["tiny.yaml", "--jobs", "0"], "", "", "jobs: 0 is too small; nearest valid value: 1"),
        (["tiny.yaml", "--out", "a", "--resume", "b"], "", "", "resume: 'b' already names the folder"),
        (
            ["tiny.yaml", "--base", "alpha"],
            "",
            "",
            "base: 'alpha' is not OPTION=VALUE, such as alpha=0.05",
        ),
        (
            ["tiny.yaml", "--base", "alfa=1"],
            "",
            "",
            "methods.linear: unknown key 'alfa'; did you mean 'alpha'?",
        ),
        (["tiny.yaml", "--resume", "b"], "", "", "resume: 'b' is not a leaderboard folder"),
        (["tiny.yaml"], "holdout: 0.25, ", "", "search.holdout: trials must not see test images"),
        (["tiny.yaml"], "[1, 10]", "[1, 1]", "factors: [1.0, 1.0] must be distinct positive numbers"),
        (["tiny.yaml"], "[1, 10]", "[1, -1]", "factors: [1.0, -1.0] must be distinct positive numbers"),
        (["tiny.yaml"], "[1, 10]", "[]", "factors: [] must be distinct positive numbers"),
        (
            ["tiny.yaml"],
            "linear: {}",
            "linaer: {}",
            "methods.linaer: method: unknown value 'linaer'; did you",
        ),
        (
            ["tiny.yaml"],
            "linear: {}",
            "linear: {lora_lr: 1}",
            "methods.linear: --lora-lr is an option of the adapter",
        ),
        (["tiny.yaml"], "linear: {}", "./own.py: {}", "the method './own.py' is a program"),
        (["tiny.yaml"], "seeds: [1, 2]", "tuned: {ewc: [lr]}", "tuned.ewc: it is not one of the methods"),
        (
            ["tiny.yaml"],
            "seeds: [1, 2]",
            "tuned: {linear: [rounds]}",
            "tuned: 'rounds' is not one of its options",
        ),
        (
            ["tiny.yaml"],
            "seeds: [1, 2]",
            "tuned: {linear: [ridge]}",
            "tuned: 'ridge' is not one of its options",
        ),
        (["tiny.yaml"], "seeds:", "sedes:", "unknown key 'sedes'; did you mean 'seeds'?"),
    ],
)
def test_a_mistake_is_one_line_and_makes_nothing(arguments, old, new, said, here, capsys):
    (here / "tiny.yaml").write_text(TINY.replace(old, new) if old else TINY)
    assert cli.main(["leaderboard", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


@pytest.mark.long
def test_the_leaderboard_of_embedded_data_has_every_method_with_as_many_trials():
    entries = board.plan(GLYPHS)
    assert [entry.method for entry in entries] == list(METHODS)
    assert {len(entry.trials) for entry in entries} == {0, 4}
    untuned = {entry.method for entry in entries if not entry.trials}
    assert untuned == {"fedncm", "fedrecon", "fedranpac", "zero-shot"}


def test_a_new_method_joins_the_leaderboard_of_real_images():
    """What its file leaves out needs a decoder or a text encoder, or trains as `centralised` does."""
    decoder = {"pmae", "l2p-pmae", "dualprompt-pmae", "coda-prompt-pmae"}
    texts = {"zero-shot", "promptfl", "fedtpg"}
    left_out = set(METHODS) - {entry.method for entry in board.plan(CIFAR)}
    assert left_out == {*decoder, *texts, "joint", "centralized-prompt"}


@pytest.mark.parametrize("file", some([GLYPHS, CIFAR], [GLYPHS]), ids=["glyphs", "cifar"])
def test_trials_see_no_test_image_and_share_all_but_the_tuned_options(file):
    for entry in board.plan(file):
        for factor, trial in entry.trials.items():
            assert trial.cfg.holdout > 0
            (first, *_) = entry.runs[factor]
            differ = {name for name in vars(first.cfg) if vars(first.cfg)[name] != vars(trial.cfg)[name]}
            assert differ == {"holdout", "seed"}
        runs = [run for each in entry.runs.values() for run in each]
        assert all(run.cfg.holdout == 0 for run in runs) and {run.cfg.seed for run in runs} == {
            2023,
            2024,
            2025,
        }


@pytest.mark.parametrize("file", [GLYPHS, CIFAR], ids=["glyphs", "cifar"])
@pytest.mark.long
def test_all_methods_have_the_same_network_data_partition_and_rounds(file):
    names = [field.name for kind in (InputConfig, PartitionConfig) for field in dataclasses.fields(kind)]
    names = [name for name in (*names, "participation", "rounds", "epochs", "batch_size") if name != "seed"]
    found = {
        entry.method: [getattr(run.cfg, name) for name in names]
        for entry in board.plan(file)
        for runs in entry.runs.values()
        for run in runs
    }
    clients = names.index("clients")
    for method in [name for name in found if METHODS[name].one_client]:
        assert found[method][clients] == 1
        found[method][clients] = found["hepco"][clients]
    assert all(settings == found["hepco"] for settings in found.values())


def test_options_of_the_command_replace_the_files(here, monkeypatch):
    made = Made(lambda run: 0.5)
    monkeypatch.setattr(sweeps, "sweep", made)
    more = ["--methods", "fedncm", "--base", "alpha=0.05,batch-size=16"]
    assert cli.main(["leaderboard", "tiny.yaml", *more, "--out", "out"]) == 0
    assert {(run.cfg.alpha, run.cfg.batch_size, run.cfg.clients) for _, run in made.asked} == {(0.05, 16, 2)}
    page = Path("out/leaderboard.md").read_text()
    assert f"fcljax leaderboard tiny.yaml {' '.join(more)}" in page and "--alpha 0.05" in page


def test_a_trial_multiplies_all_learning_rates_of_clients(here):
    (here / "tiny.yaml").write_text(TINY.replace("linear: {}", "ewc: {lr: 0.02, lora_lr: 0.5}"))
    ewc, _ = board.plan(here / "tiny.yaml")
    assert {factor: (run.cfg.lr, run.cfg.lora_lr) for factor, run in ewc.trials.items()} == {
        1: (0.02, 0.5),
        10: (0.2, 5.0),
    }
    assert [run.cfg.lr for run in ewc.runs[10]] == [0.2, 0.2]


# ---- what is chosen, made and written ----------------------------------------------------------------------


def test_the_best_trial_is_chosen_and_of_equal_ones_the_nearest_to_1():
    assert board.chosen({1.0: 0.5, 0.1: 0.7, 10.0: 0.6}) == 0.1
    assert board.chosen({10.0: 0.7, 0.1: None, 3.0: 0.7, 1.0: math.nan}) == 3
    assert board.chosen({1.0: None, 10.0: math.nan}) is None


def test_intervals_are_students():
    # 2 degrees of freedom: t = 4.3027, standard error 10 / sqrt(3)
    assert board.with_interval([0.1, 0.2, 0.3]) == "20.00±24.84"
    assert board.with_interval([0.25]) == "25.00"
    assert board.with_interval([float("nan")] * 2) == "-"


def test_only_the_chosen_factor_is_run_on_test_images(here, monkeypatch, capsys):
    made = Made(lambda run: 0.9 if run.cfg.lr > 5e-2 else 0.2 + run.cfg.seed / 100)
    monkeypatch.setattr(sweeps, "sweep", made)
    assert cli.main(["leaderboard", "tiny.yaml", "--out", "out"]) == 0
    folders = [folder for folder, _ in made.asked]
    assert folders == ["out/search/linear"] * 2 + ["out/linear"] * 2 + ["out/fedncm"] * 2
    assert [run.cfg.lr for folder, run in made.asked if folder == "out/linear"] == [0.1, 0.1]
    page = Path("out/leaderboard.md").read_text()
    best, second = (line for line in page.splitlines() if line.startswith(("| linear", "| fedncm")))
    # 6 MB of two clients are 3 of each; a run takes 1.5 minutes
    numbers = "| 2 | 90.00±0.00 | 45.00±0.00 | 1.00±0.00 | 3 | 1.5 |"
    assert best == f"| linear {numbers} --lr 0.1 | x1: 25.0, x10: 90.0 |"
    assert second.startswith("| fedncm | 2 | 21.50±6.35 |") and second.endswith("|  |  |")
    assert "2 trials on held-out training examples (`--holdout 0.25 --seed 5`)" in page
    assert "fcljax leaderboard tiny.yaml" in page and "Missing" not in page
    rows = {row["method"]: row for row in json.loads(Path("out/leaderboard.json").read_text())["rows"]}
    assert rows["linear"]["trials"] == {"1": 0.25, "10": 0.9} and rows["linear"]["seed"] == [1, 2]
    versions = ["fcljax 0.1.0, jax 0.10.2", "fcljax 0.2.0, jax 0.10.2"]
    assert rows["linear"]["software"] == versions
    assert [line for line in page.splitlines() if line.startswith("Made with")] == [
        f"Made with {software}." for software in versions
    ]
    assert Path("out/leaderboard.png").stat().st_size > 5000
    assert "linear" in capsys.readouterr().out


def test_what_fails_is_said_to_be_missing_and_ends_nothing(here, monkeypatch):
    made = Made(lambda run: None if run.method == "linear" else 0.3)
    monkeypatch.setattr(sweeps, "sweep", made)
    assert cli.main(["leaderboard", "tiny.yaml", "--out", "out"]) == 1
    page = Path("out/leaderboard.md").read_text()
    assert "| linear | 0 of 2 | failed: lost |" in page and "\n| fedncm | 2 | 30.00" in page


def test_methods_that_were_not_reached_are_missing_and_come_later(here, monkeypatch):
    def stopped(run):
        if run.method == "fedncm":
            raise KeyboardInterrupt
        return 0.3

    monkeypatch.setattr(sweeps, "sweep", Made(stopped))
    assert cli.main(["leaderboard", "tiny.yaml", "--out", "out"]) == 130
    page = Path("out/leaderboard.md").read_text()
    assert "\n| linear | 2 | 30.00" in page and "| fedncm | 0 of 2 | not finished |" in page
    monkeypatch.setattr(sweeps, "sweep", Made(lambda run: 0.4))
    assert cli.main(["leaderboard", "tiny.yaml", "--resume", "out"]) == 0
    assert "Missing" not in Path("out/leaderboard.md").read_text()


def test_the_figure_names_every_method_that_sends_something():
    figure = figures.scatter({"a": (2.0, 50), "b": (0.0, 60), "c": (1e-3, 70)}, "MB", "%", legend=True)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "c"]


@pytest.mark.parametrize("count", [0, 7, 20, 60])
def test_a_legend_has_room_for_all_names(count):
    """Of points and levels of a leaderboard, and of the curves of a comparison."""
    points = {f"method {i}": (i + 1.0, 50.0) for i in range(count)}
    levels = {"centralised": 99.0, "sequential": 60.0, "local": 20.0}
    curves = {name: [0.5, 0.4] for name in [*points, *levels]}
    drawn = [figures.scatter(points, "MB", "%", legend=True, levels=levels)]
    if count:
        drawn.append(figures.accuracy_curve(curves))
    for figure in drawn:
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert len(legend.get_texts()) == count + 3
        box = legend.get_window_extent()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


@pytest.mark.long
def test_a_leaderboard_of_real_runs_resumes(here):
    assert cli.main(["leaderboard", "tiny.yaml", "--methods", "linear", "--out", "out"]) == 0
    first = {path: path.read_bytes() for path in Path("out").rglob("metrics.jsonl")}
    assert len(first) == 4  # two trials and two seeds
    assert cli.main(["leaderboard", "tiny.yaml", "--resume", "out"]) == 0
    rows = {row["method"]: row for row in json.loads(Path("out/leaderboard.json").read_text())["rows"]}
    assert rows["linear"]["finished"] == rows["fedncm"]["finished"] == 2
    assert all(path.read_bytes() == content for path, content in first.items())
