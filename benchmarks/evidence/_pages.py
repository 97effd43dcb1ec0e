"""Tables and pictures of the sweep, from its lines alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import _record
from .._curves import spread, styles
from ._compare import Result, curve_of, difference, holm, results, speed_up
from ._descent import bounded
from ._plan import Runs, status
from ._suites import Suite

OVER = ("step", "processor seconds of one thread")
COLUMNS = {
    "method": ("method", ""),
    "loss": ("validation loss, mean (range)", ""),
    "beyond": ("beyond AdamW's, mean [95 %]", ""),
    "p": ("p, Holm", ".2g"),
    "word": ("is", ""),
    "speed_up": ("AdamW's steps to its loss, over its own", ""),
    "faster": ("AdamW's time to it, over its own", ""),
    "ms": ("ms/step, one thread", ".3g"),
    "state_mb": ("state, MB", ".2f"),
    "step_mb": ("whole step, MB", ".2f"),
}
TUNING = {
    "method": ("method", ""),
    "runs": ("runs", "d"),
    "first": ("loss at the start", ".3f"),
    "best": ("at the best", ".3f"),
    "bounded": ("rate inside", ""),
    "values": ("the best point", ""),
}


def finals_table(suite: Suite, found: Mapping[str, Result], curve: Mapping[int, float]) -> Any:
    """Methods whose seeds are all there, the smallest loss first; `None` before AdamW has ended."""
    ended = {name: x for name, x in found.items() if len(x.finals) == len(suite.seeds)}
    if "adamw" not in ended:
        return None
    adamw = ended["adamw"].losses
    differences = {n: difference(x.losses, adamw) for n, x in ended.items() if n != "adamw"}
    corrected = holm({name: d.p for name, d in differences.items()})
    rows = []
    for name, x in sorted(ended.items(), key=lambda pair: np.mean(pair[1].losses)):
        row: dict[str, Any] = {"method": name, "loss": spread(x.losses, ".3f")}
        row |= {"ms": x.milliseconds, "state_mb": x.finals[0]["state_bytes"] / 1e6}
        if "step_bytes" in x.finals[0]:  # lines of the first suite are older
            row["step_mb"] = x.finals[0]["step_bytes"] / 1e6
        mean, slower = float(np.mean(x.losses)), x.milliseconds / ended["adamw"].milliseconds
        row["speed_up"] = speed_up(mean, suite.steps, curve)
        row["faster"] = speed_up(mean, suite.steps, curve, slower)
        for key in x.finals[0]["tested"]:
            row[key] = spread([line["tested"][key] for line in x.finals], ".3f")
        if d := differences.get(name):
            row |= {"beyond": f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"}
            row |= {"word": d.word, "p": corrected[name]}
        rows.append(row)
    tested = {key: (key, "") for x in ended.values() for key in x.finals[0]["tested"]}
    known = COLUMNS | tested
    columns = {key: x for key, x in known.items() if any(row.get(key) for row in rows)}
    missing = [name for name in suite.methods if name not in ended]
    note = f"Seeds {', '.join(map(str, suite.seeds))}; {suite.unit}."
    if curve:
        lengths = ", ".join(f"{steps}: {loss:.3f}" for steps, loss in sorted(curve.items()))
        note += f" AdamW's final losses by steps, tuned at each: {lengths}."
    if missing:
        note += f" Not all seeds have run: {', '.join(missing)}."
    return _record.Table(f"{suite.name}: final losses", columns, rows, note)


def overview(suites: Sequence[Suite], runs: Runs) -> _record.Table | None:
    """Differences to AdamW in all suites that have ended: sizes and lengths side by side."""

    def told(suite: Suite) -> dict[str, str]:
        found = results(suite, runs)
        if "adamw" not in found or any(len(x.finals) < len(suite.seeds) for x in found.values()):
            return {}
        adamw = found["adamw"].losses
        differences = {name: difference(x.losses, adamw) for name, x in found.items()}
        return {
            name: f"{d.mean:+.3f}" if d.word == "as AdamW" else f"**{d.mean:+.3f}**"
            for name, d in differences.items()
        }

    note = (
        "Final loss beyond AdamW's, mean of the seeds; bold where the 95 % interval excludes 0. "
        "Losses of different tasks do not compare."
    )
    return side_by_side("All suites", note, {suite.name: told(suite) for suite in suites})


def ladders(suites: Sequence[Suite], runs: Runs) -> _record.Table | None:
    """AdamW's steps to the losses of the others, by size and length; `None` before any."""

    def told(suite: Suite) -> dict[str, str]:
        curve = curve_of(suite, runs)
        return {
            name: speed_up(float(np.mean(x.losses)), suite.steps, curve)
            for name, x in results(suite, runs).items()
            if curve and len(x.finals) == len(suite.seeds)
        }

    note = (
        "AdamW's steps to the loss of a method, over the method's own, read off AdamW's final "
        "losses at the lengths of this size; a bound outside of them."
    )
    return side_by_side("Sizes and lengths", note, {suite.name: told(suite) for suite in suites})


