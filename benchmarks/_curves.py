"""Tables and figures of tuned methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes

from . import _record
from ._tuning import Found

LINES = ("-", "--", ":", "-.")


def spread(values: Iterable[float], form: str) -> str:
    """The mean, and the smallest and the largest."""
    values = np.array(list(values))
    return f"{values.mean():{form}} ({values.min():{form}} … {values.max():{form}})"


def tuning_table(found: Mapping[str, Found], seed: int, title: str = "The tuning") -> _record.Table:
    """Losses by learning rate, the best bold."""
    rates = sorted({rate for x in found.values() for rate in x.tuning})
    rows = []
    for name, x in found.items():
        losses = {r: f"{v:.3f}" if math.isfinite(v) else "infinite" for r, v in x.tuning.items()}
        losses[x.rate] = f"**{losses[x.rate]}**"
        rows.append({"method": name} | {f"{rate:g}": losses[rate] for rate in losses})
    columns = {"method": ("method", "")} | {f"{rate:g}": (f"{rate:g}", "") for rate in rates}
    note = f"Validation loss by learning rate, seed {seed}."
    if outside := [name for name, x in found.items() if not x.interior]:
        note += f" Best at an end of the grid: {', '.join(outside)}."
    return _record.Table(title, columns, rows, note)


def styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colors and line styles, no pair of them twice."""
    pairs = itertools.product(LINES, _record.COLORS)
    return {name: (color, style) for name, (style, color) in zip(names, pairs, strict=False)}


def limits_of(found: Iterable[Found], scale: str = "linear") -> tuple[float, float] | None:
    """For an axis of losses: without the first fifth, the fall from the start; room for names."""
    after = [x.curves[:, x.curves.shape[1] // 5 :, 1].ravel() for x in found]
    losses = np.concatenate(after) if after else np.empty(0)
    losses = losses[np.isfinite(losses)]
    if not losses.size or losses.min() == losses.max():
        return None
    low, high = float(losses.min()), float(losses.max())
    if scale == "log":
        return low / 1.1, high * (high / low) ** 0.15
    return low - 0.05 * (high - low), high + 0.15 * (high - low)


def draw_curves(
    axis: Axes, found: Mapping[str, Found], look: Mapping[str, tuple[str, str]], unit: str
) -> None:
    """Validation loss over steps: the mean of the seeds, with their range."""
    for name, x in found.items():
        (steps, losses), (color, style) = np.moveaxis(x.curves, -1, 0), look[name]
        axis.plot(steps[0], losses.mean(0), style, color=color, label=f"{name}, {x.rate:g}")
        low, high = losses.min(0), losses.max(0)
        axis.fill_between(steps[0], low, high, color=color, alpha=0.15, lw=0)
    if limits := limits_of(found.values()):
        axis.set_ylim(*limits)
    axis.set(xlabel="step", ylabel=f"validation loss ({unit})")
    axis.grid(alpha=0.3)
