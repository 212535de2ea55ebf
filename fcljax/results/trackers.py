"""Follow a run with TensorBoard, Weights & Biases and MLflow. Each is an optional
dependency and is imported only when a run asks for it. Tracker failures are reported in
one line and never stop the run."""

import contextlib
import functools
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcljax.errors import InputError, choose, install_command
from fcljax.files import read_text, write_text

MAX_NOTES = 1 << 16  # bytes; a run directory, and so this file, may come from anybody
NOTES = "trackers.json"  # in a run directory: tracker -> id of the run there
Scalars = dict[str, float | int]


class TrackedRun(NamedTuple):
    """A run that a tracker starts to follow."""

    out: Path
    settings: Mapping[str, Any]
    done: int
    """rounds that the run has completed"""
    id: str
    """the tracker's id of the run; empty if it has not followed the run yet"""


class Tracker(NamedTuple):
    """A tracker that follows a run."""

    id: str
    """of the run, to resume it"""
    log: Callable[[int, Scalars], None]
    """log(number of the round, from 0 on, its values)"""
    finish: Callable[[Scalars], None]
    """finish(values of the summary; empty if the run was interrupted)"""


class Following(NamedTuple):
    """The trackers of a run, for the run."""

    heard: Callable[[dict[str, Any]], None]
    """called with every line of metrics.jsonl"""
    ended: Callable[[dict[str, Any]], None]
    """called with the summary"""


NOBODY = Following(lambda line: None, lambda summary: None)


class Entry(NamedTuple):
    """A tracker that can be chosen."""

    module: str
    """which it needs"""
    start: Callable[[TrackedRun], Tracker]


def tensorboard(run: TrackedRun) -> Tracker:
    """Write event files into the run's folder tensorboard. When a run is resumed,
    rounds logged after its checkpoint are removed."""
    from tensorboardX import SummaryWriter

    # only where TensorBoard has followed the run before: a first purge at step 0 would
    # be a mark without meaning in the event file
    writer = SummaryWriter(logdir=str(run.out / "tensorboard"), purge_step=run.done if run.id else None)
    if not run.id:
        writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in run.settings.items()))

    def log(step: int, values: Scalars) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        # rounds may be minutes apart, and the dashboard is to show each when it is over
        writer.flush()

    def finish(values: Scalars) -> None:
        for name, value in values.items():
            writer.add_scalar(f"summary/{name}", value, 0)
        writer.close()

    return Tracker(run.id or "tensorboard", log, finish)


def wandb(run: TrackedRun) -> Tracker:
    """Log to a run of Weights & Biases in the project fcljax, or $WANDB_PROJECT; with
    WANDB_MODE=offline it stays on this machine."""
    import wandb as library

    # chosen here, so that it is known before the library has reached its server
    name = run.id or secrets.token_hex(8)
    tracked = library.init(
        id=name,
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", "fcljax"),
        name=run.out.name,
        dir=str(run.out),
        config=dict(run.settings),
    )

    def finish(values: Scalars) -> None:
        tracked.summary.update(values)
        tracked.finish()

    return Tracker(name, lambda step, values: tracked.log(values, step=step), finish)


def mlflow(run: TrackedRun) -> Tracker:
    """Log to a run of MLflow in the experiment fcljax, or $MLFLOW_EXPERIMENT_NAME, of
    the store that $MLFLOW_TRACKING_URI names. Rounds that are repeated after a
    checkpoint are not logged again."""
    from mlflow import MlflowClient

    client = MlflowClient()
    name = run.id
    if not name:
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fcljax")
        experiment = client.get_experiment_by_name(title)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(title)
        name = client.create_run(experiment_id, run_name=run.out.name).info.run_id
        # cut, because some servers of MLflow refuse longer parameters
        for setting, value in run.settings.items():
            client.log_param(name, setting, str(value)[:500])
    client.update_run(name, status="RUNNING")

    @functools.cache
    def logged(key: str) -> set[int]:
        """Return the rounds that a resumed run has logged, some of them after its
        checkpoint: MLflow would keep two values of one round, and draw both."""
        if not run.id:
            return set()
        return {entry.step for entry in client.get_metric_history(name, key)}

    def log(step: int, values: Scalars) -> None:
        for key, value in values.items():
            if step not in logged(key):
                client.log_metric(name, key, value, step=step)

    def finish(values: Scalars) -> None:
        for key, value in values.items():
            client.log_metric(name, f"summary/{key}", value)
        # without a summary the run was interrupted
        client.set_terminated(name, "FINISHED" if values else "KILLED")

    return Tracker(name, log, finish)


