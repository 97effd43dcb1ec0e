r"""Element-wise transformations in the eigenbases of the gradients' second moments.

For a gradient $G$ `(m, n)`, on both sides or one of them:

$$L \leftarrow b_3 L + (1-b_3)\, G G^\top, \quad R \leftarrow b_3 R + (1-b_3)\, G^\top G, \qquad
D = U_L\, f(U_L^\top G\, U_R)\, U_R^\top$$

with the eigenvectors $U$ of $L$ and $R$ at their last refresh, by descending eigenvalue, and any
element-wise transformation $f$; with Adam this is SOAP. Before the first refresh a basis is the
identity. At a refresh, the step's gradient enters the statistic first, and the step already uses
the new basis.

The statistics may be those of whitened gradients (`_whitened.py`), which also keeps the eigenvalues
$\lambda$ and $\mu$ of both sides current. Then $f$ may be followed by a division by
$\sqrt{\lambda_i \mu_j}$; with momentum for $f$ this is KL-Shampoo.

*Moments.* $f$ keeps its moments in the rotated space. When a basis changes, first moments rotate
with it, by $U_{new}^\top U_{old}$; this is the same as keeping them in the original space. Second
moments do not rotate like tensors and stay as they are; if a refresh by QR reorders columns, they
are reordered alike, and so are eigenvalues. Fields of moments are recognized by name (`_carry.py`).

*Bound.* With both kinds of moments in one basis, $f$ keeps the bound of `_moment_ratio.py`. A
refresh breaks it, because an entry may get a moment from one place and a variance from another.
`limit` keeps it per matrix, also where 4 bits leave a basis that is not orthonormal.

*Numerics.* Statistics and bases in float32 at least. If a statistic or new basis is not finite, the
last basis stays in use, and `rejected` counts it; such a statistic starts anew (`restarted`).
*Cost*: `2mn(m + n)` FLOPs for the statistics and `4mn(m + n)` for the rotations at each step;
`O(m³ + n³)` at a refresh.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._counts import next_step
from .._side import LEFT, RIGHT, Side, sides_of
from .._trees import map_unzip, widened
from .._validate import (
    check_bool,
    check_choice,
    check_decay,
    check_interval,
    check_matrices,
    check_positive_int,
)
from ..directions._carry import find_moments, put_moments, take_moments
from ..directions._graft import shortened
from ..directions._parts import Part, parts_of
from ..refresh._policy import RefreshPolicy, check_refresh
from ..refresh._visits import visit_all
from ..storage._storage import Storage, as_storage
from ._basis import Basis, BasisRule
from ._statistic import SIDES, numbers_of, orders_of
from ._whitened import (
    STATISTICS,
    inverse_roots,
)


class EigenbasisState(NamedTuple):
    """State of `in_eigenbasis`."""

    count: jax.Array  # t, int32 scalar
    left: Any  # a Basis or None per leaf
    right: Any  # the same for the right side
    inner: Any  # state of the inner transformation, for the rotated matrices


def in_eigenbasis(
    inner: optax.GradientTransformation,
    *,
    refresh: RefreshPolicy,
    side: str = "both",
    max_order: int | None = None,
    b3: jax.typing.ArrayLike = 0.95,
    statistics: str = "gradient",
    initial: jax.typing.ArrayLike = 0.0,
    divide: bool = False,
    method: str = "eigh",
    iterations: int = 1,
    storage: Storage | None = None,
    skip_first: bool = False,
    limit: jax.typing.ArrayLike = float("inf"),
) -> optax.GradientTransformation:
    """Runs an element-wise transformation in the gradients' eigenbases.

    Args:
      inner: an element-wise transformation; `moment_ratio()` makes SOAP. It gets no parameters. A
        transformation that takes norms over its tree would mix matrices.
      refresh: policy for the bases, such as `every(10)` or `policies.diagonal_residual`.
      side: "both", "left", "right", or "smaller": only the side of smaller order (left for square
        matrices).
      max_order: sides of a larger order have no basis: the identity in its place.
      b3: decay rate of the statistics, without bias correction; 0 keeps the last gradient only.
      statistics: of the "gradient", or "kl": of the gradient whitened by the other side.
      initial: the statistics start at this multiple of the identity; for 0 with "kl" see
        `_whitened.py`.
      divide: whether to divide what `inner` returns by the roots of the eigenvalues of both sides;
        needs "kl". With `inner=momentum(b1)` this is KL-Shampoo.
      method: "eigh", or "qr": the first basis by `eigh`, each later one by orthogonal iteration
        from the last one.
      iterations: with "qr", the most steps of a refresh. After each step the policy is asked again,
        and the refresh ends when it asks for none, as in the QR algorithm from a warm start
        (Eschenhagen et al., arXiv:2506.03595); `every` ends it after one.
      storage: how statistics and bases are stored; a quantized basis is orthonormal only up to the
        quantization error.
      skip_first: the first step only updates statistics and bases; its direction is 0.
      limit: the largest root mean square of a matrix's direction; longer ones are shortened.
        `_limits.py` has those of `moment_ratio` and of `divide`.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if an argument is outside its range or a leaf is not a matrix; the message
        names it.

    Example:
      >>> import curvax, optax
      >>> soap_with_lion = curvax.in_eigenbasis(optax.scale_by_lion(), refresh=curvax.every(10))
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an Optax transformation, got {inner!r}.")
    check_refresh(refresh, ("eigenpairs",))
    check_choice("side", side, SIDES)
    check_decay("b3", b3)
    check_choice("method", method, ("eigh", "qr"))
    check_bool("skip_first", skip_first)
    check_interval("limit", limit, 0.0, open_low=True, open_high=False)
    check_choice("statistics", statistics, STATISTICS)
    check_interval("initial", initial, 0.0)
    check_bool("divide", divide)
    whiten = statistics == "kl"
    if divide and not whiten:
        raise ValueError(f"statistics must be 'kl' with divide=True, got {statistics!r}.")
    check_positive_int("iterations", iterations)
    if max_order is not None:
        check_positive_int("max_order", max_order)
    rule = BasisRule(as_storage(storage), b3, refresh, method, iterations, initial, whiten)

    def start(own: Side, x: jax.Array) -> Basis | None:
        if own not in sides_of(side, x, max_order=max_order):
            return None
        return rule.start(x.shape[:-2], own.order(x), jnp.promote_types(x.dtype, jnp.float32))

    def init(params: Any) -> EigenbasisState:
        check_matrices(params, "in_eigenbasis")
        inner_state = inner.init(widened(params))
        find_moments(inner_state, params)
        return EigenbasisState(
            count=jnp.zeros([], jnp.int32),
            left=jax.tree.map(functools.partial(start, LEFT), params),
            right=jax.tree.map(functools.partial(start, RIGHT), params),
            inner=inner_state,
        )

    def update(updates: Any, state: Any, params: Any = None):
        del params
        count = next_step(state.count)

        def accumulate(g: jax.Array, left: Basis | None, right: Basis | None):
            sources, start = (g, g), None
            if whiten:
                sources, start, left, right = rule.whitened(g, left, right, count)
            return (
                None if left is None else rule.accumulated(left, sources[0], LEFT, count, start),
                None if right is None else rule.accumulated(right, sources[1], RIGHT, count, start),
            )

        left, right = map_unzip(2, accumulate, updates, state.left, state.right)
        moments = take_moments(state.inner, updates)
        left, moments = rule.refreshed(LEFT, updates, left, moments, count)
        right, moments = rule.refreshed(RIGHT, updates, right, moments, count)
        carried = put_moments(state.inner, updates, moments)

        wide, inner_state = _directed(
            rule, inner, divide, widened(updates), left, right, carried, count
        )
        directions = jax.tree.map(
            lambda d, g: shortened(d, limit * math.prod(d.shape[-2:]) ** 0.5).astype(g.dtype),
            wide,
            updates,
        )
        if skip_first:
            first = count == 1
            directions = jax.tree.map(lambda d: jnp.where(first, 0, d), directions)
            inner_state = jax.tree.map(
                lambda old, new: jnp.where(first, old, new), carried, inner_state
            )
        return directions, EigenbasisState(count, left, right, inner_state)

    return optax.GradientTransformation(init, update)


