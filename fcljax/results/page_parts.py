"""The sections of the report page: from the results of runs to tables and charts. Pure functions.

A section that a summary has no key for, since an older version wrote it, is left out, and the page says so.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup

from fcljax.federated.health import CLASSES, NOT_FINITE, training_warnings
from fcljax.results import charts, repeat
from fcljax.results.comparison import (
    ASIDE,
    Group,
    curves_of,
    differences,
    groups_of,
    megabytes_text,
    over_seeds_text,
    percent,
)
from fcljax.results.metrics import without_nan, worst
from fcljax.results.run_folder import (
    SHARES,
    FinishedRun,
    Number,
    Summary,
    rejected_uploads,
    value_at,
)
from fcljax.results.summary_fields import RESTORED

Named = TypeVar("Named")

MAX_MATRICES = 24
MAX_CELLS = 40_000  # of all tables of client partitions together; a cell has some 20 bytes
MAX_ROWS = 1_000  # of a table
SHADES = 10  # of a table's cells, from white to dark
FORGETTING = ("paper", "released", "diagonal")
TIMES = {
    "compile_s": "compiling",
    "client_s": "client work",
    "server_s": "server work",
    "eval_s": "evaluation",
}
WAYS = ("upload", "download")
MAX_POINTS = 100  # of a curve over rounds
NONE = "-"
# keys of metrics.jsonl that say where a line belongs, or that another part of the page shows
SHOWN_ELSEWHERE = {
    *("task", "round", "participants", "rejected", "rejected_besides", "refused", "impossible"),
    *("slot_efficiency", "upload_bytes", "download_bytes", "accuracy", "A", "A_provisional", "A_task_il"),
    *(CLASSES, NOT_FINITE),
}


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
    """A drawing, with its legend below and its title above."""

    drawn: Markup
    legend: Sequence[tuple[Markup, str]] = ()
    """how something is drawn, and its name"""
    switches: bool = False
    """whether a click on an entry of the legend hides its curve"""
    title: str = ""


class Section(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    text: Sequence[str] = ()
    """paragraphs"""
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()
    pictures: Sequence[tuple[str, str]] = ()
    """data URI, and what it shows"""
    folded: Sequence[PageTable] = ()
    """tables that a click opens"""
    commands: Sequence[str] = ()


class PageView(NamedTuple):
    """The runs of a page."""

    groups: list[Group]
    """of runs that differ only in the seed"""
    names: dict[str, Summary]
    """every run, by a name of its own"""
    runs: Sequence[FinishedRun]


def parts_of(runs: Sequence[FinishedRun], again: str) -> list[Section]:
    """All sections of the page, in their order. `again`: the command that makes the page."""
    groups = groups_of([run.summary for run in runs])
    view = PageView(groups, _names(groups), runs)
    makers = (
        _warnings,
        _results,
        _curves,
        _matrices,
        _forgetting,
        _confusion,
        _clients,
        _classes,
        _partitions,
        _costs,
        _privacy,
        _times,
        _terms,
        _measured,
        _rejected,
        _reconstructions,
        _calibration,
        _settings,
    )
    return [*(part for make in makers if (part := make(view)) is not None), _commands(view, again)]


def _warnings(view: PageView) -> Section | None:
    """What went wrong in training, of each run; runs of older versions do not say it themselves."""
    lines = {id(run.summary): run.lines for run in view.runs}
    found = [
        [name, line.removeprefix("warning: ")]
        for name, run in view.names.items()
        for line in run.get("warnings", training_warnings(lines[id(run)]))
    ]
    if not found:
        return None
    table = _table(
        f"Warnings of {len({name for name, _ in found})} runs", ("Run", "Warning"), found[:MAX_ROWS]
    )
    return Section("warnings", "Warnings", ("What the runs said at their end.",), tables=[table])


def _results(view: PageView) -> Section:
    columns = {
        "A_avg": lambda group: accuracy(group, "A_avg"),
        "A_last": lambda group: accuracy(group, "A_last"),
        "Forgetting": lambda group: accuracy(group, "forgetting.paper"),
        "Upload (MB)": lambda group: size_cell(group, "communication_total.upload_bytes"),
        "Download (MB)": lambda group: size_cell(group, "communication_total.download_bytes"),
        "Time (s)": lambda group: seeds([_seconds(run) for run in group.runs], 1),
        "A_last, Task-IL": lambda group: accuracy(group, "task_il.A_last"),
        "Trainable parameters": lambda group: count_cell(group, "trainable_params"),
        "Images/s in training": lambda group: mean(group, "trained_images_per_s", 1),
        "Seeds": lambda group: ", ".join(str(run["seed"]) for run in group.runs),
        "Data set": lambda group: group.runs[0]["dataset"],
    }
    caption = "Accuracy and forgetting in %, mean ± population standard deviation over seeds"
    tables = [_table_of(caption, "Method", _by_name(view.groups), columns)]
    if len(view.names) > len(view.groups):
        columns = {
            "Seed": lambda run: run["seed"],
            "A_avg": lambda run: share(run["A_avg"]),
            "A_last": lambda run: share(run["A_last"]),
            "Forgetting (paper)": lambda run: share(run["forgetting"]["paper"]),
        }
        tables.append(_table_of("Every run, in %", "Run", view.names, columns))
    pairs = differences(view.groups)
    if pairs:
        caption = (
            f"{view.groups[0].name} minus another, seed by seed: points, and 95 % interval (Student's t)"
        )
        tables.append(_table(caption, ("The other", "Seeds", "A_avg", "A_last"), pairs))
    text = (
        "A_t is the mean Class-IL accuracy over the tasks learned so far: all their classes compete. A_avg "
        "is the mean of A_t over t, and A_last its value after the last task. In Task-IL only the classes of "
        "the image's own task compete. Upload and download: all clients, all rounds.",
    )
    return Section("results", "Results", text, tables=tables)


def _curves(view: PageView) -> Section:
    runs, spread = curves_of(view.groups)
    longest = max(len(values) for values in runs.values())
    rows = []
    for group in view.groups:
        values = 100 * np.array([run["A"] for run in group.runs], float)
        cells = [seeds(column.tolist(), 2) for column in values.T]
        rows.append([group.name, *cells, *[NONE] * (longest - len(cells))])
    label = f"Average accuracy over tasks learned of {len(runs)} curves; the table below has the values"
    legend = [(charts.curve_key(i), name) for i, name in enumerate(runs)]
    chart = Chart(charts.curves(runs, spread, label), legend, switches=len(runs) > 1)
    text = ("A band is one population standard deviation over seeds.",) if spread else ()
    columns = ("Run", *(f"Task {t + 1}" for t in range(longest)))
    return Section(
        "curves", "Accuracy over tasks", text, [chart], [_table("A_t after each task, in %", columns, rows)]
    )


def _matrices(view: PageView) -> Section:
    shown = view.groups[:MAX_MATRICES]
    text = ["Row: after learning that task; column: accuracy on the test images of that task, in %."]
    if any(len(group.runs) > 1 for group in shown):
        text.append("With several seeds, the mean.")
    if len(shown) < len(view.groups):
        text.append(f"The first {len(shown)} of {len(view.groups)} are shown.")
    return Section("matrix", "Accuracy matrix", text, tables=[_matrix(group) for group in shown])


def _matrix(group: Group) -> PageTable:
    values = 100 * np.array([run["accuracy"] for run in group.runs], float).mean(0)
    rows = [
        [f"After task {t + 1}", *(heat(value, 100) for value in row)]
        for t, row in enumerate(without_nan(values))
    ]
    return _table(group.name, ("Learned", *(f"Task {t + 1}" for t in range(len(values)))), rows)


def _forgetting(view: PageView) -> Section:
    text = (
        "paper: the best accuracy on a task before the last one was learned, minus the accuracy at the end, "
        "mean over all tasks but the last; negative where old tasks have improved. released: the best of all "
        "times minus the end, over all tasks. diagonal: accuracy just after a task was learned minus the "
        "end. In points.",
    )
    keys = {**{kind: f"forgetting.{kind}" for kind in FORGETTING}, "Backward transfer": "backward_transfer"}
    rows = [[group.name, *(accuracy(group, key) for key in keys.values())] for group in view.groups]
    table = _table("Forgetting by its three definitions", ("Run", *keys), rows)
    return Section("forgetting", "Forgetting", text, tables=[table])


def _confusion(view: PageView) -> Section | None:
    """Old classes against those of the last task."""
    having = [group for group in view.groups if all(_tasks_confused(run) > 1 for run in group.runs)]
    if not having:
        return None
    means = {
        group.name: np.array([run["task_confusion"] for run in group.runs], float).mean(0)
        for group in having[:MAX_MATRICES]
    }
    rows = []
    for name, shares in means.items():
        old = shares[:-1].mean(0)
        new = shares[-1]
        cells = without_nan(np.array([old[:-1].sum(), old[-1], new[:-1].sum(), new[-1]]))
        rows.append([name, *map(share, cells)])
    text = (
        "After the last task: of which task the predicted class is. New is the last task, old are those "
        "before it; each old task has the same weight. Where old images are called new, the model leans to "
        "what it saw last.",
    )
    columns = ("Run", "Old called old", "Old called new", "New called old", "New called new")
    table = _table("Images of old and new classes, in %", columns, rows)
    folded = [_task_matrix(name, shares) for name, shares in means.items()]
    return Section("confusion", "Old against new classes", text, tables=[table], folded=folded)


def _tasks_confused(run: Summary) -> int:
    return len(run.get("task_confusion") or [])


def _task_matrix(name: str, shares: np.ndarray) -> PageTable:
    columns = ("Images of", *(f"called task {t + 1}" for t in range(len(shares))))
    rows = [
        [f"Task {t + 1}", *(heat(value, 100) for value in row)]
        for t, row in enumerate(without_nan(100 * shares))
    ]
    return _table(f"Task against task, in %: {name}", columns, rows)


def _clients(view: PageView) -> Section:
    text = (
        "Accuracy of the global model under each client's own mix of classes, in %. The worst 10 %: the mean "
        "over the tenth of the clients with the lowest accuracy, one client at least."
    )
    part = _per_item(
        view,
        Section("clients", "Accuracy per client", [text]),
        "client_accuracy",
        "Client",
        lambda run, i: str(i),
    )
    having, _ = _having(view, "client_accuracy")
    columns = {
        "Mean": lambda run: share(_mean(run["client_accuracy"])),
        "Worst 10 %": lambda run: share(worst(run["client_accuracy"])),
        "Lowest": lambda run: share(worst(run["client_accuracy"], 0.0)),
    }
    spread = [_table_of("Over the clients of a run, in %", "Run", having, columns)] if having else []
    return part._replace(tables=spread, folded=part.tables)


def _classes(view: PageView) -> Section:
    text = "Accuracy on the test images of each class after the last task, in the class order of each run."
    return _per_item(
        view, Section("classes", "Accuracy per class", [text]), "class_accuracy", "Class", _class_name
    )


def _per_item(
    view: PageView, part: Section, key: str, item: str, name: Callable[[Summary, int], str]
) -> Section:
    """Dots for every run, and tables with a row for each item: one for all runs whose items have the same
    names, in whatever order (class orders differ by seed)."""
    having, lacking = _having(view, key)
    if not having:
        return part._replace(text=[*part.text, *lacking])
    values = {
        run_name: {name(run, i): value for i, value in enumerate(run[key])}
        for run_name, run in having.items()
    }
    dots = {
        run_name: {f"{item.lower()} {each}": percent(x) for each, x in own.items()}
        for run_name, own in values.items()
    }
    chart = Chart(charts.dots(dots, f"{part.title}: a dot for each, a line at the mean", "Accuracy (%)"))
    alike: dict[tuple, dict[str, dict[str, Number | None]]] = {}
    for run_name, own in values.items():
        alike.setdefault(tuple(sorted(own)), {})[run_name] = own
    tables = [_item_table(part.title, item, runs) for runs in alike.values()]
    return part._replace(text=[*part.text, *lacking], charts=[chart], tables=tables)


def _item_table(title: str, item: str, runs: dict[str, dict[str, Number | None]]) -> PageTable:
    items = list(next(iter(runs.values())))
    rows = [[each, *(share(own.get(each)) for own in runs.values())] for each in items[:MAX_ROWS]]
    more = f"; the first {MAX_ROWS} of {len(items)}" if len(items) > MAX_ROWS else ""
    return _table(f"{title}, in %{more}", (item, *runs), rows)


def _partitions(view: PageView) -> Section:
    having, lacking = _having(view, "holdings")
    alike: dict[str, list[str]] = {}
    for name, run in having.items():
        alike.setdefault(str((run["holdings"], run.get("class_names"))), []).append(name)
    tables = []
    cells = 0
    for names in alike.values():
        table = _partition(having[names[0]], names)
        cells += len(table.rows) * len(table.columns)
        if cells <= MAX_CELLS:
            tables.append(table)
    text = ["Training examples of each client (rows) and class (columns, in the order of the tasks)."]
    if len(tables) < len(alike):
        text.append(
            f"{len(tables)} of {len(alike)} are shown; all are in summary.json, and in figures/classes.png."
        )
    return Section("holdings", "Client partitions", [*text, *lacking], tables=tables)


def _partition(run: Summary, names: list[str]) -> PageTable:
    order = list(dict.fromkeys(c for task in run["task_classes"] for c in task))
    task_of = {c: t + 1 for t, task in reversed(list(enumerate(run["task_classes"]))) for c in task}
    counts = np.array(run["holdings"], float)
    most = max(float(counts.max(initial=0)), 1.0)
    columns = ("Client", *(f"{_class_name(run, c)} (task {task_of[c]})" for c in order), "All", "Classes")
    rows = [
        [client, *(heat(own[c], most, "g") for c in order), f"{own.sum():.9g}", np.count_nonzero(own > 0)]
        for client, own in enumerate(counts)
    ]
    return _table(f"Training examples: {_few(names)}", columns, rows)


def _costs(view: PageView) -> Section:
    columns = {
        "Upload in all (MB)": "communication_total.upload_bytes",
        "Download in all (MB)": "communication_total.download_bytes",
        "Upload a round (MB)": "communication.upload_bytes",
        "Upload a round (parameters)": "communication.upload_scalars",
        "Download a round (MB)": "communication.download_bytes",
        "Upload besides, a task (MB)": "besides.upload",
        "Download besides, a task (MB)": "besides.download",
        "Cached by a client (MB)": "extra_storage.bytes",
        "Client state (MB)": "client_state.bytes",
        "Server state (MB)": "server_state.bytes",
    }
    rows = []
    points = {}
    for group in view.groups:
        runs = [run | {"besides": {way: _besides(run, way) for way in WAYS}} for run in group.runs]
        whole = group._replace(runs=runs)
        cells = [
            (count_cell if key.endswith("scalars") else size_cell)(whole, key) for key in columns.values()
        ]
        rows.append([group.name, accuracy(group, "A_last"), *cells])
        last = [100 * run["A_last"] for run in group.runs if run["A_last"] is not None]
        if last:
            total = _mean(_in_all(run) for run in group.runs)
            points[group.name] = (total / 1e6, sum(last) / len(last))
    label = "Accuracy after the last task over all that clients send and receive; the table has the values"
    legend = [(charts.curve_key(i), name) for i, name in enumerate(points)]
    drawn = [
        Chart(charts.scatter(points, label, "Sent and received in the whole run (MB)", "A_last (%)"), legend)
    ]
    sums = _traffic_curves(view)
    if sums:
        label = "Sent and received so far, over the rounds; the table has the totals"
        names = [group.name for group in view.groups]
        legend = [(charts.curve_key(names.index(name)), name) for name in sums]
        curves = charts.lines(sums, names, label, "Rounds", "Sent and received so far (MB)")
        drawn.append(Chart(curves, legend))
    text = [
        "In all: all clients and rounds, also statistics that are sent once a task, and what clients "
        "download to cache. A round: one client. Besides, a task: what one client sends and receives once a "
        "task, outside of the usual rounds. With several seeds, means. 1 MB is 10^6 bytes. "
        "Parameters: all floating-point values of an upload."
    ]
    if not all("communication_total" in run for run in view.names.values()):
        text.append(_left_out("communication_total"))
    table = _table("Communication and storage beside accuracy", ("Run", "A_last (%)", *columns), rows)
    return Section("costs", "Communication and storage", text, drawn if points else drawn[1:], [table])


def _besides(run: Summary, way: str) -> Number | None:
    """Bytes of a client's exchanges that come once a task."""
    extra = run.get("communication_extra")
    return None if extra is None else sum(each[f"{way}_bytes"] for each in extra.values())


