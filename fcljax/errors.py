"""The exception for bad input from outside; the CLI turns it into one line and exit code 2."""

import difflib
import re
from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")

# what other libraries and papers call an option -> what it is called here
SYNONYMS = {
    "aggregation": "aggregator",
    "arch": "backbone",
    "beta": "alpha",
    "byzantine": "malicious",
    "client_fraction": "participation",
    "communication_rounds": "rounds",
    "concentration": "alpha",
    "dirichlet_alpha": "alpha",
    "dirichlet_beta": "alpha",
    "epoch_schedule": "lr_schedule",
    "fraction_fit": "participation",
    "early_stopping": "stop_when_flat",
    "gradient_accumulation": "microbatch",
    "hostile": "malicious",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "min_rows": "min_examples",
    "model": "backbone",
    "mu": "prox_weight",
    "network": "backbone",
    "noise": "noise_multiplier",
    "normalize": "normalise",
    "num_byzantine": "malicious",
    "num_clients": "clients",
    "num_epochs": "epochs",
    "num_malicious": "malicious",
    "num_rounds": "rounds",
    "num_tasks": "tasks",
    "optimizer": "optimiser",
    "output_dir": "out",
    "patience": "stop_when_flat",
    "pool": "task_pool",
    "pool_classes": "task_pool_classes",
    "pool_most": "task_pool_limit",
    "pretrained": "checkpoint",
    "proximal_mu": "prox_weight",
    "rank": "lora_rank",
    "sample_fraction": "participation",
    "schedule": "lr_schedule",
    "server_lr": "server_step",
    "server_optimizer": "server_optimiser",
    "shards_per_client": "classes_per_client",
    "wd": "weight_decay",
    "weights": "checkpoint",
}

MOST = 300  # characters of one value in a message
MOST_OF_LINE = 4000  # characters of a message, which may list many values
# a long value: between quotes, as repr writes text, or a run without spaces
_LONG = re.compile(rf"'(?:[^'\\]|\\.){{{MOST},}}'|\S{{{MOST},}}")


def install_command(extra: str) -> str:
    """Return the command that installs an optional dependency. The package is on no index."""
    return f"pip install -e '.[{extra}]' in a clone of fcljax"


class InputError(ValueError):
    """Bad input from outside.

    The message is one line that names the field, the value and what would be valid; long
    values are cut.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Return any text as one line that every terminal takes.

    Values of more than 300 characters are cut in their middle, and what cannot be printed
    is written with backslashes.
    """
    line = printable(re.sub(r"[\r\n\t\v\f]+", " ", text))
    # first single values, so that what follows a long one in the message is still seen
    line = _LONG.sub(lambda value: _cut(value[0], MOST), line)
    return _cut(line, MOST_OF_LINE)


def reason(error: BaseException) -> str:
    """Return kind and message of an exception, in one line of at most 200 characters.

    A plain ValueError gives its message alone, which says enough. numpy advises to load
    what it cannot read by pickle, which would execute it; that is not repeated.
    """
    if "allow_pickle" in str(error):
        return "it is not in numpy's format, or holds pickled objects, which are never read"
    text = f"{type(error).__name__}: {error}"
    if type(error) is ValueError and str(error):
        text = str(error)
    return " ".join(text.split())[:200]


def printable(text: str) -> str:
    """Return a text with backslashes for what cannot be printed, as half a surrogate pair."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cut(text: str, most: int) -> str:
    """Cut the middle of a text that is too long, keeping two thirds of it at the start."""
    if len(text) <= most:
        return text
    return f"{text[: 2 * most // 3]} ... {text[-most // 3 + 5 :]}"


def nearest(value: object, options: Iterable[str]) -> str:
    """Return a hint for an unknown name: its name in this package, else the closest of
    `options`, or all of them when none is close."""
    options = sorted({str(option) for option in options})
    if not options:
        return "there are none"
    synonym = SYNONYMS.get(str(value).lstrip("-").replace("-", "_"), "")
    # options may be keys of a file or flags of the command line
    for name in (synonym, "--" + synonym.replace("_", "-")):
        if synonym and name in options:
            return f"did you mean {name!r}?"
    # a value that is no name may be long, and comparing it would take minutes
    close = difflib.get_close_matches(str(value)[:MOST], options, n=1, cutoff=0.5)
    if not close:
        return f"choose from: {', '.join(options)}"
    return f"did you mean {close[0]!r}?"


def choose(field: str, value: Value, options: Iterable[str]) -> Value:
    """Return `value` if it is one of `options`.

    Raises:
      InputError: naming `field`, `value` and the nearest option.
    """
    options = list(options)
    if value not in options:
        raise InputError(f"{field}: unknown value {value!r}; {nearest(value, options)}")
    return value


def gib(size: float | int) -> str:
    """Return a number of bytes in words."""
    value = size / 2**30
    if value < 1000:
        return f"{value:.3g} GiB"
    return f"{value:,.0f} GiB"
