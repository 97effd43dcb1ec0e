"""Gradients for identities between methods."""

import jax
import numpy as np

from tests.helpers import with_spectrum

NEWTON_SCHULZ = 3.4445**5  # at most this much of a relative error passes through Muon's five steps
STEPS = 6
EPS = float(np.finfo(np.float32).eps)


def gradients_of(*shape: int, steps: int = STEPS, condition: float = 10.0) -> np.ndarray:
    """Float32 gradients with singular values from 1 down to 1 / condition; steps come first."""
    *batch, m, n = shape
    keys = jax.random.split(jax.random.key(0), (steps, *batch)).reshape(-1)
    spectrum = np.geomspace(1, 1 / condition, min(m, n))
    matrices = np.stack([with_spectrum(key, m, n, spectrum) for key in keys])
    return matrices.astype(np.float32).reshape(steps, *shape)


def largest_condition(matrices: np.ndarray) -> float:
    return float(np.linalg.cond(np.asarray(matrices, np.float64)).max())


def of_shapes(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {str(shape): gradients_of(*shape) for shape in shapes}
