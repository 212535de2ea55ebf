"""The table "Every method on every kind of data" of docs/results/any-data.md.

    python experiments/every_data.py RESULTS.jsonl [METHOD,...] [KIND,...]

It makes one tiny run of each method on images, a table, series and texts. Each outcome is a line of the file;
outcomes that it already has are not made again. At the end the table is printed.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fcljax
from fcljax.data.files.sources import load_dataset
from fcljax.data.kinds import take
from fcljax.errors import InputError
from fcljax.methods import METHODS

KINDS = ("text", "series", "table", "image")
SHORT: dict[str, Any] = {"clients": 2, "rounds": 1, "epochs": 1, "tasks": 2, "progress": False}
# the one client has all data
ONE_CLIENT = ("centralised", "sequential", "centralized-prompt")
# they read names of classes, which arrays in memory do not have
NAMED = ("zero-shot", "promptfl", "fedtpg")
CLASSES = 4
EXAMPLES = 40  # of training, of a class


def data_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a small data set of a kind, and the options that its runs need."""
    label = np.arange(160) % CLASSES
    rng = np.random.default_rng(0)
    match kind:
        case "table":
            return "wine", {"tasks": 3}
        case "series":
            series = rng.normal(size=(160, 16, 2)) + label[:, None, None]
            return (series.astype(np.float32), label), {"backbone": "conv1d"}
        case "text":
            texts = load_dataset("text")
            rows = np.concatenate([np.flatnonzero(texts.y_train == c)[:EXAMPLES] for c in range(CLASSES)])
            return (take(texts.x_train, rows), texts.y_train[rows]), {"backbone": "text_micro"}
        case _:
            images = (
                rng.integers(0, 128, (200, 8, 8, 3)) + 32 * (np.arange(200) % CLASSES)[:, None, None, None]
            )
            y = np.arange(200) % CLASSES
            images = images.astype(np.uint8)
            return (images[:160], y[:160], images[160:], y[160:]), {}


def outcome(method: str, kind: str) -> str:
    """Return "runs", the line of a refusal, or "broken: " and the last line of a traceback."""
    data, options = data_of(kind)
    if method in ONE_CLIENT:
        options = options | {"clients": 1}
    if method in NAMED and kind == "image":
        data = "digits"
        options = options | {"class_prompts": "the digit {}"}
    try:
        result = fcljax.run(method, data, **SHORT | options)
    except InputError as error:
        return f"refused: {error}"
    except Exception as error:  # what the table must not have
        traceback.print_exc()
        return f"broken: {type(error).__name__}: {str(error).splitlines()[:1]}"
    if not np.isfinite(result.metrics["A_last"]):
        return f"broken: A_last is {result.metrics['A_last']}"
    return "runs"


def table(outcomes: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield the lines of the page's table: methods with the same four outcomes share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for method in METHODS:
        row = tuple(outcomes.get((method, kind), "not run").split(":")[0] for kind in reversed(KINDS))
        groups.setdefault(row, []).append(method)
    yield "| methods | " + " | ".join(reversed(KINDS)) + " |"
    yield "|---" * (1 + len(KINDS)) + "|"
    for row, methods in groups.items():
        yield f"| {', '.join(f'`{method}`' for method in methods)} | " + " | ".join(row) + " |"


def main(path: Path, methods: list[str], kinds: list[str]) -> None:
    """Make the runs that are missing, and print the table."""
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = {(run["method"], run["kind"]): run["outcome"] for run in map(json.loads, lines)}
    for kind in kinds:
        for method in methods:
            if (method, kind) in outcomes:
                continue
            outcomes[method, kind] = outcome(method, kind)
            print(kind, method, outcomes[method, kind], flush=True)
            with path.open("a") as file:
                run = {"method": method, "kind": kind, "outcome": outcomes[method, kind]}
                file.write(json.dumps(run) + "\n")
    print("\n".join(table(outcomes)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    defaults = [",".join(METHODS), ",".join(KINDS)]
    chosen_methods, chosen_kinds = sys.argv[2:] + defaults[len(sys.argv) - 2 :]
    main(Path(sys.argv[1]), chosen_methods.split(","), chosen_kinds.split(","))
