"""Pictures of training runs: loss against steps, seconds and state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _record
from .evidence._plan import Result

LINES = ("-", "--", ":", "-.")


def spread(values: Iterable[float], form: str, others: Iterable[float] = ()) -> str:
    """The mean, and the smallest and the largest, of these and of others."""
    values = list(values)
    every = [*values, *others]
    return f"{np.mean(values):{form}} ({min(every):{form}} … {max(every):{form}})"


def styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colors and line styles, no pair of them twice."""
    pairs = itertools.product(LINES, _record.COLORS)
    return {name: (color, style) for name, (style, color) in zip(names, pairs, strict=False)}


def draw(suite: Any, found: Mapping[str, Result]) -> Figure | None:
    """Loss against steps, seconds and state; `None` before two methods have ended."""
    ended = {name: x for name, x in found.items() if np.isfinite(x.losses).all()}
    if len(ended) < 2:
        return None
    look = styles(ended)
    figure = Figure(figsize=(16, 5.5), layout="constrained")
    steps, seconds, state = figure.subplots(1, 3, sharey=True)
    for name, x in ended.items():
        color, style = look[name]
        losses = np.array([line["losses"] for line in x.finals], float)
        times = np.cumsum(np.median(x.seconds, axis=0))
        width = 2.5 if name == "adamw" else 1.2
        for axis, place_of in ((steps, x.finals[0]["steps"]), (seconds, times)):
            axis.plot(place_of, losses.mean(0), style, color=color, lw=width, label=name)
        state.plot(*place(x), "o", color=color)
    front(state, ended)
    last = np.concatenate([[line["losses"][-1] for line in x.finals] for x in ended.values()])
    room = 0.6 * (last.max() - last.min()) + 0.02
    steps.set(xlabel="step", ylabel=f"validation loss ({suite.unit})")
    steps.set_ylim(last.min() - 0.1 * room, last.max() + room)
    seconds.set(xlabel="processor seconds of one thread")
    state.set(xlabel="state of the optimizer, MB", xscale="log")
    state.margins(x=0.25)
    least, most = state.get_xlim()
    state.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if most < 1e3 * least else (1,)))
    state.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    state.xaxis.set_minor_locator(ticker.NullLocator())
    for axis in (steps, seconds, state):
        axis.grid(alpha=0.3)
    handles = steps.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"{suite.name}: mean of {len(suite.seeds)} seeds, every method tuned alike")
    figure.draw_without_rendering()  # so that names know where they are
    label(state, {name: place(x) for name, x in ended.items()})
    return figure


def place(x: Result) -> tuple[float, float]:
    """State in MB and mean loss."""
    return x.finals[0]["state_bytes"] / 1e6, float(np.mean(x.losses))


def label(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Names beside points, at the first of eight places that covers the fewest others."""
    taken: list[Any] = []
    places = [(x, y, side) for y in (3, -9, 12, -18) for x, side in ((4, "left"), (-4, "right"))]
    for name, point in sorted(points.items(), key=lambda pair: pair[1]):
        found = [
            axis.annotate(
                name, point, xytext=(x, y), textcoords="offset points", ha=side, fontsize=8
            )
            for x, y, side in places
        ]
        boxes = [text.get_window_extent() for text in found]
        kept = int(np.argmin([box.count_overlaps(taken) for box in boxes]))
        taken.append(boxes[kept])
        for text in found[:kept] + found[kept + 1 :]:
            text.remove()


def front(axis: Axes, ended: Mapping[str, Result]) -> None:
    """The Pareto front: methods such that none with less state has a smaller loss."""
    points = sorted(map(place, ended.values()))
    least, best = math.inf, []
    for size, loss in points:
        if loss < least:
            least = loss
            best.append((size, loss))
    axis.step(*zip(*best, strict=True), where="post", color="gray", lw=0.9, linestyle=":")
