"""Muon."""

from curvax import polar as polar_methods

from ._bounds import polar
from ._row import Row

ROW = Row(
    name="muon",
    settings={"method": polar_methods.newton_schulz(3)},
    fuzz={"method": polar_methods.newton_schulz(3, eps=0.0)},
    fields=frozenset({"mu"}),
    traits=frozenset({"narrow", "scale free"}),
    growth=3.4445**3,  # each of three iterations multiplies small singular values by 3.4445
    # Newton-Schulz bounds singular values by the largest value of the quintic on [0, 1.2].
    longest=lambda at: 1.21 * polar(at) * max(1, at.n / at.m) ** 0.5,
    numbers=lambda s: s.m * s.n,
)
