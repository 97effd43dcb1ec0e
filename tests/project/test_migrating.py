"""What the pages in docs/migrating say of other libraries' numbers.

Libraries that Optax contains run as they are. Of others, the update of one matrix is written out in
NumPy, in the notation of their source.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import OPTIMIZED, assert_close, run_scanned

M, N = 6, 9


def gradients(steps: int, shape: tuple[int, int] = (M, N), seed: int = 0) -> np.ndarray:
    """Of one matrix: a mean that stays, and noise."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) + 0.5 * rng.normal(size=(steps, *shape))


def kernels_of(optimizer, gs: np.ndarray) -> np.ndarray:
    """The updates of a kernel, whose weights stay."""
    trees = [{"layer": {"kernel": g}} for g in gs]
    params = jax.tree.map(lambda x: 1 - x, trees[0])
    return np.stack([u["layer"]["kernel"] for u in run_scanned(optimizer, trees, params)[0]])


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


# optax.contrib.muon: also `test_reductions.py`, and with its Adam `test_take_over.py`


@pytest.mark.parametrize("shape", cells([(16, 32), (64, 64), (256, 64)], of=3), ids=str)
def test_muon_is_that_of_optax_in_float32_to_a_hundred_thousandth(shape):
    """As compiled for users."""
    gs = gradients(5, shape).astype(np.float32)
    with jax.enable_x64(False):
        found = []
        for optimizer in (optax.contrib.muon(0.02), curvax.muon(0.02)):
            params = {"layer": {"kernel": jnp.asarray(gs[0])}}
            state, updates = optimizer.init(params), None
            step = jax.jit(optimizer.update, compiler_options=OPTIMIZED)
            for g in gs:
                updates, state = step({"layer": {"kernel": jnp.asarray(g)}}, state, params)
            assert updates is not None
            found.append(np.asarray(updates["layer"]["kernel"]))
    assert found[0].dtype == np.float32
    theirs, ours = found
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    cells(
        [
            ({"adaptive": True}, {"adaptive": True}),
            ({"preconditioning": "aol"}, {"method": curvax.polar.newton_schulz(norm="aol")}),
            ({"preconditioning": "schatten"}, {"method": curvax.polar.newton_schulz(norm="gram")}),
        ],
        of=3,
    ),
    ids=lambda x: next(iter(x)),
)
def test_muon_has_the_options_of_optax(theirs, ours):
    gs = gradients(4)
    old = kernels_of(optax.contrib.muon(0.02, **theirs), gs)
    # In "aol" Optax adds its eps of 1e-8 elsewhere.
    assert_close(kernels_of(curvax.muon(0.02, **ours), gs), old, condition=10, eps=1e-8)
    assert not np.allclose(kernels_of(curvax.muon(0.02), gs), old, rtol=1e-3)


# optax.contrib.galore


@pytest.mark.parametrize("shape", cells([(M, N), (N, M)], of=2))
def test_galore_of_the_larger_side_is_that_of_optax(shape):
    """Until the second basis: Optax leaves the signs of singular vectors to LAPACK."""
    gs = gradients(8, shape)
    old = optax.contrib.galore(0.1, rank=3, update_proj_gap=4)
    new = curvax.galore(
        0.1,
        rank=3,
        scale=1.0,
        side="larger",
        refresh=curvax.every(4, offset=1),
        adam_learning_rate=0.1,
    )
    ours, theirs = kernels_of(new, gs), kernels_of(old, gs)
    in_float32 = float(jnp.finfo(jnp.float32).eps)  # Optax's SVD
    assert_close(ours[:4], theirs[:4], condition=10, eps=in_float32)
    by_default = kernels_of(curvax.galore(0.1, rank=3), gs)
    assert not np.allclose(by_default[0], theirs[0], rtol=0.1)


# SOAP_JAX and soap.py


