"""SUMO's Figures 1 and 2 on a small model: spectra of the moment, and exact against Newton-Schulz.

    python -m benchmarks.papers.sumo_lm        # about five minutes on two CPU cores

Refael et al., arXiv:2505.24749, on the model of `python -m benchmarks train --only lm`, in its last
block:

- Figure 1: condition number κ = σ_max / σ_min of the first-order moment during training with
  GaLore, and its singular values at one step. Beside GaLore's moment there are those of SUMO, which
  is orthogonalized, and of Muon, which is not projected. With them Eq. 1's share of the moment's
  energy outside its first singular direction, which Lemma 3.1 has fall exponentially;
- what Newton-Schulz makes of the moments of SUMO: the distance of five steps from the polar factor,
  ‖X - UVᵀ‖ / √r, which depends on singular values alone;
- Figure 2: SUMO with exact orthogonalization and with Newton-Schulz, and GaLore, each at its own
  best learning rate.

Runs that have finished are kept under runs/tuned and are not repeated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import curvax

from .. import _record, _tasks
from .._curves import LINES, draw_curves, spread, styles, tuning_table
from .._optimizers import methods_for
from .._training import Method, Watch
from .._tuning import Found, Study

TASK = _tasks.lm()
BLOCK = f"blocks/{TASK.sizes['depth'] - 1}"
LAYERS = {
    "query": f"{BLOCK}/attention/query/kernel",
    "attention output": f"{BLOCK}/attention/out/kernel",
    "up": f"{BLOCK}/up/kernel",
    "down": f"{BLOCK}/down/kernel",
}
SPECTRUM_AT = 100  # Figure 1b
LINE = 10  # Figure 1a
ITERATIONS = 5


def singular_values(optimizer: Any, state: Any) -> dict[str, jax.Array]:
    """Of the first-order moment of the layers."""
    values = {}
    for name, path in LAYERS.items():
        entries = curvax.state_of(optimizer, state["params"], state["opt_state"], path)
        (moment,) = (array for place, array in entries.items() if "/mu/" in place)
        values[name] = jnp.linalg.svd(moment[0], compute_uv=False)
    return values


SPECTRA = Watch(f"singular values of {', '.join(LAYERS.values())}", singular_values)
LOW_RANK = methods_for(TASK)["sumo"].options
WATCHED = {
    "GaLore": Method(curvax.galore, LOW_RANK, SPECTRA),
    "SUMO": Method(curvax.sumo, LOW_RANK, SPECTRA),
    "Muon": Method(curvax.muon, watch=SPECTRA),
}
ORTHOGONALIZED = {
    "SUMO, exact": WATCHED["SUMO"],
    "SUMO, Newton-Schulz": Method(
        curvax.sumo, {**LOW_RANK, "method": curvax.polar.newton_schulz(ITERATIONS)}
    ),
    "GaLore": WATCHED["GaLore"],
}


def spectra_of(found: Found) -> dict[str, np.ndarray]:
    """Singular values `(seeds, points, r)` by layer."""
    return {
        name: np.array([[seen[name] for seen in run.watched] for run in found.runs])
        for name in LAYERS
    }


def condition(sigma: np.ndarray) -> np.ndarray:
    """κ, of the singular values `(..., r)`."""
    with np.errstate(divide="ignore"):
        return sigma[..., 0] / sigma[..., -1]


def outside_first(sigma: np.ndarray) -> np.ndarray:
    """Eq. 1: the share of the energy outside the first singular direction."""
    return 1 - sigma[..., 0] ** 2 / np.sum(sigma**2, axis=-1)


def newton_schulz_error(sigma: np.ndarray) -> np.ndarray:
    """‖X - UVᵀ‖ / √r after Newton-Schulz, which acts on each singular value alone."""
    r = sigma.shape[-1]
    diagonal = jnp.asarray(sigma)[..., None] * jnp.eye(r)
    x = curvax.newton_schulz(diagonal, "quintic", ITERATIONS)
    return np.asarray(jnp.linalg.norm(x - jnp.eye(r), axis=(-2, -1))) / np.sqrt(r)


def moments_table(spectra: dict[str, dict[str, np.ndarray]], steps: np.ndarray) -> str:
    """Condition numbers and the rest, by method and layer."""
    at = int(np.argmin(np.abs(steps - SPECTRUM_AT)))
    rows = []
    for method, layers in spectra.items():
        for layer, sigma in layers.items():
            kappa, outside = condition(sigma), outside_first(sigma)
            error = newton_schulz_error(sigma[:, -1])
            rows.append(
                [
                    method,
                    layer,
                    f"{sigma.shape[-1]}",
                    *(spread(kappa[:, k], ".3g") for k in (0, at, -1)),
                    f"{100 * (kappa > LINE).mean():.0f} %",
                    *(f"{outside[:, k].mean():.2f}" for k in (0, at, -1)),
                    spread(error, ".2f"),
                ]
            )
    points = [f"{steps[k]:.0f}" for k in (0, at, -1)]
    titles = [
        "moment of",
        "layer",
        "singular values",
        *(f"κ at step {point}, mean (range)" for point in points),
        f"κ above {LINE}",
        *(f"Eq. 1 at step {point}" for point in points),
        f"Newton-Schulz's error at step {points[-1]}, mean (range)",
    ]
    return _record.table(titles, rows)


def training_table(found: dict[str, Found]) -> str:
    """Losses, and steps to GaLore's last one."""
    exact, galore = found["SUMO, exact"].losses, found["GaLore"].losses
    rows = []
    for name, x in found.items():
        steps = [run.steps_to(target) for run, target in zip(x.runs, galore, strict=True)]
        rows.append(
            [
                name,
                f"{x.rate:g}",
                spread(x.losses, ".4f"),
                "" if name == "SUMO, exact" else spread(x.losses - exact, "+.4f"),
                ", ".join(f"{s:.0f}" if np.isfinite(s) else "never" for s in steps),
                spread([TASK.steps / s for s in steps], ".2f"),
            ]
        )
    titles = [
        "method",
        "learning rate",
        "validation loss, mean (range)",
        "beyond exact, mean (range)",
        "steps to GaLore's last loss, by seed",
        f"GaLore's {TASK.steps} over these (0: never)",
    ]
    return _record.table(titles, rows)


