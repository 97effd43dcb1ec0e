"""SUMO."""

from ._row import Row

ROW = Row(
    name="sumo",
    settings={"rank": 3, "refresh": 2},
    algebra={"b1": 0.5},
    keeps="subspaces",
    decomposes="eigh",  # for the basis; the direction uses others
    fields=frozenset({"basis", "mu", "norm"}),
    traits=frozenset({"svd"}),
    growth=512.0,  # the inverse of the moment's smallest singular value
    longest=lambda at: min(3, at.m, at.n) ** 0.5,  # the root of a polar factor's rank
    numbers=lambda s: s.basis + s.low + 1,
)
