"""Fields of dataclasses of settings: what a value may be stands beside the field, as
its metadata.

A field that states no range has the usual one: whole numbers are at least 1, other numbers
finite and at least 0, and both fit in 32 bits, which is what devices compute with. A
default of `None`, 0, "" or "auto" may stand for "none" or "automatic", and `option(...,
unset=...)` says which.
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

# the largest numbers of int32 and, rounded down, of float32
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
    """Make a field of settings with a range. For type checkers it has the type of its
    default, as with `dataclasses.field`.

    Args:
      default: of the field. None is allowed beside a range, which holds for numbers alone.
      least: the smallest value; None: the usual one.
      most: the largest value; None: the usual one.
      below: what a value must be less than.
      positive: whether 0 is refused.
      only: the option that decides whether this one is read, then the values with which it
        is. A value with a colon, such as "mix:NAME", stands for all that begin with "mix:".
      needs: the option that must differ from its default, or nothing reads this one.
      unset: what the default means, for the help. In a settings file null stands for this
        default.
      learning_rate: whether `--scale fit` and `--rate-factor` multiply it.
    """
    metadata = {
        "least": least,
        "most": most,
        "below": below,
        "positive": positive,
        "only": only,
        "needs": needs,
        "unset": unset,
        # a preset may give the field of a run's dataclass another default
        "default": default,
        "learning_rate": learning_rate,
    }
    return dataclasses.field(default=default, metadata=metadata)


def shown_default(field: dataclasses.Field, value: object) -> str:
    """Return a default as help shows it, with its meaning where it stands for "none" or
    "automatic"."""
    meaning = field.metadata.get("unset", "")
    if value is None or value == "":
        return meaning or "none"
    if meaning not in ("", value) and value == field.metadata["default"]:
        return f"{value}, {meaning}"
    return str(value)


def whole_number(text: str) -> int | None:
    """Return the number that up to 20 decimal digits without a sign say; None for any
    other text."""
    digits = text.strip()
    # `str.isdigit` takes a superscript two, which `int` does not
    if digits.isascii() and digits.isdecimal() and len(digits) <= 20:
        return int(digits)
    return None


def flag(name: str) -> str:
    """Return a field's name as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def fields_of(options: type) -> tuple[dataclasses.Field, ...]:
    """Return the fields of a dataclass of settings."""
    return dataclasses.fields(options)


