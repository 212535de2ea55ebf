"""The documentation is true: functions that it names exist, the site builds without a warning, the notebook
runs."""

import ast
import collections.abc
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import subprocess
import sys
import types
import typing
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import small_runs
import yaml

from fcljax import __version__, config
from fcljax.adapters import ADAPTERS
from fcljax.choices import CHOICES, options_of
from fcljax.methods import METHODS, find_method
from fcljax.options import help_of
from fcljax.parts.client import (
    ClientEnd,
    ClientPass,
    ClientRule,
    ClientStep,
    OfEachClient,
    Replay,
    Report,
)
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Learner, Loss, Output, Params
from fcljax.parts.optimisers import Adam
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.types import Batch, ClientContext, ClientInfo, Sizes, Task

DOCS = small_runs.ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OWN_METHOD = (DOCS / "own-method.md").read_text()
PAPERS = ("fppl", "pilora", "hepco", "pmae", "vfcl")


def found(dotted):
    """What a dotted name stands for: a module, or something in one."""
    module, _, name = dotted.rpartition(".")
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


@functools.cache
def module(name):
    """A program of the documentation."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def hooks():
    """What MkDocs calls."""
    pytest.importorskip("latex2mathml")
    return module("hooks")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_functions_and_modules_that_a_page_names_exist(page):
    text = page.read_text()
    # not imported: some need a package that is optional
    assert all(importlib.util.find_spec(name) for name in re.findall(r"^::: (\S+)", text, re.MULTILINE))
    names = re.findall(r"`(fcljax(?:\.\w+)+)`", text)
    names += [".".join(each) for each in re.findall(r"<!-- options: ([\w.]+)\.(\w+) of", text)]
    assert all(found(name) for name in names)


def equations(page):
    """(heading, formulas, names of functions) of every equation of a method's page."""
    text = (DOCS / "methods" / f"{page}.md").read_text()
    listed = text.partition("\n## Equations and code\n")[2].partition("\n## ")[0]
    sections = re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", listed, re.MULTILINE | re.DOTALL)
    return [
        (heading, displayed(body), re.findall(r"`(fcljax(?:\.\w+)+)`", body.partition("\nCode: ")[2]))
        for heading, body in sections
    ]


