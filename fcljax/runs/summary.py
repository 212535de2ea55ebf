"""The results of a run: the content of summary.json, warnings for the user, and the run's
figures."""

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fcljax.config import RunConfig, improvement, plain
from fcljax.federated import communication, health, privacy
from fcljax.federated.communication import Traffic
from fcljax.federated.health import ACCURACY, SHARE
from fcljax.methods import short_name
from fcljax.models.networks import network_name
from fcljax.options import flag
from fcljax.parts.client import OWN
from fcljax.parts.reports import PROTOTYPE_DISTANCE
from fcljax.results import metrics
from fcljax.results.repeat import command, names_to_give
from fcljax.results.run_folder import rejected_uploads
from fcljax.runs.build import Experiment
from fcljax.runs.reconstructions import Rebuilt, draw_restored
from fcljax.runs.records import HELD_OUT, NEW, Records, Tested
from fcljax.runs.software import software
from fcljax.runs.traffic import (
    Counted,
    Payloads,
    handover_traffic,
    payload_shapes,
    traffic_by_round,
)
from fcljax.scenario import domains_of
from fcljax.types import RoundContext

PREDICTED = ("index", "task", "class", "predicted", "probability")  # columns of predictions.csv
# Most rows of predictions.csv, of 40 bytes each: with personal models there is a row for
# each client and test image.
MOST_PREDICTIONS = 1_000_000
NO_TRAFFIC = Traffic(0, 0, 0, 0)
PRIVACY_POINTS = 50  # points of the curve of epsilon
LEAST_SHARE = 1e-3  # share of the gradient's norm below which a loss term is reported
# Training has not converged if the loss still falls by more than STEEP in a task's last
# round, and less than ARRIVED of the training examples are classified correctly.
STEEP = 0.1
ARRIVED = 0.8
# how the names of options of training at the server end
OF_TRAINING = ("_epochs", "_lr")
# Training steps of a client in a task below which a schedule is short. The presets
# `improved` were chosen with a dozen to a hundred.
FEW_STEPS = 100
# Distance of prototypes from their class means, divided by the distance between class
# means, above which they are reported.
FAR = 1.0


def summarize(
    exp: Experiment,
    records: Records,
    personal: list[float | None] | None,
) -> dict[str, Any]:
    """Return the content of summary.json.

    Communication is counted from the pytrees; times are seconds. In a redrawn
    population a client has the classes of all its rounds: client_accuracy weighs them
    by its examples in the mean round.

    Args:
      exp: the finished experiment.
      records: its history.
      personal: `evaluate.personal_accuracy`.
    """
    settings = exp.settings
    payloads = payload_shapes(exp)
    seconds = {"client": 0.0, "server": 0.0, "eval": 0.0, "compile": 0.0} | records.seconds
    counts = records.counts
    # rows are true classes, columns predicted ones; the last column is "no prediction"
    confusion = np.asarray(records.confusion)
    by_part = {name: communication.count_scalars(tree) for name, tree in payloads.trainable.items()}
    method = short_name(settings.source)
    config = plain(settings)
    return {
        "method": method,
        "dataset": settings.dataset,
        "backbone": network_name(exp.inputs.backbone.config),
        "seed": settings.seed,
        "fidelity": settings.fidelity,
        **metrics.summarize(records.accuracy),
        "task_il": metrics.summarize(records.task_il),
        "by_image": _by_image(exp, records),
        "class_names": _class_names(exp),
        "task_classes": [[int(c) for c in task.classes if c >= 0] for task in exp.scenario.tasks],
        "domains": domains_of(exp.inputs.dataset, settings),
        "holdings": _holdings(exp).tolist(),
        "class_accuracy": metrics.per_class_accuracy(confusion).tolist(),
        "calibration": records.calibration,
        "unpredicted": metrics.unpredicted(confusion),
        "task_confusion": metrics.task_confusion(confusion, [task.classes for task in exp.scenario.tasks]),
        "client_accuracy": _client_accuracy(exp, confusion),
        **_of_user(records),
        **_base_and_new(exp, records),
        "personal_accuracy": personal,
        "personal": _personal(records),
        **_communication(exp, payloads, records),
        "extra_storage": communication.extra_storage(payloads.broadcast),
        "client_state": communication.size(payloads.state),
        "server_state": communication.size(payloads.server),
        "server_replay": _server_replay(exp, payloads, records),
        # images of another data set, which the server and all clients store
        "surrogate": communication.size(exp.frozen.surrogate),
        "trainable_params": sum(by_part.values()),
        "trainable_params_by_part": by_part,
        "time": {
            f"{name}_s": seconds[name]
            for name in ("compile", "client", "server", "eval", "search")
            if name in seconds
        },
        "client_images_per_s": _rate(counts["client_images"], seconds["client"]),
        # None where nothing trains
        "trained_images_per_s": _rate(counts["trained_images"], seconds["client"]) if by_part else None,
        "eval_images_per_s": _rate(counts["evaluated_images"], seconds["eval"]),
        "slot_efficiency": counts["useful_steps"] / max(counts["paid_steps"], 1),
        "lanes": exp.engine.lanes._asdict(),
        "hardware_changes": records.hardware_changes,
        "software": software(),
        "software_changes": records.software_changes,
        "rejected_uploads": int(counts["rejected"]),
        "refused_results": int(counts["refused"]),
        "rounds_without_upload": _without_upload(records),
        "privacy": _privacy(exp),
        "traces": max(exp.engine.traces.values(), default=0),
        "warnings": warnings_of(records, settings),
        "config": config,
        "given": names_to_give({"method": method} | config),
    }


