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
from tests.helpers import assert_close, gradients_like

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
    state, update, step = jax.jit(ours.init)(PARAMS), jax.jit(ours.update), jax.jit(inner.update)

    @jax.jit
    def decoded(stored):
        read = lambda like, x, c: decode(x, c, like.shape[-1]).reshape(like.shape)  # noqa: E731
        return {
            name: jax.tree.map(functools.partial(read, c=codec), PARAMS, getattr(stored, name))
            for name, codec in codecs.items()
        }

    @jax.jit
    def encoded(moments):
        return {
            name: jax.tree.map(
                lambda x, c=codec: encode(jnp.atleast_2d(x), c), getattr(moments, name)
            )
            for name, codec in codecs.items()
        }

    for gradient in GRADIENTS:
        before = state.inner
        moments = decoded(before)
        desired, after = step(gradient, before._replace(**moments))
        updates, state = update(gradient, state)
        assert_close(updates, desired, 4)
        for name, coded in encoded(after).items():
            for key, expected in coded.items():
                found = getattr(state.inner, name)[key]
                assert np.abs(np.int32(found.codes) - np.int32(expected.codes)).max() <= 17
                assert_close(found.scales, expected.scales, 4)
                assert np.mean(np.asarray(found.codes) != np.asarray(expected.codes)) < 0.02


def test_nothing_is_coded_if_no_leaf_is_selected():
    """And everything is as without the wrapper, bit for bit."""
    inner = optax.adam(0.1)
    ours = curvax.quantize_state(inner, where=lambda path, leaf: False)
    plain, state = jax.jit(inner.init)(PARAMS), jax.jit(ours.init)(PARAMS)
    step, update = jax.jit(inner.update), jax.jit(ours.update)
    for gradient in GRADIENTS:
        desired, plain = step(gradient, plain, PARAMS)
        updates, state = update(gradient, state, PARAMS)
        assert all(map(np.array_equal, jax.tree.leaves(updates), jax.tree.leaves(desired)))
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(plain)))


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
    state = jax.eval_shape(curvax.quantize_state(optax.adam(0.1)).init, params)
    adam = state.inner[0]
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


@functools.cache
def _adam_in_codes():
    """Its start, and a step compiled once for all values."""
    ours = curvax.quantize_state(optax.scale_by_adam(), **SMALL)
    return jax.jit(ours.init)(PARAMS), jax.jit(ours.update)


@pytest.mark.xdist_group("Adam in codes")
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


