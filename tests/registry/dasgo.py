"""DASGO."""

from ._bounds import of_moments
from ._row import Row

ROW = Row(
    name="dasgo",
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01},
    algebra={"b2": 0.99, "eps": 0.1},
    faults={"b2": 0.9, "eps": 1e-6},
    fields=frozenset({"mu", "diagonal"}),
    traits=frozenset({"everything", "narrow"}),
    growth=4.0,
    longest=lambda at: of_moments(0.9, 0.95, at.t) * at.m**0.5,  # rows of M over norms in v
    numbers=lambda s: s.m * s.n + s.m,
)
