"""README.md and the pages in docs/ tell the truth: their Python runs, their commands parse, their links and
make targets exist, and their keys are those of a run."""

import functools
import json
import re
import shlex

import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

from fcljax import config
from fcljax.checks.chips import CHIPS
from fcljax.choices import with_options
from fcljax.commands import running
from fcljax.commands.arguments import Words, chosen_in, parse
from fcljax.commands.data import ShowOptions
from fcljax.commands.exporting import ExportOptions
from fcljax.commands.health import DoctorOptions
from fcljax.commands.leaderboard import LeaderboardOptions
from fcljax.commands.planning import PlanOptions
from fcljax.commands.reproducing import ReproduceOptions
from fcljax.commands.sweeping import SweepOptions
from fcljax.commands.tuning import TuneOptions
from fcljax.data.files.sources import DATASETS
from fcljax.methods import METHODS
from fcljax.models.weights.convert import ConvertOptions
from fcljax.pretraining.decoder import PretrainDecoderConfig
from fcljax.runs.embed import EmbedConfig
from fcljax.studies import tuning

README = small_runs.ROOT / "README.md"
PAGES = [README, *sorted((small_runs.ROOT / "docs").rglob("*.md")), small_runs.ROOT / "CONTRIBUTING.md"]
TEXT = "\n".join(page.read_text() for page in PAGES)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands(program):
    """Arguments of every call of `program` in the bash blocks."""
    lines = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]
    return [line[1:] for line in lines if line[:1] == [program]]


def block_with(word):
    return next(block for block in blocks("python") if word in block)


@functools.cache
def namespace(block):
    """What a block defines; it is run once, as a script would be."""
    names = {"__name__": "__main__"}
    exec(compile(block, "a page", "exec"), names)
    return names


def by_cost(block):
    """Blocks with whole runs or simulations are executed in `make test-long`."""
    whole = any(call in block for call in ("fcljax.run(", "fcljax.run_seeds(", "simulate("))
    return pytest.param(block, marks=pytest.mark.long) if whole else block


@pytest.mark.parametrize(
    "block",
    [by_cost(block) for block in blocks("python")],
    ids=lambda block: str(blocks("python").index(block)),
)
def test_python_blocks_run(block):
    assert namespace(block)


def test_federated_averaging_of_a_module_takes_six_lines():
    """README's block: what is neither an import nor the data."""
    block = block_with("fcljax.simulate(average")
    lines = [
        line for line in block.splitlines() if line and "import" not in line and "load_digits" not in line
    ]
    names = namespace(block)
    right = names["trained"](names["x"]).argmax(-1) == names["y"]
    assert len(lines) <= 6 and max(map(len, lines)) <= 110
    assert len(names["history"]) == 5 and float(right.mean()) > 0.5


def test_the_jitted_rule_of_the_page_of_primitives_trims_the_extremes():
    names = namespace(block_with("aggregate.trimmed_mean"))
    merged = names["merge"](names["stacked"], jnp.ones(3), jnp.ones(3, bool))
    np.testing.assert_allclose(merged["w"], [2.0, 1.0])


def test_nothing_installs_a_package_of_this_name_from_an_index():
    """The package is on no index: whoever took the name there would be run."""
    sources = [*(small_runs.ROOT / "fcljax").rglob("*.py"), *(small_runs.ROOT / "docs").glob("*.ipynb")]
    text = TEXT + "\n".join(path.read_text() for path in sources)
    assert not re.findall(r"pip install(?: --?[\w-]+)* ['\"]?fcljax", text)


