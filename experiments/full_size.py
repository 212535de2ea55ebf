"""A paper's table at full size, in pieces: FPPL on CIFAR-100 beside its authors' figures.

    python experiments/full_size.py --out FOLDER                    # again until it says "finished"
    python experiments/full_size.py --out FOLDER pilora table1      # another paper and table
    python experiments/full_size.py --out FOLDER --scale mini       # tiny, on any machine: does it work?

A piece takes --minutes, 9 by default, since a lent machine is often given for ten. It then asks
`fcljax reproduce` to stop, which ends the round, writes a checkpoint and exits; the next piece resumes there,
bit for bit. FOLDER is all that has to be kept between pieces. A piece that is killed costs the rounds since
the last checkpoint. Data sets and checkpoints are those of the paper's file in fcljax/assets/papers: put them
where `fcljax data list` and docs/checkpoints.md say.

Exit codes: 0 when the table is finished, 75 when another piece is needed, else that of `fcljax reproduce`.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

AGAIN = 75  # EX_TEMPFAIL: try again later
# exit codes of a command that ended on request: by itself, or before it had a handler
STOPPED = (128 + signal.SIGINT, -signal.SIGINT)


def main(arguments: list[str]) -> int:
    """Make one piece."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="*", default=["fppl", "table5"], help="SYSTEM TABLE")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; resumed if it is there")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece")
    parser.add_argument("--grace", type=float, default=45.0, help="seconds to end a round and write")
    parser.add_argument("--scale", choices=("paper", "mini"), default="paper")
    parser.add_argument("--seeds", type=int, default=1)
    given, further = parser.parse_known_args(arguments)
    where = ["--resume" if given.out.exists() else "--out", str(given.out)]
    command = [sys.executable, "-m", "fcljax", "reproduce", *given.table, *where]
    command += ["--scale", given.scale, "--seeds", str(given.seeds), *further]
    code = piece(command, 60 * given.minutes, given.grace)
    print(
        {0: "finished", AGAIN: f"stopped after {given.minutes:g} minutes: run it again"}.get(code, "failed")
    )
    return code


def piece(command: list[str], seconds: float, grace: float) -> int:
    """Run a command for some seconds, ask it to stop, and kill it where it does not."""
    process = subprocess.Popen(command)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return AGAIN if process.wait(grace) in STOPPED else process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
