"""Eigen-Adam."""

from ._bounds import in_eigenbasis, of_moments
from ._row import Row

ROW = Row(
    name="eigen_adam",
    settings={"b1": 0.9, "b3": 0.9, "eps": 0.1, "refresh": 2, "side": "smaller"},  # as SOAP
    algebra={"b1": 0.5, "b2": 0.5, "b3": 0.3, "eps": 1.0},
    faults={"b2": 0.9},
    keeps="bases",
    fields=frozenset({"mu", "nu"}),
    growth=512.0,  # the gaps between the eigenvalues of its statistics
    longest=in_eigenbasis,
    # Entries in the eigenbasis are ratios of moments.
    longest_repeated=lambda at: of_moments(0.9, 0.95, at.t) * (at.m * at.n) ** 0.5,
    numbers=lambda s: 2 * s.m * s.n + 2 * s.squares,
)
