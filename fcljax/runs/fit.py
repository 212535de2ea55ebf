"""Fits a run's training steps into the memory of its devices, by what the compiler says that they need.

First fewer clients side by side, which costs no operations; then microbatches, which cost another forward
pass. What is chosen becomes part of the run's settings, so that a run that is resumed computes as before.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from fcljax.data.store import Split
from fcljax.errors import InputError, gib
from fcljax.mesh import device_count
from fcljax.models.shapes import ViTConfig
from fcljax.runs.build import Experiment, assemble
from fcljax.runs.inputs import device_memory
from fcljax.runs.machine import Machine
from fcljax.runs.programs import evaluations_of, programs_of
from fcljax.settings import RunConfig

USABLE = 0.95  # of the memory: a program is not alone there, and memory is given in blocks
TRIALS = 8  # a compilation each


class Need(NamedTuple):
    """What one program needs on a device."""

    program: str
    """Its name."""
    total: int
    """Bytes, with the images that lie beside it."""
    temporary: int
    """Bytes of temporaries among them, which grow with the examples that are computed at a time."""


def on_devices(exp: Experiment, say_line: Callable[[str], None]) -> Experiment:
    """The experiment with settings that fit its accelerators; on a CPU as it is.

    Raises:
      InputError: as `fitted`.
    """
    machine = Machine(jax.default_backend(), exp.engine.mesh)
    if machine.backend == "cpu":
        return exp

    def again(settings: RunConfig) -> Experiment:
        return assemble(settings, exp.inputs, exp.scenario, exp.sizes, machine=machine)

    found, line = fit_memory(exp, device_memory(), again)
    if line:
        say_line(line)
    return found


def fit_memory(
    exp: Experiment,
    room: int,
    again: Callable[[RunConfig], Experiment],
    need_of: Callable[[Experiment], Need] | None = None,
) -> tuple[Experiment, str | None]:
    """The experiment with settings whose training steps fit, and a line that says what was chosen.

    Args:
      exp: as the settings ask for.
      room: bytes of the memory of a device.
      again: makes the experiment of other settings.
      need_of: what an experiment needs; None: `largest_need`.

    Returns:
      The experiment, whose settings name what was chosen; the line is None where it fits as it is.

    Raises:
      InputError: if nothing that may be changed is left: what is needed, what there is, the nearest settings.
    """
    need_of = need_of or largest_need
    asked = exp.settings
    first = need_of(exp)
    need = first
    changed = exp
    for _ in range(TRIALS):
        if need.total <= USABLE * room:
            break
        other = _smaller(changed, asked, need, int(USABLE * room))
        if other is None:
            raise InputError(explanation(changed, need.total, room))
        changed = again(other)
        need = need_of(changed)
    else:
        raise InputError(explanation(changed, need.total, room))
    if changed is exp:
        return exp, None
    chosen = ", ".join(
        f"--{name} {getattr(changed.settings, name)}"
        for name in ("lanes", "microbatch")
        if getattr(changed.settings, name) != getattr(asked, name)
    )
    said = f"memory: a step needs {gib(first.total)} of the device's {gib(room)}; chosen: {chosen}"
    return changed, f"{said} ({gib(need.total)})"


def largest_need(exp: Experiment) -> Need:
    """What the training steps of an experiment need, of those that need most.

    All programs of a round and of an evaluation are compiled, at the same time: the run, which finds them
    compiled, waits for the longest and not for one after the other.
    """
    of_round = list(programs_of(exp))
    beside = 0
    evaluations = ()
    if isinstance(exp.test, Split):
        beside = exp.test.input_bytes
        evaluations = evaluations_of(exp)
    loops = [program for program in of_round if program.steps]
    others = [program for program in of_round if not program.steps]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # traced here; XLA's compilers do not hold the interpreter's lock
        needs = [pool.submit(_need, program.name, program.lower(), beside) for program in loops]
        for program in (*others, *evaluations):  # where one fails, the run says why
            pool.submit(program.lower().compile)
    return max((need.result() for need in needs), key=lambda need: need.total)


def _need(name: str, lowered: jax.stages.Lowered, beside: int) -> Need:
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        temporary = exhausted(error)
        if temporary is None:
            raise
        return Need(name, temporary + beside, temporary)
    assert memory is not None  # every backend that runs have makes one
    return Need(name, peak(memory) + beside, memory.temp_size_in_bytes)


def peak(memory: Any) -> int:
    """Bytes that a compiled program needs at the same time, of its `memory_analysis`."""
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return given + memory.temp_size_in_bytes


def exhausted(error: Exception) -> int | None:
    """Bytes that a program or an allocation wanted, where an error of XLA says that memory is too small (0
    where it does not say how much); None for other errors."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    found = re.search(r"(?:Used |temporaries \(|allocate )([\d.]+) ?([KMGT]?)", str(error))
    return int(float(found[1]) * 2 ** (10 * " KMGT".index(found[2] or " "))) if found else 0


def _smaller(exp: Experiment, asked: RunConfig, need: Need, room: int) -> RunConfig | None:
    """Settings with which a step should need `room`, as far as temporaries grow with its examples; None: none
    are left."""
    devices = device_count(exp.engine.mesh)
    lanes = exp.engine.lanes.count
    share = max(0.0, (room - need.total + need.temporary) / max(1, need.temporary))
    if not asked.lanes and lanes > devices:
        fewer = max(1, min(int(share * lanes), lanes - 1) // devices)
        return dataclasses.replace(exp.settings, lanes=fewer * devices)
    size = exp.settings.microbatch or exp.batch_size
    if asked.microbatch or size == 1 or not divisible(exp):
        return None
    most = max(1, min(int(share * size), size - 1))
    return dataclasses.replace(exp.settings, microbatch=2 ** (most.bit_length() - 1), lanes=lanes)


def divisible(exp: Experiment) -> bool:
    """Whether a batch can be divided: not where a network trains on the statistics of the whole."""
    return exp.settings.adapter == "linear" or isinstance(exp.inputs.backbone.config, ViTConfig)


def explanation(exp: Experiment, need: int, room: int) -> str:
    """One line: what is needed, what there is, the nearest settings."""
    settings = exp.settings
    devices = device_count(exp.engine.mesh)
    size = settings.microbatch or exp.batch_size
    nearest = []
    if exp.engine.lanes.count > devices:
        nearest.append(f"--lanes {max(1, exp.engine.lanes.count // devices // 2) * devices}")
    if size > 1:
        nearest.append(f"--microbatch {size // 2}" if divisible(exp) else f"--batch-size {size // 2}")
    if isinstance(exp.train, Split):
        nearest.append(f"--data-budget {max(1, exp.train.input_bytes // 2**21)}")
    nearest.append("a smaller --image-size or --backbone")
    wanted = f"needs {gib(need)}" if need else "needs more"
    return f"memory: a step {wanted} and the device has {gib(room)}; nearest: {', '.join(nearest)}"


def explained(error: Exception, exp: Experiment) -> Exception:
    """The error; one that says that memory is too small as a line for the user."""
    need = exhausted(error)
    return error if need is None else InputError(explanation(exp, need, device_memory()))
