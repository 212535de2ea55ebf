"""`fcljax embed`: the frozen features of a data set, as a file for other programs and as the runs' cache."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fcljax.config import InputConfig
from fcljax.data.streaming import ready
from fcljax.errors import InputError
from fcljax.files import atomic, check_folder
from fcljax.models.networks import network_name
from fcljax.results.metrics import nearest_class_mean
from fcljax.runs.inputs import (
    Inputs,
    device_mesh,
    frozen_features,
    load_inputs,
    make_splits,
    save_features,
    tell,
)
from fcljax.types import Frozen


@dataclasses.dataclass(frozen=True)
class EmbedConfig(InputConfig):
    """Options of `fcljax embed`, beside those that it shares with `fcljax run`."""

    out: str | None = None  # .npz file, a new one; default: DATASET-BACKBONE.npz
    keep_head: bool = False  # also write the logits of the checkpoint's classification head


def embed(cfg: EmbedConfig, out: str | Path, console: Console | None = None) -> dict[str, Any]:
    """Write the features of both splits, training images first, to one .npz file.

    It holds `features` float32 [N, D], `labels` [N], `is_test` [N], `class_names` and, if asked for, `logits`
    float32 [N, classes of the head]. Fills the cache of query features too.

    Args:
      cfg: which images and which backbone; `normalise` must be resolved.
      out: the file; a new one.
      console: where the progress bar and notes go.

    Returns:
      What was done, by name: counts, width, speed, and how well the nearest class mean of the training
        features does on the test images.

    Raises:
      InputError: for bad settings or files, or if `out` exists.
    """
    out, console = Path(out), console or Console(stderr=True)
    if out.exists():
        raise InputError(f"out: {str(out)!r} exists already; give the name of a new file")
    if not out.absolute().parent.is_dir():
        raise InputError(f"out: no folder {str(out.absolute().parent)!r}")
    check_folder(out.absolute().parent)
    mesh, inputs = device_mesh(cfg.devices), load_inputs(cfg)
    if cfg.keep_head and inputs.backbone.head is None:
        raise InputError("keep_head: the checkpoint has no classification head; leave out --keep-head")
    tell(inputs, console)
    dataset, start = inputs.dataset, time.perf_counter()
    labels = (dataset.y_train.astype(np.int64), dataset.y_test.astype(np.int64))
    with _progress(console) as progress:
        bar = progress.add_task("images", total=sum(map(len, labels)))
        features = _features(cfg, inputs, mesh, labels, lambda rows: progress.update(bar, advance=rows))
    seconds = time.perf_counter() - start
    arrays = {
        "features": np.concatenate(features),
        "labels": np.concatenate(labels),
        "is_test": np.repeat([False, True], [len(label) for label in labels]),
        "class_names": np.array(dataset.class_names),
    }
    head = inputs.backbone.head
    if cfg.keep_head and head is not None:
        arrays["logits"] = arrays["features"] @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    with atomic(out) as temporary:
        np.savez(temporary, **arrays)
    for part, found in zip(("train", "test"), features, strict=True):
        save_features(cfg, inputs, part, found)
    accuracy = nearest_class_mean(features[0], labels[0], features[1], labels[1])
    return {
        "backbone": network_name(inputs.backbone.config),
        "features": list(arrays["features"].shape),
        "training images": len(labels[0]),
        "test images": len(labels[1]),
        "images/s": round(sum(map(len, labels)) / seconds, 1),
        "nearest class mean, test accuracy": round(accuracy, 4),
        "written to": str(out),
    }


def _features(
    cfg: EmbedConfig,
    inputs: Inputs,
    mesh: Mesh | None,
    labels: tuple[np.ndarray, np.ndarray],
    advance: Callable[[int], None],
) -> list[np.ndarray]:
    compute = frozen_features(inputs, cfg.eval_batch_size, advance, mesh)
    splits = make_splits(inputs.dataset, *labels, cfg.data_budget, cfg.eval_batch_size)
    found = (compute(Frozen(inputs.backbone.params), ready(split, mesh)) for split in splits)
    return [np.asarray(features, np.float32) for features in found]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
