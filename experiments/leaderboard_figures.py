"""Draw the figures of docs/results/leaderboard.md from the tables of that page.

    python experiments/leaderboard_figures.py

Each figure has what its table has: a marker for every method, and a level across the figure
for a method that sends nothing or has one client with all data.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from fcljax.results import figures
from fcljax.studies.leaderboard import drawing

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results" / "leaderboard.md"
FIGURES = {
    "## Digits": "leaderboard-digits.png",
    "## Glyphs": "leaderboard-glyphs.png",
    "### Glyphs at alpha 0.05": "leaderboard-glyphs-005.png",
    "## Mini-CIFAR at 64 px": "leaderboard.png",
    "## CIFAR-100 at 224 px": "leaderboard-cifar224.png",
}


def rows_of(page: str, heading: str) -> Iterator[dict[str, str]]:
    """Return the rows of the first table below a heading, column by column."""
    lines = page.split(f"\n{heading}\n", 1)[1].splitlines()
    lines = itertools.dropwhile(_is_text, lines)
    head, _, *rows = map(_cells, itertools.takewhile(_is_row, lines))
    for row in rows:
        yield dict(zip(head, row, strict=True))


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _is_text(line: str) -> bool:
    return not _is_row(line)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def results_of(page: str, heading: str) -> dict[str, tuple[float, float]]:
    """Return MB and A_last of each method."""
    results = {}
    for row in rows_of(page, heading):
        # signs behind the name mark personal models and the vote of a batch
        method = row["method"].split()[0]
        results[method] = (float(row["MB"]), float(row["A_last"].split()[0]))
    return results


def main() -> None:
    """Draw all figures into docs/images."""
    page = PAGE.read_text()
    for heading, name in FIGURES.items():
        results = results_of(page, heading)
        figures.save(DOCS / "images" / name, drawing(results))
        print(f"{name}: {len(results)} methods")


if __name__ == "__main__":
    main()
