"""The one exception that means "the user gave us something wrong"; the CLI turns it into one line and exit
code 2."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")


class InputError(ValueError):
    """Bad input from outside: the message is one line that names the field, the value and what would be
    valid."""


def nearest(value: object, options: Iterable[str]) -> str:
    """A hint for an unknown name: the closest of `options`, or all of them when nothing is close."""
    options = sorted(str(option) for option in options)
    close = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(options)}"


def choose(field: str, value: Value, options: Iterable[str]) -> Value:
    """`value` if it is one of `options`.

    Raises:
      InputError: naming `field`, `value` and the nearest option.
    """
    options = list(options)
    if value not in options:
        raise InputError(f"{field}: unknown value {value!r}; {nearest(value, options)}")
    return value
