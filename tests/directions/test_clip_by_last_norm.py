"""Clipping by the norm of the step before."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from tests.helpers import assert_close


def gradients(steps: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    scales = 2.0 ** draw.integers(-2, 3, steps)
    shapes = {"kernel": (2, 3, 4), "bias": (5,), "scale": ()}
    return [
        {name: np.float32(scale * draw.standard_normal(shape)) for name, shape in shapes.items()}
        for scale in scales
    ]


def test_equals_clipping_by_the_norm_of_the_step_before() -> None:
    max_norm, last, clipped = 3.0, 0.0, 0
    clip = curvax.clip_by_last_norm(max_norm)
    state = clip.init(gradients(1)[0])
    for gradient in gradients(8):
        factor = min(1.0, max_norm / last) if last else 1.0
        clipped += factor < 1
        updates, state = jax.jit(clip.update)(gradient, state)
        assert_close(updates, jax.tree.map(lambda g, f=factor: np.float32(f * g), gradient))
        last = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradient.values()))
        assert_close(jnp.sqrt(state.squares), np.float32(last))
    assert 0 < clipped < 7


def test_keeps_dtypes_and_sums_bfloat16_in_float32() -> None:
    clip = curvax.clip_by_last_norm(1.0)
    gradient = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    updates, state = clip.update(gradient, clip.init(gradient))
    assert updates["kernel"].dtype == jnp.bfloat16
    assert state.squares.dtype == jnp.float32 and state.squares == 4096
    updates, _ = clip.update(gradient, state)
    assert (updates["kernel"] == 1 / 64).all()


def test_zero_and_non_finite_gradients_leave_the_state_usable() -> None:
    clip = curvax.clip_by_last_norm(2.0)
    zero, bad = jnp.zeros(3), jnp.array([3.0, jnp.nan, jnp.inf])
    updates, state = clip.update(zero, clip.init(zero))
    assert not updates.any() and state.squares == 0
    _, state = clip.update(bad, state)
    updates, state = clip.update(jnp.ones(3), state)
    assert_close(updates, np.full(3, np.float32(2 / 3)))
    assert_close(state.squares, np.float32(3))


def test_a_sum_of_squares_that_overflows_clips_the_next_step_and_does_not_erase_it() -> None:
    clip = curvax.clip_by_last_norm(1.0)
    _, state = clip.update(jnp.full((10,), 1e19), clip.init(jnp.zeros(10)))
    clipped, _ = clip.update(jnp.full((10,), 0.1), state)
    assert jnp.isfinite(state.squares) and (jnp.asarray(clipped) > 0).all()
