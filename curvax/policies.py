"""Refresh policies for `refresh=`, and what is needed to write one.

`every`, `foam` and `diagonal_residual` make policies; `RefreshPolicy` is what a policy must have,
`Check` what it sees, `Verdict` what it answers. `below_norm` is one for subspaces.
"""

from .transforms._diagonal_residual import diagonal_residual, residual_and_diagonal
from .transforms._foam import damping_proxy, foam
from .transforms._refresh import Check, Every, RefreshPolicy, Verdict, every
from .transforms._subspace_refresh import below_norm

__all__ = [
    "Check",
    "Every",
    "RefreshPolicy",
    "Verdict",
    "below_norm",
    "damping_proxy",
    "diagonal_residual",
    "every",
    "foam",
    "residual_and_diagonal",
]