def side_by_side(
    title: str, note: str, told: Mapping[str, Mapping[str, str]]
) -> _record.Table | None:
    """The results of suites for all methods but AdamW, a column each; `None` if they tell
    nothing."""
    rows: dict[str, dict[str, Any]] = {}
    columns = {"method": ("method", "")}
    for suite, cells in told.items():
        for name, text in cells.items():
            if name != "adamw":
                columns[suite] = (suite, "")
                rows.setdefault(name, {"method": name})[suite] = text
    return _record.Table(title, columns, list(rows.values()), note) if rows else None


def tuning_table(suite: Suite, found: Mapping[str, Result]) -> _record.Table:
    """Where every method stands, the smallest loss first."""
    rows = []
    for name, x in found.items():
        if x.tuning is None or not x.tuning.found:
            continue
        losses = [loss for _, loss in x.tuning.found]
        best = x.tuning.found[int(np.argmin(losses))][0]
        rows.append(
            {
                "method": name,
                "runs": len(losses),
                "first": losses[0],
                "best": min(losses),
                "bounded": "yes" if bounded(x.tuning.found) else "no",
                "values": ", ".join(f"{key} {value:g}" for key, value in best.items()),
            }
        )
    rows.sort(key=lambda row: row["best"])
    note = (
        f"Seed 0, {suite.budget} runs for every method. *Rate inside*: a worse learning rate was "
    )
    note += "tried on either side of the best. `decay` is rate × `weight_decay`."
    return _record.Table(f"{suite.name}: tuning", TUNING, rows, note)


def draw(
    suite: Suite, found: Mapping[str, Result], unit: str, over: tuple[str, str] = OVER
) -> Figure | None:
    """Loss against steps, seconds and state; `None` before two methods have run their seeds."""
    ended = {name: x for name, x in found.items() if len(x.finals) == len(suite.seeds)}
    ended = {name: x for name, x in ended.items() if np.isfinite(x.losses).all()}
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
    steps.set(xlabel=over[0], ylabel=f"validation loss ({unit})")
    steps.set_ylim(last.min() - 0.1 * room, last.max() + room)
    seconds.set(xlabel=over[1])
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


def origin(lines: Sequence[Mapping[str, Any]]) -> str:
    """Where the numbers come from."""
    hardware = sorted({line["hardware"] for line in lines})
    versions = sorted({", ".join(f"{k} {v}" for k, v in x["versions"].items()) for x in lines})
    codes = sorted({line["code"] for line in lines})
    return (
        "`python -m benchmarks evidence run`, then `python -m benchmarks evidence tables`, on "
        f"{'; '.join(hardware)}; {'; '.join(versions)}. Sources: {', '.join(codes)}."
    )


def write(folder: Path, suites: Sequence[Suite], runs: Runs) -> None:
    """Writes `evidence.md` and a picture for every suite with results, and prints the page."""
    parts = [
        "# Evidence",
        "The protocol is [docs/evidence.md](../../../docs/evidence.md); every run is a line of a "
        "file in this folder. Losses are final ones; negative differences are better.",
        status(suites, runs),
    ]
    for table in (overview(suites, runs), ladders(suites, runs)):
        if table is not None:
            parts.append(table.markdown())
    for suite in suites:
        mine = [line for line in runs.values() if line["suite"] == suite.name]
        if not mine:
            continue
        found = results(suite, runs)
        finals = finals_table(suite, found, curve_of(suite, runs))
        if finals is not None:
            parts.append(finals.markdown())
        figure = draw(suite, found, suite.unit)
        if figure is not None:
            figure.savefig(folder / f"{suite.name}.png", dpi=120)
            parts.append(f"![loss against steps, seconds and state]({suite.name}.png)")
        parts.append(tuning_table(suite, found).markdown())
    if runs:
        parts.append(origin(list(runs.values())))
    page = "\n\n".join(parts) + "\n"
    (folder / "evidence.md").write_text(page)
    print(page)
