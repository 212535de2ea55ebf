"""Pictures for the documentation, made in Chromium: of the report page, and of what `fcljax watch` shows.

python experiments/screenshots.py report REPORT.html [--out docs/images]
python experiments/screenshots.py watch RUNS_DIR [--out docs/images]
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

from fcljax.results.watch import read_status, run_dirs, status_view

# width, height, whether a phone shows it, and the colour scheme that the browser prefers
SHOTS = {
    "report-wide.png": (1440, 1900, False, "light"),
    "report-phone.png": (390, 1700, True, "dark"),
}
COLORS = 128  # which keep the files small
COLUMNS = 80  # of the terminal
FONT = "DejaVu Sans Mono"


def main() -> None:
    """Write the pictures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("report", "watch"))
    parser.add_argument("path", help="report: the page; watch: a folder of runs")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "report":
        for name, shot in SHOTS.items():
            shoot(options.path, options.out / name, *shot)
    else:
        watch(options.path, options.out)


def watch(runs: str, out: Path) -> None:
    """Draw what `fcljax watch` shows now of a folder of runs."""
    picture = terminal(runs)
    sides = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)[0]
    width, height = (int(float(side)) for side in sides)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "watch.html"
        page.write_text(f'<html lang="en"><body style="margin:0">{picture}</body></html>', "utf-8")
        shoot(str(page), out / "watch.png", width, height)


def terminal(folder: str) -> str:
    """Return an SVG of the terminal after `fcljax watch FOLDER`, with letters of this machine."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(status_view([read_status(path) for path in run_dirs(folder)], time.time()))
    svg = console.export_svg(title=f"fcljax watch runs/{Path(folder).name}")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S).replace("Fira Code", FONT)


def shoot(
    page: str, path: Path, width: int, height: int, mobile: bool = False, scheme: str = "light"
) -> None:
    """Write a picture of a page."""
    with chromium.opened(page, width, 900, mobile) as opened:
        opened.send(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        chromium.screenshot(opened, path, height)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLORS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
