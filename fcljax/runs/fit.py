"""Fit a run's training steps into the memory of its devices, by the compiler's analysis.

First fewer lanes, which cost no operations; then microbatches, which cost another forward
pass. The choice becomes part of the run's settings, so that a resumed run computes the
same.
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

# share of a device's memory that a step may need: the programs themselves are in it
# too, and the allocator rounds up to blocks
USABLE = 0.95
# smaller settings to try; each costs a compilation
TRIALS = 8


class Need(NamedTuple):
    """Memory that one program needs on a device, in bytes."""

    program: str
    """Its name."""
    total: int
    """Of the program and of images on the device that it does not read."""
    temporary: int
    """Of temporaries, which grow with the number of examples per step; part of `total`."""


def on_devices(exp: Experiment, say_line: Callable[[str], None]) -> Experiment:
    """Return the experiment with settings that fit its accelerators; on CPUs it is unchanged.

    Raises:
      InputError: as `fit_memory`.
    """
    machine = Machine(jax.default_backend(), exp.engine.mesh)
    if machine.backend == "cpu":
        return exp

    def rebuild(settings: RunConfig) -> Experiment:
        return assemble(settings, exp.inputs, exp.scenario, exp.sizes, machine=machine)

    fitted, line = fit_memory(exp, device_memory(), rebuild)
    if line:
        say_line(line)
    return fitted


def fit_memory(
    exp: Experiment,
    memory: int,
    rebuild: Callable[[RunConfig], Experiment],
    need_of: Callable[[Experiment], Need] | None = None,
) -> tuple[Experiment, str | None]:
    """Return the experiment with settings whose training steps fit, and a line about them.

    Args:
      exp: with the settings that the user asked for.
      memory: of a device, in bytes.
      rebuild: returns the experiment with other settings.
      need_of: returns what an experiment needs; None: `largest_need`.

    Returns:
      The experiment; the line is None if `exp` fits.

    Raises:
      InputError: if no settings fit: what is needed, what there is, the nearest settings.
    """
    need_of = need_of or largest_need
    asked = exp.settings
    full_need = need_of(exp)
    need = full_need
    fitted = exp
    for _ in range(TRIALS):
        if need.total <= USABLE * memory:
            break
        settings = _smaller(fitted, asked, need, int(USABLE * memory))
        if settings is None:
            raise InputError(explanation(fitted, need.total, memory))
        fitted = rebuild(settings)
        need = need_of(fitted)
    # after the last trial the loop has not looked at the need
    if need.total > USABLE * memory:
        raise InputError(explanation(fitted, need.total, memory))
    if fitted is exp:
        return exp, None
    choices = []
    for name in ("lanes", "microbatch"):
        value = getattr(fitted.settings, name)
        if value != getattr(asked, name):
            choices.append(f"--{name} {value}")
    line = (
        f"memory: a step needs {gib(full_need.total)} of the device's {gib(memory)}; "
        f"chosen: {', '.join(choices)} ({gib(need.total)})"
    )
    return fitted, line


def largest_need(exp: Experiment) -> Need:
    """Return the largest need of an experiment's training steps.

    All programs of a round and of an evaluation are compiled in parallel. It returns when
    the training steps are compiled, with which the run begins; the others still compile
    into the cache. A run that needs one of them earlier waits for it
    (`compile_cache.compile_once`).
    """
    round_programs = list(programs_of(exp))
    test_bytes = 0
    evaluations = ()
    if isinstance(exp.test, Split):
        test_bytes = exp.test.input_bytes
        evaluations = evaluations_of(exp)
    # only the training steps decide: they are what lanes and microbatches make smaller
    loops = [program for program in round_programs if program.steps]
    others = [program for program in round_programs if not program.steps]
    pool = ThreadPoolExecutor(os.cpu_count())
    # traced in this thread; XLA compiles without the interpreter's lock
    needs = [pool.submit(_need, program.name, program.lower(), test_bytes) for program in loops]
    # Their errors are not read here: they appear when the run compiles them.
    for program in (*others, *evaluations):
        pool.submit(program.lower().compile)
    pool.shutdown(wait=False)
    return max((need.result() for need in needs), key=lambda need: need.total)


def _need(name: str, lowered: jax.stages.Lowered, test_bytes: int) -> Need:
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        temporary = exhausted(error)
        if temporary is None:
            raise
        return Need(name, temporary + test_bytes, temporary)
    assert memory is not None  # all supported backends have the analysis
    return Need(name, peak(memory) + test_bytes, memory.temp_size_in_bytes)


def peak(memory: Any) -> int:
    """Return the bytes that a program needs at the same time, from its `memory_analysis`."""
    # donated arguments are outputs too
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return arrays + memory.temp_size_in_bytes


def exhausted(error: Exception) -> int | None:
    """Return the bytes that a failed program or allocation wanted.

    It is 0 if XLA does not say how many, and None for errors that are not about memory.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    match = re.search(r"(?:Used |temporaries \(|allocate )([\d.]+) ?([KMGT]?)", str(error))
    if match is None:
        return 0
    exponent = 10 * " KMGT".index(match[2] or " ")
    return int(float(match[1]) * 2**exponent)


def _smaller(exp: Experiment, asked: RunConfig, need: Need, memory: int) -> RunConfig | None:
    """Return settings with which a step should need `memory` bytes; None: nothing can be smaller.

    It assumes that temporaries are proportional to the number of examples per step.
    """
    devices = device_count(exp.engine.mesh)
    lanes = exp.engine.lanes.count
    share = max(0.0, (memory - need.total + need.temporary) / max(1, need.temporary))
    # fewer lanes cost no operations, so they come first
    if not asked.lanes and lanes > devices:
        lanes_per_device = max(1, min(int(share * lanes), lanes - 1) // devices)
        return dataclasses.replace(exp.settings, lanes=lanes_per_device * devices)
    size = exp.settings.microbatch or exp.batch_size
    if asked.microbatch or size == 1 or not divisible(exp):
        return None
    most = max(1, min(int(share * size), size - 1))
    # a power of 2 divides the usual batches evenly
    microbatch = 2 ** (most.bit_length() - 1)
    return dataclasses.replace(exp.settings, microbatch=microbatch, lanes=lanes)


def divisible(exp: Experiment) -> bool:
    """Return whether a batch can be split into microbatches without changing the update.

    It cannot where a network trains with batch normalisation.
    """
    return exp.settings.adapter == "linear" or isinstance(exp.inputs.backbone.config, ViTConfig)


def explanation(exp: Experiment, need: int, memory: int) -> str:
    """Return one line: what is needed, what there is, the nearest settings."""
    devices = device_count(exp.engine.mesh)
    lanes = exp.engine.lanes.count
    size = exp.settings.microbatch or exp.batch_size
    nearest = []
    if lanes > devices:
        nearest.append(f"--lanes {max(1, lanes // devices // 2) * devices}")
    if size > 1:
        option = "batch-size"
        if divisible(exp):
            option = "microbatch"
        nearest.append(f"--{option} {size // 2}")
    if isinstance(exp.train, Split):
        nearest.append(f"--data-budget {max(1, exp.train.input_bytes // 2**21)}")
    nearest.append("a smaller --image-size or --backbone")
    needs = "needs more"
    if need:
        needs = f"needs {gib(need)}"
    return f"memory: a step {needs} and the device has {gib(memory)}; nearest: {', '.join(nearest)}"


def explained(error: Exception, exp: Experiment) -> Exception:
    """Return an error about memory as a line for the user, and others unchanged."""
    need = exhausted(error)
    if need is None:
        return error
    return InputError(explanation(exp, need, device_memory()))
