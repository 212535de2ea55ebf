"""JSON that a user gives: no name comes twice in an object, and there is no NaN."""

import json
from typing import Any

from fcljax.errors import InputError, reason


def parse_json(where: str, text: str, what: str = "name") -> Any:
    """The content of JSON.

    Args:
      where: field and file, for messages.
      text: of the whole file.
      what: the names in objects stand for, for messages.

    Raises:
      InputError: for what is no JSON, holds NaN or infinity, is nested too deeply, or has a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{where}: the {what} {twice!r} comes twice")
        return content

    def constant(word: str) -> None:
        raise InputError(f"{where} holds {word}, which is no number in JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON: {reason(error)}") from None
