"""The results of a run: what summary.json says, what a user must be told, and the run's figures."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fcljax.config import RunConfig
from fcljax.federated import communication, privacy
from fcljax.federated.communication import Traffic
from fcljax.models.networks import network_name
from fcljax.results import metrics
from fcljax.runs.build import Experiment
from fcljax.runs.records import Records
from fcljax.types import Broadcast, ClientContext, ClientInfo, Round, RoundContext, Upload

NO_TRAFFIC = Traffic(0, 0, 0, 0)


class Payloads(NamedTuple):
    """Shapes of what crosses the wire: one client's upload in each of the method's rounds, the broadcast,
    what of a finished task is handed over, a client's and the server's state, and the named parts that a
    client trains."""

    uploads: tuple[Upload, ...]
    broadcast: Broadcast
    handover: PyTree
    state: PyTree
    server: PyTree
    trainable: dict[str, PyTree]


def payload_shapes(exp: Experiment) -> Payloads:
    """The shapes, found without computing anything."""
    method, task = exp.method, exp.scenario.tasks[0]
    info = ClientInfo.example(exp.sizes.classes)

    def upload(each: Round, context: ClientContext, state: PyTree, key: jax.Array) -> Upload:
        local = each.program.start(context, state, key)
        return each.program.finish(context, local, state)[0]

    def everything(key, frozen, task, info):
        server = method.init(key, frozen)
        round_context = RoundContext.on_host(frozen, task, 0, False)
        broadcast, state = method.broadcast(round_context, server), method.init_client(key, server)
        context = ClientContext(frozen, broadcast.payload, broadcast.cached, task, info)
        uploads = tuple(upload(each, context, state, key) for each in method.rounds)
        named = method.trainable(round_context, server) if method.trainable else {"upload": uploads[0].mean}
        handover = method.handover(round_context, server) if method.handover else ()
        return Payloads(uploads, broadcast, handover, state, server, named)

    return jax.eval_shape(everything, exp.key, exp.frozen, task, info)


def traffic_by_round(exp: Experiment, payloads: Payloads) -> list[Traffic]:
    """What one client sends and gets in each of the method's rounds; where nothing is merged it sends
    nothing."""
    pairs = zip(exp.method.rounds, payloads.uploads, strict=True)
    return [
        communication.traffic(upload if each.server else None, payloads.broadcast) for each, upload in pairs
    ]


def summarize(
    exp: Experiment, method_name: str, cfg: RunConfig, records: Records, personal: list[float | None] | None
) -> dict[str, Any]:
    """What summary.json holds.

    Communication is counted from the real pytrees; times are seconds. A client of a redrawn population has
    the classes of all its rounds: client_accuracy weighs them by the rows that it was dealt in the mean
    round.
    """
    payloads = payload_shapes(exp)
    seconds = {"client": 0.0, "server": 0.0, "eval": 0.0, "compile": 0.0} | records.seconds
    counts, confusion = records.counts, np.asarray(records.confusion)
    by_part = {name: communication.scalars(tree) for name, tree in payloads.trainable.items()}
    return {
        "method": method_name,
        "dataset": cfg.dataset,
        "backbone": network_name(exp.inputs.backbone.config),
        "seed": cfg.seed,
        "fidelity": cfg.fidelity,
        **metrics.summarize(records.accuracy),
        "task_il": metrics.summarize(records.told),
        "by_image": _by_image(exp, records),
        "class_names": _class_names(exp),
        "task_classes": [[int(c) for c in task.classes if c >= 0] for task in exp.scenario.tasks],
        "holdings": _holdings(exp, cfg.population).tolist(),
        "class_accuracy": metrics.per_class_accuracy(confusion).tolist(),
        "calibration": records.calibration,
        "unpredicted": metrics.unpredicted(confusion),
        "client_accuracy": metrics.client_accuracy(confusion, exp.scenario.holdings).tolist(),
        "personal_accuracy": personal,
        "personal": _personal(records),
        **_communication(exp, payloads, records),
        "extra_storage": communication.extra_storage(payloads.broadcast),
        "client_state": communication.size(payloads.state),
        "server_state": communication.size(payloads.server),
        "server_replay": _server_replay(exp, payloads, records),
        # images of another data set, which server and clients store
        "surrogate": communication.size(exp.frozen.surrogate),
        "trainable_params": sum(by_part.values()),
        "trainable_params_by_part": by_part,
        "time": {f"{name}_s": seconds[name] for name in ("compile", "client", "server", "eval")},
        "client_images_per_s": _rate(counts["client_images"], seconds["client"]),
        "trained_images_per_s": _rate(counts["trained_images"], seconds["client"]),
        "eval_images_per_s": _rate(counts["evaluated_images"], seconds["eval"]),
        "slot_efficiency": counts["useful_steps"] / max(counts["paid_steps"], 1),
        "lanes": exp.engine.lanes._asdict(),
        "rejected_uploads": int(counts["rejected"]),
        "refused_results": int(counts["refused"]),
        "rounds_without_upload": _without_upload(records),
        "privacy": _privacy(cfg, len(exp.scenario.tasks) * cfg.rounds),
        "traces": max(exp.engine.traces.values(), default=0),
        "config": dataclasses.asdict(cfg),
    }


def _class_names(exp: Experiment) -> list[str]:
    """The data set's names of the classes, in the class order of the run."""
    dataset, order = exp.inputs.dataset, np.zeros(exp.sizes.classes, int)
    order[exp.scenario.test_label] = dataset.y_test
    order[exp.scenario.train_label] = dataset.y_train
    return [str(dataset.class_names[label]) for label in order]