@functools.cache
def help_of(options: type) -> dict[str, str]:
    """Return field -> help: the docstring below the field, in the class or in a base
    class."""
    texts = {}
    for kind in reversed(options.__mro__):
        # options of what was chosen (`choices.class_with`)
        for choice in vars(kind).get("parts", ()):
            texts |= help_of(choice)
        if not dataclasses.is_dataclass(kind) or "__annotations__" not in vars(kind):
            continue
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        # a class that is made while the program runs has no source, and no docstrings
        # either
        except (OSError, TypeError, ValueError):
            continue
        assert isinstance(node, ast.ClassDef)
        # Python drops the strings below fields, so the source is read for them
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def load(package: str, reference: Any) -> Any:
    """Return what "MODULE:NAME" names in a package; anything but text is returned as it
    is."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def replaced(options: Value, **values: Any) -> Value:
    """Return options, a frozen dataclass, with other values of some fields."""
    return dataclasses.replace(options, **values)  # pyrefly: ignore[bad-specialization]


def check_ranges(options: object) -> None:
    """Check that the numbers of a dataclass of settings lie where they make sense.

    Raises:
      InputError: naming the field, its value and the nearest valid one.
    """
    for field in fields_of(type(options)):
        check_value(field, getattr(options, field.name))


def check_read(options: object, usual: object | None = None, typed: Collection[str] = ()) -> None:
    """Check that something reads every option that is not as usual, or that was typed.

    Args:
      options: to check.
      usual: options with the values that pass though nothing reads them; the
        dataclass's defaults if None.
      typed: names of options that the user typed, whatever their values.

    Raises:
      InputError: naming the first option that nothing reads, and what would read it.
    """
    if usual is None:
        usual = type(options)()
    for field in fields_of(type(options)):
        passing = getattr(usual, field.name)
        # a preset must not set such an option alone, so only the written default passes
        if field.metadata.get("needs"):
            passing = field.metadata["default"]
        changed = getattr(options, field.name) != passing
        if (changed or field.name in typed) and not is_read(field, options):
            raise InputError(f"{field.name}: {_what_reads(field, options)}")


def is_read(field: dataclasses.Field, options: object) -> bool:
    """Check whether the options beside a field have values with which it is read."""
    needed = field.metadata.get("needs", "")
    if needed and getattr(options, needed) == _default(type(options), needed):
        return False
    decider, *readers = field.metadata.get("only") or ("",)
    if not decider:
        return True
    value = str(getattr(options, decider))
    # mix:a+b is read by an option whose readers have mix:NAME
    form = value.partition(":")[0] + ":"
    return any(value == reader or reader.startswith(form) for reader in readers)


def deciders(options: type) -> set[str]:
    """Return the options that decide whether others are read."""
    names = set()
    for field in fields_of(options):
        if field.metadata.get("needs"):
            names.add(field.metadata["needs"])
        if field.metadata.get("only"):
            names.add(field.metadata["only"][0])
    return names


def _default(options: type, name: str) -> object:
    """Return the default that a field was written with, whatever a preset makes of it."""
    field = _field(options, name)
    return field.metadata.get("default", field.default)


def _field(options: type, name: str) -> dataclasses.Field:
    """Return the field of a name."""
    return next(field for field in fields_of(options) if field.name == name)


# what an error proposes to type behind a flag, by the type of its option
_EXAMPLES = {int: " 1", float: " 0.1", bool: ""}


def _what_reads(field: dataclasses.Field, options: object) -> str:
    """Return which values of other options would make a field read."""
    needed = field.metadata.get("needs", "")
    if needed:
        needed_type: Any = _field(type(options), needed).type
        example = _EXAMPLES.get(needed_type, f" {needed.upper()}")
        value = getattr(options, field.name)
        return f"only {flag(needed)} reads it, and {value!r} was given; nearest: {flag(needed)}{example}"
    decider, *readers = field.metadata["only"]
    decided = getattr(options, decider)
    return f"{only_read_by(readers)}, and {decider} is {decided!r}; nearest: {flag(decider)} {readers[0]}"


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
    # bool is a subclass of int
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    name = field.name
    limits = field.metadata
    # the type may be `int | None`, and an int is a value of a float field too
    is_integer = "float" not in str(field.type)
    # the usual range
    least: float | int = 0
    most: float | int = LARGEST_FLOAT
    if is_integer:
        least = 1
        most = LARGEST_INT
    if limits.get("least") is not None:
        least = limits["least"]
    if limits.get("most") is not None:
        most = limits["most"]
    if is_integer and value < least:
        raise InputError(f"{name}: {_shown(value)} is too small; nearest valid value: {least}")
    # NaN fails every comparison
    if not least <= value < math.inf or (limits.get("positive") and not value):
        range_text = f"{least} or more"
        if limits.get("positive"):
            range_text = "positive"
        if field.default:
            range_text += f", such as {field.default}"
        raise InputError(f"{name}: {value} must be finite and {range_text}")
    if value > most:
        raise InputError(f"{name}: {_shown(value)} is too large; nearest valid value: {most}")
    below = limits.get("below")
    if below is not None and value >= below:
        raise InputError(f"{name}: {value} is too large; it must be below {below}")


def _shown(value: float | int) -> str:
    """Return a number as text."""
    # Python raises for an int of more than 4,300 digits, and no reader counts 40
    if isinstance(value, float) or abs(value) < 10**40:
        return str(value)
    return f"a number of {value.bit_length()} bits"


@dataclasses.dataclass(frozen=True)
class SurrogateOptions:
    """Options of methods that need images of another data set.

    Runs with these fields have them as `Frozen.surrogate`."""

    surrogate: str = "other"
    """Data set of the surrogate images, named as with --dataset; other means glyphs, or
    digits in a run on glyphs. Their labels are not read."""
    surrogate_images: int = 2000
    """Number of surrogate training images, drawn by the seed."""


@dataclasses.dataclass(frozen=True)
class DecoderOptions:
    """Options of methods that reconstruct images with a masked autoencoder.

    Runs with these fields read the weights into `Frozen.decoder`."""

    decoder: str | None = option(None, unset="the checkpoint's or the packaged one")
    """Decoder weights of a masked autoencoder (`fcljax pretrain-decoder`)."""


@dataclasses.dataclass(frozen=True)
class ClassPromptOptions:
    """Options of methods that read the names of classes.

    Runs with these fields have CLIP's text tower as `Frozen.text`, unless they are
    "none"."""

    class_prompts: str = option("a photo of a {}", unset="none")
    """Prompt of a class for CLIP's text tower, with {} in place of its name, or file:PATH
    with a line "CLASS, tab, PROMPT" for each class."""


@dataclasses.dataclass(frozen=True)
class ContextOptions(ClassPromptOptions):
    """Options of methods that learn context vectors (CoOp)."""

    class_prompts: str = "{}."
    """Prompt of a class behind the context vectors, with {} in place of its name, or
    file:PATH with a line "CLASS, tab, PROMPT" for each class."""
    context_length: int = 4
    """Number of context vectors."""
