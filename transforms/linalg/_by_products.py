r"""Polar factors by matrix products alone, for programs for TPUs and GPUs.

An odd polynomial maps the singular values of $X = U \Sigma V^\top$ and leaves the singular vectors
alone: $X (aI + bA + cA^2) = U (a\Sigma + b\Sigma^3 + c\Sigma^5) V^\top$ with $A = X^\top X$. Some
polynomials, one after the other, make a step from 0 to 1 at a cutoff:

| rounds | row | what it does |
|---|---|---|
| `k` | `GROWTH` | multiplies small values by up to 3.65; from 0.144 on they stay in [1/2, 1] |
| 1 | `CENTER` | brings [1/2, 1] to 1 ± 0.03 |
| 4 | `DECIDE` | takes values below `√(2/3)` to 0, cubically, and values above it to 1 |

Values start divided by the largest one, times a number for which `CENTER` takes the cutoff to
`√(2/3)`. The largest value is taken to be the Schatten 32-norm, which is too large by `m^(1/32)` at
most. Without a cutoff `CONVERGE` is last: three rounds that take all values to 1.

*Numerics.* A factor of 2 from the cutoff, values are 0 and 1 up to 3e-13 without rounding; nearer
ones may end between. `GROWTH` has the largest slope at 0 of all polynomials of degree 5 that are at
most 1 on [0, 1.01] (the hundredth is for rounding errors), and at least 1/2 from the first place
where they reach it: below, rounding weighs more. In null spaces rounding is below an eighth of the
cutoff `max(m, n) · eps · σ_max`, from 2 × 3 to 160 × 160. (Nothing below `√eps · σ_max` is left in
the Gram matrix alone.) `docs/xla.md` has the errors.

*Cost* for `m ≤ n`: 13 rounds of `4m²n + 2m³` FLOPs for 160 × 160 in float32, 12 for 160 × 640, 16
without a cutoff; and four products for the norm, `2m²n + 6m³`. With an `axis_name` of `shard_map`,
whose devices all have the matrix, each of D devices works on its own part of the longer side, and
on its own rows of products of squares of the shorter order `m`: `1 / D` of the FLOPs. It receives
`m²` numbers twice for each Gram matrix (`psum`), `m²` for each product of squares (`all_gather`),
and all of the result once. A side that D does not divide is not split.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._coefficients import Row
from ._loops import in_turn
from ._numerics import safe_norm, to_one
from ._products import exact_product

AxisName = str | tuple[str, ...] | None
"""The axes of `shard_map` whose devices divide the work; `None` divides nothing."""

GROWTH: Row = (3.6548, -8.2034, 5.4810)
CENTER: Row = (2.6708, -3.2853, 1.6386)  # the best approximation of 1 on [1/2, 1]
DECIDE: Row = (0.0, 5 / 2, -3 / 2)  # slope 0 at 0 and at 1; keeps √(2/3)
CONVERGE: Row = (15 / 8, -5 / 4, 3 / 8)  # zero slope and curvature at 1
SQUARINGS = 3
"""Squarings of the Gram matrix: the Schatten norm has the order `4 · 2^SQUARINGS`."""

UNROLLED = 4
"""Unrolled rounds of the loop: consecutive ones need no copy of the iterate."""


class Split(NamedTuple):
    """How devices divide matrices, or that they do not: then all methods leave `x` as it is."""

    axis_name: AxisName
    axis: int  # of the matrices, that of the longer side
    devices: int

    @classmethod
    def of(cls, x: jax.Array, axis: int, axis_name: AxisName) -> Split:
        """For matrices `x (..., m, n)` whose longer side is `axis`."""
        devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        return cls(None if x.shape[axis] % devices else axis_name, axis, devices)

    def device_part(self, x: jax.Array, axis: int | None = None) -> jax.Array:
        """This device's part of `x`, by default along the longer side."""
        if self.axis_name is None:
            return x
        axis = self.axis if axis is None else axis
        size = x.shape[axis] // self.devices
        start = jax.lax.axis_index(self.axis_name) * size
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def gathered(self, x: jax.Array, axis: int | None = None) -> jax.Array:
        """The inverse of `device_part`, on every device."""
        axis = x.ndim + (self.axis if axis is None else axis)
        name = self.axis_name
        return x if name is None else jax.lax.all_gather(x, name, axis=axis, tiled=True)

    def summed(self, gram: jax.Array) -> jax.Array:
        """The Gram matrix on the shorter side, from those of the parts."""
        return gram if self.axis_name is None else jax.lax.psum(gram, self.axis_name)

    def reduce(
        self, product: Callable[[jax.Array, jax.Array], jax.Array], squares: Sequence[jax.Array]
    ) -> jax.Array:
        """`functools.reduce` of square matrices, by rows of the first one."""
        first, *others = squares
        if self.axis_name is None or first.shape[-2] % self.devices:
            return functools.reduce(product, squares)
        part = self.device_part(first, -2)
        return self.gathered(functools.reduce(product, others, part), -2)


