"""The figures of papers: which lines they have, from rows by hand."""

import json

import pytest
from small_runs import finished

from fcljax.errors import InputError
from fcljax.studies import paper_figures, papers
from fcljax.studies.paper_tables import RowResult
from fcljax.studies.papers import FigureEntry

FILE = {
    "paper": "nobody",
    "method": "linear",
    "seeds": [7],
    "base": {"clients": 5},
    "tables": {
        "table1": {
            "title": "t",
            "source": "s",
            "metrics": ["A_avg"],
            "upload": 3,
            "figure": {"x": "clients"},
            "columns": {"a": {}, "b": {"settings": {"clients": 10}}, "c": {"settings": {"alpha": 0.1}}},
            "rows": [
                {"method": "linear", "numbers": {"a": [40]}, "curve": {"a": [50, None, 30]}},
                {"method": "linear", "options": {"lr": 0.1}, "numbers": {"a": [41], "b": [31]}},
            ],
        },
        "figure1": {"title": "t", "source": "s", "of": "table1", "figure": {"x": "tasks"}},
    },
    "verified": {},
}


def columns(table="table1", **changed):
    """The columns of a table of FILE, which may have other entries."""
    entry = {key: value for key, value in (FILE["tables"][table] | changed).items() if value is not None}
    paper = papers.parse_paper("x.yaml", FILE | {"tables": FILE["tables"] | {table: entry}})
    return papers.columns("x.yaml", paper, table)


def results(table="table1", values=(), curves=()):
    """A result of every row, our numbers 1, 2, 3 and so on."""
    rows = [(column, row) for column in columns(table) for row in column.rows]
    return [RowResult(column, row, ((float(i),),), 1, "", curves) for i, (column, row) in enumerate(rows, 1)]


def test_a_figure_over_an_option_has_a_line_for_each_method_and_setting_besides():
    found = paper_figures.lines(FigureEntry("clients"), results())
    assert {name: tuple(line) for name, line in found.items()} == {
        "linear": ((5.0, 10.0), (1.0, 3.0), (40.0, None)),
        "linear --lr 0.1": ((5.0, 10.0), (2.0, 4.0), (41.0, 31.0)),
        "linear --alpha 0.1": ((5.0,), (5.0,), (None,)),
        "linear --alpha 0.1 --lr 0.1": ((5.0,), (6.0,), (None,)),
    }


def test_a_figure_over_tasks_has_our_means_beside_the_papers_curve():
    curves = ((60.0, 40.0), (50.0, None))
    found = paper_figures.lines(FigureEntry("tasks"), results("figure1", curves=curves))
    assert tuple(found["linear [a]"]) == ((1.0, 2.0, 3.0), (55.0, None, None), (50.0, None, 30.0))
    assert tuple(found["linear --lr 0.1 [a]"]) == ((1.0, 2.0), (55.0, None), (None, None))


def test_rows_that_were_not_run_and_have_no_numbers_are_not_drawn():
    nothing = [each._replace(values=((),)) for each in results("figure1")]
    assert set(paper_figures.lines(FigureEntry("tasks"), nothing)) == {"linear [a]"}
    assert paper_figures.draw_figure(FigureEntry("tasks"), nothing[-1:]) is None


def test_what_a_run_gives_a_figure():
    run = finished("linear")
    summary = json.loads((run / "summary.json").read_text())
    percent = tuple(100 * value for value in summary["A"])
    assert paper_figures.curve_of(FigureEntry("tasks"), summary, run) == percent
    assert paper_figures.curve_of(FigureEntry("clients"), summary, run) == ()
    rounds = paper_figures.curve_of(FigureEntry("rounds"), summary, run)
    assert len(rounds) == 15 and rounds[2::3] == percent  # 3 rounds a task, each evaluated
    first, second = summary["accuracy"][-1][:2]
    learned = paper_figures.curve_of(FigureEntry("tasks", [1, 2]), summary, run)
    assert len(learned) == 10 and learned[4] == 100 * first and learned[9] == 100 * second
    assert learned[5] is None  # the second task was not known after the first
    lines = paper_figures.lines(FigureEntry("tasks", [1, 2]), [results()[0]._replace(curves=(learned,))])
    assert lines["linear [a], task 2"].ours == learned[5:]


def test_the_papers_line_is_dashed_in_the_colour_of_ours():
    drawn = paper_figures.draw_figure(FigureEntry("clients"), results())
    ours, paper = drawn.axes[0].lines[:2]
    assert ours.get_color() == paper.get_color() and paper.get_linestyle() == "--"
    assert list(ours.get_ydata()) == [1, 3] and paper.get_ydata()[0] == 40


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": [{"method": "linear"}]}, "tables.figure1.rows: inherited from 'table1'"),
        ({"of": "table2"}, "tables.figure1.of: unknown value 'table2'"),
        ({"of": None}, "tables.figure1: give rows, metrics and upload, or inherit them with of: TABLE"),
        ({"of": "figure1"}, "tables.figure1.of: inherited from 'figure1'"),
    ],
)
def test_a_figure_of_another_table_has_nothing_twice(changed, said):
    with pytest.raises(InputError, match=said):
        columns("figure1", **changed)


def test_a_figure_of_another_table_has_its_rows_and_numbers():
    assert [column.rows for column in columns("figure1")] == [column.rows for column in columns()]
    assert columns("figure1")[0].key == "figure1 a"
