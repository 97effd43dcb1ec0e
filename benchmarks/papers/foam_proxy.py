"""FOAM's error proxy against the true error on synthetic factors: Appendix K and Figure 8.

    python -m benchmarks.papers.foam_proxy           # orders 128, 256, 512, 8 trials; 2 minutes
    python -m benchmarks.papers.foam_proxy --full    # the paper's 256, 512, 1024, 15 trials

A factor A = Q diag(i^-r) Qᵀ becomes A + E with E = BBᵀ, scaled to a share of ‖A‖. The stale inverse
root is that of A, the fresh one that of A + E, both with the damping ε; Δ(ε) is the Frobenius norm
of their difference relative to the stale one. Compared with Δ are FOAM's proxy h(ε), in which E
enters through A + E as during training, and the baseline d(ε): the diagonalization residual of
A + E + εI in the basis Q. Everything is computed in float64, h without rounding floor.

The paper (Nam and Ahn, arXiv:2606.02365) does not print the shape of B: square B is what the text
suggests, and B with a quarter as many columns comes closest to the printed median of Δ/h.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from matplotlib.figure import Figure
from tqdm import tqdm

from curvax.policies import damping_proxy, residual_and_diagonal

from .. import _record

ROOTS = (2, 4)
DECAYS = (0.5, 1.0, 1.5, 2.0, 2.5)
DRIFTS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
DAMPINGS = np.geomspace(1e-8, 1e-2, 25)
REFRESH_SHARE = 0.2  # the samples with the largest true error are those that need a refresh
SHAPES = {"square B": 1, "B with n/4 columns": 4}


class Samples(NamedTuple):
    """Δ, h and d of one shape of B: (configurations, trials, dampings)."""

    truth: np.ndarray
    proxy: np.ndarray
    baseline: np.ndarray


@jax.jit
def measure(gaussian: jax.Array, b: jax.Array, decay: jax.Array, drift: jax.Array):
    """Δ, h and d for both roots and all dampings, each `(roots, dampings)`."""
    n = gaussian.shape[0]
    q, _ = jnp.linalg.qr(gaussian)
    stale = jnp.arange(1, n + 1) ** -decay
    a = (q * stale) @ q.T
    e = b @ b.T
    new = a + e * (drift * jnp.linalg.norm(a) / jnp.linalg.norm(e))
    new = (new + new.T) / 2
    fresh, u = jnp.linalg.eigh(new)
    # Uᵀ (P_fresh - P_stale) Q, entry by entry: a difference of roots times an entry of UᵀQ. So
    # small errors are not lost in the difference of two large matrices.
    overlap = u.T @ q

    def true_error(damping: jax.Array, root: int) -> jax.Array:
        f, s = (jnp.maximum(d, 0) + damping for d in (fresh, stale))
        f, s = f ** (-1 / root), s ** (-1 / root)
        return jnp.linalg.norm((f[:, None] - s) * overlap) / jnp.linalg.norm(s)

    def proxy(damping: jax.Array, root: int) -> jax.Array:
        return damping_proxy(new, q, stale, damping, root, rounding_floor=0.0)

    # εI changes the diagonal alone, which the residual's numerator leaves out; in the denominator
    # ‖A + E + εI‖² = Σ (λ + ε)².
    residual, _ = residual_and_diagonal(new, q)
    damped = jax.vmap(lambda damping: jnp.linalg.norm(fresh + damping))(DAMPINGS)
    baseline = residual * jnp.linalg.norm(fresh) / damped

    def sweep(function, root):
        return jax.vmap(functools.partial(function, root=root))(jnp.asarray(DAMPINGS))

    truth, h = (jnp.stack([sweep(f, root) for root in ROOTS]) for f in (true_error, proxy))
    return truth, h, jnp.broadcast_to(baseline, h.shape)


def run(orders: tuple[int, ...], trials: int, seed: int, progress: tqdm) -> dict[str, Samples]:
    """All samples, by the shape of B. A configuration is an order, a decay, a drift and a root."""
    samples = {}
    for shape, part in SHAPES.items():
        rng = np.random.default_rng(seed)
        kept: list[list[np.ndarray]] = [[], [], []]
        for n in orders:
            for decay in DECAYS:
                for drift in DRIFTS:
                    measured = []
                    for _ in range(trials):
                        gaussian = rng.standard_normal((n, n))
                        b = rng.standard_normal((n, n // part))
                        measured.append(jax.device_get(measure(gaussian, b, decay, drift)))
                        progress.update()
                    for values, trial in zip(kept, zip(*measured, strict=True), strict=True):
                        values.append(np.stack(trial, axis=1))
        samples[shape] = Samples(*(np.concatenate(values) for values in kept))
    return samples


def roc_auc(score: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive scores above a negative, ties counting half."""
    ranks = scipy.stats.rankdata(score)
    hits = positive.sum()
    excess = ranks[positive].sum() - hits * (hits + 1) / 2
    return float(excess / (hits * (score.size - hits)))


def summarize(samples: Samples) -> dict[str, np.ndarray]:
    """For each configuration the AUC of h and of d and the correlations; and all ratios Δ/h."""
    results: dict[str, list[float]] = {"auc": [], "auc_baseline": [], "pearson": [], "spearman": []}
    for truth, proxy, baseline in zip(*samples, strict=True):
        positive = truth.ravel() > np.quantile(truth, 1 - REFRESH_SHARE)
        results["auc"].append(roc_auc(proxy.ravel(), positive))
        results["auc_baseline"].append(roc_auc(baseline.ravel(), positive))
        logs = np.log10(proxy).ravel(), np.log10(truth).ravel()
        results["pearson"].append(np.corrcoef(*logs)[0, 1])
        results["spearman"].append(np.corrcoef(*map(scipy.stats.rankdata, logs))[0, 1])
    ratios = (samples.truth / samples.proxy).ravel()
    return {**{name: np.array(values) for name, values in results.items()}, "ratio": ratios}


