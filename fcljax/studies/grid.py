"""Plan the runs that a file of `fcljax sweep` asks for. Pure; `sweeps.py` makes the runs.

    method: [fppl, fedavg]           # one, or several
    base: {tasks: 5, clients: 10}    # options that all runs have
    grid:                            # options with lists of values: all combinations
      alpha: [0.1, 0.5]
      lr: [0.001, 0.01]
    runs:                            # variants by name, each combined with the grid
      - {name: plain}
      - {name: faulty, faults: drop=0.1}
      - {name: other, method: ewc, adapter: lora}
    seeds: [1, 2, 3]                 # or a number of them, from base's seed on
    slurm: {partition: gpu, gpus: 1} # of --engine slurm; `engines.SlurmOptions`
    ray: {gpus: 1}                   # of --engine ray; `engines.RayOptions`

Options are those of `fcljax run METHOD`, by the names that `--config` reads. A
variant's options win over base's; nothing stands in two places otherwise. Everything
but a method may be left out.
"""

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fcljax import config
from fcljax.config import RunConfig
from fcljax.errors import InputError
from fcljax.methods import check_no_code
from fcljax.studies import typed
from fcljax.studies.seeds import listed_seeds

MAX_RUNS = 10_000  # more are probably a mistake
MAX_PART = 40  # characters of a value in a folder's name
MAX_NAME = 120  # characters of the name; file systems allow 255 bytes
# what may stand in a folder's name as it is: no separators, and no dot in front, which
# would hide the folder
PLAIN = re.compile(rf"[A-Za-z0-9+-][A-Za-z0-9.+-]{{0,{MAX_PART - 1}}}")


class Planned(NamedTuple):
    """A run to make."""

    name: str
    """Of its folder."""
    given: dict[str, Any]
    """The options that the file gives it."""
    cfg: RunConfig
    """All its settings."""

    @property
    def method(self) -> str:
        """Return the method's name."""
        return self.cfg.method


@dataclasses.dataclass(frozen=True)
class SweepFile:
    """The content of a sweep's file."""

    method: str | list[str] = dataclasses.field(default_factory=list)
    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    grid: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seeds: int | list[int] | None = None
    slurm: dict[str, Any] = dataclasses.field(default_factory=dict)
    ray: dict[str, Any] = dataclasses.field(default_factory=dict)


class Point(NamedTuple):
    """A run before its options are read."""

    method: str
    variant: str | None
    layers: dict[str, dict[str, Any]]
    """Place in the file -> its options; later places win."""

    def given(self) -> dict[str, Any]:
        """Return the options of all places."""
        return {name: value for layer in self.layers.values() for name, value in layer.items()}


def plan(path: str | Path, code: bool = False) -> list[Planned]:
    """Return all runs of a file, in its order, seeds innermost.

    Args:
      path: the file.
      code: whether its methods may be programs from outside of the package.

    Raises:
      InputError: one line that names the file, the place in it, the option and the value.
    """
    return plan_of(config.load_yaml(path), str(path), code)


def plan_of(values: Mapping[str, Any], where: str, code: bool = False) -> list[Planned]:
    """Plan as `plan` does, from a file's content; `where` is its name for messages."""
    # `key:` without a value is null in YAML, and means the default
    entries = {key: value for key, value in values.items() if value is not None}
    file = typed.read_typed(SweepFile, entries, where)
    try:
        _check_places(file)
        seeds = _seeds(file)
        methods = _methods(file)
        # a method from outside the package is code, which runs only if the user says so
        if not code:
            for name in {*methods, *(run.get("method", "") for run in file.runs)}:
                check_no_code(name, "method", "if you trust it, add --allow-code")
        # counted before they are made: a mistyped grid can ask for billions
        count = max(1, len(file.runs)) * max(1, len(methods)) * len(seeds)
        if count * math.prod(map(len, file.grid.values())) > MAX_RUNS:
            raise InputError(f"grid: it makes more than {MAX_RUNS:,} runs")
        planned = [_planned(point, list(file.grid)) for point in _points(file, methods, seeds)]
        _check_different(planned)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return planned


def _check_places(file: SweepFile) -> None:
    """Check that variants have different names and each option stands in one place.

    Raises:
      InputError: naming the first that does not.
    """
    for i, run in enumerate(file.runs):
        if not isinstance(run.get("name"), str | int) or not str(run["name"]).strip():
            raise InputError(f"runs[{i}].name: each of runs needs a name; this has none")
        if not isinstance(run.get("method", ""), str):
            raise InputError(f"runs[{i}].method: {run['method']!r} is not text")
    names = [str(run["name"]) for run in file.runs]
    # names of variants become folders
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"runs: {twice!r} is the name of two runs")
    variants = [(f"runs[{run['name']}]", run) for run in file.runs]
    for place, options in [("base", file.base), *variants]:
        both = next((name for name in options if name in file.grid), None)
        # with a value in two places, the order of the layers would decide silently
        if both:
            raise InputError(f"grid.{both}: {place} sets it too; keep one of them")
    for place, options in [("base", file.base), ("grid", file.grid), *variants]:
        if "seed" in options and place != "base":
            raise InputError(f"{place}.seed: list them as seeds: [1, 2, 3]")
        if "method" in options and place in ("base", "grid"):
            raise InputError(f"{place}.method: write it next to {place}, not in it: method: NAME, or a list")
    for name, given in file.grid.items():
        if not given:
            raise InputError(f"grid.{name}: it has no values")


