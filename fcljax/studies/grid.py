"""A grid of runs: which runs a file of `fcljax sweep` asks for. Pure; `sweeps.py` makes the runs.

    method: [fppl, fedavg]           # one, or several
    base: {tasks: 5, clients: 10}    # options that all runs have
    grid:                            # options, each with a list of values: all combinations
      alpha: [0.1, 0.5]
      lr: [0.001, 0.01]
    runs:                            # variants by name, each combined with the grid
      - {name: plain}
      - {name: faulty, faults: drop=0.1}
      - {name: other, method: ewc, adapter: lora}
    seeds: [1, 2, 3]                 # or a number of them, from base's seed on
    slurm: {partition: gpu, gpus: 1} # of --engine slurm; `engines.SlurmOptions`
    ray: {gpus: 1}                   # of --engine ray; `engines.RayOptions`

Options are those of `fcljax run METHOD`, by the names that `--config` reads. A variant's options win over
base's; nothing stands in two places otherwise. Everything but a method may be left out.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fcljax import config
from fcljax.config import RunConfig
from fcljax.errors import InputError, choose
from fcljax.studies.seeds import parse_seeds

KEYS = ("method", "base", "grid", "runs", "seeds", "slurm", "ray")
MOST_RUNS = 10_000  # more are rather a mistake
MOST_OF_PART, MOST_OF_NAME = 40, 120  # characters of a value in a folder's name, and of the name
PLAIN = re.compile(rf"[A-Za-z0-9+-][A-Za-z0-9.+-]{{0,{MOST_OF_PART - 1}}}")


class Planned(NamedTuple):
    """A run to make: the name of its folder, its method, the options that the file gives it, and all."""

    name: str
    method: str
    given: dict[str, Any]
    cfg: RunConfig


class Sections(NamedTuple):
    """A file's content, each part of its kind."""

    methods: list[str]
    base: dict[str, Any]
    grid: dict[str, list]
    runs: list[dict[str, Any]]
    seeds: list[int] | None


class Point(NamedTuple):
    """One run's options by the place in the file that they come from; those that come later win."""

    method: str
    variant: str | None
    layers: dict[str, dict[str, Any]]

    def given(self) -> dict[str, Any]:
        """The options, whichever place they come from."""
        return {name: value for layer in self.layers.values() for name, value in layer.items()}


def plan(path: str | Path) -> list[Planned]:
    """All runs of a file, in its order, seeds innermost.

    Raises:
      InputError: one line that names the file, the place in it, the option and the value.
    """
    return plan_of(config.load_yaml(path), str(path))


def plan_of(values: Mapping[str, Any], where: str) -> list[Planned]:
    """As `plan`, of a file's content; `where` is its name for messages."""
    try:
        parts = sections(values)
        planned = [_planned(point, list(parts.grid)) for point in _points(parts)]
        _check_different(planned)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return planned


def sections(values: Mapping[str, Any]) -> Sections:
    """A file's content in its parts.

    Raises:
      InputError: for a part of another kind, an unknown one, or an option in two places.
    """
    for key in values:
        choose("key", key, KEYS)
    base = _options(values.get("base"), "base")
    grid = {name: _values(name, given) for name, given in _options(values.get("grid"), "grid").items()}
    runs = _variants(values.get("runs"))
    for place, options in [("base", base), *((_place(run), run) for run in runs)]:
        twice = next((name for name in options if name in grid), None)
        if twice:
            raise InputError(f"grid.{twice}: {place} has it too; leave it in one place")
    for place, options in [("grid", grid), *((_place(run), run) for run in runs)]:
        if "seed" in options:
            raise InputError(f"{place}.seed: list them as seeds: [1, 2, 3]")
    seeds = None if values.get("seeds") is None else _seeds(values["seeds"], base.get("seed"))
    parts = Sections(_methods(values.get("method"), runs), base, grid, runs, seeds)
    count = max(1, len(runs)) * max(1, len(parts.methods)) * len(seeds or [0])
    if count * math.prod(map(len, grid.values())) > MOST_RUNS:
        raise InputError(f"grid: it makes more than {MOST_RUNS:,} runs")
    return parts


