"""Refresh policies for `refresh=`, and what is needed to write one.

`every`, `foam` and `diagonal_residual` make policies; `RefreshPolicy` is what a policy must have,
`Check` what it sees, `Verdict` what it answers. `below_norm` is one for subspaces.
"""

from .transforms.refresh._below_norm import below_norm
from .transforms.refresh._diagonal_residual import diagonal_residual, residual_and_diagonal
from .transforms.refresh._foam import damping_proxy, foam
from .transforms.refresh._policy import Check, Every, RefreshPolicy, Verdict, every

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