def _client_accuracy(exp: Experiment, confusion: np.ndarray) -> list[float] | None:
    """Return the accuracy of the global model under each client's mix of classes; None for
    personal models."""
    if exp.method.personal:
        return None
    return metrics.client_accuracy(confusion, exp.scenario.holdings).tolist()


def confusion_csv(exp: Experiment, records: Records) -> str:
    """Return the confusion matrix of the last evaluation as CSV: a row for each true
    class, a column for each predicted one, and one for examples without a prediction."""
    names = _class_names(exp)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["class", *names, "none"])
    for name, counts in zip(names, records.confusion, strict=True):
        rows.writerow([name, *counts])
    return text.getvalue()


def predictions_csv(exp: Experiment, tested: Sequence[Tested]) -> str:
    """Return the predictions of the last evaluation as CSV: a row for each test example,
    and for each personal model on it.

    Classes have names, and tasks numbers from 0. An example without a prediction has an
    empty class and probability.
    """
    # -1 stands for "no prediction", and is the last place of the list
    names = [*_class_names(exp), ""]
    tasks = range(len(exp.scenario.tasks))
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    if exp.method.personal:
        rows.writerow(("client", *PREDICTED))
    else:
        rows.writerow(PREDICTED)
    for client, index, label, predicted in tested:
        # a class may return in a later task: its first one counts
        task = np.argmax([exp.scenario.tests(t, client)[index] for t in tasks], axis=0)
        columns = [
            index,
            task,
            [names[c] for c in label],
            [names[c] for c in predicted.label],
            ["" if np.isnan(p) else f"{p:.6f}" for p in predicted.confidence],
        ]
        if client is not None:
            columns.insert(0, np.full(len(index), client))
        rows.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _of_user(records: Records) -> dict[str, Any]:
    """Return what only some runs have: values of the user's metrics after each task, and the
    rounds of each task where it may end early."""
    fields: dict[str, Any] = {}
    if records.metrics:
        names = records.metrics[0]
        fields["metrics"] = {name: [_or_none(values[name]) for values in records.metrics] for name in names}
    if any(HELD_OUT in line for line in records.rounds):
        rounds = Counter(line["task"] for line in records.rounds)
        fields["rounds_played"] = [rounds[task] for task in sorted(rounds)]
    return fields


