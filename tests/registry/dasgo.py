"""DASGO."""

from ._bounds import of_moments
from ._papers import AN
from ._row import Readme, Row

ROW = Row(
    name="dasgo",
    family="scaled, or one-sided",
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01},
    algebra={"b2": 0.99, "eps": 0.1},
    faults={"b2": 0.9, "eps": 1e-6},
    fields=frozenset({"mu", "columns"}),
    everything=True,
    growth=4.0,
    longest=lambda at: of_moments(0.9, 0.95, at.t) * at.n**0.5,  # columns of M over norms in v
    numbers=lambda s: s.m * s.n + s.n,
    narrow=True,
    mind="only the scales of columns adapt",
    readme=Readme(
        direction="`M diag(v)^(-1/2)`, `v` the mean of `diag(GᵀG)`",
        state="`mn + n`",
        work="`6mn`",
        refresh="",
        paper=f"{AN}, Alg. 3",
    ),
)
