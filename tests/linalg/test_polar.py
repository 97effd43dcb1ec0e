"""The polar factor, exact and by Newton-Schulz, on matrices with prescribed spectra."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import curvax
from curvax import NEWTON_SCHULZ_COEFFICIENTS, newton_schulz, polar_qdwh, polar_svd
from curvax.transforms.linalg._polar import coefficient_rows
from tests.cells import cells
from tests.helpers import assert_close, with_spectrum
from tests.reference.muon import newton_schulz as transcribed
from tests.reference.polar_express import composition, deepseek_v4, polar_express_for

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
    spectra = [np.geomspace(1, 1 / condition, min(shape)) for condition in CONDITIONS]
    return _of_spectra(shape, spectra, seed)


def _of_spectra(shape: tuple[int, int], spectra: list[np.ndarray], seed: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(seed), len(spectra))
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


def _composed(name: Any, steps: int, values: np.ndarray) -> np.ndarray:
    """What `steps` iterations make of singular values, in float64; or those of rows."""
    for a, b, c in coefficient_rows(name, steps) if isinstance(name, str) else name:
        values = a * values + b * values**3 + c * values**5
    return values


def _amplification(name: str, steps: int) -> float:
    """The largest factor by which `steps` iterations multiply a perturbation: max |p'| is a."""
    return float(np.prod([row[0] for row in coefficient_rows(name, steps)]))


@every_exact_method
@every_shape
def test_exact_polar_factors_are_orthogonal_and_as_good_as_those_of_a_float32_svd(method, shape):
    """The second on average over matrices of a condition number: single ones vary by ten times."""
    x = np.stack([_matrices(shape, seed) for seed in range(12)])
    exact = _polar_of(x.astype(np.float64))

    def stock(a: np.ndarray) -> np.ndarray:  # unlike NumPy's, SciPy's works in float32
        u, _, vt = scipy.linalg.svd(a, full_matrices=False)
        return u @ vt

    def errors(factors: Any) -> np.ndarray:
        largest = np.abs(np.asarray(factors, np.float64) - exact).max(axis=(-2, -1))
        return np.sqrt(np.mean(largest**2, axis=0))

    factors = np.stack([EXACT[method](matrices) for matrices in x])
    gram = _gram(factors)
    assert_close(gram, np.broadcast_to(np.eye(min(shape)), gram.shape), eps=EPS)
    found = errors(factors)
    expected = errors([[stock(a) for a in matrices] for matrices in x])
    # No error has to be below the rounding of an entry.
    assert np.all(found <= 2 * np.maximum(expected, EPS))


@every_exact_method
@pytest.mark.parametrize("exponent", [-100, 100])
def test_exact_polar_factors_do_not_depend_on_the_scale(method, exponent):
    x = _matrices((8, 13))
    scaled, plain = EXACT[method](np.ldexp(x, exponent)), EXACT[method](x)
    for i, condition in enumerate(CONDITIONS):
        assert_close(scaled[i], plain[i], condition=condition)


SCHEDULES = [("quintic", 5), ("quintic", 6), ("classical", 1), ("classical", 8)]
SCHEDULES += [("polar_express", 5)]

# In steps of one, and from a ratio of 2 on of three.
ITERATED = [(8, 13), (13, 8), (9, 9), (6, 12), (20, 6)]


@pytest.mark.parametrize(
    ("name", "steps", "shape"),
    cells(((*schedule, shape) for schedule in SCHEDULES for shape in ITERATED), of=6),
)
def test_newton_schulz_maps_singular_values_and_keeps_singular_vectors(name, steps, shape):
    x = _matrices(shape)
    u, values, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    values = values / np.linalg.norm(values, axis=-1, keepdims=True)
    expected = (u * _composed(name, steps, values)[..., None, :]) @ vt
    assert_close(_iterated(x, name, steps), expected, condition=_amplification(name, steps))


def test_iterations_converge_or_end_in_the_documented_interval():
    """As polynomials of singular values, which the test above has them to be."""
    five = _composed("quintic", 5, np.geomspace(3e-3, 1, 100_001))
    assert 0.68 < five.min() < 0.7 and 1.1 < five.max() < 1.21
    assert np.abs(_composed("quintic", 40, np.geomspace(3e-3, 1, 101)) - 1).max() > 0.05
    assert_close(_composed("classical", 12, np.geomspace(4e-3, 1, 101)), np.ones(101))
    grid = np.geomspace(1e-3, 1, 10_001)
    errors = [np.abs(_composed("polar_express", k, grid) - 1).max() for k in range(1, 9)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[5] < 6e-3 and errors[7] < 1e-14
    for steps in (4, 5, 6, 7):
        worst = {
            name: np.abs(_composed(name, steps, grid) - 1).max()
            for name in NEWTON_SCHULZ_COEFFICIENTS
        }
        assert min(worst, key=worst.__getitem__) == "polar_express", (steps, worst)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=str)
@pytest.mark.parametrize("name", NEWTON_SCHULZ_COEFFICIENTS)
def test_iterations_are_a_loop_and_work_on_the_smaller_side(name, shape):
    few, many = (
        jax.make_jaxpr(partial(newton_schulz, coefficients=name, steps=steps))(
            np.ones(shape, np.float32)
        )
        for steps in (9, 40)
    )
    primitives = [equation.primitive.name for equation in few.eqns]
    assert sum(primitive in ("scan", "while") for primitive in primitives) == 1
    assert primitives == [equation.primitive.name for equation in many.eqns]
    assert "[4,4]" in str(few) and "[6,6]" not in str(few)