def _in_all(run: Summary) -> Number:
    """Bytes that all clients send and receive in a run."""
    return sum(value_at(run, f"communication_total.{way}_bytes") or 0 for way in WAYS)


def _traffic_curves(view: PageView) -> dict[str, tuple[Sequence[Number], Sequence[Number]]]:
    """By name of the group: rounds, and MB so far, mean over those of its runs that are all equally long and
    whose rounds say what was sent."""
    lines = {id(run.summary): run.lines for run in view.runs}
    found = {}
    for group in view.groups:
        sums = [_sent_so_far(lines[id(run)]) for run in group.runs]
        if len({len(each) for each in sums}) == 1 and len(sums[0]):
            sent = np.mean(sums, axis=0)
            rounds = np.linspace(1, len(sent), min(len(sent), MAX_POINTS)).round().astype(int)
            found[group.name] = (rounds.tolist(), sent[rounds - 1].tolist())
    return found


def _sent_so_far(lines: Sequence[dict[str, Any]]) -> np.ndarray:
    """MB that were sent and received up to each round [R]; none if a round does not say."""
    if not all(isinstance(line.get(f"{way}_bytes"), int) for line in lines for way in WAYS):
        return np.zeros(0)
    return np.cumsum([line["upload_bytes"] + line["download_bytes"] for line in lines]) / 1e6


