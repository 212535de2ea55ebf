"""The driver, and the only effectful file: tasks x rounds, evaluation, checkpoints, logs, figures.

A run directory holds config.yaml, metrics.jsonl (a line per round), summary.json, checkpoints/ and figures/.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fcljax import config
from fcljax.runs import checkpoint, metrics, report
from fcljax.config import RunConfig
from fcljax.data.partition import count_matrix
from fcljax.data.store import ClientRows, Split, merge
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.features import make_predict
from fcljax.federated import communication
from fcljax.federated.aggregation import AGGREGATORS
from fcljax.federated.engine import Engine, Lanes, default_lanes, extra_method, init_clients, make_engine, run_round
from fcljax.federated.schedule import Roster, capacity, participants
from fcljax.files import write_text
from fcljax.runs.inputs import (
    Inputs,
    backbone_name,
    deal,
    fetch,
    frozen_features,
    load_inputs,
    make_splits,
    read_clean,
    saved_features,
    tell,
)
from fcljax.methods import METHODS
from fcljax.models.vit import vit_backbone
from fcljax.data.streaming import Host
from fcljax.types import ClientInfo, Method, PyTree, Setting, Task

CLIENTS_PER_CHUNK = 128  # bounds the memory between the phases of a program, whatever the number of clients
INIT, CLIENTS, ROUNDS, BEGIN, END, OPENING, CLOSING = range(7)  # purposes of the run's key


class Experiment(NamedTuple):
    """Everything that a run needs and that does not change while it goes on."""

    method: Method
    engine: Engine
    extras: dict[str, Engine]  # of the method's extra rounds, "opening" and "closing"
    frozen: PyTree
    train: Split | Host
    test: Split | Host
    train_label: np.ndarray  # [N] positions in the class order
    test_label: np.ndarray  # [M]
    tasks: tuple[Task, ...]
    rosters: list[list[Roster]]  # [task][round]
    # [K, C] training rows per client and class; of a redrawn population over all rounds together
    holdings: np.ndarray
    inputs: Inputs
    setting: Setting
    key: jax.Array

    def read(self, split: Split, rows: jax.Array) -> jax.Array:
        """These rows as network input, under the clean view."""
        return read_clean(self.inputs.preprocess, split, rows)


class State(NamedTuple):
    """Everything that changes: what a checkpoint holds beside the host records."""

    server: PyTree
    clients: PyTree
    key: jax.Array  # key data of the run's key, so that a checkpoint says what drew its numbers


@dataclasses.dataclass
class Records:
    """Host-side history of a run: one entry per round, the last confusion matrix, and totals. Plain JSON
    values."""

    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    accuracy: list[list[float]] = dataclasses.field(default_factory=list)
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, float | int] = dataclasses.field(default_factory=dict)

    def add(self, **counts: float | int) -> None:
        """Add to the totals."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value


