"""Few-bit codes against exact rational numbers."""

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.linalg._numerics import tile_scales
from curvax.transforms.storage._codec import (
    CODE_BOOKS,
    Codec,
    Coded,
    decode,
    encode,
    pack,
    quantize,
    unpack,
)
from tests.cells import ALL_CELLS, cells
from tests.helpers import OPTIMIZED, at
from tests.shared.stored import same
from tests.tpu_forms import forms_of_tpus

# Optimized, where rounding decides: that may not change a bit either.
optimized = functools.partial(jax.jit, compiler_options=OPTIMIZED)

compiled = optimized if ALL_CELLS else jax.jit
BITS = (4, 6, 8)
CODECS = [(bits, map) for map in CODE_BOOKS for bits in BITS]
BLOCK = 4
EPS, TINY = 2.0**-23, 2.0**-126  # of float32
PRODUCTS = 4  # rounding errors between a scale and a decoded number
every_codec = pytest.mark.parametrize(("bits", "map"), cells(CODECS, of=6))


@functools.cache
def _values(bits: int, map: str) -> list[Fraction]:
    """What the codes stand for, written out as in Eqs 3 and 4 of the paper, one row a map."""
    x = [-1 + Fraction(2 * j, 2**bits - 1) for j in range(2**bits)]
    zero = 2 ** (bits - 1) - 1
    return {
        "linear": x,
        "linear2": [0 * v if j == zero else abs(v) * v for j, v in enumerate(x)],
        "unsigned": [Fraction(j + 1, 2**bits) ** 2 for j in range(2**bits)],
    }[map]


def _floats(bits: int, map: str) -> np.ndarray:
    return np.array([float(v) for v in _values(bits, map)])


def _drawn(shape, map="linear2", dtype: Any = np.float32, seed=0) -> np.ndarray:
    """Normal numbers of which some are 0; not negative where the map has no such codes."""
    generator = np.random.default_rng([seed, *shape])
    x = generator.standard_normal(shape) * (generator.random(shape) < 0.9)
    return np.asarray(np.abs(x) if map == "unsigned" else x, jnp.dtype(dtype))


