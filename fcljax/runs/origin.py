"""What a run is: its settings, and the digests of the data set and the weights that it reads. A run that goes
on must be the one that was begun, or it is refused by name."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from fcljax import config
from fcljax.config import RunConfig
from fcljax.errors import InputError
from fcljax.methods import METHODS
from fcljax.runs import checkpoint
from fcljax.runs.inputs import Inputs

# settings that decide nothing of a run's numbers, and may differ when it goes on
FREE = ("data_dir", "verify", "checkpoint_every", "keep_checkpoints")


def of_run(method_name: str, cfg: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """What checkpoints say of the run: plain JSON values."""
    return {"settings": plain_settings(method_name, cfg), "digests": digests(inputs)}


def digests(inputs: Inputs) -> dict[str, str]:
    """sha256 of all that a run reads, by what it is."""
    decoder = inputs.backbone.decoder
    return {
        "images": inputs.dataset.digest,
        "weights": inputs.backbone.digest,
        "decoder's weights": checkpoint.digest(decoder.params) if decoder else "",
        "surrogate images": checkpoint.digest(inputs.surrogate),
    }


def plain_settings(method_name: str, cfg: RunConfig) -> dict[str, Any]:
    """All settings as YAML gives them back, with the method."""
    return yaml.safe_load(config.to_yaml(method_name, cfg))


def differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Settings that decide a run's numbers and differ: name -> 'name (now, not before)'."""
    names = [name for name in {**before, **now} if name not in FREE and before.get(name) != now.get(name)]
    return {name: config.differences({name: before.get(name)}, {name: now.get(name)})[0] for name in names}


def check_file(out: Path, method_name: str, cfg: RunConfig, may: Collection[str] = ()) -> None:
    """Check that settings are those of config.yaml, but for those that `may` be others.

    Raises:
      InputError: naming those that are not.
    """
    differ = differing(config.load_yaml(out / "config.yaml"), plain_settings(method_name, cfg))
    if set(differ) - set(may):
        raise InputError(f"resume: {str(out)!r} was run with other settings: {', '.join(differ.values())}")


def check_settings(
    before: dict[str, Any] | None, method_name: str, cfg: RunConfig, steps: Sequence[int], out: Path
) -> int:
    """Check that a run may go on with these settings.

    They are those of its checkpoints. Only the number of rounds of a task may be another, and only as long as
    no round has been played that would have been another one with it: the last round of a task closes it, so
    all must be within the first task and before its last round. The run then equals one that had the new
    number from its beginning.

    Args:
      before: `of_run` as the newest checkpoint has it; None: there is no checkpoint.
      method_name: of the run.
      cfg: its settings now.
      steps: rounds of which there are checkpoints.
      out: the run directory, for messages.

    Returns:
      The last round that it may go on from.

    Raises:
      InputError: naming the settings that differ, or why the number of rounds cannot be another.
    """
    if before is None:
        return max(steps, default=0)
    differ = differing(before["settings"], plain_settings(method_name, cfg))
    if set(differ) - {"rounds"}:
        raise InputError(
            f"resume: the run in {str(out)!r} began with other settings: {', '.join(differ.values())}"
        )
    if not differ:
        return max(steps, default=0)
    had = before["settings"]["rounds"]
    common = [step for step in steps if step < min(had, cfg.rounds)]
    if method_name not in METHODS:
        why = f"what {method_name} makes of their number is not known"
    elif not common:
        why = "no checkpoint from before the last round of its first task is left"
    else:
        return common[0]
    raise InputError(
        f"rounds: the run in {str(out)!r} has {had} a task, not {cfg.rounds}, and {why}; nearest: {had}"
    )


def check_digests(before: dict[str, Any], inputs: Inputs, out: Path) -> None:
    """Check that a run goes on with the files that it began with.

    Raises:
      InputError: naming the one that is another.
    """
    now = digests(inputs)
    for name, then in before["digests"].items():
        if now.get(name) != then:
            raise InputError(
                f"resume: the {name} are not what the run in {str(out)!r} began with: their sha256 is "
                f"{now.get(name, '')[:16]}, not {then[:16]}; put the old ones back"
            )
