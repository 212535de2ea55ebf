"""Choose hyper-parameters on held-out training images: a study of runs, each a trial,
with Optuna.

What a trial tries depends only on the seed, its number and the trials before it, so a
study that was stopped and resumed tries what an uninterrupted one would.
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
from fcljax.errors import InputError, install_command, nearest
from fcljax.files import write_text
from fcljax.methods import find_method
from fcljax.options import fields_of
from fcljax.results.run_folder import read_lines, write_json
from fcljax.runs import loop, rate_search
from fcljax.studies.seeds import folder_of_runs
from fcljax.terminal import add_row, new_table

STUDY = "tune.yaml"  # the request
JOURNAL = "trials.log"  # written by Optuna
BEST = "best.yaml"
# why an option cannot be tuned: it decides what is compared
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
MAX_ROWS = 10  # trials in the table


class Range(NamedTuple):
    """The values of an option that may be tried."""

    values: tuple[Any, ...]
    """The lowest and the highest; or each value, where `kind` is "choice"."""
    kind: str
    """ "choice", "linear" or "log"."""

    def text(self) -> str:
        """Return the range as it is typed."""
        if self.kind == "choice":
            return ",".join(map(str, self.values))
        ends = "..".join(map(str, self.values))
        if self.kind == "log":
            return f"log:{ends}"
        return ends


class StudyRequest(NamedTuple):
    """Request for a study."""

    method: str
    given: dict[str, Any]
    """The settings that all trials share and that are not the defaults."""
    ranges: dict[str, Range]
    metric: str
    trials: int
    prune: bool

    def settings(self, values: Mapping[str, Any]) -> RunConfig:
        """Return the settings of a run with these values.

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
    """The metric on held-out images, after the last task; of a pruned trial where it
    was stopped."""
    values: dict[str, Any]


class _Pruned(Exception):
    """Stop a trial, since half of the others were better at the same round."""


def parse_range(method: str, given: Mapping[str, Any], name: str, text: str) -> Range:
    """Parse a range as it is typed: `1e-4..1e-1`, `log:1e-4..1e-1`, or values `16,32,64`.

    Raises:
      InputError: naming the option, the text and what would be valid.
    """
    name = name.replace("-", "_")
    # options of an adapter can be tuned too, so the adapter must be known first
    adapter = given.get("adapter") or find_method(method).adapter
    config.check_known(method, adapter, {name: ""}, "options")
    groups = config.option_groups(method, adapter).values()
    fields = {field.name: field for group in groups for field in fields_of(group)}
    if name not in fields:
        raise InputError(f"range: unknown option {name!r}; {nearest(name, fields)}")
    if name in NEVER:
        raise InputError(f"{name}: it cannot be tuned: {NEVER[name]}")
    if name in given:
        raise InputError(f"{name}: it has both a range and a value; leave one out")
    # "log:" makes sense for an interval only; before a list it is refused below
    scale = ""
    ends = text
    if text.startswith("log:"):
        scale, _, ends = text.rpartition(":")
    if ".." in ends:
        parsed = _interval(name, fields[name], ends, scale)
    elif scale or "," not in text:
        example = "log:1e-4..1e-1, 1..5 or 16,32,64"
        raise InputError(f"{name}: {text!r} is neither a range nor a list of values, such as {example}")
    else:
        values = [config.typed_value(name, fields[name].type, word.strip()) for word in text.split(",")]
        parsed = Range(tuple(dict.fromkeys(values)), "choice")
    # every end or value is tried as a setting now: a wrong one would otherwise fail some
    # trials in the middle of the study
    for value in parsed.values:
        config.from_mapping(method, {**given, name: value}, "options")
    return parsed


def _interval(name: str, field: dataclasses.Field, ends: str, scale: str) -> Range:
    low, high = (config.typed_value(name, field.type, end) for end in ends.split("..", 1))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise InputError(f"{name}: it is not a number, so {ends!r} is not a range; give values, such as a,b")
    if not low < high:
        raise InputError(f"{name}: {ends!r} goes from {low} to {high}; nearest: {high}..{low}")
    if scale and low <= 0:
        raise InputError(f"{name}: a logarithmic range must start above 0, not at {low}; nearest: {ends}")
    return Range((low, high), scale or "linear")


