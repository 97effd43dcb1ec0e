"""Cholesky factors in few bits: damping, failed decompositions, error feedback."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg import _cholesky
from tests.helpers import assert_close, at, with_spectrum
from tests.shared.stored import EPS32, decode_stored, same, storage_of


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


def test_relative_damping_is_eps_times_the_largest_entry():
    g = np.random.default_rng(0).standard_normal((2, 6, 18))
    x = np.float32(g @ g.mT)
    largest = np.max(x, axis=(-2, -1), keepdims=True)
    c, failed = jax.jit(lambda x: _cholesky.factored(x, 0.25, "relative"))(x)
    assert not failed.any()
    c = np.asarray(c)
    assert_close(c @ c.mT, x + 0.25 * largest * np.eye(6, dtype=np.float32), 32)


def test_matrices_are_decomposed_one_at_a_time():
    """Batches of decompositions that run at once can wait for each other on a CPU, forever."""
    decomposed = jax.jit(lambda x: _cholesky.factored(x, 1e-6, "relative"))
    text = decomposed.lower(jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)).as_text()
    calls = [line for line in text.splitlines() if "potrf" in line]
    assert calls and all("tensor<8x8xf32>" in c and "tensor<3x8" not in c for c in calls)


def test_on_gpus_the_matrices_of_a_stack_are_tried_again_together(monkeypatch):
    """Each gets what it needs: the second more damping; the last fails at any."""
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    spectra = np.array([[1, 2, 3, 4], [1, 1, 1, -3e-6], [1, 1, 1, -1]])
    stack = np.float32(turn * spectra[:, None, :] @ turn.T)
    alone, failed = _cholesky.factored(jnp.asarray(stack), 0.0, "absolute")
    monkeypatch.setattr(_cholesky, "each_matrix", lambda one, x, at_once: at_once(x))
    anew = _cholesky.factored.__wrapped__
    together, also_failed = anew(jnp.asarray(stack), 0.0, "absolute")
    assert failed.tolist() == also_failed.tolist() == [False, False, True]
    assert not np.isfinite(jax.lax.linalg.cholesky(jnp.asarray(stack[1]))).all()
    np.testing.assert_allclose(alone[:2], together[:2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_if_all_fail_what_was_stored_stays_and_is_counted(mode):
    """Matrix by matrix: its neighbors are what they are beside a good one."""
    encode = jax.jit(storage_of(mode, 4).encode_factor)
    g = np.random.default_rng(0).standard_normal((2, 3, 9, 27))
    first, x = (g @ g.mT / 27).astype(np.float32)
    stored = encode(first, encode(np.broadcast_to(np.eye(9, dtype=np.float32), x.shape), None))
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


def test_error_feedback_tracks_better():
    """The mean distance, over the last 100 steps, of what is stored from the true average.

    At any condition without decay, where βe = 0 feeds the whole error back at once.
    With the paper's βe flat spectra; of steep ones the opposite is true, see `cholesky`.
    """
    order, steps, batch, conditions = 32, 200, 4, (1.0, 10.0, 100.0)
    key, roots = jax.random.key(0), []
    for condition in conditions:
        spectrum = np.geomspace(1, condition**-0.5, order)
        keys = [jax.random.fold_in(key, i) for i in range(batch)]
        roots += [with_spectrum(k, order, order, spectrum) for k in keys]
    g = np.random.default_rng(0).standard_normal((steps, batch, order, 4 * order))
    white = np.tile(g @ g.mT / (4 * order), (1, len(conditions), 1, 1))
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
    errors = {
        name: np.asarray(x)[steps // 2 :].mean(axis=0).reshape(-1, batch)
        for name, x in errors.items()
    }
    assert (errors["all"] < 0.9 * errors["none"]).all(), errors
    assert (errors["the paper's"][0] < 0.9 * errors["none"][0]).all(), errors
