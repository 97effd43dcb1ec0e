r"""Statistics of whitened gradients: KL-Shampoo's and KL-SOAP's (Lin et al., arXiv:2509.03378).

$$L \leftarrow b L + \frac{1-b}{n}\, G R^{-1} G^\top, \qquad
R \leftarrow b R + \frac{1-b}{m}\, G^\top L^{-1} G$$

with the inverses of the step before. At the fixed point $L \otimes R$ has the least
Kullback-Leibler divergence from the covariance of the gradient's entries, and $L^{-1/2} G R^{-1/2}$
has mean square 1, as Adam's direction has, so it needs no grafting. Inverses come from the roots in
use (`precondition`), or from the bases $U$ in use and eigenvalues that follow the gradient at every
step (`in_eigenbasis`), with $\mu$ those of the other side:

$$\lambda_i \leftarrow b \lambda_i + \frac{1-b}{n} \sum_j (U_L^\top G\, U_R)_{ij}^2 / \mu_j$$

*Start.* Statistics start at a multiple of the identity; in the official code eigenvalues start at
0.1. The default here is the mean square of the first gradient (its root, with two sides), so that
directions do not depend on the gradient's scale. A side without an inverse root counts as such a
multiple, and a side that is not preconditioned as the identity.

*Bound.* With roots of this step's statistics, $\|D\|_2 \le \sqrt{\min(m, n) / (b (1-b))}$: a
statistic contains its gradient, whitened by inverses that shrink by $b$ at most. From eigenvalues
in a basis that stays, the root mean square of $D$ is at most $1 / \sqrt{b (1-b)}$. With an average
of decay $b_1 < b$ in place of $G$, the Cauchy-Schwarz inequality of `_moment_ratio.py` makes this
$(1-b_1) \sqrt{b / ((1-b)(b^2-b_1^2))}$: a gradient of $k$ steps ago was whitened by eigenvalues of
which $b^{k+1}$ is left.

*Numerics.* The inverse of an eigenvalue that is rounding noise beside the largest is 0. *Cost* at
each step beside the statistics: `2mn(m + n)` FLOPs from roots, `2mn(m + 2n)` from bases.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..linalg._numerics import safe_root, significant


def starting_multiple(
    g: jax.Array, sides: int, initial: jax.typing.ArrayLike, dtype: Any
) -> jax.Array:
    """The multiple of the identity, `(...)`, at which the statistics of `g (..., m, n)` start."""
    mean_square = jnp.mean(jnp.square(g.astype(dtype)), axis=(-2, -1))
    start = safe_root(mean_square) if sides == 2 else mean_square
    return jnp.where(jnp.asarray(initial) > 0, initial, start).astype(dtype)


def inverse_roots(d: jax.Array) -> jax.Array:
    """`d^(-1/2)` of eigenvalues `d (..., n)`; 0 where they are rounding noise."""
    kept = significant(d)
    root = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, d, 1)), 0)
    # A damaged state must show, so that the guard starts it anew.
    return jnp.where(jnp.isfinite(d).all(axis=-1, keepdims=True), root, jnp.nan)
