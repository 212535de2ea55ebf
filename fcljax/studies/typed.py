"""Read structured YAML as dataclasses: every value has its annotated type, and an
unknown key is an error."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from fcljax.errors import InputError, Value, choose, nearest

KINDS: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def read_typed(kind: type[Value], values: Mapping[str, Any], file: str) -> Value:
    """Return a dataclass from the content of a file; dataclasses within it, lists and
    mappings included.

    Raises:
      InputError: one line with the file, the place in it, and the nearest key for an
        unknown one.
    """
    return _filled(kind, values, file, ": ")


def converted(kind: Any, value: Any, where: str) -> Any:
    """Convert a value of YAML to the annotated type.

    Raises:
      InputError: naming the place.
    """
    arguments = typing.get_args(kind)
    if kind is Any or (value is None and types.NoneType in arguments):
        return value
    if typing.get_origin(kind) is Literal:
        return choose(where, value, arguments)
    # of a union such as int | list[int] the first member that matches is taken; None
    # was handled above
    kinds = [kind]
    if typing.get_origin(kind) is types.UnionType:
        kinds = [member for member in arguments if member is not types.NoneType]
    kind = next((member for member in kinds if _matches(value, member)), None)
    if kind is None:
        expected = " or ".join(KINDS[_class(member)] for member in kinds)
        raise InputError(f"{where}: {value!r} is not {expected}")
    if dataclasses.is_dataclass(kind):
        return _filled(kind, value, where, ".")
    if isinstance(value, list):
        item_kind = Any
        if typing.get_args(kind):
            item_kind = typing.get_args(kind)[0]
        return [converted(item_kind, item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        item_kind = typing.get_args(kind)[1]
        return {str(key): converted(item_kind, item, f"{where}.{key}") for key, item in value.items()}
    return kind(value)


def _class(kind: Any) -> Any:
    """Return the class that YAML has for a type."""
    if dataclasses.is_dataclass(kind):
        return dict
    return typing.get_origin(kind) or kind


def _matches(value: object, kind: Any) -> bool:
    """Check whether a value of YAML may stand for this type."""
    # YAML 1.1 wants a point in a float, so PyYAML reads 1e-3 as text
    if kind is float and isinstance(value, str):
        return re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+", value) is not None
    accepted = (int, float) if kind is float else _class(kind)
    # to Python True is an int, but `seeds: yes` is a mistake
    return isinstance(value, accepted) and not isinstance(value, bool)


def _filled(kind: Any, values: Mapping[str, Any], where: str, mark: str) -> Any:
    """Return a dataclass from a mapping; `mark` stands between `where` and a key in
    messages."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    # before the missing keys: a mistyped key would otherwise be reported as missing
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: unknown key {name!r}; {nearest(name, fields)}")
    missing = dataclasses.MISSING
    for name, field in fields.items():
        if name not in values and field.default is missing and field.default_factory is missing:
            raise InputError(f"{where}: the key {name!r} is missing")
    filled = {
        name: converted(fields[name].type, value, f"{where}{mark}{name}") for name, value in values.items()
    }
    return kind(**filled)