def _privacy(view: PageView) -> Section | None:
    """The epsilon of runs with differential privacy."""
    having, _ = _having(view, "privacy.by_round")
    if not having:
        return None
    keys = {"epsilon": "epsilon", "delta": "delta", "Noise multiplier": "noise_multiplier"}
    rows = [
        [name, *(_short(value_at(run, f"privacy.{key}")) for key in keys.values())]
        for name, run in having.items()
    ]
    curves = {}
    for name, run in having.items():
        points = [pair for pair in run["privacy"]["by_round"] if None not in pair]  # null: infinite
        curves[name] = ([x for x, _ in points], [y for _, y in points])
    legend = [(charts.curve_key(list(view.names).index(name)), name) for name in curves]
    label = "Epsilon over the rounds; the table has its last value"
    text = (
        "The (epsilon, delta) guarantee of differential privacy for all data of one client, after so many "
        "rounds: the smaller epsilon, the stronger.",
    )
    return Section(
        "privacy",
        "Privacy",
        text,
        [Chart(charts.lines(curves, list(view.names), label, "Rounds", "Epsilon"), legend)],
        [_table("After the last round", ("Run", *keys), rows)],
    )


def _times(view: PageView) -> Section:
    means = {
        group.name: [_mean(value_at(run, f"time.{key}") for run in group.runs) for key in TIMES]
        for group in view.groups
    }
    parts = list(TIMES.values())
    chart = Chart(
        charts.bars(means, parts, "Seconds of every part; the table below has the values", "s"),
        [(charts.bar_key(j), name) for j, name in enumerate(parts)],
    )
    rows = [
        [
            group.name,
            *(fixed(value, 2) for value in (*means[group.name], sum(means[group.name]))),
            mean(group, "trained_images_per_s", 1),
            mean(group, "slot_efficiency", 3),
        ]
        for group in view.groups
    ]
    columns = ("Run", *parts, "all", "Trained images/s", "Slot efficiency")
    table = _table("Seconds, mean over seeds", columns, rows)
    return Section("time", "Time by part", (), [chart], [table])


