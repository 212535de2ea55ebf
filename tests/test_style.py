"""How the package is written, as CONTRIBUTING.md says: short functions, named functions, no packed lines."""

import ast
import statistics
from pathlib import Path

import jaxtyping

PACKAGE = Path(__file__).parent.parent / "fcljax"
ARRAYS = {name for name, value in vars(jaxtyping).items() if isinstance(value, type(jaxtyping.Float))}
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def functions(trees: dict[str, ast.Module]) -> dict[str, int]:
    """ "file:function" -> its number of lines."""
    return {
        f"{name}:{node.name}": node.end_lineno - node.lineno + 1
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def named_lambdas(trees: dict[str, ast.Module]) -> list[str]:
    """Lines that give a lambda a name."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda)
    ]


def class_homonyms(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Names of classes that stand for more than one thing -> the files."""
    files: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(name)
    return {name: where for name, where in files.items() if len(where) > 1}


def unquoted_shapes(trees: dict[str, ast.Module]) -> list[str]:
    """Lines with a type of an array whose shape is `...` and not a text: no error, and nothing is checked.
    ruff takes the quotes of "..." away where annotations are not evaluated."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ARRAYS
        if isinstance(node.slice, ast.Tuple) and ast.unparse(node.slice.elts[-1]) == "..."
    ]


def test_functions_are_short():
    lengths = functions(TREES)
    assert {name: length for name, length in lengths.items() if length > 80} == {}
    assert statistics.median(lengths.values()) <= 8


def test_a_function_with_a_name_is_no_lambda():
    assert named_lambdas(TREES) == []
    assert named_lambdas({"a.py": ast.parse("f = lambda x: x")}) == ["a.py:1"]


def test_the_shape_of_an_array_is_a_text():
    assert unquoted_shapes(TREES) == []
    text = "f: Float[Array, ...]\ng: Int[Array, '...']\nh: tuple[Array, ...]"
    assert unquoted_shapes({"a.py": ast.parse(text)}) == ["a.py:1"]


def test_a_class_name_has_one_meaning():
    assert class_homonyms(TREES) == {}


def test_no_line_is_kept_from_the_formatter():
    # in two parts, so that this line is none
    assert [path for path in PACKAGE.rglob("*.py") if "# fmt" + ":" in path.read_text()] == []
