r"""Kronecker-factored preconditioning: statistics, inverse roots, and their application.

For a gradient $G$ `(m, n)` and the matrix $M$ that is preconditioned ($G$ itself or its momentum):

$$L \leftarrow b_2 L + (1-b_2)\, S S^\top, \quad R \leftarrow b_2 R + (1-b_2)\, S^\top S, \quad
D = (L + \epsilon I)^{-1/p}\, M\, (R + \epsilon I)^{-1/p}$$

where $S$ is $G$ or $M$, or $G$ whitened by the other side's root (`_whitened.py`), and either
factor may be absent. Before the first refresh a root is the identity.

*Two forms* (`_roots.py`). By default statistics, momenta and gradients are in eigenbases, and the
eigenvalues of roots multiply them there: a refresh is a turn of the bases. Or roots are stored
beside statistics in the gradient's own coordinates (`eigenbases.stored_roots`).

*Numerics.* `curvax.products` has the precision of each product. Damped eigenvalues that are
rounding noise count as the floor of `linalg/_inverse_root.py`; in bases of both sides `_roots.py`
keeps noise out of directions. An all-zero statistic has no root: `ε^(-1/p) I` would be far too
large for the next gradients. Damage and cost: `_factor.py`.

*Bound.* A root that contains the gradient, $L \succeq (1-b_2) G G^\top$, gives $\|L^{-1/2} G\|_2$
and $\|L^{-1/4} G R^{-1/4}\|_2$ of at most $(1-b_2)^{-1/2}$ (1 for sums), so that $\|D\|_F \le
\sqrt{\min(m, n) / (1-b_2)}$. With a momentum on one side the Cauchy-Schwarz inequality of
`_moment_ratio.py` holds for matrices: $\|D\|_F \le C \sqrt{\min(m, n)}$. Older roots have no such
bound (only $\epsilon^{-s/p} \|M\|$), unless `limit` shortens directions to the first.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._carry import check_moments
from .._counts import next_step
from .._side import Side, sides_of
from .._stacks import check_directions, each_array
from .._validate import Number, OneOf, as_value, checked, concrete
from ..linalg._inverse_root import check_root_arguments
from ..linalg._loops import at_most_once
from ..linalg._numerics import shortened
from ..linalg._products import Products, as_products
from ..refresh._methods import ROOT_METHODS, BasisMethod, RefreshMethod, StoredRoots, check_steps
from ..refresh._policy import RefreshPolicy, check_refresh
from ..storage._storage import Storage, as_storage
from ._factor import Factor, Pair
from ._roots import BasisRootRule, InverseRoots, StoredRootRule


class PreconditionState(NamedTuple):
    """State of `precondition`."""

    count: jax.Array  # t, int32 scalar
    left: Factor | None
    right: Factor | None
    momentum: Any  # state of the transformation that computes M


@checked
def precondition(
    momentum: optax.GradientTransformation | None = None,
    *,
    refresh: RefreshPolicy,
    side: str = "both",
    root: int = 4,
    b2: jax.typing.ArrayLike | None = 0.95,
    bias_correction: bool = False,
    eps: jax.typing.ArrayLike = 1e-6,
    damping_mode: str = "absolute",
    method: str | RefreshMethod | None = None,
    initial: jax.typing.ArrayLike = 0.0,
    statistics: str = "gradient",
    statistics_every: int = 1,
    warmup_steps: int = 0,
    storage: Storage | None = None,
    products: str | Products | None = None,
    limit: bool = False,
) -> optax.GradientTransformation:
    """Preconditions matrices by inverse roots of their Kronecker factors.

    Args:
      momentum: transformation that computes `M` from the gradient; with `None`, `M = G`. It gets no
        parameters. In eigenbases it is element-wise, and declares its moments, as `momentum` does.
      refresh: policy for the roots: `every(10)`, `policies.foam()`,
        `policies.diagonal_residual()`, or your own.
      side: "both", "left", "right", or "smaller": only the factor of smaller order, the left one of
        square matrices.
      root: p; roots are inverse p-th roots.
      b2: decay rate of the statistics; `None` sums them.
      bias_correction: whether statistics are weighted means, as if divided by `1 - b2^t`, in which
        `initial` has no part.
      eps: damping. With 0, the root is on the factor's range only.
      damping_mode: "absolute"; "relative": `eps` times the largest eigenvalue, which
        "products" and "coupled_newton" estimate from below (`inverse_root`); "floor": raises
        eigenvalues to at least `eps`; or "outside": added to `L^(1/p)` instead of `L`.
      method: how a refresh renews roots: in eigenbases, as `in_eigenbasis` has it (the default); or
        stored, by "products" (p = 2, 4, 8, …), "coupled_newton" (p a power of 2), "newton_schulz"
        (p = 2) or `eigenbases.stored_roots()`, which is `eigh` (see `inverse_root`): for rare
        refreshes, because a step has a product less for each side.
      initial: the statistics start at this multiple of the identity; for 0 with "kl" see
        `_whitened.py`.
      statistics: S, "gradient", "momentum", or "kl": the gradient whitened by the other side's
        root (KL-Shampoo), which needs p = 2 and `b2`.
      statistics_every: T1; the statistics are updated when `t mod T1 = 0`.
      warmup_steps: number of first steps that only accumulate statistics. Their direction is 0, and
        the refreshes count from their end.
      storage: how factors, bases and roots are stored; `dense()` by default.
      products: the precision of products: "float32", "bf16x6", "bf16x3" or "bf16" for all of them,
        or `curvax.products`, which says what `None` is.
      limit: whether to shorten directions to the bound of the module docstring, or with "kl" of
        `_whitened.py`; without "kl" it needs p = 4 with both factors, p = 2 with one.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if an argument is outside its range or a leaf is not a matrix; the message
        names it.
    """
    example = "curvax.eigenbases.rotations(8)"
    by = as_value("method", method, RefreshMethod, example, ROOT_METHODS)
    roots = InverseRoots(root, eps, damping_mode, 2 if side == "both" else 1)
    whiten = statistics == "kl"
    _check_statistics(momentum, statistics, b2, bias_correction, initial)
    _check_root(by, roots, limit, side, whiten)
    _check_policy(refresh, eps, damping_mode, by)
    common = as_storage(storage), as_products(products), refresh, by, b2, initial
    of_bases = isinstance(by, BasisMethod)
    rule = BasisRootRule(*common, roots) if of_bases else StoredRootRule(*common, roots)
    average: Any = optax.identity() if momentum is None else momentum
    sides = functools.partial(sides_of, side)

    def init(x: Any) -> PreconditionState:
        momentum_state = average.init(x)
        check_directions("precondition, for its momentum", average, x, momentum_state)
        if of_bases:
            check_moments(momentum_state, x)
        factors = rule.started(x, sides)
        return PreconditionState(jnp.zeros([], jnp.int32), *factors, momentum_state)

    def update(g: Any, state: Any, params: Any = None):
        count, factors = next_step(state.count), (state.left, state.right)
        m = x = rule.entered(g, factors, count)
        momentum_state = state.momentum
        if momentum is not None:
            m, momentum_state = average.update(x.astype(g.dtype), momentum_state)  # ASGO, line 6
        factors = accumulated(m if statistics == "momentum" else x, factors, count)
        since = count - warmup_steps
        factors, momentum_state, (m,) = rule.refreshed_with(g, factors, momentum_state, since, m)
        direction = rule.directed(m, factors, count).astype(g.dtype)
        if limit:
            direction = _limited(direction, factors, b2, whiten)
        if warmup_steps:
            direction = jnp.where(count > warmup_steps, direction, 0)
        return direction, PreconditionState(count, *factors, momentum_state)

    def accumulated(s: jax.Array, factors: Pair, count: jax.Array) -> Pair:
        """Both sides with new statistics of `s`, if they are due."""
        averaging = rule
        if bias_correction:
            # With this decay rate the average of so many terms is a weighted mean of them.
            number: Any = jnp.maximum(count // statistics_every, 1)
            decay: Any = b2 * (1 - b2 ** (number - 1)) / (1 - b2**number)
            averaging = dataclasses.replace(rule, b2=decay)

        def accumulate(s: Any, factors: Any) -> Any:
            sources, start = (s, s), None
            if whiten:
                sources, start, factors = rule.whitened(s, factors, count)
            return averaging.accumulated(factors, sources, count, start)

        if statistics_every == 1:
            return accumulate(s, factors)
        due = count % statistics_every == 0  # Shampoo, line 3
        return at_most_once(accumulate, due, s, factors)

    return each_array("precondition", init, update)


def _limited(direction: jax.Array, factors: Pair, b2: Any, whiten: bool) -> jax.Array:
    """Directions, shortened to the bound where a factor has a root."""
    square: Any = min(direction.shape[-2:]) / (1.0 if b2 is None else 1 - b2)
    if whiten:
        sides = [side for side, factor in zip(Side, factors, strict=True) if factor is not None]
        square = square * min(side.other.order(direction) for side in sides)
        square = jnp.inf if concrete(b2) == 0 else square / b2
    longest = square**0.5
    refreshes = sum(factor.refreshes for factor in factors if factor is not None)
    return shortened(direction, jnp.where(jnp.asarray(refreshes) > 0, longest, jnp.inf))


def _check_statistics(
    momentum: Any, statistics: str, b2: Any, bias_correction: bool, initial: Any
) -> None:
    """Requires what the statistics take, and a momentum that is a transformation."""
    if momentum is None and statistics == "momentum":
        raise ValueError(
            "statistics must be 'gradient' without a momentum (b1= of shampoo), got 'momentum'."
        )
    if not isinstance(momentum, optax.GradientTransformation | None):
        raise ValueError(f"momentum must be an Optax transformation or None, got {momentum!r}.")
    whiten = statistics == "kl"
    for name, used in (("bias_correction=True", bias_correction), ("statistics='kl'", whiten)):
        if used and b2 is None:
            raise ValueError(f"b2 must be a decay rate with {name}, got None.")
    if bias_correction and not whiten and concrete(initial) not in (None, 0):
        raise ValueError(
            f"initial must be 0 with bias_correction=True, where it has no part; got {initial!r}."
        )


def _check_root(
    method: RefreshMethod, roots: InverseRoots, limit: bool, side: str, whiten: bool
) -> None:
    """Requires a root that the method can take, and that the other arguments allow."""
    root, sided = roots.root, roots.sides
    if isinstance(method, StoredRoots):
        check_root_arguments(root, method.method, roots.damping_mode)
    if whiten and concrete(root) is not None:
        OneOf((2,)).check("root (with statistics='kl')", root)
    elif limit and not whiten and concrete(root) not in (None, 2 * sided):
        raise ValueError(f"root must be {2 * sided} for side={side!r} with limit, got {root!r}.")


def _check_policy(
    refresh: Any, eps: jax.typing.ArrayLike, damping_mode: str, method: RefreshMethod
) -> None:
    """Requires a refresh policy that fits the other arguments."""
    check_refresh(refresh, ("eigenpairs", "damping"))
    check_steps(method, refresh)
    if refresh.examines is None:
        return
    if isinstance(method, StoredRoots):
        raise ValueError(
            "method must be None, 'eigh', 'qr' or 'rotations' with a refresh policy that examines "
            f"eigenbases; got method={method!r}, refresh={refresh!r}."
        )
    most = refresh.max_damping if refresh.examines == "damping" else float("inf")
    most = float("inf") if isinstance(most, Tracer) else float(most)
    if damping_mode != "absolute":
        raise ValueError(
            "damping_mode must be 'absolute' with this refresh policy, and eps in "
            f"(0, {most:g}), such as {min(most / 100, 1e-9):g}; got "
            f"damping_mode={damping_mode!r} and eps={eps!r}."
        )
    Number(f"(0, {most})").check("eps (with this refresh policy)", eps)
