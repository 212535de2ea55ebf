"""A run from start to end: all rounds of all tasks, with checkpoints and logs, and what
is written at the end."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import CheckpointManager
from rich.console import Console

from fcljax import config
from fcljax.config import RunConfig, explain_fidelity, explain_scale
from fcljax.data.owners import owners_csv
from fcljax.errors import InputError, reason
from fcljax.federated.check import leaks_in_one_line
from fcljax.files import read_text, write_text
from fcljax.mesh import process_part, process_rows, put_process_rows, put_server, put_shared
from fcljax.results import page, trackers
from fcljax.results.run_folder import CONFUSION, PREDICTIONS, changed_files, seal, write_json
from fcljax.runs import checkpoint, fit, memory, rate_search, resume, signals
from fcljax.runs.build import NOTHING, Experiment, Supplied, build, placed
from fcljax.runs.checkpoint import State
from fcljax.runs.early_stop import ends_task
from fcljax.runs.evaluate import check_metrics, last_predictions, personal_accuracy, sampled_calibration
from fcljax.runs.features import make_fill
from fcljax.runs.folder import check_new, created, locked
from fcljax.runs.hosts import Hosts
from fcljax.runs.inputs import report_notes
from fcljax.runs.reconstructions import Rebuilt, measure, restored_images
from fcljax.runs.records import Clock, Records, Tested, json_line, last_round, rounds_bar
from fcljax.runs.rounds import first_server, first_state, make_play_round, saved_state, state_shapes
from fcljax.runs.software import software
from fcljax.runs.summary import (
    MOST_PREDICTIONS,
    confusion_csv,
    draw_figures,
    missing_figures,
    predictions_csv,
    summarize,
)
from fcljax.settings import is_owned
from fcljax.terminal import say
from fcljax.types import ReplayBuffer, RoundContext

# the owners of the examples, where the user says who they are
PARTITION = "partition.csv"
UP_TO_ROUNDING = "results equal those of the run without this change up to rounding, not bit for bit"
OTHER_VERSIONS = "results may differ from those of the run without this change"
CHECKPOINTS = "checkpoints"
SEARCH = "search.json"  # what --scale fit tried and chose
MAX_SEARCH_BYTES = 1 << 20
KEPT = "kept"  # folder of the examples that a server keeps of finished tasks


def _never() -> None:
    """Return no signal: the run goes on."""


def _ignore(_line: dict[str, Any]) -> None:
    """Do nothing with the line of a round."""


# for runs within other work, such as tests
QUIET = Console(quiet=True)


@dataclasses.dataclass(frozen=True)
class Observer:
    """Follows a run from outside, and may stop it."""

    # where the progress bar and warnings go
    console: Console = dataclasses.field(default_factory=lambda: Console(stderr=True))
    # asked after every round, as SIGINT and SIGTERM are: the number of a signal ends
    # the run there, with a checkpoint
    stop: Callable[[], int | None] = _never
    # gets the line of every round; an exception of it ends the run there
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
    """The progress of a run."""

    state: State
    records: Records
    step: int  # number of finished rounds, over all tasks; those left out count as finished
    # files of clients' states in the newest checkpoint, if it has some
    # (`checkpoint.Snapshot`)
    shards: Sequence[dict[str, Any]] = ()


class Changes(NamedTuple):
    """Changes since a resumed run began, as `resume.changed` names them; empty: none."""

    hardware: str = ""
    software: str = ""


UNCHANGED = Changes()


class Journal(NamedTuple):
    """Outputs of each round: the log, checkpoints, trackers.

    Only the first process writes."""

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
      settings: resolved; with `resume` they must be those of the run, but see
        `resume.check_settings`.
      out: the run directory, which must be new unless `resume`.
      resume: continue from the newest intact checkpoint in `out`; the result equals the
        uninterrupted run's bit for bit, on other hardware up to rounding.
      observer: who follows the run; None: a progress bar on standard error.
      supplied: images or a network in memory, in place of those that the settings name.

    Returns:
      The content of summary.json.

    Raises:
      Stopped: when `observer.stop` or a signal asks for it.
      InputError: for bad settings or files, if `out` cannot be written or another process
        works in it, or if it holds another run.
    """
    observer = observer or Observer()
    hosts = Hosts.connected()
    # only the first process prints
    if not hosts.first:
        observer = dataclasses.replace(observer, console=Console(quiet=True))
    session = Session(settings, Path(out), observer, hosts, supplied)
    if resume:
        return _resume(session)
    # only the first process touches the folder; the others get its error too
    hosts.from_first(lambda: check_new(session.out))
    exp = _build(session)
    # the settings now include the choices for device and data
    session = session._replace(settings=exp.settings)
    with contextlib.ExitStack() as stack:
        hosts.from_first(lambda: stack.enter_context(created(session.out, exp.settings)))
        if hosts.first and is_owned(exp.settings.partition):
            text = owners_csv(exp.inputs.dataset, exp.settings.partition)
            write_text(session.out / PARTITION, text)
        return _complete(session, exp, None)


