"""The command that repeats a run."""

import dataclasses
from typing import Any

from fcljax import config
from fcljax.errors import InputError


def command(settings: dict[str, Any]) -> list[str]:
    """The words of the `fcljax run` command for these settings: only the options that differ from the
    defaults, or all of them if the method or a setting is not known here."""
    method, changed = settings["method"], _changed(settings)
    words = ["fcljax", "run", method]
    for name, value in settings.items():
        if name == "method" or (changed is not None and name not in {"seed", *changed}):
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def _changed(settings: dict[str, Any]) -> set[str] | None:
    """Names of settings that, given alone, lead to all of `settings`; None if there are none."""

    def resolved(values: dict[str, Any]) -> dict[str, Any]:
        made = config.from_mapping(settings["method"], values, "settings")
        return dataclasses.asdict(config.resolve(made))

    chosen = {name: settings[name] for name in ("adapter", "fidelity") if name in settings}
    try:
        usual = resolved(chosen)
        given = chosen | {name: value for name, value in settings.items() if usual.get(name) != value}
        return set(given) if resolved(given) == settings else None
    except (InputError, OSError):
        return None
