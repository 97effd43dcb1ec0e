"""Fira."""

from ._bounds import KAPPA, of_moments, projected
from ._row import Row

ROW = Row(
    name="fira",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5},
    keeps="subspaces",
    decomposes="svd",
    fields=frozenset({"basis", "mu", "nu", "norm"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # The residual is a multiple of the projection with the same scale; a limiter bounds its growth.
    longest_repeated=lambda at: (
        0.3 * of_moments(0.9, 0.999, at.t, corrected=True) * projected(at) * KAPPA
    ),
    numbers=lambda s: s.basis + 2 * s.low + 1,
)
