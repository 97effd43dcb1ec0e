"""SUMO."""

from ._papers import REFAEL
from ._row import Readme, Row, Variant

ROW = Row(
    name="sumo",
    family="low rank",
    settings={"rank": 3, "refresh": 2},
    algebra={"b1": 0.5},
    minima_rate=3e-3,  # its subspace changes every second step
    keeps="subspaces",
    decomposes="eigh",  # for the basis; the direction uses others
    svd=True,
    fields=frozenset({"basis", "mu", "norm"}),
    growth=512.0,  # the inverse of the moment's smallest singular value
    longest=lambda at: min(3, at.m, at.n) ** 0.5,  # the root of a polar factor's rank
    numbers=lambda s: s.basis + s.low + 1,
    floor="larger projection, SVD",
    variants={
        "Newton-Schulz": Variant({"method": "newton_schulz"}, "larger projection, Newton-Schulz")
    },
    mind="the rest of the gradient is lost",
    readme=Readme(
        direction="`Q O`, `O` orthogonalized momentum of `QᵀG`",
        state="`mr + nr + 1`",
        work="`4mnr`, an SVD of order `r`",
        refresh="randomized SVD",
        paper=f"{REFAEL}, Alg. 1",
    ),
)
