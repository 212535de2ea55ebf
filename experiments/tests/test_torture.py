"""A short run of experiments/torture.py, which says how to make a long one."""

import importlib
import os
import random
import shutil
import signal
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
import small_runs


@pytest.fixture
def torture(monkeypatch):
    monkeypatch.syspath_prepend(str(small_runs.ROOT / "experiments"))
    for name, value in small_runs.program_environment().items():
        monkeypatch.setenv(name, value)
    before = {*sys.modules}
    yield importlib.import_module("torture")
    for name in {name for name in sys.modules if name.startswith("torture")} - before:
        del sys.modules[name]


def results(found, kind):
    return [outcome for outcome in found[kind] if outcome.result != "survived"], len(found[kind])


def tried(torture, folder, monkeypatch, **wanted):
    """What became of so many trials of each kind."""
    for name in ("FCLJAX_DATA", "FCLJAX_COMPILED"):  # which the trials change
        monkeypatch.setenv(name, os.environ.get(name, "off"))
    wanted = {kind.replace("_", " "): number for kind, number in wanted.items()}
    return torture.torture(folder, 1, 60.0, wanted, tuple(torture.RUNS))


def test_bad_inputs_end_in_one_line_and_leave_nothing(torture, tmp_path, monkeypatch):
    found = tried(torture, tmp_path, monkeypatch, bad_inputs=50)
    assert results(found, "bad inputs") == ([], 50)


