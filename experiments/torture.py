"""Tries to lose a run, to falsify its numbers, and to have the program fail otherwise than with one line.

    python experiments/torture.py --minutes 60 --out runs/torture --seed 0

Makes one small run, then tries in turns, until the time is up or as many as asked for are done:

- kills: a run is ended by SIGKILL, SIGTERM or SIGINT at a random moment, some of them twice and some while a
  checkpoint is being written, and resumed. It must end with the bits of the run that was left alone.
- damage: of the last checkpoint of a copy of the run, something is changed: bits, sizes, whole files and
  folders. The run must go on from the one before it and end with the same bits, or be refused in one line.
- bad inputs: commands with options, files of settings, images, arrays, weights and folders from generators.
  Each must end with exit code 2 and one line, with nothing left behind.

Prints a table: tried, survived, silent differences, and others: tracebacks, other exit codes, time-outs. What
went wrong is kept in the folder `wrong`, one line each. Everything is drawn from the seed, but the moments of
kills are those of the machine's clock. The table so far is in table.md, and Ctrl-C ends with it. Exit code 1
if anything went wrong.
"""

import argparse
import contextlib
import io
import itertools
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

import numpy as np

RUN = shlex.split("--tasks 2 --rounds 4 --clients 2 --epochs 1 --image-size 8 --batch-size 64")
KINDS = ("kills", "damage", "bad inputs")
CLOCK = {"time", "client_images_per_s", "trained_images_per_s", "eval_images_per_s", "traces"}
STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE = 300  # seconds for one command


class Outcome(NamedTuple):
    """What became of one trial: "survived", "different" or "other", and what it was."""

    result: str
    what: str


class Bad(NamedTuple):
    """A bad input: a command, and the files that it needs, by name."""

    kind: str
    arguments: list[str]
    files: dict[str, bytes] = {}


# ---- running the program -----------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen:
    """The program with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "fcljax", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def numbers(out: Path) -> tuple[bytes, dict]:
    """What a run has found: its log, and its summary without times."""
    summary = json.loads((out / "summary.json").read_text())
    kept = {name: value for name, value in summary.items() if name not in CLOCK}
    return (out / "metrics.jsonl").read_bytes(), kept


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and stderr of a program that ends by itself; it is killed if it does not."""
    try:
        err = process.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return -1, "no end: " + process.communicate()[1].decode(errors="replace")
    return process.returncode, err.decode(errors="replace")


def one_line(err: str) -> bool:
    """Does the program end with its one line, and with nothing that looks like a failure of Python?"""
    lines = [line for line in err.splitlines() if line.startswith("fcljax: ")]
    return len(lines) == 1 and "Traceback" not in err


# ---- kills -------------------------------------------------------------------------------------------------


def kill(rng: random.Random, out: Path, reference: Path) -> Outcome:
    """A run that is ended once or twice and resumed."""
    arguments, ends = ["run", "linear", *RUN, "--out", str(out)], []
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
            arguments = ["run", "linear", "--resume", str(out)]
    code, err = ended(start(*arguments))
    if code:
        return Outcome("other", f"{ends}, then resumed: exit code {code}: {err[-600:]}")
    return Outcome("survived" if numbers(out) == numbers(reference) else "different", str(ends))


def _wait(rng: random.Random, process: subprocess.Popen, out: Path) -> str:
    """Wait for a random moment: of the whole run, of a round, or of a checkpoint that is being written."""
    place, end = rng.choice(("at any time", "in a round", "in a checkpoint")), time.monotonic() + PATIENCE
    wanted, log = rng.randrange(8), out / "metrics.jsonl"
    there = {
        "at any time": lambda: False,
        "in a round": lambda: log.exists() and log.read_bytes().count(b"\n") >= wanted,
        "in a checkpoint": lambda: any((out / "checkpoints").glob(f"{wanted + 1}*tmp*")),
    }[place]
    if place == "at any time":
        end = time.monotonic() + rng.uniform(0, 15)
    while process.poll() is None and time.monotonic() < end and not there():
        time.sleep(0.001)
    if place == "in a round":
        time.sleep(rng.uniform(0, 0.1))
    return place


# ---- damaged checkpoints -----------------------------------------------------------------------------------


