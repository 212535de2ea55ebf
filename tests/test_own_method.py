"""The recipes of docs/own-method.md, as they stand there: each is a method, and does what its text says."""

import json
import re

import jax.numpy as jnp
import optax
import pytest
import small_runs
from micro import FROZEN, NETWORK, SIZES, begin, engine_of, play
from small_runs import COMMON, some
from test_guards import context

from fcljax import cli, config
from fcljax.checks import conformance
from fcljax.parts.classifiers import Sums
from fcljax.runs.build import build, make_method
from fcljax.types import Upload

WIDTH = 96  # of vit_micro
PAGE = (small_runs.ROOT / "docs" / "own-method.md").read_text()
RECIPES = dict(
    re.findall(
        r"### ([^\n]*)\n(?:(?!###).)*?```python\n(.*?)```",
        PAGE.partition("## Recipes")[2].partition("## Without parts")[0],
        re.DOTALL,
    )
)


@pytest.fixture
def recipe(tmp_path):
    """recipe(title) -> the file with its code."""

    def write(title):
        path = tmp_path / "recipe.py"
        path.write_text(RECIPES[title])
        return str(path)

    return write


def test_the_page_has_the_recipes_that_authors_ask_for():
    assert list(RECIPES) == [
        "One-shot statistics",
        "Sending prototypes down",
        "Robust prototypes",
        "Personal heads",
        "Replay at the server",
        "Freeze the first n blocks",
        "A personal model with its own accuracy",
        "Own metric, optimiser and aggregation rule",
    ]


@pytest.mark.parametrize("title", some(RECIPES, [*RECIPES][::3]))
def test_a_recipe_is_a_method(title, recipe):
    """Building an engine checks what every function of a method returns."""
    values = {"tasks": 2, "clients": 2, "image_size": 8, "rounds": 1}
    experiment = build(config.from_mapping(recipe(title), values, "options"))
    assert experiment.engine is not None


def ran(file, out, *options):
    rounds = [] if "--rounds" in options else ["--rounds", "1"]
    assert cli.main(["run", file, *COMMON, *rounds, *options, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), lines


@pytest.mark.long
def test_one_shot_statistics_do_not_depend_on_the_partition(recipe, tmp_path):
    file = recipe("One-shot statistics")
    few, _ = ran(file, tmp_path / "few", "--clients", "2")
    many, lines = ran(file, tmp_path / "many", "--clients", "6", "--alpha", "0.1", "--min-examples", "0")
    assert few["accuracy"] == many["accuracy"] and many["trained_images_per_s"] is None
    sent = many["communication_extra"]["task_start"]["upload_bytes"]
    assert sent == 4 * (2 * WIDTH + 2) + 4 and many["communication"]["upload_bytes"] == 0
    assert sum(line["upload_bytes"] for line in lines) == many["communication_total"]["upload_bytes"] > 0


@pytest.mark.long
def test_prototypes_that_are_sent_down_are_counted_and_move_the_model(recipe, tmp_path):
    file = recipe("Sending prototypes down")
    summary, lines = ran(file, tmp_path / "near", "--clients", "2", "--rounds", "2")
    down = summary["communication"]["download_scalars"] - summary["trainable_params"]
    assert down == 10 * WIDTH and any(line.get("gradient_share_near", 0) > 0 for line in lines[1:])


def test_a_report_of_every_training_batch_may_count_all_epochs(recipe):
    """A client with 10 examples reads 20 in two epochs."""
    given = {"batch_size": 4, "epochs": 2, "adapter": "linear"}
    settings = config.resolve(config.from_mapping(recipe("Sending prototypes down"), given, "options"))
    program = make_method(settings, SIZES, NETWORK).rounds[0].program
    claim = next(claim for claim in program.claims if claim.name == "class_sums")
    for most, holds in ((20, True), (21, False)):
        sums = Sums(jnp.zeros((2, NETWORK.width)), jnp.array([most - 1.0, 1.0]))
        assert bool(claim.holds(context(), Upload({}, {"class_sums": sums}, {}))) == holds


@pytest.mark.long
def test_a_median_of_prototypes_withstands_a_malicious_client_and_a_mean_does_not(recipe, tmp_path):
    attacked = ["--clients", "5", "--partition", "iid", "--malicious", "1", "--attack", "scale"]
    median, _ = ran(recipe("Robust prototypes"), tmp_path / "median", *attacked)
    fine, _ = ran(recipe("Robust prototypes"), tmp_path / "fine", "--clients", "5", "--partition", "iid")
    assert median["A_last"] > fine["A_last"] - 0.05 > 0.5


@pytest.mark.long
def test_personal_heads_are_never_sent(recipe, tmp_path):
    summary, _ = ran(recipe("Personal heads"), tmp_path / "heads", "--clients", "2")
    head = WIDTH * 10 + 10
    assert summary["personal"] is not None
    assert summary["communication"]["upload_scalars"] == summary["trainable_params"] - head


@pytest.mark.long
def test_replay_at_the_server_keeps_old_classes(recipe, tmp_path):
    summary, lines = ran(recipe("Replay at the server"), tmp_path / "replay", "--clients", "2")
    plain, _ = ran("linear", tmp_path / "plain", "--clients", "2")
    assert all("replay_loss" in line for line in lines)
    assert summary["A_last"] > plain["A_last"] + 0.2


@pytest.mark.long
def test_frozen_blocks_keep_their_values_and_the_others_train(recipe):
    given = {"batch_size": 4, "epochs": 1, "frozen_blocks": 1, "full_lr": 1e-2}
    settings = config.resolve(config.from_mapping(recipe("Freeze the first n blocks"), given, "options"))
    method = make_method(settings, SIZES, NETWORK)
    *_, (server, _, _) = play(engine_of(method), *begin(method), rounds=1)
    change = optax.tree.sub(server.params.adapter, dict(FROZEN.network))
    moved = {name for name, part in change.items() if optax.tree.norm(part) > 1e-4}
    assert moved == {"block_01", "norm"}


@pytest.mark.long
def test_clients_are_evaluated_with_what_they_trained(recipe, tmp_path):
    file = recipe("A personal model with its own accuracy")
    summary, _ = ran(file, tmp_path / "local", "--clients", "2", "--scale", "paper")
    first, second = summary["personal"]["accuracy"][-1]
    assert first != second  # of the two clients, on each task


@pytest.mark.long
def test_a_majority_of_signs_moves_the_model_and_its_metric_is_recorded(recipe, tmp_path):
    title = "Own metric, optimiser and aggregation rule"
    summary, lines = ran(recipe(title), tmp_path / "vote", "--clients", "2", "--rounds", "3")
    entries = WIDTH * 10 + 10
    assert all(0 < line["majority_step"] <= 0.01 * entries**0.5 * 1.001 for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_holds_what_all_methods_must(title, recipe):
    values = {"clients": 4, "batch_size": 4, "epochs": 2}
    found = conformance.check(config.from_mapping(recipe(title), values, "options"))
    assert [statement for statement in found if not statement.holds] == []
