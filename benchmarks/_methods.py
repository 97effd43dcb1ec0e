"""Every method as the suites run it, what it cannot do without, and what it is held to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

import curvax

from ._floors import (
    Floor,
    OneRoot,
    Orthogonalization,
    Projection,
    RankOne,
    Roots,
    Rotations,
)

RATE = 1e-3
STORAGES = {
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
}


class Method(NamedTuple):
    """An optimizer and its peers."""

    make: Callable[[int, int], optax.GradientTransformation]  # from a period and a rank
    floor: Callable[[int], Floor] | None = None  # from the rank
    aim: float | None = None  # over its floor, between refreshes
    peer: str | None = None  # an optimizer of Optax
    peer_aim: float | None = None  # over that
    numbers: Callable[[int, int, int], int] | None = None  # of the state, from m ≤ n and the rank
    refreshes: bool = True  # or all its steps are the same
    offset: int = 1  # of the steps at which it refreshes, counted from 1


def refreshed(make: Callable[..., Any], offset: int = 1) -> Callable[[int, int], Any]:
    """At the first step and once a period from then on."""
    return lambda period, rank: make(RATE, refresh=curvax.every(period, offset=offset))


def checked(make: Callable[..., Any]) -> Callable[[int, int], Any]:
    """Every check refreshes all factors: the most that adaptive policies can cost."""
    return lambda period, rank: make(RATE, check_every=period, threshold=1e-12)


def low_rank(make: Callable[..., Any], **settings: Any) -> Callable[[int, int], Any]:
    """The same at a rank."""

    def made(period: int, rank: int) -> Any:
        if make is curvax.alice:
            settings.setdefault("leading", rank * 5 // 16)  # the paper's 40 of 128
        return make(RATE, rank=rank, refresh=curvax.every(period, offset=1), **settings)

    return made


def always(make: Callable[..., Any], **settings: Any) -> Callable[[int, int], Any]:
    """The same at every step."""
    return lambda period, rank: make(RATE, **settings)


def with_factors() -> dict[str, Method]:
    """What keeps factors, which have storages."""
    shampoo = functools.partial(
        curvax.shampoo, base=None, matrices=curvax.MatrixRule(block_size=None)
    )
    kinds: dict[str, tuple[Any, Any, Any]] = {
        # Its statistics are due at whole periods, by default.
        "shampoo": (functools.partial(refreshed, offset=0), shampoo, Roots(False)),
        "foam": (checked, curvax.foam, Roots(True)),
        "dr_shampoo": (checked, curvax.dr_shampoo, Roots(True)),
        "soap": (refreshed, curvax.soap, Rotations(True)),
        "eigen_adam": (refreshed, curvax.eigen_adam, Rotations(False)),
        "asgo": (refreshed, curvax.asgo, OneRoot()),
    }
    numbers: dict[str, Callable[[int, int, int], int]] = {
        "shampoo": lambda m, n, r: 2 * m * m + 2 * n * n,
        "foam": lambda m, n, r: 2 * m * n + 3 * m * m + 3 * n * n,
        "dr_shampoo": lambda m, n, r: 2 * m * n + 3 * m * m + 3 * n * n,
        "soap": lambda m, n, r: 2 * m * n + 2 * m * m + 2 * n * n,
        "eigen_adam": lambda m, n, r: 2 * m * n + 2 * m * m,
        "asgo": lambda m, n, r: m * n + 2 * m * m,
    }
    found: dict[str, Method] = {}
    for name, (kind, make, floor) in kinds.items():
        aim = 1.3 if name in ("shampoo", "soap", "asgo") else None
        plain = Method(kind(make), lambda _, f=floor: f, aim, numbers=numbers[name])
        if name == "shampoo":
            plain = plain._replace(offset=0)
            every_step = kind(functools.partial(make, statistics_every=1))
            found["shampoo, statistics at every step"] = plain._replace(
                make=every_step, floor=lambda _: Roots(True), numbers=None
            )
        found[name] = plain
        for label, storage in STORAGES.items():
            coded = kind(functools.partial(make, storage=storage))
            found[f"{name}, {label}"] = plain._replace(make=coded, aim=None, numbers=None)
    return found


METHODS: dict[str, Method] = {
    "optax.adamw": Method(always(optax.adamw), numbers=lambda m, n, r: 2 * m * n, refreshes=False),
    "optax.contrib.muon": Method(always(optax.contrib.muon), refreshes=False),
    "optax.contrib.galore": Method(
        lambda period, rank: optax.contrib.galore(RATE, rank, period), Projection
    ),
    "muon": Method(
        always(curvax.muon),
        lambda _: Orthogonalization(False),
        1.3,
        "optax.contrib.muon",
        0.5,
        lambda m, n, r: m * n,
        False,
    ),
    "osgdm": Method(
        always(curvax.osgdm),
        lambda _: Orthogonalization(True),
        numbers=lambda m, n, r: m * n,
        refreshes=False,
    ),
    "swan": Method(
        always(curvax.swan),
        lambda _: Orthogonalization(True),
        numbers=lambda m, n, r: 0,
        refreshes=False,
    ),
    "racs": Method(
        always(curvax.racs, matrices=curvax.MatrixRule(output_layer=None)),
        lambda _: RankOne(),
        numbers=lambda m, n, r: m + n + 1,
        refreshes=False,
    ),
    "dasgo": Method(always(curvax.dasgo), numbers=lambda m, n, r: m * n + n, refreshes=False),
    **with_factors(),
    "galore": Method(
        low_rank(curvax.galore),
        Projection,
        1.6,
        "optax.contrib.galore",
        1.0,
        lambda m, n, r: m * r + 2 * n * r,
    ),
    "fira": Method(
        low_rank(curvax.fira), Projection, numbers=lambda m, n, r: m * r + 2 * n * r + 1
    ),
    "alice": Method(
        low_rank(curvax.alice),
        lambda r: Projection(r, inside="tracked"),
        numbers=lambda m, n, r: m * r + 2 * n * r + r * r + n + 1,
    ),
    "alice, no tracking": Method(
        low_rank(curvax.alice, tracking=False),
        Projection,
        1.6,
        numbers=lambda m, n, r: m * r + 2 * n * r + n + 1,
    ),
    "apollo": Method(
        low_rank(curvax.apollo, matrices=curvax.MatrixRule(output_layer=None)),
        lambda r: Projection(r, back=False),
        numbers=lambda m, n, r: 2 * n * r,
    ),
    "sumo": Method(
        low_rank(curvax.sumo),
        lambda r: Projection(r, larger=True, inside="svd"),
        numbers=lambda m, n, r: m * r + n * r + 1,
    ),
    "sumo, Newton-Schulz": Method(
        low_rank(curvax.sumo, method="newton_schulz"),
        lambda r: Projection(r, larger=True, inside="newton_schulz"),
    ),
}
FAMILIES = tuple(dict.fromkeys(name.partition(",")[0] for name in METHODS if "." not in name))


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
