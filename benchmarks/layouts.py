"""What eight devices receive in a step of Muon, by the layout of the kernels.

    python -m benchmarks layouts  # compiles, runs nothing; minutes

Bytes of the collectives in compiled programs for eight simulated devices, over a device's share of
the matrices (`tests/distribute/test_layouts.py`). An exchange within a loop counts once.
"""

from __future__ import annotations

# isort: off
import tests.conftest  # noqa: F401  # eight devices

# isort: on
import collections
from typing import Any

from tests.shared.layouts import ALONE, KINDS, LAYOUTS, bound_of, cost_of

from . import _record

COLUMNS = {
    "layout": ("layout", ""),
    "mesh": ("mesh", ""),
    "leaf": ("a kernel lies", ""),
    "bound": ("bound", ".2f"),
    **{kind: (kind, ".2f") for kind in KINDS},
    "collectives": ("collectives", ""),
}
WITHOUT = {"layout": ("layout", ""), **{kind: (kind, ".2f") for kind in ALONE}}


def row_of(name: str) -> dict[str, Any]:
    """A layout's figures."""
    mesh, (leaf, *_) = LAYOUTS[name].mesh, LAYOUTS[name].leaves.values()
    costs = {kind: cost_of(name, kind) for kind in (*KINDS, *ALONE)}
    counts = collections.Counter(x.kind for x in costs[KINDS[0]].collectives)
    spec = ", ".join("·" if not own else "".join(own) for own in leaf.spec) or "whole"
    return {
        "layout": name,
        "mesh": " × ".join(map(str, mesh)),
        "leaf": f"{leaf.shape}: {spec}",
        "bound": bound_of(name),
        **{kind: cost.received for kind, cost in costs.items()},
        "collectives": ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())),
    }


def main() -> None:
    """Compiles all layouts and writes the table."""
    args = _record.arguments(__doc__).parse_args()
    rows = [row_of(name) for name in LAYOUTS]
    about = "Bytes that a device receives in a step, both ways, over its share of the matrices."
    tables = ("Received", COLUMNS), ("Received without mesh=", WITHOUT)
    _record.write(args, "layouts", "Layouts", about, [_record.Table(*x, rows) for x in tables], {})
