"""Triangles folded to half a square, and two in one square."""

from typing import Any

import jax
import numpy as np
import pytest

from curvax.transforms.storage._triangle import fold, join, squared, strictly_lower, unfold
from tests.helpers import assert_close

ORDERS = range(1, 10)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_a_triangle_folds_to_half_a_square(batch):
    shapes = [(*batch, order, order) for order in ORDERS]
    xs = [np.random.default_rng(len(ORDERS)).integers(1, 256, s, np.uint8) for s in shapes]

    @jax.jit
    def there_and_back(xs):
        folded = [fold(x) for x in xs]
        return folded, [unfold(f) for f in folded], [strictly_lower(order) for order in ORDERS]

    for x, folded, back, below in zip(xs, *there_and_back(xs), strict=True):
        folded, order = np.asarray(folded), x.shape[-1]
        half = -(-order // 2)
        assert folded.dtype == np.uint8 and folded.shape == (*batch, half, order)
        for i, j in np.ndindex(half, order):
            row = order // 2 + i
            if j < row:
                assert (folded[..., i, j] == x[..., row, j]).all(), order
            elif j > order - 1 - (order - 1 - row):
                mirrored = x[..., order - 1 - row, order - 1 - j]
                assert (folded[..., i, j] == mirrored).all(), order
        lower = np.tri(order, k=-1, dtype=bool)
        assert np.array_equal(np.asarray(back)[..., lower], x[..., lower]), order
        assert np.array_equal(below, lower)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_two_triangles_share_a_square(batch):
    shapes = [(2, *batch, order, order) for order in ORDERS]
    both = [np.random.default_rng(len(ORDERS)).integers(1, 256, s, np.uint8) for s in shapes]
    squares = jax.jit(lambda both: [join(a, b) for a, b in both])(list(map(tuple, both)))
    for (a, b), square in zip(both, map(np.asarray, squares), strict=True):
        lower = np.tri(a.shape[-1], k=-1, dtype=bool)
        assert square.shape == a.shape and square.dtype == np.uint8
        assert np.array_equal(square[..., lower], a[..., lower])
        assert np.array_equal(square.mT[..., lower], b[..., lower])


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_squares_of_triangles_are_products(batch):
    """Symmetric to the last bit, and with no more products than half of a square needs."""
    draw = np.random.default_rng(0)
    cs = [np.float32(np.tril(draw.standard_normal((*batch, d, d)))) for d in (1, 2, 5, 8)]
    found = jax.jit(lambda cs: [squared(c) for c in cs])(cs)
    for c, x in zip(cs, map(np.asarray, found), strict=True):
        exact = np.asarray(c, np.float64)
        assert_close(x, exact @ exact.mT)
        assert np.array_equal(x, x.mT)
    wide = jax.ShapeDtypeStruct((64, 64), np.float32)
    cost: Any = jax.jit(squared).lower(wide).cost_analysis()
    assert cost["flops"] < 1.1 * 64**3
