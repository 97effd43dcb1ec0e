"""The accuracy at each precision of products: refreshes, roots, steps, and a loss.

    python -m benchmarks precision                       # on a CPU in emulation
    python -m benchmarks precision --only refreshes,roots,steps

Matrices have eigenvalues from 1 down to 1 / condition, evenly on a logarithmic scale. Errors are
those of directions beside float64: `√(2 - 2 cos)` of the angle between both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from curvax.transforms.linalg._inverse_root import solve_root
from curvax.transforms.linalg._products import LEVELS, at, multiplied

from . import _record

SECTIONS = ("refreshes", "roots", "steps", "losses")
ORDERS = (192, 640)
CONDITIONS = (1e2, 1e4, 1e6)
STEPS, DECAY = 20, 0.95
CHANGE = 0.02  # of the directions in which gradients are large, in a step
SETTINGS: Mapping[str, Any] = {
    "float32": "float32",
    "bf16x6": "bf16x6",
    "bf16x3": "bf16x3",
    "bf16x3, statistics in bf16": curvax.products(
        step="bf16x3", statistics="bf16", refresh="bf16x3"
    ),
    "bf16x3, refreshes in bf16": curvax.products(
        step="bf16x3", statistics="bf16x3", refresh="bf16"
    ),
    "bf16x3, steps in bf16": curvax.products(step="bf16", statistics="bf16x3", refresh="bf16x3"),
    "bf16": "bf16",
}
RATE, ADAM_RATE, SEEDS = 0.016, 0.004, (0, 1, 2)


def graded(order: int, condition: float) -> np.ndarray:
    """Eigenvalues."""
    return np.geomspace(1, 1 / condition, order)


def basis(generator: np.random.Generator, order: int) -> np.ndarray:
    """Orthonormal."""
    return np.linalg.qr(generator.standard_normal((order, order)))[0]


def stream(order: int, condition: float, seed: int) -> list[np.ndarray]:
    """Gradients `(order, order / 2)` whose covariance turns slowly."""
    generator = np.random.default_rng(seed)
    u, spectrum, found = basis(generator, order), graded(order, condition) ** 0.5, []
    for _ in range(STEPS):
        found.append((u * spectrum) @ generator.standard_normal((order, order // 2)))
        turn = generator.standard_normal((order, order)) * CHANGE / order**0.5
        u = np.linalg.qr(u @ (np.eye(order) + turn - turn.T))[0]
    return found


def error(found: Any, exact: np.ndarray) -> float:
    """The error of the direction of a matrix."""
    found = np.asarray(found, np.float64)
    found, exact = found / np.linalg.norm(found), exact / np.linalg.norm(exact)
    return float(np.linalg.norm(found - exact))


@functools.cache
def follower(setting: str) -> Callable[[jax.Array], Any]:
    """The state of rotated bases after gradients, compiled once for each shape."""
    how: Any = {"refresh": curvax.every(1), "b2": DECAY, "side": "left", "root": 2}
    transformation = curvax.precondition(method="rotations", products=SETTINGS[setting], **how)

    def step(state: Any, g: jax.Array) -> tuple[Any, None]:
        return transformation.update(g, state)[1], None

    return jax.jit(lambda gs: jax.lax.scan(step, transformation.init(gs[0]), gs)[0])


def refreshes(order: int, condition: float, seed: int) -> dict[str, tuple[float, float]]:
    """`U h^(-1/2) Uᵀ G` beside `L^(-1/2) G` after refreshes at every step, and `max |UᵀU - I|`."""
    gradients = stream(order, condition, seed)
    exact = sum((1 - DECAY) * DECAY**i * (g @ g.T) for i, g in enumerate(reversed(gradients)))
    d, q = np.linalg.eigh(np.asarray(exact))
    direction = (q * d**-0.5) @ (q.T @ gradients[-1])
    single, found = jnp.asarray(np.stack(gradients), jnp.float32), {}
    for name in SETTINGS:
        state = follower(name)(single)
        u, h = (np.asarray(x, np.float64) for x in (state.left.basis, state.left.statistic))
        near = (u * np.abs(np.diag(h)) ** -0.5) @ (u.T @ gradients[-1])
        found[name] = error(near, direction), float(np.abs(u.T @ u - np.eye(order)).max())
    return found


@functools.cache
def solver(level: str, root: int) -> Callable[[jax.Array], jax.Array]:
    """Roots by products, compiled once for each shape."""

    def solved(a: jax.Array) -> jax.Array:
        with at(level):
            return solve_root(a, root, 0.0, "absolute", "products").inverse_root

    return jax.jit(solved)


def roots(order: int, condition: float, seed: int, root: int) -> dict[str, float]:
    """`A^(-1/p) G` by products, for `G = A^(1/p) Z` with Gaussian `Z`: the error of `Z`."""
    generator = np.random.default_rng(seed)
    u, d = basis(generator, order), graded(order, condition)
    z = generator.standard_normal((order, order // 2))
    a, g = (u * d) @ u.T, ((u * d ** (1 / root)) @ u.T) @ z
    found = {}
    for level in LEVELS:
        x = np.asarray(solver(level, root)(jnp.asarray(a, jnp.float32)), np.float64)
        found[level] = error(x @ g, z) if np.isfinite(x).all() else float("nan")
    return found


def rounded_to_tf32(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of operands of 11 significant bits."""
    return jnp.matmul(*(jax.lax.reduce_precision(x, 8, 10) for x in (a, b)), precision="highest")


