"""What compiled programs say, in XLA's text, of the data that devices exchange."""

import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_GROUP = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\}|mesh\[(.*?)\].*? \{(.*?)\})")
_CALLED = re.compile(r"(\w+)=(?:%([\w.\-]+)|\{(%[^}]*)\})")
_BRANCHES = {"body", "condition", "branch_computations", "true_computation", "false_computation"}
_CALLS = {"to_apply", "calls", "called_computations", *_BRANCHES}


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange among devices."""

    kind: str
    bytes: int  # of the result on one device
    group: int  # how many devices exchange with each other; 0 for all
    inside: bool  # whether it is in a loop or a branch

    def received(self, devices: int) -> float:
        """Bytes that a device gets from the others; its own part of an all-gather it has."""
        group = self.group or devices
        return self.bytes * (group - 1) / group if self.kind == "all-gather" else self.bytes


def collectives(program: str) -> list[Collective]:
    """The exchanges in a compiled program, given as `compiled.as_text()`."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    called: dict[str, list[tuple[bool, str]]] = {}
    current = ""
    for line in program.splitlines():
        if start := _COMPUTATION.match(line):
            current = start[1]
            found[current], called[current] = [], []
        if not (operation := _OPERATION.match(line)):
            continue
        kind = operation[2].removesuffix("-start")
        if kind in KINDS:
            found[current].append((kind, _bytes(operation[1]), _group(line)))
        for attribute, one, several in _CALLED.findall(line):
            if attribute in _CALLS:
                names = [one] if one else re.findall(r"%([\w.\-]+)", several)
                called[current] += [(attribute in _BRANCHES, name) for name in names]
    inside: set[str] = set()
    front = [name for targets in called.values() for branch, name in targets if branch]
    while front:
        name = front.pop()
        if name not in inside:
            inside.add(name)
            front += [target for _, target in called[name]]
    return [
        Collective(*operation, name in inside)
        for name, operations in found.items()
        for operation in operations
    ]


def _group(operation: str) -> int:
    """The devices of a group: `replica_groups=[2,4]<=[8]`, `{{0,1}}`, `mesh['x'=2,'y'=4] {'y'}`."""
    if not (groups := _GROUP.search(operation)):
        return 0
    number, first, axes, along = groups.groups()
    if along is None:
        return int(number or first.count(",") + 1)
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", along)  # also a part of an axis, 'y':(1)2
    return math.prod(int(part or sizes[axis]) for axis, part in parts)


def _bytes(shapes: str) -> int:
    """Of a result such as `f32[4,8]{1,0}` or `(f32[4], s32[])`."""
    return sum(
        math.prod(map(int, filter(None, sizes.split(","))))
        * (BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 32))
        // 8
        for dtype, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
    )