def _directed(
    rule: BasisRule,
    inner: optax.GradientTransformation,
    divide: bool,
    updates: Any,
    left: Any,
    right: Any,
    state: Any,
    count: jax.Array,
) -> tuple[Any, Any]:
    """What `inner` makes of the gradients in their bases, out of the bases again, and its state.

    The same bases lead in and out: where they are decoded one matrix at a time, `inner` runs inside
    the loop over the matrices of a leaf.
    """

    def directed(entry: Any, part: Part) -> Any:
        given, bases, own = entry
        opened = [
            rule.opened(x, [None if basis is None else basis.basis for basis in pair])
            for x, pair in zip(given, bases, strict=True)
        ]
        turned = [rule.rotated(x, both) for x, both in zip(given, opened, strict=True)]
        moved, own = part.update(turned, own)
        if divide:
            moved = [divided(x, *pair) for x, pair in zip(moved, bases, strict=True)]
        moved = [rule.rotated(x, both, back=True) for x, both in zip(moved, opened, strict=True)]
        return moved, bases, own

    matrices, treedef = jax.tree.flatten(updates)
    pairs = [*zip(treedef.flatten_up_to(left), treedef.flatten_up_to(right), strict=True)]
    alone = [rule.reads_one_by_one(x, pair) for x, pair in zip(matrices, pairs, strict=True)]
    kept, state_treedef = jax.tree.flatten(state)
    for part in parts_of(inner, state, updates, alone):
        visit = functools.partial(directed, part=part)
        entry = (
            [matrices[i] for i in part.leaves],
            [pairs[i] for i in part.leaves],
            [kept[i] for i in part.kept],
        )
        if part.leaves and alone[part.leaves[0]]:
            x, pair = entry[0][0], entry[1][0]
            numbers = numbers_of(x.shape, orders_of(x, pair))
            moved, _, own = visit_all(visit, entry, x.shape[:-2], count, numbers)
        else:
            moved, _, own = visit(entry)
        for places, old, new in ((part.leaves, matrices, moved), (part.kept, kept, own)):
            for i, x in zip(places, new, strict=True):
                old[i] = x
    return treedef.unflatten(matrices), state_treedef.unflatten(kept)


def divided(x: jax.Array, left: Basis | None, right: Basis | None) -> jax.Array:
    """`x (..., m, n)` in the eigenbases, divided by the roots of their eigenvalues."""
    for basis, across in ((left, lambda d: d[..., :, None]), (right, lambda d: d[..., None, :])):
        if basis is not None and basis.spectrum is not None:
            x = x * across(inverse_roots(basis.spectrum))
    return x
