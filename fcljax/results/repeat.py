"""The command that repeats a run."""

import dataclasses
from typing import Any

from fcljax import config
from fcljax.errors import InputError


def command(method_name: str, settings: dict[str, Any]) -> list[str]:
    """The words of `fcljax run` for these settings: the options that differ from the defaults, or all options
    where this version does not know the method or one of the settings."""
    given = {"seed": settings.get("seed"), **settings}
    known = _beside_defaults(method_name, settings)
    if known is not None:
        given = {name: value for name, value in given.items() if name == "seed" or name in known}
    return ["fcljax", "run", method_name, *(_option(name, value) for name, value in given.items())]


def _option(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def _beside_defaults(method_name: str, settings: dict[str, Any]) -> set[str] | None:
    """Names of the settings that lead to all of `settings` when they alone are given; None if none do."""
    choosing = {name: settings[name] for name in ("adapter", "fidelity") if name in settings}
    try:
        usual = _resolved(method_name, choosing)
        given = choosing | {name: value for name, value in settings.items() if usual.get(name) != value}
        return set(given) if _resolved(method_name, given) == settings else None
    except (InputError, OSError):
        return None


def _resolved(method_name: str, given: dict[str, Any]) -> dict[str, Any]:
    cfg = config.resolve(method_name, config.from_mapping(method_name, given, "settings"))
    return dataclasses.asdict(cfg)
