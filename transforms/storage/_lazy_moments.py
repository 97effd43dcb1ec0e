"""Lazy moments: codes in few bits that are decoded where they are used, not before.

`quantize_state` gives a matrix view its stacks as `LazyMoments`. The view decodes them chunk by
chunk (`matrices/_chunks.py`), so only the moments of one chunk exist in full precision.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._trees import where_entries, widened
from ._codec import Codec, Coded, decode, dither_of, encode


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("coded", "updates"),
    meta_fields=("codec", "columns", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class LazyMoments:
    """Moments `(N, …, m, n)` in codes. A slice along the first axis is `LazyMoments` again."""

    coded: Coded
    updates: jax.Array | None  # t of the dither, once per matrix, (N,)
    codec: Codec
    columns: int  # n
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.coded.codes.shape[:-1], self.columns)

    def decoded(self) -> jax.Array:
        return decode(self.coded, self.codec, self.columns).astype(self.dtype)

    def encoded(self, x: jax.Array) -> LazyMoments:
        """Encodes new values `x`; a matrix that is not finite keeps its codes."""
        count = None if self.updates is None else self.updates[0]
        return dataclasses.replace(self, coded=encoded(x, self.codec, count, self.coded))

    def restarted(self, damaged: jax.Array, new: jax.Array) -> LazyMoments:
        """Moments with those of damaged matrices, bool `(N,)`, replaced by `new (1, …, m, n)`."""
        coded = encoded(new.astype(self.dtype), self.codec, None)
        return dataclasses.replace(self, coded=where_entries(damaged, coded, self.coded))


def is_lazy(node: Any) -> bool:
    """Whether a node of a state holds lazy moments."""
    return isinstance(node, LazyMoments)


def decoding(inner: Any) -> Callable[..., Any]:
    """The update of a transformation on decoded moments, which encodes them again."""
    over = functools.partial(jax.tree.map, is_leaf=is_lazy)

    def update(updates: Any, state: Any, params: Any, **extra_args: Any):
        plain = over(lambda x: x.decoded() if is_lazy(x) else x, state)
        updates, new = inner.update(updates, plain, params, **extra_args)
        return updates, over(lambda old, x: old.encoded(x) if is_lazy(old) else x, state, new)

    return update


def encoded(
    x: jax.Array, codec: Codec, count: jax.Array | None, before: Coded | None = None
) -> Coded:
    """Encodes a leaf (a vector as a matrix); what is not finite keeps its codes of `before`."""
    # `count` is t of the dither; `None` rounds to the nearest code.
    matrices = widened(jnp.atleast_2d(x))
    thresholds = None
    if count is not None:
        thresholds = jnp.broadcast_to(dither_of(count, *matrices.shape[-2:]), matrices.shape)
    new = encode(matrices, codec, thresholds)
    if before is None:
        return new
    finite = jnp.isfinite(matrices).all((-2, -1), keepdims=True)
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, before)