class Clock:
    """Seconds per section, with compilation apart: JAX reports how long it traced and compiled while a
    section was open."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.compiling = seconds, 0.0

    def __enter__(self) -> "Clock":
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.compiling += seconds

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start, compiled = time.perf_counter(), self.compiling
        yield
        compiled = self.compiling - compiled
        spent = max(0.0, time.perf_counter() - start - compiled)
        self.seconds[section] = self.seconds.get(section, 0.0) + spent
        self.seconds["compile"] = self.seconds.get("compile", 0.0) + compiled


# ---- set-up ------------------------------------------------------------------------------------------------


def prepare(method_name: str, cfg: RunConfig) -> Experiment:
    """Load data and backbone, deal the rows to clients and tasks, build the method and its engine. `cfg` is
    resolved.

    Raises:
      InputError: for anything in the settings or files that cannot work.
    """
    inputs = load_inputs(cfg)
    dataset, vit = inputs.dataset, inputs.backbone.config
    classes = len(dataset.class_names)
    train_label, test_label, held = deal(dataset, cfg)
    tasks = make_tasks(classes, cfg.tasks)
    if METHODS[method_name].joint:
        tasks = make_tasks(classes, 1)
        by_task, held = held, lambda _, r: merge([by_task(t, r) for t in range(cfg.tasks)])
    rosters = [[_roster(held(t, r), train_label, classes) for r in range(deals(cfg))] for t in range(len(tasks))]
    setting = Setting(classes, len(tasks), len(tasks[0].classes), cfg.clients, cfg.rounds)
    options = config.method_options(method_name, cfg)
    for name in ("prompt_blocks", "lora_blocks"):
        if getattr(options, name, 0) > vit.depth:
            raise InputError(f"{name}: {getattr(options, name)} is more than the {vit.depth} blocks of {backbone_name(vit)}")
    method = METHODS[method_name].build(options, setting, vit_backbone(vit), cfg.epochs, cfg.batch_size, cfg.lr)
    every = [roster for of_task in rosters for roster in of_task]
    engine, extras = _engines(method, cfg, inputs, every)
    train, test = make_splits(dataset, train_label, test_label, cfg.data_budget, cfg.eval_batch_size)
    if isinstance(train, Host) and cfg.devices > 1:
        raise InputError(f"devices: {cfg.devices} devices need all images on each of them; nearest: 1, or a larger data_budget")
    # a static population has one roster for all its rounds
    rosters = [of_task * (cfg.rounds // deals(cfg)) for of_task in rosters]
    holdings = sum(roster.class_rows for roster in every)
    return Experiment(
        method, engine, extras, inputs.backbone.params, train, test, train_label, test_label, tasks, rosters, holdings, inputs, setting,
        jax.random.key(cfg.seed),
    )  # fmt: skip


def _engines(method: Method, cfg: RunConfig, inputs: Inputs, rosters: list[Roster]) -> tuple[Engine, dict[str, Engine]]:
    """The engine of the rounds, and those of the extra rounds "opening" and "closing" that the method has."""
    lanes, mesh = _lanes(cfg)
    room = partial(capacity, rosters=rosters, lanes=lanes.count, slots=CLIENTS_PER_CHUNK)
    make = partial(make_engine, fetch=partial(fetch, inputs.preprocess, inputs.augments), lanes=lanes, mesh=mesh)
    engine = make(
        method, capacity=room(method.client, participation=cfg.participation),
        reduce=None if cfg.aggregator == "mean" else AGGREGATORS[cfg.aggregator],
        refresh_capacity=room(method.refresh) if method.refresh else None,
    )  # fmt: skip
    extras = {"opening": method.opening, "closing": method.closing}
    return engine, {
        name: make(extra_method(method, extra), capacity=room(extra.client)) for name, extra in extras.items() if extra
    }


def deals(cfg: RunConfig) -> int:
    """How many times the rows of a task are dealt in a run."""
    return cfg.rounds if cfg.population == "redrawn" else 1


def _roster(held: ClientRows, label: np.ndarray, classes: int) -> Roster:
    return Roster(*held, count_matrix(label, np.split(held.rows, held.offset[1:-1]), classes).astype(np.int32))


def _lanes(cfg: RunConfig) -> tuple[Lanes, Mesh | None]:
    """The lanes, and the devices that share them: the defaults that were measured for the backend where
    nothing is asked for."""
    available = jax.device_count()
    if cfg.devices > available:
        raise InputError(f"devices: {cfg.devices} asked for; nearest valid value: {available}")
    default = default_lanes(jax.default_backend(), -(-cfg.clients // cfg.devices))
    lanes = Lanes(cfg.lanes or default.count * cfg.devices, cfg.lane_mode or default.mode)
    if lanes.count % cfg.devices:
        fitting = -(-lanes.count // cfg.devices) * cfg.devices
        raise InputError(f"lanes: {lanes.count} lanes cannot be split over {cfg.devices} devices; nearest valid value: {fitting}")
    if cfg.devices == 1:
        return lanes, None
    devices = jax.devices()[: cfg.devices]
    return lanes, jax.make_mesh((cfg.devices,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def with_queries(exp: Experiment, cfg: RunConfig, section: Callable = contextlib.nullcontext) -> Experiment:
    """The experiment with query features cached wherever the input is deterministic: the test split always,
    the training split if some phase reads it without augmentation. Features that `fcljax embed` left are
    taken as they are. The time is booked where the features are used: `section` is entered as "eval" and
    "client"."""
    if not exp.method.queries:
        return exp
    compute = frozen_features(exp.inputs, cfg.eval_batch_size)

    def cached(split: Split | Host, part: str) -> Split | Host:
        features = saved_features(cfg, exp.inputs, part)
        features = jax.block_until_ready(compute(exp.frozen, split)) if features is None else features
        if isinstance(split, Host):
            return split._replace(tree=split.tree._replace(query=np.asarray(features)))
        return split._replace(query=jnp.asarray(features))

    with section("eval"):
        exp = exp._replace(test=cached(exp.test, "test"))
    programs = [exp.method.client, *(extra.client for extra in (exp.method.opening, exp.method.closing) if extra)]
    if all(phase.view.augment and exp.inputs.augments for program in programs for phase in program.phases):
        return exp
    with section("client"):
        return exp._replace(train=cached(exp.train, "train"))


# ---- the run -----------------------------------------------------------------------------------------------


def run(method_name: str, cfg: RunConfig, out: str | Path, resume: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train and evaluate one method, or go on with a run that was cut off.

    Args:
      method_name: one of METHODS.
      cfg: resolved settings; with `resume` they must be those of the run.
      out: the run directory; a new one, unless `resume`.
      resume: continue from the newest checkpoint in `out`; the result equals the uninterrupted run's bit for
        bit.
      console: where the progress bar goes.

    Returns:
      The content of summary.json.

    Raises:
      InputError: for bad settings or files, or if `out` cannot be written.
    """
    out = Path(out)
    check_out(out, method_name, cfg, resume)
    if resume and (out / "summary.json").exists():  # written last of all
        return report.load_summary(out)
    console = console or Console(stderr=True)
    exp = prepare(method_name, cfg)
    if not resume:
        claim(out, method_name, cfg)
    tell(exp.inputs, console)
    with checkpoint.open_checkpoints(out / "checkpoints", cfg.keep_checkpoints) as manager:
        state, records, done = begin(exp, manager, resume)
        with Clock(records.seconds) as clock:
            exp = with_queries(exp, cfg, clock)
            train = exp.train if isinstance(exp.train, Host) else exp.engine.place(exp.train)
            exp = exp._replace(frozen=exp.engine.place(exp.frozen), train=train)
            state = _loop(exp, cfg, state, records, done, manager, clock, out, console)
            with clock("eval"):
                personal = personal_accuracy(exp, state, len(exp.tasks) - 1, cfg.eval_batch_size)
        checkpoint.finish(manager)
    summary = summarize(exp, method_name, cfg, records, personal)
    draw(exp, summary, out / "figures")
    report.write_json(out / "summary.json", summary)
    return summary


