"""Check that a run is resumed with the settings and the files that it began with."""

import hashlib
import os
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import yaml

from fcljax import config
from fcljax.choices import CHOICES, readers
from fcljax.config import RunConfig
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.listings import class_list
from fcljax.data.owners import owners_csv
from fcljax.errors import InputError
from fcljax.files import read_user_text, write_text
from fcljax.mesh import device_count
from fcljax.methods import METHODS, file_of
from fcljax.results.run_folder import DIGESTS, load_summary
from fcljax.runs import checkpoint, compile_cache
from fcljax.runs.build import Experiment, Supplied, load
from fcljax.runs.inputs import Inputs
from fcljax.scenario import order_of_classes
from fcljax.settings import is_owned
from fcljax.user_files import is_program

# settings that do not influence results, and may change when a run is resumed
FREE = ("data_dir", "verify", "checkpoint_every", "keep_checkpoints")
# settings that change results only by rounding, and may change when a run is resumed
ROUNDING = ("devices", "batch_devices", "lanes", "lane_mode", "microbatch", "remat")
# of these, the settings that a run on another number of devices chooses again
PER_DEVICES = ("batch_devices", "lanes", "lane_mode", "microbatch")
# settings that a run chooses for its device, with the value that asks it to
AUTOMATIC: dict[str, Any] = {"lanes": 0, "microbatch": 0, "dtype": "auto"}
# names of digests, as messages have them
_PROGRAM = "lines of the method's file"
_CLASS_LIST = "classes of the class list"
_WITHOUT_DATA = (_PROGRAM, _CLASS_LIST)  # digests that need no images
PROGRAM_BYTES = 1 << 24  # most bytes of a method's file


