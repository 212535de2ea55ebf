"""Does reading the next window of images overlap with the work on the last one?

    python experiments/bench_streaming.py --images 3000 --side 256 --repeats 3

One round of a linear classifier on the packaged micro ViT over images in a file that the page cache has been
made to forget, so that every read goes to the disk, as with a data set larger than memory. Four times per
repetition, in this order: images resident on the device, windows without overlap, windows with overlap, and
the reads alone. The share of the reads that overlap hides is (without - with) / reads; 1 means that they cost
nothing, and what is missing from it is contention for cores or memory bandwidth. Results of all three runs
are compared bit by bit.
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fcljax import config
from fcljax.data.augment import input_pipeline
from fcljax.data.store import ClientIndices, Split
from fcljax.data.streaming import Host
from fcljax.data.tasks import make_tasks
from fcljax.federated.check import Example
from fcljax.federated.engine import Lanes, RoundInputs, init_clients, make_engine, run_round
from fcljax.federated.schedule import ClientPartition, capacities
from fcljax.models.weights.pretrained import load_backbone
from fcljax.runs.build import frozen_of, make_method
from fcljax.runs.inputs import inputs_of, network_of
from fcljax.types import Sizes

CLASSES = 10
CLIENTS = 4
BATCH = 32


def main() -> None:
    """Print one line per way of reading, and the share that is hidden."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--window", type=int, default=256, help="images per window")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", default=None, help="where the file of images goes; a disk, not a memory file system"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options, Path(folder) / "images.npy")


def measure(options: argparse.Namespace, path: Path) -> None:
    """Write the file, then time the ways of reading it."""
    label = np.arange(options.images, dtype=np.int32) % CLASSES
    split = Split(write_images(path, options.images, options.side), label)
    play, rows = make_round(split)
    resident = jax.tree.map(jnp.asarray, split)
    ways = {
        "resident": resident,
        "waiting": Host(split, options.window, False),
        "overlapping": Host(split, options.window),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "reads alone")}
    results = {}
    for data in ways.values():  # compile
        play(data)
    for _ in range(options.repeats):
        for name, data in ways.items():
            forget(path)
            start = time.perf_counter()
            results[name] = play(data)
            seconds[name].append(time.perf_counter() - start)
        forget(path)
        start = time.perf_counter()
        for first in range(0, len(rows), options.window):
            jax.block_until_ready(ways["waiting"].take(rows[first : first + options.window]))
        seconds["reads alone"].append(time.perf_counter() - start)
    same = all(
        jax.tree.all(jax.tree.map(np.array_equal, results["resident"], results[name])) for name in ways
    )
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(f"{name:12} {middle[name]:7.2f} s   ({', '.join(f'{t:.2f}' for t in times)})")
    hidden = (middle["waiting"] - middle["overlapping"]) / middle["reads alone"]
    ratio = middle["overlapping"] / middle["waiting"]
    print(f"same bits: {same}; with / without overlap: {ratio:.3f}; hidden reads: {hidden:.2f}")


def write_images(path: Path, count: int, side: int) -> np.ndarray:
    """Noise, mapped from a file that is on the disk in full."""
    images = np.lib.format.open_memmap(path, "w+", np.uint8, (count, side, side, 3))
    rng = np.random.default_rng(0)
    for row in range(0, count, 100):
        images[row : row + 100] = rng.integers(0, 256, images[row : row + 100].shape, np.uint8)
    images.flush()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return np.load(path, mmap_mode="r")


def forget(path: Path) -> None:
    """Ask the page cache to drop the file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_round(split: Split):
    """(data -> server after one round of one epoch, the rows that it reads in some order)."""
    loaded = load_backbone("vit_micro", None, None)
    label = split.label
    sizes = Sizes(CLASSES, 1, CLASSES, CLIENTS)
    frozen = frozen_of(loaded)
    settings = config.from_mapping("linear", {"epochs": 1, "batch_size": BATCH}, "bench")
    method = make_method(config.resolve(settings), sizes, network_of(loaded))
    (task,) = make_tasks(CLASSES, 1)
    parts = np.array_split(np.random.default_rng(0).permutation(len(label)), CLIENTS)
    rows, offset = ClientIndices.of(parts)
    present = np.stack([np.bincount(label[part], minlength=CLASSES) for part in parts]).astype(np.int32)
    partition = ClientPartition(rows, offset, present)
    lanes = Lanes()
    reader = partial(inputs_of, input_pipeline("fppl", loaded.config.image_size), False)
    rooms = capacities(method, [partition], lanes.count, CLIENTS)
    example = Example(frozen, Host(split, 1), task)
    engine = make_engine(method, reader, lanes, rooms, example)
    key = jax.random.key(0)
    server = method.init(key, frozen)

    def play(data):
        states = init_clients(method, server, CLIENTS, key)
        ids = np.arange(CLIENTS)
        return jax.device_get(
            run_round(engine, server, states, RoundInputs(frozen, data, partition, ids, task, 0, key))[0]
        )

    return play, rows


if __name__ == "__main__":
    main()
