"""Every number of a part is in one piece, and every number of a tile comes from one."""

import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.distribute._cuts import cut_of, taken
from tests.cells import ALL_CELLS

EXAMPLES = 400 if ALL_CELLS else 60


@st.composite
def sides(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int, int]:
    """The axes of rows, into how many parts each is divided, and tiles in a stretch of them."""
    axes = draw(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 7)), max_size=3))
    lengths, parts = tuple(k * n for k, n in axes), tuple(k for k, _ in axes)
    rows = math.prod(lengths)
    start = draw(st.integers(0, rows - 1))
    length = draw(st.integers(1, rows - start))
    return lengths, parts, start, length, draw(st.integers(1, length))


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@hypothesis.given(sides())
def test_tiles_are_assembled_from_pieces_and_parts_come_back(
    side: tuple[tuple[int, ...], tuple[int, ...], int, int, int],
) -> None:
    lengths, parts, start, length, tile = side
    cut = cut_of(*side)
    split = [n for axis, k in zip(lengths, parts, strict=True) for n in (k, axis // k)]
    x = 1 + np.arange(math.prod(lengths))
    lies = x.reshape(split).transpose(*range(0, len(split), 2), *range(1, len(split), 2))
    lies = lies.reshape(math.prod(parts), -1)
    tiles = np.pad(x[start : start + length], (0, -length % tile)).reshape(-1, tile)

    def at(x: np.ndarray, table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.pad(x, ((0, 0), (0, 1))), table, 1)

    pieces = at(lies, cut.there).reshape(len(lies), -1, cut.width)
    there = cut.of_parts[..., 0] >= 0
    places = tuple(cut.of_parts[there].T)
    rows = np.full((len(tiles), cut.number, cut.width), -1)  # what nobody sends must not be seen
    rows[places] = pieces[there]
    assert len({*zip(*places, strict=True)}) == there.sum()
    assert np.array_equal(at(rows.reshape(len(tiles), -1), cut.whole), tiles)
    rows = at(tiles, cut.back).reshape(len(tiles), -1, cut.width)
    back = np.full_like(pieces, -1)
    back[there] = rows[places]
    inside = (lies > start) & (lies <= start + length)
    assert np.array_equal(at(back.reshape(len(lies), -1), cut.home), np.where(inside, lies, 0))
    if cut.together:
        assert np.array_equal(np.sort(places[0]), np.repeat(np.arange(len(tiles)), cut.number))


@pytest.mark.parametrize(
    ("side", "number", "width"),
    [
        (((32,), (4,), 0, 32, 32), 4, 8),
        (((6, 8), (2, 1), 0, 48, 48), 2, 24),  # heads
        (((48,), (8,), 0, 48, 8), 4, 2),  # merged heads across devices: the common divisor
        (((80,), (8,), 0, 80, 27), 4, 10),  # it would be too small here
        (((48,), (4,), 32, 8, 8), 2, 4),  # a part of the columns
        (((30,), (1,), 0, 30, 8), 1, 8),  # the last block ends with zeros
    ],
)
def test_pieces_are_few_and_without_padding_where_that_is_possible(
    side: tuple[tuple[int, ...], tuple[int, ...], int, int, int], number: int, width: int
) -> None:
    cut = cut_of(*side)
    assert (cut.number, cut.width) == (number, width)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([[1, 2], [1, 2]], [[2, 3], [6, 7]]),  # as a slice
        ([[4, 0, 1, 4], [4, 0, 1, 4]], [[0, 1, 2, 0], [0, 5, 6, 0]]),
        ([[3, 0, 4], [3, 0, 4]], [[4, 1, 0], [8, 5, 0]]),
        ([[0, 4], [2, 3]], [[1, 0], [7, 8]]),
    ],
)
def test_places_of_an_axis(table: list[list[int]], expected: list[list[int]]) -> None:
    x = jnp.arange(1, 9).reshape(2, 4)
    found = taken(x, np.array(table), lambda: jnp.arange(2), 1)
    assert found.tolist() == expected
    found = taken(x, np.array(table), lambda: 0, 1)
    assert found[0].tolist() == expected[0]
