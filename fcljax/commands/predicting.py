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
from fcljax.files import check_file, write_text
from fcljax.options import option
from fcljax.terminal import add_row, new_table, progress_bar, say

if TYPE_CHECKING:
    from fcljax.runs.model import Model

BATCH = 256  # images that are in memory at once
SHOWN = 20  # rows of the table in the terminal
USAGE = "usage: fcljax predict RUN_DIR IMAGE... [--out FILE.csv] [--client N] [--skip-corrupt]"


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """Options of `fcljax predict`."""

    out: str | None = option(None, unset="no file")
    """CSV file with a row for each image: file, label, probability."""
    client: int | None = option(None, least=0, unset="the global model")
    """Client whose personal model predicts, from 0."""
    skip_corrupt: bool = False
    """Count and skip images that cannot be decoded."""


class Prediction(NamedTuple):
    """The most likely class of an image."""

    file: str
    label: str
    probability: float
    """Softmax over the classes of the run."""


def predict(arguments: list[str]) -> int:
    """Run `fcljax predict RUN_DIR IMAGE... [options]`."""
    about = "Predict classes of images with the model of a finished run."
    words, options = parsed(PredictOptions(), arguments, ["predict"], about, Words("RUN_DIR IMAGE..."))
    if len(words) < 2:
        raise InputError(f"images: none given; {USAGE}")
    if options.out:
        _check_name(options.out)
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
    predictions, skipped = _predictions(model, result.metrics["class_names"], files, options.skip_corrupt)
    if not predictions:
        raise InputError(f"images: none of {len(files):,} can be decoded, the first error: {skipped[0]}")
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
    if skipped:
        say(
            Console(stderr=True),
            f"skipped {len(skipped):,} of {len(files):,} images, the first: {skipped[0]}",
        )
    if options.out:
        _write(options.out, predictions)
        say(console, f"predictions: {options.out}")
    return 0


def _check_name(out: str) -> None:
    """Check the name of the file of predictions.

    Raises:
      InputError: for another suffix, or as `check_file`.
    """
    if Path(out).suffix.lower() != ".csv":
        nearest = str(Path(out).with_suffix(".csv"))
        raise InputError(f"out: {out!r} is not a CSV file's name; nearest: {nearest!r}")
    check_file(out)


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
    model: "Model", names: Sequence[str], files: Sequence[Path], skip_corrupt: bool
) -> tuple[list[Prediction], list[str]]:
    """Predict batch by batch, so that memory holds a few images at a time.

    Returns:
      The predictions, and the errors of the images that were skipped.
    """
    from fcljax.data.files.images import quiet

    predictions = []
    skipped = []
    with progress_bar("predictions", console=_terminal()) as bar:
        task = bar.add_task("", total=len(files))
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            with quiet():
                read = [_pixels(path, skip_corrupt) for path in batch]
            skipped.extend(error for error in read if isinstance(error, str))
            images = [(path, x) for path, x in zip(batch, read, strict=True) if not isinstance(x, str)]
            if images:
                predictions.extend(_of_batch(model, names, images))
            bar.advance(task, len(batch))
    return predictions, skipped


def _terminal() -> Console:
    """Return standard error if it is a terminal: a bar has no place in a log."""
    console = Console(stderr=True)
    return Console(stderr=True, quiet=not console.is_terminal)


def _of_batch(
    model: "Model", names: Sequence[str], images: Sequence[tuple[Path, UInt8[np.ndarray, "H W 3"]]]
) -> Iterator[Prediction]:
    logits = model.scores([pixels for _, pixels in images], preprocess=True)
    # a softmax, shifted by the largest logit so that exp cannot overflow
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probability = shifted / shifted.sum(axis=-1, keepdims=True)
    for (path, _), label, shares in zip(images, logits.argmax(axis=-1), probability, strict=True):
        yield Prediction(str(path), names[label], float(shares[label]))


def _pixels(path: Path, skip_corrupt: bool) -> UInt8[np.ndarray, "H W 3"] | str:
    """Read an image; with `skip_corrupt` return the error of one that cannot be decoded.

    Raises:
      InputError: for a file that is no image.
    """
    from fcljax.data.files.images import decode

    try:
        return decode(path, str(path)).pixels
    except InputError as error:
        # the decoder names its own option, `dataset`, which this command does not have
        why = str(error).removeprefix("dataset: ")
        if skip_corrupt:
            return why
        raise InputError(f"images: {why}; --skip-corrupt leaves such images out") from None


def _write(path: str, predictions: Sequence[Prediction]) -> None:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(Prediction._fields)
    rows.writerows((row.file, row.label, f"{row.probability:.6f}") for row in predictions)
    write_text(path, text.getvalue())
