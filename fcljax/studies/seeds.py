"""Run one method over several seeds: a run directory for each in one folder, and their
mean."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fcljax import config
from fcljax.config import MOST_SEEDS, RunConfig
from fcljax.errors import InputError
from fcljax.files import write_text
from fcljax.options import whole_number
from fcljax.results import metrics, page
from fcljax.results.run_folder import write_json
from fcljax.runs import loop
from fcljax.runs.folder import check_new, locked
from fcljax.runs.loop import Observer
from fcljax.runs.resume import ROUNDING, check_file

LIST = "seeds.yaml"


def parse_seeds(text: str, start: int) -> list[int]:
    """Parse `--seeds`: "3" is three from `start` on, "2023,7" are these.

    Raises:
      InputError: for what is neither, for a seed that comes twice, or for no or too
        many seeds.
    """
    # empty parts are allowed: "7," is a list of one seed, where "7" would be a count
    numbers = [whole_number(part) for part in text.split(",") if part.strip()]
    seeds = [number for number in numbers if number is not None]
    if not seeds or len(seeds) < len(numbers):
        raise InputError(f"seeds: {text!r} is neither a number nor a list of seeds, such as 3 or 1,2,3")
    if "," in text:
        if len(set(seeds)) < len(seeds) or max(seeds) >= 2**32:
            raise InputError(f"seeds: {text!r} must be different whole numbers below {2**32}")
        return seeds
    count = seeds[0]
    # a large number alone is more likely a seed than a wish for so many runs, so the
    # message names --seed too
    if not 1 <= count <= MOST_SEEDS:
        nearest = 1
        if count:
            nearest = MOST_SEEDS
        raise InputError(f"seeds: {count} runs; nearest: {nearest}; a run with seed {count}: --seed {count}")
    return list(range(start, start + count))


def listed_seeds(seeds: int | Sequence[int], start: int) -> list[int]:
    """Return seeds that are a number of them, from `start` on, or a list.

    Raises:
      InputError: as `parse_seeds`, through which both forms go.
    """
    if isinstance(seeds, int):
        return parse_seeds(str(seeds), start)
    # the comma at the end makes a list of one seed a list
    return parse_seeds(",".join(map(str, seeds)) + ",", start)


def stored_seeds(folder: str | Path) -> list[int] | None:
    """Read the seeds of a folder that `run_seeds` has made; None for any other folder.

    Raises:
      InputError: if the list was edited into something else.
    """
    path = Path(folder) / LIST
    if not path.is_file():
        return None
    seeds = config.load_yaml(path).get("seeds")
    if not isinstance(seeds, list) or not all(isinstance(seed, int) for seed in seeds) or not seeds:
        raise InputError(f"seeds: {str(path)!r} does not hold a list of whole numbers")
    return seeds


def run_seeds(
    cfg: RunConfig,
    seeds: Sequence[int],
    out: str | Path,
    resume: bool,
    observer: Observer,
) -> list[dict[str, Any]]:
    """Run a method once with each seed, into `out`/seed-S; finished runs in `out` are
    not repeated.

    Writes seeds.json (mean, standard deviation and values over the seeds) and
    report.html.

    Args:
      cfg: settings; the seed is replaced.
      seeds: all of them; with `resume` the previous ones and any more.
      out: the folder; a new one, unless `resume`.
      resume: resume the runs in `out`.
      observer: of all runs.

    Returns:
      The runs' summaries.

    Raises:
      InputError: as `loop.run`.
    """
    out = Path(out)
    summaries = []
    check = (lambda: check_file(out, cfg, ROUNDING)) if resume else None
    with folder_of_runs(out, check):
        # before any run: this list tells `--resume` which seeds the folder has
        write_text(out / LIST, yaml.safe_dump({"seeds": list(seeds)}))
        write_text(out / "config.yaml", config.to_yaml(cfg))
        for i, seed in enumerate(seeds):
            folder = out / f"seed-{seed}"
            observer.say(f"seed {seed}, {i + 1} of {len(seeds)}")
            # by the folder and not by `resume`: the call may add seeds. A finished run is
            # resumed too, which returns its summary at once.
            has_started = (folder / "config.yaml").exists()
            settings = dataclasses.replace(cfg, seed=seed)
            summaries.append(loop.run(settings, folder, has_started, observer))
        write_json(out / "seeds.json", seed_statistics(summaries))
        page.try_report([out], out / page.NAME, observer.say)
    return summaries


@contextlib.contextmanager
def folder_of_runs(out: Path, resumed: Callable[[], None] | None) -> Iterator[None]:
    """Own a folder of several runs until the block ends.

    Args:
      out: the folder.
      resumed: checks an existing folder before it is resumed; None: the folder must be
        new.

    Raises:
      InputError: if it exists and should not, cannot be written, is refused, or another
        process owns it.
    """
    if resumed is not None:
        resumed()
    else:
        check_new(out)
        out.mkdir(parents=True, exist_ok=True)
    # two processes in one folder would overwrite each other's files
    with locked(out):
        yield


def seed_statistics(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and population standard deviation over seeds of the papers' numbers."""
    by_metric = {name: [run[name] for run in summaries] for name in ("A_avg", "A_last")}
    by_metric["forgetting_paper"] = [run["forgetting"]["paper"] for run in summaries]
    result: dict[str, Any] = {"seeds": [run["seed"] for run in summaries]}
    for name, values in by_metric.items():
        # a metric that is NaN is null in summary.json
        valid = [value for value in values if value is not None]
        mean, deviation = metrics.over_seeds(valid) if valid else (None, None)
        result[name] = {"mean": mean, "population_std": deviation, "values": values}
    return result
