"""Refresh policies for `refresh=`, and what is needed to write one.

`every`, `foam`, `diagonal_residual` and, for subspaces, `below_norm` make policies. `RefreshPolicy`
is what a policy must have; its module says how to write one. A policy sees a `Check` (of an inverse
root with its `RootDamping`), or of a subspace a `ProjectionCheck`, and answers with a `Verdict`.
"""

from .transforms.refresh._below_norm import below_norm
from .transforms.refresh._diagonal_residual import diagonal_residual, residual_and_diagonal
from .transforms.refresh._foam import damping_proxy, foam
from .transforms.refresh._policy import (
    Check,
    Every,
    ProjectionCheck,
    RefreshPolicy,
    RootDamping,
    Verdict,
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
