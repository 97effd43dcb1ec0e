"""The polar factor, exact and by Newton-Schulz, on matrices with prescribed spectra."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from curvax import NEWTON_SCHULZ_COEFFICIENTS, newton_schulz, polar_qdwh, polar_svd
from curvax.transforms.linalg._polar import coefficient_rows
from tests.helpers import assert_close, orthogonal, share, with_spectrum

pytestmark = pytest.mark.xdist_group("polar")  # what a method makes of a shape is compiled once
_newton_schulz = jax.jit(newton_schulz, static_argnums=(1, 2))


def _iterated(
    x: Any, coefficients: Any = "quintic", steps: int = 5, eps: float = 1e-8
) -> jax.Array:
    """`newton_schulz` with its own defaults, compiled once for all `eps`."""
    return _newton_schulz(x, coefficients, steps, eps)


EXACT = {"svd": jax.jit(polar_svd), "qdwh": jax.jit(polar_qdwh)}
ALL = {**EXACT, "newton_schulz": _iterated}
SHAPES = [(8, 13), (13, 8), (9, 9), (1, 7), (7, 1)]
CONDITIONS = [1.0, 10.0, 1e2, 1e3, 1e4]
EPS = float(np.finfo(np.float32).eps)
BFLOAT16_EPS = float(jnp.finfo(jnp.bfloat16).eps)
every_exact_method = pytest.mark.parametrize("method", EXACT)
every_method = pytest.mark.parametrize("method", ALL)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _matrices(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """One float32 matrix for every condition number: singular values from 1 down."""
    keys = jax.random.split(jax.random.key(seed), len(CONDITIONS))
    spectra = [np.geomspace(1, 1 / condition, min(shape)) for condition in CONDITIONS]
    matrices = [with_spectrum(key, *shape, s) for key, s in zip(keys, spectra, strict=True)]
    return np.stack(matrices).astype(np.float32)


def _polar_of(x: np.ndarray) -> np.ndarray:
    """The polar factor by NumPy's SVD, in the dtype of `x`."""
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def _gram(x: Any) -> np.ndarray:
    """The smaller of `x xᵀ` and `xᵀ x`, in float64: the identity if `x` is orthogonal."""
    x = np.asarray(x, np.float64)
    return x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x


def _singular_values(x: Any) -> np.ndarray:
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


