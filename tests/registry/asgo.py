"""ASGO."""

from ._bounds import polar
from ._row import Row

ROW = Row(
    name="asgo",
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01, "refresh": 2},
    algebra={"b2": 0.3, "eps": 0.3},
    faults={"b2": 0.9, "eps": 1e-4},
    keeps="roots",
    fields=frozenset({"mu"}),
    traits=frozenset({"everything", "narrow"}),
    growth=512.0,  # the condition number of its damped statistics
    longest=lambda at: at.longest / 1e-6**0.5,
    # For a constant G, V ≥ 0.05 G Gᵀ and M ≤ (1 - 0.9^t) G.
    longest_repeated=lambda at: (1 - 0.9**at.t) * polar(at) / 0.05**0.5,
    numbers=lambda s: s.m * s.n + 2 * s.squares,
)
