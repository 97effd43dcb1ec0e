"""How large rounding is in QᵀLQ - diag(d), and what it does to FOAM's proxy without a floor.

    python -m benchmarks.papers.rounding_floor           # orders 16 … 512, 1 to 2 minutes
    python -m benchmarks.papers.rounding_floor --full    # to 1024, five times as many draws

Float32 factors L, scaled to the largest eigenvalue 1, are decomposed by `jnp.linalg.eigh`, and FOAM
checks them at once. E = QᵀLQ - diag(d) would be zero in exact arithmetic; its entries are given in
units of eps(float32) · d_max, the unit of `rounding_floor`. FOAM's estimate h of the root's error
divides E_ij by √((d_i + ε)(d_j + ε)). So two sets of entries are kept apart: all of them, and those
in rows or columns of eigenvalues below d_max / 1000, which alone can be large in h.

Then the same for a factor of low rank that goes on: L ← 0.995 L + 0.005 GGᵀ, for 200 steps before
the decomposition and 75 after it, with random G in one range of dimension n/8. The null space stays
what it was; entries that touch it are the rounding of 75 updates and of the check.
"""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from curvax.policies import damping_proxy
from curvax.transforms.refresh._foam import ROUNDING_FLOOR

from . import _report

ORDERS = (16, 32, 64, 128, 256, 512)
FLOORS = (0.0, 2.0, 4.0, ROUNDING_FLOOR, 2 * ROUNDING_FLOOR)
DEFAULT = FLOORS.index(ROUNDING_FLOOR)
DAMPINGS = (1e-9, 1e-12)  # ε0
ROOTS = (2, 4)
SMALL = 1e-3  # eigenvalues below this share of the largest count as small
DECAY = 0.995
STEPS = 200, 75  # before and after the decomposition
EPS = float(jnp.finfo(jnp.float32).eps)
HIGHEST = jax.lax.Precision.HIGHEST


# The spectra. All are made in float64 and rounded once.


