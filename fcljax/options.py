"""Fields of dataclasses of settings: what a value may be stands beside the field, as its metadata.

The rule for fields that say nothing: whole numbers are at least 1, other numbers finite and at least 0; and
both are numbers of 32 bits, which is what devices compute with.
"""

import dataclasses
import math

from fcljax.errors import InputError, Value

LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 3.4e38


def option(
    default: Value,
    *,
    least: float | int | None = None,
    most: float | int | None = None,
    below: float | None = None,
    positive: bool = False,
) -> Value:
    """A field of settings with a range of its own; typed, as `dataclasses.field` is, like its default.

    Args:
      default: of the field; a field that may be None has its range all the same.
      least: the smallest value, where it is not the rule's.
      most: the largest value.
      below: what a value must be less than.
      positive: 0 is no value either.
    """
    limits = {"least": least, "most": most, "below": below, "positive": positive}
    return dataclasses.field(default=default, metadata=limits)


def flag(name: str) -> str:
    """A field's name as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def resolved(value: Value | None) -> Value:
    """The value of an option whose None stands for the method's or its fidelity preset's.

    Raises:
      InputError: if it is None still.
    """
    if value is None:
        raise InputError("options: None, where a value is needed that `config.resolve` fills in")
    return value


def fields_of(options: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass of settings."""
    return dataclasses.fields(options)


def check_ranges(options: object) -> None:
    """Check that the numbers of a dataclass of settings lie where they make sense.

    Raises:
      InputError: naming the field, its value and the nearest valid one.
    """
    for field in fields_of(type(options)):
        check_value(field, getattr(options, field.name))


def check_value(field: dataclasses.Field, value: object) -> None:
    """Check one number against its field; anything but a number passes.

    Raises:
      InputError: naming the field, the value and the nearest valid one.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    name, rule, whole = field.name, field.metadata, "float" not in str(field.type)
    least, below = rule.get("least"), rule.get("below")
    least = (1 if whole else 0) if least is None else least
    if whole and value < least:
        raise InputError(f"{name}: {_shown(value)} is too small; nearest valid value: {least}")
    if not least <= value < math.inf or (rule.get("positive") and not value):
        wanted = "positive" if rule.get("positive") else f"{least} or more"
        example = f", such as {field.default}" if field.default else ""
        raise InputError(f"{name}: {value} must be finite and {wanted}{example}")
    most = rule.get("most")
    most = (LARGEST_INT if whole else LARGEST_FLOAT) if most is None else most
    if value > most:
        raise InputError(f"{name}: {_shown(value)} is too large; nearest valid value: {most}")
    if below is not None and value >= below:
        raise InputError(f"{name}: {value} is too large; it must be below {below}")


def _shown(value: float | int) -> str:
    """A number, of which Python does not write a whole one of thousands of digits."""
    small = isinstance(value, float) or abs(value) < 10**40
    return str(value) if small else f"a number of {value.bit_length()} bits"


@dataclasses.dataclass(frozen=True)
class SurrogateOptions:
    """Of methods that need images of another data set: a run's settings with these fields get them, as
    `Frozen.surrogate`."""

    surrogate: str = "glyphs"  # data set of the surrogate images, as --dataset names it; labels are not read
    surrogate_images: int = 2000  # how many of its training images are used, drawn by the seed
