"""Degenerate input: updates and states stay finite, bounded and reproducible, whatever comes in.

A method's step is compiled once for a tree of odd shapes and once for 10,000 × 8; inputs are data.
The trees of odd shapes are taken by the methods in turns; with CURVAX_ALL_CELLS each takes all.
A row of the registry states how long a direction can be when a gradient comes again at every step;
with stale roots and bases few methods have a bound for gradients that change (`test_fuzz.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.cases import in_turns
from tests.helpers import ALL_CELLS
from tests.registry import NAMED, REGISTRY, Row, Step, adam

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "wide": {"row/kernel": (1, 5), "pair/kernel": (2, 7, 13)},
    "tall": {"column/kernel": (5, 1), "pair/kernel": (2, 13, 7)},
    "square": {"one/kernel": (1, 1), "pair/kernel": (2, 6, 6), "vector/bias": (5,)},
    "long": {"long/kernel": (10_000, 8)},
}
SPEC = {"pair/kernel": curvax.MatrixAxes(rows=1, columns=2)}
STEPS = 3
LONG: dict[str, dict[str, Any]] = {
    "shampoo": {"side": "smaller"},
    "foam": {"matrices": curvax.MatrixRule(block_size=50)},
    "dr_shampoo": {"matrices": curvax.MatrixRule(block_size=50)},
}
"""For 10,000 rows: a factor of that order has 400 MB, and its decomposition takes hours.