def test_data_sets_are_read_rightly_or_refused_in_one_line(torture, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    found = tried(torture, tmp_path, monkeypatch, data=40)
    assert results(found, "data") == ([], 40)


def test_user_files_are_read_rightly_or_refused_in_one_line(torture, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    found = tried(torture, tmp_path, monkeypatch, user_files=25)
    assert results(found, "user files") == ([], 25)


# TensorStore's threads may say of a damaged file what the exception has said
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_files_are_named_refused_or_made_again(torture, tmp_path, monkeypatch):
    monkeypatch.setattr(torture.References, "of", lambda self, method: small_runs.finished(method))
    # `compare` draws figures, which other tests do
    monkeypatch.setattr(sys.modules["torture_files"], "FILES", sys.modules["torture_files"].FILES[2:])
    found = tried(torture, tmp_path, monkeypatch, files=40)
    assert results(found, "files") == ([], 40)


@pytest.mark.filterwarnings("ignore")  # Flower's own, where it is installed
def test_hostile_uploads_are_left_out_and_counted(torture, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["torture_uploads"], "METHODS", ("linear",))
    found = tried(torture, tmp_path, monkeypatch, uploads=60)
    assert results(found, "uploads") == ([], 60)


def test_what_is_taken_though_it_should_not_be_is_counted(torture, tmp_path, monkeypatch):
    """The judges, where the checks that they try are switched off."""
    uploads, files = sys.modules["torture_uploads"], sys.modules["torture_files"]
    from fcljax.federated import claims
    from fcljax.runs import checkpoint, compile_cache

    monkeypatch.setattr(uploads, "METHODS", ("linear",))
    uploads.server_of.cache_clear()
    monkeypatch.setattr(
        claims, "WEIGHT", claims.WEIGHT._replace(holds=lambda context, upload: jnp.bool_(True))
    )
    outcomes = [uploads.by_simulation(random.Random(i)).result for i in range(60)]
    assert "different" in outcomes
    uploads.server_of.cache_clear()
    monkeypatch.setattr(checkpoint, "check_tasks", lambda *_: None)
    monkeypatch.setattr(compile_cache.hashlib, "sha256", lambda *_: FixedDigest())
    for kind in (files.kept, files.compiled):
        outcomes = [kind(random.Random(i), tmp_path / f"{kind.__name__}-{i}", None).result for i in range(9)]
        assert "different" in outcomes


class FixedDigest:
    """A checksum that fits everything."""

    def digest(self):
        return bytes(32)


def test_a_trial_that_goes_wrong_is_counted_and_kept(torture, tmp_path, monkeypatch):
    outcomes = iter([torture.Outcome("survived", "a"), torture.Outcome("different", "b")])
    monkeypatch.setitem(torture.TRIALS, "bad inputs", lambda *_: next(outcomes))
    found = tried(torture, tmp_path, monkeypatch, bad_inputs=2)
    assert torture.table(found).splitlines()[-1] == "| bad inputs | 2 | 1 | 1 | 0 |"
    assert (tmp_path / "wrong").read_text() == "bad inputs 1: different: 'b'\n"


class Ended:
    """A process that has ended at once, after it has done `work`."""

    def __init__(self, work):
        work()

    def poll(self, seconds=0.0) -> int | None:
        return 0

    def send_signal(self, number) -> None:
        raise AssertionError("it has ended")

    def ended(self, seconds):
        return 0, ""


class Deaf(Ended):
    """A process that a signal does not end, as one whose SIGINT is ignored."""

    def poll(self, seconds=0.0):
        return None

    def send_signal(self, number):
        pass


def test_a_signal_that_ends_nothing_is_no_kill(torture, tmp_path, monkeypatch):
    kills = sys.modules["torture_kills"]
    monkeypatch.setattr(kills, "_wait", lambda *_: "in a round")

    def write(*arguments):
        out = tmp_path / ("trial" if "trial" in str(arguments) else "linear")
        out.mkdir(exist_ok=True)
        (out / "summary.json").write_text("{}"), (out / "metrics.jsonl").write_text("{}")

    programs = types.SimpleNamespace(start=lambda *arguments, name: Deaf(lambda: write(*arguments)))
    references = kills.References(tmp_path, programs, ("linear",))
    found = kills.kill(random.Random(0), tmp_path / "trial", references, 0)
    assert (found.result, found.times) == ("survived", 0)


def test_a_killed_run_that_ends_otherwise_or_loses_a_checkpoint_is_counted(torture, tmp_path):
    """The judge of kills, with programs that write what a test says."""
    kills = sys.modules["torture_kills"]

    def outcome(name, log, checkpoints):
        folder, steps = tmp_path / name, iter(checkpoints)

        def start(*arguments, name):
            def work():
                out = folder / "trial" if "trial" in str(arguments) else folder / "linear"
                out.mkdir(parents=True, exist_ok=True)
                (out / "summary.json").write_text('{"A_last": 1, "time": 5}')
                (out / "metrics.jsonl").write_text("{}" if out.name == "linear" else log)
                if out.name == "trial":
                    shutil.rmtree(out / "checkpoints", ignore_errors=True)
                    (out / "checkpoints" / str(next(steps, 9))).mkdir(parents=True)

            return Ended(work)

        programs = types.SimpleNamespace(start=start)
        references = kills.References(folder, programs, ("linear",))
        (folder / "trial" / "checkpoints" / "2").mkdir(parents=True)
        return kills.kill(random.Random(0), folder / "trial", references, 0).result

    assert outcome("same", "{}", [3]) == "survived"
    assert outcome("other", "{1}", [3]) == "different"
    assert outcome("lost", "{}", [1]) == "different"


@pytest.mark.long
def test_a_program_is_forked_and_ended_by_signals(torture):
    programs = sys.modules["torture_programs"].Programs()
    try:
        assert programs.start("--version").ended(300) == (0, "")
        code, err = programs.start("run", "linea").ended(300)
        assert code == 2 and err.startswith("fcljax: method: unknown value 'linea'") and err.count("\n") == 1
        process = programs.start("run", "linear", "--help")
        process.send_signal(signal.SIGKILL)
        assert process.ended(300)[0] in (0, -signal.SIGKILL)
    finally:
        programs.close()
    assert programs.parent.returncode == 0


def test_there_are_twenty_kinds_of_bad_inputs_and_each_is_drawn_from_the_seed(torture):
    generators = sys.modules["torture_inputs"].GENERATORS
    draw = lambda: [make(random.Random(i)) for make in generators for i in range(3)]
    assert len({bad.kind for bad in draw()}) >= 20
    assert [bad.arguments for bad in draw()] == [bad.arguments for bad in draw()]


@pytest.mark.long
def test_kills_and_damaged_runs_lose_nothing_and_change_nothing(torture, tmp_path, monkeypatch):
    monkeypatch.setattr(torture, "RUNS", ("linear", "pmae"))
    found = tried(torture, tmp_path, monkeypatch, kills=11, damage=12)
    assert results(found, "kills")[0] == [] and torture.tried(found["kills"]) >= 11
    assert results(found, "damage") == ([], 12)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Flower's own, where it is installed
def test_hostile_uploads_of_every_method_are_left_out_and_counted(torture, tmp_path, monkeypatch):
    found = tried(torture, tmp_path, monkeypatch, uploads=200)
    assert results(found, "uploads") == ([], 200)


@pytest.mark.long
def test_sums_that_no_examples_have_are_left_out(torture, tmp_path, monkeypatch):
    statistics = sys.modules["torture_statistics"]
    found = tried(torture, tmp_path, monkeypatch, statistics=240)
    assert results(found, "statistics") == ([], 240)
    monkeypatch.setattr(statistics, "OPTIONS", {"afcl": {}})
    (report,) = statistics.reports_of("afcl")
    monkeypatch.setattr(
        statistics, "reports_of", lambda name: [report._replace(holds=lambda upload: np.ones(2, bool))]
    )
    outcomes = [statistics.hostile_statistics(random.Random(i)).result for i in range(20)]
    assert "different" in outcomes


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Flower's own
def test_federations_with_a_malicious_node_end_and_name_it(torture, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    federations = sys.modules["torture_federations"]
    monkeypatch.setattr(federations, "METHODS", {"linear": federations.METHODS["linear"]})
    found = tried(torture, tmp_path, monkeypatch, federations=12)
    assert results(found, "federations") == ([], 12)


@pytest.mark.long
def test_runs_in_one_process_hold_nothing_of_each_other(torture, tmp_path, monkeypatch):
    found = tried(torture, tmp_path, monkeypatch, repeats=20)
    assert results(found, "repeats") == ([], 20)
    repeats = sys.modules["torture_repeats"]
    grown = iter(range(0, 400, 10))
    monkeypatch.setattr(repeats, "resident_megabytes", lambda: float(next(grown)))
    monkeypatch.setattr(repeats, "sizes", [(0.0, 999, 999, 10**6)] * 16)
    assert repeats.repeated_run(random.Random(0), tmp_path / "one").result == "survived"
    for _ in range(3):
        last = repeats.repeated_run(random.Random(0), tmp_path / "one").result
    assert last == "different"
