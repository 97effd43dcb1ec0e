"""Storages in few bits: forms, bytes, what stays dense, programs, every method, memory."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.kronecker import _factor
from curvax.transforms.linalg import _inverse_root as _roots
from tests.helpers import assert_close, at, program, share
from tests.reference.shampoo_4bit import load, store
from tests.shared.stored import (
    EPS32,
    HALF_GAP,
    MODES,
    decode_stored,
    drifting_gradients,
    every_mode,
    halves,
    same,
    shampoo,
    storage_of,
    trajectories,
)

# Forms and bytes


def _stored_forms(mode: str, order: int, **settings):
    """Shapes and dtypes of a statistic, as it is after an update, and of a root."""
    storage = storage_of(mode, **settings)
    x = jax.ShapeDtypeStruct((order, order), jnp.float32)

    def forms(x):
        start = storage.encode_factor(x, None)
        return start, storage.encode_factor(x, start), storage.encode_root(x)

    start, statistic, root = jax.eval_shape(forms, x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), start) == jax.tree.map(
        lambda a: (a.shape, a.dtype), statistic
    )
    return statistic, root


def _bytes(form) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(form))


SIZES = [(1, 16), (5, 64), (64, 64), (65, 16), (65, 64), (256, 16), (511, 64)]


@pytest.mark.parametrize(("mode", "size"), share(itertools.product(MODES, SIZES), of=2))
def test_forms_and_bytes_are_those_of_the_docstrings(mode, size):
    order, block = size
    statistic, root = _stored_forms(mode, order, block=block)
    for form in (statistic, root):
        fields = form._asdict()
        assert fields.pop("codes").dtype == jnp.uint8
        failures = fields.pop("failures", None)
        assert failures is None or failures.dtype == jnp.int32
        assert {x.dtype for x in fields.values()} == {jnp.dtype(jnp.float32)}
    d, half, tiles = order, -(-order // 2), (-(-order // block)) ** 2
    wide = -(-order // block) + 1
    square = d * half + 4 * tiles + 4 * d
    triangle = half**2 + 4 * wide * -(-wide // 2) + 4 * d + 4
    both = d * half + 4 * wide**2 + 4 * d + 4
    assert _bytes(root) == square
    assert _bytes(statistic) == {"vq": square, "cq": triangle, "cq_ef": both}[mode]


@pytest.mark.parametrize("order", share([512, 256], of=2))
def test_four_bits_save_as_many_bytes_as_documented(order):
    tree = {"w": jax.ShapeDtypeStruct((order, order), jnp.float32)}

    def size(storage):
        state = jax.eval_shape(shampoo(storage, graft=None).init, tree)
        return sum(
            _bytes((f.statistic, f.inverse_root)) for f in (state["w"].left, state["w"].right)
        )

    dense, quantized = size(curvax.dense()), size(curvax.quantized())
    assert dense == 16 * order**2 and quantized < dense / 7
    assert size(curvax.cholesky()) <= 0.77 * quantized
    assert size(curvax.cholesky(error_feedback=0.95)) <= 1.01 * quantized
    assert size(curvax.cholesky(error_feedback=0.95)) > quantized > size(curvax.cholesky())


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
    _, root = _stored_forms("vq", 9, bits=bits, block=4, keep_diagonal=keep_diagonal)
    columns = 9 if bits == 8 else 5
    assert _bytes(root) == 9 * columns + 4 * 9 + (4 * 9 if keep_diagonal else 0)


# Programs: jit, scan, vmap, stacks


SMALL = {"a": (6, 9), "b": (6, 9)}


@pytest.mark.parametrize("mode", share(["cq_ef", "vq"], of=2))
def test_jit_scan_vmap_and_stacks_agree(mode):
    """In float64, where no number is next to a midpoint: codes are equal, and the rest up to κ."""
    with jax.enable_x64(True):
        gradients = drifting_gradients(SMALL, 6)
        pair = np.stack([gradients["a"], gradients["b"]], axis=1)
        settings = {"refresh": 3, "initial": 0.1, "eps": 1e-3, "side": "left"}
        transformation = shampoo(storage_of(mode, 4), **settings)
        scanned = trajectories(transformation, {"w": pair})
        desired = at((scanned[0]["w"], scanned[1].direction["w"].left), -1)

        def assert_same(direction, factor):
            factor = factor._replace(error=desired[1].error)  # as small as rounding itself
            for x, y in zip(*map(jax.tree.leaves, ((direction, factor), desired)), strict=True):
                assert x.dtype == y.dtype
                assert_close(x, y, condition=1e3)  # integers have to be equal

        together, apart = (
            curvax.on_matrices(transformation, matrices="all", stack=stack)
            for stack in (True, False)
        )
        found, state = {}, jax.jit(together.init)(at(gradients, 0))
        update = jax.jit(together.update)
        for t in range(6):
            found, state = update(at(gradients, t), state)
        stacked = np.stack([found["a"], found["b"]])
        assert_same(stacked, state.inner["6x9"].inner.direction.left)

        found, state = at(trajectories(apart, gradients), -1)
        left = [state.inner[name].inner.direction.left for name in "ab"]
        factor = jax.tree.map(lambda *x: np.concatenate(x), *left)
        assert_same(np.stack([found["a"], found["b"]]), factor)

        def replica(g):
            step = lambda state, x: transformation.update({"w": x}, state)[::-1]  # noqa: E731
            state, directions = jax.lax.scan(step, transformation.init({"w": g[0]}), g)
            return directions["w"][-1], state.direction["w"].left

        mapped = jax.jit(jax.vmap(replica, in_axes=1))
        assert_same(*mapped(pair))


# Policies, solvers, methods


POLICY = {"statistics_every": 1, "damping_mode": "absolute", "initial": 0.0, "eps": 0.05, "root": 2}
POLICY |= {"side": "left"}
METHODS: dict[str, Any] = {
    "FOAM": lambda s: shampoo(s, **POLICY | {"refresh": curvax.policies.foam(2, 0.4, 0.5)}),
    "residual": lambda s: shampoo(
        s, **POLICY | {"refresh": curvax.policies.diagonal_residual(2, 0.2)}
    ),
    "Newton-Schulz": lambda s: shampoo(s, **POLICY | {"solver": "newton_schulz"}),
    "coupled Newton": lambda s: shampoo(s, **POLICY | {"solver": "coupled_newton", "root": 4}),
    "foam": lambda s: curvax.scale_by_foam(
        storage=s, check_every=2, eps=0.05, max_damping=0.5, root=2
    ),
    "staggered": lambda s: shampoo(s, refresh=curvax.every(2, stagger=True)),
    "every": lambda s: shampoo(s, refresh=2),
    "dr_shampoo": lambda s: curvax.scale_by_dr_shampoo(
        storage=s, check_every=2, eps=0.05, threshold=0.2
    ),
    "asgo": lambda s: curvax.scale_by_asgo(storage=s, eps=0.05, refresh=2),
}
ORDER = 7


def _kronecker(state):
    """The state of `precondition` of the matrices "w", below a graft's or not."""
    return getattr(state, "direction", state)["w"]


