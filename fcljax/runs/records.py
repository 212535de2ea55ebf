"""What a run remembers on the host: a line per round, totals, and where its time went. Plain JSON values."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fcljax.federated.engine import RoundReport


@dataclasses.dataclass
class Records:
    """Host-side history of a run: one entry per round, accuracies after each task, of what was merged too
    where the server changes it (`provisional`), the last confusion matrix and calibration, and totals.
    `uploads` counts the clients that took part in each of the method's rounds. `clients`: after each task,
    every client's accuracies per task, where clients are evaluated as themselves. `told`, `clients_told`: the
    same where the task of each row is told. `kept`: sha256 of the file of each finished task, where the
    server keeps something of it."""

    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    accuracy: list[list[float]] = dataclasses.field(default_factory=list)
    provisional: list[list[float]] = dataclasses.field(default_factory=list)
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    calibration: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, float | int] = dataclasses.field(default_factory=dict)
    uploads: list[int] = dataclasses.field(default_factory=list)
    clients: list[list[list[float | None]]] = dataclasses.field(default_factory=list)
    told: list[list[float]] = dataclasses.field(default_factory=list)
    clients_told: list[list[list[float | None]]] = dataclasses.field(default_factory=list)
    kept: list[str] = dataclasses.field(default_factory=list)

    def add(self, **counts: float | int) -> None:
        """Add to the totals."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def keep(
        self, accuracy: list[float] | None, provisional: list[float] | None, told: list[float] | None
    ) -> None:
        """Add the accuracies after a task."""
        self.accuracy += [accuracy] if accuracy is not None else []
        self.provisional += [provisional] if provisional is not None else []
        self.told += [told] if told is not None else []

    def count(self, done: RoundReport) -> None:
        """Add what a round did to the totals."""
        self.uploads = [
            a + b for a, b in zip(self.uploads or [0] * len(done.uploads), done.uploads, strict=True)
        ]
        self.add(
            rejected=done.rejected,
            refused=done.refused,
            client_images=done.examples,
            trained_images=done.training_examples,
            useful_steps=done.useful_steps,
            paid_steps=done.paid_steps,
        )


def record(
    records: Records,
    t: int,
    r: int,
    done: RoundReport,
    row: list[float] | None,
    provisional: list[float] | None = None,
    told: list[float] | None = None,
) -> dict[str, Any]:
    """Add one round to the history; `row` holds accuracies per task where the round was evaluated,
    `provisional` those of what was merged, and `told` those where the task is told."""
    line: dict[str, Any] = {"task": t, "round": r, **done.metrics, "participants": done.participants}
    line |= {"rejected": done.rejected, "refused": done.refused, "slot_efficiency": done.slot_efficiency}
    if row is not None:
        line["accuracy"] = [None if np.isnan(value) else value for value in row]
        line["A"] = float(np.nanmean(row))
    if provisional is not None:
        line["A_provisional"] = float(np.mean(provisional))
    if told is not None:
        line["A_task_il"] = float(np.nanmean(told))
    number = lambda value: None if isinstance(value, float) and not np.isfinite(value) else value
    line = {name: number(value) for name, value in line.items()}
    records.rounds.append(line)
    records.count(done)
    return line


def json_line(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl."""
    return json.dumps(line, allow_nan=False) + "\n"


class Clock:
    """Seconds per section, with compilation apart.

    JAX reports how long it traced and compiled while a section was open.
    """

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.compiling = seconds, 0.0

    def __enter__(self) -> "Clock":
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.compiling += duration_secs

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start, compiled = time.perf_counter(), self.compiling
        yield
        compiled = self.compiling - compiled
        spent = max(0.0, time.perf_counter() - start - compiled)
        self.seconds[section] = self.seconds.get(section, 0.0) + spent
        self.seconds["compile"] = self.seconds.get("compile", 0.0) + compiled


def progress_bar(console: Console) -> Progress:
    """Task, round, loss, accuracy and the time left."""
    return Progress(
        TextColumn("task {task.fields[t]} round {task.fields[r]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def shown(records: Records) -> dict[str, Any]:
    """What the progress bar says of the last round, as fields of its task."""
    last = records.rounds[-1] if records.rounds else {}
    accuracy = next((line["A"] for line in reversed(records.rounds) if "A" in line), None)
    return {
        "t": str(last.get("task", 0) + 1),
        "r": str(last.get("round", -1) + 1),
        "loss": f"{last['loss']:.4g}" if last.get("loss") is not None else "-",
        "accuracy": f"{100 * accuracy:.1f}%" if accuracy is not None else "-",
    }