def origin(settings: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """Return what a run's checkpoints record of its beginning, as plain JSON values."""
    return {
        "settings": plain_settings(settings),
        "digests": given_digests(settings, inputs.dataset) | digests(inputs),
    }


def hardware(exp: Experiment) -> dict[str, Any]:
    """Return what a run's rounding depends on, as plain JSON values by name."""
    mesh = exp.engine.mesh
    device = jax.devices()[0]
    lanes = exp.engine.lanes
    settings = exp.settings
    kind = device.device_kind
    processes = jax.process_count()
    # on CPUs sums have one order, however many processes share the devices
    # (`mesh.add_over_devices`), but XLA compiles other code for another type of CPU
    if device.platform == "cpu":
        kind = f"cpu {compile_cache.cpu_type()}"
        processes = None
    devices = 1
    if mesh is not None:
        devices = mesh.size
    return {
        "devices": devices,
        "kind": kind,
        "processes": processes,
        "batch_devices": devices // device_count(mesh),
        "lanes": lanes.count,
        "lane_mode": lanes.mode,
        "microbatch": settings.microbatch,
        "remat": settings.remat,
    }


def changed(part: Literal["hardware", "software"], before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return how hardware or software changed since a checkpoint, as 'name (now, not before), ..'.

    Args:
      part: which of them.
      before: origin of the checkpoint; those of earlier versions may have neither.
      now: hardware or software of the run.
    """
    # by the old names: what an earlier version did not record cannot be compared
    old = before.get(part, now)
    return ", ".join(config.differences(old, {name: now.get(name) for name in old}))


def digests(inputs: Inputs) -> dict[str, str]:
    """Return the sha256 of data and weights, by name."""
    decoder = inputs.backbone.decoder
    decoder_digest = ""
    if decoder:
        decoder_digest = checkpoint.digest_of_tree(decoder.params)
    digest_of = {
        "images": inputs.dataset.digest,
        "weights": inputs.backbone.digest,
        "decoder's weights": decoder_digest,
        "surrogate images": checkpoint.digest_of_tree(inputs.surrogate),
    }
    if inputs.texts is not None:
        # the ids, since a file of prompts and a tokenizer both decide them
        digest_of["prompts of classes"] = checkpoint.digest_of_tree((inputs.texts.ids, inputs.texts.mask))
    return digest_of


def given_digests(settings: RunConfig, dataset: Dataset | None) -> dict[str, str]:
    """Return the sha256 of the user's own files and columns, by name; {} if settings name none.

    The digest is that of a file's meaning, so that its layout may change; but a program's
    is that of its bytes. Without a data set, only files whose meaning needs none are
    read.

    Raises:
      InputError: for a file that cannot be read any more.
    """
    texts = {}
    program = file_of(settings.source)
    if program is not None:
        texts[_PROGRAM] = read_user_text("method", program, PROGRAM_BYTES)
    if settings.class_list != "none":
        texts[_CLASS_LIST] = "\n".join(class_list(settings.class_list))
    if dataset is None:
        return _hashed(texts)
    for name in CHOICES:
        value = getattr(settings, name, "")
        if is_program(value):
            text = read_user_text(name, value.partition(":")[0], PROGRAM_BYTES)
            texts[f"lines of the {name}'s file"] = text
    if settings.class_order.startswith("file:"):
        order = order_of_classes(dataset, settings, np.random.RandomState(settings.seed))
        texts["classes of the class order"] = ",".join(map(str, order.tolist()))
    if is_owned(settings.partition):
        texts["owners of the examples"] = owners_csv(dataset, settings.partition)
    if settings.tasks_by != "class":
        name = str(settings.tasks_by).partition(":")[2]
        columns = (dataset.columns[name], dataset.columns_test[name])
        texts["domains of the examples"] = "\n".join(map(str, np.concatenate(columns)))
    return _hashed(texts)


def _hashed(texts: dict[str, str]) -> dict[str, str]:
    """Return sha256 of each text."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def plain_settings(settings: RunConfig) -> dict[str, Any]:
    """Return all settings as they are read from config.yaml."""
    return yaml.safe_load(config.to_yaml(settings))


def differing(before: dict[str, Any], now: dict[str, Any], decided: Collection[str] = ()) -> dict[str, str]:
    """Return the settings that influence results and differ: name -> 'name (now, not before)'.

    Args:
      before: of the run's beginning.
      now: of the resumed run.
      decided: settings that the run decides when it begins, whose values may differ.
    """

    def differs(name: str) -> bool:
        if name in FREE or name in decided or before.get(name) == now.get(name):
            return False
        # automatic again: the run takes what it chose before (`chosen_before`)
        if name in AUTOMATIC and now.get(name) == AUTOMATIC[name]:
            return False
        # earlier versions had no such option, and played all rounds
        if name == "stop_when_flat" and name not in before and not now[name]:
            return False
        # files of earlier versions have the options of all choices, and null for a
        # default
        is_of_choice = name in before and readers(name)
        return not (is_of_choice and (name not in now or before[name] is None))

    names = [name for name in {**before, **now} if differs(name)]
    return {name: config.differences({name: before.get(name)}, {name: now.get(name)})[0] for name in names}


def _changed(before: dict[str, Any], settings: RunConfig) -> dict[str, str]:
    return differing(before, plain_settings(settings), config.decided_by_fit(settings))


def check_file(out: Path, settings: RunConfig, allowed: Collection[str] = ()) -> None:
    """Check that settings are those of config.yaml, except for those in `allowed`.

    Raises:
      InputError: naming those that differ.
    """
    changes = _changed(config.load_yaml(out / "config.yaml"), settings)
    if set(changes) - set(allowed):
        raise InputError(f"resume: {str(out)!r} was run with other settings: {', '.join(changes.values())}")


def stored_settings(values: dict[str, Any], devices: int | None = None) -> dict[str, Any]:
    """Return the settings of config.yaml that a resumed run keeps.

    Args:
      values: of config.yaml.
      devices: number of devices of the resumed run; None: the same. On another number,
        the run chooses the settings in `PER_DEVICES` again.
    """
    if devices is None or devices == values.get("devices", RunConfig.devices):
        return dict(values)
    return {name: value for name, value in values.items() if name not in PER_DEVICES}


def chosen_before(out: Path, settings: RunConfig) -> dict[str, Any]:
    """Return the earlier choices of the run in this folder, for settings that are
    automatic now."""
    path = out / "config.yaml"
    if not path.is_file():
        return {}
    before = stored_settings(config.load_yaml(path), settings.devices)
    automatic = [name for name, value in AUTOMATIC.items() if getattr(settings, name) == value]
    names = (*automatic, *config.decided_by_fit(settings))
    return {name: before[name] for name in names if name in before}


def finished_summary(out: Path, settings: RunConfig) -> dict[str, Any] | None:
    """Return the summary of a finished run.

    It is None if the run is not finished or is to get another number of rounds.

    Raises:
      InputError: if config.yaml or the summary has other settings, except for those that
        change only rounding.
    """
    check_file(out, settings, allowed=("rounds", *ROUNDING))
    # there is none, or it is damaged and will be written again
    try:
        summary = load_summary(out)
    except InputError:
        return None
    before = {"method": settings.method, **summary.get("config", {})}
    changes = _changed(before, settings)
    if set(changes) - {"rounds", *ROUNDING}:
        names = ", ".join(changes.values())
        raise InputError(f"resume: {str(out)!r} was finished with other settings: {names}")
    if "rounds" in changes:
        return None
    return summary


def check_settings(
    before: dict[str, Any] | None, settings: RunConfig, steps: Sequence[int], out: Path
) -> int:
    """Check that a run can be resumed with these settings, and return the step to resume from.

    They must be those of its checkpoints, except for those in `ROUNDING`. The number of
    rounds per task may change if all rounds so far are before the last round of the first
    task: those are the same with both numbers, and the run then equals one that had the
    new number from its beginning.

    Args:
      before: `origin` of the newest checkpoint; None: there is no checkpoint.
      settings: of the resumed run.
      steps: numbers of rounds at which there are checkpoints, the newest first.
      out: the run directory, for messages.

    Returns:
      One of `steps`; 0: none.

    Raises:
      InputError: naming the settings that differ, or why the number of rounds cannot change.
    """
    if before is None:
        return max(steps, default=0)
    changes = _changed(before["settings"], settings)
    if set(changes) - {"rounds", *ROUNDING}:
        raise InputError(
            f"resume: the run in {str(out)!r} began with other settings: {', '.join(changes.values())}"
        )
    if "rounds" not in changes:
        return max(steps, default=0)
    rounds = before["settings"]["rounds"]
    # A method may act differently in a task's last round, and schedules follow the
    # task: up to the shorter one's last round, runs with either number have played the
    # same.
    common = [step for step in steps if step < min(rounds, settings.rounds)]
    if settings.source not in METHODS:
        why = f"it is not known how {settings.method} depends on their number"
    elif not common:
        why = "no checkpoint from before the last round of its first task is left"
    else:
        return common[0]
    raise InputError(
        f"rounds: the run in {str(out)!r} has {rounds} per task, not {settings.rounds}, and {why}; "
        f"nearest: {rounds}"
    )


def names_files(settings: RunConfig, supplied: Supplied) -> bool:
    """Return whether settings name user files besides images and weights, or owners are
    in memory."""
    needs_no_data = file_of(settings.source) is not None or settings.class_list != "none"
    return needs_no_data or _needs_data(settings, supplied)


def _needs_data(settings: RunConfig, supplied: Supplied) -> bool:
    """Return whether the meaning of a named file depends on the data set."""
    names = (settings.class_order, settings.partition)
    return supplied.owners is not None or any(str(name).startswith("file:") for name in names)


def check_named_files(before: dict[str, Any], settings: RunConfig, supplied: Supplied, out: Path) -> None:
    """Check that the files that a finished run's settings name are as when it began.

    Images and weights are read only if a file's meaning depends on them.

    Raises:
      InputError: as `check_digests`.
    """
    if _needs_data(settings, supplied):
        check_digests(before, *load(settings, supplied), out)
    else:
        _check_same(before, given_digests(settings, None), out, _WITHOUT_DATA)


def check_digests(before: dict[str, Any], settings: RunConfig, inputs: Inputs, out: Path) -> None:
    """Check that a run is resumed with the files that it began with.

    Raises:
      InputError: naming the first that differs.
    """
    _check_same(before, given_digests(settings, inputs.dataset) | digests(inputs), out, before["digests"])


def _check_same(before: dict[str, Any], now: dict[str, str], out: Path, names: Collection[str]) -> None:
    """Check that the digests with these names are those of a run's checkpoints.

    Raises:
      InputError: naming the first that differs.
    """
    for name, digest in before["digests"].items():
        if name in names and now.get(name) != digest:
            raise InputError(
                f"resume: the {name} differ from those of the run in {str(out)!r}: their sha256 is "
                f"{now.get(name, '')[:16]}, not {digest[:16]}; restore the old ones"
            )


def change_settings(out: Path, settings: RunConfig, later_steps: list[int]) -> None:
    """Write a run's new settings to config.yaml.

    With another number of rounds the summary is set aside, and with it the checkpoints
    `later_steps`, which do not belong to both numbers.
    """
    changes = _changed(config.load_yaml(out / "config.yaml"), settings)
    if not changes and not later_steps:
        return
    if ("rounds" in changes or later_steps) and (out / "summary.json").exists():
        aside = out / checkpoint.ASIDE
        aside.mkdir(exist_ok=True)
        os.replace(out / "summary.json", aside / f"summary-{secrets.token_hex(3)}.json")
    # they seal results that the run is about to replace
    (out / DIGESTS).unlink(missing_ok=True)
    for step in later_steps:
        checkpoint.set_aside(out / "checkpoints", step)
    write_text(out / "config.yaml", config.to_yaml(settings))
