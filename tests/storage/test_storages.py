"""Few-bit storages of factors and roots: quantized, cholesky, cholesky with error feedback.

The trajectory in float64 is the transcription's: codes are equal, and what is kept in full differs
by rounding times the condition number κ of what is decomposed or inverted. For κ the largest of all
steps is taken. In float32 an element next to a midpoint may get the other code, after which nothing
further on could be compared: every step is then compared with one step of the transcription from
the same stored state.
"""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, program, share, with_spectrum
from reference.shampoo_4bit import cq, cq_ef, linear2_codebook, load, shampoo_4bit, store, vq

import curvax
from curvax.transforms.kronecker import _factor
from curvax.transforms.linalg import _inverse_root as _roots
from curvax.transforms.storage import _cholesky
from curvax.transforms.storage._quantized import Square

STEPS, T1, T2, B2, BE, EPS = 30, 2, 5, 0.9, 0.8, 1e-6
MODES = ("vq", "cq", "cq_ef")
HALF_GAP = float(np.diff(linear2_codebook(4)).max()) / 2
EPS32 = float(np.finfo(np.float32).eps)

every_mode = pytest.mark.parametrize("mode", MODES)


def _storage(mode: str, block: int = 64, min_elements: int = 1, be=BE, **settings):
    settings |= {"block": block, "min_elements": min_elements}
    if mode == "vq":
        return curvax.quantized(**settings)
    feedback = be if mode == "cq_ef" else None
    return curvax.cholesky(error_feedback=feedback, damping_mode="absolute", **settings)


def _shampoo(storage, **settings):
    defaults = {"b2": B2, "eps": EPS, "refresh": T2, "statistics_every": T1}
    return curvax.scale_by_shampoo(storage=storage, **{**defaults, **settings})


def _run(transformation, *runs):
    """Directions and states of all steps, time first, from one program for all runs."""

    def step(state, gradient):
        direction, state = transformation.update(gradient, state)
        return state, (direction, state)

    def trajectory(gradients):
        return jax.lax.scan(step, transformation.init(_at(gradients, 0)), gradients)[1]

    compiled = jax.jit(trajectory)
    results = [jax.tree.map(np.asarray, compiled(gradients)) for gradients in runs]
    return results if len(runs) > 1 else results[0]


def _gradients(shapes, steps=STEPS, seed=0) -> dict[str, np.ndarray]:
    """Gradients that drift; the second of a batch is of rank 1. Exact in float32."""
    generator, gradients = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        fixed, g = generator.standard_normal(shape), generator.standard_normal((steps, *shape))
        g = g + generator.choice([-1.0, 1.0], (steps, *[1] * len(shape))) * fixed
        if len(shape) > 2:
            g[:, 1] = g[:, 1, :, :1] @ g[:, 1, :1]
        gradients[name] = np.float64(np.float32(g))
    return gradients


def _at(tree, *place):
    return jax.tree.map(lambda x: x[place], tree)


def _same(a, b) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )


# The stored form, read without the library


def _halves(packed) -> np.ndarray:
    packed = np.asarray(packed)
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _as_triples(stored, order: int):
    """The transcription's (codes, scales, diagonal) of X or C, and those of E if it is there."""
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    lower = np.tri(order, k=-1, dtype=bool)
    if isinstance(stored, Square):
        codes = _halves(stored.codes)[..., :order]
        return [(codes, wide(stored.scales), wide(stored.diagonal))]
    codes = _halves(stored.codes)[..., :order]
    if isinstance(stored, _cholesky.Triangle):
        square, scales = _unfolded(codes, 7), _unfolded(wide(stored.scales), 0)
        return [(np.where(lower, square, 7), _of_tiles(scales), wide(stored.diagonal))]
    scales = wide(stored.scales)
    c = (np.where(lower, codes, 7), _of_tiles(scales), wide(stored.diagonal))
    e = (np.where(lower, codes.T, 7), _of_tiles(scales.T), np.zeros(order))
    return [c, e]


def _unfolded(rows: np.ndarray, empty: float) -> np.ndarray:
    """The square of which the strictly lower triangle is folded in `rows`."""
    order = rows.shape[1]
    square = np.full((order, order), empty, rows.dtype)
    for i, row in enumerate(rows):
        r, mirrored = order // 2 + i, order - 1 - (order // 2 + i)
        square[mirrored, :mirrored] = row[::-1][:mirrored]
        square[r, :r] = row[:r]  # the row in the middle is its own mirror image
    return square


