"""KL-Shampoo."""

from ._bounds import of_eigenvalues
from ._row import Row

ROW = Row(
    name="kl_shampoo",
    # On the smaller side the first statistic has full rank, so its eigenbasis is unique.
    settings={"b1": 0.9, "b2": 0.95, "refresh": 2, "side": "smaller"},
    algebra={"b1": 0.3, "b2": 0.5, "initial": 1.0, "side": "both"},
    faults={"side": "both", "method": "eigh"},
    fuzz={"side": "both"},
    keeps="bases",
    fields=frozenset({"mu", "spectrum"}),
    growth=512.0,  # the gaps between the eigenvalues of its statistics
    longest=of_eigenvalues,
    numbers=lambda s: s.m * s.n + 2 * s.squares + sum(s.orders),
)
