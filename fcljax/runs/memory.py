"""The memory of a run: a check before anything is compiled, and memory that compilers freed.

The check is of the least that a run needs on a device. Without it XLA or the operating
system would end the process at a later allocation.
"""

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from fcljax.data.store import Split
from fcljax.errors import InputError, gib
from fcljax.federated.communication import num_bytes
from fcljax.federated.engine import init_clients
from fcljax.mesh import device_count
from fcljax.runs.build import Experiment
from fcljax.runs.inputs import device_memory, forward_pass

# the event that jax sends after a compilation
COMPILED = "/jax/core/compile/backend_compile_duration"
LONG = 0.5  # seconds; a shorter compilation leaves little memory behind


def check_memory(exp: Experiment) -> None:
    """Check that the run can fit into the memory of the first device.

    Raises:
      InputError: naming the least that it needs, what there is, and the setting to lower.
    """
    parts = least(exp)
    memory = device_memory()
    need = sum(size for size, _ in parts.values())
    if need <= memory:
        return
    # the largest part is what a user can save most at
    name, (size, setting) = max(parts.items(), key=lambda item: item[1][0])
    raise InputError(
        f"memory: this run needs at least {gib(need)}, of which {gib(size)} are {name}; the device has "
        f"{gib(memory)}; nearest: a smaller {setting}"
    )


def least(exp: Experiment) -> dict[str, tuple[int, str]]:
    """Return what a run needs at the same time, whatever the compiler does.

    Returns:
      Purpose -> bytes, and the setting that decides them.
    """
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    clients = jax.eval_shape(
        lambda server, key: init_clients(exp.method, server, exp.sizes.clients, key), server, exp.key
    )
    # a split of type Host stays on the host, and only windows of it are on the device
    resident = [split.input_bytes for split in (exp.train, exp.test) if isinstance(split, Split)]
    image_bytes = _forward(exp)
    devices = device_count(exp.engine.mesh)
    batch = exp.engine.lanes.count * (exp.settings.microbatch or exp.batch_size)
    # on accelerators `fit` may lower lanes and microbatch to 1, so more would refuse
    # runs that fit
    if jax.default_backend() != "cpu" and not exp.settings.microbatch:
        batch = 1
    return {
        "the network": (num_bytes(exp.frozen), "--backbone"),
        "images on the device": (sum(resident), "--data-budget"),
        "the server's state": (num_bytes(server), "number in the options of method or adapter"),
        "the clients' states": (-(-num_bytes(clients) // devices), "number of --clients"),
        "a training step": (batch * image_bytes, "--batch-size, --image-size or number of --lanes"),
        "an evaluation step": (
            exp.settings.eval_batch_size * image_bytes,
            "--eval-batch-size or --image-size",
        ),
    }


def _forward(exp: Experiment) -> int:
    """Return the bytes of one input image and of the largest product in its forward pass."""
    traced, image = forward_pass(exp.inputs.backbone)
    return num_bytes(image) + max(_products(traced.jaxpr.jaxpr), default=0)


def _products(jaxpr: Any) -> Iterator[int]:
    """Yield the bytes of results of matrix products and convolutions.

    The compiler fuses other operations, so that their results may never be in memory.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield sum(math.prod(out.aval.shape) * out.aval.dtype.itemsize for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)


@contextlib.contextmanager
def trim_after_compilation() -> Iterator[None]:
    """Return free memory to the system after each long compilation in this context.

    glibc keeps hundreds of MB of free blocks, into which the next large program does not
    fit. On systems without glibc nothing happens.
    """
    trim = None
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def compiled(event: str, duration_secs: float, **_: object) -> None:
        if trim and event == COMPILED and duration_secs >= LONG:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
