"""Run the command `fcljax predict RUN_DIR IMAGE...`."""

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import UInt8
from rich.console import Console

from fcljax.commands.arguments import Words, parsed
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.terminal import add_row, new_table, say

if TYPE_CHECKING:
    from fcljax.runs.model import Model

BATCH = 256  # images that are in memory at once
SHOWN = 20  # rows of the table in the terminal
USAGE = "usage: fcljax predict RUN_DIR IMAGE... [--out FILE.csv] [--client N]"


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """Options of `fcljax predict`."""

    out: str | None = option(None, unset="no file")
    """CSV file with a row for each image: file, label, probability."""
    client: int | None = option(None, least=0, unset="the global model")
    """Client whose personal model predicts, from 0."""


class Prediction(NamedTuple):
    """The most likely class of an image."""

    file: str
    label: str
    probability: float
    """Softmax over the classes of the run."""


def predict(arguments: list[str]) -> int:
    """Run `fcljax predict RUN_DIR IMAGE... [--out FILE.csv] [--client N]`."""
    about = "Predict classes of images with the model of a finished run."
    words, options = parsed(PredictOptions(), arguments, ["predict"], about, Words("RUN_DIR IMAGE..."))
    if len(words) < 2:
        raise InputError(f"images: none given; {USAGE}")
    if options.out and Path(options.out).suffix.lower() != ".csv":
        nearest = str(Path(options.out).with_suffix(".csv"))
        raise InputError(f"out: {options.out!r} is not a CSV file's name; nearest: {nearest!r}")
    run, *named = words
    files, left_out = _image_files(named)

    # only now: it imports JAX, and a wrong path has been reported without
    from fcljax.api import Result

    result = Result.of(run)
    model = result.client_model(options.client)
    if model.stored is not None:
        raise InputError(
            f"images: the model of {run!r} reads other data; nearest: fcljax.Result.of({run!r}).predict(x)"
        )
    # all before the first line of output: an unreadable image ends the command with its
    # error alone
    predictions = list(_predictions(model, result.metrics["class_names"], files))
    console = Console()
    table = new_table("file", "label", "probability", right=("probability",))
    for row in predictions[:SHOWN]:
        add_row(table, row.file, row.label, f"{row.probability:.3f}")
    console.print(table)
    if len(predictions) > SHOWN:
        say(
            console,
            f"and {len(predictions) - SHOWN:,} more images; --out FILE.csv has all of them",
        )
    if left_out:
        say(Console(stderr=True), left_out)
    if options.out:
        _write(options.out, predictions)
        say(console, f"predictions: {options.out}")
    return 0


def _image_files(named: Sequence[str]) -> tuple[list[Path], str]:
    """Return files that were named, and all images of folders, and a line about files
    that are no images.

    Raises:
      InputError: for a path that does not exist, or folders without images.
    """
    from fcljax.data.files.file_trees import in_words, is_image

    files = []
    left_out = []
    for name in named:
        path = Path(name)
        if not path.is_dir():
            if not path.exists():
                raise InputError(f"images: there is no file or folder {name!r}")
            files.append(path)
            continue
        # a file that was named is read whatever its suffix; of a folder only images are
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        files += [file for file in inside if is_image(file.name)]
        left_out += [str(file) for file in inside if not is_image(file.name)]
    if not files:
        raise InputError(f"images: no image in {', '.join(map(repr, named))}")
    if not left_out:
        return files, ""
    return files, f"{len(files):,} images; left out: {in_words(left_out)}"


def _predictions(
    model: "Model",
    names: Sequence[str],
    files: Sequence[Path],
) -> Iterator[Prediction]:
    """Predict batch by batch, so that memory holds a few images at a time."""
    from fcljax.data.files.images import quiet

    for start in range(0, len(files), BATCH):
        batch = files[start : start + BATCH]
        with quiet():
            pixels = [_pixels(path) for path in batch]
        # a softmax, shifted by the largest logit so that exp cannot overflow
        logits = model.scores(pixels, preprocess=True)
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probability = shifted / shifted.sum(axis=-1, keepdims=True)
        chosen = logits.argmax(axis=-1)
        for path, label, shares in zip(batch, chosen, probability, strict=True):
            yield Prediction(str(path), names[label], float(shares[label]))


def _pixels(path: Path) -> UInt8[np.ndarray, "H W 3"]:
    """Read an image.

    Raises:
      InputError: for a file that is no image.
    """
    from fcljax.data.files.images import decode

    # the decoder names its own option, `dataset`, which this command does not have
    try:
        return decode(path, str(path)).pixels
    except InputError as error:
        raise InputError(str(error).replace("dataset:", "images:", 1)) from None


def _write(path: str, predictions: Sequence[Prediction]) -> None:
    from fcljax.files import write_text

    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(Prediction._fields)
    rows.writerows((row.file, row.label, f"{row.probability:.6f}") for row in predictions)
    write_text(path, text.getvalue())
