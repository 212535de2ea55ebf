"""Hook of the documentation site: a comment `<!-- options: MODULE.CLASS -->` becomes a table of that
dataclass, read from the code, so that the pages cannot fall behind it."""

import dataclasses
import importlib
import re

from fcljax.options import flag, help_of

MARK = re.compile(r"<!-- options: ([\w.]+)\.(\w+) -->")


def on_page_markdown(markdown: str, **_) -> str:
    """Called by MkDocs for every page."""
    return MARK.sub(lambda found: table(getattr(importlib.import_module(found[1]), found[2])), markdown)


def table(options: type) -> str:
    """The options of a dataclass and of those that it inherits from, as Markdown."""
    texts = help_of(options)
    rows = [
        f"| `{flag(field.name)}` | {_shown(field)} | {texts.get(field.name, '').replace('|', chr(92) + '|')} |"
        for field in dataclasses.fields(options)
    ]
    return "\n".join(["| option | default | what it is |", "|---|---|---|", *rows])


def _shown(field: dataclasses.Field) -> str:
    return field.metadata["unset"] if field.default is None else f"`{field.default}`"
