"""Other programs that follow a run: TensorBoard, Weights & Biases and MLflow. Each is an extra that is
imported only when a run asks for it; what fails in one is told once, and the run goes on without it."""

import contextlib
import functools
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcljax.errors import InputError, choose
from fcljax.files import write_text

NOTES = "trackers.json"  # in a run directory: by tracker, what it needs to go on with the same run
Scalars = dict[str, float | int]


class Beginning(NamedTuple):
    """What a tracker is told of a run: its directory, all settings by name, how many rounds are done (0 for a
    new run), and the id by which the tracker knows it; empty for one that it has not met."""

    out: Path
    settings: Mapping[str, Any]
    done: int
    id: str


class Tracker(NamedTuple):
    """A tracker at work. `id`: of its run, to go on with; log(number of the round from 0 on, values);
    finish(values of the summary, none if the run was cut off)."""

    id: str
    log: Callable[[int, Scalars], None]
    finish: Callable[[Scalars], None]


class Following(NamedTuple):
    """What a run tells its trackers: heard(a line of metrics.jsonl) and ended(the summary)."""

    heard: Callable[[dict[str, Any]], None]
    ended: Callable[[dict[str, Any]], None]


NOBODY = Following(lambda line: None, lambda summary: None)


class Entry(NamedTuple):
    """A tracker that there is: the module that it needs, and how it starts."""

    module: str
    start: Callable[[Beginning], Tracker]


def tensorboard(run: Beginning) -> Tracker:
    """Event files in the run's folder tensorboard; of a run that goes on, what was logged of later rounds
    than its checkpoint is taken back."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(logdir=str(run.out / "tensorboard"), purge_step=run.done if run.id else None)
    if not run.id:
        writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in run.settings.items()))

    def log(step: int, values: Scalars) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def finish(values: Scalars) -> None:
        for name, value in values.items():
            writer.add_scalar(f"summary/{name}", value, 0)
        writer.close()

    return Tracker(run.id or "tensorboard", log, finish)


def wandb(run: Beginning) -> Tracker:
    """A run of Weights & Biases in the project fcljax, or $WANDB_PROJECT; WANDB_MODE=offline keeps it
    here."""
    import wandb as library

    name = run.id or secrets.token_hex(8)
    at_work = library.init(
        id=name,
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", "fcljax"),
        name=run.out.name,
        dir=str(run.out),
        config=dict(run.settings),
    )

    def finish(values: Scalars) -> None:
        at_work.summary.update(values)
        at_work.finish()

    return Tracker(name, lambda step, values: at_work.log(values, step=step), finish)


def mlflow(run: Beginning) -> Tracker:
    """A run of MLflow in the experiment fcljax, or $MLFLOW_EXPERIMENT_NAME, of the store that
    $MLFLOW_TRACKING_URI names. A round that is made again after a checkpoint is not logged again."""
    from mlflow import MlflowClient

    client, name = MlflowClient(), run.id
    if not name:
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fcljax")
        found = client.get_experiment_by_name(title)
        place = found.experiment_id if found else client.create_experiment(title)
        name = client.create_run(place, run_name=run.out.name).info.run_id
        for sizes, value in run.settings.items():
            client.log_param(name, sizes, str(value)[:500])
    client.update_run(name, status="RUNNING")

    @functools.cache
    def known(key: str) -> set[int]:
        """The rounds that a run which goes on has logged already, some of them after its checkpoint: MLflow
        keeps two values of one round, and draws both."""
        return {each.step for each in client.get_metric_history(name, key)} if run.id else set()

    def log(step: int, values: Scalars) -> None:
        for key, value in values.items():
            if step not in known(key):
                client.log_metric(name, key, value, step=step)

    def finish(values: Scalars) -> None:
        for key, value in values.items():
            client.log_metric(name, f"summary/{key}", value)
        client.set_terminated(name, "FINISHED" if values else "KILLED")

    return Tracker(name, log, finish)


TRACKERS = {
    "tensorboard": Entry("tensorboardX", tensorboard),
    "wandb": Entry("wandb", wandb),
    "mlflow": Entry("mlflow", mlflow),
}


def parse(text: str | None) -> tuple[str, ...]:
    """The trackers that a list such as tensorboard,mlflow names.

    Raises:
      InputError: for an unknown one, or one whose package is not installed.
    """
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    for name in names:
        if importlib.util.find_spec(TRACKERS[choose("track", name, TRACKERS)].module) is None:
            raise InputError(f"track: {name!r} is not installed; pip install 'fcljax[{name}]'")
    return names


@contextlib.contextmanager
def following(
    names: Sequence[str], out: Path, settings: Mapping[str, Any], done: int, tell: Callable[[str], None]
) -> Iterator[Following]:
    """Trackers that follow a run until the block ends, these and those that have followed it before.

    Args:
      names: of TRACKERS.
      out: the run directory.
      settings: of the run.
      done: rounds that it has behind it.
      tell: what went wrong, in a line.

    """
    noted = _noted(out)
    at_work: dict[str, Tracker] = {}
    last: Scalars = {}

    def safely(name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            at_work.pop(name, None)
            tell(f"warning: {name} follows the run no longer: {type(error).__name__}: {error}")
            return None

    for name in dict.fromkeys([*names, *noted]):
        beginning = Beginning(out, settings, done, noted.get(name, ""))
        tracker = safely(name, lambda name=name, beginning=beginning: TRACKERS[name].start(beginning))
        if tracker is not None:
            at_work[name] = tracker
    if at_work:
        write_text(out / NOTES, json.dumps({name: tracker.id for name, tracker in at_work.items()}) + "\n")

    def heard(line: dict[str, Any]) -> None:
        step = line["task"] * int(settings["rounds"]) + line["round"]
        for name, tracker in list(at_work.items()):
            safely(name, lambda tracker=tracker: tracker.log(step, scalars(line)))

    try:
        yield Following(heard, lambda summary: last.update(scalars(summary)))
    finally:
        for name, tracker in list(at_work.items()):
            safely(name, lambda tracker=tracker: tracker.finish(dict(last)))


def scalars(values: Mapping[str, Any], prefix: str = "") -> Scalars:
    """The numbers among values, those of inner mappings by name/name, and accuracies by task."""
    found: Scalars = {}
    for name, value in values.items():
        if isinstance(value, dict) and name != "config":
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    if not prefix and isinstance(values.get("accuracy"), list) and "round" in values:
        own = {f"accuracy/task {t + 1}": value for t, value in enumerate(values["accuracy"])}
        found |= {name: value for name, value in own.items() if value is not None}
    return found


def _noted(out: Path) -> dict[str, str]:
    """The trackers that have followed a run, and by which id."""
    try:
        found = json.loads((out / NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = found.items() if isinstance(found, dict) else ()
    return {name: str(value) for name, value in known if name in TRACKERS}
