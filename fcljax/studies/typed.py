"""Structured YAML as dataclasses: every value has its annotated type, and an unknown key is an error."""

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
    """A dataclass from the content of a file; dataclasses within it, lists and mappings included.

    Raises:
      InputError: one line with the file, the place in it, and the nearest key for an unknown one.
    """
    return _filled(kind, values, file, ": ")


def converted(kind: Any, value: Any, where: str) -> Any:
    """A value of YAML as one of the annotated type.

    Raises:
      InputError: naming the place.
    """
    inner = typing.get_args(kind)
    if kind is Any or (value is None and types.NoneType in inner):
        return value
    if typing.get_origin(kind) is Literal:
        return choose(where, value, inner)
    kinds = [each for each in inner if each is not types.NoneType] if _is_union(kind) else [kind]
    kind = next((each for each in kinds if _fits(value, each)), None)
    if kind is None:
        wanted = " or ".join(KINDS[_class(each)] for each in kinds)
        raise InputError(f"{where}: {value!r} is not {wanted}")
    if dataclasses.is_dataclass(kind):
        return _filled(kind, value, where, ".")
    if isinstance(value, list):
        of = typing.get_args(kind)[0] if typing.get_args(kind) else Any
        return [converted(of, each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, dict):
        of = typing.get_args(kind)[1]
        return {str(key): converted(of, each, f"{where}.{key}") for key, each in value.items()}
    return kind(value)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) is types.UnionType


def _class(kind: Any) -> Any:
    """The class that YAML has for a type."""
    return dict if dataclasses.is_dataclass(kind) else typing.get_origin(kind) or kind


def _fits(value: object, kind: Any) -> bool:
    if kind is float and isinstance(value, str):  # to YAML 1.1, 1e-3 is text
        return re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+", value) is not None
    accepted = (int, float) if kind is float else _class(kind)
    return isinstance(value, accepted) and not isinstance(value, bool)


def _filled(kind: Any, values: Mapping[str, Any], where: str, mark: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: unknown key {name!r}; {nearest(name, fields)}")
    missing = dataclasses.MISSING
    for name, field in fields.items():
        if name not in values and field.default is missing and field.default_factory is missing:
            raise InputError(f"{where}: the key {name!r} is missing")
    return kind(
        **{name: converted(fields[name].type, each, f"{where}{mark}{name}") for name, each in values.items()}
    )
