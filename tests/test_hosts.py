"""Several processes play one run: they give the bits of one process, end together, and refuse in one line."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
import small_runs
from small_runs import assert_same_run

from fcljax import cli
from fcljax.errors import InputError
from fcljax.runs import hosts
from fcljax.runs.hosts import HostOptions, Hosts

TINY = shlex.split("--tasks 2 --rounds 1 --epochs 1 --clients 2 --image-size 8 --batch-size 64 --lanes 2")
# long enough to be killed in the middle
LONGER = shlex.split("--tasks 2 --rounds 20 --epochs 1 --clients 2 --image-size 8 --batch-size 64 --lanes 2")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(scratch, *processes, count=2, devices=1, method="linear"):
    """A process of `fcljax run` for each list of options, with so many devices each."""
    address = f"127.0.0.1:{free_port()}"
    os.makedirs(os.environ["JAX_COMPILATION_CACHE_DIR"], exist_ok=True)
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    return [
        subprocess.Popen(
            [sys.executable, "-m", "fcljax", "run", method, *options, "--coordinator", address]
            + ["--processes", str(count), "--process", str(i)],
            env=small_runs.environment(scratch / str(i)) | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, options in enumerate(processes)
    ]


def ends(processes, timeout=300):
    """(exit code, output, our lines on stderr) of each."""
    said = [process.communicate(timeout=timeout) for process in processes]
    ours = [[line for line in err.splitlines() if line.startswith("fcljax: ")] for _, err in said]
    codes = (process.returncode for process in processes)
    return [(code, out, lines) for code, (out, _), lines in zip(codes, said, ours, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "sharing", "method"),
    [(1, 1, "linear"), (4, 1, "linear"), (4, 2, "linear"), (2, 1, "ewc"), (1, 2, "ewc")],
)
def test_two_processes_give_the_bits_of_one_and_the_first_alone_writes_and_prints(
    devices, sharing, method, tmp_path
):
    """One to four devices each against all of them in one process, also where two share a batch, and where
    the states of clients lie in both. The second is given another folder, where nothing appears."""
    out, elsewhere = str(tmp_path / "both"), str(tmp_path / "elsewhere")
    lanes, clients = str(2 * devices // sharing), str(2 * devices)
    same = [*TINY, "--lanes", lanes, "--clients", clients, "--batch-devices", str(sharing)]
    one = ["--devices", str(2 * devices), "--out", str(tmp_path / "one")]
    assert cli.main(["run", method, *same, *one]) == 0
    ways = ([*same, "--out", each] for each in (out, elsewhere))
    first, second = ends(start(tmp_path, *ways, devices=devices, method=method))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert out in first[1] and method in first[1]
    assert second[1:] == ("", []) and not os.path.exists(elsewhere)
    assert_same_run(tmp_path / "both", tmp_path / "one")
    written = {path.name for path in (tmp_path / "both").glob("clients/2/*")}
    assert written == ({"process-0.npz", "process-1.npz"} if method == "ewc" else set())
    assert json.loads((tmp_path / "both" / "summary.json").read_text())["traces"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--coordinator here --processes 2 --process 0", "coordinator: 'here' is not HOST:PORT; nearest: "),
        ("--coordinator here:0 --processes 2 --process 0", "coordinator: 'here:0' is not HOST:PORT"),
        ("--coordinator here:70000 --processes 2 --process 0", "coordinator: 'here:70000' is not HOST:PORT"),
        ("--coordinator here:1 --processes 2", "process: none given; a coordinator needs --processes N and"),
        ("--coordinator here:1 --process 1", "processes: none given; a coordinator needs"),
        ("--processes 2", "processes: it needs a coordinator"),
        ("--process 0", "process: it needs a coordinator"),
        ("--host-timeout 60", "host_timeout: it needs a coordinator"),
        ("--coordinator here:1 --processes 2 --process 2", "process: 2, but 2 processes have the numbers"),
        ("--coordinator here:1 --processes 0 --process 0", "processes: 0"),
        ("--coordinator auto --processes 2", "processes: coordinator 'auto' finds it"),
        ("--coordinator here:1 --processes 2 --process 0 --host-timeout 1", "host_timeout: 1"),
        (
            "--coordinator here:1 --processes 2 --process 0 --seeds 2",
            "seeds: a run with a coordinator",
        ),
    ],
)
def test_wrong_options_are_one_line(options, words, tmp_path, capsys):
    assert cli.main(["run", "linear", *shlex.split(options), "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fcljax: {words}")
    assert not list(tmp_path.iterdir())


def test_check_is_one_process(capsys):
    assert cli.main(["check", "linear", "--processes", "2"]) == 2
    assert capsys.readouterr().err.startswith(
        "fcljax: processes: check runs in one process; leave out --processes"
    )


def test_what_differs_between_processes_is_named(monkeypatch):
    """As process 0 of two sees it: what the others say stands beside its own."""
    ours = {"settings": {"lr": 0.1, "seed": 1}, "digests": {"images": "a" * 64}}

    def check(**theirs):
        other = {kind: own | theirs.get(kind, {}) for kind, own in ours.items()}
        monkeypatch.setattr(Hosts, "gather", lambda self, text: [text, json.dumps(other)])
        Hosts().check_same(ours)

    check()
    with pytest.raises(
        InputError, match=r"^lr: process 1 has 0.2, process 0 has 0.1; they must be the same$"
    ):
        check(settings={"lr": 0.2})
    with pytest.raises(InputError, match="^images: process 1 has 'bbb.*, process 0 has 'aaa"):
        check(digests={"images": "b" * 64})


@pytest.mark.parametrize("options", [HostOptions(), HostOptions("auto"), HostOptions("[::1]:99", 2, 1)])
def test_options_that_say_who_plays_pass(options):
    hosts.check_hosts(options)


# ---- the long ones -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (["--lr", "0.5"], "lr: process 1 has 0.5, process 0 has "),
        (["--dataset", "npz:/nowhere.npz"], "dataset: "),
        (
            ["--devices", "3"],
            "devices: 3 requested, but the 2 processes have 2 together; nearest valid value: 2",
        ),
    ],
)
def test_processes_that_are_not_given_the_same_are_refused_everywhere_in_one_line(second, words, tmp_path):
    out = ["--out", str(tmp_path / "run")]
    for code, _, lines in ends(start(tmp_path, [*TINY, *out], [*TINY, *second, *out])):
        assert code == 2 and len(lines) == 1
        assert lines[0].startswith(f"fcljax: {words}")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("missing", [0, 1])
def test_processes_that_do_not_come_are_one_line_in_bounded_time(missing, tmp_path):
    out = ["--out", str(tmp_path / "run"), "--host-timeout", "5"]
    both = start(tmp_path, [*TINY, *out], [*TINY, *out])
    both[missing].kill()
    both[missing].communicate()
    ((code, _, lines),) = ends([both[1 - missing]])
    assert (code, len(lines)) == (2, 1) and "has not met" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize(("victim", "method"), [(0, "ewc"), (1, "ewc"), (1, "linear")])
def test_where_a_process_is_killed_the_other_ends_in_one_line_and_the_run_goes_on(
    victim, method, tmp_path, capsys
):
    """Whether one process with as many devices goes on with the run or two do, it equals the run of one
    process that nobody killed. Under EWC both have written states of clients."""
    out = tmp_path / "run"
    both = start(tmp_path, *[[*LONGER, "--out", str(out)]] * 2, method=method)
    log, end = out / "metrics.jsonl", time.monotonic() + 300
    while small_runs.logged(log) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    both[victim].kill()
    results = ends(both)
    assert results[victim][0] == -signal.SIGKILL
    code, _, lines = results[1 - victim]
    assert code == hosts.LOST
    assert lines == [
        f"fcljax: another process of the run has ended; resume with: fcljax run {method} --resume {out}"
    ]
    assert not (out / "summary.json").exists() and (out / "checkpoints").is_dir()
    if victim == 0:
        assert cli.main(["run", method, "--resume", str(out)]) == 0
    else:
        again = start(tmp_path, *[["--resume", str(out)]] * 2, method=method)
        assert [code for code, *_ in ends(again)] == [0, 0]
    assert cli.main(["run", method, *LONGER, "--devices", "2", "--out", str(tmp_path / "one")]) == 0
    assert_same_run(out, tmp_path / "one")
