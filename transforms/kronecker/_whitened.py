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
multiple, and a side that is not preconditioned as the identity. Eigenvalues that are not finite
start anew at the next step, because those of one side make the other's (`restarted`). A gradient
of zeros changes nothing: if both sides decayed in a pause, the inverses of both would be too large
for the first gradient after it, and both statistics then for as many steps as the pause had.

*Bound.* With roots of this step's statistics, $\|D\|_2 \le \sqrt{\min(m, n) / (b (1-b))}$: a
statistic contains its gradient, whitened by inverses that shrink by $b$ at most. From eigenvalues
in a basis that stays, the root mean square of $D$ is at most $1 / \sqrt{b (1-b)}$. With an average
of decay $b_1 < b$ in place of $G$, the Cauchy-Schwarz inequality of `_moment_ratio.py` makes this
$(1-b_1) \sqrt{b / ((1-b)(b^2-b_1^2))}$: a gradient of $k$ steps ago was whitened by eigenvalues of
which $b^{k+1}$ is left.

*Numerics.* The inverse of an eigenvalue that is rounding noise beside the largest is 0. *Cost* at
each step beside the statistics: `2mn(m + n)` FLOPs from roots, `2mn(m + 2n)` from bases.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._side import Side
from ..linalg._numerics import safe_root, significant
from ..linalg._turns import Turn
from ._bases import BasisRule
from ._factor import Factor, Pair, each_side


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


def whitened_sources(
    x: jax.Array, scales: Sequence[jax.Array | None]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """`X μ^(-1/2) / √n` and `λ^(-1/2) X / √m` for the inverse roots `(..., d)` of both sides.

    A side without roots counts as the identity. Also the roots, with an axis for the other side.
    """
    by_left, by_right = (
        jnp.expand_dims(
            jnp.ones((*x.shape[:-2], side.order(x)), x.dtype) if d is None else d, side.other_axis
        )
        for side, d in zip(Side, scales, strict=True)
    )
    m, n = x.shape[-2:]
    return (x * by_right / n**0.5, x * by_left / m**0.5), (by_left, by_right)


@dataclasses.dataclass(frozen=True)
class WhitenedRule(BasisRule):
    """Bases of whitened gradients, with averages of their eigenvalues."""

    amplifies = True

    def first_fields(self, batch: tuple[int, ...], eye: jax.Array) -> dict[str, Any]:
        spectrum = jnp.full((*batch, len(eye)), self.initial, eye.dtype)
        return super().first_fields(batch, eye) | {"spectrum": spectrum}

    def whitened(
        self, x: jax.Array, factors: Pair, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Pair]:
        """What the statistics of both sides average, their start, and new averages."""
        sides = max(1, sum(factor is not None for factor in factors))
        start = starting_multiple(x, sides, self.initial, x.dtype)

        def sound(side: Side, factor: Any) -> Factor:
            """With averages that can be used: those of zeros and damaged ones start anew."""
            damaged = ~jnp.isfinite(factor.spectrum).all(axis=-1)
            empty = ~jnp.any(factor.spectrum != 0, axis=-1) | damaged
            spectrum = jnp.where(empty[..., None], start[..., None], factor.spectrum)
            counts = factor.counts.plus(restarted=damaged)
            return factor._replace(spectrum=spectrum, counts=counts)

        def averaged(side: Side, factor: Any, other: jax.Array) -> Factor:
            mean = jnp.mean(x**2 * other**2, axis=side.other_axis)  # of λ and μ above
            new = self.b2 * factor.spectrum + (1 - self.b2) * mean
            # As with statistics: a gradient that is not finite leaves the average as it is.
            kept = jnp.isfinite(new).all(axis=-1) & jnp.any(x != 0, axis=(-2, -1))
            spectrum = jnp.where(kept[..., None], new, factor.spectrum).astype(x.dtype)
            return factor._replace(spectrum=spectrum)

        factors = each_side(sound, factors)
        scales = each_side(lambda _, factor: inverse_roots(factor.spectrum), factors)
        sources, (by_left, by_right) = whitened_sources(x, scales)
        return sources, start, each_side(averaged, factors, (by_right, by_left))

    def with_eigenvalues(self, factor: Factor, d: Any, turn: Turn, first: Any) -> Factor:
        spectrum: Any = factor.spectrum
        kept = spectrum if turn.order is None else spectrum[turn.order]
        # The averages so far may be those of the identity as a basis.
        kept = jnp.where(turn.keeps & ~first, kept, jnp.maximum(d, 0))
        return super().with_eigenvalues(factor, d, turn, first)._replace(spectrum=kept)
