"""The report page of runs: one HTML file that loads nothing, made from what their folders hold."""

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fcljax import __version__
from fcljax.errors import InputError, printable
from fcljax.files import check_folder, open_regular, write_text
from fcljax.results.comparison import groups_of, run_folders
from fcljax.results.figures import load_summary
from fcljax.results.page_parts import Run, parts_of

NAME = "report.html"
PICTURE = Path("figures") / "restored.png"
MOST_OF_PICTURES = 2**21  # bytes of all pictures together; the page stays below 5 MB
MOST_OF_LINES = 2**26  # bytes of a metrics.jsonl


def report(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Make the page of finished runs.

    Args:
      run_dirs: run directories, or folders that hold some (`comparison.run_folders`).
      out: the file; default: report.html in the one folder that is given, else in the one that holds the
        first.

    Returns:
      The file.

    Raises:
      InputError: no run given, a run that `load_summary` refuses, or a file that is no .html or cannot be
        written.
    """
    if not run_dirs:
        raise InputError("run: nothing to report; give at least one run directory")
    folder = Path(run_dirs[0]) if len(run_dirs) == 1 else Path(run_dirs[0]).parent
    path = Path(out) if out is not None else folder / NAME
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise InputError(
            f"out: {str(path)!r} is no name of a page; nearest: {str(path.with_suffix('.html'))!r}"
        )
    runs = read_runs(run_dirs)
    check_folder(path.parent)
    return write_page(path, runs, run_dirs)


def try_report(run_dirs: Sequence[str | Path], out: Path, tell: Callable[[str], None]) -> bool:
    """As `report`, but what goes wrong is told in one line: the runs and their numbers do not depend on it.
    Returns whether the page was made."""
    try:
        report(run_dirs, out)
    except Exception as error:
        tell(f"warning: the page {out} could not be made: {type(error).__name__}: {error}")
        return False
    return True


def read_runs(run_dirs: Sequence[str | Path]) -> list[Run]:
    """The finished runs in these folders.

    Raises:
      InputError: for a run that `load_summary` refuses.
    """
    runs, left = [], MOST_OF_PICTURES
    for folder in (found for each in run_dirs for found in run_folders(each)):
        picture = _picture(folder / PICTURE, left)
        left -= len(picture or "")
        runs.append(Run(str(folder), load_summary(folder), read_lines(folder / "metrics.jsonl"), picture))
    return runs


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl, whose last one may be half written; none if it is not there."""
    try:
        with open_regular(path) as stream:
            content = stream.read(MOST_OF_LINES)
    except OSError:
        return []
    found = []
    for line in content.split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # damaged
            continue
        if isinstance(value, dict) and all(isinstance(value.get(name), int) for name in ("task", "round")):
            found.append(value)
    return found


def write_page(path: Path, runs: Sequence[Run], run_dirs: Sequence[str | Path]) -> Path:
    """Write the page of these runs. `run_dirs`: as the user named them, for the command that makes it."""
    write_text(path, render(runs, run_dirs))
    return path


def render(runs: Sequence[Run], run_dirs: Sequence[str | Path]) -> str:
    """The page of these runs as HTML."""
    read = lambda name: (resources.files("fcljax") / "assets" / "report" / name).read_text(encoding="utf-8")
    style, script = read("page.css"), read("page.js")
    # a user's text is escaped, and what no file in UTF-8 can hold is written with backslashes
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    again = shlex.join(["fcljax", "report", *map(str, run_dirs)])
    return (
        environment.from_string(read("page.html"))
        .render(
            title=_title(runs),
            lead=_lead(runs),
            parts=parts_of(runs, again),
            version=__version__,
            style=Markup(style),
            script=Markup(script),
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
        .lstrip()
    )


def _title(runs: Sequence[Run]) -> str:
    methods = list(dict.fromkeys(run.summary["method"] for run in runs))
    data = list(dict.fromkeys(run.summary["dataset"] for run in runs))
    few = lambda names: ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{few(methods)} on {few(data)}"


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"One run, seed {runs[0].summary['seed']}."
    return f"{len(runs)} runs of {len(groups_of([run.summary for run in runs]))} settings."


def _hash(text: str) -> str:
    """Of a script or a style, by which the page allows it and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _picture(path: Path, most: int) -> str | None:
    """A PNG as the URI of its data, if it is there and has less than `most` characters."""
    try:
        with open_regular(path) as stream:
            content = stream.read(most + 1)
    except OSError:
        return None
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return uri if content.startswith(b"\x89PNG") and len(uri) <= most else None
