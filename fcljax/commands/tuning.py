"""Run the command `fcljax tune METHOD NAME=RANGE... [options]`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Literal

from rich.console import Console

from fcljax.commands.arguments import ProgramOptions, keep_compiled, new_folder, slug
from fcljax.commands.running import parse_run, pop_options
from fcljax.errors import InputError
from fcljax.methods import METHODS, find_method
from fcljax.options import check_ranges, option
from fcljax.runs import signals
from fcljax.terminal import say

USAGE = "usage: fcljax tune METHOD NAME=RANGE... [options], such as fcljax tune ewc lr=log:1e-4..1e-1"
HOLDOUT = 0.2  # of the training images, where the user does not say


@dataclasses.dataclass(frozen=True)
class TuneOptions(ProgramOptions):
    """Options of `fcljax tune`, beside those of `fcljax run METHOD` that all trials
    share."""

    trials: int = 30
    """Number of trials, including pruned ones."""
    metric: Literal["A_last", "A_avg"] = "A_last"
    """Metric to maximise on held-out training images."""
    prune: bool = True
    """Stop a trial whose accuracy after a task is below the median of the earlier
    trials."""
    out: str | None = option(None, unset="runs/tune-METHOD-DATASET-TIME")
    """New folder for the study."""
    resume: str | None = option(None, unset="none")
    """Folder of a study to resume; --trials may raise the number of trials."""
    config: str | None = option(None, unset="none")
    """YAML file of settings for all trials; options on the command line override it."""


def tune(arguments: list[str]) -> int:
    """Run `fcljax tune METHOD NAME=RANGE... [options]`."""
    from fcljax import config
    from fcljax.runs import loop
    from fcljax.studies import tuning

    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"method: none given; {USAGE}; methods: {', '.join(METHODS)}")
    method = arguments[0]
    pairs, rest = tuning.sorted_arguments(arguments[1:])
    about = f"Search options on held-out training images. {find_method(method).summary}"
    typed = parse_run(method, rest, "tune", about, {"tuning": TuneOptions()})
    trials = typed.get("trials")
    options = pop_options(TuneOptions(), typed)
    check_ranges(options)
    # other ranges or settings would make the stored trials mean something else
    if options.resume:
        if pairs or typed or options.out or options.config:
            raise InputError("resume: the study already has ranges and settings; give only --trials")
        tuning.check_optuna()
        request = tuning.stored(Path(options.resume), method)
        request = request._replace(trials=max(request.trials, trials or 0))
    else:
        if not pairs:
            raise InputError(f"range: none given; {USAGE}")
        shared = {}
        if options.config:
            shared = config.load_yaml(options.config)
        # a range takes the place of the file's value; a value that was typed beside a
        # range is refused by `parse_range`
        for name in ("method", *(name.replace("-", "_") for name, _ in pairs)):
            shared.pop(name, None)
        shared |= typed
        shared["holdout"] = typed.get("holdout", HOLDOUT)
        if not shared["holdout"]:
            raise InputError(f"holdout: 0 would tune on test images; nearest: --holdout {HOLDOUT}")
        ranges = {
            name.replace("-", "_"): tuning.parse_range(method, shared, name, text) for name, text in pairs
        }
        request = tuning.StudyRequest(method, shared, ranges, options.metric, options.trials, options.prune)
        tuning.check_optuna()
    dataset = request.settings({}).dataset
    out = Path(options.resume or options.out or new_folder("tune", slug(method), slug(dataset)))
    keep_compiled(options.compile_cache)
    command = f"fcljax tune {shlex.quote(method)} --resume {shlex.quote(str(out))}"
    with signals.advised(lambda: f"resume with: {command}"):
        results = tuning.tune(request, out, options.resume is not None, loop.Observer())
    console = Console()
    console.print(tuning.table_of(results, request))
    best = shlex.quote(str(out / tuning.BEST))
    say(console, f"settings of the best trial: {best}")
    say(
        console,
        f"on test images, over seeds: fcljax run {shlex.quote(method)} --config {best} --seeds 3",
    )
    return 0
