"""The rows of a paper's table as runs of a sweep, and the paper's numbers beside ours (`tables.py` says how).

The folder is a sweep's (`sweeps.py`) and has table.md and table.json besides. A report of the folder's runs
would be written beside these, in `write`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table as Shown

from fcljax import config
from fcljax.config import SAMPLED, YAML_BYTES, RunConfig
from fcljax.errors import InputError, choose
from fcljax.files import read_text, write_text
from fcljax.methods import find_method
from fcljax.results import page
from fcljax.results.comparison import compare
from fcljax.results.run_folder import write_json
from fcljax.studies import paper_tables as tables
from fcljax.studies import sweeps
from fcljax.studies.grid import Planned, name_of
from fcljax.studies.mini import MOST, mini
from fcljax.studies.paper_tables import Pair, Result, Row, Table
from fcljax.studies.sweeps import Outcome
from fcljax.terminal import add_row

Scale = Literal["mini", "paper"]
# options of a run as they are typed -> values by field name
Read = Callable[[str, Sequence[str]], dict[str, Any]]
TEXT, DATA, FIGURE = "table.md", "table.json", "accuracy.png"


class Part(NamedTuple):
    """A row, the names of its runs, seed by seed, and why it has none."""

    table: Table
    row: Row
    runs: tuple[str, ...]
    why: str = ""


class Plan(NamedTuple):
    """All rows of a table and their runs; rows whose settings are the same share theirs."""

    parts: list[Part]
    runs: list[Planned]


# ---- files -------------------------------------------------------------------------------------------------


def find(folder: str | Path, system: str, table: str) -> list[Table]:
    """The files of a table, by name.

    Raises:
      InputError: for a folder without such files, an unknown system or table, or a file that is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"experiments: no folder {str(folder)!r}; give that of the repository, --experiments FOLDER"
        )
    named = {path: tables.name_of(path) for path in sorted(folder.glob("*.yaml"))}
    texts = {path: _text(path) for path in named}
    named = {path: name for path, name in named.items() if tables.MARK in texts[path]}
    if not named:
        raise InputError(f"experiments: no file in {str(folder)!r} has a header with {tables.MARK.strip()!r}")
    choose("system", system, dict.fromkeys(name[0] for name in named.values()))
    choose("table", table, dict.fromkeys(name[1] for name in named.values() if name[0] == system))
    mine = [path for path, name in named.items() if name[:2] == (system, table)]
    return [tables.parse(str(path), texts[path], config.load_yaml(path)) for path in mine]


def _text(path: Path) -> str:
    try:
        return read_text(path, YAML_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"experiments: cannot read {str(path)!r}: {why}") from None


# ---- runs --------------------------------------------------------------------------------------------------


def settings_of(table: Table, row: Row, read: Read) -> RunConfig:
    """The settings of a row at the paper's scale: `fcljax run METHOD --config FILE OPTIONS`, without what of
    the file is not the row's: options of the file's own method or adapter that the row's does not have, and
    those of sampled clients where the row deals in another way.

    Raises:
      InputError: naming the file, the row and what is wrong.
    """
    try:
        given = read(row.method, row.options)
        values = {name: value for name, value in table.settings.items() if name != "method"}
        adapter = given.get("adapter") or values.get("adapter") or find_method(row.method).adapter
        own = _fields(row.method, adapter)
        foreign = _fields(main_method(table), values.get("adapter")) - own
        if given.get("partition", "sampled") != "sampled":
            foreign |= set(SAMPLED)
        kept = {name: value for name, value in values.items() if name not in foreign}
        return config.resolve(row.method, config.from_mapping(row.method, kept | given, "options"))
    except InputError as error:
        raise InputError(f"{table.path}: row {row.words()!r}: {error}") from None


def main_method(table: Table) -> str:
    """The method of the paper that a file is of, which its command runs.

    Raises:
      InputError: if the line `# run:` is no such command.
    """
    words = table.fields["run"].split()
    if words[:2] != ["fcljax", "run"] or len(words) < 3:
        raise InputError(f"{table.path}: run: {table.fields['run']!r} is not fcljax run METHOD ...")
    return words[2]


