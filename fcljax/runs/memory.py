"""What a run needs of a device's memory at the least, before anything is compiled: XLA ends the process where
an allocation fails, or the system does."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from fcljax.config import RunConfig
from fcljax.data.store import Split
from fcljax.errors import InputError
from fcljax.federated.communication import num_bytes
from fcljax.federated.engine import init_clients
from fcljax.runs.build import Experiment
from fcljax.runs.inputs import device_memory, forward_pass


def check(exp: Experiment, cfg: RunConfig) -> None:
    """Check that the run can fit into the first device.

    Raises:
      InputError: saying how much it needs at the least, how much there is, and which setting to lower.
    """
    parts, room = least(exp, cfg), device_memory()
    need = sum(size for size, _ in parts.values())
    if need <= room:
        return
    name, (size, setting) = max(parts.items(), key=lambda item: item[1][0])
    gib = lambda number: f"{number / 2**30:,.1f} GiB"
    raise InputError(
        f"memory: this run needs {gib(need)} at the least, of which {gib(size)} are {name}; the device has "
        f"{gib(room)}; nearest: a smaller {setting}"
    )


def least(exp: Experiment, cfg: RunConfig) -> dict[str, tuple[int, str]]:
    """Bytes that a run holds at one time whatever the compiler does, by what they are, with the setting that
    decides over them."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    clients = jax.eval_shape(
        lambda server, key: init_clients(exp.method, server, cfg.clients, key), server, exp.key
    )
    resident = [split.image for split in (exp.train, exp.test) if isinstance(split, Split)]
    one, batch = _forward(exp), exp.engine.lanes.count * cfg.batch_size
    return {
        "the network": (num_bytes(exp.frozen), "--backbone"),
        "images on the device": (sum(image.nbytes for image in resident), "--data-budget"),
        "what the server has": (num_bytes(server), "number in the options of method or adapter"),
        "what the clients keep": (num_bytes(clients), "number of --clients"),
        "a training step": (batch * one, "--batch-size, --image-size or number of --lanes"),
        "an evaluation step": (cfg.eval_batch_size * one, "--eval-batch-size or --image-size"),
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