def _composed(name: str, steps: int, values: np.ndarray) -> np.ndarray:
    """What `steps` iterations make of singular values, in float64."""
    for a, b, c in coefficient_rows(name, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def _amplification(name: str, steps: int) -> float:
    """The largest factor by which `steps` iterations multiply a perturbation: max |p'| is a."""
    return float(np.prod([row[0] for row in coefficient_rows(name, steps)]))


@every_exact_method
@every_shape
def test_exact_polar_factors_are_orthogonal_whatever_the_condition(method, shape):
    gram = _gram(EXACT[method](_matrices(shape)))
    assert_close(gram, np.broadcast_to(np.eye(min(shape)), gram.shape), eps=EPS)


@every_exact_method
@every_shape
def test_exact_polar_factors_are_as_good_as_those_of_a_float32_svd(method, shape):
    """On average over matrices of a condition number: errors of single ones vary by ten times."""
    x = np.stack([_matrices(shape, seed) for seed in range(12)])
    exact = _polar_of(x.astype(np.float64))

    def stock(a: np.ndarray) -> np.ndarray:  # unlike NumPy's, SciPy's works in float32
        u, _, vt = scipy.linalg.svd(a, full_matrices=False)
        return u @ vt

    def errors(factors: Any) -> np.ndarray:
        largest = np.abs(np.asarray(factors, np.float64) - exact).max(axis=(-2, -1))
        return np.sqrt(np.mean(largest**2, axis=0))

    found = errors([EXACT[method](matrices) for matrices in x])
    expected = errors([[stock(a) for a in matrices] for matrices in x])
    # No error has to be below the rounding of an entry.
    assert np.all(found <= 2 * np.maximum(expected, EPS))


@every_exact_method
def test_exact_polar_factors_are_the_nearest_orthogonal_matrices(method):
    # Xᵀ D is symmetric positive semi-definite exactly if D is the polar factor of X.
    x = _matrices((9, 9)).astype(np.float64)
    product = x.mT @ np.asarray(EXACT[method](x.astype(np.float32)), np.float64)
    assert_close(product, product.mT, eps=EPS)
    assert np.linalg.eigvalsh((product + product.mT) / 2).min() > -16 * EPS


@every_exact_method
@pytest.mark.parametrize("exponent", [-100, 100])
def test_exact_polar_factors_do_not_depend_on_the_scale(method, exponent):
    x = _matrices((8, 13))
    scaled, plain = EXACT[method](np.ldexp(x, exponent)), EXACT[method](x)
    for i, condition in enumerate(CONDITIONS):
        assert_close(scaled[i], plain[i], condition=condition)


SCHEDULES = [
    ("quintic", 5),
    ("quintic", 6),
    ("classical", 1),
    ("classical", 8),
    ("polar_express", 5),
]


# In steps of one, and from a ratio of 2 on of three.
ITERATED = [(8, 13), (13, 8), (9, 9), (6, 12), (20, 6)]


@pytest.mark.parametrize(
    ("name", "steps", "shape"),
    share(((*schedule, shape) for schedule in SCHEDULES for shape in ITERATED), of=3),
)
def test_newton_schulz_maps_singular_values_and_keeps_singular_vectors(name, steps, shape):
    x = _matrices(shape)
    u, values, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    values = values / np.linalg.norm(values, axis=-1, keepdims=True)
    expected = (u * _composed(name, steps, values)[..., None, :]) @ vt
    assert_close(_iterated(x, name, steps), expected, condition=_amplification(name, steps))


def test_classical_coefficients_converge_to_the_polar_factor():
    x = _matrices((8, 13))[:3]  # condition up to 100: singular values from 4e-3 after scaling
    exact = _polar_of(x.astype(np.float64))
    errors = [
        np.abs(np.asarray(_iterated(x, "classical", steps)) - exact).max() for steps in (2, 4, 8)
    ]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    converged = _iterated(x, "classical", 12)
    assert_close(_singular_values(converged), np.ones((3, 8)), eps=EPS)
    assert_close(converged, exact, condition=2 * CONDITIONS[2])


def test_quintic_coefficients_end_in_the_documented_interval_and_not_at_1():
    smallest = 3e-3  # a singular value of the scaled matrix that five steps still bring up
    grid = _composed("quintic", 5, np.geomspace(smallest, 1, 100_001))
    assert 0.68 < grid.min() < 0.7 and 1.1 < grid.max() < 1.21
    keys = jax.random.split(jax.random.key(0), 3)
    x = np.stack([with_spectrum(key, 12, 17, np.geomspace(1, 0.01, 12)) for key in keys])
    values = _singular_values(_iterated(x.astype(np.float32)))
    assert values.min() > 0.68 and values.max() < 1.21
    further = _singular_values(_iterated(x.astype(np.float32), steps=40))
    assert np.abs(further - 1).max() > 0.05


def test_polar_express_reaches_1_from_singular_values_down_to_a_thousandth():
    grid = np.geomspace(1e-3, 1, 100_001)
    errors = [np.abs(_composed("polar_express", k, grid) - 1).max() for k in range(1, 9)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[5] < 6e-3 and errors[7] < 1e-14

    values = np.geomspace(2.5e-3, 1, 12)
    x = with_spectrum(jax.random.key(1), 12, 15, values).astype(np.float32)
    scaled = values / np.linalg.norm(values)
    assert scaled.min() > 1e-3
    assert np.abs(_singular_values(_iterated(x, "polar_express", 6)) - 1).max() < 6e-3
    reached = _iterated(x, "polar_express", 8)
    assert_close(_singular_values(reached), np.ones(12), eps=EPS)
    assert_close(reached, _polar_of(x.astype(np.float64)), condition=1 / scaled.min())


def test_polar_express_is_better_than_any_other_coefficients_after_few_steps():
    grid = np.geomspace(1e-3, 1, 10_001)
    for steps in (4, 5, 6, 7):
        worst = {
            name: np.abs(_composed(name, steps, grid) - 1).max()
            for name in NEWTON_SCHULZ_COEFFICIENTS
        }
        assert min(worst, key=worst.__getitem__) == "polar_express", (steps, worst)


def test_a_short_schedule_repeats_its_last_row_and_a_long_one_is_cut():
    rows = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
    x = _matrices((8, 13))
    for steps, equal in ((1, rows[:1]), (4, (*rows, rows[1], rows[1]))):
        assert np.array_equal(_iterated(x, rows, steps), _iterated(x, equal, steps))
    assert np.array_equal(_iterated(x, rows[0], 3), _iterated(x, rows[:1] * 3, 3))


@pytest.mark.parametrize("name", NEWTON_SCHULZ_COEFFICIENTS)
def test_iterations_are_a_loop_and_not_unrolled(name):
    x = np.ones((4, 6), np.float32)

    def primitives(steps: int) -> list[str]:
        jaxpr = jax.make_jaxpr(partial(newton_schulz, coefficients=name, steps=steps))(x)
        return [equation.primitive.name for equation in jaxpr.eqns]

    few, many = primitives(9), primitives(40)
    assert sum(primitive in ("scan", "while") for primitive in few) == 1
    assert few == many


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)], ids=str)
def test_iterations_work_on_the_smaller_side(shape):
    jaxpr = str(jax.make_jaxpr(newton_schulz)(np.ones(shape, np.float32)))
    assert "dot_general" in jaxpr and "[4,4]" in jaxpr and "[9,9]" not in jaxpr


