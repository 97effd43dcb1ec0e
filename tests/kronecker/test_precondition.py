"""Preconditioning by inverse roots is its formula, in all its settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, run_scanned, share

STEPS = 8


def _root_of(a: np.ndarray, root: int, eps: float, damping: str) -> np.ndarray:
    d, q = np.linalg.eigh(a)
    d = np.maximum(d, 0)
    if damping == "outside":
        values = 1 / (d ** (1 / root) + eps)
    else:
        added = {"absolute": d + eps, "relative": d + eps * d.max(), "floor": np.maximum(d, eps)}
        values = added[damping] ** (-1 / root)
    return (q * values) @ q.T


def _preconditioned(gradients, shape, settings):
    """Directions and states of `precondition` from its definition, for one matrix."""
    s = {"side": "both", "root": 4, "b2": 0.95, "eps": 1e-6} | settings
    m, n = shape
    smaller = "left" if m <= n else "right"
    sides = {"both": ("left", "right"), "smaller": (smaller,)}.get(s["side"], (s["side"],))
    orders = {"left": m, "right": n}
    statistics = {x: s.get("initial", 0.0) * np.eye(orders[x]) for x in sides}
    roots = {x: np.eye(orders[x]) for x in sides}
    momentum, directions, states = np.zeros(shape), [], []
    for t, g in enumerate(gradients, start=1):
        momentum = s["b1"] * momentum + (1 - s["b1"]) * g if "b1" in s else g
        source = momentum if s.get("statistics") == "momentum" else g
        for x in sides:
            gram = source @ source.T if x == "left" else source.T @ source
            if t % s.get("statistics_every", 1) == 0:
                kept, new = (1.0, 1.0) if s["b2"] is None else (s["b2"], 1 - s["b2"])
                statistics[x] = kept * statistics[x] + new * gram
            if t > (warm := s.get("warmup_steps", 0)) and s["refresh"].due(t - warm):
                damping = s.get("damping_mode", "absolute")
                roots[x] = _root_of(statistics[x], s["root"], s["eps"], damping)
        direction = momentum
        if "left" in sides:
            direction = roots["left"] @ direction
        if "right" in sides:
            direction = direction @ roots["right"]
        directions.append(direction * (t > s.get("warmup_steps", 0)))
        states.append({x: (statistics[x], roots[x]) for x in sides})
    return directions, states


PRECONDITIONS = {
    "both sides, root 4": {"refresh": curvax.every(3), "eps": 1e-4},
    "both sides, root 2, sums": {
        "refresh": curvax.every(2, offset=1),
        "root": 2,
        "b2": None,
        "eps": 1e-3,
    },
    "left, root 3": {"refresh": curvax.every(1), "side": "left", "root": 3, "b2": 0.5},
    "right": {"refresh": curvax.every(4, first=False), "side": "right", "eps": 1e-3},
    "smaller": {"refresh": curvax.every(2, offset=1), "side": "smaller", "root": 2},
    "statistics of the momentum": {
        "refresh": curvax.every(2),
        "b1": 0.7,
        "statistics": "momentum",
        "eps": 1e-2,
    },
    "statistics of the gradient": {"refresh": curvax.every(2), "b1": 0.7, "eps": 1e-2},
    "damping outside": {
        "refresh": curvax.every(1),
        "damping_mode": "outside",
        "eps": 0.3,
        "side": "smaller",
    },
    "relative damping": {"refresh": curvax.every(1), "damping_mode": "relative", "eps": 1e-2},
    "floor": {"refresh": curvax.every(1), "damping_mode": "floor", "eps": 0.5, "side": "smaller"},
    "rare statistics, start, warm-up": {
        "refresh": curvax.every(3),
        "statistics_every": 2,
        "initial": 0.1,
        "warmup_steps": 2,
    },
}


@pytest.mark.parametrize("case", share(PRECONDITIONS, of=5))
def test_preconditioning_is_its_formula(case):
    """Of a tall or of a square matrix, in turns; of both for the first case."""
    settings, place = PRECONDITIONS[case], list(PRECONDITIONS).index(case)
    tree = {"square": np.zeros((4, 4)), "tall": np.zeros((5, 3))}
    if place:
        tree = dict(share([*tree.items(), *tree.items()][place % 2 :][:2], of=2))
    arguments = {name: value for name, value in settings.items() if name != "b1"}
    momentum = curvax.momentum(settings["b1"]) if "b1" in settings else None
    with jax.enable_x64(True):
        gradients = gradients_like(tree, STEPS, dtype=jnp.float64)
        transformation = curvax.precondition(momentum, **arguments)
        directions, states = run_scanned(transformation, gradients, gradients[0])
        for name, x in tree.items():
            sequence = [np.asarray(g[name]) for g in gradients]
            expected, expected_states = _preconditioned(sequence, x.shape, settings)
            # Eigenvalues lie between eps (or rounding, in a direction that is not used) and 100.
            condition = 100 / settings.get("eps", 1e-6)
            for t in range(STEPS):
                assert_close(directions[t][name], expected[t], condition=condition)
                for side in ("left", "right"):
                    factor = getattr(states[t][name], side)
                    assert (factor is not None) == (side in expected_states[t])
                    if factor is not None:
                        statistic, root = expected_states[t][side]
                        assert_close(factor.statistic, statistic)
                        assert_close(factor.inverse_root, root, condition=condition)


def test_a_statistic_that_is_not_finite_leaves_the_last_root_in_place():
    transformation = curvax.precondition(refresh=curvax.every(1))
    params = np.zeros((2, 3, 4), np.float32)
    step, state = jax.jit(transformation.update), jax.jit(transformation.init)(params)
    first, second, third = gradients_like(params, 3)
    for gradient in (first, second):
        state = jax.tree.map(np.array, step(gradient, state)[1])
    # The left statistic of one matrix of the batch is lost.
    state.left.statistic[1] = np.nan
    after = jax.tree.map(np.asarray, step(third, state)[1])
    assert np.array_equal(after.left.inverse_root[1], state.left.inverse_root[1])
    assert not np.array_equal(after.left.inverse_root[0], state.left.inverse_root[0])
    assert after.left.rejected.tolist() == [0, 1] and after.left.refreshes.tolist() == [3, 2]
    assert after.right.rejected.tolist() == [0, 0] and after.right.refreshes.tolist() == [3, 3]