def _of_tiles(scales: np.ndarray) -> np.ndarray:
    """Scales of the tiles on and below the diagonal; 0 above."""
    return np.tril(scales[1:, :-1])


def _decoded(stored, order: int, block: int) -> np.ndarray:
    """The statistic or root that a stored form stands for, in float64."""
    first = load(_as_triples(stored, order)[0], block)
    return first if isinstance(stored, Square) else first @ first.T


def _stated(mode: str, side: str):
    """The names of the statistic's triples in the transcription's states."""
    names = {"vq": ["{}_bar"], "cq": ["C_bar_{}"], "cq_ef": ["C_bar_{}", "E_bar_{}"]}
    return [name.format(side) for name in names[mode]]


# Trajectories in float64

SHAPES = {16: {"wide": (2, 17, 66)}, 64: {"tall": (65, 18)}}
SMALLEST = {16: 1, 64: 4096}  # tiles of 64 for what is coded by default


@functools.cache
def _ours(mode: str, block: int):
    with jax.enable_x64(True):
        return _run(_shampoo(_storage(mode, block, SMALLEST[block])), _gradients(SHAPES[block]))


def _condition(x: np.ndarray) -> float:
    values = np.linalg.eigvalsh(x)
    return values[-1] / values[0]


def _damped_condition(x: np.ndarray) -> float:
    """The same with negative eigenvalues at 0 and relative damping."""
    values = np.linalg.eigvalsh(x)
    return 1 / (max(values[0], 0) / values[-1] + EPS)


def _assert_stored(ours, theirs, condition: float, what: str):
    if theirs[0] is None:
        return assert_close(ours, theirs[2], STEPS, condition=condition)
    codes, scales, diagonal = ours
    wrong = (codes != theirs[0]).sum()
    assert wrong == 0, f"{what}: {wrong} of {codes.size} codes differ"
    assert_close(scales, theirs[1], condition=condition)
    assert_close(diagonal, theirs[2], condition=condition)


def _assert_same_factor(factor, state, side, mode, kappa, what) -> float:
    """Compares one factor at one step; the condition of its root."""
    order = len(state[side])
    stored, root, mode = [factor.statistic], factor.inverse_root, mode
    if hasattr(factor.inverse_root, "codes"):
        stored, root = (
            _as_triples(factor.statistic, order),
            _as_triples(factor.inverse_root, order)[0],
        )
    else:
        mode = "vq"
    for one, name in zip(stored, _stated(mode, side), strict=True):
        _assert_stored(one, state[name], kappa, what)
    condition = kappa + _damped_condition(state[side])
    _assert_stored(root, state[f"{side}_hat_bar"], condition, f"root of {what}")
    assert factor.indefinite == state[f"indefinite_{side}"], what
    assert factor.rejected == 0 and np.all(getattr(factor.statistic, "failures", 0) == 0)
    return condition


def _decomposed_condition(states, side: str, g: np.ndarray) -> np.ndarray:
    """κ of what Eq. 7 decomposes at every step, the largest so far."""
    before = [EPS * np.eye(len(states[0][side])), *(state[side] for state in states[:-1])]
    grams = g @ g.mT if side == "L" else g.mT @ g
    damped = B2 * np.stack(before) + (1 - B2) * grams + EPS * np.eye(len(before[0]))
    return np.maximum.accumulate([_condition(x) for x in damped])


def _assert_same_trajectory(our_mode: str, our_block: int, **other):
    directions, states = _ours(our_mode, our_block)
    settings = {"mode": our_mode, "b": B2, "be": BE, "eps": EPS, "block": our_block}
    settings |= {"statistics_every": T1, "refresh_every": T2}
    settings |= {"min_elements": SMALLEST[our_block]}
    sides = {"L": states.direction.left, "R": states.direction.right}
    for name, batch in _gradients(SHAPES[our_block]).items():
        for i in np.ndindex(batch.shape[1:-2]):
            g = batch[:, *i]
            desired, expected = shampoo_4bit(list(g), **settings | other)
            kappas = {side: np.ones(STEPS) for side in "LR"}
            if our_mode != "vq":
                kappas = {side: _decomposed_condition(expected, side, g) for side in "LR"}
            for t, state in enumerate(expected):
                condition = 0.0
                for side, factors in sides.items():
                    factor = _at(factors[name], t, *i)
                    assert factor.refreshes == (t + 1) // T2
                    what = f"{name} {i}, {side}, step {t + 1}"
                    kappa = kappas[side][t]
                    condition += _assert_same_factor(factor, state, side, our_mode, kappa, what)
                norms = [np.linalg.norm(x, 2) for x in (state["L_hat"], g[t], state["R_hat"])]
                condition *= np.prod(norms) / np.linalg.norm(state["G_hat"])
                assert_close(directions[name][t, *i], desired[t], condition=condition)


