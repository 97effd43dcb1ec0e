r"""Refresh by diagonal residual: a new decomposition when the old basis no longer diagonalizes.

At a check, with $H = Q^\top L Q$ for the eigenvectors $Q$ of the last refresh:

$$r = \|H - \mathrm{diag}(H)\|_F \,/\, \|H\|_F$$

If $r > \tau$ the factor is decomposed again; otherwise the basis stays and the eigenvalues become
$\mathrm{diag}(H)$ (Eschenhagen et al., 2025; as DR-Shampoo in Nam and Ahn, arXiv:2606.02365,
Appendices I and J.5). The damping does not change. A zero factor has residual 0. Cost of a check: a
reduction of $H$, in which the factor is kept.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .._validate import checked
from ..linalg._numerics import magnitude, ratio, to_one
from ._policy import Check, Every, RefreshPolicy, Verdict


def residual_and_diagonal(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`‖H - diag(H)‖ / ‖H‖`, which only decides, so that it has no derivative, and `diag(H)`."""
    near_one = jax.lax.stop_gradient(h) * to_one(magnitude(h))
    norm = jnp.linalg.norm(near_one)
    off = jnp.linalg.norm(near_one - jnp.diag(jnp.diagonal(near_one)))  # Appendix I
    return ratio(off, norm), jnp.diagonal(h)


@dataclasses.dataclass(frozen=True)
class DiagonalResidual(RefreshPolicy):
    schedule: Every
    threshold: float
    update_eigenvalues: bool

    examines = "eigenpairs"

    def examine(self, check: Check) -> Verdict:
        residual, diagonal = residual_and_diagonal(check.statistic)
        refresh = check.first | ~(residual <= self.threshold)  # J.5
        proxy = jnp.where(check.first, jnp.zeros_like(residual), residual)
        return Verdict(refresh, proxy, eigenvalues=diagonal if self.update_eigenvalues else None)


@checked
def diagonal_residual(
    check_every: int = 20,
    threshold: float = 0.1,
    *,
    update_eigenvalues: bool = True,
    stagger: bool = False,
) -> DiagonalResidual:
    """DR-Shampoo's refresh policy: refreshes when `‖offdiag(QᵀLQ)‖ > threshold · ‖QᵀLQ‖`.

    Args:
      check_every: f, steps between checks, at steps 1, f + 1, 2f + 1, …
      threshold: τ, positive.
      update_eigenvalues: whether a check that does not refresh sets the eigenvalues to
        `diag(QᵀLQ)`; otherwise the root does not change.
      stagger: spreads the checks of the factors over the period.

    Raises:
      ValueError: if `check_every < 1` or `threshold <= 0`, or if a flag is not a bool; the message
        names the argument.
    """
    schedule = Every(check_every, offset=1, first=True, stagger=stagger)
    return DiagonalResidual(schedule, threshold, update_eigenvalues)
