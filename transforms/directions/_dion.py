r"""Orthonormal updates of low rank with error feedback: Dion (Ahn et al., arXiv:2504.05295).

For a momentum $M$ `(m, n)` and a right factor $Q$ `(n, r)`, whose columns are unit vectors:

$$B = M + G, \qquad P = \mathrm{orth}(B Q), \qquad R = B^\top P, \qquad
M \leftarrow B - (1-\mu)\, P R^\top, \qquad Q \leftarrow R \, \mathrm{diag}(\|R_{:j}\|)^{-1}, \qquad
D = P Q^\top$$

This is one step of power iteration from the last $Q$. Only the part of $B$ that the direction
represents decays; the rest stays in $M$ as feedback (so the guard checks gradients before their
projection, which suffices in `in_subspace`). If the rank is full and $B Q$ has full rank, then
$P P^\top = I$, and $M$ is Muon's momentum $\mu (M + G)$.

*Numerics.* float32 at least, `Precision.HIGHEST`; `orth` by QR, one matrix after the other. If a
column of $R$ is rounding noise beside the longest, the direction has a zero column there, and the
column of $Q$ stays. If the QR fails, the direction is 0, $M$ becomes $\mu B$, and `failures`
counts it. *Cost*: `8mnr` FLOPs and a QR of `m × r`. *State*: `mn + nr` numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._recording import record_rank
from .._side import side_of
from .._stacks import each_array, key_for, matrix_keys
from .._validate import checked
from ..linalg._numerics import magnitude, safe_root, significant, to_one
from ..linalg._products import exact_product
from ..linalg._qr import bases_of


class DionState(NamedTuple):
    mu: jax.Array  # M (..., m, n), float32 at least
    factor: jax.Array  # Q (..., d, r), with the order d of the side that is not orthonormal
    failures: jax.Array  # failed QR decompositions, int32 (...)


@checked
def scale_by_dion(
    rank: int, *, b1: jax.typing.ArrayLike = 0.95, side: str = "left", seed: int = 0
) -> optax.GradientTransformation:
    """Replaces matrices by orthonormal directions of low rank, with error feedback.

    Args:
      rank: r; at most `min(m, n)` is used.
      b1: μ, the decay rate of the part that the direction represents.
      side: the side of P: "left" (rows, as printed), "right", "smaller" or "larger". The paper's
        rows are outputs, which are the columns of kernels in Flax.
      seed: seed of the first Q, whose columns are random.

    Returns:
      A transformation on batches of matrices `(..., m, n)`. Its directions have at most the norm
      `√r`; the paper multiplies them by √(outputs / inputs), which `scale_by_shape` does for
      matrices with more outputs.

    Raises:
      ValueError: naming the argument that is outside its range, or a leaf that is not a matrix.

    Example:
      >>> import curvax, optax
      >>> direction = optax.chain(curvax.scale_by_dion(64), curvax.scale_by_shape())
      >>> optimizer = curvax.assemble(direction, 0.02)
    """

    def init(p: Any) -> DionState:
        p_side, r = side_of(side, p), min(rank, *p.shape[-2:])
        order = p_side.other.order(p)
        dtype = np.promote_types(p.dtype, np.float32)
        record_rank(p, rank, r, p_side.value)

        def drawn(key: jax.Array) -> jax.Array:  # the same numbers in every dtype
            return jax.random.normal(key_for(key, jnp.int32(0)), (order, r), jnp.float32)

        for _ in p.shape[:-2]:
            drawn = jax.vmap(drawn)
        q = drawn(matrix_keys(p, seed)).astype(dtype)
        return DionState(
            mu=jnp.zeros(p.shape, dtype),
            factor=q / jnp.linalg.norm(q, axis=-2, keepdims=True),
            failures=jnp.zeros(p.shape[:-2], jnp.int32),
        )

    def update(g: Any, state: Any, params: Any = None):
        mu, q, failures = state
        p_side = side_of(side, g)
        b = p_side.as_rows(mu + g.astype(mu.dtype))  # Algorithm 1: B
        seen = exact_product(b, q)
        p = bases_of(seen)  # Algorithm 2: P
        # A momentum or factor that is not finite must show: the decomposition did not fail.
        seen_finite, p_finite = (jnp.isfinite(x).all(axis=(-2, -1)) for x in (seen, p))
        failed = (seen_finite & ~p_finite)[..., None, None]
        p = jnp.where(failed, 0, p)
        r = exact_product(b.mT, p)  # R
        inside = jnp.where(failed, b, exact_product(p, r.mT))
        # Squares of numbers near 1: those of small ones would underflow.
        largest = magnitude(r, (-2, -1), keepdims=True)
        near_one = r * to_one(largest)
        squares = jnp.sum(near_one * near_one, axis=-2)
        kept = (significant(squares) | jnp.isnan(squares))[..., None, :]
        unit = near_one / jnp.where(kept, safe_root(squares)[..., None, :], 1)  # Algorithm 1: Q
        direction = p_side.as_rows(exact_product(p, jnp.where(kept, unit, 0).mT)).astype(g.dtype)
        return direction, DionState(
            mu=p_side.as_rows(b - (1 - b1) * inside),  # M
            factor=jnp.where(kept, unit, q),
            failures=failures + failed[..., 0, 0].astype(jnp.int32),
        )

    return each_array("scale_by_dion", init, update)
