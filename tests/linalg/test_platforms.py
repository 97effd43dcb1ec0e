"""The forms of decompositions for TPUs, run on the CPU, beside float64."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.experimental.xla_metadata import set_xla_metadata

import curvax
from curvax.transforms.linalg import _by_products, _cholesky, _eigh, _polar, _products, _qr
from tests.cells import cells
from tests.helpers import assert_close, orthogonal, with_spectrum
from tests.shared.programs import text_for
from tests.tpu_forms import forms_of_tpus

EPS = float(np.finfo(np.float32).eps)
ORDER = _qr.PANEL + 9  # a panel, and a part of one


@pytest.fixture(autouse=True, scope="module")
def on_a_tpu():
    """Programs have the forms for TPUs, with panels so small that there are several."""
    with contextlib.ExitStack() as forms:
        forms.enter_context(mock.patch.object(_cholesky, "WIDTH", 32))
        forms.enter_context(forms_of_tpus())
        yield forms


SPECTRA = {
    "well conditioned": np.geomspace(1, 0.1, ORDER),
    "ill conditioned": np.geomspace(1, 1e-8, ORDER),
    "of half the rank": np.where(np.arange(ORDER) < ORDER // 2, np.linspace(2, 1, ORDER), 0),
    "zero": np.zeros(ORDER),
    "tiny": 1e-30 * np.geomspace(1, 0.1, ORDER),
    "huge": 1e36 * np.geomspace(1, 0.1, ORDER),
}
polar_svd = jax.jit(lambda x: curvax.polar_svd(x))  # compiled once for each shape
SHAPES = dict(cells([("wide", (ORDER, ORDER + 40)), ("tall", (ORDER + 40, ORDER))], of=2))


def matrices(shape: tuple[int, int]) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), len(SPECTRA))
    found = [with_spectrum(key, *shape, s) for key, s in zip(keys, SPECTRA.values(), strict=True)]
    return np.stack(found).astype(np.float32)


def assert_orthonormal(q: np.ndarray) -> None:
    """The columns, also those that nothing determines."""
    q = np.asarray(q, np.float64)
    eye = np.broadcast_to(np.eye(q.shape[-1]), q.mT.shape[:-1] + q.shape[-1:])
    assert_close(q.mT @ q, eye, 2 * ORDER**0.5, eps=EPS)


def assert_makes(product: np.ndarray, x: np.ndarray, names) -> None:
    """Each matrix up to rounding of its own largest entry."""
    for name, made, given in zip(names, product, x, strict=True):
        scale = np.abs(given).max() or 1.0
        error = np.abs(made - np.asarray(given, np.float64)).max() / scale
        assert error <= 2 * ORDER * EPS, (name, error)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_qr_is_a_qr_decomposition_of_any_matrix(shape):
    x = matrices(shape)
    q, r = (np.asarray(y, np.float64) for y in jax.jit(jax.vmap(_qr.qr))(x))
    assert_orthonormal(q)
    assert_makes(q @ r, x, SPECTRA)
    assert not np.tril(r, -1).any()


def test_the_complement_is_that_of_the_columns():
    u = np.float32(orthogonal(jax.random.key(0), 2 * ORDER, ORDER))
    rest = np.asarray(jax.jit(_qr.orthogonal_complement)(u), np.float64)
    assert rest.shape == (2 * ORDER, ORDER)
    assert_orthonormal(np.concatenate([u, rest], axis=1))


def test_eigendecompositions_have_errors_of_rounding():
    q = orthogonal(jax.random.key(1), ORDER, ORDER)
    a = np.stack([np.float32((q * s) @ q.T) for s in SPECTRA.values()])
    u, d = (np.asarray(y, np.float64) for y in jax.jit(jax.vmap(_eigh.eigh))(a))
    assert_orthonormal(u)
    assert_makes((u * d[:, None]) @ u.mT, a, SPECTRA)
    exact = np.linalg.eigvalsh(a.astype(np.float64))
    largest = np.where(np.abs(exact).max(axis=-1) > 0, np.abs(exact).max(axis=-1), 1)[:, None]
    assert_close(d / largest, exact / largest, ORDER**0.5, eps=EPS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_singular_vectors_and_values_are_those_of_float64(shape):
    x = matrices(shape)
    u, s, vt = (np.asarray(y, np.float64) for y in jax.jit(jax.vmap(_eigh.thin_svd))(x))
    assert_orthonormal(u)
    assert_orthonormal(vt.mT)
    assert_makes((u * s[:, None]) @ vt, x, SPECTRA)
    exact, values, _ = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    for i, name in enumerate(SPECTRA):
        largest = values[i].max() or 1.0
        assert_close(s[i] / largest, values[i] / largest, ORDER**0.5, eps=EPS)
        gap = (values[i, ORDER // 4 - 1] - values[i, ORDER // 4]) / largest
        if gap > 0:  # the sine of the largest angle between the leading subspaces
            sine = np.linalg.norm(exact[i, :, ORDER // 4 :].T @ u[i, :, : ORDER // 4], 2)
            assert sine <= 4 * EPS / gap, name


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_leading_vectors_of_the_gram_matrix_hold_the_energy(platform, monkeypatch):
    monkeypatch.setattr(
        _eigh, "by_platform", lambda *, default, **forms: forms.get(platform, default)
    )
    scales = 10.0 ** -np.arange(12.0)[:, None]
    x = (scales * np.random.default_rng(0).standard_normal((12, 40)) * 1e15).astype(np.float32)
    u = np.asarray(_eigh.leading_vectors(jnp.asarray(x), 3), np.float64)
    np.testing.assert_allclose(u.T @ u, np.eye(3), atol=1e-5)
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    energy = np.sum((u.T @ x) ** 2)
    assert abs(energy / np.sum(values[:3] ** 2) - 1) < 1e-5


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_polar_factors_are_those_of_float64(shape):
    x = matrices(shape)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    kept = s > max(shape) * EPS * s[:, :1]
    exact = (u * kept[:, None]) @ vt
    svd, qdwh = (np.asarray(f(x)) for f in (polar_svd, jax.jit(curvax.polar_qdwh)))
    for i, name in enumerate(SPECTRA):
        if name != "ill conditioned":  # its range is not determined, nor its smallest directions
            assert_close(svd[i], exact[i], condition=20)
        if kept[i].all():
            assert_close(qdwh[i], exact[i], condition=20)
    assert not svd[list(SPECTRA).index("zero")].any()
    assert np.array_equal(jax.jit(_polar.polar_qr_svd)(x), svd)


@pytest.mark.parametrize("condition", [10.0, 1e3, 1e6])
def test_polar_factors_are_as_good_as_those_of_lapack(condition):
    """Where they are determined: on the singular vectors of values above twice the cutoff."""
    shape, found = (ORDER, ORDER + 40), {"here": [], "lapack": []}
    for seed in range(4):
        spectrum = np.geomspace(1, 1 / condition, ORDER)
        x = np.float32(with_spectrum(jax.random.key(seed), *shape, spectrum))
        u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
        sure = s > 2 * shape[1] * EPS * s[0]
        u, vt = u[:, sure], vt[sure]
        left, _, right = scipy.linalg.svd(x, full_matrices=False)  # in float32
        for name, factor in {"here": polar_svd(x), "lapack": left @ right}.items():
            error = u.T @ np.asarray(factor, np.float64) @ vt.T - np.eye(sum(sure))
            found[name].append(np.abs(error).max())
    assert np.mean(found["here"]) <= 2 * np.mean(found["lapack"])


NOISE = 4 * ORDER**0.5 * EPS
"""What rounding leaves in directions that are zero."""


@pytest.mark.parametrize("shape", [*SHAPES.values(), (4, 4), (3, 5)], ids=str)
@pytest.mark.parametrize("rank", ["half", "one", "all but one"])
def test_polar_factors_are_zero_in_null_spaces(rank, shape):
    kept = {"half": min(shape) // 2, "one": 1, "all but one": min(shape) - 1}[rank]
    for seed in range(3):
        spectrum = np.geomspace(2, 1, kept)
        x = np.float32(with_spectrum(jax.random.key(seed), *shape, spectrum))
        u, _, vt = np.linalg.svd(x.astype(np.float64))
        factor = np.asarray(polar_svd(x), np.float64)
        assert np.linalg.norm(u[:, kept:].T @ factor, 2) <= NOISE
        assert np.linalg.norm(factor @ vt[kept:].T, 2) <= NOISE
        condition = spectrum[0] / spectrum[-1]  # of the polar factor of what is kept
        assert_close(factor, u[:, :kept] @ vt[:kept], condition=condition, eps=EPS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_singular_values_are_decided_within_a_factor_of_2_of_the_cutoff(shape):
    for relative, result in {2.0: 1.0, 4.0: 1.0, 0.5: 0.0, 0.1: 0.0}.items():
        spectrum = np.append(np.linspace(1, 0.5, ORDER - 1), relative * max(shape) * EPS)
        x = np.float32(with_spectrum(jax.random.key(0), *shape, spectrum))
        values = np.linalg.svd(np.asarray(polar_svd(x), np.float64), compute_uv=False)
        assert np.abs(values[:-1] - 1).max() <= NOISE, relative
        assert abs(values[-1] - result) <= NOISE, relative


@pytest.mark.parametrize("eps", [EPS, float(np.finfo(np.float64).eps)])
@pytest.mark.parametrize("size", [1, 4, 160, 640, 16384])
def test_the_rows_make_a_step_at_the_cutoff(size, eps):
    cutoff = size * eps
    rows, largest = _by_products._polynomials(cutoff, [_by_products.DECIDE] * 4)
    assert 0.25 < largest <= 1
    below, above = (
        np.geomspace(cutoff / 1e4, cutoff / 2, 10_001),
        np.geomspace(2 * cutoff, 1, 10_001),
    )
    for values, result in ((below, 0), (above, 1)):
        values = largest * values
        for a, b, c in rows:
            values = a * values + b * values**3 + c * values**5
        assert np.abs(values - result).max() <= 1e-12


@pytest.mark.parametrize("order", [20, 64, 161, 256, 300])
def test_cholesky_factors_of_any_number_of_panels(order):
    x = np.random.default_rng(0).standard_normal((order, 2 * order))
    a = np.float32(x @ x.T / order)
    panels, together = _cholesky._panel_counts(order)
    assert order <= panels * _cholesky.WIDTH < order + 2 * _cholesky.WIDTH
    assert panels % together == 0
    factor = jax.jit(_cholesky.lower_factor)
    found = np.asarray(factor(np.tril(a)), np.float64)  # of half, as LAPACK does
    assert_close(found, np.linalg.cholesky(a.astype(np.float64)), condition=40, eps=EPS)
    assert_close(found @ found.T, a, 4, eps=EPS)
    assert not np.triu(found, 1).any()
    assert not np.isfinite(factor(a - np.eye(order, dtype=np.float32))).all()  # indefinite


@pytest.fixture
def small_tiles(monkeypatch):
    for name in ("TILE", "WHOLE"):
        monkeypatch.setattr(_products, name, 32)
    with set_xla_metadata(tile=32):  # keeps what is traced here apart
        yield


@pytest.mark.parametrize(("m", "k", "n"), [(7, 70, 33), (33, 5, 64)])
def test_products_in_tiles_are_products(m, k, n, small_tiles):
    generator = np.random.default_rng(0)
    a = np.float32(generator.standard_normal((3, m, k)))
    b = np.float32(generator.standard_normal((3, k, n)))
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert_close(_products.in_tiles(a, b), exact, 2 * k**0.5)
    assert_close(_products.in_tiles(a[0], b[0]), exact[0], 2 * k**0.5)
    across = a.swapaxes(-1, -2)
    assert_close(_products.in_tiles(across, b, transpose_a=True), exact, 2 * k**0.5)
    assert_close(_products.exact_product(across, b, transpose_a=True), exact, 2 * k**0.5)


@pytest.mark.parametrize("order", [1, 5, 64, 70, 130])
def test_squares_of_triangles_leave_out_tiles_of_zeros(order, small_tiles):
    c = np.float32(np.tril(np.random.default_rng(0).standard_normal((3, order, order))))
    exact = np.matmul(c.astype(np.float64), c.astype(np.float64).swapaxes(-1, -2))
    found = np.asarray(jax.jit(_products.square_of_lower)(c))
    assert_close(found, exact, 2 * order**0.5)
    assert np.array_equal(found, found.swapaxes(-1, -2))
    assert_close(jax.jit(_products.square_of_lower)(c[0]), exact[0], 2 * order**0.5)
    spoilt = jax.jit(_products.square_of_lower)(jnp.asarray(c).at[1, order - 1, 0].set(jnp.nan))
    assert np.isfinite(spoilt).all(axis=(1, 2)).tolist() == [True, False, True]


WIDEST = {"cholesky": 128, "triangular_solve": 600}  # the second: rows of a panel, in one solve


SEVERAL = {
    "svd": jax.vmap(_eigh.thin_svd),  # which has all other decompositions but the next
    "cholesky": jax.vmap(lambda x: _cholesky.lower_factor(x @ x.mT)),
    "polar": curvax.polar_svd,
    "polar by QR": _polar.polar_qr_svd,
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_bad_matrix_shows_and_spoils_no_other(name):
    x = np.float32(np.random.default_rng(0).standard_normal((4, 40, 40)))
    x[1, 2, 3], x[2, 0, 0] = np.nan, np.inf
    f = jax.jit(SEVERAL[name])
    sound = x.copy()
    sound[1:3] = x[0]
    for found, expected in zip(*map(jax.tree.leaves, (f(x), f(sound))), strict=True):
        finite = np.isfinite(found).all(axis=tuple(range(1, found.ndim)))
        assert finite.tolist() == [True, False, False, True]
        assert not name.startswith("polar") or np.isnan(found[1:3]).all()
        assert np.array_equal(found[0], expected[0]) and np.array_equal(found[3], expected[3])


def test_programs_for_a_tpu_have_no_decomposition_that_grows_with_the_order(on_a_tpu):
    """Other calls than Jacobi's, and anything wider than a panel, XLA writes out block by block."""
    on_a_tpu.close()
    shape = jax.ShapeDtypeStruct((600, 600), jnp.float32)
    functions = {
        "reflectors": _qr.reflectors_of,
        "complement": lambda x: _qr.orthogonal_complement(x[:, :300]),
        "svd": _eigh.thin_svd,
        "polar": _polar.polar_qdwh,
        "polar on the range": _polar.polar_svd,
        "cholesky": _cholesky.lower_factor,
    }
    for name, f in functions.items():
        text = text_for("tpu", f, shape)
        assert set(re.findall(r"custom_call @(\w+)", text)) <= {"Eigh"}, name
        for kind, width in WIDEST.items():
            found = re.findall(rf"stablehlo\.{kind}\b.*-> tensor<.*?x(\d+)xf32>", text)
            assert all(int(x) <= width for x in found), (name, kind)
        assert ("@Eigh" in text) == (name == "svd")


