"""Tries to lose a run, to falsify its numbers, and to have the program fail otherwise than with one line.

    python experiments/torture.py --minutes 60 --out runs/torture --seed 0

Makes small runs, then tries in turns, until the time is up or as many as asked for are done:

- kills: a run of one of several methods, most of which have server files or client state, is ended by
  SIGKILL, SIGTERM or SIGINT at a random moment, some of them twice and some while a checkpoint is being
  written, and resumed. It must end with the bits of the run that was left alone.
- damage: in a copy of such a run without its results, something of the last checkpoint or of what the server
  keeps is changed: bits, sizes, whole files and folders. The run must go on from the checkpoint before it and
  end with the same bits, or be refused in one line.
- files: files of every kind that is read back are damaged (torture_files.py).
- bad inputs: commands with options, files of settings, images, arrays, weights and folders from generators
  (torture_inputs.py). Each must end with exit code 2 and one line, with nothing left behind.
- uploads: what clients send is malicious, in the simulation and, if Flower is installed, as its messages
  (torture_uploads.py).

Prints a table: tried, survived, silent differences, and others: tracebacks, other exit codes, time-outs. What
went wrong is kept in the folder `wrong`, one line each. Everything is drawn from the seed, but the moments of
kills are those of the machine's clock. The table so far is in table.md, and Ctrl-C ends with it. Exit code 1
if anything went wrong.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import torture_files
from torture_common import DECODER, PATIENCE, Outcome, ended, one_line, start
from torture_files import damaged_file
from torture_inputs import bad_input
from torture_uploads import hostile_upload

COMMON = (
    "--tasks 2 --rounds 2 --clients 2 --epochs 1 --batch-size 32 --dataset glyphs "
    "--glyph-train 8 --glyph-test 2"
)
RUNS = {
    "linear": "--image-size 8",
    # files of the server's
    "pmae": "--image-size 16 --vpt-length 1 --vpt-blocks 1 --tune-epochs 1 --tune-batch 16 --decoder "
    + shlex.quote(str(DECODER)),
    "glfc": "--image-size 16 --match-steps 2 --prototype-steps 1 --monitor-images 2",  # proxy, exemplars
    "pilora": "--image-size 8 --lora-blocks 1 --lora-rank 1",  # prototypes
    "vfcl": "--image-size 16",  # clients' heads and exemplars
    "fedweit": "--image-size 16",  # clients' masks, a knowledge base
}
CLOCK = {"time", "client_images_per_s", "trained_images_per_s", "eval_images_per_s", "traces"}
STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class References(NamedTuple):
    """Runs that were left alone, each made when it is first needed."""

    folder: Path
    methods: tuple[str, ...] = tuple(RUNS)
    """Those of which runs are killed and damaged."""

    def of(self, method: str) -> Path:
        """The run of a method."""
        out = self.folder / method
        if not (out / "summary.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            code, err = ended(start(*command(method), "--out", str(out)))
            assert not code, err
        return out


def command(method: str) -> list[str]:
    """The command that makes the run of a method."""
    return ["run", method, *shlex.split(COMMON), *shlex.split(RUNS[method])]


def numbers(out: Path) -> tuple[bytes, dict]:
    """What a run has found: its log, and its summary without times."""
    summary = json.loads((out / "summary.json").read_text())
    kept = {name: value for name, value in summary.items() if name not in CLOCK}
    return (out / "metrics.jsonl").read_bytes(), kept


# ---- kills -------------------------------------------------------------------------------------------------


def kill(rng: random.Random, out: Path, references: References) -> Outcome:
    """A run that is ended once or twice and resumed."""
    method = rng.choice(references.methods)
    reference = references.of(method)
    arguments, ends = [*command(method), "--out", str(out)], [method]
    for _ in range(rng.choice((1, 1, 2))):
        process, number = start(*arguments), rng.choice(STOPS)
        where = _wait(rng, process, out)
        if process.poll() is None:
            process.send_signal(number)
        code, err = ended(process)
        ends.append(f"{number.name} {where}")
        if code not in (0, -number, 128 + number) or "Traceback" in err:
            return Outcome("other", f"{ends}: exit code {code}: {err[-600:]}")
        if (out / "config.yaml").exists():
            arguments = ["run", method, "--resume", str(out)]
    code, err = ended(start(*arguments))
    if code:
        return Outcome("other", f"{ends}, then resumed: exit code {code}: {err[-600:]}")
    return Outcome("survived" if numbers(out) == numbers(reference) else "different", str(ends))


def _wait(rng: random.Random, process: subprocess.Popen, out: Path) -> str:
    """Wait for a random moment: of the whole run, of a round, or of a checkpoint that is being written."""
    place, end = rng.choice(("at any time", "in a round", "in a checkpoint")), time.monotonic() + PATIENCE
    wanted, log = rng.randrange(4), out / "metrics.jsonl"
    there = {
        "at any time": lambda: False,
        "in a round": lambda: log.exists() and log.read_bytes().count(b"\n") >= wanted,
        "in a checkpoint": lambda: any((out / "checkpoints").glob(f"{wanted + 1}*tmp*")),
    }[place]
    if place == "at any time":
        end = time.monotonic() + rng.uniform(0, 30)
    while process.poll() is None and time.monotonic() < end and not there():
        time.sleep(0.001)
    if place == "in a round":
        time.sleep(rng.uniform(0, 0.1))
    return place


# ---- damaged checkpoints -----------------------------------------------------------------------------------


def damage(rng: random.Random, out: Path, references: References) -> Outcome:
    """A copy of a finished run without a summary, whose last checkpoint, or what its server keeps, is
    damaged."""
    method = rng.choice(references.methods)
    reference = references.of(method)
    shutil.copytree(reference, out)
    (out / "summary.json").unlink()
    if (out / "kept").exists() and rng.random() < 0.5:
        what = f"{method}: {torture_files.damaged(rng, rng.choice(sorted((out / 'kept').iterdir())))[0]}"
        return _resumed(method, what, out, reference)
    steps = sorted((out / "checkpoints").iterdir(), key=lambda path: int(path.name))
    last = steps[-1]
    name = rng.choice(list(DAMAGES))
    file = rng.choice(sorted(path for path in last.rglob("*") if path.is_file()))
    DAMAGES[name](rng, file, last, steps[0])
    return _resumed(method, f"{method}: {name} {file.relative_to(last)}", out, reference)


def _resumed(method: str, what: str, out: Path, reference: Path) -> Outcome:
    """Whether a damaged run is refused, or ends as the one that was left alone."""
    code, err = ended(start("run", method, "--resume", str(out)))
    if code == 2 and one_line(err):
        return Outcome("survived", what)
    if code or "Traceback" in err:
        return Outcome("other", f"{what}: exit code {code}: {err[-600:]}")
    return Outcome("survived" if numbers(out) == numbers(reference) else "different", what)


def _digit(rng: random.Random, file: Path, last: Path, before: Path) -> None:
    """Another digit in the records."""
    records = last / "records" / "metadata"
    data = bytearray(records.read_bytes())
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    data[rng.choice(places)] = ord(rng.choice(string.digits))
    records.write_bytes(data)


def _mixed(rng: random.Random, file: Path, last: Path, before: Path) -> None:
    part = rng.choice(("state", "records"))
    shutil.rmtree(last / part)
    shutil.copytree(before / part, last / part)


def _older(rng: random.Random, file: Path, last: Path, before: Path) -> None:
    shutil.rmtree(last)
    shutil.copytree(before, last)


def _cut_file(rng: random.Random, file: Path, *_: Path) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


DAMAGES: dict[str, Callable] = {
    "bits of": lambda rng, file, *_: torture_files.flip(rng, file),
    "more bits of": lambda rng, file, *_: torture_files.flip(rng, file),
    "the end of": _cut_file,
    "no": lambda rng, file, *_: file.unlink(),
    "zeros for": lambda rng, file, *_: file.write_bytes(bytes(file.stat().st_size)),
    "noise for": lambda rng, file, *_: file.write_bytes(rng.randbytes(file.stat().st_size)),
    "digits, not": _digit,
    "parts of the one before, not": _mixed,
    "all of the one before, not": _older,
    "a strange folder beside": lambda rng, file, last, before: (last.parent / str(rng.randrange(999))).mkdir(
        exist_ok=True
    ),
}


# ---- all of it ---------------------------------------------------------------------------------------------

TRIALS: dict[str, Callable] = {
    "kills": kill,
    "damage": damage,
    "files": lambda rng, folder, references: damaged_file(rng, folder, references.of("linear")),
    "bad inputs": bad_input,
    "uploads": hostile_upload,
}
USUAL = dict(zip(TRIALS, (300, 100, 300, 3000, 300), strict=True))


def torture(
    out: Path, seed: int, minutes: float, wanted: dict[str, int], methods: tuple[str, ...] = tuple(RUNS)
) -> dict[str, list[Outcome]]:
    """Outcomes by kind of trial, until the time is up or as many as wanted have been tried."""
    end, folder, found = time.monotonic() + 60 * minutes, out / "trial", {kind: [] for kind in wanted}
    references = References(out / "reference", methods)
    os.environ.setdefault("FCLJAX_COMPILED", str(out / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.0")
    os.environ["FCLJAX_DATA"] = str(out / "data")
    for kind in _turns(wanted):
        if time.monotonic() > end:
            break
        rng = random.Random(f"{seed} {kind} {len(found[kind])}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            outcome = TRIALS[kind](rng, folder, references)
        except KeyboardInterrupt:
            break
        except Exception as error:  # a run that should have been left alone failed
            outcome = Outcome("other", f"{type(error).__name__}: {error}")
        found[kind].append(outcome)
        if outcome.result != "survived":
            with (out / "wrong").open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{kind} {len(found[kind]) - 1}: {outcome.result}: {outcome.what!r}\n")
        write_table(out / "table.md", found)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def write_table(path: Path, found: dict[str, list[Outcome]]) -> None:
    """The table so far, for a run that is cut off."""
    part = path.with_suffix(".part")
    part.write_text(table(found) + "\n")
    part.replace(path)


def _turns(wanted: dict[str, int]) -> Iterator[str]:
    """Kinds of trials, mixed so that all of them end at about the same time."""
    places = [((i + 0.5) / count, kind) for kind, count in wanted.items() for i in range(count)]
    return (kind for _, kind in sorted(places))


def table(found: dict[str, list[Outcome]]) -> str:
    """What was tried and what became of it, in Markdown."""
    lines = ["| | tried | survived | silent differences | tracebacks and others |", "|---|---|---|---|---|"]
    for kind, outcomes in found.items():
        count = lambda result, outcomes=outcomes: sum(each.result == result for each in outcomes)
        lines.append(
            f"| {kind} | {len(outcomes)} | {count('survived')} | {count('different')} | {count('other')} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Parse the options, try, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("runs/torture"))
    parser.add_argument("--seed", type=int, default=0)
    for kind, count in USUAL.items():
        parser.add_argument(f"--{kind.replace(' ', '-')}", type=int, default=count)
    parser.add_argument("--methods", nargs="+", default=list(RUNS), choices=RUNS, help="to kill and damage")
    options = parser.parse_args()
    wanted = {kind: getattr(options, kind.replace(" ", "_")) for kind in USUAL}
    options.out.mkdir(parents=True, exist_ok=True)
    found = torture(options.out.absolute(), options.seed, options.minutes, wanted, tuple(options.methods))
    print(table(found))
    return int(any(each.result != "survived" for outcomes in found.values() for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
