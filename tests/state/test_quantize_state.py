"""Transformations whose moments are in few-bit codes between steps."""

import functools
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.matrices import _chunks
from curvax.transforms.storage._codec import Codec, Coded, decode, encode
from tests.helpers import assert_close, gradients_like, run
from tests.shared.programs import temporaries_per_gradient

SHAPES = {"kernel": (9, 13), "bias": (21,), "batch": (2, 6, 5)}
PARAMS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
GRADIENTS = gradients_like(PARAMS, 6)
SMALL = {"block": 4, "min_elements": 1}


def _is_coded(x) -> bool:
    return isinstance(x, Coded)


def _coded(state) -> list[Coded]:
    return [x for x in jax.tree.leaves(state, is_leaf=_is_coded) if _is_coded(x)]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_step_is_the_inner_step_between_decoding_and_coding(bits):
    """Bit for bit, with second moments in the codes that have no zero."""
    inner = optax.scale_by_adam(0.9, 0.99)
    ours = curvax.quantize_state(inner, bits=bits, **SMALL)
    codecs = {"mu": Codec(bits, 4), "nu": Codec(bits, 4, "unsigned")}
    state, update = jax.jit(ours.init)(PARAMS), jax.jit(ours.update)

    @jax.jit
    def step(gradient, stored):
        read = lambda like, x, c: decode(x, c, like.shape[-1]).reshape(like.shape)  # noqa: E731
        code = lambda x, c: encode(jnp.atleast_2d(x), c)  # noqa: E731
        moments = {
            name: jax.tree.map(functools.partial(read, c=c), PARAMS, getattr(stored, name))
            for name, c in codecs.items()
        }
        updates, after = inner.update(gradient, stored._replace(**moments))
        return updates, {
            name: jax.tree.map(functools.partial(code, c=c), getattr(after, name))
            for name, c in codecs.items()
        }

    for gradient in GRADIENTS:
        desired, coded = step(gradient, state.inner)
        updates, state = update(gradient, state)
        assert_close(updates, desired, 4)
        for name, trees in coded.items():
            for key, expected in trees.items():
                found = getattr(state.inner, name)[key]
                apart = np.abs(np.int32(found.codes) - np.int32(expected.codes))
                assert apart.max() <= 17 and np.mean(apart > 0) < 0.02
                assert_close(found.scales, expected.scales, 4)


def test_nothing_is_coded_if_no_leaf_is_selected():
    """And everything is as without the wrapper, bit for bit."""
    inner = optax.adam(0.1)
    ours = curvax.quantize_state(inner, where=lambda path, leaf: False)
    found, expected = (run(optimizer, GRADIENTS, PARAMS) for optimizer in (ours, inner))
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected), factor=0)


def test_where_sees_paths_and_leaves():
    seen = {}

    def where(path, leaf):
        seen[path] = leaf.shape
        return path == "0/nu/kernel"

    state = jax.eval_shape(curvax.quantize_state(optax.adam(0.1), where=where).init, PARAMS)
    expected = {f"0/{m}/{name}": x.shape for m in ("mu", "nu") for name, x in PARAMS.items()}
    assert seen == expected
    assert _is_coded(state.inner[0].nu["kernel"]) and len(_coded(state)) == 1


def test_small_leaves_counters_and_scalars_stay():
    shapes = {"large": (64, 64), "small": (63, 65), "one": ()}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    (adam, _) = jax.eval_shape(curvax.quantize_state(optax.adam(0.1)).init, params).inner
    assert _is_coded(adam.mu["large"]) and _is_coded(adam.nu["large"])
    assert adam.mu["small"].shape == (63, 65) and adam.nu["one"].shape == ()
    assert adam.count.dtype == jnp.int32


@pytest.mark.parametrize(("bits", "at_least"), [(8, 3.99), (4, 7.9)])
def test_bytes_and_dtypes(bits, at_least):
    params = {"kernel": jax.ShapeDtypeStruct((512, 384), jnp.float32)}
    ours = curvax.quantize_state(optax.adam(0.1), bits=bits)
    state = jax.eval_shape(ours.init, params)
    for leaf in _coded(state):
        assert leaf.codes.dtype == jnp.uint8 and leaf.scales.dtype == jnp.float32
    elements, tiles = 512 * 384, 8 * 6
    assert curvax.state_bytes(ours, params) == 2 * (elements * bits // 8 + 4 * tiles) + 4
    assert curvax.state_bytes(optax.adam(0.1), params) / curvax.state_bytes(ours, params) > at_least
    dithered = curvax.quantize_state(optax.adam(0.1), bits=bits, dither=True)
    assert curvax.state_bytes(dithered, params) == curvax.state_bytes(ours, params) + 4


@functools.cache
def _adam_in_codes():
    ours = curvax.quantize_state(optax.scale_by_adam(), **SMALL)
    return jax.jit(ours.init)(PARAMS), jax.jit(ours.update)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_does_not_reach_the_codes(value):
    """The leaf's codes stay; the next good step goes on from there. (1e30 squared is infinite.)"""
    state, update = _adam_in_codes()
    _, state = update(GRADIENTS[0], state)
    kernel = np.array(GRADIENTS[1]["kernel"])
    kernel[2, 3] = value
    _, after = update(GRADIENTS[1] | {"kernel": kernel}, state)
    spoiled = ["nu"] if value == 1e30 else ["mu", "nu"]
    for name in spoiled:
        before, now = (getattr(s.inner, name)["kernel"] for s in (state, after))
        assert all(map(np.array_equal, before, now))
    updates, last = update(GRADIENTS[2], after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates["bias"], last)))


