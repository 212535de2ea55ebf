"""Compile the programs of a round for a chip that is not present, by XLA's description of it.

Nothing runs. Memory is what the compiler plans. Operations and traffic are counted in the
compiled program, kernel by kernel. A program's time is the sum over its kernels, which
run one after the other, at the rates that kernels were measured to reach on a chip, or
are assumed to (`Rates`). This needs the optional dependency `accelerators-aot` (libtpu
for TPUs, jax's CUDA plugin for GPUs; neither needs a driver).
"""

import itertools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from fcljax.checks.traffic import Kernel, kernels
from fcljax.errors import InputError, choose, install_command
from fcljax.mesh import compiler_options, mesh_of
from fcljax.models.shapes import Dtype
from fcljax.runs.build import Experiment
from fcljax.runs.fit import exhausted, peak
from fcljax.runs.machine import Machine
from fcljax.runs.programs import Placement, RoundProgram, evaluations_of, programs_of


class Rates(NamedTuple):
    """The rates that kernels reach on a chip."""

    products: Mapping[Dtype, float]
    """Operations per second of large matrix products, by the format of their factors."""
    bandwidth: float
    """Bytes per second of a copy."""
    attention: Mapping[str, float]
    """Operations per second of the attention kernel, forward and backward."""
    erf: float = math.inf
    """Values of erf per second. XLA for TPUs has none left in its programs."""
    exponentials: float = math.inf
    """Values of exp per second."""
    measured: bool = False
    """Whether they were measured on the chip."""

    @property
    def uncertainty(self) -> tuple[float, float]:
        """Return the factors between which a time may be of what these rates give.

        FPPL's step of 48 ms on an H200 is predicted within a tenth, other programs were
        not measured there; of assumed rates no prediction was ever checked.
        """
        return (0.75, 1.35) if self.measured else (0.65, 2.0)

    def seconds(self, kernel: Kernel) -> float:
        """Return the time of all calls of a kernel: that of what takes it longest."""
        rate = self.products[kernel.dtype]
        if kernel.attention:
            rate = self.attention[kernel.attention]
        # the same units compute both functions, one after the other
        special = kernel.erf / self.erf + kernel.exponentials / self.exponentials
        return kernel.calls * max(kernel.flops / rate, kernel.traffic / self.bandwidth, special)


def _of_hopper(bandwidth: float, measured: bool) -> Rates:
    """Return the rates of an H200 (docs/accelerators.md, "Measured on a GPU").

    An H100 has the same processor. A copy is assumed to reach five sixths of the memory's peak.
    """
    return Rates(
        products={"bfloat16": 707e12, "tf32": 303e12, "float32": 51e12},
        bandwidth=bandwidth * 5 / 6,
        # of 15.3 and 38.2 GFLOP for 128 images of 197 tokens in 12 heads of 64: 0.168
        # and 0.552 ms
        attention={"forward": 91e12, "backward": 69e12},
        # GELU of 128 x 197 x 3072 values and its gradient, which needs both functions:
        # 0.144 and 0.195 ms
        erf=538e9,
        exponentials=1.5e12,
        measured=measured,
    )


def _of_tpu(flops: float, bandwidth: float) -> Rates:
    """Return rates assumed for a TPU, by the shares of its peaks that an H200 reaches of its own.

    A product of float32 is six of bfloat16, and one of tf32 three. Heads of 64 channels
    fill half of the columns of a product.
    """
    reached = 0.7 * flops
    return Rates(
        products={"bfloat16": reached, "tf32": reached / 3, "float32": reached / 6},
        bandwidth=bandwidth * 5 / 6,
        attention={"forward": reached / 2, "backward": reached / 2},
    )


class Chip(NamedTuple):
    """A chip by its vendor's figures, and what kernels reach of them."""

    kind: str
    """tpu or gpu."""
    topology: str
    """libtpu's name of the smallest machine with the chip; for a GPU, its name in `_target`."""
    memory: int
    """Bytes available to programs."""
    flops: float
    """Peak of dense bfloat16 operations per second."""
    bandwidth: float
    """Peak of bytes per second between chip and memory."""
    rates: Rates
    """Of kernels."""
    devices: int = 1
    """Chips that share the clients."""