def _base_and_new(exp: Experiment, records: Records) -> dict[str, Any]:
    """Return accuracies on base and new classes after each task but the last, and their
    harmonic means (Zhou et al. 2022), where names of classes make the classifier.

    Base classes are those of the tasks so far, new classes those of later tasks; an example
    is classified among the base classes or among the new ones.
    """
    new = [
        line[NEW] for line in records.rounds if NEW in line and line["round"] == _last_round(records, line)
    ]
    if not new:
        return {}
    num_images = [int(exp.scenario.tests(task).sum()) for task in range(exp.sizes.tasks)]
    base = metrics.by_image(records.accuracy, num_images).acc[: len(new)].tolist()
    harmonic = [2 * b * n / max(b + n, 1e-12) for b, n in zip(base, new, strict=True)]
    return {"base_and_new": {"base": base, "new": new, "harmonic": harmonic}}


def _last_round(records: Records, line: dict[str, Any]) -> int:
    """Return the last round of the task of a line."""
    return max(other["round"] for other in records.rounds if other["task"] == line["task"])


def _or_none(value: float) -> float | None:
    """Return a number, and None in place of NaN and infinity, which JSON does not have."""
    if np.isfinite(value):
        return value
    return None


def _class_names(exp: Experiment) -> list[str]:
    """Return the names of the classes, in the class order of the run."""
    dataset = exp.inputs.dataset
    return [str(dataset.class_names[label]) for label in exp.scenario.labels(dataset)]


def _holdings(exp: Experiment) -> np.ndarray:
    """Return training examples per client and class [K, C]; per round if redrawn."""
    total = exp.scenario.holdings
    if exp.settings.population == "static":
        return total
    # a sum over rounds: the mean round tells how many examples a client has at a time
    return total / exp.sizes.rounds


def _personal(records: Records) -> dict[str, Any] | None:
    """Return the accuracies of personal models; None without such models.

    They are Class-IL and Task-IL accuracies, `[task learned][client][task]`. After each
    task they are summarised over clients: mean of the means over tasks, population
    standard deviation, minimum and maximum.
    """
    if not records.clients:
        return None
    # per client first, so that a client with many tasks counts once
    means = [_means_of_clients(accuracies) for accuracies in records.clients]
    statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {"accuracy": records.clients, "task_il": records.clients_task_il} | {
        name: [float(statistic(values)) for values in means] for name, statistic in statistics.items()
    }


def _means_of_clients(accuracies: list[list[float | None]]) -> list[float]:
    """Return the mean accuracy over tasks of each client that has learned something."""
    return [
        float(np.nanmean(np.array(of_tasks, float)))
        for of_tasks in accuracies
        if any(accuracy is not None for accuracy in of_tasks)
    ]


def _by_image(exp: Experiment, records: Records) -> dict[str, Any]:
    """Return HePCo's metrics under the names of its release.

    They are accuracies over images, those of the merged model before the server changes
    it (predisacc), and F_N (drop).
    """
    # tasks may have test images in common where clients draw from a pool
    num_images = [int(exp.scenario.tests(task).sum()) for task in range(exp.sizes.tasks)]
    by_name = metrics.by_image(records.accuracy, num_images)._asdict()
    values = {name: metrics.without_nan(accuracies) for name, accuracies in by_name.items()}
    values["predisacc"] = None
    if records.provisional:
        merged = metrics.by_image(records.provisional, num_images).acc
        values["predisacc"] = metrics.without_nan(merged)
    return values | {"drop": metrics.drop(records.accuracy, num_images)}


def _server_replay(
    exp: Experiment,
    payloads: Payloads,
    records: Records,
) -> dict[str, int] | None:
    """Return the size of what the server replays of finished tasks, outside of its
    state; None if nothing.

    Returns:
      examples, bytes: all of them at the end of the run.
      capacity: number of examples at most.
      example_bytes: bytes that a client sends for an example.
      image_bytes: bytes of an image of the network's size, one for each channel of a pixel.
      uploaded: the examples in all uploads.
    """
    if exp.method.server_replay is None:
        return None
    round_context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, True)
    # by shapes: nothing is computed
    buffer = jax.eval_shape(exp.method.server_replay.buffer, round_context, payloads.server)
    capacity = len(buffer.label)
    example_bytes = communication.num_bytes(buffer.examples) // capacity
    count = int(records.counts["replay_examples"])
    side = exp.inputs.backbone.config.image_size
    # the images that clients have sent, all rounds together
    uploaded = sum(line.get("restore_images") or 0 for line in records.rounds)
    return {
        "examples": count,
        "bytes": count * example_bytes,
        "capacity": capacity * len(exp.scenario.tasks),
        "example_bytes": example_bytes,
        "image_bytes": 3 * side**2,
        "uploaded": int(uploaded),
    }