@pytest.mark.parametrize("exponent", [-30, -1, 1, 30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_newton_schulz_without_eps_ignores_powers_of_two_bit_for_bit(exponent, dtype):
    x = _matrices((8, 13)).astype(dtype)
    scaled = x * x.dtype.type(2.0**exponent)
    factor, of_scaled = (ALL["newton_schulz"](a, eps=0.0) for a in (x, scaled))
    assert np.array_equal(of_scaled, factor)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("exponent", [-100, 100])
def test_newton_schulz_of_tiny_and_huge_matrices_is_finite(exponent, eps):
    x = np.ldexp(_matrices((8, 13)), exponent)
    assert np.isfinite(ALL["newton_schulz"](x, eps=eps)).all()


@every_method
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (5, 8, 13)),
        ("float32", (5, 13, 8)),
        ("bfloat16", (5, 8, 13)),
        ("float16", (13, 8)),
    ],
    ids=str,
)
def test_a_zero_matrix_gives_zero(method, dtype, shape):
    factor = ALL[method](np.zeros(shape, dtype))
    assert factor.dtype == dtype
    assert np.array_equal(np.asarray(factor, np.float32), np.zeros(shape))


def test_a_zero_matrix_gives_zero_without_eps():
    zero = np.zeros((5, 8, 13), np.float32)
    assert np.array_equal(_iterated(zero, eps=0.0), zero)


@every_method
@pytest.mark.parametrize("shape", [(8, 13), (9, 9)], ids=str)
def test_transposing_the_matrix_transposes_its_polar_factor(method, shape):
    x = _matrices(shape)
    factor, transposed = np.asarray(ALL[method](x)), ALL[method](x.mT)
    for i, condition in enumerate(CONDITIONS):
        condition = _amplification("quintic", 5) if method == "newton_schulz" else condition
        assert_close(transposed[i], factor[i].T, condition=condition)


RANKS = [1, 2, 3, 4, 5]


def _deficient(shape: tuple[int, int]) -> np.ndarray:
    """One float32 matrix of every rank, with singular values from 1 to 0.2."""
    keys = jax.random.split(jax.random.key(2), len(RANKS))
    spectra = [np.geomspace(1, 0.2, rank) for rank in RANKS]
    matrices = [with_spectrum(key, *shape, s) for key, s in zip(keys, spectra, strict=True)]
    return np.stack(matrices).astype(np.float32)


@pytest.mark.parametrize("method", ["svd", "newton_schulz"])
@pytest.mark.parametrize("shape", [(8, 13), (9, 9)], ids=str)
def test_singular_values_that_are_zero_stay_zero(method, shape):
    x = _deficient(shape)
    factors = ALL[method](x)
    u, _, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    noise = EPS if method == "svd" else _amplification("quintic", 5) * EPS
    for i, rank in enumerate(RANKS):
        values = _singular_values(factors[i])
        assert values[:rank].min() > 0.68
        assert values[rank:].max() < 16 * noise
        if method == "svd":
            assert_close(factors[i], u[i, :, :rank] @ vt[i, :rank], condition=5.0)


def test_qdwh_fills_the_null_space_and_is_right_on_the_range():
    x = _deficient((8, 13))
    factors = np.asarray(EXACT["qdwh"](x), np.float64)
    u, _, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    for i, rank in enumerate(RANKS):
        assert_close(factors[i] @ factors[i].T, np.eye(8), eps=EPS)
        assert_close(u[i, :, :rank].T @ factors[i], vt[i, :rank], condition=5.0, eps=EPS)


@every_method
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30, 0.0])
def test_matrices_of_a_batch_never_influence_each_other(method, poison):
    x = _matrices((8, 13))
    clean = np.asarray(ALL[method](x))
    x[1] *= poison
    others = [0, 2, 3, 4]
    assert np.array_equal(np.asarray(ALL[method](x))[others], clean[others])


@every_method
def test_a_batch_is_the_matrices_one_by_one(method):
    x = _matrices((8, 13))
    together = ALL[method](x[:, None])
    assert together.shape == (5, 1, 8, 13)
    for i, condition in enumerate(CONDITIONS):
        condition = _amplification("quintic", 5) if method == "newton_schulz" else condition
        assert_close(together[i, 0], ALL[method](x[i]), condition=condition)


