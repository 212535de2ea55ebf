"""experiments/mini_rates.py, which chooses the learning rates of mini scale."""

import sys

import pytest
import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

import mini_rates

from fcljax.errors import InputError
from fcljax.studies.sweeps import Outcome


def test_rates_of_mini_scale_are_tried_on_held_out_images(monkeypatch, capsys):
    made = []

    def sweep(runs, *others):
        made.extend(runs)
        good = {"A_avg": 0.5, "A_last": 0.25, "time": {"client_s": 3.0, "server_s": 4.0}}
        states = [Outcome("finished", 0, "", good), Outcome("failed", 2, "no data", None)]
        return {run.name: state for run, state in zip(runs, states, strict=True)}

    monkeypatch.setattr(mini_rates.sweeps, "sweep", sweep)
    table = ["pilora", "table3", "--out", "x"]
    mini_rates.main([*table, "pilora_a6_seed-2023", "lora_lr=1e-4,1e-3", "classes_per_client=3"])
    assert [run.cfg.lora_lr for run in made] == [1e-4, 1e-3]
    assert {(run.cfg.holdout, run.cfg.classes_per_client, run.cfg.seed) for run in made} == {(0.25, 3, 2023)}
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "seed-2023" in line]
    assert [[cell for cell in line if cell != "│"][1:] for line in lines] == [
        ["50.0", "25.0", "7"],
        ["-", "-", "no", "data"],
    ]
    with pytest.raises(InputError, match="^run: unknown value 'pilora_a6'"):
        mini_rates.main([*table, "pilora_a6", "lr=1"])
