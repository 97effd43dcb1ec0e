"""Two iterations towards singular values: Proposition 3 of RACS and Lemma 3.2 of SUMO.

    python -m benchmarks.papers.singular_values        # ten seconds

Proposition 3 of Gong et al., arXiv:2502.07752: the rounds of Eq. 16, s = Pᵀq / ‖q‖² and
q = P s / ‖s‖² from q = 1, lead to the principal singular pair of P = G², entry by entry. After each
round q sᵀ is compared with the best matrix of rank 1, σ₁ u vᵀ of the SVD of P. The rounds are power
iterations, whose error falls by (σ₂ / σ₁)² each time. Five rounds are RACS's default. G is
Gaussian, or has entries of Student's t distribution.

Lemma 3.2 of Refael et al., arXiv:2505.24749: after i iterations of Newton-Schulz the distance from
the polar factor is at most √r (1 - 1/κ)^(2^i). The lemma does not print the iteration, and its
proof has the error ‖X - UVᵀ‖₂ squared each time, which is not so. What holds:

- for the cubic X ← (3 X - X Xᵀ X) / 2 from X₀ = A / ‖A‖₂, with r = rank(A) and κ the condition
  number of A Aᵀ over the nonzero singular values, through the residual I - X Xᵀ, which falls to at
  most its square: ‖X - UVᵀ‖ ≤ ‖UUᵀ - X Xᵀ‖ ≤ √r (1 - 1/κ)^(2^i);
- so it does for the library's `newton_schulz`, which starts from A / ‖A‖ (Frobenius), with
  σ_r² / ‖A‖² in place of 1/κ.

With r and κ as they are printed (r the largest index with σ_r > σ_(r+1) = … = σ_m) it fails where
the small singular values are equal, as in diag(1, .01, .01). Muon's quintic ends near 1, not at 1,
and the lemma does not speak of it. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import curvax

from . import _report

# Proposition 3.

SHAPE = 128, 256
MATRICES = 10
ROUNDS = tuple(range(1, 11))
DEFAULT_ROUNDS = 5  # of `curvax.racs`
DRAWS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "Gaussian": lambda rng: rng.standard_normal(SHAPE),
    "t, 5 degrees of freedom": lambda rng: rng.standard_t(5, SHAPE),
    "t, 3 degrees of freedom": lambda rng: rng.standard_t(3, SHAPE),
    "t, 2 degrees of freedom": lambda rng: rng.standard_t(2, SHAPE),
}


class Rounds(NamedTuple):
    """Relative errors `(matrices, rounds)` of q sᵀ, and σ₂ / σ₁ `(matrices,)`."""

    errors: np.ndarray
    ratios: np.ndarray


def rank_1(draw: Callable[[np.random.Generator], np.ndarray], seed: int) -> Rounds:
    """The distance from the best matrix of rank 1 after each round."""
    rng = np.random.default_rng(seed)
    squares = jnp.asarray(np.stack([draw(rng) for _ in range(MATRICES)])) ** 2
    u, sigma, vt = jnp.linalg.svd(squares, full_matrices=False)
    best = sigma[:, :1, None] * u[:, :, :1] * vt[:, :1, :]
    errors = []
    for rounds in ROUNDS:
        q, s = curvax.row_column_scales(squares, rounds)
        distance = jnp.linalg.norm(q[:, :, None] * s[:, None, :] - best, axis=(-2, -1))
        errors.append(distance / sigma[:, 0])
    return Rounds(np.stack(errors, axis=1), np.asarray(sigma[:, 1] / sigma[:, 0]))


def rounds_table(found: dict[str, Rounds]) -> str:
    """The largest error of the matrices, round by round."""
    rows = [
        [f"{i}", *(f"{x.errors[:, k].max():.2e}" for x in found.values())]
        for k, i in enumerate(ROUNDS)
    ]
    last = ROUNDS.index(DEFAULT_ROUNDS)
    factors = [x.errors[:, last] / x.errors[:, last - 1] for x in found.values()]
    named = f"{ROUNDS[last]} over {ROUNDS[last - 1]}"
    rows.append([named, *(ends(x, ".3f") for x in factors)])
    rows.append(["(σ₂ / σ₁)²", *(ends(x.ratios**2, ".3f") for x in found.values())])
    return _report.table(["rounds", *found], rows)


def ends(values: np.ndarray, form: str) -> str:
    """The smallest and the largest."""
    return f"{values.min():{form}} … {values.max():{form}}"


# Lemma 3.2.

ITERATIONS = 24
FEW = 9  # rows of the table before it takes every third


def with_singular_values(sigma: np.ndarray, columns: int, seed: int) -> np.ndarray:
    """A matrix with these singular values and random singular vectors."""
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.standard_normal((sigma.size, sigma.size)))
    right, _ = np.linalg.qr(rng.standard_normal((columns, sigma.size)))
    return (left * sigma) @ right.T


def matrices(seed: int) -> dict[str, np.ndarray]:
    """By name."""
    return {
        "Gaussian 32 × 64": np.random.default_rng(seed).standard_normal((32, 64)),
        "geometric, σ = 1 … 0.01, 32 × 64": with_singular_values(
            np.geomspace(1, 1e-2, 32), 64, seed
        ),
        "rank 8 of 32, σ = 1 … 0.1": with_singular_values(
            np.concatenate([np.geomspace(1, 0.1, 8), np.zeros(24)]), 64, seed
        ),
        "diag(1, .01, .01)": np.diag([1.0, 0.01, 0.01]),
    }


class Lemma(NamedTuple):
    """What is known of one matrix after 0 … ITERATIONS iterations; all `(ITERATIONS + 1,)`."""

    rank: int
    kappa: float
    errors: np.ndarray  # ‖X - UVᵀ‖
    spectral: np.ndarray  # ‖X - UVᵀ‖₂
    residuals: np.ndarray  # ‖UUᵀ - X Xᵀ‖
    bounds: np.ndarray
    printed: np.ndarray  # the bound with r and κ as printed
    library: np.ndarray  # ‖X - UVᵀ‖ of `newton_schulz`, from A / ‖A‖
    library_bounds: np.ndarray
    quintic: float  # the same of Muon's quintic, at the end


def bound(rank: int, share: float) -> np.ndarray:
    """√r (1 - share)^(2^i)."""
    return np.sqrt(rank) * (1 - share) ** (2.0 ** np.arange(ITERATIONS + 1))


def iterates(found: dict[str, np.ndarray], coefficients: Any, steps: int) -> list[np.ndarray]:
    """The library's `newton_schulz` of all matrices: padded with zeros, they are one batch."""
    rows, columns = np.max([a.shape for a in found.values()], axis=0)
    padded = [np.pad(a, [(0, rows - len(a)), (0, columns - len(a.T))]) for a in found.values()]
    ends = curvax.newton_schulz(jnp.asarray(np.stack(padded)), coefficients, steps, eps=0.0)
    return [x[: len(a), : len(a.T)] for x, a in zip(np.asarray(ends), found.values(), strict=True)]