@every_exact_method
def test_exact_methods_round_to_bfloat16_once(method):
    x = _matrices((8, 13)).astype(jnp.bfloat16)
    factor = EXACT[method](x)
    assert factor.dtype == jnp.bfloat16
    exact = _polar_of(x.astype(np.float64))
    assert_close(factor[:3], exact[:3], 0.5, eps=BFLOAT16_EPS + 32 * CONDITIONS[2] * EPS)


def test_newton_schulz_in_bfloat16_stays_bfloat16_and_near_its_interval():
    x = with_spectrum(jax.random.key(4), 24, 40, np.geomspace(1, 0.1, 24))
    factor = _iterated(x.astype(jnp.bfloat16))
    assert factor.dtype == jnp.bfloat16
    values = _singular_values(factor)
    # The last step multiplies rounding errors by at most its first coefficient.
    slack = 3.4445 * BFLOAT16_EPS
    assert values.min() > 0.68 - slack and values.max() < 1.21 + slack


SPECTRA = {"gaussian": None, "decaying": np.geomspace(1, 1e-4, 128)}
ERRORS = [
    ("gaussian", "quintic", {"bfloat16": 0.031, "float16": 0.004, "float32": 2e-6}),
    ("decaying", "quintic", {"bfloat16": 0.10, "float16": 0.013, "float32": 1e-5}),
    ("decaying", "polar_express", {"bfloat16": 0.19, "float16": 0.023, "float32": 2e-5}),
]


@pytest.mark.parametrize(("spectrum", "name", "errors"), ERRORS)
def test_errors_against_float64_are_those_of_the_docstring(spectrum, name, errors):
    """In half precision too, the Gram matrix is shared by three iterations and restarted once."""
    values = SPECTRA[spectrum]
    if values is None:
        x = np.random.default_rng(0).standard_normal((128, 512))
    else:
        x = with_spectrum(jax.random.key(0), 128, 512, values)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    exact = (u * _composed(name, 5, s / np.linalg.norm(s))) @ vt
    for dtype, documented in errors.items():
        run = jax.jit(partial(newton_schulz, coefficients=name, work_dtype=dtype))
        found = run(jnp.asarray(x, jnp.float32))
        assert found.dtype == jnp.float32
        error = np.linalg.norm(np.float64(found) - exact) / np.linalg.norm(exact)
        assert documented / 3 < error < 1.3 * documented, (dtype, error)


@pytest.mark.parametrize("shape", [(8, 13), (13, 8), (9, 9), (4, 12)])
def test_aol_starts_below_1_and_is_exact_for_orthogonal_rows(shape):
    """Its first iterate has a spectral norm of at most 1; rows of any length stay orthogonal."""
    identity = (1.0, 0.0, 0.0)
    x = np.random.default_rng(0).standard_normal(shape)
    start = newton_schulz(jnp.asarray(x, jnp.float32), identity, 1, norm="aol")
    assert 0.5 < _singular_values(start).max() <= 1 + 1e-5
    frobenius = newton_schulz(jnp.asarray(x, jnp.float32), identity, 1)
    assert _singular_values(start).min() > _singular_values(frobenius).min()
    m, n = min(shape), max(shape)
    orthogonal = np.geomspace(1, 0.1, m)[:, None] * np.linalg.qr(x.reshape(n, m))[0].T
    orthogonal = orthogonal if shape[0] <= shape[1] else orthogonal.T
    found = newton_schulz(jnp.asarray(orthogonal, jnp.float32), identity, 1, norm="aol")
    assert_close(np.float32(_gram(found)), np.eye(m), 64, condition=10.0)


def test_aol_saves_an_iteration_and_bends_the_limit():
    square, wide = (np.random.default_rng(0).standard_normal((64, n)) for n in (64, 128))

    def error(x: np.ndarray, steps: int, norm: str) -> float:
        found = newton_schulz(jnp.asarray(x, jnp.float32), "classical", steps, norm=norm)
        return float(np.linalg.norm(found - _polar_of(x)) / 8)

    assert error(square, 4, "aol") < error(square, 5, "frobenius")
    assert error(wide, 6, "frobenius") < 1e-3 < error(wide, 6, "aol") < 0.02


def test_an_orthogonal_matrix_is_its_own_polar_factor():
    keys = jax.random.split(jax.random.key(5), 5)
    q = np.float32([orthogonal(key, 13, 8) for key in keys])
    for function in EXACT.values():
        assert_close(function(q), q)