def rotated(eigenvalues: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    q, _ = np.linalg.qr(rng.standard_normal((eigenvalues.size,) * 2))
    return (q * eigenvalues) @ q.T


def gram(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    g = rng.standard_normal((rows, columns))
    return g @ g.T


SPECTRA = {
    "full rank: GGᵀ, G n×2n": lambda n, rng: gram(n, 2 * n, rng),
    "low rank: GGᵀ, G n×n/8": lambda n, rng: gram(n, n // 8, rng),
    "rank 1": lambda n, rng: gram(n, 1, rng),
    "geometric, 1 … 1e-8": lambda n, rng: rotated(np.geomspace(1, 1e-8, n), rng),
    "power law, 1/i": lambda n, rng: rotated(1 / np.arange(1, n + 1), rng),
    "near identity, I + 1e-4 S": lambda n, rng: np.eye(n) + 1e-4 * rotated(rng.normal(size=n), rng),
}


def draw(spectrum: str, n: int, rng: np.random.Generator) -> jax.Array:
    factor = SPECTRA[spectrum](n, rng)
    factor = factor / np.linalg.eigvalsh(factor)[-1]
    return jnp.asarray((factor + factor.T) / 2, jnp.float32)


def check(statistic: jax.Array, q: jax.Array, d: jax.Array):
    """Largest entries of E, all and those of small eigenvalues, and h `(dampings, roots, floors)`.

    The second number is 0 if no eigenvalue is small.
    """
    product = jnp.matmul(q.mT, jnp.matmul(statistic, q, precision=HIGHEST), precision=HIGHEST)
    error = jnp.abs(product - jnp.diag(d)) / (EPS * jnp.max(jnp.abs(d)))
    small = d < SMALL * d[-1]
    small = small[:, None] | small[None, :]
    h = [
        [
            [damping_proxy(statistic, q, d, damping, root, floor) for floor in FLOORS]
            for root in ROOTS
        ]
        for damping in DAMPINGS
    ]
    return jnp.stack([jnp.max(error), jnp.max(jnp.where(small, error, 0))]), jnp.asarray(h)


@jax.jit
def unchanged(factor: jax.Array):
    """The check of a factor right after its decomposition."""
    d, q = jnp.linalg.eigh(factor)
    return check(factor, q, d)


@jax.jit
def continued(basis: jax.Array, key: jax.Array):
    """The check of a factor in the range of `basis (n, rank)`, 75 steps after its decomposition."""
    n, rank = basis.shape

    def step(i, factor):
        coefficients = jax.random.normal(jax.random.fold_in(key, i), (rank, 4 * rank))
        g = jnp.matmul(basis, coefficients, precision=HIGHEST)
        return DECAY * factor + (1 - DECAY) * jnp.matmul(g, g.T, precision=HIGHEST)

    before, after = STEPS
    factor = jax.lax.fori_loop(0, before, step, jnp.zeros((n, n)))
    d, q = jnp.linalg.eigh(factor)
    scale = d[-1]
    later = jax.lax.fori_loop(before, before + after, step, factor)
    return check(later / scale, q, d / scale)


def run(orders: tuple[int, ...], draws: int, seed: int):
    """Entries and h, `(spectrum, order, draw, …)` at once and `(order, draw, …)` after 75 steps."""
    rng = np.random.default_rng(seed)
    at_once, later = [], []
    total = (len(SPECTRA) + 1) * len(orders) * draws
    with tqdm(total=total, unit="factor") as progress:
        for spectrum in SPECTRA:
            for n in orders:
                for _ in range(draws):
                    at_once.append(jax.device_get(unchanged(draw(spectrum, n, rng))))
                    progress.update()
        for i, n in enumerate(orders):
            for j in range(draws):
                basis, _ = np.linalg.qr(rng.standard_normal((n, n // 8)))
                key = jax.random.fold_in(jax.random.key(seed), draws * i + j)
                later.append(jax.device_get(continued(jnp.asarray(basis, jnp.float32), key)))
                progress.update()

    def stack(pairs, *shape: int):
        return tuple(
            np.stack(x).reshape(*shape, len(orders), draws, *x[0].shape)
            for x in zip(*pairs, strict=True)
        )

    return stack(at_once, len(SPECTRA)), stack(later)


def plot(orders: tuple[int, ...], at_once, later) -> Figure:
    figure = Figure(figsize=(14, 5), layout="constrained")
    everywhere, small, proxy = figure.subplots(1, 3)
    (entries, h), (later_entries, later_h) = at_once, later
    styles = list(zip(SPECTRA, _report.COLORS, "osD^vP", strict=False))
    last = f"low rank, {STEPS[1]} steps after"
    for axis, which, title in (
        (everywhere, 0, "All entries of E = QᵀLQ - diag(d)"),
        (small, 1, "Entries of small eigenvalues, d < d_max / 1000"),
    ):
        for i, (spectrum, color, marker) in enumerate(styles):
            worst = entries[i, ..., which].max(axis=1)
            if worst.max() > 0:
                axis.plot(orders, worst, marker=marker, markersize=5, color=color, label=spectrum)
        axis.axhline(ROUNDING_FLOOR, color="black", linestyle=":", label="default rounding_floor")
        axis.set(xlabel="order n", ylabel="largest |E_ij| / (eps · d_max)", title=title)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.15 * max(ROUNDING_FLOOR, float(entries.max())))
    small.plot(orders, later_entries[..., 1].max(axis=1), "k--x", label=last)
    # At the smallest ε0 and p = 2, by floor.
    for i, (spectrum, color, marker) in enumerate(styles):
        worst = np.maximum(h[i, :, :, -1, 0].max(axis=(0, 1)), 1e-8)
        proxy.plot(FLOORS, worst, marker=marker, markersize=5, color=color, label=spectrum)
    proxy.plot(FLOORS, later_h[:, :, -1, 0].max(axis=(0, 1)), "k--x", label=last)
    proxy.axhspan(0.25, 0.75, color="gray", alpha=0.25, label="thresholds τ in use")
    proxy.set(
        title=f"FOAM's h at ε0 = {DAMPINGS[-1]:g}, p = 2",
        xlabel="rounding_floor",
        ylabel="largest h (1e-8 stands for less)",
        yscale="log",
    )
    for axis in (everywhere, small, proxy):
        axis.grid(alpha=0.3)
    handles, labels = everywhere.get_legend_handles_labels()
    more, names = proxy.get_legend_handles_labels()
    figure.legend(
        [*handles, *more[-2:]],
        [*labels, *names[-2:]],
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    return figure


def largest_by_floor(h: np.ndarray) -> list[str]:
    """The largest h of each floor at the smallest ε0; h is `(…, dampings, roots, floors)`."""
    worst = h[..., -1, :, :].reshape(-1, len(FLOORS)).max(axis=0)
    return [f"{x:.1e}" for x in worst]


def main() -> None:
    args = _report.arguments(__doc__, full="orders to 1024, 50 draws")
    orders, draws = ((*ORDERS, 1024), 50) if args.full else (ORDERS, 10)
    at_once, later = run(orders, draws, args.seed)
    (entries, h), (later_entries, later_h) = at_once, later

    def magnitudes(name: str, x: np.ndarray) -> tuple[str, ...]:
        everywhere, small = x[..., 0], x[..., 1]
        return (
            name,
            f"{np.median(everywhere):.1f}",
            f"{everywhere.max():.1f}",
            f"{small.max():.1f}" if small.max() > 0 else "none small",
        )

    noise = _report.table(
        ("spectrum", "all, median", "all, largest", "small d, largest"),
        [magnitudes(spectrum, entries[i]) for i, spectrum in enumerate(SPECTRA)],
    )
    by_order = _report.table(
        ("order", *map(str, orders)),
        [
            ("all", *(f"{x:.1f}" for x in entries[..., 0].max(axis=(0, 2)))),
            ("small d", *(f"{x:.1f}" for x in entries[..., 1].max(axis=(0, 2)))),
            (
                f"low rank, {STEPS[1]} steps after, small d",
                *(f"{x:.1f}" for x in later_entries[..., 1].max(axis=1)),
            ),
        ],
    )
    rows = []
    for i, spectrum in enumerate(SPECTRA):
        worst = h[i].max(axis=(0, 1, 3))  # (dampings, floors)
        rows.append((spectrum, *(f"{x:.1e}" for x in (*worst[:, 0], *worst[:, DEFAULT]))))
    titles = (
        "spectrum",
        *(f"floor 0, ε0 = {damping:g}" for damping in DAMPINGS),
        *(f"floor {ROUNDING_FLOOR:g}, ε0 = {damping:g}" for damping in DAMPINGS),
    )
    proxies = _report.table(titles, rows)
    sweep = _report.table(
        ("factor", *(f"floor {floor:g}" for floor in FLOORS)),
        [
            *((spectrum, *largest_by_floor(h[i])) for i, spectrum in enumerate(SPECTRA)),
            *(
                (f"low rank, {STEPS[1]} steps after, order {n}", *largest_by_floor(later_h[i]))
                for i, n in enumerate(orders)
            ),
        ],
    )
    body = (
        f"Orders {', '.join(map(str, orders))}, {draws} draws of each, float32, d_max = 1. "
        "Magnitude of the entries of QᵀLQ - diag(d) right after the decomposition, in units of "
        'eps(float32) · d_max; "small d": those in rows and columns of eigenvalues below '
        f"d_max / 1000.\n\n{noise}\n\nThe largest by order, over all spectra:\n\n{by_order}\n\n"
        "FOAM's h of the same factors, whose true error is zero; largest over orders, draws and "
        f"p = 2, 4:\n\n{proxies}\n\n"
        f"By floor, at ε0 = {DAMPINGS[-1]:g}; the factors of low rank have really changed within "
        f"their range in the {STEPS[1]} steps, which is what remains of h at the largest floor:"
        f"\n\n{sweep}\n\n"
        "The floor has a price: a real change of an eigenvalue by less than "
        f"{ROUNDING_FLOOR:g} · eps · d_max = {ROUNDING_FLOOR * EPS:.1e} · d_max is not seen, "
        "however small the eigenvalue."
    )
    settings = {
        "orders": orders,
        "draws": draws,
        "floors": FLOORS,
        "dampings": DAMPINGS,
        "roots": ROOTS,
        "small": SMALL,
        "decay": DECAY,
        "steps": STEPS,
    }
    results = {
        "axes": {
            "largest, median": "order, (all, small d)",
            "largest_h": "order, damping, root, floor",
        },
        **{
            name: {
                "largest": e.max(axis=1).tolist(),
                "median": np.median(e, axis=1).tolist(),
                "largest_h": proxy.max(axis=1).tolist(),
            }
            for name, e, proxy in (
                *((spectrum, entries[i], h[i]) for i, spectrum in enumerate(SPECTRA)),
                (f"low rank, {STEPS[1]} steps after", later_entries, later_h),
            )
        },
    }
    title = "Rounding in FOAM's check of float32 factors"
    figure = plot(orders, at_once, later)
    _report.write(args, "rounding_floor", title, body, settings, results, figure)


if __name__ == "__main__":
    main()