def displayed(text):
    """The formulas that stand on lines of their own."""
    return re.findall(r"^\$\$\n(.+?)\n\$\$$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("method", PAPERS)
def test_the_page_of_a_method_has_its_equations_its_options_and_its_links(method):
    text = (DOCS / "methods" / f"{method}.md").read_text()
    listed = equations(method)
    assert len(listed) >= 4 and any(re.match(r"Equations? \d", heading) for heading, _, _ in listed)
    assert all(formulas and names for _, formulas, names in listed)
    entry = find_method(method)
    assert entry.build.__module__.replace(".", "/") + ".py" in text and f"fcljax run {method}" in text
    options = entry.options(entry.adapter)
    assert f"<!-- options: {options.__module__}.{options.__name__} of {method} -->" in text
    assert "../results/" in text and "../fidelity.md" in text


@pytest.mark.parametrize("page", PAPERS)
def test_every_formula_becomes_mathml(page):
    text = (DOCS / "methods" / f"{page}.md").read_text()
    blocks = displayed(text)
    inline = re.findall(r"\$([^$]+)\$", re.sub(r"^\$\$.+?^\$\$$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 4 and inline
    for display, formulas in (("block", blocks), ("inline", inline)):
        for formula in formulas:
            drawn = ElementTree.fromstring(hooks().mathml(formula, display))
            assert drawn.get("display") == display
            texts = "".join(drawn.itertext())
            assert "\\" not in texts, formula  # an unknown command stays as its text


def test_no_page_links_to_a_line_of_code():
    """Lines move; the site links each dotted name to its API anchor."""
    pages = [*PAGES, small_runs.ROOT / "README.md"]
    assert {page.name: found for page in pages if (found := re.findall(r"\.py#L\d+", page.read_text()))} == {}


def test_each_dotted_name_has_an_api_anchor():
    """API pages show what a module defines; names of the package, such as `fcljax.run`, have no anchor."""
    api = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", api, re.MULTILINE))
    names = {name for page in PAGES for name in re.findall(r"`(fcljax(?:\.\w+){2,})`", page.read_text())}
    without = {name for name in names if not has_anchor(name, documented)}
    assert len(names) > 100 and without == set()


def has_anchor(name, documented):
    modules = [module for module in documented if f"{name}.".startswith(f"{module}.")]
    if not modules:
        return False
    module = max(modules, key=len)
    return name == module or (found(name).__module__ == module and "._" not in name)


def anchors(text):
    """The anchors of a page's headings, as Python-Markdown's toc and GitHub name them."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, small_runs.ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_to_headings_lead_to_headings(page):
    links = re.findall(r"\]\((?!http)([^)\s#]*)#([^)\s]+)\)", page.read_text())
    targets = [((page.parent / path) if path else page, anchor) for path, anchor in links]
    assert [anchor for file, anchor in targets if anchor not in anchors(file.read_text())] == []


def test_no_docstring_has_brackets_that_the_site_reads_as_a_link():
    """`[A] [B]` is a reference in Markdown; code in backticks and indented blocks are none."""
    reference = re.compile(r"\[[^\]\n]+\] ?\[[^\]\n]*\]")
    links = {}
    for file in (small_runs.ROOT / "fcljax").rglob("*.py"):
        for text in docstrings(file):
            lines = [line for line in text.splitlines() if not line.startswith("    ")]
            if references := reference.findall(re.sub(r"`[^`]*`", "", "\n".join(lines))):
                links[file.name] = references
    assert links == {}


def docstrings(file):
    """Texts of modules, classes, functions, and of fields, which stand below them."""
    statements = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Expr))
    texts = (value.value for value in statements if isinstance(value, ast.Constant))
    return [inspect.cleandoc(text) for text in texts if isinstance(text, str)]


def fields_on_the_page(heading):
    """(name, type) of each field that a section of own-method.md lists."""
    text = (DOCS / "own-method.md").read_text()
    section = re.search(rf"^### {heading}\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)[1]
    cell = r"((?:[^|\n]|\\\|)+)"
    rows = re.findall(rf"^\| `(\w+)` \| {cell} \| {cell} \|$", section, re.MULTILINE)
    assert all(what.strip() for _, _, what in rows)
    return [(name, kind) for name, kind, _ in rows]


def arguments_of(hint):
    """The number of arguments of a field that is a function; None: it is none."""
    for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if typing.get_origin(kind) is collections.abc.Callable:
            return len(typing.get_args(kind)[0])
        if getattr(kind, "_is_protocol", False):
            return len(inspect.signature(kind.__call__).parameters) - 1
    return None


PARTS = (ClientRule, ClientPass, Replay, ClientStep, Report, OfEachClient, ClientEnd)
PARTS += (ServerRule, ServerRound, ServerUpdate, Run, Learner, Task)
PARTS += (ClientContext, ClientInfo, Params, Output, Batch, Sizes, Loss)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_the_fields_of_a_part_on_the_page_are_those_of_the_code(part):
    listed, hints = fields_on_the_page(part.__name__), typing.get_type_hints(part)
    assert [name for name, _ in listed] == list(hints)
    for name, kind in listed:
        signature = re.match(r"`\((.*?)\) -> .*`", kind)
        shown = len(signature[1].split(", ")) if signature else None
        assert shown == arguments_of(hints[name]), (part, name)
        assert ("`None`" in kind) == (type(None) in typing.get_args(hints[name])), (part, name)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_field_of_a_part_has_a_docstring_of_its_own_for_the_site(part):
    (node,) = ast.parse(inspect.getsource(part)).body
    below = zip(node.body, [*node.body[1:], None], strict=True)
    bare = [
        field.target.id for field, text in below if isinstance(field, ast.AnnAssign) and not is_text(text)
    ]
    assert bare == []


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_the_arguments_of_federate_on_the_page_are_those_of_the_code():
    listed = [name for name, _ in fields_on_the_page("federate")]
    assert listed == list(inspect.signature(federate).parameters)


@pytest.mark.parametrize("name", ["fedprox", "fedranpac"])
def test_the_methods_on_the_page_are_the_files_and_each_option_has_help(name):
    file = small_runs.ROOT / "experiments" / "methods" / f"{name}.py"
    assert f"```python\n{file.read_text().strip()}\n```" in OWN_METHOD
    options = find_method(str(file)).options("linear")
    assert set(help_of(options)) == {field.name for field in dataclasses.fields(options)}


def test_the_distillation_server_that_the_page_explains_is_short():
    text = (small_runs.ROOT / "experiments" / "methods" / "distill.py").read_text()
    assert len(text.splitlines()) <= 60 and "experiments/methods/distill.py" in OWN_METHOD


def test_the_fields_that_decide_a_disputed_point_are_options():
    options = {*METHODS, *options_of(*CHOICES)}
    for method, adapter in itertools.product(METHODS, ADAPTERS):
        if adapter not in find_method(method).excludes:
            for kind in config.option_groups(method, adapter).values():
                options |= {field.name for field in dataclasses.fields(kind)}
    rows = re.findall(r"^\| .* \| ([^|]+) \|$", (DOCS / "fidelity.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]\w*)`", row)}
    assert len(named) > 80 and named <= options


JARGON = r"\b(kit|roster|dealt|told|wire|hostile|ctx|rehears\w+|whoever|survey)\b"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "results"], ids=lambda p: p.stem
)
def test_pages_use_the_words_of_the_field(page):
    assert re.findall(JARGON, page.read_text(), re.IGNORECASE) == []


def test_every_method_has_a_page_or_a_row():
    pages = {path.stem for path in (DOCS / "methods").iterdir()}
    tables = ("baselines", "frontier")
    text = "".join((DOCS / "methods" / f"{page}.md").read_text() for page in tables)
    rows = re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)
    in_pmae = re.findall(r"`([\w-]+-pmae)`", (DOCS / "methods" / "pmae.md").read_text())
    assert len(rows) == len(set(rows)) and set(rows) | pages - {*tables} | set(in_pmae) == set(METHODS)


def test_tables_of_options_have_each_field_with_its_help_and_the_default_that_runs():
    out = hooks().on_page_markdown("a\n<!-- options: fcljax.methods.fppl.FPPLOptions of fppl -->\nb")
    assert out.startswith("a\n| option |") and out.endswith("|\nb")
    assert "| `--temperature` | `0.2` | Temperature tau of the unified-representation loss. |" in out
    for method, entry in METHODS.items():
        options = find_method(method).options(entry.adapter)
        rows = hooks().table(options, config.preset(method)).splitlines()[2:]
        assert len(rows) == len(dataclasses.fields(options))
        assert all(not row.endswith("|  |") and "|  |" not in row for row in rows), method
    rows = hooks().table(config.RunConfig, config.preset("pilora"))
    assert "| `--clip-norm` | no clipping | L2 norm" in rows
    rows = hooks().table(Adam, config.preset("pilora"))
    assert "| `--weight-decay` | `1e-05` |" in rows  # of the preset; the dataclass has 0


def test_files_that_are_read_beside_the_site_too_have_no_relative_links():
    included = [re.findall(r'--8<-- "(.+)"', page.read_text()) for page in PAGES]
    files = [small_runs.ROOT / name for names in included for name in names]
    assert len(files) == 2
    for file in files:  # from the site's page such a link would lead elsewhere
        assert not re.findall(r"\]\((?!https?://|#)", file.read_text()), file


def test_every_page_is_in_the_navigation():
    text = (small_runs.ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w/-]+\.md", text))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES}


def test_pictures_have_a_text_in_their_place():
    pictures = [each for page in PAGES for each in re.findall(r"!\[([^\]]*)\]\(", page.read_text())]
    assert pictures and all(len(text) > 80 for text in pictures)
    drawing = ElementTree.parse(DOCS / "round.svg").getroot()
    names = {child.tag.rpartition("}")[2]: child.text for child in drawing}
    assert drawing.get("role") == "img" and names["title"] and names["desc"]


def test_versions_agree():
    citation = yaml.safe_load((small_runs.ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f"## [{__version__}]" in (small_runs.ROOT / "CHANGELOG.md").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


@pytest.mark.parametrize("name", ["quickstart", "colab"])
def test_notebooks_are_committed_without_outputs(name):
    notebook = json.loads((DOCS / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    installs = "".join(code[0]["source"]) == "%pip install --quiet ./fcljax-*.whl"
    assert installs == (name == "colab")


@pytest.mark.long
def test_the_colab_notebook_runs_where_the_package_is_installed(tmp_path, monkeypatch):
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(small_runs.ROOT))
    notebook = nbformat.read(DOCS / "colab.ipynb", as_version=4)
    nbformat.validate(notebook)
    del notebook.cells[1]  # which installs it
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("<iframe srcdoc=" in output.get("data", {}).get("text/html", "") for output in outputs)
    said = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"linear: A_last [\d.]+ %, 0\.\d\d MB uploaded", said)


def test_the_workflow_publishes_what_was_checked_and_holds_no_secret():
    text = (small_runs.ROOT / ".github" / "workflows" / "publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert any(step.get("run") == "make release" for step in jobs["build"]["steps"])
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text and "password" not in jobs["publish"]["steps"][-1]
    assert "release: .venv/docs" in (small_runs.ROOT / "Makefile").read_text()


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(small_runs.ROOT))  # of the kernel, which is another process
    notebook = nbformat.read(DOCS / "quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    said = "".join(output.get("text", "") for output in outputs)
    ends = {float(found) for found in re.findall(r"accuracy at the end: ([\d.]+)", said)}
    assert len(ends) == 2 and all(0 < each <= 1 for each in ends)


def test_every_module_is_on_an_api_page_once():
    listed = [
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    package = small_runs.ROOT / "fcljax"
    programs = {"__main__", "cli", "terminal", "worker"}
    missing = []
    for file in package.rglob("*.py"):
        place = file.relative_to(package).with_suffix("")
        defines = re.search(r"^(def|class) ", file.read_text(), re.MULTILINE)
        if place.parts[0] not in {"commands", "__init__"} | programs and defines:
            name = ".".join(("fcljax", *place.parts)).removesuffix(".__init__")
            if name not in listed:
                missing.append(f"::: {name}")
    assert not missing, f"docs/api/*.md: {missing} are missing"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=small_runs.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    page = Path(tmp_path / "site" / "methods" / "fppl" / "index.html").read_text()
    assert "--unified-weight" in page and "tau of the unified-representation loss" in page
    assert page.count("<math") >= 8 and "arithmatex" not in page and "\\frac" not in page
    api = Path(tmp_path / "site" / "api" / "engine" / "index.html").read_text()
    assert "fcljax.federated.rules.weighted_mean" in api
    parts = Path(tmp_path / "site" / "api" / "parts" / "index.html").read_text()
    for field in ("loss", "on_start", "project", "parameters"):
        assert f'id="fcljax.parts.client.ClientRule.{field}"' in parts


def test_the_front_page_of_results_says_of_every_method_whether_its_paper_was_reached():
    from fcljax.methods import METHODS

    section = (
        (DOCS / "results" / "index.md").read_text(encoding="utf-8").split("## Are the papers' numbers")[1]
    )
    rows = [line.split("|")[1] for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    named = re.findall(r"`([^`]+)`", " ".join(rows))
    assert sorted(named) == sorted(METHODS)
