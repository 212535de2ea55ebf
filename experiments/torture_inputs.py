"""Bad inputs for experiments/torture.py: commands with options, files of settings, images, arrays, weights
and folders, from generators. Each must end with exit code 2 and one line, with nothing left behind."""

import io
import itertools
import os
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torture_common import Outcome, called, one_line


class Bad(NamedTuple):
    """A bad input: a command, and the files that it needs, by name."""

    kind: str
    arguments: list[str]
    files: dict[str, bytes] = {}


def bad_input(rng: random.Random, folder: Path, *_: object) -> Outcome:
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