def _methods(file: SweepFile) -> list[str]:
    """Return the methods of all variants that name none."""
    methods = file.method
    if isinstance(methods, str):
        methods = [methods]
    all_named = bool(file.runs) and all("method" in run for run in file.runs)
    if not methods and not all_named:
        raise InputError("method: none given; give one, such as method: fppl")
    if methods and all_named:
        raise InputError(f"method: {file.method!r} has no effect, because each of runs has its own method")
    return methods


def _seeds(file: SweepFile) -> list[int | None]:
    """Read the seeds as `fcljax run --seeds` does; None: the default."""
    base_seed = file.base.get("seed")
    if file.seeds is None:
        return [None]
    if isinstance(file.seeds, int):
        if base_seed is None:
            base_seed = RunConfig.seed
        start: int = config.typed_value("base.seed", int, base_seed)
        return [*listed_seeds(file.seeds, start)]
    if base_seed is not None:
        raise InputError(f"base.seed: {base_seed!r} has no effect, because seeds lists all seeds")
    return [*listed_seeds(file.seeds, 0)]


def _points(
    file: SweepFile,
    methods: list[str],
    seeds: list[int | None],
) -> Iterator[Point]:
    """Yield all runs of a file, before their options are read."""
    for run in file.runs or [{}]:
        variant = None
        if run:
            variant = str(run["name"])
        options = {name: value for name, value in run.items() if name not in ("name", "method")}
        run_methods = methods
        if "method" in run:
            run_methods = [run["method"]]
        combinations = itertools.product(*file.grid.values())
        for method, values, seed in itertools.product(run_methods, combinations, seeds):
            # in the order of their rank: `Point.given` lets later layers win
            layers = {
                "base": file.base,
                f"runs[{variant}]": options,
                "grid": dict(zip(file.grid, values, strict=True)),
                "seeds": {} if seed is None else {"seed": seed},
            }
            yield Point(method, variant, layers)


def _planned(point: Point, grid: list[str]) -> Planned:
    options = point.given()
    try:
        cfg = config.from_mapping(point.method, options, "options")
    except InputError as error:
        message = str(error).removeprefix("options: ")
        raise InputError(f"{_blamed(point, message)}: {message}") from None
    # read back from the settings: 1e-3, which is text in YAML, and 0.001 must give the
    # same folder; an option at its default that this run does not read is none of them
    options = {option: getattr(cfg, option, given) for option, given in options.items()}
    values = [(option, options[option]) for option in grid]
    return Planned(folder_name(point.method, point.variant, values, cfg.seed), options, cfg)


def _blamed(point: Point, message: str) -> str:
    """Return the place in the file that has the option of a message; without one, the
    run."""
    # from the last layer on: where several have the option, the last one's value counts
    for place, options in reversed(point.layers.items()):
        for name in options:
            # a message may spell it as on the command line: --lora-rank
            spelt = re.escape(name).replace("_", "[_-]")
            if re.search(rf"(^(--)?|unknown key '){spelt}\b", message):
                return f"{place}.{name}"
    if message.startswith("method: "):
        return f"the method {point.method}"
    words = [point.method, point.variant or "", str(point.layers["grid"] or "")]
    return f"the run {' '.join(filter(None, words))}"


def folder_name(
    method: str,
    variant: str | None,
    values: list[tuple[str, object]],
    seed: int,
) -> str:
    """Return the name of a run's folder: method, variant, the grid's options, seed. It
    depends on the run and the grid's options alone, so that further values and variants
    leave it as it is; two runs never share one."""
    parts = [_part(method)]
    if variant is not None:
        parts.append(_part(variant))
    parts += [f"{option.replace('_', '-')}-{_part(str(value))}" for option, value in values]
    name = "_".join([*parts, f"seed-{seed}"])
    # a cut name gets a digest of the whole one, since names may differ at the end only
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 13]}-{_digest(name, 12)}"


def _part(text: str) -> str:
    """Return a value for a folder's name: itself, or its start and some of its sha256."""
    if PLAIN.fullmatch(text):
        return text
    words = re.sub(r"[^A-Za-z0-9.+-]+", "-", Path(text).name).strip(".-")[: MAX_PART - 7]
    return f"{words}-{_digest(text, 6)}"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _check_different(planned: list[Planned]) -> None:
    """Check that no two runs are the same one.

    Raises:
      InputError: naming two that are.
    """
    # by their settings: different options may resolve to the same run
    names_of: dict[RunConfig, str] = {}
    for run in planned:
        known_name = names_of.setdefault(run.cfg, run.name)
        if known_name is not run.name:
            raise InputError(f"grid: {known_name} and {run.name} are the same run, with the same settings")
    names = [run.name for run in planned]
    # only if two values' sha256 begin with the same 24 bits; then one run would
    # overwrite the other
    if len(set(names)) < len(names):
        raise InputError("grid: two runs would have the same folder; change a variant's name or a value")
