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

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._side import LEFT, RIGHT, Side
from ..directions._moment_ratio import largest_ratio
from ..linalg._numerics import significant
from ..refresh._policy import RefreshPolicy

STATISTICS = ("gradient", "kl")

Product = Callable[[jax.Array, Side], jax.Array]


def starting_multiple(
    g: jax.Array, sides: int, initial: jax.typing.ArrayLike, dtype: Any
) -> jax.Array:
    """The multiple of the identity, `(...)`, at which the statistics of `g (..., m, n)` start."""
    mean_square = jnp.mean(jnp.square(g.astype(dtype)), axis=(-2, -1))
    return jnp.where(jnp.asarray(initial) > 0, initial, mean_square ** (1 / sides)).astype(dtype)


def inverse_or_zero(x: jax.Array) -> jax.Array:
    """`1 / x (...)`, 0 where `x` is 0."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))


def inverse_roots(d: jax.Array) -> jax.Array:
    """`d^(-1/2)` of eigenvalues `d (..., n)`; 0 where they are rounding noise."""
    kept = significant(d)
    root = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, d, 1)), 0)
    # A damaged state must show, so that the guard starts it anew.
    return jnp.where(jnp.isfinite(d).all(axis=-1, keepdims=True), root, jnp.nan)


def largest_whitened(b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike) -> Any:
    """The bound on root mean squares from eigenvalues; see above. Infinite if `b1 >= b2`."""
    xp = jnp if isinstance(b1, Tracer) or isinstance(b2, Tracer) else np
    rest: Any = b2**2 - b1**2
    square: Any = (1 - b1) ** 2 * b2 / ((1 - b2) * xp.where(rest > 0, rest, 1))
    return xp.where(rest > 0, square**0.5, xp.inf)


def limit_of_moments(
    b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike, refresh: RefreshPolicy
) -> Any:
    """The largest root mean square of `moment_ratio(b1, b2)` in a basis that never turns.

    It is infinite with `every(1)`: there a turned moment is divided by a variance of the other
    basis at every step, and the papers' trajectories exceed the bound.
    """
    return _unless_renewed(largest_ratio(b1, b2), refresh)


def limit_of_eigenvalues(
    b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike, refresh: RefreshPolicy
) -> Any:
    """The same for `momentum(b1)`, divided by the roots of eigenvalues averaged with `b2`."""
    return _unless_renewed(largest_whitened(b1, b2), refresh)


def _unless_renewed(most: Any, refresh: RefreshPolicy) -> Any:
    period = refresh.schedule.period
    if isinstance(period, Tracer):
        return jnp.where(period > 1, most, jnp.inf)
    return most if period > 1 else float("inf")


def whitened_by_roots(
    g: jax.Array,
    multiply: Product,
    rooted: tuple[jax.Array | None, jax.Array | None],
    multiple: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The matrices that both statistics average: `G R^(-1/2) / √n` and `L^(-1/2) G / √m`.

    Args:
      g: gradients `(..., m, n)`.
      multiply: the product of inverse roots of order 2 with `g`, on a side.
      rooted: per side whether it has an inverse root `(...)`; None for a side without a factor.
      multiple: the multiple of the identity that stands for a side without an inverse root,
        `(...)`.
    """

    def by(side: Side, has_root: jax.Array | None) -> jax.Array:
        work = g.astype(multiple.dtype)
        if has_root is not None:
            plain = work * inverse_or_zero(jnp.sqrt(multiple))[..., None, None]
            work = jnp.where(has_root[..., None, None], multiply(work, side), plain)
        return work / side.order(g) ** 0.5

    return by(RIGHT, rooted[1]), by(LEFT, rooted[0])


def whitened_by_eigenvalues(
    rows: jax.Array,
    columns: jax.Array,
    both: jax.Array,
    eigenvalues: tuple[jax.Array | None, jax.Array | None],
    decay: jax.typing.ArrayLike,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The matrices that the statistics average, and the new eigenvalues.

    Args:
      rows: `U_Lᵀ G (..., m, n)`; `G` if that side has no basis.
      columns: `G U_R`.
      both: `U_Lᵀ G U_R`.
      eigenvalues: λ `(..., m)` and μ `(..., n)`; None for a side without a basis.
      decay: b.
    """
    m, n = both.shape[-2:]
    ones = (jnp.ones((*both.shape[:-2], k), both.dtype) for k in (m, n))
    old = [one if d is None else d for d, one in zip(eigenvalues, ones, strict=True)]
    left, right = (inverse_roots(d) for d in old)
    sources = (columns * right[..., None, :] / n**0.5, rows * left[..., :, None] / m**0.5)
    squares = both**2
    means = (
        jnp.mean(squares * right[..., None, :] ** 2, axis=-1),
        jnp.mean(squares * left[..., :, None] ** 2, axis=-2),
    )

    def averaged(old: jax.Array, mean: jax.Array) -> jax.Array:
        new = decay * old + (1 - decay) * mean
        # As with statistics: a gradient that is not finite leaves the average as it is.
        return jnp.where(jnp.isfinite(new).all(axis=-1, keepdims=True), new, old)

    return sources, (averaged(old[0], means[0]), averaged(old[1], means[1]))
