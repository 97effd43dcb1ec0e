"""Alice."""

from curvax.subspaces import complement

from ._bounds import of_moments, projected
from ._row import Row

ROW = Row(
    name="alice",
    settings={"rank": 3, "refresh": 2, "eps": 0.1, "switching": complement(2), "b3": 0.9},
    algebra={"b1": 0.5, "b2": 0.5},
    keeps="subspaces",
    decomposes="qr",
    fields=frozenset({"basis", "tracked", "mu", "nu", "energy", "norm"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # Residual columns are divided by the roots of their energies, times √(order - rank).
    longest=lambda at: (
        0.3 * of_moments(0.9, 0.9, at.t) * projected(at) + 0.3 * 0.4 * (at.m * at.n / 0.1) ** 0.5
    ),
    numbers=lambda s: s.basis + 2 * s.low + s.r * s.r + s.other + 1,
)
