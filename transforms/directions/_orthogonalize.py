r"""Orthogonalization: replaces each matrix by its polar factor.

$$D = U V^\top \quad\text{for}\quad G = U \Sigma V^\top$$

The values of `curvax.polar` are its methods; `linalg/_polar.py` has their cost and their numerics.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._side import side_of
from .._stacks import each_array
from .._validate import Value, as_value, check_fields, checked
from ..linalg import _polar
from ..linalg._by_products import AxisName
from ..linalg._coefficients import Coefficients, coefficient_rows
from ..linalg._numerics import divided, magnitude, safe_norm, to_one


class PolarMethod(Value):
    """The type of `method=`."""

    can_fail: bool  # whether a finite matrix may have a factor that is not finite
    by_products = False  # whether devices can share the work on a matrix

    @abc.abstractmethod
    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        """Computes the polar factors of `x (..., m, n)`; devices of `axis_name` share the work."""


@dataclasses.dataclass(frozen=True)
class NewtonSchulz(PolarMethod):
    steps: int = 5
    coefficients: Coefficients = "quintic"
    norm: str = "frobenius"
    eps: Any = 1e-8
    dtype: Any = None

    can_fail, by_products = False, True

    def __post_init__(self) -> None:
        check_fields(self)
        coefficient_rows(self.coefficients, self.steps)
        rows = self.coefficients
        if not isinstance(rows, str) and isinstance(rows[0], Sequence) and len(rows) > self.steps:
            raise ValueError(
                f"coefficients must have at most steps={self.steps} rows, got {rows!r}."
            )

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        arguments = self.coefficients, self.steps, self.eps, self.norm, self.dtype, axis_name
        x = _polar.newton_schulz(x, *arguments)
        return x if self.dtype is None else x.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Decomposition(PolarMethod):
    name: str  # of the function `polar_<name>`
    by_products: bool = False

    can_fail = True

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        return getattr(_polar, f"polar_{self.name}")(x, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class Balanced(PolarMethod):
    method: PolarMethod
    rounds: int = 2
    beta: Any = 0.5

    __post_init__ = check_fields

    @property
    def can_fail(self) -> bool:
        return self.method.can_fail

    @property
    def by_products(self) -> bool:
        return self.method.by_products

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        m, n = x.shape[-2:]
        if m == n:
            return self.method.factor(x, axis_name)
        axis = side_of("larger", x).other_axis
        work = x.astype(np.promote_types(x.dtype, np.float32))
        largest = magnitude(work, (-2, -1), keepdims=True)
        work = work * to_one(largest)
        scale = divided(1, safe_norm(work, axis=axis, keepdims=True))
        factor = self.method.factor((scale * work).astype(x.dtype), axis_name)
        for _ in range(self.rounds - 1):
            square = jnp.sum(factor.astype(work.dtype) ** 2, axis=axis, keepdims=True)
            scale = scale * (min(m, n) / max(m, n) * divided(1, square)) ** self.beta
            factor = self.method.factor((scale * work).astype(x.dtype), axis_name)
        return factor


def newton_schulz(
    steps: int = 5,
    *,
    coefficients: Coefficients = "quintic",
    norm: str = "frobenius",
    eps: jax.typing.ArrayLike = 1e-8,
    dtype: jax.typing.DTypeLike | None = None,
) -> NewtonSchulz:
    """Approximates the polar factor by Newton-Schulz iterations, with matrix products only.

    Args:
      steps: number of iterations.
      coefficients: "quintic" (Muon's), "classical", "polar_express", "turbo_muon" (for `norm="aol"`
        and 4 steps), "deepseek_v4" (for 10 steps), three numbers, or a row of three per iteration
        (the last one repeats), such as `curvax.polar_express(5)`.
      norm: the norm that divides the matrix: "frobenius", "gram" or "aol" (Turbo-Muon), see
        `curvax.newton_schulz`.
      eps: added to this norm.
      dtype: dtype of the iterations and of the direction, such as bfloat16, in which devices then
        also exchange it (`mesh=`); `None` is that of the matrix.

    Raises:
      ValueError: if an argument is not allowed; the message names it.

    Example:
      >>> import curvax
      >>> turbo = curvax.polar.newton_schulz(4, coefficients="turbo_muon", norm="aol")
      >>> optimizer = curvax.muon(0.02, method=turbo)
    """
    return NewtonSchulz(steps, coefficients, norm, eps, dtype)


def svd() -> Decomposition:
    """Computes the polar factor by an SVD; zero singular values stay zero."""
    return Decomposition("svd")


def qr_svd() -> Decomposition:
    """Like `svd`, after a QR decomposition down to the smaller order: for long matrices."""
    return Decomposition("qr_svd")


def qdwh() -> Decomposition:
    """Computes the polar factor of a matrix of full rank by QDWH iteration."""
    return Decomposition("qdwh", by_products=True)


PLAIN = {"newton_schulz": NewtonSchulz(), "svd": svd(), "qr_svd": qr_svd(), "qdwh": qdwh()}
CONVERGING = NewtonSchulz(12, "classical")
POLAR_METHODS: dict[str, PolarMethod] = {**PLAIN, "balanced": Balanced(CONVERGING)}
"""The values without arguments, by name."""


def balanced(
    method: str | PolarMethod = CONVERGING, *, rounds: int = 2, beta: jax.typing.ArrayLike = 0.5
) -> Balanced:
    r"""Scales the longer side of a matrix, so that all of it takes part in the polar factor.

    For the rows :math:`x_i` of a tall matrix :math:`X` (of a wide one the columns), Aurora computes

    .. math::

        U = \operatorname{polar}(D X), \quad D = \operatorname{diag}(\|x_i\|^{-1}), \qquad
        D_i \leftarrow D_i \left(\tfrac{n}{m} / \|u_i\|^2\right)^\beta, \quad
        U = \operatorname{polar}(D X)

    with the second part in each further round. Rows of :math:`U` come closer to the same length
    :math:`\sqrt{n/m}`; they have it in the limit of many rounds (after two they differ by 3 to 38
    %). Square matrices have their plain polar factor. Zero rows stay zero. A round costs a factor.

    Args:
      method: how polar factors are computed: a name, or another value of `curvax.polar`; by default
        the source's `newton_schulz(12, coefficients="classical")`, which converges.
      rounds: number of polar factors. One is the polar factor of normalized rows.
      beta: β, above 0.

    Raises:
      ValueError: if an argument is not allowed; the message names it.

    Example:
      >>> import curvax
      >>> optimizer = curvax.muon(0.02, method=curvax.polar.balanced())

    References:
      `Aurora <https://github.com/tilde-research/aurora-release>`_, 2026.
    """
    example = "curvax.polar.newton_schulz(12, coefficients='classical')"
    return Balanced(as_value("method", method, PolarMethod, example, PLAIN), rounds, beta)


class OrthogonalizeState(NamedTuple):
    failures: jax.Array  # failed decompositions, whose directions were zero, int32 (...)


@checked
def orthogonalize(
    method: str | PolarMethod = "newton_schulz", *, adaptive: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Replaces each matrix `(..., m, n)` by its polar factor `U Vᵀ`.

    Args:
      method: "newton_schulz" (approximate, matrix products only), "svd" (exact; zero singular
        values stay zero), "qr_svd" (the same after a QR down to the smaller order, for long
        matrices), "qdwh" (exact for full rank) or "balanced" (Aurora's); or a value of
        `curvax.polar`, such as `polar.newton_schulz(steps=3)`.
      adaptive: whether to multiply the factor by its inner product with the matrix: the sum of the
        singular values, up to the error of the factor (Bernstein and Newhouse, arXiv:2409.20325).

    Returns:
      A transformation. With "newton_schulz" it is stateless. With the other methods the state
      counts failed decompositions, whose directions are zero. Its `update` takes `shared_axis=`:
      the axis or axes of an enclosing `shard_map` whose devices have the same matrices and divide
      the products of each, as with `axis_name=` of `newton_schulz`.

    Raises:
      ValueError: if an argument is not allowed, or if a leaf is not a matrix.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> transform = curvax.orthogonalize("svd")
      >>> grads = jnp.diag(jnp.array([3.0, 0.5]))
      >>> transform.update(grads, transform.init(grads))[0].round(3).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    example = "curvax.polar.newton_schulz(steps=3)"
    polar: PolarMethod = as_value("method", method, PolarMethod, example, POLAR_METHODS)

    def init(p: Any) -> Any:
        if not polar.can_fail:
            return optax.EmptyState()
        return OrthogonalizeState(jnp.zeros(p.shape[:-2], jnp.int32))

    def update(
        x: Any, state: Any, params: Any = None, *, shared_axis: AxisName = None, **others: Any
    ):
        factor = polar.factor(x, shared_axis)
        if polar.can_fail:
            # A matrix that is not finite is not the decomposition's failure: it stays NaN.
            x_finite, factor_finite = (jnp.isfinite(a).all(axis=(-2, -1)) for a in (x, factor))
            failed = x_finite & ~factor_finite
            factor = jnp.where(failed[..., None, None], 0, factor)
            state = OrthogonalizeState(state.failures + failed.astype(jnp.int32))
        if adaptive:
            factor = jnp.sum(x * factor, axis=(-2, -1), keepdims=True) * factor
        return factor, state

    work = "products" if polar.by_products else "decompositions"
    each = each_array("orthogonalize", init, update, work=work)
    return optax.GradientTransformationExtraArgs(*each)


@checked
def scale_by_shape(
    consistent_rms: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformation:
    r"""Scales matrices by a factor of their shape, so that orthogonal ones become comparable.

    Args:
      consistent_rms: `None` scales by $\sqrt{\max(1, n/m)}$ (Jordan et al.). A number `c` scales by
        $c\sqrt{\max(m, n)}$, which gives an orthogonal direction the root mean square `c` (Liu et
        al., arXiv:2502.16982; 0.2 matches AdamW's).

    Returns:
      A stateless transformation.
    """

    def scaled(x: jax.Array) -> jax.Array:
        m, n = x.shape[-2:]
        if consistent_rms is None:
            factor = math.sqrt(max(1.0, n / m))
            return x if factor == 1.0 else x * factor
        return x * jnp.asarray(math.sqrt(max(m, n)) * consistent_rms, x.dtype)

    return optax.stateless(lambda updates, params: jax.tree.map(scaled, updates))
