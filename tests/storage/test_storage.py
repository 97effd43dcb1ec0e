"""Storages in few bits: forms, bytes, what stays dense, programs, every method, memory."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg import _inverse_root as _roots
from curvax.transforms.refresh import _methods
from tests.cells import cells
from tests.helpers import assert_close, at, program
from tests.reference.shampoo_4bit import load, store
from tests.shared.programs import temporaries, text_for
from tests.shared.stored import (
    MODES,
    drifting_gradients,
    every_mode,
    halves,
    same,
    shampoo,
    storage_of,
    trajectories,
)


def _bytes(form) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(form))


PACKED = {f"packed in {bits} bits": curvax.packed(bits, 16, min_elements=1) for bits in (4, 6, 8)}
SIZES = [(1, 16), (5, 64), (64, 64), (65, 16), (65, 64), (256, 16), (511, 64)]


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        *cells(MODES, SIZES, of=4),
        *((mode, (order, 16)) for mode, order in cells(PACKED, (1, 2, 5, 66, 130), of=12)),
    ],
)
def test_forms_and_bytes_are_those_of_the_docstrings(mode, size):
    """Of a statistic, as it is at first and after an update, of a root, and of a packed basis."""
    order, block = size
    storage = PACKED[mode] if mode in PACKED else storage_of(mode, block)

    def forms(x):
        start = storage.encode_factor(x, None), storage.encode_basis(x, None)
        after = storage.encode_factor(x, start[0]), storage.encode_basis(x, start[1])
        return start, after, storage.encode_root(x)

    start, after, root = jax.eval_shape(forms, jax.ShapeDtypeStruct((order, order), jnp.float32))
    assert start == after
    dtypes = {"codes": jnp.uint8, "failures": jnp.int32, "updates": jnp.int32}
    for form in (*after, root):
        for name, x in form._asdict().items():
            assert x.dtype == dtypes.get(name, jnp.float32), name
    d, half, tiles = order, -(-order // 2), (-(-order // block)) ** 2
    wide = -(-order // block) + 1
    square = d * half + 4 * tiles + 4 * d
    folded = 4 * wide * -(-wide // 2) + 4 * d
    both = d * half + 4 * wide**2 + 4 * d + 4
    row = {"4": half, "6": 3 * -(-d // 4), "8": d}.get(mode.removesuffix(" bits")[-1], 0)
    packed = half * row + folded
    expected = {"vq": square, "cq": half**2 + folded + 4, "cq_ef": both}.get(mode, packed + 8)
    assert _bytes(after[0]) == expected
    assert {_bytes(after[1]), _bytes(root)} == {packed if mode in PACKED else square}


@pytest.mark.parametrize(
    "storage",
    [
        curvax.quantized(block=4, min_elements=1),
        curvax.cholesky(error_feedback=0.95, block=4, min_elements=1),
        curvax.packed(block=4, min_elements=1),
    ],
    ids=["quantized", "cholesky", "packed"],
)
def test_codes_do_not_depend_on_the_scale(storage):
    """And what they stand for follows it; zeros stay zeros."""
    g = np.random.default_rng(0).standard_normal((3, 9, 27))
    xs = np.float32(g @ g.mT / 27)

    @jax.jit
    def coded(size):
        first = storage.encode_factor(size * jnp.eye(9), None)
        step = lambda stored, x: (storage.encode_factor(size * x, stored), None)  # noqa: E731
        factor, root = jax.lax.scan(step, first, xs)[0], storage.encode_root(size * xs[0])
        return (factor, storage.decode_factor(factor)), (root, storage.decode_root(root))

    for size in np.array([0, 2.0**-80, 2.0**80], np.float32):
        for (stored, x), (plain, y) in zip(coded(size), coded(np.float32(1)), strict=True):
            assert np.array_equal(x, size * np.asarray(y)), size
            assert not size or same(stored.codes, plain.codes), size


def test_summaries_say_what_stays_dense():
    """Below 4096 elements, and then nothing is different from dense storage."""
    shapes = {"mixed": (64, 63), "small": (63, 62)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    for storage, form in (
        (curvax.quantized(), "4 bits"),
        (curvax.cholesky(bits=8), "Cholesky factor in 8 bits"),
        (curvax.cholesky(error_feedback=0.9), "Cholesky factor and error feedback in 4 bits"),
    ):
        lines = curvax.summarize(curvax.shampoo(0.1, storage=storage), params).splitlines()
        mixed, small = (next(x for x in lines if x.startswith(f"| {name} ")) for name in params)
        assert "order 63: dense, as 63² < 4096" in mixed and f"order 64: {form}" in mixed
        assert "order 62: dense, as 62² < 4096; order 63: dense, as 63² < 4096" in small
        assert form not in small


@every_mode
def test_below_the_smallest_size_storage_changes_nothing(mode):
    params = {"w": jax.ShapeDtypeStruct((6, 5), jnp.float32)}
    settings = {"refresh": 2, "statistics_every": 1, "side": "left"}
    small = shampoo(storage_of(mode, min_elements=37), **settings)
    dense = shampoo(curvax.dense(), **settings)
    state = jax.eval_shape(dense.init, params)
    assert jax.eval_shape(small.init, params) == state
    assert program(small.init, params) == program(dense.init, params)
    assert program(small.update, params, state) == program(dense.update, params, state)
    coded = jax.eval_shape(shampoo(storage_of(mode, min_elements=36)).init, params)
    assert hasattr(coded.direction["w"].left.statistic, "codes")
    assert not hasattr(coded.direction["w"].right.statistic, "codes")


@pytest.mark.parametrize("keep_diagonal", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_squares_are_those_of_the_transcription(bits, keep_diagonal):
    """With their diagonals coded as well, which Table 9 of the paper tries."""
    storage = curvax.quantized(bits, 4, keep_diagonal=keep_diagonal, min_elements=1)
    x = np.random.default_rng(0).standard_normal((9, 9))

    @jax.jit
    def there_and_back(x):
        stored = storage.encode_factor(x, None)
        return stored, storage.decode_factor(stored)

    with jax.enable_x64(True):
        stored, decoded = there_and_back(x)
    codes, scales, diagonal = store(x, 4, bits, keep_diagonal)
    found = np.asarray(stored.codes) if bits == 8 else halves(stored.codes)[:, :9]
    assert np.array_equal(found, codes)
    assert_close(stored.scales, scales, 0)
    assert_close(decoded, load((codes, scales, diagonal), 4, bits), 4)
    assert (stored.diagonal is None) == (not keep_diagonal)
    if keep_diagonal:
        assert np.array_equal(np.diag(decoded), np.diag(x))
    columns = 9 if bits == 8 else 5
    assert _bytes(stored.codes) == 9 * columns and stored.scales.size == 9


@pytest.mark.parametrize("mode", cells(["cq_ef", "vq"], of=2))
def test_stacks_are_their_matrices_under_vmap(mode):
    """In float64, where no number is next to a midpoint: codes are equal, and the rest up to κ."""
    with jax.enable_x64(True):
        pair = drifting_gradients({"w": (2, 6, 9)}, 6)["w"]
        settings = {"refresh": 3, "initial": 0.1, "eps": 1e-3, "side": "left"}
        transformation = shampoo(storage_of(mode, 4), **settings)
        directions, states = at(trajectories(transformation, {"w": pair}), -1)
        desired = directions["w"], states.direction["w"].left

        def replica(g):
            step = lambda state, x: transformation.update({"w": x}, state)[::-1]  # noqa: E731
            state, directions = jax.lax.scan(step, transformation.init({"w": g[0]}), g)
            return directions["w"][-1], state.direction["w"].left

        direction, factor = jax.jit(jax.vmap(replica, in_axes=1))(pair)
        factor = factor._replace(error=desired[1].error)  # as small as rounding itself
        for x, y in zip(*map(jax.tree.leaves, ((direction, factor), desired)), strict=True):
            assert x.dtype == y.dtype
            assert_close(x, y, condition=1e3)  # integers have to be equal


@pytest.mark.parametrize(
    ("layout", "mode"),
    cells(
        [*itertools.product(["one stack"], ["cq_ef", "cq", "vq"]), ("leaf by leaf", "cq_ef")], of=4
    ),
)
def test_no_more_than_two_matrices_are_decoded_at_a_time(layout, mode, monkeypatch):
    """Temporaries of a step of 8 factors of order 512, or 5: at most two matrices beyond those
    of float32, whose products are of all matrices at once, and the same as for 2 factors.

    All buffers are donated. Without the decompositions, which would take minutes to compile: they
    see one matrix at a time. Not optimized: buffers are shared out before code is made, and are
    the same but for a thousandth of a matrix.
    """
    order = 512
    matrix = jax.ShapeDtypeStruct((order, order), jnp.float32)

    def solved(a, *_):
        return _roots.Solved(2 * a, jnp.float32(0), jnp.bool_(False))

    monkeypatch.setattr(_methods, "solve_root", solved)

    def in_matrices(storage, count):
        tree: Any = {f"{i:02}": matrix for i in range(count)}
        if layout == "one stack":
            tree = {"w": jax.ShapeDtypeStruct((count, order, order), jnp.float32)}
        settings = {"graft": None, "refresh": 1000, "statistics_every": 1, "side": "left"}
        transformation = shampoo(storage, **settings)
        state = jax.eval_shape(transformation.init, tree)
        return temporaries(transformation.update, tree, state) / (4 * order**2)

    most = 8 if layout == "one stack" else 5
    dense = in_matrices(curvax.dense(), most)
    few, many = (in_matrices(storage_of(mode), count) for count in (2, most))
    assert many <= dense + 2, f"{many:.2f} matrices, {dense:.2f} in float32"
    assert many <= few + 0.1, f"{many:.2f} matrices, {few:.2f} of a quarter of them"


@pytest.mark.parametrize(
    "storage", [curvax.dense(), curvax.quantized(), curvax.cholesky(), curvax.packed()], ids=str
)
def test_statistics_gather_nothing(storage):
    """On a TPU the gather of a diagonal takes 128 times the memory of its matrix."""
    direction = curvax.precondition(
        refresh=curvax.every(10**6, offset=1), root=4, b2=0.95, storage=storage
    )
    g = {"w": jnp.ones((64, 64))}
    state = jax.eval_shape(direction.init, g)
    text = text_for("tpu", direction.update, g, state)
    assert "stablehlo.dot_general" in text and "stablehlo.gather" not in text
