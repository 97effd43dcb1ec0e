"""Few-bit codes against exact rational numbers."""

import functools
import itertools
import math
from collections.abc import Sequence
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
    dequantize,
    encode,
    pack,
    quantize,
    unpack,
)
from tests.cells import ALL_CELLS, cells
from tests.helpers import OPTIMIZED
from tests.shared.stored import same
from tests.tpu_forms import forms_of_tpus

# Optimized, where rounding decides: that may not change a bit either.
optimized = functools.partial(jax.jit, compiler_options=OPTIMIZED)

compiled = optimized if ALL_CELLS else jax.jit
BITS = (4, 6, 8)
CODECS = [(bits, map) for map in CODE_BOOKS for bits in BITS]
BLOCK = 4
SHAPES = [(1, 9), (40, 13, 21), (2, 32, 3, 3)]  # of the last, a tile is larger than a matrix
PRODUCTS = 4  # rounding errors between a scale and a decoded number
every_bits = pytest.mark.parametrize("bits", cells(BITS, of=3))


every_codec = pytest.mark.parametrize(("bits", "map"), cells(CODECS, of=3))


@functools.partial(compiled, static_argnums=1)
def code(xs: Sequence[Any], codec: Codec) -> tuple[list[Coded], list[jax.Array]]:
    """The codes of many matrices and what they decode to."""
    coded = [encode(x, codec) for x in xs]
    return coded, [decode(c, codec, x.shape[-1]) for c, x in zip(coded, xs, strict=True)]


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


def _largest_gap(bits: int, map: str) -> Fraction:
    return max(b - a for a, b in itertools.pairwise(_values(bits, map)))


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


# The table


@every_codec
def test_codes_decode_to_the_table_of_the_paper(bits, map):
    """As specified, bit for bit: the integer times 1/T, rounded; and exactly 1 at the ends."""
    codec, codes = Codec(bits, 256, map), np.uint8(np.arange(256) % 2**bits)[None]
    values = codec.values()
    assert values.tolist() == [float(v) for v in _values(bits, map)]
    assert (np.diff(values) > 0).all()
    read = optimized(dequantize, static_argnums=2)
    integers = np.array([float(v * codec.unit) for v in _values(bits, map)], np.float32)[codes]
    desired = integers * np.float32(1 / codec.unit)
    desired = np.where(abs(integers) == codec.unit, np.sign(integers), desired)
    exact = np.array([float(v) for v in _values(bits, map)])[codes]
    assert np.abs(desired - exact).max() <= np.finfo(np.float32).eps
    for scale in (1.0, 0.5):
        scales = jnp.asarray(np.full((1, 1), scale, np.float32))
        assert same(read(jnp.asarray(codes), scales, codec), np.float32(scale) * desired)


# The nearest code


@every_codec
def test_every_element_gets_the_nearest_code_and_the_error_is_half_a_gap_at_most(bits, map):
    codec, xs = Codec(bits, BLOCK, map), [_drawn(shape, map) for shape in SHAPES]
    for x, found, decoded in zip(xs, *code(xs, codec), strict=True):
        scales = _scales(x, BLOCK)
        assert found.scales.dtype == jnp.float32 and np.array_equal(found.scales, scales)
        wide = _wide(scales, BLOCK, x.shape)
        unit = np.asarray(x, np.float64) / np.where(wide > 0, wide, 1)
        distances = np.abs(unit[..., None] - [float(v) for v in _values(bits, map)])
        codes = np.asarray(unpack(found.codes, codec, x.shape[-1]))
        taken = np.take_along_axis(distances, codes[..., None], axis=-1)[..., 0]
        nearest, second = np.moveaxis(np.partition(distances, 1, axis=-1)[..., :2], -1, 0)
        # Two roundings of numbers up to 1: the quotient's and the midpoint's.
        assert (taken - nearest <= 2 * np.finfo(np.float32).eps).all(), x.shape
        clear = second - nearest > 2 * np.finfo(np.float32).eps
        assert clear[x != 0].mean() > 0.8  # "linear" has two codes next to 0
        assert np.array_equal(codes[clear], distances.argmin(axis=-1)[clear]), x.shape
        assert decoded.dtype == jnp.float32 and decoded.shape == x.shape
        error = np.abs(np.asarray(decoded, np.float64) - np.asarray(x, np.float64))
        largest = float(max(_largest_gap(bits, map) / 2, _values(bits, map)[0]))  # 0 has no code
        assert (error <= (largest + PRODUCTS * np.finfo(np.float32).eps) * wide).all(), x.shape


