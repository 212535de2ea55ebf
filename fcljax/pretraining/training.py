"""What the commands that train weights share: fresh letters, the check of `out`, the bar, the command."""

from pathlib import Path

import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fcljax.data.glyphs import Fields, Style, sample_glyphs
from fcljax.errors import InputError
from fcljax.files import check_folder
from fcljax.options import fields_of

# apart from the seeds that experiments use, so that choices made here leave their data sets unseen
VALIDATION_SEED = 1_000_003


def check_weights_file(out: Path) -> None:
    """Check, before anything slow, that weights can go there.

    Raises:
      InputError: for another suffix, or a folder that is not there or cannot be written.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise InputError(
            f"out: {str(out)!r} must end in .safetensors; nearest: {str(out.with_suffix('.safetensors'))!r}"
        )
    if not out.absolute().parent.is_dir():
        raise InputError(f"out: no folder {str(out.absolute().parent)!r}")
    check_folder(out.absolute().parent)


def fresh_letters(
    fields: Fields, seed: int, step: int, batch_size: int, size: int, style: Style
) -> tuple[np.ndarray, np.ndarray]:
    """The letters of a step, from (seed, step) alone: gray levels uint8 [batch_size, size, size] and the
    classes that they show, int64 [batch_size]."""
    rng = np.random.default_rng([seed, step])
    label = rng.integers(0, len(fields.number), batch_size)
    return sample_glyphs(fields, label, rng, size, style), label


def training_bar(name: str, *numbers: str) -> Progress:
    """Steps, the latest of these numbers, which are fields of the bar's task, and the time left."""
    return Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("  ".join(f"{number} {{task.fields[{number}]:.3f}}" for number in numbers)),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


def command_line(command: str, config: object, *without: str) -> str:
    """The command line that repeats a training.

    Args:
      command: such as "pretrain".
      config: its dataclass of options.
      without: options that do not matter to what is trained.
    """
    values = {field: getattr(config, field.name) for field in fields_of(type(config))}
    changed = {
        field.name.replace("_", "-"): value
        for field, value in values.items()
        if field.name not in without and value != field.default
    }
    return f"fcljax {command}" + "".join(_option(name, value) for name, value in changed.items())


def _option(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f" --{name}" if value else f" --no-{name}"
    return f" --{name} {value}"