def _communication(
    exp: Experiment,
    payloads: Payloads,
    records: Records,
) -> dict[str, Any]:
    """Return the traffic per client and round, by name for rounds at a task's start or
    end, and in total.

    `handover` is per client and task: every client downloads it when the next task
    begins.
    """
    by_round = traffic_by_round(exp, payloads)
    handover = handover_traffic(payloads)
    usual = NO_TRAFFIC
    extra: dict[str, Any] = {}
    for round_, traffic in zip(exp.method.rounds, by_round, strict=True):
        # what every round costs; task starts and ends are listed by name
        if round_.when == "round":
            usual = Traffic(*map(sum, zip(usual, traffic, strict=True)))
        else:
            extra[round_.when] = traffic._asdict()
    if handover.download_bytes:
        extra["handover"] = handover._asdict()
    counted = Counted(by_round, handover, exp.sizes.clients)
    return {
        "communication": usual._asdict(),
        "communication_extra": extra,
        "communication_total": counted.total(records.uploads, exp.sizes.tasks - 1)._asdict(),
    }


def _privacy(exp: Experiment) -> dict[str, Any] | None:
    """Return the guarantee of central differential privacy; None without noise or delta.

    It is given after all rounds, and as [round, epsilon] at up to 50 of them.
    """
    noise = exp.settings.noise_multiplier
    delta = exp.settings.dp_delta
    if not noise or not delta:
        return None
    rounds = len(exp.scenario.tasks) * exp.sizes.rounds
    participation = _largest_share(exp)
    spent = privacy.epsilon(noise, participation, rounds, delta)
    # not every round: the accountant takes its time at each point
    points = np.linspace(1, rounds, min(rounds, PRIVACY_POINTS)).round().astype(int)
    points = np.unique(points).tolist()
    curve = privacy.by_round(noise, participation, points, delta)
    return {
        "epsilon": spent,
        "delta": delta,
        "noise_multiplier": noise,
        "by_round": [list(pair) for pair in zip(points, curve, strict=True)],
    }


def _largest_share(exp: Experiment) -> float:
    """Return the largest share of the clients that took part in a round."""
    participation = exp.settings.participation
    # a number of clients is the largest share where the fewest take part
    if participation <= 1:
        return participation
    fewest = min(int(np.sum(of_task[0].count > 0)) for of_task in exp.scenario.partitions)
    return min(1.0, participation / max(1, fewest))


def _without_upload(records: Records) -> list[list[int]]:
    """Return task and round, from 1, of the rounds without a valid upload, in which
    nothing was learned."""
    empty = (records.rounds[i] for i in health.without_upload(records.rounds))
    return [[line["task"] + 1, line["round"] + 1] for line in empty]


def learned_nothing(summary: dict[str, Any]) -> bool:
    """Return whether no round of a run had a valid upload."""
    # tasks that were played, which may be fewer than planned
    rounds = summary["config"]["rounds"] * len(summary["A"])
    if "rounds_played" in summary:
        rounds = sum(summary["rounds_played"])
    return len(summary["rounds_without_upload"]) >= rounds > 0


