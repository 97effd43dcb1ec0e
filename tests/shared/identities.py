"""Trajectories for identities between methods; decay rates and the like are data."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import curvax
from tests.helpers import orthogonal, scanned, with_spectrum

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


def of_shapes(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {str(shape): gradients_of(*shape) for shape in shapes}


@functools.cache
def compiled(factory: Callable[..., Any], settings: tuple[tuple[str, Any], ...]) -> Any:
    """What `scanned` returns, for the arguments that are data."""

    def make(data: dict[str, Any]) -> Any:
        arguments = {**dict(settings), **data}
        if "period" in data:
            arguments["refresh"] = curvax.every(arguments.pop("period"), offset=1)
        return factory(**arguments)

    return scanned(make)


def both(factory: Any, gradients: Any, data: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Directions and states of all steps, which come first."""
    return compiled(factory, tuple(settings.items()))(gradients, data or {})


def run_muon(gradients: Any, b1: float = 0.95, nesterov: bool = True, **settings: Any) -> Any:
    return both(curvax.scale_by_muon, gradients, {"b1": b1}, nesterov=nesterov, **settings)[0]


def run_racs(
    gradients: Any, iterations: int = 5, bias_correction: bool = False, **data: Any
) -> Any:
    """Directions and states."""
    settings = {"iterations": iterations, "bias_correction": bias_correction}
    numbers = {"b2": 0.9, "gamma": 1.01, "scale": 0.05}
    return both(curvax.scale_by_racs, gradients, {**numbers, **data}, **settings)


def updates_of(optimizer: Any, gradients: Any, params: Any = None) -> Any:
    """A full optimizer's, of all steps; the parameters stay as they are, at 0 without any."""
    return scanned(optimizer)(gradients, params=params)[0]


def largest_condition(momenta: list[np.ndarray]) -> float:
    return max(float(np.linalg.cond(np.asarray(m, np.float64))) for m in momenta)


def all_rotated(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def turned(x: np.ndarray) -> np.ndarray:
        left, right = (
            orthogonal(jax.random.key(i), size, size).astype(x.dtype)
            for i, size in enumerate(x.shape[-2:])
        )
        return left @ x @ right

    return jax.tree.map(turned, tree)


def all_transposed(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every matrix transposed, under the name of its new shape."""
    return {str(x.mT.shape[1:]): x.mT for x in tree.values()}


def exact_muon(gradients: Any) -> Any:
    return run_muon(gradients, 0.9, nesterov=False, method="svd")
