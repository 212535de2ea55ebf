"""Bad inputs for experiments/torture.py: commands with options, files of settings, images, arrays, weights
and folders, from generators. Each must end with exit code 2 and one line, with nothing left behind."""

import io
import itertools
import json
import os
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torture_data
import torture_weights
from torture_common import Bad, Outcome, called, one_line


def bad_input(rng: random.Random, folder: Path, *_: object) -> Outcome:
    """One of the generated inputs, in an empty folder."""
    return _tried(rng.choice(GENERATORS)(rng), folder)


def data_input(rng: random.Random, folder: Path, *_rest: object) -> Outcome:
    """One of the generated data sets, right or wrong, in an empty folder."""
    data = rng.choice(torture_data.GENERATORS)(rng)
    arguments = ["data", "prepare", data.name, "--data-dir", "cache"]
    if data.truth is None:
        return _tried(Bad(data.kind, arguments, data.files), folder)
    code, out, err, _ = _called(arguments, data.files, folder)
    if code == 2 and one_line(err) and "need" in err and "every class" in err:
        # a random fifth may lack a class
        return Outcome("survived", f"{data.kind}: refused")
    if code:
        return Outcome("other", f"{data.kind}: exit code {code}, and it should be read: {err[-600:]}")
    wrong = torture_data.misread(data, folder, out + err)
    return Outcome("different" if wrong else "survived", f"{data.kind}: {wrong or 'read'}")


