"""Read texts with labels: `texts:DATA`, `texts:TRAIN,TEST`, and with a tokenizer.json.

DATA is a folder of parquet or arrow tables, OWNER/NAME in the cache of the Hugging Face
hub, or JSON of clients (LEAF's). A last part whose name is tokenizer.json makes tokens for
a checkpoint's encoder; without it words are hashed, as the packaged encoder reads them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.data.files.any_arrays import dataset_of_any_arrays
from fcljax.data.files.arrays import fifth_for_testing, rows_with_label, with_row_numbers
from fcljax.data.files.arrow_files import SUFFIXES
from fcljax.data.files.client_json import read_client_texts
from fcljax.data.files.dataset import Dataset, TextExamples, Texts
from fcljax.data.files.tables import read_texts
from fcljax.data.files.tokenizer_files import tokenize
from fcljax.data.kinds import longest_text, with_length
from fcljax.errors import InputError
from fcljax.files import in_home

FORM = "texts"
TOKENIZER = "tokenizer.json"


def texts_dataset(name: str, say: Callable[[str], None], skip_missing: bool = False) -> Dataset:
    """Read the data set of a name with the form `texts`.

    Args:
      name: of the data set.
      say: prints a note.
      skip_missing: leave out texts without a label.

    Raises:
      InputError: naming the file and what is wrong with it.
    """
    paths = name.removeprefix(f"{FORM}:").split(",")
    tokenizer = paths.pop() if Path(paths[-1]).name == TOKENIZER else ""
    if len(paths) not in (1, 2):
        raise InputError(f"dataset: {name!r}; expected {FORM}:DATA or {FORM}:TRAIN,TEST[,{TOKENIZER}]")
    train, test, class_names, note, train_rows, num_rows = _read(paths, skip_missing)
    if note:
        say(f"{name}: {note}")

    x: Any = train.texts
    x_test: Any = test.texts
    if tokenizer:
        x = tokenize(train.texts, tokenizer)
        x_test = tokenize(test.texts, tokenizer)
        # an encoder's work grows with the padding
        length = max(longest_text(x), longest_text(x_test))
        x = with_length(x, length)
        x_test = with_length(x_test, length)
        say(f"{name}: the longest text has {length} tokens, special ones included")
    arrays = (x, train.labels, x_test, test.labels)
    dataset = dataset_of_any_arrays(arrays, name, class_names).dataset
    dataset = dataset._replace(columns=train.columns, columns_test=test.columns)
    return with_row_numbers(dataset, train_rows, num_rows)


def _read(paths: list[str], skip_missing: bool) -> Texts:
    """Read one data set, or the JSON files of its two splits."""
    if not _is_json(paths[0]):
        if len(paths) > 1:
            raise InputError(f"dataset: {paths[0]!r} is no JSON; name the folder that has both splits")
        return read_texts(paths[0], skip_missing)
    files = [_read_json(path, skip_missing) for path in paths]
    train = files[0]
    if len(files) == 2:
        test = files[1]
        note = "; ".join(train.notes + test.notes)
        return Texts(train.examples, test.examples, None, note, train.rows, train.num_rows)
    fifth = fifth_for_testing(f"dataset: {paths[0]!r}", train.examples.labels)
    train_texts, test_texts = (_rows(train.examples, index) for index in (fifth.train, fifth.test))
    note = "; ".join([*train.notes, fifth.note])
    return Texts(train_texts, test_texts, None, note, train.rows[fifth.train], train.num_rows)


class _JsonTexts(NamedTuple):
    """The texts of a file."""

    examples: TextExamples
    rows: Int[np.ndarray, " N"]
    """Numbers of the examples in the file."""
    num_rows: int
    """Examples in the file."""
    notes: list[str]


def _read_json(path: str, skip_missing: bool) -> _JsonTexts:
    """Read the texts that have a label.

    Raises:
      InputError: naming the client of one without, unless `skip_missing`.
    """
    examples, note = read_client_texts(path)

    def place(row: int) -> str:
        return f"dataset: {path!r}, client {str(examples.columns['client'][row])!r}, example {row}"

    rows, missing_note = rows_with_label(examples.labels, place, skip_missing)
    notes = [line for line in (note, missing_note) if line]
    return _JsonTexts(_rows(examples, rows), rows, len(examples.labels), notes)


def _is_json(path: str) -> bool:
    """Check whether a path is a JSON file, or a folder of some without tables."""
    place = in_home(path, "dataset")
    if not place.is_dir():
        return place.suffix == ".json"
    # the hub has facts on tables in JSON beside them
    return any(place.glob("*.json")) and not any(file.suffix in SUFFIXES for file in place.rglob("*"))


def _rows(examples: TextExamples, index: np.ndarray) -> TextExamples:
    """Return these examples."""
    texts = [examples.texts[i] for i in index]
    columns = {name: values[index] for name, values in examples.columns.items()}
    return TextExamples(texts, examples.labels[index], columns)
