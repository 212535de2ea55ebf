"""The memory of a run. The least that it needs on a device is known before anything is compiled: when an
allocation fails later, XLA or the operating system ends the process. On the host, what compilers have freed
goes back to the system."""

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

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event after XLA has compiled a program
LONG = 0.5  # seconds: a shorter compilation leaves little memory behind


def check_memory(exp: Experiment) -> None:
    """Check that the run can fit into the memory of the first device.

    Raises:
      InputError: naming the least that it needs, what there is, and the setting to lower.
    """
    parts = least(exp)
    room = device_memory()
    need = sum(size for size, _ in parts.values())
    if need <= room:
        return
    name, (size, setting) = max(parts.items(), key=lambda item: item[1][0])
    raise InputError(
        f"memory: this run needs at least {gib(need)}, of which {gib(size)} are {name}; the device has "
        f"{gib(room)}; nearest: a smaller {setting}"
    )


def least(exp: Experiment) -> dict[str, tuple[int, str]]:
    """Bytes that a run needs at the same time whatever the compiler does: what they are for -> their number,
    and the setting that decides it."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    clients = jax.eval_shape(
        lambda server, key: init_clients(exp.method, server, exp.sizes.clients, key), server, exp.key
    )
    resident = [split.input_bytes for split in (exp.train, exp.test) if isinstance(split, Split)]
    one = _forward(exp)
    devices = device_count(exp.engine.mesh)
    batch = exp.engine.lanes.count * (exp.settings.microbatch or exp.batch_size)
    if jax.default_backend() != "cpu" and not exp.settings.microbatch:
        batch = 1  # `fit` chooses lanes and microbatches
    return {
        "the network": (num_bytes(exp.frozen), "--backbone"),
        "images on the device": (sum(resident), "--data-budget"),
        "the server's state": (num_bytes(server), "number in the options of method or adapter"),
        "the clients' states": (-(-num_bytes(clients) // devices), "number of --clients"),
        "a training step": (batch * one, "--batch-size, --image-size or number of --lanes"),
        "an evaluation step": (exp.settings.eval_batch_size * one, "--eval-batch-size or --image-size"),
    }


def _forward(exp: Experiment) -> int:
    """Bytes of one image as the network's input and of the largest product in the forward pass over it."""
    traced, image = forward_pass(exp.inputs.backbone)
    return num_bytes(image) + max(_products(traced.jaxpr.jaxpr), default=0)


def _products(jaxpr: Any) -> Iterator[int]:
    """Bytes of the results of matrix products and convolutions: the compiler fuses other things away."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield sum(math.prod(out.aval.shape) * out.aval.dtype.itemsize for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)


@contextlib.contextmanager
def given_back_by_compilers() -> Iterator[None]:
    """While the context lasts, the C library gives free memory back to the system after each long
    compilation. On its own it keeps hundreds of MB of free blocks, which the next large program does not
    fit. On a system without glibc nothing changes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def compiled(event: str, duration_secs: float, **_: object) -> None:
        if trim and event == COMPILED and duration_secs >= LONG:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
