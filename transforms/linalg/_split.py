"""Work on one matrix that several devices divide among them, inside `shard_map`.

Every device has the same matrix. It works on its own part of the longer side, and on its own rows
of products of square matrices of the shorter order `m`. So on D devices each does `1 / D` of the
FLOPs. It receives `m²` numbers twice for each Gram matrix (`psum`), `m²` for each product of
squares (`all_gather`), and all of the result once.

A side that D does not divide is not split. If the longer one is not, each device does all the work.
If `m` is not, each does the products of squares in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

AxisName = str | tuple[str, ...] | None
"""The axes of `shard_map` whose devices divide the work; `None` divides nothing."""


class Split(NamedTuple):
    """How devices divide matrices."""

    axis_name: AxisName
    axis: int  # of the matrices, that of the longer side
    devices: int = 1

    @classmethod
    def of(cls, x: jax.Array, axis: int, axis_name: AxisName) -> Split:
        """For matrices `x (..., m, n)` whose longer side is `axis`, -2 or -1."""
        devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        return cls(None, axis) if x.shape[axis] % devices else cls(axis_name, axis, devices)

    def own(self, x: jax.Array) -> jax.Array:
        """This device's part of `x`."""
        return x if self.axis_name is None else self._part(x, self.axis)

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `own`, on every device."""
        return x if self.axis_name is None else self._gathered(x, self.axis)

    def summed(self, gram: jax.Array) -> jax.Array:
        """The Gram matrix on the shorter side, from those of the parts."""
        return gram if self.axis_name is None else jax.lax.psum(gram, self.axis_name)

    def by_rows(self, f: Callable[[jax.Array], jax.Array], square: jax.Array) -> jax.Array:
        """`f(square)` for a map `f` of rows, such as a product from the right."""
        if self.axis_name is None or square.shape[-2] % self.devices:
            return f(square)
        return self._gathered(f(self._part(square, -2)), -2)

    def _part(self, x: jax.Array, axis: int) -> jax.Array:
        size = x.shape[axis] // self.devices
        start = jax.lax.axis_index(self.axis_name) * size
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def _gathered(self, x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(x, self.axis_name, axis=x.ndim + axis, tiled=True)