def _build(session: Session) -> Experiment:
    """Build the experiment, and check that it is the same in all processes."""

    def build_for_devices() -> Experiment:
        exp = build(session.settings, session.supplied)
        # the batch was cut to the largest client's data; the rest would be padding in
        # each step
        if exp.batch_size < exp.settings.batch_size:
            session.observer.say(
                f"batch size: {exp.batch_size}, not {exp.settings.batch_size}, because no client has more "
                "examples; the steps are the same"
            )
        memory.check_memory(exp)
        return fit.on_devices(exp, session.observer.say)

    exp = session.hosts.agree(build_for_devices)
    origin = resume.origin(exp.settings, exp.inputs)
    # two processes with other settings or files would wait for each other for ever
    session.hosts.check_same(origin | {"settings": origin["settings"] | dict.fromkeys(resume.FREE)})
    return exp


def _resume(session: Session) -> dict[str, Any]:
    """Resume the run, if the folder has the same one.

    Nothing is written before that is known."""
    out = session.out
    observer = session.observer
    hosts = session.hosts
    # rates that a search has chosen are settings of the resumed run
    chosen = hosts.from_first(lambda: resume.chosen_before(out, session.settings))
    settings = dataclasses.replace(session.settings, **chosen)
    session = session._replace(settings=settings)
    finished = hosts.from_first(lambda: resume.finished_summary(out, settings))
    # a finished run needs nothing but, perhaps, a figure
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
        # the user has removed the checkpoints, so missing figures cannot be drawn
        if finished and not steps:
            return finished
        origin = hosts.from_first(lambda: checkpoint.origin_of(folder))
        since = hosts.agree(lambda: resume.check_settings(origin, settings, steps, out))
        exp = _build(session)
        session = session._replace(settings=exp.settings)
        if origin:
            hosts.agree(lambda: resume.check_digests(origin, exp.settings, exp.inputs, out))
        _say_changed(session)
        if finished:
            return _complete(session, exp, finished)
        # with another number of rounds, later checkpoints belong to a run that there is
        # not
        later_steps = [step for step in steps if step > since]
        hosts.from_first(lambda: resume.change_settings(out, exp.settings, later_steps))
        changes = Changes(
            resume.changed("hardware", origin or {}, resume.hardware(exp)),
            resume.changed("software", origin or {}, software()),
        )
        if changes.hardware:
            observer.say(f"resume: {changes.hardware}: from here on {UP_TO_ROUNDING}")
        if changes.software:
            observer.say(f"resume: {changes.software}: from here on {OTHER_VERSIONS}")
        return _complete(session, exp, None, changes)


def _say_changed(session: Session) -> None:
    """Say which results of a run that may be resumed were changed since."""
    for line in session.hosts.from_first(lambda: changed_files(session.out)):
        session.observer.say(line)


