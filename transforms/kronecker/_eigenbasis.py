r"""Element-wise transformations in the eigenbases of the gradients' second moments.

For a gradient $G$ `(m, n)`, on both sides or one of them:

$$L \leftarrow b_3 L + (1-b_3)\, G G^\top, \quad R \leftarrow b_3 R + (1-b_3)\, G^\top G, \qquad
D = U_L\, f(U_L^\top G\, U_R)\, U_R^\top$$

with the eigenvectors $U$ of $L$ and $R$ at their last refresh, or what follows them by rotations
(`_bases.py`), and any element-wise transformation $f$; with Adam this is SOAP. Before the first
refresh a basis is the identity. With `lagged` a step uses the bases that the step before left, as
SOAP's official code and the record of modded-nanogpt's track 3 (#46) do.

The statistics may be those of whitened gradients (`_whitened.py`), which also keeps the eigenvalues
$\lambda$ and $\mu$ of both sides current. Then $f$ may be followed by a division by
$\sqrt{\lambda_i \mu_j}$; with momentum for $f$ this is KL-Shampoo.

*A step of `soap` with a refresh*, in a program for a TPU:

1. `update` brings the gradient into the bases in use, $X = U_L^\top G\, U_R$, in one pass of
   bfloat16 (JAX's default), and averages its Gram matrices into $H = U^\top L U$ of each side, in
   three passes. $L$ itself is nowhere.
2. `SideRule.refreshed` (`_factor.py`) takes the left side, then the right one, and of each the
   matrices that are due, one after the other. The policy's schedule says which (`refresh/_due.py`):
   with `every` all at the same steps (`soap`: each third at first, each tenth in the end), or each
   at its own if they are staggered. Those whose refreshes were all rejected are due at every step.
3. `SideRule.checked` does one matrix. If its statistic is not finite, this starts anew at `initial`
   · I; if its basis is far from orthonormal, that starts anew at the identity, with the statistic
   (`restarted`). Moments and $X$ stay. `every` refreshes what is due; a policy that examines $H$
   may leave the basis as it is. Zeros make no basis (`rejected`).
4. `BasisRule.renewed` (`_bases.py`) asks the method for a turn $T$. Here it is a product of
   rotations (`linalg/_turns.py` has the formulas): about 40 the first time, from the identity, a
   few later, 80 at most. Each makes smaller what $H$ has off its diagonal, by six products in three
   passes of bfloat16; one that is shorter than 0.3 is the last. Nothing is decomposed. Then
   $U \leftarrow U T$, $H \leftarrow T^\top H T$, and $X$ and the first moments turn by $T$ on this
   side. If $H$ is not finite then, the side keeps what it had (`rejected`).
5. $f$ takes $X$ in the new bases, and its direction goes back, $U_L f(X)\, U_R^\top$.

Programs for GPUs differ in a step's default precision, TF32, and turn several matrices at once, up
to the last rotation of the last (`linalg/_loops.py`). In programs for CPUs $T$ has the eigenvectors
of $H$, and all products are in float32.

*Moments.* $f$ keeps its moments in the rotated space. When a basis changes, first moments rotate
with it, by $U_{new}^\top U_{old}$; this is the same as keeping them in the original space. Second
moments do not rotate like tensors and stay as they are; if a refresh by QR reorders columns, they
are reordered alike. So are the eigenvalues $\lambda$ and $\mu$; the first refresh, and every one by
rotations, replaces these by the diagonal of $H$. States declare their moments (`_carry.py`).

*Bound.* With both kinds of moments in one basis, $f$ keeps the bound of `_moment_ratio.py`. A
refresh breaks it, because an entry may get a moment from one place and a variance from another.
`limit` keeps it per matrix, also where 4 bits leave a basis that is not orthonormal. *Numerics and
cost*: `_factor.py`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._carry import check_moments
from .._counts import next_step
from .._recording import is_repeated
from .._side import Side, sides_of
from .._stacks import check_directions, each_array
from .._trees import widened
from .._validate import as_value, check_transformation, checked
from ..linalg._numerics import shortened
from ..linalg._products import Products, as_products
from ..refresh._methods import BASIS_METHODS, BasisMethod, check_steps
from ..refresh._policy import RefreshPolicy, check_refresh
from ..storage._storage import Storage, as_storage
from ._bases import BasisRule
from ._factor import Factor
from ._whitened import WhitenedRule, inverse_roots


class EigenbasisState(NamedTuple):
    """State of `in_eigenbasis`."""

    count: jax.Array  # t, int32 scalar
    left: Factor | None
    right: Factor | None
    inner: Any  # state of the inner transformation, for the rotated matrices


@checked
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
    method: str | BasisMethod | None = None,
    storage: Storage | None = None,
    products: str | Products | None = None,
    skip_first: bool = False,
    lagged: bool = False,
    limit: jax.typing.ArrayLike = float("inf"),
) -> optax.GradientTransformation:
    """Runs an element-wise transformation in the gradients' eigenbases.

    Args:
      inner: an element-wise transformation; `moment_ratio()` makes SOAP. It gets no parameters. A
        transformation that takes norms over its tree would mix matrices.
      refresh: policy for the bases, such as `every(10)` or `policies.diagonal_residual`.
      max_order: sides of a larger order have no basis: the identity in its place.
      b3: decay rate of the statistics, without bias correction; 0 keeps the last gradient only.
      statistics: of the "gradient", or "kl": of the gradient whitened by the other side.
      divide: whether to divide the output of `inner` by the roots of the eigenvalues of both sides;
        needs "kl". With `inner=momentum(b1)` this is KL-Shampoo.
      method: how a refresh turns a basis: "eigh", to the eigenvectors of the statistic; "qr", after
        a first "eigh" by orthogonal iteration; "rotations", by products alone; or a value of
        `curvax.eigenbases`, such as `eigenbases.qr(steps=10)`. `None` is "eigh" in programs for
        CPUs and "rotations" in programs for GPUs and TPUs.
      side, initial, storage, products: see `precondition`. A quantized basis is orthonormal only up
        to its rounding.
      skip_first: the first step only updates statistics and bases; its direction is 0.
      lagged: whether a step takes its direction in the bases that the step before left, and
        refreshes them afterwards. The first step then has the identity for bases.
      limit: the largest root mean square of a matrix's direction; longer ones are shortened.
        `largest_ratio` of `_moment_ratio.py` has those of `moment_ratio` and of `divide`.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if an argument is outside its range or a leaf is not a matrix; the message
        names it.

    Example:
      >>> import curvax, optax
      >>> soap_with_lion = curvax.in_eigenbasis(optax.scale_by_lion(), refresh=curvax.every(10))
    """
    check_transformation("inner", inner)
    check_refresh(refresh, ("eigenpairs",))
    example = "curvax.eigenbases.qr(steps=10)"
    by = as_value("method", method, BasisMethod, example, BASIS_METHODS)
    check_steps(by, refresh)
    if divide and statistics != "kl":
        raise ValueError(f"statistics must be 'kl' with divide=True, got {statistics!r}.")
    common = as_storage(storage), as_products(products), refresh, by, b3, initial
    rule = WhitenedRule(*common) if statistics == "kl" else BasisRule(*common)
    transform: Any = inner
    sides = functools.partial(sides_of, side, max_order=max_order)

    def init(x: Any) -> EigenbasisState:
        if divide and not sides(x):
            raise ValueError(
                f"max_order must be at least an order of side={side!r} of the matrices {x.shape}, "
                f"or nothing divides their momentum; got {max_order}. Choose another side."
            )
        wide = widened(x)
        inner_state = inner.init(wide)
        if not is_repeated():
            check_directions("in_eigenbasis", inner, wide, inner_state)
            check_moments(inner_state, x)
        return EigenbasisState(jnp.zeros([], jnp.int32), *rule.started(x, sides), inner_state)

    def update(g: Any, state: Any, params: Any = None):
        count, bases = next_step(state.count), (state.left, state.right)
        x = rule.entered(g, bases, count)  # SOAP: U_Lᵀ G U_R
        sources, start = (x, x), None
        if isinstance(rule, WhitenedRule):
            sources, start, bases = rule.whitened(x, bases, count)
        bases = rule.accumulated(bases, sources, count, start)  # L, R
        if lagged:
            wide, inner_state = directed(x, bases, state.inner, count)
            bases, inner_state, _ = rule.refreshed_with(g, bases, inner_state, count)
        else:  # X turns with the bases, as first moments do, which saves a product with each
            bases, inner_state, (x,) = rule.refreshed_with(g, bases, state.inner, count, x)
            wide, inner_state = directed(x, bases, inner_state, count)
        direction = shortened(wide, limit * math.prod(g.shape[-2:]) ** 0.5).astype(g.dtype)
        if skip_first:
            direction = jnp.where(count == 1, 0, direction)
        return direction, EigenbasisState(count, bases[0], bases[1], inner_state)

    def directed(x: Any, bases: Any, before: Any, count: Any) -> Any:
        """The direction of `x`, which is in these bases, and the state of `inner`."""
        moved, after = transform.update(x, before)  # SOAP: m̃ / √v
        for side, basis in zip(Side, bases, strict=True):
            if divide and basis is not None:
                assert basis.spectrum is not None
                moved = moved * jnp.expand_dims(inverse_roots(basis.spectrum), side.other_axis)
        if skip_first:
            after = jax.tree.map(lambda old, new: jnp.where(count == 1, old, new), before, after)
        return rule.moved(moved, bases, count, back=True), after  # U_L (m̃ / √v) U_Rᵀ

    return each_array("in_eigenbasis", init, update)
