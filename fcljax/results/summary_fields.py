"""What a summary.json may hold: a check for each field that tables and pages read. A folder of somebody else
may hold anything."""

from collections.abc import Callable, Mapping
from typing import Any

from fcljax.federated.health import CLASSES, CROSS_ENTROPY, NOT_FINITE

Check = Callable[[Any], bool]

LARGEST = 1e18  # of any number: a run sends no exabytes
DEPTH = 8  # of the settings, which are shown as text


def is_text(value: object) -> bool:
    """Whether a value is text."""
    return isinstance(value, str)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, such as a seed."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return is_whole(value) or (isinstance(value, float) and abs(value) <= LARGEST)  # NaN compares as false


def is_share(value: object) -> bool:
    """Whether a value is a fraction such as an accuracy, up to rounding; forgetting may be negative."""
    return isinstance(value, int | float) and is_number(value) and abs(value) <= 1 + 1e-6


def or_none(check: Check) -> Check:
    """Where there may be nothing."""

    def holds(value: object) -> bool:
        return value is None or check(value)

    return holds


def list_of(check: Check) -> Check:
    """A list whose items all hold."""

    def holds(value: object) -> bool:
        return isinstance(value, list) and all(map(check, value))

    return holds


def matrix_of(check: Check) -> Check:
    """A list of lists of one length."""

    def holds(value: object) -> bool:
        if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
            return False
        return all(all(map(check, row)) for row in value) and len({len(row) for row in value}) <= 1

    return holds


def mapping_of(check: Check) -> Check:
    """An object whose values all hold."""

    def holds(value: object) -> bool:
        return isinstance(value, Mapping) and all(map(check, value.values()))

    return holds


def having(**checks: Check) -> Check:
    """An object with these names."""

    def holds(value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(name in value and check(value[name]) for name, check in checks.items())

    return holds


def only_numbers(*names: str) -> Check:
    """An object in which these names stand for numbers, as far as they are there, as in an object inside."""

    def holds(value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        parts = [value, *(part for part in value.values() if isinstance(part, Mapping))]
        return all(part.get(name) is None or is_number(part[name]) for part in parts for name in names)

    return holds


def is_plain(value: object, depth: int = DEPTH) -> bool:
    """Whether a value is one of a setting: a scalar, or lists and objects of them that are not deep."""
    if isinstance(value, list | dict):
        inside = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(is_plain(each, depth - 1) for each in inside)
    return value is None or isinstance(value, str | bool) or is_number(value)


# numbers of a line of metrics.jsonl; losses may be as large as a float, where a client lies about them
COUNTS = ("rejected", "rejected_besides", "participants", "upload_bytes", "download_bytes", CLASSES)
LOSSES = ("loss", NOT_FINITE, CROSS_ENTROPY)

_NUMBER = or_none(is_number)
_SHARE = or_none(is_share)
_SIZE = mapping_of(_NUMBER)
_TRAFFIC = having(upload_bytes=is_number, download_bytes=is_number)
_FORGETTING = having(paper=_SHARE, released=_SHARE, diagonal=_SHARE)
_RELIABILITY = having(
    ece=_SHARE, examples=list_of(is_number), confidence=list_of(_SHARE), accuracy=list_of(_SHARE)
)
# of the restored images, the numbers that a page shows
RESTORED = ("images", "mse_restored", "mse_unprompted", "psnr", "psnr_unprompted", "identified", "chance")

# field -> (whether a value holds, what is expected). Fields that older versions did not write may be absent.
FIELDS: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("method", "dataset", "backbone", "fidelity"), (is_text, "text")),
    "seed": (is_whole, "a whole number"),
    "A": (list_of(_SHARE), "shares from 0 to 1"),
    "accuracy": (matrix_of(_SHARE), "rows of shares from 0 to 1, one for each task"),
    **dict.fromkeys(("A_avg", "A_last", "backward_transfer"), (_SHARE, "a share from -1 to 1")),
    "forgetting": (_FORGETTING, "shares from -1 to 1 by definition"),
    "task_il": (or_none(having(A_last=_SHARE)), "an object with A_last"),
    "communication": (_SIZE, "numbers by name"),
    "communication_total": (or_none(_TRAFFIC), "upload_bytes and download_bytes"),
    "communication_extra": (or_none(mapping_of(_TRAFFIC)), "upload_bytes and download_bytes by name"),
    **dict.fromkeys(("extra_storage", "client_state", "server_state"), (or_none(_SIZE), "scalars and bytes")),
    "trainable_params": (is_number, "a number"),
    "time": (mapping_of(_NUMBER), "seconds by name"),
    **dict.fromkeys(
        (
            "client_images_per_s",
            "trained_images_per_s",
            "slot_efficiency",
            "rejected_uploads",
            "refused_results",
            "unpredicted",
        ),
        (_NUMBER, "a number"),
    ),
    "rounds_without_upload": (or_none(list_of(list_of(is_whole))), "pairs of task and round"),
    "class_names": (or_none(list_of(is_text)), "names"),
    "task_classes": (or_none(list_of(list_of(is_whole))), "the classes of each task"),
    "holdings": (or_none(matrix_of(is_number)), "examples of each client and class"),
    **dict.fromkeys(("class_accuracy", "client_accuracy"), (or_none(list_of(_SHARE)), "shares from 0 to 1")),
    "task_confusion": (or_none(matrix_of(_SHARE)), "rows of shares from 0 to 1, one for each task"),
    "calibration": (or_none(_RELIABILITY), "ece, examples, confidence and accuracy"),
    "calibration_drawn": (or_none(having(ece=_SHARE)), "as calibration"),
    "privacy": (
        or_none(
            having(by_round=matrix_of(_NUMBER), epsilon=_NUMBER, delta=_NUMBER, noise_multiplier=_NUMBER)
        ),
        "epsilon, delta and by_round",
    ),
    "restored": (or_none(only_numbers(*RESTORED)), "numbers by name"),
    "config": (mapping_of(is_plain), "settings by name"),
}


