"""Shampoo."""

from ._row import Row

ROW = Row(
    name="shampoo",
    settings={"b2": 0.95, "eps": 0.01, "refresh": 2, "statistics_every": 1},
    algebra={"b2": 0.3, "eps": 0.3, "root": 2, "damping_mode": "absolute"},
    faults={"b2": 0.9, "root": 2, "damping_mode": "absolute"},
    fuzz={"initial": 0.0},
    keeps="roots",
    traits=frozenset({"base"}),
    growth=128.0,  # the inverse of its relative damping
    longest=lambda at: at.longest,  # grafting
    numbers=lambda s: 2 * s.squares,
)
