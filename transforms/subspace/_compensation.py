r"""Compensations: how `in_subspace` uses the part of a gradient outside the subspace.

For a gradient $G$ `(m, n)`, a basis $U$ `(m, r)`, $\sigma = U^\top G$ and the inner direction
$\Delta$ `(r, n)`, a compensation adds scaled columns of the residual:

$$D = U \Delta + C, \qquad C = (G - \rho\, U \sigma)\, \mathrm{diag}(s)$$

This takes no more matrix products than $U\Delta$ alone, since
$D = U(\Delta - \rho\,\sigma\,\mathrm{diag}(s)) + G\,\mathrm{diag}(s)$.

*Length.* A column with a tiny projection has a scale without bound. "fira" and `channel_scaling`
therefore shorten $C$ to at most $\sqrt{m / r}\,\|\Delta\|$, as if the gradient were as long in each
direction outside the subspace as in each one inside. With Adam inside this is the bound of Adam
itself (`_moment_ratio.py`).

*Numerics.* `C` is not formed for its norm. A residual column is rounding noise, and becomes zero,
if its energy is at most `m · eps` times the gradient's.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._validate import Value, as_value, check_fields, concrete
from ..directions._norm_growth import limited_norm
from ..linalg._numerics import ratio, safe_root


class Parts(NamedTuple):
    """The input of a compensation for a batch of matrices: squared norms, float32 at least."""

    gradient: jax.Array  # of the columns of G (..., n)
    projected: jax.Array  # of the columns of σ (..., n)
    outside: jax.Array  # gradient - projected (..., n), rounding noise set to 0
    residual: jax.Array  # of the columns of G - ρ U σ (..., n)
    inner: jax.Array  # of the columns of Δ (..., n)
    low_rank: jax.Array  # of the matrix U Δ (...)
    codimension: int  # m - r
    rank: int  # r


class Compensation(Value):
    """The type of `compensation=`: what scales the residual's columns."""

    residual: Any  # ρ, 1 for the true residual; None drops U Δ and leaves D = G diag(s)

    @abc.abstractmethod
    def init(self, batch: tuple[int, ...], columns: int, dtype: Any) -> Any:
        """The state for a batch of matrices: a pytree of arrays with the batch axes first."""

    @abc.abstractmethod
    def scales(self, parts: Parts, state: Any) -> tuple[jax.Array, Any]:
        """Computes the scales of the columns, `s (..., n)`, and the new state."""


class OptimalState(NamedTuple):
    energy: jax.Array  # p (..., n)
    norm: jax.Array  # φ (...)


class LimitedState(NamedTuple):
    """State of a compensation that needs only the norm-growth limiter."""

    norm: jax.Array  # φ (...)


def _norm_limited(s: jax.Array, parts: Parts, last: jax.Array, gamma: Any) -> tuple[jax.Array, Any]:
    """The scales after the norm-growth limiter on `C`, and the limited norm."""
    norm = safe_root(jnp.sum(s**2 * parts.residual, axis=-1))
    factor, norm = limited_norm(norm, last, gamma)  # Alg. 3, lines 4-6
    return s * factor[..., None], norm


def _no_longer(s: jax.Array, squares: jax.Array, parts: Parts, limit: Any) -> jax.Array:
    """The scales of columns with these `squares`, shortened to `limit √(m / r) ‖Δ‖`."""
    if concrete(limit) == float("inf"):
        return s
    norm = safe_root(jnp.sum(s**2 * squares, axis=-1))
    whole = safe_root(jnp.sum(parts.inner, axis=-1))
    most = limit * ((parts.codimension + parts.rank) / parts.rank) ** 0.5 * whole
    long = (norm > most) & (norm > 0)
    return s * jnp.where(long, most / jnp.where(long, norm, 1), 1)[..., None]


@dataclasses.dataclass(frozen=True)
class Optimal(Compensation):
    decay: Any = None
    gamma: Any = 1.01
    weight: Any = 0.4

    residual = 1.0

    __post_init__ = check_fields

    def init(self, batch: tuple[int, ...], columns: int, dtype: Any) -> OptimalState:
        return OptimalState(jnp.zeros((*batch, columns), dtype), jnp.zeros(batch, dtype))

    def scales(self, parts: Parts, state: OptimalState) -> tuple[jax.Array, OptimalState]:
        # Alg. 3
        p = self.decay * state.energy + (1 - self.decay) * parts.outside  # line 2
        kept = (p > 0) & (parts.outside != 0)
        s = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, p, 1)), 0)  # line 3
        s = jnp.where(jnp.isfinite(p), s, jnp.nan)  # `in_subspace` starts such a state anew
        s, norm = _norm_limited(s * parts.codimension**0.5, parts, state.norm, self.gamma)
        return self.weight * s, OptimalState(p, norm)