def _complete(
    session: Session,
    exp: Experiment,
    finished: dict[str, Any] | None,
    changes: Changes = UNCHANGED,
) -> dict[str, Any]:
    """Play the remaining rounds, and write the results.

    Args:
      session: the run.
      exp: its experiment.
      finished: the summary of a run of which only figures are missing.
      changes: since the newest checkpoint.
    """
    report_notes(exp.inputs.backbone, session.observer.console)
    session.observer.say(explain_scale(session.settings))
    fidelity = explain_fidelity(session.settings)
    if fidelity:
        session.observer.say(fidelity)
    search: dict[str, Any] = {}
    # before the checkpoints are opened, because the search plays rounds of its own
    if rate_search.is_due(session.settings) and not finished:
        exp, search = _search(session, placed(exp))
        session = session._replace(settings=exp.settings)
    settings, out, observer, hosts, _ = session
    tested: Sequence[Tested] = ()
    with contextlib.ExitStack() as stack:
        # after compiling, glibc holds free memory that the run's arrays need
        stack.enter_context(memory.trim_after_compilation())
        with _checkpoints(session) as manager:
            progress = _begin(session, exp, manager)
            if not finished:
                _keep_search(session, progress.records, search)
            _record_changes(progress, changes)
            following = trackers.NOBODY
            if hosts.first and not finished:
                plain = resume.plain_settings(settings)
                following = stack.enter_context(
                    trackers.following(observer.track, out, plain, progress.step, observer.say)
                )
            origin = resume.origin(settings, exp.inputs)
            tools = {"hardware": resume.hardware(exp), "software": software()}
            journal = Journal(manager, origin | tools, following)
            try:
                exp, state = _play(session, placed(exp), progress, journal)
            # the device's message names bytes, ours the option that lowers them
            except jax.errors.JaxRuntimeError as error:
                raise fit.explained(error, exp) from error
            records = progress.records
            with Clock(records.seconds) as clock, clock("eval"):
                personal = personal_accuracy(exp, state, records)
                if not finished:
                    tested = last_predictions(exp, state, records)
                drawn_calibration = sampled_calibration(exp, state)
                rebuilt = restored_images(exp, state.server)
            # figures are drawn next; without this line they and the last state are in
            # memory at the same time
            del state
            # the last checkpoint may still be in the making, and `seal` digests files
            if manager:
                checkpoint.finish(manager)
        summary = finished or summarize(exp, records, personal) | {"calibration_drawn": drawn_calibration}
        if rebuilt and not finished:
            summary["restored"] = measure(*rebuilt)
        if records.rate_search and not finished:
            summary["rate_search"] = records.rate_search
        # the other processes have the same summary, and leave files to the first
        if hosts.first:
            if not finished:
                _write_tables(out, exp, records, tested)
                write_json(out / "summary.json", summary)
                seal(out)
            _write_results(session, exp, summary, rebuilt)
            # summaries of earlier versions have no warnings
            for line in summary.get("warnings", ()):
                observer.say(line)
            following.ended(summary)
    return summary


def _search(session: Session, exp: Experiment) -> tuple[Experiment, dict[str, Any]]:
    """Search for learning rates (--scale fit), and write them to config.yaml.

    A search that is stopped is made again when the run is resumed.

    Returns:
      The experiment with these rates, and the content of search.json.
    """
    out = session.out
    observer = session.observer
    hosts = session.hosts

    def check() -> None:
        # the signal may have reached any process; all of them have to leave together
        signal = hosts.from_first(lambda: observer.stop() or signals.asked())
        if signal:
            hosts.leave()
            raise signals.Stopped(signal)

    choice = rate_search.search(exp, observer.console, observer.say, check)
    observer.say(choice.line)
    exp = rate_search.with_choice(exp, choice.settings)
    search = choice.to_json()
    if hosts.first:
        # both files or none: a rate without its search cannot be explained later
        with signals.unbroken():
            write_json(out / SEARCH, search)
            write_text(out / "config.yaml", config.to_yaml(exp.settings))
    return exp, search


def _record_changes(progress: Progress, changes: Changes) -> None:
    if changes.hardware:
        progress.records.hardware_changes.append([progress.step, changes.hardware])
    if changes.software:
        progress.records.software_changes.append([progress.step, changes.software])


def _keep_search(session: Session, records: Records, search: dict[str, Any]) -> None:
    """Put a search into the records: the content of search.json; {} if none was made now."""
    if search:
        # its time counts as the run's
        records.seconds["search"] = search["seconds"]
        records.rate_search = search
    elif not records.rate_search:
        # the run was killed before its first checkpoint, or an earlier version began it
        records.rate_search = session.hosts.from_first(lambda: _searched_before(session.out))


def _searched_before(out: Path) -> dict[str, Any]:
    """Read search.json; {} if the run has not searched.

    Raises:
      InputError: for a damaged file.
    """
    path = out / SEARCH
    try:
        search = json.loads(read_text(path, MAX_SEARCH_BYTES))
        if not isinstance(search, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"resume: {str(path)!r} cannot be read ({reason(error)}); remove it to continue without its "
            "trials in summary.json"
        ) from None
    return search


def _write_tables(out: Path, exp: Experiment, records: Records, tested: Sequence[Tested]) -> None:
    """Write the confusion matrix and the predictions of the last evaluation."""
    write_text(out / CONFUSION, confusion_csv(exp, records))
    if sum(len(model.index) for model in tested) <= MOST_PREDICTIONS:
        write_text(out / PREDICTIONS, predictions_csv(exp, tested))


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
    """Return the experiment of a run, and the state of its newest checkpoint.

    Raises:
      InputError: as `build`, or if there is no checkpoint, or it is of other images or weights.
    """
    folder = Path(out) / CHECKPOINTS
    exp = build(settings, supplied)
    origin = None
    if folder.exists():
        origin = checkpoint.origin_of(folder)
    if origin is None:
        raise InputError(f"out: {str(out)!r} has no checkpoint to take the model from")
    # before the arrays are read: other images or weights make them meaningless
    resume.check_digests(origin, exp.settings, exp.inputs, Path(out))
    with checkpoint.open_checkpoints(folder, settings.keep_checkpoints) as manager:
        snapshot = checkpoint.latest(manager, state_shapes(exp), Observer().say)
    if snapshot is None:
        raise InputError(f"out: no checkpoint in {str(out)!r} is intact")
    return placed(exp), snapshot.state


