"""The kernels of a compiled program: what each moves between chip and memory, and what
it computes.

Both are counted in the text of the program's HLO module; XLA's compiler for GPUs counts
neither. Its result is a list of kernels. Each reads its operands from memory and writes
its result there, whatever it computes in between, so shapes give the bytes. Two things
are not counted: a cache may hold one kernel's result for the next, and a kernel may
read an operand twice.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fcljax.models.shapes import Dtype

# bits of an element; kinds that are missing here, such as token, count as no bytes
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
BITS |= {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}

# instructions that give a name to an array or to a part of one, and move nothing
_NAMES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
# instructions that read of their first operand only as much as they return
_PARTS = ("slice", "dynamic-slice", "gather")


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    """The result's type as text: `f32[2,3]{1,0}`, or several in parentheses."""
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str
    """The text behind the operands."""
    root: bool
    """Whether it is the computation's result."""

    @property
    def size(self) -> int:
        """Return the bytes of the result."""
        return size_of(self.shape)


Computation = dict[str, Instruction]


class Kernel(NamedTuple):
    """One kernel of a program, and how often one call of the program runs it."""

    calls: int
    """Number of runs."""
    traffic: int
    """Bytes that a run reads and writes."""
    flops: float = 0.0
    """Operations of a run's matrix products and convolutions."""
    dtype: Dtype = "bfloat16"
    """Format to which these round their factors."""
    attention: Literal["", "forward", "backward"] = ""
    """Whether it is a pass of the attention kernel."""
    erf: int = 0
    """Values of erf in a run."""
    exponentials: int = 0
    """Values of exp in a run."""


def traffic(text: str) -> int:
    """Return the bytes read and written by one call of a compiled module.

    Args:
      text: the module after all passes, `jax.stages.Compiled.as_text()`.
    """
    return sum(kernel.calls * kernel.traffic for kernel in kernels(text))


def kernels(text: str) -> list[Kernel]:
    """Return the kernels that one call of a compiled module runs, equal ones as one.

    A loop counts as often as the compiler knows that it runs, else once; of a
    conditional, the branch that moves most counts.
    """
    computations, entry = parse(text)
    calls: Counter[Kernel] = Counter()
    for kernel in _within(computations, entry, 1):
        calls[kernel._replace(calls=1)] += kernel.calls
    return [kernel._replace(calls=count) for kernel, count in calls.items()]


def _within(
    computations: dict[str, Computation],
    name: str,
    times: int,
) -> Iterator[Kernel]:
    """Yield the kernels of a computation that runs so many times."""
    computation = computations[name]
    for instruction in computation.values():
        calls = _calls(instruction).items()
        of_calls = [list(_within(computations, callee, times * count)) for callee, count in calls]
        # one branch runs, and the text does not say which: the one that moves most
        if instruction.opcode == "conditional":
            yield from max(
                of_calls, key=lambda branch: sum(kernel.calls * kernel.traffic for kernel in branch)
            )
        elif of_calls:
            yield from itertools.chain.from_iterable(of_calls)
        else:
            moved = _moved(computations, computation, instruction)
            work = _work(computations, computation, instruction)
            if moved or work.flops:
                yield work._replace(calls=times, traffic=moved)


def _calls(instruction: Instruction) -> dict[str, int]:
    """Return the computations whose instructions are kernels by themselves, and how often
    each runs."""
    if instruction.opcode == "while":
        # without the attribute the compiler does not know the length: once
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
        return dict.fromkeys(_named(instruction, "body"), int(trips[1]) if trips else 1)
    keys = {
        "conditional": r"branch_computations|true_computation|false_computation",
        "call": "to_apply",
        "async-start": "calls",
    }
    key = keys.get(instruction.opcode)
    if key:
        return dict.fromkeys(_named(instruction, key), 1)
    return {}