@pytest.mark.parametrize("bits", [4, 8])
def test_adam_in_few_bits_still_minimizes(bits):
    """A quadratic with curvatures from 0.1 to 10; plain SGD at this rate diverges."""
    curvature = np.geomspace(0.1, 10, 64 * 64, dtype=np.float32).reshape(64, 64)
    loss = lambda x: 0.5 * jnp.sum(curvature * x**2) / curvature.size  # noqa: E731

    @functools.partial(jax.jit, static_argnums=0)
    def run(optimizer):
        def step(carry, _):
            x, state = carry
            updates, state = optimizer.update(jax.grad(loss)(x), state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.ones((64, 64))
        (x, _), _ = jax.lax.scan(step, (x, optimizer.init(x)), length=400)
        return loss(x)

    schedule = optax.cosine_decay_schedule(0.05, 400)
    start = float(np.mean(0.5 * curvature))
    assert run(curvax.quantize_state(optax.adam(schedule), bits=bits)) < 1e-3 * start


def test_directions_of_low_precision_momentum_stay_near():
    """Muon's momentum within one code step of its tile at every step: 8 bits, 200 steps."""
    params = {"w": np.zeros((16, 24), np.float32)}
    exact, ours = optax.trace(0.9), curvax.quantize_state(optax.trace(0.9), block=8, min_elements=1)
    gap = np.diff(Codec(8).book.values()).max() / 2

    @jax.jit
    def run(gradients):
        def step(states, g):
            desired, s = exact.update({"w": g}, states[0])
            found, q = ours.update({"w": g}, states[1])
            return (s, q), (desired["w"], found["w"])

        return jax.lax.scan(step, (exact.init(params), ours.init(params)), gradients)[1]

    gradients = np.random.default_rng(0).standard_normal((200, 16, 24), np.float32)
    for desired, found in zip(*map(np.asarray, run(gradients)), strict=True):
        # Errors of at most half a gap of the tile's largest enter at each step, and decay by 0.9.
        most = gap * float(np.abs(desired).max()) / (1 - 0.9) * 2
        assert float(np.abs(found - desired).max()) <= most


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
        run = jax.jit(lambda state: jax.lax.scan(step, state, length=steps // 2)[0])
        half = run(first)
        half = flax.serialization.from_bytes(first, flax.serialization.to_bytes(half))
        found = decode(run(half).inner.ema, codec, shape[1])
        return np.linalg.norm(found - target) / np.linalg.norm(target)

    gap = np.diff(Codec(8, 16).book.values()).max()
    assert error(dither=True) < 4 * gap
    assert error() > 16 * gap


def test_dither_takes_a_counter_of_memory():
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    plain, dithered = (curvax.quantize_state(optax.trace(0.9), dither=d) for d in (False, True))
    assert curvax.state_bytes(dithered, params) == curvax.state_bytes(plain, params) + 4


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_what_never_gets_a_gradient_stays(bits):
    """Beside rows of the same tile that do; a map without zero would move it, and far."""
    params = {"kernel": np.zeros((8, 8), np.float32)}
    gradient = {"kernel": np.where(np.arange(8)[:, None] % 2, 1.0, 0.0).astype(np.float32)}
    gradient["kernel"] = gradient["kernel"] * np.ones((8, 8), np.float32)
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


def test_states_are_saved_scanned_and_kept_in_structure():
    ours = curvax.quantize_state(optax.adam(0.1), bits=4, **SMALL)
    params = {"kernel": PARAMS["kernel"]}
    stacked = {"kernel": np.stack([g["kernel"] for g in GRADIENTS])}
    step = lambda state, g: (ours.update(g, state)[1], None)  # noqa: E731
    start = jax.jit(ours.init)(params)
    state, _ = jax.jit(functools.partial(jax.lax.scan, step))(start, stacked)
    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(start, saved)
    assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(state)))
    doubled = optax.tree.map_params(ours, lambda x: x, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)


def test_bfloat16_moments_come_back_as_bfloat16():
    inner = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    ours = curvax.quantize_state(inner, **SMALL)
    state, update = jax.jit(ours.init)({"kernel": PARAMS["kernel"]}), jax.jit(ours.update)
    for gradient in GRADIENTS[:2]:
        updates, state = update({"kernel": gradient["kernel"]}, state)
    assert all(leaf.scales.dtype == jnp.float32 for leaf in _coded(state))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits must be 4, 6 or 8, got 3"),
        ({"block": 5}, "block must be even, got 5"),
        ({"block": 0}, "block must be an integer of at least 1, got 0"),
        ({"min_elements": -1}, "min_elements must be an integer of at least 1, got -1"),
        ({"dither": 1}, "dither must be True or False, got 1"),
        ({"unsigned": "nu"}, "unsigned must be a collection of field names, got 'nu'"),
        ({"where": 3}, "where must be a predicate that is called with path and leaf, .*; got 3"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        curvax.quantize_state(optax.adam(0.1), **arguments)
    with pytest.raises(ValueError, match="inner must be an Optax transformation, got 3"):
        curvax.quantize_state(3, **arguments)  # pyright: ignore[reportArgumentType]


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

    def run():
        ours = _momentum_in_codes(block=4, dither=dither)
        state, update, found = ours.init(params), jax.jit(lambda *x: ours.update(*x)), []
        for gradient in gradients:
            updates, state = update(gradient, state, params)
            found.append(updates)
        return found, state

    whole, state = run()
    monkeypatch.setattr(_chunks, "CHUNK", 2 * 60)
    in_chunks, its_state = run()
    assert jax.tree.structure(its_state) == jax.tree.structure(state)
    jax.tree.map(assert_close, in_chunks, whole)
    for ours, expected in zip(_coded(its_state), _coded(state), strict=True):
        assert_close(ours.scales, expected.scales)
        assert np.abs(np.int32(ours.codes) - np.int32(expected.codes)).max() <= 1


def test_only_the_moments_of_a_chunk_are_decoded(monkeypatch):
    """A step's temporaries are its gradients, and those of a chunk."""
    layers, order = 24, 96
    params = {"kernel": jnp.zeros((layers, order, order))}
    optimizer, x = _momentum_in_codes(), jnp.ones((order, 8))
    state = optimizer.init(params)

    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(p["kernel"] @ x)))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    monkeypatch.setattr(_chunks, "CHUNK", 2 * order * order)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state)
    memory: Any = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.3 * params["kernel"].nbytes


def test_an_error_of_the_view_is_not_taken_for_one_of_the_state():
    params = {"kernel": jnp.ones((5, 6, 10))}
    ours = _momentum_in_codes()
    with pytest.raises(ValueError, match="must have the shape of its parameter"):
        ours.update({"kernel": jnp.ones((5, 6, 9))}, ours.init(params), params)