def check_out(out: Path, method_name: str, cfg: RunConfig, resume: bool) -> None:
    """Check, before anything slow, that the run directory is new or, with `resume`, this run's.

    Raises:
      InputError: if it holds something already, or was made with other settings.
    """
    if resume:
        differ = config.differences(config.load_yaml(out / "config.yaml"), yaml.safe_load(config.to_yaml(method_name, cfg)))
        if differ:
            raise InputError(f"resume: {str(out)!r} was run with other settings: {', '.join(differ)}")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out: {str(out)!r} exists already; give a new folder, or go on with --resume {out}")


def claim(out: Path, method_name: str, cfg: RunConfig) -> None:
    """Make the run directory and write config.yaml; no half of it stays if that fails.

    Raises:
      InputError: if it cannot be written.
    """
    try:
        (out / "checkpoints").mkdir(parents=True)
        (out / "figures").mkdir()
        write_text(out / "config.yaml", config.to_yaml(method_name, cfg))
    except OSError as error:
        for folder in (out / "figures", out / "checkpoints", out):
            with contextlib.suppress(OSError):
                folder.rmdir()  # which removes empty folders only
        raise InputError(f"out: cannot write to {str(out)!r}: {error.strerror or error}") from None


def begin(exp: Experiment, manager, resume: bool) -> tuple[State, Records, int]:
    """The state before the first round, or the newest checkpoint's, and how many rounds it has behind it."""
    server = jax.jit(exp.method.init)(jax.random.fold_in(exp.key, INIT), exp.frozen)
    clients = init_clients(exp.method, server, exp.setting.clients, jax.random.fold_in(exp.key, CLIENTS))
    state = State(server, clients, jax.random.key_data(exp.key))
    snapshot = checkpoint.latest(manager, state) if resume else None
    if snapshot is None:
        return state, Records(), 0
    return snapshot.state, Records(**snapshot.records), snapshot.step


