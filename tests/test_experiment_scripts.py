"""The experiments that say why a method does what it does: they run on glyphs and find what they look for."""

import sys

import pytest
import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

import hepco_real_latents
import pmae_prompt
import pmae_real_images
import pmae_rebuilt_features

pytestmark = pytest.mark.long
GLYPHS = ["--dataset", "glyphs", "--glyph-train", "8", "--glyph-test", "4", "--tasks", "5", "--seed", "1"]
SHORT = [*GLYPHS, "--clients", "2", "--rounds", "1", "--epochs", "1", "--batch-size", "16"]


def numbers(text: str) -> list[float]:
    """What stands behind the last colon of each line."""
    return [float(line.rsplit(": ", 1)[1].split(" %")[0]) for line in text.strip().splitlines()]


@pytest.mark.parametrize("negative", [[], ["--negative"]])
def test_a_reconstructive_prompt_trained_alone_gets_better_than_its_random_start(negative, capsys):
    options = ["--prompt-steps", "60", "--prompt-lr", "5e-2", "--prompt-batch", "16", *negative]
    pmae_prompt.main([*options, *GLYPHS])
    without, first, *_, last = numbers(capsys.readouterr().out)
    assert last < first and abs(last - without) < 0.3 * without


def test_rebuilt_images_tell_less_of_their_classes_than_the_images_themselves(capsys):
    pmae_rebuilt_features.main(["--mask", "0.75", *GLYPHS])
    own, rebuilt = numbers(capsys.readouterr().out)
    assert own > 70 and rebuilt < own / 2


def test_pmae_on_the_images_themselves_trains_its_server_on_them(tmp_path, capsys, monkeypatch):
    # the script puts its parts in the place of the method's, for the process that it is
    for name in ("autoencoder_of", "no_restore"):
        monkeypatch.setattr(pmae_real_images.pmae, name, getattr(pmae_real_images.pmae, name))
    pmae_real_images.main([*SHORT, "--tune-epochs", "1", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[-1].startswith("A_last ")


def test_hepco_on_real_latents_distils_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hepco_real_latents.hepco, "draw_latents", hepco_real_latents.hepco.draw_latents)
    hepco_real_latents.main([*SHORT, "--pool-size", "4", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[-1].startswith("A_last ")
