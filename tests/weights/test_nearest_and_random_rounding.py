"""Rounding to bfloat16: neighbors, probabilities, special values, and the way back to an update."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from curvax.transforms.weights._rounding import nearest, random_bits, stochastic, update_to
from tests.cells import cells
from tests.helpers import OPTIMIZED

EVERY_BITS = np.arange(2**16, dtype=np.uint32)
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
TINY = 2.0**-126

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
properties = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)


@jax.jit
def every_rounding(x):
    """`x` rounded with each of the 2¹⁶ random bits."""
    return stochastic(jnp.full(EVERY_BITS.shape, x), EVERY_BITS)


def neighbors(x: float) -> tuple[float, float]:
    """The numbers of bfloat16 below and above `x`, or `x` twice."""
    if float(ml_dtypes.bfloat16(x)) == x:
        return x, x
    cut = np.float32(x).view(np.uint32) & np.uint32(0xFFFF0000)
    ends = [np.array(pattern, np.uint32).view(np.float32) for pattern in (cut, cut + 0x10000)]
    low, high = sorted(float(end) for end in ends)
    return low, high


@properties
@hypothesis.given(floats.filter(lambda x: abs(x) <= LARGEST))
@hypothesis.example(1.0 + 2.0**-23)
@hypothesis.example(-(2.0 - 2.0**-23))  # the carry runs into the exponent
@hypothesis.example(2.0**-126 * 1.015625 + 2.0**-149)
@hypothesis.example(2.0**-140)  # subnormal
@hypothesis.example(-0.0)
@hypothesis.example(LARGEST)
@hypothesis.example(TINY)
@hypothesis.example(2.0**-133)
def test_the_mean_over_all_bits_is_the_number_exactly(x):
    found = np.asarray(every_rounding(np.float32(x)), np.float64)
    assert {*found} <= {*neighbors(x)}
    assert found.mean() == x
    assert (np.signbit(found) == np.signbit(x)).all()


def test_what_is_finite_stays_finite_and_what_is_not_stays_so():
    top = np.finfo(np.float32).max
    assert (np.asarray(every_rounding(top)) == LARGEST).all()
    assert (np.asarray(every_rounding(-top)) == -LARGEST).all()
    assert (np.asarray(every_rounding(np.float32(np.inf))) == np.inf).all()
    assert (np.asarray(every_rounding(np.float32(-np.inf))) == -np.inf).all()
    payload = np.array(0x7F800001, np.uint32).view(np.float32)  # cut off, it would be infinity
    assert np.isnan(np.asarray(every_rounding(payload))).all()


def test_the_compiler_does_not_leave_out_the_rounding():
    x = jnp.linspace(1, 2, 1001)
    lost = jax.jit(lambda x: x - nearest(x)).lower(x).compile(OPTIMIZED)(x)
    expected = np.asarray(x) - np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (np.asarray(lost) == expected).all() and expected.any()


def sums(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Parameters in bfloat16 and updates: all scales, and sums that cancel."""
    draw = np.random.default_rng(seed)
    p = np.ldexp(draw.uniform(1, 2, number), draw.integers(-90, 126, number))
    p = (p * draw.choice([-1, 1], number)).astype(ml_dtypes.bfloat16)
    wide = p.astype(np.float64)
    apart = draw.uniform(-2, 2, number) * np.exp2(draw.integers(-40, 25, number))
    cancelling = -1 + draw.uniform(-2, 2, number) * np.exp2(draw.integers(-30, 0, number))
    with np.errstate(over="ignore"):
        u = (wide * np.where(draw.random(number) < 0.5, apart, cancelling)).astype(np.float32)
    return p, np.where(np.isfinite(u), u, np.float32(1.0))


@pytest.mark.parametrize("options", [{}, OPTIMIZED], ids=["plain", "optimized"])
def test_adding_the_update_gives_the_rounded_sum(options):
    """The statement of the docstring, on a million pairs."""
    p, u = sums(2**20, seed=0)
    bits = np.random.default_rng(1).integers(0, 2**16, p.shape, dtype=np.uint32)

    def step(p, u, bits):
        q = stochastic(p.astype(jnp.float32) + u, bits)
        return q, update_to(q, p, u)

    q, change = jax.jit(step).lower(p, u, bits).compile(options)(p, u, bits)
    found = jax.jit(optax.apply_updates)(p, change)
    assert found.dtype == jnp.bfloat16
    finite = np.isfinite(np.asarray(q))
    p, u, q, found = (np.asarray(x)[finite] for x in (p, u, q, found))
    found = found.astype(np.float32)
    subnormal = np.abs(q.astype(np.float64) - p.astype(np.float64)) < TINY
    gap = np.abs(found.astype(np.float64) - q)
    exact = (found == q) | (subnormal & (gap <= TINY))
    assert exact.all(), (p[~exact][:3], u[~exact][:3], q[~exact][:3], found[~exact][:3])
    total = p.astype(np.float32) + u
    cancelled = np.abs(total) < np.abs(p.astype(np.float32)) * 2.0**-16
    assert (cancelled & (total != 0)).sum() > 1000, "too few sums cancel"
    assert finite.mean() > 0.9 and np.isfinite(found).all()


def test_a_sum_beyond_float32_is_left_to_the_addition():
    p = jnp.array([LARGEST, jnp.inf, jnp.nan, 1.0, 1.0, 2.0**127], jnp.bfloat16)
    u = jnp.array([3e38, 1.0, 1.0, -jnp.inf, jnp.nan, -3.4e38], jnp.float32)
    total = p.astype(jnp.float32) + u
    q = stochastic(total, jnp.zeros(p.shape, jnp.uint32))
    found = np.asarray(optax.apply_updates(p, update_to(q, p, u)), np.float32)
    np.testing.assert_array_equal(found[:5], [np.inf, np.inf, np.nan, -np.inf, np.nan])
    assert found[5] == q[5] and np.isfinite(q[5])


def bits_of(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    key = jax.random.key_data(jax.random.key(seed))
    rows = None if len(shape) < 2 else jnp.arange(shape[0], dtype=jnp.uint32)
    return np.asarray(random_bits(key, rows, shape))


@pytest.mark.parametrize(
    "shape", cells([(2**18,), (512, 512), (2**17, 2), (2, 2**17), (8, 64, 512)], of=3)
)
def test_random_bits_are_uniform_and_independent(shape):
    """Means, single bits and correlations within five standard errors, blocks within six."""
    found = bits_of(3, shape)
    assert found.dtype == np.uint32 and found.max() < 2**16
    x = (found.astype(np.float64) - (2**16 - 1) / 2) / (2**16 / 12**0.5)
    error = x.size**-0.5
    assert abs(x.mean()) < 5 * error and abs((x**2).mean() - 1) < 5 * error
    for bit in range(16):
        assert abs(((found >> bit) & 1).mean() - 0.5) < 2.5 * error
    others = [bits_of(4, shape)] + [np.roll(found, 1, axis) for axis in range(len(shape))]
    for other in others:
        if other.size != found.size or (other == found).all():
            continue
        y = (other.astype(np.float64) - (2**16 - 1) / 2) / (2**16 / 12**0.5)
        assert abs((x * y).mean()) < 5 * error
    counts = np.bincount(found.ravel() >> 8, minlength=256)
    deviations = (counts - x.size / 256) / (x.size / 256) ** 0.5
    assert np.abs(deviations).max() < 6 and 0.5 < (deviations**2).mean() < 1.5
