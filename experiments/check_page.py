"""What a report page weighs, how fast it opens in Chromium, and what axe-core finds against it.

    npm install axe-core
    python experiments/check_page.py REPORT.html node_modules/axe-core/axe.min.js

Exit code 1 if axe finds something serious or critical, the console an error, or a request leaves the page.
"""

import json
import statistics
import sys
from pathlib import Path

import chromium

SERIOUS = ("serious", "critical")
OPENED = 5  # times, of which the median counts
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def main(page: str, axe: str) -> int:
    """Print what was measured."""
    times = []
    errors = []
    requests = []
    for _ in range(OPENED):
        with chromium.opened(page) as opened:
            times.append(opened.evaluate(f"new Promise(r => setTimeout(() => r({LOADED}), 50))"))
            errors = list(opened.errors)
            requests = [each for each in opened.requests if not each.startswith("data:")]  # not the pictures
    middle = statistics.median(times)
    most = max(times)
    print(f"{Path(page).stat().st_size:,} bytes; loaded in {middle:.0f} ms, at most {most:.0f}, of {OPENED}")
    found = [*violations(page, axe, 1200), *violations(page, axe, 390)]
    for rule in found:
        nodes = [node["target"] for node in rule["nodes"]]
        print(f"{rule['impact']}: {rule['id']}: {rule['help']} ({len(nodes)} places, first {nodes[0]})")
    print(f"axe: {len(found)} findings; console: {len(errors)} errors; requests: {len(requests)}")
    return int(bool(errors) or len(requests) != 1 or any(rule["impact"] in SERIOUS for rule in found))


def violations(page: str, axe: str, width: int) -> list[dict]:
    """The rules of axe-core that a page of this width breaks."""
    with chromium.opened(page, width) as opened:
        # over the protocol: the page itself allows no script but its own
        opened.evaluate(Path(axe).read_text(encoding="utf-8") + "; 0")
        return json.loads(opened.evaluate("axe.run().then(found => JSON.stringify(found.violations))"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