def lemmas_of(found: dict[str, np.ndarray]) -> dict[str, Lemma]:
    """For each matrix."""
    start = [a / np.linalg.norm(a) for a in found.values()]
    steps = range(1, ITERATIONS + 1)
    cubic = [start, *(iterates(found, (1.5, -0.5, 0.0), i) for i in steps)]
    quintic = iterates(found, "quintic", ITERATIONS)
    return {
        name: lemma(a, [xs[k] for xs in cubic], quintic[k])
        for k, (name, a) in enumerate(found.items())
    }


def lemma(a: np.ndarray, library: list[np.ndarray], quintic: np.ndarray) -> Lemma:
    """Errors and bounds; the library's iterates are given."""
    u, sigma, vt = np.linalg.svd(a, full_matrices=False)
    noise = max(a.shape) * np.finfo(a.dtype).eps * sigma[0]
    rank = int((sigma > noise).sum())
    smallest = np.where(sigma > noise, sigma, 0)[-1]
    printed_rank = int((sigma - sigma[-1] > noise).sum())
    u, vt = u[:, :rank], vt[:rank]
    polar = u @ vt

    x, errors, spectral, residuals = a / sigma[0], [], [], []
    for _ in range(ITERATIONS + 1):
        errors.append(np.linalg.norm(x - polar))
        spectral.append(np.linalg.norm(x - polar, 2))
        residuals.append(np.linalg.norm(u @ u.T - x @ x.T))
        x = (3 * x - x @ x.T @ x) / 2

    return Lemma(
        rank=rank,
        kappa=float((sigma[0] / sigma[rank - 1]) ** 2),
        errors=np.array(errors),
        spectral=np.array(spectral),
        residuals=np.array(residuals),
        bounds=bound(rank, (sigma[rank - 1] / sigma[0]) ** 2),
        printed=bound(printed_rank, (smallest / sigma[0]) ** 2),
        library=np.array([np.linalg.norm(x - polar) for x in library]),
        library_bounds=bound(rank, (sigma[rank - 1] / np.linalg.norm(a)) ** 2),
        quintic=float(np.linalg.norm(quintic - polar)),
    )


SLACK = 1e-9
"""Rounding: the iteration lifts noise in the null space by 1.5 each time."""


def holds(errors: np.ndarray, bounds: np.ndarray) -> str:
    """Whether the errors are below the bounds, and if not, where."""
    above = np.flatnonzero(errors > bounds + SLACK)
    if not above.size:
        return "yes"
    return f"**no**, i = {above[0]} … {above[-1]}"


