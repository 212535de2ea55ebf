"""`fcljax embed`: the frozen features of a data set, as a file for other programs and for
later runs."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fcljax.config import InputConfig
from fcljax.data.streaming import ready
from fcljax.errors import InputError
from fcljax.files import atomic, check_folder
from fcljax.models.networks import network_name
from fcljax.options import option
from fcljax.results.metrics import nearest_class_mean
from fcljax.runs.features import frozen_features, save_features
from fcljax.runs.inputs import device_mesh, load_inputs, make_splits, report_notes
from fcljax.terminal import progress_bar
from fcljax.types import Frozen


@dataclasses.dataclass(frozen=True)
class EmbedConfig(InputConfig):
    """Options of `fcljax embed`, beside those that it shares with `fcljax run`."""

    out: str | None = option(None, unset="DATASET-BACKBONE.npz")
    """New .npz file for the features."""
    keep_head: bool = False
    """Also write the logits of the checkpoint's classification head."""


def embed(
    cfg: EmbedConfig,
    out: str | Path,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write the features of both splits, training images first, to one .npz file.

    Its arrays are `features` float32 [N, D], `labels` [N], `is_test` [N], `class_names`
    and, if asked for, `logits` float32 [N, classes of the head]. Later runs read the
    features from the data sets' folder.

    Args:
      cfg: which images and which backbone; `normalise` must be resolved.
      out: the file; a new one.
      console: where the progress bar and notes go.

    Returns:
      A summary by name: counts, width, speed, and the test accuracy of the nearest class
        mean of the training features.

    Raises:
      InputError: for bad settings or files, or if `out` exists.
    """
    out = Path(out)
    console = console or Console(stderr=True)
    # before the backbone and the data are loaded, which may take minutes
    if out.exists():
        raise InputError(f"out: {str(out)!r} exists already; give the name of a new file")
    check_folder(out.parent)
    mesh = device_mesh(cfg.devices)
    inputs = load_inputs(cfg)
    if cfg.keep_head and inputs.backbone.head is None:
        raise InputError("keep_head: the checkpoint has no classification head; leave out --keep-head")
    report_notes(inputs.backbone, console)
    dataset = inputs.dataset
    start = time.perf_counter()
    labels = (dataset.y_train.astype(np.int64), dataset.y_test.astype(np.int64))
    with progress_bar("{task.description}", console=console) as bar:
        shown = bar.add_task("examples", total=sum(map(len, labels)))
        compute = frozen_features(
            inputs, cfg.eval_batch_size, lambda count: bar.update(shown, advance=count), mesh
        )
        splits = make_splits(dataset, labels, cfg.data_budget, cfg.eval_batch_size)
        frozen = Frozen(inputs.backbone.params)
        features = [np.asarray(compute(frozen, ready(split, mesh)), np.float32) for split in splits]
    seconds = time.perf_counter() - start
    arrays = {
        "features": np.concatenate(features),
        "labels": np.concatenate(labels),
        "is_test": np.repeat([False, True], [len(label) for label in labels]),
        "class_names": np.array(dataset.class_names),
    }
    # from the features: the head is one linear layer, so nothing is computed twice
    head = inputs.backbone.head
    if cfg.keep_head and head is not None:
        arrays["logits"] = arrays["features"] @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    # into an open file: to a name without .npz numpy would append it
    with atomic(out) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
    save_features(cfg, inputs, "train", features[0])
    save_features(cfg, inputs, "test", features[1])
    accuracy = nearest_class_mean(features[0], labels[0], features[1], labels[1])
    return {
        "backbone": network_name(inputs.backbone.config),
        "features": list(arrays["features"].shape),
        "training examples": len(labels[0]),
        "test examples": len(labels[1]),
        "examples/s": round(sum(map(len, labels)) / seconds, 1),
        "nearest class mean, test accuracy": round(accuracy, 4),
        "written to": str(out),
    }
