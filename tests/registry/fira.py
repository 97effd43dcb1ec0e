"""Fira."""

from ._bounds import KAPPA, of_moments, projected
from ._papers import GONG
from ._row import Readme, Row

ROW = Row(
    name="fira",
    family="low rank",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5},
    fault_cell=("stagger", None),
    faults_rate=0.3,
    keeps="subspaces",
    decomposes="svd",
    fields=frozenset({"basis", "mu", "nu", "norm"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # The residual is a multiple of the projection with the same scale; a limiter bounds its growth.
    longest_repeated=lambda at: (
        0.3 * of_moments(0.9, 0.999, at.t, corrected=True) * projected(at) * KAPPA
    ),
    numbers=lambda s: s.basis + 2 * s.low + 1,
    floor="projection",
    mind="the rest is scaled, not preconditioned",
    readme=Readme(
        direction="the same `+ (G − U UᵀG) diag(s)`",
        state="`mr + 2nr + 1`",
        work="`4mnr`",
        refresh="one SVD",
        paper=f"{GONG}, B.12 and F.7",
    ),
)
