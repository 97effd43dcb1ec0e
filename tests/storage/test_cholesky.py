"""Cholesky factors in few bits: damping, failed decompositions, error feedback."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.storage import _cholesky
from tests.helpers import assert_close, at, with_spectrum
from tests.shared.stored import (
    EPS32,
    decode_stored,
    drifting_gradients,
    same,
    shampoo,
    storage_of,
    trajectories,
)

# Damping


def test_float32_factors_stay_float32_where_64_bits_are_on():
    """Under `jax_enable_x64` a step was a `TypeError` about the carry of a loop."""
    storage = curvax.cholesky(block=4, min_elements=1)
    params = {"kernel": jnp.ones((8, 8), jnp.float32)}
    optimizer = curvax.shampoo(0.1, storage=storage, statistics_every=1, refresh=1)
    with jax.enable_x64(True):
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert updates["kernel"].dtype == jnp.float32
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_a_failed_decomposition_is_tried_again_with_more_damping():
    order = 96
    g = np.random.default_rng(0).standard_normal((order, 5))
    eye = np.eye(order, dtype=np.float32)
    x = np.float32(g @ g.T)
    x = np.stack([x, x + eye])
    storage = storage_of("cq", 16)

    @jax.jit
    def tried(x):
        start = storage.encode_factor(jnp.broadcast_to(eye, x.shape), None)
        plain = jax.lax.linalg.cholesky(x + 1e-6 * eye[None])
        decomposed = _cholesky.decomposed(x, 1e-6, "absolute")
        return plain, *decomposed, storage.encode_factor(x, start).failures

    plain, c, failed, failures = map(np.asarray, tried(x))
    assert np.isfinite(plain).all(axis=(1, 2)).tolist() == [False, True]
    assert not failed.any() and np.isfinite(c).all()
    assert same(c[1], plain[1]), "the one that did not fail is as it was"
    added = 1000 * order * EPS32 * np.diagonal(x[0]).max()
    first, target = c[0].astype(np.float64), x[0].astype(np.float64)
    error = np.linalg.norm(first @ first.T - target, 2)
    assert 1e-6 < error <= 1.1 * added
    assert failures.tolist() == [0, 0]


def test_every_retry_adds_ten_times_as_much():
    order, eps = 8, 1e-9
    rounding = order * EPS32
    below = rounding * np.float32([0, 3, 30, 300, 3000])  # zero, the last diagonal entry
    x = np.tile(np.eye(order, dtype=np.float32), (len(below), 1, 1))
    x[:, -1, -1] = -below
    decomposed = jax.jit(lambda x: _cholesky.decomposed(x, eps, "absolute"))
    c, failed = map(np.asarray, decomposed(x))
    assert failed.tolist() == [False] * 4 + [True]
    added = eps + rounding * np.array([0, 10, 100, 1000])
    np.testing.assert_allclose(c[:4, -1, -1] ** 2 + below[:4], added, rtol=1e-3)


def test_relative_damping_makes_codes_independent_of_the_scale():
    storage = curvax.cholesky(error_feedback=0.95, block=4, min_elements=1)
    g = np.random.default_rng(0).standard_normal((3, 9, 27))
    xs = np.float32(g @ g.mT / 27)

    @jax.jit
    def coded(factor):
        stored = storage.encode_factor(factor * jnp.eye(9), None)
        step = lambda stored, x: (storage.encode_factor(factor * x, stored), None)  # noqa: E731
        return jax.lax.scan(step, stored, xs)[0]

    plain = coded(np.float32(1))
    for power in (-80, 80):
        scaled, root = coded(np.float32(2.0**power)), np.float32(2.0 ** (power // 2))
        assert same(scaled.codes, plain.codes), power
        for field in ("scales", "diagonal"):
            desired = root * np.asarray(getattr(plain, field))
            assert same(getattr(scaled, field), desired), (power, field)


def test_relative_damping_is_eps_times_the_largest_entry():
    g = np.random.default_rng(0).standard_normal((2, 6, 18))
    x = np.float32(g @ g.mT)
    largest = np.max(x, axis=(-2, -1), keepdims=True)
    decomposed = jax.jit(lambda xs: [_cholesky.decomposed(x, 0.25, "relative") for x in xs])
    (c, failed), zeros = decomposed([x, np.zeros((6, 6), np.float32)])
    assert not failed.any()
    c = np.asarray(c)
    assert_close(c @ c.mT, x + 0.25 * largest * np.eye(6, dtype=np.float32), 32)
    c, failed = map(np.asarray, zeros)
    assert not failed.any() and not c.any()  # zeros stay zeros


def test_matrices_are_decomposed_one_at_a_time():
    """Batches of decompositions that run at once can wait for each other on a CPU, forever."""

    def decomposed(x):
        return _cholesky.decomposed(x, 1e-6, "relative")

    text = jax.jit(decomposed).lower(jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)).as_text()
    calls = [line for line in text.splitlines() if "potrf" in line]
    assert calls and all("tensor<8x8xf32>" in c and "tensor<3x8" not in c for c in calls)


# Failure


def _triangles(mode, batch=(), order=9, block=4):
    """A storage's coding, what it holds, and the next statistics, well conditioned."""
    storage = storage_of(mode, block)
    g = np.random.default_rng(0).standard_normal((2, *batch, order, 3 * order))
    first, second = (g @ g.mT / (3 * order)).astype(np.float32)
    encode = jax.jit(storage.encode_factor)
    eye = np.broadcast_to(np.eye(order, dtype=np.float32), first.shape)
    return encode, encode(first, encode(eye, None)), second