def warnings_of(records: Records, settings: RunConfig) -> list[str]:
    """Return the warnings about a finished run, one line each.

    They name rejected uploads, losses that are not finite or worse than guessing,
    rejected results of rounds, test images without a prediction, loss terms without
    influence, and training that has not converged.
    """
    lines = []
    counts = records.counts
    if counts["rejected"]:
        rounds = sum(rejected_uploads([line]) > 0 for line in records.rounds)
        lines.append(
            f"warning: the server rejected {counts['rejected']} uploads in {rounds} of "
            f"{len(records.rounds)} rounds: they had NaN, an infinity or an impossible claim"
        )
    # apart from NaN: an impossible claim is a lie, or a bug in the method's own claims
    lies = {name: times for name, times in counts.items() if name.startswith("impossible ")}
    if lies:
        counted = ", ".join(f"{name.partition(' ')[2]} ({times})" for name, times in lies.items())
        lines.append(f"warning: impossible claims of clients, with their number: {counted}")
    lines += health.training_warnings(records.rounds)
    if counts["refused"]:
        line = next((line for line in records.rounds if line["refused"]), None)
        where = ""
        if line:
            where = f", first in task {line['task'] + 1}, round {line['round'] + 1}"
        lines.append(
            f"warning: the result of a round was not finite {counts['refused']} times, and the server kept "
            f"the previous model{where}"
        )
    confusion = np.asarray(records.confusion)
    # a run that evaluated nothing has no matrix, for which `unpredicted` has no answer
    lost = metrics.unpredicted(confusion) if records.confusion else 0
    if lost:
        lines.append(
            f"warning: the last model's outputs are not finite for {lost} of {confusion.sum()} test "
            "examples, which count as wrong"
        )
    lines += [*_idle_terms(records), *_not_arrived(records, settings), *_far_prototypes(records)]
    return lines + _short_schedule(records, settings)


def _idle_terms(records: Records) -> list[str]:
    """Return a line for each further loss term that hardly moved the model."""
    # not the cross-entropy, which every method has
    names = {name for line in records.rounds for name in line if name.startswith(SHARE)} - {SHARE + OWN}
    lines = []
    for name in sorted(names):
        # the largest over all rounds: a term may act in some tasks only
        largest = max((line.get(name) or 0.0 for line in records.rounds), default=0.0)
        term = name.removeprefix(SHARE)
        if largest == 0:
            lines.append(
                f"warning: {term!r} never contributes to the gradient, so this run does not exercise "
                f"the method"
            )
        elif largest < LEAST_SHARE:
            lines.append(
                f"warning: {term!r} contributes at most {100 * largest:.2g} % of the gradient's norm, so "
                f"this run hardly exercises the method"
            )
    return lines


def _not_arrived(records: Records, settings: RunConfig) -> list[str]:
    """Return a line for each training that has not converged in the median task.

    The server's trainings are the metrics that have both a loss and an accuracy.
    """
    names = {name for line in records.rounds for name in line}
    with_loss = {name.removesuffix("_loss") for name in names if name.endswith("_loss")}
    at_server = sorted(name for name in with_loss if f"{name}_accuracy" in names)
    lines = []
    # the median task: the first one usually converges
    if late := _still_falls(records, "loss", ACCURACY):
        lines.append(
            f"warning: training has not converged: in the last round of a task the loss still fell by "
            f"{100 * late[0]:.0f} %, and clients classify {100 * late[1]:.0f} % of their training examples "
            f"correctly; try more --rounds or --epochs, or a larger learning rate (--lr and the adapter's)"
        )
    for name in at_server:
        if late := _still_falls(records, f"{name}_loss", f"{name}_accuracy"):
            lines.append(
                f"warning: the server's training has not converged: in the last round of a task {name}_loss "
                f"still fell by {100 * late[0]:.0f} %, and the server classifies {100 * late[1]:.0f} % of "
                f"its examples correctly; try larger values of {_of_server(settings)}"
            )
    return lines


def _still_falls(
    records: Records,
    loss: str,
    accuracy: str,
) -> tuple[float, float] | None:
    """Return the loss's relative fall in a task's last round, and the accuracy there.

    Both are of the median task. None: the loss falls little, or the accuracy is high.
    """
    falls = []
    right = []
    for task in sorted({line["task"] for line in records.rounds}):
        of_task = [line for line in records.rounds if line["task"] == task and line.get(loss) is not None]
        # the loss of a task's only round cannot fall
        if len(of_task) < 2 or not of_task[-2][loss] > 0:
            continue
        falls.append(1 - of_task[-1][loss] / of_task[-2][loss])
        right.append(of_task[-1].get(accuracy) or 0.0)
    if not falls:
        return None
    fall = float(np.median(falls))
    share = float(np.median(right))
    if not (fall > STEEP and share < ARRIVED):
        return None
    return (fall, share)


