"""One method over several seeds."""

import json

import pytest
import small_runs
from small_runs import COMMON

from fcljax import cli
from fcljax.errors import InputError
from fcljax.results.metrics import over_seeds
from fcljax.studies import seeds
from fcljax.studies.seeds import parse_seeds

SHORT = [*COMMON, "--rounds", "1", "--clients", "2", "--tasks", "2"]


@pytest.mark.parametrize(
    ("text", "found"), [("3", [7, 8, 9]), ("1", [7]), ("2023,5", [2023, 5]), ("4,", [4]), (" 1, 2 ", [1, 2])]
)
def test_seeds_are_a_number_of_them_or_a_list(text, found):
    assert parse_seeds(text, 7) == found


@pytest.mark.parametrize("text", ["", "x", "1.5", "-3", "0", "2023", "1,1", "1,x", str(2**32) + ",1"])
def test_other_seeds_are_refused_in_one_line(text):
    with pytest.raises(InputError, match="^seeds: "):
        parse_seeds(text, 0)


@pytest.mark.long
def test_a_method_over_seeds_is_a_run_for_each_and_a_mean(tmp_path, capsys):
    out = tmp_path / "many"
    assert cli.main(["run", "linear", *SHORT, "--seeds", "2", "--seed", "5", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 seeds" in said and (out / "accuracy.png").exists()
    runs = [json.loads((out / f"seed-{seed}" / "summary.json").read_text()) for seed in (5, 6)]
    assert [run["seed"] for run in runs] == [5, 6] and runs[0]["A"] != runs[1]["A"]
    result = json.loads((out / "seeds.json").read_text())
    mean, deviation = over_seeds([run["A_last"] for run in runs])
    assert result["seeds"] == [5, 6]
    assert result["A_last"]["mean"] == pytest.approx(mean)
    assert result["A_last"]["population_std"] == pytest.approx(deviation)


def test_what_is_finished_is_not_run_again_and_more_seeds_may_join(tmp_path, monkeypatch, capsys):
    made = []
    summary = lambda seed: {"seed": seed, "A_avg": 0.5, "A_last": 0.1 * seed, "forgetting": {"paper": None}}

    def run(cfg, folder, resume, observer):
        made.append((cfg.seed, resume))
        if len(made) == 2:
            raise KeyboardInterrupt
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text("")
        return summary(cfg.seed)

    monkeypatch.setattr(seeds.loop, "run", run)
    monkeypatch.setattr("fcljax.results.comparison.compare", lambda folders, out: ([], out))
    out = tmp_path / "many"
    assert cli.main(["run", "linear", *SHORT, "--seeds", "1,2", "--out", str(out)]) == 130
    assert cli.main(["run", "linear", "--resume", str(out), "--seeds", "2,9"]) == 0
    assert made == [(1, False), (2, False), (1, True), (2, False), (9, False)]
    result = json.loads((out / "seeds.json").read_text())
    assert result["seeds"] == [1, 2, 9]
    assert result["forgetting_paper"] == {"mean": None, "population_std": None, "values": [None] * 3}


def test_a_run_with_one_seed_gets_no_more(capsys):
    out = small_runs.finished("linear")
    assert cli.main(["run", "linear", "--resume", str(out), "--seeds", "2"]) == 2
    assert "seeds: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seeds", "--out", "--resume"])
def test_check_refuses_what_it_cannot_honour(option, tmp_path, capsys):
    assert cli.main(["check", "linear", option, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("fcljax: ")
