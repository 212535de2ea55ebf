"""Tables of papers: headers, numbers by hand, orders, Markdown, and what makes a file `reproduced`."""

import math

import pytest

from fcljax.errors import InputError
from fcljax.studies import paper_tables as tables
from fcljax.studies.paper_tables import Number, Result, Row

HEADER = """# A title: with a colon
# source: a paper, table 1
# metrics: A_avg communication.upload_bytes
# row: fppl = 70.5+-0.25 10
# row: fedavg --lr 5e-5 --aggregator median = 60 -
# claim: the first is better
# note: nothing
# upload: 3 numbers
# seeds: 7, 8, 9
# status: unverified
# cost: not measured
# run: fcljax run fppl --config experiments/x_table1_c.yaml
dataset: digits
"""


def table(text=HEADER, path="experiments/x_table1_c.yaml", **settings):
    return tables.parse(path, text, settings)


def test_a_header_is_read():
    found = table()
    assert found.name == ("x", "table1", "c") and tables.name_of("fppl_cifar-100.yaml") == (
        "fppl",
        "cifar-100",
        "",
    )
    assert (found.title, found.seeds) == ("A title: with a colon", (7, 8, 9))
    assert found.metrics == ("A_avg", "communication.upload_bytes")
    assert found.rows == (
        Row("fppl", (), (Number(70.5, 0.25), Number(10, None))),
        Row("fedavg", ("--lr", "5e-5", "--aggregator", "median"), (Number(60, None), None)),
    )
    assert found.claims == ("the first is better",) and found.fields["cost"] == "not measured"
    assert found.label(found.rows[1]) == "fedavg --lr 5e-5 --aggregator median [c]"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# metrics: ", "# metric: ", "'metric: A_avg communication.upload_bytes' is no line"),
        ("# seeds: 7, 8, 9\n", "", "no line '# seeds: ...'"),
        ("# seeds: 7, 8, 9", "# seeds: 7; 8", "seeds: '7; 8' is no list"),
        ("# cost: not", "# cost: x\n# cost: not", "cost: 2 lines of it"),
        ("status: unverified", "status: reproducd", "status: 'reproducd' is none of"),
        ("fppl = 70.5+-0.25 10", "fppl = 70.5", "has 1 numbers of 2 metrics"),
        ("fppl = 70.5+-0.25 10", "fppl: 70.5 10", "is not METHOD"),
        ("fppl = 70.5+-0.25 10", "'fppl = 70.5 10", "is not METHOD"),
        ("70.5+-0.25", "70,5", "'70,5' is no number"),
        ("fedavg --lr 5e-5 --aggregator median =", "fppl =", "two rows have the same"),
    ],
)
def test_a_mistake_in_a_header_is_one_line(old, new, said):
    assert old in HEADER
    with pytest.raises(InputError, match=r"^experiments/x_table1_c.yaml: ") as found:
        table(HEADER.replace(old, new))
    assert said in str(found.value) and "\n" not in str(found.value)


def test_values_of_a_summary_in_the_papers_units():
    summary = {"A_avg": 0.705, "communication": {"upload_bytes": 3 * 2**20}, "forgetting": {"paper": None}}
    assert tables.value_of(summary, "A_avg") == pytest.approx(70.5)
    assert tables.value_of(summary, "communication.upload_bytes") == 3
    assert tables.value_of(summary, "forgetting.paper") is None
    assert tables.value_of(summary, "A_avg.more") is None and tables.value_of(summary, "B") is None
    assert tables.value_of({"A_avg": True}, "A_avg") is None
    assert (tables.unit("A_avg"), tables.unit("communication.upload_bytes")) == ("%", "MiB")


def test_difference_and_interval_are_those_of_a_calculation_by_hand():
    # values 69, 70, 74: mean 71; deviations -2, -1, 3; population variance 14 / 3, sample variance 7;
    # half width 4.302653 * sqrt(7 / 3)
    found = tables.compared(Number(72.0, 0.5), [69.0, 70.0, 74.0])
    assert (found.mean, found.difference) == (71.0, -1.0)
    assert found.deviation == pytest.approx(math.sqrt(14 / 3))
    half = 4.302653 * math.sqrt(7 / 3)
    assert found.interval == pytest.approx((-1 - half, -1 + half), abs=1e-5)
    one = tables.compared(Number(72.0, 0.5), [69.0])
    assert (one.mean, one.deviation, one.difference, one.interval) == (69.0, 0.0, -3.0, None)
    assert tables.compared(None, [1.0])[3:] == (None, None)
    assert tables.compared(Number(1.0, None), [])[1:] == (None,) * 4


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
    assert tables.met(metric, tables.compared(Number(paper, 50.0), values)) == is_met


def test_a_row_without_a_number_is_met_by_anything():
    assert tables.met("A_avg", tables.compared(None, [3.0]))


