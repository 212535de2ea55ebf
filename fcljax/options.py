"""Fields of dataclasses of settings: what a value may be stands beside the field, as its metadata.

The rule for fields that say nothing: whole numbers are at least 1, other numbers finite and at least 0; and
both are numbers of 32 bits, which is what devices compute with. A default of `None`, 0, "" or "auto" may
stand for "none" or "automatic", and `option(..., unset=...)` says which.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import math
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from fcljax.errors import InputError, Value

LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3.4e38


def option(
    default: Value,
    *,
    least: float | int | None = None,
    most: float | int | None = None,
    below: float | None = None,
    positive: bool = False,
    only: tuple[str, ...] = (),
    needs: str = "",
    unset: str = "",
    learning_rate: bool = False,
) -> Value:
    """A field of settings with a range of its own; typed, as `dataclasses.field` is, like its default.

    Args:
      default: of the field; a field that may be None has its range all the same.
      least: the smallest value, where it is not the rule's.
      most: the largest value.
      below: what a value must be less than.
      positive: 0 is no value either.
      only: the option that decides whether this one is read, and its values with which it is.
      needs: the option without which nothing reads this one: it must not be at its default.
      unset: what the default means, for the help. In a file of settings null stands for this default.
      learning_rate: whether `--scale fit` and `--rate-factor` multiply it.
    """
    metadata = {"least": least, "most": most, "below": below, "positive": positive}
    metadata |= {
        "only": only,
        "needs": needs,
        "unset": unset,
        "default": default,
        "learning_rate": learning_rate,
    }
    return dataclasses.field(default=default, metadata=metadata)


def shown_default(field: dataclasses.Field, value: object) -> str:
    """A default as help shows it: with its meaning where it stands for "none" or "automatic"."""
    meaning = field.metadata.get("unset", "")
    if value is None or value == "":
        return meaning or "none"
    if meaning not in ("", value) and value == field.metadata["default"]:
        return f"{value}, {meaning}"
    return str(value)


def whole_number(text: str) -> int | None:
    """The number that decimal digits without a sign say, up to 20 of them; None for any other text, such as a
    superscript two, which `str.isdigit` takes and `int` does not."""
    digits = text.strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= 20:
        return int(digits)
    return None


def flag(name: str) -> str:
    """A field's name as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def fields_of(options: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass of settings."""
    return dataclasses.fields(options)


@functools.cache
def help_of(options: type) -> dict[str, str]:
    """Field -> help: the docstring below the field, in the class or in those that it derives from."""
    found = {}
    for kind in reversed(options.__mro__):
        for part in vars(kind).get("parts", ()):  # options of what was chosen (`choices.class_with`)
            found |= help_of(part)
        if not dataclasses.is_dataclass(kind) or "__annotations__" not in vars(kind):
            continue
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError, ValueError):  # a class that is made while the program runs
            continue
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def load(package: str, part: Any) -> Any:
    """What "MODULE:NAME" names in a package; anything but text is returned as it is."""
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def replaced(options: Value, **values: Any) -> Value:
    """Options, a frozen dataclass, with other values of some fields."""
    return dataclasses.replace(options, **values)  # pyrefly: ignore[bad-specialization]


def check_ranges(options: object) -> None:
    """Check that the numbers of a dataclass of settings lie where they make sense.

    Raises:
      InputError: naming the field, its value and the nearest valid one.
    """
    for field in fields_of(type(options)):
        check_value(field, getattr(options, field.name))


def check_read(options: object, usual: object | None = None, given: Collection[str] = ()) -> None:
    """Check that something reads every option that is not as usual, or that was given.

    Args:
      usual: options with the values that pass though nothing reads them; the dataclass's defaults if None.
      given: names of options that the user typed, whatever their values.

    Raises:
      InputError: naming the first option that nothing reads, and what would read it.
    """
    if usual is None:
        usual = type(options)()
    for field in fields_of(type(options)):
        changed = getattr(options, field.name) != getattr(usual, field.name)
        if not is_read(field, options) and (changed or field.name in given):
            raise InputError(f"{field.name}: {_what_reads(field, options)}")


def is_read(field: dataclasses.Field, options: object) -> bool:
    """Check whether the other options have values with which a field is read."""
    decider, *readers = field.metadata.get("only") or ("",)
    needed = field.metadata.get("needs", "")
    if needed and getattr(options, needed) == _default(type(options), needed):
        return False
    return not decider or getattr(options, decider) in readers


def _default(options: type, name: str) -> object:
    """Return the default that a field was written with, whatever a preset makes of it."""
    field = next(field for field in fields_of(options) if field.name == name)
    return field.metadata.get("default", field.default)


def _what_reads(field: dataclasses.Field, options: object) -> str:
    """Return which values of other options would make a field read."""
    if needed := field.metadata.get("needs", ""):
        (other,) = (other for other in fields_of(type(options)) if other.name == needed)
        example = {int: " 1", float: " 0.1"}.get(other.type, "")  # pyrefly: ignore[no-matching-overload]
        return (
            f"only {flag(needed)} reads it, and {getattr(options, field.name)!r} was given; nearest: "
            f"{flag(needed)}{example}"
        )
    decider, *readers = field.metadata["only"]
    return (
        f"{only_read_by(readers)}, and {decider} is {getattr(options, decider)!r}; nearest: "
        f"{flag(decider)} {readers[0]}"
    )


def only_read_by(names: Sequence[str]) -> str:
    """Return that these values of an option, and no others, read another option."""
    if len(names) == 1:
        return f"only {names[0]} reads it"
    return f"only {', '.join(names[:-1])} and {names[-1]} read it"


def check_value(field: dataclasses.Field, value: object) -> None:
    """Check one number against its field; anything but a number passes.

    Raises:
      InputError: naming the field, the value and the nearest valid one.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    name = field.name
    rule = field.metadata
    whole = "float" not in str(field.type)
    # what holds where the field says nothing
    least: float | int = 0
    most: float | int = LARGEST_FLOAT
    if whole:
        least = 1
        most = LARGEST_INT
    if rule.get("least") is not None:
        least = rule["least"]
    if rule.get("most") is not None:
        most = rule["most"]
    if whole and value < least:
        raise InputError(f"{name}: {_shown(value)} is too small; nearest valid value: {least}")
    if not least <= value < math.inf or (rule.get("positive") and not value):
        wanted = f"{least} or more"
        if rule.get("positive"):
            wanted = "positive"
        if field.default:
            wanted += f", such as {field.default}"
        raise InputError(f"{name}: {value} must be finite and {wanted}")
    if value > most:
        raise InputError(f"{name}: {_shown(value)} is too large; nearest valid value: {most}")
    below = rule.get("below")
    if below is not None and value >= below:
        raise InputError(f"{name}: {value} is too large; it must be below {below}")


def _shown(value: float | int) -> str:
    """A number, of which Python does not write a whole one of thousands of digits."""
    if isinstance(value, float) or abs(value) < 10**40:
        return str(value)
    return f"a number of {value.bit_length()} bits"


@dataclasses.dataclass(frozen=True)
class SurrogateOptions:
    """Options of methods that need images of another data set; runs with these fields have them as
    `Frozen.surrogate`."""

    surrogate: str = "other"
    """Data set of the surrogate images, named as with --dataset; other means glyphs, or
    digits in a run on glyphs. Their labels are not read."""
    surrogate_images: int = 2000
    """Number of surrogate training images, drawn by the seed."""
