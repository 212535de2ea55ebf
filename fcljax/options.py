"""Fields of dataclasses of settings: what a value may be stands beside the field, as its metadata.

The rule for fields that say nothing: whole numbers are at least 1, other numbers finite and at least 0.
"""

import dataclasses
import math
from typing import Any, TypeVar

from fcljax.errors import InputError

Value = TypeVar("Value")


def option(
    default: Any, *, least: int | float | None = None, most: int | float | None = None, positive: bool = False
) -> Any:
    """A field of settings with a range of its own.

    Args:
      default: of the field.
      least: the smallest value, where it is not the rule's.
      most: the largest value.
      positive: 0 is no value either.
    """
    return dataclasses.field(default=default, metadata={"least": least, "most": most, "positive": positive})


def resolved(value: Value | None) -> Value:
    """The value of an option whose None stands for a fidelity preset's.

    Raises:
      InputError: if it is None still.
    """
    if value is None:
        raise InputError("options: one that the fidelity preset decides is None; `config.resolve` fills it in")
    return value


def check_ranges(options: Any) -> None:
    """Check that the numbers of a dataclass of settings lie where they make sense.

    Raises:
      InputError: naming the field, its value and the nearest valid one.
    """
    for field in dataclasses.fields(options):
        _check(field, getattr(options, field.name))


def _check(field: dataclasses.Field, value: Any) -> None:
    if type(value) not in (int, float):
        return
    name, rule = field.name, field.metadata
    least, most = rule.get("least"), rule.get("most")
    if type(value) is int:
        least = 1 if least is None else least
        if value < least:
            raise InputError(f"{name}: {value} is too small; nearest valid value: {least}")
    else:
        least, positive = least or 0, rule.get("positive")
        if not (least <= value < math.inf and (value or not positive)):
            wanted = "positive" if positive else f"{least} or more"
            example = f", such as {field.default}" if field.default else ""
            raise InputError(f"{name}: {value} must be finite and {wanted}{example}")
    if most is not None and value > most:
        raise InputError(f"{name}: {value} is too large; nearest valid value: {most}")