def _scales(x, block) -> np.ndarray:
    """The largest magnitude of every tile."""
    *batch, m, n = x.shape
    cut = [(0, 0)] * len(batch) + [(0, -m % block), (0, -n % block)]
    whole = np.pad(np.abs(np.asarray(x, np.float64)), cut)
    return whole.reshape(*batch, -(-m // block), block, -(-n // block), block).max((-3, -1))


def _wide(scales, block, shape) -> np.ndarray:
    """Every tile's scale at every place of the tile."""
    wide = np.asarray(scales, np.float64).repeat(block, -2).repeat(block, -1)
    return wide[..., : shape[-2], : shape[-1]]


@pytest.mark.parametrize(
    ("bits", "map", "dtype"),
    [
        *((*codec, "float32") for codec in CODECS),
        *((*codec, "float64") for codec in cells(CODECS, of=5)),
    ],
)
def test_codes_stand_for_the_table_of_the_paper_and_are_kept_exactly(bits, map, dtype):
    """Bit for bit: the integer times 1/T, rounded, and exactly 1 at the ends, times the scale.

    Any codes and scales, as long as every tile has an element as large as its scale. So
    `Q(D(Q(x))) = Q(x)`, codes and scales.
    """
    codec, generator, shape = Codec(bits, BLOCK, map), np.random.default_rng(0), (30, 9, 10)
    exact = _floats(bits, map)
    assert codec.values().tolist() == exact.tolist() and (np.diff(exact) > 0).all()
    codes = generator.integers(0, 2**bits, shape, np.uint8)
    codes[..., ::BLOCK, ::BLOCK] = 2**bits - 1
    assert len(np.unique(codes)) == 2**bits
    scales = np.exp(generator.uniform(-20, 20, (30, 3, 3))).astype(dtype)

    @compiled
    def kept(codes, scales):
        coded = Coded(pack(codes, codec), scales)
        x = decode(coded, codec, 10)
        return coded, x, encode(x, codec)

    with jax.enable_x64(dtype == "float64"):
        coded, x, again = kept(codes, scales)
    integers = np.array([float(v * codec.unit) for v in _values(bits, map)], dtype)
    shares = integers * np.asarray(1 / codec.unit, dtype)
    shares = np.where(abs(integers) == codec.unit, np.sign(integers), shares)
    assert np.abs(shares - exact).max() <= np.finfo(dtype).eps
    assert same(x, shares[codes] * _wide(scales, BLOCK, shape).astype(dtype))
    assert np.array_equal(coded.scales, scales) and same(again, coded)


def _hard(map: str) -> list[np.ndarray]:
    """Tiles that are cut, larger than their matrix, of zeros, of any size and beside others."""
    xs = [_drawn(shape, map) for shape in ((1, 9), (40, 13, 21), (2, 32, 3, 3))]
    xs[1][:, :BLOCK, BLOCK : 2 * BLOCK] = xs[1][:, -1:, -1:] = 0
    plain = _drawn((8, 12), map)
    # The reciprocal of the last size is subnormal.
    xs += [plain / plain.max() * np.float32(2.0**e) for e in (-100, 100, 126, 127)]
    generator, number = np.random.default_rng(1), 200
    low, high = np.sort(generator.uniform(-45, 30, (2, number, 1, 1)), axis=0)
    x = generator.uniform(-1, 1, (number, 6, 7)) * 10.0 ** generator.uniform(low, high)
    x *= generator.random(x.shape) <= generator.choice([0.3, 1.0], (number, 1, 1))
    xs.append(np.float32(np.abs(x) if map == "unsigned" else x))
    return xs + [_drawn((13, 10), map, dtype) for dtype in ("bfloat16", "float16")]


@every_codec
def test_every_element_gets_the_nearest_code_and_the_error_is_half_a_gap_at_most(bits, map):
    codec, values, xs = Codec(bits, BLOCK, map), _floats(bits, map), _hard(map)
    largest = max(np.diff(values).max() / 2, values[0])  # 0 may have no code

    @compiled
    def there_and_back(xs):
        coded = [encode(x, codec) for x in xs]
        return coded, [decode(c, codec, x.shape[-1]) for c, x in zip(coded, xs, strict=True)]

    for x, coded, decoded in zip(xs, *there_and_back(xs), strict=True):
        assert coded.codes.dtype == jnp.uint8 and decoded.shape == x.shape
        assert coded.scales.dtype == decoded.dtype == x.dtype
        scales, found = _scales(x, BLOCK), np.asarray(coded.scales, np.float64)
        # XLA may take subnormal numbers for 0, here or there.
        assert np.array_equal(*np.where((scales >= TINY) | (scales == 0), (found, scales), 0))
        exact, decoded = (np.asarray(y, np.float64) for y in (x, decoded))
        wide = _wide(scales, BLOCK, x.shape)
        unit = exact / np.where(wide > 0, wide, 1)
        distances = np.abs(unit[..., None] - values)
        codes = np.asarray(unpack(coded.codes, codec, x.shape[-1]))
        taken = np.take_along_axis(distances, codes[..., None], axis=-1)[..., 0]
        nearest, second = np.moveaxis(np.partition(distances, 1, axis=-1)[..., :2], -1, 0)
        # Two roundings of numbers up to 1: the quotient's and the midpoint's.
        sure = (wide == 0) | (wide >= 2.0**-100)
        assert (taken - nearest <= 2 * EPS)[sure].all(), x.shape
        clear = sure & (second - nearest > 2 * EPS)
        assert clear[sure & (exact != 0)].mean() > 0.8  # "linear" has two codes next to 0
        assert np.array_equal(codes[clear], distances.argmin(axis=-1)[clear]), x.shape
        assert (np.abs(decoded) <= wide).all()
        rounding = PRODUCTS * EPS if x.itemsize == 4 else 2 * float(jnp.finfo(x.dtype).eps)
        bound = (largest + rounding) * wide + TINY * (wide > 0)
        assert ((np.abs(decoded - exact) <= bound) | ((wide > 0) & (wide < TINY))).all(), x.shape


def _midpoints(bits: int, map: str, dtype) -> tuple[np.ndarray, float]:
    """All midpoints times the largest number beside them, both of which are exact integers."""
    values = _values(bits, map)
    scale = 2 * math.lcm(*(x.denominator for x in values))
    exact = [(a + b) / 2 * scale for a, b in itertools.pairwise(values)]
    midpoints = np.array([float(x) for x in exact], dtype)
    assert [Fraction(float(x)) for x in midpoints] == exact
    return midpoints, float(scale)


@every_codec
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_two_codes_equally_near_the_lower_is_taken(dtype, bits, map):
    """In many tiles of a midpoint and the scale, and in one tile of all midpoints."""
    with jax.enable_x64(dtype == "float64"):
        midpoints, scale = _midpoints(bits, map, dtype)

        @(optimized if dtype == "float32" else compiled)
        def codes_of(midpoints):
            rows = jnp.stack([midpoints, jnp.full_like(midpoints, scale)], axis=1)
            layouts = [(rows.reshape(1, -1), 2), (rows, 2**bits)]
            found = [quantize(x, tile_scales(x, k), Codec(bits, k, map)) for x, k in layouts]
            return [codes.reshape(rows.shape)[:, 0] for codes in found]

        lower = np.arange(2**bits - 1)
        for codes in codes_of(midpoints):
            assert not np.flatnonzero(codes != lower).size, np.flatnonzero(codes != lower)
        # The negative control: a little above, it is the upper one.
        for codes in codes_of(midpoints + 4 * np.finfo(dtype).eps * scale):
            assert (codes == lower + 1).all()


@every_codec
def test_dither_takes_a_neighbor_by_its_share_of_the_gap(bits, map):
    """The lower code exactly where the share is at most u; with 1/2 it is the nearest code."""
    codec, generator = Codec(bits, BLOCK, map), np.random.default_rng(bits)
    x, u = _drawn((40, 36), map), np.float32(generator.random((40, 36)))
    scales = tile_scales(x, BLOCK)
    coded = compiled(quantize, static_argnums=2)
    found, halves = coded(x, scales, codec, u), coded(x, scales, codec, np.full_like(u, 0.5))
    assert np.array_equal(halves, coded(x, scales, codec))
    values = _floats(bits, map)
    unit = np.float64(x) / np.maximum(_wide(scales, BLOCK, x.shape), 1e-30)
    lower = np.clip(np.searchsorted(values, unit, side="right") - 1, 0, 2**bits - 2)
    share = np.clip((unit - values[lower]) / (values[lower + 1] - values[lower]), 0, 1)
    clear = np.abs(share - u) > 1e-7 * 4**bits  # a rounding error in units of the smallest gap
    assert clear.mean() > 0.8 and len(np.unique(found - lower)) == 2
    assert np.array_equal(found[clear], (lower + (share > u))[clear])


@pytest.mark.parametrize(
    ("bits", "map"), cells([(4, "linear2"), (6, "linear2"), (8, "linear2"), (8, "linear")], of=2)
)
def test_no_compiler_batch_or_platform_changes_a_bit(bits, map):
    """Whole tiles and cut ones, in batches and alone, with dither and without; in a TPU's bands."""
    codec, shapes = Codec(bits, BLOCK, map), [(13, 10), (13, 10), (2, 2, 4, 4), (2, 3, 5, 7)]
    xs = [jnp.asarray(_drawn(shape, map, seed=2)) for shape in shapes]
    dither = np.linspace(0, 1, 130, dtype=np.float32).reshape(13, 10)

    def both(xs: list[Any]) -> list[Any]:
        coded = [encode(x, codec, None if i else dither) for i, x in enumerate(xs)]
        return [(c, decode(c, codec, x.shape[-1])) for c, x in zip(coded, xs, strict=True)]

    expected = both(xs)
    assert same(optimized(both)(xs), expected)
    with forms_of_tpus():
        assert "optimization_barrier" in str(jax.make_jaxpr(both)(xs))
        assert same(jax.jit(both)(xs), expected)
    assert same(encode(xs[2][0, 0], codec), at(expected[2][0], 0, 0))
    assert same(jax.vmap(lambda x: encode(x, codec))(xs[3]), expected[3][0])


@pytest.mark.parametrize("bits", BITS)
def test_codes_share_bytes(bits):
    """Of a row alone.

    4 bits: column c in the low half of byte c, column c + ⌈n/2⌉ in its high half. 6 bits, with
    q = ⌈n/4⌉: columns c, c + q and c + 2q in these bytes, c + 3q in their high two bits.
    """
    codec, widths = Codec(bits), range(1, 10)

    @compiled
    def there_and_back(batch):
        packed = [pack(codes, codec) for codes in batch]
        return packed, [unpack(p, codec, n) for p, n in zip(packed, widths, strict=True)]

    batch = [np.random.default_rng(n).integers(0, 2**bits, (3, n), np.uint8) for n in widths]
    for codes, packed, back in zip(batch, *there_and_back(batch), strict=True):
        columns = codes.shape[1]
        each = -(-columns // {4: 2, 6: 4, 8: 1}[bits])
        parts = np.pad(codes, [(0, 0), (0, 4 * each)])[:, : 4 * each].reshape(3, 4, each)
        if bits == 4:
            expected = parts[:, 0] + 16 * parts[:, 1]
        elif bits == 6:
            high = (64 * (parts[:, 3] // 4**i % 4) for i in range(3))
            expected = np.concatenate([parts[:, i] + x for i, x in enumerate(high)], axis=1)
        else:
            expected = codes
        assert packed.dtype == np.uint8 and np.array_equal(packed, expected), columns
        assert np.array_equal(back, codes), columns