def _checkpoints(
    session: Session,
) -> contextlib.AbstractContextManager[CheckpointManager | None]:
    """Return the manager of checkpoints, in the first process; None in the others."""
    if not session.hosts.first:
        return contextlib.nullcontext()
    return checkpoint.open_checkpoints(session.out / CHECKPOINTS, session.settings.keep_checkpoints)


def _begin(
    session: Session,
    exp: Experiment,
    manager: CheckpointManager | None,
) -> Progress:
    """Return the newest intact checkpoint of the first process, in all processes;
    without one, the state before the first round."""
    hosts = session.hosts
    say_line = session.observer.say
    engine = exp.engine
    shapes = state_shapes(exp)
    check = intact_files(session.out / KEPT)
    folder = session.out / CHECKPOINTS
    # each process reads the states of the clients on its own devices, and of no others
    index = process_rows(engine.mesh, exp.sizes.clients)
    snapshot = hosts.agree(lambda: checkpoint.newest(folder, shapes, say_line, check, hosts, index))
    # the manager has listed checkpoints that `newest` may have set aside as damaged
    if manager:
        manager.reload()
    if snapshot is None:
        server = put_server(hosts.broadcast(first_server(exp)), engine.mesh)
        return Progress(first_state(exp, server), Records(), 0)
    check_metrics(exp.metrics, snapshot.records.get("rounds", []))
    server, clients, key = snapshot.state
    server, key = hosts.broadcast((server, key))
    if snapshot.shards:
        # each process has read the states of its clients
        clients = put_process_rows(clients, index, exp.sizes.clients, engine.mesh)
    else:
        clients = put_shared(hosts.broadcast(clients), engine.mesh)
    state = State(put_server(server, engine.mesh), clients, engine.place(key))
    # files of earlier versions name no step: they are of the checkpoint's own
    shards = [{"step": snapshot.step} | shard for shard in snapshot.shards]
    return Progress(state, Records(**snapshot.records), snapshot.step, shards)


def intact_files(kept: Path) -> Callable[[checkpoint.Snapshot], None]:
    """Return check(snapshot), for `checkpoint.latest`: the files of finished tasks are
    those of the snapshot."""
    return lambda snapshot: checkpoint.check_tasks(kept, snapshot.records["kept"])


def _play(
    session: Session, exp: Experiment, progress: Progress, journal: Journal
) -> tuple[Experiment, State]:
    """Play all remaining rounds, and update `progress.records`.

    Returns:
      The experiment with the query features that were cached on the way, and the state
        after the last round.
    """
    settings, out, observer, hosts, _ = session
    state, records, first_step, shards = progress
    tasks = len(exp.scenario.tasks)
    steps = tasks * settings.rounds
    filled_tasks = 0  # tasks whose query features are cached
    last_write = None
    if journal.manager:
        # A run that was killed may have logged rounds that no checkpoint holds: they
        # will be logged again.
        write_text(out / "metrics.jsonl", "".join(map(json_line, records.rounds)))
        # a file that has changed since the search must not differ from the summary
        if records.rate_search:
            write_json(out / SEARCH, records.rate_search)
    past = _past(exp, state, out / KEPT, records.kept)
    states_in_files = _has_files(state, hosts, hosts.share(out))
    # clients whose states may differ from those of the last checkpoint
    changed = np.zeros(exp.sizes.clients, bool)
    with Clock(records.seconds) as clock, rounds_bar(observer.console) as bar:
        play_round = make_play_round(exp, records, clock)
        fill = make_fill(exp)
        bar_task = bar.add_task("", total=steps, completed=first_step, **last_round(records))
        step = first_step
        while step < steps:
            t, r = divmod(step, settings.rounds)
            next_step = step + 1
            # a task that ends early leaves out its other rounds
            if ends_task(settings, records.rounds, t, r):
                next_step = (t + 1) * settings.rounds
            exp = fill(exp, range(filled_tasks, t + 1), clock)
            filled_tasks = t + 1
            # the arrays of the old state are donated: nothing may read them after this
            # call
            state, buffer, line, client_ids = play_round(exp, state, past, step)
            changed[list(client_ids)] = True
            if buffer is not None:
                past = (*past, buffer)
                if journal.manager:
                    records.kept.append(checkpoint.save_task(out / KEPT, t, buffer))
            # the first process's clock and signals decide for all
            decide = partial(_after_round, observer, settings.checkpoint_every, next_step, last_write)
            signal, due = hosts.from_first(decide)
            last_step = next_step == steps
            # a first signal waits here: the log and the checkpoint end at the same round
            with signals.unbroken():
                due = signal or due or last_step
                _log_round(out, journal, records)
                if due:
                    reached = Progress(state, records, next_step, shards)
                    changed_in_files = changed if states_in_files else None
                    last_write, shards = _save_checkpoint(session, exp, journal, reached, changed_in_files)
                    # it refers to the state, whose memory the next round overwrites
                    del reached
                    changed[:] = False
            journal.trackers.heard(line)
            bar.update(bar_task, advance=next_step - step, **last_round(records))
            # after the last round there is nothing to resume, and the results are next
            if signal and not last_step:
                hosts.leave()
                raise signals.Stopped(signal)
            # A signal since `decide`: with a checkpoint behind it, the run can end at
            # once. The other processes write none, and end by themselves.
            if due or not hosts.first:
                signals.check()
            observer.heard(line)
            step = next_step
        return fill(exp, range(filled_tasks, tasks), clock), state