def _terms(view: PageView) -> Section | None:
    """Shares of the loss's terms, as clients measured them."""
    rows = []
    tasks = 0
    own = {id(run.summary): run.lines for run in view.runs}
    for name, run in view.names.items():
        lines = own[id(run)]
        terms = dict.fromkeys(key for line in lines for key in line if key.startswith(SHARES))
        tasks = max([tasks, *(line["task"] + 1 for line in lines if terms)])
        rows += [[name, term.removeprefix(SHARES), *_by_task(lines, term)] for term in terms]
    if not rows:
        return None
    text = (
        "How much each term of the clients' loss moves the model: the L2 norm of its gradient over the sum "
        "of all terms' norms, measured at one client in the middle of every round, mean over a task's "
        "rounds. `own` is the loss that the method starts from, `adapter` the adapter's.",
    )
    columns = ("Run", "Term", *(f"Task {t + 1}" for t in range(tasks)))
    rows = [[*row, *[NONE] * (len(columns) - len(row))] for row in rows]
    return Section("terms", "Terms of the loss", text, tables=[_table("Shares in %", columns, rows)])


def _measured(view: PageView) -> Section | None:
    """What methods measure besides the loss, such as a server rule's choice: numbers of metrics.jsonl that no
    other part of the page shows."""
    rows = []
    tasks = 0
    lines = {id(run.summary): run.lines for run in view.runs}
    for name, run in view.names.items():
        own = lines[id(run)]
        keys = dict.fromkeys(key for line in own for key in line if _is_measured(key))
        count = max((line["task"] + 1 for line in own if keys), default=0)
        tasks = max(tasks, count)
        for key in keys:
            values = [_last_value(own, task, key) for task in range(count)]
            rows.append([name, key, *(NONE if value is None else _short(value) for value in values)])
    if not rows:
        return None
    text = (
        "Numbers that the method's server and clients report, in the last round of each task that has them.",
    )
    columns = ("Run", "Number", *(f"Task {t + 1}" for t in range(tasks)))
    rows = [[*row, *[NONE] * (len(columns) - len(row))] for row in rows[:MAX_ROWS]]
    return Section(
        "measured", "Measured by the method", text, tables=[_table("After each task", columns, rows)]
    )


