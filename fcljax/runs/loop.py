"""A run from start to end: tasks x rounds, evaluation, checkpoints, logs, figures.

A run directory holds config.yaml, metrics.jsonl (a line per round), summary.json, checkpoints/, figures/ and
report.html, and kept/ for methods whose server keeps something of finished tasks.
"""

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import CheckpointManager
from rich.console import Console

from fcljax import config
from fcljax.config import RunConfig
from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.federated.engine import Clients, RoundInputs, RoundReport, init_clients, keep_task, run_round
from fcljax.federated.faults import parse_faults, reached
from fcljax.federated.keys import RunKey
from fcljax.federated.schedule import participants
from fcljax.files import check_folder, owned, write_text
from fcljax.results import page, trackers
from fcljax.results.run_folder import load_summary, write_json
from fcljax.runs import archive, checkpoint, hosts, memory, origin
from fcljax.runs.build import Experiment, build, placed
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import NOT_EVALUATED, make_evaluate, personal_accuracy, sampled_calibration
from fcljax.runs.inputs import tell
from fcljax.runs.queries import make_queries
from fcljax.runs.reconstructions import Rebuilt, draw_restored, measure, restored_images
from fcljax.runs.records import Clock, Records, json_line, progress_bar, record, shown
from fcljax.runs.signals import Stopped, postponed
from fcljax.runs.summary import FIGURES, figures_of, summarize, warnings_of
from fcljax.terminal import say
from fcljax.types import PyTree, ReplayBuffer, RoundContext, When

KEPT = "kept"  # folder of what a server keeps of finished tasks
LOCK = ".lock"  # file that the process that works in a run directory owns
RESTORED = "restored.png"
_PURPOSE = {"task_start": RunKey.TASK_START, "round": RunKey.ROUND, "task_end": RunKey.TASK_END}


def run(
    method_name: str,
    cfg: RunConfig,
    out: str | Path,
    resume: bool = False,
    console: Console | None = None,
    stop: Callable[[], int | None] = lambda: None,
    track: Sequence[str] = (),
) -> dict[str, Any]:
    """Train and evaluate one method, or go on with a run that was cut off.

    Args:
      method_name: of the package, or from outside (`methods.find_method`).
      cfg: resolved settings; with `resume` they must be those of the run, but see `origin.check_settings`.
      out: the run directory; a new one, unless `resume`.
      resume: continue from the newest whole checkpoint in `out`; the result equals the uninterrupted run's
        bit for bit.
      console: where the progress bar and warnings go.
      stop: asked after every round; the number of a signal ends the run there, with a checkpoint.
      track: names of `trackers.TRACKERS` that follow the run, besides those that followed it before.

    Returns:
      The content of summary.json.

    Raises:
      Stopped: as `stop` asks for.
      InputError: for bad settings or files, if `out` cannot be written or another process works in it, or if
        what is there is another run.
    """
    out, console = Path(out), console or Console(stderr=True)
    if resume:
        return _resume(method_name, cfg, out, console, stop, track)
    hosts.told(lambda: _check_place(out))
    exp, facts = _built(method_name, cfg)
    with contextlib.ExitStack() as stack:
        hosts.told(lambda: stack.enter_context(claimed(out, method_name, cfg)))
        return _complete(exp, facts, method_name, cfg, out, None, console, stop, track)


def _check_place(out: Path) -> None:
    check_new(out)
    check_folder(out)


def _built(method_name: str, cfg: RunConfig) -> tuple[Experiment, dict[str, Any]]:
    """The experiment, which is the same one in all processes, and the facts that decide over it."""

    def checked() -> Experiment:
        exp = build(method_name, cfg)
        memory.check(exp, cfg)
        return exp

    exp = hosts.agreed(checked)
    facts = origin.of_run(method_name, cfg, exp.inputs)
    free = dict.fromkeys(origin.FREE)
    hosts.check_same(facts | {"settings": facts["settings"] | free})
    return exp, facts


