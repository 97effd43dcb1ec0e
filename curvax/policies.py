"""Refresh policies for `refresh=`, and the types for writing your own.

`every`, `foam` and `diagonal_residual` build policies, and so does `below_norm` for subspaces. A
policy of your own implements `RefreshPolicy`; the module of that class explains how. A policy
examines a `Check` (for an inverse root, with its `RootDamping`) or, for a subspace, a
`ProjectionCheck`, and returns a `Verdict`.
"""

from .transforms.refresh._diagonal_residual import diagonal_residual, residual_and_diagonal
from .transforms.refresh._foam import damping_proxy, foam
from .transforms.refresh._policy import (
    Check,
    Every,
    ProjectionCheck,
    RefreshPolicy,
    RootDamping,
    Verdict,
    below_norm,
    every,
)

__all__ = [
    "Check",
    "Every",
    "ProjectionCheck",
    "RefreshPolicy",
    "RootDamping",
    "Verdict",
    "below_norm",
    "damping_proxy",
    "diagonal_residual",
    "every",
    "foam",
    "residual_and_diagonal",
]