def _is_measured(key: str) -> bool:
    return key not in SHOWN_ELSEWHERE and not key.startswith(SHARES)


def _last_value(lines: Sequence[dict[str, Any]], task: int, key: str) -> Number | None:
    """The last number that a task's rounds have."""
    values = [line.get(key) for line in lines if line["task"] == task]
    known = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return known[-1] if known else None


def _by_task(lines: Sequence[dict[str, Any]], key: str) -> list[Cell]:
    """A share's mean over the rounds of each task."""
    cells = []
    for task in sorted({line["task"] for line in lines}):
        values = [line[key] for line in lines if line["task"] == task and line.get(key) is not None]
        cells.append(share(float(np.mean(values)) if values else None))
    return cells


def _rejected(view: PageView) -> Section:
    having, lacking = _having(view, "rejected_uploads")
    columns = {
        "Rejected uploads": lambda run: number(run["rejected_uploads"]),
        "Refused results": lambda run: number(run.get("refused_results")),
        "Rounds without upload": lambda run: number(len(run.get("rounds_without_upload") or [])),
    }
    text = [
        "Uploads with a NaN, an infinity or a claim that cannot be true are left out; a result that is not "
        "finite is refused."
    ]
    if having and not any(run["rejected_uploads"] for run in having.values()):
        text.append("No upload was rejected.")
    tables = [_table_of("Rejected uploads", "Run", having, columns)] if having else []
    lines = {id(run.summary): run.lines for run in view.runs}
    tables += [
        _rejected_by_task(name, lines[id(run)])
        for name, run in having.items()
        if run["rejected_uploads"] and lines[id(run)]
    ]
    return Section("rejected", "Rejected uploads", [*text, *lacking], tables=tables)


