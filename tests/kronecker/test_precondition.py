"""Preconditioning by inverse roots is its formula, in all its settings."""

import functools

import numpy as np
import pytest

import curvax
from tests.helpers import share
from tests.shared.transcriptions import Case, assert_follows

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


def _preconditioned(gradients, **settings):
    """Directions and states of `precondition` from its definition, for one matrix."""
    s = {"side": "both", "root": 4, "b2": 0.95, "eps": 1e-6} | settings
    m, n = shape = gradients[0].shape
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
        states.append({**statistics, **{f"{x} root": roots[x] for x in sides}})
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


@pytest.mark.parametrize("name", share(PRECONDITIONS, of=5))
def test_preconditioning_is_its_formula(name):
    """Of a tall or of a square matrix, in turns; of both for the first case."""
    settings, place = PRECONDITIONS[name], list(PRECONDITIONS).index(name)
    shapes = {"square": (4, 4), "tall": (5, 3)}
    if place:
        shapes = dict(share([*shapes.items(), *shapes.items()][place % 2 :][:2], of=2))
    arguments = {name: value for name, value in settings.items() if name != "b1"}
    momentum = curvax.momentum(settings["b1"]) if "b1" in settings else None
    for kind, (m, n) in shapes.items():
        smaller = "left" if m <= n else "right"
        sides = {"both": ("left", "right"), "smaller": (smaller,)}
        side = settings.get("side", "both")
        states = {f"{x}.statistic": (x, 1.0) for x in sides.get(side, (side,))}
        states |= {f"{x}.inverse_root": (f"{x} root", None) for x in sides.get(side, (side,))}
        case = Case(
            curvax.precondition(momentum, **arguments),
            functools.partial(_preconditioned, **settings),
            {kind: np.random.default_rng(0).standard_normal((STEPS, m, n))},
            # Eigenvalues lie between eps (or rounding, in a direction that is not used) and 100.
            100 / settings.get("eps", 1e-6),
            states,
        )
        assert_follows(case)
