"""One matrix on many devices: which matrices can be divided, and how their arrays are cut.

A matrix is cut along its longer side, and so are arrays of its state; XLA's partitioner divides the
products (`linalg/_spread.py`). That is the same arithmetic up to the order of sums, for any
transformation, but it pays only for those that consist of products: a decomposition, or a product
in tiles, would be done in full by each device.

*Cost* of Newton-Schulz iterations of `m × n`, `m ≤ n`, on D devices: `1 / D` of the FLOPs each, and
at most `3 m²` numbers received per iteration: sums of the Gram matrix, its square and the factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from .._keys import members_of
from .._recording import recording
from ..linalg._spread import spreading

SMALLEST = 1024
"""Matrices of smaller orders are not divided: an exchange takes longer to begin than their work."""

UNDIVIDED = {
    *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "platform_index", "qr"),
    *("schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
}
"""Operations that each device would do in full. What has a form of its own for TPUs is one."""


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
    """Whether `inner` has no operation that each device would do in full."""
    like = {k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for k, x in stack.items()}

    def step(gradients: Any, params: Any) -> Any:
        return inner.update(gradients, inner.init(params), params)

    with recording(), members_of({}), spreading(lambda x: x):  # only for its operations
        try:
            traced = jax.make_jaxpr(step)(like, like)
        except TypeError:  # it needs arguments that only a step has
            return False
    return not any(name in UNDIVIDED for name in _operations(traced.jaxpr))


def _operations(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for part in jaxprs_in_params(equation.params):
            yield from _operations(part)
