"""Build the sections of the report page: from summaries of runs to tables and charts.
Pure functions.

The summary.json of an older version may lack a key. Such a run has a dash in tables,
and the page names the runs that a whole section leaves out.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fcljax.results import charts, repeat
from fcljax.results.comparison import (
    ASIDE,
    PERSONAL_MODELS,
    Group,
    curves_of,
    differences,
    groups_of,
    is_personal,
    megabytes_text,
    over_seeds_text,
    percent,
    total_seconds,
)
from fcljax.results.metrics import without_nan, worst
from fcljax.results.run_folder import Number, Summary, value_at

# Limits that keep the page of a large sweep, which is a single file, quick to open
MAX_MATRICES = 24
MAX_ROWS = 1_000  # of a table
MAX_WARNINGS = 20
MAX_NAMES = 6  # of runs in a sentence
SHADES = 10  # of a table's cells, from white to dark
NONE = "-"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    value: Number | None = None
    """the plain number for sorting and copying, if the text is not one"""
    shade: int | None = None
    """how dark the cell is, from 0 to SHADES"""


class PageTable(NamedTuple):
    """A table whose first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Chart(NamedTuple):
    """A drawing with a legend below."""

    drawing: Markup
    legend: Sequence[tuple[Markup, str]] = ()
    """sample of a curve or marker, and its name"""
    switches: bool = False
    """whether a click on an entry of the legend hides its curve"""


