"""The history of a run in plain JSON values: a line per round, totals, and seconds per
section."""

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int
from rich.console import Console

from fcljax.federated.communication import Traffic
from fcljax.federated.engine import RoundReport
from fcljax.federated.health import CLASSES, NOT_FINITE
from fcljax.runs.predict import Predicted
from fcljax.terminal import NotebookBar, progress_bar

HELD_OUT = "A_held_out"  # accuracy on a task's held-out training examples, with --stop-when-flat
NEW = "A_new"  # accuracy on the classes of later tasks, among these
OF_USER = "metric_"  # before the names of the user's metrics


class Evaluated(NamedTuple):
    """Accuracies over all test examples of each task seen so far; None: not evaluated.

    For a method with personal models, they are means over clients, each on the classes
    of a task that the client has learned.
    """

    accuracy: list[float] | None = None
    """Class-IL accuracy of the global model, among all classes seen so far."""
    provisional: list[float] | None = None
    """Class-IL accuracy of the merged model before the server trained, for methods whose
    server trains."""
    task_il: list[float] | None = None
    """Task-IL accuracy of the global model, among the classes of the example's task."""
    personal: list[float | None] | None = None
    """Accuracy of each client's personal model, on test examples of the classes that
    the client has learned; None for a client that has learned none."""
    metrics: dict[str, float] | None = None
    """Values of the user's metrics."""
    new: float | None = None
    """Accuracy on the classes of later tasks, among these, where names of classes make the
    classifier; None after the last task."""


NOT_EVALUATED = Evaluated()


class Tested(NamedTuple):
    """Predictions of one model on its test examples."""

    client: int | None
    """Client whose personal model it is; None: the global model."""
    index: Int[np.ndarray, " n"]
    """Which test examples of the run."""
    label: Int[np.ndarray, " n"]
    """Their classes, by position in the class order."""
    predicted: Predicted


@dataclasses.dataclass
class Records:
    """The history of a run."""

    # the lines of metrics.jsonl
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # after each task, `Evaluated`
    accuracy: list[list[float]] = dataclasses.field(default_factory=list)
    provisional: list[list[float]] = dataclasses.field(default_factory=list)
    task_il: list[list[float]] = dataclasses.field(default_factory=list)
    personal: list[list[float | None]] = dataclasses.field(default_factory=list)
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # [task learned][client][task], for methods with personal models
    clients: list[list[list[float | None]]] = dataclasses.field(default_factory=list)
    clients_task_il: list[list[list[float | None]]] = dataclasses.field(default_factory=list)
    # of the last evaluation
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    calibration: dict[str, Any] = dataclasses.field(default_factory=dict)
    # of the last evaluation in this process; too large for checkpoints
    tested: Sequence[Tested] = ()
    # totals
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, float | int] = dataclasses.field(default_factory=dict)
    # one number for each of the method's rounds
    uploads: list[int] = dataclasses.field(default_factory=list)
    # sha256 of each finished task's file of examples that the server replays
    kept: list[str] = dataclasses.field(default_factory=list)
    # trials of --scale fit and their choice, as in search.json
    rate_search: dict[str, Any] = dataclasses.field(default_factory=dict)
    # [finished rounds, what changed] for each time that
    # the run was resumed on other hardware
    hardware_changes: list[list[int | str]] = dataclasses.field(default_factory=list)
    # the same for other versions
    software_changes: list[list[int | str]] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return a copy for a checkpoint, as plain JSON values."""
        values = dataclasses.asdict(dataclasses.replace(self, tested=()))
        del values["tested"]
        return values

    def add(self, **counts: float | int) -> None:
        """Add to the totals."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def keep(self, evaluated: Evaluated) -> None:
        """Add the accuracies after a task."""
        # Each field has a list of its name here, which stays as it is for what was not
        # measured. `new` has none: it is in the lines of the rounds.
        for name, values in evaluated._replace(new=None)._asdict().items():
            if values is not None:
                getattr(self, name).append(values)

    def count(self, report: RoundReport) -> None:
        """Add a round's numbers to the totals."""
        # before the first round there is no number for any of the method's rounds
        counts_before = self.uploads or [0] * len(report.uploads)
        self.uploads = [a + b for a, b in zip(counts_before, report.uploads, strict=True)]
        self.add(
            rejected=report.rejected,
            **{f"impossible {name}": times for name, times in report.impossible.items()},
            refused=report.refused,
            client_images=report.examples,
            trained_images=report.training_examples,
            useful_steps=report.useful_steps,
            paid_steps=report.paid_steps,
        )

    def record(
        self,
        t: int,
        r: int,
        report: RoundReport,
        evaluated: Evaluated,
        sent: Traffic,
        besides: Sequence[RoundReport] = (),
        classes_seen: int | None = None,
        held_out_accuracy: float | None = None,
    ) -> dict[str, Any]:
        """Add a round to the history, and return its line of metrics.jsonl.

        Args:
          t: index of the task.
          r: index of the round within the task.
          report: of the round.
          evaluated: accuracies after the round.
          sent: traffic of all clients together.
          besides: reports of exchanges at a task's start and end. The totals have them
            already; their metrics join those of the round.
          classes_seen: number of classes of the tasks so far; None: unknown.
          held_out_accuracy: on the held-out training examples of the task; None: there are none.
        """
        line: dict[str, Any] = {"task": t, "round": r, **_metrics(report, besides)}
        line |= {"participants": report.participants}
        if classes_seen is not None:
            line[CLASSES] = classes_seen
        line |= {
            "rejected": report.rejected,
            "refused": report.refused,
            "slot_efficiency": report.slot_efficiency,
            "upload_bytes": sent.upload_bytes,
            "download_bytes": sent.download_bytes,
        }
        rejected_besides = sum(exchange.rejected for exchange in besides)
        if rejected_besides:
            line["rejected_besides"] = rejected_besides
        # claims of the round and of the exchanges around it, under one name each
        lies = sum((Counter(exchange.impossible) for exchange in (report, *besides)), Counter())
        if lies:
            line["impossible"] = dict(lies)
        if evaluated.accuracy is not None:
            line["accuracy"] = [_finite(value) for value in evaluated.accuracy]
            # nanmean: a task without test images has no accuracy
            line["A"] = float(np.nanmean(evaluated.accuracy))
        if evaluated.provisional is not None:
            line["A_provisional"] = float(np.nanmean(evaluated.provisional))
        if evaluated.task_il is not None:
            line["A_task_il"] = float(np.nanmean(evaluated.task_il))
        if evaluated.new is not None:
            line[NEW] = evaluated.new
        if held_out_accuracy is not None:
            line[HELD_OUT] = held_out_accuracy
        line |= {f"{OF_USER}{name}": value for name, value in (evaluated.metrics or {}).items()}
        line = {name: _finite(value) for name, value in line.items()}
        self.rounds.append(line)
        self.count(report)
        return line


