"""What the Kronecker-factored methods are to each other, named after their docstrings' "Relations".

Each identity is asserted over a trajectory of 20 steps, on wide, tall and square matrices. Both
sides of an identity are the same work in floating point, but not in the same order: bounds are
`c · κ · eps` with the condition `κ` of the damped factors. Where one side could agree with
anything, something next to it has to disagree.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, gradients_like, orthogonal, run

import curvax
from curvax.transforms._factor import Factor

STEPS = 20
EPS = 2.0**-4  # beside factors of size up to 10
KAPPA = 10 / EPS
SHAPES = {"wide": (2, 4, 7), "tall": (2, 7, 4), "square": (5, 5)}
PARAMS = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
AXES = {name: curvax.MatrixAxes(-2, -1) for name in SHAPES}
GRADIENTS = gradients_like(PARAMS, STEPS)
FOREVER = 10**6
EVERY_CHECK = curvax.every(2, offset=1)
ENDLESS, NEXT_TO_0 = float("inf"), 1e-12  # thresholds

# Factories are cached because a transformation is compiled once per shape, however often it runs.
_supported = functools.cache(optax.with_extra_args_support)


def _both(transformation: Any, gradients: Any = GRADIENTS) -> tuple[list[Any], list[Any]]:
    return run(_supported(transformation), gradients, jax.tree.map(jnp.ones_like, gradients[0]))


def _run(transformation: Any, gradients: Any = GRADIENTS) -> list[Any]:
    return _both(transformation, gradients)[0]


def _family(make: Any) -> Any:
    """`_both` of `make(value)`: one program for all values, which are traced."""

    @jax.jit
    def step(value: Any, gradient: Any, state: Any) -> Any:
        params = jax.tree.map(jnp.ones_like, gradient)
        return optax.with_extra_args_support(make(value)).update(gradient, state, params)

    def trajectory(value: Any, gradients: Any = GRADIENTS) -> tuple[list[Any], list[Any]]:
        state = make(value).init(PARAMS)
        updates, states = [], []
        for gradient in gradients:
            update, state = step(value, gradient, state)
            updates.append(update)
            states.append(state)
        return updates, states

    return trajectory


def _refreshes(state: Any, field: str = "refreshes") -> list[int]:
    """How often each matrix's factors were refreshed, or what else was counted."""
    is_factor = lambda x: isinstance(x, Factor)  # noqa: E731
    factors = [x for x in jax.tree.leaves(state, is_leaf=is_factor) if is_factor(x)]
    return [int(n) for factor in factors for n in jnp.ravel(getattr(factor, field))]


def _by_policy(refresh: Any, **settings: Any) -> optax.GradientTransformation:
    defaults = {"b2": 0.9, "eps": EPS, "root": 2, "damping": "absolute", "initial": 0.0}
    defaults |= {"statistics_every": 1, "graft": None}
    return curvax.scale_by_shampoo(refresh=refresh, **{**defaults, **settings})


_shampoo = functools.cache(_by_policy)


def _original(**settings: Any) -> optax.GradientTransformation:
    """Shampoo of 2018: sums from εI, damped by that alone, refreshed at every step."""
    return _shampoo(1, **{"b2": None, "damping": "floor", "initial": EPS, "root": 4} | settings)


def _assert_same(one: Any, other: Any, condition: float = KAPPA) -> None:
    for x, y in zip(one, other, strict=True):
        assert_close(x, y, condition=condition)


def _assert_different(one: Any, other: Any) -> None:
    """Every matrix, by much more than rounding."""
    last = [jax.tree.leaves(x[-1]) for x in (one, other)]
    for x, y in zip(*last, strict=True):
        assert np.max(np.abs(np.asarray(x) - np.asarray(y))) > 0.03 * np.max(np.abs(y))


def _assert_equal(one: Any, other: Any) -> None:
    for x, y in zip(one, other, strict=True):
        assert_close(x, y, 0.0)


def _mapped(f: Any, trees: Any) -> list[Any]:
    return [jax.tree.map(f, tree) for tree in trees]


