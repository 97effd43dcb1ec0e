"""Coordinate descent over a method's numbers, as a function of the losses that are known.

A scan comes first: the rate at a few multiples of its start, far apart, because the loss is flat
and noisy at rates that are much too large. From the best of them, each coordinate in turn takes a
step up its ladder, and goes on in that direction as long as the loss falls; if the first step does
not help, it tries the other direction. After a round in which nothing moved, the ladders of rates
get finer by a square root. The descent never ends by itself: the budget ends it, and it is the same
for every method. A point that was tried before costs nothing. The last runs may be kept for the
rate of the other parameters, which comes late in the descent and matters.

Nothing is remembered but losses: the next point follows from the points that have one, so that a
sweep goes on where it was stopped, by whatever means.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """A number of a method and the values that it may take."""

    name: str
    ladder: Sequence[Any] = ()  # in ascending order; without it, a rate: any power of 2 times it

    def steps(self, value: Any, direction: int, halvings: int) -> Any:
        """The next value in a direction, or `None` at the end of the ladder."""
        if not self.ladder:
            return rounded(value * 2.0 ** (direction / 2**halvings))
        beyond = [x for x in self.ladder if (x > value if direction > 0 else x < value)]
        return (min if direction > 0 else max)(beyond, default=None)


def rounded(rate: float) -> float:
    """To four digits, so that a rate reached by two ways is one rate."""
    return float(f"{rate:.4g}")


def name_of(point: Mapping[str, Any]) -> str:
    """A point as text: equal points have equal names."""
    return json.dumps(dict(sorted(point.items())))


def descend(
    coordinates: Sequence[Coordinate], start: Point, scan: Sequence[float] = ()
) -> Generator[Point, float, None]:
    """Points to try, in order; takes their losses. It visits some points more than once."""
    best, least = dict(start), (yield dict(start))
    for factor in scan:
        point = {**start, "rate": rounded(start["rate"] * factor)}
        loss = yield point
        if loss < least:
            best, least = point, loss
    halvings = 0
    while True:
        moved = False
        for coordinate in coordinates:
            for direction in (1, -1):
                went = False
                while True:
                    value = coordinate.steps(best[coordinate.name], direction, halvings)
                    if value is None:
                        break
                    point = {**best, coordinate.name: value}
                    loss = yield point
                    if not loss < least:
                        break
                    best, least, went = point, loss, True
                if went:
                    moved = True
                    break
        if not moved:
            halvings += 1


def tried(
    coordinates: Sequence[Coordinate],
    start: Point,
    known: Callable[[Point], float | None],
    budget: int,
    scan: Sequence[float] = (),
    last: int = 0,
) -> tuple[list[tuple[Point, float]], Point | None]:
    """The points of the descent that have a loss, and the next one; `None` if the budget is spent.

    Args:
      coordinates: the varied numbers, in this order.
      start: a value for each coordinate, and for the method's other arguments.
      known: a point's loss, `None` if it has not run; infinite where it diverged.
      budget: distinct points to try.
      scan: multiples of the starting rate that are tried before the descent.
      last: how many of these points are kept for `adam_rate` at the end, from the best so far.
    """
    found: list[tuple[Point, float]] = []
    losses: dict[str, float] = {}

    def spent(search: Generator[Point, float, None], limit: int) -> Point | None:
        point = next(search)
        # A coordinate with one value left to try could cycle for ever among known points.
        for _ in range(1000 * budget):
            name = name_of(point)
            if name not in losses:
                loss = known(point)
                if loss is None:
                    return point
                losses[name] = loss
                found.append((point, loss))
                if len(found) == limit:
                    return None
            point = search.send(losses[name])
        names = [coordinate.name for coordinate in coordinates]
        raise ValueError(f"the ladders of {names} have fewer points than {budget}")

    missing = spent(descend(coordinates, start, scan), budget - last)
    if missing is None and last:
        best = best_of(found)
        start = {**best, "adam_rate": best.get("adam_rate", best["rate"])}
        losses[name_of(start)] = losses[name_of(best)]  # AdamW's point has only one rate
        missing = spent(descend([Coordinate("adam_rate")], start), budget)
    return found, missing


def best_of(found: Sequence[tuple[Point, float]]) -> Point:
    """The first point with the smallest loss."""
    return min(found, key=lambda pair: pair[1])[0]


def bounded(found: Sequence[tuple[Point, float]], name: str = "rate") -> bool:
    """Whether a smaller and a larger value than the best were tried, so that both were worse."""
    tried = [point[name] for point, _ in found]
    return min(tried) < best_of(found)[name] < max(tried)
