"""The figures of the leaderboard page have what its tables have, each row at its place."""

import sys

import pytest
import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

import leaderboard_figures as module

from fcljax.studies.leaderboard import marks

PAGE = """# Page

## First

Text before | the table.

| method | A_last at alpha 0.5 | A_last | MB |
|---|---|---|---|
| ewc ☆ | 69.22 ± 4.43 | 61.88 ± 1.56 | 1.12 |
| centralised | 82.23 ± 2.71 | 82.00 | 0.18 |
| local † ◆ | 49.64 ± 1.97 | 30.50 ± 0.10 | 0.00004 |

## Second

| method | A_last | MB |
|---|---|---|
| fppl | 50.00 | 2 |
"""


def test_rows_are_markers_and_bounds_are_levels():
    points, levels = marks(module.results_of(PAGE, "## First"))
    assert points == {"ewc": (1.12, 61.88)}
    assert levels == {"centralised": 82.0, "local": 30.5}
    assert marks(module.results_of(PAGE, "## Second")) == ({"fppl": (2.0, 50.0)}, {})


@pytest.mark.parametrize("heading", module.FIGURES)
def test_every_row_of_the_page_can_be_drawn(heading):
    page = module.PAGE.read_text()
    points, levels = marks(module.results_of(page, heading))
    assert len(points) + len(levels) == len(list(module.rows_of(page, heading))) >= 5
    assert f"images/{module.FIGURES[heading]})" in page