TRACKERS = {
    "tensorboard": Entry("tensorboardX", tensorboard),
    "wandb": Entry("wandb", wandb),
    "mlflow": Entry("mlflow", mlflow),
}


def parse_trackers(text: str | None) -> tuple[str, ...]:
    """Parse a list of trackers such as tensorboard,mlflow.

    Raises:
      InputError: for an unknown one, or one whose package is not installed.
    """
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    for name in names:
        if importlib.util.find_spec(TRACKERS[choose("track", name, TRACKERS)].module) is None:
            raise InputError(f"track: {name!r} is not installed; install it with: {install_command(name)}")
    return names


@contextlib.contextmanager
def following(
    names: Sequence[str],
    out: Path,
    settings: Mapping[str, Any],
    done: int,
    tell: Callable[[str], None],
) -> Iterator[Following]:
    """Follow a run with trackers until the block ends. A tracker that has followed it
    resumes its run. No file starts a tracker: a run directory may come from anybody.

    Args:
      names: of TRACKERS.
      out: the run directory.
      settings: of the run.
      done: rounds that the run has completed.
      tell: called with one line about a tracker that fails, which then no longer
        follows the run.
    """
    ids = _known_ids(out)
    active: dict[str, Tracker] = {}
    results: Scalars = {}

    @contextlib.contextmanager
    def guarded(name: str) -> Iterator[None]:
        # whatever a tracker raises: a server that is down must not cost the training
        try:
            yield
        except Exception as error:
            active.pop(name, None)
            tell(f"warning: {name} no longer follows the run: {type(error).__name__}: {error}")

    # A tracker sends data away, so whoever resumes the run must ask for it; what the
    # run's folder says is no consent.
    for name in ids.keys() - set(names):
        tell(f"note: {name} followed this run before; to continue: --track {name}")
    for name in dict.fromkeys(names):
        with guarded(name):
            active[name] = TRACKERS[name].start(TrackedRun(out, settings, done, ids.get(name, "")))
    if active:
        known = ids | {name: tracker.id for name, tracker in active.items()}
        write_text(out / NOTES, json.dumps(known) + "\n")

    def heard(line: dict[str, Any]) -> None:
        # trackers have one axis of steps, so rounds are counted over all tasks
        step = line["task"] * int(settings["rounds"]) + line["round"]
        for name, tracker in list(active.items()):
            with guarded(name):
                tracker.log(step, scalars(line))

    try:
        yield Following(heard, lambda summary: results.update(scalars(summary)))
    finally:
        for name, tracker in list(active.items()):
            with guarded(name):
                tracker.finish(dict(results))


def scalars(values: Mapping[str, Any], prefix: str = "") -> Scalars:
    """Return the numbers among values, those of inner mappings by name/name, and
    accuracies by task."""
    numbers: Scalars = {}
    for name, value in values.items():
        if isinstance(value, dict) and name != "config":
            numbers |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[prefix + name] = value
    # of a round's line only: in a summary `accuracy` is a matrix
    if not prefix and isinstance(values.get("accuracy"), list) and "round" in values:
        for t, value in enumerate(values["accuracy"]):
            if value is not None:
                numbers[f"accuracy/task {t + 1}"] = value
    return numbers


def _known_ids(out: Path) -> dict[str, str]:
    """Return the trackers that have followed a run, and its id in each."""
    try:
        notes = json.loads(read_text(out / NOTES, MAX_NOTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(notes, dict):
        return {}
    return {name: str(value) for name, value in notes.items() if name in TRACKERS}