def _loop(
    exp: Experiment, cfg: RunConfig, state: State, records: Records, done: int, manager, clock, out: Path, console: Console
) -> State:
    """The state after all remaining rounds: train, evaluate at task ends, log, checkpoint."""
    predict = make_predict(exp.method.predict, exp.read, cfg.eval_batch_size, len(exp.test_label))
    begin_task, end_task = jax.jit(exp.method.begin_task), jax.jit(exp.method.end_task)
    log = out / "metrics.jsonl"
    # A run that was killed may have logged rounds that no checkpoint holds: they will be run, and logged,
    # again.
    write_text(log, "".join(_json_line(line) for line in records.rounds))
    with _progress(console) as progress:
        bar = progress.add_task("", total=len(exp.tasks) * cfg.rounds, completed=done, **_shown(records))
        for step in range(done, len(exp.tasks) * cfg.rounds):
            t, r = divmod(step, cfg.rounds)
            task, last = exp.tasks[t], r == cfg.rounds - 1
            server, clients, _ = state
            if r == 0:
                server = begin_task(server, task, jax.random.fold_in(jax.random.fold_in(exp.key, BEGIN), t))
                server, clients = _extra_round(exp, "opening", server, clients, t, r, clock, records)
            roster = exp.rosters[t][r]
            ids = participants(cfg.seed, t, r, np.flatnonzero(roster.count), cfg.participation)
            server, clients, done_round = run_round(
                exp.engine, exp.frozen, server, clients, exp.train, roster, ids, task, r,
                jax.random.fold_in(exp.key, ROUNDS), clock,
            )  # fmt: skip
            if last:
                server, clients = _extra_round(exp, "closing", server, clients, t, r, clock, records)
                server = end_task(exp.frozen, server, task, jax.random.fold_in(jax.random.fold_in(exp.key, END), t))
            state = State(server, clients, state.key)
            row = None
            if last or cfg.eval_every_round:
                with clock("eval"):
                    row = evaluate(exp, predict, server, t, records)
                if last:
                    records.accuracy.append(row)
            line = _record(records, t, r, done_round, row)
            with log.open("a", encoding="utf-8") as file:
                file.write(_json_line(line))
            checkpoint.save(manager, checkpoint.Snapshot(step + 1, state, dataclasses.asdict(records)))
            progress.update(bar, advance=1, **_shown(records))
    return state


def _extra_round(exp: Experiment, name: str, server: PyTree, clients: PyTree, t: int, r: int, clock, records: Records):
    """The server's and the clients' states after the extra round of that name, if the method has one; every
    client with rows takes part."""
    if name not in exp.extras:
        return server, clients
    roster = exp.rosters[t][r]
    key = jax.random.fold_in(exp.key, {"opening": OPENING, "closing": CLOSING}[name])
    everyone = np.flatnonzero(roster.count)
    server, clients, done = run_round(
        exp.extras[name], exp.frozen, server, clients, exp.train, roster, everyone, exp.tasks[t], 0, key, clock
    )
    records.add(**{f"{name}_client_rounds": done.participants, "client_images": done.rows})
    return server, clients


