"""Tables and figures of tuned methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from . import _record
from ._tuning import Found, best_of

LINES = ("-", "--", ":", "-.")


def spread(values: Iterable[float], form: str) -> str:
    """The mean, and the smallest and the largest."""
    values = np.array(list(values))
    return f"{values.mean():{form}} ({values.min():{form}} … {values.max():{form}})"


def tuning_table(found: Mapping[str, Found], seed: int, title: str = "The tuning") -> _record.Table:
    """Losses by learning rate, the best bold."""
    return table_of_tunings({name: x.tuning for name, x in found.items()}, seed, title)


def table_of_tunings(
    tunings: Mapping[str, Mapping[float, float]], seed: int, title: str
) -> _record.Table:
    """`tuning_table`, from losses by learning rate."""
    rates = sorted({rate for tuning in tunings.values() for rate in tuning})
    rows, outside = [], []
    for name, tuning in tunings.items():
        losses = {r: f"{v:.3f}" if math.isfinite(v) else "infinite" for r, v in tuning.items()}
        best = best_of(tuning)
        losses[best] = f"**{losses[best]}**"
        rows.append({"method": name} | {f"{rate:g}": losses[rate] for rate in losses})
        outside += [] if min(tuning) < best < max(tuning) else [name]
    columns = {"method": ("method", "")} | {f"{rate:g}": (f"{rate:g}", "") for rate in rates}
    note = f"Validation loss by learning rate, seed {seed}."
    if outside:
        note += f" Best at an end of the grid: {', '.join(outside)}."
    return _record.Table(title, columns, rows, note)


def styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colors and line styles, no pair of them twice."""
    pairs = itertools.product(LINES, _record.COLORS)
    return {name: (color, style) for name, (style, color) in zip(names, pairs, strict=False)}


def limits_of(found: Iterable[Found], scale: str = "linear") -> tuple[float, float] | None:
    """For an axis of the losses of these methods, see `limits`."""
    return limits((losses for x in found for losses in x.curves[..., 1]), scale)


def limits(
    curves: Iterable[np.ndarray | Sequence[float]], scale: str = "linear"
) -> tuple[float, float] | None:
    """For an axis of losses: without the first fifth, the fall from the start; room for names."""
    after = [np.asarray(losses, float)[len(losses) // 5 :] for losses in curves]
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
