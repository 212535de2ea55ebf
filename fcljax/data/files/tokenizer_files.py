"""Turn texts into tokens by a tokenizer file, such as a checkpoint's tokenizer.json."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fcljax.data.kinds import PADDING
from fcljax.errors import InputError, install_command, reason
from fcljax.files import in_home

MOST_BYTES = 1 << 26  # of a tokenizer file
MOST_TOKENS = 1 << 16  # of a text


def tokenize(texts: Sequence[str], tokenizer: str | Path, length: int = 64) -> dict[str, np.ndarray]:
    """Return texts as `fcljax.run` and `Model.predict` take them: ids and mask [N, length].

    Special tokens, such as the class token of BERT, are added as the file says. Longer texts are cut off, and
    shorter ones padded at their end.

    Args:
      texts: [N].
      tokenizer: a tokenizer.json, or the folder that it is in.
      length: tokens of an example.

    Raises:
      InputError: naming the argument, for a file that is no tokenizer, values that are no texts, and if the
        library `tokenizers` is missing.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError("texts: not all are text; expected a list of texts")
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MOST_TOKENS:
        raise InputError(f"length: {length!r}; expected a whole number from 1 to {MOST_TOKENS}")
    if importlib.util.find_spec("tokenizers") is None:
        raise InputError(f"tokenizer: it needs tokenizers; install it with: {install_command('text')}")
    import tokenizers

    path = in_home(tokenizer, "tokenizer")
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"tokenizer: {str(path)!r} does not exist; expected a tokenizer.json")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"tokenizer: {str(path)!r} has more than {MOST_BYTES >> 20} MiB; it is no tokenizer")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
        encoder.enable_truncation(length)
        # the file may pad on the left, and rows are padded at their end below
        encoder.no_padding()
        encoded = [encoding.ids for encoding in encoder.encode_batch(list(texts))]
    # the library raises Exception itself
    except Exception as error:
        raise InputError(f"tokenizer: {str(path)!r} cannot be used ({reason(error)})") from None
    ids = np.full((len(encoded), length), PADDING, np.int32)
    mask = np.zeros((len(encoded), length), bool)
    for row, tokens in enumerate(encoded):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    return {"ids": ids, "mask": mask}
