"""Power iteration: the largest eigenvalue, from below."""

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, orthogonal, resolution

N = 12


def _symmetric(a: np.ndarray) -> np.ndarray:
    """The lower triangles, mirrored, in float64."""
    a = np.asarray(a, np.float64)
    return np.tril(a) + np.swapaxes(np.tril(a, -1), -1, -2)


def _positive(condition: float, dtype: str, order: int = N) -> np.ndarray:
    """A batch of positive definite matrices of norm 1: even, few small, and few large eigenvalues.

    Rounded to the dtype and symmetric; returned in float64.
    """
    even = np.geomspace(1 / condition, 1, order)
    few_small = np.where(np.arange(order) < 2, 1 / condition, 1.0)
    few_large = np.where(np.arange(order) < order - 2, 1 / condition, 1.0)
    bases = [orthogonal(jax.random.key(seed), order, order) for seed in range(3)]
    spectra = (even, few_small, few_large)
    batch = np.stack([(q * d) @ q.T for q, d in zip(bases, spectra, strict=True)])
    return _symmetric(batch.astype(dtype))


def _bound(condition: float, dtype: str) -> float:
    return N * (1 + condition) * float(np.finfo(dtype).eps)


_largest = jax.jit(curvax.power_iteration)


@pytest.mark.parametrize("gap", [0.5, 0.9, 0.98])
def test_power_iteration_finds_the_largest_eigenvalue_from_below(gap):
    """The Rayleigh quotient is low by at most `(1 - gap) tan²θ · gap^(2k)`, relative.

    `θ` is the angle between the start, the row sums of `|A|`, and the leading eigenvector;
    `tan²θ` stays below 400 for these matrices.
    """
    spectrum = np.concatenate([[1.0], gap * np.geomspace(1, 1e-3, N - 1)])
    for seed in range(5):
        q = orthogonal(jax.random.key(seed), N, N)
        a = _symmetric(((q * spectrum) @ q.T).astype(np.float32))
        truth, rounding = np.linalg.eigvalsh(a)[-1], _bound(1.0, "float32")
        for iterations in (8, 32, 128):
            estimate = _largest(a.astype(np.float32), iterations)
            low = 1 - float(estimate) / truth
            assert -rounding <= low <= 400 * (1 - gap) * gap ** (2 * iterations) + rounding


@pytest.mark.parametrize("exponent", [-100, -68, 68, 100])
def test_power_iteration_is_exact_under_powers_of_two(exponent):
    a = _positive(100.0, "float32")[0].astype(np.float32)
    assert _largest(np.ldexp(a, exponent)) == _largest(a) * 2.0**exponent


def test_power_iteration_finds_an_eigenvector_that_row_sums_cancel():
    v = np.resize([1.0, -1.0], N) / np.sqrt(N)
    a = np.float32(3 * np.outer(v, v) + 0.5 * np.eye(N))
    assert_close(float(_largest(a)), 3.5, eps=resolution(a))


def test_power_iteration_of_one_number_and_of_zero():
    assert _largest(np.full((1, 1), 3, np.float32)) == 3
    assert _largest(np.zeros((N, N), np.float32)) == 0
    assert np.isnan(_largest(np.full((N, N), np.nan, np.float32)))
