"""Alice."""

from ._bounds import of_moments, projected
from ._papers import GONG
from ._row import Readme, Row, Variant

ROW = Row(
    name="alice",
    family="low rank",
    settings={"rank": 3, "refresh": 2, "eps": 0.1, "leading": 2, "b3": 0.9},
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
    floor="projection, tracked",
    variants={
        "no tracking": Variant(
            {"tracking": False},
            floor="projection",
            aim=1.6,
            numbers=lambda s: s.basis + 2 * s.low + s.other + 1,
        )
    },
    by_rank=lambda rank: {"leading": max(1, rank * 40 // 128)},  # as in the paper, at 60M
    mind="more constants to set than GaLore",
    brief=True,
    readme=Readme(
        direction="`U (M / √v) + C`, moments of `UᵀG`",
        state="`mr + 2nr + r² + n + 1`",
        work="`4mnr + 2nr²`",
        refresh="subspace iteration, QR",
        paper=f"{GONG}, Alg. 4",
    ),
)
