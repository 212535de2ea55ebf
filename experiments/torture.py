"""Tries to lose a run, to falsify its numbers, and to have the program fail otherwise than with one line.

    python experiments/torture.py --minutes 60 --out runs/torture --seed 0

Makes small runs, then tries in turns, until the time is up or as many as asked for are done:

- kills: a run of one of seventeen methods, most of which have server files or client state, is ended by
  SIGKILL, SIGTERM or SIGINT while it starts, trains, writes a checkpoint or draws its figures, and resumed,
  up to thirty times. No checkpoint may be lost, and it must end with the bits of the run that was left alone
  (torture_kills.py).
- damage: in a copy of such a run without its results, something of the last checkpoint or of what the server
  keeps is changed: bits, sizes, whole files and folders. The run must go on from the checkpoint before it and
  end with the same bits, or be refused in one line.
- files: files of every kind that is read back are damaged (torture_files.py).
- bad inputs: commands with options, files of settings, images, arrays, weights and folders from generators
  (torture_inputs.py). Each must end with exit code 2 and one line, with nothing left behind.
- data: tables of the hub, folders, lists and .npz files as people have them (torture_data.py). What is right
  must be read with the right classes, what is wrong must end as a bad input does.
- objects: arguments of `simulate`, `fedavg`, `fcljax.run`, `Model.predict` and `read_clients`
  (torture_objects.py), right or wrong.
- user files: partitions, class orders, tables, folders and lists with one oddity, and run folders of other
  programs (torture_user_files.py), right or wrong.
- uploads: what clients send is malicious, in the simulation and, if Flower is installed, as its messages
  (torture_uploads.py).
- statistics: sums over examples that no examples have (torture_statistics.py).
- federations: whole runs of Flower's server with a malicious node, where Flower is installed
  (torture_federations.py).
- repeats: `fcljax.run`, again and again in one process, whose memory, files and threads may not grow
  (torture_repeats.py).

Prints a table: tried, survived, silent differences, and others: tracebacks, other exit codes, time-outs. The
file `tried` has a line for each trial, and `wrong` one for each that went wrong. Everything is drawn from the
seed, but the moments of kills are those of the machine's clock. The table so far is in table.md, and Ctrl-C
ends with it. Exit code 1 if anything went wrong.
"""

import argparse
import os
import random
import shutil
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torture_files
from torture_common import PATIENCE, Outcome, one_line
from torture_federations import hostile_federation
from torture_files import damaged_file
from torture_inputs import bad_input, data_input
from torture_kills import RUNS, References, kill, numbers, references
from torture_objects import object_input
from torture_repeats import repeated_run
from torture_statistics import hostile_statistics
from torture_uploads import hostile_upload
from torture_user_files import user_file

# ---- damaged checkpoints -----------------------------------------------------------------------------------


def damage(rng: random.Random, out: Path, references: References, number: int) -> Outcome:
    """A copy of a finished run without a summary, whose last checkpoint, or what its server keeps, is
    damaged."""
    method = references.methods[number % len(references.methods)]
    reference = references.of(method)
    shutil.copytree(reference, out)
    (out / "summary.json").unlink()
    if (out / "kept").exists() and rng.random() < 0.5:
        what = f"{method}: {torture_files.damaged(rng, rng.choice(sorted((out / 'kept').iterdir())))[0]}"
        return _resumed(references, method, what, out)
    steps = sorted((out / "checkpoints").iterdir(), key=lambda path: int(path.name))
    last = steps[-1]
    name = rng.choice(list(DAMAGES))
    file = rng.choice(sorted(path for path in last.rglob("*") if path.is_file()))
    DAMAGES[name](rng, file, last, steps[0])
    return _resumed(references, method, f"{method}: {name} {file.relative_to(last)}", out)


