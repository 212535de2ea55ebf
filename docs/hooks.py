"""What MkDocs does to the pages of the site.

- `<!-- options: MODULE.CLASS of METHOD -->` becomes a table of that dataclass, read from the code.
- A dotted name in backticks, such as `fcljax.methods.pilora.pl_loss`, becomes a link to its anchor on an API
  page. A page names the function alone, so no link breaks when its lines move.
- A link to a module's file, which works on GitHub, becomes a link to that module's anchor. Links to other
  files of the repository, which are not on the site, become plain text.
- Formulas become MathML, which browsers draw by themselves: the site ships no scripts or fonts for them.
"""

import dataclasses
import functools
import html
import importlib
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from fcljax import config
from fcljax.options import flag, help_of

# outside of code blocks; `[` before the backtick: a link already
NAME = re.compile(r"(?<!\[)`(fcljax(?:\.\w+)+)`")
PATH_LINK = re.compile(r"\[`((?:fcljax|experiments|tests)/[^`]*)`\]\([^)]*\)")
BLOCKS = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
OPTIONS = re.compile(r"<!-- options: ([\w.]+)\.(\w+)(?: of ([\w-]+))? -->")


def on_page_markdown(markdown: str, **_) -> str:
    """Called by MkDocs for every page, before its Markdown is rendered."""
    pieces = BLOCKS.split(OPTIONS.sub(_options, markdown))
    return "".join(piece if piece.startswith("```") else _linked(piece) for piece in pieces)


def on_page_content(content: str, **_) -> str:
    """Called by MkDocs for every page, after its Markdown was rendered."""
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match) -> str:
    formula = html.unescape(found[2])
    if found[1] == "span":
        return mathml(formula, "inline")
    return f'<p style="font-size: 1.2em; overflow-x: auto">{mathml(formula, "block")}</p>'


def mathml(formula: str, display: str) -> str:
    """A LaTeX formula as MathML; "block" or "inline"."""
    return convert(formula, display=display)


def _linked(markdown: str) -> str:
    return PATH_LINK.sub(_path_link, NAME.sub(_name_link, markdown))


def _name_link(found: re.Match) -> str:
    return f"[`{found[1]}`][{found[1]}]" if is_documented(found[1]) else found[0]


def _path_link(found: re.Match) -> str:
    name = found[1].removesuffix(".py").replace("/", ".")
    return f"[`{found[1]}`][{name}]" if name in api_modules() else f"`{found[1]}`"


def is_documented(name: str) -> bool:
    """Return whether an API page has an anchor for a dotted name: of a module, or of something in it."""
    return any(name == module or name.startswith(f"{module}.") for module in api_modules())


@functools.cache
def api_modules() -> tuple[str, ...]:
    """The modules of the API pages."""
    folder = Path(__file__).parent / "api"
    texts = [page.read_text() for page in sorted(folder.glob("*.md"))]
    return tuple(re.findall(r"^::: (\S+)$", "\n".join(texts), re.MULTILINE))


def _options(found: re.Match) -> str:
    kind = getattr(importlib.import_module(found[1]), found[2])
    return table(kind, config.preset(found[3]) if found[3] else kind())


def table(options: type, values: Any) -> str:
    """The options of a dataclass and of those that it derives from, as Markdown.

    Args:
      options: the dataclass.
      values: has the value of every field that runs without further options.
    """
    texts = help_of(options)
    rows = [
        f"| `{flag(field.name)}` | {_shown(field, values)} | {_cell(texts[field.name])} |"
        for field in dataclasses.fields(options)
    ]
    return "\n".join(["| option | default | what it is |", "|---|---|---|", *rows])


def _shown(field: dataclasses.Field, values: Any) -> str:
    value = getattr(values, field.name)
    meaning = field.metadata.get("unset")
    if meaning and value == field.metadata["default"]:
        return f"`{value}`: {meaning}" if value else meaning
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