OTHERS = {"vq": {"statistics_every": 3}, "cq": {"b": 0.95}, "cq_ef": {"be": 0.5}}


@pytest.mark.parametrize(("block", "mode"), share(itertools.product(SHAPES, MODES), of=2))
def test_trajectories_follow_the_transcription(mode, block):
    """Orders on both sides of 64: those below stay dense in the default setting."""
    _assert_same_trajectory(mode, block)
    with pytest.raises(AssertionError):  # the negative control
        _assert_same_trajectory(mode, block, **OTHERS[mode])
    if block == 16:
        _, states = _ours(mode, block)
        sides = (states.direction.left, states.direction.right)
        indefinite = np.concatenate([f.indefinite[-1].ravel() for s in sides for f in s.values()])
        if mode == "vq":
            assert indefinite.max() > 0, "what is counted has not been seen"
        else:
            assert not indefinite.any()


# Steps in float32


def _next_of_transcription(mode: str, before, gram, after, block: int):
    """The transcription's triples one step on, and what they are codes of, with its condition."""
    x = load(before[0], block)
    if mode == "vq":
        x = B2 * x + (1 - B2) * gram
        return [vq(before[0], gram, b=B2, block=block)], [x], 1.0
    damped = B2 * x @ x.T + (1 - B2) * gram + EPS * np.eye(len(x))
    c, settings = np.linalg.cholesky(damped), {"b": B2, "eps": EPS, "block": block}
    if mode == "cq":
        return [cq(before[0], gram, **settings)], [c], _condition(damped)
    stored, _ = cq_ef(before[0], before[1], gram, be=BE, **settings)
    e = load(before[1], block)
    # Eq. 11 of the codes that the library took.
    error = BE * e + (1 - BE) * (c + e - load(after[0], block))
    error -= np.diag(np.diag(error))
    return [stored, store(error, block)], [c + e, error], _condition(damped)


def _assert_next_to(found, desired, of, slack: float, block: int) -> tuple[int, int]:
    """Codes differ next to midpoints alone; how many could not, and how many did."""
    codes, scales, diagonal = found
    order = len(codes)
    assert (np.abs(scales - desired[1]) <= slack).all()
    assert (np.abs(diagonal - desired[2]) <= slack).all()
    of = of - np.diag(np.diag(of))
    wide = np.repeat(np.repeat(desired[1], block, 0), block, 1)[:order, :order]
    safe = np.where(wide > 0, wide, 1)
    book = linear2_codebook(4)
    distance = np.abs((of / safe)[..., None] - (book[1:] + book[:-1]) / 2).min(axis=-1)
    decided = (distance > 2 * slack / safe) | (wide == 0)
    assert np.array_equal(codes[decided], desired[0][decided])
    decoded = load(found, block) - np.diag(diagonal)
    assert (np.abs(decoded - of) <= HALF_GAP * wide + 3 * slack).all()
    return decided.sum(), (codes != desired[0]).sum()


