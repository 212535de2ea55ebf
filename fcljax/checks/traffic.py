"""Bytes that a compiled program moves between a chip and its memory, counted in the text of its HLO module.

XLA's compiler for GPUs does not count them. What it leaves is a list of kernels: each reads its operands from
memory and writes its result there, whatever is computed in between, so that shapes say how much that is. A
cache may hold what one kernel leaves for the next, and a kernel may read an operand twice; neither is seen.
"""

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
BITS |= {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}  # others: no bytes

# what names arrays or parts of them, and moves nothing
_NAMES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
_PARTS = ("slice", "dynamic-slice", "gather")  # read of the first operand as much as they return


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    """Of the result, as it is written: `f32[2,3]{1,0}`, or several in parentheses."""
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str
    """What stands behind the operands."""
    root: bool
    """Whether it is the computation's result."""

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return size_of(self.shape)


Computation = dict[str, Instruction]


def traffic(text: str) -> int:
    """Bytes read and written by one call of a compiled module.

    A loop counts as often as the compiler knows that it runs, else once; of a conditional, the branch that
    moves most counts.

    Args:
      text: the module after all passes, `jax.stages.Compiled.as_text()`.
    """
    return sum(each for _, each in kernels(text))


def kernels(text: str) -> Iterator[tuple[Instruction, int]]:
    """What `traffic` counts: instructions, and the bytes of all their calls."""
    computations, entry = parse(text)
    yield from _within(computations, entry, 1)


def _within(computations: dict[str, Computation], name: str, times: int) -> Iterator[tuple[Instruction, int]]:
    computation = computations[name]
    for each in computation.values():
        calls = _calls(each).items()
        of_calls = [list(_within(computations, called, times * count)) for called, count in calls]
        if each.opcode == "conditional":
            yield from max(of_calls, key=lambda found: sum(size for _, size in found))
        elif of_calls:
            yield from itertools.chain.from_iterable(of_calls)
        else:
            yield each, times * _moved(computations, computation, each)


def _calls(each: Instruction) -> dict[str, int]:
    """Computations whose instructions are kernels by themselves, and how often each runs."""
    if each.opcode == "while":
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.attributes)
        return dict.fromkeys(_named(each, "body"), int(known[1]) if known else 1)
    keys = {
        "conditional": r"branch_computations|true_computation|false_computation",
        "call": "to_apply",
        "async-start": "calls",
    }
    key = keys.get(each.opcode)
    return dict.fromkeys(_named(each, key), 1) if key else {}


def _named(each: Instruction, key: str) -> list[str]:
    """Computations that an attribute names."""
    found = re.findall(rf"(?:{key})=(\{{[^}}]*\}}|%[\w.\-]+)", each.attributes)
    return [name for group in found for name in re.findall(r"%([\w.\-]+)", group)]


def _moved(computations: dict[str, Computation], computation: Computation, each: Instruction) -> int:
    """Bytes that one instruction reads and writes."""
    operands = [computation[name] for name in each.operands]
    if each.opcode in _NAMES or each.opcode.startswith("async-"):
        return 0
    if each.opcode.endswith("-start"):
        return sum(x.size for x in operands)
    if each.opcode.endswith("-done"):
        return each.size
    if each.opcode == "fusion":
        (inner,) = (computations[name] for name in _named(each, "calls"))
        return _read(inner, operands) + _written(inner)
    if each.opcode in _PARTS:
        return 2 * each.size + sum(x.size for x in operands[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * operands[1].size
    return sum(x.size for x in operands) + each.size


def _read(inner: Computation, operands: list[Instruction]) -> int:
    """Bytes that a fusion reads: of an operand of which it takes parts alone, these parts."""
    users: dict[str, list[Instruction]] = {}
    for each in inner.values():
        for name in each.operands:
            users.setdefault(name, []).append(each)

    def part(name: str, whole: int) -> int:
        total = 0
        for user in users.get(name, []):
            first = user.operands[0] == name and name not in user.operands[1:]
            if user.opcode in _PARTS and first:
                total += user.size
            elif user.opcode == "bitcast":
                total += part(user.name, whole)
            elif not (user.opcode == "dynamic-update-slice" and first):
                return whole
        return min(total, whole)

    given = [each for each in inner.values() if each.opcode == "parameter"]
    number = {each.name: int(each.attributes) for each in given}
    return sum(part(name, operands[i].size) for name, i in number.items())


def _written(inner: Computation) -> int:
    """Bytes that a fusion writes: of an array that it changes in place, the part that changes."""

    def of(each: Instruction) -> int:
        if each.opcode == "tuple":
            return sum(of(inner[name]) for name in each.operands)
        if each.opcode == "bitcast":
            return of(inner[each.operands[0]])
        return inner[each.operands[1]].size if each.opcode == "dynamic-update-slice" else each.size

    return sum(of(each) for each in inner.values() if each.root)


# ---- text --------------------------------------------------------------------------------------------------


def size_of(shape: str) -> int:
    """Bytes of the arrays of a shape; layouts, and so padding, are not looked at."""
    found = re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    bits = (BITS.get(kind, 0) * math.prod(int(n) for n in axes.split(",") if n) for kind, axes in found)
    return sum(-(-each // 8) for each in bits)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (found := _instruction(line)):
            current[found.name] = found
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closed(rest) if rest.startswith("(") else rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closed("(" + rest) - 1
    inside = rest[: end - 1]
    behind = rest[end:]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    # of a parameter, its number stands where others have operands
    attributes = inside if opcode == "parameter" else behind
    return Instruction(head[2], shape, opcode, operands, attributes, head[1] is not None)


def _closed(text: str) -> int:
    """Where the parenthesis that opens a text is closed: the index behind it."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    return len(text)
