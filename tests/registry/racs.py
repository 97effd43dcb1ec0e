"""RACS."""

import numpy as np

from ._bounds import Step
from ._row import Row


def of_scales(at: Step) -> float:
    """A bound: if ρ is the largest ratio of squares in G, each scale q_i s_j ≥ G_ij² / ρ²."""
    squares = np.square(at.gradient.astype(np.float64))
    ratio = float(squares.max() / squares.min()) if squares.any() else 1.0
    return 0.05 / 0.1 * (at.m * at.n) ** 0.5 * ratio


ROW = Row(
    name="racs",
    settings={"iterations": 2},
    faults={"iterations": 5},
    fields=frozenset({"rows", "columns", "norm"}),
    traits=frozenset({"scale free", "spares output layer"}),
    growth=4.0,
    longest_repeated=of_scales,  # with changing gradients the scales may be small
    numbers=lambda s: s.m + s.n + 1,
)
