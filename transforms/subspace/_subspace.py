r"""Transformations that run on gradients projected to low-rank subspaces.

For a gradient $G$ `(m, n)`, the basis $U$ `(m, r)` of its rows at the last refresh, and any $f$,

$$\sigma = U^\top G, \qquad \Delta = f(\sigma), \qquad D = U \Delta + C$$

with a compensation $C$ of the residual outside the subspace (`_compensation.py`), or $C = 0$. The
right side is the transpose: $U$ `(n, r)`, $\sigma = G U$ `(m, r)`. Before the first refresh $U$ is
the first `r` columns of the identity. A refresh precedes the projection of its step.

*Tracking.* $\tilde Q \leftarrow b_3 \tilde Q + (1-b_3)\,\sigma\sigma^\top$ `(r, r)` accumulates the
energies within the subspace for the next basis (`_bases.py`). A rule (`_carry.py`) carries the
*moments* of $f$ over to a new basis, and $\tilde Q$ as a first moment on both sides.

*Numerics.* Everything in float32 at least, bases in `Precision.HIGHEST`. A gradient counts as zero,
and `skipped` counts it, if the sum of squares of its projection is not finite. A basis that is not
finite, or of a gradient of zeros, is rejected: the last one stays, and `rejected` counts it. A
matrix without a first basis tries again at every step. If a basis in use, a direction inside the
subspace or a scale outside is not finite, the state is damaged: the matrix does not move, and its
state starts anew at the next step (`restarted`). A damaged tracked moment starts anew at a refresh.

*Bases and moments in bfloat16* are widened in each step, which rounds new bases to the nearest, and
moments up or down at random (`weights/_rounding.py`): rounded to the nearest, an average with a
decay rate above 0.996 would stop. The random bits depend on the key of the matrix, the step and the
place, so that a restart repeats them.

*Random draws* of a refresh use the key `fold_in(key, refreshes)` of its matrix. *Cost*: `4mnr`
FLOPs between refreshes, `2r²n` more with tracking, one more pass over `G` with a compensation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._carry import Carry, Moments, check_moments, keep, put_moments, take_moments
from .._counts import next_step
from .._guard import restarted
from .._stacks import check_directions, each_array, key_for, matrix_keys, matrix_names, projected
from .._trees import widened
from .._validate import check_transformation, check_value, checked, concrete
from ..refresh._due import phases_of
from ..refresh._policy import RefreshPolicy, check_refresh
from ..weights._rounding import random_bits, stochastic
from ._bases import BasisFinder, Switched, check_finder
from ._compensation import Compensation, as_compensation
from ._rule import Subspace, SubspaceRule


class SubspaceState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    subspace: Subspace
    inner: Any  # state of the inner transformation, for the projected matrices


@checked
def in_subspace(
    inner: optax.GradientTransformation,
    rank: int,
    *,
    basis: BasisFinder,
    refresh: RefreshPolicy,
    carry: Carry | None = None,
    compensation: str | Compensation | None = None,
    b3: jax.typing.ArrayLike | None = None,
    side: str = "smaller",
    clamp_rank: bool = True,
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Runs a transformation on gradients projected to a subspace of rank `rank`.

    Args:
      inner: a transformation of the projected matrices, such as `optax.scale_by_adam()`, without
        parameters. One that takes the norm of a tree would mix matrices.
      rank: dimension of the subspaces.
      basis: the basis finder, a value of `curvax.subspaces`, such as `svd()`.
      refresh: policy for the bases: `every(k)`, `policies.below_norm(threshold)`, or your own.
      carry: how moments follow a basis: `subspaces.keep()` (the default), `rotate()` or `reset()`.
      compensation: how the residual of the gradient is used: `None` (not at all), "optimal",
        "fira", "fira+", or a value such as `subspaces.optimal(weight=0.2)`.
      b3: decay rate of the energies within the subspace, which are tracked for the next basis;
        `None` does not track them. A basis that is drawn without the gradient needs `None`.
      side: the projected side: "smaller" or "larger" of the two orders (left if they are equal),
        "left" (rows), "right" (columns), or "std" (the smaller, right if they are equal).
      clamp_rank: `True` clamps the rank to `min(m, n)`, and `leading` to the nearest value that a
        switched basis allows; `summarize` shows it. `False` makes both an error.
      seed: seed of all random draws, of bases and of rounding to bfloat16; 0 where there are none.
      dtype: of the stored bases and of the moments that `inner`'s state declares:
        "bfloat16", "float32", or `None`: float32 at least.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: naming an argument outside its range, or a leaf that is not a matrix.

    Example:
      >>> import curvax, optax
      >>> low_rank_lion = curvax.in_subspace(
      ...     optax.scale_by_lion(),
      ...     128,
      ...     basis=curvax.subspaces.randomized(),
      ...     refresh=curvax.every(200),
      ...     carry=curvax.subspaces.rotate(),
      ... )
    """
    check_transformation("inner", inner)
    transform: Any = optax.with_extra_args_support(inner)
    carry = keep() if carry is None else carry
    check_finder("basis", basis)
    check_refresh(refresh, ("projection",))
    used: Compensation | None = as_compensation(compensation)
    check_value("carry", carry, Carry, "a value such as curvax.subspaces.rotate()")
    if b3 is not None and basis.random:
        raise ValueError(
            "b3 must be None with a basis that is drawn without the gradient (basis=, or "
            f"switching= of alice); got b3={b3!r} and {basis!r}."
        )
    stored = None if dtype is None else jnp.dtype(dtype)
    if stored not in (None, jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be 'bfloat16', 'float32' or None, got {dtype!r}.")
    if not basis.kept and carry.needs_names:
        raise ValueError(
            "basis is drawn anew at each step, so carry must be curvax.subspaces.keep(); got "
            f"basis={basis!r}, carry={carry!r}."
        )
    if concrete(seed) and not basis.draws and stored != jnp.bfloat16:
        raise ValueError(
            "seed must be 0 with a basis that draws no random numbers (basis= or switching=), "
            f"unless dtype is 'bfloat16'; got seed={seed!r} and {basis!r}."
        )
    rule = SubspaceRule(rank, basis, carry, used, b3, side, stored)

    def init(x: Any) -> SubspaceState:
        if not clamp_rank:
            _check_rank(x, rank, basis, rule.orders)
        with projected(rule.projected_shape, x):
            wide = np.promote_types(x.dtype, np.float32)
            like = jnp.zeros(rule.projected_shape(x), wide)
            inner_state = inner.init(like)
            check_directions("in_subspace", inner, like, inner_state)
        if carry.needs_names:
            check_moments(inner_state, like)
        (phase,) = phases_of(x, refresh.schedule, [rule.refreshing])
        subspace = rule.start(x, matrix_keys(x, seed), phase)
        return _narrow(stored, SubspaceState(jnp.zeros([], jnp.int32), subspace, inner_state))

    def update(g: Any, state: Any, params: Any = None):
        like = g if params is None else params
        before = restarted(init, {"": state}, {"": like}, "subspace.counts")[""]
        state = _widen(stored, before)
        count = next_step(state.count)
        subspace, inner_state = rule.refreshed(g, state, refresh, count)
        wide = widened(g)
        if used is not None and wide.dtype != g.dtype:  # XLA would convert it again for each use
            wide = jax.lax.optimization_barrier(wide)
        u = rule.basis_in_use(wide, subspace)
        projected = rule.project(wide, u, subspace)
        # σ has no noise: `moment_ratio` need not look for it.
        moved, inner_state = transform.update(projected.sigma, inner_state, None, noise=0.0)
        direction, subspace = rule.combined(projected, subspace, moved)
        new = SubspaceState(count, subspace, inner_state)
        return direction.astype(g.dtype), _narrow(stored, new)

    return each_array("in_subspace", init, update)


def _check_rank(x: Any, asked: int, basis: BasisFinder, orders: Any) -> None:
    """Requires the matrices of `x` to allow the rank, and the `leading` of a switched basis."""
    advice = "clamp_rank=True takes the nearest allowed value."
    rows, _, rank = orders(x)
    m, n = x.shape[-2:]
    where = f"for the parameter {matrix_names(x)[0][0]!r}, whose matrices are {m}×{n}"
    if rank < asked:
        raise ValueError(f"rank must be at most {rank} {where}; got {asked}. {advice}")
    if isinstance(basis, Switched) and basis.stay(rank, rows) != basis.leading:
        raise ValueError(
            f"leading must be {basis.stay(rank, rows)} {where} and switched at rank {rank}; "
            f"got {basis.leading}. {advice}"
        )


def _widen(dtype: Any, state: Any) -> Any:
    """The state with basis and moments in float32 at least."""
    if dtype is None:
        return state
    return _with_moments(state, *widened((state.subspace.basis, take_moments(state.inner))))


def _narrow(dtype: Any, state: Any) -> Any:
    """The state with basis and moments in this dtype; moments in bfloat16 are rounded at random."""
    if dtype is None:
        return state
    basis, moments = state.subspace.basis, take_moments(state.inner)
    if dtype == jnp.bfloat16:
        moments = _rounded(moments, state)
    return _with_moments(state, *jax.tree.map(lambda x: x.astype(dtype), (basis, moments)))


def _with_moments(state: Any, basis: Any, moments: Moments) -> Any:
    subspace = state.subspace._replace(basis=basis)
    return state._replace(subspace=subspace, inner=put_moments(state.inner, moments))


def _rounded(moments: Moments, state: Any) -> Any:
    """Moments `(..., r, n)`, rounded to bfloat16 up or down at random."""

    def of_one(key: jax.Array, moments: Moments) -> Any:
        xs, treedef = jax.tree.flatten(moments)
        words = jax.random.key_data(key_for(key, state.count))
        bits = [random_bits(words + jnp.uint32(i), None, x.shape) for i, x in enumerate(xs)]
        return treedef.unflatten(map(stochastic, xs, bits))

    for _ in state.subspace.key.shape[:-1]:
        of_one = jax.vmap(of_one)
    return of_one(state.subspace.key, jax.tree.map(lambda x: x.astype(jnp.float32), moments))
