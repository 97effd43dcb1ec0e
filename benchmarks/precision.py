"""The accuracy of products at each precision, and of turns of bases, also after a spike.

    python -m benchmarks precision                       # on a CPU in emulation
    python -m benchmarks precision --only refreshes,roots,steps

Matrices have eigenvalues from 1 down to 1 / condition, evenly on a logarithmic scale. Errors are
those of directions beside float64: `√(2 - 2 cos)` of the angle between both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax
from curvax.transforms.linalg import _turns
from curvax.transforms.linalg._inverse_root import solve_root
from curvax.transforms.linalg._products import LEVELS, at, multiplied

from . import _record
from ._curves import spread

Measure = Callable[[int, float, int], Mapping[str, Any]]  # of order, condition and seed
SECTIONS = ("refreshes", "roots", "steps", "turns", "spikes")
ORDERS = (192, 640)
CONDITIONS = (1e2, 1e4, 1e6)
STEPS, DECAY = 20, 0.95
CHANGE = 0.02  # of the directions in which gradients are large, in a step
X3 = dict.fromkeys(("step", "statistics", "refresh"), "bf16x3")
SETTINGS: Mapping[str, Any] = {
    "float32": "float32",
    "bf16x6": "bf16x6",
    "bf16x3": "bf16x3",
    "bf16x3, statistics in bf16": curvax.products(**X3 | {"statistics": "bf16"}),
    "bf16x3, refreshes in bf16": curvax.products(**X3 | {"refresh": "bf16"}),
    "bf16x3, steps in bf16": curvax.products(**X3 | {"step": "bf16"}),
    "bf16": "bf16",
}
TURNED = (192, 640, 1024)  # orders of the bases that turn once
SPIKE, SEEDS = 1e3, (0, 1, 2)  # the length of one gradient over others
SPIKED = ("float32", "bf16x6", "bf16x3", "bf16x3, statistics in bf16", "bf16")
AFTER = (1, 5, 20)  # steps after a spike
SPIKED_ORDER, WIDTH, LENGTH, RATE = 96, 32, 200, 0.02


def graded(order: int, condition: float) -> np.ndarray:
    """Eigenvalues."""
    return np.geomspace(1, 1 / condition, order)


def basis(generator: np.random.Generator, order: int) -> np.ndarray:
    """Orthonormal."""
    return np.linalg.qr(generator.standard_normal((order, order)))[0]


def stream(order: int, condition: float, seed: int, steps: int = STEPS) -> list[np.ndarray]:
    """Gradients `(order, order / 2)` whose covariance turns slowly."""
    generator = np.random.default_rng(seed)
    u, spectrum, found = basis(generator, order), graded(order, condition) ** 0.5, []
    for _ in range(steps):
        found.append((u * spectrum) @ generator.standard_normal((order, order // 2)))
        turn = generator.standard_normal((order, order)) * CHANGE / order**0.5
        u = np.linalg.qr(u @ (np.eye(order) + turn - turn.T))[0]
    return found


def error(found: Any, exact: np.ndarray) -> float:
    """The error of the direction of a matrix."""
    found = np.asarray(found, np.float64)
    found, exact = found / np.linalg.norm(found), exact / np.linalg.norm(exact)
    return float(np.linalg.norm(found - exact))


def followed(transformation: optax.GradientTransformation, result: int) -> Any:
    """The state at the end (0), or all directions (1), of gradients; compiled for each shape."""

    def step(state: Any, g: jax.Array) -> tuple[Any, Any]:
        direction, state = transformation.update(g, state)
        return state, direction

    return jax.jit(lambda gs: jax.lax.scan(step, transformation.init(gs[0]), gs)[result])


@functools.cache
def follower(setting: str) -> Callable[[jax.Array], Any]:
    """The state of rotated bases."""
    how: Any = {"refresh": curvax.every(1), "b2": DECAY, "side": "left", "root": 2}
    made = curvax.precondition(method="rotations", products=SETTINGS[setting], **how)
    return followed(made, 0)


def refreshes(order: int, condition: float, seed: int) -> dict[str, float]:
    """`U h^(-1/2) Uᵀ G` beside `L^(-1/2) G` after refreshes at every step."""
    gradients = stream(order, condition, seed)
    exact = sum((1 - DECAY) * DECAY**i * (g @ g.T) for i, g in enumerate(reversed(gradients)))
    d, q = np.linalg.eigh(np.asarray(exact))
    direction = (q * d**-0.5) @ (q.T @ gradients[-1])
    single, found = jnp.asarray(np.stack(gradients), jnp.float32), {}
    for name in SETTINGS:
        state = follower(name)(single)
        u, h = (np.asarray(x, np.float64) for x in (state.left.basis, state.left.statistic))
        near = (u * np.abs(np.diag(h)) ** -0.5) @ (u.T @ gradients[-1])
        found[name] = error(near, direction)
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


def turns(order: int, condition: float, seed: int) -> dict[str, float]:
    """Directions `L^(-1/2) G` by bases that were exact before the last gradient: `1 - cos`.

    The gradient's covariance is that of the older statistic turned by a tenth, and its number of
    columns the order.
    """
    generator = np.random.default_rng(seed)
    q, d = basis(generator, order), graded(order, condition)
    turn = generator.standard_normal((order, order)) / (2 * order) ** 0.5
    turned = np.linalg.qr(q + 0.1 * q @ (turn - turn.T) / 2)[0]
    g = (turned * d**0.5) @ generator.standard_normal((order, order)) / order**0.5
    statistic = DECAY * (q * d) @ q.T + (1 - DECAY) * g @ g.T
    exact_d, exact = np.linalg.eigh(statistic)
    wanted = (exact / exact_d**0.5) @ (exact.T @ g)

    def missed(u: Any) -> float:
        """By the eigenvalues of the statistic in a basis, in float64."""
        u = np.asarray(u, np.float64)
        found = (u / np.sum(u * (statistic @ u), axis=0) ** 0.5) @ (u.T @ g)
        return error(found, wanted) ** 2 / 2

    with jax.default_matmul_precision("highest"):
        u, x, old = (jnp.asarray(a, jnp.float32) for a in (q, g, np.diag(d)))
        whole, seen = jnp.asarray(statistic, jnp.float32), u.T @ x
        h = DECAY * old + (1 - DECAY) * seen @ seen.T
        rotated = jax.jit(_turns.by_rotations, static_argnums=2)(u, h, 16).basis
        made = {"rotations": rotated, "a step of QR": jnp.linalg.qr(whole @ u)[0]}
        made |= {"eigh": jnp.linalg.eigh(whole)[1], "the old basis": u}
    return {name: missed(basis) for name, basis in made.items()}


def directions_after(method: str, setting: str, seed: int, dtype: Any) -> np.ndarray:
    """SOAP's directions `AFTER` so many steps after a spike, bases refreshed at every step."""
    first, then = stream(SPIKED_ORDER, 1e4, seed), stream(SPIKED_ORDER, 1e4, seed + 100)
    gradients = jnp.asarray(np.stack([*first[:-1], SPIKE * first[-1], *then]), dtype)
    run = spiked(method, "" if dtype == jnp.float64 else setting)
    return np.asarray(run(gradients), np.float64)[[STEPS - 1 + after for after in AFTER]]


