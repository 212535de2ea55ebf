"""`fcljax data show`: images of a data set, and the examples that each client would
get."""

from pathlib import Path

import numpy as np

from fcljax.config import PartitionConfig
from fcljax.data.kinds import described
from fcljax.errors import InputError
from fcljax.files import check_folder
from fcljax.results import figures
from fcljax.runs.inputs import load_split
from fcljax.scenario import fit_partition, make_scenario

# the contact sheet's rows and columns
SHEET_CLASSES = 12
SHEET_IMAGES = 8


def show(cfg: PartitionConfig, out: str | Path) -> list[tuple[str, object]]:
    """Draw images of the first classes (images.png) and each client's examples per
    class (classes.png).

    Data that are no images have the second picture alone. Where examples are assigned
    anew in every round, it shows the first round of each task.

    Returns:
      Rows (property, value) of a table.

    Raises:
      InputError: for bad settings or files, or if one of the files exists.
    """
    files = [Path(out) / name for name in ("images.png", "classes.png")]
    for file in files:
        if file.exists():
            raise InputError(f"out: {str(file)!r} exists already; give another folder")
    check_folder(out)
    # there is no network here that would give the size; 224 pixels is the usual one
    dataset = load_split(cfg, cfg.image_size or 224)
    cfg = fit_partition(cfg, dataset)
    classes = len(dataset.class_names)
    # one round: where the examples are drawn anew, the first round is shown
    scenario = make_scenario(dataset, cfg, rounds=1, joint=False)
    counts = scenario.holdings
    tasks = scenario.tasks
    # after everything that can fail, so that an error leaves no empty folder
    Path(out).mkdir(parents=True, exist_ok=True)
    # kind None: images; tables, text and series have no picture
    if dataset.kind is None:
        chosen = range(min(classes, SHEET_CLASSES))
        sheet = [dataset.x_train[np.flatnonzero(dataset.y_train == label)[:SHEET_IMAGES]] for label in chosen]
        figures.save(files[0], figures.contact_sheet(sheet, [dataset.class_names[label] for label in chosen]))
        stored = "x".join(map(str, dataset.x_train.shape[1:3]))
        pictures = [("images", str(files[0]))]
    else:
        stored = described(dataset.x_train)
        pictures = []
    figures.save(files[1], figures.class_counts(counts, [task.classes for task in tasks]))
    examples = "examples"
    if dataset.kind is None:
        examples = "images"
    redrawn = ", again in every round; below: the first of each task"
    return [
        ("data set", dataset.name),
        ("classes", classes),
        (f"training {examples}", len(dataset.y_train)),
        (f"test {examples}", len(dataset.y_test)),
        ("stored as", stored),
        (f"training {examples} per class", _range(np.bincount(dataset.y_train))),
        ("partition", str(cfg.partition) + (redrawn if cfg.population == "redrawn" else "")),
        (f"training {examples} per client", _range(counts.sum(1))),
        ("classes per client", _range((counts > 0).sum(1))),
        *pictures,
        ("client partition", str(files[1])),
    ]


def _range(numbers: np.ndarray) -> str:
    """Return the least and the greatest number, as text."""
    return f"{numbers.min()} to {numbers.max()}"