def _midpoints(bits: int, map: str, dtype) -> tuple[np.ndarray, float]:
    """All midpoints times the largest number beside them, both of which are exact integers."""
    values = _values(bits, map)
    scale = 2 * math.lcm(*(x.denominator for x in values))
    exact = [(a + b) / 2 * scale for a, b in itertools.pairwise(values)]
    assert all(x.denominator == 1 for x in exact)
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
        for layout, codes in zip(("many tiles", "one tile"), codes_of(midpoints), strict=True):
            wrong = np.flatnonzero(codes != lower)
            what = f"{layout}: {wrong.size} of {lower.size} ties, after the codes {wrong}"
            assert wrong.size == 0, what
        # The negative control: a little above, it is the upper one.
        for codes in codes_of(midpoints + 4 * np.finfo(dtype).eps * scale):
            assert (codes == lower + 1).all()


def test_tiles_of_any_size_keep_their_codes():
    """Up to the end of float32: the reciprocal of the last size is subnormal."""
    codec, xs = Codec(4, BLOCK), [_drawn((4, 4)), _drawn((8, 12))]  # one tile, and many
    xs = [np.float32(np.where(np.arange(x.shape[-1]) % 4 == 0, 1, x / 4)) for x in xs]
    ones, plain = code(xs, codec)
    for size in (2.0**-100, 2.0**100, 2.0**126, 2.0**127):
        others, decoded = code([x * np.float32(size) for x in xs], codec)
        for one, other in zip(ones, others, strict=True):
            assert np.array_equal(other.scales, one.scales * np.float32(size)), size
            assert np.array_equal(other.codes, one.codes), size
        for x, y in zip(plain, decoded, strict=True):
            assert np.array_equal(np.asarray(y, np.float64) / size, x), size


# Dither


@every_codec
def test_dither_takes_a_neighbor_by_its_share_of_the_gap(bits, map):
    """The lower code exactly where the share is at most u; with 1/2 it is the nearest code."""
    codec, generator = Codec(bits, BLOCK, map), np.random.default_rng(bits)
    x, u = _drawn((40, 36), map), np.float32(generator.random((40, 36)))
    scales = tile_scales(x, BLOCK)
    coded = compiled(quantize, static_argnums=2)
    found, halves = coded(x, scales, codec, u), coded(x, scales, codec, np.full_like(u, 0.5))
    assert np.array_equal(halves, coded(x, scales, codec))
    values = np.array([float(v) for v in _values(bits, map)])
    unit = np.float64(x) / np.maximum(_wide(scales, BLOCK, x.shape), 1e-30)
    lower = np.clip(np.searchsorted(values, unit, side="right") - 1, 0, 2**bits - 2)
    share = np.clip((unit - values[lower]) / (values[lower + 1] - values[lower]), 0, 1)
    clear = np.abs(share - u) > 1e-7 * 4**bits  # a rounding error in units of the smallest gap
    assert clear.mean() > 0.8 and len(np.unique(found - lower)) == 2
    assert np.array_equal(found[clear], (lower + (share > u))[clear])


# Exactness


@pytest.mark.parametrize(
    ("bits", "map", "dtype"),
    [
        *((*codec, "float32") for codec in CODECS),
        *((*codec, "float64") for codec in cells(CODECS, of=5)),
    ],
)
def test_numbers_that_codes_represent_are_kept_exactly(bits, map, dtype):
    """Any codes and scales, as long as every tile has an element as large as its scale.

    So `Q(D(Q(x))) = Q(x)`, codes and scales, bit for bit.
    """
    generator, shape = np.random.default_rng(0), (30, 9, 10)
    codec = Codec(bits, BLOCK, map)
    codes = generator.integers(0, 2**bits, shape, np.uint8)
    codes[..., ::BLOCK, ::BLOCK] = 2**bits - 1
    scales = np.exp(generator.uniform(-20, 20, (30, 3, 3))).astype(dtype)

    @compiled
    def kept(codes, scales):
        coded = Coded(pack(codes, codec), scales)
        x = decode(coded, codec, 10)
        return coded, x, encode(x, codec)

    with jax.enable_x64(dtype == "float64"):
        coded, x, again = kept(codes, scales)
    assert len(np.unique(codes)) == 2**bits and x.dtype == dtype
    desired = np.array([float(v) for v in _values(bits, map)])[codes]
    desired *= _wide(scales, BLOCK, shape)
    error = np.abs(np.asarray(x, np.float64) - desired)
    assert (error <= PRODUCTS * np.finfo(dtype).eps * np.abs(desired)).all()
    assert np.array_equal(coded.scales, scales) and same(again, coded)


# Tiles


@every_codec
def test_a_tile_of_zeros_has_scale_0_and_decodes_to_zeros(bits, map):
    codec, x = Codec(bits, BLOCK, map), _drawn(SHAPES[1], map)
    zeros = np.zeros((4, 6), bool)  # of the tiles
    zeros[0, 1] = zeros[3, 5] = True
    wide = _wide(zeros, BLOCK, x.shape[1:]) == 1
    x[:, wide] = 0
    (coded,), (decoded,) = code([x], codec)
    assert (np.asarray(coded.scales == 0) == zeros).all()
    assert not np.asarray(decoded)[:, wide].any()
    _, (nothing,) = code([np.zeros_like(x)], codec)
    assert nothing.shape == x.shape and not np.asarray(nothing).any()