def _options(given: object, place: str) -> dict[str, Any]:
    """A mapping of options; none is an empty one."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{place}: {given!r} is no mapping of options to values")
    if "method" in given and not place.startswith("runs"):
        raise InputError(f"{place}.method: it stands beside {place}, not in it: method: NAME, or a list")
    return given


def _values(name: str, given: object) -> list:
    if not isinstance(given, list) or not given:
        raise InputError(f"grid.{name}: {given!r} is no list of values; for one value use base")
    return given


def _variants(given: object) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list) or not given:
        raise InputError(f"runs: {given!r} is no list of mappings, such as - {{name: plain, lr: 0.01}}")
    runs = [_options(run, f"runs[{place + 1}]") for place, run in enumerate(given)]
    for place, run in enumerate(runs):
        if not isinstance(run.get("name"), str | int) or not str(run["name"]).strip():
            raise InputError(f"runs[{place + 1}].name: each of runs needs a name; this has none")
    names = [str(run["name"]) for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"runs: {twice!r} is the name of two of them")
    return runs


def _place(run: Mapping[str, Any]) -> str:
    return f"runs[{run['name']}]"


def _methods(given: object, runs: list[dict[str, Any]]) -> list[str]:
    """The methods of all runs that do not bring their own."""
    methods = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(method, str) for method in [*methods, *(run.get("method", "") for run in runs)]):
        raise InputError(f"method: {given!r} is no name of a method and no list of them")
    own = bool(runs) and all("method" in run for run in runs)
    if not methods and not own:
        raise InputError("method: none given; give one, such as method: fppl")
    if methods and own:
        raise InputError(f"method: nothing reads {given!r}: each of runs has a method of its own")
    return methods


def _seeds(given: object, first: object) -> list[int]:
    """As `fcljax run --seeds` reads them."""
    listed = isinstance(given, list)
    if not all(
        isinstance(seed, int) and not isinstance(seed, bool) for seed in (given if listed else [given])
    ):
        raise InputError(
            f"seeds: {given!r} is no number of seeds and no list of them, such as 3 or [1, 2, 3]"
        )
    if listed and first is not None:
        raise InputError(f"base.seed: nothing reads {first!r}: seeds lists them all")
    begin: int = config.convert("base.seed", int, RunConfig.seed if first is None else first)
    return parse_seeds(",".join(map(str, given)) + "," if listed else str(given), begin)


def _points(parts: Sections) -> Iterator[Point]:
    """All runs of a file, before their options are read."""
    for run in parts.runs or [{}]:
        variant = str(run["name"]) if run else None
        own = {name: value for name, value in run.items() if name not in ("name", "method")}
        for method in [run["method"]] if "method" in run else parts.methods:
            for values in itertools.product(*parts.grid.values()):
                grid = dict(zip(parts.grid, values, strict=True))
                for seed in parts.seeds or [None]:
                    seeds = {} if seed is None else {"seed": seed}
                    layers = {"base": parts.base, f"runs[{variant}]": own, "grid": grid, "seeds": seeds}
                    yield Point(method, variant, layers)


def _planned(point: Point, grid: list[str]) -> Planned:
    given = point.given()
    try:
        cfg = config.from_mapping(point.method, given, "options")
    except InputError as error:
        said = str(error).removeprefix("options: ")
        raise InputError(f"{_blamed(point, said)}: {said}") from None
    given = {option: getattr(cfg, option) for option in given}  # 1e-3 is text in YAML
    values = [(option, given[option]) for option in grid]
    return Planned(name_of(point.method, point.variant, values, cfg.seed), point.method, given, cfg)


def _blamed(point: Point, message: str) -> str:
    """The place in the file that has the option of which a message speaks, with the run where none has."""
    for place, options in reversed(point.layers.items()):
        for name in options:
            spelt = re.escape(name).replace("_", "[_-]")  # a message may have it as it is typed: --lora-rank
            if re.search(rf"(^(--)?|unknown key '){spelt}\b", message):
                return f"{place}.{name}"
    if message.startswith("method: "):
        return f"the method {point.method}"
    about = [point.method, *([point.variant] if point.variant else []), str(point.layers["grid"] or "")]
    return f"the run {' '.join(about).strip()}"


def name_of(method: str, variant: str | None, values: list[tuple[str, object]], seed: int) -> str:
    """The name of a run's folder: method, variant, what the grid varies, seed. It depends on the run and the
    grid's options alone, so that further values and variants leave it as it is; two runs never share one."""
    parts = [method, *([] if variant is None else [variant])]
    named = [f"{option.replace('_', '-')}-{_part(str(value))}" for option, value in values]
    name = "_".join([*map(_part, parts), *named, f"seed-{seed}"])
    return name if len(name) <= MOST_OF_NAME else f"{name[: MOST_OF_NAME - 13]}-{_digest(name, 12)}"


def _part(text: str) -> str:
    """A value in a folder's name: itself, or what can be read of it and a part of its sha256."""
    if PLAIN.fullmatch(text):
        return text
    words = re.sub(r"[^A-Za-z0-9.+-]+", "-", Path(text).name).strip(".-")[: MOST_OF_PART - 7]
    return f"{words}-{_digest(text, 6)}"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _check_different(planned: list[Planned]) -> None:
    """Check that no two runs are the same one.

    Raises:
      InputError: naming two that are.
    """
    found: dict[tuple[str, RunConfig], str] = {}
    for run in planned:
        other = found.setdefault((run.method, run.cfg), run.name)
        if other is not run.name:
            raise InputError(f"grid: {other} and {run.name} are the same run, with the same settings")
    names = [run.name for run in planned]
    if len(set(names)) < len(names):  # as likely as that two sha256 begin with the same 24 bits
        raise InputError("grid: two runs would have the same folder; change a variant's name or a value")
