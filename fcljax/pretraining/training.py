"""Steps, schedules, letters, progress bars and file checks of the commands that train
weights."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fcljax.data.glyphs import Fields, Style, sample_glyphs
from fcljax.errors import InputError
from fcljax.files import check_file
from fcljax.options import fields_of
from fcljax.terminal import progress_bar
from fcljax.types import PyTree

# a seed of no experiment: choices that are made on these images see none of an
# experiment's
VALIDATION_SEED = 1_000_003
_EVERY = 20  # steps between updates of the progress bar


def optimiser_step(
    optimiser: optax.GradientTransformation,
    objective: Callable,
    params: PyTree,
    opt: optax.OptState,
) -> tuple[PyTree, optax.OptState, PyTree]:
    """Do one step of an optimiser.

    Args:
      optimiser: the optimiser.
      objective: params -> (loss, metrics).
      params: trainable parameters.
      opt: the optimiser's state.

    Returns:
      The new parameters, the optimiser's new state, and the metrics.
    """
    (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
    updates, opt = optimiser.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, metrics


def warmup_cosine(peak: float, share: float, steps: int) -> optax.Schedule:
    """Make a schedule: a linear rise from 0 in this share of the steps, then half a
    cosine to 0."""
    # optax wants more steps in all than of warm-up: at least one is left for the decay
    return optax.warmup_cosine_decay_schedule(0.0, peak, min(round(steps * share), steps - 1), steps)


def as_stored(params: PyTree) -> PyTree:
    """Round parameters to float16, the type of the written files."""
    # back to float32, in which the network computes: the validation sees what a run loads
    return jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params)


def fresh_letters(
    fields: Fields, seed: int, step: int, batch_size: int, size: int, style: Style
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the letters of a step, which depend on (seed, step) alone.

    Returns:
      Grey levels uint8 [batch_size, size, size] and classes int64 [batch_size].
    """
    # no state between steps: a resumed training draws the same letters
    rng = np.random.default_rng([seed, step])
    label = rng.integers(0, len(fields.number), batch_size)
    return sample_glyphs(fields, label, rng, size, style), label


@contextlib.contextmanager
def training_bar(
    name: str,
    steps: int,
    steps_done: int,
    *metrics: str,
) -> Iterator[Callable[..., None]]:
    """Show a progress bar with these metrics.

    Yields:
      show(step, *values): each value is a list of scalars or vectors, whose mean is
        shown. Values are read only when the bar is updated, every few steps, so that JAX
        can compute in the background.
    """
    label = "  ".join(f"{metric} {{task.fields[{metric}]:.3f}}" for metric in metrics)

    def fields(values: Sequence[float]) -> dict[str, Any]:
        return dict(zip(metrics, values, strict=True))

    def show(step: int, *values: Sequence[Any]) -> None:
        # reading a metric waits for the device, so it is read rarely
        if step % _EVERY == 0 or step == steps:
            means = [np.mean(jax.device_get(value), axis=0) for value in values]
            bar.update(task, completed=step, **fields(np.hstack(means).tolist()))

    with progress_bar(name, label) as bar:
        unknown = [float("nan")] * len(metrics)
        task = bar.add_task("", total=steps, completed=steps_done, **fields(unknown))
        yield show


def check_weights_file(out: Path) -> None:
    """Check, before anything slow, that weights can be written to `out`.

    Raises:
      InputError: for another suffix, a folder of that name, or one that cannot be written.
    """
    out = Path(out)
    # the suffix decides how a run reads the file
    if out.suffix != ".safetensors":
        raise InputError(
            f"out: {str(out)!r} must end in .safetensors; nearest: {str(out.with_suffix('.safetensors'))!r}"
        )
    check_file(out)


def command_line(command: str, config: object, *without: str) -> str:
    """Return the command line that repeats a training.

    Args:
      command: for example "pretrain".
      config: its dataclass of options.
      without: options that do not influence the weights.
    """
    words = ["fcljax", command]
    # only what differs from the defaults needs to be typed
    for field in fields_of(type(config)):
        name = field.name.replace("_", "-")
        value = getattr(config, field.name)
        if field.name in without or value == field.default:
            continue
        if isinstance(value, bool):
            if not value:
                name = f"no-{name}"
            words.append(f"--{name}")
        else:
            words.append(f"--{name} {value}")
    return " ".join(words)