def test_on_gpus_the_matrices_of_a_stack_are_tried_again_together(monkeypatch):
    """Each gets what it needs: the second more damping; the last fails at any."""
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    spectra = np.array([[1, 2, 3, 4], [1, 1, 1, -3e-6], [1, 1, 1, -1]])
    stack = np.float32(turn * spectra[:, None, :] @ turn.T)
    alone, failed = _cholesky.decomposed(jnp.asarray(stack), 0.0, "absolute")
    monkeypatch.setattr(_cholesky, "each_matrix", lambda one, x, at_once: at_once(x))
    anew = _cholesky.decomposed.__wrapped__
    together, also_failed = anew(jnp.asarray(stack), 0.0, "absolute")
    assert failed.tolist() == also_failed.tolist() == [False, False, True]
    assert not np.isfinite(jax.lax.linalg.cholesky(jnp.asarray(stack[1]))).all()
    np.testing.assert_allclose(alone[:2], together[:2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_if_all_fail_what_was_stored_stays_and_is_counted(mode):
    """Matrix by matrix: its neighbors are what they are beside a good one."""
    encode, stored, x = _triangles(mode, (3,))
    good = encode(x, stored)
    for bad in (-1.0, np.nan, np.inf):
        broken = x.copy()
        broken[1] = bad * np.eye(9) if np.isfinite(bad) else bad
        once = encode(broken, stored)
        twice = encode(broken, once)
        assert once.failures.tolist() == [0, 1, 0] and twice.failures.tolist() == [0, 2, 0]
        trees = [jax.tree.map(np.asarray, tree) for tree in (stored, once, twice, good)]
        kept = [at(tree, 1)._replace(failures=0) for tree in trees[:3]]
        assert same(kept[0], kept[1]) and same(kept[0], kept[2]), bad
        for i in (0, 2):
            before, after, _, beside = (at(tree, i) for tree in trees)
            assert same(after, beside) and not same(after.codes, before.codes), bad


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_the_optimizer_goes_on_when_decompositions_fail(mode, monkeypatch):
    plain = _cholesky.decomposed
    g = np.float32(drifting_gradients({"w": (6, 9)}, 6)["w"])
    g[3:] *= 100

    def never(x, eps, damping_mode):
        c, failed = plain(x, eps, damping_mode)
        large = x[..., 0, 0] > 5.0
        return jnp.where(large[..., None, None], jnp.nan, c), failed | large

    monkeypatch.setattr(_cholesky, "decomposed", never)
    settings = {"refresh": 2, "statistics_every": 1, "side": "left"}
    directions, states = trajectories(shampoo(storage_of(mode, 4), **settings), {"w": g})
    left = states.direction["w"].left
    assert left.statistic.failures.tolist() == [0, 0, 0, 1, 2, 3]
    kept = left.statistic._replace(failures=np.zeros(6))
    assert same(at(kept, 2), at(kept, 5)) and not same(at(kept, 1), at(kept, 2))
    assert np.isfinite(directions["w"]).all() and left.refreshes[-1] == 3
    assert not left.rejected.any()


# What codes stand for


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_any_codes_decode_to_a_positive_semi_definite_matrix(mode):
    storage, orders, drawn = storage_of(mode, 4), (1, 8, 13), []
    for order in orders:
        generator = np.random.default_rng(order)
        x = jax.ShapeDtypeStruct((50, order, order), jnp.float32)
        stored = jax.eval_shape(lambda x: storage.encode_factor(x, None), x)
        fields = {"codes": generator.integers(0, 256, stored.codes.shape, np.uint8)}
        fields["scales"] = np.exp(generator.uniform(-3, 3, stored.scales.shape)).astype(np.float32)
        fields["diagonal"] = generator.random(stored.diagonal.shape, np.float32)
        drawn.append(stored._replace(**fields, failures=np.zeros(50, np.int32)))
    decoded = jax.jit(lambda drawn: [storage.decode_factor(stored) for stored in drawn])(drawn)
    for order, stored, x in zip(orders, drawn, map(np.float64, decoded), strict=True):
        size = np.abs(x).max(axis=(1, 2))
        assert (np.abs(x - x.mT).max(axis=(1, 2)) <= EPS32 * size).all(), order
        even = (x + x.mT) / 2
        assert (np.linalg.eigvalsh(even)[:, 0] >= -order * EPS32 * size).all(), order
        assert_close(even[7], decode_stored(at(stored, 7), order, 4), order, eps=EPS32)


# Error feedback


CONDITIONS = (1.0, 10.0, 100.0)  # of what is tracked


@functools.cache
def _tracking_errors(order=32, steps=200, batch=4) -> dict[str, np.ndarray]:
    """The mean distance, over the last 100 steps, of what is stored from the true average.

    Without error feedback, with all of it, and with the paper's: for a batch of matrices of every
    condition.
    """
    key, roots = jax.random.key(0), []
    for condition in CONDITIONS:
        spectrum = np.geomspace(1, condition**-0.5, order)
        keys = [jax.random.fold_in(key, i) for i in range(batch)]
        roots += [with_spectrum(k, order, order, spectrum) for k in keys]
    g = np.random.default_rng(0).standard_normal((steps, batch, order, 4 * order))
    white = np.tile(g @ g.mT / (4 * order), (1, len(CONDITIONS), 1, 1))
    grams = np.float32(np.stack(roots) @ white @ np.stack(roots).mT)
    eye = np.broadcast_to(np.float32(1e-6 * np.eye(order)), grams[0].shape)

    def tracked(mode, grams, be=None):
        storage = storage_of(mode, 16, be=be)

        def step(carry, gram):
            true, stored = carry
            true = 0.95 * true + 0.05 * gram
            x = 0.95 * storage.decode_factor(stored) + 0.05 * gram
            stored = storage.encode_factor(x, stored)
            error = jnp.linalg.norm(storage.decode_factor(stored) - true, axis=(1, 2))
            return (true, stored), error / jnp.linalg.norm(true, axis=(1, 2))

        return jax.lax.scan(step, (jnp.asarray(eye), storage.encode_factor(eye, None)), grams)[1]

    compiled = jax.jit(tracked, static_argnums=0)
    errors = {"none": compiled("cq", grams)}
    errors |= {"all": compiled("cq_ef", grams, 0.0), "the paper's": compiled("cq_ef", grams, 0.95)}
    return {
        name: np.asarray(x)[steps // 2 :].mean(axis=0).reshape(-1, batch)
        for name, x in errors.items()
    }


@pytest.mark.xdist_group("error feedback")  # one run of three
def test_error_feedback_tracks_flat_spectra_better():
    """With the paper's βe; of steep spectra the opposite is true, see `cholesky`."""
    plain, fed_back = (_tracking_errors()[name][0] for name in ("none", "the paper's"))
    assert (fed_back < 0.9 * plain).all(), (fed_back, plain)


@pytest.mark.xdist_group("error feedback")
@pytest.mark.parametrize("condition", CONDITIONS)
def test_error_feedback_without_decay_tracks_better_at_any_condition(condition):
    """βe = 0 feeds the whole error back at once."""
    place = CONDITIONS.index(condition)
    plain, fed_back = (_tracking_errors()[name][place] for name in ("none", "all"))
    assert (fed_back < 0.9 * plain).all(), (fed_back, plain)