class Section(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    text: Sequence[str] = ()
    """paragraphs"""
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()
    folded: Sequence[PageTable] = ()
    """tables that a click opens"""
    commands: Sequence[str] = ()


def sections_of(summaries: Sequence[Summary], page_command: str) -> list[Section]:
    """Return the sections of the page in their order. `page_command` repeats the page."""
    groups = groups_of([run | {"derived": _derived(run)} for run in summaries])
    runs = _named_runs(groups)
    return [
        _results(groups, runs),
        _curves(groups),
        _forgetting(groups),
        _clients(runs),
        _classes(runs),
        _costs(groups),
        _settings(groups),
        _commands(groups, page_command),
    ]


def _derived(run: Summary) -> dict[str, Number | None]:
    """Compute what the tables show and no key of a summary has."""
    # None for a client without examples of the seen classes
    accuracies = of_clients(run)
    valid = [value for value in accuracies if value is not None]
    client_mean = None
    if valid:
        client_mean = float(np.mean(valid))
    values = {
        "seconds": total_seconds(run),
        "client_mean": client_mean,
        "client_worst_tenth": worst(accuracies),
        "client_lowest": worst(accuracies, 0.0),
    }
    for key in ("upload_bytes", "download_bytes"):
        once_a_task = run.get("communication_extra")
        # a run of an earlier version does not say, and 0 would be wrong
        total = None
        if once_a_task is not None:
            total = sum(exchange[key] for exchange in once_a_task.values())
        values[f"{key}_once_a_task"] = total
    return values


# ---- cells of one value per seed -------------------------------------------------------


def percent_cell(fractions: Sequence[Number | None]) -> Cell:
    """Return mean and standard deviation of fractions, in %."""
    return number_cell([percent(value) for value in fractions], digits=2)


def number_cell(values: Sequence[Number | None], digits: int = 1) -> Cell:
    """Return mean and standard deviation of numbers; a dash where one is missing."""
    text = over_seeds_text(values, digits)
    # one decision on what is missing, which `over_seeds_text` makes
    if text == NONE:
        return Cell(text)
    return Cell(text, float(np.array(values, float).mean()))


def megabytes_cell(sizes: Sequence[Number | None]) -> Cell:
    """Return mean and standard deviation of bytes, in MB."""
    text = megabytes_text(sizes)
    if text == NONE:
        return Cell(text)
    return Cell(text, float(np.array(sizes, float).mean()) / 1e6)


def count_cell(counts: Sequence[Number | None]) -> Cell:
    """Return an integer with commas between thousands, or the mean where seeds differ."""
    # seeds that differ have a mean, which is no integer
    if len(set(counts)) > 1 or counts[0] is None:
        return number_cell(counts)
    return Cell(f"{counts[0]:,}", counts[0])


def text_cell(values: Sequence[object]) -> Cell:
    """Return the distinct values in a row."""
    return Cell(", ".join(dict.fromkeys(map(str, values))))


def heat_cell(value: Number | None, largest: Number) -> Cell:
    """Return a number whose cell is the darker the nearer it comes to `largest`; an
    empty cell for None."""
    if value is None:
        return Cell("")
    # one scale for all matrices of a page, so that shades compare
    return Cell(f"{value:.2f}", shade=round(SHADES * min(max(value / largest, 0), 1)))


# ---- tables ----------------------------------------------------------------------------

# name of a column -> (function of one value per seed, key of summary.json)
Columns = Mapping[str, tuple[Callable[[Sequence], Cell], str]]


def _summary_table(
    caption: str, row_title: str, rows: Mapping[str, Sequence[Summary]], columns: Columns
) -> PageTable:
    """Return a table with a row for each name in `rows`, which shows the mean over its
    runs."""
    cells = [
        [name, *(cell([value_at(run, key) for run in runs]) for cell, key in columns.values())]
        for name, runs in rows.items()
    ]
    return _table(caption, (row_title, *columns), cells)


def _table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> PageTable:
    """Return a table whose rows have cells and plain text."""
    cells = [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in rows]
    return PageTable(caption, columns, cells)


def _by_name(groups: list[Group]) -> dict[str, list[Summary]]:
    return {group.name: group.runs for group in groups}


def _named_runs(groups: list[Group]) -> dict[str, Summary]:
    """Name each run as its group, with the seed where the group has several."""
    runs = {}
    for group in groups:
        if len(group.runs) == 1:
            runs[group.name] = group.runs[0]
            continue
        # the name of a group counts its seeds; a run's name has the seed itself
        base = group.name.removesuffix(f" ({len(group.runs)} seeds)")
        runs |= {f"{base}, seed {run['seed']}": run for run in group.runs}
    return runs


def _left_out(runs: Mapping[str, Summary], key: str) -> list[str]:
    """Name the runs that lack a key, in a line; no line if all have it."""
    names = [name for name, run in runs.items() if not value_at(run, key)]
    if not names:
        return []
    rest = ""
    if len(names) > MAX_NAMES:
        rest = f" and {len(names) - MAX_NAMES} more"
    return [f"Left out, since summary.json lacks {key!r}: {', '.join(names[:MAX_NAMES])}{rest}."]


# ---- sections --------------------------------------------------------------------------


def _results(groups: list[Group], runs: dict[str, Summary]) -> Section:
    columns: dict[str, tuple[Callable[[Sequence], Cell], str]] = {
        "A_avg": (percent_cell, "A_avg"),
        "A_last": (percent_cell, "A_last"),
        "Forgetting": (percent_cell, "forgetting.paper"),
        "Upload (MB)": (megabytes_cell, "communication_total.upload_bytes"),
        "Download (MB)": (megabytes_cell, "communication_total.download_bytes"),
        "Time (s)": (number_cell, "derived.seconds"),
        "A_last, Task-IL": (percent_cell, "task_il.A_last"),
        "Trainable parameters": (count_cell, "trainable_params"),
        "Images/s in training": (number_cell, "trained_images_per_s"),
        "Seeds": (text_cell, "seed"),
        "Data set": (text_cell, "dataset"),
    }
    # only where a run used differential privacy: elsewhere the column would be dashes
    if any(run.get("privacy") for run in runs.values()):
        columns["Epsilon"] = (number_cell, "privacy.epsilon")
    caption = "Accuracy and forgetting in %, mean±population standard deviation over seeds"
    tables = [_summary_table(caption, "Method", _by_name(groups), columns)]
    pairs = differences(groups)
    if pairs:
        caption = f"{groups[0].name} minus another, paired by seed: points, and 95 % interval (Student's t)"
        tables.append(_table(caption, ("The other", "Seeds", "A_avg", "A_last"), pairs))
    folded = []
    if len(runs) > len(groups):
        # single runs show the spread behind the means, in the columns that seeds change
        columns = {name: columns[name] for name in ("A_avg", "A_last", "Forgetting")}
        by_run = {name: [run] for name, run in runs.items()}
        folded = [_summary_table("Every run, in %", "Run", by_run, columns)]
    text = [
        "A_t is the mean Class-IL accuracy over the tasks learned so far: all their classes compete. A_avg "
        "is the mean of A_t over t, and A_last its value after the last task. In Task-IL only the classes of "
        "an example's own task compete. Upload and download: all clients, all rounds.",
    ]
    if any(map(is_personal, runs.values())):
        text.append(f"Accuracy is of the global model, or {PERSONAL_MODELS}.")
    warnings = [f"{name}: {line}" for name, run in runs.items() for line in run.get("warnings") or []]
    text += warnings[:MAX_WARNINGS]
    if len(warnings) > MAX_WARNINGS:
        text.append(f"{len(warnings) - MAX_WARNINGS} more warnings are in summary.json.")
    return Section("results", "Results", text, tables=tables, folded=folded)


def _curves(groups: list[Group]) -> Section:
    means, spread = curves_of(groups)
    longest = max(len(values) for values in means.values())
    rows = []
    for group in groups:
        accuracies = np.array([run["A"] for run in group.runs], float)
        cells = [percent_cell(column.tolist()) for column in accuracies.T]
        # shorter curves leave the last columns open
        rows.append([group.name, *cells, *[NONE] * (longest - len(cells))])
    label = f"Average accuracy over tasks learned of {len(means)} curves; the table below has the values"
    legend = [(charts.curve_key(i), name) for i, name in enumerate(means)]
    chart = Chart(charts.curves(means, spread, label), legend, switches=len(means) > 1)
    text = ()
    if spread:
        text = ("A band is one population standard deviation over seeds.",)
    table = _table("A_t after each task, in %", ("Run", *_tasks(longest)), rows)
    return Section("curves", "Accuracy over tasks", text, [chart], [table])


def _tasks(count: int) -> list[str]:
    return [f"Task {t + 1}" for t in range(count)]


def _forgetting(groups: list[Group]) -> Section:
    text = [
        "paper: the best accuracy on a task before the last one was learned, minus the accuracy at the end, "
        "mean over all tasks but the last; negative where old tasks have improved. released: the best of all "
        "times minus the end, over all tasks. diagonal: accuracy just after a task was learned minus the "
        "end. In points.",
        "In a matrix, a row stands for the time after a task, a column for the test examples of a task. "
        "Accuracies are in %, means over seeds.",
    ]
    if len(groups) > MAX_MATRICES:
        text.append(f"The first {MAX_MATRICES} of {len(groups)} matrices are shown.")
    columns: Columns = {
        "paper": (percent_cell, "forgetting.paper"),
        "released": (percent_cell, "forgetting.released"),
        "diagonal": (percent_cell, "forgetting.diagonal"),
        "Backward transfer": (percent_cell, "backward_transfer"),
    }
    table = _summary_table("Forgetting by its three definitions", "Run", _by_name(groups), columns)
    matrices = [_matrix(group) for group in groups[:MAX_MATRICES]]
    return Section("forgetting", "Forgetting", text, tables=[table, *matrices])


def _matrix(group: Group) -> PageTable:
    """Return the accuracy matrix [task learned, task tested], mean over seeds."""
    # None of an unlearned task becomes NaN, also in the mean over seeds
    accuracies = 100 * np.array([run["accuracy"] for run in group.runs], float).mean(0)
    rows = [
        [f"After task {t + 1}", *(heat_cell(value, 100) for value in row)]
        for t, row in enumerate(without_nan(accuracies))
    ]
    return _table(f"Accuracy matrix: {group.name}", ("Learned", *_tasks(len(rows))), rows)


def _clients(runs: dict[str, Summary]) -> Section:
    text = (
        "Accuracy of the global model under each client's own mix of classes, in %; of a run with personal "
        "models that of each client's personal model on the classes that it has learned. The worst 10 %: the "
        "mean over the tenth of the clients with the lowest accuracy, one client at least."
    )
    columns: Columns = {
        "Mean": (percent_cell, "derived.client_mean"),
        "Worst 10 %": (percent_cell, "derived.client_worst_tenth"),
        "Lowest": (percent_cell, "derived.client_lowest"),
    }
    by_run = {name: [run] for name, run in runs.items() if of_clients(run)}
    accuracies = {
        name: {f"{client}": value for client, value in enumerate(of_clients(run))}
        for name, (run,) in by_run.items()
    }
    table = _summary_table("Over the clients of a run, in %", "Run", by_run, columns)
    # a run of personal models has no global one
    shared = {name: run for name, run in runs.items() if not is_personal(run)}
    section = Section("clients", "Accuracy per client", [text, *_left_out(shared, "client_accuracy")])
    return _with_items(section, "Client", accuracies, [table])


def of_clients(run: Summary) -> list[Number | None]:
    """Return the accuracy of each client: of its personal model, or of the global one."""
    if is_personal(run):
        return run.get("personal_accuracy") or []
    return run.get("client_accuracy") or []


def _classes(runs: dict[str, Summary]) -> Section:
    text = "Accuracy on the test examples of each class after the last task."
    accuracies = {
        name: dict(zip(_class_names(run), run["class_accuracy"], strict=True))
        for name, run in runs.items()
        if run.get("class_accuracy")
    }
    section = Section("classes", "Accuracy per class", [text, *_left_out(runs, "class_accuracy")])
    return _with_items(section, "Class", accuracies, [])


def _class_names(run: Summary) -> list[str]:
    """Return a distinct name for each class of `class_accuracy`, in the class order of
    the run."""
    # a run of an earlier version has no names, and its classes are numbers
    names = list(run.get("class_names") or [])
    for index in range(len(names), len(run["class_accuracy"])):
        names.append(str(index))
    return [
        f"{name} ({index})" if names.count(name) > 1 else name
        for index, name in enumerate(names[: len(run["class_accuracy"])])
    ]


def _with_items(
    section: Section,
    item: str,
    accuracies: Mapping[str, Mapping[str, Number | None]],
    tables: Sequence[PageTable],
) -> Section:
    """Add a dot for each client or class of every run, and a folded table with a row
    for each. Class orders differ by seed, so rows go by name."""
    if not accuracies:
        return section
    dots = {
        run: {f"{item.lower()} {name}": percent(value) for name, value in values.items()}
        for run, values in accuracies.items()
    }
    label = f"{section.title}: a dot for each, a line at the mean"
    # a class may be missing in runs of another data set; they get a dash
    names = list(dict.fromkeys(name for values in accuracies.values() for name in values))
    rows = [
        [name, *(percent_cell([values.get(name)]) for values in accuracies.values())]
        for name in names[:MAX_ROWS]
    ]
    limit = ""
    if len(names) > MAX_ROWS:
        limit = f"; the first {MAX_ROWS} of {len(names)}"
    item_table = _table(f"{section.title}, in %{limit}", (item, *accuracies), rows)
    chart = Chart(charts.dots(dots, label, "Accuracy (%)"))
    return section._replace(charts=[chart], tables=tables, folded=[item_table])


def _costs(groups: list[Group]) -> Section:
    columns: Columns = {
        "A_last (%)": (percent_cell, "A_last"),
        "Total upload (MB)": (megabytes_cell, "communication_total.upload_bytes"),
        "Total download (MB)": (megabytes_cell, "communication_total.download_bytes"),
        "Upload per round (MB)": (megabytes_cell, "communication.upload_bytes"),
        "Upload per round (parameters)": (count_cell, "communication.upload_scalars"),
        "Download per round (MB)": (megabytes_cell, "communication.download_bytes"),
        "Further upload per task (MB)": (megabytes_cell, "derived.upload_bytes_once_a_task"),
        "Further download per task (MB)": (megabytes_cell, "derived.download_bytes_once_a_task"),
        "Cached by a client (MB)": (megabytes_cell, "extra_storage.bytes"),
        "Client state (MB)": (megabytes_cell, "client_state.bytes"),
        "Server state (MB)": (megabytes_cell, "server_state.bytes"),
    }
    table = _summary_table("Communication, storage and accuracy", "Run", _by_name(groups), columns)
    text = (
        "In all: all clients and rounds, also statistics that are sent once a task, and what clients "
        "download to cache. A round: one client. Besides, a task: what one client sends and receives once a "
        "task, outside of the usual rounds. With several seeds, means. 1 MB is 10^6 bytes. "
        "Parameters: all floating-point values of an upload."
    )
    points = {}
    for row, group in zip(table.rows, groups, strict=True):
        # taken from the table, so that chart and table cannot disagree
        accuracy, upload, download = (cell.value for cell in row[1:4])
        if accuracy is not None and upload is not None and download is not None:
            points[group.name] = (upload + download, accuracy)
    label = "Accuracy after the last task over the total communication; the table has the values"
    legend = [(charts.curve_key(i), name) for i, name in enumerate(points)]
    drawing = charts.scatter(points, label, "Sent and received in the whole run (MB)", "A_last (%)")
    drawings = []
    if points:
        drawings = [Chart(drawing, legend)]
    left_out = _left_out({group.name: group.runs[0] for group in groups}, "communication_total")
    return Section("costs", "Communication and storage", [text, *left_out], drawings, [table])


def _settings(groups: list[Group]) -> Section:
    runs = [{"method": group.runs[0]["method"], **group.runs[0].get("config", {})} for group in groups]
    names = dict.fromkeys(name for run in runs for name in run)
    settings = {name: [str(run.get(name, NONE)) for run in runs] for name in names}
    differing = [[name, *values] for name, values in settings.items() if len(set(values)) > 1]
    shared = [[name, values[0]] for name, values in settings.items() if len(set(values)) == 1]
    tables = []
    if differing:
        columns = ("Setting", *(group.name for group in groups))
        tables = [_table("Settings in which the runs differ", columns, differing)]
    text = []
    if any(len(group.runs) > 1 for group in groups):
        text.append(
            "Runs of one group differ in their seed, and in settings that only decide where they are made: "
            f"{', '.join(sorted(ASIDE))}."
        )
    caption = "All settings"
    if len(runs) > 1:
        caption = "Settings that all runs share"
    return Section(
        "settings",
        "Settings",
        text,
        tables=tables,
        folded=[_table(caption, ("Setting", "Value"), shared)],
    )


def _commands(groups: list[Group], page_command: str) -> Section:
    text = ["The runs, and then this page. Files are named as they were given to the runs."]
    runs = [run for group in groups for run in group.runs]
    text += [f"Made with {software}." for software in repeat.all_software_of(runs)]
    commands = [*map(_run_command, groups), page_command]
    return Section("again", "Repeat the runs", text, commands=commands)


def _run_command(group: Group) -> str:
    """Return the command that repeats the runs of a group."""
    run = group.runs[0]
    settings = {"method": run["method"], "seed": run["seed"], **run.get("config", {})}
    names = run.get("given")  # older runs have none
    is_known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    words = repeat.command(settings, names if is_known else None)
    if len(group.runs) > 1:
        words = [word for word in words if not word.startswith("--seed=")]
        words.append(f"--seeds={','.join(str(run['seed']) for run in group.runs)}")
    return shlex.join(words)