What a user does about it: one side alone, or blocks.
"""

# The inputs: from a standard normal matrix to a degenerate one.


def with_a_huge_element(x: np.ndarray) -> np.ndarray:
    huge = x.copy()
    huge.flat[:: x.shape[-1] * x.shape[-2]] = 1e6  # the first of every matrix
    return huge


INPUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "zero": np.zeros_like,
    "constant": np.ones_like,
    "rank 1": lambda x: x[..., :, :1] * x[..., :1, :],
    "one huge element": with_a_huge_element,
    "denormal": lambda x: 1e-40 * x,
    **{f"times {s:g}": functools.partial(np.multiply, s) for s in (1e-30, 1e-15, 1e15, 1e30)},
}
"""Those times 1e30 have squares beyond float32: they count as zero gradients."""


def gradient(kind: str, name: str | None, seed: int = 0) -> dict[str, jax.Array]:
    """Gradients in shapes of a kind: one of the inputs, or plain normal ones."""
    random = np.random.default_rng(seed)
    change = INPUTS[name] if name else np.copy

    def drawn(shape: tuple[int, ...]) -> jax.Array:
        matrix = random.standard_normal(shape if len(shape) > 1 else (1, *shape))
        return jnp.asarray(change(matrix).reshape(shape), jnp.float32)

    return {key: drawn(shape) for key, shape in SHAPES[kind].items()}


# The properties.


def odd_kinds(row: Row) -> tuple[str, ...]:
    """The kinds of odd shapes with which the tests run a method."""
    kinds = ("wide", "tall", "square")
    return kinds if ALL_CELLS else (kinds[REGISTRY.index(row) % 3],)


@functools.cache
def compiled(row: Row, kind: str) -> tuple[Any, Any]:
    """The state at the start and the jitted step, for shapes of a kind."""
    settings = LONG.get(row.name, {}) if kind == "long" else {"weight_dimension_numbers": SPEC}
    optimizer = row.make(1.0, **settings)
    params = gradient(kind, None)
    return jax.jit(optimizer.init)(params), jax.jit(lambda g, s: optimizer.update(g, s, params))


def run(row: Row, kind: str, gradients: list[Any]) -> tuple[list[Any], Any]:
    """The updates of every step, and the last state, as NumPy arrays."""
    state, step = compiled(row, kind)
    updates = []
    for g in gradients:
        update, state = step(g, state)
        updates.append(update)
    return jax.tree.map(np.asarray, (updates, state))


def assert_sound(row: Row, kind: str, name: str) -> None:
    """One input, three times over: finite, bounded, and bit for bit the same in a second run."""
    same = [gradient(kind, name)] * STEPS
    updates, state = run(row, kind, same)
    again = run(row, kind, same)
    assert_finite((updates, state), name)
    for x, y in zip(jax.tree.leaves((updates, state)), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    usable = not name.endswith("1e+30")
    for t, update in enumerate(updates, start=1):
        for key, leaf in update.items():
            longest = adam if key == "vector/bias" and not row.everything else row.longest_repeated
            for d, g in zip(matrices(leaf), matrices(same[0][key]), strict=True):
                length = float(np.linalg.norm(d.astype(np.float64)))
                bound = 1.001 * longest(at_step(t, g)) if usable and g.any() else 0.0
                assert length <= bound, f"{name}, {key}: {length:.3g} exceeds {bound:.3g}"


def at_step(t: int, g: np.ndarray) -> Step:
    """The step `t` of those that have the same gradient."""
    return Step(g.shape[0], g.shape[1], t, float(np.linalg.norm(g.astype(np.float64))), g)


def assert_finite(tree: Any, name: str) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        assert np.isfinite(x).all(), f"{name}: {jax.tree_util.keystr(path)} is not finite"


def matrices(x: Any) -> np.ndarray:
    x = np.atleast_2d(x)
    return x.reshape(-1, *x.shape[-2:])


@pytest.mark.parametrize("name", INPUTS)
@in_turns(0, of=3)
def test_degenerate_gradients(row: Row, name: str) -> None:
    for kind in odd_kinds(row):
        assert_sound(row, kind, name)


@pytest.mark.parametrize("name", ["constant", "one huge element", "times 1e-30", "times 1e+30"])
@in_turns(2, of=17)
def test_ten_thousand_rows(row: Row, name: str) -> None:
    assert_sound(row, "long", name)


@in_turns(0, of=3)
def test_degenerate_gradients_between_ordinary_ones(row: Row) -> None:
    """Roots and bases are those of another gradient: finite all the same."""
    for kind in odd_kinds(row):
        before, after = gradient(kind, None, 1), gradient(kind, None, 2)
        for name in INPUTS:
            updates, state = run(row, kind, [before, gradient(kind, name), after])
            assert_finite((updates, state), name)


def tiny_leaves() -> dict[str, Any]:
    """1,000 of them: one stack of matrices."""
    return {f"layer_{i:03}": {"kernel": np.full((2, 2), 1 + i, np.float32)} for i in range(1_000)}


def stepped(name: str, gradients: Any) -> Any:
    """The updates of a first step, if they and the state have the structure that they should."""
    optimizer = NAMED[name].make(1.0)
    state = optimizer.init(gradients)
    updates, after = optimizer.update(gradients, state, gradients)
    assert len(jax.tree.leaves(state)) < 20
    assert jax.tree.structure(updates) == jax.tree.structure(gradients)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return updates


def test_a_thousand_tiny_leaves_with_random_keys_are_traced() -> None:
    """A key for each of them."""
    jax.eval_shape(functools.partial(stepped, "galore"), tiny_leaves())


def test_a_thousand_tiny_leaves_are_updated() -> None:
    @jax.jit
    def ends(gradients: Any) -> Any:  # of all other updates XLA compiles nothing: 6 ms each
        updates = stepped("racs", gradients)
        return updates["layer_000"]["kernel"], updates["layer_999"]["kernel"]

    gradients = tiny_leaves()
    for update in ends(gradients):
        np.testing.assert_allclose(update, -0.05 / 0.1 * np.ones((2, 2)), rtol=1e-5)


def test_bounds_are_of_directions_not_of_gradients() -> None:
    """The negative control: for a large gradient, all but Shampoo's are far below its length."""
    at = at_step(STEPS, np.asarray(gradient("wide", "times 1e+15")["pair/kernel"][0]))
    bounds = {row.name: row.longest_repeated(at) for row in REGISTRY}
    assert bounds.pop("shampoo") == at.longest
    assert max(bounds.values()) < 1e-6 * at.longest
