"""Every method of the registry as benchmarks run it, its peers, and facts for benchmarks alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import optax

import curvax
from tests.registry import LEADERS, Family, Row
from tests.registry import METHODS as ROWS

from ._floors import FLOORS, Floor

RATE = 1e-3
STORAGES = {
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
    "packed": curvax.packed(),
}


FAMILIES = {
    family: tuple(row.name for row in ROWS if row.family == family) for family in get_args(Family)
}
RECIPES = {
    "recipes on Muon": tuple(row.name for row in LEADERS[:6]),
    "recipes on factors": tuple(row.name for row in LEADERS[6:]),
}
NAMES = tuple(name for names in FAMILIES.values() for name in names)
NAMED = {row.name: row for row in (*ROWS, *LEADERS)}

# The minimal work of a step (`_floors.py`), and the largest ratio of its time that is aimed at.
FLOOR: dict[str, tuple[str, float | None]] = {
    "muon": ("Newton-Schulz", 1.3),
    "swan": ("SVD", None),
    "osgdm": ("SVD", None),
    "racs": ("rank one", None),
    "asgo": ("one root", 1.3),
    "shampoo": ("two roots", 1.3),
    "foam": ("two roots, statistics", None),
    "dr_shampoo": ("two roots, statistics", None),
    "soap": ("two bases", 1.3),
    "eigen_adam": ("one basis", None),
    "kl_shampoo": ("two bases", None),
    "galore": ("projection", 1.6),
    "fira": ("projection", None),
    "alice": ("projection, tracked", None),
    "apollo": ("projection, not back", None),
    "sumo": ("larger projection, SVD", None),
}
PEER = {"muon": ("optax.contrib.muon", 0.5), "galore": ("optax.contrib.galore", 1.0)}
"""The same method in Optax, and the largest ratio of our step time to its that is aimed at."""
CODED = {"asgo": "VQ", "shampoo": "CQ+EF", "soap": "VQ"}
"""The storage with which the training benchmark runs a method in 4 bits."""


class Variant(NamedTuple):
    """A method with other settings, which the step benchmark times beside the plain one."""

    settings: dict[str, Any]
    floor: str
    aim: float | None = None
    numbers: Callable[[Any], int] | None = None


VARIANTS = {
    "shampoo": {
        "statistics at every step": Variant({"statistics_every": 1}, "two roots, statistics", 1.3)
    },
    "alice": {
        "no tracking": Variant(
            {"b3": None}, "projection", 1.6, lambda s: s.basis + 2 * s.low + s.other + 1
        )
    },
    "soap": {
        "rotations": Variant({"method": "rotations"}, "two bases"),
        "rotations in X6": Variant({"method": "rotations", "products": "bf16x6"}, "two bases"),
        "rotations in X3": Variant({"method": "rotations", "products": "bf16x3"}, "two bases"),
    },
    "asgo": {"roots in X6": Variant({"method": "products", "products": "bf16x6"}, "one root")},
    "eigen_adam": {"rotations": Variant({"method": "rotations"}, "one basis")},
    "kl_shampoo": {"rotations": Variant({"method": "rotations"}, "two bases")},
    "sumo": {
        "Newton-Schulz": Variant({"method": "newton_schulz"}, "larger projection, Newton-Schulz")
    },
}


def of_rank(name: str, rank: int) -> dict[str, Any]:
    """Settings that depend on the rank."""
    if not NAMED[name].ranked:
        return {}
    leading = max(1, rank * 40 // 128)  # the paper's, at 60M
    more = {"switching": curvax.subspaces.complement(leading)} if name == "alice" else {}
    return {"rank": rank, **more}


class Method(NamedTuple):
    """An optimizer and its peers."""

    make: Callable[[int, int], optax.GradientTransformation]  # from a period and a rank
    floor: Callable[[int], Floor] | None = None  # from the rank
    aim: float | None = None  # over its floor, between refreshes
    peer: str | None = None  # an optimizer of Optax
    peer_aim: float | None = None  # over that
    numbers: Callable[[int, int, int], int] | None = None  # of the state of an m × n matrix
    refreshes: bool = True  # or all its steps are the same
    offset: int = 1  # of the steps at which it refreshes, counted from 1


PEERS = {
    "optax.adamw": Method(
        lambda period, rank: optax.adamw(RATE), numbers=lambda m, n, r: 2 * m * n, refreshes=False
    ),
    "optax.contrib.muon": Method(lambda period, rank: optax.contrib.muon(RATE), refreshes=False),
    "optax.contrib.galore": Method(
        lambda period, rank: optax.contrib.galore(RATE, rank, period), FLOORS["projection"]
    ),
}


def offset_of(row: Row) -> int:
    """Of its refreshes, counted from 1: Shampoo's statistics are due at multiples of the period."""
    return 0 if row.name == "shampoo" else 1


