"""One matrix on many devices: which matrices can be divided, and how their arrays are cut.

A matrix is cut along its longer side, and so are arrays of its state; XLA's partitioner divides the
products (`linalg/_spread.py`). That is the same arithmetic up to the order of sums, for any
transformation, but it pays only for those that consist of products: a decomposition, or a product
in tiles, is done in full by each device. In refreshes that may be, of what is small.

*Cost* of Newton-Schulz iterations of `m × n`, `m ≤ n`, on D devices: `1 / D` of the FLOPs each, and
at most `3 m²` numbers received per iteration: sums of the Gram matrix, its square and the factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from .._keys import members_of
from .._recording import recording
from ..linalg._spread import spreading

SMALLEST = 1024
"""Matrices of smaller orders are not divided: an exchange takes longer to begin than their work."""

UNDIVIDED = {
    *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr"),
    *("schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
}
"""Operations that each device would do in full. What has a form of its own for TPUs is one too."""

SMALL = 1 / 8
"""In refreshes they may have so many of a matrix's entries: QR of a thin basis."""


def divisible(inner: Any, stacks: Mapping[str, Any], devices: int) -> list[str]:
    """The stacks `(N, m, n)` with a remainder of matrices that devices could share."""
    large = [
        key
        for key, x in stacks.items()
        if min(x.shape[1:]) >= SMALLEST and x.shape[0] % devices and max(x.shape[1:]) % devices == 0
    ]
    return [key for key in large if _by_products(inner, {key: stacks[key]})]


def spec_of(shape: tuple[int, ...], axes: tuple[str, ...], devices: int) -> P:
    """How an array of a stack's state or gradients is cut: along its longest axis but the first."""
    lengths = {i: n for i, n in enumerate(shape) if i and n % devices == 0}
    if not lengths:
        return P()
    longest = max(lengths, key=lambda i: (lengths[i], i))
    return P(*[None] * longest, axes)


def _by_products(inner: Any, stack: Mapping[str, Any]) -> bool:
    """Whether each device would do nothing in full, or only little, and that in refreshes."""
    like = {k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for k, x in stack.items()}

    def step(gradients: Any, params: Any) -> Any:
        return inner.update(gradients, inner.init(params), params)

    with recording(), members_of({}), spreading(lambda x: x):  # only for its operations
        try:
            traced = jax.make_jaxpr(step)(like, like)
        except TypeError:  # it needs arguments that only a step has
            return False
    return _largest_in_full(traced.jaxpr) <= SMALL * max(x.size for x in like.values())


def _largest_in_full(jaxpr: Jaxpr, refreshing: bool = False) -> float:
    """The most entries that an operation takes or gives of those that each device does in full.

    Infinitely many if it belongs to every step. Refreshes are loops with any number of rounds.
    """
    by_platform, largest = set(), 0.0
    for equation in jaxpr.eqns:
        name, ends = equation.primitive.name, (*equation.invars, *equation.outvars)
        if name == "platform_index":
            by_platform.update(equation.outvars)
        elif name in UNDIVIDED or by_platform.intersection(x for x in ends if isinstance(x, Var)):
            own = (
                max(math.prod(getattr(x.aval, "shape", ())) for x in ends)
                if refreshing
                else math.inf
            )
            largest = max(largest, own)
        else:
            for part in jaxprs_in_params(equation.params):
                largest = max(largest, _largest_in_full(part, refreshing or name == "while"))
    return largest
