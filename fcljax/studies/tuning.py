"""Hyper-parameters chosen on held-out training images: a study of runs, each a trial, with Optuna.

What a trial tries depends only on the seed, its number and the trials before it, so a study that was stopped
and resumed tries what an uninterrupted one would.
"""

import contextlib
import dataclasses
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.table import Table

from fcljax import config
from fcljax.config import RunConfig
from fcljax.errors import InputError, nearest
from fcljax.files import write_text
from fcljax.methods import find_method
from fcljax.options import fields_of
from fcljax.results.run_folder import read_lines, write_json
from fcljax.runs import loop, rate_search
from fcljax.studies.seeds import folder_of_runs
from fcljax.terminal import add_row, plain_text

STUDY = "tune.yaml"  # what was asked for
JOURNAL = "trials.log"  # Optuna's own
BEST = "best.yaml"
NEVER = {
    "method": "compare methods with a sweep",
    "adapter": "it decides which options there are; tune each adapter by itself",
    "fidelity": "it decides which defaults the options have; tune each fidelity by itself",
    "scale": "it decides which defaults the options have; tune each scale by itself",
    "seed": "a seed is not a setting to choose",
    "holdout": "it decides on which images trials are compared",
    "dataset": "accuracies on different images do not compare",
}
WARM_UP = 5  # trials before one may be pruned
SHOWN = 10  # trials in the table


class Range(NamedTuple):
    """The values of an option that may be tried."""

    values: tuple[Any, ...]
    """The lowest and the highest; or each value, where `kind` is "choice"."""
    kind: str
    """ "choice", "linear" or "log"."""

    def text(self) -> str:
        """As it is typed."""
        if self.kind == "choice":
            return ",".join(map(str, self.values))
        return ("log:" if self.kind == "log" else "") + "..".join(map(str, self.values))


class Wanted(NamedTuple):
    """What a study was asked for."""

    method: str
    given: dict[str, Any]
    """The settings that all trials share and that are not the defaults."""
    ranges: dict[str, Range]
    metric: str
    trials: int
    prune: bool

    def settings(self, values: Mapping[str, Any]) -> RunConfig:
        """The settings of a run with these values.

        Raises:
          InputError: if they do not go together.
        """
        return config.from_mapping(self.method, self.given | dict(values), "options")


class Trial(NamedTuple):
    """A trial that is over."""

    number: int
    state: str
    """ "complete", "pruned" or "failed"."""
    value: float | None
    """The metric on held-out images, after the last task; of a pruned trial where it was stopped."""
    values: dict[str, Any]


class _Pruned(Exception):
    """A trial is stopped, since half of the others were better at the same round."""


def parse_range(method: str, given: Mapping[str, Any], name: str, text: str) -> Range:
    """A range as it is typed: `1e-4..1e-1`, `log:1e-4..1e-1`, or values `16,32,64`.

    Raises:
      InputError: naming the option, the text and what would be valid.
    """
    name = name.replace("-", "_")
    adapter = given.get("adapter") or find_method(method).adapter
    config.check_known(method, adapter, [name], "options")
    groups = config.option_groups(method, adapter).values()
    fields = {field.name: field for group in groups for field in fields_of(group)}
    if name not in fields:
        raise InputError(f"range: unknown option {name!r}; {nearest(name, fields)}")
    if name in NEVER:
        raise InputError(f"{name}: it cannot be tuned: {NEVER[name]}")
    if name in given:
        raise InputError(f"{name}: it has both a range and a value; leave one out")
    scale, _, ends = text.rpartition(":") if text.startswith("log:") else ("", "", text)
    if ".." in ends:
        found = _between(name, fields[name], ends, scale)
    elif scale or "," not in text:
        example = "log:1e-4..1e-1, 1..5 or 16,32,64"
        raise InputError(f"{name}: {text!r} is neither a range nor a list of values, such as {example}")
    else:
        values = [config.typed_value(name, fields[name].type, each.strip()) for each in text.split(",")]
        found = Range(tuple(dict.fromkeys(values)), "choice")
    for value in found.values:
        config.from_mapping(method, {**given, name: value}, "options")  # each end must be valid
    return found