def _after_round(
    observer: Observer, every: int | None, step: int, last_write: checkpoint.Write | None
) -> tuple[Any, bool]:
    """Return the signal to stop, if any, and whether a checkpoint is due after `step` rounds."""
    signal = observer.stop() or signals.asked()
    return signal, checkpoint.is_due(every, step, last_write, time.monotonic())


def _has_files(state: State, hosts: Hosts, shared: bool) -> bool:
    """Return whether checkpoints have files for the states of clients.

    They have some where the processes share the run's folder, and where the states are large.
    """
    # clients without a state
    if not jax.tree.leaves(state.clients):
        return False
    is_large = checkpoint.tree_bytes(state.clients) > checkpoint.BESIDE
    return shared or (hosts.count == 1 and is_large)


def _save_shards(
    session: Session, exp: Experiment, progress: Progress, changed: np.ndarray
) -> list[dict[str, Any]]:
    """Write the states of changed clients, and return the files with the states of all.

    All processes call this together; each writes its clients' states.
    """
    hosts = session.hosts
    state, _, step, shards = progress
    chosen = checkpoint.clients_to_write(shards, changed)
    index, clients = process_part(state.clients, chosen)
    folder = session.out / CHECKPOINTS
    shard = hosts.agree(
        lambda: checkpoint.save_shard(folder, step, hosts.index, index, clients, exp.sizes.clients)
    )
    written = [json.loads(text) for text in hosts.gather(json.dumps(shard))]
    return checkpoint.newest_files([*shards, *written])


def _log_round(out: Path, journal: Journal, records: Records) -> None:
    """Append the line of the last round to metrics.jsonl."""
    # only the first process has a manager
    if journal.manager:
        with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json_line(records.rounds[-1]))


def _save_checkpoint(
    session: Session, exp: Experiment, journal: Journal, progress: Progress, changed: np.ndarray | None
) -> tuple[checkpoint.Write | None, Sequence[dict[str, Any]]]:
    """Save a checkpoint; all processes call this together. Afterwards nothing refers to
    the state's memory but `progress`: the next round could not overwrite it otherwise,
    and would take as much again.

    Args:
      session, exp, journal, progress: the run so far.
      changed: mask of the clients whose states changed since the last checkpoint; None: the
        checkpoint itself has the states of clients.

    Returns:
      What the write took, in the first process, and the files of clients' states.
    """
    start = time.monotonic()
    state, records, step, _ = progress
    shards: Sequence[dict[str, Any]] = ()
    if changed is not None:
        shards = _save_shards(session, exp, progress, changed)
        state = state._replace(clients=())
    saved = saved_state(exp, state)
    if not journal.manager:
        return None, shards
    snapshot = checkpoint.Snapshot(step, saved, records.to_json(), journal.origin, shards)
    return checkpoint.save(journal.manager, snapshot, start), shards


def _past(exp: Experiment, state: State, folder: Path, sha256: list[str]) -> tuple[ReplayBuffer, ...]:
    """Read the server's examples of finished tasks, from files with these checksums."""
    if exp.method.server_replay is None:
        return ()
    round_context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, True)
    template = jax.eval_shape(exp.method.server_replay.buffer, round_context, state.server)
    return checkpoint.load_tasks(folder, sha256, template)