def _rejected_by_task(name: str, lines: Sequence[dict[str, Any]]) -> PageTable:
    rows = []
    for task in sorted({line["task"] for line in lines}):
        own = [line for line in lines if line["task"] == task]
        participants = sum(line.get("participants") or 0 for line in own)
        rows.append([f"Task {task + 1}", number(rejected_uploads(own)), number(participants)])
    # uploads once a task, outside the rounds, may be rejected too, so there can be more than participants
    return _table(f"Rejected by task: {name}", ("Task", "Rejected uploads", "Participants of rounds"), rows)


def _reconstructions(view: PageView) -> Section | None:
    having, _ = _having(view, "restored")
    if not having:
        return None
    rows = [
        [f"{name}, {of}", *(fixed(value_at(run, f"restored.{inner}{key}"), 4) for key in RESTORED)]
        for name, run in having.items()
        for of, inner in (("training", ""), ("test", "test."))
    ]
    text = [
        "What the server can reconstruct of clients' images of the last task: mean squared error on hidden "
        "pixels, PSNR in dB, and the share of reconstructed images whose nearest image of their class is "
        "their original, beside chance."
    ]
    own = {id(run.summary): run.picture for run in view.runs}
    pictures = [
        (uri, f"{name}: training images masked, reconstructed without and with the prompt, and original")
        for name, run in having.items()
        if (uri := own[id(run)])
    ]
    if len(pictures) < len(having):
        text.append("Pictures that are not here are in the runs' figures/restored.png.")
    table = _table("Reconstructed images", ("Run, images", *RESTORED), rows)
    return Section("rebuilt", "Reconstructed images", text, tables=[table], pictures=pictures)


