r"""Weighted sums of two directions, at the length of the first or at their own.

$$D = B\, \|A\| \,/\, \|B\| \quad\text{("first")} \qquad D = B \quad\text{("sum")} \qquad
B = w_1 A + w_2 S$$

for the directions $A$ and $S$ of the same gradient. The length is the Schatten 4-norm $(\sum_i
\sigma_i^4)^{1/4}$, the root of the Frobenius norm of a Gram matrix, by which Newton-Schulz with
`norm="gram"` divides too. The source is entry 46 of track 3 of modded-nanogpt ("norm-preserving
blend"), whose directions are Nesterov's momentum and SOAP of it. For the Frobenius norm of the
first direction take `graft(blend(first, second, weights, length="sum"), first)`.

*What both share* goes before the blend, so that it is computed and stored once:
`optax.chain(shared, blend(optax.identity(), rest, weights))`. Eigenbases change neither sums nor
lengths: a blend within `in_eigenbasis` is one of directions outside that shares the basis' moments.

*Numerics.* float32 at least, for entries from 1e-30 to 1e30. A sum that is zero stays zero. *Cost*:
two Gram matrices of the smaller side, `2m²n` FLOPs each for `m ≤ n`. *State*: that of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._stacks import check_directions
from .._validate import as_transformation, check_choice, check_interval, check_matrices
from ..linalg._schatten import schatten_norms


class BlendState(NamedTuple):
    """State of `blend`."""

    first: Any
    second: Any


def blend(
    first: optax.GradientTransformation,
    second: optax.GradientTransformation,
    weights: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    *,
    length: str = "first",
) -> optax.GradientTransformationExtraArgs:
    """Adds two directions of the same gradient; the module's docstring has the formulas.

    Args:
      first: a direction, A.
      second: another one, S.
      weights: w₁ and w₂, of any sign.
      length: "first" gives the sum the Schatten 4-norm of A; "sum" leaves it its own.

    Returns:
      A transformation on batches of matrices `(..., m, n)`; extra arguments reach both directions.

    Raises:
      ValueError: if an argument is not allowed, or if a direction changes the shape of its
        gradient.

    Example:
      >>> import curvax, optax
      >>> both = curvax.blend(curvax.scale_by_asgo(), curvax.scale_by_muon(), (0.5, 0.5))
      >>> optimizer = curvax.assemble(both, 0.01)
    """
    parts = as_transformation("first", first), as_transformation("second", second)
    if not isinstance(weights, (tuple, list)) or len(weights) != 2:
        raise ValueError(f"weights must be two numbers, such as (0.5, 0.5); got {weights!r}.")
    for i, weight in enumerate(weights):
        check_interval(f"weights[{i}]", weight, -np.inf, open_low=True)
    check_choice("length", length, ("first", "sum"))

    def init(params: Any) -> BlendState:
        check_matrices(params, "blend")
        state = BlendState(*(part.init(params) for part in parts))
        for part, own in zip(parts, state, strict=True):
            check_directions("blend", part, params, own, params)
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        found = [
            part.update(updates, own, params, **extra_args)
            for part, own in zip(parts, state, strict=True)
        ]
        (a, s), states = zip(*found, strict=True)

        def blended(a: jax.Array, s: jax.Array) -> jax.Array:
            wide = np.promote_types(jnp.promote_types(a.dtype, s.dtype), np.float32)
            summed: Any = weights[0] * a.astype(wide) + weights[1] * s.astype(wide)
            if length == "first":
                own, target = schatten_norms(summed), schatten_norms(a.astype(wide))
                summed = summed * jnp.where(own > 0, target / jnp.where(own > 0, own, 1), 0)
            return summed.astype(a.dtype)

        return jax.tree.map(blended, a, s), BlendState(*states)

    return optax.GradientTransformationExtraArgs(init, update)