def _of_server(settings: RunConfig) -> str:
    """Return the options of training at the server, such as `--server-epochs`."""
    names = [field.name for field in dataclasses.fields(settings)]
    trainings = {name.removesuffix("_epochs") for name in names if name.endswith("_epochs")}
    options = [name for name in names if name.endswith(OF_TRAINING) and name.rpartition("_")[0] in trainings]
    return " and ".join(map(flag, options)) or "the options of its training"


def _far_prototypes(records: Records) -> list[str]:
    """Return a line if learned prototypes end far from their class means."""
    last_rounds = {line["task"]: line for line in records.rounds}
    distances = [
        value
        for line in last_rounds.values()
        for name, value in line.items()
        if name.endswith(PROTOTYPE_DISTANCE) and value is not None
    ]
    # the median over tasks; none if the method learns no prototypes
    distance = 0.0
    if distances:
        distance = float(np.median(distances))
    if not distance > FAR:
        return []
    return [
        f"warning: the distance of prototypes from their classes' mean features is {distance:.1f} times the "
        f"distance between these means; --headtune starts prototypes at the means, and more --rounds or "
        f"--epochs or a larger --lr bring them closer"
    ]


def _short_schedule(records: Records, settings: RunConfig) -> list[str]:
    """Return a line if clients take few steps and the method has a preset for that."""
    # a client counts once for each round in which it took part
    visits = sum(line["participants"] for line in records.rounds)
    trained = records.counts.get("trained_images", 0)
    if not visits or not trained:
        return []
    steps = settings.rounds * trained / visits / settings.batch_size
    # whether the preset helps long schedules too was not tried
    changes = {}
    if steps < FEW_STEPS:
        changes = improvement(settings)
    if not changes:
        return []
    what = " ".join(command({"method": settings.method} | changes, None)[3:])
    return [
        f"note: clients take about {max(1, round(steps))} steps per task, which is a short schedule; on "
        f"held-out images --fidelity improved ({what}) was better under such schedules"
    ]


def _rate(amount: float | int, seconds: float) -> float:
    """Return an amount per second; NaN if no time was measured."""
    if seconds <= 0:
        return float("nan")
    return amount / seconds


# ---- figures ---------------------------------------------------------------------------

FIGURES = ("accuracy.png", "matrix.png", "reliability.png", "classes.png")
RESTORED = "restored.png"  # where a method's server can reconstruct images


def figures_of(
    exp: Experiment,
    summary: dict[str, Any],
) -> dict[str, Callable[[Path], object]]:
    """Return file name -> draw(path) for FIGURES.

    They show the accuracy curve, the accuracy matrix, reliability, and the examples of
    each client and class (in a redrawn population, those of the mean round).
    """
    from fcljax.results import figures

    name = f"{summary['method']} on {summary['dataset']}"
    holdings = _holdings(exp)
    classes = [task.classes for task in exp.scenario.tasks]
    draw = (
        lambda path: figures.save(path, figures.accuracy_curve({name: summary["A"]})),
        lambda path: figures.save(path, figures.accuracy_matrix(summary["accuracy"])),
        lambda path: figures.save(path, figures.reliability(summary["calibration"])),
        lambda path: figures.save(path, figures.class_counts(holdings, classes)),
    )
    return dict(zip(FIGURES, draw, strict=True))


def draw_figures(
    exp: Experiment,
    summary: dict[str, Any],
    rebuilt: tuple[Rebuilt, Rebuilt] | None,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Draw all figures of a run.

    Report a failure in one line: the run does not depend on them."""
    figures = figures_of(exp, summary)
    if rebuilt:
        figures[RESTORED] = partial(draw_restored, images=rebuilt[0].images, label=rebuilt[0].label)
    for name, draw in figures.items():
        # after hours of training, no bug of a plotting library may fail the run
        path = folder / name
        try:
            draw(path)
        except Exception as error:
            say(f"warning: the figure {path} could not be drawn: {type(error).__name__}: {error}")


def missing_figures(out: Path, summary: dict[str, Any]) -> list[str]:
    """Return the figures of a finished run that its directory does not have."""
    names = [*FIGURES]
    if "restored" in summary:
        names.append(RESTORED)
    return [name for name in names if not (out / "figures" / name).exists()]
