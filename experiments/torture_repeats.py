"""Runs one after the other in one process, for experiments/torture.py: nothing may grow."""

import gc
import os
import random
import shutil
import statistics
from pathlib import Path

import numpy as np
from torture_common import Outcome

WARM = 5  # runs before the first that counts
GROWTH = 1.0  # MB a run that memory may grow
OPTIONS = dict(tasks=2, clients=2, rounds=1, epochs=1, batch_size=8, image_size=16, min_examples=1)
sizes: list[tuple[float, int, int, int]] = []
"""After each run: MB of memory, open files, threads, arrays of JAX."""


def repeated_run(_rng: random.Random, folder: Path, *_: object) -> Outcome:
    """One `fcljax.run`, and how much the process holds after it."""
    import jax

    import fcljax

    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (36, 16, 16, 3), np.uint8)
    label = np.arange(36) % 4
    arrays = (image[:24], label[:24], image[24:], label[24:])
    out = str(folder) if len(sizes) % 2 else None
    fcljax.run("linear", arrays, out=out, progress=False, **OPTIONS)
    shutil.rmtree(folder, ignore_errors=True)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    sizes.append((resident_megabytes(), files, threads, len(jax.live_arrays())))
    counted = sizes[WARM:]
    what = "after a run: {:.0f} MB, {} files, {} threads, {} arrays".format(*sizes[-1])
    if len(counted) < 10:
        return Outcome("survived", what)
    grows = statistics.linear_regression(range(len(counted)), [size[0] for size in counted]).slope
    more = any(counted[-1][i] > max(size[i] for size in counted[:5]) + 3 for i in (1, 2, 3))
    return Outcome("different" if grows > GROWTH or more else "survived", f"{what}, {grows:+.2f} MB a run")


def resident_megabytes() -> float:
    """What the process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
