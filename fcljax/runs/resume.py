"""Whether a run may be resumed: the settings and the files that it began with must be those that it has
now."""

import hashlib
import os
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

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

# settings that do not influence a run's results, and may change when it is resumed
FREE = ("data_dir", "verify", "checkpoint_every", "keep_checkpoints")
# settings that change results by rounding alone, and may change when a run is resumed
ROUNDING = ("devices", "batch_devices", "lanes", "lane_mode", "microbatch", "remat")
# of these, what a run on another number of devices chooses anew unless it is given
PER_DEVICES = ("batch_devices", "lanes", "lane_mode", "microbatch")
# settings that a run chooses for its device unless they are given: the value that leaves them to it
CHOSEN: dict[str, Any] = {"lanes": 0, "microbatch": 0, "dtype": "auto"}
_PROGRAM = "lines of the method's file"
_CLASS_LIST = "classes of the class list"
_WITHOUT_DATA = (_PROGRAM, _CLASS_LIST)  # digests that no images are needed for
PROGRAM_BYTES = 1 << 24  # of a method's file


def origin(settings: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """What a run's checkpoints say about its beginning: plain JSON values."""
    return {
        "settings": plain_settings(settings),
        "digests": given_digests(settings, inputs.dataset) | digests(inputs),
    }


def hardware(exp: Experiment) -> dict[str, Any]:
    """What decides about the rounding of a run: plain JSON values by name. On a CPU the number of processes
    does not."""
    mesh = exp.engine.mesh
    device = jax.devices()[0]
    lanes = exp.engine.lanes
    settings = exp.settings
    on_cpu = device.platform == "cpu"
    devices = 1 if mesh is None else mesh.size
    return {
        "devices": devices,
        "kind": f"cpu {compile_cache.cpu_type()}" if on_cpu else device.device_kind,
        "processes": None if on_cpu else jax.process_count(),
        "batch_devices": devices // device_count(mesh),
        "lanes": lanes.count,
        "lane_mode": lanes.mode,
        "microbatch": settings.microbatch,
        "remat": settings.remat,
    }


def changed_hardware(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What of the hardware changed since a checkpoint with the origin `before`: 'name (now, not before)' for
    each; empty: nothing."""
    then = before.get("hardware", now)
    return ", ".join(config.differences(then, {name: now.get(name) for name in then}))


def digests(inputs: Inputs) -> dict[str, str]:
    """sha256 of everything that a run reads, by name."""
    decoder = inputs.backbone.decoder
    return {
        "images": inputs.dataset.digest,
        "weights": inputs.backbone.digest,
        "decoder's weights": checkpoint.digest_of_tree(decoder.params) if decoder else "",
        "surrogate images": checkpoint.digest_of_tree(inputs.surrogate),
    }


def given_digests(settings: RunConfig, dataset: Dataset | None) -> dict[str, str]:
    """sha256 of what the user's own files and columns say, by name; {} where settings name none.

    What a file says counts, not how it is written; but of a program every byte does. Without a data set, only
    files that mean something without one are read.

    Raises:
      InputError: for a file that cannot be read any more.
    """
    found = {}
    program = file_of(settings.source)
    if program is not None:
        found[_PROGRAM] = read_user_text("method", program, PROGRAM_BYTES)
    if settings.class_list != "none":
        found[_CLASS_LIST] = "\n".join(class_list(settings.class_list))
    if dataset is None:
        return _hashed(found)
    for name in CHOICES:
        value = getattr(settings, name, "")
        if is_program(value):
            text = read_user_text(name, value.partition(":")[0], PROGRAM_BYTES)
            found[f"lines of the {name}'s file"] = text
    if settings.class_order.startswith("file:"):
        order = order_of_classes(dataset, settings, np.random.RandomState(settings.seed))
        found["classes of the class order"] = ",".join(map(str, order.tolist()))
    if is_owned(settings.partition):
        found["owners of the examples"] = owners_csv(dataset, settings.partition)
    if settings.tasks_by != "class":
        name = str(settings.tasks_by).partition(":")[2]
        columns = (dataset.columns[name], dataset.columns_test[name])
        found["domains of the examples"] = "\n".join(map(str, np.concatenate(columns)))
    return _hashed(found)


def _hashed(texts: dict[str, str]) -> dict[str, str]:
    """Return sha256 of each text."""
    return {what: hashlib.sha256(text.encode()).hexdigest() for what, text in texts.items()}


def plain_settings(settings: RunConfig) -> dict[str, Any]:
    """All settings as YAML gives them back."""
    return yaml.safe_load(config.to_yaml(settings))


def differing(before: dict[str, Any], now: dict[str, Any], decided: Collection[str] = ()) -> dict[str, str]:
    """Settings that influence a run's results and differ: name -> 'name (now, not before)'; not those that
    the run `decided` when it began."""

    def differs(name: str) -> bool:
        # files of earlier versions have the options of all choices, and null where a default stands now
        if name in before and readers(name) and (name not in now or before[name] is None):
            return False
        left_to_the_run = name in decided or (name in CHOSEN and now.get(name) == CHOSEN[name])
        return name not in FREE and not left_to_the_run and before.get(name) != now.get(name)

    names = [name for name in {**before, **now} if differs(name)]
    return {name: config.differences({name: before.get(name)}, {name: now.get(name)})[0] for name in names}


def _changed(before: dict[str, Any], settings: RunConfig) -> dict[str, str]:
    return differing(before, plain_settings(settings), config.decided_by_fit(settings))


def check_file(out: Path, settings: RunConfig, may: Collection[str] = ()) -> None:
    """Check that settings are those of config.yaml, except for those that `may` differ.

    Raises:
      InputError: naming those that differ.
    """
    differ = _changed(config.load_yaml(out / "config.yaml"), settings)
    if set(differ) - set(may):
        raise InputError(f"resume: {str(out)!r} was run with other settings: {', '.join(differ.values())}")


def stored_settings(values: dict[str, Any], devices: int | None = None) -> dict[str, Any]:
    """Those of the settings in config.yaml with which a run is resumed on so many devices; None: on its own
    number. On another number those of `PER_DEVICES` are left to the run."""
    had = values.get("devices", RunConfig.devices)
    moved = had != (had if devices is None else devices)
    return {name: value for name, value in values.items() if not (moved and name in PER_DEVICES)}


def chosen_before(out: Path, settings: RunConfig) -> dict[str, Any]:
    """What the run in this folder chose of the settings that are left to it now."""
    path = out / "config.yaml"
    before = stored_settings(config.load_yaml(path), settings.devices) if path.is_file() else {}
    free = [name for name, usual in CHOSEN.items() if getattr(settings, name) == usual]
    return {name: before[name] for name in (*free, *config.decided_by_fit(settings)) if name in before}


def finished_summary(out: Path, settings: RunConfig) -> dict[str, Any] | None:
    """The summary of a finished run; None if it is not finished, or is to get another number of rounds. It
    stays as it is if only those settings differ that change rounding.

    Raises:
      InputError: if config.yaml has other settings, or the run finished with other ones.
    """
    check_file(out, settings, may=("rounds", *ROUNDING))
    try:
        summary = load_summary(out)
    except InputError:
        return None  # there is none, or it is damaged and will be made again
    then = {"method": settings.method, **summary.get("config", {})}
    differ = _changed(then, settings)
    if set(differ) - {"rounds", *ROUNDING}:
        named = ", ".join(differ.values())
        raise InputError(f"resume: {str(out)!r} was finished with other settings: {named}")
    return None if "rounds" in differ else summary


def check_settings(
    before: dict[str, Any] | None, settings: RunConfig, steps: Sequence[int], out: Path
) -> int:
    """Check that a run may be resumed with these settings.

    They must be those of its checkpoints, but for those of `ROUNDING`. The number of rounds per task may
    change only while every round so far would have been the same with the new number: since the last round of
    a task closes the task, all of them must lie before the last round of the first task. The run then equals
    one that had the new number from its beginning.

    Args:
      before: `origin` of the newest checkpoint; None: there is no checkpoint.
      settings: of the run now.
      steps: numbers of rounds at which there are checkpoints.
      out: the run directory, for messages.

    Returns:
      The last of `steps` that it may be resumed from; 0: none.

    Raises:
      InputError: naming the settings that differ, or why the number of rounds cannot change.
    """
    if before is None:
        return max(steps, default=0)
    differ = _changed(before["settings"], settings)
    if set(differ) - {"rounds", *ROUNDING}:
        raise InputError(
            f"resume: the run in {str(out)!r} began with other settings: {', '.join(differ.values())}"
        )
    if "rounds" not in differ:
        return max(steps, default=0)
    had = before["settings"]["rounds"]
    common = [step for step in steps if step < min(had, settings.rounds)]
    if settings.source not in METHODS:
        why = f"it is not known how {settings.method} depends on their number"
    elif not common:
        why = "no checkpoint from before the last round of its first task is left"
    else:
        return common[0]
    raise InputError(
        f"rounds: the run in {str(out)!r} has {had} per task, not {settings.rounds}, and {why}; "
        f"nearest: {had}"
    )


def names_files(settings: RunConfig, supplied: Supplied) -> bool:
    """Return whether settings name files of the user besides images and weights, or owners are in memory."""
    alone = file_of(settings.source) is not None or settings.class_list != "none"
    return alone or _needs_data(settings, supplied)


def _needs_data(settings: RunConfig, supplied: Supplied) -> bool:
    """Return whether the meaning of a named file depends on the data set."""
    given = (settings.class_order, settings.partition)
    return supplied.owners is not None or any(str(name).startswith("file:") for name in given)


def check_named_files(before: dict[str, Any], settings: RunConfig, supplied: Supplied, out: Path) -> None:
    """Check that the files that a finished run's settings name are those that it began with.

    Images and weights are read only where a file's meaning depends on them.

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
    """Check that some of the digests of a run's checkpoints are those of its files now.

    Raises:
      InputError: naming the first that differs.
    """
    for name, then in before["digests"].items():
        if name in names and now.get(name) != then:
            raise InputError(
                f"resume: the {name} differ from those of the run in {str(out)!r}: their sha256 is "
                f"{now.get(name, '')[:16]}, not {then[:16]}; restore the old ones"
            )


def change_settings(out: Path, settings: RunConfig, later: list[int]) -> None:
    """Give a run other settings in config.yaml. With another number of rounds, checkpoints that do not belong
    to both numbers (`later`) and the summary are set aside."""
    differ = _changed(config.load_yaml(out / "config.yaml"), settings)
    if not differ and not later:
        return
    if ("rounds" in differ or later) and (out / "summary.json").exists():
        aside = out / checkpoint.ASIDE
        aside.mkdir(exist_ok=True)
        os.replace(out / "summary.json", aside / f"summary-{secrets.token_hex(3)}.json")
    (out / DIGESTS).unlink(missing_ok=True)
    for step in later:
        checkpoint.set_aside(out / "checkpoints", step)
    write_text(out / "config.yaml", config.to_yaml(settings))
