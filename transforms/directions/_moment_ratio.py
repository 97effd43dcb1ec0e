r"""Adam's direction as papers print it: without bias correction, and safe without epsilon.

$$M \leftarrow b_1 M + (1-b_1) G, \qquad v \leftarrow b_2 v + (1-b_2) G^2, \qquad
D = M / (\sqrt v + \epsilon)$$

*Division.* In a rotated space many entries of $G$ are rounding noise, and $M / \sqrt v$ would raise
them to ±1. An entry gives 0 if $\sqrt v \le 64 \sqrt{\max(m, n)}\,\mathrm{eps}\,\max \sqrt v$,
with the maximum over its matrix, or if $v = 0$. Most noise is that of eigenvectors: in SOAP's first
step on random matrices up to 17 eps for order 6, 298 for 32 and 429 for 128. In a subspace
`in_subspace` has removed it, and only `v = 0` gives 0. *Cost*: `10 mn` FLOPs.

*Bound.* By the Cauchy-Schwarz inequality, for $b_1^2 < b_2$ and averages that start at zero,

$$|M| = (1-b_1) \Big|\sum_k b_1^k G_{t-k}\Big| \le
(1-b_1) \sqrt{\sum_k \frac{(b_1^2 / b_2)^k}{1-b_2}}\; \sqrt v \le
\frac{1-b_1}{\sqrt{(1-b_2)(1-b_1^2/b_2)}}\; \sqrt v$$

It is 1 for $b_1 = b_2$, and 7.3 for Adam's 0.9 and 0.999. Bias correction does not raise it: the
bound of weighted means grows with $t$ to the same number. It holds as long as $M$ and $v$ stay in
the coordinates in which they were averaged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._counts import next_step
from .._stacks import each_array
from .._validate import checked
from ..linalg._numerics import magnitude, safe_root

TINY = float(np.finfo(np.float32).tiny)
"""Less than half a unit of each square from 1e-15 on, whose root is nothing beside Adam's ε."""


class MomentRatioState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    mu: Any  # M (..., m, n), float32 at least without `dtype`
    nu: Any  # v (..., m, n), float32 at least

    first_moments = ("mu",)
    second_moments = ("nu",)


@checked
def moment_ratio(
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 0.0,
    *,
    bias_correction: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces matrices by the ratio of their first moment to the root of their second.

    Args:
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the root of the second moment.
      bias_correction: whether to divide the moments by `1 - b1^t` and `1 - b2^t`.
      dtype: dtype of the stored first moment; `None` is that of the parameters, at least float32.

    Returns:
      A transformation on batches of matrices `(..., m, n)`. An entry gives 0 if its second moment
      has a root of at most `64 √max(m, n) eps` times the largest one of its matrix. Its `update`
      takes another limit as `noise=`, as `in_subspace` gives it.

    Raises:
      ValueError: naming the argument that is outside its range.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> ratio = curvax.moment_ratio(0.5, 0.75)
      >>> g = jnp.array([[2.0, -4.0], [0.0, 1e-12]])
      >>> ratio.update(g, ratio.init(g))[0].tolist()
      [[1.0, -1.0], [0.0, 0.0]]
    """

    def init(x: Any) -> MomentRatioState:
        v = jnp.zeros(x.shape, np.promote_types(x.dtype, np.float32))
        return MomentRatioState(jnp.zeros([], jnp.int32), jnp.zeros(x.shape, dtype or v.dtype), v)

    def update(
        g: Any, state: Any, params: Any = None, *, noise: float | None = None, **others: Any
    ):
        count, v = next_step(state.count), state.nu
        work = g.astype(v.dtype)
        m = b1 * state.mu.astype(v.dtype) + (1 - b1) * work  # Gong et al., Alg. 4, line 13
        v = b2 * v + (1 - b2) * work**2  # line 14
        first, second = m, v
        if bias_correction:
            steps = count.astype(v.dtype)
            first, second = m / (1 - b1**steps), v / (1 - b2**steps)
        direction = ratio(first, second, eps, noise).astype(g.dtype)  # line 15
        return direction, MomentRatioState(count, m.astype(state.mu.dtype), v)

    each = each_array("moment_ratio", init, update, work=None)
    return optax.GradientTransformationExtraArgs(*each)


def adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
    """Optax's Adam, whose updates have a derivative of 0 at gradients of 0."""
    return optax.scale_by_adam(b1, b2, eps, eps_root=TINY)  # pyright: ignore[reportArgumentType]


def largest_ratio(
    b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike, period: Any = 2, *, whitened: bool = False
) -> Any:
    """The bound on `|M| / √v`; see the module docstring. Infinite if `b1² >= b2`.

    It is infinite if a basis has a `period` of 1: there a turned moment is divided by a variance of
    the other basis at every step. `whitened`: that of `kronecker/_whitened.py`, of `momentum(b1)`
    divided by the roots of eigenvalues that are averaged with `b2`.
    """
    xp = jnp if any(isinstance(x, Tracer) for x in (b1, b2, period)) else np
    rest: Any = (b2**2 if whitened else b2) - b1**2
    square: Any = (1 - b1) ** 2 * b2 / ((1 - b2) * xp.where(rest > 0, rest, 1))
    return xp.where((rest > 0) & (period > 1), square**0.5, xp.inf)


def ratio(
    m: jax.Array, v: jax.Array, eps: jax.typing.ArrayLike = 0.0, noise: float | None = None
) -> jax.Array:
    """`m / (√v + eps)` of matrices `(..., m, n)`; 0 where `√v` is up to `noise` times the largest.

    By default that is the noise of eigenvectors. A `v` that is not finite gives a matrix of NaN.
    """
    root = safe_root(v)
    # The root of the maximum: with the maximum of the roots, XLA would write out all roots.
    largest = jnp.sqrt(magnitude(v, (-2, -1), keepdims=True))
    of_vectors = 64 * max(v.shape[-2:]) ** 0.5 * float(jnp.finfo(v.dtype).eps)
    significant = root > (of_vectors if noise is None else noise) * largest
    nothing = jnp.where(jnp.isfinite(largest), 0, jnp.nan).astype(m.dtype)
    return jnp.where(significant, m / jnp.where(significant, root + eps, 1), nothing)