def _fields(method: str, adapter: str | None) -> set[str]:
    options = config.run_class(method, adapter or find_method(method).adapter)
    return {field.name for field in dataclasses.fields(options)}


def plan(found: Sequence[Table], scale: Scale, seeds: int | None, read: Read) -> Plan:
    """The runs of a table's rows, row by row, seeds innermost.

    Args:
      found: the files of the table.
      scale: `mini` as `mini.mini` has it, or the paper's.
      seeds: how many of each row: the first ones of its file, and those after the last of them; None: as many
        as the file names at the paper's scale, one at mini scale.
      read: options as they are typed.

    Raises:
      InputError: for a row that does not resolve at the paper's scale.
    """
    varied = {"clients"} if len({table.settings.get("clients") for table in found}) > 1 else set()
    parts, runs = [], {}
    for table in found:
        for row, cfg, why in _settings(table, scale, varied, read):
            names = (
                [] if cfg is None else [_run(runs, table, row, cfg, s) for s in seeds_of(table, scale, seeds)]
            )
            parts.append(Part(table, row, tuple(names), why))
    return Plan(parts, [run for run in runs.values()])


def _settings(
    table: Table, scale: Scale, varied: set[str], read: Read
) -> list[tuple[Row, RunConfig | None, str]]:
    """The settings of a file's rows, or why one cannot be run at this scale. All see the same images."""
    full = [(row, settings_of(table, row, read)) for row in table.rows]
    if scale == "paper":
        return [(row, cfg, "") for row, cfg in full]
    small: list[tuple[Row, RunConfig | None, str]] = []
    for row, cfg in full:
        # what a row says of its schedule is of the paper's length too
        kept = varied | (set(read(row.method, row.options)) - set(MOST))
        try:
            small.append((row, mini(row.method, cfg, table.name[0], kept), ""))
        except InputError as error:
            small.append((row, None, f"cannot run at mini scale: {error}"))
    images = max((cfg.glyph_train for _, cfg, _ in small if cfg), default=0)
    return [(row, cfg and dataclasses.replace(cfg, glyph_train=images), why) for row, cfg, why in small]


def seeds_of(table: Table, scale: Scale, count: int | None) -> list[int]:
    """The seeds of a file's rows."""
    count = count or (1 if scale == "mini" else len(table.seeds))
    more = range(max(table.seeds) + 1, max(table.seeds) + 1 + count)
    return [*table.seeds, *more][:count]


def _run(runs: dict, table: Table, row: Row, cfg: RunConfig, seed: int) -> str:
    """The name of the run of a row with a seed; it is added to `runs` if none has its settings yet."""
    cfg = dataclasses.replace(cfg, seed=seed)
    key = row.method, cfg
    if key not in runs:
        words = [table.name[2], *row.options]
        variant = " ".join(word.removeprefix("--") for word in words if word) or None
        usual = config.run_class(row.method, cfg.adapter)()
        given = {
            field.name: getattr(cfg, field.name)
            for field in dataclasses.fields(cfg)
            if getattr(cfg, field.name) != getattr(usual, field.name)
        }
        runs[key] = Planned(name_of(row.method, variant, [], seed), row.method, given, cfg)
    return runs[key].name


# ---- results -----------------------------------------------------------------------------------------------


def results(made: Plan, outcomes: Mapping[str, Outcome]) -> list[Result]:
    """What became of each row."""
    return [_result(part, [outcomes[name] for name in part.runs]) for part in made.parts]


def _result(part: Part, outcomes: Sequence[Outcome]) -> Result:
    good = [each.summary for each in outcomes if each.state == "finished" and each.summary]
    bad = next((each for each in outcomes if each.state != "finished"), None)
    found = [[tables.value_of(summary, metric) for summary in good] for metric in part.table.metrics]
    values = tuple(tuple(value for value in each if value is not None) for each in found)
    why = part.why or ("" if bad is None else f"{bad.state}: {bad.why}" if bad.why else bad.state)
    missing = [metric for metric, each in zip(part.table.metrics, found, strict=True) if None in each]
    if missing and not why:
        why = f"no value of {', '.join(missing)}"
    return Result(part.table, part.row, values, len(good), why)


