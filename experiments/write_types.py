"""Writes what editors and type checkers know of the package, from the tables that the program reads.

    python experiments/write_types.py

Writes fcljax/run_options.py, the keyword options of `fcljax.run` and `fcljax.fedavg`, and prints the block of
imports that fcljax/__init__.py has for type checkers. tests/test_types.py fails when one is not up to date.
"""

import dataclasses
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

from jaxtyping import AbstractArray

import fcljax
from fcljax import config
from fcljax.adapters import ADAPTERS
from fcljax.choices import CHOICES, options_of
from fcljax.methods import METHODS
from fcljax.settings import AggregationOptions

FILE = Path(fcljax.__file__).parent / "run_options.py"
# arguments of `fcljax.run` that have names there
NAMED = ("method", "dataset", "backbone", "partition", "tasks")
# options that Python takes as lists too
LISTS = {
    "class_order": "str | Sequence[Any]",
    "classes": "str | Sequence[Any]",
    "task_sizes": "str | Sequence[int]",
}

# objects that Python takes for a choice
OBJECTS = {
    "attack": ("Attack",),
    "aggregator": ("MergingRule",),
    "lr_schedule": ("LearningRateSchedule",),
    "optimiser": ("ClientOptimiser", "OptaxOptimiser"),
    "server_optimiser": ("ServerOptimiser", "OptaxOptimiser"),
    "task_pool": ("TaskPool",),
}

HEAD = '''"""The keyword options of `fcljax.run` and `fcljax.fedavg`, for editors.

Written by experiments/write_types.py. What a method reads, and its defaults: `fcljax run METHOD --help`.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from fcljax.types import (
    Attack,
    ClientOptimiser,
    LearningRateSchedule,
    MergingRule,
    OptaxOptimiser,
    ServerOptimiser,
    TaskPool,
)


class MergingOptions(TypedDict, total=False):
    """How the server merges uploads."""

{merging}

class RunOptions(MergingOptions, total=False):
    """Options of `fcljax run METHOD`, under the names that they have there."""

{run}'''


def run_options() -> dict[str, str]:
    """The type of each keyword option of a run of the package's methods, as Python writes it."""
    found: dict[str, list[Any]] = {}
    for method, entry in METHODS.items():
        for adapter in ADAPTERS.keys() - entry.excludes.keys():
            for kind in config.option_groups(method, adapter).values():
                for field in dataclasses.fields(kind):
                    found.setdefault(field.name, []).append(field.type)
    written = {name: _union(kinds) for name, kinds in found.items() if name not in (*NAMED, *CHOICES)}
    options = {name: _union([kind]) for name, kind in options_of(*CHOICES).items() if name not in CHOICES}
    choices = {name: _choice(name) for name in CHOICES if name not in NAMED}
    return dict(sorted((options | written | choices | LISTS).items()))


def merging_names() -> set[str]:
    """Return the options by which the server merges uploads, those of its choices included."""
    names = {field.name for field in dataclasses.fields(AggregationOptions)}
    return names | options_of(*names & CHOICES.keys()).keys()


def _choice(name: str) -> str:
    """The type of an option that has options of its own: a name of its table, or an object."""
    names = list(CHOICES[name])
    if any(":" in entry for entry in names):
        return "str"
    return " | ".join([f"Literal[{', '.join(map(repr, names))}]", *OBJECTS.get(name, ())])


def _union(kinds: list[Any]) -> str:
    """One type of the types that a name has in several methods."""
    parts: dict[str, list[Any]] = {}
    for kind in kinds:
        for each in typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,):
            if isinstance(each, type) and issubclass(each, AbstractArray):
                continue  # a learning rate as data, which a search makes and no user gives
            if typing.get_origin(each) is typing.Literal:
                parts.setdefault("Literal", []).extend(typing.get_args(each))
            else:
                parts.setdefault("None" if each is type(None) else each.__name__, [])
    values = list(dict.fromkeys(parts.pop("Literal", [])))
    # "file:PATH" stands for any text of that form
    if any(":" in value or "," in value for value in values):
        parts["str"] = []
    elif values:
        parts[f"Literal[{', '.join(map(repr, values))}]"] = []
    return " | ".join(sorted(parts, key=lambda name: (name == "None", name)))


def import_block() -> str:
    """The imports of fcljax/__init__.py for type checkers."""
    lines = ["if TYPE_CHECKING:  # isort: off"]
    lines += [f"    from fcljax import {name} as {name}" for name in fcljax._SUBMODULES]
    for module, names in fcljax._MODULES.items():
        aliases = [f"{name} as {name}" for name in names]
        line = f"    from {module} import {', '.join(aliases)}"
        if len(line) <= 110:
            lines.append(line)
        else:
            lines += [f"    from {module} import (", *(f"        {alias}," for alias in aliases), "    )"]
    return "\n".join(lines) + "\n"


def _fields(options: dict[str, str]) -> str:
    """Return the lines of a TypedDict."""
    # the formatter breaks a long type only between parentheses
    return "".join(f"    {name}: ({kind})\n" for name, kind in options.items())


def main() -> None:
    """Write the options, and print the imports."""
    merging = merging_names()
    options = run_options()
    of_merging = {name: kind for name, kind in options.items() if name in merging}
    of_run = {name: kind for name, kind in options.items() if name not in merging}
    text = HEAD.format(merging=_fields(of_merging), run=_fields(of_run))
    FILE.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(FILE)], check=False)
    print(import_block())


if __name__ == "__main__":
    main()