def lemma_tables(found: dict[str, Lemma]) -> str:
    """Which bounds hold, then errors and bounds by iteration."""
    summary = [
        [
            name,
            f"{x.rank}",
            f"{x.kappa:.4g}",
            holds(x.residuals, x.bounds),
            holds(x.errors, x.residuals),
            holds(x.library, x.library_bounds),
            holds(x.errors, x.printed),
            holds(x.spectral[1:], x.spectral[:-1] ** 2),
            f"{x.quintic / np.sqrt(x.rank):.2f}",
        ]
        for name, x in found.items()
    ]
    titles = [
        "A",
        "r",
        "κ",
        "residual ≤ bound",
        "error ≤ residual",
        "`newton_schulz` ≤ its bound",
        "error ≤ bound as printed",
        "‖error‖₂ squared each time",
        f"quintic's error / √r at {ITERATIONS}",
    ]
    shown = [i for i in range(ITERATIONS + 1) if i < FEW or i % 3 == 0]
    rows = [
        [f"{i}", *(f"{x.errors[i]:.2e} / {x.bounds[i]:.2e}" for x in found.values())] for i in shown
    ]
    return (
        _report.table(titles, summary) + "\n\n" + _report.table(["i: error / bound", *found], rows)
    )


# The figure.


def plot(rounds: dict[str, Rounds], lemmas: dict[str, Lemma]) -> Figure:
    """Errors by round and by iteration, the latter with the lemma's bound."""
    figure = Figure(figsize=(14, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, found), color in zip(rounds.items(), _report.COLORS, strict=False):
        left.plot(ROUNDS, np.median(found.errors, axis=0), "o-", color=color, label=name)
        left.plot(ROUNDS, found.errors.T, color=color, alpha=0.35, lw=0.8)
    left.axvline(DEFAULT_ROUNDS, color="gray", linestyle=":", label="RACS's default")
    left.set(
        title=f"(a) Proposition 3: q sᵀ and the best rank 1 of G², {SHAPE[0]} × {SHAPE[1]}",
        xlabel="rounds of Eq. 16",
        ylabel=f"relative error: {MATRICES} matrices, their median",
        yscale="log",
    )
    left.set_xticks(ROUNDS)

    iterations = np.arange(ITERATIONS + 1)
    for (name, found), color in zip(lemmas.items(), _report.COLORS, strict=False):
        right.plot(iterations, found.errors, "o-", ms=4, color=color, label=name)
        right.plot(iterations, found.bounds, "--", color=color)
    failing = next(name for name in lemmas if name.startswith("diag"))
    color = _report.COLORS[list(lemmas).index(failing)]
    right.plot(iterations, lemmas[failing].printed, ":", color=color, label="its bound as printed")
    right.plot([], [], "--", color="gray", label="bound √r (1 - 1/κ)^(2^i)")
    right.set(
        title="(b) Lemma 3.2: cubic Newton-Schulz from A / ‖A‖₂",
        xlabel="iteration i",
        ylabel="‖X - UVᵀ‖",
        yscale="log",
        ylim=(1e-16, 20),
    )
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2)
    return figure


def main() -> None:
    """Runs everything and writes tables, numbers and figure."""
    args = _report.arguments(__doc__)
    jax.config.update("jax_enable_x64", True)
    rounds = {name: rank_1(draw, args.seed) for name, draw in DRAWS.items()}
    lemmas = lemmas_of(matrices(args.seed))
    body = "\n\n".join(
        [
            "Proposition 3 of RACS: ‖q sᵀ - σ₁ u vᵀ‖ / σ₁ by rounds of Eq. 16, the largest of "
            f"{MATRICES} matrices G of {SHAPE[0]} × {SHAPE[1]}. Below: the range of the factor "
            f"from round {DEFAULT_ROUNDS - 1} to {DEFAULT_ROUNDS}, RACS's last, and of (σ₂ / σ₁)² "
            "of G², to which it tends.",
            rounds_table(rounds),
            "Lemma 3.2 of SUMO: cubic Newton-Schulz X ← (3 X - X Xᵀ X) / 2 from X₀ = A / ‖A‖₂; "
            "error ‖X - UVᵀ‖, residual ‖UUᵀ - X Xᵀ‖, bound √r (1 - 1/κ)^(2^i) with r = rank(A) and "
            "κ of the nonzero singular values; for `newton_schulz`, which starts from A / ‖A‖, "
            "1/κ is σ_r² / ‖A‖². As printed κ is infinite for a singular A, and the bound √r. The "
            f"errors end in rounding, which no bound covers: comparisons allow {SLACK:g}.",
            lemma_tables(lemmas),
        ]
    )
    results = {
        "rounds": {
            name: {"errors": x.errors.tolist(), "ratios": x.ratios.tolist()}
            for name, x in rounds.items()
        },
        "lemma": {
            name: {k: np.asarray(v).tolist() for k, v in x._asdict().items()}
            for name, x in lemmas.items()
        },
    }
    settings = {"shape": SHAPE, "matrices": MATRICES, "rounds": ROUNDS, "iterations": ITERATIONS}
    _report.write(
        args,
        "singular_values",
        "Two iterations towards singular values (RACS: Proposition 3; SUMO: Lemma 3.2)",
        body,
        settings,
        results,
        plot(rounds, lemmas),
    )


if __name__ == "__main__":
    main()