def damage(rng: random.Random, out: Path, reference: Path) -> Outcome:
    """A copy of the finished run without a summary, whose last checkpoint is damaged."""
    shutil.copytree(reference, out)
    (out / "summary.json").unlink()
    steps = sorted((out / "checkpoints").iterdir(), key=lambda path: int(path.name))
    last = steps[-1]
    name = rng.choice(list(DAMAGES))
    file = rng.choice(sorted(path for path in last.rglob("*") if path.is_file()))
    DAMAGES[name](rng, file, last, steps[0])
    what = f"{name} {file.relative_to(last)}"
    code, err = ended(start("run", "linear", "--resume", str(out)))
    if code == 2 and one_line(err):
        return Outcome("survived", what)
    if code or "Traceback" in err:
        return Outcome("other", f"{what}: exit code {code}: {err[-600:]}")
    return Outcome("survived" if numbers(out) == numbers(reference) else "different", what)


def _flip(rng: random.Random, file: Path, *_: Path) -> None:
    data = bytearray(file.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


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
    "bits of": _flip,
    "more bits of": _flip,
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


# ---- bad inputs --------------------------------------------------------------------------------------------


def called(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process, which saves seconds of imports."""
    from fcljax import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            err.write(f"Traceback: {type(error).__name__}: {error}")
            code = 1
    return code, out.getvalue(), err.getvalue()


def bad_input(rng: random.Random, folder: Path, _: Path) -> Outcome:
    """One of the generated inputs, in an empty folder."""
    bad = rng.choice(GENERATORS)(rng)
    folder.mkdir()
    for name, content in bad.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    before, here = sorted(folder.rglob("*")), Path.cwd()
    os.chdir(folder)
    try:
        code, out, err = called(*bad.arguments)
    finally:
        os.chdir(here)
    what = f"{bad.kind}: {[argument[:120] for argument in bad.arguments]}"
    # the cache of prepared images and its locks may stay: they are no part of a run
    cache = lambda path: path.name == "prepared" or path.name.endswith(".lock")
    left = [path for path in sorted(folder.rglob("*")) if path not in before and not cache(path)]
    if code == 2 and one_line(err) and len(err) < 8000 and not left:
        return Outcome("survived", what)
    if code == 0:
        return Outcome("different", f"{what}: was taken")
    return Outcome("other", f"{what}: exit code {code}: left {left}: {err[-600:]}")


def _word(rng: random.Random) -> str:
    """Text that nobody expects."""
    return rng.choice(
        (
            "",
            " ",
            "-",
            "--",
            "=",
            "nan",
            "inf",
            "-inf",
            "1e999",
            "0x_",
            "1_0",
            "\u0661\u0662",
            "\u00b2",
            "\udcff",
            "[/x]",
            "[bold]",
            "$x$",
            "a\nb",
            "\x1b[31m",
            "None,",
            "true",
            "{}",
            "[]",
            "9" * 400,
            "9" * 5000,
            "-1",
            "0.5.5",
            "~nosuchuser/x",
            "/dev/zero",
            "x" * 100_000,
            "../../../..",
            "*",
            "%s%n",
            "'; --",
            "\u6f22\u5b57",
            "".join(rng.choices(string.printable, k=rng.randrange(1, 60))),
        )
    )


def _number(rng: random.Random) -> str:
    """A number out of every range of whole ones."""
    return rng.choice(
        (str(-rng.randrange(1, 10**9)), str(rng.randrange(2**31, 10**40)), "nan", "1e9", "0.5", "-0.0")
    )


WHOLE = (
    "tasks",
    "clients",
    "rounds",
    "epochs",
    "batch-size",
    "image-size",
    "store-size",
    "eval-batch-size",
    "lanes",
    "devices",
    "checkpoint-every",
    "keep-checkpoints",
    "data-budget",
    "glyph-train",
    "classes-per-client",
    "seed",
    "heads",
)
REAL = ("lr", "alpha", "participation", "holdout", "split-ratio", "weight-decay", "norm-bound", "momentum")
NAMED = (
    "adapter",
    "partition",
    "fidelity",
    "normalise",
    "preprocess",
    "dtype",
    "optimiser",
    "lane-mode",
    "population",
    "positions",
    "stem",
    "aggregator",
    "attack",
)
COMMANDS = ("run", "check", "list", "compare", "data", "convert", "embed", "pretrain", "pretrain-decoder")
RUN_OUT = ["run", "linear", "--out", "new"]


def _npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _images(rng: random.Random) -> dict[str, np.ndarray]:
    image, label = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1])
    return {"x_train": image, "y_train": label, "x_test": image, "y_test": label}


def _wrong_arrays(rng: random.Random) -> bytes:
    """Images and labels of which one array is wrong."""
    arrays = _images(rng)
    name = rng.choice(list(arrays))
    x = arrays[name]
    arrays[name] = rng.choice(
        (
            x[:0],
            x[:3],
            x.astype(float),
            x.astype(float) * np.nan,
            x[..., None, None],
            np.array(5),
            x.astype(str),
            -x.astype(int) - 1,
            x.astype(complex),
        )
    )
    return _npz(**arrays)


def _broken(rng: random.Random, content: bytes) -> bytes:
    """A file cut off, with noise at its beginning, or another one altogether."""
    at = rng.randrange(1, len(content))
    return rng.choice(
        (content[: at // 2], rng.randbytes(64) + content[64:], rng.randbytes(at), b"", b"\x80\x04N.")
    )


def _png(rng: random.Random) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.frombuffer(rng.randbytes(192), np.uint8).reshape(8, 8, 3)).save(stream, "PNG")
    return stream.getvalue()


def _folder(rng: random.Random) -> dict[str, bytes]:
    """A folder of classes in which something is missing or broken."""
    files = {
        f"raw/{split}/{label}/{i}.png": _png(rng)
        for split in ("train", "test")
        for label in "ab"
        for i in (0, 1)
    }
    name = rng.choice(list(files))
    if rng.random() < 0.5:
        files[name] = rng.choice((files[name][:30], rng.randbytes(99), b"", b"GIF89a" + bytes(9)))
    else:
        gone = name.rsplit("/", 1)[0]
        files = {file: content for file, content in files.items() if not file.startswith(gone)}
    return files


def _yaml(rng: random.Random) -> str:
    """A file of settings that is none."""
    depth, name = rng.randrange(21, 5000), rng.choice(WHOLE).replace("-", "_")
    bombs = "a: &a [x]\n" + "".join(f"k{i}: &k{i} [*a, *a, *a]\n" for i in range(rng.randrange(1, 30)))
    scalar = rng.choice(
        (
            "0x_",
            "2001-99-99",
            "!!int foo",
            "!!float x",
            "!!timestamp x",
            "!!binary x",
            "1:99:x",
            "!!python/name:os.system",
            "&a x\nb: *a",
            "|",
            ">-\n  x",
            "%",
            "@",
            "`",
            "[1",
            "{a",
            "'x",
            '"\\xzz"',
            "\t- x",
            "!!set {x}",
            ".nan",
            "-.inf",
            "9" * 4999,
            "true",
        )
    )
    return rng.choice(
        (
            "[" * depth,
            "{a: " * depth,
            "- " * depth,
            bombs,
            f"{name}: {scalar}\n",
            f"lr: {_number(rng)}\n  x: 1",
            f"{_word(rng)!r}: 1\n",
            f"{name}: {_word(rng)!r}\n",
            "lr: 1\n" * 300_000,
            "",
            "a",
            "1",
            "- 1",
            "\x00",
            "? ?",
            f'dataset: "npz:a\\0{name}"\n',
            f"{name}: [1, 2]\n",
            f"{name}: {{a: 1}}\n",
            f"method: {name}\n",
            "1: 2\n",
            f"{name}: -{rng.randrange(1, 99)}\n",
            f"{name}: {rng.random()}1\n",
            "tasks: 2\n---\ntasks: 3\n",
        )
    )


EVIL = ("./evil.py", "evil.py:METHOD", "evil:METHOD", "[linear, ./evil.py]")


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(3, 30))) + "q"


def _with_settings(rng: random.Random) -> Bad:
    return Bad(
        "file of settings", [*RUN_OUT, "--config", "a.yaml"], {"a.yaml": _yaml(rng).encode(errors="replace")}
    )


GENERATORS: tuple[Callable[[random.Random], Bad], ...] = (
    lambda rng: Bad("no command", [f"-{_letters(rng)}" if rng.random() < 0.5 else _letters(rng), "x"]),
    lambda rng: Bad("no method", ["run", _letters(rng)]),
    lambda rng: Bad("no option", [*RUN_OUT, f"--{_letters(rng)}", _word(rng)]),
    lambda rng: Bad("no flag", [rng.choice(COMMANDS[3:]), "x", _letters(rng), f"--{_letters(rng)}"]),
    lambda rng: Bad("no value", [*RUN_OUT, f"--{rng.choice(WHOLE + REAL)}"]),
    lambda rng: Bad("whole number", [*RUN_OUT, f"--{rng.choice(WHOLE)}", _number(rng)]),
    lambda rng: Bad("no whole number", [*RUN_OUT, f"--{rng.choice(WHOLE)}", f"{_letters(rng)}{_word(rng)}"]),
    lambda rng: Bad(
        "number", [*RUN_OUT, f"--{rng.choice(REAL)}", rng.choice(("nan", "inf", "-1", "1e300", "1e999"))]
    ),
    lambda rng: Bad("no number", [*RUN_OUT, f"--{rng.choice(REAL)}", f"{_letters(rng)}{_word(rng)}"]),
    lambda rng: Bad("no name", [*RUN_OUT, f"--{rng.choice(NAMED)}", f"{_letters(rng)}{_word(rng)}"]),
    lambda rng: Bad("data set", [*RUN_OUT, "--dataset", _letters(rng) + _word(rng).replace(":", "")]),
    lambda rng: Bad("path", [*RUN_OUT, "--dataset", rng.choice(("npz:", "folder:")) + "absent" + _word(rng)]),
    lambda rng: Bad("weights", [*RUN_OUT, "--checkpoint", "absent" + _word(rng)]),
    lambda rng: Bad(
        "seeds",
        [
            *RUN_OUT,
            "--seeds",
            rng.choice(
                ("0", "-1", "1,1", "a", "\u00b2", "9" * 5000, "1.5", ",", str(rng.randrange(101, 10**30)))
            ),
        ],
    ),
    lambda rng: Bad("resume", ["run", "linear", "--resume", "absent" + _word(rng)]),
    lambda rng: Bad("out", ["run", "linear", "--out", "/proc/" + _letters(rng)]),
    _with_settings,
    _with_settings,
    _with_settings,
    lambda rng: Bad(
        "no settings", [*RUN_OUT, "--config", "a.yaml"], {"a.yaml": rng.randbytes(rng.randrange(1, 400))}
    ),
    lambda rng: Bad(
        "settings of a run",
        ["run", "linear", "--resume", "r"],
        {"r/config.yaml": _yaml(rng).encode(errors="replace")},
    ),
    lambda rng: Bad("arrays", [*RUN_OUT, "--dataset", "npz:a.npz"], {"a.npz": _wrong_arrays(rng)}),
    lambda rng: Bad(
        "broken arrays", [*RUN_OUT, "--dataset", "npz:a.npz"], {"a.npz": _broken(rng, _npz(**_images(rng)))}
    ),
    lambda rng: Bad(
        "missing arrays",
        [*RUN_OUT, "--dataset", "npz:a.npz"],
        {"a.npz": _npz(**dict(itertools.islice(_images(rng).items(), rng.randrange(4))))},
    ),
    lambda rng: Bad(
        "folder", [*RUN_OUT, "--tasks", "2", "--dataset", "folder:raw", "--data-dir", "raw"], _folder(rng)
    ),
    lambda rng: Bad(
        "broken weights",
        [*RUN_OUT, "--checkpoint", name := f"w{rng.choice(('.npz', '.pth', '.safetensors'))}"],
        {name: _broken(rng, _npz(x=np.ones(99)))},
    ),
    lambda rng: Bad(
        "other weights", [*RUN_OUT, "--checkpoint", "w.npz"], {"w.npz": _npz(x=np.ones(rng.randrange(9)))}
    ),
    lambda rng: Bad(
        "convert",
        ["convert", name := f"w{rng.choice(('', '.npz', '.bin', '.h5'))}"],
        {name: rng.randbytes(rng.randrange(999))},
    ),
    lambda rng: Bad(
        "compare",
        ["compare", "r"],
        {"r/summary.json": rng.choice((b"{", b"[]", b"{}", b"", b"\xff", b"1" * 5000, b"[" * 99_999))},
    ),
    lambda rng: Bad(
        "class list",
        [*RUN_OUT, "--dataset", "imagenet100", "--class-list", "c", "--data-dir", "."],
        {"c": rng.choice((b"", b"a\na\n", rng.randbytes(50) + b"\xff"))},
    ),
    lambda rng: Bad(
        "pretrain",
        [
            "pretrain",
            "--out",
            "w.safetensors",
            "--" + rng.choice(("steps", "classes", "seed", "batch-size")),
            str(-rng.randrange(1, 99)) if rng.random() < 0.5 else "9" * 20,
        ],
    ),
    lambda rng: Bad(
        "a program in YAML",
        ["sweep", "a.yaml", *rng.choice(([], ["--dry-run"]))],
        {"a.yaml": f"method: {rng.choice(EVIL)}\n".encode(), "evil.py": b"open('ran', 'w')\n"},
    ),
    lambda rng: Bad(
        "a key twice",
        [*RUN_OUT, "--config", "a.yaml"],
        {"a.yaml": f"lr: 1\n{_letters(rng)}: 2\nlr: 3".encode()},
    ),
    lambda rng: Bad("nothing", [*RUN_OUT, rng.choice(("--config", "--dataset", "--faults", "--track")), ""]),
    lambda rng: Bad(
        "a large ratio", ["run", "hepco", "--replay-ratio", f"{rng.randrange(1, 9)}e{rng.randrange(3, 38)}"]
    ),
    lambda rng: Bad("not UTF-8", ["run", "linear", "--out", f"r\udcff{_letters(rng)[:9]}"]),
    lambda rng: Bad("both", ["run", "linear", "--resume", "a", "--out", "b", "--config", _letters(rng)]),
    lambda rng: Bad(
        "more than there is",
        [
            *RUN_OUT,
            *rng.choice(
                (
                    ["--tasks", str(rng.randrange(11, 10**6))],
                    ["--clients", str(rng.randrange(10**3, 10**6))],
                    ["--batch-size", str(rng.randrange(10**8, 2**31))],
                    ["--devices", str(rng.randrange(2, 10**6))],
                    ["--image-size", str(8 * rng.randrange(700, 790))],
                    ["--malicious", str(rng.randrange(5, 10**6))],
                )
            ),
        ],
    ),
)


# ---- all of it ---------------------------------------------------------------------------------------------

TRIALS = dict(zip(KINDS, (kill, damage, bad_input), strict=True))


def torture(out: Path, seed: int, minutes: float, wanted: dict[str, int]) -> dict[str, list[Outcome]]:
    """Outcomes by kind of trial, until the time is up or as many as wanted have been tried."""
    end, folder, found = time.monotonic() + 60 * minutes, out / "trial", {kind: [] for kind in KINDS}
    reference = out / "reference"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ["FCLJAX_DATA"] = str(out / "data")
    if (wanted["kills"] or wanted["damage"]) and not (reference / "summary.json").exists():
        shutil.rmtree(reference, ignore_errors=True)
        code, err = ended(start("run", "linear", *RUN, "--out", str(reference)))
        assert not code, err
    for kind in _turns(wanted):
        if time.monotonic() > end:
            break
        rng = random.Random(f"{seed} {kind} {len(found[kind])}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            outcome = TRIALS[kind](rng, folder, reference)
        except KeyboardInterrupt:
            break
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
    for kind, count in zip(KINDS, (200, 200, 5000), strict=True):
        parser.add_argument(f"--{kind.replace(' ', '-')}", type=int, default=count)
    options = parser.parse_args()
    wanted = {kind: getattr(options, kind.replace(" ", "_")) for kind in KINDS}
    options.out.mkdir(parents=True, exist_ok=True)
    found = torture(options.out.absolute(), options.seed, options.minutes, wanted)
    print(table(found))
    return int(any(each.result != "survived" for outcomes in found.values() for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
