"""What MkDocs does to the pages of the site.

- `<!-- options: MODULE.CLASS -->` becomes a table of that dataclass, read from the code.
- Links to lines of the code (`links.py` writes them) become links to the API pages.
- Formulas become MathML, which browsers draw by themselves: the site ships no scripts or fonts for them.
"""

import ast
import dataclasses
import functools
import html
import importlib
import inspect
import re
from pathlib import Path

from latex2mathml.converter import convert

from fcljax.options import flag

CODE_LINK = re.compile(r"\[`(fcljax(?:\.\w+)+)`\]\([./]*fcljax/[^)]*\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
MARK = re.compile(r"<!-- options: ([\w.]+)\.(\w+) -->")


def on_page_markdown(markdown: str, **_) -> str:
    """Called by MkDocs for every page, before its Markdown is rendered."""
    return CODE_LINK.sub(_api_link, MARK.sub(_options, markdown))


def _options(found: re.Match) -> str:
    return table(getattr(importlib.import_module(found[1]), found[2]))


def on_page_content(page: str, **_) -> str:
    """Called by MkDocs for every page, after its Markdown was rendered."""
    return FORMULA.sub(_mathml, page)


def _mathml(found: re.Match) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]), display=display)


def _api_link(found: re.Match) -> str:
    """A cross-reference if an API page documents the name, else the name alone."""
    documented = any(found[1].startswith(module) for module in api_modules())
    return f"[`{found[1]}`][{found[1]}]" if documented else f"`{found[1]}`"


@functools.cache
def api_modules() -> tuple[str, ...]:
    """The modules of the API pages."""
    folder = Path(__file__).parent / "api"
    texts = [page.read_text() for page in sorted(folder.glob("*.md"))]
    return tuple(re.findall(r"^::: (\S+)$", "\n".join(texts), re.MULTILINE))


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
