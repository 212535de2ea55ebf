"""A run from start to end: all rounds of all tasks, with checkpoints and logs, and what is written at the
end."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import CheckpointManager
from rich.console import Console

from fcljax import config
from fcljax.config import RunConfig, explain_fidelity, explain_scale
from fcljax.data.owners import owners_csv
from fcljax.errors import InputError
from fcljax.federated.check import leaks_in_one_line
from fcljax.files import read_text, write_text
from fcljax.mesh import own_part, own_rows, put_own, put_server, put_shared
from fcljax.results import page, trackers
from fcljax.results.run_folder import changed_files, seal, write_json
from fcljax.runs import checkpoint, fit, memory, rate_search, resume, signals
from fcljax.runs.build import NOTHING, Experiment, Supplied, build, placed
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import personal_accuracy, sampled_calibration
from fcljax.runs.features import make_fill
from fcljax.runs.folder import check_new, created, locked
from fcljax.runs.hosts import Hosts
from fcljax.runs.inputs import report_notes
from fcljax.runs.reconstructions import Rebuilt, measure, restored_images
from fcljax.runs.records import Clock, Records, json_line, last_round, rounds_bar
from fcljax.runs.rounds import first_server, first_state, make_play_round, saved_state, state_shapes
from fcljax.runs.summary import draw_figures, missing_figures, summarize
from fcljax.settings import is_owned
from fcljax.terminal import say
from fcljax.types import ReplayBuffer, RoundContext

PARTITION = "partition.csv"  # the owners of the examples, where the user says who they are
UP_TO_ROUNDING = "results equal those of the run without this change up to rounding, not bit for bit"
CHECKPOINTS = "checkpoints"
SEARCH = "search.json"  # what --scale fit tried and chose
KEPT = "kept"  # folder of the examples that a server keeps of finished tasks


def _never() -> None:
    """No signal has asked the run to stop."""


def _ignore(line: dict[str, Any]) -> None:
    """Nobody hears of a round."""


QUIET = Console(quiet=True)


@dataclasses.dataclass(frozen=True)
class Observer:
    """Who follows a run from outside, and may stop it."""

    # where the progress bar and warnings go
    console: Console = dataclasses.field(default_factory=lambda: Console(stderr=True))
    # asked after every round, as SIGINT and SIGTERM are: the number of a signal ends the run there, with a
    # checkpoint
    stop: Callable[[], int | None] = _never
    # is given the line of every round; what it raises ends the run there
    heard: Callable[[dict[str, Any]], None] = _ignore
    # names of `trackers.TRACKERS` that follow the run
    track: Sequence[str] = ()

    def say(self, line: str) -> None:
        """Print a line."""
        say(self.console, line)


class Session(NamedTuple):
    """A run as one process works on it."""

    settings: RunConfig
    out: Path
    observer: Observer
    hosts: Hosts
    supplied: Supplied = NOTHING


class Progress(NamedTuple):
    """How far a run has come."""

    state: State
    records: Records
    step: int  # rounds that are done


class Journal(NamedTuple):
    """Where each round is written to: the log, checkpoints, trackers. Only the first process writes."""

    manager: CheckpointManager | None
    origin: dict[str, Any]
    trackers: trackers.Following


@leaks_in_one_line()
def run(
    settings: RunConfig,
    out: str | Path,
    resume: bool = False,
    observer: Observer | None = None,
    supplied: Supplied = NOTHING,
) -> dict[str, Any]:
    """Train and evaluate a method, or resume a run that was interrupted.

    Args:
      settings: resolved; with `resume` they must be those of the run, but see `resume.check_settings`.
      out: the run directory; a new one, unless `resume`.
      resume: continue from the newest intact checkpoint in `out`; the result equals the uninterrupted run's
        bit for bit, on other hardware up to rounding.
      observer: who follows the run; None: a progress bar on standard error.
      supplied: images or a network in memory, in place of those that the settings name.

    Returns:
      The content of summary.json.

    Raises:
      Stopped: when `observer.stop` or a signal asks for it.
      InputError: for bad settings or files, if `out` cannot be written or another process works in it, or if
        it holds another run.
    """
    observer = observer or Observer()
    hosts = Hosts.connected()
    if not hosts.first:
        observer = dataclasses.replace(observer, console=Console(quiet=True))
    session = Session(settings, Path(out), observer, hosts, supplied)
    if resume:
        return _resume(session)
    hosts.from_first(lambda: check_new(session.out))
    exp = _build(session)
    session = session._replace(settings=exp.settings)  # with what was chosen for device and data
    with contextlib.ExitStack() as stack:
        hosts.from_first(lambda: stack.enter_context(created(session.out, exp.settings)))
        if hosts.first and is_owned(exp.settings.partition):
            text = owners_csv(exp.inputs.dataset, exp.settings.partition)
            write_text(session.out / PARTITION, text)
        return _complete(session, exp, None)


def _build(session: Session) -> Experiment:
    """The experiment, which must be the same in all processes."""

    def checked() -> Experiment:
        exp = build(session.settings, session.supplied)
        if exp.batch_size < exp.settings.batch_size:
            session.observer.say(
                f"batch size: {exp.batch_size}, not {exp.settings.batch_size}, because no client has more "
                "examples; the steps are the same"
            )
        memory.check_memory(exp)
        return fit.on_devices(exp, session.observer.say)

    exp = session.hosts.agree(checked)
    origin = resume.origin(exp.settings, exp.inputs)
    session.hosts.check_same(origin | {"settings": origin["settings"] | dict.fromkeys(resume.FREE)})
    return exp


def _resume(session: Session) -> dict[str, Any]:
    """Resume the run, if it is this one. Nothing is written before that is known."""
    out = session.out
    observer = session.observer
    hosts = session.hosts
    chosen = hosts.from_first(lambda: resume.chosen_before(out, session.settings))
    settings = dataclasses.replace(session.settings, **chosen)
    session = session._replace(settings=settings)
    finished = hosts.from_first(lambda: resume.finished_summary(out, settings))
    if finished and hosts.from_first(lambda: not missing_figures(out, finished)):
        if resume.names_files(settings, session.supplied):
            origin = hosts.from_first(lambda: checkpoint.origin_of(out / CHECKPOINTS))
            if origin:
                hosts.agree(lambda: resume.check_named_files(origin, settings, session.supplied, out))
        _say_changed(session)
        if hosts.first and not (out / page.NAME).exists():
            page.try_report([out], out / page.NAME, observer.say)
        return finished
    with contextlib.ExitStack() as stack:
        hosts.from_first(lambda: stack.enter_context(locked(out)))
        folder = out / CHECKPOINTS
        steps = hosts.from_first(lambda: checkpoint.steps(folder))
        if finished and not steps:
            return finished  # nothing is left to draw its figures from
        before = hosts.from_first(lambda: checkpoint.origin_of(folder))
        since = hosts.agree(lambda: resume.check_settings(before, settings, steps, out))
        exp = _build(session)
        session = session._replace(settings=exp.settings)
        if before:
            hosts.agree(lambda: resume.check_digests(before, exp.settings, exp.inputs, out))
        _say_changed(session)
        if finished:
            return _complete(session, exp, finished)
        later = [step for step in steps if step > since]
        hosts.from_first(lambda: resume.change_settings(out, exp.settings, later))
        moved = resume.changed_hardware(before or {}, resume.hardware(exp))
        if moved:
            observer.say(f"resume: {moved}: from here on {UP_TO_ROUNDING}")
        return _complete(session, exp, None, moved)


def _say_changed(session: Session) -> None:
    """Say which results of a run that may be resumed were changed since."""
    for line in session.hosts.from_first(lambda: changed_files(session.out)):
        session.observer.say(line)


def _complete(
    session: Session, exp: Experiment, finished: dict[str, Any] | None, moved: str = ""
) -> dict[str, Any]:
    """Play the remaining rounds, and write the results.

    Args:
      session: the run.
      exp: its experiment.
      finished: the summary of a run of which only figures are missing.
      moved: what of the hardware has changed since the newest checkpoint.
    """
    report_notes(exp.inputs.backbone, session.observer.console)
    session.observer.say(explain_scale(session.settings))
    if said := explain_fidelity(session.settings):
        session.observer.say(said)
    searching = 0.0
    if rate_search.is_due(session.settings) and not finished:
        exp, searching = _search(session, placed(exp))
        session = session._replace(settings=exp.settings)
    settings, out, observer, hosts, _ = session
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory.given_back_by_compilers())
        with _checkpoints(session) as manager:
            progress = _begin(session, exp, manager)
            if searching:
                progress.records.seconds["search"] = searching
            progress.records.hardware_changes += [[progress.step, moved]] if moved else []
            following = trackers.NOBODY
            if hosts.first and not finished:
                plain = resume.plain_settings(settings)
                followers = trackers.following(observer.track, out, plain, progress.step, observer.say)
                following = stack.enter_context(followers)
            origin = resume.origin(settings, exp.inputs) | {"hardware": resume.hardware(exp)}
            journal = Journal(manager, origin, following)
            try:
                exp, state = _play(session, placed(exp), progress, journal)
            except jax.errors.JaxRuntimeError as error:
                raise fit.explained(error, exp) from error
            records = progress.records
            with Clock(records.seconds) as clock, clock("eval"):
                personal = personal_accuracy(exp, state, records)
                drawn = sampled_calibration(exp, state)
                rebuilt = restored_images(exp, state.server)
            del state  # what draws figures need not add its memory to that of the last state
            if manager:
                checkpoint.finish(manager)
        summary = finished or summarize(exp, records, personal) | {"calibration_drawn": drawn}
        if rebuilt and not finished:
            summary["restored"] = measure(*rebuilt)
        if (out / SEARCH).exists() and not finished:
            summary["rate_search"] = json.loads(read_text(out / SEARCH, 1 << 20))
        if hosts.first:
            if not finished:
                write_json(out / "summary.json", summary)
                seal(out)
            _write_results(session, exp, summary, rebuilt)
            for line in summary.get("warnings", ()):  # older summaries have none
                observer.say(line)
            following.ended(summary)
    return summary


def _search(session: Session, exp: Experiment) -> tuple[Experiment, float]:
    """The experiment with the learning rates that --scale fit chooses, which config.yaml gets too, and the
    seconds that it took. A search that is stopped is made again when the run is resumed."""
    out = session.out
    observer = session.observer
    hosts = session.hosts

    def check() -> None:
        stopped = hosts.from_first(lambda: observer.stop() or signals.asked())
        if stopped:
            hosts.leave()
            raise signals.Stopped(stopped)

    choice = rate_search.search(exp, observer.console, observer.say, check)
    observer.say(choice.line)
    exp = rate_search.with_choice(exp, choice.settings)
    if hosts.first:
        with signals.unbroken():
            write_json(out / SEARCH, choice.to_json())
            write_text(out / "config.yaml", config.to_yaml(exp.settings))
    return exp, choice.seconds


def _write_results(
    session: Session, exp: Experiment, summary: dict[str, Any], rebuilt: tuple[Rebuilt, Rebuilt] | None
) -> None:
    out = session.out
    say_line = session.observer.say
    draw_figures(exp, summary, rebuilt, out / "figures", say_line)
    page.try_report([out], out / page.NAME, say_line)


def final_state(
    settings: RunConfig, out: str | Path, supplied: Supplied = NOTHING
) -> tuple[Experiment, State]:
    """The experiment of a run, and the state of its newest checkpoint.

    Raises:
      InputError: as `build`, or if there is no checkpoint, or it is of other images or weights.
    """
    folder = Path(out) / CHECKPOINTS
    exp = build(settings, supplied)
    before = checkpoint.origin_of(folder) if folder.exists() else None
    if before is None:
        raise InputError(f"out: {str(out)!r} has no checkpoint to take the model from")
    resume.check_digests(before, exp.settings, exp.inputs, Path(out))
    with checkpoint.open_checkpoints(folder, settings.keep_checkpoints) as manager:
        found = checkpoint.latest(manager, state_shapes(exp), Observer().say)
    if found is None:
        raise InputError(f"out: no checkpoint in {str(out)!r} is intact")
    return placed(exp), found.state


def _checkpoints(session: Session) -> contextlib.AbstractContextManager[CheckpointManager | None]:
    """The manager of checkpoints, in the first process; None in the others."""
    if not session.hosts.first:
        return contextlib.nullcontext()
    return checkpoint.open_checkpoints(session.out / CHECKPOINTS, session.settings.keep_checkpoints)


def _begin(session: Session, exp: Experiment, manager: CheckpointManager | None) -> Progress:
    """The newest intact checkpoint of the first process, in all processes; without one, the state before the
    first round."""
    hosts = session.hosts
    say_line = session.observer.say
    engine = exp.engine
    shapes = state_shapes(exp)
    check = intact_files(session.out / KEPT)
    folder = session.out / CHECKPOINTS
    index = own_rows(engine.mesh, exp.sizes.clients)
    found = hosts.agree(lambda: checkpoint.newest(folder, shapes, say_line, check, hosts, index))
    if manager:
        manager.reload()  # some may have been set aside
    if found is None:
        server = put_server(hosts.broadcast(first_server(exp)), engine.mesh)
        return Progress(first_state(exp, server), Records(), 0)
    server, clients, key = found.state
    server, key = hosts.broadcast((server, key))
    if found.shards:
        clients = put_own(clients, index, exp.sizes.clients, engine.mesh)
    else:
        clients = put_shared(hosts.broadcast(clients), engine.mesh)
    state = State(put_server(server, engine.mesh), clients, engine.place(key))
    return Progress(state, Records(**found.records), found.step)


def intact_files(kept: Path) -> Callable[[checkpoint.Snapshot], None]:
    """check(snapshot), for `checkpoint.latest`: the files of finished tasks are those of the snapshot."""
    return lambda snapshot: checkpoint.check_tasks(kept, snapshot.records["kept"])


def _play(
    session: Session, exp: Experiment, progress: Progress, journal: Journal
) -> tuple[Experiment, State]:
    """Play all remaining rounds. Returns the experiment with the query features that were cached on the way,
    and the state after the last round; `progress.records` are updated."""
    settings, out, observer, hosts, _ = session
    (state, records, done) = progress
    tasks = len(exp.scenario.tasks)
    steps = tasks * settings.rounds
    filled = 0
    if journal.manager:
        # A run that was killed may have logged rounds that no checkpoint holds: they will be logged again.
        write_text(out / "metrics.jsonl", "".join(map(json_line, records.rounds)))
    past = _past(exp, state, out / KEPT, records.kept)
    shared = hosts.share(out)
    with Clock(records.seconds) as clock, rounds_bar(observer.console) as bar:
        play_round = make_play_round(exp, records, clock)
        fill = make_fill(exp)
        shown = bar.add_task("", total=steps, completed=done, **last_round(records))
        for step in range(done, steps):
            t = step // settings.rounds
            exp = fill(exp, range(filled, t + 1), clock)
            filled = t + 1
            state, kept, line = play_round(exp, state, past, step)
            if kept is not None:
                past += (kept,)
                records.kept += [checkpoint.save_task(out / KEPT, t, kept)] if journal.manager else []
            stopped = hosts.from_first(lambda: observer.stop() or signals.asked())
            with signals.unbroken():
                due = stopped or (step + 1) % settings.checkpoint_every == 0 or step == steps - 1
                _log_round(out, journal, records)
                if due:
                    _save_checkpoint(session, exp, journal, Progress(state, records, step + 1), shared)
            journal.trackers.heard(line)
            bar.update(shown, advance=1, **last_round(records))
            if stopped and step < steps - 1:
                hosts.leave()
                raise signals.Stopped(stopped)
            if due or not hosts.first:
                signals.check()
            observer.heard(line)
        return fill(exp, range(filled, tasks), clock), state


def _saved(
    session: Session, exp: Experiment, state: State, step: int, shared: bool
) -> tuple[State, list[dict[str, Any]]]:
    """A run's state on the host, as checkpoints have it, and the shards that have the states of clients. All
    processes call this together; where they share the run's folder, each writes its own clients' states."""
    hosts = session.hosts
    count = exp.sizes.clients
    if not shared or not jax.tree.leaves(state.clients):
        return saved_state(exp, state), []
    index, clients = own_part(state.clients, count)
    folder = session.out / CHECKPOINTS
    shard = hosts.agree(lambda: checkpoint.save_shard(folder, step, hosts.index, index, clients, count))
    shards = [json.loads(each) for each in hosts.gather(json.dumps(shard))]
    return saved_state(exp, state._replace(clients=())), shards


def _log_round(out: Path, journal: Journal, records: Records) -> None:
    """Log the last round."""
    if journal.manager:
        with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json_line(records.rounds[-1]))


def _save_checkpoint(
    session: Session, exp: Experiment, journal: Journal, progress: Progress, shared: bool
) -> None:
    """Save a checkpoint; all processes call this together. Afterwards nothing refers to the state's memory
    but `progress`: the next round could not overwrite it otherwise, and would take as much again."""
    state, records, step = progress
    saved, shards = _saved(session, exp, state, step, shared)
    if journal.manager:
        snapshot = checkpoint.Snapshot(step, saved, dataclasses.asdict(records), journal.origin, shards)
        checkpoint.save(journal.manager, snapshot)


def _past(exp: Experiment, state: State, folder: Path, sha256: list[str]) -> tuple[ReplayBuffer, ...]:
    """The examples that the server keeps of finished tasks, from files with these checksums."""
    if exp.method.server_replay is None:
        return ()
    round_context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, True)
    template = jax.eval_shape(exp.method.server_replay.buffer, round_context, state.server)
    return checkpoint.load_tasks(folder, sha256, template)
