"""Moments in few-bit codes that are decoded where they are used, not before.

`quantize_state` hands a matrix view its stacks as `Undecoded`. The view decodes them chunk by chunk
(`matrices/_chunks.py`), so that only the moments of one chunk exist in full precision.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._codec import Codec, Coded, decode, encode
from ._dither import dither


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("coded", "updates"),
    meta_fields=("codec", "columns", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class Undecoded:
    """A batch `(N, …, m, n)` in codes; `N` may become smaller."""

    coded: Coded
    updates: jax.Array | None  # t of the dither, once per matrix, (N,)
    codec: Codec
    columns: int  # n
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoded array."""
        return (*self.coded.codes.shape[:-1], self.columns)

    def decoded(self) -> jax.Array:
        """What the codes stand for."""
        return decode(self.coded, self.codec, self.columns).astype(self.dtype)

    def encoded(self, x: jax.Array) -> Undecoded:
        """Other values; a matrix that is not finite keeps its codes."""
        count = None if self.updates is None else self.updates[0]
        return dataclasses.replace(self, coded=encoded(x, self.codec, count, self.coded))


def is_undecoded(node: Any) -> bool:
    """Whether a node of a state is decoded where it is used."""
    return isinstance(node, Undecoded)


def decoded_tree(tree: Any) -> Any:
    """A tree whose codes are decoded."""
    return jax.tree.map(lambda x: x.decoded() if is_undecoded(x) else x, tree, is_leaf=is_undecoded)


def encoded_tree(tree: Any, like: Any) -> Any:
    """The inverse of `decoded_tree`, in the codes of `like`."""
    return jax.tree.map(
        lambda old, x: old.encoded(x) if is_undecoded(old) else x, like, tree, is_leaf=is_undecoded
    )


def encoded(
    x: jax.Array, codec: Codec, count: jax.Array | None, before: Coded | None = None
) -> Coded:
    """The codes of a leaf; those of `before` for each matrix with an entry that is not finite.

    Args:
      x: a vector, a matrix, or a batch of matrices.
      codec: how it is quantized.
      count: t of the dither, or `None` to round to the nearest code.
      before: the codes before this update.
    """
    matrices = jnp.atleast_2d(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    thresholds = None
    if count is not None:
        thresholds = jnp.broadcast_to(dither(count, *matrices.shape[-2:]), matrices.shape)
    new = encode(matrices, codec, thresholds)
    if before is None:
        return new
    finite = jnp.isfinite(matrices).all((-2, -1), keepdims=True)
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, before)