@pytest.mark.parametrize(
    ("method", "mode"),
    share([*((method, "cq_ef") for method in METHODS), ("asgo", "cq"), ("residual", "vq")], of=7),
)
def test_every_method_keeps_its_factors_in_codes(method, mode):
    """And the direction is made of what they decode to."""
    g = drifting_gradients({"w": (ORDER, 9)}, 8, seed=1)["w"]
    directions, states = trajectories(METHODS[method](storage_of(mode, 4)), {"w": np.float32(g)})
    state = _kronecker(states)
    left, right = state.left, state.right
    moments = [x for x in jax.tree.leaves(state.momentum) if x.shape == g.shape]
    for t in range(8):
        product = (moments[0] if moments else g)[t].astype(np.float64)
        product = decode_stored(at(left.inverse_root, t), ORDER, 4) @ product
        if right is not None:
            product = product @ decode_stored(at(right.inverse_root, t), 9, 4)
        direction = np.float64(directions["w"][t])
        ratio = (direction * product).sum() / np.square(product).sum()
        assert ratio > 0
        assert_close(direction, ratio * product, 256, eps=EPS32)
    for factor, order in ((left, ORDER), (right, 9)):
        if factor is None:
            assert method not in ("every", "staggered", "foam", "dr_shampoo")
            continue
        assert factor.inverse_root.codes.dtype == factor.statistic.codes.dtype == np.uint8
        assert factor.refreshes[-1] >= 1 and not factor.rejected.any()
        if factor.eigenvectors is not None:
            q = np.float64(factor.eigenvectors[-1])
            damped = np.maximum(factor.eigenvalues[-1], 0) + np.float64(factor.damping[-1])
            root = (q * damped**-0.5) @ q.T
            found = decode_stored(at(factor.inverse_root, -1), order, 4)
            scales: Any = store(root - np.diag(np.diag(root)), 4)[1]
            wide = np.repeat(np.repeat(scales, 4, 0), 4, 1)[:order, :order]
            slack = 256 * EPS32 * damped.max() / damped.min() * np.abs(root).max()
            assert (np.abs(found - root) <= HALF_GAP * wide + slack).all()


# What is not finite


@pytest.mark.parametrize("mode", share(MODES, of=2))
def test_gradients_that_are_not_finite_never_reach_the_codes(mode):
    """The stored statistic is the last good one, bit for bit, and its neighbors do not notice."""
    bad = [np.nan, np.inf, 1e30]  # the square of the last overflows
    clean = np.repeat(drifting_gradients({"w": (6, 9)}, 6)["w"][:, None], 4, axis=1)
    dirty = clean.copy()
    dirty[3:5, 1:, 2, 3] = bad
    settings = {"refresh": 1, "statistics_every": 1, "initial": 0.1, "side": "left"}
    runs = [{"w": np.float32(g)} for g in (clean, dirty)]
    (_, states), (_, dirty_states) = trajectories(shampoo(storage_of(mode, 4), **settings), *runs)
    good, factor = (s.direction["w"].left for s in (states, dirty_states))
    assert all(
        np.isfinite(x).all() for x in jax.tree.leaves((factor.statistic, factor.inverse_root))
    )
    assert same(at(good, slice(None), 0), at(factor, slice(None), 0))
    for i, t in np.ndindex(3, 2):
        stored, before = (at(factor.statistic, step, i + 1) for step in (t + 3, 2))
        assert same(stored, before), f"{bad[i]} at step {t + 4}"


