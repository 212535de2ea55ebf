"""Pictures for the documentation, made in Chromium: of the report page, and of what `fcljax watch` shows.

python experiments/screenshots.py report REPORT.html [--out docs/images]
python experiments/screenshots.py watch RUN_DIR RUNS_DIR [--out docs/images]   # a run, a folder of runs
"""

import argparse
import io
import re
import tempfile
import time
from pathlib import Path

import chromium
from PIL import Image
from rich.console import Console

from fcljax.results.watch import look, run_dirs, view

# width, height, and whether a phone shows it
SHOTS = {"report-wide.png": (1440, 1900, False), "report-phone.png": (390, 1700, True)}
COLORS = 128  # which keep the files small
COLUMNS = 100  # of the terminal
FONT = "DejaVu Sans Mono"  # which has the block characters of curves


def main() -> None:
    """Write the pictures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("report", "watch"))
    parser.add_argument(
        "of", nargs="+", help="report: the page; watch: a run directory, and a folder of runs"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (report if options.what == "report" else watch)(*options.of, out=options.out)


def report(page: str, out: Path) -> None:
    """The page on a wide screen and on a phone."""
    for name, (width, height, mobile) in SHOTS.items():
        shoot(page, out / name, width, height, mobile)


def watch(run: str, runs: str, out: Path) -> None:
    """What `fcljax watch` shows now of a run, and of a folder of runs."""
    for name, folder in (("watch-run.png", run), ("watch-runs.png", runs)):
        picture = terminal(folder)
        width, height = (
            int(float(side)) for side in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)[0]
        )
        with tempfile.TemporaryDirectory() as place:
            page = Path(place) / "watch.html"
            page.write_text(f'<html lang="en"><body style="margin:0">{picture}</body></html>', "utf-8")
            shoot(str(page), out / name, width, height, False)


def terminal(folder: str) -> str:
    """An SVG of the terminal after `fcljax watch FOLDER`, with letters of this machine."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(view([look(each) for each in run_dirs(folder)], time.time()))
    drawn = console.export_svg(title=f"fcljax watch runs/{Path(folder).name}")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.S).replace("Fira Code", FONT)


def shoot(page: str, path: Path, width: int, height: int, mobile: bool) -> None:
    """A picture of a page."""
    with chromium.opened(page, width, 900, mobile) as opened:
        chromium.screenshot(opened, path, height)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLORS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