def _tpu(topology: str, gib: float, flops: float, bandwidth: float, devices: int = 1) -> Chip:
    return Chip("tpu", topology, int(gib * 2**30), flops, bandwidth, _of_tpu(flops, bandwidth), devices)


def _gpu(name: str, memory: int, bandwidth: float, measured: bool) -> Chip:
    return Chip("gpu", name, memory, 989e12, bandwidth, _of_hopper(bandwidth, measured))


CHIPS = {
    "v5e": _tpu("v5e:2x2", 15.75, 197e12, 819e9),
    "v5e-16": _tpu("v5e:4x4", 15.75, 197e12, 819e9, 16),
    "v6e": _tpu("v6e:2x2", 31.25, 918e12, 1640e9),
    "v5p": _tpu("v5p:2x2x1", 95.74, 459e12, 2765e9),
    "h100": _gpu("h100", 84942979072, 3352e9, measured=False),
    "h200": _gpu("h200", 151397597184, 4800e9, measured=True),
}


class Footprint(NamedTuple):
    """The compiler's figures of one program on one chip."""

    program: str
    """`RoundProgram.name`."""
    memory: int
    """Bytes of arguments, results and temporaries at the same time."""
    temporary: int
    """Bytes of temporaries alone."""
    flops: float
    """Operations of one call, with one step of the loop over steps."""
    traffic: float
    """Bytes read and written by the same call. The compiler for GPUs counts neither: then
    these are those of `kernels`, and `flops` are the products of the program as
    written."""
    useful: float
    """Matrix products and convolutions of the program as written, over the operations of
    the compiled one; 0 without products."""
    collectives: dict[str, int]
    """Instructions that exchange data between chips, by kind."""
    seconds: float
    """CPU seconds of the compiler."""
    steps: int
    """`RoundProgram.steps`."""
    kernels: tuple[Kernel, ...] = ()
    """The kernels of one call, whose bytes add up to `traffic`."""

    def step_seconds(self, chip: Chip) -> float:
        """Return the expected seconds of one call, with one step of the loop over steps."""
        return sum(map(chip.rates.seconds, self.kernels))

    def round_seconds(self, chip: Chip) -> float:
        """Return the expected seconds of a round's calls."""
        return max(1, self.steps) * self.step_seconds(chip)

    def share(self, chip: Chip) -> float:
        """Return the share of the chip's peak operations that the program has in the
        expected time; 0: it has no kernels, since it does not fit."""
        seconds = self.step_seconds(chip)
        return self.flops / seconds / chip.flops if seconds else 0.0


# ---- chips -----------------------------------------------------------------------------


def machine(name: str) -> tuple[Machine, Placement]:
    """Return the chips of this name as jax describes them.

    Raises:
      InputError: for an unknown name, or without the compiler for it.
    """
    chip = CHIPS[choose("chip", name, CHIPS)]
    devices = (_tpus if chip.kind == "tpu" else _gpus)(chip)
    if chip.devices == 1:
        return Machine(chip.kind), Placement(SingleDeviceSharding(devices[0]))
    return Machine(chip.kind, mesh_of(devices[: chip.devices])), Placement()


def _tpus(chip: Chip) -> list[Any]:
    """Return descriptions of the TPUs of the smallest machine."""
    from jax.experimental import topologies

    _needs("libtpu")
    # Without these libtpu waits for a cloud's metadata server, and refuses a second
    # process, as if there were chips to share. A user's own settings win.
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_LOG_DIR": "disabled",
    }
    os.environ.update({key: value for key, value in settings.items() if key not in os.environ})
    return list(topologies.get_topology_desc(topology_name=chip.topology, platform="tpu").devices)


