"""What the report page says: from the results of runs to parts with tables and charts. Pure functions.

A part that a run's summary has nothing for, since an older version made it, is left out, and says so.
"""

import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fcljax.results import svg
from fcljax.results.command import run_command
from fcljax.results.comparison import ASIDE, Group, Summary, differences, groups_of
from fcljax.results.metrics import over_seeds

MOST_MATRICES = 24
MOST_CELLS = 40_000  # of all tables of who holds what together; a cell has some 20 bytes
MOST_ROWS = 1_000  # of a table
SHADES = 10  # of a table's cells, from white to dark
KINDS = ("paper", "released", "diagonal")
TIMES = ("compile", "client", "server", "eval")
STORED = ("extra_storage", "client_state", "server_state")
NONE = "-"


class Run(NamedTuple):
    """A finished run: its folder, summary.json, the lines of metrics.jsonl, and its picture of rebuilt images
    as the URI of its data, if it has one."""

    folder: str
    summary: Summary
    lines: Sequence[dict[str, Any]] = ()
    picture: str | None = None


class Cell(NamedTuple):
    """What a cell shows, its value as a plain number for sorting and copying if that is another, and how dark
    it is, from 0 to SHADES."""

    text: str
    value: float | int | None = None
    shade: int | None = None


class Table(NamedTuple):
    """The first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Key(NamedTuple):
    """An entry of a legend."""

    drawn: Markup
    name: str


class Chart(NamedTuple):
    """A drawing, with what stands above it."""

    drawn: Markup
    legend: Sequence[Key] = ()
    switches: bool = False  # may its entries be switched off?
    title: str = ""


class Part(NamedTuple):
    """A section of the page; `folded` tables are opened by a click."""

    id: str
    title: str
    said: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[str, str]] = ()  # URI of the data, and what it shows
    folded: Sequence[Table] = ()
    commands: Sequence[str] = ()


class View(NamedTuple):
    """The runs of a page: in groups that differ by seed only, and each with a name of its own."""

    groups: list[Group]
    names: dict[str, Summary]
    runs: Sequence[Run]


def parts_of(runs: Sequence[Run], again: str) -> list[Part]:
    """All parts of the page, in their order. `again`: the command that makes the page."""
    groups = groups_of([run.summary for run in runs])
    view = View(groups, _names(groups), runs)
    makers = (
        _results,
        _curves,
        _matrices,
        _forgetting,
        _clients,
        _classes,
        _holdings,
        _costs,
        _times,
        _rejected,
        _reconstructions,
        _calibration,
        _settings,
    )
    return [*(part for make in makers if (part := make(view)) is not None), _commands(view, again)]


def _results(view: View) -> Part:
    columns = (
        "Method",
        "Data set",
        "Seeds",
        "A_avg",
        "A_last",
        "A_last, task told",
        "Trained numbers",
        "Images/s",
    )
    rows = [
        [
            text(group.name),
            text(group.runs[0]["dataset"]),
            text(", ".join(str(run["seed"]) for run in group.runs)),
            percent(group, lambda run: run["A_avg"]),
            percent(group, lambda run: run["A_last"]),
            percent(group, lambda run: run["task_il"]["A_last"]),
            number(group.runs[0]["trainable_params"]),
            mean(group, lambda run: run["client_images_per_s"], 1),
        ]
        for group in view.groups
    ]
    tables = [Table("Results in %, mean ± population standard deviation over seeds", columns, rows)]
    if len(view.names) > len(view.groups):
        own = [
            [
                text(name),
                text(run["seed"]),
                share(run["A_avg"]),
                share(run["A_last"]),
                share(run["forgetting"]["paper"]),
            ]
            for name, run in view.names.items()
        ]
        tables.append(Table("Every run, in %", ("Run", "Seed", "A_avg", "A_last", "Forgetting (paper)"), own))
    pairs = [[text(name), whole(count), text(a), text(b)] for name, count, a, b in differences(view.groups)]
    if pairs:
        caption = (
            f"{view.groups[0].name} minus another, seed by seed: points, and 95 % interval (Student's t)"
        )
        tables.append(Table(caption, ("The other", "Seeds", "A_avg", "A_last"), pairs))
    said = (
        "A_t is the mean accuracy over the tasks learned so far, with all their classes competing; A_avg is "
        "its mean over t, and A_last its value after the last task.",
    )
    return Part("results", "Results", said, tables=tables)


def _curves(view: View) -> Part:
    lines, rows = {}, []
    for group in view.groups:
        values = 100 * np.array([run["A"] for run in group.runs], float)
        deviation = values.std(0) if len(values) > 1 else None
        lines[group.name] = svg.Line(
            _plain(values.mean(0)), None if deviation is None else deviation.tolist()
        )
        rows.append([text(group.name), *(spread(column.tolist(), 2) for column in values.T)])
    longest = max(len(line.values) for line in lines.values())
    rows = [[*row, *[text(NONE)] * (longest + 1 - len(row))] for row in rows]
    label = f"Average accuracy over tasks learned of {len(lines)} curves; the table below has the values"
    chart = Chart(
        svg.curves(lines, label, "Tasks learned", "Average accuracy A_t (%)"),
        [Key(svg.swatch(place), name) for place, name in enumerate(lines)],
        switches=len(lines) > 1,
    )
    said = (
        ("A band is one population standard deviation over seeds.",)
        if any(x.spread for x in lines.values())
        else ()
    )
    table = Table("A_t after each task, in %", ("Run", *(f"Task {t + 1}" for t in range(longest))), rows)
    return Part("curves", "Accuracy over tasks", said, [chart], [table])


def _matrices(view: View) -> Part:
    shown = view.groups[:MOST_MATRICES]
    said = ["Row: after learning that task; column: accuracy on the test images of that task, in %."]
    if any(len(group.runs) > 1 for group in shown):
        said.append("Of several seeds the mean.")
    if len(shown) < len(view.groups):
        said.append(f"The first {len(shown)} of {len(view.groups)} are shown.")
    return Part("matrix", "Accuracy matrix", said, tables=[_matrix(group) for group in shown])


def _matrix(group: Group) -> Table:
    values = 100 * np.array([run["accuracy"] for run in group.runs], float).mean(0)
    cells = [[heat(value, 100) for value in row] for row in _plain(values)]
    rows = [[text(f"After task {t + 1}"), *row] for t, row in enumerate(cells)]
    return Table(group.name, ("Learned", *(f"Task {t + 1}" for t in range(len(values)))), rows)


def _forgetting(view: View) -> Part:
    said = (
        "paper: the best accuracy on a task before the last one was learned, minus the accuracy at the end, "
        "mean over all tasks but the last; negative where old tasks have improved. released: the best of all "
        "times minus the end, over all tasks. diagonal: accuracy just after a task was learned minus the "
        "end. In points.",
    )
    rows = [
        [
            text(group.name),
            *(percent(group, lambda run, k=kind: run["forgetting"][k]) for kind in KINDS),
            percent(group, lambda run: run["backward_transfer"]),
        ]
        for group in view.groups
    ]
    table = Table("Forgetting by its three definitions", ("Run", *KINDS, "Backward transfer"), rows)
    return Part("forgetting", "Forgetting", said, tables=[table])


def _clients(view: View) -> Part:
    said = ["Accuracy of the global model under each client's own mix of classes, in %."]
    return _per_item(
        view, Part("clients", "Accuracy per client", said), "client_accuracy", "Client", lambda run, i: str(i)
    )


def _classes(view: View) -> Part:
    said = ["Accuracy on the test images of each class after the last task, in the class order of each run."]
    return _per_item(
        view, Part("classes", "Accuracy per class", said), "class_accuracy", "Class", _class_name
    )


def _per_item(view: View, part: Part, key: str, item: str, name: Callable[[Summary, int], str]) -> Part:
    """Dots for every run, and tables with a row for each item: one for all runs whose items have the same
    names, in whatever order (class orders differ by seed)."""
    there, lacking = _with(view, key)
    if not there:
        return part._replace(said=[*part.said, *lacking])
    dots = {
        run_name: {
            f"{item.lower()} {name(run, i)}": None if x is None else 100 * x for i, x in enumerate(run[key])
        }
        for run_name, run in there.items()
    }
    chart = Chart(svg.dots(dots, f"{part.title}: a dot for each, a line at the mean", "Accuracy (%)"))
    numberings: dict[tuple, dict[str, Summary]] = {}
    for run_name, run in there.items():
        items = tuple(name(run, i) for i in range(len(run[key])))
        numberings.setdefault(tuple(sorted(items)), {})[run_name] = run
    tables = [_item_table(part.title, key, item, name, runs) for runs in numberings.values()]
    return part._replace(said=[*part.said, *lacking], charts=[chart], tables=tables)


def _item_table(
    title: str, key: str, item: str, name: Callable[[Summary, int], str], runs: dict[str, Summary]
) -> Table:
    values = {run_name: {name(run, i): x for i, x in enumerate(run[key])} for run_name, run in runs.items()}
    items = list(next(iter(values.values())))
    rows = [[text(each), *(share(own.get(each)) for own in values.values())] for each in items[:MOST_ROWS]]
    more = f"; the first {MOST_ROWS} of {len(items)}" if len(items) > MOST_ROWS else ""
    return Table(f"{title}, in %{more}", (item, *values), rows)


def _holdings(view: View) -> Part:
    there, lacking = _with(view, "holdings")
    alike: dict[str, list[str]] = {}
    for name, run in there.items():
        alike.setdefault(str((run["holdings"], _names_of_classes(run))), []).append(name)
    tables, cells = [], 0
    for names in alike.values():
        table = _holding(there[names[0]], names)
        cells += len(table.rows) * len(table.columns)
        if cells <= MOST_CELLS:
            tables.append(table)
    said = ["Training rows of each client (rows) and class (columns, in the order of the tasks)."]
    if len(tables) < len(alike):
        said.append(
            f"{len(tables)} of {len(alike)} are shown; all are in summary.json, and in figures/classes.png."
        )
    return Part("holdings", "Who holds what", [*said, *lacking], tables=tables)


def _holding(run: Summary, names: list[str]) -> Table:
    order = list(dict.fromkeys(c for task in run["task_classes"] for c in task))
    task_of = {c: t + 1 for t, task in reversed(list(enumerate(run["task_classes"]))) for c in task}
    held = np.array(run["holdings"], float)
    most = max(float(held.max(initial=0)), 1.0)
    columns = ("Client", *(f"{_class_name(run, c)} (task {task_of[c]})" for c in order), "All", "Classes")
    rows = [
        [
            text(str(client)),
            *(heat(mine[c], most, "g") for c in order),
            whole(float(mine.sum())),
            whole(int((mine > 0).sum())),
        ]
        for client, mine in enumerate(held)
    ]
    return Table(f"Rows held: {_few(names)}", columns, rows)


def _costs(view: View) -> Part:
    columns = (
        "Run",
        "A_last (%)",
        "Sent, bytes",
        "Got, bytes",
        "Sent in all, bytes",
        "Got in all, bytes",
        "Kept by a client, bytes",
        "Client state, bytes",
        "Server state, bytes",
    )
    rows, points = [], {}
    for group in view.groups:
        one = group.runs[0]
        total = one.get("communication_total", {})
        rows.append(
            [
                text(group.name),
                percent(group, lambda run: run["A_last"]),
                number(one["communication"]["upload_bytes"]),
                number(one["communication"]["download_bytes"]),
                number(total.get("upload_bytes")),
                number(total.get("download_bytes")),
                *(number(_deep(one, (kept, "bytes"))) for kept in STORED),
            ]
        )
        sent = total.get("upload_bytes") or 0
        last = [100 * run["A_last"] for run in group.runs if run["A_last"] is not None]
        if last:
            points[group.name] = (sent, sum(last) / len(last))
    lacking = (
        []
        if all("communication_total" in g.runs[0] for g in view.groups)
        else [_lacks("communication_total")]
    )
    label = "Accuracy after the last task over all bytes that clients sent; the table below has the values"
    legend = [Key(svg.swatch(place), name) for place, name in enumerate(points)]
    charts = (
        [Chart(svg.scatter(points, label, "Bytes sent in the whole run", "A_last (%)"), legend)]
        if points
        else []
    )
    said = [
        "Sent and got: one client, one round. In all: all clients, all rounds. Of several seeds the first "
        "run's bytes."
    ]
    return Part(
        "costs",
        "Communication and storage",
        [*said, *lacking],
        charts,
        [Table("Communication and storage beside accuracy", columns, rows)],
    )


def _times(view: View) -> Part:
    means = {
        group.name: [_mean([run["time"].get(f"{t}_s") for run in group.runs]) for t in TIMES]
        for group in view.groups
    }
    rows = [
        [
            text(name),
            *(fixed(value, 2) for value in values),
            fixed(sum(values), 2),
            mean(group, lambda run: run["trained_images_per_s"], 1),
            mean(group, lambda run: run["slot_efficiency"], 3),
        ]
        for (name, values), group in zip(means.items(), view.groups, strict=True)
    ]
    columns = ("Run", *TIMES, "all", "Trained images/s", "Slot efficiency")
    parts = ("compiling", "client work", "server work", "evaluation")
    chart = Chart(
        svg.bars(means, parts, "Seconds of every part; the table below has the values", "s"),
        [Key(svg.key_of(place), name) for place, name in enumerate(parts)],
    )
    return Part("time", "Time by part", (), [chart], [Table("Seconds, mean over seeds", columns, rows)])


def _rejected(view: View) -> Part:
    columns = ("Run", "Rejected uploads", "Refused results", "Rounds without upload")
    there, lacking = _with(view, "rejected_uploads")
    rows = [
        [
            text(name),
            number(run["rejected_uploads"]),
            number(run.get("refused_results")),
            number(len(run.get("rounds_without_upload") or [])),
        ]
        for name, run in there.items()
    ]
    said = [
        "Uploads with a NaN, an infinity or a negative weight are left out; a result that is not finite is "
        "refused."
    ]
    if there and not any(run["rejected_uploads"] for run in there.values()):
        said.append("No upload was rejected.")
    tables = [Table("Rejected uploads", columns, rows)] if rows else []
    by_run = {id(run.summary): run.lines for run in view.runs}
    tables += [
        _rejected_by_task(name, by_run[id(run)])
        for name, run in there.items()
        if run["rejected_uploads"] and by_run[id(run)]
    ]
    return Part("rejected", "Rejected uploads", [*said, *lacking], tables=tables)


def _rejected_by_task(name: str, lines: Sequence[dict[str, Any]]) -> Table:
    tasks = sorted({line["task"] for line in lines})
    of = lambda t, key: sum(line.get(key) or 0 for line in lines if line["task"] == t)
    rows = [[text(f"Task {t + 1}"), number(of(t, "rejected")), number(of(t, "participants"))] for t in tasks]
    return Table(f"Rejected by task: {name}", ("Task", "Rejected", "Uploads"), rows)


def _reconstructions(view: View) -> Part | None:
    there = {name: run for name, run in view.names.items() if run.get("restored")}
    if not there:
        return None
    keys = ("images", "mse_restored", "mse_unprompted", "psnr", "psnr_unprompted", "identified", "chance")
    rows = [
        [text(f"{name}, {of}"), *(fixed(each.get(key), 4) for key in keys)]
        for name, run in there.items()
        for of, each in (("training", run["restored"]), ("test", run["restored"].get("test") or {}))
    ]
    said = [
        "What the server could rebuild of clients' images of the last task: error on hidden pixels, PSNR in "
        "dB, and the share of rebuilt images whose nearest image of their class is their original, beside "
        "chance."
    ]
    own = {id(run.summary): run.picture for run in view.runs}
    pictures = [
        (uri, f"{name}: training images masked, rebuilt without and with the prompt, and as they are")
        for name, run in there.items()
        if (uri := own[id(run)])
    ]
    if len(pictures) < len(there):
        said.append("Pictures that are not here are in the runs' figures/restored.png.")
    table = Table("Rebuilt images", ("Run, images", *keys), rows)
    return Part("rebuilt", "Rebuilt images", said, tables=[table], pictures=pictures)


def _calibration(view: View) -> Part:
    there, lacking = _with(view, "calibration")
    drawn = lambda name, found: svg.reliability(
        found["accuracy"],
        found["rows"],
        f"Reliability of {name}: accuracy over confidence, error {share(found['ece']).text} %",
    )
    shown = list(there.items())[:MOST_MATRICES]
    charts = [Chart(drawn(name, run["calibration"]), title=name) for name, run in shown]
    rows = [
        [
            text(name),
            share(run["calibration"]["ece"]),
            share(_deep(run, ("calibration_drawn", "ece"))),
            number(run.get("unpredicted")),
        ]
        for name, run in there.items()
    ]
    said = [
        "After the last task: bars are the accuracy of images in a bin of confidence; below, their share.",
        "An image whose outputs are not finite has no prediction: it counts as wrong, and is in no bin.",
    ]
    columns = ("Run", "Expected calibration error", "With drawn parameters", "Without a prediction")
    tables = [Table("Calibration, in %", columns, rows)] if rows else []
    return Part("calibration", "Reliability", [*said, *lacking], charts, tables)


def _settings(view: View) -> Part:
    runs = [{"method": g.runs[0]["method"], **g.runs[0].get("config", {})} for g in view.groups]
    names = list(dict.fromkeys(name for run in runs for name in run))
    said_by = lambda run, name: str(run.get(name, NONE))
    differ = [name for name in names if len({said_by(run, name) for run in runs}) > 1]
    row = lambda name: [text(name), *(text(said_by(run, name)) for run in runs)]
    columns = ("Setting", *(group.name for group in view.groups))
    tables = (
        [Table("Settings in which the runs differ", columns, [row(name) for name in differ])]
        if differ
        else []
    )
    same = [[text(name), text(said_by(runs[0], name))] for name in names if name not in differ]
    caption = "Settings that all runs share" if len(runs) > 1 else "All settings"
    said = (
        [
            "Runs of one group differ in their seed, and in settings that only decide where they are made: "
            f"{', '.join(sorted(ASIDE))}."
        ]
        if len(view.names) > len(view.groups)
        else []
    )
    return Part(
        "settings", "Settings", said, tables=tables, folded=[Table(caption, ("Setting", "Value"), same)]
    )


def _commands(view: View, again: str) -> Part:
    said = ["The runs, and then this page. Files are named as they were given to the runs."]
    return Part("again", "Make it again", said, commands=[*map(_command, view.groups), again])


def _command(group: Group) -> str:
    one = group.runs[0]
    words = run_command({"method": one["method"], "seed": one["seed"], **one.get("config", {})})
    if len(group.runs) > 1:
        words = [word for word in words if not word.startswith("--seed=")]
        words.append(f"--seeds={','.join(str(run['seed']) for run in group.runs)}")
    return shlex.join(words)


# cells


def text(value: object) -> Cell:
    """A cell of text."""
    return Cell(str(value))


def number(value: float | int | None) -> Cell:
    """A whole number with commas."""
    return Cell(NONE) if value is None else Cell(f"{value:,}", value)


def whole(value: float | int) -> Cell:
    """A number as short as it is."""
    return Cell(f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}")


def fixed(value: float | int | None, digits: int) -> Cell:
    """A number with so many digits after the point."""
    return Cell(NONE) if value is None else Cell(f"{value:.{digits}f}", value)


def share(value: float | int | None) -> Cell:
    """A fraction in per cent."""
    return fixed(None if value is None else 100 * value, 2)


def heat(value: float | int | None, most: float | int, form: str = ".2f") -> Cell:
    """A number whose cell is the darker the nearer it comes to `most`; nothing where there is none."""
    if value is None:
        return Cell("")
    return Cell(format(value, form), None, round(SHADES * min(max(value / most, 0), 1)))


def spread(values: Sequence[float | int | None], digits: int) -> Cell:
    """Mean and population standard deviation over seeds."""
    if any(value is None or np.isnan(value) for value in values):
        return Cell(NONE)
    middle, deviation = over_seeds(np.array(values, float))
    said = f"{middle:.{digits}f}"
    return Cell(said if len(values) == 1 else f"{said} ± {deviation:.{digits}f}", middle)


def percent(group: Group, read: Callable[[Summary], float | int | None]) -> Cell:
    """A fraction of every run of a group in per cent: mean and deviation; a dash where a run lacks it."""
    return spread([None if value is None else 100 * value for value in _read(group, read)], 2)


def mean(group: Group, read: Callable[[Summary], float | int | None], digits: int) -> Cell:
    """A number of every run of a group: mean and deviation; a dash where a run lacks it."""
    return spread(_read(group, read), digits)


def _read(group: Group, read: Callable[[Summary], float | int | None]) -> list[float | int | None]:
    try:
        return [read(run) for run in group.runs]
    except (KeyError, TypeError):  # an older run lacks the key
        return [None]


def _names(groups: list[Group]) -> dict[str, Summary]:
    """A name for each run: its group's, with the seed where the group has several."""
    found = {}
    for group in groups:
        base = group.name.removesuffix(f" ({len(group.runs)} seeds)")
        for run in group.runs:
            found[f"{base}, seed {run['seed']}" if len(group.runs) > 1 else group.name] = run
    return found


def _with(view: View, key: str) -> tuple[dict[str, Summary], list[str]]:
    """The runs that have a key, by name, and a line for those that lack it."""
    there = {name: run for name, run in view.names.items() if run.get(key) not in (None, [], {})}
    lacking = [name for name in view.names if name not in there]
    return there, [f"{_lacks(key)}: {_few(lacking)}."] if lacking else []


def _lacks(key: str) -> str:
    return f"Left out, since summary.json lacks {key!r}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _names_of_classes(run: Summary) -> list[str]:
    return run.get("class_names") or []


def _class_name(run: Summary, place: int) -> str:
    names = _names_of_classes(run)
    if place >= len(names):
        return f"{place}"
    return f"{names[place]} ({place})" if names.count(names[place]) > 1 else names[place]


def _deep(run: Summary, keys: Sequence[str]) -> Any:
    """run[key][key]..., None where one is missing."""
    found: Any = run
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _mean(values: Sequence[float | int | None]) -> float | int:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _plain(values: np.ndarray) -> list:
    """Nested lists with None for NaN."""
    if values.ndim > 1:
        return [_plain(row) for row in values]
    return [None if np.isnan(value) else float(value) for value in values]