# Saving


@pytest.mark.parametrize("mode", share(MODES, of=2))
def test_a_saved_state_goes_on_bit_for_bit(mode):
    gradients = {"w": np.float32(drifting_gradients({"w": (7, 9)}, 10)["w"])}
    transformation = shampoo(storage_of(mode, 4), refresh=2, side="left")
    update = jax.jit(transformation.update)
    state = jax.jit(transformation.init)(at(gradients, 0))
    for t in range(5):
        _, state = update(at(gradients, t), state)
    leaves, treedef = jax.tree.flatten(state)
    saved = [(np.asarray(x).tobytes(), x.dtype, x.shape) for x in leaves]
    arrays = [np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in saved]
    restored = treedef.unflatten(arrays)
    assert same(restored, state)
    for t in range(5, 10):
        one, state = update(at(gradients, t), state)
        other, restored = update(at(gradients, t), restored)
        assert same(one, other) and same(state, restored)


# Bad arguments


@pytest.mark.parametrize(
    ("storages", "name", "value", "allowed"),
    [
        ("both", "bits", 3, "4, 6 or 8"),
        ("both", "bits", 16, "4, 6 or 8"),
        ("both", "bits", None, "4, 6 or 8"),
        ("both", "block", 63, "even"),
        ("both", "block", 0, "at least 1"),
        ("both", "block", 64.0, "at least 1"),
        ("both", "map", "x", "'linear2'"),
        ("both", "map", "unsigned", "'linear2'"),
        ("both", "map", None, "'linear2'"),
        ("both", "min_elements", 0, "at least 1"),
        ("both", "min_elements", 1.5, "at least 1"),
        ("cholesky", "error_feedback", 1.0, "[0, 1)"),
        ("cholesky", "error_feedback", -0.1, "[0, 1)"),
        ("cholesky", "error_feedback", "0.95", "[0, 1)"),
        ("cholesky", "eps", 0.0, "(0, inf)"),
        ("cholesky", "eps", float("nan"), "(0, inf)"),
        ("cholesky", "damping_mode", "none", "'relative', 'absolute'"),
        ("quantized", "keep_diagonal", "no", "True or False"),
    ],
)
def test_bad_arguments(storages, name, value, allowed):
    for storage in {"both": ("quantized", "cholesky")}.get(storages, (storages,)):
        with pytest.raises(ValueError, match=rf"^{name}\b.*{re.escape(repr(value))}") as error:
            getattr(curvax, storage)(**{name: value})
        assert allowed in str(error.value)


def test_arguments_at_their_limits_are_accepted():
    """A negative control."""
    assert curvax.cholesky(8, 2, error_feedback=0.0, eps=1e-30, map="linear", min_elements=1)
    assert curvax.quantized(8, 2, map="linear", keep_diagonal=False, min_elements=1)


# Memory


@pytest.mark.parametrize("layout", share(["one stack", "leaf by leaf"], of=2))
def test_no_more_than_two_matrices_are_decoded_at_a_time(layout, monkeypatch):
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

    monkeypatch.setattr(_factor, "solve_root", solved)

    def temporaries(storage, count):
        """In matrices."""
        tree: Any = {f"{i:02}": matrix for i in range(count)}
        if layout == "one stack":
            tree = {"w": jax.ShapeDtypeStruct((count, order, order), jnp.float32)}
        settings = {"graft": None, "refresh": 1000, "statistics_every": 1, "side": "left"}
        transformation = shampoo(storage, **settings)
        state = jax.eval_shape(transformation.init, tree)
        step = jax.jit(transformation.update, donate_argnums=(0, 1)).lower(tree, state)
        memory: Any = step.compile().memory_analysis()
        return memory.temp_size_in_bytes / (4 * order**2)

    most = 8 if layout == "one stack" else 5
    dense = temporaries(curvax.dense(), most)
    for mode in share(("cq_ef", "cq", "vq") if layout == "one stack" else ("cq_ef",), of=3):
        few, many = (temporaries(storage_of(mode), count) for count in (2, most))
        assert many <= dense + 2, f"{mode}: {many:.2f} matrices, {dense:.2f} in float32"
        assert many <= few + 0.1, f"{mode}: {many:.2f} matrices, {few:.2f} of a quarter of them"


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
    text = jax.jit(direction.update).lower(g, state).as_text()
    assert "stablehlo.dot_general" in text and "stablehlo.gather" not in text