def _resume(
    method_name: str,
    cfg: RunConfig,
    out: Path,
    console: Console,
    stop: Callable[[], int | None],
    track: Sequence[str],
) -> dict[str, Any]:
    """Go on with the run in `out`, if it is this one; nothing is written before that is known."""
    finished = hosts.told(lambda: finished_summary(out, method_name, cfg))
    if finished and hosts.told(lambda: not missing_figures(out, finished)):
        if hosts.leads() and not (out / page.NAME).exists():
            page.try_report([out], out / page.NAME, lambda line: say(console, line))
        return finished
    with contextlib.ExitStack() as stack:
        hosts.told(lambda: stack.enter_context(alone(out)))
        folder = out / "checkpoints"
        there = hosts.told(lambda: checkpoint.steps(folder))
        if finished and not there:
            return finished  # nothing is left to draw its figures from
        before = hosts.told(lambda: checkpoint.origin_of(folder))
        since = hosts.agreed(lambda: origin.check_settings(before, method_name, cfg, there, out))
        exp, facts = _built(method_name, cfg)
        if before:
            hosts.agreed(lambda: origin.check_digests(before, exp.inputs, out))
        hosts.told(lambda: _extend(out, method_name, cfg, [step for step in there if step > since]))
        return _complete(exp, facts, method_name, cfg, out, finished, console, stop, track)


def _complete(
    exp: Experiment,
    facts: dict[str, Any],
    method_name: str,
    cfg: RunConfig,
    out: Path,
    finished: dict[str, Any] | None,
    console: Console,
    stop: Callable[[], int | None],
    track: Sequence[str],
) -> dict[str, Any]:
    """All rounds that are to come, and what is written at the end; `finished`: the summary, if only figures
    are to come. Trackers follow until all is written."""
    settings, say_line = origin.plain_settings(method_name, cfg), lambda line: say(console, line)
    with contextlib.ExitStack() as stack:

        def follow(done: int) -> trackers.Following:
            if finished or not hosts.leads():
                return trackers.NOBODY
            return stack.enter_context(trackers.following(track, out, settings, done, say_line))

        return _followed(exp, facts, method_name, cfg, out, finished, console, stop, follow)


def _followed(
    exp: Experiment,
    facts: dict[str, Any],
    method_name: str,
    cfg: RunConfig,
    out: Path,
    finished: dict[str, Any] | None,
    console: Console,
    stop: Callable[[], int | None],
    follow: Callable[[int], trackers.Following],
) -> dict[str, Any]:
    """The same, where follow(rounds that are done) starts the trackers."""
    console = console if hosts.leads() else Console(quiet=True)
    tell(exp.inputs, console)
    say_line = lambda line: say(console, line)
    with _checkpoints(out, cfg) as manager:
        state, records, done = begin(exp, manager, say_line)
        heard, ended = follow(done)
        with Clock(records.seconds) as clock:
            exp, state = _loop(
                placed(exp), cfg, state, records, done, facts, manager, clock, out, console, stop, heard
            )
            with clock("eval"):
                final = (exp, state, len(exp.scenario.tasks) - 1, cfg.eval_batch_size)
                personal, drawn = personal_accuracy(*final), sampled_calibration(*final)
                rebuilt = restored_images(exp, state.server)
        if manager:
            checkpoint.finish(manager)
    summary = finished or summarize(exp, method_name, cfg, records, personal) | {"calibration_drawn": drawn}
    if rebuilt and not finished:
        summary["restored"] = measure(*rebuilt)
    if not hosts.leads():
        return summary
    write_json(out / "summary.json", summary)
    for name, picture in figures(exp, summary, rebuilt).items():
        _drawn(out / "figures" / name, picture, say_line)
    page.try_report([out], out / page.NAME, say_line)
    for line in warnings_of(records):
        say_line(line)
    ended(summary)
    return summary


def _checkpoints(out: Path, cfg: RunConfig) -> contextlib.AbstractContextManager[CheckpointManager | None]:
    """What writes checkpoints; None in the processes that do not."""
    if not hosts.leads():
        return contextlib.nullcontext()
    return checkpoint.open_checkpoints(out / "checkpoints", cfg.keep_checkpoints)


def figures(exp: Experiment, summary: dict[str, Any], rebuilt: tuple[Rebuilt, Rebuilt] | None) -> dict:
    """File name -> draw(path), of all figures of the run."""
    own = figures_of(exp, summary)
    return own | {RESTORED: lambda path: draw_restored(path, *rebuilt[0])} if rebuilt else own


def missing_figures(out: Path, summary: dict[str, Any]) -> list[str]:
    """The figures of a finished run that are not there."""
    names = (*FIGURES, *((RESTORED,) if "restored" in summary else ()))
    return [name for name in names if not (out / "figures" / name).exists()]


def _drawn(path: Path, picture: Callable[[Path], None], tell: Callable[[str], None]) -> None:
    """A figure that cannot be drawn is told: the run and its numbers do not depend on it."""
    try:
        picture(path)
    except Exception as error:
        tell(f"warning: the figure {path} could not be drawn: {type(error).__name__}: {error}")


