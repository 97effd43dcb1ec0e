"""Few-bit codes against exact rational numbers, and the squares that hold triangles."""

import functools
import itertools
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPTIMIZED

from curvax.transforms._codec import (
    MAPS,
    Codec,
    Coded,
    decode,
    dequantize,
    encode,
    pack,
    quantize,
    tile_scales,
    unpack,
)
from curvax.transforms._triangle import fold, join, strictly_lower, unfold

# Optimized: that may not change a bit either.
compiled = functools.partial(jax.jit, compiler_options=OPTIMIZED)
ENCODE = compiled(encode, static_argnums=1)
DECODE = compiled(decode, static_argnums=(1, 2))
BITS = (4, 8)
SHAPES = [(1, 9), (13, 10), (2, 2, 4, 4)]
PRODUCTS = 4  # rounding errors between a scale and a decoded number

every_bits = pytest.mark.parametrize("bits", BITS)
every_map = pytest.mark.parametrize("map", MAPS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@functools.cache
def _values(bits: int, map: str) -> list[Fraction]:
    """What the codes stand for, written out as in Eqs 3 and 4 of the paper."""
    x = [-1 + Fraction(2 * j, 2**bits - 1) for j in range(2**bits)]
    if map == "linear":
        return x
    if map == "unsigned":
        return [Fraction(j + 1, 2**bits) ** 2 for j in range(2**bits)]
    zero = 2 ** (bits - 1) - 1
    return [
        -(x[j] ** 2) if j < zero else Fraction(0) if j == zero else x[j] ** 2
        for j in range(2**bits)
    ]


def _largest_gap(bits: int, map: str) -> Fraction:
    return max(b - a for a, b in itertools.pairwise(_values(bits, map)))


def _drawn(shape, map="linear2", dtype=np.float32, seed=0) -> jax.Array:
    """Normal numbers of which some are 0; not negative where the map has no such codes."""
    generator = np.random.default_rng([seed, *shape])
    x = generator.standard_normal(shape) * (generator.random(shape) < 0.9)
    return jnp.asarray(np.abs(x) if map == "unsigned" else x, dtype)


def _tiles(shape, block):
    """The index of every tile in the last two axes."""
    m, n = shape[-2:]
    for i, j in itertools.product(range(-(-m // block)), range(-(-n // block))):
        rows, columns = (slice(k * block, (k + 1) * block) for k in (i, j))
        yield (i, j), np.s_[..., rows, columns]


def _scales(x, block) -> np.ndarray:
    """The largest magnitude of every tile, one at a time."""
    x = np.asarray(x, np.float64)
    m, n = x.shape[-2:]
    scales = np.zeros((*x.shape[:-2], -(-m // block), -(-n // block)))
    for (i, j), here in _tiles(x.shape, block):
        scales[..., i, j] = np.abs(x[here]).max((-2, -1))
    return scales


def _wide(scales, block, shape) -> np.ndarray:
    """Every tile's scale at every place of the tile."""
    wide = np.zeros(shape)
    for (i, j), here in _tiles(shape, block):
        wide[here] = np.asarray(scales, np.float64)[..., i, j, None, None]
    return wide


def _same(a, b) -> bool:
    """Bit for bit."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _all_same(a, b) -> bool:
    return all(map(_same, jax.tree.leaves(a), jax.tree.leaves(b)))


# The table


@every_bits
@every_map
def test_the_table_is_that_of_the_paper(bits, map):
    values = Codec(bits, 64, map).values()
    assert values.tolist() == [float(v) for v in _values(bits, map)]
    assert (np.diff(values) > 0).all()


def test_the_four_bit_table_by_hand():
    squares = [-225, -169, -121, -81, -49, -25, -9, 0, 1, 9, 25, 49, 81, 121, 169, 225]
    assert [225 * v for v in _values(4, "linear2")] == squares
    assert Codec().zero == squares.index(0)


@every_bits
@every_map
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_codes_decode_to_the_table(bits, map, jit):
    """As specified, bit for bit: the integer times 1/T, rounded; and exactly 1 at the ends."""
    codec, codes = Codec(bits, 2**bits, map), jnp.arange(2**bits, dtype=jnp.uint8)[None]
    read = compiled(dequantize, static_argnums=2) if jit else dequantize
    integers = np.array([float(v * codec.unit) for v in _values(bits, map)], np.float32)[None]
    desired = integers * np.float32(1 / codec.unit)
    desired = np.where(abs(integers) == codec.unit, np.sign(integers), desired)
    exact = np.array([float(v) for v in _values(bits, map)])[None]
    assert np.abs(desired - exact).max() <= np.finfo(np.float32).eps
    assert _same(read(codes, jnp.ones((1, 1)), codec), desired)
    assert _same(read(codes, jnp.full((1, 1), 0.5), codec), 0.5 * desired)


# The nearest code


@every_bits
@every_map
@every_shape
def test_every_element_gets_the_nearest_code_and_the_error_is_half_a_gap_at_most(shape, bits, map):
    block = 4
    codec, x = Codec(bits, block, map), _drawn(shape, map)
    found = ENCODE(x, codec)
    scales = _scales(x, block)
    assert found.scales.dtype == jnp.float32 and np.array_equal(found.scales, scales)
    wide = _wide(scales, block, shape)
    unit = np.asarray(x, np.float64) / np.where(wide > 0, wide, 1)
    distances = np.abs(unit[..., None] - [float(v) for v in _values(bits, map)])
    codes = np.asarray(unpack(found.codes, codec, shape[-1]))
    taken = np.take_along_axis(distances, codes[..., None], axis=-1)[..., 0]
    # Two roundings of numbers up to 1: the quotient's and the midpoint's.
    assert (taken - distances.min(axis=-1) <= 2 * np.finfo(np.float32).eps).all()
    nearest, second = np.moveaxis(np.sort(distances, axis=-1)[..., :2], -1, 0)
    clear = second - nearest > 2 * np.finfo(np.float32).eps
    assert clear[np.asarray(x) != 0].mean() > 0.8  # "linear" has two codes next to 0
    assert np.array_equal(codes[clear], distances.argmin(axis=-1)[clear])
    decoded = DECODE(found, codec, shape[-1])
    assert decoded.dtype == jnp.float32 and decoded.shape == shape
    error = np.abs(np.asarray(decoded, np.float64) - np.asarray(x, np.float64))
    largest = float(max(_largest_gap(bits, map) / 2, _values(bits, map)[0]))  # 0 has no code
    assert (error <= (largest + PRODUCTS * np.finfo(np.float32).eps) * wide).all()


def _midpoints(bits: int, map: str, dtype) -> tuple[np.ndarray, float]:
    """All midpoints times the largest number beside them, both of which are exact integers."""
    values = _values(bits, map)
    scale = {"linear": 2 * (2**bits - 1), "linear2": 2 * (2**bits - 1) ** 2}.get(map, 2 * 4**bits)
    exact = [(a + b) / 2 * scale for a, b in itertools.pairwise(values)]
    assert all(x.denominator == 1 for x in exact)
    midpoints = np.array([float(x) for x in exact], dtype)
    assert [Fraction(float(x)) for x in midpoints] == exact
    return midpoints, float(scale)


@pytest.mark.parametrize("layout", ["one tile", "many tiles"])
@every_bits
@every_map
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_two_codes_equally_near_the_lower_is_taken(dtype, map, bits, layout):
    with jax.enable_x64(dtype == "float64"):
        midpoints, scale = _midpoints(bits, map, dtype)
        rows = np.stack([midpoints, np.full_like(midpoints, scale)], axis=1)  # (count, 2)
        x, block = (rows.reshape(1, -1), 2) if layout == "many tiles" else (rows, 2**bits)
        codec = Codec(bits, block, map)

        @compiled
        def codes_of(x):
            return quantize(x, tile_scales(x, block), codec)

        codes = np.asarray(codes_of(x))
        lower = np.arange(2**bits - 1)
        at_midpoints = codes.reshape(-1, len(lower), 2)[..., 0]
        wrong = np.flatnonzero((at_midpoints != lower).any(axis=0))
        assert wrong.size == 0, f"{wrong.size} of {lower.size} ties, after the codes {wrong}"
        # The negative control: a little above, it is the upper one.
        above = midpoints + 4 * np.finfo(dtype).eps * scale
        x.reshape(-1, len(lower), 2)[..., 0] = above
        codes = np.asarray(codes_of(x))
        assert (codes.reshape(-1, len(lower), 2)[..., 0] == lower + 1).all()


@pytest.mark.parametrize("size", [2.0**-100, 2.0**100, 2.0**126, 2.0**127])
@pytest.mark.parametrize("shape", [(4, 4), (8, 12)], ids=["one tile", "many tiles"])
def test_tiles_of_any_size_keep_their_codes(shape, size):
    """Up to the end of float32: the reciprocal of the last size is subnormal."""
    codec, x = Codec(4, 4), _drawn(shape)
    x = jnp.where(jnp.arange(shape[-1]) % 4 == 0, 1.0, x / 4) * jnp.ones(shape)
    one, other = ENCODE(x, codec), ENCODE(x * np.float32(size), codec)
    assert np.array_equal(other.scales, one.scales * np.float32(size))
    assert np.array_equal(other.codes, one.codes)
    decoded = np.asarray(DECODE(other, codec, shape[-1]), np.float64) / size
    assert np.array_equal(decoded, DECODE(one, codec, shape[-1]))


# The error


def test_the_error_bounds_of_the_docstring():
    """Half the largest gap: 28/225 in 4 bits, where Proposition B.1 has 1/16."""
    four, eight = (_largest_gap(bits, "linear2") / 2 for bits in BITS)
    assert four == Fraction(28, 225) > Fraction(1, 16)
    assert f"{float(four):.4f}" == "0.1244" and f"{float(eight):.4f}" == "0.0078"


@every_bits
def test_the_error_bound_is_attained(bits):
    """A negative control: the bound is no larger than it has to be."""
    midpoints, scale = _midpoints(bits, "linear2", np.float32)
    x = jnp.asarray([[midpoints[-1], scale]])
    error = jnp.abs(DECODE(ENCODE(x, Codec(bits)), Codec(bits), 2) - x)[0, 0] / scale
    half = float(_largest_gap(bits, "linear2") / 2)
    assert abs(error - half) <= PRODUCTS * np.finfo(np.float32).eps


# Exactness


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_bits
@every_map
def test_codes_of_what_was_decoded_are_the_same(map, bits, dtype):
    """`Q(D(Q(x))) = Q(x)`, codes and scales, bit for bit."""
    with jax.enable_x64(dtype == "float64"):
        for shape, block in (((40, 13, 21), 4), ((64, 6, 7), 16)):
            codec, x = Codec(bits, block, map), _drawn(shape, map, dtype)
            once = ENCODE(x, codec)
            assert once.scales.dtype == dtype
            decoded = DECODE(once, codec, shape[-1])
            assert _all_same(ENCODE(decoded, codec), once)
            assert _same(DECODE(ENCODE(decoded, codec), codec, shape[-1]), decoded)


@every_bits
@every_map
def test_what_codes_stand_for_is_kept_exactly(map, bits):
    """Any codes and scales, as long as every tile has an element as large as its scale."""
    generator, block, shape = np.random.default_rng(0), 4, (30, 9, 10)
    codec = Codec(bits, block, map)
    codes = generator.integers(0, 2**bits, shape, np.uint8)
    codes[..., ::block, ::block] = 2**bits - 1
    scales = np.exp(generator.uniform(-20, 20, (30, 3, 3))).astype(np.float32)
    coded = Coded(pack(jnp.asarray(codes), codec), jnp.asarray(scales))
    x = DECODE(coded, codec, 10)
    assert len(np.unique(codes)) == 2**bits
    desired = np.array([float(v) for v in _values(bits, map)])[codes]
    desired *= _wide(scales, block, shape)
    error = np.abs(np.asarray(x, np.float64) - desired)
    assert (error <= PRODUCTS * np.finfo(np.float32).eps * np.abs(desired)).all()
    assert _all_same(ENCODE(x, codec), coded)


# Tiles and batches


@every_bits
@every_map
def test_a_tile_of_zeros_has_scale_0_and_decodes_to_zeros(map, bits):
    codec, x = Codec(bits, 4, map), _drawn((6, 10), map).at[:4, 4:8].set(0).at[4:, 8:].set(0)
    coded = ENCODE(x, codec)
    decoded = DECODE(coded, codec, 10)
    assert np.array_equal(coded.scales == 0, [[False, True, False], [False, False, True]])
    assert not decoded[:4, 4:8].any() and not decoded[4:, 8:].any()
    nothing = DECODE(ENCODE(jnp.zeros_like(x), codec), codec, 10)
    assert nothing.shape == x.shape and not nothing.any()


@pytest.mark.parametrize("map", ["linear2"])
@every_bits
def test_zeros_decode_to_zeros_in_the_map_that_has_a_code_for_them(map, bits):
    codec, x = Codec(bits, 4, map), _drawn((13, 10))
    decoded = DECODE(ENCODE(x, codec), codec, 10)
    assert (x == 0).any() and not decoded[x == 0].any()


def test_tiles_are_coded_for_themselves():
    """Each as the matrix that it is, ragged or not."""
    codec, x = Codec(8, 4), _drawn((7, 6))
    coded = ENCODE(x, codec)
    whole = np.asarray(coded.codes)
    for place, here in _tiles(x.shape, 4):
        alone = encode(x[here], codec)
        assert alone.scales.item() == coded.scales[place]
        assert np.array_equal(alone.codes, whole[here])


@every_bits
@pytest.mark.parametrize("shape", [(3, 6, 7), (2, 2, 4, 4)], ids=str)
def test_leading_axes_are_as_one_by_one(shape, bits):
    codec, x = Codec(bits, 4), _drawn(shape)
    coded = ENCODE(x, codec)
    decoded = DECODE(coded, codec, shape[-1])
    for i in np.ndindex(shape[:-2]):
        one = ENCODE(x[i], codec)
        assert _all_same(jax.tree.map(lambda a, i=i: a[i], coded), one)
        assert _same(decoded[i], DECODE(one, codec, shape[-1]))
    mapped = jax.vmap(lambda x: encode(x, codec))(x)
    assert _all_same(mapped, coded)


# Jit


@pytest.mark.parametrize(("bits", "map"), [(4, "linear2"), (8, "linear2"), (4, "linear")])
@pytest.mark.parametrize("shape", [(13, 10), (4, 4), (2, 2, 4, 4)], ids=str)
def test_jit_changes_no_bit(shape, bits, map):
    codec, x = Codec(bits, 4, map), _drawn(shape, map, seed=2)
    coded = encode(x, codec)
    assert _all_same(ENCODE(x, codec), coded)
    decoded = decode(coded, codec, shape[-1])
    assert _same(DECODE(coded, codec, shape[-1]), decoded)
    both = compiled(lambda x: decode(encode(x, codec), codec, shape[-1]))
    assert _same(both(x), decoded)


# Dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_bits
def test_narrow_dtypes(bits, dtype):
    """Scales have the dtype of `x`, and errors are those of the codes and a few roundings."""
    codec, x = Codec(bits, 4), _drawn((13, 10), dtype=dtype)
    coded = ENCODE(x, codec)
    decoded = DECODE(coded, codec, 10)
    assert coded.codes.dtype == jnp.uint8 and coded.scales.dtype == decoded.dtype == x.dtype
    assert np.array_equal(coded.scales, _scales(x, 4))
    error = np.abs(np.asarray(decoded, np.float64) - np.asarray(x, np.float64))
    largest = float(_largest_gap(bits, "linear2")) / 2 + 2 * float(jnp.finfo(dtype).eps)
    assert (error <= largest * _wide(coded.scales, 4, x.shape)).all()
    if bits == 4:
        assert _all_same(ENCODE(decoded, codec), coded)


def test_float64_is_coded_in_float64():
    with jax.enable_x64(True):
        x = _drawn((13, 10), dtype=np.float64)
        coded = ENCODE(x, Codec(8, 4))
        decoded = np.asarray(DECODE(coded, Codec(8, 4), 10))
        assert coded.scales.dtype == decoded.dtype == np.float64
        assert np.array_equal(coded.scales, _scales(x, 4))
        values = np.array([float(v) for v in _values(8, "linear2")])
        unit = decoded / _wide(coded.scales, 4, x.shape)
        distance = np.abs(unit[..., None] - values).min(axis=-1)
        assert distance.max() <= PRODUCTS * np.finfo(np.float64).eps


# Packing


@pytest.mark.parametrize("columns", range(1, 10))
def test_two_codes_lie_in_a_byte(columns):
    """Column c in the low half of byte c, column c + ⌈n/2⌉ in its high half."""
    codec = Codec(4)
    codes = np.random.default_rng(columns).integers(0, 16, (5, columns), np.uint8)
    packed = np.asarray(pack(jnp.asarray(codes), codec))
    half = -(-columns // 2)
    assert packed.dtype == np.uint8 and packed.shape == (5, half)
    for row, c in np.ndindex(5, half):
        high = codes[row, c + half] if c + half < columns else 0
        assert packed[row, c] == codes[row, c] + 16 * high
    assert np.array_equal(unpack(jnp.asarray(packed), codec, columns), codes)


@pytest.mark.parametrize("columns", [1, 4, 7])
def test_rows_share_no_byte(columns):
    codes = np.random.default_rng(0).integers(0, 16, (4, columns), np.uint8)
    packed = np.asarray(pack(jnp.asarray(codes), Codec(4)))
    for row in range(4):
        other = codes.copy()
        other[row] = 15 - other[row]
        changed = (np.asarray(pack(jnp.asarray(other), Codec(4))) != packed).any(axis=1)
        assert changed.tolist() == [i == row for i in range(4)]


def test_eight_bit_codes_are_bytes():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 7), np.uint8))
    assert _same(pack(codes, Codec(8)), codes) and _same(unpack(codes, Codec(8), 7), codes)


# Triangles


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("order", range(1, 10))
def test_a_triangle_folds_to_half_a_square(order, batch):
    x = np.random.default_rng(order).integers(1, 256, (*batch, order, order), np.uint8)
    folded = np.asarray(fold(jnp.asarray(x)))
    half = -(-order // 2)
    assert folded.dtype == np.uint8 and folded.shape == (*batch, half, order)
    for i, j in np.ndindex(half, order):
        row = order // 2 + i
        if j < row:
            assert (folded[..., i, j] == x[..., row, j]).all()
        elif j > order - 1 - (order - 1 - row):
            assert (folded[..., i, j] == x[..., order - 1 - row, order - 1 - j]).all()
    lower = np.tri(order, k=-1, dtype=bool)
    assert np.array_equal(np.asarray(unfold(jnp.asarray(folded)))[..., lower], x[..., lower])
    assert np.array_equal(strictly_lower(order), lower)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("order", range(1, 10))
def test_two_triangles_share_a_square(order, batch):
    shape = (2, *batch, order, order)
    a, b = np.random.default_rng(order).integers(1, 256, shape, np.uint8)
    square = np.asarray(join(jnp.asarray(a), jnp.asarray(b)))
    lower = np.tri(order, k=-1, dtype=bool)
    assert square.shape == a.shape and square.dtype == np.uint8
    assert np.array_equal(square[..., lower], a[..., lower])
    assert np.array_equal(square.mT[..., lower], b[..., lower])


# Any sizes, any scales


@st.composite
def matrices(draw):
    """A matrix, whose tiles are of very different sizes or alike, and a codec."""
    shape = draw(st.sampled_from([(1, 1), (5, 3), (2, 6, 7)]))
    bits, block, map = draw(
        st.sampled_from([(4, 4, "linear2"), (8, 2, "linear2"), (4, 2, "linear")])
    )
    codec = Codec(bits, block, map)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = draw(st.sampled_from([0.0, 0.3, 1.0]))
    x = generator.uniform(-1, 1, shape) * (generator.random(shape) <= kept)
    low, high = sorted(draw(st.tuples(*[st.floats(-30, 30)] * 2)))
    return x * 10.0 ** generator.uniform(low, high, shape), codec


def _coded_and_decoded(x: np.ndarray, codec: Codec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`x` in float32, what it decodes to, and the scale at every place, in float64."""
    x = x.astype(np.float32)
    coded = ENCODE(jnp.asarray(x), codec)
    decoded = np.asarray(DECODE(coded, codec, x.shape[-1]), np.float64)
    scales = _scales(x, codec.block)
    normal = scales >= np.finfo(np.float32).tiny
    assert np.array_equal(np.asarray(coded.scales)[normal], scales[normal])
    return x.astype(np.float64), decoded, _wide(scales, codec.block, x.shape)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
@hypothesis.given(matrices())
def test_the_error_bound_at_any_size(drawn):
    x, codec = drawn
    x, decoded, wide = _coded_and_decoded(x, codec)
    largest = float(_largest_gap(codec.bits, codec.map)) / 2 + PRODUCTS * 2.0**-23
    # A decoded number that is subnormal may be flushed to 0.
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - x) <= largest * wide + np.finfo(np.float32).tiny).all()


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(matrices(), st.floats(-45, -37))
def test_subnormal_tiles_decode_to_something_within_their_scale(drawn, exponent):
    """XLA may take subnormal numbers for 0, here or there."""
    x, codec = drawn
    largest = np.abs(x).max()
    x = x / (largest if largest > 0 else 1) * 10.0**exponent
    x, decoded, wide = _coded_and_decoded(x, codec)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded) <= wide).all()
