"""A run from start to end: tasks x rounds, evaluation, checkpoints, logs, figures.

A run directory holds config.yaml, metrics.jsonl (a line per round), summary.json, checkpoints/ and figures/,
and kept/ for methods whose server keeps something of finished tasks.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from orbax.checkpoint import CheckpointManager
from rich.console import Console

from fcljax import config
from fcljax.config import RunConfig
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.federated.engine import RoundReport, init_clients, keep_task, run_round
from fcljax.federated.schedule import participants
from fcljax.files import write_text
from fcljax.runs import archive, checkpoint, report
from fcljax.runs.build import Experiment, build, with_queries
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import Evaluated, make_evaluate, personal_accuracy
from fcljax.runs.inputs import tell
from fcljax.runs.records import Clock, Records, json_line, progress_bar, record, shown
from fcljax.runs.restored import draw_restored, measure, restored_images
from fcljax.runs.summary import draw, summarize, warnings_of
from fcljax.types import Kept, Turn, When

INIT, CLIENTS, ROUNDS, BEGIN, END, OPENING, CLOSING = range(7)  # purposes of the run's key
KEPT = "kept"  # folder of what a server keeps of finished tasks
_PURPOSE = {"opening": OPENING, "round": ROUNDS, "closing": CLOSING}


def run(
    method_name: str, cfg: RunConfig, out: str | Path, resume: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train and evaluate one method, or go on with a run that was cut off.

    Args:
      method_name: of the package, or from outside (`methods.find_method`).
      cfg: resolved settings; with `resume` they must be those of the run.
      out: the run directory; a new one, unless `resume`.
      resume: continue from the newest checkpoint in `out`; the result equals the uninterrupted run's bit for
        bit.
      console: where the progress bar and warnings go.

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
    exp = build(method_name, cfg)
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
                personal = personal_accuracy(exp, state, len(exp.scenario.tasks) - 1, cfg.eval_batch_size)
                rebuilt = restored_images(exp, state.server)
        checkpoint.finish(manager)
    summary = summarize(exp, method_name, cfg, records, personal)
    if rebuilt:
        summary["restored"] = measure(*rebuilt)
        draw_restored(out / "figures" / "restored.png", *rebuilt[0])
    draw(exp, summary, out / "figures")
    report.write_json(out / "summary.json", summary)
    for line in warnings_of(records):
        console.print(line, soft_wrap=True, highlight=False)
    return summary


def check_out(out: Path, method_name: str, cfg: RunConfig, resume: bool) -> None:
    """Check, before anything slow, that the run directory is new or, with `resume`, this run's.

    Raises:
      InputError: if it holds something already, or was made with other settings.
    """
    if resume:
        before, now = config.load_yaml(out / "config.yaml"), yaml.safe_load(config.to_yaml(method_name, cfg))
        differ = config.differences(before, now)
        if differ:
            raise InputError(f"resume: {str(out)!r} was run with other settings: {', '.join(differ)}")
    else:
        check_new(out)


def check_new(out: Path) -> None:
    """Check that nothing is at `out` yet, but perhaps an empty folder.

    Raises:
      InputError: if there is.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
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


def begin(exp: Experiment, manager: CheckpointManager, resume: bool) -> tuple[State, Records, int]:
    """The state before the first round, or the newest checkpoint's, and how many rounds it has behind it."""
    server = jax.jit(exp.method.init)(jax.random.fold_in(exp.key, INIT), exp.frozen)
    key = jax.random.fold_in(exp.key, CLIENTS)
    clients = init_clients(exp.method, server, exp.setting.clients, key)
    state = State(server, clients, jax.random.key_data(exp.key))
    snapshot = checkpoint.latest(manager, state) if resume else None
    if snapshot is None:
        return state, Records(), 0
    return snapshot.state, Records(**snapshot.records), snapshot.step