def test_commands_have_options_that_exist(monkeypatch):
    calls = commands("fcljax")
    commands_ = {"run", "check", "list", "compare", "data", "convert", "embed", "pretrain"}
    commands_ |= {
        "predict",
        "export",
        "pretrain-decoder",
        "sweep",
        "reproduce",
        "doctor",
        "completion",
        "report",
        "watch",
        "tune",
        "weights",
        "leaderboard",
        "plan",
    }
    assert {call[0] for call in calls} == commands_
    monkeypatch.chdir(small_runs.ROOT)
    for call in (call for call in calls if call[0] in ("run", "check") and "--help" not in call):
        given = running.parse_run(call[1], call[2:], "run", "")
        files = {"out", "resume", "config", "seeds"}
        own = {name: value for name, value in given.items() if name not in files}
        config.from_mapping(call[1], own, "README")
    for call in (call for call in calls if call[0] == "tune" and "--resume" not in call):
        ranges, rest = tuning.sorted_arguments(call[2:])
        given = running.parse_run(call[1], rest, "tune", "", {"tuning": TuneOptions()})
        assert ranges and given and all(tuning.parse_range(call[1], {}, *each) for each in ranges)
    for call in (call for call in calls if call[0] == "plan"):
        given, _ = running.read_alone(call[1:], "plan", {"plan": PlanOptions()})
        assert running.pop_options(PlanOptions(), given).chip in CHIPS
        config.from_mapping(call[1], {name: given[name] for name in given if name != "method"}, "README")
    for call in (call for call in calls if call[0] == "leaderboard"):
        parse({"leaderboard": LeaderboardOptions()}, call[2:], call[:1], "", Words("WORDS"))
    others = {"embed": (EmbedConfig, 1), "convert": (ConvertOptions, 3), "data show": (ShowOptions, 3)}
    others |= {"pretrain-decoder": (PretrainDecoderConfig, 1), "sweep": (SweepOptions, 2)}
    others |= {"doctor": (DoctorOptions, 2), "export": (ExportOptions, 2)}
    others |= {"reproduce": (ReproduceOptions, 3)}
    for name, (options, words) in others.items():
        used = [call for call in calls if " ".join(call).startswith(name)]
        assert used
        for call in used:
            chosen = with_options(options(), chosen_in(call[words:]))
            parse({name: chosen}, call[words:], name.split(), "", Words("WORDS"))
    assert {call[1] for call in calls if call[0] == "data"} == {"list", "prepare", "show"}
    assert {call[2] for call in calls if call[0] == "data" and len(call) > 2} <= set(DATASETS)


def test_make_targets_exist():
    makefile = (small_runs.ROOT / "Makefile").read_text()
    targets = commands("make")
    assert targets
    assert all(f"\n{target}:" in makefile for (target,) in targets)


def test_the_readme_is_a_landing_page_that_leads_to_every_page():
    text = README.read_text()
    # the rest is led to from the site's navigation
    elsewhere = {"index.md", "changelog.md", "contributing.md"}
    docs = small_runs.ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in PAGES if docs in page.parents}
    linked = set(re.findall(r"\]\(docs/([\w/-]+\.md)\)", text))
    pages = {page for page in pages if not page.startswith(("api/", "results/"))}
    assert pages - elsewhere <= linked and "results/index.md" in linked
    results = (docs / "results" / "index.md").read_text()
    others = {path.name for path in (docs / "results").glob("*.md")} - {"index.md"}
    assert others <= set(re.findall(r"\]\(([\w-]+\.md)", results))
    assert len(text.splitlines()) < 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_links_exist(page):
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    links = [link for link in links if link and not link.startswith("http")]
    named = re.findall(r"`((?:fcljax|experiments)/[a-z_][\w./]*)`", text)
    named += re.findall(r"experiments/[a-z][\w.-]+\.yaml", text)
    if page.name in ("contributing.md", "changelog.md"):  # they include another file
        named += re.findall(r'--8<-- "(.*)"', text)
        assert named
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [path for path in named if not (small_runs.ROOT / path).exists()] == []


def test_every_key_of_a_summary_is_explained():
    summary = json.loads((small_runs.finished("linear") / "summary.json").read_text())
    explained = {
        name
        for row in re.findall(r"^\| (`.*?) \|", TEXT, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert set(summary) <= explained
    assert all(f"`{name}`" in TEXT for group in ("forgetting", "time") for name in summary[group])


def test_the_methods_that_the_commands_run_exist_and_none_is_left_out():
    run = {call[1] for call in commands("fcljax") if call[0] == "run"}
    assert all(name in METHODS or (small_runs.ROOT / name).is_file() for name in run)
    assert all(method in TEXT.lower() for method in METHODS)
