"""Read texts with labels: `texts:DATA`, `texts:TRAIN,TEST`, and with a tokenizer.json.

DATA is a folder of parquet or arrow tables, OWNER/NAME in the cache of the Hugging Face
hub, or JSON of clients (LEAF's). A last part whose name is tokenizer.json makes tokens for
a checkpoint's encoder; without it words are hashed, as the packaged encoder reads them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fcljax.data.files.any_arrays import dataset_of_any_arrays
from fcljax.data.files.arrays import fifth_for_testing, with_row_numbers
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


def texts_dataset(name: str, say: Callable[[str], None]) -> Dataset:
    """Read the data set of a name with the form `texts`.

    Args:
      name: of the data set.
      say: prints a note.

    Raises:
      InputError: naming the file and what is wrong with it.
    """
    paths = name.removeprefix(f"{FORM}:").split(",")
    tokenizer = paths.pop() if Path(paths[-1]).name == TOKENIZER else ""
    if len(paths) not in (1, 2):
        raise InputError(f"dataset: {name!r}; expected {FORM}:DATA or {FORM}:TRAIN,TEST[,{TOKENIZER}]")
    train, test, class_names, note, train_rows = _read(paths)
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
    return with_row_numbers(dataset._replace(columns=train.columns, columns_test=test.columns), train_rows)


def _read(paths: list[str]) -> Texts:
    """Read one data set, or the JSON files of its two splits."""
    if not _is_json(paths[0]):
        if len(paths) > 1:
            raise InputError(f"dataset: {paths[0]!r} is no JSON; name the folder that has both splits")
        return read_texts(paths[0])
    (train, note), *others = (read_client_texts(path) for path in paths)
    if others:
        return Texts(train, others[0][0], None, note)
    fifth = fifth_for_testing(f"dataset: {paths[0]!r}", train.labels)
    note = "; ".join(filter(None, (note, fifth.note)))
    return Texts(_rows(train, fifth.train), _rows(train, fifth.test), None, note, fifth.train)


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