def draw(
    spectra: dict[str, dict[str, np.ndarray]], steps: np.ndarray, found: dict[str, Found]
) -> Figure:
    """Condition numbers, spectra and Eq. 1 of the moments; errors and losses of SUMO."""
    figure = Figure(figsize=(15, 10), layout="constrained")
    axes = figure.subplots(2, 3)
    colors = dict(zip(LAYERS, _record.COLORS, strict=False))
    dashes: dict[str, Any] = dict(zip(WATCHED, LINES, strict=False))
    at = int(np.argmin(np.abs(steps - SPECTRUM_AT)))

    def over_steps(axis: Axes, values: np.ndarray, method: str, layer: str) -> None:
        axis.plot(steps, values.mean(0), dashes[method], color=colors[layer])
        low, high = values.min(0), values.max(0)
        axis.fill_between(steps, low, high, color=colors[layer], alpha=0.15, lw=0)

    for method, layers in spectra.items():
        for layer, sigma in layers.items():
            color, style = colors[layer], dashes[method]
            relative = (sigma[:, at] / sigma[:, at, :1]).mean(0)
            axes[0, 2].plot(1 + np.arange(relative.size), relative, style, color=color)
            axes[1, 0].plot(steps, outside_first(sigma).mean(0), style, color=color)
    for axis, method in zip(axes[0], ("GaLore", "SUMO"), strict=False):
        for layer, sigma in spectra[method].items():
            over_steps(axis, condition(sigma), method, layer)
        axis.axhline(LINE, color="red", lw=0.8)
        axis.set(
            title=f"1a: condition number of {method}'s moment",
            xlabel="step",
            ylabel="σ_max / σ_min, mean and range of the seeds",
            yscale="log",
        )
    for layer, sigma in spectra["SUMO"].items():
        over_steps(axes[1, 1], newton_schulz_error(sigma), "SUMO", layer)
    axes[0, 2].set(
        title=f"1b: singular values at step {steps[at]:.0f}",
        xlabel="index i",
        ylabel="σ_i / σ_1, mean of the seeds",
        yscale="log",
        xscale="log",
    )
    axes[1, 0].set(
        title="Eq. 1: energy outside the first singular direction",
        xlabel="step",
        ylabel="share, mean of the seeds",
    )
    axes[1, 1].set(
        title=f"{ITERATIONS} steps of Newton-Schulz on SUMO's moment",
        xlabel="step",
        ylabel="‖X - UVᵀ‖ / √r, mean and range of the seeds",
    )
    draw_curves(axes[1, 2], found, styles(found), TASK.unit)
    axes[1, 2].set(title="2: SUMO, exact and with Newton-Schulz; GaLore")
    axes[1, 2].legend(frameon=False, title="method, learning rate; mean and range")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    handles = [Line2D([], [], color=color, label=layer) for layer, color in colors.items()]
    handles += [
        Line2D([], [], color="gray", linestyle=style, label=f"moment of {method}")
        for method, style in dashes.items()
    ]
    handles.append(Line2D([], [], color="red", lw=0.8, label=f"κ = {LINE}, as in the paper"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def main() -> None:
    """Runs everything and writes tables, numbers and figure."""
    args = _record.paper_arguments(__doc__)
    study = Study(TASK, [*ORTHOGONALIZED.values(), *WATCHED.values()], args.seed).run()
    found, watched = study.find_all(ORTHOGONALIZED), study.find_all(WATCHED)
    spectra = {name: spectra_of(x) for name, x in watched.items()}
    steps = watched["SUMO"].curves[0, :, 0]
    body = "\n\n".join(
        [
            study.head(),
            f"Rank {LOW_RANK['rank']}, a new subspace every {LOW_RANK['refresh']} steps.",
            "## Figure 1\n\nThe first-order moment in the last block, every "
            f"{TASK.eval_every} steps: κ = σ_max / σ_min; the share of the energy outside the "
            "first singular direction (Eq. 1, mean of the seeds); "
            f"‖X - UVᵀ‖ / √r after {ITERATIONS} steps of Newton-Schulz.",
            moments_table(spectra, steps),
            "## Figure 2\n\n“Beyond” is taken seed by seed, as are steps to GaLore's last loss.",
            training_table(found),
            tuning_table(found | {"Muon": watched["Muon"]}, args.seed).markdown(),
        ]
    )
    _record.write_paper(
        args,
        "sumo_lm",
        "SUMO's moment during training, and exact orthogonalization against Newton-Schulz",
        body,
        draw(spectra, steps, found),
    )


if __name__ == "__main__":
    main()
