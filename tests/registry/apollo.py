"""APOLLO."""

from curvax.subspaces import svd

from ._bounds import KAPPA, of_moments, projected
from ._row import Row

ROW = Row(
    name="apollo",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5, "basis": svd()},
    keeps="subspaces",
    fields=frozenset({"mu", "nu"}),
    traits=frozenset({"random", "spares output layer"}),
    growth=128.0,  # it divides by the norms of projected columns
    longest_repeated=lambda at: (
        of_moments(0.9, 0.999, at.t, corrected=True) * projected(at) * KAPPA
    ),
    numbers=lambda s: 2 * s.low,
)
