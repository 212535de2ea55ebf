"""Links from the documentation to the code: `python docs/links.py` brings them up to date, and a test asserts
that they are.

A dotted name in backticks, such as `fcljax.methods.pilora.prototype_weights`, becomes a link to the lines
that define it, and a path of the repository, such as `fcljax/methods/pilora.py`, a link to the file. These
links work on GitHub; on the site `hooks.py` turns names into links to the API pages, and leaves paths alone.
"""

import ast
import functools
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"\[?`(fcljax(?:\.\w+)+)`(?:\]\([^)\s]*\))?")
PATH = re.compile(r"\[?`((?:fcljax|experiments|tests)/[\w/.]+)`(?:\]\([^)\s]*\))?")


@functools.cache
def definitions(file: Path) -> dict[str, int]:
    """Line numbers of the functions, classes, methods and constants of a file, by name."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}": each.lineno for each in inner}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node.lineno for each in targets if isinstance(each, ast.Name)}
    return found


def place_of(dotted: str) -> tuple[Path, int] | None:
    """The file and line that define a dotted name; line 0 for a module; None: there is no such name."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:split])
        file = next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.exists()), None)
        if file is None:
            continue
        name = ".".join(parts[split:])
        if not name:
            return file, 0
        line = definitions(file).get(name)
        return None if line is None else (file, line)
    return None


def linked(text: str, page: Path) -> str:
    """The Markdown of a page with a link at each name and path that exists; code blocks stay as they are."""

    def link(found: re.Match) -> str:
        path = ROOT / found[1]
        place = (path, 0) if path.exists() else place_of(found[1])
        if place is None:
            return f"`{found[1]}`"
        file = Path(os.path.relpath(place[0], page.parent)).as_posix()
        return f"[`{found[1]}`]({file}{f'#L{place[1]}' if place[1] else ''})"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        each if each.startswith("```") else PATH.sub(link, NAME.sub(link, each)) for each in blocks
    )


def pages() -> list[Path]:
    """The pages whose names are links."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs" / "methods").glob("*.md")),
        ROOT / "docs" / "own-method.md",
    ]


if __name__ == "__main__":
    for page in pages():
        page.write_text(linked(page.read_text(), page))
