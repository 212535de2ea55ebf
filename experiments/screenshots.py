"""Pictures of the report page for the documentation, made in Chromium.

    python experiments/screenshots.py REPORT.html [FOLDER]        # FOLDER: docs/images
"""

import sys
from pathlib import Path

import chromium
from PIL import Image

# width, height, and whether a phone shows it
SHOTS = {"report-wide.png": (1200, 1900, False), "report-phone.png": (390, 1700, True)}
COLORS = 128  # which keep the files small


def main(page: str, folder: str = "docs/images") -> None:
    """Write the pictures."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, (width, height, mobile) in SHOTS.items():
        path = Path(folder) / name
        with chromium.opened(page, width, 900, mobile) as opened:
            chromium.screenshot(opened, path, height)
        with Image.open(path) as image:
            image.convert("RGB").quantize(COLORS).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
