"""What an experiment makes of the machine: lanes and devices for its clients, memory for
the clients of a chunk, batch sizes that are worth compiling, and the attention kernel of
its chip.

A run asks for what it wants in its settings. What they leave open is chosen here so that
a round is short.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from fcljax.config import RunConfig
from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.federated.client_loop import Lanes, Shapes, batches_alone, slot_bytes
from fcljax.federated.schedule import Capacity, ClientPartition, capacities, largest_batch, paying_mesh
from fcljax.mesh import AnyMesh, device_count, with_batch
from fcljax.models.shapes import NO_KERNEL, AttentionKernel
from fcljax.models.weights.pretrained import Pretrained
from fcljax.runs.inputs import forward_flops
from fcljax.types import Method, Round

# FLOPs in the time that compiling a step takes on one core of a CPU: 10 s at 100 GFLOP/s,
# as for a ViT-Ti. A further batch size pays if it saves more than this.
COMPILING = 1e12
# a training step takes the time of so many forward passes: the backward pass counts twice
TRAINING = 3
# FLOPs of a step that keeps an accelerator busy, some milliseconds of its peak: with
# less, clients side by side cost no time. No chip has been measured yet.
FILLING = 1e12
# Memory on a device for the clients that one call of the compiled program plays, 256
# MiB. A call costs milliseconds, which would be noticeable if tiny clients had one
# each.
CHUNK_BYTES = 2**28
MOST_PER_CHUNK = 4096


class Machine(NamedTuple):
    """The target of compilation; the chips need not be present."""

    backend: str
    """As jax names it: cpu, gpu or tpu."""
    mesh: AnyMesh | None = None
    """Its devices; None: one device; an abstract one: shapes alone are asked for."""

    @property
    def devices(self) -> int:
        """Number of its devices."""
        return 1 if self.mesh is None else self.mesh.size


# ---- lanes and devices -----------------------------------------------------------------


def plan_lanes(
    settings: RunConfig,
    method: Method,
    partitions: list[ClientPartition],
    backbone: Pretrained,
    machine: Machine,
) -> tuple[Lanes, AnyMesh | None]:
    """Return the lanes and the devices that they share: what the settings ask for, else what pays.

    A CPU gets one lane for each device: on a ViT-Ti that is as fast as 4 vmapped lanes
    and holds one client at a time, though small networks gain from 4 lanes
    (`experiments/bench_engine.py lanes`). An accelerator gets as many as shorten a round,
    which for a large network is one for each device. If there are more devices than
    clients for them, several share the batches of one.

    Args:
      settings: resolved.
      method: what is run.
      partitions: one for each round of the run.
      backbone: the network, for the FLOPs of a step.
      machine: what the experiment is compiled for.

    Raises:
      InputError: for lanes that the devices cannot share evenly, or devices that the
        batches cannot.
    """
    _check_batch_devices(settings.batch_devices, machine.devices)
    lanes = settings.lanes
    batch_devices = settings.batch_devices
    if machine.backend == "cpu" or not method.rounds:
        batch_devices = batch_devices or 1
        lanes = lanes or machine.devices // batch_devices
    elif not lanes or not batch_devices:
        paying_lanes, batch_devices = _shortest_round(settings, method, partitions, backbone, machine.devices)
        lanes = lanes or paying_lanes
    # the devices that share a batch act as one
    groups = machine.devices // batch_devices
    _check_lanes(lanes, groups)
    mode = settings.lane_mode
    if mode == "auto":
        # with one lane for each device there is nothing to batch
        mode = "loop" if machine.backend == "cpu" or lanes == groups else "vmap"
    mesh = machine.mesh
    if mesh is not None and batch_devices > 1:
        mesh = with_batch(mesh, batch_devices)
    return Lanes(lanes, mode), mesh


def _shortest_round(
    settings: RunConfig,
    method: Method,
    partitions: list[ClientPartition],
    backbone: Pretrained,
    devices: int,
) -> tuple[int, int]:
    """Return the number of lanes, and of devices that share a batch, with which rounds on
    an accelerator are shortest."""
    most_examples = max(int(partition.count.max()) for partition in partitions)
    batch_size = largest_batch(settings.batch_size, most_examples)
    if settings.batch_devices:
        sharing = [settings.batch_devices]
    elif settings.adapter == "full":
        # a network that trains may need the statistics of its whole batch
        sharing = [1]
    else:
        # at most one device for each example, in groups of equal size, and with lanes
        # that the user has set for each group as many
        sharing = [
            size
            for size in range(1, batch_size + 1)
            if devices % size == 0 and settings.lanes % (devices // size) == 0
        ]
    step_flops = TRAINING * forward_flops(backbone) * batch_size
    return paying_mesh(
        method.rounds[0].program,
        partitions,
        devices,
        step_flops / FILLING,
        settings.participation,
        sharing or [1],
    )


def _check_batch_devices(batch_devices: int, devices: int) -> None:
    if batch_devices and devices % batch_devices:
        divisors = [size for size in range(1, min(batch_devices, devices) + 1) if devices % size == 0]
        raise InputError(
            f"batch_devices: {batch_devices} do not divide {devices} devices; nearest valid value: "
            f"{max(divisors)}"
        )


def _check_lanes(lanes: int, groups: int) -> None:
    if lanes % groups:
        raise InputError(
            f"lanes: {lanes} lanes cannot be split over {groups} devices; nearest valid value: "
            f"{-(-lanes // groups) * groups}"
        )


# ---- the shapes of a run ---------------------------------------------------------------


def plan_shapes(
    method: Method,
    shapes: tuple[Shapes, ...],
    partitions: list[ClientPartition],
    data: Split | Host,
    lanes: Lanes,
    mesh: AnyMesh | None,
    backbone: Pretrained,
    participation: float,
) -> tuple[Capacity, ...]:
    """Return the static shapes of a run, one for each of the method's rounds.

    Args:
      method: what is run.
      shapes: of its programs.
      partitions: one for each round of the run.
      data: the training images.
      lanes, mesh: of `plan_lanes`.
      backbone: the network, for the FLOPs of a step.
      participation: fraction of the clients that take part in a round, or their number.
    """
    devices = device_count(mesh)
    most_examples = max(int(partition.count.max()) for partition in partitions)
    slots = clients_per_chunk(method, shapes, most_examples, image_bytes(data), lanes.count // devices)
    fit = partial(capacities, method, partitions, lanes.count, slots, participation, devices=devices)
    return _with_widths(fit, lanes, backbone)


def _with_widths(fit: Callable[..., tuple[Capacity, ...]], lanes: Lanes, backbone: Pretrained) -> tuple:
    """Return the run's static shapes, with batch sizes that are worth compiling."""
    if not batches_alone(lanes):
        return fit(worth=np.inf)
    # As if compiling cost nothing: most partitions have no use for a further batch size
    # even then, and no FLOPs need to be counted, which takes a trace of the network.
    free = fit(worth=1.0)
    if all(len(widths) == 1 for capacity in free for widths in capacity.widths):
        return free
    return fit(worth=COMPILING / (TRAINING * forward_flops(backbone)))


