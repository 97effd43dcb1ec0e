"""OSGDM."""

from ._bounds import polar
from ._row import Row

ROW = Row(
    name="osgdm",
    fields=frozenset({"trace"}),
    traits=frozenset({"after the matrices", "narrow", "scale free", "svd"}),
    growth=512.0,  # the inverse of the gradient's smallest nonzero singular value
    longest=polar,
    numbers=lambda s: s.m * s.n,
)