@every_mode
def test_every_float32_step_is_that_of_the_transcription(mode):
    """From the same stored state: a code differs by one step, and only next to a midpoint."""
    block, order, decided, flipped, compared = 8, 21, 0, 0, 0
    g = np.stack(list(_gradients(dict.fromkeys("ab", (order, 26))).values()), axis=1)
    # Sums over 30 steps keep the factors' condition far below 1 / eps(float32).
    optimizer = _shampoo(_storage(mode, block), initial=1.0, side="left")
    _, states = _run(optimizer, {"w": np.float32(g)})
    for i, gs in enumerate(g.swapaxes(0, 1)):
        factor = _at(states.direction.left["w"], slice(None), i)
        for t in range(2 * T1 - 1, STEPS, T1):
            before, after = (_as_triples(_at(factor.statistic, k), order) for k in (t - 1, t))
            gram = gs[t] @ gs[t].T
            triples, targets, condition = _next_of_transcription(mode, before, gram, after, block)
            slack = 8 * condition * EPS32 * np.abs(targets[0]).max()
            for one, other, of in zip(after, triples, targets, strict=True):
                counted = _assert_next_to(one, other, of, slack, block)
                decided, flipped = decided + counted[0], flipped + counted[1]
                compared += one[0].size
        for t in range(T2 - 1, STEPS, T2):
            found = _as_triples(_at(factor.inverse_root, t), order)[0]
            d, q = np.linalg.eigh(_decoded(_at(factor.statistic, t), order, block))
            damped = np.maximum(d, 0) + EPS * d[-1]
            root = (q * damped**-0.25) @ q.T
            slack = order * EPS32 * d[-1] / damped.min() * np.abs(root).max()
            assert slack < 0.05 * np.abs(root).max()
            _assert_next_to(found, store(root, block), root, slack, block)
    assert decided > 0.9 * compared and flipped < 1e-3 * compared


# Forms and bytes


def _stored_forms(mode: str, order: int, **settings):
    """Shapes and dtypes of a statistic, as it is after an update, and of a root."""
    storage = _storage(mode, **settings)
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


