"""One method over several seeds: a run directory for each in one folder, and what they say together."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fcljax import config
from fcljax.config import MOST_SEEDS, RunConfig
from fcljax.errors import InputError
from fcljax.files import check_folder, write_text
from fcljax.results import metrics, page
from fcljax.results.run_folder import write_json
from fcljax.runs import loop, origin
from fcljax.terminal import say

LIST = "seeds.yaml"


def parse_seeds(text: str, first: int) -> list[int]:
    """The seeds that `--seeds` asks for: "3" is three from `first` on, "2023,7" are these.

    Raises:
      InputError: for what is neither, for a seed that comes twice, or for no or too many seeds.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and len(part) <= 20 for part in parts):
        raise InputError(f"seeds: {text!r} is no number of seeds and no list of them, such as 3 or 1,2,3")
    if "," in text:
        seeds = [int(part) for part in parts]
        if len(set(seeds)) < len(seeds) or max(seeds) >= 2**32:
            raise InputError(f"seeds: {text!r} must be different whole numbers below {2**32}")
        return seeds
    count = int(parts[0])
    if not 1 <= count <= MOST_SEEDS:
        nearest = MOST_SEEDS if count else 1
        raise InputError(f"seeds: {count} runs; nearest: {nearest}; a run with seed {count}: --seed {count}")
    return [first + i for i in range(count)]


def stored_seeds(folder: str | Path) -> list[int] | None:
    """The seeds of a folder that `run_seeds` has made; None: it is no such folder.

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
    method: str,
    cfg: RunConfig,
    seeds: Sequence[int],
    out: str | Path,
    resume: bool,
    console: Console,
    stop: Callable[[], int | None] = lambda: None,
    track: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a method once with each seed, into `out`/seed-S; a run that is finished there is not made again.

    Writes seeds.json, mean and deviation over the seeds, and the values; and report.html.

    Args:
      method: of the package, or from outside.
      cfg: resolved settings, but for the seed.
      seeds: all of them; with `resume` those that were there before and any more.
      out: the folder; a new one, unless `resume`.
      resume: go on with what is in `out`.
      console: where progress bars and warnings go.
      stop, track: as of `loop.run`.

    Returns:
      The runs' summaries.

    Raises:
      InputError: as `loop.run`.
    """
    out = Path(out)
    check = (lambda: origin.check_file(out, method, cfg)) if resume else None
    with folder_of_runs(out, check):
        return _run_all(method, cfg, seeds, out, console, stop, track)


@contextlib.contextmanager
def folder_of_runs(out: Path, resumed: Callable[[], None] | None) -> Iterator[None]:
    """A folder that several runs go into, which this process alone works in until the block ends: a new one,
    or one that is there, if `resumed` does not refuse it.

    Raises:
      InputError: if it exists and should not, cannot be written, is refused, or another process has it.
    """
    if resumed is not None:
        resumed()
    else:
        loop.check_new(out)
        check_folder(out)
        out.mkdir(parents=True, exist_ok=True)
    with loop.alone(out):
        yield


def _run_all(
    method: str,
    cfg: RunConfig,
    seeds: Sequence[int],
    out: Path,
    console: Console,
    stop: Callable[[], int | None],
    track: Sequence[str],
) -> list[dict[str, Any]]:
    write_text(out / LIST, yaml.safe_dump({"seeds": list(seeds)}))
    write_text(out / "config.yaml", config.to_yaml(method, cfg))
    summaries = []
    for place, seed in enumerate(seeds):
        folder = out / f"seed-{seed}"
        say(console, f"seed {seed}, {place + 1} of {len(seeds)}")
        begun = (folder / "config.yaml").exists()
        own = dataclasses.replace(cfg, seed=seed)
        summaries.append(loop.run(method, own, folder, begun, console, stop, track))
    write_json(out / "seeds.json", over_seeds(summaries))
    page.try_report([out], out / page.NAME, lambda line: say(console, line))
    return summaries


def over_seeds(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and population standard deviation over seeds of the numbers that papers report."""
    read = {
        "A_avg": lambda run: run["A_avg"],
        "A_last": lambda run: run["A_last"],
        "forgetting_paper": lambda run: run["forgetting"]["paper"],
    }
    result: dict[str, Any] = {"seeds": [run["seed"] for run in summaries]}
    for name, value in read.items():
        values = [value(run) for run in summaries]
        known = [each for each in values if each is not None]
        mean, deviation = metrics.over_seeds(known) if known else (None, None)
        result[name] = {"mean": mean, "population_std": deviation, "values": values}
    return result