def calls_on_a_gpu(f, *shape: int) -> set[tuple[str, str]]:
    """The libraries' functions in a program for a GPU, and the first operand of each."""
    text = text_for("cuda", f, jax.ShapeDtypeStruct(shape, jnp.float32))
    calls = re.findall(r"custom_call @(\w+)\(.*: \(tensor<([\dx]+)xf32>", text)
    return {(name, operand) for name, operand in calls if name.startswith("cu")}


def test_programs_for_a_gpu_have_no_svd(on_a_tpu):
    """cuSOLVER's go one after the other, and take ten to a hundred times as long as products."""
    on_a_tpu.close()
    for f in (curvax.polar_svd, _polar.polar_qr_svd, curvax.polar_qdwh):
        assert not calls_on_a_gpu(f, 9, 20, 30)
    names = {name for name, _ in calls_on_a_gpu(_eigh.thin_svd, 20, 30)}
    assert any("syevd" in name for name in names) and not any("svd_" in name for name in names)


@pytest.mark.parametrize("function", ["bases", "reflectors"])
def test_gpus_take_many_matrices_at_once_and_a_few_in_turn(function, on_a_tpu):
    """A batched QR of cuBLAS takes many times as long as a loop of single ones."""
    on_a_tpu.close()
    f = {"bases": _qr.bases_of, "reflectors": _qr.reflectors_of}[function]
    few = calls_on_a_gpu(f, _qr.MANY - 1, 30, 30)
    assert {operand for name, operand in few if "geqrf" in name} == {"30x30"}
    assert not calls_on_a_gpu(f, _qr.MANY, 30, 30)