def _named(instruction: Instruction, key: str) -> list[str]:
    """Return the computations that an attribute names."""
    groups = re.findall(rf"(?:{key})=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes)
    return [name for group in groups for name in re.findall(r"%([\w.\-]+)", group)]


def _moved(
    computations: dict[str, Computation],
    computation: Computation,
    instruction: Instruction,
) -> int:
    """Return the bytes that one instruction reads and writes."""
    operands = [computation[name] for name in instruction.operands]
    if instruction.opcode in _NAMES or instruction.opcode.startswith("async-"):
        return 0
    # an asynchronous copy reads when it starts, and writes when it is done
    if instruction.opcode.endswith("-start"):
        return sum(x.size for x in operands)
    if instruction.opcode.endswith("-done"):
        return instruction.size
    if instruction.opcode == "fusion":
        (inner,) = (computations[name] for name in _named(instruction, "calls"))
        return _read(inner, operands) + _written(inner)
    if instruction.opcode in _PARTS:
        return 2 * instruction.size + sum(x.size for x in operands[1:])
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].size
    written = instruction.shape
    # calls of cuBLAS and cuDNN also return their workspace, as bytes that nobody reads
    if "__cu" in instruction.attributes:
        written = re.sub(r"[su]8\[\d+\]", "", written)
    return sum(x.size for x in operands) + size_of(written)


def _read(inner: Computation, operands: list[Instruction]) -> int:
    """Return the bytes that a fusion reads; of an operand that it slices, the slices."""
    users: dict[str, list[Instruction]] = {}
    for instruction in inner.values():
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)

    # how much of an array of `whole` bytes the users of `name` read; one that needs all
    # of it decides
    def part(name: str, whole: int) -> int:
        total = 0
        for user in users.get(name, []):
            only_source = user.operands[0] == name and name not in user.operands[1:]
            if user.opcode in _PARTS and only_source:
                total += user.size
            elif user.opcode == "bitcast":
                total += part(user.name, whole)
            # an update in place does not read the array that it changes
            elif not (user.opcode == "dynamic-update-slice" and only_source):
                return whole
        # slices may overlap, but no more than the whole array is read
        return min(total, whole)

    parameters = [instruction for instruction in inner.values() if instruction.opcode == "parameter"]
    numbers = {parameter.name: int(parameter.attributes) for parameter in parameters}
    return sum(part(name, operands[i].size) for name, i in numbers.items())


def _written(inner: Computation) -> int:
    """Return the bytes that a fusion writes; of an in-place update, the update."""

    def bytes_of(instruction: Instruction) -> int:
        if instruction.opcode == "tuple":
            return sum(bytes_of(inner[name]) for name in instruction.operands)
        if instruction.opcode == "bitcast":
            return bytes_of(inner[instruction.operands[0]])
        if instruction.opcode == "dynamic-update-slice":
            return inner[instruction.operands[1]].size
        return instruction.size

    return sum(bytes_of(instruction) for instruction in inner.values() if instruction.root)


# ---- operations ------------------------------------------------------------------------


def _work(
    computations: dict[str, Computation],
    computation: Computation,
    instruction: Instruction,
) -> Kernel:
    """Return what one instruction computes, with all that is fused into it."""
    if instruction.opcode == "fusion":
        (inner,) = (computations[name] for name in _named(instruction, "calls"))
        # a kernel has one format: that of its largest product, which takes most time
        parts = [_work(computations, inner, fused) for fused in inner.values()]
        largest = max(parts, key=lambda part: part.flops)
        return largest._replace(
            flops=sum(part.flops for part in parts),
            erf=sum(part.erf for part in parts),
            exponentials=sum(part.exponentials for part in parts),
        )
    nothing = Kernel(1, 0)
    if instruction.opcode == "erf":
        return nothing._replace(erf=elements(instruction.shape))
    if instruction.opcode == "exponential":
        return nothing._replace(exponentials=elements(instruction.shape))
    if instruction.opcode == "custom-call":
        pass_of_attention = _attention(computation, instruction)
        if pass_of_attention:
            return pass_of_attention
    flops = _product_flops(computation, instruction)
    if not flops:
        return nothing
    return nothing._replace(flops=flops, dtype=_format_of(computation, instruction))


