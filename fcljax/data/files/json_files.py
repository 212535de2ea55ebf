"""Parse JSON from users: without NaN, and without repeated names in an object."""

import json
from typing import Any

from fcljax.errors import InputError, reason


def parse_json(where: str, text: str, what: str = "name") -> Any:
    """Return the content of JSON.

    Args:
      where: field and file, for messages.
      text: of the whole file.
      what: the names in objects stand for, for messages.

    Raises:
      InputError: for text that is no JSON, contains NaN or infinity, is nested too
        deeply, or repeats a name.
    """

    # Python's parser keeps the last of two equal names, and reads NaN and Infinity: the
    # first would lose a client's examples, the second end in a training loss of NaN
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{where}: the {what} {duplicate!r} appears twice")
        return content

    def constant(word: str) -> None:
        raise InputError(f"{where} holds {word}, which is not a number in JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {reason(error)}") from None