def _holdings(exp: Experiment, population: str | None) -> np.ndarray:
    """Training rows of each client and class, [K, C]; of a redrawn population in the mean round."""
    cached = exp.scenario.holdings
    return cached if population == "static" else cached / exp.sizes.rounds


def _personal(records: Records) -> dict[str, Any] | None:
    """Of clients that are evaluated as themselves: accuracies [task learned][client][task], also where the
    task is told, and after each task the mean over clients of their mean over tasks, its population
    deviation, the least and the most. None for other methods."""
    if not records.clients:
        return None
    # of those that have learned something
    means = [
        [np.nanmean(np.array(own, float)) for own in each if any(x is not None for x in own)]
        for each in records.clients
    ]
    spread = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {"accuracy": records.clients, "task_il": records.clients_told} | {
        name: [float(of(values)) for values in means] for name, of in spread.items()
    }


def _by_image(exp: Experiment, records: Records) -> dict[str, Any]:
    """HePCo's metrics, under the names of its release: accuracies over images, what was merged included where
    the server changes it (predisacc), and F_N (drop)."""
    images = [int(np.sum(task.current[exp.scenario.test_label])) for task in exp.scenario.tasks]
    by_name = metrics.by_image(records.accuracy, images)._asdict()
    found = {name: metrics.without_nan(values) for name, values in by_name.items()}
    merged = metrics.by_image(records.provisional, images).acc if records.provisional else None
    return found | {
        "predisacc": None if merged is None else metrics.without_nan(merged),
        "drop": metrics.drop(records.accuracy, images),
    }


def _server_replay(exp: Experiment, payloads: Payloads, records: Records) -> dict[str, int] | None:
    """Examples that the server keeps of finished tasks for replay, outside of its state; None if none.

    `examples` and `bytes` are all that it has at the end, and `capacity` how many there is room for. A client
    sends `example_bytes` for one, and an image of the network's size has `image_bytes` as grey levels.
    `uploaded` are the examples of all uploads.
    """
    if exp.method.server_replay is None:
        return None
    round_context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, True)
    buffer = jax.eval_shape(exp.method.server_replay.buffer, round_context, payloads.server)
    slots = len(buffer.label)
    example_bytes = communication.num_bytes(buffer.examples) // slots
    examples, side = int(records.counts["replay_examples"]), exp.inputs.backbone.config.image_size
    sent = sum(line.get("restore_images") or 0 for line in records.rounds)
    return {
        "examples": examples,
        "bytes": examples * example_bytes,
        "capacity": slots * len(exp.scenario.tasks),
        "example_bytes": example_bytes,
        "image_bytes": 3 * side**2,
        "uploaded": int(sent),
    }