def _metrics(report: RoundReport, besides: Sequence[RoundReport]) -> dict[str, float]:
    """Return the metrics of a round and of the exchanges at a task's start and end.

    Those of the round keep their names. The share of losses that are not finite is left
    out where it is 0.
    """
    values: dict[str, float] = {}
    for exchange in besides:
        for name, value in exchange.metrics.items():
            # a metric of both: the round's keeps the name, by which runs are compared
            if name in report.metrics:
                name = f"besides_{name}"
            values[name] = value
    values |= report.metrics
    # nearly always 0, and a line is read by people
    return {name: value for name, value in values.items() if name != NOT_FINITE or value > 0}


def _finite(value: Any) -> Any:
    """Return None in place of NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def json_line(line: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl."""
    return json.dumps(line, allow_nan=False) + "\n"


class Clock:
    """Seconds per section of a run.

    Tracing and compilation, which JAX reports, have their own section."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self.compiling = 0.0

    def __enter__(self) -> "Clock":
        # compilations happen inside of any call, and only jax's events tell how long
        # they took
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.compiling += duration_secs

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start = time.perf_counter()
        compiled = self.compiling
        yield
        compiled = self.compiling - compiled
        # threads that compile in parallel can report more seconds than have passed
        spent = max(0.0, time.perf_counter() - start - compiled)
        self.seconds[section] = self.seconds.get(section, 0.0) + spent
        self.seconds["compile"] = self.seconds.get("compile", 0.0) + compiled


def rounds_bar(console: Console) -> Any:
    """Return a progress bar over rounds, whose task has the fields of `last_round`."""
    label = "task {task.fields[t]} round {task.fields[r]}"
    numbers = "loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"
    if console.is_jupyter and not console.quiet:
        return NotebookBar(label, numbers)
    return progress_bar(label, numbers, console)


def last_round(records: Records) -> dict[str, Any]:
    """Return the fields that the progress bar shows of the last round."""
    line = {}
    if records.rounds:
        line = records.rounds[-1]
    # rounds between evaluations have no accuracy: the newest one is shown
    accuracy = next((line["A"] for line in reversed(records.rounds) if "A" in line), None)
    loss = "-"
    if line.get("loss") is not None:
        loss = f"{line['loss']:.4g}"
    percent = "-"
    if accuracy is not None:
        percent = f"{100 * accuracy:.1f}%"
    return {
        "t": str(line.get("task", 0) + 1),
        "r": str(line.get("round", -1) + 1),
        "loss": loss,
        "accuracy": percent,
    }