def evaluate(exp: Experiment, predict: Callable, server: PyTree, t: int, records: Records) -> list[float]:
    """Accuracy on each task seen so far, over all its test rows, with all seen classes competing."""
    label = exp.test_label
    rows = np.flatnonzero(exp.tasks[t].seen[label])
    predicted = predict(exp.frozen, server, exp.test, rows, exp.tasks[t])
    confusion = metrics.confusion_matrix(label[rows], predicted, exp.setting.classes)
    records.confusion = confusion.tolist()
    records.add(evaluated_images=len(rows))
    return metrics.task_accuracy(confusion, [task.classes for task in exp.tasks[: t + 1]]).tolist()


def personal_accuracy(exp: Experiment, state: State, t: int, batch_size: int) -> list[float | None] | None:
    """Accuracy of each client's personal model on the test rows of the classes that it has held; None if it
    has held none. None altogether for a method without personal models."""
    if exp.method.predict_client is None:
        return None
    label = exp.test_label
    predict = make_predict(
        lambda frozen, model, image, query, task: exp.method.predict_client(frozen, *model, image, query, task),
        exp.read, batch_size, len(label),
    )  # fmt: skip
    result = []
    for client in range(exp.setting.clients):
        learned = (exp.holdings[client] > 0) & exp.tasks[t].seen
        rows = np.flatnonzero(learned[label])
        model = (state.server, jax.tree.map(lambda x, i=client: x[i], state.clients))
        predicted = predict(exp.frozen, model, exp.test, rows, exp.tasks[t])
        result.append(float(np.mean(predicted == label[rows])) if len(rows) else None)
    return result


def _record(records: Records, t: int, r: int, done, row: list[float] | None) -> dict[str, Any]:
    """Add one round to the history."""
    line = {"task": t, "round": r, **done.metrics, "participants": done.participants, "rejected": done.rejected}
    line["slot_efficiency"] = done.slot_efficiency
    if row is not None:
        line["accuracy"] = row
        line["A"] = float(np.mean(row))
    line = {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in line.items()}
    records.rounds.append(line)
    records.add(
        client_rounds=done.participants, rejected=done.rejected, client_images=done.rows, trained_images=done.first_phase_rows,
        useful_steps=done.useful_steps, paid_steps=done.paid_steps,
    )  # fmt: skip
    return line


