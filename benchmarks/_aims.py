"""What we want of compiled programs, and which methods have it: a table from recorded rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._methods import PEERS
from ._record import Table, cell

Rows = Mapping[str, dict[str, Any]]  # of a table, by method
CODES = ("VQ", "CQ", "CQ+EF", "packed")
NAMED = 8  # methods that miss an aim and are named; of more, the first and the last
PEER = "optax.contrib.muon"


class Aim(NamedTuple):
    """A bound for one number of some methods' programs."""

    table: str  # the title
    what: str
    bound: float
    of: Callable[[dict[str, Any], Rows], float | None]
    methods: Callable[[str], bool]
    form: str = ".2f"


def plain(method: str) -> bool:
    """With its own defaults, in float32."""
    return "," not in method


def coded(method: str) -> bool:
    """With factors in few bits."""
    return method.partition(", ")[2] in CODES


def among(*names: str) -> Callable[[str], bool]:
    """These methods."""
    return lambda method: method in names


def number(*keys: str) -> Callable[[dict[str, Any], Rows], float | None]:
    """The first of these that a row has."""
    return lambda row, rows: next((row[key] for key in keys if row.get(key) is not None), None)


def tracing(row: dict[str, Any], rows: Rows) -> float | None:
    """Seconds, with refreshes or without."""
    return max((row[key] for key in ("trace", "trace_whole") if row.get(key)), default=None)


def over_peer(row: dict[str, Any], rows: Rows) -> float | None:
    """Seconds of tracing and compiling a step without refreshes, over those of Optax's Muon."""
    clock, peer = (x.get("clock") for x in (row, rows.get(PEER, {})))
    return clock and peer and clock / peer


def aims() -> Iterator[Aim]:
    """All of them, as the redesign for accelerators set them."""
    title = f"tracing and compiling with refreshes, over `{PEER}`, by the clock"
    clock = number("over_peer_clock")
    yield Aim("cpu, 96, unrolled", title, 0.5, clock, among("muon"))
    own = among("racs", "galore", "soap", "asgo", "shampoo")
    yield Aim("cpu, 96, unrolled", title, 1, clock, own)
    yield Aim("cpu, 96, unrolled", title, 1.5, clock, among("alice", "foam", "sumo"))
    yield Aim("cpu, 96, unrolled", title + ", in few bits", 2, clock, coded)
    yield Aim("cpu, 96, unrolled", "seconds of tracing", 3, tracing, lambda _: True, ".1f")
    for model in ("96", "gpt2", "130M"):
        table, title = f"h200, {model}, unrolled", "kernels of a step a leaf, beyond products"
        yield Aim(table, title, 4, number("beyond"), plain, ".1f")
        yield Aim(table, title + ", in few bits", 4, number("beyond"), coded, ".1f")
    light = among("racs", "galore", "fira", "alice", "apollo", "dasgo")
    for tree in ("96, unrolled", "gpt2, unrolled", "gpt2, scanned"):
        title = "bytes of a step over the least"
        yield Aim(f"h200, {tree}", title, 1.5, number("over_least"), light)
    title, both = "temporaries over gradients, with refreshes", ("temporaries_whole", "temporaries")
    two_stacks = 2 / 3  # of those of the four shapes, the two largest
    yield Aim("h200, 96, unrolled", title, two_stacks, number(*both), plain)
    title = f"tracing and compiling without refreshes, over `{PEER}`, by the clock"
    yield Aim("v5e, 96, unrolled", title, 1.5, over_peer, plain)


def table(found: Sequence[Table]) -> Table:
    """Which methods meet the aims, of the tables of programs."""
    by_title: dict[str, Rows] = {t.title: {row["method"]: row for row in t.rows} for t in found}
    rows = [row_of(aim, by_title[aim.table]) for aim in aims() if aim.table in by_title]
    columns = {
        "table": ("program", ""),
        "what": ("what", ""),
        "bound": ("aim", ""),
        "met": ("met by", ""),
        "missed": ("missed by", ""),
    }
    return Table("Aims", columns, rows, "From the tables below.")


def row_of(aim: Aim, rows: Rows) -> dict[str, Any]:
    """The methods on either side of a bound, with their numbers."""
    chosen = {name: row for name, row in rows.items() if name not in PEERS and aim.methods(name)}
    values = {name: aim.of(row, rows) for name, row in chosen.items()}
    known = [(x, name) for name, x in values.items() if x is not None and not math.isnan(x)]
    known.sort(key=lambda pair: pair[0])
    met = [pair for pair in known if round(pair[0], 2) <= round(aim.bound, 2)]
    missed = known[len(met) :]
    return {
        "table": aim.table,
        "what": aim.what,
        "bound": format(aim.bound, ".3g"),
        "met": ends(met, aim.form) if len(met) > 2 else listed(met, aim.form),
        "missed": ends(missed, aim.form) if len(missed) > NAMED else listed(missed, aim.form),
    }


def listed(pairs: Sequence[tuple[float, str]], form: str) -> str:
    """Each method with its number."""
    return ", ".join(f"{shown(name)} {cell(x, form)}" for x, name in pairs)


def ends(pairs: Sequence[tuple[float, str]], form: str) -> str:
    """The number of methods, the first, and the last."""
    return f"{len(pairs)}: " + " to ".join(listed([pair], form) for pair in (pairs[0], pairs[-1]))


def shown(method: str) -> str:
    """The name, with its storage."""
    name, comma, storage = method.partition(", ")
    return f"`{name}`{comma}{storage}"
