"""Work on one matrix that several devices divide among them, inside `shard_map`.

Every device has the same matrix. It works on its own part of the longer side, and on its own rows
of products of square matrices of the shorter order `m`. So on D devices each does `1 / D` of the
FLOPs. It receives `m²` numbers twice for each Gram matrix (`psum`), `m²` for each product of
squares (`all_gather`), and all of the result once.

A side that D does not divide is not split. If the longer one is not, each device does all the work.
If `m` is not, each does the products of squares in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

AxisName = str | tuple[str, ...] | None
"""The axes of `shard_map` whose devices divide the work; `None` divides nothing."""


class Split(NamedTuple):
    """How devices divide matrices."""

    axis_name: str | tuple[str, ...]
    axis: int  # of the matrices, that of the longer side
    devices: int

    @classmethod
    def of(cls, x: jax.Array, axis: int, axis_name: str | tuple[str, ...]) -> Split | None:
        """For matrices `x (..., m, n)` whose longer side is `axis`; `None` if it is not split."""
        devices = jax.lax.axis_size(axis_name)
        return None if x.shape[axis] % devices else cls(axis_name, axis, devices)

    def own(self, x: jax.Array) -> jax.Array:
        """This device's part of `x`."""
        return self._part(x, self.axis)

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `own`, on every device."""
        return self._gathered(x, self.axis)

    def summed(self, gram: jax.Array) -> jax.Array:
        """The Gram matrix on the shorter side, from those of the parts."""
        return jax.lax.psum(gram, self.axis_name)

    def reduce(
        self, product: Callable[[jax.Array, jax.Array], jax.Array], squares: Sequence[jax.Array]
    ) -> jax.Array:
        """`functools.reduce` of square matrices, by rows of the first one."""
        first, *others = squares
        if first.shape[-2] % self.devices:
            return functools.reduce(product, squares)
        rows = functools.reduce(product, others, self._part(first, -2))
        return self._gathered(rows, -2)

    def _part(self, x: jax.Array, axis: int) -> jax.Array:
        size = x.shape[axis] // self.devices
        start = jax.lax.axis_index(self.axis_name) * size
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def _gathered(self, x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(x, self.axis_name, axis=x.ndim + axis, tiled=True)