def official_soap(gs: np.ndarray, rate: float, beta: float, eps: float, period: int) -> np.ndarray:
    """`soap.py`: the first step only makes the bases; later ones use them before they change."""
    m, n = gs[0].shape
    factors = [np.zeros((m, m)), np.zeros((n, n))]
    mean, variance, found = np.zeros((m, n)), np.zeros((m, n)), []
    bases = []
    for step, g in enumerate(gs):
        if step:
            inside = bases[0].T @ g @ bases[1]
            mean = beta * mean + (1 - beta) * g
            variance = beta * variance + (1 - beta) * inside**2
            ratio = (bases[0].T @ mean @ bases[1]) / (np.sqrt(variance) + eps)
            rate_now = rate * np.sqrt(1 - beta**step) / (1 - beta**step)
            found.append(-rate_now * bases[0] @ ratio @ bases[1].T)
        else:
            found.append(np.zeros((m, n)))
        for factor, product in zip(factors, (g @ g.T, g.T @ g), strict=True):
            factor += (1 - beta) * (product - factor)
        if not step:
            bases = [np.linalg.eigh(factor)[1][:, ::-1] for factor in factors]
        elif step % period == 0:
            for side, factor in enumerate(factors):
                turned = factor @ bases[side]
                order = np.argsort(-np.sum(bases[side] * turned, axis=0))
                bases[side] = np.linalg.qr(turned[:, order])[0]
                variance = np.take(variance, order, axis=side)
    return np.stack(found)


def test_soap_is_that_of_the_official_code():
    """Of a square matrix, so that its first gradient determines both bases."""
    gs = gradients(40, (8, 8))
    old = official_soap(gs, 0.01, 0.95, 1e-8, 10)[1:]  # without the step that both skip
    direction = curvax.scale_by_soap(
        bias_correction=True,
        eps=1e-8,
        method="qr",
        skip_first=True,
        lagged=True,
        refresh=curvax.every(10, offset=1),
    )
    new = kernels_of(curvax.assemble(direction, 0.01), gs)
    assert not new[0].any()
    new, default = new[1:], kernels_of(curvax.soap(0.01), gs)[1:]
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-6)  # other places of eps
    goal, by_default = (np.linalg.norm(x, axis=(1, 2)) for x in (old, default))
    assert 0.2 < by_default[0] / goal[0] < 0.3


# Distributed Shampoo


def power(matrix: np.ndarray, exponent: float, eps: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * (values + eps) ** exponent) @ vectors.T


def averages(gs: np.ndarray, b1: float, b2: float):
    """Step, gradient, and averages over the sums of their weights: of G, G², G Gᵀ and Gᵀ G."""
    found = [np.zeros((M, N)), np.zeros((M, N)), np.zeros((M, M)), np.zeros((N, N))]
    for t, g in enumerate(gs, 1):
        pairs = zip((b1, b2, b2, b2), found, (g, g**2, g @ g.T, g.T @ g), strict=True)
        found = [b * x + (1 - b) * y for b, x, y in pairs]
        yield t, g, *(x / (1 - b**t) for b, x in zip((b1, b2, b2, b2), found, strict=True))


def test_shampoo_grafted_onto_adam_is_that_of_meta():
    gs, b2, eps = gradients(12), 0.9, 1e-12
    new = curvax.scale_by_shampoo(
        b2=b2,
        eps=eps,
        damping_mode="absolute",
        initial=0.0,
        refresh=1,
        statistics_every=1,
        graft=curvax.grafts.adam(0.0),
    )
    found, _ = run_scanned(new, gs)
    for t, g, _, variance, left, right in averages(gs, 0.0, b2):
        expected = power(left, -1 / 4, eps) @ g @ power(right, -1 / 4, eps)
        length = np.linalg.norm(g / (np.sqrt(variance) + 1e-8))
        if t > 2:  # then both factors have full rank
            expected *= length / np.linalg.norm(expected)
            assert_close(found[t - 1], expected, condition=1e6)


