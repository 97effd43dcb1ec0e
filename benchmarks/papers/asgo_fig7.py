"""How far ASGO's damping takes it away from Muon, solver by solver: ASGO's Figure 7.

    python -m benchmarks.papers.asgo_fig7           # 120 steps of a small GPT, 2 minutes
    python -m benchmarks.papers.asgo_fig7 --full    # 1000 steps, as in the paper

A GPT is trained with Muon. At each step, for some of its matrices, the momentum M ← 0.95 M + 0.05 G
and ASGO's statistic "from momentum" (An et al., arXiv:2503.20762, Eq. 4), V ← b2 V + (1 - b2) M Mᵀ
(Mᵀ M if M is not wide), give ASGO's direction (V + εI)^(-1/2) M, with

- ε = 0, by eigendecomposition, on the range of V;
- ε = 1e-8, by eigendecomposition;
- ε = 1e-8, by coupled Newton: the library's, which stops once it has converged;
- ε = 1e-8, by 50 coupled Newton-Schulz iterations with the coefficients (2, -1.5, 0.5).

Shown is the cosine of each with Muon's U Vᵀ of M = U S Vᵀ. With b2 = 0 and ε = 0 the two are equal
in exact arithmetic. The paper does not state b2 for this figure: both 0 and its default for GPT-2,
0.95, are shown. Everything is computed in float32, where forming V = M Mᵀ loses the singular values
of M below about 1e-3 of the largest.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax
from curvax.transforms.linalg._iterations import newton_schulz_root

from . import _model, _report

LEARNING_RATE = 3.2e-2  # Muon's, tuned by benchmarks/tune_lm.py
B1 = 0.95
STATISTICS = (0.0, 0.95)  # b2
EPS = 1e-8
ITERATIONS = 50
LAYERS = {
    "MLP (up)": "blocks.1.up.kernel",
    "Value": "blocks.1.attention.value.kernel",
    "Key": "blocks.1.attention.key.kernel",
    "Query": "blocks.1.attention.query.kernel",
    "Embedding": "tokens.embedding",
}
HIGHEST = jax.lax.Precision.HIGHEST
matmul = functools.partial(jnp.matmul, precision=HIGHEST)


def quintic_newton_schulz_root(a: jax.Array) -> jax.Array:
    """`(a + EPS · I)^(-1/2)` by the coupled iteration with a = 2, b = -1.5, c = 0.5.

    Y → (a + EPS I)^(1/2) / √s and Z → √s (a + EPS I)^(-1/2) with s = ‖a + EPS I‖.
    """
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    a = a + EPS * eye
    norm = jnp.linalg.norm(a)

    def step(_, yz):
        y, z = yz
        zy = matmul(z, y)
        t = 2 * eye - 1.5 * zy + 0.5 * matmul(zy, zy)
        return matmul(y, t), matmul(t, z)

    _, z = jax.lax.fori_loop(0, ITERATIONS, step, (a / norm, eye))
    return z / jnp.sqrt(norm)


# The figure's panels, and the library's own Newton-Schulz beside them.
ROOTS = {
    "SVD, ε = 0": lambda v: curvax.inverse_root(v, 2, 0.0),
    "SVD, ε = 1e-8": lambda v: curvax.inverse_root(v, 2, EPS),
    "Coupled Newton, ε = 1e-8": lambda v: curvax.inverse_root(v, 2, EPS, solver="coupled_newton"),
    "Newton-Schulz (2, -1.5, 0.5), ε = 1e-8": lambda v: (quintic_newton_schulz_root(v), None),
    "Newton-Schulz (1.5, -0.5), ε = 1e-8": lambda v: newton_schulz_root(
        v, EPS, iterations=ITERATIONS
    ),
}
PANELS = tuple(ROOTS)[:4]


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.vdot(a, b, precision=HIGHEST) / (jnp.linalg.norm(a) * jnp.linalg.norm(b))


@jax.jit
def observe(state: dict[str, Any], gradients: dict[str, jax.Array]):
    """The next momenta and statistics, and `(b2, root)` cosines and spectra for every layer."""
    momenta, statistics, cosines, spectra = {}, {}, {}, {}
    for layer, g in gradients.items():
        m = momenta[layer] = B1 * state["momenta"][layer] + (1 - B1) * g
        left = m.shape[0] < m.shape[1]
        square = matmul(m, m.T) if left else matmul(m.T, m)
        muon = curvax.polar_svd(m)
        statistics[layer] = []
        rows = []
        for b2, old in zip(STATISTICS, state["statistics"][layer], strict=True):
            v = b2 * old + (1 - b2) * square
            statistics[layer].append(v)
            directions = [
                matmul(root(v)[0], m) if left else matmul(m, root(v)[0]) for root in ROOTS.values()
            ]
            rows.append(jnp.stack([cosine(direction, muon) for direction in directions]))
        cosines[layer] = jnp.stack(rows)
        spectra[layer] = jnp.linalg.svd(m, compute_uv=False) ** 2
    return {"momenta": momenta, "statistics": statistics}, cosines, spectra


def run(steps: int, seed: int):
    """Cosines `(step, b2, root)` and eigenvalues of M Mᵀ `(step, eigenvalue)` of every layer."""
    state = None
    cosines: dict[str, list[np.ndarray]] = {layer: [] for layer in LAYERS}
    spectra: dict[str, list[np.ndarray]] = {layer: [] for layer in LAYERS}
    stream = _model.gradients("muon", LEARNING_RATE, steps, seed)
    for gradients in tqdm(stream, total=steps, unit="step"):
        chosen = {layer: gradients[name] for layer, name in LAYERS.items()}
        if state is None:
            orders = {layer: min(g.shape) for layer, g in chosen.items()}
            state = {
                "momenta": jax.tree.map(jnp.zeros_like, chosen),
                "statistics": {k: [jnp.zeros((n, n))] * len(STATISTICS) for k, n in orders.items()},
            }
        state, *new = observe(state, chosen)
        for history, values in zip((cosines, spectra), new, strict=True):
            for layer, value in jax.device_get(values).items():
                history[layer].append(value)
    return tuple({k: np.stack(v) for k, v in history.items()} for history in (cosines, spectra))


def plot(cosines: dict[str, np.ndarray]) -> Figure:
    figure = Figure(figsize=(14, 7), layout="constrained")
    axes = figure.subplots(len(STATISTICS), len(PANELS), sharex=True, sharey=True)
    lowest = min(float(values[..., : len(PANELS)].min()) for values in cosines.values())
    for row, b2 in enumerate(STATISTICS):
        for column, panel in enumerate(PANELS):
            axis = axes[row, column]
            for color, (layer, values) in zip(_report.COLORS, cosines.items(), strict=False):
                steps = np.arange(1, len(values) + 1)
                axis.plot(steps, values[:, row, column], color=color, linewidth=1.2, label=layer)
            axis.set_title(f"({'abcd'[column]}) {panel}\nb2 = {b2:g}", fontsize=10)
            axis.grid(alpha=0.3)
        axes[row, 0].set(ylabel="cosine with Muon's direction", ylim=(lowest - 0.03, 1.03))
    for axis in axes[-1]:
        axis.set_xlabel("step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


# What the text says of the paper's four panels.
PUBLISHED = (
    "mostly above 0.8, MLP and Embedding highest",
    "Value and Key reach about 0.7 gradually",
    "as (b), Embedding unstable at times",
    "as (b), Embedding unstable at times",
    "",
)


def main() -> None:
    args = _report.arguments(__doc__, full="1000 steps, as in the paper")
    steps = 1000 if args.full else 120
    cosines, spectra = run(steps, args.seed)

    tail = slice(-max(1, steps // 10), None)
    tables = []
    for i, b2 in enumerate(STATISTICS):
        rows = [
            (
                name,
                *(
                    f"{values[tail, i, j].mean():.3f} ({np.min(values[:, i, j]):.3f})"
                    for values in cosines.values()
                ),
                PUBLISHED[j],
            )
            for j, name in enumerate(ROOTS)
        ]
        tables.append(
            f"b2 = {b2:g}:\n\n"
            + _report.table(("direction", *LAYERS, "published (read from the text)"), rows)
        )
    below = {k: float((v[tail] < EPS).mean()) for k, v in spectra.items()}
    scale = {k: float(v[tail].max(axis=1).mean()) for k, v in spectra.items()}
    rows = [
        ("largest eigenvalue of M Mᵀ", *(f"{scale[k]:.1e}" for k in LAYERS)),
        ("eigenvalues below ε = 1e-8", *(f"{below[k]:.0%}" for k in LAYERS)),
    ]
    body = (
        "The GPT of `examples/train_lm.py` with 4 layers of width 128, trained with Muon (learning "
        f"rate {LEARNING_RATE:g}) for {steps} steps (published: GPT-2, 1000 steps). Cosine with "
        "U Vᵀ of the momentum, mean of the last tenth of the steps (in brackets the smallest of "
        "all steps). The last line of each table is the library's own Newton-Schulz, which is not "
        "in the figure.\n\n"
        + "\n\n".join(tables)
        + "\n\nWhat ε meets, in the last tenth of the steps:\n\n"
        + _report.table(("", *LAYERS), rows)
    )
    settings = {
        "steps": steps,
        "learning_rate": LEARNING_RATE,
        **_model.SIZES,
        "b1": B1,
        "b2": STATISTICS,
        "eps": EPS,
        "iterations": ITERATIONS,
        "layers": LAYERS,
        "roots": list(ROOTS),
    }
    results = {
        "cosines": {k: np.round(v, 4).tolist() for k, v in cosines.items()},
        "largest_eigenvalue": scale,
        "share_below_eps": below,
    }
    title = "ASGO from momentum against Muon (Figure 7)"
    _report.write(args, "asgo_fig7", title, body, settings, results, plot(cosines))


if __name__ == "__main__":
    main()