def _communication(exp: Experiment, payloads: Payloads, records: Records) -> dict[str, Any]:
    """Per client and round, of the rounds of every task and of the others by their name, and in all.

    `handover` is per client and task: what comes down of a finished task when the next one begins, for every
    client.
    """
    by_round = traffic_by_round(exp, payloads)
    usual, extra = NO_TRAFFIC, {}
    for each, traffic in zip(exp.method.rounds, by_round, strict=True):
        if each.when == "round":
            usual = Traffic(*map(sum, zip(usual, traffic, strict=True)))
        else:
            extra[each.when] = traffic._asdict()
    totals = [communication.total(*pair) for pair in zip(by_round, records.uploads, strict=True)]
    down = communication.scalars(payloads.handover), communication.num_bytes(payloads.handover)
    if down[1]:
        handover = Traffic(0, 0, *down)
        extra["handover"] = handover._asdict()
        totals.append(communication.total(handover, exp.sizes.clients * (exp.sizes.tasks - 1)))
    return {
        "communication": usual._asdict(),
        "communication_extra": extra,
        "communication_total": {name: sum(each[name] for each in totals) for name in Traffic._fields},
    }


def _privacy(cfg: RunConfig, rounds: int) -> dict[str, float] | None:
    """What central differential privacy gives after all rounds; None without noise or delta."""
    if cfg.noise_multiplier is None or cfg.dp_delta is None:
        return None
    spent = privacy.epsilon(cfg.noise_multiplier, cfg.participation, rounds, cfg.dp_delta)
    return {"epsilon": spent, "delta": cfg.dp_delta, "noise_multiplier": cfg.noise_multiplier}


def _without_upload(records: Records) -> list[list[int]]:
    """Task and round, from 1 on, of the rounds in which no upload was valid, so that nothing was learned."""
    empty = (line for line in records.rounds if line["rejected"] >= line["participants"] > 0)
    return [[line["task"] + 1, line["round"] + 1] for line in empty]


def learned_nothing(summary: dict[str, Any]) -> bool:
    """Was there no valid upload in any round of a run?"""
    rounds = summary["config"]["rounds"] * len(summary["A"])
    return len(summary["rounds_without_upload"]) >= rounds > 0


def warnings_of(records: Records) -> list[str]:
    """What a user must know of a finished run, in lines: uploads that were left out, rounds whose result was
    not kept, and test images without a prediction."""
    lines, counts = [], records.counts
    if counts["rejected"]:
        rounds = sum(line["rejected"] > 0 for line in records.rounds)
        lines.append(
            f"warning: {counts['rejected']} uploads were left out in {rounds} of {len(records.rounds)} "
            f"rounds: NaN, infinite or of negative weight"
        )
    empty = _without_upload(records)
    if empty:
        lines.append(
            f"warning: no upload was valid in {len(empty)} of {len(records.rounds)} rounds, first in task "
            f"{empty[0][0]}, round {empty[0][1]}"
        )
    if counts["refused"]:
        first = next((line for line in records.rounds if line["refused"]), None)
        where = f", first in task {first['task'] + 1}, round {first['round'] + 1}" if first else ""
        lines.append(
            f"warning: {counts['refused']} times what came out of a round was not finite and the server kept "
            f"what it had{where}"
        )
    confusion = np.asarray(records.confusion)
    lost = metrics.unpredicted(confusion) if records.confusion else 0  # nothing was evaluated
    if lost:
        lines.append(
            f"warning: the last model's outputs are not finite for {lost} of {confusion.sum()} test images: "
            f"they count as wrong"
        )
    return lines


def _rate(amount: float | int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else float("nan")


FIGURES = ("accuracy.png", "matrix.png", "reliability.png", "classes.png")


def figures_of(exp: Experiment, summary: dict[str, Any]) -> dict[str, Callable[[Path], object]]:
    """File name -> draw(path), of FIGURES: accuracy curve, accuracy matrix, reliability, class counts of
    the clients (of a redrawn population: in the mean round)."""
    from fcljax.results import figures

    name = f"{summary['method']} on {summary['dataset']}"
    holdings = _holdings(exp, summary["config"]["population"])
    classes = [task.classes for task in exp.scenario.tasks]
    pictures = (
        lambda path: figures.save(path, figures.accuracy_curve({name: summary["A"]})),
        lambda path: figures.save(path, figures.accuracy_matrix(summary["accuracy"])),
        lambda path: figures.save(path, figures.reliability(summary["calibration"])),
        lambda path: figures.save(path, figures.class_counts(holdings, classes)),
    )
    return dict(zip(FIGURES, pictures, strict=True))