def _gpus(chip: Chip) -> list[Any]:
    """Return descriptions of the GPUs."""
    from jax.experimental import topologies

    _needs("jax-cuda13-plugin")
    jax.devices()  # jax looks for plugins when it is first asked
    shape = f"1x1x{chip.devices}"
    topology = topologies.get_topology_desc("", "cuda", target_config=_target(chip), topology=shape)
    return list(topology.devices)


def _needs(package: str) -> None:
    """Refuse a chip whose compiler is not installed."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        raise InputError(
            f"chip: {package} is needed to compile for it and is not installed; install it with: "
            f"{install_command('accelerators-aot')}"
        ) from None


def _target(chip: Chip) -> str:
    """Return the description of a Hopper GPU, as in openxla/xla's target_config/specs."""
    clock = 3750000 if chip.topology == "h200" else 2619000  # kHz, of the memory
    full = 1.8295201  # GHz
    boost = 1.98  # GHz
    scalar = [(4, 64, 1), (8, 64, 1), (10, 128, 2), (11, 128, 1), (12, 64, 1), (16, 128, 2)]
    wide = [2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36]
    matrix = [(kind, full, 1024) for kind in wide]
    matrix += [(10, full, 512), (11, full, 256), (12, boost, 32), (16, full, 512)]

    def rate(kind: int, clock_rate: float, units: int, operations: int) -> str:
        return (
            f"rate_infos {{ key: {kind} value {{ clock_rate_ghz: {clock_rate} units_per_core: {units} "
            f"ops_per_clock: {operations} }} }} "
        )

    scalars = "".join(rate(kind, boost, units, operations) for kind, units, operations in scalar)
    matrices = "".join(rate(kind, ghz, 4, operations) for kind, ghz, operations in matrix)
    label = f"NVIDIA {chip.topology.upper()}"
    return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32
shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: {chip.memory} shared_memory_per_block_optin: 232448
cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
registers_per_core_limit: 65536 registers_per_block_limit: 65536
scalar_unit_description {{ {scalars} }} matrix_unit_description {{ {matrices} }}
thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
platform_version: "Compute Capability 9.0a" device_address_bits: 64 pcie_bandwidth: 34359738368
ecc_enabled: true name: "{label}"
model_str: "sm_9.0a with {chip.memory}B RAM, 132 cores, 1980000KHz clock, {clock}KHz mem clock, 52428800B L2$"
driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
dnn_version: "9.10.0" device_interconnect_info {{ active_links: 18 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{label}"
"""


# ---- programs --------------------------------------------------------------------------


def reports(exp: Experiment, placement: Placement, kind: str, only: str = "") -> Iterator[Footprint]:
    """Yield the compiler's figures of the programs of a round and of an evaluation.

    Args:
      exp: made for `machine(name)`.
      placement: of its arguments.
      kind: of the chip.
      only: a regular expression; programs with other names are left out.
    """
    for program in itertools.chain(programs_of(exp, placement), evaluations_of(exp, placement)):
        if re.search(only, program.name):
            yield report(program, kind)


def report(program: RoundProgram, kind: str) -> Footprint:
    """Compile a program for a chip of this kind, and return its figures."""
    began = time.process_time()
    with traced_for(_device_of(program)):
        traced = program.trace()
    written = product_flops(traced.jaxpr.jaxpr)
    # compilers count the body of a loop once: over blocks, microbatches or lanes. The
    # ratio of the written program's products with and without repetition corrects this.
    times = written / product_flops(traced.jaxpr.jaxpr, repeated=False) if written else 1.0
    try:
        compiled = traced.lower().compile(compiler_options(kind) | _AS_MEASURED.get(kind, {}))
    # a program that does not fit is a result: its need is in the compiler's message, and
    # the caller looks for smaller settings
    except jax.errors.JaxRuntimeError as error:
        need = exhausted(error)
        if need is None:
            raise
        seconds = time.process_time() - began
        return Footprint(program.name, need, need, 0.0, 0.0, 0.0, {}, seconds, program.steps)
    seconds = time.process_time() - began
    counted = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    # jax's type allows None for backends without this analysis; both of ours have it
    assert memory is not None
    flops = times * float(counted.get("flops", 0.0)) or written
    text = compiled.as_text() or ""
    # `kernels` takes the length of loops from the module
    program_kernels = kernels(text)
    in_kernels = float(sum(kernel.calls * kernel.traffic for kernel in program_kernels))
    moved = times * float(counted.get("bytes accessed", 0.0)) or in_kernels
    # the compiler for TPUs counts the padding of tiles too, which shapes do not show: it
    # is spread over the kernels in proportion
    padding = moved / max(in_kernels, 1.0)
    return Footprint(
        program=program.name,
        memory=peak(memory),
        temporary=memory.temp_size_in_bytes,
        flops=flops,
        traffic=moved,
        useful=written / flops if written and flops else 0.0,
        collectives=dict(Counter(_COLLECTIVE.findall(text))),
        seconds=seconds,
        steps=program.steps,
        kernels=tuple(kernel._replace(traffic=round(padding * kernel.traffic)) for kernel in program_kernels),
    )


def _device_of(program: RoundProgram) -> Any:
    """Return a device on which a program's arguments lie; None: jax's default device."""
    shapes = [x for x in jax.tree.leaves(program.arguments) if isinstance(x, jax.ShapeDtypeStruct)]
    return next((device for x in shapes if x.sharding for device in x.sharding.device_set), None)


def traced_for(device: Any) -> AbstractContextManager[None]:
    """Return the context in which kernels are traced for a GPU that is not present."""
    # without a description jax, from 0.11 on, would ask the device that is present
    if device is None or device.platform != "gpu":
        return nullcontext()
    described = AbstractDevice(device.device_kind, device.core_count, "gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=described))


# With a GPU the compiler tries kernels for each product, and on an H200 takes cuBLAS's
# for most. Without one it would take Triton's throughout, which have no tiles for some
# shapes.
_AS_MEASURED: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)


def product_flops(jaxpr: Any, repeated: bool = True) -> float:
    """Return the operations of a traced program's matrix products and convolutions.

    A backward pass computes gradients of frozen weights too; nobody uses them, so they do
    not count. A loop of known length counts as often as it runs, any other loop once, and
    a conditional by its largest branch.

    Args:
      jaxpr: the program.
      repeated: False counts every loop once, as compilers do.
    """
    # without dead code: gradients that nobody reads
    used: Any = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    total = 0.0
    for equation in used.eqns:
        if equation.primitive.name == "dot_general":
            (inner, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            out = equation.outvars[0].aval.shape
            total += 2.0 * math.prod(left[axis] for axis in inner) * math.prod(out)
        if equation.primitive.name == "conv_general_dilated":
            total += _convolution_flops(equation)
        kernel = equation.primitive.name == "pallas_call"
        # the kernel's own estimate, since its body also computes padding
        if kernel and equation.params["cost_estimate"]:
            total += equation.params["cost_estimate"].flops
            continue
        times = equation.params["length"] if repeated and equation.primitive.name == "scan" else 1
        inside = [product_flops(inner_jaxpr, repeated) for inner_jaxpr in jaxprs_in_params(equation.params)]
        # without an estimate: the body runs once for each cell of the grid
        if kernel:
            times = math.prod(equation.params["grid_mapping"].grid)
        total += times * (max(inside) if equation.primitive.name == "cond" else sum(inside))
    return total


def _convolution_flops(equation: Any) -> float:
    """Return a convolution's operations.

    The gradient of a stride dilates its input with zeros; products with these do not count.
    """
    kernel = equation.invars[1].aval.shape
    out = equation.outvars[0].aval.shape
    params = equation.params
    # rhs_spec[0] is the axis of output channels: each output sums over the rest
    channels = kernel[params["dimension_numbers"].rhs_spec[0]]
    zeros = math.prod(params["lhs_dilation"]) * params["batch_group_count"]
    return 2.0 * math.prod(out) * math.prod(kernel) / channels / zeros