def test_dithered_averages_follow_small_increments():
    """Also from a restart on; rounded to the nearest code, an average stays where it was."""
    shape, decay, steps = (20, 30), 0.999, 2000
    old, new = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    target = decay**steps * old + (1 - decay**steps) * new
    ema = optax.ema(decay, debias=False)

    def error(**settings):
        ours = curvax.quantize_state(ema, block=16, min_elements=1, **settings)
        step = lambda state, _: (ours.update(jnp.asarray(new), state)[1], None)  # noqa: E731
        first = ours.init(jnp.zeros(shape))
        codec = Codec(8, 16)
        first = first._replace(inner=first.inner._replace(ema=encode(jnp.asarray(old), codec)))
        half_of = jax.jit(lambda state: jax.lax.scan(step, state, length=steps // 2)[0])
        half = half_of(first)
        half = flax.serialization.from_bytes(first, flax.serialization.to_bytes(half))
        found = decode(half_of(half).inner.ema, codec, shape[1])
        return np.linalg.norm(found - target) / np.linalg.norm(target)

    gap = np.diff(Codec(8, 16).values()).max()
    assert error(dither=True) < 4 * gap
    assert error() > 16 * gap


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_what_never_gets_a_gradient_stays(bits):
    """Beside rows of the same tile that do; a map without zero would move it, and far."""
    params = {"kernel": np.zeros((8, 8), np.float32)}
    gradient = {"kernel": np.repeat(np.float32(np.arange(8) % 2)[:, None], 8, axis=1)}
    optimizer = curvax.quantize_state(optax.adam(0.1), bits=bits, **SMALL)
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        assert not np.any(updates["kernel"][::2]) and np.all(updates["kernel"][1::2])


def test_it_wraps_matrix_methods_and_is_wrapped_by_views():
    params = {name: {"kernel": np.ones((8, 6), np.float32)} for name in "ab"}
    outside = curvax.quantize_state(curvax.muon(0.1), **SMALL)
    inside = curvax.on_matrices(curvax.quantize_state(curvax.scale_by_muon(), **SMALL))
    for optimizer in (outside, inside):
        state = jax.jit(optimizer.init)(params)
        assert len(_coded(state)) == 1  # one stack
        updates, state = jax.jit(optimizer.update)(params, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert set(curvax.state_of(optimizer, params, state, "a/kernel")) != set()
    assert "| mu/codes | " in curvax.summarize(outside, params)


def _momentum_in_codes(**settings):
    axes = {"kernel": curvax.MatrixAxes(rows=1, columns=2)}
    inner = curvax.on_matrices(curvax.momentum(dtype="float32"), weight_dimension_numbers=axes)
    return curvax.quantize_state(inner, where=lambda place, leaf: leaf.ndim > 2, **settings)


@pytest.mark.parametrize("dither", [False, True])
def test_moments_of_a_matrix_view_are_the_same_in_chunks(dither, monkeypatch):
    """Five matrices in two chunks of two and a rest; one is not finite in the second step."""
    params = {"kernel": np.ones((5, 6, 10), np.float32)}
    gradients = gradients_like(params, 4)
    gradients[1]["kernel"] = np.array(gradients[1]["kernel"])
    gradients[1]["kernel"][3, 2, 1] = np.nan

    settings: Any = {"block": 4, "dither": dither}
    whole, (*_, state) = run(_momentum_in_codes(**settings), gradients, params)
    monkeypatch.setattr(_chunks, "CHUNK", 2 * 60)
    in_chunks, (*_, its_state) = run(_momentum_in_codes(**settings), gradients, params)
    assert jax.tree.structure(its_state) == jax.tree.structure(state)
    jax.tree.map(assert_close, in_chunks, whole)
    for ours, expected in zip(_coded(its_state), _coded(state), strict=True):
        assert_close(ours.scales, expected.scales)
        assert np.abs(np.int32(ours.codes) - np.int32(expected.codes)).max() <= 1


def test_only_the_moments_of_a_chunk_are_decoded(monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2 * 96 * 96)
    assert temporaries_per_gradient(_momentum_in_codes(), 24, 96) < 1.3


def test_an_error_of_the_view_is_not_taken_for_one_of_the_state():
    params = {"kernel": jnp.ones((5, 6, 10))}
    ours = _momentum_in_codes()
    with pytest.raises(ValueError, match="must have the shape of its parameter"):
        ours.update({"kernel": jnp.ones((5, 6, 9))}, ours.init(params), params)
