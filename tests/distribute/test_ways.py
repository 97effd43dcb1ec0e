"""Rows come where they are wanted, by whatever way, and no device receives more than it must."""

from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from curvax.transforms.distribute import _ways
from tests.cells import ALL_CELLS
from tests.shared.meshes import mesh_of

MESH = {"x": 2, "y": 4}
EXAMPLES = 100 if ALL_CELLS else 25


def delivered(ways: Any, has: np.ndarray) -> np.ndarray:
    """What each device has at the end, as ids."""

    def mapped(x: jax.Array) -> jax.Array:
        return _ways.along_ways(x[0], *ways)[None]

    spec = P(("x", "y"))
    mesh = mesh_of("auto", *MESH.values())
    step = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(step)(jnp.asarray(has)[..., None]))[..., 0]


def tables(matrices: int, home: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight rows of each matrix at home, at its owner, and spread over all devices.

    Home are two devices, along "x". Owners have one matrix each or none, and then another one.
    """
    ids = np.arange(8 * matrices).reshape(matrices, 2, 4)
    has = _ways.listed(
        [ids[home == y, x].ravel() for x in range(2) for y in range(4)]  # by device
    )
    wants = np.full((8, -(-matrices // 8) * 8), -1)
    for i in range(matrices):
        wants[i % 8, i // 8 * 8 :][:8] = ids[i].ravel()
    return has, wants, ids.reshape(matrices, 8).T


@pytest.mark.parametrize(
    ("matrices", "home", "kinds", "received"),
    [
        (8, lambda i: i % 4, (1, 0), 8),  # along "x" alone
        (8, lambda i: i // 2, (0, 2), 8),
        (12, lambda i: i // 3, (0, 4), 16),
        (12, lambda i: i // 6 * 3, (0, 6), 24),  # as much as two columns have to send
    ],
)
def test_rows_take_the_shortest_way(matrices: int, home: Any, kinds: Any, received: int) -> None:
    has, wants, spread = tables(matrices, home(np.arange(matrices)))
    (way,) = _ways.Ways.best(MESH, has, wants, spread)
    assert (bool(way.along), bool(way.turns)) == (bool(kinds[0]), bool(kinds[1]))
    assert way.cost[0] <= received
    found = delivered([way], has)
    assert np.array_equal(found[wants >= 0], wants[wants >= 0])


def test_rows_are_spread_where_there_were_too_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    has, wants, spread = tables(12, np.arange(12) // 3)
    monkeypatch.setattr(_ways, "TURNS", 1)
    ways = _ways.Ways.best(MESH, has, wants, spread)
    assert [way.cost for way in ways] == [(12, 1), (16, 1)]
    found = delivered(ways, has)
    assert np.array_equal(found[wants >= 0], wants[wants >= 0])


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.integers(1, 9).flatmap(
        lambda n: hnp.arrays(int, (n, n), elements=st.sampled_from([0, 0, 1, 2, 7]))
    )
)
def test_turns_are_as_long_as_the_device_needs_that_has_most_to_do(counts: np.ndarray) -> None:
    turns = [*_ways._turns(counts)]
    left = counts - np.diag(np.diag(counts))
    for amount in turns:
        assert max((amount > 0).sum(0).max(), (amount > 0).sum(1).max()) == 1
    assert np.array_equal(sum(turns, np.zeros_like(left)), left)
    most = max(left.sum(0).max(), left.sum(1).max())
    assert sum(int(amount.max()) for amount in turns) == most