def making(row: Row, **settings: Any) -> Callable[[int, int], Any]:
    """An optimizer with its own defaults, which refreshes all that it has once a period.

    Every check of an adaptive policy refreshes all factors: the most that it can cost.
    """

    def make(period: int, rank: int) -> Any:
        base = {"base": None} if row.base else {}
        given = {**base, **row.with_output_layer, **of_rank(row.name, rank)}
        if row.name == "shampoo":
            given["matrices"] = curvax.MatrixRule(block_size=None)
        if row.own_policy:
            given |= {"check_every": period, "threshold": 1e-12}
        elif row.keeps:
            given["refresh"] = curvax.every(period, offset=offset_of(row))
        return row.optimizer(RATE, **{**given, **settings})

    return make


def counting(row: Row, numbers: Any) -> Callable[[int, int, int], int] | None:
    """The formula of a row, or of a variant, for the method's own defaults."""
    return numbers and (lambda m, n, r: numbers(row.size(m, n, r, {})))


def methods_of(row: Row, **settings: Any) -> dict[str, Method]:
    """A method, its variants, and itself with every storage, all with these settings."""
    floor, aim = FLOOR.get(row.name, (None, None))
    peer, peer_aim = PEER.get(row.name, (None, None))
    plain = Method(
        making(row, **settings),
        FLOORS[floor] if floor else None,
        aim,
        peer,
        peer_aim,
        counting(row, row.numbers),
        refreshes=row.keeps is not None,
        offset=offset_of(row),
    )
    found = {row.name: plain}
    for label, own in VARIANTS.get(row.name, {}).items():
        found[f"{row.name}, {label}"] = Method(
            making(row, **own.settings, **settings),
            FLOORS[own.floor],
            own.aim,
            numbers=counting(row, own.numbers),
            refreshes=plain.refreshes,
            offset=plain.offset,
        )
    for label, storage in STORAGES.items() if row.factors else ():
        coded = making(row, storage=storage, **settings)
        found[f"{row.name}, {label}"] = plain._replace(make=coded, aim=None, numbers=None)
    return found


def with_settings(name: str, **settings: Any) -> Method:
    """A method of the registry, its variant, or itself with a storage, with these settings."""
    return methods_of(NAMED[name.partition(",")[0]], **settings)[name]


METHODS: dict[str, Method] = PEERS | {
    name: method for own in NAMES for name, method in methods_of(NAMED[own]).items()
}


def chosen(families: Sequence[str], variants: bool = True) -> dict[str, Method]:
    """The methods of these names, with their variants, AdamW, and their peers from Optax.

    Without variants those that are named, such as "soap, rotations".
    """
    own = {
        name: method
        for name, method in METHODS.items()
        if name in families or (variants and name.partition(",")[0] in families)
    }
    return with_peers(own)


def with_peers(own: dict[str, Method]) -> dict[str, Method]:
    """AdamW, the peers of these methods, and they themselves."""
    peers = {method.peer for method in own.values()} | {"optax.adamw"}
    return {name: METHODS[name] for name in METHODS if name in peers} | own