def polar_by_products(
    x: jax.Array, axis_name: AxisName = None, size: int | None = None
) -> jax.Array:
    """The polar factor of finite `x (..., m, n)`; of zeros it is zero.

    With a `size` singular values up to `size · eps · σ_max` give 0. Without it those of at least
    `eps · σ_max` give 1, and null spaces have rounding errors of any length up to 1.
    """
    last = [CONVERGE] * 3 if size is None else [DECIDE] * 4
    rows, largest = _polynomials((size or 1) * float(jnp.finfo(x.dtype).eps), last)

    def polar(x: jax.Array) -> jax.Array:
        if x.shape[-2] < x.shape[-1]:
            # Products of a wide matrix with its transpose would write out the transpose each time.
            return polar(x.mT).mT
        split = Split.of(x, -2, axis_name)

        def gram_of(x: jax.Array) -> jax.Array:
            return split.summed(exact_product(x, x, transpose_a=True))

        def mapped(i: jax.Array, x: jax.Array) -> jax.Array:
            a, b, c = (_chosen(i, column, x.dtype) for column in zip(*rows, strict=True))
            gram = gram_of(x)
            eye = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), gram.shape)
            square = split.reduce(exact_product, (gram, gram))
            return exact_product(x, a * eye + b * gram + c * square)

        scale = to_one(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
        x = split.device_part(x) * scale
        bound = _largest_eigenvalue(gram_of(x), split)
        sound = jnp.where(bound == 0, 1, bound)
        x = x * jnp.where(bound == 0, 0, largest * jax.lax.rsqrt(sound))
        return split.gathered(jax.lax.fori_loop(0, len(rows), mapped, x, unroll=UNROLLED))

    return in_turn(polar, x)


def _polynomials(cutoff: float, last: list[Row]) -> tuple[list[Row], float]:
    """All rows, and the largest singular value `s` to start with: they decide at `cutoff · s`."""
    start, rounds = _before(CENTER, (2 / 3) ** 0.5), 0
    while start > cutoff:
        start, rounds = _before(GROWTH, start), rounds + 1
    return [GROWTH] * rounds + [CENTER, *last], start / cutoff


def _before(row: Row, value: float) -> float:
    """The smallest positive number that a row maps to `value`."""
    a, b, c = row
    roots = np.roots([c, 0, b, 0, a, -value])
    return float(min(z.real for z in roots if z.real > 0 and abs(z.imag) < 1e-12))


def _chosen(i: jax.Array, values: Sequence[float], dtype: jnp.dtype) -> jax.Array:
    """`values[i]`, of which few differ from the one before; a GPU would look it up in a kernel."""
    chosen = jnp.asarray(values[0], dtype)
    for start, (before, value) in enumerate(itertools.pairwise(values), 1):
        if value != before:
            chosen = jnp.where(i < start, chosen, value)
    return chosen


def _largest_eigenvalue(gram: jax.Array, split: Split) -> jax.Array:
    """A bound `(..., 1, 1)` of that of `gram (..., m, m)`: at most `m^(1/16)` times as large."""

    def normalized(power: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm = safe_norm(power, axis=(-2, -1), keepdims=True)
        return norm, power / jnp.where(norm == 0, 1, norm)

    def square(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bound, power = carry
        norm, power = normalized(split.reduce(exact_product, (power, power)))
        return bound * norm ** jnp.exp2(-(i + 1.0)).astype(norm.dtype), power

    return jax.lax.fori_loop(0, SQUARINGS, square, normalized(gram))[0]
