"""A library in an environment of its own: reads a workload from a folder, and plays a round when it is asked.

The process reads lines from its input: `round` plays one from the first weights, `weights` writes the last
round's weights to `after.npz`. It answers each with its CPU seconds so far. Imports numpy alone.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Served(NamedTuple):
    """A workload: first weights by name, each client's images and labels, and how clients train."""

    weights: dict[str, np.ndarray]
    clients: list[tuple[np.ndarray, np.ndarray]]
    batch: int
    epochs: int
    rate: float


def read(folder: Path) -> Served:
    """What `outside.export` wrote."""
    with np.load(folder / "work.npz") as arrays:
        found = dict(arrays)
    image, label, offset = (found.pop(name) for name in ("_image", "_label", "_offset"))
    clients = [(image[a:b], label[a:b]) for a, b in zip(offset[:-1], offset[1:], strict=True)]
    return Served(found, clients, **json.loads((folder / "work.json").read_text()))


def serve(way: Callable[[Served], Callable[[], Mapping[str, Any]]]) -> None:
    """Answer on the folder that the command line names. `way` makes a call that plays a round and returns the
    weights, all of them computed."""
    folder = Path(sys.argv[1])
    play = way(read(folder))
    after = {}
    for line in sys.stdin:
        if line.strip() == "round":
            after = play()
        else:
            arrays: dict[str, Any] = {name: np.asarray(x) for name, x in after.items()}
            np.savez(folder / "after.npz", **arrays)
        print(json.dumps({"cpu": time.process_time()}), flush=True)