# Jit and vmap


@pytest.mark.parametrize(
    ("bits", "map"), cells([(4, "linear2"), (8, "linear2"), (8, "linear")], of=2)
)
def test_jit_and_vmap_change_no_bit(bits, map):
    """Cut tiles, a batch of single tiles, and one of them by itself."""
    codec, shapes = Codec(bits, BLOCK, map), [(13, 10), (2, 2, 4, 4)]
    xs = [jnp.asarray(_drawn(shape, map, seed=2)) for shape in shapes]
    coded = [encode(x, codec) for x in xs]
    decoded = [decode(c, codec, x.shape[-1]) for c, x in zip(coded, xs, strict=True)]
    first = lambda tree: jax.tree.map(lambda a: np.asarray(a)[0, 0], tree)  # noqa: E731
    xs, coded, decoded = ([*some, first(some[1])] for some in (xs, coded, decoded))
    columns = [x.shape[-1] for x in xs]
    assert same(optimized(lambda xs: [encode(x, codec) for x in xs])(xs), coded)
    read = optimized(lambda cs: [decode(c, codec, n) for c, n in zip(cs, columns, strict=True)])
    assert same(read(coded), decoded)
    both = optimized(lambda xs: [decode(encode(x, codec), codec, x.shape[-1]) for x in xs])
    assert same(both(xs), decoded)
    batch = _drawn((4, 6, 7))
    assert same(jax.vmap(lambda x: encode(x, codec))(batch), encode(batch, codec))


@every_bits
def test_a_tpu_codes_in_bands_to_the_same_bit(bits):
    """Whole tiles and cut ones, in batches, with dither and without."""
    codec, shapes = Codec(bits, BLOCK), [(2 * BLOCK, 10), (13, 10), (2, 3, BLOCK + 1, 7)]
    xs = [_drawn(shape, seed=4) for shape in shapes]
    dithers = [None, np.linspace(0, 1, 130, dtype=np.float32).reshape(13, 10), None]

    def both(xs: list[Any]) -> list[Any]:
        coded = [encode(x, codec, u) for x, u in zip(xs, dithers, strict=True)]
        return [(c, decode(c, codec, x.shape[-1])) for c, x in zip(coded, xs, strict=True)]

    elsewhere = jax.jit(both)(xs)
    with forms_of_tpus():
        assert "optimization_barrier" in str(jax.make_jaxpr(both)(xs))
        assert same(jax.jit(both)(xs), elsewhere)


# Dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_bits
def test_narrow_dtypes(bits, dtype):
    """Scales have the dtype of `x`, and errors are those of the codes and a few roundings."""
    codec, x = Codec(bits, BLOCK), _drawn((13, 10), dtype=dtype)
    (coded,), (decoded,) = code([x], codec)
    assert coded.codes.dtype == jnp.uint8 and coded.scales.dtype == decoded.dtype == x.dtype
    assert np.array_equal(coded.scales, _scales(x, BLOCK))
    error = np.abs(np.asarray(decoded, np.float64) - np.asarray(x, np.float64))
    largest = float(_largest_gap(bits, "linear2")) / 2 + 2 * float(jnp.finfo(dtype).eps)
    assert (error <= largest * _wide(coded.scales, BLOCK, x.shape)).all()
    if bits == 4:
        assert same(code([decoded], codec)[0], coded)


# Packing


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


# Any scales


@pytest.mark.parametrize(
    ("bits", "block", "map"), [(4, 4, "linear2"), (8, 2, "linear2"), (4, 2, "linear")]
)
def test_the_error_bound_holds_at_any_scales(bits, block, map):
    """Of numbers alike and very different; XLA may take subnormal ones for 0, here or there."""
    codec, generator, tiny = Codec(bits, block, map), np.random.default_rng(bits), 2.0**-126
    xs = []
    for shape in ((100, 1, 1), (100, 5, 3), (200, 6, 7)):
        low, high = np.sort(generator.uniform(-45, 30, (2, shape[0], 1, 1)), axis=0)
        x = generator.uniform(-1, 1, shape) * 10.0 ** generator.uniform(low, high, shape)
        x *= generator.random(shape) <= generator.choice([0.3, 1.0], (shape[0], 1, 1))
        xs.append(x.astype(np.float32))
    for x, coded, decoded in zip(xs, *code(xs, codec), strict=True):
        scales, decoded = _scales(x, block), np.asarray(decoded, np.float64)
        normal, wide = scales >= tiny, _wide(scales, block, x.shape)
        assert np.array_equal(np.asarray(coded.scales)[normal], scales[normal])
        assert (np.abs(decoded) <= wide).all()
        bound = (float(_largest_gap(bits, map)) / 2 + PRODUCTS * 2.0**-23) * wide + tiny
        assert ((np.abs(decoded - x) <= bound) | (wide < tiny)).all()