def _calibration(view: PageView) -> Section:
    having, lacking = _having(view, "calibration.examples")
    shown = list(having.items())[:MAX_MATRICES]
    drawn = []
    for name, run in shown:
        error = share(run["calibration"]["ece"]).text
        label = f"Reliability of {name}: accuracy over confidence, error {error} %"
        drawn.append(Chart(charts.reliability(run["calibration"], label), title=name))
    columns = {
        "Expected calibration error": lambda run: share(run["calibration"]["ece"]),
        "With sampled parameters": lambda run: share(value_at(run, "calibration_drawn.ece")),
        "Without a prediction": lambda run: number(run.get("unpredicted")),
    }
    text = [
        "After the last task: bars are the accuracy of images in a bin of confidence; below, their share.",
        "An image whose outputs are not finite has no prediction: it counts as wrong, and is in no bin.",
    ]
    tables = [_table_of("Calibration, in %", "Run", having, columns)] if having else []
    return Section("calibration", "Reliability", [*text, *lacking], drawn, tables)


def _settings(view: PageView) -> Section:
    runs = [{"method": group.runs[0]["method"], **group.runs[0].get("config", {})} for group in view.groups]
    settings = {
        name: [str(run.get(name, NONE)) for run in runs]
        for name in dict.fromkeys(name for run in runs for name in run)
    }
    differ = [[name, *values] for name, values in settings.items() if len(set(values)) > 1]
    same = [[name, values[0]] for name, values in settings.items() if len(set(values)) == 1]
    columns = ("Setting", *(group.name for group in view.groups))
    tables = [_table("Settings in which the runs differ", columns, differ)] if differ else []
    caption = "Settings that all runs share" if len(runs) > 1 else "All settings"
    text = []
    if len(view.names) > len(view.groups):
        text.append(
            "Runs of one group differ in their seed, and in settings that only decide where they are made: "
            f"{', '.join(sorted(ASIDE))}."
        )
    folded = [_table(caption, ("Setting", "Value"), same)]
    return Section("settings", "Settings", text, tables=tables, folded=folded)


def _commands(view: PageView, again: str) -> Section:
    text = ["The runs, and then this page. Files are named as they were given to the runs."]
    commands = [*map(_command, view.groups), again]
    return Section("again", "Repeat the runs", text, commands=commands)


def _command(group: Group) -> str:
    one = group.runs[0]
    settings = {"method": one["method"], "seed": one["seed"], **one.get("config", {})}
    given = one.get("given")  # older runs have none
    known = isinstance(given, list) and all(isinstance(name, str) for name in given)
    words = repeat.command(settings, given if known else None)
    if len(group.runs) > 1:
        words = [word for word in words if not word.startswith("--seed=")]
        words.append(f"--seeds={','.join(str(run['seed']) for run in group.runs)}")
    return shlex.join(words)


