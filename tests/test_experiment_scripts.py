"""The experiments that say why a method does what it does: they run on glyphs and find what they look for."""

import sys

import pytest
import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

import hepco_real_latents
import mini_rates
import pmae_prompt
import pmae_real_images
import pmae_rebuilt_features

from fcljax.errors import InputError
from fcljax.studies.sweeps import Outcome

GLYPHS = ["--dataset", "glyphs", "--glyph-train", "8", "--glyph-test", "4", "--tasks", "5", "--seed", "1"]
SHORT = [*GLYPHS, "--clients", "2", "--rounds", "1", "--epochs", "1", "--batch-size", "16"]


def numbers(text: str) -> list[float]:
    """What stands behind the last colon of each line."""
    return [float(line.rsplit(": ", 1)[1].split(" %")[0]) for line in text.strip().splitlines()]


def test_rates_of_mini_scale_are_tried_on_held_out_images(monkeypatch, capsys):
    made = []

    def sweep(runs, *others):
        made.extend(runs)
        good = {"A_avg": 0.5, "A_last": 0.25, "time": {"client_s": 3.0, "server_s": 4.0}}
        states = [Outcome("finished", 0, "", good), Outcome("failed", 2, "no data", None)]
        return {run.name: state for run, state in zip(runs, states, strict=True)}

    monkeypatch.setattr(mini_rates.sweeps, "sweep", sweep)
    table = ["pilora", "table3", "--experiments", str(small_runs.ROOT / "experiments"), "--out", "x"]
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


@pytest.mark.long
@pytest.mark.parametrize("negative", [[], ["--negative"]])
def test_a_reconstructive_prompt_trained_alone_gets_better_than_its_random_start(negative, capsys):
    options = ["--prompt-steps", "60", "--prompt-lr", "5e-2", "--prompt-batch", "16", *negative]
    pmae_prompt.main([*options, *GLYPHS])
    without, first, *_, last = numbers(capsys.readouterr().out)
    assert last < first and abs(last - without) < 0.3 * without


@pytest.mark.long
def test_rebuilt_images_tell_less_of_their_classes_than_the_images_themselves(capsys):
    pmae_rebuilt_features.main(["--mask", "0.75", "0.25", *GLYPHS])
    own, few, most = numbers(capsys.readouterr().out)
    assert own > 70 and few < own / 2 and most > few + 20


@pytest.mark.long
def test_pmae_on_the_images_themselves_trains_its_server_on_them(tmp_path, capsys, monkeypatch):
    # the script puts its parts in the place of the method's, for the process that it is
    for name in ("autoencoder_of", "no_restore"):
        monkeypatch.setattr(pmae_real_images.pmae, name, getattr(pmae_real_images.pmae, name))
    pmae_real_images.main([*SHORT, "--tune-epochs", "1", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[-1].startswith("A_last ")


@pytest.mark.long
def test_hepco_on_real_latents_distils_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hepco_real_latents.hepco, "draw_latents", hepco_real_latents.hepco.draw_latents)
    hepco_real_latents.main([*SHORT, "--pool-size", "4", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[-1].startswith("A_last ")
