"""A state with an entry that is not finite heals, and says so, whatever the entry belongs to."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_faults import each

import curvax
from curvax.transforms.directions._moment_ratio import ratio
from curvax.transforms.linalg._numerics import magnitude
from tests.algebra import leaves_in
from tests.cells import cells
from tests.fault_model import CELLS, Cell
from tests.helpers import gradients_like, stacked
from tests.shared.damage import damaged
from tests.shared.reports import table

PERIOD, STEPS = 4, 9  # before the damage, and after it
PARAMS = {
    "a": {"kernel": np.ones((4, 6), np.float32)},
    "b": {"kernel": np.ones((4, 6), np.float32)},  # in the stack of `a`
    "tall": {"kernel": np.ones((6, 4), np.float32)},
}
OF_OPTAX = ("nu", "trace")
"""Fields of Optax's own transformations: an infinite second moment makes an entry's update zero,
without a trace in the direction, and OSGDM's momentum is behind the matrices."""


@functools.cache
def given(cell: Cell) -> tuple[Any, Any, Any, Any]:
    """The optimizer, a program for some steps, the state after them, and further gradients."""
    optimizer = cell.make(0.1, PERIOD)
    first, second = (stacked(gradients_like(PARAMS, STEPS, seed)) for seed in range(2))

    def step(state: Any, gradient: Any) -> Any:
        return optimizer.update(gradient, state, PARAMS)[::-1]

    run = jax.jit(lambda state, gradients: jax.lax.scan(step, state, gradients))
    state, _ = jax.device_get(run(jax.jit(optimizer.init)(PARAMS), first))
    return optimizer, run, state, second


def is_finite(tree: Any) -> bool:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return all(np.isfinite(x).all() for x in floats)


def restarts(state: Any) -> int:
    return sum(int(np.sum(x)) for x in leaves_in(state, ["restarted"])["restarted"])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@each(cells(CELLS, of=120))
def test_a_damaged_state_heals(cell: Cell, value: float) -> None:
    """At most one update is zero; no other matrix, in the same stack or not, notices."""
    optimizer, run, state, gradients = given(cell)
    end, clean = jax.device_get(run(state, gradients))
    reported = None
    for place, spoiled in damaged(state, value):
        if cell.method != "soap" and any(f".{name}" in place for name in OF_OPTAX):
            continue
        after, updates = jax.device_get(run(spoiled, gradients))
        assert is_finite((updates, after)), place
        struck = "tall" if "'6x4'" in place else "a"
        moves = updates[struck]["kernel"].any(axis=(1, 2))
        assert all(moves[1:]), f"{place}: {moves}"
        if not moves[0] or re.search(r"\['\dx\d'\].*\.(statistic|tracked)$", place):
            assert restarts(after) > restarts(end), place
            reported = f"{struck}/kernel", after
        for name in PARAMS.keys() - {struck}:
            assert np.array_equal(updates[name]["kernel"], clean[name]["kernel"]), place
    if reported:
        counts = table(curvax.report(optimizer, PARAMS, reported[1]))[reported[0]]
        assert counts["restarted"].endswith("1")


def test_a_nan_among_many_entries_shows() -> None:
    """XLA for CPUs takes maxima of 4096 floats or more from a library that leaves out NaN."""
    one = jnp.ones((64, 64))
    x = one.at[3, 5].set(jnp.nan)
    assert np.isnan(magnitude(x)) and magnitude(one.at[3, 5].set(-7.0)) == 7
    assert np.isnan(ratio(one, x)).all()


def test_what_has_not_healed_is_reported() -> None:
    optimizer = curvax.muon(0.1)
    params = {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(3, np.float32)}
    state = optimizer.init(params)
    assert "nonfinite" not in curvax.report(optimizer, params, state)
    spoiled = {place: x for place, x in damaged(state, np.nan)}
    (place,) = (x for x in spoiled if "['4x6']" in x and x.endswith(".mu"))
    rows = table(curvax.report(optimizer, params, spoiled[place]))
    assert rows["kernel"]["nonfinite"] == "1" and rows["bias"]["nonfinite"] == "0"