def result(numbers, values, method="fppl", path="a_table1_x.yaml", seeds=3, of=None, **settings):
    """A row of a table of its own with these numbers (mean, deviation) of A_avg, A_last."""
    row = Row(method, (), tuple(None if each is None else Number(*each) for each in numbers))
    made = table(path=path, **settings)._replace(metrics=("A_avg", "A_last")[: len(numbers)], rows=(row,))
    made = made._replace(rows=of) if of else made
    return Result(made, row, tuple(map(tuple, values)), seeds)


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
    told = {(pair.more.split()[0], pair.less.split()[0]): pair for pair in pairs}
    assert set(told) == {
        ("fppl", "ewc"),
        ("fppl", "lwf"),
        ("icarl", "ewc"),
        ("icarl", "lwf"),
        ("fppl", "joint"),
        ("ewc", "joint"),
        ("lwf", "joint"),
        ("icarl", "joint"),
    }
    assert told["fppl", "lwf"].alike and told["fppl", "lwf"][3:] == (10.0, 11.0)
    assert not told["fppl", "ewc"].alike and told["fppl", "ewc"].ours == -4.0
    assert told["fppl", "joint"].ours is None and not told["fppl", "joint"].alike
    lines = tables.order_lines(pairs)
    assert "Of 4 pairs" in lines[0] and " 1 are ordered alike" in lines[0] and "Of 4 further" in lines[1]
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
    rows = (Row("fppl", (), (Number(70.0, None),)), Row("ewc", (), (Number(60.0, None),)))
    make = lambda row, values, seeds=3: Result(
        table()._replace(metrics=("A_avg",), rows=rows), row, tuple(map(tuple, values)), seeds
    )
    assert tables.status_of([make(rows[0], good), make(rows[1], bad)]) == "reproduced"
    assert tables.status_of([make(rows[0], bad), make(rows[1], bad)]) == "not reproduced"
    assert tables.status_of([make(rows[0], good)]) is None  # a row is missing
    assert tables.status_of([make(rows[0], good), make(rows[1], [[60.0]], 1)]) is None  # a seed alone
    single = [make(row, [[value]], 1) for row, value in zip(rows, (70.5, 60.0), strict=True)]
    single = [each._replace(table=each.table._replace(seeds=(7,))) for each in single]
    assert tables.status_of(single) == "reproduced"  # the paper had one run too
    claim = (Row("fppl", (), (None,)),)
    assert tables.status_of([result([None], [[1.0]], of=claim)]) is None


def test_status_and_cost_alone_change_in_a_file():
    text = tables.with_status(HEADER, "not reproduced", r"3 runs, \1 hours")
    assert text.splitlines()[9:11] == ["# status: not reproduced", r"# cost: 3 runs, \1 hours"]
    kept = [line for line in HEADER.splitlines() if "status" not in line and "cost" not in line]
    assert [line for line in text.splitlines() if "status" not in line and "cost" not in line] == kept


def test_markdown_has_every_number_and_escapes_names():
    rows = [
        result([(70.0, 0.5), None], [[69.0, 70.0, 74.0], [1.0, 2.0, 3.0]], "fppl"),
        result([(60.0, None), (5.0, None)], [[80.0], []], "a|b"),
    ]
    rows[1] = rows[1]._replace(why="failed: no file a_b")
    text = tables.markdown("x table1", ["A note."], rows, ["A_avg: x > y"])
    lines = text.splitlines()
    assert lines[0] == "# x table1" and "A note." in lines
    assert (
        r"| fppl \[x] | A\_avg (%) | 70.00 ± 0.50 | 71.00 ± 2.16 | 3 | +1.00 | -5.57 to +7.57 |  |" in lines
    )
    assert r"| fppl \[x] | A\_last (%) | - | 2.00 ± 0.82 | 3 | - | - |  |" in lines
    assert r"| 'a\|b' \[x] | A\_avg (%) | 60 | 80.00 | 1 | +20.00 | - | failed: no file a\_b |" in lines
    assert r"| 'a\|b' \[x] | A\_last (%) | 5 | - | 0 | - | - |  |" in lines
    assert "Of 1 pairs of rows that the paper orders by a clear gap 0 are ordered alike here." in text
    assert r"- A\_avg: fppl \[x] above 'a\|b' \[x] by 10.00 in the paper, -9.00 here" in lines
    assert r"- A\_avg: x > y" in lines


def test_the_rows_as_json():
    row = result([(70.0, 0.5), None], [[69.0, 70.0, 74.0], []], "fppl")
    (plain,) = tables.plain([row])
    assert plain["metrics"]["A_avg"]["paper"] == {"mean": 70.0, "deviation": 0.5}
    assert plain["metrics"]["A_avg"]["met"] and plain["metrics"]["A_avg"]["values"] == (69.0, 70.0, 74.0)
    assert plain["metrics"]["A_last"]["paper"] is plain["metrics"]["A_last"]["met"] is None