def _resumed(references: References, method: str, what: str, out: Path) -> Outcome:
    """Whether a damaged run is refused, or ends as the one that was left alone."""
    code, err = references.start(method, out).ended(PATIENCE)
    if code == 2 and one_line(err):
        return Outcome("survived", what)
    if code or "Traceback" in err:
        return Outcome("other", f"{what}: exit code {code}: {err[-600:]}")
    same = numbers(out) == numbers(references.of(method))
    return Outcome("survived" if same else "different", what)


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

TRIALS: dict[str, Callable[[random.Random, Path, References, int], Outcome]] = {
    "kills": kill,
    "damage": damage,
    "files": lambda rng, folder, references, _: damaged_file(rng, folder, references.of("linear")),
    "bad inputs": bad_input,
    "data": data_input,
    "objects": object_input,
    "user files": user_file,
    "uploads": hostile_upload,
    "statistics": hostile_statistics,
    "federations": hostile_federation,
    "repeats": repeated_run,
}
USUAL = dict(zip(TRIALS, (300, 100, 300, 3000, 1000, 1000, 1000, 300, 1000, 60, 50), strict=True))


def torture(
    out: Path, seed: int, minutes: float, wanted: dict[str, int], methods: tuple[str, ...] = tuple(RUNS)
) -> dict[str, list[Outcome]]:
    """Outcomes by kind of trial, until the time is up or as many as wanted have been tried."""
    end = time.monotonic() + 60 * minutes
    found = {kind: [] for kind in wanted}
    os.environ.setdefault("FCLJAX_COMPILED", str(out / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.0")
    os.environ["FCLJAX_DATA"] = str(out / "data")
    with references(out / "reference", methods) as left_alone:
        while (kind := _next(wanted, found)) and time.monotonic() < end:
            try:
                outcome = _tried(kind, seed, len(found[kind]), out / "trial", left_alone)
            except KeyboardInterrupt:
                break
            found[kind].append(outcome)
            with (out / "tried").open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{kind} {len(found[kind]) - 1}: {outcome.times}: {outcome.what!r}\n")
            if outcome.result != "survived":
                with (out / "wrong").open("a", encoding="utf-8", errors="replace") as file:
                    file.write(f"{kind} {len(found[kind]) - 1}: {outcome.result}: {outcome.what!r}\n")
            write_table(out / "table.md", found)
    shutil.rmtree(out / "trial", ignore_errors=True)
    return found


def _next(wanted: dict[str, int], found: dict[str, list[Outcome]]) -> str | None:
    """The kind of which the smallest share has been tried, so that all end at about the same time."""
    share = {kind: tried(found[kind]) / number for kind, number in wanted.items() if number}
    return min((kind for kind in share if share[kind] < 1), key=share.__getitem__, default=None)


def _tried(kind: str, seed: int, number: int, folder: Path, left_alone: References) -> Outcome:
    """What became of a trial, in a folder that is not there."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return TRIALS[kind](random.Random(f"{seed} {kind} {number}"), folder, left_alone, number)
    except Exception as error:  # a run that should have been left alone failed
        return Outcome("other", f"{type(error).__name__}: {error}")


def tried(outcomes: list[Outcome]) -> int:
    """How many times something was tried."""
    return sum(each.times for each in outcomes)


def write_table(path: Path, found: dict[str, list[Outcome]]) -> None:
    """The table so far, for a run that is cut off."""
    part = path.with_suffix(".part")
    part.write_text(table(found) + "\n")
    part.replace(path)


def table(found: dict[str, list[Outcome]]) -> str:
    """What was tried and what became of it, in Markdown."""
    lines = ["| | tried | survived | silent differences | tracebacks and others |", "|---|---|---|---|---|"]
    for kind, outcomes in found.items():
        count = lambda result, outcomes=outcomes: tried([each for each in outcomes if each.result == result])
        lines.append(
            f"| {kind} | {tried(outcomes)} | {count('survived')} | {count('different')} | {count('other')} |"
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
