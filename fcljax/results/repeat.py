"""Say what repeats a run: its command, and the versions that made it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fcljax import config
from fcljax.errors import InputError


def command(settings: dict[str, Any], given: Collection[str] | None) -> list[str]:
    """Return the words of the `fcljax run` command for these settings.

    Args:
      settings: all of them, with the method.
      given: names of those to give, besides the seed (`names_to_give`); None: all.
    """
    words = ["fcljax", "run", settings["method"]]
    for name, value in settings.items():
        if name == "method" or (given is not None and name not in {"seed", *given}):
            continue
        option = name.replace("_", "-")
        if value is True:
            words.append(f"--{option}")
        elif value is False:
            words.append(f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def software_of(summary: Mapping[str, Any]) -> str:
    """Return the versions that made a run as text; "" for runs that do not name them."""
    versions = dict(summary.get("software") or {})
    if not versions:
        return ""
    package = versions.pop("fcljax", "?")
    commit = versions.pop("commit", None)
    if commit:
        package = f"{package} at commit {commit}"
    return ", ".join(f"{name} {version}" for name, version in {"fcljax": package, **versions}.items())


def all_software_of(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the different versions that made runs, as `software_of` each."""
    return sorted({software_of(summary) for summary in summaries} - {""})


def names_to_give(settings: dict[str, Any]) -> list[str] | None:
    """Return the names of the settings that, given alone, lead to all of `settings`:
    those that differ from the method's defaults. None if this version does not know the
    method or a setting. Imports the method, and with it JAX."""

    def resolved(values: dict[str, Any]) -> dict[str, Any]:
        run = config.from_mapping(settings["method"], values, "settings")
        return config.plain(config.resolve(run))

    # these two decide the defaults of others, so they are always given
    chosen = {name: settings[name] for name in ("adapter", "fidelity") if name in settings}
    try:
        defaults = resolved(chosen)
        given = chosen | {name: value for name, value in settings.items() if defaults.get(name) != value}
        # proved, not assumed: a command that leads elsewhere would be worse than a long
        # one
        if resolved(given) == settings:
            return list(given)
        return None
    except (InputError, OSError):
        return None
