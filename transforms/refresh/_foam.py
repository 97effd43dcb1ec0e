r"""FOAM: adaptive damping between refreshes, and a refresh when damping no longer helps.

For a factor $L$ with eigenpairs $(Q, d)$ from its last refresh and the damping $\epsilon$ in use,
and $H = Q^\top L Q$, in which the factor is kept:

$$E = H - \mathrm{diag}(d), \qquad
RC = \big\| (d_i + \epsilon)^{-1/2} E_{ij} (d_j + \epsilon)^{-1/2} \big\|_F, \qquad
\alpha = \frac{\max_i (d_i + \epsilon)^{-1/p}}{\|(d + \epsilon)^{-1/p}\|_2}$$
$$h = \alpha\, RC / p, \qquad \tilde\epsilon = \max(\epsilon_0,\ \epsilon\, h / \tau)$$

$h$ estimates the relative error of the stale root. If $\tilde\epsilon \le \epsilon_{\max}$ the old
eigenpairs stay and $\epsilon \leftarrow \tilde\epsilon$; otherwise the factor is decomposed again
and $\epsilon \leftarrow \epsilon_0$ (Nam and Ahn, arXiv:2606.02365, Algorithm 3 and section 6). The
first check always refreshes.

*Numerics.* Powers take $\max(d, 0)$. `rounding_floor · eps(dtype) · d_max` is rounding noise:
entries of $E$ up to it count as zero, and $d + \epsilon$ counts as no less, because roots are
floored too (`kronecker/_roots.py`). Whitened by a smaller $\epsilon$, noise would force a refresh
of every rank-deficient float32 factor at every check. Rows that have always been zero, such as the
padding of blocks, have $H_{ii} = 0$ and do not enter $\alpha$: their eigenvectors never meet a
gradient. If $E$ is indefinite, $h$ can be far below the true error. What rotations leave off the
diagonal of $H$ is a part of $E$, because the root does not have it. Cost of a check: a reduction of
$H$.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .._validate import checked
from ..linalg._numerics import EIGENVALUE_NOISE, safe_norm
from ._policy import Check, Every, RefreshPolicy, Verdict

ROUNDING_FLOOR = EIGENVALUE_NOISE
"""A change or an eigenvalue up to this multiple of `eps · d_max` is noise. Among small eigenvalues
of float32 factors of orders 16 to 512 it is at most 4.2 right after a decomposition, and 6.8 after
75 more steps. The drawback: a real change of an eigenvalue below goes unnoticed."""


def damping_proxy(
    statistic: jax.Array,
    eigenvalues: jax.Array,
    damping: jax.typing.ArrayLike,
    root: int,
    rounding_floor: float = ROUNDING_FLOOR,
) -> jax.Array:
    """FOAM's `h`, for a `statistic (n, n)` in the basis whose `eigenvalues` were `(n,)`."""
    live = jnp.diagonal(statistic) != 0
    error = statistic - jnp.diag(eigenvalues)
    noise = rounding_floor * jnp.finfo(error.dtype).eps * jnp.max(jnp.abs(eigenvalues))
    error = jnp.where(jnp.abs(error) <= noise, 0, error)
    damped = jnp.maximum(jnp.maximum(eigenvalues, 0) + damping, noise)
    whitening = damped**-0.5
    change = safe_norm(whitening[:, None] * error * whitening[None, :])  # RC of Eq. 3
    # Ours: rows that have always been 0, such as the padding of blocks, do not enter α.
    roots = jnp.where(live, damped ** (-1 / root), 0)
    norm = safe_norm(roots)
    return jnp.max(roots) / jnp.where(norm > 0, norm, 1) * change / root


@dataclasses.dataclass(frozen=True)
class Foam(RefreshPolicy):
    schedule: Every
    threshold: float
    max_damping: float
    adaptive_damping: bool
    refreshes: bool
    rounding_floor: float

    examines = "damping"

    def examine(self, check: Check) -> Verdict:
        """Algorithm 3, or one of the two ablations of Fig. 4."""
        assert check.root_damping is not None
        old, base, root = check.root_damping
        # Alg. 3, lines 8 and 10
        h = damping_proxy(check.statistic, check.eigenvalues, old, root, self.rounding_floor)
        damping = jnp.maximum(base, old * h / self.threshold)
        if not self.adaptive_damping:
            refresh, damping = h > self.threshold, jnp.asarray(base, h.dtype)
        elif not self.refreshes:
            refresh, damping = False, jnp.minimum(damping, self.max_damping)
        else:
            refresh = ~(damping <= self.max_damping)  # line 11
        proxy = jnp.where(check.first, 0, jnp.minimum(h, jnp.finfo(jnp.float32).max))
        return Verdict(check.first | refresh, proxy, damping)


@checked
def foam(
    check_every: int = 20,
    threshold: float = 0.75,
    max_damping: float = 3e-7,
    *,
    adaptive_damping: bool = True,
    refreshes: bool = True,
    rounding_floor: float = ROUNDING_FLOOR,
    stagger: bool = False,
) -> Foam:
    """FOAM's refresh policy: damps a stale factor more, and refreshes it if that is not enough.

    The paper's settings (with base damping): `(20, 0.75, 3e-7)`, 1e-9 for a ViT; `(50, 0.4, 1e-7)`,
    1e-9 for a Conformer; `(75, 0.4, 1e-10)`, 1e-12 for GPT-2.

    Args:
      check_every: f, steps between checks, at steps 1, f + 1, 2f + 1, …
      threshold: τ, the target of the estimated error.
      max_damping: ε_max, the damping above which a factor is refreshed instead.
      adaptive_damping: `False` keeps the base damping and refreshes if `h > τ` (ablation).
      refreshes: `False` never refreshes after the first check, and clips the damping at
        `max_damping` (ablation).
      rounding_floor: multiple of `eps · d_max` up to which a change or an eigenvalue is rounding
        noise; 0 is the algorithm as printed.
      stagger: spreads the checks of the factors over the period.

    Raises:
      ValueError: if `adaptive_damping` and `refreshes` are both `False`.
    """
    if not (adaptive_damping or refreshes):
        raise ValueError(
            "adaptive_damping and refreshes cannot both be False: at least one must be True."
        )
    schedule = Every(check_every, offset=1, first=True, stagger=stagger)
    return Foam(schedule, threshold, max_damping, adaptive_damping, refreshes, rounding_floor)
