"""GaLore."""

from ._bounds import of_moments, projected
from ._row import Row

ROW = Row(
    name="galore",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5},
    keeps="subspaces",
    decomposes="svd",
    fields=frozenset({"basis", "mu", "nu"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # Entries in the subspace are ratios of moments, and the basis is orthonormal.
    longest=lambda at: 0.3 * of_moments(0.9, 0.999, at.t, corrected=True) * projected(at),
    numbers=lambda s: s.basis + 2 * s.low,
)