def test_foam_is_that_of_its_authors_code():
    """Where every check refreshes: averaged gradients, weighted means, Adam's first steps."""
    gs, b1, b2, eps, f, start = gradients(12), 0.9, 0.8, 1e-2, 2, 4
    new = curvax.scale_by_foam(
        check_every=f,
        threshold=1e-9,
        b1=b1,
        b2=b2,
        eps=eps,
        max_damping=1.0,
        graft=curvax.grafts.adam(b1, eps=1e-9),
        bias_correction=True,
        warmup_steps=start - 1,
    )
    found, _ = run_scanned(new, gs)
    roots = (np.eye(M), np.eye(N))
    for t, _, mean, variance, left, right in averages(gs, b1, b2):
        if t % f == 0 and t >= start:
            roots = (power(left, -1 / 2, eps), power(right, -1 / 2, eps))
        expected = adam = mean / (np.sqrt(variance) + 1e-9)
        if t >= start:
            expected = roots[0] @ mean @ roots[1]
            expected *= np.linalg.norm(adam) / np.linalg.norm(expected)
        assert_close(found[t - 1], expected, condition=1e3)


# GaLore in torch


def torch_galore(gs: np.ndarray, rank: int, scale: float) -> np.ndarray:
    """The official updates of a weight `(out, in)` with `proj_type="std"`, rate 1, eps 1e-6."""
    mean = variance = np.zeros(())
    of_inputs = gs[0].shape[0] >= gs[0].shape[1]
    u, _, vt = np.linalg.svd(gs[0], full_matrices=False)
    basis = vt[:rank].T if of_inputs else u[:, :rank]
    found = []
    for step, g in enumerate(gs):
        low = g @ basis if of_inputs else basis.T @ g
        mean = 0.9 * mean + 0.1 * low
        variance = 0.999 * variance + 0.001 * low**2
        size = np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        ratio = size * mean / (np.sqrt(variance) + 1e-6)
        found.append(-scale * (ratio @ basis.T if of_inputs else basis @ ratio))
    return np.stack(found)


@pytest.mark.parametrize("shape", cells([(M, N), (N, M), (M, M)], of=3), ids=str)
def test_galore_is_that_of_torch_on_the_transposed_weight(shape):
    gs = gradients(6, shape)  # of kernels (in, out)
    new = curvax.galore(1.0, rank=2, scale=0.25, eps=1e-6, refresh=curvax.every(6, offset=1))
    old = torch_galore(gs.swapaxes(1, 2), 2, 0.25).swapaxes(1, 2)
    # Torch adds eps before the bias correction: at step 1 it counts 30 times as much.
    np.testing.assert_allclose(kernels_of(new, gs), old, rtol=1e-2, atol=1e-4)


# bitsandbytes


def test_adamw_in_8_bits_stays_near_adamw():
    gs = gradients(30, (64, 64))
    whole, coded = (
        kernels_of(optimizer, gs)[-1]
        for optimizer in (optax.adam(1e-3), curvax.quantize_state(optax.adam(1e-3), bits=8))
    )
    assert 0 < np.linalg.norm(coded - whole) / np.linalg.norm(whole) < 0.03


# PSGD Kron


def test_shampoo_of_root_2_has_the_fixed_point_of_kron():
    """Gradients whose covariance is exactly `A ⊗ B`: one per entry of the matrix."""
    rng = np.random.default_rng(3)
    a, b = (x @ x.T + np.eye(len(x)) for x in (rng.normal(size=(3, 3)), rng.normal(size=(4, 4))))
    entries = np.eye(12).reshape(12, 3, 4)
    gs = power(a, 0.5, 0.0) @ entries @ power(b, 0.5, 0.0)
    new = curvax.scale_by_shampoo(
        b2=None, eps=0.0, initial=0.0, root=2, graft=None, refresh=12, statistics_every=1
    )
    direction = run_scanned(new, gs)[0][-1]
    kron = power(a, -0.5, 0.0) @ gs[-1] @ power(b, -0.5, 0.0)
    units = (x / np.linalg.norm(x) for x in (direction, kron))
    assert_close(*units, condition=100)
