"""`fcljax.run_seeds` and `fcljax.compare`: a method over several seeds, and methods side
by side, from Python."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fcljax.api import Data, Result, run
from fcljax.errors import InputError
from fcljax.methods import MethodEntry
from fcljax.results.comparison import (
    curves_of,
    differences_table,
    groups_of,
    is_personal,
    results_table,
    total_seconds,
)
from fcljax.results.run_folder import Summary, load_summary, run_folders
from fcljax.settings import RunConfig
from fcljax.studies.seeds import listed_seeds

if TYPE_CHECKING:
    import pandas  # pyrefly: ignore[missing-import]

Runs = Result | str | Path | Sequence[Any]
# fields of a summary that `Comparison.rows` copies as they are
COLUMNS = ("method", "dataset", "backbone", "fidelity", "seed", "A_last", "A_avg")


def run_seeds(
    method: str | MethodEntry,
    data: Data = "digits",
    *,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    **options: Any,
) -> list[Result]:
    """Train and evaluate a method once with each seed.

    Args:
      method: as of `fcljax.run`.
      data: as of `fcljax.run`.
      seeds: how many, from the method's own seed on; or a list of them.
      out: the folder of the run directories seed-S, a new one; None: temporary ones,
        which are removed with the results.
      options: all others of `fcljax.run`; not `seed`.

    Returns:
      A result for each seed, in their order. `compare` shows mean and deviation.

    Raises:
      InputError: as `fcljax.run`, or for seeds that are not different whole numbers.
    """
    if "seed" in options:
        raise InputError(f"seed: {options['seed']!r} has no effect beside seeds; leave it out")
    if out is not None and Path(out).exists():
        raise InputError(f"out: {str(out)!r} exists; give a new folder")
    results = []
    for seed in listed_seeds(seeds, RunConfig.seed):
        folder = None
        if out is not None:
            folder = Path(out) / f"seed-{seed}"
        results.append(run(method, data, out=folder, seed=seed, **options))
    return results


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Finished runs side by side. It shows itself in a notebook."""

    runs: list[Summary]
    """Their summaries."""

    def tables(self) -> list[Table]:
        """Return a table of the runs, and one of paired differences if there are seeds to
        pair."""
        tables = [results_table(self.runs), differences_table(groups_of(self.runs))]
        # without seeds to pair, the second one is empty
        return [table for table in tables if table.row_count]

    def rows(self) -> list[dict[str, Any]]:
        """Return the main numbers of each run. Accuracies are fractions, of the `model`:
        global or personal."""
        rows = []
        for summary in self.runs:
            # runs of earlier versions have no total
            traffic = summary.get("communication_total") or {}
            row = {name: summary[name] for name in COLUMNS}
            row["model"] = "personal" if is_personal(summary) else "global"
            row["forgetting"] = summary["forgetting"]["paper"]
            row["upload_bytes"] = traffic.get("upload_bytes")
            row["download_bytes"] = traffic.get("download_bytes")
            row["seconds"] = total_seconds(summary)
            rows.append(row)
        return rows

    def to_pandas(self) -> pandas.DataFrame:
        """Return `rows` as a table of pandas.

        Raises:
          InputError: if pandas is not installed.
        """
        try:
            import pandas  # pyrefly: ignore[missing-import]
        except ImportError:
            raise InputError(
                "to_pandas: pandas is not installed; nearest: pip install pandas, or rows()"
            ) from None
        return pandas.DataFrame(self.rows())

    def figure(self, path: str | Path) -> Path:
        """Draw accuracy after each task, with bands over seeds, as .png, .pdf or .svg.

        Raises:
          InputError: for another format.
        """
        # matplotlib takes a second to import, and tables do not need it
        from fcljax.results import figures

        figures.check_format(Path(path))
        return figures.save(path, figures.accuracy_curve(*curves_of(groups_of(self.runs))))

    def __repr__(self) -> str:
        """Return the tables as text of 80 columns."""
        console = Console(width=80)
        with console.capture() as capture:
            for table in self.tables():
                console.print(table)
        return capture.get()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def compare(*runs: Runs) -> Comparison:
    """Compare finished runs.

    Runs that differ only in the seed share a row, with their mean and population standard
    deviation. Methods that ran with the same seeds get paired differences.

    Args:
      runs: results of `fcljax.run` and `fcljax.run_seeds`, run directories, folders of
        them, or lists of these.

    Raises:
      InputError: for no runs, or a folder without a finished run.
    """
    summaries = [summary for argument in runs for summary in _summaries(argument)]
    if not summaries:
        raise InputError("runs: nothing to compare; give results of fcljax.run or run directories")
    return Comparison(summaries)


def _summaries(runs: Any) -> Iterator[Summary]:
    """Yield the summaries of all runs of an argument of `compare`."""
    if isinstance(runs, Result):
        yield runs.metrics
    elif isinstance(runs, str | Path):
        yield from map(load_summary, run_folders(runs))
    elif isinstance(runs, list | tuple):
        for item in runs:
            yield from _summaries(item)
    else:
        raise InputError(
            f"runs: {type(runs).__name__} is no run; expected a Result, a run directory or a list of them"
        )
