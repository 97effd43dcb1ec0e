"""Figures from the text of a compiled program: kernels, matrix products, bytes read and written.

XLA launches a kernel for every operation of a scheduled computation that is not mere naming; the
operations of a fusion run within its kernel. Operations are counted by kind, with the rounds of the
loops they are in. Rounds that the program decides are those of the second step: its bound is
computed from the counts in the state, where all of them are 1. So loops over all matrices count in
full, and refreshes, which are due at step 1 and a period later, not at all. Bounds that depend on
arrays count none: restarts of damaged states; but in a program that refreshes, `rotations` says how
often a loop that may end before its bound runs. The smallest branch of a conditional counts.
`work` is a step's with the largest branches. FLOPs are those of products, two for every pair of
numbers that is multiplied, by the precision that XLA is asked for: "float32" (`HIGHEST`), "default"
(TF32 on GPUs, bfloat16 on TPUs, float32 on CPUs), "bf16", and "bf16x3" or "bf16x6", which take so
many products of bfloat16 numbers.

Bytes are those of operands and results, as in XLA's own cost analysis, which a GPU's program does
not have: of an operand that a fusion only slices, those of the slices; of a result that updates an
operand in place, those of the update. Arrays that a TPU's program keeps on the chip do not count.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

KINDS = ("products", "fusions", "custom calls", "copies", "collectives", "others")
NAMING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("opt-barrier", "partition-id", "replica-id", "iota"),
}
# The second halves of pairs, and moves between the memories of a TPU ahead of their use.
HALVES = re.compile(r"((copy|slice)-start|.*-done|async-update|.*-update)$")
COLLECTIVE = re.compile(r"all-|collective-|reduce-scatter|ragged-")
PRODUCT = re.compile(r"gemm|cublas|matmul|cudnn")
LAYOUT_CALLS = ("AssumeGatherIndicesInBound", "AllocateBuffer")  # of a TPU: no work
SLICES = ("dynamic-slice", "slice", "gather")
PRECISIONS = {"highest": "float32", "high": "bf16x3"}
BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}
COUNT = 1
"""The value of each counter in the state, before the step that is counted."""
ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "remainder": lambda a, b: int(math.fmod(a, b)),
    "and": operator.and_,
    "or": operator.or_,
    "select": lambda chosen, a, b: a if chosen else b,
    **dict.fromkeys(("convert", "copy", "bitcast", "reshape"), int),
}


def whole_bytes(compiled: Any) -> int:
    """The bytes of arguments, of results that do not take the place of one, and of temporaries."""
    found = compiled.memory_analysis()
    whole = found.argument_size_in_bytes + found.output_size_in_bytes
    return whole + found.temp_size_in_bytes - found.alias_size_in_bytes


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_ARRAY = re.compile(r"\b[a-z]+\d*[a-z0-9]*\[[\d,]*\](?:\{[^}]*\})?")
_ON_CHIP = re.compile(r"\b[a-z]+\d*[a-z0-9]*\[[\d,]*\]\{[^}]*S\(1\)[^}]*\}")
_NAMES = re.compile(r"%([\w.\-]+)")
_INTEGER = re.compile(r"[su]32\[\]")
_SUMMED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)')
_PRECISION = re.compile(r'operand_precision"?[=:][{\[]"?(\w+)')
_ALGORITHM = re.compile(r"algorithm=dot_bf16_(bf16_f32(?:_x\d)?)")
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"n":"(\d+)"')


class Operation(NamedTuple):
    """A line of a computation."""

    name: str
    result: str  # its type
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes
    root: bool

    def called(self, attribute: str) -> list[str]:
        """Names of computations."""
        found = re.search(rf"\b{attribute}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.rest)
        return ([found[1]] if found[1] else _NAMES.findall(found[2])) if found else []


class Caller(NamedTuple):
    """Where a computation is called."""

    name: str  # of the computation with the call
    operation: Operation
    caller: Caller | None


@dataclasses.dataclass
class Kernels:
    """Counts by kind, bytes, and FLOPs by the precision of products, such as "float32"."""

    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bytes: float = 0.0
    flops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.kinds.values())

    def plus(self, other: Kernels, times: int = 1) -> None:
        """Adds another count."""
        self.bytes += times * other.bytes
        for counts, others in ((self.kinds, other.kinds), (self.flops, other.flops)):
            counts.update({key: times * number for key, number in others.items()})


def size_of(result: str) -> float:
    """Bytes of a type such as `f32[4,8]{1,0}` or `(f32[4], s32[])`, outside the chip."""
    return _size(_ON_CHIP.sub("", result))


def _size(result: str) -> float:
    found = _SHAPE.findall(result)
    return sum(_bits(dtype) * _numbers(axes) / 8 for dtype, axes in found)


def _numbers(axes: str) -> int:
    return math.prod(map(int, filter(None, axes.split(","))))


def _bits(dtype: str) -> int:
    return BITS.get(dtype) or int(re.sub(r"^[a-z]+", "", dtype).split("e")[0] or 0)


def _split(text: str) -> tuple[str, str, str, str]:
    """A line after `=`: type, opcode, operands, attributes."""
    start = 0
    if text.startswith("("):
        start = _closing(text, 0)
    begin = text.index(" ", start)
    opcode, _, rest = text[begin + 1 :].partition("(")
    end = _closing("(" + rest, 0)
    return text[:begin], opcode, rest[: end - 1], rest[end:]


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def once(text: str) -> str:
    """A TPU's program without the other pieces of a collective that runs beside computations."""
    seen: set[str] = set()
    lines = []
    for line in text.splitlines():
        channel = re.search(r" (?:all|reduce|collective)-\S+?\(.*channel_id=(\d+)", line)
        if channel is None or channel[1] not in seen:
            lines.append(line)
        if channel is not None:
            seen.add(channel[1])
    return "\n".join(lines)