@pytest.mark.parametrize("exponent", [-100, -30, -1, 1, 30, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_newton_schulz_without_eps_ignores_powers_of_two_bit_for_bit(exponent, dtype):
    x = _matrices((8, 13)).astype(dtype)
    scaled = x * x.dtype.type(2.0**exponent)
    factor, of_scaled = (ALL["newton_schulz"](a, eps=0.0) for a in (x, scaled))
    assert np.array_equal(of_scaled, factor) and factor.dtype == dtype
    assert np.isfinite(ALL["newton_schulz"](scaled)).all() and np.isfinite(of_scaled).all()


@pytest.mark.parametrize(
    ("method", "shape"),
    [*itertools.product(("svd", "newton_schulz"), [(8, 13), (9, 9)]), ("qdwh", (8, 13))],
    ids=str,
)
def test_null_spaces_are_kept_or_filled_and_ranges_are_right(method, shape):
    """Singular values that are zero stay zero, but for QDWH, which makes them 1."""
    ranks = range(1, 6)
    x = _of_spectra(shape, [np.geomspace(1, 0.2, rank) for rank in ranks], seed=2)
    factors = np.asarray(ALL[method](x), np.float64)
    u, _, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    noise = _amplification("quintic", 5) * EPS if method == "newton_schulz" else EPS
    for i, rank in enumerate(ranks):
        values = np.linalg.svd(factors[i], compute_uv=False)
        assert values[:rank].min() > 0.68
        if method == "svd":
            assert_close(factors[i], u[i, :, :rank] @ vt[i, :rank], condition=5.0, eps=EPS)
        if method == "qdwh":
            assert_close(_gram(factors[i]), np.eye(min(shape)), eps=EPS)
            assert_close(u[i, :, :rank].T @ factors[i], vt[i, :rank], condition=5.0, eps=EPS)
        else:
            assert values[rank:].max() < 16 * noise


@every_method
@pytest.mark.parametrize("dtype", cells(["float32", "bfloat16", "float16"], of=2))
def test_matrices_of_a_batch_never_influence_each_other(method, dtype):
    """And zero has the factor zero."""
    x = _matrices((8, 13)).astype(dtype)
    clean, others = np.asarray(ALL[method](x)), [0, 2, 3, 4]
    for poison in (np.nan, np.inf, 3e4 if dtype == "float16" else 1e30, 0.0):
        struck = x.copy()
        struck[1] *= poison
        found = np.asarray(ALL[method](struck))
        assert np.array_equal(found[others], clean[others]) and found.dtype == dtype
    assert not found[1].any()
    if method == "newton_schulz":
        assert not np.any(_iterated(struck, eps=0.0)[1])


@every_exact_method
def test_exact_methods_round_to_bfloat16_once(method):
    x = _matrices((8, 13)).astype(jnp.bfloat16)
    factor = EXACT[method](x)
    assert factor.dtype == jnp.bfloat16
    exact = _polar_of(x.astype(np.float64))
    assert_close(factor[:3], exact[:3], 0.5, eps=BFLOAT16_EPS + 32 * CONDITIONS[2] * EPS)


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


def test_aol_saves_an_iteration_and_bends_the_limit():
    square, wide = (np.random.default_rng(0).standard_normal((64, n)) for n in (64, 128))

    def error(x: np.ndarray, steps: int, norm: str) -> float:
        polar = jax.jit(lambda x: newton_schulz(x, "classical", steps, norm=norm))
        found = polar(x.astype(np.float32))
        return float(np.linalg.norm(found - _polar_of(x)) / 8)

    assert error(square, 4, "aol") < error(square, 5, "frobenius")
    assert error(wide, 6, "frobenius") < 1e-3 < error(wide, 6, "aol") < 0.02


@pytest.mark.parametrize("steps", [1, 3, 5, 9])
def test_rows_equal_the_transcription(steps: int) -> None:
    """Late rows come from an interval whose width cancels: they differ, but not in their effect."""
    for settings, theirs in (
        ({}, polar_express_for(steps)),
        ({"cushion": 0.1, "safety": 1.0}, composition(steps, cushion=0.1)),
        ({"lower": 0.05}, polar_express_for(steps, lower=0.05)),
    ):
        ours, lower = curvax.polar_express(steps, **settings), settings.get("lower", 1e-3)
        assert np.shape(ours) == (steps, 3)
        assert_close(np.array(ours)[:4], np.array(theirs)[:4], 1, eps=1e-9)
        values = np.geomspace(lower, 1, 2000)
        made = [_composed(rows, steps, values) for rows in (ours, theirs)]
        assert_close(*made, 1, eps=1e-9)


def test_rows_for_a_number_of_steps_are_the_best_of_so_many() -> None:
    def distance(rows: Any) -> float:
        return float(np.abs(_composed(rows, 0, np.geomspace(1e-3, 1, 2000)) - 1).max())

    express = partial(curvax.polar_express, safety=1.0, cushion=0.0)
    found = [distance(express(steps)) for steps in (3, 4, 5, 6)]
    assert sorted(found, reverse=True) == found and found[-1] < 0.1 < found[0]
    for name in ("classical", "quintic", "polar_express"):
        rows = NEWTON_SCHULZ_COEFFICIENTS[name]
        assert distance((rows * 6 if len(rows) == 1 else rows)[:6]) > found[-1]


@pytest.mark.parametrize("steps", [6, 10, 12])
def test_deepseek_v4_takes_eight_steps_and_two(steps: int) -> None:
    method = curvax.polar.newton_schulz(steps, coefficients="deepseek_v4", eps=0.0)
    with jax.enable_x64(True):
        for shape in ((6, 9), (9, 4)):
            x = np.random.default_rng(0).standard_normal(shape)
            expected = transcribed(x, deepseek_v4(steps), eps=0.0)
            assert_close(jax.jit(method.factor)(x), expected, condition=3.4445**8)
