"""Inverse roots against float64, over prescribed spectra, and power iteration.

Bounds. Working with a matrix of order `n` changes it by `O(n · eps · ‖A‖)`, and its inverse root
by the condition number `κ` of what is rooted times as much: a root's relative error is at most
`n (1 + κ) eps`, the identity `X^p A = I` holds up to `p` times that. What is rooted is `A` itself,
or `A + damping · I`. Targets are taken in float64 from the very matrix that the solver sees.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg._inverse_root import root_eigenvalues, rounding_floor, solve_root
from tests.cells import cells
from tests.helpers import assert_close, orthogonal, resolution

N = 12
COUNT = 12  # matrices in every batch, so that each solver compiles once per dtype
SOLVERS = [
    *(("eigh", root) for root in (1, 2, 3, 4, 8)),
    *(("coupled_newton", root) for root in (1, 2, 4, 8)),
    ("newton_schulz", 2),
    ("products", 2),
    ("products", 4),
]
ITERATIONS = [row for row in SOLVERS if row[0] != "eigh"]
SOME = cells(SOLVERS, of=3)  # in float64, and with relative damping
PRECISIONS = {"float32": (1.0, 1e1, 1e2, 1e3, 1e4), "float64": (1.0, 1e4, 1e8, 1e12)}
DAMPED = cells((1, 2, 3, 4, 8), ("absolute", "relative", "floor", "outside"), of=6)


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


def _symmetric(a: np.ndarray) -> np.ndarray:
    a = np.asarray(a, np.float64)
    return np.tril(a) + np.swapaxes(np.tril(a, -1), -1, -2)


def _singular(rank: int, order: int = N) -> np.ndarray:
    """A batch of integer matrices `GGᵀ` of exactly this rank, exact in float32."""
    generator = np.random.default_rng(rank)
    left = generator.integers(-3, 4, (COUNT, order, rank))
    g = left @ generator.integers(-3, 4, (COUNT, rank, order))
    a = (g @ np.swapaxes(g, -1, -2)).astype(np.float64)
    assert a.max() < 2**24 and (np.linalg.matrix_rank(a) == rank).all()
    return a


def _near_one(a: np.ndarray) -> np.ndarray:
    return a / 2 ** np.round(np.log2(np.linalg.norm(a, 2, axis=(-2, -1))))[:, None, None]


@functools.cache
def _solver(solver: str, root: int, damping: str = "absolute"):
    """`inverse_root` with these choices, compiled once per shape and dtype."""
    return jax.jit(
        lambda a, eps: curvax.inverse_root(a, root, eps, damping_mode=damping, method=solver)
    )


def _solved(a: np.ndarray, dtype: str, solver: str, root: int, eps=0.0, damping="absolute"):
    """Roots and error estimates of at most COUNT float64 matrices, computed in `dtype`."""
    batch = np.concatenate([a, np.broadcast_to(np.eye(N), (COUNT - len(a), N, N))])
    x, error = _solver(solver, root, damping)(batch.astype(dtype), np.asarray(eps, dtype))
    assert x.dtype == dtype and x.shape == batch.shape and error.shape == (COUNT,)
    return np.asarray(x)[: len(a)], np.asarray(error, np.float64)[: len(a)]


def _function(root: int, eps=0.0, damping="absolute", largest=1.0):
    """The function of the eigenvalues; without damping 0 at 0."""

    def f(d):
        if damping == "outside":
            base, power = d ** (1 / root) + eps, -1.0
        elif damping == "floor":
            base, power = np.maximum(d, eps), -1 / root
        else:
            base, power = d + eps * (largest if damping == "relative" else 1), -1 / root
        return np.where(base > 0, np.where(base > 0, base, 1) ** power, 0)

    return f


def _target(a: np.ndarray, root: int, eps=0.0, damping="absolute", largest=None) -> np.ndarray:
    """The inverse root of one matrix in float64; without damping on its range only."""
    d, q = np.linalg.eigh(a)
    d = np.where(d > 1e-13 * d[-1], d, 0.0)
    f = _function(root, eps, damping, d[-1] if largest is None else largest)
    return (q * f(d)) @ q.T


def _identity_error(x, root: int, a: np.ndarray) -> np.ndarray:
    """`max |X^p A - I|` of every matrix, in float64."""
    power = np.linalg.matrix_power(np.asarray(x, np.float64), root)
    return np.abs(power @ a - np.eye(N)).max(axis=(-2, -1))


def _bound(condition: float, dtype: str) -> float:
    return N * (1 + condition) * float(np.finfo(dtype).eps)


_largest = jax.jit(curvax.power_iteration)


@pytest.mark.parametrize(
    ("solver", "root", "dtype"),
    [*((*solver, "float32") for solver in SOLVERS), *((*solver, "float64") for solver in SOME)],
)
def test_undamped_roots_are_as_good_as_their_condition(solver, root, dtype):
    """The estimate of `eigh` is a backward error; that of an iteration bounds the residual.

    `max |X^p A - I|` cannot be known better than `κ · eps`. By products it is worse in float64.
    """
    for condition in PRECISIONS[dtype]:
        with jax.enable_x64(dtype == "float64"):
            a = _positive(condition, dtype)
            x, error = _solved(a, dtype, solver, root)
            for i in range(len(a)):
                assert_close(x[i], _target(a[i], root), factor=N, condition=1 + condition)
            identity, slack = _identity_error(x, root, a), root * _bound(condition, dtype)
            if (solver, dtype) == ("products", "float64"):
                slack *= condition**0.5
            assert (identity <= slack).all(), identity
            if solver == "eigh":
                assert (error <= _bound(1.0, dtype)).all()
                assert (identity <= 4 * root * condition * (error + N * resolution(x))).all()
            else:
                assert (identity <= error + slack).all() and (error <= slack).all()


@pytest.mark.parametrize(
    ("solver", "root", "damping"),
    [*((*row, "absolute") for row in SOLVERS), *((*row, "relative") for row in SOME)],
)
def test_damped_float32_roots_are_as_good_as_the_damped_condition(solver, root, damping):
    """Also of singular matrices, of one of which power iteration finds 10 % too little.

    Relative damping is a multiple of the largest eigenvalue, for the iterations of its estimate, at
    any scale.
    """
    eps, singular = 2.0**-10, _singular(8)
    assert _largest(singular[4].astype(np.float32)) < 0.9 * np.linalg.eigvalsh(singular[4])[-1]
    if damping == "absolute":
        given = [8 * _positive(condition, "float32") for condition in (1e6, 1e9)]
        given += [_near_one(_singular(rank)) for rank in (1, 8, 11)]
    else:
        given = [_singular(1), singular, _singular(11)]
        given += [np.ldexp(_singular(4), exponent) for exponent in (-100, -68, 0, 68, 100)]
    for a in given:
        x, error = _solved(a, "float32", solver, root, eps, damping)
        for i in range(len(a)):
            largest = added = np.linalg.eigvalsh(a[i])[-1]
            if damping == "relative" and solver != "eigh":
                added = float(_largest(a[i].astype(np.float32)))
            condition = 1 + (1 if damping == "relative" else largest) / eps
            target = _target(a[i], root, eps, damping, added)
            assert_close(x[i], target, factor=N, condition=condition)
        if damping == "relative":
            most = 1.0 if solver == "eigh" else 1 / eps  # a backward error; a residual
            assert (error <= root * _bound(most, "float32")).all(), error


@pytest.mark.parametrize("rank", [1, 4, N])
@pytest.mark.parametrize(("root", "damping"), DAMPED)
def test_each_kind_of_damping_acts_on_the_eigenvalues(root, damping, rank):
    a, eps, machine = _near_one(_singular(rank)), 2.0**-5, float(np.finfo(np.float32).eps)
    x, _ = _solved(a, "float32", "eigh", root, eps, damping)
    for i in range(len(a)):
        d = np.maximum(np.linalg.eigvalsh(a[i]), 0)
        f, change = _function(root, eps, damping, d[-1]), N * machine * d[-1]
        # Outside, λ^(1/p) is steep at 0: what an eigenvalue's rounding makes of the root.
        steepest = np.abs(f(d + change) - f(d)).max() / (machine * f(d).max())
        assert_close(x[i], _target(a[i], root, eps, damping), factor=2, condition=N + steepest)


@pytest.mark.parametrize("rank", [1, 4, 11])
@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_undamped_eigh_takes_the_root_on_the_range_only(root, rank, dtype):
    with jax.enable_x64(dtype == "float64"):
        a = _singular(rank)
        x, _ = _solved(a, dtype, "eigh", root)
        for i in range(len(a)):
            d, q = np.linalg.eigh(a[i])
            condition, null = d[-1] / d[-rank], q[:, :-rank]
            assert_close(x[i], _target(a[i], root), factor=N, condition=1 + condition)
            leak = np.abs(x[i] @ null).max() / np.abs(x[i]).max()
            assert leak <= _bound(condition, dtype)
        x, error = _solved(np.zeros((1, N, N)), dtype, "eigh", root)
        assert not x.any() and error[0] == 0


@pytest.mark.parametrize("rank", [0, 1, 4, 8, 11])
@pytest.mark.parametrize(("solver", "root"), ITERATIONS)
def test_the_estimate_tells_an_undamped_singular_matrix(solver, root, rank):
    """`X^p A` has no full rank: some entry of `X^p A - I` is at least `1 - rank / n`."""
    a = _singular(rank) if rank else np.zeros((1, N, N))
    _, error = _solved(a, "float32", solver, root)
    told = ~np.isfinite(error) | (error >= (0.5 if rank else 1) * (1 - rank / N))
    assert told.all(), np.sort(error)


def test_small_negative_eigenvalues_give_finite_roots():
    a = _singular(4)
    a = a / np.linalg.eigvalsh(a)[:, -1, None, None]
    a = a - 1e-6 * np.eye(N)  # eigenvalues of about -1e-6, far below -eps
    for damping, most in (("absolute", 1e-9**-0.5), ("floor", 1e-9**-0.5), ("outside", 1e9)):
        x, _ = _solved(a, "float32", "eigh", 2, 1e-9, damping)
        assert np.isfinite(x).all() and np.abs(x).max() <= (1 + 1e-3) * most
    for root, size in (
        (2, 2e-38),
        (4, 1.3e-38),
        (8, 1e-37),
        (16, 1e-36),
    ):  # nor do tiny ones overflow
        x, _ = _solved(size * np.eye(N)[None], "float32", "eigh", root)
        np.testing.assert_allclose(np.diag(x[0]), size ** (-1 / root), rtol=1e-4)


@pytest.mark.parametrize("exponent", [-100, -68, 68, 100])  # 2^100 is 1.3e30
@pytest.mark.parametrize(("solver", "root"), SOLVERS)
def test_roots_keep_their_digits_at_tiny_and_huge_scales(solver, root, exponent):
    a = _positive(100.0, "float32")
    x, error = _solved(a * 2.0**exponent, "float32", solver, root)
    scaled = np.asarray(x, np.float64) * 2.0 ** (exponent / root)
    for i in range(len(a)):
        assert_close(scaled[i], _target(a[i], root), N, condition=1 + 100, eps=resolution(x))
    condition = 1.0 if solver == "eigh" else 100.0  # a backward error; a residual
    assert ((error > 0) & (error <= root * _bound(condition, "float32"))).all(), error


@pytest.mark.parametrize(
    ("solver", "root", "damping"),
    [*((*row, "absolute") for row in SOLVERS), *((*row, "relative") for row in SOME)],
)
def test_a_bad_matrix_shows_and_matrices_do_not_influence_each_other(solver, root, damping):
    """NaN and infinity, on the diagonal and beside it; 1e20, zero; and other places of a batch."""
    a = np.concatenate([_positive(condition, "float32") for condition in (1e2, 1e3, 1e4)])
    x, error = _solved(a, "float32", solver, root, 1e-3, damping)
    mixed = np.concatenate([a[[0, 1, 2, 3, 4, 7, 1, 3, 5]], a[:3]])
    mixed[2], mixed[4] = 1e20 * np.eye(N), 0
    for i, value in ((0, np.nan), (9, np.inf)):
        mixed[i, 2, 1] = mixed[i, 1, 2] = value
    mixed[10, 3, 3], mixed[11, 3, 3] = np.nan, np.inf
    beside, errors_beside = _solved(mixed, "float32", solver, root, 1e-3, damping)
    for here, there in ((1, 1), (3, 3), (7, 5), (1, 6), (3, 7), (5, 8)):
        assert np.array_equal(x[here], beside[there])
        assert error[here] == errors_beside[there] <= 1
    for i in (0, 9, 10, 11):
        assert not np.isfinite(beside[i]).all() and not errors_beside[i] <= 1
    if damping == "absolute":  # zero has the root of its damping
        assert_close(beside[4], 1e-3 ** (-1 / root) * np.eye(N), factor=2 * N)
        assert errors_beside[4] <= root * _bound(1.0, "float32")


def test_batches_narrow_dtypes_and_integers():
    """Any number of batch axes; half precision is widened for the work, integers are float32."""
    a, solve = _positive(10.0, "float32").astype(np.float32), jax.jit(curvax.inverse_root)
    flat, errors = solve(a)
    for given, place in ((a[:, None, None], np.s_[:, None, None]), (a[1], 1)):
        found, error = solve(given)
        assert np.array_equal(found, flat[place]) and np.array_equal(error, errors[place])
    for dtype in ("bfloat16", "float16"):
        x, error = map(np.asarray, solve(a.astype(dtype)))
        assert x.dtype == dtype and error.dtype == jnp.float32
        for own, exact in zip(x, _symmetric(a.astype(dtype)), strict=True):
            assert_close(own, _target(exact, 2), factor=1)  # rounded once, at the end
    x = np.array([[4, 0], [0, 9]])
    np.testing.assert_allclose(solve(x)[0], np.diag([1 / 2, 1 / 3]), rtol=1e-6)
    for polar in map(jax.jit, (curvax.polar_svd, curvax.newton_schulz)):
        np.testing.assert_array_equal(polar(x), polar(x.astype(np.float32)), strict=True)


def test_power_iteration_finds_the_largest_eigenvalue_from_below():
    """The Rayleigh quotient is low by at most `(1 - gap) tan²θ · gap^(2k)`, relative.

    `θ` is the angle between the start, the row sums of `|A|`, and the leading eigenvector;
    `tan²θ` stays below 400 for these matrices.
    """
    rounding = _bound(1.0, "float32")
    for gap, seed in itertools.product((0.5, 0.9, 0.98), range(5)):
        q = orthogonal(jax.random.key(seed), N, N)
        spectrum = np.concatenate([[1.0], gap * np.geomspace(1, 1e-3, N - 1)])
        a = _symmetric(((q * spectrum) @ q.T).astype(np.float32))
        for iterations in (8, 32, 128):
            estimate = _largest(a.astype(np.float32), iterations)
            low = 1 - float(estimate) / np.linalg.eigvalsh(a)[-1]
            assert -rounding <= low <= 400 * (1 - gap) * gap ** (2 * iterations) + rounding
    a = _positive(100.0, "float32")[0].astype(np.float32)
    for exponent in (-100, -68, 68, 100):
        assert _largest(np.ldexp(a, exponent)) == _largest(a) * 2.0**exponent
    v = np.resize([1.0, -1.0], N) / np.sqrt(N)  # which row sums cancel
    a = np.float32(3 * np.outer(v, v) + 0.5 * np.eye(N))
    assert_close(float(_largest(a)), 3.5, eps=resolution(a))
    assert _largest(np.full((1, 1), 3, np.float32)) == 3
    assert _largest(np.zeros((N, N), np.float32)) == 0
    assert np.isnan(_largest(np.full((N, N), np.nan, np.float32)))


@pytest.mark.parametrize("mode", ["absolute", "relative", "floor", "outside"])
def test_damping_that_the_dtype_resolves_is_not_replaced_by_the_floor(mode: str) -> None:
    """It is 7 eps times the largest eigenvalue; 1 eps is noise."""
    root, largest = 4, 118.0
    solve = jax.jit(solve_root, static_argnums=(1, 3, 4))
    d = jnp.array([0.0, 50.0, largest], jnp.float32)
    floor = rounding_floor(jnp.zeros((3, 3), jnp.float32), root, 2)
    for size, kept in ((7.0, True), (1.0, False)):
        added = size * float(jnp.finfo(jnp.float32).eps) * largest
        eps = {"relative": added / largest, "outside": added ** (1 / root)}.get(mode, added)
        found = float(root_eigenvalues(d, root, eps, mode, floor)[0])
        assert (abs(found * added ** (1 / root) - 1) < 1e-4) == kept
        if mode == "absolute" and kept:
            for solver in ("products", "coupled_newton"):
                solved = solve(jnp.diag(d), root, eps, mode, solver, floor)
                assert abs(float(solved.inverse_root[0, 0]) * added ** (1 / root) - 1) < 1e-2