@dataclasses.dataclass(frozen=True)
class Fira(Compensation):
    gamma: Any = 1.01
    weight: Any = 1.0
    residual: Any = 1.0
    limit: Any = 1.0
    to_low_rank: bool = False

    __post_init__ = check_fields

    def init(self, batch: tuple[int, ...], columns: int, dtype: Any) -> LimitedState:
        return LimitedState(jnp.zeros(batch, dtype))

    def scales(self, parts: Parts, state: LimitedState) -> tuple[jax.Array, LimitedState]:
        s = safe_root(ratio(parts.inner, parts.projected))
        s = _no_longer(s, parts.residual, parts, self.limit)
        s, norm = _norm_limited(s, parts, state.norm, self.gamma)
        if self.to_low_rank:
            s = s * ratio(safe_root(parts.low_rank), norm)[..., None]  # section F.7
        return self.weight * s, LimitedState(norm)


@dataclasses.dataclass(frozen=True)
class ChannelScaling(Compensation):
    whole: bool = False
    limit: Any = 1.0

    residual = None

    __post_init__ = check_fields

    def init(self, batch: tuple[int, ...], columns: int, dtype: Any) -> None:
        """No state."""

    def scales(self, parts: Parts, state: None) -> tuple[jax.Array, None]:
        squares = parts.inner, parts.projected
        if self.whole:
            total = lambda x: jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)  # noqa: E731
            squares = map(total, squares)
        s = safe_root(ratio(*squares))  # Gong et al., Alg. 9: S
        return _no_longer(s, parts.gradient, parts, self.limit), None


def optimal(
    decay: jax.typing.ArrayLike | None = None,
    *,
    gamma: jax.typing.ArrayLike = 1.01,
    weight: jax.typing.ArrayLike = 0.4,
) -> Optimal:
    r"""Alice's compensation: divides residual columns by the root of their running energy.

    $p \leftarrow b\,p + (1-b)(1^\top G^2 - 1^\top \sigma^2)$ and $C = w\,\eta \sqrt{m-r}\,(G -
    U\sigma)\, \mathrm{diag}(p)^{-1/2}$ with the norm-growth limiter's η; columns with $p \le 0$
    become 0 (Gong et al., arXiv:2502.07752, Algorithm 3, Theorem 5.1).

    Args:
      decay: decay rate of the energies, which start at 0 and have no bias correction; `None` is
        the `b1` of `alice`, as published, and 0.9 elsewhere.
      gamma: largest growth of ‖C‖ from one step to the next; infinity switches the limiter off.
      weight: w, applied after the limiter: Alice's α_c (0.2 at 1.3B parameters).

    Raises:
      ValueError: naming the argument that is outside its range.
    """
    return Optimal(decay, gamma, weight)


def fira(
    *,
    gamma: jax.typing.ArrayLike = 1.01,
    weight: jax.typing.ArrayLike = 1.0,
    residual: jax.typing.ArrayLike = 1.0,
    limit: jax.typing.ArrayLike = 1.0,
) -> Fira:
    r"""Fira's compensation: scales residual columns as the inner transformation scales columns.

    $C = w\,\eta\,(G - \rho\,U\sigma)\,\mathrm{diag}(\|\Delta_i\| / \|\sigma_i\|)$.

    Args:
      gamma: largest growth of ‖C‖ from one step to the next; infinity switches the limiter off.
      weight: w, applied after the limiter.
      residual: ρ; 1 is the true residual. With GaLore's scale α, the official code is
        `fira(residual=α, weight=1 / α)`.
      limit: largest norm of C, before the limiter, over `√(m/r) ‖Δ‖`; infinity is the paper's form.

    Raises:
      ValueError: naming the argument that is outside its range.
    """
    return Fira(gamma, weight, residual, limit)


def fira_plus(*, weight: jax.typing.ArrayLike = 0.4) -> Fira:
    """Fira's compensation with the norm of the low-rank part: `C ← w C ‖UΔ‖ / ‖C‖`.

    Nothing limits the growth of ‖C‖ (Gong et al., arXiv:2502.07752, section F.7).

    Args:
      weight: w.

    Raises:
      ValueError: naming the argument that is outside its range.
    """
    return Fira(weight=weight, limit=float("inf"), to_low_rank=True)


def channel_scaling(*, whole: bool = False, limit: jax.typing.ArrayLike = 1.0) -> ChannelScaling:
    r"""Apollo's update: scales gradient columns as the inner transformation scales projections.

    $D = G\,\mathrm{diag}(\|\Delta_i\| / \|\sigma_i\|)$, without the low-rank part.

    Args:
      whole: whether to use one scale `‖Δ‖ / ‖σ‖` per matrix (Apollo-mini).
      limit: largest norm of D over `√(m/r) ‖Δ‖`, by shortening; the paper's form is infinity.

    Raises:
      ValueError: naming the argument that is not allowed.
    """
    return ChannelScaling(whole, limit)


COMPENSATIONS = {None: None, "optimal": Optimal(), "fira": Fira(), "fira+": fira_plus()}
"""The plain compensations, by name."""


def as_compensation(value: Any, decay: jax.typing.ArrayLike = 0.9) -> Any:
    """The compensation of this name, or itself; `decay` is that of `optimal()` without one."""
    example = "curvax.subspaces.optimal(weight=0.2)"
    compensation = as_value("compensation", value, Compensation, example, COMPENSATIONS)
    if isinstance(compensation, Optimal) and compensation.decay is None:
        return dataclasses.replace(compensation, decay=decay)
    return compensation
