"""experiments/full_size.py: a table at full size in pieces, on a machine that is lent for ten minutes."""

import subprocess
import sys

import pytest
import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

import full_size

# Programs in the place of `fcljax reproduce`: what a command does with the request to stop.
ENDS, FAILS = "exit 0", "exit 2"
OBEYS = "trap 'exit 130' INT; while :; do sleep 0.1; done"
DEAF = "trap '' INT; while :; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("program", "seconds", "code"),
    [(ENDS, 60, 0), (FAILS, 60, 2), (OBEYS, 0.5, full_size.AGAIN), (DEAF, 0.5, full_size.AGAIN)],
)
def test_a_piece_ends_by_itself_on_request_or_by_force(program, seconds, code):
    assert full_size.piece(["sh", "-c", program], seconds, 0.5) == code


def test_the_second_piece_resumes_the_folder_of_the_first(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(full_size, "piece", lambda command, *_: commands.append(command) or full_size.AGAIN)
    out = tmp_path / "runs"
    assert full_size.main(["--out", str(out), "pilora", "table1"]) == full_size.AGAIN
    out.mkdir()
    full_size.main(["--out", str(out)])
    assert commands[0][3:9] == ["reproduce", "pilora", "table1", "--out", str(out), "--scale"]
    assert commands[1][3:9] == ["reproduce", "fppl", "table5", "--resume", str(out), "--scale"]


@pytest.mark.long
def test_pieces_make_a_whole_table_at_tiny_size(tmp_path):
    command = [sys.executable, "experiments/full_size.py", "fppl", "table5", "--row", "fed-cprompt [iid]"]
    command += [
        "--scale",
        "mini",
        "--out",
        str(tmp_path / "runs"),
        "--minutes",
        "2",
    ]  # compiling is a part of each
    for _ in range(20):
        done = subprocess.run(command, check=False)
        if done.returncode != full_size.AGAIN:
            break
    assert done.returncode == 0
    assert (tmp_path / "runs" / "table.md").exists()