class Program:
    """A compiled program, given as `compiled.as_text()`."""

    def __init__(self, text: str, rotations: int = 0):
        """Reads the computations."""
        self.rotations = rotations
        self.computations: dict[str, dict[str, Operation]] = {}
        current: dict[str, Operation] = {}
        self.entry = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif "=" in line and (found := _LINE.match(line)) and "(" in found[3]:
                result, opcode, operands, rest = _split(found[3])
                names = tuple(_NAMES.findall(operands)) if opcode != "constant" else (operands,)
                rest = operands if opcode == "parameter" else rest
                current[found[2]] = Operation(found[2], result, opcode, names, rest, bool(found[1]))

    @functools.cached_property
    def step(self) -> Kernels:
        """The kernels of a step in which no loop or branch of unknown rounds is taken."""
        return self._count(self.entry)

    @functools.cached_property
    def work(self) -> Kernels:
        """The same with the largest branches: those of matrices that are not damaged."""
        return self._count(self.entry, branch=slice(-1, None))

    def _count(self, name: str, caller: Caller | None = None, branch: slice = slice(1)) -> Kernels:
        found = Kernels()
        count = functools.partial(self._count, branch=branch)
        for operation in self.computations[name].values():
            if operation.opcode == "while":
                rounds = self._rounds(name, operation, caller)
                body = operation.called("body")[0]
                found.plus(count(body), rounds)
            elif operation.opcode == "conditional":
                for attribute in ("branch_computations", "true_computation", "false_computation"):
                    branches = [count(x) for x in operation.called(attribute)]
                    for taken in sorted(branches, key=lambda x: x.total)[branch]:
                        found.plus(taken)
            elif operation.opcode in ("call", "async-start"):
                for x in operation.called("to_apply") + operation.called("calls"):
                    found.plus(count(x, caller=Caller(name, operation, caller)))
            elif kind := self._kind(operation):
                found.kinds[kind] += 1
                found.bytes += self._bytes(name, operation)
                found.flops.update(self._flops(name, operation))
            elif operation.opcode in ("copy-start", "slice-start"):
                found.bytes += _moved(operation)
        return found

    def _rounds(self, name: str, loop: Operation, caller: Caller | None) -> int:
        """The rounds of a loop; none, or `rotations`, if they depend on arrays."""
        if found := _TRIPS.search(loop.rest):
            return int(found[1])
        condition = list(self._within(loop.called("condition")[0]))
        if any(x.opcode == "and" for x in condition):  # it may end before its bound
            return self.rotations
        bounds = [x for x in condition if x.opcode == "constant" and _INTEGER.match(x.result)]
        if len(bounds) == 1 and bounds[0].operands[0].isdigit():
            return int(bounds[0].operands[0])
        # A carried bound: the round, from 0, is less than it.
        places = [_index(x) for x in condition if x.opcode == "get-tuple-element"]
        values = [self._value(name, loop.operands[0], caller, place) for place in places]
        return max(values) if 0 in values and None not in values else 0  # pyright: ignore

    def _value(
        self, name: str, of: str, caller: Caller | None, place: int | None = None
    ) -> int | None:
        """A single number at the second step, or one in a tuple; `None` if it is not known."""
        operation = self.computations[name][of]
        opcode, operands = operation.opcode, operation.operands
        if opcode == "tuple" and place is not None:
            return self._value(name, operands[place], caller)
        if opcode == "get-tuple-element":
            return self._value(name, operands[0], caller, _index(operation))
        if opcode == "while":
            unchanged = self._rounds(name, operation, caller) == 0
            return self._value(name, operands[0], caller, place) if unchanged else None
        if opcode in ("fusion", "call"):
            inside = [*operation.called("calls"), *operation.called("to_apply")][0]
            root = next(x.name for x in self.computations[inside].values() if x.root)
            return self._value(inside, root, Caller(name, operation, caller), place)
        if opcode == "parameter":
            if caller is not None:
                given = caller.operation.operands[_place(operation) or 0]
                return self._value(caller.name, given, caller.caller, place)
            is_count = name == self.entry and _INTEGER.match(operation.result)
            return COUNT if is_count and place is None else None
        if _SHAPE.findall(operation.result) and "[]" not in operation.result:
            return None
        if opcode == "constant":
            text = operands[0]
            return {"true": 1, "false": 0}.get(text, int(text) if text.isdigit() else None)
        if opcode == "reduce" and self.rotations and _INTEGER.match(operation.result):
            # The sum of a mask: all matrices are due.
            return _numbers(_SHAPE.findall(self.computations[name][operands[0]].result)[0][1])
        if opcode not in ARITHMETIC and opcode != "compare":
            return None
        values = [self._value(name, x, caller) for x in operands]
        if None in values:
            return None
        if opcode == "compare":
            compared = re.search(r"direction=(\w+)", operation.rest)
            return int(getattr(operator, compared[1].lower())(*values)) if compared else None
        return int(ARITHMETIC[opcode](*values))

    def _within(self, name: str) -> Iterator[Operation]:
        """A computation and those that it calls, except for mere renaming."""
        for operation in self.computations.get(name, {}).values():
            yield operation
            for attribute in () if self._renames(operation) else ("calls", "to_apply"):
                for called in operation.called(attribute):
                    yield from self._within(called)

    def _kind(self, operation: Operation) -> str | None:
        opcode, result = operation.opcode, operation.result
        if opcode in NAMING or HALVES.match(opcode):
            return None
        # A TPU computes single numbers beside its kernels, and copies them, loops' counters.
        single = ":T(" in result and all(_numbers(axes) == 1 for _, axes in _SHAPE.findall(result))
        if opcode == "copy":
            return None if single else "copies"
        if COLLECTIVE.match(opcode):
            return "collectives"
        if opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', operation.rest)
            name = target[1] if target else ""
            if name in LAYOUT_CALLS:
                return None
            return "products" if PRODUCT.search(name) else "custom calls"
        if opcode == "fusion":
            return "products" if self._inside(operation) & {"dot", "convolution"} else "fusions"
        if opcode in ("dot", "convolution"):
            return "products"
        return None if single else "others"

    def _inside(self, fusion: Operation) -> set[str]:
        """The operations of a fusion."""
        return {x.opcode for called in fusion.called("calls") for x in self._within(called)}

    def _renames(self, operation: Operation) -> bool:
        """Whether it moves nothing: a TPU's tiles of bytes, of another height in the same place."""
        if operation.opcode == "fusion" and "output_to_operand_aliasing" in operation.rest:
            return self._inside(operation) <= {"parameter", "copy"}
        return operation.opcode == "bitcast"

    def _flops(self, name: str, operation: Operation) -> collections.Counter[str]:
        """The FLOPs of the products of a kernel."""
        if operation.opcode == "fusion":
            inside = operation.called("calls")[0]
            counts = (self._flops(inside, x) for x in self.computations[inside].values())
            return sum(counts, collections.Counter())
        kernel = re.search(r"dim_labels=\w+_(\w+)->", operation.rest)
        summed = _SUMMED.search(operation.rest)
        if operation.opcode == "convolution" and kernel:
            side, places = 1, [kernel[1].index("i")]
        elif summed:
            side, places = 0, [int(x) for x in re.findall(r"\d+", summed[1])]
        else:
            return collections.Counter()
        dtype, axes = _SHAPE.findall(self.computations[name][operation.operands[side]].result)[0]
        sizes = [int(x) for x in axes.split(",")]
        result = _SHAPE.findall(operation.result)[0][1]
        asked, algorithm = _PRECISION.search(operation.rest), _ALGORITHM.search(operation.rest)
        level = PRECISIONS.get(asked[1].lower() if asked else "", "default")
        level = algorithm[1].replace("_", "").replace("f32", "") if algorithm else level
        flops = 2 * _numbers(result) * math.prod(sizes[place] for place in places)
        return collections.Counter({"bf16" if dtype == "bf16" else level: flops})

    def _bytes(self, name: str, operation: Operation) -> float:
        """The bytes that a kernel reads and writes."""
        lines = self.computations[name]
        operands = [lines[x].result for x in operation.operands if x in lines]
        if operation.opcode in SLICES:
            return 2 * size_of(operation.result)
        if operation.opcode == "dynamic-update-slice":
            return 2 * size_of(operands[1])
        if operation.opcode == "custom-call" and operation.result.startswith("("):
            result = re.sub(r", s8\[\d+\]", "", operation.result)  # without cuBLAS's workspace
            return size_of(result) + sum(map(size_of, operands))
        if operation.opcode != "fusion":
            return size_of(operation.result) + sum(map(size_of, operands))
        return self._fusion_bytes(operation.called("calls")[0], operands)

    def _read(self, name: str, place: int, whole: float) -> float:
        """The bytes that a fusion reads of an operand of so many bytes."""
        lines = self.computations[name]
        users = collections.defaultdict(list)
        for operation in lines.values():
            for x in operation.operands:
                users[x].append(operation)

        def through(x: str) -> float:
            part = 0.0
            for user in users[x]:
                first = user.operands[0] == x
                if self._renames(user):
                    part += through(user.name)
                elif user.opcode in SLICES and first:
                    part += size_of(user.result) if whole else 0.0
                elif user.opcode == "fusion":  # fusions are nested in a TPU's program
                    places = [i for i, operand in enumerate(user.operands) if operand == x]
                    inside = user.called("calls")[0]
                    part += sum(self._read(inside, place, whole) for place in places)
                elif user.opcode != "dynamic-update-slice" or not first:
                    part += whole
            return part

        return min(whole, sum(through(x.name) for x in lines.values() if _place(x) == place))

    def _fusion_bytes(self, name: str, operands: list[str]) -> float:
        lines = self.computations[name]

        def behind(x: str) -> Operation | None:
            operation = lines.get(x)
            while operation is not None and self._renames(operation):
                operation = lines.get(operation.operands[0])
            return operation

        total = sum(self._read(name, i, size_of(x)) for i, x in enumerate(operands))
        for operation in lines.values():
            if operation.root:
                made = operation.operands if operation.opcode == "tuple" else (operation.name,)
                for x in map(behind, made):
                    if x is not None and x.opcode == "dynamic-update-slice":
                        total += size_of(lines[x.operands[1]].result)
                    elif x is not None and x.opcode != "parameter":
                        total += size_of(x.result)
        return total


def _index(operation: Operation) -> int:
    """Which part of a tuple it takes."""
    found = re.search(r"index=(\d+)", operation.rest)
    return int(found[1]) if found else 0


def _place(operation: Operation) -> int | None:
    """Which argument of its computation a parameter is."""
    return (
        int(re.sub(r"\D.*", "", operation.rest) or 0) if operation.opcode == "parameter" else None
    )


def _moved(operation: Operation) -> float:
    """Bytes that a TPU reads and writes while it moves an array, or a slice, to or from its chip.

    The type of the result has both places, in another order for either.
    """
    places = _ARRAY.findall(operation.result)[:2]
    return min(map(_size, places)) * sum(not _ON_CHIP.fullmatch(place) for place in places)