PUBLISHED = {
    "ROC-AUC of h, median": "0.9988",
    "ROC-AUC of h, quartiles": "0.9944, 1.000",
    "ROC-AUC of h, worst": "0.902",
    "ROC-AUC of the residual d, median": "0.672",
    "ROC-AUC of the residual d, quartiles": "0.625, 0.710",
    "Pearson correlation of log h and log Δ, median": "0.9994",
    "Spearman correlation, median": "0.9982",
    "Δ/h, median": "0.761",
    "Δ/h, maximum": "0.999",
}


def figures(summary: dict[str, np.ndarray]) -> dict[str, str]:
    """The published quantities, formatted alike."""

    def quartiles(x: np.ndarray) -> str:
        return "{:.4f}, {:.4f}".format(*np.quantile(x, (0.25, 0.75)))

    auc, baseline, ratio = summary["auc"], summary["auc_baseline"], summary["ratio"]
    values = (
        f"{np.median(auc):.4f}",
        quartiles(auc),
        f"{auc.min():.3f}",
        f"{np.median(baseline):.3f}",
        quartiles(baseline),
        f"{np.median(summary['pearson']):.4f}",
        f"{np.median(summary['spearman']):.4f}",
        f"{np.median(ratio):.3f}",
        f"{ratio.max():.4f}",
    )
    return dict(zip(PUBLISHED, values, strict=True))


def plot(samples: dict[str, Samples], summaries: dict[str, dict[str, np.ndarray]]) -> Figure:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    decision, calibration, alignment = figure.subplots(1, 3)
    (square, thin), main = SHAPES, samples["square B"]
    summary = summaries[square]

    scores = {"proxy h": summary["auc"], "residual d": summary["auc_baseline"]}
    boxes = decision.boxplot(
        list(scores.values()), tick_labels=list(scores), widths=0.5, patch_artist=True
    )
    for patch, color in zip(boxes["boxes"], (_record.BLUE, _record.ORANGE), strict=True):
        patch.set_facecolor(color)
    for median in boxes["medians"]:
        median.set_color("black")
    decision.axhline(0.5, color="gray", linestyle=":")
    decision.set(
        title=f"(a) Which samples need a refresh?\n{len(summary['auc'])} configurations, {square}",
        ylabel="ROC-AUC (dotted: chance)",
        ylim=(min(0.48, *map(np.min, scores.values())) - 0.03, 1.02),
    )

    levels = np.linspace(0, 1, 501)
    for shape, color, style in ((square, _record.BLUE, "-"), (thin, _record.VERMILION, "--")):
        quantiles = np.quantile(summaries[shape]["ratio"], levels)
        calibration.plot(levels, quantiles, color=color, linestyle=style, label=shape)
    calibration.axhline(1, color="gray", linestyle=":")
    calibration.set(
        title="(b) Calibration: h is not exceeded",
        xlabel="share of the samples",
        ylabel="Δ/h, at most (dotted: 1)",
        ylim=(0, 1.05),
    )
    calibration.legend(frameon=False, loc="lower right")

    x, y = np.log10(main.proxy).ravel(), np.log10(main.truth).ravel()
    bins = alignment.hexbin(x, y, gridsize=60, bins="log", cmap="viridis", mincnt=1)
    ends = (min(x.min(), y.min()), max(x.max(), y.max()))
    alignment.plot(ends, ends, color="black", linestyle=":", zorder=3, label="h = Δ")
    alignment.set(
        title=f"(c) Alignment: {x.size:,} samples, {square}",
        xlabel="log₁₀ h, estimated error",
        ylabel="log₁₀ Δ, true error",
    )
    alignment.legend(frameon=False, loc="upper left")
    figure.colorbar(bins, ax=alignment, label="samples")
    for axis in (decision, calibration, alignment):
        axis.grid(alpha=0.3)
    return figure


def main() -> None:
    args = _record.paper_arguments(__doc__, full="the paper's orders and number of trials")
    jax.config.update("jax_enable_x64", True)
    orders, trials = ((256, 512, 1024), 15) if args.full else ((128, 256, 512), 8)
    total = len(SHAPES) * len(orders) * len(DECAYS) * len(DRIFTS) * trials
    with tqdm(total=total, unit="factor") as progress:
        samples = run(orders, trials, args.seed, progress)
    summaries = {shape: summarize(values) for shape, values in samples.items()}
    ours = {shape: figures(summary) for shape, summary in summaries.items()}
    rows = [
        (name, published, *(column[name] for column in ours.values()))
        for name, published in PUBLISHED.items()
    ]
    size = samples["square B"].truth.size
    body = (
        f"Orders {', '.join(map(str, orders))} (published: 256, 512, 1024), p = 2, 4, spectra "
        f"i^-r with r = 0.5 … 2.5, drifts 1e-5 … 1e-1, {trials} trials (published: 15), "
        f"{len(DAMPINGS)} dampings 1e-8 … 1e-2: {size:,} samples in float64 for each shape of B. "
        "AUCs and correlations are taken over all samples of a configuration.\n\n"
        + _record.table(("quantity", "published", *(f"ours, {shape}" for shape in SHAPES)), rows)
    )
    title = "FOAM's proxy against the true error (Appendix K, Figure 8)"
    _record.write_paper(
        args,
        "foam_proxy",
        title,
        body,
        plot(samples, summaries),
    )


if __name__ == "__main__":
    main()