def _attention(computation: Computation, instruction: Instruction) -> Kernel | None:
    """Return what a pass of the attention kernel computes
    (`models/attention_kernel.py`); None: it is another custom call."""
    # the backward pass returns the gradients of queries, keys and values
    backward = len(re.findall(r"\[[\d,]+\]", instruction.shape)) > 1
    direction = "forward"
    if backward:
        direction = "backward"
    counted = re.search(r'"flops":"(\d+)"', instruction.attributes)
    # on a TPU the kernel gives an estimate of its own; on a GPU it is a Triton call
    if counted:
        return Kernel(1, 0, float(counted[1]), "bfloat16", direction)
    if "xla.gpu.triton" not in instruction.attributes:
        return None
    # both [batch, tokens, heads, size]
    queries, keys = (computation[name].shape for name in instruction.operands[:2])
    # 2 operations in each of the 2 products of a forward pass; a backward pass has 5
    products = 4
    if backward:
        products = 10
    return Kernel(1, 0, float(products * elements(queries) * axes(keys)[1]), "bfloat16", direction)


def _product_flops(computation: Computation, instruction: Instruction) -> float:
    """Return the operations of a matrix product or convolution; 0: it is none."""
    attributes = instruction.attributes
    # products are written in two ways: as dot, and as a call of cuBLAS with JSON
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)', attributes)
    if contracted:
        left = axes(computation[instruction.operands[0]].shape)
        inner = math.prod(left[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
        return 2.0 * elements(instruction.shape) * inner
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    arrays = [computation[name].shape for name in instruction.operands[:2]]
    kernel = arrays[1]
    out = instruction.shape
    # a gradient has the operations of the forward convolution, whose output it reads
    if "convBackwardInput" in attributes:
        out = arrays[0]
    if "convBackwardFilter" in attributes:
        kernel, out = out, arrays[1]
    outputs = axes(kernel)[labels[2].index("o")]
    # zeros between an input's values are products that no library computes
    dilation = re.search(r"lhs_dilate=([\dx]+)", attributes)
    zeros = 1
    if dilation:
        zeros = math.prod(map(int, dilation[1].split("x")))
    # each output value is a sum over one output channel's share of the kernel
    return 2.0 * elements(out) * elements(kernel) / outputs / zeros


def _format_of(computation: Computation, instruction: Instruction) -> Dtype:
    """Return what a product rounds its factors to; float32 by default to tf32."""
    if not computation[instruction.operands[0]].shape.startswith("f32"):
        return "bfloat16"
    exact = re.search(r"operand_precision\W+highest", instruction.attributes, re.IGNORECASE)
    if exact:
        return "float32"
    return "tf32"


# ---- text ------------------------------------------------------------------------------


def axes(shape: str) -> list[int]:
    """Return the lengths of the axes of a shape's first array."""
    array = re.search(r"\[([\d,]*)\]", shape)
    assert array is not None
    return [int(length) for length in array[1].split(",") if length]


def elements(shape: str) -> int:
    """Return the number of values of a shape's first array."""
    return math.prod(axes(shape))


def size_of(shape: str) -> int:
    """Return the bytes of the arrays of a shape, without the padding of layouts."""
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    bits = (BITS.get(kind, 0) * math.prod(int(n) for n in axes.split(",") if n) for kind, axes in arrays)
    # rounded up: two values of four bits share a byte
    return sum(-(-size // 8) for size in bits)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a module by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header:
            current = computations.setdefault(header[2], {})
            if header[1]:
                entry = header[2]
        elif line == "}":
            current = None
        # lines outside of computations, such as the module's header, are skipped
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    """Read the instruction of a line; None if it has none."""
    head = re.match(r"\s*(ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    # a tuple's type has spaces within its parentheses
    end = _closed(rest) if rest.startswith("(") else rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closed("(" + rest) - 1
    inside = rest[: end - 1]
    behind = rest[end:]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    # a parameter's number stands where other instructions have operands
    attributes = behind
    if opcode == "parameter":
        attributes = inside
    return Instruction(head[2], shape, opcode, operands, attributes, head[1] is not None)


def _closed(text: str) -> int:
    """Return the index behind the parenthesis that closes the first one of a text."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    return len(text)