def _loop(
    exp: Experiment, cfg: RunConfig, state: State, records: Records, done: int, manager: CheckpointManager,
    clock: Clock, out: Path, console: Console,
) -> State:  # fmt: skip
    """The state after all remaining rounds: train, evaluate at task ends, log, checkpoint."""
    evaluate = make_evaluate(exp, cfg.eval_batch_size)
    log, steps = out / "metrics.jsonl", len(exp.scenario.tasks) * cfg.rounds
    # A run that was killed may have logged rounds that no checkpoint holds: they will be run, and logged,
    # again.
    write_text(log, "".join(json_line(line) for line in records.rounds))
    play = make_play(exp, cfg, records, clock)
    past = _past(exp, state, out / KEPT, done // cfg.rounds)
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=steps, completed=done, **shown(records))
        for step in range(done, steps):
            t, r = divmod(step, cfg.rounds)
            last, row = r == cfg.rounds - 1, Evaluated(None, None)
            state, kept, done_round = play(state, past, t, r, last)
            if kept is not None:
                past += (kept,)
                archive.save_task(out / KEPT, t, kept)
                records.add(kept_rows=len(kept.label))
            if last or cfg.eval_every_round:
                with clock("eval"):
                    row = evaluate(state, t, records)
                if last:
                    records.keep(*row)
            line = record(records, t, r, done_round, *row)
            with log.open("a", encoding="utf-8") as file:
                file.write(json_line(line))
            if (step + 1) % cfg.checkpoint_every == 0 or step == steps - 1:
                checkpoint.save(manager, checkpoint.Snapshot(step + 1, state, dataclasses.asdict(records)))
            progress.update(bar, advance=1, **shown(records))
    return state


def _past(exp: Experiment, state: State, folder: Path, tasks: int) -> tuple[Kept, ...]:
    """What the server has kept of the first tasks, of a run that goes on."""
    if exp.method.rehearsal is None:
        return ()
    turn = Turn.on_host(exp.frozen, exp.scenario.tasks[0], 0, True)
    template = jax.eval_shape(exp.method.rehearsal.kept, turn, state.server)
    return archive.load_tasks(folder, tasks, template)


def make_play(exp: Experiment, cfg: RunConfig, records: Records, clock: Clock) -> Callable:
    """play(state, past, task, round, last) -> (state, kept, report): a round, with what comes before the
    first and after the last one of a task. `past`: what the server keeps of the tasks before; `kept`: of this
    one, when it is over."""
    begin_task, end_task = jax.jit(exp.method.begin_task), jax.jit(exp.method.end_task)

    def stage(server, clients, past, t: int, r: int, last: bool, when: When):
        roster, key = exp.scenario.rosters[t][r], jax.random.fold_in(exp.key, _PURPOSE[when])
        everyone = np.flatnonzero(roster.count)
        ids = participants(cfg.seed, t, r, everyone, cfg.participation) if when == "round" else everyone
        number = r if when == "round" else 0
        return run_round(
            exp.engine, exp.frozen, server, clients, exp.train, roster, ids, exp.scenario.tasks[t], number,
            key, clock, when=when, last=last, past=past,
        )  # fmt: skip

    def play(
        state: State, past: tuple[Kept, ...], t: int, r: int, last: bool
    ) -> tuple[State, Kept | None, RoundReport]:
        (server, clients, key), kept = state, None
        turn = Turn.on_host(exp.frozen, exp.scenario.tasks[t], r, last)
        purpose = lambda number: jax.random.fold_in(jax.random.fold_in(exp.key, number), t)
        if r == 0:
            server = begin_task(turn, server, purpose(BEGIN))
            server, clients, extra = stage(server, clients, past, t, r, last, "opening")
            records.count(extra._replace(training_rows=0))
        server, clients, done = stage(server, clients, past, t, r, last, "round")
        if last:
            server, clients, extra = stage(server, clients, past, t, r, last, "closing")
            records.count(extra._replace(training_rows=0))
            kept = keep_task(exp.engine, exp.frozen, server, exp.scenario.tasks[t], r)
            server = end_task(turn, server, purpose(END))
        return State(server, clients, key), kept, done

    return play
