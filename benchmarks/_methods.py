"""Every method of the registry as the suites run it, and its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

import curvax

from ._floors import FLOORS, Floor
from ._rows import NAMED, REGISTRY, Row, by_family

RATE = 1e-3
STORAGES = {
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
    "packed": curvax.packed(),
}


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


def making(row: Row, **settings: Any) -> Callable[[int, int], Any]:
    """An optimizer with its own defaults, which refreshes all that it has once a period.

    Every check of an adaptive policy refreshes all factors: the most that it can cost.
    """

    def make(period: int, rank: int) -> Any:
        given = {**row.without_base, **row.with_output_layer, **row.benchmark}
        if row.own_policy:
            given |= {"check_every": period, "threshold": 1e-12}
        elif row.keeps:
            given["refresh"] = curvax.every(period, offset=row.offset)
        if row.ranked:
            given |= {"rank": rank, **row.by_rank(rank)}
        return row.optimizer(RATE, **{**given, **settings})

    return make


def counting(row: Row, numbers: Any) -> Callable[[int, int, int], int] | None:
    """The formula of a row, or of a variant, for the method's own defaults."""
    return numbers and (lambda m, n, r: numbers(row.size(m, n, r, {})))


def methods_of(row: Row, **settings: Any) -> dict[str, Method]:
    """A method, its variants, and itself with every storage, all with these settings."""
    plain = Method(
        making(row, **settings),
        FLOORS[row.floor] if row.floor else None,
        row.aim,
        row.peer and row.peer.name,
        row.peer and row.peer.aim,
        counting(row, row.numbers),
        refreshes=row.keeps is not None,
        offset=row.offset,
    )
    found = {row.name: plain}
    for label, own in row.variants.items():
        found[f"{row.name}, {label}"] = Method(
            making(row, **own.settings, **settings),
            FLOORS[own.floor],
            own.aim,
            numbers=counting(row, own.numbers),
            refreshes=plain.refreshes,
            offset=row.offset,
        )
    for label, storage in STORAGES.items() if row.factors else ():
        coded = making(row, storage=storage, **settings)
        found[f"{row.name}, {label}"] = plain._replace(make=coded, aim=None, numbers=None)
    return found


def with_settings(name: str, **settings: Any) -> Method:
    """A method of the registry, its variant, or itself with a storage, with these settings."""
    return methods_of(NAMED[name.partition(",")[0]], **settings)[name]


METHODS: dict[str, Method] = PEERS | {
    name: method
    for rows in by_family().values()
    for row in rows
    for name, method in methods_of(row).items()
}
FAMILIES = tuple(row.name for row in REGISTRY)


def chosen(families: Sequence[str], variants: bool = True) -> dict[str, Method]:
    """The methods of these names, with their variants, AdamW, and their peers from Optax."""
    own = {
        name: method
        for name, method in METHODS.items()
        if name.partition(",")[0] in families and (variants or "," not in name)
    }
    return with_peers(own)


def with_peers(own: dict[str, Method]) -> dict[str, Method]:
    """AdamW, the peers of these methods, and they themselves."""
    peers = {method.peer for method in own.values()} | {"optax.adamw"}
    return {name: METHODS[name] for name in METHODS if name in peers} | own