def clients_per_chunk(
    method: Method, shapes: tuple[Shapes, ...], examples: int, image: int, lanes: int
) -> int:
    """Return how many clients one call of the compiled program plays on a device: those
    whose state, gathered uploads and replay buffers fit into `CHUNK_BYTES`, at least one
    for each lane, at most `MOST_PER_CHUNK`.

    Args:
      method: the method.
      shapes: of its programs.
      examples: the most that a client has.
      image: bytes of one of them.
      lanes: of one device.
    """

    def client_bytes(method_round: Round, of_round: Shapes) -> int:
        program = method_round.program
        indices = 4 * examples * sum(phase.view.epochs for phase in program.phases)
        replayed = 0
        if program.replay_buffer:
            replayed = jax.eval_shape(program.replay_buffer, of_round.state).size
        return slot_bytes(of_round) + indices + replayed * image

    largest = max(map(client_bytes, method.rounds, shapes), default=0)
    return max(lanes, min(MOST_PER_CHUNK, CHUNK_BYTES // max(1, largest)))


def image_bytes(data: Split | Host) -> int:
    """Return the bytes of an image as it is stored."""
    split = data.take(np.zeros(1, np.int32)) if isinstance(data, Host) else data
    return split.example_bytes


# ---- the attention kernel --------------------------------------------------------------


def kernel_on(machine: Machine) -> AttentionKernel:
    """Return the attention kernel of a program: on TPUs and on NVIDIA's large GPUs."""
    several = machine.mesh is not None
    if machine.backend == "tpu":
        return AttentionKernel("tpu", single_device=several)
    if machine.backend == "gpu" and _holds_kernel():
        return AttentionKernel("gpu", single_device=several)
    return NO_KERNEL


def _holds_kernel() -> bool:
    """Return whether the GPU, if one is here, has the shared memory of the kernel: A100,
    H100, H200, B200, by their compute capabilities; others have at most 99 KiB. And
    whether jax still has Pallas for Triton, in which the kernel is written."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return False
    return getattr(jax.devices()[0], "compute_capability", "9.0") in ("8.0", "9.0", "10.0")
