"""Lines, tables and progress bars on a terminal. Text appears as it is, whatever it contains: file names may
look like rich's markup, and need not be UTF-8."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fcljax.errors import one_line


def plain_text(value: object) -> Text:
    """A value in one line, for a terminal and for the cell of a table."""
    return Text(one_line(str(value)))


def add_row(table: Table, *cells: object, style: str | None = None, end_section: bool = False) -> None:
    """Add a row of plain text to a table."""
    table.add_row(*map(plain_text, cells), style=style, end_section=end_section)


def say(console: Console, line: str) -> None:
    """Print a line."""
    console.print(plain_text(line), soft_wrap=True, highlight=False)


def progress_bar(label: str, numbers: str = "", console: Console | None = None) -> Progress:
    """A bar with a label, some numbers, the time taken and the time left.

    Args:
      label: a format of the bar's `task`, such as "{task.description}".
      numbers: another one, of what is shown beside the bar.
      console: where it is shown; None: standard output.
    """
    return Progress(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(numbers),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