def shared(made: Plan) -> list[str]:
    """Rows that are one run, a line for each such run."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for part in made.parts:
        if part.runs:
            owners.setdefault(part.runs, []).append(part.table.label(part.row))
    return [", ".join(labels) for labels in owners.values() if len(labels) > 1]


def title_of(made: Plan, scale: Scale) -> str:
    """The title of a table."""
    system, table, _ = made.parts[0].table.name
    return f"{system} {table}, {scale} scale"


def notes_of(made: Plan, scale: Scale) -> list[str]:
    """What a reader of a table must know."""
    source = made.parts[0].table.fields["source"]
    notes = [f"Paper: {source}. Ours: mean and population standard deviation over the seeds."]
    if scale == "mini":
        notes.append(
            "At mini scale the numbers are not expected to be the paper's: the design is the same with "
            "another network, other images and a shorter schedule. What is compared is the order of the rows."
        )
    same = shared(made)
    if same:
        notes.append("The same runs stand for several rows, whose settings do not differ at this scale: ")
        notes[-1] += "; ".join(same) + "."
    return notes


def claims_of(made: Plan) -> list[str]:
    """What the paper says in words, each once."""
    return list(dict.fromkeys(claim for part in made.parts for claim in part.table.claims))


def write(
    made: Plan,
    found: Sequence[Result],
    outcomes: Mapping[str, Outcome],
    scale: Scale,
    out: Path,
    tell: Callable[[str], None],
) -> None:
    """Write table.md, table.json, the figure of `compare` and the report page into the folder of the sweep.
    `tell` is told why there is no page, if so."""
    title, pairs = title_of(made, scale), tables.orderings(found)
    text = tables.markdown(title, notes_of(made, scale), found, claims_of(made))
    system, table, _ = made.parts[0].table.name
    write_text(out / TEXT, text)
    write_json(
        out / DATA,
        {
            "system": system,
            "table": table,
            "scale": scale,
            "rows": tables.plain(found),
            "order": {"alike": sum(pair.alike for pair in pairs), "pairs": list(map(_plain_pair, pairs))},
            "claims": claims_of(made),
        },
    )
    done = sweeps.finished(outcomes, out)
    if done:
        compare(done, out / FIGURE)
        page.try_report(done, out / page.NAME, tell)


def _plain_pair(pair: Pair) -> dict[str, Any]:
    return pair._asdict() | {"alike": pair.alike if pair.ours is not None else None}


def shown(made: Plan, found: Sequence[Result], scale: Scale) -> Shown:
    """The table for a terminal."""
    table = Shown(title=title_of(made, scale))
    head, *lines = tables.lines(found)
    for name in head:
        table.add_column(
            name, overflow="fold", justify="left" if name in ("row", "metric", "note") else "right"
        )
    for cells in lines:
        add_row(table, *cells)
    return table


# ---- the files of experiments ------------------------------------------------------------------------------


def update(found: Sequence[Result], outcomes: Mapping[str, Outcome], made: Plan, device: str) -> list[str]:
    """Write status and cost of runs at the paper's scale into the files of experiments/.

    Returns:
      A line for each file: its new status, or why it stays as it was.
    """
    told = []
    for path in dict.fromkeys(each.table.path for each in found):
        mine = [each for each in found if each.table.path == path]
        status = tables.status_of(mine)
        if status is None:
            told.append(
                f"{path}: stays as it was: not all rows have enough seeds, or the paper has no numbers"
            )
            continue
        names = {name for part in made.parts if part.table.path == path for name in part.runs}
        summaries = [outcomes[name].summary for name in names]
        seconds = sum(sum(each["time"].values()) for each in summaries if each)
        cost = f"{len(names)} runs, {seconds / 3600:.2f} hours in all, {device}"
        write_text(path, tables.with_status(_text(Path(path)), status, cost))
        told.append(f"{path}: {status}")
    return told