def check_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
      InputError: with the command that gets it.
    """
    try:
        import optuna
    except ImportError:
        raise InputError(
            f"tune: needs the package optuna; install it with: {install_command('tune')}"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def stored(folder: Path, method: str) -> StudyRequest:
    """Read the request of the study in a folder.

    Raises:
      InputError: if there is none, or it is of another method.
    """
    path = folder / STUDY
    if not path.is_file():
        raise InputError(f"resume: {str(folder)!r} is not a study: it has no {STUDY}")
    values = config.load_yaml(path)
    try:
        if values["method"] != method:
            raise InputError(f"resume: {str(path)!r} is for method {values['method']!r}, not {method!r}")
        settings = dict(values["given"])
        texts = dict(values["ranges"])
        ranges = {name: parse_range(method, settings, name, str(text)) for name, text in texts.items()}
        return StudyRequest(
            method, settings, ranges, str(values["metric"]), int(values["trials"]), bool(values["prune"])
        )
    except (KeyError, TypeError, ValueError):
        raise InputError(f"resume: {str(path)!r} was not written by a study") from None


def tune(
    request: StudyRequest,
    out: Path,
    resume: bool,
    observer: loop.Observer,
) -> list[Trial]:
    """Run the trials that are missing, and write best.yaml (settings for `--config`)
    and trials.json.

    Args:
      request: for the study.
      out: the folder of the study; a new one, unless `resume`.
      resume: resume the study in `out`.
      observer: gets a line about each trial.

    Returns:
      All trials, in their order.

    Raises:
      InputError: for a folder that cannot be written, or if no trial ended well.
    """
    import optuna

    with folder_of_runs(out, (lambda: None) if resume else None):
        write_text(out / STUDY, yaml.safe_dump(_plain(request), sort_keys=False))
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(out / JOURNAL))
        )
        pruner = None
        # Optuna prunes by default, so a study without pruning needs the pruner that
        # never does
        if request.prune:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=WARM_UP)
        study = optuna.create_study(
            storage=storage,
            study_name="tune",
            direction="maximize",
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=resume,
        )
        for trial in _missing(study, request):
            _play(study, trial, request, out, observer)
            observer.say(_line(trials_of(study)[trial.number], request))
        trials = trials_of(study)
        _write_results(request, trials, out)
    return trials


def _missing(study: Any, request: StudyRequest) -> Iterator[Any]:
    """Yield the trial in which the study was stopped, if one was, and then new ones."""
    import optuna

    running = optuna.trial.TrialState.RUNNING
    # in the journal, a trial that the stopped process was playing still counts as running
    for frozen in study.get_trials(states=(running,)):
        yield optuna.trial.Trial(study, frozen._trial_id)
    seed = request.settings({}).seed
    space = {name: _distribution(values) for name, values in request.ranges.items()}
    # the journal knows the trials of earlier calls too
    while (number := len(study.get_trials(deepcopy=False))) < request.trials:
        # a sampler's generator is lost when the process ends; one from (seed, number)
        # for each trial lets a resumed study draw the same
        entropy = np.random.SeedSequence((seed, number)).generate_state(1)[0]
        study.sampler = optuna.samplers.TPESampler(seed=int(entropy))
        yield study.ask(space)


def _distribution(values: Range) -> Any:
    from optuna import distributions

    if values.kind == "choice":
        return distributions.CategoricalDistribution(values.values)
    is_whole = all(isinstance(end, int) for end in values.values)
    kind = distributions.IntDistribution if is_whole else distributions.FloatDistribution
    return kind(*values.values, log=values.kind == "log")


def _play(
    study: Any,
    trial: Any,
    request: StudyRequest,
    out: Path,
    observer: loop.Observer,
) -> None:
    """Make the run of a trial, or resume it where it was stopped."""
    import optuna

    def on_round(line: Mapping[str, Any]) -> None:
        if line.get("A") is not None:
            step = line["task"] * settings.rounds + line["round"]
            # a resumed trial reports its old rounds again, and Optuna warns about a step
            # that comes twice
            if step not in study.trials[trial.number].intermediate_values:
                trial.report(line["A"], step)
            # asked after every evaluation, old ones included: a resumed trial stops where
            # an uninterrupted one would have stopped
            if request.prune and trial.should_prune():
                raise _Pruned

    folder = out / f"trial-{trial.number:03d}"
    states = optuna.trial.TrialState
    try:
        settings = request.settings(trial.params)
        has_started = (folder / "config.yaml").exists()
        # the rounds that were played before the trial was stopped, for the pruner
        for line in read_lines(folder / "metrics.jsonl"):
            on_round(line)
        following = dataclasses.replace(observer, console=loop.QUIET, heard=on_round)
        value = loop.run(settings, folder, has_started, following)[request.metric]
        if value is not None and math.isfinite(value):
            study.tell(trial, value, state=states.COMPLETE)
        else:
            study.tell(trial, state=states.FAIL)
    except _Pruned:
        # pruned, not failed: the sampler learns from its intermediate values
        study.tell(trial, state=states.PRUNED)
    except InputError as error:
        observer.say(f"trial {trial.number}: {error}")
        study.tell(trial, state=states.FAIL)
    # the trial is over, so nobody resumes it; a study of 100 trials would fill the disk
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / "checkpoints")


def trials_of(study: Any) -> list[Trial]:
    """Return the trials of a study that are over."""
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    return [
        Trial(trial.number, states[trial.state.name], trial.value, dict(trial.params))
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name in states
    ]


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the first complete trial with the highest metric; None: none is complete."""
    metrics = {trial.number: trial.value for trial in trials if trial.state == "complete"}
    number = rate_search.best(metrics, prefer=float)
    return next((trial for trial in trials if trial.number == number), None)