def wrong_field(summary: Mapping[str, Any]) -> str | None:
    """What is wrong with a summary that has all its fields, as "field: value; expected what"; None: nothing
    that is read."""
    for name, (check, expected) in FIELDS.items():
        if name in summary and not check(summary[name]):
            return f"{name}: {_shortened(summary[name])}; expected {expected}"
    return _wrong_shape(summary)


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep; thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong_shape(summary: Mapping[str, Any]) -> str | None:
    """The first fields that do not fit each other."""
    for name in ("accuracy", "task_confusion"):
        rows = summary.get(name) or []
        if rows and len(rows[0]) != len(rows):
            return f"{name}: {len(rows)} rows of {len(rows[0])}; expected as many rows as columns"
    if not summary["A"] or not summary["accuracy"]:
        return "A: no value; a finished run has one for each task"
    calibration = summary.get("calibration") or {"examples": [], "confidence": [], "accuracy": []}
    if len({len(calibration[name]) for name in ("examples", "confidence", "accuracy")}) > 1:
        return "calibration: examples, confidence and accuracy are not equally long"
    privacy = summary.get("privacy") or {"by_round": []}
    if any(len(pair) != 2 for pair in privacy["by_round"]):
        return "privacy: by_round; expected pairs of round and epsilon"
    return _wrong_holdings(summary)


def _wrong_holdings(summary: Mapping[str, Any]) -> str | None:
    """Whether the classes of the tasks are those of the holdings."""
    holdings = summary.get("holdings") or []
    if not holdings:
        return None
    classes = [label for task in summary.get("task_classes") or [] for label in task]
    if not classes or not all(0 <= label < len(holdings[0]) for label in classes):
        return f"task_classes: expected classes from 0 to {len(holdings[0]) - 1}, as holdings has"
    return None


def checked_line(line: Any, shares: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl without values that are none of a round's; None for anything else.

    Args:
      line: what the JSON says.
      shares: what the names of the shares of the loss's terms begin with.
    """
    if not isinstance(line, dict) or not all(
        is_whole(line.get(name)) and line[name] >= 0 for name in ("task", "round")
    ):
        return None
    for name, value in line.items():
        number = is_number(value) if name in COUNTS else isinstance(value, int | float) and abs(value) < 1e308
        if (name in COUNTS or name in LOSSES or name.startswith(shares)) and not (value is None or number):
            return None
    return line