def finished_summary(out: Path, method_name: str, cfg: RunConfig) -> dict[str, Any] | None:
    """The summary of a run that is finished; None if it is not, or is to have another number of rounds.

    Raises:
      InputError: if it was finished with other settings than config.yaml now has, or these.
    """
    origin.check_file(out, method_name, cfg, may=("rounds",))
    try:
        summary = load_summary(out)
    except InputError:
        return None  # there is none, or it is damaged and will be made again
    then = {"method": method_name, **summary.get("config", {})}
    differ = origin.differing(then, origin.plain_settings(method_name, cfg))
    if set(differ) - {"rounds"}:
        named = ", ".join(differ.values())
        raise InputError(f"resume: {str(out)!r} was finished with other settings: {named}")
    return None if differ else summary


def _extend(out: Path, method_name: str, cfg: RunConfig, beyond: list[int]) -> None:
    """Where a run gets another number of rounds: the checkpoints after the last round that both numbers have
    in common, and a summary, are set aside, and config.yaml has the new number."""
    if config.load_yaml(out / "config.yaml").get("rounds") == cfg.rounds and not beyond:
        return
    if (out / "summary.json").exists():
        aside = out / checkpoint.ASIDE
        aside.mkdir(exist_ok=True)
        os.replace(out / "summary.json", aside / f"summary-{secrets.token_hex(3)}.json")
    for step in beyond:
        checkpoint.set_aside(out / "checkpoints", step)
    write_text(out / "config.yaml", config.to_yaml(method_name, cfg))


def check_new(out: Path) -> None:
    """Check that nothing is at `out` yet, but perhaps an empty folder, or one that a process is about to use.

    Raises:
      InputError: if there is.
    """
    if out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
        raise InputError(f"out: {str(out)!r} exists already; give a new folder, or go on with --resume {out}")


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Nobody else works in the run directory until the block ends.

    Raises:
      InputError: if somebody does, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(owned(out / LOCK))
        except BlockingIOError:
            raise InputError(
                f"out: another process is at work in {str(out)!r}; wait for its end, or give another folder"
            ) from None
        except OSError as error:
            raise InputError(f"out: cannot write to {str(out)!r}: {error.strerror or error}") from None
        yield


@contextlib.contextmanager
def claimed(out: Path, method_name: str, cfg: RunConfig) -> Iterator[None]:
    """Make the run directory, with config.yaml, and own it; no half of it stays if that fails.

    Raises:
      InputError: if it cannot be written, or somebody else has made it in the meantime.
    """
    made = not out.exists()
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(out))
            check_new(out)
        except OSError as error:
            raise InputError(f"out: cannot write to {str(out)!r}: {error.strerror or error}") from None
        own = [out / "checkpoints", out / "figures"]
        try:
            for folder in own:
                folder.mkdir()
            write_text(out / "config.yaml", config.to_yaml(method_name, cfg))
        except OSError as error:
            with contextlib.suppress(OSError):
                (out / LOCK).unlink()
                for folder in [*own, *([out] if made else [])]:
                    folder.rmdir()  # which removes empty folders only
            raise InputError(f"out: cannot write to {str(out)!r}: {error.strerror or error}") from None
        yield


def begin(
    exp: Experiment, manager: CheckpointManager | None, tell: Callable[[str], None]
) -> tuple[State, Records, int]:
    """The state before the first round, or the newest whole checkpoint's, and how many rounds it has behind
    it. Without a manager they are those of the process that has one."""
    server = first_server(exp)
    key = jax.random.fold_in(exp.key, RunKey.CLIENTS)
    clients = init_clients(exp.method, server, exp.sizes.clients, key)
    state = State(server, clients, jax.random.key_data(exp.key))
    found = hosts.agreed(lambda: checkpoint.latest(manager, state, tell) if manager else None)
    found = found or checkpoint.Snapshot(0, state, dataclasses.asdict(Records()))
    done, records = hosts.told(lambda: found.step), hosts.told(lambda: found.records)
    return exp.engine.place(hosts.spread(found.state)), Records(**records), done


def first_server(exp: Experiment) -> PyTree:
    """The server's state before the first round."""
    return jax.jit(exp.method.init)(jax.random.fold_in(exp.key, RunKey.INIT), exp.frozen)


