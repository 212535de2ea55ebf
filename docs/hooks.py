"""Of the documentation site: a comment `<!-- options: MODULE.CLASS -->` becomes a table of that dataclass,
read from the code, so that the pages cannot fall behind it."""

import ast
import dataclasses
import importlib
import inspect
import re

from fcljax.options import flag

MARK = re.compile(r"<!-- options: ([\w.]+)\.(\w+) -->")


def on_page_markdown(markdown: str, **_) -> str:
    """Called by MkDocs for every page."""
    return MARK.sub(lambda found: table(getattr(importlib.import_module(found[1]), found[2])), markdown)


def table(options: type) -> str:
    """The options of a dataclass and of those that it inherits from, as Markdown."""
    told = {name: text for base in reversed(options.__mro__) for name, text in comments(base).items()}
    rows = [
        f"| `{flag(field.name)}` | {_shown(field)} | {told.get(field.name, '').replace('|', chr(92) + '|')} |"
        for field in dataclasses.fields(options)
    ]
    return "\n".join(["| option | default | what it is |", "|---|---|---|", *rows])


def comments(options: type) -> dict[str, str]:
    """The comment beside or above each field of a class, which is also what --help shows."""
    if not dataclasses.is_dataclass(options):
        return {}
    lines = inspect.getsource(options).splitlines()
    body = ast.parse("\n".join(lines)).body[0].body
    found = {}
    for node in (node for node in body if isinstance(node, ast.AnnAssign)):
        beside = re.search(r"#\s*(.*)$", lines[node.end_lineno - 1][node.end_col_offset :])
        above = []
        while (line := lines[node.lineno - 2 - len(above)].strip()).startswith("#"):
            above.insert(0, line.lstrip("# "))
        found[node.target.id] = beside[1] if beside else " ".join(above)
    return found


def _shown(field: dataclasses.Field) -> str:
    return "" if field.default is None else f"`{field.default}`"