def _between(name: str, field: dataclasses.Field, ends: str, scale: str) -> Range:
    low, high = (config.typed_value(name, field.type, each) for each in ends.split("..", 1))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise InputError(f"{name}: it is not a number, so {ends!r} is not a range; give values, such as a,b")
    if not low < high:
        raise InputError(f"{name}: {ends!r} goes from {low} to {high}; nearest: {high}..{low}")
    if scale and low <= 0:
        raise InputError(f"{name}: a logarithmic range begins above 0, not at {low}; nearest: {ends}")
    return Range((low, high), scale or "linear")


def check_optuna() -> None:
    """Check that Optuna is here.

    Raises:
      InputError: with the command that gets it.
    """
    try:
        import optuna
    except ImportError:
        raise InputError("tune: needs the package optuna; get it with: pip install 'fcljax[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def stored(folder: Path, method: str) -> Wanted:
    """What the study in a folder was asked for.

    Raises:
      InputError: if there is none, or it is of another method.
    """
    path = folder / STUDY
    if not path.is_file():
        raise InputError(f"resume: {str(folder)!r} is not a study: it has no {STUDY}")
    found = config.load_yaml(path)
    try:
        if found["method"] != method:
            raise InputError(f"resume: {str(path)!r} is for method {found['method']!r}, not {method!r}")
        given = dict(found["given"])
        numbers = (str(found["metric"]), int(found["trials"]))
        ranges = {
            name: parse_range(method, given, name, str(text)) for name, text in dict(found["ranges"]).items()
        }
        return Wanted(method, given, ranges, *numbers, bool(found["prune"]))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"resume: {str(path)!r} is not as a study writes it") from None


def tune(wanted: Wanted, out: Path, resume: bool, observer: loop.Observer) -> list[Trial]:
    """Run the trials that are missing, and write best.yaml (settings for `--config`) and trials.json.

    Args:
      wanted: the study.
      out: its folder; a new one, unless `resume`.
      resume: whether it goes on.
      observer: hears of each trial.

    Returns:
      All trials, in their order.

    Raises:
      InputError: for a folder that cannot be written, or if no trial ended well.
    """
    import optuna

    with folder_of_runs(out, (lambda: None) if resume else None):
        write_text(out / STUDY, yaml.safe_dump(_plain(wanted), sort_keys=False))
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(out / JOURNAL))
        )
        pruner = optuna.pruners.MedianPruner(n_startup_trials=WARM_UP) if wanted.prune else None
        study = optuna.create_study(
            storage=storage,
            study_name="tune",
            direction="maximize",
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=resume,
        )
        for trial in _missing(study, wanted):
            _play(study, trial, wanted, out, observer)
            found = trials_of(study)
            observer.say(_line(found[trial.number], wanted))
        found = trials_of(study)
        _write_results(wanted, found, out)
    return found


def _missing(study: Any, wanted: Wanted) -> Iterator[Any]:
    """The trial in which the study was stopped, if one was, and then new ones."""
    import optuna

    running = optuna.trial.TrialState.RUNNING
    for frozen in study.get_trials(states=(running,)):
        yield optuna.trial.Trial(study, frozen._trial_id)
    seed = wanted.settings({}).seed
    space = {name: _distribution(each) for name, each in wanted.ranges.items()}
    while (number := len(study.get_trials(deepcopy=False))) < wanted.trials:
        # of the seed and the trial's number alone, so that a resumed study draws the same
        entropy = np.random.SeedSequence((seed, number)).generate_state(1)[0]
        study.sampler = optuna.samplers.TPESampler(seed=int(entropy))
        yield study.ask(space)


def _distribution(each: Range) -> Any:
    import optuna

    if each.kind == "choice":
        return optuna.distributions.CategoricalDistribution(each.values)
    whole = all(isinstance(end, int) for end in each.values)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(*each.values, log=each.kind == "log")