def _called(arguments: list[str], files: dict[str, bytes], folder: Path) -> tuple[int, str, str, list[Path]]:
    """A command in a folder with these files: exit code, stdout, stderr, and what is there that was not."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    before = sorted(folder.rglob("*"))
    here = Path.cwd()
    os.chdir(folder)
    try:
        code, out, err = called(*arguments)
    finally:
        os.chdir(here)
    return code, out, err, [path for path in sorted(folder.rglob("*")) if path not in before]


def _tried(bad: Bad, folder: Path) -> Outcome:
    """What became of an input that must be refused."""
    code, _, err, left = _called(bad.arguments, bad.files, folder)
    what = f"{bad.kind}: {[argument[:120] for argument in bad.arguments]}"
    if code == 2 and one_line(err) and len(err) < 8000 and not left:
        return Outcome("survived", what)
    if code == 0 and bad.may_pass and "Traceback" not in err:
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


def _npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _images(rng: random.Random) -> dict[str, np.ndarray]:
    image = np.zeros((4, 8, 8, 3), np.uint8)
    label = np.array([0, 1, 0, 1])
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
    depth = rng.randrange(21, 5000)
    name = rng.choice(WHOLE).replace("-", "_")
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


def whole_summary() -> dict[str, Any]:
    """A summary.json of two tasks, with all that tables and pages show."""
    size = {"scalars": 3, "bytes": 12}
    traffic = {"upload_bytes": 20, "download_bytes": 30}
    reliability = {"ece": 0.1, "examples": [1, 3], "confidence": [0.2, 0.8], "accuracy": [None, 0.75]}
    return {
        **{"method": "linear", "dataset": "digits", "backbone": "vit_micro", "fidelity": "intended"},
        **{"seed": 1, "A": [0.9, 0.8], "A_avg": 0.85, "A_last": 0.8, "backward_transfer": -0.1},
        **{"accuracy": [[0.9, None], [0.7, 0.9]], "task_il": {"A_last": 0.9}, "trainable_params": 650},
        "forgetting": {"paper": 0.2, "released": 0.1, "diagonal": 0.2},
        "communication": {**traffic, "upload_scalars": 5, "download_scalars": 7},
        **{"communication_total": traffic, "communication_extra": {"task_start": traffic}},
        **{"extra_storage": size, "client_state": size, "server_state": size, "traces": 1},
        "time": {"compile_s": 1.0, "client_s": 2.0, "server_s": 0.1, "eval_s": 0.5},
        **{"client_images_per_s": 9.5, "trained_images_per_s": 9.5, "slot_efficiency": 0.9},
        **{"rejected_uploads": 1, "refused_results": 0, "rounds_without_upload": [[1, 2]]},
        **{"class_names": ["cat", "dog"], "task_classes": [[0], [1]], "holdings": [[5, 0], [0, 11]]},
        **{"class_accuracy": [0.25, None], "client_accuracy": [0.5, 0.125]},
        **{"task_confusion": [[0.5, 0.5], [0.25, 0.75]], "unpredicted": 0},
        **{"calibration": reliability, "calibration_drawn": reliability},
        "privacy": {"epsilon": 3.0, "delta": 1e-5, "noise_multiplier": 1.0, "by_round": [[1, 2.0], [2, 3.0]]},
        "restored": {"images": 4, "psnr": 9.0, "test": {"images": 4, "psnr": 8.0}},
        **{"config": {"lr": 0.1, "dataset": "digits", "rounds": 1}, "given": ["lr"]},
    }


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each (container, key) of a JSON value, at every depth."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    here = [(value, key) for key in keys]
    return here + [place for container, key in here for place in _places(container[key])]


def _strange(rng: random.Random) -> Any:
    """A JSON value that nobody expects."""
    deep: list = []
    for _ in range(rng.randrange(1, 60)):
        deep = [deep]
    return rng.choice(
        (
            *(None, True, False, -1, 0, 1, 0.5, 95.0, -3, 2**70, 10**400, 1e308, float("inf"), float("nan")),
            *("", "x", "0.5", "\udcff", "x" * 9999, [], [[]], {}, [None], [1, [2]], [[1], [2, 3]], deep),
            *({"a": 1}, {"upload_bytes": "1"}, ["a", 1], [True], [1e400], {"": {}}, [[0.5, 0.5]], [[[0]]]),
        )
    )


def _run_folders(rng: random.Random) -> Bad:
    """Two finished runs, of which one has other values in its summary or its log."""
    other = whole_summary() | {"seed": 2}
    log = {
        "task": 0,
        "round": 0,
        "loss": 1.0,
        "participants": 2,
        "rejected": 1,
        **whole_summary()["communication"],
    }
    log |= {"gradient_share_own": 0.5}
    wrong = rng.choice((other, other, log))
    for _ in range(rng.randrange(1, 4)):
        container, key = rng.choice(_places(wrong))
        if isinstance(container, dict) and rng.random() < 0.2:
            del container[key]
        else:
            container[key] = _strange(rng)
    files = {"r/1/summary.json": whole_summary(), "r/2/summary.json": other, "r/2/metrics.jsonl": log}
    content = {name: (json.dumps(value) + "\n").encode() for name, value in files.items()}
    command = rng.choice((["compare", "r"], ["compare", "r/2"], ["report", "r"], ["report", "r/2"]))
    out = ["--out", "/dev/null/x.png"] if command[0] == "compare" and rng.random() < 0.1 else []
    return Bad("run folders", [*command, *out], content, may_pass=True)


PARTITION_ROWS = ["0,a", "1,b", "2,a"]


def _table_of_clients(rng: random.Random) -> bytes:
    """A partition file in which something is wrong."""
    rows = list(PARTITION_ROWS)
    head = ["example", "client"]
    line = rng.randrange(3)
    wrong = rng.choice(
        ("head", "twice", "value", "cells", "again", "text", "quote", "encoding", "noise", "json", "array")
    )
    if wrong == "head":
        head[rng.randrange(2)] = (
            rng.choice(("", "image", "examples", "who", "²", "client ", "x" * 5000)) + "q"
        )
    elif wrong == "twice":
        head = [*head, rng.choice(head)]
        rows = [f"{row},1" for row in rows]
    elif wrong == "value":
        rows[line] = f"{_number(rng)}{rng.choice(('', '²', 'x'))},a"
    elif wrong == "cells":
        rows[line] += rng.choice((",", ",x", ",,", ";a,b"))
    elif wrong == "again":
        rows.append(rng.choice(rows))
    elif wrong == "text":
        rows[line] = f"{line}," + rng.choice(
            ("", " ", "a" * 201, "a" * 200_000, "9" * 5000, "a\0b", '"a\nb"')
        )
    elif wrong == "quote":
        rows[line] = f'{line},"a' + rng.choice(("", 'b"c', '"c'))
    text = "\n".join([",".join(head), *rows]) + "\n"
    if wrong == "encoding":
        return (text + "3,\u00e9\n").encode(rng.choice(("utf-16", "latin-1", "utf-32")))
    if wrong == "noise":
        return _broken(rng, text.encode() * 9)
    if wrong == "json":
        value = rng.choice((_strange, lambda rng: {"a": _strange(rng)}, lambda rng: [_strange(rng)]))(rng)
        return json.dumps(value).encode()
    if wrong == "array":
        arrays = (np.arange(9), np.ones(1438), np.array([None] * 9), np.zeros((2, 719), int), np.array("a"))
        stream = io.BytesIO()
        np.save(stream, rng.choice(arrays), allow_pickle=True)
        return rng.choice((stream.getvalue(), _broken(rng, stream.getvalue()), _npz(a=rng.choice(arrays))))
    return rng.choice((text, text.replace("\n", "\r"), text.replace("\n", "\r\n"))).encode(
        rng.choice(("utf-8", "utf-8-sig"))
    )


def _order_of_classes(rng: random.Random) -> bytes:
    """A class order of the ten digits in which something is wrong."""
    order: list[Any] = [*map(str, range(10))]
    rng.shuffle(order)
    at = rng.randrange(10)
    order[at] = rng.choice((order[at - 1], "²", "10", "-1", "0.0", "nan", "cat", "9" * 5000, "\0", "0x1"))
    kind = rng.choice(("lines", "commas", "json", "array", "strange", "encoding", "broken"))
    if kind == "json":
        return json.dumps(order).encode()
    if kind == "strange":
        order[at] = _strange(rng)
        return json.dumps([order, 1][rng.random() < 0.1]).encode()
    if kind in ("array", "broken"):
        stream = io.BytesIO()
        arrays = (np.array(order), np.arange(9), np.arange(10.0), np.arange(11), np.zeros((10, 1), int))
        np.save(stream, rng.choice((*arrays, np.array([None, 1]))), allow_pickle=True)
        return stream.getvalue() if kind == "array" else _broken(rng, stream.getvalue())
    text = rng.choice((",", ", ") if kind == "commas" else ("\n", "\r\n", "\r")).join(order)
    return text.encode("utf-16" if kind == "encoding" else "utf-8-sig")


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
    *torture_weights.GENERATORS,
    lambda rng: Bad(
        "compare",
        ["compare", "r"],
        {"r/summary.json": rng.choice((b"{", b"[]", b"{}", b"", b"\xff", b"1" * 5000, b"[" * 99_999))},
    ),
    _run_folders,
    _run_folders,
    lambda rng: Bad("partition file", [*RUN_OUT, "--partition", "file:who"], {"who": _table_of_clients(rng)}),
    lambda rng: Bad(
        "class order", [*RUN_OUT, "--class-order", "file:order"], {"order": _order_of_classes(rng)}
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
                    ["--devices", str(rng.randrange(2, 10**6))],
                    ["--image-size", str(8 * rng.randrange(700, 790))],
                    ["--malicious", str(rng.randrange(5, 10**6))],
                )
            ),
        ],
    ),
)
