r"""Low-rank adapters: the change of each matrix between two sets of weights, as two factors.

For $\Delta = W_{after} - W_{before} = U \Sigma V^\top$, the best factors of rank `r` are

$$A = U_r \Sigma_r^{1/2}\ (m \times r), \qquad B = \Sigma_r^{1/2} V_r^\top\ (r \times n), \qquad
\|\Delta - AB\|_F^2 = \sum_{i > r} \sigma_i^2$$

(Refael et al., SUMO, arXiv:2505.24749, Appendix B; only the product `A B` is determined, the even
split is ours). Each of SUMO's updates has a low rank, so few columns may hold a short fine-tuning.

*Numerics.* Exact SVDs in float32 at least; signs are fixed as in every basis of this library. Do
not use it under `jit`: with a tolerance, the rank depends on the values.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays import check_same_shape
from .._paths import named_leaves
from .._trees import widened
from .._validate import checked
from ..linalg._eigh import thin_svd, with_fixed_signs
from ..linalg._loops import each_matrix
from ..linalg._numerics import ratio
from ..matrices._form import MatrixAxes
from ..matrices._matrix_rule import MatrixRule
from ..matrices._view import gather, lay_out


class Adapter(NamedTuple):
    """The factors of one parameter's `N` matrices (batch, heads)."""

    a: jax.Array  # A (N, m, r)
    b: jax.Array  # B (N, r, n)
    error: jax.Array  # ‖Δ - A B‖ / ‖Δ‖ (N,), 0 if Δ = 0


@checked
def extract_adapter(
    before: Any,
    after: Any,
    *,
    rank: int | None = None,
    tolerance: float | None = None,
    rule: MatrixRule | None = None,
) -> dict[str, Adapter]:
    """Computes low-rank factors of the difference between two sets of parameters.

    Args:
      before: parameters before fine-tuning.
      after: parameters after fine-tuning, in the same tree.
      rank: rank of all factors, clamped to `min(m, n)`.
      tolerance: alternative to `rank`: drops singular values up to `tolerance` times the largest
        one of their matrix. All matrices of one parameter use the largest rank among them.
      rule: which parameters are matrices; `None` is the default rule. Others get no adapter.

    Returns:
      The `Adapter` of each matrix parameter by path, with the relative error.

    Raises:
      ValueError: unless exactly one of `rank` and `tolerance` is given, if the trees differ, or if
        the change of a matrix is not finite.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> before = {"dense": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}}
      >>> after = {"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
      >>> adapters = curvax.extract_adapter(before, after, tolerance=1e-3)
      >>> {name: (x.a.shape, x.b.shape) for name, x in adapters.items()}
      {'dense/kernel': ((1, 3, 1), (1, 1, 4))}
    """
    if (rank is None) == (tolerance is None):
        raise ValueError(
            f"give rank or tolerance, and only one of them; got rank={rank!r}, "
            f"tolerance={tolerance!r}."
        )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            "after must be a tree like before, with the same parameters; their structures differ."
        )
    leaves = named_leaves(before).present()
    for name, x in named_leaves(after).present().items():
        check_same_shape(name, x, leaves[name])
    treatments = (MatrixRule() if rule is None else rule)(before)
    axes = {n: t for n, t in treatments.items() if isinstance(t, MatrixAxes)}
    groups = lay_out({n: tuple(leaves[n].shape) for n in axes}, axes, stack=False)
    old, new = (widened(gather(groups, x, explicit=True)) for x in (before, after))
    changes = {name: new[name] - old[name] for name in old}
    for name, change in changes.items():
        if not jnp.isfinite(change).all():  # LAPACK's SVD may not terminate on it
            raise ValueError(
                f"the change of the parameter {name!r} must be finite; `after - before` has NaN "
                "or infinite entries."
            )
    return {name: _factors(change, rank, tolerance) for name, change in changes.items()}


def _factors(change: jax.Array, rank: int | None, tolerance: float | None) -> Adapter:
    # On GPUs too: its QR of a batch would take many times as long.
    u, s, vt = each_matrix(thin_svd, change, functools.partial(jax.lax.map, thin_svd))
    if rank is None:
        kept = jnp.sum(s > (tolerance or 0.0) * s[..., :1], axis=-1)
        rank = max(1, int(jnp.max(kept)))
    r = min(rank, s.shape[-1])
    signed = with_fixed_signs(u[..., :r])
    signs = jnp.sum(signed * u[..., :r], axis=-2)
    root = jnp.sqrt(s[..., :r])
    total, dropped = (jnp.linalg.norm(x, axis=-1) for x in (s, s[..., r:]))
    b = (root * jnp.sign(signs))[..., None] * vt[..., :r, :]
    return Adapter(signed * root[..., None, :], b, ratio(dropped, total))