def _play(study: Any, trial: Any, wanted: Wanted, out: Path, observer: loop.Observer) -> None:
    """The run of a trial, from its beginning or from where it was stopped."""
    import optuna

    def heard(line: Mapping[str, Any]) -> None:
        if line.get("A") is not None:
            step = line["task"] * settings.rounds + line["round"]
            if step not in study.trials[trial.number].intermediate_values:
                trial.report(line["A"], step)
            if wanted.prune and trial.should_prune():
                raise _Pruned

    folder = out / f"trial-{trial.number:03d}"
    states = optuna.trial.TrialState
    try:
        settings = wanted.settings(trial.params)
        begun = (folder / "config.yaml").exists()
        for line in read_lines(folder / "metrics.jsonl"):  # of a trial that was stopped
            heard(line)
        following = dataclasses.replace(observer, console=loop.QUIET, heard=heard)
        value = loop.run(settings, folder, begun, following)[wanted.metric]
        known = value is not None and math.isfinite(value)
        study.tell(trial, value if known else None, state=states.COMPLETE if known else states.FAIL)
    except _Pruned:
        study.tell(trial, state=states.PRUNED)
    except InputError as error:
        observer.say(f"trial {trial.number}: {error}")
        study.tell(trial, state=states.FAIL)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / "checkpoints")  # which only a trial that is not over needs


def trials_of(study: Any) -> list[Trial]:
    """The trials of a study that are over."""
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    return [
        Trial(each.number, names[each.state.name], each.value, dict(each.params))
        for each in study.get_trials(deepcopy=False)
        if each.state.name in names
    ]


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The complete trial with the highest metric, the first of equals."""
    complete = {each.number: each.value for each in trials if each.state == "complete"}
    number = rate_search.best(complete, prefer=float)
    return next((each for each in trials if each.number == number), None)


def _write_results(wanted: Wanted, trials: Sequence[Trial], out: Path) -> None:
    best = best_of(trials)
    write_json(out / "trials.json", {"metric": wanted.metric, "best": best, "trials": list(trials)})
    if best is None:
        raise InputError(f"tune: no trial ended with a finite {wanted.metric}; see {str(out)!r}")
    given = {name: value for name, value in wanted.given.items() if name != "holdout"}
    text = config.to_yaml(config.from_mapping(wanted.method, given | best.values, "options"))
    share = wanted.settings({}).holdout
    said = f"{wanted.metric} {100 * (best.value or 0):.2f} % on held-out training images (holdout {share})"
    head = f"# trial {best.number} of {len(trials)}, one seed: {said}\n"
    write_text(out / BEST, head + text)


def table_of(trials: Sequence[Trial], wanted: Wanted) -> Table:
    """The best trials."""
    counts = {state: sum(each.state == state for each in trials) for state in ("pruned", "failed")}
    title = f"{len(trials)} trials, " + ", ".join(f"{count} {state}" for state, count in counts.items())
    table = Table(title=plain_text(title), caption=f"{wanted.metric} on held-out training images")
    for name in ("trial", f"{wanted.metric} (%)", *wanted.ranges):
        table.add_column(name, justify="right")
    complete = [each for each in trials if each.state == "complete"]
    for each in sorted(complete, key=lambda each: -(each.value or 0.0))[:SHOWN]:
        values = [_shown(each.values[name]) for name in wanted.ranges]
        add_row(table, each.number, f"{100 * (each.value or 0.0):.2f}", *values)
    return table


def _line(trial: Trial, wanted: Wanted) -> str:
    said = trial.state if trial.value is None else f"{100 * trial.value:.2f} %"
    said = f"{said}, pruned" if trial.state == "pruned" and trial.value is not None else said
    values = ", ".join(f"{name} {_shown(value)}" for name, value in trial.values.items())
    return f"trial {trial.number + 1} of {wanted.trials}: {said}: {values}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(wanted: Wanted) -> dict[str, Any]:
    """As the study's file has it."""
    ranges = {name: each.text() for name, each in wanted.ranges.items()}
    return wanted._asdict() | {"ranges": ranges}


def sorted_arguments(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """NAME=RANGE and the other arguments."""
    ranges = [word for word in arguments if re.fullmatch(r"[A-Za-z][\w-]*=.*", word)]
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in ranges]
    return pairs, [word for word in arguments if word not in ranges]