def steps(order: int, condition: float, seed: int) -> dict[str, float]:
    """SOAP's direction of `(order, 2 order)` in exact bases, for rotations at a level."""
    generator = np.random.default_rng(seed)
    left, right = basis(generator, order), basis(generator, 2 * order)
    across = np.sqrt(np.outer(graded(order, condition), graded(2 * order, condition)))
    g = left @ (across * generator.standard_normal(across.shape)) @ right.T

    def direction(times: Callable[..., Any], g: Any, left: Any, right: Any, across: Any) -> Any:
        return times(times(left, times(times(left.T, g), right) / across), right.T)

    given = g, left, right, across
    exact = direction(np.matmul, *given)
    single = [jnp.asarray(x, jnp.float32) for x in given]
    found = {}
    for level in LEVELS:
        times = functools.partial(multiplied, precision=level)
        found[level] = error(jax.jit(functools.partial(direction, times))(*single), exact)
    times = jax.jit(functools.partial(direction, rounded_to_tf32))
    return found | {"TF32": error(times(*single), exact)}


def losses(seed: int) -> list[dict[str, Any]]:
    """The language model's, with bases that are rotated at every step."""
    from ._tasks import lm
    from ._training import Method, Program

    rows: list[dict[str, Any]] = []
    task = lm()
    for name, products in SETTINGS.items():
        options = {"method": "rotations", "refresh": 1, "products": products}
        method = Method(curvax.soap, options)
        program = Program(functools.partial(method.optimizer, task), task, scanned=True)
        row: dict[str, Any] = {"setting": name}
        for number in SEEDS:
            values = {"rate": RATE, "adam_rate": ADAM_RATE}
            *_, run = program.train(values, seed + number, last=True)
            row[f"seed {number}"] = run.loss
        row["mean"] = float(np.mean([row[f"seed {number}"] for number in SEEDS]))
        rows.append(row)
    return rows


def by_condition(
    measure: Callable[[int, float, int], Mapping[str, Any]], orders: tuple[int, ...], seed: int
) -> list[dict[str, Any]]:
    """A row for each setting."""
    rows: dict[str, dict[str, Any]] = {}
    for order in orders:
        for condition in CONDITIONS:
            for name, value in measure(order, condition, seed).items():
                row = rows.setdefault(name, {"setting": name})
                key = f"{order} {condition:g}"
                row[key], row[f"defect {key}"] = (
                    value if isinstance(value, tuple) else (value, None)
                )
    return list(rows.values())


def columns(orders: tuple[int, ...], first: str, defects: bool = False) -> Any:
    """The columns of a table by order and condition."""
    found = {"setting": (first, "")}
    for order in orders:
        found |= {f"{order} {c:g}": (f"{order}, {c:.0e}", ".1e") for c in CONDITIONS}
    if defects:
        key = f"{orders[-1]} {CONDITIONS[-1]:g}"
        found[f"defect {key}"] = (f"max \\|UᵀU - I\\|, {orders[-1]}", ".1e")
    return found


def main() -> None:
    """Prints the tables that the arguments ask for."""
    args = _record.arguments(__doc__, SECTIONS).parse_args()
    orders, tables = ORDERS, []
    if "refreshes" in args.only:
        rows = by_condition(refreshes, orders, args.seed)
        note = (
            f"Roots `U h^(-1/2) Uᵀ` from rotated bases after {STEPS} steps of gradients of half "
            "rank whose covariance turns, refreshed at every step: the error of the direction, and "
            "the basis at the largest order and condition."
        )
        of = columns(orders, "products", defects=True)
        tables.append(_record.Table("Rotations of bases", of, rows, note))
    for root in (2, 4) if "roots" in args.only else ():
        rows = by_condition(functools.partial(roots, root=root), orders, args.seed)
        title = f"Roots by products, p = {root}"
        tables.append(_record.Table(title, columns(orders, "level"), rows))
    if "steps" in args.only:
        rows = by_condition(steps, orders, args.seed)
        note = "SOAP's direction in exact bases, where both sides have this condition number."
        tables.append(_record.Table("Rotations of a step", columns(orders, "level"), rows, note))
    if "losses" in args.only:
        of = {"setting": ("products", "")} | {f"seed {x}": (f"seed {x}", ".4f") for x in SEEDS}
        note = (
            f"`soap(method='rotations', refresh=1)`, 200 steps of the language model, rate {RATE}."
        )
        of |= {"mean": ("mean", ".4f")}
        tables.append(_record.Table("Losses", of, losses(args.seed), note))
    about = "Levels of `curvax.products`, on this device or in emulation; by order and condition."
    _record.write(args, "precision", "Precision of products", about, tables, {"orders": orders})


if __name__ == "__main__":
    main()
