r"""Weighted sums of two directions, at the length of the first or at their own.

$$D = B\, \|A\| \,/\, \|B\| \quad\text{("first")} \qquad D = B \quad\text{("sum")} \qquad
B = w_1 A + w_2 S$$

for the directions $A$ and $S$ of the same gradient. The length is the Schatten 4-norm $(\sum_i
\sigma_i^4)^{1/4}$, by which Newton-Schulz with `norm="gram"` divides too. The source is entry 46 of
track 3 of modded-nanogpt ("norm-preserving blend"), with Nesterov's momentum and SOAP of it. For
the Frobenius norm take `graft(blend(first, second, weights, length="sum"), first)`.

*Gate.* With `trust_gate()` for the weights $S$ has the share $g$ and $A$ has $1 - g$,

$$g = \mathrm{clip}\Big(\frac{\cos(S, A) - c}{1 - c}\Big)\,
\mathrm{clip}\Big(\frac{\cos(S, G)}{\max(\cos(A, G),\, 10^{-8})}\Big)$$

matrix by matrix, for the gradient $G$ that reaches the blend, each factor clipped to [0, 1]: $S$ is
trusted as far as it agrees with $A$, and goes along the gradient as far as $A$ does.

*What both share*, such as a momentum, is `shared`: $A$ and $S$ are of what it gives, and $G$ is
still the gradient. Eigenbases change neither sums nor lengths, so a blend within `in_eigenbasis` is
one of directions outside that shares the basis' moments.

*Numerics.* float32 at least, for entries from 1e-30 to 1e30. A sum that is zero stays zero. *Cost*:
two Gram matrices of the smaller side, `2m²n` FLOPs each for `m ≤ n`. *State*: that of all parts and
a counter.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._arrays import check_matrices
from .._counts import at_step, next_step
from .._stacks import check_directions
from .._trees import widened
from .._validate import Number, Value, as_transformation, check_fields, checked, shown
from ..linalg._numerics import divided, inner_products, norms, ratio
from ..linalg._schatten import schatten_norms


class BlendState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    shared: Any
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class TrustGate(Value):
    min_agree: Any = 0.2
    lowest: Any = 0.0
    highest: Any = 1.0

    __post_init__ = check_fields

    def shares(self, a: jax.Array, s: jax.Array, g: jax.Array, count: jax.Array) -> Any:
        """The weights `(..., 1, 1)` of both directions."""
        a, s, g = (divided(x, norms(x)) for x in (a, s, g))
        agree = (inner_products(s, a) - self.min_agree) / (1 - self.min_agree)
        align = inner_products(s, g) / jnp.maximum(inner_products(a, g), 1e-8)
        gate: Any = jnp.clip(agree, 0, 1) * jnp.clip(align, 0, 1)
        gate = jnp.clip(gate, at_step(self.lowest, count), at_step(self.highest, count))
        return 1 - gate, gate


def trust_gate(
    min_agree: jax.typing.ArrayLike = 0.2,
    *,
    lowest: optax.ScalarOrSchedule = 0.0,
    highest: optax.ScalarOrSchedule = 1.0,
) -> TrustGate:
    """Weights of `blend` that trust the second direction as far as it agrees with the first.

    Args:
      min_agree: c, the cosine between both up to which the second direction has no share.
      lowest: its smallest share, or a schedule of it from step 0 on. In the record it is 0.45 until
        step 1375, and then falls to 0 at step 1625.
      highest: its largest share, or a schedule; in the record 0.85 before step 1625.

    Raises:
      ValueError: if an argument is not in its range.

    Example:
      >>> import curvax
      >>> nesterov, soap = curvax.momentum(0.95, nesterov=True), curvax.scale_by_soap()
      >>> gated = curvax.blend(nesterov, soap, curvax.trust_gate(highest=0.85))
    """
    return TrustGate(min_agree, lowest, highest)


Weights = tuple[optax.ScalarOrSchedule, optax.ScalarOrSchedule] | TrustGate


@checked
def blend(
    first: optax.GradientTransformation,
    second: optax.GradientTransformation,
    weights: Weights,
    *,
    shared: optax.GradientTransformation | None = None,
    length: str = "first",
) -> optax.GradientTransformationExtraArgs:
    """Adds two directions of the same gradient; the module's docstring has the formulas.

    Args:
      first: a direction, A.
      second: another one, S.
      weights: w₁ and w₂, numbers or schedules from step 0 on; or `trust_gate()`, for each matrix.
      shared: runs in front of both directions, once; `None` is nothing.
      length: "first" gives the sum the Schatten 4-norm of A; "sum" leaves it its own.

    Returns:
      A transformation on batches of matrices `(..., m, n)`; extra arguments reach all parts.

    Raises:
      ValueError: if an argument is not allowed, or a direction changes a shape.

    Example:
      >>> import curvax, optax
      >>> both = curvax.blend(curvax.scale_by_asgo(), curvax.scale_by_muon(), (0.5, 0.5))
      >>> optimizer = curvax.assemble(both, 0.01)
      >>> soap = curvax.in_eigenbasis(curvax.moment_ratio(0.0, 0.9), refresh=curvax.every(10))
      >>> nesterov = curvax.momentum(0.95, nesterov=True)
      >>> once = curvax.blend(optax.identity(), soap, curvax.trust_gate(), shared=nesterov)
    """
    before = as_transformation("shared", optax.identity() if shared is None else shared)
    parts = as_transformation("first", first), as_transformation("second", second)
    gated = isinstance(weights, TrustGate)
    if not gated and (not isinstance(weights, (tuple, list)) or len(weights) != 2):
        raise ValueError(
            "weights must be two numbers, such as (0.5, 0.5), or curvax.trust_gate(); got "
            f"{shown(weights)}."
        )
    for i, weight in enumerate(() if gated else weights):
        Number("(-inf, inf)", scheduled=True).check(f"weights[{i}]", weight)

    def init(params: Any) -> BlendState:
        check_matrices(params, "blend")
        states = [part.init(params) for part in (before, *parts)]
        for part, part_state in zip((before, *parts), states, strict=True):
            check_directions("blend", part, params, part_state, params)
        return BlendState(jnp.zeros([], jnp.int32), *states)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        seen, shared_state = before.update(updates, state.shared, params, **extra_args)
        directions, states = zip(
            parts[0].update(seen, state.first, params, **extra_args),
            parts[1].update(seen, state.second, params, **extra_args),
            strict=True,
        )

        def blended(g: jax.Array, *pair: jax.Array) -> jax.Array:
            a, s, g = widened((*pair, g))
            if isinstance(weights, TrustGate):
                shares = weights.shares(a, s, g, state.count)
            else:
                shares = [at_step(weight, state.count) for weight in weights]
            summed = shares[0] * a + shares[1] * s
            if length == "first":
                summed = summed * ratio(schatten_norms(a), schatten_norms(summed))
            return summed.astype(pair[0].dtype)

        blends = jax.tree.map(blended, updates, *directions)
        return blends, BlendState(next_step(state.count), shared_state, *states)

    return optax.GradientTransformationExtraArgs(init, update)
