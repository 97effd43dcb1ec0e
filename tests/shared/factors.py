"""Factors in their bases, in the gradient's coordinates, as papers have them."""

from typing import Any

import jax
import numpy as np

from curvax.transforms.kronecker._factor import Factor
from curvax.transforms.linalg._inverse_root import root_eigenvalues


def factors_of(state: Any) -> list[Factor]:
    """All factors of a state."""
    is_factor = lambda x: isinstance(x, Factor)  # noqa: E731
    return [f for f in jax.tree.leaves(state, is_leaf=is_factor) if is_factor(f)]


def statistic_of(factor: Any) -> np.ndarray:
    """`L = U H Uᵀ (..., d, d)` of a factor with dense storage, in float64."""
    u, h = (np.asarray(x, np.float64) for x in (factor.basis, factor.statistic))
    return u @ h @ np.swapaxes(u, -1, -2)


def root_of(factor: Any, root: int, eps: Any, mode: str = "absolute") -> np.ndarray:
    """The inverse root in use `(..., d, d)`, in float64; the identity before the first refresh."""
    u, d = (np.asarray(x, np.float64) for x in (factor.basis, factor.eigenvalues))
    damping = eps if factor.damping is None else np.asarray(factor.damping)[..., None]
    with jax.enable_x64(True):
        r = np.asarray(root_eigenvalues(d, root, damping, mode))
    r = np.where(d.max(axis=-1, keepdims=True) == 0, 1, r)
    return (u * r[..., None, :]) @ np.swapaxes(u, -1, -2)
