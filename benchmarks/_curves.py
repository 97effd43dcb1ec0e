"""Tables and figures of tuned methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from . import _record
from ._tuning import best_of

LINES = ("-", "--", ":", "-.")


def spread(values: Iterable[float], form: str) -> str:
    """The mean, and the smallest and the largest."""
    values = np.array(list(values))
    return f"{values.mean():{form}} ({values.min():{form}} … {values.max():{form}})"


def table_of_tunings(
    tunings: Mapping[str, Mapping[float, float]], seed: int, title: str
) -> _record.Table:
    """Losses by learning rate, the best bold."""
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