def _json_line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def _progress(console: Console) -> Progress:
    """Task, round, loss, accuracy and the time left."""
    return Progress(
        TextColumn("task {task.fields[t]} round {task.fields[r]}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=console,
    )  # fmt: skip


def _shown(records: Records) -> dict[str, str]:
    last = records.rounds[-1] if records.rounds else {}
    accuracy = next((line["A"] for line in reversed(records.rounds) if "A" in line), None)
    return {
        "t": str(last.get("task", 0) + 1),
        "r": str(last.get("round", -1) + 1),
        "loss": f"{last['loss']:.3f}" if last.get("loss") is not None else "-",
        "accuracy": f"{100 * accuracy:.1f}%" if accuracy is not None else "-",
    }


# ---- results -----------------------------------------------------------------------------------------------


def summarize(
    exp: Experiment, method_name: str, cfg: RunConfig, records: Records, personal: list[float | None] | None
) -> dict[str, Any]:
    """What summary.json holds. Communication is counted per client and round from the real pytrees; times are
    seconds. A client of a redrawn population has the classes of all its rounds: client_accuracy weighs them
    by the rows that it was dealt in the mean round."""
    upload, broadcast, trainable = wire_shapes(exp)
    traffic = communication.traffic(upload, broadcast)
    total = communication.total(traffic, int(records.counts["client_rounds"]))
    extra = {name: communication.traffic(*wire_shapes(exp, engine.method)[:2]) for name, engine in exp.extras.items()}
    for name, per_client in extra.items():
        more = communication.total(per_client, int(records.counts[f"{name}_client_rounds"]))
        total = {field: value + more[field] for field, value in total.items()}
    engines = (exp.engine, *exp.extras.values())
    seconds, counts = {"client": 0.0, "server": 0.0, "eval": 0.0, "compile": 0.0} | records.seconds, records.counts
    confusion = np.asarray(records.confusion)
    by_part = {name: communication.scalars(tree) for name, tree in trainable.items()}
    return {
        "method": method_name, "dataset": cfg.dataset, "backbone": backbone_name(exp.inputs.backbone.config),
        "seed": cfg.seed, "fidelity": cfg.fidelity,
        **metrics.summarize(records.accuracy),
        "class_accuracy": metrics.per_class_accuracy(confusion).tolist(),
        "client_accuracy": metrics.client_accuracy(confusion, exp.holdings).tolist(),
        "personal_accuracy": personal,
        "communication": traffic._asdict(),
        "communication_extra": {name: per_client._asdict() for name, per_client in extra.items()},
        "communication_total": total,
        "extra_storage": communication.extra_storage(broadcast),
        "client_state": client_state(exp),
        "trainable_params": sum(by_part.values()),
        "trainable_params_by_part": by_part,
        "time": {f"{name}_s": seconds[name] for name in ("compile", "client", "server", "eval")},
        "client_images_per_s": _rate(counts["client_images"], seconds["client"]),
        "trained_images_per_s": _rate(counts["trained_images"], seconds["client"]),
        "eval_images_per_s": _rate(counts["evaluated_images"], seconds["eval"]),
        "slot_efficiency": counts["useful_steps"] / max(counts["paid_steps"], 1),
        "lanes": exp.engine.lanes._asdict(),
        "rejected_uploads": int(counts["rejected"]),
        "traces": max((count for engine in engines for count in engine.traces.values()), default=0),
        "config": dataclasses.asdict(cfg),
    }  # fmt: skip


def variant(method_name: str, cfg: RunConfig) -> str:
    """The settings in which a run departs from its method's defaults under its fidelity: switches by name,
    others as name=value."""
    usual = config.resolve(method_name, config.run_class(method_name)(fidelity=cfg.fidelity))
    own = [field.name for field in dataclasses.fields(METHODS[method_name].options)]
    changed = {name: getattr(cfg, name) for name in (*own, "aggregator", "normalise") if getattr(cfg, name) != getattr(usual, name)}
    return " ".join(name if value is True else f"{name}={value}" for name, value in changed.items())


def wire_shapes(exp: Experiment, method: Method | None = None) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
    """Shapes of one client's upload, of the broadcast, and of the named parts that it trains; of an extra
    round, given its method."""
    method, task = method or exp.method, exp.tasks[0]
    info = ClientInfo(np.int32(0), np.int32(1), np.zeros(exp.setting.classes, np.int32), np.int32(0))

    def client(key, frozen):
        server = method.init(key, frozen)
        broadcast, state = method.broadcast(server, task), method.init_client(key, server)
        local = method.client.start(broadcast, state, task, info, key)
        upload, _ = method.client.finish(broadcast, local, state, task, info)
        return upload, broadcast, method.trainable(server, task) if method.trainable else {"upload": upload.mean}

    return jax.eval_shape(client, exp.key, exp.frozen)


def client_state(exp: Experiment) -> dict[str, int]:
    """{scalars, bytes} of what one client keeps from round to round: anchors, teachers, exemplars."""
    state = jax.eval_shape(lambda key, frozen: exp.method.init_client(key, exp.method.init(key, frozen)), exp.key, exp.frozen)
    return {"scalars": communication.scalars(state), "bytes": communication.num_bytes(state)}


def _rate(amount: float | int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else float("nan")


def draw(exp: Experiment, summary: dict[str, Any], folder: Path) -> None:
    """The run's figures: accuracy curve, accuracy matrix, who holds which class (of a redrawn population: in
    the mean round)."""
    name = f"{summary['method']} on {summary['dataset']}"
    redrawn = summary["config"]["population"] == "redrawn"
    holdings = exp.holdings / exp.setting.rounds if redrawn else exp.holdings
    report.accuracy_curve(folder / "accuracy.png", {name: summary["A"]})
    report.accuracy_matrix(folder / "matrix.png", summary["accuracy"])
    report.class_holdings(folder / "classes.png", holdings, [task.classes for task in exp.tasks])
