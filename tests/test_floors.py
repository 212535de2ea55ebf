"""The package is a house: a folder imports only from the floors below it, and modules form no circle."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fcljax"

# from the bottom; rooms of one floor may use each other, as long as that is no circle
FLOORS = (
    {
        "errors",
        "choices",
        "user_files",
        "options",
        "settings",
        "files",
        "archives",
        "types",
        "mesh",
        "matrices",
        "terminal",
        "pixels",
        "run_options",
    },
    {"data", "models"},
    {"federated"},
    {"parts"},
    {"adapters"},
    {"methods"},
    {"config", "scenario", "aggregate"},
    {"results"},
    {"runs"},
    {"studies", "checks", "pretraining", "bridges"},
    {"commands", "api"},
    {"cli", "comparison"},
    {"__main__", "worker"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path: Path, package: Path) -> str:
    """Dotted name below the package: "runs.loop" of runs/loop.py, "runs" of runs/__init__.py."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports, anywhere in it: also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path} has a relative import in line {node.lineno}")
    below = {name.removeprefix("fcljax.") for name in found if name.startswith("fcljax.")}
    # "data.store.Split" is a name in the module "data.store"
    return {next(m for m in (name, *parents(name)) if m in modules or not m) for name in below} - {""}


def parents(name: str) -> list[str]:
    """ "a.b" and "a" and "" of "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def import_graph(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, the package's own __init__ left out."""
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    del files[""]
    return {module: imported(path, set(files)) for module, path in files.items()}


def room(module: str) -> str:
    """The folder, or the file at the top, that a module lies in."""
    return module.partition(".")[0]


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a module on a higher floor."""
    return [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if FLOOR[room(other)] > FLOOR[room(module)]
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that import each other in a circle; empty if there is none."""
    left = {node: set(others) - {node} for node, others in graph.items()}
    while free := [node for node, others in left.items() if not others]:
        left = {node: others - set(free) for node, others in left.items() if others}
    return sorted(left)


def by_room(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph with a node for each room."""
    rooms: dict[str, set[str]] = {room(module): set() for module in graph}
    for module, others in graph.items():
        rooms[room(module)] |= {room(other) for other in others}
    return rooms


GRAPH = import_graph(PACKAGE)


def test_every_room_has_a_floor():
    assert {room(module) for module in GRAPH} == set(FLOOR)


def test_no_import_goes_up():
    assert upward(GRAPH) == []


@pytest.mark.parametrize("graph", [GRAPH, by_room(GRAPH)], ids=["modules", "rooms"])
def test_no_imports_form_a_circle(graph):
    assert circle(graph) == []


def test_an_import_that_goes_up_or_round_is_found(tmp_path):
    """Of a small house: `data` reads settings two floors up, and two of its files import each other."""
    (tmp_path / "data").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "errors.py").write_text("")
    (tmp_path / "config.py").write_text("from fcljax.data.store import rows\nfrom fcljax import errors\n")
    (tmp_path / "data" / "store.py").write_text("from fcljax.data import tasks\n")
    (tmp_path / "data" / "tasks.py").write_text("def late():\n    import fcljax.data.store\n")
    graph = import_graph(tmp_path)
    assert upward(graph) == [] and circle(graph) == ["config", "data.store", "data.tasks"]
    (tmp_path / "data" / "tasks.py").write_text("def late():\n    from fcljax.config import resolve\n")
    graph = import_graph(tmp_path)
    assert upward(graph) == ["data.tasks imports config"]
    assert circle(by_room(graph)) == ["config", "data"]