@functools.cache
def spiked(method: str, setting: str) -> Callable[[jax.Array], Any]:
    """All directions of SOAP."""
    products = SETTINGS[setting] if setting else None
    how: Any = {"method": method, "refresh": curvax.every(1), "products": products}
    return followed(curvax.scale_by_soap(**how), 1)


def losses_after(method: str, setting: str, seed: int, spike: float = SPIKE) -> list[float]:
    """Of a network that learns another one, whose gradient is so long once, half-way; by seed."""
    rate = optax.cosine_decay_schedule(RATE, LENGTH)
    soap = curvax.soap(rate, method=method, refresh=1, products=SETTINGS[setting])

    def network(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]

    def drawn(key: jax.Array) -> Any:
        shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
        keys = dict(zip(shapes, jax.random.split(key), strict=True))
        return {
            name: {"kernel": jax.random.normal(keys[name], shape) / shape[0] ** 0.5}
            for name, shape in shapes.items()
        }

    def trained(key: jax.Array) -> jax.Array:
        teacher, start, data = jax.random.split(key, 3)
        teacher, start = drawn(teacher), drawn(start)

        def loss_of(params: Any, key: jax.Array) -> jax.Array:
            x = jax.random.normal(key, (4 * WIDTH, WIDTH)) * graded(WIDTH, 1e2)
            return jnp.mean(jnp.square(network(params, x) - network(teacher, x)))

        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            params, state = carry
            length = jnp.where(t == LENGTH // 2, spike, 1.0)
            grads = jax.grad(loss_of)(params, jax.random.fold_in(data, t))
            grads = jax.tree.map(lambda g: length * g, grads)
            updates, state = soap.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = start, soap.init(start)
        (params, _), _ = jax.lax.scan(step, carry, jnp.arange(LENGTH))
        return loss_of(params, data) / loss_of(start, data)

    run = jax.jit(trained)
    return [float(run(jax.random.key(seed + x))) for x in SEEDS]


def spikes(seed: int) -> _record.Table:
    """The direction after one gradient that is a thousand times as long, and the loss after it."""
    with jax.enable_x64(True):
        exact = [directions_after("eigh", "", seed + x, jnp.float64) for x in SEEDS]
    rows: list[dict[str, Any]] = []
    for method, setting in itertools.product(("eigh", "qr", "rotations"), SPIKED):
        row: dict[str, Any] = {"method": f'`"{method}"`', "setting": setting}
        found = [directions_after(method, setting, seed + x, jnp.float32) for x in SEEDS]
        for i, after in enumerate(AFTER):
            errors = [error(a[i], b[i]) for a, b in zip(found, exact, strict=True)]
            row[f"after {after}"] = min(1 - x**2 / 2 for x in errors)
        row["loss"] = spread(losses_after(method, setting, seed), ".4f")
        rows.append(row)
    columns = {"method": ("method", ""), "setting": ("products", "")}
    columns |= {f"after {x}": (f"cosine, {x} after", ".3f") for x in AFTER}
    columns["loss"] = ("loss, mean (range)", "")
    without = spread(losses_after("eigh", "float32", seed, spike=1.0), ".4f")
    note = (
        f"One gradient {SPIKE:g} times as long, bases refreshed at every step. Of three seeds the "
        f"lowest cosine of SOAP's direction with that in float64, {SPIKED_ORDER} × "
        f"{SPIKED_ORDER // 2}, condition 1e4; and the loss of a small network that learns another "
        f"one, over that at the start, {LENGTH // 2} steps after the spike. Without a spike it is "
        f"{without}."
    )
    return _record.Table("After a spike", columns, rows, note)


def by_condition(
    title: str, first: str, measure: Measure, orders: tuple[int, ...], seed: int, note: str = ""
) -> _record.Table:
    """A row for each setting, a column for each order and condition."""
    columns, rows = {"setting": (first, "")}, {}
    for order, condition in itertools.product(orders, CONDITIONS):
        place = f"{order}, {condition:.0e}"
        columns[place] = (place, ".1e")
        for name, value in measure(order, condition, seed).items():
            rows.setdefault(name, {"setting": name})[place] = value
    return _record.Table(title, columns, list(rows.values()), note)


def main() -> None:
    """Prints the tables that the arguments ask for."""
    args = _record.arguments(__doc__, SECTIONS).parse_args()
    tables = []
    if "refreshes" in args.only:
        note = (
            f"Roots `U h^(-1/2) Uᵀ` from rotated bases after {STEPS} steps of gradients of half "
            "rank whose covariance turns, refreshed at every step: the error of the direction."
        )
        made = by_condition("Rotations of bases", "products", refreshes, ORDERS, args.seed, note)
        tables.append(made)
    for root in (2, 4) if "roots" in args.only else ():
        title, measure = f"Roots by products, p = {root}", functools.partial(roots, root=root)
        tables.append(by_condition(title, "level", measure, ORDERS, args.seed))
    if "steps" in args.only:
        note = "SOAP's direction in exact bases, where both sides have this condition number."
        made = by_condition("Rotations of a step", "level", steps, ORDERS, args.seed, note)
        tables.append(made)
    if "turns" in args.only:
        note = (
            "One minus the cosine of the direction after one refresh in float32, for a statistic "
            "whose basis was exact one step before."
        )
        tables.append(by_condition("Turns", "by", turns, TURNED, args.seed, note))
    if "spikes" in args.only:
        tables.append(spikes(args.seed))
    about = "Levels of `curvax.products`, on this device or in emulation; by order and condition."
    _record.write(args, "precision", "Precision of products", about, tables, {"orders": ORDERS})
