"""Tables of papers: the files, numbers by hand, orders, Markdown, and what makes a column `reproduced`."""

import dataclasses
import math
from pathlib import Path

import pytest
import yaml

from fcljax.errors import InputError
from fcljax.studies import paper_tables as tables
from fcljax.studies import papers
from fcljax.studies.paper_tables import RowResult
from fcljax.studies.papers import Number, Row, Verified

TEXT = """# A comment
paper: a paper
method: fppl
seeds: [7, 8, 9]
notes: [nothing]
base: {dataset: digits, tasks: 2}
tables:
  table1:
    title: "A title: with a colon"
    source: table 1
    metrics: [A_avg, communication.upload_bytes]
    upload: 3
    settings: {tasks: 3}
    claims:
    - the first is better
    columns:
      c: {settings: {clients: 4}, upload: 5, seeds: [1]}
      d: {}
    rows:
    - {method: fppl, numbers: {c: [[70.5, 0.25], 10], d: [1, 2]}}
    - {method: fedavg, options: {lr: 5e-5, aggregator: median, wo: true}, numbers: {c: [60, null]}}
  table2:
    title: without columns
    source: table 2
    metrics: [A_avg]
    upload: 3
    rows:
    - {method: fppl, numbers: [4.5]}
    - {method: ewc}
# Nothing yet
verified: {}
"""


def read(text=TEXT):
    return papers.parse_paper("x.yaml", yaml.safe_load(text))


def column(path="a_table1_x.yaml", **settings):
    """A column of a table: SYSTEM_TABLE_COLUMN."""
    system, table, name = Path(path).stem.split("_")
    (found, _) = papers.columns("x.yaml", read(), "table1")
    return found._replace(system=system, table=table, name=name, settings=settings)


def with_entry(made, **changes):
    """A column with other metrics or rows."""
    entry = dataclasses.replace(made.entry, metrics=changes.get("metrics", made.metrics))
    return made._replace(entry=entry, rows=changes.get("rows", made.rows))


def test_a_file_is_read():
    first, second = papers.columns("x.yaml", read(), "table1")
    assert (first.system, first.table, first.name, first.key) == ("x", "table1", "c", "table1 c")
    assert first.entry.title == "A title: with a colon" and first.entry.claims == ["the first is better"]
    assert (first.seeds, second.seeds) == ((1,), (7, 8, 9)) and (first.upload, second.upload) == (5, 3)
    assert first.metrics == ["A_avg", "communication.upload_bytes"]
    options = {"lr": "5e-5", "aggregator": "median", "wo": True}
    assert first.rows == (
        Row("fppl", {}, (Number(70.5, 0.25), Number(10, None))),
        Row("fedavg", options, (Number(60, None), None)),
    )
    assert second.rows[1].numbers == (None, None)
    assert first.label(first.rows[1]) == "fedavg --lr 5e-5 --aggregator median --wo [c]"
    (alone,) = papers.columns("x.yaml", read(), "table2")
    assert alone.key == "table2" and alone.label(alone.rows[1]) == "ewc"
    assert [row.numbers for row in alone.rows] == [(Number(4.5, None),), (None,)]