def _write_results(request: StudyRequest, trials: Sequence[Trial], out: Path) -> None:
    best = best_of(trials)
    write_json(out / "trials.json", {"metric": request.metric, "best": best, "trials": list(trials)})
    if best is None:
        raise InputError(f"tune: no trial ended with a finite {request.metric}; see {str(out)!r}")
    # runs with the best values train on all images, so best.yaml has no holdout
    settings = {name: value for name, value in request.given.items() if name != "holdout"}
    text = config.to_yaml(config.from_mapping(request.method, settings | best.values, "options"))
    accuracy = f"{request.metric} {100 * (best.value or 0):.2f} % on held-out training examples"
    share = request.settings({}).holdout
    head = f"# trial {best.number} of {len(trials)}, one seed: {accuracy} (holdout {share})\n"
    write_text(out / BEST, head + text)


def table_of(trials: Sequence[Trial], request: StudyRequest) -> Table:
    """Return a table of the best trials."""
    states = [trial.state for trial in trials]
    counts = f"{states.count('pruned')} pruned, {states.count('failed')} failed"
    title = f"{len(trials)} trials, {counts}"
    names = ("trial", f"{request.metric} (%)", *request.ranges)
    caption = f"{request.metric} on held-out training examples"
    table = new_table(*names, title=title, caption=caption, right=names)
    complete = [trial for trial in trials if trial.state == "complete"]
    for trial in sorted(complete, key=lambda trial: -(trial.value or 0.0))[:MAX_ROWS]:
        values = [_short(trial.values[name]) for name in request.ranges]
        add_row(table, trial.number, f"{100 * (trial.value or 0.0):.2f}", *values)
    return table


def _line(trial: Trial, request: StudyRequest) -> str:
    result = trial.state
    if trial.value is not None:
        result = f"{100 * trial.value:.2f} %"
        if trial.state == "pruned":
            result += ", pruned"
    values = ", ".join(f"{name} {_short(value)}" for name, value in trial.values.items())
    return f"trial {trial.number + 1} of {request.trials}: {result}: {values}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _plain(request: StudyRequest) -> dict[str, Any]:
    """Return the content of the study's file."""
    ranges = {name: values.text() for name, values in request.ranges.items()}
    return request._asdict() | {"ranges": ranges}


def sorted_arguments(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the arguments into pairs (NAME, RANGE) and the others."""
    ranges = [word for word in arguments if re.fullmatch(r"[A-Za-z][\w-]*=.*", word)]
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in ranges]
    return pairs, [word for word in arguments if word not in ranges]
