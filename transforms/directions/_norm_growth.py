r"""The norm-growth limiter: from step to step, a direction's norm grows by at most a factor γ.

$$\eta_t = \gamma / \max(\|D_t\| / \phi_{t-1},\ \gamma), \qquad \phi_t = \eta_t \|D_t\|, \qquad
D_t \leftarrow \eta_t D_t$$

with $\eta_t = 1$ while $\phi_{t-1} = 0$ (Chen et al., Fira, 2024; Gong et al., arXiv:2502.07752,
Algorithm 1 lines 9-10 and Algorithm 3 lines 4-6). As printed, one zero gradient would keep all
later directions at zero; here the limiter restarts.

*Numerics.* Frobenius norms in float32 at least. If that of a direction is not finite, the direction
becomes zero and $\phi$ stays. *Cost*: one pass. *State*: one number per matrix.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._stacks import each_array
from .._validate import checked
from ..linalg._numerics import safe_norm


class NormGrowthState(NamedTuple):
    norm: jax.Array  # φ, the last norm after limiting, (...), float32 at least


@checked
def limit_norm_growth(gamma: jax.typing.ArrayLike = 1.01) -> optax.GradientTransformation:
    """Limits the growth of each matrix's Frobenius norm to a factor `gamma` per step.

    Args:
      gamma: largest growth factor, at least 1. Infinity switches the limiter off.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if `gamma < 1`, or if a leaf is not a matrix.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> limiter = curvax.limit_norm_growth(2.0)
      >>> state = limiter.init(jnp.eye(1))
      >>> first, state = limiter.update(jnp.eye(1), state)
      >>> second, state = limiter.update(10 * jnp.eye(1), state)
      >>> float(first[0, 0]), float(second[0, 0])
      (1.0, 2.0)
    """

    def init(p: Any) -> NormGrowthState:
        return NormGrowthState(jnp.zeros(p.shape[:-2], np.promote_types(p.dtype, np.float32)))

    def update(x: Any, state: Any, params: Any = None):
        norm = safe_norm(x.astype(state.norm.dtype), axis=(-2, -1))
        factor, norm = limited_norm(norm, state.norm, gamma)
        return x * factor[..., None, None].astype(x.dtype), NormGrowthState(norm)

    return each_array("limit_norm_growth", init, update, work=None)


def limited_norm(
    norm: jax.Array, last: jax.Array, gamma: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The factor η and the limited norm, from a norm and the last limited norm."""
    limited = (last > 0) & (norm > gamma * last)
    factor = jnp.where(limited, gamma * last / jnp.where(limited, norm, 1), 1)  # Alg. 1, line 9
    finite = jnp.isfinite(norm)
    new = jnp.where(limited, gamma * last, norm)  # line 10
    return jnp.where(finite, factor, 0), jnp.where(finite, new, last)