def test_later_settings_win():
    text = TEXT.replace("{clients: 4}", "{clients: 4, tasks: 9}")
    first, second = papers.columns("x.yaml", read(text), "table1")
    assert first.settings == {"dataset": "digits", "tasks": 9, "clients": 4, "seed": 1}
    assert second.settings == {"dataset": "digits", "tasks": 3, "seed": 7}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "    metrics: [A_avg]",
            "    metric: [A_avg]",
            "tables.table2: unknown key 'metric'; did you mean 'metrics'?",
        ),
        ("base: {", "bas: {", "x.yaml: unknown key 'bas'; did you mean 'base'?"),
        ("seeds: [7, 8, 9]\n", "", "the key 'seeds' is missing"),
        ("    source: table 2\n", "", "tables.table2: the key 'source' is missing"),
        ("seeds: [7, 8, 9]", "seeds: [7, eight]", "seeds[1]: 'eight' is not a whole number"),
        ("seeds: [7, 8, 9]", "seeds: [7, true]", "seeds[1]: True is not a whole number"),
        ("seeds: [7, 8, 9]", "seeds: []", "seeds: none given"),
        ("base: {dataset: digits, tasks: 2}", "base: digits", "base: 'digits' is not a mapping"),
        (
            "c: {settings: {clients: 4}",
            "c: {setting: {clients: 4}",
            "columns.c: unknown key 'setting'; did you",
        ),
        (
            "numbers: [4.5]",
            "numbers: [4.5, 3]",
            "rows[0].numbers: [4.5, 3] does not list a number for each",
        ),
        ("c: [[70.5, 0.25], 10]", "c: [70.5]", "rows[0].numbers.c: [70.5] does not list a number for each"),
        ("c: [[70.5, 0.25], 10]", "c: [[7, 2, 1], 1]", "rows[0].numbers.c: [7, 2, 1] is not a number"),
        ("c: [[70.5, 0.25], 10]", "c: ['70,5', 1]", "rows[0].numbers.c: '70,5' is not a number"),
        ("c: [[70.5, 0.25], 10]", "e: [1, 2]", "rows[0].numbers: unknown value 'e'"),
        ("fedavg, options: {lr: 5e-5, aggregator: median, wo: true}", "fppl", "two rows have the same"),
        (
            "verified: {}",
            "verified: {table1 e: {status: reproduced, cost: x}}",
            "verified: unknown value 'table1 e'; did you mean",
        ),
        ("verified: {}", "verified: {table1 c: {status: reproducd, cost: x}}", "did you mean 'reproduced'?"),
        ("notes: [nothing]", "verified: {}", "verified: it must be the last key"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(old, new, said):
    assert old in TEXT
    with pytest.raises(InputError, match=r"^x.yaml: ") as found:
        read(TEXT.replace(old, new))
    assert said in str(found.value) and "\n" not in str(found.value)


def test_values_of_a_summary_in_the_papers_units():
    summary = {"A_avg": 0.705, "communication": {"upload_bytes": 3 * 2**20}, "forgetting": {"paper": None}}
    assert tables.value_of(summary, "A_avg") == pytest.approx(70.5)
    assert tables.value_of(summary, "communication.upload_bytes") == 3
    assert tables.value_of(summary, "forgetting.paper") is None
    assert tables.value_of(summary, "A_avg.more") is None and tables.value_of(summary, "B") is None
    assert tables.value_of({"A_avg": True}, "A_avg") is None
    assert (tables.unit_of_metric("A_avg"), tables.unit_of_metric("communication.upload_bytes")) == (
        "%",
        "MiB",
    )


def test_difference_and_interval_are_those_of_a_calculation_by_hand():
    # values 69, 70, 74: mean 71; deviations -2, -1, 3; population variance 14 / 3, sample variance 7;
    # half width 4.302653 * sqrt(7 / 3)
    found = tables.compared("A_avg", Number(72.0, 0.5), [69.0, 70.0, 74.0])
    assert (found.mean, found.difference) == (71.0, -1.0)
    assert found.deviation == pytest.approx(math.sqrt(14 / 3))
    half = 4.302653 * math.sqrt(7 / 3)
    assert found.interval == pytest.approx((-1 - half, -1 + half), abs=1e-5)
    one = tables.compared("A_avg", Number(72.0, 0.5), [69.0])
    assert (one.mean, one.deviation, one.difference, one.interval) == (69.0, 0.0, -3.0, None)
    assert tables.compared("A_avg", None, [1.0])[-2:] == (None, None)
    assert tables.compared("A_avg", Number(1.0, None), [])[-4:] == (None,) * 4


@pytest.mark.parametrize(
    ("metric", "paper", "values", "is_met"),
    [
        ("A_avg", 70.0, [71.0], True),  # within a point
        ("A_avg", 70.0, [71.1], False),
        ("A_avg", 70.0, [60.0, 81.0], True),  # within the interval
        ("A_avg", 70.0, [71.4, 71.5, 71.6], False),  # narrow, and beyond a point
        ("communication.upload_bytes", 100.0, [102.0], True),
        ("communication.upload_bytes", 100.0, [102.1], False),
        ("A_avg", 70.0, [], False),
    ],
)
def test_what_counts_as_met(metric, paper, values, is_met):
    assert tables.compared(metric, Number(paper, 50.0), values).met == is_met


def test_a_row_without_a_number_is_met_by_anything():
    assert tables.compared("A_avg", None, [3.0]).met


def result(numbers, values, method="fppl", path="a_table1_x.yaml", seeds=3, of=None, **settings):
    """A row of a table of its own with these numbers (mean, deviation) of A_avg, A_last."""
    row = Row(method, {}, tuple(None if each is None else Number(*each) for each in numbers))
    made = with_entry(
        column(path, **settings), metrics=["A_avg", "A_last"][: len(numbers)], rows=of or (row,)
    )
    return RowResult(made._replace(seeds=(7, 8, 9)), row, tuple(map(tuple, values)), seeds)


def test_only_clear_gaps_count_and_both_ways_of_failing_are_told_apart():
    rows = [
        result([(70.0, 0.5)], [[50.0, 52.0]], "fppl"),
        result([(65.0, 0.5)], [[55.0]], "ewc"),  # here above fppl, in the paper under it
        result([(60.0, 4.6)], [[40.0]], "lwf"),  # 5 under ewc, whose deviations sum to 5.1: not clear
        result([(69.2, 0.1)], [[10.0]], "icarl"),  # 0.8 under fppl: within the tolerance
        result([(10.0, 0.0)], [[]], "joint"),  # not run
        result([None], [[99.0]], "glfc"),  # no number
    ]
    pairs = tables.orderings(rows)
    by_name = {(pair.more.split()[0], pair.less.split()[0]): pair for pair in pairs}
    assert set(by_name) == {
        ("fppl", "ewc"),
        ("fppl", "lwf"),
        ("icarl", "ewc"),
        ("icarl", "lwf"),
        ("fppl", "joint"),
        ("ewc", "joint"),
        ("lwf", "joint"),
        ("icarl", "joint"),
    }
    assert by_name["fppl", "lwf"].alike and by_name["fppl", "lwf"][3:] == (10.0, 11.0)
    assert not by_name["fppl", "ewc"].alike and by_name["fppl", "ewc"].ours == -4.0
    assert by_name["fppl", "joint"].ours is None and not by_name["fppl", "joint"].alike
    lines = tables.order_lines(pairs)
    assert "Of 4 pairs" in lines[0] and " 1 have the same order" in lines[0] and "In 4 further" in lines[1]
    assert len(tables.otherwise(pairs)) == 3
    assert "A_avg: fppl [x] above ewc [x] by 5.00 in the paper, -4.00 here" in tables.otherwise(pairs)
    assert tables.order_lines([]) == ["The paper orders no two rows by a clear gap."]
    both = [*pairs, *(pair._replace(metric="A_last", ours=1.0) for pair in pairs)]
    assert tables.order_lines(both)[1] == "By metric: A_avg 1 of 4, A_last 8 of 8."


def test_rows_of_two_files_are_compared_where_only_what_the_table_varies_differs():
    same = {"dataset": "cub200", "checkpoint": "c"}
    rows = [
        result([(70.0, None)], [[50.0]], "fppl", "a_table1_x.yaml", **same),
        result([(60.0, None)], [[40.0]], "fppl", "a_table1_y.yaml", **same),
        result([(50.0, None)], [[30.0]], "ewc", "a_table1_y.yaml", **same),  # another method
        result([(20.0, None)], [[10.0]], "fppl", "a_table1_z.yaml", dataset="digits", checkpoint="c"),
    ]
    found = [(pair.more, pair.less) for pair in tables.orderings(rows)]
    assert found == [("fppl [x]", "fppl [y]"), ("fppl [y]", "ewc [y]")]


def test_a_file_is_reproduced_when_all_its_numbers_are_met_with_enough_seeds():
    good, bad = [[70.1, 69.9, 70.0]], [[60.1, 59.9, 60.0]]
    rows = (Row("fppl", {}, (Number(70.0, None),)), Row("ewc", {}, (Number(60.0, None),)))
    whole = with_entry(column(), metrics=["A_avg"], rows=rows)._replace(seeds=(7, 8, 9))

    def made(row, values, seeds=3, column=whole):
        return RowResult(column, row, tuple(map(tuple, values)), seeds)

    assert tables.status_of([made(rows[0], good), made(rows[1], bad)]) == "reproduced"
    assert tables.status_of([made(rows[0], bad), made(rows[1], bad)]) == "not reproduced"
    assert tables.status_of([made(rows[0], good)]) is None  # a row is missing
    assert tables.status_of([made(rows[0], good), made(rows[1], [[60.0]], 1)]) is None  # a seed alone
    one = whole._replace(seeds=(7,))  # the paper had one run too
    single = [made(row, [[value]], 1, one) for row, value in zip(rows, (70.5, 60.0), strict=True)]
    assert tables.status_of(single) == "reproduced"
    claim = (Row("fppl", {}, (None,)),)
    assert tables.status_of([result([None], [[1.0]], of=claim)]) is None


def test_status_and_cost_alone_change_in_a_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(TEXT)
    found = {"table1 c": Verified("not reproduced", r"3 runs, \1 hours: a")}
    papers.write_verified(path, found)
    assert path.read_text().startswith(TEXT.partition("verified:")[0])
    papers.write_verified(path, {"table2": Verified("reproduced", "x")})
    assert path.read_text().startswith(TEXT.partition("verified:")[0])
    assert read(path.read_text()).verified == {**found, "table2": Verified("reproduced", "x")}


def test_markdown_has_every_number_and_escapes_names():
    rows = [
        result([(70.0, 0.5), None], [[69.0, 70.0, 74.0], [1.0, 2.0, 3.0]], "fppl"),
        result([(60.0, None), (5.0, None)], [[80.0], []], "a|b"),
    ]
    rows[1] = rows[1]._replace(why="failed: no file a_b")
    text = tables.markdown("x table1", ["A note."], rows, ["A_avg: x > y"])
    lines = text.splitlines()
    assert lines[0] == "# x table1" and "A note." in lines
    assert r"| fppl \[x] | A\_avg (%) | 70.00±0.50 | 71.00±2.16 | 3 | +1.00 | -5.57 to +7.57 |  |" in lines
    assert r"| fppl \[x] | A\_last (%) | - | 2.00±0.82 | 3 | - | - |  |" in lines
    assert r"| 'a\|b' \[x] | A\_avg (%) | 60 | 80.00 | 1 | +20.00 | - | failed: no file a\_b |" in lines
    assert r"| 'a\|b' \[x] | A\_last (%) | 5 | - | 0 | - | - |  |" in lines
    assert "Of 1 pairs of rows that the paper orders by a clear gap 0 have the same order here." in text
    assert r"- A\_avg: fppl \[x] above 'a\|b' \[x] by 10.00 in the paper, -9.00 here" in lines
    assert r"- A\_avg: x > y" in lines


def test_the_rows_as_json():
    row = result([(70.0, 0.5), None], [[69.0, 70.0, 74.0], []], "fppl")
    (plain,) = tables.as_json([row])
    assert plain["metrics"]["A_avg"]["paper"] == {"mean": 70.0, "deviation": 0.5}
    assert plain["metrics"]["A_avg"]["met"] and plain["metrics"]["A_avg"]["values"] == (69.0, 70.0, 74.0)
    assert plain["metrics"]["A_last"]["paper"] is plain["metrics"]["A_last"]["met"] is None
