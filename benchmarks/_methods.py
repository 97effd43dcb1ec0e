"""Every method of the registry as benchmarks run it, its peers, and facts for benchmarks alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import optax

import curvax
from tests.registry import METHODS as ROWS
from tests.registry import Family, Row

RATE = 1e-3
STORAGES = {
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
    "packed": curvax.packed(),
}
NAMES = tuple(row.name for family in get_args(Family) for row in ROWS if row.family == family)
NAMED = {row.name: row for row in ROWS}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "soap": {
        "rotations": {"method": "rotations"},
        "rotations in X6": {"method": "rotations", "products": "bf16x6"},
        "rotations in X3": {"method": "rotations", "products": "bf16x3"},
    },
    "asgo": {"roots in X6": {"method": "products", "products": "bf16x6"}},
    "eigen_adam": {"rotations": {"method": "rotations"}},
    "kl_shampoo": {"rotations": {"method": "rotations"}},
}
"""A method with other settings, which the step benchmark times beside the plain one."""


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
    peer: str | None = None  # an optimizer of Optax
    numbers: Callable[[int, int, int], int] | None = None  # of the state of an m × n matrix
    refreshes: bool = True  # or all its steps are the same
    offset: int = 1  # of the steps at which it refreshes, counted from 1


PEERS = {
    "optax.adamw": Method(lambda period, rank: optax.adamw(RATE), refreshes=False),
    "optax.contrib.muon": Method(lambda period, rank: optax.contrib.muon(RATE), refreshes=False),
    "optax.contrib.galore": Method(lambda period, rank: optax.contrib.galore(RATE, rank, period)),
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


def methods_of(row: Row) -> dict[str, Method]:
    """A method, its variants, and itself with every storage."""
    peer = f"optax.contrib.{row.name}"  # the same method in Optax
    plain = Method(
        making(row),
        peer if peer in PEERS else None,
        row.numbers and (lambda m, n, r: row.numbers(row.size(m, n, r, {}))),
        refreshes=row.keeps is not None,
        offset=offset_of(row),
    )
    more = VARIANTS.get(row.name, {})
    if row.factors:
        more = more | {label: {"storage": storage} for label, storage in STORAGES.items()}
    others = {f"{row.name}, {label}": making(row, **own) for label, own in more.items()}
    return {row.name: plain, **{name: plain._replace(make=x) for name, x in others.items()}}


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
    peers = {method.peer for method in own.values()} | {"optax.adamw"}
    return {name: METHODS[name] for name in METHODS if name in peers} | own