def _transposed(trees: Any) -> list[Any]:
    """Every matrix transposed, under the name of its new shape."""
    names = {"wide": "tall", "tall": "wide", "square": "square"}
    return [{new: tree[old].mT for old, new in names.items()} for tree in trees]


# Shampoo


BASES = {
    "AdamW": functools.partial(optax.adamw, weight_decay=0.1),
    "RMSprop": optax.rmsprop,
    "SGD with momentum": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("base", BASES)
def test_grafted_and_never_refreshed_shampoo_is_its_base_optimizer(base):
    optimizer = curvax.shampoo(
        0.1, refresh=FOREVER, base=BASES[base], matrices="all", weight_dimension_numbers=AXES
    )
    ours, _ = run(optimizer, GRADIENTS, PARAMS)
    _assert_same(ours, run(BASES[base](0.1), GRADIENTS, PARAMS)[0], condition=1.0)


def test_shampoo_that_is_refreshed_is_not_its_base_optimizer():
    optimizer = curvax.shampoo(
        1.0, refresh=2, statistics_every=1, base=optax.sgd, weight_dimension_numbers=AXES
    )
    _assert_different(_run(optimizer), _run(optax.sgd(1.0)))


SAME_ON_BOTH_SIDES = {
    "practical Shampoo": _shampoo(2, root=4, damping="relative", initial=EPS, graft="norm"),
    "Shampoo²": _shampoo(2),
    "original Shampoo": _original(),
    "FOAM": curvax.scale_by_foam(check_every=2, max_damping=1.0, eps=EPS, graft=None),
    "DR-Shampoo": curvax.scale_by_dr_shampoo(check_every=2, threshold=0.3, eps=EPS, graft=None),
}
every_method = pytest.mark.parametrize("method", SAME_ON_BOTH_SIDES)


@every_method
def test_transposing_the_gradient_transposes_the_direction_of_shampoo(method):
    transformation = SAME_ON_BOTH_SIDES[method]
    transposed = _run(transformation, _transposed(GRADIENTS))
    _assert_same(transposed, _transposed(_run(transformation)))


def test_transposing_the_gradient_exchanges_the_sides_of_one_sided_shampoo():
    left, right = _shampoo(2, side="left"), _shampoo(2, side="right")
    transposed = _transposed(_run(left))
    _assert_same(_run(right, _transposed(GRADIENTS)), transposed)
    _assert_different(_run(left, _transposed(GRADIENTS)), transposed)


@every_method
def test_shampoo_commutes_with_rotations(method):
    def rotated(trees: Any) -> list[Any]:
        def sides(x: Any) -> Any:
            u, v = (orthogonal(jax.random.key(i), n, n) for i, n in enumerate(x.shape[-2:]))
            return jnp.asarray(u, x.dtype) @ x @ jnp.asarray(v, x.dtype)

        return _mapped(sides, trees)

    transformation = SAME_ON_BOTH_SIDES[method]
    _assert_same(_run(transformation, rotated(GRADIENTS)), rotated(_run(transformation)))


def test_adagrad_does_not_commute_with_rotations():
    """The negative control."""
    rotation = jnp.asarray(orthogonal(jax.random.key(0), 5, 5), jnp.float32)
    adagrad, gradients = optax.scale_by_rss(), [g["square"] for g in GRADIENTS]
    rotated = _run(adagrad, [rotation @ g for g in gradients])
    _assert_different(rotated, [rotation @ d for d in _run(adagrad, gradients)])


# Scales


def _scaled(trees: Any, exponent: int) -> list[Any]:
    return _mapped(lambda x: jnp.ldexp(x, exponent), trees)


# Refreshed at step 1: before, the direction is the gradient, of whatever scale.
PRACTICAL = {"refresh": EVERY_CHECK, "root": 4, "damping": "relative", "initial": 0.0}


@pytest.mark.parametrize("exponent", [-40, -2, 2, 24])
def test_shampoo_with_relative_damping_ignores_scales_bit_for_bit(exponent):
    """Even powers of two, whose square roots the roots of order 4 have in them."""
    plain = _run(_shampoo(**PRACTICAL))
    _assert_equal(_run(_shampoo(**PRACTICAL), _scaled(GRADIENTS, exponent)), plain)


@pytest.mark.parametrize("exponent", [-3, 1])
def test_shampoo_with_relative_damping_ignores_other_scales_up_to_rounding(exponent):
    transformation = _shampoo(**PRACTICAL)
    _assert_same(_run(transformation, _scaled(GRADIENTS, exponent)), _run(transformation))


@pytest.mark.parametrize("exponent", [-30, -1, 1, 24])
@pytest.mark.parametrize(("root", "graft", "power"), [(2, None, -1), (2, "norm", 1)])
def test_directions_of_shampoo_scale_as_a_power_of_the_gradients(root, graft, power, exponent):
    """`s^(1 - 4/p)`; norm grafting makes it `s`. The powers of two are exact."""
    transformation = _shampoo(**PRACTICAL | {"root": root, "graft": graft})
    scaled = _run(transformation, _scaled(GRADIENTS, exponent))
    _assert_equal(scaled, _scaled(_run(transformation), power * exponent))


@pytest.mark.parametrize("setting", [{"damping": "absolute"}, {"initial": EPS}])
def test_shampoo_does_not_ignore_scales_without_these_settings(setting):
    transformation = _shampoo(**PRACTICAL | setting)
    _assert_different(_run(transformation, _scaled(GRADIENTS, -4)), _run(transformation))


@functools.cache
def _foam_of_scale(scale: float, most: float = 2.0**-2) -> optax.GradientTransformation:
    return curvax.scale_by_foam(
        check_every=2, threshold=0.8, max_damping=scale * most, b2=0.9, eps=scale * EPS, graft=None
    )


def test_foam_does_not_depend_on_scales_if_its_dampings_follow():
    plain, states = _both(_foam_of_scale(1.0))
    scaled, scaled_states = _both(_foam_of_scale(2.0**12), _scaled(GRADIENTS, 6))
    _assert_same(scaled, _scaled(plain, -6))
    assert all(_refreshes(a) == _refreshes(b) for a, b in zip(states, scaled_states, strict=True))
    number = _refreshes(states[-1])
    assert min(number) < STEPS // 2 and max(number) > 1  # decisions each way


def test_the_dampings_of_foam_are_absolute():
    _, states = _both(_foam_of_scale(1.0))
    _, scaled_states = _both(_foam_of_scale(1.0), _scaled(GRADIENTS, -6))
    assert max(_refreshes(states[-1])) > 1
    assert set(_refreshes(scaled_states[-1])) == {1}  # beside eps the gradients are nothing


def test_the_threshold_of_dr_shampoo_does_not_depend_on_scales():
    transformation = curvax.scale_by_dr_shampoo(check_every=2, threshold=0.4, b2=0.9, eps=EPS)
    _, states = _both(transformation)
    for exponent in (-12, 7):
        _, scaled = _both(transformation, _scaled(GRADIENTS, exponent))
        assert all(_refreshes(a) == _refreshes(b) for a, b in zip(states, scaled, strict=True))
    number = _refreshes(states[-1])
    assert min(number) < STEPS // 2 and max(number) > 1  # decisions each way


# Shampoo and AdaGrad, Shampoo and Muon


def test_shampoo_of_one_entry_is_adagrad():
    gradients = gradients_like(jnp.zeros((6, 1, 1)), STEPS)
    adagrad = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
    _assert_same(_run(_original(), gradients), _run(adagrad, gradients), condition=1.0)


def test_original_shampoo_of_diagonal_gradients_is_adagrad():
    def diagonal(x: Any) -> Any:
        return x * jnp.eye(*x.shape[-2:])[(None,) * (x.ndim - 2)]

    adagrad = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
    gradients = _mapped(diagonal, GRADIENTS)
    _assert_same(_run(_original(), gradients), _run(adagrad, gradients))
    _assert_different(_run(_original()), _run(adagrad))


@pytest.mark.parametrize("layout", ["a row", "a column"])
def test_original_shampoo_of_one_row_is_full_matrix_adagrad_between_norms(layout):
    """`D = (ε + Σ‖g‖²)^(-1/4) g (εI + Σgᵀg)^(-1/4)`; on that side alone, with p = 2, AdaGrad."""
    column = layout == "a column"
    rows = gradients_like(jnp.zeros((3, 1, 6)), STEPS)
    gradients = [g.mT if column else g for g in rows]
    shampoo = _run(_original(), gradients)
    adagrad = _run(_original(root=2, side="left" if column else "right"), gradients)
    total, norm = EPS * np.tile(np.eye(6), (3, 1, 1)), np.full((3, 1, 1), EPS)
    for row, *directions in zip(rows, shampoo, adagrad, strict=True):
        g = np.asarray(row, np.float64)
        gram = np.swapaxes(g, -1, -2) @ g
        total, norm = total + gram, norm + np.trace(gram, axis1=-2, axis2=-1)[:, None, None]
        d, q = np.linalg.eigh(total)
        for root, left, ours in zip((4, 2), (norm**-0.25, 1.0), directions, strict=True):
            power = (q * d[:, None] ** (-1 / root)) @ np.swapaxes(q, -1, -2)
            ours = ours.mT if column else ours
            assert_close(ours, left * g @ power, condition=float(np.max(d) / EPS))


def _float64(function: Any) -> list[Any]:
    with jax.enable_x64(True):
        return _run(function(), _mapped(lambda g: np.asarray(g, np.float64), GRADIENTS))


@functools.cache
def _exact_muon() -> list[Any]:
    return _float64(lambda: curvax.scale_by_muon(method="svd", nesterov=False, b1=0.0))


def test_shampoo_with_b2_0_eps_0_is_exact_muon_without_momentum():
    condition = max(float(np.max(np.linalg.cond(g))) for t in GRADIENTS for g in t.values()) ** 2
    assert condition < 1e7  # L has the square of G's
    shampoo = _float64(lambda: _shampoo(1, b2=0.0, eps=0.0, root=4))
    _assert_same(shampoo, _exact_muon(), condition)


@pytest.mark.parametrize("setting", [{"b2": 0.5}, {"eps": 1.0}, {"root": 2}], ids=str)
def test_shampoo_is_not_muon_without_these_settings(setting):
    shampoo = _float64(lambda: _shampoo(1, **{"b2": 0.0, "eps": 0.0, "root": 4} | setting))
    _assert_different(shampoo, _exact_muon())


# Blocks


def test_blocks_of_shampoo_are_matrices_of_their_own():
    """The last one of a row or column may be smaller."""
    size = 3
    whole = {"wide": jnp.ones((3, 5)), "tall": jnp.ones((5, 3)), "square": jnp.ones((6, 6))}
    gradients = gradients_like(whole, STEPS)

    def blocks(trees: Any) -> list[Any]:
        def parts(x: Any) -> list[Any]:
            rows, columns = (range(0, n, size) for n in x.shape)
            return [x[r : r + size, c : c + size] for r in rows for c in columns]

        return [{name: parts(x) for name, x in tree.items()} for tree in trees]

    shampoo = functools.partial(
        curvax.shampoo, 1.0, eps=EPS, refresh=2, statistics_every=1, base=None, matrices="all"
    )
    together, apart = _run(shampoo(block_size=size), gradients), _run(shampoo(), blocks(gradients))
    _assert_same(blocks(together), apart)
    _assert_different(together, _run(shampoo(), gradients))


# FOAM and DR-Shampoo


SHARED = {"eps": EPS, "b2": 0.9, "weight_dimension_numbers": AXES, "weight_decay": 0.1}
METHODS = {
    "foam": _family(
        lambda threshold: curvax.foam(
            1.0, check_every=2, threshold=threshold, max_damping=1.0, **SHARED
        )
    ),
    "dr_shampoo": _family(
        lambda threshold: curvax.dr_shampoo(1.0, check_every=2, threshold=threshold, **SHARED)
    ),
}
# Shampoo as FOAM and DR-Shampoo are it, by the period of its refreshes.
AS_THEY_ARE = _family(
    lambda period: curvax.shampoo(
        1.0,
        root=2,
        refresh=curvax.every(period, offset=1),
        statistics_every=1,
        graft="adam",
        base=None,
        damping="absolute",
        initial=0.0,
        **SHARED,
    )
)


def test_with_an_infinite_threshold_foam_is_stale_shampoo_refreshed_once():
    updates, states = METHODS["foam"](ENDLESS)
    _assert_same(updates, AS_THEY_ARE(FOREVER)[0])
    _assert_different(updates, AS_THEY_ARE(2)[0])
    assert set(_refreshes(states[-1])) == {1}
    assert set(_refreshes(states[-1], "checks")) == {STEPS // 2}


@pytest.mark.parametrize("method", METHODS)
def test_with_a_threshold_next_to_0_it_is_shampoo_refreshed_at_every_check(method):
    updates, states = METHODS[method](NEXT_TO_0)
    _assert_same(updates, AS_THEY_ARE(2)[0])
    assert set(_refreshes(states[-1])) == {STEPS // 2}


@pytest.mark.parametrize("method", METHODS)
def test_with_a_threshold_between_it_is_neither(method):
    updates, states = METHODS[method](0.3)
    _assert_different(updates, AS_THEY_ARE(FOREVER)[0])
    _assert_different(updates, AS_THEY_ARE(2)[0])
    assert min(_refreshes(states[-1])) < STEPS // 2


PERIODS = _family(lambda period: _by_policy(curvax.every(period, offset=1)))
ABLATIONS = {
    "FOAM without adaptive damping": _family(
        lambda t: _by_policy(curvax.policies.foam(2, t, 1.0, adaptive_damping=False))
    ),
    "DR without new eigenvalues": _family(
        lambda t: _by_policy(curvax.policies.diagonal_residual(2, t, update_eigenvalues=False))
    ),
}


@pytest.mark.parametrize("policy", ABLATIONS)
def test_ablated_policies_have_the_same_limits(policy):
    once, at_every_check = PERIODS(FOREVER)[0], PERIODS(2)[0]
    _assert_same(ABLATIONS[policy](ENDLESS)[0], once)
    _assert_same(ABLATIONS[policy](NEXT_TO_0)[0], at_every_check)
    _assert_different(once, at_every_check)


def _with_fixed_singular_vectors() -> list[Any]:
    generator = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        *batch, m, n = shape
        u, v = (orthogonal(jax.random.key(i), order, min(m, n)) for i, order in enumerate((m, n)))
        values = generator.uniform(0.5, 2.0, (*batch, min(m, n)))
        return ((u * values[..., None, :]) @ v.T).astype(np.float32)

    return [{name: drawn(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def test_dr_shampoo_decomposes_once_where_the_singular_vectors_stay():
    """And is Shampoo refreshed at every check all the same; FOAM's `h` sees eigenvalues too."""
    gradients, threshold = _with_fixed_singular_vectors(), 1e-3
    expected, _ = PERIODS(2, gradients)
    residual = _shampoo(curvax.policies.diagonal_residual(2, threshold))
    directions, states = _both(residual, gradients)
    _assert_same(directions, expected)
    assert set(_refreshes(states[-1])) == {1}
    stale, states = ABLATIONS["DR without new eigenvalues"](threshold, gradients)
    _assert_different(stale, expected)
    assert set(_refreshes(states[-1])) == {1}
    _, states = ABLATIONS["FOAM without adaptive damping"](threshold, gradients)
    assert min(_refreshes(states[-1])) > 1


# ASGO


def _asgo(refresh: Any) -> optax.GradientTransformation:
    return curvax.scale_by_asgo(eps=EPS, refresh=refresh)


ASGO_BY_PERIOD = _family(lambda period: _asgo(curvax.every(period, offset=1)))
ASGO_BY_THRESHOLD = {
    "foam": _family(lambda threshold: _asgo(curvax.policies.foam(2, threshold, 1.0))),
    "diagonal_residual": _family(
        lambda threshold: _asgo(curvax.policies.diagonal_residual(2, threshold))
    ),
}


def test_asgo_with_foam_and_an_infinite_threshold_is_asgo_refreshed_once():
    directions, states = ASGO_BY_THRESHOLD["foam"](ENDLESS)
    _assert_same(directions, ASGO_BY_PERIOD(FOREVER)[0])
    _assert_different(directions, ASGO_BY_PERIOD(2)[0])
    assert set(_refreshes(states[-1])) == {1}


@pytest.mark.parametrize("policy", ASGO_BY_THRESHOLD)
def test_asgo_with_a_threshold_next_to_0_is_asgo_refreshed_at_every_check(policy):
    directions, states = ASGO_BY_THRESHOLD[policy](NEXT_TO_0)
    _assert_same(directions, ASGO_BY_PERIOD(2)[0])
    assert set(_refreshes(states[-1])) == {STEPS // 2}


@pytest.mark.parametrize("side", ["left", "right"])
def test_asgo_is_shampoo_of_order_2_on_one_side(side):
    asgo = _run(curvax.scale_by_asgo(b1=0.8, b2=0.9, eps=EPS, side=side, refresh=2))
    left, right = (_run(_shampoo(EVERY_CHECK, b1=0.8, side=x)) for x in ("left", "right"))
    shampoo, other = (left, right) if side == "left" else (right, left)
    _assert_equal(asgo, shampoo)
    _assert_different(asgo, other)


# DASGO


ONE_ROW = {"row": jnp.zeros((1, 6)), "rows": jnp.zeros((3, 1, 5)), "vector": jnp.zeros(4)}
ONE_ROW_AXES = {"rows": curvax.MatrixAxes(-2, -1)}


def _dasgo(**settings: Any) -> Any:
    axes = ONE_ROW_AXES if settings.pop("one_row") else AXES
    return curvax.dasgo(1.0, weight_dimension_numbers=axes, **settings)


def test_on_a_matrix_with_one_row_dasgo_is_adam_without_bias_correction():
    """`m / √v` from Optax's Adam, whose corrections are taken out again."""
    b1, b2 = 0.8, 0.9
    gradients = gradients_like(ONE_ROW, STEPS)
    updates = _run(_dasgo(one_row=True, b1=b1, b2=b2, eps=0.0), gradients)
    adam = _run(optax.scale_by_adam(b1, b2, eps=0.0), gradients)
    expected = [
        jax.tree.map(lambda d, t=t: -d * (1 - b1**t) / np.sqrt(1 - b2**t), direction)
        for t, direction in enumerate(adam, start=1)
    ]
    _assert_same(updates, expected, condition=1.0)


def test_the_epsilon_of_dasgo_is_inside_the_root():
    gradients = gradients_like(ONE_ROW, STEPS)
    updates = _run(_dasgo(one_row=True, b1=0.0, b2=0.9, eps=EPS), gradients)
    inside, outside = (
        _mapped(jnp.negative, _run(optax.scale_by_rms(0.9, EPS, eps_in_sqrt=where), gradients))
        for where in (True, False)
    )
    _assert_same(updates, inside, condition=1.0)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        _assert_same(updates, outside, condition=1.0)


def test_on_matrices_with_more_rows_dasgo_is_not_adam():
    updates = _run(_dasgo(one_row=False, b1=0.0, b2=0.9, eps=EPS))
    rms = _run(optax.scale_by_rms(0.9, EPS))
    _assert_different(updates, _mapped(jnp.negative, rms))


def test_on_gradients_whose_columns_do_not_overlap_dasgo_is_right_sided_asgo():
    """Then `GᵀG` is diagonal; DASGO does not see more of it."""

    def apart(x: Any) -> Any:
        rows, columns = (np.arange(n) for n in x.shape[-2:])
        mask = rows[:, None] % len(columns) == columns
        return x * np.broadcast_to(mask, x.shape)

    settings = {"b1": 0.8, "b2": 0.9, "eps": EPS}
    asgo, dasgo = curvax.scale_by_asgo(side="right", **settings), curvax.scale_by_dasgo(**settings)
    gradients = _mapped(apart, GRADIENTS)
    _assert_same(_run(dasgo, gradients), _run(asgo, gradients))
    _assert_different(_run(dasgo), _run(asgo))
