"""SWAN."""

from ._bounds import polar
from ._row import Row

ROW = Row(
    name="swan",
    traits=frozenset({"blind to means", "scale free", "svd"}),
    growth=512.0,  # the inverse of the gradient's smallest nonzero singular value
    longest=polar,
    numbers=lambda s: 0,
)
