"""What the program says on a terminal: text as it is, whatever it holds. File names may look like rich's
markup, and need be no UTF-8."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fcljax.errors import one_line


def plain(value: object) -> Text:
    """A value in one line, for a terminal and for the cell of a table."""
    return Text(one_line(str(value)))


def add_row(table: Table, *cells: object, style: str | None = None, end_section: bool = False) -> None:
    """Add a row of plain text to a table."""
    table.add_row(*map(plain, cells), style=style, end_section=end_section)


def say(console: Console, line: str) -> None:
    """Print a line."""
    console.print(plain(line), soft_wrap=True, highlight=False)
