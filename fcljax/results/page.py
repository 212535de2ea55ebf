"""The report page of runs: one HTML file that loads nothing, made from what their folders hold."""

import base64
import hashlib
import shlex
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from fcljax import __version__
from fcljax.errors import InputError, printable
from fcljax.files import check_folder, open_regular, write_text
from fcljax.results.comparison import groups_of
from fcljax.results.run_folder import FinishedRun, changed_files, load_summary, read_lines, run_folders

NAME = "report.html"
PICTURE = Path("figures") / "restored.png"
MADE = b"<p>Made by fcljax"  # in the footer
MAX_PAGE = 2**25  # bytes that are read of a page
MAX_PICTURES = 2**21  # bytes of all pictures together; the page stays below 5 MB


def report(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Make the page of finished runs.

    Args:
      run_dirs: run directories, or folders that hold some (`run_folder.run_folders`).
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
    text = render(read_runs(run_dirs), run_dirs)
    check_folder(path.parent)
    write_text(path, text)
    return path


def is_page(path: Path) -> bool:
    """Whether a file is a report page, which may be made again."""
    try:
        with open_regular(path) as stream:
            return MADE in stream.read(MAX_PAGE)
    except OSError:
        return False


def try_report(run_dirs: Sequence[str | Path], out: Path, tell: Callable[[str], None]) -> bool:
    """As `report`, but a failure is reported in one line, since the runs and their results do not depend on
    the page. Returns whether the page was made."""
    try:
        report(run_dirs, out)
    except Exception as error:
        tell(f"warning: the page {out} could not be made: {type(error).__name__}: {error}")
        return False
    return True


def read_runs(run_dirs: Sequence[str | Path]) -> list[FinishedRun]:
    """The finished runs in these folders.

    Raises:
      InputError: for a run that `load_summary` refuses.
    """
    runs = []
    left = MAX_PICTURES
    for folder in (found for each in run_dirs for found in run_folders(each)):
        picture = _picture(folder / PICTURE, left)
        left -= len(picture or "")
        summary = load_summary(folder)
        # a line of another run's task would make columns for it
        lines = [line for line in read_lines(folder / "metrics.jsonl") if line["task"] < len(summary["A"])]
        runs.append(FinishedRun(str(folder), summary, lines, picture))
    return runs


def render(runs: Sequence[FinishedRun], run_dirs: Sequence[str | Path]) -> str:
    """The page of these runs as HTML. `run_dirs`: as the user named them, for the command that makes it."""
    from fcljax.results.page_parts import parts_of  # imports matplotlib, which takes a second

    style = _asset("page.css")
    script = _asset("page.js")
    # a user's text is escaped, and what no file in UTF-8 can hold is written with backslashes
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    again = shlex.join(["fcljax", "report", *map(str, run_dirs)])
    page = environment.from_string(_asset("page.html")).render(
        title=_title(runs),
        lead=_lead(runs),
        parts=parts_of(runs, again),
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return page.lstrip()


def _asset(name: str) -> str:
    return (resources.files("fcljax") / "assets" / "report" / name).read_text(encoding="utf-8")


def _title(runs: Sequence[FinishedRun]) -> str:
    return (
        f"{_few([run.summary['method'] for run in runs])} on {_few([run.summary['dataset'] for run in runs])}"
    )


def _few(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")


def _lead(runs: Sequence[FinishedRun]) -> str:
    said = "".join(f" {line}." for run in runs for line in changed_files(run.folder))
    if len(runs) == 1:
        return f"One run, seed {runs[0].summary['seed']}.{said}"
    return f"{len(runs)} runs of {len(groups_of([run.summary for run in runs]))} settings.{said}"


def _hash(text: str) -> str:
    """Of the page's script or style, so that its policy allows this one and no other."""
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