def _loop(
    exp: Experiment,
    cfg: RunConfig,
    state: State,
    records: Records,
    done: int,
    facts: dict[str, Any],
    manager: CheckpointManager | None,
    clock: Clock,
    out: Path,
    console: Console,
    stop: Callable[[], int | None],
    heard: Callable[[dict[str, Any]], None],
) -> tuple[Experiment, State]:
    """All remaining rounds: train, evaluate at task ends, log, checkpoint. The state after them, and the
    experiment with the query features that were cached on the way."""
    evaluate = make_evaluate(exp, cfg.eval_batch_size)
    log, steps = out / "metrics.jsonl", len(exp.scenario.tasks) * cfg.rounds
    # A run that was killed may have logged rounds that no checkpoint holds: they will be run, and logged,
    # again.
    if manager:
        write_text(log, "".join(json_line(line) for line in records.rounds))
    play, fill, filled = make_play(exp, cfg, records, clock), make_queries(exp, cfg), 0
    past = _past(exp, state, out / KEPT, records.kept)
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=steps, completed=done, **shown(records))
        for step in range(done, steps):
            t, r = divmod(step, cfg.rounds)
            last, row = r == cfg.rounds - 1, NOT_EVALUATED
            exp, filled = fill(exp, range(filled, t + 1), clock), t + 1
            state, kept, done_round = play(exp.train, state, past, t, r, last)
            if kept is not None:
                past += (kept,)
                records.kept += [archive.save_task(out / KEPT, t, kept)] if manager else []
                records.add(replay_examples=len(kept.label))
            if last or cfg.eval_every_round:
                with clock("eval"):
                    row = evaluate(exp.test, state, t, records)
                if last:
                    records.keep(*row)
            line = record(records, t, r, done_round, *row)
            warned = hosts.told(stop)
            with postponed():
                if manager:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(json_line(line))
                if manager and ((step + 1) % cfg.checkpoint_every == 0 or step == steps - 1 or warned):
                    host = dataclasses.asdict(records)
                    checkpoint.save(manager, checkpoint.Snapshot(step + 1, state, host, facts))
            heard(line)
            progress.update(bar, advance=1, **shown(records))
            if warned and step < steps - 1:
                hosts.leave()
                raise Stopped(warned)
    return fill(exp, range(filled, len(exp.scenario.tasks)), clock), state


def _past(exp: Experiment, state: State, folder: Path, sha256: list[str]) -> tuple[ReplayBuffer, ...]:
    """What the server has kept of the first tasks, in files of these checksums, of a run that goes on."""
    if exp.method.server_replay is None:
        return ()
    round_context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, True)
    template = jax.eval_shape(exp.method.server_replay.buffer, round_context, state.server)
    return archive.load_tasks(folder, sha256, template)


def make_play(
    exp: Experiment, cfg: RunConfig, records: Records, clock: Clock, elsewhere: Clients | None = None
) -> Callable:
    """play(train, state, past, task, round, last) -> (state, kept, report): a round, with what comes before
    the first and after the last one of a task. `train`: the training split, as in the experiment or with
    query features; `past`: what the server keeps of the tasks before; `kept`: of this one, when it is over.
    `elsewhere`: who plays the clients' part, if not the engine."""
    begin_task = jax.jit(exp.method.begin_task)
    shares = parse_faults(cfg.faults)

    def stage(train, server, clients, past, t: int, r: int, last: bool, when: When):
        partition, key = exp.scenario.partitions[t][r], jax.random.fold_in(exp.key, _PURPOSE[when])
        everyone = np.flatnonzero(partition.count)
        ids = everyone
        if when == "round":
            ids = participants(cfg.seed, t, r, everyone, cfg.participation)
            ids = reached(shares, cfg.seed, t, r, ids)
        number = r if when == "round" else 0
        inputs = RoundInputs(
            exp.frozen, train, partition, ids, exp.scenario.tasks[t], number, key, when, last, past
        )
        return run_round(
            exp.engine,
            server,
            clients,
            inputs,
            section=clock,
            clients=elsewhere,
            guarded=records.counts.get("rejected", 0) > 0,
        )

    def play(
        train: Split | Host, state: State, past: tuple[ReplayBuffer, ...], t: int, r: int, last: bool
    ) -> tuple[State, ReplayBuffer | None, RoundReport]:
        (server, clients, key), kept = state, None
        round_context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[t], r, last)
        if r == 0:
            begin_key = jax.random.fold_in(jax.random.fold_in(exp.key, RunKey.BEGIN_TASK), t)
            server = begin_task(round_context, server, begin_key)
            server, clients, extra = stage(train, server, clients, past, t, r, last, "task_start")
            records.count(extra._replace(training_examples=0))
        server, clients, done = stage(train, server, clients, past, t, r, last, "round")
        if last:
            server, clients, extra = stage(train, server, clients, past, t, r, last, "task_end")
            records.count(extra._replace(training_examples=0))
            kept = keep_task(exp.engine, exp.frozen, server, exp.scenario.tasks[t], r)
        return State(server, clients, key), kept, done

    return play