# cells


def number(value: Number | None) -> Cell:
    """A number with commas between thousands."""
    return Cell(NONE) if value is None else Cell(f"{value:,}", value)


def size_cell(group: Group, key: str) -> Cell:
    """Bytes of every run of a group in MB: mean and standard deviation."""
    values = [value_at(run, key) for run in group.runs]
    text = megabytes_text(values)
    return Cell(text) if text == NONE else Cell(text, float(np.mean(values)) / 1e6)


def count_cell(group: Group, key: str) -> Cell:
    """A whole number of every run of a group, or its mean over them where they differ."""
    values = [value_at(run, key) for run in group.runs]
    return number(values[0]) if len(set(values)) == 1 else mean(group, key, 1)


def fixed(value: Number | None, digits: int) -> Cell:
    """A number with so many digits after the point."""
    return Cell(NONE) if value is None else Cell(f"{value:.{digits}f}", value)


def share(value: Number | None) -> Cell:
    """A fraction in per cent."""
    return fixed(percent(value), 2)


def heat(value: Number | None, most: Number, form: str = ".2f") -> Cell:
    """A number whose cell is the darker the nearer it comes to `most`; nothing where there is none."""
    if value is None:
        return Cell("")
    return Cell(format(value, form), None, round(SHADES * min(max(value / most, 0), 1)))


def seeds(values: Sequence[Number | None], digits: int) -> Cell:
    """Mean and population standard deviation over seeds."""
    text = over_seeds_text(values, digits)
    return Cell(text) if text == NONE else Cell(text, float(np.array(values, float).mean()))


def mean(group: Group, key: str, digits: int) -> Cell:
    """A number of every run of a group: mean and standard deviation; a dash where a run lacks it."""
    return seeds([value_at(run, key) for run in group.runs], digits)


def accuracy(group: Group, key: str) -> Cell:
    """As `mean`, of an accuracy or another fraction in per cent."""
    return seeds([percent(value_at(run, key)) for run in group.runs], 2)


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> PageTable:
    """A table whose rows have cells and plain text."""
    return PageTable(
        caption,
        columns,
        [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in rows],
    )


def _table_of(
    caption: str, first: str, named: Mapping[str, Named], columns: Mapping[str, Callable[[Named], object]]
) -> PageTable:
    """A table with a row for each of `named`, whose cells the columns' functions give."""
    rows = [[name, *(cell(each) for cell in columns.values())] for name, each in named.items()]
    return _table(caption, (first, *columns), rows)


def _by_name(groups: list[Group]) -> dict[str, Group]:
    return {group.name: group for group in groups}


def _names(groups: list[Group]) -> dict[str, Summary]:
    """A name for each run: its group's, with the seed where the group has several."""
    found = {}
    for group in groups:
        base = group.name.removesuffix(f" ({len(group.runs)} seeds)")
        for run in group.runs:
            found[f"{base}, seed {run['seed']}" if len(group.runs) > 1 else group.name] = run
    return found


def _having(view: PageView, key: str) -> tuple[dict[str, Summary], list[str]]:
    """The runs that have a key, by name, and a line for those that lack it."""
    having = {name: run for name, run in view.names.items() if value_at(run, key) not in (None, [], {})}
    lacking = [name for name in view.names if name not in having]
    return having, [f"{_left_out(key)}: {_few(lacking)}."] if lacking else []


def _left_out(key: str) -> str:
    return f"Left out, since summary.json lacks {key!r}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _class_name(run: Summary, index: int) -> str:
    names = run.get("class_names") or []
    if index >= len(names):
        return f"{index}"
    return f"{names[index]} ({index})" if names.count(names[index]) > 1 else names[index]


def _short(value: Number | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{value:.4g}", value)


def _seconds(run: Summary) -> Number:
    """Seconds of a run."""
    return sum(value_at(run, f"time.{key}") or 0 for key in TIMES)


def _mean(values: Iterable[Number | None]) -> Number:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