@pytest.mark.parametrize(("order", "block"), [(5, 64), (65, 16)])
@every_mode
def test_bytes_of_eight_bits(mode, order, block):
    statistic, root = _stored_forms(mode, order, block=block, bits=8)
    assert _bytes(root) == order**2 + 4 * (-(-order // block)) ** 2 + 4 * order
    if mode == "vq":
        assert _bytes(statistic) == _bytes(root)


@pytest.mark.parametrize("order", share([512, 256], of=2))
def test_what_four_bits_save(order):
    tree = {"w": jax.ShapeDtypeStruct((order, order), jnp.float32)}

    def size(storage):
        state = jax.eval_shape(_shampoo(storage, graft=None).init, tree)
        return sum(
            _bytes((f.statistic, f.inverse_root)) for f in (state.left["w"], state.right["w"])
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
    small = _shampoo(_storage(mode, min_elements=37), **settings)
    dense = _shampoo(curvax.dense(), **settings)
    state = jax.eval_shape(dense.init, params)
    assert jax.eval_shape(small.init, params) == state
    assert program(small.init, params) == program(dense.init, params)
    assert program(small.update, params, state) == program(dense.update, params, state)
    coded = jax.eval_shape(_shampoo(_storage(mode, min_elements=36)).init, params)
    assert hasattr(coded.direction.left["w"].statistic, "codes")
    assert not hasattr(coded.direction.right["w"].statistic, "codes")


# Programs: jit, scan, vmap, stacks

SMALL = {"a": (6, 9), "b": (6, 9)}


@pytest.mark.parametrize("mode", share(["cq_ef", "vq"], of=2))
def test_jit_scan_vmap_and_stacks_agree(mode):
    """In float64, where no code lies next to a midpoint: codes are equal, and the rest up to κ."""
    with jax.enable_x64(True):
        gradients = _gradients(SMALL, 6)
        pair = np.stack([gradients["a"], gradients["b"]], axis=1)
        settings = {"refresh": 3, "initial": 0.1, "eps": 1e-3, "side": "left"}
        transformation = _shampoo(_storage(mode, 4), **settings)
        scanned = _run(transformation, {"w": pair})
        desired = _at((scanned[0]["w"], scanned[1].direction.left["w"]), -1)

        def assert_same(direction, factor):
            factor = factor._replace(error=desired[1].error)  # as small as rounding itself
            for x, y in zip(*map(jax.tree.leaves, ((direction, factor), desired)), strict=True):
                assert x.dtype == y.dtype
                assert_close(x, y, condition=1e3)  # integers have to be equal

        together, apart = (
            curvax.on_matrices(transformation, matrices="all", stack=stack)
            for stack in (True, False)
        )
        found, state = {}, jax.jit(together.init)(_at(gradients, 0))
        update = jax.jit(together.update)
        for t in range(6):
            found, state = update(_at(gradients, t), state)
        stacked = np.stack([found["a"], found["b"]])
        assert_same(stacked, state.inner.inner.direction.left["6x9"])

        found, state = _at(_run(apart, gradients), -1)
        left = state.inner.inner.direction.left
        factor = jax.tree.map(lambda *x: np.concatenate(x), left["a"], left["b"])
        assert_same(np.stack([found["a"], found["b"]]), factor)

        def replica(g):
            step = lambda state, x: transformation.update({"w": x}, state)[::-1]  # noqa: E731
            state, directions = jax.lax.scan(step, transformation.init({"w": g[0]}), g)
            return directions["w"][-1], state.direction.left["w"]

        mapped = jax.jit(jax.vmap(replica, in_axes=1))
        assert_same(*mapped(pair))


# Policies, solvers, methods

POLICY = {"statistics_every": 1, "damping_mode": "absolute", "initial": 0.0, "eps": 0.05, "root": 2}
POLICY |= {"side": "left"}
METHODS: dict[str, Any] = {
    "FOAM": lambda s: _shampoo(s, **POLICY | {"refresh": curvax.policies.foam(2, 0.4, 0.5)}),
    "residual": lambda s: _shampoo(
        s, **POLICY | {"refresh": curvax.policies.diagonal_residual(2, 0.2)}
    ),
    "Newton-Schulz": lambda s: _shampoo(s, **POLICY | {"solver": "newton_schulz"}),
    "coupled Newton": lambda s: _shampoo(s, **POLICY | {"solver": "coupled_newton", "root": 4}),
    "foam": lambda s: curvax.scale_by_foam(
        storage=s, check_every=2, eps=0.05, max_damping=0.5, root=2
    ),
    "staggered": lambda s: _shampoo(s, refresh=curvax.every(2, stagger=True)),
    "every": lambda s: _shampoo(s, refresh=2),
    "dr_shampoo": lambda s: curvax.scale_by_dr_shampoo(
        storage=s, check_every=2, eps=0.05, threshold=0.2
    ),
    "asgo": lambda s: curvax.scale_by_asgo(storage=s, eps=0.05, refresh=2),
}
ORDER = 7


def _kronecker(state):
    """The state of `precondition`, below a graft's or not."""
    return getattr(state, "direction", state)


@pytest.mark.parametrize(
    ("method", "mode"),
    share([*((method, "cq_ef") for method in METHODS), ("asgo", "cq"), ("residual", "vq")], of=3),
)
def test_every_method_keeps_its_factors_in_codes(method, mode):
    """And the direction is made of what they decode to."""
    g = _gradients({"w": (ORDER, 9)}, 8, seed=1)["w"]
    directions, states = _run(METHODS[method](_storage(mode, 4)), {"w": np.float32(g)})
    state = _kronecker(states)
    left, right = state.left["w"], state.right["w"]
    moments = [x for x in jax.tree.leaves(state.momentum) if x.shape == g.shape]
    for t in range(8):
        product = (moments[0] if moments else g)[t].astype(np.float64)
        product = _decoded(_at(left.inverse_root, t), ORDER, 4) @ product
        if right is not None:
            product = product @ _decoded(_at(right.inverse_root, t), 9, 4)
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
            found = _decoded(_at(factor.inverse_root, -1), order, 4)
            scales: Any = store(root - np.diag(np.diag(root)), 4)[1]
            wide = np.repeat(np.repeat(scales, 4, 0), 4, 1)[:order, :order]
            slack = 256 * EPS32 * damped.max() / damped.min() * np.abs(root).max()
            assert (np.abs(found - root) <= HALF_GAP * wide + slack).all()


# Failure


def _triangles(mode, batch=(), order=9, block=4):
    """A storage's coding, what it holds, and the next statistics, well conditioned."""
    storage = _storage(mode, block)
    g = np.random.default_rng(0).standard_normal((2, *batch, order, 3 * order))
    first, second = (g @ g.mT / (3 * order)).astype(np.float32)
    encode = jax.jit(storage.encode_factor)
    eye = np.broadcast_to(np.eye(order, dtype=np.float32), first.shape)
    return encode, encode(first, encode(eye, None)), second


def test_a_failed_decomposition_is_tried_again_with_more_damping():
    order = 96
    g = np.random.default_rng(0).standard_normal((order, 5))
    eye = np.eye(order, dtype=np.float32)
    x = np.float32(g @ g.T)
    x = np.stack([x, x + eye])
    storage = _storage("cq", 16)

    @jax.jit
    def tried(x):
        start = storage.encode_factor(jnp.broadcast_to(eye, x.shape), None)
        plain = jax.lax.linalg.cholesky(x + 1e-6 * eye[None])
        decomposed = _cholesky.decomposed(x, 1e-6, "absolute")
        return plain, *decomposed, storage.encode_factor(x, start).failures

    plain, c, failed, failures = map(np.asarray, tried(x))
    assert np.isfinite(plain).all(axis=(1, 2)).tolist() == [False, True]
    assert not failed.any() and np.isfinite(c).all()
    assert _same(c[1], plain[1]), "the one that did not fail is as it was"
    added = 1000 * order * EPS32 * np.diagonal(x[0]).max()
    first, target = c[0].astype(np.float64), x[0].astype(np.float64)
    error = np.linalg.norm(first @ first.T - target, 2)
    assert 1e-6 < error <= 1.1 * added
    assert failures.tolist() == [0, 0]


def test_every_retry_adds_ten_times_as_much():
    order, eps = 8, 1e-9
    rounding = order * EPS32
    below = rounding * np.float32([0, 3, 30, 300, 3000])  # zero, the last diagonal entry
    x = np.tile(np.eye(order, dtype=np.float32), (len(below), 1, 1))
    x[:, -1, -1] = -below
    decomposed = jax.jit(lambda x: _cholesky.decomposed(x, eps, "absolute"))
    c, failed = map(np.asarray, decomposed(x))
    assert failed.tolist() == [False] * 4 + [True]
    added = eps + rounding * np.array([0, 10, 100, 1000])
    np.testing.assert_allclose(c[:4, -1, -1] ** 2 + below[:4], added, rtol=1e-3)


def test_relative_damping_makes_codes_independent_of_the_scale():
    storage = curvax.cholesky(error_feedback=0.95, block=4, min_elements=1)
    g = np.random.default_rng(0).standard_normal((3, 9, 27))
    xs = np.float32(g @ g.mT / 27)

    @jax.jit
    def coded(factor):
        stored = storage.encode_factor(factor * jnp.eye(9), None)
        step = lambda stored, x: (storage.encode_factor(factor * x, stored), None)  # noqa: E731
        return jax.lax.scan(step, stored, xs)[0]

    plain = coded(np.float32(1))
    for power in (-80, 80):
        scaled, root = coded(np.float32(2.0**power)), np.float32(2.0 ** (power // 2))
        assert _same(scaled.codes, plain.codes), power
        for field in ("scales", "diagonal"):
            desired = root * np.asarray(getattr(plain, field))
            assert _same(getattr(scaled, field), desired), (power, field)


def test_relative_damping_is_eps_times_the_largest_entry():
    g = np.random.default_rng(0).standard_normal((2, 6, 18))
    x = np.float32(g @ g.mT)
    largest = np.max(x, axis=(-2, -1), keepdims=True)
    decomposed = jax.jit(lambda xs: [_cholesky.decomposed(x, 0.25, "relative") for x in xs])
    (c, failed), zeros = decomposed([x, np.zeros((6, 6), np.float32)])
    assert not failed.any()
    c = np.asarray(c)
    assert_close(c @ c.mT, x + 0.25 * largest * np.eye(6, dtype=np.float32), 32)
    c, failed = map(np.asarray, zeros)
    assert not failed.any() and not c.any()  # zeros stay zeros


def test_matrices_are_decomposed_one_at_a_time():
    """Batches of decompositions that run at once can wait for each other on a CPU, forever."""

    def decomposed(x):
        return _cholesky.decomposed(x, 1e-6, "relative")

    text = jax.jit(decomposed).lower(jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)).as_text()
    calls = [line for line in text.splitlines() if "potrf" in line]
    assert calls and all("tensor<8x8xf32>" in c and "tensor<3x8" not in c for c in calls)


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_if_all_fail_what_was_stored_stays_and_is_counted(mode):
    """Matrix by matrix: its neighbors are what they are beside a good one."""
    encode, stored, x = _triangles(mode, (3,))
    good = encode(x, stored)
    for bad in (-1.0, np.nan, np.inf):
        broken = x.copy()
        broken[1] = bad * np.eye(9) if np.isfinite(bad) else bad
        once = encode(broken, stored)
        twice = encode(broken, once)
        assert once.failures.tolist() == [0, 1, 0] and twice.failures.tolist() == [0, 2, 0]
        trees = [jax.tree.map(np.asarray, tree) for tree in (stored, once, twice, good)]
        kept = [_at(tree, 1)._replace(failures=0) for tree in trees[:3]]
        assert _same(kept[0], kept[1]) and _same(kept[0], kept[2]), bad
        for i in (0, 2):
            before, after, _, beside = (_at(tree, i) for tree in trees)
            assert _same(after, beside) and not _same(after.codes, before.codes), bad


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_the_optimizer_goes_on_when_decompositions_fail(mode, monkeypatch):
    plain = jax.lax.linalg.cholesky
    g = np.float32(_gradients({"w": (6, 9)}, 6)["w"])
    g[3:] *= 100

    def never(x):
        return jnp.where(x[..., :1, :1] > 5.0, jnp.nan, plain(x))

    monkeypatch.setattr(_cholesky.jax.lax.linalg, "cholesky", never)
    settings = {"refresh": 2, "statistics_every": 1, "side": "left"}
    directions, states = _run(_shampoo(_storage(mode, 4), **settings), {"w": g})
    left = states.direction.left["w"]
    assert left.statistic.failures.tolist() == [0, 0, 0, 1, 2, 3]
    kept = left.statistic._replace(failures=np.zeros(6))
    assert _same(_at(kept, 2), _at(kept, 5)) and not _same(_at(kept, 1), _at(kept, 2))
    assert np.isfinite(directions["w"]).all() and left.refreshes[-1] == 3
    assert not left.rejected.any()


@pytest.mark.parametrize("mode", share(MODES, of=2))
def test_gradients_that_are_not_finite_never_reach_the_codes(mode):
    """The stored statistic is the last good one, bit for bit, and its neighbors do not notice."""
    bad = [np.nan, np.inf, 1e30]  # the square of the last overflows
    clean = np.repeat(_gradients({"w": (6, 9)}, 6)["w"][:, None], 4, axis=1)
    dirty = clean.copy()
    dirty[3:5, 1:, 2, 3] = bad
    settings = {"refresh": 1, "statistics_every": 1, "initial": 0.1, "side": "left"}
    runs = [{"w": np.float32(g)} for g in (clean, dirty)]
    (_, states), (_, dirty_states) = _run(_shampoo(_storage(mode, 4), **settings), *runs)
    good, factor = (s.direction.left["w"] for s in (states, dirty_states))
    assert all(
        np.isfinite(x).all() for x in jax.tree.leaves((factor.statistic, factor.inverse_root))
    )
    assert _same(_at(good, slice(None), 0), _at(factor, slice(None), 0))
    for i, t in np.ndindex(3, 2):
        stored, before = (_at(factor.statistic, step, i + 1) for step in (t + 3, 2))
        assert _same(stored, before), f"{bad[i]} at step {t + 4}"


# What codes stand for


@pytest.mark.parametrize("mode", ["cq", "cq_ef"])
def test_any_codes_decode_to_a_positive_semi_definite_matrix(mode):
    storage, orders, drawn = _storage(mode, 4), (1, 8, 13), []
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
        assert_close(even[7], _decoded(_at(stored, 7), order, 4), order, eps=EPS32)


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
    found = np.asarray(stored.codes) if bits == 8 else _halves(stored.codes)[:, :9]
    assert np.array_equal(found, codes)
    assert_close(stored.scales, scales, 0)
    assert_close(decoded, load((codes, scales, diagonal), 4, bits), 4)
    assert (stored.diagonal is None) == (not keep_diagonal)
    if keep_diagonal:
        assert np.array_equal(np.diag(decoded), np.diag(x))
    _, root = _stored_forms("vq", 9, bits=bits, block=4, keep_diagonal=keep_diagonal)
    columns = 9 if bits == 8 else 5
    assert _bytes(root) == 9 * columns + 4 * 9 + (4 * 9 if keep_diagonal else 0)


# Error feedback


CONDITIONS = (1.0, 10.0, 100.0)  # of what is tracked


@functools.cache
def _tracking_errors(order=32, steps=200, batch=4) -> dict[str, np.ndarray]:
    """The mean distance, over the last 100 steps, of what is stored from the true average.

    Without error feedback, with all of it, and with the paper's: for a batch of matrices of every
    condition.
    """
    key, roots = jax.random.key(0), []
    for condition in CONDITIONS:
        spectrum = np.geomspace(1, condition**-0.5, order)
        keys = [jax.random.fold_in(key, i) for i in range(batch)]
        roots += [with_spectrum(k, order, order, spectrum) for k in keys]
    g = np.random.default_rng(0).standard_normal((steps, batch, order, 4 * order))
    white = np.tile(g @ g.mT / (4 * order), (1, len(CONDITIONS), 1, 1))
    grams = np.float32(np.stack(roots) @ white @ np.stack(roots).mT)
    eye = np.broadcast_to(np.float32(1e-6 * np.eye(order)), grams[0].shape)

    def tracked(mode, grams, be=None):
        storage = _storage(mode, 16, be=be)

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
    return {
        name: np.asarray(x)[steps // 2 :].mean(axis=0).reshape(-1, batch)
        for name, x in errors.items()
    }


@pytest.mark.xdist_group("error feedback")  # one run of three
def test_error_feedback_tracks_flat_spectra_better():
    """With the paper's βe; of steep spectra the opposite is true, see `cholesky`."""
    plain, fed_back = (_tracking_errors()[name][0] for name in ("none", "the paper's"))
    assert (fed_back < 0.9 * plain).all(), (fed_back, plain)


@pytest.mark.xdist_group("error feedback")
@pytest.mark.parametrize("condition", CONDITIONS)
def test_error_feedback_without_decay_tracks_better_at_any_condition(condition):
    """βe = 0 feeds the whole error back at once."""
    place = CONDITIONS.index(condition)
    plain, fed_back = (_tracking_errors()[name][place] for name in ("none", "all"))
    assert (fed_back < 0.9 * plain).all(), (fed_back, plain)


# Saving


@pytest.mark.parametrize("mode", share(MODES, of=2))
def test_a_saved_state_goes_on_bit_for_bit(mode):
    gradients = {"w": np.float32(_gradients({"w": (7, 9)}, 10)["w"])}
    transformation = _shampoo(_storage(mode, 4), refresh=2, side="left")
    update = jax.jit(transformation.update)
    state = jax.jit(transformation.init)(_at(gradients, 0))
    for t in range(5):
        _, state = update(_at(gradients, t), state)
    leaves, treedef = jax.tree.flatten(state)
    saved = [(np.asarray(x).tobytes(), x.dtype, x.shape) for x in leaves]
    arrays = [np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in saved]
    restored = treedef.unflatten(arrays)
    assert _same(restored, state)
    for t in range(5, 10):
        one, state = update(_at(gradients, t), state)
        other, restored = update(_at(gradients, t), restored)
        assert _same(one, other) and _same(state, restored)


# Bad arguments


@pytest.mark.parametrize(
    ("storages", "name", "value", "allowed"),
    [
        ("both", "bits", 3, "4 or 8"),
        ("both", "bits", 16, "4 or 8"),
        ("both", "bits", None, "4 or 8"),
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


def test_arguments_at_the_end_of_what_is_allowed():
    """A negative control."""
    assert curvax.cholesky(8, 2, error_feedback=0.0, eps=1e-30, map="linear", min_elements=1)
    assert curvax.quantized(8, 2, map="linear", keep_diagonal=False, min_elements=1)


# Memory


@pytest.mark.parametrize("layout", ["one stack", "leaf by leaf"])
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
        transformation = _shampoo(storage, **settings)
        state = jax.eval_shape(transformation.init, tree)
        step = jax.jit(transformation.update, donate_argnums=(0, 1)).lower(tree, state)
        memory: Any = step.compile().memory_analysis()
        return memory.temp_size_in_bytes / (4 * order**2)

    most = 8 if layout == "one stack" else 5
    dense = temporaries(curvax.dense(), most)
    for mode in share(("cq_ef", "cq", "vq") if layout == "one stack" else ("cq_ef",), of=2):
        few, many = (temporaries(_storage(mode), count) for count in (2, most))
        assert many <= dense + 2, f"{mode}: {many:.2f} matrices, {dense:.2f} in float32"
        assert many <= few + 0.1, f"{mode}: {many:.2f} matrices, {few:.2f} of a quarter of them"
