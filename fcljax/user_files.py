"""Python files of the user's own, which are programs: loading one runs it."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from fcljax.errors import InputError

Loaded = TypeVar("Loaded")


def is_program(value: object) -> bool:
    """Check whether a value names a Python file, as FILE.py or FILE.py:NAME."""
    return isinstance(value, str) and value.partition(":")[0].endswith(".py")


def load_object(option: str, value: str) -> object:
    """Return the object of FILE.py:NAME; the default name is the option's in capitals.

    Raises:
      InputError: for a file that cannot be loaded or has no such name.
    """
    place, _, given = value.partition(":")
    name = given or option.upper()
    module = load_file(option, place)
    if not hasattr(module, name):
        raise InputError(f"{option}: {place!r} has no {name}")
    return getattr(module, name)


@functools.cache
def load_file(option: str, place: str) -> ModuleType:
    """Return the module of a file, which is run once.

    Raises:
      InputError: naming the option and the file, if there is none or it raises.
    """
    if not Path(place).is_file():
        raise InputError(f"{option}: no file {place!r}")
    # the whole path as the module's name: no other module can have it
    name = str(Path(place).resolve())
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise InputError(f"{option}: {place!r} is not a Python file")
    # in sys.modules before it runs: dataclasses look their module up there, and
    # `inspect.getsource`, by which `help_of` reads help, does too
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    guarded(option, place, functools.partial(spec.loader.exec_module, module))
    return module


def guarded(option: str, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Return what `load` does.

    Raises:
      InputError: naming the option, the file and what it raises while it is loaded.
    """
    try:
        return load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{option}: {name!r} cannot be loaded: {reason}") from error
