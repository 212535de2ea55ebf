"""Check the fields of a summary.json that tables and pages read, and the lines of a
metrics.jsonl.

A folder of somebody else may hold anything.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fcljax.federated.health import CLASSES, CROSS_ENTROPY, NOT_FINITE

Check = Callable[[Any], bool]

LARGEST = 1e18  # of any number: a run sends no exabytes
MAX_DEPTH = 8  # of the settings, which are shown as text
MAX_SHOWN = 80  # characters of a wrong value in a message


def is_text(value: object) -> bool:
    """Check for text."""
    return isinstance(value, str)


def is_whole(value: object) -> bool:
    """Check for an integer, such as a seed."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_number(value: object) -> bool:
    """Check for a finite number."""
    # NaN compares as false
    return is_whole(value) or (isinstance(value, float) and abs(value) <= LARGEST)


def is_amount(value: object) -> bool:
    """Check for a number that cannot be negative, such as bytes or seconds."""
    return isinstance(value, int | float) and is_number(value) and value >= 0


def is_change(value: object) -> bool:
    """Check for a difference of two shares, up to rounding, such as forgetting."""
    return isinstance(value, int | float) and is_number(value) and abs(value) <= 1 + 1e-6


def is_share(value: object) -> bool:
    """Check for a fraction such as an accuracy, up to rounding."""
    return isinstance(value, int | float) and is_change(value) and value >= 0


def or_none(check: Check) -> Check:
    """Allow null too."""

    def holds(value: object) -> bool:
        return value is None or check(value)

    return holds


def list_of(check: Check) -> Check:
    """Require a list whose items all hold."""

    def holds(value: object) -> bool:
        return isinstance(value, list) and all(map(check, value))

    return holds


def square_of(check: Check) -> Check:
    """Require a list of as many rows as columns, whose items all hold."""

    def holds(value: object) -> bool:
        if not list_of(list_of(check))(value):
            return False
        return all(len(row) == len(value) for row in value)  # pyrefly: ignore[not-iterable, bad-argument-type]

    return holds


def mapping_of(check: Check) -> Check:
    """Require an object whose values all hold."""

    def holds(value: object) -> bool:
        return isinstance(value, Mapping) and all(map(check, value.values()))

    return holds


def with_keys(**checks: Check) -> Check:
    """Require an object with these keys, whose values hold."""

    def holds(value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(name in value and check(value[name]) for name, check in checks.items())

    return holds


def is_setting(value: object, depth: int = MAX_DEPTH) -> bool:
    """Check for the value of a setting: a scalar, or lists and objects of them that are
    not deep."""
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(is_setting(item, depth - 1) for item in items)
    return value is None or isinstance(value, str | bool) or is_number(value)


# Numbers of a line of metrics.jsonl. Losses may be as large as a float can be, since
# they are what clients report, and a malicious one reports anything.
COUNTS = ("rejected", "rejected_besides", "participants", "upload_bytes", "download_bytes", CLASSES)
LOSSES = ("loss", NOT_FINITE, CROSS_ENTROPY)

AMOUNT = or_none(is_amount), "a number from 0"
SHARE = or_none(is_share), "a share from 0 to 1"
SHARES = or_none(list_of(or_none(is_share))), "shares from 0 to 1"
SIZE = or_none(mapping_of(or_none(is_amount))), "numbers from 0 by name"
TEXT = is_text, "text"
TRAFFIC = with_keys(upload_bytes=is_amount, download_bytes=is_amount)
FORGETTING = with_keys(**dict.fromkeys(("paper", "released", "diagonal"), or_none(is_change)))

# field -> (check of its value, what is expected). Fields that older versions did not
# write may be absent.
FIELDS: dict[str, tuple[Check, str]] = {
    "method": TEXT,
    "dataset": TEXT,
    "backbone": TEXT,
    "fidelity": TEXT,
    "seed": (is_whole, "a whole number"),
    "A": (list_of(or_none(is_share)), "shares from 0 to 1"),
    "accuracy": (square_of(or_none(is_share)), "shares from 0 to 1, as many rows as columns"),
    "A_avg": SHARE,
    "A_last": SHARE,
    "backward_transfer": (or_none(is_change), "a change from -1 to 1"),
    "forgetting": (FORGETTING, "shares from -1 to 1 by definition"),
    "task_il": (or_none(with_keys(A_last=or_none(is_share))), "an object with A_last"),
    "class_accuracy": SHARES,
    "client_accuracy": SHARES,
    "personal_accuracy": SHARES,
    "class_names": (or_none(list_of(is_text)), "names"),
    "communication": SIZE,
    "communication_total": (or_none(TRAFFIC), "upload_bytes and download_bytes"),
    "communication_extra": (or_none(mapping_of(TRAFFIC)), "upload_bytes and download_bytes by name"),
    "extra_storage": SIZE,
    "client_state": SIZE,
    "server_state": SIZE,
    "trainable_params": (is_amount, "a number from 0"),
    "time": (mapping_of(or_none(is_amount)), "seconds by name"),
    "client_images_per_s": AMOUNT,
    "trained_images_per_s": AMOUNT,
    "privacy": (or_none(with_keys(epsilon=or_none(is_amount))), "an object with epsilon"),
    "rounds_without_upload": (or_none(list_of(list_of(is_whole))), "pairs of task and round"),
    "warnings": (or_none(list_of(is_text)), "lines of text"),
    "software": (mapping_of(or_none(is_text)), "versions by name"),
    "config": (mapping_of(is_setting), "settings by name"),
}


def wrong_field(summary: Mapping[str, Any]) -> str | None:
    """Return "field: value; expected what" for the first wrong field of a summary that
    has all of them; None if every field that is read holds."""
    for name, (check, expected) in FIELDS.items():
        if name in summary and not check(summary[name]):
            return f"{name}: {_shortened(summary[name])}; expected {expected}"
    if not summary["A"] or not summary["accuracy"]:
        return "A: no value; a finished run has one for each task"
    return None


def _shortened(value: object) -> str:
    # a value may be nested too deep, or a whole number of more digits than Python writes
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN - 3]}..."


def checked_line(line: Any, shares: str) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl; None for anything else.

    Args:
      line: parsed JSON.
      shares: prefix of the keys that hold shares of the loss's terms.
    """
    if not isinstance(line, dict):
        return None
    for name in ("task", "round"):
        if not is_whole(line.get(name)) or line[name] < 0:
            return None
    for name, value in line.items():
        is_loss = name in LOSSES or name.startswith(shares)
        if name in COUNTS and not or_none(is_amount)(value):
            return None
        if is_loss and value is not None and not (isinstance(value, int | float) and abs(value) < 1e308):
            return None
    return line
