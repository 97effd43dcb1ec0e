"""Gradients with well separated singular directions, and low-rank methods on them."""

from typing import Any

import numpy as np

from tests.helpers import scanned

STEPS = 30
RANK = 3
SHAPES = {"wide": (6, 9), "tall": (9, 6), "square": (7, 7)}


def _gradients(shape, seed=0):
    """Noise about a mean of well separated directions."""
    generator = np.random.default_rng([seed, *shape])
    m, n = shape
    left, _ = np.linalg.qr(generator.standard_normal((m, m)))
    right, _ = np.linalg.qr(generator.standard_normal((n, n)))
    k = min(m, n)
    mean = (left[:, :k] * 4.0 ** -np.arange(k)) @ right[:, :k].T
    return [8 * mean + 0.3 * generator.standard_normal(shape) for _ in range(STEPS)]


GRADIENTS = {name: _gradients(shape) for name, shape in SHAPES.items()}
TRANSPOSED = {name: GRADIENTS[name] for name in ("wide", "tall")}  # of transposed shapes


def trajectories(transformation, gradients=GRADIENTS, dtype="float64", value: Any = 1):
    """Directions and states of a transformation, or of what `transformation(value)` makes."""
    given = {name: np.asarray(np.stack(g), dtype) for name, g in gradients.items()}
    return scanned(transformation)(given, value)


def due_steps(period, offset=0):
    return [t for t in range(1, STEPS + 1) if t == 1 or (t - offset) % period == 0]


def oriented(name, x, side="smaller"):
    """A state of ours as the transcription has it, with the projected side on the left."""
    m, n = SHAPES[name]
    right = side == "right" or (side == "smaller" and m > n)
    return np.swapaxes(x, -1, -2) if right else np.asarray(x)


CONDITION = 1e4  # gaps between singular values; the smallest second moments
