"""Lines, tables and progress bars on a terminal. Text appears as it is, whatever it
contains: file names may look like rich's markup, and need not be UTF-8."""

import html
from collections.abc import Collection
from types import TracebackType
from typing import Any

from rich import box
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
    """Return a value in one line, for a terminal and for the cell of a table."""
    return Text(one_line(str(value)))


def new_table(
    *columns: str,
    title: str = "",
    caption: str = "",
    right: Collection[str] = (),
    narrow: bool = False,
) -> Table:
    """Return an empty table in the one style of all commands, narrow enough for 80
    columns.

    Args:
      columns: their names.
      title, caption: lines above and below.
      right: names of the columns of numbers, which align to the right and never break.
      narrow: put one space between columns, not two.
    """
    table = Table(
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    if title:
        table.title = plain_text(title)
    if caption:
        table.caption = plain_text(caption)
    if narrow:
        table.padding = (0, 0, 0, 0)
    for name in columns:
        # a number that breaks over two lines reads as two numbers
        if name in right:
            table.add_column(name, justify="right", no_wrap=True)
        elif name == columns[0]:
            # the first column names the row: it breaks last
            table.add_column(name, overflow="fold", min_width=10)
        else:
            table.add_column(name, overflow="fold")
    return table


def duration(seconds: float | int) -> str:
    """Return a time as seconds (12.3 s), from a minute on as minutes (2:44) or hours
    (1:02:44)."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def add_row(table: Table, *cells: object, style: str | None = None, end_section: bool = False) -> None:
    """Add a row of plain text to a table."""
    table.add_row(*map(plain_text, cells), style=style, end_section=end_section)


def say(console: Console, line: str) -> None:
    """Print a line."""
    # soft_wrap: the terminal wraps, so that a copied path has no line break in it
    console.print(plain_text(line), soft_wrap=True, highlight=False)


def progress_bar(label: str, numbers: str = "", console: Console | None = None) -> Progress:
    """Return a bar with a label, some numbers, the time taken and the time left.

    Args:
      label: a format of the bar's `task`, such as "{task.description}".
      numbers: a format for the text beside the bar.
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


class NotebookBar:
    """A progress bar in a notebook, without the widgets that rich's bar needs there."""

    def __init__(self, label: str, numbers: str = ""):
        self.format = f"{label}  {numbers}"
        self.done = 0
        self.total = 0
        self.fields = {}

    def __enter__(self) -> "NotebookBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def add_task(self, _description: str, *, total: int, completed: int = 0, **fields: Any) -> int:
        """Show the bar; `fields` has what the label shows."""
        from IPython.display import display  # pyrefly: ignore[missing-import]

        self.total = total
        self.done = completed
        self.fields = fields
        self.handle = display(self, display_id=True)
        return 0

    def update(self, _task: Any, *, advance: int = 0, **fields: Any) -> None:
        """Move the bar. `_task` is there for rich's interface, where a bar has several."""
        self.done += advance
        self.fields |= fields
        if self.handle:
            self.handle.update(self)

    def __repr__(self) -> str:
        """Return the bar's line in notebooks without HTML."""
        return f"{self.done}/{self.total} {self._text()}"

    def _text(self) -> str:
        # formats are written for rich's bars, where the fields belong to a task
        return self.format.replace("{task.fields[", "{fields[").format(fields=self.fields)

    def _repr_html_(self) -> str:
        words = html.escape(self._text())
        return (
            f'<progress value="{self.done}" max="{self.total}"></progress> {self.done}/{self.total} {words}'
        )
