"""Make the report page of runs: one HTML file that loads nothing, from the summaries in
their folders."""

import base64
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from fcljax import __version__
from fcljax.errors import InputError, printable
from fcljax.files import check_folder, open_regular, write_text
from fcljax.results.comparison import groups_of
from fcljax.results.run_folder import Summary, changed_files, load_summary, run_folders

NAME = "report.html"
FOOTER = b"<p>Made by fcljax"
MAX_PAGE = 2**25  # bytes that are read of a page
MAX_NAMES = 4  # in the title


def report(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Make the page of finished runs.

    Args:
      run_dirs: run directories, or folders that hold some (`run_folder.run_folders`).
      out: the file; default: report.html in the one folder that is given, else in the
        one that holds the first.

    Returns:
      The file.

    Raises:
      InputError: no run given, a run that `load_summary` refuses, or a file that is no
        .html or cannot be written.
    """
    if not run_dirs:
        raise InputError("run: nothing to report; give at least one run directory")
    if out is not None:
        path = Path(out)
    elif len(run_dirs) == 1:
        path = Path(run_dirs[0]) / NAME
    else:
        path = Path(run_dirs[0]).parent / NAME
    # the name of a folder or of a figure is more likely a slip than a wish
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise InputError(
            f"out: {str(path)!r} is not a page's name; nearest: {str(path.with_suffix('.html'))!r}"
        )
    folders = [folder for run_dir in run_dirs for folder in run_folders(run_dir)]
    # read all summaries first: an error in one must not leave half a report
    text = render({str(folder): load_summary(folder) for folder in folders}, run_dirs)
    check_folder(path.parent)
    write_text(path, text)
    return path


def is_page(path: Path) -> bool:
    """Check whether a file is a report page, which may be replaced."""
    try:
        with open_regular(path) as stream:
            return FOOTER in stream.read(MAX_PAGE)
    except OSError:
        return False


def try_report(
    run_dirs: Sequence[str | Path],
    out: Path,
    tell: Callable[[str], None],
) -> bool:
    """Make the page as `report` does, but report a failure in one line, since the runs
    and their results do not depend on the page. Return whether the page was made."""
    try:
        report(run_dirs, out)
    except Exception as error:
        tell(f"warning: the page {out} could not be made: {type(error).__name__}: {error}")
        return False
    return True


def render(runs: Mapping[str, Summary], run_dirs: Sequence[str | Path]) -> str:
    """Return the page as HTML.

    Args:
      runs: folder -> its summary.
      run_dirs: as the user named them, for the command that makes the page.
    """
    # imports matplotlib, which takes a second
    from fcljax.results.page_parts import sections_of

    # The page's policy names the hashes of its style and script, so a browser runs
    # nothing else, whatever a stranger's run directory brings in.
    style = _asset("page.css")
    script = _asset("page.js")
    # A user's text is escaped. What UTF-8 cannot hold, such as half a surrogate pair, is
    # written with backslashes.
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # text alone: markup that the page made itself stays as it is
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    command = shlex.join(["fcljax", "report", *map(str, run_dirs)])
    page = environment.from_string(_asset("page.html")).render(
        title=_title(list(runs.values())),
        lead=_lead(runs),
        sections=sections_of(list(runs.values()), command),
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return page.lstrip()


def _asset(name: str) -> str:
    return (resources.files("fcljax") / "assets" / "report" / name).read_text(encoding="utf-8")


def _title(summaries: Sequence[Summary]) -> str:
    return " on ".join(_first_names([run[key] for run in summaries]) for key in ("method", "dataset"))


def _first_names(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    rest = ""
    if len(distinct) > MAX_NAMES:
        rest = f" and {len(distinct) - MAX_NAMES} more"
    return ", ".join(distinct[:MAX_NAMES]) + rest


def _lead(runs: Mapping[str, Summary]) -> str:
    warnings = "".join(f" {line}." for folder in runs for line in changed_files(folder))
    summaries = list(runs.values())
    if len(summaries) == 1:
        return f"One run, seed {summaries[0]['seed']}.{warnings}"
    return f"{len(summaries)} runs of {len(groups_of(summaries))} settings.{warnings}"


def _hash(text: str) -> str:
    """Return the hash of the page's script or style, so that its policy allows this one
    and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
