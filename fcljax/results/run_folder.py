"""Read the files of finished runs that results are made from, and find the folders that
hold them."""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fcljax.errors import InputError
from fcljax.files import open_regular, read_text, write_text
from fcljax.results.summary_fields import checked_line, wrong_field

Summary = dict[str, Any]  # the content of a summary.json
Number = float | int

# Files of a finished run. They may be a stranger's, so sizes are limited before reading.
DIGESTS = "digests.json"  # sha256 of what a finished run wrote
CONFUSION = "confusion.csv"
PREDICTIONS = "predictions.csv"
# the files whose digests it has: those that numbers and figures are made from
SEALED = ("summary.json", "metrics.jsonl", "config.yaml", CONFUSION, PREDICTIONS)
# what the keys of shares of the loss's terms in metrics.jsonl begin with
SHARES = "gradient_share_"
MAX_LOG_BYTES = 2**26  # read of a metrics.jsonl
MAX_SUMMARY_BYTES = 2**28  # of a summary.json
MISSING = object()  # in place of a value: null is one
# Keys without which tables and pages cannot be made. Keys that later versions added are
# not among them, so that older runs can still be read.
SUMMARY_KEYS = (
    *("method", "dataset", "backbone", "seed", "fidelity"),
    *("accuracy", "A", "A_avg", "A_last"),
    *("trainable_params", "client_images_per_s", "slot_efficiency", "traces"),
    *(f"forgetting.{kind}" for kind in ("paper", "released", "diagonal")),
    *(f"communication.{way}_{unit}" for way in ("upload", "download") for unit in ("scalars", "bytes")),
    *(f"time.{part}_s" for part in ("compile", "client", "server", "eval")),
)


def write_json(path: str | Path, obj: object) -> None:
    """Write `obj` as strict JSON: NaN and infinity are null, arrays lists, named tuples
    and mappings objects.

    Raises:
      TypeError: a value that JSON has no form for; an existing file is then left as it
        is.
    """
    text = json.dumps(_plain(obj), indent=2, allow_nan=False)
    write_text(path, text + "\n")


def seal(run_dir: str | Path) -> None:
    """Write the sha256 of a finished run's files, so that a later change of one is
    noticed."""
    write_json(Path(run_dir) / DIGESTS, {name: _sha256(Path(run_dir) / name) for name in SEALED})


def changed_files(run_dir: str | Path) -> list[str]:
    """Return a warning line for each file that has changed since the run; none without
    digests."""
    path = Path(run_dir) / DIGESTS
    if not path.exists():
        return []
    try:
        sealed = json.loads(read_text(path, 1 << 16))
    except (OSError, ValueError, RecursionError):
        sealed = None
    # a damaged file of digests proves nothing, so the run may have been changed
    if not isinstance(sealed, dict):
        return [f"warning: {path} may have changed since the run: it has no digests"]
    warnings = []
    for name in SEALED:
        digest = _sha256(Path(run_dir) / name)
        # a file that is missing is reported by whoever needs it, or made again
        if digest and digest != sealed.get(name):
            file = Path(run_dir) / name
            warnings.append(f"warning: {file} has changed since the run: its sha256 differs")
    return warnings


def _sha256(path: Path) -> str | None:
    try:
        with open_regular(path) as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return None


def load_summary(run_dir: str | Path) -> Summary:
    """Read the `summary.json` of a run directory.

    Raises:
      InputError: no such directory, no summary (the run has not finished), not JSON, or
        fields missing or of another type than a run writes.
    """
    path = Path(run_dir) / "summary.json"
    if not path.parent.is_dir():
        raise InputError(f"run: no directory {str(run_dir)!r}")
    if not path.is_file():
        raise InputError(f"run: {str(run_dir)!r} has no summary.json; has the run finished?")
    try:
        summary = json.loads(read_text(path, MAX_SUMMARY_BYTES))
    except OSError as error:
        raise InputError(f"run: cannot read {str(path)!r}: {error.strerror or error}") from None
    # ValueErrors of JSON and of UTF-8; RecursionError where it is nested too deep
    except (ValueError, RecursionError) as error:
        raise InputError(f"run: {str(path)!r} is not JSON ({error})") from None
    if not isinstance(summary, dict):
        raise InputError(f"run: {str(path)!r} lacks every field: it is not a JSON object")
    missing = [key for key in SUMMARY_KEYS if value_at(summary, key, MISSING) is MISSING]
    if missing:
        raise InputError(f"run: {str(path)!r} lacks {', '.join(missing)}")
    # types are checked once, here, so that tables and charts can rely on them
    problem = wrong_field(summary)
    if problem is not None:
        raise InputError(f"run: {str(path)!r} was not written by a run: {problem}")
    return summary


def value_at(summary: Summary, key: str, default: Any = None) -> Any:
    """Return what a summary has at "key" or "key.inner", `default` where it has no such
    key."""
    value: Any = summary
    for name in key.split("."):
        if not isinstance(value, dict):
            return default
        value = value.get(name, default)
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a metrics.jsonl, whose last one may be half written;
    none without a file."""
    try:
        with open_regular(path) as stream:
            # more than any run writes; of a larger file the beginning
            content = stream.read(MAX_LOG_BYTES)
    except OSError:
        return []
    lines = []
    # behind the last line break there is nothing, or a line that is being written
    for line in content.split(b"\n")[:-1]:
        # a damaged line is skipped: `watch` must go on
        try:
            value = checked_line(json.loads(line), SHARES)
        except (ValueError, RecursionError):
            continue
        if value is not None:
            lines.append(value)
    return lines


def rejected_uploads(lines: Iterable[dict[str, Any]]) -> int:
    """Count the uploads that were left out, by lines of a metrics.jsonl: those of the
    rounds, and those of exchanges before a task's first round or after its last one.
    Older versions wrote neither number."""
    return sum((line.get("rejected") or 0) + (line.get("rejected_besides") or 0) for line in lines)


def run_folders(folder: str | Path) -> list[Path]:
    """Return the finished runs in a folder of `fcljax run --seeds` or `fcljax sweep`,
    or of other folders that hold runs or such folders. A run directory, and a folder
    without any, stands for itself."""
    if (Path(folder) / "summary.json").exists():
        return [Path(folder)]
    # the nearest level that has runs: leaderboards have them two levels below
    for pattern in ("*/summary.json", "*/*/summary.json"):
        runs = [path.parent for path in Path(folder).glob(pattern) if not is_hidden(path, folder)]
        if runs:
            return sorted(runs)
    return [Path(folder)]


def is_hidden(path: Path, folder: str | Path) -> bool:
    """Check whether the path is in a folder, inside `folder`, whose name begins with a
    dot."""
    return any(name.startswith(".") for name in path.relative_to(folder).parts)


def _plain(obj: object) -> object:
    if hasattr(obj, "_asdict"):
        obj = obj._asdict()
    if hasattr(obj, "tolist"):  # numpy and jax arrays and scalars
        obj = obj.tolist()
    if isinstance(obj, dict):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_plain(value) for value in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return None
    if isinstance(obj, Path):
        return str(obj)
    return obj
