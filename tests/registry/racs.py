"""RACS."""

import numpy as np

from ._bounds import Step
from ._papers import GONG
from ._row import Readme, Row


def of_scales(at: Step) -> float:
    """A bound: if ρ is the largest ratio of squares in G, each scale q_i s_j ≥ G_ij² / ρ²."""
    squares = np.square(at.gradient.astype(np.float64))
    ratio = float(squares.max() / squares.min()) if squares.any() else 1.0
    return 0.05 / 0.1 * (at.m * at.n) ** 0.5 * ratio


ROW = Row(
    name="racs",
    family="scaled, or one-sided",
    settings={"iterations": 2},
    faults={"iterations": 5},
    faults_rate=0.3,
    fields=frozenset({"rows", "columns", "norm"}),
    spares_output_layer=True,
    scale_free=True,
    growth=4.0,
    longest_repeated=of_scales,  # with changing gradients the scales may be small
    numbers=lambda s: s.m + s.n + 1,
    floor="rank one",
    mind="no momentum",
    brief=True,
    readme=Readme(
        direction="`diag(q)^(-1/2) G diag(s)^(-1/2)`, `q sᵀ ≈ G²`",
        state="`m + n + 1`",
        work="`20mn`",
        refresh="",
        paper=f"{GONG}, Alg. 1",
    ),
)
