"""One parameter as matrices: tiles, heads, blocks, padding, and the way back."""

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from curvax import MatrixAxes
from curvax.transforms.matrices._form import from_matrices, matrix_forms
from tests.cells import ALL_CELLS


@st.composite
def parameters_and_axes(draw: st.DrawFn) -> tuple[tuple[int, ...], MatrixAxes, int | None]:
    """A shape, a way to see it as matrices, and a block size (with heads: none)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    first, second = sorted(draw(st.tuples(*[st.integers(0, len(shape))] * 2)))
    rows, columns = tuple(order[:first]), tuple(order[first:second])
    negative = draw(st.booleans())
    heads = [
        draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        for size in (math.prod(shape[a] for a in rows), math.prod(shape[a] for a in columns))
    ]
    axes = MatrixAxes(rows, tuple(a - len(shape) for a in columns) if negative else columns, *heads)
    block_size = draw(st.none() | st.integers(1, 6)) if heads == [1, 1] else None
    return shape, axes, block_size


def tiles_by_hand(x: np.ndarray, axes: MatrixAxes, block_size: int | None) -> list[np.ndarray]:
    """The matrices of `x`, unpadded, in the order of batch, row tile, column tile."""
    rows, columns = (tuple(a % x.ndim for a in part) for part in (axes.rows, axes.columns))  # pyright: ignore
    batch = [a for a in range(x.ndim) if a not in (*rows, *columns)]
    sizes = [math.prod(x.shape[a] for a in part) for part in (batch, rows, columns)]
    stack = np.transpose(x, (*batch, *rows, *columns)).reshape(sizes)

    def edges(size: int, heads: int) -> list[tuple[int, int]]:
        tiles = heads if block_size is None else -(-size // block_size)
        length = -(-size // tiles)
        return [(i * length, min((i + 1) * length, size)) for i in range(tiles)]

    return [
        matrix[top:bottom, left:right]
        for matrix in stack
        for top, bottom in edges(sizes[1], axes.row_heads)
        for left, right in edges(sizes[2], axes.column_heads)
    ]


@hypothesis.settings(
    max_examples=100 if ALL_CELLS else 25, deadline=None, derandomize=True, database=None
)
@hypothesis.example(((5, 3), MatrixAxes((0,), (1,)), 2))  # padded on both sides
@hypothesis.example(((3, 2, 5, 4), MatrixAxes((3, 0), (2,)), 3))
@hypothesis.example(((4, 3, 6), MatrixAxes((0,), (-1,), row_heads=2, column_heads=3), None))
@hypothesis.given(parameters_and_axes())
def test_matrices_are_the_tiles_of_the_parameter(
    drawn: tuple[tuple[int, ...], MatrixAxes, int | None],
) -> None:
    shape, axes, block_size = drawn
    (form,) = matrix_forms("w", shape, axes, block_size)
    x = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)

    @jax.jit
    def there_and_back(x: Any) -> tuple[Any, Any]:
        matrices = form.to_matrices(x)
        return matrices, from_matrices([(form, matrices)])

    matrices, back = jax.device_get(there_and_back(x))
    assert matrices.shape == (form.count, *form.tile)
    assert block_size is None or max(form.tile) <= block_size
    for matrix, tile in zip(matrices, tiles_by_hand(x, axes, block_size), strict=True):
        padded = np.zeros(form.tile)
        padded[: tile.shape[0], : tile.shape[1]] = tile
        np.testing.assert_array_equal(matrix, padded)
    np.testing.assert_array_equal(back, x)
